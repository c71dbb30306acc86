"""Trackers get the numbers of metrics.jsonl, W&B and trackio also the sampled completions, and never stop a run.

    pip install wandb==0.31.0 tensorboard==2.21.0 trackio==0.43.0     # without a package, its test is skipped

W&B runs in offline mode. Guards against: a curve that differs from metrics.jsonl, a resumed run that starts a second
curve, credentials in what W&B would upload, a tracker that ends the run, and a package that is imported without need.
"""

import importlib.util
import json
import pathlib
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from PIL import Image

import grpo
from common.errors import RunStopped
from common.files import read_jsonl
from common.records import Prompt, Rewards, Rollout, ScoredGroup
from config import RunFlags
from tests.helpers.rows import make_sample
from tests.helpers.runs import config
from tests.helpers.scripts import ROOT
from training.run_log import RunLog

pytest.importorskip("parts.pages", reason="needs parts/pages, which is not here")

from parts.pages import trackers

SECRET = "hunter2"


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"needs {package}: pip install {package}")


def group() -> ScoredGroup:
    image = Image.new("RGB", (40, 30), (255, 0, 0))
    sample = make_sample("How many?", "2", [image], "rows:1")
    rollouts = [Rollout(torch.tensor([1]), torch.tensor([0.0]), text=f"*answer* {i}") for i in range(2)]
    rewards = [Rewards(total=float(i)) for i in range(2)]
    return ScoredGroup(sample, Prompt([], [], torch.zeros(1, 1), images=[image]), rollouts, rewards, 0)


def log_run(folder: pathlib.Path, names: tuple[str, ...], steps: range, resumed: int | None = None) -> None:
    """Log steps as a run does. In a second attempt, the loss is 100 higher."""
    settings = {"report_every": 2, "log_to": names, "verifier_url": f"http://user:{SECRET}@host/v1"}
    with RunLog(str(folder), settings, resumed_step=resumed) as log:
        for step in steps:
            log.completions(step, [group()], torch.tensor([[-1.0, 1.0]]))
            loss = step / 7 + (0 if resumed is None else 100)
            log.metrics(step, {"loss": loss, "time/sample": step * 2.0, "mfu": float("nan")})


def numbers(folder: pathlib.Path) -> dict[str, list[tuple[int, float]]]:
    rows = read_jsonl(folder / "metrics.jsonl")
    return {name: [(row["step"], row[name]) for row in rows] for name in ("loss", "time/sample")}


@needs("tensorboard")
def test_tensorboard_has_the_numbers_also_after_a_resume(tmp_path):
    """A run of 5 steps, resumed after step 2, has each of its steps once, with the values of the second attempt."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_run(tmp_path, ("tensorboard",), range(1, 6))
    log_run(tmp_path, ("tensorboard",), range(3, 5), resumed=2)
    events = EventAccumulator(str(tmp_path / "tensorboard"), {"scalars": 0}).Reload()
    for name, points in numbers(tmp_path).items():
        assert [event.step for event in events.Scalars(name)] == [1, 2, 3, 4]
        assert [event.value for event in events.Scalars(name)] == pytest.approx([value for _, value in points])
    assert "mfu" not in events.Tags()["scalars"]


def wandb_records(path: pathlib.Path) -> Iterator[bytes]:
    """Yield the records of a .wandb file: LevelDB's log format after a header of 7 bytes."""
    data, position, record, block = path.read_bytes(), 7, b"", 32768
    while position + 7 <= len(data):
        if block - position % block < 7:  # the rest of a block that is too short for another header
            position += block - position % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""


def wandb_rows(folder: pathlib.Path) -> list[dict]:
    """Return the history rows of all W&B files in `folder`, in order, and check the run id of each file."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        assert path.name == "run-" + (folder / "wandb_id").read_text() + ".wandb"
        for data in wandb_records(path):
            items = wandb_internal_pb2.Record.FromString(data).history.item
            if items:
                rows.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


@needs("wandb")
def test_wandb_has_the_numbers_and_images_and_a_resumed_run_keeps_its_id(tmp_path, monkeypatch, capfd):
    """The second attempt follows in the same W&B run, with our step in every row. Nothing is printed."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    log_run(tmp_path, ("wandb",), range(1, 3))
    first = numbers(tmp_path)
    log_run(tmp_path, ("wandb",), range(2, 5), resumed=1)
    rows = wandb_rows(tmp_path)
    for name, points in numbers(tmp_path).items():
        expected = first[name] + points[1:]
        assert [(row["step"], row[name]) for row in rows if name in row] == expected
    assert not any("mfu" in row for row in rows)
    assert [row["step"] for row in rows if any(name.startswith("completions") for name in row)] == [1, 2, 2, 4]
    images = list((tmp_path / "wandb").rglob("*.png"))
    assert {Image.open(path).size for path in images} == {(40, 30)}
    files = [path for path in (tmp_path / "wandb").rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in path.read_bytes() for path in files)
    output = capfd.readouterr()
    assert output.out + output.err == ""


@needs("trackio")
def test_trackio_has_the_numbers_and_images_and_a_resumed_run_continues(tmp_path, monkeypatch):
    """The second attempt follows in the same run, with our step in every row. A new run of that name is another."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    from trackio.sqlite_storage import SQLiteStorage

    log_run(tmp_path, ("trackio",), range(1, 3))
    first = numbers(tmp_path)
    log_run(tmp_path, ("trackio",), range(2, 5), resumed=1)
    rows = SQLiteStorage.get_logs("grpo-vlm", tmp_path.name)
    for name, points in numbers(tmp_path).items():
        assert sorted((row["step"], row[name]) for row in rows if name in row) == sorted(first[name] + points[1:])
    assert not any("mfu" in row for row in rows)
    tables = {row["step"]: row["completions"]["_value"] for row in rows if "completions" in row}
    assert tables.keys() == {1, 2, 4}
    assert [cells["text"] for cells in tables[4]] == ["*answer* 0", "*answer* 1"]
    assert {Image.open(path).size for path in (tmp_path / "trackio").rglob("*.png")} == {(40, 30)}
    files = [path for path in (tmp_path / "trackio").rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in path.read_bytes() for path in files)
    log_run(tmp_path, ("trackio",), range(1, 2))
    assert len(SQLiteStorage.get_run_records("grpo-vlm")) == 2


def test_a_failing_tracker_is_left_out_and_reported_once(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise OSError(28, "No space left on device", f"http://user:{SECRET}@host")

    monkeypatch.setitem(trackers.TRACKERS, "wandb", lambda *_: (fail, fail))
    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", lambda *_: 1 / 0)
    monkeypatch.setitem(trackers.TRACKERS, "trackio", lambda *_: (lambda *_: None, fail))
    log_run(tmp_path, tuple(trackers.TRACKERS), range(1, 4))
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    error = capsys.readouterr().err
    assert error.count("wandb failed (OSError") == 1 and error.count("tensorboard failed (ZeroDivisionError") == 1
    assert error.count("trackio failed (OSError") == 1
    assert SECRET not in error


def test_trackers_are_closed_however_a_run_ends(tiny_model, shapes, tmp_path, monkeypatch):
    """W&B would lose the last rows: after an error, the process ends without exit handlers."""
    closed = []
    monkeypatch.setattr(trackers.Trackers, "close", lambda _, failed: closed.append(failed))
    grpo.main(config(tiny_model, shapes, tmp_path / "a", max_steps=1, report_every=1))
    monkeypatch.setattr(grpo, "train_step", lambda run: run.loop.interrupted.append(signal.SIGTERM) or {})
    with pytest.raises(RunStopped, match="stopped after step 1"):
        grpo.main(config(tiny_model, shapes, tmp_path / "b", max_steps=2, report_every=1))
    assert closed == [False, True]


@pytest.mark.parametrize("name", trackers.TRACKERS)
def test_a_missing_package_is_refused(name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=f"log_to {name}: the package is missing; run pip install {name}"):
        RunFlags(log_to=(name,)).check_run()


def test_nothing_is_imported_without_the_flag(tmp_path):
    code = f"import sys; from training.run_log import RunLog; log = RunLog({str(tmp_path)!r}, {{'report_every': 1}})"
    code += "; log.metrics(1, {'a': 1})"
    code += "; assert not {'wandb', 'trackio', 'torch.utils.tensorboard'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
