"""Two ways of bringing an adapter to vLLM: weights with the adapter in them, or vLLM's own LoRA layers.

    python bench/lora_sync.py --shape 3b --rank 64        # one GPU with vLLM

Both have to bring back what vLLM dropped to make room for training: pushed weights need its sleep level 2 (nothing is
kept), its own LoRA layers level 1 (the base waits in host memory) and the adapter's file. Prints the median seconds of
each part, and of sampling with the weights against sampling with the layers.
"""

import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import torch

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
import speed

import cli
import parallel
from cli import UserError
from lora import adapter_tensors, write_adapter
from model import Policy, PolicyFlags, apply_fsdp, load_policy, sampler_weights


@dataclass
class Config:
    """Time an adapter's way to vLLM."""

    shape: Literal["3b", "7b", "tiny"] = "3b"
    """The model's shape."""
    rank: int = 64
    """The adapter's rank."""
    load_in_4bit: bool = False
    """Hold the trainer's base in 4 bits."""
    sequences: int = 64
    """Completions sampled at once."""
    tokens: int = 256
    """Tokens of each."""
    rounds: int = 4
    """Times that each part is timed, after one that warms up."""
    way: Literal["both", "weights", "layers"] = "both"
    """Which of the two."""
    folder: str = "runs/bench"
    """Where the model is written."""


def seconds(rounds: int, part: Callable[[], object], before: Callable[[], object] = lambda: None) -> str:
    """The median of `part`'s times, each after `before`, the first left out."""
    times = []
    for _ in range(rounds + 1):
        before()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        part()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return f"{statistics.median(times[1:]):7.3f} s"


def sampler(cfg: Config, name: str, layers: bool):
    """vLLM with room for one adapter's `layers`, or without."""
    from vllm import LLM

    options = {"enable_lora": True, "max_lora_rank": max(cfg.rank, 8)} if layers else {}
    return LLM(
        name,
        dtype=torch.bfloat16,
        max_model_len=1024,
        max_num_seqs=cfg.sequences,
        gpu_memory_utilization=0.3,
        enable_sleep_mode=True,
        limit_mm_per_prompt={"image": 0, "video": 0},
        distributed_executor_backend="external_launcher",
        **options,
    )


def time_weights(cfg: Config, llm, policy: Policy, sample: Callable[..., object]) -> None:
    """Weights with the adapter in them, pushed."""

    def push() -> None:
        llm.wake_up(tags=["weights"])
        stream = ((key, weight.to(torch.bfloat16)) for key, weight in sampler_weights(policy))
        llm.apply_model(lambda model: (model.load_weights(stream), None)[1])
        llm.wake_up(tags=["kv_cache"])

    print("weights: wake and push    ", seconds(cfg.rounds, push, lambda: llm.sleep(level=2)))
    print("weights: sampling         ", seconds(cfg.rounds, sample, llm.reset_prefix_cache), flush=True)


def time_layers(cfg: Config, llm, policy: Policy, sample: Callable[..., object]) -> None:
    """vLLM's own LoRA layers, filled from the adapter's file in memory."""
    from vllm.lora.request import LoRARequest

    count = iter(range(1, 1000))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:

        def hand_over() -> LoRARequest:
            folder = pathlib.Path(scratch) / str(number := next(count))
            folder.mkdir()
            write_adapter(policy.model, adapter_tensors(policy.model), llm.model_config.model, folder)
            request = LoRARequest(f"adapter-{number}", number, str(folder))
            llm.llm_engine.add_lora(request)
            return request

        print("layers: wake, base kept   ", seconds(cfg.rounds, llm.wake_up, lambda: llm.sleep(level=1)))
        print("layers: write and read    ", seconds(cfg.rounds, hand_over))
        adapter = hand_over()
        used = seconds(cfg.rounds, lambda: sample(lora_request=adapter), llm.reset_prefix_cache)
        print("layers: sampling          ", used, flush=True)


def main(cfg: Config) -> None:
    if not torch.cuda.is_available():
        raise UserError("this compares ways to vLLM, which needs a GPU")
    if cfg.way == "both":
        for way in ("weights", "layers"):
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--way", way], check=True)
        return
    from vllm import SamplingParams

    device = parallel.start()
    for variable in ("RANK", "LOCAL_RANK"):  # vLLM's launcher reads them
        os.environ.setdefault(variable, "0")
    name = pathlib.Path(cfg.folder) / cfg.shape
    speed.make_model(name, cfg.shape)
    policy = load_policy(str(name), PolicyFlags(lora_rank=cfg.rank, load_in_4bit=cfg.load_in_4bit), device)
    llm = sampler(cfg, str(name), layers=cfg.way == "layers")
    policy = apply_fsdp(policy, device, torch.bfloat16)
    params = SamplingParams(max_tokens=cfg.tokens, ignore_eos=True, detokenize=False, logprobs=0)
    prompts = [{"prompt_token_ids": list(range(1, 100 + i))} for i in range(cfg.sequences)]

    def sample(**adapter: object) -> None:
        llm.generate(prompts, params, use_tqdm=False, **adapter)

    (time_weights if cfg.way == "weights" else time_layers)(cfg, llm, policy, sample)


if __name__ == "__main__":
    cli.run(main, Config)
