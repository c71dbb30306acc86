"""Time TRL's GRPOTrainer on workload W1; `apps/bench/speed.py --peer trl` runs it on one GPU.

    pip install trl==1.16.0
    python apps/bench/peer_trl.py runs/bench/3b --steps 2
    torchrun --nproc_per_node 4 apps/bench/peer_trl.py runs/bench/7b --steps 2 --prompts 16   # FSDP2 through accelerate

TRL runs vLLM in the same process with sleep mode, float32 master weights under bfloat16 autocast, gradient
checkpointing, and micro-batches of 16 completions. The model, image size, completion length and random rewards are the
same as in W1. As there, the vision tower is frozen; by default, TRL would train it.

Prints "STEP seconds GiB parts" for every step, including the first. A step is timed from the end of the previous one.
The time therefore includes reading the step's rows, as in speed.py. `parts` is JSON: seconds of reading the rows, of
the generation, of the weight sync in it, and of all that precedes the update. TRL's own timer, which it prints as
`step_time`, leaves out the rows and the optimizer.
"""

import json
import os
import pathlib
import sys
import time
from dataclasses import dataclass

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

import numpy as np
import torch
import tyro
from datasets import Dataset
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, TrainerCallback

try:
    from trl import GRPOConfig, GRPOTrainer
except ImportError as error:
    sys.exit(f"TRL cannot be imported here ({error}): see docs/speed.md")

sys.path.append(str(pathlib.Path(__file__).parents[2]))
from parts.families import delta_net

PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))


@dataclass
class Config:
    """Time TRL on workload W1."""

    model: tyro.conf.Positional[str]
    """Folder of the model with random weights."""
    steps: int = 2
    """Number of steps, including the warm-up step, which comes first."""
    prompts: int = 32
    """Number of prompts per step and process, with 8 completions each."""
    tokens: int = 512
    """Length of every completion in tokens."""
    side: int = 448
    """Width and height of the images in pixels."""
    beta: float = 0.01
    """Weight of the KL term."""
    micro_batch: int = 16
    """Number of completions per forward and backward pass."""
    vllm_memory: float = 0.3
    """Fraction of the GPU's memory for vLLM."""


class Stopwatch(TrainerCallback):
    """Print the duration of each step and of its parts, and the GPU memory in use after it."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}

    def watch(self, owner: object, method: str, part: str) -> None:
        """Add the time that `owner.method` takes to `part`."""
        function = getattr(owner, method)

        def timed(*args, **kwargs):
            torch.cuda.synchronize()
            started = time.perf_counter()
            result = function(*args, **kwargs)
            torch.cuda.synchronize()
            self.parts[part] = round(self.parts.get(part, 0.0) + time.perf_counter() - started, 2)
            return result

        setattr(owner, method, timed)

    def on_train_begin(self, *_, **__) -> None:
        torch.cuda.synchronize()
        self.step_started = time.perf_counter()

    def on_step_end(self, *_, **__) -> None:
        torch.cuda.synchronize()
        started, self.step_started = self.step_started, time.perf_counter()
        free, total = torch.cuda.mem_get_info()
        if os.environ.get("RANK", "0") == "0":
            seconds, gib = self.step_started - started, (total - free) / 2**30
            print(f"STEP {seconds:.2f} {gib:.1f} {json.dumps(self.parts)}", flush=True)
        self.parts.clear()


def noise(rng: np.random.Generator, side: int) -> Image.Image:
    """Return a square image of random pixels."""
    return Image.fromarray(rng.integers(0, 255, (side, side, 3), dtype=np.uint8))


def main(cfg: Config) -> None:
    rng = np.random.default_rng(0)
    rows = []
    for i in range(cfg.prompts * PROCESSES * (cfg.steps + 1)):
        content = [{"type": "image"}, {"type": "text", "text": f"How many shapes? {i}"}]
        rows.append({"prompt": [{"role": "user", "content": content}], "images": [noise(rng, cfg.side)]})
    # A model with random weights would also sample image placeholders, and TRL's forward pass fails if there are no
    # images for them.
    model_config = AutoConfig.from_pretrained(cfg.model)
    never_sampled = {model_config.image_token_id: -100.0, model_config.video_token_id: -100.0}
    layers = ["Qwen2_5_VLDecoderLayer", "Qwen2_5_VLVisionBlock"]
    fsdp_config = {"transformer_layer_cls_to_wrap": layers, "activation_checkpointing": True}
    sharded = {"fsdp": True, "fsdp_config": fsdp_config, "gradient_checkpointing": False}
    args = GRPOConfig(
        output_dir=f"{cfg.model}-trl",
        per_device_train_batch_size=cfg.micro_batch,
        gradient_accumulation_steps=cfg.prompts * 8 // cfg.micro_batch,
        num_generations=8,
        max_completion_length=cfg.tokens,
        generation_kwargs={"ignore_eos": True, "min_tokens": cfg.tokens, "logit_bias": never_sampled},
        beta=cfg.beta,
        learning_rate=1e-6,
        bf16=True,
        model_init_kwargs={"dtype": "float32", "device_map": None if PROCESSES > 1 else "auto"},
        use_vllm=True,
        vllm_mode="colocate",
        vllm_enable_sleep_mode=True,
        vllm_gpu_memory_utilization=cfg.vllm_memory,
        vllm_max_model_length=2048,
        max_steps=cfg.steps,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        **(sharded if PROCESSES > 1 else {"gradient_checkpointing": True}),
    )
    if model_config.model_type == "qwen3_5":
        delta_net.load_kernels()  # one variant of each kernel: TRL would wait for minutes while all are compiled
    policy = AutoModelForImageTextToText.from_pretrained(cfg.model, dtype=torch.float32)
    policy.model.visual.requires_grad_(False)
    stopwatch = Stopwatch()
    trainer = GRPOTrainer(
        model=policy,
        reward_funcs=lambda completions, **_: [float(rng.random() < 0.5) for _ in completions],
        args=args,
        train_dataset=Dataset.from_list(rows),
        callbacks=[stopwatch],
    )
    stopwatch.watch(trainer.vllm_generation, "sync_weights", "weight sync")
    stopwatch.watch(trainer.vllm_generation, "generate", "generation")
    stopwatch.watch(trainer, "get_batch_samples", "reading rows")
    stopwatch.watch(trainer, "_generate_and_score_completions", "all before the update")
    trainer.train()


if __name__ == "__main__":
    main(tyro.cli(Config))
