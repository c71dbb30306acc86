"""Scores of predictions: the summary of a task, and the table that is printed. parts/benchmarks has intervals.

A prediction is a dict with the row's columns, its `responses`, and whether each response is correct (`exact`). If
known, it also holds each response's length in tokens (`lengths`), whether it was cut off (`truncated`), and how often
an environment has answered (`calls`) or has only said what went wrong (`failed_calls`). For benchmarks, it also holds
the answer read from each response (`answers`) and further numbers about it (`measures`).
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from common.errors import UserError
from rewards import MAX_UNSCORED, TASKS

Key = TypeVar("Key", bound=Hashable)
Interval = tuple[float, float]
MAX_ANSWERS = 20  # largest number of gold answers whose rows also get scores of their own
RULE_SCORED = "rule-scored"  # by rule, although the official scoring of the benchmark uses a server


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that k completions drawn from n include a correct one, if c of the n are correct.

    This is 1 − C(n−c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374, eq. 1). Raises ValueError for an impossible n,
    c or k.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass_at_k needs 0 <= c <= n and 1 <= k <= n, not n={n}, c={c}, k={k}")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def mean(values: Sequence[float]) -> float:
    """Return the mean of `values`; NaN when there are none."""
    return float(np.mean(values)) if len(values) else math.nan


def group_by(rows: list[dict], keys: Iterable[Key]) -> dict[Key, list[dict]]:
    """Return the rows of each key, in order. `keys` holds the key of each row."""
    groups: dict[Key, list[dict]] = {}
    for row, key in zip(rows, keys):
        groups.setdefault(key, []).append(row)
    return groups


# --- summaries --------------------------------------------------------------------------------------------------------


def summarise(
    predictions: list[dict],
    task: str,
    unscored_reason: str | None = None,
    interval: Callable[[list[float]], Interval] | None = None,
) -> dict:
    """Return the scores of a task; docs/evaluation.md defines them.

    Completions without a verdict count in `no_verdict`, `format_rate` and the lengths; the other scores leave them out.
    At most a tenth may have no verdict; `unscored_reason` says why one has none. `interval`: that of a mean of values.
    """
    responses = [response for row in predictions for response in row["responses"]]
    rewards = [reward for row in predictions for reward in row["rewards"]]
    no_verdict = mean([reward is None for reward in rewards])
    if no_verdict > MAX_UNSCORED:
        limit = f"at most {MAX_UNSCORED:.0%} may have none"
        raise UserError(
            f"{no_verdict:.0%} of the completions have no verdict, {limit} ({unscored_reason or 'unknown reason'})"
        )
    scored = [
        row | {"exact": [is_exact for is_exact, reward in zip(row["exact"], row["rewards"]) if reward is not None]}
        for row in predictions
    ]
    scored = [row for row in scored if row["exact"]]
    exact_by_row = [row["exact"] for row in scored]
    accuracies = [mean(exact) for exact in exact_by_row]
    exact_match_95 = interval(accuracies) if interval else None
    return shared_scores("exact_match", mean(accuracies), exact_match_95, exact_by_row, predictions) | {
        "reward": mean([reward for reward in rewards if reward is not None]),
        "format_rate": mean([TASKS[task].format(response) for response in responses]),
        "no_verdict": no_verdict,
        "parts": _scores_by_answer(scored, task),
    }


def _scores_by_answer(rows: list[dict], task: str) -> dict[str, dict[str, dict[str, float]]]:
    """Return the score of the rows of each gold answer: {"answer": {answer: {n, score}}}; {} if there are many."""
    subsets = group_by(rows, [TASKS[task].answer_group(row["answer"]) for row in rows])
    if not 2 <= len(subsets) <= min(MAX_ANSWERS, len(rows) / 2):
        return {}
    names = sorted(subsets, key=lambda name: (not name.isdecimal(), name.isdecimal() and len(name), name))
    scores = {name: mean([mean(row["exact"]) for row in subsets[name]]) for name in names}
    return {"answer": {name: {"n": len(subsets[name]), "score": score} for name, score in scores.items()}}


def shared_scores(
    name: str,
    score: float,
    interval: Interval | None,
    exact_by_row: list[list[bool]],
    rows: list[dict],
    least_k: int = 2,
) -> dict:
    """Return the score, its interval, pass@k, the lengths and, with an environment, the calls.

    pass@k is given for k = 1, 2, 4, … from `least_k` on, and for the largest k for which every row has k completions.
    Each value is a mean over the entries of `exact_by_row` that have at least k verdicts. A mean is pass@1 itself.
    """
    scores: dict[str, Any] = {
        "n": len(rows),
        "completions_per_row": max(len(row["responses"]) for row in rows),
        name: score,
    }
    if interval:
        scores[f"{name}_95"] = interval
    max_k = min(max(map(len, exact_by_row)), *(len(row["responses"]) for row in rows))
    ks = {max_k, *(2**i for i in range(max_k.bit_length()))}
    for k in sorted(k for k in ks if k >= least_k):
        scores[f"pass@{k}"] = mean([pass_at_k(len(exact), sum(exact), k) for exact in exact_by_row if len(exact) >= k])
    scores["mean_characters"] = mean([len(response) for row in rows for response in row["responses"]])
    for column in ("lengths", "truncated", "calls", "failed_calls"):
        if values := [value for row in rows for value in row.get(column) or []]:
            scores["mean_length" if column == "lengths" else column] = mean(values)
    return scores


def title(scores: dict) -> str:
    """Return the name of the benchmark or task, with a note if rules replaced the server in scoring the benchmark."""
    name = scores.get("benchmark") or scores.get("task", "")
    return f"{name} ({RULE_SCORED})" if scores.get("scoring") == RULE_SCORED else name


def subset_score(scores: dict, column: str, name: str) -> float | None:
    """Return the score of a subset, or None if `scores` does not have it."""
    return scores.get("parts", {}).get(column, {}).get(name, {}).get("score")


def format_table(scores: dict, baseline: dict | None = None, paired: dict | None = None) -> str:
    """Return the scores as lines of text, next to those of the baseline."""
    models = [baseline, scores] if baseline else [scores]
    lines: list[tuple[str, list]] = [(title(scores), ["baseline", "model"][-len(models) :])]
    for name, value in scores.items():
        if isinstance(value, int | float):
            lines.append((name, [model.get(name) for model in models]))
        elif name.endswith("_95"):
            lines.append((f"  95% interval of {name.removesuffix('_95')}, from", [model[name][0] for model in models]))
            lines.append(("    to", [model[name][1] for model in models]))
    for column, subsets in scores.get("parts", {}).items():
        for name, subset in subsets.items():
            label = f"{column}: {name} ({subset['n']})"
            lines.append((label[:36], [subset_score(model, column, name) for model in models]))
    text = ""
    for label, values in lines:
        cells = [f"{x:12.3f}" if isinstance(x, float) else f"{'-' if x is None else x:>12}" for x in values]
        text += f"{label:36}{''.join(cells)}\n"
    if paired:
        low, high = paired["difference_95"]
        text += f"difference {paired['difference']:+.3f} ({low:+.3f} to {high:+.3f}) on {paired['rows']} rows of both\n"
    return text.rstrip("\n")
