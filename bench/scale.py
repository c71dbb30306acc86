"""The same work for each GPU on 1, 2, 4, … of them, in one table; and a plan on paper for more than there are.

    python bench/scale.py --gpus 1 2 4                                  # W1 with the 3B shape: 32 prompts a GPU
    python bench/scale.py --gpus 4 --shape 7b --prompts 16 --peer trl   # and TRL with FSDP on the same GPUs
    python bench/scale.py --links --gpus 4                              # what the links between the GPUs carry
    python bench/scale.py --plan                                        # memory and traffic for 7B, 32B, 72B

The plan, with N GPUs, Ψ parameters, S GPUs that share one copy of the weights, T that share one vLLM
(--tensor_parallel), and what a GPU takes in each second inside a machine (`NVLINK`, measured by --links on four, taken
for eight) and from others (`NETWORK`, a figure by the maker, not measured):

    training, a GPU     16 Ψ / S (float32 weights, gradients, two moments) + 2 Ψ / S (reference), beside it activations
    sampling, a GPU     14 Ψ / S (the same without gradients) + 2 Ψ / T + `VLLM_ROOM` of vLLM's
    a micro-batch       forward and backward gather 2 · 2 Ψ bytes, backward adds up 4 Ψ bytes, each times (S − 1) / S;
                        the reference gathers 2 Ψ (S − 1) / S more, in a pass of its own; with 2 Ψ bytes to spare
                        each gathers once an update instead (--gather)
    an update, hybrid   the gradients of C = N / S copies once more: 2 · 4 Ψ / S · (C − 1) / C bytes over the network;
                        with a trained vision tower after every micro-batch instead
    a step              2 Ψ (S − 1) / S bytes gathered once, for vLLM

Gathering hides behind the arithmetic of a micro-batch of t tokens, 6 Ψ t / `SPEED` seconds and for the reference
2 Ψ t / `SPEED`, as long as its seconds are fewer: whatever Ψ, from t = 8 / 6 · (S − 1) / S · `SPEED` / link tokens on.
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
import torch
import torch.distributed as dist

from common import cli, console, distributed, errors
from policy.memory import MARGIN

NVLINK = 341e9  # bytes/s into each of four H200s in an all-gather of 1 GiB shards (--links, 2026-11-21)
NETWORK = 50e9  # bytes/s of a 400 Gbit/s adapter for each GPU
SPEED = 400e12  # FLOP/s of forward and backward, as MFU counts them: 0.40 to 0.53 of 989e12 were measured here
GPU_BYTES = 141e9
VLLM_ROOM = 12 * 2**30  # bytes beside its weights that vLLM is given at least: some GiB to work in, the rest KV cache
TOKENS = 8192  # of a micro-batch
SIZES = {"7B": 7.6e9, "32B": 32.5e9, "72B": 72.7e9}
ROWS = ("step_time", "time/sync", "time/prompts", "time/rollout", "idle/rollout", "time/reward", "time/sleep")
ROWS += ("time/reference", "time/train", "time/optimizer", "mfu", "memory_gib", "completions_per_second")


@dataclass
class Config:
    """Measure how steps scale over the GPUs of this machine, or plan beyond them."""

    gpus: tuple[int, ...] = (1, 2, 4)
    """Numbers of GPUs, one after another."""
    shape: speed.Shape = "3b"
    """The model's shape."""
    workload: Literal["W1", "W1-nokl", "W1-long", "W1-short", "small"] = "W1"
    """One of bench/speed.py's."""
    prompts: int = 32
    """Prompts a step for each GPU, of 8 completions each."""
    steps: int = 2
    """Measured steps, after one that warms up."""
    peer: Literal["trl"] | None = None
    """Another trainer on the last number of GPUs afterwards, with a frozen vision tower as ours has."""
    flags: tuple[str, ...] = ()
    """Further flags of grpo.py, as NAME=VALUE."""
    folder: str = "runs/bench"
    """Where model, data and runs are written."""
    results: str = str(HERE / "results")
    """Where JSON files go."""
    plan: bool = False
    """Only print the plan on paper."""
    links: bool = False
    """Only measure what collectives carry between the GPUs."""

    def __post_init__(self) -> None:
        if not self.gpus or min(*self.gpus, self.prompts, self.steps) < 1:
            raise ValueError("gpus, prompts and steps must be at least 1")
        speed.Config(flags=self.flags)  # a mistake in them is said here, not by every process


def launch(gpus: int, script: str, *arguments: object) -> Iterator[str]:
    """Run `script` on `gpus` processes: the lines of its standard output, printed as they come. Raises RunStopped when
    it does not end well."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}", "--"]
    command = [*torchrun, str(HERE / script), *map(str, arguments)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as started:
        for line in started.stdout:
            print(line, end="", flush=True)
            yield line
    if started.returncode:
        raise errors.RunStopped(f"bench/{script} on {gpus} GPUs ended with status {started.returncode}", 1)


def measure(cfg: Config, gpus: int) -> dict:
    """What bench/speed.py finds on `gpus` GPUs."""
    part = pathlib.Path(cfg.folder) / f"on-{gpus}"
    arguments = ["--shape", cfg.shape, "--workloads", cfg.workload, "--steps", cfg.steps]
    arguments += ["--prompts", cfg.prompts * gpus, "--folder", cfg.folder, "--results", part]
    arguments += ["--flags", *cfg.flags] if cfg.flags else []
    list(launch(gpus, "speed.py", *arguments))
    return json.loads(max(part.glob("*.json"), key=os.path.getmtime).read_text())


def measure_trl(cfg: Config, gpus: int, ours: float) -> Iterator[dict]:
    """TRL's seconds of each step on `gpus` GPUs, after each, the first GPU's memory then, and how many times `ours` it
    takes for those after the first, which warms up."""
    work = speed.WORKLOADS[cfg.workload]
    found = {"name": "trl", "gpus": gpus, "wanted": cfg.steps + 1, "steps": [], "gib": []}
    arguments = [pathlib.Path(cfg.folder) / cfg.shape, "--steps", cfg.steps + 1, "--prompts", cfg.prompts]
    arguments += ["--side", work["side"], "--tokens", work["tokens"], "--freeze_vision"]
    for line in launch(gpus, "peer_trl.py", *arguments):
        if line.startswith("STEP"):
            found["steps"].append(float(line.split()[1]))
            found["gib"].append(float(line.split()[2]))
            if len(found["steps"]) > 1:
                found["ratio"] = statistics.mean(found["steps"][1:]) / ours
            yield found


def show(found: dict[int, dict], workload: str) -> None:
    """One column for each number of GPUs, and what the step takes of that on the first."""
    columns = {gpus: about["workloads"][workload] for gpus, about in found.items()}
    first = next(iter(columns.values()))
    print(f"\n{'GPUs':24}" + "".join(f"{gpus:>12}" for gpus in columns))
    for row in ROWS:
        print(f"{row:24}" + "".join(f"{column.get(row, float('nan')):12.3f}" for column in columns.values()))
    ratios = (column["step_time"] / first["step_time"] for column in columns.values())
    print(f"{'step, of the first':24}" + "".join(f"{ratio:12.3f}" for ratio in ratios))


def links() -> None:
    """Bytes a second that each GPU takes in, in collectives of 1 GiB a GPU; on every process of a torchrun."""
    device = distributed.start()
    size, gpus = 2**28, distributed.world_size()
    part, whole = torch.zeros(size, device=device), torch.zeros(size * gpus, device=device)
    works = {
        "all-gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(part, whole),
    }
    for name, work in works.items():
        for _ in range(3):
            work()
        distributed.barrier()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(10):
            work()
        torch.cuda.synchronize()
        taken = 4 * size * (gpus - 1) * 10 / (time.perf_counter() - begun)
        if console.is_main():
            print(f"{name}: {taken / 1e9:.0f} GB/s into each of {gpus} GPUs", flush=True)


def sampler(size: float, shards: int) -> tuple[int, float] | None:
    """The smallest --tensor_parallel, with its --vllm_memory, that fits beside the trainer's resting state."""
    for gpus in (1, 2, 4, 8):
        share = math.ceil(20 * (2 * size / gpus + VLLM_ROOM) / GPU_BYTES) / 20
        if 14 * size / shards + share * GPU_BYTES <= (1 - MARGIN) * GPU_BYTES:
            return gpus, share
    return None


def plan() -> None:
    """The table of the module's formulas, as README.md has it."""
    heads = ["model", "GPUs", "a copy on", "GiB", "tensor_parallel", "vllm_memory", "gathered, s"]
    heads += ["arithmetic, s", "hidden from", "hybrid, s", "sync, s"]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for name, size in SIZES.items():
        for gpus in (8, 64, 256):
            for shards in sorted({8, gpus}):
                others, link, copies = 1 - 1 / shards, NVLINK if shards <= 8 else NETWORK, gpus // shards
                gathered, arithmetic = 2 * size * others / link, 2 * size * TOKENS / SPEED  # the reference's
                tokens = 8 / 6 * others * SPEED / link
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
    if cfg.links and "RANK" in os.environ:
        return links()
    if cfg.links:
        list(launch(cfg.gpus[-1], "scale.py", "--links"))
        return
    folder = pathlib.Path(cfg.folder)
    speed.make_model(folder / cfg.shape, cfg.shape)
    work = speed.WORKLOADS[cfg.workload]
    speed.make_data(folder, work["side"], max(cfg.gpus) * cfg.prompts * (cfg.steps + 1))
    about = {"config": dataclasses.asdict(cfg) | {"folder": None, "results": None}, "gpus": {}}
    pathlib.Path(cfg.results).mkdir(parents=True, exist_ok=True)
    results = pathlib.Path(cfg.results) / f"scale-{cfg.shape}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    for gpus in cfg.gpus:
        about["gpus"][gpus] = measure(cfg, gpus)
        results.write_text(json.dumps(about, indent=1) + "\n")  # kept, whatever becomes of the others
    show(about["gpus"], cfg.workload)
    if cfg.peer:
        gpus = cfg.gpus[-1]
        ours = about["gpus"][gpus]["workloads"][cfg.workload]["step_time"]
        for peer in measure_trl(cfg, gpus, ours):
            print(peer, flush=True)
            results.write_text(json.dumps(about | {"peer": peer}, indent=1) + "\n")


if __name__ == "__main__":
    cli.run(main, Config)
