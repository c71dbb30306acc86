"""Run requests in vLLM, begin the turns that follow them, and keep the tokens of interrupted requests."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch

from common import console
from common.errors import UserError
from common.records import Output, Prompt, Request
from sampling.hf_engine import NOTHING, PAUSE_EVERY, THREADS, encode_images

ADDED_TOGETHER = 32  # requests that are prepared on the host while the GPU works on the iteration before
GATHER = 0.05  # if vLLM is idle, seconds to wait for further turns, so that they begin together


class RequestLoop:
    """Runs requests of one completion each to their ends, or until there is enough."""

    def __init__(
        self,
        llm: Any,
        requests: Sequence[Request],
        render: Callable[[Prompt], dict],
        params: Callable[[Request], Any],
        then: Callable[[int, Output], Request | None] | None = None,
        should_stop: Callable[[Set[int]], bool] | None = None,
    ):
        """`render`: prompt to `EngineInput`. `params`: request to `SamplingParams`. The rest: see `Engine.generate`."""
        self.engine, self.render, self.params, self.then = llm.llm_engine, render, params, then
        self.requests = list(requests)  # each is replaced by the one that follows it
        self.outputs: dict[int, Output] = {}  # of those `requests` that have ended
        self.over: set[int] = set()  # indices of requests that nothing follows
        self.should_stop = should_stop or (lambda over: len(over) == len(requests))
        longest_first = sorted(range(len(requests)), key=lambda i: -requests[i].prompt.expected_length)
        self.waiting = deque(longest_first)  # requests that have not begun
        encode_images(self.requests)
        self.prepared: dict[int, dict] = {}  # the `EngineInput` of each prompt, by its id
        self.answered: SimpleQueue[Future[tuple[int, Request | None]]] = SimpleQueue()
        self.in_threads = 0  # number of calls of `then` whose results have not been taken

    def run(self) -> list[Output]:
        """Return the outputs in order. Raises UserError if vLLM refuses a request; the others are aborted.

        `should_stop` is called every `PAUSE_EVERY` iterations, even if this process has nothing left to do, because
        other processes may wait in it. When it returns True, what has not ended is aborted, and its tokens are kept.
        """
        pool = ThreadPoolExecutor(THREADS)
        progress = console.progress(desc="sampling", total=len(self.requests), unit="completion")
        try:
            with progress as bar:
                for iteration in itertools.count():
                    if iteration % PAUSE_EVERY == 0 or self.answered.qsize() >= ADDED_TOGETHER:
                        self._follow()
                    if iteration % PAUSE_EVERY == 0 and self.should_stop(self.over):
                        break
                    for _ in range(min(ADDED_TOGETHER, len(self.waiting))):
                        self._add(self.waiting.popleft())
                    for output in self.engine.step() if self.engine.has_unfinished_requests() else ():
                        if output.finished:
                            self._end(output, pool)
                    bar.update(len(self.over) - bar.n)
            while self.in_threads:  # they have turns that must not be lost
                self._take(self.answered.get())
            self._interrupt()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            self.engine.abort_request([*self.engine.output_processor.request_states], internal=True)
        return [self.outputs.get(i, NOTHING) for i in range(len(self.requests))]

    def _add(self, i: int) -> None:
        """Let vLLM begin request `i`."""
        from vllm.sampling_params import RequestOutputKind

        request, params = self.requests[i], self.params(self.requests[i])
        params.output_kind = RequestOutputKind.FINAL_ONLY
        prompt = self._prepare(request.prompt)
        inputs = prompt | {"prompt_token_ids": prompt["prompt_token_ids"] + request.tokens.tolist()}
        try:
            self.engine.add_request(str(i), inputs, params)
        except ValueError as error:
            raise UserError(f"{request.prompt.source}: vLLM refuses the request: {error}") from error

    def _prepare(self, prompt: Prompt) -> dict:
        """Return a prompt as vLLM takes it. It is rendered once; for a later turn, only what was added is."""
        if id(prompt) not in self.prepared:
            if prompt.extends:
                before, added = prompt.extends
                self.prepared[id(prompt)] = joined(self._prepare(before), self.render(added))
            else:
                self.prepared[id(prompt)] = self.render(prompt)
        return self.prepared[id(prompt)]

    def _end(self, output: Any, pool: ThreadPoolExecutor) -> None:
        """Take the output of a request that has ended, and ask in a thread what follows it."""
        i, (sampled,) = int(output.request_id), output.outputs
        ids, logp = torch.tensor([*sampled.token_ids]), torch.tensor([*sampled.logprobs.logprobs])
        self.outputs[i] = Output(ids, logp, sampled.finish_reason)
        if then := self.then:
            self.in_threads += 1
            pool.submit(lambda: (i, then(i, self.outputs[i]))).add_done_callback(self.answered.put)
        else:
            self.over.add(i)

    def _follow(self) -> None:
        """Begin what follows requests that have ended. If vLLM is idle, wait for one, then `GATHER` seconds for others.

        An iteration in which a request begins takes several times as long as one that only decodes. Therefore, requests
        are added together, every few iterations.
        """
        is_busy, first = self.engine.has_unfinished_requests() or bool(self.waiting), len(self.waiting)
        timeout, until = 0.0 if is_busy else None, 0.0
        while self.in_threads:
            try:
                self._take(self.answered.get(timeout=timeout))
            except Empty:
                break
            if not is_busy:
                until = until or time.monotonic() + GATHER
                timeout = max(0.0, until - time.monotonic())
        encode_images([self.requests[i] for i in itertools.islice(self.waiting, first, None)])

    def _take(self, answer: Future[tuple[int, Request | None]]) -> None:
        """Take a result of `then`: queue the request that follows, or note that none follows."""
        self.in_threads -= 1
        i, request = answer.result()
        if request:
            self.requests[i] = request
            del self.outputs[i]
            self.waiting.append(i)
        else:
            self.over.add(i)

    def _interrupt(self) -> None:
        """Take what unfinished requests have sampled from vLLM's own records."""
        scheduler = self.engine.engine_core.engine_core.scheduler
        if hasattr(scheduler, "pop_unsent"):  # that of parts/fast
            self.engine.output_processor.process_outputs(scheduler.pop_unsent())
        for state in self.engine.output_processor.request_states.values():
            ids, logprobs = state.detokenizer.output_token_ids, state.logprobs_processor.logprobs.logprobs
            self.outputs[int(state.external_req_id)] = Output(torch.tensor([*ids]).long(), torch.tensor([*logprobs]))


def request_seed(request: Request, max_tokens: int) -> int:
    """Return vLLM's seed for `request`, of a completion of at most `max_tokens` tokens.

    vLLM starts its random numbers anew with every request, so the same seed would repeat those of the first one.
    """
    key = [request.seed, request.index, max_tokens - request.max_tokens]
    return int(np.random.SeedSequence(key).generate_state(1)[0])


def image_names(prompt: Prompt) -> list[str]:
    """Return the names of the images of `prompt` for vLLM; prompts with the same images have the same names."""
    return [f"{prompt.image_digest.hex()}-{i}" for i in range(len(prompt.images))]


def with_features(like: dict, prompt: Prompt) -> dict:
    """Return the `EngineInput` of a prompt with features, made from `like`, that of one with the same image sizes.

    vLLM itself takes 1 to 3 ms for each prompt, and the GPU would wait for those of all turns that begin.
    """
    places, items = like["mm_placeholders"]["image"], like["mm_kwargs"]["image"]
    lengths = [place.length for place in places]
    starts = prompt.image_indices[torch.tensor([0, *lengths[:-1]]).cumsum(0)].tolist()
    embeds = [replace(item["image_embeds"], data=own) for item, own in zip(items, prompt.features.split(lengths))]
    return like | {
        "prompt_token_ids": prompt.ids.tolist(),
        "mm_kwargs": {"image": [item | {"image_embeds": own} for item, own in zip(items, embeds)]},
        "mm_hashes": {"image": image_names(prompt)},
        "mm_placeholders": {"image": [replace(place, offset=start) for place, start in zip(places, starts)]},
    }


def joined(before: dict, added: dict) -> dict:
    """Return the `EngineInput` of two prompts, one after the other."""
    ids = before["prompt_token_ids"]
    both = before | {"prompt_token_ids": ids + added["prompt_token_ids"]}
    if added["type"] == "multimodal":
        moved = [replace(place, offset=place.offset + len(ids)) for place in added["mm_placeholders"]["image"]]
        both["type"] = "multimodal"
        for name, each in (added | {"mm_placeholders": {"image": moved}}).items():
            if name.startswith("mm_"):
                both[name] = {"image": [*before.get(name, {"image": []})["image"], *each["image"]]}
    return both
