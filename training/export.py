"""Export the trained policy, as an adapter in PEFT layout or as a whole model in Hugging Face layout.

`grpo.py` exports to `final` at the end of a run; `python -m training.checkpoint` exports a saved checkpoint.
"""

import contextlib
import json
import pathlib
import shutil
from collections.abc import Iterable

import transformers
from safetensors import SafetensorError
from transformers.utils import cached_file

from common import console, distributed
from common.errors import RunStopped, UserError
from common.files import partial_path
from policy.lora import POLICY, adapted_weights, has_adapter, load_adapter, read_adapter, write_adapter
from policy.model import Policy, check_saved_model, empty_model, load_model, saved_dtype


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
            _check(source, partial)
            previous = target.with_name(f"{target.name}.previous")  # renamed first: a kill must not leave a part of it
            shutil.rmtree(previous, ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):
                target.rename(previous)
            partial.rename(target)
            shutil.rmtree(previous, ignore_errors=True)
    except (OSError, SafetensorError, UserError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise RunStopped(f"{folder!r} could not be written ({str(error)[:200]})", 1) from None
    distributed.barrier()


def _write_model(policy: Policy, source: str, folder: pathlib.Path) -> None:
    """Load `source` on the main process, copy the trained weights into it, and save it to `folder`."""
    model = message = None
    with distributed.shared_errors():
        if console.is_main():
            model = load_model(source, saved_dtype(source))
    parameters = dict(model.named_parameters()) if model is not None else {}
    for name, weight in adapted_weights(policy.model):  # gathers one weight at a time, on all processes
        if model is not None:
            parameters[name].data.copy_(weight)
            if not parameters.pop(name).isfinite().all():
                message = message or f"{name} is not finite: use an earlier checkpoint and a lower --learning_rate"
    distributed.raise_first_error(message, UserError)
    if model is not None:
        if parameters:
            raise RuntimeError(f"the policy has no parameter {sorted(parameters)[0]!r} to export")
        save_weights(model, folder)
        copy_processor(source, folder)
        copy_files(source, folder, ["generation_config.json"])


def save_weights(model: transformers.PreTrainedModel, folder: pathlib.Path, **options: object) -> None:
    """Write the configuration and the weights of `model` to `folder`, but no generation_config.json.

    The caller copies that of the base, because transformers refuses to save some settings that it loads.
    """
    model.generation_config = transformers.GenerationConfig()
    model.save_pretrained(folder, **options)
    (folder / "generation_config.json").unlink()


def _check(source: str, folder: pathlib.Path) -> None:
    """Raise UserError unless what was exported to `folder` can be loaded. The values of the weights are not read."""
    if (folder / "adapter_config.json").is_file():
        config, tensors = read_adapter(str(folder))
        load_adapter(empty_model(source), config, tensors, [POLICY], str(folder))
    else:
        check_saved_model(str(folder))


def copy_processor(source: str, folder: pathlib.Path) -> None:
    """Copy the tokenizer, chat template and image processor settings of `source` to `folder`."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # the tokenizers library raises a bare Exception, for example on a full disk
        raise OSError(f"the tokenizer: {error}") from error
    files = (
        "processor_config.json",
        "preprocessor_config.json",
        "video_preprocessor_config.json",
        "chat_template.json",
    )
    copy_files(source, folder, files)
    write_preprocessor_config(folder)


def copy_files(source: str, folder: pathlib.Path, names: Iterable[str]) -> None:
    """Copy those of the files `names` that the model at `source` has to `folder`."""
    for name in names:
        path = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
        if path is not None:
            shutil.copy(path, folder)


def write_preprocessor_config(folder: pathlib.Path) -> None:
    """Write `preprocessor_config.json`, where older programs look for the settings of the image processor.

    transformers 5 saves these settings as a part of `processor_config.json` instead.
    """
    path, older = folder / "processor_config.json", folder / "preprocessor_config.json"
    settings = json.loads(path.read_text()).get("image_processor") if path.is_file() else None
    if settings and not older.exists():
        older.write_text(json.dumps(settings, indent=2) + "\n")
