"""GPU memory: plan what a run takes, with the GPUs or without; size its micro-batches; handle overflows.

    plan(empty_policy(load_config(cfg.model), cfg), cfg, GPUs(80 * GIB, number=4)).check(needs_copy=True)

The activation sizes per layer were measured on one H200, in bfloat16, with layers fused by torch.compile.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import transformers

from common import console, distributed
from common.errors import RunStopped, UserError
from config import Config
from policy.families import (
    attention_windows,
    experts_per_token,
    head_dim,
    language_model,
    patches_per_token,
    routed_experts,
    vision_blocks,
)
from policy.forward import LOGIT_ROWS
from policy.lora import adapted_layers, has_adapter
from policy.model import Policy, compute_dtype, empty_model, is_quantised, num_weights, trains_vision, vision_parameters
from policy.sharding import AFTER_UPDATE, reshard, take_gradients

T = TypeVar("T")
GIB = 2**30
CUDA = torch.device("cuda")
MAX_MICRO_BATCH_TOKENS = 10240  # upper limit of the automatic choice: larger micro-batches are no more efficient
TARGET_MICRO_BATCH_TOKENS = 8192  # below this size, checkpointing more layers to allow larger micro-batches is faster
CPU_MICRO_BATCH_TOKENS = 16384  # default without a GPU
FLOAT32_BYTES = 4  # a master weight or a gradient
MOMENTS_BYTES = 8  # its two moments in AdamW, in float32
MARGIN = 0.06  # fraction of the GPU's memory that the allocator cannot use
CUDA_GIB = 0.8  # memory that CUDA takes besides the allocator, for its context and for compiled kernels
SAMPLER_BYTES = 2 * GIB  # least memory that a sampler needs to start, besides its copy of the weights
VLLM_BYTES = 5 * GIB  # enough for what vLLM holds besides weights and KV cache: activations, and CUDA graphs
VLLM_MEMORY = 0.25  # least fraction of the GPU's memory that vLLM gets by default
VLLM_SHARE = 0.7  # of what the resting trainer leaves free, the most that vLLM gets by default
OOM_RETRIES = 3
OOM_ACTIVATION_HINT = "--activation_checkpointing full, a smaller --micro_batch_tokens"


@dataclass(frozen=True)
class GPUs:
    """The GPUs that a run is planned for, one for each process, whether they are here or not."""

    size: float  # memory of each, in bytes; infinite without a GPU
    number: int = 1
    per_machine: int = 8
    used_by_others: float = 0.0  # bytes of each that other programs use
    equal_machines: bool = True  # whether all machines run the same number of processes
    device: torch.device = CUDA

    @property
    def on_gpu(self) -> bool:
        """Whether there are GPUs at all."""
        return self.device.type == "cuda"

    def shards(self, sharding: str) -> int:
        """Return how many of them share one copy of the weights."""
        return {"none": 1, "hybrid": min(self.per_machine, self.number), "full": self.number}[sharding]

    def usable(self, limit: float) -> float:
        """Return how many bytes of each the allocator can use, given a limit of `limit` GiB (0: no limit)."""
        return min(limit * GIB or self.size, self.size) * (1 - MARGIN)


def gpus_here(device: torch.device) -> GPUs:
    """Return the GPUs of this run, as the process with this `device` sees them."""
    per_machine = distributed.local_world_size()
    equal_machines = len(set(distributed.all_gather(per_machine))) == 1
    size = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else math.inf
    return GPUs(size, distributed.world_size(), per_machine, used_by_others(device), equal_machines, device)


def used_by_others(device: torch.device) -> float:
    """Return how many bytes of the GPU others use: what is used, less what this process's allocator and CUDA hold."""
    if device.type != "cuda":
        return 0.0
    free, size = torch.cuda.mem_get_info(device)
    return max(0.0, size - free - torch.cuda.memory_reserved(device) - CUDA_GIB * GIB)


def describe_others(used: float) -> str:
    """Return the end of a message, which says how much memory other programs use; "" if that is at most 1 GiB."""
    return f"; other programs use {used / GIB:.1f} GiB of this GPU" if used > GIB else ""


@dataclass(frozen=True)
class Plan:
    """The memory that a run with the flags `cfg` takes on each of `gpus`, in bytes, and what follows; see `plan`."""

    cfg: Config
    gpus: GPUs
    sharding: str  # "none", "hybrid" or "full"
    weights: float = 0.0  # master weights, and what is frozen
    reference: float = 0.0  # a separate reference model, and a teacher
    moments: float = 0.0  # AdamW's; like the reference, 0 if they are in host memory
    gradients: float = 0.0
    copy: float = 0.0  # the whole model in the compute dtype
    unsharded: float = 0.0  # sharded weights, in full and in the compute dtype; 0 with a 4-bit model: see `gathered`
    gathered: float = 0.0  # embedding, lm_head, two layers with their gradients, and two gradients of a trained lm_head
    logits: float = 0.0  # float32 logits of `LOGIT_ROWS` tokens and their derivatives
    token_bytes: tuple[float, ...] = ()  # activations of a packed token, by the number of checkpointed decoder layers
    expert_bytes: tuple[int, ...] = ()  # copies of adapted experts, by the same number
    cache: float = 0.0  # a KV cache for all completions that an engine samples at once, at their maximum length

    @property
    def shards(self) -> int:
        """Number of GPUs that share one copy of the weights."""
        return self.gpus.shards(self.sharding)

    @property
    def resting(self) -> float:
        """What the trainer holds while the sampler works."""
        return self.weights + self.reference + self.moments

    @property
    def sampler_weights(self) -> float:
        """The sampler's copy of the weights."""
        return self.copy / self.cfg.tensor_parallel

    @property
    def free_beside_trainer(self) -> float:
        """What the resting trainer and other programs leave free.

        With `gpu_memory`, the gradients need their room, too: PyTorch counts vLLM's memory towards that limit even
        while vLLM sleeps.
        """
        taken = self.gradients if self.cfg.gpu_memory else self.gpus.used_by_others
        return self.gpus.usable(self.cfg.gpu_memory) - self.resting - taken

    @property
    def has_room(self) -> bool:
        """Whether a sampler's copy of the weights fits there; True with several processes, as each needs a copy."""
        if not self.gpus.on_gpu or self.gpus.number > 1:
            return True
        return self.sampler_weights + SAMPLER_BYTES <= self.free_beside_trainer

    @property
    def vllm_memory(self) -> float:
        """vLLM's fraction of the GPU's memory, or of `gpu_memory`: `cfg.vllm_memory`, or more if its weights need more.

        Unset: `VLLM_MEMORY`; without `gpu_memory`, more if completions need it, up to `VLLM_SHARE` of what is free.
        """
        total, fraction = self.gpus.usable(self.cfg.gpu_memory), self.cfg.vllm_memory or VLLM_MEMORY
        if not self.gpus.on_gpu:
            return fraction
        fraction = max(fraction, min(0.9, (self.sampler_weights + SAMPLER_BYTES) / total))
        if not self.cfg.vllm_memory and not self.cfg.gpu_memory:
            enough = self.sampler_weights + VLLM_BYTES + self.cache
            fraction = max(fraction, min(enough, VLLM_SHARE * self.free_beside_trainer) / total)
        return fraction

    @property
    def sampler(self) -> float:
        """What a sampler with a copy of the weights takes while it is awake."""
        return self.vllm_memory * self.gpus.usable(self.cfg.gpu_memory)

    @property
    def longest(self) -> int:
        """Maximum number of tokens in a prompt plus one completion, which always share a micro-batch."""
        return self.cfg.max_prompt_length + self.cfg.max_completion_length

    def stays_awake(self, free: float) -> bool:
        """Return whether the sampler, which leaves `free` bytes free, can stay awake while the trainer works.

        The largest micro-batch must then fit without activation checkpointing. With `gpu_memory`, there is no choice:
        PyTorch counts vLLM's memory towards that limit even while vLLM sleeps.
        """
        tokens = self.cfg.micro_batch_tokens or MAX_MICRO_BATCH_TOKENS
        needed = self.resting + self.gradients + self.copy + self.logits + tokens * self.token_bytes[0]
        return self.gpus.on_gpu and (bool(self.cfg.gpu_memory) or needed <= free - MARGIN * self.gpus.size)

    def left(self, total: float, in_use: float) -> float:
        """Return how many of `total` bytes remain for activations, besides those `in_use` and what updates will add."""
        return total * (1 - MARGIN) - in_use - self.moments - self.gradients - self.logits - self.gathered

    def max_tokens(self, num_checkpointed: int, left: float) -> float:
        """Return how many tokens `left` bytes have room for if `num_checkpointed` decoder layers are checkpointed."""
        return (left - self.expert_bytes[num_checkpointed]) / self.token_bytes[num_checkpointed]

    def num_checkpointed(self, left: float) -> int:
        """Return how many decoder layers to checkpoint so that micro-batches are fastest in `left` bytes."""
        layers = len(self.token_bytes) - 1
        choices = {"none": [0], "selective": [layers // 2], "full": [layers], "auto": range(layers + 1)}
        choice = choices[self.cfg.activation_checkpointing]
        target = max(self.longest, self.cfg.micro_batch_tokens or TARGET_MICRO_BATCH_TOKENS)
        return next((n for n in choice if self.max_tokens(n, left) >= target), choice[-1])

    def check(self, needs_copy: bool) -> None:
        """Raise UserError if the training state does not fit. `needs_copy`: whether the sampler copies weights.

        During an update, weights, gradients and optimizer state must fit. While the sampler is awake, weights and
        optimizer state must fit alongside it. With `gpu_memory`, it is always awake (`stays_awake`). Memory that
        other programs use is not available.
        """
        if not self.gpus.on_gpu:
            return
        cfg, gpus, sampler = self.cfg, self.gpus, self.sampler if needs_copy else 0.0
        total = min(gpus.usable(cfg.gpu_memory), gpus.usable(0.0) - gpus.used_by_others)
        training = self.resting + self.gradients + (sampler if cfg.gpu_memory else 0.0)
        needed = max(training, self.resting + sampler)
        if needed <= total:
            return
        what, hints = "weights, gradients and AdamW", self._memory_saving_flags()
        if sampler > self.gradients:
            what = "weights, AdamW and --vllm_memory"
            if sampler > self.sampler_weights + SAMPLER_BYTES + 1:  # else, the plan would raise it again
                hints.insert(0, f"a --vllm_memory below {self.vllm_memory:.2f}")
            elif gpus.number > cfg.tensor_parallel and cfg.oversample == 1:
                hints.insert(0, "a larger --tensor_parallel")
        raise UserError(
            f"this GPU is too small by {(needed - total) / GIB:.1f} GiB: {what} take {needed / GIB:.1f} GiB on "
            f"each of {gpus.number} processes, and {total / GIB:.1f} GiB are usable"
            f"{describe_others(self.gpus.used_by_others)}. What helps: {', '.join(hints)}, more GPUs"
        )

    def check_longest(self, num_checkpointed: int, tokens: int) -> None:
        """Raise UserError if a micro-batch of `tokens` has no room for a prompt with one completion."""
        if tokens >= self.longest or self.cfg.micro_batch_tokens:
            return
        missing = (self.longest - tokens) * self.token_bytes[num_checkpointed] / GIB
        raise UserError(
            f"this GPU is too small by {missing:.1f} GiB for a prompt and completion of {self.longest} tokens"
            f"{describe_others(self.gpus.used_by_others)}. What helps: shorter ones (--max_prompt_length, "
            f"--max_completion_length), {OOM_ACTIVATION_HINT}"
        )

    def _memory_saving_flags(self) -> list[str]:
        """Return the flags that would make the training state smaller and are not already in use."""
        cfg, separate_reference = self.cfg, self.cfg.beta and not self.cfg.has_adapter
        hints = {
            "--sharding full": self.shards < self.gpus.number,
            "--lora_rank 64": not cfg.has_adapter,
            "--load_in_4bit" if cfg.has_adapter else "--load_in_4bit with it": not cfg.load_in_4bit,
            "--offload optimizer": "optimizer" not in cfg.offload,
            "--offload reference": separate_reference and "reference" not in cfg.offload,
            "--beta 0": separate_reference,
        }
        return [hint for hint, applies in hints.items() if applies]


def plan(policy: Policy, cfg: Config, gpus: GPUs) -> Plan:
    """Return what a run of `policy`, as it was loaded or as `empty_policy` returns it, takes on each of `gpus`.

    Without a GPU, memory is not planned: flags alone decide, and there is always room for a sampler's copy.
    """
    if not gpus.on_gpu:
        choices = len(language_model(policy.model).layers) + 1  # possible numbers of checkpointed layers
        sharding = _choose_sharding(cfg, gpus, 0.0)
        return Plan(cfg, gpus, sharding, token_bytes=(1.0,) * choices, expert_bytes=(0,) * choices)
    decoder, head = language_model(policy.model), policy.model.lm_head.weight
    size, parameters = compute_dtype(cfg.dtype, gpus.device).itemsize, list(policy.parameters())
    tower, quantised = set(vision_parameters(policy.model)), is_quantised(policy)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    frozen = {p: min(p.element_size(), size) * p.numel() for p in parameters if not p.requires_grad}
    whole = {p for p in frozen if quantised or p in tower}  # held by every process, see `apply_fsdp`
    whole_bytes = sum(frozen[p] for p in whole)
    sharded = sum(frozen.values()) - whole_bytes + FLOAT32_BYTES * trained
    own = 0  # weights of a separate reference; it shares a frozen tower with the policy (`load_reference`)
    if cfg.beta and not has_adapter(policy.model) and "reference" not in cfg.offload:
        own = sum(p.numel() for p in parameters if cfg.train_vision or p not in tower)
    reference = own * (FLOAT32_BYTES if AFTER_UPDATE else size)
    if cfg.teacher and not cfg.teaches_itself:
        teacher = Policy(empty_model(cfg.teacher))
        replicated = size * sum(p.numel() for p in vision_parameters(teacher.model))  # its tower; see `apply_fsdp`
        whole_bytes += replicated
        reference += size * num_weights(teacher) - replicated
    moments, gradients = (0 if "optimizer" in cfg.offload else MOMENTS_BYTES) * trained, FLOAT32_BYTES * trained
    sharding = _choose_sharding(cfg, gpus, whole_bytes + sharded + reference + moments + gradients)
    shards = gpus.shards(sharding)
    gathered = 2 * (size + FLOAT32_BYTES) * sum(p.numel() for p in decoder.layers[0].parameters())
    gathered += size * sum(p.numel() for p in {*decoder.embed_tokens.parameters(), *policy.model.lm_head.parameters()})
    gathered = size * trained if quantised else gathered  # beside 4-bit weights, the whole adapter
    dtype, counts = compute_dtype(cfg.dtype, gpus.device), range(len(decoder.layers) + 1)
    return Plan(
        cfg=cfg,
        gpus=gpus,
        sharding=sharding,
        weights=whole_bytes + sharded / shards,
        reference=reference / shards,
        moments=moments / shards,
        gradients=gradients / shards,
        copy=size * num_weights(policy),
        unsharded=0 if quantised else size * sum(p.numel() for p in parameters if p not in whole),
        gathered=gathered + (2 * size * head.numel() if head.requires_grad else 0),  # see `_TokenLogprobs`
        logits=(12 if cfg.compile else 28) * LOGIT_ROWS * decoder.embed_tokens.weight.shape[0],
        token_bytes=tuple(bytes_per_token(policy, n, cfg.compile, dtype) for n in counts),
        expert_bytes=tuple(adapted_expert_bytes(policy, n, dtype) for n in counts),
        cache=_cache_bytes(decoder.config, cfg, gpus.number, size),
    )


def _choose_sharding(cfg: Config, gpus: GPUs, state: float) -> str:
    """Return `cfg.sharding`, with "auto" resolved to "none", "hybrid" or "full" (without a GPU: "full").

    A full copy of the training `state` on each process avoids gathering weights. Shards leave more memory for larger
    micro-batches and for the sampler. Raises UserError for "hybrid" if the machines run different numbers of processes.
    """
    if cfg.sharding == "hybrid" and not gpus.equal_machines:
        raise UserError(
            "--sharding hybrid needs the same number of processes on every machine: use the same --nproc_per_node"
        )
    if cfg.sharding != "auto":
        return cfg.sharding
    if gpus.number == 1 or not gpus.on_gpu:
        return "full"
    total = gpus.usable(cfg.gpu_memory)
    several_machines = gpus.per_machine < gpus.number
    fits_machine = gpus.equal_machines and state / gpus.per_machine < 2 * total / 3
    chosen = "none" if state < total / 3 else "hybrid" if several_machines and fits_machine else "full"
    return distributed.all_gather(chosen)[0]  # rank 0's choice: machines may have different GPUs


def _cache_bytes(text: transformers.PreTrainedConfig, cfg: Config, processes: int, size: int) -> float:
    """Return `Plan.cache` for the decoder's config `text` if each number takes `size` bytes.

    With `tensor_parallel`, each GPU of the engine has a cache of this size. The completions of a prompt share its keys
    and values. States of linear attention are not counted.
    """
    token = 2 * max(1, text.num_key_value_heads / cfg.tensor_parallel) * head_dim(text) * size  # in one layer
    drawn = cfg.oversample * cfg.prompts_per_step * cfg.num_generations * cfg.tensor_parallel
    sequences = min(cfg.vllm_sequences, math.ceil(drawn / processes))
    shared_by = 1 if cfg.env else cfg.num_generations  # what an environment answers belongs to one completion
    length = cfg.max_completion_length + cfg.max_prompt_length / shared_by
    return sequences * token * sum(min(length, window) for window in attention_windows(text))


def limit_allocator(limit: float, device: torch.device) -> None:
    """Limit this process to `limit` GiB of its GPU, if it has one."""
    if device.type == "cuda":
        fraction = distributed.memory_fraction(max(limit - CUDA_GIB, 0.1))  # this limits only the allocator
        torch.cuda.set_per_process_memory_fraction(fraction, device)


def sampler_stays_awake(planned: Plan) -> bool:
    """Return whether the sampler, which has started, can stay awake on all processes; see `Plan.stays_awake`."""
    if not planned.gpus.on_gpu:
        return False
    free = torch.cuda.mem_get_info(planned.gpus.device)[0]
    return not distributed.all_max(torch.tensor(int(not planned.stays_awake(free))))


def bytes_per_token(
    policy: Policy, num_checkpointed: int, compiled: bool, dtype: torch.dtype = torch.bfloat16
) -> float:
    """Return how many bytes of activations each packed token keeps for the backward pass, summed over all layers.

    `num_checkpointed`: number of checkpointed decoder layers. The layers of a trained vision tower are included,
    because a token may be part of an image.
    """
    config, size = language_model(policy.model).config, dtype.itemsize
    layer_input = 4 * config.hidden_size  # the residual stream is float32
    logits = size * config.vocab_size if num_checkpointed == 0 else 0  # derivatives, kept only without checkpointing
    width, copies = config.intermediate_size, experts_per_token(config)
    if copies:  # an expert's output is kept, and a trained one's input; Aria's shared experts are as wide as others
        width = copies * getattr(config, "moe_intermediate_size", width)
        width += getattr(config, "moe_num_shared_experts", 0) * config.intermediate_size
        copies *= 2 if any(p.requires_grad for name, p in policy.named_parameters() if ".experts." in name) else 1
    full_layer = size * ((9 + copies) * config.hidden_size + 3 * width) * (1.0 if compiled else 1.5)
    layers = (config.num_hidden_layers - num_checkpointed) * full_layer + num_checkpointed * layer_input + full_layer
    linear_layers = (getattr(config, "layer_types", None) or []).count("linear_attention")
    if linear_layers:  # q, k and v before and after the convolution, normalised and sorted by head; values and gates
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        kept = linear_layers * (1 - num_checkpointed / config.num_hidden_layers) + 1
        layers += kept * size * (4 * (2 * keys + values) + 4 * values)
    return layers + logits + _vision_bytes_per_token(policy, num_checkpointed, size)


def _vision_bytes_per_token(policy: Policy, num_checkpointed: int, size: int) -> float:
    """Return the bytes that a trained vision tower adds to `bytes_per_token` if each value takes `size` bytes."""
    if not trains_vision(policy.model):
        return 0.0
    config = policy.model.config.vision_config
    block_input = size * config.hidden_size
    full_block = size * (14 * config.hidden_size + 4 * getattr(config, "intermediate_size", 4 * config.hidden_size))
    blocks = len(vision_blocks(policy.model)) * (block_input if num_checkpointed else full_block) + full_block
    return blocks * patches_per_token(policy.model)


def adapted_expert_bytes(policy: Policy, num_checkpointed: int, dtype: torch.dtype) -> int:
    """Return the bytes that adapted experts take until the backward pass: a copy of each tensor that PEFT adds to.

    Layers that are not checkpointed keep their copies; of the others, only one at a time has copies.
    """
    layers = language_model(policy.model).layers
    is_adapted = any(hasattr(layer, "parameter_name") for layer in adapted_layers(layers).values())
    experts = sum(p.numel() for p in routed_experts(policy.model).values()) * dtype.itemsize if is_adapted else 0
    return experts * (len(layers) - num_checkpointed + 1) // len(layers)


def set_checkpointing(policy: Policy, num_checkpointed: int) -> None:
    """Checkpoint `num_checkpointed` decoder layers, evenly spaced.

    A checkpointed layer keeps only its input and is recomputed in the backward pass. If `num_checkpointed` is above 0,
    the blocks of a trained vision tower are also checkpointed.
    """
    if num_checkpointed == 0:
        return
    policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = language_model(policy.model).layers
    for i, layer in enumerate(layers):
        layer.gradient_checkpointing = i * num_checkpointed // len(layers) < (i + 1) * num_checkpointed // len(layers)


def choose_micro_batch_size(policy: Policy, others: Sequence[Policy], planned: Plan) -> int:
    """Configure checkpointing and weight gathering, and return the maximum number of tokens per micro-batch.

    `others`: the reference and the teacher, if they are models of their own. The maximum is `micro_batch_tokens` if
    that is set, otherwise the fastest choice that fits into the memory that is free now. Layers stay gathered if the
    full weights of a model fit beside the micro-batches; those of a reference in host memory never do. Every process
    makes the same choices. Raises UserError if not even one prompt with one completion fits and `micro_batch_tokens` is
    not set.
    """
    cfg, device = planned.cfg, planned.gpus.device
    if not planned.gpus.on_gpu:
        set_checkpointing(policy, planned.num_checkpointed(math.inf))
        return cfg.micro_batch_tokens or CPU_MICRO_BATCH_TOKENS
    torch.cuda.empty_cache()
    free, gpu_size = torch.cuda.mem_get_info(device)
    limit = cfg.gpu_memory * GIB  # without a limit, what others use counts as this run's
    in_use = torch.cuda.memory_reserved(device) + CUDA_GIB * GIB if limit else gpu_size - free
    left = planned.left(min(limit or gpu_size, in_use + free), in_use)
    num_checkpointed = int(distributed.all_max(torch.tensor(planned.num_checkpointed(left))))
    tokens = -int(distributed.all_max(torch.tensor(-int(planned.max_tokens(num_checkpointed, left)))))
    planned.check_longest(num_checkpointed, tokens)
    size = cfg.micro_batch_tokens or min(tokens, MAX_MICRO_BATCH_TOKENS)
    set_checkpointing(policy, num_checkpointed)
    beside_update = left - planned.expert_bytes[num_checkpointed] - size * planned.token_bytes[num_checkpointed]
    beside_reference = left - size * planned.token_bytes[-1]  # at most this much per token without gradients
    too_large = [
        beside_update < planned.unsharded,
        "reference" in cfg.offload or beside_reference < planned.reference * planned.shards,
    ]
    keep = [not each for each in distributed.all_max(torch.tensor(too_large).int()).tolist()]
    policy.keep_unsharded = keep[0]
    for model in others:
        model.keep_unsharded = keep[1]
    layers = f"activation checkpointing of {num_checkpointed} of {len(planned.token_bytes) - 1} layers"
    gathering = ", weights gathered once per update" if policy.keep_unsharded else ""
    console.log(f"micro-batches of {size} tokens, {layers}{gathering}")
    return size


def with_oom_retry(policy: Policy, budget: int, work: Callable[[int], T]) -> tuple[int, T]:
    """Run `work(budget)` and return (budget, result); if the GPU runs out of memory, retry with a smaller budget.

    The budget shrinks by a quarter, at most `OOM_RETRIES` times. Before a retry, all gradients are discarded. Raises
    RunStopped if the last retry also runs out of memory, or if there are other processes, which would be left waiting
    in the middle of the same work.
    """
    retries = 0
    while True:
        try:
            if retries:
                recover(policy)  # only here, where the exception no longer holds the activations
            return budget, work(budget)
        except torch.OutOfMemoryError as error:
            if distributed.world_size() > 1 or retries == OOM_RETRIES:
                raise _out_of_memory(error) from None
        retries, budget = retries + 1, budget * 3 // 4
        console.log(f"out of GPU memory: reducing micro-batches to {budget} tokens")


def _out_of_memory(error: torch.OutOfMemoryError) -> RunStopped:
    reason = str(error).split(". ")[0]
    hints = f"{OOM_ACTIVATION_HINT} or, with --gpu_memory, a smaller --vllm_memory"
    return RunStopped(f"out of GPU memory ({reason}). What helps: {hints}", status=1)


def recover(policy: Policy) -> None:
    """End an interrupted forward or backward pass in the way that FSDP ends a completed pass; discard all gradients."""
    policy.set_requires_gradient_sync(True)  # otherwise, FSDP fails if a layer has never run
    policy._get_fsdp_state()._root_post_backward_final_callback()
    take_gradients(policy)  # so that zero_grad discards those of earlier micro-batches, too
    reshard(policy)
    policy.zero_grad()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
