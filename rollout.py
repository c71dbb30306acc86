"""Sampling completions: one interface, `generate`, `sync_weights`, `sleep`, `wake_up`.

`VLLMEngine` runs inside each training process and takes the trainer's weights over before every step; between steps it
sleeps and holds no memory. `HFEngine` needs no GPU: a plain transformers copy of the policy with a KV cache. Each
engine holds whole weights of its own, so ranks sample without collectives, each at its own pace.

Every completion is drawn from random numbers that belong to its prompt's seed, never to the batch it was sampled in:
the same seeds give the same completions on any number of processes (up to the rounding of differently shaped products).

Shapes: B sequences = prompts × n, S prompt tokens (left-padded), V vocabulary.
"""

import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from common import console, distributed
from common.errors import RunStopped, UserError
from common.records import Prompt, Rollout
from config import EngineFlags
from data import Processor
from policy.forward import float32_logits
from policy.model import Policy, load_model, stop_tokens
from policy.sharding import sampler_weights


class Engine(Protocol):
    """What the trainer and the evaluation ask of a sampler."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        seeds: Sequence[int],
        max_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
    ) -> list[list[Rollout]]:
        """n completions of each prompt, drawn from that prompt's seed; temperature 0 takes the likeliest token."""
        ...

    def sync_weights(self, policy: Policy) -> None:
        """Take over the policy's weights; every process calls it together."""
        ...

    def sleep(self) -> None:
        """Give GPU memory back to the trainer."""
        ...

    def wake_up(self) -> None:
        """Take it again; `sync_weights` must come before the next `generate`."""
        ...


def make_engine(
    flags: EngineFlags,
    model: str,
    processor: Processor,
    device: torch.device,
    dtype: torch.dtype,
    max_length: int,
    max_images: int,
    with_weights: bool = True,
) -> Engine:
    """The sampler of the flags, with the weights saved at `model`; says which one «auto» chose.

    `max_length`: most tokens of a prompt and its completion; `max_images`: most pictures of a prompt; `with_weights`:
    False where `sync_weights` comes first, so that vLLM need not read any. Raises UserError when the sampler cannot be
    had.
    """
    if distributed.world_size() % flags.tensor_parallel:
        raise UserError(
            f"--tensor_parallel {flags.tensor_parallel} must divide the {distributed.world_size()} processes"
        )
    name, installed = flags.engine, importlib.util.find_spec("vllm") is not None
    if name == "auto":
        name = "vllm" if installed and device.type == "cuda" else "hf"
        why = "" if name == "vllm" else " (vLLM is not installed)" if device.type == "cuda" else " (there is no GPU)"
        if console.is_main():
            version = importlib.metadata.version("vllm" if name == "vllm" else "transformers")
            print(f"sampler: {'vLLM' if name == 'vllm' else 'transformers'} {version}{why}", file=sys.stderr)
    if name == "hf":
        return HFEngine(load_model(model, dtype).to(device).eval(), processor)
    if not installed or device.type != "cuda":
        missing = "vLLM is not installed" if not installed else "there is no GPU"
        raise UserError(f"--engine vllm: {missing}; pip install -r requirements-gpu.txt, or --engine hf")
    return VLLMEngine(flags, model, processor, dtype, max_length, max_images, with_weights)


# --- vLLM -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def restore_compiler_settings() -> Iterator[None]:
    """vLLM points torch.compile at one processor and at a cache that belongs to vLLM's own settings, for the whole
    process; afterwards the trainer's layers are compiled as without it, and found again by a later run."""
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS")
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


class VLLMEngine:
    """vLLM inside the training process: one request for each prompt, weights pushed in before every step.

    vLLM gets prompts with one placeholder for each image and the fitted images; `generate` proves that it made the
    trainer's tokens of them, and on the first call that its pixels are the trainer's too.
    """

    def __init__(
        self,
        flags: EngineFlags,
        model: str,
        processor: Processor,
        dtype: torch.dtype,
        max_length: int,
        max_images: int,
        with_weights: bool = True,
    ):
        self.flags, self.processor, self.asleep, self.pixels_checked = flags, processor, False, False
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, where weights are a pointer away
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        if importlib.util.find_spec("flashinfer") is None:
            os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        for name in ("RANK", "LOCAL_RANK"):  # vLLM's launcher for processes that are there already reads them
            os.environ.setdefault(name, "0")
        options: dict[str, Any] = {"limit_mm_per_prompt": {"image": max_images, "video": 0}}
        if processor.image_processor is not None:  # images come fitted: no limit may make vLLM resize them again
            options["enable_mm_embeds"] = True
            options["mm_processor_kwargs"] = {"min_pixels": processor.factor**2, "max_pixels": processor.max_pixels}
        else:
            options = {}
        try:
            with restore_compiler_settings():
                import vllm

                self.llm = vllm.LLM(
                    model,
                    dtype=dtype,
                    load_format="auto" if with_weights else "dummy",
                    seed=0,
                    max_model_len=max_length,
                    max_num_seqs=flags.vllm_sequences,
                    gpu_memory_utilization=flags.vllm_memory * distributed.memory_fraction(flags.gpu_memory),
                    tensor_parallel_size=flags.tensor_parallel,
                    distributed_executor_backend="external_launcher",
                    enable_sleep_mode=True,
                    logprobs_mode="processed_logprobs",  # of the tempered distribution: what was sampled from
                    **options,
                )
        except (ImportError, OSError, RuntimeError, ValueError, AttributeError, TypeError, AssertionError) as error:
            first = str(error).strip().splitlines() or ["no message"]
            raise UserError(
                f"vLLM did not start ({type(error).__name__}: {first[0][:300]}). requirements-gpu.txt has the versions "
                "that fit this project's torch; --vllm_memory sets its share of the GPU; --engine hf samples without it"
            ) from None
        self.sampling_params = vllm.SamplingParams
        self.width = self.llm.model_config.get_hidden_size()
        self.llm.apply_model(keep_logits_in_float32)
        config = self.llm.model_config.hf_config
        self.stop = stop_tokens(self.llm.model_config.try_get_generation_config(), config, processor.tokenizer)
        size, rank = flags.tensor_parallel, distributed.rank()
        groups = [dist.new_group(list(range(i, i + size))) for i in range(0, distributed.world_size(), size)]
        self.group = groups[rank // size]

    def sleep(self) -> None:
        """Weights and KV cache are discarded, not copied: the next sync brings the new ones."""
        self.llm.sleep(level=2)
        self.asleep = True

    def wake_up(self) -> None:
        """Room for the weights alone; the KV cache follows when they have been pushed."""
        if self.asleep:
            torch.cuda.empty_cache()  # what the trainer holds without need
            self.llm.wake_up(tags=["weights"])

    def sync_weights(self, policy: Policy) -> None:
        dtype = self.llm.model_config.dtype
        stream = ((name, weight.to(dtype)) for name, weight in sampler_weights(policy))
        self.llm.apply_model(lambda model: (model.load_weights(stream), None)[1])
        if self.flags.check_sync:
            self._compare(policy)
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self.asleep = False
        # What the old weights computed is worth nothing now.
        self.llm.reset_prefix_cache()
        self.llm.llm_engine.reset_encoder_cache()

    def _compare(self, policy: Policy) -> None:
        """Raise RunStopped when vLLM lacks a weight of the trainer's or has another one, beyond rounding."""
        (own,) = self.llm.apply_model(lambda model: dict(unfused_weights(model)))
        for name, weight in sampler_weights(policy):
            theirs = own.pop(name, None)
            if theirs is None or not torch.equal(theirs[: len(weight)], weight.to(theirs.dtype)):
                wrong = "is missing" if theirs is None else "is not the trainer's"
                raise RunStopped(
                    f"--check_sync: after the sync vLLM's {name} {wrong}; --engine hf samples without it", 1
                )

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        seeds: Sequence[int],
        max_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
    ) -> list[list[Rollout]]:
        if self.flags.tensor_parallel > 1:  # the engine's processes all work on all of their prompts
            shares: list[Any] = [None] * self.flags.tensor_parallel
            dist.all_gather_object(shares, (list(prompts), list(seeds)), group=self.group)
            everyone = [prompt for share, _ in shares for prompt in share]
            everyones_seeds = [seed for _, share in shares for seed in share]
            first = sum(len(share) for share, _ in shares[: dist.get_rank(self.group)])
            rollouts = []
            if everyone:
                rollouts = self._generate(everyone, n, everyones_seeds, max_tokens, temperature, top_p)
            return rollouts[first : first + len(prompts)]
        return self._generate(prompts, n, seeds, max_tokens, temperature, top_p) if prompts else []

    def _generate(self, prompts, n, seeds, max_tokens, temperature, top_p) -> list[list[Rollout]]:
        order = sorted(range(len(prompts)), key=lambda i: -prompts[i].expected_length)  # the longest do not begin last
        prompts, seeds = [prompts[i] for i in order], [seeds[i] for i in order]
        requests = [{"prompt_token_ids": p.engine_ids} | self._pictures(p) for p in prompts]
        params = [
            self.sampling_params(
                n=n,
                seed=seed,
                temperature=temperature,
                top_p=top_p,
                max_tokens=max_tokens,
                ignore_eos=True,  # in favour of the model's own list
                stop_token_ids=self.stop,
                logprobs=0,  # of the sampled token alone
                flat_logprobs=True,
                detokenize=False,
            )
            for seed in seeds
        ]
        watched = console.is_main() and sys.stderr.isatty()  # vLLM divides by the time that a bar has shown
        bar = functools.partial(tqdm, delay=3, leave=False) if watched else False
        with self._seen_pixels() as seen:
            outputs = self.llm.generate(requests, params, use_tqdm=bar)
        pictured = [prompt for prompt in prompts if prompt.images and not self._takes_features(prompt)]
        if not self.pixels_checked and pictured:
            check_pixels(pictured, seen)
            self.pixels_checked = True
        for prompt, output in zip(prompts, outputs):
            if output.prompt_token_ids != prompt.ids.tolist():
                raise UserError(
                    f"{prompt.source}: vLLM made {len(output.prompt_token_ids)} tokens of the prompt and the trainer "
                    f"{len(prompt.ids)}, or others: their tokenizers or image processors differ; --engine hf has one"
                )
        completions = [completion for output in outputs for completion in output.outputs]
        kept = [list(c.token_ids) for c in completions]
        stopped = [c.finish_reason == "stop" for c in completions]
        texts = self.processor.tokenizer.batch_decode([ids[:-1] if end else ids for ids, end in zip(kept, stopped)])
        rollouts = [
            Rollout(torch.tensor(ids), torch.tensor(c.logprobs.logprobs), not end, text)
            for ids, c, end, text in zip(kept, completions, stopped, texts)
        ]
        return [rollouts[n * i : n * i + n] for i in sorted(range(len(order)), key=order.__getitem__)]

    def _pictures(self, prompt: Prompt) -> dict[str, Any]:
        """What vLLM takes of a prompt's images: the trainer's own features when its tower is frozen, which leaves no
        difference there and no work; else the fitted images."""
        if not prompt.images:
            return {}
        if not self._takes_features(prompt):
            return {"multi_modal_data": {"image": prompt.images}}
        grid = prompt.vision["image_grid_thw"]
        return {"multi_modal_data": {"image": {"image_embeds": prompt.features, "image_grid_thw": grid}}}

    def _takes_features(self, prompt: Prompt) -> bool:
        """Features of the tower's inner layers (Qwen3-VL) make them wider than what vLLM takes."""
        return prompt.features is not None and prompt.features.shape[-1] == self.width

    @contextlib.contextmanager
    def _seen_pixels(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """(pixels, grids) of every call of vLLM's vision tower, until they have been checked once."""
        seen: list[tuple[Tensor, Tensor]] = []

        def note(_: torch.nn.Module, args: tuple, kwargs: dict) -> None:
            grid = kwargs.get("grid_thw", args[1] if len(args) > 1 else None)
            seen.append((args[0].detach().float().cpu(), torch.as_tensor(grid).cpu()))

        hooks = []
        if not self.pixels_checked:
            (hooks,) = self.llm.apply_model(
                lambda model: (
                    [model.visual.register_forward_pre_hook(note, with_kwargs=True)] if hasattr(model, "visual") else []
                )
            )
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()


def check_pixels(prompts: Sequence[Prompt], seen: list[tuple[Tensor, Tensor]]) -> None:
    """Raise UserError naming the first prompt whose pixels are not among those that vLLM's vision tower was `seen` to
    take, up to the rounding of bfloat16. A picture that comes twice is taken once, in an order of vLLM's own."""
    pictures: dict[tuple[int, ...], list[Tensor]] = {}
    for pixels, grids in seen:
        for grid, part in zip(grids.tolist(), pixels.split(grids.prod(-1).tolist())):
            pictures.setdefault(tuple(grid), []).append(part)
    for prompt in prompts:
        grids = prompt.vision["image_grid_thw"]
        for grid, part in zip(grids.tolist(), prompt.vision["pixel_values"].split(grids.prod(-1).tolist())):
            if not any((part - other).abs().max() < 0.02 for other in pictures.get(tuple(grid), [])):
                raise UserError(
                    f"{prompt.source}: vLLM's vision tower did not get the trainer's pixels: its image processor "
                    "differs (rescaling, mean or another resize); --engine hf has one for both"
                )


def keep_logits_in_float32(model: torch.nn.Module) -> None:
    """Let vLLM's `model` leave its logits as they were summed, as the trainer does, instead of rounding them."""
    head = getattr(model, "language_model", model).lm_head
    rounded = head.quant_method.apply

    def apply(layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if bias is not None or x.dtype == torch.float32:
            return rounded(layer, x, bias)
        return float32_logits(x, layer.weight)

    head.quant_method.apply = apply


def unfused_weights(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(transformers' name, tensor) of every weight of vLLM's `model`, those it keeps fused taken apart again."""
    modules = dict(model.named_modules())
    for name, weight in model.named_parameters():
        owner = name.rpartition(".")[0]
        name = name.replace("language_model.lm_head.", "lm_head.")
        name = name.replace("language_model.model.", "model.language_model.")
        name = f"model.{name}" if name.startswith("visual.") else name
        if ".qkv_proj." in name:
            layer = modules[owner]
            heads = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
            parts = zip(("q_proj", "k_proj", "v_proj"), weight.split([h * layer.head_size for h in heads]))
            yield from ((name.replace("qkv_proj", part), piece) for part, piece in parts)
        elif ".gate_up_proj." in name:
            parts = zip(("gate_proj", "up_proj"), weight.chunk(2))
            yield from ((name.replace("gate_up_proj", part), piece) for part, piece in parts)
        else:
            yield name, weight


# --- transformers -----------------------------------------------------------------------------------------------------


class HFEngine:
    """Batched sampling with transformers and a KV cache."""

    def __init__(self, model: PreTrainedModel, processor: Processor, max_sequences: int = 512):
        self.model = model
        self.tokenizer = processor.tokenizer
        stop = stop_tokens(model.generation_config, model.config, processor.tokenizer)
        self.stop = torch.tensor(stop, device=model.device)
        self.device = model.device
        self.max_sequences = max_sequences

    def sync_weights(self, policy: Policy) -> None:
        own = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, weight in sampler_weights(policy):
                own[name].copy_(weight)

    def sleep(self) -> None:
        self.model.to("cpu")

    def wake_up(self) -> None:
        self.model.to(self.device)

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        seeds: Sequence[int],
        max_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
    ) -> list[list[Rollout]]:
        at_once = max(1, self.max_sequences // n)
        rollouts = []
        with console.progress(desc="sampling", total=len(prompts), unit="prompt", leave=False) as bar:
            for i in range(0, len(prompts), at_once):
                batch = prompts[i : i + at_once]
                rollouts += self._generate(batch, n, seeds[i : i + at_once], max_tokens, temperature, top_p)
                bar.update(len(batch))
        return rollouts

    @torch.inference_mode()
    def _generate(self, prompts, n, seeds, max_tokens, temperature, top_p) -> list[list[Rollout]]:
        uniforms = torch.stack([_uniforms(seed, n, max_tokens) for seed in seeds]).flatten(0, 1).to(self.device)
        logits, cache, mask, position = self._prefill(prompts, n)
        ids, logps = [], []
        running = torch.ones(len(logits), dtype=torch.bool, device=self.device)  # (B,)
        lengths = torch.zeros(len(logits), dtype=torch.long, device=self.device)
        for t in range(max_tokens):
            token, logp = sample(logits, uniforms[:, t], temperature, top_p)
            ids.append(token)
            logps.append(logp)
            lengths += running
            running = running & ~torch.isin(token, self.stop)
            if t == max_tokens - 1 or not running.any():
                break
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            out = self.model(
                input_ids=token[:, None],
                position_ids=(position + t)[..., None],
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
            )
            logits, cache = out.logits[:, -1], out.past_key_values
        return self._collect(torch.stack(ids, 1), torch.stack(logps, 1), lengths, running, n)

    def _prefill(self, prompts: Sequence[Prompt], n: int):
        """Run every prompt once, then repeat its cache for its n completions.

        Returns logits (B, V), the cache, the mask (B, S) and the next position, (3, B) with M-RoPE, else (B,).
        """
        longest = max(len(p.ids) for p in prompts)
        positions = [p.positions for p in prompts]  # (R, S) each

        def left_pad(x: Tensor) -> Tensor:
            return torch.nn.functional.pad(x, (longest - x.shape[-1], 0))

        input_ids = torch.stack([left_pad(p.ids) for p in prompts])
        mask = torch.stack([left_pad(torch.ones_like(p.ids)) for p in prompts])
        position_ids = torch.stack([left_pad(x) for x in positions], dim=1)  # (R, prompts, S)
        following = torch.stack([x.max() + 1 for x in positions]).expand(len(positions[0]), -1)  # (R, prompts)
        if len(position_ids) == 1:
            position_ids, following = position_ids[0], following[0]
        keys = sorted({key for p in prompts for key in p.vision})
        vision = {key: torch.cat([p.vision[key] for p in prompts if p.vision]).to(self.device) for key in keys}
        out = self.model(
            input_ids=input_ids.to(self.device),
            attention_mask=mask.to(self.device),
            position_ids=position_ids.to(self.device),
            use_cache=True,
            logits_to_keep=1,
            **vision,
        )
        cache = out.past_key_values
        cache.batch_repeat_interleave(n)
        logits = out.logits[:, -1].repeat_interleave(n, 0)
        mask = mask.to(self.device).repeat_interleave(n, 0)
        return logits, cache, mask, following.to(self.device).repeat_interleave(n, -1)

    def _collect(self, ids: Tensor, logps: Tensor, lengths: Tensor, running: Tensor, n: int) -> list[list[Rollout]]:
        ids, logps, rollouts = ids.cpu(), logps.cpu(), []
        for row, (length, truncated) in enumerate(zip(lengths.tolist(), running.tolist())):
            tokens = ids[row, :length].clone()
            text = self.tokenizer.decode(tokens if truncated else tokens[:-1])
            rollouts.append(Rollout(tokens, logps[row, :length].clone(), truncated, text))
        return [rollouts[i : i + n] for i in range(0, len(rollouts), n)]


def _uniforms(seed: int, n: int, max_tokens: int) -> Tensor:
    """(n, max_tokens) numbers in [0, 1) that belong to one prompt; longer limits extend them without changing them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(max_tokens, n, generator=generator, dtype=torch.float64).T


def sample(logits: Tensor, uniform: Tensor, temperature: float, top_p: float = 1.0) -> tuple[Tensor, Tensor]:
    """Draw one token from each row of `logits` (B, V) with the numbers `uniform` (B,); returns tokens and their log p.

    The inverse of the cumulative distribution, in float64: the same number always gives the same token. `top_p` keeps
    the likeliest tokens that hold that much probability together, the one that crosses it included. Temperature 0 takes
    the likeliest token and gives its log p under the plain distribution.
    """
    if temperature == 0:
        logp = logits.double().log_softmax(-1)
        token = logp.argmax(-1)
    else:
        logp = (logits.double() / temperature).log_softmax(-1)
        if top_p < 1:
            order = logp.argsort(-1, descending=True)
            sorted_p = logp.gather(-1, order).exp()
            cut = (sorted_p.cumsum(-1) - sorted_p) >= top_p  # what is already full without this token
            logp = logp.masked_fill(cut.gather(-1, order.argsort(-1)), -torch.inf).log_softmax(-1)
        cumulative = logp.exp().cumsum(-1)
        token = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True)[:, 0]
        token = token.clamp(max=logits.shape[-1] - 1)
    return token, logp.gather(-1, token[:, None])[:, 0].float()
