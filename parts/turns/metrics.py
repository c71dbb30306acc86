"""Metrics of episodes of several turns, over all processes (docs/turns.md)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from common import distributed
from common.records import Group, Rollout


def turn_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the metrics of this process's completions, `rollouts`, which an environment has answered."""
    sums = torch.zeros(7, dtype=torch.float64)
    for each in (rollout.trajectory for rollout in rollouts if rollout.trajectory):
        images, seen = len(each.image_indices), int((~each.loss_mask).sum())
        turns, has_call = len(each.turn_lengths), each.num_calls > 0
        sums += torch.tensor([1, turns, each.num_calls, each.num_failed, has_call, seen - images, images])
    count, turns, calls, failed, with_call, text, images = distributed.all_sum(sums).tolist()
    return {
        "turns/mean": turns / count,
        "turns/calls": calls / count,
        "turns/with_call": with_call / count,
        "turns/calls_failed": failed / max(calls, 1),
        "turns/text_tokens_seen": text / count,
        "turns/image_tokens_seen": images / count,
    }


def difference_by_turn(groups: Sequence[Group], logps: Sequence[Tensor], max_turns: int) -> dict[str, float]:
    """Return the mean |log π_trainer − log π_sampler| of the tokens of each turn that this step sampled, in nats.

    `logps` has the log-probabilities (L,) of each completion of `groups` in the first update, in order. A completion's
    `trainer_logp`, from a pass without dropout, is used instead if it has one.
    """
    sums = torch.zeros(2, max_turns, dtype=torch.float64)
    for completion, logp in zip((each for group in groups for each in group.completions), logps):
        lengths = torch.tensor(completion.trajectory.turn_lengths)
        turn = torch.arange(len(lengths)).repeat_interleave(lengths)  # of each token
        trainer_logp = logp.cpu() if completion.trainer_logp is None else completion.trainer_logp
        difference = (trainer_logp - completion.sampling_logp).abs().double()
        columns = torch.stack([difference, torch.ones_like(difference)])
        sums.index_add_(1, turn[completion.num_stale :], columns[:, completion.num_stale :])
    difference, tokens = distributed.all_sum(sums)
    means = (difference / tokens).tolist()  # NaN: no completion has that many turns
    return {f"sampling/logp_difference_turn_{turn}": mean for turn, mean in enumerate(means, 1)}
