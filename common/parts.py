"""Parts that a run uses if they are here, but does not need. They change its speed and its pages, but no number."""

import importlib
import importlib.util
from types import ModuleType


def extra(name: str, is_needed: bool = False) -> ModuleType | None:
    """Return the module `name` of parts/, or None if it is not here; raises ModuleNotFoundError if it `is_needed`."""
    spec = importlib.util.find_spec("parts") and importlib.util.find_spec(f"parts.{name}")
    is_here = spec and spec.origin  # a deleted folder whose __pycache__ is left has none
    if is_needed and not is_here:
        raise ModuleNotFoundError(name=f"parts.{name}")
    return importlib.import_module(f"parts.{name}") if is_here else None
