"""Make tiny bases in hub layout, in the environment that transformers is taken from.

    .venv-elsewhere/bin/python -m tests.elsewhere.bases TOKENIZERS OUTPUT NAME...

TOKENIZERS has the real tokenizers, in the folders `qwen3` and `llama3_1`. Each OUTPUT/NAME gets what the hub has: the
tensor layout of this transformers, the config.json of `hub_configs.py`, the tokenizer's older files, stop tokens, and
also files that an export has to leave behind.
"""

import copy
import json
import pathlib
import shutil
import sys

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.elsewhere.cases import BASES, Base

# A plain template: each turn between Qwen's marks. IMAGE stands for what the family writes for an image.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}IMAGE{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LEFT_BEHIND = ("trainer_state.json", "optimizer.pt", "model-q4.gguf", ".gitattributes", "original/params.json")


def make_base(name: str, tokenizers: pathlib.Path, folder: pathlib.Path) -> None:
    """Write the base `name` to `folder`."""
    base = BASES[name]
    folder.mkdir(parents=True)
    tokenizer = make_tokenizer(base, tokenizers)
    config = with_token_ids(base.config, tokenizer)
    write_json(folder / "config.json", config)
    write_weights(base, folder)
    write_json(folder / "config.json", config)  # not as this transformers saves it
    write_tokenizer(base, tokenizer, tokenizers, folder)
    sampling = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "transformers_version": "4.42.3"}
    write_json(folder / "generation_config.json", base.stop | sampling)
    if base.pixels:
        write_json(folder / "preprocessor_config.json", base.pixels)
    for other in ("README.md", "LICENSE", *LEFT_BEHIND):
        (folder / other).parent.mkdir(exist_ok=True)
        (folder / other).write_text("{}\n")


def write_json(path: pathlib.Path, settings: dict) -> None:
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# --- the tokenizer ----------------------------------------------------------------------------------------------------


def is_llama(base: Base) -> bool:
    return base.config["model_type"] == "llama"


def make_tokenizer(base: Base, tokenizers: pathlib.Path) -> transformers.PreTrainedTokenizerBase:
    """Return the real tokenizer, with the special tokens of the family and its chat template."""
    source = tokenizers / ("llama3_1" if is_llama(base) else "qwen3")
    roles = {"extra_special_tokens": base.roles} if base.roles else {}
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, **roles)
    tokenizer.add_tokens([*base.tokens], special_tokens=True)
    if base.image:
        tokenizer.chat_template = TEMPLATE.replace("IMAGE", base.image.replace("\n", "\\n"))
    return tokenizer


def with_token_ids(config: dict, tokenizer: transformers.PreTrainedTokenizerBase) -> dict:
    """Return `config` with the ids that the image tokens of a family have in the tokenizer of Qwen3."""
    config, number = copy.deepcopy(config), tokenizer.convert_tokens_to_ids
    if config["model_type"] == "aria":
        config["image_token_index"] = number("<|img|>")
    elif config["model_type"] == "glm4v":
        for kind in ("image", "video"):
            config[f"{kind}_token_id"] = number(f"<|{kind}|>")
            config[f"{kind}_start_token_id"] = number(f"<|begin_of_{kind}|>")
            config[f"{kind}_end_token_id"] = number(f"<|end_of_{kind}|>")
    elif config["model_type"] == "internvl":
        assert config["image_token_id"] == number("<IMG_CONTEXT>")
    return config


def write_tokenizer(base: Base, tokenizer, tokenizers: pathlib.Path, folder: pathlib.Path) -> None:
    """Write the tokenizer's files, older ones too, and the chat template where the hub has it."""
    if is_llama(base):  # the real files, byte for byte
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tokenizers / "llama3_1" / name, folder)
        return
    template, tokenizer.chat_template = tokenizer.chat_template, None
    tokenizer.save_pretrained(folder)
    if "tokenizer_config.json" in base.template_in:
        path = folder / "tokenizer_config.json"
        write_json(path, json.loads(path.read_text(encoding="utf-8")) | {"chat_template": template})
    if "chat_template.json" in base.template_in:
        write_json(folder / "chat_template.json", {"chat_template": template})
    if "chat_template.jinja" in base.template_in:
        (folder / "chat_template.jinja").write_text(template)


# --- the weights ------------------------------------------------------------------------------------------------------


def write_weights(base: Base, folder: pathlib.Path) -> None:
    """Write random weights for the config.json in `folder`, in the layout of this transformers."""
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    model = getattr(transformers, base.config["architectures"][0])(config).float()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.08)
        else:  # norms and biases: a weight of 1 or a bias of 0 could hide a mistake
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if base.weights == "three shards":
        _rewrite(folder, 3, "model-{:05}-of-{:05}.safetensors")
    elif base.weights == "two .bin files":
        _rewrite(folder, 2, "pytorch_model-{:05}-of-{:05}.bin")
    if base.config["model_type"] == "qwen3_5":
        _add_next_token_head(folder / "model.safetensors")


def is_float32(name: str) -> bool:
    """Return whether a tensor of the base in bfloat16 is kept in float32: norms and routers are."""
    return "norm" in name or name.endswith(".gate.weight")


def _rewrite(folder: pathlib.Path, number: int, pattern: str) -> None:
    """Write the weights in `number` files, with an index; the safetensors in bfloat16 but for some tensors."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    in_safetensors = pattern.endswith(".safetensors")
    if in_safetensors:
        tensors = {name: tensor if is_float32(name) else tensor.bfloat16() for name, tensor in tensors.items()}
    names, index = sorted(tensors), {}
    for i in range(number):
        file = pattern.format(i + 1, number)
        part = {name: tensors[name] for name in names[i::number]}
        if in_safetensors:
            save_file(part, folder / file, metadata={"format": "pt"})
        else:
            torch.save(part, folder / file)
        index |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    name = "model.safetensors.index.json" if in_safetensors else "pytorch_model.bin.index.json"
    write_json(folder / name, {"metadata": {"total_size": total}, "weight_map": index})


def _add_next_token_head(path: pathlib.Path) -> None:
    """Add tensors of the head that predicts a second token. The hub's files have them, transformers skips them."""
    head = {"mtp.fc.weight": torch.randn(64, 128), "mtp.norm.weight": torch.randn(64)}
    save_file(load_file(path) | head, path, metadata={"format": "pt"})


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for each in sys.argv[3:]:
        make_base(each, pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]) / each)
