"""Partial rollouts: sampling ends when enough prompts are complete, and the next step continues the others.

The lengths of completions spread over two orders of magnitude, so a step that waits for its longest completion samples
it almost alone. With `--oversample F`, F · P prompts are in flight, and P are trained on:

    in flight, oldest first:   p1 ... pP ... pFP      the last ones were drawn just now
    sampling ends:             when P of them are complete, that is, when all G completions of each are finished
    trained on:                the P oldest that are complete
    in the next step:          the rest is continued under the new weights, and P new prompts are drawn

An interrupted completion keeps its tokens and the log-probability with which each was sampled. The policy of an earlier
step is just another sampler: the capped importance weight corrects for it, token by token (`importance_weights`).

Nothing that is drawn is dropped, since dropping what takes long would favour short answers. Still, no token is trained
on more than S steps (`--max_staleness`) after it was sampled: if the rest could not be trained on in time, sampling
continues until its oldest prompts are complete too.

What is in flight is the same list on every process, so that it can be assigned anew in each round, and is part of a
checkpoint.
"""

import functools
import json
from collections.abc import Callable, Sequence, Set
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch

from common import distributed
from common.errors import UserError
from common.records import Prompt, Rollout, Trajectory, Turn
from config import Config
from rollout import ENGINES, NOT_STARTED
from training.collect import Collector
from training.prompt_stream import DrawnPrompt
from training.resume import is_same_setting

T = TypeVar("T")
# flags on which the text and the images of a prompt depend
PROMPT_FORMAT = ("template", "min_pixels", "max_pixels", "chat_template_kwargs")


class PartialCollector(Collector):
    """A collector that keeps prompts in flight from one step to the next."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.in_flight: list[DrawnPrompt] = []  # drawn prompts of all processes not trained on yet, oldest first

    def state_dict(self) -> dict[str, Any]:
        in_flight = [vars(each) | {"rollouts": [*map(_as_data, each.rollouts)]} for each in self.in_flight]
        return super().state_dict() | {"in_flight": in_flight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.in_flight = [
            DrawnPrompt(**each | {"rollouts": tuple(map(_from_data, each["rollouts"]))})
            for each in state.get("in_flight", [])
        ]

    def steps_left(self, step: int) -> int:
        """Return the number of steps left after `step`; without `max_steps`, prompts in flight count as not drawn."""
        finished = self.position - len(self.in_flight)
        return self.total_steps - (step if self.cfg.max_steps else finished // self.cfg.prompts_per_step)

    def draw(self, step: int) -> list[DrawnPrompt]:
        """Return the prompts of the next round, oldest first.

        The round starts with the prompts in flight. New ones are drawn until there are `oversample` times P, but no
        more than the remaining steps train on.
        """
        target = round(self.cfg.oversample * self.cfg.prompts_per_step)
        if not (self.cfg.max_steps and self.cfg.dynamic_sampling_rounds):  # else it is not known how many are needed
            target = min(target, self.steps_left(step) * self.cfg.prompts_per_step)
        new = range(self.position, self.position + max(target - len(self.in_flight), 0))
        return [*self.in_flight, *self.stream.draw(new, step, self.cfg)]

    def sample(
        self, drawn: list[DrawnPrompt], local_indices: list[int], prompts: list[Prompt], step: int
    ) -> list[DrawnPrompt]:
        """Sample until enough of the prompts in `drawn` are complete; return those to train on, and keep the others."""
        if not self.in_flight and len(drawn) <= self.cfg.prompts_per_step:  # all are trained on in this step
            return super().sample(drawn, local_indices, prompts, step)
        rule = StoppingRule(step, self.cfg.prompts_per_step, self.cfg.num_generations, self.cfg.max_staleness)
        generate = functools.partial(self.generate, [drawn[i] for i in local_indices], prompts)
        park: Callable[[Rollout], Rollout] = _same
        if environment := self.stream.processor.environment:
            park, mine = environment.parked, set(local_indices)
            restore = functools.partial(environment.restored, processor=self.stream.processor)
            drawn = [
                replace(each, rollouts=tuple(map(restore, each.rollouts))) if i in mine else each
                for i, each in enumerate(drawn)
            ]
        chosen, self.in_flight = sample_until_enough(generate, drawn, local_indices, rule, park)
        return [replace(each, rollouts=tuple(with_num_stale(r, step) for r in each.rollouts)) for each in chosen]

    @property
    def num_waiting(self) -> int:
        return len(self.in_flight)

    def metrics(self, step: int) -> dict[str, float]:
        ages = partial_metrics(self.rollouts, self.in_flight, step, self.cfg.max_staleness)
        return super().metrics(step) | ages


def check_in_flight(cfg: Config, state: dict[str, Any]) -> None:
    """Raise UserError if a checkpoint's `state` has prompts in flight that cannot be continued with `cfg`."""
    if "in_flight" not in state.get("collector", {}):
        return
    saved = state["config"]  # the flags with which they began
    need = "--resume: the checkpoint's prompts in flight need"
    then = "until a run with --oversample 1 has trained on them"
    try:
        cfg.check_stale_tokens(need)
    except ValueError as error:
        raise UserError(str(error)) from None
    if (tokens := least_length(state["collector"]["in_flight"])) > cfg.max_completion_length:
        raise UserError(f"{need} --max_completion_length {tokens} or more, {then}")
    if cfg.max_staleness < saved["max_staleness"]:
        raise UserError(f"{need} --max_staleness {saved['max_staleness']} or more, {then}")
    if cfg.tensor_parallel > 1:
        raise UserError(f"{need} --tensor_parallel 1, {then}")
    if cfg.engine in ENGINES and not ENGINES[cfg.engine].should_stop:
        raise UserError(f"{need} another sampler than --engine {cfg.engine}, which does not know `should_stop`, {then}")
    new = json.loads(json.dumps(asdict(cfg)))  # lists where there are tuples, as in what was saved
    for name in PROMPT_FORMAT:
        if not is_same_setting(saved[name], new[name]):
            raise UserError(f"{need} --{name} as it was ({saved[name] or 'left out'}), {then}")


def least_length(in_flight: list[dict[str, Any]]) -> int:
    """Return the least limit, in tokens, for the completions in flight, as `state_dict` returned them.

    An unfinished completion needs room for another token.
    """
    rollouts = [rollout for each in in_flight for rollout in each["rollouts"]]
    return max((len(each["ids"]) if each["finished"] else len(each["ids"]) + 1 for each in rollouts), default=0)


def with_num_stale(rollout: Rollout, step: int) -> Rollout:
    """Return `rollout` with the number of its tokens that were sampled before `step`."""
    return replace(rollout, num_stale=sum(n for sampled_in, n in rollout.tokens_by_step.items() if sampled_in < step))


@dataclass(frozen=True)
class StoppingRule:
    """When a round of sampling ends."""

    step: int  # number of completed steps
    num_prompts: int  # P: how many prompts are trained on in a step
    num_generations: int  # G
    max_staleness: int  # S

    def choose(self, steps: Sequence[int], complete: Sequence[bool]) -> list[int] | None:
        """Return the indices of the prompts to train on, or None if sampling has to continue.

        `steps` has the step in which each prompt was drawn, oldest first. The P oldest complete prompts are chosen if
        there are P, and if the rest can be trained on in time: for every k, at most k · P of the rest may be due within
        k steps. If all prompts are complete, the second condition does not count: nothing is left to sample.
        """
        chosen = [i for i, is_complete in enumerate(complete) if is_complete][: self.num_prompts]
        if len(chosen) < self.num_prompts:
            return None
        rest = set(range(len(steps))).difference(chosen)
        due_in = [steps[i] + self.max_staleness - self.step for i in rest]  # steps in which each must be trained on
        in_time = all(sum(due <= k for due in due_in) <= k * self.num_prompts for k in range(self.max_staleness + 1))
        return chosen if in_time or all(complete) else None


def _same(rollout: Rollout) -> Rollout:
    return rollout


def _as_data(rollout: Rollout) -> dict[str, Any]:
    """Return `rollout` as plain data; not by `asdict`, which would copy every tensor before every step."""
    data = vars(rollout)
    if trajectory := rollout.trajectory:
        own = vars(trajectory) | {"turns": [list(turn) for turn in trajectory.turns]}
        own.pop("image_digest")  # of pictures that are prepared anew; and `torch.load` takes no empty bytes
        data = data | {"trajectory": own}
    return data


def _from_data(data: dict[str, Any]) -> Rollout:
    """Undo `_as_data`."""
    if trajectory := data.get("trajectory"):
        turns = [Turn(role, content) for role, content in trajectory["turns"]]
        data = data | {"trajectory": Trajectory(**trajectory | {"turns": turns})}
    return Rollout(**data)


def sample_until_enough(
    generate: Callable[..., list[list[Rollout]]],
    drawn: list[DrawnPrompt],
    local_indices: list[int],
    rule: StoppingRule,
    park: Callable[[Rollout], Rollout] = _same,
) -> tuple[list[DrawnPrompt], list[DrawnPrompt]]:
    """Sample until enough of the prompts in `drawn` are complete. Call it on every process.

    `local_indices` are those of the prompts that this process samples; `generate(started, should_stop)` continues their
    completions. Returns two lists, oldest first: the prompts to train on, in which those of other processes have no
    completions; and the prompts that stay in flight, with the completions of all processes, changed by `park`.
    """
    steps = [each.step for each in drawn]
    started = [drawn[i].rollouts or (NOT_STARTED,) * rule.num_generations for i in local_indices]
    unfinished = [i for i, group in zip(local_indices, started) for old in group if not old.finished]

    def choose(left: Set[int]) -> list[int] | None:
        """Return the prompts to train on; those of this process that are in `left` are not complete."""
        is_complete = _gather_by_index({i: i not in left for i in local_indices})
        return rule.choose(steps, [is_complete[i] for i in range(len(drawn))])

    def should_stop(over: Set[int]) -> bool:
        return choose({i for number, i in enumerate(unfinished) if number not in over}) is not None

    sampled = {
        i: tuple(_with_token_counts(new, old, rule.step) for new, old in zip(after, before))
        for i, before, after in zip(local_indices, started, generate(started, should_stop=should_stop))
    }
    chosen = choose({i for i, group in sampled.items() if not all(rollout.finished for rollout in group)})
    rest = [i for i in range(len(drawn)) if i not in set(chosen)]
    kept = _gather_by_index({i: tuple(map(park, group)) for i, group in sampled.items() if i in set(rest)})
    return (
        [replace(drawn[i], rollouts=sampled.get(i, ())) for i in chosen],
        [replace(drawn[i], rollouts=kept[i]) for i in rest],
    )


def _gather_by_index(local: dict[int, T]) -> dict[int, T]:
    """Return the values of all processes, by the index of the prompt in `drawn`. Call it on every process."""
    return {i: value for part in distributed.all_gather(local) for i, value in part.items()}


def _with_token_counts(new: Rollout, old: Rollout, step: int) -> Rollout:
    """Return `new`, with the number of tokens it has beyond `old` counted under `step`."""
    tokens = len(new.ids) - len(old.ids)
    in_step = old.tokens_by_step.get(step, 0) + tokens  # with dynamic sampling, a step can have several rounds
    return replace(new, tokens_by_step=old.tokens_by_step | ({step: in_step} if tokens else {}))


def partial_metrics(
    rollouts: list[Rollout], in_flight: list[DrawnPrompt], step: int, max_staleness: int
) -> dict[str, float]:
    """Return the share of tokens of each age in steps, over all processes, and how many groups are in flight.

    `rollouts` are those that this process trains on, `in_flight` is the same on all processes.
    """
    tokens = torch.zeros(max_staleness + 1, dtype=torch.float64)
    for rollout in rollouts:
        for sampled_in, count in rollout.tokens_by_step.items():
            tokens[min(step - sampled_in, max_staleness)] += count
        tokens[0] += len(rollout.ids) - sum(rollout.tokens_by_step.values())  # not counted by step: no partial rollout
    shares = distributed.all_sum(tokens)
    shares = (shares / shares.sum()).tolist()
    waiting = sum(each.is_complete for each in in_flight)
    ages = {f"partial/tokens_of_age_{age}": share for age, share in enumerate(shares)}
    return ages | {"partial/groups_waiting": waiting, "partial/groups_unfinished": len(in_flight) - waiting}
