"""Math and user-defined rewards, workers that can be killed, and texts that must not make a reward fail or hang."""

import io
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from PIL import Image

import rewards
from common.errors import CallFailed, CallLost, UserError
from common.records import Rollout
from config import RewardFlags
from evaluation.scorer import Scorer
from grading import answers, math_workers
from grading.sandbox import WorkerPool
from grading.verifier import parse_verdict
from tests.helpers.marks import slow
from tests.helpers.rows import make_sample
from tests.helpers.scripts import ROOT, VECTORS

CASES = [json.loads(line) for line in (VECTORS / "math.jsonl").read_text().splitlines()]
NOTATION = [json.loads(line) for line in (VECTORS / "math_notation.jsonl").read_text().splitlines()]


def think(answer: str) -> str:
    return f"<think>t</think>\n<answer>{answer}</answer>"


# --- mathematics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['completion'][-40:]} {c['note']}")
def test_math_vectors(case):
    calls = []

    def verifier(question, gold, candidate):
        calls.append((question, gold, candidate))
        return None if case["verifier_reply"] == "<exception>" else parse_verdict(case["verifier_reply"])

    verifier_or_none = verifier if case["verifier_reply"] is not None else None
    assert rewards.math_reward(case["completion"], case["answer"], "q", verifier_or_none) == case["want"]
    assert bool(calls) == case["verifier_called"]
    assert all(call[:2] == ("q", case["answer"]) for call in calls)


@pytest.mark.parametrize(
    ("candidate", "gold", "want"),
    [
        ("\\boxed{3} or \\boxed{4}", "4", True),  # the last box counts
        ("\\boxed{3} or \\boxed{4}", "3", False),
        ("\\boxed{\\frac{1}{\\sqrt{2}}}", "\\frac{\\sqrt{2}}{2}", True),
        ("\\boxed{\\boxed{7}}", "7", True),
        ("3} \\boxed{4", "4", False),  # becomes two answers when wrapped in \boxed{}
        ("3, 4", "3", False),
        ("3 or 4", "4", False),
        ("x = 3, x = 4", "3", False),
        ("\\{1, 2\\}", "\\{2, 1\\}", True),
        ("(1, 2)", "[1, 2]", False),
        ("$\\frac{1}{3}$", "1/3", True),
        ("x^2 + 2x + 1", "(x+1)^2", True),
        ("1,000", "1000", True),
        ("50\\%", "0.5", True),
        ("12\\sqrt{3}", "12 \\sqrt { 3 }", True),
        ("listen", "silent", False),  # math-verify reads a word as a product of letters
        ("Theorem of Pythagoras", "theorem of pythagoras.", True),
        ("\\text{obtuse}", "obtuse", True),
        ("b", "B", True),
        ("(C)", "C", True),
        ("", "3", False),
        ("9^{9^{9}}", "3", False),
        ("$5$.", "5", True),
        ("\\text{B}.", "B", True),
        ("on", "No", False),
        ("no.", "No", True),
        ("5 \\text{ km}", "5 \\text{ m}", False),
        ("5 \\text{ cm}", "5", True),
        ("1=5", "5", False),
        ("x=5", "5", True),
        ("30°", "30", True),
        ("30\\degree", "30", True),
        ("30^{\\circ}", "30°", True),
        ("45°", "45 cm", False),
        ("√3/2", "\\frac{\\sqrt{3}}{2}", True),
        ("2√3", "2\\sqrt{3}", True),
        ("½", "0.5", True),
        ("2½", "2.5", True),
        ("x²+1", "x^2+1", True),
        ("1e-3", "0.001", True),
        ("0.1\\overline{6}", "\\frac{1}{6}", True),
        ("5 cm^2", "5", True),
        ("5 square centimeters", "5\\text{ cm}^2", True),
        ("5 cm", "5 cm^2", False),
        ("5 km", "5 m", False),
        ("5 km/h", "5 m/s", False),
        ("5m", "5 m", True),
        ("3t", "3", False),  # a product, not three tonnes
        ("5 million", "5", False),
        ("\\varnothing", "\\emptyset", True),
        ("\\{\\}", "∅", True),
        ("A. 5 cm", "A", True),
        ("A. 5 cm", "B", False),
        ("A. 5 cm or B. 6 cm", "A", False),
        ("BC", "CB", True),  # a product, as the docstring says
        ("1 2", "3", False),  # math-verify reads a mixed number
        ("2 1/2", "2.5", True),
        ("101_2", "101_3", False),
        ("$3$ or $4$", "4", False),
        ("it is not 42", "42", False),
        ("2 because 3 + 4 = 7", "7", False),
        ("\\begin{bmatrix}1&2\\\\ 3&4\\end{bmatrix}", "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", True),
        ("6 \\to 5", "5", False),
        ("6 \\cup 5", "5", False),
        ("\\neg 5", "5", False),
        ("5_6", "5", False),
    ],
)
def test_same_answer(candidate, gold, want):
    assert rewards.math_reward(think(candidate or " "), gold) == (1.0 if want else -1.0)


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("30°", "30"),
        ("The area is 12 square units.", "12"),
        ("The value is $12$.", "12"),
        ("The answer is Pythagorean theorem", "Pythagorean theorem"),
        ("so \\(\\frac{1}{2}\\) of the whole remains", "0.5"),
        ("A. 5 cm", "A"),
    ],
)
def test_training_rewards_what_evaluation_accepts(text, gold):
    table = pytest.importorskip("parts.benchmarks.table", reason="needs parts/benchmarks, which is not here")
    assert table.judge_math(text, gold, {}, None).correct
    assert rewards.math_reward(think(text), gold) == 1.0


def pairs(name: str) -> list[dict]:
    return [json.loads(line) for line in (VECTORS / f"{name}_pairs.jsonl").read_text().splitlines()]


def test_pairs_written_without_a_look_at_the_code():
    """At most 2 wrong answers may be accepted and 5 right ones rejected; docs/rewards.md compares other scorers."""
    too_much, too_little = [], []
    for pair in pairs("math"):
        correct = rewards.math_reward(think(pair["answer"]), pair["gold"]) == 1.0
        if correct != pair["equal"]:
            (too_much if correct else too_little).append(pair)
    for pair in pairs("vqa"):
        reward = rewards.vqa_reward(think(pair["answer"]), pair["gold"])
        exact = reward == 1.0
        if exact != pair["exact"] or (reward == 0) != pair["wrong"]:
            (too_much if exact > pair["exact"] or (reward > 0 and pair["wrong"]) else too_little).append(pair)
    assert len(too_much) <= 2, too_much
    assert len(too_little) <= 5, too_little


@pytest.mark.parametrize("kind", sorted({row["kind"] for row in NOTATION}))
def test_answers_in_many_notations(kind):
    """Each file row is one form in which models write an answer, or a wrong answer that looks similar."""
    rows = [row for row in NOTATION if row["kind"] == kind]
    wrong = [row for row in rows if (rewards.math_reward(think(row["answer"]), row["gold"]) == 1.0) != row["equal"]]
    assert len(rows) >= 5
    assert not wrong


def test_the_verifier_gets_the_last_box_alone():
    calls = []
    rewards.math_reward(think("I say \\boxed{a {b} c}."), "zebra", "q", lambda *call: calls.append(call))
    assert calls == [("q", "zebra", "a {b} c")]


def test_padding_an_answer_does_not_take_it_from_the_verifier():
    calls = []
    assert rewards.math_reward(think("7 " * 5000), "seven things", "q", lambda *call: calls.append(call)) == -1
    assert not calls


@pytest.mark.parametrize("answer", ["$5$ | 6", "$5$ . 6", "$5$ ⇒ 6", "5 ≈ $6$", r"5 \notin 6", r"5 \not= 6", "5 ， 6"])
def test_no_text_is_two_answers_at_once(answer):
    """At most the one formula of a sentence counts, and never the number at its end as well."""
    assert [rewards.math_reward(think(answer), gold) for gold in ("5", "6")].count(1.0) <= 1


def test_a_broken_math_verify_stops_the_run_instead_of_scoring_everything_wrong(monkeypatch, tmp_path):
    broken = tmp_path / "math_equal.py"
    broken.write_text("import no_such_module\n")
    monkeypatch.setattr(math_workers, "MATH_EQUAL", f"{broken}:math_equal")
    math_workers._math_workers.cache_clear()
    try:
        with pytest.raises(UserError, match=r"math-verify does not work here .RuntimeError: .*cannot be loaded"):
            Scorer("math", RewardFlags())
    finally:
        math_workers._math_workers.cache_clear()


@pytest.mark.parametrize(
    ("answer", "gold", "reward"),
    [
        ("5 square feet", "5 square meters", -1),
        ("5 kilometers per hour", "5 m/s", -1),
        ("5 cubic centimeters", "5 cm^2", -1),
        ("the length is 5 km", "5 m", -1),
        ("the length is 5 km", "5 kilometers", 1),
        ("the length is 5 km", "5", 1),
        ("the length is 5 meters squared", "5 m^2", 1),
        ("there are 5 in total", "5 apples", 1),
        ("5 square meters", "5 m^2", 1),
    ],
)
def test_a_number_in_a_sentence_keeps_its_unit(answer, gold, reward):
    assert rewards.math_reward(f"<think>t</think><answer>{answer}</answer>", gold) == reward


def test_areas_and_volumes_are_units_of_their_own():
    """Compared as they are: in `math_reward`, two words count as a sentence, whose number is compared too."""
    assert rewards.same_answer("5 cubic centimeters", "5\\text{ cm}^3")
    assert not rewards.same_answer("5 cubic centimeters", "5 cm^2")
    assert not rewards.same_answer("5 square meters", "5 m^3")


def test_a_comparison_may_take_four_gigabytes_of_memory():
    """A runaway expression must not take those of the trainer."""
    code = "import resource; from grading import math_equal; print(resource.getrlimit(resource.RLIMIT_DATA)[0] >> 30)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "4\n"


def test_only_one_pool_of_workers_is_made_however_many_threads_ask(monkeypatch):
    pools = []

    def start_slowly(*args):
        time.sleep(0.1)
        pools.append(WorkerPool(*args))
        return pools[-1]

    monkeypatch.setattr(math_workers, "WorkerPool", start_slowly)
    math_workers._math_workers.cache_clear()
    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(lambda i: rewards.same_answer(f"{i}.0", str(i)), range(32)))
    math_workers._math_workers.cache_clear()
    assert len(pools) == 1


def test_last_boxed():
    for text, want in [
        ("\\boxed{1}", "1"),
        ("\\boxed {2} \\boxed{3", "2"),
        ("\\boxed{\\{1\\}}", "\\{1\\}"),
        ("\\boxed{a}{b}", "a"),
        ("\\fbox{1}", None),
        ("}}}\\boxed{4}", "4"),
        ("\\boxed{1 {2} \\boxed{3} }", "3"),
        ("", None),
    ]:
        assert answers.last_boxed(text) == want, text


def test_math_verify_runs_in_many_threads_at_once():
    """math-verify's time limit works only in the main thread.

    In other threads, math-verify would silently score answers as wrong.
    """
    with ThreadPoolExecutor(16) as pool:
        got = list(pool.map(lambda i: rewards.same_answer(f"\\frac{{{2 * i}}}{{2}}", str(i)), range(100)))
    assert all(got)


# --- workers ----------------------------------------------------------------------------------------------------------

TROUBLE = """
import os, signal, sys, time

def echo(x): return x
def sleep(x): time.sleep(x)
def spin():
    while True: 10 ** 100000
def die(): os.kill(os.getpid(), signal.SIGKILL)
def leave(): sys.exit(3)
def tell():
    raise ValueError('first\\n  second')

def fail(): raise KeyError("nothing")
def child(x):
    import subprocess
    subprocess.run(["sleep", x])
def number():
    import numpy
    return numpy.float32(0.5)
def odd(): return lambda: 0
def parent(): return os.getppid()
def end():
    os.kill(os.getppid(), 9)
def stop():
    os.kill(os.getppid(), signal.SIGSTOP)
class Code:
    def __reduce__(self): return os._exit, (3,)
def code(): return [Code()]
def half():
    for pipe in range(3, 30):
        try: os.write(pipe, bytes([0, 1, 0, 0]))
        except OSError: pass
    time.sleep(9)
def closed():
    os.closerange(3, 99)
def holder():
    if not os.fork():
        os.setsid()
        time.sleep(15)
        os._exit(0)
    os.kill(os.getppid(), 9)
class Silent(Exception):
    def __str__(self): raise RuntimeError
def unprintable(): raise Silent
"""


@pytest.fixture
def workers(tmp_path):
    (tmp_path / "t.py").write_text(TROUBLE)
    names = [f"{tmp_path}/t.py:{name}" for name in re.findall(r"^def (\w+)", TROUBLE, re.MULTILINE)]
    pool = WorkerPool(1, names)
    return lambda name, seconds=5.0, **arguments: pool.call(f"{tmp_path}/t.py:{name}", seconds, arguments)


def test_a_damaged_pipe_hangs_nothing(workers):
    """Neither one that holds half an answer, nor one that a process of the call holds open; nor a stopped worker."""
    lost = [(name, CallLost) for name in ("half", "closed", "holder", "stop")]
    for name, kind in [*lost, ("unprintable", CallFailed)]:
        start = time.perf_counter()
        with pytest.raises(kind) as error:
            workers(name, 0.5)
        assert time.perf_counter() - start < 10, name
        assert str(error.value) in ("its process died, perhaps out of memory", "its worker process died", "Silent")
        assert workers("echo", x=name) == name


def test_workers_outlive_whatever_a_call_does(workers):
    assert workers("echo", x=[1, "ü"]) == [1, "ü"]
    for name, kind, message in [
        ("spin", CallLost, "took longer than 0.5 s"),
        ("die", CallLost, "its process died"),
        ("leave", CallFailed, "SystemExit: 3"),
        ("fail", CallFailed, "KeyError: 'nothing'"),
        ("tell", CallFailed, "ValueError: first second$"),
        ("odd", CallFailed, "cannot be pickled"),
        ("code", CallFailed, "cannot be unpickled .*posix._exit"),  # it would end this process
    ]:
        with pytest.raises(kind, match=message):
            workers(name, 0.5)
        start = time.perf_counter()
        assert workers("echo", x=name) == name
        assert time.perf_counter() - start < 1, "the next call must start at once"
    assert workers("number") == 0.5
    with pytest.raises(CallLost, match="took longer"):
        workers("child", 0.5, x=f"98765.{os.getpid()}")
    processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert f"98765.{os.getpid()}" not in processes
    os.kill(workers("parent"), 9)  # kill the worker process itself; the next call is retried
    assert workers("echo", x=1) == 1
    with pytest.raises(CallLost, match="worker process died"):
        workers("end")
    assert workers("echo", x=2) == 2


def test_workers_end_with_the_process_that_started_them(tmp_path):
    """Workers end even if the process that started them is killed during a call."""
    (tmp_path / "t.py").write_text(TROUBLE)
    name = f"{tmp_path}/t.py"
    script = (
        "import sys, os, threading; sys.path.insert(0, sys.argv[1])\n"
        "from grading.sandbox import WorkerPool\n"
        f"pool = WorkerPool(1, ['{name}:sleep', '{name}:parent'])\n"
        f"print(pool.call('{name}:parent', 5.0, {{}}), flush=True)\n"
        f"threading.Thread(target=lambda: pool.call('{name}:sleep', 2.0, {{'x': 60}})).start()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, ROOT], capture_output=True, text=True, check=False, timeout=60)
    worker, deadline = int(done.stdout), time.time() + 10
    while os.path.exists(f"/proc/{worker}") and time.time() < deadline:
        time.sleep(0.1)
    assert not os.path.exists(f"/proc/{worker}")


def test_a_call_ends_with_its_worker(tmp_path):
    lines = "import os, time", "def hang(path):", " open(path, 'w').write(str(os.getpid()))", " time.sleep(60)"
    (tmp_path / "t.py").write_text("\n".join(lines))
    name, pid = f"{tmp_path}/t.py:hang", tmp_path / "pid"
    pool = WorkerPool(1, [name])
    worker, pipe = pool.idle.get()
    pipe.send((name, 60.0, [{"path": str(pid)}]))
    deadline = time.time() + 10
    while not (pid.is_file() and pid.read_text()) and time.time() < deadline:
        time.sleep(0.01)
    worker.kill()
    worker.wait()
    while os.path.exists(f"/proc/{pid.read_text()}") and time.time() < deadline:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{pid.read_text()}")


# --- user-defined rewards ---------------------------------------------------------------------------------------------

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
        ("user:missing", "cannot be loaded .AttributeError"),
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


# --- arbitrary text ---------------------------------------------------------------------------------------------------


def strange_texts() -> list[str]:
    rng = random.Random(0)
    texts = [rng.randbytes(rng.randint(1, 400)).decode("utf-8", "replace") for _ in range(500)]
    texts += [rng.randbytes(rng.randint(1, 400)).decode("latin-1") for _ in range(500)]
    return texts


def long_texts() -> list[str]:
    pieces = [
        "a",
        " ",
        "9",
        "{",
        "}",
        "\\boxed{",
        "<answer>",
        "</answer>",
        "<think>",
        "1,",
        "(",
        "\n",
        "\\frac{",
        "answer ",
    ]
    pieces += [
        "</think><answer>",
        "yes no ",
        "é",
        "肺",
        "9^",
        "\\sqrt{",
        "{{}",
        ".",
        "1.",
        "١",
        "\x00",
        "answer is ",
        "A)",
    ]
    texts = [(piece * 10_000)[:10_000] for piece in pieces]
    texts += ["answer" + " " * 10_000, "\\boxed{" + " " * 10_000, "1" + ",111" * 2500 + ",11", "{" * 5000 + "}" * 5000]
    texts += ["\\boxed{" * 1400 + "}" * 1400, "<answer>" + "9" * 10_000, "x" * 5000 + "<answer>", "!" * 10_000 + "a"]
    return texts


TEXTS = {"random bytes": strange_texts(), "10,000 characters": long_texts()}
RANGES = {
    "format": lambda v: v in (0, 1),
    "count": lambda v: v in (0, 0.2, 0.3, 0.4, 0.7, 0.85, 1),
    "vqa": lambda v: v == 0 or 0.5 <= v <= 1,
    "math": lambda v: v in (-1, 1),
    "choice": lambda v: v is None or (len(v) == 1 and "A" <= v <= "Z"),
    "verdict": lambda v: v in (True, False, None),
}
FUNCTIONS = {
    "format": rewards.format_reward,
    "count": rewards.count_reward,
    "vqa": rewards.vqa_reward,
    "math": rewards.math_reward,
    "choice": lambda text, _: answers.extract_choice(text),
    "verdict": lambda text, _: parse_verdict(text),
}


@pytest.mark.parametrize("texts", ["random bytes", *slow("10,000 characters")])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_text_makes_a_reward_fail_or_wait(name, texts):
    """Use each text as a completion, as the answer block of a well-formed completion, and as the gold answer. The
    reward must be in range, and computing it must not take long."""
    slow = []
    for text in TEXTS[texts]:
        inside = think(text.replace("<", "‹"))
        for completion, gold in ((text, "3"), (inside, "3"), (inside, "yes"), (think("3"), text)):
            value, seconds = timed(name, completion, gold)
            assert RANGES[name](value), (completion[:80], gold[:80], value)
            if seconds > 4:  # two seconds on an idle machine, but other tests may be running
                slow.append((completion, gold))
    for completion, gold in slow:  # measure again, in case the machine was busy
        assert timed(name, completion, gold)[1] < 4, (completion[:80], gold[:80])


def timed(name, completion, gold):
    start = time.perf_counter()
    return FUNCTIONS[name](completion, gold), time.perf_counter() - start


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


def test_a_busy_machine_makes_no_answer_wrong(tmp_path):
    """A call with a limit of 1 s needs 0.6 s of CPU time, but takes longer because two busy processes share its core.
    The call must not be killed. A call that sleeps too long or needs more CPU time than its limit must be killed."""
    (tmp_path / "r.py").write_text(
        "import time\n"
        "def work(seconds):\n"
        "    start = time.process_time()\n"
        "    while time.process_time() - start < seconds:\n"
        "        pass\n"
        "    return 1.0\n"
        "def sleep(seconds):\n"
        "    time.sleep(seconds)\n"
    )
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        pool = WorkerPool(1, [f"{tmp_path}/r.py:work", f"{tmp_path}/r.py:sleep"])
        longest = 0.0
        for _ in range(8):  # the scheduler decides how much CPU time each process gets
            start = time.monotonic()
            assert pool.call(f"{tmp_path}/r.py:work", 1.0, {"seconds": 0.6}) == 1.0
            longest = max(longest, time.monotonic() - start)
            if longest > 1.0:
                break
        assert longest > 1.0, "the machine was not busy, so this test proves nothing"
        for call, seconds in (("sleep", 9), ("work", 9)):
            with pytest.raises(CallLost):
                pool.call(f"{tmp_path}/r.py:{call}", 0.3, {"seconds": seconds})
    finally:
        for process in busy:
            process.kill()
        os.sched_setaffinity(0, cores)
