"""The learning-rate schedule, and AdamW on the shards of a sharded model."""

import gc
import math

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.optim import adam

from common import distributed
from policy.optimizer import ShardAdamW, lr_factor


@pytest.mark.parametrize("fused", [True, False])
def test_shards_are_updated_as_pytorch_updates_dtensors(fused, monkeypatch):
    """The weights are the same, bit for bit, and no object of a step outlives it (with torch 2.11, 26 would)."""
    mesh = distributed.make_mesh(distributed.start(), "full")
    weights, updated = {}, set()
    update = adam.adam

    def recorded(parameters, *args, **options):
        updated.update(map(type, parameters))
        return update(parameters, *args, **options)

    monkeypatch.setattr(adam, "adam", recorded)
    for optimizer_class in (torch.optim.AdamW, ShardAdamW):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(13))).to(mesh.device_type)
        fully_shard(model, mesh=mesh)
        before = [parameter.full_tensor().clone() for parameter in model.parameters()]
        optimizer = optimizer_class(model.parameters(), lr=1e-2, fused=fused)
        counts = []
        updated.clear()
        for _ in range(4):
            model(torch.randn(4, 16, device=mesh.device_type)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            gc.collect()
            counts.append(sum(isinstance(thing, DTensorSpec) for thing in gc.get_objects()))
        weights[optimizer_class] = [parameter.full_tensor() for parameter in model.parameters()]
        assert all((new != old).any() for new, old in zip(weights[optimizer_class], before))
    pairs = zip(weights[torch.optim.AdamW], weights[ShardAdamW], strict=True)
    assert all(torch.equal(expected, got) for expected, got in pairs)
    assert updated and DTensor not in updated, "the second class gives PyTorch plain tensors"
    assert counts[1:] == counts[1:2] * 3


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
