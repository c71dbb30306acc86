"""Exceptions that end a script or a step with a one-line message, and checks that raise them.

`require` checks settings, `find_entry` and `check_returned` the entries of tables to which a plugin may add. Their
classes are made with `dataclass` below, so that a field of another type is refused in the plugin's own line.
"""

import re
from typing import TYPE_CHECKING, Any

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


def find_entry(flag: str, name: str, table: dict[str, Any], kind: Any) -> Any:
    """Return the entry `name` of `table`, a `kind`, which `--flag` chooses. Raises UserError if there is none."""
    if name not in table:
        known = f"choose one of {', '.join(map(str, table))}, or " if table else ""
        raise UserError(f"--{flag} {name}: {known}add one with --plugin FILE")
    if not isinstance(table[name], kind):
        raise UserError(f"--{flag} {name}: its entry is a {type(table[name]).__name__}; expected {kind.__name__}")
    return table[name]


def check_returned(where: str, returned: Any, *expected: Any) -> Any:
    """Return what an entry has returned: one tensor, or a tuple of several, each of the form of the one expected.

    Raises UserError if a shape or a kind of number differs, or if only one has a gradient.
    """
    tensors = returned if isinstance(returned, tuple) and len(expected) > 1 else (returned,)
    got, want = (" and ".join(map(_form, each)) for each in (tensors, expected))
    if got != want:
        raise UserError(f"{where}: it returned {got}; expected {want}")
    return returned


def _form(tensor: Any) -> str:
    if not hasattr(tensor, "requires_grad"):
        return f"a {type(tensor).__name__}"
    kind = re.sub(r"torch\.(b?float\d+)?", "", str(tensor.dtype)) or "float"
    return f"{kind} {tuple(tensor.shape)}" + " with a gradient" * tensor.requires_grad
