"""Saved predictions: rows with `response` or `responses`, scored without a model."""

import functools
import pathlib
from typing import Any

from common import console
from common.errors import UserError
from common.records import TAG, Sample, Turn
from evaluation.predictions import Judge
from inputs.rows import RowError, answer_text, drop_images, raw_rows
from rewards import MAX_REWARD, gold_problem


def read_predictions(path: str, judge: Judge) -> tuple[list[Sample], list[dict]]:
    """Return the rows of a file of predictions, which must suit `judge`, and the output saved with each row.

    A response that is null or empty counts as wrong. Raises a UserError that names the first bad rows, unless the flag
    `skip_bad_rows` is set.
    """
    rows, problems, cfg = [], [], judge.cfg
    as_sample = getattr(judge, "saved_sample", functools.partial(saved_sample, judge))  # a benchmark has its own
    if not pathlib.Path(path).is_file():
        raise UserError(f"no predictions at {path!r}: give a .jsonl file")
    for source, row, _ in raw_rows(path, None, "train"):
        try:
            if isinstance(row, RowError):
                raise row
            row = drop_images(row)
            output = _pop_output(row)
            rows.append((as_sample(source, row, output), output))
        except RowError as error:
            problems.append(f"{source}: {error}")
    summary = f"{len(problems)} of {len(problems) + len(rows)} rows cannot be used: {'; '.join(problems[:5])}"
    if problems and not cfg.skip_bad_rows:
        raise UserError(f"{summary}; fix them or pass --skip_bad_rows to leave them out")
    if problems:
        console.log(f"skipped: {summary}")
    if not rows:
        raise UserError(f"{path}: no usable row")
    samples, outputs = map(list, zip(*rows[: cfg.limit or None]))
    return samples, outputs


def _pop_output(row: dict) -> dict:
    """Remove from `row` its `responses`, and what else an evaluation saves of them, if it has it; return all that."""
    if "responses" not in row and "response" not in row:
        raise RowError(f"neither 'response' nor 'responses' (columns: {', '.join(row)})")
    responses = row.pop("responses", None)
    responses = [row.pop("response", None)] if responses is None else responses
    if not isinstance(responses, list) or not responses:
        raise RowError("'responses' is not a list of texts")
    if not all(isinstance(response, str | int | float | None) for response in responses):
        raise RowError("a response is neither text nor null")
    output: dict[str, Any] = {"responses": ["" if response is None else str(response) for response in responses]}
    for name in ("lengths", "truncated", "calls", "failed_calls"):
        numbers = row.pop(name, None)
        is_valid = isinstance(numbers, list) and len(numbers) == len(responses)
        most = 1 if name == "truncated" else 2**31
        if is_valid and all(isinstance(number, int) and 0 <= number <= most for number in numbers):
            output[name] = numbers
    env_rewards = row.pop("env_rewards", None)
    is_valid = isinstance(env_rewards, list) and len(env_rewards) == len(responses)
    if is_valid and all(isinstance(reward, int | float) and abs(reward) < MAX_REWARD for reward in env_rewards):
        output["env_rewards"] = env_rewards
    if isinstance(image_digest := row.pop("image_digest", None), str):
        output["image_digest"] = image_digest
    return output


def saved_sample(judge: Judge, source: str, row: dict, output: dict) -> Sample:
    """Return a saved row, without its `output`, as a sample. Raises RowError if it is none."""
    if judge.cfg.env and "env_rewards" not in output:
        raise RowError(f"no 'env_rewards', which --env {judge.cfg.env} gives when responses are sampled")
    for name in ("exact", "rewards", "source"):
        row.pop(name, None)  # added by an earlier evaluation
    if missing := [name for name in ("prompt", "answer") if not isinstance(row.get(name), str | int | float)]:
        raise RowError(f"no '{missing[0]}' (columns: {', '.join(row)})")
    prompt, answer = str(row.pop("prompt")), answer_text(row.pop("answer"))
    if problem := gold_problem(judge.scorer.gold_task, answer):
        raise RowError(problem)
    has_earlier = output.get("image_digest") and TAG not in prompt
    earlier = [Turn("user", [TAG])] if has_earlier else []  # earlier turns are not saved
    return Sample([*earlier, Turn("user", [prompt])], answer, source, row)
