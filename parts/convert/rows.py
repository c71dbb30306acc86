"""`data.py convert` writes a data set as EasyR1 JSONL or Parquet; `data.py show` prints a row's prompt."""

import hashlib
import io
import json
import os
import pathlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import tyro
from PIL import Image

from common import console
from common.errors import UserError
from common.files import partial_path
from common.records import ImageSource, Sample
from config import Config as RunConfig
from config import RowFlags
from data import check_row, encode_prompt, load_samples, processor_for
from inputs.images import decode_image, read_source
from inputs.rows import Problem, read_rows

GROUP_BYTES = 2**28  # size of a row group of a Parquet file; above 2 GiB, images cannot be read again
READ = ("images", "image", "image_name", "reward_model")  # `parse_row` would take these for what is in a row


@dataclass
class Config(RowFlags):
    """Write a data set of any supported format as EasyR1 JSONL or Parquet. `data.py show --help`: print a prompt."""

    command: tyro.conf.Positional[Literal["convert"]]
    """The command to run."""
    input_jsonl: str
    """Data set, in any format that training accepts: VQA-RAD conversations, a parquet file, a ZIP, a hub name, ..."""
    output_jsonl: str
    """The file to write, NAME.jsonl or NAME.parquet. Parquet holds the images; for JSONL, those that are not files on
    disk are saved in a folder next to it."""
    task: str | None = None
    """Check that the gold answers suit this task; by default, only check that they are not empty."""
    overwrite: bool = False
    """Replace `output_jsonl` if it exists."""
    coordinates: Literal["file", "unit", "thousand", "file xywh", "unit xywh", "thousand xywh", "model", ""] = ""
    """Coordinates of the boxes and points of the rows that do not name them; see docs/data.md."""

    def __post_init__(self) -> None:
        self.check_rows()


def convert(cfg: Config) -> int:
    """Write a data set as EasyR1 JSONL or Parquet and return the number of rows.

    The output file appears only when it is complete.
    """
    check_output(cfg.output_jsonl, cfg.overwrite)
    rows = load_samples(
        cfg.input_jsonl, cfg.task, cfg.image_dir, columns=cfg.named_columns, skip_bad_rows=cfg.skip_bad_rows
    )
    for sample in rows if cfg.coordinates else ():
        sample.fields.setdefault("coordinates", cfg.coordinates)
    write_rows(rows, cfg.output_jsonl)
    return len(rows)


def check_output(name: str, overwrite: bool) -> None:
    """Raise UserError if no rows can be written to the file `name`, or if it exists and is not to be replaced."""
    output = pathlib.Path(name)
    if output.suffix not in (".jsonl", ".parquet"):
        raise UserError(f"--output_jsonl {name!r}: the name must end in .jsonl or .parquet")
    if output.exists() and not overwrite:
        raise UserError(f"{name!r} already exists: choose another --output_jsonl or pass --overwrite")
    if output.exists() and not output.is_file():
        raise UserError(f"{name!r} is not a file: choose another --output_jsonl")


def write_rows(rows: list[Sample], name: str) -> None:
    """Write `rows` to the file `name`, JSONL or Parquet, which appears only when it is complete."""
    output = pathlib.Path(name)
    partial = partial_path(output)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        bar = console.progress(rows, "writing", unit="row")
        if output.suffix == ".parquet":
            write_parquet(bar, partial)
        else:
            with partial.open("w", encoding="utf-8", errors="replace") as file:
                for sample in bar:
                    row = easyr1_row(sample, save_images(sample, output))
                    file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
        partial.rename(output)
    except OSError as error:
        raise UserError(f"cannot write {name!r} ({error})") from None
    finally:
        if partial.is_file():
            partial.unlink()


@dataclass(kw_only=True)
class ShowFlags(RunConfig):
    """Print the prompt of a row as the model gets it, with the flags of grpo.py."""

    command: tyro.conf.Positional[Literal["show"]]
    """The command to run."""
    row: int
    """Number of the row in its file, as messages give it (docs/data.md)."""


def show(cfg: ShowFlags) -> str:
    """Return the prompt of a row: its images, tokens and text. Raises UserError if there is no such usable row."""
    processor = processor_for(cfg)
    rows = list(read_rows(cfg.data, cfg.image_dir, cfg.named_columns, processor))
    row = next((row for row in rows if row.source.endswith(f" row {cfg.row}")), None)
    if row is None:
        known = " to ".join(each.source for each in rows[:1] + rows[-1:])
        raise UserError(f"--row {cfg.row}: the rows of {cfg.data} are {known or 'none'}")
    problem, *_ = check_row(None, processor, cfg.max_prompt_length, {}, row)
    if isinstance(row, Problem) or problem:
        raise UserError(f"{row.source}: {problem}")
    prompt = encode_prompt(row, processor)
    lines = [f"{row.source}, answer {row.answer!r}, template {cfg.template or f'of --task {cfg.task}'}"]
    for number, (source, image) in enumerate(zip(row.images, prompt.images), 1):
        before, count = decode_image(source), processor.preparation.count(image.height, image.width)
        size = f"{image.width}x{image.height}, {count} tokens"
        lines.append(f"image {number}: {before.width}x{before.height}, resized to {size}")
    lines.append(f"{len(prompt.ids)} tokens; with one for each image: {' '.join(map(str, prompt.engine_ids))}")
    return "\n".join([*lines, processor.tokenizer.decode(prompt.engine_ids)])


# --- rows of the new file ---------------------------------------------------------------------------------------------


def easyr1_row(sample: Sample, images: list) -> dict:
    """Convert `sample` to a row of an EasyR1 data set, with `images` in place of its own."""
    chat = [{"role": turn.role, "content": text} for turn, text in zip(sample.turns, sample.texts)]
    row = {"prompt": chat if len(chat) > 1 else sample.prompt, "answer": sample.answer, "images": images}
    if sample.system:
        row["system"] = sample.system
    if sample.teacher_images:
        raise UserError(f"{sample.source}: its 'teacher_images' cannot be converted: remove the column")
    if sample.responses != [sample.answer]:
        row["response"] = sample.responses[0]
    return row | {name: value for name, value in sample.fields.items() if name not in (*row, *READ)}


def save_images(sample: Sample, output: pathlib.Path) -> list[str]:
    """Save the images of `sample` that are not files on disk, and return the paths of all for a row of `output`.

    They are saved as PNG in a folder next to the JSONL file `output`: STEM_images for STEM.jsonl. They are named by
    their content, so that no other row or file is changed. The path of an image inside the output's folder is relative
    to that folder; other paths are absolute.
    """
    base, paths = pathlib.Path(os.path.abspath(output.parent)), []
    for source in sample.images:
        path = read_source(source)
        if not isinstance(path, str | pathlib.Path):
            decode_image(source).save(file := io.BytesIO(), "PNG")
            name = hashlib.sha256(file.getvalue()).hexdigest()[:16]
            path = output.with_name(output.stem + "_images") / f"{name}.png"
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                partial_path(path).write_bytes(file.getvalue())
                partial_path(path).rename(path)
        path = pathlib.Path(os.path.abspath(path))
        paths.append(str(path.relative_to(base) if path.is_relative_to(base) else path))
    return paths


def write_parquet(samples: Iterable[Sample], path: pathlib.Path) -> None:
    """Write `samples` as an EasyR1 Parquet file that holds the images, as {bytes, path}. All rows are kept in memory.

    Raises UserError for what Parquet cannot hold, such as a column with values of different types.
    """
    import pyarrow
    from pyarrow import parquet

    rows = [easyr1_row(sample, [_image_cell(source) for source in sample.images]) for sample in samples]
    names = dict.fromkeys(name for row in rows for name in row)  # pyarrow would take those of the first row only
    try:
        table = pyarrow.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])
        rows_per_group = max(1, int(GROUP_BYTES / max(table.nbytes, 1) * len(rows)))
        parquet.write_table(table, path, row_group_size=rows_per_group)
    except (pyarrow.ArrowException, OverflowError, UnicodeEncodeError) as error:
        raise UserError(f"{path.name.removesuffix('.partial')}: {error}: write NAME.jsonl instead") from None


def _image_cell(source: ImageSource) -> dict[str, bytes | str | None]:
    content = read_source(source)
    if isinstance(content, str | pathlib.Path):
        return {"bytes": pathlib.Path(content).read_bytes(), "path": pathlib.Path(content).name}
    if isinstance(content, Image.Image):
        content.save(file := io.BytesIO(), "PNG")
        content = file.getvalue()
    return {"bytes": content, "path": None}
