"""Rewards that are an `async def`: how many are open at once, how they fail, and what is told of it."""

import asyncio
import time

import pytest
import torch

from common import plugins
from common.records import Rollout
from config import RewardFlags
from evaluation.scorer import Scorer
from grading.together import GivenUp, Together
from tests.helpers.marks import needs
from tests.helpers.rows import make_sample

ASYNC_REWARDS = """
import asyncio, os, sys, time
import numpy

LOOPS = set()
FAILURES = {
    "raise": RuntimeError("no http://user:secret@host"), "leave": SystemExit(3), "cancel": asyncio.CancelledError(),
    "late": TimeoutError("of its own"),
}

async def judge(completion, answer, question, level=0):
    LOOPS.add(asyncio.get_running_loop())
    await asyncio.sleep(60 if completion == "slow" else 0.1)
    if completion in FAILURES: raise FAILURES[completion]
    if completion == "text": return "good"
    if completion == "block": time.sleep(60)
    if completion == "die": os._exit(3)
    if completion == "none": return None
    if completion == "loops": return len(LOOPS)
    if completion == "steps": return [(0, 2, 1.0), (2, 5, 0.5)]
    return numpy.float32(len(completion) + level) if question == "How many?" else -1.0
"""


def rollouts(*texts: str) -> list[Rollout]:
    return [Rollout(torch.arange(len(text)), torch.zeros(len(text)), text=text) for text in texts]


@pytest.fixture
def scorer(tmp_path) -> Scorer:
    (tmp_path / "user.py").write_text(ASYNC_REWARDS)
    return Scorer("count", RewardFlags(reward=("count=0", f"{tmp_path}/user.py:judge=0.5"), verifier_timeout=2.0))


def scored(scorer: Scorer, *texts: str):
    """Return the reward of each of `texts`, None if it has none, and the error of the round."""
    [group], error = scorer([make_sample("<image>How many?", "3", [], "row 1", {"level": 5})], [rollouts(*texts)])
    return [None if each.total != each.total else each.parts["judge"] for each in group], error


# --- calls ------------------------------------------------------------------------------------------------------------


async def fail(message: str) -> None:
    raise OSError(message)


def test_as_many_calls_are_open_as_may_be():
    together, numbers = Together(5.0, most=4), []
    is_open = 0

    async def call(i: int) -> int:
        nonlocal is_open
        is_open += 1
        numbers.append(is_open)
        await asyncio.sleep(0.02)
        is_open -= 1
        return i

    async def calls() -> list[int]:
        return await asyncio.gather(*(together(call, i) for i in range(20)))

    assert together.start(calls()).result() == list(range(20))
    assert max(numbers) == 4 and together.failures == 0


def test_a_server_that_is_gone_is_given_up_until_it_is_asked_anew():
    together = Together(5.0, most=2)
    for _ in range(4):
        with pytest.raises(OSError, match="refused"):
            together.start(together(fail, "refused")).result()
    with pytest.raises(GivenUp, match="after 4 failures in a row, the last: OSError: refused"):
        together.start(together(fail, "not called")).result()
    together.failures = 0
    assert together.start(together(asyncio.sleep, 0, "reply")).result() == "reply"


def test_a_success_between_failures_means_that_the_server_is_there():
    together = Together(5.0, most=1)
    for _ in range(3):
        with pytest.raises(OSError, match="refused"):
            together.start(together(fail, "refused")).result()
        assert together.start(together(asyncio.sleep, 0, 1)).result() == 1


# --- rewards ----------------------------------------------------------------------------------------------------------


def test_an_async_reward_is_called_for_all_completions_at_once(scorer):
    start = time.perf_counter()
    values, error = scored(scorer, *(["12"] * 600))
    assert error is None and values == [7.0] * 600, "with the columns that it names"
    assert time.perf_counter() - start < 8, "one after the other, they take 60 s"
    [group], _ = scorer([make_sample("How many?", "3", [], "row 1")], [rollouts("12", "steps")])
    assert [each.total for each in group] == [1.0, 0.75], "half of it, and the sum of its parts"
    assert scored(scorer, "loops")[0] == [1.0], "one event loop for all rounds, so that a client can be kept"


def test_a_call_that_fails_or_is_slow_leaves_its_completion_out_and_is_told_once(scorer, capsys):
    failing = ["raise", "leave", "cancel", "late", "slow", "none"]
    for _ in range(2):
        values, error = scored(scorer, "1", *failing, "1")
        assert error is None and values == [6.0, *[None] * 6, 6.0]
    said = capsys.readouterr().err
    for reason in (
        "RuntimeError: no http://***@host",
        "SystemExit: 3",
        "CancelledError:",
        "TimeoutError: of its own",
        "returned None",
    ):
        assert (
            said.count(f"note: a completion without a verdict is left out: {scorer.functions['judge'].name} {reason}")
            == 1
        )
    assert said.count("TimeoutError") == 1, "each kind of failure is printed once"
    values, _ = scored(scorer, "slow")
    assert scorer.unscored_reason.endswith("judge TimeoutError: no complete reply within 2 s (--verifier_timeout)")


def test_what_is_no_number_ends_the_run(scorer):
    values, error = scored(scorer, "1", "text")
    assert values == [6.0, None] and "judge on row 1, 'text': it returned 'good'; expected a finite number" in error


@needs("parts/workers.py")
@pytest.mark.parametrize(("text", "message"), [("block", "took longer than 2.5 s"), ("die", "its process died")])
def test_a_call_that_blocks_the_others_or_ends_their_process_is_killed_with_them(scorer, monkeypatch, text, message):
    monkeypatch.setattr("grading.calls.SPARE", 0.5)
    assert scored(scorer, "1", text, "12") == ([None] * 3, None)
    assert message in scorer.unscored_reason
    assert scored(scorer, "1", "12") == ([6.0, 7.0], None), "the next round has a new process"


def test_without_workers_they_are_awaited_in_the_trainer(tmp_path, monkeypatch):
    monkeypatch.setattr("grading.calls.extra", lambda name, is_needed: None)
    monkeypatch.setattr(plugins, "_modules", {})
    (tmp_path / "user.py").write_text(ASYNC_REWARDS)
    scorer = Scorer("count", RewardFlags(reward=("count=0", f"{tmp_path}/user.py:judge"), verifier_timeout=1.0))
    assert scored(scorer, "1", "raise", "leave", "slow", "loops") == ([6.0, None, None, None, 1.0], None)


def test_the_reward_of_a_plugins_task_may_be_async(tmp_path, monkeypatch):
    import rewards

    monkeypatch.setattr(plugins, "_modules", {})
    (tmp_path / "user.py").write_text(ASYNC_REWARDS)
    judge = plugins.import_file(f"{tmp_path}/user.py").judge
    monkeypatch.setitem(rewards.TASKS, "judge", rewards.Task(judge))
    assert scored(Scorer("judge", RewardFlags()), "1", "raise") == ([6.0, None], None)
