"""Exceptions that end a script or a step with a one-line message, and checks that raise them.

`require` checks settings, `find_entry` and `call_entry` the entries of tables to which a plugin may add. Their classes
are made with `dataclass` below, so that a field of another type, or a function that takes other arguments (`takes`), is
refused in the plugin's own line.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
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
    except Exception:  # noqa: BLE001 - its own method raised
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


def find_entry(flag: str, name: str, table: dict[str, Any], kind: Any, arguments: str = "") -> Any:
    """Return the entry `name` of `table`, a `kind`, which `--flag` chooses; it is called with `arguments`.

    Raises UserError if there is none. If no flag chooses it, `flag` is the name of the table.
    """
    where = f"{flag}[{name!r}]" if flag.isupper() else f"--{flag} {name}"
    if not isinstance(table, dict):
        raise UserError(f"{where}: its table has become a {type(table).__name__}: add entries to it, and keep it")
    if name not in table:
        known = f"choose one of {', '.join(map(str, table))}, or " if table else ""
        raise UserError(f"{where}: {known}add one with --plugin FILE")
    if not isinstance(table[name], kind):
        raise UserError(f"{where}: its entry is a {type(table[name]).__name__}; expected {kind.__name__}")
    return check_call(where, table[name], arguments) if arguments else table[name]


def check_call(where: str, function: Any, arguments: str) -> Any:
    """Return `function`. Raises UserError if it does not take `arguments`, such as "a, b, c=" with c by its name."""
    named = dict.fromkeys(re.findall(r"\w+(?==)", arguments))
    try:
        inspect.signature(function).bind(*re.findall(r"\w+\b(?!=)", arguments), **named)
    except ValueError:  # some built-in functions do not tell
        pass
    except TypeError:
        own = f"takes {inspect.signature(function)!s:.160}" if callable(function) else f"is {function!r:.40}"
        raise UserError(f"{where}: it {own}, and is called with ({arguments})") from None
    return function


def takes(arguments: str) -> AfterValidator:
    """Return what annotates a field of an entry: a function that is called with `arguments`; see `check_call`."""
    return AfterValidator(lambda function, info: check_call(info.field_name, function, arguments))


def call_entry(where: str, function: Callable, given: Sequence[Any], *expected: Any, **named: Any) -> Any:
    """Call an entry and return what it returns: one tensor, or a tuple of several, of the forms of those expected.

    Raises UserError if a shape or a kind of number differs, if only one has a gradient, or if it changes what is given.
    """
    before, returned = _versions((*given, *named.values())), function(*given, **named)
    tensors = returned if isinstance(returned, tuple) and len(expected) > 1 else (returned,)
    got, want = (" and ".join(map(form, each)) for each in (tensors, expected))
    if got != want:
        raise UserError(f"{where}: it returned {got}; expected {want}")
    if before != _versions((*given, *named.values())):
        raise UserError(f"{where}: it changes a tensor that it is given: let it change a copy, x.clone()")
    return returned


def _versions(values: Sequence[Any]) -> list[Any]:
    """Return how often each of `values` that is a tensor, or lies in a dataclass, was changed in place."""
    inner = [_versions([getattr(each, own.name) for own in fields(each)]) for each in values if is_dataclass(each)]
    return [inner, *(getattr(each, "_version", None) for each in values)]


def form(tensor: Any) -> str:
    """Return the kind of number and the shape of a tensor, in words."""
    if not hasattr(tensor, "requires_grad"):
        return f"a {type(tensor).__name__}"
    kind = re.sub(r"torch\.(b?float\d+)?", "", str(tensor.dtype)) or "float"
    return f"{kind} {tuple(tensor.shape)}" + " with a gradient" * tensor.requires_grad
