"""Draw a run's training curves, write a page of sampled completions with their images, and compare two evaluations.

    python -m training.report --run runs/demo                                                    # redraw both
    python -m training.report --run runs/demo --before runs/demo/before --after runs/demo/after  # and compare

The folder of a run holds `config.json` (with the command and the git commit), `metrics.jsonl` (one object per step) and
`completions.jsonl` (sampled groups). `curves.png` and `completions.html` are drawn from these files during the run.
"""

import json
import pathlib
from dataclasses import dataclass

from common import cli
from common.errors import UserError
from common.figures import save_figure, save_page
from common.files import read_jsonl

GROUPS_ON_PAGE = 60  # number of groups on the page; older ones are left out


@dataclass
class Config:
    """Redraw a run's curves and completions page, and optionally compare two evaluations."""

    run: str
    """Folder of the run."""
    before: str | None = None
    """Folder with the scores.json of the starting model."""
    after: str | None = None
    """Folder with the scores.json of the trained model."""


# --- curves -----------------------------------------------------------------------------------------------------------


def draw_curves(folder: pathlib.Path) -> None:
    """Draw `curves.png`: reward, held-out exact match, completion length and KL at each step.

    Without a KL term, the fourth panel shows the difference between the log-probabilities of trainer and sampler.
    """
    rows = read_jsonl(folder / "metrics.jsonl")
    if not rows:
        return

    def series(name: str) -> tuple[list[int], list[float]]:
        points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        return [step for step, _ in points], [value for _, value in points]

    import matplotlib.pyplot as plt  # imported late because most processes draw nothing

    figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    (reward, match), (length, difference) = axes
    _draw(reward, *series("reward"), "mean reward of a step", "reward", smooth=True)
    steps, values = series("eval/exact_match")
    match.plot(steps, values, "o-", color="#0b7a75")
    match.set(title="held-out exact match, greedy", ylabel="fraction correct", ylim=(-0.02, 1.02))
    _draw(length, *series("completions/mean_length"), "mean completion length", "tokens", smooth=True)
    if any(row.get("kl") for row in rows):
        _draw(difference, *series("kl"), "KL to the starting model (k3)", "nats per token", smooth=True)
    else:
        name = "sampling/logp_difference_mean"
        _draw(difference, *series(name), "|log p(trainer) − log p(sampler)|", "nats per token")
    for axis in axes.flat:
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        if not axis.has_data():
            axis.text(0.5, 0.5, "not measured yet", ha="center", va="center", transform=axis.transAxes)
    save_figure(figure, folder / "curves.png")


def _draw(axis, steps: list[int], values: list[float], title: str, unit: str, smooth: bool = False) -> None:
    axis.plot(steps, values, color="#d1495b", alpha=0.35 if smooth else 1.0, linewidth=1, label="step")
    if smooth and values:
        running, average = values[0], []
        for value in values:
            running += 0.15 * (value - running)
            average.append(running)
        axis.plot(steps, average, color="#d1495b", linewidth=2, label="running mean")
        axis.legend()
    axis.set(title=title, ylabel=unit)


def write_page(folder: pathlib.Path) -> None:
    """Write `completions.html`: images, question, correct answer, and completions with their rewards and advantages."""
    groups = read_jsonl(folder / "completions.jsonl")[-GROUPS_ON_PAGE:]
    entries = [group | {"note": f"step {group['step']}", "rows": _table_rows(group)} for group in reversed(groups)]
    save_page(
        folder / "completions.html",
        title=f"Completions of {folder.name}",
        introduction="Sampled during training, newest first. Each entry shows the image, the question, the correct "
        "answer and the group of completions that GRPO compares.",
        columns=["reward", "advantage"],
        sections=[{"entries": entries}],
    )


def _table_rows(group: dict) -> list[dict]:
    rows = []
    for completion in group["completions"]:
        reward, kind = completion["reward"], "wrong"
        if reward is None:
            kind = ""
        elif reward > 0:
            kind = "right" if reward >= 1 else "near"
        cells = ["no verdict" if reward is None else f"{reward:.2f}", f"{completion['advantage']:+.2f}"]
        rows.append(completion | {"kind": kind, "cells": cells})
    return rows


# --- side by side -----------------------------------------------------------------------------------------------------


def compare(folder: pathlib.Path, before: pathlib.Path, after: pathlib.Path) -> None:
    """Write both evaluations to `scores.json` in the run's folder and print them side by side."""
    scores = {}
    for name, source in (("before", before), ("after", after)):
        try:
            scores[name] = json.loads((source / "scores.json").read_text())
        except (OSError, ValueError) as error:
            raise UserError(
                f"cannot read scores.json in {source} ({error}): run evaluate.py with --output {source} first"
            ) from None
    (folder / "scores.json").write_text(json.dumps(scores, indent=1) + "\n")
    print(f"\n{'':24}{'before':>10}{'after':>10}")
    for name in ("exact_match", "reward", "format_rate", "mean_length", "n"):
        values = [scores[which][name] for which in ("before", "after")]
        print(f"{name:24}" + "".join(f"{v:10.3f}" if isinstance(v, float) else f"{v:10}" for v in values))
    print(f"\ncurves       {folder / 'curves.png'}\ncompletions  {folder / 'completions.html'}")
    print(f"scores       {folder / 'scores.json'}\nmodel        {folder / 'final'}")


def main(cfg: Config) -> None:
    folder = pathlib.Path(cfg.run)
    if not (folder / "metrics.jsonl").is_file():
        raise UserError(f"no run in {cfg.run!r}: pass the folder that grpo.py wrote (its --output)")
    draw_curves(folder)
    write_page(folder)
    if cfg.before and cfg.after:
        compare(folder, pathlib.Path(cfg.before), pathlib.Path(cfg.after))


if __name__ == "__main__":
    cli.run(main, cli.parse(Config))
