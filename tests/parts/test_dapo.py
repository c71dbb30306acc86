"""The overlong penalty of DAPO and the advantages of GDPO, compared with numbers worked out by hand.

Guards against: one reward that hides another, a penalty that keeps groups which have nothing to teach, and rounding
that is divided by its own deviation.
"""

import json
import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("parts.dapo", reason="needs parts/dapo.py, which is not here")

import grpo
from common.records import Rewards, Span
from common.spans import as_tensors, spread_over_tokens
from grpo import group_advantages
from parts.dapo import OverlongPenalty, gdpo_advantages, overlong_penalty
from tests.helpers.runs import config, metrics
from tests.helpers.scripts import ROOT

NAN = math.nan
OVERLONG = [json.loads(line) for line in (ROOT / "tests" / "vectors" / "overlong.jsonl").read_text().splitlines()]


def gdpo(parts: dict[str, torch.Tensor], weights: dict[str, float]) -> torch.Tensor:
    return gdpo_advantages(parts, weights, group_advantages)


def test_gdpo_normalises_each_reward_in_its_group():
    """The second reward is ten times as large. Its weighted sum with the first would hide the first."""
    parts = {"a": torch.tensor([[1.0, 0.0], [0.0, 1.0]]), "b": torch.tensor([[0.0, 10.0], [10.0, 10.0]])}
    unit = 1 / math.sqrt(2)  # (1 − 0.5) / std, with std = 1/√2
    sums = [unit - 2 * unit, -unit + 2 * unit, -unit, unit]
    std = math.sqrt(sum(x * x for x in sums) / 3)
    want = torch.tensor(sums).view(2, 2) / std
    torch.testing.assert_close(gdpo(parts, {"a": 1.0, "b": 2.0}), want)
    # rewards that cancel leave a rounding error, which must not be divided by its own deviation
    opposite = {"a": torch.tensor([[0.1, 0.2, 0.4]]), "b": torch.tensor([[0.4, 0.3, 0.1]])}
    assert not gdpo(opposite, {"a": 1.0, "b": 1.0}).any()
    tiny = gdpo({"a": torch.tensor([[1.0, 0.0]])}, {"a": 1e-6})  # ε is larger than the deviation of the sum
    torch.testing.assert_close(tiny, torch.tensor([[1e-6 * unit, -1e-6 * unit]]) / (1e-6 + 1e-6))
    equal = {"a": torch.ones(2, 3), "b": torch.zeros(2, 3)}
    assert torch.equal(gdpo(equal, {"a": 1.0, "b": 2.0}), torch.zeros(2, 3))


def test_gdpo_leaves_unscored_completions_out():
    """A completion without one of the rewards counts for none of them, unless that reward is only logged."""
    parts = {"a": torch.tensor([[1.0, 0.0, 1.0]]), "b": torch.tensor([[NAN, 1.0, 2.0]])}
    got = gdpo(parts, {"a": 1.0, "b": 1.0})
    assert got[0, 0] == 0
    others = {name: values[:, 1:] for name, values in parts.items()}
    torch.testing.assert_close(got[:, 1:], gdpo(others, {"a": 1.0, "b": 1.0}))
    torch.testing.assert_close(gdpo(parts, {"a": 1.0, "b": 0.0}), group_advantages(parts["a"]))


@pytest.mark.parametrize("case", OVERLONG, ids=lambda c: str(c["length"]))
def test_overlong_vectors(case):
    got = overlong_penalty(case["length"], case["max_length"], case["buffer"])
    assert got == pytest.approx(case["want"], abs=5e-7)


def test_without_the_overlong_penalty_spans_have_none_either():
    whole = Rewards(1.0, 1.0, {"own": 1.0}, spans=(Span(0, 1, Rewards(1.0, 0.0, {"own": 1.0})),))
    rewards = OverlongPenalty(9).taken_from(as_tensors([[whole, replace(whole, spans=())]]))
    assert rewards.spans[0][0][0].rewards.total == 0.0
    assert spread_over_tokens(lambda part: part.total, rewards, 2)[0, 0].tolist() == [0.0, 1.0]


def test_the_overlong_penalty_is_trained_on(brief_model, shapes, tmp_path):
    (tmp_path / "r.py").write_text("def third(completion, answer):\n    return 1 / 3\n")
    more = dict(reward=("count=0", f"{tmp_path}/r.py:third"), overlong_buffer=9)
    grpo.main(config(brief_model, shapes, tmp_path / "run", max_steps=1, **more))
    (row,) = metrics(tmp_path / "run")
    assert row["reward_std"] > 0 and row["grad_norm"] > 1e-3, "the completions differ in length alone"
