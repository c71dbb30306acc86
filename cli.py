"""Command lines and errors for people: one line that says what is wrong, where, and what to do.

Every script's last line is `run(main, Config)`. A user's mistake (a missing file, a bad row, a flag that does not fit)
raises `UserError` and ends with its message and exit status 2, without a traceback; a bug keeps its traceback.
"""

import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import tyro

import parallel
from workers import WorkerLost


class UserError(Exception):
    """A mistake in the input. The message is one line: what is wrong, where, and what to do about it."""


ALONE = 10.0  # seconds after SIGTERM that a process goes on without one of its siblings
SHRINK = "What helps: --load_in_4bit with --lora_rank, --offload_optimizer, a smaller --vllm_memory, more GPUs"


class RunStopped(Exception):
    """A run that ends early on purpose, with the exit status to end with (130 for Ctrl-C, 1 for a non-finite loss)."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class StepFailed(Exception):
    """A step cannot be taken, as every process knows, and nothing of it has been learned; the message says why."""


class Interrupted(Exception):
    """A signal asked this run to stop, and nothing of the step it is in has been learned yet."""


def need(ok: bool, message: str) -> None:
    """Raise ValueError with `message` unless `ok`: what a Config says about settings that cannot be."""
    if not ok:
        raise ValueError(message)


def note_interrupts() -> list[int]:
    """From now on Ctrl-C and SIGTERM only add to the returned list, for the caller to stop where nothing is lost. The
    second one ends the process at once."""
    noted: list[int] = []

    def note(number: int, _: object) -> None:
        noted.append(number)
        signal.signal(number, signal.SIG_DFL)
        if int(os.environ.get("RANK", 0)) == 0:
            print(
                "\nstopping as soon as nothing is lost, with a checkpoint; again: at once", file=sys.stderr, flush=True
            )

    if "GROUP_RANK" in os.environ:  # of torchrun
        told, tell = socket.socketpair()
        tell.setblocking(False)
        signal.set_wakeup_fd(tell.fileno(), warn_on_full_buffer=False)  # heard even while the sampler is busy
        threading.Thread(target=_end_with_siblings, args=(told, tell), daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    return noted


def _end_with_siblings(told: socket.socket, _: socket.socket) -> None:
    """In a thread: torchrun says SIGTERM when a process is lost too, and kills the others 30 seconds later. No rollout
    has to be waited for then, since nothing more can be saved; but a process that knows by itself has its say first."""
    while signal.SIGTERM not in told.recv(1):
        pass
    while not parallel.sibling_gone():
        time.sleep(0.5)
    time.sleep(ALONE)
    print(f"[rank {parallel.rank()}] another process is gone: nothing more can be saved", file=sys.stderr, flush=True)
    os._exit(1)


def run(main: Callable[[Any], None], config: type) -> None:
    """Parse the command line into `config`, call `main` with it, and turn expected errors into one line on stderr.

    Unknown flags are refused with the nearest known one named (exit status 2). Under torchrun only the first rank
    prints what concerns the command line, since every rank reads the same one; later errors carry their rank.
    """
    gc.freeze()  # what has been imported stays: not to be looked through at the end, which is 0.7 s sooner
    rank = int(os.environ.get("RANK", 0))
    words = sys.argv[1:]
    for i, word in enumerate(words):  # --resume alone means the newest checkpoint
        if word == "--resume" and (i + 1 == len(words) or words[i + 1].startswith("--")):
            words[i] = "--resume=newest"
    args = tyro.cli(config, args=words, use_underscores=True, console_outputs=rank == 0)
    try:
        try:
            main(args)
            parallel.leave()
        except torch.OutOfMemoryError as error:
            raise RunStopped(f"out of GPU memory: {str(error).split('. ')[0]}. {SHRINK}", status=1) from None
        except WorkerLost as error:
            raise RunStopped(f"{error} twice: is this machine out of memory? The same command goes on", 1) from None
        except (dist.DistError, RuntimeError) as error:
            if not (isinstance(error, dist.DistError) or "gloo" in str(error) or "NCCL" in str(error)):
                raise
            first = str(error).strip().splitlines()[0][-120:]
            seen = parallel.last_seen()
            why = f"another process is gone or hangs ({first})" + (f"; last seen: {seen}" if seen else "")
            raise RunStopped(why, status=1) from None
    except KeyboardInterrupt:
        print("interrupted before anything was at stake", file=sys.stderr, flush=True)
        os._exit(130)
    except (UserError, RunStopped) as error:
        where = f"[rank {rank}] " if rank else ""
        print(f"{where}{'error: ' if isinstance(error, UserError) else ''}{error}", file=sys.stderr, flush=True)
        # Not sys.exit: after a rank-local error the other ranks wait in a collective that interpreter shutdown would
        # join; leaving at once lets torchrun end them.
        sys.stdout.flush()
        os._exit(2 if isinstance(error, UserError) else error.status)
