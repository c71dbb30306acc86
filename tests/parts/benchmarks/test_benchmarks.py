"""Check benchmark scores against tables computed by hand, and run evaluate.py as a user would."""

import ast
import json
import os
import pathlib
import re
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace

import docstring_parser
import pytest
from PIL import Image

pytest.importorskip("parts.benchmarks", reason="needs parts/benchmarks, which is not here")
pytest.importorskip("parts.math", reason="needs parts/math, which is not here")
pytest.importorskip("parts.workers", reason="needs parts/workers.py, which is not here")


import evaluate
import rewards
from common.errors import UserError
from common.files import read_jsonl
from common.records import Sample
from config import VerifierFlags
from data import load_processor
from evaluate import Config
from evaluation import benchmarks
from evaluation.predictions import format_table, write_predictions
from grading.answers import answer_part, short_answer
from inputs.rows import RowError
from parts.benchmarks.choices import chosen_letter, extract_choice, whole_number
from parts.benchmarks.saved import read_predictions
from parts.benchmarks.scores import (
    BenchmarkJudge,
    mean_interval,
    pair_predictions,
    score_difference,
    summarise_benchmark,
)
from parts.benchmarks.table import (
    BENCHMARKS,
    COGNITION,
    PERCEPTION,
    check_pairs,
    choices_of,
    gpqa_choices,
    gpqa_gold,
    normalise_mathvista,
    to_sample,
)
from parts.math.verifier import ReplyCache, Verifier
from policy.model import untie
from tests.helpers import tiny
from tests.helpers.rows import make_sample
from tests.helpers.scripts import ROOT, VECTORS, run_script

VISTA = dict(question="q", choices=None, unit=None, precision=None, answer_type="text", question_type="free_form")
GPQA = {f"Incorrect Answer {i}": f"wrong {i}" for i in (1, 2, 3)} | {"Correct Answer": "right", "Question": "Which?"}


def judged(name: str, rows: list[dict], server=None) -> list[dict]:
    """Return predictions for `rows`, each of which contains its `response` or `responses`."""
    benchmark = BENCHMARKS[name]
    outputs = [{"responses": row.pop("responses", None) or [row.pop("response")]} for row in rows]
    samples = [make_sample(benchmark.prompt(r), benchmark.gold(r), [], f"row {i}", r) for i, r in enumerate(rows, 1)]
    judge = BenchmarkJudge(Config(model="m", benchmark=name))
    judge.server = server
    return judge.judge(samples, outputs)


@pytest.mark.parametrize("returned", [True, 1.0, None, ("a", True)])
def test_a_judge_that_returns_no_judgement_is_refused(returned, monkeypatch):
    monkeypatch.setitem(BENCHMARKS, "aime24", replace(BENCHMARKS["aime24"], judge=lambda *_: returned))
    with pytest.raises(UserError, match=r"^--benchmark aime24: its judge returned a \w+; expected a Judgement$"):
        judged("aime24", [{"problem": "?", "answer": "1", "response": "1"}])


@pytest.mark.parametrize("change", [{"prompt": lambda row: row["answer"]}, {"gold": lambda row: row["answer"]}])
def test_a_prompt_and_a_gold_answer_are_texts(change, monkeypatch):
    monkeypatch.setitem(BENCHMARKS, "aime24", replace(BENCHMARKS["aime24"], **change))
    with pytest.raises(UserError, match=r"^--benchmark aime24: its prompt and its gold must return texts$"):
        to_sample("aime24", "row 1", {"problem": "?", "answer": 1})


@pytest.mark.parametrize("change", [{"columns": "problem"}, {"judge": "exact"}, {"image_column": 3}, {"hub": None}])
def test_a_benchmark_with_a_field_of_another_type_cannot_be_made(change):
    with pytest.raises(ValueError, match="1 validation error for Benchmark"):
        replace(BENCHMARKS["aime24"], **change)


def test_an_entry_that_is_no_benchmark_is_refused(monkeypatch):
    monkeypatch.setitem(BENCHMARKS, "aime24", print)
    with pytest.raises(UserError, match=r"^--benchmark aime24: its entry is a builtin_function_or_method; exp"):
        BenchmarkJudge(Config(benchmark="aime24", predictions="x"))


def test_plugins_extend_the_table_whose_names_are_in_the_help():
    explained = {flag.arg_name: flag.description for flag in docstring_parser.parse_from_object(Config).params}
    assert benchmarks.BENCHMARKS is BENCHMARKS
    names = re.search(r"instead of a task: (.*?)[.;]", " ".join(explained["benchmark"].split()))[1]
    assert re.split(", | or ", names) == list(BENCHMARKS)


def right(name: str, row: dict, *responses: str) -> list[bool]:
    """Return whether each of `responses` to `row` is correct."""
    return judged(name, [row | {"responses": list(responses)}])[0]["exact"]


# --- reading answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [json.loads(line) for line in (VECTORS / "choice.jsonl").read_text().splitlines()])
def test_choice_vectors(case):
    assert extract_choice(case["completion"]) == case["want"]


@pytest.mark.parametrize(
    ("response", "part", "short"),
    [
        ("<think>5</think><answer>7</answer>", "7", "7"),
        ("thought aloud</think>\nThe answer is 12.", "The answer is 12.", "12"),
        ("<think>a</think><answer>so \\boxed{3}</answer>", "so \\boxed{3}", "3"),
        ("<answer>1</answer> no: <answer>2</answer>", "2", "2"),
        ("\\boxed{1}, then \\boxed{\\frac{1}{2}}", "\\boxed{1}, then \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("<think>never ends, 25", "", ""),
        ("12 <think>or 13", "12", "12"),
        ("**Answer:** $5$", "**Answer:** $5$", "$5$"),
        ("", "", ""),
    ],
)
def test_what_is_left_of_a_response(response, part, short):
    assert answer_part(response) == part
    assert short_answer(part)[0] == short


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *[("025", 25), ("25", 25), ("$25$", 25), ("1,234", 1234), ("m+n = 73", 73), ("-5", -5), ("−5", -5)],
        *[
            ("2.5", None),
            ("25.0", 25),
            ("the answer is 25, since 3 + 4 = 7", 25),
            ("", None),
            ("none", None),
            ("25 apples", 25),
            ("x2", None),
            ("10{,}000", 10000),
            (r"\boxed{m + n = 25}", 25),
            (r"\boxed{025}", 25),
            (r"\boxed{\text{25 apples}}", 25),
            (r"\boxed{90^\circ}", 90),
            (r"so \(\boxed{1,234.0}\).", 1234),
            (r"The answer is \(25\).", 25),
            ("The answer is 25!", 25),
            (r"Thus the total is $\mathbf{25}$", 25),
            (r"so $2^{10} = 1024$", 1024),
            (r"\quad 25", 25),
            (r"The answer is $\frac{50}{2} = 25$.", 25),
            (r"\boxed{\$25\%}", 25),
        ],
        *[
            (rf"\boxed{{{text}}}", None)
            for text in (r"\frac{25}{2}", r"25\sqrt{3}", r"25\pi", "25!", "2^{10}", "100-75", "x")
        ],
        *[
            (text, None)
            for text in ("The answer is 25/2", r"the answer is $25\pi$.", r"so x = \frac{5}{25}", "it is 5^{25}")
        ],
    ],
)
def test_whole_numbers(text, number):
    assert whole_number(text) == number


def test_aime():
    row = {"problem": "p", "answer": "025"}
    responses = ["<think>t</think><answer>25</answer>", "\\boxed{025}", "The answer is 25.", "26", "", "25.5", "-25"]
    assert right("aime24", row, *responses) == [True, True, True, False, False, False, False]
    rows = judged("aime24", [{"problem": "p", "answer": 204, "responses": ["204"] * 3 + ["1"] * 5}])
    scores = summarise_benchmark("aime24", rows)
    assert scores["score"] == pytest.approx(3 / 8)  # pass@1, averaged over eight responses
    assert scores["pass@2"] == pytest.approx(1 - (5 * 4) / (8 * 7))
    assert scores["pass@8"] == 1.0
    assert scores["completions_per_row"] == 8


def test_bootstrap_interval():
    assert mean_interval([1.0] * 50) == (1.0, 1.0)
    low, high = mean_interval([0.0, 1.0] * 200)
    # the standard error of the mean is 0.5 / sqrt(400) = 0.025, and the interval is about ±1.96 standard errors
    assert low == pytest.approx(0.5 - 0.049, abs=0.01)
    assert high == pytest.approx(0.5 + 0.049, abs=0.01)


def test_math500_by_level():
    rows = [
        {
            "problem": "a",
            "answer": "\\frac{1}{2}",
            "level": 1,
            "subject": "Algebra",
            "response": "<answer>0.5</answer>",
        },
        {"problem": "b", "answer": "x+1", "level": 1, "subject": "Algebra", "response": "\\boxed{1+x}"},
        {"problem": "c", "answer": "(1,2)", "level": 5, "subject": "Geometry", "response": "\\boxed{(2,1)}"},
        {"problem": "d", "answer": "7", "level": 5, "subject": "Geometry", "response": ""},
    ]
    scores = summarise_benchmark("math500", judged("math500", rows))
    assert scores["score"] == 0.5
    assert scores["parts"]["level"] == {"1": {"n": 2, "score": 1.0}, "5": {"n": 2, "score": 0.0}}
    assert scores["parts"]["subject"]["Geometry"] == {"n": 2, "score": 0.0}
    assert scores["no_answer"] == 0.25
    assert "pass@1" not in scores, "it would be the same number under another name"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("x = 4", "x = 4"),
        ("3x+12", "3x+12"),
        ("the area is 12 square units", "12"),
        ("Evelyn", "Evelyn"),
        ("word " * 40 + "so $n = \\frac{1}{2}$ follows", "n = \\frac{1}{2}"),
        ("word " * 40 + "so \\(7\\) and then \\[8\\] is left", "8"),
        ("word " * 40 + "which gives 12", "12"),
        ("word " * 40 + "which leaves 3/4 of 12", None),  # that is 9
        ("word " * 40, None),
        ("word " * 40 + "\\boxed{" + "1+" * 60 + "1}", "1+" * 60 + "1"),
    ],
)
def test_of_prose_the_last_formula_counts(text, answer):
    assert rewards.mathematics().read_answer(text, "?")[0] == answer


@pytest.mark.parametrize(
    ("text", "gold", "want"),
    [
        ("Thus x is 12.", "12", True),
        ("**12**", "12", True),
        ("The value is $12$.", "12", True),
        ("The area is 12 square units.", "12", True),
        ("The answer is $\\frac{1}{2}$ because 3 is odd.", "\\frac{1}{2}", True),
        ("The answer is 25 because 3 + 4 = 7", "7", False),
        ("90°", "90^\\circ", True),
        ("3x+12", "12", False),
    ],
)
def test_answers_in_sentences(text, gold, want):
    assert right("math500", {"problem": "p", "answer": gold, "level": 1, "subject": "s"}, text) == [want]


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B\n\nThe picture shows a cat.", "B"),
        ("B, since it is red", "B"),
        ("B a red bus", "B"),
        ("A red bus", None),
        ("A cat and a dog", None),
        ("Option B", "B"),
        ("The correct option is B", "B"),
        ("The answer is option B", "B"),
        ("\\boxed{B. foo}", "B"),
        ("\\boxed{\\textbf{B}}", "B"),
        ("I see a cat", None),
        ("", None),
    ],
)
def test_letters_as_models_give_them(text, letter):
    assert chosen_letter(text) == letter


@pytest.mark.parametrize(
    "text",
    [
        *("A or B", "(A) or (B)", "A, B", "A/B", "A、B", "Either A or B", "A or maybe B", "[A] or [B]", "$A$ or $B$"),
        *("The answer is A or B", "Option A or option B", "B, C, and D", "答案是A或B", "A. cat or B. dog"),
        *(r"\boxed{A} or \boxed{B}", r"\boxed{A, B}", r"\boxed{A \text{ or } B}", "the answer is a or b", "A and B"),
    ],
)
def test_several_letters_choose_none(text):
    assert chosen_letter(text) is None


@pytest.mark.parametrize(
    "text",
    [
        *("答案是B", "故选：B", "答案：（B）", "正确答案为B", "选项B正确", "答案不是A，而是B", "Ｂ", "（B）"),
        *("Therefore, B is correct.", "(B) is the right choice.", "I choose B.", "I'd go with B", "The letter is B"),
        *(
            "The answer is not A. It is B.",
            "The answer should be B",
            "Final Answer: \\(B\\)",
            "**Answer:** B",
            "<b>B</b>",
        ),
        *(
            r"\boxed{\mathbf{B}}",
            r"$\boxed{\text{(B)}}$",
            r"\boxed{\textbf{B. dog}}",
            r"\mathrm{B}",
            "It's a dog.\n\nB",
        ),
    ],
)
def test_statements_of_a_letter(text):
    assert chosen_letter(text) == "B"


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        (r"\boxed{A = 5}. The answer is B.", "B"),
        (r"\boxed{x}. The answer is B.", "B"),
        (r"I see \boxed{3} items, so (B)", "B"),
        (r"\boxed{C \cap D}", None),
        (r"\boxed{B} and not A", "B"),
        ("Compared with (A), the correct option is B", "B"),
        ("B is correct. Option A is (C) in red.", "B"),
        ("The answer is B, C is too dark", "B"),
        ("A and B are wrong, so the answer is C.", "C"),
        ("It could be A or B, but I choose B", "B"),
        ("I would not choose A", None),
    ],
)
def test_strong_evidence_goes_before_a_later_or_weaker_one(text, letter):
    assert chosen_letter(text) == letter


@pytest.mark.parametrize(
    "text", ["C-shaped", "Answer: A dog is shown", "X-ray", "U.S.", "The answer is B-cell lymphoma"]
)
def test_words_are_no_letters(text):
    assert chosen_letter(text) is None


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The dog is larger, so the right one is B.", "B"),
        ("B. dog", "B"),
        ("(A) cat", "A"),
        ("D", "D"),
        ("Each of them is shown.", None),
    ],
)
@pytest.mark.parametrize("options", ["A. cat\nB. dog\n\n", "(A) cat\n(B) dog\n(C) cow\n\n", "**A)** cat\n**B)** dog\n"])
def test_a_repeated_list_of_options_counts_for_nothing(options, text, letter):
    assert chosen_letter(options + text) == letter


@pytest.mark.parametrize(
    ("name", "row", "answer"),
    [
        ("gpqa_diamond", GPQA, gpqa_gold(GPQA)),
        ("vqa_rad", {"question": "q", "answer": "left lung"}, "left lung"),
        ("mme", {"question_id": "1", "question": "q", "answer": "Yes", "category": "OCR"}, "Yes"),
        ("aime24", {"problem": "p", "answer": "025"}, "25"),
        ("mathvista", VISTA | dict(question="d", answer_type="integer", answer="3"), "3"),
        ("geometry3k", {"problem": "<image>Find x.", "answer": "4"}, "4"),
    ],
)
def test_what_a_model_has_marked_is_its_answer(name, row, answer):
    """GLM-4.6V writes these marks."""
    marked = f"<|begin_of_box|>{answer}<|end_of_box|>"
    responses = [marked, f"<think>7</think>\nI see 9 of A, B, C and D. {marked}", f"<answer>\n{marked}\n</answer>"]
    assert right(name, row, *responses) == [True] * 3


def test_gpqa_is_shuffled_once_for_each_problem():
    assert sorted(gpqa_choices(GPQA)) == ["right", "wrong 1", "wrong 2", "wrong 3"]
    letter = gpqa_gold(GPQA)
    assert gpqa_choices(dict(reversed(list(GPQA.items()))))["ABCD".index(letter)] == "right"
    others = [GPQA | {"Question": f"Which {i}?"} for i in range(400)]
    counts = [sum(gpqa_gold(row) == gold for row in others) for gold in "ABCD"]
    assert min(counts) > 70  # each letter is correct for about a quarter of the questions
    wrong = "ABCD"[("ABCD".index(letter) + 1) % 4]
    responses = [letter, f"({letter})", f"The answer is {letter}.", f"\\boxed{{{letter}}}", wrong, "", "right"]
    assert right("gpqa_diamond", GPQA, *responses) == [True] * 4 + [False] * 3
    assert f"({letter}) right" in BENCHMARKS["gpqa_diamond"].prompt(GPQA)


def test_geometry3k():
    row = {"problem": "<image>Find x.", "answer": "4 \\sqrt{3}"}
    responses = ["<think>t</think><answer>4\\sqrt{3}</answer>", "\\boxed{\\sqrt{48}}", "6", "4"]
    assert right("geometry3k", row, *responses) == [True, True, False, False]


def test_vqa_rad_open_and_closed():
    closed = {"question": "q", "answer": "Yes", "answer_type": "CLOSED "}
    assert right("vqa_rad", closed, "yes", "Yes, it is.", "no", "yes and no", "") == [True, True, False, False, False]
    opened = {"question": "q", "answer": "left upper lobe", "answer_type": "OPEN", "responses": ["small left lobe"]}
    (row,) = judged("vqa_rad", [opened])
    assert row["exact"] == [False]
    assert row["measures"] == [{"open_recall": pytest.approx(2 / 3), "open_f1": pytest.approx(2 / 3)}]
    rows = judged(
        "vqa_rad",
        [
            {"question": "a", "answer": "no", "response": "No"},
            {"question": "b", "answer": "right lung", "response": "Right lung."},
            {"question": "c", "answer": "heart", "response": "liver"},
        ],
    )
    scores = summarise_benchmark("vqa_rad", rows)
    assert scores["score"] == pytest.approx(2 / 3)
    assert scores["open_recall"] == scores["open_f1"] == 0.5
    assert scores["parts"]["answer_type"] == {"closed": {"n": 1, "score": 1.0}, "open": {"n": 2, "score": 0.5}}


def mme(category: str, image: str, *answers: tuple[str, str]) -> list[dict]:
    """Return one row for each (gold, response) in `answers`, all about the same image."""
    common = {"question_id": image, "category": category}
    return [common | {"question": f"{image} {g}?", "answer": g, "response": r} for g, r in answers]


# The comments say how many of the two answers are correct.
MME = [
    *mme("existence", "1.png", ("Yes", "Yes, there is."), ("No", "No.")),  # both correct
    *mme("existence", "2.png", ("Yes", "YES"), ("No", "yes")),  # one correct
    *mme("OCR", "1.png", ("Yes", "maybe"), ("No", " no")),  # one correct: "maybe" is parsed as "other"
    *mme("code_reasoning", "9.png", ("Yes", "<think>n</think><answer>yes</answer>"), ("No", "no")),  # both correct
    *mme("text_translation", "3.png", ("Yes", "no"), ("No", "")),  # none correct
]


def test_mme_by_hand():
    scores = summarise_benchmark("mme", judged("mme", [dict(row) for row in MME]))
    categories = {name: category["score"] for name, category in scores["parts"]["category"].items()}
    # existence: 3 of 4 questions and 1 of 2 images correct
    assert categories == {"existence": 125.0, "OCR": 50.0, "code_reasoning": 200.0, "text_translation": 0.0}
    assert scores["parts"]["kind"]["perception"]["score"] == 175.0
    assert scores["parts"]["kind"]["cognition"]["score"] == 200.0
    assert scores["score"] == 375.0
    assert scores["score_95"][0] <= 375 <= scores["score_95"][1]
    assert scores["pass@1"] == 0.6
    assert scores["no_answer"] == 0.2


def test_all_of_mme_right_is_2800():
    rows = [
        row
        for category in PERCEPTION + COGNITION
        for image in ("1", "2")
        for row in mme(category, image, ("Yes", "yes"), ("No", "no"))
    ]
    scores = summarise_benchmark("mme", judged("mme", rows))
    assert [scores["parts"]["kind"][kind]["score"] for kind in ("perception", "cognition")] == [2000.0, 800.0]
    assert scores["score_95"] == (2800.0, 2800.0)


def test_a_question_of_mme_without_a_pair_leaves_out_its_image():
    before, after = (judged("mme", [dict(row) for row in MME]) for _ in range(2))
    before[0]["question"] += "?"
    pairs = pair_predictions("mme", before, after)
    assert len(pairs) == len(MME) - 2
    assert score_difference("mme", pairs)["difference"] == 0


def test_mme_needs_both_questions_and_known_categories():
    def samples(rows: list[dict]) -> list[Sample]:
        return [make_sample("q", "Yes", [], "s", row) for row in rows]

    with pytest.raises(UserError, match=r"existence 1\.png has 1"):
        check_pairs(samples(mme("existence", "1.png", ("Yes", "yes"))))
    with pytest.raises(UserError, match="no category 'smell'"):
        check_pairs(samples(mme("smell", "1", ("Yes", "yes"), ("No", "no"))))


def test_mmstar_counts_every_l2_category_alike():
    def row(category: str, l2: str, gold: str, response: str, i: int) -> dict:
        return dict(question=f"q{i}", answer=gold, category=category, l2_category=l2, response=response)

    rows = [
        *(row("math", "geometry", "A", response, i) for i, response in enumerate("AAAB")),  # 3 of 4
        row("math", "numbers", "C", "(B) no: C", 4),  # 0 of 1: a leading "(B)" counts as the answer
        *(row("logic", "diagrams", "B", response, i) for i, response in ((5, "b."), (6, "The answer is D"))),  # 1 of 2
    ]
    scores = summarise_benchmark("mmstar", judged("mmstar", rows))
    assert {k: v["score"] for k, v in scores["parts"]["l2_category"].items()} == {
        "geometry": 0.75,
        "numbers": 0.0,
        "diagrams": 0.5,
    }
    assert {k: v["score"] for k, v in scores["parts"]["category"].items()} == {"math": 0.375, "logic": 0.5}
    assert scores["score"] == pytest.approx((0.75 + 0 + 0.5) / 3)
    assert scores["pass@1"] == pytest.approx(4 / 7)


@pytest.mark.parametrize(
    ("row", "answer", "normalised"),
    [
        (dict(choices=["145°", "35°"], question_type="multi_choice"), "(B)", "35°"),
        (dict(choices=["145°", "35°"], question_type="multi_choice"), "b", "35°"),
        (dict(choices=["Yes", "No"], question_type="multi_choice"), "no", "No"),
        (dict(choices=["Yes", "No"], question_type="multi_choice"), "C", None),
        (dict(choices="['x', 'y']", question_type="multi_choice"), "A", "x"),
        (dict(choices=["45°", "90°"], question_type="multi_choice"), "The angle is 90°.", "90°"),
        (dict(choices=["45°", "90°"], question_type="multi_choice"), "90^\\circ", "90°"),
        (dict(choices=["B", "A"], question_type="multi_choice"), "(A)", "B"),
        (dict(choices=["B", "A"], question_type="multi_choice"), "B", "B"),
        (dict(choices=float("nan"), answer_type="integer"), "3", "3"),
        (dict(answer_type="float", precision="2"), "0.254", "0.25"),
        (dict(answer_type="integer"), "\\(5\\)", "5"),
        (dict(answer_type="integer"), "14.0", "14"),
        (dict(answer_type="integer"), "$1,234", "1234"),
        (dict(answer_type="integer"), "about 7 or 8", None),
        (dict(answer_type="float", precision=1.0), "3.14", "3.1"),
        (dict(answer_type="float", precision=2.0), "0.5", "0.5"),
        (dict(answer_type="float", precision=1.0), "1e400", None),
        (dict(answer_type="float", precision=1.0), "3.1 or 3.2", None),
        *((dict(answer_type="list"), text, "[1, 2]") for text in ("[1, 2]", "[1,2]", "It is [ 1 ,2 ].", "1, 2")),
        *(
            (dict(answer_type="integer"), text, "9")
            for text in ("12 - 3 = 9", "x = 9", "There are 9 apples.", "9 apples")
        ),
        *(
            (dict(answer_type="integer"), text, "9")
            for text in (r"9\,\text{cm}^2", "9 cm^2", r"9^\circ", r"9\%", "- 9")
        ),
        *((dict(answer_type="integer"), text, "-9") for text in ("x = -9", "x = − 9", "-9", "3 - 12 = -9")),
        *(
            (dict(answer_type="integer"), text, None)
            for text in ("1/9", "9^2", r"9\pi", "1 1/9", "4,9", "12 - 3", "two")
        ),
        *((dict(answer_type="text"), text, text) for text in ("Model 3", "3 of 5", "Evelyn")),
        *((dict(choices=["10", "3"]), text, "10") for text in ("It is 10.", "10 m", "10, not more", "x = 10")),
        *(
            (dict(choices=["10", "3"]), text, None)
            for text in ("x = -10", "1/10", "1 / 10", "10.5", "10:30", "10^2", "5-10")
        ),
        *((dict(choices=["10", "-10"]), text, "-10") for text in ("It is -10 degrees", "x = − 10", "−10")),
        (dict(choices=["1/10", "10"]), "It is 1/10", "1/10"),
    ],
)
def test_mathvista_normal_forms(row, answer, normalised):
    assert normalise_mathvista(answer, VISTA | row) == normalised


CATS = "Which?\n\n(A) cat\n(B) dog\n\nAnswer with the letter of the right choice alone."


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        *(
            (dict(options=options), CATS)
            for options in ("['cat', 'dog']", '["cat", "dog"]', ["cat", "dog"], ["A. cat", "B) dog"])
        ),
        (dict(options={"A": "cat", "B": "dog"}), CATS),
        (dict(A="cat", B="dog", C=float("nan"), D=None, hint="Look."), f"Look.\n\n{CATS}"),
        (dict(options=["cat", "dog"], question="Which?\nA: cat, B: dog"), "Which?\nA: cat, B: dog"),
        (
            dict(options=["cat", "dog"], question="Cat or dog: cat, dog?"),
            CATS.replace("Which?", "Cat or dog: cat, dog?"),
        ),
        (dict(hint=float("nan"), options=None), "Which?"),
        (dict(options="[]", hint=""), "Which?"),
    ],
)
def test_options_beside_the_question_are_in_the_prompt(row, prompt):
    """As MMMU and MMBench have them."""
    row = dict(question="Which?", answer="B", category="c", l2_category="l") | row
    assert to_sample("mmstar", "row 1", row).prompt == prompt


def test_options_that_cannot_be_read_are_refused():
    row = dict(question="Which?", answer="B", category="c", l2_category="l", options="cat; dog")
    with pytest.raises(RowError, match=r"^column 'options' is no list of choices: 'cat; dog'$"):
        to_sample("mmstar", "row 1", row)


@pytest.mark.parametrize("text", [r'["It\'s red", "It is"]', "['Red, \"a\"', 'It is']", '["a", "b"]'])
def test_choices_stored_as_text_keep_their_quotes(text):
    assert choices_of({"choices": text}) == ast.literal_eval(text)


def test_mathvista_by_hand():
    rows = [
        VISTA | dict(question="a", choices=["1", "2"], question_type="multi_choice", answer="2", response="B"),
        VISTA | dict(question="b", answer_type="integer", answer="14", response="<answer>14.0</answer>"),
        VISTA | dict(question="c", answer_type="float", precision=1.0, answer="1.2", response="The answer is 1.24."),
        VISTA | dict(question="d", answer_type="integer", answer="3", response="It shows three dogs"),
    ]
    scores = summarise_benchmark("mathvista", judged("mathvista", rows))
    assert scores["score"] == 0.75
    assert scores["parts"]["question_type"] == {
        "free_form": {"n": 3, "score": pytest.approx(2 / 3)},
        "multi_choice": {"n": 1, "score": 1.0},
    }
    assert format_table(scores).startswith("mathvista (rule-scored)")


# --- servers ----------------------------------------------------------------------------------------------------------


def write_jsonl(path: pathlib.Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_an_extractor_is_asked_once_for_all_runs(server, tmp_path, monkeypatch):
    monkeypatch.setenv("REWARD_MODEL_NAME", "judge")
    server.reply = lambda body: "3" if "three dogs" in body["messages"][1]["content"] else "none"
    rows = [
        VISTA | dict(question="d", answer_type="integer", answer="3", response="I see three dogs there"),
        VISTA | dict(question="e", answer_type="integer", answer="4", response="4 or 5"),
        VISTA | dict(question="f", answer_type="integer", answer="4", response=""),
    ]
    saved = write_jsonl(tmp_path / "p.jsonl", rows)
    flags = dict(predictions=saved, benchmark="mathvista", judge_cache=str(tmp_path / "cache.sqlite"))
    for run in range(2):
        evaluate.main(Config(**flags, verifier_url=server.url, output=str(tmp_path / f"out{run}")))
        scores = json.loads((tmp_path / f"out{run}" / "scores.json").read_text())
        assert scores["scoring"] == "extractor judge"
        assert scores["score"] == pytest.approx(1 / 3)
        assert len(server.requests) == 3  # one test request and two responses; empty responses are not sent
    evaluate.main(Config(**flags, output=str(tmp_path / "rule")))
    assert json.loads((tmp_path / "rule" / "scores.json").read_text())["scoring"] == "rule-scored"


@pytest.mark.parametrize(
    ("reply", "finish", "answer"),
    [
        ("<think>t</think>«red».", "stop", "red"),
        (" None. ", "stop", ""),
        ("<think>The choices are red and blue. I see red", "stop", None),
        ("", "stop", None),
        ("The choices are red and blue. I see red", "length", None),
    ],
)
def test_a_reply_of_the_extractor_that_is_cut_off_is_no_answer(server, tmp_path, monkeypatch, reply, finish, answer):
    monkeypatch.setenv("REWARD_MODEL_NAME", "judge")
    server.reply = lambda body: reply
    server.finish = finish
    verifier = Verifier(server.url, "judge", VerifierFlags(), str(tmp_path / "cache.sqlite"))
    for requests in (1, 2):
        assert verifier.extract("Which colour?", "I cannot say") == answer
        assert len(server.requests) == (requests if answer is None else 1), "only an answer is cached"


def test_a_cache_that_cannot_be_written_is_reported_and_loses_no_reply(tmp_path, monkeypatch, capsys):
    cache, connect = ReplyCache(str(tmp_path / "cache.sqlite")), sqlite3.connect
    cache.table.execute("PRAGMA query_only = 1")  # as on a full disk
    cache.put("a", "b")
    cache.put("c", "d")
    assert capsys.readouterr().err.count("the judge's replies cannot be cached") == 1
    monkeypatch.setattr(sqlite3, "connect", lambda path, **_: connect(f"file:{path}?mode=ro", uri=True))
    with pytest.raises(UserError, match=r"--judge_cache .* cannot be opened .*readonly"):
        ReplyCache(str(tmp_path / "cache.sqlite"))


def test_a_letter_is_never_read_into_a_gold():
    row = VISTA | dict(choices=["c", "a", "b"], question_type="multi_choice", answer="c")
    assert right("mathvista", row, "(A)", "c", "(C)", "(C) b") == [True, True, False, False]


def test_a_missing_extractor_is_not_replaced_by_the_rule(server, tmp_path, monkeypatch):
    """One missing reply in twelve is counted and reported; two in twelve stop the evaluation."""
    server.reply = lambda body: "3"
    rows = [
        VISTA | dict(question=f"{i}", answer_type="integer", answer="3", response=f"it is 3 {i}") for i in range(12)
    ]
    flags = dict(benchmark="mathvista", verifier_url=server.url, output=str(tmp_path / "o"))
    monkeypatch.setattr("parts.math.verifier.RETRIES", 0)
    for bad in (1, 2):
        server.status = [200] * 13
        server.status[1 : 1 + bad] = [500] * bad
        saved = write_jsonl(tmp_path / "p.jsonl", rows)
        cfg = Config(**flags, predictions=saved, judge_cache=str(tmp_path / f"{bad}.sqlite"))
        if bad == 2:
            with pytest.raises(UserError, match="17% of the responses have no reply from the extractor"):
                evaluate.main(cfg)
            continue
        evaluate.main(cfg)
        scores = json.loads((tmp_path / "o" / "scores.json").read_text())
        assert scores["scoring"] == "extractor judge, 8.3% without a reply"
        assert scores["score"] == pytest.approx(11 / 12)


def test_a_judge_for_what_the_rule_does_not_find(server, tmp_path, capsys, monkeypatch):
    server.reply = lambda body: "Correct" if "hypotenuse" in body["messages"][1]["content"] else "Incorrect"
    common = dict(query_wo="Q?", question="Q?")
    rows = [
        common | dict(question_type="multi-choice", answer="A", response="A"),
        common | dict(question_type="free-form", answer="the longest side", response="hypotenuse"),
        common | dict(question="", question_type="free-form", answer="12", response="13"),  # question only in the image
    ]
    saved = write_jsonl(tmp_path / "p.jsonl", rows)
    flags = dict(predictions=saved, benchmark="mathverse", judge_cache=str(tmp_path / "c.sqlite"))
    evaluate.main(Config(**flags, verifier_url=server.url, output=str(tmp_path / "o")))
    scores = json.loads((tmp_path / "o" / "scores.json").read_text())
    assert scores["score"] == pytest.approx(2 / 3)
    assert scores["scoring"] == "judge judge"
    server.status = 500
    monkeypatch.setattr("parts.math.verifier.RETRIES", 0)
    flags["judge_cache"] = str(tmp_path / "new.sqlite")
    with pytest.raises(UserError, match="cannot be used"):
        evaluate.main(Config(**flags, verifier_url=server.url, output=str(tmp_path / "o2")))


# --- saved predictions ------------------------------------------------------------------------------------------------


AIME = {"problem": "p", "answer": "5"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "row 2: not JSON"),
        ('["a"]', "row 2: not an object"),
        (json.dumps(AIME), "row 2: neither 'response' nor 'responses'"),
        (json.dumps(AIME | {"response": ["5"]}), "row 2: a response is neither text nor null"),
        (json.dumps(AIME | {"responses": "5"}), "row 2: 'responses' is not a list"),
        (json.dumps(AIME | {"responses": []}), "row 2: 'responses' is not a list"),
        (json.dumps({"problem": "p", "response": "5"}), "row 2: no column 'answer'"),
        (json.dumps({"problem": "p", "answer": None, "response": "5"}), "row 2: column 'answer' is empty"),
        (
            json.dumps({"problem": "p", "answer": "see text", "response": "5"}),
            "row 2: the answer 'see text' is not a whole",
        ),
    ],
)
def test_a_malformed_prediction_is_named(line, message, tmp_path, capsys):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(AIME | {"response": "5"}) + "\n" + line + "\n")
    with pytest.raises(UserError, match="1 of 2 rows cannot be used") as error:
        read_predictions(str(path), BenchmarkJudge(Config(predictions=str(path), benchmark="aime24")))
    assert message in str(error.value)
    cfg = Config(predictions=str(path), benchmark="aime24", skip_bad_rows=True)
    samples, _ = read_predictions(str(path), BenchmarkJudge(cfg))
    assert len(samples) == 1
    assert message in capsys.readouterr().err


def test_failed_and_empty_responses_are_wrong(tmp_path):
    path = write_jsonl(tmp_path / "p.jsonl", [AIME | {"responses": ["5", None, "", " "]}])
    evaluate.main(Config(predictions=path, benchmark="aime24", output=str(tmp_path / "o")))
    scores = json.loads((tmp_path / "o" / "scores.json").read_text())
    assert scores["score"] == 0.25
    assert scores["no_answer"] == 0.75


# --- benchmark files --------------------------------------------------------------------------------------------------

ROWS = {
    "aime24": {"problem": "What?", "answer": "025"},
    "math500": {"problem": "What?", "answer": "\\pi", "level": 3, "subject": "Algebra"},
    "gpqa_diamond": GPQA,
    "geometry3k": {"problem": "<image>Find x.", "answer": "5", "images": ["a.png"]},
    "vqa_rad": {"question": "Is it?", "answer": "yes", "image": "a.png"},
    "mme": {"question_id": "1", "question": "Is it?", "answer": "Yes", "category": "OCR", "image": "a.png"},
    "mmstar": {"question": "Which? A: x", "answer": "A", "category": "c", "l2_category": "l", "image": "a.png"},
    "mathvista": VISTA | {"question_type": "free_form", "answer": "5", "decoded_image": "a.png"},
    "mathverse": {"question": "Q", "answer": "A", "question_type": "multi-choice", "query_wo": "Q?", "image": "a.png"},
    "screenspot": {"instruction": "open it", "bbox": [0.1, 0.2, 0.5, 0.75], "image": "a.png"},
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_is_read_from_jsonl_and_parquet(name, tiny_model, tmp_path):
    import datasets

    processor = load_processor(tiny_model, "math")
    Image.new("RGB", (40, 30), "red").save(tmp_path / "a.png")
    num_rows = 2 if name == "mme" else 1  # MME needs both questions about an image
    path = write_jsonl(tmp_path / "rows.jsonl", [ROWS[name]] * num_rows)
    sample, *_ = BenchmarkJudge(Config(model="m", benchmark=name, data=path)).load(processor)
    row, image_column = dict(ROWS[name]), BENCHMARKS[name].image_column
    if image_column:
        cells = [{"bytes": (tmp_path / "a.png").read_bytes(), "path": None}]
        row[image_column] = cells if image_column == "images" else cells[0]
    (tmp_path / "folder").mkdir()
    columns = {key: [value] * num_rows for key, value in row.items() if value is not None}
    datasets.Dataset.from_dict(columns | ({"choices": [[]]} if name == "mathvista" else {})).to_parquet(
        tmp_path / "folder" / "test.parquet"
    )
    if name == "mathvista":
        columns |= {"choices": [[]], "unit": [""], "precision": [1.0]}
        datasets.Dataset.from_dict(columns).to_parquet(tmp_path / "folder" / "test.parquet")
    flags = Config(model="m", benchmark=name, data=str(tmp_path / "folder"))
    other, *_ = BenchmarkJudge(flags).load(processor)
    assert other.prompt == sample.prompt
    assert other.answer == sample.answer
    assert len(other.images) == len(sample.images) == bool(image_column)
    assert json.dumps(other.fields)  # would fail if the fields still contained images


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_missing_column_is_named(name, tiny_model, tmp_path):
    processor = load_processor(tiny_model, "math")
    Image.new("RGB", (40, 30)).save(tmp_path / "a.png")
    for column in (*BENCHMARKS[name].columns, *filter(None, [BENCHMARKS[name].image_column])):
        row = {key: value for key, value in ROWS[name].items() if key != column}
        path = write_jsonl(tmp_path / "rows.jsonl", [row])
        with pytest.raises(UserError, match=f"no column '{column}', which --benchmark {name} needs"):
            BenchmarkJudge(Config(model="m", benchmark=name, data=path)).load(processor)


# --- with a model -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mme_folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("mme")
    rows = []
    for i in range(6):
        Image.new("RGB", (56, 56), (40 * i, 0, 0)).save(folder / f"{i}.png")
        common = {"question_id": str(i), "image": f"{i}.png", "category": "color" if i < 4 else "text_translation"}
        rows += [
            common | {"question": f"Is it {word}? Please answer yes or no.", "answer": word} for word in ("Yes", "No")
        ]
    return write_jsonl(folder / "mme.jsonl", rows)


def flags_of(tiny_model: str, mme_folder: str) -> dict:
    common = dict(model=tiny_model, benchmark="mme", data=mme_folder, engine="hf")
    return common | dict(max_completion_length=8, n=2, temperature=1.0)


def test_two_models_side_by_side(tiny_model, mme_folder, tmp_path, capsys):
    """Compare two models, then compare predictions with an earlier evaluation. The page must show what changed."""
    tiny.save_model(tmp_path / "other", seed=5)
    flags = flags_of(tiny_model, mme_folder)
    evaluate.main(Config(**flags, output=f"{tmp_path}/o", baseline=f"{tmp_path}/other"))
    scores = json.loads((tmp_path / "o" / "scores.json").read_text())
    assert scores["n"] == scores["baseline"]["n"] == scores["paired"]["rows"] == 12
    assert "baseline" in capsys.readouterr().out
    assert (tmp_path / "o" / "scores.png").stat().st_size > 5000
    assert "what changed" in (tmp_path / "o" / "completions.html").read_text()
    assert not list((tmp_path / "o").rglob("predictions.part*"))
    rows = [json.loads(line) for line in (tmp_path / "o" / "predictions.jsonl").read_text().splitlines()]
    for row in rows:  # only the first question about each image gets a correct answer
        row["responses"] = [row["answer"] if row["answer"] == "Yes" else "who knows"] * 2
    saved = write_jsonl(tmp_path / "better.jsonl", rows)
    evaluate.main(Config(predictions=saved, benchmark="mme", output=f"{tmp_path}/better", baseline=f"{tmp_path}/o"))
    better = json.loads((tmp_path / "better" / "scores.json").read_text())
    assert better["score"] == 2 * 50.0  # each category: 50 for half of its questions, 0 for complete images
    assert better["paired"]["difference"] == pytest.approx(100.0 - scores["score"])
    page = (tmp_path / "better" / "completions.html").read_text()
    assert "Wrong before, right after: 6" in page
    assert page.count("<article>") == page.count("<caption>before</caption>") == page.count("<caption>after</caption>")
    assert page.count('<td class="number">yes</td>') == page.count('<td class="number">no</td>') == 2 * 6
    cases = (
        ("narrow", lambda config: setattr(config.text_config, "intermediate_size", 64), "has a different shape"),
        ("untied", untie, "its lm_head.weight .*or only one has it"),
    )
    for name, change, reason in cases:
        tiny.save_model(tmp_path / name, change=change)
        with pytest.raises(UserError, match=reason):
            evaluate.main(Config(**flags, output=f"{tmp_path}/no", baseline=f"{tmp_path}/{name}"))
    with pytest.raises(UserError, match="or only one has it"):
        evaluate.main(
            Config(**flags | {"model": f"{tmp_path}/untied"}, output=f"{tmp_path}/no", baseline=flags["model"])
        )


def test_a_run_broken_off_goes_on(tiny_model, mme_folder, tmp_path, capsys):
    """If an evaluation is killed, running the same command again samples only the remaining rows. The predictions are
    identical to those of an uninterrupted evaluation. An evaluation on two processes writes the same predictions."""
    settings = flags_of(tiny_model, mme_folder)
    flags = [f"--{name}={value}" for name, value in settings.items()]
    evaluate.main(Config(**settings, output=f"{tmp_path}/whole"))
    script = "import evaluate; from common import cli; from evaluation import held_out; held_out.CHUNK = 2; "
    script += "cli.run(evaluate.main, cli.parse(evaluate.Config))"
    command = [sys.executable, "-c", script, *flags, f"--output={tmp_path}/killed"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    path = tmp_path / "killed" / "predictions.part"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (path.is_file() and path.read_text().count("\n") >= 3):
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    rows = path.read_text().count("\n") - 1
    assert 2 <= rows < 12
    with path.open("a") as file:
        file.write('{"responses": ["')  # a half-written line
    evaluate.main(Config(**settings, output=f"{tmp_path}/killed"))
    assert f"resuming: {rows} rows" in capsys.readouterr().err
    done = run_script("evaluate.py", *flags, f"--output={tmp_path}/two", processes=2)
    assert done.returncode == 0, done.stderr
    expected = (tmp_path / "whole" / "predictions.jsonl").read_text()
    assert (tmp_path / "killed" / "predictions.jsonl").read_text() == expected
    assert (tmp_path / "two" / "predictions.jsonl").read_text() == expected


def test_a_row_with_an_empty_cell_is_found_in_a_saved_baseline(tmp_path):
    """Some tables have NaN there. A file of predictions has null in its place."""
    row = {"question": "q", "choices": float("nan"), "unit": float("nan"), "precision": 1.0, "answer": "2.5"}
    rows = judged("mathvista", [row | {"question_type": "free_form", "answer_type": "float", "responses": ["2.5"]}])
    write_predictions(tmp_path, {}, rows, sampled=True)
    assert len(pair_predictions("mathvista", read_jsonl(tmp_path / "predictions.jsonl"), rows)) == 1


def test_unequal_numbers_of_responses_and_rows():
    """The largest k of pass@k is the smallest number of responses that any row has. Rows that occur several times are
    paired only if they occur the same number of times in both evaluations."""
    rows = judged("aime24", [AIME | {"responses": ["5"]}, AIME | {"problem": "q", "responses": ["5", "1", "1", "1"]}])
    scores = summarise_benchmark("aime24", rows)
    assert not [key for key in scores if key.startswith("pass@")]
    assert scores["score"] == pytest.approx((1 + 1 / 4) / 2)
    assert len(pair_predictions("aime24", [rows[0], rows[0], rows[1]], [rows[0], rows[1]])) == 1
    with_images = [row | {"image_digest": "a"} for row in rows]
    assert len(pair_predictions("aime24", with_images, [row | {"image_digest": "b"} for row in rows])) == 0


def test_a_comparison_does_not_overwrite_its_baseline(tmp_path):
    saved = write_jsonl(tmp_path / "p.jsonl", [AIME | {"response": "5"}])
    evaluate.main(Config(predictions=saved, benchmark="aime24", output=str(tmp_path / "o")))
    with pytest.raises(ValueError, match="output would overwrite the predictions that it reads"):
        Config(predictions=saved, benchmark="aime24", output=str(tmp_path / "o"), baseline=f"{tmp_path}/./o")
    with pytest.raises(ValueError, match="output would overwrite the predictions that it reads"):
        Config(predictions=f"{tmp_path}/o/predictions.jsonl", benchmark="aime24", output=str(tmp_path / "o"), limit=1)


def test_saved_predictions_do_not_delete_what_an_interrupted_evaluation_has_sampled(tmp_path):
    saved, output = write_jsonl(tmp_path / "p.jsonl", [AIME | {"response": "5"}]), tmp_path / "o"
    cfg = Config(predictions=saved, benchmark="aime24", output=str(tmp_path / "other"))
    evaluate.main(cfg)
    for folder in (output, output / "baseline"):
        folder.mkdir()
        (folder / "predictions.part").write_text("sampled in hours")
    evaluate.main(replace(cfg, output=str(output), baseline=str(tmp_path / "other")))
    for folder in (output, output / "baseline"):
        assert (folder / "predictions.part").read_text() == "sampled in hours"
        assert (folder / "predictions.jsonl").is_file()


def test_a_page_is_removed_only_if_it_is_that_of_an_earlier_comparison(tmp_path):
    saved, output = write_jsonl(tmp_path / "p.jsonl", [AIME | {"response": "5"}]), tmp_path / "run"
    output.mkdir()
    page = output / "completions.html"
    page.write_text("of a training run")
    cfg = Config(predictions=saved, benchmark="aime24", output=str(output))
    evaluate.main(cfg)
    assert page.read_text() == "of a training run"
    evaluate.main(replace(cfg, output=str(tmp_path / "other")))
    evaluate.main(replace(cfg, baseline=str(tmp_path / "other")))
    assert "what changed" in page.read_text()
    evaluate.main(cfg)
    assert not page.exists()
