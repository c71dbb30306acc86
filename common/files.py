"""Files: JSON lines, the place where something is written until it is whole, the commit of this checkout."""

import json
import os
import pathlib
import shutil
import subprocess


def git_commit() -> str | None:
    """The commit of this checkout, with «-dirty» when files differ from it; None outside one."""
    here = pathlib.Path(__file__).parent.parent
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    done = (
        subprocess.run(command, cwd=here, capture_output=True, text=True, check=False) if shutil.which("git") else None
    )
    return done.stdout.strip() if done and done.returncode == 0 else None


def read_jsonl(path: pathlib.Path) -> list[dict]:
    """The objects of a .jsonl file, a last line broken off by a kill left out; none when there is no file."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def partial_path(path: pathlib.Path) -> pathlib.Path:
    """Where `path` is written until it is whole; a name may have dots."""
    return path.with_name(path.name + ".partial")


def flush(path: pathlib.Path) -> None:
    """Wait until a file or folder is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
