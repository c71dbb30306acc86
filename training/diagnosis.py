"""What a run's metrics say is wrong with it. The healthy runs in tests/vectors/histories.json cross no threshold."""

import math
from statistics import fmean
from typing import Any

RECENT = 3  # steps that have to agree: with few prompts, one may be bad luck
FIRST = 5  # steps that later ones are compared with; their mean evens out the luck of one
FALLEN = 10  # steps that a reward has to stay low; hard batches and slow starts are over by then
MOST = 0.5  # of the completions
NEAR_ZERO = 0.005  # nats per token; a tenth of the demo's, whose format fixes nearly every token
FEW_CALLS = 0.05  # of the completions with an environment; a model that learns to call begins with more
COLLAPSED, GROWN = 1 / 3, 2  # length relative to the first steps; healthy answers may become half as long
NO_LOSS = 0.01  # nats per token; a held-out loss below it is still good after it has doubled
NEARLY_ALL = 0.95  # of the held-out rows; above, no higher exact match can be expected

WARNINGS = {
    "signal": "no group's rewards have differed for {recent} steps, so nothing is learned. Likely causes: the "
    "format is wrong, completions are cut off, or all rows are too hard or too easy. The first completion: {example}",
    "empty": "no update has changed the weights for {recent} steps, as the gradient is 0: does the loss or the "
    "advantage that a plugin adds depend on the policy and the rewards?",
    "format": "no completion has the format that the task asks for: start from a model that follows instructions, show "
    "the format in --template, or give it a --reward; if it was there before, lower --learning_rate",
    "cut off": "most completions are cut off: raise --max_completion_length (with --env, also --max_turns or "
    "--max_prompt_length); if they ended before, lower --learning_rate",
    "length": "completions have gone from {before:.0f} to {now:.0f} tokens: look whether the scores gain by it, too",
    "entropy": "the entropy is near zero, so that completions hardly differ: if the scores are not good enough yet, "
    "start again with a lower --learning_rate or a higher --temperature",
    "calls": "hardly any completion has called the environment for {recent} steps: look at completions.html; if calls "
    "should pay, start from a model that makes them, or reward them",
    "failed calls": "every call of the environment has failed for {recent} steps; completions.html shows why",
    "reward": "the reward has stayed below half of its mean in the first steps for {fallen} steps: the rate is "
    "too high. Start again with a lower --learning_rate (a half, a fifth), more --prompts_per_step, or --warmup 10",
    "held-out": "the held-out score has fallen to half of its best, or the held-out loss has doubled: start again with "
    "a lower --learning_rate (a third, a tenth) or, if the reward or the loss of the steps is good, with fewer steps",
    "memory": "GPU memory is full: in each step, PyTorch empties its cache, which takes long; a smaller "
    "--micro_batch_tokens or --offload helps",
    "exact match": "the reward rises, but the held-out exact match does not: what else does the reward pay for?",
}


def problems(history: list[dict[str, Any]], example: str = "see completions.html") -> dict[str, str]:
    """Return those of `WARNINGS` that hold after `history`, the rows of metrics.jsonl; `example` is a completion."""
    if len(history) < RECENT:
        return {}
    steps = [row for row in history if row.get("reward") is not None]
    first, recent, later = steps[:FIRST], steps[-RECENT:], steps[FIRST:]

    def always(name: str, low: float, high: float) -> bool:
        values = [row.get(name) for row in recent]
        return len(values) == RECENT and None not in values and low <= min(values) and max(values) <= high

    def measured(name: str, rows: list[dict[str, Any]]) -> list[float]:
        return [row[name] for row in rows if row.get(name) is not None]

    before, now = (fmean(measured("completions/mean_length", rows) or [math.nan]) for rows in (first, recent))
    rewards = [row["reward"] for row in first]
    half, falls = fmean(rewards or [0]) / 2, len(later) >= FALLEN
    rises = len(later) >= FIRST and all(row["reward"] > max(rewards) for row in later[-FIRST:])
    evaluated = [row for row in history if row.get("eval/exact_match", row.get("eval/loss")) is not None]
    exact = measured("eval/exact_match", evaluated)
    scores = exact if any(exact) else measured("eval/reward", evaluated)  # perhaps no answer ever gets a full reward
    scores = scores or [1 / max(loss, NO_LOSS) for loss in measured("eval/loss", evaluated)] or [0]  # of sft.py
    no_signal = always("frac_reward_zero_std", 1, 1)
    # If the format is unknown, answers that were always cut off may still be whole, provided that their rewards differ.
    always_cut_off = fmean(measured("completions/clipped_ratio", first) or [0]) >= MOST
    unknown = recent and recent[-1].get("completions/format_rate") is None and (no_signal or not always_cut_off)
    holds = {
        "signal": no_signal and "teacher_kl" not in recent[-1],
        "empty": always("grad_norm", 0, 0) and not no_signal,
        "format": always("completions/format_rate", 0, 0),
        "cut off": always("completions/clipped_ratio", MOST, 1)
        and (unknown or always("completions/format_rate", 0, MOST)),
        "length": len(later) >= RECENT and (now < COLLAPSED * before or now > GROWN * before),
        "entropy": always("entropy", 0, NEAR_ZERO),
        "calls": always("turns/with_call", 0, FEW_CALLS),
        "failed calls": always("turns/calls_failed", 1, 1),
        "reward": falls and all(row["reward"] < half for row in later[-FALLEN:]) and half > 0,
        "held-out": 0 < max(scores) >= 2 * scores[-1],
        "memory": always("memory_flushes", 1, math.inf),
        "exact match": rises and len(exact) >= 3 and max(exact[1:]) <= exact[0] < NEARLY_ALL,
    }
    values = {"recent": RECENT, "fallen": FALLEN, "before": before, "now": now, "example": example}
    return {name: line.format(**values) for name, line in WARNINGS.items() if holds[name]}


def keep(rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
    """Append `row`; drop a row without held-out scores that is neither among the first rows nor among the last."""
    rows.append(row)
    if len(rows) > 4 * FALLEN and not any(name.startswith("eval/") for name in rows[-2 * FALLEN]):
        del rows[-2 * FALLEN]  # more than FALLEN stay at either end, as a step may have no reward


def is_metrics(row: dict) -> bool:
    """Return whether `row` is a line of `metrics.jsonl`: a step, and numbers of a sane size or None."""
    is_step = isinstance(row.get("step"), int) and row["step"] >= 0
    values = [value for value in row.values() if value is not None]  # larger ones could overflow a sum or a curve
    return is_step and all(isinstance(value, int | float) and abs(value) < 1e100 for value in values)


def shows_reward(rows: list[dict]) -> bool:
    """Return whether the reward says something about a run: with a teacher, only if it is nonzero in some row."""
    return any(row.get("reward") for row in rows) or not any("teacher_kl" in row for row in rows)
