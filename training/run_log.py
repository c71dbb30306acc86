"""TODO training/run_log.py"""

import contextlib
import json
import math
import os
import pathlib
import shlex
import sys
import time
import uuid
from typing import Any

from common import console, distributed
from common.errors import UserError
from common.figures import thumbnail
from common.files import git_commit, read_jsonl
from common.records import TAG, Group
from training.report import draw_curves, write_page

GROUPS_A_REPORT = 3  # groups kept of a reported step


class RunLog:
    """Writes a run's files from the first process; on the others it does nothing."""

    def __init__(self, folder: str, config: dict[str, Any], every: int, resumed: int | None = None):
        """`resumed`: the step after which an earlier run goes on here; None for a new one. Raises UserError when the
        folder cannot be written to."""
        self.folder, self.every, self.resumed = pathlib.Path(folder), every, resumed
        self.waiting: dict[str, str] = {}  # lines of each file that the disk had no room for
        self.full = False  # and it has been said
        if not console.is_main():
            return
        about = {
            "launch": distributed.launcher_ids(),
            "command": shlex.join(sys.argv),
            "git_commit": git_commit(),
            "world_size": distributed.world_size(),
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name in ("metrics.jsonl", "completions.jsonl"):  # the steps after the checkpoint are taken again
                rows = read_jsonl(self.folder / name) if resumed is not None else []
                self._replace(name, "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= resumed))
            self._replace("config.json", json.dumps(config | about, indent=1) + "\n")
        except OSError as error:
            raise UserError(
                f"cannot write into {folder!r} ({error.strerror}): make room or choose another --output"
            ) from None

    def _replace(self, name: str, text: str) -> None:
        """Written beside its place and renamed: what was there is whole until then."""
        partial = self.folder / f"{name}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.rename(self.folder / name)

    def _append(self, name: str, line: str) -> None:
        """A line to a file; when there is no room, which is said once, it waits in memory for the next one."""
        lines, path = self.waiting.pop(name, "") + line, self.folder / name
        size = path.stat().st_size if path.exists() else 0
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(lines)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.truncate(path, size)  # half a line may have found room
            if not self.full:
                print(f"{path} cannot be written ({error.strerror}): its rows wait in memory", file=sys.stderr)
            self.full, self.waiting[name] = True, lines

    def metrics(self, step: int, metrics: dict[str, float]) -> None:
        """One line of metrics.jsonl; every `every` steps the curves and the page are drawn again. What a resumed run
        adds to the step it goes on from, the scores that were still owed, joins that step's line."""
        if not console.is_main() or not metrics:
            return
        row = {"step": step} | {name: _finite(value) for name, value in metrics.items()}
        rows = read_jsonl(self.folder / "metrics.jsonl") if step == self.resumed else []
        if rows and rows[-1]["step"] == step:
            self._replace("metrics.jsonl", "".join(json.dumps(r) + "\n" for r in [*rows[:-1], rows[-1] | row]))
        else:
            self._append("metrics.jsonl", json.dumps(row) + "\n")
        if step % self.every == 0 and step:
            self.refresh()

    def completions(self, step: int, groups: list[Group]) -> None:
        """A few of this process's groups, at the first step and every `every` steps."""
        if not console.is_main() or (step % self.every and step != 1):
            return
        for group in groups[:GROUPS_A_REPORT]:
            row = {
                "step": step,
                "source": group.sample.source,
                "question": group.sample.prompt.replace(TAG, "").strip(),
                "answer": group.sample.answer,
                "images": [thumbnail(image) for image in group.prompt.images],
                "completions": [
                    {"text": r.text, "reward": _finite(r.reward), "advantage": r.advantage, "truncated": r.truncated}
                    for r in group.rollouts
                ],
            }
            self._append("completions.jsonl", json.dumps(row, ensure_ascii=False) + "\n")

    def refresh(self) -> None:
        """Draw curves.png and completions.html again, and write what waits for room."""
        if not console.is_main():
            return
        for name in list(self.waiting):
            self._append(name, "")
        with contextlib.suppress(OSError):  # they are drawn again
            draw_curves(self.folder)
            write_page(self.folder)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no NaN


def check_output_folder(folder: str, overwrite: bool, resumed: bool) -> None:
    """Raise UserError when `folder` cannot be written to, or holds a run that this one neither replaces nor has
    `resumed`."""
    path = pathlib.Path(folder)
    existing = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"cannot write into {str(existing)!r}: choose another --output")
    saved = any(path.glob("checkpoint-*[0-9]"))
    holds_a_run = saved or (path / "metrics.jsonl").exists() or (path / "final").exists()
    if holds_a_run and not (overwrite or resumed):
        what = "holds a run: --resume goes on with it," if saved else "holds a run without a checkpoint:"
        raise UserError(f"{folder!r} {what} --overwrite replaces it")
    if distributed.local_world_size() < distributed.world_size():
        _check_shared_folder(path)


def _check_shared_folder(path: pathlib.Path, patience: float = 10.0) -> None:
    """Raise UserError, on every process, when not all machines of the run see the same folder `path`."""
    mark = path / f".seen-{distributed.all_gather(uuid.uuid4().hex)[0]}"
    if console.is_main():
        path.mkdir(parents=True, exist_ok=True)
        mark.touch()
    distributed.barrier()
    deadline = time.monotonic() + patience  # a shared file system may show it a little later
    while not (seen := mark.exists()) and time.monotonic() < deadline:
        time.sleep(0.2)
    blind = [rank for rank, saw in enumerate(distributed.all_gather(seen)) if not saw]
    if console.is_main():
        mark.unlink()
    if blind:
        raise UserError(
            f"--output {str(path)!r} is another folder for rank {blind[0]}: every process writes its part of a "
            "checkpoint there, so all machines have to share it"
        )
