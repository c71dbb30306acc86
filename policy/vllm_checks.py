"""Checks that vLLM works with the weights and the pixels that the trainer sent; see `rollout.VLLMEngine`."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from common.errors import RunStopped, UserError
from common.records import Prompt


def check_weights(sent: Iterable[tuple[str, Tensor]], vllm_weights: dict[str, Tensor]) -> None:
    """Raise RunStopped if a `sent` weight is missing from vLLM or differs after rounding to vLLM's dtype."""
    for name, weight in sent:
        synced = vllm_weights.pop(name, None)
        if synced is None or not torch.equal(synced[: len(weight)], weight.to(synced.dtype)):
            problem = "is missing in vLLM" if synced is None else "differs between vLLM and the trainer"
            raise RunStopped(f"--check_sync: {name} {problem} after the sync; --engine hf samples without vLLM", 1)


def unfused_weights(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in transformers, tensor) for every weight of vLLM's `model`, with fused weights split."""
    modules = dict(model.named_modules())
    for name, weight in model.named_parameters():
        owner = name.rpartition(".")[0]
        name = name.replace("language_model.lm_head.", "lm_head.")
        name = name.replace("language_model.model.", "model.language_model.")
        name = f"model.{name}" if name.startswith("visual.") else name
        if ".qkv_proj." in name:
            layer = modules[owner]
            heads = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
            splits = zip(("q_proj", "k_proj", "v_proj"), weight.split([h * layer.head_size for h in heads]))
            yield from ((name.replace("qkv_proj", projection), split) for projection, split in splits)
        elif ".gate_up_proj." in name:
            splits = zip(("gate_proj", "up_proj"), weight.chunk(2))
            yield from ((name.replace("gate_up_proj", projection), split) for projection, split in splits)
        else:
            yield name, weight


@contextlib.contextmanager
def record_tower_inputs(llm: Any) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Record the (pixels, grids) of every call to the vision tower of the engine `llm`."""
    tower_inputs: list[tuple[Tensor, Tensor]] = []

    def hook(_: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        grid = kwargs.get("grid_thw", args[1] if len(args) > 1 else None)
        tower_inputs.append((args[0].detach().float().cpu(), torch.as_tensor(grid).cpu()))

    (handle,) = llm.apply_model(lambda model: model.visual.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        yield tower_inputs
    finally:
        handle.remove()


def check_pixels(prompts: Sequence[Prompt], tower_inputs: list[tuple[Tensor, Tensor]]) -> None:
    """Check that vLLM's vision tower received the trainer's pixels, up to bfloat16 rounding.

    `tower_inputs` holds the (pixels, grids) of each call to the tower. The order of the images is not compared, because
    vLLM batches images in its own order and encodes a repeated image only once. Raises UserError, naming the first
    prompt whose pixels are missing.
    """
    received: dict[tuple[int, ...], list[Tensor]] = {}
    for pixels, grids in tower_inputs:
        for grid, image in zip(grids.tolist(), pixels.split(grids.prod(-1).tolist())):
            received.setdefault(tuple(grid), []).append(image)
    for prompt in prompts:
        grids = prompt.vision["image_grid_thw"]
        for grid, image in zip(grids.tolist(), prompt.vision["pixel_values"].split(grids.prod(-1).tolist())):
            if not any((image - other).abs().max() < 0.02 for other in received.get(tuple(grid), [])):
                raise UserError(
                    f"{prompt.source}: vLLM's vision tower did not get the trainer's pixels: its image processor "
                    "differs (rescaling, mean or resizing); use --engine hf, which uses the trainer's"
                )
