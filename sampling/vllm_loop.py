"""Running vLLM's engine until enough of its requests have ended, for partial rollouts."""

import itertools
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from sampling.continuation import PAUSE_EVERY

ADDED_TOGETHER = 32  # requests that are prepared on the host while the GPU works on the iteration before


@dataclass(frozen=True)
class Output:
    """What vLLM has sampled for a request with one completion."""

    ids: Sequence[int] = ()  # sampled tokens
    logprobs: Sequence[float] = ()  # their log-probabilities
    finish_reason: str | None = None  # stop, length, or None if the request has not ended


def run_until(
    llm: Any, requests: Iterable[tuple[dict, Any]], count: int, should_stop: Callable[[Set[int]], bool]
) -> list[Output]:
    """Run `count` requests (`EngineInput` and `SamplingParams`) until `should_stop`. Return the outputs in order.

    It gets the indices of the requests that have ended. It is called every `PAUSE_EVERY` iterations, even if this
    process has nothing left to do, so that several processes can call each other. Requests that have not ended are
    then aborted; what they have sampled is read from vLLM's own records before.
    """
    from vllm.sampling_params import RequestOutputKind

    engine, waiting = llm.llm_engine, enumerate(requests)
    outputs: dict[int, Output] = {}
    for iteration in itertools.count():
        if iteration % PAUSE_EVERY == 0 and should_stop(outputs.keys()):
            break
        for k, (request, params) in itertools.islice(waiting, ADDED_TOGETHER):
            params.output_kind = RequestOutputKind.FINAL_ONLY
            engine.add_request(str(k), request, params)
        for output in engine.step() if len(outputs) < count else ():
            if output.finished:
                (sampled,) = output.outputs
                outputs[int(output.request_id)] = Output(
                    sampled.token_ids, sampled.logprobs.logprobs, sampled.finish_reason
                )
    scheduler = engine.engine_core.engine_core.scheduler
    if hasattr(scheduler, "pop_unsent"):  # that of parts/fast
        engine.output_processor.process_outputs(scheduler.pop_unsent())
    states = engine.output_processor.request_states  # of the requests that have not ended, by vLLM's names for them
    for state in states.values():
        ids, logprobs = state.detokenizer.output_token_ids, state.logprobs_processor.logprobs.logprobs
        outputs[int(state.external_req_id)] = Output([*ids], [*logprobs])
    engine.abort_request([*states], internal=True)
    return [outputs.get(k, Output()) for k in range(count)]


def request_seed(seed: int, completion: int, tokens: int) -> int:
    """Return the seed of a request that continues a completion, given its prompt's seed, its index and its length.

    vLLM starts its random numbers anew with every request, so the same seed would repeat those of the first request.
    """
    return int(np.random.SeedSequence([seed, completion, tokens]).generate_state(1)[0])
