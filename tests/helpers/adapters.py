"""Adapters as PEFT writes them, and a prompt to compare logits on."""

import json
import pathlib
import shutil

import peft
import torch
from safetensors.torch import load_file, save_file

from policy.model import load_model


def make_sft_adapter(tiny_model: str, folder: pathlib.Path) -> pathlib.Path:
    """An adapter over the tiny model, made and saved by PEFT alone, as LLaMA-Factory leaves one: files of its own
    beside, target modules by their last names, dropout."""
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
def plain(model, prompt) -> torch.Tensor:
    inputs = {**prompt.vision, "mm_token_type_ids": (prompt.ids == prompt.image_token).int()[None]}
    return model(input_ids=prompt.ids[None], **inputs).logits[0]


def saved_adapter(base: str, folder: pathlib.Path, **settings) -> torch.nn.Module:
    """An adapter over `base` with no value at rest, saved by PEFT in `folder`; returns the adapted model."""
    torch.manual_seed(2)
    adapted = peft.get_peft_model(load_model(base, torch.float32), peft.LoraConfig(r=4, lora_alpha=8, **settings))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    adapted.save_pretrained(folder)
    return adapted.eval()


def changed(sft: pathlib.Path, folder: pathlib.Path, settings: dict, rename=lambda key, tensor: (key, tensor)):
    shutil.copytree(sft, folder)
    kept = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(kept | settings))
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(dict(rename(*item) for item in tensors.items()), folder / "adapter_model.safetensors")
    return str(folder)
