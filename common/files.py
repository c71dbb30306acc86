"""File helpers: JSON lines, files that are complete at all times, and the commit of this checkout."""

import json
import os
import shutil
import subprocess
from pathlib import Path


def git_commit() -> str | None:
    """Return this checkout's commit, plus "-dirty" if there are uncommitted changes; None outside a git checkout."""
    if not shutil.which("git"):
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else None


def read_jsonl(path: Path) -> list[dict]:
    """Return the objects in a .jsonl file, [] without one. An incomplete last line, left by a kill, is skipped."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def partial_path(path: Path) -> Path:
    """Return the temporary path to which the file or folder `path` is written until it is complete."""
    return path.with_name(path.name + ".partial")  # not with_suffix: a model's name may contain dots


def atomic_write(path: Path, text: str) -> None:
    """Write `text` to a temporary file and rename it to `path`, so that `path` is complete at all times."""
    partial = partial_path(path)
    partial.write_text(text, encoding="utf-8", errors="replace")  # a row may contain half of a surrogate pair
    partial.rename(path)


def flush(path: Path) -> None:
    """Flush a file or folder to disk and wait until it has been written."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
