"""TODO training/export.py"""

import pathlib
import shutil

from safetensors import SafetensorError
from transformers import AutoTokenizer
from transformers.utils import cached_file

from common import console, distributed
from common.errors import RunStopped, UserError
from common.files import partial_path
from policy.lora import adapter_tensors, has_adapter, write_adapter
from policy.model import Policy, load_model, saved_dtype
from policy.sharding import full_weights


def export(policy: Policy, source: str, folder: str) -> None:
    """Write what was trained: an adapter in PEFT layout, to be loaded over `source`; or the whole model in Hugging Face
    layout, in the dtype `source` was saved in, with its tokenizer and processor, for `from_pretrained` and vLLM.

    Written beside its place and renamed. All processes. Raises RunStopped when it could not be written.
    """
    target = pathlib.Path(folder)
    partial = partial_path(target)
    try:
        _export(policy, source, target, partial)
    except (OSError, SafetensorError, UserError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise RunStopped(f"{folder!r} could not be written ({str(error)[:200]})", 1) from None


def _export(policy: Policy, source: str, target: pathlib.Path, partial: pathlib.Path) -> None:
    if console.is_main():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    if has_adapter(policy.model):
        tensors = adapter_tensors(policy.model)
        if console.is_main():
            write_adapter(policy.model, tensors, source, partial)
    else:
        _write_model(policy, source, partial)
    if console.is_main():
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    distributed.barrier()


def _write_model(policy: Policy, source: str, folder: pathlib.Path) -> None:
    model = wrong = None
    if console.is_main():
        try:
            model = load_model(source, saved_dtype(source))
        except UserError as error:
            wrong = str(error)
    if wrong := distributed.first_error(wrong):
        raise UserError(wrong)
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
