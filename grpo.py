"""GRPO for vision-language models: the maths, one training step, and the training loop.

    torchrun --nproc_per_node 8 grpo.py --task vqa                  # with the flags of recipes/vqa.flags
    torchrun --nproc_per_node 8 grpo.py --task vqa --data data.jsonl

`train_step` implements Algorithm 1 of DeepSeekMath (arXiv:2402.03300); its comments give the paper's line numbers.
Lines 2 and 12 are omitted: the reference is fixed, and no reward model is trained. Three more things differ. By
default, there is no KL term (`--beta`). A group whose rewards are all equal gets advantages of exactly zero. A
truncated importance weight corrects for the small difference between the sampler's and the trainer's log-probabilities
(`importance_weights`). The flags are defined in config.py, and training/run.py sets a run up.

Shapes: P prompts per step on all processes together, G completions per prompt, N completions on this process, L tokens
in one completion, C completion tokens in one micro-batch.
"""

from common import cli
from config import Config, with_recipe

if __name__ == "__main__":  # before the slow import of torch, so that --help and flag errors appear at once
    ARGS = cli.parse(Config, with_recipe)

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace

import torch
from torch import Tensor

from common import console, distributed, signals
from common.errors import Interrupted, RunStopped, StepFailed, UserError
from common.files import release_locks
from common.records import Completion, Group, Prompt, Sampling, ScoredGroup
from evaluation.held_out import score_policy
from packing import PackedBatch
from policy.batches import completion_logprobs, micro_batches, order_for_packing, vision_cost_per_token
from policy.lora import has_dropout, reference_weights
from policy.memory import with_oom_retry
from policy.model import Policy, cache_image_features
from policy.sharding import unsharded
from rewards import MAX_UNSCORED
from training import guards
from training.balance import rebalance
from training.checkpoint import RUN_STATE, random_states, restore_random_states
from training.losses import (
    DEFAULT_OPTIONS,
    EPSILON,
    LOSSES,
    Loss,
    LossOptions,
    deviation,
    get_loss,
    importance_weights,
    is_varied,
    kl_estimate,
    mean_by_row,
)
from training.metrics import Clock, GroupRewards, concatenate, step_metrics
from training.partial_rollouts import DrawnPrompt, StoppingRule, partial_metrics, sample_until_enough, saved_state
from training.prompt_stream import prompt_seed
from training.run import Run, freeze_garbage_collector, set_up

__all__ = ["LOSSES", "Loss", "LossOptions"]  # for your own loss; see README.md

# --- the maths: pure functions of tensors -----------------------------------------------------------------------------


def group_advantages(rewards: Tensor, scale: str = "group") -> Tensor:
    """Return the advantages (P, G) of `rewards` (P, G) relative to the mean of each row (DeepSeekMath, section 4.1.2).

    A NaN reward marks an unscored completion, which does not count towards any mean and gets an advantage of 0. `scale`
    selects the divisor: the standard deviation of the row ("group"), the standard deviation of all rewards ("batch"),
    or 1 ("none", as in Dr. GRPO, arXiv:2503.20783). Standard deviations have n − 1 in the denominator and get ε = 1e-6
    added, as in verl. If the rewards of a row are equal (`is_varied`), its advantages are exactly 0.
    """
    centred = rewards - rewards.nanmean(dim=1, keepdim=True)
    divisor = 1.0
    if scale != "none":
        divisor = deviation(rewards.reshape(1, -1) if scale == "batch" else rewards) + EPSILON
    return torch.where(is_varied(rewards)[:, None], (centred / divisor).nan_to_num(), 0.0)


def gdpo_advantages(parts: dict[str, Tensor], weights: dict[str, float], scale: str = "group") -> Tensor:
    """Return the advantages (P, G) of several rewards (P, G), given by name (GDPO, arXiv:2601.05242).

    Each reward k is first normalised in its group to A_k, so that no reward hides another. The weighted sum
    S = Σ_k w_k · A_k is then divided by std(S) + ε, over the batch. The mean of S is 0, because the mean of A_k in each
    group is 0.
    """
    weights = {name: weight for name, weight in weights.items() if weight}
    unscored = sum(parts[name] for name in weights).isnan()
    rewards = {name: parts[name].masked_fill(unscored, math.nan) for name in weights}
    sums = sum(weight * group_advantages(rewards[name], scale) for name, weight in weights.items())
    std = deviation(sums.masked_fill(unscored, math.nan).reshape(1, -1))
    return torch.where(is_varied(sums)[:, None], sums / (std + EPSILON), 0.0)


def token_weights(lengths: Tensor, loss_type: str, max_length: int, totals: Tensor | None = None) -> Tensor:
    """Return the per-token loss weight of each of the N completions, as (N,), given their `lengths` (N,).

    The loss type's `average` decides. "sequences": 1 / (sequences · L_i), the mean over sequences of the mean over
    tokens. "tokens": 1 / tokens, the mean over all tokens. "constant": 1 / (sequences · max_length). The weights are
    fixed before a batch is cut into micro-batches, so the gradient is a plain sum over them, however it is cut.

    `totals` (2,) holds the numbers of sequences and tokens in the batch over all processes; by default, it is computed
    from `lengths`. Length 0 marks an unscored completion, which is not counted. Raises ValueError for an unknown loss
    type.
    """
    if totals is None:
        totals = torch.stack([(lengths > 0).sum(), lengths.sum()])
    sequences, tokens = totals.clamp(min=1).double()
    average = get_loss(loss_type).average
    if average == "tokens":
        weights = torch.ones_like(lengths, dtype=torch.float64) / tokens
    elif average == "constant":
        weights = torch.ones_like(lengths, dtype=torch.float64) / (sequences * max_length)
    else:
        weights = 1 / (sequences * lengths.clamp(min=1))
    return torch.where(lengths > 0, weights, 0.0).float()


def grpo_loss(  # noqa: PLR0913 - the tensors of the loss
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    weights: Tensor,
    row_of_token: Tensor,
    options: LossOptions = DEFAULT_OPTIONS,
    ref_logp: Tensor | None = None,
    importance: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of one micro-batch, and sums over its tokens for the metrics. All tensor arguments are (C,).

    With token weight w, the loss is Σ w · (−objective + β · KL). The objective is that of `LOSSES`, a function of the
    ratio r = π_θ / π_old and the advantage. KL is the k3 estimate (DeepSeekMath, eq. 4); `unbiased_kl` multiplies it by
    each token's r, for an unbiased gradient (DeepSeek-V3.2, arXiv:2512.02556). `importance` is a constant weight of
    each token's objective. `row_of_token` numbers the completions 0, 1, … Raises ValueError for an unknown loss type.
    """
    loss_type = get_loss(options.loss_type)
    counted = weights > 0  # blank micro-batches hold placeholder values, which must stay finite
    token_log_ratio = log_ratio = torch.where(counted, logp - old_logp, 0.0)
    if loss_type.ratio == "sequence":
        log_ratio = mean_by_row(log_ratio, row_of_token)
    objective, is_clipped = loss_type.objective(logp, log_ratio, advantages, row_of_token, options)
    if importance is not None:
        objective = objective * importance
    per_token = -objective
    kl = torch.zeros_like(logp)
    if options.beta:
        kl = kl_estimate(logp, torch.where(counted, ref_logp, logp))
        per_token = per_token + options.beta * (kl * token_log_ratio.exp() if options.unbiased_kl else kl)
    stats = {"tokens": counted.sum(), "clip_ratio": (is_clipped & counted).sum(), "kl": (kl * counted).sum().detach()}
    return (weights * per_token).sum(), stats


# --- one step ---------------------------------------------------------------------------------------------------------


def train_step(run: Run) -> dict[str, float]:
    """Take one GRPO step (Algorithm 1 of DeepSeekMath) and return its metrics; docs/metrics.md explains them."""
    cfg, run.clock, run.updates = run.cfg, Clock(), 0
    is_partial = cfg.oversample > 1 or bool(run.in_flight)  # also where a run is resumed without the flag
    raise_if_interrupted(run)  # a signal may have come during an evaluation or a save: do not sample first
    with run.clock("sync"):
        run.engine.wake_up()
        run.engine.sync_weights(run.policy)  # line 6: π_old ← π_θ
    groups, rewards, all_rewards = collect(run)  # lines 5, 7, 8: prompts, completions, rewards
    with run.clock("sleep"):
        run.engine.sleep()
    if cfg.gdpo:
        advantages = gdpo_advantages(rewards.parts, run.scorer.all_weights, cfg.scale_rewards)
    else:
        advantages = group_advantages(rewards.total, cfg.scale_rewards)  # line 9, (K, G)
    run.log.completions(run.step + 1, groups, advantages)
    minibatches = make_minibatches(run, groups, advantages)
    if cfg.beta:
        minibatches = with_ref_logp(run, minibatches)
    if (cfg.updates_per_step > 1 and cfg.old_logp == "policy") or has_dropout(run.policy.model):
        minibatches = with_trainer_logp(run, minibatches)
    updates = []
    for _ in range(cfg.num_iterations):  # line 10
        for minibatch in minibatches:
            updates.append(update(run, minibatch))  # line 11
    if not cfg.max_steps:  # the schedule counts rounds of sampling: step over further ones, which had no update
        for _ in range((len(all_rewards.total) // cfg.prompts_per_step - 1) * cfg.updates_per_step):
            run.scheduler.step()
    freeze_garbage_collector()
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    metrics = step_metrics(rollouts, all_rewards, updates, run.clock) | {"lr": run.scheduler.get_last_lr()[0]}
    if is_partial:
        metrics |= partial_metrics(rollouts, run.in_flight, run.step, cfg.max_staleness)
    return metrics


# --- sampling ---------------------------------------------------------------------------------------------------------


def collect(run: Run) -> tuple[list[ScoredGroup], GroupRewards, GroupRewards]:
    """Sample the groups to train on.

    Returns this process's groups, the rewards of all groups to train on (K, G), and those of all groups sampled. K is
    P, or less if dynamic sampling finds fewer: it keeps only groups whose rewards differ before the overlong penalty,
    and repeats rounds until P are kept or the limit is reached. If it keeps none, the step uses the last round with
    rewards of 0. Groups stay in data order on any number of processes. Raises StepFailed when too many completions are
    unscored.
    """
    cfg = run.cfg
    limit = cfg.dynamic_sampling_rounds if cfg.dynamic_sampling else 1
    rounds, kept = [], []  # the rewards of each round; the groups to keep, by their index over all rounds
    local = {}  # this process's groups, by the same index
    for _ in range(limit if cfg.max_steps else min(limit, run.steps_left)):  # with `epochs`, each round is a step
        groups, rewards = sample_round(run)
        raise_if_interrupted(run)
        first = len(rounds) * cfg.prompts_per_step
        rounds.append(rewards)
        check_scored(run, concatenate(rounds))
        local |= {first + group.index: group for group in groups}
        varied = is_varied(rewards.raw)
        if cfg.gdpo:  # rewards can differ although their weighted sums do not; `weights` has no overlong penalty
            varied = gdpo_advantages(rewards.parts, run.scorer.weights, cfg.scale_rewards).any(dim=1)
        usable = [first + i for i, differ in enumerate(varied) if differ or not cfg.dynamic_sampling]
        kept += usable[: cfg.prompts_per_step - len(kept)]
        if len(kept) == cfg.prompts_per_step:
            break
    all_rewards = concatenate(rounds)
    any_kept = bool(kept)
    kept = kept or list(range(len(all_rewards.total)))[-cfg.prompts_per_step :]
    kept_rewards = all_rewards.map(lambda values: values[kept] if any_kept else torch.zeros_like(values[kept]))
    groups = [replace(local[i], index=index) for index, i in enumerate(kept) if i in local]
    return groups, kept_rewards, all_rewards


def sample_round(run: Run) -> tuple[list[ScoredGroup], GroupRewards]:
    """Sample and score the next P prompts: this process's groups, and the rewards of all processes in prompt order.

    Raises StepFailed on every process when a row can no longer be read, or when a user-defined reward fails.
    """
    cfg = run.cfg
    drawn, local_indices = next_prompts(run)
    run.position += len(drawn) - len(run.in_flight)
    local_positions = [drawn[i].position for i in local_indices]
    with run.clock("prompts"):
        prompts = dict(zip(local_positions, run.stream.get(local_positions)))
        cache_image_features(run.policy, list(prompts.values()), run.features)
    with run.clock("rollout"):
        chosen, run.in_flight = sample_prompts(run, drawn, local_indices, list(prompts.values()))
    local = {index: each for index, each in enumerate(chosen) if each.position in prompts}
    positions = [each.position for each in local.values()]
    samples, rollouts = run.stream.rows(positions), [list(each.rollouts) for each in local.values()]
    with run.clock("reward"):
        rewards, error = run.scorer(samples, rollouts, cfg.max_completion_length)
    distributed.raise_first_error(error, StepFailed)
    groups = [
        ScoredGroup(sample, prompts[each.position], completions, scores, index)
        for (index, each), sample, completions, scores in zip(local.items(), samples, rollouts, rewards)
    ]
    all_rewards = gather_results(run, groups, positions)
    upcoming, next_indices = next_prompts(run)
    run.stream.prefetch([upcoming[i].position for i in next_indices])  # they are encoded while this step trains
    return groups, all_rewards


def next_prompts(run: Run) -> tuple[list[DrawnPrompt], list[int]]:
    """Return the prompts of the next round, oldest first, and the indices of those that this process samples.

    The round starts with the prompts in flight. New ones are drawn until there are `oversample` times P, but no more
    than the remaining steps train on.
    """
    cfg = run.cfg
    target = round(cfg.oversample * cfg.prompts_per_step)
    if not (cfg.max_steps and cfg.dynamic_sampling):  # otherwise it is not known how many will be needed
        target = min(target, run.steps_left * cfg.prompts_per_step)
    new = range(run.position, run.position + max(target - len(run.in_flight), 0))
    drawn = [*run.in_flight, *(DrawnPrompt(position, run.step) for position in new)]
    return drawn, run.stream.assign_prompts(drawn, cfg.num_generations, cfg.max_completion_length, cfg.tensor_parallel)


def sample_prompts(
    run: Run, drawn: list[DrawnPrompt], local_indices: list[int], prompts: list[Prompt]
) -> tuple[list[DrawnPrompt], list[DrawnPrompt]]:
    """Sample the completions of `prompts`, which are those of `drawn` at `local_indices`.

    Returns the P prompts to train on and those that stay in flight. Those of other processes may lack completions.
    """
    cfg = run.cfg
    seeds = [prompt_seed(cfg.seed, drawn[i].position) for i in local_indices]
    sampling = Sampling(cfg.num_generations, cfg.max_completion_length, cfg.temperature)
    sample = functools.partial(run.engine.generate, prompts, seeds, sampling)
    if run.in_flight or len(drawn) > cfg.prompts_per_step:
        rule = StoppingRule(run.step, cfg.prompts_per_step, cfg.num_generations, cfg.max_staleness)
        return sample_until_enough(sample, drawn, local_indices, rule)
    sampled = dict(zip(local_indices, sample()))
    return [replace(each, rollouts=tuple(sampled.get(i, ()))) for i, each in enumerate(drawn)], []


def gather_results(run: Run, groups: list[ScoredGroup], positions: list[int]) -> GroupRewards:
    """Gather the rewards of all processes' groups, in prompt order, and record the lengths of their completions."""
    lengths = [[len(rollout.ids) for rollout in group.rollouts] for group in groups]
    local = [(g.index, position, sizes, g.rewards) for g, position, sizes in zip(groups, positions, lengths)]
    everyone = [row for rows in distributed.all_gather(local) for row in rows]
    everyone.sort(key=lambda row: row[0])  # by index within the step
    for _, position, sizes, _ in everyone:
        run.stream.record_length(position, sizes)
    rewards = [group_rewards for *_, group_rewards in everyone]  # P lists of G
    return GroupRewards(
        total=torch.tensor([[each.total for each in group] for group in rewards]),
        raw=torch.tensor([[each.raw for each in group] for group in rewards]),
        parts={
            name: torch.tensor([[each.parts[name] for each in group] for group in rewards])
            for name in run.scorer.all_weights
        },
    )


def check_scored(run: Run, rewards: GroupRewards) -> None:
    """Raise StepFailed when too many of the step's completions are unscored."""
    unscored = rewards.total.isnan().double().mean().item()
    if unscored > MAX_UNSCORED:
        reason = distributed.first_error(run.scorer.why_none or None) or "unknown reason"
        limit = f"at most {MAX_UNSCORED:.0%} may have none"
        raise StepFailed(f"{unscored:.0%} of the completions have no verdict, {limit} ({reason})")


# --- updates ----------------------------------------------------------------------------------------------------------


def make_minibatches(run: Run, groups: list[ScoredGroup], advantages: Tensor) -> list[list[Group]]:
    """Return what this process trains on in each update, in the order of the micro-batches.

    Completions are moved between processes, so that all have equal work.
    """
    cfg, vision_cost = run.cfg, vision_cost_per_token(run.policy)
    minibatches = []
    for first in range(0, cfg.prompts_per_step, cfg.prompts_per_update):
        chosen = [group for group in groups if first <= group.index < first + cfg.prompts_per_update]
        balanced = rebalance(training_groups(cfg, chosen, advantages, run.step), vision_cost)
        minibatches.append(order_for_packing(balanced, run.micro_batch_tokens, vision_cost))
    return minibatches


def training_groups(cfg: Config, groups: list[ScoredGroup], advantages: Tensor, step: int) -> list[Group]:
    """Return those completions of an update on which its loss depends, with their advantages and token weights.

    The loss depends on a completion if it is scored and has a non-zero advantage or a KL term. The weights count every
    scored completion of all processes, so leaving out the others saves work without changing the gradient. With
    `mask_truncated`, truncated completions count as completions whose tokens have weight 0 (DAPO, arXiv:2503.14476,
    section 3.4). `step`: the number of completed steps.
    """
    pairs = [pair for group in groups for pair in zip(group.rollouts, group.rewards)]
    lengths = torch.tensor([0 if math.isnan(rewards.total) else len(rollout.ids) for rollout, rewards in pairs]).long()
    masked = torch.tensor([cfg.mask_truncated and rollout.truncated for rollout, _ in pairs], dtype=torch.bool)
    unmasked = lengths.masked_fill(masked, 0)
    totals = distributed.all_sum(torch.stack([(lengths > 0).sum(), unmasked.sum()]))
    weights = token_weights(lengths, cfg.loss_type, cfg.max_completion_length, totals).masked_fill(masked, 0)
    weights = iter(weights.tolist())
    needed = []
    for group in groups:
        completions = []
        for rollout, advantage in zip(group.rollouts, advantages[group.index].tolist()):
            weight = next(weights)
            if weight and (advantage or cfg.beta):
                stale = sum(tokens for sampled_in, tokens in rollout.tokens_by_step.items() if sampled_in < step)
                completions.append(Completion(rollout.ids, rollout.sampling_logp, advantage, weight, stale))
        if completions:
            needed.append(Group(group.prompt, completions, group.index))
    return needed


def with_ref_logp(run: Run, minibatches: list[list[Group]]) -> list[list[Group]]:
    """Return `minibatches` with the log-probabilities under the reference."""
    with run.clock("reference"), reference_weights(run.reference.model):
        logps = recompute_logprobs(run, run.reference, minibatches)
    return map_completions(minibatches, lambda completion: replace(completion, ref_logp=next(logps)))


def with_trainer_logp(run: Run, minibatches: list[list[Group]]) -> list[list[Group]]:
    """Return `minibatches` with the trainer's log-probabilities before the first update of the step.

    Without them, `batch_loss` takes those of the update itself, which are the same in a step of one update without
    dropout.
    """
    with run.clock("old_logp"):
        logps = recompute_logprobs(run, run.policy, minibatches)
    return map_completions(minibatches, lambda completion: replace(completion, trainer_logp=next(logps)))


def map_completions(minibatches: list[list[Group]], change: Callable[[Completion], Completion]) -> list[list[Group]]:
    """Return `minibatches` with `change` applied to each completion, in order."""
    return [
        [replace(group, completions=[change(completion) for completion in group.completions]) for group in minibatch]
        for minibatch in minibatches
    ]


def recompute_logprobs(run: Run, policy: Policy, minibatches: list[list[Group]]) -> Iterator[Tensor]:
    """Return the (L,) log-probabilities under `policy` of each completion, in order."""
    groups = [group for minibatch in minibatches for group in minibatch]
    run.micro_batch_tokens, logps = with_oom_retry(
        policy,
        run.micro_batch_tokens,
        lambda budget: completion_logprobs(policy, groups, run.cfg.temperature, budget),
    )
    return iter(logps)


def update(run: Run, groups: list[Group]) -> dict[str, Tensor]:
    """Take one optimizer step on `groups`; return sums over all processes' tokens, from which metrics are computed."""
    cfg = run.cfg
    with run.clock("train"):
        run.micro_batch_tokens, (sums, logps) = with_oom_retry(
            run.policy, run.micro_batch_tokens, lambda budget: accumulate(run, groups, budget)
        )
        stats = distributed.reduce_stats(sums)
    if run.updates and cfg.old_logp == "sampler":  # they would compare the updated policy with the sampler
        stats |= {name: torch.zeros(()) for name in guards.DIFFERENCES}
    grad_norm = distributed.full_tensor(torch.nn.utils.clip_grad_norm_(run.policy.parameters(), cfg.max_grad_norm))
    problem = guards.describe_nonfinite(stats, grad_norm, groups, logps)
    is_empty = not grad_norm
    if problem:
        run.skipped, run.skip_reason = run.skipped + 1, problem
        console.log(f"step {run.step + 1}: {problem}; this update is skipped")
    elif mismatch := guards.check_logp_difference(stats, cfg.max_logp_difference, not run.updates):
        raise StepFailed(mismatch)
    elif not is_empty:
        run.skipped, run.norms = 0, [*run.norms[-49:], grad_norm.item()]
    with run.clock("optimizer"):
        if not (problem or is_empty):  # without a gradient, AdamW's momentum would still move the weights
            run.checkpoints.wait_until_read()
            run.optimizer.step()
        run.scheduler.step()  # the schedule counts skipped and empty updates too
        run.optimizer.zero_grad()
        run.updates += 1
    is_spike = not (problem or is_empty) and guards.is_spike(run.norms)
    flags = {"skipped": bool(problem), "empty": bool(is_empty), "spike": is_spike}
    return stats | {"grad_norm": grad_norm} | {name: torch.tensor(float(flag)) for name, flag in flags.items()}


def accumulate(run: Run, groups: list[Group], budget: int) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    """Accumulate the gradient of `groups` in micro-batches of `budget` tokens.

    Returns each micro-batch's sums over tokens, and the (L,) log-probabilities of each completion, in order.
    """
    sums, logps = [], []
    with unsharded(run.policy):
        for batch in micro_batches(run.policy, groups, budget):
            raise_if_interrupted(run)
            logp, entropy = run.policy(batch, run.cfg.temperature)
            logps += logp.detach().split(batch.lengths)
            loss, stats = batch_loss(run.cfg, batch, logp)
            # FSDP averages gradients over processes, but the token weights are already normalised over all processes.
            (loss * distributed.world_size()).backward()
            sums.append(stats | {"entropy": (entropy * (batch.values.weights > 0)).sum()})
    return sums, logps


def batch_loss(cfg: Config, batch: PackedBatch, logp: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return `grpo_loss` of one micro-batch, and sums over its tokens for the metrics. `logp` is (C,)."""
    values = batch.values
    trainer_logp = logp.detach() if values.trainer_logp is None else values.trainer_logp
    if cfg.old_logp == "sampler":
        old_logp = values.sampling_logp
    elif cfg.updates_per_step == 1:
        old_logp = logp.detach()  # the ratio is 1, also with dropout
    else:
        old_logp = trainer_logp
    importance, is_capped = None, torch.zeros_like(logp, dtype=torch.bool)
    if cfg.importance_cap and cfg.old_logp == "policy":
        log_ratio = trainer_logp - values.sampling_logp
        importance, is_capped = importance_weights(
            log_ratio, batch.row_of_token, cfg.importance_cap, cfg.importance_mode
        )
    options = LossOptions(**{option.name: getattr(cfg, option.name) for option in fields(LossOptions)})
    loss, stats = grpo_loss(
        logp, old_logp, values.advantages, values.weights, batch.row_of_token, options, values.ref_logp, importance
    )
    stats |= {"importance_capped": (is_capped & (values.weights > 0)).sum()}
    stats |= {"loss": loss.detach()} | guards.logp_difference(batch, trainer_logp)
    return loss, stats | {"flop": torch.full((), batch.flop, device=loss.device)}


def raise_if_interrupted(run: Run) -> None:
    """Raise Interrupted on every process if any was asked to stop before the first update of this step."""
    if not run.updates and distributed.all_max(torch.tensor(len(run.interrupted))):
        raise Interrupted


# --- the loop ---------------------------------------------------------------------------------------------------------


def train(run: Run) -> None:
    """Train to the last step, with evaluations, checkpoints and reports.

    After a signal, save a checkpoint and exit with status 130.
    """
    cfg, run.interrupted = run.cfg, signals.defer_signals()
    if run.eval_due:  # before the first step, or left over from a run that was stopped
        finish_step(run, {})
    if run.steps_left <= 0:
        console.log(f"nothing left to train after step {run.step}; to go on, raise --epochs or --max_steps")
    while run.steps_left > 0:
        metrics = step_or_save(run)
        run.step += 1
        due = run.steps_left <= 0 or (cfg.eval_every and run.step % cfg.eval_every == 0)
        run.eval_due = bool(due and run.eval_samples)
        finish_step(run, metrics)
    save_checkpoint(run, wait=True)  # before the export, so that the run is not lost if the export fails
    if run.in_flight:
        console.log(
            f"prompts drawn and not trained on: {len(run.in_flight)}; the last checkpoint has them, and --resume with "
            "a higher --max_steps continues them"
        )
    run.checkpoints.export_final(run.policy, cfg.model)
    run.log.refresh()


def step_or_save(run: Run) -> dict[str, float]:
    """Take a step and return its metrics. If the step fails before its first update, undo the step and save the run."""
    position, in_flight, lengths = run.position, run.in_flight, dict(run.stream.lengths)
    random = random_states()
    try:
        return train_step(run)
    except RunStopped:
        run.checkpoints.join_write()  # let the thread finish writing its checkpoint
        raise
    except (StepFailed, Interrupted) as error:  # these are raised on every process
        run.position, run.in_flight, run.stream.lengths = position, in_flight, lengths
        restore_random_states(random)  # dropout has drawn some
        save_checkpoint(run, wait=True)
        if isinstance(error, Interrupted):
            end_run(run)
        hint = run.checkpoints.resume_hint("retry the step")
        raise RunStopped(f"step {run.step + 1}: {error}; {hint}", status=1) from None


def finish_step(run: Run, metrics: dict[str, float]) -> None:
    """Finish a step: evaluate the policy if due, log the metrics, and if necessary save a checkpoint or stop the run.

    A run that is asked to stop saves a checkpoint first; the evaluation runs after the run is resumed.
    """
    cfg, problem = run.cfg, None
    status = torch.tensor([len(run.interrupted), run.checkpoints.write_failed()])
    interrupted, write_failed = distributed.all_max(status).tolist()
    if run.skipped >= cfg.max_skipped:
        problem = (
            f"step {run.step}: {run.skipped} skipped updates in a row ({run.skip_reason}); {guards.NONFINITE_HINT}"
        )
        run.skipped = 0  # a resumed run counts anew: it would otherwise stop at once if an evaluation is due
        run.checkpoints.folder.keep_last = 0  # keep all checkpoints: the last good one may be older
    elif run.eval_due and not interrupted:
        try:
            metrics |= evaluate_policy(run)
            run.eval_due = False
        except UserError as error:
            problem = f"evaluation after step {run.step}: {error}"
    run.log.metrics(run.step, metrics)
    run.log.print_step(run.step, max(run.steps_left, 0), metrics)
    is_best = record_best(run, metrics)
    stopping = bool(problem or interrupted)
    retry = write_failed or run.checkpoints.save_failed
    due = run.step and cfg.save_every and run.step % cfg.save_every == 0
    if stopping or retry or due or (is_best and cfg.keep_best):
        save_checkpoint(run, wait=stopping)
    if problem:
        raise RunStopped(f"{problem}; {run.checkpoints.resume_hint()}", status=1)
    if interrupted:
        end_run(run)


def record_best(run: Run, metrics: dict[str, float]) -> bool:
    """Record the best evaluation since training began; return whether it is this one."""
    score = metrics.get("eval/reward", -math.inf)
    is_best = bool(run.step) and score > (run.best["score"] if run.best else -math.inf)
    if is_best:
        run.best = {"step": run.step, "score": score}
    return is_best


def save_checkpoint(run: Run, wait: bool = False) -> None:
    """Save a checkpoint in the background; with `wait`, wait until it is on disk."""
    state = {name: getattr(run, name) for name in RUN_STATE} | {"lengths": run.stream.lengths}
    state["config"] = asdict(run.cfg) | run.stream.fingerprint
    state["in_flight"] = saved_state(run.in_flight)
    run.checkpoints.save(run.policy, run.optimizer, run.scheduler, state, wait)


def end_run(run: Run) -> None:
    """Raise RunStopped to end a run that was asked to stop and has saved a checkpoint."""
    run.log.refresh()
    status = 1 if run.checkpoints.save_failed else 130
    raise RunStopped(f"stopped after step {run.step}; {run.checkpoints.resume_hint()}", status)


def evaluate_policy(run: Run) -> dict[str, float]:
    """Return the scores of the current policy on the held-out rows."""
    return score_policy(
        run.policy, run.engine, run.stream.processor, run.eval_samples, run.scorer, run.cfg.max_completion_length
    )


def main(cfg: Config) -> None:
    run = set_up(cfg)
    try:
        with run.log:
            train(run)
    finally:
        release_locks()  # that of the output folder


if __name__ == "__main__":
    distributed.run(main, ARGS)
