"""The log of a run: its settings, the metrics of every step, and what is printed after a step.

`RunLog` writes `config.json` and `metrics.jsonl`; sampled completions, pages and trackers are those of parts/pages. A
full disk does not stop the run: lines that cannot be written are kept in memory and written later.
`check_output_folder` rejects an unusable output folder before the run starts.
"""

import contextlib
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
from common.files import atomic_write, git_commit, json_lines, read_jsonl
from common.parts import extra
from common.records import ScoredGroup
from common.spans import of_completions
from training.diagnosis import is_metrics, keep, problems, shows_reward
from training.run_folder import checkpoints_by_step

SHARE_WAIT = 10.0  # seconds; a shared file system may show a new file late
OF_PAGES = ("completions.jsonl", "curves.png", "completions.html", "index.html")


class RunLog:
    """Writes the log files of a run on the main process; does nothing on other processes."""

    def __init__(self, folder: str, config: dict[str, Any], resumed_step: int | None = None, decode: Callable = str):
        """Create the log files of a new run, or continue those of a run resumed after `resumed_step`.

        `config`: the flags; `decode` returns the text of tokens. Raises UserError when the folder cannot be written to.
        """
        self.folder, self.resumed_step = pathlib.Path(folder), resumed_step
        self.waiting: dict[str, str] = {}  # lines that could not be written yet, by the name of their file
        self.started, self.steps = time.monotonic(), 0  # when this process began to train, and its finished steps
        self.example = ""  # a completion of the step
        self.pages: Any = None  # `parts.pages.Pages` of the main process
        if not console.is_main():
            return
        launch = {"world_size": distributed.world_size(), "command": shlex.join(sys.argv), "git_commit": git_commit()}
        settings = hide_credentials(json.dumps(config | launch | plugins.record(), indent=1))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            rows = self.begin("metrics.jsonl", is_metrics)
            atomic_write(self.folder / "config.json", settings + "\n")
            for name in OF_PAGES if resumed_step is None else ():
                (self.folder / name).unlink(missing_ok=True)  # it is of an earlier run
            if config.get("report_every") or config.get("log_to"):
                if pages := extra("pages"):
                    self.pages = pages.Pages(self, json.loads(settings), decode)
                else:
                    console.log("no pages: parts/pages is not here; metrics.jsonl has every step")
        except OSError as error:
            raise UserError(
                f"cannot write to {folder!r} ({error.strerror}): free some space or choose another --output"
            ) from None
        self.history: list[dict[str, Any]] = []  # the rows that matter for warnings
        self.warned: set[str] = set()  # what warnings have been printed about
        for row in rows:
            keep(self.history, row)
            self.warned |= problems(self.history).keys()

    def begin(self, name: str, is_valid: Callable[[dict], bool]) -> list[dict]:
        """Create the log file `name` and return its rows: after a resume, those up to the step of the checkpoint."""
        rows = []
        if (last := self.resumed_step) is not None:
            rows = [row for row in read_jsonl(self.folder / name, is_valid) if row["step"] <= last]
        atomic_write(self.folder / name, json_lines(rows))
        return rows

    def metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Append a line to `metrics.jsonl`, or add scores that were still due after a resume to the line of their step.

        On a full disk, these get a line of their own as soon as there is space.
        """
        if not console.is_main() or not metrics:
            return
        row = {"step": step} | {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        new = [row]
        if self.history and self.history[-1]["step"] == step and not self.waiting.get("metrics.jsonl"):
            with contextlib.suppress(OSError):
                *before, last = read_jsonl(self.folder / "metrics.jsonl", is_metrics)
                atomic_write(self.folder / "metrics.jsonl", json_lines([*before, last | row]))
                new = []
        self.append("metrics.jsonl", new)
        keep(self.history, row)
        if self.pages:
            self.pages.metrics(row)

    def print_step(self, step: int, steps_left: int, metrics: dict[str, float]) -> None:
        """Print one line, of at most 80 characters, for a step or for the evaluation before the first step.

        `signal` is the share of groups whose rewards differ. With a teacher, its KL replaces `signal`, and the reward
        is left out if it has always been 0. The line ends with the held-out score or, if there is none, the time left,
        estimated from the mean time of this process's steps and evaluations. New warnings follow.
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
        """Keep a completion for a warning, and give the pages the groups of the main process.

        `advantages`, (P, G) or (P, G, L), are those of all groups of the step.
        """
        self.example = next((repr(rollout.text[:80]) for group in groups for rollout in group.rollouts), "none")
        if self.pages:
            self.pages.completions(step, [(group, of_completions(group, advantages)) for group in groups])

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Try to write the lines kept in memory, and end the pages, however the run ends."""
        for name in list(self.waiting):
            self.append(name, [])
        if self.pages:
            self.pages.close(error is not None)

    def append(self, name: str, rows: list[dict]) -> None:
        """Append rows to a file. If that fails, they are kept in memory and written together with the next ones."""
        path, lines = self.folder / name, self.waiting.get(name, "") + json_lines(rows)
        size = path.stat().st_size if path.exists() else 0
        try:
            with path.open("a", encoding="utf-8", errors="replace") as file:
                file.write(lines)
            self.waiting.pop(name, None)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.truncate(path, size)  # some of the lines may have been written
            if name not in self.waiting:
                console.log(f"cannot write {path} ({error.strerror}): keeping its rows in memory for now")
            self.waiting[name] = lines


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
