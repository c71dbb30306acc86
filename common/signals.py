"""Handle Ctrl-C, SIGTERM and a closed terminal (SIGHUP): the run stops at a point where it can save."""

import os
import signal
import time

import torch

from common import console, distributed
from common.errors import Interrupted

SAME_REQUEST = 5.0
"""Signals within so many seconds count as one: a scheduler's may come again through torchrun or run.sh."""


def defer_signals(received: list[int]) -> None:
    """Append these signals to `received` from now on; a second signal of the same kind ends the process.

    The run checks the list at points where it can save and stop (`raise_if_interrupted`).
    """
    first_at: dict[int, float] = {}
    under_torchrun = "GROUP_RANK" in os.environ

    def record(number: int, _: object) -> None:
        if number == signal.SIGINT and not under_torchrun:
            signal.signal(number, signal.SIG_DFL)  # a second one ends the process
        if number not in first_at:
            first_at[number] = time.monotonic()
            received.append(number)
            hint = "; press Ctrl-C again to exit now" if number == signal.SIGINT else ""
            console.log(f"\nstopping and saving a checkpoint{hint}")
        elif time.monotonic() - first_at[number] > SAME_REQUEST:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # under nohup, it stays ignored
            signal.signal(number, record)


def raise_if_interrupted(received: list[int]) -> None:
    """Raise Interrupted on every process if any has received a signal. All processes must call this together."""
    if distributed.all_max(torch.tensor(len(received))):
        raise Interrupted
