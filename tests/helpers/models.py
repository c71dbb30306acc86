"""Tiny, randomly initialised models of every supported family, and prompts for them."""

import importlib
import json
import math
import os
import pathlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import transformers
from PIL import Image, ImageDraw
from torch import Tensor
from transformers.models.idefics3 import Idefics3VisionConfig

from common.errors import UserError
from common.records import Completion, Group, Prompt, Rewards, Rollout, ScoredGroup, Trajectory
from data import Processor, encode_prompt, prompt_position_ids
from policy.families import Vision, find_family
from tests.helpers import tiny
from tests.helpers.rows import make_sample
from tests.helpers.scripts import ROOT

IMAGE, VISION_START, VISION_END, VIDEO = 250, 251, 252, 253
TEXT = dict(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=128,
    vocab_size=256,
    max_position_embeddings=4096,
    bos_token_id=0,
    eos_token_id=0,
)
TOKENS = dict(
    image_token_id=IMAGE, vision_start_token_id=VISION_START, vision_end_token_id=VISION_END, video_token_id=VIDEO
)
GRID = dict(depth=2, hidden_size=64, num_heads=4, intermediate_size=96, out_hidden_size=64)  # a vision tower


def mrope(section: list[int], **more: object) -> dict:
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section, **more}


def qwen2_vl(text: dict, tokens: dict[str, int]) -> transformers.PreTrainedConfig:
    vision = dict(depth=2, embed_dim=64, num_heads=4, hidden_size=64, mlp_ratio=2)
    return transformers.Qwen2VLConfig(
        text_config=text | {"rope_parameters": mrope([2, 3, 3])}, vision_config=vision, **tokens
    )


def qwen2_5_vl(text: dict, tokens: dict[str, int]) -> transformers.PreTrainedConfig:
    return transformers.Qwen2_5_VLConfig(
        text_config=text | {"rope_parameters": mrope([2, 3, 3])},
        vision_config=GRID | {"fullatt_block_indexes": [1]},
        **tokens,
    )


def qwen3_vl(text: dict, tokens: dict[str, int]) -> transformers.PreTrainedConfig:
    vision = GRID | {"depth": 3, "patch_size": 14, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
    text = text | {"head_dim": 16, "rope_parameters": mrope([4, 2, 2], mrope_interleaved=True)}
    return transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **tokens)


def qwen3_vl_moe(text: dict, tokens: dict[str, int]) -> transformers.PreTrainedConfig:
    vision = GRID | {"depth": 3, "patch_size": 14, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
    text = text | {"head_dim": 16, "rope_parameters": mrope([4, 2, 2], mrope_interleaved=True)}
    text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    return transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision, **tokens)


def qwen3_5(text: dict, tokens: dict[str, int]) -> transformers.PreTrainedConfig:
    text = text | {
        "head_dim": 16,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "rope_parameters": mrope([1, 1, 0], mrope_interleaved=True, partial_rotary_factor=0.25),
    }
    vision = GRID | {"patch_size": 14, "num_position_embeddings": 64}
    return transformers.Qwen3_5Config(text_config=text, vision_config=vision, **tokens)


def aria(text: dict, tokens: dict[str, int]) -> transformers.PreTrainedConfig:
    text = transformers.AriaTextConfig(
        **text, moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1, pad_token_id=0, head_dim=16
    )
    vision = Idefics3VisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=490,
        patch_size=70,
    )
    return transformers.AriaConfig(
        text_config=text,
        vision_config=vision,
        image_token_index=tokens["image_token_id"],
        projector_patch_to_query_dict={49: 3},
    )


def internvl(text: dict, tokens: dict[str, int]) -> transformers.PreTrainedConfig:
    vision = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=[56, 56])
    return transformers.InternVLConfig(
        text_config=text | {"model_type": "qwen3", "head_dim": 16},
        vision_config=vision,
        image_token_id=tokens["image_token_id"],
        image_seq_length=4,
        tie_word_embeddings=False,
    )


def glm4v(text: dict, tokens: dict[str, int]) -> transformers.PreTrainedConfig:
    text = text | {"rope_parameters": mrope([2, 1, 1], partial_rotary_factor=0.5), "pad_token_id": 0}
    text["attention_bias"] = True  # transformers has the biases in any case, vLLM only if told
    names = {"image_start_token_id": "vision_start_token_id", "image_end_token_id": "vision_end_token_id"}
    tokens = {name: tokens[names.get(name, name)] for name in ("image_token_id", "video_token_id", *names)}
    return transformers.Glm4vConfig(
        text_config=text, vision_config=GRID | {"image_size": 56, "patch_size": 14}, **tokens
    )


def qwen2_5(text: dict, tokens: dict[str, int]) -> transformers.PreTrainedConfig:
    return transformers.Qwen2Config(**text)


def qwen3(text: dict, tokens: dict[str, int]) -> transformers.PreTrainedConfig:
    return transformers.Qwen3Config(**text, head_dim=16)


def llama(text: dict, tokens: dict[str, int]) -> transformers.PreTrainedConfig:
    return transformers.LlamaConfig(**text)


def gemma3(text: dict, tokens: dict[str, int]) -> transformers.PreTrainedConfig:
    """Its first layer sees only the last 8 tokens: less than most prompts and completions of the tests."""
    layers = ["sliding_attention", "full_attention"]
    text = {"sliding_window": 8, "layer_types": layers} | text
    return transformers.Gemma3TextConfig(**text, head_dim=16, query_pre_attn_scalar=16, pad_token_id=0)


@dataclass(frozen=True)
class Tiny:
    """What makes a tiny model of a family complete."""

    config: Callable[[dict, dict[str, int]], transformers.PreTrainedConfig]
    chat_image: str = ""  # what the chat template writes for an image
    roles: dict[str, str] | None = None  # tokens that the processor of transformers finds by their role
    image_settings: dict | None = None  # settings of the image processor
    processor: dict | None = None  # settings of the processor of transformers, for vLLM
    video_processor: str = ""  # its video processor, which vLLM always builds
    bounds: tuple[float, float] = (
        1e-5,
        1e-5,
    )  # of log-probabilities and gradients, packed and plain


QWEN = ("<|vision_start|><|image_pad|><|vision_end|>", None, dict(min_pixels=56 * 56, max_pixels=1280 * 28 * 28))
QWEN += (None, "Qwen2VLVideoProcessor")
FAMILIES = {
    "qwen2_vl": Tiny(qwen2_vl, *QWEN),
    "qwen2_5_vl": Tiny(qwen2_5_vl, *QWEN),
    "qwen3_vl": Tiny(qwen3_vl, *QWEN),
    "qwen3_5": Tiny(qwen3_5, *QWEN, bounds=(5e-5, 2e-4)),  # the states are rounded in a different order
    "qwen3_vl_moe": Tiny(qwen3_vl_moe, *QWEN),
    "aria": Tiny(
        aria,
        "<fim_prefix><|img|><fim_suffix>",
        {"image_token": "<|img|>"},
        dict(max_image_size=490, min_image_size=336),
        {"processor_class": "AriaProcessor", "size_conversion": {"490": 3}},
    ),
    "internvl": Tiny(
        internvl,
        "<IMG_CONTEXT>\n",
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        dict(size={"height": 56, "width": 56}, crop_to_patches=True, max_patches=4),
        {"processor_class": "InternVLProcessor", "image_seq_length": 4},
        "InternVLVideoProcessor",
    ),
    "glm4v": Tiny(
        glm4v,
        "<|begin_of_image|><|image|><|end_of_image|>",
        {
            "image_token": "<|image|>",
            "video_token": "<|video|>",
            "video_start_token": "<|begin_of_video|>",
            "video_end_token": "<|end_of_video|>",
        },
        dict(size={"shortest_edge": 56 * 56, "longest_edge": 1280 * 28 * 28}),
        {"processor_class": "Glm46VProcessor"},
        "Glm46VVideoProcessor",
    ),
    "qwen2_5": Tiny(qwen2_5),
    "qwen3": Tiny(qwen3),
    "llama": Tiny(llama),
    "gemma3": Tiny(gemma3),
}
if not (ROOT / "parts" / "families").exists():
    FAMILIES = {name: FAMILIES[name] for name in ("qwen2_5_vl", "qwen3_vl", "qwen2_5", "qwen3")}
WITH_IMAGES = [name for name, family in FAMILIES.items() if family.chat_image]


def tiny_family(name: str) -> Tiny:
    """Return a family by its name; skip the test if the project has no record of it."""
    return FAMILIES.get(name) or pytest.skip(f"{name} needs parts/families, which is not here")


def make_model(config: transformers.PreTrainedConfig) -> transformers.PreTrainedModel:
    multimodal = hasattr(config, "vision_config")
    auto = transformers.AutoModelForImageTextToText if multimodal else transformers.AutoModelForCausalLM
    return auto.from_config(config)


def build(family: str, seed: int = 0, **settings: object) -> torch.nn.Module:
    """Return a tiny float32 model of `family`, with these `settings` in its config and random values as parameters."""
    torch.manual_seed(seed)
    model = make_model(tiny_family(family).config(TEXT | settings, TOKENS)).float()
    randomise(model)
    return model


def randomise(model: torch.nn.Module) -> None:
    """Fill every parameter with random values."""
    for parameter in model.parameters():  # norms and biases too: a weight of 1 or a bias of 0 could hide a mistake
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1 and parameter.mean() == 1), std=0.1)


def widen_heads(config: transformers.PreTrainedConfig) -> transformers.PreTrainedConfig:
    """Double the heads of the decoder with this `config`, from 16 to 32 dimensions, and its hidden size."""
    text, vision = config.get_text_config(), getattr(config, "vision_config", None)
    text.hidden_size *= 2
    for name in ("head_dim", "linear_key_head_dim", "linear_value_head_dim"):
        if getattr(text, name, None):
            setattr(text, name, 2 * getattr(text, name))
    if section := (getattr(text, "rope_parameters", None) or {}).get("mrope_section"):
        text.rope_parameters["mrope_section"] = [2 * size for size in section]
    if hasattr(vision, "out_hidden_size"):
        vision.out_hidden_size = text.hidden_size
    elif hasattr(vision, "embed_dim"):  # Qwen2-VL, whose towers have another name for it
        vision.hidden_size = text.hidden_size
    return config


def save_tiny(family: str, folder: pathlib.Path, wide_heads: bool = False) -> str:
    """Save a tiny model of `family` with tokenizer, chat template and image processor. Return the folder."""
    row = tiny_family(family)
    vision = find_family(row.config(TEXT, TOKENS)).vision
    tokenizer = _tokenizer(row, vision)
    names = {"image_token_id": vision.token if vision else "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    names |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    tokens = {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    torch.manual_seed(0)
    text = TEXT | {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    config = row.config(text, tokens)
    model = make_model(widen_heads(config) if wide_heads else config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if vision:
        module, _, name = vision.image_processor.rpartition(".")
        image_processor = getattr(importlib.import_module(f"transformers.models.{module}"), name)
        image_processor(**row.image_settings).save_pretrained(folder)
        _write_settings_for_vllm(row, folder)
    return str(folder)


def end_with(folder: str, token: str, template: str | None = None) -> str:
    """Make `token` the only one that ends the answers of a saved model, wherever models name it. Return `folder`.

    `template`: another chat template.
    """
    path = pathlib.Path(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token, tokenizer.chat_template = token, template or tokenizer.chat_template
    if tokenizer.eos_token_id >= json.loads((path / "config.json").read_text())["vocab_size"]:
        raise ValueError(f"{token} is not in the vocabulary")
    tokenizer.save_pretrained(folder)
    for file in (path / "config.json", path / "generation_config.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": tokenizer.eos_token_id}))
    return folder


def _write_settings_for_vllm(row: Tiny, folder: pathlib.Path) -> None:
    """Write the settings with which vLLM builds the processor of transformers, with a video processor.

    Building these processors here would need torchvision.
    """
    if row.processor:
        (folder / "processor_config.json").write_text(json.dumps(row.processor))
    if row.video_processor:
        settings = json.loads((folder / "preprocessor_config.json").read_text())
        del settings["image_processor_type"]
        settings["video_processor_type"] = row.video_processor
        (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))


def _tokenizer(row: Tiny, vision: Vision | None) -> transformers.PreTrainedTokenizerFast:
    """Return the demo's byte tokenizer with the special tokens and the chat template of a family."""
    base = tiny.load_tokenizer()
    special = re.findall(r"<[^>]+>", row.chat_image + (vision.expansion if vision else ""))
    base.backend_tokenizer.add_special_tokens([*special, *(row.roles or {}).values()])
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=base.backend_tokenizer,
        eos_token=base.eos_token,
        pad_token=base.pad_token,
        chat_template=base.chat_template.replace(image, row.chat_image.replace("\n", "\\n") or image),
        extra_special_tokens=row.roles or {},
    )


def skip_without_linear_attention() -> None:
    """Skip a test that needs Gated DeltaNet layers, where a training run would refuse them."""
    config = build("qwen3_5").config
    try:
        find_family(config).check(config, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    except UserError as error:
        pytest.skip(str(error))


def groups_of(lengths_of_groups: list[list[int]]) -> list[Group]:
    """Return groups with a prompt of 10 tokens each, and completions of these lengths."""
    prompt = Prompt(torch.zeros(10, dtype=torch.long), [], torch.zeros(1, 10, dtype=torch.long))
    completions = [
        [Completion(torch.zeros(n).long(), torch.zeros(n)) for n in lengths] for lengths in lengths_of_groups
    ]
    return [Group(prompt, group, index) for index, group in enumerate(completions)]


def make_group(model, family: str, text: int, grids: list[tuple[int, int]], lengths: list[int], g) -> Group:
    """Return a group with one random completion for each length in `lengths`.

    The prompt has `text` random tokens and one random image for each entry of `grids`, which gives its (height, width)
    in patches. A family that pads images to a square gets a square with a border of height - 2 rows of patches instead,
    and one that cuts them into tiles gets height / 2 tiles.
    """

    def random_tokens(n: int) -> Tensor:
        return torch.randint(0, 200, (n,), generator=g)

    ids, images = [random_tokens(text)], []
    for h, w in grids:
        tokens, vision = random_image(model.config, h, w, g)
        images.append(vision)
        ids += [
            torch.tensor([VISION_START]),
            torch.full((tokens,), IMAGE),
            torch.tensor([VISION_END]),
            random_tokens(2),
        ]
    vision = {name: torch.cat([image[name] for image in images]) for name in (images or [{}])[0]}
    prompt_ids = torch.cat(ids)
    positions = prompt_position_ids(model.model, prompt_ids, vision)
    digest = vision["pixel_values"].numpy().tobytes() if vision else b""
    prompt = Prompt(prompt_ids, [], positions, vision=vision, image_token=IMAGE, image_digest=digest)
    return Group(prompt, [Completion(random_tokens(n), torch.zeros(n)) for n in lengths])


def random_image(config: transformers.PreTrainedConfig, h: int, w: int, g) -> tuple[int, dict[str, Tensor]]:
    """Return the number of image tokens of a random image, and the inputs of the vision tower for it."""
    family = find_family(config).vision
    blank = family.blank(config)
    pixels = blank.vision["pixel_values"]
    if "image_grid_thw" in blank.vision:
        grid = torch.tensor([[1, h, w]])
        return h * w // 4, {"pixel_values": torch.randn(h * w, pixels.shape[1], generator=g), "image_grid_thw": grid}
    if "pixel_mask" in blank.vision:
        mask = torch.ones(1, *pixels.shape[2:], dtype=torch.bool)
        mask[:, len(mask[0]) - config.vision_config.patch_size * (h - 2) :] = False  # images lie at the top left
        return blank.tokens, {"pixel_values": torch.randn(pixels.shape, generator=g), "pixel_mask": mask}
    tiles = torch.randn(h // 2, *pixels.shape[1:], generator=g)
    return len(tiles) * blank.tokens, {"pixel_values": tiles}


def make_trajectory(model, prompt: Prompt, turns: list[int | tuple[int, list[tuple[int, int]]]], g) -> Completion:
    """Return a completion of several turns that follow `prompt`, with random tokens and images.

    `turns` are, in order, how many tokens the model samples, and what it then sees: so many text tokens, after images
    of these (height, width) in patches (see `make_group`).
    """

    def random_tokens(n: int) -> Tensor:
        return torch.randint(0, 200, (n,), generator=g)

    ids, sampled, visions = [], [], []
    for turn in turns:
        parts = [random_tokens(turn if isinstance(turn, int) else turn[0])]
        for h, w in () if isinstance(turn, int) else turn[1]:
            tokens, vision = random_image(model.config, h, w, g)
            visions.append(vision)
            image = [torch.tensor([VISION_START]), torch.full((tokens,), IMAGE), torch.tensor([VISION_END])]
            parts = [*parts[:-1], *image, parts[-1]]
        ids += parts
        sampled += [torch.full((len(part),), isinstance(turn, int)) for part in parts]
    return as_trajectory(model, prompt, torch.cat(ids), torch.cat(sampled), visions)


def as_trajectory(model, prompt: Prompt, ids: Tensor, sampled: Tensor, visions: list[dict[str, Tensor]]) -> Completion:
    """Return a completion with these tokens (F,) after `prompt`, of which the model has `sampled` some, and images."""
    trajectory = Trajectory(ids, [], prompt.position_ids, image_token=IMAGE, loss_mask=sampled, vision=joined(visions))
    trajectory.image_digest = b"".join(vision["pixel_values"].numpy().tobytes() for vision in visions)
    whole, is_image = whole_sequence(prompt, trajectory)
    vision = joined([vision for vision in (prompt.vision, trajectory.vision) if vision])
    positions = positions_of(model.model, whole, vision, is_image)
    trajectory.position_ids = positions[:, len(prompt.ids) :]
    return Completion(ids[sampled], torch.zeros(int(sampled.sum())), trajectory=trajectory)


def positions_of(model, ids, vision, is_image):
    """Return the (R, S) position ids of S tokens, of which those `is_image` (S,) belong to images."""
    if not hasattr(model, "get_rope_index"):
        return torch.arange(len(ids))[None]
    kinds = is_image.int()[None]
    grids = vision.get("image_grid_thw")
    return model.get_rope_index(ids[None], image_grid_thw=grids, mm_token_type_ids=kinds)[0][:, 0]


def whole_sequence(prompt: Prompt, trajectory: Trajectory) -> tuple[Tensor, Tensor]:
    """Return the tokens of a prompt and what follows it, and which of them are those of images."""
    whole = torch.cat([prompt.ids, trajectory.ids])
    is_image = torch.cat([prompt.ids == prompt.image_token, (trajectory.ids == IMAGE) & ~trajectory.loss_mask])
    return whole, is_image


def joined(visions: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([vision[name] for vision in visions]) for name in (visions or [{}])[0]}


def plain_logprobs(
    model, group: Group, completion: Tensor | Completion, temperature: float = 1.0, stand_in: int = IMAGE
) -> Tensor:
    """Return the log-probabilities (L,) of one completion of L tokens, or of those that the model has sampled of it.

    They come from a plain forward pass of the unmodified model. It reads the token `stand_in` where the model has
    sampled an image token, for which it would expect an image.
    """
    prompt, seen = group.prompt, getattr(completion, "trajectory", None)
    completion = getattr(completion, "ids", completion)
    ids = torch.cat([prompt.ids, completion])[None]
    is_image, predicted, vision = ids == prompt.image_token, torch.ones_like(completion).bool(), prompt.vision
    if seen:
        ids, is_image = (each[None] for each in whole_sequence(prompt, seen))
        predicted, vision = seen.loss_mask, joined([each for each in (prompt.vision, seen.vision) if each])
    inputs = dict(vision)
    if "image_grid_thw" in inputs:  # M-RoPE
        inputs["mm_token_type_ids"] = is_image.int()
    read = torch.where((ids == IMAGE) & ~is_image, stand_in, ids)
    logits = model(input_ids=read, attention_mask=torch.ones_like(ids), **inputs).logits[0] / temperature
    logp = logits[len(prompt.ids) - 1 : -1][predicted].log_softmax(-1)
    return logp.gather(-1, completion[:, None])[:, 0]


def fixed_groups(processor: Processor, images_at_even_indices: bool) -> list[ScoredGroup]:
    """Return six groups of four completions for the tiny model, the same on every process.

    Some prompts have images and some do not. One completion is unscored, and all rewards of one group are equal.
    """
    g = torch.Generator().manual_seed(5)
    groups = []
    for i in range(6):
        with_image = i % 2 == 0 if images_at_even_indices else i not in (1, 4)
        image = Image.fromarray(torch.randint(0, 255, (56, 28 * (1 + i % 3), 3), generator=g).byte().numpy())
        sample = make_sample("<image>?" if with_image else "?", "1", [image] if with_image else [], f"row {i}")
        processor = replace(processor, system=None)
        prompt = encode_prompt(sample, processor)
        rollouts, rewards = [], []
        for j in range(4):
            ids = torch.randint(0, 256, (1 + (3 * i + 5 * j) % 11,), generator=g)
            reward = math.nan if (i, j) == (2, 1) else 1.0 if i == 3 else float(torch.rand(1, generator=g))
            noise = torch.rand(len(ids), generator=g)
            rollouts.append(Rollout(ids, -5 - noise))
            rewards.append(Rewards(reward, reward))
        groups.append(ScoredGroup(sample, prompt, rollouts, rewards, i))
    return groups


def write_rows(folder: pathlib.Path, with_images: bool) -> str:
    """Write eight rows, of text or with no, one or two images of different sizes each, and return their file."""
    path = folder / ("mixed.jsonl" if with_images else "text.jsonl")
    rows = []
    for i in range(8):
        images = [str(folder / f"{(i + j) % 8}.png") for j in range(i % 3 if with_images else 0)]
        rows.append({"prompt": "<image>" * len(images) + f"How many, {i}?", "answer": str(i), "images": images})
        image = Image.new("RGB", (84 + 28 * (i % 3), 84 + 56 * (i % 2)), (250, 20 * i, 90))
        ImageDraw.Draw(image).ellipse((5 + i, 10, 40 + i, 40), fill="navy")
        image.save(folder / f"{i}.png")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# --- the table of families --------------------------------------------------------------------------------------------

RECORD = os.environ.get("RECORD_FAMILIES")


def record(family: str, column: str, value: str) -> None:
    """Write a cell of the table to the file RECORD_FAMILIES, if it is set."""
    if RECORD:
        path = pathlib.Path(RECORD)
        table = json.loads(path.read_text()) if path.is_file() else {}
        table.setdefault(family, {})[column] = value
        path.write_text(json.dumps(table, indent=1) + "\n")
