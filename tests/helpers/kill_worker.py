"""Lives of one run, each ended by kill -9 at a random moment until the run is through; prints JSON with what happened.

    python tests/kill_worker.py MODEL DATA FOLDER PROCESSES KILLS SEED

Every life is a real process (or several, joined by gloo), forked from this one, which has imported everything: that
takes a second where a new interpreter would take eight.
"""

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
from training import checkpoint, metrics

STEPS, SAVE_EVERY = 24, 2
MODEL, DATA, FOLDER = sys.argv[1:4]
PROCESSES, KILLS, SEED = map(int, sys.argv[4:])
phase = mmap.mmap(-1, 32)  # what the first process is doing, seen by this one


def say(what: str) -> None:
    phase[:32] = what.encode().ljust(32)


def watch() -> None:
    """Let a life say what it does: the parts of a step, and the saving beside them."""
    call, save, finish = metrics.Clock.__call__, checkpoint.Checkpoints.save, checkpoint.Checkpoints._finish

    def clocked(self, part):
        say(part)
        return call(self, part)

    def saving(*args):
        say("save")
        return save(*args)

    def finishing(*args):
        say("save, in its thread")
        finish(*args)
        say("after a save")

    metrics.Clock.__call__, checkpoint.Checkpoints.save = clocked, saving
    checkpoint.Checkpoints._finish = finishing


def live(output: str, rank: int, processes: int, port: int, **more) -> None:
    torch.set_num_threads(1)
    if processes > 1:
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in world.items()} | {"MASTER_ADDR": "127.0.0.1"}
    if rank == 0:
        watch()
    if os.environ.get("QUIET", "1") == "1":
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
    cfg = grpo.Config(
        model=MODEL,
        data=DATA,
        output=output,
        max_steps=STEPS,
        save_every=SAVE_EVERY,
        keep_last=2,
        prompts_per_step=4,
        num_generations=4,
        max_completion_length=12,
        learning_rate=1e-3,
        num_iterations=2,
        beta=0.01,
        report_every=1000,
        **more,
    )
    grpo.main(cfg)


def life(output: str, processes: int, kill_after: float | None, **more) -> str | None:
    """One life; returns what it was doing when it was killed, None when it came to its end."""
    say("set-up")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            try:
                live(output, rank, processes, port, **more)
                os._exit(0)
            except BaseException as error:  # noqa: BLE001
                print(f"{type(error).__name__}: {error}", file=sys.stdout, flush=True)
                os._exit(1)
        children.append(child)
    ends = time.monotonic() + (kill_after or 600)
    left = list(children)
    while left and time.monotonic() < ends:
        for child in list(left):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                left.remove(child)
                if status:
                    for other in left:
                        os.kill(other, signal.SIGKILL)
                    raise SystemExit(f"a process of {output} ended with {status}")
        time.sleep(0.002)
    doing = bytes(phase[:32]).decode().strip()
    for child in random.sample(left, len(left)):
        os.kill(child, signal.SIGKILL)
    for child in left:
        os.waitpid(child, 0)
    return doing if left else None


def go_on(output: str) -> dict:
    whole = [path for path in pathlib.Path(output).glob("checkpoint-*") if path.suffix != ".partial"]
    return {"resume": "newest"} if whole else {"overwrite": True}


def main() -> None:
    random.seed(SEED)
    began = time.monotonic()
    life(f"{FOLDER}/plain", PROCESSES, None)
    whole = time.monotonic() - began
    doing: Counter[str] = Counter()
    while sum(doing.values()) < KILLS:
        at = life(f"{FOLDER}/killed", PROCESSES, random.uniform(0.1, 0.3 * whole), **go_on(f"{FOLDER}/killed"))
        if at is not None:
            doing[at] += 1
        else:  # it came through: from its last checkpoint but one again
            newest = max(pathlib.Path(f"{FOLDER}/killed").glob("checkpoint-*"), key=lambda p: int(p.name[11:]))
            os.rename(newest, f"{FOLDER}/set-aside-{time.monotonic()}")
    life(f"{FOLDER}/killed", PROCESSES, None, **go_on(f"{FOLDER}/killed"))
    print(json.dumps({"seconds_of_a_life": whole, "killed_in": doing}))


if __name__ == "__main__":
    main()
