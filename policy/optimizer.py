"""The optimizers: AdamW, its learning-rate schedule, and a variant that keeps its moments in host memory."""

import functools
import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from common.distributed import local_tensor
from config import PolicyFlags
from policy.model import Policy, vision_parameters

# The schedule also counts skipped updates, and PyTorch warns if the first update is skipped.
warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
Optimizers = list[tuple[Optimizer, LambdaLR]]  # each with its learning-rate schedule
MOMENTS = ("exp_avg", "exp_avg_sq")
PINNED_CHUNK_BYTES = 2**32  # host memory is allocated in chunks of this size


class ShardAdamW(torch.optim.AdamW):
    """AdamW that updates each process's shards as plain tensors. The update is elementwise, so the result is the same.

    With DTensors, torch 2.11 would lose memory in every step: six objects for each parameter that nothing frees. The
    garbage collector would search them all whenever vLLM goes to sleep (docs/log.md).
    """

    def _init_group(self, group: dict[str, Any], *tensor_lists: list[Tensor]) -> bool:
        """Fill the lists of what to update, as PyTorch does, with plain tensors."""
        has_complex = super()._init_group(group, *tensor_lists)
        for tensors in tensor_lists:
            tensors[:] = map(local_tensor, tensors)
        return has_complex


class HostAdamW(ShardAdamW):
    """AdamW whose moments are kept in host memory, where `init_adam_state` allocates them.

    Each update copies the moments to the GPU and back, one parameter at a time.
    """

    param_groups: list[dict[str, Any]]

    def step(self, closure: None = None) -> None:
        groups = self.param_groups
        try:
            for group in groups:
                for parameter in group["params"]:
                    self.param_groups = [group | {"params": [parameter]}]
                    moments = [local_tensor(self.state[parameter][name]) for name in MOMENTS]
                    host_buffers = [moment.data for moment in moments]
                    for moment in moments:
                        moment.data = moment.to(parameter.device)
                    super().step()
                    for moment, host_buffer in zip(moments, host_buffers):
                        moment.data = host_buffer.copy_(moment)
        finally:
            self.param_groups = groups


def pinned_slots(sizes: list[int], pinned: bool) -> Iterator[Tensor]:
    """For each of `sizes`, yield a float32 tensor of that many zeros in host memory, page-locked if `pinned`.

    The tensors are cut from chunks of `PINNED_CHUNK_BYTES`. PyTorch rounds each page-locked allocation up to a power of
    two. With separate allocations, the matrices of a 7B model would take 1.9 times the memory that they need.
    """
    remaining, chunk = sum(sizes), torch.empty(0)
    for size in sizes:
        if len(chunk) < size:
            length = max(size, min(remaining, PINNED_CHUNK_BYTES // 4))
            chunk = torch.zeros(1 << (length - 1).bit_length(), pin_memory=pinned)
        yield chunk[:size]
        chunk, remaining = chunk[size:], remaining - size


def make_adamw(
    policy: Policy, flags: PolicyFlags, updates: int, parameters: list[nn.Parameter] | None = None
) -> Optimizers:
    """Return AdamW over `parameters`, by default all trained ones, for a run of `updates` updates.

    Weight decay applies to matrices, not to norms and biases. The last two groups are the vision tower's, and empty if
    it is frozen. A resumed run has the same groups, even if its rates differ.
    """
    tower = set(vision_parameters(policy.model))
    rates = flags.learning_rate, flags.learning_rate if flags.vision_rate is None else flags.vision_rate
    groups: list[Any] = [{"params": [], "lr": r, "weight_decay": d} for r in rates for d in (flags.weight_decay, 0.0)]
    for p in parameters or [parameter for parameter in policy.parameters() if parameter.requires_grad]:
        groups[2 * (p in tower) + (p.ndim <= 1)]["params"].append(p)
    optimizer_class = HostAdamW if "optimizer" in flags.offload else ShardAdamW
    optimizer = optimizer_class(groups, fused=next(policy.parameters()).is_cuda)
    init_adam_state(optimizer)
    return [(optimizer, make_schedule(optimizer, flags, updates))]


def make_schedule(optimizer: Optimizer, flags: PolicyFlags, updates: int) -> LambdaLR:
    """Return the learning-rate schedule of `optimizer` for a run of `updates` updates.

    The warm-up starts above zero, so that no update is wasted. If `flags.warmup` is below 1, it is a fraction of
    `updates`.
    """
    factor = functools.partial(lr_factor, updates=updates, warmup=flags.warmup, schedule=flags.lr_schedule)
    return LambdaLR(optimizer, factor)


OPTIMIZERS = {"default": make_adamw}
"""Replace the entry to train with other optimizers. Each has a LambdaLR, and each trained parameter is in one of them.

Memory is planned for AdamW's two moments of each trained weight.

A checkpoint holds the `state` of the parameters, and what an optimizer changes in its groups. State with the shape of a
parameter must be sharded like it: use `torch.zeros_like(parameter)`. Other state must be equal on all processes.
"""


def init_adam_state(optimizer: torch.optim.AdamW) -> None:
    """Create AdamW's state for all parameters, so that a checkpoint can be saved or loaded before the first step.

    PyTorch's own code would create the state with a dummy step, which would increment `step`.
    """
    parameters = [(parameter, group["fused"]) for group in optimizer.param_groups for parameter in group["params"]]
    slots = moment_slots([parameter for parameter, _ in parameters]) if isinstance(optimizer, HostAdamW) else None
    for parameter, fused in parameters:
        step = torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu")
        optimizer.state[parameter] = {"step": step} | {name: torch.zeros_like(parameter) for name in MOMENTS}
        for name in MOMENTS if slots else ():  # moved now, so that the GPU never holds all of them
            moment = local_tensor(optimizer.state[parameter][name])
            moment.data = next(slots).view(moment.shape)


def moment_slots(parameters: list[nn.Parameter]) -> Iterator[Tensor]:
    """Yield a tensor in host memory for each moment of each of `parameters`."""
    sizes = [local_tensor(parameter).numel() for parameter in parameters for _ in MOMENTS]
    return pinned_slots(sizes, pinned=parameters[0].is_cuda)


def lr_factor(update: int, updates: int, warmup: float, schedule: str) -> float:
    """Return the learning rate of update number `update` (0, 1, …) as a fraction of the peak learning rate.

    The rate rises linearly during the warm-up. It then stays constant, or falls linearly or along a cosine; it would be
    zero one update after the last.
    """
    warmup_updates = warmup * updates if warmup < 1 else warmup
    if update < warmup_updates:
        return (update + 1) / (warmup_updates + 1)
    progress = min((update - warmup_updates) / max(updates - warmup_updates, 1), 1.0)
    return {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[schedule]
