"""File helpers: JSON lines, locks, files that are never incomplete, and the commit of this checkout."""

import fcntl
import json
import os
import shutil
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

from common import console
from common.errors import UserError

_locked_files: dict[Path, IO[str]] = {}  # the locks that this process holds


def git_commit() -> str | None:
    """Return this checkout's commit, plus "-dirty" if there are uncommitted changes; None outside a git checkout."""
    if not shutil.which("git"):
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else None


def read_jsonl(
    path: Path, is_valid: Callable[[dict], bool] = lambda _: True, contiguous: bool = False, last: int | None = None
) -> list[dict]:
    """Return the objects in a .jsonl file, or [] if it does not exist. Damaged lines are skipped and reported.

    With `last`, only that many lines at the end of the file are read. `is_valid`, `contiguous`: see `parse_jsonl`.
    """
    if not path.is_file():
        return []
    with path.open("rb") as file:
        lines = deque(((number, line) for number, line in enumerate(file, start=1) if line.strip()), maxlen=last)
    objects, damage = parse_jsonl(lines, is_valid, contiguous)
    if damage:
        console.log(f"{path}: skipped {damage}")
    return objects


def parse_jsonl(
    lines: Iterable[tuple[int, bytes]], is_valid: Callable[[dict], bool], contiguous: bool = False
) -> tuple[list[dict], str | None]:
    """Return the objects in numbered lines of JSON, with NaN and infinity as None, and which lines are damaged, if any.

    A line is damaged if it is not a JSON object (for example, one cut off by a kill) or if `is_valid` rejects it. With
    `contiguous`, all lines after the first damaged line are skipped too, so that object i of the result is line i.
    """
    objects, damaged = [], []
    for number, line in lines:
        try:
            value = json.loads(line, parse_constant=lambda _: None)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict) and is_valid(value):
            objects.append(value)
        else:
            damaged.append(number)
            if contiguous:
                break
    extent = "and all that follow" if contiguous else f"({len(damaged)} in total)"
    return objects, f"the damaged line {damaged[0]} {extent}" if damaged else None


def partial_path(path: Path) -> Path:
    """Return the temporary path to which the file or folder `path` is written until it is complete."""
    return path.with_name(path.name + ".partial")  # not with_suffix: a model's name may contain dots


def model_files(folder: str | Path) -> list[Path]:
    """Return the weights, settings and templates of the model or adapter in `folder`; none for the name of a hub."""
    suffixes = (".safetensors", ".json", ".jinja")
    return sorted(path for path in Path(folder).glob("*.*") if path.suffix in suffixes and path.is_file())


def json_lines(objects: Iterable[dict]) -> str:
    """Return `objects` as lines of JSON. NaN and infinity become null, and values that JSON cannot hold become text."""
    plain = (json.loads(json.dumps(each, default=str), parse_constant=lambda _: None) for each in objects)
    return "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in plain)


def atomic_write(path: Path, text: str) -> None:
    """Write `text` to a temporary file and rename it to `path`, so that `path` is never incomplete."""
    partial = partial_path(path)
    partial.write_text(text, encoding="utf-8", errors="replace")  # a text may contain half of a surrogate pair
    partial.rename(path)


def flush(path: Path) -> None:
    """Flush a file or folder to disk and wait until it has been written."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- locks ------------------------------------------------------------------------------------------------------------


def lock_file(path: Path, in_use: str) -> IO[str]:
    """Lock the file `path` until this process ends or calls `release_locks`, and return it open.

    Programs that this process starts do not inherit the lock. The file records who holds the lock. Raises UserError if
    another process holds it, with a message that begins with `in_use`, or if the file system has no locks; OSError if
    the file cannot be written.
    """
    path = path.resolve()
    if path in _locked_files:
        return _locked_files[path]
    file = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise UserError(f"{in_use} ({file.read(200).strip() or 'unknown holder'})") from None
    except OSError as error:
        raise UserError(f"{path} cannot be locked ({error.strerror}): choose a folder elsewhere") from None
    file.truncate(0)
    file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    _locked_files[path] = file
    return file


def release_locks() -> None:
    """Release the locks of this process. A forked process only closes its copies, and the parent keeps the locks."""
    for file in _locked_files.values():
        file.close()
    _locked_files.clear()


os.register_at_fork(after_in_child=release_locks)  # a forked process might live longer than this one
