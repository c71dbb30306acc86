"""Scores of predictions: shares of right completions, benchmarks' own sums, intervals, and two models side by side.

A prediction is a dict with what its row says, its `responses`, whether each is right (`exact`), and, where they are
known, `lengths` in tokens and `truncated`. Every score is a weighted sum of ratios, Σ c · (Σ num / Σ den) over units of
predictions, so that one bootstrap over units gives the interval of any of them: one ratio for a plain share, one for
each category where categories count alike, two for each category of MME.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.errors import UserError
from rewards import FORMATS, MAX_UNSCORED

RESAMPLES = 2000


@dataclass
class WeightedRatio:
    """One part of a score: `weight` times the sum of `num` over the sum of `den`, both (units,)."""

    weight: float
    num: np.ndarray
    den: np.ndarray


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that k of n completions, c of them right, hold a right one: 1 − C(n−c, k) / C(n, k).

    Chen et al. 2021, arXiv:2107.03374, eq. 1.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass_at_k needs 0 <= c <= n and 1 <= k <= n, not n={n}, c={c}, k={k}")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def score(ratios: list[WeightedRatio]) -> float:
    """The score that `ratios` make up."""
    return float(sum(r.weight * r.num.sum() / r.den.sum() for r in ratios))


def bootstrap(ratios: list[WeightedRatio], seed: int = 0, resamples: int = RESAMPLES) -> np.ndarray:
    """(resamples,) scores of units drawn with replacement. The same seed draws the same units for another model."""
    num, den = np.stack([r.num for r in ratios], 1), np.stack([r.den for r in ratios], 1)  # (U, R)
    weights, whole = np.array([r.weight for r in ratios]), num.sum(0) / den.sum(0)
    rng, units, scores = np.random.default_rng(seed), len(num), []
    for _ in range(resamples):
        drawn = np.bincount(rng.integers(units, size=units), minlength=units)
        total = drawn @ den
        scores.append(np.where(total > 0, drawn @ num / np.where(total > 0, total, 1), whole) @ weights)
    return np.array(scores)


def percentile_interval(scores: np.ndarray) -> tuple[float, float]:
    """The middle 95 % of them."""
    low, high = np.percentile(scores, [2.5, 97.5])
    return float(low), float(high)


def mean_score(per_row: Sequence[float]) -> list[WeightedRatio]:
    """The plain mean of `per_row`."""
    values = np.asarray(per_row, dtype=float)
    return [WeightedRatio(1.0, values, np.ones(len(values)))]


def bootstrap_interval(per_row: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of the mean of `per_row`, by resampling rows."""
    return percentile_interval(bootstrap(mean_score(per_row), seed))


def summarise(predictions: list[dict], task: str) -> dict:
    """The scores of a task's `predictions`, as the head of evaluate.py defines them.

    A completion without verdict is left out and counted. Raises UserError when more than a tenth of them are.
    """
    every = [(r, reward) for row in predictions for r, reward in zip(row["responses"], row["rewards"])]
    without = _mean([reward is None for _, reward in every])
    if without > MAX_UNSCORED:
        raise UserError(f"{without:.0%} of the completions have no verdict; at most 10% may: is the verifier up?")
    judged = [[e for e, r in zip(row["exact"], row["rewards"]) if r is not None] for row in predictions]
    judged = [exact for exact in judged if exact]
    shares = [_mean(exact) for exact in judged]
    scores = {
        "n": len(predictions),
        "completions_per_row": _most(predictions),
        "reward": _mean([reward for _, reward in every if reward is not None]),
        "exact_match": _mean(shares),
        "exact_match_95": bootstrap_interval(shares),
        "format_rate": _mean([FORMATS[task](response) for response, _ in every]),
        "no_verdict": without,
    }
    return scores | _lengths(predictions) | _pass_at_k(judged, predictions)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else math.nan


def _most(rows: list[dict]) -> int:
    return max(len(row["responses"]) for row in rows)


def _pass_at_k(exact: list[list[bool]], rows: list[dict]) -> dict[str, float]:
    """pass@k for 1, 2, 4, … and as many completions as every one of `rows` has, over those of `exact` that have k
    verdicts."""
    most = min(max(map(len, exact)), *(len(row["responses"]) for row in rows))
    ks = sorted({most, *(2**i for i in range(most.bit_length()) if 2**i <= most)})
    return {f"pass@{k}": _mean([pass_at_k(len(own), sum(own), k) for own in exact if len(own) >= k]) for k in ks}


def _lengths(rows: list[dict]) -> dict[str, float]:
    """Of responses: their tokens and how many were cut off, where that is known, and their characters."""
    scores = {"mean_characters": _mean([len(response) for row in rows for response in row["responses"]])}
    for name, column in (("mean_length", "lengths"), ("truncated", "truncated")):
        known = [number for row in rows for number in row.get(column) or []]
        scores |= {name: _mean(known)} if known else {}
    return scores
