"""Micro-batches: gradients are the same whether FSDP makes them in the last backward pass or after it."""

import pytest
import torch

from common import distributed
from config import PolicyFlags
from policy import batches
from policy.model import load_policy
from policy.sharding import apply_fsdp, finishes_gradients
from tests.helpers.models import make_group


@pytest.mark.parametrize(
    ("flags", "is_finished_later"), [({}, True), ({"train_vision": True}, False), ({"lora_rank": 4}, False)]
)
def test_gradients_of_several_micro_batches_are_complete(tiny_model, monkeypatch, flags, is_finished_later):
    """Also if a trained vision tower first runs in the second micro-batch, where FSDP could not accumulate."""
    device = distributed.start()
    g = torch.Generator().manual_seed(0)

    def gradients() -> dict[str, torch.Tensor]:
        policy = apply_fsdp(load_policy(tiny_model, PolicyFlags(**flags), device), device, torch.bfloat16)
        assert finishes_gradients(policy) == is_finished_later
        g.manual_seed(0)
        groups = [make_group(policy.model, "qwen2_5_vl", 9, grids, [5, 3], g) for grids in ([], [(4, 4)])]
        has_images = []
        for batch in batches.micro_batches(policy, groups, budget=40):
            has_images.append(bool(batch.vision))
            policy(batch)[0].sum().backward()
        assert has_images == [False, True]
        return {name: p.grad.full_tensor() for name, p in policy.named_parameters() if p.requires_grad}

    got = gradients()
    monkeypatch.setattr(batches, "finishes_gradients", lambda policy: False)
    want = gradients()
    assert got.keys() == want.keys()
    assert any(gradient.any() for gradient in got.values())
    for name, gradient in want.items():
        assert torch.equal(got[name], gradient), name
