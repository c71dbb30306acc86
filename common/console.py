"""Messages and progress bars, printed by the main process only. Does not import torch."""

import contextlib
import os
import re
import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

# Hidden in URLs, even inside JSON: the user before the host, and values of parameters whose names suggest a secret.
CHARACTER = r"""(?:[^\s"'\\&#]|\\u)"""  # one character of a password or key; in JSON, \u begins a non-ASCII character
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # all but \n and \t, and lone surrogates
USER = re.compile(rf"(?<=://)(?:{CHARACTER}|[&#])*@")
SECRET = re.compile(rf"([?&][\w.-]*(?:key|token|secret|passw|auth|sig)[\w.-]*=){CHARACTER}+", re.IGNORECASE)


def hide_credentials(text: str) -> str:
    """Replace the credentials of all URLs in `text` with asterisks: http://user:password@host?key=1."""
    return SECRET.sub(r"\1***", USER.sub("***@", text))


def printable(text: str) -> str:
    """Escape the control characters in `text`, with which a model or a plugin could act on the terminal."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def is_main() -> bool:
    """Return whether this process is rank 0, which prints messages and writes files. Needs no process group."""
    return int(os.environ.get("RANK", 0)) == 0


def log(message: str) -> None:
    """Print `message` to stderr, on the main process only."""
    with contextlib.suppress(OSError):  # a full disk or a closed pipe must not end a run
        if is_main():
            print(printable(message), file=sys.stderr)


def progress(iterable: Iterable | None = None, desc: str | None = None, **options: Any) -> tqdm:
    """Return a tqdm progress bar on the main process, if stderr is a terminal.

    The bar appears after three seconds and disappears at the end.
    """
    return tqdm(iterable, desc, delay=3, leave=False, disable=None if is_main() else True, **options)
