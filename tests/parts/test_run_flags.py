"""The flags with which `./run.sh eval` scores a trained run."""

import dataclasses
import json
import subprocess
import sys

import pytest

pytest.importorskip("parts.run_flags", reason="needs parts/run_flags.py, which is not here")

import grpo
from common.errors import UserError
from parts.run_flags import run_flags
from tests.helpers.scripts import ROOT

GOOD = {"model": "m", "task": "count", "eval_data": "rows", "max_completion_length": 12, "plugin_sha256": {}}
SHAPES = ["[]", '"text"', "3", "null", "[" * 100_000, "\xff", json.dumps(GOOD | {"plugin_sha256": ["a"]})]


@pytest.mark.parametrize(
    "text",
    [*SHAPES[:-1]]
    + [json.dumps({name: value for name, value in GOOD.items() if name != left}) for left in ("model", "task")]
    + [json.dumps(GOOD | change) for change in ({"model": 3}, {"plugin_flags": "x"}, {"max_completion_length": None})],
)
def test_a_config_of_another_shape_is_refused_at_an_evaluation(text, tmp_path):
    (tmp_path / "final").mkdir()
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=r"config.json cannot be read: restore it"):
        run_flags(tmp_path, set())


def test_a_flag_that_config_json_lacks_is_left_out(tmp_path):
    (tmp_path / "final").mkdir()
    settings = GOOD | {"plugin_flags": ["a", "b", ["c"]], "a": 2, "max_completion_length": "12"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    flags = run_flags(tmp_path, set())
    assert flags["a"] == 2 and flags["max_completion_length"] == "12" and "b" not in flags


def test_the_refusal_of_an_evaluation_is_one_line(tmp_path):
    (tmp_path / "final").mkdir()
    (tmp_path / "config.json").write_text("[]")
    command = [sys.executable, "-m", "parts.run_flags", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_an_sft_adapter_is_the_baseline(tmp_path):
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "adapter_config.json").touch()
    of_rewards = {"reward": ("mine.py:reward",), "verifier_timeout": 5.0}
    cfg = grpo.Config(
        data="rows", model="base", adapter="sft", task="vqa", max_pixels=7056, gpu_memory=24, **of_rewards
    )
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(cfg) | {"engine": "policy"}))
    flags = run_flags(tmp_path, {"--data"})
    assert "engine" not in flags, "evaluate.py refuses the engine policy"
    expected = {"model": "base", "adapter": f"{tmp_path}/final", "baseline": "sft", "task": "vqa", "max_pixels": 7056}
    expected |= of_rewards | {"reward": ["mine.py:reward"], "gpu_memory": 24}
    assert expected.items() <= flags.items()
    assert "data" not in flags, "the user's own"
    assert not {"task", "data", "reward"} & run_flags(tmp_path, {"--benchmark"}).keys()
    with pytest.raises(SystemExit, match="the run has no eval_data"):
        run_flags(tmp_path, set())
