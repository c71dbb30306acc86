"""Call functions of the user by their name, "file.py:function", in the killable processes of parts/workers.py."""

import inspect
import math
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common import console
from common.errors import CallFailed, CallLost, UserError, describe
from common.parts import extra
from common.plugins import import_file

ROOT = str(pathlib.Path(__file__).resolve().parent.parent)
PARAMETERS = f"{pathlib.Path(__file__).resolve()}:parameters"
AWAIT_ALL = f"{pathlib.Path(__file__).resolve()}:await_all"
SPARE = 10.0  # seconds added to the time limit of calls that are awaited together
AWAITED, AWAITED_WITH_IMAGES = 512, 64  # calls per batch; images stay in memory until all calls end


def load_function(name: str) -> Callable:
    """Import a file and return the function that "file.py:function" names. The file may import its neighbours.

    Raises OSError, SyntaxError, AttributeError, or anything that the file raises while it is imported.
    """
    file, _, function = name.rpartition(":")
    module = import_file(file)
    if not hasattr(module, function):
        own = [key for key, each in vars(module).items() if getattr(each, "__module__", "") == module.__name__]
        names = ", ".join(key for key in own if inspect.isfunction(getattr(module, key)))
        raise AttributeError(f"{file} has no {function}, but {names or 'no function'}")
    return getattr(module, function)


def parameters(name: str) -> tuple[list[str], list[str], bool, bool]:
    """Return a function's parameters, those without a default, whether it has `**kwargs`, and is an `async def`."""
    function = load_function(name)
    found = inspect.signature(function).parameters
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [name for name, p in found.items() if p.default is p.empty and p.kind not in variable]
    has_kwargs = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in found.values())
    return list(found), required, has_kwargs, inspect.iscoroutinefunction(function)


@dataclass(frozen=True)
class UserReward:
    """A reward function of the user: its name, "file.py:function", and what `parameters` returns for it."""

    name: str
    parameters: list[str]
    required: list[str]
    accepts_any: bool
    is_async: bool

    def __post_init__(self) -> None:
        if not {"completion", "answer"} <= set(self.parameters):
            raise UserError(f"--reward {self.name}: it must be a function of (completion, answer, **fields)")

    @property
    def batch(self) -> int:
        """How many completions an `async def` is called for at once."""
        return AWAITED_WITH_IMAGES if "images" in self.parameters else AWAITED

    def call_all(self, workers: Any, arguments: list[dict[str, Any]], seconds: float) -> list[Any]:
        """Let `workers` call the function with what it takes from each of `arguments`. `seconds`: limit per call."""
        wanted = [{k: v for k, v in each.items() if self.accepts_any or k in self.parameters} for each in arguments]
        if not self.is_async:
            return workers.call_all(self.name, seconds, wanted)
        from grading.together import CONCURRENCY

        limit = SPARE + seconds * math.ceil(len(wanted) / CONCURRENCY)  # reached only if a call blocks the others
        fields = {"name": self.name, "arguments": wanted, "seconds": seconds}
        (results,) = workers.call_all(AWAIT_ALL, limit, [fields])
        if isinstance(results, CallLost):
            results = CallLost(f"{results} (all calls of a round share it: none may wait without await, or end it)")
        return [results] * len(wanted) if isinstance(results, CallFailed) else results


def await_all(name: str, arguments: list[dict[str, Any]], seconds: float) -> list[Any]:
    """Call an `async def` with each of `arguments`, many at once; the result of a failed call is CallLost."""
    from asyncio import gather

    from grading.together import Together

    function, together = load_function(name), Together(seconds)

    async def result(fields: dict[str, Any]) -> Any:
        try:
            return plain(await together(function, **fields))
        except BaseException as error:  # noqa: BLE001 - as in `DirectCalls`; SystemExit would end the event loop
            return CallLost(console.hide_credentials(describe(error)))

    async def results() -> list[Any]:
        return await gather(*map(result, arguments))

    return together.start(results()).result()


def start_workers(count: int, names: list[str], may_hang: bool = True) -> Any:
    """Return a `WorkerPool` of `count` processes for the functions `names`.

    Without parts/workers.py, return `DirectCalls` if functions `may_hang` the run, else raise ModuleNotFoundError.
    """
    if workers := extra("workers", is_needed=not may_hang):
        return workers.WorkerPool(count, names)
    console.log("no workers: parts/workers is not here, so that a reward that hangs, hangs the run")
    return DirectCalls()


def start_reward_workers(functions: dict[str, UserReward]) -> dict[str, Any]:
    """Return the workers of each reward by its name: a pool of two for plain functions, a worker per `async def`."""
    together = [function.name for function in functions.values() if not function.is_async]
    workers = start_workers(2, together) if together else None
    own = {name: [each.name, AWAIT_ALL] for name, each in functions.items() if each.is_async}
    return dict.fromkeys(functions, workers) | {name: start_workers(1, names) for name, names in own.items()}


class DirectCalls:
    """Calls functions in this process, as a `WorkerPool` does in others, but with no limit of time."""

    def call_all(self, name: str, seconds: float, arguments: list[dict[str, Any]]) -> list[Any]:
        """Call function `name` with each of `arguments`; the result of a call that raised is CallFailed."""
        return [self._call(name, fields) for fields in arguments]

    def _call(self, name: str, fields: dict[str, Any]) -> Any:
        try:
            return result_of(load_function(name), fields)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - report any exception of a user's function
            return CallFailed(describe(error))


def result_of(function: Callable, fields: dict[str, Any]) -> Any:
    """Call a function, and return its result; a scalar of NumPy or torch becomes a number."""
    return plain(function(**fields))


def plain(value: Any) -> Any:
    """Return `value`; a scalar of NumPy or torch becomes a number."""
    return value.item() if hasattr(value, "item") else value


def call(workers: Any, name: str, seconds: float, arguments: dict[str, Any]) -> Any:
    """Let `workers` call function `name` once, and return its result. Raises CallFailed if the call failed."""
    (result,) = workers.call_all(name, seconds, [arguments])
    if isinstance(result, CallFailed):
        raise result
    return result
