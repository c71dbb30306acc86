"""The process group and its collectives. A single process is a world of size 1, so no caller needs a special case."""

import contextlib
import datetime
import heapq
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from common.errors import UserError

T = TypeVar("T")
OOM_HINT = "Try --load_in_4bit with --lora_rank, --offload optimizer, a smaller --vllm_memory, or more GPUs"
TIMEOUT = datetime.timedelta(minutes=30)  # how long a process waits for the others before the run ends with an error


def explain(error: RuntimeError) -> tuple[str, int] | None:
    """Return a message and an exit status for a lack of GPU memory or the loss of another process, else None."""
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of GPU memory: {str(error).split('. ')[0]}. {OOM_HINT}", 1
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename  # a user's function may use these words, too
    is_of_library = "-packages" in raised_in and ("gloo" in str(error) or "NCCL" in str(error))
    if not (isinstance(error, dist.DistError) or is_of_library):
        return None
    time.sleep(1)  # torchrun names the process that ended first: let this be the one that died
    return f"another process died or hangs ({str(error).strip().splitlines()[0][:120]})", 1


def start() -> torch.device:
    """Join torchrun's process group, or create one of size 1. Return this process's device.

    A collective fails if it takes longer than `TIMEOUT`.
    """
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        local_rank, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if local_rank >= gpus:
            raise UserError(f"process {local_rank} of this machine has no GPU of its own: start at most {gpus} here")
        torch.cuda.set_device(local_rank)
    if not dist.is_initialized():
        store, global_rank, size = dist.HashStore(), 0, 1
        if "RANK" in os.environ:
            store, global_rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # torchrun's store outlives a restart. Without a prefix, the new processes would read the addresses of the
            # dead processes and wait for them.
            store = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=store, timeout=TIMEOUT, rank=global_rank, world_size=size)
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def use_one_thread(device: torch.device) -> None:
    """With a GPU, let PyTorch use one thread for its work on the CPU, as under torchrun, unless OMP_NUM_THREADS is set.

    Call it after models are loaded, because loading uses all cores. With a thread for each core, packing a
    micro-batch took 67 ms on a busy host, and threads that prepare pictures kept 25 cores busy waiting (docs/log.md).
    """
    if device.type == "cuda" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def shutdown() -> None:
    """Leave the process group, whose gloo threads may otherwise abort the process while the interpreter shuts down."""
    if dist.is_initialized() and not torch.cuda.is_available():  # vLLM's CUDA graphs may hold NCCL communicators
        dist.destroy_process_group()


def memory_fraction(gib: float) -> float:
    """Return `gib` GiB as a fraction of this GPU's memory, at most 1; 0 GiB means all of the memory."""
    if not gib:
        return 1.0
    return min(1.0, gib * 2**30 / torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def rank() -> int:
    """Return the rank of this process; 0 outside a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes; 1 outside a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def local_world_size() -> int:
    """Return the number of processes on this machine; without torchrun, the world size."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


def num_shards(sharding: str) -> int:
    """Return how many processes share one copy of the weights: one ("none"), a machine's ("hybrid") or all ("full")."""
    return {"none": 1, "hybrid": local_world_size(), "full": world_size()}[sharding]


def make_mesh(device: torch.device, sharding: str) -> DeviceMesh:
    """Return the device mesh of shape (copies, shards), or (shards,) when there is only one copy of the weights."""
    size = num_shards(sharding)
    if size == world_size():
        return init_device_mesh(device.type, (size,))
    return init_device_mesh(device.type, (world_size() // size, size), mesh_dim_names=("copies", "shards"))


def _all_reduce(value: Tensor, operation: Any) -> Tensor:
    value = value.clone()
    if world_size() > 1:
        dist.all_reduce(value, operation)
    return value


def all_sum(value: Tensor) -> Tensor:
    """Return the sum of `value` over all processes; `value` itself is not changed."""
    return _all_reduce(value, dist.ReduceOp.SUM)


def all_max(value: Tensor) -> Tensor:
    """Return the elementwise maximum of `value` over all processes; `value` itself is not changed."""
    return _all_reduce(value, dist.ReduceOp.MAX)


def reduce_stats(stats: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Sum each entry over all micro-batches and processes; if its name ends in `_max`, take the maximum instead.

    The result is on the CPU.
    """
    names = list(stats[0])
    stacked = torch.stack([torch.stack([entry[name].detach().float() for name in names]) for entry in stats])
    sums, maxima = all_sum(stacked.sum(0)).cpu(), all_max(stacked.amax(0)).cpu()
    return {name: (maxima if name.endswith("_max") else sums)[i] for i, name in enumerate(names)}


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this process's shard of `tensor`, not a copy of it. If `tensor` is not sharded, return it as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Return `tensor` in full, gathered if it is sharded. This is a collective: every process must call it."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.full_tensor() if tensor.device_mesh.size() > 1 else tensor.to_local()


def shard(items: list[T]) -> list[T]:
    """Return this process's items of a list that all processes hold: every `world_size`-th item, starting at `rank`."""
    return items[rank() :: world_size()]


def all_gather(value: T) -> list[T]:
    """Return the values of all processes, in the order of their ranks."""
    values: list[T] = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value)
    return values


def first_error(value: T | None) -> T | None:
    """Return the first error in the order of the ranks, on every process. Each process passes its own error or None."""
    return next((error for error in all_gather(value) if error is not None), None)


def raise_first_error(error: str | None, exception: type[Exception]) -> None:
    """Raise `exception` on every process with the first error message of any process, if there is one."""
    if first := first_error(error):
        raise exception(first)


@contextlib.contextmanager
def shared_errors(exception: type[Exception] = UserError) -> Iterator[None]:
    """Raise a UserError of one process on every process, as `exception`. All processes must enter it together."""
    message = None
    try:
        yield
    except UserError as error:
        message = str(error)
    raise_first_error(message, exception)


def gather_shards(local_items: list[T]) -> list[T]:
    """Return the items of all processes in their original order: the inverse of `shard`."""
    shards = all_gather(local_items)
    longest = max(map(len, shards))
    return [items[i] for i in range(longest) for items in shards if i < len(items)]


def barrier() -> None:
    """Wait until all processes have reached this call."""
    if world_size() > 1:
        dist.barrier()


def partition_lpt(costs: Sequence[float], num_bins: int) -> list[list[int]]:
    """Partition the indices of `costs` into `num_bins` sorted lists with nearly equal total costs.

    The largest remaining cost goes to the bin with the smallest load (Graham 1969, "Bounds on multiprocessing timing
    anomalies").
    """
    heap = [(0.0, i) for i in range(num_bins)]
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, smallest = heapq.heappop(heap)
        bins[smallest].append(i)
        heapq.heappush(heap, (load + costs[i], smallest))
    return [sorted(indices) for indices in bins]
