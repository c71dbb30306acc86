"""Sample and judge held-out rows, during training (`score_policy`) or for evaluate.py (`sample_rows`, `judge_task`).

Each process samples and judges its share of the rows and then receives the results of all rows, so all processes must
call these functions together.
"""

import functools
import itertools
import json
import math
import pathlib
from dataclasses import dataclass
from typing import Any

import torch

from common import console, distributed
from common.errors import UserError
from common.files import atomic_write, read_jsonl
from common.records import Prompt, Rollout, Sample, Sampling
from data import Processor, encode_prompts
from evaluation.metrics import summarise
from evaluation.scorer import Scorer
from policy.model import Policy
from rewards import TASKS
from rollout import Engine, prompt_seed, sample_completions

PROGRESS = "predictions.part"  # holds the responses of an unfinished evaluation
CHUNK = 256  # number of rows that a process encodes and samples at a time; limits the memory for their images


@dataclass(kw_only=True)
class SamplingFlags:
    """How responses are sampled. The default is one greedy completion per row."""

    n: int = 1
    """Completions per row."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy decoding."""
    top_p: float = 1.0
    """Nucleus sampling: tokens are drawn from the smallest set whose probabilities sum to at least this."""
    max_completion_length: int = 1024
    """Maximum completion length in tokens."""
    seed: int = 0
    """Sampling seed."""


def open_progress(folder: pathlib.Path, settings: dict[str, Any]) -> pathlib.Path:
    """Create the progress file of an evaluation, or keep the file of an interrupted one with the same `settings`.

    The first line holds the settings; each further line holds a row's output. A file with other settings is renamed.
    """
    path = folder / PROGRESS
    if not console.is_main():
        return path
    settings = json.loads(json.dumps(settings))
    saved_settings, *outputs = read_jsonl(path, contiguous=True) or [settings]
    if changed := [name for name in settings if saved_settings.get(name) != settings[name]]:
        path.rename(path.with_suffix(".old"))
        outputs = []
        console.log(f"starting over: {path.with_suffix('.old')} was sampled with different {', '.join(changed)}")
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(path, _json_lines([settings, *outputs]))  # drops a half-written last line
    return path


def _json_lines(rows: list[dict]) -> str:
    """Return `rows` as lines of ASCII: `files.json_lines` would change a path that is not UTF-8."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def sample_rows(
    engine: Engine,
    processor: Processor,
    samples: list[Sample],
    flags: SamplingFlags,
    progress: pathlib.Path | None = None,
) -> list[dict]:
    """Sample responses to every row.

    Returns {responses, lengths, truncated, image_digest} for each row, in order and on every process; `image_digest` is
    a hash of the row's images. With an environment, also {env_rewards, calls, failed_calls}. The main process appends
    the outputs to the file `progress`; rows already in this file are not sampled again.
    """
    outputs = distributed.all_gather(read_jsonl(progress)[1:] if progress else [])[0]
    if outputs:
        console.log(f"resuming: {len(outputs)} rows are already sampled")
    # Processes that share an engine sample together, so each takes part in every chunk, even with no row of its own.
    chunk = CHUNK * distributed.world_size()
    for start in console.progress(range(len(outputs), len(samples), chunk), "evaluating", unit="chunk"):
        local_rows = distributed.shard(list(enumerate(samples))[start : start + chunk])
        with distributed.shared_errors():
            prompts = encode_prompts([sample for _, sample in local_rows], processor)
        seeds = [prompt_seed(flags.seed, index) for index, _ in local_rows]
        sampling = Sampling(flags.n, flags.max_completion_length, flags.temperature, flags.top_p)
        with distributed.shared_errors():  # vLLM's checks of the prompts
            episodes = None
            if processor.environment:
                episodes = processor.environment.episodes([row for _, row in local_rows], processor)
            groups = sample_completions(engine.generate, processor, prompts, seeds, sampling, episodes)
        new_outputs = distributed.gather_shards(list(map(_output, prompts, groups)))
        outputs += new_outputs
        if progress and console.is_main():
            with progress.open("a", encoding="utf-8") as file:
                file.write(_json_lines(new_outputs))
    return outputs


def _output(prompt: Prompt, rollouts: list[Rollout]) -> dict[str, Any]:
    """Return what is saved of the completions of a row."""
    output = {
        "responses": [rollout.text for rollout in rollouts],
        "lengths": [len(rollout.ids) for rollout in rollouts],
        "truncated": [rollout.truncated for rollout in rollouts],
        "image_digest": prompt.image_digest.hex(),
    }
    if trajectories := [rollout.trajectory for rollout in rollouts if rollout.trajectory]:
        output["env_rewards"] = [rollout.env_reward for rollout in rollouts]
        output["calls"] = [trajectory.num_calls for trajectory in trajectories]
        output["failed_calls"] = [trajectory.num_failed for trajectory in trajectories]
    return output


def judge_task(scorer: Scorer, samples: list[Sample], outputs: list[dict]) -> list[dict]:
    """Return the predictions: each row with its output, `exact` and `rewards` (None without a verdict).

    The result is the same on every process. Raises UserError when a user-defined reward fails.
    """
    empty, name = torch.zeros(0), scorer.task
    is_exact = functools.partial(TASKS[name].verdict, "exact_match")
    local_samples, local_outputs = distributed.shard(samples), distributed.shard(outputs)
    rollouts = [
        [
            Rollout(empty, empty, text=text, env_reward=env_reward)
            for text, env_reward in zip(output["responses"], output.get("env_rewards") or itertools.repeat(0.0))
        ]
        for output in local_outputs
    ]
    rewards, error = scorer(local_samples, rollouts)
    distributed.raise_first_error(error, UserError)
    judgements = distributed.gather_shards(
        [
            {
                "exact": [is_exact(r.text, sample.answer, each.parts[name]) for r, each in zip(group, scored)],
                "rewards": [None if math.isnan(each.total) else each.total for each in scored],
            }
            for sample, group, scored in zip(local_samples, rollouts, rewards)
        ]
    )
    return [
        sample.fields | {"source": sample.source, "prompt": sample.prompt, "answer": sample.answer} | output | judgement
        for sample, output, judgement in zip(samples, outputs, judgements)
    ]


def score_policy(
    policy: Policy, engine: Engine, processor: Processor, samples: list[Sample], scorer: Scorer, max_tokens: int
) -> dict[str, float]:
    """Score the policy during training, with one greedy completion per row. Return the metrics named eval/…"""
    engine.wake_up()
    engine.sync_weights(policy)
    outputs = sample_rows(engine, processor, samples, SamplingFlags(max_completion_length=max_tokens))
    predictions = judge_task(scorer, samples, outputs)
    scores = summarise(predictions, scorer.task, distributed.first_error(scorer.unscored_reason or None))
    engine.sleep()
    names = ("reward", "exact_match", "format_rate", "mean_length")
    return {f"eval/{name}": scores[name] for name in names} | {"eval/rows": len(samples)}
