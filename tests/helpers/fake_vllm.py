"""What `VLLMEngine` and its loop need of vLLM, in a few lines; tests/test_vllm.py runs the real one."""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

STOP = 3


class FakeEngine:
    """Samples one token of every request per step: the length of what the request has, then 1, 2, …

    `length_of(inputs, params)` tells how many it samples, the last of which is a stop token; None: as many as it may.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, length_of: Callable[[dict, Any], int | None]):
        module = ModuleType("vllm.sampling_params")
        module.RequestOutputKind = SimpleNamespace(FINAL_ONLY="final")
        monkeypatch.setitem(sys.modules, "vllm.sampling_params", module)
        self.length_of, self.begun, self.running = length_of, [], []
        self.request_states: dict[str, SimpleNamespace] = {}
        self.output_processor, self.taken, self.aborted = self, None, []
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=SimpleNamespace(pop_unsent=list)))

    def add_request(self, name: str, inputs: dict, params: Any) -> None:
        assert params.output_kind == "final"
        if len(inputs["prompt_token_ids"]) > 100:
            raise ValueError("too long")
        self.begun.append((int(name), inputs, params))
        self.request_states[f"{name}-internal"] = SimpleNamespace(
            external_req_id=name,
            detokenizer=SimpleNamespace(output_token_ids=[]),
            logprobs_processor=SimpleNamespace(logprobs=SimpleNamespace(logprobs=[])),
            inputs=inputs,
            params=params,
        )

    def has_unfinished_requests(self) -> bool:
        return bool(self.request_states)

    def step(self) -> list[SimpleNamespace]:
        self.running.append(len(self.request_states))
        ended = []
        for name, state in list(self.request_states.items()):
            ids, logprobs = state.detokenizer.output_token_ids, state.logprobs_processor.logprobs
            length = self.length_of(state.inputs, state.params)
            is_last = len(ids) + 1 == (length or state.params.max_tokens)
            ids.append(STOP if is_last and length else len(ids) or len(state.inputs["prompt_token_ids"]))
            logprobs.logprobs.append(-float(len(ids)))
            if is_last:
                del self.request_states[name]
                reason = "stop" if length else "length"
                sampled = SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason=reason)
                ended.append(SimpleNamespace(finished=True, request_id=state.external_req_id, outputs=[sampled]))
        return ended

    def process_outputs(self, outputs: object) -> None:
        self.taken = outputs

    def abort_request(self, names: list[str], internal: bool) -> None:
        assert internal
        self.aborted += names
        for name in names:
            del self.request_states[name]
