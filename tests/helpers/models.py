"""Tiny, randomly initialised models of every supported family, and prompts for them."""

import math
from dataclasses import replace

import torch
from PIL import Image
from torch import Tensor
from transformers import (
    AriaConfig,
    AriaForConditionalGeneration,
    AriaTextConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.idefics3 import Idefics3VisionConfig

from common.records import Completion, Group, Prompt, Rewards, Rollout, Sample, ScoredGroup
from data import Processor, encode_prompt, prompt_positions

IMAGE, VISION_START, VISION_END, VIDEO = 250, 251, 252, 253
TEXT = dict(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=128,
    vocab_size=256,
    max_position_embeddings=512,
)
TOKENS = dict(
    image_token_id=IMAGE, vision_start_token_id=VISION_START, vision_end_token_id=VISION_END, video_token_id=VIDEO
)


def mrope(section: list[int], **more: object) -> dict:
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section, **more}


def qwen2_vl():
    vision = dict(depth=2, embed_dim=64, num_heads=4, hidden_size=64, mlp_ratio=2)
    text = dict(**TEXT, rope_parameters=mrope([2, 3, 3]))
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **TOKENS))


def qwen2_5_vl():
    vision = dict(
        depth=2, hidden_size=64, num_heads=4, intermediate_size=96, out_hidden_size=64, fullatt_block_indexes=[1]
    )
    text = dict(**TEXT, rope_parameters=mrope([2, 3, 3]))
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **TOKENS))


def qwen3_vl(vocab_size: int = TEXT["vocab_size"], tokens: dict[str, int] = TOKENS):
    vision = dict(
        depth=3,
        hidden_size=64,
        num_heads=4,
        intermediate_size=128,
        out_hidden_size=64,
        patch_size=14,
        deepstack_visual_indexes=[0, 1],
        num_position_embeddings=64,
    )
    text = dict(TEXT | {"vocab_size": vocab_size}, head_dim=16)
    text["rope_parameters"] = mrope([4, 2, 2], mrope_interleaved=True)
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **tokens))


def aria():
    text = AriaTextConfig(**TEXT, moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1, pad_token_id=0)
    vision = Idefics3VisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    config = AriaConfig(
        text_config=text, vision_config=vision, image_token_index=IMAGE, projector_patch_to_query_dict={4: 3}
    )
    return AriaForConditionalGeneration(config)


def qwen2_5():
    return Qwen2ForCausalLM(Qwen2Config(**TEXT))


def qwen3():
    return Qwen3ForCausalLM(Qwen3Config(**TEXT, head_dim=16))


FAMILIES = {f.__name__: f for f in (qwen2_vl, qwen2_5_vl, qwen3_vl, aria, qwen2_5, qwen3)}


def build(family: str, seed: int = 0) -> torch.nn.Module:
    """Return a tiny float32 model of `family` with random values for every parameter."""
    torch.manual_seed(seed)
    model = FAMILIES[family]().float()
    for parameter in model.parameters():  # norms and biases too: a weight of 1 or a bias of 0 could hide a mistake
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1 and parameter.mean() == 1), std=0.1)
    return model


def make_group(model, family: str, text: int, grids: list[tuple[int, int]], lengths: list[int], g) -> Group:
    """Return a group with one random completion for each length in `lengths`.

    The prompt has `text` random tokens and one random image for each entry of `grids`, which gives its (height, width)
    in patches.
    """

    def random_tokens(n: int) -> Tensor:
        return torch.randint(0, 200, (n,), generator=g)

    ids, vision = [random_tokens(text)], {}
    if family == "aria" and grids:
        for _ in grids:
            ids += [torch.full((3,), IMAGE), random_tokens(2)]
        pixel_mask = torch.ones(len(grids), 28, 28, dtype=torch.bool)
        vision = {"pixel_values": torch.randn(len(grids), 3, 28, 28, generator=g), "pixel_mask": pixel_mask}
    elif grids:
        config = model.config.vision_config
        patch = config.in_channels * config.temporal_patch_size * config.patch_size**2
        for h, w in grids:
            image = torch.full((h * w // 4,), IMAGE)
            ids += [torch.tensor([VISION_START]), image, torch.tensor([VISION_END]), random_tokens(2)]
        pixels = torch.randn(sum(h * w for h, w in grids), patch, generator=g)
        vision = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, h, w] for h, w in grids])}
    prompt_ids = torch.cat(ids)
    positions = prompt_positions(model.model, prompt_ids, vision)
    digest = vision["pixel_values"].numpy().tobytes() if vision else b""
    prompt = Prompt(prompt_ids, [], positions, [], vision, image_token=IMAGE, image_digest=digest)
    return Group(prompt, [Completion(random_tokens(n), torch.zeros(n)) for n in lengths])


def plain_logprobs(model, group: Group, completion: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the log-probabilities (L,) of one completion of L tokens.

    They come from a plain forward pass of the unmodified model.
    """
    ids = torch.cat([group.prompt.ids, completion])[None]
    inputs = dict(group.prompt.vision)
    if "image_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = (ids == IMAGE).int()
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits[0] / temperature
    logp = logits[len(group.prompt.ids) - 1 : -1].log_softmax(-1)
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
        sample = Sample("<image>?" if with_image else "?", "1", [image] if with_image else [], f"row {i}")
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
