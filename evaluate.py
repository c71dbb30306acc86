"""Score a model, or saved predictions, on a data set or a named benchmark.

    python evaluate.py --model runs/demo/final --data runs/tiny/count-0/test --task count --output runs/demo/after
    python evaluate.py --model DIR --benchmark math500 --n 8 --temperature 0.6          # Pass@1[8]
    python evaluate.py --model DIR --baseline OTHER --benchmark mmstar --data FOLDER    # two models side by side
    python evaluate.py --predictions FILE.jsonl --benchmark mme                         # no model, no GPU

The script samples n completions of every row and writes `predictions.jsonl` (one JSON object per row), `scores.json`,
`scores.png` and, with a baseline, `completions.html`. Running the same command again resumes an interrupted evaluation.
The scores of a task are

    n               number of rows
    reward          mean reward of the task
    exact_match     fraction of correct completions (`exact_match` of the task in `rewards.TASKS`); equals pass@1
    exact_match_95  95% bootstrap interval of exact_match over rows
    format_rate     fraction of completions in the task's format
    mean_length     mean completion length in tokens
    mean_characters mean completion length in characters
    no_verdict      fraction of completions without a verdict from the verifier; all other scores exclude them
    truncated       fraction of completions cut off at max_tokens
    pass@k          probability that at least one of k completions is correct, unbiased (`pass_at_k`)

The scores of a benchmark are `score`, its interval `score_95`, `pass@k`, `no_answer` (fraction of responses without a
readable answer) and `parts` (the score of each level, category or type). `scoring` names the server model that was
used, or says that the answers were scored by rule.
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
import transformers

from common import cli, console, distributed, errors
from common.errors import RunStopped, UserError
from common.records import Sample
from config import DataFlags, EngineFlags, PolicyFlags, RewardFlags
from data import Processor, load_processor, load_split, max_images
from evaluation.benchmark_metrics import difference, pairs, summarise_benchmark, table
from evaluation.benchmarks import (
    BENCHMARKS,
    RULE_SCORED,
    check_columns,
    check_pairs,
    judge_benchmark,
    load_benchmark,
)
from evaluation.figures import draw_scores, write_differences
from evaluation.held_out import judge_task, sample_rows
from evaluation.metrics import pass_at_k, summarise
from evaluation.progress import EvalProgress
from grading.verifier import Verifier, make_verifier
from inputs.rows import RowError, drop_images, raw_rows
from policy.model import Policy, auto_class, compute_dtype, load_policy
from rewards import Scorer, check_math
from rollout import RequestLimits, make_engine

__all__ = ["pass_at_k"]


@dataclass(kw_only=True)
class Config(EngineFlags, RewardFlags, DataFlags):
    """Score a model, or saved predictions, on a data set or a named benchmark."""

    model: str | None = None
    """Model to score: a folder in Hugging Face layout or a hub name."""
    adapter: str | None = None
    """Adapter in PEFT layout that is added to `model`."""
    baseline: str | None = None
    """What to compare with, row by row: a model of the same architecture and size, an adapter of `model`, or the output
    folder of an earlier evaluation."""
    predictions: str | None = None
    """Saved predictions to score without a model: rows with `response` or `responses`, plus the columns of the
    benchmark or, for a task, `prompt` and `answer`."""
    benchmark: Literal[tuple(BENCHMARKS)] | None = None
    """Named benchmark to score on instead of a task; its rows come from the hub unless `data` is given."""
    data: str = ""
    """Rows to score on, in any format that training reads. For a benchmark: a file or folder with the columns of the
    benchmark."""
    task: str = "count"
    """Task whose prompt template and reward are used; ignored with a benchmark."""
    output: str = "runs/evaluation"
    """Output folder for predictions.jsonl, scores.json, scores.png and completions.html."""
    n: int = 1
    """Completions per row."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy decoding."""
    top_p: float = 1.0
    """Nucleus sampling: tokens are drawn from the smallest set whose probabilities sum to this."""
    max_tokens: int = 1024
    """Maximum completion length in tokens."""
    seed: int = 0
    """Sampling seed."""
    limit: int = 0
    """Score only the first `limit` rows; 0 scores all rows."""
    judge_cache: str = "runs/judge.sqlite"
    """SQLite file that caches the replies of a benchmark's judge or extractor (`verifier_url`)."""

    def __post_init__(self) -> None:
        self.check_data()
        self.check_rewards()
        self.check_engine()
        errors.require((self.model is None) == (self.predictions is not None), "give either model or predictions")
        errors.require(bool(self.data or self.benchmark or self.predictions), "give data, a benchmark or predictions")
        errors.require(self.model is not None or self.adapter is None, "adapter needs a model: give both")
        errors.require(min(self.n, self.max_tokens) >= 1, "n and max_tokens must be at least 1")
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.limit < 0 or self.seed < 0:
            raise ValueError("temperature, limit and seed must not be negative, top_p must be above 0 and at most 1")
        errors.require(
            self.n == 1 or self.temperature > 0,
            "n above 1 needs a temperature above 0: greedy completions are identical",
        )

    def sampling(self) -> tuple[int, int, float, float, int]:
        """Return the sampling arguments in the order in which `sample_rows` takes them."""
        return self.max_tokens, self.n, self.temperature, self.top_p, self.seed


def read_predictions(path: str, cfg: Config) -> tuple[list[Sample], list[dict]]:
    """Return the rows of a file of predictions, and the output saved with each row.

    A response that is null or empty counts as wrong. Raises a UserError that names the first bad rows, unless
    `cfg.skip_bad_rows` is set.
    """
    samples, outputs, problems = [], [], []
    if not pathlib.Path(path).is_file():
        raise UserError(f"no predictions at {path!r}: give a .jsonl file")
    for source, row, _ in raw_rows(path, None, "train"):
        try:
            if isinstance(row, RowError):
                raise row
            row = drop_images(row)
            output = _pop_output(row)
            samples.append(_saved_sample(cfg, source, row))
            outputs.append(output)
        except RowError as error:
            problems.append(f"{source}: {error}")
    summary = f"{len(problems)} of {len(problems) + len(samples)} rows cannot be used: {'; '.join(problems[:5])}"
    if problems and not cfg.skip_bad_rows:
        raise UserError(f"{summary}; fix them or pass --skip_bad_rows to leave them out")
    if problems and console.is_main():
        print(f"skipped: {summary}", file=sys.stderr)
    if not samples:
        raise UserError(f"{path}: no usable row")
    samples = samples[: cfg.limit or None]
    if cfg.benchmark == "mme":
        check_pairs(samples)
    return samples, outputs[: cfg.limit or None]


def _pop_output(row: dict) -> dict:
    """Remove the saved output from `row` and return it: `responses`, plus `lengths`, `truncated` and `pictures` if
    the row has them. Raises RowError if there are no valid responses."""
    if "responses" not in row and "response" not in row:
        raise RowError(f"neither 'response' nor 'responses' (columns: {', '.join(row)})")
    responses = row.pop("responses", None)
    responses = [row.pop("response", None)] if responses is None else responses
    if not isinstance(responses, list) or not responses:
        raise RowError("'responses' is not a list of texts")
    if not all(isinstance(response, str | int | float | None) for response in responses):
        raise RowError("a response is neither text nor null")
    output: dict[str, Any] = {"responses": ["" if response is None else str(response) for response in responses]}
    for name in ("lengths", "truncated"):
        numbers = row.pop(name, None)
        if isinstance(numbers, list) and len(numbers) == len(responses) and all(isinstance(n, int) for n in numbers):
            output[name] = numbers
    image_digest = row.pop("pictures", None)
    return output | ({"pictures": image_digest} if isinstance(image_digest, str) else {})


def _saved_sample(cfg: Config, source: str, row: dict) -> Sample:
    for name in ("exact", "rewards", "answers", "measures", "gold", "source"):  # added by an earlier evaluation
        row.pop(name, None)
    if cfg.benchmark:
        check_columns(BENCHMARKS[cfg.benchmark], row)
        row.pop("prompt", None)
        return Sample(BENCHMARKS[cfg.benchmark].prompt(row), BENCHMARKS[cfg.benchmark].gold(row), [], source, row)
    if missing := [name for name in ("prompt", "answer") if not isinstance(row.get(name), str | int | float)]:
        raise RowError(f"no '{missing[0]}' (columns: {', '.join(row)})")
    return Sample(str(row.pop("prompt")), str(row.pop("answer")), [], source, row)


def write_predictions(folder: pathlib.Path, scores: dict, predictions: list[dict]) -> None:
    """Write predictions.jsonl and scores.json to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in predictions)
    for name, text in (("predictions.jsonl", rows), ("scores.json", json.dumps(scores, indent=1) + "\n")):
        (folder / f"{name}.partial").write_text(text, encoding="utf-8", errors="replace")
        (folder / f"{name}.partial").rename(folder / name)


# --- the command ------------------------------------------------------------------------------------------------------


class Judge:
    """Judges and summarises responses with a benchmark or with a task's rewards, depending on the flags."""

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.server: Verifier | None = None
        self.scorer: Scorer | None = None
        self.scoring = "rule"
        if cfg.benchmark is None:
            self.scorer = Scorer(cfg.task, cfg)
            return
        if cfg.benchmark in ("math500", "geometry3k", "mathverse"):
            check_math()
        if role := BENCHMARKS[cfg.benchmark].server_role:
            self.server = make_verifier(cfg, cfg.judge_cache)
            self.scoring = f"{role} {self.server.model}" if self.server else RULE_SCORED

    def __call__(self, samples: list[Sample], outputs: list[dict]) -> tuple[dict, list[dict]]:
        """Return the scores and the judged predictions."""
        if self.scorer:
            predictions = judge_task(self.scorer, samples, outputs)
            return {"task": self.cfg.task} | summarise(predictions, self.cfg.task), predictions
        predictions = judge_benchmark(self.cfg.benchmark, samples, outputs, self.server)
        return summarise_benchmark(self.cfg.benchmark, predictions, self.scoring), predictions


def load_rows(cfg: Config, processor: Processor) -> list[Sample]:
    """Load the rows of the benchmark or the data set: at most `cfg.limit` rows, or all rows if the limit is 0."""
    if cfg.benchmark:
        return load_benchmark(cfg.benchmark, cfg, processor, cfg.limit)
    return load_split(cfg, cfg.data, cfg.task, processor, keep_repeats=True)[: cfg.limit or None]


def generate_responses(
    cfg: Config, device: torch.device
) -> tuple[list[Sample], list[dict], list[dict] | None, list[EvalProgress]]:
    """Load the rows and sample responses to them.

    Returns the rows, the model's outputs, the baseline's outputs (None unless the baseline is a model) and the progress
    files. The caller must keep the progress files until all results are written.
    """
    task = "math" if cfg.benchmark else cfg.task
    processor = load_processor(cfg.model, task, cfg.template, cfg.min_pixels, cfg.max_pixels, cfg.max_side)
    samples = load_rows(cfg, processor)
    limits = RequestLimits(cfg.max_prompt_length + cfg.max_tokens, max_images(samples))
    baseline = load_baseline(cfg) if cfg.baseline else None
    adapted = load_policy(cfg.model, PolicyFlags(adapter=cfg.adapter), torch.device("cpu")) if cfg.adapter else None
    engine = make_engine(cfg, cfg.model, processor, device, compute_dtype("auto", device), limits)
    if adapted is not None:
        engine.sync_weights(adapted)
    output = pathlib.Path(cfg.output)
    settings = resume_key(cfg, samples)
    progress = EvalProgress(output, settings)
    with _resumable(cfg):
        outputs = sample_rows(engine, processor, samples, *cfg.sampling(), progress)
        if baseline is None:
            return samples, outputs, None, [progress]
        settings |= weights_mtime("baseline", cfg.baseline)
        baseline_progress = EvalProgress(output / "baseline", settings)
        engine.sync_weights(baseline)
        baseline_outputs = sample_rows(engine, processor, samples, *cfg.sampling(), baseline_progress)
        return samples, outputs, baseline_outputs, [progress, baseline_progress]


def resume_key(cfg: Config, samples: list[Sample]) -> dict[str, Any]:
    """Return everything that the responses depend on. An evaluation resumes only if nothing in it has changed."""
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
    questions = json.dumps(
        [
            [s.prompt, s.system, [str(image) for image in s.images if isinstance(image, str | pathlib.Path)]]
            for s in samples
        ]
    )
    key = {name: getattr(cfg, name) for name in names} | {"questions": hashlib.sha1(questions.encode()).hexdigest()}
    return key | weights_mtime("model", cfg.model) | weights_mtime("adapter", cfg.adapter)


def weights_mtime(name: str, model: str | None) -> dict[str, Any]:
    """Return the path or hub name of a model and, for a folder, the times at which its weight files were written."""
    mtimes = [path.stat().st_mtime for path in sorted(pathlib.Path(model or "/none").glob("*.safetensors"))]
    return {name: model, f"weights of the {name}": mtimes}


@contextlib.contextmanager
def _resumable(cfg: Config) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise RunStopped(f"interrupted; run the same command to resume from {cfg.output}", 130) from None


def load_baseline(cfg: Config) -> Policy | None:
    """Load the model or adapter to compare with. Returns None for the folder of an earlier evaluation.

    Raises UserError when the baseline's parameters differ in shape from the model's, because one sampler serves both.
    """
    folder = pathlib.Path(cfg.baseline)
    if (folder / "predictions.jsonl").is_file():
        return None
    is_adapter = (folder / "adapter_config.json").is_file()
    name = cfg.model if is_adapter else cfg.baseline
    try:
        policy = load_policy(name, PolicyFlags(adapter=cfg.baseline if is_adapter else None), torch.device("cpu"))
    except (UserError, OSError) as error:
        reason = str(error).splitlines()[0][:160]
        raise UserError(
            f"--baseline {cfg.baseline!r} is neither a model nor the folder of an evaluation ({reason})"
        ) from None
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(cfg.model)
        shapes = {name: param.shape for name, param in auto_class(config).from_config(config).named_parameters()}
    if is_adapter:
        return policy
    for name, param in policy.model.named_parameters():
        if shapes.get(name) != param.shape:
            raise UserError(
                f"--baseline {cfg.baseline}: its {name} has a different shape in {cfg.model}; score the baseline in "
                "a separate run and give --baseline the output folder of that run"
            )
    return policy


def main(cfg: Config) -> None:
    device = distributed.start()
    baseline_is_saved = cfg.baseline and (pathlib.Path(cfg.baseline) / "predictions.jsonl").is_file()
    if cfg.predictions and cfg.baseline and not baseline_is_saved:
        raise UserError(
            f"--baseline {cfg.baseline!r} has no predictions.jsonl, and --predictions gives no model to sample it with"
        )
    judge = Judge(cfg)
    saved_baseline = read_predictions(f"{cfg.baseline}/predictions.jsonl", cfg) if baseline_is_saved else None
    baseline_outputs, progress_files = None, []
    if cfg.predictions:
        samples, outputs = read_predictions(cfg.predictions, cfg)
    else:
        samples, outputs, baseline_outputs, progress_files = generate_responses(cfg, device)
    sources = {"model": cfg.model, "adapter": cfg.adapter, "data": cfg.data, "predictions": cfg.predictions}
    scores, predictions = judge(samples, outputs)
    scores = {name: value for name, value in sources.items() if value is not None} | scores
    baseline = None
    if saved_baseline is not None:
        baseline = judge(*saved_baseline)
    elif baseline_outputs is not None:
        baseline = judge(samples, baseline_outputs)
    if console.is_main():
        write_results(cfg, samples, scores, predictions, baseline)
    distributed.barrier()
    for progress in progress_files:
        progress.remove()


def write_results(
    cfg: Config,
    samples: list[Sample],
    scores: dict,
    predictions: list[dict],
    baseline: tuple[dict, list[dict]] | None,
) -> None:
    """Write every file of the evaluation and print a table of the scores.

    `baseline` holds the baseline's scores and predictions.

    Raises UserError when the evaluation and its baseline have no row in common.
    """
    folder = pathlib.Path(cfg.output)
    baseline_scores = paired = None
    if baseline is not None:
        baseline_scores = {"model": cfg.baseline} | baseline[0]
        matched = pairs(cfg.benchmark, baseline[1], predictions)
        matched = [pair for pair in matched if None not in (*pair[0].get("rewards", []), *pair[1].get("rewards", []))]
        if not matched:
            raise UserError(f"--baseline {cfg.baseline}: it has no row in common with this evaluation")
        paired = difference(cfg.benchmark, matched)
        write_predictions(folder / "baseline", baseline_scores, baseline[1])
    comparison = {"baseline": baseline_scores, "paired": paired} if paired else {}
    write_predictions(folder, scores | comparison, predictions)
    draw_scores(folder, scores, baseline_scores)
    print(f"{cfg.predictions or cfg.adapter or cfg.model}: {scores['n']} rows")
    print(table(scores, baseline_scores, paired))
    if baseline is not None:
        by_source = {sample.source: sample for sample in samples}
        lost, won = write_differences(folder, cfg.benchmark, scores, baseline[1], predictions, by_source)
        print(f"right before, wrong after: {lost}; wrong before, right after: {won}; see {folder}/completions.html")
    print(f"{folder}/scores.json, {folder}/scores.png")


if __name__ == "__main__":
    distributed.run(main, cli.parse(Config))
