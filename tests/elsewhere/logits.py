"""The logits of one model for the same inputs, in every environment."""

import inspect

import torch
from torch import Tensor, nn

POSITIONS = 8  # the last ones of the input, where everything before them counts


def last_logits(model: nn.Module, inputs: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the last logits (POSITIONS, V) of `model` for each of `inputs`, by name."""
    return {name: _logits(model.eval(), dict(tensors)) for name, tensors in inputs.items()}


@torch.no_grad()
def _logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    if "mm_token_type_ids" not in inspect.signature(model.forward).parameters:
        inputs.pop("mm_token_type_ids", None)  # older releases find the image tokens by themselves
    usual = getattr(model.config, "vision_feature_layer", None)
    if "vision_feature_layer" in inputs:  # a setting, not an input
        model.config.vision_feature_layer = int(inputs.pop("vision_feature_layer"))
    logits = model(**inputs).logits[0, -POSITIONS:].float().clone()  # otherwise all positions would be saved
    if usual is not None:
        model.config.vision_feature_layer = usual
    return logits
