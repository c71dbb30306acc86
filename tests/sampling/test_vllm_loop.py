"""Run requests in vLLM until there is enough, without vLLM: its engine is played by `Engine`.

tests/test_vllm.py runs the real one. Guards against: requests that are lost, begun twice or all
prepared before the GPU has anything to do, and tokens of interrupted requests that are forgotten.
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from sampling.vllm_loop import ADDED_TOGETHER, Output, run_until


class Engine:
    """Samples one token of every request per step; the parameters of a request tell how many it has in the end."""

    def __init__(self):
        self.params, self.request_states, self.running = {}, {}, []
        scheduler = SimpleNamespace(pop_unsent=lambda: "unsent")
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
        self.output_processor, self.aborted, self.taken = self, None, None

    def add_request(self, name, request, params):
        assert params.output_kind == "final"
        assert name not in self.params
        self.params[name] = params
        self.request_states[f"{name}-internal"] = SimpleNamespace(
            external_req_id=name,
            detokenizer=SimpleNamespace(output_token_ids=[]),
            logprobs_processor=SimpleNamespace(logprobs=SimpleNamespace(logprobs=[])),
            request=request,
        )

    def step(self):
        self.running.append(len(self.request_states))
        ended = []
        for name, state in list(self.request_states.items()):
            ids, logprobs = state.detokenizer.output_token_ids, state.logprobs_processor.logprobs
            ids.append(state.request + len(ids))
            logprobs.logprobs.append(-float(len(ids)))
            if len(ids) == self.params[state.external_req_id].tokens:
                del self.request_states[name]
                sampled = SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason="stop")
                ended.append(SimpleNamespace(finished=True, request_id=state.external_req_id, outputs=[sampled]))
        return ended

    def process_outputs(self, outputs):
        self.taken = outputs

    def abort_request(self, names, internal):
        assert internal
        self.aborted = names


@pytest.fixture
def llm(monkeypatch):
    """Return what `run_until` needs of `vllm.LLM`."""
    module = ModuleType("vllm.sampling_params")
    module.RequestOutputKind = SimpleNamespace(FINAL_ONLY="final")
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", module)
    return SimpleNamespace(llm_engine=Engine())


def test_requests_begin_while_others_run_and_none_is_lost(llm):
    lengths, prepared = [1 + k % 20 for k in range(100)], []

    def requests():
        for k, tokens in enumerate(lengths):
            prepared.append(len(llm.llm_engine.running))  # the steps so far
            yield 1000 * k, SimpleNamespace(tokens=tokens)

    outputs = run_until(llm, requests(), 100, lambda ended: len(ended) == 100)
    assert [prepared.count(step) for step in range(4)] == [ADDED_TOGETHER] * 3 + [100 - 3 * ADDED_TOGETHER]
    want = [[1000 * k + i for i in range(tokens)] for k, tokens in enumerate(lengths)]
    assert [output.ids for output in outputs] == want
    assert {output.finish_reason for output in outputs} == {"stop"}
    assert outputs[2].logprobs == [-1.0, -2.0, -3.0]


def test_what_is_interrupted_keeps_its_tokens(llm):
    """After 16 iterations, the first 512 requests have begun, and those of one token have ended."""
    requests = ((1000 * k, SimpleNamespace(tokens=1 if k % 2 else 99)) for k in range(600))
    outputs = run_until(llm, requests, 600, lambda ended: len(ended) >= 200)
    assert llm.llm_engine.taken == "unsent"
    assert len(llm.llm_engine.aborted) == 256
    assert (outputs[1].ids, outputs[1].finish_reason) == ([1000], "stop")
    assert (list(outputs[0].ids), outputs[0].finish_reason) == (list(range(16)), None)
    assert list(outputs[510].ids) == [510_000]
    assert outputs[512:] == [Output()] * 88
