"""What a run prints: messages and progress bars, from the main process only. Imports no torch."""

import os
import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm


def is_main() -> bool:
    """Whether this process is the one that prints and writes files: rank 0, also before the process group exists."""
    return int(os.environ.get("RANK", 0)) == 0


def warn(message: str) -> None:
    """Print `message` on stderr, from the main process only."""
    if is_main():
        print(message, file=sys.stderr)


def progress(iterable: Iterable | None = None, desc: str | None = None, **options: Any) -> tqdm:
    """A tqdm bar for work of more than three seconds, shown by the main process on a terminal only."""
    return tqdm(iterable, desc, delay=3, disable=None if is_main() else True, **options)
