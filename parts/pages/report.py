"""The pages of a run: `curves.png`, `completions.html` and `index.html`, and what is logged for them.

The folder of a run holds `config.json` (with the command and the git commit), `metrics.jsonl` (one object per step) and
`completions.jsonl` (sampled groups), which `Pages` logs. From these, the pages are made.
"""

from __future__ import annotations

import itertools
import math
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from common import console
from common.errors import describe
from common.figures import save_figure, save_page, thumbnail
from common.files import parse_jsonl, read_jsonl
from common.records import ScoredGroup, Turn
from parts.pages.trackers import Trackers
from training.diagnosis import is_metrics, keep, problems, shows_reward

if TYPE_CHECKING:  # the service imports this, and importing torch would delay its start by seconds
    from torch import Tensor

    from training.run_log import RunLog

TEMPLATE = pathlib.Path(__file__).parent / "index.html.j2"
GROUPS_PER_REPORT = 3  # number of groups that are logged for a reported step
GROUPS_ON_PAGE = 60  # number of groups on the page; older ones are left out
TURN_SIDE = 128  # pixels of the longer side of a picture of a later turn: there are many on a page


def is_group(row: dict) -> bool:
    """Return whether `row` is a line of `completions.jsonl`: a step, images, and completions with their rewards."""
    try:
        numbers = [(c["reward"], c["advantage"], *c.get("rewards", {}).values()) for c in row["completions"]]
        has_types = isinstance(row["step"], int) and isinstance(row["images"], list)
    except (AttributeError, KeyError, TypeError):
        return False
    values = [number for each in numbers for number in each if number is not None]
    return has_types and all(isinstance(value, int | float) and abs(value) < 1e100 for value in values)


class Pages:
    """The pages and trackers of a run, to which its log, on the main process, gives metrics and completions."""

    def __init__(self, log: RunLog, settings: dict[str, Any], decode: Callable[[list[int]], str]):
        """`log` writes the lines; `settings` are those of config.json; `decode` returns the text of tokens."""
        self.log, self.every, self.decode = log, settings.get("report_every", 0), decode
        self.shown = {str(row.get("source")) for row in log.begin("completions.jsonl", is_group)}  # rows of the data
        self.problems: set[str] = set()  # why pages could not be written
        self.newest: tuple[int, list] = (0, [])  # the newest step and its groups, until they are logged
        self.trackers = Trackers(settings.get("log_to", ()), log.folder, settings, log.resumed_step)

    def completions(self, step: int, groups: list[tuple[ScoredGroup, list[Tensor]]]) -> None:
        """Choose which of `groups` the next report shows. Rows that were shown before come first.

        With each group comes the advantage of each of its completions, () or, of its tokens, (L,); NaN: left out.
        """
        if self.every:
            groups = sorted(groups, key=lambda each: each[0].sample.source not in self.shown)
            self.newest = step, groups[:GROUPS_PER_REPORT]

    def metrics(self, row: dict[str, Any]) -> None:
        """Give the trackers a line of `metrics.jsonl`. After step 1 and every `every` steps, report."""
        step = row["step"]
        if self.every and step and (step == 1 or step % self.every == 0):
            self._report()
        numbers = {name: value for name, value in row.items() if name != "step" and value is not None}
        self.trackers.log(step, numbers, [])

    def close(self, failed: bool) -> None:
        """Report the last step, and end the runs of the trackers.

        The trackers' own exit handlers may not run: after an error, `cli.run` skips them.
        """
        if self.every:
            self._report()
        self.trackers.close(failed)

    def _report(self) -> None:
        """Log the chosen groups of the newest step, unless they are logged already, and draw the pages."""
        (step, chosen), self.newest = self.newest, (0, [])
        if rows := [{"step": step} | self._row(group, advantages) for group, advantages in chosen]:
            self.shown |= {row["source"] for row in rows}
            self.log.append("completions.jsonl", rows)
            self.trackers.log(step, {}, rows)
        for problem in write_pages(self.log.folder):
            if problem not in self.problems:  # the next report draws them again
                console.log(f"warning: {problem}")
            self.problems.add(problem)

    def _row(self, group: ScoredGroup, advantages: list[Tensor]) -> dict[str, Any]:
        return {
            "source": group.sample.source,
            "question": "\n\n".join(group.sample.texts).strip(),
            "answer": group.sample.answer,
            "images": [thumbnail(image) for image in group.prompt.images],
            "completions": [
                {"text": r.text, "reward": _finite(rewards.total), "truncated": r.truncated}
                | {"rewards": {name: _finite(value) for name, value in rewards.parts.items()}}
                | ({"turns": list(map(_turn, r.trajectory.turns))} if r.trajectory else {})
                | self._advantage(r.ids, advantage)
                for r, rewards, advantage in zip(group.rollouts, group.rewards, advantages, strict=True)
            ],
        }

    def _advantage(self, ids: Tensor, advantage: Tensor) -> dict[str, Any]:
        """Return the advantage of a completion, null if it is left out, and the parts of its text that have their own.

        If the tokens have advantages of their own, that of the completion is their mean.
        """
        fields: dict[str, Any] = {"advantage": _finite(advantage.mean().item())}
        if advantage.ndim and fields["advantage"] is not None:
            runs = itertools.groupby(zip(ids.tolist(), advantage.tolist()), key=lambda pair: pair[1])
            fields["parts"] = [(self.decode([token for token, _ in run]), _finite(value)) for value, run in runs]
        return fields


def _turn(turn: Turn) -> dict[str, Any]:
    """Return a turn of an episode for the page: who wrote it, and its texts and pictures (data URIs)."""
    parts = [{"text": p} if isinstance(p, str) else {"image": thumbnail(p, TURN_SIDE)} for p in turn.content]
    return {"role": turn.role, "parts": parts}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no NaN


def running_mean(values: list[float]) -> list[float]:
    """Return the exponential mean after each of `values`, without a bias towards the first (as in Adam)."""
    totals = itertools.accumulate(values, lambda total, value: 0.85 * total + 0.15 * value, initial=0.0)
    return [total / (1 - 0.85**n) for n, total in enumerate(totals) if n]


def all_problems(history: list[dict[str, Any]]) -> dict[str, str]:
    """Return each problem that there was after any step, as it was when it first appeared."""
    found: dict[str, str] = {}
    rows: list[dict[str, Any]] = []
    for row in history:
        keep(rows, row)
        found = problems(rows) | found
    return found


def write_pages(folder: pathlib.Path, *pages: Callable) -> list[str]:
    """Write `pages` of the run in `folder`, by default all. Return why each that cannot be written cannot."""
    problems = []
    for write in pages or (write_page, draw_curves, write_index):
        try:
            write(folder)
        except Exception as error:  # noqa: BLE001 - the logs may hold anything, and a page must never end a run
            how = "free some space, or remove what is in its way"
            problems.append(f"{folder}: {write.__name__} fails ({describe(error)}): {how}")
    return problems


def draw_curves(folder: pathlib.Path) -> None:
    """Draw `curves.png`: reward, held-out exact match, completion length and KL at each step.

    With a teacher, the KL is that to the teacher; if there is no reward, it takes its place. Without any KL, the fourth
    panel shows the difference between the log-probabilities of trainer and sampler.
    """
    rows = read_jsonl(folder / "metrics.jsonl", is_metrics)
    if not rows:
        return
    import matplotlib.pyplot as plt  # imported late because most processes draw nothing

    panels = [
        ("reward", "mean reward of a step", "reward"),
        ("eval/exact_match", "held-out exact match, greedy", "fraction correct"),
        ("completions/mean_length", "mean completion length", "tokens"),
        ("sampling/logp_difference_mean", "|log p(trainer) − log p(sampler)|", "nats per token"),
    ]
    if not any("reward" in row for row in rows):  # of sft.py
        panels = [("loss", "loss of a step", "nats per token"), ("eval/loss", "held-out loss", "nats per token")]
        panels += [("grad_norm", "gradient norm", ""), ("lr", "learning rate", "")]
    if any(row.get("kl") for row in rows):
        panels[3] = ("kl", "KL to the starting model (k3)", "nats per token")
    if any("teacher_kl" in row for row in rows):
        panels[3 if shows_reward(rows) else 0] = ("teacher_kl", "KL to the teacher", "nats per token")
    figure, axes = plt.subplots(2, 2, figsize=(11, 7))
    figure.subplots_adjust(left=0.07, right=0.98, bottom=0.08, top=0.95, wspace=0.2, hspace=0.3)
    for axis, (name, title, unit) in zip(axes.flat, panels):
        measured = [row for row in rows if row.get(name) is not None]
        steps, values = [row["step"] for row in measured], [row[name] for row in measured]
        axis.set(title=title, ylabel=unit, xlabel="step")
        axis.grid(alpha=0.3)
        if not measured:
            axis.text(0.5, 0.5, "not measured yet", ha="center", va="center", transform=axis.transAxes)
        elif name.startswith("eval/") or name == "lr":
            axis.plot(steps, values, "o-" if name != "lr" else "-", color="#0b7a75")
            axis.set_ylim((-0.02, 1.02) if name == "eval/exact_match" else (0, None))
        else:
            axis.plot(steps, values, color="#d1495b", alpha=0.35, linewidth=1, label="step")
            axis.plot(steps, running_mean(values), color="#d1495b", linewidth=2, label="running mean")
            axis.legend()
    save_figure(figure, folder / "curves.png")


def write_page(folder: pathlib.Path) -> None:
    """Write `completions.html`: images, question, correct answer, and completions with their rewards and advantages.

    A row that was logged at several steps is one entry, in which these steps are side by side.
    """
    entries: dict[str, dict] = {}
    for group in reversed(read_jsonl(folder / "completions.jsonl", is_group, last=GROUPS_ON_PAGE)):
        row = f"{group.get('source')} {group.get('question')}"
        rewards = [each["reward"] for each in group["completions"] if each["reward"] is not None]
        mean = f", mean {sum(rewards) / len(rewards):.2f}" if rewards else ""
        table = {"title": f"step {group['step']}{mean}", "completions": group["completions"]}
        entries.setdefault(row, group | {"tables": []})["tables"].append(table)
    save_page(
        folder / "completions.html",
        title=f"Completions of {folder.name}",
        introduction="Sampled during training, newest first. Each entry shows a row of the data and, for each "
        "logged step, the group of completions that GRPO compares.",
        columns=["reward", "advantage"],
        sections=[{"entries": [*entries.values()]}],
    )


def write_index(folder: pathlib.Path) -> None:
    """Write `index.html`: what a run is and has reached, its warnings, its pictures, and links to what else there is.

    An evaluation is marked if it is of an earlier step than the newest, or of a run that this one has replaced.
    """
    rows, config = read_jsonl(folder / "metrics.jsonl", is_metrics), _read_object(folder / "config.json")
    newest = rows[-1]["step"] if rows else 0
    facts = {name: config.get(name) for name in ("model", "task", "data")}
    facts["steps"] = f"{newest} of {config.get('total_steps', '?')}"
    for name in ("exact_match", "loss"):
        scores = [(row[f"eval/{name}"], row["step"]) for row in rows if row.get(f"eval/{name}") is not None]
        ends = dict.fromkeys(f"{score:.3f} (step {step})" for score, step in scores[:1] + scores[-1:])
        facts[f"held-out {name}"] = " → ".join(ends)  # before and after
    found = {path.parent.name: _read_object(path) for path in folder.glob("*/scores.json")}
    evaluations = {name: _origin(scores, rows, newest) for name, scores in found.items()}
    files = ["completions.html", "metrics.jsonl", "config.json", "final", *sorted(evaluations), "curves.png"]
    files += [f"{name}/scores.png" for name in sorted(evaluations)]
    save_page(
        folder / "index.html",
        TEMPLATE,
        title=f"Run {folder.resolve().name}",
        facts=facts,
        warnings=all_problems(rows).values(),
        files=[name for name in files if (folder / name).exists()],
        older={name: origin for name, origin in evaluations.items() if origin},
    )


def _origin(scores: dict, rows: list[dict], newest: int) -> str:
    """Return which step or run an evaluation with these `scores` is of; "" for the `newest` step of this run.

    The steps of a run that was replaced have the same numbers, but took other times.
    """
    step = scores.get("step", newest)
    row = next((row for row in rows if row["step"] == step), {})
    if scores.get("step_time") not in (None, row.get("step_time")):
        return "an earlier run"
    return f"step {step}" if step != newest else ""


def _read_object(path: pathlib.Path) -> dict:
    """Return the object in a JSON file, or {} if there is none."""
    return next(iter(parse_jsonl([(1, path.read_bytes())], bool)[0]), {}) if path.is_file() else {}
