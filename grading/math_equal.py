"""Compare two mathematical answers with math-verify. Runs only in the killable processes of `sandbox.py`.

math-verify's own time limit is turned off, because it needs SIGALRM in the main thread and cannot interrupt a long
multiplication. Evaluating an answer such as `9^{9^{9}}` would take forever, so the caller kills the process.
"""

import contextlib
import logging
import re
import resource
import unicodedata

from latex2sympy2_extended.math_normalization import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

from grading.answers import count_words, unit_symbol

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns about every answer that it cannot parse
MAX_MEMORY = 4 * 2**30  # bytes of data that a call may allocate
# By default, math-verify drops a trailing "t", "h" or "c" as a unit, so that `3t` equals 3.
NORMALISATION = NormalizationConfig(units=False, malformed_operators=True, nits=True)
EXTRACTION = (LatexExtractionConfig(normalization_config=NORMALISATION),)  # never the number at the end of a text
# math-verify ignores the text on one side of each of these symbols.
SIGNS = ("\\to", "\\rightarrow", "\\cup", "\\mid", "\\neg", "\\sim", "\\ne", "\\approx", "≈", "\\equiv", "¬")
SUBSCRIPT = re.compile(r"_\s*\{?\s*(\\?\w*)")  # math-verify ignores these too: 101_2 would equal 101_3
NUMBER = re.compile(r"\s*-?\d+(?:\.\d+)?\s*")
SYMBOLS = str.maketrans(
    {"°": "\\degree ", "º": "\\degree ", "−": "-", "–": "-", "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "÷": "/"}
    | {"π": "\\pi ", "√": "\\sqrt ", "∞": "\\infty ", "∅": "\\emptyset ", "∪": "\\cup ", "∩": "\\cap ", "±": "\\pm "}
    | {"≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "→": "\\to "}
)
REWRITES = [  # (pattern, replacement), applied in this order
    (r"^\s*(?:=|≈|\\approx\b)", ""),
    (r"\\(?:text|textrm|textbf|mathrm|mathbf|mbox|rm)\s*\{([^{}]*)\}", r" \1 "),
    (r"\\!", ""),
    (r"(?<!\\)\\[,;: ]|\\q?quad\b|~", " "),
    (r"\^\s*\{?\s*\\(?:circ|degree)\b\s*\}?|\\degree\b", r"\\degree "),
    (r"\\varnothing\b|\\\{\s*\\\}|\b(?:the )?empty set\b", r"\\emptyset "),
    (r"(?<!\d)(\d++)\.(\d*+)\\overline\s*\{(\d+)\}", lambda match: _repeating(*match.groups())),
    (r"\b([ap])\.\s?m\b", r"\1m"),  # "p.m" becomes "pm"
    (r"\\[dtc]?frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
    (r"(?<![\d.,])(\d{1,3})((?:(?: |\{,\})\d{3})+)(?![\d,])", lambda match: re.sub(r"\D", "", match[0])),  # 10 000
    (r"(?<![\w.])(\d++)\s+(\d++)\s*/\s*(\d+)(?![\w.])", r"\1\\frac{\2}{\3}"),  # a mixed number
    (r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d+)(?!\w)", r"(\1\\times 10^{\2})"),
    (r"\^\s*(-?\d+)", r"^{\1}"),  # in plain text, `x^10` means x^{10}
    (r"(?<![A-Za-z])\\?sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(?<![A-Za-z])\\?sqrt\s*(\d+(?:\.\d+)?|[A-Za-z]\b)", r"\\sqrt{\1}"),
]
# A number or the end of a formula, followed by a unit: a word, two words ("m/s", "m per s") or degrees, maybe a power.
UNIT = re.compile(
    r"(.*(?:[\d)}!]|\\pi))(\s*)(\\degree(?:\s*[CF])?|(?:(square|cubic|sq|cu)\.? )?([A-Za-zµμΩ]+)\.?"
    r"(?:\s*(?:/|\bper\b)\s*([A-Za-z]+))?)(?:(?:\s*\^\s*)?\{?([23])\}?)?\s*",
    re.DOTALL,
)
UNIT_LETTERS = "mgshlLNJWVK"  # single letters that may be units; other letters are variables
NOT_UNITS = {"hundred", "thousand", "million", "billion", "trillion", "dozen", "percent", "squared", "cubed", "mod"}


def math_equal(candidate: str, gold: str) -> bool:
    """Return whether `candidate` equals `gold`: numbers, expressions, sets, intervals, matrices or choice letters.

    - A unit counts only if both answers have one: `5 cm` equals 5 and `5 centimeters`, but not `5 km`. Units are not
      converted: 1 km does not equal 1000 m. A single letter is a unit only after a space (`5 m`, but not `5m`).
    - If the gold answer is prose, the words must be the same. Otherwise, math-verify reads a word as a product of
      letters, so `BC` equals `CB`.
    - If the gold answer is a capital letter, "A. 5 cm" counts as A.
    - Answers that math-verify would misread, such as "1 2" or those with signs that it ignores, never equal a number.
    """
    candidate, gold = _normalise(candidate), _normalise(gold)
    if not candidate:
        return False
    if _compact(candidate) == _compact(gold):
        return True
    if letter := re.fullmatch(r"\(?([A-Z])\)?", gold):
        candidate = _choice(candidate) or candidate
        gold = letter[1]
    if _is_words(gold):
        return _plain_words(candidate) == _plain_words(gold)
    if _is_ambiguous(candidate, gold):
        return False
    (candidate, unit), (gold, gold_unit) = _split_unit(candidate), _split_unit(gold)
    if unit and gold_unit and unit != gold_unit:
        return False
    # Each answer is put in a box, because `12 \\sqrt{3}` would otherwise be parsed as 3.
    boxed = [parse("\\boxed{" + text + "}", EXTRACTION, parsing_timeout=None) for text in (gold, candidate)]
    return bool(verify(*boxed, timeout_seconds=None))


def _normalise(text: str) -> str:
    """Return `text` in one notation: LaTeX for symbols, roots, powers and fractions; `\\degree`; no delimiters."""
    text = re.sub(r" ?[¼-¾⅐-⅞]", lambda match: "\\frac{" + _nfkc(match[0].strip()).replace("⁄", "}{") + "}", text)
    text = re.sub(r"[⁰¹²³⁴-⁹⁺⁻ⁿ]+", lambda match: "^{" + _nfkc(match[0]) + "}", text)
    text = _strip_delimiters(text).translate(SYMBOLS)
    for pattern, replacement in REWRITES:
        text = re.sub(pattern, replacement, text)
    return text.strip()


def _repeating(whole: str, decimals: str, repeated: str) -> str:
    """Write a repeating decimal as a fraction: ("0", "1", "6") → (16 − 1) / 90."""
    numerator = int(whole + decimals + repeated) - int(whole + decimals)
    return f"\\frac{{{numerator}}}{{{'9' * len(repeated)}{'0' * len(decimals)}}}"


def _nfkc(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


def _strip_delimiters(text: str) -> str:
    text = re.sub(r"\\?\$|(?<!\\)\\[()]", " ", text)
    return re.sub(r"\A\s*\\\[(.*)\\\]", r"\1", text, flags=re.DOTALL).strip().strip("*").rstrip(".。").strip()


def _compact(text: str) -> str:
    """Remove white space, except between two numbers."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def _choice(text: str) -> str | None:
    """Return the letter with which `text` starts, as in "A. 5 cm", unless it mentions another choice."""
    match = re.fullmatch(r"\(?([A-Z])[.):]\s*(.*)", text, re.DOTALL)
    others = match and re.search(r"\(?\b[A-Z][.):]|\b(?:or|and)\s+\(?[A-Z]\b|[,;/]\s*\(?[A-Z]\b", match[2])
    return match[1] if match and not others else None


def _plain_words(text: str) -> str:
    return " ".join(re.findall(r"[^\W_]+|\S", text.casefold().rstrip(". ")))


def _is_words(gold: str) -> bool:
    """Return whether the gold answer is prose: "Pythagorean theorem" is; "ab", `\\sin x` and "45 degrees" are not."""
    text = _plain_words(gold)
    return text in ("no", "on", "up") or bool(re.fullmatch(r"[^\W\d_]{3,}(?:[\s'-]+[^\W\d_]+)*", text))


def _is_ambiguous(candidate: str, gold: str) -> bool:
    """Return whether math-verify would misread `candidate`."""
    if any(sign in candidate and sign not in gold for sign in SIGNS) or count_words(candidate) > count_words(gold) + 3:
        return True
    if re.search(r"\d\s+\d", f"{candidate}|{gold}"):  # math-verify reads "1 2" as 3
        return True
    if (subscripts := SUBSCRIPT.findall(candidate)) and subscripts != SUBSCRIPT.findall(gold):
        return True
    if "=" in candidate and re.search(r"\d\s+(?!and\b|or\b)[a-z][a-z\s]*\s\d", candidate):  # "2 because 3 + 4 = 7"
        return True
    sides = candidate.split("=")
    return any(NUMBER.fullmatch(side) and side.strip() != sides[-1].strip() for side in sides[:-1])  # "1 = 5"


def _split_unit(text: str) -> tuple[str, str | None]:
    """Return the value and the unit, as in ("5", "cm^2"), or `text` and None if it does not end with a unit."""
    match = UNIT.fullmatch(text)
    if match is None:
        return text, None
    value, space, unit, power_word, name, per, power = match.groups()
    if unit.startswith("\\degree"):
        return value, "".join(unit.split()).replace("\\degree", "degree")
    symbol = unit_symbol(name)
    is_unit = symbol is not None if not space else symbol is not None or (len(name) > 2 and name not in NOT_UNITS)
    if len(name) == 1:
        is_unit = bool(space) and name in UNIT_LETTERS
    if not is_unit:
        return text, None
    power = power or {"sq": "2", "cu": "3"}.get((power_word or "")[:2], "")
    return value, (symbol or name.lower().rstrip("s")) + power + (f"/{unit_symbol(per) or per}" if per else "")


# Limit memory, so that a runaway call raises MemoryError before the machine runs out of memory.
with contextlib.suppress(ValueError):  # a lower hard limit is already set
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))
# Warm up: the first call builds the parser's tables, which processes forked later share.
math_equal("\\frac{1}{2}", "0.5")
