"""What a run leaves for people: metrics, curves and a page of sampled completions with their pictures.

    python -m training.report --run runs/demo                                          # draw curves and page again
    python -m training.report --run runs/demo --before runs/demo/before --after runs/demo/after      # two scores side by side

A run's folder holds `config.json` (with command and git commit), `metrics.jsonl` (one object a step),
`completions.jsonl` (sampled groups), and `curves.png` and `completions.html` made from them during the run.
"""

import html
import json
import os
import pathlib
from dataclasses import dataclass

from common.cli import run
from common.errors import UserError
from common.figures import STYLE, save_figure
from common.files import read_jsonl

os.environ.setdefault("MPLBACKEND", "Agg")  # pictures go to files, whatever screens there are
GROUPS_ON_PAGE = 60  # most groups on the page, the newest


@dataclass
class Config:
    """Draw a run's curves and completions page, or put two scores side by side."""

    run: str
    """The run's folder."""
    before: str | None = None
    """Folder with the scores.json of the starting model."""
    after: str | None = None
    """Folder with the scores.json of the trained model."""


# --- curves -----------------------------------------------------------------------------------------------------------


def draw_curves(folder: pathlib.Path) -> None:
    """curves.png: reward, held-out exact match, completion length, and KL or the sampler's difference, over steps."""
    rows = read_jsonl(folder / "metrics.jsonl")
    if not rows:
        return

    def series(name: str) -> tuple[list[int], list[float]]:
        points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        return [step for step, _ in points], [value for _, value in points]

    import matplotlib.pyplot as plt  # here, since most processes draw nothing

    figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    (reward, match), (length, difference) = axes
    _draw(reward, *series("reward"), "mean reward of a step", "reward", smooth=True)
    steps, values = series("eval/exact_match")
    match.plot(steps, values, "o-", color="#0b7a75")
    match.set(title="held-out exact match, greedy", ylabel="share right", ylim=(-0.02, 1.02))
    _draw(length, *series("completions/mean_length"), "mean completion length", "tokens", smooth=True)
    if any(row.get("kl") for row in rows):
        _draw(difference, *series("kl"), "KL to the starting model (k3)", "nats a token", smooth=True)
    else:
        name = "sampling/logp_difference_mean"
        _draw(difference, *series(name), "|log p(trainer) − log p(sampler)|", "nats a token")
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
    """completions.html: picture, question, right answer and the completions with reward and advantage."""
    rows = read_jsonl(folder / "completions.jsonl")[-GROUPS_ON_PAGE:]
    articles = "\n".join(_article(row) for row in reversed(rows))
    name = html.escape(folder.name)
    text = (
        "<!doctype html><html lang='en'><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
        f"<title>Completions of {name}</title><style>{STYLE}</style><h1>Completions of {name}</h1>"
        "<p>Sampled during training, newest first: each picture with its question, the right answer, and the group of "
        f"completions that GRPO compares.</p>\n{articles}</html>\n"
    )
    partial = folder / "completions.html.partial"
    partial.write_text(text, encoding="utf-8")
    partial.rename(folder / "completions.html")


def _article(row: dict) -> str:
    pictures = "".join(f"<img alt='' src='{source}'>" for source in row["images"])
    lines = []
    for completion in row["completions"]:
        reward = completion["reward"]
        kind = "" if reward is None else "right" if reward >= 1 else "near" if reward > 0 else "wrong"
        text = html.escape(completion["text"]) + (" <i>… cut off</i>" if completion["truncated"] else "")
        shown = "no verdict" if reward is None else f"{reward:.2f}"
        lines.append(
            f"<tr class='{kind}'><td class='number'>{shown}</td>"
            f"<td class='number'>{completion['advantage']:+.2f}</td><td class='text'>{text}</td></tr>"
        )
    return (
        f"<article><figure>{pictures}<figcaption><b>{html.escape(row['question'])}</b>right answer: "
        f"{html.escape(row['answer'])}<br>step {row['step']}</figcaption></figure><section><table>"
        "<tr><th class='number'>reward</th><th class='number'>advantage</th><th>completion</th></tr>"
        f"{''.join(lines)}</table></section></article>"
    )


# --- side by side -----------------------------------------------------------------------------------------------------


def compare(folder: pathlib.Path, before: pathlib.Path, after: pathlib.Path) -> None:
    """Write scores.json with both scores and print them side by side."""
    scores = {}
    for name, source in (("before", before), ("after", after)):
        try:
            scores[name] = json.loads((source / "scores.json").read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"no scores in {source} ({error}): run evaluate.py with --output {source} first") from None
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
        raise UserError(f"no run in {cfg.run!r}: give the folder that grpo.py wrote (--output)")
    draw_curves(folder)
    write_page(folder)
    if cfg.before and cfg.after:
        compare(folder, pathlib.Path(cfg.before), pathlib.Path(cfg.after))


if __name__ == "__main__":
    run(main, Config)
