"""The log files of a run: settings, metrics of every step, sampled completions, and the figures drawn from them.

`RunLog` writes `config.json`, `metrics.jsonl` and `completions.jsonl` on the main process, and redraws `curves.png` and
the pages every `report_every` steps (see `report.py`). A full disk does not stop the run: lines that cannot be
written are kept in memory and written later. `check_output_folder` rejects an unusable output folder before the run
starts. With `--log_to`, the same rows go to trackers such as W&B (see `trackers.py`).
"""

import contextlib
import itertools
import json
import math
import os
import pathlib
import shlex
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

from torch import Tensor
from tqdm import tqdm

from common import console, distributed, plugins
from common.console import hide_credentials
from common.errors import UserError
from common.figures import thumbnail
from common.files import atomic_write, git_commit, json_lines, read_jsonl
from common.records import ScoredGroup, Trajectory
from common.spans import of_completions
from training import trackers
from training.diagnosis import all_problems, problems
from training.report import VALID_ROWS, draw_curves, is_metrics, shows_reward, write_index, write_page
from training.run_folder import checkpoints_by_step

SHARE_WAIT = 10.0  # seconds; a shared file system may show a new file late
GROUPS_PER_REPORT = 3  # number of groups that are logged for a reported step
TURN_SIDE = 128  # pixels of the longer side of a picture of a later turn: there are many on a page


class RunLog:
    """Writes the log files of a run on the main process; does nothing on other processes."""

    def __init__(
        self,
        folder: str,
        config: dict[str, Any],
        every: int,
        resumed_step: int | None = None,
        decode: Callable[[list[int]], str] = str,
    ):
        """Create the log files of a new run, or continue those of a run resumed after `resumed_step`.

        `every`: steps between two reports; 0 for none. `decode` returns the text of tokens. Raises UserError when the
        folder cannot be written to.
        """
        self.decode = decode
        self.folder, self.every, self.resumed_step = pathlib.Path(folder), every, resumed_step
        self.waiting = dict.fromkeys(VALID_ROWS, "")  # lines that could not be written yet
        self.shown: set[str] = set()  # sources of the rows in completions.jsonl
        self.started, self.steps = time.monotonic(), 0  # when this process began to train, and its finished steps
        self.failure_reported = False  # whether a failed write has been reported
        self.example = ""  # a completion of the step
        self.newest: tuple[int, list] = (0, [])  # the newest step and its groups, until they are logged
        if not console.is_main():
            return
        launch = {"world_size": distributed.world_size(), "command": shlex.join(sys.argv), "git_commit": git_commit()}
        launch |= plugins.record()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name in self.waiting:  # steps after the checkpoint will be repeated
                rows = read_jsonl(self.folder / name, VALID_ROWS[name]) if resumed_step is not None else []
                atomic_write(self.folder / name, json_lines([row for row in rows if row["step"] <= resumed_step]))
                self.shown |= {str(row.get("source")) for row in rows}
            if resumed_step is None:  # of an earlier run
                for name in ("curves.png", "completions.html", "index.html"):
                    (self.folder / name).unlink(missing_ok=True)
            settings = hide_credentials(json.dumps(config | launch, indent=1))
            atomic_write(self.folder / "config.json", settings + "\n")
        except OSError as error:
            raise UserError(
                f"cannot write to {folder!r} ({error.strerror}): free some space or choose another --output"
            ) from None
        self.history = read_jsonl(self.folder / "metrics.jsonl")
        self.warned = set(all_problems(self.history))  # what warnings have been printed about
        names = config.get("log_to", ())
        self.track, self.close_trackers = trackers.start(names, self.folder, json.loads(settings), resumed_step)

    def metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Append one line to `metrics.jsonl`. Every `every` steps, redraw the curves.

        After a resume, the evaluation at the checkpoint's step may still be due. Its scores are then merged into the
        existing line of that step. On a full disk, they get a line of their own as soon as there is space.
        """
        if not console.is_main() or not metrics:
            return
        row = {"step": step} | {name: _finite(value) for name, value in metrics.items()}
        self.history.append(row)
        self.track(step, {name: value for name, value in metrics.items() if math.isfinite(value)}, [])
        if not (step == self.resumed_step and self._merge(row)):
            self._append("metrics.jsonl", [row])
        if self.every and step % self.every == 0 and step:
            self.refresh()

    def _merge(self, row: dict) -> bool:
        """Add `row` to the last line of `metrics.jsonl` if that is of the same step. Return whether it was added."""
        rows = read_jsonl(self.folder / "metrics.jsonl", is_metrics)
        if not rows or rows[-1]["step"] != row["step"]:
            return False
        try:
            atomic_write(self.folder / "metrics.jsonl", json_lines([*rows[:-1], rows[-1] | row]))
        except OSError:
            return False
        return True

    def print_step(self, step: int, steps_left: int, metrics: dict[str, float]) -> None:
        """Print one line, of at most 80 characters, for a step or for the evaluation before the first step.

        `signal` is the share of groups whose rewards differ. With a teacher, its KL stands there instead, and the
        reward only if one counts. The exact match on held-out rows or, if not measured, the time left, from the mean
        time of this process's steps and evaluations, ends the line. New warnings follow.
        """
        if not metrics or not console.is_main():
            return
        columns = [f"step {step}/{step + steps_left}"]
        if "step_time" in metrics:
            self.steps += 1
            if "reward" in metrics:
                columns += [f"reward {metrics['reward']:.3f}"] if shows_reward(self.history) else []
                signal = f"signal {1 - metrics['frac_reward_zero_std']:.0%}"
                columns.append(f"teacher_kl {metrics['teacher_kl']:.3f}" if "teacher_kl" in metrics else signal)
                columns.append(f"{metrics['completions/mean_length']:.0f} tokens")
            else:
                columns.append(f"loss {metrics['loss']:.3g}")
            columns.append(f"{metrics['step_time']:.1f} s")
        if "eval/loss" in metrics:
            columns.append(f"held-out loss {metrics['eval/loss']:.3f}")
        elif "eval/exact_match" in metrics:
            columns.append(f"held-out {metrics['eval/exact_match']:.3f}")
        elif self.steps:
            seconds_left = (time.monotonic() - self.started) / self.steps * steps_left
            columns.append(f"{tqdm.format_interval(seconds_left)} left")
        console.log("  ".join(columns))
        for name, line in problems(self.history, self.example).items():
            if name not in self.warned:
                console.log(f"warning: {line}")
            self.warned.add(name)

    def completions(self, step: int, groups: list[ScoredGroup], advantages: Tensor) -> None:
        """Log some groups of the main process and write the page: at step 1, every `every` steps and at the end.

        Rows that were logged before come first: the page shows how their completions change.
        `advantages`, (P, G) or (P, G, L), are those of all groups of the step.
        """
        self.example = next((repr(rollout.text[:80]) for group in groups for rollout in group.rollouts), "none")
        if not console.is_main() or not self.every:
            return
        chosen = sorted(groups, key=lambda group: group.sample.source not in self.shown)[:GROUPS_PER_REPORT]
        self.newest = step, [(group, of_completions(group, advantages)) for group in chosen]
        if step % self.every == 0 or step == 1:
            self._log_newest()

    def _log_newest(self) -> None:
        """Log the chosen groups of the newest step, unless they are logged already, and write the page."""
        (step, chosen), self.newest = self.newest, (0, [])
        if not chosen:
            return
        rows = []
        for group, advantages in chosen:
            self.shown.add(group.sample.source)
            scored = zip(group.rollouts, group.rewards, advantages, strict=True)
            row = {
                "step": step,
                "source": group.sample.source,
                "question": "\n\n".join(group.sample.texts).strip(),
                "answer": group.sample.answer,
                "images": [thumbnail(image) for image in group.prompt.images],
                "completions": [
                    {"text": r.text, "reward": _finite(rewards.total), "truncated": r.truncated}
                    | {"rewards": {name: _finite(value) for name, value in rewards.parts.items()}}
                    | ({"turns": _turns(r.trajectory)} if r.trajectory else {})
                    | self._advantage(r.ids, advantage)
                    for r, rewards, advantage in scored
                ],
            }
            rows.append(row)
        self._append("completions.jsonl", rows)
        self.track(step, {}, rows)
        with contextlib.suppress(OSError):  # the next report writes it again
            write_page(self.folder)

    def _advantage(self, ids: Tensor, advantage: Tensor) -> dict[str, Any]:
        """Return the advantage of a completion, null if it is left out, and the parts of its text that have their own.

        If the tokens have advantages of their own, that of the completion is their mean.
        """
        fields: dict[str, Any] = {"advantage": _finite(advantage.mean().item())}
        if advantage.ndim and fields["advantage"] is not None:
            runs = itertools.groupby(zip(ids.tolist(), advantage.tolist()), key=lambda pair: pair[1])
            fields["parts"] = [(self.decode([token for token, _ in run]), _finite(value)) for value, run in runs]
        return fields

    def refresh(self) -> None:
        """Redraw `curves.png`, log the newest completions, and try to write the lines kept in memory."""
        if not console.is_main():
            return
        self._log_newest()
        for name in self.waiting:
            self._append(name, [])
        if self.every:
            with contextlib.suppress(OSError):  # the next report draws it again
                draw_curves(self.folder)
                write_index(self.folder)

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Log and draw the last step, and end the runs of the trackers, however the run ends.

        The trackers' own exit handlers may not run: after an error, `cli.run` skips them.
        """
        self.refresh()
        if console.is_main():
            self.close_trackers(error is not None)

    def _append(self, name: str, rows: list[dict]) -> None:
        """Append rows to a file. If that fails, they are kept in memory and written together with the next ones."""
        self.waiting[name] += json_lines(rows)
        path = self.folder / name
        size = path.stat().st_size if path.exists() else 0
        try:
            with path.open("a", encoding="utf-8", errors="replace") as file:
                file.write(self.waiting[name])
            self.waiting[name] = ""
        except OSError as error:
            with contextlib.suppress(OSError):
                os.truncate(path, size)  # some of the lines may have been written
            if not self.failure_reported:
                console.log(f"cannot write {path} ({error.strerror}): keeping its rows in memory for now")
            self.failure_reported = True


def _turns(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Return the turns of an episode for the page: who wrote them, and their texts and pictures (data URIs)."""

    def shown(part: Any) -> dict[str, str]:
        return {"text": part} if isinstance(part, str) else {"image": thumbnail(part, TURN_SIDE)}

    return [{"role": turn.role, "parts": list(map(shown, turn.content))} for turn in trajectory.turns]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no NaN


def check_output_folder(folder: str, overwrite: bool, continued: bool) -> None:
    """Raise UserError when `folder` cannot be written to, is not shared by all machines, or contains another run.

    An existing run in the folder is accepted if this run replaces it (`overwrite`) or continues it (`continued`).
    """
    path = pathlib.Path(folder)
    existing = next(candidate for candidate in (path, *path.absolute().parents) if candidate.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"cannot write to {str(existing)!r}: choose another --output")
    has_checkpoint = bool(checkpoints_by_step(path))
    holds_run = has_checkpoint or (path / "metrics.jsonl").exists() or (path / "final").exists()
    if holds_run and not (overwrite or continued):
        if has_checkpoint:
            raise UserError(f"{folder!r} contains a run: continue it with --resume or replace it with --overwrite")
        raise UserError(f"{folder!r} contains a run without a checkpoint: replace it with --overwrite")
    if distributed.local_world_size() < distributed.world_size():
        _check_shared_folder(path)


def _check_shared_folder(path: pathlib.Path) -> None:
    """Raise UserError, on every process, unless all machines see a file of rank 0 in `path` within `SHARE_WAIT`."""
    marker = path / f".marker-{distributed.all_gather(uuid.uuid4().hex)[0]}"
    if console.is_main():
        path.mkdir(parents=True, exist_ok=True)
        marker.touch()
    distributed.barrier()
    deadline = time.monotonic() + SHARE_WAIT
    while not (visible := marker.exists()) and time.monotonic() < deadline:
        time.sleep(0.2)
    missing = [rank for rank, visible in enumerate(distributed.all_gather(visible)) if not visible]
    if console.is_main():
        marker.unlink()
    if missing:
        raise UserError(
            f"--output {str(path)!r} is a different folder on the machine of rank {missing[0]}: every process writes "
            "its shard of a checkpoint there, so all machines must share it"
        )
