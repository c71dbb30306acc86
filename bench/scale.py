"""Measure weak scaling over the GPUs of one machine, or estimate memory and traffic for larger clusters.

    python bench/scale.py --gpus 1 2 4                                  # W1 with the 3B shape: 32 prompts per GPU
    python bench/scale.py --gpus 4 --shape 7b --prompts 16 --peer trl   # then TRL with FSDP on the same GPUs; or verl
    python bench/scale.py --plan                                        # the estimate for 7B, 32B and 72B

Measured results are written to docs/results/. The estimate is the table in docs/cluster.md. It is calculated, not
measured, for N GPUs, Ψ parameters, S GPUs that share one copy of the weights, and T GPUs that share one vLLM engine
(`--tensor_parallel`). The bandwidth into each GPU is `NVLINK` inside a machine (measured on four GPUs, assumed for
eight) and `NETWORK` between machines (the vendor's figure).

    training, bytes per GPU     16 Ψ / S (float32 weights, gradients, two moments) + 2 Ψ / S (reference) + activations
    sampling, bytes per GPU     14 Ψ / S (as in training, but without gradients) + 2 Ψ / T + `VLLM_ROOM`
    traffic per micro-batch     the forward and backward passes gather 2 · 2 Ψ bytes, and the backward pass reduces
                                4 Ψ bytes, each times (S − 1) / S; the reference gathers another 2 Ψ (S − 1) / S bytes
                                in a separate pass; with 2 Ψ bytes of free memory, the policy and the reference gather
                                only once per update (`--gather`)
    traffic per hybrid update   2 · 4 Ψ / S · (C − 1) / C bytes over the network, for the gradients of C = N / S copies;
                                if the vision tower is trained, this much for each micro-batch
    traffic per step            2 Ψ (S − 1) / S bytes, gathered once for vLLM

A micro-batch of t tokens takes 6 Ψ t / `SPEED` seconds of compute, and 2 Ψ t / `SPEED` seconds for the reference.
Traffic overlaps with compute and is hidden if it takes less time than the compute. For any Ψ, it is hidden if
micro-batches have at least t = 8 / 6 · (S − 1) / S · `SPEED` / bandwidth tokens.
"""

import dataclasses
import json
import math
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
sys.path[:0] = [str(HERE.parent), str(HERE)]
import speed

from common import cli, errors
from policy.memory import MARGIN

NVLINK = 341e9  # bytes/s into each of four H200s, in an all-gather of 1 GiB shards (2026-11-21)
NETWORK = 50e9  # bytes/s of a 400 Gbit/s network adapter per GPU
SPEED = 400e12  # FLOP/s of the forward and backward passes: an MFU of 0.40 on an H200; 0.40 to 0.55 was measured
GPU_BYTES = 141e9  # memory of an H200
VLLM_ROOM = 12 * 2**30  # minimum bytes for vLLM in addition to its weights: a few GiB of workspace and the KV cache
TOKENS = 8192  # per micro-batch
SIZES = {"7B": 7.6e9, "32B": 32.5e9, "72B": 72.7e9}
ROWS = ("step_time", "time/sync", "time/prompts", "time/rollout", "idle/rollout", "time/reward", "time/sleep")
ROWS += ("time/reference", "time/train", "time/optimizer", "mfu", "memory_gib", "completions_per_second")


@dataclass
class Config:
    """Measure how training steps scale over the GPUs of this machine, or estimate memory and traffic on clusters."""

    gpus: tuple[int, ...] = (1, 2, 4)
    """Numbers of GPUs to measure, one after another."""
    shape: speed.Shape = "3b"
    """Shape of the model, as defined in bench/speed.py."""
    workload: Literal["W1", "W1-nokl", "W1-long", "W1-short", "small"] = "W1"
    """Workload, as defined in bench/speed.py."""
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
    results: str = str(HERE.parent / "docs" / "results")
    """Folder for the JSON file with the results."""
    plan: bool = False
    """Only print the estimate for larger clusters."""

    def __post_init__(self) -> None:
        if not self.gpus or min(*self.gpus, self.prompts, self.steps) < 1:
            raise ValueError("gpus, prompts and steps must be at least 1")
        if self.plan:
            return
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
    """Run bench/speed.py on `gpus` GPUs and return its results."""
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


def sampler(size: float, shards: int) -> tuple[int, float] | None:
    """Return the smallest `--tensor_parallel` with which vLLM fits alongside the idle trainer, and its `--vllm_memory`.

    Returns None if nothing fits.
    """
    for gpus in (1, 2, 4, 8):
        fraction = math.ceil(20 * (2 * size / gpus + VLLM_ROOM) / GPU_BYTES) / 20
        if 14 * size / shards + fraction * GPU_BYTES <= (1 - MARGIN) * GPU_BYTES:
            return gpus, fraction
    return None


def plan() -> None:
    """Print the estimate as the Markdown table of docs/cluster.md."""
    heads = ["model", "GPUs", "a copy on", "GiB", "tensor_parallel", "vllm_memory", "gathered, s"]
    heads += ["compute, s", "hidden from", "hybrid, s", "sync, s"]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for name, size in SIZES.items():
        for gpus in (8, 64, 256):
            for shards in sorted({8, gpus}):
                remote, copies = 1 - 1 / shards, gpus // shards  # fraction of the weights on other GPUs
                bandwidth = NVLINK if shards <= 8 else NETWORK
                gathered = 2 * size * remote / bandwidth  # seconds of the reference; the policy takes four times that
                arithmetic = 2 * size * TOKENS / SPEED  # seconds of the reference; the policy takes three times that
                tokens = 8 / 6 * remote * SPEED / bandwidth
                hybrid = 8 * size / shards * (1 - 1 / copies) / NETWORK
                fits, vllm = 18 * size / shards < 0.6 * GPU_BYTES, sampler(size, shards)
                row = [name, gpus, shards, f"{18 * size / shards / 2**30:.1f}{'' if fits else ' (too much)'}"]
                row += [vllm[0], f"{vllm[1]:.2f}"] if vllm else ["none fits", ""]
                row += [f"{4 * gathered:.2f} + {gathered:.2f}", f"{3 * arithmetic:.2f} + {arithmetic:.2f}"]
                row += [f"{tokens:,.0f}", f"{hybrid:.2f}", f"{gathered:.2f}"]
                print(f"| {' | '.join(map(str, row))} |")


def main(cfg: Config) -> None:
    if cfg.plan:
        return plan()
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
