"""Rewards: the built-in reward functions and the table of tasks. `Scorer` (evaluation/scorer.py) calls them.

A reward is a plain function of text, `fn(completion, answer, **sample_fields) -> float | None`. `completion` is
`Prompt.opening`, such as a `<think>` from the chat template, and the decoded text. It lacks the end-of-sequence token
and the marks that some models put around an answer. A completion whose reward is `None` is *unscored* and is left out
of its group. To reward parts of a completion, such as steps, return `[(start, end, value), ...]` with indices of
characters; the whole reward is the sum of the values (training/offsets.py). Each reward's docstring gives its range, an
example, and the exploits that the reward guards against.

`TASKS` defines each task: its prompt, reward and format, and what counts as correct in evaluation. Answers are read in
`grading/answers.py`; math-verify and the verifier model are in `parts/math`.
"""

import re
import reprlib
from collections import Counter
from collections.abc import Callable
from numbers import Real
from types import ModuleType
from typing import Annotated, Any, Literal

import numpy as np

from common.errors import UserError, WorkerLost, dataclass, describe, find_entry, takes
from grading import answers
from grading.answers import balanced, first_count, split_think_answer, visible, words

Reward = Callable[..., float | list[tuple[int, int, float]] | None]


# --- format ----------------------------------------------------------------------------------------------------------


def format_reward(completion: str, answer: str = "", **_: object) -> float:
    """Score 1 for exactly `<think>…</think><answer>…</answer>` and 0 otherwise; range {0, 1}.

    Each tag must occur once, in lower case and in this order. Only white space may surround or separate the two blocks,
    and neither block may be blank. Example: `<think>a</think><answer>b</answer>` scores 1. Guards against several
    answer blocks (one of which is right), text after the answer, and an empty think block.
    """
    return float(completion.lstrip().startswith("<think>") and split_think_answer(completion) is not None)


# --- counting ---------------------------------------------------------------------------------------------------------

COUNT_REWARDS = (1.0, 0.85, 0.7, 0.4, 0.3, 0.2)  # at a distance of 0, 1, ... from the gold count


def count_reward(completion: str, answer: str | int, **_: object) -> float:
    """Score how close the count is to the gold count; range {0, 0.2, 0.3, 0.4, 0.7, 0.85, 1}.

    `COUNT_REWARDS` has the reward at each distance from the gold count; it is 0 at larger distances, or if there is no
    number. Example: "A photo of 12 apples" scores 0.7 if the gold answer is "A photo of 10 apples". Guards against
    listing many numbers (only the first counts), counting in the think block, and hedging with a decimal.
    """
    count, gold = first_count(completion), first_count(str(answer))
    if count is None or gold is None:
        return 0.0
    d = abs(count - gold)
    return COUNT_REWARDS[d] if d < len(COUNT_REWARDS) else 0.0


def count_format(completion: str, **_: object) -> float:
    """Score 1 for "A photo of [NUMBER] [OBJECT_TYPE]" and 0 otherwise. Used in evaluation, not in training."""
    return float(re.fullmatch(r"\s*A photo of \d[\d,]* \S[^\n]*", answers.without_marks(completion)) is not None)


# --- visual question answering ----------------------------------------------------------------------------------------


def vqa_reward(completion: str, answer: str, **_: object) -> float:
    """Score the words of the answer block; the reward is 0, or between 0.5 and 1.

    If the format is wrong, the reward is 0. For the gold answers "yes" and "no", the reward is 1 if the answer starts
    with that word and does not contain the opposite word; otherwise it is 0. For any other gold answer, the reward is 1
    if the words are the same (see `words`), and 0 if a number differs or only one answer has a negation. Otherwise it
    is the F1 score of the words, or 0 if that score is below 0.5; the gold words in another order count as one wrong
    word. Example: the answer "CT scan" scores 2/3 if the gold answer is "ct". Guards against "yes and no", against
    finding "no" in "abnormal", against "L4" for "L5", and against listing every possible answer.
    """
    blocks = split_think_answer(completion)
    gold = words(str(answer))
    if blocks is None or not gold:
        return 0.0
    answered = words(blocks[1])
    if gold in (["yes"], ["no"]):
        opposite = "no" if gold == ["yes"] else "yes"
        return float(answered[:1] == gold and opposite not in answered)
    if answered == gold or words(blocks[1], keep_articles=True) == words(str(answer), keep_articles=True):
        return 1.0
    if answers.contradicts(answered, gold):
        return 0.0
    overlap = (Counter(answered) & Counter(gold)).total() - (sorted(answered) == sorted(gold))
    f1 = 2 * overlap / (len(answered) + len(gold))
    return f1 if f1 >= 0.5 else 0.0


# --- mathematics ------------------------------------------------------------------------------------------------------


def mathematics() -> ModuleType:
    """Return parts/math/reward.py, which reads and compares answers."""
    from parts.math import reward

    return reward


def same_answer(candidate: str, gold: str) -> bool:
    """Return whether math-verify finds two answers equal; see `parts.math.compare.same_answer`."""
    return mathematics().same_answer(candidate, gold)


def math_reward(
    completion: str, answer: str, question: str = "", verifier: Callable | None = None, **_: object
) -> float | None:
    """Score 1 if the answer is mathematically equal to the gold answer, −1 if not, None if no verifier can tell.

    See `parts.math.reward.math_reward`.
    """
    return mathematics().math_reward(completion, answer, question, verifier)


# --- tasks ------------------------------------------------------------------------------------------------------------


def has_full_reward(completion: str, answer: str, reward: float) -> bool:
    """Return whether the reward is 1."""
    return reward == 1.0


def _count_gold_problem(answer: str) -> str | None:
    return None if first_count(answer) is not None else f"the answer {answer[:40]!r} contains no whole number"


def _vqa_gold_problem(answer: str) -> str | None:
    problem = _no_match(vqa_reward, answer)
    return problem if not problem or words(answer) else f"the answer {answer[:40]!r} contains no words to compare"


def _math_gold_problem(answer: str) -> str | None:
    if not balanced(answer):
        return f"the answer {answer[:40]!r} has unbalanced braces: no completion can match it"
    return _no_match(math_reward, answer, answer.replace("\\boxed", ""))  # of several boxes, only the last is read


def _no_match(reward: Reward, answer: str, *others: str) -> str | None:
    """Return None if a completion that gives the gold answer, or one of `others`, has the full reward."""
    try:
        if any(reward(f"<think>t</think><answer>{text}</answer>", answer) == 1.0 for text in (answer, *others)):
            return None
    except WorkerLost:  # the answer need not be at fault
        return None
    return f"the answer {answer[:40]!r} cannot be matched: write the final answer alone, without tags or boxes"


THINK_ANSWER = (
    "{{ content }}\n\nReason first, then answer, as <think>reasoning</think><answer>answer</answer> and nothing else."
)


@dataclass(frozen=True)
class Task:
    """A task that a run trains for. `--task` is its key in `TASKS`."""

    reward: Reward  # the reward; 1 is the full reward
    system: str | None = None  # the system prompt of rows that have none
    template: str = THINK_ANSWER  # Jinja template of the user's turn; {{ content }} is the question
    format: Annotated[Callable[..., float], takes("completion")] = format_reward
    """1 if a completion has the requested format, else 0; for evaluation."""
    exact_match: Annotated[Callable[[str, str, float], bool], takes("completion, answer, reward")] = has_full_reward
    """Whether a completion counts as correct in evaluation."""
    answer_group: Annotated[Callable[[str], str], takes("answer")] = str
    """Returns the name under which evaluation groups the rows of a gold answer."""
    gold_problem: Annotated[Callable[[str], str | None], takes("answer")] = lambda answer: None
    """Why no completion could match this gold answer, or None."""

    def verdict(self, function: Literal["format", "exact_match"], *given: Any) -> bool:
        """Return what `function` says of a completion. Raises UserError if that is neither 1 nor 0, True nor False."""
        try:
            verdict = getattr(self, function)(*given)
        except Exception as error:  # a user's function may raise anything
            raise UserError(f"--task: its {function} raised {describe(error)}") from error
        if not isinstance(verdict, Real | np.bool_) or verdict not in (0, 1):
            raise UserError(f"--task: its {function} returned {reprlib.repr(verdict)}; expected True or False, 1 or 0")
        return bool(verdict)


TASKS = {
    "count": Task(
        count_reward,
        system="Count the objects. Reply: A photo of [NUMBER] [OBJECT_TYPE]",
        template="{{ content }}",
        format=count_format,
        answer_group=lambda answer: str(first_count(answer)),
        gold_problem=_count_gold_problem,
    ),
    "vqa": Task(vqa_reward, gold_problem=_vqa_gold_problem),
    "math": Task(math_reward, gold_problem=_math_gold_problem),
}


def get_task(name: str) -> Task:
    """Return the task called `name`. Raises UserError if it is not in `TASKS`."""
    return find_entry("task", name, TASKS)


def gold_problem(task: str | None, answer: str) -> str | None:
    """Return the reason why no completion could match this gold answer, or None if the answer is usable."""
    if not visible(str(answer)).strip():
        return "the answer is empty"
    return get_task(task).gold_problem(str(answer)) if task else None


# --- scoring a run ----------------------------------------------------------------------------------------------------

REWARD_TIMEOUT = 10.0  # seconds for importing the file of a user-defined reward, and for scoring one completion with it
MAX_REWARD = 1e15  # larger rewards and weights could overflow float32
MAX_UNSCORED = 0.1  # maximum fraction of unscored completions in a step; above it, the run stops
