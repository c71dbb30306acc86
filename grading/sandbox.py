"""Run functions in separate processes with a time limit for each call.

math-verify and user-defined rewards can run forever on an unusual completion, and a malicious upload can hang the
service's checks. A call that takes too long is therefore killed, and the next call starts at once.

`WorkerPool` starts each worker with `python -P -m grading.sandbox`. A worker is a small Python process that loads the
functions once and forks a child that makes the calls. Killing and replacing that child takes a few milliseconds.
Unlike the processes of `multiprocessing`, workers do not import the training script. They exit when the process that
started them exits.
"""

import contextlib
import importlib.util
import multiprocessing.connection as connection
import os
import pathlib
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from typing import Any

from common.errors import CallFailed, CallLost, WorkerLost

TOO_LONG = "took longer than {:g} s"
BUSY_FACTOR = 60  # on a busy machine, a call that is waiting for a CPU core may take this many times its limit


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
        command = [sys.executable, "-P", "-m", "grading.sandbox", str(child_end.fileno()), *self.names]
        root = str(pathlib.Path(__file__).parent.parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": path}
        process = subprocess.Popen(command, pass_fds=[child_end.fileno()], stdin=subprocess.DEVNULL, env=environment)
        child_end.close()
        return process, parent_end

    def call(self, name: str, seconds: float, arguments: dict[str, Any]) -> Any:
        """Call function `name` with `arguments` and return its result. Many threads may call this at the same time.

        The time limit `seconds` starts when a worker is idle. Raises CallFailed if the function raised, CallLost if it
        took too long or its process died, and WorkerLost if the worker itself died twice.
        """
        for _ in range(2):  # retry once if the worker died: it was killed from outside or ran out of memory
            process, pipe = self.idle.get()
            try:
                pipe.send((name, seconds, arguments))
                outcome, result = pipe.recv()
            except (EOFError, OSError):
                process.kill()
                process.wait()
                process, pipe = self._start()
                continue
            finally:
                self.idle.put((process, pipe))
            if outcome == "done":
                return result
            raise (CallLost if outcome == "lost" else CallFailed)(result)
        raise WorkerLost("its worker process died")


def load_function(name: str) -> Callable:
    """Import a file and return the function that "file.py:function" names.

    Raises OSError, SyntaxError, AttributeError, or anything that the file raises while it is imported.
    """
    file, _, function = name.rpartition(":")
    path = pathlib.Path(file).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"no file {file!r}")
    spec = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with _import_from(path.parent):
        spec.loader.exec_module(module)
    return getattr(module, function)


@contextlib.contextmanager
def _import_from(folder: pathlib.Path) -> Iterator[None]:
    """Allow imports from `folder` while one of its files is loaded, as if the file were run as a script."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


# --- in the worker ----------------------------------------------------------------------------------------------------


def _serve(pipe: connection.Connection, names: list[str]) -> None:
    """Answer calls until the other end of the pipe is closed."""
    functions = {name: load_function(name) for name in names}
    child = None
    while True:
        try:
            name, seconds, arguments = pipe.recv()
        except (EOFError, OSError):
            break
        child = child or _fork(functions)
        cpu_before = _process_state(child[0])[1]
        child[1].send((name, arguments))
        try:
            if problem := _wait_for_answer(child, seconds, cpu_before):
                _kill(child)
                answer, child = ("lost", problem), None
            else:
                answer = child[1].recv()
        except (EOFError, OSError):
            _kill(child)
            answer, child = ("lost", "its process died, perhaps out of memory"), None
        with contextlib.suppress(OSError):  # the caller may have stopped waiting
            pipe.send(answer)
    _kill(child)


def _wait_for_answer(child: tuple[int, connection.Connection], seconds: float, cpu_before: float) -> str:
    """Wait until the child has an answer. Return "", or the reason why the call must be killed.

    The limit is `seconds` of wall time. On a busy machine, a call that has not yet used that much CPU time and is still
    waiting for a core gets up to BUSY_FACTOR times the limit. `cpu_before` is the child's CPU time before the call.
    """
    if child[1].poll(seconds):
        return ""
    state, cpu = _process_state(child[0])
    for _ in range(int((BUSY_FACTOR - 1) * seconds * 10)):
        if cpu - cpu_before > 0.9 * seconds or child[1].poll(0.1):
            break
        last_cpu = cpu
        state, cpu = _process_state(child[0])
        if state not in ("R", "D") and cpu == last_cpu:  # asleep, and used no CPU time since the last check
            break
    cpu_used = f" ({cpu - cpu_before:.1f} s of CPU time)" if state else ""
    return "" if child[1].poll(0) else TOO_LONG.format(seconds) + cpu_used


def _process_state(pid: int) -> tuple[str, float]:
    """Return a process's state in /proc and its CPU time in seconds.

    State R means running or ready to run; D means waiting for I/O. Returns ("", 0.0) on a system without /proc.
    """
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0.0
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _fork(functions: dict[str, Callable]) -> tuple[int, connection.Connection]:
    """Fork a child that makes one call after another, and return its pid and pipe.

    Forking is safe because this process has no threads.
    """
    parent_end, child_end = Pipe()
    pid = os.fork()
    if pid:
        child_end.close()
        return pid, parent_end
    parent_end.close()
    os.setsid()  # a process group of its own, so that processes started by a call are killed with it
    while True:
        try:
            name, arguments = child_end.recv()
        except (EOFError, OSError):
            os._exit(0)
        try:
            value = functions[name](**arguments)
            answer = "done", value.item() if hasattr(value, "item") else value  # NumPy and torch scalars
        except BaseException as error:  # noqa: BLE001 - report any exception of a reward function, even SystemExit
            answer = "raised", f"{type(error).__name__}: {error}"[:300]
        try:
            child_end.send(answer)
        except (TypeError, AttributeError, ValueError) as error:
            child_end.send(("raised", f"its result cannot be pickled ({error})"[:300]))


def _kill(child: tuple[int, connection.Connection] | None) -> None:
    if child:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child[0], signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # the child may not have called `setsid` yet
            os.kill(child[0], signal.SIGKILL)
        os.waitpid(child[0], 0)
        child[1].close()


if __name__ == "__main__":
    # torchrun sends these signals to every process of a run, but only the trainer should handle them, because it
    # finishes its current step before it stops.
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_IGN)
    _serve(connection.Connection(int(sys.argv[1])), sys.argv[2:])
