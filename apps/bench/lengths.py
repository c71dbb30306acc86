"""Lengths of completions that spread over two orders of magnitude, for W-tail."""

from collections.abc import Sequence

import numpy as np


def log_normal_length(key: Sequence[int], median: float, sigma: float, cap: int) -> int:
    """Return the length in tokens that belongs to `key`, which names a prompt and one of its completions.

    `sigma`: standard deviation of the logarithm of the lengths. `cap`: maximum length.
    """
    normal = np.random.default_rng(list(key)).standard_normal()
    return int(np.clip(round(median * np.exp(sigma * normal)), 1, cap))
