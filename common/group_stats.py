"""Sums over groups and over completions.

Shapes: P prompts with G completions each, C tokens of several completions. A reward of NaN marks an unscored
completion. `completion_of_token` (C,) is the index of the completion that each token belongs to: 0, 0, …, 1, …
"""

import math

import torch
from torch import Tensor

EPSILON = 1e-6  # rewards that differ by less count as equal; also added to standard deviations before dividing


def is_varied(rewards: Tensor) -> Tensor:
    """Return (P,) bools: whether the rewards of each group in `rewards` (P, G) differ. NaN rewards do not count.

    A group with max − min <= 1e-6 · max(1, max |r|) counts as equal: such differences are rounding errors.
    """
    highest, lowest = rewards.nan_to_num(nan=-math.inf).amax(1), rewards.nan_to_num(nan=math.inf).amin(1)
    return highest - lowest > EPSILON * rewards.nan_to_num(nan=0.0).abs().amax(1).clamp(min=1)


def deviation(rewards: Tensor) -> Tensor:
    """Return the (P, 1) standard deviations (divisor n − 1) of the groups in `rewards` (P, G). NaN does not count."""
    counts = (~rewards.isnan()).sum(1, keepdim=True)
    centred = rewards - rewards.nanmean(1, keepdim=True)
    return (centred.nan_to_num().square().sum(1, keepdim=True) / (counts - 1).clamp(min=1)).sqrt()


def sum_by_completion(values: Tensor, completion_of_token: Tensor) -> Tensor:
    """Return for each token the sum of `values` (C,) over its completion, as (C,)."""
    return torch.zeros_like(values).index_add(0, completion_of_token, values)[completion_of_token]


def sequence_log_ratio(log_ratio: Tensor, completion_of_token: Tensor, per_token: bool = False) -> Tensor:
    """Return for each token the mean of `log_ratio` (C,) over its completion, as (C,) (GSPO, eq. 7).

    `per_token`: the same value, but with the gradient of the token's own `log_ratio`, for advantages of single tokens
    (GSPO-token, section 4.3). If all tokens of a completion have the same advantage, the loss has the same gradient.
    """
    sums, lengths = (sum_by_completion(x, completion_of_token) for x in (log_ratio, torch.ones_like(log_ratio)))
    mean = sums / lengths
    return mean.detach() + log_ratio - log_ratio.detach() if per_token else mean
