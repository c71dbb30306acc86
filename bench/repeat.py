"""What repeats: the same command and seed twice, and once more resumed from the middle, metric by metric.

    python bench/repeat.py --shape 3b --flags lora_rank=64
    python bench/repeat.py --shape tiny --processes 2

Random weights, pictures of noise and rewards that follow from a completion's text, so that a single token sampled
differently shows in the reward. Every run is a process of its own, started as a user starts it.
"""

import json
import pathlib
import shutil
import subprocess
import sys
from dataclasses import dataclass

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
import speed

import cli
from report import read_rows

CLOCK = ("time/", "step_time", "tokens_per_second", "mfu", "memory_gib")  # what is measured and never repeats


@dataclass
class Config:
    """Compare whole runs that should be the same."""

    shape: speed.Shape = "tiny"
    """The model's shape."""
    steps: int = 6
    """Steps of each run; the third goes on from the checkpoint of half of them."""
    processes: int = 1
    """Processes of each run."""
    prompts: int = 8
    """Prompts a step, of 8 completions each."""
    tokens: int = 128
    """Most tokens of a completion."""
    folder: str = "runs/bench"
    """Where model, data and runs are written."""
    flags: tuple[str, ...] = ()
    """Further flags of grpo.py, as NAME=VALUE."""

    def __post_init__(self) -> None:
        if self.steps < 2 or min(self.processes, self.prompts, self.tokens) < 1:
            raise ValueError("steps must be at least 2; processes, prompts and tokens at least 1")


def start(cfg: Config, output: pathlib.Path, *more: str) -> None:
    """One run of grpo.py."""
    folder = pathlib.Path(cfg.folder)
    data = speed.make_data(folder, 448, cfg.prompts * cfg.steps)
    flags = {"model": folder / cfg.shape, "data": data, "output": output, "max_steps": cfg.steps, "beta": 0.01}
    flags |= {"prompts_per_step": cfg.prompts, "max_completion_length": cfg.tokens, "learning_rate": 1e-5}
    flags |= {"save_every": cfg.steps // 2, "max_prompt_length": 512, **dict(flag.split("=", 1) for flag in cfg.flags)}
    launch = [sys.executable]
    if cfg.processes > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={cfg.processes}"]
    switches = {"true": "--{}", "false": "--no-{}"}
    given = [switches.get(str(value), "--{}={}").format(name, value) for name, value in flags.items()]
    command = [*launch, str(HERE.parent / "grpo.py"), *given]
    done = subprocess.run([*command, "--reward=count=0", f"--reward={HERE}/coin.py:coin", *more], check=False)
    if done.returncode:
        raise cli.RunStopped(f"the run in {str(output)!r} ended with status {done.returncode}", 1)


def compare(one: pathlib.Path, two: pathlib.Path) -> str:
    """Which metrics are the same in all steps, and from which step on others are not and by how much."""
    rows = list(zip(read_rows(one / "metrics.jsonl"), read_rows(two / "metrics.jsonl"), strict=True))
    names = [name for name in rows[0][0] if not name.startswith(CLOCK)]
    apart = {name: [row["step"] for row, other in rows if row[name] != other[name]] for name in names}
    same = [name for name in names if not apart[name]]
    lines = [f"the same in all {len(rows)} steps: {len(same)} of {len(names)} metrics"]
    for name in names:
        if apart[name]:
            most = max(abs(row[name] - other[name]) / max(abs(row[name]), 1e-12) for row, other in rows)
            lines.append(f"  {name:36} differs from step {apart[name][0]} on, by {most:.2g} of itself at most")
    return "\n".join(lines)


def main(cfg: Config) -> None:
    folder = pathlib.Path(cfg.folder)
    speed.make_model(folder / cfg.shape, cfg.shape)
    first, second, resumed = (folder / f"repeat-{name}" for name in ("first", "second", "resumed"))
    for run in (first, second):
        start(cfg, run, "--overwrite")
    shutil.rmtree(resumed, ignore_errors=True)
    shutil.copytree(first, resumed, ignore=shutil.ignore_patterns(f"checkpoint-{cfg.steps}", "final"))
    start(cfg, resumed, "--resume")
    print(json.dumps({"shape": cfg.shape, "flags": cfg.flags, "processes": cfg.processes}))
    print("the same command again:", compare(first, second))
    print(f"resumed after step {cfg.steps // 2}:", compare(first, resumed))


if __name__ == "__main__":
    cli.run(main, Config)
