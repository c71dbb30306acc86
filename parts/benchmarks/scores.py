"""Scores of a benchmark and of a task with bootstrap intervals, and two models side by side.

Of a benchmark, a prediction (evaluation/metrics.py) also holds the answer read from each response (`answers`) and
further numbers about it (`measures`).
"""

import pathlib
from collections import Counter
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from common import console, distributed
from common.errors import UserError, find_entry
from common.files import json_lines
from common.records import Sample
from config import PolicyFlags
from data import Processor, validate_rows
from evaluation.held_out import open_progress, sample_rows
from evaluation.metrics import group_by, mean, shared_scores
from evaluation.predictions import RULE_SCORED, Judge, write_predictions
from evaluation.scorer import start_math
from grading.answers import answer_part
from inputs.rows import raw_rows
from parts.benchmarks import table
from parts.benchmarks.figures import write_differences
from parts.benchmarks.saved import read_predictions
from policy.model import Policy, empty_model, load_policy
from rewards import MAX_UNSCORED
from rollout import Engine

RESAMPLES = 2000


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
    categories = [(row["category"], row["l2_category"]) if name == "mmstar" else "" for row in rows]
    return _by_category([accuracies], categories, 1 / len(set(categories)))


def interval(scores: np.ndarray) -> tuple[float, float]:
    """Return the 95% interval of bootstrap `scores`."""
    low, high = np.percentile(scores, [2.5, 97.5])
    return float(low), float(high)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95% interval of the mean of `values`."""
    return interval(_by_category([values], [""] * len(values), 1.0).bootstrap())


# --- a benchmark ------------------------------------------------------------------------------------------------------


class BenchmarkJudge(Judge):
    """Reads, judges and summarises the rows of `--benchmark`."""

    def __init__(self, cfg: Any):
        self.cfg, self.name, self.prompt_task = cfg, cfg.benchmark, "math"
        benchmark = find_entry("benchmark", self.name, table.BENCHMARKS)
        if not isinstance(benchmark, table.Benchmark):
            kind = type(benchmark).__name__
            raise UserError(f"--benchmark {self.name}: its entry is a {kind}; expected Benchmark")
        needs_math = benchmark.server_role or benchmark.judge is table.judge_math
        self.server = start_math(cfg, cfg.judge_cache, bool(benchmark.server_role)) if needs_math else None

    def load(self, processor: Processor) -> list[Sample]:
        """Load the rows, checked like those of training, as samples whose `fields` hold the columns."""
        cfg, hub = self.cfg, table.BENCHMARKS[self.name].hub
        data, length = cfg.data or hub, cfg.max_prompt_length
        rows = [table.read_row(self.name, *row) for row in raw_rows(data, cfg.image_dir, hub.rpartition("@")[2])]
        samples = validate_rows(rows, data, None, processor, length, cfg.skip_bad_rows, keep_duplicates=True)
        samples = samples[: cfg.limit or None]
        benchmark = table.BENCHMARKS[self.name]
        for sample in samples:
            benchmark.prepare(sample, processor)
        if convention := benchmark.convention(samples[0].fields):
            console.log(f"{self.name}: {convention}, as the model's family writes them")
        return self._checked(samples)

    def saved_sample(self, source: str, row: dict, output: dict) -> Sample:
        for name in ("answers", "measures", "gold", "source", "prompt"):
            row.pop(name, None)  # added by an earlier evaluation
        return table.to_sample(self.name, source, row)

    def _checked(self, samples: list[Sample]) -> list[Sample]:
        if self.name == "mme":
            table.check_pairs(samples)
        return samples

    def __call__(self, samples: list[Sample], outputs: list[dict]) -> tuple[dict, list[dict]]:
        predictions = self.judge(self._checked(samples), outputs)
        return summarise_benchmark(self.name, predictions, self.server.model if self.server else None), predictions

    def judge(self, samples: list[Sample], outputs: list[dict]) -> list[dict]:
        """Return the predictions: each row with its output and what was judged of its responses.

        Each process judges a shard of the rows, but the result is the same on every process.
        """
        local_rows = distributed.shard([*zip(samples, outputs)])
        work = [(answer_part(text), sample) for sample, output in local_rows for text in output["responses"]]
        if self.server:
            self.server.reset_failures()
        with ThreadPoolExecutor(self.server.threads if self.server else 8) as pool:
            judged = iter(console.progress(pool.map(self._judge, work), "scoring", total=len(work), unit="response"))
            local = [[next(judged) for _ in output["responses"]] for _, output in local_rows]
        predictions = []
        for sample, output, judgements in zip(samples, outputs, distributed.gather_shards(local)):
            origin = {"source": sample.source, "prompt": sample.prompt, "gold": sample.answer}
            verdicts = {"answers": [j.answer for j in judgements], "exact": [j.correct for j in judgements]}
            verdicts["measures"] = [j.measures for j in judgements]
            predictions.append(sample.fields | origin | output | verdicts)
        return predictions

    def _judge(self, work: tuple[str, Sample]) -> table.Judgement:
        text, sample = work
        judged = table.BENCHMARKS[self.name].judge(text, sample.answer, sample.fields, self.server)
        if not isinstance(judged, table.Judgement):
            kind = type(judged).__name__
            raise UserError(f"--benchmark {self.name}: its judge returned a {kind}; expected a Judgement")
        return judged


def summarise_benchmark(name: str, rows: list[dict], server: str | None = None) -> dict:
    """Return the scores of benchmark `name`; docs/evaluation.md defines them.

    `server` is the name of the model that judged the responses, or None if rules did.
    """
    role = table.BENCHMARKS[name].server_role
    scoring = f"{role} {server}" if server else RULE_SCORED if role else "rule"
    measures = [measures for row in rows for measures in row["measures"]]
    no_reply = mean([each.get("no_verdict", 0.0) for each in measures])
    if no_reply > MAX_UNSCORED:
        raise UserError(
            f"{no_reply:.0%} of the responses have no reply from the {role} (at most {MAX_UNSCORED:.0%} may): is it up?"
        )
    if no_reply:
        scoring = f"{scoring}, {no_reply:.1%} without a reply"
    if convention := table.BENCHMARKS[name].convention(rows[0]):
        scoring += f", {convention}"
    scores: dict[str, Any] = {"benchmark": name, "scoring": scoring}
    score = score_of(name, rows)
    least_k = 2 if score.values.shape[1] == 1 else 1
    total = {"score": score.total(), "score_95": interval(score.bootstrap())}
    scores |= shared_scores(total, [row["exact"] for row in rows], rows, least_k)
    scores["no_answer"] = mean([answer is None for row in rows for answer in row["answers"]])
    for measure in ("open_recall", "open_f1", "in_pixels", "in_thousand"):
        if values := [each[measure] for each in measures if measure in each]:
            scores[measure] = mean(values)
    return scores | {"no_verdict": no_reply, "parts": _subset_scores(name, rows)}


def _subset_scores(name: str, rows: list[dict]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the score of each subset, such as a level or a category: {column: {value: {n, score}}}."""
    scores: dict[str, dict[str, dict[str, float]]] = {}
    for column in table.BENCHMARKS[name].subset_columns:
        subsets = group_by(rows, [table.subset_value(name, row, column) for row in rows])
        for value in sorted(subsets.keys() - {None}):
            subset = {"n": len(subsets[value]), "score": score_of(name, subsets[value]).total()}
            scores.setdefault(column, {})[value] = subset
    kinds = {"perception": table.PERCEPTION, "cognition": table.COGNITION} if name == "mme" else {}
    for kind, members in kinds.items():
        if present := [scores["category"][category] for category in members if category in scores["category"]]:
            total = {key: sum(each[key] for each in present) for key in ("n", "score")}
            scores.setdefault("kind", {})[kind] = total
    return scores


# --- two models -------------------------------------------------------------------------------------------------------


class Baseline:
    """What `--baseline` names: an earlier evaluation, or a model. `cfg` is that of evaluate.py."""

    def __init__(self, cfg: Any, judge: Judge):
        self.cfg, self.folder, self.is_saved = cfg, pathlib.Path(cfg.output), cfg.baseline_is_saved
        if self.is_saved:
            self.samples, self.outputs = read_predictions(f"{cfg.baseline}/predictions.jsonl", judge)
        else:
            self.policy = load_baseline(cfg)

    def sample(self, engine: Engine, processor: Processor, samples: list[Sample], settings: dict) -> None:
        """Sample responses, unless they are saved, with the sampler of the other model; `settings`: `resume_key`."""
        if not self.is_saved:
            engine.sync_weights(self.policy)
            progress = open_progress(self.folder / "baseline", settings)
            self.samples, self.outputs = samples, sample_rows(engine, processor, samples, self.cfg, progress)

    def compare(self, scores: dict, judged: list[dict], predictions: list[dict]) -> dict:
        """Write the baseline's `scores` and `judged` predictions; return what scores.json tells of the comparison.

        Raises UserError when it has no row in common with the `predictions` of the other model.
        """
        pairs = pair_predictions(self.cfg.benchmark, judged, predictions)
        self.pairs = [pair for pair in pairs if all(None not in row.get("rewards", []) for row in pair)]
        if not self.pairs:
            raise UserError(f"--baseline {self.cfg.baseline}: it has no row in common with this evaluation")
        scores, pairs = {"model": self.cfg.baseline} | scores, self.pairs
        if self.cfg.picture:  # then the difference is what the rows' own pictures add
            pairs = [(without, own) for own, without in pairs]
        write_predictions(self.folder / "baseline", scores, judged, sampled=not self.is_saved)
        return {"baseline": scores, "paired": score_difference(self.cfg.benchmark, pairs)}

    def report(self, scores: dict, paired: dict, samples: list[Sample]) -> None:
        """Write completions.html and print the difference; `scores` and `samples` are those of the other model."""
        low, high = paired["difference_95"]
        what, to = ("the picture adds", " to the score") if self.cfg.picture else ("difference", "")
        print(f"{what} {paired['difference']:+.3f} ({low:+.3f} to {high:+.3f}){to} on {paired['rows']} rows of both")
        print(write_differences(self.folder, scores, self.pairs, {sample.source: sample for sample in samples}))


def load_baseline(cfg: Any) -> Policy:
    """Load the model or adapter to compare with.

    One sampler serves both, so the parameters must have equal shapes.
    """
    is_adapter = (pathlib.Path(cfg.baseline) / "adapter_config.json").is_file()
    flags = PolicyFlags(adapter=cfg.baseline if is_adapter else None)
    try:
        policy = load_policy(cfg.model if is_adapter else cfg.baseline, flags, torch.device("cpu"))
    except (UserError, OSError) as error:
        reason = str(error).splitlines()[0][:160]
        raise UserError(
            f"--baseline {cfg.baseline!r} is neither a model nor the folder of an evaluation ({reason})"
        ) from None
    if is_adapter:
        return policy
    own = {name: parameter.shape for name, parameter in empty_model(cfg.model).named_parameters()}
    other = {name: parameter.shape for name, parameter in policy.model.named_parameters()}
    if differing := sorted(name for name, _ in own.items() ^ other.items()):
        raise UserError(
            f"--baseline {cfg.baseline}: its {differing[0]} has a different shape in {cfg.model}, or only one has it; "
            "score the baseline in a separate run and give --baseline the output folder of that run"
        )
    return policy


def pair_predictions(name: str | None, before: list[dict], after: list[dict]) -> list[tuple[dict, dict]]:
    """Pair the predictions of two models for the same row.

    Two rows are the same when their columns match, as predictions.jsonl has them (an empty cell is NaN in some tables,
    and null in this file), and, if all predictions record their images, the images match too. Duplicate rows are paired
    in order, or left out when their number differs between the two models. A question of MME is left out if the other
    question about its image has no pair.
    """
    columns = [*(table.BENCHMARKS[name].columns if name else ("prompt", "answer"))]
    columns = [column for column in columns if column != "precision"]
    if all("image_digest" in row for row in [*before, *after]):
        columns.append("image_digest")

    groups_before, groups_after = (
        group_by(rows, [json_lines([{column: row.get(column) for column in columns}]) for row in rows])
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
