"""The short path through vLLM's scheduler, without vLLM: what it needs of vLLM is played by the classes below.

tests/test_vllm.py compares it with vLLM's own scheduler. Guards against: tokens that are lost or repeated when a batch
is dissolved, blocks of the KV cache that are missing or too many, and requests that end too early or too late.
"""

import importlib
import sys
from collections import defaultdict
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

BLOCK, STOP = 4, 99
pytest.importorskip("parts.fast", reason="needs parts/fast, which is not here")


class Record(SimpleNamespace):
    """A vLLM class that only holds values."""


class Output(Record):
    finish_reason = None

    def __init__(self, request_id, new_token_ids, new_logprobs, **more):
        super().__init__(request_id=request_id, tokens=new_token_ids, logprobs=new_logprobs, **more)


class Logprobs(Record):
    def __init__(self, token_ids, logprobs, ranks):
        super().__init__(logprob_token_ids=token_ids, logprobs=logprobs, sampled_token_ranks=ranks)


class Request:
    """A request whose prompt is computed and whose first token is sampled."""

    use_structured_output = spec_token_ids = resumable = is_prefill_chunk = False

    def __init__(self, name: str, prompt: int, max_tokens: int):
        self.request_id, self.prompt, self.max_tokens, self.tokens = name, prompt, max_tokens, [0]
        self.num_computed_tokens, self.num_output_placeholders, self.stop_reason = prompt, 0, None
        plain = dict(logprobs=0, prompt_logprobs=None, min_tokens=0, flat_logprobs=True, repetition_detection=None)
        self.sampling_params = SimpleNamespace(**plain, stop_token_ids=[STOP], eos_token_id=None)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_tokens(self) -> int:
        return self.prompt + len(self.tokens)

    def append_output_token_ids(self, tokens: list[int]) -> None:
        self.tokens += tokens

    def get_finished_reason(self) -> str:
        return "stop" if self.tokens[-1] == STOP else "length"


class Queue(list):
    def peek_request(self) -> Request:
        return self[0]


class AsyncScheduler:
    """vLLM's own scheduler. Its `schedule` is never meant to be called in the short path."""

    def __init__(self, requests: list[Request], free_blocks: int = 100):
        self.requests = {request.request_id: request for request in requests}
        self.running, self.waiting, self.skipped_waiting = list(requests), Queue(), Queue()
        self.max_model_len, self.max_num_running_reqs, self.max_num_scheduled_tokens = 64, 4, 64
        groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=BLOCK))]
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=groups)
        self.free_blocks, self.allocated, self.cached = free_blocks, defaultdict(list), {}
        pool = SimpleNamespace(get_num_free_blocks=lambda: self.free_blocks)
        self.kv_cache_manager = SimpleNamespace(
            block_pool=pool,
            new_step_starts=lambda: None,
            allocate_slots=self._allocate,
            cache_blocks=lambda request, tokens: self.cached.update({request.request_id: tokens}),
            get_num_common_prefix_blocks=lambda name: [0],
        )
        self.encoder_cache_manager = SimpleNamespace(
            get_cached_input_ids=lambda request: set(), get_freed_mm_hashes=lambda: []
        )
        self.current_step, self.needs_kv_cache_zeroing = 0, False
        self.finished_req_ids, self.reset_preempted_req_ids = set(), set()

    def _allocate(self, request: Request, tokens: int) -> SimpleNamespace:
        self.allocated[request.request_id].append(request.num_computed_tokens)
        return SimpleNamespace(get_block_ids=lambda allow_none: ([1],))

    def _free_request(self, request: Request) -> None:
        del self.requests[request.request_id]

    def schedule(self, throttle_prefills: bool) -> str:
        return "vLLM's own"

    def finish_requests(self, names: list[str], status: str) -> list[tuple[str, int]]:
        for name in names:
            self.running.remove(self.requests.pop(name))
        return [(name, 0) for name in names]

    def update_from_output(self, iteration: Record, sampled: Record) -> dict[int, Record]:
        outputs = []
        for name, i in sampled.req_id_to_index.items():
            self.requests[name].append_output_token_ids(sampled.sampled_token_ids[i])
            self.requests[name].num_output_placeholders -= 1
            logprobs = Logprobs(None, sampled.logprobs.logprobs[i : i + 1], None)
            outputs.append(Output(name, sampled.sampled_token_ids[i], logprobs))
        return {0: Record(outputs=outputs)}


@pytest.fixture
def scheduler_class(monkeypatch):
    """Return `DecodeScheduler` on top of the classes above."""
    contents = {
        "vllm.v1.core.sched.async_scheduler": {"AsyncScheduler": AsyncScheduler},
        "vllm.v1.core.sched.output": {"CachedRequestData": Record, "SchedulerOutput": Record},
        "vllm.v1.core.sched.utils": {"check_stop": lambda request, max_model_len: None},
        "vllm.v1.engine": {"EngineCoreOutput": Output, "EngineCoreOutputs": Record},
        "vllm.v1.engine.logprobs": {"LogprobsProcessor": type("LogprobsProcessor", (), {})},
        "vllm.v1.outputs": {"LogprobsLists": Logprobs, "ModelRunnerOutput": Record},
        "vllm.v1.request": {"Request": Request, "RequestStatus": Record},
    }
    for name in ("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched", *contents):
        module = ModuleType(name)
        vars(module).update(contents.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "parts.fast.fast_decode", raising=False)
    yield importlib.import_module("parts.fast.fast_decode").DecodeScheduler
    sys.modules.pop("parts.fast.fast_decode", None)


def sample(iteration: Record, stops: dict[str, int]) -> Record:
    """Return what the model runner samples: the number of the token, or the stop token at `stops`."""
    data = iteration.scheduled_cached_reqs
    numbers = data.num_output_tokens
    tokens = [STOP if stops.get(name) == n else n for name, n in zip(data.req_ids, numbers)]
    logprobs = SimpleNamespace(logprobs=-np.array(numbers, np.float32)[:, None])
    index = {name: i for i, name in enumerate(data.req_ids)}
    return Record(sampled_token_ids=[[token] for token in tokens], logprobs=logprobs, req_id_to_index=index)


def test_requests_end_at_their_limits_and_stop_tokens_with_all_their_tokens(scheduler_class):
    """Each iteration is scheduled before the tokens of the one before arrive, as in vLLM."""
    requests = [Request("long", 3, 12), Request("short", 5, 4), Request("stops", 4, 12), Request("one", 6, 2)]
    requests.append(Request("wide", 60, 12))  # it reaches the maximum length of 64 tokens
    scheduler, stops = scheduler_class(requests), {"stops": 6}
    sent, reasons, computed = defaultdict(list), {}, defaultdict(list)
    current = scheduler.schedule()
    while current != "vLLM's own":
        data = current.scheduled_cached_reqs
        assert current.total_num_scheduled_tokens == len(data.req_ids) == len(data.new_block_ids)
        for name, number in zip(data.req_ids, data.num_computed_tokens):
            computed[name].append(number)
        following = scheduler.schedule()
        for outputs in scheduler.update_from_output(current, sample(current, stops)).values():
            for output in outputs.outputs:
                sent[output.request_id] += zip(output.tokens, output.logprobs.logprobs[:, 0].tolist())
                reasons[output.request_id] = output.finish_reason
        current = following
    tokens = {"long": [*range(1, 12)], "short": [1, 2, 3], "stops": [1, 2, 3, 4, 5, STOP]}
    tokens |= {"one": [1], "wide": [1, 2, 3]}
    assert sent == {name: [(token, -1 - i) for i, token in enumerate(each)] for name, each in tokens.items()}
    assert {request.request_id: request.tokens[1:] for request in requests} == tokens
    ends = {"long": None, "stops": "stop"}  # vLLM's own code ends "long", which is left alone
    assert reasons == dict.fromkeys(tokens, "length") | ends
    assert (scheduler.running, list(scheduler.requests)) == ([requests[0]], ["long"])
    assert scheduler.cached == {request.request_id: request.num_tokens - 1 for request in requests[1:]}
    for request in requests:
        name = request.request_id
        late = name == "stops"  # one iteration was scheduled before its stop token arrived
        assert computed[name] == [request.prompt + i for i in range(len(tokens[name]) + late)]
        assert scheduler.allocated[name] == [number for number in computed[name] if number % BLOCK == 0], name


def test_a_dissolved_batch_leaves_every_request_where_it_is(scheduler_class):
    """Three iterations are scheduled, the tokens of one have arrived, and one request has its last one scheduled."""
    a, b = requests = [Request("a", 3, 12), Request("b", 5, 3)]
    scheduler = scheduler_class(requests)
    iterations = [scheduler.schedule() for _ in range(3)]
    assert [len(iteration.scheduled_cached_reqs.req_ids) for iteration in iterations] == [2, 2, 1]
    assert scheduler.update_from_output(iterations[0], sample(iterations[0], {})) == {}
    assert [(output.request_id, output.tokens) for output in scheduler.pop_unsent()] == [("a", [1]), ("b", [1])]
    assert (a.tokens, a.num_computed_tokens, a.num_output_placeholders) == ([0, 1], 3 + 3, 2)
    assert (b.tokens, b.num_computed_tokens, b.num_output_placeholders) == ([0, 1], 5 + 2, 1)
    assert scheduler.batch is None and scheduler.unsent == []


def test_vllm_is_told_of_the_tokens_of_the_others_after_an_abort(scheduler_class):
    """A batch is dissolved for it. vLLM would not know the aborted request any more."""
    scheduler = scheduler_class([Request("a", 3, 12), Request("b", 5, 12)])
    iteration = scheduler.schedule()
    assert scheduler.update_from_output(iteration, sample(iteration, {})) == {}
    assert scheduler.finish_requests(["a"], "aborted") == [("a", 0)]
    assert scheduler.batch is None
    assert [(output.request_id, output.tokens) for output in scheduler.unsent] == [("b", [1])]


def test_waiting_requests_start_several_at_a_time_and_not_in_the_last_blocks(scheduler_class):
    scheduler = scheduler_class([Request("a", 3, 12), Request("b", 5, 12)], free_blocks=4)
    scheduler.max_num_running_reqs = 64
    assert scheduler.schedule() != "vLLM's own"
    scheduler.waiting = Queue([Request("c", 7, 12)])
    scheduler.free_blocks = 3  # two for its tokens and one for each running request
    assert scheduler.schedule() != "vLLM's own"
    scheduler.free_blocks = 4
    assert scheduler.schedule() == "vLLM's own"
    scheduler.free_blocks = 1000
    for running, waiting, own in ((63, 3, False), (62, 3, True), (63, 1, True), (64, 1, False)):
        scheduler.running = [Request(str(i), 3, 12) for i in range(running)]
        scheduler.waiting = Queue([Request("d", 7, 12)] * waiting)
        assert scheduler._admits_more() == own, (running, waiting)


def test_the_model_runner_is_told_once_which_requests_have_ended(scheduler_class):
    scheduler = scheduler_class([Request("a", 3, 12)])
    scheduler.finished_req_ids = {"before"}
    assert [scheduler.schedule().finished_req_ids for _ in range(2)] == [{"before"}, set()]


def test_a_batch_ends_when_the_blocks_run_out(scheduler_class):
    scheduler = scheduler_class([Request("a", 3, 12), Request("b", 3, 12)], free_blocks=1)
    assert scheduler.schedule() != "vLLM's own"
    assert scheduler.schedule() == "vLLM's own", "both need a block for their fifth token"
