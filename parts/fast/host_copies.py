"""Copies of a checkpoint's tensors in host memory, so that training continues before they are on the disk."""

import io
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from common import distributed

EARLY_COPIES = 14e9  # bytes of host memory for tensors that wait to be written, over all processes of a machine
PINNED_BYTES = 2**25  # size of the buffer that tensors pass through from the GPU


class HostCopyPlanner(DefaultSavePlanner):
    """Tells `dcp.save` what to write, and copies each tensor to host memory before it is written.

    The tensors that are written last are copied ahead, as many as fit into `EARLY_COPIES`. Training therefore waits for
    the disk only as long as the others take. Calls `on_read` once all tensors have been copied.
    """

    def __init__(self, pool: ThreadPoolExecutor, on_read: Callable[[], object]):
        super().__init__()
        self.pool, self.on_read, self.lock = pool, on_read, threading.Lock()
        self.unread = 0  # number of tensors not copied yet
        self.copied_ahead: dict[MetadataIndex, Future[Tensor]] = {}

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        self.unread, free = len(tensors), EARLY_COPIES / distributed.local_world_size()
        for item in reversed(tensors):
            free -= math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
            if free < 0:
                break
            self.copied_ahead[item.index] = self.pool.submit(self._copy, item)
        return plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        copied = self.copied_ahead.pop(write_item.index, None)
        return copied.result() if copied else self._copy(write_item)

    def _copy(self, write_item: WriteItem) -> Tensor:
        copy = copy_to_host(super().resolve_data(write_item))
        with self.lock:
            self.unread -= 1
            if not self.unread:
                self.on_read()
        return copy


def copy_to_host(tensor: Tensor) -> Tensor:
    """Return a copy of `tensor` in host memory, made while the GPU continues to train.

    Each piece goes through a pinned buffer, because a copy to pageable memory would occupy the driver.
    """
    if not tensor.is_cuda:
        return tensor.detach().clone()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    source, target = (x.detach().reshape(-1).view(torch.uint8) for x in (tensor, copy))
    pinned = torch.empty(min(PINNED_BYTES, len(source)), dtype=torch.uint8, pin_memory=True)
    stream = torch.cuda.Stream(tensor.device)
    with torch.cuda.stream(stream):
        for piece, target_piece in zip(source.split(PINNED_BYTES), target.split(PINNED_BYTES)):
            pinned[: len(piece)].copy_(piece, non_blocking=True)
            stream.synchronize()
            target_piece.copy_(pinned[: len(piece)])
    return copy
