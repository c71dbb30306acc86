"""Rows of every shape but the plain one, as a sample: chats, columns of other names, options, images in many forms.

EasyR1, R1-V, open-r1        {"problem", "answer" or "solution": "<answer> 3 </answer>", "image"}
Video-R1                     {"problem", "options": ["A. …", …], "solution", "path", "data_type": "image"}
veRL                         {"prompt": [{role, content}], "images": [{bytes, path}],
                              "reward_model": {ground_truth}, "extra_info": {question, …}}
TRL                          {"prompt": [{role, content: [{type: "image"}, …]}], "images", "solution"}
SFT                          {"messages" or "conversations": [{role, content} or {from, value}, …], "images"}
ms-swift                     {"messages": [{role, content}], "solution", "images"}, or "query", "response"
VQA-RAD (OSF)                {"image_name", "question", "answer", "answer_type", "phrase_type"}
MMK12, vqa-rad               {"question", "image", "answer"}
"""

import ast
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from common import console
from common.errors import UserError
from common.records import TAG, Cell, Sample, Turn
from config import Columns
from inputs.rows import OTHER_MEDIA, Locate, RowError, answer_text, make_sample, place_images, resolve_image
from parts.formats.beside import check_reply, refuse_beside, refuse_in_turn, with_reasoning
from parts.formats.choices import with_choices
from parts.formats.encoded import PICTURE, decoded
from parts.formats.places import with_places

CHAT_COLUMNS = ("conversations", "messages")
PROMPT_COLUMNS = ("prompt", *CHAT_COLUMNS, "problem", "question", "query")
ANSWER_COLUMNS = ("answer", "ground_truth", "solution", "response")
IMAGE_COLUMNS = ("images", "image")
ROLES = {"human": "user", "gpt": "assistant"}  # as ShareGPT and LLaVA call them
IMAGE_NAME = re.compile("image|img|picture|photo|figure", re.IGNORECASE)
IMAGE_FILE = re.compile(rf"(?i:data:image/|.*\.(png|jpe?g|webp|gif|bmp|tiff?)$)|{PICTURE}")
OTHER_NAME = re.compile("path|video|audio", re.IGNORECASE)
OTHER_FILE = re.compile(r"(?i).*\.(mp4|avi|mov|mkv|webm|mp3|wav|flac|m4a)$")
# A text of JSON with a turn, a part of a turn, or a list of them: it begins like one and has its keys.
CHAT_TEXT = re.compile(
    r"""(?s)["\ufeff\s]*+\[?\s*+\{(?=.*["'](role|from|type)\\?["']\s*:)(?=.*["'](content|value|text|image)\\?["']\s*:)"""
)


def as_sample(row: dict, source: str, locate: Locate, columns: Columns, processor: Any = None) -> Sample:
    """Turn a row of any supported shape into a sample. Raises RowError if the row cannot be used.

    Boxes and points are converted to what the model of a `data.Processor` writes; without one, they stay as they are.
    """
    row = dict(row)
    if media := next((name for name, value in row.items() if name.lower() in OTHER_MEDIA and value), None):
        raise RowError(f"a column is named '{media}', but only text and images are supported: remove it or the row")
    prompt_name = _column(row, PROMPT_COLUMNS, columns.prompt)
    image_columns = IMAGE_COLUMNS if prompt_name in CHAT_COLUMNS else (*IMAGE_COLUMNS, "image_name")
    for_teacher = [resolve_image(image, locate) for image in _images(row.pop("teacher_images", None))]
    images = _pop_images(row, _column(row, image_columns, columns.images))
    beside = row.get("image") if images and columns.images is None else None
    if _holds_image(beside) and any(image not in images for image in _images(beside)):
        raise RowError("'images' and 'image' differ: put all images into 'images', or set --columns images=NAME")
    row = {name: value for name, value in row.items() if name not in image_columns or value}
    earlier, prompt, answer, turns_system, turn_images = _pop_texts(row, prompt_name, columns)
    system = row.pop("system", None)
    if system and turns_system:
        raise RowError("there are two system prompts: in the prompt and in the column 'system'")
    system = turns_system or system
    response = answer if isinstance(answer, str) else answer_text(answer)
    if row.get("response") is not None:  # sft.py refuses an empty one
        response = row["response"] if isinstance(row["response"], str) else ""
    refuse_beside(row)
    response, answer = with_reasoning(response, row), answer_text(answer)
    prompt = with_choices(prompt, row, answer) if isinstance(prompt, str) else None
    info = row.get("extra_info")
    if isinstance(info, dict) and isinstance(info.get("question"), str):
        row.setdefault("question", info["question"])
    images = [resolve_image(image, locate) for image in images + turn_images or _other_images(row, locate)]
    if for_teacher and len(for_teacher) != len(images):
        raise RowError(f"{len(for_teacher)} images in 'teacher_images', but {len(images)} for the model")
    sample = make_sample(earlier, prompt, answer, system, row, source)
    sample.responses, sample.teacher_images = [response], for_teacher
    return with_places(place_images(sample, images), processor)


def _other_images(row: dict, locate: Locate) -> list:
    """Pop the images in the column "path" of a row that has no others, as in Video-R1.

    Raises RowError if another column seems to hold an image: by its name, or because the image is there.
    """
    kind, path = row.get("data_type"), row.get("path")
    if kind in OTHER_MEDIA:
        raise RowError(f"'data_type' is '{kind}', but only text and images are supported: remove the row")
    if _holds_image(path) or (path and kind == "image"):
        return _images(row.pop("path"))
    for name, value in row.items():
        if _holds_image(value) and (IMAGE_NAME.search(name) or _is_there(_first(value), locate)):
            raise RowError(
                f"the column '{name}' seems to hold an image: name it with --columns images=NAME, or remove it"
            )
        if OTHER_NAME.search(name) and OTHER_FILE.match(str(_first(value))):
            raise RowError(
                f"the column '{name}' holds a video or sound, but only text and images are supported: remove the row"
            )
    if kind == "image":
        raise RowError(
            "'data_type' is 'image', but no column has an image: name it with --columns images=NAME, or remove the row"
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


def _is_there(image: object, locate: Locate) -> bool:
    """Return whether `image` is more than a name: bytes, or the path of a file that exists."""
    if isinstance(image, str):
        return not image.startswith("data:") and locate(image).is_file()
    return bool(image.get("bytes")) if isinstance(image, dict) else True


def _column(row: dict, defaults: tuple[str, ...], chosen: str | None) -> str | None:
    """Return the user's choice or, if none was made, the first default whose column is not empty."""
    if chosen is not None and chosen not in row:
        raise RowError(f"no column '{chosen}' (columns: {', '.join(row)})")
    return chosen or next((name for name in defaults if row.get(name) not in (None, [], "")), None)


def _pop_texts(row: dict, name: str | None, columns: Columns) -> tuple[list[Turn], object, object, object, list]:
    """Pop the prompt, called `name`, gold answer and system prompt.

    Returns the turns before the question, the question, answer and system prompt, and the images in the turns. If the
    assistant's turn ends a conversation, it is the gold answer unless the user has named its column, and a column
    "answer" is dropped. Otherwise the gold answer is in a column, as with other prompts.
    """
    if name is None:
        names = ", ".join(row) or "none; a folder of images needs a main.csv"
        raise RowError(f"no text under 'prompt', 'problem' or 'question' (columns: {names})")
    answer_name = _column(row, ANSWER_COLUMNS, columns.answer)
    prompt, reply, system = row.pop(name), None, None
    earlier: list[Turn] = []
    images: list = []
    prompt = _chat_in(prompt)
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
            raise RowError("the assistant's answer and 'solution' differ: remove one, or set --columns answer=NAME")
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


def _chat_in(text: object) -> object:
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
    check_reply(turns[-1])
    reply, images = _text(content)
    if images:
        raise RowError("the assistant's turn contains an image")
    return turns[:-1], with_reasoning(re.sub(r"^\s*Answer:\s*", "", reply), turns[-1], is_turn=True)


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


def _pop_images(row: dict, name: str | None) -> list:
    """Pop the images in the column `name`, or "image", and in those that differ from it only in their number."""
    stem = re.sub(r"[ _-]?\d+$", "", name or "image") or name
    own = [column for column in row if column.startswith(stem)]
    matches = [(re.fullmatch(r"[ _-]?(\d*)", column[len(stem) :]), column) for column in own]
    numbered = sorted((int(match[1] or 0), column) for match, column in matches if match)
    return [image for _, column in numbered for image in _images(row.pop(column))]


def _images(value: object) -> list:
    if value is None:
        return []
    images = value if isinstance(value, list) else [value]
    for image in images:
        if not isinstance(image, str | bytes | dict | Cell) or image == "":
            raise RowError("'images' is not a list of paths or images")
    return [decoded(image) for image in images]


def _chat(turns: list) -> tuple[list[Turn], str, str | None, list]:
    """Return a chat's turns before the question, each with one text, the question, the system prompt and the images."""
    roles = [_turn(turn)[0] for turn in turns]
    first = int(roles[:1] == ["system"])
    if roles[first:] != (["user", "assistant"] * len(turns))[: len(turns) - first] or roles[-1:] != ["user"]:
        raise RowError("a prompt given as a chat must be user, assistant, …, user, optionally after one system turn")
    read, images = [], []
    for turn in turns:
        role, content = _turn(turn)
        refuse_in_turn(turn, role)
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
        if re.search("think|reason|tool", str(part.get("type"))):
            raise RowError(
                f"a part of a turn is '{part['type']}': write a reasoning as 'reasoning_content' of its turn"
            )
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


def split_rows(
    rows: Iterator[tuple[str, dict | RowError]], path: pathlib.Path, split: str | None
) -> Iterator[tuple[str, dict | RowError]]:
    """Yield `rows`, those of a JSON file; of VQA-RAD (OSF), whose file holds both splits, only those in `split`.

    Raises UserError if there is a `split`, but a row does not tell its own.
    """
    left_out = 0
    for source, row in rows:
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
