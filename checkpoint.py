"""Exact save and resume, and export to Hugging Face layout.

A checkpoint is a folder `checkpoint-STEP` with the parameters and the optimizer state in `torch.distributed.checkpoint`
form and `state.json` with everything else. It is written beside its place and renamed when it is whole, so a killed run
never leaves a half one under that name.
"""

import json
import pathlib
import shutil
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import AutoTokenizer

import parallel
from cli import UserError
from model import Policy, full_weights, load_model, saved_dtype


def save_checkpoint(
    output: str,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    progress: dict[str, Any],
) -> pathlib.Path:
    """Write `output`/checkpoint-STEP; `progress` holds «step» and what else the caller needs back. All processes."""
    folder = pathlib.Path(output) / f"checkpoint-{progress['step']}"
    partial = folder.with_suffix(".partial")
    if parallel.is_main():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    parallel.wait_for_all()
    parameters, moments = get_state_dict(policy, optimizer)
    dcp.save({"policy": parameters, "optimizer": moments}, checkpoint_id=partial)
    if parallel.is_main():
        (partial / "state.json").write_text(json.dumps(progress | {"scheduler": scheduler.state_dict()}, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    parallel.wait_for_all()
    return folder


def newest_checkpoint(output: str) -> pathlib.Path:
    """The whole checkpoint of the latest step in `output`. Raises UserError when there is none."""
    folders = [path.parent for path in pathlib.Path(output).glob("checkpoint-*/state.json")]
    folders = [folder for folder in folders if folder.suffix != ".partial"]
    if not folders:
        raise UserError(f"--resume: no checkpoint in {output!r}; leave the flag out to start a new run")
    return max(folders, key=lambda folder: int(folder.name.removeprefix("checkpoint-")))


def load_checkpoint(
    folder: pathlib.Path,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
) -> dict[str, Any]:
    """Put the tensors of `folder` into `policy`, `optimizer` and `scheduler`; returns the saved progress."""
    parameters, moments = get_state_dict(policy, optimizer)
    dcp.load({"policy": parameters, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(policy, optimizer, model_state_dict=parameters, optim_state_dict=moments)
    saved = json.loads((folder / "state.json").read_text())
    scheduler.load_state_dict(saved["scheduler"])
    return saved


def export(policy: Policy, source: str, folder: str) -> None:
    """Write the policy in Hugging Face layout, in the dtype `source` was saved in, with its tokenizer and processor.

    `from_pretrained` and vLLM load the folder. Written beside its place and renamed. All processes.
    """
    target = pathlib.Path(folder)
    partial = target.with_suffix(".partial")
    dtype = saved_dtype(source)
    weights = {name: weight.to("cpu", dtype) for name, weight in full_weights(policy)}
    if parallel.is_main():
        shutil.rmtree(partial, ignore_errors=True)
        model = load_model(source, dtype)
        model.load_state_dict(weights, strict=False)  # tied weights come under one name
        model.save_pretrained(partial)
        AutoTokenizer.from_pretrained(source).save_pretrained(partial)
        if (settings := pathlib.Path(source) / "preprocessor_config.json").is_file():
            shutil.copy(settings, partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    parallel.wait_for_all()
