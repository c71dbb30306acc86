"""Running vLLM's engine until enough of its requests have ended, for partial rollouts."""

import itertools
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from policy.continuation import PAUSE_EVERY


@dataclass(frozen=True)
class Output:
    """What vLLM has sampled for a request with one completion."""

    ids: Sequence[int] = ()  # sampled tokens
    logprobs: Sequence[float] = ()  # their log-probabilities
    prompt_ids: Sequence[int] = ()  # the prompt as vLLM expanded it; empty if the request has not ended
    finish_reason: str | None = None  # stop, length, or None if the request has not ended


def run_until(llm: Any, requests: list[dict], params: list[Any], is_enough: Callable[[Set[int]], bool]) -> list[Output]:
    """Run `requests` until `is_enough`, which gets the indices of those that have ended. Return all outputs, in order.

    `is_enough` is called every `PAUSE_EVERY` iterations, even if this process has nothing left to do, so that several
    processes can call each other. Requests that have not ended are then aborted; what they have sampled is read from
    vLLM's own records before.
    """
    engine, outputs = llm.llm_engine, {}
    names = llm.enqueue(requests, params, use_tqdm=False) if requests else []
    states = engine.output_processor.request_states
    index_of = {states[name].external_req_id: k for k, name in enumerate(names)}  # outputs have the external name
    for iteration in itertools.count():
        if iteration % PAUSE_EVERY == 0 and is_enough(outputs.keys()):
            break
        for output in engine.step() if len(outputs) < len(requests) else ():
            if output.finished:
                (sampled,) = output.outputs
                logprobs = sampled.logprobs.logprobs
                outputs[index_of[output.request_id]] = Output(
                    sampled.token_ids, logprobs, output.prompt_token_ids, sampled.finish_reason
                )
    engine.output_processor.process_outputs(engine.engine_core.engine_core.scheduler.take_unsent())
    for state in states.values():
        ids, logprobs = state.detokenizer.output_token_ids, state.logprobs_processor.logprobs.logprobs
        outputs[index_of[state.external_req_id]] = Output([*ids], [*logprobs])
    engine.abort_request([*states], internal=True)
    return [outputs.get(k, Output()) for k in range(len(requests))]


def request_seed(seed: int, completion: int, tokens: int) -> int:
    """Return the seed of a request that continues a completion, given its prompt's seed, its index and its length.

    vLLM starts its random numbers anew with every request, so the same seed would repeat those of the first request.
    """
    return int(np.random.SeedSequence([seed, completion, tokens]).generate_state(1)[0])
