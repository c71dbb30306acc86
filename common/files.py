"""File helpers: JSON lines, writing whole files, flushing to disk, and the commit of this checkout."""

import json
import os
import pathlib
import shutil
import subprocess


def git_commit() -> str | None:
    """Return this checkout's commit, plus "-dirty" if there are uncommitted changes; None outside a git checkout."""
    if not shutil.which("git"):
        return None
    root = pathlib.Path(__file__).parent.parent
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else None


def read_jsonl(path: pathlib.Path) -> list[dict]:
    """Return the objects in a .jsonl file, or an empty list when the file does not exist.

    An incomplete last line, left by a killed process, is skipped.
    """
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def partial_path(path: pathlib.Path) -> pathlib.Path:
    """Return the temporary path to which the file or folder `path` is written until it is complete."""
    return path.with_name(path.name + ".partial")  # not with_suffix: a model's name may contain dots


def atomic_write(path: pathlib.Path, text: str) -> None:
    """Write `text` under a temporary name, then rename the file to `path`, so that `path` is never incomplete."""
    partial = partial_path(path)
    partial.write_text(text, encoding="utf-8", errors="replace")  # a row may contain half of a surrogate pair
    partial.rename(path)


def flush(path: pathlib.Path) -> None:
    """Flush a file or folder to disk and wait until it has been written."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
