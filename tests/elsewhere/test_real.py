"""What `./run.sh real` and `./run.sh vlm` make of published models and train is read elsewhere."""

import json

import pytest
import torch

from policy.model import load_model
from tests.elsewhere.conftest import ENVIRONMENTS, run_in
from tests.elsewhere.logits import last_logits
from tests.helpers.scripts import ROOT


def read_elsewhere(place, folder, inputs, work) -> dict:
    """Return what an environment reads in a folder below runs/; its logits have to be those of this project."""
    path = ROOT / "runs" / folder
    if not path.is_dir():
        pytest.skip(f"runs/{folder} is missing: ./run.sh {folder.partition('/')[0]} makes it")
    torch.save(inputs, work / "inputs.pt")
    job = {"folder": str(path), "inputs": str(work / "inputs.pt"), "output": str(work / "read.pt")}
    (work / "jobs.json").write_text(json.dumps([job]))
    run_in(place, "read", work / "jobs.json")
    read = torch.load(work / "read.pt", weights_only=False)
    assert not [part for part in read.values() if "error" in part], read
    assert read["model"]["loading"] == {}
    for kind, expected in last_logits(load_model(str(path), torch.float32), inputs).items():
        torch.testing.assert_close(read["model"]["logits"][kind], expected, atol=1e-3, rtol=0)
    return read


@pytest.mark.parametrize("folder", ["real/data/model", "real/seed-0/final"])
@pytest.mark.parametrize("place", ENVIRONMENTS)
def test_the_real_model_is_read(place, folder, tmp_path):
    """Logits in float32, the tokenizer's ids and the stop tokens."""
    ids = torch.randint(1000, 200_000, (1, 600), generator=torch.Generator().manual_seed(0))  # longer than a window
    read = read_elsewhere(place, folder, {"text": {"input_ids": ids}}, tmp_path)
    assert read["tokenizer"]["ids"][:6] == [2, 236800, 236812, 236862, 236810, 236770], "<bos>34+51"
    assert read["settings"]["generation"]["eos_token_id"] == 1


@pytest.mark.parametrize("folder", ["vlm/data/model", "vlm/sft-0/final", "vlm/seed-0/final"])
@pytest.mark.parametrize("place", ENVIRONMENTS)
def test_the_real_vision_language_model_is_read(place, folder, tmp_path):
    """The same with a picture of 112x112 pixels, 16 tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, 150_000, (1, 200), generator=generator)
    seen = torch.tensor([[151652, *[151655] * 16, 151653]])  # <|vision_start|>, 16 of <|image_pad|>, <|vision_end|>
    ids = torch.cat([ids[:, :100], seen, ids[:, 100:]], dim=1)
    picture = {
        "input_ids": ids,
        "mm_token_type_ids": (ids == 151655).int(),
        "pixel_values": torch.randn(64, 1176, generator=generator),
        "image_grid_thw": torch.tensor([[1, 8, 8]]),
    }
    read = read_elsewhere(place, folder, {"text": {"input_ids": ids[:, :100]}, "picture": picture}, tmp_path)
    assert read["tokenizer"]["ids"][:6] == [18, 19, 10, 20, 16, 19884], "34+51=?"
    assert read["settings"]["generation"]["eos_token_id"] == [151645, 151643]
