"""TODO grading/answers.py"""

import re
import unicodedata

_THINK_ANSWER = re.compile(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def split_think_answer(completion: str) -> tuple[str, str] | None:
    """The bodies of `<think>…</think><answer>…</answer>` when the completion is exactly that, else None."""
    if any(completion.count(tag) != 1 for tag in _TAGS):
        return None
    match = _THINK_ANSWER.fullmatch(completion)
    if match is None or not match[1].strip() or not match[2].strip():
        return None
    return match[1], match[2]


# --- counting ---------------------------------------------------------------------------------------------------------

# Any number: a thousands group («1,234») or digits, with the decimals and letters that would make it no whole number.
# A point before it makes it a decimal (« .5», «1.2.3») unless it ends something («count...12», «No.5»).
_NUMBER = re.compile(r"(?<![A-Za-z_\d])(?<!\d\.)(?<!\s\.)(?<!^\.)(\d{1,3}(?:,\d{3})+(?!,?\d)|\d+)(\.\d+|[A-Za-z_])?")


def answer_blocks(text: str) -> list[str]:
    """The bodies of all `<answer>…</answer>` blocks, in one pass however many tags are left open."""
    bodies, at = [], 0
    while (start := text.find("<answer>", at)) >= 0 and (end := text.find("</answer>", start)) >= 0:
        bodies.append(text[start + len("<answer>") : end])
        at = end + len("</answer>")
    return bodies


def first_count(text: str) -> int | None:
    """The first whole number of the `<answer>` block when there is one, else of the text; None without a number.

    «1,234» is one number; «3.7», «x3» and «3D» are none; CJK neighbours and full-width digits are fine.
    """
    text = next(iter(answer_blocks(text)), text)
    text = "".join(unicodedata.normalize("NFKC", c) if "\uff00" <= c <= "\uffef" else c for c in text)
    whole = (m[1] for m in _NUMBER.finditer(text) if not m[2])
    number = next(whole, None)
    return int(number.replace(",", "")[:18]) if number else None


# --- visual question answering ----------------------------------------------------------------------------------------


def words(text: str) -> list[str]:
    """The words of a short answer as they are compared: «5.6cm.» → [«5.6», «cm»].

    NFKC, lower case, digits apart from letters, a point kept only between digits, every other punctuation a space.
    """
    text = unicodedata.normalize("NFKC", text).lower()
    text = re.sub(r"(?<=\d)(?=[^\W\d_])|(?<=[^\W\d_])(?=\d)", " ", text)
    text = re.sub(r"(?<!\d)\.|\.(?!\d)", " ", text)
    kept = (c if c.isalnum() or c == "." or unicodedata.category(c)[0] == "M" else " " for c in text)
    return "".join(kept).split()


_LAST_CHOICE = (  # from the surest sign to the weakest; of several matches the last counts
    re.compile(r"\\boxed\{\s*+(?:(?:\\text|\\mathrm)\{\s*+)?\(?([A-Za-z])\)?\s*+\}"),
    # a small letter only before punctuation or the end: «the answer is a dog» chooses nothing
    re.compile(
        r"(?i:\banswer\b)\s*+(?:(?:(?i:is)|:)\s*+)*+[*_(\[\"']*([A-Z]\b(?!['’])|[a-z](?=[*_)\]\"']*\s*(?:[.,;:]|$)))"
    ),
)


def extract_choice(completion: str) -> str | None:
    """The letter «A» to «Z» that a completion chooses, or None.

    In this order: within the last `<answer>` block when there is one: a boxed letter; the last «answer (is) X»; a
    lone letter, in either case; a leading «X.», «X)», «X:» or «(X)»; the last «(X)».
    """
    blocks = answer_blocks(completion)
    text = blocks[-1] if blocks else without_thinking(completion)
    for pattern in _LAST_CHOICE:
        if found := pattern.findall(text):
            return found[-1].upper()
    if match := re.fullmatch(r"[\W_]*([A-Za-z])[\W_]*", text):
        return match[1].upper()
    if match := re.match(r"[\s*_]*(?:\(([A-Z])\)|([A-Z])[*_]*[.):])", text):
        return match[1] or match[2]
    found = re.findall(r"\(([A-Z])\)", text)
    return found[-1] if found else None


def last_boxed(text: str) -> str | None:
    """The body of the last `\\boxed{…}` with balanced braces, the inner one of two nested; None without one."""
    open_braces: list[int | None] = []  # where the body starts, for those of a box
    start, last = -1, None
    for token in re.finditer(r"\\boxed\s*+\{|\\.|[{}]", text, re.DOTALL):
        if token[0].startswith("\\boxed"):
            open_braces.append(token.end())
        elif token[0] == "{":
            open_braces.append(None)
        elif token[0] == "}" and open_braces:
            opened = open_braces.pop()
            if opened is not None and opened > start:
                start, last = opened, text[opened : token.start()]
    return last


def balanced(text: str) -> bool:
    """Whether every brace that LaTeX would count has its partner."""
    depth = 0
    for token in re.findall(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(token, 0)
        if depth < 0:
            return False
    return depth == 0


def without_thinking(text: str) -> str:
    """The text with a space for each `<think>…</think>`, found in one pass however many tags there are."""
    kept, at = [], 0
    while (start := text.find("<think>", at)) >= 0 and (end := text.find("</think>", start)) >= 0:
        kept.append(text[at:start])
        at = end + len("</think>")
    return " ".join([*kept, text[at:]])


LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SHORT = 100  # characters: what is longer, and in no box, is prose


# --- reading an answer ------------------------------------------------------------------------------------------------


def answer_part(response: str) -> str:
    """The response without its think block, and of an answer block what is in it. Thinking that never ends leaves
    nothing."""
    text = without_thinking(response).rpartition("</think>")[2]  # some templates open it in the prompt
    text = text.partition("<think>")[0]
    blocks = answer_blocks(text)
    return (blocks[-1] if blocks else text).strip()


def short_answer(text: str) -> tuple[str, bool]:
    """What an answer comes down to: its last box, else what follows its last «answer is», else all of it; and whether
    it was stated in one of the first two ways."""
    text = text.replace("**", "")
    if (boxed := last_boxed(text)) is not None:
        return boxed.strip(), True
    said = re.findall(r"(?i:\banswer)\s*(?:(?i:is)|:)\s*:?\s*(.+)", text)
    return (said[-1] if said else text).strip().rstrip(".").strip(), bool(said)


def math_answers(text: str) -> list[str]:
    """What may be meant as the answer, the likeliest first: a box, or a short answer as it is; of a sentence a formula
    or a number in it, the first one where the answer was stated, else the last. Prose is never handed to math-verify:
    it would find an answer in anything, and takes seconds for a page."""
    said, stated = short_answer(text)
    if last_boxed(text) is not None:
        return [said[: 20 * SHORT]] if said else []
    few = 1 if stated and re.search(r"\d", said) else 2
    is_prose = len(said) > SHORT or len(re.findall(r"(?<!\\)\b[A-Za-z]{2,}\b", said)) >= few
    found = [said] if said and not is_prose else []
    formulas = re.findall(r"\$\$?([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", said, re.DOTALL)
    if formulas:
        formula = next(filter(None, formulas[0 if stated else -1]))
        found.append(formula.strip()[: 20 * SHORT])
    elif is_prose:
        numbers = re.findall(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:/\d+)?(?!\w)", said)
        found += numbers[:1] if stated else numbers[-1:]
    return found


def whole_number(text: str) -> int | None:
    """The whole number that an answer states, else the last one it names; None when that is no whole number."""
    said, stated = short_answer(text)
    found = re.findall(r"(?<![\w.])[-−]?\d[\d,]*(?:\.\d+)?(?!\w)", said.replace("\\,", "").replace("{,}", ","))
    if not found:
        return None
    number = found[0 if stated else -1].replace(",", "").replace("−", "-")
    whole, _, decimals = number.partition(".")
    return None if decimals.strip("0") else int(whole[:30])


_LETTER = (  # where `extract_choice` sees none
    r"(?i:\b(?:option|choice)\b)(?:\s+(?i:is))?\s*[:(*\[]*\s*([A-Z])\b(?!['’])",
    r"\\boxed\{\s*(?:\\text(?:bf)?\{\s*)?\(?([A-Z])(?![A-Za-z])",
    r"^\W*([A-Z])(?=\s*(?:[\n,;:–—-]|$))",
    r"^\W*([B-H])\b(?!['’])",  # «B a red bus», but not «A red bus»
)


def chosen_letter(text: str) -> str | None:
    """The letter that an answer chooses, in the forms that models answer benchmarks in, or None."""
    if letter := extract_choice(text):
        return letter
    found = (re.findall(pattern, text) for pattern in _LETTER)
    return next((letters[-1] for letters in found if letters), None)
