"""TODO policy/optimizer.py"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from config import PolicyFlags
from policy.model import Policy

MOMENTS = ("exp_avg", "exp_avg_sq")
PINNED_CHUNK_BYTES = 2**32  # bytes of host memory asked for at a time


class HostAdamW(torch.optim.AdamW):
    """AdamW whose moments lie in host memory (`init_adam_state`) and come to the GPU, one parameter's at a time, for the
    update alone."""

    def step(self, closure: None = None) -> None:
        groups = self.param_groups
        try:
            for group in groups:
                for parameter in group["params"]:
                    self.param_groups = [group | {"params": [parameter]}]
                    moments = [_local_part(self.state[parameter][name]) for name in MOMENTS]
                    places = [moment.data for moment in moments]
                    for moment in moments:
                        moment.data = moment.to(parameter.device)
                    super().step()
                    for moment, place in zip(moments, places):
                        moment.data = place.copy_(moment)
        finally:
            self.param_groups = groups

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """In place: PyTorch's brings all moments to the GPU at once."""
        own, parameters = self.state, [p for group in self.param_groups for p in group["params"]]
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        super().load_state_dict(state_dict | {"state": {}})
        for name, parameter in zip(names, parameters, strict=True):
            for key, value in state_dict["state"][name].items():
                own[parameter][key].copy_(value)
        self.state = own


def _local_part(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def pinned_slots(sizes: list[int], pinned: bool) -> Iterator[Tensor]:
    """(size,) float32 zeros in host memory for each of `sizes`, cut from pieces of `PINNED_CHUNK_BYTES` bytes: alone, PyTorch would
    round the page-locked memory of each up to a power of two, 1.9 times what the matrices of a 7B need."""
    coming, left = sum(sizes), torch.empty(0)
    for size in sizes:
        if len(left) < size:
            piece = max(size, min(coming, PINNED_CHUNK_BYTES // 4))
            left = torch.zeros(1 << (piece - 1).bit_length(), pin_memory=pinned)
        yield left[:size]
        left, coming = left[size:], coming - size


def make_optimizer(
    policy: Policy, flags: PolicyFlags, updates: int
) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    """AdamW over what is trained (matrices decay, norms and biases do not) and its learning-rate schedule.

    The warm-up is in updates, below 1 a share of all `updates`; no update is spent at rate zero.
    """
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    decayed = {"params": [p for p in trained if p.ndim > 1], "weight_decay": flags.weight_decay}
    others = {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0}
    kind = HostAdamW if flags.offload_optimizer else torch.optim.AdamW
    optimizer = kind([decayed, others], lr=flags.learning_rate, fused=trained[0].device.type == "cuda")
    init_adam_state(optimizer)
    shape = functools.partial(lr_factor, updates=updates, warmup=flags.warmup, schedule=flags.lr_schedule)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, shape)


def init_adam_state(optimizer: torch.optim.AdamW) -> None:
    """The state that AdamW would make for a parameter at its first gradient, for all of them now: a checkpoint has it
    whenever it is written, and whoever loads one has where to put it. PyTorch itself would take an empty step for it,
    which counts."""
    parameters = [(parameter, group["fused"]) for group in optimizer.param_groups for parameter in group["params"]]
    sizes = [_local_part(parameter).numel() for parameter, _ in parameters for _ in MOMENTS]
    places = pinned_slots(sizes, pinned=parameters[0][0].is_cuda)
    for parameter, fused in parameters:
        step = torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu")
        optimizer.state[parameter] = {"step": step} | {name: torch.zeros_like(parameter) for name in MOMENTS}
        for name in MOMENTS if isinstance(optimizer, HostAdamW) else ():
            own = _local_part(optimizer.state[parameter][name])
            own.data = next(places).view(own.shape)


def lr_factor(update: int, updates: int, warmup: float, schedule: str) -> float:
    """The learning rate of update 0, 1, … as a share of its peak: a linear rise, then constant, linear or cosine."""
    rise = warmup * updates if warmup < 1 else warmup
    if update < rise:
        return (update + 1) / (rise + 1)
    done = min((update - rise) / max(updates - rise, 1), 1.0)
    return {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[schedule]
