"""The service's files and training jobs: storage, processes and results.

Everything is on disk: an SQLite database with a table of files and a table of jobs, and a folder for each job. A job is
a `grpo.py` process in its own process group, so it outlives the service. The process inherits a locked file. However
the process ends, the system releases the lock, so the lock shows whether the job is alive. The files that the process
leaves behind show how it ended. One job runs at a time. Methods that take an id raise HTTPException with status 404 if
nothing has this id, and with status 409 if the state of the file or job does not allow the request.
"""

import contextlib
import dataclasses
import datetime
import fcntl
import functools
import json
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
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from subprocess import DEVNULL
from typing import Any

from fastapi import HTTPException
from safetensors import SafetensorError, safe_open

from common import cli, console
from common.errors import UserError
from common.files import lock_file, parse_jsonl
from common.parts import extra
from training.diagnosis import is_metrics

ROOT = pathlib.Path(__file__).resolve().parents[2]
STOP_GRACE = 60.0  # seconds for a cancelled job to save its checkpoint, in addition to the duration of three steps
# A traceback, whose lines may start with torchrun's rank prefix.
TRACEBACK = re.compile(r"(?m)^(\[rank\d+\]: )?Traceback \(most recent call last\):\n((\[rank\d+\]: )?([ \t].*)?\n)*")
DATABASE = "service.sqlite"
MAX_LOG_BYTES = 100_000  # how much of the end of a job's log is shown
HEADLINE = "--- attempt {} ---"  # the line in a job's log at which an attempt starts
SAYS_WHY = re.compile("^error:|Error|out of|could not be written|with --resume$|there is no checkpoint$")
"""Finds the last line of a job that ended itself."""
NEWEST = 50  # how many lines at the end of a file are read to list all jobs
LOCKED_WAIT = 1.0  # second to wait for another program that has locked the database; other calls wait meanwhile

ADAPTER = ("final/adapter_config.json", "final/adapter_model.safetensors")
RUN_FILES = {"metrics.jsonl": is_metrics} | dict.fromkeys(("config.json", *ADAPTER), bool)  # with checks of objects
if pages := extra("pages"):
    RUN_FILES["completions.jsonl"] = pages.is_group
SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    file_id TEXT PRIMARY KEY, filename TEXT, upload_time TEXT, csv_rows INTEGER, valid_images INTEGER,
    usable_rows INTEGER, problems TEXT);
CREATE TABLE IF NOT EXISTS jobs (
    job_id TEXT PRIMARY KEY, job_name TEXT, file_id TEXT, model TEXT, settings TEXT, status TEXT, total_steps INTEGER,
    created_at TEXT, queued_at REAL, attempt INTEGER DEFAULT 0, cancelled_at REAL, error_message TEXT);
"""


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
    attempt: int = 0
    cancelled_at: float | None = None
    error_message: str | None = None

    @property
    def waiting(self) -> bool:
        """Whether the job waits for the jobs before it."""
        return self.status == "queued"

    @property
    def public_status(self) -> str:
        """The status in responses, where a waiting job is `training`: clients written for this API know no `queued`."""
        return "training" if self.waiting else self.status


def used_bytes(folder: pathlib.Path) -> int:
    """Return the total size of the files in `folder`. Files that a running job deletes meanwhile count as 0."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def _now() -> str:
    """Return the time in UTC, without an offset, as the API gives it."""
    return datetime.datetime.now(datetime.UTC).replace(tzinfo=None).isoformat(timespec="seconds")


def _prepare_folder(folder: pathlib.Path) -> None:
    """Create the folder of a service, for this user only.

    Raises UserError if it cannot be written to, or if it holds other files, which are none of the service's business.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        others = {path.name for path in folder.iterdir()} - {"files", "jobs", "service.lock"}
        if (others or any(folder.glob("files/*"))) and DATABASE not in others:
            raise UserError(f"--folder {str(folder)!r} holds other files and no {DATABASE}: choose a new folder")
        for name in ("files", "jobs"):
            (folder / name).mkdir(exist_ok=True)
        folder.chmod(0o700)  # even if the folder already existed
    except OSError as error:
        raise UserError(f"cannot use --folder {str(folder)!r} ({error.strerror}): choose another folder") from None


class Store:
    """Files and jobs in `folder`, of at most `max_gigabytes` in total. Safe to use from many threads."""

    def __init__(self, folder: str, max_gigabytes: float = 100.0):
        self.folder, self.max_gigabytes = pathlib.Path(folder).resolve(), max_gigabytes
        _prepare_folder(self.folder)
        self.lock = threading.RLock()
        self.space_lock = threading.Lock()  # taken before `lock` if both are needed
        self.reserved: dict[str, int] = {}  # bytes of each unfinished upload, by the id that its file will have
        in_use = f"another service is running in {folder!r}: stop it, or choose another --folder"
        self.lock_file = lock_file(self.folder / "service.lock", in_use)
        path = self.folder / DATABASE
        try:
            self._open_database(path)
            known = {f"files/{file['file_id']}.zip" for file in self.files()}
            known |= {f"jobs/{job.job_id}" for job in self.jobs()}
        except (sqlite3.Error, ValueError, TypeError, AttributeError, LookupError) as error:
            reason = error if isinstance(error, sqlite3.Error) else "a row is damaged"
            advice = "close the program that has locked it" if "locked" in str(reason) else "restore it"
            raise UserError(f"{path} cannot be used ({reason}): {advice}, or choose another --folder") from None
        found = {f"{name}/{entry}" for name in ("files", "jobs") for entry in os.listdir(self.folder / name)}
        self.unknown = sorted(found - known)  # nothing is deleted because the database lacks it
        if self.unknown:
            names = f"{len(self.unknown)} files in its folder, which stay and count as used: {', '.join(self.unknown)}"
            console.log(f"{path} does not know {names}; restore it, or upload the ZIPs again and remove these")
        for path in self.folder.glob("scratch-service-*"):  # of a killed service
            shutil.rmtree(path, ignore_errors=True)

    def _open_database(self, path: pathlib.Path) -> None:
        """Open the database, unless any page of it is damaged. Raises sqlite3.Error."""
        log = pathlib.Path(f"{path}-wal")
        if log.is_file() and log.stat().st_size and path.is_file() and not path.stat().st_size:
            os.truncate(path, 4096)  # SQLite deletes the log beside an empty file, but replays it on a page of zeros
        self.database = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=LOCKED_WAIT)
        self.database.row_factory = sqlite3.Row
        problem = self.database.execute("PRAGMA quick_check(1)").fetchone()[0]
        if problem != "ok":
            raise sqlite3.DatabaseError(" ".join(problem.split()))
        self.database.execute("PRAGMA journal_mode = WAL")
        self.database.executescript(SCHEMA)

    def _query(self, query: str, *values: object) -> list[sqlite3.Row]:
        with self.lock:
            return self.database.execute(query, values).fetchall()

    def require_space(self, needed: int = 0) -> None:
        """Raise HTTPException if `needed` bytes beside the reserved ones would exceed the quota or fill the disk."""
        used = sum(used_bytes(self.folder / name) for name in ("files", "jobs")) + sum([*self.reserved.values()])
        if used + needed > self.max_gigabytes * 1e9:
            sizes = f"{used / 1e9:.3g} GB are used, and --max_storage allows {self.max_gigabytes:g} GB"
            if self.unknown:
                sizes += f"; {len(self.unknown)} files that the database does not know count, such as {self.unknown[0]}"
            raise HTTPException(507, f"the service's storage is full ({sizes}): delete data sets or jobs, or raise it")
        if needed > shutil.disk_usage(self.folder).free:
            raise HTTPException(507, "the service's disk is full: free some space, then try again")

    def reserve(self, file_id: str, size: int) -> None:
        """Reserve `size` bytes in total for an upload, until it is stored. Raises HTTPException if there is no room."""
        with self.space_lock:
            self.reserved.pop(file_id, None)
            self.require_space(size)
            self.reserved[file_id] = size

    # --- files

    def zip_path(self, file_id: str) -> pathlib.Path:
        """Return the path of a file's ZIP. Ids are generated by this class, so no user input is part of a path."""
        return self.folder / "files" / f"{file_id}.zip"

    def add_file(self, path: pathlib.Path, filename: str, contents: dict[str, Any], file_id: str | None = None) -> dict:
        """Move the ZIP at `path` into the store, with its `contents`: {rows, images, usable, problems}."""
        file_id = file_id or str(uuid.uuid4())
        problems = json.dumps(contents["problems"])
        counts = [contents[name] for name in ("rows", "images", "usable")]
        with self.space_lock:  # the ZIP counts once, as reserved or as stored
            path.rename(self.zip_path(file_id))
            self.reserved.pop(file_id, None)
        try:
            self._query("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", file_id, filename, _now(), *counts, problems)
        except sqlite3.Error:
            self.zip_path(file_id).unlink()  # the caller learns that it was not stored
            raise
        return self.file(file_id)

    def files(self) -> list[dict]:
        return [_file(row) for row in self._query("SELECT * FROM files ORDER BY upload_time, rowid")]

    def file(self, file_id: str) -> dict:
        for row in self._query("SELECT * FROM files WHERE file_id = ?", file_id):
            return _file(row)
        lost = f"files/{file_id}.zip" in self.unknown
        raise HTTPException(404, f"no file {file_id!r}" + lost * f": its ZIP is there, but {DATABASE} does not know it")

    def delete_file(self, file_id: str) -> None:
        """Delete a file, unless a queued or running job uses it."""
        with self.lock:
            self.file(file_id)
            users = [job for job in self.jobs() if job.file_id == file_id and job.status in ("queued", "training")]
            if users:
                raise HTTPException(409, f"job {users[0].job_id} uses this file: cancel it first")
            self._query("DELETE FROM files WHERE file_id = ?", file_id)
            self.zip_path(file_id).unlink(missing_ok=True)

    # --- jobs

    def job_folder(self, job_id: str) -> pathlib.Path:
        return self.folder / "jobs" / job_id

    def run_folder(self, job_id: str) -> pathlib.Path:
        """Return the output folder of the job's training run."""
        return self.job_folder(job_id) / "run"

    def add_job(self, name: str, file_id: str, model: str, settings: dict[str, Any], total_steps: int) -> Job:
        """Add a queued job and return it."""
        with self.lock:
            self.file(file_id)
            job_id = str(uuid.uuid4())
            job = Job(job_id, name, file_id, model, settings, "queued", total_steps, _now(), time.time())
            values = vars(job) | {"settings": json.dumps(settings)}
            self._query(f"INSERT INTO jobs VALUES ({', '.join('?' * len(values))})", *values.values())
            self.job_folder(job_id).mkdir(exist_ok=True)
            return job

    def add_or_resume(
        self, name: str, file_id: str, model: str, settings: dict[str, Any], total_steps: int
    ) -> tuple[Job, bool]:
        """Resume the last cancelled or failed job with this name, file, model and request; if there is none, add a job.

        Return the queued job, and whether it is a resumed one.
        """
        with self.lock:
            wanted = (name, file_id, model, settings["request"])
            for job in reversed(self.jobs()):
                given = (job.job_name, job.file_id, job.model, job.settings["request"])
                if job.status in ("cancelled", "failed") and given == wanted:
                    return self.resume(job.job_id), True
            return self.add_job(name, file_id, model, settings, total_steps), False

    def jobs(self, status: str | None = None) -> list[Job]:
        where, values = ("WHERE status = ?", (status,)) if status else ("", ())
        return [_job(row) for row in self._query(f"SELECT * FROM jobs {where} ORDER BY queued_at, rowid", *values)]

    def job(self, job_id: str) -> Job:
        for row in self._query("SELECT * FROM jobs WHERE job_id = ?", job_id):
            return _job(row)
        lost = f"jobs/{job_id}" in self.unknown
        raise HTTPException(
            404, f"no job {job_id!r}" + lost * f": its folder is there, but {DATABASE} does not know it"
        )

    def _update(self, job: Job, **changes: Any) -> Job:
        names = ", ".join(f"{name} = ?" for name in changes)
        self._query(f"UPDATE jobs SET {names} WHERE job_id = ?", *changes.values(), job.job_id)
        return dataclasses.replace(job, **changes)

    def cancel(self, job_id: str) -> Job:
        """Cancel a queued job, or ask a running job to save and exit."""
        with self.lock:
            job = self.job(job_id)
            if job.status == "queued":
                return self._update(job, status="cancelled")
            if job.status != "training":
                raise HTTPException(409, f"the job is already {job.status}")
            self._ask_to_stop(job)  # first, because this works even when the disk is full
            return job if job.cancelled_at else self._update(job, cancelled_at=time.time())

    def resume(self, job_id: str) -> Job:
        """Queue a cancelled or failed job again."""
        with self.lock:
            job = self.job(job_id)
            if job.status not in ("cancelled", "failed"):
                raise HTTPException(409, f"the job is {job.status}: only cancelled and failed jobs can be resumed")
            if not self.zip_path(job.file_id).exists():
                raise HTTPException(409, "the job's images were deleted: upload them again and start a new job")
            return self._update(job, status="queued", cancelled_at=None, error_message=None, queued_at=time.time())

    def delete(self, job_id: str) -> None:
        """Delete a job that has ended, with all of its files."""
        with self.lock:
            job, folder = self.job(job_id), self.job_folder(job_id)
            if job.status in ("queued", "training"):
                raise HTTPException(409, "the job has not ended: cancel it first")
            with contextlib.suppress(OSError):  # something is in the place of the lock
                if self._is_alive(job):
                    raise HTTPException(409, "the job's process has not ended: try again in a moment")
            shutil.rmtree(folder, ignore_errors=True)  # before the row: after a kill, the job can be deleted again
            if folder.exists():
                raise HTTPException(409, f"jobs/{job_id} cannot be deleted: move it away, then try again")
            self._query("DELETE FROM jobs WHERE job_id = ?", job_id)

    # --- processes

    def poll(self) -> None:
        """Check the running job, or start the next job if none is running. `job_loop` calls this repeatedly."""
        with self.lock:
            for job in self.jobs("training"):
                self._advance(job)
            if not self.jobs("training") and (queued := self.jobs("queued")):
                self._advance(queued[0])

    def _advance(self, job: Job) -> None:
        """Start a queued job or check a running one. If something is in the place of a file, only this job fails."""
        try:
            self._start(job) if job.status == "queued" else self._watch(job)
        except (FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError) as error:  # unlike a full disk
            self._signal(job, signal.SIGTERM)
            name = str(error.filename).removeprefix(f"{self.folder}/")
            reason = f"{name} cannot be used ({error.strerror}): move it away, then resume"
            self._update(job, status="failed", error_message=reason)

    def _watch(self, job: Job) -> None:
        steps = self._read(job, "config.json")[0].get("total_steps")
        if isinstance(steps, int) and 0 < steps < 2**53 and steps != job.total_steps:  # the run drops duplicate rows
            job = self._update(job, total_steps=steps)
        if not self._is_alive(job):
            self._finish(job)
        elif job.cancelled_at is not None:
            self._ask_to_stop(job)
            step_time = self._read(job, "metrics.jsonl", newest=True)[0].get("step_time") or 0.0
            if time.time() > job.cancelled_at + STOP_GRACE + 3 * step_time:
                self._signal(job, signal.SIGKILL)

    def _is_alive(self, job: Job) -> bool:
        """Return whether a process of the job still holds the job's lock."""
        folder = self.job_folder(job.job_id)
        folder.mkdir(parents=True, exist_ok=True)  # someone may have deleted it
        with (folder / "lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return True
        return False

    def _start(self, job: Job) -> None:
        folder = self.job_folder(job.job_id)
        folder.mkdir(parents=True, exist_ok=True)
        job = self._update(job, status="training", attempt=job.attempt + 1)
        command = [sys.executable, str(ROOT / "grpo.py"), *self._flags(job), "--resume", "auto"]
        shell = ["sh", "-c", 'echo $$ > "$0"; exec nice -n 5 "$@"', str(folder / f"pid-{job.attempt}"), *command]
        with (folder / "lock").open("w") as lock, (folder / "log.txt").open("a") as log:
            print("\n" + HEADLINE.format(job.attempt), file=log, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
            child = subprocess.Popen(
                shell, cwd=ROOT, stdin=DEVNULL, stdout=log, stderr=log, start_new_session=True, pass_fds=[lock.fileno()]
            )
        threading.Thread(target=child.wait, daemon=True).start()  # reaps the child, which would otherwise stay a zombie

    def _flags(self, job: Job) -> list[str]:
        """Return the job's flags for grpo.py."""
        flags = {"task": "count", "model": job.model, "data": self.zip_path(job.file_id)} | job.settings["flags"]
        flags |= {"output": self.run_folder(job.job_id), "skip_bad_rows": True, "save_every": 10, "report_every": 5}
        return cli.as_arguments(flags)

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
        started = (self.job_folder(job.job_id) / f"pid-{job.attempt}").is_file()
        if (self.run_folder(job.job_id) / "final").is_dir():
            self._update(job, status="completed", error_message=None)
        elif job.cancelled_at is not None:
            self._update(job, status="cancelled")
        elif not started:  # the service died while starting the job
            self._update(job, status="queued")
        else:
            self._update(job, status="failed", error_message=self._failure_reason(job))

    def _failure_reason(self, job: Job) -> str:
        """Return the last error of the last attempt, without the paths of this machine."""
        lines = self.log(job.job_id).rpartition(HEADLINE.format(job.attempt))[2].strip().splitlines()
        last = lines[-1].strip()[-300:] if lines else ""
        if "No space left" in "\n".join(lines[-20:]):
            return "the disk is full; free some space, then resume from the last checkpoint"
        if SAYS_WHY.search(last):
            skipped = [line for line in lines if line.startswith("skipped:")]
            reason = re.sub("^error: |: [a-z ]+ with --resume$", "", last)
            reason = "; ".join([reason, *skipped[-1:]])[:600]
            return reason.replace(str(self.zip_path(job.file_id)), "the data set").replace(f"{self.folder}/", "")
        step = self.progress(job)["current_step"]
        return f"the training process was killed at step {step}; resume continues from the last checkpoint"

    # --- output of a job

    def metrics(self, job_id: str, position: tuple[int, int] = (0, 0)) -> tuple[list[dict], tuple[int, int]]:
        """Return the rows of metrics.jsonl after `position`, without damaged ones, and the new position.

        A position is an inode and an offset in bytes. All rows are returned if a resume has replaced the file.
        """
        try:
            with (self.run_folder(job_id) / "metrics.jsonl").open("rb") as file:
                stat = os.fstat(file.fileno())
                inode, offset = position
                start = offset if inode == stat.st_ino and offset <= stat.st_size else 0
                file.seek(start)
                lines = [line for line in file if line.endswith(b"\n")]  # the last line may be incomplete
        except OSError:
            return [], position
        rows, _ = parse_jsonl(enumerate(lines), is_metrics)
        return rows, (stat.st_ino, start + sum(map(len, lines)))

    def log(self, job_id: str) -> str:
        """Return the end of the job's log, with only the last line of each traceback."""
        path = self.job_folder(job_id) / "log.txt"
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MAX_LOG_BYTES))
            text = file.read().decode(errors="replace")
        return TRACEBACK.sub("", text)

    def progress(self, job: Job) -> dict[str, Any]:
        """Return the step, the finished percentage, the newest loss, reward and numbers of answers, and the scores."""
        last, _ = self._read(job, "metrics.jsonl", newest=True)
        step = last.get("step", 0)
        progress = round(100 * min(step / job.total_steps, 1.0), 1) if job.total_steps else 0.0
        answers = int(last.get("groups_drawn") or 0) * job.settings.get("flags", {}).get("num_generations", 0)
        right = round((last.get("frac_reward_full") or 0.0) * answers)
        newest = {"loss": last.get("loss"), "reward": last.get("reward"), "answers": answers, "right_answers": right}
        scores: dict[str, Any] = {"held_out_rows": 0, "score_before": None, "score_after": None}
        with contextlib.suppress(OSError), (self.run_folder(job.job_id) / "metrics.jsonl").open("rb") as file:
            for first in parse_jsonl([(1, file.readline())], is_metrics)[0]:
                scores |= {"held_out_rows": first.get("eval/rows") or 0, "score_before": first.get("eval/reward")}
        scores["score_after"] = last.get("eval/reward") if step else None
        return {"current_step": step, "progress": progress} | newest | scores

    def damage(self, job: Job, names: Iterable[str] = RUN_FILES, newest: bool = False) -> str | None:
        """Return which files of the job's run are damaged, and where, or None. `newest`: see `_read`."""
        found = [(name, self._read(job, name, newest)[1]) for name in names]
        return "; ".join(f"{name} {damage}" for name, damage in found if damage) or None

    def _read(self, job: Job, name: str, newest: bool = False) -> tuple[dict[str, Any], str | None]:
        """Return the last valid object in a file of the job's run, or {}, and what is damaged in the file, or None.

        With `newest`, only the last lines are read. The file is read only if its modification time has changed.
        """
        path = self.run_folder(job.job_id) / name
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return _read_file(path, path.stat().st_mtime_ns, name, job.status in ("queued", "training"), newest)
        return {}, "is missing" if job.status == "completed" else None


@functools.lru_cache(maxsize=10_000)
def _read_file(path: pathlib.Path, mtime: int, name: str, is_written: bool, newest: bool) -> tuple[dict, str | None]:
    has_lines = path.suffix == ".jsonl"
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "np"):  # checks the header and the size
                return {}, None
        with path.open("rb") as file:
            lines = deque(enumerate(file if has_lines else [file.read()], start=1), maxlen=NEWEST if newest else None)
    except (OSError, SafetensorError) as error:
        return {}, f"cannot be read ({getattr(error, 'strerror', error)})"
    if is_written and has_lines and lines and not lines[-1][1].endswith(b"\n"):  # the job is writing this line
        lines.pop()
    rows, damage = parse_jsonl(lines, RUN_FILES[name])
    return rows[-1] if rows else {}, damage and (f"has {damage}" if has_lines else "is damaged")


def _file(row: sqlite3.Row) -> dict:
    return dict(row) | {"problems": json.loads(row["problems"])}


def _job(row: sqlite3.Row) -> Job:
    return Job(**dict(row) | {"settings": json.loads(row["settings"])})
