"""Compare two mathematical answers with math-verify. Runs only in the killable processes of parts/workers.py.

math-verify's own time limit is turned off, because it needs SIGALRM in the main thread and cannot interrupt a long
multiplication. Evaluating an answer such as `9^{9^{9}}` would take forever, so the caller kills the process.
"""

import contextlib
import logging
import re
import resource
from typing import Any

from latex2sympy2_extended.math_normalization import NormalizationConfig
from math_verify import LatexExtractionConfig, grader, parse, verify
from sympy import Basic, Float, I, MatrixBase

from grading.answers import unit_symbol
from parts.math.grammar import is_readable
from parts.math.notation import RELATION, joined_numbers, normalise, solution_set, without_names
from parts.math.units import split_unit

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns about every answer that it cannot parse
MAX_MEMORY = 4 * 2**30  # bytes of data that a call may allocate
# By default, math-verify drops a trailing "t", "h" or "c" as a unit, so that `3t` equals 3.
NORMALISATION = NormalizationConfig(units=False, malformed_operators=True, nits=True)
EXTRACTION = (LatexExtractionConfig(normalization_config=NORMALISATION),)  # never the number at the end of a text
NUMBER = re.compile(r"\s*-?\d+(?:\.\d+)?\s*")
CHOICE_PREFIX = re.compile(
    r"\A(?i:(?:the )?(?:correct )?(?:option|choice|answer)s?(?: is| are)?\b[\s:]*)(?=\(?[A-Z]\b)"
)
LETTER = r"(?:[A-Z]|\([A-Z]\))"
LETTERS = re.compile(rf"{LETTER}(?:(?:\s*(?:,|;|&|\band\b)\s*)+{LETTER})+|[A-Z]{{2,}}")  # "A, B and D"


def math_equal(candidate: str, gold: str) -> bool:
    """Return whether `candidate` equals `gold`: numbers, expressions, sets, intervals, matrices or choice letters.

    - A unit or a percent sign counts only if both answers have one: `5 cm` equals 5 and `5 centimeters`, but not
      `5 km`. Units are not converted. 50% equals 50 and 0.5.
    - If the gold answer is prose, the words must be the same. Otherwise, letters are a product: `BC` equals `CB`.
    - If the gold answer is a capital letter, "A. 5 cm" and "Option A" count as A. Several letters are a set.
    - Dates, ranges and clock times are not computed, and inequalities equal the intervals of their solutions.
    - An answer that math-verify would not read whole (grammar.py), such as "1 2" or A^T, is equal only as a text.
    """
    candidate, gold = normalise(candidate), normalise(gold)
    if not candidate:
        return False
    if _compact(candidate) == _compact(gold):
        return True
    (chosen, candidate_text), (letter, gold_text) = _choice(candidate), _choice(gold)
    if chosen and letter:
        return chosen == letter and (not (candidate_text and gold_text) or math_equal(candidate_text, gold_text))
    if candidate_text or gold_text:
        return math_equal(candidate_text or candidate, gold_text or gold)
    if _letters(candidate) == _letters(gold) != "" and re.search(r"\W", candidate + gold):
        return True
    gold = letter or gold
    if _is_words(gold):
        return _plain_words(candidate) == _plain_words(gold)
    if bool(RELATION.search(candidate)) != bool(RELATION.search(gold)):
        candidate, gold = solution_set(candidate), solution_set(gold)
    unnamed = without_names(candidate, gold)
    return unnamed is not None and _same_value(*unnamed)


def _same_value(candidate: str, gold: str) -> bool:
    """Compare two answers without names, with math-verify if they are to be computed."""
    (candidate, unit), (gold, gold_unit) = split_unit(candidate), split_unit(gold)
    if unit and gold_unit and unit != gold_unit:
        return False
    (kind, parts), (gold_kind, gold_parts) = joined_numbers(candidate), joined_numbers(gold)
    kinds = {kind, gold_kind}
    if kinds != {"time", "ratio"} and (kinds & {"date", "range", "time"} or kinds == {"difference"}):
        return parts == gold_parts and (len(kinds) == 1 or kinds == {"time", "fraction"})
    is_false = "=" not in gold and _is_false(candidate)
    if is_false or not is_readable(candidate) or not is_readable(gold):
        return _as_text(candidate) == _as_text(gold)
    if _verify(candidate, gold):
        return True
    if candidate.count("\\pm") + gold.count("\\pm") == 1:
        return _verify(_with_both_signs(candidate), _with_both_signs(gold))
    if {unit, gold_unit} != {"%", None}:  # 50% equals 50 and 0.5
        return False
    hundredth = f"\\frac{{{candidate if unit else gold}}}{{100}}"
    return _verify(hundredth, gold) if unit else _verify(candidate, hundredth)


def _with_both_signs(text: str) -> str:
    """Write a ± b as a + b, a − b."""
    return ", ".join(dict.fromkeys(text.replace("\\pm", sign) for sign in "+-"))


def _verify(candidate: str, gold: str) -> bool:
    # Each answer is put in a box, because `12 \\sqrt{3}` would otherwise be parsed as 3.
    boxed = [parse("\\boxed{" + text + "}", EXTRACTION, parsing_timeout=None) for text in (gold, candidate)]
    if not re.search(r"[jk]", candidate + gold):  # with these, i may be a direction or an index
        boxed = [[_with_imaginary_unit(each) for each in answer] for answer in boxed]
    return bool(verify(*boxed, timeout_seconds=None))


def _with_imaginary_unit(answer: Any) -> Any:
    units = {symbol: I for symbol in getattr(answer, "free_symbols", ()) if symbol.name == "i"}
    return answer.subs(units) if units else answer


def _same_number(a: Basic, b: Basic, *_: int) -> bool:
    """Return whether two numbers, matrices of numbers or expressions are equal; replaces math-verify's comparison.

    math-verify compares to a fixed number of decimals, so that all tiny numbers are equal. Here, a decimal equals a
    number if both have the same six decimals and differ by less than 1e-5 of their size. Exact numbers are compared to
    50 digits, and 12 if they contain decimals.
    """
    if isinstance(a, MatrixBase) or isinstance(b, MatrixBase):
        return _compare_matrices(a, b, 6, 15)
    percents = [grader.get_pct_val(each) for each in (a, b)]
    if (percents[0] is None) != (percents[1] is None) and _same_number(percents[0] or a, percents[1] or b):
        return True  # 9% equals 9
    is_decimal = any(grader.is_atomic_or_pct_atomic(each, Float) for each in (a, b))
    a, b = grader.safe_sympy_doit(a), grader.safe_sympy_doit(b)
    if a.is_Rational and b.is_Rational:
        return a == b
    try:
        if a.free_symbols or b.free_symbols:
            terms = [each.evalf(30).as_coefficients_dict() for each in (a, b)]
            return all(_are_close(terms[0][key], terms[1][key], 1e-12) for key in {*terms[0], *terms[1]})
        if is_decimal:
            return a.round(6) == b.round(6) and _are_close(a, b, 1e-5)
        return _are_close(a, b, 1e-12 if a.has(Float) or b.has(Float) else 1e-50)
    except (ArithmeticError, AttributeError, NotImplementedError, TypeError, ValueError):  # it cannot be evaluated
        return False


def _are_close(a: Basic, b: Basic, tolerance: float) -> bool:
    """Return whether two finite numbers differ by at most `tolerance`, relative to the larger one."""
    size = max(abs(a.evalf()), abs(b.evalf()))
    return bool(size.is_finite and abs((a - b).evalf()) <= tolerance * size)


def _compact(text: str) -> str:
    """Remove white space, except between two numbers."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def _choice(text: str) -> tuple[str, str]:
    """Return the letter and the text of a choice such as "B", "Option B" or "A. 5 cm"; ("", "") for any other text.

    A text that mentions another choice is none.
    """
    match = re.fullmatch(r"\(?([A-Z])(?:\)?|[.):]\s*(.*))", CHOICE_PREFIX.sub("", text), re.DOTALL)
    if not match or re.search(r"\(?\b[A-Z][.):]|\b(?:or|and)\s+\(?[A-Z]\b|[,;/]\s*\(?[A-Z]\b", match[2] or ""):
        return "", ""
    return match[1], match[2] or ""


def _letters(text: str) -> str:
    """Return the letters of a choice of several letters in alphabetical order: "ABD" for "A, D and B"; else ""."""
    text = CHOICE_PREFIX.sub("", text)
    return "".join(sorted(re.findall(r"[A-Z]", text))) if LETTERS.fullmatch(text) else ""


def _plain_words(text: str) -> str:
    return " ".join(re.findall(r"[^\W_]+|\S", text.casefold().rstrip(". ")))


def _is_words(gold: str) -> bool:
    """Return whether the gold answer is prose: "Pythagorean theorem" is; "ab", `\\sin x` and "45 degrees" are not."""
    text = _plain_words(gold)
    return text in ("no", "on", "up") or bool(re.fullmatch(r"[^\W\d_]{3,}(?:[\s'-]+[^\W\d_]+)*", text))


def _as_text(text: str) -> str:
    """Return a text in which spaces, braces around a word and the spelling of units do not count."""
    text = re.sub(r"(?<![\\A-Za-z])[A-Za-z]{2,}", lambda word: unit_symbol(word[0]) or word[0], text)
    text = re.sub(r"(?<=[A-Za-z])_\{?(\d+)\}?", r"\1", _compact(text))  # CO_2 is CO2
    return re.sub(r"(?<!\\)\{(\w*)\}", r"\1", text).strip("()")


def _is_false(text: str) -> bool:
    """Return whether `text` does not equate values: "1 = 5", or "x^2 = 9", whose last side is not what is asked."""
    *sides, last = re.sub(r"_\{[^{}]*\}", "", text).split("=")
    return any(
        (NUMBER.fullmatch(side) and side.strip() != last.strip()) or re.search("[A-Za-z]", side) for side in sides
    )


_compare_matrices = grader.sympy_numeric_eq  # compares the elements with `_same_number`
grader.sympy_numeric_eq = _same_number
# Limit memory, so that a runaway call raises MemoryError before the machine runs out of memory.
with contextlib.suppress(ValueError):  # a lower hard limit is already set
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))
# Warm up: the first call builds the parser's tables, which processes forked later share.
math_equal("\\frac{1}{2}", "0.5")
