"""What only a GPU can show: the variable-length attention kernels, bfloat16, and a run on the device."""

import math

import pytest
import torch
from models import build, make_group

import grpo
from packing import pack, take_packed_batches, token_logprobs
from report import read_rows

no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU in this machine")
pytestmark = [pytest.mark.gpu, no_gpu]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen2_5", "qwen3"])
def test_attention_kernels_agree_with_float32(family):
    """bfloat16 through the variable-length kernel against float32 through SDPA: log-probabilities within 0.03 on
    average, gradients in the same direction."""
    g = torch.Generator().manual_seed(1)
    model = build(family)
    grids = [] if family in ("qwen2_5", "qwen3") else [[(4, 4)], [], [(2, 2), (4, 8)]]
    groups = [make_group(model, family, 40, grids[i] if grids else [], [30, 1, 17], g) for i in range(3)]
    batch = pack(groups).to("cuda")
    take_packed_batches(model)
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = model.to("cuda", dtype)
        model.zero_grad()
        logp, _ = token_logprobs(model, batch)
        logp.mean().backward()
        gradient = torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])
        results[dtype] = logp.detach(), gradient
    (want, want_grad), (got, got_grad) = results.values()
    assert (got - want).abs().mean() < 0.03
    assert torch.cosine_similarity(got_grad, want_grad, dim=0) > 0.99


def test_a_run_on_the_device(tiny_model, shapes, tmp_path):
    cfg = grpo.Config(
        model=tiny_model,
        data=shapes,
        output=str(tmp_path),
        max_steps=3,
        prompts_per_step=4,
        num_generations=4,
        max_completion_length=12,
        beta=0.01,
        num_iterations=2,
        eval_data=shapes,
        save_every=2,
        train_vision=True,
    )
    grpo.main(cfg)
    rows = read_rows(tmp_path / "metrics.jsonl")[1:]
    assert len(rows) == 3
    for row in rows:
        assert all(math.isfinite(value) for value in row.values())
        assert row["sampling/logp_difference_mean"] < 0.02
        assert row["memory_gib"] > 0
