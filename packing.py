"""Shared-prefix packing: pack a prompt and its G completions into one sequence, so that the prompt is computed once.

GRPO samples G completions of every prompt. A plain trainer therefore runs every prompt, including its image tokens, G
times. Here, a single forward pass runs over one packed sequence:

    segments, in packed order:   prompt, prompt', ..., c1, ..., cG, c1', ...       T tokens in total
    keys of a prompt:            prompt                                            causal
    keys of its completion cj:   prompt ++ cj                                      causal, aligned bottom-right
    position ids of cj:          continue after the prompt's largest position id   (M-RoPE: all three axes)
    loss mask of cj:             its sampled tokens, not those that the model only saw in turns (`Trajectory`)
    log-probability of cj[0]:    from the prompt's last hidden state

All layers except attention work token by token and need no change. In the attention layers, keys and values are
copied, and one variable-length attention call follows. Linear attention has a state instead of keys. It runs over all
prompts and then over all completions; a completion starts with its prompt's state (parts/families/delta_net.py).
The result matches plain forward passes over one sequence at a time; tests/test_packing.py checks that
log-probabilities and gradients agree to 1e-5 in float32 (Qwen3.5: to 5e-5 and 2e-4).

Shapes: T packed tokens, K copied keys, C completion tokens, S prompt tokens, L tokens of one completion, H query
heads, H_kv key and value heads, E head dimension, D hidden size, V vocabulary, R position axes (3 with M-RoPE,
otherwise 1).
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.parts import extra
from common.records import Completion, Group, Prompt
from common.row_copies import RowCopies, copy_rows

CHUNK = 64  # tokens that kernels of linear attention work on together


@dataclass
class Segments:
    """The segments of a packed sequence and their keys, as arguments of one variable-length attention call."""

    keys: RowCopies  # the packed token behind each key, segment by segment (K)
    cu_q: Tensor  # (segments + 1,) cumulative query lengths, int32
    cu_k: Tensor  # (segments + 1,) cumulative key lengths, int32
    q_lens: list[int]  # query lengths of the segments, on the host
    k_lens: list[int]  # key lengths of the segments, on the host
    prompt_of: Tensor  # (completions,) index of each completion's prompt among the prompts, which come first
    max_q: int = field(init=False)  # set here, because a graph that takes a list's maximum is recompiled for each list
    max_k: int = field(init=False)

    def __post_init__(self) -> None:
        self.max_q, self.max_k = max(self.q_lens), max(self.k_lens)

    @functools.cached_property
    def sequences(self) -> tuple["Sequences", "Sequences"]:
        """The prompts and the completions, for layers that go through each of them from its start to its end."""
        prompts = len(self.q_lens) - len(self.prompt_of)
        device = self.cu_q.device
        return Sequences(self.q_lens[:prompts], device), Sequences(self.q_lens[prompts:], device)


class Sequences:
    """Sequences that lie one after the other, as arguments of the variable-length kernels of linear attention."""

    def __init__(self, lengths: list[int], device: torch.device | str = "cpu"):
        self.lengths = lengths
        chunks = [(i, chunk) for i, length in enumerate(lengths) for chunk in range(-(-length // CHUNK))]
        self.cu = to_device(_cumulative(lengths).long(), torch.device(device))  # (N + 1,) cumulative lengths
        self.chunks = to_device(torch.tensor(chunks), torch.device(device))  # (chunks, 2) sequence, and chunk within it


@dataclass
class TokenValues:
    """What the loss needs for each completion token. All tensors are (C,); values per completion are repeated."""

    sampling_logp: Tensor
    advantages: Tensor
    token_weights: Tensor
    has_image: Tensor  # whether the prompt or the trajectory has an image, bool
    stale: Tensor  # whether the policy of an earlier step sampled the token, bool
    trainer_logp: Tensor | None = None
    ref_logp: Tensor | None = None
    teacher_logp: Tensor | None = None
    per_token: bool = False  # whether a completion has an advantage for each token


@dataclass
class PackedBatch:
    """One micro-batch: several groups packed into one sequence."""

    input_ids: Tensor  # (1, T) token ids
    position_ids: Tensor  # position ids: (3, 1, T) with M-RoPE, otherwise (1, T)
    segments: Segments  # which tokens attend to which
    predict_from: RowCopies  # the hidden state that predicts each completion token: C states
    targets: Tensor  # (C,) token ids of the completion tokens
    completion_of_token: Tensor  # (C,) index of the completion that each token belongs to: 0, 0, ..., 1, ...
    lengths: list[int]  # length of each completion in tokens, on the host, in packed order
    values: TokenValues  # the values of each completion token for the loss
    vision: dict[str, Tensor]
    """The concatenated vision inputs of all images, or only `features` if a frozen vision tower's output is cached.
    Empty if there are no images. A blank image without image tokens (see `micro_batches`) changes nothing."""
    image_tokens: Tensor  # packed indices of the image tokens, whose embeddings the image features replace

    def to(self, device: torch.device | str) -> "PackedBatch":
        """Return a copy of the batch on `device`. `vision` stays: the model moves what it needs of it."""
        return _move_tensors(self, functools.partial(to_device, device=torch.device(device)))


def _move_tensors(record: Any, move: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of a data class with `move` applied to its tensors, and to those of data classes in it."""
    moved = {name: move(value) for name, value in vars(record).items() if isinstance(value, Tensor)}
    inner = {name: _move_tensors(value, move) for name, value in vars(record).items() if is_dataclass(value)}
    return replace(record, **moved, **inner)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy `tensor` to `device` without blocking the host.

    A copy from pageable memory would wait for all queued GPU work, and the GPU would then wait for the host. The tensor
    is therefore pinned first.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def pack(groups: Sequence[Group]) -> PackedBatch:
    """Pack `groups` into one sequence.

    Raises ValueError if a completion has no tokens. Such a completion has nothing to train on, so the caller must
    decide how to handle it.
    """
    prompts = [group.prompt for group in groups]
    completions = [completion for group in groups for completion in group.completions]
    prompt_of = [i for i, group in enumerate(groups) for _ in group.completions]
    prompt_lengths, lengths = ([len(each.ids) for each in parts] for parts in (prompts, completions))
    if 0 in lengths:
        raise ValueError(f"prompt {groups[prompt_of[lengths.index(0)]].index} has a completion without tokens")
    q_lens = prompt_lengths + [each.tokens for each in completions]
    indices = torch.arange(sum(q_lens)).split(q_lens)  # of each segment
    position_parts, keys = [prompt.position_ids for prompt in prompts], [*indices[: len(prompts)]]
    next_position = [int(prompt.position_ids.max()) + 1 for prompt in prompts]
    predict_from = []
    for i, own, completion in zip(prompt_of, indices[len(prompts) :], completions):
        keys += [indices[i], own]
        before, positions = torch.cat([indices[i][-1:], own[:-1]]), next_position[i] + torch.arange(len(own))
        if trajectory := completion.trajectory:
            before, positions = before[trajectory.loss_mask], trajectory.position_ids  # the mask selects sampled tokens
        predict_from.append(before)
        position_parts.append(positions.expand(len(position_parts[i]), -1))
    k_lens = prompt_lengths + [prompt_lengths[i] + each.tokens for i, each in zip(prompt_of, completions)]
    sequences = [*prompts, *(completion.trajectory or completion for completion in completions)]
    with_images = [(own, each) for own, each in zip(indices, sequences) if isinstance(each, Prompt)]
    position_ids = torch.cat(position_parts, dim=1)  # (R, T)
    num_tokens = position_ids.shape[1]
    return PackedBatch(
        input_ids=torch.cat([each.ids for each in sequences])[None],
        position_ids=position_ids[:, None] if len(position_ids) > 1 else position_ids,
        segments=Segments(
            RowCopies.plan(torch.cat(keys), num_tokens),
            _cumulative(q_lens),
            _cumulative(k_lens),
            q_lens,
            k_lens,
            torch.tensor(prompt_of),
        ),
        predict_from=RowCopies.plan(torch.cat(predict_from), num_tokens),
        targets=torch.cat([completion.ids for completion in completions]),
        completion_of_token=torch.repeat_interleave(torch.tensor(lengths)),
        lengths=lengths,
        values=_token_values(groups, lengths),
        vision=vision_inputs([each for _, each in with_images]),
        image_tokens=torch.cat([own[each.image_indices] for own, each in with_images]),
    )


def vision_inputs(prompts: Sequence[Prompt]) -> dict[str, Tensor]:
    """Concatenate the vision inputs of `prompts`, or their cached features if all have them; {} without images."""
    with_images = [part for prompt in prompts for part in prompt.parts if len(part.image_indices)]
    if not with_images:
        return {}
    cached = all(prompt.features is not None for prompt in with_images)
    inputs = [{"features": prompt.features} if cached else prompt.vision for prompt in with_images]
    return {name: torch.cat([each[name] for each in inputs]) for name in inputs[0]}


def _token_values(groups: Sequence[Group], lengths: list[int]) -> TokenValues:
    completions = [completion for group in groups for completion in group.completions]
    has_image = [len(g.prompt.image_indices) + each.image_tokens > 0 for g in groups for each in g.completions]
    repeats = torch.tensor(lengths)

    def join(tensors: list[Tensor | None]) -> Tensor | None:
        return None if any(tensor is None for tensor in tensors) else torch.cat(tensors)

    return TokenValues(
        sampling_logp=torch.cat([completion.sampling_logp for completion in completions]),
        advantages=torch.cat([torch.as_tensor(each.advantage).expand(n) for n, each in zip(lengths, completions)]),
        token_weights=torch.tensor([completion.token_weight for completion in completions]).repeat_interleave(repeats),
        has_image=torch.tensor(has_image).repeat_interleave(repeats),
        stale=torch.cat([torch.arange(n) < completion.num_stale for n, completion in zip(lengths, completions)]),
        trainer_logp=join([completion.trainer_logp for completion in completions]),
        ref_logp=join([completion.ref_logp for completion in completions]),
        teacher_logp=join([completion.teacher_logp for completion in completions]),
        per_token=any(torch.as_tensor(completion.advantage).ndim > 0 for completion in completions),
    )


def split_groups(groups: Sequence[Group], budget: int) -> list[list[Group]]:
    """Cut `groups`, in order, into micro-batches of at most `budget` tokens.

    A group that exceeds the budget is split into several groups, each with the prompt and some of the completions. If a
    prompt and one completion together exceed the budget, they form a micro-batch of their own. The loss weights are set
    before groups are split, so the gradient does not depend on the splitting.
    """
    parts: list[list[Group]] = []
    remaining = 0
    for chunk in (chunk for group in groups for chunk in split_group(group, budget)):
        if chunk.tokens > remaining:
            parts.append([])
            remaining = budget
        parts[-1].append(chunk)
        remaining -= chunk.tokens
    return parts


def split_group(group: Group, budget: int) -> list[Group]:
    """Split `group` into groups of at most `budget` tokens with the prompt, or of one completion that is too long."""
    chunks: list[list[Completion]] = []
    remaining = 0
    for completion in group.completions:
        if not chunks or completion.tokens > remaining:
            chunks.append([])
            remaining = budget - len(group.prompt.ids)
        chunks[-1].append(completion)
        remaining -= completion.tokens
    return [replace(group, completions=chunk) for chunk in chunks]


def _cumulative(lengths: list[int]) -> Tensor:
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


# --- attention ------------------------------------------------------------------------------------------------------


EVERYTHING, CAUSAL = (-1, -1), (-1, 0)  # (keys before, keys after) a query's own key; -1: all


def shared_prefix_attention(  # noqa: PLR0913 - the signature that transformers calls
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    segments: Segments | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls for the language model and the vision tower.

    `query` is (1, H, T, E), `key` and `value` are (1, H_kv, T, E), and the result is (1, T, H, E). The language model
    passes `segments`; layers with sliding-window attention also pass their `sliding_window`. Vision towers pass their
    windows as `cu_seq_lens_q` and attend in both directions. Raises ValueError if neither `segments` nor
    `cu_seq_lens_q` is given.
    """
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, H, E)
    if cu_seq_lens_q is not None:
        cu_lens, max_lens = (cu_seq_lens_q, cu_seq_lens_q), (max_length_q, max_length_q)
        return attend(q, k, v, cu_lens, max_lens, scaling, EVERYTHING)[None], None
    if segments is None:
        raise ValueError("shared-prefix attention was called without its segments; call the model through Policy")
    k, v = copy_rows(k, segments.keys), copy_rows(v, segments.keys)  # (K, H_kv, E)
    cu_lens, max_lens = (segments.cu_q, segments.cu_k), (segments.max_q, segments.max_k)
    window = (sliding_window - 1, 0) if sliding_window else CAUSAL
    return attend(q, k, v, cu_lens, max_lens, scaling, window)[None], None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_lens: tuple[Tensor, Tensor],
    max_lens: tuple[int, int],
    scale: float | None,
    window: tuple[int, int],
) -> Tensor:
    """Compute variable-length attention of queries (T, H, E) to keys and values (K, H_kv, E); the result is (T, H, E).

    `cu_lens` are the cumulative lengths of the segments' queries and keys, `max_lens` the largest number of each in a
    segment. `window`: how many keys before and after its own key a query attends to: `EVERYTHING`, `CAUSAL`, or
    (w, 0). On a GPU in half precision, this calls torch's `varlen_attn` or, where it can, the faster kernel of
    parts/fast. In all other cases, it makes one SDPA call per segment.
    """
    if not _has_kernel(q):
        return _attend_sdpa(q, k, v, cu_lens, scale, window)
    if window == CAUSAL and q.shape[-1] == flash_head_dim():
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return torch.ops.grpo_vlm.flash_attention(q, k, v, *cu_lens, *max_lens, scale)[0]
    from torch.nn.attention.varlen import varlen_attn

    options = {"scale": scale, "window_size": window}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch 2.11 lacks this flag and does not need it
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    return varlen_attn(q, k, v, *cu_lens, *max_lens, **options)


@torch.compiler.assume_constant_result  # would have no effect on the cached function
def flash_head_dim() -> int:
    """Return the size of the heads for which parts/fast has FlashAttention 4; 0 if it cannot be used."""
    return _flash_head_dim()


@functools.cache
def _flash_head_dim() -> int:
    fast = extra("fast")
    return fast.flash_head_dim() if fast else 0


def _has_kernel(q: Tensor) -> bool:
    return q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16)


@torch.compiler.disable  # it would be compiled anew for other lengths
def _attend_sdpa(
    q: Tensor, k: Tensor, v: Tensor, cu_lens: tuple[Tensor, Tensor], scale: float | None, window: tuple[int, int]
) -> Tensor:
    q_lens, k_lens = (each.diff().tolist() for each in cu_lens)
    out = []
    for q_seg, k_seg, v_seg in zip(q.split(q_lens), k.split(k_lens), v.split(k_lens)):
        mask = None
        if window != EVERYTHING:  # aligned bottom-right, so that the last query attends to the last key
            ones = torch.ones(len(q_seg), len(k_seg), dtype=torch.bool, device=q.device)
            own = len(k_seg) - len(q_seg)  # the first query's own key
            mask = ones.tril(own) if window == CAUSAL else ones.tril(own).triu(own - window[0])
        q_seg, k_seg, v_seg = (x.transpose(0, 1)[None] for x in (q_seg, k_seg, v_seg))
        o = F.scaled_dot_product_attention(q_seg, k_seg, v_seg, mask, scale=scale, enable_gqa=True)
        out.append(o[0].transpose(0, 1))
    return torch.cat(out)
