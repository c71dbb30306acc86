"""Scoring the completions of a run: `Scorer` calls its rewards, in workers where they are the user's own."""

import functools
import itertools
import math
import re
import reprlib
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

from PIL import Image

import rewards
from common import console, plugins
from common.errors import CallFailed, CallLost, UserError, WorkerLost, check_call, find_entry
from common.records import TAG, Rewards, Rollout, Sample, Span
from config import RewardFlags, VerifierFlags
from grading import answers
from inputs.images import decode_image
from rewards import MAX_REWARD, format_reward, get_task

RESERVED = ("overlong", "no_verdict")  # names of other metrics, which no reward may have
CALLS_TOGETHER = 32  # maximum number of completions that a worker is given at once


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


def start_math(flags: VerifierFlags, cache: str | None = None, has_verifier: bool = True) -> Any:
    """Check that answers can be compared; return the `Verifier` that `flags` name, if any. `cache`: of its replies."""
    return rewards.mathematics().start(flags, cache, has_verifier)


class Scorer:
    """Score completions with all rewards of a run.

    The rewards are, in this order: the task's own, each `--reward`, and "overlong" if that penalty is on.
    """

    def __init__(self, task: str, flags: RewardFlags, overlong_buffer: int = 0):
        get_task(task)
        self.task, self.flags = task, flags
        self.penalty: Any = None  # the overlong penalty, if there is one
        if overlong_buffer:
            from parts.dapo import OverlongPenalty

            self.penalty = OverlongPenalty(overlong_buffer)
        self.built_in = {name: each.reward for name, each in rewards.TASKS.items()} | {"format": format_reward}
        self.weights = {task: 1.0}
        if flags.env in (*self.built_in, *RESERVED):
            raise UserError(f"--env {flags.env}: a reward has this name; rename the entry of ENVIRONMENTS")
        if task in ("format", *RESERVED):
            raise UserError(f"--task {task}: a reward has this name; rename the entry of TASKS")
        if flags.env:  # what the environment gives for the turns of a completion
            from common.environments import ENVIRONMENTS

            find_entry("env", flags.env, ENVIRONMENTS)
            self.built_in[flags.env] = lambda env_reward=0.0, **_: env_reward
            self.weights[flags.env] = 1.0
        self.functions: dict[str, Any] = {}  # `grading.calls.UserReward` of each user-defined reward, by its name
        self.sizes = {"math": 1}  # completions that are scored in one go; "math" may ask a verifier about each
        for text in flags.reward:
            self._add(text)
        for task in self.weights.keys() - self.functions.keys():
            reward = self.built_in[task]
            if reward.__module__ != format_reward.__module__:
                if name := plugins.name_of(reward):  # then the workers compute it, too
                    from grading.calls import parameters

                    self._add_function(task, name, parameters(name))
                else:
                    check_call(f"--task {task}: reward", reward, "completion=, answer=, question=, verifier=")
        self.verifier = start_math(flags) if "math" in self.weights else None
        threads = 8 if self.functions or "math" in self.weights else 1  # the others take microseconds
        self.threads = self.verifier.threads if self.verifier else threads
        self.workers = self._start_workers() if self.functions else None
        self.reported: set[str] = set()  # what was printed: functions with spans too long, kinds of missing verdicts
        own = get_task(self.task)
        self.format: Callable[[str], bool] | None = None  # the task's; None: it has none, or no weight
        if self.weights[self.task] and (own.format is not format_reward or own.template == rewards.THINK_ANSWER):
            self.format = functools.partial(own.verdict, "format")
        self.unscored_reason = ""  # why the most recent unscored completion has no reward

    def _start_workers(self) -> Any:
        from grading.calls import start_reward_workers

        return start_reward_workers(self.functions)

    @property
    def gold_task(self) -> str | None:
        """The task, if its rule alone decides which answers are right; None with a verifier, or if its weight is 0."""
        return None if not self.weights[self.task] or (self.task == "math" and self.verifier) else self.task

    @property
    def all_weights(self) -> dict[str, float]:
        """The weights of all `Rewards.parts`, by name: `weights`, and 1 for the overlong penalty."""
        return self.weights | ({"overlong": 1.0} if self.penalty else {})

    def _add(self, text: str) -> None:
        """Register one `--reward NAME[=WEIGHT]`. NAME is a built-in reward or file.py:function."""
        match = re.fullmatch(r"(.+?)(?:=([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?))?", text)
        name, weight = (match[1], float(match[2] or 1)) if match else ("", 1.0)
        file, _, function = name.rpartition(":")
        if "=" in function or not abs(weight) < MAX_REWARD:
            raise UserError(f"--reward {text}: the weight must be a finite number below {MAX_REWARD:g}")
        if name in (*self.built_in, getattr(self.functions.get(function), "name", None)):  # the last weight counts
            self.weights[function] = weight
            return
        if not file.endswith(".py"):
            raise UserError(
                f"--reward {text}: give file.py:function or one of {', '.join(self.built_in)}, "
                "optionally followed by =WEIGHT"
            )
        if function in self.weights or function in (*self.built_in, *RESERVED):
            raise UserError(f"--reward {text}: a reward named {function!r} already exists; rename the function")
        from grading.calls import PARAMETERS, call, start_workers

        try:
            found = call(start_workers(1, [PARAMETERS]), PARAMETERS, rewards.REWARD_TIMEOUT, {"name": name})
        except CallFailed as error:
            raise UserError(f"--reward {text}: it cannot be loaded ({error})") from error
        self.weights[function] = weight
        self._add_function(function, name, found)

    def _add_function(self, name: str, function: str, found: tuple[list[str], list[str], bool, bool]) -> None:
        """Register the user's `function`, file.py:function, as the reward `name`; `found`: see `calls.parameters`."""
        from grading.calls import UserReward

        self.functions[name] = UserReward(function, *found)
        self.sizes |= {name: self.functions[name].batch} if self.functions[name].is_async else {}

    def check_columns(self, samples: Sequence[Sample]) -> None:
        """Raise UserError if a row lacks a column that a user-defined reward requires."""
        given = {"completion", "answer", "question", "images"} | ({"env_reward"} if self.flags.env else set())
        for sample in samples:
            columns = {name for name, value in sample.fields.items() if value is not None}
            for name, function in self.functions.items():
                if missing := sorted(set(function.required) - columns - given):
                    raise UserError(
                        f"--reward {name}: {sample.source} has no {missing[0]!r}: add this column, or give the "
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
        for name in sorted(self.weights, key=lambda name: -self.sizes.get(name, 0)):  # those that wait long begin first
            size = self.sizes.get(name) or min(CALLS_TOGETHER, math.ceil(len(pairs) / 8))
            jobs += [(name, pairs[first : first + size]) for first in range(0, len(pairs), max(size, 1))]
        values: dict[str, list[Value]] = {name: [] for name in self.weights}
        with (
            ThreadPoolExecutor(self.threads) as pool,
            console.progress(desc="rewards", total=len(pairs) * len(values)) as bar,
        ):
            for (name, chunk), results in zip(jobs, pool.map(lambda job: self._values(*job), jobs)):
                values[name] += results
                bar.update(len(chunk))
        errors, completions = [], zip(*values.values())
        scored: list[list[Rewards]] = []
        for sample, group in zip(samples, rollouts):
            scored.append([])
            for rollout in group:
                found = dict(zip(values, next(completions)))
                for name, value in found.items():
                    if value.error:
                        flag = "--task" if name == self.task else "--reward"
                        function = getattr(self.functions.get(name), "name", name)
                        errors.append(f"{flag} {function} on {sample.source}, {rollout.text[:60]!r}: {value.error}")
                scored[-1].append(self._rewards(found, len(rollout.ids), max_length))
        return scored, errors[0] if errors else None

    def _rewards(self, found: dict[str, Value], length: int, max_length: int | None) -> Rewards:
        """Return the rewards of a completion of `length` tokens, and of each part of it that has its own."""
        parts = {name: value.number for name, value in found.items()}
        rewards = self._sum(parts, length, max_length)
        if not any(value.spans for value in found.values()):
            return rewards
        changes: dict[int, dict[str, float | None]] = {}  # what begins at each edge; None: a span ends
        for name, value in found.items():
            for start, end, x in value.spans:
                changes.setdefault(start, {})[name] = x
                changes.setdefault(end, {})[name] = None  # unless the next span starts there
        spans, here = [], dict.fromkeys(found)
        for start, end in itertools.pairwise(sorted(changes)):
            here |= changes[start]
            if own := {name: x for name, x in here.items() if x is not None}:
                spans.append(Span(start, end, self._sum(parts | own, length, max_length)))
        return replace(rewards, spans=tuple(spans))

    def _sum(self, parts: dict[str, float], length: int, max_length: int | None) -> Rewards:
        """Return the weighted sum of `parts`, and the overlong penalty for a completion of `length` tokens."""
        raw = sum((weight * parts[name] for name, weight in self.weights.items() if weight), 0.0)
        rewards = Rewards(raw, raw, parts)
        return self.penalty.add_to(rewards, length, max_length) if self.penalty and max_length else rewards

    def _values(self, name: str, pairs: list[tuple[Sample, Rollout]]) -> list[Value]:
        """Compute one reward of each completion."""
        calls = []
        images: dict[str, list[Image.Image]] = {}  # by row, so that the calls for its completions share them
        for sample, rollout in pairs:
            fields: dict[str, Any] = {"question": sample.prompt}
            fields |= {column: value for column, value in sample.fields.items() if value is not None}
            if isinstance(fields["question"], str):
                fields["question"] = fields["question"].replace(TAG, "").strip()
            if name in self.functions and "images" in self.functions[name].parameters:
                fields["images"] = images.get(sample.source) or _decoded_images(sample)
                images[sample.source] = fields["images"]
            if self.flags.env:
                fields["env_reward"] = rollout.env_reward
            calls.append(fields | {"completion": answers.without_marks(rollout.text), "answer": sample.answer})
        if name not in self.functions:
            return [self._built_in_value(name, fields) for fields in calls]
        own = self.functions[name]
        limit = self.flags.verifier_timeout if own.is_async else rewards.REWARD_TIMEOUT
        results = zip(own.call_all(self.workers[name], calls, limit), calls)
        return [self._judge(own.name, result, fields["completion"]) for result, fields in results]

    def _built_in_value(self, name: str, fields: dict[str, Any]) -> Value:
        """Compute the reward of a task or `format_reward`."""
        try:
            value = self.built_in[name](**fields | {"verifier": self.verifier})
        except WorkerLost as error:
            return self._unscored(f"{name}:", error)
        if value is None and name == "math":  # it does so only if the verifier gives no verdict
            return self._unscored(f"{self.verifier.url}:", self.verifier.last_error)
        return self._judge(name, value, fields["completion"])

    def _unscored(self, function: str, reason: object) -> Value:
        """Return the value of a completion without a reward. Each kind of reason is printed once."""
        self.unscored_reason = f"{function} {reason}"
        kind = f"{function} {str(reason).partition(':')[0]}"
        if kind not in self.reported:
            self.reported.add(kind)
            console.log(f"note: a completion without a verdict is left out: {self.unscored_reason}")
        return Value()

    def _judge(self, function: str, returned: Any, text: str) -> Value:
        """Check what a reward has returned for the completion `text`."""
        if isinstance(returned, CallLost):
            return self._unscored(function, returned)
        if isinstance(returned, CallFailed):
            return Value(error=str(returned))
        if returned is None:
            return self._unscored(function, "returned None")
        try:
            if isinstance(returned, Real) and abs(returned) < MAX_REWARD:  # type: ignore[operator]
                return Value(float(returned))
            if isinstance(returned, list) and _are_spans(returned):
                spans = tuple((int(start), int(end), float(value)) for start, end, value in returned)
                if spans and spans[-1][1] > len(text) and function not in self.reported:
                    self.reported.add(function)
                    beyond = f"that ends at {spans[-1][1]}, in a text of {len(text)} characters"
                    console.log(f"note: {function} returned a span {beyond}: no token gets what lies beyond")
                return Value(float(sum(value for *_, value in spans)), spans)
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
    are_numbers = all(isinstance(x, Real) for *_, x in value) and abs(sum(float(x) for *_, x in value)) < MAX_REWARD
    are_indices = all(isinstance(x, Integral) and int(x) in range(sys.maxsize) for x in edges)
    return are_numbers and are_indices and edges == sorted(edges) and all(start < end for start, end, _ in value)
