"""The samplers that need no vLLM: batched sampling with transformers and a KV cache.

`HFEngine` has a copy of the policy. `PolicyEngine` samples from the policy itself.

Shapes: B sequences (n per prompt), S prompt tokens (left-padded), V vocabulary, R rows of positions (3 with M-RoPE,
otherwise 1).
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from common import console
from common.errors import RunStopped
from common.records import Prompt, Rollout, Sampling
from policy.experts import prepare_experts
from policy.forward import next_token_logits, plain_forward
from policy.lora import without_dropout
from policy.model import Policy, stop_tokens
from policy.sharding import sampler_weights, unsharded

Tokenizer = transformers.PreTrainedTokenizerBase


class HFEngine:
    """Batched sampling with transformers and a KV cache."""

    def __init__(self, model: transformers.PreTrainedModel, tokenizer: Tokenizer, max_sequences: int = 512):
        prepare_experts(model)
        self.model, self.device = model, model.device
        self.tokenizer = tokenizer
        self.stop = torch.tensor(stop_tokens(model.generation_config, model.config, tokenizer))
        self.max_sequences = max_sequences

    def sync_weights(self, policy: Policy) -> None:
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, weight in sampler_weights(policy):
                parameters[name].copy_(weight)

    def sleep(self) -> None:
        self.model.to("cpu")

    def wake_up(self) -> None:
        self.model.to(self.device)

    def generate(self, prompts: Sequence[Prompt], seeds: Sequence[int], how: Sampling) -> list[list[Rollout]]:
        rollouts = []
        with console.progress(desc="sampling", total=len(prompts), unit="prompt") as bar:
            while len(rollouts) < len(prompts):
                some = slice(len(rollouts), len(rollouts) + max(1, self.max_sequences // how.n))
                with contextlib.suppress(torch.OutOfMemoryError):
                    rollouts += self._generate(prompts[some], seeds[some], how)
                    bar.update(len(rollouts) - bar.n)
                    continue
                # Here, and not in an except clause: until it ends, the exception would keep the batch's tensors.
                self._halve_batch(len(prompts[some]) * how.n, how.n)
        return rollouts

    def _halve_batch(self, sequences: int, n: int) -> None:
        """From now on, sample half as many sequences at once as `sequences`, for which the memory was too small.

        Raises RunStopped if this is less than the `n` completions of one prompt.
        """
        self.max_sequences = sequences // 2
        if self.max_sequences < n:
            raise RunStopped(
                "out of GPU memory in sampling. What helps: a smaller --num_generations, "
                "--max_completion_length or --max_side",
                status=1,
            )
        torch.cuda.empty_cache()
        console.warn(f"out of GPU memory: sampling at most {self.max_sequences} sequences at once")

    @torch.no_grad()
    def _generate(self, prompts: Sequence[Prompt], seeds: Sequence[int], how: Sampling) -> list[list[Rollout]]:
        uniforms = torch.cat([_uniforms(seed, how.n, how.max_tokens) for seed in seeds]).to(self.model.device)
        logits, cache, mask, position = self._prefill(prompts, how.n)
        ids, logps = [], []
        stop = self.stop.to(logits.device)
        running = torch.ones(len(logits), dtype=torch.bool, device=logits.device)  # (B,)
        lengths = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
        for t in range(how.max_tokens):
            token, logp = sample(logits, uniforms[:, t], how.temperature, how.top_p)
            ids.append(token)
            logps.append(logp)
            lengths += running
            running = running & ~torch.isin(token, stop)
            if t == how.max_tokens - 1 or not running.any():
                break
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            logits, cache = self._forward(
                input_ids=token[:, None],
                vision={},
                image_tokens=None,
                position_ids=(position + t)[..., None],
                attention_mask=mask,
                past_key_values=cache,
            )
        return self._collect(torch.stack(ids, 1), torch.stack(logps, 1), lengths, running, how.n)

    def _forward(self, **inputs: Any) -> tuple[Tensor, transformers.Cache]:
        return next_token_logits(self.model, **inputs)

    def _prefill(self, prompts: Sequence[Prompt], n: int):
        """Run the model once on every prompt, then repeat each prompt's cache for its n completions.

        Returns logits (B, V), the cache, the mask (B, S) and the next position: (3, B) with M-RoPE, else (B,).
        """
        longest = max(len(p.ids) for p in prompts)
        positions = [p.positions for p in prompts]  # (R, S) each

        def left_pad(x: Tensor) -> Tensor:
            return torch.nn.functional.pad(x, (longest - x.shape[-1], 0))

        input_ids = torch.stack([left_pad(p.ids) for p in prompts])
        mask = torch.stack([left_pad(torch.ones_like(p.ids)) for p in prompts])
        position_ids = torch.stack([left_pad(x) for x in positions], dim=1)  # (R, prompts, S)
        next_position = torch.stack([x.max() + 1 for x in positions]).expand(len(positions[0]), -1)  # (R, prompts)
        if len(position_ids) == 1:
            position_ids, next_position = position_ids[0], next_position[0]
        device = self.model.device
        with_images = [p for p in prompts if len(p.image_positions)]
        cached = all(p.features is not None for p in with_images)
        inputs = [{"features": p.features} if cached else p.vision for p in with_images]
        vision = {key: torch.cat([each[key] for each in inputs]).to(device) for key in (inputs or [{}])[0]}
        image_tokens = [(i + 1) * longest - len(p.ids) + p.image_positions for i, p in enumerate(prompts)]
        logits, cache = self._forward(
            input_ids=input_ids.to(device),
            vision=vision,
            image_tokens=torch.cat(image_tokens).to(device),
            attention_mask=mask.to(device),
            position_ids=position_ids.to(device),
        )
        cache.reorder_cache(torch.arange(len(mask), device=device).repeat_interleave(n))
        mask = mask.to(device).repeat_interleave(n, 0)
        return logits.repeat_interleave(n, 0), cache, mask, next_position.to(device).repeat_interleave(n, -1)

    def _collect(self, ids: Tensor, logps: Tensor, lengths: Tensor, running: Tensor, n: int) -> list[list[Rollout]]:
        ids, logps, rollouts = ids.cpu(), logps.cpu(), []
        for row, (length, truncated) in enumerate(zip(lengths.tolist(), running.tolist())):
            tokens = ids[row, :length].clone()
            text = self.tokenizer.decode(tokens if truncated else tokens[:-1])
            rollouts.append(Rollout(tokens, logps[row, :length].clone(), truncated, text))
        return [rollouts[i : i + n] for i in range(0, len(rollouts), n)]


class PolicyEngine(HFEngine):
    """Sampling from the trainer's own model, for a GPU that has no memory for a copy of it.

    With `--load_in_4bit`, the sampler thus reads the same 4-bit weights as the trainer. A copy would be in the compute
    dtype, since vLLM receives merged weights. Works in one process only: with several, all would have to take the same
    number of decoding steps, because FSDP gathers shards in each.
    """

    def __init__(self, policy: Policy, tokenizer: Tokenizer):
        super().__init__(policy.model, tokenizer)
        self.policy = policy

    def sync_weights(self, policy: Policy) -> None:
        """Do nothing: the sampler has the trainer's weights."""

    def sleep(self) -> None:
        """Return the memory of the KV cache to the device, because the trainer needs larger blocks."""
        torch.cuda.empty_cache()

    def wake_up(self) -> None:
        torch.cuda.empty_cache()

    def generate(self, prompts: Sequence[Prompt], seeds: Sequence[int], how: Sampling) -> list[list[Rollout]]:
        with unsharded(self.policy), plain_forward(self.policy.model), without_dropout(self.policy):
            return super().generate(prompts, seeds, how)

    def _forward(self, **inputs: Any) -> tuple[Tensor, transformers.Cache]:
        return self.policy.next_token_logits(**inputs)


def _uniforms(seed: int, n: int, max_tokens: int) -> Tensor:
    """Return (n, max_tokens) random numbers in [0, 1) for one prompt. A larger `max_tokens` only appends numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(max_tokens, n, generator=generator, dtype=torch.float64).T


def sample(logits: Tensor, uniform: Tensor, temperature: float, top_p: float = 1.0) -> tuple[Tensor, Tensor]:
    """Draw one token from each row of `logits` (B, V) and return the tokens (B,) and their log-probabilities (B,).

    Each token is found by inverting the cumulative distribution in float64 at one of the numbers `uniform` (B,), which
    lie in [0, 1). The same number and logits therefore always give the same token. Only the most likely tokens are
    kept: the fewest whose total probability is at least `top_p`. Temperature 0 picks the most likely token and returns
    its log-probability at temperature 1.
    """
    if temperature == 0:
        logp = logits.double().log_softmax(-1)
        token = logp.argmax(-1)
    else:
        logp = (logits.double() / temperature).log_softmax(-1)
        if top_p < 1:
            order = logp.argsort(-1, descending=True)
            sorted_p = logp.gather(-1, order).exp()
            dropped = (sorted_p.cumsum(-1) - sorted_p) >= top_p  # the tokens before this one already reach top_p
            logp = logp.masked_fill(dropped.gather(-1, order.argsort(-1)), -torch.inf).log_softmax(-1)
        cumulative = logp.exp().cumsum(-1)
        token = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True)[:, 0]
        token = token.clamp(max=logits.shape[-1] - 1)
    return token, logp.gather(-1, token[:, None])[:, 0].float()
