"""Rewards and advantages of parts of a completion (`Span`).

Shapes: P prompts with G completions each, L tokens in one completion.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from common.records import GroupRewards, Rewards, ScoredGroup


def spread_over_tokens(
    advantages_of: Callable[[GroupRewards], Tensor], rewards: GroupRewards, max_length: int
) -> Tensor:
    """Return the advantages of `rewards`, (P, G) or, if a completion has spans, (P, G, `max_length`).

    Each token then has the advantage of its span; outside all spans, that of its completion. `advantages_of` is also
    called with the rewards of all spans of each group, (P, spans), padded with NaN.
    """
    if not any(any(group) for group in rewards.spans):
        return advantages_of(rewards)
    of_spans = advantages_of(as_tensors([[s.rewards for spans in group for s in spans] for group in rewards.spans]))
    tokens = advantages_of(rewards)[..., None].repeat(1, 1, max_length)
    for values, group, own in zip(of_spans, rewards.spans, tokens):
        spans = [(g, span) for g, spans in enumerate(group) for span in spans]
        for (g, span), value in zip(spans, values):
            own[g, span.start : span.end] = value
    return tokens


def of_completions(group: ScoredGroup, advantages: Tensor) -> list[Tensor]:
    """Return the advantage () of each completion of `group`, or those (L,) of its tokens; NaN if it is unscored.

    `advantages` (P, G) or (P, G, `max_length`) are those of the step.
    """
    own = [each[: len(r.ids)] if each.ndim else each for r, each in zip(group.rollouts, advantages[group.index])]
    return [torch.full_like(a, math.nan) if math.isnan(r.total) else a for r, a in zip(group.rewards, own)]


def as_tensors(groups: Sequence[Sequence[Rewards]]) -> GroupRewards:
    """Return the rewards of `groups` as tensors (groups, longest group), with NaN where a group is shorter."""
    longest = max(map(len, groups))

    def tensor(values: list[list[float]]) -> Tensor:
        return torch.tensor([[*each, *[math.nan] * (longest - len(each))] for each in values])

    names = next(rewards.parts for group in groups for rewards in group)
    parts = {name: tensor([[rewards.parts[name] for rewards in group] for group in groups]) for name in names}
    total = tensor([[rewards.total for rewards in group] for group in groups])
    raw = tensor([[rewards.raw for rewards in group] for group in groups])
    return GroupRewards(total, raw, parts, [[rewards.spans for rewards in group] for group in groups])
