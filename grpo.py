"""GRPO for vision-language models: the maths, one training step, and the training loop.

    python grpo.py --task count --model runs/tiny/count-0/model --data runs/tiny/count-0/train
    torchrun --nproc_per_node 8 grpo.py --task vqa --data data.jsonl

`train_step` implements Algorithm 1 of DeepSeekMath (arXiv:2402.03300); its comments give the paper's line numbers. It
departs from the paper in three ways. The loss is normalised over the whole batch, across all processes
(`token_weights`). A group whose rewards are all equal gets advantages of exactly zero. A truncated importance weight
corrects for the small difference between the sampler's and the trainer's log-probabilities (Yao et al. 2025, "Your
Efficient RL Framework Secretly Brings You Off-Policy RL Training"). The flags are defined in config.py.

Shapes: P prompts per step on all processes together, G completions per prompt, N completions on this process, L tokens
in one completion, C completion tokens in one micro-batch, K reward functions.
"""

from common import cli
from config import Config

if __name__ == "__main__":  # before the slow import of torch, so that --help and flag errors appear at once
    ARGS = cli.parse(Config)

import math
import sys
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor
from tqdm import tqdm

from common import console, distributed, signals
from common.errors import Interrupted, RunStopped, StepFailed, UserError
from common.records import Group, Rollout, Sample
from data import load_split, make_processor, max_images
from evaluation.held_out import score_policy
from packing import PackedBatch
from policy.batches import micro_batches, record_logprobs, vision_cost_per_patch
from policy.lora import reference_weights
from policy.memory import check_gpu_memory, choose_micro_batch_size, choose_sharding, with_oom_retry
from policy.model import Policy, cache_image_features, check_trained, compute_dtype, load_policy
from policy.optimizer import make_optimizer
from policy.sharding import apply_fsdp, load_reference, unsharded
from rewards import MAX_UNSCORED, Scorer
from rollout import Engine, make_engine
from training import guards
from training.balance import rebalance
from training.checkpoint import RUN_STATE, Checkpoints, load_checkpoint
from training.metrics import Clock, step_metrics
from training.prompt_stream import PromptStream, prompt_seed
from training.run_log import RunLog, check_output_folder

# --- the maths: pure functions of tensors -----------------------------------------------------------------------------


def group_advantages(rewards: Tensor, scale: str | bool = "group") -> Tensor:
    """Return the advantages (P, G) of `rewards` (P, G) relative to the mean of each row (DeepSeekMath, section 4.1.2).

    A NaN reward marks an unscored completion, which does not count towards any mean and gets an advantage of 0. `scale`
    selects the divisor: the standard deviation of the row ("group" or True), the standard deviation of all rewards
    ("batch"), or 1 ("none" or False, as in Dr. GRPO, arXiv:2503.20783). Standard deviations have n − 1 in the
    denominator, as in TRL and verl. If all rewards of a row are equal, its advantages are exactly 0.
    """
    centred = rewards - rewards.nanmean(dim=1, keepdim=True)
    scored = ~rewards.isnan()
    highest, lowest = rewards.nan_to_num(nan=-math.inf).amax(1), rewards.nan_to_num(nan=math.inf).amin(1)
    varied = (scored.sum(1) > 1) & (highest > lowest)
    if scale in ("none", False):
        std = torch.ones(len(rewards), 1, dtype=rewards.dtype)
    else:
        deviations = centred if scale != "batch" else (rewards - rewards.nanmean()).reshape(1, -1)
        counts = (~deviations.isnan()).sum(1, keepdim=True)
        std = (deviations.nan_to_num().square().sum(1, keepdim=True) / (counts - 1).clamp(min=1)).sqrt()
    return torch.where(scored & varied[:, None], centred / std, 0.0)


def token_weights(lengths: Tensor, loss_type: str, max_length: int, totals: Tensor | None = None) -> Tensor:
    """Return the per-token loss weight of each of the N completions, as (N,), given their `lengths` (N,).

    L_i is the length of completion i. "grpo" and "gspo": 1 / (sequences · L_i), the mean over sequences of the mean
    over tokens. "dapo" and "cispo": 1 / tokens, the mean over all tokens. "dr_grpo": 1 / (sequences · max_length), a
    constant. The weights are fixed before a batch is cut into micro-batches. The gradient is therefore a plain sum over
    the micro-batches, however the batch is cut.

    `totals` (2,) holds the number of sequences and the number of tokens in the batch, summed over all processes. By
    default, it is computed from `lengths`. Length 0 marks an unscored completion, which is not counted.
    """
    if totals is None:
        totals = torch.stack([(lengths > 0).sum(), lengths.sum()])
    sequences, tokens = totals.clamp(min=1).double()
    if loss_type in ("dapo", "cispo"):
        weights = torch.ones_like(lengths, dtype=torch.float64) / tokens
    elif loss_type == "dr_grpo":
        weights = torch.ones_like(lengths, dtype=torch.float64) / (sequences * max_length)
    else:
        weights = 1 / (sequences * lengths.clamp(min=1))
    return weights.float()


def grpo_loss(  # noqa: PLR0913 - the tensors of the loss and its options
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    weights: Tensor,
    row_of_token: Tensor,
    *,
    loss_type: str = "grpo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    beta: float = 0.0,
    ref_logp: Tensor | None = None,
    importance: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of one micro-batch, and sums over its tokens for the metrics. All tensor arguments are (C,).

    With ratio r = π_θ / π_old, advantage A and token weight w, the loss is Σ w · (−objective + β · KL).
    `loss_type` selects the objective:

    "grpo", "dr_grpo", "dapo": min(r·A, clip(r)·A)   DeepSeekMath eq. 3; Dr. GRPO; DAPO eq. 8 (clip_high > clip_low)
    "gspo": the same, with r replaced by its geometric mean over the sequence   GSPO eq. 5 and 7, arXiv:2507.18071
    "cispo": stop_gradient(clip(r)) · A · log π_θ   CISPO eq. 4, arXiv:2506.13585

    KL is the k3 estimate of DeepSeekMath eq. 4. `importance` holds a constant weight for each token's objective.
    `row_of_token` holds the index (0, 1, …) of each token's completion; only "gspo" uses this index.
    """
    counted = weights > 0  # blank micro-batches hold placeholder values, which must stay finite
    log_ratio = torch.where(counted, logp - old_logp, 0.0)
    if loss_type == "gspo":
        rows = int(row_of_token[-1]) + 1
        counts = torch.zeros(rows, device=logp.device).index_add(0, row_of_token, torch.ones_like(logp))
        sums = torch.zeros(rows, device=logp.device).index_add(0, row_of_token, log_ratio)
        log_ratio = (sums / counts)[row_of_token]
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    if loss_type == "cispo":
        objective = clipped.detach() * advantages * logp
        is_clipped = ratio != clipped
    else:
        objective = torch.minimum(ratio * advantages, clipped * advantages)
        is_clipped = clipped * advantages < ratio * advantages
    if importance is not None:
        objective = objective * importance
    per_token = -objective
    kl = torch.zeros_like(logp)
    if beta:
        difference = torch.where(counted, ref_logp - logp, 0.0)
        kl = difference.exp() - difference - 1
        per_token = per_token + beta * kl
    stats = {"tokens": counted.sum(), "clip_ratio": (is_clipped & counted).sum(), "kl": (kl * counted).sum().detach()}
    return (weights * per_token).sum(), stats


# --- one step ---------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """Everything a training step needs, and the progress of the run."""

    cfg: Config
    stream: PromptStream
    eval_samples: list[Sample]
    policy: Policy
    reference: Policy | None
    engine: Engine
    scorer: Scorer
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    log: RunLog
    checkpoints: Checkpoints
    total_steps: int
    step: int = 0  # completed steps
    position: int = 0  # prompts drawn so far from the endless shuffled stream of training rows
    clock: Clock = field(default_factory=Clock)  # seconds spent in each phase of the current step
    budget: int = 0  # maximum number of tokens in a micro-batch
    best: dict[str, float] | None = None  # step and score of the best evaluation so far
    skipped: int = 0  # consecutive updates skipped so far
    skip_reason: str = ""  # why the most recent of these updates was skipped
    unscored: bool = False  # whether an evaluation is due
    interrupted: list[int] = field(default_factory=list)  # signals that asked this process to stop
    norms: list[float] = field(default_factory=list)  # gradient norms of the last 50 updates
    micro_batch_logps: guards.MicroBatchLogps = field(default_factory=list)  # for the current update
    features: dict[bytes, Tensor] = field(default_factory=dict)  # a frozen vision tower's features, by image digest


def train_step(run: Run) -> dict[str, float]:
    """Take one GRPO step (Algorithm 1 of DeepSeekMath) and return its metrics; docs/metrics.md explains them."""
    cfg, run.clock = run.cfg, Clock()
    with run.clock("sync"):
        run.engine.wake_up()
        run.engine.sync_weights(run.policy)  # line 6: π_old ← π_θ
    groups, rewards, drawn = collect(run)  # lines 5, 7, 8: prompts, completions, rewards
    with run.clock("sleep"):
        run.engine.sleep()
    advantages = group_advantages(rewards, cfg.scale_rewards)  # line 9, (P, G)
    for group in groups:
        for rollout, advantage in zip(group.rollouts, advantages[group.group_index].tolist()):
            rollout.advantage = advantage
    run.log.completions(run.step + 1, groups)
    minibatches = split_into_minibatches(run, groups)
    groups = [group for minibatch in minibatches for group in minibatch]
    if cfg.beta:
        recompute_logprobs(run, run.reference, groups, "ref_logp")
    if cfg.updates_per_step > 1 and cfg.old_logp == "policy":
        recompute_logprobs(run, run.policy, groups, "old_logp")
    updates = []
    for _ in range(cfg.num_iterations):  # line 10
        for minibatch in minibatches:
            updates.append(update(run, minibatch))  # line 11
    return step_metrics(run.scorer.names, groups, drawn, updates, run.clock) | {"lr": run.scheduler.get_last_lr()[0]}


def sample_round(run: Run) -> tuple[list[Group], Tensor]:
    """Sample and score completions of the next P prompts.

    Returns this process's groups and the rewards (P, G, 2 + K) of all processes' groups in prompt order. The 2 + K
    values of a completion are the total, the total before the overlong penalty, and the value of each reward function.
    Raises StepFailed if a user-defined reward function fails.
    """
    cfg = run.cfg
    workload = (cfg.prompts_per_step, cfg.num_generations, cfg.max_completion_length, cfg.tensor_parallel)
    group_indices, positions = run.stream.assign_prompts(run.position, *workload)
    run.position += cfg.prompts_per_step
    samples = run.stream.rows(positions)
    seeds = [prompt_seed(cfg.seed, position) for position in positions]
    with run.clock("prompts"):
        prompts = run.stream.get(positions)
        cache_image_features(run.policy, prompts, run.features)
    with run.clock("rollout"):
        rollouts = run.engine.generate(prompts, cfg.num_generations, seeds, cfg.max_completion_length, cfg.temperature)
    groups = [Group(*fields) for fields in zip(prompts, rollouts, group_indices, samples)]
    for group in groups:
        for rollout in group.rollouts:
            rollout.has_image = bool(group.prompt.images)
    with run.clock("reward"):
        error = run.scorer([(group.sample, group.rollouts) for group in groups], cfg.max_completion_length)
    names = run.scorer.names
    rewards = [[[r.reward, r.raw_reward, *(r.rewards[n] for n in names)] for r in g.rollouts] for g in groups]
    lengths = [[len(r.ids) for r in g.rollouts] for g in groups]
    gathered = distributed.all_gather((error, list(zip(group_indices, positions, lengths, rewards))))
    if error := next((error for error, _ in gathered if error), None):
        raise StepFailed(error)
    in_order = sorted(row for _, rows in gathered for row in rows)  # sorted by group index
    for _, position, group_lengths, _ in in_order:
        run.stream.record_length(position, group_lengths)
    _, next_positions = run.stream.assign_prompts(run.position, *workload)
    run.stream.prefetch(next_positions)
    return groups, torch.tensor([group_rewards for *_, group_rewards in in_order])


def collect(run: Run) -> tuple[list[Group], Tensor, Tensor]:
    """Sample the groups to train on.

    Returns this process's groups, the rewards (P, G) of all groups to train on, and the rewards (groups, G, 2 + K) of
    all groups that were sampled. With dynamic sampling, a group is kept only if its rewards before the overlong penalty
    are not all equal. Rounds are repeated until P groups have been kept or the maximum number of rounds is reached. The
    step trains on the groups that were kept. Groups stay in data order, whatever the number of processes. Raises
    StepFailed if too many completions are unscored.
    """
    cfg = run.cfg
    groups, kept_rewards, drawn = [], [], []
    for _ in range(cfg.dynamic_sampling_rounds if cfg.dynamic_sampling else 1):
        sampled, rewards = sample_round(run)
        raise_if_interrupted(run)
        drawn.append(rewards)
        unscored = torch.cat(drawn)[..., 0].isnan().double().mean().item()
        if unscored > MAX_UNSCORED:
            reason = next(filter(None, distributed.all_gather(run.scorer.why_none)), "unknown")
            limit = f"at most {MAX_UNSCORED:.0%} may have none"
            raise StepFailed(f"{unscored:.0%} of the completions have no verdict, {limit} ({reason})")
        varied = group_advantages(rewards[..., 1], "none").any(1).tolist()
        usable = [i for i in range(len(rewards)) if varied[i] or not cfg.dynamic_sampling]
        kept = usable[: cfg.prompts_per_step - len(kept_rewards)]
        new_index = {old: len(kept_rewards) + i for i, old in enumerate(kept)}
        for group in sampled:
            if group.group_index in new_index:
                groups.append(replace(group, group_index=new_index[group.group_index]))
        kept_rewards += [rewards[i, :, 0] for i in kept]
        if len(kept_rewards) == cfg.prompts_per_step:
            break
    if not kept_rewards:  # no round produced anything to learn from: take a step with zero gradient
        groups, kept_rewards = sampled, list(rewards[..., 0])
    return groups, torch.stack(kept_rewards), torch.cat(drawn)


def split_into_minibatches(run: Run, groups: list[Group]) -> list[list[Group]]:
    """Return this process's groups for each update, after moving completions between processes to balance the work."""
    cfg, patch_cost = run.cfg, vision_cost_per_patch(run.policy)
    minibatches = []
    for first in range(0, cfg.prompts_per_step, cfg.prompts_per_update):
        minibatch = [g for g in groups if first <= g.group_index < first + cfg.prompts_per_update]
        minibatches.append(rebalance(minibatch, lambda rollout: has_gradient(run, rollout), patch_cost))
    return minibatches


def has_gradient(run: Run, rollout: Rollout) -> bool:
    """Return whether the loss depends on `rollout`: it must be scored and have a non-zero advantage or a KL term."""
    return not math.isnan(rollout.reward) and bool(rollout.advantage or run.cfg.beta)


def with_gradient(run: Run, groups: list[Group]) -> list[Group]:
    """Return `groups` with only the completions that the loss depends on.

    The token weights are computed from all completions, so dropping the others saves work without changing the
    gradient.
    """
    kept = [replace(group, rollouts=[r for r in group.rollouts if has_gradient(run, r)]) for group in groups]
    return [group for group in kept if group.rollouts]


def recompute_logprobs(run: Run, policy: Policy, groups: list[Group], name: str) -> None:
    """Compute each completion's log-probabilities under `policy` and store them in its attribute `name`."""
    is_reference = name == "ref_logp"
    trained = with_gradient(run, groups)
    with run.clock("reference" if is_reference else name), reference_weights(policy.model, is_reference):
        run.budget, _ = with_oom_retry(
            policy, run.budget, lambda budget: record_logprobs(policy, trained, name, run.cfg.temperature, budget)
        )


def update(run: Run, groups: list[Group]) -> dict[str, Tensor]:
    """Take one optimizer step on `groups`; return sums over all processes' tokens, from which metrics are computed."""
    cfg = run.cfg
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = torch.tensor([0 if math.isnan(r.reward) else len(r.ids) for r in rollouts], dtype=torch.long)
    totals = distributed.all_sum(torch.stack([(lengths > 0).sum(), lengths.sum()]))
    weights = token_weights(lengths, cfg.loss_type, cfg.max_completion_length, totals)
    for rollout, weight in zip(rollouts, weights.tolist()):
        rollout.weight = weight
    with run.clock("train"):
        run.budget, sums = with_oom_retry(run.policy, run.budget, lambda budget: accumulate(run, groups, budget))
        stats = distributed.reduce_stats(sums)
    grad_norm = distributed.full_tensor(torch.nn.utils.clip_grad_norm_(run.policy.parameters(), cfg.max_grad_norm))
    is_first = "optimizer" not in run.clock.laps
    problem = guards.describe_nonfinite(stats, grad_norm, groups, run.micro_batch_logps)
    if problem:
        run.skipped, run.skip_reason = run.skipped + 1, problem
        if console.is_main():
            print(f"step {run.step + 1}: {problem}; this update is skipped", file=sys.stderr)
    elif mismatch := guards.check_logp_difference(stats, cfg.max_logp_difference, is_first):
        raise StepFailed(mismatch)
    else:
        run.skipped, run.norms = 0, [*run.norms[-49:], grad_norm.item()]
    with run.clock("optimizer"):
        if not problem:
            run.optimizer.step()
        run.scheduler.step()  # the schedule counts skipped updates too
        run.optimizer.zero_grad()
    is_spike = not problem and guards.is_spike(run.norms)
    flags = {"skipped": torch.tensor(float(bool(problem))), "spike": torch.tensor(is_spike)}
    return stats | {"grad_norm": grad_norm} | flags


def raise_if_interrupted(run: Run) -> None:
    """Before the first update of a step, raise Interrupted on every process if any process was asked to stop."""
    if "optimizer" not in run.clock.laps and distributed.all_max(torch.tensor(len(run.interrupted))):
        raise Interrupted


def accumulate(run: Run, groups: list[Group], budget: int) -> list[dict[str, Tensor]]:
    """Accumulate the gradient of `groups` in micro-batches of at most `budget` tokens.

    Returns the sums over the tokens of each micro-batch, from which metrics are computed.
    """
    sums = []
    run.micro_batch_logps.clear()
    with unsharded(run.policy):
        for batch in micro_batches(run.policy, with_gradient(run, groups), budget):
            raise_if_interrupted(run)
            logp, entropy = run.policy(batch, run.cfg.temperature)
            run.micro_batch_logps.append((batch.rollouts, logp.detach()))
            loss, stats = batch_loss(run.cfg, batch, logp)
            # FSDP averages gradients over processes, but the token weights are already normalised over all processes.
            (loss * distributed.world_size()).backward()
            sums.append(stats | {"entropy": (entropy * (batch.column("weight") > 0)).sum()})
    return sums


def batch_loss(cfg: Config, batch: PackedBatch, logp: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return `grpo_loss` of one micro-batch, computed from the values stored with its completions."""
    sampling_logp = batch.column("sampling_logp")
    if cfg.old_logp == "sampler":
        old_logp = sampling_logp
    elif cfg.updates_per_step == 1:
        old_logp = logp.detach()
    else:
        old_logp = batch.column("old_logp")
    importance = (old_logp - sampling_logp).exp().clamp(max=cfg.importance_cap) if cfg.importance_cap else None
    loss, stats = grpo_loss(
        logp,
        old_logp,
        batch.column("advantage"),
        batch.column("weight"),
        batch.row_of_token,
        loss_type=cfg.loss_type,
        clip_low=cfg.clip_low,
        clip_high=cfg.clip_high,
        beta=cfg.beta,
        ref_logp=batch.column("ref_logp") if cfg.beta else None,
        importance=importance,
    )
    trainer_logp = logp.detach() if cfg.old_logp == "sampler" else old_logp
    stats |= {"loss": loss.detach()} | guards.logp_difference(batch, trainer_logp)
    return loss, stats | {"flop": torch.full((), batch.flop, device=loss.device)}


# --- the loop ---------------------------------------------------------------------------------------------------------


def train(run: Run) -> None:
    """Train to the last step, with evaluations, checkpoints and reports.

    After a signal, save a checkpoint and exit with status 130.
    """
    cfg, run.interrupted = run.cfg, signals.defer_signals()
    if run.unscored:
        finish_step(run, {})
    with tqdm(total=run.total_steps, initial=run.step, desc="grpo", unit="step", disable=not console.is_main()) as bar:
        while run.step < run.total_steps:
            metrics = step_or_save(run)
            run.step += 1
            due = run.step == run.total_steps or (cfg.eval_every and run.step % cfg.eval_every == 0)
            run.unscored = bool(due and run.eval_samples)
            finish_step(run, metrics)
            bar.set_postfix(reward=f"{metrics['reward']:.3f}", tokens=f"{metrics['completions/mean_length']:.0f}")
            bar.update()
    save_checkpoint(run, last=True)  # before the export, so that the run is not lost if the export fails
    run.checkpoints.export_final(run.policy, cfg.model)
    run.log.refresh()


def step_or_save(run: Run) -> dict[str, float]:
    """Take a step and return its metrics. If the step fails before its first update, undo the step and save the run."""
    position, lengths = run.position, dict(run.stream.lengths)
    try:
        return train_step(run)
    except RunStopped:
        run.checkpoints.join_write()  # let the thread finish writing its checkpoint
        raise
    except (StepFailed, Interrupted) as error:  # these are raised on every process
        run.position, run.stream.lengths = position, lengths
        save_checkpoint(run, last=True)
        if isinstance(error, Interrupted):
            end_run(run)
        hint = run.checkpoints.resume_hint("retry the step")
        raise RunStopped(f"step {run.step + 1}: {error}; {hint}", status=1) from None


def finish_step(run: Run, metrics: dict[str, float]) -> None:
    """Finish a step: evaluate the policy if due, log the metrics, and if necessary save a checkpoint or stop the run.

    A run that is asked to stop saves a checkpoint first; the evaluation takes place when the run is resumed.
    """
    cfg, problem, save_best = run.cfg, None, False
    status = torch.tensor([len(run.interrupted), run.checkpoints.write_failed()])
    interrupted, write_failed = distributed.all_max(status).tolist()
    if run.skipped >= cfg.max_skipped:
        problem = f"step {run.step}: {run.skipped} skipped updates in a row ({run.skip_reason}); "
        problem += guards.NONFINITE_HINT
        run.checkpoints.keep_last = 0  # keep all checkpoints, because the last good one may be older
    elif run.unscored and not interrupted:
        try:
            metrics |= evaluate_policy(run)
            run.unscored = False
        except UserError as error:
            problem = f"evaluation after step {run.step}: {error}"
    run.log.metrics(run.step, metrics)
    score = metrics.get("eval/reward", -math.inf)
    if run.step and score > (run.best["score"] if run.best else -math.inf):
        run.best, save_best = {"step": run.step, "score": score}, cfg.keep_best
    save_due = run.step and cfg.save_every and run.step % cfg.save_every == 0
    if interrupted or write_failed or problem or save_due or save_best or run.checkpoints.save_failed:
        save_checkpoint(run, last=bool(interrupted or problem))
    if problem:
        raise RunStopped(f"{problem}; {run.checkpoints.resume_hint()}", status=1)
    if interrupted:
        end_run(run)


def save_checkpoint(run: Run, last: bool = False) -> None:
    """Save a checkpoint in the background; with `last`, wait until the checkpoint is on disk."""
    state = {name: getattr(run, name) for name in RUN_STATE} | {"lengths": run.stream.lengths}
    state["config"] = asdict(run.cfg) | run.stream.fingerprint
    run.checkpoints.save(run.policy, run.optimizer, run.scheduler, state, last)


def end_run(run: Run) -> None:
    """Raise RunStopped to end a run that was asked to stop and has saved a checkpoint."""
    run.log.refresh()
    status = 1 if run.checkpoints.save_failed else 130
    raise RunStopped(f"stopped after step {run.step}; {run.checkpoints.resume_hint()}", status)


def evaluate_policy(run: Run) -> dict[str, float]:
    """Return the scores of the current policy on the held-out rows."""
    held_out = (run.stream.processor, run.eval_samples, run.scorer, run.cfg.max_completion_length)
    return score_policy(run.policy, run.engine, *held_out)


def set_up(cfg: Config) -> Run:
    """Check the flags and the data, load the models, and return a run that is ready to train.

    The data is checked before the models are loaded, so that a bad row is found within seconds.
    """
    device = distributed.start(cfg.hang_timeout)
    checkpoints = Checkpoints(cfg.output, cfg.keep_last, cfg.keep_best, cfg.hang_timeout)
    resume_from = checkpoints.find(cfg.resume)
    same_output = checkpoints.is_own(resume_from)
    check_output_folder(cfg.output, cfg.overwrite or checkpoints.replaces, same_output)
    scorer = Scorer(cfg.task, cfg, cfg.overlong_buffer)
    processor = make_processor(cfg, cfg.model, cfg.task)
    samples = load_split(cfg, cfg.data, cfg.task, processor)
    stream = PromptStream(samples, processor, cfg.seed, cfg.data_weights)
    eval_samples = load_split(cfg, cfg.eval_data, cfg.task, processor, keep_repeats=True) if cfg.eval_data else []
    dtype = compute_dtype(cfg.dtype, device)
    limits = (cfg.max_prompt_length + cfg.max_completion_length, max_images([*samples, *eval_samples]))
    policy = load_policy(cfg.model, cfg, device, to_shard=True)
    check_trained(policy, cfg)
    sharding = choose_sharding(policy, cfg, bool(cfg.beta), device, cfg.gpu_memory)
    check_gpu_memory(policy, cfg, bool(cfg.beta), device, cfg.vllm_memory, cfg.gpu_memory, sharding)
    engine = make_engine(cfg, cfg.model, processor, device, dtype, *limits, with_weights=False)
    engine.sleep()
    policy = apply_fsdp(policy, device, dtype, sharding)
    reference = load_reference(cfg.model, cfg, device, policy, sharding) if cfg.beta else None
    budget = choose_micro_batch_size(policy, reference, cfg, limits[0], device, cfg.gpu_memory, sharding)
    total_steps = cfg.max_steps or math.ceil(cfg.epochs * len(samples) / cfg.prompts_per_step)
    optimizer, scheduler = make_optimizer(policy, cfg, total_steps * cfg.updates_per_step)
    state = {"step": 0, "position": 0, "lengths": {}, "unscored": bool(eval_samples)}
    if resume_from:
        state = load_checkpoint(resume_from, policy, optimizer, scheduler, asdict(cfg) | stream.fingerprint)
    stream.lengths = state.get("lengths", {})
    resumed_step = state["step"] if same_output else None
    checkpoints.prepare_output(resumed_step)
    log = RunLog(cfg.output, asdict(cfg) | {"total_steps": total_steps}, cfg.report_every, resumed_step)
    models = (policy, reference, engine, scorer, optimizer, scheduler)
    run = Run(cfg, stream, eval_samples, *models, log, checkpoints, total_steps, budget=budget)
    vars(run).update({name: state[name] for name in RUN_STATE if name in state})
    return run


def main(cfg: Config) -> None:
    train(set_up(cfg))


if __name__ == "__main__":
    distributed.run(main, ARGS)
