"""Call functions of the user by their name, "file.py:function", in the killable processes of parts/workers.py."""

import inspect
import pathlib
from collections.abc import Callable
from typing import Any

from common import console
from common.errors import CallFailed, describe
from common.parts import extra
from common.plugins import import_file

ROOT = str(pathlib.Path(__file__).resolve().parent.parent)
PARAMETERS = f"{pathlib.Path(__file__).resolve()}:parameters"


def load_function(name: str) -> Callable:
    """Import a file and return the function that "file.py:function" names. The file may import its neighbours.

    Raises OSError, SyntaxError, AttributeError, or anything that the file raises while it is imported.
    """
    file, _, function = name.rpartition(":")
    return getattr(import_file(file), function)


def parameters(name: str) -> tuple[list[str], list[str], bool]:
    """Return all parameter names of a function, those without a default, and whether it has `**kwargs`."""
    found = inspect.signature(load_function(name)).parameters
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [name for name, p in found.items() if p.default is p.empty and p.kind not in variable]
    return list(found), required, any(p.kind is inspect.Parameter.VAR_KEYWORD for p in found.values())


def start_workers(count: int, names: list[str], may_hang: bool = True) -> Any:
    """Return a `WorkerPool` of `count` processes for the functions `names`.

    Without parts/workers.py, return what calls them in this process, if they `may_hang` it.
    """
    if workers := extra("workers", is_needed=not may_hang):
        return workers.WorkerPool(count, names)
    console.log("no workers: parts/workers is not here, so that a reward that hangs, hangs the run")
    return DirectCalls()


class DirectCalls:
    """Calls functions in this process, as a `WorkerPool` does in others, but with no limit of time."""

    def call_all(self, name: str, seconds: float, arguments: list[dict[str, Any]]) -> list[Any]:
        """Call function `name` with each of `arguments`; in place of a result stands CallFailed if it raised."""
        return [self._call(name, fields) for fields in arguments]

    def _call(self, name: str, fields: dict[str, Any]) -> Any:
        try:
            return result_of(load_function(name), fields)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - report any exception of a user's function
            return CallFailed(describe(error))


def result_of(function: Callable, fields: dict[str, Any]) -> Any:
    """Call a function, and return its result, a scalar of NumPy or torch as a number."""
    value = function(**fields)
    return value.item() if hasattr(value, "item") else value


def call(workers: Any, name: str, seconds: float, arguments: dict[str, Any]) -> Any:
    """Let `workers` call function `name` once, and return its result. Raises what `call_all` returns as an error."""
    (result,) = workers.call_all(name, seconds, [arguments])
    if isinstance(result, CallFailed):
        raise result
    return result
