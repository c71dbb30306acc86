"""GRPO for vision-language models: advantages, loss, the training step and the loop; config.py has the flags.

    python grpo.py --task count --model runs/tiny/count-0/model --data runs/tiny/count-0/train
    torchrun --nproc_per_node 8 grpo.py --task vqa --data data.jsonl

The algorithm is Algorithm 1 of DeepSeekMath (arXiv:2402.03300); its line numbers stand in the margin of `train_step`.
Departures: the batch is normalised over all processes at once (`token_weights`); a group whose rewards are all equal
has advantage exactly zero; the difference between the sampler's and the trainer's arithmetic is corrected by a
truncated importance weight (Yao et al. 2025, «Your efficient RL framework secretly brings you off-policy RL training»).

Shapes: P prompts of a step over all processes, G completions of each, N this process's completions, L tokens of one
completion, C completion tokens of one micro-batch.
"""

import math
import sys
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor
from tqdm import tqdm

from common import console, distributed, signals
from common.errors import Interrupted, RunStopped, StepFailed, UserError
from common.records import Group, Rollout, Sample
from config import Config
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
from training.balance import rebalance
from training.checkpoint import RUN_STATE, Checkpoints, load_checkpoint
from training.guards import (
    NONFINITE_HINT,
    MicroBatchLogps,
    check_logp_difference,
    describe_nonfinite,
    is_spike,
    logp_difference,
)
from training.metrics import Clock, step_metrics
from training.prompt_stream import PromptStream, prompt_seed
from training.run_log import RunLog, check_output_folder

# --- the maths: pure functions of tensors -----------------------------------------------------------------------------


def group_advantages(rewards: Tensor, scale: str | bool = "group") -> Tensor:
    """Advantages (P, G) of `rewards` (P, G), relative to each row's mean (DeepSeekMath, section 4.1.2).

    NaN marks a completion left out: it counts in no mean and its advantage is 0. `scale` divides by the row's standard
    deviation («group», True), by that of all rewards («batch») or not («none», False, Dr. GRPO, arXiv:2503.20783);
    deviations divide by n − 1, as in TRL and veRL. A row whose rewards are all equal gives exactly 0.
    """
    centred = rewards - rewards.nanmean(dim=1, keepdim=True)
    here = ~rewards.isnan()
    top = rewards.nan_to_num(nan=-math.inf).amax(1)
    varied = (here.sum(1) > 1) & (top > rewards.nan_to_num(nan=math.inf).amin(1))
    if scale in ("none", False):
        deviation = torch.ones(len(rewards), 1, dtype=rewards.dtype)
    else:
        spread = centred if scale != "batch" else (rewards - rewards.nanmean()).reshape(1, -1)
        counts = (~spread.isnan()).sum(1, keepdim=True)
        deviation = (spread.nan_to_num().square().sum(1, keepdim=True) / (counts - 1).clamp(min=1)).sqrt()
    return torch.where(here & varied[:, None], centred / deviation, 0.0)


def token_weights(lengths: Tensor, loss_type: str, max_length: int, totals: Tensor | None = None) -> Tensor:
    """The weight of each token of completion i in the loss, (N,) for completion `lengths` (N,).

    «grpo», «gspo»: 1 / (sequences · L_i), the mean over sequences of the mean over tokens. «dapo», «cispo»: 1 / tokens,
    every token alike. «dr_grpo»: 1 / (sequences · max_length), a constant. Over a whole batch the first four sum to
    one, so a gradient is the plain sum of its parts, however the batch was cut. `totals` (2,) are the sequences and
    tokens of the batch over all processes; those of `lengths` when left out. Length 0 marks a completion left out.
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
    """The loss of one micro-batch and sums over its tokens for the metrics. All tensors are (C,).

    With ratio r = π_θ / π_old, advantage A and token weight w, the loss is Σ w · (−objective + β · KL):

    «grpo», «dr_grpo», «dapo»: min(r·A, clip(r)·A)   DeepSeekMath eq. 3; Dr. GRPO; DAPO eq. 8 (clip_high > clip_low)
    «gspo»: the same with the sequence's geometric mean of r in place of r   GSPO eq. 5 and 7, arXiv:2507.18071
    «cispo»: stop_gradient(clip(r)) · A · log π_θ   CISPO eq. 4, arXiv:2506.13585

    `importance`: a constant weight on the objective of each token. KL: the k3 estimate of DeepSeekMath eq. 4.
    `row_of_token` numbers the completions 0, 1, … for «gspo».
    """
    counted = weights > 0  # a blank micro-batch has numbers that mean nothing: none of them may become infinite
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
    """Everything a step needs."""

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
    step: int = 0  # steps done
    position: int = 0  # prompts drawn from the endless shuffled stream of training rows
    clock: Clock = field(default_factory=Clock)  # seconds of the current step's parts
    budget: int = 0  # tokens of a micro-batch
    best: dict[str, float] | None = None  # step and score of the best evaluation
    skipped: int = 0  # updates left out one after another
    why_skipped: str = ""  # the last of them
    unscored: bool = False  # an evaluation is due
    interrupted: list[int] = field(default_factory=list)  # signals that asked this process to stop
    norms: list[float] = field(default_factory=list)  # gradient norms of the last updates
    micro_batch_logps: MicroBatchLogps = field(default_factory=list)  # what the current update's micro-batches gave
    features: dict[bytes, Tensor] = field(default_factory=dict)  # of images that a frozen vision tower has seen


def train_step(run: Run) -> dict[str, float]:
    """One step of GRPO, Algorithm 1 of DeepSeekMath; returns its metrics (see the README's glossary)."""
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
    parts = split_into_minibatches(run, groups)
    groups = [group for part in parts for group in part]
    if cfg.beta:
        recompute_logprobs(run, run.reference, groups, "ref_logp")
    if cfg.updates_per_step > 1 and cfg.old_logp == "policy":
        recompute_logprobs(run, run.policy, groups, "old_logp")
    updates = []
    for _ in range(cfg.num_iterations):  # line 10
        for part in parts:
            updates.append(update(run, part))  # line 11
    return step_metrics(run.scorer.names, groups, drawn, updates, run.clock) | {"lr": run.scheduler.get_last_lr()[0]}


def sample_round(run: Run) -> tuple[list[Group], Tensor]:
    """Sample and reward the next P prompts: this process's groups, and everyone's rewards (P, G, 2 + parts) in order:
    the total, the total before the overlong penalty, and its parts."""
    cfg = run.cfg
    cost = (cfg.prompts_per_step, cfg.num_generations, cfg.max_completion_length, cfg.tensor_parallel)
    mine, places = run.stream.assign_prompts(run.position, *cost)
    run.position += cfg.prompts_per_step
    samples, seeds = run.stream.rows(places), [prompt_seed(cfg.seed, place) for place in places]
    with run.clock("prompts"):
        prompts = run.stream.get(places)
        cache_image_features(run.policy, prompts, run.features)
    with run.clock("rollout"):
        completed = run.engine.generate(prompts, cfg.num_generations, seeds, cfg.max_completion_length, cfg.temperature)
    groups = [Group(*row) for row in zip(prompts, completed, mine, samples)]
    for group in groups:
        for rollout in group.rollouts:
            rollout.has_image = bool(group.prompt.images)
    with run.clock("reward"):
        error = run.scorer([(group.sample, group.rollouts) for group in groups], cfg.max_completion_length)
    names = run.scorer.names
    rewards = [[[r.reward, r.raw_reward, *(r.rewards[n] for n in names)] for r in g.rollouts] for g in groups]
    lengths = [[len(r.ids) for r in g.rollouts] for g in groups]
    found = distributed.all_gather((error, list(zip(mine, places, lengths, rewards))))
    if error := next((error for error, _ in found if error), None):
        raise StepFailed(error)
    everyone = sorted(row for _, rows in found for row in rows)
    for _, place, of_row, _ in everyone:
        run.stream.record_length(place, of_row)
    run.stream.prefetch(run.stream.assign_prompts(run.position, *cost)[1])
    return groups, torch.tensor([row[-1] for row in everyone])


def collect(run: Run) -> tuple[list[Group], Tensor, Tensor]:
    """The groups to train on: this process's, everyone's rewards of them (P, G), and all that was drawn, with parts.

    Dynamic sampling keeps only groups whose rewards differ before the overlong penalty and draws on until there are P
    of them or the rounds are over; then the step trains on those there are. The order is that of the data, on any
    number of processes. Raises StepFailed when too many completions have no verdict.
    """
    cfg, groups, kept, drawn = run.cfg, [], [], []
    for _ in range(cfg.dynamic_sampling_rounds if cfg.dynamic_sampling else 1):
        sampled, rewards = sample_round(run)
        raise_if_interrupted(run)
        drawn.append(rewards)
        without = torch.cat(drawn)[..., 0].isnan().double().mean().item()
        if without > MAX_UNSCORED:
            why = next(filter(None, distributed.all_gather(run.scorer.why_none)), "unknown")
            raise StepFailed(f"{without:.0%} of the completions have no verdict, at most 10% may lack one ({why})")
        varied = group_advantages(rewards[..., 1], "none").any(1).tolist()
        wanted = [i for i in range(len(rewards)) if varied[i] or not cfg.dynamic_sampling]
        place = {i: len(kept) + k for k, i in enumerate(wanted[: cfg.prompts_per_step - len(kept)])}
        groups += [
            replace(group, group_index=place[group.group_index]) for group in sampled if group.group_index in place
        ]
        kept += [rewards[i, :, 0] for i in place]
        if len(kept) == cfg.prompts_per_step:
            break
    if not kept:  # nothing to learn from in any round: a step with zero gradient
        groups, kept = sampled, list(rewards[..., 0])
    return groups, torch.stack(kept), torch.cat(drawn)


def split_into_minibatches(run: Run, groups: list[Group]) -> list[list[Group]]:
    """What this process trains on in each update: as many tokens as the others, wherever they were sampled."""
    cfg, patch_cost = run.cfg, vision_cost_per_patch(run.policy)
    firsts = range(0, cfg.prompts_per_step, cfg.prompts_per_update)
    parts = [[g for g in groups if first <= g.group_index < first + cfg.prompts_per_update] for first in firsts]
    return [rebalance(part, lambda rollout: has_gradient(run, rollout), patch_cost) for part in parts]


def has_gradient(run: Run, rollout: Rollout) -> bool:
    """Whether the loss depends on a completion: not without a verdict, and with β = 0 not with advantage zero."""
    return not math.isnan(rollout.reward) and bool(rollout.advantage or run.cfg.beta)


def with_gradient(run: Run, groups: list[Group]) -> list[Group]:
    """The completions that the loss depends on. Token weights are given before, so that leaving out the others changes
    nothing but the work."""
    kept = [replace(group, rollouts=[r for r in group.rollouts if has_gradient(run, r)]) for group in groups]
    return [group for group in kept if group.rollouts]


def recompute_logprobs(run: Run, policy: Policy, groups: list[Group], name: str) -> None:
    """Store the log-probabilities that `policy` gives each completion under the attribute `name`."""
    reference = name == "ref_logp"
    with run.clock("reference" if reference else name), reference_weights(policy.model, reference):
        what = (with_gradient(run, groups), name, run.cfg.temperature)
        run.budget, _ = with_oom_retry(policy, run.budget, lambda budget: record_logprobs(policy, *what, budget))


def update(run: Run, groups: list[Group]) -> dict[str, Tensor]:
    """One optimizer step on `groups`; returns sums over their tokens, of all processes, for the metrics."""
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
    if wrong := describe_nonfinite(stats, grad_norm, groups, run.micro_batch_logps):
        run.skipped, run.why_skipped = run.skipped + 1, wrong
        if console.is_main():
            print(f"step {run.step + 1}: {wrong}; this update is left out", file=sys.stderr)
    elif why := check_logp_difference(stats, cfg.max_logp_difference, first="optimizer" not in run.clock.laps):
        raise StepFailed(why)
    else:
        run.skipped, run.norms = 0, [*run.norms[-49:], grad_norm.item()]
    with run.clock("optimizer"):
        if not wrong:
            run.optimizer.step()
        run.scheduler.step()  # with an update left out too
        run.optimizer.zero_grad()
    signs = {"skipped": torch.tensor(float(bool(wrong))), "spike": torch.tensor(not wrong and is_spike(run.norms))}
    return stats | {"grad_norm": grad_norm} | signs


def raise_if_interrupted(run: Run) -> None:
    """Raise Interrupted on every process when one was asked to stop and nothing of this step has been learned yet."""
    if "optimizer" not in run.clock.laps and distributed.all_max(torch.tensor(len(run.interrupted))):
        raise Interrupted


def accumulate(run: Run, groups: list[Group], budget: int) -> list[dict[str, Tensor]]:
    """Add up the gradient of `groups` in micro-batches of `budget` tokens; returns sums over the tokens of each."""
    sums = []
    run.micro_batch_logps.clear()
    with unsharded(run.policy):
        for batch in micro_batches(run.policy, with_gradient(run, groups), budget):
            raise_if_interrupted(run)
            logp, entropy = run.policy(batch, run.cfg.temperature)
            run.micro_batch_logps.append((batch.rollouts, logp.detach()))
            loss, stats = batch_loss(run.cfg, batch, logp)
            (loss * distributed.world_size()).backward()  # FSDP averages over processes; the weights already sum to one
            sums.append(stats | {"entropy": (entropy * (batch.column("weight") > 0)).sum()})
    return sums


def batch_loss(cfg: Config, batch: PackedBatch, logp: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """`grpo_loss` on one micro-batch with what its completions carry."""
    sampling_logp = batch.column("sampler_logp")
    if cfg.updates_per_step == 1 and cfg.old_logp == "policy":
        old_logp = logp.detach()
    else:
        old_logp = batch.column("sampler_logp" if cfg.old_logp == "sampler" else "old_logp")
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
    stats |= {"loss": loss.detach()} | logp_difference(batch, trainer_logp)
    return loss, stats | {"flop": torch.full((), batch.flop, device=loss.device)}


# --- the loop ---------------------------------------------------------------------------------------------------------


def train(run: Run) -> None:
    """Steps until the last one, with evaluation, checkpoints and reports; a signal saves and ends with status 130."""
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
    save_checkpoint(run, last=True)  # an export that fails loses nothing
    run.checkpoints.export_final(run.policy, cfg.model)
    run.log.refresh()


def step_or_save(run: Run) -> dict[str, float]:
    """A step's metrics. One that breaks off before its first update is as if it had never begun, and saved."""
    begun = run.position, dict(run.stream.lengths)
    try:
        return train_step(run)
    except RunStopped:
        run.checkpoints.join_write()  # the one being written counts
        raise
    except (StepFailed, Interrupted) as error:  # raised by every process
        run.position, run.stream.lengths = begun
        save_checkpoint(run, last=True)
        if isinstance(error, Interrupted):
            end_run(run)
        raise RunStopped(
            f"step {run.step + 1}: {error}; {run.checkpoints.resume_hint('takes the step again')}", 1
        ) from None


def finish_step(run: Run, metrics: dict[str, float]) -> None:
    """What follows the step just taken: the evaluation that is due, its row of metrics, a checkpoint, or the end. When
    the run ends here the checkpoint comes first, and the evaluation when it is resumed."""
    cfg, wrong, best = run.cfg, None, False
    asked, failed = distributed.all_max(torch.tensor([len(run.interrupted), run.checkpoints.write_failed()])).tolist()
    if run.skipped >= cfg.max_skipped:
        wrong = f"step {run.step}: {run.skipped} updates in a row left out ({run.why_skipped}); {NONFINITE_HINT}"
        run.checkpoints.keep_last = 0  # an earlier one may be the last good one
    elif run.unscored and not asked:
        try:
            metrics |= evaluate_policy(run)
            run.unscored = False
        except UserError as error:
            wrong = f"evaluation after step {run.step}: {error}"
    run.log.metrics(run.step, metrics)
    score = metrics.get("eval/reward", -math.inf)
    if run.step and score > (run.best["score"] if run.best else -math.inf):
        run.best, best = {"step": run.step, "score": score}, cfg.keep_best
    due = run.step and cfg.save_every and run.step % cfg.save_every == 0
    if asked or failed or wrong or due or best or run.checkpoints.save_failed:
        save_checkpoint(run, last=bool(asked or wrong))
    if wrong:
        raise RunStopped(f"{wrong}; {run.checkpoints.resume_hint()}", status=1)
    if asked:
        end_run(run)


def save_checkpoint(run: Run, last: bool = False) -> None:
    """A checkpoint, written while training goes on; with `last` it is on disk when this returns."""
    progress = {name: getattr(run, name) for name in RUN_STATE} | {"lengths": run.stream.lengths}
    progress["config"] = asdict(run.cfg) | run.stream.rows_seen
    run.checkpoints.save(run.policy, run.optimizer, run.scheduler, progress, last)


def end_run(run: Run) -> None:
    """End a run that was asked to stop and has saved."""
    run.log.refresh()
    raise RunStopped(
        f"stopped after step {run.step}; {run.checkpoints.resume_hint()}", 1 if run.checkpoints.save_failed else 130
    )


def evaluate_policy(run: Run) -> dict[str, float]:
    """Scores of the current policy on the held-out rows."""
    held_out = (run.stream.processor, run.eval_samples, run.scorer, run.cfg.max_completion_length)
    return score_policy(run.policy, run.engine, *held_out)


def set_up(cfg: Config) -> Run:
    """Check everything that can be checked, then load: data before models, so that a bad row costs seconds."""
    device = distributed.start(cfg.hang_timeout)
    checkpoints = Checkpoints(cfg.output, cfg.keep_last, cfg.keep_best, cfg.hang_timeout)
    resume_from = checkpoints.find(cfg.resume)
    goes_on = checkpoints.is_own(resume_from)
    check_output_folder(cfg.output, cfg.overwrite or checkpoints.replaces, goes_on)
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
    start = {"step": 0, "position": 0, "lengths": {}, "unscored": bool(eval_samples)}
    if resume_from:
        start = load_checkpoint(resume_from, policy, optimizer, scheduler, asdict(cfg) | stream.rows_seen)
    stream.lengths = start.get("lengths", {})
    checkpoints.prepare_output(start["step"] if goes_on else None)
    about = asdict(cfg) | {"total_steps": total_steps}
    log = RunLog(cfg.output, about, cfg.report_every, start["step"] if goes_on else None)
    models = (policy, reference, engine, scorer, optimizer, scheduler)
    run = Run(cfg, stream, eval_samples, *models, log, checkpoints, total_steps, budget=budget)
    vars(run).update({name: start[name] for name in RUN_STATE if name in start})
    return run


def main(cfg: Config) -> None:
    train(set_up(cfg))


if __name__ == "__main__":
    distributed.run(main, Config)
