"""vLLM's worker, with one block of GPU memory for the weights and another one for the KV cache.

vLLM gives its memory back before the trainer works, and takes it again afterwards, block by block. One large block
takes less time than many: 0.01 s instead of the 0.1 s of 183 blocks for the 3B model's weights on one H200
(docs/log.md). Processes on one host wait for each other meanwhile.

vLLM expects a GPU of its own. Other programs on the same GPU may here take and give back memory at any time.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu_worker import Worker

WEIGHT_SLACK = 1.01  # for what vLLM holds beside the weights, such as tables of rotary embeddings
KV_SLACK = 64 * 2**20  # for the block tables, which vLLM allocates before the KV cache
GRAPH_BYTES = 2**30  # for the CUDA graphs, which vLLM captures after the KV cache is allocated
NO_LIMIT = (2**64 - 1) // 2**20  # PyTorch's default of `max_split_size_mb`


def prepare_worker(weight_bytes: int, has_limit: bool = False) -> dict[str, str]:
    """Prepare `OneBlockWorker` for weights of this size that the trainer will send, and return vLLM's options for it.

    If 0, vLLM reads the saved weights with its own worker. `has_limit`: whether the run may use only part of the GPU.
    """
    # vLLM makes the worker from its name, so these cannot be arguments
    OneBlockWorker.weight_bytes, OneBlockWorker.has_limit = weight_bytes, has_limit
    return {"load_format": "dummy", "worker_cls": f"{__name__}.OneBlockWorker"} if weight_bytes else {}


class OneBlockWorker(Worker):
    """A worker whose memory pools begin with one block, from which PyTorch's allocator cuts the tensors.

    Tensors of up to 1 MiB lie in blocks of 2 MiB beside it, and those that no longer fit have blocks of their own.
    """

    weight_bytes = 0
    has_limit = False
    block_bytes = 0  # size of the first block of the pool that is made next

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.buffers: list[tuple[Tensor, Tensor]] = []  # those of the model, and a copy in host memory

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        self.block_bytes = int(WEIGHT_SLACK * self.weight_bytes)
        super().load_model(load_dummy_weights=load_dummy_weights)

    def determine_available_memory(self) -> int:
        """Return the size of the KV cache: at most what `max_num_seqs` sequences of maximum length can fill.

        A larger one would be of no use, and vLLM resets all its blocks after each sync: 0.1 s a step for a small model.
        On a shared GPU, only PyTorch's own count tells what vLLM needs itself.
        """
        longest = sum(spec.max_memory_usage_bytes(self.vllm_config) for spec in self.get_kv_cache_spec().values())
        largest = longest * self.scheduler_config.max_num_seqs
        if not self.has_limit:
            return min(largest, super().determine_available_memory())
        self.model_runner.profile_run()
        return min(largest, self.requested_memory - torch.cuda.max_memory_allocated(self.device) - GRAPH_BYTES)

    def sleep(self, level: int = 1) -> None:
        """Give all memory back, and what it held is lost: the trainer will send new weights.

        vLLM's own method fails if another program has taken memory in the meantime. It also copies the buffers to host
        memory every time, but they are constants, such as the table of rotary embeddings.
        """
        if not self.buffers:
            for buffer in self.model_runner.model.buffers():
                self.buffers.append((buffer, buffer.to("cpu").pin_memory()))
        torch.cuda.synchronize(self.device)
        self._get_sleep_mode_backend().suspend(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        super().wake_up(tags)
        if tags is None or "weights" in tags:
            for buffer, copy in self.buffers:
                buffer.copy_(copy)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        tensors = kv_cache_config.kv_cache_tensors
        is_packed = any(tensor.block_stride for tensor in tensors)  # then vLLM allocates a single tensor
        self.block_bytes = 0 if is_packed else sum(tensor.size for tensor in tensors) + KV_SLACK
        super().initialize_from_config(kv_cache_config)

    @contextlib.contextmanager
    def _maybe_get_memory_pool_context(self, tag: str) -> Iterator[None]:
        with super()._maybe_get_memory_pool_context(tag), super()._scoped_allocator_max_split(NO_LIMIT):
            torch.empty(self.block_bytes, dtype=torch.uint8, device=self.device)  # freed at once, but kept in the pool
            yield

    def _scoped_allocator_max_split(self, max_split_size_mb: int) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()  # while it loads, vLLM would not let the allocator cut the block up
