"""Measure weak scaling over the GPUs of one machine.

    python apps/bench/scale.py --gpus 1 2 4                              # W1 with the 3B shape: 32 prompts per GPU
    python apps/bench/scale.py --gpus 4 --shape 7b --prompts 16 --peer trl   # then TRL on the same GPUs; or verl

The results are written to docs/results/.
"""

import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]
import speed

from common import cli, errors

ROWS = ("step_time", "time/sync", "time/prompts", "time/rollout", "idle/rollout", "time/reward", "time/sleep")
ROWS += ("time/reference", "time/train", "time/optimizer", "mfu", "memory_gib", "completions_per_second")


@dataclass
class Config:
    """Measure how training steps scale over the GPUs of this machine."""

    gpus: tuple[int, ...] = (1, 2, 4)
    """Numbers of GPUs to measure, one after another."""
    shape: speed.Shape = "3b"
    """Shape of the model, as defined in apps/bench/speed.py."""
    workload: Literal["W1", "W1-nokl", "W1-long", "W1-short", "small"] = "W1"
    """Workload, as defined in apps/bench/speed.py."""
    prompts: int = 32
    """Number of prompts per step and GPU, with 8 completions each."""
    steps: int = 2
    """Number of measured steps, after one warm-up step."""
    peer: Literal["trl", "verl"] | None = None
    """Another trainer to run afterwards, on the last number of GPUs in `gpus` and with a frozen vision tower."""
    flags: tuple[str, ...] = ()
    """Further flags for grpo.py, as NAME=VALUE."""
    folder: str = "runs/bench"
    """Folder for the model, the data and the runs."""
    results: str = str(HERE.parents[1] / "docs" / "results")
    """Folder for the JSON file with the results."""

    def __post_init__(self) -> None:
        if not self.gpus or min(*self.gpus, self.prompts, self.steps) < 1:
            raise ValueError("gpus, prompts and steps must be at least 1")
        for gpus in self.gpus:  # checks the flags before any process starts
            speed.Config(self.shape, (self.workload,), self.steps, self.prompts * gpus, flags=self.flags)


def launch(gpus: int, script: str, *arguments: object, torchrun: bool = True) -> Iterator[str]:
    """Run `script` on `gpus` GPUs; print and yield the lines of its standard output.

    `torchrun`: start a process for each GPU; a script that does so itself is started once. Raises RunStopped if the
    exit status is not 0.
    """
    distributed_run = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}", "--"]
    command = [sys.executable, *(distributed_run if torchrun else []), str(HERE / script), *map(str, arguments)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            yield line
    if process.returncode:
        raise errors.RunStopped(f"bench/{script} on {gpus} GPUs ended with status {process.returncode}", 1)


def measure(cfg: Config, gpus: int) -> dict:
    """Run apps/bench/speed.py on `gpus` GPUs and return its results."""
    folder = pathlib.Path(cfg.folder) / f"on-{gpus}"
    arguments = ["--shape", cfg.shape, "--workloads", cfg.workload, "--steps", cfg.steps]
    arguments += ["--prompts", cfg.prompts * gpus, "--folder", cfg.folder, "--results", folder]
    arguments += ["--flags", *cfg.flags] if cfg.flags else []
    list(launch(gpus, "speed.py", *arguments))
    return json.loads(max(folder.glob("*.json"), key=os.path.getmtime).read_text())


def measure_peer(cfg: Config, gpus: int, ours: float) -> Iterator[dict]:
    """Run the other trainer on `gpus` GPUs and yield its results after each step.

    The results hold the seconds of each step, the memory in GiB in use on the first GPU after each step, and the ratio
    of the mean step time, without the warm-up step, to `ours`.
    """
    work, model = speed.WORKLOADS[cfg.workload], pathlib.Path(cfg.folder) / cfg.shape
    result = {"name": cfg.peer, "gpus": gpus, "wanted": cfg.steps + 1, "steps": [], "gib": []}
    arguments = [model, "--steps", cfg.steps + 1, "--side", work["side"], "--tokens", work["tokens"]]
    arguments += ["--beta", work["beta"]]
    if cfg.peer == "trl":
        lines = launch(gpus, "peer_trl.py", *arguments, "--prompts", cfg.prompts)
    else:  # verl counts the prompts of all GPUs
        arguments += ["--prompts", cfg.prompts * gpus, "--gpus", gpus]
        lines = launch(gpus, "peer_verl.py", *arguments, torchrun=False)
    for line in lines:
        if line.startswith("STEP"):
            result["steps"].append(float(line.split()[1]))
            result["gib"].append(float(line.split()[2]))
            if len(result["steps"]) > 1:
                result["ratio"] = statistics.mean(result["steps"][1:]) / ours
            yield result


def show(results: dict[int, dict], workload: str) -> None:
    """Print a table with one column per number of GPUs. The last row is the step time relative to the first column."""
    columns = {gpus: result["workloads"][workload] for gpus, result in results.items()}
    first = next(iter(columns.values()))
    print(f"\n{'GPUs':24}" + "".join(f"{gpus:>12}" for gpus in columns))
    for row in ROWS:
        print(f"{row:24}" + "".join(f"{column.get(row, float('nan')):12.3f}" for column in columns.values()))
    ratios = (column["step_time"] / first["step_time"] for column in columns.values())
    print(f"{'step, relative':24}" + "".join(f"{ratio:12.3f}" for ratio in ratios))


def main(cfg: Config) -> None:
    report = {"config": dataclasses.asdict(cfg) | {"folder": None, "results": None}, "gpus": {}}
    pathlib.Path(cfg.results).mkdir(parents=True, exist_ok=True)
    path = pathlib.Path(cfg.results) / f"scale-{cfg.shape}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    for gpus in cfg.gpus:
        report["gpus"][gpus] = measure(cfg, gpus)
        path.write_text(json.dumps(report, indent=1) + "\n")  # after each run, in case a later one fails
    show(report["gpus"], cfg.workload)
    if cfg.peer:
        gpus = cfg.gpus[-1]
        ours = report["gpus"][gpus]["workloads"][cfg.workload]["step_time"]
        for peer in measure_peer(cfg, gpus, ours):
            print(peer, flush=True)
            path.write_text(json.dumps(report | {"peer": peer}, indent=1) + "\n")


if __name__ == "__main__":
    cli.run(main, cli.parse(Config))
