"""Extract answers from text: format blocks, counts, words, boxed answers, choice letters and numbers.

The rewards use the strict functions in the first half of this file. The benchmarks use the lenient functions under
"benchmark answers", which accept the many forms in which models state an answer. Completions are untrusted: no text
may make these functions raise an error or run for seconds.
"""

import re
import unicodedata

_THINK_ANSWER = re.compile(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def split_think_answer(completion: str) -> tuple[str, str] | None:
    """Return the two bodies if the completion is exactly `<think>…</think><answer>…</answer>`, else None."""
    if any(completion.count(tag) != 1 for tag in _TAGS):
        return None
    match = _THINK_ANSWER.fullmatch(completion)
    if match is None or not match[1].strip() or not match[2].strip():
        return None
    return match[1], match[2]


# --- counting ---------------------------------------------------------------------------------------------------------

# Any number: digits, with or without thousands separators ("1,234"). If group 2 captures decimals or a letter, the
# number is not whole. A preceding point makes the number a decimal (" .5", "1.2.3") unless the point ends a word or
# sentence ("count...12", "No.5").
_NUMBER = re.compile(r"(?<![A-Za-z_\d])(?<!\d\.)(?<!\s\.)(?<!^\.)(\d{1,3}(?:,\d{3})+(?!,?\d)|\d+)(\.\d+|[A-Za-z_])?")


def answer_blocks(text: str) -> list[str]:
    """Return the bodies of all `<answer>…</answer>` blocks. This takes one pass, even if many tags are never closed."""
    bodies, position = [], 0
    while (start := text.find("<answer>", position)) >= 0 and (end := text.find("</answer>", start)) >= 0:
        bodies.append(text[start + len("<answer>") : end])
        position = end + len("</answer>")
    return bodies


def first_count(text: str) -> int | None:
    """Return the first whole number in the first `<answer>` block, or in the whole text if there is no block.

    Returns None if there is no whole number. "1,234" is one number. "3.7", "x3" and "3D" are not whole numbers.
    Full-width digits and digits next to CJK characters are accepted. Only the first 18 digits are read.
    """
    text = next(iter(answer_blocks(text)), text)
    text = "".join(unicodedata.normalize("NFKC", c) if "\uff00" <= c <= "\uffef" else c for c in text)
    whole_numbers = (m[1] for m in _NUMBER.finditer(text) if not m[2])
    number = next(whole_numbers, None)
    return int(number.replace(",", "")[:18]) if number else None


# --- visual question answering ----------------------------------------------------------------------------------------


def words(text: str) -> list[str]:
    """Normalise a short answer into the words that are compared: "5.6cm." → ["5.6", "cm"].

    Applies NFKC and lower case, separates digits from letters, keeps a point only between digits, and replaces all
    other punctuation with a space.
    """
    text = unicodedata.normalize("NFKC", text).lower()
    text = re.sub(r"(?<=\d)(?=[^\W\d_])|(?<=[^\W\d_])(?=\d)", " ", text)
    text = re.sub(r"(?<!\d)\.|\.(?!\d)", " ", text)
    kept = (c if c.isalnum() or c == "." or unicodedata.category(c)[0] == "M" else " " for c in text)
    return "".join(kept).split()


# --- multiple choice and boxes ----------------------------------------------------------------------------------------

_LAST_CHOICE = (  # strongest evidence first; the last match of a pattern counts
    re.compile(r"\\boxed\{\s*+(?:(?:\\text|\\mathrm)\{\s*+)?\(?([A-Za-z])\)?\s*+\}"),
    # A lower-case letter counts only before punctuation or the end: "the answer is a dog" chooses nothing.
    re.compile(
        r"(?i:\banswer\b)\s*+(?:(?:(?i:is)|:)\s*+)*+[*_(\[\"']*([A-Z]\b(?!['’])|[a-z](?=[*_)\]\"']*\s*(?:[.,;:]|$)))"
    ),
)


def extract_choice(completion: str) -> str | None:
    """Return the letter, "A" to "Z", that a completion chooses, or None.

    Only the last `<answer>` block is searched, or the text outside think blocks if there is no answer block. The first
    of these that matches decides: the last boxed letter; the last "answer (is) X"; a single letter of either case; a
    leading "X.", "X)", "X:" or "(X)"; the last "(X)".
    """
    blocks = answer_blocks(completion)
    text = blocks[-1] if blocks else without_thinking(completion)
    for pattern in _LAST_CHOICE:
        if letters := pattern.findall(text):
            return letters[-1].upper()
    if match := re.fullmatch(r"[\W_]*([A-Za-z])[\W_]*", text):
        return match[1].upper()
    if match := re.match(r"[\s*_]*(?:\(([A-Z])\)|([A-Z])[*_]*[.):])", text):
        return match[1] or match[2]
    letters = re.findall(r"\(([A-Z])\)", text)
    return letters[-1] if letters else None


def last_boxed(text: str) -> str | None:
    """Return the body of the last `\\boxed{…}` with balanced braces, or None. Of nested boxes, the inner one counts."""
    open_braces: list[int | None] = []  # for a box, the position where its body starts
    start, last = -1, None
    for token in re.finditer(r"\\boxed\s*+\{|\\.|[{}]", text, re.DOTALL):
        if token[0].startswith("\\boxed"):
            open_braces.append(token.end())
        elif token[0] == "{":
            open_braces.append(None)
        elif token[0] == "}" and open_braces:
            body_start = open_braces.pop()
            if body_start is not None and body_start > start:
                start, last = body_start, text[body_start : token.start()]
    return last


def balanced(text: str) -> bool:
    """Return whether all braces are balanced; escaped braces (`\\{`, `\\}`) do not count."""
    depth = 0
    for token in re.findall(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(token, 0)
        if depth < 0:
            return False
    return depth == 0


def without_thinking(text: str) -> str:
    """Replace each `<think>…</think>` block with a space. This takes one pass, even if there are many tags."""
    kept, position = [], 0
    while (start := text.find("<think>", position)) >= 0 and (end := text.find("</think>", start)) >= 0:
        kept.append(text[position:start])
        position = end + len("</think>")
    return " ".join([*kept, text[position:]])


# --- benchmark answers ------------------------------------------------------------------------------------------------

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SHORT = 100  # characters; a longer answer outside a box is treated as prose


def answer_part(response: str) -> str:
    """Return the body of the last answer block, or the response without its think block if it has no answer block.

    A think block that is never closed leaves an empty answer.
    """
    text = without_thinking(response).rpartition("</think>")[2]  # some chat templates put `<think>` in the prompt
    text = text.partition("<think>")[0]
    blocks = answer_blocks(text)
    return (blocks[-1] if blocks else text).strip()


def short_answer(text: str) -> tuple[str, bool]:
    """Return the core of an answer, and whether the answer was marked explicitly.

    The core is the last box, else the text after the last "answer is" or "answer:", else the whole text. The first two
    forms are explicit.
    """
    text = text.replace("**", "")
    if (boxed := last_boxed(text)) is not None:
        return boxed.strip(), True
    stated = re.findall(r"(?i:\banswer)\s*(?:(?i:is)|:)\s*:?\s*(.+)", text)
    return (stated[-1] if stated else text).strip().rstrip(".").strip(), bool(stated)


def math_answers(text: str) -> list[str]:
    """Return the expressions that may be the answer, most likely first.

    A boxed answer or a short answer is returned unchanged. If the answer is a sentence, one formula or number in it is
    returned: the first if the answer was marked explicitly, else the last. Prose itself is never returned, because
    math-verify would find an answer in any text, and it takes seconds for a page of text.
    """
    answer, explicit = short_answer(text)
    if last_boxed(text) is not None:
        return [answer[: 20 * SHORT]] if answer else []
    min_prose_words = 1 if explicit and re.search(r"\d", answer) else 2
    num_words = len(re.findall(r"(?<!\\)\b[A-Za-z]{2,}\b", answer))
    is_prose = len(answer) > SHORT or num_words >= min_prose_words
    candidates = [answer] if answer and not is_prose else []
    formulas = re.findall(r"\$\$?([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", answer, re.DOTALL)
    if formulas:
        formula = next(filter(None, formulas[0 if explicit else -1]))
        candidates.append(formula.strip()[: 20 * SHORT])
    elif is_prose:
        numbers = re.findall(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:/\d+)?(?!\w)", answer)
        candidates += numbers[:1] if explicit else numbers[-1:]
    return candidates


def whole_number(text: str) -> int | None:
    """Return the whole number that an answer gives, or None if there is no number or the number is not whole.

    The number is the first in an explicitly marked answer ("the answer is …"), and the last in any other text.
    """
    answer, explicit = short_answer(text)
    answer = answer.replace("\\,", "").replace("{,}", ",")
    numbers = re.findall(r"(?<![\w.])[-−]?\d[\d,]*(?:\.\d+)?(?!\w)", answer)
    if not numbers:
        return None
    number = numbers[0 if explicit else -1].replace(",", "").replace("−", "-")
    whole, _, decimals = number.partition(".")
    return None if decimals.strip("0") else int(whole[:30])


_MORE_CHOICES = (  # tried after `extract_choice`; the last match of a pattern counts
    r"(?i:\b(?:option|choice)\b)(?:\s+(?i:is))?\s*[:(*\[]*\s*([A-Z])\b(?!['’])",
    r"\\boxed\{\s*(?:\\text(?:bf)?\{\s*)?\(?([A-Z])(?![A-Za-z])",
    r"^\W*([A-Z])(?=\s*(?:[\n,;:–—-]|$))",
    r"^\W*([B-H])\b(?!['’])",  # "B a red bus", but not "A red bus"
)


def chosen_letter(text: str) -> str | None:
    """Return the letter that an answer chooses, or None. Accepts more forms than `extract_choice`."""
    if letter := extract_choice(text):
        return letter
    matches = (re.findall(pattern, text) for pattern in _MORE_CHOICES)
    return next((letters[-1] for letters in matches if letters), None)
