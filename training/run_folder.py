"""The output folder of a run: its lock, which checkpoints it holds, which one is resumed, and which ones are deleted.

A checkpoint is a folder `checkpoint-STEP`. It is written as `checkpoint-STEP.partial`, flushed to disk and renamed when
it is complete, and renamed back before it is deleted. A killed run therefore never leaves a part of a checkpoint under
the final name. `manifest.json` has the size of each file, so that a damaged checkpoint is noticed before it is loaded.
"""

import contextlib
import json
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from common import console, distributed
from common.errors import UserError
from common.files import flush, lock_file, partial_path

MANIFEST = "manifest.json"
LOCK = "run.lock"
WRITTEN = re.compile(r"(final|checkpoint-\d+)(\.partial)?")  # what a run may delete
LOCK_WAIT = 120.0  # seconds that `--resume auto` waits; a file server may keep a lost machine's lock for 90 seconds


@dataclass(frozen=True)
class ResumePlan:
    """Where a run starts."""

    checkpoint: Path | None  # None for a new run
    continues_output: bool  # whether the checkpoint is of the run in the output folder, which is then continued
    replaces_output: bool  # whether a run in the output folder may be replaced without `--overwrite`


class RunFolder:
    """The checkpoints in the output folder of a run."""

    def __init__(self, output: str, keep_last: int = 0):
        """`keep_last`: number of most recent checkpoints to keep; 0: all."""
        self.path, self.keep_last = Path(output), keep_last
        self.lock: IO[str] | None = None

    def plan_resume(self, requested: str | None) -> ResumePlan:
        """Return where the run starts, the same on every process.

        `requested` is a checkpoint's folder, "newest", "auto" (the newest if there is one) or None. If the newest
        checkpoint is damaged, a message says so and the previous checkpoint is tried. With "auto", the processes of an
        earlier start have time to end first.
        """
        plan = None
        with distributed.shared_errors():
            if console.is_main():
                if os.path.exists(self.path / LOCK):  # a run that may still be refused must not write into a new folder
                    self._lock(LOCK_WAIT if requested == "auto" else 0.0)
                plan = self._plan_resume(requested)
        return distributed.all_gather(plan)[0]

    def _lock(self, wait: float = 0.0) -> None:
        """Lock the folder until the process ends. Raises UserError if another run still has it after `wait` seconds."""
        give_up_at = time.monotonic() + wait
        in_use = f"another run writes to {str(self.path)!r}: wait until it ends, stop it, or choose another --output"
        while True:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                self.lock = lock_file(self.path / LOCK, in_use)
                return
            except OSError as error:
                problem = f"cannot write to {str(self.path)!r} ({error.strerror})"
                raise UserError(f"{problem}: free some space or choose another --output") from None
            except UserError:
                if time.monotonic() >= give_up_at:
                    raise
            time.sleep(0.5)

    def _plan_resume(self, requested: str | None) -> ResumePlan:
        if not requested:
            return ResumePlan(None, continues_output=False, replaces_output=False)
        checkpoints = checkpoints_by_step(self.path)
        if requested == "newest" or (requested == "auto" and checkpoints):
            checkpoint = self._newest_complete()
        elif requested == "auto":
            checkpoint = None
        else:
            checkpoint = named_checkpoint(Path(requested), "--resume")
        own_steps = [step for step, own in checkpoints.items() if checkpoint and own.samefile(checkpoint)]
        later = [path for step, path in checkpoints.items() if own_steps and step > own_steps[0]]
        if complete := [path for path in later if verify_checkpoint(path) is None]:
            raise UserError(f"--resume: {complete[0]} is newer than {checkpoint}: choose a new --output to start there")
        is_unfinished = requested == "auto" and not (self.path / "final").exists()
        return ResumePlan(checkpoint, bool(own_steps), is_unfinished)

    def _newest_complete(self) -> Path:
        checkpoints = checkpoints_by_step(self.path)
        for step in sorted(checkpoints, reverse=True):
            error = verify_checkpoint(checkpoints[step])
            if error is None:
                return checkpoints[step]
            console.log(error + ("; trying the previous checkpoint" if step > min(checkpoints) else ""))
        problem = "no complete checkpoint" if checkpoints else "no checkpoint"
        holds_run = checkpoints or (self.path / "metrics.jsonl").exists()
        flag = "use --overwrite instead" if holds_run else "leave out --resume"
        raise UserError(f"--resume: {problem} in {str(self.path)!r}; {flag} to start a new run")

    def prepare(self, step: int | None) -> None:
        """Prepare the folder for a run that resumes after `step`; for a new run (None), delete any earlier run.

        Call this after all other checks have passed. Raises UserError on every process if another run has started in
        the folder since `plan_resume`.
        """
        with distributed.shared_errors():
            if console.is_main() and not self.lock:
                if (self.path / LOCK).exists():
                    raise UserError(f"another run has started in {str(self.path)!r}: choose another --output")
                self._lock()
        if not console.is_main():
            return
        for leftover in [path for path in self.path.glob("*.partial") if WRITTEN.fullmatch(path.name)]:
            shutil.rmtree(leftover, ignore_errors=True)
        if step is None:
            for folder in [path for path in self.path.iterdir() if WRITTEN.fullmatch(path.name)]:
                _delete(folder)

    def partial(self, step: int) -> Path:
        """Return the folder into which the checkpoint of `step` is written until it is complete."""
        return partial_path(self.path / f"checkpoint-{step}")

    def publish(self, step: int) -> None:
        """Give the written checkpoint of `step` its manifest and its final name, then delete expired checkpoints.

        A damaged checkpoint of `step`, from before the run was resumed, is replaced. Raises OSError if there already is
        a complete one, which is then kept.
        """
        partial, checkpoint = self.partial(step), self.path / f"checkpoint-{step}"
        write_manifest(partial)
        if verify_checkpoint(checkpoint):
            shutil.rmtree(checkpoint, ignore_errors=True)
        partial.rename(checkpoint)
        flush(self.path)
        checkpoints = checkpoints_by_step(self.path)
        steps = sorted(other for other in checkpoints if other <= step)
        kept = steps[-self.keep_last :]  # the slice [-0:] is the whole list
        for expired in [checkpoints[other] for other in steps if other not in kept]:
            _delete(expired)


def checkpoints_by_step(folder: Path) -> dict[int, Path]:
    """Return the folders in `folder` that are named `checkpoint-STEP`, keyed by step."""
    matches = [(re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in folder.glob("checkpoint-*")]
    return {int(match[1]): path for match, path in matches if match and path.exists()}  # no broken links


def named_checkpoint(folder: Path, flag: str) -> Path:
    """Return `folder`, which the user gave as `flag`, if it is a complete checkpoint, else raise UserError."""
    checkpoints = checkpoints_by_step(folder)
    if checkpoints and not os.path.exists(folder / MANIFEST):
        newest = checkpoints[max(checkpoints)]
        raise UserError(f"{flag}: {str(folder)!r} is a run: pass one of its checkpoints, the newest is {newest}")
    if error := verify_checkpoint(folder):
        raise UserError(error)
    return folder


def _delete(folder: Path) -> None:
    """Delete `folder` under another name, so that a kill cannot leave a part of it that looks like a checkpoint."""
    partial = partial_path(folder)
    shutil.rmtree(partial, ignore_errors=True)
    with contextlib.suppress(OSError):  # a file server may keep a folder whose files are still open somewhere
        folder.rename(partial)
    shutil.rmtree(partial, ignore_errors=True)


def write_manifest(folder: Path) -> None:
    """Write `manifest.json` with the size of every file in `folder`, then flush everything to disk."""
    paths = sorted(path for path in folder.iterdir() if path.name != MANIFEST)
    files = {path.name: {"size": path.stat().st_size} for path in paths}
    (folder / MANIFEST).write_text(json.dumps({"files": files}, indent=1))
    for path in [*paths, folder / MANIFEST, folder]:
        flush(path)


def verify_checkpoint(folder: Path) -> str | None:
    """Compare the checkpoint in `folder` with its manifest; return an error message, or None if all sizes match."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        damaged = [name for name, file in files.items() if (folder / name).stat().st_size != file["size"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{folder} is not a complete checkpoint ({type(error).__name__}: {str(error)[:300]})"
    return f"{folder}: {damaged[0]} is damaged: its size differs from {MANIFEST}" if damaged else None
