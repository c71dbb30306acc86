"""Figures of an evaluation: scores.png, and completions.html with the rows that two models answer differently."""

import html
import pathlib
from collections.abc import Mapping

import numpy as np

from common.figures import STYLE, save_figure, thumbnail
from common.records import TAG, Sample
from evaluation.benchmark_metrics import pairs, title
from inputs.images import decode_image

MAX_ROWS = 100  # maximum number of rows under each heading of the page
MAX_BARS = 30


def draw_scores(folder: pathlib.Path, scores: dict, baseline: dict | None = None) -> None:
    """Draw scores.png: the total with its interval and the score of each subset, next to those of the baseline."""
    import matplotlib.pyplot as plt

    is_mme = scores.get("benchmark") == "mme"
    total = "score" if "score" in scores else "exact_match"
    bars = [("all", total, None)]  # label, column, value of the column
    for column, subsets in scores.get("parts", {}).items():
        bars += [(f"{column} {name} ({subset['n']})", column, name) for name, subset in subsets.items()]
    if is_mme:  # the total and the kinds are on a larger scale than the categories; the title shows the kinds
        bars = [bar for bar in bars if bar[1] == "category"]
    bars = bars[:MAX_BARS]
    positions = np.arange(len(bars))[::-1]
    figure, axis = plt.subplots(figsize=(9, 1.6 + 0.4 * len(bars)), layout="constrained")
    series = [("baseline", baseline, "#9aa5b1", 0.2), ("model", scores, "#0b7a75", -0.2)]
    if baseline is None:
        series = [("model", scores, "#0b7a75", 0.0)]
    for model, model_scores, colour, offset in series:
        subsets = model_scores.get("parts", {})
        values = [
            model_scores[total] if name is None else subsets.get(column, {}).get(name, {}).get("score", 0)
            for _, column, name in bars
        ]
        axis.barh(positions + offset, values, height=0.8 / len(series), color=colour, label=model)
        for position, (label, _, _), value in zip(positions, bars, values):
            y, text, text_x = position + offset, f" {value:.3g}", value
            if label == "all":
                low, high = model_scores[total + "_95"]
                text, text_x = f"{text}  ({low:.3f} to {high:.3f})", max(value, high)
                axis.plot([low, high], [y, y], color="#222", linewidth=1.5)
            axis.text(text_x, y, text, va="center", fontsize=8)
    axis.set_yticks(positions, [label for label, _, _ in bars])
    n = scores["completions_per_row"]
    completions = f"{n} completions each" if n > 1 else "one completion each"
    kinds = "".join(
        f", {kind} {subset['score']:.0f} of {2000 if kind == 'perception' else 800}"
        for kind, subset in scores.get("parts", {}).get("kind", {}).items()
    )
    axis.set_title(f"{title(scores)}{kinds}: {scores['n']} rows, {completions}", loc="left")
    axis.set_xlim(0, 200 if is_mme else 1)
    axis.set_xlabel("score" if is_mme else "score, 95% interval over rows")
    axis.spines[["top", "right"]].set_visible(False)
    if len(series) > 1:
        axis.legend(loc="lower right", ncols=2, bbox_to_anchor=(1, 1), frameon=False)
    save_figure(figure, folder / "scores.png")


def write_differences(
    folder: pathlib.Path,
    name: str | None,
    scores: dict,
    before: list[dict],
    after: list[dict],
    samples: Mapping[str, Sample],
) -> tuple[int, int]:
    """Write completions.html: the rows that were right and became wrong, then those that were wrong and became right.

    A row counts as right when at least half of its completions are right. `samples` holds the rows whose images are
    known, by source. Returns the number of rows of each kind.
    """
    lost, won = [], []
    for old, new in pairs(name, before, after):
        was_right, is_right = (np.mean(row["exact"]) >= 0.5 for row in (old, new))
        if was_right != is_right:
            (won if is_right else lost).append((old, new))
    body = ""
    for heading, changed in (("Right before, wrong after", lost), ("Wrong before, right after", won)):
        body += f"<h2>{heading}: {len(changed)}</h2>"
        body += "".join(_article(old, new, samples.get(new["source"])) for old, new in changed[:MAX_ROWS])
        body += f"<p>… and {len(changed) - MAX_ROWS} more</p>" if len(changed) > MAX_ROWS else ""
    name = html.escape(title(scores))
    text = (
        "<!doctype html><html lang='en'><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
        f"<title>{name}: what changed</title><style>{STYLE}</style><h1>{name}: what changed</h1>"
        f"<p>The rows, out of {scores['n']}, that the two models answer differently.</p>{body}</html>\n"
    )
    partial = folder / "completions.html.partial"
    partial.write_text(text, encoding="utf-8")
    partial.rename(folder / "completions.html")
    return len(lost), len(won)


def _article(old: dict, new: dict, sample: Sample | None) -> str:
    images = ""
    if sample is not None:
        images = "".join(f"<img alt='' src='{thumbnail(decode_image(image))}'>" for image in sample.images)
    lines = []
    for when, row in (("before", old), ("after", new)):
        for response, correct in zip(row["responses"], row["exact"]):
            kind = "right" if correct else "wrong"
            lines.append(f"<tr class='{kind}'><td>{when}</td><td class='text'>{html.escape(response)}</td></tr>")
    question = html.escape(new["prompt"].replace(TAG, ""))
    gold = html.escape(str(new.get("gold", new.get("answer"))))
    return (
        f"<article><figure>{images}<figcaption><b>{question}</b>correct answer: "
        f"{gold}<br>{html.escape(new['source'])}</figcaption></figure><section><table>"
        f"<tr><th></th><th>completion</th></tr>{''.join(lines)}</table></section></article>"
    )
