"""Measure steps whose completions have three turns, with a new picture after each of the first two.

    python apps/bench/turns.py                                            # one GPU, 32 prompts x 8, Qwen2.5-VL-3B
    python apps/bench/turns.py --shape tiny --prompts 2 --turn_tokens 8 --results runs   # CPU

The model and the pictures are those of apps/bench/speed.py. Measured in one process: W1; plain steps of `--turn_tokens`
tokens; and steps with turns of exactly as many, and crops of 448 pixels that differ between episodes. The update's
`update/of_prediction` is its time divided by what its FLOPs predict at the MFU of W1's update. `rollout/of_plain` is
the time of its rollout divided by that of three plain rollouts. The results are written to docs/results/.
"""

import pathlib
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
import speed

import grpo
from common import cli, console, plugins
from common.records import Output, Request, Sampling
from data import load_split, processor_for
from rollout import Engine
from training.prompt_stream import PromptStream
from training.run import Run

TURNS, W1_TOKENS = 3, 512


@dataclass
class Config(speed.BenchFlags):
    """Measure steps with completions of three turns."""

    turn_tokens: int = 170
    """Number of tokens that are sampled in each turn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.turn_tokens < 2:
            raise ValueError("turn_tokens must be at least 2")
        self.training_config("rows")

    def training_config(self, data: str) -> grpo.Config:
        """Return the settings of a run that has room for W1 and for all turns. Raises ValueError for bad `flags`."""
        return speed.training_config(
            self,
            data,
            env="crop",
            max_turns=TURNS,
            max_completion_length=max(W1_TOKENS, TURNS * self.turn_tokens),
            max_prompt_length=1280,
            beta=speed.WORKLOADS["W1"]["beta"],
            max_steps=3 * (self.steps + 1),
            report_every=1000,
        )


def force_turns(engine: Engine, tokens: int) -> None:
    """Let every turn end after `tokens` tokens, as if the last one were a stop token."""
    generate = engine.generate

    def limited(request: Request | None) -> Request | None:
        return request and replace(request, max_tokens=min(request.max_tokens, tokens))

    def full_turns(requests: list[Request], sampling: Sampling, then: Callable) -> list[Output]:
        def full_then(i: int, output: Output) -> Request | None:
            return limited(then(i, replace(output, reason="stop")))

        return generate([*map(limited, requests)], sampling, full_then)

    engine.generate = full_turns  # type: ignore[method-assign]


def measure(run: Run, data: str, cfg: Config, name: str) -> dict[str, float]:
    """Return the mean metrics of `cfg.steps` steps, with the environment of `run.cfg`, after a warm-up step."""
    processor = processor_for(run.cfg)
    run.collector.stream = PromptStream(load_split(run.cfg, data, "count", processor), processor, run.cfg.seed)
    run.collector.position = 0
    measured = [speed.take_step(run, f"{name} step {number}") for number in range(cfg.steps + 1)]
    keys = [key for key in measured[-1] if "time" in key or "turn" in key or key in ("mfu", "memory_gib")]
    keys += ["completions/mean_length", "sampling/logp_difference_mean"]
    return {key: float(np.mean([metrics[key] for metrics in measured[1:]])) for key in keys}


def main(cfg: Config) -> None:
    plugins.import_file(str(HERE / "crop.py"))
    side = 84 if cfg.shape in speed.TINY else 448
    data = speed.prepare(pathlib.Path(cfg.folder), cfg.shape, {side}, cfg.prompts * (cfg.steps + 1))[side]
    run = grpo.set_up(cfg.training_config(data))
    run.collector.engine.stop = run.collector.engine.stop[:0]
    results = {}
    works = {"W1": (None, W1_TOKENS), "plain": (None, cfg.turn_tokens), "turns": ("crop", TURNS * cfg.turn_tokens)}
    for name, (run.cfg.env, run.cfg.max_completion_length) in works.items():
        if run.cfg.env:
            force_turns(run.collector.engine, cfg.turn_tokens)
        results[name] = measure(run, data, cfg, name)
    turns = results["turns"]
    turns["update/of_prediction"] = results["W1"]["mfu"] / turns["mfu"]
    turns["rollout/of_plain"] = turns["time/rollout"] / (TURNS * results["plain"]["time/rollout"])
    if console.is_main():
        report = speed.provenance() | {"settings": asdict(cfg), "workloads": results}
        speed.write_report(report, cfg.results, "turns")
        print(f"\n{'':34}" + "".join(f"{name:>12}" for name in results))
        for key in sorted(turns):
            print(f"{key:34}" + "".join(f"{result.get(key, np.nan):12.4f}" for result in results.values()))


if __name__ == "__main__":
    cli.run(main, cli.parse(Config))
