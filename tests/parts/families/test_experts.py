"""Tests of mixtures of experts in compiled layers."""

import pytest
import torch
from torch._dynamo.utils import counters

from packing import pack
from policy.forward import enable_packed_forward, token_logprobs
from policy.lora import new_adapter
from tests.helpers.models import build, make_group

pytest.importorskip("parts.families", reason="needs parts/families, which is not here")


@pytest.mark.parametrize(
    "family, dtype, adapted",
    [
        ("qwen3_vl_moe", torch.bfloat16, False),
        ("qwen3_vl_moe", torch.bfloat16, True),
        ("aria", torch.float32, False),
    ],
)
def test_all_layers_share_their_compiled_code(family, dtype, adapted, monkeypatch):
    """Beyond torch.compile's limit of 16 versions, layers would run operation by operation.

    Experts in bfloat16 are part of that code, unless they have adapters.
    """
    trace = torch.compile  # with Python in place of kernels, which take long to build on a CPU
    monkeypatch.setattr(torch, "compile", lambda function, **_: trace(function, dynamic=True, backend="eager"))
    graphs = []
    for num_layers in (2, 5):
        torch._dynamo.reset()
        counters.clear()
        model = build(family, num_hidden_layers=num_layers)
        if adapted:
            new_adapter(model, rank=2, alpha=4, vision=False, experts=True)
        enable_packed_forward(model.to(dtype), compiled=True)
        group = make_group(model, family, 40, [(4, 4)], [3, 5], torch.Generator().manual_seed(1))
        logp, _ = token_logprobs(model, pack([group]))
        assert logp.isfinite().all()
        graphs.append(counters["stats"]["unique_graphs"])
        left_out = any("_forward_uncompiled" in reason for reason in counters["graph_break"])
        assert left_out == (adapted or dtype == torch.float32)
    assert graphs[0] == graphs[1] > 0
