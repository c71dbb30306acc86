"""Load balancing: the work is split evenly, and no completion is lost."""

import random
from collections import deque
from dataclasses import replace

import pytest
import torch

from common import distributed
from common.distributed import partition_lpt
from common.records import Turn
from packing import PackedBatch, pack
from tests.helpers.models import build, groups_of, make_group, make_trajectory
from training.metrics import time_and_idle

pytest.importorskip("parts.fast", reason="needs parts/fast, which is not here")

from parts.fast import balance
from parts.fast.balance import MIN_GAIN, GroupCost, Transfer, plan_transfers


def loads(costs, lists):
    return [sum(costs[i] for i in indices) for indices in lists]


def test_partition_assigns_every_index_once_and_evenly():
    rng = random.Random(0)
    for count in (1, 2, 3, 8):
        costs = [rng.lognormvariate(5, 1) for _ in range(64)]
        lists = partition_lpt(costs, count)
        assert sorted(i for indices in lists for i in indices) == list(range(64))
        assert all(indices == sorted(indices) for indices in lists)
        mean = sum(costs) / count
        assert max(loads(costs, lists)) <= max(1.1 * mean, max(costs))


def test_equal_costs_are_dealt_in_turn():
    assert partition_lpt([5.0] * 6, 3) == [[0, 3], [1, 4], [2, 5]]
    assert partition_lpt([5.0], 3) == [[0], [], []]


def test_the_longest_prompt_has_a_process_to_itself():
    assert partition_lpt([1, 1, 10, 1], 2) == [[2], [0, 1, 3]]


def test_processes_that_take_turns_at_being_slow_wait_too():
    assert time_and_idle([[3.0, 1.0], [1.0, 3.0]]) == (6.0, pytest.approx(1 / 3))
    assert time_and_idle([[2.0]]) == (2.0, 0.0)


def apply(costs_by_rank, transfers):
    """Return the load of each rank after applying `transfers`."""
    by_rank = [{group.group_index: group for group in costs} for costs in costs_by_rank]
    for transfer in transfers:
        group = by_rank[transfer.source].pop(transfer.group_index)
        assert 1 <= transfer.count <= len(group.lengths)
        if remaining := group.lengths[: -transfer.count]:
            by_rank[transfer.source][transfer.group_index] = GroupCost(group.group_index, group.prompt_cost, remaining)
        existing = by_rank[transfer.target].get(
            transfer.group_index, GroupCost(group.group_index, group.prompt_cost, ())
        )
        lengths = existing.lengths + group.lengths[-transfer.count :]
        by_rank[transfer.target][transfer.group_index] = GroupCost(group.group_index, group.prompt_cost, lengths)
    return [sum(group.cost for group in groups.values()) for groups in by_rank]


def test_moves_make_processes_alike_and_lose_nothing():
    rng = random.Random(1)
    for processes in (2, 4, 8):
        for _ in range(20):
            groups = [
                GroupCost(i, 300, tuple(int(rng.lognormvariate(5.5, 0.8)) + 1 for _ in range(8)))
                for i in range(processes * 4)
            ]
            costs_by_rank = [groups[i::processes] for i in range(processes)]
            before = [sum(group.cost for group in costs) for costs in costs_by_rank]
            after = apply(costs_by_rank, plan_transfers(costs_by_rank))
            assert max(after) <= max(before)
            assert sum(after) >= sum(before)  # a prompt is computed on every process that has some of its completions
            assert max(after) <= 1.15 * sum(after) / processes, (before, after)


def test_nothing_moves_when_processes_are_alike():
    groups = [GroupCost(i, 300, (512,) * 8) for i in range(8)]
    assert plan_transfers([groups[:4], groups[4:]]) == []
    slightly_more = [*groups[4:7], GroupCost(7, 300, (512,) * 7 + (512 + int(MIN_GAIN * 17000),))]
    assert plan_transfers([groups[:4], slightly_more]) == []
    assert plan_transfers([[], []]) == []


def test_a_single_completion_moves_if_that_gains_enough():
    """A transfer takes time. It must gain a fiftieth of the mean load, here 20 tokens, and not of a single token."""
    for length, want in ((10, []), (30, [Transfer(0, 0, 1, 1)])):
        costs_by_rank = [[GroupCost(0, 0, (1000, length))], [GroupCost(1, 0, (1000 - length,))]]
        assert plan_transfers(costs_by_rank) == want


def test_what_a_process_has_received_counts_when_more_of_the_same_group_comes():
    """A plan that forgot it would send more and more to the process that seems to have the least."""
    costs_by_rank = [[GroupCost(0, 0, (10,) * 100)], [], []]
    assert sorted(apply(costs_by_rank, plan_transfers(costs_by_rank))) == [330, 330, 340]


def test_a_process_that_holds_everything_shares_it():
    groups = [GroupCost(i, 100, (50,) * 4) for i in range(4)]
    after = apply([groups, [], [], []], plan_transfers([groups, [], [], []]))
    assert after == [300, 300, 300, 300]


def test_a_group_that_moves_in_two_parts_is_whole_again(monkeypatch):
    """Two processes, one after the other. Images that training does not use stay behind."""
    (group,) = groups_of([[5, 6, 7, 8]])
    group = replace(group, prompt=replace(group.prompt, images=["image"], vision={"pixel_values": torch.ones(1)}))
    sent, plan = deque(), [Transfer(0, 0, 1, 2), Transfer(0, 0, 1, 1)]
    monkeypatch.setattr(balance, "plan_transfers", lambda costs: plan)
    monkeypatch.setattr(balance.dist, "send_object_list", lambda payload, target, device: sent.extend(payload))
    monkeypatch.setattr(balance.dist, "recv_object_list", lambda out, *_, device: out.__setitem__(0, sent.popleft()))
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "all_gather", lambda value: [value])
    for features in (None, torch.ones(1)):
        held = []
        for rank, own in ((0, [replace(group, prompt=replace(group.prompt, features=features))]), (1, [])):
            monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
            held += balance.rebalance(own, 0.0)
        assert [[len(completion.ids) for completion in each.completions] for each in held] == [[5], [7, 8, 6]]
        assert held[1].prompt.images == []
        assert bool(held[1].prompt.vision) == (features is None)


@pytest.mark.parametrize("cached", [False, True])
def test_a_trajectory_moves_with_all_that_training_uses(cached):
    """Its pictures stay behind, and so do their pixel values if the features of a frozen tower are cached."""
    model, g = build("qwen2_5_vl"), torch.Generator().manual_seed(0)
    group = make_group(model, "qwen2_5_vl", 4, [(4, 4)], [3, 2], g)
    group.completions[0] = make_trajectory(model, group.prompt, [2, (3, [(2, 4)]), 4], g)
    seen = group.completions[0].trajectory
    seen.images, seen.turns = ["picture"], [Turn("assistant", ["text"])]
    for part in (group.prompt, seen):
        part.features = torch.randn(len(part.image_indices), 64) if cached else None
    moved = balance._without_images(group)
    assert (moved.completions[0].trajectory.images, moved.completions[0].trajectory.turns) == ([], [])
    assert bool(moved.completions[0].trajectory.vision) != cached and moved.tokens == group.tokens
    before, after = pack([group]), pack([moved])
    assert before.vision.keys() == after.vision.keys()
    for one, other in zip(_leaves(before), _leaves(after), strict=True):
        assert torch.equal(one, other)


def _leaves(batch: PackedBatch) -> list[torch.Tensor]:
    tensors = [value for value in vars(batch).values() if isinstance(value, torch.Tensor)]
    return [*tensors, *batch.vision.values(), batch.segments.keys.source, batch.predict_from.source]
