"""Which rows the core reads by itself, and that it reads them as parts/formats does."""

import json
import pathlib

import pytest

from common.errors import UserError
from config import Columns
from data import load_samples
from inputs.rows import is_plain, parse_row
from tests.helpers.marks import needs

IMAGES = {"images": ["a.png"]}
PLAIN = [
    {"prompt": "<image>How many?", "answer": 3, **IMAGES},
    {"prompt": "What?", "answer": "<answer> 4 </answer>", "system": " ", "level": 5, "note": None},
    {
        "prompt": "a <image> b <image>",
        "answer": "so \\boxed{7}",
        "images": ["a.png", "file:///b%20c.png"],
        "subject": "algebra",
    },
    {"prompt": "{1, 2} or {3}?", "answer": 0.5, "images": None, "digit": 6, "question": "another column"},
]
OTHER = [
    {"prompt": [{"role": "user", "content": "What?"}], "answer": "3"},
    {"prompt": '[{"role": "user", "content": "What?"}]', "answer": "3"},
    {"prompt": "What?", "solution": "3"},
    {"problem": "What?", "answer": "3"},
    {"messages": [], "answer": "3", "prompt": "What?"},
    {"prompt": "What?", "answer": "3", "image": "a.png"},
    {"prompt": "What?", "answer": "3", "picture": "a.png"},
    {"prompt": "What?", "answer": "3", "Image 2": "x"},
    {"prompt": "What?", "answer": "3", "images": "a.png"},
    {"prompt": "What?", "answer": "3", "images": [{"path": "a.png"}]},
    {"prompt": "What?", "answer": "3", "response": "It is 3."},
    {"prompt": "What?", "answer": "3", "options": ["A. 3"]},
    {"prompt": "What?", "answer": "3", "extra_info": {"index": 1}},
    {"prompt": "What?", "answer": "3", "video": "a"},
    {"prompt": "What?", "answer": ["3"]},
]


@needs("parts/formats")
@pytest.mark.parametrize("row", PLAIN)
def test_a_plain_row_is_read_as_parts_formats_reads_it(row):
    from parts.formats import as_sample

    assert is_plain(row, ["prompt", "answer", "images"])
    assert vars(parse_row(row, "row 1", pathlib.Path, Columns())) == vars(
        as_sample(row, "row 1", pathlib.Path, Columns())
    )


@pytest.mark.parametrize("row", OTHER)
def test_other_rows_are_left_to_parts_formats(row):
    assert not is_plain(row, ["prompt", "answer", "images"])


def test_columns_of_other_names_are_plain_too():
    row = {"text": "What?", "gold": "3", "pictures": ["a.png"], "prompt": "not this"}
    sample = parse_row(row, "row 1", pathlib.Path, Columns("text", "gold", "pictures"))
    assert (sample.texts, sample.answer, sample.images) == (["<image>What?"], "3", [pathlib.Path("a.png")])
    assert sample.fields == {"prompt": "not this"}
    assert not is_plain({"text": "What?", "gold": "3"}, ["text", "gold", "pictures"]), "no column pictures"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": " ", "answer": "3"}, "no prompt text"),
        ({"prompt": "<image>?", "answer": "3"}, "1 <image> tags in the prompt but 0 images"),
        ({"prompt": "half \ud800", "answer": "3"}, "broken character"),
        ({"prompt": "What?", "answer": "3", "completion": "x"}, "a column is named 'completion'"),
    ],
)
def test_a_plain_row_that_cannot_be_used_is_named(row, message, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=f"rows.jsonl row 1: .*{message}"):
        load_samples(f"{tmp_path}/rows.jsonl", "vqa")
