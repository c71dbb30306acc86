"""The bases, what is made of each, and where it is read."""

import pathlib
from dataclasses import dataclass, field

from tests.elsewhere import hub_configs

QWEN_STOP = {"bos_token_id": 151643, "pad_token_id": 151643, "eos_token_id": [151645, 151643]}
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN_PIXELS = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
QWEN3_PIXELS = {"size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16}
QWEN3_PIXELS |= {"temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
TILES = {"crop_to_patches": False, "min_patches": 1, "max_patches": 12, "size": {"height": 448, "width": 448}}
TILES |= {"do_resize": True, "do_rescale": True, "do_normalize": True}
TILES |= {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
SQUARE = {"max_image_size": 490, "min_image_size": 336, "split_image": False, "do_convert_rgb": True}
SQUARE |= {"do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}


@dataclass(frozen=True)
class Base:
    """A tiny model in hub layout."""

    config: dict
    stop: dict = field(default_factory=lambda: QWEN_STOP)
    """Token ids of generation_config.json."""
    image: str = ""
    """What the chat template writes for an image; "" for a text model, which keeps the tokenizer's real template."""
    template_in: tuple[str, ...] = ("tokenizer_config.json",)
    """The files that hold the chat template."""
    tokens: tuple[str, ...] = ()
    """Special tokens that the family adds to the tokenizer of Qwen3."""
    roles: dict[str, str] = field(default_factory=dict)
    """Those that its processor finds by their role."""
    pixels: dict | None = None
    """Settings of the image processor."""
    weights: str = "one safetensors file"
    """How the weights are stored: also "three shards" or "two .bin files"."""
    tower_adapted: bool = True
    """Whether the adapter adapts the vision tower, too."""
    made_in: str = "elsewhere"
    """The environment whose transformers makes it."""

    @property
    def places(self) -> tuple[str, ...]:
        """The environments that know the family."""
        return ("elsewhere", "newest") if self.made_in == "elsewhere" else ("newest",)


BOTH = ("tokenizer_config.json", "chat_template.json")
BASES = {
    "qwen2_vl": Base(
        hub_configs.QWEN2_VL,
        image=QWEN_IMAGE,
        template_in=BOTH,
        pixels=QWEN_PIXELS | CLIP | {"image_processor_type": "Qwen2VLImageProcessor"},
    ),
    "qwen2_5_vl": Base(
        hub_configs.QWEN2_5_VL,
        image=QWEN_IMAGE,
        template_in=BOTH,
        pixels=QWEN_PIXELS | CLIP | {"image_processor_type": "Qwen2VLImageProcessor"},
        tower_adapted=False,
    ),
    "qwen3_vl": Base(
        hub_configs.QWEN3_VL,
        image=QWEN_IMAGE,
        template_in=BOTH,
        pixels=QWEN3_PIXELS | {"image_processor_type": "Qwen2VLImageProcessorFast"},
    ),
    "qwen3_vl_moe": Base(
        hub_configs.QWEN3_VL_MOE,
        image=QWEN_IMAGE,
        template_in=BOTH,
        pixels=QWEN3_PIXELS | {"image_processor_type": "Qwen2VLImageProcessorFast"},
        weights="three shards",
    ),
    "aria": Base(
        hub_configs.ARIA,
        image="<fim_prefix><|img|><fim_suffix>",
        template_in=("chat_template.json",),
        tokens=("<fim_prefix>", "<fim_suffix>"),
        roles={"image_token": "<|img|>"},
        pixels=SQUARE | {"image_processor_type": "AriaImageProcessor"},
    ),
    "internvl": Base(
        hub_configs.INTERNVL,
        image="<IMG_CONTEXT>\n",
        template_in=("chat_template.jinja",),
        roles={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        pixels=TILES | {"image_processor_type": "GotOcr2ImageProcessorFast"},
    ),
    "glm4v": Base(
        hub_configs.GLM4V,
        image="<|begin_of_image|><|image|><|end_of_image|>",
        template_in=("chat_template.jinja",),
        tokens=("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
        roles={"image_token": "<|image|>", "video_token": "<|video|>"},
        pixels={"size": {"shortest_edge": 12544, "longest_edge": 9633792}, "patch_size": 14, "temporal_patch_size": 2}
        | {"merge_size": 2, "image_processor_type": "Glm4vImageProcessor"}
        | CLIP,
    ),
    "qwen3_5": Base(
        hub_configs.QWEN3_5,
        image=QWEN_IMAGE,
        template_in=("tokenizer_config.json", "chat_template.jinja"),
        pixels=QWEN3_PIXELS | {"image_processor_type": "Qwen2VLImageProcessorFast"},
        made_in="newest",
    ),
    "qwen2_5": Base(hub_configs.QWEN2_5),
    "qwen2_5_bin": Base(hub_configs.QWEN2_5, weights="two .bin files"),
    "qwen3": Base(hub_configs.QWEN3),
    "gemma3": Base(hub_configs.GEMMA3),
    "llama": Base(hub_configs.LLAMA, stop={"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009]}),
}
MIXTURES = ("qwen3_vl_moe", "aria")  # of experts
UNTYING = ("untied_by_copy", "untied_by_lora")  # adapters, made with PEFT, that untie the head of a base
TIED = ("qwen2_5_vl", "qwen3_vl")  # bases that they are made for; one has the key at two places in its config

# What is read: "base" itself; "full", a model trained whole; "adapter"; "merged", the base with that adapter; the same
# of an adapter that adapts the experts, too; the base merged with an adapter that unties its head.
VARIANTS = {
    name: [
        "base",
        "full",
        "adapter",
        "merged",
        *(["experts", "experts_merged"] if name in MIXTURES else []),
        *(UNTYING if name in TIED else []),
    ]
    for name in BASES
}
MADE_BY = {"merged": "adapter", "experts_merged": "experts"}  # a merged model is made in the run of its adapter
WHOLE = "whole model"
EXPERTS = "adapter of experts"
ALIKE = "picture, alike in both"
# What cannot be right elsewhere, whatever an export writes: there, the base itself gives something else than here.
DIFFERS = {
    ("elsewhere", "aria"): {
        "picture": "4.57.1 gives the projector the tower's output after its last norm, 5 before it, and gives other "
        "positions to the patches of a whole side; 4 x 5 patches and the last layer but one are compared instead",
        EXPERTS: "4.57.1 with PEFT 0.17.1 has them in another layout, as the run says",
    },
    ("newest", "aria"): {EXPERTS: "5.24.0 joins fc1 and fc2 otherwise, and PEFT does not find them"},
    ("newest", "glm4v"): {WHOLE: "5.24.0 ignores the flat config of the hub and builds a model of the default size"},
}
ADAPTERS = ("adapter", "experts")
TRAINED = ("full", *ADAPTERS)
READ = [
    (place, name, variant)
    for name, variants in VARIANTS.items()
    for variant in variants
    for place in BASES[name].places
]


def folder_of(work: pathlib.Path, name: str, variant: str) -> pathlib.Path:
    """Return the folder of what is read, within the folder `work` of all that is made."""
    if variant == "base":
        return work / "bases" / name
    return work / name / variant / ("final" if variant in TRAINED else "")


def untying_adapter(work: pathlib.Path, name: str, variant: str) -> pathlib.Path:
    """Return the folder of an adapter that unties the head of the base `name`."""
    return work / name / f"{variant}-adapter"


def expected_file(work: pathlib.Path, name: str, variant: str) -> pathlib.Path:
    """Return the file with the logits of the trained weights, which were taken in memory."""
    return work / name / f"{variant}.pt"


def inputs_file(work: pathlib.Path, name: str) -> pathlib.Path:
    """Return the file with the inputs that all logits of a base are for."""
    return work / name / "inputs.pt"


def read_file(work: pathlib.Path, place: str, name: str, variant: str) -> pathlib.Path:
    """Return the file with what an environment read."""
    return work / name / f"{variant}-{place}.pt"
