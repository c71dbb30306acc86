"""TODO evaluation/benchmark_metrics.py"""

import json
from collections.abc import Sequence

import numpy as np

from common.errors import UserError
from evaluation.benchmarks import BENCHMARKS, COGNITION, PERCEPTION, RULE_SCORED, subset_value
from evaluation.metrics import (
    WeightedRatio,
    _lengths,
    _mean,
    _most,
    _pass_at_k,
    bootstrap,
    mean_score,
    percentile_interval,
    score,
)
from rewards import MAX_UNSCORED

# --- a benchmark's own sums -------------------------------------------------------------------------------------------


def ratios_of(name: str | None, rows: list[dict]) -> list[WeightedRatio]:
    """The score of benchmark `name`, or of a task, as ratios over its units: rows, or MME's pictures."""
    if name == "mme":
        return mme_ratios(rows)
    right = [_mean(row["exact"]) for row in rows]
    return (
        by_category(right, [(row["category"], row["l2_category"]) for row in rows])
        if name == "mmstar"
        else mean_score(right)
    )


def by_category(right: Sequence[float], categories: Sequence[object]) -> list[WeightedRatio]:
    """The mean over categories of the mean over rows."""
    values, names = np.asarray(right, dtype=float), sorted(set(categories), key=str)
    members = [np.array([float(category == name) for category in categories]) for name in names]
    return [WeightedRatio(1 / len(names), values * member, member) for member in members]


def mme_ratios(rows: list[dict]) -> list[WeightedRatio]:
    """MME (arXiv:2306.13394): of each category 100 · the share of questions answered rightly + 100 · the share of
    pictures with both questions answered rightly; perception sums ten categories, cognition four."""
    pictures: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        pictures.setdefault((row["category"], str(row["question_id"])), []).append(row)
    both = np.array([np.mean([a and b for a, b in zip(*(row["exact"] for row in pair))]) for pair in pictures.values()])
    right = np.array([sum(_mean(row["exact"]) for row in pair) for pair in pictures.values()])
    ratios = []
    for category in sorted({category for category, _ in pictures}):
        member = np.array([float(own == category) for own, _ in pictures])
        ratios += [WeightedRatio(100.0, right * member, 2 * member), WeightedRatio(100.0, both * member, member)]
    return ratios


def _parts(name: str, rows: list[dict]) -> dict[str, dict[str, dict[str, float]]]:
    """Scores of the rows that share a level, a category, …: {column: {value: {n, score}}}."""
    parts: dict[str, dict[str, dict[str, float]]] = {}
    for column in BENCHMARKS[name].parts:
        groups: dict[str, list[dict]] = {}
        for row in rows:
            if (own := subset_value(row, column)) is not None:
                groups.setdefault(own, []).append(row)
        scored = {key: {"n": len(own), "score": score(ratios_of(name, own))} for key, own in sorted(groups.items())}
        parts |= {column: scored} if scored else {}
    if name == "mme":
        own = parts["category"]
        for kind, members in (("perception", PERCEPTION), ("cognition", COGNITION)):
            there = [own[category] for category in members if category in own]
            if there:
                total = {"n": sum(part["n"] for part in there), "score": sum(part["score"] for part in there)}
                parts.setdefault("kind", {})[kind] = total
    return parts


# --- summaries --------------------------------------------------------------------------------------------------------


def summarise_benchmark(name: str, rows: list[dict], scoring: str) -> dict:
    """The scores of benchmark `name`; see the README for what each one is."""
    answered = [answer for row in rows for answer in row["answers"]]
    lost = _mean([measures.get("no_verdict", 0.0) for row in rows for measures in row["measures"]])
    if lost > MAX_UNSCORED:
        raise UserError(f"{lost:.0%} of the responses have no reply of the {BENCHMARKS[name].server}; at most 10% may")
    ratios = ratios_of(name, rows)
    if lost:
        scoring = f"{scoring}, {lost:.1%} without a reply"
    scores = {"benchmark": name, "scoring": scoring, "n": len(rows), "completions_per_row": _most(rows)}
    scores |= {"score": score(ratios), "score_95": percentile_interval(bootstrap(ratios))}
    scores |= _pass_at_k([row["exact"] for row in rows], rows)
    scores |= {"no_answer": _mean([answer is None for answer in answered])} | _lengths(rows)
    for measure in ("open_recall", "open_f1"):
        found = [m[measure] for row in rows for m in row["measures"] if measure in m]
        scores |= {measure: _mean(found)} if found else {}
    return scores | {"no_verdict": lost, "parts": _parts(name, rows)}


# --- two models -------------------------------------------------------------------------------------------------------


def group_by(rows: list[dict], columns: Sequence[str]) -> dict[str, list[dict]]:
    """`rows` by what their `columns` say."""
    found: dict[str, list[dict]] = {}
    for row in rows:
        found.setdefault(json.dumps([row.get(column) for column in columns], default=str), []).append(row)
    return found


def pairs(name: str | None, before: list[dict], after: list[dict]) -> list[tuple[dict, dict]]:
    """Predictions of both for the same rows: the same columns and, where both know them, pictures. Rows that repeat are
    paired in their order, or left out where one side has more of them."""
    columns = [*(BENCHMARKS[name].columns if name else ("prompt", "answer"))]
    columns = [column for column in columns if column != "precision"]
    if all("pictures" in row for row in [*before, *after]):
        columns.append("pictures")
    earlier, later = group_by(before, columns), group_by(after, columns)
    both = [(earlier.get(key, []), rows) for key, rows in later.items()]
    return [pair for old, new in both if len(old) == len(new) for pair in zip(old, new)]


def difference(name: str | None, paired: list[tuple[dict, dict]]) -> dict:
    """How much better the second of each pair is, with the interval of the paired difference."""
    ratios = [ratios_of(name, [pair[i] for pair in paired]) for i in (0, 1)]
    spread = bootstrap(ratios[1]) - bootstrap(ratios[0])  # the same rows drawn for both
    return {
        "rows": len(paired),
        "difference": score(ratios[1]) - score(ratios[0]),
        "difference_95": percentile_interval(spread),
    }


def title(scores: dict) -> str:
    """What a number of these is called wherever it is shown."""
    name = scores.get("benchmark") or scores.get("task", "")
    return f"{name} ({RULE_SCORED})" if scores.get("scoring") == RULE_SCORED else name


def table(scores: dict, baseline: dict | None = None, paired: dict | None = None) -> str:
    """The scores as lines of text, beside those of a baseline."""
    both = [baseline, scores] if baseline else [scores]
    lines = [
        f"{title(scores):36}" + "".join(f"{name:>12}" for name in (["baseline", "model"] if baseline else ["model"]))
    ]

    def line(label: str, found: list[float | None]) -> None:
        cells = [f"{x:12.3f}" if isinstance(x, float) else f"{'-' if x is None else x:>12}" for x in found]
        lines.append(f"{label:36}" + "".join(cells))

    for key, own in scores.items():
        if isinstance(own, int | float) and not isinstance(own, bool):
            label = f"Pass@1[{scores['completions_per_row']}]" if key == "pass@1" else key
            line(label, [each.get(key) for each in both])
        elif key.endswith("_95"):
            line(f"  95 % interval of {key.removesuffix('_95')}, from", [each[key][0] for each in both])
            line("    to", [each[key][1] for each in both])
    for column, groups in scores.get("parts", {}).items():
        for key, own in groups.items():
            there = [each.get("parts", {}).get(column, {}).get(key, {}).get("score") for each in both]
            line(f"{column}: {key} ({own['n']})"[:36], there)
    if paired:
        low, high = paired["difference_95"]
        lines.append(
            f"difference {paired['difference']:+.3f} ({low:+.3f} to {high:+.3f}) on {paired['rows']} rows of both"
        )
    return "\n".join(lines)
