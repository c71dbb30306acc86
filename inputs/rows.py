"""Read the rows of a data set in any of the formats below. The shape of each row is detected from the row itself.

    x.jsonl, x.json, x.parquet   EasyR1: {"prompt" or "problem": text with <image> tags, "answer", "images": [path, …]}
                                 R1-V, open-r1: {"problem", "solution": "<answer> 3 </answer>", "image"}
                                 Video-R1: {"problem", "options": ["A. …", …], "solution", "path", "data_type": "image"}
                                 veRL: {"prompt": [{role, content}], "images": [{bytes, path}],
                                        "reward_model": {ground_truth}, "extra_info": {question, …}}
                                 TRL: {"prompt": [{role, content: [{type: "image"}, …]}], "images", "solution"}
                                 SFT: {"messages" or "conversations": [{role, content} or {from, value}, …], "images"}
                                 ms-swift: {"messages": [{role, content}], "solution", "images"}, or "query", "response"
                                 VQA-RAD (OSF): {"image_name", "question", "answer", "answer_type", "phrase_type"}
                                 MMK12, vqa-rad: {"question", "image", "answer"}
    folder/, x.zip               counting: main.csv with images_path, question, answer, next to images/
    folder/, owner/name          a data set saved by `datasets`, or one on the hub; `NAME:CONFIG` selects a config

`@split` selects a split; the default is "train". Data sets separated by commas are mixed. `raw_rows` opens a data set
of any format, and `parse_row` turns a row of any shape into a `Sample`. Images inside tables stay on disk until they
are needed.
"""

import ast
import base64
import contextlib
import csv
import functools
import glob
import hashlib
import io
import itertools
import json
import math
import os
import pathlib
import re
import stat
import unicodedata
import urllib.parse
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from common import console, hub
from common.console import hide_credentials
from common.errors import UserError
from common.files import partial_path
from common.records import TAG, AnyPath, Cell, ImageSource, Sample, Turn
from config import Columns
from grading.answers import answer_part, last_boxed
from inputs.images import UNREADABLE, decode_image, read_source

if TYPE_CHECKING:  # imported only where it is used: the import takes a second, and most runs read text files
    import datasets


MAX_UNPACKED_BYTES = 8 * 2**30  # maximum unpacked size of a ZIP
MAX_FILE_BYTES = 2**28  # maximum unpacked size of one file in a ZIP; limited because images are decoded from memory
GROUP_BYTES = 2**28  # size of a row group of a Parquet file; above 2 GiB, images cannot be read again
FILE_TYPES = (".jsonl", ".json", ".parquet", ".zip")
SAVED = ("state.json", "dataset_dict.json")  # in a folder that `datasets` saved
CHAT_COLUMNS = ("conversations", "messages")
PROMPT_COLUMNS = ("prompt", *CHAT_COLUMNS, "problem", "question", "query")
ANSWER_COLUMNS = ("answer", "ground_truth", "solution", "response")
IMAGE_COLUMNS = ("images", "image")
ROLES = {"human": "user", "gpt": "assistant"}  # as ShareGPT and LLaVA call them
MAX_BLANK_ROWS = 2**20  # as many as an Excel sheet has rows: some exports write them all
IMAGE_NAME = re.compile("image|img|picture|photo|figure", re.IGNORECASE)
IMAGE_FILE = re.compile(r"(?i)data:image/|.*\.(png|jpe?g|webp|gif|bmp|tiff?)$")
OTHER_MEDIA = ("video", "videos", "audio", "audios")  # columns and tags of media that no model would receive
OTHER_NAME = re.compile("path|video|audio", re.IGNORECASE)
OTHER_FILE = re.compile(r"(?i).*\.(mp4|avi|mov|mkv|webm|mp3|wav|flac|m4a)$")
CODED = re.compile("ClassLabel|Json|float16|float32")  # features whose cells are not what they mean; see `_decoded`
# A text of JSON with a turn, a part of a turn, or a list of them: it begins like one and has its keys.
CHAT_TEXT = re.compile(
    r"""(?s)["\ufeff\s]*\[?\s*\{(?=.*["'](role|from|type)\\?["']\s*:)(?=.*["'](content|value|text|image)\\?["']\s*:)"""
)
OPTION = re.compile(r"\s*\(?([A-Z])[.):]\s*(.*?)\s*", re.DOTALL)  # "A. a cat"
OSF_IMAGES = "VQA_RAD Image Folder"  # image folder in the OSF archive of VQA-RAD
# of names that a ZIP does not mark as UTF-8
ZIP_ENCODINGS = ("utf-8", "gb18030", "big5hkscs", "cp932", "cp949", "cp866")
Locate = Callable[[str], AnyPath]  # returns where an image is, given its path in the row


class RowError(ValueError):
    """Raised for a row that cannot be used, or yielded in its place. The message states the problem."""


class Problem(NamedTuple):
    """A row that cannot be used, and the reason."""

    source: str
    message: str


def read_rows(data: str, image_dir: str | None = None, columns: Columns | None = None) -> Iterator[Sample | Problem]:
    """Yield the rows of `data` in order. Raises UserError when a data set cannot be read at all."""
    columns = columns or Columns()
    for source_index, spec in enumerate(data_sets(data)):
        for source, row, locate in raw_rows(spec, image_dir, columns=columns, split_json=True):
            try:
                sample = parse_row(row, source, locate, columns)
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
    yielded, as they are, unless `split_json` is set (see `_split_rows`). `columns` names the columns of a main.csv.
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
    if is_json:
        locate = functools.partial(_locate, (folder, folder / OSF_IMAGES))
        rows = _split_rows(path, split) if split_json else _json_rows(path)
    elif has_main_csv:
        root = open_zip(path) if suffix == ".zip" else path
        base = pathlib.Path(image_dir) if image_dir and root is path else root
        locate = functools.partial(_locate, (base, base / "images"))
        rows = _counting_rows(root / "main.csv", columns or Columns())
    else:
        locate = functools.partial(_locate, (folder, path))
        rows = _table_rows(open_table(name, split, default_split), spec, locate)
    for source, row in rows:
        yield source, row, locate


def split_config(name: str) -> tuple[pathlib.Path, str | None]:
    """Split FOLDER:CONFIG or owner/name:CONFIG; the configuration is None if `name` is a path or names none."""
    place, _, config = name.rpartition(":")
    return (pathlib.Path(place), config) if place and not os.path.exists(name) else (pathlib.Path(name), None)


def _locate(folders: Sequence[AnyPath], image: str) -> AnyPath:
    """Return the path of `image` in the first folder that has it, or in the first folder if none has it.

    Accented letters may be composed in the row and decomposed in the file's name, as in a ZIP file from a Mac. Python
    reads a name that a ZIP does not mark as UTF-8 as cp437, whatever encoding it is in.
    """
    forms = [image, *(unicodedata.normalize(form, image) for form in ("NFC", "NFD"))]
    read_as_cp437 = [form.encode(encoding, "replace").decode("cp437") for encoding in ZIP_ENCODINGS for form in forms]
    names = dict.fromkeys([*forms, *read_as_cp437])
    for folder, name in itertools.product(folders, names):
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
        raise UserError(f"cannot read {str(path)!r} ({error}): check --data") from None


# --- one row ----------------------------------------------------------------------------------------------------------


def parse_row(row: dict | RowError, source: str, locate: Locate, columns: Columns) -> Sample:
    """Turn a row of any supported shape into a sample. Raises RowError if the row cannot be used."""
    if isinstance(row, RowError):
        raise row
    row = dict(row)
    if media := next((name for name, value in row.items() if name.lower() in OTHER_MEDIA and value), None):
        raise RowError(f"a column is named '{media}', but only text and images are supported: remove it or the row")
    prompt_name = _column(row, PROMPT_COLUMNS, columns.prompt)
    image_columns = IMAGE_COLUMNS if prompt_name in CHAT_COLUMNS else (*IMAGE_COLUMNS, "image_name")
    for_teacher = [resolve_image(image, locate) for image in _images(row.pop("teacher_images", None))]
    images = _pop_images(row, _column(row, image_columns, columns.images))
    row = {name: value for name, value in row.items() if name not in image_columns or value}
    earlier, prompt, answer, turns_system, turn_images = _pop_texts(row, prompt_name, columns)
    system = row.pop("system", None)
    if system and turns_system:
        raise RowError("there are two system prompts: in the prompt and in the column 'system'")
    system = turns_system or system
    if not isinstance(prompt, str) or not prompt.strip():
        raise RowError("no prompt text: the question is empty, or it is not text")
    own = row.get("response")
    response = (
        own if isinstance(own, str) and own.strip() else answer if isinstance(answer, str) else answer_text(answer)
    )
    prompt, answer = _with_options(prompt, row.get("options")), answer_text(answer)
    if not isinstance(system, str | None):
        raise RowError("the system prompt is not text")
    system = system if system and system.strip() else None
    if re.search("[\ud800-\udfff]", "".join([*(turn.text for turn in earlier), prompt, answer, system or ""])):
        raise RowError("the prompt, answer or system prompt contains a broken character (half of a surrogate pair)")
    if isinstance(info := row.get("extra_info"), dict) and isinstance(info.get("question"), str):
        row.setdefault("question", info["question"])
    images = [resolve_image(image, locate) for image in images + turn_images or _other_images(row)]
    if for_teacher and len(for_teacher) != len(images):
        raise RowError(f"{len(for_teacher)} images in 'teacher_images', but {len(images)} for the model")
    turns = [*earlier, Turn("user", [prompt])]
    sample = Sample(turns, answer, source, drop_images(row), system, responses=[response], teacher_images=for_teacher)
    return place_images(sample, images)


def _other_images(row: dict) -> list:
    """Pop the images in the column "path" of a row that has no others, as in Video-R1.

    Raises RowError if another column seems to hold an image.
    """
    kind, path = row.get("data_type"), row.get("path")
    if kind in OTHER_MEDIA:
        raise RowError(f"'data_type' is '{kind}', but only text and images are supported: remove the row")
    if _holds_image(path) or (path and kind == "image"):
        return _images(row.pop("path"))
    for name, value in row.items():
        if IMAGE_NAME.search(name) and _holds_image(value):
            raise RowError(f"the column '{name}' seems to hold an image: name it with --image_column, or remove it")
        if OTHER_NAME.search(name) and OTHER_FILE.match(str(_first(value))):
            raise RowError(
                f"the column '{name}' holds a video or sound, but only text and images are supported: remove the row"
            )
    if kind == "image":
        raise RowError(
            "'data_type' is 'image', but no column has an image: name it with --image_column, or remove the row"
        )
    return []


def _first(value: object) -> object:
    return value[0] if isinstance(value, list) and value else value


def _holds_image(value: object) -> bool:
    """Return whether a column's value is an image or the path of one, or a list that begins with one."""
    first = _first(value)
    if isinstance(first, dict):
        return bool(first.get("bytes") or first.get("path"))
    return isinstance(first, bytes | Cell) or bool(isinstance(first, str) and IMAGE_FILE.match(first))


def _column(row: dict, defaults: tuple[str, ...], chosen: str | None) -> str | None:
    """Return the user's choice or, if none was made, the first default whose column is not empty."""
    if chosen is not None and chosen not in row:
        raise RowError(f"no column '{chosen}' (columns: {', '.join(row)})")
    return chosen or next((name for name in defaults if row.get(name) not in (None, [])), None)


def _pop_texts(row: dict, name: str | None, columns: Columns) -> tuple[list[Turn], object, object, object, list]:
    """Pop the prompt, called `name`, gold answer and system prompt.

    Returns the turns before the question, the question, answer and system prompt, and the images in the turns. If the
    assistant's turn ends a conversation, it is the gold answer unless the user has named its column, and a column
    "answer" is dropped. Otherwise the gold answer is in a column, as with other prompts.
    """
    if name is None:
        names = ", ".join(row) or "none; a folder of images needs a main.csv"
        raise RowError(f"no text under 'prompt', 'problem' or 'question' (columns: {names})")
    if name == "query" and row.get("history"):
        raise RowError("'history' holds earlier turns: write them and the question as a chat in 'messages'")
    answer_name = _column(row, ANSWER_COLUMNS, columns.answer)
    prompt, reply, system = _chat_in(row.pop(name)), None, None
    earlier, images = list[Turn](), list[Any]()
    if name in CHAT_COLUMNS:
        prompt, reply = _split_reply(prompt)
        if prompt is None or (reply is None and answer_name is None):
            problem = f"'{name}' is not a list of turns, or does not end with the assistant's answer"
            raise RowError(f"{problem}: add the answer there, or in a column 'answer'")
    if isinstance(prompt, list):
        earlier, prompt, system, images = _chat(prompt)
    if name in CHAT_COLUMNS and not earlier:
        prompt = re.sub(r"^(\s*(?:<image>\s*)*)Question:\s*", r"\1", prompt)
    if reply and columns.answer is None:
        if answer_text(row.get("solution")) not in ("", answer_text(reply)):
            raise RowError("the assistant's answer and 'solution' differ: remove one, or set --answer_column")
        row.pop("answer", None)
        return earlier, prompt, reply, system, images
    return earlier, prompt, _pop_answer(row, answer_name, columns), system, images


def _pop_answer(row: dict, name: str | None, columns: Columns) -> object:
    """Pop the gold answer from its column `name` or, unless the user has named the column, from veRL's."""
    reward_model = row.get("reward_model")
    if columns.answer is None and isinstance(reward_model, dict) and reward_model.get("ground_truth") is not None:
        return _first_item(row.pop("reward_model")["ground_truth"])
    answer = row.pop(name, None)
    return _first_item(answer) if name == "ground_truth" else answer


def _chat_in(text: object) -> Any:
    """Return the turns, or parts of a turn, in a text of JSON, and anything else unchanged. Raises RowError."""
    if not isinstance(text, str) or not CHAT_TEXT.match(text):
        return text
    try:
        items = json.loads(text)
    except (ValueError, RecursionError):
        raise RowError("a chat is stored as text that is not JSON: store it as a list of turns") from None
    return items if isinstance(items, list) else [items]


def _split_reply(turns: object) -> tuple[list | None, str | None]:
    """Return the turns before the assistant's last turn, and its text; or all turns and None if it is not the last.

    The turns are None if they are not a list.
    """
    if not isinstance(turns, list) or not turns:
        return None, None
    role, content = _turn(turns[-1])
    if role != "assistant":
        return turns, None
    reply, images = _text(content)
    if images:
        raise RowError("the assistant's turn contains an image")
    return turns[:-1], re.sub(r"^\s*Answer:\s*", "", reply)


def _with_options(prompt: str, options: object) -> str:
    """Return a question with the lettered `options` of its row, as in Video-R1, unless it contains them."""
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
        return prompt
    matches = [OPTION.fullmatch(option) for option in options]
    if None in matches or all(re.search(rf"\b{m[1]}[.):]\s*{re.escape(m[2])}", prompt) for m in matches):
        return prompt
    return "\n".join([prompt, "Options:", *options])


def _turn(turn: object) -> tuple[str | None, object]:
    """Return the role and content of a turn {role, content} or {from, value}; the role is None if it has none."""
    if not isinstance(turn, dict):
        return None, None
    role, content = (turn.get(new, turn.get(old)) for new, old in (("role", "from"), ("content", "value")))
    return (ROLES.get(role, role) if isinstance(role, str) else None), content


def _first_item(answer: object) -> object:
    """Return the first of several gold answers. Skywork-OR1 stores them as a list in text form."""
    try:
        items = ast.literal_eval(answer.strip()) if isinstance(answer, str) else None
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return answer
    if not isinstance(items, list) or not items:
        return answer
    # `[1, 2]` is an interval, but a list with a single item or with only texts is a list of answers
    return items[0] if len(items) == 1 or all(isinstance(item, str) for item in items) else answer


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


def _pop_images(row: dict, name: str | None) -> list:
    """Pop the images in the column `name`, or "image", and in those that differ from it only in their number."""
    stem = re.sub(r"[ _-]?\d+$", "", name or "image") or name
    matches = [re.fullmatch(rf"{re.escape(stem)}[ _-]?(\d*)", column) for column in row]
    numbered = sorted((int(match[1] or 0), match[0]) for match in matches if match)
    return [image for _, column in numbered for image in _images(row.pop(column))]


def _images(value: object) -> list:
    if value is None:
        return []
    images = value if isinstance(value, list) else [value]
    for image in images:
        if not isinstance(image, str | bytes | dict | Cell) or image == "":
            raise RowError("'images' is not a list of paths or images")
    return images


def _chat(turns: list) -> tuple[list[Turn], str, str | None, list]:
    """Return a chat's turns before the question, each with one text, the question, the system prompt and the images."""
    roles = [_turn(turn)[0] for turn in turns]
    first = int(roles[:1] == ["system"])
    if roles[first:] != (["user", "assistant"] * len(turns))[: len(turns) - first] or roles[-1:] != ["user"]:
        raise RowError("a prompt given as a chat must be user, assistant, …, user, optionally after one system turn")
    read, images = [], []
    for role, content in map(_turn, turns):
        text, turn_images = _text(content := _chat_in(content))
        if TAG in text and (role == "assistant" or (role == "system" and not isinstance(content, str))):
            raise RowError(f"the {role}'s turn contains an image")
        read.append(Turn(role, [text]))
        images += turn_images
    return read[first:-1], read[-1].text, read[0].text if first else None, images


def _text(content: object) -> tuple[str, list]:
    """Return a turn's text, with a tag for each of its images, and the images that the turn itself contains."""
    if isinstance(content, str):
        return content, []
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise RowError("a turn's 'content' is neither text nor a list of parts")
    text, images = "", []
    for part in content:
        if media := re.search("video|audio", " ".join([str(part.get("type")), *(name for name in part if part[name])])):
            raise RowError(f"a part of a turn is {media[0]}, but only text and images are supported: remove the row")
        if part.get("type") in ("image", "image_url"):
            names = ("image", "path", "image_path", "image_url", "url", "bytes")
            image = next((part[name] for name in names if part.get(name) is not None), None)
            images += _images(image["url"] if isinstance(image, dict) and "url" in image else image)
            text += TAG
        elif isinstance(part.get("text"), str):
            text += part["text"]
        else:
            raise RowError("a part of a turn is neither an image nor text")
    return text, images


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


# --- JSON -------------------------------------------------------------------------------------------------------------


def _json_rows(path: pathlib.Path) -> Iterator[tuple[str, dict | RowError]]:
    """Yield (source, row) for each row of a JSON file."""
    for number, row in _json_values(path):
        if not isinstance(row, dict | RowError):
            row = RowError("not an object with columns")
        yield f"{path} row {number}", row


def _split_rows(path: pathlib.Path, split: str | None) -> Iterator[tuple[str, dict | RowError]]:
    """Yield the rows of a JSON file. For VQA-RAD (OSF), whose file holds both splits, yield only the rows in `split`.

    Raises UserError if there is a `split`, but a row does not tell its own.
    """
    left_out = 0
    for source, row in _json_rows(path):
        if isinstance(row, RowError):
            yield source, row
            continue
        is_osf = "image_name" in row and "prompt" not in row
        if is_osf and isinstance(row.get("phrase_type"), str):
            row_split = "test" if row["phrase_type"].strip().startswith("test_") else "train"
            if row_split not in (split or "train").split("+"):
                left_out += 1
                continue
        elif split is not None:
            raise UserError(f"{source} has no 'phrase_type' column to tell its split: remove @{split}")
        types = [name for name in ("answer_type", "question_type") if is_osf and isinstance(row.get(name), str)]
        yield source, row | {name: row[name].strip() for name in types}
    if left_out and split is None:
        console.log(f"note: left out {left_out} rows of {path} that are in its test split; {path}@test reads them")


def _json_values(path: pathlib.Path) -> Iterator[tuple[int, object]]:
    """Yield (row number, value). For a line that is not JSON, the value is a RowError."""
    text = _read_text(path)
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


# --- tables -----------------------------------------------------------------------------------------------------------


def open_table(name: str, split: str | None, default_split: str) -> "datasets.Dataset":
    """Open a parquet file, a folder that `datasets` saved or can read, or a data set on the hub.

    The rows of the result are in Arrow format. When `split` is None and there are several splits, `default_split` is
    opened.
    """
    path, config = split_config(name)
    offline = not path.exists() and hub.go_offline_if_unreachable()
    import datasets  # after the line above, whose result it reads once

    try:
        loaded = _load(path, config, offline)
    except UserError:
        raise
    except Exception as error:
        cause = error.__cause__ or error  # `datasets` wraps an error of a file's reader
        reason = str(cause).strip().partition("\n")[0][:160]
        problem = f"no data at {name!r}: not a local path, and not on the hub or the hub cannot be reached"
        if path.exists():
            problem = f"no data in {name!r}: `datasets` cannot read it and it has no main.csv"
        raise UserError(f"{problem} ({type(cause).__name__}: {reason})") from error
    splits = loaded
    if isinstance(loaded, datasets.Dataset):  # a single split, which may have no name
        splits = {str(loaded.split or default_split): loaded, default_split: loaded}
    if split is None:
        split = default_split if default_split in splits or len(splits) > 1 else next(iter(splits))
    requested, present = split.split("+"), ", ".join(splits)
    if missing := ", ".join(part for part in requested if part not in splits):
        raise UserError(f"{name!r} has no split {missing}; it has {present}: write {name}@SPLIT")
    return datasets.concatenate_datasets([splits[part] for part in requested]).with_format("arrow")


def _load(path: pathlib.Path, config: str | None, offline: bool) -> "datasets.Dataset | datasets.DatasetDict":
    """Load what is at `path`, a file, a folder or a name on the hub. Raises UserError, or what `datasets` raises."""
    import datasets
    from pyarrow import parquet

    for file in [path] if path.is_file() else path.rglob("*.parquet"):
        if parquet.read_metadata(file).num_rows == 0:  # `datasets` cannot read it, neither alone nor beside others
            raise UserError(f"{file}: no usable row: the file has none; remove it")
    if path.is_file():
        return datasets.Dataset.from_parquet(glob.escape(str(path)))
    if any((path / name).is_file() for name in SAVED):
        return datasets.load_from_disk(str(path))
    source = (hub.cached_dataset(str(path)) if offline else None) or str(path)
    try:
        return datasets.load_dataset(source, config)
    except ValueError as error:
        if not str(error).startswith("Config name is missing"):
            raise
        configs = ", ".join(datasets.get_dataset_config_names(source))
        raise UserError(f"{path} has several configurations ({configs}): write {path}:CONFIG") from None


def _table_rows(table: "datasets.Dataset", name: str, locate: Locate) -> Iterator[tuple[str, dict]]:
    """Yield the rows of a table with a `Cell` for each image. Images are counted without being read."""
    from pyarrow import ListScalar

    coded = {column for column, feature in table.features.items() if CODED.search(repr(feature))}
    for start in range(0, len(table), 1000):
        batch = table[start : start + 1000]
        image_columns = [field.name for field in batch.schema if _holds_images(field.type)]
        for i, row in enumerate(batch.drop_columns(image_columns).to_pylist()):
            row |= {column: _decoded(row[column], table.features[column]) for column in coded & row.keys()}
            for column in image_columns:
                cell = batch.column(column)[i]
                row[column] = Cell(table, start + i, column, None, locate) if cell.is_valid else None
                if cell.is_valid and isinstance(cell, ListScalar):
                    row[column] = [Cell(table, start + i, column, index, locate) for index in range(len(cell.values))]
            yield f"{name} row {start + i + 1}", row


def _decoded(value: Any, feature: Any) -> Any:
    """Return what a cell of this feature means: the name of a class, a float32 as it is written, an object in JSON.

    A class without a name, such as the -1 of rows without labels, is None.
    """
    if value is None or isinstance(feature, dict):
        return value and {name: _decoded(value[name], part) for name, part in feature.items()}
    if hasattr(feature, "feature"):  # a list
        return [_decoded(item, feature.feature) for item in value]
    if hasattr(feature, "names"):
        return dict(enumerate(feature.names)).get(value)
    if type(feature).__name__ == "Json":
        return json.loads(value)
    return float(str(np.dtype(feature.dtype).type(value))) if CODED.search(feature.dtype) else value


def _holds_images(arrow_type: Any) -> bool:
    """Return whether a column of this Arrow type holds images: {bytes, path}, bytes, or a list of either."""
    image_type = getattr(arrow_type, "value_type", arrow_type)
    return str(image_type) in ("binary", "large_binary") or "bytes" in getattr(image_type, "names", ())


# --- counting ---------------------------------------------------------------------------------------------------------


def open_zip(path: pathlib.Path) -> zipfile.Path:
    """Find main.csv in the root of a ZIP or one level below, and return its folder. The ZIP is never unpacked.

    Links, paths that point outside the ZIP, and large files are refused.
    """
    try:
        archive = zipfile.ZipFile(path)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} has a file name that is not UTF-8 ({error}): rename the file, pack again") from None
    except UNREADABLE as error:
        raise UserError(f"{path} is not a readable ZIP ({error})") from None
    _check_members(path, archive)
    root = zipfile.Path(archive)
    folders = [folder for folder in (root, *root.iterdir()) if folder.name != "__MACOSX"]
    matches = [folder for folder in folders if (folder / "main.csv").is_file()]
    if len(matches) != 1:
        number = len(matches) or "no"
        raise UserError(f"{path} has {number} main.csv files: put one at its root or in a folder directly below it")
    return matches[0]


def _check_members(path: pathlib.Path, archive: zipfile.ZipFile) -> None:
    """Raise UserError for files that are too large, links, and names that are unsafe, unusual or repeated."""
    total = sum(member.file_size for member in archive.infolist())
    if total > MAX_UNPACKED_BYTES:
        limit = MAX_UNPACKED_BYTES / 2**30
        raise UserError(f"{path} would unpack to {total / 2**30:.1f} GiB; the limit is {limit:.0f} GiB")
    for member in archive.infolist():
        name = member.filename
        if not member.flag_bits & 0x800:  # not UTF-8: a byte like a backslash may be half of a character
            name = re.sub(r"(?<=[^\0-\x7f])\\", "_", name)
        where, names = f"{path}: {name!r}", name.replace("\\", "/").split("/")
        if names[0] == "" or ".." in names or ":" in names[0]:
            raise UserError(f"{where} points outside the ZIP; leave it out")
        if "\\" in name:
            raise UserError(f"{where} has a backslash: pack the ZIP again with a program that separates names by '/'")
        if stat.S_ISLNK(member.external_attr >> 16):
            raise UserError(f"{where} is a link; put the file itself into the ZIP")
        if member.file_size > MAX_FILE_BYTES:
            size, limit = member.file_size / 2**20, MAX_FILE_BYTES / 2**20
            raise UserError(f"{where} would unpack to {size:.0f} MiB; the limit for one file is {limit:.0f} MiB")
    if len(set(archive.namelist())) < len(archive.namelist()):
        raise UserError(f"{path} holds a file twice: pack it again")


def _counting_rows(path: AnyPath, columns: Columns) -> Iterator[tuple[str, dict | RowError]]:
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


# --- conversion -------------------------------------------------------------------------------------------------------


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
    read = (*row, *IMAGE_COLUMNS, "image_name", "reward_model")  # `parse_row` would take these for what is in `row`
    return row | {name: value for name, value in sample.fields.items() if name not in read}


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
