"""Three losses of the past year: --plugin examples/losses.py --loss_type sapo, or icepop, or --advantage maxrl."""

import torch

import grpo


def sapo(logp, log_ratio, advantages, batch, cfg):
    """Return 4/τ · σ(τ(r − 1)) · A, a soft gate for a clip; τ is 1 or, for A <= 0, 1.05 (SAPO, arXiv:2511.20347)."""
    temperature = torch.where(advantages > 0, 1.0, 1.05)
    gate = torch.sigmoid(temperature * (log_ratio.exp() - 1)) * 4 / temperature
    return gate * advantages, torch.zeros_like(logp, dtype=torch.bool)


def icepop(logp, log_ratio, advantages, batch, cfg):
    """Return k · min(r·A, clip(r)·A) where k = π_old / π_sampler is in [0.5, 5], else 0 (IcePop, arXiv:2510.18855)."""
    if cfg.importance_cap:
        raise grpo.UserError("--loss_type icepop has an importance weight of its own: set --importance_cap 0")
    objective, is_clipped = grpo.clipped_objective(logp, log_ratio, advantages, batch, cfg)
    old = logp.detach() if batch.values.trainer_logp is None else batch.values.trainer_logp
    k = (old - batch.values.sampling_logp).exp()
    return torch.where((k >= 0.5) & (k <= 5), k * objective, 0.0), is_clipped


def maxrl(rewards, weights, cfg):
    """Return (r − r̄) / r̄ for rewards of 0 and 1, with 0 where none is 1 (MaxRL, arXiv:2602.02710, algorithm 1)."""
    mean = rewards.total.nanmean(1, keepdim=True)
    return torch.where(mean > 0, grpo.group_advantages(rewards.total, "none") / mean, 0.0)


grpo.LOSSES |= {"sapo": grpo.Loss(sapo, "sequences", 0, 0), "icepop": grpo.Loss(icepop, "sequences", 0.2, 0.2)}
grpo.ADVANTAGES["maxrl"] = maxrl
