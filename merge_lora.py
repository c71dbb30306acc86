"""Merge a LoRA adapter into its base model with PEFT.

    python merge_lora.py --base_model Qwen/Qwen2.5-VL-7B-Instruct --lora_model runs/sft --output_path runs/merged

The output is a copy of the base's folder with merged weights. At the end, the logits of the merged model are compared
with those of the base with its adapter. The base and the merged model are never in memory together. The adapter may be
plain LoRA, rslora or DoRA, and may have adapted embeddings, `modules_to_save` and trained biases.
"""

import gc
import pathlib
import re
import shutil
from dataclasses import dataclass
from typing import Literal

import torch
from PIL import Image
from safetensors import SafetensorError
from torch import Tensor, nn

from common import cli
from common.errors import RunStopped, UserError
from common.files import partial_path
from common.records import Sample, Turn
from data import encode_prompt, load_processor
from policy.base_files import base_folder, stored_dtypes
from policy.export import write_model
from policy.families import load_tokenizer
from policy.lora import POLICY, adapted_layers, check_tokens, load_adapter, read_adapter
from policy.model import load_config, load_model, untie

# Maximum RMS difference of the logits, as a fraction of their standard deviation.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.15, torch.float16: 0.03}


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
    """Dtype of the saved weights; auto: each tensor keeps the dtype that the base stores it in."""


def merge_lora(
    base_model: str, lora_model: str, output_path: str, cache_dir: str | None = None, dtype: str = "auto"
) -> float:
    """Write the merged model to `output_path`; return the largest difference of its logits from the adapted model's.

    Raises RunStopped if the logits differ by more than rounding error.
    """
    target = pathlib.Path(output_path)
    if target.exists():
        raise UserError(f"--output_path {output_path!r} already exists: remove it or choose another folder")
    base = base_folder(base_model, cache_dir)
    if (pathlib.Path(base) / "adapter_config.json").is_file():
        raise UserError(f"--base_model {base_model!r} is an adapter: give it as --lora_model, and its base here")
    load_config(base)  # raises if the base cannot be used
    output_dtype = None if dtype == "auto" else getattr(torch, dtype)
    partial = partial_path(target)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"--output_path {output_path!r} cannot be created ({error.strerror})") from None
    try:
        inputs = _example_inputs(base)
        base_logits, adapted_logits = _merge(base, lora_model, cache_dir, output_dtype, inputs, partial)
        gc.collect()  # the saved model needs the memory
        merged_dtype, widest = stored_dtypes(str(partial))
        merged_logits = _logits(load_model(str(partial), widest), inputs)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    difference = _check(base_logits, adapted_logits, merged_logits, TOLERANCE[merged_dtype], partial)
    partial.rename(target)
    return difference


@torch.no_grad()
def _merge(
    base: str,
    lora_model: str,
    cache_dir: str | None,
    output_dtype: torch.dtype | None,
    inputs: dict[str, Tensor],
    output: pathlib.Path,
) -> tuple[Tensor, Tensor]:
    """Merge the adapter `lora_model` into `base` and write the merged model to `output`.

    Returns the logits of the base and of the adapted model.
    """
    config, tensors = read_adapter(lora_model, cache_dir)
    check_tokens(lora_model, base, cache_dir)
    # The names are not compared, because a base that was moved or downloaded has another one. The user sees both.
    print(f"the adapter names {config.base_model_name_or_path or 'no model'} as its base; it is merged into {base}")
    # The widest dtype, so that rounding happens only after the merge.
    base_dtype, widest = stored_dtypes(base)
    model = load_model(base, torch.promote_types(widest, output_dtype or base_dtype))
    base_logits = _logits(model, inputs)
    if any(re.search(r"\b(embed_tokens|lm_head)\.", key) for key in tensors):
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.clone())  # it may share the embedding's weight
        untie(model.config)
    tuner = load_adapter(model, config, tensors, [POLICY], lora_model)
    adapted_logits = _logits(model, inputs)
    for layer in adapted_layers(model).values():
        layer.base_layer.float()  # otherwise PEFT would round the adapter's change before adding it
        layer.merge(safe_merge=True)
        layer.base_layer.to(model.dtype)
    try:
        write_model(tuner.unload(), base, output, dtype=output_dtype)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{output} cannot be written ({str(error)[:200]}): choose a folder that has room") from None
    return base_logits, adapted_logits


def _check(base: Tensor, adapted: Tensor, merged: Tensor, tolerance: float, folder: pathlib.Path) -> float:
    """Print how the logits differ; return the largest difference between the `merged` and the `adapted` model.

    Raises RunStopped if their RMS difference is more than rounding error. The `base` logits show how much the adapter
    changes.
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


@torch.inference_mode()
def _logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return model.eval()(**inputs).logits.float()


def _example_inputs(base: str) -> dict[str, Tensor]:
    """Return the model inputs of a short question, with an image if the model accepts images."""
    if not load_tokenizer(base).chat_template:
        return {"input_ids": torch.arange(32)[None]}
    processor = load_processor(base, "count")
    if processor.image_processor is None:
        prompt = encode_prompt(Sample([Turn("user", ["How many?"])], "1", "the check"), processor)
        return {"input_ids": prompt.ids[None]}
    image = Image.linear_gradient("L").convert("RGB").resize((112, 112))
    prompt = encode_prompt(Sample([Turn("user", [image, "How many?"])], "1", "the check"), processor)
    token_types = (prompt.ids == prompt.image_token).int()[None]
    return {"input_ids": prompt.ids[None], "mm_token_type_ids": token_types, **prompt.vision}


def main(cfg: Config) -> None:
    merge_lora(cfg.base_model, cfg.lora_model, cfg.output_path, cfg.cache_dir, cfg.dtype)
    print(f"merged model in Hugging Face layout: {cfg.output_path}")


if __name__ == "__main__":
    cli.run(main, cli.parse(Config))
