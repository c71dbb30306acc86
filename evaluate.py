"""Scoring a model, or saved predictions, on a data set or a named benchmark.

    python evaluate.py --model runs/demo/final --data runs/tiny/count-0/test --task count --output runs/demo/after
    python evaluate.py --model DIR --benchmark math500 --n 8 --temperature 0.6          # Pass@1[8]
    python evaluate.py --model DIR --baseline OTHER --benchmark mmstar --data FOLDER    # two models side by side
    python evaluate.py --predictions FILE.jsonl --benchmark mme                         # no model, no GPU

Samples n completions of every row and writes `predictions.jsonl` (one row an object), `scores.json`, `scores.png` and,
with a baseline, `completions.html`. A run that was broken off goes on where it was. For a task the scores are

    n               rows scored
    reward          mean reward of the task
    exact_match     share of completions that are right (`rewards.exact_match`); the same as pass@1
    exact_match_95  95 % interval of it, bootstrap over rows
    format_rate     share of completions in the task's form
    mean_length     tokens of a completion; mean_characters: characters
    no_verdict      share of completions that a verifier gave no verdict on; they are left out of all the others
    truncated       share of completions cut off at max_tokens
    pass@k          chance that k completions hold a right one, unbiased (scores.py)

and for a benchmark `score` with `score_95`, `pass@k`, `no_answer` (nothing that could be read) and `parts`: the score
of each level, category or type. `scoring` says whether a server was asked or the number is rule-scored.
"""

import contextlib
import hashlib
import json
import pathlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import AutoConfig

from common import console, distributed, errors
from common.errors import RunStopped, UserError
from common.records import Sample
from config import DataFlags, EngineFlags, PolicyFlags, RewardFlags
from data import Processor, load_split, make_processor, max_images
from evaluation.benchmark_metrics import difference, pairs, summarise_benchmark, table
from evaluation.benchmarks import (
    BENCHMARKS,
    RULE_SCORED,
    check_columns,
    check_pairs,
    drop_images,
    judge_benchmark,
    load_benchmark,
)
from evaluation.figures import draw_scores, write_differences
from evaluation.held_out import judge_task, sample_rows
from evaluation.metrics import pass_at_k, summarise
from evaluation.progress import EvalProgress
from grading.verifier import make_verifier
from inputs.rows import RowError, raw_rows
from policy.model import Policy, auto_class, compute_dtype, load_policy
from rewards import Scorer, check_math
from rollout import make_engine

__all__ = ["pass_at_k"]


@dataclass(kw_only=True)
class Config(EngineFlags, RewardFlags, DataFlags):
    """Score a model, or saved predictions, on a data set or a named benchmark."""

    model: str | None = None
    """A folder in Hugging Face layout or a hub name."""
    adapter: str | None = None
    """An adapter in PEFT layout, made for `model`, to score it with."""
    baseline: str | None = None
    """What to compare with, row by row: a model of the same shape, an adapter of `model`, or a folder that an earlier
    evaluation wrote."""
    predictions: str | None = None
    """Saved predictions to score without a model: rows with «response», or «responses», beside the columns of the
    benchmark or, for a task, «prompt» and «answer»."""
    benchmark: Literal[tuple(BENCHMARKS)] | None = None
    """A named benchmark, from the hub or from `data` with the same columns; in place of a task."""
    data: str = ""
    """Rows, as in training; a benchmark's are its own on the hub when left out."""
    task: Literal["count", "math", "vqa"] = "count"
    """Prompt template and reward, without a benchmark."""
    output: str = "runs/evaluation"
    """Folder for predictions.jsonl, scores.json, scores.png and completions.html."""
    n: int = 1
    """Completions of each row."""
    temperature: float = 0.0
    """Sampling temperature; 0 takes the likeliest token."""
    top_p: float = 1.0
    """Share of the probability that tokens are drawn from."""
    max_tokens: int = 1024
    """Most sampled tokens."""
    seed: int = 0
    """Seed of the sampling."""
    limit: int = 0
    """Score only the first rows; 0: all."""
    judge_cache: str = "runs/judge.sqlite"
    """Where replies of a benchmark's judge or extractor (`verifier_url`) are kept, so that none is asked for twice."""

    def __post_init__(self) -> None:
        self.check_data()
        self.check_rewards()
        self.check_engine()
        errors.require((self.model is None) == (self.predictions is not None), "give either model or predictions")
        errors.require(bool(self.data or self.benchmark or self.predictions), "data is needed, or a benchmark")
        errors.require(self.model is not None or self.adapter is None, "adapter needs its model")
        errors.require(min(self.n, self.max_tokens) >= 1, "n and max_tokens must be at least 1")
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.limit < 0 or self.seed < 0:
            raise ValueError("temperature, limit and seed must not be negative, top_p must be above 0 and at most 1")
        errors.require(
            self.n == 1 or self.temperature > 0, "n above 1 needs a temperature above 0: all would be the same"
        )

    def sampling(self) -> tuple[int, int, float, float, int]:
        """What `sample_rows` takes of it."""
        return self.max_tokens, self.n, self.temperature, self.top_p, self.seed


def read_predictions(path: str, cfg: Config) -> tuple[list[Sample], list[dict]]:
    """The rows of a file of predictions and what was responded to each. A response that is null or empty is wrong.

    Raises UserError naming the first rows that cannot be used, unless they may be skipped.
    """
    samples, answered, bad = [], [], []
    if not pathlib.Path(path).is_file():
        raise UserError(f"no predictions at {path!r}: give a .jsonl file")
    for source, row, _ in raw_rows(path, None, "train"):
        try:
            if isinstance(row, RowError):
                raise row
            responses = _responses(row := drop_images(row))
            samples.append(_saved_sample(cfg, source, row))
            answered.append(responses)
        except RowError as problem:
            bad.append(f"{source}: {problem}")
    what = f"{len(bad)} of {len(bad) + len(samples)} rows cannot be used: {'; '.join(bad[:5])}"
    if bad and not cfg.skip_bad_rows:
        raise UserError(f"{what}; mend them or pass --skip_bad_rows to go on without")
    if bad and console.is_main():
        print(f"skipped: {what}", file=sys.stderr)
    if not samples:
        raise UserError(f"{path}: no usable row")
    samples = samples[: cfg.limit or None]
    if cfg.benchmark == "mme":
        check_pairs(samples)
    return samples, answered[: cfg.limit or None]


def _responses(row: dict) -> dict:
    """{responses, and lengths and truncated where they are there} of a row, which loses them."""
    if "responses" not in row and "response" not in row:
        raise RowError(f"neither «response» nor «responses» (columns: {', '.join(row)})")
    responses = row.pop("responses", None)
    responses = [row.pop("response", None)] if responses is None else responses
    if not isinstance(responses, list) or not responses:
        raise RowError("«responses» is not a list of texts")
    if not all(isinstance(response, str | int | float | None) for response in responses):
        raise RowError("a response is neither text nor null")
    found: dict[str, Any] = {"responses": ["" if response is None else str(response) for response in responses]}
    for name in ("lengths", "truncated"):
        numbers = row.pop(name, None)
        if isinstance(numbers, list) and len(numbers) == len(responses) and all(isinstance(n, int) for n in numbers):
            found[name] = numbers
    pictures = row.pop("pictures", None)
    return found | ({"pictures": pictures} if isinstance(pictures, str) else {})


def _saved_sample(cfg: Config, source: str, row: dict) -> Sample:
    for name in ("exact", "rewards", "answers", "measures", "gold", "source"):  # of an earlier scoring
        row.pop(name, None)
    if cfg.benchmark:
        check_columns(BENCHMARKS[cfg.benchmark], row)
        row.pop("prompt", None)
        return Sample(BENCHMARKS[cfg.benchmark].prompt(row), BENCHMARKS[cfg.benchmark].gold(row), [], source, row)
    if missing := [name for name in ("prompt", "answer") if not isinstance(row.get(name), str | int | float)]:
        raise RowError(f"no «{missing[0]}» (columns: {', '.join(row)})")
    return Sample(str(row.pop("prompt")), str(row.pop("answer")), [], source, row)


def write(folder: pathlib.Path, scores: dict, predictions: list[dict]) -> None:
    """predictions.jsonl and scores.json in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in predictions)
    for name, text in (("predictions.jsonl", rows), ("scores.json", json.dumps(scores, indent=1) + "\n")):
        (folder / f"{name}.partial").write_text(text, encoding="utf-8", errors="replace")
        (folder / f"{name}.partial").rename(folder / name)


# --- the command ------------------------------------------------------------------------------------------------------


class Judge:
    """Judges and sums up responses as the command line asks: by a benchmark or by a task's rewards."""

    def __init__(self, cfg: Config):
        self.cfg, self.server, self.scorer, self.scoring = cfg, None, None, "rule"
        if cfg.benchmark is None:
            self.scorer = Scorer(cfg.task, cfg)
            return
        if cfg.benchmark in ("math500", "geometry3k", "mathverse"):
            check_math()
        if wanted := BENCHMARKS[cfg.benchmark].server:
            self.server = make_verifier(cfg, cfg.judge_cache)
            self.scoring = f"{wanted} {self.server.model}" if self.server else RULE_SCORED

    def __call__(self, samples: list[Sample], answered: list[dict]) -> tuple[dict, list[dict]]:
        """Scores and predictions."""
        if self.scorer:
            predictions = judge_task(self.scorer, samples, answered)
            return {"task": self.cfg.task} | summarise(predictions, self.cfg.task), predictions
        predictions = judge_benchmark(self.cfg.benchmark, samples, answered, self.server)
        return summarise_benchmark(self.cfg.benchmark, predictions, self.scoring), predictions


def load_rows(cfg: Config, processor: Processor) -> list[Sample]:
    """The rows of the benchmark or the data set, the first `limit` of them."""
    if cfg.benchmark:
        return load_benchmark(cfg.benchmark, cfg, processor, cfg.limit)
    return load_split(cfg, cfg.data, cfg.task, processor, keep_repeats=True)[: cfg.limit or None]


def generate_responses(
    cfg: Config, device: torch.device
) -> tuple[list[Sample], list[dict], list[dict] | None, list[EvalProgress]]:
    """The rows, what the model responded to each, the same of the baseline when that is a model, and the files that
    hold both until everything is written."""
    processor = make_processor(cfg, cfg.model, "math" if cfg.benchmark else cfg.task)
    samples = load_rows(cfg, processor)
    limits = (cfg.max_prompt_length + cfg.max_tokens, max_images(samples))
    other = load_baseline(cfg) if cfg.baseline else None
    adapted = load_policy(cfg.model, PolicyFlags(adapter=cfg.adapter), torch.device("cpu")) if cfg.adapter else None
    engine = make_engine(cfg, cfg.model, processor, device, compute_dtype("auto", device), *limits)
    if adapted is not None:
        engine.sync_weights(adapted)
    settings = resume_key(cfg, samples)
    parts = [EvalProgress(pathlib.Path(cfg.output), settings)]
    with _resumable(cfg):
        answered = sample_rows(engine, processor, samples, *cfg.sampling(), parts[0])
        if other is None:
            return samples, answered, None, parts
        parts.append(
            EvalProgress(pathlib.Path(cfg.output) / "baseline", settings | weights_mtime("baseline", cfg.baseline))
        )
        engine.sync_weights(other)
        return samples, answered, sample_rows(engine, processor, samples, *cfg.sampling(), parts[1]), parts


def resume_key(cfg: Config, samples: list[Sample]) -> dict[str, Any]:
    """Everything that the responses depend on: an evaluation broken off goes on only when all of it is the same."""
    names = (
        "n",
        "temperature",
        "top_p",
        "max_tokens",
        "seed",
        "template",
        "min_pixels",
        "max_pixels",
        "max_side",
        "task",
    )
    asked = json.dumps(
        [
            [s.prompt, s.system, [str(image) for image in s.images if isinstance(image, str | pathlib.Path)]]
            for s in samples
        ]
    )
    found = {name: getattr(cfg, name) for name in names} | {"questions": hashlib.sha1(asked.encode()).hexdigest()}
    return found | weights_mtime("model", cfg.model) | weights_mtime("adapter", cfg.adapter)


def weights_mtime(name: str, model: str | None) -> dict[str, Any]:
    """A model's name and, when it is a folder, when its weights were written."""
    written = [path.stat().st_mtime for path in sorted(pathlib.Path(model or "/none").glob("*.safetensors"))]
    return {name: model, f"weights of the {name}": written}


@contextlib.contextmanager
def _resumable(cfg: Config) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise RunStopped(f"interrupted; the same command goes on with what {cfg.output} holds", 130) from None


def load_baseline(cfg: Config) -> Policy | None:
    """The model or adapter that is compared with; None when it is the folder of an earlier evaluation.

    Raises UserError when it has other shapes than the model, whose place it takes in the sampler.
    """
    folder = pathlib.Path(cfg.baseline)
    if (folder / "predictions.jsonl").is_file():
        return None
    adapter = (folder / "adapter_config.json").is_file()
    name = cfg.model if adapter else cfg.baseline
    try:
        policy = load_policy(name, PolicyFlags(adapter=cfg.baseline if adapter else None), torch.device("cpu"))
    except (UserError, OSError) as error:
        reason = str(error).splitlines()[0][:160]
        raise UserError(
            f"--baseline {cfg.baseline!r} is neither a model nor an evaluation's folder ({reason})"
        ) from None
    with torch.device("meta"):
        settings = AutoConfig.from_pretrained(cfg.model)
        wanted = {key: own.shape for key, own in auto_class(settings).from_config(settings).named_parameters()}
    if adapter:
        return policy
    for key, own in policy.model.named_parameters():
        if wanted.get(key) != own.shape:
            raise UserError(
                f"--baseline {cfg.baseline}: its {key} has another shape than {cfg.model} has: score it by itself and "
                "give --baseline the folder of its scores"
            )
    return policy


def main(cfg: Config) -> None:
    device = distributed.start()
    earlier = cfg.baseline and (pathlib.Path(cfg.baseline) / "predictions.jsonl").is_file()
    if cfg.predictions and cfg.baseline and not earlier:
        raise UserError(
            f"--baseline {cfg.baseline!r} has no predictions.jsonl, and there is no model to sample it with"
        )
    judge, parts, before = Judge(cfg), [], None
    known = read_predictions(f"{cfg.baseline}/predictions.jsonl", cfg) if earlier else None
    if cfg.predictions:
        samples, answered = read_predictions(cfg.predictions, cfg)
    else:
        samples, answered, before, parts = generate_responses(cfg, device)
    about = {"model": cfg.model, "adapter": cfg.adapter, "data": cfg.data, "predictions": cfg.predictions}
    scores, predictions = judge(samples, answered)
    scores = {key: value for key, value in about.items() if value is not None} | scores
    folder, old = pathlib.Path(cfg.output), None
    if earlier:
        old = judge(*known)
    elif before is not None:
        old = judge(samples, before)
    if console.is_main():
        write_results(cfg, folder, samples, scores, predictions, old)
    distributed.barrier()
    for part in parts:
        part.remove()


def write_results(
    cfg: Config, folder: pathlib.Path, samples: list[Sample], scores: dict, new: list[dict], old: tuple | None
) -> None:
    """Everything in `folder`, and the table on the screen."""
    baseline = paired = None
    if old is not None:
        baseline = {"model": cfg.baseline} | old[0]
        both = pairs(cfg.benchmark, old[1], new)
        both = [pair for pair in both if None not in (*pair[0].get("rewards", []), *pair[1].get("rewards", []))]
        if not both:
            raise UserError(f"--baseline {cfg.baseline}: it has no row that this evaluation has")
        paired = difference(cfg.benchmark, both)
        write(folder / "baseline", baseline, old[1])
    write(folder, scores | ({"baseline": baseline, "paired": paired} if paired else {}), new)
    draw_scores(folder, scores, baseline)
    print(f"{cfg.predictions or cfg.adapter or cfg.model}: {scores['n']} rows")
    print(table(scores, baseline, paired))
    if old is not None:
        known = {sample.source: sample for sample in samples}
        lost, won = write_differences(folder, cfg.benchmark, scores, old[1], new, known)
        print(f"right before and wrong after: {lost}; the other way round: {won}; {folder}/completions.html")
    print(f"{folder}/scores.json, {folder}/scores.png")


if __name__ == "__main__":
    distributed.run(main, Config)
