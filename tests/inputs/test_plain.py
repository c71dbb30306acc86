"""Which rows the core reads by itself, and that it reads them as parts/formats does."""

import base64
import io
import json
import pathlib
import textwrap
import urllib.parse

import pytest
from PIL import Image

from common.errors import UserError
from config import Columns
from data import load_samples
from inputs.rows import RowError, is_plain, parse_row
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
    {"prompt": "What?", "answer": "3", "images": ["DATA:image/png;base64,iVBO"]},
    {"prompt": "What?", "answer": "3", "response": "It is 3."},
    {"prompt": "What?", "answer": "3", "options": ["A. 3"]},
    {"prompt": "What?", "answer": "3", "extra_info": {"index": 1}},
    {"prompt": "What?", "answer": "3", "video": "a"},
    {"prompt": "What?", "answer": ["3"]},
    {"prompt": "What?", "answer": "B", "A": "3", "B": "4"},
    {"prompt": "What?", "answer": "B", "option_a": "3"},
    {"prompt": "What?", "answer": "3", "thinking": "I count."},
    {"prompt": "What?", "answer": "3", "tools": "[]"},
    {"prompt": "What?", "answer": "3", "loss": False},
    {"prompt": "What?", "answer": "3", "bbox": " [1, 2, 3, 4]", "coordinates": "model"},
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


PICTURE = Image.effect_noise((64, 48), 99).convert("RGB")
WRITTEN = {
    "as it is": lambda text: text,
    "wrapped": lambda text: "\n".join(textwrap.wrap(text, 76)),
    "wrapped on Windows": lambda text: "\r\n".join(textwrap.wrap(text, 64)) + "\r\n",
    "URL-safe": lambda text: text.replace("+", "-").replace("/", "_"),
    "unpadded": lambda text: text.rstrip("="),
    "percent-encoded": lambda text: urllib.parse.quote(text, safe=""),
    "wrapped, escaped twice": lambda text: "\\n".join(textwrap.wrap(text, 76)),
    "URL-safe, unpadded and wrapped": lambda text: "\n".join(
        textwrap.wrap(text.replace("+", "-").replace("/", "_").rstrip("="), 76)
    ),
}


@needs("parts/formats")
@pytest.mark.parametrize("form", WRITTEN)
@pytest.mark.parametrize(
    "before",
    [
        "data:image/{};base64,",
        "DATA:image/{};BASE64,",
        "data:;base64,",
        "data%3Aimage/{}%3Bbase64%2C",
        "base64,",
        "b'",
        "",
    ],
)
@pytest.mark.parametrize("kind", ["png", "jpeg", "gif", "webp", "bmp", "tiff"])
def test_base64_is_read_however_it_is_written(form, before, kind):
    PICTURE.save(file := io.BytesIO(), kind)
    text = before.format(kind) + WRITTEN[form](base64.b64encode(file.getvalue()).decode())
    (image,) = parse_row({"prompt": "?", "answer": "3", "images": [text]}, "row 1", pathlib.Path, Columns()).images
    assert image == file.getvalue()


@needs("parts/formats")
@pytest.mark.parametrize("path", ["iVBORw0KGgo.png", "/9j/4AAQ/photo.jpg", "Qk/UklGR", "data/a.png"])
def test_paths_that_look_like_base64_are_paths(path):
    row = {"prompt": "?", "answer": "3", "images": [path]}
    assert parse_row(row, "row 1", pathlib.Path, Columns()).images == [pathlib.Path(path)]


@needs("parts/formats")
def test_damaged_base64_is_refused():
    row = {"prompt": "?", "answer": "3", "images": ["data:image/png;base64,iVBO!!Rw"]}
    with pytest.raises(RowError, match="invalid base64"):
        parse_row(row, "row 1", pathlib.Path, Columns())
