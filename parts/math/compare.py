"""Math answers, compared in processes that can be killed. `equal.py` runs in them."""

import functools
import os
import pathlib
import threading
from typing import Any

from common.errors import CallFailed, UserError, WorkerLost
from grading.answers import balanced
from grading.calls import call, start_workers

MATH_TIMEOUT = 0.9  # seconds; an ordinary comparison takes milliseconds
MATH_EQUAL = f"{pathlib.Path(__file__).resolve().parent}/equal.py:math_equal"
_worker_pool_lock = threading.Lock()


@functools.cache
def _math_workers() -> Any:
    """Start the processes that compare answers. The CPU cores are divided among this machine's training processes."""
    cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return start_workers(min(max(cores, 1), 8), [MATH_EQUAL], may_hang=False)


def _math_equal(candidate: str, gold: str, seconds: float) -> bool:
    """Call `math_equal` in a worker. Raises the same errors as `calls.call`."""
    with _worker_pool_lock:  # of many threads, only the first starts the workers
        workers = _math_workers()
    return call(workers, MATH_EQUAL, seconds, {"candidate": candidate, "gold": gold})


def check_math() -> None:
    """Raise UserError if math-verify does not work here, because it would then find every answer wrong."""
    try:
        if _math_equal("0.5", "\\frac{1}{2}", seconds=60.0):
            return
        problem = "it does not find 0.5 equal to 1/2"
    except CallFailed as error:
        problem = str(error)
    raise UserError(f"math-verify does not work here ({problem}): install requirements.txt; see its output above")


def same_answer(candidate: str, gold: str) -> bool:
    """Return whether math-verify finds two answers equal within `MATH_TIMEOUT` seconds; False if it cannot decide.

    Raises WorkerLost if the worker process was killed from outside; the answer then stays unscored.
    """
    candidate, gold = candidate.strip(), gold.strip()
    if candidate == gold:
        return True
    if not balanced(candidate):  # `1} \boxed{2` would be read as two answers
        return False
    try:
        return _math_equal(candidate, gold, MATH_TIMEOUT)
    except WorkerLost:
        raise
    except CallFailed:
        return False
