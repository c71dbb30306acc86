"""The choices of a row, which its question then shows: "A. cat", bare, in a dictionary, as text, in columns A, B, …"""

import ast
import functools
import json
import re
from collections.abc import Iterator, Sequence

from inputs.rows import RowError
from parts.formats.beside import carries

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
USUAL = LETTERS[:10]  # others are letters of choices only if there are as many
# Of a column: with all choices, and with one of them (A, option_b, opc, choice1).
is_list = functools.lru_cache(
    re.compile(r"(?i)((multiple[ _-]?choice|answer|mc)[ _-]?)?(options|choices)|option|choice").fullmatch
)
is_one = functools.lru_cache(
    re.compile(r"(?i)(?:options?|choices?|op)?[ _-]?([a-j])|(?:options?|choices?)[ _-]?(\d+)").fullmatch
)
LETTERED = re.compile(r"\s*[(\[]?([A-Z])[\]):.、．：）]+\s*(.*?)\s*", re.DOTALL | re.IGNORECASE)  # "A. a cat"
INLINE = re.compile(r"(?:^|[\s,;|]+)[(\[]?([A-Za-z])\s?[\]):.、．：）]+\s*")  # "A. a cat B. a dog"
ONE = re.compile(r"[(\[]?([A-Za-z])(?:[\]):.、．：）]+(?:\s.*)?)?", re.DOTALL)  # an answer: "B", "(b)", "B. a dog"
SEVERAL = re.compile(r"[A-J](?:[\s,;&/]*[A-J])+")  # "A, C"
LABELS = ("label", "letter", "key", "id", "option_id")
TEXTS = ("text", "content", "value", "option", "choice", "answer")
Choice = tuple[str | None, str]  # the letter, if the row gives one, and the text


def with_choices(prompt: str, row: dict, answer: str) -> str:
    """Return a question with the choices of its row, unless it shows them. Raises RowError if they cannot be shown.

    Lettered choices ("A. …") are shown as they are, as in Video-R1. In another form, they are shown if the gold answer
    is a letter, which would mean nothing without them.
    """
    for name in filter(is_list, row):
        value = row[name]
        if isinstance(value, str | list | dict) and carries(value) and not _is_letter(value):
            return _shown(prompt, name, value, answer)
    if not _letters(answer, []):
        return prompt
    columns = _in_columns(row)
    letters = _letters(answer, columns)
    return _append(prompt, columns) if letters and letters <= {letter for letter, _ in columns} else prompt


def _shown(prompt: str, name: str, value: str | list | dict, answer: str) -> str:
    """Return the question with the choices `value` of the column `name`."""
    lines = value if isinstance(value, list) and all(isinstance(item, str) for item in value) else []
    matches = [LETTERED.fullmatch(line) for line in lines]
    if lines and all(match and match[1].isupper() for match in matches):
        return _append(prompt, [(match[1], match[2]) for match in matches if match], lines)
    try:
        choices = [(letter or LETTERS[i : i + 1], text) for i, (letter, text) in enumerate(_read(value))]
    except ValueError:
        choices = []
    if not (letters := _letters(answer, choices)):
        return prompt
    if not choices:
        raise RowError(f"the answer is a letter, but '{name}' is not a list of texts: write one, or extend the prompt")
    if unknown := sorted(letters - {letter.upper() for letter, _ in choices}):
        raise RowError(f"the answer is {unknown[0]}, but '{name}' has no such choice: correct one of them")
    return _append(prompt, choices)


def _append(prompt: str, choices: Sequence[Choice], lines: Sequence[str] = ()) -> str:
    """Return the question with `choices`, or `lines` that show them, unless it has each behind its letter."""
    if all(re.search(rf"\b{letter}\W{{1,9}}{re.escape(text)}", prompt) for letter, text in choices):
        return prompt
    return "\n".join([prompt, "Options:", *(lines or [f"{letter}. {text}" for letter, text in choices])])


def _letters(answer: str, choices: Sequence[Choice]) -> set[str]:
    """Return the letters that an answer consists of; none if it is another text, or itself one of the choices."""
    answer = answer.strip()
    if answer in (text for _, text in choices):
        return set()
    if match := ONE.fullmatch(answer):
        letter = match[1].upper()
        return {letter} if letter in USUAL or letter in LETTERS[: len(choices)] else set()
    letters = re.findall("[A-J]", answer) if SEVERAL.fullmatch(answer) else []
    return set(letters) if letters == sorted(set(letters)) else set()


def _is_letter(value: object) -> bool:
    """Return whether a column such as "choice" holds an answer, not the choices."""
    return isinstance(value, str) and len(value.strip("()[]. ")) == 1


def _in_columns(row: dict) -> list[Choice]:
    """Return the choices in columns A, B, … or option_1, option_2, …, without the empty ones."""
    lettered, numbered = {}, {}
    for name in filter(is_one, row):
        match, value = is_one(name), row[name]
        if match and isinstance(value, str | int | float) and carries(str(value)):
            if match[1]:
                lettered[match[1].upper()] = str(value).strip()
            else:
                numbered[int(match[2])] = str(value).strip()
    texts = [text for _, text in sorted(lettered.items() or numbered.items())]
    has_gap = lettered and not LETTERS.startswith("".join(sorted(lettered)))
    return [] if has_gap or len(texts) < 2 else list(zip(LETTERS, texts))


def _read(value: object) -> Iterator[Choice]:
    """Yield the choices in a list, a dictionary or a text. Raises ValueError if one of them is not a text."""
    if isinstance(value, str):
        value = _in_text(value)
    if isinstance(value, dict):
        yield from _in_dict(value)
        return
    for item in value if isinstance(value, list | tuple) else [None]:
        yield from _item(item)


def _item(item: object) -> Iterator[Choice]:
    """Yield the choice in an item of a list: a text, [letter, text], {label, text} or {letter: text}."""
    if isinstance(item, list | tuple) and len(item) == 2 and is_one(str(item[0])):
        item = {item[0]: item[1]}
    if isinstance(item, dict):
        given = {name: each for name, each in item.items() if carries(each)}
        label = next((given[name] for name in LABELS if name in given), None)
        text = next((given[name] for name in TEXTS if name in given), None)
        yield from _in_dict(given if text is None else {label: text})
    elif isinstance(item, str | int | float) and not isinstance(item, bool):
        match = LETTERED.fullmatch(str(item))
        yield (match[1], match[2]) if match else (None, str(item).strip())
    else:
        raise ValueError


def _in_dict(value: dict) -> Iterator[Choice]:
    """Yield the choices in {letter: text}, or in {label: [letter, …], text: [text, …]}."""
    lists = [
        next((value[name] for name in names if isinstance(value.get(name), list)), None) for names in (LABELS, TEXTS)
    ]
    if lists[1]:
        value = dict(zip(lists[0] or range(len(lists[1])), lists[1]))
    for label, text in value.items():
        if not isinstance(text, str | int | float | None) or isinstance(text, bool):
            raise ValueError
        if carries(str(text)):
            label = str(label).strip("()[].: ")
            match = is_one(label)
            yield (label if len(label) == 1 else match[1].upper()) if match and match[1] else None, str(text).strip()


def _in_text(text: str) -> object:
    """Return the list or dictionary in a text: JSON, Python, lettered choices one behind another, or lines."""
    if text.strip()[:1] in ("[", "{", "("):
        if "," not in text:  # as NumPy writes a list
            text = re.sub(r"""(['"])\s+(?=['"])""", r"\1, ", text)
        for parse in (json.loads, ast.literal_eval):
            try:
                return parse(text.strip())
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                continue
    before, *pieces = INLINE.split(text.strip())
    letters = "".join(pieces[::2])
    if not before and len(letters) > 1 and LETTERS.startswith(letters.upper()):
        return dict(zip(letters, pieces[1::2]))
    lines = [line for line in text.splitlines() if line.strip()]
    return lines if len(lines) > 1 else None
