"""W-tail: completions whose lengths spread over two orders of magnitude, with and without partial rollouts.

    python apps/bench/tail.py                                            # one GPU, 64 prompts x 8, Qwen2.5-VL-3B
    torchrun --nproc_per_node 4 apps/bench/tail.py --prompts 256
    python apps/bench/tail.py --shape tiny --prompts 8 --median 40 --cap 400 --results runs --draw tail.png   # CPU

The lengths are drawn from a log-normal distribution, and fixed by the seed for each prompt and completion: a sampler
without stop tokens gets them as limits, one request per completion. Every value of `--oversample` is measured in the
same process, one after the other, with the same number of updates, after as many steps as it takes until completions of
several steps are in flight. The results are written to docs/results/.
"""

import itertools
import pathlib
import sys
import time
from concurrent.futures import wait
from dataclasses import asdict, dataclass, replace

import matplotlib.pyplot as plt
import numpy as np
import torch

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
import speed
from lengths import log_normal_length

import grpo
from common import cli, console, distributed
from common.records import Output, Request, Sampling
from data import load_split
from rollout import Engine
from sampling.hf_engine import HFEngine
from training.prompt_stream import PromptStream
from training.run import Run, collector_of


@dataclass
class Config(speed.BenchFlags):
    """Measure steps whose completions differ much in length."""

    prompts: int = 64
    """Number of prompts per step, over all processes."""
    oversample: tuple[float, ...] = (1.0, 1.5)
    """The values of grpo.py's --oversample to measure."""
    median: float = 700.0
    """Median of the lengths in tokens."""
    sigma: float = 1.0
    """Standard deviation of the logarithm of the lengths."""
    cap: int = 8192
    """Maximum length in tokens."""
    warm_up: int = 3
    """Number of steps before those that are measured, for each value above 1. They sample, but do not train."""
    steps: int = 4
    """Number of measured steps, for each value."""
    draw: str | None = None
    """Also draw the timelines of the last two steps of the first and the last value to this PNG file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.oversample:
            raise ValueError("oversample needs at least one value")
        for oversample in self.oversample:
            self.training_config("rows", oversample)

    def training_config(self, data: str, oversample: float) -> grpo.Config:
        """Return the settings of a run with this value of --oversample. Raises ValueError for it or for bad `flags`."""
        return speed.training_config(
            self,
            data,
            max_completion_length=self.cap,
            max_prompt_length=512,
            oversample=oversample,
            max_steps=1,
            report_every=0,
        )


class Occupancy:
    """How many sequences a sampler runs at which time: `points` has pairs of seconds and sequences."""

    def __init__(self, engine: Engine):
        self.points: list[tuple[float, int]] = []
        if isinstance(engine, HFEngine):
            self._watch_transformers(engine)
        else:
            self._watch_vllm(engine)

    def _watch_vllm(self, engine: Engine) -> None:
        llm_engine = engine.llm.llm_engine
        step, scheduler = llm_engine.step, llm_engine.engine_core.engine_core.scheduler

        def timed_step():
            outputs = step()
            self.points.append((time.perf_counter(), len(scheduler.running)))
            return outputs

        llm_engine.step = timed_step

    def _watch_transformers(self, engine: HFEngine) -> None:
        decode, forward, times = engine._decode, engine._forward, []

        def timed_forward(**inputs):
            times.append(time.perf_counter())
            return forward(**inputs)

        def timed_decode(*args):
            times.clear()
            result = decode(*args)
            lengths = torch.tensor([len(output.ids) for output in result[0]])
            self.points += [(at, int((lengths > token).sum())) for token, at in enumerate(times)]
            return result

        engine._decode, engine._forward = timed_decode, timed_forward

    def thin_share(self, since: float, full: int) -> float:
        """Return the share of the sampling time since then in which less than a quarter of `full` sequences run."""
        points = [(at, running) for at, running in self.points if at >= since]
        spans = [(end - at, running) for (at, running), (end, _) in itertools.pairwise(points) if running]
        thin = sum(span for span, running in spans if running < full / 4)
        return thin / sum(span for span, _ in spans) if spans else 0.0


class ForcedLengths:
    """Lets `engine` end each completion at a length that depends on its prompt's seed and its index alone."""

    def __init__(self, engine: Engine, cfg: Config):
        self.cfg, self._generate = cfg, engine.generate
        engine.stop, engine.generate = engine.stop[:0], self.generate

    def generate(self, requests: list[Request], sampling: Sampling, **others: object) -> list[Output]:
        cfg = self.cfg
        lengths = [log_normal_length((each.seed, each.index), cfg.median, cfg.sigma, cfg.cap) for each in requests]
        pairs = zip(requests, lengths)
        limited = [replace(each, max_tokens=length - len(each.tokens)) for each, length in pairs]
        return self._generate(limited, sampling, **others)


def restart(run: Run, data: str, oversample: float, steps: int) -> None:
    """Let `run` begin anew with this value of --oversample, and with its first prompts encoded."""
    cfg, old = run.cfg, run.collector
    cfg.oversample, cfg.max_steps = oversample, 10 * steps
    stream = PromptStream(load_split(cfg, data, "count", old.stream.processor), old.stream.processor, cfg.seed)
    make = collector_of(cfg, {})
    run.step, run.collector = 0, make(cfg, stream, old.engine, old.scorer, old.clock, old.interrupted)
    run.collector.prefetch(0)
    wait(stream.prefetched.values())


def sample_only(run: Run) -> None:
    """Sample what a step would train on. After a few such steps, completions of several steps are in flight."""
    run.collector.collect(run.policy, grpo.advantages_of, run.step)
    run.step += 1
    run.collector.features.clear()
    wait(run.collector.stream.prefetched.values())  # an update would take longer than encoding the next prompts
    speed.print_times("sampling only", {f"time/{name}": sum(laps) for name, laps in run.collector.clock.laps.items()})


def measure(run: Run, data: str, oversample: float, cfg: Config, occupancy: Occupancy) -> dict:
    """Return the mean metrics of the measured steps with this value of --oversample, and their timeline."""
    warm_up = cfg.warm_up if oversample > 1 else 0
    steps = warm_up + cfg.steps
    restart(run, data, oversample, steps)
    measured, timeline = [], []
    full = min(run.cfg.vllm_sequences, cfg.prompts * cfg.generations // distributed.world_size())
    for step in console.progress(range(steps), f"oversample {oversample:g}", unit="step"):
        started, occupancy.points = time.perf_counter(), []
        if step < warm_up:
            sample_only(run)
            continue
        metrics = speed.take_step(run, f"oversample {oversample:g} step {step}")
        metrics["tokens"] = metrics["tokens_per_second"] * metrics["step_time"]
        metrics["thin_share"] = occupancy.thin_share(started, full)
        measured.append(metrics)
        timeline.append([(round(at - started, 2), running) for at, running in changes(occupancy.points)])
        timeline[-1].append((metrics["step_time"], 0))
    numbers = {key for key in measured[0] if np.isfinite(measured[0][key])}
    result = {key: float(np.nanmean([each[key] for each in measured])) for key in sorted(numbers)}
    result["tokens_per_second"] = sum(each["tokens"] for each in measured) / sum(each["step_time"] for each in measured)
    return result | {"oversample": oversample, "timeline": timeline}


def changes(points: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return the first and the last point, and those at which the number of sequences changes."""
    changed = [point for before, point in itertools.pairwise(points) if point[1] != before[1]]
    return [*points[:1], *changed, *points[-1:]]


def draw(results: list[dict], path: str, title: str) -> None:
    """Plot the number of running sequences over time, in the last two steps of the first and the last result."""
    figure, axes = plt.subplots(2, 1, figsize=(9, 4.6), sharex=True, sharey=True, layout="constrained")
    for axis, result in zip(axes, (results[0], results[-1])):
        start = 0.0
        for step in result["timeline"][-2:]:
            *points, (end, _) = step
            at, running = np.array(points).T
            sampled = at[-1]
            axis.fill_between(start + at, running, step="post", color="#4878a8", lw=0, label="sequences being sampled")
            axis.axvspan(start + sampled, start + end, color="#e8a33d", alpha=0.55, lw=0, label="training")
            start += end
            axis.axvline(start, color="black", lw=0.8)
        tokens = result["tokens_per_second"]
        axis.set_title(f"--oversample {result['oversample']:g}: {tokens:,.0f} trained tokens per second", loc="left")
        axis.set_ylabel("sequences")
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles[:2], labels[:2], loc="outside lower right", ncols=2, frameon=False)
    axes[1].set_xlabel("seconds, two steps")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)


def show(results: list[dict]) -> None:
    """Print a table with one line per value."""
    first = results[0]["tokens_per_second"]
    keys = ("step_time", "time/rollout", "time/train", "tokens", "tokens_per_second", "thin_share", "idle/rollout")
    print(f"\n{'oversample':>12}" + "".join(f"{key:>20}" for key in (*keys, "ratio")))
    for result in results:
        cells = [*(result[key] for key in keys), result["tokens_per_second"] / first]
        print(f"{result['oversample']:12g}" + "".join(f"{cell:20.4g}" for cell in cells))


def main(cfg: Config) -> None:
    side = 84 if cfg.shape in speed.TINY else 448
    data = speed.prepare(pathlib.Path(cfg.folder), cfg.shape, {side}, 4 * cfg.prompts)[side]
    run = grpo.set_up(cfg.training_config(data, max(cfg.oversample)))
    ForcedLengths(run.collector.engine, cfg)
    restart(run, data, oversample=1.0, steps=1)
    speed.take_step(run, "compiling")
    occupancy = Occupancy(run.collector.engine)
    results = [measure(run, data, oversample, cfg, occupancy) for oversample in cfg.oversample]
    if console.is_main():
        show(results)
        lengths = f"lengths: median {cfg.median:g}, σ {cfg.sigma:g}, at most {cfg.cap}"
        numbers = [{name: value for name, value in result.items() if name != "timeline"} for result in results]
        report = speed.provenance() | {"settings": asdict(cfg), "oversample": numbers}
        speed.write_report(report, cfg.results, "tail")
        if cfg.draw:
            model = f"{cfg.shape} model on {report['gpus']} x {report['machine']}, {report['date']}"
            title = f"{model}; {cfg.prompts} prompts x {cfg.generations}; {lengths}"
            draw(results, cfg.draw, title)


if __name__ == "__main__":
    cli.run(main, cli.parse(Config))
