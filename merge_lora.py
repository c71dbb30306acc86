"""Base model + LoRA adapter = one model, merged by PEFT shard by shard.

    python merge_lora.py --base_model Qwen/Qwen2.5-VL-7B-Instruct --lora_model runs/sft --output_path runs/merged

A few gigabytes of the base are in memory at a time, whatever its size; the check at the end, that base with adapter
and merged model give the same logits, needs as much as the model once. Plain LoRA, rslora, DoRA, adapted embeddings,
`modules_to_save` and trained biases; what LLaMA-Factory and ms-swift leave beside an adapter is not looked at.
Tokenizer, processor, chat template and generation config are those of the base.
"""

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
from huggingface_hub import snapshot_download
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedModel

from common import cli
from common.errors import RunStopped, UserError
from common.records import Sample
from data import encode_prompt, load_processor
from policy.lora import POLICY, adapted_layers, load_peft, match_modules, modernise_config, read_adapter, resolve_module
from policy.model import auto_class, load_config, load_model, saved_dtype

SHARD = 4e9  # bytes of a written file
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.15, torch.float16: 0.03}  # the most off, in logits' deviations
Found = dict[tuple[str, str], Tensor]  # (module, part): tensor, as `match_modules` gives it


@dataclass
class Config:
    """Merge an adapter into its base."""

    base_model: str
    """The model the adapter was trained on: a folder in Hugging Face layout or a hub name."""
    lora_model: str
    """The adapter in PEFT layout: a folder or a hub name."""
    output_path: str
    """The merged model's folder; it must not exist yet."""
    cache_dir: str | None = None
    """Where models from the hub are kept."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What the merged weights are saved in; auto: as the base."""


def merge_lora(
    base_model: str, lora_model: str, output_path: str, cache_dir: str | None = None, dtype: str = "auto"
) -> float:
    """Write base and adapter as one model to `output_path`; returns the largest difference of their logits.

    Raises UserError when the adapter was made for another base, naming the first shape that does not fit, and when the
    output is there already; RunStopped when the logits differ by more than rounding.
    """
    target = pathlib.Path(output_path)
    if target.exists():
        raise UserError(f"--output_path {output_path!r} is there already: remove it or name another folder")
    base = _folder(base_model, cache_dir)
    settings = load_config(str(base))
    saved = saved_dtype(str(base)) if dtype == "auto" else getattr(torch, dtype)
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"--output_path {output_path!r} cannot be made ({error.strerror})") from None
    try:
        with tempfile.TemporaryDirectory(dir=partial) as scratch:
            _merge(
                base, settings, *read_adapter(lora_model, cache_dir), lora_model, partial, pathlib.Path(scratch), saved
            )
            gc.collect()  # the check needs the room
            logits = _three_logits(base, scratch, partial, saved)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    difference = _check(*logits, TOLERANCE[saved], partial)
    partial.rename(target)
    return difference


def _merge(
    base: pathlib.Path,
    settings: PreTrainedConfig,
    config: Any,
    tensors: dict[str, Tensor],
    source: str,
    output: pathlib.Path,
    scratch: pathlib.Path,
    dtype: torch.dtype,
) -> None:
    """Write the merged model to `output`, and to `scratch` the adapter as PEFT loads it over this base."""
    with torch.device("meta"):
        model = auto_class(settings).from_config(settings)
    found = match_modules(tensors, model, source)
    config = modernise_config(config, tensors, model)
    _write_adapter(config, found, scratch, dtype)
    untied = _write_shards(base, output, _Merger(model, config, found), dtype)
    _copy_settings(base, output, settings, dtype, untied)


def _check(start: Tensor, want: Tensor, got: Tensor, tolerance: float, merged: pathlib.Path) -> float:
    """Compare the logits of the base, of base with adapter and of the merged model; returns the largest difference of
    the last two. Raises RunStopped when the merged model is not the adapted one."""
    difference, deviation = (got - want).abs().max().item(), want.std().item()
    off, change = ((got - other).square().mean().sqrt().item() for other in (want, start))
    print(
        f"largest difference of the logits: {difference:.2g}; usual {off:.2g}, where the adapter changes them by "
        f"{change:.2g} and their deviation is {deviation:.2g}"
    )
    rounding = tolerance * deviation / 2  # of 12 random layers as wide as the 7B's in bfloat16: 0.04 deviations
    if not off <= min(tolerance * deviation, max(change / 2, rounding)):
        raise RunStopped(
            f"the merged model in {merged} does not give the adapter's logits: they are off by {off:.2g}, and the "
            f"adapter changes them by {change:.2g}; left there to be looked at",
            1,
        )
    if change <= rounding:
        print("the adapter changes the logits by no more than rounding does: they do not tell whether it was merged")
    return difference


def _folder(name: str, cache_dir: str | None) -> pathlib.Path:
    """The folder of a model, fetched from the hub when it is not here."""
    path = pathlib.Path(name)
    if not path.is_dir():
        try:
            path = pathlib.Path(
                snapshot_download(name, cache_dir=cache_dir, ignore_patterns=["*.bin", "*.pth", "*.gguf"])
            )
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0][:160]
            raise UserError(
                f"--base_model {name!r} is neither a folder nor on the hub within reach ({reason})"
            ) from None
    if not (path / "config.json").is_file() or not all(file.is_file() for file in _weight_files(path)):
        raise UserError(
            f"--base_model {name!r} needs a config.json and model.safetensors, or model.safetensors.index.json and "
            "every file it names"
        )
    return path


def _weight_files(base: pathlib.Path) -> list[pathlib.Path]:
    """The files that transformers takes the weights from; others may lie beside them."""
    index = base / "model.safetensors.index.json"
    if (base / "model.safetensors").is_file() or not index.is_file():
        return [base / "model.safetensors"]
    try:
        return sorted({base / name for name in json.loads(index.read_text())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is damaged ({error!r}): fetch it anew") from None


def _write_adapter(config: Any, found: Found, folder: pathlib.Path, dtype: torch.dtype) -> None:
    """Write the adapter with today's names for PEFT to load, what stands in the base's place in the merged `dtype`."""
    config.save_pretrained(str(folder))
    tensors = {}
    for (module, part), tensor in found.items():
        lora = part.startswith("lora_")
        wrapped = part == "bias" and module in config.target_modules
        name = f"base_model.model.{module}.{'base_layer.' if wrapped else ''}{part}"
        tensors[name] = tensor.contiguous() if lora else tensor.to(dtype).contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")


class _Merger:
    """The model without weights and PEFT's layers in it, which are filled, merged and emptied one at a time."""

    def __init__(self, model: PreTrainedModel, config: Any, found: Found):
        self.found = found
        self.before = dict(model.named_modules())  # as the base's files know them
        config = copy.copy(config)
        config.modules_to_save, config.bias = None, "none"  # these are not merged but stand in the base's place
        with warnings.catch_warnings(action="ignore"):
            if config.target_modules:
                load_peft().inject_adapter_in_model(config, model, POLICY, low_cpu_mem_usage=True)
        self.layers = adapted_layers(model)
        self.done: set[tuple[str, str]] = set()

    def __call__(self, module: str, leaf: str, weight: Tensor) -> Tensor:
        """`weight`, which the base has under `module`.`leaf`, as the adapted model has it."""
        parts = {part: tensor for (owner, part), tensor in self.found.items() if owner == module}
        self.done |= {
            (module, part) for part in parts if part == leaf or (part.startswith("lora_") and leaf == "weight")
        }
        if leaf in parts:
            weight = parts[leaf]
        if leaf != "weight" or not any(part.startswith("lora_") for part in parts):
            return weight
        layer = self.layers[module]
        layer.base_layer.weight = nn.Parameter(weight.float(), requires_grad=False)
        for part, tensor in parts.items():
            if part.startswith("lora_"):
                _fill(layer, part, tensor.float())
        with torch.no_grad():
            layer.merge(safe_merge=True, adapter_names=[POLICY])
        merged = layer.base_layer.weight.data
        layer.merged_adapters.clear()
        layer.base_layer.weight = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
        return merged


def _fill(layer: nn.Module, part: str, tensor: Tensor) -> None:
    """Give PEFT's `layer` what was saved as `part`: «lora_A.weight», «lora_embedding_A», «lora_magnitude_vector», …"""
    name = part.removesuffix(".weight")
    holder, parameter = getattr(layer, name), nn.Parameter(tensor, requires_grad=False)
    if isinstance(holder[POLICY], nn.Module):
        holder[POLICY].weight = parameter
    else:
        holder[POLICY] = parameter


def _write_shards(base: pathlib.Path, output: pathlib.Path, merge: _Merger, dtype: torch.dtype) -> bool:
    """Write the weights of `base` merged, a few gigabytes at a time; returns whether the lm_head was given its own."""
    held: dict[str, Tensor] = {}
    parts: list[list[str]] = []
    total = 0

    def write() -> None:
        save_file(
            {k: t.contiguous() for k, t in held.items()}, output / f"part-{len(parts)}", metadata={"format": "pt"}
        )
        parts.append(list(held))
        held.clear()

    for key, weight in tqdm(_tensors(base), "merging", unit=" tensors", disable=not sys.stderr.isatty()):
        module, leaf = resolve_module(key, merge.before)
        held[key] = merge(module, leaf, weight).to(dtype) if module else weight
        if module and module.endswith("embed_tokens") and _splits(merge):
            held["lm_head.weight"] = merge("lm_head", "weight", weight).to(dtype)
        if sum(tensor.nbytes for tensor in held.values()) > SHARD:
            total += sum(tensor.nbytes for tensor in held.values())
            write()
    total += sum(tensor.nbytes for tensor in held.values())
    write()
    if missing := sorted(set(merge.found) - merge.done):
        raise UserError(f"the base's files have no {'.'.join(missing[0])}, which the adapter changes")
    names = (
        ["model.safetensors"]
        if len(parts) == 1
        else [f"model-{i + 1:05}-of-{len(parts):05}.safetensors" for i in range(len(parts))]
    )
    for i, name in enumerate(names):
        (output / f"part-{i}").rename(output / name)
    if len(parts) > 1:
        where = {key: name for name, keys in zip(names, parts) for key in keys}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (output / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    return _splits(merge)


def _tensors(base: pathlib.Path) -> Iterator[tuple[str, Tensor]]:
    for shard in _weight_files(base):
        try:
            with safe_open(shard, framework="pt") as file:
                keys = list(file.keys())
            for key in keys:  # opened anew, or all that was read of the file would stay mapped
                with safe_open(shard, framework="pt") as file:
                    tensor = file.get_tensor(key)
                yield key, tensor
        except SafetensorError as error:
            raise UserError(f"{shard} is damaged ({error}): fetch it anew") from None


def _splits(merge: _Merger) -> bool:
    """Whether embedding and lm_head share one tensor in the base and no longer do: the adapter changes one of them, or
    each in its own way."""
    tied = merge.before[""].config.tie_word_embeddings
    return tied and any(module.endswith("embed_tokens") or module == "lm_head" for module, _ in merge.found)


def _copy_settings(
    base: pathlib.Path, output: pathlib.Path, settings: PreTrainedConfig, dtype: torch.dtype, untied: bool
) -> None:
    """Everything of `base` that is not weights: tokenizer, processor, chat template, generation config, config."""
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
    """What the base gives, base with adapter, and the merged model; which is loaded last, since both may not fit."""
    inputs = _example(base)
    with warnings.catch_warnings(action="ignore"):
        model = load_peft().PeftModel.from_pretrained(load_model(str(base), dtype), adapter, low_cpu_mem_usage=True)
        want = _logits(model, inputs)
        with model.disable_adapter():
            start = _logits(model, inputs)
    del model
    gc.collect()
    return start, want, _logits(load_model(str(merged), dtype), inputs)


@torch.inference_mode()
def _logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return model.eval()(**inputs).logits.float()


def _example(base: pathlib.Path) -> dict[str, Tensor]:
    """A question, with a picture where the model takes pictures."""
    try:
        processor = load_processor(str(base), "count")
    except UserError:  # a base model without a chat template
        return {"input_ids": torch.arange(32)[None]}
    pictured = processor.image_processor is not None
    picture = Image.linear_gradient("L").convert("RGB").resize((112, 112))
    sample = Sample("<image>How many?" if pictured else "How many?", "1", [picture] if pictured else [], "the check")
    prompt = encode_prompt(sample, processor)
    inputs = {"input_ids": prompt.ids[None], **prompt.vision}
    return inputs | ({"mm_token_type_ids": (prompt.ids == prompt.image_token).int()[None]} if pictured else {})


def main(cfg: Config) -> None:
    merge_lora(cfg.base_model, cfg.lora_model, cfg.output_path, cfg.cache_dir, cfg.dtype)
    print(f"{cfg.output_path}: a model in Hugging Face layout")


if __name__ == "__main__":
    cli.run(main, Config)
