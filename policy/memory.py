"""A GPU's memory: what a model needs of it, micro-batches and checkpointing that fit, going on after an overflow.

The figures of a layer's activations are measured ones (LOG.md): one H200, bfloat16, layers fused by torch.compile.
"""

import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch.distributed.tensor import DTensor

from common import console, distributed
from common.errors import RunStopped, UserError
from config import PolicyFlags
from policy.forward import LOGIT_ROWS, language_model
from policy.lora import has_adapter
from policy.model import Policy, compute_dtype, vision_parameters
from policy.sharding import reshard

T = TypeVar("T")
MOST_TOKENS = 10240  # of a micro-batch chosen here: more keeps a GPU no busier
ENOUGH_TOKENS = 8192  # with fewer, checkpointing with larger micro-batches is faster
CPU_TOKENS = 16384  # without a GPU
MARGIN = 0.06  # of the GPU's memory, for what its allocator cannot use
OOM_ACTIVATION_HINT = "--activation_checkpointing full, a smaller --micro_batch_tokens or --vllm_memory"


def state_bytes(policy: Policy, flags: PolicyFlags, with_reference: bool) -> tuple[int, int]:
    """Bytes of a whole copy of (weights, the reference's included, and moments; gradients)."""
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    held = sum(min(p.element_size(), 2) * p.numel() for p in policy.parameters() if not p.requires_grad)
    if with_reference and not has_adapter(policy.model) and not flags.offload_reference:
        held += 2 * sum(p.numel() for p in policy.parameters())
    return held + (4 if flags.offload_optimizer else 12) * trained, 4 * trained


def usable_bytes(device: torch.device, limit: float) -> float:
    """Of this process's GPU, held to `limit` GiB (0: all of it), what its allocator can use."""
    return torch.cuda.get_device_properties(device).total_memory * distributed.memory_fraction(limit) * (1 - MARGIN)


def choose_sharding(
    policy: Policy, flags: PolicyFlags, with_reference: bool, device: torch.device, limit: float = 0.0
) -> str:
    """What «auto» of `PolicyFlags.sharding` is here; without a GPU «full». A copy on each process saves the gathering
    of weights, a share of one leaves memory for larger micro-batches and for the sampler. Raises UserError for hybrid
    over machines with different numbers of processes."""
    alike = len(set(distributed.all_gather(distributed.local_world_size()))) == 1
    if flags.sharding == "hybrid" and not alike:
        raise UserError(
            "--sharding hybrid needs as many processes on every machine: give all the same --nproc_per_node"
        )
    if flags.sharding != "auto":
        return flags.sharding
    if distributed.world_size() == 1 or device.type != "cuda":
        return "full"
    state, total = sum(state_bytes(policy, flags, with_reference)), usable_bytes(device, limit)
    several_machines = distributed.local_world_size() < distributed.world_size()
    fits_machine = alike and state / distributed.local_world_size() < 2 * total / 3
    chosen = "none" if state < total / 3 else "hybrid" if several_machines and fits_machine else "full"
    chosen = distributed.all_gather(chosen)[0]  # machines may have different GPUs
    if console.is_main():
        print(f"sharding: {chosen} (weights, gradients, optimizer: {state / 2**30:.1f} GiB)", file=sys.stderr)
    return chosen


def check_gpu_memory(
    policy: Policy,
    flags: PolicyFlags,
    with_reference: bool,
    device: torch.device,
    sampler: float,
    limit: float = 0.0,
    sharding: str = "full",
) -> None:
    """Hold this process to `limit` GiB of its GPU (0: all of it). Raise UserError when weights, gradients and optimizer
    alone overflow that, or, gradients apart, do so beside the share that is the `sampler`'s while it is awake."""
    if device.type != "cuda":
        return
    if limit:
        torch.cuda.set_per_process_memory_fraction(distributed.memory_fraction(limit), device)
    total, shards = usable_bytes(device, limit), 1 if flags.load_in_4bit else distributed.num_shards(sharding)
    resting, gradients = (part / shards for part in state_bytes(policy, flags, with_reference))
    training, sampling = resting + gradients, resting + sampler * total
    if (needed := max(training, sampling)) > total:
        what = "weights, gradients, AdamW" if training >= sampling else "weights, AdamW and --vllm_memory"
        raise UserError(
            f"this GPU is too small by {(needed - total) / 2**30:.1f} GiB: {what} take {needed / 2**30:.1f} GiB of "
            f"{total / 2**30:.1f} usable on each of {distributed.world_size()} processes. What helps: "
            f"{smaller_state(flags, with_reference, sharding)}"
        )


def smaller_state(flags: PolicyFlags, with_reference: bool, sharding: str) -> str:
    """The flags that make weights and optimizer smaller and are not given yet."""
    adapter, separate = flags.has_adapter, with_reference and not flags.has_adapter
    steps = {
        "--sharding full": distributed.num_shards(sharding) < distributed.world_size(),
        "--lora_rank 64": not adapter,
        "--load_in_4bit" if adapter else "--load_in_4bit with it": not flags.load_in_4bit,
        "--offload_optimizer": not flags.offload_optimizer,
        "--offload_reference": separate and not flags.offload_reference,
        "--beta 0": separate,
        "a smaller --vllm_memory": True,
        "more GPUs": True,
    }
    return ", ".join(step for step, open_ in steps.items() if open_)


def set_checkpointing(policy: Policy, again: int) -> None:
    """Let `again` of the layers, evenly spread, keep only their input and be computed again in the backward pass; and
    with any of them the blocks of a trained vision tower."""
    if again == 0:
        return
    policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = language_model(policy.model).layers
    for i, layer in enumerate(layers):
        layer.gradient_checkpointing = i * again // len(layers) < (i + 1) * again // len(layers)


def bytes_per_token(policy: Policy, again: int, compiled: bool, dtype: torch.dtype = torch.bfloat16) -> float:
    """What one packed token leaves behind in the forward pass for the backward pass when `again` layers are
    checkpointed, over all layers, those of a trained vision tower included: the token may stand for a picture."""
    config, size = language_model(policy.model).config, dtype.itemsize
    kept = 4 * config.hidden_size  # the residual stream is float32
    logits = size * config.vocab_size if again == 0 else 0  # their derivatives, kept where no layer is checkpointed
    whole = size * (9 * config.hidden_size + 3 * config.intermediate_size) * (1.0 if compiled else 1.5)
    layers = (config.num_hidden_layers - again) * whole + again * kept + whole
    return layers + logits + _vision_bytes(policy, again, size)


def _vision_bytes(policy: Policy, again: int, size: int) -> float:
    if not any(parameter.requires_grad for parameter in vision_parameters(policy.model)):
        return 0.0
    config = policy.model.config.vision_config
    kept = size * config.hidden_size
    whole = size * (14 * config.hidden_size + 4 * getattr(config, "intermediate_size", 4 * config.hidden_size))
    blocks = config.depth * (kept if again else whole) + whole
    return blocks * config.spatial_merge_size**2  # patches of a token


def choose_micro_batch_size(
    policy: Policy,
    reference: Policy | None,
    flags: PolicyFlags,
    longest: int,
    device: torch.device,
    limit: float = 0.0,
    sharding: str = "full",
) -> int:
    """Set the checkpointing and whether weights are gathered once, and return the tokens of a micro-batch: the flags',
    else the fastest in the free memory.

    `longest`: the most tokens of a prompt with one completion, which cannot be split; `limit`: GiB of the GPU that the
    run may use. Raises UserError when not even that fits. Every process takes the same.
    """
    layers, budget = len(language_model(policy.model).layers), flags.micro_batch_tokens
    choices = {"none": [0], "selective": [layers // 2], "full": [layers], "auto": list(range(layers + 1))}
    choice = choices[flags.activation_checkpointing]
    if device.type != "cuda":
        set_checkpointing(policy, choice[0])
        keep_unsharded(policy, reference, flags, (0, 0))
        return budget or CPU_TOKENS
    torch.cuda.empty_cache()
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad) / distributed.num_shards(sharding)
    vocabulary = language_model(policy.model).embed_tokens.weight.shape[0]
    layer = sum(p.numel() for p in language_model(policy.model).layers[0].parameters())
    free, whole = torch.cuda.mem_get_info(device)
    total = limit * 2**30 or whole
    free -= whole - total
    # gradients and moments are not there yet; logits in float32 and what comes of them; two layers gathered whole
    coming, logits = 4 if flags.offload_optimizer else 12, 12 if flags.compile else 28
    room = free - MARGIN * total - coming * trained - logits * LOGIT_ROWS * vocabulary - 12 * layer
    enough = max(longest, budget or ENOUGH_TOKENS)
    cost = {
        again: bytes_per_token(policy, again, flags.compile, compute_dtype(flags.dtype, device)) for again in choice
    }
    fits = {again: int(room / cost[again]) for again in choice}
    again = next((again for again, tokens in fits.items() if tokens >= enough), choice[-1])
    again = int(distributed.all_max(torch.tensor(again)))
    tokens = -int(distributed.all_max(torch.tensor(-fits[again])))
    if tokens < longest and not budget:
        missing = (longest - tokens) * cost[again] / 2**30
        raise UserError(
            f"this GPU is too small by {missing:.1f} GiB for a prompt and completion of {longest} tokens. What helps: "
            f"shorter ones (--max_prompt_length, --max_completion_length), {OOM_ACTIVATION_HINT}"
        )
    budget = budget or min(tokens, MOST_TOKENS)
    # without gradients a token leaves at most as much as when all layers are checkpointed
    forward = bytes_per_token(policy, layers, flags.compile, compute_dtype(flags.dtype, device))
    keep_unsharded(policy, reference, flags, (room - budget * cost[again], room - budget * forward))
    set_checkpointing(policy, again)
    if console.is_main():
        how = f"activation checkpointing of {again} of {layers} layers"
        once = ", weights gathered once for all of an update" if policy.keep_unsharded else ""
        print(f"micro-batches of {budget} tokens, {how}{once}", file=sys.stderr)
    return budget


def keep_unsharded(policy: Policy, reference: Policy | None, flags: PolicyFlags, room: Sequence[float]) -> None:
    """Set for `policy` and `reference` whether their gathered weights stay, alike on every process: as the flags say,
    else where that leaves memory of the `room` in bytes that each has."""
    models = [policy] if reference in (None, policy) else [policy, reference]
    for model, bytes_free in zip(models, room):
        parameters = list(model.parameters())
        size = compute_dtype(flags.dtype, parameters[0].device).itemsize
        whole = size * sum(parameter.numel() for parameter in parameters if isinstance(parameter, DTensor))
        never = flags.gather == "layer" or (model is reference and flags.offload_reference)
        too_large = flags.gather == "auto" and bytes_free < whole
        model.keep_unsharded = not distributed.all_max(torch.tensor(int(never or too_large)))


def with_oom_retry(policy: Policy, budget: int, work: Callable[[int], T]) -> tuple[int, T]:
    """`work(budget)`, and the budget it was done with: when the GPU's memory overflows, everything that it added to the
    gradient is forgotten and it is done again, once, with half the budget.

    Raises RunStopped when that does not help either, or when other processes wait in the middle of the same work.
    """
    for attempt in range(2):
        try:
            return budget, work(budget)
        except torch.OutOfMemoryError as error:
            if attempt or distributed.world_size() > 1:
                reason = str(error).split(". ")[0]
                raise RunStopped(f"out of GPU memory ({reason}). What helps: {OOM_ACTIVATION_HINT}", status=1) from None
            recover(policy)
            budget //= 2
            print(f"out of GPU memory: from now on micro-batches of {budget} tokens", file=sys.stderr)
    raise AssertionError("unreachable")


def recover(policy: Policy) -> None:
    """End a forward or backward pass that broke off, as FSDP ends one that came through, and forget its gradients."""
    policy._get_fsdp_state()._root_post_backward_final_callback()
    reshard(policy)
    policy.zero_grad()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
