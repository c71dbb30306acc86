"""Losses of the past year: --plugin examples/losses.py --loss_type sapo, icepop, sequence_mask; --advantage maxrl."""

import torch

import grpo
from common.group_stats import sum_by_completion


def sapo(logp, log_ratio, advantages, batch, cfg):
    """Return 4/τ · σ(τ(r − 1)) · A, a soft gate for a clip; τ is 1 or, for A <= 0, 1.05 (SAPO, arXiv:2511.20347)."""
    temperature = torch.where(advantages > 0, 1.0, 1.05)
    gate = torch.sigmoid(temperature * (log_ratio.exp() - 1)) * 4 / temperature
    return gate * advantages, torch.zeros_like(logp, dtype=torch.bool)


def icepop(logp, log_ratio, advantages, batch, cfg):
    """Return k · min(r·A, clip(r)·A) where k = π_old / π_sampler is in [0.5, 5], else 0 (IcePop, arXiv:2510.18855)."""
    objective, is_clipped = grpo.clipped_objective(logp, log_ratio, advantages, batch, cfg)
    k = log_importance(logp, batch, cfg).exp()
    return torch.where((k >= 0.5) & (k <= 5), k, 0.0) * objective, is_clipped


def sequence_mask(logp, log_ratio, advantages, batch, cfg):
    """Return w · min(r·A, clip(r)·A), w the product of a completion's π_old / π_sampler, or 0 if that is above 3.

    TRL's default (Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference
    Mismatch").
    """
    objective, is_clipped = grpo.clipped_objective(logp, log_ratio, advantages, batch, cfg)
    w = sum_by_completion(log_importance(logp, batch, cfg), batch.completion_of_token).exp()
    return torch.where(w <= 3, w, 0.0) * objective, is_clipped


def log_importance(logp, batch, cfg):
    """Return log(π_old / π_sampler) of each token, by which `grpo.batch_loss` must then not weight them, too."""
    if cfg.importance_cap:
        raise grpo.UserError(f"--loss_type {cfg.loss_type} has an importance weight of its own: set --importance_cap 0")
    old = logp.detach() if batch.values.trainer_logp is None else batch.values.trainer_logp
    return old - batch.values.sampling_logp


def maxrl(rewards, weights, cfg):
    """Return (r − r̄) / r̄ for rewards of 0 and 1, with 0 where none is 1 (MaxRL, arXiv:2602.02710, algorithm 1)."""
    mean = rewards.total.nanmean(1, keepdim=True)
    return torch.where(mean > 0, grpo.group_advantages(rewards.total, "none") / mean, 0.0)


for objective, clip in ((sapo, 0), (icepop, 0.2), (sequence_mask, 0.2)):
    grpo.LOSSES[objective.__name__] = grpo.Loss(objective, "sequences", clip, clip)
grpo.ADVANTAGES["maxrl"] = maxrl
