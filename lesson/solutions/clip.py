"""Solution of exercise 2."""

import torch
from torch import Tensor


def token_loss(logp: Tensor, old_logp: Tensor, ref_logp: Tensor, advantage: Tensor, clip: float, beta: float) -> Tensor:
    ratio = (logp - old_logp).exp()
    objective = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    difference = ref_logp - logp
    return beta * (difference.exp() - difference - 1) - objective
