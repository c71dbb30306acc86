"""Balance training work: move completions between processes so that all processes finish an update at the same time.

Every process computes the same plan from the same costs. The plan decides which process trains on a completion but does
not affect the result: gradients are sums over completions, regardless of which process computes them.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from common import distributed
from common.records import Group, Trajectory

MIN_GAIN = 0.02  # a transfer itself takes time, so it must save at least this fraction of the mean load


@dataclass(frozen=True)
class GroupCost:
    """The cost of a group in tokens, with its images. The plan depends on nothing else."""

    group_index: int
    prompt_cost: float
    lengths: tuple[float, ...]  # of each completion that is trained on

    @property
    def cost(self) -> float:
        return self.prompt_cost + sum(self.lengths)


@dataclass(frozen=True)
class Transfer:
    """Move the last `count` completions of a group, with their prompt, from rank `source` to rank `target`."""

    group_index: int
    source: int
    target: int
    count: int


def plan_transfers(costs_by_rank: list[list[GroupCost]]) -> list[Transfer]:
    """Return the transfers that even out the load, given each rank's groups.

    The plan is greedy: it moves a group, or its last completions, from the busiest to the least busy rank. It ends when
    no move lowers the higher of the two loads by more than `MIN_GAIN` of the mean load.
    """
    costs_by_rank = [list(costs) for costs in costs_by_rank]
    loads = [sum(group.cost for group in costs) for costs in costs_by_rank]
    min_gain = MIN_GAIN * sum(loads) / len(loads)
    transfers: list[Transfer] = []
    while True:
        source, target = loads.index(max(loads)), loads.index(min(loads))
        best: tuple[float, int, int] | None = None
        for index, group in enumerate(costs_by_rank[source]):
            for count in range(1, len(group.lengths) + 1):
                tokens = sum(group.lengths[-count:])
                freed = tokens + (group.prompt_cost if count == len(group.lengths) else 0)
                higher = max(loads[source] - freed, loads[target] + tokens + group.prompt_cost)
                if best is None or higher < best[0]:
                    best = (higher, index, count)
        if best is None or loads[source] - best[0] <= min_gain:
            return transfers
        _, index, count = best
        group = costs_by_rank[source].pop(index)
        if remaining := group.lengths[:-count]:
            costs_by_rank[source].append(replace(group, lengths=remaining))
        merged = group.lengths[-count:]
        for other in costs_by_rank[target]:
            if other.group_index == group.group_index:
                merged = other.lengths + merged
        costs_by_rank[target] = [other for other in costs_by_rank[target] if other.group_index != group.group_index]
        costs_by_rank[target].append(replace(group, lengths=merged))
        loads = [sum(group.cost for group in costs) for costs in costs_by_rank]
        transfers.append(Transfer(group.group_index, source, target, count))


def rebalance(groups: list[Group], vision_cost: float) -> list[Group]:
    """Return this process's groups after the planned transfers. Call it on every process.

    `vision_cost` is what the vision tower costs for an image token, in tokens of the decoder stack; it is 0 when the
    tower is not run again in training.
    """
    if distributed.world_size() == 1:
        return groups
    costs = []
    for group in groups:
        lengths = tuple(each.tokens + vision_cost * each.image_tokens for each in group.completions)
        prompt_cost = len(group.prompt.ids) + vision_cost * len(group.prompt.image_indices)
        costs.append(GroupCost(group.index, prompt_cost, lengths))
    local_groups = {group.index: group for group in groups}
    for transfer in plan_transfers(distributed.all_gather(costs)):
        if distributed.rank() == transfer.source:
            group = local_groups.pop(transfer.group_index)
            kept, sent = group.completions[: -transfer.count], group.completions[-transfer.count :]
            if kept:
                local_groups[transfer.group_index] = replace(group, completions=kept)
            payload = _without_images(replace(group, completions=sent))
            dist.send_object_list([payload], transfer.target, device=torch.device("cpu"))
        elif distributed.rank() == transfer.target:
            received: list[Group | None] = [None]
            dist.recv_object_list(received, transfer.source, device=torch.device("cpu"))
            (group,) = received
            if existing := local_groups.get(transfer.group_index):
                group = replace(existing, completions=[*existing.completions, *group.completions])
            local_groups[transfer.group_index] = group
    return [local_groups[index] for index in sorted(local_groups)]


def _without_images(group: Group) -> Group:
    """Return `group` without the data that training does not use: images and, if features are cached, patches."""

    def without(part: Any) -> Any:
        turns: dict[str, Any] = {"turns": []} if isinstance(part, Trajectory) else {}
        vision = part.vision if part.features is None else {}
        for_teacher = part.for_teacher and without(part.for_teacher)
        return replace(part, images=[], vision=vision, for_teacher=for_teacher, **turns)

    completions = [
        replace(each, trajectory=without(each.trajectory)) if each.trajectory else each for each in group.completions
    ]
    return replace(group, prompt=without(group.prompt), completions=completions)
