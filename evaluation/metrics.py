"""Scores of predictions. parts/benchmarks has their intervals.

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


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that k completions drawn from n include a correct one, if c of the n are correct.

    This is 1 − C(n−c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374, eq. 1). Raises ValueError if it is undefined.
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


def verdicts(row: dict) -> list[bool]:
    """Return whether each response of a task's prediction is correct, without those that have no verdict."""
    return [is_exact for is_exact, reward in zip(row["exact"], row["rewards"]) if reward is not None]


def summarise(predictions: list[dict], task: str, reason: str | None = None, interval: Callable | None = None) -> dict:
    """Return the scores of a task; docs/evaluation.md defines them.

    Completions without a verdict are left out of `reward`, `exact_match` and pass@k; they count in everything else.
    Raises UserError, with the `reason`, if more than a tenth have none. `interval` returns the interval of a mean.
    """
    responses = [response for row in predictions for response in row["responses"]]
    rewards = [reward for row in predictions for reward in row["rewards"]]
    no_verdict = mean([reward is None for reward in rewards])
    if no_verdict > MAX_UNSCORED:
        limit, reason = f"at most {MAX_UNSCORED:.0%} may have none", reason or "unknown reason"
        raise UserError(f"{no_verdict:.0%} of the completions have no verdict, {limit} ({reason})")
    exact_by_row = [exact for row in predictions if (exact := verdicts(row))]
    accuracies = [mean(exact) for exact in exact_by_row]
    total = {"exact_match": mean(accuracies)} | ({"exact_match_95": interval(accuracies)} if interval else {})
    return shared_scores(total, exact_by_row, predictions) | {
        "reward": mean([reward for reward in rewards if reward is not None]),
        "format_rate": mean([TASKS[task].verdict("format", response) for response in responses]),
        "no_verdict": no_verdict,
    }


def shared_scores(total: dict, exact_by_row: list[list[bool]], rows: list[dict], least_k: int = 2) -> dict:
    """Return the score `total`, pass@k, the lengths and, with an environment, the calls.

    pass@k is given for k = 1, 2, 4, … from `least_k` on, and for the largest k for which every row has k completions.
    Each value is a mean over the entries of `exact_by_row` that have at least k verdicts. pass@1 is the accuracy.
    """
    scores: dict[str, Any] = {"n": len(rows), "completions_per_row": max(len(row["responses"]) for row in rows)} | total
    max_k = min(max(map(len, exact_by_row)), *(len(row["responses"]) for row in rows))
    ks = {max_k, *(2**i for i in range(max_k.bit_length()))}
    for k in sorted(k for k in ks if k >= least_k):
        scores[f"pass@{k}"] = mean([pass_at_k(len(exact), sum(exact), k) for exact in exact_by_row if len(exact) >= k])
    scores["mean_characters"] = mean([len(response) for row in rows for response in row["responses"]])
    calls = ("calls", "failed_calls") if "env_rewards" in rows[0] else ()  # else, these are columns of the user's
    for column in ("lengths", "truncated", *calls):
        if values := [value for row in rows for value in row.get(column) or []]:
            scores["mean_length" if column == "lengths" else column] = mean(values)
    return scores
