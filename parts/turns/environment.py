"""The environment of a run: which it is, and what prompts say of its tools (docs/turns.md)."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from common import plugins
from common.environments import ENVIRONMENTS
from common.errors import UserError, find_entry
from common.records import Group, Rollout, Sample
from common.templates import control_tokens, variable_names
from data import Processor
from grading.calls import parameters
from parts.turns.episodes import MAX_IMAGES, Episodes
from parts.turns.metrics import difference_by_turn, turn_metrics
from parts.turns.parked import parked, restored
from parts.turns.pictures import add_features
from policy.model import Policy, trains_vision


@dataclass(frozen=True)
class RunEnvironment:
    """The environment that `--env` names, as a run uses it."""

    function: str  # file.py:function, which answers a turn
    columns: frozenset[str]  # columns that every row must have for it
    variables: dict[str, Any]  # of the chat template: `tools`, if it can describe them
    description: str  # of the tools, at the end of the system prompt, if it cannot
    max_turns: int  # of the model in an episode
    max_seen: int  # maximum number of tokens that the model sees in an episode, with the prompt
    has_teacher: bool = False  # then a trajectory keeps its pixels, for the teacher's own vision tower

    @property
    def max_images(self) -> int:
        """Maximum number of images in all answers of an episode; none follows the last turn."""
        return MAX_IMAGES * (self.max_turns - 1)

    def episodes(
        self,
        samples: Sequence[Sample],
        processor: Processor,
        policy: Policy | None = None,
    ) -> Episodes:
        """Return the episodes about `samples`, for `Engine.generate`; see `Episodes`."""
        return Episodes(samples, processor, policy)

    def add_features(self, policy: Policy, rollouts: Sequence[Rollout]) -> None:
        """Set the image features of the episodes that lack them, if the vision tower of `policy` is frozen."""
        trajectories = [rollout.trajectory for rollout in rollouts if rollout.trajectory]
        lacking = [each for each in trajectories if each.images and each.features is None]
        if lacking and not trains_vision(policy.model):
            add_features(policy, None, lacking)

    def parked(self, rollout: Rollout) -> Rollout:
        """Return `rollout` as it waits for a later step; see parked.py."""
        return parked(rollout)

    def restored(self, rollout: Rollout, processor: Processor) -> Rollout:
        """Undo `parked`."""
        rollout = restored(rollout, processor)
        if self.has_teacher and rollout.finished and rollout.trajectory and rollout.trajectory.images:
            rollout.trajectory.for_teacher = replace(rollout.trajectory)
        return rollout

    def metrics(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return the metrics of this process's completions."""
        return turn_metrics(rollouts)

    def difference_by_turn(self, groups: Sequence[Group], logps: Sequence[Tensor]) -> dict[str, float]:
        """Return the difference of sampler and trainer in each turn; see `metrics.difference_by_turn`."""
        return difference_by_turn(groups, logps, self.max_turns)


def use_environment(
    processor: Processor, name: str, max_turns: int, max_seen: int, has_teacher: bool = False
) -> Processor:
    """Return `processor` with the environment `name`, whose tools its prompts then describe.

    `max_turns`, `max_seen`, `has_teacher`: see `RunEnvironment`. Raises UserError if it cannot be used with the model.
    """
    environment = find_environment(name, processor.tokenizer, max_turns, max_seen)
    environment = replace(environment, has_teacher=has_teacher)
    if not processor.family.turns:
        title = processor.family.title
        raise UserError(f"--env {name}: {title} cannot be trained on several turns yet; docs/turns.md says which can")
    if processor.chat_variables.get("add_vision_id"):
        problem = "--chat_template_kwargs add_vision_id does not count later pictures: leave it out"
        raise UserError(f"--env {name}: {problem}")
    return replace(processor, environment=environment, chat_variables=processor.chat_variables | environment.variables)


def find_environment(name: str, tokenizer: Any, max_turns: int, max_seen: int) -> RunEnvironment:
    """Return the entry `name` of `ENVIRONMENTS` for a model with this `tokenizer`.

    `max_turns`, `max_seen`: see `RunEnvironment`. Raises UserError if there is no such entry, or if it is unusable.
    """
    environment = find_entry("env", name, ENVIRONMENTS)
    function = plugins.name_of(environment.reply)
    names, required, accepts_any, is_async = parameters(function) if function else ([], [], False, False)
    if not function or is_async or not (accepts_any or "text" in names):
        form = "Environment(FUNCTION) of a plain function (text, state, **fields)"
        raise UserError(f"--env {name}: it must be {form} with a name in the plugin")
    columns = frozenset(required) - {"text", "state", "images", "extents", "question", "answer"}
    described = json.dumps(environment.tools, ensure_ascii=False)
    if held := [token for token in control_tokens(tokenizer) if token in described]:
        raise UserError(f"--env {name}: its tools contain {held[0]}, which would act as a control token: remove it")
    can_describe = "tools" in variable_names(tokenizer.chat_template)
    variables = {"tools": environment.tools} if can_describe and environment.tools else {}  # it may mention even []
    description = "" if can_describe else describe_tools(environment.tools)
    return RunEnvironment(function, columns, variables, description, max_turns, max_seen)


def describe_tools(tools: Sequence[dict[str, Any]]) -> str:
    """Return a description for the system prompt, in the format of Qwen; for chat templates that describe no tools."""
    schemas = "\n".join(map(json.dumps, tools))
    call = '<tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>'
    return f"You have these tools:\n<tools>\n{schemas}\n</tools>\nTo call one, write\n{call}" if tools else ""
