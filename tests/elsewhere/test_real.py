"""The folder that `./run.sh real` makes of a published model, and what is trained from it, are read elsewhere."""

import json

import pytest
import torch

from policy.model import load_model
from tests.elsewhere.conftest import ENVIRONMENTS, run_in
from tests.elsewhere.logits import last_logits
from tests.helpers.scripts import ROOT


@pytest.mark.parametrize("folder", ["data/model", "seed-0/final"])
@pytest.mark.parametrize("place", ENVIRONMENTS)
def test_the_real_model_is_read(place, folder, tmp_path):
    """Logits in float32, the tokenizer's ids and the stop tokens."""
    path = ROOT / "runs" / "real" / folder
    if not path.is_dir():
        pytest.skip(f"runs/real/{folder} is missing: ./run.sh real makes it")
    ids = torch.randint(1000, 200_000, (1, 600), generator=torch.Generator().manual_seed(0))  # longer than a window
    inputs = {"text": {"input_ids": ids}}
    torch.save(inputs, tmp_path / "inputs.pt")
    job = {"folder": str(path), "inputs": str(tmp_path / "inputs.pt"), "output": str(tmp_path / "read.pt")}
    (tmp_path / "jobs.json").write_text(json.dumps([job]))
    run_in(place, "read", tmp_path / "jobs.json")
    read = torch.load(tmp_path / "read.pt", weights_only=False)
    assert not [part for part in read.values() if "error" in part], read
    assert read["model"]["loading"] == {}
    expected = last_logits(load_model(str(path), torch.float32), inputs)["text"]
    torch.testing.assert_close(read["model"]["logits"]["text"], expected, atol=1e-3, rtol=0)
    assert read["tokenizer"]["ids"][:6] == [2, 236800, 236812, 236862, 236810, 236770], "<bos>34+51"
    assert read["settings"]["generation"]["eos_token_id"] == 1
