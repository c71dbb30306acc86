"""The plans of who does what: even, and the same on every process."""

import random

import pytest

from common.distributed import partition_lpt
from training.balance import MAX_IMBALANCE, GroupCost, plan_transfers
from training.metrics import slowest_ranks


def loads(costs, lists):
    return [sum(costs[i] for i in part) for part in lists]


def test_spread_deals_every_index_once_and_evenly():
    rng = random.Random(0)
    for parts in (1, 2, 3, 8):
        costs = [rng.lognormvariate(5, 1) for _ in range(64)]
        lists = partition_lpt(costs, parts)
        assert sorted(i for part in lists for i in part) == list(range(64))
        assert all(part == sorted(part) for part in lists)
        mean = sum(costs) / parts
        assert max(loads(costs, lists)) <= max(1.1 * mean, max(costs))


def test_equal_costs_are_dealt_in_turn():
    assert partition_lpt([5.0] * 6, 3) == [[0, 3], [1, 4], [2, 5]]
    assert partition_lpt([5.0], 3) == [[0], [], []]


def test_the_longest_prompt_has_a_process_to_itself():
    assert partition_lpt([1, 1, 10, 1], 2) == [[2], [0, 1, 3]]


def test_processes_that_take_turns_at_being_slow_wait_too():
    assert slowest_ranks([[3.0, 1.0], [1.0, 3.0]]) == (6.0, pytest.approx(1 / 3))
    assert slowest_ranks([[2.0]]) == (2.0, 0.0)


def apply(held, moves):
    """What the processes hold after `moves`, as they carry them out."""
    held = [{work.group_index: work for work in works} for works in held]
    for move in moves:
        work = held[move.source].pop(move.group_index)
        assert 1 <= move.count <= len(work.lengths)
        if kept := work.lengths[: -move.count]:
            held[move.source][move.group_index] = GroupCost(work.group_index, work.prompt, kept)
        there = held[move.target].get(move.group_index, GroupCost(work.group_index, work.prompt, ()))
        whole = GroupCost(work.group_index, work.prompt, there.lengths + work.lengths[-move.count :])
        held[move.target][move.group_index] = whole
    return [sum(work.cost for work in works.values()) for works in held]


def test_moves_make_processes_alike_and_lose_nothing():
    rng = random.Random(1)
    for processes in (2, 4, 8):
        for _ in range(20):
            works = [
                GroupCost(i, 300, tuple(int(rng.lognormvariate(5.5, 0.8)) + 1 for _ in range(8)))
                for i in range(processes * 4)
            ]
            held = [works[i::processes] for i in range(processes)]
            before = [sum(work.cost for work in part) for part in held]
            after = apply(held, plan_transfers(held))
            assert max(after) <= max(before)
            assert sum(after) >= sum(before)  # a prompt that is on two processes is computed twice
            assert max(after) <= 1.15 * sum(after) / processes, (before, after)


def test_nothing_moves_when_processes_are_alike():
    works = [GroupCost(i, 300, (512,) * 8) for i in range(8)]
    assert plan_transfers([works[:4], works[4:]]) == []
    slightly = [*works[4:7], GroupCost(7, 300, (512,) * 7 + (512 + int(MAX_IMBALANCE * 17000),))]
    assert plan_transfers([works[:4], slightly]) == []
    assert plan_transfers([[], []]) == []


def test_a_process_that_holds_everything_shares_it():
    works = [GroupCost(i, 100, (50,) * 4) for i in range(4)]
    after = apply([works, [], [], []], plan_transfers([works, [], [], []]))
    assert after == [300, 300, 300, 300]
