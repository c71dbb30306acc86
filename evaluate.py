"""Score a model, or saved predictions, on a data set or a named benchmark.

    python evaluate.py --model runs/demo/final --data runs/tiny/count-0/test --task count --output runs/demo/after
    python evaluate.py --model DIR --benchmark math500 --n 8 --temperature 0.6          # Pass@1[8]
    python evaluate.py --model DIR --baseline OTHER --benchmark mmstar --data FOLDER    # two models side by side
    python evaluate.py --model DIR --data FILE --baseline EVALUATION --picture blank    # without the pictures
    python evaluate.py --predictions FILE.jsonl --benchmark mme                         # no model, no GPU

The script samples n completions of every row and writes `predictions.jsonl` (one JSON object per row), `scores.json`,
`scores.png` and, with a baseline, `completions.html`. Running the same command again resumes an interrupted evaluation.
docs/evaluation.md explains every score.
"""

import hashlib
import os
import pathlib
from dataclasses import dataclass, fields, replace
from types import ModuleType
from typing import Any, Literal

import torch

from common import cli, console, distributed, plugins
from common.errors import RunStopped, UserError, require
from common.files import lock_file, model_files, read_jsonl, release_locks
from common.parts import extra
from common.records import RequestLimits, Sample
from config import DataFlags, EngineFlags, PolicyFlags, RewardFlags, check_values
from data import Processor, max_images, processor_for
from evaluation.held_out import SamplingFlags, open_progress, sample_rows
from evaluation.metrics import pass_at_k
from evaluation.predictions import Judge, format_table, write_predictions
from inputs.images import file_version
from policy.model import Policy, compute_dtype, load_policy
from rollout import ENGINES, Engine, check_engine_available, choose_engine, make_engine
from sampling.hf_engine import PolicyEngine

__all__ = ["pass_at_k"]
MAX_VLLM_MEMORY = 0.85  # default fraction of the GPU's memory for vLLM, if other programs leave it that much


@dataclass(kw_only=True)
class Config(EngineFlags, RewardFlags, DataFlags, SamplingFlags):
    """Score a model, or saved predictions, on a data set or a named benchmark."""

    model: str | None = None
    """Model to score: a folder in Hugging Face layout or a hub name."""
    adapter: str | None = None
    """Adapter in PEFT layout that is added to `model`."""
    load_in_4bit: bool = False
    """Sample from the frozen model in 4 bits with `adapter` on top, as in training with this flag and `engine` policy.
    This is slower than sampling in bfloat16, and meant for a GPU that has no memory for the model in bfloat16."""
    baseline: str | None = None
    """What to compare with, row by row: a model of the same architecture and size, an adapter of `model`, or the output
    folder of an earlier evaluation."""
    predictions: str | None = None
    """Saved predictions to score without a model: rows with `response` or `responses`, plus the columns of the
    benchmark or, for a task, `prompt` and `answer`."""
    benchmark: str | None = None
    """Named benchmark to score on instead of a task: aime24, math500, gpqa_diamond, geometry3k, vqa_rad, mme, mmstar,
    mathvista, mathverse or screenspot. Without `data`, its rows come from the hub."""
    data: str = ""
    """Rows to score on, in any format that training reads. For a benchmark: a file or folder with the columns of the
    benchmark."""
    task: str = "vqa"
    """Task whose prompt template and reward are used; ignored with a benchmark."""
    output: str = "runs/evaluation"
    """Output folder for predictions.jsonl, scores.json, scores.png and completions.html."""
    picture: Literal["blank", "other"] | None = None
    """Replace the rows' own pictures by grey ones of the same sizes (blank) or by pictures of other rows (other). If
    `baseline` is an evaluation with the rows' own pictures, the difference shows how much of the score needs them."""
    limit: int = 0
    """Score only the first `limit` rows; 0 scores all rows."""
    judge_cache: str = "runs/judge.sqlite"
    """SQLite file that caches the replies of a benchmark's judge or extractor (`verifier_url`)."""

    def __post_init__(self) -> None:
        check_values(self)
        self.check_data()
        self.check_verifier()
        self.check_engine()
        self.check_env()
        require((self.model is None) == (self.predictions is not None), "give either model or predictions")
        require(bool(self.data or self.benchmark or self.predictions), "give data, a benchmark or predictions")
        require(self.model is not None or self.adapter is None, "adapter needs a model: give both")
        require(self.adapter is not None or not self.load_in_4bit, "load_in_4bit needs an adapter: give both")
        require(not (self.benchmark and self.reward), "a benchmark has its own score and no reward: leave one out")
        require(not (self.picture and self.predictions), "picture needs a model, which answers again: leave one out")
        unsaved = self.baseline is not None and not self.baseline_is_saved
        require(not (self.load_in_4bit and unsaved), "load_in_4bit: baseline must be the output of an evaluation")
        require(not (self.predictions and unsaved), "baseline has no predictions.jsonl, and no model to sample it")
        read = {self.predictions, f"{self.baseline}/predictions.jsonl" if self.baseline_is_saved else None} - {None}
        written = {os.path.realpath(f"{self.output}/{place}predictions.jsonl") for place in ("", "baseline/")}
        overwrites = any(os.path.realpath(path) in written for path in read)
        require(not overwrites, "output would overwrite the predictions that it reads: choose another output")
        in_training = self.engine in ENGINES and ENGINES[self.engine].uses_trainer
        require(not in_training, f"engine {self.engine} is for training: use hf, or load_in_4bit with an adapter")
        require(min(self.n, self.max_completion_length) >= 1, "n and max_completion_length must be at least 1")
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.limit < 0 or self.seed < 0:
            raise ValueError("temperature, limit and seed must not be negative, top_p must be above 0 and at most 1")
        require(self.n == 1 or self.temperature > 0, "n above 1 needs a temperature above 0, or all are identical")

    @property
    def baseline_is_saved(self) -> bool:
        """Whether the baseline is the folder of an earlier evaluation."""
        return self.baseline is not None and (pathlib.Path(self.baseline) / "predictions.jsonl").is_file()


# --- responses --------------------------------------------------------------------------------------------------------


def generate_responses(
    cfg: Config, device: torch.device, judge: Judge, baseline: Any
) -> tuple[list[Sample], list[dict]]:
    """Load the rows and sample responses to them, also those of the baseline if it is a model.

    Returns the rows and the model's outputs. `baseline` is a `parts.benchmarks.Baseline` or None.
    """
    check_engine_available(cfg, device)
    processor = processor_for(cfg, judge.prompt_task)
    samples = judge.load(processor)
    asked, digests = judge.swap_pictures(samples, processor) if judge.swap_pictures else (samples, [])
    flags = PolicyFlags(adapter=cfg.adapter, load_in_4bit=cfg.load_in_4bit)
    place = device if cfg.load_in_4bit else torch.device("cpu")
    adapted = load_policy(cfg.model, flags, place) if cfg.adapter else None
    engine = start_sampler(cfg, processor, max_images(samples, processor), adapted, device)
    distributed.use_one_thread(device)
    settings, folder = resume_key(cfg, samples), pathlib.Path(cfg.output)
    try:
        outputs = sample_rows(engine, processor, asked, cfg, open_progress(folder, settings))
        for output, digest in zip(outputs, digests):
            output["image_digest"] = digest  # that of the row's own pictures, by which a baseline finds the row
        if baseline:
            baseline.sample(engine, processor, samples, settings)
    except KeyboardInterrupt:
        raise RunStopped(f"interrupted; run the same command to resume from {cfg.output}", 130) from None
    return samples, outputs


def start_sampler(
    cfg: Config, processor: Processor, images: int, adapted: Policy | None, device: torch.device
) -> Engine:
    """Start the sampler with the weights of the model, or of `adapted`. `images`: maximum number per prompt."""
    if cfg.load_in_4bit:
        return PolicyEngine(adapted, processor.tokenizer)
    limits = RequestLimits(cfg.max_prompt_length + cfg.max_completion_length, images)
    flags = replace(cfg, engine=choose_engine(cfg, device), vllm_memory=cfg.vllm_memory or free_share(cfg, device))
    engine = make_engine(flags, cfg.model, processor, device, compute_dtype("auto", device), limits, adapted)
    if adapted is not None:
        engine.sync_weights(adapted)
    return engine


def free_share(cfg: Config, device: torch.device) -> float:
    """Return `MAX_VLLM_MEMORY`, or less if other programs use the GPU: vLLM does not start if its share is not free."""
    if device.type != "cuda" or cfg.gpu_memory:
        return MAX_VLLM_MEMORY
    free, size = torch.cuda.mem_get_info(device)
    return min(MAX_VLLM_MEMORY, free / size - 0.02)  # 0.02: CUDA takes a little more before vLLM measures


def resume_key(cfg: Config, samples: list[Sample]) -> dict[str, Any]:
    """Return everything that the responses depend on. An evaluation resumes only if none of this has changed."""
    names = [field.name for group in (SamplingFlags, DataFlags) for field in fields(group)]
    names += ["task", "model", "adapter", "load_in_4bit", "engine", "env", "max_turns", "picture"]
    names += plugins.record()["plugin_flags"]
    key = {name: getattr(cfg, name) for name in names} | plugins.record()
    key["baseline"] = None if cfg.baseline_is_saved else cfg.baseline
    if cfg.template:
        key["template"] = pathlib.Path(cfg.template).read_text(encoding="utf-8-sig")
    digest = hashlib.sha1()
    for sample in samples:
        images = [(str(image), file_version(image)) for image in sample.images]  # the repr of a Cell holds an address
        digest.update(repr((sample.source, *sample.texts, sample.system, images)).encode())
    key["rows"] = digest.hexdigest()
    for name in ("model", "adapter", "baseline"):  # a folder may hold other weights or another chat template by now
        files = model_files(key[name]) if key[name] else []
        key[f"files of the {name}"] = [path.stat().st_mtime for path in files]
    return key


# --- the command ------------------------------------------------------------------------------------------------------


def main(cfg: Config) -> None:
    device = distributed.start()
    try:  # before sampling, so that no responses are lost
        pathlib.Path(cfg.output).mkdir(parents=True, exist_ok=True)
        if console.is_main():
            lock_file(pathlib.Path(cfg.output, "evaluation.lock"), f"--output {cfg.output} is in use")
    except OSError as error:
        raise UserError(f"cannot write to {cfg.output!r} ({error.strerror}): choose another --output") from None
    is_needed = bool(cfg.benchmark or cfg.baseline or cfg.predictions or cfg.picture)
    benchmarks = extra("benchmarks", is_needed)
    judge, baseline, saved = benchmarks.prepare(cfg) if benchmarks and is_needed else (Judge(cfg), None, None)
    if benchmarks:
        judge.interval = benchmarks.mean_interval
    samples, outputs = saved or generate_responses(cfg, device, judge, baseline)
    results = judge(samples, outputs)
    compared = judge(baseline.samples, baseline.outputs) if baseline else None
    if console.is_main():
        write_results(cfg, samples, results, baseline, compared, benchmarks)
    release_locks()
    distributed.barrier()


def write_results(
    cfg: Config,
    samples: list[Sample],
    results: tuple[dict, list],
    baseline: Any,
    compared: tuple[dict, list] | None,
    benchmarks: ModuleType | None,
) -> None:
    """Write every file of the evaluation and print a table of the scores.

    `results` are the scores and predictions of the model, `compared` those of the baseline. `benchmarks` is
    parts/benchmarks, or None if it is not here. Raises UserError if model and baseline have no row in common.
    """
    folder, (scores, predictions) = pathlib.Path(cfg.output), results
    sources = {"model": cfg.model, "adapter": cfg.adapter, "data": cfg.data, "predictions": cfg.predictions}
    sources["picture"] = cfg.picture
    scores = {name: value for name, value in sources.items() if value is not None} | scores
    comparison = baseline.compare(*compared, predictions) if baseline else {}
    run = read_jsonl(folder.parent / "metrics.jsonl")  # if the folder is inside a run's folder
    step = {name: run[-1].get(name) for name in ("step", "step_time")} if run and "step" in run[-1] else {}
    write_predictions(folder, scores | comparison | step, predictions, sampled=not cfg.predictions)
    if (folder / "baseline").is_dir():  # then the page may be that of an earlier comparison
        (folder / "completions.html").unlink(missing_ok=True)
    (folder / "scores.png").unlink(missing_ok=True)
    if benchmarks:
        benchmarks.draw_scores(folder, scores, comparison.get("baseline"))
    else:
        console.log("note: parts/benchmarks is not here, so there is no interval and no scores.png")
    print(
        f"{cfg.predictions or cfg.adapter or cfg.model}: {scores['n']} rows"
        + (f", picture: {cfg.picture}" if cfg.picture else "")
    )
    print(format_table(scores, comparison.get("baseline")))
    if baseline:
        baseline.report(scores, comparison["paired"], samples)
    print(f"{folder}/scores.json" + (f", {folder}/scores.png" if benchmarks else ""))
    if run and (pages := extra("pages")):  # the run's page then shows these scores
        problems = pages.write_pages(folder.parent, pages.write_index)
        print(f"warning: {problems[0]}" if problems else f"{folder.parent}/index.html")


if __name__ == "__main__":
    cli.launch("evaluate")
