"""Solution of exercise 1."""


def advantages(rewards: list[float]) -> list[float]:
    # Not "== 0": 0.1 + 0.2 is 0.30000000000000004, and σ would blow that up into an advantage of 1.15 over 0.3.
    if max(rewards) - min(rewards) <= 1e-6:
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    sigma = (sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)) ** 0.5
    return [(reward - mean) / sigma for reward in rewards]
