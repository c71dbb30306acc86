"""Samplers in tests: groups of completions, as a run asks for them."""

import functools
from collections.abc import Callable, Sequence, Set
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from common.records import Output, Prompt, Request, Rollout, Sample, Sampling
from data import Processor, encode_prompt
from rollout import NOT_STARTED, sample_completions


def groups_of(
    engine: Any,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    sampling: Sampling,
    episodes: Any = None,
    started: Sequence[Sequence[Rollout]] = (),
    should_stop: Callable[[Set[int]], bool] | None = None,
) -> list[list[Rollout]]:
    """Let `engine`, whose tokenizer is its own or its processor's, sample a group for each prompt."""
    tokenizer = engine.tokenizer if hasattr(engine, "tokenizer") else engine.processor.tokenizer
    generate = functools.partial(engine.generate, should_stop=should_stop) if should_stop else engine.generate
    processor: Any = SimpleNamespace(tokenizer=tokenizer)
    return sample_completions(generate, processor, prompts, seeds, sampling, episodes, started)


def begin_episode(samples: Sequence[Sample], processor: Processor, row: int = 0, prompt: Prompt | None = None) -> Any:
    """Begin an episode about `samples[row]`. `processor` has an environment."""
    episodes = processor.environment.episodes(samples, processor)
    prompt = prompt or encode_prompt(samples[row], processor)
    episodes.begin(row, Request(prompt, NOT_STARTED.ids, 0, 0, 1000), NOT_STARTED)
    return episodes.begun[-1]


def take_turn(episode: Any, ids: Sequence[int], logp: Tensor | None = None, room: int = 100, ends: bool = True) -> bool:
    """Let the model sample `ids`, the last of which `ends` the turn. Return whether the episode goes on."""
    episode.max_tokens = len(episode.logp) + len(ids) + room
    output = Output(torch.tensor(ids), torch.zeros(len(ids)) if logp is None else logp, "stop" if ends else "length")
    episodes = episode.episodes
    return episodes.then(episodes.begun.index(episode), output) is not None
