"""Configuration of small runs, and functions that compare their checkpoints, weights and metrics."""

import pathlib

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import keystr, tree_flatten_with_path
from transformers import AutoModelForImageTextToText

import grpo
from common.files import read_jsonl

SMALL = {"task": "count", "prompts_per_step": 4, "num_generations": 4, "max_completion_length": 12, "report_every": 0}


def config(model: str, data: str, output: pathlib.Path, **flags) -> grpo.Config:
    return grpo.Config(model=model, data=data, output=str(output), **(SMALL | {"learning_rate": 1e-3} | flags))


def weights(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    return AutoModelForImageTextToText.from_pretrained(folder).state_dict()


def tensors(folder: pathlib.Path, scratch: pathlib.Path) -> dict[str, object]:
    """Return the parameters, moments and step counts of a checkpoint, keyed by name."""
    dcp_to_torch_save(folder, scratch)
    leaves, _ = tree_flatten_with_path(torch.load(scratch, weights_only=False))
    return {keystr(path): leaf for path, leaf in leaves}


def difference(a: pathlib.Path, b: pathlib.Path, scratch: pathlib.Path) -> float:
    """Return the largest absolute difference between the parameters and moments of two checkpoints."""
    one, two = tensors(a, scratch / "a.pt"), tensors(b, scratch / "b.pt")
    assert one.keys() == two.keys()
    assert any("exp_avg_sq" in name for name in one)
    pairs = [(v.double(), two[k].double()) for k, v in one.items() if isinstance(v, torch.Tensor)]
    assert all(two[k] == v for k, v in one.items() if not isinstance(v, torch.Tensor))
    return max((x - y).abs().max().item() for x, y in pairs)


def metrics(folder: pathlib.Path) -> list[dict]:
    """Return the logged metrics of a run, except those of the machine: timings and the host's memory."""
    timed = ("time/", "idle/", "step_time", "tokens_per_second", "host_memory_gib")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in read_jsonl(folder / "metrics.jsonl")]


def plugin_with_timeout(folder: pathlib.Path, seconds: int) -> str:
    """Write a plugin with which a process waits `seconds` for the others, and return its path."""
    path = folder / "timeout.py"
    lines = f"distributed.TIMEOUT = datetime.timedelta(seconds={seconds})\n"
    path.write_text(f"import datetime\n\nfrom common import distributed\n\n{lines}")
    return str(path)
