"""The choices of a row whose answer is a letter: the question shows them, in whichever form the row has them."""

import json

import pytest

pytest.importorskip("parts.formats", reason="needs parts/formats, which is not here")

from common.errors import UserError
from data import load_samples

SHOWN = "Which?\nOptions:\nA. cat\nB. dog"


def load(tmp_path, row: dict):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "Which?", "answer": "B"} | row) + "\n")
    return load_samples(f"{tmp_path}/rows.jsonl", "vqa")[0]


@pytest.mark.parametrize("name", ["options", "choices", "Options", "answer_choices"])
@pytest.mark.parametrize(
    "choices",
    [
        ["cat", "dog"],
        ["A. cat", "B. dog"],
        [["A", "cat"], ["B", "dog"]],
        {"A": "cat", "B": "dog", "C": None},
        {"(A)": "cat", "(B)": "dog"},
        {"option_a": "cat", "option_b": "dog"},
        {"label": ["A", "B"], "text": ["cat", "dog"]},  # CommonsenseQA
        [{"label": "A", "text": "cat"}, {"label": "B", "text": "dog"}],
        [{"id": 0, "content": "cat"}, {"id": 1, "content": "dog"}],
        [{"A": "cat"}, {"B": "dog"}],
        "['cat', 'dog']",  # MMMU
        "['cat' 'dog']",  # NumPy
        '["cat", "dog"]',
        '{"A": "cat", "B": "dog"}',
        "A. cat\nB. dog",
        "(A) cat (B) dog",
        "A: cat, B: dog",
        "cat\ndog\n",
    ],
)
def test_choices_of_a_letter_are_shown(tmp_path, name, choices):
    assert load(tmp_path, {name: choices}).prompt == SHOWN


@pytest.mark.parametrize(
    "columns",
    [
        {"A": "cat", "B": "dog", "C": None, "D": ""},
        {"a": "cat", "b": "dog"},
        {"option_a": "cat", "option_b": "dog"},
        {"optionB": "dog", "optionA": "cat"},
        {"opa": "cat", "opb": "dog"},  # MedMCQA
        {"option_1": "cat", "option_2": "dog"},
        {"choice0": "cat", "choice1": "dog"},
    ],
)
def test_choices_in_columns_are_shown(tmp_path, columns):
    sample = load(tmp_path, columns)
    assert sample.prompt == SHOWN and load(tmp_path, {"question": sample.prompt} | columns).prompt == SHOWN


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"options": [2, 3.5]}, "Which?\nOptions:\nA. 2\nB. 3.5"),
        ({"options": "a ) 38 , b ) 27.5", "answer": "b"}, "Which?\nOptions:\na. 38\nb. 27.5"),  # MathQA
        ({"options": ["cat", "dog"], "answer": "<answer>(B) dog</answer>"}, SHOWN),
        ({"options": "A、猫 B、狗"}, "Which?\nOptions:\nA. 猫\nB. 狗"),
        ({"options": ["A、猫", "B、狗"]}, "Which?\nOptions:\nA、猫\nB、狗"),
        (
            {"options": [*range(12)], "answer": "K"},
            "\n".join(["Which?", "Options:", *(f"{x}. {i}" for i, x in enumerate("ABCDEFGHIJKL"))]),
        ),
        ({"options": ["x + y", "n"], "answer": "z"}, "Which?"),
        ({"options": ["cat", "dog"], "answer": "A, B"}, SHOWN),
        ({"options": ["cat", "dog"], "answer": "AB"}, SHOWN),
        ({"messages": [{"role": "user", "content": "Which?"}], "choices": ["cat", "dog"]}, SHOWN),
        ({"question": "Which?\n(A) cat (B) dog", "options": ["cat", "dog"]}, "Which?\n(A) cat (B) dog"),
        ({"question": "Which?\n**A.** cat\n**B.** dog", "A": "cat", "B": "dog"}, "Which?\n**A.** cat\n**B.** dog"),
        ({"options": ["cat", "dog"], "answer": "dog"}, "Which?"),  # an answer that says what it means
        ({"options": {"A": "cat", "B": "dog"}, "answer": "dog"}, "Which?"),
        ({"options": ["A", "B"]}, "Which?"),
        ({"options": None, "choices": [], "choice": "B"}, "Which?"),
        ({"A": 3, "B": 4, "answer": "7"}, "Which?"),
        ({"B": "dog", "C": "cow"}, "Which?"),
        ({"A": "cat", "B": "dog", "answer": "E"}, "Which?"),
    ],
)
def test_the_question_shows_what_its_answer_needs(tmp_path, row, prompt):
    assert load(tmp_path, row).prompt == prompt


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"options": "cat, dog"}, "the answer is a letter, but 'options' is not a list of texts"),
        ({"choices": [None, {"label": "A", "image": {"bytes": "x"}}]}, "'choices' is not a list of texts"),
        ({"options": [[1, 2], [3, 4]]}, "'options' is not a list of texts"),
        ({"options": "[broken"}, "'options' is not a list of texts"),
        ({"options": ["cat", "dog"], "answer": "D"}, "the answer is D, but 'options' has no such choice"),
    ],
)
def test_choices_that_cannot_be_shown_are_refused(tmp_path, row, message):
    with pytest.raises(UserError, match=f"rows.jsonl row 1: .*{message}"):
        load(tmp_path, row)
