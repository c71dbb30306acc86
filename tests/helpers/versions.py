"""Which packages a process has loaded, and in which versions."""

import importlib.metadata
import re
import sys


def loaded_packages() -> dict[str, str]:
    """Return the version of each installed package of which this process has imported a module, by normalised name."""
    owners = importlib.metadata.packages_distributions()
    names = {name for module in list(sys.modules) for name in owners.get(module.partition(".")[0], [])}
    return {normalise(name): importlib.metadata.version(name) for name in sorted(names)}


def normalise(name: str) -> str:
    """Return the name of a package as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()
