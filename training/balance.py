"""Which process samples which prompts and trains on which completions, so that all of them finish together.

Every process holds the same figures and comes to the same plan. It says who does a piece of work, never what is done:
completions follow from their prompts' seeds, and gradients are sums.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from common import distributed
from common.records import Group, Rollout

MAX_IMBALANCE = (
    0.02  # what the busiest process may have more than the mean, as a share of it: a move costs something too
)


@dataclass(frozen=True)
class GroupCost:
    """A group as the plan knows it: no tokens, only how many."""

    group_index: int
    prompt: float
    """cost of the prompt, its pictures included"""
    lengths: tuple[int, ...]
    """tokens of each completion to train on"""

    @property
    def cost(self) -> float:
        return self.prompt + sum(self.lengths)


@dataclass(frozen=True)
class Transfer:
    """The last `count` completions of a group go from one process to another, with their prompt."""

    group_index: int
    source: int
    target: int
    count: int


def plan_transfers(held: list[list[GroupCost]]) -> list[Transfer]:
    """What makes the processes' costs alike when they hold `held`: from the busiest to the idlest, whole groups or the
    last completions of one, as long as that lowers the larger of the two by more than `MAX_IMBALANCE` of the mean."""
    held = [list(works) for works in held]
    loads = [sum(work.cost for work in works) for works in held]
    enough, moves = MAX_IMBALANCE * sum(loads) / len(loads), []
    while True:
        source, target = loads.index(max(loads)), loads.index(min(loads))
        best: tuple[float, int, int] | None = None
        for place, work in enumerate(held[source]):
            for count in range(1, len(work.lengths) + 1):
                tokens = sum(work.lengths[-count:])
                given = tokens + (work.prompt if count == len(work.lengths) else 0)
                larger = max(loads[source] - given, loads[target] + tokens + work.prompt)
                if best is None or larger < best[0]:
                    best = (larger, place, count)
        if best is None or loads[source] - best[0] <= enough:
            return moves
        _, place, count = best
        work = held[source].pop(place)
        if kept := work.lengths[:-count]:
            held[source].append(replace(work, lengths=kept))
        there = next(
            (other for other in held[target] if other.group_index == work.group_index), replace(work, lengths=())
        )
        held[target] = [other for other in held[target] if other is not there]
        held[target].append(replace(there, lengths=there.lengths + work.lengths[-count:]))
        loads = [sum(work.cost for work in works) for works in held]
        moves.append(Transfer(work.group_index, source, target, count))


def rebalance(groups: list[Group], trained: Callable[[Rollout], bool], patch_cost: float = 0.0) -> list[Group]:
    """This process's groups after some completions have gone to processes that had less to train on.

    `trained`: whether the loss depends on a completion; `patch_cost`: what a picture's patch costs in tokens, where
    the vision tower is run again. Every process calls it together.
    """
    if distributed.world_size() == 1:
        return groups
    works = []
    for group in groups:
        if lengths := tuple(len(r.ids) for r in group.rollouts if trained(r)):
            patches = len(group.prompt.vision["pixel_values"]) if group.prompt.vision else 0
            works.append(GroupCost(group.group_index, len(group.prompt.ids) + patch_cost * patches, lengths))
    mine = {group.group_index: group for group in groups}
    for move in plan_transfers(distributed.all_gather(works)):
        if distributed.rank() == move.source:
            group = mine.pop(move.group_index)
            going = [r for r in group.rollouts if trained(r)][-move.count :]
            staying = [r for r in group.rollouts if all(r is not other for other in going)]
            if staying:
                mine[move.group_index] = replace(group, rollouts=staying)
            dist.send_object_list([_light(replace(group, rollouts=going))], move.target, device=torch.device("cpu"))
        elif distributed.rank() == move.target:
            received: list[Group | None] = [None]
            dist.recv_object_list(received, move.source, device=torch.device("cpu"))
            (group,) = received
            if there := mine.get(move.group_index):
                group = replace(there, rollouts=[*there.rollouts, *group.rollouts])
            mine[move.group_index] = group
    return [mine[group_index] for group_index in sorted(mine)]


def _light(group: Group) -> Group:
    """`group` without what training does not need: its pictures, and their patches where their features are known."""
    prompt = replace(group.prompt, images=[])
    if prompt.features is not None:
        prompt = replace(prompt, vision={"image_grid_thw": prompt.vision["image_grid_thw"]})
    sample = replace(group.sample, images=[], fields={}) if group.sample else None
    return replace(group, prompt=prompt, sample=sample)
