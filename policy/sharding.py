"""TODO policy/sharding.py"""

import contextlib
import itertools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from common import console, distributed
from config import PolicyFlags
from policy.forward import enable_packed_forward, language_model
from policy.lora import adapted_weights, adapter_parameters, has_adapter
from policy.model import Policy, compute_dtype, load_model, vision_parameters


def load_reference(
    name: str, flags: PolicyFlags, device: torch.device, policy: Policy, sharding: str = "full"
) -> Policy:
    """The fixed reference of the KL term: `policy` itself when it has an adapter, which `lora.reference_weights`
    switches; else the model at `name` in the compute type, sharded, with the vision tower of `policy` when that is not
    trained."""
    if has_adapter(policy.model):
        return policy
    dtype = compute_dtype(flags.dtype, device)
    model = load_model(name, dtype, to_shard=True)
    if vision_parameters(model) and not flags.train_vision:
        model.model.visual = policy.model.model.visual
    enable_packed_forward(model, compiled=flags.compile and device.type == "cuda")
    reference = Policy(model.eval().requires_grad_(False))
    return apply_fsdp(reference, device, dtype, sharding, offload=flags.offload_reference)


def apply_fsdp(
    policy: Policy, device: torch.device, dtype: torch.dtype, sharding: str = "full", offload: bool = False
) -> Policy:
    """Spread `policy` over the processes as `PolicyFlags.sharding` says: every decoder layer a unit, the rest
    (embedding, lm_head) with the root.

    Master weights stay float32, compute runs in `dtype`, gradients are averaged in float32. A frozen vision
    tower stays whole on every process, so a batch of text alone touches no collective of it; so does a 4-bit model.
    `offload`: shards lie in host memory until a layer is run. Where processes but the main one have empty weights
    (`load_model`), they get their shares of its.
    """
    # No name may keep a parameter: FSDP moves each to the device before it takes its share, and would leave it there.
    empty = any(tensor.is_meta for tensor in itertools.chain(policy.parameters(), policy.buffers()))
    empty = bool(distributed.all_max(torch.tensor(int(empty))))
    whole = {name: tensor.detach() for name, tensor in [*policy.named_parameters(), *policy.named_buffers()] if empty}
    # inputs are left as they come: the residual stream stays float32
    precision = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    host = CPUOffloadPolicy() if offload and device.type == "cuda" else OffloadPolicy()
    options = {"mesh": distributed.make_mesh(device, sharding), "mp_policy": precision, "offload_policy": host}
    vision = vision_parameters(policy.model)
    quantised = any(hasattr(parameter, "quant_state") for parameter in policy.parameters())
    frozen = {p for p in (policy.parameters() if quantised else vision) if not p.requires_grad}
    # An adapter's part in a frozen tower is exported as it came; the reference's copy is cast, as the trained one is
    # for its forward, or the KL term would not start at zero.
    exported = set(adapter_parameters(policy.model).values())
    for parameter in frozen:
        keep = parameter in exported or not parameter.is_floating_point()
        kept_dtype = parameter.dtype if keep else dtype
        parameter.data = parameter.data.to("meta" if parameter.is_meta else device, kept_dtype)
    for buffer in policy.buffers():
        buffer.data = buffer.data if buffer.is_meta else buffer.data.to(device)
    vision_trained = bool(vision) and not frozen.intersection(vision)
    del vision, exported  # see above
    if vision_trained:
        for block in policy.model.model.visual.blocks:
            fully_shard(block, **options)
    layers = language_model(policy.model).layers
    for layer in layers:
        fully_shard(layer, **options, ignored_params=frozen)
    fully_shard(policy, ignored_params=frozen, **options)
    if empty:
        _broadcast_and_shard(policy, whole, device, torch.device("cpu") if offload else device)
    # the next layer is gathered beside this one's compute; in the backward pass that is so unasked
    for layer, following in itertools.pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])
    return policy


@torch.no_grad()
def _broadcast_and_shard(policy: Policy, whole: dict[str, Tensor], device: torch.device, shards: torch.device) -> None:
    """Fill the sharded `policy`, one tensor after another, with the main process's `whole` parameters and buffers;
    empty shards come to lie on `shards`."""

    def there(tensor: Tensor) -> Tensor:
        where = shards if isinstance(tensor, DTensor) else device
        return torch.empty_like(tensor, device=where) if tensor.is_meta else tensor

    policy._apply(there)
    for name, own in [*policy.named_parameters(), *policy.named_buffers()]:
        tensor = torch.empty(own.shape, dtype=own.dtype, device=device)
        if console.is_main():
            tensor.copy_(whole.pop(name))
        dist.broadcast(tensor, 0)
        if isinstance(own, DTensor):
            tensor = distribute_tensor(tensor, own.device_mesh, own.placements, src_data_rank=None).to_local()
            own.to_local().copy_(tensor)
        else:
            own.copy_(tensor)


@contextlib.contextmanager
def unsharded(policy: Policy) -> Iterator[None]:
    """Where `keep_unsharded` is set, layers stay gathered after their first use in here. Afterwards each process has its
    share alone again, also when the work breaks off between micro-batches (`memory.recover` ends a broken pass), and of
    the embedding and the lm_head too, which FSDP would leave whole after a forward pass without gradients."""
    if policy.keep_unsharded:
        policy.set_reshard_after_forward(False)
        policy.set_reshard_after_backward(False)
    try:
        yield
    finally:
        reshard(policy)


def reshard(policy: Policy) -> None:
    """Leave each process its share of the weights alone."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def full_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """(in-memory name, whole tensor) of every parameter of the model, its adapter worked in; every process must go
    through all of it together."""
    return adapted_weights(policy.model)


@torch.no_grad()
def sampler_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """As `full_weights`, in the type that is computed in: a layer's shards are gathered at once, and let go again when
    those of the layer after it are asked for, so that no process holds more than two layers, or the embedding and the
    lm_head. A weight is to be copied before the next one is taken."""
    if has_adapter(policy.model) or not isinstance(policy, FSDPModule):
        yield from adapted_weights(policy.model)
        return
    units = {name: module for name, module in policy.named_modules() if isinstance(module, FSDPModule)}
    names: dict[str, list[str]] = {unit: [] for unit in units}
    for name, _ in policy.named_parameters():
        names[max((unit for unit in units if name.startswith(f"{unit}." if unit else "")), key=len)].append(name)
    order = sorted(units)
    unsharded = units[order[0]].unshard(async_op=True)
    for unit, following in itertools.zip_longest(order, order[1:]):
        if unsharded:
            unsharded.wait()
        unsharded = units[following].unshard(async_op=True) if following else None
        own = dict(units[unit].named_parameters(prefix=unit))
        yield from ((name.removeprefix("model."), own[name]) for name in names[unit])
        units[unit].reshard()
