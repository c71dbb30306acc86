"""The variants of the loss (`LOSSES`) and their options: the objective of each token as a function of the ratio.

Shapes: C completion tokens in one micro-batch. `row_of_token` (C,) numbers the completion of each token 0, 1, …
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

EPSILON = 1e-6  # rewards that differ by less count as equal; also added to standard deviations before dividing


@dataclass(frozen=True)
class LossOptions:
    """The options of `grpo.grpo_loss`."""

    loss_type: str = "grpo"  # a key of `LOSSES`
    clip_low: float = 0.2  # ε_low: the ratio is clipped below at 1 − ε_low
    clip_high: float = 0.2  # ε_high: the ratio is clipped above at 1 + ε_high
    beta: float = 0.0  # β, the weight of the KL term
    unbiased_kl: bool = False  # whether the KL term is multiplied by the ratio
    dual_clip: float = 0.0  # c: for negative advantages, the ratio is clipped above at c; 0: no such clipping


DEFAULT_OPTIONS = LossOptions()


@dataclass(frozen=True)
class Loss:
    """A variant of the loss."""

    objective: Callable[[Tensor, Tensor, Tensor, Tensor, LossOptions], tuple[Tensor, Tensor]]
    """The objective of each token and whether it was clipped; `clipped_objective` names the arguments."""
    average: Literal["sequences", "tokens", "constant"]  # what the loss is a mean over; see `grpo.token_weights`
    clip_low: float  # the default of `--clip_low`
    clip_high: float  # the default of `--clip_high`
    ratio: Literal["token", "sequence"] = "token"  # "sequence": the geometric mean over the completion


def get_loss(loss_type: str) -> Loss:
    """Return the loss called `loss_type`. Raises ValueError if it is not in `LOSSES`."""
    if loss_type not in LOSSES:
        raise ValueError(f"--loss_type {loss_type}: choose one of {', '.join(LOSSES)}")
    return LOSSES[loss_type]


def clipped_objective(
    logp: Tensor, log_ratio: Tensor, advantages: Tensor, row_of_token: Tensor, options: LossOptions
) -> tuple[Tensor, Tensor]:
    """Return min(r·A, clip(r)·A), and whether a clip bound decides. All tensors are (C,).

    This is eq. 3 of DeepSeekMath or, with clip_high > clip_low, eq. 8 of DAPO (arXiv:2503.14476). With c = `dual_clip`,
    the objective of a negative advantage is max(min(r·A, clip(r)·A), c·A) (dual clip, arXiv:1912.09729).
    """
    ratio, clipped = clipped_ratio(log_ratio, options)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    is_clipped = clipped * advantages < ratio * advantages
    if options.dual_clip:
        lowest = torch.where(advantages < 0, options.dual_clip * advantages, -torch.inf)
        objective, is_clipped = torch.maximum(objective, lowest), is_clipped | (objective < lowest)
    return objective, is_clipped


def cispo_objective(
    logp: Tensor, log_ratio: Tensor, advantages: Tensor, row_of_token: Tensor, options: LossOptions
) -> tuple[Tensor, Tensor]:
    """Return stop_gradient(clip(r)) · A · log π_θ, and whether r was clipped (CISPO eq. 4, arXiv:2506.13585)."""
    ratio, clipped = clipped_ratio(log_ratio, options)
    return clipped.detach() * advantages * logp, ratio != clipped


LOSSES = {
    "grpo": Loss(clipped_objective, "sequences", 0.2, 0.2),  # DeepSeekMath, arXiv:2402.03300
    "dr_grpo": Loss(clipped_objective, "constant", 0.2, 0.2),  # Dr. GRPO, arXiv:2503.20783, with --scale_rewards none
    "dapo": Loss(clipped_objective, "tokens", 0.2, 0.28),  # DAPO, arXiv:2503.14476
    "gspo": Loss(clipped_objective, "sequences", 3e-4, 4e-4, ratio="sequence"),  # GSPO eq. 5 and 7, arXiv:2507.18071
    "cispo": Loss(cispo_objective, "tokens", 1.0, 4.0),  # CISPO, arXiv:2506.13585
}


def clipped_ratio(log_ratio: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """Return the ratio r = exp(`log_ratio`), and r clipped to [1 − ε_low, 1 + ε_high]."""
    ratio = log_ratio.exp()
    return ratio, ratio.clamp(1 - options.clip_low, 1 + options.clip_high)


def sum_by_row(values: Tensor, row_of_token: Tensor) -> Tensor:
    """Return for each token the sum of `values` (C,) over its completion, as (C,)."""
    return torch.zeros_like(values).index_add(0, row_of_token, values)[row_of_token]


def mean_by_row(values: Tensor, row_of_token: Tensor) -> Tensor:
    """Return for each token the mean of `values` (C,) over its completion, as (C,)."""
    return sum_by_row(values, row_of_token) / sum_by_row(torch.ones_like(values), row_of_token)


def kl_estimate(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Return the k3 estimate of KL(π_θ ‖ π_ref) for each token (DeepSeekMath eq. 4). All tensors are (C,)."""
    difference = ref_logp - logp
    return difference.exp() - difference - 1


def importance_weights(log_ratio: Tensor, row_of_token: Tensor, cap: float, mode: str) -> tuple[Tensor, Tensor]:
    """Return the weight π_old / π_sampler of each token's objective, bounded by `cap`. All tensors are (C,).

    `log_ratio` is the token's log(π_old / π_sampler). "token_truncate" takes min(ratio, cap) of each token (truncated
    importance sampling, Yao et al. 2025). "sequence_truncate" does so with the ratio of the whole completion, the
    product over its tokens. "sequence_mask" gives completions whose ratio is above the cap a weight of 0 (Liu et al.
    2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch").
    """
    if mode != "token_truncate":
        log_ratio = sum_by_row(log_ratio, row_of_token)
    ratio = log_ratio.exp()
    is_capped = ratio > cap
    return ratio.masked_fill(is_capped, 0.0) if mode == "sequence_mask" else ratio.clamp(max=cap), is_capped


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
