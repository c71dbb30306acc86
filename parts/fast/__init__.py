"""Speed on GPUs: FlashAttention 4, equal work for all processes, vLLM's short paths, and checkpoints written beside
training. It changes no number on a CPU.

Imports the core. Start reading at `balance.py`, which moves completions between processes. `flash_attention.py` is an
operator for Hopper GPUs, which `packing.attend` chooses; `fast_decode.py` is a scheduler for vLLM, `vllm_worker.py` its
memory in one block, `vllm_logprobs.py` its log-probabilities; `host_copies.py` copies what is written, and `mfu.py`
counts operations.
"""

import logging
from typing import Any

from parts.fast import flash_attention
from parts.fast.balance import rebalance
from parts.fast.host_copies import HostCopyPlanner
from parts.fast.mfu import Mfu

__all__ = ["HostCopyPlanner", "Mfu", "flash_head_dim", "rebalance", "vllm_options"]


def flash_head_dim() -> int:
    """Return the size of the heads for which FlashAttention 4 is used; 0 if it is not installed, or the GPU is old."""
    return flash_attention.HEAD_DIM if flash_attention.is_available() else 0


def vllm_options(weight_bytes: int, has_limit: bool) -> dict[str, Any]:
    """Prepare vLLM, once it is imported, and return its options: a scheduler and a worker of our own.

    `weight_bytes`, `has_limit`: see `prepare_worker`.
    """
    logging.getLogger("vllm.config.scheduler").setLevel(logging.ERROR)  # it warns of a scheduler of our own
    from vllm.config import vllm as defaults

    from parts.fast.fast_decode import DecodeScheduler
    from parts.fast.vllm_logprobs import use_fast_logprobs
    from parts.fast.vllm_worker import prepare_worker

    if hasattr(defaults, "DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES"):  # later releases have only the faster model runner
        defaults.DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES |= {"Qwen3VLMoeForConditionalGeneration"}
    use_fast_logprobs()
    return {"scheduler_cls": DecodeScheduler} | prepare_worker(weight_bytes, has_limit)
