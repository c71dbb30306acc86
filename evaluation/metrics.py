"""Scores of predictions with bootstrap intervals, and the summary of a task.

A prediction is a dict with the row's columns, its `responses`, and whether each response is correct (`exact`). If
known, it also holds each response's length in tokens (`lengths`) and whether it was cut off (`truncated`).

Every score is a weighted sum of ratios, Σ weight · (Σ num / Σ den). The inner sums run over units: rows, or images for
MME. A plain mean is one ratio, a mean over categories has one ratio per category, and MME has two per category. One
bootstrap over units therefore gives the interval of any score.

Shapes: U units, R ratios.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.errors import UserError
from rewards import MAX_UNSCORED, TASKS

RESAMPLES = 2000


@dataclass
class WeightedRatio:
    """One term of a score: `weight` · Σ `num` / Σ `den`, where `num` and `den` have the shape (U,)."""

    weight: float
    num: np.ndarray
    den: np.ndarray


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that k completions drawn from n include a correct one, if c of the n are correct.

    This is 1 − C(n−c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374, eq. 1). Raises ValueError for an impossible n,
    c or k.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass_at_k needs 0 <= c <= n and 1 <= k <= n, not n={n}, c={c}, k={k}")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def score(ratios: list[WeightedRatio]) -> float:
    """Return the score: the weighted sum of `ratios`."""
    return float(sum(r.weight * r.num.sum() / r.den.sum() for r in ratios))


def bootstrap(ratios: list[WeightedRatio], seed: int = 0, resamples: int = RESAMPLES) -> np.ndarray:
    """Return bootstrap scores (resamples,), each computed from U units drawn with replacement.

    The same seed draws the same units, so the scores of two models on the same rows can be subtracted.
    """
    num, den = np.stack([r.num for r in ratios], 1), np.stack([r.den for r in ratios], 1)  # (U, R)
    weights = np.array([r.weight for r in ratios])  # (R,)
    full_ratios = num.sum(0) / den.sum(0)  # (R,), used for a category if none of its units is drawn
    rng, units, scores = np.random.default_rng(seed), len(num), []
    for _ in range(resamples):
        counts = np.bincount(rng.integers(units, size=units), minlength=units)  # (U,)
        total = counts @ den
        scores.append(np.where(total > 0, counts @ num / np.where(total > 0, total, 1), full_ratios) @ weights)
    return np.array(scores)


def percentile_interval(scores: np.ndarray) -> tuple[float, float]:
    """Return the 2.5th and the 97.5th percentile of `scores`."""
    low, high = np.percentile(scores, [2.5, 97.5])
    return float(low), float(high)


def mean_score(per_row: Sequence[float]) -> list[WeightedRatio]:
    """Return the plain mean of `per_row` as a ratio."""
    values = np.asarray(per_row, dtype=float)
    return [WeightedRatio(1.0, values, np.ones(len(values)))]


def bootstrap_interval(per_row: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Return the 95% interval of the mean of `per_row`, from a bootstrap over rows."""
    return percentile_interval(bootstrap(mean_score(per_row), seed))


def summarise(predictions: list[dict], task: str) -> dict:
    """Return the scores of a task; evaluate.py's docstring defines them.

    Completions without a verdict count only in `no_verdict`; the other scores leave them out. Raises UserError when
    more than a tenth of the completions have no verdict.
    """
    completions = [(r, reward) for row in predictions for r, reward in zip(row["responses"], row["rewards"])]
    no_verdict = mean([reward is None for _, reward in completions])
    if no_verdict > MAX_UNSCORED:
        raise UserError(f"{no_verdict:.0%} of the completions have no verdict (at most 10% may): is the verifier up?")
    exact_by_row = [[e for e, r in zip(row["exact"], row["rewards"]) if r is not None] for row in predictions]
    exact_by_row = [exact for exact in exact_by_row if exact]
    accuracies = [mean(exact) for exact in exact_by_row]
    scores = {
        "n": len(predictions),
        "completions_per_row": max_completions(predictions),
        "reward": mean([reward for _, reward in completions if reward is not None]),
        "exact_match": mean(accuracies),
        "exact_match_95": bootstrap_interval(accuracies),
        "format_rate": mean([TASKS[task].format(response) for response, _ in completions]),
        "no_verdict": no_verdict,
    }
    return scores | length_scores(predictions) | pass_at_k_scores(exact_by_row, predictions)


def mean(values: Sequence[float]) -> float:
    """Return the mean of `values`; NaN when there are none."""
    return float(np.mean(values)) if len(values) else math.nan


def max_completions(rows: list[dict]) -> int:
    """Return the largest number of completions for any row."""
    return max(len(row["responses"]) for row in rows)


def pass_at_k_scores(exact_by_row: list[list[bool]], rows: list[dict]) -> dict[str, float]:
    """Return pass@k for k = 1, 2, 4, … and for the largest k for which every row has k completions.

    Each value is a mean over the entries of `exact_by_row` that have at least k verdicts.
    """
    max_k = min(max(map(len, exact_by_row)), *(len(row["responses"]) for row in rows))
    ks = sorted({max_k, *(2**i for i in range(max_k.bit_length()) if 2**i <= max_k)})
    return {
        f"pass@{k}": mean([pass_at_k(len(exact), sum(exact), k) for exact in exact_by_row if len(exact) >= k])
        for k in ks
    }


def length_scores(rows: list[dict]) -> dict[str, float]:
    """Return the mean length of the responses in characters.

    If known, also return their mean length in tokens and the fraction that was cut off.
    """
    scores = {"mean_characters": mean([len(response) for row in rows for response in row["responses"]])}
    for name, column in (("mean_length", "lengths"), ("truncated", "truncated")):
        values = [value for row in rows for value in row.get(column) or []]
        scores |= {name: mean(values)} if values else {}
    return scores
