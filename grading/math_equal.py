"""Whether two mathematical answers are the same, by math-verify. Called in killable processes only (workers.py).

math-verify's own time limit needs the main thread's alarm clock and cannot stop a long multiplication, so it is turned
off here: `9^{9^{9}}` would compute for ever, and the caller kills it.
"""

import logging
import re
import resource

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns of every answer that it cannot parse
MEMORY = 4 * 2**30  # bytes a call may take before it fails
SIGNS = ("\\to", "\\rightarrow", "\\cup", "\\mid", "\\neg", "\\sim", "\\ne", "≠", "¬", "_")  # of which it drops a side
NUMBER = re.compile(r"\s*-?\d+(?:\.\d+)?\s*")
UNIT = re.compile(r"\\(?:text|mathrm)\s*\{\s*([A-Za-z.]+)\s*\}\s*$")  # it takes no notice of units


def math_equal(candidate: str, gold: str) -> bool:
    """Whether `candidate` is `gold`: numbers, expressions, sets, intervals, matrices and letters of choices.

    Both are wrapped in a box, without which «12 \\sqrt{3}» is read as 3. Answers in words are compared as words:
    math-verify multiplies their letters, and «silent» would equal «listen».
    """
    candidate, gold = _stripped(candidate), _stripped(gold)
    if not candidate or any(sign in candidate and sign not in gold for sign in SIGNS):
        return False
    if _in_words(gold):
        return _bare(candidate) == _bare(gold)
    units = [UNIT.search(text) for text in (candidate, gold)]
    if all(units) and len({unit[1].casefold().rstrip("s.") for unit in units}) == 2:
        return False
    sides = candidate.split("=")
    if any(NUMBER.fullmatch(side) and side.strip() != sides[-1].strip() for side in sides[:-1]):  # «1 = 5»
        return False
    boxed = [parse("\\boxed{" + text + "}", parsing_timeout=None) for text in (gold, candidate)]
    return bool(verify(*boxed, timeout_seconds=None))


def _stripped(text: str) -> str:
    """Without the signs around mathematics and the full stop of a sentence."""
    return text.strip().rstrip(".。").strip().strip("$").strip().rstrip(".。")


def _bare(text: str) -> str:
    """The words of a text, with LaTeX's wrapping of text removed."""
    text = re.sub(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}", r"\1", text)
    return " ".join(re.findall(r"[^\W_]+|\S", text.casefold().rstrip(". ")))


def _in_words(gold: str) -> bool:
    """«Pythagorean theorem», but not «ab», «\\sin x» or «45 degrees»."""
    bare = _bare(gold)
    return bare in ("no", "on", "up") or bool(re.fullmatch(r"[^\W\d_]{3,}(?:[\s'-]+[^\W\d_]+)*", bare))


# A call that grows without bound fails by itself before the machine runs out of memory.
_hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
_soft = MEMORY if _hard == resource.RLIM_INFINITY else min(MEMORY, _hard)
resource.setrlimit(resource.RLIMIT_DATA, (_soft, _hard))
math_equal("\\frac{1}{2}", "0.5")  # the grammar's tables are built by the first call, before workers are forked
