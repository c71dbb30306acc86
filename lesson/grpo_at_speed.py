"""GRPO for Qwen2.5-VL in one file, on one to eight GPUs, at nearly the speed of the full code.

    torchrun --nproc_per_node 8 lesson/grpo_at_speed.py --model Qwen/Qwen2.5-VL-3B-Instruct --data rows.jsonl

A row of rows.jsonl is {"prompt": "How many?", "answer": "3", "images": ["1.png"]}, with paths beside the file. Pictures
stand at the tags <image> of the prompt, or else before it. Replace `reward` by your own. Read from the bottom: `train`
is the run, `step` one step, `loss_of` the formula. What makes it fast, in the order of the file:

    a prompt is computed once for its G completions      `pack`, `prefix_attention`
    no padding: micro-batches are one long sequence      `pack`, `micro_batches`
    logits of 512 tokens at a time                       `TokenLogp`
    weights sharded in float32, computed in bfloat16     `shard`
    vLLM in this process, asleep while training          `Sampler`
    weights handed over one by one                       `Sampler.sync`

What it leaves out, and where the rest of this repository has it: other columns and formats (inputs/rows.py, data.py),
skipping a bad update, and stopping if sampler and trainer are far apart (training/guards.py), other models
(policy/families.py), adapters and 4-bit weights (policy/lora.py), schedules of the learning rate (policy/optimizer.py),
memory planned before the start (policy/memory.py), held-out rows and evaluation (evaluate.py), other losses and rewards
(grpo.py, rewards.py), groups drawn again if all rewards are equal (training/collect.py), turns with tools
(parts/turns/), FlashAttention 4 and equal work for all GPUs (parts/fast/), pages and trackers (parts/pages/).

With the same completions, it computes the log-probabilities and weights of the full code, on a CPU
(tests/test_lesson.py), where it also runs with vLLM's build for CPUs. On a GPU, its log-probabilities are within what
bfloat16 allows of the full code's (tests/test_gpu.py). On one H200, a step of a 3B model takes 1.2 times as long
(6_at_speed.md).

Words: a group is a prompt and its completions; a micro-batch, or part, is the groups of one forward and backward pass.

Shapes: T tokens of a micro-batch, K keys that they attend to (a prompt's count again for each of its completions),
C completion tokens, S tokens of a prompt, L of a completion, H heads, E head dimension, D hidden size, V vocabulary,
P prompts of this process, G completions of each.
"""

import argparse
import importlib.util
import inspect
import json
import os
import pathlib
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import transformers
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from tqdm import tqdm

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # vLLM in this process: its weights are tensors that we can write
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
LOGIT_ROWS = 512  # completion tokens whose (V,) float32 logits are in memory together
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}
COMPUTE = {"cuda": torch.bfloat16, "cpu": torch.float32}  # dtype of the layers; the optimizer's weights are float32


@dataclass
class Settings:
    model: str = "Qwen/Qwen2.5-VL-3B-Instruct"  # a name on the hub or a folder
    data: str = "rows.jsonl"  # a row a line; the paths of its images begin at the file's folder
    output: str = "runs/at_speed"  # metrics.jsonl, checkpoints, and the trained model in final/
    prompts: int = 32  # per step, on all GPUs together
    group: int = 8  # completions of each prompt (G)
    max_tokens: int = 512  # of a completion, at most; one cut off there is trained like the others
    steps: int = 100  # of training; a step samples and scores prompts x group completions
    learning_rate: float = 1e-6  # of AdamW; constant
    clip: float = 0.2  # ε: beyond 1 ± ε, the ratio π / π_old earns nothing more
    updates: int = 1  # optimizer steps on all completions of a step; π_old is the policy before the first
    beta: float = 0.0  # weight of the KL divergence from the initial model
    importance_cap: float = 2.0  # upper bound of the weight π_old / π_sampler: vLLM rounds differently; 0: no weight
    temperature: float = 1.0  # of sampling and of all log-probabilities
    micro_batch_tokens: int = 8192  # of a forward and backward pass, at most
    checkpointing: bool = False  # compute each layer again in the backward pass: less memory, a third slower
    gpu_memory: float = 0.4  # vLLM's share of the GPU's memory while it samples
    min_pixels: int = 3136  # of a picture; a smaller one is enlarged
    max_pixels: int = 1003520  # of a picture; a larger one is reduced
    save_every: int = 20  # steps; a run that finds a checkpoint in its folder resumes from it
    seed: int = 0  # of the order of the rows and of sampling


def reward(completion: str, answer: str) -> float:
    """Return 1 if the completion's last number is the answer, or all of it if it has none. Yours goes here."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", completion)
    last = numbers[-1] if numbers else completion.strip(" .\n")
    return float(last.lower() == answer.strip().lower())


# --- prompts ----------------------------------------------------------------------------------------------------------


@dataclass
class Prompt:
    """A row, as the trainer and the sampler see it."""

    answer: str
    ids: Tensor  # (S,) with a token for each 28 x 28 pixels of an image
    sampler_ids: list[int]  # with one token for each image
    positions: Tensor  # (3, S) of the rotary embedding: time, height, width
    vision: dict[str, Tensor]  # pixel_values (patches, 1176) and image_grid_thw (images, 3); empty without images
    image_places: Tensor  # which of `ids` stand for images
    features: Tensor | None = None  # (image tokens, D) of the frozen tower, for trainer and sampler; set by `see`


def chat_of(prompt: str, pictures: int) -> list[dict[str, Any]]:
    """Return a prompt as a chat: one message with texts, and pictures at the tags."""
    text = prompt if "<image>" in prompt else "<image>" * pictures + prompt
    pieces = [piece for piece in re.split("(<image>)", text) if piece]
    content = [{"type": "image"} if piece == "<image>" else {"type": "text", "text": piece} for piece in pieces]
    return [{"role": "user", "content": content}]


@dataclass
class Encoder:
    """What turns rows into prompts."""

    folder: pathlib.Path
    tokenizer: transformers.PreTrainedTokenizerBase
    images: transformers.BaseImageProcessor
    skeleton: nn.Module  # the model without weights, which knows how positions are counted
    image_token: int

    def __call__(self, row: dict[str, Any]) -> Prompt:
        pictures = [Image.open(self.folder / path).convert("RGB") for path in row.get("images", [])]
        chat = chat_of(row["prompt"], len(pictures))
        templated = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        sampler_ids = self.tokenizer(templated, add_special_tokens=False).input_ids
        vision = dict(self.images(images=pictures, return_tensors="pt")) if pictures else {}
        grids = vision.get("image_grid_thw", torch.empty(0, 3).long())
        counts, repeated = iter((grids.prod(dim=1) // self.images.merge_size**2).tolist()), []
        for token in sampler_ids:  # the trainer needs the image token as often as the tower returns features
            repeated += [token] * (next(counts) if token == self.image_token else 1)
        ids = torch.tensor(repeated)
        is_image = ids == self.image_token
        kinds = {"image_grid_thw": grids if pictures else None, "mm_token_type_ids": is_image.int()[None]}
        positions = self.skeleton.get_rope_index(ids[None], **kinds)[0][:, 0]
        return Prompt(row["answer"], ids, sampler_ids, positions, vision, is_image.nonzero()[:, 0])


def load_encoder(settings: Settings) -> Encoder:
    config = transformers.AutoConfig.from_pretrained(settings.model)
    if config.model_type != "qwen2_5_vl":
        sys.exit(f"error: {settings.model} is {config.model_type}; this file trains Qwen2.5-VL, grpo.py the others")
    tokenizer = transformers.AutoTokenizer.from_pretrained(settings.model)
    sizes = {"min_pixels": settings.min_pixels, "max_pixels": settings.max_pixels}
    images = transformers.Qwen2VLImageProcessorPil.from_pretrained(settings.model, **sizes)
    with torch.device("meta"):
        skeleton = transformers.AutoModel.from_config(config)
    return Encoder(pathlib.Path(settings.data).parent, tokenizer, images, skeleton, config.image_token_id)


# --- packing: a prompt and its completions in one sequence ------------------------------------------------------------


@dataclass
class Completion:
    """What the sampler has written for a prompt, and what the loss needs for it."""

    ids: Tensor  # (L,) with the end token
    sampler_logp: Tensor  # (L,)
    finished: bool = True  # false: cut off at `max_tokens`, without an end token
    advantage: float = 0.0
    weight: float = 0.0  # of each of its tokens in the loss
    old_logp: Tensor | None = None  # (L,) of the policy before the first update
    ref_logp: Tensor | None = None  # (L,) of the initial model


Group = tuple[Prompt, list[Completion]]


@dataclass
class Packed:
    """Several groups as one sequence of segments: prompt, prompt', …, c1, …, cG, c1', …"""

    ids: Tensor  # (1, T)
    positions: Tensor  # (3, 1, T); completions go on after the largest position of their prompt
    keys: Tensor  # (K,) which token each key is: a completion attends to its prompt, then to itself
    query_starts: Tensor  # (segments + 1,) where each segment begins among the T tokens, int32
    key_starts: Tensor  # (segments + 1,) where its keys begin among the K, int32
    longest: tuple[int, int]  # most queries and most keys of a segment
    predict_from: Tensor  # (C,) the token whose hidden state predicts each completion token
    targets: Tensor  # (C,)
    image_tokens: Tensor  # (image tokens,) their places in the sequence
    features: Tensor | None  # (image tokens, D)

    def to(self, device: torch.device) -> "Packed":
        """Return it on `device`, without making the host wait for the copies."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        if device.type == "cuda":
            tensors = {name: value if value.is_cuda else value.pin_memory() for name, value in tensors.items()}
        return replace(self, **{name: value.to(device, non_blocking=True) for name, value in tensors.items()})


def starts(lengths: list[int]) -> Tensor:
    """Return where segments of these lengths begin, and last where they end, as `varlen_attn` wants it."""
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


def pack(groups: list[Group]) -> Packed:
    """Pack groups. A completion's first token is predicted by its prompt's last one."""
    prompts = [prompt for prompt, _ in groups]
    done = [(i, each) for i, (_, completions) in enumerate(groups) for each in completions]  # i: which prompt
    q_lens = [len(prompt.ids) for prompt in prompts] + [len(each.ids) for _, each in done]
    places = torch.arange(sum(q_lens)).split(q_lens)
    keys, positions, predict_from = [*places[: len(prompts)]], [prompt.positions for prompt in prompts], []
    for (i, each), own in zip(done, places[len(prompts) :]):
        keys += [places[i], own]
        predict_from.append(torch.cat([places[i][-1:], own[:-1]]))
        positions.append((prompts[i].positions.max() + 1 + torch.arange(len(each.ids))).expand(3, -1))
    k_lens = [len(prompt.ids) for prompt in prompts] + [len(prompts[i].ids) + len(each.ids) for i, each in done]
    pictured = [(own, prompt) for own, prompt in zip(places, prompts) if prompt.features is not None]
    image_tokens = [own[prompt.image_places] for own, prompt in pictured]
    return Packed(
        ids=torch.cat([*(prompt.ids for prompt in prompts), *(each.ids for _, each in done)])[None],
        positions=torch.cat(positions, dim=1)[:, None],
        keys=torch.cat(keys),
        query_starts=starts(q_lens),
        key_starts=starts(k_lens),
        longest=(max(q_lens), max(k_lens)),
        predict_from=torch.cat(predict_from),
        targets=torch.cat([each.ids for _, each in done]),
        image_tokens=torch.cat(image_tokens) if pictured else torch.empty(0, dtype=torch.long),
        features=torch.cat([prompt.features for _, prompt in pictured]) if pictured else None,
    )


def micro_batches(groups: list[Group], budget: int) -> list[list[Group]]:
    """Pack groups into lists of at most `budget` tokens, long ones first, each where it first fits.

    A group that does not fit as a whole is cut, and its prompt repeated. A single completion that is too long with its
    prompt makes a list of its own.
    """
    parts: list[list[Group]] = []
    free: list[int] = []  # tokens left in each
    for prompt, completions in sorted(groups, key=lambda group: -sum(len(each.ids) for each in group[1])):
        rest = list(completions)
        while rest:
            first = len(prompt.ids) + len(rest[0].ids)
            place = next((i for i, tokens in enumerate(free) if first <= tokens), None)
            if place is None:
                parts.append([])
                free.append(max(budget, first))
                place = len(free) - 1
            free[place] -= len(prompt.ids)
            taken = []
            while rest and len(rest[0].ids) <= free[place]:
                free[place] -= len(rest[0].ids)
                taken.append(rest.pop(0))
            parts[place].append((prompt, taken))
    return parts


# --- attention and log-probabilities ----------------------------------------------------------------------------------


def prefix_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None = None,
    packed: Packed | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return attention (1, T, H, E) from query, key and value (1, H, T, E), as transformers calls it.

    The decoder is given `packed`; the tower is not.
    """
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, H, E)
    scale = options.get("scaling")
    if packed is None:  # windows of the tower, in which all patches see each other
        windows = options["cu_seq_lens_q"]
        longest = int(windows.diff().max())
        return attend((q, k, v), (windows, windows), (longest, longest), scale, causal=False)[None], None
    k, v = k[packed.keys], v[packed.keys]  # (K, H, E)
    return attend((q, k, v), (packed.query_starts, packed.key_starts), packed.longest, scale, causal=True)[None], None


def attend(
    qkv: tuple[Tensor, Tensor, Tensor],
    begins: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scale: float | None,
    causal: bool,
) -> Tensor:
    """Return attention of each segment's queries to its keys, (T, H, E): one kernel on a GPU, a loop on a CPU.

    If causal, a segment's last query sees its last key, the query before it one key less, and so on: the tokens of a
    completion see all of the prompt before them.
    """
    if qkv[0].is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(*qkv, *begins, *longest, scale=scale, window_size=(-1, 0 if causal else -1))
    q_lens, k_lens = (each.diff().tolist() for each in begins)
    out = []
    for q, k, v in zip(qkv[0].split(q_lens), qkv[1].split(k_lens), qkv[2].split(k_lens)):
        seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q)) if causal else None
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out.append(F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(out)


class TokenLogp(torch.autograd.Function):
    """Log-probabilities (C,) of targets (C,), from hidden states (C, D) and the head's weight (V, D).

    Only `LOGIT_ROWS` tokens have float32 logits at a time. What the backward pass needs of them is the derivative of
    log p(target) by the logits, one_hot(target) − p. It is kept, (C, V), in the dtype of the hidden states: half as
    large on a GPU, and the product with the head need not be computed again. `trained`: whether it will be needed.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, trained: bool) -> Tensor:
        logp = torch.empty(len(hidden), device=hidden.device)
        slopes = torch.empty(len(hidden), len(weight) if trained else 0, dtype=hidden.dtype, device=hidden.device)
        for rows in torch.arange(len(hidden), device=hidden.device).split(LOGIT_ROWS):
            if hidden.is_cuda:
                logits = torch.mm(hidden[rows], weight.T, out_dtype=torch.float32) / temperature
            else:
                logits = (hidden[rows] @ weight.T).float() / temperature
            log_p = logits.log_softmax(-1)
            logp[rows] = log_p.gather(-1, targets[rows, None])[:, 0]
            if trained:
                slope = -log_p.exp()
                slope.scatter_add_(-1, targets[rows, None], torch.ones_like(slope[:, :1]))
                slopes[rows] = (slope / temperature).to(hidden.dtype)
        ctx.save_for_backward(hidden, weight, slopes)
        return logp

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, slopes = ctx.saved_tensors
        scale = grad[:, None].to(hidden.dtype)
        return slopes @ weight * scale, slopes.T @ (hidden * scale), None, None, None


class Policy(nn.Module):
    """The model as one call: groups in, the log-probabilities (C,) of their completion tokens out."""

    def __init__(self, model: transformers.PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, groups: list[Group], temperature: float) -> Tensor:
        packed = pack(groups).to(self.model.model.visual.device)  # its tower is not sharded
        decoder = self.model.model.language_model
        embedded = decoder.embed_tokens(packed.ids)  # (1, T, D)
        if packed.features is not None:
            first = torch.zeros_like(packed.image_tokens)
            embedded = embedded.index_put((first, packed.image_tokens), packed.features.to(embedded.dtype))
        no_mask = dict.fromkeys(("full_attention", "sliding_attention"))  # given a dict, the decoder builds none
        hidden = decoder(
            inputs_embeds=embedded,
            position_ids=packed.positions,
            attention_mask=no_mask,
            packed=packed,
            use_cache=False,
        ).last_hidden_state[0]
        trained = torch.is_grad_enabled()  # not for the reference, nor for π_old
        head = self.model.lm_head.weight
        return TokenLogp.apply(hidden[packed.predict_from], head, packed.targets, temperature, trained)


def load_policy(settings: Settings, device: torch.device, dtype: torch.dtype) -> Policy:
    """Load the model with weights in `dtype` and a frozen tower, and prepare it for packed sequences."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(settings.model, dtype=dtype)
    freeze(model.model.visual, device)
    # A name with "flash" lets the tower attend to all windows in one call; the decoder's must not have it.
    for name in ("prefix", "flash_prefix"):
        transformers.AttentionInterface.register(name, prefix_attention)
    for config in (model.config, model.model.language_model.config):
        config._attn_implementation_internal = "prefix"
    model.model.visual.config._attn_implementation_internal = "flash_prefix"
    in_float32(model.model.language_model)
    if settings.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if device.type == "cuda":
        for layer in model.model.language_model.layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)  # FSDP's hooks stay outside
    return Policy(model.train())


def freeze(tower: nn.Module, device: torch.device) -> None:
    """Put the tower on `device`, its weights in the dtype of the products; its rotary frequencies stay in float32."""
    for weight in tower.requires_grad_(False).to(device).parameters():
        weight.data = weight.data.to(COMPUTE[device.type])


def in_float32(decoder: nn.Module) -> None:
    """Keep the residual stream in float32, and compute matrix products in the weights' dtype.

    The embeddings begin the stream. What leaves a norm enters a product, as do the rotary cosines and sines.
    """
    decoder.embed_tokens.register_forward_hook(lambda _, __, out: out.float())
    for module in decoder.modules():
        if "RMSNorm" in type(module).__name__:
            module.register_forward_hook(lambda norm, _, out: out.to(norm.weight.dtype))
    decoder.rotary_emb.register_forward_hook(lambda *given: tuple(x.to(decoder.norm.weight.dtype) for x in given[2]))


def shard(policy: Policy, device: torch.device) -> Policy:
    """Shard the weights over all processes; each layer is gathered in bfloat16 when it runs.

    The embeddings, the last norm and the head belong to the root: they are gathered for the whole of `Policy.forward`,
    which may therefore take the head's weight. The tower is frozen and stays whole.
    """
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(COMPUTE[device.type], reduce_dtype=torch.float32, cast_forward_inputs=False)
    tower = set(policy.model.model.visual.parameters())
    for layer in policy.model.model.language_model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    return fully_shard(policy, mesh=mesh, mp_policy=precision, ignored_params=tower)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor gathered from all processes, if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def see(policy: Policy, prompts: list[Prompt]) -> None:
    """Set `features` of all prompts with pictures: the frozen tower runs once for the sampler and all updates."""
    tower, pictured = policy.model.model.visual, [prompt for prompt in prompts if prompt.vision]
    for some in (pictured[i : i + 16] for i in range(0, len(pictured), 16)):  # 16 prompts at a time, for memory
        pixels = torch.cat([prompt.vision["pixel_values"] for prompt in some]).to(tower.device, tower.dtype)
        grids = torch.cat([prompt.vision["image_grid_thw"] for prompt in some])
        out = policy.model.model.get_image_features(pixels, grids.to(tower.device)).pooler_output
        features = torch.cat([*out]) if isinstance(out, (tuple, list)) else out  # some releases: one for each image
        for prompt, own in zip(some, features.split([len(prompt.image_places) for prompt in some])):
            prompt.features = own


# --- the sampler ------------------------------------------------------------------------------------------------------


class Sampler:
    """vLLM in this process: each process has an engine with the whole model, for its own prompts."""

    def __init__(self, settings: Settings, encoder: Encoder, most_images: int):
        import vllm

        self.settings, self.encoder, self.vllm = settings, encoder, vllm
        self.prompt_tokens = settings.max_pixels // 28**2 * max(most_images, 1) + 1024  # 1024 of text
        self.llm = vllm.LLM(
            settings.model,
            dtype="bfloat16" if torch.cuda.is_available() else "float32",
            seed=0,  # each request has its own
            max_model_len=self.prompt_tokens + settings.max_tokens,
            max_num_seqs=256,  # completions at a time; the others wait
            gpu_memory_utilization=settings.gpu_memory,
            distributed_executor_backend="external_launcher",  # torchrun has started the processes
            enable_sleep_mode=torch.cuda.is_available(),
            limit_mm_per_prompt={"image": most_images, "video": 0},
            mm_processor_kwargs={"min_pixels": settings.min_pixels, "max_pixels": settings.max_pixels},
            enable_mm_embeds=True,  # requests bring `features`, not pixels
            logprobs_mode="processed_logprobs",  # after temperature, as the trainer computes them
        )
        generation = self.llm.model_config.try_get_generation_config().get("eos_token_id", [])
        listed = generation if isinstance(generation, list) else [generation]
        self.end_tokens = sorted({encoder.tokenizer.eos_token_id, *listed})

    def sleep(self) -> None:
        """Give the memory of the weights and of the KV cache back until the next `sync`."""
        if torch.cuda.is_available():
            self.llm.sleep(level=2)  # forgets the weights: `sync` sends all of them

    @torch.no_grad()
    def sync(self, policy: Policy) -> None:
        """Wake vLLM and hand over the weights one by one, so that no process holds the whole model twice.

        The trainer's shards stay where they are. All processes gather each weight together, in the same order.
        """

        def weights() -> Iterator[tuple[str, Tensor]]:
            for name, weight in policy.model.named_parameters():
                yield name, full_tensor(weight).to(self.llm.model_config.dtype)

        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=["weights"])
        self.llm.apply_model(lambda model: model.load_weights(weights()))
        if torch.cuda.is_available():
            self.llm.wake_up(tags=["kv_cache"])
        self.llm.reset_prefix_cache()  # it was computed with the old weights

    def __call__(self, prompts: list[Prompt], step: int) -> list[list[Completion]]:
        """Sample G completions of each prompt."""
        longest = max(len(prompt.ids) for prompt in prompts)
        if longest > self.prompt_tokens:  # their completions would be cut
            sys.exit(f"error: a prompt has {longest} tokens; `Sampler` has room for {self.prompt_tokens}")
        params = [self.params((self.settings.seed, step, dist.get_rank(), i)) for i in range(len(prompts))]
        outputs = self.llm.generate([self.request(prompt) for prompt in prompts], params, use_tqdm=False)
        return [[self.completion(each) for each in output.outputs] for output in outputs]

    def params(self, place: tuple[int, ...]) -> Any:
        """Return how vLLM shall sample the completions of a prompt, with a seed for its place in the run."""
        return self.vllm.SamplingParams(
            n=self.settings.group,
            seed=hash(place) % 2**31,
            temperature=self.settings.temperature,
            max_tokens=self.settings.max_tokens,
            stop_token_ids=self.end_tokens,
            ignore_eos=True,  # `stop_token_ids` has it
            logprobs=0,  # of the sampled token alone
            detokenize=False,  # `score` does it
        )

    def request(self, prompt: Prompt) -> dict[str, Any]:
        """Return a prompt as vLLM expects it, with the features in place of the pictures."""
        request: dict[str, Any] = {"prompt_token_ids": prompt.sampler_ids}
        if prompt.features is not None:
            features = prompt.features.cpu()  # vLLM pins them
            picture = {"image_embeds": features, "image_grid_thw": prompt.vision["image_grid_thw"]}
            request["multi_modal_data"] = {"image": picture}
        return request

    def completion(self, output: Any) -> Completion:
        """Return one of vLLM's outputs, whose last token is an end token unless it was cut off."""
        logp = [candidates[token].logprob for candidates, token in zip(output.logprobs, output.token_ids)]
        return Completion(torch.tensor(output.token_ids), torch.tensor(logp), output.finish_reason == "stop")


# --- the algorithm ----------------------------------------------------------------------------------------------------


def advantages_of(rewards: Tensor) -> Tensor:
    """Return the advantages (P, G) of rewards (P, G): how much better than its group, in standard deviations."""
    spread = rewards.std(dim=1, keepdim=True)
    varied = rewards.amax(dim=1, keepdim=True) - rewards.amin(dim=1, keepdim=True) > 1e-6  # else exactly 0
    return (rewards - rewards.mean(dim=1, keepdim=True)) / (spread + 1e-6) * varied


def loss_of(logp: Tensor, part: list[Group], settings: Settings) -> Tensor:
    """Return the loss of a micro-batch, from the log-probabilities (C,) of its completion tokens.

    Σ w · (β · KL − importance · min(r A, clip(r, 1 ± ε) A)), with r = π / π_old, importance = π_old / π_sampler, and
    the k3 estimate of the KL divergence (DeepSeekMath, arXiv:2402.03300). The sum is over tokens.
    `prepare_micro_batches` has set w, the normaliser, from the completions of all processes, so that the sum over all
    micro-batches is a mean.
    """
    done = [each for _, completions in part for each in completions]

    def tokens(values: list[Tensor]) -> Tensor:
        return torch.cat(values).to(logp.device)

    advantage = tokens([torch.full((len(each.ids),), each.advantage) for each in done])
    weight = tokens([torch.full((len(each.ids),), each.weight) for each in done])
    # With one update, π_old is π itself.
    old = logp.detach() if done[0].old_logp is None else tokens([each.old_logp for each in done])
    ratio = (logp - old).exp()  # 1 at the first update, but its gradient is that of log π
    objective = torch.minimum(ratio * advantage, ratio.clamp(1 - settings.clip, 1 + settings.clip) * advantage)
    if settings.importance_cap:
        objective *= (old - tokens([each.sampler_logp for each in done])).exp().clamp(max=settings.importance_cap)
    if not settings.beta:
        return -(weight * objective).sum()
    log_ratio = tokens([each.ref_logp for each in done]) - logp
    return (weight * (settings.beta * (log_ratio.exp() - log_ratio - 1) - objective)).sum()


@torch.no_grad()
def record_logp(policy: Policy, parts: list[list[Group]], settings: Settings, name: str) -> None:
    """Set `old_logp` or `ref_logp` of all completions to their log-probabilities under `policy`."""
    for part in parts:
        done = [each for _, completions in part for each in completions]
        logp = policy(part, settings.temperature)
        for each, own in zip(done, logp.split([len(each.ids) for each in done])):
            setattr(each, name, own)


@dataclass
class Run:
    """What a step works with."""

    settings: Settings
    encoder: Encoder
    policy: Policy
    reference: Policy | None  # the initial model, if there is a KL term
    optimizer: torch.optim.Optimizer
    sampler: Sampler | None = None  # made by `train`, last


def prepare_micro_batches(groups: list[Group], settings: Settings) -> list[list[Group]]:
    """Set the weights of all completions and return the micro-batches: as many as every other process has."""
    done = [each for _, completions in groups for each in completions]
    (count,) = over_processes([len(done)])
    for each in done:
        each.weight = 1 / (count * len(each.ids))  # the mean over completions of the mean over tokens
    # Without a KL term, an advantage of 0 gives no gradient. Such completions still count in the mean.
    kept = [(prompt, [each for each in some if each.advantage or settings.beta]) for prompt, some in groups]
    parts = micro_batches([group for group in kept if group[1]], settings.micro_batch_tokens)
    (most,) = over_processes([len(parts)], dist.ReduceOp.MAX)
    idle = groups[0][0], [Completion(torch.zeros(2).long(), torch.zeros(2))]  # its weight is 0
    return parts + [[idle]] * (int(most) - len(parts))  # all processes take part in the same collectives


def update(run: Run, groups: list[Group]) -> dict[str, float]:
    """Take the optimizer steps of one step on this process's groups, whose completions have their advantages.

    The `mismatch` is the mean of |log π − log π_sampler| over the trained tokens, before the first optimizer step.
    """
    settings, parts = run.settings, prepare_micro_batches(groups, run.settings)
    if run.reference is not None:
        record_logp(run.reference, parts, settings, "ref_logp")
    if settings.updates > 1:
        record_logp(run.policy, parts, settings, "old_logp")
    mismatch: list[Tensor] = []
    for i in range(settings.updates):
        for j, part in enumerate(parts):
            run.policy.set_requires_gradient_sync(j + 1 == len(parts))  # reduced over processes once
            logp = run.policy(part, settings.temperature)
            (loss_of(logp, part, settings) * dist.get_world_size()).backward()  # FSDP takes the mean, we want the sum
            if i == 0:
                mismatch.append(mismatch_of(logp.detach(), part))
        norm: Any = nn.utils.clip_grad_norm_(run.optimizer.param_groups[0]["params"], 1.0)
        if not full_tensor(norm).isfinite():
            sys.exit("error: the gradient is not finite and would make all weights NaN: does `reward` return NaN?")
        run.optimizer.step()
        run.optimizer.zero_grad()
    total, tokens = over_processes(sum(mismatch, torch.zeros(2, device=norm.device)).tolist())
    return {"grad_norm": full_tensor(norm).item(), "mismatch": total / max(tokens, 1)}


def mismatch_of(logp: Tensor, part: list[Group]) -> Tensor:
    """Return the sum of |log π − log π_sampler| over the tokens of a micro-batch, and their number: zeros if idle."""
    done = [each for _, completions in part for each in completions]
    apart = (logp - torch.cat([each.sampler_logp for each in done]).to(logp.device)).abs()
    return torch.stack([apart.sum(), torch.ones_like(apart).sum()]) * (done[0].weight > 0)


def over_processes(values: list[float], how: Any = dist.ReduceOp.SUM) -> list[float]:
    """Return the sum, or the largest, of each value over all processes, through gloo: the tensor is on the CPU."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, how)
    return tensor.tolist()


class Clock:
    """Seconds of each phase of a step, and the most memory in use on the GPU at the end of one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.gib = 0.0
        self.last = time.perf_counter()

    def __call__(self, phase: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()  # PyTorch's own count would include the memory of a sleeping vLLM
            self.gib = max(self.gib, (total - free) / 2**30)
        now = time.perf_counter()
        self.seconds[f"seconds/{phase}"], self.last = now - self.last, now


def score(tokenizer: Any, prompts: list[Prompt], completions: list[list[Completion]]) -> Tensor:
    """Return the rewards (P, G), and set the advantages."""
    texts = [[tokenizer.decode(each.ids, skip_special_tokens=True) for each in some] for some in completions]
    rewards = torch.tensor([[float(reward(text, p.answer)) for text in some] for some, p in zip(texts, prompts)])
    for some, row in zip(completions, advantages_of(rewards).tolist()):
        for each, advantage in zip(some, row):
            each.advantage = advantage
    return rewards


def step(run: Run, number: int, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Take one step on this process's rows and return its metrics."""
    clock = Clock()
    with ThreadPoolExecutor(4) as pool:
        prompts = list(pool.map(run.encoder, rows))  # the only threads that this file starts
    see(run.policy, prompts)
    clock("prompts")
    run.sampler.sync(run.policy)  # π_old ← π_θ
    clock("sync")
    completions = run.sampler(prompts, number)
    clock("rollout")
    run.sampler.sleep()  # until the next `sync`
    clock("sleep")
    rewards = score(run.encoder.tokenizer, prompts, completions)
    clock("reward")
    metrics = update(run, list(zip(prompts, completions)))
    clock("train")
    lengths = [len(each.ids) for some in completions for each in some]
    finished = sum(each.finished for some in completions for each in some)
    *sums, count = over_processes([rewards.sum().item(), sum(lengths), finished, len(lengths)])
    means = dict(zip(("reward", "length", "finished"), (total / count for total in sums)))
    return {"step": number, **means, **metrics, "gib": clock.gib, **clock.seconds}


# --- the run ----------------------------------------------------------------------------------------------------------


def rows_of_step(rows: list[dict[str, Any]], number: int, settings: Settings) -> list[dict[str, Any]]:
    """Return this process's rows of a step, of an endless stream that is shuffled anew in each epoch.

    The stream depends on the seed alone, so that a resumed run has the rows it would have had. All completions
    of a prompt are sampled, scored and trained on by one process.
    """
    chosen = []
    for position in range(number * settings.prompts, (number + 1) * settings.prompts):
        epoch, index = divmod(position, len(rows))
        chosen.append(rows[np.random.default_rng([settings.seed, epoch]).permutation(len(rows))[index]])
    return chosen[dist.get_rank() :: dist.get_world_size()]


def save(run: Run, number: int) -> None:
    """Save the state after `number` steps; it gets its name last, when it is whole. Older ones are kept."""
    folder = pathlib.Path(run.settings.output)
    model, moments = get_state_dict(run.policy, run.optimizer)
    dcp.save({"model": model, "optimizer": moments}, checkpoint_id=folder / "writing")
    if dist.get_rank() == 0:
        (folder / "writing").rename(folder / f"checkpoint-{number}")
    dist.barrier()


def newest_checkpoint(output: str) -> tuple[int, pathlib.Path | None]:
    """Return the number of steps of the newest checkpoint, and its folder; 0 and None if there is none."""
    paths = pathlib.Path(output).glob("checkpoint-*")
    return max(((int(path.name.rpartition("-")[2]), path) for path in paths), default=(0, None))


def resume(run: Run) -> int:
    """Load the newest checkpoint of the run, if there is one; return how many steps it has."""
    number, newest = newest_checkpoint(run.settings.output)
    if newest is None:
        return 0
    model, moments = get_state_dict(run.policy, run.optimizer)
    dcp.load({"model": model, "optimizer": moments}, checkpoint_id=newest)
    set_state_dict(run.policy, run.optimizer, model_state_dict=model, optim_state_dict=moments)
    for group in run.optimizer.param_groups:
        group["lr"] = run.settings.learning_rate  # the checkpoint has that of the run before
    return number


@torch.no_grad()
def export(run: Run) -> None:
    """Write the trained model as transformers does, in bfloat16."""
    folder, state = pathlib.Path(run.settings.output) / "final", {}
    for name, weight in run.policy.model.named_parameters():
        full = full_tensor(weight)  # all processes take part
        if dist.get_rank() == 0:
            state[name] = full.to("cpu", torch.bfloat16)
    if dist.get_rank() == 0:
        model = run.policy.model
        model.config.dtype = torch.bfloat16  # else transformers would load it in float32
        for each in (model.config, model.generation_config, run.encoder.tokenizer, run.encoder.images):
            each.save_pretrained(folder)
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def problem_of(row: Any, folder: pathlib.Path) -> str:
    """Return what is wrong with a row, or ""."""
    if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in ("prompt", "answer")):
        return "a row has a prompt and an answer, both texts"
    if not isinstance(images := row.get("images") or [], list):
        return "images must be a list of paths"
    if missing := [path for path in images if not (folder / path).is_file()]:
        return f"there is no {folder / missing[0]}"
    tags = row["prompt"].count("<image>")
    return f"{tags} tags <image>, but {len(images)} images" if tags not in (0, len(images)) else ""


def read_row(line: str, where: str, folder: pathlib.Path) -> dict[str, Any]:
    """Return a row, with its list of images; end with one line if it cannot be used."""
    try:
        row = json.loads(line)
    except ValueError as error:
        sys.exit(f"error: {where}: {error}")
    if problem := problem_of(row, folder):
        sys.exit(f"error: {where}: {problem}")
    return row | {"images": row.get("images") or []}


def read_rows(file: pathlib.Path) -> list[dict[str, Any]]:
    """Return the rows; end with one line if there are none."""
    if not file.is_file():
        sys.exit(f"error: {file} is no file: give --data rows.jsonl")
    lines = enumerate(file.read_text("utf-8-sig").split("\n"), 1)  # `splitlines` would also cut at U+2028
    rows = [read_row(line, f"{file}, line {number}", file.parent) for number, line in lines if line.strip()]
    if not rows:
        sys.exit(f"error: {file} has no rows")
    return rows


def check(settings: Settings) -> None:
    """End with one line if the settings cannot be used."""
    positive = "prompts max_tokens learning_rate updates temperature micro_batch_tokens gpu_memory save_every"
    for name in positive.split():
        if getattr(settings, name) <= 0:
            sys.exit(f"error: --{name} must be larger than 0")
    if settings.prompts % dist.get_world_size() or settings.group < 2:
        sys.exit("error: --prompts must be a multiple of the number of processes, and --group at least 2")


def log(metrics: dict[str, float], output: str) -> None:
    """Append a step's metrics to metrics.jsonl, and print them."""
    with open(f"{output}/metrics.jsonl", "a") as file:
        file.write(json.dumps(metrics) + "\n")
    tqdm.write(" ".join(f"{name} {value:.4g}" for name, value in metrics.items()))


def prepare(settings: Settings, device: torch.device) -> Run:
    """Load the model for the policy and, with a KL term, once more as its frozen reference."""
    encoder, reference = load_encoder(settings), None
    policy = shard(load_policy(settings, device, torch.float32), device)
    if settings.beta:  # nothing of it is trained, so that it needs no float32
        initial = load_policy(settings, device, COMPUTE[device.type])
        initial.model.model.visual = policy.model.model.visual
        reference = shard(initial, device).requires_grad_(False)
    # Made before any forward pass. After one without gradients, FSDP keeps the root's weights gathered, and
    # `parameters` would return those, which the optimizer would change in vain.
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, settings.learning_rate, weight_decay=0.0, fused=device.type == "cuda")
    return Run(settings, encoder, policy, reference, optimizer)


def train(settings: Settings, device: torch.device) -> None:
    check(settings)
    if importlib.util.find_spec("vllm") is None:
        sys.exit("error: vllm is not installed: pip install vllm")
    rows = read_rows(pathlib.Path(settings.data))
    pathlib.Path(settings.output).mkdir(parents=True, exist_ok=True)
    run = prepare(settings, device)
    begun = resume(run)  # after `prepare`: the reference is the initial model in a resumed run, too
    run.sampler = Sampler(settings, run.encoder, max(len(row["images"]) for row in rows))
    run.sampler.sleep()
    quiet = dist.get_rank() > 0
    if begun and not quiet:
        tqdm.write(f"resuming after step {begun} of {settings.output}")
    for number in tqdm(range(begun, settings.steps), initial=begun, total=settings.steps, disable=quiet):
        metrics = step(run, number + 1, rows_of_step(rows, number, settings))
        if not quiet:
            log(metrics, settings.output)
        if (number + 1) % settings.save_every == 0 or number + 1 == settings.steps:
            save(run, number + 1)
    export(run)


def take_device() -> torch.device:
    """Return this process's GPU, or the CPU if there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def launch(settings: Settings) -> None:
    """Train with the processes that torchrun has started, or with this one alone."""
    os.environ |= ALONE | os.environ  # torchrun's variables win
    device = take_device()
    dist.init_process_group("cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo")  # by a tensor's device
    train(settings, device)
    if dist.is_initialized():  # releases of vLLM after 0.25 end it together with themselves
        dist.destroy_process_group()


def comments_of_settings() -> dict[str, str]:
    """Return the comment beside each of the `Settings`, by its name: they explain the flags."""
    return dict(re.findall(r"^    (\w+): .*  # (.*)$", inspect.getsource(Settings), re.MULTILINE))


def parse_settings() -> Settings:
    """Return the settings of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    comments = comments_of_settings()
    for each in fields(Settings):
        how: dict[str, Any] = {"type": type(each.default), "default": each.default}
        if isinstance(each.default, bool):
            how = {"action": "store_true"}
        parser.add_argument(f"--{each.name}", help=f"{comments.get(each.name, '')} (default: {each.default})", **how)
    return Settings(**vars(parser.parse_args()))


def main() -> None:
    launch(parse_settings())


if __name__ == "__main__":
    main()
