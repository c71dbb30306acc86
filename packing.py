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
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface

from data import Prompt, Rollout, Sample

LOGIT_ROWS = 512  # completion tokens per lm_head call: bounds the (rows, V) float32 logits to 0.3 GB for V = 152k


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
class Group:
    """A prompt and its completions, or some of them."""

    prompt: Prompt
    rollouts: list[Rollout]
    ordinal: int = 0
    """the prompt's place in the step"""
    sample: Sample | None = None
    """the row it comes from"""

    @property
    def tokens(self) -> int:
        return len(self.prompt.ids) + sum(len(rollout.ids) for rollout in self.rollouts)


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
                raise ValueError(f"a completion without tokens, of prompt {group.ordinal}")
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
def shared_prefix_attention(
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


# Only a name with "flash" in it makes the Qwen vision towers hand over their windows in one call instead of looping
# over them; the language model must not have such a name, or its mask code would look for the flash-attn package.
AttentionInterface.register("shared_prefix", shared_prefix_attention)
AttentionInterface.register("flash_shared_prefix", shared_prefix_attention)


def take_packed_batches(model: nn.Module, compiled: bool = False) -> None:
    """Make `model` (a transformers causal or image-text model) take packed batches, in place.

    `compiled`: the small operations around the matrix products of each decoder layer, and the log-probabilities, are
    fused by torch.compile; attention stays a call of its own.

    Its attention is routed through this file by the configs, after loading: given to `from_pretrained`, the vision
    tower's name would demand the flash-attn package.
    """
    model.config._attn_implementation_internal = "shared_prefix"
    language_model(model).config._attn_implementation_internal = "shared_prefix"
    if (visual := getattr(model.model, "visual", None)) is not None:
        visual.config._attn_implementation_internal = "flash_shared_prefix"
    embedding = language_model(model).embed_tokens
    if _completion_ids_back not in embedding._forward_pre_hooks.values():
        embedding.register_forward_pre_hook(_completion_ids_back)
        keep_residual_in_float32(language_model(model))
    # with its «online» softmax 512 rows of 152k took 1.7 ms (LOG.md)
    plain = {"online_softmax": False}
    model.from_logits = torch.compile(_from_logits, dynamic=True, options=plain) if compiled else _from_logits
    for layer in language_model(model).layers if compiled else []:
        layer.forward = torch.compile(layer.forward, dynamic=True)  # not the module: FSDP's hooks stay outside


def keep_residual_in_float32(text: nn.Module) -> None:
    """Let a decoder stack that computes in bfloat16 add up its layers in float32; in float32 nothing changes.

    Rounded after each addition it would lose much, and what it loses would depend on how a compiler fuses them: with
    and without gradients the same model gave other log-probabilities.
    """

    def to_weights(norm: nn.Module, _: object, out: Tensor) -> Tensor:
        return out.to(norm.weight.dtype)

    def rounded_angles(_: nn.Module, __: object, out: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Rounded, although float32 would be exact: samplers round them too, and equal roundings do not add up. To a
        compiler that takes every size for unknown, the rotation in each layer would be mostly divisions."""
        cos_sin = tuple(x.to(text.norm.weight.dtype) for x in out)  # (1, T, E) each
        for x in cos_sin:
            torch._dynamo.mark_static(x, (0, 2))
        return cos_sin

    text.embed_tokens.register_forward_hook(lambda _, __, out: out.float())
    text.rotary_emb.register_forward_hook(rounded_angles)
    text.norm.register_forward_hook(to_weights)
    for layer in text.layers:
        for name, child in layer.named_children():
            if "norm" in name:
                child.register_forward_hook(to_weights)


def vision_features(visual: nn.Module, pixel_values: Tensor, grid: Tensor) -> Tensor:
    """(image tokens, features) all that the language model takes of images: the last layer's features and, for models
    that have them, those of the layers between, side by side."""
    out = visual(pixel_values.to(visual.dtype), grid_thw=grid)
    return torch.cat([out.pooler_output, *(getattr(out, "deepstack_features", None) or [])], dim=-1)


def _completion_ids_back(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    """Before the embedding: −1 − id becomes id again.

    A model may sample its image placeholder. To the sampler that is a token like any other, but the model's forward
    would look for a picture to put there; packed completions hide their ids until the pictures are in place.
    """
    return (torch.where(args[0] < 0, -1 - args[0], args[0]),)


def language_model(model: nn.Module) -> nn.Module:
    """The decoder stack: `.layers`, `.embed_tokens`, `.norm`."""
    return getattr(model.model, "language_model", model.model)


# --- log-probabilities ---------------------------------------------------------------------------------------------


def token_logprobs(model: nn.Module, batch: PackedBatch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability of every completion token and the entropy of the distribution it came from, (C,) float32 each.

    Both are those of the sampling distribution, softmax(logits / temperature). The entropy carries no gradient. The
    lm_head runs on completion tokens only; see `_TokenLogprobs`.
    """
    inputs = {"input_ids": batch.input_ids, **batch.vision}
    forward = model.model
    if "features" in batch.vision:
        inputs, forward = _with_features(model, batch), language_model(model)
    hidden = forward(
        position_ids=batch.position_ids,
        attention_mask={"full_attention": None} if hasattr(model.model, "get_rope_index") else None,
        segments=batch.segments,
        use_cache=False,
        **inputs,
    ).last_hidden_state[0]  # (T, D)
    hidden = hidden[batch.predict_from]  # (C, D)
    # a float would be a tensor on the host to torch.compile, which then looks for a C++ compiler, for 40 seconds
    scale = torch.full((), temperature, dtype=torch.float32, device=hidden.device)
    keep = torch.is_grad_enabled() and not model.is_gradient_checkpointing
    return _TokenLogprobs.apply(hidden, model.lm_head.weight, batch.targets, scale, model.from_logits, keep)


def _with_features(model: nn.Module, batch: PackedBatch) -> dict[str, object]:
    """The decoder's inputs with image features in their places. The model's own way asks the device where they go."""
    text = language_model(model)
    embedded = text.embed_tokens(batch.input_ids)  # (1, T, D)
    last, *between = batch.vision["features"].to(embedded.dtype).split(embedded.shape[-1], dim=-1)
    inputs: dict[str, object] = {"inputs_embeds": embedded.index_copy(1, batch.image_tokens, last[None])}
    if between:  # Qwen3-VL adds features of the tower's inner layers after the decoder's first ones
        places = torch.zeros(batch.input_ids.shape, dtype=torch.bool, device=embedded.device)
        places[0, batch.image_tokens] = True
        inputs |= {"visual_pos_masks": places, "deepstack_visual_embeds": list(between)}
    return inputs


def float32_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """(rows, V) hidden (rows, D) times the lm_head's weight (V, D), summed in float32 and left there; on a GPU
    there is no gradient of it, and callers need none.

    bfloat16 keeps eight bits: a logit between 16 and 32, as trained models have them, would be off by up to 0.06.
    """
    if hidden.device.type == "cuda" and hidden.dtype in (torch.float16, torch.bfloat16):
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return (hidden @ weight.T).float()


def _from_logits(
    logits: Tensor, targets: Tensor, temperature: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Of (rows, V) logits: log-probabilities of the targets, entropies, and the derivatives of the former by the
    logits, rounded to `dtype` when all is done. In passes without gradients too: compiled apart, the rest might be
    rounded otherwise, and ratios of policies begin beside 1."""
    logits = logits / temperature
    top = logits.amax(-1, keepdim=True)
    e = (logits - top).exp()
    z = e.sum(-1, keepdim=True)
    log_z = (top + z.log())[:, 0]
    logp = logits.gather(-1, targets[:, None])[:, 0] - log_z
    entropy = log_z - (e * logits).sum(-1) / z[:, 0]
    p = e / z
    is_target = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
    return logp, entropy, ((is_target.float() - p) / temperature).to(dtype)


class _TokenLogprobs(torch.autograd.Function):
    """(C,) log-probabilities and entropies of targets (C,), from hidden states (C, D) and the lm_head's weight (V, D).

    The float32 logits exist for `LOGIT_ROWS` tokens at a time. What the backward pass needs of them, the derivatives
    one_hot(target) - softmax(logits), is kept for all (C, V) with `keep`, in the type that is computed in. Without, for
    models short of memory, the logits are computed again, which takes a quarter of the lm_head's time more, and its
    weight gets a gradient from every few rows.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, from_logits, keep: bool) -> tuple[Tensor, Tensor]:
        derivatives = hidden.new_empty(len(hidden) if keep else 0, len(weight))
        logp, entropy = (torch.empty_like(targets, dtype=torch.float32) for _ in range(2))
        for rows in _cuts(len(hidden), LOGIT_ROWS):
            logits = float32_logits(hidden[rows], weight)
            logp[rows], entropy[rows], of_logits = from_logits(logits, targets[rows], temperature, hidden.dtype)
            if keep:
                derivatives[rows] = of_logits
        ctx.save_for_backward(hidden, weight, targets, temperature, derivatives)
        ctx.from_logits, ctx.keep = from_logits, keep
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, temperature, derivatives = ctx.saved_tensors
        of_hidden, of_weight = torch.empty_like(hidden), None
        for rows in _cuts(len(hidden), len(hidden) if ctx.keep else LOGIT_ROWS):
            if not ctx.keep:
                logits = float32_logits(hidden[rows], weight)
                derivatives = ctx.from_logits(logits, targets[rows], temperature, hidden.dtype)[2]
            scale = grad[rows, None]
            of_hidden[rows] = derivatives @ weight * scale
            if ctx.needs_input_grad[1]:
                part = derivatives.T @ (hidden[rows] * scale).to(hidden.dtype)
                of_weight = part if of_weight is None else of_weight.add_(part)
        return of_hidden, of_weight, None, None, None, None


def _cuts(length: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, length, max(size, 1))]
