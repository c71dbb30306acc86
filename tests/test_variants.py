"""Nine runs of three steps, each with other options, whose final weights stay the same bit for bit.

The hashes are those of one kind of CPU and one release of torch. Another one rounds otherwise: then they are taken with

    RECORD_VARIANTS=1 python -m pytest --slow tests/test_variants.py

at the commit before a change, and compared at the change.
"""

import hashlib
import json
import os

import pytest
import torch

import grpo
from common.files import read_jsonl
from tests.helpers.runs import config
from tests.helpers.scripts import VECTORS

HASHES = VECTORS / "variants.json"
VARIANTS = {
    "grpo": {},
    "gspo with kl": {"loss_type": "gspo", "beta": 0.05},
    "dapo": {"loss_type": "dapo"},
    "gdpo": {"advantage": "gdpo"},
    "four updates": {"prompts_per_update": 2, "num_iterations": 2},
    "batch": {"advantage": "batch"},
    "dynamic sampling": {"dynamic_sampling_rounds": 3, "reward": ("begins",)},
    "partial rollouts": {"oversample": 2.0},
    "adapter": {"lora_rank": 4, "lora_dropout": 0.1, "beta": 0.05},
}
REWARDS = """
def letters(completion, answer, **fields):
    return sum(map(str.isalpha, completion)) / max(len(completion), 1)


def short(completion, answer, **fields):
    return 1 / (1 + len(completion))


def begins(completion, answer, **fields):  # often equal within a group
    return float(completion[:1].isupper())
"""


def machine() -> str:
    """Return what the last bits of a run depend on: torch, the CPU's vector instructions, and the number of threads."""
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_has_the_weights_that_it_had(name, brief_model, shapes, tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)  # which differ among completions of random weights
    flags = dict(task="count", max_steps=3, reward=("letters", "short")) | VARIANTS[name]
    flags["reward"] = tuple(f"{tmp_path}/rewards.py:{reward}" for reward in flags["reward"])
    grpo.main(config(brief_model, shapes, tmp_path / "run", **flags))
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert all(row["grad_norm"] > 0 for row in rows)
    (file,) = (tmp_path / "run" / "final").glob("*model.safetensors")
    digest, known = hashlib.sha256(file.read_bytes()).hexdigest(), read_hashes()
    if "RECORD_VARIANTS" in os.environ:
        known.setdefault(machine(), {})[name] = digest
        HASHES.write_text(json.dumps(known, indent=1) + "\n")
    if machine() not in known:
        pytest.skip(f"no hashes for {machine()}: RECORD_VARIANTS=1 takes them")
    assert digest == known[machine()][name]


def read_hashes() -> dict[str, dict[str, str]]:
    return json.loads(HASHES.read_text()) if HASHES.is_file() else {}
