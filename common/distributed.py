"""Processes: one of them is a world of size 1, so nothing else asks whether the run is distributed."""

import contextlib
import datetime
import functools
import heapq
import os
import pathlib
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from common import cli
from common.errors import RunStopped

T = TypeVar("T")
OOM_HINT = "What helps: --load_in_4bit with --lora_rank, --offload_optimizer, a smaller --vllm_memory, more GPUs"
_processes: list[tuple[str, int, int]] = []  # of each rank: its torchrun, its number, how often it was started again
_heartbeats: list[dist.Store] = []  # where processes leave what they are doing, when torchrun keeps a store for them


def run(main: Callable[[Any], None], config: type) -> None:
    """`cli.run` for a script that joins the process group with `start`: also turns what a lost process or a full GPU
    raises into one line."""
    cli.run(functools.partial(_explain_failures, main), config)


def _explain_failures(main: Callable[[Any], None], args: Any) -> None:
    try:
        main(args)
        shutdown()
    except torch.OutOfMemoryError as error:
        raise RunStopped(f"out of GPU memory: {str(error).split('. ')[0]}. {OOM_HINT}", status=1) from None
    except (dist.DistError, RuntimeError) as error:
        if not (isinstance(error, dist.DistError) or "gloo" in str(error) or "NCCL" in str(error)):
            raise
        first = str(error).strip().splitlines()[0][-120:]
        seen = last_heartbeats()
        why = f"another process is gone or hangs ({first})" + (f"; last seen: {seen}" if seen else "")
        raise RunStopped(why, status=1) from None


def start(timeout: float = 30.0) -> torch.device:
    """Join the process group (of torchrun, or a world of one), in which nobody waits longer than `timeout` minutes, and
    return this process's device."""
    patience = datetime.timedelta(minutes=timeout)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        if "RANK" in os.environ:
            place = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
            ours = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # torchrun has made none
            server = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            store = dist.TCPStore(*server, is_master=ours and place["rank"] == 0, timeout=patience)
            if not ours:  # torchrun's outlives a restart: without a prefix the new processes would find the addresses
                # of the lost ones there and wait for them
                store = dist.PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
            _heartbeats.append(dist.PrefixStore("notes", store))
            dist.init_process_group(backend, store=store, timeout=patience, **place)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        _processes[:] = all_gather((_torchrun(), os.getpid(), again))
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def shutdown() -> None:
    """End a process's part in the group, when all is done: without it gloo's threads were once found running while the
    interpreter was taken down, and the process aborted."""
    if dist.is_initialized() and not torch.cuda.is_available():  # NCCL may be part of vLLM's captured graphs
        dist.destroy_process_group()


def _torchrun() -> str:
    """The torchrun that started this process, told apart from any other on any machine; empty without one."""
    if "GROUP_RANK" not in os.environ:
        return ""
    began = ""
    with contextlib.suppress(OSError):  # another system than Linux
        began = pathlib.Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{socket.gethostname()} {os.getppid()} {began}"


def peer_died() -> bool:
    """Whether a process that the same torchrun started is no more."""
    for torchrun, pid, _ in _processes:
        try:
            if torchrun and torchrun == _processes[rank()][0]:
                os.kill(pid, 0)
        except OSError:
            return True
    return False


def memory_fraction(gib: float) -> float:
    """The share of this process's GPU that `gib` GiB are, at most 1; 0 GiB mean all of it."""
    if not gib:
        return 1.0
    return min(1.0, gib * 2**30 / torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def launcher_ids() -> list[str]:
    """The torchruns of this run, which outlive a restart; one of them at least, when a machine was lost."""
    return sorted({torchrun for torchrun, _, _ in _processes if torchrun})


def heartbeat(what: str) -> None:
    """Leave word of what this process does now, for the others to tell if it is lost."""
    for store in _heartbeats:
        store.set(str(rank()), f"{time.time()} {what}")


def last_heartbeats() -> str:
    """What the other processes were doing when they last left word, the longest silent first, for the message about a
    lost one; empty when the store is lost too."""
    seen = []
    with contextlib.suppress(dist.DistError, RuntimeError):  # torchrun, which keeps the store, may be gone as well
        for store in _heartbeats:
            for other in range(world_size()):
                if other != rank() and store.check([str(other)]):
                    when, _, what = store.get(str(other)).decode().partition(" ")
                    seen.append((time.time() - float(when), other, what))
    return ", ".join(
        f"rank {other} in «{what}» {age:.0f} s ago" for age, other, what in sorted(seen, reverse=True)[:16]
    )


def restarted() -> bool:
    """Whether torchrun has started this command again after a process was lost, on whichever machine: one that came in
    place of a lost one counts from the beginning."""
    return any(again for _, _, again in _processes)


def rank() -> int:
    """This process's number, 0 outside a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """How many processes there are, 1 outside a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def local_world_size() -> int:
    """How many of the processes are on this machine, as torchrun says; all of them without it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


def num_shards(sharding: str) -> int:
    """Over how many processes one copy of the weights is spread: 1 («none»), a machine's («hybrid») or all («full»)."""
    return {"none": 1, "hybrid": local_world_size(), "full": world_size()}[sharding]


def make_mesh(device: torch.device, sharding: str) -> DeviceMesh:
    """The processes as copies x shards; in one row, without copies, when every process has a shard of its own."""
    size = num_shards(sharding)
    if size == world_size():
        return init_device_mesh(device.type, (size,))
    return init_device_mesh(device.type, (world_size() // size, size), mesh_dim_names=("copies", "shards"))


def all_sum(value: Tensor) -> Tensor:
    """The sum of `value` over all processes; `value` itself is left as it is."""
    value = value.clone()
    if world_size() > 1:
        dist.all_reduce(value)
    return value


def all_max(value: Tensor) -> Tensor:
    """The elementwise maximum of `value` over all processes."""
    value = value.clone()
    if world_size() > 1:
        dist.all_reduce(value, dist.ReduceOp.MAX)
    return value


def reduce_stats(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The sum of each entry over `parts` and over all processes, of names ending in «_max» the largest; on the CPU."""
    names = list(parts[0])
    stacked = torch.stack([torch.stack([part[name].detach().float() for name in names]) for part in parts])
    sums, largest = all_sum(stacked.sum(0)).cpu(), all_max(stacked.amax(0)).cpu()
    return {name: (largest if name.endswith("_max") else sums)[i] for i, name in enumerate(names)}


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded; every process calls it together."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.full_tensor() if tensor.device_mesh.size() > 1 else tensor.to_local()


def shard(items: list[T]) -> list[T]:
    """This process's items of a list that every process holds: every world_size-th one."""
    return items[rank() :: world_size()]


def all_gather(value: T) -> list[T]:
    """Every process's value, in the order of their ranks, on every process."""
    values: list[T] = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value)
    return values


def first_error(value: T | None) -> T | None:
    """The first process's value that is not None, on every process: what is wrong anywhere."""
    return next((said for said in all_gather(value) if said is not None), None)


def gather_shards(mine: list[T]) -> list[T]:
    """The inverse of `shard`: every process's items, in the order of the whole list, on every process."""
    shares = all_gather(mine)
    longest = max(map(len, shares))
    return [share[i] for i in range(longest) for share in shares if i < len(share)]


def barrier() -> None:
    """Return once every process has come here."""
    if world_size() > 1:
        dist.barrier()


def partition_lpt(costs: Sequence[float], parts: int) -> list[list[int]]:
    """The indices of `costs` in `parts` lists of nearly the same sums: the largest cost first, each to the part with
    least so far (Graham 1969, «Bounds on multiprocessing timing anomalies»)."""
    heap = [(0.0, part) for part in range(parts)]
    lists: list[list[int]] = [[] for _ in range(parts)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, part = heapq.heappop(heap)
        lists[part].append(i)
        heapq.heappush(heap, (load + costs[i], part))
    return [sorted(part) for part in lists]
