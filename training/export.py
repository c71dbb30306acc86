"""Export the trained policy, as an adapter in PEFT layout or as a whole model in Hugging Face layout.

`grpo.py` exports to `final` at the end of a run; `python -m training.checkpoint` exports a saved checkpoint.
"""

import pathlib
import shutil

import transformers
from safetensors import SafetensorError
from transformers.utils import cached_file

from common import console, distributed
from common.errors import RunStopped, UserError
from common.files import partial_path
from policy.lora import has_adapter, write_adapter
from policy.model import Policy, load_model, saved_dtype
from policy.sharding import full_weights


def export(policy: Policy, source: str, folder: str) -> None:
    """Write the trained policy to `folder`, which is replaced if it exists.

    An adapter is written in PEFT layout, to be loaded on top of `source`. A model that was trained without an adapter
    is written in Hugging Face layout, for `from_pretrained` and vLLM. The saved model has the dtype, tokenizer and
    processor of `source`.

    The folder is written under a temporary name and then renamed. All processes must call this together. Raises
    RunStopped if writing fails, or if a weight is NaN or infinite; nothing is then written or replaced.
    """
    target = pathlib.Path(folder)
    partial = partial_path(target)
    try:
        if console.is_main():
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        if has_adapter(policy.model):
            write_adapter(policy.model, source, partial)
        else:
            _write_model(policy, source, partial)
        if console.is_main():
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
    except (OSError, SafetensorError, UserError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise RunStopped(f"{folder!r} could not be written ({str(error)[:200]})", 1) from None
    distributed.barrier()


def _write_model(policy: Policy, source: str, folder: pathlib.Path) -> None:
    """Load `source` on the main process, copy the trained weights into it, and save it to `folder`."""
    model = message = None
    if console.is_main():
        try:
            model = load_model(source, saved_dtype(source))
        except UserError as error:
            message = str(error)
    distributed.raise_first_error(message, UserError)
    parameters = dict(model.named_parameters()) if model is not None else {}
    for name, weight in full_weights(policy):  # gathers one weight at a time, on all processes
        if model is not None:
            parameters[name].data.copy_(weight)
            if not parameters.pop(name).isfinite().all():
                message = message or f"{name} is not finite: use an earlier checkpoint and a lower --learning_rate"
    distributed.raise_first_error(message, UserError)
    if model is not None:
        if parameters:
            raise RuntimeError(f"the policy has no parameter {sorted(parameters)[0]!r} to export")
        model.save_pretrained(folder)
        copy_processor(source, folder)


def copy_processor(source: str, folder: pathlib.Path) -> None:
    """Copy the tokenizer, chat template and image processor settings of `source` to `folder`."""
    transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False).save_pretrained(folder)
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        path = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
        if path is not None:
            shutil.copy(path, folder)
