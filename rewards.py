"""Rewards: the built-in reward functions, the table of tasks, and `Scorer`, which scores the completions of a run.

A reward is a plain function of text, `fn(completion, answer, **sample_fields) -> float | None`. `completion` is the
decoded text, after what the chat template has opened (`Prompt.opening`), without its end-of-sequence token and without
the marks that some models put around an answer. A completion whose reward is `None` is *unscored* and is left out of
its group. A reward of parts of the completion, such as steps, returns `[(start, end, value), ...]` with indices of
characters; its number is the sum of the values (training/offsets.py). Each reward's docstring gives its range, an
example, and the exploits that the reward guards against.

`TASKS` defines each task: its prompt, reward and format, and what counts as correct in evaluation. Answer parsing,
math-verify and the verifier model are in `grading/`.
"""

import itertools
import math
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from PIL import Image

from common import console, plugins
from common.errors import CallFailed, CallLost, UserError, WorkerLost
from common.records import TAG, Rewards, Rollout, Sample, Span
from config import RewardFlags
from grading import answers
from grading.answers import balanced, extract_choice, first_count, last_boxed, split_think_answer, words
from grading.math_workers import check_math, same_answer
from grading.sandbox import PARAMETERS, WorkerPool, parameters
from grading.verifier import CONCURRENCY, Verifier, make_verifier, parse_verdict
from inputs.images import decode_image

__all__ = ["extract_choice", "parse_verdict"]  # for callers that expect them here

Reward = Callable[..., float | list[tuple[int, int, float]] | None]
CALLS_TOGETHER = 32  # user-defined rewards that a worker computes one after the other, without asking for more


# --- format and length ------------------------------------------------------------------------------------------------


def format_reward(completion: str, answer: str = "", **_: object) -> float:
    """Score 1 for exactly `<think>…</think><answer>…</answer>` and 0 otherwise; range {0, 1}.

    Each tag must occur once, in lower case and in this order. Only white space may surround or separate the two blocks,
    and neither block may be blank. Example: `<think>a</think><answer>b</answer>` scores 1. Guards against several
    answer blocks (one of which is right), text after the answer, and an empty think block.
    """
    return float(completion.lstrip().startswith("<think>") and split_think_answer(completion) is not None)


def overlong_penalty(length: int, max_length: int, buffer: int) -> float:
    """Return the penalty for a long completion (DAPO, arXiv:2503.14476, eq. 13); range −1 to 0.

    The penalty is 0 up to max_length − buffer tokens and falls linearly to −1 at max_length. Example: with a limit of
    100 tokens and a buffer of 20, a completion of 90 tokens gets −0.5. Guards against reasoning that continues until it
    is truncated. Raises ValueError unless 0 < buffer <= max_length.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"the overlong buffer ({buffer}) must be above 0 and at most the length limit ({max_length})")
    return max(-1.0, min(0.0, (max_length - buffer - length) / buffer))


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

MAX_ANSWER_CHARS = 2000  # unless the gold answer is long; see `_max_chars`


def _max_chars(gold: str) -> int:
    """Return the length above which an answer is neither compared as a whole nor sent to the verifier.

    It could overflow the verifier's context.
    """
    return max(MAX_ANSWER_CHARS, 4 * len(gold))


def find_answer(text: str, gold: str) -> str | None:
    """Return the part of an answer that equals the gold answer, or None. Used in training and in evaluation."""
    candidates = answers.math_candidates(text, _max_chars(gold), answers.count_values(gold))
    return next((candidate for candidate in candidates if same_answer(candidate, gold)), None)


def math_reward(
    completion: str,
    answer: str,
    question: str = "",
    verifier: Callable[[str, str, str], bool | str | None] | None = None,
    **_: object,
) -> float | None:
    """Score 1 if the answer is mathematically equal to the gold answer, −1 if not, None if the verifier cannot tell.

    The reward is −1 unless the format is correct. The candidate is the last balanced `\\boxed{…}` of the answer block,
    or the whole block if the block has no box. The reward is 1 if math-verify finds the candidate, or the formula or
    number in its sentence, equal to the gold answer. Otherwise, `verifier(question, gold, candidate)` decides; it
    returns a verdict or the text of a reply. Without a verifier, the reward is then −1.

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
    verdict = parse_verdict(verdict) if isinstance(verdict, str) else verdict
    return None if verdict is None else 1.0 if verdict else -1.0


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
    return _no_match(math_reward, answer, answer.replace("\\boxed", ""))  # of several boxes, an answer gives the last


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
    format: Reward = format_reward  # 1 if a completion has the requested format, else 0; reported in evaluation
    exact_match: Callable[[str, str, float], bool] = has_full_reward
    """Whether (completion, answer, reward) counts as correct in evaluation."""
    gold_problem: Callable[[str], str | None] = lambda answer: None
    """Why no completion could match this gold answer, or None."""


TASKS = {
    "count": Task(
        count_reward,
        system="Count the objects. Reply: A photo of [NUMBER] [OBJECT_TYPE]",
        template="{{ content }}",
        format=count_format,
        gold_problem=_count_gold_problem,
    ),
    "vqa": Task(vqa_reward, gold_problem=_vqa_gold_problem),
    "math": Task(math_reward, gold_problem=_math_gold_problem),
}


def get_task(name: str) -> Task:
    """Return the task called `name`. Raises UserError if it is not in `TASKS`."""
    if name not in TASKS:
        raise UserError(f"--task {name}: choose one of {', '.join(TASKS)}, or add a task with --plugin FILE")
    return TASKS[name]


def gold_problem(task: str | None, answer: str) -> str | None:
    """Return the reason why no completion could match this gold answer, or None if the answer is usable."""
    if not str(answer).strip():
        return "the answer is empty"
    return get_task(task).gold_problem(str(answer)) if task else None


# --- scoring a run ----------------------------------------------------------------------------------------------------

REWARD_TIMEOUT = 10.0  # seconds for importing the file of a user-defined reward, and for scoring one completion with it
MAX_REWARD = 1e15  # larger rewards and weights could overflow float32
MAX_UNSCORED = 0.1  # maximum fraction of unscored completions in a step; above it, the run stops


def _decoded_images(sample: Sample) -> list[Image.Image]:
    """Decode the images of a row. Raises UserError if one can no longer be read, or if they were not kept."""
    if "\n".join(sample.texts).count(TAG) != len(sample.images):
        raise UserError(f"{sample.source}: saved predictions hold no images, which a reward needs: sample again")
    try:
        return [decode_image(source) for source in sample.images]
    except (OSError, ValueError) as error:
        raise UserError(f"{sample.source}: an image can no longer be read ({error}): restore or replace it") from None


@dataclass(frozen=True)
class Value:
    """What a reward has returned for a completion."""

    number: float = math.nan  # NaN if the completion is unscored
    spans: tuple[tuple[int, int, float], ...] = ()  # (start, end, value), in order
    error: str = ""


class Scorer:
    """Score completions with all rewards of a run.

    The rewards are, in this order: the task's own, each `--reward`, and "overlong" if that penalty is on.
    """

    def __init__(self, task: str, flags: RewardFlags, overlong_buffer: int = 0):
        get_task(task)
        self.task, self.flags, self.overlong_buffer = task, flags, overlong_buffer
        self.built_in = {name: each.reward for name, each in TASKS.items()} | {"format": format_reward}
        self.weights = {task: 1.0}
        self.user_functions: dict[str, str] = {}  # name of each user-defined reward -> "file.py:function"
        self.parameters: dict[str, set[str] | None] = {}  # of each user-defined reward; None if it accepts any
        self.required: dict[str, set[str]] = {}  # those of its parameters that have no default
        self.sees_images: set[str] = set()  # user-defined rewards with a parameter `images`
        for text in flags.reward:
            self._add(text)
        for task in self.weights.keys() - self.user_functions.keys():
            reward = self.built_in[task]
            if reward.__module__ != __name__ and (name := plugins.name_of(reward)):  # then the workers compute it, too
                self._add_function(task, name, parameters(name))
        if not any(self.weights.values()):
            raise UserError("--reward: every reward has the weight 0, so there is nothing to train for")
        if "math" in self.weights:
            check_math()
        self.verifier: Verifier | None = make_verifier(flags) if "math" in self.weights else None
        self.workers = WorkerPool(2, list(self.user_functions.values())) if self.user_functions else None
        self.why_none = ""  # why the most recent unscored completion has no reward

    @property
    def gold_task(self) -> str | None:
        """The task, if its rule alone decides which answers are right; None with a verifier, or if its weight is 0."""
        return None if not self.weights[self.task] or (self.task == "math" and self.verifier) else self.task

    @property
    def all_weights(self) -> dict[str, float]:
        """`weights` and that of the overlong penalty, by the names in `Rewards.parts` and in the metrics."""
        return self.weights | ({"overlong": 1.0} if self.overlong_buffer else {})

    def _add(self, text: str) -> None:
        """Register one `--reward NAME[=WEIGHT]`. NAME is a built-in reward or file.py:function."""
        match = re.fullmatch(r"(.+?)(?:=([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?))?", text)
        name, weight = (match[1], float(match[2] or 1)) if match else ("", 1.0)
        file, _, function = name.rpartition(":")
        if "=" in function or not abs(weight) < MAX_REWARD:
            raise UserError(f"--reward {text}: the weight must be a finite number below {MAX_REWARD:g}")
        if name in (*self.built_in, self.user_functions.get(function)):  # the last weight counts
            self.weights[function] = weight
            return
        if not file.endswith(".py"):
            raise UserError(
                f"--reward {text}: give file.py:function or one of {', '.join(self.built_in)}, "
                "optionally followed by =WEIGHT"
            )
        if function in self.weights or function in (*self.built_in, "overlong", "no_verdict"):
            raise UserError(f"--reward {text}: a reward named {function!r} already exists; rename the function")
        try:
            found = WorkerPool(1, [PARAMETERS]).call(PARAMETERS, REWARD_TIMEOUT, {"name": name})
        except CallFailed as error:
            raise UserError(f"--reward {text}: it cannot be loaded ({error})") from error
        self.weights[function] = weight
        self._add_function(function, name, found)

    def _add_function(self, name: str, function: str, found: tuple[list[str], list[str], bool]) -> None:
        """Register the user's `function`, file.py:function, as the reward `name`; `found`: see `sandbox.parameters`."""
        parameters, required, accepts_any = found
        if not {"completion", "answer"} <= set(parameters):
            raise UserError(f"--reward {function}: it must be a function of (completion, answer, **fields)")
        self.user_functions[name] = function
        self.parameters[name] = None if accepts_any else set(parameters)
        self.required[name] = set(required)
        self.sees_images |= {name} if "images" in parameters else set()

    def check_columns(self, samples: Sequence[Sample]) -> None:
        """Raise UserError if a row lacks a column that a user-defined reward requires."""
        for sample in samples:
            columns = {name for name, value in sample.fields.items() if value is not None}
            for function, required in self.required.items():
                if missing := sorted(required - columns - {"completion", "answer", "question", "images"}):
                    raise UserError(
                        f"--reward {function}: {sample.source} has no {missing[0]!r}: add this column, or give the "
                        "function's parameter a default value"
                    )

    def __call__(
        self, samples: Sequence[Sample], rollouts: Sequence[list[Rollout]], max_length: int | None = None
    ) -> tuple[list[list[Rewards]], str | None]:
        """Return the rewards of each sample's completions, and the first error of a user-defined reward or None.

        `max_length` is the completion length limit in tokens for the overlong penalty; None turns the penalty off.
        """
        if self.verifier:
            self.verifier.reset_failures()
        pairs = [(sample, rollout) for sample, group in zip(samples, rollouts, strict=True) for rollout in group]
        jobs: list[tuple[str, list[tuple[Sample, Rollout]]]] = []
        for name in self.weights:
            size = 1 if name == "math" else min(CALLS_TOGETHER, math.ceil(len(pairs) / 8))  # "math" may ask a verifier
            jobs += [(name, pairs[first : first + size]) for first in range(0, len(pairs), max(size, 1))]
        uses_workers = self.user_functions or "math" in self.weights  # the other rewards take microseconds
        threads = CONCURRENCY if self.verifier else 8 if uses_workers else 1
        values: dict[str, list[Value]] = {name: [] for name in self.weights}
        with (
            ThreadPoolExecutor(threads) as pool,
            console.progress(desc="rewards", total=len(pairs) * len(values)) as bar,
        ):
            for (name, chunk), results in zip(jobs, pool.map(lambda job: self._values(*job), jobs)):
                values[name] += results
                bar.update(len(chunk))
        errors, scored, results = [], [], zip(*values.values())
        for sample, group in zip(samples, rollouts):
            scored.append([])
            for rollout in group:
                found = dict(zip(values, next(results)))
                for name, value in found.items():
                    if value.error:
                        flag = "--task" if name == self.task else "--reward"
                        where = f"{self.user_functions.get(name, name)} on {sample.source}, {rollout.text[:60]!r}"
                        errors.append(f"{flag} {where}: {value.error}")
                scored[-1].append(self._rewards(found, len(rollout.ids), max_length))
        return scored, errors[0] if errors else None

    def _rewards(self, found: dict[str, Value], length: int, max_length: int | None) -> Rewards:
        """Return the rewards of a completion of `length` tokens, and of each part of it that has its own."""
        parts = {name: value.number for name, value in found.items()}
        edges = sorted({edge for value in found.values() for *place, _ in value.spans for edge in place})
        spans = []
        for start, end in itertools.pairwise(edges):
            own = {name: x for name, value in found.items() for a, b, x in value.spans if a <= start < b}
            if own:
                spans.append(Span(start, end, self._sum(parts | own, length, max_length)))
        return replace(self._sum(parts, length, max_length), spans=tuple(spans))

    def _sum(self, parts: dict[str, float], length: int, max_length: int | None) -> Rewards:
        """Return the weighted sum of `parts`, and the overlong penalty for a completion of `length` tokens."""
        raw = sum(weight * parts[name] for name, weight in self.weights.items() if weight)
        if not (self.overlong_buffer and max_length):
            return Rewards(raw, raw, parts)
        penalty = overlong_penalty(length, max_length, self.overlong_buffer)
        return Rewards(raw + penalty, raw, parts | {"overlong": penalty})

    def _values(self, name: str, pairs: list[tuple[Sample, Rollout]]) -> list[Value]:
        """Compute one reward of each completion."""
        calls = []
        images: dict[str, list[Image.Image]] = {}  # by row, so that the calls for its completions share them
        for sample, rollout in pairs:
            fields: dict[str, Any] = {"question": sample.prompt}
            fields |= {column: value for column, value in sample.fields.items() if value is not None}
            if isinstance(fields["question"], str):
                fields["question"] = fields["question"].replace(TAG, "").strip()
            if name in self.sees_images:
                fields["images"] = images.get(sample.source) or _decoded_images(sample)
                images[sample.source] = fields["images"]
            calls.append(fields | {"completion": answers.without_marks(rollout.text), "answer": sample.answer})
        if name not in self.user_functions:
            return [self._built_in_value(name, fields) for fields in calls]
        parameters = self.parameters[name]
        calls = [{k: v for k, v in fields.items() if parameters is None or k in parameters} for fields in calls]
        results = self.workers.call_all(self.user_functions[name], REWARD_TIMEOUT, calls)
        return [self._judge(self.user_functions[name], result) for result in results]

    def _built_in_value(self, name: str, fields: dict[str, Any]) -> Value:
        """Compute the reward of a task or `format_reward`."""
        try:
            value = self.built_in[name](**fields | {"verifier": self.verifier})
        except WorkerLost as error:
            self.why_none = f"{name}: {error}"
            return Value()
        if value is None and name == "math":  # it does so only if the verifier gives no verdict
            self.why_none = f"{self.verifier.url}: {self.verifier.last_error}"
            return Value()
        return self._judge(name, value)

    def _judge(self, function: str, returned: Any) -> Value:
        """Check what a reward has returned."""
        if isinstance(returned, CallLost):
            self.why_none = f"{function} {returned}"
            return Value()
        if isinstance(returned, CallFailed):
            return Value(error=str(returned))
        if returned is None:
            self.why_none = f"{function} returned None"
            return Value()
        try:
            if isinstance(returned, int | float) and abs(returned) < MAX_REWARD:
                return Value(float(returned))
            if isinstance(returned, list) and _are_spans(returned):
                return Value(float(sum(value for *_, value in returned)), tuple(map(tuple, returned)))
            shown = reprlib.repr(returned)
        except (OverflowError, ValueError):  # Python neither converts nor prints such a long integer
            shown = "an integer above 1e308"
        expected = "a finite number, or spans [(start, end, value), …] in order that do not overlap"
        return Value(error=f"it returned {shown}; expected {expected}")


def _are_spans(value: list) -> bool:
    """Return whether `value` lists (start, end, reward) in order, without overlap."""
    if not all(isinstance(span, list | tuple) and len(span) == 3 for span in value):
        return False
    edges = [edge for start, end, _ in value for edge in (start, end)]
    are_numbers = all(isinstance(x, int | float) and abs(x) < MAX_REWARD for *_, x in value)
    are_ordered = all(isinstance(edge, int) for edge in edges) and edges == sorted(edges) and min(edges, default=0) >= 0
    return are_numbers and are_ordered and all(start < end for start, end, _ in value)
