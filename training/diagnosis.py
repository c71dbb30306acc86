"""What a run's metrics say is wrong with it, one line for each problem; docs/metrics.md lists them.

The thresholds are such that no healthy run of the demos crosses one (docs/log.md).
"""

import statistics
from typing import Any

RECENT = 3  # steps that have to agree: with few prompts, a single step may be bad luck
FIRST = 5  # steps that later ones are compared with; their mean evens out the luck of one
FALLEN = 10  # steps in which a reward has to stay low: a slow start or a hard batch is over by then
MOST = 0.5  # of the completions
NEAR_ZERO = 0.005  # nats per token; a tenth of the demo's, whose format fixes nearly every token
COLLAPSED, GROWN = 1 / 3, 2  # length relative to the first steps; short answers may well become half as long
NEARLY_ALL = 0.95  # of the held-out rows; above, a higher exact match cannot be expected
EXCERPT = 80  # characters of a completion


def problems(history: list[dict[str, Any]], settings: dict[str, Any], example: str = "") -> dict[str, str]:
    """Return what is wrong after the last step of a run, by a name for each problem.

    `history`: the rows of metrics.jsonl. `settings`: the flags. `example`: the text of a completion.
    """
    steps = [row for row in history if row.get("reward") is not None]
    recent, first = steps[-RECENT:], steps[:FIRST]
    if len(steps) < RECENT:
        return {}

    def always(name: str, low: float, high: float) -> bool:
        values = [row.get(name) for row in recent]
        return None not in values and low <= min(values) and max(values) <= high

    lacks_format = always("completions/format_rate", 0, MOST)
    found = {}
    if always("frac_reward_zero_std", 1, 1):
        found["signal"] = (
            f"no group's rewards have differed for {RECENT} steps, so nothing is learned (mean reward "
            f"{recent[-1]['reward']:.3g}). Likely causes: the model does not give the format, all rows are too hard or "
            "too easy for it, or completions are cut off"
            + (f". The first completion: {excerpt(example)}" if example else "")
        )
    if always("completions/format_rate", 0, 0):
        found["format"] = (
            f"no completion has had the format that --task {settings.get('task')} asks for in {RECENT} steps: start "
            "from a model that follows instructions, show the format in --template, or give it a --reward"
        )
    if always("completions/clipped_ratio", MOST, 1) and lacks_format:
        found["cut off"] = (
            f"most completions are cut off at {settings.get('max_completion_length')} tokens, before the answer: raise "
            "--max_completion_length"
        )
    if always("entropy", 0, NEAR_ZERO):
        found["entropy"] = (
            f"the entropy is near zero ({recent[-1]['entropy']:.2g} nats per token), so completions hardly differ: if "
            "the scores are not good enough, lower --learning_rate, or raise --clip_high, --temperature or --beta"
        )
    if len(steps) >= FIRST + RECENT:
        found |= _length_problems(first, recent)
    reward = statistics.mean(row["reward"] for row in first)
    if len(steps) >= FIRST + FALLEN and all(row["reward"] < reward / 2 for row in steps[-FALLEN:]) and reward > 0:
        found["fallen"] = (
            f"the reward has stayed below half of that of the first steps ({reward:.3g}) for {FALLEN} steps: the "
            "rate is too high. Start again with a lower --learning_rate (a half, a fifth), more --prompts_per_step, or "
            "--warmup 10"
        )
    scores = [row["eval/exact_match"] for row in history if row.get("eval/exact_match") is not None]
    rises = len(steps) >= 2 * FIRST and min(r["reward"] for r in steps[-FIRST:]) > max(r["reward"] for r in first)
    if rises and len(scores) >= 3 and max(scores[1:]) <= scores[0] < NEARLY_ALL:
        found["exact match"] = (
            f"the reward rises, but the held-out exact match does not ({scores[0]:.3f} before, {scores[-1]:.3f} now): "
            "does the reward pay for something else? Read completions.html"
        )
    return found


def _length_problems(first: list[dict[str, Any]], recent: list[dict[str, Any]]) -> dict[str, str]:
    """Return a problem if the completions have become much shorter or longer."""
    lengths = [row.get("completions/mean_length") for row in (*first, *recent)]
    if None in lengths:
        return {}
    before, now = statistics.mean(lengths[: len(first)]), statistics.mean(lengths[len(first) :])
    change = f"from {before:.0f} to {now:.0f} tokens"
    if now < COLLAPSED * before:
        return {"shorter": f"completions have become much shorter, {change}: does the reward pay for short ones?"}
    if now > GROWN * before:
        return {"longer": f"completions have become twice as long, {change}: does the score rise with their length?"}
    return {}


def excerpt(text: str) -> str:
    """Return the beginning of `text` on one line, in quotes."""
    return repr(text if len(text) <= EXCERPT else text[:EXCERPT] + "…")


def all_problems(history: list[dict[str, Any]], settings: dict[str, Any]) -> dict[str, str]:
    """Return each problem that there was after any step, as it was when it first appeared."""
    found: dict[str, str] = {}
    for end in range(len(history)):
        found = problems(history[: end + 1], settings) | found
    return found
