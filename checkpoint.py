"""Exact save and resume, and export to Hugging Face layout.

A checkpoint is a folder `checkpoint-STEP` with the parameters and the optimizer state in `torch.distributed.checkpoint`
form and `state.json` with everything else. It is written beside its place and renamed when it is whole, so a killed run
never leaves a half one under that name.
"""

import json
import pathlib
import re
import shutil
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from transformers import AutoTokenizer
from transformers.utils import cached_file

import parallel
from cli import UserError
from lora import adapter_tensors, has_adapter, write_adapter
from model import Policy, full_weights, load_model, saved_dtype

# What a resumed run must share: it decides which prompts come next.
SAME_RUN = ("task", "data", "data_weights", "rows", "model", "seed", "prompts_per_step", "num_generations")
SAME_RUN += ("lora_rank", "lora_alpha", "adapter", "load_in_4bit")  # what is trained
TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)  # the rest lies where the run started from


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
    parameters, moments = get_state_dict(policy, optimizer, options=TRAINED)
    dcp.save({"policy": parameters, "optimizer": moments}, checkpoint_id=partial)
    if parallel.is_main():
        (partial / "state.json").write_text(json.dumps(progress | {"scheduler": scheduler.state_dict()}, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    parallel.wait_for_all()
    return folder


def newest_checkpoint(output: str) -> pathlib.Path:
    """The whole checkpoint of the latest step in `output`. Raises UserError when there is none."""
    found = [path.parent for path in pathlib.Path(output).glob("checkpoint-*/state.json")]
    steps = {int(match[1]): folder for folder in found if (match := re.fullmatch(r"checkpoint-(\d+)", folder.name))}
    if not steps:
        raise UserError(f"--resume: no checkpoint in {output!r}; leave the flag out to start a new run")
    return steps[max(steps)]


def load_checkpoint(
    folder: pathlib.Path,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LambdaLR,
    config: dict[str, Any],
) -> dict[str, Any]:
    """Put the tensors of `folder` into `policy`, `optimizer` and `scheduler`; returns the saved progress.

    Learning rate and weight decay are those of the new command. Raises UserError when `config` differs in what decides
    which prompts come next.
    """
    saved = json.loads((folder / "state.json").read_text())
    config = json.loads(json.dumps(config))
    changed = [f"{name} was {saved['config'][name]}" for name in SAME_RUN if saved["config"][name] != config[name]]
    if changed:
        raise UserError(f"--resume: {folder} is of another run ({', '.join(changed)}): use the same or a new --output")
    decay = [group["weight_decay"] for group in optimizer.param_groups]
    parameters, moments = get_state_dict(policy, optimizer, options=TRAINED)
    dcp.load({"policy": parameters, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(policy, optimizer, model_state_dict=parameters, optim_state_dict=moments, options=TRAINED)
    rates = list(scheduler.base_lrs)
    scheduler.load_state_dict(saved["scheduler"] | {"base_lrs": rates})
    for group, rate, shape, own_decay in zip(optimizer.param_groups, rates, scheduler.lr_lambdas, decay):
        group |= {"initial_lr": rate, "lr": rate * shape(scheduler.last_epoch), "weight_decay": own_decay}
    return saved


def export(policy: Policy, source: str, folder: str) -> None:
    """Write what was trained: an adapter in PEFT layout, to be loaded over `source`; or the whole model in Hugging Face
    layout, in the dtype `source` was saved in, with its tokenizer and processor, for `from_pretrained` and vLLM.

    Written beside its place and renamed. All processes.
    """
    target = pathlib.Path(folder)
    partial = target.with_suffix(".partial")
    if parallel.is_main():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    if has_adapter(policy.model):
        tensors = adapter_tensors(policy.model)
        if parallel.is_main():
            write_adapter(policy.model, tensors, source, partial)
    else:
        _write_model(policy, source, partial)
    if parallel.is_main():
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    parallel.wait_for_all()


def _write_model(policy: Policy, source: str, folder: pathlib.Path) -> None:
    model = load_model(source, saved_dtype(source)) if parallel.is_main() else None
    own = dict(model.named_parameters()) if model is not None else {}
    for name, weight in full_weights(policy):  # one whole weight at a time
        if model is not None:
            own.pop(name).data.copy_(weight)
    if model is not None:
        if own:
            raise RuntimeError(f"the policy has no {sorted(own)[0]} to export")
        model.save_pretrained(folder)
        copy_processor(source, folder)


def copy_processor(source: str, folder: pathlib.Path) -> None:
    """The tokenizer, chat template and image settings of `source`, for whoever loads `folder`."""
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        settings = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
        if settings is not None:
            shutil.copy(settings, folder)
