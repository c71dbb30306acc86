"""FlashAttention 4 as a custom operator (`torch.library.custom_op`), which torch.compile takes into its graphs.

torch.compile cannot trace the package's own function. A decoder layer would have graph breaks around it, and each of
its graphs costs time on the host.

Shapes: T queries, K keys, H query heads, H_kv key and value heads, E head dimension.
"""

import os

import torch
from torch import Tensor

HEAD_DIM = 128  # the only one measured; for others, such as 16 and 80, the backward pass of 4.0.0b19 is inconsistent
MIN_LONGEST = 256  # least length to pass: below a block (80 or 128), the backward pass would be compiled anew


def is_available() -> bool:
    """Return whether FlashAttention 4 is installed and this is a Hopper GPU, on which it was tried.

    It is faster than torch's kernel, but has to be compiled, once for each user and machine.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return False
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", os.path.expanduser("~/.cache/flash_attention_4"))
    try:
        import flash_attn.cute  # noqa: F401
    except ImportError:
        return False
    return True


@torch.library.custom_op("grpo_vlm::flash_attention", mutates_args=())
def attend(  # noqa: PLR0913 - the lengths of the segments
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute causal attention of queries (T, H, E) to keys and values (K, H_kv, E), one segment at a time.

    `cu_q` and `cu_k` (segments + 1,) are the cumulative lengths of the segments, `max_q` and `max_k` the largest
    lengths. Returns the result (T, H, E), and the log-sum-exp of the scores (H, T), which the gradients need.
    """
    from flash_attn.cute.interface import _flash_attn_fwd

    out, lse, *_ = _flash_attn_fwd(
        q,
        k,
        v,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        max_seqlen_q=max_q,
        max_seqlen_k=max_k,
        softmax_scale=scale,
        causal=True,
        pack_gqa=False,  # a quarter faster than with it (docs/log.md)
        return_lse=True,
    )
    return out, lse


@torch.library.custom_op("grpo_vlm::flash_attention_backward", mutates_args=())
def _backward(  # noqa: PLR0913
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd

    return _flash_attn_bwd(
        q,
        k,
        v,
        out,
        grad,
        lse,
        softmax_scale=scale,
        causal=True,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        max_seqlen_q=max(max_q, MIN_LONGEST),
        max_seqlen_k=max(max_k, MIN_LONGEST),
    )


# What torch.compile needs to know about the operators: the shapes of their results, and the gradient.


@attend.register_fake
def _(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@_backward.register_fake
def _(_: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: object) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_q, cu_k, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, cu_q, cu_k)


def _gradients(ctx, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None, None, None


attend.register_autograd(_gradients, setup_context=_save)
