"""vLLM's worker, with one block of GPU memory for all weights and another one for the KV cache.

vLLM gives its memory back before the trainer works, and takes it again afterwards, block by block. One large block
takes less time than many: 0.01 s instead of the 0.1 s of 183 blocks for the 3B model's weights on one H200
(docs/log.md). The processes of a host wait for each other at this.
"""

import contextlib
from collections.abc import Iterator

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu_worker import Worker

SLACK = 1.01  # for the padding between tensors, and for vLLM's tables of rotary embeddings


def weight_options(weight_bytes: int) -> dict[str, str]:
    """Return vLLM's options for weights of this size, which the trainer will send. 0: vLLM reads the saved weights."""
    OneBlockWorker.weight_bytes = weight_bytes
    return {"load_format": "dummy", "worker_cls": f"{__name__}.OneBlockWorker"} if weight_bytes else {}


class OneBlockWorker(Worker):
    """A worker whose memory pools begin with one block, from which PyTorch's allocator cuts the tensors.

    Tensors that do not fit get blocks of their own. vLLM makes the worker by its name, in this process.
    """

    weight_bytes, block_bytes = 0, 0

    def load_model(self, **options: bool) -> None:
        self.block_bytes = int(SLACK * self.weight_bytes)
        super().load_model(**options)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        tensors = kv_cache_config.kv_cache_tensors
        is_packed = any(tensor.block_stride for tensor in tensors)  # then vLLM allocates a single tensor
        self.block_bytes = 0 if is_packed else sum(tensor.size for tensor in tensors)
        super().initialize_from_config(kv_cache_config)

    @contextlib.contextmanager
    def _maybe_get_memory_pool_context(self, tag: str) -> Iterator[None]:
        with super()._maybe_get_memory_pool_context(tag):
            torch.empty(self.block_bytes, dtype=torch.uint8, device=self.device)  # the allocator keeps the block
            yield

    def _scoped_allocator_max_split(self, max_split_size_mb: int) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()  # vLLM's limit would keep the allocator from cutting the block up
