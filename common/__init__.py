"""Shared foundations: data classes, errors, command lines, the process group, files and figures.

Imports nothing else from the project; every other package may import it. Start reading at `records.py`, which defines
the data classes that all packages share (`Sample`, `Prompt`, `Rollout`, `Group`). `errors.py` defines the exceptions
that end a script with a one-line message, and `distributed.py` wraps the collectives.
"""
