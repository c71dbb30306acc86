"""The samplers, which generate completions and share one interface: `generate`, `sync_weights`, `sleep`, `wake_up`.

`VLLMEngine` runs inside each training process. vLLM receives the trainer's weights before every step and frees its GPU
memory while the trainer works. `HFEngine` (sampling/hf_engine.py) is a plain transformers copy of the policy with a KV
cache, and it needs no GPU. Each process has a full copy of the weights and samples at its own pace, except with
`--tensor_parallel` or partial rollouts. `PolicyEngine` (in the same file) has no copy: it samples from the trainer's
own model, in a single process.

The random numbers for a completion depend only on its prompt's seed and its index, never on the batch. The same seeds
therefore give the same completions on any number of processes, up to rounding in matrix products of different shapes.
Only those of vLLM also depend on the lengths at which a completion was interrupted (`request_seed`).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Annotated, Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from common import console, distributed
from common.errors import UserError, dataclass, find_entry, takes
from common.records import Output, Prompt, Request, RequestLimits, Rollout, Sampling
from config import EngineFlags
from data import Processor
from policy.model import Policy, load_model, num_weights, stop_tokens
from policy.sharding import sampler_weights
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
        """Sample what the `requests` ask for, each a completion of `sampling`; return the outputs in their order.

        `then(i, output)` is called in a thread when request i has ended. It returns the request that follows, whose
        output then stands in its place, or None: it is over. `should_stop` tells whether there is enough, given the
        indices of those that are over. It is asked every few tokens, on all processes together, until it returns True;
        what is not over then is returned as it is. An entry of `ENGINES` says whether a sampler knows these two.
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
    should_stop: bool = False  # the same, which partial rollouts need (`--oversample`)

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
        _make_vllm,
        "vLLM",
        "vllm",
        "pip install -r requirements-gpu.txt",
        needs_gpu=True,
        then=True,
        should_stop=True,
    ),
    "hf": EngineEntry(_make_hf, "transformers", "transformers", then=True, should_stop=True),
    "policy": EngineEntry(
        _make_policy,
        "transformers",
        "transformers",
        needs_copy=False,
        uses_trainer=True,
        then=True,
        should_stop=True,
    ),
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
    """Return `sampling.n` completions of each prompt, whose seed decides them. `generate` is that of an `Engine`.

    With an environment, `episodes` (those of parts/turns) answers each turn. With partial rollouts, the completions go
    on as they have `started`; a request is made for each that is not finished, in order.
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


# --- vLLM -------------------------------------------------------------------------------------------------------------


class VLLMEngine:
    """vLLM inside the training process, with weights from the trainer before every step.

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
        requests: Sequence[Request],
        sampling: Sampling,
        then: Callable[[int, Output], Request | None] | None = None,
        should_stop: Callable[[Set[int]], bool] | None = None,
    ) -> list[Output]:
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        before = getattr(scheduler, "preemptions", 0)  # parts/fast counts them
        shares: list[Any] = [list(requests)]
        if self.flags.tensor_parallel > 1:  # the ranks of an engine work on all their requests together
            shares *= self.flags.tensor_parallel
            dist.all_gather_object(shares, list(requests), group=self.group)
        everyone = [request for share in shares for request in share]
        self._check_pixels([request.prompt for request in everyone])
        outputs = self._run(everyone, sampling, then, should_stop)
        if not before and (times := getattr(scheduler, "preemptions", 0)):  # once per run
            console.log(
                f"vLLM's memory was full: in this step it preempted completions {times} times and "
                f"recomputed them; a --vllm_memory above {self.flags.vllm_memory:.2f} or fewer --vllm_sequences helps"
            )
        first = sum(map(len, shares[: dist.get_rank(self.group)])) if len(shares) > 1 else 0
        return outputs[first : first + len(requests)]

    def _run(self, requests: Sequence[Request], sampling: Sampling, *others: Any) -> list[Output]:
        from sampling.vllm_loop import RequestLoop, request_seed

        def params(request: Request) -> Any:
            return self.sampling_params(
                seed=request_seed(request, sampling.max_tokens),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                max_tokens=request.max_tokens,
                ignore_eos=True,  # `stop_token_ids` lists all end tokens of the model
                stop_token_ids=self.stop,
                logprobs=0,  # return only the sampled token's log-probability
                flat_logprobs=True,
                detokenize=False,
            )

        return RequestLoop(self.llm, requests, self._render, params, *others).run()

    def _check_pixels(self, prompts: Sequence[Prompt]) -> None:
        """Compare the pixels that vLLM makes of the images of `prompts` with the trainer's, once per run."""
        from sampling.vllm_checks import check_pixels, record_tower_inputs

        with_images = [*{id(prompt): prompt for prompt in prompts if self._sends_images(prompt)}.values()]
        if with_images and not self.pixels_checked:
            with record_tower_inputs(self.llm, self.vision.parts[0]) as tower_inputs:
                self._run([Request(prompt, NOTHING.ids, 0, 0, 1) for prompt in with_images], Sampling(1, 1))
            check_pixels(with_images, tower_inputs)
            self.pixels_checked = True

    def _render(self, prompt: Prompt) -> dict[str, Any]:
        """Let vLLM prepare a prompt and its images. Raises UserError if it refuses it, or makes other tokens of it."""
        from sampling.vllm_checks import check_expansion

        try:
            (rendered,) = self.llm.renderer.render_cmpl([self._request(prompt)])
        except Exception as error:
            raise UserError(f"{prompt.source}: vLLM refuses the prompt: {error}") from error
        check_expansion(prompt, rendered["prompt_token_ids"])
        return rendered

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
