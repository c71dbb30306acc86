"""Does a long run stay flat? Memory, open files, threads, the run's folder and the pace, at its start and its end.

    python apps/bench/long.py                    # 2,000 small steps of the demo's model, with all that a run writes
    python apps/bench/long.py --turns            # the same with pictures that a tool enlarges (examples/zoom.py)

It makes the model and rows of `./run.sh` or `./run.sh zoom` where they are missing, trains on this machine, and looks
at each process of the run every few seconds, in /proc. Prints a table: the first tenth of the steps, without the very
first ones, a tenth in the middle and the last one. `looks.jsonl` in the run's folder has all that was seen.
"""

import contextlib
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).parents[2]
sys.path.append(str(ROOT))
from common import cli
from common.files import read_jsonl

EVERY = 5.0  # seconds between two looks
PAGE = 4096  # bytes


@dataclass
class Config:
    """Train for many steps, and compare their end with their start."""

    steps: int = 2000
    """Number of steps."""
    turns: bool = False
    """Train with turns, each with a picture that a tool enlarges."""
    output: str = "runs/bench/long"
    """Folder for the run, which is written anew."""

    def __post_init__(self) -> None:
        if self.steps < 100:
            raise ValueError("steps must be at least 100: a tenth of them is compared with another")


@dataclass
class Look:
    """What a process of the run had at one time."""

    step: int
    name: str  # the n-th process of its program
    mib: float  # resident memory in MiB, with the pages that it shares
    files: int
    threads: int


def prepare(turns: bool) -> list[str]:
    """Make the model and the rows, and return the flags that name them, with those of the demo."""
    folder = ROOT / "runs" / "tiny" / ("zoom-1" if turns else "count-0")
    if not (folder / "model").is_dir():
        module = ["apps.demo.zoom", "--seed", "1"] if turns else ["apps.demo.tiny", "--task", "count", "--seed", "0"]
        subprocess.run([sys.executable, "-m", *module, "--output", str(folder)], cwd=ROOT, check=True)
    rows = "/data.jsonl" if turns else ""
    files = f"--model {folder}/model --data {folder}/train{rows} --eval_data {folder}/test{rows}"
    if turns:
        own = (
            "--plugin examples/zoom.py --env zoom --max_turns 2 --task vqa --template recipes/zoom.jinja --train_vision"
        )
        own += " --min_pixels 1764 --max_pixels 1764 --max_prompt_length 48 --max_completion_length 24"
    else:
        own = "--task count --max_completion_length 64"
    return f"{files} {own} --learning_rate 1e-5".split()


def descendants(pid: int) -> list[int]:
    """Return a process and those that it has started, in the order of their numbers."""
    children: dict[int, list[int]] = defaultdict(list)
    for status in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = status.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        children[int(after_name[1])].append(int(status.parent.name))
    found, todo = [], [pid]
    while todo:
        found.append(todo.pop())
        todo += children[found[-1]]
    return sorted(found)


def look(pid: int, step: int) -> list[Look]:
    """Return what each process of the run has now."""
    looks: list[Look] = []
    for each in descendants(pid):
        proc = pathlib.Path("/proc", str(each))
        try:
            pages = int((proc / "statm").read_text().split()[1])
            files, threads = len([*(proc / "fd").iterdir()]), len([*(proc / "task").iterdir()])
        except (FileNotFoundError, ProcessLookupError):
            continue
        looks.append(Look(step, f"process {len(looks)}", pages * PAGE / 2**20, files, threads))
    return looks


def last_step(metrics: pathlib.Path) -> int:
    """Return the last step that the run has logged."""
    return max((row["step"] for row in read_jsonl(metrics)), default=0) if metrics.exists() else 0


def size_of(folder: pathlib.Path) -> float:
    """Return the size of all files in `folder` in MiB, without those that the run removes at this moment."""
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                size += os.stat(os.path.join(place, name)).st_size
    return size / 2**20


def show(cfg: Config, looks: list[Look], sizes: list[tuple[int, float]], seconds: list[float]) -> None:
    """Print a line for each process, one for the folder and one for the pace."""
    tenth = cfg.steps // 10
    parts = [range(end - tenth // 2, end + 1) for end in (tenth, cfg.steps // 2, cfg.steps)]
    print(f"| | {' | '.join(f'steps {steps[0]} to {steps[-1]}' for steps in parts)} |\n|---|---|---|---|")
    for name in dict.fromkeys(each.name for each in looks):
        of_process = [each for each in looks if each.name == name]
        print(f"| {name} | {' | '.join(middle(of_process, steps) for steps in parts)} |")
    folder = (statistics.median([mib for step, mib in sizes if step in steps] or [0]) for steps in parts)
    print(f"| folder of the run, MiB | {' | '.join(f'{mib:.1f}' for mib in folder)} |")
    pace = (statistics.median(seconds[steps[0] - 1 : steps[-1]]) for steps in parts)
    print(f"| seconds a step, median | {' | '.join(f'{each:.3f}' for each in pace)} |")


def middle(looks: list[Look], steps: range) -> str:
    """Return the medians of what a process had in these steps."""
    some = [each for each in looks if each.step in steps]
    if not some:
        return "-"
    mib, files, threads = (statistics.median(getattr(each, of) for each in some) for of in ("mib", "files", "threads"))
    return f"{mib:,.0f} MiB, {files:.0f} files, {threads:.0f} threads"


def main(cfg: Config) -> None:
    flags = prepare(cfg.turns)
    folder = pathlib.Path(cfg.output)
    shutil.rmtree(folder, ignore_errors=True)
    flags += ["--output", str(folder / "run"), "--prompts_per_step", "4", "--num_generations", "4"]
    flags += ["--max_steps", str(cfg.steps), "--eval_every", "200", "--save_every", "100", "--report_every", "10"]
    folder.mkdir(parents=True)
    looks: list[Look] = []
    sizes: list[tuple[int, float]] = []
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen([sys.executable, "grpo.py", *flags], cwd=ROOT, stdout=log, stderr=log)
        while process.poll() is None:
            step = last_step(folder / "run" / "metrics.jsonl")
            looks += look(process.pid, step)
            sizes.append((step, size_of(folder / "run")))
            time.sleep(EVERY)
    if process.returncode:
        sys.exit(f"error: the run has failed with status {process.returncode}: see {folder / 'log.txt'}")
    (folder / "looks.jsonl").write_text("".join(json.dumps(vars(each)) + "\n" for each in looks))
    rows = read_jsonl(folder / "run" / "metrics.jsonl")
    show(cfg, looks, sizes, [row["step_time"] for row in rows if "step_time" in row])


if __name__ == "__main__":
    cli.run(main, cli.parse(Config))
