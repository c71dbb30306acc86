"""Statistics of the rewards of groups; NaN marks an unscored completion. Shapes: P prompts, G completions each."""

import math

from torch import Tensor

EPSILON = 1e-6  # rewards that differ by less count as equal; also added to standard deviations before dividing


def is_varied(rewards: Tensor) -> Tensor:
    """Return whether the rewards of each row of `rewards` (P, G) differ, as (P,). NaN rewards do not count.

    A row with max − min <= 1e-6 · max(1, max |r|) counts as equal: such differences are rounding errors.
    """
    highest, lowest = rewards.nan_to_num(nan=-math.inf).amax(1), rewards.nan_to_num(nan=math.inf).amin(1)
    return highest - lowest > EPSILON * rewards.nan_to_num(nan=0.0).abs().amax(1).clamp(min=1)


def deviation(rewards: Tensor) -> Tensor:
    """Return the (P, 1) standard deviations, with n − 1, of the rows of `rewards` (P, G). NaN does not count."""
    counts = (~rewards.isnan()).sum(1, keepdim=True)
    centred = rewards - rewards.nanmean(1, keepdim=True)
    return (centred.nan_to_num().square().sum(1, keepdim=True) / (counts - 1).clamp(min=1)).sqrt()
