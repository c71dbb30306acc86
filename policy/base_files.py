"""The files of a base in Hugging Face layout, and how they store the parameters of its model.

A base is a folder or a hub name. `Layout` finds the parameter that each stored tensor is loaded into, as
`from_pretrained` does, and turns a trained parameter back into what the base stores.
"""

import contextlib
import fnmatch
import itertools
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.modeling_utils import load_state_dict
from transformers.utils import cached_file

from common import console, hub
from common.errors import UserError

LM_HEAD = "lm_head.weight"
KEPT = "base"  # the folder of a run that keeps the files of a base from the hub
WEIGHTS = "*.safetensors *.bin *.pt *.pth *.ckpt *.gguf *.h5 *.msgpack *.onnx *.onnx_data *.tflite *.ot *.npz *.pkl"
TRAINERS = "trainer_state.json trainer_log.jsonl training_args.* *_results.json latest zero_to_fp32.py events.out.*"
NOT_SETTINGS = (*WEIGHTS.split(), "*.index.json", *TRAINERS.split(), ".*", "*/*")  # "*/*": in subfolders


def copy_settings(folder: Path, target: Path) -> None:
    """Copy the files at the top of `folder` to the folder `target`, except weights and files of trainers."""
    target.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.is_file() and not any(fnmatch.fnmatch(path.name, pattern) for pattern in NOT_SETTINGS):
            shutil.copyfile(path, target / path.name)  # follows links; the new file has the default mode


def settings_folder(source: str, run: str, keep: bool = False) -> Path:
    """Return the folder with the settings of the base `source`: itself, the copy that `run` keeps, or the hub's cache.

    `keep`: if `source` is a hub name, copy its files to `run` first, so that the end of the run needs no network.
    Raises UserError if they cannot be copied.
    """
    if Path(source).is_dir():
        return Path(source)
    kept = Path(run, KEPT)
    if kept.is_dir() and not keep:
        return kept
    if hub.go_offline_if_unreachable():
        console.log(f"the hub cannot be reached: an export has those files of {source} that are in the hub's cache")
    snapshot = Path(snapshot_download(source, ignore_patterns=list(NOT_SETTINGS)))
    if keep:
        try:
            shutil.rmtree(kept, ignore_errors=True)
            copy_settings(snapshot, kept)
        except OSError as error:
            raise UserError(f"the files of {source!r} cannot be copied to {str(kept)!r} ({error})") from None
    return snapshot


def base_folder(name: str, cache_dir: str | None = None) -> str:
    """Return the folder of the base `name`; if `name` is not a folder, download the model from the hub."""
    if Path(name).is_dir():
        return name
    others = ["*.pt", "*.pth", "*.gguf", "*/*"]  # weights in other formats
    try:
        folder = snapshot_download(name, cache_dir=cache_dir, ignore_patterns=["*.bin", *others])
        if not any(Path(folder).glob("*.safetensors")):
            folder = snapshot_download(name, cache_dir=cache_dir, ignore_patterns=others)
        return folder
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0][:160]
        raise UserError(
            f"--base_model {name!r} is neither a folder nor a model on the hub that can be reached ({reason})"
        ) from None


@contextlib.contextmanager
def reading(model: str, part: str) -> Iterator[None]:
    """Raise a UserError of one line for whatever goes wrong while `part` of the base `model` is read in this context.

    Its files may hold anything, and transformers checks little of it, so that no list of exceptions would be complete.
    """
    on_hub = not Path(model).exists()
    offline = on_hub and hub.go_offline_if_unreachable()
    try:
        yield
    except (UserError, torch.OutOfMemoryError, ModuleNotFoundError):  # for the last two, `cli.run` says what helps
        raise
    except Exception as error:  # noqa: BLE001
        if on_hub and isinstance(error, OSError):
            place = "or in the hub's cache, and the hub cannot be reached" if offline else "or on the hub"
            raise UserError(
                f"no model at {model!r} {place}: give a folder in Hugging Face layout, or a hub name if the hub can be "
                "reached; `python -m apps.demo.tiny` builds a small model"
            ) from None
        if (Path(model) / "adapter_config.json").is_file():
            raise UserError(f"{model!r} is an adapter: give its base as --model, and it as --adapter") from None
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        advice = "give a complete folder in Hugging Face layout, with .safetensors or plain .bin files"
        raise UserError(f"cannot load a model from {model!r} ({part}: {reason[:240]}): {advice}") from None


def weight_files(model: str) -> tuple[Path | None, list[str]]:
    """Return the index, if there is one, and the paths of the files from which `from_pretrained` loads `model`.

    For a hub name, files in the cache are preferred. Raises OSError if there are no files.
    """
    missing = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    for cached, name in itertools.product((True, False), ("model.safetensors", "pytorch_model.bin")):
        if path := cached_file(model, name, local_files_only=cached, **missing):
            return None, [path]
        if index := cached_file(model, f"{name}.index.json", local_files_only=cached, **missing):
            names = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
            return Path(index), [cached_file(model, name, local_files_only=cached) for name in names]
    raise OSError(f"{model} has no model.safetensors, no pytorch_model.bin and no index of such files")


def stored_tensors(model: str) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of `model` without values, by path and by name. Raises UserError if they cannot be read."""
    with reading(model, "weights"):
        return {path: load_state_dict(path, "meta") for path in weight_files(model)[1]}


def stored_dtypes(model: str) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype in which most weights of `model` are stored, and the widest dtype of a matrix."""
    sizes: Counter[torch.dtype] = Counter()
    widest = torch.bfloat16
    for tensor in itertools.chain(*(tensors.values() for tensors in stored_tensors(model).values())):
        if tensor.is_floating_point():
            sizes[tensor.dtype] += tensor.numel()
            widest = torch.promote_types(widest, tensor.dtype) if tensor.ndim > 1 else widest
    return sizes.most_common(1)[0][0], widest


def module_finder(model: transformers.PreTrainedModel) -> Callable[[str], str | None]:
    """Return a function from a module's name in any release of transformers to its name in `model`, or to None."""
    renamings = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
    modules, state = dict(model.named_modules()), model.state_dict()

    def find(saved: str) -> str | None:
        renamed, _ = rename_source_key(f"{saved}.weight", renamings, [], model.base_model_prefix, state)
        in_text_model = re.sub(r"^model\.", "model.language_model.", saved)  # as named in a text-only model
        return next((name for name in (saved, renamed[: -len(".weight")], in_text_model) if name in modules), None)

    return find


class Layout:
    """For each stored tensor of a base, by file and name, the parameter of the model that it is loaded into."""

    def __init__(
        self, model: transformers.PreTrainedModel, stored: dict[str, dict[str, Tensor]], parameters: Container[str]
    ):
        """`model` may lack weights. `stored`: see `stored_tensors`. `parameters`: the names of its parameters."""
        self.model, self.stored = model, stored
        self.parameters: dict[str, dict[str, str]] = {path: {} for path in stored}
        self.converted: set[str] = set()  # parameters whose shape may differ from the stored one
        transforms = get_model_conversion_mapping(model)
        renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
        converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
        state = model.state_dict()
        for path, name in ((path, name) for path, tensors in stored.items() for name in tensors):
            parameter, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
            if parameter not in state and name in state:
                parameter, pattern = name, None
            if parameter in parameters:
                self.parameters[path][name] = parameter
                self.converted |= {parameter} if pattern else set()
        self.transforms = [transform for transform in transforms if transform.was_used()]

    def add_lm_head(self) -> None:
        """If no lm_head is stored, because it is tied to the embedding, add one to the embedding's file."""
        state = self.model.state_dict(keep_vars=True)
        places = [
            (path, name, parameter) for path, names in self.parameters.items() for name, parameter in names.items()
        ]
        if all(parameter != LM_HEAD for _, _, parameter in places):
            path, embedding = next(place[:2] for place in places if state[place[2]] is state[LM_HEAD])
            self.parameters[path][LM_HEAD] = LM_HEAD
            self.stored[path][LM_HEAD] = self.stored[path][embedding]

    def as_stored(self, path: str, name: str, weight: Tensor) -> Tensor:
        """Return `weight`, a value of the model's parameter, in the form in which `path` stores it as `name`."""
        parameter = self.parameters[path][name]
        if parameter not in self.converted:
            return weight
        # The conversion asks its model for shapes, to know whether to transpose. Here, the shapes are the stored ones.
        target = SimpleNamespace(
            _weight_conversions=self.transforms, config=self.model.config, get_parameter=self.stored[path].__getitem__
        )
        return revert_weight_conversion(target, {parameter: weight})[name]
