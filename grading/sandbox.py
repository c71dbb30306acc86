"""Calls of reward functions in processes of their own, each with a wall clock.

math-verify and people's own reward functions can run for ever on a strange completion. Here a call that takes too long
is killed and the next one starts at once. Every worker is a small Python process that has the functions loaded and
forks the process that makes the calls: killing that one costs a few milliseconds. Workers never import the training
script (as `multiprocessing` would) and end with the process that started them.
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
BUSY_FACTOR = 60  # times as long for a call that waits for a processor: it is not the call that is to blame


class WorkerPool:
    """`count` processes that call functions named «file.py:function»."""

    def __init__(self, count: int, names: list[str]):
        self.names = names
        self.idle: queue.SimpleQueue[tuple[subprocess.Popen, connection.Connection]] = queue.SimpleQueue()
        for _ in range(count):
            self.idle.put(self._start())

    def _start(self) -> tuple[subprocess.Popen, connection.Connection]:
        ours, theirs = Pipe()
        # -P: what lies in the working directory must not hide the project's packages
        command = [sys.executable, "-P", "-m", "grading.sandbox", str(theirs.fileno()), *self.names]
        root = str(pathlib.Path(__file__).parent.parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": path}
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment)
        theirs.close()
        return process, ours

    def call(self, name: str, seconds: float, arguments: dict[str, Any]) -> Any:
        """The result of function `name` with `arguments`, waited for at most `seconds` once a worker is idle.

        Raises CallFailed when the function raised, CallLost when it gave no result. Safe in many threads.
        """
        for _ in range(2):  # once more when the worker itself is gone; killed from outside or out of memory
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
    """The function that «file.py:function» names. Raises OSError, SyntaxError or AttributeError, or what it raises."""
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
    """Its neighbours can be imported while a file is loaded, as when it is run as a script."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


# --- in the worker ----------------------------------------------------------------------------------------------------


def _serve(pipe: connection.Connection, names: list[str]) -> None:
    """Answer calls until the other end is closed."""
    functions = {name: load_function(name) for name in names}
    caller = None
    while True:
        try:
            name, seconds, arguments = pipe.recv()
        except (EOFError, OSError):
            break
        caller = caller or _fork(functions)
        begun = _state(caller[0])[1]
        caller[1].send((name, arguments))
        try:
            if why := _too_long(caller, seconds, begun):
                answer, caller = ("lost", why), _killed(caller)
            else:
                answer = caller[1].recv()
        except (EOFError, OSError):
            answer, caller = ("lost", "its process died, out of memory perhaps"), _killed(caller)
        with contextlib.suppress(OSError):  # nobody waits any more
            pipe.send(answer)
    _killed(caller)


def _too_long(caller: tuple[int, connection.Connection], seconds: float, begun: float) -> str:
    """Empty when an answer comes in `seconds`; on a busy machine, where the call has not had so many of a processor and
    waits for one, in PATIENCE times as many. Else what is wrong. `begun`: the processor seconds it had before."""
    if caller[1].poll(seconds):
        return ""
    state, used = _state(caller[0])
    for _ in range(int((BUSY_FACTOR - 1) * seconds * 10)):
        if used - begun > 0.9 * seconds or caller[1].poll(0.1):
            break
        before, (state, used) = used, _state(caller[0])
        if state not in ("R", "D") and used == before:  # it sleeps, not for this moment alone
            break
    spent = f", {used - begun:.1f} s of them on a processor" if state else ""
    return "" if caller[1].poll(0) else TOO_LONG.format(seconds) + spent


def _state(process: int) -> tuple[str, float]:
    """What /proc says of a process: R when it runs or could, D when it waits for a disk; and its processor seconds."""
    try:
        fields = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # another system
        return "", 0.0
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _fork(functions: dict[str, Callable]) -> tuple[int, connection.Connection]:
    """A child that makes one call after another; this process has no threads, so that forking it is safe."""
    ours, theirs = Pipe()
    child = os.fork()
    if child:
        theirs.close()
        return child, ours
    ours.close()
    os.setsid()  # a group of its own: whatever a call starts is killed with it
    while True:
        try:
            name, arguments = theirs.recv()
        except (EOFError, OSError):
            os._exit(0)
        try:
            value = functions[name](**arguments)
            answer = "done", value.item() if hasattr(value, "item") else value  # numbers of NumPy and torch
        except BaseException as error:  # noqa: BLE001 - whatever a reward function does, SystemExit too, is an answer
            answer = "raised", f"{type(error).__name__}: {error}"[:300]
        try:
            theirs.send(answer)
        except (TypeError, AttributeError, ValueError) as error:  # a result that cannot be pickled
            theirs.send(("raised", f"its result cannot be passed on ({error})"[:300]))


def _killed(caller: tuple[int, connection.Connection] | None) -> None:
    if caller:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(caller[0], signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # it may not have come to its own group yet
            os.kill(caller[0], signal.SIGKILL)
        os.waitpid(caller[0], 0)
        caller[1].close()


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # for the trainer, which ends its step; torchrun sends them to all
        signal.signal(number, signal.SIG_IGN)
    _serve(connection.Connection(int(sys.argv[1])), sys.argv[2:])
