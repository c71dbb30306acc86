"""Extract answers from text: format blocks, counts, words and boxed answers.

parts/math reads formulas, and parts/benchmarks letters and whole numbers. Completions are untrusted: no text may make
these functions raise an error or run for seconds.
"""

import functools
import html
import re
import unicodedata
from decimal import Decimal

_MARK = re.compile(r"<\|(?:begin|end)_of_box\|>")  # tokens that models put around an answer: GLM-4.6V


def without_marks(text: str) -> str:
    """Remove the marks that models put around an answer: of all models, since a response does not name its model."""
    return _MARK.sub("", text)


def split_think_answer(completion: str) -> tuple[str, str] | None:
    """Return the two bodies if the completion is exactly `<think>…</think><answer>…</answer>`, else None.

    Marks around the answer do not count. `<think>` may be missing, since a chat template may have put it in the prompt.
    """
    completion = without_marks(completion)
    if "<think>" not in completion:
        completion = f"<think>{completion}"
    if len(re.findall(r"</?(?:think|answer)>", completion)) != 4:
        return None
    form = r"\s*<think>(\s*\S.*?)</think>\s*<answer>(\s*\S.*?)</answer>\s*"
    match = re.fullmatch(form, completion, re.DOTALL)
    return (match[1], match[2]) if match else None


def answer_blocks(text: str) -> list[str]:
    """Return the bodies of all `<answer>…</answer>` blocks."""
    head, end, _ = text.rpartition("</answer>")  # otherwise, each unclosed tag would cause a search to the end
    return re.findall(r"<answer>(.*?)</answer>", head + end, re.DOTALL)


def outside_thinking(text: str) -> str:
    """Replace each `<think>…</think>` block with a space. Text before an unopened `</think>` is thinking, too."""
    head, end, tail = text.rpartition("</think>")
    text = re.sub(r"<think>.*?</think>", " ", head + end, flags=re.DOTALL) + tail
    return text.rpartition("</think>")[2]  # some chat templates put `<think>` in the prompt


# --- counting ---------------------------------------------------------------------------------------------------------

# Any number: digits, with or without thousands separators ("1,234"). If group 2 captures decimals or a letter, the
# number is not whole ("3.7", "3D"), but a word of three letters or more may follow ("3apples"). A preceding point makes
# the number a decimal (" .5", "1.2.3") unless the point ends a word or sentence ("count...12", "No.5").
_NUMBER = re.compile(
    r"(?<![A-Za-z_\d])(?<!\d\.)(?<!\s\.)(?<!^\.)(\d{1,3}(?:,\d{3})+(?!,?\d)|\d+)"
    r"(\.\d+|(?![A-Za-z][a-z]{2,}+(?![A-Z\d_]))[A-Za-z_])?"
)


def visible(text: str) -> str:
    """Remove invisible characters: zero-width spaces, direction marks, byte-order marks, soft hyphens."""
    return text if text.isascii() else "".join(c for c in text if unicodedata.category(c) != "Cf")


def half_width(text: str) -> str:
    """Replace full-width letters, digits and signs with ordinary ones, and remove invisible characters."""
    return "".join(unicodedata.normalize("NFKC", c) if "\uff00" <= c <= "\uffef" else c for c in visible(text))


def first_count(text: str) -> int | None:
    """Return the first whole number in the first `<answer>` block or, without one, in the text. Thinking is left out.

    Returns None if there is no whole number. "1,234" is one number, and "3apples" counts as 3.
    "3.7", "x3" and "3D" are not whole numbers. Full-width digits and digits next to CJK characters are accepted. Only
    the first 18 digits are read.
    """
    text = outside_thinking(text)
    text = half_width(next(iter(answer_blocks(text)), text.partition("<think>")[0]))  # the thinking may be cut off
    number = next((match[1] for match in _NUMBER.finditer(text) if not match[2]), None)
    return int(number.replace(",", "")[:18]) if number else None


# --- visual question answering ----------------------------------------------------------------------------------------

_UNITS = {  # symbol -> other spellings, in lower case and singular
    "mm": "millimeter millimetre", "cm": "centimeter centimetre", "m": "meter metre", "km": "kilometer kilometre",
    "in": "inch inche", "ft": "foot feet", "yd": "yard", "mi": "mile", "l": "liter litre", "ml": "milliliter",
    "mg": "milligram", "g": "gram gm", "kg": "kilogram", "lb": "pound", "oz": "ounce", "ms": "millisecond",
    "s": "second sec", "min": "minute", "h": "hour hr", "day": "", "yr": "year", "degree": "deg", "rad": "radian",
    "unit": "", "mph": "", "n": "newton", "j": "joule", "w": "watt", "v": "volt", "k": "kelvin", "hz": "hertz",
}  # fmt: skip
_SYMBOL = {spelling: symbol for symbol, others in _UNITS.items() for spelling in (symbol, *others.split())}
_SIGNS = dict.fromkeys("−‐‑‒–—", "-") | {"⁄": "/", "&": " and ", "×": " x "}
_SIGNS |= {"+/-": "±", "<=": "≤", ">=": "≥", "°": " degree ", "%": " percent "}
_NUMERAL = re.compile(r"\d+(?:\.\d+)*|(?<![^\s<>≤≥±/:-])\.\d+")
# A word, or a number with its sign and any further numbers joined to it by operators.
_TOKEN = re.compile(
    rf"(?:(?<!\S)-|[<>≤≥±]\s*-?)?(?:{_NUMERAL.pattern})(?:[/:+*^=](?:{_NUMERAL.pattern}))*\+?|[^\s\d.<>≤≥±+/:*^=-]+"
    r"|[<>≤≥±]|\++|(?<=\w)-(?!\w)"  # signs without a number: "HIV+", "e-"
)
_SCIENTIFIC = re.compile(
    r"(?<![\w.])(\d+(?:\.\d+)?)(?:e|\s*(?:[x×*·]|\\times|\\cdot)\s*10\^)\{?([+-]?\d{1,2})\}?(?![\d.]*\d)"
)
# A capital A is a letter, not an article, after a word ("influenza A virus"), and before a letter or a conjunction.
_ARTICLE = re.compile(r"\b(?:(?i:an|the)|a|(?<!\w )A(?! (?:[A-Za-z]|and|or|vs|is)\b)) (?=\w)")
MARKUP = re.compile(r"</?[a-z][a-z\d]*(?:\s+[\w-]+\s*=[^<>]*+)?\s*/?>|\\(?:text|math)[a-z]*(?=\s*\{)", re.IGNORECASE)
_ONES, _TENS = "one|two|three|four|five|six|seven|eight|nine", "twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety"
_TEENS = "ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen|eighteen|nineteen"
_VALUES = {word: value for value, word in enumerate(f"zero|{_ONES}|{_TEENS}".split("|"))}
_VALUES |= {word: 10 * value for value, word in enumerate(_TENS.split("|"), 2)}
_TO_99 = rf"(?:(?:{_TENS})(?:[ -](?:{_ONES}))?|zero|{_ONES}|{_TEENS})\b"
_TO_999 = rf"(?:(?:{_TO_99} )?hundred\b(?:(?: and)? {_TO_99})?|{_TO_99})"
_MONTHS = "january|february|march|april|may|june|july|august|september|october|november|december"
# A final "one" is a pronoun ("the left one"), unless it is the whole answer.
IN_WORDS = re.compile(rf"(?<![\w-])(?!(?<=\w )one\W*$)(?:(?:{_TO_999} )?thousand\b(?:(?: and)? {_TO_999})?|{_TO_999})")
NEGATIONS = {"no", "not", "without", "absent", "negative", "none"}


def unit_symbol(word: str) -> str | None:
    """Return the symbol of a unit in any common spelling ("Centimeters" → "cm"), or None for any other word."""
    word = word.lower()
    return _SYMBOL.get(word) or _SYMBOL.get(word.removesuffix("s"))


def words(text: str, keep_articles: bool = False) -> list[str]:
    """Normalise a short answer into the words that are compared: "5.60cm." → ["5.6", "cm"].

    If the answer has a box, only the last one counts. Applies NFKC and lower case, separates digits from letters,
    leaves out HTML and articles before a word, and writes each number and unit in one way ("1,000" and "1e3", "2.0" and
    "two", "5 centimeters" and "5 cm"). These signs are part of a number: a minus that starts the text or follows a
    space, <, >, ≤, ≥, ±, a plus after it, and /, : and other operators between two numbers ("3:4"). All other
    punctuation becomes a space, and any other sign is a word of its own: "HIV+" is not "HIV-", nor "€5" "$5".
    """
    text = re.sub(r"(\d)(?=[¼-¾⅐-⅞])", r"\1 ", html.unescape(MARKUP.sub(" ", last_boxed(text) or text)))
    text = " ".join(visible(unicodedata.normalize("NFKC", text)).split())
    text = re.sub(r"\b(?:[A-Za-z]\.){2,}", lambda match: match[0].replace(".", ""), text)  # "U.S.A." is "USA"
    text = (text if keep_articles else _ARTICLE.sub("", text)).lower()
    for sign, replacement in _SIGNS.items():
        text = text.replace(sign, replacement)
    text = _SCIENTIFIC.sub(lambda match: f"{Decimal(f'{match[1]}e{match[2]}'):f}", text)
    text = re.sub(rf"\b({_MONTHS}) (\d\d?)\b", r"\2 \1", text)  # "May 6" is "6 May"
    text = IN_WORDS.sub(lambda match: number_in_digits(match[0]), text)
    text = re.sub(r"(?<=\d)(?=[^\W\d_])|(?<=[^\W\d_])(?=\d)", " ", text)
    text = re.sub(r"(?<![\d.,])\d{1,3}(?:,\d{3})++(?!,?\d)", lambda match: match[0].replace(",", ""), text)
    text = re.sub(r"(?<=\d)\s*([/:+*^=])\s*(?=[\d.])", r"\1", text)
    text = re.sub(r"(?<!\d)[/:*^=]|[/:*^=](?![\d.])", " ", text)
    found: list[str] = []
    for token in _TOKEN.findall("".join(c if _counts(c) else " " for c in text)):
        if re.search(r"\d", token):
            token = _NUMERAL.sub(_plain_number, "".join(token.split()))
        elif found and found[-1][-1].isdigit():  # "in" and "second" are units only after a number
            token = unit_symbol(token) or token
        found.append(token)
    return found


@functools.cache
def _counts(c: str) -> bool:
    """Return whether a character may carry meaning: all but blanks, accents on their own, brackets and punctuation."""
    category = unicodedata.category(c)
    return c in "-./:*^#@" or not (c == "|" or category in ("Sk", "Cc", "Cn") or category[0] in "PZ")


def number_in_digits(text: str) -> str:
    """Write a number of words in digits: "two hundred and five" → "205"."""
    thousands = part = 0
    for word in re.findall(r"[a-z]+", text.lower()):
        if word == "thousand":
            thousands, part = 1000 * (part or 1), 0
        else:
            part = 100 * (part or 1) if word == "hundred" else part + _VALUES.get(word, 0)
    return str(thousands + part)


def _plain_number(match: re.Match) -> str:
    """Return a decimal number without superfluous zeros; "1.2.3" stays as it is."""
    whole, _, decimals = match[0].partition(".")
    if "." in decimals:
        return match[0]
    return (whole.lstrip("0") or "0") + ("." + decimals if (decimals := decimals.rstrip("0")) else "")


def contradicts(answered: list[str], gold: list[str]) -> bool:
    """Return whether two answers, as lists from `words`, differ in their numbers or in whether they have a negation.

    Numbers in another order differ ("5-10", "10-5"), unless each is followed by the same word ("3 cats and 2 dogs").
    """
    followed = r"(?<!\S)([^\s\d]*+\d\S*)(?: (?!and |or )(?=(\S+)))?"
    sides = [re.findall(followed, " ".join(side)) for side in (answered, gold)]
    in_order = [number for number, _ in sides[0]] == [number for number, _ in sides[1]]
    same_numbers = in_order or sorted(sides[0]) == sorted(sides[1])
    return not same_numbers or NEGATIONS.isdisjoint(answered) != NEGATIONS.isdisjoint(gold)


# --- boxes ------------------------------------------------------------------------------------------------------------


def last_boxed(text: str) -> str | None:
    """Return the body of the last `\\boxed{…}` with balanced braces, or None. In nested boxes, the inner one counts."""
    return next((text[start:end] for start, end in reversed(boxes_of(text))), None)


def boxes_of(text: str) -> list[tuple[int, int]]:
    """Return the start and end of the body of each balanced `\\boxed{…}` that contains no other, in order."""
    opened: list[re.Match] = []  # boxes and braces that are not closed yet
    spans: list[tuple[int, int]] = []
    for token in re.finditer(r"\\boxed\s*+\{|\\.|[{}]", text, re.DOTALL):
        if token[0] == "}" and opened:
            opening = opened.pop()
            if opening[0] != "{" and opening.end() > (spans[-1][0] if spans else -1):
                spans.append((opening.end(), token.start()))
        elif token[0] == "{" or token[0].startswith("\\boxed"):
            opened.append(token)
    return spans


def balanced(text: str) -> bool:
    """Return whether all braces are balanced; escaped braces (`\\{`, `\\}`) do not count."""
    depth = 0
    for token in re.findall(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(token, 0)
        if depth < 0:
            return False
    return depth == 0


# --- the answer in a response -----------------------------------------------------------------------------------------

SHORT = 100  # characters; a longer answer outside a box is treated as prose


def answer_part(response: str) -> str:
    """Return the body of the last answer block, or the response without its think block if it has no answer block.

    If the model put marks around the answer, only the text between them counts. A think block that is never closed
    results in an empty answer.
    """
    text = outside_thinking(response).partition("<think>")[0]
    pieces = _MARK.split((answer_blocks(text) or [text])[-1])
    return (pieces[-2] if len(pieces) > 2 else "".join(pieces)).strip()


def short_answer(text: str) -> tuple[str, bool]:
    """Return the core of an answer, and whether the answer was marked explicitly.

    The core is the last box, else the text after the last "answer is" or "answer:", else the whole text. The first two
    forms are explicit.
    """
    text = re.sub(r"(?<![\w)])\*\*|\*\*(?![\w(])", "", text)  # bold type, but not x**2
    if (boxed := last_boxed(text)) is not None:
        return boxed.strip(), True
    stated = re.findall(r"(?i:\banswer)\s*(?:(?i:is)|:)\s*+:?\s*+(.+)", text)
    return (stated[-1] if stated else text).strip().rstrip(".").strip(), bool(stated)
