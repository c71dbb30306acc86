"""Score a model, or saved predictions, on a data set or a named benchmark.

    python evaluate.py --model runs/demo/final --data runs/tiny/count-0/test --task count --output runs/demo/after
    python evaluate.py --model DIR --benchmark math500 --n 8 --temperature 0.6          # Pass@1[8]
    python evaluate.py --model DIR --baseline OTHER --benchmark mmstar --data FOLDER    # two models side by side
    python evaluate.py --predictions FILE.jsonl --benchmark mme                         # no model, no GPU

The script samples n completions of every row and writes `predictions.jsonl` (one JSON object per row), `scores.json`,
`scores.png` and, with a baseline, `completions.html`. Running the same command again resumes an interrupted evaluation.
docs/evaluation.md explains every score.
"""

import hashlib
import json
import os
import pathlib
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from common import cli, console, distributed, plugins
from common.errors import RunStopped, UserError, require
from common.files import atomic_write, json_lines, lock_file, read_jsonl, release_locks
from common.parts import extra
from common.records import TAG, RequestLimits, Sample, Turn
from config import DataFlags, EngineFlags, PolicyFlags, RewardFlags, check_values
from data import Processor, load_split, processor_for
from evaluation.held_out import PROGRESS, SamplingFlags, judge_task, open_progress, sample_rows
from evaluation.metrics import format_table, pass_at_k, summarise
from evaluation.scorer import Scorer
from grading.verifier import Verifier
from inputs.images import file_version
from inputs.rows import RowError, answer_text, drop_images, raw_rows
from policy.model import Policy, compute_dtype, empty_model, load_policy
from rewards import MAX_REWARD, gold_problem
from rollout import ENGINES, Engine, check_engine_available, choose_engine, make_engine
from sampling.episodes import max_images_seen
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
    """Sample from the frozen model in 4 bits with `adapter` on top, as a run with this flag and `engine` policy does.
    For a GPU that has no memory for the model in bfloat16; slower."""
    baseline: str | None = None
    """What to compare with, row by row: a model of the same architecture and size, an adapter of `model`, or the output
    folder of an earlier evaluation."""
    predictions: str | None = None
    """Saved predictions to score without a model: rows with `response` or `responses`, plus the columns of the
    benchmark or, for a task, `prompt` and `answer`."""
    benchmark: str | None = None
    """Named benchmark to score on instead of a task: aime24, math500, gpqa_diamond, geometry3k, vqa_rad, mme, mmstar,
    mathvista or mathverse; its rows come from the hub unless `data` is given."""
    data: str = ""
    """Rows to score on, in any format that training reads. For a benchmark: a file or folder with the columns of the
    benchmark."""
    task: str = "vqa"
    """Task whose prompt template and reward are used; ignored with a benchmark."""
    output: str = "runs/evaluation"
    """Output folder for predictions.jsonl, scores.json, scores.png and completions.html."""
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


# --- saved predictions ------------------------------------------------------------------------------------------------


def read_predictions(path: str, cfg: Config, gold_task: str | None = None) -> tuple[list[Sample], list[dict]]:
    """Return the rows of a file of predictions, and the output saved with each row.

    The gold answers must suit `gold_task`. A response that is null or empty counts as wrong. Raises a UserError that
    names the first bad rows, unless `cfg.skip_bad_rows` is set.
    """
    rows, problems = [], []
    if not pathlib.Path(path).is_file():
        raise UserError(f"no predictions at {path!r}: give a .jsonl file")
    for source, row, _ in raw_rows(path, None, "train"):
        try:
            if isinstance(row, RowError):
                raise row
            row = drop_images(row)
            output = _pop_output(row)
            if cfg.env and not cfg.benchmark and "env_rewards" not in output:
                raise RowError(f"no 'env_rewards', which --env {cfg.env} gives when responses are sampled")
            rows.append((_saved_sample(cfg, gold_task, source, row, bool(output.get("image_digest"))), output))
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
    if cfg.benchmark == "mme":
        from parts.benchmarks import check_pairs

        check_pairs(samples)
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
        if is_valid and all(isinstance(number, int) and 0 <= number < 2**31 for number in numbers):
            output[name] = numbers
    env_rewards = row.pop("env_rewards", None)
    is_valid = isinstance(env_rewards, list) and len(env_rewards) == len(responses)
    if is_valid and all(isinstance(reward, int | float) and abs(reward) < MAX_REWARD for reward in env_rewards):
        output["env_rewards"] = env_rewards
    if isinstance(image_digest := row.pop("image_digest", None), str):
        output["image_digest"] = image_digest
    return output


def _saved_sample(cfg: Config, gold_task: str | None, source: str, row: dict, has_images: bool) -> Sample:
    for name in ("answers", "measures", "gold", "source") if cfg.benchmark else ("exact", "rewards", "source"):
        row.pop(name, None)  # added by an earlier evaluation
    if cfg.benchmark:
        from parts.benchmarks import to_sample

        row.pop("prompt", None)
        return to_sample(cfg.benchmark, source, row)
    if missing := [name for name in ("prompt", "answer") if not isinstance(row.get(name), str | int | float)]:
        raise RowError(f"no '{missing[0]}' (columns: {', '.join(row)})")
    prompt, answer = str(row.pop("prompt")), answer_text(row.pop("answer"))
    if problem := gold_problem(gold_task, answer):
        raise RowError(problem)
    earlier = [Turn("user", [TAG])] if has_images and TAG not in prompt else []  # earlier turns are not saved
    return Sample([*earlier, Turn("user", [prompt])], answer, source, row)


# --- responses --------------------------------------------------------------------------------------------------------


def generate_responses(
    cfg: Config, device: torch.device, gold_task: str | None
) -> tuple[list[Sample], list[dict], list[dict] | None]:
    """Load the rows, whose gold answers must suit `gold_task`, and sample responses to them.

    Returns the rows, the model's outputs and, if the baseline is a model, the baseline's outputs, else None.
    """
    check_engine_available(cfg, device)
    processor = processor_for(cfg, "math" if cfg.benchmark else cfg.task)
    if cfg.benchmark:
        from parts.benchmarks import load_benchmark

        samples = load_benchmark(cfg.benchmark, cfg, processor, cfg.limit)
    else:
        samples = load_split(cfg, cfg.data, gold_task, processor, keep_duplicates=True)[: cfg.limit or None]
    baseline_policy = load_baseline(cfg) if cfg.baseline and not cfg.baseline_is_saved else None
    adapted = load_adapted(cfg, device) if cfg.adapter else None
    engine = start_sampler(cfg, processor, max_images_seen(samples, processor), adapted, device)
    settings, folder = resume_key(cfg, samples), pathlib.Path(cfg.output)
    baseline_outputs = None
    try:
        outputs = sample_rows(engine, processor, samples, cfg, open_progress(folder, settings))
        if baseline_policy is not None:
            engine.sync_weights(baseline_policy)
            progress = open_progress(folder / "baseline", settings)
            baseline_outputs = sample_rows(engine, processor, samples, cfg, progress)
    except KeyboardInterrupt:
        raise RunStopped(f"interrupted; run the same command to resume from {cfg.output}", 130) from None
    return samples, outputs, baseline_outputs


def load_adapted(cfg: Config, device: torch.device) -> Policy:
    """Load the model with its adapter; in 4 bits it is on `device`, otherwise on the CPU."""
    flags = PolicyFlags(adapter=cfg.adapter, load_in_4bit=cfg.load_in_4bit)
    return load_policy(cfg.model, flags, device if cfg.load_in_4bit else torch.device("cpu"))


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
    return min(MAX_VLLM_MEMORY, free / size - 0.02)  # 0.02: CUDA still takes a little before vLLM looks


def load_baseline(cfg: Config) -> Policy:
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


def resume_key(cfg: Config, samples: list[Sample]) -> dict[str, Any]:
    """Return everything that the responses depend on. An evaluation resumes only if none of this has changed."""
    names = [field.name for group in (SamplingFlags, DataFlags) for field in fields(group)]
    names += ["task", "model", "adapter", "load_in_4bit", "engine", "env", "max_turns"]
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
    for name in ("model", "adapter", "baseline"):  # a folder may hold other weights by now
        weights = sorted(pathlib.Path(key[name]).glob("*.safetensors")) if key[name] else []
        key[f"weights of the {name}"] = [path.stat().st_mtime for path in weights]
    return key


# --- the command ------------------------------------------------------------------------------------------------------


class Judge:
    """Judges and summarises responses with a benchmark or with a task's rewards, depending on the flags."""

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.server: Verifier | None = None
        self.gold_task: str | None = None
        if cfg.benchmark is None:
            self.scorer = Scorer(cfg.task, cfg)
            self.gold_task = self.scorer.gold_task
            return
        from parts.benchmarks import start_judge

        self.server = start_judge(cfg.benchmark, cfg, cfg.judge_cache)

    def __call__(self, samples: list[Sample], outputs: list[dict]) -> tuple[dict, list[dict]]:
        """Return the scores and the judged predictions."""
        name, task = self.cfg.benchmark, self.cfg.task
        if name is None:
            predictions = judge_task(self.scorer, samples, outputs)
            reason = distributed.first_error(self.scorer.unscored_reason or None)
            benchmarks = extra("benchmarks")
            interval = benchmarks.mean_interval if benchmarks else None
            return {"task": task} | summarise(predictions, task, reason, interval), predictions
        from parts.benchmarks import judge_benchmark, summarise_benchmark

        predictions = judge_benchmark(name, samples, outputs, self.server)
        return summarise_benchmark(name, predictions, self.server.model if self.server else None), predictions


def main(cfg: Config) -> None:
    device = distributed.start()
    try:  # now, so that no response is sampled in vain
        pathlib.Path(cfg.output).mkdir(parents=True, exist_ok=True)
        if console.is_main():
            lock_file(pathlib.Path(cfg.output, "evaluation.lock"), f"--output {cfg.output} is in use")
    except OSError as error:
        raise UserError(f"cannot write to {cfg.output!r} ({error.strerror}): choose another --output") from None
    judge = Judge(cfg)
    compared = None
    if cfg.baseline_is_saved:
        compared = read_predictions(f"{cfg.baseline}/predictions.jsonl", cfg, judge.gold_task)
    if cfg.predictions:
        samples, outputs = read_predictions(cfg.predictions, cfg, judge.gold_task)
    else:
        samples, outputs, baseline_outputs = generate_responses(cfg, device, judge.gold_task)
        if baseline_outputs is not None:
            compared = samples, baseline_outputs
    results, baseline_results = judge(samples, outputs), None
    if compared is not None:
        baseline_samples, baseline_outputs = compared
        baseline_results = judge(baseline_samples, baseline_outputs)
    if console.is_main():
        write_results(cfg, samples, results, baseline_results)
    release_locks()
    distributed.barrier()


def write_results(
    cfg: Config,
    samples: list[Sample],
    results: tuple[dict, list[dict]],
    baseline_results: tuple[dict, list[dict]] | None,
) -> None:
    """Write every file of the evaluation and print a table of the scores.

    `results` and `baseline_results` each hold scores and predictions. Raises UserError when they have no row in common.
    """
    folder, (scores, predictions) = pathlib.Path(cfg.output), results
    sources = {"model": cfg.model, "adapter": cfg.adapter, "data": cfg.data, "predictions": cfg.predictions}
    scores = {name: value for name, value in sources.items() if value is not None} | scores
    scored, comparison = [], {}
    if baseline_results:
        from parts.benchmarks import pair_predictions, score_difference, write_differences

        baseline_scores, baseline_predictions = baseline_results
        matched = pair_predictions(cfg.benchmark, baseline_predictions, predictions)
        scored = [pair for pair in matched if None not in (*pair[0].get("rewards", []), *pair[1].get("rewards", []))]
        if not scored:
            raise UserError(f"--baseline {cfg.baseline}: it has no row in common with this evaluation")
        baseline_scores = {"model": cfg.baseline} | baseline_scores
        comparison = {"baseline": baseline_scores, "paired": score_difference(cfg.benchmark, scored)}
        _write_predictions(folder / "baseline", baseline_scores, baseline_predictions)
    run = read_jsonl(folder.parent / "metrics.jsonl")  # if the folder is in that of a run
    step = {"step": run[-1]["step"]} if run else {}
    _write_predictions(folder, scores | comparison | step, predictions)
    if (folder / "baseline").is_dir():  # then the page is that of a comparison, which may be an earlier one
        (folder / "completions.html").unlink(missing_ok=True)
    if benchmarks := extra("benchmarks"):
        benchmarks.draw_scores(folder, scores, comparison.get("baseline"))
    print(f"{cfg.predictions or cfg.adapter or cfg.model}: {scores['n']} rows")
    print(format_table(scores, **comparison))
    if baseline_results:
        lost, won = write_differences(folder, scores, scored, {sample.source: sample for sample in samples})
        print(f"right before, wrong after: {lost}; wrong before, right after: {won}; see {folder}/completions.html")
    print(f"{folder}/scores.json" + (f", {folder}/scores.png" if benchmarks else ""))
    if run and (pages := extra("pages")):  # the run's page then shows these scores
        pages.write_index(folder.parent)
        print(f"{folder.parent}/index.html")


def _write_predictions(folder: pathlib.Path, scores: dict, predictions: list[dict]) -> None:
    """Write predictions.jsonl and scores.json, and delete the progress file that they replace."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / "predictions.jsonl", json_lines(predictions))
    atomic_write(folder / "scores.json", json.dumps(scores, indent=1) + "\n")
    (folder / PROGRESS).unlink(missing_ok=True)


if __name__ == "__main__":
    cli.launch("evaluate")
