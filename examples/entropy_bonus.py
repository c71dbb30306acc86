"""A bonus for the entropy of each token: --plugin examples/entropy_bonus.py --loss_type entropy_bonus."""

from dataclasses import dataclass

import grpo


@dataclass
class Flags:
    entropy_weight: float = 0.01
    """Weight of the entropy in the objective of the loss `entropy_bonus`."""


def with_entropy(logp, log_ratio, advantages, batch, cfg, entropy):
    objective, is_clipped = grpo.clipped_objective(logp, log_ratio, advantages, batch, cfg)
    return objective + cfg.entropy_weight * entropy, is_clipped


grpo.LOSSES["entropy_bonus"] = grpo.Loss(with_entropy, "sequences", 0.2, 0.2, needs_entropy=True)
