"""A run's rewards: the task's own, the user's, the overlong penalty; each with its weight, each logged apart.

    --task math --reward brevity.py:brevity=0.1 --reward math=2 --overlong_buffer 2048

A user's reward is `fn(completion, answer, **fields) -> float | None` in a file of their own. It runs in a process that
is killed after `reward_timeout` seconds. None and a lost call mean «no verdict»: the completion is left out of its
group. All completions of a round are scored at the same time.
"""

import inspect
import math
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from tqdm import tqdm

import parallel
from cli import UserError
from data import Rollout
from formats import TAG, Sample
from rewards import REWARDS, Reward, check_math, format_reward, overlong_penalty
from verifier import Verifier, VerifierFlags, make_verifier
from workers import CallFailed, CallLost, WorkerLost, Workers, load_function

BUILT_IN: dict[str, Reward] = REWARDS | {"format": format_reward}
MOST_WITHOUT_VERDICT = 0.1  # of a step's completions; above it the run stops


@dataclass(kw_only=True)
class RewardFlags(VerifierFlags):
    """The flags of rewards that training and evaluation share."""

    reward: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Another reward, file.py:function or count, vqa, math or format, added with weight 1 or =WEIGHT after it; may be
    given several times. The task's own has weight 1 unless named here."""
    reward_timeout: float = 10.0
    """Seconds that a user's reward may take for one completion."""

    def check_rewards(self) -> None:
        """Raise ValueError for settings that cannot be."""
        self.check_verifier()
        if self.reward_timeout <= 0:
            raise ValueError("reward_timeout must be above 0")


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
        self.workers = Workers(2, list(self.calls.values())) if self.calls else None
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
            self.verifier.try_again()
        work = [(name, sample, rollout) for sample, rollouts in groups for rollout in rollouts for name in self.weights]
        waits = self.calls or "math" in self.weights  # the others take microseconds
        threads = self.flags.verifier_concurrency if self.verifier else 8 if waits else 1
        silent = None if parallel.is_main() else True
        with ThreadPoolExecutor(threads) as pool:
            done = pool.map(lambda job: self._value(*job), work)
            results = list(tqdm(done, "rewards", len(work), unit="call", delay=3, leave=False, disable=silent))
        error = None
        for (name, sample, rollout), (value, problem) in zip(work, results):
            rollout.rewards[name] = value
            if problem:
                error = error or f"--reward {self.calls[name]} on {sample.source}, {rollout.text[:60]!r}: {problem}"
        for _, rollouts in groups:
            for rollout in rollouts:
                rollout.reward = sum(weight * rollout.rewards[name] for name, weight in self.weights.items() if weight)
                rollout.unpenalised = rollout.reward
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
