"""Every data set format, and the error messages for invalid rows.

Parquet files and saved data sets are written with `datasets`, as in practice. Conversations and the JSON
format of VQA-RAD on OSF are written by hand.
"""

import ast
import base64
import decimal
import io
import json
import os
import pathlib
import re
import struct
import subprocess
import unicodedata
import warnings
import zipfile
import zlib

import datasets
import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image

pytest.importorskip("parts.formats", reason="needs parts/formats, which is not here")
pytest.importorskip("parts.convert", reason="needs parts/convert, which is not here")

from common.errors import UserError
from common.records import Sample
from config import Columns
from data import encode_prompt, load_processor, load_samples
from inputs.images import check_image, decode_image
from inputs.rows import Cell, raw_rows
from parts import convert
from tests.helpers.scripts import ROOT, VECTORS, run_script
from training.prompt_stream import row_at


def png(colour: str = "blue", size: int = 60) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (size, size), colour).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "images").mkdir()
    for i, colour in enumerate(("red", "green", "blue", "white")):
        (tmp_path / "images" / f"{i}.png").write_bytes(png(colour))
    return tmp_path


def jsonl(path: pathlib.Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def parquet(path: pathlib.Path, rows: list[dict], **features) -> str:
    table = datasets.Dataset.from_list(rows, features=datasets.Features(features) if features else None)
    table.to_parquet(str(path))
    return str(path)


BYTES = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}


def verl_row(content: str, answer: str, images: list | None = None, **more) -> dict:
    turns = [{"role": "user", "content": content}]
    model = {"style": "rule", "ground_truth": answer}
    return {"data_source": "d", "prompt": turns, "images": images, "ability": "math", "reward_model": model, **more}


# --- tables -----------------------------------------------------------------------------------------------------------


def test_easyr1_parquet_with_paths_and_with_bytes(folder):
    text = datasets.Value("string")
    paths = [
        {"problem": "<image>?", "answer": "1", "images": ["images/0.png"]},
        {"problem": "?", "answer": "2", "images": None},
    ]
    samples = load_samples(parquet(folder / "a.parquet", paths), "math")
    assert [len(s.images) for s in samples] == [1, 0]
    assert decode_image(samples[0].images[0]).getpixel((0, 0)) == (255, 0, 0)
    rows = [
        {"prompt": "a", "answer": "1", "images": [{"bytes": png("green"), "path": None}] * 2},
        {"prompt": "b", "answer": "2", "images": []},
        {"prompt": "<image>c", "answer": "3", "images": [{"bytes": None, "path": "images/2.png"}]},
    ]
    path = parquet(folder / "b.parquet", rows, prompt=text, answer=text, images=datasets.List(BYTES))
    samples = load_samples(path, "math")
    assert [s.prompt for s in samples] == ["<image><image>a", "b", "<image>c"]
    assert isinstance(samples[0].images[1], Cell), "a table's images must stay on disk"
    assert decode_image(samples[0].images[1]).getpixel((0, 0)) == (0, 128, 0)
    assert decode_image(samples[2].images[0]).getpixel((0, 0)) == (0, 0, 255)


def test_the_images_of_a_long_table_belong_to_their_rows(folder):
    """Rows are read a thousand at a time."""
    cells = [{"bytes": b"%d" % i, "path": None} for i in range(1001)]
    rows = [{"image": cell, "images": [cell]} for cell in cells]
    path = parquet(folder / "long.parquet", rows, image=BYTES, images=datasets.List(BYTES))
    source, row, _ = list(raw_rows(path))[-1]
    assert source.endswith("row 1001")
    assert row["image"].read() == row["images"][0].read() == b"1000"


def test_the_name_of_a_parquet_file_is_no_pattern(folder):
    (folder / "odd").mkdir()
    for name in ("train1", "train[1]"):
        path = parquet(folder / "odd" / f"{name}.parquet", [{"problem": name, "answer": "1"}])
    assert [sample.prompt for sample in load_samples(path, "math")] == ["train[1]"]


def test_verl_parquet(folder):
    rows = [
        verl_row("<image>How long is AB?", "5", [{"bytes": png(), "path": None}], extra_info={"question": "AB?"}),
        verl_row("What is 1+1?", "2", None, extra_info={"question": None}),
    ]
    samples = load_samples(parquet(folder / "v.parquet", rows), "math")
    assert [(s.prompt, s.answer, len(s.images)) for s in samples] == [
        ("<image>How long is AB?", "5", 1),
        ("What is 1+1?", "2", 0),
    ]
    assert samples[0].fields["question"] == "AB?"
    assert samples[0].fields["ability"] == "math"
    with_system = verl_row("q", "1")
    with_system["prompt"].insert(0, {"role": "system", "content": "Be brief."})
    (sample,) = load_samples(parquet(folder / "s.parquet", [with_system]), "math")
    assert sample.system == "Be brief."


def test_the_rows_own_system_prompt_takes_the_tasks_place(folder, tiny_model):
    path = jsonl(
        folder / "d.jsonl", {"prompt": "q", "answer": "1", "system": "Be brief."}, {"prompt": "q", "answer": "1"}
    )
    processor = load_processor(tiny_model, "count")
    texts = [processor.tokenizer.decode(encode_prompt(s, processor).engine_ids) for s in load_samples(path, "count")]
    assert "Be brief." in texts[0]
    assert "Count the objects" not in texts[0]
    assert "Count the objects" in texts[1]


@pytest.mark.parametrize(
    ("gold", "want"),
    [
        ('["\\\\frac{1}{2}"]', "\\frac{1}{2}"),
        ("['3', '4']", "3"),
        ("[7]", "7"),
        ("[1, 2]", "[1, 2]"),  # an interval, not a list
        ("[0, \\infty)", "[0, \\infty)"),
        ("[broken", "[broken"),
        ("[{[1]: 2}]", "[{[1]: 2}]"),
        ("5", "5"),
    ],
)
def test_skywork_ground_truth_is_the_first_item_of_its_list(folder, gold, want):
    flat = parquet(folder / "flat.parquet", [{"problem": "q", "ground_truth": gold}])
    nested = parquet(folder / "nested.parquet", [verl_row("q", gold)])
    assert [load_samples(path, "math")[0].answer for path in (flat, nested)] == [want, want]
    # a list in a column named "answer" is the answer itself, so it is not unwrapped
    assert load_samples(parquet(folder / "a.parquet", [{"problem": "q", "answer": gold}]), "math")[0].answer == gold


def test_saved_data_sets_and_their_splits(folder):
    images = [Image.open(folder / "images" / f"{i}.png") for i in range(3)]
    features = datasets.Features(
        id=datasets.Value("int64"),
        question=datasets.Value("string"),
        image=datasets.Image(),
        answer=datasets.Value("string"),
    )
    columns = {
        "id": [1, 2, 3],
        "question": ["<image>a", "b", "c"],
        "image": [*images[:2], None],
        "answer": list("xyz"),
    }
    table = datasets.Dataset.from_dict(columns, features=features)  # as in MMK12 and vqa-rad
    splits = datasets.DatasetDict(train=table, test=table.select([2]))
    splits.save_to_disk(str(folder / "saved"))
    samples = load_samples(str(folder / "saved"), "vqa")
    assert [(s.prompt, s.answer) for s in samples] == [("<image>a", "x"), ("<image>b", "y"), ("c", "z")]
    assert decode_image(samples[1].images[0]).getpixel((0, 0)) == (0, 128, 0)
    assert samples[0].fields == {"id": 1}
    assert [s.prompt for s in load_samples(f"{folder}/saved@test", "vqa")] == ["c"]
    assert len(load_samples(f"{folder}/saved@train+test", "vqa")) == 4
    with pytest.raises(UserError, match=r"has no split validation; it has train, test: write .*saved@SPLIT"):
        load_samples(f"{folder}/saved@validation", "vqa")
    geometry = datasets.Dataset.from_dict(
        {"images": [images[:2], images[:1]], "problem": ["<image>x<image>", "y"], "answer": ["1", "2"]},
        features=datasets.Features(
            images=datasets.List(datasets.Image()), problem=datasets.Value("string"), answer=datasets.Value("string")
        ),
    )
    geometry.save_to_disk(str(folder / "one"))
    assert [len(s.images) for s in load_samples(f"{folder}/one", "math")] == [2, 1]
    with pytest.raises(UserError, match=r"one' has no split test; it has train: write .*one@SPLIT"):
        load_samples(f"{folder}/one@test", "math")


def test_a_folder_of_parquet_files_is_read_as_the_hub_has_it(folder):
    (folder / "repo" / "data").mkdir(parents=True)
    for split in ("train", "test"):
        parquet(folder / "repo" / "data" / f"{split}-00000-of-00001.parquet", [{"problem": split, "answer": "1"}])
    assert [s.prompt for s in load_samples(str(folder / "repo"), "math")] == ["train"]
    assert [s.prompt for s in load_samples(f"{folder}/repo@test", "math")] == ["test"]


def test_images_of_a_table_are_found_in_its_folder_or_next_to_it(folder):
    rows = [{"problem": "<image>?", "answer": "1", "images": [f"images/{i}.png"]} for i in range(2)]
    datasets.Dataset.from_list(rows).save_to_disk(str(folder / "saved"))
    (folder / "saved" / "images").mkdir()
    (folder / "images" / "1.png").rename(folder / "saved" / "images" / "1.png")
    samples = load_samples(f"{folder}/saved", "math")
    assert [decode_image(s.images[0]).getpixel((0, 0)) for s in samples] == [(255, 0, 0), (0, 128, 0)]


def test_what_is_no_table(folder):
    (folder / "x.parquet").write_bytes(b"not parquet")
    with pytest.raises(UserError, match=r"no data in '.*x\.parquet'"):
        load_samples(str(folder / "x.parquet"), "math")
    (folder / "empty").mkdir()
    with pytest.raises(UserError, match=r"no data in '.*empty': .*no main\.csv"):
        load_samples(str(folder / "empty"), "math")
    with pytest.raises(UserError, match=r"no data at 'someone/something': not a local path, and not on the hub"):
        load_samples("someone/something@test", "math")
    with pytest.raises(UserError, match=r"'.*a\.parquet' has no split test; it has train"):
        load_samples(parquet(folder / "a.parquet", [{"problem": "q", "answer": "1"}]) + "@test", "math")


def test_a_broken_picture_in_a_table_is_named(folder):
    whole = png()
    rows = [
        {"problem": "<image>?", "answer": "1", "images": [{"bytes": content, "path": None}]}
        for content in (whole, whole[: len(whole) // 2], None)
    ]
    text = datasets.Value("string")
    path = parquet(folder / "p.parquet", rows, problem=text, answer=text, images=datasets.List(BYTES))
    message = (
        r"2 of 3 rows .*p\.parquet row 2: image in column 'images', number 1: not a readable.*row 3: .*neither bytes"
    )
    with pytest.raises(UserError, match=message):
        load_samples(path, "math")


# --- VQA-RAD ----------------------------------------------------------------------------------------------------------


def conversation(question: object, answer: object, system: object = None) -> dict:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"conversations": [{"role": "system", "content": system}] * bool(system) + turns}


def parts(*items: str) -> list[dict]:
    return [
        {"type": "image", "image": item} if item.endswith(".png") else {"type": "text", "text": item} for item in items
    ]


def test_conversations(folder):
    path = jsonl(
        folder / "c.jsonl",
        conversation(parts("images/0.png", "Question: Is it red?"), parts("Answer: yes")),
        conversation("Question: what is it?", "Answer: a text", system="Be brief."),
        conversation(parts("Question: which? ", "images/1.png", "images/2.png"), parts("the first")),
        {"image": "images/3.png", **conversation("Question: one image outside the turns?", "Answer: yes")},
        {"images": ["images/3.png"], **conversation([{"type": "image"}, {"type": "text", "text": "Which?"}], "one")},
        {"image_name": "a field", **conversation(parts("images/0.png", "Where?"), "here")},
    )
    samples = load_samples(path, "vqa")
    assert [(s.prompt, s.answer) for s in samples] == [
        ("<image>Is it red?", "yes"),
        ("what is it?", "a text"),
        ("which? <image><image>", "the first"),
        ("<image>one image outside the turns?", "yes"),
        ("<image>Which?", "one"),
        ("<image>Where?", "here"),
    ]
    assert samples[5].fields == {"image_name": "a field"}
    assert samples[1].system == "Be brief."
    assert decode_image(samples[0].images[0]).getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "video", "video": "a.mp4"},
        {"type": "video_url", "video_url": {"url": "a.mp4"}},
        {"type": "input_audio", "text": "hidden", "input_audio": {"data": "x"}},
        {"video": "a.mp4", "text": "What?"},
        {"audio": "a.wav"},
    ],
)
def test_a_video_or_sound_in_a_turn_is_refused(folder, part):
    path = jsonl(
        folder / "c.jsonl", conversation([part, {"type": "text", "text": "What?", "video": None}], "Answer: yes")
    )
    with pytest.raises(UserError, match=r"row 1: a part of a turn is (video|audio), but only text and images"):
        load_samples(path, "vqa")


def test_a_path_in_a_table_that_is_a_number_is_named(folder):
    path = parquet(folder / "a.parquet", [{"problem": "?", "answer": "1", "images": [{"bytes": None, "path": 5}]}])
    with pytest.raises(UserError, match=r"row 1: no image at .*5"):
        load_samples(path, "math")


OSF = {"image_organ": "HEAD", "qid": "1", "image_name": "0.png", "question": "Is it red?", "answer": "Yes"}
OSF |= {"answer_type": "CLOSED ", "question_type": "PRES", "phrase_type": "freeform"}


def test_osf_json_with_its_splits(folder, capsys):
    (folder / "images").rename(folder / "VQA_RAD Image Folder")
    rows = [OSF, OSF | {"image_name": "1.png", "question": "How many?", "answer": 3, "answer_type": "OPEN "}]
    rows += [OSF | {"phrase_type": "test_freeform"}, OSF | {"phrase_type": "test_para", "image_name": "2.png"}]
    (folder / "VQA_RAD.json").write_text(json.dumps(rows))
    samples = load_samples(str(folder / "VQA_RAD.json"), "vqa")
    assert [(s.prompt, s.answer) for s in samples] == [("<image>Is it red?", "Yes"), ("<image>How many?", "3")]
    assert [s.fields["answer_type"] for s in samples] == ["CLOSED", "OPEN"]
    (sample, _) = load_samples(str(folder / "VQA_RAD.json"), "vqa", columns=Columns(answer="image_organ"))
    assert sample.answer == "HEAD"
    err = capsys.readouterr().err
    assert "2 rows of" in err
    assert "VQA_RAD.json@test" in err
    assert len(list(raw_rows(f"{folder}/VQA_RAD.json"))) == 4, "predictions on the test split must not be left out"
    with pytest.raises(UserError, match=r"VQA_RAD.json' has no splits: remove @test"):  # instead of ignoring it
        list(raw_rows(f"{folder}/VQA_RAD.json@test"))
    assert len(load_samples(f"{folder}/VQA_RAD.json@test", "vqa")) == 2
    assert len(load_samples(f"{folder}/VQA_RAD.json@train+test", "vqa")) == 4
    with pytest.raises(UserError, match="no 'phrase_type' column to tell its split: remove @test"):
        load_samples(jsonl(folder / "plain.jsonl", {"prompt": "q", "answer": "a"}) + "@test", "vqa")


BAD_ROWS = {
    "no user turn": ({"conversations": [{"role": "assistant", "content": "x"}]}, "must be user, assistant, …, user"),
    "no answer turn": (
        {"conversations": [{"role": "user", "content": "x"}]},
        "does not end with the assistant's answer",
    ),
    "turns that are not a list": ({"conversations": "hello"}, "not a list of turns"),
    "two turns of the user": (
        {"conversations": [{"role": "user", "content": "a"}, *conversation("b", "c")["conversations"]]},
        "must be user, assistant, …, user",
    ),
    "a system turn in the middle": (
        {"conversations": [*conversation("a", "b")["conversations"], *conversation("c", "d", "s")["conversations"]]},
        "must be user, assistant, …, user",
    ),
    "an image in an earlier answer": (
        {
            "conversations": [
                *conversation("a", parts("images/0.png"))["conversations"],
                *conversation("c", "d")["conversations"],
            ]
        },
        "the assistant's turn contains an image",
    ),
    "a tag in an earlier answer": (
        {"conversations": [*conversation("a", "<image>")["conversations"], *conversation("c", "d")["conversations"]]},
        "the assistant's turn contains an image",
    ),
    "an image in the system prompt": (
        {"messages": conversation("q", "y", system=parts("images/0.png"))["conversations"]},
        "the system's turn contains an image",
    ),
    "a tool's turn": (
        {"messages": [{"role": role, "content": "x"} for role in ("user", "assistant", "tool", "user")], "answer": "y"},
        "must be user, assistant, …, user",
    ),
    "fewer images than tags in all turns": (
        {
            "messages": [*conversation("<image>a", "b")["conversations"], {"role": "user", "content": "<image>c"}],
            "answer": "y",
            "images": ["images/0.png"],
        },
        "2 <image> tags in the prompt but 1 images",
    ),
    "an image in the answer": (conversation("a", parts("images/0.png")), "the assistant's turn contains an image"),
    "a part of an unknown kind": (conversation([{"type": "sound"}], "b"), "neither an image nor text"),
    "content of a wrong type": (conversation(5, "b"), "neither text nor a list of parts"),
    "an assistant in a prompt": (
        {"prompt": [{"role": "assistant", "content": "x"}], "answer": "y"},
        "must be user, assistant",
    ),
    "bytes that are text": ({"prompt": "q", "answer": "y", "images": [{"bytes": "abc"}]}, "is not bytes"),
    "an empty path": ({"prompt": "q", "answer": "y", "images": [""]}, "not a list of paths or images"),
    "an answer that is NaN": ({"prompt": "q", "answer": float("nan")}, "the answer is empty"),
    "a conversation without a gold answer": (conversation("q", "Answer: "), "the answer is empty"),
    "an answer that is true": ({"prompt": "q", "answer": True}, "'answer' is true: write the expected answer as text"),
    "a broken data: URL": ({"prompt": "q", "answer": "y", "images": ["data:image/png;base64,?"]}, "invalid base64"),
    "an invalid file name": ({"prompt": "q", "answer": "y", "images": ["x" * 5000]}, "image .*xxx"),
    "an osf row without a question": (
        {k: v for k, v in OSF.items() if k != "question"},
        "no text under 'prompt', 'problem' or 'question'",
    ),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows_of_every_shape(folder, name):
    row, message = BAD_ROWS[name]
    path = jsonl(folder / "d.jsonl", {"prompt": "fine", "answer": "yes"}, row)
    with pytest.raises(UserError, match=rf"1 of 2 rows cannot be used: .*d\.jsonl row 2: .*({message})"):
        load_samples(path, "vqa")
    assert len(load_samples(path, "vqa", skip_bad_rows=True)) == 1


def test_numbers_and_addresses_are_read_as_they_are_meant(folder):
    address = "data:image/png;base64," + base64.b64encode(png("green")).decode()
    rows = [{"prompt": "q", "answer": 3.0, "images": [], "image": address}, {"prompt": "q", "answer": 2.5}]
    samples = load_samples(jsonl(folder / "n.jsonl", *rows), "vqa")
    assert [s.answer for s in samples] == ["3", "2.5"]
    assert decode_image(samples[0].images[0]).getpixel((0, 0)) == (0, 128, 0)


@pytest.mark.parametrize("name", ["bytes", "path", "url", "base64"])
def test_an_image_may_hold_base64(folder, name):
    text = base64.b64encode(png("green")).decode()
    rows = [{"prompt": "q", "answer": "3", "images": [{name: text}]}, {"prompt": "q", "answer": "3", "image": text}]
    for sample in load_samples(jsonl(folder / "n.jsonl", *rows), "vqa"):
        assert decode_image(sample.images[0]).getpixel((0, 0)) == (0, 128, 0)


def test_files_named_after_another_format_say_so(folder):
    (folder / "lines.json").write_text('{"prompt": "q", "answer": "1"}\n{"prompt": "q", "answer": "1"}\n')
    (folder / "list.jsonl").write_text('[{"prompt": "q", "answer": "1"}]')
    (folder / "latin.jsonl").write_bytes('{"prompt": "größe", "answer": "1"}'.encode("latin-1"))
    for name, message in (
        ("lines.json", "name it .jsonl"),
        ("list.jsonl", "name it .json"),
        ("latin.jsonl", "as UTF-8"),
    ):
        with pytest.raises(UserError, match=message):
            load_samples(f"{folder}/{name}", "math")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("images_path;question;answer\na;b;c\n", "has no column .* cells must be separated by commas"),
        ("images_path,question,answer,answer\n0.png,q,1,2\n", "a column appears twice in the header"),
        ("images_path,question,answer\n\n\n0.png,q\n", "row 4: more or fewer cells"),
        ('images_path,question,answer\n0.png,"two\nlines",1\n9.png,q,2\n', "row 3: no image at"),
    ],
)
def test_counting_tables_that_are_off(folder, text, message):
    (folder / "main.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        load_samples(str(folder), "count")


# --- columns, several data sets ---------------------------------------------------------------------------------------


def test_columns_named_by_the_user(folder):
    path = jsonl(folder / "d.jsonl", {"ask": "<image>?", "gold": "1", "scan": "images/0.png", "prompt": "no"})
    (sample,) = load_samples(path, "math", columns=Columns("ask", "gold", "scan"))
    assert (sample.prompt, sample.answer, len(sample.images)) == ("<image>?", "1", 1)
    assert sample.fields == {"prompt": "no"}
    with pytest.raises(UserError, match=r"no column 'asks' \(columns: ask, gold, scan, prompt\)"):
        load_samples(path, "math", columns=Columns("asks"))
    with pytest.raises(UserError, match=r"no column 'golden' \(columns: ask, gold, .*prompt\)"):
        load_samples(path, "math", columns=Columns("ask", "golden"))
    (folder / "main.csv").write_text("file,how,n\n0.png,How many?,3\n")
    (sample,) = load_samples(str(folder), "count", columns=Columns("how", "n", "file"))
    assert (sample.prompt, sample.answer) == ("<image>How many?", "3")


def test_several_data_sets_are_mixed(folder, tmp_path_factory):
    text = parquet(folder / "t.parquet", [verl_row(f"sum {i}", str(i)) for i in range(6)])
    image = jsonl(
        folder / "i.jsonl", *({"prompt": f"see {i}", "answer": "1", "images": ["images/0.png"]} for i in range(2))
    )
    samples = load_samples(f"{text}, {image}", "math")
    assert [s.source_index for s in samples] == [0] * 6 + [1] * 2
    order = [row_at(index, len(samples), 0) for index in range(8)]
    assert sorted(order) == list(range(8))
    assert order != sorted(order), "the rows of all data sets must be shuffled together"
    twice = load_samples(f"{text},{image},{image}", "math")
    assert [s.source_index for s in twice] == [0] * 6 + [1] * 2 + [2] * 2, "a data set may be named several times"
    with pytest.raises(UserError, match="has an empty entry"):
        load_samples(f"{text},,{image}", "math")
    odd = tmp_path_factory.mktemp("a, b")
    assert len(load_samples(jsonl(odd / "x,y.jsonl", {"prompt": "q", "answer": "1"}), "math")) == 1
    bad = jsonl(folder / "bad.jsonl", {"prompt": "q", "answer": ""})
    with pytest.raises(UserError, match=r"bad\.jsonl: no usable row"):
        load_samples(f"{text},{bad}", "math", skip_bad_rows=True)


# --- duplicates, corrupt images, archives -----------------------------------------------------------------------------


def test_duplicates_are_left_out_with_skip_bad_rows(folder, capsys):
    row = {"prompt": "q", "answer": "1", "images": ["images/0.png"]}
    path = jsonl(folder / "d.jsonl", row, row | {"images": ["images/1.png"]}, row)
    assert len(load_samples(path, "math")) == 3
    assert "1 duplicate rows (kept; --skip_bad_rows leaves them out): " in capsys.readouterr().err
    assert len(load_samples(path, "math", skip_bad_rows=True)) == 2
    err = capsys.readouterr().err
    assert "duplicate rows (left out): " in err
    assert "row 3 repeats" in err


@pytest.mark.parametrize("kind", ["png", "jpg", "webp", "bmp", "gif"])
def test_a_truncated_picture_of_any_kind_is_found(folder, kind):
    noise = Image.effect_noise((120, 90), 80).convert("RGB")
    noise.save(folder / f"whole.{kind}")
    content = (folder / f"whole.{kind}").read_bytes()
    (folder / f"half.{kind}").write_bytes(content[: len(content) // 2])
    rows = [{"prompt": "q", "answer": "1", "images": [name]} for name in (f"whole.{kind}", f"half.{kind}")]
    with pytest.raises(UserError, match=rf"1 of 2 rows .*row 2: image .*half\.{kind}: not a readable image"):
        load_samples(jsonl(folder / "d.jsonl", *rows), "math")


def test_a_flipped_byte_in_a_png_is_found(folder):
    content = bytearray(png(size=200))
    content[len(content) // 2] ^= 0xFF
    (folder / "flipped.png").write_bytes(content)
    path = jsonl(folder / "d.jsonl", {"prompt": "q", "answer": "1", "images": ["flipped.png"]})
    with pytest.raises(UserError, match="not a readable image"):
        load_samples(path, "math")


def raw_png(
    width: int, height: int, data: bytes | None, depth: int = 8, after: tuple[tuple[bytes, bytes], ...] = ()
) -> bytes:
    """Return a PNG, grey by default, with right checksums around any `data` and other chunks `after` it."""
    header = struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0)
    chunks = [(b"IHDR", header), *([] if data is None else [(b"IDAT", data)]), *after, (b"IEND", b"")]
    parts = [struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize(
    "data", [b"garbage" * 20, zlib.compress(bytes(1000 * 101))[:-9], zlib.compress(bytes(1000 * 101 - 1))]
)
def test_a_png_without_all_of_its_rows_is_refused(data):
    with pytest.raises(ValueError, match="not a readable image"):
        check_image(raw_png(100, 1000, data))


@pytest.mark.parametrize(
    "content",
    [
        raw_png(
            30, 20, zlib.compress(b"".join(bytes([7 * (i == 11), *range(30)]) for i in range(20)))
        ),  # no such filter
        raw_png(30, 20, None),  # no data
        raw_png(30, 20, zlib.compress(bytes(20 * 31)), after=((b"tEXt", b"Raw profile type exif\0\nexif\n 12\nzz"),)),
    ],
)
def test_a_png_that_cannot_be_decoded_does_not_pass_the_check(content):
    for read in (check_image, decode_image):
        with pytest.raises(ValueError, match="not a readable image"):
            read(content)


def test_the_size_of_an_image_turned_by_its_metadata_is_that_of_the_decoded_image():
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    Image.new("RGB", (30, 20)).save(jpeg := io.BytesIO(), "JPEG", xmp=xmp)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (30, 20)).save(png := io.BytesIO(), "PNG", exif=exif)
    for content in (jpeg.getvalue(), png.getvalue()):
        assert check_image(content) == (30, 20) == decode_image(content).size[::-1]


def test_whole_pngs_of_every_depth_pass():
    assert check_image(raw_png(100, 1000, zlib.compress(bytes(1000 * 101)))) == (1000, 100)
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
        Image.new(mode, (33, 7)).save(content := io.BytesIO(), "PNG")
        assert check_image(content.getvalue()) == (7, 33)


def test_an_image_with_too_many_pixels_is_refused_undecoded(folder):
    """A PNG of 13,000 x 13,000 16-bit pixels takes a few hundred kB, and gigabytes once it is decoded."""
    content = raw_png(13_000, 13_000, b"", depth=16)
    for read in (check_image, decode_image):
        with pytest.raises(ValueError, match=r"13000x13000, which is more than 64 megapixels"):
            read(content)
    (folder / "huge.png").write_bytes(content)
    path = jsonl(folder / "d.jsonl", {"prompt": "q", "answer": "1", "images": ["huge.png"]})
    with pytest.raises(UserError, match=r"row 1: image .*huge\.png: the image is 13000x13000"):
        load_samples(path, "math")


def test_a_16_bit_scan_is_rescaled_in_bands():
    values = np.random.default_rng(0).integers(300, 60_000, (600, 20)).astype(np.uint16)
    low, high = values.min(), values.max()
    expected = ((values - low) * (255 / (float(high) - float(low)))).round()
    assert np.array_equal(np.asarray(decode_image(Image.fromarray(values)))[..., 0], expected)


@pytest.mark.parametrize("kind", ["EPS", "PPM", "PCX", "TGA", "ICO"])
def test_only_common_formats_are_opened(folder, kind, monkeypatch):
    """Pillow decodes EPS with Ghostscript, whatever the file's name."""
    monkeypatch.setattr(subprocess, "check_call", lambda *a, **k: pytest.fail("a program was started"))
    Image.new("RGB", (20, 20)).save(folder / "a.png", kind)
    for read in (check_image, decode_image):
        with pytest.raises(ValueError, match="it is none of PNG, JPEG, WEBP, GIF, BMP, TIFF"):
            read(str(folder / "a.png"))


def test_sizes_are_those_of_the_upright_picture(folder, tiny_model):
    sideways = Image.new("RGB", (280, 56), "red")
    exif = sideways.getexif()
    exif[0x0112] = 6
    for name in ("x.jpg", "x.webp"):
        sideways.save(folder / name, exif=exif)
        path = jsonl(folder / "d.jsonl", {"prompt": "q", "answer": "1", "images": [name]})
        processor = load_processor(tiny_model, "math", max_pixels=5600)
        length = len(encode_prompt(load_samples(path, "math")[0], processor).ids)
        assert load_samples(path, "math", processor=processor, max_prompt_length=length)
        with pytest.raises(UserError, match=f"its prompt has {length} tokens"):
            load_samples(path, "math", processor=processor, max_prompt_length=length - 1)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_a_part_of_an_upright_picture_is_not_turned_again(kind):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 90)).save(file := io.BytesIO(), kind, exif=exif)
    upright = decode_image(file.getvalue())
    assert upright.size == (90, 40)
    assert decode_image(upright.crop((0, 0, 80, 20))).size == (80, 20)


def test_a_corrupt_image_in_row_7_of_10_is_named_before_the_model_loads(folder, tiny_model, tmp_path):
    """The model folder has no weights, so loading the model first would raise a different error."""
    weightless = tmp_path / "weightless"
    subprocess.run(["cp", "-r", tiny_model, weightless], check=True)
    (weightless / "model.safetensors").unlink()
    (folder / "images" / "2.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    rows = [{"prompt": f"q{i}", "answer": "1", "images": [f"images/{2 if i == 7 else 0}.png"]} for i in range(1, 11)]
    path = jsonl(folder / "ten.jsonl", *rows)
    flags = [f"--model={weightless}", f"--data={path}", f"--output={tmp_path}/out"]
    done = run_script("grpo.py", *flags)
    assert done.returncode == 2
    assert "error: 1 of 10 rows cannot be used: " in done.stderr
    assert "ten.jsonl row 7: image " in done.stderr
    assert "2.png: not a readable image" in done.stderr
    assert "Traceback" not in done.stderr
    done = run_script(
        "grpo.py", f"--model={weightless}", f"--data={path}", f"--output={tmp_path}/out", "--skip_bad_rows"
    )
    assert "cannot load a model" in done.stderr, "without that row, the first error must come from loading the model"


def test_ten_gigabytes_of_zeros_are_refused_unread(tmp_path):
    """A real 10 MB ZIP bomb that unpacks to 10 GB. It consists of one deflated block, repeated many times."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(bytes(2**26)) + packer.flush(zlib.Z_FULL_FLUSH)
    repeats = 10 * 2**30 // 2**26
    stream = block * repeats + packer.flush()
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("main.csv", "images_path,question,answer\nzeros.png,How many?,3\n")
        info = zipfile.ZipInfo("images/zeros.png")
        info.compress_type = zipfile.ZIP_STORED
        archive.writestr(info, stream)
        info.compress_type, info.file_size = zipfile.ZIP_DEFLATED, 10 * 2**30
    with pytest.raises(UserError, match=r"bomb\.zip would unpack to 10\.0 GiB; the limit is 8 GiB"):
        load_samples(str(tmp_path / "bomb.zip"), "count")
    assert [p.name for p in tmp_path.iterdir()] == ["bomb.zip"]


def test_a_zip_with_one_huge_file_or_two_data_sets_is_refused(tmp_path):
    table = "images_path,question,answer\n1.png,How many?,3\n"
    with zipfile.ZipFile(tmp_path / "huge.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("main.csv", table)
        archive.writestr("images/1.png", bytes(300 * 2**20))
    with pytest.raises(UserError, match=r"'images/1\.png' would unpack to 300 MiB; the limit for one file is 256 MiB"):
        load_samples(str(tmp_path / "huge.zip"), "count")
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as archive:
        archive.writestr("a/main.csv", table)
        archive.writestr("b/main.csv", table)
    with pytest.raises(UserError, match=r"has 2 main\.csv files"):
        load_samples(str(tmp_path / "two.zip"), "count")


def test_a_zip_that_lies_about_its_size_is_no_way_around(tmp_path):
    """The ZIP directory gives a size of 100 bytes, but the stream contains 100 MB. Reading stops after 100 bytes."""
    with zipfile.ZipFile(tmp_path / "liar.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("main.csv", "images_path,question,answer\nzeros.png,How many?,3\n")
        archive.writestr("images/zeros.png", bytes(100 * 2**20))
        archive.getinfo("images/zeros.png").file_size = 100
    with pytest.raises(UserError, match=r"row 2: image .*zeros\.png: not a readable image"):
        load_samples(str(tmp_path / "liar.zip"), "count")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"image_path": "images/0.png"},
            "column 'image_path' seems to hold an image: name it with --columns images=NAME",
        ),
        ({"Images": ["images/0.png"]}, "column 'Images' seems to hold an image"),
        ({"img": "data:image/png;base64,AAAA"}, "column 'img' seems to hold an image"),
        ({"img": base64.b64encode(png()).decode()}, "column 'img' seems to hold an image"),
        ({"picture": {"bytes": None, "path": "0.png"}}, "column 'picture' seems to hold an image"),
        ({"scan": "images/0.png"}, "column 'scan' seems to hold an image"),
        ({"images": ["https://example.com/a.png"]}, "images are not downloaded: save https://example.com/a.png"),
        ({"images": ["A" * 10_000]}, r"^image .{,200}: not a readable image \(.*name too long"),
        ({"system": 5}, "the system prompt is not text"),
        ({"answer": float("inf")}, "'answer' is infinite, or too large for a number"),
    ],
)
def test_what_would_be_ignored_or_misread_is_refused(folder, row, message):
    with pytest.raises(UserError) as error:
        load_samples(jsonl(folder / "d.jsonl", {"prompt": "q", "answer": "1"} | row), None)
    assert re.search(message, str(error.value).split("; fix them")[0].partition("row 1: ")[2]), error.value


def test_columns_about_images_are_no_images(folder):
    row = {"prompt": "q", "answer": "1", "image_id": 5, "image_type": "none", "has_image": False, "figure": ""}
    row |= {"was": "lost.png"}  # not there, nor named like one
    assert load_samples(jsonl(folder / "d.jsonl", row), None)[0].images == []


def test_image_beside_images_is_the_same_or_refused(folder):
    row = {"prompt": "q", "answer": "1", "images": ["images/0.png", "images/1.png"]}
    for same in ("images/0.png", ["images/1.png"], "a chart", None):
        (sample,) = load_samples(jsonl(folder / "d.jsonl", row | {"image": same}), None)
        assert len(sample.images) == 2
    other = row | {"images": ["images/0.png"], "image": "images/1.png"}
    with pytest.raises(UserError, match="'images' and 'image' differ: put all images into 'images', or set"):
        load_samples(jsonl(folder / "d.jsonl", other), None)
    (sample,) = load_samples(jsonl(folder / "d.jsonl", other), None, columns=Columns(images="images"))
    assert [path.name for path in sample.images] == ["0.png"]


def test_two_system_prompts_are_refused(folder):
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    with pytest.raises(UserError, match="there are two system prompts"):
        load_samples(jsonl(folder / "d.jsonl", {"prompt": chat, "answer": "1", "system": "t"}), None)


def test_a_pipe_is_no_image(folder):
    os.mkfifo(folder / "pipe.png")
    with pytest.raises(UserError, match=r"pipe\.png: not a readable image \(it is not a file\)"):
        load_samples(jsonl(folder / "d.jsonl", {"prompt": "q", "answer": "1", "images": ["pipe.png"]}), None)


def test_the_path_of_a_file_url_is_decoded(folder):
    (folder / "a b.png").write_bytes(png("red"))
    row = {"prompt": "q", "answer": "1", "images": [f"FILE://{folder}/a%20b.png"]}
    assert len(load_samples(jsonl(folder / "d.jsonl", row), None)[0].images) == 1


def test_an_invalid_orientation_swaps_nothing():
    image = Image.new("RGB", (10, 20))
    exif = Image.Exif()
    exif[0x0112] = 9
    image.save(file := io.BytesIO(), "JPEG", exif=exif)
    assert check_image(file.getvalue()) == (20, 10) == decode_image(file.getvalue()).size[::-1]


def test_rows_of_commas_are_blank(folder):
    table = "images_path,question,answer\nimages/0.png,q,1\n" + ",,\n" * 3 + " , ,\nimages/0.png,r,2\n"
    (folder / "main.csv").write_text(table)
    assert [sample.source for sample in load_samples(str(folder), "count")] == [
        f"{folder}/main.csv row 2",
        f"{folder}/main.csv row 7",
    ]
    (folder / "main.csv").write_text(table + ",,\n" * (2**20 + 1))
    with pytest.raises(UserError, match="more than 1,048,576 blank rows"):
        load_samples(str(folder), "count")


def test_odd_zips_are_refused(folder):
    for names, message in ((["main.csv", "main.csv"], "holds a file twice"), (["a\\main.csv"], "has a backslash")):
        with zipfile.ZipFile(folder / "z.zip", "w") as archive, warnings.catch_warnings(action="ignore"):
            for name in names:
                archive.writestr(name, "images_path,question,answer\n")
        with pytest.raises(UserError, match=message):
            load_samples(f"{folder}/z.zip", "count")


SFT = [
    {"messages": [{"role": "user", "content": "<image>red?"}, {"role": "assistant", "content": "yes"}]},
    {"conversations": [{"from": "human", "value": "<image>red?"}, {"from": "gpt", "value": "Answer: yes"}]},
    {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "<image>red?"},
            {"role": "assistant", "content": "<think>It is.</think>\n<answer> yes </answer>"},
        ]
    },
]


@pytest.mark.parametrize("row", SFT, ids=["messages", "from and value", "reasoning"])
def test_sft_rows_are_read_and_converted(folder, row):
    source = jsonl(folder / "sft.jsonl", row | {"images": ["images/0.png"]})
    (sample,) = load_samples(source, "vqa")
    assert (sample.prompt, sample.answer, len(sample.images)) == ("<image>red?", "yes", 1)
    convert.convert(convert.Config("convert", source, str(folder / "easyr1.jsonl")))
    assert json.loads((folder / "easyr1.jsonl").read_text())["answer"] == "yes"


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([{"from": "human", "value": "q"}], "'messages' is not a list of turns, or does not end with the assistant's"),
        ([3], "does not end with the assistant's answer"),
        ([{"from": ["gpt"], "value": "a"}], "does not end with the assistant's answer"),
        ([{"from": "tool", "value": "q"}, {"from": "gpt", "value": "a"}], "must be user, assistant"),
        ([{"from": "human", "value": None}, {"from": "gpt", "value": "a"}], "neither text nor a list of parts"),
    ],
)
def test_odd_sft_rows_are_refused(folder, turns, message):
    with pytest.raises(UserError, match=message):
        load_samples(jsonl(folder / "sft.jsonl", {"messages": turns}), "vqa")


# --- rows as they are published ---------------------------------------------------------------------------------------

PUBLISHED = {  # file -> (prompt, gold answer, images, system prompt) of each row
    "easyr1": [("<image>Find x.", "3", "a.png", None)],
    "open_r1_mm": [("<image>Which is larger?", "B", "a.png", None)],
    "r1v": [
        ("<image>How many items are there in the image?", "3", "a.png", None),
        ("<image>How many red items are there?", "0", "b.png", None),
    ],
    "swift_grpo": [
        ("<image>How many items are there?", "3", "a.png", None),
        ("<image><image>How many in both?", "5", "a.png b.png", None),
    ],
    "swift_query": [("<image>How many?", "3", "a.png", None)],
    "swift_sft": [("<image>How many?", "3", "a.png", "Be brief.")],
    "trl_chat": [("<image>How many?", "3", "a.png", "Think first.")],
    "verl": [("<image>Find x. Put the final answer in \\boxed{}.", "3", "a.png", None)],
    "video_r1_image": [("<image>What is x?", "68", "a.png", None)],
    "vlmr1": [("<image>How many?", "3", "a.png", None), ("<image>Box?", "3", "a.png", None)],
}


def as_read(sample: Sample) -> tuple[str, str, str, str | None]:
    return sample.prompt, sample.answer, " ".join(path.name for path in sample.images), sample.system


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_rows_are_read_as_they_are_meant(name, folder):
    source = str(VECTORS / "rows" / f"{name}.jsonl")
    samples = load_samples(source, "math")
    assert [as_read(sample) for sample in samples] == PUBLISHED[name]
    convert.convert(convert.Config("convert", source, str(folder / "easyr1.jsonl"), task="vqa"))
    again = load_samples(str(folder / "easyr1.jsonl"), "vqa")
    assert all(same(a, b) for a, b in zip(samples, again, strict=True))


def test_every_vector_of_published_rows_is_tested():
    assert {path.stem for path in (VECTORS / "rows").glob("*.jsonl")} == set(PUBLISHED)


@pytest.mark.parametrize(
    ("gold", "want"),
    [
        (3, "3"),
        ("<think>It is <answer>4</answer>? No.</think><answer>\n3 </answer>", "3"),
        ("<Answer> 3 </Answer>", "3"),
        ("<answer>4</answer> wait <answer>3</answer>.", "3"),
        ("<think>Two and one.</think>\n\n3", "3"),
        ("<answer>$\\boxed{\\frac{\\sqrt{3}}{2}}$</answer>", "\\frac{\\sqrt{3}}{2}"),
        ("There are 2 and 1, so $x = \\boxed{3}$.", "3"),
        ("He has 2 + 1 = <<2+1=3>>3.\n#### 3", "3"),  # GSM8K
        ("#### A heading\nand text", "#### A heading\nand text"),
        ("\\boxed{1} or \\boxed{2}", "\\boxed{1} or \\boxed{2}"),
        (" x<y and y>z ", "x<y and y>z"),
    ],
)
@pytest.mark.parametrize("column", ["answer", "ground_truth", "solution", "response", "reward_model", "messages"])
def test_the_final_answer_is_read_from_any_column(folder, gold, want, column):
    row = {"problem": "q", column: gold}
    if column == "reward_model":
        row[column] = {"ground_truth": gold}
    elif column == "messages":
        row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": str(gold)}]}
    (sample,) = load_samples(jsonl(folder / "d.jsonl", row), None)
    assert (sample.prompt, sample.answer, sample.fields) == ("q", want, {})


VIDEO_R1 = {"problem": "Which?", "data_type": "image", "options": [], "path": "./images/0.png"}
VIDEO_R1 |= {"solution": "<answer>B</answer>"}


@pytest.mark.parametrize(
    ("change", "prompt", "images"),
    [
        ({}, "<image>Which?", 1),
        ({"path": ["images/0.png", "images/1.png"]}, "<image><image>Which?", 2),
        ({"options": ["A. red", "B. blue"]}, "<image>Which?\nOptions:\nA. red\nB. blue", 1),
        (
            {"problem": "Which?\n(A) red (B) blue", "options": ["A. red", "B. blue"]},
            "<image>Which?\n(A) red (B) blue",
            1,
        ),
        ({"options": ["red", "blue"]}, "<image>Which?\nOptions:\nA. red\nB. blue", 1),
        ({"images": ["images/1.png"], "path": "clip.mp4", "data_type": "video"}, "<image>Which?", 1),
        ({"images": ["images/1.png"]}, "<image>Which?", 1),
        ({"data_type": "text", "path": ""}, "Which?", 0),
        ({"data_type": None, "path": "scripts/make.py"}, "Which?", 0),
    ],
)
def test_video_r1_rows_have_their_image_in_path(folder, change, prompt, images):
    (sample,) = load_samples(jsonl(folder / "d.jsonl", VIDEO_R1 | change), "vqa")
    assert (sample.prompt, len(sample.images), sample.answer) == (prompt, images, "B")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data_type": "video", "path": "./a.mp4"}, "'data_type' is 'video', but only text and images are supported"),
        ({"data_type": "video"}, "'data_type' is 'video'"),
        ({"data_type": None, "path": "./a.mp4"}, "the column 'path' holds a video or sound"),
        (
            {"data_type": None, "path": None, "video_path": ["./a.MP4"]},
            "the column 'video_path' holds a video or sound",
        ),
        ({"path": None}, "'data_type' is 'image', but no column has an image: name it with --columns images=NAME"),
        ({"path": "images/none"}, "no image at .*none"),
        ({"path": None, "image_path": "images/0.png"}, "the column 'image_path' seems to hold an image"),
    ],
)
def test_other_video_r1_rows_are_refused(folder, change, message):
    with pytest.raises(UserError, match=f"row 1: {message}"):
        load_samples(jsonl(folder / "d.jsonl", VIDEO_R1 | change), "vqa")


USER, REPLY = {"role": "user", "content": "q"}, {"role": "assistant", "content": "<answer> 3 </answer>"}


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"messages": [USER], "answer": 3}, {}),
        ({"messages": [USER], "ground_truth": "3", "solution": "4"}, {}),
        ({"messages": [USER, REPLY], "solution": "<think>2 + 1</think>3"}, {}),
        ({"messages": [USER, REPLY, USER], "solution": "3"}, {}),
        ({"messages": [USER, REPLY | {"content": ""}], "solution": "3"}, {}),
        ({"messages": [USER, REPLY | {"content": "It is 3"}], "solution": "3"}, {"answer": "solution"}),
        ({"messages": None, "problem": "q", "solution": "3"}, {}),  # a column of a table that other rows need
        ({"messages": [USER, REPLY], "ask": "q", "solution": "3"}, {"prompt": "ask"}),
        ({"query": "q", "response": "It is 3", "solution": "3", "history": []}, {}),
    ],
)
def test_the_answer_to_a_users_turn(folder, row, columns):
    (sample,) = load_samples(jsonl(folder / "d.jsonl", row), "math", columns=Columns(**columns))
    assert (sample.prompt, sample.answer) == ("q", "3")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [USER, REPLY], "solution": "4"}, "the assistant's answer and 'solution' differ: remove one"),
        ({"prompt": [USER, REPLY], "solution": "4"}, "must be user, assistant"),
        ({"messages": "q", "solution": "3"}, "'messages' is not a list of turns"),
        ({"query": "q", "response": "3", "history": [["a", "b"]]}, "'history' holds earlier turns"),
        ({"problem": "q", "solution": [10, 20, 30, 40]}, "'answer' is neither text nor a number"),
        ({"problem": "q", "solution": "<think>and so on"}, "the answer is empty"),
        ({"problem": "q", "solution": "The result is \\boxed{}"}, "the answer is empty"),
    ],
)
def test_rows_whose_answer_is_unclear_are_refused(folder, row, message):
    with pytest.raises(UserError, match=f"row 1: .*{message}"):
        load_samples(jsonl(folder / "d.jsonl", row), None)


# --- what a file stores in another form than it means -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("gold", "want"),
    [
        ("6.02e23", "6.02e+23"),
        ("0.00005", "0.00005"),
        ("1e-3", "0.001"),
        ("1e-9", "1e-9"),
        ("1e300", "1e+300"),
        ("12345678.0", "12345678"),
        ("-0.0", "0"),
        ("2.50", "2.5"),
        ("100000000000000000000", "100000000000000000000"),
    ],
)
@pytest.mark.parametrize("kind", ["answer", "ground_truth"])
def test_a_number_in_json_is_written_as_a_person_would(folder, gold, want, kind):
    column = f'"answer": {gold}' if kind == "answer" else f'"reward_model": {{"ground_truth": {gold}}}'
    (folder / "n.jsonl").write_text(f'{{"prompt": "q", {column}}}\n')
    assert load_samples(f"{folder}/n.jsonl", "math")[0].answer == want


NARROW = {
    "float32": (datasets.Value("float32"), [0.1, 5e-5, 6.02e23, 2.0, 1 / 3], "0.1 0.00005 6.02e+23 2 0.33333334"),
    "float16": (datasets.Value("float16"), [0.1, 2.5, 3.0, 0.333, 65504.0], "0.1 2.5 3 0.333 65500"),
    "float64": (datasets.Value("float64"), [0.1, 5e-5, 2.0**-20, 1 / 3], "0.1 0.00005 9.5367431640625e-7 0.333333"),
    "decimal": (datasets.Value("decimal128(10, 2)"), ["0.10", "2.50", "3.00", "-1.25", "100"], "0.10 2.50 3 -1.25 100"),
    "class": (datasets.ClassLabel(names=["cat", "dog", "no"]), [0, 1, 2, 1], "cat dog no dog"),
    "json": (datasets.Json(), [3, "yes", 0.5, 2.0, "7 cm"], "3 yes 0.5 2 7 cm"),
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", NARROW)
def test_a_gold_answer_in_a_table_is_read_as_it_is_meant(folder, name, nested):
    """float32 0.1 is 0.10000000149 as a float64, and a class label is stored as its index."""
    feature, values, want = NARROW[name]
    values = [decimal.Decimal(value) for value in values] if name == "decimal" else values
    text = datasets.Value("string")
    features = datasets.Features({"problem": text, "reward_model": {"ground_truth": feature}})
    rows = {"problem": ["q"] * len(values), "reward_model": [{"ground_truth": value} for value in values]}
    if not nested:
        features = datasets.Features({"problem": text, "answer": feature})
        rows = {"problem": ["q"] * len(values), "answer": values}
    table = datasets.Dataset.from_dict(rows, features=features)
    table.to_parquet(f"{folder}/t.parquet")
    table.save_to_disk(f"{folder}/saved")
    for source in ("t.parquet", "saved"):
        answers = " ".join(sample.answer for sample in load_samples(f"{folder}/{source}", None))
        assert answers.startswith(want) if name == "float64" else answers == want


def test_other_columns_of_labels_have_names_too(folder):
    label = datasets.ClassLabel(names=["easy", "hard"])
    rows = {"problem": ["q", "q"], "answer": ["1", "2"], "level": [1, -1], "tags": [[0, 1], None]}
    text = datasets.Value("string")
    features = datasets.Features(problem=text, answer=text, level=label, tags=datasets.List(label))
    datasets.Dataset.from_dict(rows, features=features).to_parquet(f"{folder}/t.parquet")
    first, second = load_samples(f"{folder}/t.parquet", "math")
    assert (first.fields, second.fields) == ({"level": "hard", "tags": ["easy", "hard"]}, {"level": None, "tags": None})
    with pytest.raises(UserError, match="row 2: the answer is empty"):  # a row of a test split without labels
        load_samples(f"{folder}/t.parquet", "vqa", columns=Columns(answer="level"))


@pytest.mark.parametrize(
    ("columns", "named", "want"),
    [
        ("image_1 image_2", "image_1", "image_1 image_2"),
        ("image_2 image_1", None, "image_1 image_2"),
        ("image1 image2 image3", "image2", "image1 image2 image3"),
        ("image_10 image_9 image_1", "image_1", "image_1 image_9 image_10"),
        ("image image_2", None, "image image_2"),
        ("scan-2 scan-1 image_id", "scan-1", "scan-1 scan-2"),
        ("images_2 images_1", "images_1", "images_1 images_2"),
    ],
)
@pytest.mark.parametrize("in_table", [False, True])
def test_numbered_image_columns_are_all_used_in_order(folder, columns, named, want, in_table):
    paths = {name: f"images/{i}.png" for i, name in enumerate(columns.split()) if not name.endswith("id")}
    row = {name: paths.get(name, 7) for name in columns.split()} | {"prompt": "q", "answer": "1"}
    source = jsonl(folder / "d.jsonl", row)
    if in_table:
        cells = {name: {"bytes": (folder / path).read_bytes(), "path": None} for name, path in paths.items()}
        source = parquet(folder / "d.parquet", [row | cells])
    (sample,) = load_samples(source, "math", columns=Columns(images=named))
    got = [decode_image(image).tobytes() for image in sample.images]
    assert got == [decode_image(folder / paths[name]).tobytes() for name in want.split()]


def test_numbered_image_columns_may_be_empty_in_a_row(folder):
    rows = [
        {"prompt": "q", "answer": "1", "image_1": "images/0.png", "image_2": image} for image in (None, [], "x.png")
    ]
    assert [len(sample.images) for sample in load_samples(jsonl(folder / "d.jsonl", *rows[:2]), "math")] == [1, 1]
    with pytest.raises(UserError, match=r"no image at .*x\.png"):
        load_samples(jsonl(folder / "d.jsonl", *rows), "math")


TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<image>red?"}]
PARTS = [{"type": "image"}, {"type": "text", "text": "red?"}]
ANSWERED = [*TURNS, {"role": "assistant", "content": "3"}]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": json.dumps(TURNS)},
        {"prompt": json.dumps([{"content": turn["content"], "role": turn["role"]} for turn in TURNS], indent=2)},
        {"prompt": f"\n {json.dumps(TURNS)} "},
        {"messages": json.dumps(ANSWERED)},
        {"conversations": json.dumps([{"from": "system", "value": "Be brief."}, {"from": "human", "value": "red?"}])},
        {"prompt": json.dumps([TURNS[0], {"role": "user", "content": PARTS}])},
        {"prompt": [TURNS[0], {"role": "user", "content": json.dumps(PARTS)}]},
        {"prompt": json.dumps([TURNS[0], {"role": "user", "content": json.dumps(PARTS)}])},
        {"prompt": json.dumps(TURNS[1]), "system": "Be brief."},
    ],
)
def test_a_chat_that_is_stored_as_text_is_a_chat(folder, row):
    row = {"answer": "3", "image": "images/0.png"} | row
    for source in (jsonl(folder / "d.jsonl", row), parquet(folder / "d.parquet", [row])):
        (sample,) = load_samples(source, "math")
        assert (sample.prompt, sample.system, sample.answer) == ("<image>red?", "Be brief.", "3")


@pytest.mark.parametrize(
    "prompt",
    [
        str(TURNS),  # as Python prints it
        json.dumps(TURNS)[:-9],
        json.dumps(TURNS) + " Answer in one word.",
        "[{'role': 'user' 'content': 'q'} {'role': 'user'}]",
        '{"role": "user", "content": "q"',
        "\ufeff" + json.dumps(TURNS),
        json.dumps(json.dumps(TURNS)),
        json.dumps([*TURNS, TURNS[1]]),
        json.dumps(PARTS),
    ],
)
def test_a_chat_as_text_that_cannot_be_read_is_refused(folder, prompt):
    with pytest.raises(
        UserError, match=r"row 1: a (chat is stored as text that is not JSON|prompt given as a chat must)"
    ):
        load_samples(jsonl(folder / "d.jsonl", {"prompt": prompt, "answer": "1"}), "math")


@pytest.mark.parametrize(
    "prompt", ['[{"a": 1}]', "[1, 2]", '{"type": "circle", "r": 2}: what is its area?', "{x", "[]"]
)
def test_a_question_that_looks_like_json_stays_text(folder, prompt):
    assert load_samples(jsonl(folder / "d.jsonl", {"prompt": prompt, "answer": "1"}), "math")[0].prompt == prompt


def test_the_reply_of_a_conversation_stays_as_it_is(folder):
    reply = '[{"type": "box", "text": "cat"}]'
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": reply}]}
    assert load_samples(jsonl(folder / "d.jsonl", row), None)[0].answer == reply


@pytest.fixture
def configurations(folder):
    """A folder with the configurations easy and hard-1.5, of which the latter has two splits."""
    card = "---\nconfigs:\n"
    for config, splits in (("easy", ["train"]), ("hard-1.5", ["train", "test"])):
        card += f"- config_name: {config}\n  data_files:\n"
        (folder / "many" / config).mkdir(parents=True)
        for split in splits:
            card += f"  - split: {split}\n    path: {config}/{split}-*\n"
            row = {"problem": f"{config} {split}", "answer": "1", "images": ["images/many.png"]}
            parquet(folder / "many" / config / f"{split}-0.parquet", [row])
    (folder / "many" / "README.md").write_text(f"{card}---\n")
    (folder / "many" / "images").mkdir()
    (folder / "many" / "images" / "many.png").write_bytes(png("blue"))
    return folder / "many"


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        (":easy", ["easy train"]),
        (":hard-1.5", ["hard-1.5 train"]),
        (":hard-1.5@test", ["hard-1.5 test"]),
        (":hard-1.5@train+test", ["hard-1.5 train", "hard-1.5 test"]),
        ("/easy", ["easy train"]),
    ],
)
def test_a_configuration_of_a_local_folder_is_chosen_by_its_name(configurations, spec, want):
    samples = load_samples(f"{configurations}{spec}", "math", image_dir=str(configurations))
    assert [sample.prompt.removeprefix("<image>") for sample in samples] == want
    if ":" in spec:
        assert decode_image(load_samples(f"{configurations}{spec}", "math")[0].images[0]).getpixel((0, 0)) == (
            0,
            0,
            255,
        )


def test_configurations_that_cannot_be_chosen_are_named(configurations, folder):
    datasets.Dataset.from_list([{"problem": "q", "answer": "1"}]).save_to_disk(str(folder / "saved"))
    (folder / "main.csv").write_text("images_path,question,answer\nimages/0.png,q,1\n")
    jsonl(folder / "d.jsonl", {"prompt": "q", "answer": "1"})
    for spec, message in (
        ("many", r"has several configurations \(easy, hard-1\.5\): write .*many:CONFIG"),
        ("many@test", r"has several configurations \(easy, hard-1\.5\)"),
        ("many:none", r"no data in .*many:none'.*Available: \['easy', 'hard-1\.5'\]"),
        ("many:", "has several configurations"),
        ("saved:easy", "saved' has no configurations: remove :easy"),
        ("d.jsonl:easy", r"d\.jsonl' has no configurations: remove :easy"),
        (":easy", "has no configurations: remove :easy"),
    ):
        with pytest.raises(UserError, match=message):
            load_samples(f"{folder}/{spec}" if spec[0] != ":" else f"{folder}{spec}", "math")


@pytest.mark.parametrize(
    ("encoding", "name"),
    [
        ("gbk", "苹果"),
        ("gb18030", "㐀果"),
        ("big5", "蘋果"),
        ("big5", "成功"),  # its last byte is a backslash
        ("cp932", "りんご"),
        ("cp949", "사과"),
        ("utf-8", "苹果"),
        ("utf-8", "cafe\u0301"),
        ("cp437", "café"),
    ],
)
@pytest.mark.parametrize("top", ["", "a/"])
def test_names_in_a_zip_that_are_not_marked_as_utf8_are_found(folder, encoding, name, top):
    """As Windows packs them: bytes of the system's encoding, which Python's zipfile reads as cp437."""

    class Member(zipfile.ZipInfo):
        def _encodeFilenameFlags(self):
            return self.filename.encode(encoding, "replace"), 0

    row = unicodedata.normalize("NFC", name)
    with zipfile.ZipFile(folder / "z.zip", "w") as archive:
        archive.writestr(Member(f"{top}main.csv"), f"images_path,question,answer\n{row}.png,How many?,3\n")
        archive.writestr(Member(f"{top}{name}.png"), png())
    (sample,) = load_samples(f"{folder}/z.zip", "count")
    assert decode_image(sample.images[0]).size == (60, 60)


@pytest.mark.parametrize("place", ["one.parquet", "alone", "beside", "split", "groups.parquet"])
def test_a_parquet_file_without_rows_is_named(folder, place, capfd):
    empty = datasets.Dataset.from_dict({"problem": [], "answer": []}, features=None)
    source = folder / place
    if place == "groups.parquet":  # without a row group
        pyarrow.parquet.ParquetWriter(source, pyarrow.schema({"problem": pyarrow.string()})).close()
    elif place == "one.parquet":
        empty.to_parquet(source)
    else:
        source.mkdir()
        empty.to_parquet(source / {"alone": "train.parquet", "beside": "b.parquet", "split": "test.parquet"}[place])
        if place != "alone":
            parquet(
                source / {"beside": "a.parquet", "split": "train.parquet"}[place], [{"problem": "q", "answer": "1"}]
            )
    with pytest.raises(UserError, match=r"\.parquet: no usable row: the file has none; remove it$"):
        load_samples(str(source), "math")
    assert "Failed to read" not in capfd.readouterr().err


# --- convert ----------------------------------------------------------------------------------------------------------


def converted(output: pathlib.Path, source: str, *flags: str) -> list[dict]:
    done = run_script("data.py", "convert", f"--input_jsonl={source}", f"--output_jsonl={output}", *flags)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in output.read_text().splitlines()]


def same(a: Sample, b: Sample) -> bool:
    images_a, images_b = ([decode_image(image).tobytes() for image in sample.images] for sample in (a, b))
    return (a.prompt, a.answer, a.system) == (b.prompt, b.answer, b.system) and images_a == images_b


def test_convert_keeps_columns_that_the_first_row_lacks(folder):
    rows = {"prompt": "p", "answer": "1"}, {"prompt": "q", "answer": "2", "system": "Be brief.", "level": 3}
    convert.convert(convert.Config("convert", jsonl(folder / "h.jsonl", *rows), str(folder / "h.parquet")))
    first, second = load_samples(str(folder / "h.parquet"), None)
    assert (first.system, second.system, second.fields["level"]) == (None, "Be brief.", 3)
    for value in (2**70, "\ud83d"):
        wide = jsonl(folder / "wide.jsonl", rows[0] | {"extra": value})
        with pytest.raises(UserError, match=r"wide\.parquet: .*: write NAME\.jsonl instead"):
            convert.convert(convert.Config("convert", wide, str(folder / "wide.parquet")))


def test_an_accented_name_in_a_zip_from_a_mac_is_found(folder):
    with zipfile.ZipFile(folder / "mac.zip", "w") as archive:
        archive.writestr("main.csv", "images_path,question,answer\nimages/caf\u00e9.png,How many?,3\n")
        archive.writestr("images/cafe\u0301.png", png("green"))
    (sample,) = load_samples(f"{folder}/mac.zip", "count")
    assert decode_image(sample.images[0]).size


def test_convert_writes_vqa_rad_as_easyr1(folder):
    (folder / "elsewhere").mkdir()
    source = jsonl(
        folder / "elsewhere" / "c.jsonl", conversation(parts("0.png", "Question: red?"), parts("Answer: yes"))
    )
    rows = converted(folder / "out.jsonl", source, f"--image_dir={folder}/images")
    assert rows == [{"prompt": "<image>red?", "answer": "yes", "images": ["images/0.png"]}]
    rows = converted(folder / "elsewhere" / "out.jsonl", source, f"--image_dir={folder}/images")
    assert rows[0]["images"] == [str(folder / "images" / "0.png")], (
        "images outside the output folder must get absolute paths"
    )


def test_convert_round_trips_every_format(folder):
    (folder / "main.csv").write_text("images_path,question,answer\nimages/0.png,How many?,3\n")
    with zipfile.ZipFile(folder / "z.zip", "w") as archive:
        archive.write(folder / "main.csv", "deep/main.csv")
        archive.write(folder / "images" / "0.png", "deep/images/0.png")
    image = [{"bytes": png("green"), "path": None}]
    verl = parquet(folder / "v.parquet", [verl_row("<image>q", "1", image, extra_info={"question": "q"})])
    (folder / "o.json").write_text(json.dumps([OSF]))
    saved = datasets.Dataset.from_list([{"problem": "a", "answer": "1"}])
    saved.save_to_disk(str(folder / "saved"))
    sources = [str(folder), f"{folder}/z.zip", verl, f"{folder}/saved", f"{verl},{folder}/saved"]
    sources.append(jsonl(folder / "e.jsonl", {"prompt": "p", "answer": 4, "system": "s", "level": 3}))
    for number, source in enumerate(sources):
        output = folder / "new" / f"{number}.jsonl"
        assert convert.convert(convert.Config("convert", source, str(output))) >= 1
        before, after = load_samples(source, None), load_samples(str(output), None)
        assert len(before) == len(after)
        assert all(same(a, b) for a, b in zip(before, after)), source
        assert [a.fields for a in after] == [json.loads(json.dumps(b.fields)) for b in before]
        convert.convert(convert.Config("convert", source, str(output.with_suffix(".parquet"))))
        again = load_samples(str(output.with_suffix(".parquet")), None)
        assert len(again) == len(before) and all(same(a, b) for a, b in zip(before, again)), source
    output = folder / "new" / "osf.jsonl"
    convert.convert(convert.Config("convert", f"{folder}/o.json", str(output), image_dir=f"{folder}/images"))
    assert load_samples(str(output), "vqa")[0].fields["phrase_type"] == "freeform"
    (folder / "t.json").write_text(json.dumps([OSF | {"phrase_type": "test_freeform"}]))
    convert.convert(
        convert.Config("convert", f"{folder}/t.json@test", str(folder / "t.jsonl"), image_dir=f"{folder}/images")
    )
    assert len(load_samples(f"{folder}/t.jsonl", "vqa")) == 1, "a converted row must no longer belong to a test split"


def test_a_failed_conversion_changes_no_image_of_an_earlier_one(folder, monkeypatch):
    output = folder / "new" / "t.jsonl"
    rows = [verl_row("<image>q", "1", [{"bytes": png(color), "path": None}]) for color in ("red", "green", "blue")]
    convert.convert(convert.Config("convert", parquet(folder / "a.parquet", rows[:1]), str(output)))
    before = load_samples(str(output), None)
    monkeypatch.setattr(json, "dumps", lambda *_, **__: {}["a failure"])
    with pytest.raises(KeyError):
        convert.convert(convert.Config("convert", parquet(folder / "b.parquet", rows[1:]), str(output), overwrite=True))
    monkeypatch.undo()
    assert same(before[0], load_samples(str(output), None)[0]) and not list(output.parent.glob("*.partial"))


def test_an_output_that_is_not_a_file_is_refused(folder):
    os.mkfifo(folder / "pipe.jsonl")
    source = jsonl(folder / "d.jsonl", {"prompt": "q", "answer": "3"})
    with pytest.raises(UserError, match=r"pipe\.jsonl' is not a file: choose another"):
        convert.convert(convert.Config("convert", source, str(folder / "pipe.jsonl"), overwrite=True))


def test_convert_answers_mistakes_and_replaces_nothing_unasked(folder):
    source = jsonl(folder / "d.jsonl", {"prompt": "q", "answer": "three"}, {"prompt": "q", "answer": "3"})
    output = folder / "out.jsonl"
    with pytest.raises(UserError, match=r"1 of 2 rows .*row 1: the answer 'three' contains no whole number"):
        convert.convert(convert.Config("convert", source, str(output), task="count"))
    assert not output.exists()
    assert convert.convert(convert.Config("convert", source, str(output), task="count", skip_bad_rows=True)) == 1
    with pytest.raises(UserError, match="already exists"):
        convert.convert(convert.Config("convert", source, str(output)))
    assert convert.convert(convert.Config("convert", source, str(output), overwrite=True)) == 2
    with pytest.raises(UserError, match="cannot write"):
        convert.convert(convert.Config("convert", source, str(output / "below" / "a.jsonl")))
    with pytest.raises(UserError, match=r"out.csv': the name must end in .jsonl or .parquet"):
        convert.convert(convert.Config("convert", source, str(folder / "out.csv")))
    mixed = jsonl(
        folder / "m.jsonl", {"prompt": "q", "answer": "1", "id": 1}, {"prompt": "r", "answer": "1", "id": "a"}
    )
    with pytest.raises(UserError, match=r"write NAME.jsonl instead"):
        convert.convert(convert.Config("convert", mixed, str(folder / "m.parquet")))
    assert not list(folder.glob("m.parquet*"))
    with pytest.raises(ValueError, match="columns are prompt=NAME, answer=NAME and images=NAME, not question"):
        convert.Config("convert", source, str(output), columns=("question",))
    odd = {"prompt": "q", "answer": "1", "note": "half of a pair: \ud83d"}
    (folder / "odd.jsonl").write_text(json.dumps(odd))
    convert.convert(convert.Config("convert", str(folder / "odd.jsonl"), str(output), overwrite=True))
    assert json.loads(output.read_text())["note"] == "half of a pair: ?"
    assert not list(folder.glob("**/*.partial"))


# --- data of the smoke recipes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "names"), [("vqa", ["train.jsonl"]), ("math", ["text.parquet", "image"]), ("count", ["train.zip"])]
)
def test_smoke_rows_are_in_their_recipes_format(tmp_path, recipe, names):
    smoke = pytest.importorskip("apps.demo.smoke", reason="needs apps/, which is not here")
    smoke.main(smoke.Config(recipe, str(tmp_path / "made")))
    processor = load_processor(str(tmp_path / "made" / "model"), recipe)
    for name in names:
        samples = load_samples(f"{tmp_path}/made/{name}", recipe, processor=processor)
        assert len(samples) == smoke.ROWS
    if recipe == "math":
        assert samples[0].images
        gold = load_samples(f"{tmp_path}/made/text.parquet", "math")[0].answer
        assert gold.startswith("\\frac")


def test_no_format_is_forgotten_in_the_head_of_the_file():
    files = [ROOT / "inputs" / "rows.py", *(ROOT / "parts" / "formats").glob("*.py")]
    described = " ".join(ast.get_docstring(ast.parse(file.read_text())) for file in files)
    for word in ("EasyR1", "veRL", "conversations", "OSF", "main.csv", "datasets", "Parquet", "@split"):
        assert word in described


def test_convert_writes_what_reads_as_the_same_row(folder):
    """Fields that come first when a row is read must not keep an older answer or image."""
    rows = [
        {"prompt": "q1", "reward_model": {"ground_truth": "1"}, "solution": "2"},
        {"prompt": "q2", "solution": "3", "answer": "4"},
    ]
    source, once, twice = jsonl(folder / "d.jsonl", *rows), str(folder / "once.jsonl"), str(folder / "twice.jsonl")
    assert convert.convert(convert.Config("convert", source, once, columns=("answer=solution",))) == 2
    assert convert.convert(convert.Config("convert", once, twice)) == 2
    assert [sample.answer for sample in load_samples(twice, "math")] == ["2", "3"]


def test_the_system_column_of_a_conversation_is_read(folder):
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "7"}]
    (sample,) = load_samples(jsonl(folder / "d.jsonl", {"conversations": turns, "system": "In French"}), "math")
    assert (sample.system, sample.answer) == ("In French", "7")
    twice = {"conversations": [{"from": "system", "value": "s"}, *turns], "system": "In French"}
    with pytest.raises(UserError, match="two system prompts"):
        load_samples(jsonl(folder / "d.jsonl", twice), "math")


def test_a_data_set_that_only_repeats_another_is_named(folder):
    all_rows = jsonl(folder / "all.jsonl", {"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"})
    hard = jsonl(folder / "hard.jsonl", {"prompt": "b", "answer": "2"})
    with pytest.raises(UserError, match=r"hard\.jsonl: no usable row"):
        load_samples(f"{all_rows},{hard}", "math", skip_bad_rows=True)


def test_many_data_sets_may_be_named(folder):
    names = [jsonl(folder / f"part-{i:05}.jsonl", {"prompt": f"q{i}", "answer": "1"}) for i in range(20)]
    assert len(load_samples(",".join(names), "math")) == 20
