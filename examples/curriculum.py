"""Rows that are sometimes right come more often: --plugin examples/curriculum.py."""

from dataclasses import dataclass

import numpy as np

from training.prompt_stream import ORDERS


@dataclass
class Flags:
    easy_and_hard: float = 0.1
    """Weight of a row that is always or never right; one that is right half of the time has 0.25 more."""


def by_success(stream, position, cfg):
    means = [stream.rewarded.get(str(row), (0, 0.5))[1] for row in range(len(stream.samples))]
    rate = np.clip(means, 0, 1)
    weights = cfg.easy_and_hard + rate * (1 - rate)
    return int(np.random.default_rng([stream.seed, position]).choice(len(rate), p=weights / weights.sum()))


ORDERS["default"] = by_success
