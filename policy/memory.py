"""GPU memory: estimate what a model needs; choose sharding, checkpointing and micro-batch size; handle overflows.

The activation sizes per layer were measured on one H200, in bfloat16, with layers fused by torch.compile.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch.distributed.tensor import DTensor

from common import console, distributed
from common.errors import RunStopped, UserError
from config import Config, PolicyFlags
from policy.experts import experts_per_token
from policy.families import (
    attention_windows,
    head_dim,
    language_model,
    patches_per_token,
    routed_experts,
    vision_blocks,
)
from policy.forward import LOGIT_ROWS
from policy.lora import adapted_layers, has_adapter
from policy.model import Policy, compute_dtype, is_quantised, num_weights, trains_vision, vision_parameters
from policy.sharding import AFTER_UPDATE, reshard, take_gradients

T = TypeVar("T")
MAX_MICRO_BATCH_TOKENS = 10240  # upper limit of the automatic choice: larger micro-batches are no more efficient
TARGET_MICRO_BATCH_TOKENS = 8192  # below this size, checkpointing more layers to allow larger micro-batches is faster
CPU_MICRO_BATCH_TOKENS = 16384  # default without a GPU
FLOAT32_BYTES = 4  # a master weight or a gradient
MOMENTS_BYTES = 8  # its two moments in AdamW, in float32
MARGIN = 0.06  # fraction of the GPU's memory that the allocator cannot use
CUDA_GIB = 0.8  # memory that CUDA takes besides the allocator, for its context and for compiled kernels
SAMPLER_BYTES = 2 * 2**30  # least memory besides its copy of the weights with which a sampler starts
VLLM_BYTES = 5 * 2**30  # enough for what vLLM holds besides weights and KV cache: activations, and CUDA graphs
VLLM_MEMORY = 0.25  # least fraction of the GPU's memory that vLLM gets by default
VLLM_SHARE = 0.7  # largest part of what the resting trainer leaves free that vLLM gets by default
OOM_RETRIES = 3
OOM_ACTIVATION_HINT = "--activation_checkpointing full, a smaller --micro_batch_tokens"


def state_bytes(policy: Policy, flags: PolicyFlags, with_reference: bool, device: torch.device) -> tuple[int, int]:
    """Return the size in bytes of a full copy of the training state on `device`, as (weights and moments, gradients).

    The weights include those of a separate reference model. Weights and moments in host memory are not counted.
    """
    size = compute_dtype(flags.dtype, device).itemsize
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    held = sum(min(p.element_size(), size) * p.numel() for p in policy.parameters() if not p.requires_grad)
    if with_reference and not has_adapter(policy.model) and not flags.offload_reference:
        own = set(policy.parameters()) - (set() if flags.train_vision else set(vision_parameters(policy.model)))
        size = FLOAT32_BYTES if AFTER_UPDATE else size
        held += size * sum(p.numel() for p in own)  # it shares a frozen tower with the policy (`load_reference`)
    moments = 0 if flags.offload_optimizer else MOMENTS_BYTES
    return held + (FLOAT32_BYTES + moments) * trained, FLOAT32_BYTES * trained


def process_bytes(
    policy: Policy, flags: PolicyFlags, with_reference: bool, device: torch.device, sharding: str
) -> tuple[float, float]:
    """Return the part of `state_bytes` that each process holds. A 4-bit model and a frozen tower are not sharded."""
    shards = 1 if flags.load_in_4bit else distributed.num_shards(sharding)
    resting, gradients = state_bytes(policy, flags, with_reference, device)
    tower = [parameter for parameter in vision_parameters(policy.model) if not parameter.requires_grad]
    whole = compute_dtype(flags.dtype, device).itemsize * sum(parameter.numel() for parameter in tower)
    return (resting - whole) / shards + whole, gradients / shards


def cache_bytes(policy: Policy, cfg: Config, device: torch.device) -> float:
    """Return the size of a KV cache in which all completions that an engine samples at once reach their maximum length.

    With `tensor_parallel`, each GPU of the engine has a cache of this size. The completions of a prompt share its keys
    and values. States of linear attention are not counted.
    """
    text = language_model(policy.model).config
    heads = max(1, text.num_key_value_heads / cfg.tensor_parallel)
    token = 2 * heads * head_dim(text) * compute_dtype(cfg.dtype, device).itemsize  # in one layer
    drawn = cfg.oversample * cfg.prompts_per_step * cfg.num_generations * cfg.tensor_parallel
    sequences = min(cfg.vllm_sequences, math.ceil(drawn / distributed.world_size()))
    length = cfg.max_completion_length + cfg.max_prompt_length / cfg.num_generations
    return sequences * token * sum(min(length, window) for window in attention_windows(text))


def least_sampler_bytes(policy: Policy, cfg: Config, device: torch.device) -> float:
    """Return the least memory of each GPU with which a sampler starts that has a copy of the model."""
    copy = num_weights(policy) * compute_dtype(cfg.dtype, device).itemsize / cfg.tensor_parallel
    return copy + SAMPLER_BYTES


def usable_bytes(device: torch.device, limit: float) -> float:
    """Return how many bytes of this process's GPU the allocator can use, given a limit of `limit` GiB (0: no limit)."""
    return torch.cuda.get_device_properties(device).total_memory * distributed.memory_fraction(limit) * (1 - MARGIN)


def used_by_others(device: torch.device) -> int:
    """Return how many bytes of the GPU other programs use: all that this process's allocator and CUDA do not."""
    free, size = torch.cuda.mem_get_info(device)
    return max(0, size - free - torch.cuda.memory_reserved(device) - int(CUDA_GIB * 2**30))


def describe_others(device: torch.device) -> str:
    """Return how much of the GPU other programs use, for the end of a message; "" if it is next to nothing."""
    others = used_by_others(device) / 2**30 if device.type == "cuda" else 0
    return f"; other programs use {others:.1f} GiB of this GPU" if others > 1 else ""


def choose_sharding(
    policy: Policy, flags: PolicyFlags, with_reference: bool, device: torch.device, limit: float = 0.0
) -> str:
    """Return `flags.sharding`, with "auto" resolved to "none", "hybrid" or "full" (without a GPU: "full").

    A full copy on each process avoids gathering weights. Shards leave more memory for larger micro-batches and for the
    sampler. Raises UserError for "hybrid" if the machines run different numbers of processes.
    """
    equal_machines = len(set(distributed.all_gather(distributed.local_world_size()))) == 1
    if flags.sharding == "hybrid" and not equal_machines:
        raise UserError(
            "--sharding hybrid needs the same number of processes on every machine: use the same --nproc_per_node"
        )
    if flags.sharding != "auto":
        return flags.sharding
    if distributed.world_size() == 1 or device.type != "cuda":
        return "full"
    state, total = sum(state_bytes(policy, flags, with_reference, device)), usable_bytes(device, limit)
    several_machines = distributed.local_world_size() < distributed.world_size()
    fits_machine = equal_machines and state / distributed.local_world_size() < 2 * total / 3
    chosen = "none" if state < total / 3 else "hybrid" if several_machines and fits_machine else "full"
    chosen = distributed.all_gather(chosen)[0]  # rank 0's choice: machines may have different GPUs
    console.log(f"sharding: {chosen} (weights, gradients, optimizer: {state / 2**30:.1f} GiB)")
    return chosen


def plan_sampler(policy: Policy, cfg: Config, device: torch.device, sharding: str) -> tuple[bool, float]:
    """Return whether the GPU has room for a sampler's copy of the model, and the fraction of its memory that vLLM gets.

    The fraction is `cfg.vllm_memory` or, if that is 0, `VLLM_MEMORY`. It is more if the copy needs more. By default, it
    is also more if the completions of a step need more, as far as the resting trainer and other programs leave it free;
    not with `gpu_memory`, because PyTorch counts vLLM's memory towards that limit even while vLLM sleeps. Without a
    GPU, there is always room, and with several processes, too, because only a single one can do without a copy.
    """
    fraction = cfg.vllm_memory or VLLM_MEMORY
    if device.type != "cuda":
        return True, fraction
    needed, total = least_sampler_bytes(policy, cfg, device), usable_bytes(device, cfg.gpu_memory)
    resting, gradients = process_bytes(policy, cfg, bool(cfg.beta), device, sharding)
    left = total - resting - (gradients if cfg.gpu_memory else used_by_others(device))
    has_room = distributed.world_size() > 1 or needed <= left
    fraction = max(fraction, min(0.9, needed / total))
    if not cfg.vllm_memory and not cfg.gpu_memory:
        enough = needed - SAMPLER_BYTES + VLLM_BYTES + cache_bytes(policy, cfg, device)
        fraction = max(fraction, min(enough, VLLM_SHARE * left) / total)
    return has_room, fraction


def check_gpu_memory(
    policy: Policy,
    cfg: Config,
    device: torch.device,
    sampler_fraction: float,
    sharding: str = "full",
) -> None:
    """Limit this process to `cfg.gpu_memory` of its GPU, if set; raise UserError if the training state does not fit.

    During an update, weights, gradients and optimizer state must fit. While the sampler is awake, weights and optimizer
    state must fit alongside it; the sampler then takes `sampler_fraction` of the memory. It keeps that memory during an
    update if `cfg.gpu_memory` is set (`fits_beside_sampler`). The memory that other programs use is not there.
    """
    if device.type != "cuda":
        return
    if cfg.gpu_memory:
        fraction = distributed.memory_fraction(max(cfg.gpu_memory - CUDA_GIB, 0.1))  # it holds for the allocator only
        torch.cuda.set_per_process_memory_fraction(fraction, device)
    limit = usable_bytes(device, cfg.gpu_memory)
    total = min(limit, usable_bytes(device, 0.0) - used_by_others(device))
    resting, gradients = process_bytes(policy, cfg, bool(cfg.beta), device, sharding)
    sampling = resting + sampler_fraction * limit
    training = resting + gradients + (sampler_fraction * limit if cfg.gpu_memory else 0)
    if (needed := max(training, sampling)) > total:
        what, hints = "weights, gradients and AdamW", memory_saving_flags(cfg, sharding)
        if sampling > resting + gradients:
            what = "weights, AdamW and --vllm_memory"
            if sampler_fraction * limit > least_sampler_bytes(policy, cfg, device) + 1:  # else it would be raised again
                hints.insert(0, f"a --vllm_memory below {sampler_fraction:.2f}")
            elif distributed.world_size() > cfg.tensor_parallel and cfg.oversample == 1:
                hints.insert(0, "a larger --tensor_parallel")
        raise UserError(
            f"this GPU is too small by {(needed - total) / 2**30:.1f} GiB: {what} take {needed / 2**30:.1f} GiB on "
            f"each of {distributed.world_size()} processes, and {total / 2**30:.1f} GiB are usable"
            f"{describe_others(device)}. What helps: {', '.join(hints)}, more GPUs"
        )


def fits_beside_sampler(policy: Policy, cfg: Config, device: torch.device, sharding: str) -> bool:
    """Return whether the sampler can stay awake while the trainer works: it has started, `policy` is in host memory.

    The largest micro-batch must then fit without activation checkpointing. With `cfg.gpu_memory`, there is no choice:
    PyTorch counts vLLM's memory towards that limit even while vLLM sleeps. All processes make the same choice.
    """
    if device.type != "cuda" or cfg.gpu_memory:
        return device.type == "cuda"
    free, total = torch.cuda.mem_get_info(device)
    state = sum(process_bytes(policy, cfg, bool(cfg.beta), device, sharding))
    gathered = compute_dtype(cfg.dtype, device).itemsize * num_weights(policy)
    logits = logits_bytes(policy, cfg.compile)
    tokens = cfg.micro_batch_tokens or MAX_MICRO_BATCH_TOKENS
    activations = tokens * bytes_per_token(policy, 0, cfg.compile, compute_dtype(cfg.dtype, device))
    too_large = state + gathered + logits + activations > free - MARGIN * total
    return not distributed.all_max(torch.tensor(int(too_large)))


def logits_bytes(policy: Policy, compiled: bool) -> int:
    """Return what the float32 logits of `LOGIT_ROWS` tokens and their derivatives take."""
    return (12 if compiled else 28) * LOGIT_ROWS * language_model(policy.model).embed_tokens.weight.shape[0]


def memory_saving_flags(cfg: Config, sharding: str) -> list[str]:
    """Return the flags that would make the training state smaller and are not already in use."""
    adapter, separate_reference = cfg.has_adapter, cfg.beta and not cfg.has_adapter
    hints = {
        "--sharding full": distributed.num_shards(sharding) < distributed.world_size(),
        "--lora_rank 64": not adapter,
        "--load_in_4bit" if adapter else "--load_in_4bit with it": not cfg.load_in_4bit,
        "--offload_optimizer": not cfg.offload_optimizer,
        "--offload_reference": separate_reference and not cfg.offload_reference,
        "--beta 0": separate_reference,
    }
    return [hint for hint, applies in hints.items() if applies]


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
    if copies:  # each expert gets its own copy of a token; Aria's shared experts are as wide as its routed ones
        width = copies * getattr(config, "moe_intermediate_size", width)
        width += getattr(config, "moe_num_shared_experts", 0) * config.intermediate_size
    full_layer = size * ((9 + 3 * copies) * config.hidden_size + 3 * width) * (1.0 if compiled else 1.5)
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

    Layers that are not checkpointed keep their copies; of the others, one has them at a time.
    """
    layers = language_model(policy.model).layers
    adapted = [name for name, layer in adapted_layers(layers).items() if hasattr(layer, "parameter_name")]
    if not adapted:
        return 0
    experts = sum(p.numel() for p in routed_experts(policy.model).values()) * dtype.itemsize
    return experts * (len(layers) - num_checkpointed + 1) // len(layers)


@dataclass(frozen=True)
class MemoryBudget:
    """What a process's GPU memory is spent on when micro-batches are sized, in bytes."""

    total: float  # memory that the run may use: the GPU's, or at most `--gpu_memory` of what others leave free
    margin: float  # the part of it that the allocator cannot use
    in_use: float  # weights, the reference, and what the sampler keeps; without a limit, also what others use
    optimizer: float  # moments and gradients, which are not allocated yet
    logits: float  # float32 logits of `LOGIT_ROWS` tokens, their derivatives, and two gradients of a trained lm_head
    gathered: float
    """The embedding, the lm_head, and two layers with their gradients; beside 4-bit weights, the whole adapter."""

    @property
    def activations(self) -> float:
        """What is left for the activations of a micro-batch."""
        return self.total - self.margin - self.in_use - self.optimizer - self.logits - self.gathered


def measure_memory(
    policy: Policy, flags: PolicyFlags, device: torch.device, limit: float, sharding: str
) -> MemoryBudget:
    """Return the memory budget of this process. `limit`: GiB that the run may use on the GPU (0: no limit)."""
    torch.cuda.empty_cache()
    free, gpu_size = torch.cuda.mem_get_info(device)
    in_use = torch.cuda.memory_reserved(device) + int(CUDA_GIB * 2**30) if limit else gpu_size - free
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad) / distributed.num_shards(sharding)
    decoder = language_model(policy.model)
    size = compute_dtype(flags.dtype, device).itemsize
    root = {*decoder.embed_tokens.parameters(), *policy.model.lm_head.parameters()}
    gathered = 2 * (size + FLOAT32_BYTES) * sum(p.numel() for p in decoder.layers[0].parameters())
    gathered += size * sum(p.numel() for p in root)
    if is_quantised(policy):
        gathered = sum(size * p.numel() for p in policy.parameters() if isinstance(p, DTensor))
    head = policy.model.lm_head.weight
    logits = logits_bytes(policy, flags.compile)
    total = min(limit * 2**30 or gpu_size, in_use + free)
    return MemoryBudget(
        total=total,
        margin=MARGIN * total,
        in_use=in_use,
        optimizer=(FLOAT32_BYTES + (0 if flags.offload_optimizer else MOMENTS_BYTES)) * trained,
        logits=logits + (2 * size * head.numel() if head.requires_grad else 0),  # see `_TokenLogprobs`
        gathered=gathered,
    )


def choose_micro_batch_size(
    policy: Policy,
    reference: Policy | None,
    flags: PolicyFlags,
    longest: int,
    device: torch.device,
    limit: float = 0.0,
    sharding: str = "full",
) -> int:
    """Configure checkpointing and weight gathering, and return the maximum number of tokens per micro-batch.

    The maximum is `flags.micro_batch_tokens` if that is set, otherwise the fastest choice that fits into the free
    memory. Every process makes the same choice. `longest`: maximum number of tokens in a prompt plus one completion,
    which always share a micro-batch. `limit`: memory in GiB that the run may use on the GPU (0: no limit). Raises
    UserError if not even one prompt with one completion fits and `flags.micro_batch_tokens` is not set.
    """
    num_layers, requested = len(language_model(policy.model).layers), flags.micro_batch_tokens
    choices = {"none": [0], "selective": [num_layers // 2], "full": [num_layers], "auto": list(range(num_layers + 1))}
    choice = choices[flags.activation_checkpointing]
    if device.type != "cuda":
        set_checkpointing(policy, choice[0])
        choose_gathering(policy, reference, flags, (0, 0))
        return requested or CPU_MICRO_BATCH_TOKENS
    memory = measure_memory(policy, flags, device, limit, sharding)
    dtype = compute_dtype(flags.dtype, device)
    token_bytes = {n: bytes_per_token(policy, n, flags.compile, dtype) for n in choice}
    left = {n: memory.activations - adapted_expert_bytes(policy, n, dtype) for n in choice}
    max_tokens = {n: int(left[n] / token_bytes[n]) for n in choice}
    target = max(longest, requested or TARGET_MICRO_BATCH_TOKENS)
    num_checkpointed = next((n for n, tokens in max_tokens.items() if tokens >= target), choice[-1])
    num_checkpointed = int(distributed.all_max(torch.tensor(num_checkpointed)))
    tokens = -int(distributed.all_max(torch.tensor(-max_tokens[num_checkpointed])))
    if tokens < longest and not requested:
        missing = (longest - tokens) * token_bytes[num_checkpointed] / 2**30
        raise UserError(
            f"this GPU is too small by {missing:.1f} GiB for a prompt and completion of {longest} tokens"
            f"{describe_others(device)}. What helps: shorter ones (--max_prompt_length, --max_completion_length), "
            f"{OOM_ACTIVATION_HINT}"
        )
    size = requested or min(tokens, MAX_MICRO_BATCH_TOKENS)
    # Without gradients, a token takes at most as much memory as with all layers checkpointed.
    forward_token_bytes = bytes_per_token(policy, num_layers, flags.compile, dtype)
    free = left[num_checkpointed] - size * token_bytes[num_checkpointed]
    choose_gathering(policy, reference, flags, (free, memory.activations - size * forward_token_bytes))
    set_checkpointing(policy, num_checkpointed)
    checkpointing = f"activation checkpointing of {num_checkpointed} of {num_layers} layers"
    gathering = ", weights gathered once per update" if policy.keep_unsharded else ""
    console.log(f"micro-batches of {size} tokens, {checkpointing}{gathering}")
    return size


def choose_gathering(policy: Policy, reference: Policy | None, flags: PolicyFlags, free_bytes: Sequence[float]) -> None:
    """Set `keep_unsharded` on `policy` and on `reference`, each to the same value on every process.

    A model's layers stay gathered if its full weights fit into its free memory. A reference model in host memory is
    always gathered layer by layer. `free_bytes` holds the free memory for the policy, then for the reference.
    """
    models = [policy] if reference in (None, policy) else [policy, reference]
    for model, available in zip(models, free_bytes):
        parameters = list(model.parameters())
        size = compute_dtype(flags.dtype, parameters[0].device).itemsize
        full_bytes = size * sum(parameter.numel() for parameter in parameters if isinstance(parameter, DTensor))
        never = model is reference and flags.offload_reference
        counted = is_quantised(model)  # `measure_memory` has counted the gathered adapter
        too_large = available < full_bytes and not counted
        model.keep_unsharded = not distributed.all_max(torch.tensor(int(never or too_large)))


def with_oom_retry(policy: Policy, budget: int, work: Callable[[int], T]) -> tuple[int, T]:
    """Run `work(budget)` and return (budget, result); if the GPU runs out of memory, retry with a smaller budget.

    It is made a quarter smaller, at most `OOM_RETRIES` times. Before a retry, all gradients are discarded. Raises
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
