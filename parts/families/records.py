"""The records of further families, and how their images become tokens: padded to a square, or cut into tiles."""

import math

import torch

from common.errors import UserError
from parts.families.delta_net import check_kernels, prepare_delta_nets
from parts.families.experts import prepare_experts
from policy.families import (
    QWEN_VISION,
    BlankImage,
    Config,
    Family,
    ImageLimits,
    ImagePreparation,
    ImageProcessor,
    Vision,
    grid_vision,
    outputs,
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
    longest = math.isqrt(limits.max_pixels)
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
    options = {"crop_to_patches": True, "min_patches": image_processor.min_patches, "max_patches": max(1, most)}

    def count(height: int, width: int) -> int:
        return image_processor.get_number_of_image_patches(height, width, options) * config.image_seq_length

    return ImagePreparation(lambda h, w: (h, w), count, options, options)  # the tiles are cut from the original


def _blank_tile(config: Config) -> BlankImage:
    (height, width), (h, w) = config.vision_config.image_size, config.vision_config.patch_size
    pixels = torch.zeros(1, config.vision_config.num_channels, height, width)
    return BlankImage({"pixel_values": pixels}, (height // h) * (width // w), config.image_seq_length)


# --- the families -----------------------------------------------------------------------------------------------------

GLM_VISION = grid_vision("glm46v.image_processing_pil_glm46v.Glm46VImageProcessorPil", "<|image|>", False)
ARIA_VISION = Vision(
    image_processor="aria.image_processing_pil_aria.AriaImageProcessorPil",
    prepare_images=_prepare_squares,
    blank=_blank_square,
    inputs=outputs("pixel_values", "pixel_mask"),
    modules=("vision_tower", "multi_modal_projector"),
    blocks="vision_tower.encoder.layers",
    token="<|img|>",
    unused="post_layernorm",
)
INTERN_VISION = Vision(
    image_processor="got_ocr2.image_processing_pil_got_ocr2.GotOcr2ImageProcessorPil",
    prepare_images=_prepare_tiles,
    blank=_blank_tile,
    inputs=outputs("pixel_values"),
    modules=("vision_tower", "multi_modal_projector"),
    blocks="vision_tower.encoder.layer",
    token="<IMG_CONTEXT>",
    expansion="<img>{}</img>",
)
FAMILIES = (
    Family("Qwen2-VL", ("qwen2_vl",), QWEN_VISION, turns=True, coordinates=1000),  # arXiv:2409.12191
    Family(
        "Qwen3.5",
        ("qwen3_5",),
        QWEN_VISION,
        turns=True,
        coordinates=1000,  # its maintainers: QwenLM/Qwen3.8-Flash-Next#4
        check=check_kernels,
        prepare=prepare_delta_nets,
    ),
    Family(
        "Qwen3-VL-MoE",
        ("qwen3_vl_moe",),
        QWEN_VISION,
        router="mlp.gate",
        turns=True,
        coordinates=1000,  # as Qwen3-VL
        prepare=prepare_experts,
    ),
    Family(
        "Aria",
        ("aria",),
        ARIA_VISION,
        router="mlp.router",
        coordinates=999,  # of its makers' own fine-tuning: examples/refcoco/evaluation.py of rhymes-ai/Aria
        prepare=prepare_experts,
    ),
    Family(
        "InternVL3.5",
        ("internvl",),
        INTERN_VISION,
        coordinates=1000,  # internvl.readthedocs.io/en/latest/get_started/chat_data_format.html
    ),
    Family(
        "GLM-4.6V",
        ("glm4v", "glm46v"),
        GLM_VISION,
        turns=True,
        coordinates=1000,  # huggingface.co/zai-org/GLM-4.5V, and skills/glmv-grounding of zai-org/GLM-V
    ),
    Family("Llama", ("llama",), turns=True),
    Family("Gemma 3 (text)", ("gemma3_text",), turns=True),
)
