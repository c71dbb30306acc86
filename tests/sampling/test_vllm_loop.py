"""Run requests in vLLM, and what follows them, without vLLM: its engine is played by `FakeEngine`.

tests/test_vllm.py runs the real one. Guards against: requests that are lost, begun twice, or all prepared before the
GPU has anything to do; turns that wait for each other; prompts that are prepared twice or joined at the wrong place;
tokens of interrupted requests that are forgotten; and requests or threads that an error leaves behind.
"""

import threading
from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from common.errors import UserError
from common.records import Output, Prompt, Request
from sampling.hf_engine import NOTHING, PAUSE_EVERY
from sampling.vllm_loop import ADDED_TOGETHER, RequestLoop, joined, request_seed
from tests.helpers.fake_vllm import STOP, FakeEngine


def prompt_of(ids: list[int], **more) -> Prompt:
    return Prompt(torch.tensor(ids), ids, torch.zeros(1, len(ids)), source="row 3", **more)


def requests_of(lengths: list[int], per_prompt: int = 1) -> list[Request]:
    prompts = [prompt_of([k] * (1 + k // per_prompt % 7)) for k in range(0, len(lengths), per_prompt)]
    return [Request(prompts[k // per_prompt], NOTHING.ids, 5, k, tokens) for k, tokens in enumerate(lengths)]


@pytest.fixture
def loop(monkeypatch):
    """Return what runs requests. They end at their limits, or after a turn of one token if something follows."""

    def run(requests, then=None, should_stop=None):
        loop.requests = RequestLoop(
            SimpleNamespace(llm_engine=engine),
            requests,
            lambda prompt: rendered.append((len(engine.running), prompt)) or as_input(prompt),
            lambda request: SimpleNamespace(max_tokens=request.max_tokens),
            then,
            should_stop,
        )
        engine.length_of = (lambda inputs, params: 1) if then else (lambda inputs, params: None)
        return loop.requests.run()

    engine, rendered = FakeEngine(monkeypatch, None), []
    loop = SimpleNamespace(run=run, engine=engine, rendered=rendered)
    return loop


def as_input(prompt: Prompt) -> dict:
    return {"type": "token", "prompt_token_ids": prompt.engine_ids}


def test_requests_begin_while_others_run_and_none_is_lost(loop):
    lengths = [1 + k % 20 for k in range(100)]
    requests = requests_of(lengths)
    outputs = loop.run(requests)
    prepared = Counter(step for step, _ in loop.rendered)
    assert [prepared[step] for step in range(4)] == [ADDED_TOGETHER] * 3 + [100 - 3 * ADDED_TOGETHER]
    want = [[len(each.prompt.ids), *range(1, each.max_tokens)] for each in requests]
    assert [output.ids.tolist() for output in outputs] == want
    assert {output.reason for output in outputs} == {"length"}
    assert outputs[2].logp.tolist() == [-1.0, -2.0, -3.0]


def test_a_prompt_is_prepared_once_and_the_longest_begins_first(loop):
    requests = requests_of([2] * 12, per_prompt=4)
    requests[4].prompt.expected_length = 9.0
    loop.run(requests)
    assert [prompt for _, prompt in loop.rendered] == [requests[k].prompt for k in (4, 0, 8)]
    assert [k for k, *_ in loop.engine.begun] == [4, 5, 6, 7, 0, 1, 2, 3, 8, 9, 10, 11]


def test_what_is_interrupted_keeps_its_tokens(loop):
    """After 16 iterations, the first 512 requests have begun, and those of one token have ended."""
    outputs = loop.run(requests_of([1 if k % 2 else 99 for k in range(600)]), should_stop=lambda over: len(over) >= 200)
    assert loop.engine.taken == []
    assert len(loop.engine.aborted) == 256 and not loop.engine.request_states
    assert (outputs[1].ids.tolist(), outputs[1].reason) == ([2], "length")
    assert (outputs[0].ids.tolist(), outputs[0].reason) == ([1, *range(1, 16)], None)
    assert len(outputs[510].ids) == 1 and outputs[512:] == [NOTHING] * 88


def test_a_request_goes_on_behind_its_tokens(loop):
    (request,) = requests_of([4])
    loop.run([replace(request, tokens=torch.tensor([8, 9]), max_tokens=2)])
    ((_, inputs, params),) = loop.engine.begun
    assert inputs["prompt_token_ids"] == [0, 8, 9] and params.max_tokens == 2
    seeds = {request_seed(replace(request, index=i, max_tokens=n), 4) for i in range(3) for n in range(1, 5)}
    assert len(seeds) == 12, "vLLM starts its random numbers anew with every request"


# --- turns ------------------------------------------------------------------------------------------------------------

TURNS = 3


class Talk:
    """Lets each of `requests` see a token 8 after each turn but the last. `answers[k]` is called before."""

    def __init__(self, requests: list[Request], answers: dict | None = None, seen: int = 1):
        self.requests, self.answers, self.seen, self.turns = requests, answers or {}, seen, Counter()

    def then(self, k: int, output: Output) -> Request | None:
        assert output.ids.tolist() == [STOP] and output.reason == "stop"
        self.turns[k] += 1
        self.answers.get(k, lambda turn: None)(self.turns[k])
        if self.turns[k] == TURNS:
            return None
        added, before = prompt_of([STOP] + [8] * self.seen), self.requests[k].prompt
        prompt = replace(prompt_of(before.engine_ids + added.engine_ids), extends=(before, added))
        self.requests[k] = replace(self.requests[k], prompt=prompt)
        return self.requests[k]


def test_every_turn_is_a_request_that_renders_only_what_is_new(loop):
    talk = Talk(requests_of([9] * 6, per_prompt=3))
    assert [output.reason for output in loop.run(talk.requests[:], talk.then)] == ["stop"] * 6
    assert Counter(k for k, *_ in loop.engine.begun) == dict.fromkeys(range(6), TURNS)
    rendered = Counter(tuple(prompt.engine_ids) for _, prompt in loop.rendered)
    assert rendered == {(0,): 1, (3, 3): 1, (STOP, 8): 6 * (TURNS - 1)}
    last = [inputs["prompt_token_ids"] for k, inputs, _ in loop.engine.begun if k == 0][-1]
    assert last == [0] + [STOP, 8] * (TURNS - 1)


def test_a_turn_does_not_wait_for_the_answers_of_another(loop):
    """The answer to one of them comes when the other has taken its last turn."""
    is_over = threading.Event()
    slow = lambda turn: is_over.wait(30) or pytest.fail("it was waited for")  # noqa: E731
    talk = Talk(requests_of([9, 9]), {0: slow, 1: lambda turn: is_over.set() if turn == TURNS else None})
    loop.run(talk.requests[:], talk.then)
    assert [k for k, *_ in loop.engine.begun][-2:] == [0, 0]


def test_turns_that_are_interrupted_go_on_later(loop):
    """Nothing is forgotten: an answer that comes after there is enough is waited for."""
    talk, stopped, asked = Talk(requests_of([9, 9, 9])), threading.Event(), []
    talk.answers = {0: lambda turn: turn == 2 and stopped.wait(30)}
    enough = lambda over: asked.append(set(over)) or (len(over) == 2 and (stopped.set() or True))  # noqa: E731
    outputs = loop.run(talk.requests[:], talk.then, enough)
    assert asked[-1] == {1, 2} and [output.reason for output in outputs] == [None, "stop", "stop"]
    assert talk.turns[0] == 2 and not len(outputs[0].ids)
    assert loop.requests.requests[0] is talk.requests[0], "its third turn is asked for"


def broken(turn: int) -> None:
    if turn == 2:
        raise RuntimeError("broken")


@pytest.mark.parametrize(
    ("first", "seen", "error", "message"),
    [
        (broken, 1, RuntimeError, "broken"),
        (lambda turn: None, 100, UserError, "row 3: vLLM refuses the request: too long"),
    ],
)
def test_an_error_gives_the_others_up_without_waiting_for_them(loop, first, seen, error, message):
    """They wait for an answer."""
    end = threading.Event()
    talk = Talk(requests_of([9] * 11), dict.fromkeys(range(1, 11), lambda turn: end.wait(30)) | {0: first}, seen)
    try:
        with pytest.raises(error, match=message):
            loop.run(talk.requests[:], talk.then)
        assert not end.is_set() and not loop.engine.request_states
    finally:
        end.set()


@dataclass(frozen=True)
class Place:
    offset: int
    length: int


def test_the_images_of_an_answer_follow_those_before():
    def with_image(ids: list[int], name: str, place: Place) -> dict:
        inputs = {"type": "multimodal", "prompt_token_ids": ids, "arrival_time": 1.0}
        return inputs | {
            "mm_kwargs": {"image": [name]},
            "mm_hashes": {"image": [name]},
            "mm_placeholders": {"image": [place]},
        }

    text = {"type": "token", "prompt_token_ids": [1, 2]}
    first = joined(text, with_image([7, 7, 3, 5, 5, 4], "a", Place(3, 2)))
    assert first["prompt_token_ids"] == [1, 2, 7, 7, 3, 5, 5, 4]
    second = joined(first, with_image([7, 5], "b", Place(1, 1)))
    third = joined(second, {"type": "token", "prompt_token_ids": [7, 9]})
    assert third["prompt_token_ids"] == [1, 2, 7, 7, 3, 5, 5, 4, 7, 5, 7, 9]
    assert third["type"] == "multimodal"
    assert third["mm_kwargs"] == third["mm_hashes"] == {"image": ["a", "b"]}
    assert third["mm_placeholders"] == {"image": [Place(5, 2), Place(9, 1)]}
    assert text == {"type": "token", "prompt_token_ids": [1, 2]}, "the turn before is another request's, too"


def test_processes_that_have_nothing_to_sample_are_asked_too(loop):
    asked = []
    assert loop.run([], should_stop=lambda over: asked.append(over) or len(asked) == 3) == []
    assert len(asked) == 3 and not loop.engine.running and PAUSE_EVERY > 1
