"""The model families: where the parts of a model are, and how its images become tokens.

A family is one record in `FAMILIES`, here or in parts/families; docs/models.md shows how to add one. Everything else in
this project works with any family: the decoder stack gets embedded tokens, with the features of the images in the
places of image tokens.

Sizes of images are (height, width) in pixels.
"""

import importlib
import json
import math
import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from torch import Tensor, nn
from transformers.utils import cached_file
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from common.errors import UserError
from inputs.images import fitted_size
from packing import to_device
from policy.base_files import reading

ImageProcessor = Any  # one of the image processors of transformers that work with PIL; they share no useful base class
Config: TypeAlias = transformers.PreTrainedConfig


@dataclass(frozen=True)
class ImageLimits:
    """The flags that limit the size of images; see `config.DataFlags`."""

    min_pixels: int
    max_pixels: int


@dataclass(frozen=True)
class ImagePreparation:
    """How the images of a run are prepared."""

    fit: Callable[[int, int], tuple[int, int]]  # the size to which an image is resized before anything else
    count: Callable[[int, int], int]  # the number of image tokens of an image that has this size
    options: dict[str, Any]  # arguments of the image processor
    vllm_options: dict[str, Any]  # arguments of vLLM's own image processor, with which it does the same


@dataclass(frozen=True)
class BlankImage:
    """A blank picture of the smallest size that the vision tower accepts."""

    vision: dict[str, Tensor]  # the inputs of the vision tower
    patches: int  # number of patches in the vision tower
    tokens: int  # number of image tokens


@dataclass(frozen=True)
class Vision:
    """How a family sees."""

    image_processor: str
    """The module and the class in `transformers.models`; those that `AutoImageProcessor` chooses need torchvision."""
    prepare_images: Callable[[ImageProcessor, Config, ImageLimits], ImagePreparation]
    blank: Callable[[Config], BlankImage]
    inputs: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    """Turns the image processor's output into the model's inputs. Their first dimensions count patches, tiles or
    images, in order, so that the inputs of several prompts can be concatenated."""
    modules: tuple[str, ...]
    """The vision tower, then the projector if it is separate, as attributes of `model.model`."""
    blocks: str  # the list of the vision tower's layers, as an attribute of `model.model`
    token: str  # the image token; the chat template writes one for each picture
    expansion: str = "{}"  # what the trainer sees instead; {}: all image tokens of the picture
    unused: str = ""  # a module of the vision tower whose output nothing depends on
    vllm_features: bool = False  # whether vLLM accepts the trainer's features, with their grids, instead of images


@dataclass(frozen=True)
class Family:
    """What this project knows about a family of models."""

    title: str  # its name in messages and documents
    model_types: tuple[str, ...]  # `model_type` in config.json
    vision: Vision | None = None  # None: text only
    router: str = ""  # mixtures of experts: the module in a decoder layer that chooses the experts
    turns: bool = False  # whether tests show that several turns (`--env`) train as in a plain forward pass
    coordinates: int = 0  # the largest x and y of a place in a picture; 0: in pixels of the resized picture
    check: Callable[[Config, torch.device], None] | None = None  # raises UserError if the device cannot train the model
    prepare: Callable[[transformers.PreTrainedModel], None] | None = None
    """Changes a model in place, so that it takes packed batches."""


def find_family(config: Config, name: str = "") -> Family:
    """Return the family of the model with this `config`, which was saved at `name`.

    Raises UserError if the project does not support its architecture.
    """
    if found := next((family for family in FAMILIES if config.model_type in family.model_types), None):
        return found
    from parts.families import FAMILIES as others

    if found := next((family for family in others if config.model_type in family.model_types), None):
        return found
    titles = ", ".join(family.title for family in (*FAMILIES, *others))
    raise UserError(f"{name!r} is a {config.model_type} model, which is not supported: use one of {titles}")


def load_preprocessors(
    model: str, config: Config
) -> tuple[transformers.PreTrainedTokenizerBase, ImageProcessor | None]:
    """Load the tokenizer and, unless `model` is text-only, the image processor that were saved with it."""
    vision = find_family(config).vision
    return load_tokenizer(model), load_image_processor(vision, model) if vision else None


def load_image_processor(vision: Vision, model: str) -> ImageProcessor:
    """Load the image processor that was saved with `model`. Raises UserError if it cannot be loaded."""
    module, _, name = vision.image_processor.rpartition(".")
    image_processor = getattr(importlib.import_module(f"transformers.models.{module}"), name)
    with reading(model, "image processor"):
        return image_processor.from_pretrained(model)


def load_tokenizer(model: str) -> transformers.PreTrainedTokenizerBase:
    """Load the tokenizer that was saved with `model`. Raises UserError if it cannot be loaded.

    Its chat template may come from a file of the processor, as older releases of transformers save it, or be None.
    """
    with reading(model, "tokenizer"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        tokenizer(string.printable + "é漢")  # without a token for unknown text, only this raises an error
    with reading(model, "chat template"):
        if not tokenizer.chat_template:
            path = cached_file(model, "chat_template.json", _raise_exceptions_for_missing_entries=False)
            tokenizer.chat_template = json.loads(Path(path).read_text()).get("chat_template") if path else None
        if tokenizer.chat_template is not None:
            tokenizer.chat_template = tokenizer.get_chat_template()  # of several, the default
            if not isinstance(tokenizer.chat_template, str):
                raise TypeError(f"{tokenizer.chat_template!r} is not a text")
    return tokenizer


def language_model(model: nn.Module) -> nn.Module:
    """Return the decoder stack, the module with `.layers`, `.embed_tokens` and `.norm`."""
    names = ("language_model", "text_model")
    return next((getattr(model.model, name) for name in names if hasattr(model.model, name)), model.model)


def attention_windows(config: Config) -> list[float]:
    """Return, for each layer with attention, how many keys a query sees at most; `config` is the decoder's."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    windows = {"full_attention": math.inf, "sliding_attention": getattr(config, "sliding_window", None)}
    return [windows[kind] for kind in kinds if kind in windows]


def head_dim(config: Config) -> int:
    """Return the dimension of the heads of attention; `config` is the decoder's."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def vision_parts(model: transformers.PreTrainedModel) -> dict[str, nn.Module]:
    """Return the vision tower and the projector of `model`, by name; nothing for a text model."""
    vision = find_family(model.config).vision
    return {name: model.model.get_submodule(name) for name in vision.modules} if vision else {}


def vision_blocks(model: transformers.PreTrainedModel) -> nn.ModuleList | list[nn.Module]:
    """Return the layers of the vision tower of `model`; nothing for a text model."""
    vision = find_family(model.config).vision
    return model.model.get_submodule(vision.blocks) if vision else []


def patches_per_token(model: transformers.PreTrainedModel) -> float:
    """Return how many patches of the vision tower of `model` an image token stands for."""
    blank = blank_image(model)
    return blank.patches / blank.tokens


def blank_image(model: transformers.PreTrainedModel) -> BlankImage:
    """Return the smallest input of the vision tower of `model`."""
    return find_family(model.config).vision.blank(model.config)


def grid_inputs(tower: nn.Module, grids: Tensor) -> dict[str, Tensor | int]:
    """Return the inputs that `tower` needs for images with these `grids`, (images, 3), in host memory.

    They are the grids, and what the tower would otherwise derive from them itself. On a GPU, the host would then wait
    for all queued work, several times in each forward and backward pass.
    """
    merge = tower.spatial_merge_size
    ends = get_vision_cu_seqlens(grids)
    inputs = {"position_ids": get_vision_position_ids(grids, merge), "cu_seqlens": ends}
    lengths = {"max_seqlen": int(ends.diff().max())}
    if hasattr(tower, "window_size"):  # Qwen2.5-VL
        index, ends = get_vision_window_index(grids, merge, tower.window_size, tower.patch_size)
        inputs |= {"window_index": index, "cu_window_seqlens": ends}
        lengths["max_window_seqlen"] = int(ends.diff().max())
    if hasattr(tower, "interpolation_mode"):  # Qwen3-VL, Qwen3.5
        indices, weights = get_vision_interpolation_indices_and_weights(
            grids, tower.num_grid_per_side, tower.interpolation_mode, tower.interpolation_align_corners, merge
        )
        inputs |= {"interp_indices": indices, "interp_weights": weights}
    on_device = {name: to_device(tensor, tower.device) for name, tensor in inputs.items()}
    needs_grids = hasattr(tower, "embeddings")  # GLM-4.6V computes with them on the GPU
    return lengths | on_device | {"image_grid_thw": to_device(grids, tower.device) if needs_grids else grids}


def prepare(model: transformers.PreTrainedModel) -> None:
    """Change `model` in place for packed batches, as its family needs it; once, however often this is called."""
    family = find_family(model.config)
    if family.prepare and not hasattr(model, "is_prepared"):
        model.is_prepared = True
        family.prepare(model)


def experts_per_token(config: Config) -> int:
    """Return how many routed experts a token goes through, given the `config` of the decoder; 0 without experts."""
    return getattr(config, "num_experts_per_tok", 0) or getattr(config, "moe_topk", 0)


def routers(model: transformers.PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules of `model` that choose experts, by name; nothing for a model without experts."""
    router = find_family(model.config).router
    return {name: module for name, module in model.named_modules() if router and name.endswith(f".{router}")}


def routed_experts(model: transformers.PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the tensors (experts, out, in) of the routed experts of `model`, by name; nothing for other models."""
    parameters = language_model(model).layers.named_parameters() if find_family(model.config).router else ()
    return {name: parameter for name, parameter in parameters if ".experts." in name and parameter.ndim == 3}


def outputs(*names: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Return a function that selects these outputs of an image processor."""
    return lambda outputs: {name: outputs[name] for name in names}


# --- images as grids of patches ---------------------------------------------------------------------------------------


def _prepare_grids(image_processor: ImageProcessor, config: Config, limits: ImageLimits) -> ImagePreparation:
    """Images of any size: merge_size x merge_size neighbouring patches become one token."""
    factor = image_processor.patch_size * image_processor.merge_size  # 28 pixels for Qwen2.5-VL
    if limits.max_pixels < factor**2:
        problem = f"--max_pixels {limits.max_pixels} is too small for one image token"
        raise UserError(f"{problem}, which is {factor} x {factor} pixels")
    return ImagePreparation(
        fit=lambda h, w: fitted_size(h, w, limits.min_pixels, limits.max_pixels, factor),
        count=lambda h, w: h * w // factor**2,
        options={"do_resize": False},
        vllm_options={"min_pixels": factor**2, "max_pixels": limits.max_pixels},  # so that it does not resize again
    )


def _blank_grid(config: Config) -> BlankImage:
    vision = config.vision_config
    merge = vision.spatial_merge_size
    pixels = torch.zeros(merge**2, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)
    return BlankImage({"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, merge, merge]])}, merge**2, 1)


def grid_vision(image_processor: str, token: str, vllm_features: bool) -> Vision:
    """Return the `Vision` of a family whose images are grids of patches."""
    return Vision(
        image_processor=image_processor,
        prepare_images=_prepare_grids,
        blank=_blank_grid,
        inputs=outputs("pixel_values", "image_grid_thw"),
        modules=("visual",),
        blocks="visual.blocks",
        token=token,
        vllm_features=vllm_features,
    )


# --- the families -------------------------------------------------------------------------------------------------

QWEN_VISION = grid_vision("qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil", "<|image_pad|>", True)
FAMILIES = (  # parts/families has more
    Family("Qwen2.5-VL", ("qwen2_5_vl",), QWEN_VISION, turns=True),  # its maintainers: QwenLM/Qwen3-VL#866
    Family("Qwen3-VL", ("qwen3_vl",), QWEN_VISION, turns=True, coordinates=1000),  # QwenLM/Qwen3-VL#1486
    Family("Qwen2.5", ("qwen2",), turns=True),
    Family("Qwen3", ("qwen3",), turns=True),
)
