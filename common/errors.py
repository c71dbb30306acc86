"""Exceptions that end a script or a step with a one-line message, and checks that raise them.

`require` checks settings. `find_entry` finds an entry of a table to which plugins may add. The classes of such entries
use `dataclass` below, which checks the types of the fields and, with `takes`, the arguments of functions. So a mistake
is reported at the plugin's own line.
"""

import inspect
import re
from typing import TYPE_CHECKING, Any

from pydantic import AfterValidator

if TYPE_CHECKING:
    from dataclasses import dataclass
else:
    from pydantic.dataclasses import dataclass

__all__ = ["dataclass"]


class UserError(Exception):
    """A mistake in the input. The message is one line that says what is wrong, where, and what to do about it."""


class RunStopped(Exception):
    """The run ends early, with exit status 130 after Ctrl-C or 1 after an error such as a non-finite loss."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class StepFailed(Exception):
    """A step failed on all processes before its first update. The message gives the reason."""


class Interrupted(Exception):
    """A signal asked the run to stop, and the current step has not made its first update yet."""


def describe(error: BaseException) -> str:
    """Return the type and the text of `error` in one line."""
    try:
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    except Exception:  # noqa: BLE001 - its `__str__` raised
        return type(error).__name__


def require(ok: object, message: str) -> None:
    """Raise ValueError with `message` unless `ok`. Config classes call this function to reject invalid settings."""
    if not ok:
        raise ValueError(message)


class CallFailed(Exception):
    """The called function raised an error; the message describes it."""


class CallLost(CallFailed):
    """The call took too long, or its process died; the message says which."""


class WorkerLost(CallLost):
    """The worker was killed from outside, and so was its replacement when the call was retried.

    The call itself need not be at fault.
    """


def find_entry(flag: str, name: str, table: dict[str, Any]) -> Any:
    """Return the entry `name` of `table`, which `--flag` chooses. Raises UserError if there is none."""
    if name not in table:
        known = f"choose one of {', '.join(map(str, table))}, or " if table else ""
        raise UserError(f"--{flag} {name}: {known}add one with --plugin FILE")
    return table[name]


def check_call(where: str, function: Any, arguments: str) -> Any:
    """Return `function`. Raises UserError if it does not take `arguments`, such as "a, b, c=" (c by name)."""
    named = dict.fromkeys(re.findall(r"\w+(?==)", arguments))
    try:
        inspect.signature(function).bind(*re.findall(r"\w+\b(?!=)", arguments), **named)
    except ValueError:  # some built-in functions have no signature
        pass
    except TypeError:
        own = f"takes {inspect.signature(function)!s:.160}" if callable(function) else f"is {function!r:.40}"
        raise UserError(f"{where}: it {own}, and is called with ({arguments})") from None
    return function


def takes(arguments: str) -> AfterValidator:
    """Return an annotation for a field with a function, which checks that it takes `arguments` (`check_call`)."""
    return AfterValidator(lambda function, info: check_call(info.field_name, function, arguments))
