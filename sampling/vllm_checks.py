"""Checks that vLLM works with the tokens, pixels and weights that the trainer sent; see `vllm_engine.py`."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from common.errors import RunStopped, UserError
from common.records import Prompt

TOLERANCE = 0.03  # between pixels: one of 256 grey levels, in units of the image mean, and rounding to bfloat16
# At sharp edges, torchvision and Pillow resize differently: so large a share of the pixels may differ by up to this.
OUTLIERS, LARGEST = 0.01, 0.15


def check_expansion(prompt: Prompt, ids: list[int]) -> None:
    """Raise UserError if vLLM tokenised `prompt` differently from the trainer."""
    if ids != prompt.ids.tolist():
        raise UserError(
            f"{prompt.source}: vLLM expands the prompt to {len(ids)} tokens that differ from the trainer's "
            f"{len(prompt.ids)}: their tokenizers or image processors differ; use --engine hf, which uses the trainer's"
        )


def check_weights(sent: Iterable[tuple[str, Tensor]], model: torch.nn.Module, unused: str = "") -> None:
    """Raise RunStopped if a `sent` weight is missing from vLLM's `model` or differs, or if its lm_head was not sent.

    Weights of the module `unused` may be missing; see `policy.families.Vision.unused`.
    """
    vllm_weights = dict(unfused_weights(model))
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    mapper = mapper and dataclasses.replace(mapper, orig_to_new_stacked={})  # without the names of fused weights
    for name, weight in sent:
        vllm_name = mapper._map_name(name) if mapper else name
        synced = vllm_weights.pop(vllm_name, None)
        if synced is None and unused and f".{unused}." in name:
            continue
        if synced is None or not torch.equal(synced[: len(weight)], weight.to(synced.dtype)):
            problem = "is missing in vLLM" if synced is None else "differs between vLLM and the trainer"
            raise RunStopped(f"--check_sync: {name} {problem} after the sync; --engine hf samples without vLLM", 1)
    if any(name.endswith("lm_head.weight") for name in vllm_weights):  # vLLM has one, the trainer does not
        raise RunStopped(
            "--check_sync: the trainer's lm_head is the embedding, vLLM's is not: set tie_word_embeddings in the "
            "text_config of the model's config.json, too, where vLLM reads it for Qwen3.5",
            1,
        )


def unfused_weights(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for every weight of vLLM's `model`, with fused weights also split as transformers has them.

    The names are vLLM's, apart from their last part.
    """
    modules = dict(model.named_modules())
    for name, weight in model.named_parameters():
        yield name, weight
        owner = name.rpartition(".")[0]
        experts = owner.removesuffix(".routed_experts")
        if ".qkv_proj." in name:
            layer = modules[owner]
            heads = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
            splits = zip(("q_proj", "k_proj", "v_proj"), weight.split([h * layer.head_size for h in heads]))
            yield from ((name.replace("qkv_proj", projection), split) for projection, split in splits)
        elif ".gate_up_proj." in name:
            splits = zip(("gate_proj", "up_proj"), weight.chunk(2))
            yield from ((name.replace("gate_up_proj", projection), split) for projection, split in splits)
        elif ".in_proj_qkvz." in name:  # Gated DeltaNet
            values = modules[owner.rpartition(".")[0]].value_dim
            splits = zip(("in_proj_qkv", "in_proj_z"), weight.split([len(weight) - values, values]))
            yield from ((name.replace("in_proj_qkvz", projection), split) for projection, split in splits)
        elif ".in_proj_ba." in name:
            splits = zip(("in_proj_b", "in_proj_a"), weight.chunk(2))
            yield from ((name.replace("in_proj_ba", projection), split) for projection, split in splits)
        elif name.endswith("w13_weight"):  # (experts, 2 x intermediate size, hidden size); Aria has it transposed
            yield from ((f"{experts}.gate_up_proj", weight), (f"{experts}.fc1.weight", weight.transpose(1, 2)))
        elif name.endswith("w2_weight"):
            yield from ((f"{experts}.down_proj", weight), (f"{experts}.fc2.weight", weight.transpose(1, 2)))


@contextlib.contextmanager
def record_tower_inputs(llm: Any, tower: str) -> Iterator[list[Tensor]]:
    """Record the pixels of every image or tile that the vision tower `tower` of the engine `llm` gets."""
    tower_inputs: list[Tensor] = []

    def hook(_: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        pixels = args[0] if args else kwargs["pixel_values"]
        grid = kwargs.get("grid_thw", args[1] if len(args) > 1 else None)
        tower_inputs.extend(split_pixels(pixels.detach().float().cpu(), grid))

    (handle,) = llm.apply_model(lambda model: getattr(model, tower).register_forward_pre_hook(hook, with_kwargs=True))
    try:
        yield tower_inputs
    finally:
        handle.remove()


def split_pixels(pixels: Tensor, grid: Any = None) -> list[Tensor]:
    """Split the pixels that a vision tower gets into those of each image, or of each tile.

    `grid`: the (images, 3) grids of patches, for towers that get the patches of all images in one sequence.
    """
    return list(pixels.split(torch.as_tensor(grid).prod(-1).tolist()) if grid is not None else pixels)


def check_pixels(prompts: Sequence[Prompt], tower_inputs: list[Tensor]) -> None:
    """Check that vLLM's vision tower received the trainer's pixels, up to rounding and a few pixels at sharp edges.

    `tower_inputs` holds the pixels of each image or tile that the tower received. Their order is not compared, because
    vLLM batches images in its own order and encodes a repeated image only once. Raises UserError, naming the first
    prompt whose pixels are missing.
    """
    received: dict[torch.Size, list[Tensor]] = {}
    for pixels in tower_inputs:
        received.setdefault(pixels.shape, []).append(pixels)
    for prompt in prompts:
        for image in split_pixels(prompt.vision["pixel_values"], prompt.vision.get("image_grid_thw")):
            others = received.get(image.shape, [])
            if not any(_agree((image - other).abs()) for other in others):
                raise UserError(
                    f"{prompt.source}: vLLM's vision tower did not get the trainer's pixels: its image processor "
                    "differs (rescaling, mean or resizing); use --engine hf, which uses the trainer's"
                )


def _agree(difference: Tensor) -> bool:
    """Return whether pixels with this absolute `difference` come from the same picture and the same preparation."""
    return bool(difference.max() < LARGEST and (difference > TOLERANCE).float().mean() < OUTLIERS)
