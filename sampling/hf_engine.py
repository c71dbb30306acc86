"""The samplers that need no vLLM: batched sampling with transformers and a KV cache.

`HFEngine` has a copy of the policy. `PolicyEngine` samples from the policy itself.

Shapes: B sequences (n per prompt), S prompt tokens (left-padded), V vocabulary, R position axes (3 with M-RoPE,
otherwise 1).
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import torch
import transformers
from torch import Tensor

from common import console
from common.errors import RunStopped
from common.records import Prompt, Rollout, Sampling
from packing import vision_inputs
from policy.families import prepare
from policy.forward import image_features, next_token_logits, plain_forward
from policy.lora import without_dropout
from policy.model import Policy, stop_tokens
from policy.sharding import sampler_weights, unsharded
from sampling.continuation import NOT_STARTED, PAUSE_EVERY, Continuation, which_are_complete

Tokenizer: TypeAlias = transformers.PreTrainedTokenizerBase


class HFEngine:
    """Batched sampling with transformers and a KV cache."""

    stays_awake = False

    def __init__(self, model: transformers.PreTrainedModel, tokenizer: Tokenizer):
        prepare(model)
        self.model, self.device = model, model.device
        self.tokenizer = tokenizer
        self.stop = torch.tensor(stop_tokens(model.generation_config, model.config, tokenizer))
        self.max_sequences = 512  # fewer once memory has run out; see `_halve_batch`

    def sync_weights(self, policy: Policy) -> None:
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, weight in sampler_weights(policy):
                parameters[name].copy_(weight)

    def sleep(self) -> None:
        if not self.stays_awake:
            self.model.to("cpu")

    def wake_up(self) -> None:
        self.model.to(self.device)

    def generate(
        self,
        prompts: Sequence[Prompt],
        seeds: Sequence[int],
        sampling: Sampling,
        continuation: Continuation | None = None,
        episodes: Any = None,
    ) -> list[list[Rollout]]:
        started = continuation.started if continuation else [[NOT_STARTED] * sampling.n] * len(prompts)
        should_stop = continuation.should_stop if continuation else None
        rollouts = [list(group) for group in started]
        first, paused = 0, should_stop is not None and should_stop(which_are_complete(rollouts))
        with console.progress(desc="sampling", total=len(prompts), unit="prompt") as bar:
            while first < len(prompts) and not paused:
                sizes = [sum(not rollout.finished for rollout in group) for group in rollouts[first:]]
                batch = range(first, first + max(1, sum(total <= self.max_sequences for total in accumulate(sizes))))
                with contextlib.suppress(torch.OutOfMemoryError):
                    paused = self._continue(prompts, seeds, sampling, rollouts, batch, should_stop, episodes)
                    first = batch.stop
                    bar.update(first - bar.n)
                    continue
                # Here, and not in an except clause: until it ends, the exception would keep the batch's tensors.
                self._halve_batch(sum(sizes[: len(batch)]), sampling.n)
        while should_stop and not paused:  # other processes still sample
            paused = should_stop(which_are_complete(rollouts))
        return rollouts

    def _halve_batch(self, sequences: int, n: int) -> None:
        """From now on, sample at most half of `sequences` at once, for which the memory was too small.

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
        console.log(f"out of GPU memory: sampling at most {self.max_sequences} sequences at once")

    @torch.no_grad()
    def _continue(
        self,
        prompts: Sequence[Prompt],
        seeds: Sequence[int],
        sampling: Sampling,
        rollouts: list[list[Rollout]],
        batch: range,
        should_stop: Callable[[list[bool]], bool] | None,
        episodes: Any,
    ) -> bool:
        """Replace the `rollouts` of the prompts in `batch` by longer ones. Return whether `should_stop` stopped it."""
        parts = list(_prefixes(rollouts, batch))
        indices = [(i, j) for i, members, _ in parts for j in members]  # prompt, completion
        if not indices:
            return False
        lengths = [len(rollouts[i][j].ids) for i, j in indices]
        limits = sampling.max_tokens - torch.tensor(lengths, device=self.device)
        of_prompt = {i: _uniforms(seeds[i], len(rollouts[i]), sampling.max_tokens) for i in batch}
        unused = [of_prompt[i][j, length:] for (i, j), length in zip(indices, lengths)]
        uniforms = torch.nn.utils.rnn.pad_sequence(unused, batch_first=True).to(self.device)

        def pause(is_over: Tensor) -> bool:
            over = dict(zip(indices, is_over.tolist()))
            ends = [[r.finished or over.get((i, j), False) for j, r in enumerate(g)] for i, g in enumerate(rollouts)]
            return should_stop([all(each) for each in ends])

        prefixes = [(prompts[i], tokens, len(members)) for i, members, tokens in parts]
        begun, feed = [], None
        if episodes:
            begun = [episodes.begin(i, prompts[i]) for i, _ in indices]
            feed = episodes.environment.feed(begun, functools.partial(image_features, self.model))
        ids, logps, new, stopped, paused = self._decode(
            prefixes, uniforms, limits, sampling, pause if should_stop else None, feed
        )
        truncated = ~stopped & (new == limits.cpu())
        for b, (i, j) in enumerate(indices):
            if episodes:
                rollouts[i][j] = begun[b].rollout
                continue
            old, length = rollouts[i][j], new[b]
            ended, cut = stopped[b].item(), truncated[b].item()
            tokens = torch.cat([old.ids, ids[b, :length]])
            logp = torch.cat([old.sampling_logp, logps[b, :length]])
            text = prompts[i].opening + self.tokenizer.decode(tokens[:-1] if ended else tokens) if ended or cut else ""
            rollouts[i][j] = Rollout(tokens, logp, cut, text, ended or cut)
        return paused

    def _decode(
        self,
        prefixes: list[tuple[Prompt, Tensor, int]],
        uniforms: Tensor,
        limits: Tensor,
        sampling: Sampling,
        pause: Callable[[Tensor], bool] | None,
        feed: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
        """Sample until every sequence has a stop token or `limits` (B,) tokens, or until `pause` returns True.

        `prefixes`: see `_prefill`. `uniforms` (B, tokens) decides each token. `pause` is called now and then with the
        sequences that have ended, as (B,). `feed` gives tokens to sequences that go on after a stop token. Returns
        tokens and log-probabilities (B, tokens), the number of tokens that each sequence has sampled and whether it
        ended with a stop token, as (B,), all in host memory, and whether it was paused.
        """
        logits, cache, mask, position = self._prefill(prefixes)
        images: dict[str, Any] = {"vision": {}, "image_tokens": None}
        ids: list[Tensor] = []
        logps, paused = [], False
        stop = self.stop.to(logits.device)
        stopped = is_fed = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)  # (B,)
        lengths = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
        while True:
            uniform = uniforms.gather(1, lengths[:, None].clamp(max=uniforms.shape[1] - 1))[:, 0]
            token, logp = sample(logits, uniform, sampling.temperature, sampling.top_p)
            if feed:
                token, position, is_fed, images = feed.insert(token, position)
            ids.append(token)
            logps.append(logp)
            running = ~stopped & ~is_fed & (lengths < limits)
            lengths += running
            stopped = stopped | (running & torch.isin(token, stop))
            if feed:
                stopped = feed.take(token, logp, running, stopped, limits - lengths)
            is_over = stopped | (lengths >= limits)
            if pause and len(ids) % PAUSE_EVERY == 0:
                paused = pause(is_over)
            if paused or is_over.all():
                return torch.stack(ids, 1).cpu(), torch.stack(logps, 1).cpu(), lengths.cpu(), stopped.cpu(), paused
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            logits, cache = self._forward(
                input_ids=token[:, None],
                position_ids=position[..., None],
                attention_mask=mask,
                past_key_values=cache,
                **images,
            )
            position = position + 1

    def _forward(self, **inputs: Any) -> tuple[Tensor, transformers.Cache]:
        return next_token_logits(self.model, **inputs)

    def _prefill(self, prefixes: list[tuple[Prompt, Tensor, int]]) -> tuple[Tensor, transformers.Cache, Tensor, Tensor]:
        """Run the model once on every prefix, then repeat its cache for the completions that start with it.

        A prefix is a prompt, the tokens (L,) that follow it, and the number of completions. Returns logits (B, V), the
        cache, the mask (B, S) and the next position: (3, B) with M-RoPE, else (B,).
        """
        lengths = [len(p.ids) + len(tokens) for p, tokens, _ in prefixes]
        unpadded = [_continued_position_ids(p, len(tokens)) for p, tokens, _ in prefixes]  # (R, S) each

        def left_pad(x: Tensor) -> Tensor:
            return torch.nn.functional.pad(x, (max(lengths) - x.shape[-1], 0))

        input_ids = torch.stack([left_pad(torch.cat([p.ids, tokens])) for p, tokens, _ in prefixes])
        mask = torch.stack([left_pad(torch.ones(length, dtype=torch.long)) for length in lengths])
        position_ids = torch.stack([left_pad(x) for x in unpadded], dim=1)  # (R, prefixes, S)
        next_position = torch.stack([x.max() + 1 for x in unpadded]).expand(len(unpadded[0]), -1)  # (R, prefixes)
        if len(position_ids) == 1:
            position_ids, next_position = position_ids[0], next_position[0]
        device = self.model.device
        ends = torch.arange(1, len(prefixes) + 1) * max(lengths)
        image_tokens = [end - n + p.image_indices for end, n, (p, _, _) in zip(ends, lengths, prefixes)]
        logits, cache = self._forward(
            input_ids=input_ids.to(device),
            vision=vision_inputs([p for p, _, _ in prefixes]),
            image_tokens=torch.cat(image_tokens).to(device),
            attention_mask=mask.to(device),
            position_ids=position_ids.to(device),
        )
        repeats = torch.tensor([n for _, _, n in prefixes], device=device)
        cache.reorder_cache(torch.arange(len(mask), device=device).repeat_interleave(repeats))
        mask = mask.to(device).repeat_interleave(repeats, 0)
        next_position = next_position.to(device).repeat_interleave(repeats, -1)
        return logits.repeat_interleave(repeats, 0), cache, mask, next_position


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

    def generate(self, *args: Any, **options: Any) -> list[list[Rollout]]:
        with unsharded(self.policy), plain_forward(self.policy.model), without_dropout(self.policy):
            return super().generate(*args, **options)

    def _forward(self, **inputs: Any) -> tuple[Tensor, transformers.Cache]:
        return self.policy.next_token_logits(**inputs)


def _prefixes(rollouts: list[list[Rollout]], batch: range) -> Iterator[tuple[int, list[int], Tensor]]:
    """Yield what to prefill: a prompt's index, which of its completions, and their tokens so far, as (L,).

    Completions that have not started share a prefix.
    """
    for i in batch:
        unfinished = [(j, rollout) for j, rollout in enumerate(rollouts[i]) if not rollout.finished]
        if fresh := [j for j, rollout in unfinished if not len(rollout.ids)]:
            yield i, fresh, NOT_STARTED.ids
        for j, rollout in unfinished:
            if len(rollout.ids):
                yield i, [j], rollout.ids


def _continued_position_ids(prompt: Prompt, tokens: int) -> Tensor:
    """Return the position ids (R, S) of `prompt` and of `tokens` tokens that follow it."""
    following = prompt.position_ids.max() + 1 + torch.arange(tokens)
    return torch.cat([prompt.position_ids, following.expand(len(prompt.position_ids), -1)], dim=1)


def _uniforms(seed: int, n: int, max_tokens: int) -> Tensor:
    """Return (n, max_tokens) random numbers in [0, 1) for one prompt. A larger `max_tokens` only appends numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(max_tokens, n, generator=generator, dtype=torch.float64).T


def sample(logits: Tensor, uniform: Tensor, temperature: float, top_p: float = 1.0) -> tuple[Tensor, Tensor]:
    """Draw a token from the `logits` (B, V) of each sequence; return the tokens and their log-probabilities (B,).

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
