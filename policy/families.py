"""The model families: where the parts of a model are, and how its images become tokens.

A family is one record in `FAMILIES`; docs/models.md shows how to add one. Everything else in this project works with
any family: the decoder stack gets embedded tokens, with the features of the images in the places of image tokens.

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
    max_side: int = 0  # 0: no limit


@dataclass(frozen=True)
class ImagePreparation:
    """How the images of a run are prepared."""

    fit: Callable[[int, int], tuple[int, int]]  # the size to which an image is resized before anything else
    count: Callable[[int, int], int]  # the number of image tokens of an image that has this size
    options: dict[str, Any]  # arguments of the image processor
    vllm_options: dict[str, Any]  # arguments of vLLM's own image processor, with which it does the same


@dataclass(frozen=True)
class BlankImage:
    """A blank picture, as small as the vision tower accepts it."""

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
    parts: tuple[str, ...]
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
    turns: bool = False  # whether tests have shown that it trains on several turns (`--env`) as in a plain forward
    coordinates: int = 0  # the largest coordinate of a place in an image; 0: coordinates are its pixels, once resized


def find_family(config: Config, name: str = "") -> Family:
    """Return the family of the model with this `config`, which was saved at `name`.

    Raises UserError if the project does not support its architecture.
    """
    for family in FAMILIES:
        if config.model_type in family.model_types:
            return family
    titles = ", ".join(family.title for family in FAMILIES)
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

    Its chat template may be in a file of the processor, where older releases of transformers saved it, or None.
    """
    with reading(model, "tokenizer"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        tokenizer(string.printable + "é漢")  # one without a token for the unknown raises an error only here
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
    """Return to how many keys a query attends at most in each layer with attention; `config` is the decoder's."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    windows = {"full_attention": math.inf, "sliding_attention": getattr(config, "sliding_window", None)}
    return [windows[kind] for kind in kinds if kind in windows]


def head_dim(config: Config) -> int:
    """Return the dimension of the heads of attention; `config` is the decoder's."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def vision_parts(model: transformers.PreTrainedModel) -> dict[str, nn.Module]:
    """Return the vision tower and the projector of `model`, by name; nothing for a text model."""
    vision = find_family(model.config).vision
    return {name: model.model.get_submodule(name) for name in vision.parts} if vision else {}


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

    Besides the grids, they are what the tower would otherwise derive from them. On a GPU, the host would then wait for
    all queued work, several times in each forward and backward pass.
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


def routers(model: transformers.PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules of `model` that choose experts, by name; nothing for a model without experts."""
    router = find_family(model.config).router
    return {name: module for name, module in model.named_modules() if router and name.endswith(f".{router}")}


def routed_experts(model: transformers.PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the tensors (experts, in, out) of the routed experts of `model`, by name; nothing for other models."""
    parameters = language_model(model).layers.named_parameters() if find_family(model.config).router else ()
    return {name: parameter for name, parameter in parameters if ".experts." in name and parameter.ndim == 3}


def _outputs(*names: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Return a function that selects these outputs of an image processor."""
    return lambda outputs: {name: outputs[name] for name in names}


# --- images as grids of patches ---------------------------------------------------------------------------------------


def _prepare_grids(image_processor: ImageProcessor, config: Config, limits: ImageLimits) -> ImagePreparation:
    """Images of any size: merge_size x merge_size neighbouring patches become one token."""
    factor = image_processor.patch_size * image_processor.merge_size  # 28 pixels for Qwen2.5-VL
    if limits.max_pixels < factor**2 or 0 < limits.max_side < factor:
        problem = f"--max_pixels {limits.max_pixels} or --max_side {limits.max_side} is too small for one image token"
        raise UserError(f"{problem}, which is {factor} x {factor} pixels")
    return ImagePreparation(
        fit=lambda h, w: fitted_size(h, w, limits.min_pixels, limits.max_pixels, factor, limits.max_side),
        count=lambda h, w: h * w // factor**2,
        options={"do_resize": False},
        vllm_options={"min_pixels": factor**2, "max_pixels": limits.max_pixels},  # so that it does not resize again
    )


def _blank_grid(config: Config) -> BlankImage:
    vision = config.vision_config
    merge = vision.spatial_merge_size
    pixels = torch.zeros(merge**2, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)
    return BlankImage({"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, merge, merge]])}, merge**2, 1)


def _grid_vision(image_processor: str, token: str, vllm_features: bool) -> Vision:
    return Vision(
        image_processor=image_processor,
        prepare_images=_prepare_grids,
        blank=_blank_grid,
        inputs=_outputs("pixel_values", "image_grid_thw"),
        parts=("visual",),
        blocks="visual.blocks",
        token=token,
        vllm_features=vllm_features,
    )


# --- images padded to a square ----------------------------------------------------------------------------------------


def _prepare_squares(image_processor: ImageProcessor, config: Config, limits: ImageLimits) -> ImagePreparation:
    """Images scaled and padded to one square, with the number of tokens that the projector has for it (Aria)."""
    tokens = {
        side: config.projector_patch_to_query_dict.get((side // config.vision_config.patch_size) ** 2)
        for side in (490, 980)  # the sides that the image processor accepts
    }
    sides = [side for side, count in tokens.items() if count and side <= image_processor.max_image_size]
    if not sides:
        raise UserError(
            f"the model has no number of image tokens for images of {image_processor.max_image_size} pixels"
        )
    longest = min(math.isqrt(limits.max_pixels), limits.max_side or math.inf)
    side = max((side for side in sides if side <= longest), default=sides[0])

    def fit(height: int, width: int) -> tuple[int, int]:
        scale = side / max(height, width)
        h, w = (max(int(length * scale), image_processor.min_image_size) for length in (height, width))
        return (h, side) if width >= height else (side, w)

    options = {"max_image_size": side}
    return ImagePreparation(fit, lambda h, w: tokens[side], options, options)


def _blank_square(config: Config) -> BlankImage:
    side, patch = config.vision_config.image_size, config.vision_config.patch_size
    patches = (side // patch) ** 2
    tokens = config.projector_patch_to_query_dict[patches]
    mask = torch.ones(1, side, side, dtype=torch.bool)
    return BlankImage({"pixel_values": torch.zeros(1, 3, side, side), "pixel_mask": mask}, patches, tokens)


# --- images cut into tiles --------------------------------------------------------------------------------------------


def _prepare_tiles(image_processor: ImageProcessor, config: Config, limits: ImageLimits) -> ImagePreparation:
    """Images cut into square tiles, with a thumbnail of the whole; each has the same number of tokens (InternVL)."""
    tile = image_processor.size["height"]
    most = min(image_processor.max_patches, limits.max_pixels // tile**2)
    if limits.max_side:
        most = min(most, limits.max_side // tile)
    options = {"crop_to_patches": True, "min_patches": image_processor.min_patches, "max_patches": max(1, most)}

    def count(height: int, width: int) -> int:
        return image_processor.get_number_of_image_patches(height, width, options) * config.image_seq_length

    return ImagePreparation(lambda h, w: (h, w), count, options, options)  # the tiles are cut from the original


def _blank_tile(config: Config) -> BlankImage:
    (height, width), (h, w) = config.vision_config.image_size, config.vision_config.patch_size
    pixels = torch.zeros(1, config.vision_config.num_channels, height, width)
    return BlankImage({"pixel_values": pixels}, (height // h) * (width // w), config.image_seq_length)


# --- the families -------------------------------------------------------------------------------------------------

QWEN_VISION = _grid_vision("qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil", "<|image_pad|>", True)
GLM_VISION = _grid_vision("glm46v.image_processing_pil_glm46v.Glm46VImageProcessorPil", "<|image|>", False)
FAMILIES = (
    Family("Qwen2-VL", ("qwen2_vl",), QWEN_VISION, turns=True, coordinates=1000),
    Family("Qwen2.5-VL", ("qwen2_5_vl",), QWEN_VISION, turns=True),
    Family("Qwen3-VL", ("qwen3_vl",), QWEN_VISION, turns=True, coordinates=1000),
    Family("Qwen3.5", ("qwen3_5",), QWEN_VISION),
    Family("Qwen3-VL-MoE", ("qwen3_vl_moe",), QWEN_VISION, router="mlp.gate", turns=True, coordinates=1000),
    Family(
        "Aria",
        ("aria",),
        Vision(
            image_processor="aria.image_processing_pil_aria.AriaImageProcessorPil",
            prepare_images=_prepare_squares,
            blank=_blank_square,
            inputs=_outputs("pixel_values", "pixel_mask"),
            parts=("vision_tower", "multi_modal_projector"),
            blocks="vision_tower.encoder.layers",
            token="<|img|>",
            unused="post_layernorm",
        ),
        router="mlp.router",
    ),
    Family(
        "InternVL3.5",
        ("internvl",),
        Vision(
            image_processor="got_ocr2.image_processing_pil_got_ocr2.GotOcr2ImageProcessorPil",
            prepare_images=_prepare_tiles,
            blank=_blank_tile,
            inputs=_outputs("pixel_values"),
            parts=("vision_tower", "multi_modal_projector"),
            blocks="vision_tower.encoder.layer",
            token="<IMG_CONTEXT>",
            expansion="<img>{}</img>",
        ),
    ),
    Family("GLM-4.6V", ("glm4v", "glm46v"), GLM_VISION),
    Family("Qwen2.5", ("qwen2",), turns=True),
    Family("Qwen3", ("qwen3",), turns=True),
    Family("Llama", ("llama",), turns=True),
    Family("Gemma 3 (text)", ("gemma3_text",), turns=True),
)
