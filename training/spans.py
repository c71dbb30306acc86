"""Rewards of parts of a completion: which tokens a span of its text has, and the advantage of each token.

A reward may return spans of the text instead of a number: [(start, end, value), ...]. A token belongs to the span that
holds the character of its first byte. Tokens outside all spans have the completion's own advantage.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor

from common.errors import StepFailed
from common.records import GroupRewards, Rewards, Rollout, ScoredGroup, Span
from data import Processor
from grading.answers import without_marks


def in_tokens(group: ScoredGroup, processor: Processor) -> list[tuple[Span, ...]]:
    """Return the spans of each completion of `group`, counted in its tokens. Those without a token are left out."""
    found = []
    for rollout, rewards in zip(group.rollouts, group.rewards):
        starts = token_starts(rollout, group.prompt.opening, processor) if rewards.spans else []
        tokens = [replace(s, start=bisect_left(starts, s.start), end=bisect_left(starts, s.end)) for s in rewards.spans]
        found.append(tuple(span for span in tokens if span.start < span.end))
    return found


def token_starts(rollout: Rollout, opening: str, processor: Processor) -> list[int]:
    """Return for each token the index, in the text that rewards see, of the character that holds its first byte.

    The text of the completion begins with `opening`. Raises StepFailed if the tokenizer decodes differently token by
    token.
    """
    stream, text, starts = DecodeStream(skip_special_tokens=False), opening, []
    for token in rollout.ids.tolist():
        starts.append(len(without_marks(text)))
        text += stream.step(processor.tokenizer.backend_tokenizer, token) or ""  # None inside a character
    if not (text.startswith(rollout.text) or rollout.text.startswith(text)):  # with a stop token, or half a character
        raise StepFailed(f"spans need a tokenizer that decodes token by token, but {rollout.text[:60]!r} changes")
    return starts


def spread_over_tokens(
    advantages: Tensor, rewards: GroupRewards, advantages_of_spans: Callable[[GroupRewards], Tensor], max_length: int
) -> Tensor:
    """Return `advantages` (P, G) with those of spans in their tokens, (P, G, `max_length`); unchanged without spans.

    `advantages_of_spans` gets the rewards of all spans of a group in one row, as (P, spans), filled up with NaN.
    """
    rows = [[span.rewards for spans in group for span in spans] for group in rewards.spans]
    if not any(rows):
        return advantages
    of_spans = advantages_of_spans(as_tensors(rows))
    tokens = advantages[..., None].repeat(1, 1, max_length)
    for values, group, own in zip(of_spans, rewards.spans, tokens):
        spans = [(g, span) for g, spans in enumerate(group) for span in spans]
        for (g, span), value in zip(spans, values):
            own[g, span.start : span.end] = value
    return tokens


def of_completions(group: ScoredGroup, advantages: Tensor) -> list[Tensor]:
    """Return the advantage of each completion of `group`, (), or those of its tokens, (L,); NaN if it is unscored.

    `advantages` (P, G) or (P, G, `max_length`) are those of the step.
    """
    own = [each[: len(r.ids)] if each.ndim else each for r, each in zip(group.rollouts, advantages[group.index])]
    return [each.masked_fill(torch.tensor(math.isnan(r.total)), math.nan) for r, each in zip(group.rewards, own)]


def as_tensors(rows: Sequence[Sequence[Rewards]]) -> GroupRewards:
    """Return `rows` of rewards as tensors (rows, longest row), with NaN where a row is shorter."""
    longest = max(map(len, rows))

    def tensor(value: Callable[[Rewards], float]) -> Tensor:
        return torch.tensor([[*map(value, row), *[math.nan] * (longest - len(row))] for row in rows])

    names = next(rewards.parts for row in rows for rewards in row)
    parts = {name: tensor(lambda rewards, name=name: rewards.parts[name]) for name in names}
    return GroupRewards(tensor(lambda rewards: rewards.total), tensor(lambda rewards: rewards.raw), parts)


def without_penalty(rewards: GroupRewards) -> GroupRewards:
    """Return `rewards` as they are before the overlong penalty."""
    spans = [
        [tuple(replace(span, rewards=replace(span.rewards, total=span.rewards.raw)) for span in each) for each in group]
        for group in rewards.spans
    ]
    return replace(rewards, total=rewards.raw, spans=spans)
