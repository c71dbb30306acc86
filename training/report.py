"""Draw a run's training curves, and write its page and a page of sampled completions with their images.

    python -m training.report --run runs/demo    # redraw them

The folder of a run holds `config.json` (with the command and the git commit), `metrics.jsonl` (one object per step) and
`completions.jsonl` (sampled groups). From these, `curves.png`, `completions.html` and `index.html` are made.
"""

import itertools
import pathlib
import sys
from dataclasses import dataclass
from numbers import Real

from common import cli
from common.errors import UserError
from common.figures import save_figure, save_page
from common.files import parse_jsonl, read_jsonl
from training.diagnosis import all_problems

GROUPS_ON_PAGE = 60  # number of groups on the page; older ones are left out


def is_metrics(row: dict) -> bool:
    """Return whether `row` is a line of `metrics.jsonl`: a step, and finite numbers or None."""
    is_step = isinstance(row.get("step"), int) and row["step"] >= 0
    return is_step and all(value is None or _is_finite(value) for value in row.values())


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max  # an integer may be too large to convert


def is_group(row: dict) -> bool:
    """Return whether `row` is a line of `completions.jsonl`: a step, images, and completions with their rewards."""
    completions = row.get("completions")
    has_lists = isinstance(row.get("images"), list) and isinstance(completions, list)
    return isinstance(row.get("step"), int) and has_lists and all(map(_is_completion, completions))


def _is_completion(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(rewards := value.get("rewards", {}), dict):
        return False
    numbers = [value.get("reward", ""), value.get("advantage", ""), *rewards.values()]
    return all(isinstance(number, Real | None) for number in numbers)


VALID_ROWS = {"metrics.jsonl": is_metrics, "completions.jsonl": is_group}  # each log file, with the check of its rows


@dataclass
class Config:
    """Redraw a run's curves and completions page."""

    run: str
    """Folder of the run."""


def shows_reward(rows: list[dict]) -> bool:
    """Return whether the reward says something about a run: not beside a teacher, if it has been 0 in all `rows`."""
    return any(row.get("reward") for row in rows) or not any("teacher_kl" in row for row in rows)


def running_mean(values: list[float]) -> list[float]:
    """Return the exponential mean after each of `values`, without a bias towards the first (as in Adam)."""
    totals = itertools.accumulate(values, lambda total, value: 0.85 * total + 0.15 * value, initial=0.0)
    return [total / (1 - 0.85**n) for n, total in enumerate(totals) if n]


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

    Scores of an earlier step than the newest, as after a resume, have that step beside them.
    """
    rows, config = read_jsonl(folder / "metrics.jsonl", is_metrics), _read_object(folder / "config.json")
    newest = rows[-1]["step"] if rows else 0
    facts = {name: config.get(name) for name in ("model", "task", "data")}
    facts["steps"] = f"{newest} of {config.get('total_steps', '?')}"
    for name in ("exact_match", "loss"):
        scores = [(row[f"eval/{name}"], row["step"]) for row in rows if row.get(f"eval/{name}") is not None]
        ends = dict.fromkeys(f"{score:.3f} (step {step})" for score, step in scores[:1] + scores[-1:])
        facts[f"held-out {name}"] = " → ".join(ends)  # before and after
    evaluations = {path.parent.name: _read_object(path).get("step", newest) for path in folder.glob("*/scores.json")}
    files = ["completions.html", "metrics.jsonl", "config.json", "final", *sorted(evaluations), "curves.png"]
    files += [f"{name}/scores.png" for name in sorted(evaluations)]
    save_page(
        folder / "index.html",
        "index.html.j2",
        title=f"Run {folder.resolve().name}",
        facts=facts,
        warnings=all_problems(rows).values(),
        files=[name for name in files if (folder / name).exists()],
        older={name: step for name, step in evaluations.items() if step != newest},
    )


def _read_object(path: pathlib.Path) -> dict:
    """Return the object in a JSON file, or {} if there is none."""
    return next(iter(parse_jsonl([(1, path.read_bytes())], bool)[0]), {}) if path.is_file() else {}


def main(cfg: Config) -> None:
    folder = pathlib.Path(cfg.run)
    if not (folder / "metrics.jsonl").is_file():
        raise UserError(f"no run in {cfg.run!r}: pass the folder that grpo.py wrote (its --output)")
    draw_curves(folder)
    write_page(folder)
    write_index(folder)


if __name__ == "__main__":
    cli.run(main, cli.parse(Config))
