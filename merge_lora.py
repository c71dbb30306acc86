"""Merge a LoRA adapter into its base model with PEFT, one shard at a time.

    python merge_lora.py --base_model Qwen/Qwen2.5-VL-7B-Instruct --lora_model runs/sft --output_path runs/merged

Merging keeps only a few gigabytes of the base in memory, whatever the base's size. At the end, the logits of the merged
model are checked against those of the adapted model (the base with its adapter). The check needs memory for one full
model. The adapter may be plain LoRA, rslora or DoRA, and may have adapted embeddings, `modules_to_save` and trained
biases. Other files that LLaMA-Factory and ms-swift leave next to an adapter are ignored. The tokenizer, processor, chat
template and generation config are copied from the base.
"""

from __future__ import annotations

import copy
import gc
import json
import pathlib
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from huggingface_hub import snapshot_download
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from common import cli
from common.errors import RunStopped, UserError
from common.records import Sample
from data import encode_prompt, load_processor
from policy.lora import POLICY, adapted_layers, load_peft, match_modules, modernise_config, read_adapter, resolve_module
from policy.model import auto_class, load_config, load_model, saved_dtype

SHARD_BYTES = 4e9  # a weight file is written as soon as its tensors exceed this size
# Maximum RMS difference of the logits, as a fraction of their standard deviation.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.15, torch.float16: 0.03}
AdapterTensors = dict[tuple[str, str], Tensor]  # (module, parameter): tensor, as returned by `match_modules`


@dataclass
class Config:
    """Merge a LoRA adapter into its base model."""

    base_model: str
    """The model that the adapter was trained on: a folder in Hugging Face layout or a hub name."""
    lora_model: str
    """The adapter in PEFT layout: a folder or a hub name."""
    output_path: str
    """Folder for the merged model; it must not exist yet."""
    cache_dir: str | None = None
    """Cache folder for downloads from the hub; by default, the hub's own cache folder."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the saved weights; auto: the dtype of the base."""


def merge_lora(
    base_model: str, lora_model: str, output_path: str, cache_dir: str | None = None, dtype: str = "auto"
) -> float:
    """Write the merged model to `output_path`; return the largest difference of its logits from the adapted model's.

    Raises UserError if the adapter was made for a different base or if the output already exists. Raises RunStopped if
    the logits differ by more than rounding error.
    """
    target = pathlib.Path(output_path)
    if target.exists():
        raise UserError(f"--output_path {output_path!r} already exists: remove it or choose another folder")
    base = _folder(base_model, cache_dir)
    settings = load_config(str(base))
    saved = saved_dtype(str(base)) if dtype == "auto" else getattr(torch, dtype)
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"--output_path {output_path!r} cannot be created ({error.strerror})") from None
    try:
        with tempfile.TemporaryDirectory(dir=partial) as scratch:
            _merge(
                base, settings, *read_adapter(lora_model, cache_dir), lora_model, partial, pathlib.Path(scratch), saved
            )
            gc.collect()  # the check needs the memory
            logits = _three_logits(base, scratch, partial, saved)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    difference = _check(*logits, TOLERANCE[saved], partial)
    partial.rename(target)
    return difference


def _merge(
    base: pathlib.Path,
    settings: transformers.PreTrainedConfig,
    config: Any,
    tensors: dict[str, Tensor],
    source: str,
    output: pathlib.Path,
    scratch: pathlib.Path,
    dtype: torch.dtype,
) -> None:
    """Write the merged model to `output`, and the adapter to `scratch` in a form that PEFT loads on top of the base."""
    with torch.device("meta"):
        model = auto_class(settings).from_config(settings)
    adapter = match_modules(tensors, model, source)
    config = modernise_config(config, tensors, model)
    _write_adapter(config, adapter, scratch, dtype)
    untied = _write_shards(base, output, _Merger(model, config, adapter), dtype)
    _copy_settings(base, output, settings, dtype, untied)


def _check(base: Tensor, adapted: Tensor, merged: Tensor, tolerance: float, folder: pathlib.Path) -> float:
    """Compare the logits of the `merged` model in `folder` with those of the `adapted` model (base with adapter).

    Returns the largest difference. Raises RunStopped if the difference is more than rounding error. The `base` model's
    logits show how much the adapter changes.
    """
    largest, deviation = (merged - adapted).abs().max().item(), adapted.std().item()
    error, change = ((merged - other).square().mean().sqrt().item() for other in (adapted, base))
    print(
        f"largest difference of the logits: {largest:.2g} (RMS {error:.2g}); the adapter changes them by {change:.2g} "
        f"(RMS), and their standard deviation is {deviation:.2g}"
    )
    # 12 random bfloat16 layers of a 7B model's width give an error of 0.04 standard deviations.
    rounding = tolerance * deviation / 2
    if not error <= min(tolerance * deviation, max(change / 2, rounding)):
        raise RunStopped(
            f"the merged model in {folder} does not reproduce the adapter's logits: the RMS error is {error:.2g}, and "
            f"the adapter changes them by {change:.2g}; the folder is kept for inspection",
            1,
        )
    if change <= rounding:
        print("the adapter changes the logits no more than rounding does, so they do not show whether it was merged")
    return largest


def _folder(name: str, cache_dir: str | None) -> pathlib.Path:
    """Return the folder of the model `name`; if `name` is not a folder, download the model from the hub."""
    path = pathlib.Path(name)
    if not path.is_dir():
        try:
            path = pathlib.Path(
                snapshot_download(name, cache_dir=cache_dir, ignore_patterns=["*.bin", "*.pth", "*.gguf"])
            )
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0][:160]
            raise UserError(
                f"--base_model {name!r} is neither a folder nor a model on the hub that can be reached ({reason})"
            ) from None
    if not (path / "config.json").is_file() or not all(file.is_file() for file in _weight_files(path)):
        raise UserError(
            f"--base_model {name!r} must contain config.json and the weights: either model.safetensors, or "
            "model.safetensors.index.json and every file it names"
        )
    return path


def _weight_files(base: pathlib.Path) -> list[pathlib.Path]:
    """Return the files from which transformers reads the weights; the folder may contain other files."""
    index = base / "model.safetensors.index.json"
    if (base / "model.safetensors").is_file() or not index.is_file():
        return [base / "model.safetensors"]
    try:
        return sorted({base / name for name in json.loads(index.read_text())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is damaged ({error!r}): download it again") from None


def _write_adapter(config: Any, adapter: AdapterTensors, folder: pathlib.Path, dtype: torch.dtype) -> None:
    """Write the adapter to `folder`, with updated module names, so that PEFT can load it.

    Tensors that replace a base weight or bias are written in the merged model's `dtype`.
    """
    config.save_pretrained(str(folder))
    tensors = {}
    for (module, param), tensor in adapter.items():
        lora = param.startswith("lora_")
        wrapped = param == "bias" and module in config.target_modules
        name = f"base_model.model.{module}.{'base_layer.' if wrapped else ''}{param}"
        tensors[name] = tensor.contiguous() if lora else tensor.to(dtype).contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")


class _Merger:
    """Merge one weight at a time, using a model on the meta device that contains PEFT's layers.

    Each PEFT layer is filled with its tensors, merged and emptied again, so that the model never holds all weights.
    """

    def __init__(self, model: transformers.PreTrainedModel, config: Any, adapter: AdapterTensors):
        self.adapter = adapter
        self.base_modules = dict(model.named_modules())  # before PEFT wraps them, their names match the base's files
        config = copy.copy(config)
        config.modules_to_save, config.bias = None, "none"  # such tensors replace the base's and are not merged
        with warnings.catch_warnings(action="ignore"):
            if config.target_modules:
                load_peft().inject_adapter_in_model(config, model, POLICY, low_cpu_mem_usage=True)
        self.layers = adapted_layers(model)
        self.merged: set[tuple[str, str]] = set()

    def __call__(self, module: str, param: str, weight: Tensor) -> Tensor:
        """Return the merged value of one base parameter.

        `weight` is its value in the base, and `param` is its name in `module`.
        """
        tensors = {name: tensor for (owner, name), tensor in self.adapter.items() if owner == module}
        self.merged |= {
            (module, name) for name in tensors if name == param or (name.startswith("lora_") and param == "weight")
        }
        if param in tensors:
            weight = tensors[param]
        if param != "weight" or not any(name.startswith("lora_") for name in tensors):
            return weight
        layer = self.layers[module]
        layer.base_layer.weight = nn.Parameter(weight.float(), requires_grad=False)
        for name, tensor in tensors.items():
            if name.startswith("lora_"):
                _fill(layer, name, tensor.float())
        with torch.no_grad():
            layer.merge(safe_merge=True, adapter_names=[POLICY])
        merged = layer.base_layer.weight.data
        layer.merged_adapters.clear()
        layer.base_layer.weight = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
        return merged


def _fill(layer: nn.Module, name: str, tensor: Tensor) -> None:
    """Set the tensor `name` of PEFT's `layer` to `tensor`.

    Examples of names are "lora_A.weight", "lora_embedding_A" and "lora_magnitude_vector".
    """
    by_adapter, parameter = getattr(layer, name.removesuffix(".weight")), nn.Parameter(tensor, requires_grad=False)
    if isinstance(by_adapter[POLICY], nn.Module):
        by_adapter[POLICY].weight = parameter
    else:
        by_adapter[POLICY] = parameter


def _write_shards(base: pathlib.Path, output: pathlib.Path, merge: _Merger, dtype: torch.dtype) -> bool:
    """Write the merged weights of `base`, a few gigabytes at a time.

    Returns whether the lm_head has become a separate tensor, after sharing the embedding's tensor in the base.
    """
    shard: dict[str, Tensor] = {}
    written: list[list[str]] = []  # the keys in each file
    total = 0

    def write_shard() -> None:
        tensors = {key: tensor.contiguous() for key, tensor in shard.items()}
        save_file(tensors, output / f"part-{len(written)}", metadata={"format": "pt"})
        written.append(list(shard))
        shard.clear()

    for key, weight in tqdm(_read_tensors(base), "merging", unit=" tensors", disable=not sys.stderr.isatty()):
        module, param = resolve_module(key, merge.base_modules)
        shard[key] = merge(module, param, weight).to(dtype) if module else weight
        if module and module.endswith("embed_tokens") and _must_untie(merge):
            shard["lm_head.weight"] = merge("lm_head", "weight", weight).to(dtype)
        if sum(tensor.nbytes for tensor in shard.values()) > SHARD_BYTES:
            total += sum(tensor.nbytes for tensor in shard.values())
            write_shard()
    total += sum(tensor.nbytes for tensor in shard.values())
    write_shard()
    if missing := sorted(set(merge.adapter) - merge.merged):
        raise UserError(f"the base's files do not contain {'.'.join(missing[0])}, which the adapter changes")
    file_names = (
        ["model.safetensors"]
        if len(written) == 1
        else [f"model-{i + 1:05}-of-{len(written):05}.safetensors" for i in range(len(written))]
    )
    for i, name in enumerate(file_names):
        (output / f"part-{i}").rename(output / name)
    if len(written) > 1:
        weight_map = {key: name for name, keys in zip(file_names, written) for key in keys}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (output / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    return _must_untie(merge)


def _read_tensors(base: pathlib.Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (key, tensor) for every tensor in the base's weight files."""
    for shard in _weight_files(base):
        try:
            with safe_open(shard, framework="pt") as file:
                keys = list(file.keys())
            for key in keys:  # reopen the file for each tensor; otherwise, all tensors would stay mapped
                with safe_open(shard, framework="pt") as file:
                    tensor = file.get_tensor(key)
                yield key, tensor
        except SafetensorError as error:
            raise UserError(f"{shard} is damaged ({error}): download it again") from None


def _must_untie(merge: _Merger) -> bool:
    """Return whether the embedding and the lm_head share a tensor in the base but differ after the merge.

    They differ if the adapter changes either of them.
    """
    tied = merge.base_modules[""].config.tie_word_embeddings
    return tied and any(module.endswith("embed_tokens") or module == "lm_head" for module, _ in merge.adapter)


def _copy_settings(
    base: pathlib.Path, output: pathlib.Path, settings: transformers.PreTrainedConfig, dtype: torch.dtype, untied: bool
) -> None:
    """Copy the tokenizer, processor, chat template and generation config of `base`, and write a new config."""
    for path in base.iterdir():
        if path.is_file() and path.suffix in (".json", ".jinja", ".txt", ".model") and "safetensors" not in path.name:
            shutil.copy(path, output)
    settings.dtype = dtype
    if untied:
        settings.tie_word_embeddings = False
        if hasattr(settings, "text_config"):
            settings.text_config.tie_word_embeddings = False
    settings.save_pretrained(output)


def _three_logits(
    base: pathlib.Path, adapter: str, merged: pathlib.Path, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits of the base, of the adapted model (the base with its adapter) and of the merged model.

    The merged model is loaded after the adapted model is freed, because memory may not hold both.
    """
    inputs = _example_inputs(base)
    with warnings.catch_warnings(action="ignore"):
        model = load_peft().PeftModel.from_pretrained(load_model(str(base), dtype), adapter, low_cpu_mem_usage=True)
        adapted_logits = _logits(model, inputs)
        with model.disable_adapter():
            base_logits = _logits(model, inputs)
    del model
    gc.collect()
    return base_logits, adapted_logits, _logits(load_model(str(merged), dtype), inputs)


@torch.inference_mode()
def _logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return model.eval()(**inputs).logits.float()


def _example_inputs(base: pathlib.Path) -> dict[str, Tensor]:
    """Return the model inputs of a short question, with an image if the model accepts images."""
    try:
        processor = load_processor(str(base), "count")
    except UserError:  # the base model has no chat template
        return {"input_ids": torch.arange(32)[None]}
    takes_images = processor.image_processor is not None
    image = Image.linear_gradient("L").convert("RGB").resize((112, 112))
    question = "<image>How many?" if takes_images else "How many?"
    prompt = encode_prompt(Sample(question, "1", [image] if takes_images else [], "the check"), processor)
    inputs = {"input_ids": prompt.ids[None], **prompt.vision}
    return inputs | ({"mm_token_type_ids": (prompt.ids == prompt.image_token).int()[None]} if takes_images else {})


def main(cfg: Config) -> None:
    merge_lora(cfg.base_model, cfg.lora_model, cfg.output_path, cfg.cache_dir, cfg.dtype)
    print(f"merged model in Hugging Face layout: {cfg.output_path}")


if __name__ == "__main__":
    cli.run(main, cli.parse(Config))
