"""FlashAttention 4 as a custom operator: its gradients, and the graphs that torch.compile makes with it.

Its kernels need a Hopper GPU (tests/test_gpu.py). Here, functions of the same names compute the same on the CPU.
"""

import itertools
import random
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.attention.varlen
from torch._dynamo.backends.debugging import aot_eager

import packing
from packing import CAUSAL, EVERYTHING, pack
from policy.batches import _dummy_group
from policy.forward import enable_packed_forward, token_logprobs
from policy.model import Policy
from tests.helpers.models import build, groups_of, make_group

pytest.importorskip("parts.fast", reason="needs parts/fast, which is not here")

from parts.fast import flash_attention

HEAD_DIM = 16  # of the tiny models


def masked_scores(q, k, options, min_longest=1):
    """Check the options of a call; yield the queries and keys of each segment as slices, and their scores (H, q, k)."""
    cu_q, cu_k = (options[name].tolist() for name in ("cu_seqlens_q", "cu_seqlens_k"))
    longest = [max(min_longest, *(b - a for a, b in itertools.pairwise(cu))) for cu in (cu_q, cu_k)]
    assert longest == [options["max_seqlen_q"], options["max_seqlen_k"]]
    assert options["causal"]
    for i in range(len(cu_q) - 1):
        rows, cols = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        keys = k[cols].repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = torch.einsum("qhe,khe->hqk", q[rows], keys) * options["softmax_scale"]
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(scores.shape[2] - scores.shape[1] + 1)
        yield rows, cols, scores.masked_fill(hidden, -torch.inf)


def forward(q, k, v, **options):
    assert options["return_lse"]
    out, lse, per_head = q.new_empty(q.shape), q.new_empty(q.shape[1], len(q)), q.shape[1] // k.shape[1]
    for rows, cols, scores in masked_scores(q, k, options):
        out[rows] = torch.einsum("hqk,khe->qhe", scores.softmax(-1), v[cols].repeat_interleave(per_head, 1))
        lse[:, rows] = scores.logsumexp(-1)
    return out, lse, None, None


def backward(q, k, v, out, grad, lse, **options):
    """The backward pass of FlashAttention-2 (arXiv:2307.08691, algorithm 2), without tiles."""
    dq, dk, dv, per_head = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), q.shape[1] // k.shape[1]
    for rows, cols, scores in masked_scores(q, k, options, flash_attention.MIN_LONGEST):
        p = (scores - lse[:, rows, None]).exp()
        keys, values = (x[cols].repeat_interleave(per_head, 1) for x in (k, v))
        dp = torch.einsum("qhe,khe->hqk", grad[rows], values)
        ds = p * (dp - (grad[rows] * out[rows]).sum(-1).T[..., None]) * options["softmax_scale"]
        dq[rows] = torch.einsum("hqk,khe->qhe", ds, keys)
        of_heads = torch.einsum("hqk,qhe->khe", ds, q[rows]), torch.einsum("hqk,qhe->khe", p, grad[rows])
        dk[cols], dv[cols] = (x.unflatten(1, (-1, per_head)).sum(2) for x in of_heads)
    return dq, dk, dv


@pytest.fixture
def on_cpu(monkeypatch):
    """Let attention on the CPU take the way that it takes on a Hopper GPU."""
    package = {name: ModuleType(name) for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface")}
    package["flash_attn.cute.interface"].__dict__.update(_flash_attn_fwd=forward, _flash_attn_bwd=backward)
    for name, module in package.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(packing, "_has_kernel", lambda q: True)
    monkeypatch.setattr(packing, "_flash_head_dim", lambda: HEAD_DIM)


def gradients(model, batch) -> torch.Tensor:
    model.zero_grad()
    logp, _ = token_logprobs(model, batch)
    (logp * torch.linspace(-1, 1, len(logp))).sum().backward()
    return torch.cat([logp.detach(), *(p.grad.flatten() for p in model.parameters() if p.grad is not None)])


def random_batch(model, family: str, rng: random.Random):
    lengths = [[rng.randint(1, 30) for _ in range(rng.randint(1, 8))] for _ in range(rng.randint(1, 4))]
    g = torch.Generator().manual_seed(rng.randint(0, 1000))
    return pack([make_group(model, family, rng.randint(3, 30), [], group, g) for group in lengths])


def test_it_is_an_operator_as_torch_requires(on_cpu):
    """Shapes without data, the gradient's registration and traces, also for queries that are not contiguous."""
    lengths = torch.tensor([0, 3, 8], dtype=torch.int32), torch.tensor([0, 3, 10], dtype=torch.int32), 5, 7
    q, k, v = (
        torch.randn(heads, n, HEAD_DIM).transpose(0, 1).requires_grad_() for heads, n in ((4, 8), (2, 10), (2, 10))
    )
    for tensors in ((q, k, v), [x.detach().contiguous().requires_grad_() for x in (q, k, v)]):
        torch.library.opcheck(flash_attention.attend, (*tensors, *lengths, 0.3))


@pytest.mark.parametrize(
    ("family", "graphs"),
    [("qwen2_5_vl", 2), ("qwen3_vl", 2), pytest.param("aria", 6, marks=pytest.mark.slow), ("qwen3_5", 6)],
)
def test_a_compiled_decoder_layer_is_one_graph_and_its_gradients_stay_the_same(family, graphs, on_cpu, monkeypatch):
    """The other graph computes log-probabilities. Only experts and linear attention divide a layer.

    No layer is compiled anew for other lengths, nor for a dummy micro-batch.
    """
    model, rng = build(family), random.Random(0)
    batches = [random_batch(model, family, rng) for _ in range(4)] + [pack([_dummy_group(Policy(model))])]
    with monkeypatch.context() as patch:
        patch.setattr(packing, "_has_kernel", lambda q: False)
        enable_packed_forward(model)
        want = [gradients(model, batch) for batch in batches]

    compile_with, compiled = torch.compile, []

    def count(graph, inputs):
        function = aot_eager(graph, inputs)
        compiled.append(graph)  # only now: torch discards the first one, to take numbers for constants
        return function

    torch.compiler.reset()  # forget what was compiled before
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile_with(function, dynamic=True, backend=count))
    enable_packed_forward(model, compiled=True)
    for batch, gradient in zip(batches, want):
        torch.testing.assert_close(gradients(model, batch), gradient, rtol=1e-3, atol=1e-4)
    assert len(compiled) == graphs


@pytest.mark.parametrize(
    ("head_dim", "window", "want"),
    [(128, CAUSAL, "4"), (64, CAUSAL, "torch"), (128, EVERYTHING, "torch"), (128, (7, 0), "torch")],
)
def test_flash_attention_4_gets_causal_attention_with_heads_of_128_only(monkeypatch, head_dim, window, want):
    called = []

    def attend(q, k, v, *lengths_and_scale):
        called.append(("4", *lengths_and_scale))
        return q, None

    def varlen_attn(q, k, v, *lengths, scale, window_size, **_):
        called.append(("torch", *lengths, scale))
        assert window_size == window
        return q

    monkeypatch.setattr(packing, "_has_kernel", lambda q: True)
    monkeypatch.setattr(packing, "_flash_head_dim", lambda: flash_attention.HEAD_DIM)
    monkeypatch.setattr(torch.ops.grpo_vlm, "flash_attention", attend)
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", varlen_attn)
    segments = pack(groups_of([[5, 3]])).segments
    q, k = torch.randn(18, 2, head_dim), torch.randn(38, 1, head_dim)
    packing.attend(q, k, k, (segments.cu_q, segments.cu_k), (segments.max_q, segments.max_k), 0.5, window)
    ((name, cu_q, cu_k, *numbers),) = called
    assert name == want
    assert numbers == [10, 15, 0.5]
    assert cu_q.tolist() == [0, 10, 15, 18]
    assert cu_k.tolist() == [0, 10, 25, 38]
