"""Create adapters in PEFT's format, and compute the logits of a plain forward pass for comparison."""

import json
import pathlib
import shutil

import peft
import torch
from safetensors.torch import load_file, save_file

from policy.model import load_model

LANGUAGE_TARGETS = r"model\.language_model\.layers\.\d+\.\w+\.(q|k|v|o|gate|up|down)_proj"
VISION_TARGETS = r"model\.visual\.blocks\.\d+\.\w+\.(qkv|proj|gate_proj|up_proj|down_proj)"


def make_sft_adapter(tiny_model: str, folder: pathlib.Path) -> pathlib.Path:
    """Save an adapter for the tiny model in `folder` with PEFT alone, and return the folder.

    The adapter resembles one from LLaMA-Factory: it has dropout, short target module names and extra files.
    """
    model = load_model(tiny_model, torch.float32)
    names = ["q_proj", "v_proj", "down_proj"]
    settings = peft.LoraConfig(
        r=4, lora_alpha=16, lora_dropout=0.1, use_rslora=True, target_modules=names, exclude_modules=r".*visual.*"
    )
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, settings)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(folder)
    (folder / "trainer_state.json").write_text("{}")
    (folder / "training_args.bin").write_bytes(b"not to be unpickled")
    return folder


@torch.no_grad()
def plain_logits(model, prompt) -> torch.Tensor:
    """Return the logits (S, V) of an unpacked forward pass on a prompt of S tokens; V is the vocabulary size."""
    inputs = {**prompt.vision, "mm_token_type_ids": (prompt.ids == prompt.image_token).int()[None]}
    return model(input_ids=prompt.ids[None], **inputs).logits[0]


def save_random_adapter(base: str, folder: pathlib.Path, **settings) -> torch.nn.Module:
    """Save an adapter for `base` in `folder` and return the adapted model. Noise is added to all adapter weights."""
    torch.manual_seed(2)
    adapted = peft.get_peft_model(load_model(base, torch.float32), peft.LoraConfig(r=4, lora_alpha=8, **settings))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    adapted.save_pretrained(folder)
    return adapted.eval()


def copy_adapter(source: pathlib.Path, folder: pathlib.Path, settings: dict, change=lambda key, tensor: (key, tensor)):
    """Copy an adapter to `folder`. Update its config with `settings`, and pass each key and tensor through `change`."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(dict(change(*item) for item in tensors.items()), folder / "adapter_model.safetensors")
    return str(folder)
