"""Cases that run with --slow alone, and tests of what may have been deleted."""

from typing import Any

import pytest

from tests.helpers.scripts import ROOT


def slow(*values: Any) -> list[Any]:
    """Return `values` for `pytest.mark.parametrize` as cases that run with --slow alone."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def needs(path: str) -> pytest.MarkDecorator:
    """Mark a test that needs the file or folder `path` of the project, which is not part of the core."""
    return pytest.mark.skipif(not (ROOT / path).exists(), reason=f"needs {path}, which is not here")
