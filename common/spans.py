"""Rewards and advantages of parts of a completion (`Span`).

Shapes: P prompts with G completions each, L tokens in one completion.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from common.errors import UserError
from common.records import GroupRewards, Rewards, ScoredGroup


def spread_over_tokens(
    advantages_of: Callable[[GroupRewards], Tensor], rewards: GroupRewards, max_length: int
) -> Tensor:
    """Return the advantages of `rewards`, (P, G) or, if a completion has spans, (P, G, `max_length`).

    Each token then has the advantage of its span; outside all spans, that of its completion. `advantages_of` also gets
    the rewards of all spans of a group in one row, as (P, spans), filled up with NaN.
    """
    advantages = advantages_of(rewards)
    rows = [[span.rewards for spans in group for span in spans] for group in rewards.spans]
    if not any(rows):
        return advantages
    if advantages.shape != rewards.total.shape:
        got, want = tuple(advantages.shape), tuple(rewards.total.shape)
        raise UserError(f"--advantage: for rewards of parts, it must return one number each, {want}, not {got}")
    of_spans = advantages_of(as_tensors(rows))
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
    return [torch.full_like(a, math.nan) if math.isnan(r.total) else a for r, a in zip(group.rewards, own)]


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
