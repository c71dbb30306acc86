"""The samplers, which generate completions and share one interface: `generate`, `sync_weights`, `sleep`, `wake_up`.

`VLLMEngine` (sampling/vllm_engine.py) runs inside each training process. vLLM receives the trainer's weights before
every step and frees its GPU memory while the trainer works. `HFEngine` (sampling/hf_engine.py) is a plain transformers
copy of the policy with a KV cache, and it needs no GPU. Each process has a full copy of the weights and samples at its
own pace, except with `--tensor_parallel` or partial rollouts. `PolicyEngine` (same file) has no copy: it samples
from the trainer's own model, in a single process.

The random numbers for a completion depend only on its prompt's seed and its index, never on the batch. The same seeds
therefore give the same completions on any number of processes, up to rounding in matrix products of different shapes.
With vLLM, they also depend on the lengths at which a completion was interrupted (`request_seed`).
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence, Set
from typing import Annotated, Any, Protocol, runtime_checkable

import numpy as np
import torch

from common import console, distributed
from common.errors import UserError, dataclass, find_entry, takes
from common.records import Output, Prompt, Request, RequestLimits, Rollout, Sampling
from config import EngineFlags
from data import Processor
from policy.model import Policy, load_model, num_weights
from sampling.hf_engine import NOTHING, HFEngine, PolicyEngine

NOT_STARTED = Rollout(NOTHING.ids, NOTHING.logp, finished=False)


@runtime_checkable
class Engine(Protocol):
    """The interface that training and evaluation expect of a sampler."""

    stays_awake: bool  # whether its memory is not needed while the trainer works, so that `sleep` does nothing

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        then: Callable[[int, Output], Request | None] | None = None,
        should_stop: Callable[[Set[int]], bool] | None = None,
    ) -> list[Output]:
        """Sample a completion, or the rest of one, for each of `requests`, as `sampling` says; return them in order.

        `then(i, output)` is called in a thread when request i has ended. It returns the next request, whose output
        replaces this one, or None if request i is complete. `should_stop(complete)` gets the indices of the complete
        requests and returns whether to stop. It is called every few tokens, on all processes together, until it returns
        True; the others' outputs are returned unfinished. `ENGINES` says whether a sampler supports these two.
        """
        ...

    def sync_weights(self, policy: Policy) -> None:
        """Copy the policy's weights into the sampler. All processes must call it together."""
        ...

    def sleep(self) -> None:
        """Free GPU memory for the trainer, unless `stays_awake`."""
        ...

    def wake_up(self) -> None:
        """Allocate GPU memory again. Call `sync_weights` before the next `generate`."""
        ...


@dataclass(frozen=True)
class EngineEntry:
    """An entry of `ENGINES`: the function that makes a sampler for `make_engine`, its name, and what it needs."""

    make: Annotated[Callable[..., Engine], takes("flags, model, processor, device, dtype, limits, policy")]
    title: str  # the name that the run prints, with the version of `package`
    package: str = ""
    install: str = ""  # the command that installs `package`
    needs_gpu: bool = False
    needs_copy: bool = True  # of the weights; on a GPU, memory is planned for it (`--vllm_memory`)
    uses_trainer: bool = False  # it samples from the trainer's own model: only in training, and in one process
    then: bool = False  # whether its `generate` knows `then`, which turns need (`--env`)
    should_stop: bool = False  # whether it knows `should_stop`, which partial rollouts need (`--oversample`)

    def lacks(self, device: torch.device, has_room: bool = True) -> list[str]:
        """Return what it needs and does not have; for `has_room`, see `choose_engine`."""
        lacks = {
            f"{self.title} is not installed": self.package and not importlib.util.find_spec(self.package.split(".")[0]),
            "there is no GPU": self.needs_gpu and device.type != "cuda",
            "no memory for a copy; sampling is slow": self.needs_copy and not has_room,
        }
        return [reason for reason, applies in lacks.items() if applies]


def prompt_seed(seed: int, position: int) -> int:
    """Return the sampling seed of the prompt at `position` in the stream. Sampling uses no other random state."""
    return int(np.random.SeedSequence([seed, position]).generate_state(1)[0])


def check_engine_available(flags: EngineFlags, device: torch.device) -> None:
    """Raise UserError if the sampler that `flags` ask for cannot run with these packages, devices and processes."""
    processes = distributed.world_size()
    engine = None if flags.engine == "auto" else find_entry("engine", flags.engine, ENGINES)
    if engine and (lacks := engine.lacks(device)):
        how = f" run {engine.install} or" if "installed" in lacks[0] else ""
        raise UserError(f"--engine {flags.engine}: {lacks[0]};{how} use --engine hf")
    if engine and engine.uses_trainer and processes > 1:
        raise UserError(f"--engine {flags.engine} works in one process only: leave it out, or set --nproc_per_node 1")
    if engine and not engine.then and getattr(flags, "env", None):
        raise UserError(f"--engine {flags.engine} does not know `then`, by which turns go on: leave --env out")
    if engine and not engine.should_stop and getattr(flags, "oversample", 1) > 1:
        raise UserError(f"--engine {flags.engine} does not know `should_stop`: leave --oversample out")
    if processes % flags.tensor_parallel:
        raise UserError(f"--tensor_parallel {flags.tensor_parallel} must divide the number of processes ({processes})")


def choose_engine(flags: EngineFlags, device: torch.device, has_room: bool = True) -> str:
    """Return `flags.engine`, with "auto" resolved to the first of `ENGINES` that can run, and print its name.

    `has_room`: whether a copy of the model fits into the GPU's memory beside the trainer.
    """
    name, reason = flags.engine, ""
    if name == "auto":
        for each, entry in ENGINES.items():
            name, lacks = each, entry.lacks(device, has_room)
            if not lacks:
                break
            reason = f" ({lacks[-1]})"
    engine = ENGINES[name]
    version = "".join(f" {found.version}" for found in importlib.metadata.distributions(name=engine.package or "-"))
    where = " on the trainer's weights" if engine.uses_trainer else ""
    console.log(f"sampler: {engine.title}{version}{where}{reason}")
    return name


def make_engine(
    flags: EngineFlags,
    model: str,
    processor: Processor,
    device: torch.device,
    dtype: torch.dtype,
    limits: RequestLimits,
    policy: Policy | None = None,
) -> Engine:
    """Build the sampler `flags.engine`, as `choose_engine` returned it, with the weights saved at `model`.

    `policy`: given if `sync_weights` will copy its weights before the first `generate`, so that vLLM need not read the
    saved weights. None: an evaluation that may never call `sync_weights`. `PolicyEngine` needs a policy. Raises
    UserError if the sampler cannot be started.
    """
    return ENGINES[flags.engine].make(flags, model, processor, device, dtype, limits, policy)


def _make_vllm(flags, model, processor, device, dtype, limits, policy) -> Engine:
    from sampling.vllm_engine import VLLMEngine

    weight_bytes = 0 if policy is None else num_weights(policy) * dtype.itemsize // flags.tensor_parallel
    return VLLMEngine(flags, model, processor, dtype, limits, weight_bytes)


def _make_hf(flags, model, processor, device, dtype, limits, policy) -> Engine:
    return HFEngine(load_model(model, dtype).to(device).eval(), processor.tokenizer)


def _make_policy(flags, model, processor, device, dtype, limits, policy) -> Engine:
    return PolicyEngine(policy, processor.tokenizer)


_knows_both = functools.partial(EngineEntry, then=True, should_stop=True)
ENGINES = {  # "auto" takes the first that can run
    "vllm": _knows_both(_make_vllm, "vLLM", "vllm", "pip install -r requirements-gpu.txt", needs_gpu=True),
    "hf": _knows_both(_make_hf, "transformers", "transformers"),
    "policy": _knows_both(_make_policy, "transformers", "transformers", needs_copy=False, uses_trainer=True),
}


def sample_completions(
    generate: Callable[..., list[Output]],
    processor: Processor,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    sampling: Sampling,
    episodes: Any = None,
    started: Sequence[Sequence[Rollout]] = (),
) -> list[list[Rollout]]:
    """Return `sampling.n` completions of each prompt, sampled with its seed. `generate` is that of an `Engine`.

    With an environment, `episodes` (those of parts/turns) answers each turn. With partial rollouts, `started` holds the
    completions so far; one request is made, in order, for each that is not finished.
    """
    groups = [list(group) for group in started] or [[NOT_STARTED] * sampling.n for _ in prompts]
    requests = {
        (i, j): Request(prompts[i], old.ids, seeds[i], j, sampling.max_tokens - len(old.ids))
        for i, group in enumerate(groups)
        for j, old in enumerate(group)
        if not old.finished
    }
    if episodes:
        requests = {(i, j): episodes.begin(i, each, groups[i][j]) for (i, j), each in requests.items()}
    outputs = generate([*requests.values()], sampling, **{"then": episodes.then} if episodes else {})
    for number, ((i, j), output) in enumerate(zip(requests, outputs)):
        if episodes:
            groups[i][j] = episodes.end(number, output)
        else:
            groups[i][j] = _continued(groups[i][j], prompts[i], output, processor.tokenizer)
    return groups


def _continued(old: Rollout, prompt: Prompt, output: Output, tokenizer: Any) -> Rollout:
    """Return the completion `old` of `prompt` with what was sampled since."""
    ids, logp = torch.cat([old.ids, output.ids]), torch.cat([old.sampling_logp, output.logp])
    if not output.reason:
        return Rollout(ids, logp, finished=False)
    text = prompt.opening + tokenizer.decode(ids[:-1] if output.reason == "stop" else ids)
    return Rollout(ids, logp, output.reason == "length", text)
