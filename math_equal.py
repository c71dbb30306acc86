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


def math_equal(candidate: str, gold: str) -> bool:
    """Whether `candidate` is `gold`: numbers, expressions, sets, intervals, matrices and letters of choices.

    Both are wrapped in a box, without which «12 \\sqrt{3}» is read as 3. Answers in words are compared as words:
    math-verify multiplies their letters, and «silent» would equal «listen».
    """
    candidate, gold = candidate.strip().strip("$").strip(), gold.strip().strip("$").strip()
    if not candidate or not _balanced(candidate):  # «1} \boxed{2» would be two answers
        return False
    if _in_words(gold):
        return _bare(candidate) == _bare(gold)
    boxed = [parse("\\boxed{" + text + "}", parsing_timeout=None) for text in (gold, candidate)]
    return bool(verify(*boxed, timeout_seconds=None))


def _balanced(text: str) -> bool:
    depth = 0
    for brace in re.findall(r"(?<!\\)[{}]", text):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            return False
    return depth == 0


def _bare(text: str) -> str:
    """The words of a text, with LaTeX's wrapping of text removed."""
    text = re.sub(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}", r"\1", text)
    return " ".join(re.findall(r"[^\W_]+|\S", text.casefold().rstrip(". ")))


def _in_words(gold: str) -> bool:
    """«Pythagorean theorem», but not «ab», «\\sin x» or «45 degrees»."""
    return bool(re.fullmatch(r"[^\W\d_]{3,}(?:[\s'-]+[^\W\d_]+)*\.?", _bare(gold)))


# A call that grows without bound fails by itself before the machine runs out of memory.
resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))
math_equal("\\frac{1}{2}", "0.5")  # the grammar's tables are built by the first call, before workers are forked
