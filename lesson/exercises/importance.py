"""Exercise 4: learn from another model's samples. To check it: python -m lesson.check 4"""

import torch


def expected_reward(policy_logp: torch.Tensor, sampler_logp: torch.Tensor, rewards: torch.Tensor, cap: float) -> float:
    """Estimate the policy's expected reward from N completions that the sampler has drawn.

    All tensors are (N,): each completion's log-probability under the policy and under the sampler, and its reward.
    Weight each completion by policy / sampler, but by at most `cap`, and return the mean.
    """
    raise NotImplementedError("write `expected_reward` in lesson/exercises/importance.py")
