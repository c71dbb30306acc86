"""Micro-batches: they are full, and a single process takes the gradients that FSDP has accumulated.

Guards against: completions lost or repeated, and micro-batches that stay half empty.
"""

import itertools

import pytest
import torch

from common import distributed
from config import PolicyFlags
from packing import split_groups
from policy import batches
from policy.model import Policy, load_policy
from policy.sharding import apply_fsdp, take_gradients
from tests.helpers.models import build, groups_of, make_group


def test_groups_are_ordered_so_that_micro_batches_are_full():
    """By hand: groups of 60, 30, 80, 40 and 120 tokens fill four micro-batches of 110, not five."""
    groups = groups_of([[50], [20], [70], [30], [100, 10]])
    assert len(split_groups(groups, 110)) == 5
    parts = split_groups(batches.order_for_packing(groups, 110), 110)
    assert [[group.tokens for group in part] for part in parts] == [[110], [80, 30], [60, 40], [20]]
    assert [[group.index for group in part] for part in parts] == [[4], [2, 1], [0, 3], [4]]


def test_groups_that_fit_nowhere_are_cut_to_fill_what_is_free():
    """By hand: in each micro-batch of 110 tokens, a group of 60 leaves 50 free. With a prompt of 10 tokens and
    completions of 10, four groups need three micro-batches: 60 + 50, then what is left of the second group (10 + 10)
    with the third (60) and a piece of the fourth (10 + 20), then the rest of the fourth (10 + 30).
    """
    parts = split_groups(batches.order_for_packing(groups_of([[10] * 5 for _ in range(4)]), 110), 110)
    cut = [[(0, 60), (1, 50)], [(1, 20), (2, 60), (3, 30)], [(3, 40)]]
    assert [[(group.index, group.tokens) for group in part] for part in parts] == cut


def test_no_group_is_cut_for_a_little_room():
    """By hand: one group of 80 leaves 30 of 110 tokens free, more than a quarter, but of 105 only 25."""
    groups = groups_of([[10] * 7 for _ in range(2)])
    assert [group.tokens for group in batches.order_for_packing(groups, 110)] == [80, 30, 60]
    assert [group.tokens for group in batches.order_for_packing(groups, 105)] == [80, 80]


@pytest.mark.parametrize("seed", range(5))
def test_ordering_for_packing_keeps_every_completion(seed):
    """Also those longer than a micro-batch; no micro-batch could take the first group of the next."""
    g = torch.Generator().manual_seed(seed)
    groups = groups_of([torch.randint(1, 400, (8,), generator=g).tolist() for _ in range(20)])
    ordered = batches.order_for_packing(groups, 300)
    assert sorted((group.index, id(c)) for group in ordered for c in group.completions) == sorted(
        (group.index, id(c)) for group in groups for c in group.completions
    )
    parts = split_groups(ordered, 300)
    assert [group.index for part in parts for group in part] == [group.index for group in ordered]
    assert len(parts) <= len(split_groups(groups, 300))
    for part, following in itertools.pairwise(parts):
        assert sum(group.tokens for group in part) + following[0].tokens > 300


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("flags", [{}, {"train_vision": True}, {"lora_rank": 4}])
@pytest.mark.parametrize("images_first", [False, True])
def test_taken_gradients_are_those_that_fsdp_makes(tiny_model, images_first, flags, dtype):
    """Also if a trained vision tower runs in the first or the second micro-batch only."""
    device = distributed.start()

    def gradients(taken: bool) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(0)
        policy = apply_fsdp(load_policy(tiny_model, PolicyFlags(**flags), device), device, dtype)
        order = ([(4, 4)], []) if images_first else ([], [(4, 4)])
        groups = [make_group(policy.model, "qwen2_5_vl", 9, grids, [5, 3], g) for grids in order]
        with_images = []
        for batch, is_last in batches.micro_batches(policy, groups, budget=40):
            assert is_last == (len(with_images) == 1)
            policy.set_requires_gradient_sync(not taken)
            with_images.append(bool(batch.vision))
            policy(batch)[0].sum().backward()
        assert with_images == [images_first, not images_first]
        if taken:
            take_gradients(policy)
        return {name: p.grad.full_tensor() for name, p in policy.named_parameters() if p.requires_grad}

    got, want = gradients(taken=True), gradients(taken=False)
    assert got.keys() == want.keys()
    assert any(gradient.any() for gradient in got.values())
    for name, gradient in want.items():
        assert got[name].dtype == gradient.dtype == torch.float32, name
        assert torch.equal(got[name], gradient), name


def test_the_cost_of_an_image_token_by_hand():
    """It stands for 2 x 2 patches, each of which goes through the tower. Otherwise, work would be divided unevenly."""
    model = build("qwen2_5_vl")
    tower = sum(parameter.numel() for parameter in model.model.visual.parameters())
    layers = sum(parameter.numel() for parameter in model.model.language_model.layers.parameters())
    assert batches.vision_cost_per_token(Policy(model)) == pytest.approx(4 * tower / layers)
    model.model.visual.requires_grad_(False)
    assert batches.vision_cost_per_token(Policy(model)) == 0, "features are cached"
