"""Kill a run with kill -9 at random moments, resume it until it completes, and count the kills in each phase.

    python tests/helpers/kill_worker.py MODEL DATA FOLDER PROCESSES KILLS SEED [SETTINGS]

SETTINGS are further settings of the run, in JSON.

Each attempt runs in new processes. If there are several, they are connected by gloo. They are forked from this process,
which has already imported everything, so an attempt starts in one second instead of eight.
"""

import contextlib
import importlib
import json
import mmap
import os
import pathlib
import random
import signal
import socket
import sys
import time
from collections import Counter

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent.parent))
import torch

import grpo
from tests.helpers.scripts import PRELOADED
from training import checkpoint, metrics

MODEL, DATA, FOLDER = sys.argv[1:4]
PROCESSES, KILLS, SEED = map(int, sys.argv[4:7])
SETTINGS = {"max_completion_length": 12} | json.loads(sys.argv[7] if len(sys.argv) > 7 else "{}")
# With few kills, each must have a good chance to come after a checkpoint.
STEPS, SAVE_EVERY, LATEST_KILL = (16, 2, 0.3) if KILLS > 4 else (6, 1, 0.7)
shared_phase = mmap.mmap(-1, 32)  # rank 0 writes its current phase here, and this process reads it


def set_phase(phase: str) -> None:
    shared_phase[:32] = phase.encode().ljust(32)


def record_phases() -> None:
    """Record which phase rank 0 is in: a timed phase of a step, or a phase of saving."""
    call, save, write = metrics.Clock.__call__, checkpoint.Saver.save, checkpoint.Saver._write

    def recorded_call(self, phase):
        set_phase(phase)
        return call(self, phase)

    def recorded_save(*args):
        set_phase("save")
        return save(*args)

    def recorded_write(*args):
        set_phase("save, in its thread")
        write(*args)
        set_phase("after a save")

    metrics.Clock.__call__, checkpoint.Saver.save = recorded_call, recorded_save
    checkpoint.Saver._write = recorded_write


def run_rank(output: str, rank: int, processes: int, port: int, **flags) -> None:
    """Run grpo.py as rank `rank`. This function is called in a forked process."""
    torch.set_num_threads(1)
    if processes > 1:
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in world.items()} | {"MASTER_ADDR": "127.0.0.1"}
    if rank == 0:
        record_phases()
    if os.environ.get("QUIET", "1") == "1":
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
    cfg = grpo.Config(
        model=MODEL,
        data=DATA,
        output=output,
        task="count",
        max_steps=STEPS,
        save_every=SAVE_EVERY,
        keep_last=2,
        prompts_per_step=4,
        num_generations=4,
        learning_rate=1e-3,
        num_iterations=2,
        beta=0.01,
        report_every=0,
        **SETTINGS,
        **flags,
    )
    grpo.main(cfg)


def fork_rank(output: str, rank: int, processes: int, port: int, **flags) -> int:
    """Start a process of the run and return its id."""
    child = os.fork()
    if child == 0:
        try:
            run_rank(output, rank, processes, port, **flags)
            os._exit(0)
        except BaseException as error:  # noqa: BLE001
            print(f"{type(error).__name__}: {error}", file=sys.stdout, flush=True)
            os._exit(1)
    return child


def attempt(output: str, processes: int, kill_after: float | None, **flags) -> str | None:
    """Start the run and kill it after `kill_after` seconds. Return the phase that was hit, or None if it finished."""
    set_phase("set-up")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = [fork_rank(output, rank, processes, port, **flags) for rank in range(processes)]
    deadline = time.monotonic() + (kill_after or 600)
    while running and time.monotonic() < deadline:
        for child in list(running):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                running.remove(child)
                if status:
                    for other in running:
                        os.kill(other, signal.SIGKILL)
                    raise SystemExit(f"a process of {output} ended with {status}")
        time.sleep(0.002)
    phase = bytes(shared_phase[:32]).decode().strip()
    for child in random.sample(running, len(running)):
        os.kill(child, signal.SIGKILL)
    for child in running:
        os.waitpid(child, 0)
    return phase if running else None


def resume_flags(output: str) -> dict:
    complete = [path for path in pathlib.Path(output).glob("checkpoint-*") if path.suffix != ".partial"]
    return {"resume": "newest"} if complete else {"overwrite": True}


def main() -> None:
    random.seed(SEED)
    for module in PRELOADED:
        with contextlib.suppress(ModuleNotFoundError):  # a part that has been deleted
            importlib.import_module(module)
    start = time.monotonic()
    attempt(f"{FOLDER}/plain", PROCESSES, None)
    duration = time.monotonic() - start
    killed_in: Counter[str] = Counter()
    killed = f"{FOLDER}/killed"
    while sum(killed_in.values()) < KILLS:
        phase = attempt(killed, PROCESSES, random.uniform(0.1, LATEST_KILL * duration), **resume_flags(killed))
        if phase is not None:
            killed_in[phase] += 1
        else:  # the run finished: set its newest checkpoint aside, so that there is again a run to kill
            newest = max(pathlib.Path(killed).glob("checkpoint-*"), key=lambda p: int(p.name[11:]))
            os.rename(newest, f"{FOLDER}/set-aside-{time.monotonic()}")
    attempt(killed, PROCESSES, None, **resume_flags(killed))
    print(json.dumps({"seconds": duration, "killed_in": killed_in}))


if __name__ == "__main__":
    main()
