"""Rows of a data set from every format that people have them in. The shape of a row is told from the row itself.

    x.jsonl, x.json, x.parquet   EasyR1: {"prompt" or "problem": text with <image> tags, "answer", "images": [path, …]}
                                 veRL: {"prompt": [{role, content}], "images": [{bytes, path}],
                                        "reward_model": {ground_truth}, "extra_info": {question, …}}
                                 VQA-RAD conversations: {"conversations": [{role, content: [{type, …}]}]}
                                 VQA-RAD of the OSF: {"image_name", "question", "answer", "answer_type", "phrase_type"}
                                 and {"question", "image", "answer"} as in MMK12 or vqa-rad
    folder/, x.zip               counting: main.csv with images_path, question, answer, beside images/
    folder/, owner/name          what `datasets` saved, or a data set of the hub; `owner/name:config` for one of several

`@split` chooses a split (`owner/name@test`, `VQA_RAD.json@test`); it is «train» when left out. Several of these with
commas between them are mixed. Pictures inside tables stay on disk until they are needed.
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

if TYPE_CHECKING:  # imported where a table is opened: it takes a second and most runs read text files
    import datasets


MAX_UNPACKED_BYTES = 8 * 2**30  # bytes a ZIP may unpack to
MAX_FILE_BYTES = 2**28  # bytes one file of it may: a picture is decoded from memory
PROMPT_COLUMNS = ("prompt", "problem", "question")
ANSWER_COLUMNS = ("answer", "ground_truth")
IMAGE_COLUMNS = ("images", "image")
OSF_IMAGES = "VQA_RAD Image Folder"  # where the OSF archive of VQA-RAD keeps its pictures
Problem = tuple[str, str]  # (source, what is wrong) of a row without the shape of one
Row = Sample | Problem


class RowError(ValueError):
    """What is wrong with a row."""


def read_rows(data: str, image_dir: str | None = None, columns: Columns | None = None) -> Iterator[Row]:
    """Rows of `data` in order. Raises UserError when it cannot be read at all."""
    columns = columns or Columns()
    for part, spec in enumerate(data_sets(data)):
        for row in _read_one(spec, pathlib.Path(image_dir) if image_dir is not None else None, columns):
            if isinstance(row, Sample):
                row.source_index = part
            yield row


def data_sets(data: str) -> list[str]:
    """The comma-separated parts of `data`; a path with a comma in its name stays whole."""
    parts = [data] if pathlib.Path(data).exists() else [part.strip() for part in data.split(",")]
    if not all(parts):
        raise UserError(f"--data {data!r} names an empty data set")
    return parts


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
        raise UserError(f"{name!r} has no splits: leave @{split} out")
    if path.is_dir():
        return _read_counting_folder(path, image_dir or path, columns)
    if suffix == ".zip" and path.is_file():
        folder = open_zip(path)
        return _read_counting_folder(folder, folder, columns)
    if path.exists():
        raise UserError(f"{name!r} is neither a .jsonl, .json, .parquet or .zip file nor a folder")
    if suffix in (".jsonl", ".json", ".parquet", ".zip", ".csv") or not re.fullmatch(
        r"[\w.-]+(/[\w.-]+)?(:\S+)?", name
    ):
        raise UserError(f"no data at {name!r}: give a .jsonl, .json, .parquet or .zip file, a folder or a hub name")
    return _read_table(open_table(name, split), spec, image_dir or pathlib.Path(), columns)


def raw_rows(spec: str, image_dir: str | None, usual: str) -> Iterator[tuple[str, "dict | RowError", pathlib.Path]]:
    """(source, row as it stands or what is wrong with it, folder of relative paths) of a .jsonl, .json or .parquet
    file, a folder or a data set of the hub; of several splits the `usual` one, where none is asked for."""
    name, _, split = (spec, "", "") if pathlib.Path(spec).exists() else spec.partition("@")
    path = pathlib.Path(name)
    folder = pathlib.Path(image_dir) if image_dir is not None else path if path.is_dir() else path.parent
    if path.suffix.lower() in (".json", ".jsonl"):
        for number, row in _json_rows(path):
            row = row if isinstance(row, dict | RowError) else RowError("not an object with columns")
            yield f"{path} row {number}", row, folder
        return
    for source, row in _table_rows(open_table(name, split or None, usual), spec, folder):
        yield source, row, folder


def read_text(path: str | Folder, flag: str) -> str:
    """The UTF-8 text of a file that the user named; raises UserError naming `flag` when it cannot be read."""
    try:
        return (pathlib.Path(path) if isinstance(path, str) else path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{str(path)!r} is not UTF-8 text ({error}): save it as UTF-8") from None
    except UNREADABLE as error:
        raise UserError(f"cannot read {str(path)!r} ({error}): check {flag}") from None


# --- one row ----------------------------------------------------------------------------------------------------------


def parse_row(row: object, source: str, folder: Callable[[str], Folder], columns: Columns) -> Row:
    """The sample in a row of any of the shapes above, or what is wrong with it. `folder` places a relative path."""
    if not isinstance(row, dict):
        return source, "not an object with columns"
    try:
        sample = _parse_row(dict(row), source, columns)
        sample.images = [resolve_image(image, folder) for image in sample.images]
        pictures = [name for name, value in sample.fields.items() if isinstance(value, Cell) or _cells(value)]
        for name in pictures:  # further columns of pictures are nothing that a reward could take
            del sample.fields[name]
        return add_image_tags(sample)
    except RowError as problem:
        return source, str(problem)


def _cells(value: object) -> bool:
    return isinstance(value, list) and any(isinstance(item, Cell) for item in value)


def _parse_row(row: dict, source: str, columns: Columns) -> Sample:
    images = _images(row.pop(_column(row, IMAGE_COLUMNS, columns.images) or "", None))
    row = {name: value for name, value in row.items() if name not in IMAGE_COLUMNS or value}
    if "conversations" in row and "prompt" not in row and columns.prompt is None:
        prompt, answer, system = _conversation(row.pop("conversations"), images)
        row.pop("answer", None)
    elif "image_name" in row and not images:  # the OSF's VQA-RAD
        images = [row.pop("image_name")]
        prompt, answer, system = row.pop("question", None), row.pop("answer", None), None
        row |= {name: row[name].strip() for name in ("answer_type", "question_type") if isinstance(row.get(name), str)}
    else:
        name = _column(row, PROMPT_COLUMNS, columns.prompt)
        if name is None:
            raise RowError(f"no text under «prompt», «problem» or «question» (columns: {', '.join(row)})")
        prompt, system = row.pop(name), row.pop("system", None)
        if isinstance(prompt, list):
            prompt, system = _chat(prompt, images)
        answer = _answer(row, columns)
    if not isinstance(prompt, str) or not prompt.strip():
        raise RowError("no text for a prompt" + (f" (columns: {', '.join(row)})" if row else ": its question is empty"))
    if isinstance(answer, bool):
        raise RowError(f"«answer» is {str(answer).lower()}: write it as the word that a right answer has")
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    if not isinstance(answer, str | int | float | None):
        raise RowError(f"«answer» is neither text nor a number: {str(answer)[:40]}")
    answer = "" if answer is None or (isinstance(answer, float) and not math.isfinite(answer)) else str(answer)
    if any(0xD800 <= ord(c) <= 0xDFFF for c in prompt + answer):
        raise RowError("a broken character (half of a surrogate pair) in prompt or answer")
    info = row.get("extra_info")
    if isinstance(info, dict) and isinstance(info.get("question"), str):
        row.setdefault("question", info["question"])
    return Sample(prompt, answer, images, source, row, system if isinstance(system, str) and system.strip() else None)


def _column(row: dict, usual: tuple[str, ...], chosen: str | None) -> str | None:
    """The name of a column: the user's, which must be there, or the first usual one with something in it."""
    if chosen is not None and chosen not in row:
        raise RowError(f"no column «{chosen}» (columns: {', '.join(row)})")
    return chosen or next((name for name in usual if row.get(name) not in (None, [])), None)


def _answer(row: dict, columns: Columns) -> object:
    """The gold answer: of veRL's `reward_model` its ground truth, of a list as text (Skywork-OR1) its first item."""
    model = row.get("reward_model")
    if columns.answer is None and isinstance(model, dict) and model.get("ground_truth") is not None:
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
        # «[1, 2]» is an interval and «["1"]» a list of answers: only text, or a single item, is taken out of its list.
        if isinstance(items, list) and items and (len(items) == 1 or all(isinstance(item, str) for item in items)):
            return items[0]
    return answer


def _images(value: object) -> list:
    if value is None:
        return []
    images = value if isinstance(value, list) else [value]
    for image in images:
        if not isinstance(image, str | bytes | dict | Cell) or image == "":
            raise RowError("«images» is not a list of paths or pictures")
    return images


def _chat(turns: list, images: list) -> tuple[str, str | None]:
    """(prompt, system prompt) of a chat that is one user turn, after a system turn or none. Finds images in it too."""
    texts: dict[str, str] = {}
    for turn in turns:
        role = turn.get("role") if isinstance(turn, dict) else None
        if role not in ("system", "user") or role in texts or (role == "system" and texts):
            raise RowError("the prompt is a chat of more than one system and one user turn, which is all that is read")
        texts[role] = _text(turn.get("content"), images)
    return texts.get("user", ""), texts.get("system")


def _conversation(turns: object, images: list) -> tuple[str, str, str | None]:
    """(prompt, answer, system prompt) of a conversation that ends with its only reply."""
    if not isinstance(turns, list) or not turns or not isinstance(turns[-1], dict):
        raise RowError("«conversations» is not a list of turns")
    if turns[-1].get("role") not in ("assistant", "gpt"):
        raise RowError("«conversations» does not end with the assistant's answer")
    prompt, system = _chat(turns[:-1], images)
    found = len(images)
    answer = _text(turns[-1].get("content"), images)
    if len(images) > found:
        raise RowError("there is a picture in the assistant's turn")
    prompt = re.sub(r"^(\s*(?:<image>\s*)*)Question:\s*", r"\1", prompt)
    return prompt, re.sub(r"^\s*Answer:\s*", "", answer), system


def _text(content: object, images: list) -> str:
    """A turn's text with a tag for each of its images, which are added to `images`."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise RowError("a turn's «content» is neither text nor a list of parts")
    text = ""
    for part in content:
        if part.get("type") in ("image", "image_url"):
            names = ("image", "path", "image_path", "image_url", "url", "bytes")
            image = next((part[name] for name in names if part.get(name) is not None), None)
            if isinstance(image, dict) and "url" in image:
                image = image["url"]
            if image is not None:  # without one it stands for the next of the row's own images
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
    except OSError:  # a name that no file can have
        return False


def resolve_image(image: object, folder: Callable[[str], Folder]) -> ImageSource:
    """Where an image is, once a relative path is placed; bytes and cells stay as they are. Raises BadRow."""
    if isinstance(image, str) and image.startswith("data:"):
        try:
            return base64.b64decode(image.partition(",")[2], validate=True)
        except ValueError:
            raise RowError("an image is a «data:» address that is no base64") from None
    if isinstance(image, str):
        return folder(image.removeprefix("file://"))
    if isinstance(image, dict) and image.get("bytes") is None and isinstance(image.get("path"), str):
        return folder(image["path"])
    if isinstance(image, dict) and not isinstance(image.get("bytes"), bytes | None):
        raise RowError("«bytes» of an image are no bytes")
    return image


def add_image_tags(sample: Sample) -> Sample:
    """A row with images and no tag gets them in front; any other difference between tags and images is a problem."""
    if "completion" in sample.fields:
        raise RowError("a column named «completion», which is what rewards call the model's own text; rename it")
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

    def placed(name: str) -> pathlib.Path:
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
            part = "test" if phrase.strip().startswith("test_") else "train"
            if part not in (split or "train").split("+"):
                left_out += 1
                continue
        elif split is not None:
            raise UserError(f"{source} has no «phrase_type» that would tell its split: leave @{split} out")
        yield parse_row(row, source, placed, columns)
    if left_out and split is None and console.is_main():
        print(
            f"note: {left_out} rows of {path} are its test split and left out; {path}@test reads them", file=sys.stderr
        )


def _json_rows(path: pathlib.Path) -> Iterator[tuple[int, object]]:
    """(row number, row); a line that is not JSON is a BadRow in its row's place."""
    text = read_text(path, "--data")
    if path.suffix.lower() == ".json":
        try:
            rows = json.loads(text)
        except (ValueError, RecursionError) as error:
            hint = "; rows one a line are a .jsonl" if "Extra data" in str(error) else ""
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
    """A picture in a table on disk."""

    table: "datasets.Dataset"
    row: int
    column: str
    place: int | None
    """which of the cell's list of pictures; None for a single one"""
    folder: pathlib.Path
    """what a relative path in it starts from"""

    def read(self) -> dict:
        """Its encoded bytes or its path."""
        image = self.table[self.row][self.column][0].as_py()
        image = image if self.place is None else image[self.place]
        image = {"bytes": image} if isinstance(image, bytes) else dict(image or {})
        if image.get("bytes") is None and image.get("path") is not None:
            image["path"] = self.folder / image["path"]
        return image

    def __str__(self) -> str:
        return f"in column «{self.column}»" + (f", number {self.place + 1}" if self.place is not None else "")


def open_table(name: str | pathlib.Path, split: str | None, usual: str = "train") -> "datasets.Dataset":
    """A parquet file, a folder that `datasets` saved or can read, or a data set of the hub, its rows as Arrow tables.

    Of several splits the `usual` one, where none is asked for. Raises UserError naming the splits there are when the
    one asked for is not among them.
    """
    import datasets

    datasets.disable_progress_bars()
    path, config = pathlib.Path(name), None
    try:
        if path.is_file():
            found = datasets.load_dataset("parquet", data_files=str(path))
            if split not in (None, usual):
                raise UserError(f"{str(path)!r} has no splits: leave @{split} out")
        elif path.is_dir() and any((path / file).is_file() for file in ("state.json", "dataset_dict.json")):
            found = datasets.load_from_disk(str(path))
        elif path.is_dir():
            found = datasets.load_dataset(str(path))
        else:
            name, _, config = str(name).partition(":")
            found = datasets.load_dataset(name, config or None)
    except Exception as error:
        if isinstance(error, UserError):
            raise
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
        if path.exists():
            raise UserError(
                f"no data in {str(path)!r}: `datasets` cannot read it and it has no main.csv ({reason})"
            ) from None
        raise UserError(
            f"no data at {name!r}: neither here nor on the hub, or the hub is out of reach ({reason})"
        ) from None
    if isinstance(found, datasets.Dataset):
        if split not in (None, usual, str(found.split)):
            raise UserError(f"{str(name)!r} holds one split: leave @{split} out")
        return found.with_format("arrow")
    wanted = (split or (usual if usual in found or len(found) > 1 else next(iter(found)))).split("+")
    if missing := [part for part in wanted if part not in found]:
        raise UserError(
            f"{str(name)!r} has no split {', '.join(missing)}; it has {', '.join(found)}: write {name}@SPLIT"
        )
    return datasets.concatenate_datasets([found[part] for part in wanted]).with_format("arrow")


def _read_table(table: "datasets.Dataset", name: str, folder: pathlib.Path, columns: Columns) -> Iterator[Row]:
    for source, row in _table_rows(table, name, folder):
        yield parse_row(row, source, lambda path: folder / path, columns)


def _table_rows(table: "datasets.Dataset", name: str, folder: pathlib.Path) -> Iterator[tuple[str, dict]]:
    number = 0
    for batch in table.iter(batch_size=1000):
        pictures = [column for column in batch.column_names if _holds_pictures(batch.schema.field(column).type)]
        for i, row in enumerate(batch.drop_columns(pictures).to_pylist()):
            for column in pictures:
                cell = batch.column(column)[i]
                row[column] = None
                if cell.is_valid and _is_list(cell.type):  # its pictures are counted and not read
                    row[column] = [Cell(table, number, column, place, folder) for place in range(len(cell.values))]
                elif cell.is_valid:
                    row[column] = Cell(table, number, column, None, folder)
            number += 1
            yield f"{name} row {number}", row


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return types.is_list(kind) or types.is_large_list(kind)


def _holds_pictures(kind: Any) -> bool:
    """Whether a column of this Arrow type holds images as {bytes, path}, as bytes, or lists of them."""
    from pyarrow import types

    kind = kind.value_type if _is_list(kind) else kind
    if types.is_struct(kind):
        return "bytes" in {kind.field(i).name for i in range(kind.num_fields)}
    return types.is_binary(kind) or types.is_large_binary(kind)


# --- counting ---------------------------------------------------------------------------------------------------------


def open_zip(path: pathlib.Path) -> zipfile.Path:
    """The folder with main.csv in a ZIP: its root, or one folder down. It is read where it is and never unpacked.

    Raises UserError for what is no ZIP, has no main.csv, would unpack to more than `MAX_UNPACKED_BYTES` bytes, is encrypted,
    or holds paths that leave the folder, or links.
    """
    try:
        archive = zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is not a readable ZIP ({error})") from None
    for member in archive.infolist():
        parts = member.filename.replace("\\", "/").split("/")
        if parts[0] in ("",) or ".." in parts or ":" in parts[0]:
            raise UserError(f"{path}: the path {member.filename!r} leaves the folder; pack it anew without it")
        if stat.S_ISLNK(member.external_attr >> 16):
            raise UserError(f"{path}: {member.filename!r} is a link; pack the file itself")
        if member.flag_bits & 1:
            raise UserError(f"{path}: {member.filename!r} is encrypted; pack it without a password")
    if (total := sum(member.file_size for member in archive.infolist())) > MAX_UNPACKED_BYTES:
        raise UserError(
            f"{path} would unpack to {total / 2**30:.1f} GiB; at most {MAX_UNPACKED_BYTES / 2**30:.0f} are read"
        )
    if big := [member for member in archive.infolist() if member.file_size > MAX_FILE_BYTES]:
        size = f"{big[0].file_size / 2**20:.0f} MiB; at most {MAX_FILE_BYTES / 2**20:.0f} of one file are read"
        raise UserError(f"{path}: {big[0].filename!r} would unpack to {size}")
    root = zipfile.Path(archive)
    folders = [folder for folder in (root, *root.iterdir()) if folder.is_dir() and folder.name != "__MACOSX"]
    found = [folder for folder in folders if (folder / "main.csv").is_file()]
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(f"{path} has {len(found)} files main.csv: pack one data set into a ZIP")
    raise UserError(f"{path} has no main.csv, neither at its root nor one folder down")


def _read_counting_folder(folder: Folder, image_dir: Folder, columns: Columns) -> Iterator[Row]:
    path = folder / "main.csv"
    rows = _csv_rows(path)
    header = [name.strip() for name in next(rows, [])]
    names = (columns.images or "images_path", columns.prompt or "question", columns.answer or "answer")
    if missing := set(names) - set(header):
        found = ", ".join(header) or "none"
        hint = "; cells are told apart by commas" if len(header) == 1 else ""
        raise UserError(f"{path} has no column {', '.join(sorted(missing))}; its first line names: {found}{hint}")
    if len(set(header)) < len(header):
        raise UserError(f"{path}: its first line names a column twice: {', '.join(header)}")

    def placed(name: str) -> Folder:
        return image_dir / name if _exists(image_dir / name) else image_dir / "images" / name

    for number, cells in enumerate(rows, 2):  # row 1 is the header, and blank rows count: as a spreadsheet shows it
        source = f"{path} row {number}"
        if not cells:
            continue
        if len(cells) != len(header):
            yield source, "more or fewer cells than the first line names"
            continue
        row = dict(zip(header, cells))
        image, question, answer = (row.pop(name) for name in names)
        if not image.strip():
            yield source, "images_path is empty"
            continue
        yield parse_row(
            row | {"prompt": question, "answer": answer, "images": [image.strip()]}, source, placed, Columns()
        )


def _csv_rows(path: Folder) -> Iterator[list[str]]:
    reader = csv.reader(io.StringIO(read_text(path, "--data")), strict=True)
    try:
        yield from reader
    except csv.Error as error:  # a stray quote would swallow the rows after it
        raise UserError(f"{path}, in the row after line {reader.line_num}: a stray quote? ({error})") from None


# --- conversion -------------------------------------------------------------------------------------------------------


def easyr1_row(sample: Sample, output: pathlib.Path, number: int) -> dict:
    """`sample` as a row of the EasyR1 file `output`; a picture that is no file on disk becomes one beside it.

    Paths are relative to the output's folder where they lie below it, else absolute.
    """
    images = []
    for place, source in enumerate(sample.images):
        path = read_source(source)
        if not isinstance(path, str | pathlib.Path):
            folder = output.with_name(output.stem + "_images")
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{number:06d}-{place}.png"
            decode_image(source).save(path)
        path = pathlib.Path(os.path.abspath(path))
        base = pathlib.Path(os.path.abspath(output.parent))
        images.append(str(path.relative_to(base) if path.is_relative_to(base) else path))
    row = {"prompt": sample.prompt, "answer": sample.answer, "images": images}
    extra = {"system": sample.system} if sample.system else {}
    return row | extra | {name: value for name, value in sample.fields.items() if name not in row}
