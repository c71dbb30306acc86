"""Time the lesson's one file at speed on workload W1; `apps/bench/speed.py --peer lesson` runs it beside the full code.

    python apps/bench/peer_lesson.py runs/bench/3b --steps 3                     # the model is that of speed.py
    python apps/bench/peer_lesson.py runs/bench/3b --steps 3 --without prefix    # what a part of it is worth
    torchrun --nproc_per_node 4 apps/bench/peer_lesson.py runs/bench/7b --steps 3 --prompts 64

The model, the pictures, the length of the completions, beta and the coin flips are those of W1; all else is what
lesson/grpo_at_speed.py does by itself. Prints "STEP seconds GiB parts" for every step, including the first.
"""

import json
import os
import pathlib
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

import torch
import tyro

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
import speed

from lesson import grpo_at_speed as lesson

Part = Literal["prefix", "packing", "chunks", "compile", "sum", "masters", "pieces", "sleep", "process"]


@dataclass
class Config:
    """Time the lesson's one file on workload W1."""

    model: tyro.conf.Positional[str]
    """Folder of the model with random weights."""
    steps: int = 3
    """Number of steps, including the warm-up step, which comes first."""
    prompts: int = 32
    """Number of prompts per step, on all processes together, with 8 completions each."""
    micro_batch_tokens: int = 8192
    """Number of tokens of a forward and backward pass."""
    without: Part | None = None
    """A part to leave out; the functions below say what each one is."""


# --- what is left out -------------------------------------------------------------------------------------------------


def prefix() -> None:
    """Compute the prompt anew for each completion."""
    update = lesson.update
    lesson.update = lambda run, groups: update(run, [(prompt, [each]) for prompt, some in groups for each in some])


def packing() -> None:
    """Compute one completion, with its prompt, in each pass."""
    lesson.micro_batches = lambda groups, _: [[(prompt, [each])] for prompt, some in groups for each in some]


def chunks() -> None:
    """Hold the logits of a whole pass at once."""
    lesson.LOGIT_ROWS = 10**9


def compiler() -> None:
    """Run each layer's operations one by one."""
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    torch._dynamo.config.disable = True


def float32_sum() -> None:
    """Keep the residual stream in bfloat16."""
    lesson.in_float32 = lambda _: None


def masters() -> None:
    """Keep the weights and Adam's moments in bfloat16."""
    load = lesson.load_policy

    def load_in_bfloat16(*given: Any) -> lesson.Policy:
        return load(*given).to(torch.bfloat16)

    lesson.load_policy = load_in_bfloat16


def pieces() -> None:
    """Gather all weights before the first is handed over."""
    hand_over = lesson.Sampler.sync

    def sync(self: lesson.Sampler, policy: lesson.Policy) -> None:
        apply = self.llm.apply_model

        def apply_at_once(push: Callable[[Any], None]) -> None:
            apply(lambda model: push(SimpleNamespace(load_weights=lambda weights: model.load_weights(list(weights)))))

        self.llm.apply_model = apply_at_once
        hand_over(self, policy)
        self.llm.apply_model = apply

    lesson.Sampler.sync = sync


def sleep() -> None:
    """Leave vLLM awake, with a smaller part of the GPU."""
    lesson.Sampler.sleep = lambda _: None


def process() -> None:
    """Let vLLM run in a process of its own, which reads the weights from a file in memory."""
    import vllm

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    make, folder = vllm.LLM, pathlib.Path("/dev/shm/lesson")
    folder.mkdir(exist_ok=True)

    def make_there(model: str, **options: Any) -> vllm.LLM:
        for file in pathlib.Path(model).iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        return make(str(folder), **options | {"distributed_executor_backend": "uni"})

    @torch.no_grad()
    def sync(self: lesson.Sampler, policy: lesson.Policy) -> None:
        state = {}
        for name, weight in policy.model.named_parameters():
            full = weight.full_tensor() if isinstance(weight, lesson.DTensor) else weight
            state[name] = full.to("cpu", torch.bfloat16)
        lesson.save_file(state, folder / "model.safetensors")
        torch.cuda.empty_cache()
        self.llm.wake_up(tags=["weights"])
        self.llm.collective_rpc("reload_weights")
        self.llm.wake_up(tags=["kv_cache"])
        self.llm.reset_prefix_cache()

    vllm.LLM, lesson.Sampler.sync = make_there, sync


WITHOUT: dict[Part, Callable[[], None]] = {
    "prefix": prefix,
    "packing": packing,
    "chunks": chunks,
    "compile": compiler,
    "sum": float32_sum,
    "masters": masters,
    "pieces": pieces,
    "sleep": sleep,
    "process": process,
}


# --- a run ------------------------------------------------------------------------------------------------------------


def main(cfg: Config) -> None:
    work, folder = speed.WORKLOADS["W1"], pathlib.Path(cfg.model).parent
    data = speed.make_data(folder, work["side"], cfg.prompts * (cfg.steps + 1))
    take_step = lesson.step

    def timed(run: lesson.Run, number: int, rows: list[dict[str, Any]]) -> dict[str, float]:
        """Take a step and print its time."""
        started = time.perf_counter()
        metrics = take_step(run, number, rows)
        parts = {name.removeprefix("seconds/"): round(value, 2) for name, value in metrics.items() if "seconds" in name}
        shown = parts | {name: metrics[name] for name in ("length", "mismatch")}
        if lesson.dist.get_rank() == 0:
            print(f"STEP {time.perf_counter() - started:.2f} {metrics['gib']:.1f} {json.dumps(shown)}", flush=True)
        return metrics

    lesson.step, lesson.reward = timed, lambda *_: float(random.random() < 0.5)
    lesson.save = lesson.export = lambda *_: None
    if cfg.without:
        WITHOUT[cfg.without]()
    settings = lesson.Settings(model=cfg.model, data=data, output=str(folder / "lesson"), prompts=cfg.prompts)
    settings = replace(settings, micro_batch_tokens=cfg.micro_batch_tokens, beta=work["beta"], steps=cfg.steps)
    settings = replace(settings, max_tokens=work["tokens"], gpu_memory=0.2 if cfg.without == "sleep" else 0.4)
    lesson.launch(settings)


if __name__ == "__main__":
    main(tyro.cli(Config))
