"""Figures of an evaluation: scores.png, and completions.html with the rows that are right in one of two evaluations."""

import pathlib
from collections.abc import Mapping

import numpy as np

from common.figures import save_figure, save_page, thumbnail
from common.records import Sample
from evaluation.predictions import column_names, subset_score, title
from inputs.images import decode_image

MAX_ROWS = 100  # maximum number of rows under each heading of the page


def draw_scores(folder: pathlib.Path, scores: dict, baseline: dict | None) -> None:
    """Draw scores.png: the total with its interval and the score of each subset, next to those of the baseline."""
    import matplotlib.pyplot as plt

    parts, is_mme = scores.get("parts", {}), scores.get("benchmark") == "mme"
    total = "score" if "score" in scores else "exact_match"
    subsets = [(column, name) for column in parts for name in parts[column]]
    if is_mme:  # the total and the kinds are on a larger scale than the categories; the title shows the kinds
        subsets = [(column, name) for column, name in subsets if column == "category"]
    labels = [f"{column} {name} ({parts[column][name]['n']})" for column, name in subsets]
    if not is_mme:
        labels.insert(0, "all")
    labels = [label.encode(errors="replace").decode()[:80] for label in labels]  # it may hold half of a surrogate pair
    labels = [label.replace("$", r"\$") for label in labels]  # matplotlib would read mathematics between two of them
    positions = np.arange(len(labels))
    figure, axis = plt.subplots(figsize=(9, 1.6 + 0.4 * len(labels)), layout="constrained")
    before, after = column_names(scores)
    series = [(after, scores, "#0b7a75", 0.0)]
    if baseline is not None:
        series = [(before, baseline, "#9aa5b1", -0.2), (after, scores, "#0b7a75", 0.2)]
    for model, model_scores, colour, offset in series:
        values = [subset_score(model_scores, column, name) or 0 for column, name in subsets]
        texts, errors = [f"{value:.3g}" for value in values], np.zeros((2, len(labels)))
        if not is_mme:
            value, (low, high) = model_scores[total], model_scores[total + "_95"]
            values.insert(0, value)
            texts.insert(0, f"{value:.3g}  ({low:.3f} to {high:.3f})")
            errors[:, 0] = max(value - low, 0), max(high - value, 0)
        height = 0.8 / len(series)
        bars = axis.barh(positions + offset, values, height, color=colour, label=model, xerr=errors, ecolor="#222")
        axis.bar_label(bars, texts, padding=3, fontsize=8)
    axis.set_yticks(positions, labels)
    axis.invert_yaxis()
    n = scores["completions_per_row"]
    completions = f"{n} completions each" if n > 1 else "one completion each"
    kinds = "".join(
        f", {kind} {subset['score']:.0f} of {2000 if kind == 'perception' else 800}"
        for kind, subset in parts.get("kind", {}).items()
    )
    axis.set_title(f"{title(scores)}{kinds}: {scores['n']} rows, {completions}", loc="left")
    axis.set_xlim(0, 200 if is_mme else 1)
    axis.set_xlabel("score" if is_mme else "score, 95% interval over rows")
    axis.spines[["top", "right"]].set_visible(False)
    if baseline is not None:
        figure.legend(loc="outside lower right", ncols=2, frameon=False)
    save_figure(figure, folder / "scores.png")


def write_differences(
    folder: pathlib.Path, scores: dict, paired: list[tuple[dict, dict]], samples: Mapping[str, Sample]
) -> str:
    """Write completions.html: the rows that were right and became wrong, then those that were wrong and became right.

    A row counts as right when at least half of its completions are right. `samples` holds the rows whose images are
    known, by source. Returns a line on the number of rows of each kind.
    """
    lost: list[tuple[dict, dict]] = []
    won: list[tuple[dict, dict]] = []
    for before, after in paired:
        was_right, is_right = (np.mean(row["exact"]) >= 0.5 for row in (before, after))
        if was_right != is_right:
            (won if is_right else lost).append((before, after))
    sides = ("before", "after")
    if "picture" in scores:
        sides = ("with own picture", f"with {scores['picture']} picture")
    first, second = sides
    headings = {f"Right {first}, wrong {second}": lost, f"Wrong {first}, right {second}": won}
    save_page(
        folder / "completions.html",
        title=f"{title(scores)}: what changed",
        introduction=f"The rows, out of {scores['n']}, that are right in only one of the two evaluations.",
        columns=["correct"],
        sections=[_section(heading, sides, changed, samples) for heading, changed in headings.items()],
    )
    counts = [f"{heading[0].lower()}{heading[1:]}: {len(changed)}" for heading, changed in headings.items()]
    return f"{'; '.join(counts)}; see {folder}/completions.html"


def _section(
    heading: str, sides: tuple[str, str], changed: list[tuple[dict, dict]], samples: Mapping[str, Sample]
) -> dict:
    """Return the rows under one heading, in the form that the page's template expects."""
    entries = []
    for before, after in changed[:MAX_ROWS]:
        sample = samples.get(after["source"])
        judged = [(name, zip(row["responses"], row["exact"])) for name, row in zip(sides, (before, after))]
        entry = {
            "images": [thumbnail(decode_image(image)) for image in sample.images] if sample else [],
            "question": after["prompt"],
            "answer": after.get("gold", after.get("answer")),
            "source": after["source"],
            "tables": [
                {"title": model, "completions": [{"text": text, "reward": float(right)} for text, right in answers]}
                for model, answers in judged
            ],
        }
        entries.append(entry)
    left_out = max(0, len(changed) - MAX_ROWS)
    return {"title": f"{heading}: {len(changed)}", "entries": entries, "left_out": left_out}
