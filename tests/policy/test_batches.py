"""Micro-batches: a single process takes the gradients that FSDP has accumulated, instead of letting FSDP copy them."""

import pytest
import torch

from common import distributed
from config import PolicyFlags
from packing import pack
from policy import batches
from policy.model import Policy, load_policy
from policy.sharding import apply_fsdp
from tests.helpers.models import build, make_group


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("flags", [{}, {"train_vision": True}, {"lora_rank": 4}])
def test_taken_gradients_are_those_that_fsdp_makes(tiny_model, monkeypatch, flags, dtype):
    """Also if a trained vision tower first runs in the second micro-batch."""
    device = distributed.start()

    def gradients() -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(0)
        policy = apply_fsdp(load_policy(tiny_model, PolicyFlags(**flags), device), device, dtype)
        groups = [make_group(policy.model, "qwen2_5_vl", 9, grids, [5, 3], g) for grids in ([], [(4, 4)])]
        with_images = []
        for batch in batches.micro_batches(policy, groups, budget=40):
            with_images.append(bool(batch.vision))
            policy(batch)[0].sum().backward()
        assert with_images == [False, True]
        return {name: p.grad.full_tensor() for name, p in policy.named_parameters() if p.requires_grad}

    got = gradients()
    monkeypatch.setattr(batches, "reduce_gradients", lambda policy, now: policy.set_requires_gradient_sync(True))
    monkeypatch.setattr(batches, "take_gradients", lambda policy: None)
    want = gradients()
    assert got.keys() == want.keys()
    assert any(gradient.any() for gradient in got.values())
    for name, gradient in want.items():
        assert got[name].dtype == gradient.dtype == torch.float32, name
        assert torch.equal(got[name], gradient), name


def test_operations_by_hand():
    """Two layers of 64 dimensions, an MLP of 128, 256 tokens; a prompt of 9 tokens, completions of 5 and 3."""
    policy = Policy(build("qwen2_5"))
    batch = pack([make_group(policy.model, "qwen2_5", 9, [], [5, 3], torch.Generator().manual_seed(0))])
    matrices = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    pairs = 9 * 9 / 2 + 5 * 9 + 5 * 5 / 2 + 3 * 9 + 3 * 3 / 2
    forward = 2 * (matrices * 17 + 64 * 256 * 8) + 4 * 2 * 64 * pairs
    assert batches.flop_counter(policy)(batch) == pytest.approx(3 * forward, rel=0.01)
    policy.requires_grad_(False)
    assert batches.flop_counter(policy)(batch) == pytest.approx(2 * forward, rel=0.01)
