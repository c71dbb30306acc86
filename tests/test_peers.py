"""The loss and its gradient, compared with TRL 1.16's and verl 0.9's own functions on 100 random batches per case.

docs/peers.md has the commands. The tests are skipped without TRL or verl.

Everything is computed in float64, so a difference is one of the formulas, not of rounding; only the token weights are
float32. Guards against: a formula that differs from the one that users of those libraries expect under its name.
"""

import importlib
import importlib.util
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import Tensor

from common.records import Rewards, Rollout, ScoredGroup
from config import Config
from grpo import LOSSES, group_advantages, token_weights, training_groups
from tests.helpers.losses import LossOptions, grpo_loss

BATCHES, BOUND = 100, 1e-6
P, G, MAX_LENGTH, CAP = 3, 4, 12, 2.0  # examples/losses.py's own cap is 3
AGGREGATION = {
    "grpo": "seq-mean-token-mean",
    "icepop": "seq-mean-token-mean",
    "sequence_mask": "seq-mean-token-mean",
    "gspo": "seq-mean-token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}


@dataclass(frozen=True)
class Case:
    """A variant of the loss with options, and the libraries that have them."""

    name: str
    options: LossOptions
    importance: str = ""  # the importance mode; empty: no importance weight
    mask_truncated: bool = False
    gdpo: bool = False
    peers: tuple[str, ...] = ("trl", "verl")


def clip_range(loss_type: str) -> dict[str, float]:
    return {"clip_low": LOSSES[loss_type].clip_low, "clip_high": LOSSES[loss_type].clip_high}


def cases() -> list[Case]:
    every = []
    for variant in ("grpo", "dr_grpo", "dapo", "gspo", "cispo"):
        base = {"loss_type": variant} | clip_range(variant)
        every += [
            Case(variant, LossOptions(**base)),
            Case(f"{variant}, KL", LossOptions(**base, beta=0.1)),
            Case(f"{variant}, masked truncated", LossOptions(**base), mask_truncated=True, peers=("trl",)),
        ]
        if variant != "cispo":  # verl clips twice in its "vanilla" loss only
            peers = ("trl",) if variant == "gspo" else ("trl", "verl")
            every.append(Case(f"{variant}, dual clip", LossOptions(**base, dual_clip=1.5), peers=peers))
        # verl's GSPO has the gradient of GSPO-token, which differs where the weights of a completion's tokens do
        peers = ("trl",) if variant == "gspo" else ("trl", "verl")
        every.append(Case(f"{variant}, importance", LossOptions(**base), importance="token_truncate", peers=peers))
    every.append(Case("grpo, GDPO", LossOptions(), gdpo=True, peers=("verl",)))
    # of examples/losses.py
    every.append(Case("sapo", LossOptions("sapo"), peers=("trl",)))
    every.append(Case("sequence_mask", LossOptions("sequence_mask"), importance="sequence_mask"))
    return [*every, Case("icepop", LossOptions("icepop"), importance="token_0.5_5", peers=("verl",))]


@dataclass
class Batch:
    """A random batch; the tensors are (P · G, MAX_LENGTH) unless a comment says otherwise."""

    seed: int
    mask: Tensor = field(init=False)  # bool
    rewards: dict[str, Tensor] = field(init=False)  # two rewards (P, G)

    def __post_init__(self):
        g = torch.Generator().manual_seed(self.seed)
        self.lengths = torch.randint(1, MAX_LENGTH + 1, (P * G,), generator=g)
        self.lengths[0] = MAX_LENGTH
        self.mask = torch.arange(MAX_LENGTH) < self.lengths[:, None]
        self.truncated = torch.rand(P * G, generator=g) < 0.3  # (P · G,)
        self.logp = -2 * torch.rand(P * G, MAX_LENGTH, generator=g, dtype=torch.float64)
        noise = torch.randn(3, P * G, MAX_LENGTH, generator=g, dtype=torch.float64)
        self.old, self.ref = self.logp + 0.4 * noise[0], self.logp + 0.4 * noise[1]
        self.sampling = self.old + 0.2 * noise[2]
        self.rewards = {name: torch.randint(0, 3, (P, G), generator=g).double() / 2 for name in ("accuracy", "format")}
        self.rewards["accuracy"][0] = 0.5  # a group with equal rewards


def difference(case: Case, batch: Batch, peer: str) -> tuple[float, float]:
    """Return the difference of the loss, and the largest difference of its gradient, from that of `peer`."""
    results = []
    for loss in (our_loss, {"trl": trl_loss, "verl": verl_loss}[peer]):
        logp = batch.logp.clone().requires_grad_()
        value = loss(case, batch, logp)
        value.backward()
        results.append((value.detach(), logp.grad))
    (ours, our_gradient), (theirs, their_gradient) = results
    return (ours - theirs).abs().item(), (our_gradient - their_gradient).abs().max().item()


# --- ours -------------------------------------------------------------------------------------------------------------


def our_advantages(case: Case, batch: Batch) -> Tensor:
    if case.gdpo:
        dapo = pytest.importorskip("parts.dapo", reason="needs parts/dapo.py, which is not here")
        return dapo.gdpo_advantages(batch.rewards, {"accuracy": 1.0, "format": 0.5}, group_advantages)
    return group_advantages(sum(batch.rewards.values()))


def our_loss(case: Case, batch: Batch, logp: Tensor) -> Tensor:
    # only now, so that other tests do not see its entries
    pytest.importorskip("examples.losses", reason="needs examples/, which is not here")
    advantages = our_advantages(case, batch)
    rows = torch.arange(P * G)[:, None].expand_as(batch.mask)[batch.mask]
    weights = token_weights(batch.lengths, case.options.loss_type, MAX_LENGTH)
    if case.mask_truncated:
        weights = weights_of_a_step(case, batch, advantages)
    importance = None
    has_its_own = case.options.loss_type in ("icepop", "sequence_mask")
    if case.importance and not has_its_own:
        importance = (batch.old - batch.sampling)[batch.mask].exp().clamp(max=CAP)
    tensors = logp[batch.mask], batch.old[batch.mask], advantages.flatten()[rows], weights[rows], rows
    sampling = batch.sampling[batch.mask] if has_its_own else None
    return grpo_loss(*tensors, case.options, batch.ref[batch.mask], importance, sampling)[0]


def weights_of_a_step(case: Case, batch: Batch, advantages: Tensor) -> Tensor:
    """Return the token weights (P · G,) that a training step gives the completions; 0 for those it leaves out."""
    cfg = Config(
        data="x", mask_truncated=True, loss_type=case.options.loss_type, max_completion_length=MAX_LENGTH, beta=1.0
    )
    rollouts = [
        Rollout(torch.full((int(length),), i), torch.zeros(int(length)), truncated=bool(truncated))
        for i, (length, truncated) in enumerate(zip(batch.lengths, batch.truncated))
    ]
    prompt = SimpleNamespace(images=[])
    groups = [
        ScoredGroup(None, prompt, rollouts[p * G : p * G + G], [Rewards(1.0, 1.0)] * G, index=p) for p in range(P)
    ]
    weights = torch.zeros(P * G)
    for group in training_groups(cfg, groups, advantages):
        for completion in group.completions:
            weights[int(completion.ids[0])] = completion.token_weight
    return weights


# --- TRL --------------------------------------------------------------------------------------------------------------


def trl_loss(case: Case, batch: Batch, logp: Tensor) -> Tensor:
    """Call `GRPOTrainer._compute_loss` on an object that has the attributes it reads."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    options, mask = case.options, batch.mask.double()
    if case.mask_truncated:
        mask = mask * ~batch.truncated[:, None]
    loss_type = "grpo" if options.loss_type in ("gspo", "sequence_mask") else options.loss_type
    args = SimpleNamespace(
        use_bias_correction_kl=False,
        delta=options.dual_clip or None,
        steps_per_generation=1,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
    )
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, torch.zeros_like(logp), None),
        _metrics={"train": MagicMock()},
        _entropy_bonus_enabled=False,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        args=args,
        aux_loss_enabled=False,
        beta=options.beta,
        current_gradient_accumulation_steps=1,
        epsilon_low=options.clip_low,
        epsilon_high=options.clip_high + (loss_type == "cispo"),  # TRL gives CISPO's bound itself, without the 1
        importance_sampling_level="sequence" if options.loss_type == "gspo" else "token",
        loss_type=loss_type,
        max_completion_length=MAX_LENGTH,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=bool(case.importance),
        vllm_importance_sampling_correction=True,
    )
    ids = torch.zeros_like(batch.mask).long()
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": our_advantages(case, batch).flatten(),
        "old_per_token_logps": batch.old,
        "ref_per_token_logps": batch.ref,
        "num_items_in_batch": mask.sum(),
    }
    if case.importance:  # TRL computes these weights in the middle of a long method: verl's function stands in
        inputs["importance_sampling_ratio"] = verl_importance(case, batch)
    return GRPOTrainer._compute_loss(trainer, None, inputs)


# --- verl -------------------------------------------------------------------------------------------------------------


def verl_modules() -> tuple:
    """Return verl's modules of losses and of importance weights, and its config class. They import Ray, unused."""
    if "ray" not in sys.modules and importlib.util.find_spec("ray") is None:
        sys.modules["ray"] = MagicMock()
    from verl.trainer.ppo import core_algos, rollout_corr_helper
    from verl.workers.config import ActorConfig

    return core_algos, rollout_corr_helper, ActorConfig


def verl_importance(case: Case, batch: Batch) -> Tensor:
    level, bound = case.importance.split("_", 1)
    weights, _ = verl_modules()[1].compute_rollout_correction_weights(
        batch.old - batch.sampling,
        batch.mask.double(),
        rollout_is=level,
        rollout_is_threshold={"mask": "1e-30_3.0", "truncate": CAP}.get(bound, bound),
    )
    return weights


def verl_advantages(case: Case, batch: Batch) -> Tensor:
    """Return the advantages (P · G,), from responses of one token: verl's whitening counts tokens."""
    algorithms, one = verl_modules()[0], torch.ones(P * G, 1, dtype=torch.float64)
    index = np.repeat(np.arange(P), G)
    if not case.gdpo:
        rewards = sum(batch.rewards.values()).reshape(-1, 1)
        return algorithms.compute_grpo_outcome_advantage(rewards, one, index)[0][:, 0]
    return algorithms.compute_gdpo_outcome_advantage(
        one,
        one,
        index,
        config={"gdpo_reward_keys": list(batch.rewards), "gdpo_reward_weights": [1.0, 0.5]},
        non_tensor_batch={name: values.flatten().numpy() for name, values in batch.rewards.items()},
        batch={"prompts": torch.zeros(P * G, 1), "attention_mask": torch.ones(P * G, 2).long()},
    )[0][:, 0]


def verl_loss(case: Case, batch: Batch, logp: Tensor) -> Tensor:
    algorithms, _, actor_config = verl_modules()
    options, mask = case.options, batch.mask.double()
    mode = AGGREGATION.get(options.loss_type, "token-mean")
    config = actor_config(
        strategy="fsdp",
        rollout_n=G,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=options.clip_low,
        clip_ratio_high=options.clip_high,
        clip_ratio_c=options.dual_clip or 1e30,
    )
    if options.loss_type == "dr_grpo":
        config.global_batch_info["loss_scale_factor"] = MAX_LENGTH
    name = options.loss_type if options.loss_type in ("gspo", "cispo") else "vanilla"
    loss, _ = algorithms.get_policy_loss_fn(name)(
        old_log_prob=batch.old,
        log_prob=logp,
        advantages=verl_advantages(case, batch)[:, None].expand_as(mask),
        response_mask=mask,
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=verl_importance(case, batch) if case.importance else None,
    )
    if options.beta:
        kl = algorithms.kl_penalty(logp, batch.ref, "low_var_kl")
        loss = loss + options.beta * algorithms.agg_loss(kl, mask, mode, **config.global_batch_info)
    return loss


# --- tests ------------------------------------------------------------------------------------------------------------


def needs(*peers: str) -> None:
    for peer in peers:
        if importlib.util.find_spec(peer) is None:
            pytest.skip(f"{peer} is not installed: docs/peers.md says how to install it")


@pytest.mark.parametrize(
    ("case", "peer"), [pytest.param(case, peer, id=f"{case.name}-{peer}") for case in cases() for peer in case.peers]
)
def test_loss_and_gradient_agree(case, peer):
    needs(peer, *(["verl"] if case.importance else []))
    for seed in range(BATCHES):
        assert max(difference(case, Batch(seed), peer)) < BOUND, seed


def test_the_advantages_are_verls():
    needs("verl")
    for seed in range(BATCHES):
        batch = Batch(seed)
        for case in (Case("", LossOptions()), Case("", LossOptions(), gdpo=True)):
            torch.testing.assert_close(
                our_advantages(case, batch).flatten(), verl_advantages(case, batch), rtol=1e-5, atol=1e-6
            )


def main() -> None:
    print("| variant and option | TRL: loss | TRL: gradient | verl: loss | verl: gradient |\n|---|---|---|---|---|")
    for case in cases():
        cells = []
        for peer in ("trl", "verl"):
            rows = [difference(case, Batch(seed), peer) for seed in range(BATCHES if peer in case.peers else 0)]
            cells += [f"{max(column):.0e}" for column in zip(*rows)] or ["–", "–"]
        print(f"| {case.name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
