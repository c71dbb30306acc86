"""Every family of models, with tiny random weights: packing, training, adapters, 4 bits, and what is exported.

    RECORD_FAMILIES=docs/results/families.json python -m pytest tests/test_family.py -n0

writes what was measured to that file, and from it the table in docs/models.md.

Guards against: image features in the wrong places, frozen parts that move, adapters that reach a router or miss the
shared experts, and exported models that transformers or PEFT cannot load.
"""

import copy
import json
import os
import pathlib
import re

import peft
import pytest
import torch
import transformers
from PIL import Image, ImageDraw

import evaluate
import grpo
from common.errors import UserError
from common.files import read_jsonl
from common.records import Completion, Group
from config import PolicyFlags
from data import encode_prompts, load_processor, load_samples
from packing import pack
from policy.families import FAMILIES, find_family, routers, vision_parts
from policy.forward import enable_packed_forward, token_logprobs
from policy.model import auto_class, load_config, load_policy
from tests.helpers import models
from tests.helpers.models import WITH_IMAGES, plain_logprobs, save_tiny
from tests.helpers.runs import config

ROOT = pathlib.Path(__file__).parent.parent
RECORD = os.environ.get("RECORD_FAMILIES")
COLUMNS = {
    "packed": "packed = plain",
    "gradients": "gradients",
    "full": "full",
    "lora": "LoRA",
    "4-bit": "LoRA, 4-bit",
    "sampler": "transformers sampler",
    "vllm": "vLLM 0.25.1",
}
CPU = torch.device("cpu")


def record(family: str, column: str, value: str) -> None:
    """Write a cell of the table to the file RECORD_FAMILIES, if it is set."""
    if RECORD:
        path = pathlib.Path(RECORD)
        table = json.loads(path.read_text()) if path.is_file() else {}
        table.setdefault(family, {})[column] = value
        path.write_text(json.dumps(table, indent=1) + "\n")


@pytest.fixture(scope="session")
def tiny_family(tmp_path_factory):
    """Return a function that returns the folder of a family's tiny model, made once."""
    folder = tmp_path_factory.mktemp("families")

    def folder_of(family: str) -> str:
        if not (folder / family).exists():
            save_tiny(family, folder / family)
        return str(folder / family)

    return folder_of


@pytest.fixture(scope="session")
def rows(tmp_path_factory):
    """Return a function that returns rows for a family: text, and if it sees, also one and two images per row."""
    folder = tmp_path_factory.mktemp("rows")
    for i in range(8):
        image = Image.new("RGB", (84 + 28 * (i % 3), 84 + 56 * (i % 2)), (250, 20 * i, 90))
        ImageDraw.Draw(image).ellipse((5 + i, 10, 40 + i, 40), fill="navy")
        image.save(folder / f"{i}.png")
    for name, most in (("text", 0), ("mixed", 2)):
        with (folder / f"{name}.jsonl").open("w") as file:
            for i in range(8):
                images = [str(folder / f"{(i + j) % 8}.png") for j in range(min(most, i % 3))]
                row = {"prompt": "<image>" * len(images) + f"How many, {i}?", "answer": str(i), "images": images}
                file.write(json.dumps(row) + "\n")
    return lambda family: str(folder / ("mixed.jsonl" if family in WITH_IMAGES else "text.jsonl"))


@pytest.mark.parametrize("family", models.FAMILIES)
def test_packed_equals_plain(family, tiny_family, rows):
    """Prompts from data.py: text, one image, and two images of different sizes in one pack."""
    processor = load_processor(tiny_family(family), "count")
    prompts = encode_prompts(load_samples(rows(family), "count", processor=processor)[:3], processor)
    g = torch.Generator().manual_seed(0)
    completions = [[torch.randint(0, 200, (n,), generator=g) for n in (4, 1, 6)] for _ in prompts]
    groups = [Group(p, [Completion(ids, torch.zeros(len(ids))) for ids in each]) for p, each in zip(prompts, completions)]
    config = load_config(tiny_family(family))
    plain = auto_class(config).from_pretrained(tiny_family(family), dtype=torch.float32)
    models.randomise(plain)
    packed = copy.deepcopy(plain)
    enable_packed_forward(packed)
    token = processor.image_token_id
    want = torch.cat([plain_logprobs(plain, group, c.ids, token) for group in groups for c in group.completions])
    got, _ = token_logprobs(packed, pack(groups))
    weights = torch.randn(len(want), generator=g)
    (want * weights).sum().backward()
    (got * weights).sum().backward()
    differences = [
        (q.grad - p.grad).abs().max() / max(1.0, p.grad.abs().max())
        for p, q in zip(plain.parameters(), packed.parameters(), strict=True)
        if p.grad is not None
    ]
    assert len(differences) > 15
    assert (got - want).abs().max() < 1e-5
    assert max(differences) < 1e-5
    record(family, "packed", f"{(got - want).abs().max():.0e}")
    record(family, "gradients", f"{max(differences):.0e}")


def trained(family: str, folder: str, data: str, output: pathlib.Path, **flags) -> tuple[grpo.Run, dict]:
    """Train for three steps. Return the policy before training, and its weights after it."""
    before = load_policy(folder, PolicyFlags(**{k: v for k, v in flags.items() if k != "beta"}), CPU)
    grpo.main(config(folder, data, output, task="count", max_steps=3, prompts_per_step=4, **flags))
    mismatch = max(row["sampling/logp_difference_max"] for row in read_jsonl(output / "metrics.jsonl"))
    assert mismatch < (0.1 if flags.get("load_in_4bit") else 1e-5)
    return before, mismatch


@pytest.mark.parametrize("family", models.FAMILIES)
def test_family_trains_whole(family, tiny_family, rows, tmp_path, capsys):
    """No frozen weight moves, others do; transformers loads the export, and evaluate.py samples from it."""
    folder = tiny_family(family)
    before, mismatch = trained(family, folder, rows(family), tmp_path / "run")
    after = auto_class(load_config(folder)).from_pretrained(tmp_path / "run" / "final", dtype=torch.float32)
    parts = vision_parts(before.model) | {find_family(before.model.config).router: None}
    printed = ", ".join(name for name in parts if name) or "nothing"
    assert f"frozen: {printed}\n" in capsys.readouterr().err
    moved = 0
    for name, new in after.named_parameters():
        old = before.model.get_parameter(name)
        assert old.requires_grad != any(f".{part}." in name for part in parts if part), name
        if not old.requires_grad:
            assert torch.equal(old, new), f"{name} is frozen but moved"
        moved += not torch.equal(old, new)
    assert moved > 15
    flags = ["--max_tokens=4", "--limit=2", f"--output={tmp_path / 'eval'}"]
    evaluate.main(evaluate.Config(model=str(tmp_path / "run" / "final"), data=rows(family), task="count", max_tokens=4,
                                  output=str(tmp_path / "eval")))
    assert (tmp_path / "eval" / "scores.json").is_file() or list((tmp_path / "eval").iterdir()), flags
    record(family, "full", "yes")
    record(family, "sampler", f"{mismatch:.0e}")
