"""The reward for mathematics, and what it needs: `rewards.py` and `evaluation/scorer.py` ask for it."""

from collections.abc import Callable

from config import VerifierFlags
from grading.answers import last_boxed, split_think_answer
from parts.math.answers import count_values, math_answers, math_candidates
from parts.math.compare import check_math, same_answer
from parts.math.verifier import Verifier, make_verifier

__all__ = ["check_math", "make_verifier", "same_answer"]
MAX_ANSWER_CHARS = 2000  # unless the gold answer is long; see `_max_chars`


def start(flags: VerifierFlags, cache: str | None, has_verifier: bool) -> Verifier | None:
    """Check that answers can be compared, and return the verifier, if there may be one and the flags name it."""
    check_math()
    return make_verifier(flags, cache) if has_verifier else None


def _max_chars(gold: str) -> int:
    """Return the length above which an answer is neither compared as a whole nor sent to the verifier.

    It could overflow the verifier's context.
    """
    return max(MAX_ANSWER_CHARS, 4 * len(gold))


def find_answer(text: str, gold: str) -> str | None:
    """Return the part of an answer that equals the gold answer, or None."""
    candidates = math_candidates(text, _max_chars(gold), count_values(gold))
    return next((candidate for candidate in candidates if same_answer(candidate, gold)), None)


def read_answer(text: str, gold: str) -> tuple[str | None, bool]:
    """Return the answer in a text, and whether it equals the gold answer."""
    equal = find_answer(text, gold)
    return equal or next(iter(math_answers(text)), None), equal is not None


def math_reward(
    completion: str,
    answer: str,
    question: str = "",
    verifier: Callable[[str, str, str], bool | None] | None = None,
) -> float | None:
    """Score 1 if the answer is mathematically equal to the gold answer, −1 if not, None if the verifier cannot tell.

    The reward is −1 unless the format is correct. The candidate is the last balanced `\\boxed{…}` of the answer block,
    or the whole block if the block has no box. The reward is 1 if math-verify finds the candidate, or the formula or
    number in its sentence, equal to the gold answer. Otherwise, `verifier(question, gold, candidate)` decides.
    Without a verifier, the reward is then −1.

    Example: `<think>t</think><answer>0.5</answer>` scores 1 if the gold answer is `\\frac{1}{2}`. Guards against
    several answers (one of which is right), a word with its letters permuted, answers that take forever to compute, and
    answers that instruct the verifier or overflow its context.
    """
    blocks = split_think_answer(completion)
    if blocks is None:
        return -1.0
    if find_answer(blocks[1], str(answer)) is not None:
        return 1.0
    candidate = (last_boxed(blocks[1]) or blocks[1]).strip()
    if verifier is None or len(candidate) > _max_chars(str(answer)):
        return -1.0
    verdict = verifier(question, str(answer), candidate)
    return None if verdict is None else 1.0 if verdict else -1.0
