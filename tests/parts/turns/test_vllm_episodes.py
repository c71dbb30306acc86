"""Episodes of several turns in vLLM, without vLLM: its engine is played by `Engine`, and each turn has one token.

tests/test_vllm.py runs the real one. Guards against: episodes that wait for each other, prompts that are prepared twice
or joined at the wrong place, and requests or threads that an error leaves behind.
"""

import sys
import threading
from collections import Counter
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest
import torch

pytest.importorskip("parts.turns", reason="needs parts/turns, which is not here")

from common.errors import UserError
from common.records import Prompt
from parts.turns.vllm_episodes import EpisodeLoop, extended

TURNS = 3


class Engine:
    """Ends every request in the next step, with the token 7."""

    def __init__(self):
        self.output_processor, self.request_states, self.begun = self, {}, []

    def add_request(self, name, inputs, params):
        assert params.output_kind == "final"
        if len(inputs["prompt_token_ids"]) > 100:
            raise ValueError("too long")
        self.request_states[name] = inputs["prompt_token_ids"]
        self.begun.append(name)

    def has_unfinished_requests(self):
        return bool(self.request_states)

    def step(self):
        sampled = SimpleNamespace(token_ids=[7], logprobs=SimpleNamespace(logprobs=[-1.0]), finish_reason="stop")
        states, self.request_states = self.request_states, {}
        return [
            SimpleNamespace(finished=True, request_id=name, outputs=[sampled], prompt_token_ids=ids)
            for name, ids in states.items()
        ]

    def abort_request(self, names, internal):
        for name in names:
            del self.request_states[name]


def prompt_of(ids: list[int]) -> Prompt:
    return Prompt(torch.tensor(ids), ids, torch.zeros(1, len(ids)), source="row 3")


@dataclass
class Episode:
    """Sees a token 8 after each turn but the last. `answer` is called before it does, with the number of the turn."""

    answer: object
    length: int = 1  # of what it sees

    def __post_init__(self):
        self.prompt, self.trajectory, self.turns = prompt_of([1, 2]), prompt_of([]), 0
        self.trajectory.ids, self.logp = torch.empty(0, dtype=torch.long), torch.empty(0)
        self.trajectory.turn_lengths = [1]

    def step(self, ids, logp, stopped, room):
        assert stopped and room == 9 - self.turns
        self.turns += 1
        self.answer(self.turns)
        self.logp = torch.cat([self.logp, logp])
        self.added = prompt_of([8] * self.length)
        self.trajectory.ids = torch.cat([self.trajectory.ids, ids, self.added.ids])
        return self.turns < TURNS


@pytest.fixture
def run(monkeypatch):
    """Return a function that runs groups of episodes, and returns the engine and what was rendered."""
    module = ModuleType("vllm.sampling_params")
    module.RequestOutputKind = SimpleNamespace(FINAL_ONLY="final")
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", module)
    engine, rendered = Engine(), []

    def render(prompt):
        rendered.append(prompt.engine_ids)
        return {"type": "token", "prompt_token_ids": prompt.engine_ids}

    def run_groups(groups):
        EpisodeLoop(SimpleNamespace(llm_engine=engine), groups, render, lambda i, j: SimpleNamespace(), 10).run()

    run_groups.engine, run_groups.rendered = engine, rendered
    return run_groups


def test_every_turn_is_a_request_and_a_group_is_prepared_once(run):
    run([[Episode(lambda turn: None) for _ in range(3)] for _ in range(2)])
    assert Counter(run.engine.begun) == {f"{i} {j}": TURNS for i in range(2) for j in range(3)}
    assert Counter(map(tuple, run.rendered)) == {(1, 2): 2, (8,): 2 * 3 * (TURNS - 1)}


def test_an_episode_does_not_wait_for_the_answers_of_another(run):
    """The answer to one of them comes when the other has taken its last turn."""
    is_over = threading.Event()
    slow = Episode(lambda turn: is_over.wait(30) or pytest.fail("it was waited for"))
    run([[slow, Episode(lambda turn: is_over.set() if turn == TURNS else None)]])
    assert run.engine.begun[-2:] == ["0 0", "0 0"]


def broken(turn: int) -> None:
    if turn == 2:
        raise RuntimeError("broken")


@pytest.mark.parametrize(
    ("episode", "error", "message"),
    [
        (lambda: Episode(broken), RuntimeError, "broken"),
        (lambda: Episode(lambda turn: None, length=100), UserError, "row 3: vLLM refuses a turn: too long"),
    ],
)
def test_an_error_gives_the_others_up_without_waiting_for_them(run, episode, error, message):
    """They wait for an answer."""
    end = threading.Event()
    waiting = [Episode(lambda turn: end.wait(30)) for _ in range(10)]
    try:
        with pytest.raises(error, match=message):
            run([[episode(), *waiting[:4]], waiting[4:]])
        assert not end.is_set() and not run.engine.request_states
    finally:
        end.set()


def test_a_prompt_that_vllm_sees_otherwise_is_refused(run):
    def forget_a_token(turn: int) -> None:
        episode.prompt = prompt_of([1])

    episode = Episode(forget_a_token)
    with pytest.raises(UserError, match="row 3: vLLM expands the prompt to 4 tokens that differ"):
        run([[episode]])


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
    first = extended(text, [7, 7], with_image([3, 5, 5, 4], "a", Place(1, 2)))
    assert first["prompt_token_ids"] == [1, 2, 7, 7, 3, 5, 5, 4]
    second = extended(first, [7], with_image([5], "b", Place(0, 1)))
    third = extended(second, [7], {"type": "token", "prompt_token_ids": [9]})
    assert third["prompt_token_ids"] == [1, 2, 7, 7, 3, 5, 5, 4, 7, 5, 7, 9]
    assert third["type"] == "multimodal"
    assert third["mm_kwargs"] == third["mm_hashes"] == {"image": ["a", "b"]}
    assert third["mm_placeholders"] == {"image": [Place(5, 2), Place(9, 1)]}
    assert text == {"type": "token", "prompt_token_ids": [1, 2]}, "the turn before is another request's, too"
