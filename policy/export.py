"""Export the trained policy, as an adapter in PEFT layout or as a whole model.

An exported model is the folder of its base with other weights. Its other files equal the base's, byte for byte. Its
tensors have the base's names, shapes, dtypes and files. Any release of another program thus reads it like the base.
Only generation_config.json changes if it lacks the token with which the chat template ends an answer.
`save_pretrained` would write what only its own release of transformers reads.

`grpo.py` exports to `final` at the end of a run, `python -m training.checkpoint` exports a saved checkpoint, and
`merge_lora.py` a merged model.
"""

import contextlib
import itertools
import json
import re
import shutil
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers.modeling_utils import load_state_dict

from common import console, distributed
from common.errors import RunStopped, UserError
from common.files import partial_path
from policy.base_files import Layout, copy_settings, settings_folder, stored_tensors, weight_files
from policy.families import load_tokenizer
from policy.lora import POLICY, has_adapter, load_adapter, read_adapter, write_adapter
from policy.model import Policy, check_saved_model, empty_model, end_token, stop_tokens, ties_lm_head


def export(policy: Policy, source: str, folder: str, run: str) -> None:
    """Write the trained policy to `folder`, which is replaced if it exists.

    An adapter is written in PEFT layout, to be loaded on top of `source`. Otherwise, `source` is written with the
    trained weights; if it is a hub name, its files are taken from `run`, the run's folder, which has kept them.

    The folder is written under a temporary name and then renamed. All processes must call this together. Raises
    RunStopped if writing fails, or if a weight is NaN or infinite; nothing is then written or replaced.
    """
    target = Path(folder)
    partial = partial_path(target)
    try:
        if console.is_main():
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        if has_adapter(policy.model):
            write_adapter(policy.model, source, partial)
        else:
            write_model(policy.model, source, partial, run)
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


def _check(source: str, folder: Path) -> None:
    """Raise UserError unless what was exported to `folder` can be loaded. The values of the weights are not read."""
    if (folder / "adapter_config.json").is_file():
        config, tensors = read_adapter(str(folder))
        load_adapter(empty_model(source), config, tensors, [POLICY], str(folder))
    else:
        check_saved_model(str(folder))


def write_model(
    model: transformers.PreTrainedModel, source: str, folder: Path, run: str = "", dtype: torch.dtype | None = None
) -> None:
    """Write the base `source` with the weights of `model` to `folder`, each as the base stores it, or in `dtype`.

    Tensors that were never loaded, such as those of multi-token prediction, are copied. An lm_head that is no longer
    tied to the embedding is added beside it. At most one file of weights is in host memory at a time. All processes
    must call this together.
    """
    layout, plan, written = None, {}, {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with distributed.shared_errors():
        if console.is_main():
            layout = Layout(empty_model(source), stored_tensors(source), parameters)
            unties = ties_lm_head(layout.model) and not ties_lm_head(model)
            if unties:
                layout.add_lm_head()
            copy_settings(settings_folder(source, run), folder)
            if dtype or unties:
                _edit_config(folder / "config.json", dtype, unties)
            _add_end_token(folder, layout.model.config)
            plan = layout.parameters
    for path, names in console.progress(distributed.all_gather(plan)[0].items(), "exporting", unit="file"):
        weights = {}
        for name in dict.fromkeys(names.values()):
            weight = distributed.full_tensor(parameters[name].detach())  # gathers one at a time, on all processes
            if layout:
                weights[name] = weight.cpu()
        with distributed.shared_errors():
            if layout:
                written[path] = _write_weights(layout, path, weights, folder, dtype)
    if layout:
        _write_index(source, folder, written)


def _edit_config(path: Path, dtype: torch.dtype | None, unties: bool) -> None:
    """In the config.json at `path`, set each dtype that it names to `dtype`, if given; if `unties`, untie lm_head."""
    config, text = json.loads(path.read_text()), path.read_text()
    levels = [config, *(level for level in config.values() if isinstance(level, dict))]
    for level, key in itertools.product(levels if dtype else (), ("dtype", "torch_dtype")):
        if key in level:
            level[key] = str(dtype).removeprefix("torch.")
    for level in (config, config.get("text_config")) if unties else ():
        if level is not None:
            level["tie_word_embeddings"] = False
    if config != json.loads(text):
        indent = re.search(r"\n( +)", text)
        path.write_text(json.dumps(config, indent=len(indent[1]) if indent else None, ensure_ascii=False) + "\n")


def _add_end_token(folder: Path, config: transformers.PreTrainedConfig) -> None:
    """Let other programs stop, too, at the token with which the chat template ends an answer."""
    path, tokenizer = folder / "generation_config.json", load_tokenizer(str(folder))
    settings = json.loads(path.read_text()) if path.is_file() else {}
    stops = settings.get("eos_token_id", config.get_text_config().eos_token_id)
    if end_token(tokenizer) not in (None, stops, *(stops if isinstance(stops, list) else ())):
        settings["eos_token_id"] = stop_tokens(settings, config, tokenizer)
        path.write_text(json.dumps(settings, indent=2) + "\n")


def _write_weights(
    layout: Layout, path: str, weights: dict[str, Tensor], folder: Path, dtype: torch.dtype | None
) -> tuple[str, dict[str, int]]:
    """Write a copy of the base's file `path`, with `weights`, to `folder`. Return its name and its tensors' sizes."""
    tensors = load_state_dict(path)
    for name, parameter in layout.parameters[path].items():
        weight = layout.as_stored(path, name, weights[parameter])
        if name in tensors and tensors[name].to(weight.dtype).equal(weight):
            continue  # keep the stored values: a frozen weight may have been rounded to the compute dtype
        if not weight.isfinite().all():
            raise UserError(f"{parameter} is not finite: use an earlier checkpoint and a lower --learning_rate")
        tensors[name] = weight.to(dtype or layout.stored[path][name].dtype)
    for name, tensor in tensors.items():
        tensor = tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
        tensors[name] = tensor.clone(memory_format=torch.contiguous_format)  # tensors of .bin files may share memory
    target = folder / re.sub(r"^pytorch_(.*)\.bin$", r"\1.safetensors", Path(path).name)
    save_file(tensors, target, {"format": "pt"})
    target.chmod(folder.stat().st_mode & 0o666)  # safetensors would let only the owner read it
    return target.name, {name: tensor.nbytes for name, tensor in tensors.items()}


def _write_index(source: str, folder: Path, written: dict[str, tuple[str, dict[str, int]]]) -> None:
    """Write the index of what `_write_weights` has `written` for each file of `source`, if `source` has an index."""
    index, _ = weight_files(source)
    if index is not None:
        content = json.loads(index.read_text())
        content["weight_map"] |= {name: file for file, sizes in written.values() for name in sizes}
        content.setdefault("metadata", {})["total_size"] = sum(sum(sizes.values()) for _, sizes in written.values())
        (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n")
