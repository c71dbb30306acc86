"""The service's files and training jobs: what is kept, what runs, what became of it.

Everything is on disk: a SQLite table of files and one of jobs, and a folder for each. A job is `grpo.py` in a process
group of its own that outlives the service. Whether it lives is told by a lock on a file that it was started with and
that the system lets go of when it ends, however it ends; what became of it, by what it left. One job runs at a time.
"""

import contextlib
import dataclasses
import datetime
import fcntl
import json
import math
import os
import pathlib
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from common.errors import UserError
from common.files import read_jsonl

ROOT = pathlib.Path(__file__).resolve().parent.parent
GRACE = 60.0  # seconds that a cancelled job has to write its checkpoint, beside three of its steps
# what torchrun puts before a line may stand before each of these
TRACEBACK = re.compile(
    r"(?m)^(?:\[rank\d+\]: )?Traceback \(most recent call last\):\n(?:(?:\[rank\d+\]: )?(?:[ \t].*)?\n)*"
)
SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    file_id TEXT PRIMARY KEY, filename TEXT, upload_time TEXT, csv_rows INTEGER, valid_images INTEGER,
    usable_rows INTEGER, problems TEXT);
CREATE TABLE IF NOT EXISTS jobs (
    job_id TEXT PRIMARY KEY, job_name TEXT, file_id TEXT, model TEXT, settings TEXT, status TEXT, total_steps INTEGER,
    created_at TEXT, queued_at REAL, attempt INTEGER DEFAULT 0, cancelled_at REAL, error_message TEXT);
"""


class Missing(Exception):
    """There is no file or job of that id."""


class Conflict(Exception):
    """It cannot be done as things stand; the message says why."""


class Full(Exception):
    """The disk is."""


@dataclass
class Job:
    """A row of the table of jobs."""

    job_id: str
    job_name: str
    file_id: str
    model: str
    settings: dict[str, Any]
    status: str
    total_steps: int
    created_at: str
    queued_at: float
    attempt: int
    cancelled_at: float | None
    error_message: str | None


def now() -> str:
    """The time, as ISO 8601 in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class Store:
    """Files and jobs below `folder`; safe to use from many threads."""

    def __init__(self, folder: str):
        self.folder = pathlib.Path(folder).resolve()
        for name in ("files", "jobs"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.lock = threading.RLock()
        self.held = (self.folder / "service.lock").open("w")
        try:
            fcntl.flock(self.held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another service works in {folder!r}: stop it, or name another --folder") from None
        self.table = sqlite3.connect(
            self.folder / "service.sqlite", check_same_thread=False, isolation_level=None, timeout=30
        )
        self.table.row_factory = sqlite3.Row
        self.table.execute("PRAGMA journal_mode = WAL")
        self.table.executescript(SCHEMA)
        self.changes = 0  # of the table of jobs, since the service began
        self.known: dict[str, tuple[int, dict[str, Any]]] = {}  # by job: when its metrics were written, what they say

    def _all(self, query: str, *values: object) -> list[sqlite3.Row]:
        with self.lock:
            try:
                return self.table.execute(query, values).fetchall()
            except sqlite3.OperationalError as error:
                raise (Full if "full" in str(error) else sqlite3.OperationalError)(str(error)) from None

    # --- files

    def new_file_id(self) -> str:
        return uuid.uuid4().hex

    def path_of(self, file_id: str) -> pathlib.Path:
        """Where a file's ZIP is. Its id is made here, so that no name of anybody's becomes a path."""
        return self.folder / "files" / f"{file_id}.zip"

    def add_file(self, file_id: str, filename: str, found: dict[str, Any]) -> dict:
        """Keep what was `found` in a file: {rows, images, usable, problems}."""
        values = (file_id, filename, now(), found["rows"], found["images"], found["usable"])
        self._all("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", *values, json.dumps(found["problems"]))
        return self.file(file_id)

    def files(self) -> list[dict]:
        return [_file(row) for row in self._all("SELECT * FROM files ORDER BY upload_time, rowid")]

    def file(self, file_id: str) -> dict:
        """Raises Missing."""
        for row in self._all("SELECT * FROM files WHERE file_id = ?", file_id):
            return _file(row)
        raise Missing(f"no file {file_id!r}")

    def delete_file(self, file_id: str) -> None:
        """Raises Missing, and Conflict while a job needs it."""
        with self.lock:
            self.file(file_id)
            for job in self.jobs():
                if job.file_id == file_id and job.status in ("queued", "training"):
                    raise Conflict(f"job {job.job_id} uses this file: cancel it first")
            self._all("DELETE FROM files WHERE file_id = ?", file_id)
            self.path_of(file_id).unlink(missing_ok=True)

    # --- jobs

    def folder_of(self, job_id: str) -> pathlib.Path:
        return self.folder / "jobs" / job_id

    def run_of(self, job_id: str) -> pathlib.Path:
        """Where grpo.py writes."""
        return self.folder_of(job_id) / "run"

    def add_job(self, name: str, file_id: str, model: str, settings: dict[str, Any], total_steps: int) -> Job:
        """A queued job. Raises Missing when there is no such file."""
        with self.lock:
            self.file(file_id)
            job_id = uuid.uuid4().hex
            self.folder_of(job_id).mkdir()
            values = (job_id, name, file_id, model, json.dumps(settings), "queued", total_steps, now(), time.time())
            columns = "job_id, job_name, file_id, model, settings, status, total_steps, created_at, queued_at"
            self.changes += 1
            self._all(f"INSERT INTO jobs ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", *values)
            return self.job(job_id)

    def jobs(self, status: str | None = None) -> list[Job]:
        where, values = ("WHERE status = ?", (status,)) if status else ("", ())
        return [_job(row) for row in self._all(f"SELECT * FROM jobs {where} ORDER BY queued_at, rowid", *values)]

    def job(self, job_id: str) -> Job:
        """Raises Missing."""
        for row in self._all("SELECT * FROM jobs WHERE job_id = ?", job_id):
            return _job(row)
        raise Missing(f"no job {job_id!r}")

    def _update(self, job: Job, **changes: object) -> Job:
        changed = dataclasses.replace(job, **changes)
        self.changes += 1
        names = ", ".join(f"{name} = ?" for name in changes)
        self._all(f"UPDATE jobs SET {names} WHERE job_id = ?", *changes.values(), job.job_id)
        return changed

    def cancel(self, job_id: str) -> Job:
        """A queued job is cancelled; a running one is told to save and end. Raises Missing, Conflict."""
        with self.lock:
            job = self.job(job_id)
            if job.status == "queued":
                return self._update(job, status="cancelled")
            if job.status != "training":
                raise Conflict(f"the job is {job.status} already")
            try:
                return job if job.cancelled_at else self._update(job, cancelled_at=time.time())
            finally:
                self._ask_to_stop(job)

    def resume(self, job_id: str) -> Job:
        """Queue a cancelled or failed job again. Raises Missing, Conflict."""
        with self.lock:
            job = self.job(job_id)
            if job.status not in ("cancelled", "failed"):
                raise Conflict(f"the job is {job.status}: only a cancelled or failed one can be resumed")
            try:
                self.file(job.file_id)
            except Missing:
                raise Conflict("the job's pictures were deleted: upload them again and start a new job") from None
            return self._update(job, status="queued", cancelled_at=None, error_message=None, queued_at=time.time())

    # --- processes

    def poll(self) -> None:
        """Look after the running job, and start the next one: called again and again."""
        with self.lock:
            running = self.jobs("training")
            for job in running:
                job = self._counted(job)
                if not self.alive(job):
                    self._conclude(job)
                elif job.cancelled_at is not None:
                    self._ask_to_stop(job)
                    if time.time() > job.cancelled_at + GRACE + 3 * self._last(job).get("step_time", 0.0):
                        self._signal(job, signal.SIGKILL)
            if not self.jobs("training") and (queued := self.jobs("queued")):
                self._start(queued[0])

    def _counted(self, job: Job) -> Job:
        """The job with the steps that its run has counted: rows that repeat are no rows to it."""
        about = self.run_of(job.job_id) / "config.json"
        with contextlib.suppress(OSError, ValueError):  # not there yet, or being written
            if (total := json.loads(about.read_text()).get("total_steps", job.total_steps)) != job.total_steps:
                return self._update(job, total_steps=total)
        return job

    def alive(self, job: Job) -> bool:
        """Whether a process of the job holds its lock."""
        path = self.folder_of(job.job_id) / "lock"
        if not path.exists():
            return False
        with path.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return True
        return False

    def _start(self, job: Job) -> None:
        folder = self.folder_of(job.job_id)
        job = self._update(job, status="training", attempt=job.attempt + 1)
        command = [sys.executable, str(ROOT / "grpo.py"), *self.flags(job), "--resume", "auto"]
        shell = ["sh", "-c", 'echo $$ > "$0"; exec nice -n 5 "$@"', str(folder / f"pid-{job.attempt}"), *command]
        with (folder / "lock").open("w") as lock, (folder / "log.txt").open("ab") as log:
            (folder / f"log-from-{job.attempt}").write_text(str(log.tell()))
            fcntl.flock(lock, fcntl.LOCK_EX)
            keep = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True}
            child = subprocess.Popen(shell, cwd=ROOT, pass_fds=[lock.fileno()], **keep)
        threading.Thread(target=child.wait, daemon=True).start()  # so that it does not stay as a zombie

    def flags(self, job: Job) -> list[str]:
        """The job as flags of grpo.py."""
        flags = {"task": "count", "model": job.model, "data": self.path_of(job.file_id)} | job.settings["flags"]
        flags |= {"output": self.run_of(job.job_id), "skip_bad_rows": True, "save_every": 10, "report_every": 1}
        words = []
        for name, value in flags.items():
            words += [f"--{name}"] if value is True else [] if value is False else [f"--{name}={value}"]
        return words

    def _ask_to_stop(self, job: Job) -> None:
        """Once, since a job that is asked a second time ends without a checkpoint; and until it could be asked."""
        asked = self.folder_of(job.job_id) / f"asked-{job.attempt}"
        if not asked.exists() and self._signal(job, signal.SIGTERM):
            asked.touch()

    def _signal(self, job: Job, number: int) -> bool:
        """To the job's process alone, and only when that is still the job's; returns whether it was."""
        with contextlib.suppress(OSError, ValueError):
            pid = int((self.folder_of(job.job_id) / f"pid-{job.attempt}").read_text())
            if job.job_id.encode() in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, number)
                return True
        return False

    def _conclude(self, job: Job) -> None:
        """Its process is gone: what became of it is told by what it left."""
        folder = self.folder_of(job.job_id)
        if (self.run_of(job.job_id) / "final").is_dir():
            self._update(job, status="completed", error_message=None)
        elif job.cancelled_at is not None:
            self._update(job, status="cancelled")
        elif not (folder / f"pid-{job.attempt}").is_file():  # the service was lost while it started it
            self._update(job, status="queued")
        else:
            self._update(job, status="failed", error_message=self._why(job))

    def _why(self, job: Job) -> str:
        """What the last attempt's process said at its end, for people who see neither paths nor a shell."""
        begun = self.folder_of(job.job_id) / f"log-from-{job.attempt}"
        lines = self.log(job.job_id, begun=int(begun.read_text()) if begun.is_file() else 0).strip().splitlines()
        last = lines[-1].strip()[-300:] if lines else ""
        if "No space left" in "\n".join(lines[-20:]):
            return "the disk is full; resume goes on from the last checkpoint when there is room"
        if last.startswith("error:") or "Error" in last or "out of" in last:
            skipped = next((line for line in reversed(lines) if line.startswith("skipped:")), "")
            why = "; ".join(filter(None, [last.removeprefix("error: "), skipped]))[:600]
            return why.replace(str(self.path_of(job.file_id)), "the data set").replace(f"{self.folder}/", "")
        step = self.progress(job)["current_step"]
        return f"the training process was ended from outside at step {step}; resume goes on from the last checkpoint"

    # --- what a job has written

    def metrics(self, job_id: str) -> list[dict]:
        """The metrics of every step so far; NaN as None."""
        return [_finite_row(row) for row in read_jsonl(self.run_of(job_id) / "metrics.jsonl")]

    def new_metrics(self, job_id: str, seen: tuple[int, int]) -> tuple[list[dict], tuple[int, int]]:
        """The rows since `seen`, a file's number and a place in it, and what is seen then; all of them when the file
        is another one, as after a resume. (0, 0) has seen nothing."""
        try:
            with (self.run_of(job_id) / "metrics.jsonl").open("rb") as file:
                about = os.fstat(file.fileno())
                start = seen[1] if seen[0] == about.st_ino and seen[1] <= about.st_size else 0
                file.seek(start)
                whole = file.read().rpartition(b"\n")[0]
        except OSError:
            return [], seen
        rows = [json.loads(line) for line in whole.split(b"\n") if line]
        return [_finite_row(row) for row in rows], (about.st_ino, start + len(whole) + bool(whole))

    def log(self, job_id: str, most: int = 100_000, begun: int = 0) -> str:
        """The end of what the job's process printed, from byte `begun` on; of a progress bar its last state alone."""
        path = self.folder_of(job_id) / "log.txt"
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            file.seek(max(begun, path.stat().st_size - most))
            text = file.read().decode(errors="replace")
        text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
        return TRACEBACK.sub("", text)  # its last line says enough

    def _last(self, job: Job) -> dict[str, Any]:
        """The newest step's metrics; read again when the file has changed."""
        path = self.run_of(job.job_id) / "metrics.jsonl"
        try:
            written = path.stat().st_mtime_ns
        except OSError:
            return {}
        if self.known.get(job.job_id, (0, {}))[0] != written:
            last = next((row for row in reversed(_tail(path)) if "reward" in row), {})
            self.known[job.job_id] = written, last
        return self.known[job.job_id][1]

    def progress(self, job: Job) -> dict[str, Any]:
        """Step, and the newest loss and reward."""
        last = self._last(job)
        step = last.get("step", 0)
        return {
            "current_step": step,
            "progress": min(step / job.total_steps, 1.0) if job.total_steps else 0.0,
            "loss": _finite(last.get("loss")),
            "reward": _finite(last.get("reward")),
        }

    def remove_leftovers(self) -> None:
        """What a killed service left: uploads that no row speaks of, scratch folders, downloads."""
        known = {file["file_id"] for file in self.files()}
        for path in (self.folder / "files").iterdir():
            if path.stem not in known or path.suffix != ".zip":
                path.unlink(missing_ok=True)
        for path in self.folder.glob("scratch-*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.folder.glob("jobs/*/download-*.zip"):
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def scratch(self) -> Iterator[pathlib.Path]:
        """A folder that is gone afterwards."""
        folder = self.folder / f"scratch-{uuid.uuid4().hex}"
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _tail(path: pathlib.Path, most: int = 16_384) -> list[dict]:
    """The last rows of a .jsonl file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - most))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return []
    rows = []
    for line in lines[:-1]:
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


def _finite_row(row: dict) -> dict:
    return {name: _finite(value) for name, value in row.items()}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _file(row: sqlite3.Row) -> dict:
    return dict(row) | {"problems": json.loads(row["problems"])}


def _job(row: sqlite3.Row) -> Job:
    return Job(**dict(row) | {"settings": json.loads(row["settings"])})
