"""Explicit reward functions: `fn(completion, answer, **sample_fields) -> float | None`.

A reward is a plain function of text; the completion has no end-of-sequence token left in it. `None` means «no verdict»
and leaves the completion out of its group. Each docstring names the range, an example and an exploit that the function
closes. `REWARDS` is the reward of each task, `exact_match` what evaluation counts as right; scoring.py puts a run's
rewards together.
"""

import functools
import inspect
import math
import os
import pathlib
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from common import console
from common.errors import CallFailed, CallLost, UserError, WorkerLost
from common.records import TAG, Rollout, Sample
from config import RewardFlags
from grading.answers import balanced, first_count, last_boxed, split_think_answer, words
from grading.sandbox import WorkerPool, load_function
from grading.verifier import Verifier, make_verifier, parse_verdict

COUNT_SYSTEM = "Count the objects. Reply: A photo of [NUMBER] [OBJECT_TYPE]"
THINK_ANSWER = (
    "{{ content }}\n\nReason first, then answer, as <think>reasoning</think><answer>answer</answer> and nothing else."
)
TASKS = {  # task: (system prompt or None, template of the user's turn)
    "count": (COUNT_SYSTEM, "{{ content }}"),
    "vqa": (None, THINK_ANSWER),
    "math": (None, THINK_ANSWER),
}
Reward = Callable[..., float | None]


def format_reward(completion: str, answer: str = "", **_: object) -> float:
    """1 for `<think>…</think><answer>…</answer>` and nothing else, 0 otherwise; range {0, 1}.

    Each tag occurs once, lower case, in order; only white space around and between the blocks; neither is blank.
    Example: «<think>a</think><answer>b</answer>» is 1. Closes: several answer blocks, one of them right; text after the
    answer; an empty think block.
    """
    return float(split_think_answer(completion) is not None)


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


# --- mathematics ------------------------------------------------------------------------------------------------------

LONGEST_ANSWER = 2000  # characters that a verifier is asked about; padding must not push it out of its context
RULE_SECONDS = 1.0  # a comparison takes milliseconds; what takes longer is a trap
MATH_EQUAL = f"{pathlib.Path(__file__).resolve().parent}/grading/math_equal.py:math_equal"
_worker_pool_lock = threading.Lock()


@functools.cache
def _math_workers() -> WorkerPool:
    """Processes that compare answers; this machine's cores shared among its training processes."""
    share = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return WorkerPool(min(max(share, 1), 8), [MATH_EQUAL])


def check_math() -> None:
    """Raise UserError when math-verify does not work here, which would make every answer wrong."""
    try:
        with _worker_pool_lock:
            workers = _math_workers()
        works, why = workers.call(MATH_EQUAL, 60.0, {"candidate": "0.5", "gold": "\\frac{1}{2}"}), "0.5 is not 1/2"
    except CallFailed as error:
        works, why = False, str(error)
    if not works:
        raise UserError(f"math-verify does not work here ({why}): install requirements.txt, and see above what it said")


def same_answer(candidate: str, gold: str) -> bool:
    """Whether math-verify finds two answers the same, within `RULE_SECONDS`; False when it cannot tell. Raises
    WorkerLost when its process was ended from outside: no verdict."""
    candidate, gold = candidate.strip(), gold.strip()
    if candidate == gold:
        return True
    if not balanced(candidate):  # «1} \\boxed{2» would be two answers
        return False
    with _worker_pool_lock:
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


BUILT_IN: dict[str, Reward] = REWARDS | {"format": format_reward}
MAX_UNSCORED = 0.1  # of a step's completions; above it the run stops


class Scorer:
    """The rewards of a run, by name: the task's first, then those of `--reward`, then «overlong» when it is on."""

    def __init__(self, task: str, flags: RewardFlags, overlong_buffer: int = 0):
        self.task, self.flags, self.overlong_buffer = task, flags, overlong_buffer
        self.weights = {task: 1.0}
        self.calls: dict[str, str] = {}  # «file.py:function» of the user's rewards
        self.takes: dict[str, set[str] | None] = {}  # the arguments each one takes; None: any
        for text in flags.reward:
            self._add(text)
        if "math" in self.weights:
            check_math()
        self.verifier: Verifier | None = make_verifier(flags) if "math" in self.weights else None
        self.workers = WorkerPool(2, list(self.calls.values())) if self.calls else None
        self.why_none = ""  # why the last completion without a verdict has none

    @property
    def names(self) -> list[str]:
        return [*self.weights, *(["overlong"] if self.overlong_buffer else [])]

    def _add(self, text: str) -> None:
        match = re.fullmatch(r"(.+?)(?:=([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?))?", text)
        name, weight = (match[1], float(match[2] or 1)) if match else ("", 1.0)
        if name in BUILT_IN:
            self.weights[name] = weight
            return
        file, _, short = name.rpartition(":")
        if not file.endswith(".py"):
            raise UserError(f"--reward {text}: give file.py:function or one of {', '.join(BUILT_IN)}, =WEIGHT after it")
        if short in self.weights or short in (*BUILT_IN, "overlong", "no_verdict"):
            raise UserError(f"--reward {text}: there is a reward named {short!r} already; rename the function")
        try:
            parameters = inspect.signature(load_function(name)).parameters
        except (Exception, SystemExit) as error:
            raise UserError(f"--reward {text}: it cannot be loaded ({type(error).__name__}: {error})") from error
        if not {"completion", "answer"} <= set(parameters):
            raise UserError(f"--reward {text}: it must be a function of (completion, answer, **fields)")
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        self.weights[short], self.calls[short] = weight, name
        self.takes[short] = None if takes_any else set(parameters)

    def __call__(self, groups: Sequence[tuple[Sample, list[Rollout]]], max_length: int | None = None) -> str | None:
        """Give every completion its `rewards` by name and its `reward`, their weighted sum; NaN without a verdict.

        `max_length` is what the overlong penalty counts from; without it there is none. Returns what a user's function
        did wrong, for every process to stop together; None when all went well.
        """
        if self.verifier:
            self.verifier.reset_failures()
        work = [(name, sample, rollout) for sample, rollouts in groups for rollout in rollouts for name in self.weights]
        waits = self.calls or "math" in self.weights  # the others take microseconds
        threads = self.flags.verifier_concurrency if self.verifier else 8 if waits else 1
        with ThreadPoolExecutor(threads) as pool:
            done = pool.map(lambda job: self._value(*job), work)
            results = list(console.progress(done, "rewards", total=len(work), unit="call", leave=False))
        error = None
        for (name, sample, rollout), (value, problem) in zip(work, results):
            rollout.rewards[name] = value
            if problem:
                error = error or f"--reward {self.calls[name]} on {sample.source}, {rollout.text[:60]!r}: {problem}"
        for _, rollouts in groups:
            for rollout in rollouts:
                rollout.reward = sum(weight * rollout.rewards[name] for name, weight in self.weights.items() if weight)
                rollout.raw_reward = rollout.reward
                if self.overlong_buffer and max_length:
                    penalty = overlong_penalty(len(rollout.ids), max_length, self.overlong_buffer)
                    rollout.rewards["overlong"] = penalty
                    rollout.reward += penalty
        return error

    def _value(self, name: str, sample: Sample, rollout: Rollout) -> tuple[float, str | None]:
        """A completion's reward, NaN without one, and what the user's function did wrong, None when it did not."""
        given = {name: value for name, value in sample.fields.items() if value is not None}
        fields: dict[str, Any] = {"question": sample.prompt.replace(TAG, "").strip()} | given
        if name not in self.calls:
            fields = {k: v for k, v in fields.items() if k not in ("completion", "answer", "verifier")}
            try:
                value = BUILT_IN[name](rollout.text, sample.answer, verifier=self.verifier, **fields)
            except WorkerLost as error:
                self.why_none = f"{name}: {error}"
                return math.nan, None
            if value is None:
                self.why_none = f"{self.verifier.url}: {self.verifier.last_error}"
            return math.nan if value is None else value, None
        takes = self.takes[name]
        fields |= {"completion": rollout.text, "answer": sample.answer}
        fields = {k: v for k, v in fields.items() if takes is None or k in takes}
        try:
            value = self.workers.call(self.calls[name], self.flags.reward_timeout, fields)
        except CallLost as error:
            self.why_none = f"{self.calls[name]} {error}"
            return math.nan, None
        except CallFailed as error:
            return math.nan, str(error)
        if value is None:
            self.why_none = f"{self.calls[name]} gave None"
            return math.nan, None
        if not isinstance(value, int | float) or not math.isfinite(value):
            return math.nan, f"it gave {value!r}, which is no finite number"
        return float(value), None
