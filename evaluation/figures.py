"""Pictures of an evaluation: scores.png, and completions.html of the rows that two models answer differently."""

import html
import pathlib
from collections.abc import Mapping

import numpy as np

from common.figures import STYLE, save_figure, thumbnail
from common.records import TAG, Sample
from evaluation.benchmark_metrics import pairs, title
from inputs.images import decode_image

SHOWN = 100  # rows of a kind on the page
MOST_BARS = 30


def draw_scores(folder: pathlib.Path, scores: dict, baseline: dict | None = None) -> None:
    """scores.png: the total with its interval, and its parts, beside those of a baseline."""
    import matplotlib.pyplot as plt

    total = "score" if "score" in scores else "exact_match"
    bars = [("all", total, None)]
    for column, groups in scores.get("parts", {}).items():
        bars += [(f"{column} {key} ({own['n']})", column, key) for key, own in groups.items()]
    if scores.get("benchmark") == "mme":  # its total is of another scale than its parts
        bars = [bar for bar in bars if bar[1] == "category"]  # perception and cognition stand in the title
    bars = bars[:MOST_BARS]
    places = np.arange(len(bars))[::-1]
    figure, axis = plt.subplots(figsize=(9, 1.6 + 0.4 * len(bars)), layout="constrained")
    drawn = [("baseline", baseline, "#9aa5b1", 0.2), ("model", scores, "#0b7a75", -0.2)]
    if baseline is None:
        drawn = [("model", scores, "#0b7a75", 0.0)]
    for name, own, colour, shift in drawn:
        found = own.get("parts", {})
        values = [own[total] if key is None else found.get(c, {}).get(key, {}).get("score", 0) for _, c, key in bars]
        axis.barh(places + shift, values, height=0.8 / len(drawn), color=colour, label=name)
        for place, (label, _, _), number in zip(places, bars, values):
            interval = f"  ({own[total + '_95'][0]:.3f} to {own[total + '_95'][1]:.3f})" if label == "all" else ""
            edge = max(number, own[total + "_95"][1]) if label == "all" else number
            axis.text(edge, place + shift, f" {number:.3g}{interval}", va="center", fontsize=8)
            if label == "all":
                low, high = own[total + "_95"]
                axis.plot([low, high], [place + shift] * 2, color="#222", linewidth=1.5)
    axis.set_yticks(places, [label for label, _, _ in bars])
    each = f"{scores['completions_per_row']} of each" if scores["completions_per_row"] > 1 else "one completion each"
    sums = scores.get("parts", {}).get("kind", {})
    sums = "".join(
        f", {kind} {own['score']:.0f} of {2000 if kind == 'perception' else 800}" for kind, own in sums.items()
    )
    axis.set_title(f"{title(scores)}{sums}: {scores['n']} rows, {each}", loc="left")
    axis.set_xlim(0, 200 if scores.get("benchmark") == "mme" else 1)
    axis.set_xlabel("score" if scores.get("benchmark") == "mme" else "score, 95 % interval over problems")
    axis.spines[["top", "right"]].set_visible(False)
    if len(drawn) > 1:
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
    """completions.html: rows right before and wrong after, then those wrong before and right after, a row being right
    when half of its completions are; returns how many of each there are. `samples`: where pictures are known."""
    lost, won = [], []
    for old, new in pairs(name, before, after):
        was, now = (np.mean(row["exact"]) >= 0.5 for row in (old, new))
        if was != now:
            (won if now else lost).append((old, new))
    kinds = (("Right before, wrong after", lost), ("Wrong before, right after", won))
    body = ""
    for heading, found in kinds:
        body += f"<h2>{heading}: {len(found)}</h2>"
        body += "".join(_article(old, new, samples.get(new["source"])) for old, new in found[:SHOWN])
        body += f"<p>… and {len(found) - SHOWN} more</p>" if len(found) > SHOWN else ""
    name = html.escape(title(scores))
    text = (
        "<!doctype html><html lang='en'><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
        f"<title>{name}: what changed</title><style>{STYLE}</style><h1>{name}: what changed</h1>"
        f"<p>Of {scores['n']} rows, those that the two models answer differently.</p>{body}</html>\n"
    )
    partial = folder / "completions.html.partial"
    partial.write_text(text, encoding="utf-8")
    partial.rename(folder / "completions.html")
    return len(lost), len(won)


def _article(old: dict, new: dict, sample: Sample | None) -> str:
    pictures = ""
    if sample is not None:
        pictures = "".join(f"<img alt='' src='{thumbnail(decode_image(image))}'>" for image in sample.images)
    lines = []
    for when, row in (("before", old), ("after", new)):
        for response, right in zip(row["responses"], row["exact"]):
            kind = "right" if right else "wrong"
            lines.append(f"<tr class='{kind}'><td>{when}</td><td class='text'>{html.escape(response)}</td></tr>")
    question = html.escape(new["prompt"].replace(TAG, ""))
    gold = html.escape(str(new.get("gold", new.get("answer"))))
    return (
        f"<article><figure>{pictures}<figcaption><b>{question}</b>right answer: "
        f"{gold}<br>{html.escape(new['source'])}</figcaption></figure><section><table>"
        f"<tr><th></th><th>completion</th></tr>{''.join(lines)}</table></section></article>"
    )
