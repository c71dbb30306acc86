"""A run from Python, as docs/extend.md shows it."""

import re
import signal

import pytest

pytest.importorskip("apps.notebook", reason="needs apps/notebook.py, which is not here")

import rewards
from tests.helpers.scripts import ROOT


def test_the_run_of_the_document_trains(tiny_model, shapes, tmp_path, monkeypatch):
    """Twice, as a cell is run again; Ctrl-C then means what it meant before."""
    document = (ROOT / "docs" / "extend.md").read_text()
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", document, re.DOTALL) if "notebook" in code)
    assert len([line for line in code.splitlines() if line]) == 6
    code = code.replace("runs/tiny/count-0/model", tiny_model).replace("runs/tiny/count-0/train", shapes)
    code = code.replace("runs/brief", f"{tmp_path}/run").replace("max_steps=5", "max_steps=1, overwrite=True")
    monkeypatch.setattr(rewards, "TASKS", dict(rewards.TASKS))
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    for _ in range(2):
        done: dict = {}
        exec(code, done)
        assert [row["step"] for row in done["metrics"]] == [1] and 0 < done["metrics"][0]["reward"] <= 1
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert (tmp_path / "run" / "final" / "config.json").is_file()
