"""`evaluate.py --picture`: the same rows without what their pictures show.

Guards against: pictures that still tell something, prompts of another length, a row that keeps its own picture, tools
that see it, rewards that do not, and a comparison of different rows or models.
"""

import base64
import io
import json
import pathlib
from dataclasses import replace

import datasets
import numpy as np
import pytest
from PIL import Image

pytest.importorskip("parts.benchmarks", reason="needs parts/benchmarks, which is not here")

import evaluate
from common import plugins
from common.environments import ENVIRONMENTS
from common.errors import UserError
from common.files import read_jsonl
from common.records import Sample
from data import encode_prompt, load_processor, load_samples
from evaluate import Config
from inputs.images import decode_image
from parts.benchmarks.blind import Pictures, other_rows, swap_pictures
from parts.benchmarks.scores import BenchmarkJudge, pair_predictions
from tests.helpers import tiny
from tests.helpers.marks import needs
from tests.helpers.rows import make_sample
from tests.helpers.scripts import run_script

SIZES = [(56, 56), (84, 56), (56, 112), (60, 70)]  # of the pictures (width, height)


def noise(i: int) -> bytes:
    """Return picture `i` as a PNG."""
    width, height = SIZES[i % len(SIZES)]
    pixels = np.random.default_rng(i).integers(0, 256, (height, width, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def write_rows(folder: pathlib.Path, kind: str) -> str:
    """Write nine rows: two questions about each of three pictures, and three rows of two pictures."""
    shown = [[i] for i in (0, 0, 1, 1, 2, 2)] + [[3, 4], [5, 6], [7, 0]]
    rows = [{"prompt": "<image>" * len(own) + "Which?", "answer": str(i), "images": own} for i, own in enumerate(shown)]
    if kind == "parquet":
        rows = [row | {"images": [{"bytes": noise(i), "path": None} for i in row["images"]]} for row in rows]
        datasets.Dataset.from_list(rows).to_parquet(folder / "rows.parquet")
        return str(folder / "rows.parquet")
    for i in range(8):
        (folder / f"{i}.png").write_bytes(noise(i))
    names = [base64.b64encode(noise(i)).decode() if kind == "base64" else f"{i}.png" for i in range(8)]
    rows = [row | {"images": [names[i] for i in row["images"]]} for row in rows]
    return write_jsonl(folder / "rows.jsonl", rows)


def write_jsonl(path: pathlib.Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def decoded(sample: Sample) -> list[Image.Image]:
    return [decode_image(source) for source in sample.images]


@pytest.fixture(scope="module")
def processor(tiny_model):
    return load_processor(tiny_model, "vqa", min_pixels=3136, max_pixels=12544)


@pytest.mark.parametrize(
    "kind",
    [
        "paths",
        pytest.param("base64", marks=needs("parts/formats")),
        pytest.param("parquet", marks=needs("parts/formats")),
    ],
)
def test_the_pictures_of_rows_are_replaced(processor, tmp_path, kind):
    samples = load_samples(write_rows(tmp_path, kind), "vqa", processor=processor)
    own, prompts = [decoded(sample) for sample in samples], [encode_prompt(sample, processor) for sample in samples]
    cfg = Config(model="m", data="d", picture="blank")
    grey, digests = swap_pictures(cfg, samples, processor)
    assert digests == [prompt.image_digest.hex() for prompt in prompts]
    for sample, before, prompt in zip(grey, own, prompts):
        assert [image.size for image in decoded(sample)] == [image.size for image in before]
        assert all((np.asarray(image) == 128).all() for image in decoded(sample))
        assert encode_prompt(sample, processor).ids.equal(prompt.ids), "it must keep its tokens"
    others, same_digests = swap_pictures(replace(cfg, picture="other"), samples, processor)
    assert same_digests == digests
    for sample, other, before in zip(samples, others, own):
        assert (other.texts, other.answer, other.source) == (sample.texts, sample.answer, sample.source)
        pixels = [image.tobytes() for image in decoded(other)]
        assert len(pixels) == len(before) and not {*pixels} & {image.tobytes() for image in before}
        assert pixels in [[image.tobytes() for image in each] for each in own]
    assert [decoded(sample) for sample in samples] == own, "rewards and pages get the row's own"
    again, _ = swap_pictures(replace(cfg, picture="other"), samples[::-1], processor)
    assert [decoded(sample) for sample in again[::-1]] == [decoded(sample) for sample in others], "whatever the order"


def pictures(*names: str) -> Pictures:
    return Pictures(names, [(1, 1)] * len(names), len(names), "".join(names))


def test_each_row_gets_the_pictures_of_another(capsys):
    """Also if most rows share one picture, so that no order of the rows would do."""
    own = [pictures(*names) for names in ["a", "a", "a", "a", "b", "", "ab", "bc", "cd", "ab"]]
    rows = other_rows([], own)
    assert rows[:6] == [4, 4, 4, 4, 0, 5], "a row without pictures keeps none"
    assert rows[6:] == [8, 8, 6, 8], "(a, b) and (c, d) change places; (b, c) shares a picture with either"
    assert "note: 1 rows keep a picture of their own" in capsys.readouterr().err
    samples = [make_sample("q", "1", [], f"row {i}") for i in range(3)]
    with pytest.raises(UserError, match="--picture other: row 2: no row has as many pictures and other ones: use"):
        other_rows(samples, [pictures("a"), pictures("b"), pictures("a", "b")])


# --- evaluate.py ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def flags(tiny_model, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("rows")
    common = dict(model=tiny_model, data=write_rows(folder, "paths"), task="vqa", engine="hf")
    return common | dict(max_completion_length=8, n=2, temperature=1.0, min_pixels=3136, max_pixels=12544)


@pytest.fixture(scope="module")
def with_pictures(flags, tmp_path_factory) -> pathlib.Path:
    """Return the folder of an evaluation with pictures."""
    folder = tmp_path_factory.mktemp("own") / "out"
    evaluate.main(Config(**flags, output=str(folder)))
    return folder


def test_a_score_is_compared_with_that_of_the_pictures(flags, with_pictures, tmp_path, capsys):
    """The random model answers nothing correctly. With pictures, it is made to answer six of nine rows."""
    rows = read_jsonl(with_pictures / "predictions.jsonl")
    for row in rows[:6]:
        row["responses"] = [f"<think>a</think><answer>{row['answer']}</answer>"] * 2
    (tmp_path / "own").mkdir()
    write_jsonl(tmp_path / "own" / "predictions.jsonl", rows[::-1])
    blank = Config(**flags, picture="blank", baseline=f"{tmp_path}/own", output=f"{tmp_path}/blank")
    evaluate.main(blank)
    said = capsys.readouterr().out
    scores = json.loads((tmp_path / "blank" / "scores.json").read_text())
    assert (scores["picture"], scores["exact_match"]) == ("blank", 0.0)
    assert scores["baseline"]["exact_match"] == scores["paired"]["difference"] == pytest.approx(6 / 9)
    low, high = scores["paired"]["difference_95"]
    assert 0 < low < 6 / 9 < high <= 1
    assert f"the picture adds +0.667 ({low:+.3f} to {high:+.3f}) to the score on 9 rows of both" in said
    assert "9 rows, picture: blank\nvqa" + " " * 34 + "own picture       blank\n" in said
    assert "right with own picture, wrong with blank picture: 6; wrong with own picture, right with" in said
    assert (tmp_path / "blank" / "completions.html").read_text().count("<caption>with blank picture</caption>") == 6
    judged = read_jsonl(tmp_path / "blank" / "predictions.jsonl")
    assert [row["image_digest"] for row in judged] == [row["image_digest"] for row in rows]
    assert [row["responses"] for row in judged] != [row["responses"] for row in rows]
    pairs = pair_predictions(None, rows[::-1], judged)
    assert len(pairs) == 9 and all(own["source"] == without["source"] for own, without in pairs)
    with pytest.raises(UserError, match="blank: it had no pictures, either: give the evaluation with them"):
        evaluate.main(replace(blank, picture="other", baseline=f"{tmp_path}/blank", output=f"{tmp_path}/no"))


def test_the_model_itself_is_a_baseline_that_sees_its_pictures(flags, with_pictures, tmp_path):
    """One command then samples both; two processes write the same predictions."""
    evaluate.main(Config(**flags, picture="other", baseline=flags["model"], output=f"{tmp_path}/one"))
    own = (with_pictures / "predictions.jsonl").read_text()
    assert (tmp_path / "one" / "baseline" / "predictions.jsonl").read_text() == own
    others = (tmp_path / "one" / "predictions.jsonl").read_text()
    assert others != own
    given = [f"--{name}={value}" for name, value in flags.items()]
    given += ["--picture=other", f"--baseline={with_pictures}", f"--output={tmp_path}/two"]
    done = run_script("evaluate.py", *given, processes=2)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "two" / "predictions.jsonl").read_text() == others
    assert "the picture adds" in done.stdout
    scores = json.loads((with_pictures / "scores.json").read_text())
    other = tiny.save_model(tmp_path / "other", seed=5)
    (tmp_path / "of other").mkdir()
    write_jsonl(tmp_path / "of other" / "predictions.jsonl", read_jsonl(with_pictures / "predictions.jsonl"))
    (tmp_path / "of other" / "scores.json").write_text(json.dumps(scores | {"model": other}))
    for baseline in (other, f"{tmp_path}/of other"):
        with pytest.raises(UserError, match=f"--picture blank compares a model with itself, not .* with {other}: give"):
            evaluate.main(Config(**flags, picture="blank", baseline=baseline, output=f"{tmp_path}/no"))


def test_a_benchmark_is_scored_without_pictures(tiny_model, tmp_path):
    """The two questions about a picture of MME get the same other one."""
    rows = []
    for i in range(4):
        (tmp_path / f"{i}.png").write_bytes(noise(i))
        common = {"question_id": str(i), "image": f"{i}.png", "category": "color"}
        rows += [common | {"question": f"Is it {word}?", "answer": word} for word in ("Yes", "No")]
    cfg = Config(model=tiny_model, benchmark="mme", data=write_jsonl(tmp_path / "mme.jsonl", rows), picture="other")
    processor = load_processor(tiny_model, "math")
    samples = BenchmarkJudge(cfg).load(processor)
    own, others = ([decoded(each) for each in rows] for rows in (samples, swap_pictures(cfg, samples, processor)[0]))
    assert all(after == others[i // 2 * 2] and after != own[i] for i, after in enumerate(others))


def test_what_cannot_be_done_is_refused(processor, tmp_path, capsys):
    with pytest.raises(ValueError, match="picture needs a model"):
        Config(predictions="x.jsonl", picture="blank")
    samples = load_samples(write_rows(tmp_path, "paths"), "vqa", processor=processor)
    text = make_sample("How many?", "3", [], "row 10")
    blank = Config(model="m", data="d", picture="blank")
    swapped, digests = swap_pictures(blank, [*samples, text], processor)
    assert swapped[-1] == text and digests[-1] == ""
    assert "note: 1 of 10 rows have no picture" in capsys.readouterr().err
    with pytest.raises(UserError, match="--picture blank: none of the 1 rows has a picture: leave it out"):
        swap_pictures(blank, [text], processor)
    with pytest.raises(UserError, match=r"rows\.jsonl row 1: no row has as many pictures and other ones"):
        swap_pictures(replace(blank, picture="other"), samples[:2], processor)
    most = max(sample.tokens for sample in samples[:6])
    short = replace(blank, picture="other", max_prompt_length=most)
    swap_pictures(short, samples[:6], processor)
    with pytest.raises(
        UserError, match=rf"has {most} tokens with the picture of .*; --max_prompt_length is {most - 1}"
    ):
        swap_pictures(replace(short, max_prompt_length=most - 1), samples[:6], processor)
    (tmp_path / "0.png").unlink()
    with pytest.raises(UserError, match=r"rows\.jsonl row 1: .*0\.png.* restore or replace it"):
        swap_pictures(blank, samples, processor)


def test_an_evaluation_resumes_only_with_the_same_pictures(flags):
    one, other = (evaluate.resume_key(Config(**flags, picture=picture), []) for picture in (None, "blank"))
    assert {name for name in one if one[name] != other[name]} == {"picture"}


PLUGIN = """
from common.environments import ENVIRONMENTS, Environment, Reply

def shade(images, **row):
    return images[0].getpixel((0, 0))[0] / 1000

def look(text, state, images, **row):
    return Reply(None, shade(images))

ENVIRONMENTS["look"] = Environment(look)
"""


@needs("parts/turns")
@needs("parts/workers.py")
def test_tools_see_what_the_model_sees_and_rewards_the_rows_own(flags, brief_model, tmp_path, monkeypatch):
    monkeypatch.setattr(plugins, "_modules", {})
    monkeypatch.setattr(plugins, "_digests", {})
    (tmp_path / "look.py").write_text(PLUGIN + "\ndef reward(completion, answer, images):\n    return shade(images)\n")
    plugins.import_file(f"{tmp_path}/look.py")
    given = flags | {"model": brief_model, "env": "look", "reward": (f"{tmp_path}/look.py:reward", "vqa=0", "look=0")}
    try:
        evaluate.main(Config(**given, picture="blank", output=f"{tmp_path}/out"))
    finally:
        ENVIRONMENTS.clear()
    rows = read_jsonl(tmp_path / "out" / "predictions.jsonl")
    seen = {reward for row in rows for reward, call in zip(row["env_rewards"], row["truncated"]) if not call}
    assert seen == {0.128}
    first = [Image.open(io.BytesIO(noise(i))).getpixel((0, 0))[0] / 1000 for i in (0, 0, 1, 1, 2, 2, 3, 5, 7)]
    assert [row["rewards"] for row in rows] == [pytest.approx([shade] * 2) for shade in first]
