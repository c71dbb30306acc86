"""Ctrl-C and SIGTERM: a run stops where nothing is lost, and not long after a process beside it has died."""

import os
import signal
import socket
import sys
import threading
import time

from common import distributed

PEER_LOSS_GRACE = 10.0  # seconds after SIGTERM that a process goes on without one of its siblings


def defer_signals() -> list[int]:
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
    while not distributed.peer_died():
        time.sleep(0.5)
    time.sleep(PEER_LOSS_GRACE)
    print(
        f"[rank {distributed.rank()}] another process is gone: nothing more can be saved", file=sys.stderr, flush=True
    )
    os._exit(1)
