"""The service's files and training jobs: storage, processes, results.

Everything is on disk: a SQLite database with a table of files and a table of jobs, and a folder per job. A job is
a `grpo.py` process in its own process group, so it outlives the service. The process inherits a locked file, and the
system releases the lock however the process ends, so the lock shows whether the job is alive. The files that a process
leaves behind show how it ended. One job runs at a time.
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
STOP_GRACE = 60.0  # seconds for a cancelled job to save its checkpoint, in addition to the duration of three steps
# A traceback, whose lines may start with torchrun's rank prefix.
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
    """No file or job has this id."""


class Conflict(Exception):
    """The state of the file or job does not allow the request. The message says why."""


class DiskFull(Exception):
    """The disk is full."""


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
    """Return the current time in UTC, as ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class Store:
    """Files and jobs in `folder`. Safe to use from many threads."""

    def __init__(self, folder: str):
        self.folder = pathlib.Path(folder).resolve()
        for name in ("files", "jobs"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.lock = threading.RLock()
        self.lock_file = (self.folder / "service.lock").open("w")
        try:
            fcntl.flock(self.lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another service is running in {folder!r}: stop it, or choose another --folder") from None
        self.database = sqlite3.connect(
            self.folder / "service.sqlite", check_same_thread=False, isolation_level=None, timeout=30
        )
        self.database.row_factory = sqlite3.Row
        self.database.execute("PRAGMA journal_mode = WAL")
        self.database.executescript(SCHEMA)
        self.version = 0  # increases with every change to the table of jobs
        self.last_metrics: dict[str, tuple[int, dict[str, Any]]] = {}  # by job: mtime of metrics.jsonl, its last row

    def _query(self, query: str, *values: object) -> list[sqlite3.Row]:
        with self.lock:
            try:
                return self.database.execute(query, values).fetchall()
            except sqlite3.OperationalError as error:
                kind = DiskFull if "full" in str(error) else sqlite3.OperationalError
                raise kind(str(error)) from None

    # --- files

    def new_file_id(self) -> str:
        return uuid.uuid4().hex

    def zip_path(self, file_id: str) -> pathlib.Path:
        """Return the path of a file's ZIP. Ids are generated here, so no name from outside becomes a path."""
        return self.folder / "files" / f"{file_id}.zip"

    def add_file(self, file_id: str, filename: str, contents: dict[str, Any]) -> dict:
        """Add a file with its `contents`: {rows, images, usable, problems}."""
        values = (file_id, filename, now(), contents["rows"], contents["images"], contents["usable"])
        self._query("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", *values, json.dumps(contents["problems"]))
        return self.file(file_id)

    def files(self) -> list[dict]:
        return [_file(row) for row in self._query("SELECT * FROM files ORDER BY upload_time, rowid")]

    def file(self, file_id: str) -> dict:
        """Return a file. Raises Missing."""
        for row in self._query("SELECT * FROM files WHERE file_id = ?", file_id):
            return _file(row)
        raise Missing(f"no file {file_id!r}")

    def delete_file(self, file_id: str) -> None:
        """Delete a file. Raises Missing, and Conflict while a queued or running job uses it."""
        with self.lock:
            self.file(file_id)
            for job in self.jobs():
                if job.file_id == file_id and job.status in ("queued", "training"):
                    raise Conflict(f"job {job.job_id} uses this file: cancel it first")
            self._query("DELETE FROM files WHERE file_id = ?", file_id)
            self.zip_path(file_id).unlink(missing_ok=True)

    # --- jobs

    def job_folder(self, job_id: str) -> pathlib.Path:
        return self.folder / "jobs" / job_id

    def run_folder(self, job_id: str) -> pathlib.Path:
        """Return the output folder of the job's grpo.py."""
        return self.job_folder(job_id) / "run"

    def add_job(self, name: str, file_id: str, model: str, settings: dict[str, Any], total_steps: int) -> Job:
        """Add a queued job and return it. Raises Missing when the file does not exist."""
        with self.lock:
            self.file(file_id)
            job_id = uuid.uuid4().hex
            self.job_folder(job_id).mkdir()
            values = (job_id, name, file_id, model, json.dumps(settings), "queued", total_steps, now(), time.time())
            columns = "job_id, job_name, file_id, model, settings, status, total_steps, created_at, queued_at"
            self.version += 1
            self._query(f"INSERT INTO jobs ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", *values)
            return self.job(job_id)

    def jobs(self, status: str | None = None) -> list[Job]:
        where, values = ("WHERE status = ?", (status,)) if status else ("", ())
        return [_job(row) for row in self._query(f"SELECT * FROM jobs {where} ORDER BY queued_at, rowid", *values)]

    def job(self, job_id: str) -> Job:
        """Return a job. Raises Missing."""
        for row in self._query("SELECT * FROM jobs WHERE job_id = ?", job_id):
            return _job(row)
        raise Missing(f"no job {job_id!r}")

    def _update(self, job: Job, **changes: object) -> Job:
        updated = dataclasses.replace(job, **changes)
        self.version += 1
        names = ", ".join(f"{name} = ?" for name in changes)
        self._query(f"UPDATE jobs SET {names} WHERE job_id = ?", *changes.values(), job.job_id)
        return updated

    def cancel(self, job_id: str) -> Job:
        """Cancel a queued job, or ask a running one to save and exit. Raises Missing, and Conflict for an ended job."""
        with self.lock:
            job = self.job(job_id)
            if job.status == "queued":
                return self._update(job, status="cancelled")
            if job.status != "training":
                raise Conflict(f"the job is already {job.status}")
            try:
                return job if job.cancelled_at else self._update(job, cancelled_at=time.time())
            finally:
                self._ask_to_stop(job)

    def resume(self, job_id: str) -> Job:
        """Queue a cancelled or failed job again. Raises Missing, and Conflict when it cannot be resumed."""
        with self.lock:
            job = self.job(job_id)
            if job.status not in ("cancelled", "failed"):
                raise Conflict(f"the job is {job.status}: only cancelled and failed jobs can be resumed")
            try:
                self.file(job.file_id)
            except Missing:
                raise Conflict("the job's images were deleted: upload them again and start a new job") from None
            return self._update(job, status="queued", cancelled_at=None, error_message=None, queued_at=time.time())

    # --- processes

    def poll(self) -> None:
        """Check the running job and, when none is running, start the next. `job_loop` calls this repeatedly."""
        with self.lock:
            for job in self.jobs("training"):
                job = self._update_total_steps(job)
                if not self.is_alive(job):
                    self._finish(job)
                elif job.cancelled_at is not None:
                    self._ask_to_stop(job)
                    if time.time() > job.cancelled_at + STOP_GRACE + 3 * self._last_row(job).get("step_time", 0.0):
                        self._signal(job, signal.SIGKILL)
            if not self.jobs("training") and (queued := self.jobs("queued")):
                self._start(queued[0])

    def _update_total_steps(self, job: Job) -> Job:
        """Take the number of steps from the run itself, because the run leaves out duplicate rows."""
        path = self.run_folder(job.job_id) / "config.json"
        with contextlib.suppress(OSError, ValueError):  # the file does not exist yet, or is being written
            total_steps = json.loads(path.read_text()).get("total_steps", job.total_steps)
            if total_steps != job.total_steps:
                return self._update(job, total_steps=total_steps)
        return job

    def is_alive(self, job: Job) -> bool:
        """Return whether a process of the job holds its lock."""
        path = self.job_folder(job.job_id) / "lock"
        if not path.exists():
            return False
        with path.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return True
        return False

    def _start(self, job: Job) -> None:
        folder = self.job_folder(job.job_id)
        job = self._update(job, status="training", attempt=job.attempt + 1)
        command = [sys.executable, str(ROOT / "grpo.py"), *self.flags(job), "--resume", "auto"]
        shell = ["sh", "-c", 'echo $$ > "$0"; exec nice -n 5 "$@"', str(folder / f"pid-{job.attempt}"), *command]
        with (folder / "lock").open("w") as lock, (folder / "log.txt").open("ab") as log:
            (folder / f"log-from-{job.attempt}").write_text(str(log.tell()))
            fcntl.flock(lock, fcntl.LOCK_EX)
            child = subprocess.Popen(
                shell,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=[lock.fileno()],
            )
        threading.Thread(target=child.wait, daemon=True).start()  # reaps the child, which would otherwise stay a zombie

    def flags(self, job: Job) -> list[str]:
        """Return the job's flags for grpo.py."""
        flags = {"task": "count", "model": job.model, "data": self.zip_path(job.file_id)} | job.settings["flags"]
        flags |= {"output": self.run_folder(job.job_id), "skip_bad_rows": True, "save_every": 10, "report_every": 1}
        arguments = []
        for name, value in flags.items():
            arguments += [f"--{name}"] if value is True else [] if value is False else [f"--{name}={value}"]
        return arguments

    def _ask_to_stop(self, job: Job) -> None:
        """Send SIGTERM once per attempt: a second SIGTERM makes grpo.py exit without saving a checkpoint."""
        asked = self.job_folder(job.job_id) / f"asked-{job.attempt}"
        if not asked.exists() and self._signal(job, signal.SIGTERM):
            asked.touch()

    def _signal(self, job: Job, number: int) -> bool:
        """Send a signal to the job's process. Return whether that process still existed."""
        with contextlib.suppress(OSError, ValueError):
            pid = int((self.job_folder(job.job_id) / f"pid-{job.attempt}").read_text())
            if job.job_id.encode() in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, number)
                return True
        return False

    def _finish(self, job: Job) -> None:
        """Set the status of a job whose process has ended, from the files that the process left behind."""
        folder = self.job_folder(job.job_id)
        if (self.run_folder(job.job_id) / "final").is_dir():
            self._update(job, status="completed", error_message=None)
        elif job.cancelled_at is not None:
            self._update(job, status="cancelled")
        elif not (folder / f"pid-{job.attempt}").is_file():  # the service died while starting the job
            self._update(job, status="queued")
        else:
            self._update(job, status="failed", error_message=self._failure_reason(job))

    def _failure_reason(self, job: Job) -> str:
        """Return the last error of the last attempt, without the paths of this machine."""
        offset_file = self.job_folder(job.job_id) / f"log-from-{job.attempt}"
        start = int(offset_file.read_text()) if offset_file.is_file() else 0
        lines = self.log(job.job_id, start=start).strip().splitlines()
        last = lines[-1].strip()[-300:] if lines else ""
        if "No space left" in "\n".join(lines[-20:]):
            return "the disk is full; free some space, then resume from the last checkpoint"
        if last.startswith("error:") or "Error" in last or "out of" in last:
            skipped = next((line for line in reversed(lines) if line.startswith("skipped:")), "")
            reason = "; ".join(filter(None, [last.removeprefix("error: "), skipped]))[:600]
            return reason.replace(str(self.zip_path(job.file_id)), "the data set").replace(f"{self.folder}/", "")
        step = self.progress(job)["current_step"]
        return f"the training process was killed at step {step}; resume continues from the last checkpoint"

    # --- output of a job

    def metrics(self, job_id: str) -> list[dict]:
        """Return the metrics of every step so far, with NaN and infinity as None."""
        return [_finite_row(row) for row in read_jsonl(self.run_folder(job_id) / "metrics.jsonl")]

    def new_metrics(self, job_id: str, position: tuple[int, int]) -> tuple[list[dict], tuple[int, int]]:
        """Return the rows of metrics.jsonl after `position`, and the new position.

        A position is an inode and an offset in bytes; (0, 0) is the start. When the file has been replaced, as after a
        resume, all of its rows are returned.
        """
        try:
            with (self.run_folder(job_id) / "metrics.jsonl").open("rb") as file:
                stat = os.fstat(file.fileno())
                inode, offset = position
                start = offset if inode == stat.st_ino and offset <= stat.st_size else 0
                file.seek(start)
                complete_lines = file.read().rpartition(b"\n")[0]
        except OSError:
            return [], position
        rows = [json.loads(line) for line in complete_lines.split(b"\n") if line]
        end = start + len(complete_lines) + bool(complete_lines)  # the last newline counts, too
        return [_finite_row(row) for row in rows], (stat.st_ino, end)

    def log(self, job_id: str, max_bytes: int = 100_000, start: int = 0) -> str:
        """Return the end of the job's log, starting at byte `start` or later.

        Only the last state of a progress bar is kept, and only the last line of a traceback.
        """
        path = self.job_folder(job_id) / "log.txt"
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            file.seek(max(start, path.stat().st_size - max_bytes))
            text = file.read().decode(errors="replace")
        text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
        return TRACEBACK.sub("", text)

    def _last_row(self, job: Job) -> dict[str, Any]:
        """Return the metrics of the newest step. The file is read only when it has changed."""
        path = self.run_folder(job.job_id) / "metrics.jsonl"
        try:
            mtime = path.stat().st_mtime_ns
        except OSError:
            return {}
        if self.last_metrics.get(job.job_id, (0, {}))[0] != mtime:
            last = next((row for row in reversed(_last_rows(path)) if "reward" in row), {})
            self.last_metrics[job.job_id] = mtime, last
        return self.last_metrics[job.job_id][1]

    def progress(self, job: Job) -> dict[str, Any]:
        """Return the step, the finished fraction, and the newest loss and reward."""
        last = self._last_row(job)
        step = last.get("step", 0)
        return {
            "current_step": step,
            "progress": min(step / job.total_steps, 1.0) if job.total_steps else 0.0,
            "loss": _finite(last.get("loss")),
            "reward": _finite(last.get("reward")),
        }

    def remove_leftovers(self) -> None:
        """Delete what a killed service left behind: uploads without a database row, scratch folders and downloads."""
        file_ids = {file["file_id"] for file in self.files()}
        for path in (self.folder / "files").iterdir():
            if path.stem not in file_ids or path.suffix != ".zip":
                path.unlink(missing_ok=True)
        for path in self.folder.glob("scratch-*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.folder.glob("jobs/*/download-*.zip"):
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def scratch(self) -> Iterator[pathlib.Path]:
        """Yield a temporary folder that is deleted afterwards."""
        folder = self.folder / f"scratch-{uuid.uuid4().hex}"
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _last_rows(path: pathlib.Path, max_bytes: int = 16_384) -> list[dict]:
    """Return the last rows of a .jsonl file, read from its last `max_bytes` bytes."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - max_bytes))
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
