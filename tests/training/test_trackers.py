"""W&B and TensorBoard get the numbers of metrics.jsonl and the sampled completions, and never stop a run.

    pip install wandb==0.31.0 tensorboard==2.21.0     # without a package, the tests that read its files are skipped

W&B runs in offline mode. Guards against: a curve that differs from metrics.jsonl, a resumed run that starts a second
curve, credentials in what W&B would upload, a tracker that ends the run, and a package that is imported without need.
"""

import importlib.util
import json
import pathlib
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from PIL import Image

from common.files import read_jsonl
from common.records import Prompt, Rewards, Rollout, ScoredGroup
from config import RunFlags
from tests.helpers.rows import make_sample
from tests.helpers.scripts import ROOT
from training import trackers
from training.run_log import RunLog

SECRET = "hunter2"


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"needs {package}: pip install wandb==0.31.0 tensorboard==2.21.0")


def group() -> ScoredGroup:
    image = Image.new("RGB", (40, 30), (255, 0, 0))
    sample = make_sample("How many?", "2", [image], "rows:1")
    rollouts = [Rollout(torch.tensor([1]), torch.tensor([0.0]), text=f"*answer* {i}") for i in range(2)]
    rewards = [Rewards(total=float(i)) for i in range(2)]
    return ScoredGroup(sample, Prompt([], [], torch.zeros(1, 1), images=[image]), rollouts, rewards, 0)


def log_run(folder: pathlib.Path, names: tuple[str, ...], steps: range, resumed: int | None = None) -> None:
    """Log steps as a run does. In a second attempt, the loss is 100 higher."""
    config = {"log_to": names, "verifier_url": f"http://user:{SECRET}@host/v1"}
    with RunLog(str(folder), config, every=2, resumed_step=resumed) as log:
        for step in steps:
            log.completions(step, [group()], torch.tensor([[-1.0, 1.0]]))
            loss = step / 7 + (0 if resumed is None else 100)
            log.metrics(step, {"loss": loss, "time/sample": step * 2.0, "mfu": float("nan")})


def numbers(folder: pathlib.Path) -> dict[str, list[tuple[int, float]]]:
    rows = read_jsonl(folder / "metrics.jsonl")
    return {name: [(row["step"], row[name]) for row in rows] for name in ("loss", "time/sample")}


@needs("tensorboard")
def test_tensorboard_has_the_numbers_and_images_also_after_a_resume(tmp_path):
    """A run of 5 steps, resumed after step 2, has each of its steps once, with the values of the second attempt."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_run(tmp_path, ("tensorboard",), range(1, 6))
    log_run(tmp_path, ("tensorboard",), range(3, 5), resumed=2)
    events = EventAccumulator(str(tmp_path / "tensorboard"), {"images": 0, "scalars": 0, "tensors": 0}).Reload()
    for name, points in numbers(tmp_path).items():
        assert [event.step for event in events.Scalars(name)] == [1, 2, 3, 4]
        assert [event.value for event in events.Scalars(name)] == pytest.approx([value for _, value in points])
    assert "mfu" not in events.Tags()["scalars"]
    assert [(image.step, image.width, image.height) for image in events.Images("images/0/0")] == [
        (step, 40, 30) for step in (1, 2, 4)
    ]
    texts = events.Tensors("completions/0/text_summary")
    assert {text.step for text in texts} == {1, 2, 4}
    assert "*answer* 1" in texts[0].tensor_proto.string_val[0].decode()


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
        assert path.name == f"run-{(folder / trackers.WANDB_ID).read_text()}.wandb"
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
    images = list((tmp_path / "wandb").glob("offline-run-*/files/media/images/*.png"))
    assert {Image.open(path).size for path in images} == {(40, 30)}
    files = [path for path in (tmp_path / "wandb").rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in path.read_bytes() for path in files)
    output = capfd.readouterr()
    assert output.out + output.err == ""


def test_a_failing_tracker_is_left_out_and_reported_once(tmp_path, monkeypatch, capsys):
    class Failing:
        def __init__(self, *_):
            self.calls = 0

        def metrics(self, step, numbers):
            raise OSError(28, "No space left on device", f"http://user:{SECRET}@host")

        completions = metrics

    monkeypatch.setitem(trackers.TRACKERS, "wandb", Failing)
    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", lambda *_: 1 / 0)
    log_run(tmp_path, ("wandb", "tensorboard"), range(1, 4))
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    error = capsys.readouterr().err
    assert error.count("wandb failed (OSError") == 1 and error.count("tensorboard failed (ZeroDivisionError") == 1
    assert SECRET not in error


def test_a_missing_package_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match="log_to wandb: the package is missing; run pip install wandb"):
        RunFlags(log_to=("wandb",)).check_run()


def test_nothing_is_imported_without_the_flag(tmp_path):
    code = f"import sys; from training.run_log import RunLog; RunLog({str(tmp_path)!r}, {{}}, 1).metrics(1, {{'a': 1}})"
    code += "; assert not {'wandb', 'tensorboard', 'torch.utils.tensorboard'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
