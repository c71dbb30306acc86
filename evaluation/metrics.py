"""Scores of predictions with bootstrap intervals, summaries of a task and of a benchmark, and two models side by side.

A prediction is a dict with the row's columns, its `responses`, and whether each response is correct (`exact`). If
known, it also holds each response's length in tokens (`lengths`), whether it was cut off (`truncated`), and how often
an environment has answered (`calls`) or has only said what went wrong (`failed_calls`). For benchmarks, it also holds
the answer read from each response (`answers`) and further numbers about it (`measures`).
"""

import json
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from common.errors import UserError
from evaluation.benchmarks import BENCHMARKS, COGNITION, PERCEPTION, subset_value
from rewards import MAX_UNSCORED, TASKS

Key = TypeVar("Key", bound=Hashable)
RESAMPLES = 2000
MAX_ANSWERS = 20  # largest number of gold answers whose rows also get scores of their own
RULE_SCORED = "rule-scored"  # by rule, although the official scoring of the benchmark uses a server


# --- scores -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    """A score: `weight` times the sum of R mean values. Each mean is over some of the U rows, or over images for MME.

    R is 1 for a plain score, the number of categories for a mean over categories, and twice that for MME.
    """

    values: np.ndarray  # (U, R); 0 where the value does not count
    counted: np.ndarray  # (U, R); 1 where the value counts in the mean, else 0
    weight: float = 1.0

    def total(self) -> float:
        """Return the score."""
        sums = zip(self.values.T, self.counted.T)
        return float(sum(self.weight * values.sum() / counted.sum() for values, counted in sums))

    def bootstrap(self) -> np.ndarray:
        """Return bootstrap scores (RESAMPLES,), each computed from U units drawn with replacement.

        The seed is fixed: if two models are evaluated on the same rows, the same rows are drawn for both.
        """
        means = self.values.sum(0) / self.counted.sum(0)  # (R,), used for a category if none of its units is drawn
        rng, units, scores = np.random.default_rng(0), len(self.values), []
        for _ in range(RESAMPLES):
            draws = np.bincount(rng.integers(units, size=units), minlength=units)  # (U,)
            counted = draws @ self.counted
            drawn_means = np.where(counted > 0, draws @ self.values / np.maximum(counted, 1), means)
            scores.append(drawn_means @ np.full(len(means), self.weight))
        return np.array(scores)


def mean_score(values: Sequence[float]) -> Score:
    """Return the plain mean of `values` as a score."""
    return _by_category([values], [""] * len(values), 1.0)


def _by_category(columns: Sequence[Sequence[float]], categories: Sequence[Hashable], weight: float) -> Score:
    """Return the sum of the means of every column within every category, times `weight`."""
    masks = [np.array([float(c == name) for c in categories]) for name in sorted(set(categories), key=str)]
    values = [np.asarray(column, dtype=float) * mask for mask in masks for column in columns]
    return Score(np.stack(values, 1), np.repeat(np.stack(masks, 1), len(columns), axis=1), weight)


def score_of(name: str | None, rows: list[dict]) -> Score:
    """Return the score of benchmark `name`, or of a task if `name` is None.

    MMStar averages over categories. MME (arXiv:2306.13394) sums over categories: 100 · the fraction of questions
    answered correctly + 100 · the fraction of images with both questions answered correctly.
    """
    if name == "mme":
        images = group_by(rows, [(row["category"], str(row["question_id"])) for row in rows])
        correct = [sum(mean(row["exact"]) for row in pair) / 2 for pair in images.values()]
        both = [mean([a and b for a, b in zip(*(row["exact"] for row in pair))]) for pair in images.values()]
        return _by_category([correct, both], [category for category, _ in images], 100.0)
    accuracies = [mean(row["exact"]) for row in rows]
    if name == "mmstar":
        categories = [(row["category"], row["l2_category"]) for row in rows]
        return _by_category([accuracies], categories, 1 / len(set(categories)))
    return mean_score(accuracies)


def interval(scores: np.ndarray) -> tuple[float, float]:
    """Return the 95% interval of bootstrap `scores`."""
    low, high = np.percentile(scores, [2.5, 97.5])
    return float(low), float(high)


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


def summarise(predictions: list[dict], task: str, unscored_reason: str | None = None) -> dict:
    """Return the scores of a task; docs/evaluation.md defines them.

    Completions without a verdict count in `no_verdict`, `format_rate` and the lengths; the other scores leave them out.
    At most a tenth may have no verdict; `unscored_reason` says why one has none.
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
    return _shared_scores("exact_match", score_of(None, scored), exact_by_row, predictions) | {
        "reward": mean([reward for reward in rewards if reward is not None]),
        "format_rate": mean([TASKS[task].format(response) for response in responses]),
        "no_verdict": no_verdict,
        "parts": _scores_by_answer(scored, task),
    }


def _scores_by_answer(rows: list[dict], task: str) -> dict[str, dict[str, dict[str, float]]]:
    """Return the score of the rows of each gold answer, as `_subset_scores` does; {} if there are many answers."""
    subsets = group_by(rows, [TASKS[task].answer_group(row["answer"]) for row in rows])
    if not 2 <= len(subsets) <= min(MAX_ANSWERS, len(rows) / 2):
        return {}
    names = sorted(subsets, key=lambda name: (not name.isdecimal(), name.isdecimal() and len(name), name))
    scores = {name: score_of(None, subsets[name]).total() for name in names}
    return {"answer": {name: {"n": len(subsets[name]), "score": score} for name, score in scores.items()}}


def summarise_benchmark(name: str, rows: list[dict], server: str | None = None) -> dict:
    """Return the scores of benchmark `name`; docs/evaluation.md defines them.

    `server` is the name of the model that judged the responses, or None if rules did.
    """
    role = BENCHMARKS[name].server_role
    scoring = RULE_SCORED if role else "rule"
    if server:
        scoring = f"{role} {server}"
    measures = [measures for row in rows for measures in row["measures"]]
    no_reply = mean([each.get("no_verdict", 0.0) for each in measures])
    if no_reply > MAX_UNSCORED:
        raise UserError(
            f"{no_reply:.0%} of the responses have no reply from the {role} (at most {MAX_UNSCORED:.0%} may): is it up?"
        )
    if no_reply:
        scoring = f"{scoring}, {no_reply:.1%} without a reply"
    scores: dict[str, Any] = {"benchmark": name, "scoring": scoring}
    scores |= _shared_scores("score", score_of(name, rows), [row["exact"] for row in rows], rows)
    scores["no_answer"] = mean([answer is None for row in rows for answer in row["answers"]])
    for measure in ("open_recall", "open_f1"):
        if values := [each[measure] for each in measures if measure in each]:
            scores[measure] = mean(values)
    return scores | {"no_verdict": no_reply, "parts": _subset_scores(name, rows)}


def _shared_scores(name: str, score: Score, exact_by_row: list[list[bool]], rows: list[dict]) -> dict:
    """Return the score, its interval, pass@k, the lengths and, with an environment, the calls.

    pass@k is given for k = 1, 2, 4, … and for the largest k for which every row has k completions. Each value is a mean
    over the entries of `exact_by_row` that have at least k verdicts. A score that is a plain mean is pass@1 itself.
    """
    scores: dict[str, Any] = {
        "n": len(rows),
        "completions_per_row": max(len(row["responses"]) for row in rows),
        name: score.total(),
        f"{name}_95": interval(score.bootstrap()),
    }
    max_k = min(max(map(len, exact_by_row)), *(len(row["responses"]) for row in rows))
    ks = {max_k, *(2**i for i in range(max_k.bit_length()))}
    if score.values.shape[1] == 1:
        ks.discard(1)
    for k in sorted(ks):
        scores[f"pass@{k}"] = mean([pass_at_k(len(exact), sum(exact), k) for exact in exact_by_row if len(exact) >= k])
    scores["mean_characters"] = mean([len(response) for row in rows for response in row["responses"]])
    for column in ("lengths", "truncated", "calls", "failed_calls"):
        if values := [value for row in rows for value in row.get(column) or []]:
            scores["mean_length" if column == "lengths" else column] = mean(values)
    return scores


def _subset_scores(name: str, rows: list[dict]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the score of each subset, such as a level or a category: {column: {value: {n, score}}}."""
    scores: dict[str, dict[str, dict[str, float]]] = {}
    for column in BENCHMARKS[name].subset_columns:
        subsets = group_by(rows, [subset_value(name, row, column) for row in rows])
        for value in sorted(subsets.keys() - {None}):
            subset = {"n": len(subsets[value]), "score": score_of(name, subsets[value]).total()}
            scores.setdefault(column, {})[value] = subset
    kinds = {"perception": PERCEPTION, "cognition": COGNITION} if name == "mme" else {}
    for kind, members in kinds.items():
        if present := [scores["category"][category] for category in members if category in scores["category"]]:
            total = {key: sum(each[key] for each in present) for key in ("n", "score")}
            scores.setdefault("kind", {})[kind] = total
    return scores


# --- two models -------------------------------------------------------------------------------------------------------


def pair_predictions(name: str | None, before: list[dict], after: list[dict]) -> list[tuple[dict, dict]]:
    """Pair the predictions of two models for the same row.

    Two rows are the same when their columns match and, if all predictions record their images, the images match too.
    Duplicate rows are paired in order, or left out when their number differs between the two models. A question of MME
    is left out if the other question about its image has no pair.
    """
    columns = [*(BENCHMARKS[name].columns if name else ("prompt", "answer"))]
    columns = [column for column in columns if column != "precision"]
    if all("image_digest" in row for row in [*before, *after]):
        columns.append("image_digest")

    groups_before, groups_after = (
        group_by(rows, [json.dumps([row.get(column) for column in columns], default=str) for row in rows])
        for rows in (before, after)
    )
    matched = [(groups_before.get(key, []), rows) for key, rows in groups_after.items()]
    pairs = [pair for old, new in matched if len(old) == len(new) for pair in zip(old, new)]
    if name != "mme":
        return pairs
    images = [(after["category"], str(after["question_id"])) for _, after in pairs]
    counts = Counter(images)
    return [pair for pair, image in zip(pairs, images) if counts[image] == 2]


def score_difference(name: str | None, paired: list[tuple[dict, dict]]) -> dict:
    """Return the score of the second model minus that of the first, with the interval of the paired difference."""
    before, after = (score_of(name, [pair[side] for pair in paired]) for side in (0, 1))
    total = after.total() - before.total()
    return {"rows": len(paired), "difference": total, "difference_95": interval(after.bootstrap() - before.bootstrap())}


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
