"""Explicit reward functions: `fn(completion, answer, **sample_fields) -> float | None`.

A reward is a plain function of text; the completion has no end-of-sequence token left in it. `None` means «no verdict»
and leaves the completion out of its group. Each docstring names the range, an example and an exploit that the function
closes. `REWARDS` is the reward of each task, `exact_match` what evaluation counts as right; scoring.py puts a run's
rewards together.
"""

import functools
import os
import re
import threading
import unicodedata
from collections import Counter
from collections.abc import Callable

from cli import UserError
from verifier import parse_verdict, without_thinking
from workers import CallFailed, WorkerLost, Workers

Reward = Callable[..., float | None]

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


def format_reward(completion: str, answer: str = "", **_: object) -> float:
    """1 for `<think>…</think><answer>…</answer>` and nothing else, 0 otherwise; range {0, 1}.

    Each tag occurs once, lower case, in order; only white space around and between the blocks; neither is blank.
    Example: «<think>a</think><answer>b</answer>» is 1. Closes: several answer blocks, one of them right; text after the
    answer; an empty think block.
    """
    return float(split_think_answer(completion) is not None)


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


def count_reward(completion: str, answer: str | int, **_: object) -> float:
    """How close the count is; range {0, 0.2, 0.3, 0.4, 0.7, 0.85, 1}.

    With d the distance to the gold count: 0 → 1, 1 → 0.85, 2 → 0.7, 3 to 5 → 0.5 − 0.1·(d − 2), else 0; 0 without a
    number. Example: «A photo of 12 apples» for «A photo of 10 apples» is 0.7. Closes: listing many numbers (the first
    one counts), counting in the think block, hedging with a decimal.
    """
    said, gold = first_count(completion), first_count(str(answer))
    if said is None or gold is None:
        return 0.0
    d = abs(said - gold)
    if d <= 2:
        return (1.0, 0.85, 0.7)[d]
    return round(0.5 - 0.1 * (d - 2), 4) if d <= 5 else 0.0


def count_format(completion: str, **_: object) -> float:
    """1 for «A photo of [NUMBER] [OBJECT_TYPE]», 0 otherwise. Reported in evaluation; not part of the reward."""
    return float(re.fullmatch(r"\s*A photo of \d[\d,]* \S[^\n]*", completion) is not None)


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


def vqa_reward(completion: str, answer: str, **_: object) -> float:
    """Answer accuracy once the format holds; range 0, or 0.5 to 1.

    A gold «yes» or «no»: 1 when the answer's first word is it and the opposite is nowhere, else 0. Any other gold: 1
    when the words are equal, else their F1 when it is at least 0.5, else 0. Example: answer «CT scan», gold «ct» → 2/3.
    Closes: «yes and no»; «abnormal» holding «no»; a list of every possible answer.
    """
    parts = split_think_answer(completion)
    gold = words(str(answer))
    if parts is None or not gold:
        return 0.0
    said = words(parts[1])
    if gold in (["yes"], ["no"]):
        opposite = "no" if gold == ["yes"] else "yes"
        return float(said[:1] == gold and opposite not in said)
    if said == gold:
        return 1.0
    common = (Counter(said) & Counter(gold)).total()
    f1 = 2 * common / (len(said) + len(gold))
    return f1 if f1 >= 0.5 else 0.0


# --- parts of the math reward and of multiple choice ------------------------------------------------------------------


def overlong_penalty(length: int, max_length: int, buffer: int) -> float:
    """What an overlong completion costs (DAPO, arXiv:2503.14476, eq. 13); range −1 to 0.

    0 up to max_length − buffer tokens, then falling linearly to −1 at max_length. Example: 90 tokens of at most 100
    with a buffer of 20 cost 0.5. Closes: reasoning that goes on until it is cut off.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"the overlong buffer ({buffer}) must be above 0 and at most the length limit ({max_length})")
    return max(-1.0, min(0.0, (max_length - buffer - length) / buffer))


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


# --- mathematics ------------------------------------------------------------------------------------------------------

LONGEST_ANSWER = 2000  # characters that a verifier is asked about; padding must not push it out of its context
RULE_SECONDS = 1.0  # a comparison takes milliseconds; what takes longer is a trap
MATH_EQUAL = os.path.join(os.path.dirname(os.path.abspath(__file__)), "math_equal.py:math_equal")


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


_making_workers = threading.Lock()


@functools.cache
def _math_workers() -> Workers:
    """Processes that compare answers; this machine's cores shared among its training processes."""
    share = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return Workers(min(max(share, 1), 8), [MATH_EQUAL])


def check_math() -> None:
    """Raise UserError when math-verify does not work here, which would make every answer wrong."""
    try:
        with _making_workers:
            workers = _math_workers()
        works, why = workers.call(MATH_EQUAL, 60.0, {"candidate": "0.5", "gold": "\\frac{1}{2}"}), "0.5 is not 1/2"
    except CallFailed as error:
        works, why = False, str(error)
    if not works:
        raise UserError(f"math-verify does not work here ({why}): install requirements.txt, and see above what it said")


def balanced(text: str) -> bool:
    """Whether every brace that LaTeX would count has its partner."""
    depth = 0
    for token in re.findall(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(token, 0)
        if depth < 0:
            return False
    return depth == 0


def same_answer(candidate: str, gold: str) -> bool:
    """Whether math-verify finds two answers the same, within `RULE_SECONDS`; False when it cannot tell. Raises
    WorkerLost when its process was ended from outside: no verdict."""
    candidate, gold = candidate.strip(), gold.strip()
    if candidate == gold:
        return True
    if not balanced(candidate):  # «1} \\boxed{2» would be two answers
        return False
    with _making_workers:
        workers = _math_workers()
    try:
        return workers.call(MATH_EQUAL, RULE_SECONDS, {"candidate": candidate, "gold": gold})
    except WorkerLost:
        raise
    except CallFailed:
        return False


def math_reward(
    completion: str,
    answer: str,
    question: str = "",
    verifier: Callable[[str, str, str], bool | str | None] | None = None,
    **_: object,
) -> float | None:
    """Whether the answer is mathematically the gold one; −1, 1, or None without a verdict.

    −1 unless the format holds. 1 when the answer block, or its last balanced box, equals the gold by math-verify. Else
    `verifier(question, gold, candidate)` decides where there is one: its verdict or its reply; without one it is −1.
    Example: «<think>t</think><answer>0.5</answer>» for \\frac{1}{2} is 1. Closes: several answers, one of them right;
    letters in another order; answers that compute for ever; answers that tell the verifier what to reply, or that are
    too long for it.
    """
    parts = split_think_answer(completion)
    if parts is None:
        return -1.0
    candidate = (last_boxed(parts[1]) or parts[1]).strip()
    if same_answer(candidate, str(answer)):
        return 1.0
    if verifier is None or len(candidate) > max(LONGEST_ANSWER, 4 * len(str(answer))):
        return -1.0
    verdict = verifier(question, str(answer), candidate)
    verdict = parse_verdict(verdict) if isinstance(verdict, str) else verdict
    return None if verdict is None else 1.0 if verdict else -1.0


# --- tasks ------------------------------------------------------------------------------------------------------------

REWARDS: dict[str, Reward] = {"count": count_reward, "vqa": vqa_reward, "math": math_reward}
FORMATS: dict[str, Reward] = {"count": count_format, "vqa": format_reward, "math": format_reward}


def exact_match(task: str, completion: str, answer: str, reward: float | None = None) -> bool:
    """Whether the answer is right, not only near: full reward, and for VQA the gold's words in the gold's order.

    `reward` is the task's, when it is known already.
    """
    right = (REWARDS[task](completion, answer) if reward is None else reward) == 1.0
    gold = words(str(answer))
    if not right or task != "vqa" or gold in (["yes"], ["no"]):
        return right
    return words(split_think_answer(completion)[1]) == gold


def gold_problem(task: str | None, answer: str) -> str | None:
    """Why no completion could ever be right for this gold answer, or None when it is fine."""
    if not str(answer).strip():
        return "the answer is empty"
    if task == "math" and not balanced(answer):
        return f"the answer {str(answer)[:40]!r} has unbalanced braces: no answer can equal it"
    if task == "count" and first_count(str(answer)) is None:
        return f"the answer {str(answer)[:40]!r} has no whole number to count to"
    if task == "vqa" and not words(str(answer)):
        return f"the answer {str(answer)[:40]!r} has no word to compare"
    return None
