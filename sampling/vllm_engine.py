"""vLLM inside the training process."""

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common import console, distributed
from common.errors import UserError
from common.records import Output, Prompt, Request, RequestLimits, Sampling
from config import EngineFlags
from data import Processor
from policy.model import Policy, stop_tokens
from policy.sharding import sampler_weights
from sampling.hf_engine import NOTHING
from sampling.vllm_checks import check_expansion, check_pixels, record_tower_inputs
from sampling.vllm_loop import RequestLoop, image_names, request_seed, with_features
from sampling.vllm_start import start_vllm


class VLLMEngine:
    """vLLM inside the training process, with weights from the trainer before every step.

    vLLM receives each prompt with one placeholder per image. By default, the image features come from the trainer's
    frozen vision tower. If that tower is trained, or if vLLM does not accept the family's features, vLLM receives the
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

        # `start_vllm` makes vLLM keep weights in the layout in which it loads them. Its `reload_weights` can change the
        # layout, but loads each twice, keeps some that FSDP frees meanwhile, and fails for some experts (docs/log.md).
        self.llm.apply_model(lambda model: model.load_weights(stream()))
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
            sent = {id(request.prompt): self._for_others(request.prompt) for request in requests}
            own = [replace(request, prompt=sent[id(request.prompt)]) for request in requests]
            shares *= self.flags.tensor_parallel
            dist.all_gather_object(shares, own, group=self.group)
        everyone = [request for share in shares for request in share]
        self._check_pixels([request.prompt.parts[0] for request in everyone])
        outputs = self._run(everyone, sampling, then, should_stop)
        if not before and (times := getattr(scheduler, "preemptions", 0)):  # once per run
            console.log(
                f"vLLM's memory was full: in this step it preempted completions {times} times and "
                f"recomputed them; a --vllm_memory above {self.flags.vllm_memory:.2f} or fewer --vllm_sequences helps"
            )
        first = sum(map(len, shares[: dist.get_rank(self.group)])) if len(shares) > 1 else 0
        return outputs[first : first + len(requests)]

    def _run(self, requests: Sequence[Request], sampling: Sampling, *others: Any) -> list[Output]:
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

        self.rendered: dict[str, Any] = {}  # a prompt with features, by its image sizes; see `with_features`
        return RequestLoop(self.llm, requests, self._render, params, *others).run()

    def _check_pixels(self, prompts: Sequence[Prompt]) -> None:
        """Compare the pixels that vLLM makes of the images of `prompts` with the trainer's, once per run."""
        sent = {id(prompt): prompt for prompt in prompts if prompt.images and not self._takes_features(prompt)}
        with_images = [*sent.values()]
        if with_images and not self.pixels_checked:
            with record_tower_inputs(self.llm, self.vision.modules[0]) as tower_inputs:
                self._run([Request(prompt, NOTHING.ids, 0, 0, 1) for prompt in with_images], Sampling(1, 1))
            check_pixels(with_images, tower_inputs)
            self.pixels_checked = True

    def _render(self, prompt: Prompt) -> dict[str, Any]:
        """Let vLLM prepare a prompt and its images. Raises UserError if vLLM refuses it, or makes other tokens."""
        sizes = str(prompt.vision["image_grid_thw"].tolist()) if self._takes_features(prompt) else ""
        if sizes in self.rendered:
            return with_features(self.rendered[sizes], prompt)
        try:
            (rendered,) = self.llm.renderer.render_cmpl([self._request(prompt)])
        except Exception as error:
            raise UserError(f"{prompt.source}: vLLM refuses the prompt: {error}") from error
        check_expansion(prompt, rendered["prompt_token_ids"])
        if sizes:
            self.rendered[sizes] = rendered
            return with_features(rendered, prompt)
        return rendered

    def _request(self, prompt: Prompt) -> dict[str, Any]:
        """Return a prompt as vLLM expects it, with the trainer's image features or with images."""
        request: dict[str, Any] = {"prompt_token_ids": prompt.engine_ids}
        if self._takes_features(prompt):
            last_layer = prompt.features[:, : self.hidden_size]  # vLLM's parser refuses those of inner layers
            features = {"image_embeds": last_layer, "image_grid_thw": prompt.vision["image_grid_thw"]}
            request["multi_modal_data"] = {"image": features}
            request["multi_modal_uuids"] = {"image": image_names(prompt)}  # else, vLLM hashes the features
        elif prompt.images:
            request["multi_modal_data"] = {"image": prompt.images}
        return request

    def _for_others(self, prompt: Prompt) -> Prompt:
        """Return `prompt` with what the other ranks need of it: pixel values only if they are still to be checked."""
        if self._takes_features(prompt):
            vision = {"image_grid_thw": prompt.vision["image_grid_thw"]}
            return replace(prompt, vision=vision, for_teacher=None)
        vision = {} if self.pixels_checked else prompt.vision
        return replace(prompt, vision=vision, features=None, for_teacher=None)

    def _takes_features(self, prompt: Prompt) -> bool:
        """Return whether vLLM gets the trainer's features instead of images."""
        return prompt.features is not None and self.vision.vllm_features
