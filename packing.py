"""Shared-prefix packing: a prompt and its G completions as one sequence, the prompt computed once.

GRPO samples G completions of every prompt, so a plain trainer runs every prompt, image tokens and all, G times. Here
the policy runs once over

    segments, in packed order:   prompt, c1, ..., cG, prompt', c1', ...            T tokens in all
    keys of the prompt:          prompt                                            causal
    keys of completion cj:       prompt ++ cj                                      causal, aligned bottom-right
    positions of cj:             go on after the prompt's largest position         (M-RoPE: all three rows)
    log-probability of cj[0]:    from the prompt's last hidden state

Every layer but attention works token by token and needs no change; attention becomes one gather of keys and values and
one variable-length attention call. The result equals the plain one-sequence-at-a-time forward (tests/test_packing.py,
1e-5 in float32, gradients too).

Shapes: T packed tokens, K gathered keys, C completion tokens, S prompt tokens, L completion tokens of one completion,
H heads, E head dimension, D hidden size, V vocabulary, R rows of positions (3 with M-RoPE, else 1).
"""

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.records import Group, Rollout


@dataclass
class Segments:
    """Which packed tokens attend to which: the arguments of one variable-length attention call."""

    kv_index: Tensor
    """(K,) packed index of every key, segment after segment."""
    cu_q: Tensor
    """(segments + 1,) int32, cumulative query lengths."""
    cu_k: Tensor
    """(segments + 1,) int32, cumulative key lengths."""
    q_lens: list[int]
    """The lengths behind `cu_q`, on the host, so that no kernel launch waits for the device."""
    k_lens: list[int]
    """The lengths behind `cu_k`."""


@dataclass
class PackedBatch:
    """One micro-batch: several groups in one row of tokens."""

    input_ids: Tensor
    """(1, T); completion tokens as −1 − id, see `_completion_ids_back`"""
    position_ids: Tensor
    """(3, 1, T) with M-RoPE, else (1, T)"""
    segments: Segments
    predict_from: Tensor
    """(C,) packed index whose hidden state predicts each completion token."""
    targets: Tensor
    """(C,) the completion tokens themselves."""
    row_of_token: Tensor
    """(C,) 0, 0, ..., 1, ...: which of `rollouts` each completion token belongs to."""
    rollouts: list[Rollout]
    """the completions in packed order."""
    vision: dict[str, Tensor]
    """the prompts' vision inputs, joined, or `features`, what a frozen tower made of them; empty without images"""
    image_tokens: Tensor
    """packed indices of the image tokens that `features` belong to"""
    flop: float = 0.0
    """operations of a forward and backward pass, for the metrics"""
    dummy_vision: bool = False
    """no image here, but another rank has one and the vision tower is trained: run it on a blank image."""

    def column(self, name: str) -> Tensor:
        """(C,) the attribute `name` of the completions, token by token, on the batch's device."""
        values = [getattr(rollout, name) for rollout in self.rollouts]
        values = [v if isinstance(v, Tensor) else torch.full((len(r.ids),), v) for v, r in zip(values, self.rollouts)]
        return to_device(torch.cat(values), self.targets.device)

    def to(self, device: torch.device | str) -> "PackedBatch":
        move = functools.partial(to_device, device=torch.device(device))
        segments = replace(
            self.segments,
            kv_index=move(self.segments.kv_index),
            cu_q=move(self.segments.cu_q),
            cu_k=move(self.segments.cu_k),
        )
        tensors = {name: move(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors, segments=segments, vision={k: move(v) for k, v in self.vision.items()})


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`, copied while the host goes on: from ordinary host memory the copy would wait until the
    device has done all it was given, and the device then for the host."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def pack(groups: Sequence[Group]) -> PackedBatch:
    """Lay `groups` out as one sequence.

    Raises ValueError for a completion without tokens: it has nothing to train on, and dropping it is the caller's call.
    """
    ids, positions, images, kv, q_lens, k_lens, predict_from, rollouts = [], [], [], [], [], [], [], []
    t = 0  # packed tokens so far
    for group in groups:
        s = len(group.prompt.ids)
        prompt = torch.arange(t, t + s)
        ids.append(group.prompt.ids)
        positions.append(group.prompt.positions)
        if group.prompt.features is not None:
            images.append(t + (group.prompt.ids == group.prompt.image_token).nonzero()[:, 0])
        kv.append(prompt)
        q_lens.append(s)
        k_lens.append(s)
        t += s
        next_position = int(group.prompt.positions.max()) + 1
        for rollout in group.rollouts:
            length = len(rollout.ids)
            if length == 0:
                raise ValueError(f"a completion without tokens, of prompt {group.group_index}")
            own = torch.arange(t, t + length)
            ids.append(-1 - rollout.ids)
            positions.append((next_position + torch.arange(length)).expand(len(positions[-1]), -1))
            kv += [prompt, own]
            q_lens.append(length)
            k_lens.append(s + length)
            predict_from += [prompt[-1:], own[:-1]]
            rollouts.append(rollout)
            t += length
    position_ids = torch.cat(positions, dim=1)  # (R, T)
    with_images = [group.prompt for group in groups if group.prompt.vision]
    known = bool(with_images) and all(prompt.features is not None for prompt in with_images)
    inputs = [{"features": prompt.features} if known else prompt.vision for prompt in with_images]
    return PackedBatch(
        input_ids=torch.cat(ids)[None],
        position_ids=position_ids[:, None] if len(position_ids) > 1 else position_ids,
        segments=Segments(torch.cat(kv), _cumulative(q_lens), _cumulative(k_lens), q_lens, k_lens),
        predict_from=torch.cat(predict_from),
        targets=torch.cat([rollout.ids for rollout in rollouts]),
        row_of_token=torch.repeat_interleave(torch.tensor([len(rollout.ids) for rollout in rollouts])),
        rollouts=rollouts,
        vision={key: torch.cat([vision[key] for vision in inputs]) for key in (inputs or [{}])[0]},
        image_tokens=torch.cat([*images, torch.empty(0, dtype=torch.long)]),
    )


def pack_groups(groups: Sequence[Group], budget: int) -> list[PackedBatch]:
    """Cut `groups` into micro-batches of at most `budget` tokens, in order.

    A group over the budget is split between its completions, each part with the prompt again; a single prompt and
    completion over the budget makes a micro-batch of its own. The loss weights are fixed before the cut, so gradients
    do not depend on it.
    """
    batches: list[list[Group]] = []
    room = 0
    for part in (part for group in groups for part in _split(group, budget)):
        if part.tokens > room:
            batches.append([])
            room = budget
        batches[-1].append(part)
        room -= part.tokens
    return [pack(batch) for batch in batches]


def _split(group: Group, budget: int) -> list[Group]:
    parts: list[list[Rollout]] = []
    room = 0
    for rollout in group.rollouts:
        if not parts or len(rollout.ids) > room:
            parts.append([])
            room = budget - len(group.prompt.ids)
        parts[-1].append(rollout)
        room -= len(rollout.ids)
    return [replace(group, rollouts=part) for part in parts]


def _cumulative(lengths: list[int]) -> Tensor:
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


# --- attention ------------------------------------------------------------------------------------------------------


@torch.compiler.disable
def shared_prefix_attention(  # noqa: PLR0913 - the signature that transformers calls
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    segments: Segments | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The attention function transformers calls in place of its own, for the language model and the vision tower.

    `query` (1, H, T, E), `key` and `value` (1, H_kv, T, E); returns (1, T, H, E). Vision towers give their own windows
    as `cu_seq_lens_q` and attend in both directions; the language model gives `segments`.
    """
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, H, E)
    if cu_seq_lens_q is not None:
        known = _has_kernel(q) and max_length_q is not None
        lengths = [int(max_length_q)] if known else cu_seq_lens_q.diff().tolist()  # kernels ask for the longest alone
        windows = Segments(torch.empty(0), cu_seq_lens_q, cu_seq_lens_q, lengths, lengths)
        return attend(q, k, v, windows, scaling, causal=False)[None], None
    if segments is None:
        raise ValueError("shared-prefix attention was called without its segments; call the model through Policy")
    return attend(q, k[segments.kv_index], v[segments.kv_index], segments, scaling, causal=True)[None], None


def attend(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None, causal: bool) -> Tensor:
    """Variable-length attention, (T, H, E) with keys and values (K, H_kv, E): `flash_attn` when it is installed, else
    torch's own `varlen_attn` on a GPU (both half precision only), else one SDPA call for each segment."""
    if not _has_kernel(q):
        return _attend_sdpa(q, k, v, segments, scale, causal)
    longest = max(segments.q_lens), max(segments.k_lens)
    if (flash := _flash_attn()) is not None:
        return flash(q, k, v, segments.cu_q, segments.cu_k, *longest, softmax_scale=scale, causal=causal)
    from torch.nn.attention.varlen import varlen_attn

    options = {"scale": scale, "window_size": (-1, 0) if causal else (-1, -1)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch 2.11 shares key heads without being asked
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    return varlen_attn(q, k, v, segments.cu_q, segments.cu_k, *longest, **options)


def _has_kernel(q: Tensor) -> bool:
    return q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16)


@functools.cache
def _flash_attn():
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func


def _attend_sdpa(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None, causal: bool) -> Tensor:
    out = []
    for q_seg, k_seg, v_seg in zip(q.split(segments.q_lens), k.split(segments.k_lens), v.split(segments.k_lens)):
        mask = None
        if causal:  # the last query sees every key
            ones = torch.ones(len(q_seg), len(k_seg), dtype=torch.bool, device=q.device)
            mask = ones.tril(len(k_seg) - len(q_seg))
        q_seg, k_seg, v_seg = (x.transpose(0, 1)[None] for x in (q_seg, k_seg, v_seg))
        o = F.scaled_dot_product_attention(q_seg, k_seg, v_seg, mask, scale=scale, enable_gqa=True)
        out.append(o[0].transpose(0, 1))
    return torch.cat(out)
