"""Predictions of evaluate.py: they are judged, read from a file, written to one, and summarised in a table."""

import json
import pathlib
from typing import Any

from common import console, distributed
from common.errors import UserError
from common.files import atomic_write, json_lines
from common.parts import extra
from common.records import TAG, Sample, Turn
from data import Processor, load_split
from evaluation.held_out import PROGRESS, judge_task
from evaluation.metrics import group_by, mean, summarise, verdicts
from evaluation.scorer import Scorer
from inputs.rows import RowError, answer_text, drop_images, raw_rows
from rewards import MAX_REWARD, TASKS, gold_problem

MAX_ANSWERS = 20  # largest number of gold answers whose rows also get scores of their own
RULE_SCORED = "rule-scored"  # by rule, although the official scoring of the benchmark uses a server


class Judge:
    """Reads, judges and summarises the rows of a task, with the flags of evaluate.py. A benchmark has its own."""

    def __init__(self, cfg: Any):
        self.cfg, self.prompt_task = cfg, cfg.task
        self.scorer = Scorer(cfg.task, cfg)

    def load(self, processor: Processor) -> list[Sample]:
        """Load the rows that the flags name."""
        cfg, gold_task = self.cfg, self.scorer.gold_task
        return load_split(cfg, cfg.data, gold_task, processor, keep_duplicates=True)[: cfg.limit or None]

    def saved_sample(self, source: str, row: dict, output: dict) -> Sample:
        """Return a saved row, without its `output`, as a sample. Raises RowError if it is none."""
        if self.cfg.env and "env_rewards" not in output:
            raise RowError(f"no 'env_rewards', which --env {self.cfg.env} gives when responses are sampled")
        for name in ("exact", "rewards", "source"):
            row.pop(name, None)  # added by an earlier evaluation
        if missing := [name for name in ("prompt", "answer") if not isinstance(row.get(name), str | int | float)]:
            raise RowError(f"no '{missing[0]}' (columns: {', '.join(row)})")
        prompt, answer = str(row.pop("prompt")), answer_text(row.pop("answer"))
        if problem := gold_problem(self.scorer.gold_task, answer):
            raise RowError(problem)
        has_earlier = output.get("image_digest") and TAG not in prompt
        earlier = [Turn("user", [TAG])] if has_earlier else []  # earlier turns are not saved
        return Sample([*earlier, Turn("user", [prompt])], answer, source, row)

    def __call__(self, samples: list[Sample], outputs: list[dict]) -> tuple[dict, list[dict]]:
        """Return the scores and the judged predictions."""
        predictions, task = judge_task(self.scorer, samples, outputs), self.scorer.task
        reason = distributed.first_error(self.scorer.unscored_reason or None)
        benchmarks = extra("benchmarks")
        interval = benchmarks.mean_interval if benchmarks else None
        scores = {"task": task} | summarise(predictions, task, reason, interval)
        return scores | {"parts": scores_by_answer(predictions, task)}, predictions


def scores_by_answer(predictions: list[dict], task: str) -> dict[str, dict[str, dict[str, float]]]:
    """Return the score of the rows of each gold answer: {"answer": {answer: {n, score}}}; {} if there are many."""
    rows = [row for row in predictions if verdicts(row)]
    subsets = group_by(rows, [TASKS[task].answer_group(row["answer"]) for row in rows])
    if not 2 <= len(subsets) <= min(MAX_ANSWERS, len(rows) / 2):
        return {}
    names = sorted(subsets, key=lambda name: (not name.isdecimal(), name.isdecimal() and len(name), name))
    scores = {name: mean([mean(verdicts(row)) for row in subsets[name]]) for name in names}
    return {"answer": {name: {"n": len(subsets[name]), "score": score} for name, score in scores.items()}}


def read_predictions(path: str, judge: Judge) -> tuple[list[Sample], list[dict]]:
    """Return the rows of a file of predictions, which must suit `judge`, and the output saved with each row.

    A response that is null or empty counts as wrong. Raises a UserError that names the first bad rows, unless the flag
    `skip_bad_rows` is set.
    """
    rows, problems, cfg = [], [], judge.cfg
    if not pathlib.Path(path).is_file():
        raise UserError(f"no predictions at {path!r}: give a .jsonl file")
    for source, row, _ in raw_rows(path, None, "train"):
        try:
            if isinstance(row, RowError):
                raise row
            row = drop_images(row)
            output = _pop_output(row)
            rows.append((judge.saved_sample(source, row, output), output))
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


def write_predictions(folder: pathlib.Path, scores: dict, predictions: list[dict]) -> None:
    """Write predictions.jsonl and scores.json, and delete the progress file that they replace."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / "predictions.jsonl", json_lines(predictions))
    atomic_write(folder / "scores.json", json.dumps(scores, indent=1) + "\n")
    (folder / PROGRESS).unlink(missing_ok=True)


def title(scores: dict) -> str:
    """Return the name of the benchmark or task, with a note if rules replaced the server in scoring the benchmark."""
    name = scores.get("benchmark") or scores.get("task", "")
    return f"{name} ({RULE_SCORED})" if scores.get("scoring") == RULE_SCORED else name


def subset_score(scores: dict, column: str, name: str) -> float | None:
    """Return the score of a subset, or None if `scores` does not have it."""
    return scores.get("parts", {}).get(column, {}).get(name, {}).get("score")


def format_table(scores: dict, baseline: dict | None = None) -> str:
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
    return text.rstrip("\n")
