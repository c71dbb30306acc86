"""Sampling completions: one interface, `generate`, `sync_weights`, `sleep`, `wake_up`.

`HFEngine` needs no GPU: a plain transformers copy of the policy, a KV cache, the prompt computed once for its n
completions. The engine holds whole weights of its own, so ranks sample without collectives, each at its own pace.

Every completion is drawn from random numbers that belong to its prompt's seed, never to the batch it was sampled in:
the same seeds give the same completions on any number of processes (up to the rounding of differently shaped products).

Shapes: B sequences = prompts × n, S prompt tokens (left-padded), V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

import parallel
from data import Processor, Prompt, Rollout
from model import Policy, full_weights, load_model, stop_tokens


@dataclass(kw_only=True)
class EngineFlags:
    """The flags of the sampler."""

    engine: Literal["auto", "hf"] = "auto"
    """The sampler: hf is transformers with a KV cache."""


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
        """Take it again."""
        ...


def make_engine(name: str, model: str, processor: Processor, device: torch.device, dtype: torch.dtype) -> Engine:
    """The sampler called `name`, with the weights saved at `model`; «auto» is «hf», the only one so far."""
    if name not in ("auto", "hf"):
        raise ValueError(f"unknown engine {name!r}")
    return HFEngine(load_model(model, dtype).to(device).eval(), processor)


class HFEngine:
    """Batched sampling with transformers and a KV cache."""

    def __init__(self, model: PreTrainedModel, processor: Processor, max_sequences: int = 512):
        self.model = model
        self.tokenizer = processor.tokenizer
        self.stop = torch.tensor(stop_tokens(model, processor.tokenizer.eos_token_id), device=model.device)
        self.device = model.device
        self.max_sequences = max_sequences

    def sync_weights(self, policy: Policy) -> None:
        own = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, weight in full_weights(policy):
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
        silent = None if parallel.is_main() else True
        with tqdm(total=len(prompts), desc="sampling", unit="prompt", delay=3, leave=False, disable=silent) as bar:
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
