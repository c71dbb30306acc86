"""Extract answers from text: format blocks, counts, words, boxed answers, choice letters and numbers.

The rewards use the strict functions in the first half of this file. The benchmarks use the lenient functions under
"benchmark answers", which accept the many forms in which models state an answer. Completions are untrusted: no text
may make these functions raise an error or run for seconds.
"""

import functools
import html
import re
import unicodedata
from decimal import Decimal

_MARK = re.compile(r"<\|(?:begin|end)_of_box\|>")  # tokens that models put around an answer: GLM-4.6V


def without_marks(text: str) -> str:
    """Remove the marks that models put around an answer: those of all models, since responses do not name theirs."""
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
_SCIENTIFIC = re.compile(
    r"(?<![\w.])(\d+(?:\.\d+)?)(?:e|\s*(?:[x×*·]|\\times|\\cdot)\s*10\^)\{?([+-]?\d{1,2})\}?(?![\d.]*\d)"
)
# A capital A is a letter, not an article, after a word ("influenza A virus"), and before a letter or a conjunction.
_ARTICLE = re.compile(r"\b(?:(?i:an|the)|a|(?<!\w )A(?! (?:[A-Za-z]|and|or|vs|is)\b)) (?=\w)")
_MARKUP = re.compile(r"</?[a-z][a-z\d]*(?:\s+[\w-]+\s*=[^<>]*)?\s*/?>|\\(?:text|math)[a-z]*(?=\s*\{)", re.IGNORECASE)
_ONES, _TENS = "one|two|three|four|five|six|seven|eight|nine", "twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety"
_TEENS = "ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen|eighteen|nineteen"
_VALUES = {word: value for value, word in enumerate(f"zero|{_ONES}|{_TEENS}".split("|"))}
_VALUES |= {word: 10 * value for value, word in enumerate(_TENS.split("|"), 2)}
_TO_99 = rf"(?:(?:{_TENS})(?:[ -](?:{_ONES}))?|zero|{_ONES}|{_TEENS})\b"
_TO_999 = rf"(?:(?:{_TO_99} )?hundred\b(?:(?: and)? {_TO_99})?|{_TO_99})"
_MONTHS = "january|february|march|april|may|june|july|august|september|october|november|december"
# A final "one" is a pronoun ("the left one"), unless it is the whole answer.
_IN_WORDS = re.compile(rf"(?<![\w-])(?!(?<=\w )one\W*$)(?:(?:{_TO_999} )?thousand\b(?:(?: and)? {_TO_999})?|{_TO_999})")
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
    punctuation becomes a space.
    """
    text = unicodedata.normalize("NFKC", html.unescape(_MARKUP.sub(" ", last_boxed(text) or text)))
    text = " ".join(text.split())
    text = (text if keep_articles else _ARTICLE.sub("", text)).lower()
    for sign, replacement in _SIGNS.items():
        text = text.replace(sign, replacement)
    text = _SCIENTIFIC.sub(lambda match: f"{Decimal(f'{match[1]}e{match[2]}'):f}", text)
    text = re.sub(rf"\b({_MONTHS}) (\d\d?)\b", r"\2 \1", text)  # "May 6" is "6 May"
    text = _IN_WORDS.sub(_number_in_digits, text)
    text = re.sub(r"(?<=\d)(?=[^\W\d_])|(?<=[^\W\d_])(?=\d)", " ", text)
    text = re.sub(r"(?<![\d.,])\d{1,3}(?:,\d{3})++(?!,?\d)", lambda match: match[0].replace(",", ""), text)
    text = re.sub(r"(?<=\d)\s*([/:+*^=])\s*(?=[\d.])", r"\1", text)
    text = re.sub(r"(?<!\d)[/:*^=]|[/:*^=](?![\d.])", " ", text)
    kept = (c if c.isalnum() or c in "-.<>≤≥±+/:*^=" or unicodedata.category(c)[0] == "M" else " " for c in text)
    found: list[str] = []
    for token in _TOKEN.findall("".join(kept)):
        if re.search(r"\d", token):
            token = _NUMERAL.sub(_plain_number, "".join(token.split()))
        elif found and found[-1][-1].isdigit():  # "in" and "second" are units only after a number
            token = unit_symbol(token) or token
        found.append(token)
    return found


def _number_in_digits(match: re.Match) -> str:
    """Write a number of words in digits: "two hundred and five" → "205"."""
    thousands = part = 0
    for word in re.findall(r"[a-z]+", match[0]):
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


# --- multiple choice and boxes ----------------------------------------------------------------------------------------

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# "A" and "I" before a word are no choices, unless the word cannot follow an article ("A because it is red"). Nor are
# letters that begin a longer word ("C-shaped", "U.S.").
_NO_NOUN = (
    r"(?i:is|was|are|does|has|because|since|as|due|based|given|for|and|or|but|not|with|which|where|while|when|in|on|by|"
    r"to|from|than|according|if|so|here|rather|instead|the|this|it|we|there)\b"
)
_LETTER = rf"(?<![A-Za-z\d])(?:[B-HJ-Z]|[AI](?![ \t]+(?!{_NO_NOUN})[A-Za-z]))(?![A-Za-z\d'’+#]|-[A-Za-z]|\.[A-Z]\b)"
_OPEN = r"(?:\\boxed\s*+\{|(?i:\b(?:option|choice|letter)\b)|[\s$_(\[{\"':\\])*+"  # what may precede a letter
_CLOSE = r"[$_)\]}\"'.]*+"
_END = r"[$_)\]}\"']*\s*(?:[.,;:!\n]|\Z)"  # of a phrase, after the letter
_ANY_CASE = rf"{_LETTER}|(?<![A-Za-z\d])[a-z](?={_END})"
_IS = r"(?:\s*+(?:[:=]|(?i:\b(?:is|be|would|should|must|the|therefore|thus)\b)))*+"
_RIGHT = r"(?:the )?(?:(?:correct|right|best)(?: (?:answer|option|choice|one))?|answer)"
_JOIN = r"(?:[,;/&|、或和]|(?i:\b(?:or|and|maybe|perhaps|possibly|probably)\b))"
_HEDGE = re.compile(  # "A or B", "(A), (B)", "A. cat or B. dog", but not "B, C" in "The answer is B, C is too dark"
    rf"(?:{_ANY_CASE})(?:{_CLOSE}(?:{_OPEN}{_CLOSE}{_JOIN}{_CLOSE}{_OPEN})+(?:{_LETTER}|\b[b-z]\b(?!['’]))"
    rf"(?!{_CLOSE}\s+(?:is|was|does|has|shows)\b(?!\s+{_RIGHT})))+"
    rf"|{_LETTER}[.):][^\n.]{{1,60}}?(?:\bor\b|或)\s*\(?{_LETTER}(?=[.):])"
)
_MORE = functools.reduce(lambda rest, letter: rf"(?:\n\W*{letter}[.):].*{rest})?", "JIHGFEDC", "")
_OPTIONS = re.compile(rf"^[^\w\n]*A[.):].*\n\W*B[.):].*{_MORE}", re.MULTILINE)  # the lines "A. cat", "B. dog", …
_CHOICES = (  # strongest evidence first
    rf"\\boxed\s*+\{{{_OPEN}({_LETTER})(?=[\s$_)\]\"'.]*\}}|[.):,]\s)",  # a letter, or "B. cat", in a box
    # "the answer is B", "I choose B", "the right one is B", "答案是B", or "B is correct"
    r"(?:(?i:\banswer\b|(?<!not )(?<!n't )(?<!never )\b(?:choose|select|pick|go with|say)\b)"
    rf"|(?i:\b(?:one|option|choice|letter) is\b)|(?<!不)(?:答案|选项?|选择|而是)[是为应选]*){_IS}{_OPEN}({_ANY_CASE})"
    rf"|({_LETTER}){_CLOSE}\s*(?:(?:选项)?是?正确|is {_RIGHT}(?={_END}|\s+{_NO_NOUN}))",
    rf"(?i:\b(?:it|that)(?:['’]s| is)\b){_IS}{_OPEN}({_LETTER})(?={_END})",
    rf"\\boxed\s*+\{{{_OPEN}([a-z])[\s$_)\]\"'.]*\}}",
    r"\A[\W_]*([A-Za-z])[\W_]*\Z",  # a single letter
    r"\n(?:[^\w\n]|_)*([A-Z])[\W_]*\Z",  # the last line is a single letter
    r"\A[\s_]*(?=\([A-Z]\)|[A-Z]_*[.):])\(?([A-Z])(?!\.[A-Z]\b)",  # it starts with "X.", "X)", "X:" or "(X)"
    r"\(([A-Z])\)",
    r"(?i:\b(?:option|choice)\b)[\s:(\[]*([A-Z])\b(?!['’])",
    r"\A\W*([A-Z])(?=\s*(?:[\n,;:–—]|-(?!\w)|\Z))",
    r"\A\W*([B-H])\b(?!['’]|-\w|\s+[A-Z]\b)",  # "B a red bus", but not "A red bus"
)


def extract_choice(completion: str) -> str | None:
    """Return the letter, "A" to "Z", that a completion chooses in its `answer_part`, or None."""
    return chosen_letter(answer_part(completion))


def chosen_letter(text: str) -> str | None:
    """Return the letter that an answer chooses, or None.

    The strongest evidence decides; if it is in several places, the last. Letters side by side ("A or B") choose none. A
    repeated list of the options does not count.
    """
    text = _MARKUP.sub("", unicodedata.normalize("NFKC", text).replace("*", ""))
    text = _HEDGE.sub("…", _OPTIONS.sub("", text)).strip()
    found = (list(re.finditer(pattern, text)) for pattern in _CHOICES)
    return next((matches[-1][matches[-1].lastindex].upper() for matches in found if matches), None)


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

SHORT = 100  # characters; a longer answer outside a box is treated as prose


def answer_part(response: str) -> str:
    """Return the body of the last answer block, or the response without its think block if it has no answer block.

    If a model has marked the answer in it, only that counts. A think block that is never closed results in an empty
    answer.
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
    """Return the number of values in a list or set such as "3, 5" or "3 and 5".

    A tuple, an interval or a sentence is one value.
    """
    if re.search(r"(?<![\\A-Za-z])(?!and\b|or\b)[a-z]{2,} [a-z]", gold):
        return 1
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
