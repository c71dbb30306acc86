"""Shared-prefix packing for Gated DeltaNet (arXiv:2412.06464), the linear attention of Qwen3.5.

Three of four layers of Qwen3.5 have no keys to attend to. Each of their heads reads and writes a matrix S, its state:

    S_t = exp(g_t) S_{t-1} + k_t u_tᵀ        u_t = β_t (v_t - exp(g_t) S_{t-1}ᵀ k_t)        o_t = S_tᵀ q_t

The state first decays (g_t ≤ 0). What it then holds for the key k_t is replaced by the value v_t, as far as β_t says: the
delta rule. Before that, a causal convolution mixes q, k and v with those of the three tokens before.

Such a layer is a function of tokens and states. On a packed sequence, it runs over all prompts, and then over all
completions, each of which starts with the states that its prompt ended with:

    states after a prompt:       the last inputs of the convolution, and S
    states before c1, ..., cG:   copies of them, so that autograd adds up the G gradients

Everything else, such as projections, gates and norms, works token by token on the packed sequence.

Shapes: T packed tokens, N sequences (all prompts or all completions), L tokens of the longest, C channels of q, k and v
together, W width of the convolution, H value heads, H_k key heads, E key dimension, V value dimension.
"""

import functools

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from packing import Segments
from policy.families import language_model

CHUNK = 64  # tokens whose updates of the state are computed together


def prepare_delta_nets(model: transformers.PreTrainedModel) -> None:
    """Let the Gated DeltaNet layers of `model` accept packed sequences, in place; other models are not changed."""
    for layer in language_model(model).layers:
        if (net := getattr(layer, "linear_attn", None)) is not None:
            net.forward = functools.partial(_forward, net, net.forward)


def _forward(
    net: nn.Module, plain_forward, hidden_states: Tensor, segments: Segments | None = None, **inputs
) -> Tensor:
    """Run `net` on a packed sequence (1, T, D), or as transformers does if there are no `segments`."""
    if segments is None:
        return plain_forward(hidden_states=hidden_states, **inputs)
    hidden = hidden_states[0]
    mixed = net.in_proj_qkv(hidden)  # (T, C)
    beta = net.in_proj_b(hidden).sigmoid()  # (T, H)
    decay = -net.A_log.float().exp() * F.softplus(net.in_proj_a(hidden).float() + net.dt_bias)  # (T, H)

    num_prompts = len(segments.q_lens) - len(segments.prompt_of)
    lengths = segments.q_lens[:num_prompts], segments.q_lens[num_prompts:]
    of_prompts, of_completions = zip(*(x.split([sum(each) for each in lengths]) for x in (mixed, decay, beta)))
    from_prompts, states = _look_back(net, *of_prompts, lengths[0], None)
    states = tuple(state[segments.prompt_of] for state in states)
    from_completions, _ = _look_back(net, *of_completions, lengths[1], states)

    out = torch.cat([from_prompts, from_completions])  # (T, H, V)
    gate = net.in_proj_z(hidden).view_as(out)
    out = net.norm(out.flatten(0, 1), gate.flatten(0, 1)).view(len(hidden), -1)
    return net.out_proj(out)[None]


def _look_back(
    net: nn.Module, mixed: Tensor, decay: Tensor, beta: Tensor, lengths: list[int], states: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Run the two operations of `net` that depend on earlier tokens.

    `mixed`, `decay` and `beta` hold the tokens of the sequences, one sequence after the other. Returns their outputs
    (tokens, H, V), and the states after each sequence: (N, C, W - 1) of the convolution and (N, H, E, V) of the delta
    rule. `states` are those before each sequence; None: all zero.
    """
    before_conv, before_rule = states or (None, None)
    mixed, after_conv = causal_conv(mixed, net.conv1d.weight[:, 0], before_conv, lengths)
    q, k, v = mixed.split([net.key_dim, net.key_dim, net.value_dim], dim=-1)
    q, k = (x.unflatten(-1, (-1, net.head_k_dim)) for x in (q, k))
    v = v.unflatten(-1, (-1, net.head_v_dim))
    out, after_rule = gated_delta_rule(q, k, v, decay, beta, before_rule, lengths)
    return out, (after_conv, after_rule)


def causal_conv(x: Tensor, weight: Tensor, state: Tensor | None, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Mix each channel of `x` (tokens, C) with the W - 1 tokens before, by `weight` (C, W), and apply SiLU.

    `state` (N, C, W - 1) holds the tokens before each sequence, None: zeros. Returns the result and the last W - 1
    tokens of each sequence, in which tokens from before a short sequence may be included.
    """
    channels, width = weight.shape
    padded = pad_sequence(x.split(lengths), batch_first=True).transpose(1, 2)  # (N, C, L)
    if state is None:
        state = padded.new_zeros(len(lengths), channels, width - 1)
    padded = torch.cat([state, padded], dim=-1)
    mixed = F.silu(F.conv1d(padded, weight[:, None], groups=channels)).transpose(1, 2)  # (N, L, C)
    last = torch.tensor(lengths, device=x.device)[:, None, None] + torch.arange(width - 1, device=x.device)
    return _unpad(mixed, lengths), padded.gather(-1, last.expand(-1, channels, -1))


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None, lengths: list[int]
) -> tuple[Tensor, Tensor]:
    """Return the outputs (tokens, H, V) of the delta rule and the states (N, H, E, V) after each sequence.

    `q` and `k` are (tokens, H_k, E), `v` is (tokens, H, V), `decay` (the g above) and `beta` are (tokens, H). `q` and `k`
    are normalised first. `state` holds the states before each sequence; None: zeros.

    The tokens of a chunk are computed together (arXiv:2406.06484, section 3, with decay). Let G_t be the sum of the
    decays from the start of the chunk to its token t, S the state before the chunk, and A_ts = β_t (k_tᵀ k_s) e^{G_t -
    G_s} for s < t, else 0. The updates u_t solve (I + A) u = β v - β e^G (kᵀ S). Then

        o_t = e^{G_t} Sᵀ q_t + Σ_{s ≤ t} e^{G_t - G_s} (q_tᵀ k_s) u_s        S' = e^{G_C} S + Σ_s e^{G_C - G_s} k_s u_sᵀ
    """
    dtype, out_dtype = torch.promote_types(q.dtype, torch.float32), v.dtype
    heads = v.shape[1] // q.shape[1]  # value heads that share a key head
    q, k = (_normalised(x.to(dtype)).repeat_interleave(heads, dim=1) for x in (q, k))
    longest = -(-max(lengths) // CHUNK) * CHUNK if max(lengths) > CHUNK else max(lengths)
    tokens = (q * q.shape[-1] ** -0.5, k, v, decay, beta)
    q, k, v, decay, beta = (_pad(x.to(dtype), lengths, longest) for x in tokens)
    if state is None:
        state = q.new_zeros(len(lengths), v.shape[1], q.shape[-1], v.shape[-1])
    state, outputs = state.to(dtype), []
    for q, k, v, decay, beta in zip(*(x.split(CHUNK, dim=2) for x in (q, k, v, decay, beta))):
        total = decay.cumsum(-1)[..., None]  # G: (N, H, chunk, 1)
        past = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        weights = (total - total.mT).masked_fill(~past, -torch.inf).exp()  # e^{G_t - G_s} for s ≤ t
        beta = beta[..., None]
        system = (beta * (k @ k.mT) * weights).tril(-1)
        wanted = beta * (v - total.exp() * (k @ state))
        updates = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        outputs.append(total.exp() * (q @ state) + (q @ k.mT * weights) @ updates)
        last = total[..., -1:, :]
        state = last.exp() * state + (k * (last - total).exp()).mT @ updates
    return _unpad(torch.cat(outputs, dim=2).transpose(1, 2), lengths).to(out_dtype), state


def _normalised(x: Tensor) -> Tensor:
    """Scale vectors to length 1, with the ε of the models' own code."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def _pad(x: Tensor, lengths: list[int], longest: int) -> Tensor:
    """Return the sequences of `x` (tokens, H, ...) as (N, H, longest, ...), with zeros after each.

    A token of zeros does not change the state.
    """
    padded = pad_sequence(x.split(lengths), batch_first=True).transpose(1, 2)
    extra = longest - padded.shape[2]
    return F.pad(padded, (0, 0) * (x.ndim - 2) + (0, extra))


def _unpad(x: Tensor, lengths: list[int]) -> Tensor:
    """Return the tokens of the sequences in `x` (N, L, ...), one sequence after the other."""
    return torch.cat([sequence[:length] for sequence, length in zip(x, lengths)])
