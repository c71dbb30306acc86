"""Rows with boxes and points: every unit gives what the model writes, once, and what is not known is refused.

Guards against boxes of the file that are trained on as those of the resized picture, and against units by guess.
"""

import json
import pathlib

import pytest
from PIL import Image

pytest.importorskip("parts.formats", reason="needs parts/formats, which is not here")

import sft
from config import Columns, DataFlags
from data import load_processor, load_split
from inputs.rows import RowError, parse_row
from tests.helpers.marks import needs
from tests.helpers.models import save_tiny

BOX = [64, 120, 320, 480]  # in a file of 640 x 480
IN_UNITS = {
    "file": BOX,
    "file xywh": [64, 120, 256, 360],
    "unit": [0.1, 0.25, 0.5, 1.0],
    "unit xywh": [0.1, 0.25, 0.4, 0.75],
    "thousand": [100, 250, 500, 1000],
    "thousand xywh": [100, 250, 400, 750],
}
WRITTEN = {"qwen2_5_vl": ([14, 28, 70, 112], [140, 112]), "qwen3_vl": ([100, 250, 500, 1000], [1000, 1000])}


@pytest.fixture(scope="module", params=WRITTEN)
def processor(request, tmp_path_factory):
    """Return the processor of a family; it resizes 640 x 480 to 140 x 112."""
    processor = load_processor(
        save_tiny(request.param, tmp_path_factory.mktemp(request.param)), "vqa", max_pixels=18000
    )
    processor.name = request.param
    assert processor.preparation.fit(480, 640) == (112, 140)
    return processor


@pytest.fixture(scope="module")
def picture(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("pictures") / "a.png"
    Image.new("RGB", (640, 480)).save(path)
    return str(path)


def expected(processor) -> tuple[list[int], list[int]]:
    """Return BOX as the model writes it, and the extent."""
    return WRITTEN[processor.name]


def read(row: dict, picture: str, processor):
    row = {"prompt": "Where?", "images": [picture]} | row
    return parse_row(row, "row 1", pathlib.Path, Columns(), processor)


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("unit", IN_UNITS)
def test_every_unit_gives_what_the_model_writes(unit, as_text, picture, processor):
    box, extent = expected(processor)
    value = json.dumps(IN_UNITS[unit]) if as_text else IN_UNITS[unit]
    sample = read({"bbox": value, "coordinates": unit, "answer": "a cat"}, picture, processor)
    assert sample.fields == {"bbox": box, "coordinates": "model", "extent": extent}
    assert (sample.answer, sample.responses) == ("a cat", ["a cat"])


def test_places_alone_are_the_answer(picture, processor):
    box, _ = expected(processor)
    point = [box[0], box[1]]
    for row, answer in (
        ({"gt_bbox": BOX}, box),
        ({"boxes": [BOX, BOX]}, [box, box]),
        ({"bboxes": []}, []),
        ({"point": [64, 120]}, point),
        ({"point": [0, 0.1]}, [0, 0]),
        ({"points": [[64, 120]]}, [point]),
    ):
        sample = read(row | {"coordinates": "file"}, picture, processor)
        assert (sample.answer, sample.responses) == (json.dumps(answer), [json.dumps(answer)])
        assert sample.fields[next(iter(row))] == answer


def test_tags_stand_for_the_places_in_order(picture, processor):
    """In the prompt, then in the response; the gold answer has those of the response's end."""
    row = {
        "boxes": [BOX, [0, 0, 640, 240]],
        "point": [64, 120],
        "coordinates": "file",
        "prompt": "<image>What is beside <bbox>?",
        "answer": '<think>at <point></think><answer>{"bbox_2d": <bbox>}</answer>',
    }
    (box, (width, height)), sample = expected(processor), read(row, picture, processor)
    other, point = [0, 0, width, height // 2], box[:2]
    assert sample.prompt == f"<image>What is beside {box}?"
    assert sample.answer == f'{{"bbox_2d": {other}}}'
    assert sample.responses == [f'<think>at {point}</think><answer>{{"bbox_2d": {other}}}</answer>']


def test_a_chat_is_filled_too(picture, processor):
    turns = [{"role": "user", "content": "<image>Where?"}, {"role": "assistant", "content": "[<bbox>]"}]
    sample = parse_row(
        {"messages": turns, "images": [picture], "bbox": BOX, "coordinates": "file"},
        "row 1",
        pathlib.Path,
        Columns(),
        processor,
    )
    assert sample.responses == [f"[{expected(processor)[0]}]"]


def test_places_of_the_model_are_left_as_they_are(picture, processor):
    sample = read({"bbox": [1, 2, 3.5, 4], "coordinates": "model"}, picture, processor)
    assert sample.fields == {"bbox": [1, 2, 3.5, 4], "coordinates": "model"}
    assert sample.answer == "[1, 2, 3.5, 4]"


def test_a_turned_picture_counts_as_it_is_seen(tmp_path, processor):
    """The file is 480 x 640 and says that it is to be turned: it is seen as 640 x 480."""
    image, exif = Image.new("RGB", (480, 640)), Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "a.jpg", exif=exif)
    sample = read({"bbox": BOX, "coordinates": "file"}, str(tmp_path / "a.jpg"), processor)
    assert (sample.fields["bbox"], sample.fields["extent"]) == expected(processor)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"bbox": BOX}, "'bbox' holds places, and the column 'coordinates' is missing: write file, unit, thousand or"),
        ({"bbox": str(BOX)}, "'coordinates' is missing"),
        ({"point": [3, 4], "coordinates": "pixels"}, "the column 'coordinates' is 'pixels': write file"),
        ({"bbox": BOX, "coordinates": "file yx"}, "is 'file yx'"),
        ({"bbox": BOX, "coordinates": "unit"}, "is outside the picture of 640x480 pixels if 'coordinates' is 'unit'"),
        ({"bbox": [700, 2, 900, 9], "coordinates": "file"}, "'bbox': [700, 2, 900, 9] is outside the picture"),
        ({"bbox": [0.1, 0.2, 0.3, 0.4], "coordinates": "file"}, "is less than a pixel if 'coordinates' is 'file'"),
        ({"bbox": [0, 0, 1, 1], "coordinates": "file"}, "is less than a pixel"),
        ({"point": [0.1, 0.2], "coordinates": "file"}, "is less than a pixel"),
        ({"bbox": [300, 9, 200, 90], "coordinates": "file"}, "has no area as [x1, y1, x2, y2]: if it is [x, y, wid"),
        (
            {"bbox": [1, 2, 3], "coordinates": "file"},
            "'bbox' is neither [x1, y1, x2, y2] nor a list of them: [1, 2, 3]",
        ),
        ({"points": [3, 4, 5, 6], "coordinates": "file"}, "'points' is neither [x, y] nor"),
        ({"bbox": [1, 2, float("nan"), 4], "coordinates": "file"}, "'bbox' is neither"),
        ({"bbox": "[1, 2", "coordinates": "file"}, "'bbox' holds a list that is not JSON: [1, 2"),
        ({"bbox": BOX, "extent": 3, "coordinates": "file"}, "a column is named 'extent'"),
        ({"bbox": BOX, "coordinates": "file", "images": []}, "in one picture, and the row has 0"),
        ({"bbox": BOX, "coordinates": "file", "images": ["a.png", "b.png"]}, "in one picture, and the row has 2"),
        ({"bbox": BOX, "coordinates": "file", "images": ["missing.png"]}, "'bbox' cannot be converted: "),
        ({"bbox": BOX, "coordinates": "file", "answer": "<bbox> <bbox>"}, "2 tags <bbox> in the prompt and the answer"),
        ({"boxes": [BOX, BOX], "coordinates": "file", "answer": "<bbox>"}, "and 2 places for them"),
        ({"bbox": BOX, "point": [3, 4], "coordinates": "file"}, "no answer, and places in 'bbox' and 'point'"),
        ({"objects": {"bbox": [BOX]}, "answer": "<bbox>"}, "'objects' holds places: write them in columns"),
    ],
)
def test_what_is_not_known_is_refused_in_one_line(row, message, picture, processor):
    with pytest.raises(RowError) as refused:
        read(row, picture, processor)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_other_columns_of_these_names_are_left_alone(picture, processor):
    fields = {"points": 5, "box": "the red one", "objects": {"bbox": [BOX]}, "coordinates": "52.1, 13.3"}
    assert read(fields | {"answer": "3"}, picture, processor).fields == fields


def test_a_text_model_refuses_places(picture, tmp_path):
    text = load_processor(save_tiny("qwen2_5", tmp_path), "vqa")
    with pytest.raises(RowError, match="'bbox' cannot be converted: the model is text-only"):
        read({"bbox": BOX, "coordinates": "file"}, picture, text)


@needs("parts/convert")
def test_converted_files_keep_the_places_of_the_file(picture, processor, tmp_path):
    """They do not depend on the model; `--coordinates` names those of rows that do not say."""
    from parts import convert

    row = {"prompt": "Where?", "images": [picture], "bbox": BOX}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    names = dict(input_jsonl=f"{tmp_path}/rows.jsonl", output_jsonl=f"{tmp_path}/new.jsonl")
    assert convert.convert(convert.Config(command="convert", **names, coordinates="file")) == 1
    written = json.loads((tmp_path / "new.jsonl").read_text())
    assert (written["bbox"], written["coordinates"], written["answer"]) == (BOX, "file", "<bbox>")
    flags = DataFlags(data=f"{tmp_path}/new.jsonl")
    (sample,) = load_split(flags, flags.data, None, processor)
    assert json.loads(sample.answer) == sample.fields["bbox"] == expected(processor)[0]


def test_sft_trains_on_what_the_model_writes(picture, processor, tmp_path):
    row = {"prompt": "Where?", "images": [picture], "bbox": BOX, "coordinates": "file", "answer": '{"bbox_2d": <bbox>}'}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    cfg = sft.Config(task="vqa", data=f"{tmp_path}/rows.jsonl")
    (answered,) = sft.load_answers(cfg, cfg.data, processor)
    text = processor.tokenizer.decode(answered.ids[0])
    assert text.startswith(json.dumps({"bbox_2d": expected(processor)[0]}))


def test_a_teacher_with_another_picture_reads_no_pixels_of_this_one(picture, processor):
    row = {"bbox": BOX, "coordinates": "file", "teacher_images": [picture]}
    if processor.name == "qwen3_vl":  # 0 to 1000, whatever the size
        assert read(row, picture, processor).fields["bbox"] == expected(processor)[0]
    else:
        with pytest.raises(RowError, match="the teacher sees 'teacher_images': remove one"):
            read(row, picture, processor)
