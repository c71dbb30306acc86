"""Exercise 2: the loss of a token. To check it: python -m lesson.check 2"""

import torch


def token_loss(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    ref_logp: torch.Tensor,
    advantage: torch.Tensor,
    clip: float,
    beta: float,
) -> torch.Tensor:
    """Return each token's loss (C,), from log-probabilities and advantages (C,).

    It is β · KL − objective. The objective is the smaller of ratio · A and clipped ratio · A, where the ratio is
    π_θ / π_old, clipped to 1 ± `clip`. KL is the estimate exp(d) − d − 1 with d = log π_ref − log π_θ.
    """
    raise NotImplementedError("write `token_loss` in lesson/exercises/clip.py")
