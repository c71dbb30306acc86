"""TODO policy/forward.py"""

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface

from packing import PackedBatch, shared_prefix_attention

LOGIT_ROWS = 512  # completion tokens per lm_head call: bounds the (rows, V) float32 logits to 0.3 GB for V = 152k
# Only a name with "flash" in it makes the Qwen vision towers hand over their windows in one call instead of looping
# over them; the language model must not have such a name, or its mask code would look for the flash-attn package.
AttentionInterface.register("shared_prefix", shared_prefix_attention)
AttentionInterface.register("flash_shared_prefix", shared_prefix_attention)


def enable_packed_forward(model: nn.Module, compiled: bool = False) -> None:
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
