"""Gated DeltaNet on packed sequences: against the recurrence, step by step, and against the model of transformers.

Guards against: states that reach another prompt's completions, states of a prompt that ends in padding or within the
convolution's width, gradients that do not flow from the completions into their prompt, and rounding of the decays.
"""

import copy
import importlib.metadata
import importlib.util

import pytest
import torch
import torch.nn.functional as F

from common.errors import UserError
from packing import Sequences, pack, split_groups

pytest.importorskip("parts.families", reason="needs parts/families, which is not here")

from parts.families import delta_net
from parts.families.delta_net import causal_conv, check_kernels, gated_delta_rule
from policy.families import language_model
from policy.forward import enable_packed_forward, token_logprobs
from tests.helpers.models import build, make_group, plain_logprobs

LENGTHS = [1, 3, 64, 65, 150, 2]


def random_inputs(lengths, heads=4, key_heads=2, e=8, v=6):
    g = torch.Generator().manual_seed(0)
    t = sum(lengths)
    q, k = (torch.randn(t, key_heads, e, generator=g, dtype=torch.float64) for _ in range(2))
    values = torch.randn(t, heads, v, generator=g, dtype=torch.float64)
    decay = -F.softplus(torch.randn(t, heads, generator=g, dtype=torch.float64) - 2)
    beta = torch.randn(t, heads, generator=g, dtype=torch.float64).sigmoid()
    state = torch.randn(len(lengths), heads, e, v, generator=g, dtype=torch.float64)
    return [x.requires_grad_() for x in (q, k, values, decay, beta, state)]


def step_by_step(q, k, v, decay, beta, state, lengths):
    """The recurrence as the paper states it, one token and one sequence at a time."""
    heads = v.shape[1] // q.shape[1]
    q, k = ((x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).repeat_interleave(heads, 1) for x in (q, k))
    outputs, states, start = [], [], 0
    for s, length in zip(state, lengths):
        for t in range(start, start + length):
            s = decay[t].exp()[:, None, None] * s
            update = beta[t][:, None] * (v[t] - torch.einsum("hev,he->hv", s, k[t]))
            s = s + torch.einsum("he,hv->hev", k[t], update)
            outputs.append(torch.einsum("hev,he->hv", s, q[t]) * q.shape[-1] ** -0.5)
        states.append(s)
        start += length
    return torch.stack(outputs), torch.stack(states)


@pytest.mark.parametrize("with_state", [True, False])
def test_chunks_equal_the_recurrence_step_by_step(with_state):
    inputs = random_inputs(LENGTHS)
    state = inputs[-1] if with_state else torch.zeros_like(inputs[-1])
    want = step_by_step(*inputs[:-1], state, LENGTHS)
    got = gated_delta_rule(*inputs[:-1], state if with_state else None, Sequences(LENGTHS))
    differentiated = inputs if with_state else inputs[:-1]
    g = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=g, dtype=x.dtype) for x in want]
    gradients = [
        torch.autograd.grad(sum((x * w).sum() for x, w in zip(out, weights)), differentiated) for out in (want, got)
    ]
    for x, y in zip(want, got):
        torch.testing.assert_close(y, x, atol=1e-9, rtol=0)
    for x, y in zip(*gradients):
        torch.testing.assert_close(y, x, atol=1e-8, rtol=0)
        assert x.abs().max() > 0.01


def test_the_convolution_continues_from_its_state():
    """A sequence cut in two at any place, with the state in between, gives what the whole sequence gives."""
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(9, 5, generator=g, dtype=torch.float64), torch.randn(5, 4, generator=g, dtype=torch.float64)
    want = F.silu(F.conv1d(F.pad(x.T, (3, 0))[None], weight[:, None], groups=5))[0].T
    for cut in range(1, 9):
        first, state = causal_conv(x[:cut], weight, None, Sequences([cut]))
        rest, _ = causal_conv(x[cut:], weight, state, Sequences([9 - cut]))
        torch.testing.assert_close(torch.cat([first, rest]), want, atol=1e-12, rtol=0)
    both, _ = causal_conv(torch.cat([x, x[:2]]), weight, None, Sequences([9, 2]))
    torch.testing.assert_close(both, torch.cat([want, want[:2]]), atol=1e-12, rtol=0)


# For each group: number of text tokens, image grids in patches, completion lengths. Shorter than the convolution, of
# length one, longer than a chunk, and with several images.
GROUPS = [(2, [], [1, 2, 5]), (1, [], [70, 1]), (70, [], [3, 130]), (3, [(4, 4), (2, 6)], [4, 1]), (150, [], [66])]


def slow_decay(model):
    """Give the heads decays between fast and slow, as trained models have them."""
    for layer in language_model(model).layers:
        if hasattr(layer, "linear_attn"):
            heads = len(layer.linear_attn.A_log)
            layer.linear_attn.A_log.data = torch.linspace(0.01, 1, heads).log()
    return model


@pytest.mark.parametrize("budget", [10**6, 140])
def test_packed_logprobs_and_gradients_equal_the_model_of_transformers(budget):
    """With the smaller budget, groups are split over several micro-batches, each with the prompt."""
    plain = slow_decay(build("qwen3_5"))
    packed = copy.deepcopy(plain)
    enable_packed_forward(packed)
    g = torch.Generator().manual_seed(1)
    groups = [make_group(plain, "qwen3_5", text, grids, lengths, g) for text, grids, lengths in GROUPS]
    batches = [pack(part) for part in split_groups(groups, budget)]
    prompts = sum(len(batch.segments.q_lens) - len(batch.lengths) for batch in batches)
    assert prompts == len(GROUPS) if len(batches) == 1 else prompts > len(GROUPS)
    want = torch.cat([plain_logprobs(plain, group, c.ids) for group in groups for c in group.completions])
    got = torch.cat([token_logprobs(packed, batch)[0] for batch in batches])
    assert want.std() > 0.3
    torch.testing.assert_close(got, want, atol=5e-5, rtol=0)
    weights = torch.randn(len(want), generator=g)
    (want * weights).sum().backward()
    (got * weights).sum().backward()
    for (name, p), q in zip(plain.named_parameters(), packed.parameters(), strict=True):
        if p.grad is not None:
            scale = max(1.0, p.grad.abs().max().item())
            torch.testing.assert_close(
                q.grad / scale, p.grad / scale, atol=2e-4, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_a_prompt_state_reaches_its_own_completions_only():
    model = slow_decay(build("qwen3_5"))
    enable_packed_forward(model)
    g = torch.Generator().manual_seed(2)
    groups = [make_group(model, "qwen3_5", 9, [], [4, 3], g) for _ in range(2)]
    before, _ = token_logprobs(model, pack(groups))
    groups[0].prompt.ids[2] += 1
    after, _ = token_logprobs(model, pack(groups))
    changed = (before != after).tolist()
    assert all(changed[:7]) and not any(changed[7:])


@pytest.mark.parametrize(
    ("installed", "triton", "hopper", "head_dim", "problem"),
    [
        (set(), "3.6.0", True, 128, "install requirements-gpu.txt"),
        ({"fla"}, "3.6.0", True, 128, "Triton 3.6.0 computes wrong gradients"),
        ({"fla"}, "3.7.1", True, 128, None),
        ({"fla"}, "3.6.0", False, 16, None),
        ({"fla", "tilelang"}, "3.6.0", True, 16, "heads of 16 dimensions hangs on this GPU"),
        ({"fla", "tilelang"}, "3.6.0", True, 32, None),
    ],
)
def test_kernels_that_would_compute_wrong_gradients_or_hang_are_refused(
    installed, triton, hopper, head_dim, problem, monkeypatch
):
    """What is installed and which GPU there is are stand-ins; the check reads nothing else of them."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"triton": triton}[name])
    monkeypatch.setattr(delta_net, "_is_hopper", lambda device: hopper)
    config = build("qwen3_5").config
    config.text_config.linear_key_head_dim = head_dim
    if problem is None:
        return check_kernels(config, torch.device("cuda"))
    with pytest.raises(UserError, match=problem):
        check_kernels(config, torch.device("cuda"))
