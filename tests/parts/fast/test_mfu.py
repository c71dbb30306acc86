"""The operations that the metric `mfu` counts, by hand."""

import pytest
import torch

pytest.importorskip("parts.fast", reason="needs parts/fast, which is not here")

from common import distributed
from packing import pack
from parts.fast import mfu
from parts.fast.mfu import flop_counter
from policy.families import language_model
from policy.model import Policy
from tests.helpers.models import build, make_group


def test_operations_by_hand():
    """Two layers of 64 dimensions, an MLP of 128, 256 tokens; a prompt of 9 tokens, completions of 5 and 3."""
    policy = Policy(build("qwen2_5"))
    batch = pack([make_group(policy.model, "qwen2_5", 9, [], [5, 3], torch.Generator().manual_seed(0))])
    matrices = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    pairs = 9 * 9 / 2 + 5 * 9 + 5 * 5 / 2 + 3 * 9 + 3 * 3 / 2
    forward = 2 * (matrices * 17 + 64 * 256 * 8) + 4 * 2 * 64 * pairs
    assert flop_counter(policy)(batch) == pytest.approx(3 * forward, rel=0.01)
    policy.requires_grad_(False)
    assert flop_counter(policy)(batch) == pytest.approx(2 * forward + 4 * 2 * 64 * pairs, rel=0.01)


def test_operations_of_experts_and_of_linear_attention_by_hand():
    """Of four experts, a token goes through two. A Gated DeltaNet layer has four heads with states of 32 x 32."""
    g = torch.Generator().manual_seed(0)
    policy = Policy(build("qwen3_vl_moe"))
    batch = pack([make_group(policy.model, "qwen3_vl_moe", 9, [], [5, 3], g)])
    pairs = 9 * 9 / 2 + 5 * 9 + 5 * 5 / 2 + 3 * 9 + 3 * 3 / 2
    matrices = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 4 * 64 + 2 * 3 * 64 * 32)
    dense = 2 * (matrices * 17 + 64 * 256 * 8)
    policy.requires_grad_(False)
    assert flop_counter(policy)(batch) == pytest.approx(2 * dense + 3 * 4 * 2 * 64 * pairs, rel=0.01)

    policy = Policy(build("qwen3_5").requires_grad_(False))
    batch = pack([make_group(policy.model, "qwen3_5", 9, [], [5, 3], g)])
    layers = language_model(policy.model).layers
    matrices = sum(p.numel() for p in layers.parameters() if p.ndim == 2)
    dense = 2 * (matrices * 17 + 64 * 256 * 8) + 3 * 17 * 6 * 4 * 32 * 32
    assert flop_counter(policy)(batch) == pytest.approx(2 * dense + 3 * 4 * 64 * pairs, rel=0.01)


def test_the_operations_of_all_processes_count_once(monkeypatch):
    """Two processes with 80 operations each, in 4 seconds, on GPUs that could do 10 a second."""
    monkeypatch.setattr(mfu, "peak_flops", lambda: 10.0)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "all_sum", lambda value: 2 * value)
    counted = mfu.Mfu(Policy(build("qwen2_5")))
    counted.flops = 80.0
    assert counted.metrics(4.0) == {"mfu": 2.0} and counted.flops == 0
