"""Compare two mathematical answers with math-verify. Runs only in the killable processes of `sandbox.py`.

math-verify's own time limit is turned off, because it needs SIGALRM in the main thread and cannot interrupt a long
multiplication. Evaluating an answer such as `9^{9^{9}}` would take forever, so the caller kills the process.
"""

import contextlib
import logging
import re
import resource

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns about every answer that it cannot parse
MAX_MEMORY = 4 * 2**30  # bytes of data that a call may allocate
# math-verify ignores the text on one side of each of these symbols.
SIGNS = ("\\to", "\\rightarrow", "\\cup", "\\mid", "\\neg", "\\sim", "\\ne", "≠", "¬", "_")
NUMBER = re.compile(r"\s*-?\d+(?:\.\d+)?\s*")
UNIT = re.compile(r"\\(?:text|mathrm)\s*\{\s*([A-Za-z.]+)\s*\}\s*$")  # math-verify ignores units


def math_equal(candidate: str, gold: str) -> bool:
    """Return whether `candidate` equals `gold`: numbers, expressions, sets, intervals, matrices or choice letters.

    Both answers are wrapped in a box; otherwise `12 \\sqrt{3}` would be parsed as 3. Answers in words are compared as
    words: math-verify reads a word as a product of letters, so "silent" would equal "listen".
    """
    candidate, gold = _strip_delimiters(candidate), _strip_delimiters(gold)
    if not candidate or any(sign in candidate and sign not in gold for sign in SIGNS):
        return False
    if _is_words(gold):
        return _plain_words(candidate) == _plain_words(gold)
    units = [UNIT.search(text) for text in (candidate, gold)]
    if all(units) and len({unit[1].casefold().rstrip("s.") for unit in units}) == 2:
        return False
    sides = candidate.split("=")
    if any(NUMBER.fullmatch(side) and side.strip() != sides[-1].strip() for side in sides[:-1]):  # "1 = 5"
        return False
    boxed = [parse("\\boxed{" + text + "}", parsing_timeout=None) for text in (gold, candidate)]
    return bool(verify(*boxed, timeout_seconds=None))


def _strip_delimiters(text: str) -> str:
    return text.strip().rstrip(".。").strip().strip("$").strip().rstrip(".。")


def _plain_words(text: str) -> str:
    text = re.sub(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}", r"\1", text)
    return " ".join(re.findall(r"[^\W_]+|\S", text.casefold().rstrip(". ")))


def _is_words(gold: str) -> bool:
    """Return whether the gold answer is prose: "Pythagorean theorem" is; "ab", `\\sin x` and "45 degrees" are not."""
    text = _plain_words(gold)
    return text in ("no", "on", "up") or bool(re.fullmatch(r"[^\W\d_]{3,}(?:[\s'-]+[^\W\d_]+)*", text))


# Limit memory, so that a runaway call raises MemoryError before the machine runs out of memory.
with contextlib.suppress(ValueError):  # a lower hard limit is already set
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))
# Warm up: the first call builds the parser's tables, which processes forked later share.
math_equal("\\frac{1}{2}", "0.5")
