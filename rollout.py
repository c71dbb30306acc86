"""The samplers, which generate completions and share one interface: `generate`, `sync_weights`, `sleep`, `wake_up`.

`VLLMEngine` runs inside each training process. vLLM receives the trainer's weights before every step and frees its GPU
memory while the trainer works. `HFEngine` (sampling/hf_engine.py) is a plain transformers copy of the policy with a KV
cache, and it needs no GPU. Each process has a full copy of the weights and samples at its own pace, except with
`--tensor_parallel` or partial rollouts. `PolicyEngine` (in the same file) has no copy: it samples from the trainer's
own model, in a single process.

The random numbers for a completion depend only on its prompt's seed, never on the batch. The same seeds therefore give
the same completions on any number of processes, up to rounding in matrix products of different shapes. Only those of
vLLM with partial rollouts also depend on the lengths at which a completion was interrupted (`request_seed`).
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Annotated, Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from common import console, distributed
from common.errors import UserError, dataclass, find_entry, takes
from common.records import Prompt, RequestLimits, Rollout, Sampling
from config import EngineFlags
from data import Processor
from policy.model import Policy, load_model, num_weights, stop_tokens
from policy.sharding import sampler_weights
from sampling.continuation import Continuation
from sampling.hf_engine import HFEngine, PolicyEngine


@runtime_checkable
class Engine(Protocol):
    """The interface that training and evaluation expect of a sampler."""

    stays_awake: bool  # whether its memory is not needed while the trainer works, so that `sleep` does nothing

    def generate(
        self,
        prompts: Sequence[Prompt],
        seeds: Sequence[int],
        sampling: Sampling,
        continuation: Continuation | None = None,
        episodes: Any = None,
    ) -> list[list[Rollout]]:
        """Sample `sampling.n` completions of each prompt, using that prompt's seed.

        For partial rollouts, `continuation` has the completions so far and tells when to stop. Completions that are not
        finished then are returned as they are. With an environment, `episodes`, a `parts.turns.episodes.Episodes`,
        answers each turn of the model.
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
    has_turns: bool = False  # whether it can continue after an environment's answer (`--env`)

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
    if engine and not engine.has_turns and getattr(flags, "env", None):
        raise UserError(f"--engine {flags.engine} cannot continue after an environment's answer: leave --env out")
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

    `policy`: the policy whose weights `sync_weights` will pass on before the first `generate`; vLLM then does not read
    the saved weights. Without it, in an evaluation, there may be no sync. `PolicyEngine` needs it. Raises UserError if
    the sampler cannot be started.
    """
    return ENGINES[flags.engine].make(flags, model, processor, device, dtype, limits, policy)


def _make_vllm(flags, model, processor, device, dtype, limits, policy) -> Engine:
    weight_bytes = 0 if policy is None else num_weights(policy) * dtype.itemsize // flags.tensor_parallel
    return VLLMEngine(flags, model, processor, dtype, limits, weight_bytes)


def _make_hf(flags, model, processor, device, dtype, limits, policy) -> Engine:
    return HFEngine(load_model(model, dtype).to(device).eval(), processor.tokenizer)


def _make_policy(flags, model, processor, device, dtype, limits, policy) -> Engine:
    return PolicyEngine(policy, processor.tokenizer)


ENGINES = {  # "auto" takes the first that can run
    "vllm": EngineEntry(
        _make_vllm, "vLLM", "vllm", "pip install -r requirements-gpu.txt", needs_gpu=True, has_turns=True
    ),
    "hf": EngineEntry(_make_hf, "transformers", "transformers", has_turns=True),
    "policy": EngineEntry(
        _make_policy, "transformers", "transformers", needs_copy=False, uses_trainer=True, has_turns=True
    ),
}


# --- vLLM -------------------------------------------------------------------------------------------------------------


class VLLMEngine:
    """vLLM inside the training process, with weights from the trainer before every step.

    A prompt is one request for all its completions. With partial rollouts, each completion is a request, and with an
    environment each turn (parts/turns).

    vLLM receives each prompt with one placeholder per image. By default, the image features come from the trainer's
    frozen vision tower. If that tower is trained, or if its features include inner layers (Qwen3-VL), vLLM receives the
    resized images and computes the features itself. The first `generate` that sends images checks that vLLM's tower
    gets the same pixel values as the trainer's. Every `generate` checks that vLLM expands the placeholders of each
    prompt to the same tokens as the trainer.
    """

    stays_awake = False

    def __init__(
        self,
        flags: EngineFlags,
        model: str,
        processor: Processor,
        dtype: torch.dtype,
        limits: RequestLimits,
        weight_bytes: int = 0,  # size of the weights that `sync_weights` will send; 0: read the saved ones
    ):
        self.flags, self.processor, self.asleep, self.pixels_checked = flags, processor, False, False
        self.vision = processor.family.vision
        from sampling.vllm_start import start_vllm

        self.llm = start_vllm(flags, model, processor, dtype, limits, weight_bytes)
        from vllm import SamplingParams  # only now, because vLLM reads settings when it is imported

        self.sampling_params = SamplingParams
        self.hidden_size = self.llm.model_config.get_hidden_size()
        config = self.llm.model_config.hf_config
        self.stop = stop_tokens(self.llm.model_config.try_get_generation_config(), config, processor.tokenizer)
        size, rank = flags.tensor_parallel, distributed.rank()
        groups = [dist.new_group(list(range(i, i + size))) for i in range(0, distributed.world_size(), size)]
        self.group = groups[rank // size]

    def sleep(self) -> None:
        """Discard the weights and the KV cache without saving them, because the next sync sends new weights."""
        if not self.stays_awake:
            self.llm.sleep(level=2)
            self.asleep = True

    def wake_up(self) -> None:
        """Allocate memory for the weights only; `sync_weights` allocates the KV cache afterwards."""
        if self.asleep:
            torch.cuda.empty_cache()  # return the trainer's cached blocks to the device
            self.llm.wake_up(tags=["weights"])

    def sync_weights(self, policy: Policy) -> None:
        """Load the policy's weights into vLLM, and discard the caches that were computed with the old weights."""

        def stream() -> Iterator[tuple[str, Tensor]]:
            for name, weight in sampler_weights(policy):
                yield name, weight.to(self.llm.model_config.dtype)

        self.llm.apply_model(lambda model: model.load_weights(stream()))
        if self.flags.check_sync:
            from sampling.vllm_checks import check_weights

            unused = self.vision.unused if self.vision else ""
            self.llm.apply_model(lambda model: check_weights(stream(), model, unused))
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self.asleep = False
        self.llm.reset_prefix_cache()
        self.llm.llm_engine.reset_encoder_cache()

    def generate(
        self,
        prompts: Sequence[Prompt],
        seeds: Sequence[int],
        sampling: Sampling,
        continuation: Continuation | None = None,
        episodes: Any = None,
    ) -> list[list[Rollout]]:
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        before = getattr(scheduler, "preemptions", 0)  # parts/fast counts them
        if episodes:
            rollouts = episodes.environment.sample_in_vllm(episodes, self, prompts, seeds, sampling)
        else:
            rollouts = self._sample(prompts, seeds, sampling, continuation)
        if not before and (times := getattr(scheduler, "preemptions", 0)):  # once per run
            console.log(
                f"vLLM's memory was full: in this step it preempted completions {times} times and "
                f"recomputed them; a --vllm_memory above {self.flags.vllm_memory:.2f} or fewer --vllm_sequences helps"
            )
        return rollouts

    def _sample(
        self,
        prompts: Sequence[Prompt],
        seeds: Sequence[int],
        sampling: Sampling,
        continuation: Continuation | None,
    ) -> list[list[Rollout]]:
        if continuation:
            return self._continue(prompts, seeds, sampling, continuation)
        if self.flags.tensor_parallel > 1:  # the ranks of an engine work on all their prompts together
            gathered: list[Any] = [None] * self.flags.tensor_parallel
            dist.all_gather_object(gathered, (list(prompts), list(seeds)), group=self.group)
            all_prompts = [prompt for rank_prompts, _ in gathered for prompt in rank_prompts]
            all_seeds = [seed for _, rank_seeds in gathered for seed in rank_seeds]
            start = sum(len(rank_prompts) for rank_prompts, _ in gathered[: dist.get_rank(self.group)])
            rollouts = self._generate(all_prompts, all_seeds, sampling) if all_prompts else []
            return rollouts[start : start + len(prompts)]
        return self._generate(prompts, seeds, sampling) if prompts else []

    def _generate(self, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: Sampling) -> list[list[Rollout]]:
        from sampling.vllm_checks import check_expansion, check_pixels, record_tower_inputs

        order = sorted(range(len(prompts)), key=lambda i: -prompts[i].expected_length)  # start the longest first
        prompts, seeds = [prompts[i] for i in order], [seeds[i] for i in order]
        params = [self.params(sampling, sampling.n, seed, sampling.max_tokens) for seed in seeds]
        # vLLM divides by the progress bar's elapsed time, so pass no bar at all instead of a disabled bar.
        show_progress = console.is_main() and sys.stderr.isatty()
        bar = functools.partial(tqdm, delay=3, leave=False) if show_progress else False
        sent_as_images = [prompt for prompt in prompts if self._sends_images(prompt)]
        if sent_as_images and not self.pixels_checked:
            with record_tower_inputs(self.llm, self.vision.parts[0]) as tower_inputs:
                outputs = self._run(prompts, params, bar)
            check_pixels(sent_as_images, tower_inputs)
            self.pixels_checked = True
        else:
            outputs = self._run(prompts, params, bar)
        for prompt, output in zip(prompts, outputs):
            check_expansion(prompt, output.prompt_token_ids)
        completions = [completion for output in outputs for completion in output.outputs]
        token_ids = [list(c.token_ids) for c in completions]
        stopped = [c.finish_reason == "stop" for c in completions]
        texts = self.processor.tokenizer.batch_decode(
            [ids[:-1] if end else ids for ids, end in zip(token_ids, stopped)]
        )
        openings = [prompt.opening for prompt in prompts for _ in range(sampling.n)]
        rollouts = [
            Rollout(torch.tensor(ids), torch.tensor(c.logprobs.logprobs), not end, opening + text)
            for ids, c, end, opening, text in zip(token_ids, completions, stopped, openings, texts)
        ]
        rollouts_of = {i: rollouts[sampling.n * k : sampling.n * (k + 1)] for k, i in enumerate(order)}
        return [rollouts_of[i] for i in range(len(prompts))]

    def _run(self, prompts: Sequence[Prompt], params: list[Any], bar: Any) -> list[Any]:
        """Return vLLM's outputs. Raises UserError if it refuses a prompt; the others are then given up, too."""
        try:
            return self.llm.generate([self._request(prompt) for prompt in prompts], params, use_tqdm=bar)
        except Exception:
            if not self.llm.llm_engine.has_unfinished_requests():  # it refused a prompt before sampling
                for prompt in prompts:
                    self.render(prompt)  # names the one at fault
            raise

    def render(self, prompt: Prompt) -> dict[str, Any]:
        """Let vLLM prepare a prompt and its images."""
        from sampling.vllm_checks import check_expansion

        try:
            (rendered,) = self.llm.renderer.render_cmpl([self._request(prompt)])
        except Exception as error:
            raise UserError(f"{prompt.source}: vLLM refuses the prompt: {error}") from error
        check_expansion(prompt, rendered["prompt_token_ids"])
        return rendered

    def params(self, sampling: Sampling, n: int, seed: int, max_tokens: int) -> Any:
        """Return vLLM's parameters of a request for `n` completions."""
        return self.sampling_params(
            n=n,
            seed=seed,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=max_tokens,
            ignore_eos=True,  # `stop_token_ids` lists all end tokens of the model
            stop_token_ids=self.stop,
            logprobs=0,  # return only the sampled token's log-probability
            flat_logprobs=True,
            detokenize=False,
        )

    def _continue(
        self,
        prompts: Sequence[Prompt],
        seeds: Sequence[int],
        sampling: Sampling,
        continuation: Continuation,
    ) -> list[list[Rollout]]:
        """Continue completions, each in a request of its own; see `Engine.generate`.

        vLLM prepares a prompt and its images once for all its completions.
        """
        from sampling.vllm_loop import request_seed, run_until

        self.check_pixels_of(prompts, seeds)
        rollouts = [list(group) for group in continuation.started]
        indices = [(i, j) for i, group in enumerate(rollouts) for j, old in enumerate(group) if not old.finished]

        def requests() -> Iterator[tuple[dict, Any]]:
            for i, group in itertools.groupby(indices, lambda index: index[0]):
                prompt = self.render(prompts[i])
                for _, j in group:
                    tokens = rollouts[i][j].ids.tolist()
                    seed = request_seed(seeds[i], j, len(tokens))
                    request = prompt | {"prompt_token_ids": prompt["prompt_token_ids"] + tokens}
                    yield request, self.params(sampling, 1, seed, sampling.max_tokens - len(tokens))

        def should_stop(ended: Set[int]) -> bool:
            unfinished = {indices[k][0] for k in range(len(indices)) if k not in ended}
            return continuation.should_stop([i not in unfinished for i in range(len(prompts))])

        for (i, j), output in zip(indices, run_until(self.llm, requests(), len(indices), should_stop)):
            old, reason = rollouts[i][j], output.finish_reason
            ids = [*old.ids.tolist(), *output.ids]
            logp = torch.cat([old.sampling_logp, torch.tensor(output.logprobs)])
            text = self.processor.tokenizer.decode(ids[:-1] if reason == "stop" else ids) if reason else ""
            text = prompts[i].opening + text if reason else ""
            rollouts[i][j] = Rollout(torch.tensor(ids).long(), logp, reason == "length", text, reason is not None)
        return rollouts

    def check_pixels_of(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> None:
        """Let vLLM see the images of `prompts` once, if it has seen none, so that their pixels are checked."""
        if not self.pixels_checked and any(self._sends_images(prompt) for prompt in prompts):
            self._generate(prompts, seeds, Sampling(1, 1))

    def _request(self, prompt: Prompt) -> dict[str, Any]:
        """Return a prompt as vLLM expects it, with the trainer's image features if vLLM accepts them, else with images.

        The trainer computes features if its vision tower is frozen. With these features, vLLM does not run its own
        tower, which saves time and rules out any difference between the two towers.
        """
        request: dict[str, Any] = {"prompt_token_ids": prompt.engine_ids}
        if self._takes_features(prompt):
            features = {"image_embeds": prompt.features, "image_grid_thw": prompt.vision["image_grid_thw"]}
            request["multi_modal_data"] = {"image": features}
        elif prompt.images:
            request["multi_modal_data"] = {"image": prompt.images}
        return request

    def _sends_images(self, prompt: Prompt) -> bool:
        """Return whether vLLM gets the images of the prompt, not their features."""
        return bool(prompt.images) and not self._takes_features(prompt)

    def _takes_features(self, prompt: Prompt) -> bool:
        """Return whether the prompt has features that vLLM accepts.

        vLLM rejects features that include inner layers of the vision tower (Qwen3-VL), because such features are wider
        than the hidden size.
        """
        has_features = prompt.features is not None and self.vision.vllm_features
        return has_features and prompt.features.shape[-1] == self.hidden_size
