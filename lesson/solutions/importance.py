"""Solution of exercise 4."""

from torch import Tensor


def expected_reward(policy_logp: Tensor, sampler_logp: Tensor, rewards: Tensor, cap: float) -> float:
    weights = (policy_logp - sampler_logp).exp().clamp(max=cap)
    return (weights * rewards).mean().item()  # divided by N, not by the sum of the weights
