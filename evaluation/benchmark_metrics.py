"""The score of each benchmark, its summary, and the comparison of two models row by row.

`metrics.py` describes the form of a prediction. For benchmarks, `benchmarks.judge_benchmark` adds `answers` (the answer
read from each response) and `measures` (additional numbers for each response).
"""

import json
from collections.abc import Sequence

import numpy as np

from common.errors import UserError
from evaluation.benchmarks import BENCHMARKS, COGNITION, PERCEPTION, RULE_SCORED, subset_value
from evaluation.metrics import (
    WeightedRatio,
    bootstrap,
    length_scores,
    max_completions,
    mean,
    mean_score,
    pass_at_k_scores,
    percentile_interval,
    score,
)
from rewards import MAX_UNSCORED

# --- the score of each benchmark --------------------------------------------------------------------------------------


def ratios_of(name: str | None, rows: list[dict]) -> list[WeightedRatio]:
    """Return the score of benchmark `name`, or of a task if `name` is None, as ratios.

    The units of the ratios are images for MME, and rows otherwise.
    """
    if name == "mme":
        return mme_ratios(rows)
    accuracies = [mean(row["exact"]) for row in rows]
    if name == "mmstar":
        return by_category(accuracies, [(row["category"], row["l2_category"]) for row in rows])
    return mean_score(accuracies)


def by_category(accuracies: Sequence[float], categories: Sequence[object]) -> list[WeightedRatio]:
    """Return the unweighted mean of the categories' mean scores, as one ratio per category."""
    values, names = np.asarray(accuracies, dtype=float), sorted(set(categories), key=str)
    masks = [np.array([float(category == name) for category in categories]) for name in names]
    return [WeightedRatio(1 / len(names), values * mask, mask) for mask in masks]


def mme_ratios(rows: list[dict]) -> list[WeightedRatio]:
    """Return the MME score (arXiv:2306.13394) as two ratios per category.

    A category's score is 100 · the fraction of questions answered correctly + 100 · the fraction of images with both
    questions answered correctly. The perception score sums ten categories, and the cognition score sums four.
    """
    images: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        images.setdefault((row["category"], str(row["question_id"])), []).append(row)
    both = np.array([np.mean([a and b for a, b in zip(*(row["exact"] for row in pair))]) for pair in images.values()])
    correct = np.array([sum(mean(row["exact"]) for row in pair) for pair in images.values()])
    ratios = []
    for name in sorted({category for category, _ in images}):
        mask = np.array([float(category == name) for category, _ in images])
        ratios += [WeightedRatio(100.0, correct * mask, 2 * mask), WeightedRatio(100.0, both * mask, mask)]
    return ratios


def subset_scores(name: str, rows: list[dict]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the score of each subset, such as a level or a category: {column: {value: {n, score}}}."""
    scores: dict[str, dict[str, dict[str, float]]] = {}
    for column in BENCHMARKS[name].subset_columns:
        subsets: dict[str, list[dict]] = {}
        for row in rows:
            value = subset_value(row, column)
            if value is not None:
                subsets.setdefault(value, []).append(row)
        if subsets:
            scores[column] = {
                value: {"n": len(subset), "score": score(ratios_of(name, subset))}
                for value, subset in sorted(subsets.items())
            }
    if name == "mme":
        by_name = scores["category"]
        for kind, members in (("perception", PERCEPTION), ("cognition", COGNITION)):
            present = [by_name[category] for category in members if category in by_name]
            if present:
                total = {"n": sum(each["n"] for each in present), "score": sum(each["score"] for each in present)}
                scores.setdefault("kind", {})[kind] = total
    return scores


# --- summaries --------------------------------------------------------------------------------------------------------


def summarise_benchmark(name: str, rows: list[dict], scoring: str) -> dict:
    """Return the scores of benchmark `name`; docs/evaluation.md defines them.

    `scoring` names the server or the rule that judged the responses. Raises UserError when the server gave no reply for
    more than a tenth of the responses.
    """
    answers = [answer for row in rows for answer in row["answers"]]
    no_reply = mean([measures.get("no_verdict", 0.0) for row in rows for measures in row["measures"]])
    if no_reply > MAX_UNSCORED:
        role = BENCHMARKS[name].server_role
        raise UserError(f"{no_reply:.0%} of the responses have no reply from the {role} (at most 10% may): is it up?")
    ratios = ratios_of(name, rows)
    if no_reply:
        scoring = f"{scoring}, {no_reply:.1%} without a reply"
    scores = {"benchmark": name, "scoring": scoring, "n": len(rows), "completions_per_row": max_completions(rows)}
    scores |= {"score": score(ratios), "score_95": percentile_interval(bootstrap(ratios))}
    scores |= pass_at_k_scores([row["exact"] for row in rows], rows)
    scores |= {"no_answer": mean([answer is None for answer in answers])} | length_scores(rows)
    for measure in ("open_recall", "open_f1"):
        values = [measures[measure] for row in rows for measures in row["measures"] if measure in measures]
        scores |= {measure: mean(values)} if values else {}
    return scores | {"no_verdict": no_reply, "parts": subset_scores(name, rows)}


# --- two models -------------------------------------------------------------------------------------------------------


def group_by(rows: list[dict], columns: Sequence[str]) -> dict[str, list[dict]]:
    """Group `rows` by the values of `columns`."""
    groups: dict[str, list[dict]] = {}
    for row in rows:
        groups.setdefault(json.dumps([row.get(column) for column in columns], default=str), []).append(row)
    return groups


def pairs(name: str | None, before: list[dict], after: list[dict]) -> list[tuple[dict, dict]]:
    """Pair the predictions of two models for the same row.

    Two rows are the same when their columns match and, if all predictions record their images, the images match too.
    Duplicate rows are paired in order, or left out when their number differs between the two models.
    """
    columns = [*(BENCHMARKS[name].columns if name else ("prompt", "answer"))]
    columns = [column for column in columns if column != "precision"]
    if all("pictures" in row for row in [*before, *after]):
        columns.append("pictures")
    groups_before, groups_after = group_by(before, columns), group_by(after, columns)
    matched = [(groups_before.get(key, []), rows) for key, rows in groups_after.items()]
    return [pair for old, new in matched if len(old) == len(new) for pair in zip(old, new)]


def difference(name: str | None, paired: list[tuple[dict, dict]]) -> dict:
    """Return the score of the second model minus that of the first, with the interval of the paired difference."""
    before, after = (ratios_of(name, [pair[side] for pair in paired]) for side in (0, 1))
    differences = bootstrap(after) - bootstrap(before)  # both draw the same rows, because the seed is the same
    return {
        "rows": len(paired),
        "difference": score(after) - score(before),
        "difference_95": percentile_interval(differences),
    }


def title(scores: dict) -> str:
    """Return the name of the benchmark or task, with a note if rules replaced the server in scoring the benchmark."""
    name = scores.get("benchmark") or scores.get("task", "")
    return f"{name} ({RULE_SCORED})" if scores.get("scoring") == RULE_SCORED else name


def table(scores: dict, baseline: dict | None = None, paired: dict | None = None) -> str:
    """Return the scores as lines of text, next to those of the baseline."""
    models = [baseline, scores] if baseline else [scores]
    headings = ["baseline", "model"] if baseline else ["model"]
    lines = [f"{title(scores):36}" + "".join(f"{heading:>12}" for heading in headings)]

    def add_line(label: str, values: list[float | None]) -> None:
        cells = [f"{x:12.3f}" if isinstance(x, float) else f"{'-' if x is None else x:>12}" for x in values]
        lines.append(f"{label:36}" + "".join(cells))

    for name, value in scores.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            label = f"Pass@1[{scores['completions_per_row']}]" if name == "pass@1" else name
            add_line(label, [model.get(name) for model in models])
        elif name.endswith("_95"):
            add_line(f"  95% interval of {name.removesuffix('_95')}, from", [model[name][0] for model in models])
            add_line("    to", [model[name][1] for model in models])
    for column, subsets in scores.get("parts", {}).items():
        for name, subset in subsets.items():
            values = [model.get("parts", {}).get(column, {}).get(name, {}).get("score") for model in models]
            add_line(f"{column}: {name} ({subset['n']})"[:36], values)
    if paired:
        low, high = paired["difference_95"]
        lines.append(
            f"difference {paired['difference']:+.3f} ({low:+.3f} to {high:+.3f}) on {paired['rows']} rows of both"
        )
    return "\n".join(lines)
