"""Saved predictions and the folder of an evaluation: what is read, resumed, locked and written."""

import functools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from types import SimpleNamespace

import pytest

import evaluate
from common.errors import UserError
from common.files import read_jsonl
from common.records import Cell, Turn
from evaluate import Config
from evaluation.held_out import open_progress
from evaluation.predictions import Judge
from tests.helpers.marks import needs, slow
from tests.helpers.rows import make_sample
from tests.helpers.scripts import ROOT, run_script

ROW = {"prompt": "How many?", "answer": "3", "response": "A photo of 3 cats"}


def write_jsonl(path: pathlib.Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@needs("parts/benchmarks")
def test_a_task_is_scored_again_without_a_model(tmp_path):
    rows = [
        {"prompt": "How many?", "answer": "3", "responses": ["A photo of 3 cats", "A photo of 4 cats"]},
        {"prompt": "How many?", "answer": 2, "response": "two"},
    ]
    path = write_jsonl(tmp_path / "p.jsonl", rows)
    done = run_script("evaluate.py", f"--predictions={path}", "--task=count", f"--output={tmp_path}/o")
    assert done.returncode == 0, done.stderr
    scores = json.loads((tmp_path / "o" / "scores.json").read_text())
    assert scores["exact_match"] == 0.25
    assert scores["reward"] == pytest.approx((1 + 0.85 + 0) / 3)
    evaluate.main(Config(predictions=f"{tmp_path}/o/predictions.jsonl", task="count", output=f"{tmp_path}/rescored"))
    assert json.loads((tmp_path / "rescored" / "scores.json").read_text())["exact_match"] == 0.25


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (dict(predictions="none.jsonl"), "no predictions at 'none.jsonl'"),
        (dict(predictions="x", model="y"), "either model or predictions"),
        (dict(benchmark="mme"), "either model or predictions"),
        (dict(predictions="none.jsonl", baseline="/none"), r"no predictions\.jsonl"),
    ],
)
def test_mistakes_have_one_line(flags, message):
    with pytest.raises((UserError, ValueError), match=message):
        evaluate.main(Config(**flags))


def test_other_settings_start_anew(tmp_path, capsys):
    """An interrupted evaluation resumes with the same settings only. Otherwise its responses are set aside."""
    path = open_progress(tmp_path / "o", {"n": 1, "seed": 0})
    rows = [{"n": 1, "seed": 0}, {"responses": ["a"]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    open_progress(tmp_path / "o", {"n": 1, "seed": 0})
    assert read_jsonl(path) == rows
    open_progress(tmp_path / "o", {"n": 2, "seed": 0})
    assert read_jsonl(path) == [{"n": 2, "seed": 0}] and read_jsonl(path.with_suffix(".old")) == rows
    assert "predictions.old was sampled with different n" in capsys.readouterr().err


def test_an_evaluation_resumes_with_what_its_responses_depend_on(tmp_path):
    """The images of a table are named alike in every process."""
    (tmp_path / "t.jinja").write_text("{{ content }}")
    cfg = Config(model="m", data="rows", task="vqa", template=str(tmp_path / "t.jinja"))
    cell = Cell(SimpleNamespace(cache_files=[]), 3, "images", 0, functools.partial(print, object()))
    samples = [make_sample("q", "1", [cell], "row 4")]
    key = evaluate.resume_key(cfg, samples)
    other = replace(cell, locate=functools.partial(print, object()))
    assert evaluate.resume_key(cfg, [replace(samples[0], turns=[Turn("user", [other, "q"])])]) == key
    with zipfile.ZipFile(tmp_path / "i.zip", "w") as file:
        file.writestr("a.png", b"old")
    for image in (tmp_path / "i.zip", zipfile.Path(tmp_path / "i.zip", "a.png")):
        before = evaluate.resume_key(cfg, [replace(samples[0], turns=[Turn("user", [image, "q"])])])
        os.utime(tmp_path / "i.zip", (1, 1 if isinstance(image, pathlib.Path) else 2))
        assert evaluate.resume_key(cfg, [replace(samples[0], turns=[Turn("user", [image, "q"])])]) != before, (
            "another image by now"
        )
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "predictions.jsonl").touch()
    assert evaluate.resume_key(replace(cfg, baseline=str(tmp_path / "saved")), samples) == key  # it is only read
    assert evaluate.resume_key(replace(cfg, baseline="other/model"), samples) != key
    (tmp_path / "t.jinja").write_text("{{ content }}!")
    assert evaluate.resume_key(cfg, samples) != key


@pytest.mark.parametrize("name", ["model.safetensors", "chat_template.jinja", "generation_config.json"])
def test_an_evaluation_does_not_resume_with_other_files_of_its_model(name, tmp_path):
    (tmp_path / "predictions.part").touch()  # the output may be the model's folder
    (tmp_path / name).touch()
    cfg = Config(model=str(tmp_path), data="rows")
    before = evaluate.resume_key(cfg, [])
    (tmp_path / "predictions.part").unlink()
    assert evaluate.resume_key(cfg, []) == before
    os.utime(tmp_path / name, (1, 1))
    assert evaluate.resume_key(cfg, []) != before


def test_saved_predictions_of_a_task_keep_columns_of_their_own(tmp_path):
    """A benchmark's predictions have a column `answers`; here it is the data set's, and the reward reads it."""
    (tmp_path / "mine.py").write_text("def listed(completion, answer, answers):\n    return completion in answers\n")
    row = {"prompt": "How many?", "answer": "3", "answers": ["3", "three"], "response": "three"}
    saved = write_jsonl(tmp_path / "p.jsonl", [row])
    reward = (f"{tmp_path}/mine.py:listed", "count=0")
    for name, source in (("once", saved), ("again", f"{tmp_path}/once/predictions.jsonl")):
        evaluate.main(Config(predictions=source, task="count", reward=reward, output=f"{tmp_path}/{name}"))
        assert json.loads((tmp_path / name / "scores.json").read_text())["reward"] == 1.0


def test_saved_answers_are_read_as_those_of_rows_are(tmp_path):
    """A table with an empty cell makes floats of whole numbers; what no completion can match is refused."""
    row = {"prompt": "How many?", "response": "A photo of 3 apples"}
    saved = write_jsonl(tmp_path / "p.jsonl", [row | {"answer": 3.0}])
    evaluate.main(Config(predictions=saved, task="count", output=str(tmp_path / "o")))
    assert json.loads((tmp_path / "o" / "scores.json").read_text())["exact_match"] == 1.0
    bad = write_jsonl(tmp_path / "bad.jsonl", [row | {"answer": "many"}])
    with pytest.raises(UserError, match="the answer 'many' contains no whole number"):
        evaluate.main(Config(predictions=bad, task="count", output=str(tmp_path / "o")))


def test_a_folder_in_which_another_evaluation_writes_is_refused(tmp_path):
    saved = write_jsonl(tmp_path / "p.jsonl", [ROW])
    (tmp_path / "o").mkdir()
    holder = "import sys, pathlib; from common.files import lock_file; "
    holder += f"lock = lock_file(pathlib.Path({str(tmp_path)!r}, 'o/evaluation.lock'), ''); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", holder], stdin=-1, stdout=-1, cwd=ROOT) as other:
        other.stdout.readline()
        with pytest.raises(UserError, match=r"--output .*o is in use"):
            evaluate.main(Config(predictions=saved, task="count", output=str(tmp_path / "o")))
        other.communicate(b"\n")


def test_a_folder_is_locked_as_long_as_the_evaluation_runs(tmp_path, monkeypatch):
    saved = write_jsonl(tmp_path / "p.jsonl", [ROW])
    other = "import pathlib, sys; from common.files import lock_file; lock_file(pathlib.Path(sys.argv[1]), 'refused')"
    attempts = []

    def start_another(*args):
        command = [sys.executable, "-c", other, tmp_path / "o" / "evaluation.lock"]
        attempts.append(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False))
        return write_results(*args)

    write_results = evaluate.write_results
    monkeypatch.setattr(evaluate, "write_results", start_another)
    evaluate.main(Config(predictions=saved, task="count", output=str(tmp_path / "o")))
    assert f"UserError: refused (pid {os.getpid()}" in attempts[0].stderr


def test_an_evaluation_in_4_bits_is_not_resumed_in_another_precision():
    four_bit, other = (Config(model="m", adapter="a", data="rows", load_in_4bit=each) for each in (True, False))
    assert evaluate.resume_key(four_bit, []) != evaluate.resume_key(other, [])


def test_outputs_after_a_damaged_line_are_sampled_again(tmp_path, capsys):
    """Row i of the file belongs to sample i, so the rows after a damaged line must not move up."""
    path = open_progress(tmp_path, {"n": 1})
    path.write_text('{"n": 1}\n{"responses": ["a"]}\n{"respon\n{"responses": ["c"]}\n')
    open_progress(tmp_path, {"n": 1})
    assert read_jsonl(path) == [{"n": 1}, {"responses": ["a"]}]
    assert "predictions.part: skipped the damaged line 3 and all that follow" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_refused_before_scoring(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    row = {"prompt": "q", "answer": "1", "response": "1", "lengths": [10**400]}
    (tmp_path / "p.jsonl").write_text(json.dumps(row))
    monkeypatch.setattr(Judge, "__call__", lambda *_: pytest.fail("it was scored"))
    for output in ("file", "file/below"):
        with pytest.raises(UserError, match=rf"cannot write to '{tmp_path}/{output}' \(.*: choose another --output"):
            evaluate.main(Config(predictions=f"{tmp_path}/p.jsonl", task="count", output=f"{tmp_path}/{output}"))


@pytest.mark.parametrize("length", [10**400, -1, 2.5])
def test_odd_lengths_of_predictions_are_ignored(tmp_path, length):
    row = {"prompt": "q", "answer": "1", "response": "1", "lengths": [length]}
    (tmp_path / "p.jsonl").write_text(json.dumps(row))
    from parts.benchmarks import read_predictions

    ((_, outputs),) = [read_predictions(f"{tmp_path}/p.jsonl", Judge(Config(predictions="p", task="count")))]
    assert outputs == [{"responses": ["1"]}]


@pytest.mark.parametrize("flags", [["--predictions=p.jsonl"], *slow(["--model=m", "--data=d", "--baseline=o"])])
def test_a_task_is_scored_without_the_part_that_compares(tiny_model, tmp_path, flags):
    """Then there is no interval and no picture. What asks for the part ends in one line, before anything is scored."""
    ignored = shutil.ignore_patterns(".*", "runs", "docs", "tests", "lesson", "__pycache__", "benchmarks")
    shutil.copytree(ROOT, tmp_path / "copy", ignore=ignored)
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "How many?", "answer": "3"}])

    def evaluated(output: str, *flags: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "evaluate.py", "--task=count", f"--output={tmp_path}/{output}", *flags]
        return subprocess.run(command, cwd=tmp_path / "copy", capture_output=True, text=True, check=False)

    done = evaluated("o", f"--model={tiny_model}", f"--data={rows}", "--max_completion_length=4")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1].startswith("note: parts/benchmarks is not here, so there is no interval and no")
    scores = json.loads((tmp_path / "o" / "scores.json").read_text())
    assert scores["exact_match"] in (0, 1) and not {name for name in scores if name.endswith("_95")}
    assert {path.name for path in (tmp_path / "o").iterdir()} == {"evaluation.lock", "predictions.jsonl", "scores.json"}
    refused = evaluated("refused", *flags)
    refusal = r"error: this needs parts(/benchmarks)?, which is not here: restore it, or leave out what asks .*\n"
    assert refused.returncode == 2 and re.fullmatch(refusal, refused.stderr)
    assert [path.name for path in (tmp_path / "refused").iterdir()] == ["evaluation.lock"]
