"""Cases that run with --slow alone."""

from typing import Any

import pytest


def slow(*values: Any) -> list[Any]:
    """Return `values` for `pytest.mark.parametrize` as cases that run with --slow alone."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]
