"""What every sampler is told about partial rollouts: completions to continue, and when to stop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from common.records import Rollout

PAUSE_EVERY = 16  # tokens after which a sampler asks whether there is enough
NOT_STARTED = Rollout(torch.empty(0, dtype=torch.long), torch.empty(0), finished=False)


@dataclass(frozen=True)
class Continuation:
    """Completions to continue, and what tells when to stop."""

    started: Sequence[Sequence[Rollout]]  # the completions of each prompt so far
    should_stop: Callable[[list[bool]], bool]
    """Whether to stop, given which prompts of this process are complete. It is asked every few tokens, on all processes
    together, until it returns True."""


def which_are_complete(rollouts: Sequence[Sequence[Rollout]]) -> list[bool]:
    """Return, for each prompt, whether all its rollouts are finished."""
    return [all(rollout.finished for rollout in group) for group in rollouts]
