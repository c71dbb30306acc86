"""What two data sets share: equal and nearly equal pictures, questions, and the line of a run with `--eval_data`."""

import io
import json
import pathlib
import re
import time

import datasets
import numpy as np
import pytest
from PIL import Image

pytest.importorskip("parts.convert", reason="needs parts/convert, which is not here")

import data
from common.errors import UserError
from common.files import read_jsonl
from data import load_samples
from grpo import Config
from parts.convert import OverlapFlags, hold_out, log_shared, overlap
from parts.convert.overlap import difference_hash, nearly_equal
from training.run import check_inputs


def scan(seed: int, size: int = 96) -> Image.Image:
    """Draw a smooth picture, as a scan is, on a black ground."""
    cells = np.random.default_rng(seed).uniform(0, 255, (8, 8)).astype(np.uint8)
    picture = Image.new("L", (size, size))
    picture.paste(Image.fromarray(cells).resize((size * 3 // 4,) * 2, Image.Resampling.BICUBIC), (size // 8,) * 2)
    return picture.convert("RGB")


def encoded(image: Image.Image, form: str = "PNG", **options: int) -> bytes:
    image.save(file := io.BytesIO(), form, **options)
    return file.getvalue()


def write(path: pathlib.Path, rows: list[tuple[str, str | None]]) -> str:
    """Write (question, name of the picture) as rows."""
    lines = [{"prompt": q, "answer": "yes", "images": [image] if image else []} for q, image in rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def compare(train: str, test: str, **flags) -> list[str]:
    return overlap(OverlapFlags(command="overlap", train=train, test=test, **flags)).splitlines()


@pytest.fixture(scope="module")
def rad(tmp_path_factory) -> tuple[str, str]:
    """Write 150 + 30 rows as in VQA-RAD: 100 of the 120 test pictures are among the training pictures, the first 20 of
    them scaled, the next 20 compressed again, the next 30 as another file with the same pixels."""
    folder = tmp_path_factory.mktemp("rad")
    train, test = [], []
    for i in range(150):
        scan(i).save(folder / f"{i}.png")
        train += [(f"is this organ {i}?", f"{i}.png"), ("is there a fracture?", f"{i}.png")]
    for i in range(120):
        picture, name = scan(i if i < 100 else 1000 + i), f"test-{i}.png"
        if i < 20:
            picture.resize((67, 67), Image.Resampling.BICUBIC).save(folder / name)
        elif i < 40:
            (folder / (name := f"test-{i}.jpg")).write_bytes(encoded(picture, "JPEG", quality=60))
        elif i < 70:
            (folder / (name := f"test-{i}.bmp")).write_bytes(encoded(picture, "BMP"))
        else:
            picture.save(folder / name)
        test += [("Is there a  fracture? " if i % 2 else f"what is {i}?", name)]
    return write(folder / "train.jsonl", train), write(folder / "test.jsonl", test)


def test_shared_pictures_and_questions_are_found(rad):
    train, test = rad
    lines = compare(train, test)
    assert lines[0] == (
        f"pictures: 100 of the 120 in {test} are among the 150 in {train}: 60 equal after decoding, 40 nearly equal"
    )
    assert lines[1] == (
        f"rows: 100 of the 120 in {test} have such a picture; 60 have the question of a row in {train}, "
        "50 of them with the same picture"
    )
    pairs = [
        re.fullmatch(r"(equal|nearly equal): \S+ row (\d+) and \S+ row (\d+)", line).groups() for line in lines[2:]
    ]
    assert [kind for kind, *_ in pairs] == ["equal"] * 5 + ["nearly equal"] * 5
    assert all(int(j) == 2 * int(i) - 1 for _, i, j in pairs), "of the first row with the picture"


def test_rows_that_share_nothing_are_written(rad, tmp_path):
    train, test = rad
    output = tmp_path / "new.jsonl"
    lines = compare(train, test, output_jsonl=str(output))
    assert lines[-1] == f"{output}: 100 of the 300 rows in {train}, which share no picture"
    assert {pathlib.Path(row["images"][0]).name for row in read_jsonl(output)} == {f"{i}.png" for i in range(100, 150)}
    assert compare(str(output), test)[0].startswith(f"pictures: 0 of the 120 in {test}")
    with pytest.raises(UserError, match=r"new\.jsonl' already exists"):
        compare(train, test, output_jsonl=str(output))
    with pytest.raises(UserError, match=r"every row in \S+ shares something with \S+: there is nothing to write"):
        compare(train, train, output_jsonl=str(tmp_path / "none.jsonl"))
    texts = write(tmp_path / "texts.jsonl", [("What is 2?", None), ("What is 3?", None)])
    lines = compare(
        texts, write(tmp_path / "one.jsonl", [("what is 3?", None)]), output_jsonl=str(tmp_path / "t.jsonl")
    )
    assert lines[0].startswith("pictures: 0 of the 0 ") and "; 1 have the question of a row in" in lines[1]
    assert [row["prompt"] for row in read_jsonl(tmp_path / "t.jsonl")] == ["What is 2?"]


def test_pictures_in_tables_are_compared_by_their_pixels(rad, tmp_path):
    """A picture that is stored in many rows is one picture."""
    rows = [{"prompt": f"q{i}", "answer": "yes", "images": [{"bytes": encoded(scan(i % 3))}]} for i in range(9)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "t.parquet")
    line = compare(rad[0], f"{tmp_path}/t.parquet")[0]
    assert line.startswith("pictures: 3 of the 3 in ") and "3 equal after decoding, 0 nearly equal" in line


def test_a_picture_that_cannot_be_read_is_named(tmp_path):
    scan(0).save(tmp_path / "0.png")
    rows = write(tmp_path / "rows.jsonl", [("a", "0.png"), ("b", "gone.png")])
    with pytest.raises(UserError, match=r"1 of 2 rows cannot be used: \S+ row 2: .*gone\.png.*--skip_bad_rows"):
        compare(rows, rows)
    assert compare(rows, rows, skip_bad_rows=True)[0].startswith("pictures: 1 of the 1 in")


def test_noise_gives_no_false_alarm(tmp_path):
    """2,000 pictures; on two idle cores they take about 5 s."""
    rng = np.random.default_rng(0)
    for i in range(2000):
        Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(tmp_path / f"{i}.png")
    parts = [write(tmp_path / f"{k}.jsonl", [("q", f"{i}.png") for i in range(k, 2000, 2)]) for k in (0, 1)]
    start = time.monotonic()
    assert compare(*parts)[0].endswith("0 equal after decoding, 0 nearly equal")
    assert time.monotonic() - start < 10


def test_pictures_of_one_colour_are_compared_by_their_pixels_alone():
    black, white = (difference_hash(Image.new("RGB", (32, 32), colour)) for colour in ("black", "white"))
    assert not black.any() and nearly_equal(black[None], white[None]) == {}
    grey = difference_hash(scan(0))
    assert nearly_equal(np.stack([black, grey]), np.stack([white, grey])) == {1: 1}
    assert nearly_equal(np.zeros((0, 512), np.float32), grey[None]) == {}


# --- a run ------------------------------------------------------------------------------------------------------------


def test_a_run_says_how_many_pictures_of_eval_data_it_trains_on(tmp_path, tiny_model, capsys):
    """Only equal files are found, and the line says so. Without pictures in the held-out rows, there is no line."""
    for i in range(4):
        scan(i, 56).save(tmp_path / f"{i}.png")
    (tmp_path / "copy.png").write_bytes((tmp_path / "1.png").read_bytes())
    scan(2, 56).save(tmp_path / "other.bmp")
    train = write(tmp_path / "train.jsonl", [(f"q{i}", f"{i}.png") for i in range(3)])
    test = write(tmp_path / "test.jsonl", [(f"q{x}", x) for x in ("copy.png", "other.bmp", "3.png", "0.png")])
    texts = write(tmp_path / "texts.jsonl", [("q", None)])
    flags = {"model": tiny_model, "prompts_per_step": 1, "prompts_per_update": 1, "data": train}
    check_inputs(Config(**flags, output=str(tmp_path / "run"), eval_data=test))
    lines = [line for line in capsys.readouterr().err.splitlines() if "--eval_data" in line]
    assert lines == [
        "--eval_data: 2 of its 4 pictures, in 2 of 4 rows, are also in the training rows, compared by the bytes of "
        "their files (data.py overlap also finds copies in other files)"
    ]
    check_inputs(Config(**flags, output=str(tmp_path / "run"), eval_data=texts))
    assert "--eval_data" not in capsys.readouterr().err


def test_a_run_does_without_the_line_if_the_part_is_not_here(tmp_path, tiny_model, monkeypatch, capsys):
    scan(0, 56).save(tmp_path / "0.png")
    rows = write(tmp_path / "rows.jsonl", [("q", "0.png")])
    flags = {"model": tiny_model, "prompts_per_step": 1, "data": rows, "eval_data": rows}
    monkeypatch.setattr(data, "extra", lambda name, is_needed=False: None)
    _, held_out, *_ = check_inputs(Config(**flags, output=str(tmp_path / "run")))
    assert len(held_out) == 1 and "--eval_data" not in capsys.readouterr().err


def test_files_are_read_only_if_they_may_be_equal(tmp_path, monkeypatch, capsys):
    for i, size in enumerate((56, 57, 56)):
        scan(i, size).save(tmp_path / f"{i}.bmp")
    rows = load_samples(write(tmp_path / "rows.jsonl", [(f"q{i}", f"{i}.bmp") for i in range(3)]), None)
    read, own = [], pathlib.Path.read_bytes
    monkeypatch.setattr(pathlib.Path, "read_bytes", lambda path: read.append(path.name) or own(path))
    log_shared(rows[1:], rows[:1])
    assert sorted(read) == ["0.bmp", "2.bmp"] and "0 of its 1 pictures" in capsys.readouterr().err
    (tmp_path / "2.bmp").unlink()
    log_shared(rows[1:], rows[:1])
    assert "the pictures of --eval_data were not compared" in capsys.readouterr().err


def test_a_picture_in_a_table_is_held_out_with_all_its_rows(tmp_path):
    """As in VQA-RAD, whose rows hold their pictures: the same bytes are the same picture."""
    rows = [{"prompt": f"q{i}", "answer": "yes", "images": [{"bytes": encoded(scan(i % 5))}]} for i in range(20)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "t.parquet")
    cfg = Config(data="x", eval_data="0.4")
    train, held_out = hold_out(load_samples(f"{tmp_path}/t.parquet", None), cfg)
    assert (len(train), len(held_out)) == (12, 8)
    assert not {row.images[0].row % 5 for row in train} & {row.images[0].row % 5 for row in held_out}
