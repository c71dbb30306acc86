"""Exceptions that end a script, or a step, with one line for people; and `require` for settings."""


class UserError(Exception):
    """A mistake in the input. The message is one line: what is wrong, where, and what to do about it."""


class RunStopped(Exception):
    """A run that ends early on purpose, with the exit status to end with (130 for Ctrl-C, 1 for a non-finite loss)."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class StepFailed(Exception):
    """A step cannot be taken, as every process knows, and nothing of it has been learned; the message says why."""


class Interrupted(Exception):
    """A signal asked this run to stop, and nothing of the step it is in has been learned yet."""


def require(ok: bool, message: str) -> None:
    """Raise ValueError with `message` unless `ok`: what a Config says about settings that cannot be."""
    if not ok:
        raise ValueError(message)


class CallFailed(Exception):
    """The function raised; the message says what."""


class CallLost(CallFailed):
    """The call ran too long or took its process with it; the message says which."""


class WorkerLost(CallLost):
    """The worker was ended from outside, again when the call was made once more: that says nothing about the call."""
