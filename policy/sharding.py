"""Sharding with FSDP2: shard the policy and the reference, gather and free layers, and read back the full weights."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from common import console, distributed
from config import Config, PolicyFlags
from policy.families import language_model, vision_blocks, vision_parts
from policy.forward import enable_packed_forward
from policy.lora import adapted_weights, adapter_parameters, has_adapter
from policy.model import Policy, compute_dtype, is_quantised, load_model, vision_parameters

AFTER_UPDATE: dict[str, Callable[[Policy, Policy, int, PolicyFlags], None]] = {}
"""Functions that change the reference: each is called with the policy, the reference, the number of updates so far and
the flags, after every update that was neither skipped nor empty. It may change only weights that are trained in the
policy, because checkpoints hold only these weights of the reference. On a GPU, a reference that changes is kept in
float32: bfloat16 would round small changes away."""


def load_reference(
    name: str, flags: PolicyFlags, device: torch.device, policy: Policy, sharding: str = "full"
) -> Policy:
    """Return the reference of the KL term. It is fixed, unless there is a function in `AFTER_UPDATE`.

    With an adapter, it is `policy` itself: `lora.reference_weights` turns a new adapter off, or restores a loaded one.
    Otherwise, the reference is the model at `name`, sharded and in the compute dtype. It then shares the vision tower
    of `policy`, unless that tower is trained. If it changes, it is in float32 and sharded like `policy`.
    """
    if has_adapter(policy.model):
        return policy
    dtype = compute_dtype(flags.dtype, device)
    model = load_model(name, torch.float32 if AFTER_UPDATE else dtype, to_shard=True)
    enable_packed_forward(model, compiled=flags.compile and device.type == "cuda")
    if not flags.train_vision:  # from here on, the tower is the policy's, which is already prepared
        for name, part in vision_parts(policy.model).items():
            setattr(model.model, name, part)
    reference = Policy(model.eval().requires_grad_(bool(AFTER_UPDATE) and flags.train_vision))  # to shard the tower
    return apply_fsdp(reference, device, dtype, sharding, offload="reference" in flags.offload).requires_grad_(False)


def load_teacher(cfg: Config, device: torch.device, policy: Policy, sharding: str = "full") -> Policy:
    """Return the frozen model `cfg.teacher`; if it is a new adapter's base, `policy` (`lora.reference_weights`)."""
    if cfg.teaches_itself:
        return policy
    dtype = compute_dtype(cfg.dtype, device)
    model = load_model(cfg.teacher, dtype, to_shard=True)
    enable_packed_forward(model, compiled=cfg.compile and device.type == "cuda")
    return apply_fsdp(Policy(model.eval().requires_grad_(False)), device, dtype, sharding).requires_grad_(False)


def apply_fsdp(
    policy: Policy, device: torch.device, dtype: torch.dtype, sharding: str = "full", offload: bool = False
) -> Policy:
    """Shard `policy` over the processes, in place, as `PolicyFlags.sharding` describes.

    Master weights stay in float32, compute runs in `dtype`, and gradients are averaged in float32. `offload`: keep the
    shards in host memory until their layer runs. If only the main process has loaded the weights (see `load_model`), it
    sends the other processes their shards.
    """
    # No function here may hold a reference to a parameter that is sharded. FSDP moves each parameter to the device
    # before cutting it into shards, and a remaining reference would keep the full tensor on the device.
    full_state = _state_to_send(policy)
    replicated = _place_replicated(policy, device, dtype)
    _shard(policy, replicated, device, dtype, sharding, offload)
    policy.num_shards = distributed.num_shards(sharding)
    if full_state:
        _broadcast_and_shard(policy, full_state, device, torch.device("cpu") if offload else device)
    for block in vision_blocks(policy.model):
        if isinstance(block, FSDPModule):
            # FSDP cannot accumulate gradients of what was never gathered, as in a first micro-batch without images.
            block.unshard()
            block.reshard()
    return policy


def _state_to_send(policy: Policy) -> dict[str, Tensor]:
    """Return all tensors of `policy` if a process has no weights yet, else nothing."""
    tensors = dict([*policy.named_parameters(), *policy.named_buffers()])
    is_empty = torch.tensor(int(any(tensor.is_meta for tensor in tensors.values())))
    return {name: tensor.detach() for name, tensor in tensors.items()} if distributed.all_max(is_empty) else {}


def _place_replicated(policy: Policy, device: torch.device, dtype: torch.dtype) -> set[nn.Parameter]:
    """Move all buffers to `device`, and the weights that every process holds in full; return these, cast to `dtype`.

    A frozen vision tower is replicated on every process, so that a batch without images needs no collective for the
    tower. A 4-bit model is replicated, too.
    """
    candidates = policy.parameters() if is_quantised(policy) else vision_parameters(policy.model)
    replicated = {parameter for parameter in candidates if not parameter.requires_grad}
    # The policy's adapter weights in a frozen tower are exported unchanged, so they keep their dtype. The reference's
    # adapter weights are cast here, and the policy's are cast in the forward pass. If only one adapter were cast, the
    # KL term would not start at zero.
    exported = set(adapter_parameters(policy.model).values()) if has_adapter(policy.model) else set()
    for parameter in replicated:
        keep_dtype = parameter in exported or not parameter.is_floating_point()
        new_dtype = parameter.dtype if keep_dtype else dtype
        parameter.data = parameter.data.to("meta" if parameter.is_meta else device, new_dtype)
    for buffer in policy.buffers():
        buffer.data = buffer.data if buffer.is_meta else buffer.data.to(device)
    return replicated


def _shard(
    policy: Policy, ignored: set[nn.Parameter], device: torch.device, dtype: torch.dtype, sharding: str, offload: bool
) -> None:
    """Make each decoder layer, and each block of a trained vision tower, an FSDP unit; the root unit holds the rest."""
    # Inputs are not cast, so that the residual stream stays in float32.
    precision = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    host = CPUOffloadPolicy() if offload and device.type == "cuda" else OffloadPolicy()
    options = {"mesh": distributed.make_mesh(device, sharding), "mp_policy": precision, "offload_policy": host}
    if _is_trained_in_full(vision_parameters(policy.model)):
        for block in vision_blocks(policy.model):
            fully_shard(block, **options)
    layers = language_model(policy.model).layers
    for layer in layers:
        fully_shard(layer, **options, ignored_params=ignored)
    fully_shard(policy, ignored_params=ignored, **options)
    register_fsdp_forward_method(policy, "next_token_logits")
    # Gather the next layer while the current layer computes. By default, FSDP does this only in the backward pass.
    for layer, following in itertools.pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])


def _is_trained_in_full(parameters: list[nn.Parameter]) -> bool:
    return bool(parameters) and all(parameter.requires_grad for parameter in parameters)


@torch.no_grad()
def _broadcast_and_shard(
    policy: Policy, full_state: dict[str, Tensor], device: torch.device, shard_device: torch.device
) -> None:
    """Fill the sharded `policy` with the main process's `full_state`, one parameter or buffer at a time.

    Shards on the meta device are allocated on `shard_device`, other tensors on the meta device on `device`.
    """

    def allocate(tensor: Tensor) -> Tensor:
        target_device = shard_device if isinstance(tensor, DTensor) else device
        return torch.empty_like(tensor, device=target_device) if tensor.is_meta else tensor

    policy._apply(allocate)
    for name, target in [*policy.named_parameters(), *policy.named_buffers()]:
        tensor = torch.empty(target.shape, dtype=target.dtype, device=device)
        if console.is_main():
            tensor.copy_(full_state.pop(name))
        dist.broadcast(tensor, 0)
        if isinstance(target, DTensor):
            tensor = distribute_tensor(tensor, target.device_mesh, target.placements, src_data_rank=None).to_local()
            target.to_local().copy_(tensor)
        else:
            target.copy_(tensor)


@contextlib.contextmanager
def unsharded(policy: Policy) -> Iterator[None]:
    """Inside the context, keep layers gathered after their first use, if `policy.keep_unsharded` is set.

    On exit, every process frees the gathered weights and keeps only its shards, even after an exception between
    micro-batches. An exception during a forward or backward pass also needs `memory.recover`. The embedding and the
    lm_head are freed, too; FSDP alone would leave them gathered after a forward pass without gradients.
    """
    if policy.keep_unsharded:
        policy.set_reshard_after_forward(False)
        policy.set_reshard_after_backward(False)
    try:
        yield
    finally:
        reshard(policy)


def reduce_gradients(policy: Policy, now: bool) -> None:
    """Set whether the next backward pass averages gradients over the processes (`now`), or leaves that to a later pass.

    If every process holds all weights, gradients are accumulated in float32 until then. If the weights are sharded,
    only the mean over copies of the weights is left to the later pass: full gradients would not fit.
    """
    if not isinstance(policy, FSDPModule):
        return
    if policy.num_shards == 1:
        policy.set_requires_gradient_sync(now)
    else:
        policy.set_requires_all_reduce(now)


def take_gradients(policy: Policy) -> None:
    """Turn what FSDP has accumulated into the gradients of `policy`, in a single process, which has nothing to average.

    FSDP would copy each gradient twice, to memory that it cannot share with activations: 12 GB for a 3B model
    (docs/log.md).
    """
    groups = [group for module in policy.modules() for group in fsdp_groups(module)]
    for parameter in [parameter for group in groups for parameter in group.fsdp_params]:
        full = getattr(parameter, "_unsharded_param", None)  # missing until it is gathered for the first time
        gradient = parameter.unsharded_accumulated_grad
        if gradient is None and full is not None:  # not accumulated separately if computed in float32
            gradient, full.grad = full.grad, None
        if gradient is not None:
            parameter.sharded_param.grad = parameter.to_sharded_dtensor(gradient)
            parameter.unsharded_accumulated_grad = None


def fsdp_groups(module: nn.Module) -> list[Any]:
    """Return FSDP's own records of the parameters that it gathers together for `module`."""
    if not isinstance(module, FSDPModule):
        return []
    state = module._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group]  # torch 2.11 has one, or None


def reshard(policy: Policy) -> None:
    """Free the gathered weights, so that every process keeps only its shards."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def sampler_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Yield what `lora.adapted_weights` does, but in the compute dtype if no process holds all weights.

    Copy each weight before requesting the next weight. An FSDP unit is a layer, or the embedding with the lm_head. Its
    shards are gathered together while the previous unit is being read, and freed when the next unit is requested. At
    most two units are therefore gathered at a time.
    """
    if has_adapter(policy.model):
        yield from adapted_weights(policy.model)
        return
    if policy.num_shards == 1:
        yield from ((name, distributed.full_tensor(parameter)) for name, parameter in policy.model.named_parameters())
        return
    units = {name: module for name, module in policy.named_modules() if isinstance(module, FSDPModule)}
    names: dict[str, list[str]] = {unit: [] for unit in units}
    for name, _ in policy.named_parameters():
        names[max((unit for unit in units if name.startswith(f"{unit}." if unit else "")), key=len)].append(name)
    order = sorted(units)
    gathering = units[order[0]].unshard(async_op=True)
    for unit, following in itertools.zip_longest(order, order[1:]):
        if gathering:
            gathering.wait()
        gathering = units[following].unshard(async_op=True) if following else None
        parameters = dict(units[unit].named_parameters(prefix=unit))
        for name in names[unit]:
            yield name.removeprefix("model."), parameters[name]  # `Policy` holds the model as `.model`
        units[unit].reshard()
