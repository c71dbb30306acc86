"""GRPO for vision-language models. The whole algorithm is in this file.

    torchrun --nproc_per_node 8 grpo.py --task vqa --data data.jsonl     # or without --data: recipes/vqa.flags

`train_step` is Algorithm 1 of DeepSeekMath (arXiv:2402.03300); its comments give the line numbers. Lines 2 and 12 are
left out: the reference is fixed, and no reward model is trained. Three more things differ. There is no KL term by
default (`--beta`). A group whose rewards are all equal gets advantages of exactly zero. A truncated importance weight
corrects for the small difference between the sampler's and the trainer's log-probabilities.

Three objects in training/ do the rest; none depends on the loss. `run.collector` draws prompts, samples and scores.
`run.updater` cuts micro-batches and steps AdamW. `run.loop` evaluates, saves and stops. config.py has the flags, and
training/run.py starts or resumes a run.

Shapes: P prompts per step on all processes together, G completions per prompt, N completions on this process, L tokens
in one completion, C completion tokens in one micro-batch. Their completions, `completion_of_token` (C,): 0, 0, …, 1, …
"""

from common import cli
from config import Config, with_recipe

if __name__ == "__main__":  # before the slow import of torch, so that --help and flag errors appear at once
    cli.launch("grpo", Config, with_recipe)

import math
from collections.abc import Callable
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from common import distributed
from common.distillation import with_teacher
from common.errors import UserError, dataclass, find_entry
from common.group_stats import EPSILON, deviation, is_varied, sequence_log_ratio
from common.records import Group, GroupRewards, ScoredGroup
from common.spans import of_completions, spread_over_tokens
from packing import PackedBatch
from training.loop import Run
from training.metrics import logp_difference
from training.run import start

# --- advantages -------------------------------------------------------------------------------------------------------


def advantages_of(rewards: GroupRewards, reward_weights: dict[str, float], cfg: Config) -> Tensor:
    """Return the advantages of `rewards`: (P, G), or (P, G, L) with one per token. NaN leaves a completion out.

    With dynamic sampling, the collector also calls this, and keeps groups with an advantage that is neither 0 nor NaN.
    """
    advantage, length = ADVANTAGES[cfg.advantage], cfg.max_completion_length
    return spread_over_tokens(lambda part: advantage(part, reward_weights, cfg), rewards, length)


def group_advantages(rewards: Tensor, scale: str = "group") -> Tensor:
    """Return the advantages (P, G) of `rewards` (P, G) relative to their group's mean (DeepSeekMath, section 4.1.2).

    A NaN reward marks an unscored completion, which does not count towards any mean. It gets an advantage of 0, and
    `training_groups` leaves it out. `scale` selects the divisor: the standard deviation of the group ("group") or of
    all rewards ("batch"), or 1 ("none", as in Dr. GRPO, arXiv:2503.20783). Standard deviations have n − 1 in the
    denominator and get ε = 1e-6 added, as in verl. Equal rewards (`is_varied`) get advantages of exactly 0.
    """
    centred = rewards - rewards.nanmean(dim=1, keepdim=True)
    divisor = 1.0
    if scale != "none":
        divisor = deviation(rewards.reshape(1, -1) if scale == "batch" else rewards) + EPSILON
    return torch.where(is_varied(rewards)[:, None], (centred / divisor).nan_to_num(), 0.0)


def _gdpo(rewards: GroupRewards, reward_weights: dict[str, float], cfg: Config) -> Tensor:
    from parts.dapo import gdpo_advantages

    return gdpo_advantages(rewards.parts, reward_weights, group_advantages)


ADVANTAGES: dict[str, Callable[[GroupRewards, dict[str, float], Config], Tensor]] = {  # rewards, reward weights, flags
    "group": lambda rewards, reward_weights, cfg: group_advantages(rewards.total, "group"),
    "batch": lambda rewards, reward_weights, cfg: group_advantages(rewards.total, "batch"),
    "none": lambda rewards, reward_weights, cfg: group_advantages(rewards.total, "none"),
    "gdpo": _gdpo,
}


# --- the objective of a token -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loss:
    """A variant of the loss."""

    objective: Callable[..., tuple[Tensor, Tensor]]  # each token's objective, and whether it was clipped; see below
    average: Literal["sequences", "tokens", "constant"]  # what the loss is a mean over; see `token_weights`
    clip_low: Annotated[float, Field(ge=0, le=1)]  # the default of `--clip_low`
    clip_high: Annotated[float, Field(ge=0, lt=math.inf)]  # the default of `--clip_high`
    ratio: Literal["token", "sequence"] = "token"  # "sequence": the geometric mean over the completion
    needs_entropy: bool = False  # whether `objective` gets each token's `entropy` (C,), with its gradient


def clipped_objective(
    logp: Tensor, log_ratio: Tensor, advantages: Tensor, batch: PackedBatch, cfg: Config
) -> tuple[Tensor, Tensor]:
    """Return min(r·A, clip(r)·A), and whether a clip bound decides. All tensors are (C,).

    This is eq. 3 of DeepSeekMath or, with clip_high > clip_low, eq. 8 of DAPO (arXiv:2503.14476). With c = `dual_clip`,
    the objective of a negative advantage is max(min(r·A, clip(r)·A), c·A) (dual clip, arXiv:1912.09729).
    """
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    is_clipped = clipped * advantages < ratio * advantages
    if cfg.dual_clip:
        lowest = torch.where(advantages < 0, cfg.dual_clip * advantages, -torch.inf)
        objective, is_clipped = torch.maximum(objective, lowest), is_clipped | (objective < lowest)
    return objective, is_clipped


def cispo_objective(
    logp: Tensor, log_ratio: Tensor, advantages: Tensor, batch: PackedBatch, cfg: Config
) -> tuple[Tensor, Tensor]:
    """Return stop_gradient(clip(r)) · A · log π_θ, and whether r was clipped (CISPO eq. 4, arXiv:2506.13585)."""
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    return clipped.detach() * advantages * logp, ratio != clipped


LOSSES = {
    "grpo": Loss(clipped_objective, "sequences", 0.2, 0.2),  # DeepSeekMath, arXiv:2402.03300
    "dr_grpo": Loss(clipped_objective, "constant", 0.2, 0.2),  # Dr. GRPO, arXiv:2503.20783, with --advantage none
    "dapo": Loss(clipped_objective, "tokens", 0.2, 0.28),  # DAPO, arXiv:2503.14476
    "gspo": Loss(clipped_objective, "sequences", 3e-4, 4e-4, ratio="sequence"),  # GSPO eq. 5 and 7, arXiv:2507.18071
    "cispo": Loss(cispo_objective, "tokens", 1.0, 4.0),  # CISPO, arXiv:2506.13585
}


def kl_estimate(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Return the k3 estimate of KL(π_θ ‖ π_ref) for each token (DeepSeekMath eq. 4). All tensors are (C,)."""
    difference = ref_logp - logp
    return difference.exp() - difference - 1


# --- the loss ---------------------------------------------------------------------------------------------------------


def token_weights(lengths: Tensor, loss_type: str, max_length: int, totals: Tensor | None = None) -> Tensor:
    """Return the per-token loss weight of each of the N completions, as (N,), given their `lengths` (N,).

    The loss type's `average` decides. "sequences": 1 / (sequences · L_i), the mean over sequences of the mean over
    tokens. "tokens": 1 / tokens, the mean over all tokens. "constant": 1 / (sequences · max_length). `totals` (2,):
    the numbers of sequences and tokens in an update on all processes (by default, those in `lengths`). The update's
    gradient is then a plain sum over micro-batches and processes, however they are cut. Length 0: unscored, uncounted.
    """
    if totals is None:
        totals = torch.stack([(lengths > 0).sum(), lengths.sum()])
    sequences, tokens = totals.clamp(min=1).double()
    divisors = {"sequences": sequences * lengths.clamp(min=1), "tokens": tokens, "constant": sequences * max_length}
    return torch.where(lengths > 0, 1 / divisors[LOSSES[loss_type].average], 0.0).float()


def batch_loss(cfg: Config, batch: PackedBatch, logp: Tensor, entropy: Tensor | None = None) -> tuple[Tensor, dict]:
    """Return the loss of one micro-batch, and sums over its tokens. `logp` and `entropy` (C,) are those of π_θ.

    With token weight w, the loss is Σ w · (β · KL − importance · objective). The objective is that of `LOSSES`, a
    function of the ratio r = π_θ / π_old and the advantage. π_old is the policy before the step's first update or, with
    `--old_logp sampler`, the sampler. The importance weight is min(π_old / π_sampler, `--importance_cap`) of the token,
    truncated importance sampling (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL").
    """
    values, loss_type, completions = batch.values, LOSSES[cfg.loss_type], batch.completion_of_token
    advantages, counted = values.advantages, values.token_weights > 0  # False for dummy tokens, whose values are finite
    trainer_logp = logp.detach() if values.trainer_logp is None else values.trainer_logp
    if cfg.old_logp == "sampler":
        old_logp = values.sampling_logp
    else:  # with one update, r is 1, even if dropout makes π_θ differ from `trainer_logp`
        old_logp = logp.detach() if cfg.updates_per_step == 1 else trainer_logp
    log_ratio = torch.where(counted, logp - old_logp, 0.0)
    if loss_type.ratio == "sequence":
        log_ratio = sequence_log_ratio(log_ratio, completions, values.per_token or bool(cfg.teacher))
    if cfg.teacher:
        advantages = with_teacher(advantages, trainer_logp, values.teacher_logp)
    options = {"entropy": entropy} if loss_type.needs_entropy else {}
    objective, is_clipped = loss_type.objective(logp, log_ratio, advantages, batch, cfg, **options)
    is_capped = torch.zeros_like(counted)
    if cfg.importance_cap and cfg.old_logp == "policy":
        importance = (trainer_logp - values.sampling_logp).exp()
        is_capped = importance > cfg.importance_cap
        objective = objective * importance.clamp(max=cfg.importance_cap)
    per_token, kl = -objective, torch.zeros_like(logp)
    if cfg.beta:
        kl = kl_estimate(logp, torch.where(counted, values.ref_logp, logp))
        per_token = per_token + cfg.beta * kl
    loss = (values.token_weights * per_token).sum()
    sums = {"loss": loss.detach(), "tokens": counted.sum(), "clip_ratio": (is_clipped & counted).sum()}
    sums |= {"kl": (kl * counted).sum().detach(), "importance_capped": (is_capped & counted).sum()}
    return loss, sums | logp_difference(batch, trainer_logp)


# --- one step ---------------------------------------------------------------------------------------------------------


def train_step(run: Run) -> dict[str, float]:
    """Take one GRPO step (Algorithm 1 of DeepSeekMath) and return its metrics; docs/metrics.md explains them."""
    cfg, collector, updater = run.cfg, run.collector, run.updater
    groups, rewards = collector.collect(run.policy, advantages_of, run.step)  # lines 5 to 8: π_old ← π_θ; sample; score
    advantages = advantages_of(rewards, collector.scorer.all_weights, cfg)  # line 9, (P, G) on every process
    run.log.completions(run.step + 1, groups, advantages)
    minibatches = []
    for first in range(0, cfg.prompts_per_step, cfg.prompts_per_update):
        chosen = [group for group in groups if first <= group.index < first + cfg.prompts_per_update]
        minibatches.append(updater.balance(training_groups(cfg, chosen, advantages)))
    if cfg.beta:
        minibatches = updater.with_logprobs(run.reference, minibatches, "ref_logp")
    if cfg.teacher:
        minibatches = updater.with_logprobs(run.teacher, minibatches, "teacher_logp")
    if (cfg.updates_per_step > 1 and (cfg.old_logp == "policy" or cfg.teacher)) or updater.has_dropout:
        minibatches = updater.with_logprobs(run.policy, minibatches, "trainer_logp")  # π_old
    for _ in range(cfg.num_iterations):  # line 10
        for minibatch in minibatches:
            updater.step(minibatch, lambda batch: backward(run, batch))  # line 11
    return collector.metrics(run.step) | updater.metrics()


def training_groups(cfg: Config, groups: list[ScoredGroup], advantages: Tensor) -> list[Group]:
    """Return those completions of an update on which its loss depends, with their advantages and token weights.

    Left out, as if they had not been sampled: unscored ones, and those with an advantage of NaN. A completion whose
    advantages are all 0 counts in the divisors of the weights, but is returned only if there is a KL term, an entropy
    term or a teacher. With `mask_truncated`, a truncated completion is not returned: it still counts as a sequence,
    but its tokens do not count (DAPO, arXiv:2503.14476, section 3.4).
    """
    everyone = [(group, *each) for group in groups for each in zip(group.rollouts, of_completions(group, advantages))]
    lengths = torch.tensor([0 if own.isnan().any() else len(rollout.ids) for _, rollout, own in everyone]).long()
    masked = torch.tensor([cfg.mask_truncated and rollout.truncated for _, rollout, _ in everyone], dtype=torch.bool)
    totals = distributed.all_sum(torch.stack([(lengths > 0).sum(), lengths.masked_fill(masked, 0).sum()]))
    weights = token_weights(lengths, cfg.loss_type, cfg.max_completion_length, totals).masked_fill(masked, 0)
    needs_all = cfg.beta or cfg.teacher or LOSSES[cfg.loss_type].needs_entropy
    needed = {group.index: Group(group.prompt, [], group.index) for group in groups}
    for (group, rollout, own), weight in zip(everyone, weights.tolist()):
        if weight and (needs_all or own.any()):
            needed[group.index].completions.append(rollout.prepared(own, weight))
    return [group for group in needed.values() if group.completions]


def backward(run: Run, batch: PackedBatch) -> tuple[dict[str, Tensor], Tensor]:
    """Add the gradient of one micro-batch; return its sums over tokens, and the log-probabilities (C,)."""
    logp, entropy = run.policy(batch, run.cfg.temperature, LOSSES[run.cfg.loss_type].needs_entropy)
    loss, sums = batch_loss(run.cfg, batch, logp, entropy)
    # FSDP averages gradients over processes, but the token weights are already normalised over all processes.
    (loss * distributed.world_size()).backward()
    return sums | {"entropy": (entropy.detach() * (batch.values.token_weights > 0)).sum()}, logp.detach()


# --- the run ----------------------------------------------------------------------------------------------------------


def resolve_loss(cfg: Config) -> None:
    """Set unset clip bounds to the loss type's defaults. Raises UserError for flags that do not fit the loss type."""
    loss = find_entry("loss_type", cfg.loss_type, LOSSES)
    find_entry("advantage", cfg.advantage, ADVANTAGES)
    cfg.clip_low = loss.clip_low if cfg.clip_low is None else cfg.clip_low
    cfg.clip_high = loss.clip_high if cfg.clip_high is None else cfg.clip_high
    if cfg.dual_clip and loss.objective is not clipped_objective:
        raise UserError(f"--dual_clip does nothing with --loss_type {cfg.loss_type}: leave it out")
    if 0 < cfg.dual_clip <= 1 + cfg.clip_high:
        raise UserError(f"--dual_clip {cfg.dual_clip:g} must be above 1 + clip_high ({1 + cfg.clip_high:g})")


def set_up(cfg: Config) -> Run:
    """Check the flags and set the run up (training/run.py): lines 1 and 3 of Algorithm 1."""
    resolve_loss(cfg)
    return start(cfg)


def main(cfg: Config) -> None:
    run = set_up(cfg)
    run.loop.train(run, train_step)  # line 4
