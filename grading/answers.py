"""Extract answers from text: format blocks, counts, words, boxed answers, choice letters and numbers.

The rewards use the strict functions in the first half of this file. The benchmarks use the lenient functions under
"benchmark answers", which accept the many forms in which models state an answer. Completions are untrusted: no text
may make these functions raise an error or run for seconds.
"""

import re
import unicodedata


def split_think_answer(completion: str) -> tuple[str, str] | None:
    """Return the two bodies if the completion is exactly `<think>…</think><answer>…</answer>`, else None."""
    if len(re.findall(r"</?(?:think|answer)>", completion)) != 4:
        return None
    form = r"\s*<think>(\s*\S.*?)</think>\s*<answer>(\s*\S.*?)</answer>\s*"
    match = re.fullmatch(form, completion, re.DOTALL)
    return match and (match[1], match[2])


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


def half_width(text: str) -> str:
    """Replace full-width letters, digits and signs with ordinary ones."""
    return "".join(unicodedata.normalize("NFKC", c) if "\uff00" <= c <= "\uffef" else c for c in text)


def first_count(text: str) -> int | None:
    """Return the first whole number in the first `<answer>` block, or in the whole text if there is no block.

    Returns None if there is no whole number. "1,234" is one number, and "3apples" counts as 3. "3.7", "x3" and "3D" are
    not whole numbers. Full-width digits and digits next to CJK characters are accepted. Only the first 18 digits are
    read.
    """
    text = half_width(next(iter(answer_blocks(text)), text))
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
_SIGNS = {"−": "-", "⁄": "/", "×": " x ", "+/-": "±", "<=": "≤", ">=": "≥", "°": " degree ", "%": " percent "}
_NUMERAL = re.compile(r"\d+(?:\.\d+)*|(?<![^\s<>≤≥±/:-])\.\d+")
# A word, or a number with its sign and any further numbers joined to it by operators.
_TOKEN = re.compile(
    rf"(?:(?<!\S)-|[<>≤≥±]\s*-?)?(?:{_NUMERAL.pattern})(?:[/:+*^=](?:{_NUMERAL.pattern}))*\+?|[^\s\d.<>≤≥±+/:*^=-]+"
)
NEGATIONS = {"no", "not", "without", "absent", "negative", "none"}


def unit_symbol(word: str) -> str | None:
    """Return the symbol of a unit in any common spelling ("Centimeters" → "cm"), or None for any other word."""
    word = word.lower()
    return _SYMBOL.get(word) or _SYMBOL.get(word.removesuffix("s"))


def words(text: str) -> list[str]:
    """Normalise a short answer into the words that are compared: "5.60cm." → ["5.6", "cm"].

    Applies NFKC and lower case, separates digits from letters, leaves out articles before a word, and writes each
    number and unit in one way ("1,000" and "1000", "2.0" and "2", "5 centimeters" and "5 cm"). These signs are part of
    a number: a minus that starts the text or follows a space, <, >, ≤, ≥, ±, a plus after it, and /, : and other
    operators between two numbers ("3:4"). All other punctuation becomes a space.
    """
    text = unicodedata.normalize("NFKC", text).lower()
    for sign, replacement in _SIGNS.items():
        text = text.replace(sign, replacement)
    text = re.sub(r"(?<=\d)(?=[^\W\d_])|(?<=[^\W\d_])(?=\d)", " ", text)
    text = re.sub(r"(?<![\d.,])\d{1,3}(?:,\d{3})++(?!,?\d)", lambda match: match[0].replace(",", ""), text)
    text = re.sub(r"(?<=\d)\s*([/:+*^=])\s*(?=[\d.])", r"\1", text)
    text = re.sub(r"(?<!\d)[/:*^=]|[/:*^=](?![\d.])", " ", text)
    text = re.sub(r"\b(?:an?|the)\s+(?=\w)", "", text)
    kept = (c if c.isalnum() or c in "-.<>≤≥±+/:*^=" or unicodedata.category(c)[0] == "M" else " " for c in text)
    found: list[str] = []
    for token in _TOKEN.findall("".join(kept)):
        if re.search(r"\d", token):
            token = _NUMERAL.sub(_plain_number, "".join(token.split()))
        elif found and found[-1][-1].isdigit():  # "in" and "second" are units only after a number
            token = unit_symbol(token) or token
        found.append(token)
    return found


def _plain_number(match: re.Match) -> str:
    """Return a decimal number without superfluous zeros; "1.2.3" stays as it is."""
    whole, _, decimals = match[0].partition(".")
    if "." in decimals:
        return match[0]
    return (whole.lstrip("0") or "0") + ("." + decimals if (decimals := decimals.rstrip("0")) else "")


def contradicts(answered: list[str], gold: list[str]) -> bool:
    """Return whether two answers, as lists from `words`, differ in their numbers or in whether they have a negation."""
    numbers = [sorted(word for word in side if re.search(r"\d", word)) for side in (answered, gold)]
    return numbers[0] != numbers[1] or NEGATIONS.isdisjoint(answered) != NEGATIONS.isdisjoint(gold)


# --- multiple choice and boxes ----------------------------------------------------------------------------------------

_CHOICES = (  # strongest evidence first
    r"\\boxed\{\s*+(?:(?:\\text|\\mathrm)\{\s*+)?\(?([A-Za-z])\)?\s*+\}",
    # A lower-case letter counts only before punctuation or the end: "the answer is a dog" chooses nothing.
    r"(?i:\banswer\b)\s*+(?:(?:(?i:is)|:)\s*+)*+[$*_(\[\"']*"
    r"(?:\\text\{)?([A-Z]\b(?!['’])|[a-z](?=[$*_)\]\"']*\s*(?:[.,;:]|$)))",
    r"\A[\W_]*([A-Za-z])[\W_]*\Z",  # a single letter
    r"\A[\s*_]*(?=\([A-Z]\)|[A-Z][*_]*[.):])\(?([A-Z])",  # it starts with "X.", "X)", "X:" or "(X)"
    r"\(([A-Z])\)",
)


def extract_choice(completion: str) -> str | None:
    """Return the letter, "A" to "Z", that a completion chooses, or None.

    Only the last `<answer>` block is searched, or the text outside think blocks if there is no answer block.
    """
    blocks = answer_blocks(completion)
    return _last_letter(_CHOICES, blocks[-1] if blocks else outside_thinking(completion))


def _last_letter(patterns: tuple[str, ...], text: str) -> str | None:
    """Return the last match of the first pattern that matches, in upper case."""
    matches = (re.findall(pattern, text) for pattern in patterns)
    return next((letters[-1].upper() for letters in matches if letters), None)


def last_boxed(text: str) -> str | None:
    """Return the body of the last `\\boxed{…}` with balanced braces, or None. In nested boxes, the inner one counts."""
    return next((text[start:end] for start, end in reversed(_boxes(text))), None)


def _boxes(text: str) -> list[tuple[int, int]]:
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


# --- benchmark answers ------------------------------------------------------------------------------------------------

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SHORT = 100  # characters; a longer answer outside a box is treated as prose


def answer_part(response: str) -> str:
    """Return the body of the last answer block, or the response without its think block if it has no answer block.

    A think block that is never closed results in an empty answer.
    """
    text = outside_thinking(response).partition("<think>")[0]
    blocks = answer_blocks(text)
    return (blocks[-1] if blocks else text).strip()


def short_answer(text: str) -> tuple[str, bool]:
    """Return the core of an answer, and whether the answer was marked explicitly.

    The core is the last box, else the text after the last "answer is" or "answer:", else the whole text. The first two
    forms are explicit.
    """
    text = re.sub(r"(?<![\w)])\*\*|\*\*(?![\w(])", "", text)  # bold type, but not x**2
    if (boxed := last_boxed(text)) is not None:
        return boxed.strip(), True
    stated = re.findall(r"(?i:\banswer)\s*(?:(?i:is)|:)\s*:?\s*(.+)", text)
    return (stated[-1] if stated else text).strip().rstrip(".").strip(), bool(stated)


def count_words(text: str) -> int:
    """Return the number of words of two letters or more outside LaTeX commands."""
    text = re.sub(r"\\(?:begin|end)\{[^{}]*\}|\\[A-Za-z]+", " ", text)
    return len(re.findall(r"\b[A-Za-z]{2,}\b", text))


def math_answers(text: str) -> list[str]:
    """Return the expressions that may be the answer, most likely first.

    A boxed answer or a short answer is returned unchanged. If the answer is a sentence, one formula or number in it is
    returned: the first if the answer was marked explicitly, else the last. None is returned for a sentence with a
    negation or for several formulas ("$3$ or $4$"). Prose itself is never returned, because math-verify would find an
    answer in any text, and it would take seconds for a page.
    """
    answer, explicit = short_answer(text)
    if boxes := _boxes(text):
        return [answer[: 20 * SHORT] + _unit_after_box(answer, text[boxes[-1][1] + 1 :])] if answer else []
    is_prose = len(answer) > SHORT or count_words(answer) >= (1 if explicit and re.search(r"\d", answer) else 2)
    candidates = [answer] if answer and not is_prose else []
    formulas = re.findall(r"\$\$?([^$]+)\$|\\\((.{1,500}?)\\\)|\\\[(.{1,500}?)\\\]", answer, re.DOTALL)
    if re.search(r"(?i:\bnot\b|n['’]t\b|\bnever\b|\bneither\b)", answer) or (len(formulas) > 1 and not is_prose):
        return candidates
    if formulas:
        formula = next(filter(None, formulas[0 if explicit else -1]))
        candidates.append(formula.strip()[: 20 * SHORT])
    elif is_prose:
        found = list(re.finditer(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:/\d+)?(?!\w)", answer))
        chosen = found[:1] if explicit else found[-1:]
        candidates += [number[0] + _unit_after(answer[number.end() :]) for number in chosen]
    return candidates


def _unit_after(text: str) -> str:
    """Return the unit with which `text` begins, such as " square feet" or " km per hour", else ""."""
    unit = re.match(
        r" (?:(?:square|cubic|sq|cu)\.? )?([A-Za-z]{2,})\b(?: ?(?:/|per\b) ?[A-Za-z]+)?(?! squared| cubed)", text
    )
    is_unit = unit and unit_symbol(unit[1]) and unit[1].lower() not in ("in", "unit", "units")  # "5 in total"
    return unit[0] if is_unit else ""


def _unit_after_box(answer: str, rest: str) -> str:
    """Return the unit or percent sign that follows a box with a number, as in `\\boxed{5}\\text{ km}`, else ""."""
    if not re.search(r"[\d})]\Z", answer):
        return ""
    rest = re.sub(r"\\[,;:! ]|\\?\$|\\[()\]]|~", " ", rest[:SHORT]).lstrip()
    if sign := re.match(r"\\?%|\^\s*\{?\\circ\}?|°", rest):
        return sign[0]
    text = re.match(r"\\(?:text|mathrm|textrm)\s*\{\s*([^{}]+)\}((?:\^\{?\d\}?)?)", rest)
    return f" {text[1]}{text[2]}" if text else _unit_after(" " + rest)


def count_values(gold: str) -> int:
    """Return the number of values in a list or set such as "3, 5" or "3 and 5"; a tuple or interval is one value."""
    depth, values = 0, 1
    for token in re.findall(r"\\.|[()\[\]{}]|(?:[,;]\s*)?\b(?:and|or)\b|[,;]", gold, re.DOTALL):
        depth += (token in "([{") - (token in ")]}")
        values += depth == 0 and token[0] in ",;ao"
    return values


def math_candidates(text: str, max_chars: int, values: int = 1) -> list[str]:
    """Return the texts that may equal a gold answer with that many values, without repeats; all are compared.

    They are the whole text, the text after "answer:", and the results of `math_answers`. If the text has a box or is
    longer than `max_chars`, only the latter are returned. The bodies of several boxes, as a list, are one more
    candidate if there are as many boxes as values; otherwise, listing guesses would pay.
    """
    text = half_width(text)
    candidates, boxes = math_answers(text), _boxes(text)
    if len(boxes) == values > 1:
        candidates.append(", ".join(text[start:end] for start, end in boxes)[: 20 * SHORT])
    if not boxes and len(text) <= max_chars:
        stated, explicit = short_answer(text)
        candidates = [text.strip(), *([stated] if explicit else []), *candidates]
    return list(dict.fromkeys(candidates))


def whole_number(text: str) -> int | None:
    """Return the whole number that an answer gives, or None if there is no number or the number is not whole.

    A box holds the number alone, with a unit at most, or an equation whose right-hand side is the number. In any other
    text, it is the first number after "the answer is", or else the last. A part of a fraction, a power or a product
    with a symbol does not count (25/2, 2^{10}, 25\\pi).
    """
    answer, explicit = short_answer(text)
    answer = answer.replace("\\,", "").replace("{,}", ",").replace("−", "-")
    answer = re.sub(r"\\(?:text|mathrm|mathbf|boldsymbol)\b|\\[%$;:! ]|\^\\circ|\^\{\\circ\}", "", answer)
    if last_boxed(text) is not None:
        alone = re.fullmatch(r"[${(\s]*(-?\d[\d,]*(?:\.\d+)?)[^\d\\/^!*+×·]*", answer.rpartition("=")[2])
        number = alone and alone[1]
    else:
        found = re.finditer(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?!\w)", answer)
        numbers = [match[0] for match in found if not _is_part(answer, *match.span())]
        number = numbers[0 if explicit else -1] if numbers else None
    whole, _, decimals = (number or "").replace(",", "").partition(".")
    return None if not number or decimals.strip("0") else int(whole[:30])


def _is_part(text: str, start: int, end: int) -> bool:
    """Return whether the number at text[start:end] is a part of a fraction, a power or a product with a symbol."""
    before = re.search(r"(?:[/^×·]\s*\{?|\\[A-Za-z]+\s*\{|\}\s*\{)\s*$", text[max(start - 20, 0) : start])
    after = re.match(r"\s*(?:[/^×·]|\\[A-Za-z])", text[end : end + 20])
    return bool(before or after)


_MORE_CHOICES = (
    r"(?i:\b(?:option|choice)\b)(?:\s+(?i:is))?\s*[:(*\[]*\s*([A-Z])\b(?!['’])",
    r"\\boxed\{\s*(?:\\text(?:bf)?\{\s*)?\(?([A-Z])(?![A-Za-z])",
    r"^\W*([A-Z])(?=\s*(?:[\n,;:–—-]|$))",
    r"^\W*([B-H])\b(?!['’])",  # "B a red bus", but not "A red bus"
)


def chosen_letter(text: str) -> str | None:
    """Return the letter that an answer chooses, or None. Accepts more forms than `extract_choice`."""
    return extract_choice(text) or _last_letter(_MORE_CHOICES, text)
