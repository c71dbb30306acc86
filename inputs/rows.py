"""Read the rows of a data set in any of the formats below. The shape of each row is detected from the row itself.

    x.jsonl, x.json, x.parquet   EasyR1: {"prompt" or "problem": text with <image> tags, "answer", "images": [path, …]}
                                 veRL: {"prompt": [{role, content}], "images": [{bytes, path}],
                                        "reward_model": {ground_truth}, "extra_info": {question, …}}
                                 VQA-RAD conversations: {"conversations": [{role, content: [{type, …}]}]}
                                 VQA-RAD (OSF): {"image_name", "question", "answer", "answer_type", "phrase_type"}
                                 MMK12, vqa-rad: {"question", "image", "answer"}
    folder/, x.zip               counting: main.csv with images_path, question, answer, next to images/
    folder/, owner/name          a data set saved by `datasets`, or one on the hub; `owner/name:config` selects a config

`@split` selects a split (`owner/name@test`, `VQA_RAD.json@test`). The default is "train". Data sets separated by commas
are mixed. Images inside tables stay on disk until they are needed.
"""

import ast
import base64
import csv
import io
import json
import math
import os
import pathlib
import re
import stat
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common import console
from common.errors import UserError
from common.records import TAG, Folder, ImageSource, Sample
from config import Columns
from inputs.images import UNREADABLE, decode_image, read_source

if TYPE_CHECKING:  # imported only in `open_table`: the import takes a second, and most runs read text files
    import datasets


MAX_UNPACKED_BYTES = 8 * 2**30  # maximum unpacked size of a ZIP
MAX_FILE_BYTES = 2**28  # maximum unpacked size of one file in a ZIP; limited because images are decoded from memory
PROMPT_COLUMNS = ("prompt", "problem", "question")
ANSWER_COLUMNS = ("answer", "ground_truth")
IMAGE_COLUMNS = ("images", "image")
OSF_IMAGES = "VQA_RAD Image Folder"  # image folder in the OSF archive of VQA-RAD
Problem = tuple[str, str]  # (source, message) of a row that cannot be parsed
Row = Sample | Problem


class RowError(ValueError):
    """A row that cannot be used. The message states the problem."""


def read_rows(data: str, image_dir: str | None = None, columns: Columns | None = None) -> Iterator[Row]:
    """Yield the rows of `data` in order. Raises UserError when a data set cannot be read at all."""
    columns = columns or Columns()
    for source_index, spec in enumerate(data_sets(data)):
        for row in _read_one(spec, pathlib.Path(image_dir) if image_dir is not None else None, columns):
            if isinstance(row, Sample):
                row.source_index = source_index
            yield row


def data_sets(data: str) -> list[str]:
    """Split `data` at its commas. The path of an existing file or folder may contain commas and is not split."""
    specs = [data] if pathlib.Path(data).exists() else [spec.strip() for spec in data.split(",")]
    if not all(specs):
        raise UserError(f"--data {data!r} has an empty entry: check the commas")
    return specs


def _read_one(spec: str, image_dir: pathlib.Path | None, columns: Columns) -> Iterator[Row]:
    name, split = spec, None
    if not pathlib.Path(spec).exists() and "@" in spec:
        name, split = spec.rsplit("@", 1)
    path, suffix = pathlib.Path(name), pathlib.Path(name).suffix.lower()
    if suffix in (".json", ".jsonl") and path.is_file():
        return _read_json(path, split, image_dir, columns)
    if (path.is_dir() and not (path / "main.csv").is_file()) or (suffix == ".parquet" and path.is_file()):
        return _read_table(open_table(path, split), spec, image_dir or path.parent, columns)
    if split is not None and path.exists():
        raise UserError(f"{name!r} has no splits: remove @{split}")
    if path.is_dir():
        return _read_counting_folder(path, image_dir or path, columns)
    if suffix == ".zip" and path.is_file():
        folder = open_zip(path)
        return _read_counting_folder(folder, folder, columns)
    if path.exists():
        raise UserError(f"{name!r} is not a folder or a .jsonl, .json, .parquet or .zip file")
    if suffix in (".jsonl", ".json", ".parquet", ".zip", ".csv") or not re.fullmatch(
        r"[\w.-]+(/[\w.-]+)?(:\S+)?", name
    ):
        raise UserError(f"no data at {name!r}: give a .jsonl, .json, .parquet or .zip file, a folder or a hub name")
    return _read_table(open_table(name, split), spec, image_dir or pathlib.Path(), columns)


def raw_rows(
    spec: str, image_dir: str | None, default_split: str
) -> Iterator[tuple[str, "dict | RowError", pathlib.Path]]:
    """Yield (source, unparsed row or RowError, base folder of relative image paths) for each row of one data set.

    `spec` is a .jsonl, .json or .parquet file, a folder or a hub name. `default_split` is read when `spec` has no
    `@split`.
    """
    name, _, split = (spec, "", "") if pathlib.Path(spec).exists() else spec.partition("@")
    path = pathlib.Path(name)
    folder = pathlib.Path(image_dir) if image_dir is not None else path if path.is_dir() else path.parent
    if path.suffix.lower() in (".json", ".jsonl"):
        for number, row in _json_rows(path):
            row = row if isinstance(row, dict | RowError) else RowError("not an object with columns")
            yield f"{path} row {number}", row, folder
        return
    for source, row in _table_rows(open_table(name, split or None, default_split), spec, folder):
        yield source, row, folder


def read_text(path: str | Folder, flag: str) -> str:
    """Read a UTF-8 text file that the user named with `flag`. Raises UserError when it cannot be read."""
    try:
        return (pathlib.Path(path) if isinstance(path, str) else path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{str(path)!r} is not UTF-8 text ({error}): save it as UTF-8") from None
    except UNREADABLE as error:
        raise UserError(f"cannot read {str(path)!r} ({error}): check {flag}") from None


# --- one row ----------------------------------------------------------------------------------------------------------


def parse_row(row: object, source: str, folder: Callable[[str], Folder], columns: Columns) -> Row:
    """Parse a row of any supported shape, and return a sample or a problem.

    `folder` maps the path of an image, as written in the row, to its location.
    """
    if not isinstance(row, dict):
        return source, "not an object with columns"
    try:
        sample = _parse_row(dict(row), source, columns)
        sample.images = [resolve_image(image, folder) for image in sample.images]
        image_columns = [name for name, value in sample.fields.items() if isinstance(value, Cell) or _has_cells(value)]
        for name in image_columns:  # rewards receive the fields but cannot use images
            del sample.fields[name]
        return add_image_tags(sample)
    except RowError as error:
        return source, str(error)


def _has_cells(value: object) -> bool:
    return isinstance(value, list) and any(isinstance(item, Cell) for item in value)


def _parse_row(row: dict, source: str, columns: Columns) -> Sample:
    images = _images(row.pop(_column(row, IMAGE_COLUMNS, columns.images) or "", None))
    row = {name: value for name, value in row.items() if name not in IMAGE_COLUMNS or value}
    if "conversations" in row and "prompt" not in row and columns.prompt is None:
        prompt, answer, system = _conversation(row.pop("conversations"), images)
        row.pop("answer", None)
    elif "image_name" in row and not images:  # VQA-RAD from the OSF
        images = [row.pop("image_name")]
        prompt, answer, system = row.pop("question", None), row.pop("answer", None), None
        row |= {name: row[name].strip() for name in ("answer_type", "question_type") if isinstance(row.get(name), str)}
    else:
        name = _column(row, PROMPT_COLUMNS, columns.prompt)
        if name is None:
            raise RowError(f"no text under 'prompt', 'problem' or 'question' (columns: {', '.join(row)})")
        prompt, system = row.pop(name), row.pop("system", None)
        if isinstance(prompt, list):
            prompt, system = _chat(prompt, images)
        answer = _answer(row, columns)
    if not isinstance(prompt, str) or not prompt.strip():
        raise RowError("no prompt text" + (f" (columns: {', '.join(row)})" if row else ": the question is empty"))
    if isinstance(answer, bool):
        raise RowError(f"'answer' is {str(answer).lower()}: write the expected answer as text, such as 'yes' or 'no'")
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    if not isinstance(answer, str | int | float | None):
        raise RowError(f"'answer' is neither text nor a number: {str(answer)[:40]}")
    answer = "" if answer is None or (isinstance(answer, float) and not math.isfinite(answer)) else str(answer)
    if any(0xD800 <= ord(c) <= 0xDFFF for c in prompt + answer):
        raise RowError("the prompt or answer contains a broken character (half of a surrogate pair)")
    info = row.get("extra_info")
    if isinstance(info, dict) and isinstance(info.get("question"), str):
        row.setdefault("question", info["question"])
    return Sample(prompt, answer, images, source, row, system if isinstance(system, str) and system.strip() else None)


def _column(row: dict, defaults: tuple[str, ...], chosen: str | None) -> str | None:
    """Return the name of a column: the user's choice or, if none was made, the first default that is not empty.

    Raises RowError when the row does not have the chosen column.
    """
    if chosen is not None and chosen not in row:
        raise RowError(f"no column '{chosen}' (columns: {', '.join(row)})")
    return chosen or next((name for name in defaults if row.get(name) not in (None, [])), None)


def _answer(row: dict, columns: Columns) -> object:
    """Return the gold answer.

    veRL keeps the answer in `reward_model` as `ground_truth`. Skywork-OR1 writes a list of answers as text; the first
    answer is used.
    """
    reward_model = row.get("reward_model")
    if columns.answer is None and isinstance(reward_model, dict) and reward_model.get("ground_truth") is not None:
        answer = row.pop("reward_model")["ground_truth"]
    elif (name := _column(row, ANSWER_COLUMNS, columns.answer)) is not None:
        answer = row.pop(name)
        if name != "ground_truth":
            return answer
    else:
        return None
    if isinstance(answer, str) and re.fullmatch(r"\s*\[.*\]\s*", answer, re.DOTALL):
        try:
            items = ast.literal_eval(answer.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return answer
        # `[1, 2]` is an interval and `["1"]` is a list of answers, so a list is unwrapped only if it has a single item
        # or all of its items are text.
        if isinstance(items, list) and items and (len(items) == 1 or all(isinstance(item, str) for item in items)):
            return items[0]
    return answer


def _images(value: object) -> list:
    if value is None:
        return []
    images = value if isinstance(value, list) else [value]
    for image in images:
        if not isinstance(image, str | bytes | dict | Cell) or image == "":
            raise RowError("'images' is not a list of paths or images")
    return images


def _chat(turns: list, images: list) -> tuple[str, str | None]:
    """Return (prompt, system prompt) of a chat: one user turn, optionally after one system turn.

    Images in the chat are appended to `images`.
    """
    texts: dict[str, str] = {}
    for turn in turns:
        role = turn.get("role") if isinstance(turn, dict) else None
        if role not in ("system", "user") or role in texts or (role == "system" and texts):
            raise RowError("a prompt given as a chat must be one user turn, optionally after one system turn")
        texts[role] = _text(turn.get("content"), images)
    return texts.get("user", ""), texts.get("system")


def _conversation(turns: object, images: list) -> tuple[str, str, str | None]:
    """Return (prompt, answer, system prompt) of a conversation whose only reply is its last turn."""
    if not isinstance(turns, list) or not turns or not isinstance(turns[-1], dict):
        raise RowError("'conversations' is not a list of turns")
    if turns[-1].get("role") not in ("assistant", "gpt"):
        raise RowError("'conversations' does not end with the assistant's answer")
    prompt, system = _chat(turns[:-1], images)
    num_prompt_images = len(images)
    answer = _text(turns[-1].get("content"), images)
    if len(images) > num_prompt_images:
        raise RowError("the assistant's turn contains an image")
    prompt = re.sub(r"^(\s*(?:<image>\s*)*)Question:\s*", r"\1", prompt)
    return prompt, re.sub(r"^\s*Answer:\s*", "", answer), system


def _text(content: object, images: list) -> str:
    """Return a turn's text with a tag for each of its images. The images are appended to `images`."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise RowError("a turn's 'content' is neither text nor a list of parts")
    text = ""
    for part in content:
        if part.get("type") in ("image", "image_url"):
            names = ("image", "path", "image_path", "image_url", "url", "bytes")
            image = next((part[name] for name in names if part.get(name) is not None), None)
            if isinstance(image, dict) and "url" in image:
                image = image["url"]
            if image is not None:  # otherwise the part stands for the next image of the row's image column
                images += _images(image)
            text += TAG
        else:
            piece = part.get("text")
            if not isinstance(piece, str):
                raise RowError("a part of a turn is neither an image nor text")
            text += piece
    return text


def _exists(path: Folder) -> bool:
    try:
        return path.exists()
    except OSError:  # an invalid file name, such as one that is too long
        return False


def resolve_image(image: object, folder: Callable[[str], Folder]) -> ImageSource:
    """Resolve the path of an image with `folder` and decode a data: URL. Bytes and table cells are returned unchanged.

    Raises RowError for invalid base64 and for 'bytes' that are not bytes.
    """
    if isinstance(image, str) and image.startswith("data:"):
        try:
            return base64.b64decode(image.partition(",")[2], validate=True)
        except ValueError:
            raise RowError("an image is a data: URL with invalid base64") from None
    if isinstance(image, str):
        return folder(image.removeprefix("file://"))
    if isinstance(image, dict) and image.get("bytes") is None and isinstance(image.get("path"), str):
        return folder(image["path"])
    if isinstance(image, dict) and not isinstance(image.get("bytes"), bytes | None):
        raise RowError("an image's 'bytes' value is not bytes")
    return image


def add_image_tags(sample: Sample) -> Sample:
    """If a prompt has images but no image tags, put one tag per image before the prompt.

    Otherwise, the number of tags must be the number of images. Raises RowError if the numbers differ, or if a column is
    named 'completion'.
    """
    if "completion" in sample.fields:
        raise RowError(
            "a column is named 'completion', which is the rewards' name for the model's text: rename the column"
        )
    tags = sample.prompt.count(TAG)
    if sample.images and not tags:
        sample.prompt = TAG * len(sample.images) + sample.prompt
    elif tags != len(sample.images):
        raise RowError(f"{tags} {TAG} tags in the prompt but {len(sample.images)} images")
    return sample


# --- JSON -------------------------------------------------------------------------------------------------------------


def _read_json(
    path: pathlib.Path, split: str | None, image_dir: pathlib.Path | None, columns: Columns
) -> Iterator[Row]:
    folder = image_dir or path.parent

    def resolve(name: str) -> pathlib.Path:
        osf = folder / OSF_IMAGES / name
        return osf if not _exists(folder / name) and _exists(osf) else folder / name

    left_out = 0
    for number, row in _json_rows(path):
        source = f"{path} row {number}"
        if isinstance(row, RowError):
            yield source, str(row)
            continue
        is_osf = isinstance(row, dict) and "image_name" in row and "prompt" not in row
        phrase = row.get("phrase_type") if is_osf else None
        if isinstance(phrase, str):
            row_split = "test" if phrase.strip().startswith("test_") else "train"
            if row_split not in (split or "train").split("+"):
                left_out += 1
                continue
        elif split is not None:
            raise UserError(f"{source} has no 'phrase_type' column to tell its split: remove @{split}")
        yield parse_row(row, source, resolve, columns)
    if left_out and split is None and console.is_main():
        print(
            f"note: left out {left_out} rows of {path} that are in its test split; {path}@test reads them",
            file=sys.stderr,
        )


def _json_rows(path: pathlib.Path) -> Iterator[tuple[int, object]]:
    """Yield (row number, row). For a line that is not JSON, the row is a RowError."""
    text = read_text(path, "--data")
    if path.suffix.lower() == ".json":
        try:
            rows = json.loads(text)
        except (ValueError, RecursionError) as error:
            hint = "; if each line is one row, name it .jsonl" if "Extra data" in str(error) else ""
            raise UserError(f"{path} is not JSON ({error}){hint}") from None
        if not isinstance(rows, list):
            raise UserError(f"{path} is not a JSON list of rows")
        yield from enumerate(rows, 1)
        return
    if text.lstrip().startswith("[\n") or text.startswith("[{"):
        raise UserError(f"{path} is a JSON list: name it .json")
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                yield number, RowError(f"not JSON ({error})")


# --- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """An image in a table on disk, read only when it is needed."""

    table: "datasets.Dataset"
    row: int
    column: str
    index: int | None
    """Index in the cell's list of images; None if the cell holds a single image."""
    folder: pathlib.Path
    """Folder that a relative path in the cell is resolved against."""

    def read(self) -> dict:
        """Read the image's encoded bytes or its path."""
        image = self.table[self.row][self.column][0].as_py()
        image = image if self.index is None else image[self.index]
        image = {"bytes": image} if isinstance(image, bytes) else dict(image or {})
        if image.get("bytes") is None and image.get("path") is not None:
            image["path"] = self.folder / image["path"]
        return image

    def __str__(self) -> str:
        return f"in column '{self.column}'" + (f", number {self.index + 1}" if self.index is not None else "")


def open_table(name: str | pathlib.Path, split: str | None, default_split: str = "train") -> "datasets.Dataset":
    """Open a parquet file, a folder that `datasets` saved or can read, or a data set on the hub.

    The rows of the result are in Arrow format. When `split` is None and there are several splits, `default_split` is
    opened. Raises UserError when the data cannot be read or the requested split does not exist. In the latter case, the
    message names the available splits.
    """
    import datasets

    datasets.disable_progress_bars()
    path, config = pathlib.Path(name), None
    try:
        if path.is_file():
            result = datasets.load_dataset("parquet", data_files=str(path))
            if split not in (None, default_split):
                raise UserError(f"{str(path)!r} has no splits: remove @{split}")
        elif path.is_dir() and any((path / file).is_file() for file in ("state.json", "dataset_dict.json")):
            result = datasets.load_from_disk(str(path))
        elif path.is_dir():
            result = datasets.load_dataset(str(path))
        else:
            name, _, config = str(name).partition(":")
            result = datasets.load_dataset(name, config or None)
    except Exception as error:
        if isinstance(error, UserError):
            raise
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
        if path.exists():
            raise UserError(
                f"no data in {str(path)!r}: `datasets` cannot read it and it has no main.csv ({reason})"
            ) from None
        raise UserError(
            f"no data at {name!r}: not a local path, and not on the hub or the hub cannot be reached ({reason})"
        ) from None
    if isinstance(result, datasets.Dataset):
        if split not in (None, default_split, str(result.split)):
            raise UserError(f"{str(name)!r} has only one split: remove @{split}")
        return result.with_format("arrow")
    if not split:
        split = default_split if default_split in result or len(result) > 1 else next(iter(result))
    requested = split.split("+")
    if missing := [split_name for split_name in requested if split_name not in result]:
        raise UserError(
            f"{str(name)!r} has no split {', '.join(missing)}; it has {', '.join(result)}: write {name}@SPLIT"
        )
    return datasets.concatenate_datasets([result[split_name] for split_name in requested]).with_format("arrow")


def _read_table(table: "datasets.Dataset", name: str, folder: pathlib.Path, columns: Columns) -> Iterator[Row]:
    for source, row in _table_rows(table, name, folder):
        yield parse_row(row, source, lambda path: folder / path, columns)


def _table_rows(table: "datasets.Dataset", name: str, folder: pathlib.Path) -> Iterator[tuple[str, dict]]:
    number = 0
    for batch in table.iter(batch_size=1000):
        image_columns = [column for column in batch.column_names if _holds_images(batch.schema.field(column).type)]
        for i, row in enumerate(batch.drop_columns(image_columns).to_pylist()):
            for column in image_columns:
                cell = batch.column(column)[i]
                row[column] = None
                if cell.is_valid and _is_list(cell.type):  # the images are counted without reading them
                    row[column] = [Cell(table, number, column, index, folder) for index in range(len(cell.values))]
                elif cell.is_valid:
                    row[column] = Cell(table, number, column, None, folder)
            number += 1
            yield f"{name} row {number}", row


def _is_list(arrow_type: Any) -> bool:
    from pyarrow import types

    return types.is_list(arrow_type) or types.is_large_list(arrow_type)


def _holds_images(arrow_type: Any) -> bool:
    """Return whether a column of this Arrow type holds images: {bytes, path}, bytes, or a list of either."""
    from pyarrow import types

    arrow_type = arrow_type.value_type if _is_list(arrow_type) else arrow_type
    if types.is_struct(arrow_type):
        return "bytes" in {arrow_type.field(i).name for i in range(arrow_type.num_fields)}
    return types.is_binary(arrow_type) or types.is_large_binary(arrow_type)


# --- counting ---------------------------------------------------------------------------------------------------------


def open_zip(path: pathlib.Path) -> zipfile.Path:
    """Find main.csv in the root of a ZIP or one level below, and return its folder. The ZIP is never unpacked.

    Raises UserError when the file is not a ZIP, is encrypted, does not have exactly one main.csv, contains links or
    paths that point outside the ZIP, exceeds `MAX_UNPACKED_BYTES` in total, or has a file above `MAX_FILE_BYTES`.
    """
    try:
        archive = zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is not a readable ZIP ({error})") from None
    for member in archive.infolist():
        names = member.filename.replace("\\", "/").split("/")
        if names[0] == "" or ".." in names or ":" in names[0]:
            raise UserError(f"{path}: {member.filename!r} points outside the ZIP; create the ZIP again without it")
        if stat.S_ISLNK(member.external_attr >> 16):
            raise UserError(f"{path}: {member.filename!r} is a link; put the file itself into the ZIP")
        if member.flag_bits & 1:
            raise UserError(f"{path}: {member.filename!r} is encrypted; create the ZIP again without a password")
    if (total := sum(member.file_size for member in archive.infolist())) > MAX_UNPACKED_BYTES:
        raise UserError(
            f"{path} would unpack to {total / 2**30:.1f} GiB; the limit is {MAX_UNPACKED_BYTES / 2**30:.0f} GiB"
        )
    if big := [member for member in archive.infolist() if member.file_size > MAX_FILE_BYTES]:
        size = f"{big[0].file_size / 2**20:.0f} MiB; the limit for one file is {MAX_FILE_BYTES / 2**20:.0f} MiB"
        raise UserError(f"{path}: {big[0].filename!r} would unpack to {size}")
    root = zipfile.Path(archive)
    folders = [folder for folder in (root, *root.iterdir()) if folder.is_dir() and folder.name != "__MACOSX"]
    matches = [folder for folder in folders if (folder / "main.csv").is_file()]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UserError(f"{path} has {len(matches)} main.csv files: put only one data set into a ZIP")
    raise UserError(f"{path} has no main.csv at its root or in a folder directly below it")


def _read_counting_folder(folder: Folder, image_dir: Folder, columns: Columns) -> Iterator[Row]:
    path = folder / "main.csv"
    rows = _csv_rows(path)
    header = [name.strip() for name in next(rows, [])]
    names = (columns.images or "images_path", columns.prompt or "question", columns.answer or "answer")
    if missing := set(names) - set(header):
        present = ", ".join(header) or "none"
        hint = "; cells must be separated by commas" if len(header) == 1 else ""
        raise UserError(f"{path} has no column {', '.join(sorted(missing))}; columns in its header: {present}{hint}")
    if len(set(header)) < len(header):
        raise UserError(f"{path}: a column appears twice in the header: {', '.join(header)}")

    def resolve(name: str) -> Folder:
        return image_dir / name if _exists(image_dir / name) else image_dir / "images" / name

    for number, cells in enumerate(rows, 2):  # numbered as in a spreadsheet: row 1 is the header and blank rows count
        source = f"{path} row {number}"
        if not cells:
            continue
        if len(cells) != len(header):
            yield source, "more or fewer cells than columns in the header"
            continue
        row = dict(zip(header, cells))
        image, question, answer = (row.pop(name) for name in names)
        if not image.strip():
            yield source, "images_path is empty"
            continue
        yield parse_row(
            row | {"prompt": question, "answer": answer, "images": [image.strip()]}, source, resolve, Columns()
        )


def _csv_rows(path: Folder) -> Iterator[list[str]]:
    reader = csv.reader(io.StringIO(read_text(path, "--data")), strict=True)
    try:
        yield from reader
    except csv.Error as error:  # with a stray quote, the next rows would become part of this cell
        raise UserError(
            f"{path}: cannot parse the row after line {reader.line_num} ({error}): is there a stray quote?"
        ) from None


# --- conversion -------------------------------------------------------------------------------------------------------


def easyr1_row(sample: Sample, output: pathlib.Path, number: int) -> dict:
    """Convert `sample` to row `number` of the EasyR1 file `output`.

    Images that are not files on disk are saved as PNG in a folder next to `output`: STEM_images for STEM.jsonl. The
    path of an image inside the output's folder is written relative to that folder; other paths are absolute.
    """
    images = []
    for index, source in enumerate(sample.images):
        path = read_source(source)
        if not isinstance(path, str | pathlib.Path):
            folder = output.with_name(output.stem + "_images")
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{number:06d}-{index}.png"
            decode_image(source).save(path)
        path = pathlib.Path(os.path.abspath(path))
        base = pathlib.Path(os.path.abspath(output.parent))
        images.append(str(path.relative_to(base) if path.is_relative_to(base) else path))
    row = {"prompt": sample.prompt, "answer": sample.answer, "images": images}
    extra = {"system": sample.system} if sample.system else {}
    return row | extra | {name: value for name, value in sample.fields.items() if name not in row}
