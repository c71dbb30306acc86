"""TODO evaluation/held_out.py"""

import math
from typing import Any

import torch

from common import console, distributed
from common.errors import UserError
from common.records import Rollout, Sample
from data import Processor, encode_prompts
from evaluation.metrics import summarise
from evaluation.progress import EvalProgress
from policy.model import Policy
from rewards import Scorer, exact_match
from rollout import Engine
from training.prompt_stream import prompt_seed

CHUNK = 256  # rows encoded and sampled at once: bounds the memory of their pictures


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
    part: EvalProgress | None = None,
) -> list[dict]:
    """{responses, lengths, truncated} of every sample, in order, on every process; the rows are shared out over all.

    What `part` holds already is not sampled again, and what is sampled goes there. Raises UserError, on every process,
    naming a row whose pictures can no longer be read.
    """
    done = part.done if part else {}
    todo = [place for place in range(len(samples)) if place not in done]
    mine, new = distributed.shard(todo), []
    longest = int(distributed.all_max(torch.tensor(len(mine))))  # processes that share an engine sample together
    for i in console.progress(range(0, longest, CHUNK), "evaluating", unit="chunk", leave=False):
        places = mine[i : i + CHUNK]
        prompts, wrong = [], None
        try:
            prompts = encode_prompts([samples[place] for place in places], processor)
        except UserError as error:
            wrong = str(error)
        if wrong := distributed.first_error(wrong):
            raise UserError(wrong)
        seeds = [prompt_seed(seed, place) for place in places]
        groups = engine.generate(prompts, n, seeds, max_tokens, temperature, top_p)
        answered = [
            {
                "responses": [rollout.text for rollout in rollouts],
                "lengths": [len(rollout.ids) for rollout in rollouts],
                "truncated": [rollout.truncated for rollout in rollouts],
                "pictures": prompt.image_digest.hex(),
            }
            for prompt, rollouts in zip(prompts, groups)
        ]
        new += answered
        if part:
            part.add(places, answered)
    done = done | dict(zip(todo, distributed.gather_shards(new)))
    return [done[place] for place in range(len(samples))]


# --- judging ----------------------------------------------------------------------------------------------------------


def judge_task(scorer: Scorer, samples: list[Sample], answered: list[dict]) -> list[dict]:
    """Predictions with rewards, on every process. Raises UserError when a user's reward function fails."""
    none, task = torch.zeros(0), scorer.task
    groups = [
        (sample, [Rollout(none, none, text=text) for text in own["responses"]])
        for sample, own in distributed.shard(list(zip(samples, answered)))
    ]
    error = scorer(groups)
    if error := next(filter(None, distributed.all_gather(error)), None):
        raise UserError(error)
    judged = distributed.gather_shards(
        [
            {
                "exact": [exact_match(task, r.text, sample.answer, r.rewards[task]) for r in rollouts],
                "rewards": [None if math.isnan(r.reward) else r.reward for r in rollouts],
            }
            for sample, rollouts in groups
        ]
    )
    return [
        sample.fields | {"source": sample.source, "prompt": sample.prompt, "answer": sample.answer} | own | judgement
        for sample, own, judgement in zip(samples, answered, judged)
    ]


def evaluate(
    engine: Engine, processor: Processor, samples: list[Sample], scorer: Scorer, max_tokens: int
) -> tuple[dict[str, Any], list[dict]]:
    """Scores and predictions of what `engine` holds, one greedy completion a row; the same on every process."""
    predictions = judge_task(scorer, samples, sample_rows(engine, processor, samples, max_tokens))
    return summarise(predictions, scorer.task), predictions


def score_policy(
    policy: Policy, engine: Engine, processor: Processor, samples: list[Sample], scorer: Scorer, max_tokens: int
) -> dict[str, float]:
    """The scores of `policy` under training, one greedy completion a row, as metrics named eval/…"""
    engine.wake_up()
    engine.sync_weights(policy)
    scores, _ = evaluate(engine, processor, samples, scorer, max_tokens)
    engine.sleep()
    return {f"eval/{name}": scores[name] for name in ("reward", "exact_match", "format_rate", "mean_length")}
