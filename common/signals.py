"""Handle Ctrl-C and SIGTERM: the run stops at a point where it can save, or soon after a peer process has died."""

import os
import signal
import socket
import sys
import threading
import time

import torch

from common import console, distributed
from common.errors import Interrupted

SAME_REQUEST = 5.0
"""Seconds in which a second signal is no second request: schedulers signal all processes, and torchrun passes it on."""
PEER_LOSS_GRACE = 10.0  # seconds that a process has to report its own error after a peer has died


def defer_signals(received: list[int]) -> None:
    """Append Ctrl-C and SIGTERM to `received` from now on; a second signal of the same kind ends the process.

    The run checks the list at points where it can save and stop (`raise_if_interrupted`).
    """
    first_at: dict[int, float] = {}
    under_torchrun = "GROUP_RANK" in os.environ

    def record(number: int, _: object) -> None:
        if not under_torchrun:
            signal.signal(number, signal.SIG_DFL)  # a second one ends the process
        if number not in first_at:
            first_at[number] = time.monotonic()
            received.append(number)
            hint = "; press Ctrl-C again to exit now" if number == signal.SIGINT else ""
            console.log(f"\nstopping and saving a checkpoint{hint}")
        elif time.monotonic() - first_at[number] > SAME_REQUEST:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    if under_torchrun:
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        # Python runs signal handlers only between bytecodes; the wake-up socket also works during a long call.
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=_exit_after_peer_death, args=(reader, writer), daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, record)


def raise_if_interrupted(received: list[int]) -> None:
    """Raise Interrupted on every process if any has received a signal. All processes must call this together."""
    if distributed.all_max(torch.tensor(len(received))):
        raise Interrupted


def _exit_after_peer_death(reader: socket.socket, _writer: socket.socket) -> None:
    """Wait for a SIGTERM and the death of a peer, then exit. Runs in a thread and keeps `_writer` open.

    torchrun also sends SIGTERM when a peer has died. After such a death, nothing can be saved, so waiting for a rollout
    to finish is useless. Before the exit, a process that notices the death itself has time to report its own error.
    """
    while signal.SIGTERM not in reader.recv(1):
        pass
    while not distributed.peer_died():
        time.sleep(0.5)
    time.sleep(PEER_LOSS_GRACE)
    print(f"[rank {distributed.rank()}] another process died: nothing more can be saved", file=sys.stderr, flush=True)
    os._exit(1)
