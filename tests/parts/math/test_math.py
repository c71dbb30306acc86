"""The reward for mathematics: vectors, pairs, notations, and comparisons in processes that can be killed."""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("parts.math", reason="needs parts/math, which is not here")
pytest.importorskip("parts.workers", reason="needs parts/workers.py, which is not here")

import rewards
from common.errors import UserError
from config import RewardFlags
from evaluation.scorer import Scorer
from parts.math import compare
from parts.math.verifier import parse_verdict
from parts.workers import WorkerPool
from tests.helpers.marks import slow
from tests.helpers.scripts import ROOT, VECTORS
from tests.helpers.texts import TEXTS, check_with_any_text

CASES = [json.loads(line) for line in (VECTORS / "math.jsonl").read_text().splitlines()]
NOTATION = [json.loads(line) for line in (VECTORS / "math_notation.jsonl").read_text().splitlines()]
VERDICTS = [json.loads(line) for line in (VECTORS / "verdict.jsonl").read_text().splitlines()]


def think(answer: str) -> str:
    return f"<think>t</think>\n<answer>{answer}</answer>"


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
    monkeypatch.setattr(compare, "MATH_EQUAL", f"{broken}:math_equal")
    compare._math_workers.cache_clear()
    try:
        with pytest.raises(UserError, match=r"math-verify does not work here .RuntimeError: .*cannot be loaded"):
            Scorer("math", RewardFlags())
    finally:
        compare._math_workers.cache_clear()


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
    code = "import resource; from parts.math import equal; print(resource.getrlimit(resource.RLIMIT_DATA)[0] >> 30)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "4\n"


def test_only_one_pool_of_workers_is_made_however_many_threads_ask(monkeypatch):
    pools = []

    def start_slowly(*args, may_hang):
        time.sleep(0.1)
        pools.append(WorkerPool(*args))
        return pools[-1]

    monkeypatch.setattr(compare, "start_workers", start_slowly)
    compare._math_workers.cache_clear()
    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(lambda i: rewards.same_answer(f"{i}.0", str(i)), range(32)))
    compare._math_workers.cache_clear()
    assert len(pools) == 1


def test_math_verify_runs_in_many_threads_at_once():
    """math-verify's time limit works only in the main thread.

    In other threads, math-verify would silently score answers as wrong.
    """
    with ThreadPoolExecutor(16) as pool:
        got = list(pool.map(lambda i: rewards.same_answer(f"\\frac{{{2 * i}}}{{2}}", str(i)), range(100)))
    assert all(got)


@pytest.mark.parametrize("texts", ["random bytes", *slow("10,000 characters")])
def test_no_text_makes_the_reward_or_a_verdict_fail_or_wait(texts):
    check_with_any_text(rewards.math_reward, (-1, 1).__contains__, TEXTS[texts])
    check_with_any_text(lambda text, _: parse_verdict(text), (True, False, None).__contains__, TEXTS[texts])


@pytest.mark.parametrize("case", VERDICTS, ids=lambda c: c["reply"])
def test_verdict_vectors(case):
    assert parse_verdict(case["reply"]) is case["want"]


@pytest.mark.parametrize(
    ("reply", "want"),
    [
        ("<think>Correct? no.</think> Incorrect", False),
        ("**Judgement:** Correct", True),
        ("[Judgment: incorrect.]", False),
        ("correct incorrect", None),
        ("Correct, because 3 = 3", None),
        ("not correct", None),
        ("incorrectly", None),
        ("They match.</think>\n\nCorrect", True),  # the chat template had put <think> in the prompt
        ("<think>Incorrect</think><think>hm</think> «Correct»", True),
        ("!= correct", None),
        ("≠ correct", None),
        ("¬correct", None),
        ("\n\n", None),
    ],
)
def test_verdicts_beyond_the_vectors(reply, want):
    assert parse_verdict(reply) is want
