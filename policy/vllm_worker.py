"""vLLM's worker, with one block of GPU memory for the weights and another one for the KV cache.

vLLM gives its memory back before the trainer works, and takes it again afterwards, block by block. One large block
takes less time than many: 0.01 s instead of the 0.1 s of 183 blocks for the 3B model's weights on one H200
(docs/log.md). Processes on one host wait for each other here.
"""

import contextlib
from collections.abc import Iterator

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu_worker import Worker

WEIGHT_SLACK = 1.01  # for what vLLM holds beside the weights, such as tables of rotary embeddings
KV_SLACK = 64 * 2**20  # for the block tables, which vLLM allocates before the KV cache
NO_LIMIT = (2**64 - 1) // 2**20  # PyTorch's default of `max_split_size_mb`


def prepare_worker(weight_bytes: int) -> dict[str, str]:
    """Prepare `OneBlockWorker` for weights of this size that the trainer will send, and return vLLM's options for it.

    0: vLLM reads the saved weights, with its own worker.
    """
    OneBlockWorker.weight_bytes = weight_bytes  # vLLM makes the worker from its name, so this cannot be an argument
    return {"load_format": "dummy", "worker_cls": f"{__name__}.OneBlockWorker"} if weight_bytes else {}


class OneBlockWorker(Worker):
    """A worker whose memory pools begin with one block, from which PyTorch's allocator cuts the tensors.

    Tensors of up to 1 MiB lie in blocks of 2 MiB beside it, and those that no longer fit have blocks of their own.
    """

    weight_bytes = 0
    block_bytes = 0  # size of the first block of the pool that is made next

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        self.block_bytes = int(WEIGHT_SLACK * self.weight_bytes)
        super().load_model(load_dummy_weights=load_dummy_weights)

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
