"""User-defined rewards: their weights, what they return, and how they fail."""

import io
import pathlib
import re
import sys
import time

import pytest
import torch
from PIL import Image

import rewards
from common import cli
from common.errors import UserError
from common.records import Rollout
from config import RewardFlags
from evaluation.scorer import Scorer
from tests.helpers.marks import needs
from tests.helpers.rows import make_sample


def think(answer: str) -> str:
    return f"<think>t</think>\n<answer>{answer}</answer>"


USER_REWARDS = """
import time
from neighbour import scale

def brief(completion, answer, **fields): return scale(-len(completion))
def level(completion, answer, level): return level
def slow(completion, answer, **fields):
    if "slow" in completion: time.sleep(60)
    return 1
def broken(completion, answer, **fields): return 1 / 0
def text(completion, answer, **fields): return "good"
def infinite(completion, answer, **fields): return float("inf")
def enormous(completion, answer, **fields): return 10**400
def endless(completion, answer, **fields): return 10**5000
def novel(completion, answer, **fields): return "x" * 50_000_000
def nothing(completion, answer, **fields): return None
def unfit(text): return 1
"""


@pytest.fixture
def user_file(tmp_path) -> str:
    (tmp_path / "user.py").write_text(USER_REWARDS)
    (tmp_path / "neighbour.py").write_text("def scale(x):\n    return x / 10\n")
    return str(tmp_path / "user.py")


def rollouts(*texts: str) -> list[Rollout]:
    return [Rollout(torch.arange(len(text)), torch.zeros(len(text)), text=text) for text in texts]


def scored(user_file: str, *flags: str, task: str = "count", texts=("3", "4 or so"), buffer: int = 0, **more):
    scorer = Scorer(
        task, RewardFlags(reward=tuple(flag.replace("user:", f"{user_file}:") for flag in flags), **more), buffer
    )
    sample = make_sample("<image>How many?", "3", [], "d.csv row 2", {"level": 5})
    [rewards], error = scorer([sample], [rollouts(*texts)], 10)
    return scorer, rewards, error


def test_own_rewards_add_up_with_their_weights(user_file):
    scorer, group, error = scored(user_file, "user:brief=0.5", "user:level=-1", "format", buffer=5)
    assert error is None
    assert list(scorer.all_weights) == ["count", "brief", "level", "format", "overlong"]
    assert [r.parts for r in group] == [
        {"count": 1.0, "brief": -0.1, "level": 5.0, "format": 0.0, "overlong": 0.0},
        {"count": 0.85, "brief": -0.7, "level": 5.0, "format": 0.0, "overlong": pytest.approx(-0.4)},
    ]
    assert [r.total for r in group] == pytest.approx([1 - 0.05 - 5, 0.85 - 0.35 - 5 - 0.4])


def test_the_tasks_own_weight_can_be_set(user_file):
    _, group, _ = scored(user_file, "count=0", "user:brief=1e1")
    assert [r.total for r in group] == pytest.approx([-1.0, -7.0])


@needs("parts/workers.py")
def test_a_reward_that_takes_too_long_gives_no_verdict_and_holds_nobody_up(user_file, monkeypatch):
    monkeypatch.setattr(rewards, "REWARD_TIMEOUT", 1.0)
    start = time.perf_counter()
    scorer, group, error = scored(user_file, "user:slow", texts=("3", "slow 1", "3", "slow 2", "3"))
    assert error is None
    assert [r.total == r.total for r in group] == [True, False, True, False, True]
    assert "user.py:slow took longer than 1 s" in scorer.unscored_reason
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize(
    ("name", "message"),
    [("broken", "ZeroDivisionError"), ("text", "it returned 'good'"), ("infinite", "it returned inf")],
)
def test_a_reward_that_fails_names_row_and_completion(user_file, name, message):
    _, group, error = scored(user_file, f"user:{name}")
    assert f"user.py:{name} on d.csv row 2, '3': " in error
    assert message in error
    assert group[0].total != group[0].total


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("enormous", "00; expected a finite number"),
        ("endless", "it returned an integer above 1e308; expected a finite number"),
        ("novel", "it returned 'xxxxxxxxxxxx...xxxxxxxxxxxxx'; expected a finite number"),
    ],
)
def test_whatever_a_reward_returns_the_message_is_short(user_file, name, message):
    _, group, error = scored(user_file, f"user:{name}")
    assert message in error
    assert len(error) < 400
    assert group[0].total != group[0].total


def test_columns_of_any_name_reach_a_reward(user_file):
    scorer = Scorer("count", RewardFlags(reward=(f"{user_file}:brief",)))
    fields = {"name": "x", "seconds": 3, "self": 1, "verifier": "y", "question": None}
    _, error = scorer([make_sample("<image>?", "3", [], "r", fields)], [rollouts("3")])
    assert error is None


@pytest.mark.parametrize("text", ["<|begin_of_box|>3<|end_of_box|>", "3<|end_of_box|>", "<|begin_of_box|>3"])
def test_a_reward_of_ones_own_sees_no_marks(user_file, text):
    _, [rewards], error = scored(user_file, "user:brief", texts=(text,))
    assert error is None
    assert rewards.parts["brief"] == -0.1


def test_none_means_no_verdict(user_file):
    scorer, group, error = scored(user_file, "user:nothing")
    assert error is None
    assert all(r.total != r.total for r in group)
    assert "user.py:nothing returned None" in scorer.unscored_reason


def test_a_task_of_ones_own_may_return_none(monkeypatch):
    monkeypatch.setitem(rewards.TASKS, "silent", rewards.Task(lambda completion, answer, **_: None))
    scorer = Scorer("silent", RewardFlags())
    [group], error = scorer([make_sample("?", "3", [], "r")], [rollouts("3")])
    assert error is None and group[0].total != group[0].total
    assert scorer.unscored_reason == "silent returned None"


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("user:unfit", r"must be a function of \(completion, answer"),
        ("user:missing", r"cannot be loaded .AttributeError: .*user.py has no missing, but brief, [\w, ]+\)$"),
        ("/nowhere/x.py:f", "cannot be loaded .FileNotFoundError: .*/nowhere/x.py"),
        ("lenght=0.5", "give file.py:function or one of count, vqa, math, format"),
        ("user:brief=heavy", "the weight must be a finite number"),
        ("user:overlong", "a reward named 'overlong' already exists"),
        ("user:format", "a reward named 'format' already exists"),
        ("user:brief=1.2.3", "the weight must be a finite number"),
        ("", "give file.py:function"),
        ("leaves.py:f", "cannot be loaded .SystemExit: 3"),
    ],
)
def test_rewards_that_cannot_be_used_are_refused_at_the_start(user_file, flag, message):
    leaves = pathlib.Path(user_file).with_name("leaves.py")
    leaves.write_text("import sys; sys.exit(3)\n")
    flag = flag.replace("user:", f"{user_file}:").replace("leaves.py", str(leaves))
    with pytest.raises(UserError, match=rf"--reward .*{message}"):
        Scorer("count", RewardFlags(reward=(flag,)))


def test_a_column_that_a_reward_requires_and_a_row_lacks_is_named(tmp_path):
    (tmp_path / "r.py").write_text(
        "def by_level(completion, answer, level, unit='cm', *rest, **fields): return level\n"
    )
    scorer = Scorer("count", RewardFlags(reward=(f"{tmp_path}/r.py:by_level",)))
    complete = make_sample("?", "3", [], "a.csv row 1", {"level": 2})
    scorer.check_columns([complete])
    for fields in ({}, {"level": None}, {"unit": "m"}):
        with pytest.raises(
            UserError, match=r"--reward by_level: a\.csv row 2 has no 'level': add this column, or give"
        ):
            scorer.check_columns([complete, make_sample("?", "3", [], "a.csv row 2", fields)])


IMAGE_REWARDS = """
def required(completion, answer, images): return sum(image.width for image in images)
def optional(completion, answer, images=None): return len(images)
def beside(completion, answer, images, level, **fields): return images[0].getpixel((0, 0))[0] + level
def all_fields(completion, answer, **fields): return float("images" in fields)
def modes(completion, answer, images, question): return float({image.mode for image in images} <= {"RGB"})
"""


@pytest.mark.parametrize(
    ("reward", "want"),
    [("required", [100, 0]), ("optional", [2, 0]), ("beside", [255 + 5]), ("all_fields", [0, 0]), ("modes", [1, 1])],
)
def test_a_reward_gets_the_images_of_its_row(tmp_path, reward, want):
    """As upright RGB images of their own size, however the row gives them; an empty list for a row without images."""
    (tmp_path / "r.py").write_text(IMAGE_REWARDS)
    Image.new("RGBA", (40, 20), "red").save(tmp_path / "a.png")
    Image.new("L", (60, 20)).save(png := io.BytesIO(), "PNG")
    images = [tmp_path / "a.png", {"bytes": png.getvalue(), "path": None}]
    samples = [make_sample("<image><image>?", "3", images, "row 1", {"level": 5}), make_sample("?", "3", [], "row 2")]
    samples = samples[: len(want)]
    scorer = Scorer("count", RewardFlags(reward=(f"{tmp_path}/r.py:{reward}",)))
    scorer.check_columns(samples)
    groups, error = scorer(samples, [rollouts("3", "4")] * len(samples))
    assert error is None
    assert [[each.parts[reward] for each in group] for group in groups] == [[value] * 2 for value in want]


def test_images_that_a_reward_cannot_get_are_named(tmp_path):
    (tmp_path / "r.py").write_text(IMAGE_REWARDS)
    scorer = Scorer("count", RewardFlags(reward=(f"{tmp_path}/r.py:required",)))
    for images, message in (
        ([], "row 1: saved predictions hold no images"),
        ([tmp_path / "gone.png"], r"row 1: an image can no longer be read \(.*gone\.png.*: restore or replace it"),
        ([b"nonsense"], "row 1: an image can no longer be read"),
    ):
        with pytest.raises(UserError, match=message):
            scorer([make_sample("<image>?", "3", images, "row 1")], [rollouts("3")])


def test_two_rewards_of_one_name_are_refused_and_the_last_weight_of_one_counts(user_file, tmp_path):
    other = tmp_path / "other" / "user.py"
    other.parent.mkdir()
    other.write_text("def brief(completion, answer):\n    return 1.0\n")
    with pytest.raises(UserError, match="a reward named 'brief' already exists"):
        Scorer("count", RewardFlags(reward=(f"{user_file}:brief", f"{other}:brief")))
    flags = RewardFlags(reward=("format=0.3", f"{user_file}:brief", f"{user_file}:brief=2", "format=0.7"))
    assert Scorer("count", flags).weights == {"count": 1.0, "format": 0.7, "brief": 2.0}


def test_gold_answers_must_suit_a_task_only_if_its_reward_counts(user_file):
    for reward, gold_task in [((), "count"), (("format",), "count"), (("count=0", f"{user_file}:brief"), None)]:
        assert Scorer("count", RewardFlags(reward=reward)).gold_task == gold_task


@needs("parts/workers.py")
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import time; time.sleep(99)", "took longer than 1 s"),
        ("import os; os._exit(3)", "its process died"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})", "Odd"),
        ("def f(completion): pass", "it must be a function of"),
    ],
)
def test_a_reward_that_cannot_be_imported_is_refused(tmp_path, monkeypatch, code, message):
    monkeypatch.setattr(rewards, "REWARD_TIMEOUT", 1.0)
    (tmp_path / "r.py").write_text(code)
    with pytest.raises(UserError, match=message):
        Scorer("count", RewardFlags(reward=(f"{tmp_path}/r.py:f",)))


@needs("parts/workers.py")
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("open(__file__ + '.lock', 'x')", r"r.py:f cannot be loaded \(FileExistsError"),
        ("class Odd(Exception):\n    def __str__(self): return 1 / 0", "Odd"),
        (
            "class Odd:\n    def __reduce__(self): return int, ('a',)\n    def __init__(self): pass",
            "cannot be unpickled",
        ),
        ("class Odd(float):\n    __reduce__ = float.__reduce__", "cannot be unpickled"),
    ],
)
def test_odd_rewards_give_one_line(tmp_path, code, message):
    action = {"O": "raise Odd()", "o": "return 1.0"}["O" if "Exception" in code else "o"]
    action = "return Odd()" if "reduce" in code else action
    (tmp_path / "r.py").write_text(f"{code}\n\ndef f(completion, answer):\n    {action}\n")
    scorer = Scorer("count", RewardFlags(reward=(f"{tmp_path}/r.py:f",)))
    rollout = Rollout(torch.tensor([1]), torch.tensor([0.0]), False, "1")
    _, error = scorer([make_sample("q", "1", [], "row 1")], [[rollout]])
    assert re.search(message, error), error


def test_a_reward_that_would_overflow_is_an_error(tmp_path):
    (tmp_path / "r.py").write_text("def f(completion, answer):\n    return 1e39\n")
    scorer = Scorer("count", RewardFlags(reward=(f"{tmp_path}/r.py:f",)))
    rollout = Rollout(torch.tensor([1]), torch.tensor([0.0]), False, "1")
    _, error = scorer([make_sample("q", "1", [], "row 1")], [[rollout]])
    assert "it returned 1e+39; expected a finite number" in error
    with pytest.raises(UserError, match="the weight must be a finite number below 1e"):
        Scorer("count", RewardFlags(reward=("format=1e30",)))


def test_without_workers_a_reward_is_called_in_the_trainer_and_one_line_says_so(user_file, monkeypatch, capsys):
    monkeypatch.setattr("grading.calls.extra", lambda name, is_needed: None)
    _, _, error = scored(user_file, "user:brief", "user:broken")
    assert "user.py:broken" in error and "ZeroDivisionError" in error
    assert "a reward that hangs, hangs the run" in capsys.readouterr().err


def test_without_its_part_mathematics_is_refused_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "parts.math", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        Scorer("math", RewardFlags())
    assert cli._in_one_line(caught.value)[0].startswith("error: this needs parts/math, which is not here")
