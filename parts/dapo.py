"""The overlong penalty of DAPO (`--overlong_buffer`), and GDPO's advantages of several rewards (`--advantage gdpo`).

Imports `common`. `evaluation.scorer` and `grpo.ADVANTAGES` ask for it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common.group_stats import EPSILON, deviation, is_varied
from common.records import GroupRewards, Rewards


def overlong_penalty(length: int, max_length: int, buffer: int) -> float:
    """Return the penalty for a long completion (DAPO, arXiv:2503.14476, eq. 13); range −1 to 0.

    The penalty is 0 up to max_length − buffer tokens and falls linearly to −1 at max_length. Example: with a limit of
    100 tokens and a buffer of 20, a completion of 90 tokens gets −0.5. Guards against reasoning that continues until it
    is truncated. Raises ValueError unless 0 < buffer <= max_length.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"the overlong buffer ({buffer}) must be above 0 and at most the length limit ({max_length})")
    return max(-1.0, min(0.0, (max_length - buffer - length) / buffer))


@dataclass(frozen=True)
class OverlongPenalty:
    """The overlong penalty as a run adds it to the rewards."""

    buffer: int  # tokens

    def add_to(self, rewards: Rewards, length: int, max_length: int) -> Rewards:
        """Return the rewards of a completion of `length` tokens with the penalty, which is then one of them."""
        penalty = overlong_penalty(length, max_length, self.buffer)
        return replace(rewards, total=rewards.raw + penalty, parts=rewards.parts | {"overlong": penalty})

    def taken_from(self, rewards: GroupRewards) -> GroupRewards:
        """Return `rewards` as they are before the penalty."""
        spans = [
            [tuple(replace(s, rewards=replace(s.rewards, total=s.rewards.raw)) for s in each) for each in group]
            for group in rewards.spans
        ]
        return replace(rewards, total=rewards.raw, spans=spans)


def gdpo_advantages(
    parts: dict[str, Tensor], reward_weights: dict[str, float], group_advantages: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the advantages (P, G) of several rewards (P, G), given by name (GDPO, arXiv:2601.05242).

    Each reward k is first normalised in its group to A_k (`grpo.group_advantages`), so that no reward hides another.
    The weighted sum S = Σ_k w_k · A_k, whose mean is 0, is then divided by std(S) + ε, over the batch.
    """
    weights = {name: weight for name, weight in reward_weights.items() if weight}
    unscored = sum(parts[name] for name in weights).isnan()
    sums = sum(w * group_advantages(parts[name].masked_fill(unscored, math.nan)) for name, w in weights.items())
    std = deviation(sums.masked_fill(unscored, math.nan).reshape(1, -1))
    return torch.where(is_varied(sums)[:, None], sums / (std + EPSILON), 0.0)
