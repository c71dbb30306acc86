"""ScreenSpot: a point in pixels of the resized picture and one from 0 to 1000, and which of both is the score."""

import json
import pathlib

import pytest
from PIL import Image

pytest.importorskip("parts.benchmarks", reason="needs parts/benchmarks, which is not here")

from common.errors import UserError
from data import load_processor
from evaluate import Config
from parts.benchmarks.scores import BenchmarkJudge, summarise_benchmark
from tests.helpers.models import save_tiny

UNIT = [0.5, 0.25, 0.75, 0.5]  # of a picture of 400 x 200, which is resized to 56 x 28
REPLIES = {  # -> whether it hits in pixels, and from 0 to 1000
    "<think>x</think><answer>[{'action': 'click', 'coordinate': [30, 10]}]</answer>": (1, 0),
    '{"point_2d": [600, 300]}': (0, 1),
    "[42, 14]": (1, 0),  # on the corner
    "[43, 14]": (0, 0),
    "(28, 7), (42, 14)": (1, 0),  # a box counts as its centre
    "[30, 10] or [600, 300]": (0, 0),
    "<think>[30, 10]": (0, 0),
    "": (0, 0),
}


def write(folder: pathlib.Path, **columns: object) -> str:
    Image.new("RGB", (400, 200)).save(folder / "a.png")
    row = {"instruction": "open it", "bbox": UNIT, "image": "a.png", "data_type": "icon", "data_source": "ios"}
    (folder / "rows.jsonl").write_text(json.dumps(row | columns) + "\n")
    return str(folder / "rows.jsonl")


def judge_of(data: str, **flags: object) -> BenchmarkJudge:
    return BenchmarkJudge(Config(model="m", benchmark="screenspot", data=data, **flags))


@pytest.mark.parametrize(
    ("family", "taken"), [("qwen2_5_vl", "in pixels of the resized picture"), ("qwen3_vl", "from 0 to 1000")]
)
@pytest.mark.parametrize("box", [UNIT, [200, 50, 300, 100]], ids=["unit", "pixels"])
def test_both_conventions_are_scored_and_the_familys_is_taken(family, taken, box, tmp_path, capsys):
    processor = load_processor(save_tiny(family, tmp_path / "model"), "vqa", min_pixels=0, max_pixels=56 * 28)
    judge = judge_of(write(tmp_path, bbox=box))
    (sample,) = judge.load(processor)
    assert f"screenspot: points {taken}, " in capsys.readouterr().err
    assert (sample.fields["unit_box"], sample.fields["resized"]) == (UNIT, [56, 28])
    rows = judge.judge([sample], [{"responses": list(REPLIES)}])
    assert [(m["in_pixels"], m["in_thousand"]) for m in rows[0]["measures"]] == list(REPLIES.values())
    scores = summarise_benchmark("screenspot", json.loads(json.dumps(rows)))
    assert scores["scoring"] == f"rule, points {taken}"
    assert (scores["in_pixels"], scores["in_thousand"]) == (3 / 8, 1 / 8)
    assert scores["score"] == (3 / 8 if family == "qwen2_5_vl" else 1 / 8)
    assert scores["no_answer"] == 3 / 8 and scores["parts"]["data_source"]["ios"]["n"] == 1


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"bbox": [200, 50, 100, 60]}, r"'bbox' is \[200, 50, 100, 60\], not the edges \[x1, y1, x2, y2\]"),
        ({"bbox": [1, 2, 3]}, "not the edges"),
        ({"bbox": "0.1 0.2"}, "not the edges"),
        ({"bbox": [300, 50, 500, 80]}, r"'bbox' \[300, 50, 500, 80\] is outside its picture of 400x200"),
    ],
)
def test_a_box_that_cannot_be_one_is_named(columns, message, tiny_model, tmp_path):
    with pytest.raises(UserError, match=message):
        judge_of(write(tmp_path, **columns)).load(load_processor(tiny_model, "vqa"))


def test_saved_rows_without_the_size_of_the_picture_are_refused(tmp_path):
    """The pixels of which picture, nobody could tell."""
    row = {"instruction": "open it", "bbox": UNIT, "response": "[1, 2]"}
    judge = judge_of("x")
    with pytest.raises(UserError, match="a saved row has no 'unit_box': score the model, or"):
        judge.judge([judge.saved_sample("row 1", row, {})], [{"responses": ["[1, 2]"]}])
