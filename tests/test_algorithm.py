"""The maths of grpo.py, compared with numbers worked out by hand and with independent computations.

Guards against: a rounding residue instead of zero for equal rewards, an unscored completion that shifts its group's
mean, token weights that depend on how the batch is split, clipping on the wrong side, a sequence ratio that is a sum
instead of a mean, and a KL estimate with the wrong sign.
"""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

import evaluate
import grpo
from common.errors import UserError
from common.records import GroupRewards, Rewards, Rollout, ScoredGroup
from config import Config
from grpo import (
    group_advantages,
    resolve_loss,
    token_weights,
    training_groups,
)
from packing import PackedBatch, TokenValues
from tests.helpers.losses import LossOptions, grpo_loss
from training.guards import is_spike

NAN = math.nan


def test_advantages_by_hand():
    got = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0], [3.0, 1.0, 1.0, 3.0]]))
    # row 1: mean 0.25, standard deviation sqrt((0.75² + 3·0.25²)/3) = 0.5; row 2: mean 2, standard deviation sqrt(4/3)
    third = 1 / math.sqrt(4 / 3)
    want = [[1.5, -0.5, -0.5, -0.5], [third, -third, -third, third]]
    torch.testing.assert_close(got, torch.tensor(want))


def test_equal_rewards_give_exactly_zero():
    for value in (0.0, 0.1, 1 / 3, 0.85, 1e6):
        for scale in ("group", "none"):
            assert torch.equal(group_advantages(torch.full((2, 7), value), scale), torch.zeros(2, 7))
    # In floating point, the mean of equal values may differ from the values, but the advantages must still be zero.
    assert not group_advantages(torch.full((1, 3), 0.1 + 0.2)).any()


def test_rewards_that_differ_by_rounding_alone_count_as_equal():
    """One unit in the last place would otherwise give an advantage of 1.73."""
    third = torch.tensor(1 / 3)
    above = torch.nextafter(third, torch.tensor(1.0))
    for row in ([third, third, third, above], [1.0, 1.0 + 9e-7, 1.0, 1.0], [2000.0, 2000.001, 2000.0, NAN]):
        for scale in ("group", "batch", "none"):
            assert not group_advantages(torch.tensor([row]), scale).any(), (row, scale)
    # mean 5e-5, standard deviation 1e-4/√2: ε = 1e-6 makes itself felt
    want = 5e-5 / (1e-4 / math.sqrt(2) + 1e-6)
    torch.testing.assert_close(group_advantages(torch.tensor([[0.0, 1e-4]])), torch.tensor([[-want, want]]))


def test_left_out_completions_count_for_nothing():
    rewards = torch.tensor([[1.0, NAN, 0.0, 0.5], [NAN, 1.0, NAN, NAN], [NAN, NAN, NAN, NAN], [1.0, NAN, 1.0, NAN]])
    got = group_advantages(rewards)
    torch.testing.assert_close(got[0, [0, 2, 3]], group_advantages(torch.tensor([[1.0, 0.0, 0.5]]))[0])
    assert got[0, 1] == 0
    assert torch.equal(got[1:], torch.zeros(3, 4))
    assert not group_advantages(rewards, "batch").isnan().any()


def test_scales():
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    torch.testing.assert_close(group_advantages(rewards, "none"), torch.tensor([[0.5, -0.5], [0.0, 0.0]]))
    assert torch.equal(group_advantages(rewards, "group"), group_advantages(rewards))
    # batch: mean 0.25, standard deviation sqrt((0.75² + 3·0.25²)/3) = 0.5; each row is centred on its own mean
    torch.testing.assert_close(group_advantages(rewards, "batch"), torch.tensor([[1.0, -1.0], [0.0, 0.0]]))


def test_groups_are_rows_whatever_their_prompts():
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    swapped = group_advantages(rewards.flip(0))
    assert torch.equal(swapped, group_advantages(rewards).flip(0))


LENGTHS = torch.tensor([4, 1, 0, 5])


@pytest.mark.parametrize(
    ("loss_type", "want"),
    [
        ("grpo", [1 / 12, 1 / 3, None, 1 / 15]),
        ("gspo", [1 / 12, 1 / 3, None, 1 / 15]),
        ("dapo", [1 / 10, 1 / 10, None, 1 / 10]),
        ("cispo", [1 / 10, 1 / 10, None, 1 / 10]),
        ("dr_grpo", [1 / 24, 1 / 24, None, 1 / 24]),
    ],
)
def test_token_weights(loss_type, want):
    got = token_weights(LENGTHS, loss_type, max_length=8)
    for value, expected in zip(got.tolist(), want):
        if expected is not None:
            assert value == pytest.approx(expected)
    total = (got * LENGTHS).sum().item()
    assert total == pytest.approx(10 / 24 if loss_type == "dr_grpo" else 1.0)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "gspo", "cispo"])
def test_token_weights_do_not_depend_on_the_cut(loss_type):
    whole = token_weights(LENGTHS, loss_type, 8)
    totals = torch.stack([(LENGTHS > 0).sum(), LENGTHS.sum()])
    in_chunks = torch.cat([token_weights(chunk, loss_type, 8, totals) for chunk in LENGTHS.split([1, 2, 1])])
    assert torch.equal(whole, in_chunks)


def by_hand(logp, old, ref, advantage, lengths, options):
    """Compute the papers' formulas with Python loops over sequences and tokens."""
    total, start, tokens, loss_type = 0.0, 0, sum(lengths), options.loss_type
    for length, a in zip(lengths, advantage):
        seq, start = slice(start, start + length), start + length
        ratios = [math.exp(x - y) for x, y in zip(logp[seq], old[seq])]
        if loss_type == "gspo":
            ratios = [math.prod(ratios) ** (1 / length)] * length
        for t in range(length):
            clip = min(max(ratios[t], 1 - options.clip_low), 1 + options.clip_high)
            objective = clip * a * logp[seq][t] if loss_type == "cispo" else min(ratios[t] * a, clip * a)
            delta = ref[seq][t] - logp[seq][t]
            loss = -objective + options.beta * (math.exp(delta) - delta - 1)
            norm = (
                tokens if loss_type in ("dapo", "cispo") else len(lengths) * (8 if loss_type == "dr_grpo" else length)
            )
            total += loss / norm
    return total


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "gspo", "cispo"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_losses_against_loops(loss_type, beta):
    g = torch.Generator().manual_seed(3)
    lengths, advantage = [3, 1, 4], [1.2, -0.7, 0.4]
    rows = torch.repeat_interleave(torch.tensor(lengths))
    logp = -torch.rand(8, generator=g) * 2
    old, ref = (logp + torch.randn(8, generator=g) * 0.4 for _ in range(2))
    weights = token_weights(torch.tensor(lengths), loss_type, 8)[rows]
    options = LossOptions(loss_type, clip_low=0.1, clip_high=0.3, beta=beta)
    got, _ = grpo_loss(logp, old, torch.tensor(advantage)[rows], weights, rows, options, ref_logp=ref)
    want = by_hand(logp.tolist(), old.tolist(), ref.tolist(), advantage, lengths, options)
    assert got.item() == pytest.approx(want, rel=1e-5)


def grad_of(loss_type, log_ratio, advantage, **kwargs):
    logp = torch.tensor([-1.0], requires_grad=True)
    old = logp.detach() - log_ratio
    one = torch.ones(1)
    row = torch.zeros(1, dtype=torch.long)
    loss, stats = grpo_loss(logp, old, one * advantage, one, row, LossOptions(loss_type, **kwargs))
    loss.backward()
    return logp.grad.item(), stats


def test_clipping_stops_the_gradient_on_the_right_side():
    assert grad_of("grpo", 0.5, +1.0)[0] == 0.0  # good and already much more likely: not pushed further
    assert grad_of("grpo", 0.5, -1.0)[0] == pytest.approx(math.exp(0.5))  # bad but now more likely: pushed back
    assert grad_of("grpo", -0.5, -1.0)[0] == 0.0
    assert grad_of("grpo", -0.5, +1.0)[0] == pytest.approx(-math.exp(-0.5))
    assert grad_of("dapo", 0.22, +1.0, clip_high=0.28)[0] != 0.0  # clip-higher leaves room above 1.2
    assert grad_of("grpo", 0.22, +1.0)[0] == 0.0
    assert grad_of("grpo", 0.5, +1.0)[1]["clip_ratio"] == 1
    assert grad_of("grpo", 0.5, -1.0)[1]["clip_ratio"] == 0


def test_dual_clip_bounds_the_ratio_of_negative_advantages():
    """The bound is a bound of the ratio, whatever the advantage: with −1 alone, c · A would equal c / A."""
    for advantage in (-1.0, -0.5):
        for ratio, clipped in ((2.9, False), (3.1, True)):
            gradient, stats = grad_of("grpo", math.log(ratio), advantage, dual_clip=3.0)
            assert gradient == pytest.approx(0.0 if clipped else -advantage * ratio)
            assert stats["clip_ratio"] == clipped
    assert grad_of("grpo", math.log(1.1), +1.0, dual_clip=3.0)[0] == pytest.approx(-1.1)


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    assert grad_of("cispo", 3.0, +1.0, clip_low=1.0, clip_high=4.0)[0] == pytest.approx(-5.0)  # weight capped at 1 + 4
    assert grad_of("cispo", 0.5, +1.0, clip_low=1.0, clip_high=4.0)[0] == pytest.approx(-math.exp(0.5))
    assert [grad_of("cispo", x, 1.0, clip_low=1.0, clip_high=4.0)[1]["clip_ratio"] for x in (3.0, 0.5)] == [1, 0]


@pytest.mark.parametrize(("old", "iterations"), [("policy", 2), ("sampler", 2), ("policy", 1)])
def test_what_the_ratio_and_the_importance_weight_compare(old, iterations):
    """π_θ / π_old = 4 and π_old / π_sampler = 1.5; with the sampler as π_old, the ratio is 6 and the weight 1.

    In a step of one update, π_old is π_θ itself, and the ratio is 1. The policy differs from what it was before the
    step only by dropout, which must neither scale nor clip the objective.
    """
    cfg = Config(data="x", num_iterations=iterations, old_logp=old, clip_high=100.0, importance_cap=2.0)
    resolve_loss(cfg)
    one, no = torch.ones(1), torch.zeros(1, dtype=torch.bool)
    trainer_logp = math.log(1.5) - 3 * one
    logp = (trainer_logp + math.log(4)).requires_grad_()
    values = TokenValues(-3 * one, one, one, no, no, trainer_logp if old == "policy" else None)
    batch = PackedBatch(None, None, None, None, None, torch.zeros(1).long(), [1], values, {}, None)
    loss, stats = grpo.batch_loss(cfg, batch, logp)
    loss.backward()
    assert logp.grad.item() == pytest.approx(-1.5 * (4 if iterations > 1 else 1))
    assert not stats["importance_capped"]


def test_first_update_is_the_plain_policy_gradient():
    """If π_old = π_θ, the gradient of every loss is −A · w · ∇ log π for any clip range.

    A is the advantage, and w is the token weight.
    """
    for loss_type in ("grpo", "dr_grpo", "dapo", "gspo", "cispo"):
        assert grad_of(loss_type, 0.0, 0.7)[0] == pytest.approx(-0.7), loss_type


def test_kl_is_zero_only_at_the_reference_and_pulls_towards_it():
    for ref, sign in ((-1.0, 0), (-0.5, -1), (-1.5, 1)):
        logp = torch.tensor([-1.0], requires_grad=True)
        zero, one, row = torch.zeros(1), torch.ones(1), torch.zeros(1, dtype=torch.long)
        loss, stats = grpo_loss(
            logp, logp.detach(), zero, one, row, LossOptions(beta=1.0), ref_logp=torch.tensor([ref])
        )
        loss.backward()
        assert (stats["kl"] > 0) == (sign != 0)
        assert math.copysign(1, logp.grad.item()) * (logp.grad.item() != 0) == sign


def test_tokens_without_weight_never_make_the_loss_infinite():
    """In a dummy micro-batch, the reference log-probability is a placeholder (0), while the policy's may be −120."""
    logp = torch.tensor([-120.0, -1.0], requires_grad=True)
    zero = torch.zeros(2)
    weights, row = torch.tensor([0.0, 1.0]), torch.tensor([0, 1])
    loss, stats = grpo_loss(logp, zero, zero, weights, row, LossOptions(beta=0.1), ref_logp=torch.tensor([0.0, -1.0]))
    loss.backward()
    assert loss.isfinite()
    assert stats["kl"] == 0
    assert logp.grad.isfinite().all()


def test_importance_weight_scales_the_objective_alone():
    logp = torch.tensor([-1.0, -1.0], requires_grad=True)
    row = torch.tensor([0, 1])
    weights, advantages = torch.full((2,), 0.5), torch.ones(2)
    loss, _ = grpo_loss(logp, logp.detach(), advantages, weights, row, importance=torch.tensor([2.0, 0.5]))
    loss.backward()
    torch.testing.assert_close(logp.grad, torch.tensor([-1.0, -0.25]))


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_masked_completions_are_not_trained_on(loss_type):
    """They count among the sequences, but not their tokens among the tokens. Unscored completions do not count."""
    rollouts = [Rollout(torch.zeros(n).long(), torch.zeros(n), truncated=n == 6) for n in (1, 6, 4, 3)]
    rewards = [*[Rewards(1.0, 1.0)] * 3, Rewards()]  # the last one is unscored
    groups = [ScoredGroup(None, SimpleNamespace(images=[]), rollouts, rewards, index=0)]
    cfg = Config(data="x", loss_type=loss_type, mask_truncated=True, max_completion_length=6, beta=0.1)
    (group,) = training_groups(cfg, groups, torch.tensor([[1.0, -1.0, 0.0, 0.0]]))
    weights = {len(completion.ids): completion.token_weight for completion in group.completions}
    want = {"grpo": {1: 1 / 3, 4: 1 / 12}, "dapo": {1: 1 / 5, 4: 1 / 5}, "dr_grpo": {1: 1 / 18, 4: 1 / 18}}[loss_type]
    assert weights == pytest.approx(want)


def test_a_spike_is_five_times_the_median_of_ten_norms():
    assert not is_spike([1.0] * 10 + [2.0])
    assert not is_spike([1.0] * 9 + [6.0])
    assert is_spike([1.0] * 10 + [6.0])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (dict(num_generations=1), "num_generations must be at least 2"),
        (dict(num_generations=10**400), "num_generations is 1000.*: give a finite number below 2"),
        (dict(temperature=1e300), "temperature is 1e.300: give a finite number below 2"),
        (dict(adapter=""), "adapter is empty: give a value or leave out the flag"),
        (dict(reward=("count=0", "")), "reward is empty: give a value"),
        (dict(temperature=0.0), "temperature must be above 0"),
        (dict(prompts_per_step=6, prompts_per_update=4), "must divide"),
        (dict(beta=-1.0), "beta must not be negative"),
        (dict(report_every=-1), "report_every must not be negative"),
        (dict(dynamic_sampling_rounds=-1), "dynamic_sampling_rounds must not be negative"),
        (dict(prompts_per_update=-4), "prompts_per_update must not be negative"),
        (dict(seed=-1), "seed must not be negative"),
        (dict(max_grad_norm=0.0), "max_grad_norm must be above 0"),
        (dict(clip_low=-1.0), "clip_low must be between"),
        (dict(micro_batch_tokens=-1), "micro_batch_tokens, lora_rank and lora_alpha must not be negative"),
        (dict(min_pixels=10, max_pixels=5), "min_pixels"),
        (dict(prompts_per_step=0), "prompts_per_step must be at least 1"),
        (dict(prompts_per_step=-4), "prompts_per_step must be at least 1"),
        (dict(max_grad_norm=NAN), "max_grad_norm is nan: give a finite number"),
        (dict(learning_rate=math.inf), "learning_rate is inf: give a finite number"),
        (dict(temperature=math.inf), "temperature is inf"),
        (dict(dual_clip=-1.0), "dual_clip must not be negative"),
        (dict(oversample=1.1, prompts_per_step=4), "oversample is too small to draw another prompt"),
        (dict(eval_every=10), "eval_every needs eval_data"),
    ],
)
def test_config_refuses_what_cannot_work(bad, message):
    with pytest.raises(ValueError, match=message):
        Config(data="x", **bad)


@pytest.mark.parametrize("config", [Config, evaluate.Config])
@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_no_flag_takes_a_number_that_is_not_finite(config, value):
    floats = [field.name for field in dataclasses.fields(config) if field.type in ("float", float)]
    assert len(floats) > 3
    for name in floats:
        with pytest.raises(ValueError, match=f"{name} is {value}: give a finite number"):
            config(**{"data": "x", "model": "x", name: value})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (dict(dual_clip=3.0, loss_type="cispo"), "--dual_clip does nothing with --loss_type cispo"),
        (dict(dual_clip=1.1), r"--dual_clip 1.1 must be above 1 \+ clip_high \(1.2\)"),
    ],
)
def test_a_dual_clip_without_effect_is_refused(flags, message):
    with pytest.raises(UserError, match=message):
        resolve_loss(Config(data="x", **flags))


@pytest.mark.parametrize(
    ("flags", "clip_range"),
    [
        ({}, (0.2, 0.2)),
        ({"loss_type": "dr_grpo"}, (0.2, 0.2)),
        ({"loss_type": "dapo"}, (0.2, 0.28)),
        ({"loss_type": "gspo"}, (3e-4, 4e-4)),
        ({"loss_type": "cispo"}, (1.0, 4.0)),
        ({"clip_high": 0.1}, (0.2, 0.1)),
    ],
)
def test_clip_defaults_follow_the_loss(flags, clip_range):
    """A wrong default trains, but not as the paper does. No other test would notice."""
    cfg = Config(data="x", **flags)
    resolve_loss(cfg)
    assert (cfg.clip_low, cfg.clip_high) == clip_range


def rewards_of_groups() -> GroupRewards:
    total = torch.arange(8.0).reshape(2, 4)
    return GroupRewards(total, total, {"own": total})


def test_an_advantage_may_be_computed_in_another_precision(monkeypatch):
    monkeypatch.setitem(grpo.ADVANTAGES, "own", lambda rewards, weights, cfg: rewards.total.double())
    got = grpo.advantages_of(rewards_of_groups(), {"own": 1.0}, Config(data="x", advantage="own"))
    assert torch.equal(got, rewards_of_groups().total.double())


@pytest.mark.parametrize(
    "change",
    [{"average": "word"}, {"ratio": "word"}, {"objective": "text"}, {"clip_low": None}, {"needs_entropy": "perhaps"}],
)
def test_a_loss_with_a_field_of_another_type_cannot_be_made(change):
    with pytest.raises(ValueError, match=f"(?s)1 validation error for Loss.*{next(iter(change))}"):
        dataclasses.replace(grpo.LOSSES["grpo"], **change)


def test_an_unknown_loss_is_refused():
    """It must not train anything else instead."""
    with pytest.raises(UserError, match="--loss_type grp: choose one of grpo, dr_grpo, dapo, gspo, cispo"):
        resolve_loss(Config(data="x", loss_type="grp"))
