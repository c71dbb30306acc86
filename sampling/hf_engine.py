"""The samplers that need no vLLM: batched sampling with transformers and a KV cache.

`HFEngine` has a copy of the policy. `PolicyEngine` samples from the policy itself.

Shapes: B sequences, S tokens of a prompt and what follows it (left-padded), V vocabulary, R position axes (3 with
M-RoPE, otherwise 1).
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from common import console
from common.errors import RunStopped
from common.records import Output, Prompt, Request, Sampling
from packing import vision_inputs
from policy.families import prepare
from policy.forward import next_token_logits, plain_forward
from policy.lora import without_dropout
from policy.model import Policy, stop_tokens
from policy.sharding import sampler_weights, unsharded

Tokenizer: TypeAlias = transformers.PreTrainedTokenizerBase
PAUSE_EVERY = 16  # number of tokens between two calls of `should_stop`
THREADS = 16  # threads that call `then`, which returns what follows a request
NOTHING = Output(torch.empty(0, dtype=torch.long), torch.empty(0))


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
        requests: Sequence[Request],
        sampling: Sampling,
        then: Callable[[int, Output], Request | None] | None = None,
        should_stop: Callable[[Set[int]], bool] | None = None,
    ) -> list[Output]:
        """See `rollout.Engine.generate`.

        Turns are sampled in rounds: the first turns of all completions, then all second turns, etc. So batches and
        rounding do not depend on how long `then` takes. A request that has ended is over if nothing follows it.
        """
        outputs: dict[int, Output] = {}
        waiting, over, paused = dict(enumerate(requests)), set[int](), False

        def is_enough(ended: Set[int]) -> bool:
            return should_stop is not None and should_stop(over if then else over | ended)

        while waiting and not (paused := paused or is_enough(set())):  # asked before each round
            if then:
                encode_images([*waiting.values()])
            sampled, paused = self._sample(waiting, sampling, is_enough if should_stop else None)
            ended = {i: output for i, output in sampled.items() if output.reason}
            waiting = _followers(then, ended) if then else {}
            over |= ended.keys() - waiting.keys()
            outputs |= sampled | dict.fromkeys(waiting, NOTHING)
        while should_stop and not paused:  # other processes still sample
            paused = is_enough(set())
        return [outputs.get(i, NOTHING) for i in range(len(requests))]

    def _sample(
        self, requests: dict[int, Request], sampling: Sampling, is_enough: Callable[[Set[int]], bool] | None
    ) -> tuple[dict[int, Output], bool]:
        """Sample `requests` to their ends, as many at once as memory has room for.

        Returns their outputs, and whether `is_enough`, given the indices of those that have ended, stopped sampling.
        """
        outputs: dict[int, Output] = {}
        paused = False
        with console.progress(desc="sampling", total=len(requests), unit="completion") as bar:
            while len(outputs) < len(requests) and not paused:
                batch = list(requests)[len(outputs) : len(outputs) + self.max_sequences]

                def pause(has_ended: Tensor, before: Set[int] = outputs.keys(), batch: list[int] = batch) -> bool:
                    return is_enough(before | {i for i, ended in zip(batch, has_ended.tolist()) if ended})

                with contextlib.suppress(torch.OutOfMemoryError):
                    sampled, paused = self._decode([requests[i] for i in batch], sampling, is_enough and pause)
                    outputs |= zip(batch, sampled)
                    bar.update(len(batch))
                    continue
                # Here, and not in an except clause: until it ends, the exception would keep the batch's tensors.
                self._halve_batch(len(batch))
        return outputs, paused

    def _halve_batch(self, sequences: int) -> None:
        """From now on, sample at most half as many as `sequences` at once, for which the memory was too small.

        Raises RunStopped if that is 0.
        """
        self.max_sequences = sequences // 2
        if not self.max_sequences:
            raise RunStopped(
                "out of GPU memory in sampling. What helps: a smaller --max_completion_length or --max_pixels", status=1
            )
        torch.cuda.empty_cache()
        console.log(f"out of GPU memory: sampling at most {self.max_sequences} sequences at once")

    @torch.no_grad()
    def _decode(
        self, requests: list[Request], sampling: Sampling, pause: Callable[[Tensor], bool] | None
    ) -> tuple[list[Output], bool]:
        """Sample until every request has a stop token or `max_tokens`, or until `pause` returns True.

        `pause` is called every `PAUSE_EVERY` tokens with a (B,) bool tensor: which sequences have ended. Returns the
        outputs, and whether it was paused.
        """
        limits = torch.tensor([request.max_tokens for request in requests], device=self.model.device)
        uniforms, stop = _uniforms(requests, sampling).to(limits.device), self.stop.to(limits.device)
        logits, cache, mask, position = self._prefill(_prefixes(requests))
        ids: list[Tensor] = []
        logps, paused = [], False
        is_over = torch.zeros_like(limits).bool()  # (B,)
        while True:
            token, logp = sample(logits, uniforms[:, len(ids)], sampling.temperature, sampling.top_p)
            ids.append(token)
            logps.append(logp)
            is_over = is_over | torch.isin(token, stop) | (limits <= len(ids))
            if pause and len(ids) % PAUSE_EVERY == 0:
                paused = pause(is_over)
            if paused or is_over.all():
                break
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            logits, cache = self._forward(
                input_ids=token[:, None],
                position_ids=position[..., None],
                attention_mask=mask,
                past_key_values=cache,
                vision={},
                image_tokens=None,
            )
            position = position + 1
        rows = zip(torch.stack(ids, 1).cpu(), torch.stack(logps, 1).cpu(), requests)
        return [_output(tokens, logp, request.max_tokens, self.stop) for tokens, logp, request in rows], paused

    def _forward(self, **inputs: Any) -> tuple[Tensor, transformers.Cache]:
        return next_token_logits(self.model, **inputs)

    def _prefill(self, prefixes: list[tuple[Prompt, Tensor, int]]) -> tuple[Tensor, transformers.Cache, Tensor, Tensor]:
        """Run the model once on every prefix, then repeat its cache for the completions that start with it.

        A prefix is a prompt, the tokens (L,) that follow it, and the number of completions. Returns logits (B, V), the
        cache, the mask (B, S) and the next position: (3, B) with M-RoPE, else (B,).
        """
        lengths = [len(p.ids) + len(tokens) for p, tokens, _ in prefixes]
        unpadded = [continued_position_ids(p, len(tokens)) for p, tokens, _ in prefixes]  # (R, S) each

        left_padded = functools.partial(pad_sequence, batch_first=True, padding_side="left")
        input_ids = left_padded([torch.cat([p.ids, tokens]) for p, tokens, _ in prefixes])
        mask = left_padded([torch.ones(length, dtype=torch.long) for length in lengths])
        position_ids = left_padded([x.T for x in unpadded]).permute(2, 0, 1)  # (R, prefixes, S)
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

    def generate(self, *args: Any, **options: Any) -> list[Output]:
        with unsharded(self.policy), plain_forward(self.policy.model), without_dropout(self.policy):
            return super().generate(*args, **options)

    def _forward(self, **inputs: Any) -> tuple[Tensor, transformers.Cache]:
        return self.policy.next_token_logits(**inputs)


def _output(ids: Tensor, logp: Tensor, max_tokens: int, stop: Tensor) -> Output:
    """Return the tokens of a sequence up to its first stop token, or `max_tokens` of them."""
    is_end = torch.isin(ids[:max_tokens], stop)
    length = int(is_end.int().argmax()) + 1 if is_end.any() else len(is_end)
    reason = "stop" if is_end.any() else "length" if length == max_tokens else None
    return Output(ids[:length], logp[:length], reason)


def encode_images(requests: list[Request]) -> None:
    """Add the features of a frozen vision tower for the pictures that are new in `requests`, all at once."""
    if requests and (add_features := requests[0].add_features):
        parts = [request.prompt.parts[-1] for request in requests if request.prompt.extends]
        add_features([part for part in parts if part.images and part.features is None])


def _followers(then: Callable[[int, Output], Request | None], ended: dict[int, Output]) -> dict[int, Request]:
    """Return what follows each request that has `ended`, if something does."""
    with ThreadPoolExecutor(THREADS) as pool:
        answers = list(pool.map(then, ended.keys(), ended.values()))
    return {i: request for i, request in zip(ended, answers) if request}


def _prefixes(requests: list[Request]) -> list[tuple[Prompt, Tensor, int]]:
    """Return the prefixes for `_prefill`: one per request, but only one for a prompt's completions without tokens."""
    numbered = [(id(each.prompt), b if len(each.tokens) else -1, each) for b, each in enumerate(requests)]
    groups = [list(group) for _, group in itertools.groupby(numbered, lambda each: each[:2])]
    return [(group[0][2].prompt, group[0][2].tokens, len(group)) for group in groups]


def continued_position_ids(prompt: Prompt, tokens: int) -> Tensor:
    """Return the position ids (R, S) of `prompt` and of `tokens` tokens that follow it."""
    following = prompt.position_ids.max() + 1 + torch.arange(tokens)
    return torch.cat([prompt.position_ids, following.expand(len(prompt.position_ids), -1)], dim=1)


def _uniforms(requests: list[Request], sampling: Sampling) -> Tensor:
    """Return (B, tokens) random numbers in [0, 1), padded with zeros. A larger `max_tokens` only appends numbers."""

    def of_prompt(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(sampling.max_tokens, sampling.n, generator=generator, dtype=torch.float64)

    numbers = {seed: of_prompt(seed) for seed in {request.seed for request in requests}}
    rows = [numbers[each.seed][sampling.max_tokens - each.max_tokens :, each.index] for each in requests]
    return pad_sequence(rows, batch_first=True)


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
