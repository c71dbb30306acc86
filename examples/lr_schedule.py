"""A rate that falls only in the last fifth of a run (warm-up, stable, decay): --plugin examples/lr_schedule.py.

Hu et al. 2024, "MiniCPM", arXiv:2404.06395.
"""

from torch.optim.lr_scheduler import LambdaLR

from policy.optimizer import OPTIMIZERS, lr_factor, make_adamw


def warmup_stable_decay(policy, cfg, updates):
    def factor(update):
        return lr_factor(update, updates, cfg.warmup, "constant") * min(1, 5 * (updates - update) / updates)

    return [(optimizer, LambdaLR(optimizer, factor)) for optimizer, _ in make_adamw(policy, cfg, updates)]


OPTIMIZERS["default"] = warmup_stable_decay
