"""Sample and judge held-out rows, during training (`score_policy`) or for evaluate.py (`sample_rows`, `judge_task`).

Each process samples its share of the rows and then receives the results of all rows. Every function is a collective.
"""

import math
from typing import Any

import torch

from common import console, distributed
from common.errors import UserError
from common.records import Rollout, Sample, Sampling
from data import Processor, encode_prompts
from evaluation.metrics import summarise
from evaluation.progress import EvalProgress
from policy.model import Policy
from rewards import TASKS, Scorer
from rollout import Engine
from training.prompt_stream import prompt_seed

CHUNK = 256  # number of rows encoded and sampled at a time; limits the memory for their images


# --- responses --------------------------------------------------------------------------------------------------------


def sample_rows(
    engine: Engine,
    processor: Processor,
    samples: list[Sample],
    max_tokens: int,
    n: int = 1,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    progress: EvalProgress | None = None,
) -> list[dict]:
    """Sample `n` responses to every row.

    Returns {responses, lengths, truncated, pictures} for each row, in order and on every process; `pictures` is a
    digest of the row's images. Rows that are already in `progress` are not sampled again, and new rows are added to
    `progress`. Raises UserError on every process when the images of a row can no longer be read.
    """
    done = progress.done if progress else {}
    pending = [index for index in range(len(samples)) if index not in done]
    local_indices, local_outputs = distributed.shard(pending), []
    # Processes that share an engine sample together, so each takes part in as many chunks as the busiest process.
    max_rows = int(distributed.all_max(torch.tensor(len(local_indices))))
    for start in console.progress(range(0, max_rows, CHUNK), "evaluating", unit="chunk", leave=False):
        indices = local_indices[start : start + CHUNK]
        prompts, error = [], None
        try:
            prompts = encode_prompts([samples[index] for index in indices], processor)
        except UserError as problem:
            error = str(problem)
        distributed.raise_first_error(error, UserError)
        seeds = [prompt_seed(seed, index) for index in indices]
        groups = engine.generate(prompts, seeds, Sampling(n, max_tokens, temperature, top_p))
        outputs = [
            {
                "responses": [rollout.text for rollout in rollouts],
                "lengths": [len(rollout.ids) for rollout in rollouts],
                "truncated": [rollout.truncated for rollout in rollouts],
                "pictures": prompt.image_digest.hex(),
            }
            for prompt, rollouts in zip(prompts, groups)
        ]
        local_outputs += outputs
        if progress:
            progress.add(indices, outputs)
    done = done | dict(zip(pending, distributed.gather_shards(local_outputs)))
    return [done[index] for index in range(len(samples))]


# --- judging ----------------------------------------------------------------------------------------------------------


def judge_task(scorer: Scorer, samples: list[Sample], outputs: list[dict]) -> list[dict]:
    """Return the predictions: each row with its output, `exact` and `rewards` (None without a verdict).

    The result is the same on every process. Raises UserError when a user-defined reward fails.
    """
    empty, name = torch.zeros(0), scorer.task
    is_exact = TASKS[name].exact_match
    local_samples, local_outputs = distributed.shard(samples), distributed.shard(outputs)
    rollouts = [[Rollout(empty, empty, text=text) for text in output["responses"]] for output in local_outputs]
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


def evaluate(
    engine: Engine, processor: Processor, samples: list[Sample], scorer: Scorer, max_tokens: int
) -> tuple[dict[str, Any], list[dict]]:
    """Sample one greedy completion per row with the engine's current weights. Return the scores and the predictions;
    both are the same on every process."""
    predictions = judge_task(scorer, samples, sample_rows(engine, processor, samples, max_tokens))
    return summarise(predictions, scorer.task), predictions


def score_policy(
    policy: Policy, engine: Engine, processor: Processor, samples: list[Sample], scorer: Scorer, max_tokens: int
) -> dict[str, float]:
    """Score the policy during training, with one greedy completion per row. Return the metrics named eval/…"""
    engine.wake_up()
    engine.sync_weights(policy)
    scores, _ = evaluate(engine, processor, samples, scorer, max_tokens)
    engine.sleep()
    return {f"eval/{name}": scores[name] for name in ("reward", "exact_match", "format_rate", "mean_length")}
