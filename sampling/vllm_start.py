"""Starting vLLM inside the training process, so that it changes nothing there that the trainer needs."""

import contextlib
import importlib.util
import os
import traceback
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from common import distributed
from common.errors import UserError
from common.parts import extra
from common.records import RequestLimits
from config import EngineFlags
from data import Processor
from policy.forward import float32_logits
from policy.memory import describe_others, used_by_others
from policy.model import load_config


@contextlib.contextmanager
def undo_global_changes(config: transformers.PreTrainedConfig) -> Iterator[None]:
    """Undo what loading vLLM for a model with this `config` changes in the whole process.

    For torch.compile, vLLM allows a single compile thread and sets its own cache folder. With the environment variables
    restored, the trainer compiles as it would without vLLM, and a later run can reuse the trainer's compile cache.
    vLLM also replaces some of transformers' configuration classes by its own. That of Qwen3.5 lacks fields that the
    model needs when it is exported.
    """
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS")
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        transformers.AutoConfig.register(config.model_type, type(config), exist_ok=True)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def model_options(config: transformers.PreTrainedConfig, processor: Processor, limits: RequestLimits) -> dict[str, Any]:
    """Return the options of vLLM that depend on the model and on what is installed."""
    options: dict[str, Any] = {}
    if limits.tokens <= (getattr(config, "sliding_window", None) or 0):  # no sequence is longer than the window
        options["hf_overrides"] = {"sliding_window": None}  # else, vLLM manages a KV cache for each kind of layer
    if importlib.util.find_spec("flashinfer") is None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        options["additional_config"] = {"gdn_prefill_backend": "triton"}  # for Qwen3.5
    if processor.image_processor is not None:
        options["limit_mm_per_prompt"] = {"image": limits.images, "video": 0}
        options["enable_mm_embeds"] = True
        options["mm_processor_kwargs"] = processor.preparation.vllm_options
        if processor.environment:
            options["mm_processor_cache_gb"] = 0  # else, a picture seen before comes as its hash alone; see `joined`
    return options


def keep_logits_in_float32(model: torch.nn.Module) -> None:
    """Make vLLM's `model` return float32 logits, as the trainer does, instead of rounding them to the model's dtype."""
    head = model.lm_head if hasattr(model, "lm_head") else model.language_model.lm_head
    original_apply = head.quant_method.apply

    def apply(layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if bias is not None or x.dtype == torch.float32:
            return original_apply(layer, x, bias)
        return float32_logits(x, layer.weight)

    head.quant_method.apply = apply


def take_experts_of_trainer(model: torch.nn.Module) -> None:
    """Make vLLM's `model` take weights of all experts of a layer as the trainer has them, (experts, out, in).

    vLLM 0.25 finds their layout from the shape. Newer releases expect them transposed, as Qwen3-VL-MoE is published.
    """
    for module in model.modules():
        if hasattr(module, "is_fused_checkpoint_transposed"):
            module.is_fused_checkpoint_transposed = False


def start_vllm(
    flags: EngineFlags, model: str, processor: Processor, dtype: torch.dtype, limits: RequestLimits, weight_bytes: int
) -> Any:
    """Start vLLM in this process and return its `vllm.LLM`. Raises UserError if it does not start."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # run in this process, to pass weights by reference
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    for name in ("RANK", "LOCAL_RANK"):  # the "external_launcher" backend reads these variables
        os.environ.setdefault(name, "0")
    config = load_config(model)
    options = model_options(config, processor, limits)
    try:
        with undo_global_changes(config):
            import vllm

            if "mm_device_do_normalize" in vllm.EngineArgs.__dataclass_fields__:  # releases after 0.25
                options["mm_device_do_normalize"] = False  # else, `check_pixels` would see other pixels

            if fast := extra("fast"):
                options |= fast.vllm_options(weight_bytes, has_limit=bool(flags.gpu_memory))
            llm = vllm.LLM(
                model,
                dtype=dtype,
                seed=0,
                max_model_len=limits.tokens,
                max_num_seqs=flags.vllm_sequences,
                gpu_memory_utilization=flags.vllm_memory * distributed.memory_fraction(flags.gpu_memory),
                tensor_parallel_size=flags.tensor_parallel,
                distributed_executor_backend="external_launcher",
                enable_sleep_mode=True,
                use_tqdm_on_load=False,  # no progress bars for loading weights and capturing graphs
                logprobs_mode="processed_logprobs",  # computed after temperature and top-p
                mamba_ssm_cache_dtype="float32",  # the states of Qwen3.5, as in the trainer
                moe_backend="triton",  # FlashInfer's kernels rearrange the weights, so a sync would corrupt them
                **options,
            )
            llm.apply_model(keep_logits_in_float32)
            if config.model_type == "qwen3_vl_moe":
                llm.apply_model(take_experts_of_trainer)
            return llm
    except Exception as error:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        frame = traceback.extract_tb(error.__traceback__)[-1]  # for an assertion without a message
        reason = " ".join(str(error).split()) or f"{frame.line}, in {frame.filename}, line {frame.lineno}"
        raise UserError(
            f"vLLM did not start ({type(error).__name__}: {reason[:300]}): install the versions in "
            "requirements-gpu.txt, change its share of GPU memory with --vllm_memory, or use --engine hf"
            f"{describe_others(used_by_others(device))}"
        ) from error
