"""Checks that vLLM works with the tokens and pixels that the trainer sent; see `vllm_engine.py`."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from common.errors import UserError
from common.records import Prompt

TOLERANCE = 0.03  # of normalised pixels: one of 256 grey levels, and rounding to bfloat16
# At sharp edges, torchvision and Pillow resize differently: a share OUTLIERS of pixels may differ by up to LARGEST.
OUTLIERS, LARGEST = 0.01, 0.15


def check_expansion(prompt: Prompt, ids: list[int]) -> None:
    """Raise UserError if vLLM tokenised `prompt` differently from the trainer."""
    if ids != prompt.ids.tolist():
        raise UserError(
            f"{prompt.source}: vLLM expands the prompt to {len(ids)} tokens that differ from the trainer's "
            f"{len(prompt.ids)}: their tokenizers or image processors differ; use --engine hf, which uses the trainer's"
        )


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
