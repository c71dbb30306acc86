"""The packed forward pass: prepare a transformers model for packed batches and compute token log-probabilities.

`enable_packed_forward` changes a model in place so that its attention runs through `packing.shared_prefix_attention`.
It also keeps the residual stream in float32. `token_logprobs` then runs the model on a packed batch and applies the
lm_head to completion tokens only, a few tokens at a time.

Shapes: T packed tokens, C completion tokens, D hidden size, E head dimension, V vocabulary.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator

import torch
import transformers
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from common.row_copies import copy_rows
from packing import PackedBatch, shared_prefix_attention, to_device
from policy.families import grid_inputs, language_model, prepare, vision_blocks, vision_parts

LOGIT_ROWS = 512  # completion tokens per lm_head call; limits the (tokens, V) float32 logits to 0.3 GB for V = 152k


def enable_packed_forward(model: nn.Module, compiled: bool = False) -> None:
    """Prepare `model` (a transformers causal or image-text model) for packed batches, in place.

    `compiled`: use torch.compile to fuse the small operations around the matrix products of each layer, of the decoder
    and of the vision tower, and the operations that compute the log-probabilities. Attention is one operator in a
    layer's graph.

    The attention function is set in the configs after loading, because `from_pretrained` would reject the vision
    tower's attention name unless the flash-attn package is installed.
    """
    # The vision towers that take images of any size attend to all windows in one call only if the attention's name
    # contains "flash"; otherwise they loop over the windows. The language model needs a name without "flash", because
    # transformers' mask code would look for the flash-attn package.
    for name in ("shared_prefix", "flash_shared_prefix"):
        transformers.AttentionInterface.register(name, shared_prefix_attention)
    text = language_model(model)
    model.config._attn_implementation_internal = text.config._attn_implementation_internal = "shared_prefix"
    if (visual := getattr(model.model, "visual", None)) is not None:
        visual.config._attn_implementation_internal = "flash_shared_prefix"
        conv = visual.patch_embed.proj  # as a matrix product, since patches do not overlap: 6 times as fast on a CPU
        conv.forward = lambda patches: nn.functional.linear(patches.flatten(1), conv.weight.flatten(1), conv.bias)
    if not hasattr(model, "from_logits"):  # else, the hooks are already there
        keep_residual_in_float32(text)
        prepare(model)
    # Inductor's online softmax is switched off because it is slow: 1.7 ms for 512 tokens, V = 152k (docs/log.md).
    options = {"online_softmax": False}
    model.from_logits = torch.compile(_from_logits, dynamic=True, options=options) if compiled else _from_logits
    if compiled:
        compile_layers(text.layers)
        # Otherwise, a trained tower would round its features differently with gradients (policy) and without
        # (reference). The decoder avoids this by its float32 residual stream.
        compile_layers(vision_blocks(model), {"emulate_precision_casts": True})


def compile_layers(layers: Iterable[nn.Module], options: dict[str, bool] | None = None) -> None:
    """Let torch.compile fuse the small operations of each of `layers`, in place, for inputs of any length.

    `options`: settings of Inductor.
    """
    # Otherwise, a layer with an autograd function (`copy_rows`) is traced anew whenever a run starts.
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    # Otherwise, a layer is compiled anew for the first small micro-batch: Inductor would fuse sums along different
    # dimensions only from 4,096 tokens on, or more in a wider model.
    options = {"triton.mix_order_reduction_non_strict_mode": True} | (options or {})
    for layer in layers:
        # Compile the forward method, not the module, because FSDP's hooks must stay outside.
        layer.forward = torch.compile(layer.forward, dynamic=True, options=options)


def keep_residual_in_float32(decoder: nn.Module) -> None:
    """Make a bfloat16 decoder stack accumulate its residual stream in float32; a float32 stack is not affected.

    Rounding after each addition would lose precision, and the result would depend on how a compiler fuses the
    additions. Without this function, the same model gave different log-probabilities with and without gradients.
    """

    def cast_to_weight_dtype(norm: nn.Module, _: object, out: Tensor) -> Tensor:
        return out.to(norm.weight.dtype)

    def round_rotary(_: nn.Module, __: object, out: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Round cos and sin to the weights' dtype and mark their fixed dimensions as static.

        Samplers also round cos and sin. Float32 values would be exact, but they would differ from the samplers' values.
        If every dimension were dynamic, the compiled rotation would consist mostly of integer divisions.
        """
        cos_sin = tuple(x.to(decoder.norm.weight.dtype) for x in out)  # (1, T, E) each
        for x in cos_sin:
            torch._dynamo.mark_static(x, (0, 2))
        return cos_sin

    decoder.embed_tokens.register_forward_hook(lambda _, __, out: out.float())
    decoder.rotary_emb.register_forward_hook(round_rotary)
    decoder.norm.register_forward_hook(cast_to_weight_dtype)
    for layer in decoder.layers:
        for name, child in layer.named_children():
            if "norm" in name:
                child.register_forward_hook(cast_to_weight_dtype)


@contextlib.contextmanager
def plain_forward(model: nn.Module) -> Iterator[None]:
    """Inside the context, run the decoder on ordinary batches: causal attention with a KV cache, nothing compiled.

    What `enable_packed_forward` changed otherwise stays: the float32 residual stream, experts and routers, and the
    vision tower's attention.
    """
    configs = (model.config, language_model(model).config)
    for config in configs:
        config._attn_implementation_internal = "sdpa"
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for config in configs:
            config._attn_implementation_internal = "shared_prefix"


def image_features(model: transformers.PreTrainedModel, vision: dict[str, Tensor]) -> Tensor:
    """Run the vision tower and the projector, and return the image features, with shape (image tokens, features).

    For models with deepstack features (Qwen3-VL), those of inner layers follow those of the last layer, along the
    second dimension. `vision`: the inputs of the vision tower, on any device; see `policy.families`.
    """
    tower = next(iter(vision_parts(model).values()))
    inputs = {name: to_device(tensor, tower.device) for name, tensor in vision.items() if name != "image_grid_thw"}
    inputs["pixel_values"] = inputs["pixel_values"].to(tower.dtype)
    if "image_grid_thw" in vision:
        inputs |= grid_inputs(tower, vision["image_grid_thw"].cpu())
    if hasattr(model.config, "vision_feature_layer"):
        inputs["vision_feature_layer"] = model.config.vision_feature_layer
    out = model.model.get_image_features(**inputs)
    features = torch.cat([image.flatten(0, -2) for image in out.pooler_output])
    deepstack = getattr(out, "deepstack_features", None) or []  # newer releases of transformers split these by image
    return torch.cat([features, *(torch.cat(x) if isinstance(x, tuple) else x for x in deepstack)], dim=-1)


# --- log-probabilities ---------------------------------------------------------------------------------------------


def token_logprobs(
    model: nn.Module, batch: PackedBatch, temperature: float = 1.0, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of every completion token and the entropy of its distribution, (C,) float32 each.

    Both values refer to the sampling distribution, softmax(logits / temperature). The entropy carries a gradient only
    with `entropy_gradient`. The lm_head runs only on completion tokens; see `_TokenLogprobs`.
    """
    no_masks = dict.fromkeys(("full_attention", "sliding_attention", "linear_attention"))
    hidden = language_model(model)(
        position_ids=batch.position_ids,
        attention_mask=no_masks if hasattr(model.model, "get_rope_index") else None,
        segments=batch.segments,
        use_cache=False,
        **_decoder_inputs(model, batch.input_ids, batch.vision, batch.image_tokens),
    ).last_hidden_state[0]  # (T, D)
    hidden = copy_rows(hidden, batch.predict_from)  # (C, D)
    # torch.compile would turn a Python float into a host tensor and spend 40 seconds looking for a C++ compiler.
    scale = torch.full((), temperature, dtype=torch.float32, device=hidden.device)
    # A model with trained weights computes derivatives even in a forward pass without gradients: a function compiled
    # without them could round the log-probabilities differently, and the initial ratio would then not be exactly 1.
    derive = any(parameter.requires_grad for parameter in model.parameters())
    keep = torch.is_grad_enabled() and not (model.is_gradient_checkpointing or entropy_gradient)
    from_logits = functools.partial(model.from_logits, dtype=hidden.dtype if derive else None)
    weight = model.lm_head.weight
    return _TokenLogprobs.apply(hidden, weight, batch.targets, scale, from_logits, keep, entropy_gradient)


def _decoder_inputs(
    model: nn.Module, input_ids: Tensor, vision: dict[str, Tensor], image_tokens: Tensor
) -> dict[str, object]:
    """Return the decoder's inputs for tokens (B, S), with the image features inserted among the token embeddings.

    `vision` holds cached `features` or the inputs of the vision tower, on any device. `image_tokens` are the image
    tokens' indices among the B x S tokens. If there are none, the features change nothing, and the tower's gradients
    are zero. The model's own code would search for the image tokens on the device, which would make the host wait; it
    would also expect an image for each placeholder that the model has sampled.
    """
    embedded = language_model(model).embed_tokens(input_ids)  # (B, S, D)
    if not vision:
        return {"inputs_embeds": embedded}
    features = to_device(vision["features"], embedded.device) if "features" in vision else image_features(model, vision)
    if not len(image_tokens):  # a blank image
        features = features[:0]
    last, *deepstack = features.to(embedded.dtype).split(embedded.shape[-1], dim=-1)
    length = input_ids.shape[1]
    # The result must not be a view, or torch.compile would compile the first layer apart from the others.
    with_images = embedded.index_put((image_tokens // length, image_tokens % length), last)
    inputs: dict[str, object] = {"inputs_embeds": with_images}
    if deepstack:  # Qwen3-VL adds features of the tower's inner layers to the outputs of the first decoder layers
        is_image = torch.zeros(input_ids.shape, dtype=torch.bool, device=embedded.device)
        is_image.view(-1)[image_tokens] = True
        inputs |= {"visual_pos_masks": is_image, "deepstack_visual_embeds": deepstack}
    return inputs


def next_token_logits(
    model: nn.Module, input_ids: Tensor, vision: dict[str, Tensor], image_tokens: Tensor | None, **inputs: object
) -> tuple[Tensor, transformers.Cache]:
    """Return the logits (B, V) of the token that follows the last one of each sequence (B, S), and the KV cache.

    `vision`, `image_tokens`: see `_decoder_inputs`. Other `inputs` are those of transformers. The logits are float32.
    """
    inputs |= _decoder_inputs(model, input_ids, vision, image_tokens)
    out = language_model(model)(use_cache=True, **inputs)
    return float32_logits(out.last_hidden_state[:, -1], model.lm_head.weight), out.past_key_values


def float32_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return the logits (C, V): `hidden` (C, D) times the lm_head's `weight` (V, D), summed and kept in float32.

    bfloat16 has eight significant bits, so a bfloat16 logit between 16 and 32, which is typical of trained models,
    could be off by up to 0.06. On a GPU, the result has no gradient, and no caller needs one.
    """
    if hidden.device.type == "cuda" and hidden.dtype in (torch.float16, torch.bfloat16):
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return (hidden @ weight.T).float()


def _from_logits(
    logits: Tensor, targets: Tensor, temperature: Tensor, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the targets' log-probabilities, the entropies, and the derivatives of the log-probabilities.

    The derivatives with respect to the `logits` (C, V) are rounded to `dtype` at the end. None: without derivatives.
    """
    logits = logits / temperature
    top = logits.amax(-1, keepdim=True)
    e = (logits - top).exp()
    z = e.sum(-1, keepdim=True)
    log_z = (top + z.log())[:, 0]
    logp = logits.gather(-1, targets[:, None])[:, 0] - log_z
    entropy = log_z - (e * logits).sum(-1) / z[:, 0]
    if dtype is None:
        return logp, entropy, None
    p = e / z
    is_target = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
    return logp, entropy, ((is_target.float() - p) / temperature).to(dtype)


def _entropy_derivatives(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return the derivatives of the entropies with respect to the `logits` (C, V): −p · (log p + H) / T."""
    logp = (logits / temperature).log_softmax(-1)
    p = logp.exp()
    entropy = -(p * logp).sum(-1, keepdim=True)
    return -p * (logp + entropy) / temperature


class _TokenLogprobs(torch.autograd.Function):
    """Log-probabilities and entropies (C,) of targets (C,), from hidden states (C, D) and the lm_head's weight (V, D).

    The float32 logits are held for only `LOGIT_ROWS` tokens at a time. The backward pass needs the derivatives of the
    log-probabilities by the logits, (one_hot(target) - softmax(logits / T)) / T. With `keep`, all of these, (C, V), are
    stored in the compute dtype. Without `keep`, for lack of memory, the backward pass recomputes the logits.
    The lm_head is then a quarter slower, and the gradient of its weight is accumulated over chunks of tokens. With
    `entropy_gradient`, the entropies have a gradient, too.
    """

    @staticmethod
    def forward(  # noqa: PLR0913 - what torch saves for the backward pass
        ctx, hidden, weight, targets, temperature, from_logits, keep: bool, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        derivatives = hidden.new_empty(len(hidden) if keep else 0, len(weight))
        logp, entropy = (torch.empty_like(targets, dtype=torch.float32) for _ in range(2))
        for chunk in _slices(len(hidden), LOGIT_ROWS):
            logits = float32_logits(hidden[chunk], weight)
            logp[chunk], entropy[chunk], chunk_derivatives = from_logits(logits, targets[chunk], temperature)
            if keep:
                derivatives[chunk] = chunk_derivatives
        ctx.save_for_backward(hidden, weight, targets, temperature, derivatives)
        ctx.from_logits, ctx.keep, ctx.entropy_gradient = from_logits, keep, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, entropy_grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, temperature, derivatives = ctx.saved_tensors
        hidden_grad, weight_grad = torch.empty_like(hidden), None
        for chunk in _slices(len(hidden), len(hidden) if ctx.keep else LOGIT_ROWS):
            if not ctx.keep:
                logits = float32_logits(hidden[chunk], weight)
                derivatives = ctx.from_logits(logits, targets[chunk], temperature)[2]
            if ctx.entropy_gradient:
                of_entropy = _entropy_derivatives(logits, temperature) * entropy_grad[chunk, None]
                derivatives = (derivatives * grad[chunk, None] + of_entropy).to(hidden.dtype)
            scale = 1.0 if ctx.entropy_gradient else grad[chunk, None]
            hidden_grad[chunk] = derivatives @ weight * scale
            if ctx.needs_input_grad[1]:
                chunk_grad = derivatives.T @ (hidden[chunk] * scale).to(hidden.dtype)
                weight_grad = chunk_grad if weight_grad is None else weight_grad.add_(chunk_grad)
        return hidden_grad, weight_grad, None, None, None, None, None


def _slices(length: int, size: int) -> list[slice]:
    """Cut `length` tokens into slices of `size`, the last of which may have one more.

    torch.compile takes sizes of 1 for constants, and would compile the functions anew for a single token at the end.
    """
    edges = [0, *range(size, length - 1, size), length] if length else []
    return [slice(start, end) for start, end in itertools.pairwise(edges)]
