"""Read the rows of a data set: plain ones here, all others in parts/formats.

    x.jsonl, x.json    {"prompt": text with <image> tags, "answer", "images": [path, …]}, and further columns
    folder/            counting: main.csv with images_path, question, answer, next to images/

parts/formats reads rows of every other shape (R1-V, veRL, TRL, SFT, …), ZIP files, Parquet files and the hub. `@split`
selects a split, by default "train"; commas separate data sets. `raw_rows` opens one, `parse_row` makes a `Sample`.
"""

import base64
import contextlib
import csv
import functools
import io
import itertools
import json
import math
import os
import pathlib
import re
import unicodedata
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from common.console import hide_credentials
from common.errors import UserError
from common.records import TAG, AnyPath, Cell, ImageSource, Sample, Turn
from config import Columns
from grading.answers import answer_part, last_boxed
from inputs.images import UNREADABLE

FILE_TYPES = (".jsonl", ".json", ".parquet", ".zip")
SAVED = ("state.json", "dataset_dict.json")  # in a folder that `datasets` saved
MAX_BLANK_ROWS = 2**20  # as many as an Excel sheet has rows: some exports write them all
OTHER_MEDIA = ("video", "videos", "audio", "audios")  # columns and tags of media that no model would receive
# Columns of rows that are not plain: what they hold belongs to the prompt, the answer or the images.
NOT_PLAIN = re.compile(
    "(?i)images?[ _-]?\\d*|image_name|videos?|audios?|response|data_type|messages|conversations|reason.*|think.*"
    "|thoughts?|.*(history|options?|choices?|calls?)([ _-]?[a-j\\d]+)?|(op)?[ _-]?[a-j]|tools|functions|loss"
)
is_special = functools.lru_cache(NOT_PLAIN.fullmatch)  # data sets have few columns
CODED = re.compile(r"(?i)\s*(data(:|%3A)|image/.*;|base64,|b'|iVBOR|[/_]9j|%2F9j|R0lGOD|UklGR|SUkq|TU0AK|Qk)")  # base64
FILE = re.compile(CODED.pattern + r"|.*\.(png|jpe?g|webp|gif|bmp|tiff?|mp[34]|avi|mov|mkv|webm|wav|flac|m4a)$|\s*\[")
CHAT = re.compile(r"""(?s)["\ufeff\s]*+\[?\s*+\{.*["'](role|from|type)\\?["']\s*:""")  # in a text of JSON
OSF_IMAGES = "VQA_RAD Image Folder"  # image folder in the OSF archive of VQA-RAD
Locate = Callable[[str], AnyPath]  # returns where an image is, given its path in the row


class RowError(ValueError):
    """Raised for a row that cannot be used, or yielded in its place. The message states the problem."""


class Problem(NamedTuple):
    """A row that cannot be used, and the reason."""

    source: str
    message: str


def read_rows(
    data: str, image_dir: str | None = None, columns: Columns | None = None, processor: Any = None
) -> Iterator[Sample | Problem]:
    """Yield the rows of `data` in order. Raises UserError when a data set cannot be read at all."""
    columns = columns or Columns()
    for source_index, spec in enumerate(data_sets(data)):
        for source, row, locate in raw_rows(spec, image_dir, columns=columns, split_json=True):
            try:
                sample = parse_row(row, source, locate, columns, processor)
                sample.source_index = source_index
                yield sample
            except RowError as error:
                yield Problem(source, str(error))


def data_sets(data: str) -> list[str]:
    """Split `data` at its commas. The path of an existing file or folder may contain commas and is not split."""
    specs = [data] if os.path.exists(data) else [spec.strip() for spec in data.split(",")]
    if not all(specs):
        raise UserError(f"--data {data!r} has an empty entry: check the commas")
    return specs


def raw_rows(
    spec: str,
    image_dir: str | None = None,
    default_split: str = "train",
    columns: Columns | None = None,
    split_json: bool = False,
) -> Iterator[tuple[str, dict | RowError, Locate]]:
    """Yield (source, row, locate) for each row of one data set. A row that is not a dictionary is a RowError.

    `default_split` is read when there are several splits and `spec` has no `@split`. The rows of a JSON file are all
    yielded, as they are, unless `split_json` is set (see `split_rows`). `columns` names the columns of a main.csv.
    """
    name, split = spec, None
    if "@" in spec and not pathlib.Path(spec).exists():
        name, split = spec.rsplit("@", 1)
    path, config = split_config(name)
    suffix = "" if path.is_dir() else path.suffix.lower()
    if path.is_file() != (suffix in FILE_TYPES) or suffix == ".csv":
        kinds = "a folder or a .jsonl, .json, .parquet or .zip file; for a main.csv, give its folder"
        raise UserError(f"no data at {name!r}: it is not {kinds}")
    folder = pathlib.Path(image_dir or (path.parent if path.exists() else ""))
    is_json, has_main_csv = suffix in (".json", ".jsonl"), suffix == ".zip" or (path / "main.csv").is_file()
    if split is not None and (has_main_csv or (is_json and not split_json)):
        raise UserError(f"{name!r} has no splits: remove @{split}")
    if config and (path.is_file() or any((path / name).is_file() for name in ("main.csv", *SAVED))):
        raise UserError(f"{str(path)!r} has no configurations: remove :{config}")
    text = _read_text(path) if is_json else ""
    if is_json:
        locate: Locate = functools.partial(locate_image, (folder, folder / OSF_IMAGES))
        rows, is_plain_file = _json_rows(path, text), not (split_json and (split or '"phrase_type"' in text))
    elif is_plain_file := has_main_csv and suffix != ".zip":
        base = pathlib.Path(image_dir or path)
        locate = functools.partial(locate_image, (base, base / "images"))
        rows = counting_rows(path / "main.csv", columns or Columns())
    if not is_plain_file:
        from parts.formats import open_rows, split_rows

        if is_json:
            rows = split_rows(rows, path, split)
        else:
            rows, locate = open_rows(spec, name, split, default_split, folder, columns or Columns())
    for source, row in rows:
        yield source, row, locate


def split_config(name: str) -> tuple[pathlib.Path, str | None]:
    """Split FOLDER:CONFIG or owner/name:CONFIG; the configuration is None if `name` is a path or names none."""
    place, _, config = name.rpartition(":")
    return (pathlib.Path(place), config) if place and not os.path.exists(name) else (pathlib.Path(name), None)


def locate_image(folders: Sequence[AnyPath], image: str, more: Callable[[str], list[str]] = lambda _: []) -> AnyPath:
    """Return the path of `image` in the first folder that has it, or in the first folder if none has it.

    Accented letters may be composed in the row and decomposed in the file's name. `more` returns further names.
    """
    names = [image, *(unicodedata.normalize(form, image) for form in ("NFC", "NFD"))]
    names += [other for name in names for other in more(name)]
    for folder, name in itertools.product(folders, dict.fromkeys(names)):
        with contextlib.suppress(OSError):  # for example, a file name that is too long
            if (folder / name).exists():
                return folder / name
    return folders[0] / image


def _read_text(path: str | AnyPath) -> str:
    """Read a UTF-8 text file that the user named with `--data`. Raises UserError when it cannot be read."""
    try:
        return (pathlib.Path(path) if isinstance(path, str) else path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{str(path)!r} is not UTF-8 text ({error}): save it as UTF-8") from None
    except UNREADABLE as error:
        raise UserError(f"cannot read {str(path)!r} ({error}): check the file") from None


# --- one row ----------------------------------------------------------------------------------------------------------


def parse_row(row: dict | RowError, source: str, locate: Locate, columns: Columns, processor: Any = None) -> Sample:
    """Turn a row into a sample, with places in the coordinates of `processor`'s model. Raises RowError if it is bad."""
    if isinstance(row, RowError):
        raise row
    names = [columns.prompt or "prompt", columns.answer or "answer", columns.images or "images"]
    if not is_plain(row, names):
        from parts.formats import as_sample

        return as_sample(row, source, locate, columns, processor)
    row = dict(row)
    prompt, answer, images, system = (row.pop(name, None) for name in [*names, "system"])
    sample = make_sample([], prompt, answer_text(answer), system, row, source)
    sample.responses = [answer if isinstance(answer, str) else sample.answer]
    return place_images(sample, [resolve_image(image, locate) for image in images or []])


def is_plain(row: dict, names: list[str]) -> bool:
    """Return whether a row has a text, an answer and perhaps paths of images in the columns `names`, in this order.

    Its other columns have ordinary names (not `NOT_PLAIN`) and hold numbers and texts, but no file, image or list.
    """
    prompt, answer, images = names
    others = {name: value for name, value in row.items() if name not in names}
    paths = row.get(images, None if images == "images" else "a column that the user names must be there")
    has_texts = isinstance(row.get(prompt), str) and isinstance(row.get(answer), str | int | float)
    has_paths = isinstance(paths, list | None) and all(type(x) is str and x and not CODED.match(x) for x in paths or [])
    if not (has_texts and has_paths) or CHAT.match(row[prompt]) or any(map(is_special, others)):
        return False
    return all(isinstance(x, int | float | None) or (isinstance(x, str) and not FILE.match(x)) for x in others.values())


def make_sample(earlier: list[Turn], prompt: Any, answer: str, system: Any, fields: dict, source: str) -> Sample:
    """Return a sample without its images; `earlier`: the turns before the question. Raises RowError for a bad text."""
    if not isinstance(prompt, str) or not prompt.strip():
        raise RowError("no prompt text: the question is empty, or it is not text")
    if not isinstance(system, str | None):
        raise RowError("the system prompt is not text")
    system = system if system and system.strip() else None
    if re.search("[\ud800-\udfff]", "".join([*(turn.text for turn in earlier), prompt, answer, system or ""])):
        raise RowError("the prompt, answer or system prompt contains a broken character (half of a surrogate pair)")
    return Sample([*earlier, Turn("user", [prompt])], answer, source, drop_images(fields), system)


def answer_text(answer: object) -> str:
    """Return the final answer in a text, or a number as text: 3 for 3.0, 0.00005 for 5e-05. Raises RowError."""
    if isinstance(answer, bool):
        raise RowError(f"'answer' is {str(answer).lower()}: write the expected answer as text, such as 'yes' or 'no'")
    if not isinstance(answer, str | int | float | Decimal | None):
        raise RowError(f"'answer' is neither text nor a number: {str(answer)[:40]}")
    if isinstance(answer, float) and math.isinf(answer):
        raise RowError("'answer' is infinite, or too large for a number: write it as text")
    if answer is None or answer != answer:  # tables have NaN in empty cells
        return ""
    if isinstance(answer, float | Decimal):
        exact = Decimal(str(answer))
        answer = int(exact) if exact == int(exact) and abs(exact) < 10**16 else str(exact).lower()
    return _final_answer(str(answer))


def _final_answer(text: str) -> str:
    """Return the answer in a text that may give reasons before it.

    It is the last `<answer>` block, or what follows `</think>`. In a solution, it is the content of the only
    `\\boxed{…}`, or what follows `####` in the last line (GSM8K).
    """
    text = answer_part(re.sub(r"(?i)</?(?:think|answer)>", lambda tag: tag[0].lower(), text))
    last_line = text.rpartition("\n")[2]
    if last_line.startswith("#### "):
        return last_line[5:].strip()
    boxed = last_boxed(text) if text.count("\\boxed") == 1 else None
    return text if boxed is None else boxed.strip()


def resolve_image(image: object, locate: Locate) -> ImageSource:
    """Locate an image that is given by its path, and decode a data: URL. Other images are returned unchanged."""
    if isinstance(image, dict):
        for name, kind in (("bytes", bytes), ("path", str)):
            if not isinstance(image.get(name), kind | None):
                raise RowError(f"an image's '{name}' value is not {'text' if kind is str else 'bytes'}")
        return image if image.get("bytes") is not None or image.get("path") is None else locate(image["path"])
    if isinstance(image, str) and image.startswith("data:"):
        try:
            return base64.b64decode(image.partition(",")[2], validate=True)
        except ValueError:
            raise RowError("an image is a data: URL with invalid base64") from None
    if not isinstance(image, str):
        return image
    if re.match("(?i)https?://", image):
        raise RowError(f"images are not downloaded: save {hide_credentials(image[:200])} as a file")
    return locate(urllib.parse.unquote(image[7:]) if image.lower().startswith("file://") else image)


def place_images(sample: Sample, images: list[ImageSource]) -> Sample:
    """Cut each turn of `sample`, which is one text, at its tags, and put `images` there; without tags, they come first.

    Raises RowError if a prompt has tags, but not one per image.
    """
    if "completion" in sample.fields:
        raise RowError("a column is named 'completion', the rewards' name for the model's text: rename the column")
    if tag := re.search(rf"<({'|'.join(OTHER_MEDIA)})>", "\n".join(sample.texts)):
        raise RowError(f"{tag[0]} in the prompt, but only text and images are supported: remove the tag or the row")
    if images and not any(TAG in text for text in sample.texts):
        sample.turns[0].content[0] = TAG * len(images) + sample.turns[0].text
    if (tags := "\n".join(sample.texts).count(TAG)) != len(images):
        raise RowError(f"{tags} {TAG} tags in the prompt but {len(images)} images")
    remaining = iter(images)
    for turn in sample.turns:
        pieces = re.split(f"({TAG})", turn.text)
        turn.content[:] = [next(remaining) if piece == TAG else piece for piece in pieces if piece]
    return sample


def drop_images(row: dict) -> dict:
    """Return all columns of a row except images, which rewards cannot use and JSON cannot hold."""

    def has_image(value: object) -> bool:
        return isinstance(value, Cell | bytes) or (isinstance(value, list) and any(map(has_image, value)))

    return {name: value for name, value in row.items() if not has_image(value)}


# --- files ------------------------------------------------------------------------------------------------------------


def _json_rows(path: pathlib.Path, text: str) -> Iterator[tuple[str, dict | RowError]]:
    """Yield (source, row) for each row of a JSON file."""
    for number, row in _json_values(path, text):
        if not isinstance(row, dict | RowError):
            row = RowError("not an object with columns")
        yield f"{path} row {number}", row


def _json_values(path: pathlib.Path, text: str) -> Iterator[tuple[int, object]]:
    """Yield (row number, value). For a line that is not JSON, the value is a RowError."""
    if path.suffix.lower() == ".json":
        try:
            rows = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} is not JSON ({error}); if each line is one row, name it .jsonl") from None
        if not isinstance(rows, list):
            raise UserError(f"{path} is not a JSON list of rows")
        yield from enumerate(rows, 1)
        return
    if text.lstrip().startswith("[\n") or text.startswith("[{"):
        raise UserError(f"{path} is a JSON list: name it .json")
    number, end = 1, 0
    for line in re.finditer(r"[^\n]+", text):  # skips blank lines, possibly millions, without a loop over them
        number, end = number + text.count("\n", end, line.start()), line.start()
        if line[0].strip():
            try:
                yield number, json.loads(line[0])
            except (ValueError, RecursionError) as error:
                yield number, RowError(f"not JSON ({error})")


def counting_rows(path: AnyPath, columns: Columns) -> Iterator[tuple[str, dict | RowError]]:
    """Yield the rows of main.csv under the column names that `parse_row` expects."""
    image, prompt = columns.images or "images_path", columns.prompt or "question"
    reader, num_blank = csv.reader(io.StringIO(_read_text(path)), strict=True), 0
    try:
        header = [name.strip() for name in next(reader, [])]
        if missing := ", ".join(sorted({image, prompt, columns.answer or "answer"} - set(header))):
            present = ", ".join(header) or "none"
            raise UserError(f"{path} has no column {missing} (columns: {present}); cells must be separated by commas")
        if len(set(header)) < len(header):
            raise UserError(f"{path}: a column appears twice in the header: {', '.join(header)}")
        for number, cells in enumerate(reader, 2):  # numbered as in a spreadsheet: the header and blank rows count
            if not any(map(str.strip, cells)):
                num_blank += 1
                if num_blank > MAX_BLANK_ROWS:
                    raise UserError(f"{path} has more than {MAX_BLANK_ROWS:,} blank rows: remove them")
                continue
            row: dict[str, Any] = dict(zip(header, cells))
            source = f"{path} row {number}"
            if len(cells) != len(header):
                yield source, RowError("more or fewer cells than columns in the header")
            elif not row[image].strip():
                yield source, RowError(f"{image} is empty")
            else:
                row[columns.images or "images"] = [row.pop(image).strip()]
                row[columns.prompt or "prompt"] = row.pop(prompt)
                yield source, row
    except csv.Error as error:  # with a stray quote, the next rows would become part of this cell
        raise UserError(f"{path}: bad row after line {reader.line_num} ({error}): is there a stray quote?") from None
