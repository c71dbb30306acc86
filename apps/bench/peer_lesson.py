"""Time the lesson's one file at speed on workload W1; `apps/bench/speed.py --peer lesson` runs it beside the full code.

    python apps/bench/peer_lesson.py runs/bench/3b --steps 3
    torchrun --nproc_per_node 4 apps/bench/peer_lesson.py runs/bench/7b --steps 3 --prompts 64

The model, the pictures, the length of the completions, beta and the coin flips are those of W1; all else is what
lesson/grpo_at_speed.py does by itself. Prints "STEP seconds GiB parts" for every step, including the first.
"""

import json
import pathlib
import random
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import tyro

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
import speed

from lesson import grpo_at_speed as lesson


@dataclass
class Config:
    """Time the lesson's one file on workload W1."""

    model: tyro.conf.Positional[str]
    """Folder of the model with random weights."""
    steps: int = 3
    """Number of steps, including the warm-up step, which comes first."""
    prompts: int = 32
    """Number of prompts per step, on all processes together, with 8 completions each."""


def main(cfg: Config) -> None:
    work, folder = speed.WORKLOADS["W1"], pathlib.Path(cfg.model).parent
    data = speed.make_data(folder, work["side"], cfg.prompts * (cfg.steps + 1))
    take_step = lesson.step

    def timed(run: lesson.Run, number: int, rows: list[dict[str, Any]]) -> dict[str, float]:
        """Take a step and print its time."""
        started = time.perf_counter()
        metrics = take_step(run, number, rows)
        parts = {name.removeprefix("seconds/"): value for name, value in metrics.items() if "seconds/" in name}
        if lesson.dist.get_rank() == 0:
            seconds, shown = time.perf_counter() - started, json.dumps(parts | {"length": metrics["length"]})
            print(f"STEP {seconds:.2f} {metrics['gib']:.1f} {shown}", flush=True)
        return metrics

    lesson.step, lesson.reward = timed, lambda *_: float(random.random() < 0.5)
    lesson.save = lesson.export = lambda *_: None
    settings = lesson.Settings(model=cfg.model, data=data, output=str(folder / "lesson"), prompts=cfg.prompts)
    lesson.launch(replace(settings, steps=cfg.steps, beta=work["beta"], max_tokens=work["tokens"]))


if __name__ == "__main__":
    main(tyro.cli(Config))
