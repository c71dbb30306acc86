"""Predictions of evaluate.py: they are judged, written to a file, and summarised in a table."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

from common import distributed
from common.files import atomic_write, json_lines
from common.records import Sample
from data import Processor, load_split
from evaluation.held_out import PROGRESS, judge_task
from evaluation.metrics import group_by, mean, summarise, verdicts
from evaluation.scorer import Scorer
from rewards import TASKS

MAX_ANSWERS = 20  # with at most this many gold answers, the rows of each also get a score
RULE_SCORED = "rule-scored"  # by rule, although the official scoring of the benchmark uses a server


class Judge:
    """Reads, judges and summarises the rows of a task, with the flags of evaluate.py. A benchmark has its own."""

    swap_pictures: Callable | None = None  # with --picture, what gives the rows other pictures, in parts/benchmarks

    def __init__(self, cfg: Any):
        self.cfg, self.prompt_task = cfg, cfg.task
        self.scorer = Scorer(cfg.task, cfg)
        self.interval: Callable | None = None  # of a mean; parts/benchmarks has one

    def load(self, processor: Processor) -> list[Sample]:
        """Load the rows that the flags name."""
        cfg, gold_task = self.cfg, self.scorer.gold_task
        return load_split(cfg, cfg.data, gold_task, processor, keep_duplicates=True)[: cfg.limit or None]

    def __call__(self, samples: list[Sample], outputs: list[dict]) -> tuple[dict, list[dict]]:
        """Return the scores and the judged predictions."""
        predictions, task = judge_task(self.scorer, samples, outputs), self.scorer.task
        reason = distributed.first_error(self.scorer.unscored_reason or None)
        scores = {"task": task} | summarise(predictions, task, reason, self.interval)
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


def write_predictions(folder: pathlib.Path, scores: dict, predictions: list[dict], sampled: bool) -> None:
    """Write predictions.jsonl and scores.json; if they were `sampled`, delete the progress file that they replace."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / "predictions.jsonl", json_lines(predictions))
    atomic_write(folder / "scores.json", json.dumps(scores, indent=1) + "\n")
    if sampled:
        (folder / PROGRESS).unlink(missing_ok=True)


def title(scores: dict) -> str:
    """Return the name of the benchmark or task, with a note if rules replaced the server in scoring the benchmark."""
    name = scores.get("benchmark") or scores.get("task", "")
    return f"{name} ({RULE_SCORED})" if scores.get("scoring") == RULE_SCORED else name


def column_names(scores: dict) -> tuple[str, str]:
    """Return the titles of two columns of scores: the baseline's, and the one beside it."""
    return ("own picture", scores["picture"]) if "picture" in scores else ("baseline", "model")


def subset_score(scores: dict, column: str, name: str) -> float | None:
    """Return the score of a subset, or None if `scores` does not have it."""
    return scores.get("parts", {}).get(column, {}).get(name, {}).get("score")


def format_table(scores: dict, baseline: dict | None = None) -> str:
    """Return the scores as lines of text, next to those of the baseline."""
    models = [baseline, scores] if baseline else [scores]
    lines: list[tuple[str, list]] = [(title(scores), [*column_names(scores)][-len(models) :])]
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
