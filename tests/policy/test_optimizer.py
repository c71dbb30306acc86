"""The learning-rate schedule."""

import math

import pytest

from policy.optimizer import lr_factor


def test_learning_rates_by_hand():
    """Ten updates: two of warm-up, given as a number or as a fraction, then eight down to zero."""
    for warmup in (2, 0.2):
        for schedule, after in (
            ("constant", [1.0] * 9),
            ("linear", [1 - k / 8 for k in range(9)]),
            ("cosine", [(1 + math.cos(math.pi * k / 8)) / 2 for k in range(9)]),
        ):
            got = [lr_factor(update, 10, warmup, schedule) for update in range(11)]
            assert got == pytest.approx([1 / 3, 2 / 3, *after]), (warmup, schedule)
    assert lr_factor(0, 10, 1, "constant") == 1 / 2, "one update, not all of them"
