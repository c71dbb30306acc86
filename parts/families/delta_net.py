"""Shared-prefix packing for Gated DeltaNet (arXiv:2412.06464), the linear attention of Qwen3.5.

Three of four layers of Qwen3.5 have no keys to attend to. Each of their heads reads and writes a matrix S, its state:

    S_t = exp(g_t) S_{t-1} + k_t u_tᵀ        u_t = β_t (v_t - exp(g_t) S_{t-1}ᵀ k_t)        o_t = S_tᵀ q_t

The state first decays (g_t ≤ 0). Then the value that it holds for the key k_t moves towards v_t, by the fraction β_t:
the delta rule. Before that, a causal convolution mixes q, k and v with those of the three tokens before.

Such a layer is a function of tokens and states. On a packed sequence, it runs over all prompts, and then over all
completions, each of which starts with the states that its prompt ended with:

    states after a prompt:       the last inputs of the convolution, and S
    states before c1, ..., cG:   copies of them, so that autograd adds up the G gradients

Everything else, such as projections, gates and norms, works token by token on the packed sequence. On a GPU, the
convolution and the delta rule are variable-length kernels of flash-linear-attention; on a CPU, they are the functions
below, which pad the sequences to the longest.

Shapes: T packed tokens, N sequences (all prompts or all completions), L tokens of the longest, C channels of q, k and v
together, W width of the convolution, H value heads, H_k key heads, E key dimension, V value dimension.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from common.errors import UserError
from packing import CHUNK, Segments, Sequences
from policy.families import language_model

States = tuple[Tensor, Tensor]  # of the convolution and of the delta rule
MIN_HEAD_DIM = 32  # with 16, a backward pass with tilelang's kernel never ended on an H200 (docs/log.md)


def prepare_delta_nets(model: transformers.PreTrainedModel) -> None:
    """Let the Gated DeltaNet layers of `model` accept packed sequences, in place; other models are not changed."""
    for layer in language_model(model).layers:
        if (net := getattr(layer, "linear_attn", None)) is not None:
            net.forward = functools.partial(_forward, net, net.forward)


def check_kernels(config: transformers.PreTrainedConfig, device: torch.device) -> None:
    """Raise UserError if the model with this `config` has Gated DeltaNet layers that cannot be trained on `device`."""
    text = config.get_text_config()
    if device.type != "cuda" or "linear_attention" not in (getattr(text, "layer_types", None) or ()):
        return
    if importlib.util.find_spec("fla") is None:
        raise UserError(f"{config.model_type} on a GPU needs flash-linear-attention: install requirements-gpu.txt")
    if not _is_hopper(device):
        return
    triton = Version(importlib.metadata.version("triton"))
    has_tilelang = importlib.util.find_spec("tilelang") is not None
    if not has_tilelang and Version("3.4.0") <= triton < Version("3.7.1"):
        raise UserError(
            f"Triton {triton} computes wrong gradients for {config.model_type} on this GPU: install tilelang "
            "(requirements-gpu.txt names its version) or Triton 3.7.1"
        )
    smallest = min(text.linear_key_head_dim, text.linear_value_head_dim)
    if has_tilelang and smallest < MIN_HEAD_DIM:
        raise UserError(
            f"{config.model_type}: linear attention with heads of {smallest} dimensions hangs on this GPU: use a model "
            f"with heads of at least {MIN_HEAD_DIM}"
        )


def _is_hopper(device: torch.device | None = None) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def _forward(
    net: nn.Module,
    original_forward: Callable[..., Tensor],
    hidden_states: Tensor,
    segments: Segments | None = None,
    **inputs: object,
) -> Tensor:
    """Run `net` on a packed sequence (1, T, D), or as transformers does if there are no `segments`."""
    if segments is None:
        return original_forward(hidden_states=hidden_states, **inputs)
    hidden = hidden_states[0]
    mixed = net.in_proj_qkv(hidden)  # (T, C)
    beta = net.in_proj_b(hidden).sigmoid()  # (T, H)
    decay = -net.A_log.float().exp() * F.softplus(net.in_proj_a(hidden).float() + net.dt_bias)  # (T, H)
    out = _look_back(net, mixed, decay, beta, segments)  # (T, H, V)
    gate = net.in_proj_z(hidden).view_as(out)
    out = net.norm(out.flatten(0, 1), gate.flatten(0, 1)).view(len(hidden), -1)
    return net.out_proj(out)[None]


@torch.compiler.disable
def _look_back(net: nn.Module, mixed: Tensor, decay: Tensor, beta: Tensor, segments: Segments) -> Tensor:
    """Run the operations of `net` that depend on earlier tokens: over all prompts, then over all completions.

    `mixed` is (T, C), `decay` and `beta` are (T, H); the result is (T, H, V).
    """
    prompts, completions = segments.sequences
    sizes = [sum(prompts.lengths), sum(completions.lengths)]
    of_prompts, of_completions = zip(*(x.split(sizes) for x in (mixed, decay, beta)))
    from_prompts, states = _with_states(net, prompts, None, *of_prompts)
    conv_state, rule_state = (state[segments.prompt_of] for state in states)
    from_completions, _ = _with_states(net, completions, (conv_state, rule_state), *of_completions)
    return torch.cat([from_prompts, from_completions])


def _with_states(
    net: nn.Module, sequences: Sequences, states: States | None, mixed: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, States]:
    """Run convolution and delta rule over `sequences`, whose tokens lie one sequence after the other.

    `states` are those before each sequence; None: all zero. Returns the outputs (tokens, H, V), and the states after
    each sequence: the last inputs of the convolution (N, C, at least W - 1), and those of the delta rule (N, H, E, V).
    """
    before_conv, before_rule = states or (None, None)
    conv, rule = (_conv_kernel, _rule_kernel) if mixed.is_cuda else (causal_conv, gated_delta_rule)
    mixed, after_conv = conv(mixed, net.conv1d.weight[:, 0], before_conv, sequences)
    q, k, v = mixed.split([net.key_dim, net.key_dim, net.value_dim], dim=-1)
    q, k = (x.unflatten(-1, (-1, net.head_k_dim)) for x in (q, k))
    v = v.unflatten(-1, (-1, net.head_v_dim))
    out, after_rule = rule(q, k, v, decay, beta, before_rule, sequences)
    return out, (after_conv, after_rule)


# --- on a GPU -----------------------------------------------------------------------------------------------------

# One variant of each kernel of flash-linear-attention: block sizes, warps, stages. The library would compile and time
# up to 25 variants of each, for several kinds of input, which took more than four minutes on an H200 (docs/log.md).
# These variants ran there; on GPUs that are not Hopper, the library still chooses variants that fit their memory.
HOPPER_VARIANTS = {
    "modules.norm.l2norm.l2norm_fwd_kernel": ({"BT": 32}, 4, 2),
    "modules.norm.l2norm.l2norm_bwd_kernel": ({"BT": 32}, 4, 2),
    "modules.causal_conv1d.ops.causal_conv1d_fwd_kernel": ({"BD": 64}, 4, 2),
    "modules.causal_conv1d.ops.causal_conv1d_bwd_kernel": ({"BD": 64}, 4, 2),
    "ops.utils.cumsum.chunk_local_cumsum_scalar_kernel": ({}, 2, 2),
    "ops.gated_delta_rule.chunk_fwd.chunk_gated_delta_rule_fwd_kkt_solve_kernel": ({"BK": 64}, 2, 2),
    "ops.gated_delta_rule.wy_fast.recompute_w_u_fwd_kernel": ({}, 4, 3),
    "ops.gated_delta_rule.wy_fast.prepare_wy_repr_bwd_kernel": ({}, 4, 2),
    "ops.common.chunk_delta_h.chunk_gated_delta_rule_fwd_kernel_h_blockdim64": ({"BV": 32}, 4, 3),
    "ops.common.chunk_delta_h.chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": ({"BV": 32}, 4, 2),
    "ops.common.chunk_o.chunk_fwd_kernel_o": ({"BK": 64, "BV": 64}, 4, 3),
    "ops.common.chunk_o.chunk_bwd_kernel_dv_local": ({}, 4, 3),
}


@functools.cache
def load_kernels() -> tuple[Callable, Callable]:
    """Return flash-linear-attention's convolution and delta rule; on a Hopper GPU, each kernel has one variant."""
    import triton
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    for name, (blocks, warps, stages) in HOPPER_VARIANTS.items() if _is_hopper() else ():
        module, kernel = name.rsplit(".", 1)
        tuner = getattr(importlib.import_module(f"fla.{module}"), kernel)
        while not hasattr(tuner, "configs"):
            tuner = tuner.fn  # inside triton.heuristics
        tuner.configs = [triton.Config(blocks, num_warps=warps, num_stages=stages)]
    return causal_conv1d, chunk_gated_delta_rule


def _conv_kernel(x: Tensor, weight: Tensor, state: Tensor | None, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """`causal_conv` by flash-linear-attention; its states hold W tokens, not W - 1."""
    conv, _ = load_kernels()
    out, last = conv(
        x[None],
        weight,
        initial_state=state,
        output_final_state=True,
        activation="silu",
        cu_seqlens=sequences.cu,
        chunk_indices=sequences.chunks,
    )
    return out[0], last


def _rule_kernel(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None, sequences: Sequences
) -> tuple[Tensor, Tensor]:
    """`gated_delta_rule` by flash-linear-attention."""
    tokens = (x[None] for x in (q, k, v, decay, beta))
    _, delta_rule = load_kernels()
    out, last = delta_rule(
        *tokens,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=sequences.cu,
        chunk_indices=sequences.chunks,
    )
    return out[0], last


# --- on a CPU -----------------------------------------------------------------------------------------------------


def causal_conv(x: Tensor, weight: Tensor, state: Tensor | None, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Mix each channel of `x` (tokens, C) with the W - 1 tokens before, by `weight` (C, W), and apply SiLU.

    `state` (N, C, W - 1) holds the tokens before each sequence; None: zeros. Returns the result and the last W - 1
    tokens of each sequence; for a sequence shorter than that, these begin with tokens of `state`.
    """
    channels, width = weight.shape
    padded = _pad(x, sequences).transpose(1, 2)  # (N, C, L)
    if state is None:
        state = padded.new_zeros(len(padded), channels, width - 1)
    padded = torch.cat([state, padded], dim=-1)
    mixed = F.silu(F.conv1d(padded, weight[:, None], groups=channels)).transpose(1, 2)  # (N, L, C)
    last = torch.tensor(sequences.lengths)[:, None, None] + torch.arange(width - 1)
    return _unpad(mixed, sequences), padded.gather(-1, last.expand(-1, channels, -1))


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None, sequences: Sequences
) -> tuple[Tensor, Tensor]:
    """Return the outputs (tokens, H, V) of the delta rule and the states (N, H, E, V) after each sequence.

    `q` and `k` are (tokens, H_k, E), `v` is (tokens, H, V), `decay` (the g above) and `beta` are (tokens, H). `q` and
    `k` are normalised first. `state` holds the states before each sequence; None: zeros. States are at least float32.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    heads = v.shape[1] // q.shape[1]  # value heads that share a key head
    q, k = (_normalised(x.to(dtype)).repeat_interleave(heads, dim=1) for x in (q, k))
    tokens = (q * q.shape[-1] ** -0.5, k, v, decay, beta)
    chunks = (_pad(x.to(dtype), sequences).transpose(1, 2).split(CHUNK, dim=2) for x in tokens)  # (N, H, ≤ CHUNK, ...)
    if state is None:
        state = q.new_zeros(len(sequences.lengths), v.shape[1], q.shape[-1], v.shape[-1])
    state, outputs = state.to(dtype), []
    for chunk in zip(*chunks):
        out, state = _rule_in_chunk(state, *chunk)
        outputs.append(out)
    return _unpad(torch.cat(outputs, dim=2).transpose(1, 2), sequences).to(v.dtype), state


def _rule_in_chunk(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the tokens of one chunk together (arXiv:2406.06484, section 3, with decay).

    Let G_t be the sum of the decays from the start of the chunk to its token t, S the state before the chunk, and
    A_ts = β_t (k_tᵀ k_s) e^{G_t - G_s} for s < t, else 0. The updates u_t solve (I + A) u = β (v - e^G (kᵀ S)). Then

        o_t = e^{G_t} Sᵀ q_t + Σ_{s ≤ t} e^{G_t - G_s} (q_tᵀ k_s) u_s        S' = e^{G_L} S + Σ_s e^{G_L - G_s} k_s u_sᵀ
    """
    total, beta = decay.cumsum(-1)[..., None], beta[..., None]  # G and β: (N, H, L, 1)
    past = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    weights = (total - total.mT).masked_fill(~past, -torch.inf).exp()  # e^{G_t - G_s} for s ≤ t, else 0
    system = (beta * (k @ k.mT) * weights).tril(-1)
    wanted = beta * (v - total.exp() * (k @ state))
    updates = _inverse(system) @ wanted
    out = total.exp() * (q @ state) + (q @ k.mT * weights) @ updates
    last = total[..., -1:, :]
    return out, last.exp() * state + (k * (last - total).exp()).mT @ updates


def _inverse(a: Tensor) -> Tensor:
    """Return (I + A)⁻¹ for strictly lower triangular matrices A (..., L, L).

    The inverses of blocks on the diagonal give those of blocks of twice the size:

        (P 0; R Q)⁻¹ = (P⁻¹ 0; -Q⁻¹ R P⁻¹ Q⁻¹)

    A triangular solver of LAPACK would give the same, but it passes every single matrix between threads, which
    on a busy CPU took ten times as long as everything else.
    """
    index = torch.arange(a.shape[-1])
    inverse, size = torch.eye(len(index), dtype=a.dtype).expand_as(a), 1
    while size < len(index):
        row, column = index[:, None] // size, index // size
        below = (row == column + 1) & (row % 2 == 1)  # the blocks R
        inverse = inverse - inverse @ (a * below) @ inverse
        size *= 2
    return inverse


def _normalised(x: Tensor) -> Tensor:
    """Scale vectors to length 1, with the ε of the models' own code."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def _pad(x: Tensor, sequences: Sequences) -> Tensor:
    """Return `x` (tokens, ...) as (N, L, ...), with zeros after each sequence.

    Tokens of zeros do not change the state of the delta rule.
    """
    return pad_sequence(x.split(sequences.lengths), batch_first=True)


def _unpad(x: Tensor, sequences: Sequences) -> Tensor:
    """Return the tokens of `x` (N, L, ...), one sequence after the other."""
    return torch.cat([tokens[:length] for tokens, length in zip(x, sequences.lengths)])
