"""Exceptions that end a script or a step with a one-line message, and `require` for checking settings."""


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
