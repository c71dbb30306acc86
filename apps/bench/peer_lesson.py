"""Time the lesson's one file at speed on workload W1; `apps/bench/speed.py --peer lesson` runs it beside the full code.

    python apps/bench/peer_lesson.py runs/bench/3b --steps 3                           # the model is that of speed.py
    python apps/bench/peer_lesson.py runs/bench/3b --without prefix packing chunks compile pieces    # each in turn
    python apps/bench/peer_lesson.py runs/bench/3b --without masters                   # sum, sleep, process likewise
    torchrun --nproc_per_node 2 apps/bench/peer_lesson.py runs/bench/7b --steps 3 --prompts 64 --micro_batch_tokens 4608

The model, the pictures, the length of the completions, beta and the coin flips are those of W1; all else is what
lesson/grpo_at_speed.py does by itself. Prints "STEP seconds GiB parts" for every step, including the first. A part that
can be left out of a running process is left out for two steps, after the `--steps` with all of them. The others are
left out from the start, and so alone.
"""

import contextlib
import json
import os
import pathlib
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
import tyro

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
import speed

from common import cli
from lesson import grpo_at_speed as lesson

Part = Literal["prefix", "packing", "chunks", "compile", "sum", "masters", "pieces", "sleep", "process"]
Context = contextlib.AbstractContextManager
FROM_THE_START: tuple[Part, ...] = ("sum", "masters", "sleep", "process")


@dataclass
class Config:
    """Time the lesson's one file on workload W1."""

    model: tyro.conf.Positional[str]
    """Folder of the model with random weights."""
    steps: int = 3
    """Number of steps with all parts, or without one from the start, including the warm-up step, which comes first."""
    prompts: int = 32
    """Number of prompts per step, on all processes together, with 8 completions each."""
    micro_batch_tokens: int = 8192
    """Number of tokens of a forward and backward pass."""
    without: tuple[Part, ...] = ()
    """Parts to leave out, one after another; the functions below say what each one is."""

    def __post_init__(self) -> None:
        """Raise ValueError for parts that cannot be left out in turn, or here."""
        if len(self.without) > 1 and set(self.without) & set(FROM_THE_START):
            raise ValueError(f"without: {', '.join(FROM_THE_START)} are left out from the start: name only one")
        if "process" in self.without and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError("without: `process` is for one GPU: start it without torchrun")


# --- what is left out: each function returns a context in which the part is missing -----------------------------------


def prefix() -> Context:
    """Compute the prompt anew for each completion."""
    update = lesson.update

    def update_each(run: lesson.Run, groups: list[lesson.Group]) -> dict[str, float]:
        return update(run, [(prompt, [each]) for prompt, some in groups for each in some])

    return mock.patch.object(lesson, "update", update_each)


def packing() -> Context:
    """Compute one completion, with its prompt, in each pass."""

    def one_each(groups: list[lesson.Group], _: int) -> list[list[lesson.Group]]:
        return [[(prompt, [each])] for prompt, some in groups for each in some]

    return mock.patch.object(lesson, "micro_batches", one_each)


def chunks() -> Context:
    """Hold the logits of a whole pass at once."""
    return mock.patch.object(lesson, "LOGIT_ROWS", 10**9)


def compiler() -> Context:
    """Run each layer's operations one by one."""
    update = lesson.update

    def update_eagerly(run: lesson.Run, groups: list[lesson.Group]) -> dict[str, float]:
        with torch.compiler.set_stance("force_eager"):
            return update(run, groups)

    return mock.patch.object(lesson, "update", update_eagerly)


def float32_sum() -> Context:
    """Keep the residual stream in bfloat16."""
    return mock.patch.object(lesson, "in_float32", lambda _: None)


def masters() -> Context:
    """Keep the weights and Adam's moments in bfloat16."""
    load = lesson.load_policy

    def load_in_bfloat16(*given: Any) -> lesson.Policy:
        policy = load(*given)
        for weight in policy.parameters():  # not the buffers: the rotary frequencies stay in float32
            weight.data = weight.data.to(torch.bfloat16)
        return policy

    return mock.patch.object(lesson, "load_policy", load_in_bfloat16)


def pieces() -> Context:
    """Gather all weights before the first is handed over."""
    sync = lesson.Sampler.sync

    def sync_at_once(self: lesson.Sampler, policy: lesson.Policy) -> None:
        apply = self.llm.apply_model

        def apply_at_once(push: Callable[[Any], None]) -> None:
            apply(lambda model: push(SimpleNamespace(load_weights=lambda weights: model.load_weights(list(weights)))))

        with mock.patch.object(self.llm, "apply_model", apply_at_once):
            sync(self, policy)

    return mock.patch.object(lesson.Sampler, "sync", sync_at_once)


def sleep() -> Context:
    """Leave vLLM awake, with a smaller part of the GPU."""
    return mock.patch.object(lesson.Sampler, "sleep", lambda _: None)


def process() -> Context:
    """Let vLLM run in a process of its own, which reads the weights from a file in memory."""
    import vllm

    stack, make = contextlib.ExitStack(), vllm.LLM
    folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))

    def make_there(model: str, **options: Any) -> vllm.LLM:
        for file in pathlib.Path(model).iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        return make(str(folder), **options | {"distributed_executor_backend": "uni"})

    @torch.no_grad()
    def sync(self: lesson.Sampler, policy: lesson.Policy) -> None:
        state = {}
        for name, weight in policy.model.named_parameters():
            state[name] = lesson.full_tensor(weight).to("cpu", torch.bfloat16)
        lesson.save_file(state, folder / "model.safetensors")
        torch.cuda.empty_cache()
        self.llm.wake_up(tags=["weights"])
        self.llm.collective_rpc("reload_weights")
        self.llm.wake_up(tags=["kv_cache"])
        self.llm.reset_prefix_cache()

    stack.enter_context(mock.patch.dict(os.environ, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}))
    stack.enter_context(mock.patch.object(vllm, "LLM", make_there))
    stack.enter_context(mock.patch.object(lesson.Sampler, "sync", sync))
    return stack


WITHOUT: dict[Part, Callable[[], Context]] = {
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


def leave_out(part: Part | None) -> Context:
    """Return a context without `part`, if there is one."""
    return WITHOUT[part]() if part else contextlib.nullcontext()


# --- a run ------------------------------------------------------------------------------------------------------------


def main(cfg: Config) -> None:
    work, folder = speed.WORKLOADS["W1"], pathlib.Path(cfg.model).parent
    always = next((part for part in cfg.without if part in FROM_THE_START), None)
    of_step: list[Part | None] = [None] * cfg.steps  # what is left out of each step
    of_step += [part for part in cfg.without if part != always for _ in range(2)]
    data = speed.make_data(folder, work["side"], cfg.prompts * cfg.steps)  # taken again, if there are more steps
    take_step = lesson.step

    def timed(run: lesson.Run, number: int, rows: list[dict[str, Any]]) -> dict[str, float]:
        """Take a step and print its time."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        part, started = of_step[number - 1], time.perf_counter()
        with leave_out(part):
            metrics = take_step(run, number, rows)
        seconds = time.perf_counter() - started
        shown: dict[str, Any] = {
            "without": part or always,
            "length": metrics["length"],
            "mismatch": metrics["mismatch"],
        }
        shown |= {
            name.removeprefix("seconds/"): round(value, 2) for name, value in metrics.items() if "seconds" in name
        }
        if lesson.dist.get_rank() == 0:
            print(f"STEP {seconds:.2f} {metrics['gib']:.1f} {json.dumps(shown)}", flush=True)
        return metrics

    lesson.step, lesson.reward = timed, lambda *_: float(random.random() < 0.5)
    lesson.save = lesson.export = lambda *_: None
    settings = lesson.Settings(model=cfg.model, data=data, output=str(folder / "lesson"), prompts=cfg.prompts)
    settings = replace(settings, micro_batch_tokens=cfg.micro_batch_tokens, beta=work["beta"], steps=len(of_step))
    settings = replace(settings, max_tokens=work["tokens"], gpu_memory=0.2 if "sleep" in cfg.without else 0.4)
    with leave_out(always):
        lesson.launch(settings)


if __name__ == "__main__":
    main(cli.parse(Config))
