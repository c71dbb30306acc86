"""Scoring a model on a data set.

    python evaluate.py --model runs/demo/final --data runs/tiny/count-0/test --task count --output runs/demo/after
    python evaluate.py --model DIR --data FILE --task vqa --n 8 --temperature 0.6        # Pass@1[8]

Samples n completions of every row and writes `predictions.jsonl` (one row an object) and `scores.json`:

    n               rows scored
    reward          mean reward of the task
    exact_match     share of completions that are right (`rewards.exact_match`); the same as pass@1
    exact_match_95  95 % interval of it, bootstrap over rows
    format_rate     share of completions in the task's form
    mean_length     tokens of a completion
    no_verdict      share of completions that a verifier gave no verdict on; they are left out of all the others
    truncated       share of completions cut off at max_tokens
    pass@k          chance that k completions hold a right one, unbiased (Chen et al. 2021, arXiv:2107.03374, eq. 1)
"""

import json
import math
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from tqdm import tqdm

import cli
import parallel
from cli import UserError
from data import DataFlags, Processor, Sample, encode_prompts, most_images
from model import Policy, PolicyFlags, load_policy
from rewards import FORMATS, exact_match
from rollout import Engine, EngineFlags, make_engine
from scoring import MOST_WITHOUT_VERDICT, RewardFlags, Scorer
from stream import prompt_seed

CHUNK = 256  # rows encoded and sampled at once: bounds the memory of their pictures


@dataclass(kw_only=True)
class Config(EngineFlags, RewardFlags, DataFlags):
    """Score a model on a data set."""

    model: str
    """A folder in Hugging Face layout or a hub name."""
    adapter: str | None = None
    """An adapter in PEFT layout, made for `model`, to score it with."""
    task: Literal["count", "math", "vqa"] = "count"
    """Prompt template and reward."""
    output: str = "runs/evaluation"
    """Folder for predictions.jsonl and scores.json."""
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

    def __post_init__(self) -> None:
        self.check_data()
        self.check_rewards()
        self.check_engine()
        if self.n < 1 or self.max_tokens < 1:
            raise ValueError("n and max_tokens must be at least 1")
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.limit < 0 or self.seed < 0:
            raise ValueError("temperature, limit and seed must not be negative, top_p must be above 0 and at most 1")
        if self.n > 1 and self.temperature == 0:
            raise ValueError("n above 1 needs a temperature above 0: all completions would be the same")


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that k of n completions, c of them right, hold a right one: 1 − C(n−c, k) / C(n, k)."""
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass_at_k needs 0 <= c <= n and 1 <= k <= n, not n={n}, c={c}, k={k}")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def bootstrap_interval(per_row: Sequence[float], seed: int = 0, resamples: int = 2000) -> tuple[float, float]:
    """The 95 % interval of the mean of `per_row`, by resampling rows."""
    values = np.asarray(per_row, dtype=float)
    draws = np.random.default_rng(seed).integers(len(values), size=(resamples, len(values)))
    low, high = np.percentile(values[draws].mean(1), [2.5, 97.5])
    return float(low), float(high)


def evaluate(
    engine: Engine,
    processor: Processor,
    samples: list[Sample],
    scorer: Scorer,
    max_tokens: int,
    n: int = 1,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> tuple[dict[str, float], list[dict]]:
    """Scores and predictions of what `engine` holds: rows are shared out over all processes, results are on each.

    Raises UserError when a user's reward function fails.
    """
    mine = parallel.my_share(list(enumerate(samples)))
    predictions: list[dict] = []
    task, error = scorer.task, None
    silent = None if parallel.is_main() else True
    longest = int(parallel.all_max(torch.tensor(len(mine))))  # processes that share an engine sample together
    for i in tqdm(range(0, longest, CHUNK), "evaluating", unit="chunk", delay=3, leave=False, disable=silent):
        rows = mine[i : i + CHUNK]
        prompts = encode_prompts([sample for _, sample in rows], processor)
        seeds = [prompt_seed(seed, place) for place, _ in rows]
        groups = engine.generate(prompts, n, seeds, max_tokens, temperature, top_p)
        error = error or scorer([(sample, rollouts) for (_, sample), rollouts in zip(rows, groups)])
        for (_, sample), rollouts in zip(rows, groups):
            predictions.append(
                {
                    "source": sample.source,
                    "prompt": sample.prompt,
                    "answer": sample.answer,
                    "responses": [rollout.text for rollout in rollouts],
                    "exact": [exact_match(task, r.text, sample.answer, r.rewards[task]) for r in rollouts],
                    "rewards": [None if math.isnan(r.reward) else r.reward for r in rollouts],
                    "lengths": [len(rollout.ids) for rollout in rollouts],
                    "truncated": [rollout.truncated for rollout in rollouts],
                }
            )
    if error := next(filter(None, parallel.gather_from_all(error)), None):
        raise UserError(error)
    predictions = parallel.gather_shares(predictions)
    return summarise(predictions, task), predictions


def score_policy(
    policy: Policy, engine: Engine, processor: Processor, samples: list[Sample], scorer: Scorer, max_tokens: int
) -> dict[str, float]:
    """The scores of `policy` under training, one greedy completion a row, as metrics named eval/…"""
    engine.wake_up()
    engine.sync_weights(policy)
    scores, _ = evaluate(engine, processor, samples, scorer, max_tokens)
    engine.sleep()
    return {f"eval/{name}": scores[name] for name in ("reward", "exact_match", "format_rate", "mean_length")}


def summarise(predictions: list[dict], task: str) -> dict[str, float]:
    """The scores of `predictions`, as the head of this file defines them.

    A completion without verdict is left out and counted. Raises UserError when more than a tenth of them are.
    """

    def mean(values: Sequence[float]) -> float:
        return float(np.mean(values)) if len(values) else math.nan

    every = [(r, reward) for row in predictions for r, reward in zip(row["responses"], row["rewards"])]
    without = mean([reward is None for _, reward in every])
    if without > MOST_WITHOUT_VERDICT:
        raise UserError(f"{without:.0%} of the completions have no verdict; at most 10% may: is the verifier up?")
    judged = [[e for e, r in zip(row["exact"], row["rewards"]) if r is not None] for row in predictions]
    judged = [exact for exact in judged if exact]
    n = len(predictions[0]["responses"])
    shares = [sum(exact) / len(exact) for exact in judged]
    scores: dict[str, float] = {
        "n": len(predictions),
        "completions_per_row": n,
        "reward": mean([reward for _, reward in every if reward is not None]),
        "exact_match": mean(shares),
        "exact_match_95": bootstrap_interval(shares),
        "format_rate": mean([FORMATS[task](response) for response, _ in every]),
        "mean_length": mean([length for row in predictions for length in row["lengths"]]),
        "no_verdict": without,
        "truncated": mean([cut for row in predictions for cut in row["truncated"]]),
    }
    for k in sorted({1, n}):
        scores[f"pass@{k}"] = mean([pass_at_k(len(exact), sum(exact), k) for exact in judged if len(exact) >= k])
    return scores


def write(folder: pathlib.Path, scores: dict, predictions: list[dict]) -> None:
    """predictions.jsonl and scores.json in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in predictions)
    (folder / "predictions.jsonl").write_text(rows, encoding="utf-8")
    (folder / "scores.json").write_text(json.dumps(scores, indent=1) + "\n")


def main(cfg: Config) -> None:
    device = parallel.start()
    scorer = Scorer(cfg.task, cfg)
    processor = cfg.processor(cfg.model, cfg.task)
    samples = cfg.samples(cfg.data, cfg.task, processor, keep_repeats=True)[: cfg.limit or None]
    limits = (cfg.max_prompt_length + cfg.max_tokens, most_images(samples))
    adapted = load_policy(cfg.model, PolicyFlags(adapter=cfg.adapter), torch.device("cpu")) if cfg.adapter else None
    engine = make_engine(cfg, cfg.model, processor, device, parallel.compute_dtype(device), *limits)
    if adapted is not None:
        engine.sync_weights(adapted)
    sampling = (cfg.max_tokens, cfg.n, cfg.temperature, cfg.top_p, cfg.seed)
    scores, predictions = evaluate(engine, processor, samples, scorer, *sampling)
    about = {"model": cfg.model, "adapter": cfg.adapter, "data": cfg.data, "task": cfg.task}
    if parallel.is_main():
        write(pathlib.Path(cfg.output), {**about, **scores}, predictions)
        low, high = scores["exact_match_95"]
        print(
            f"{cfg.adapter or cfg.model} on {scores['n']} rows of {cfg.data}: exact match {scores['exact_match']:.3f} "
            f"({low:.3f} to {high:.3f}), reward {scores['reward']:.3f}, form {scores['format_rate']:.3f}, "
            f"{scores['mean_length']:.0f} tokens; {cfg.output}/scores.json"
        )


if __name__ == "__main__":
    cli.run(main, Config)
