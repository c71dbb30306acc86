"""Run functions in separate processes with a time limit for each call.

math-verify and user-defined rewards can run forever on an unusual completion, and a malicious upload can hang the
service's checks. A call that takes too long is therefore killed, and the next call starts at once.

Each worker of a `WorkerPool` is a small Python process that loads the functions once and forks a child that makes the
calls. Killing and replacing that child takes a few milliseconds. Unlike the processes of `multiprocessing`, workers do
not import the training script. Workers exit when the process that started them exits.
"""

import contextlib
import ctypes
import io
import multiprocessing.connection as connection
import os
import pathlib
import pickle
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any

from common.errors import CallFailed, CallLost, WorkerLost, describe
from grading.calls import ROOT, load_function, result_of

BUSY_FACTOR = 60  # on a busy machine, a call that is waiting for a CPU core may take this many times its limit
PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that a process gets when its parent dies
PLAIN = {"common.errors.CallFailed", "common.errors.CallLost", "PIL.Image.Image", "fractions.Fraction"}  # in a result
PLAIN |= {"numpy.dtype", "numpy._core.multiarray.scalar"}


class WorkerPool:
    """A pool of `count` processes that call the functions in `names`. A name has the form "file.py:function"."""

    def __init__(self, count: int, names: list[str]):
        self.names = names
        self.idle: queue.SimpleQueue[tuple[subprocess.Popen, connection.Connection]] = queue.SimpleQueue()
        for _ in range(count):
            self.idle.put(self._start())

    def _start(self) -> tuple[subprocess.Popen, connection.Connection]:
        parent_end, child_end = Pipe()
        # -P keeps modules in the working directory from shadowing the project's packages.
        script = f"import sys; sys.path.insert(0, {ROOT!r}); from parts import workers; workers.serve(sys.argv[1:])"
        command = [sys.executable, "-P", "-c", script, str(child_end.fileno()), *self.names]
        process = subprocess.Popen(command, pass_fds=[child_end.fileno()], stdin=subprocess.DEVNULL)
        child_end.close()
        return process, parent_end

    def call_all(self, name: str, seconds: float, arguments: list[dict[str, Any]]) -> list[Any]:
        """Call function `name` with each of `arguments`, one after the other in one worker, and return the results.

        Many threads may call this at the same time. The time limit of each call is `seconds`. In place of a result
        stands CallFailed if the function raised, CallLost if it took too long or its process died, and WorkerLost if
        the worker itself died twice.
        """
        answers = self._exchange((name, seconds, arguments))
        if answers is None and len(arguments) > 1:  # find the call that kills its worker, if it is one of them
            return [result for each in arguments for result in self.call_all(name, seconds, [each])]
        answers = answers or self._exchange((name, seconds, arguments))
        return [WorkerLost("its worker process died")] if answers is None else [_unpickle(each) for each in answers]

    def _exchange(self, message: tuple[str, float, list[dict[str, Any]]]) -> list[bytes] | None:
        """Let a worker make calls, and return its answers; None if it died: by one of them, or killed from outside."""
        process, pipe = self.idle.get()
        try:
            pipe.send(message)
            while not pipe.poll(1.0):
                if process.poll() is not None or _process_state(process.pid) == "T":  # it died, or a call stopped it
                    raise EOFError
            return pipe.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            process.kill()
            process.wait()
            process, pipe = self._start()
            return None
        finally:
            self.idle.put((process, pipe))


class _Unpickler(pickle.Unpickler):
    """Reads what a call has returned: numbers, texts, pictures, errors and lists of these, and runs no code."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in PLAIN:
            raise pickle.UnpicklingError(f"it has a {module}.{name}")
        return super().find_class(module, name)


def _unpickle(answer: bytes) -> Any:
    try:
        return _Unpickler(io.BytesIO(answer)).load()
    except Exception as error:  # noqa: BLE001 - unpickling may raise anything
        return CallFailed(f"its result cannot be unpickled ({describe(error)})")


# --- in the worker ----------------------------------------------------------------------------------------------------


def serve(arguments: list[str]) -> None:
    """Answer calls until the other end of the pipe is closed. `arguments`: the pipe's file descriptor and the names."""
    # torchrun sends these signals to every process of a run, but only the trainer should react to them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, _give_up)
    pipe = connection.Connection(int(arguments[0]))
    os.set_inheritable(pipe.fileno(), False)
    functions = {name: _load_or_explain(name) for name in arguments[1:]}
    pid, child = _fork(functions, pipe)
    while True:
        try:
            name, seconds, calls = pipe.recv()
        except (EOFError, OSError):
            return _kill(pid)
        answers = []
        for fields in calls:
            try:
                signal.setitimer(signal.ITIMER_REAL, seconds + 1)  # the child may have damaged its end of the pipe
                child.send((name, fields))
                signal.setitimer(signal.ITIMER_REAL, 0)
                in_time = _wait_for_answer(pid, child, seconds)
                signal.setitimer(signal.ITIMER_REAL, seconds + 1)
                answer, lost = (child.recv_bytes(), None) if in_time else (None, f"took longer than {seconds:g} s")
            except (EOFError, OSError):
                answer, lost = None, "its process died, perhaps out of memory"
            signal.setitimer(signal.ITIMER_REAL, 0)
            if lost:
                _kill(pid)
                child.close()
                pid, child = _fork(functions, pipe)
            answers.append(pickle.dumps(CallLost(lost)) if lost else answer)
        with contextlib.suppress(OSError):  # the caller may have stopped waiting
            pipe.send(answers)


def _give_up(*_: object) -> None:
    raise TimeoutError  # which is an OSError


def _fork(functions: dict[str, Callable], pipe: connection.Connection) -> tuple[int, connection.Connection]:
    """Fork a child that makes one call after another. Forking is safe because this process has no threads."""
    parent_end, child_end = Pipe()
    pid = os.fork()
    if pid:
        os.setpgid(pid, pid)  # so that processes started by a call are killed with it
        child_end.close()
        return pid, parent_end
    parent_end.close()
    pipe.close()  # the worker's own
    with contextlib.suppress(AttributeError):  # Linux alone has it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a call does not outlive a worker that was killed
    while True:
        try:
            name, fields = child_end.recv()
        except (EOFError, OSError):
            os._exit(0)
        try:
            answer = result_of(functions[name], fields)
        except BaseException as error:  # noqa: BLE001 - report any exception of a reward function, even SystemExit
            answer = CallFailed(describe(error))
        try:
            child_end.send(answer)
        except Exception as error:  # noqa: BLE001 - pickling may raise anything
            with contextlib.suppress(OSError):
                child_end.send(CallFailed(f"its result cannot be pickled ({describe(error)})"))


def _load_or_explain(name: str) -> Callable:
    """Load a function. If that fails, return one that says why, so that the caller learns it."""
    try:
        return load_function(name)
    except BaseException as error:  # noqa: BLE001 - importing the file may raise anything
        reason = f"{name} cannot be loaded ({describe(error)})"

    def explain(**_: object) -> None:
        raise RuntimeError(reason)

    return explain


def _wait_for_answer(pid: int, child: connection.Connection, seconds: float) -> bool:
    """Wait until the child has an answer, and return whether it came in time.

    The limit is `seconds` of wall time. On a busy machine, a call that has not yet used that much CPU time and is still
    waiting for a core gets up to BUSY_FACTOR times the limit.
    """
    cpu_before = last_cpu = _cpu_seconds(pid)
    answered = child.poll(seconds)
    for _ in range(int((BUSY_FACTOR - 1) * seconds * 10)):
        if answered:
            break
        cpu = _cpu_seconds(pid)
        asleep = _process_state(pid) not in ("R", "D") and cpu == last_cpu  # no CPU time used since the last check
        if asleep or cpu - cpu_before > 0.9 * seconds:
            break
        answered, last_cpu = child.poll(0.1), cpu
    return answered


def _cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a process has used; 0.0 if the system does not tell."""
    try:
        return time.clock_gettime(~pid << 3 | 2)  # Linux's number for the CPU clock of a process
    except OSError:
        return 0.0


def _process_state(pid: int) -> str:
    """Return a process's state (R: ready to run, D: waiting for I/O, ...); "" without /proc."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _kill(pid: int) -> None:
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
