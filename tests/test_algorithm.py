"""The maths of grpo.py, compared with numbers worked out by hand and with independent computations.

Guards against: a rounding residue instead of zero for equal rewards, an unscored completion that shifts its group's
mean, token weights that depend on how the batch is split, clipping on the wrong side, a sequence ratio that is a sum
instead of a mean, and a KL estimate with the wrong sign.
"""

import math

import pytest
import torch

from common.errors import UserError
from config import Config
from grpo import LossOptions, group_advantages, grpo_loss, resolve_loss, token_weights

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
    assert torch.equal(group_advantages(rewards, False), group_advantages(rewards, "none"))
    assert torch.equal(group_advantages(rewards, True), group_advantages(rewards))
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


def by_hand(loss_type, logp, old, advantage, lengths, low, high, beta, ref):
    """Compute the papers' formulas with Python loops over sequences and tokens."""
    total, start, tokens = 0.0, 0, sum(lengths)
    for length, a in zip(lengths, advantage):
        seq, start = slice(start, start + length), start + length
        ratios = [math.exp(x - y) for x, y in zip(logp[seq], old[seq])]
        if loss_type == "gspo":
            ratios = [math.prod(ratios) ** (1 / length)] * length
        for t in range(length):
            clip = min(max(ratios[t], 1 - low), 1 + high)
            objective = clip * a * logp[seq][t] if loss_type == "cispo" else min(ratios[t] * a, clip * a)
            delta = ref[seq][t] - logp[seq][t]
            loss = -objective + beta * (math.exp(delta) - delta - 1)
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
    got, _ = grpo_loss(
        logp,
        old,
        torch.tensor(advantage)[rows],
        weights,
        rows,
        LossOptions(loss_type, clip_low=0.1, clip_high=0.3, beta=beta),
        ref_logp=ref,
    )
    want = by_hand(loss_type, logp.tolist(), old.tolist(), advantage, lengths, 0.1, 0.3, beta, ref.tolist())
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


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    assert grad_of("cispo", 3.0, +1.0, clip_low=1.0, clip_high=4.0)[0] == pytest.approx(-5.0)  # weight capped at 1 + 4
    assert grad_of("cispo", 0.5, +1.0, clip_low=1.0, clip_high=4.0)[0] == pytest.approx(-math.exp(0.5))


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
    """In a blank micro-batch, the reference log-probability is a placeholder (0), while the policy's may be −120."""
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


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (dict(num_generations=1), "num_generations must be at least 2"),
        (dict(temperature=0.0), "temperature must be above 0"),
        (dict(prompts_per_step=6, prompts_per_update=4), "must divide"),
        (dict(beta=-1.0), "beta must not be negative"),
        (dict(report_every=0), "report_every must be at least 1"),
        (dict(dynamic_sampling_rounds=0), "dynamic_sampling_rounds must be at least 1"),
        (dict(prompts_per_update=-4), "prompts_per_update must not be negative"),
        (dict(seed=-1), "seed must not be negative"),
        (dict(max_grad_norm=0.0), "max_grad_norm must be above 0"),
        (dict(clip_low=-1.0), "clip_low must be between"),
        (dict(micro_batch_tokens=-1), "micro_batch_tokens, lora_rank and lora_alpha must not be negative"),
        (dict(min_pixels=10, max_pixels=5), "min_pixels"),
    ],
)
def test_config_refuses_what_cannot_work(bad, message):
    with pytest.raises(ValueError, match=message):
        Config(data="x", **bad)


def test_clip_defaults_follow_the_loss():
    for flags, clip_range in (({}, (0.2, 0.2)), ({"loss_type": "dapo"}, (0.2, 0.28)), ({"clip_high": 0.1}, (0.2, 0.1))):
        cfg = Config(data="x", **flags)
        resolve_loss(cfg)
        assert (cfg.clip_low, cfg.clip_high) == clip_range


def test_an_unknown_loss_is_refused():
    """It must not train anything else instead."""
    with pytest.raises(UserError, match="--loss_type grp: choose one of grpo, dr_grpo, dapo, gspo, cispo"):
        resolve_loss(Config(data="x", loss_type="grp"))
    one = torch.ones(1)
    with pytest.raises(ValueError, match="choose one of grpo"):
        grpo_loss(one, one, one, one, torch.zeros(1, dtype=torch.long), LossOptions("grp"))
    with pytest.raises(ValueError, match="choose one of grpo"):
        token_weights(LENGTHS, "grp", 8)
