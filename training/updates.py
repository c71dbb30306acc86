"""Update the policy: cut micro-batches, accumulate gradients, judge them, and step the optimizer.

`Updater` owns the optimizers, their schedules, the size of the micro-batches, and what it remembers of earlier updates.
The gradient of a micro-batch is computed by the function that `step` is given.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from common import distributed, signals
from common.errors import StepFailed
from common.parts import extra
from common.records import Group
from config import Config
from packing import PackedBatch
from policy.batches import completion_logprobs, micro_batches, order_for_packing, vision_cost_per_token
from policy.lora import has_dropout, reference_weights
from policy.memory import with_oom_retry
from policy.model import Policy
from policy.optimizer import Optimizers
from policy.sharding import AFTER_UPDATE, reduce_gradients, take_gradients, unsharded
from training import guards
from training.metrics import Clock, update_metrics

PHASES = {"ref_logp": "reference", "teacher_logp": "teacher", "trainer_logp": "old_logp"}  # where time is counted

Backward = Callable[[PackedBatch], tuple[dict[str, Tensor], Tensor]]
"""Adds the gradient of a micro-batch; returns its sums over tokens, and the log-probabilities (C,) of its tokens."""


class Updater:
    """Updates the policy on the groups of a step."""

    def __init__(  # noqa: PLR0913 - what an update needs
        self,
        cfg: Config,
        policy: Policy,
        reference: Policy | None,
        optimizers: Optimizers,
        micro_batch_tokens: int,
        clock: Clock,
        interrupted: list[int],
        before_change: Callable[[], None],
    ):
        """`before_change` is called before the trained weights change; for `interrupted`, see `Collector`."""
        self.cfg, self.policy, self.reference, self.optimizers = cfg, policy, reference, optimizers
        self.param_groups = [group for optimizer, _ in optimizers for group in optimizer.param_groups]
        self.first_param_groups = [dict(group) for group in self.param_groups]  # to see what changes
        self.micro_batch_tokens = micro_batch_tokens  # maximum tokens of a micro-batch
        self.clock, self.interrupted, self.before_change = clock, interrupted, before_change
        self.vision_cost, self.has_dropout = vision_cost_per_token(policy), has_dropout(policy.model)
        self.updates: list[dict[str, Tensor]] = []  # sums over tokens of each update of the current step
        self.num_updates = 0  # so far, without skipped and empty ones
        self.skipped = 0  # consecutive updates skipped so far
        self.problems: list[str] = []  # why updates of the current step were skipped
        self.norms: list[float] = []  # gradient norms of the last 50 effective updates
        self.by_turn: dict[str, float] = {}  # metrics of the turns of the current step
        self.difference_by_turn: Any = None  # `difference_by_turn` of parts/turns, which returns these metrics
        self.fast = extra("fast") if next(policy.parameters()).is_cuda else None
        self.mfu = self.fast.Mfu(policy) if self.fast else None

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds besides the weights and the state that optimizers keep for them."""
        changes = [
            {key: value for key, value in new.items() if key not in ("params", "lr") and value != old.get(key)}
            for new, old in zip(self.param_groups, self.first_param_groups)
        ]
        schedulers = [scheduler.state_dict() for _, scheduler in self.optimizers]
        state = {"schedulers": schedulers, "groups": changes, "num_updates": self.num_updates}
        return state | {"skipped": self.skipped, "norms": list(self.norms)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. The learning rate remains that of the flags."""
        self.skipped, self.norms = state["skipped"], list(state["norms"])
        self.num_updates = state["num_updates"]
        for (optimizer, scheduler), saved in zip(self.optimizers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved | {"base_lrs": scheduler.base_lrs})
            for group, rate, factor in zip(optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas):
                group["lr"] = rate * factor(scheduler.last_epoch)
        for group, changes in zip(self.param_groups, state["groups"]):
            group.update(changes)

    def balance(self, groups: list[Group]) -> list[Group]:
        """Return the groups that this process trains on, in the order of its micro-batches.

        On several GPUs, parts/fast moves completions between processes, so that all have equal work.
        """
        if self.fast and distributed.world_size() > 1:
            groups = self.fast.rebalance(groups, self.vision_cost)
        return order_for_packing(groups, self.micro_batch_tokens)

    def with_logprobs(self, policy: Policy, minibatches: list[list[Group]], name: str) -> list[list[Group]]:
        """Return `minibatches` with the log-probabilities of each completion under `policy` in its field `name`.

        They are those of the reference ("ref_logp"), of the teacher ("teacher_logp"), or of the trainer before the
        first update of the step ("trainer_logp"). They are computed without dropout.
        """
        groups = [group for minibatch in minibatches for group in minibatch]
        if name == "teacher_logp":
            groups = list(map(_for_teacher, groups))
        with self.clock(PHASES[name]), ExitStack() as stack:
            if name != "trainer_logp":
                stack.enter_context(reference_weights(policy.model))
            self.micro_batch_tokens, logps = with_oom_retry(
                policy,
                self.micro_batch_tokens,
                lambda budget: completion_logprobs(policy, groups, self.cfg.temperature, budget),
            )
        remaining = iter(logps)
        return [
            [
                replace(group, completions=[replace(each, **{name: next(remaining)}) for each in group.completions])
                for group in minibatch
            ]
            for minibatch in minibatches
        ]

    def step(self, groups: list[Group], backward: Backward) -> None:
        """Take one optimizer step on `groups`; skip it if the loss or gradient is not finite, or the gradient is zero.

        Raises StepFailed if the log-probabilities of sampler and trainer differ too much, and Interrupted after a
        signal, both only before the first update of a step.
        """
        with self.clock("train"):
            self.micro_batch_tokens, (sums, logps) = with_oom_retry(
                self.policy, self.micro_batch_tokens, lambda budget: self._accumulate(groups, budget, backward)
            )
            stats = distributed.reduce_stats(sums)
        if self.cfg.env and not self.updates:
            self.by_turn = self.difference_by_turn(groups, logps)
        if self.updates and self.cfg.old_logp == "sampler":  # in later updates, the policy is no longer the sampler's
            stats |= {name: torch.zeros(()) for name in guards.DIFFERENCES}
        grad_norm = distributed.full_tensor(clip_grad_norm_(self.policy.parameters(), self.cfg.max_grad_norm))
        flags = self._judge(stats, grad_norm, groups, logps)
        with self.clock("optimizer"):
            if not (flags["skipped"] or flags["empty"]):  # without a gradient, AdamW's momentum would move the weights
                self.before_change()
                for optimizer, _ in self.optimizers:
                    optimizer.step()
                self.num_updates += 1
                with torch.no_grad():
                    for change_reference in AFTER_UPDATE.values():
                        change_reference(self.policy, self.reference, self.num_updates, self.cfg)
            for optimizer, scheduler in self.optimizers:
                scheduler.step()  # the schedule counts skipped and empty updates too
                optimizer.zero_grad()
        self.updates.append(stats | {"grad_norm": grad_norm} | {k: torch.tensor(float(v)) for k, v in flags.items()})

    def _accumulate(
        self, groups: list[Group], budget: int, backward: Backward
    ) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
        """Accumulate the gradient of `groups` in micro-batches of `budget` tokens.

        Returns each micro-batch's sums over tokens, and the (L,) log-probabilities of each completion, in order.
        """
        sums, logps, several = [], [], distributed.world_size() > 1
        with unsharded(self.policy):
            for batch, is_last in micro_batches(self.policy, groups, budget):
                if not self.updates:
                    signals.raise_if_interrupted(self.interrupted)
                reduce_gradients(self.policy, now=several and is_last)
                batch_sums, logp = backward(batch)
                logps += logp.split(batch.lengths)
                sums.append(batch_sums)
                if self.mfu:
                    self.mfu.add(batch)
            if not several:
                take_gradients(self.policy)
        return sums, logps

    def _judge(
        self, stats: dict[str, Tensor], grad_norm: Tensor, groups: list[Group], logps: list[Tensor]
    ) -> dict[str, bool]:
        """Decide whether the gradient is used, and record this for later updates; see `step`."""
        problem = guards.describe_nonfinite(stats, grad_norm, groups, logps)
        is_empty = not grad_norm
        if problem:
            self.skipped, self.problems = self.skipped + 1, [*self.problems, problem]
        elif self.cfg.engine and (mismatch := guards.check_logp_difference(stats, not self.updates)):
            raise StepFailed(mismatch)
        elif not is_empty:
            self.skipped, self.norms = 0, [*self.norms[-49:], grad_norm.item()]
        is_spike = not (problem or is_empty) and guards.is_spike(self.norms)
        return {"skipped": bool(problem), "empty": bool(is_empty), "spike": is_spike}

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step's updates."""
        mfu = self.mfu.metrics(sum(self.clock.laps["train"])) if self.mfu else {"mfu": math.nan}
        return update_metrics(self.updates, bool(self.cfg.teacher)) | mfu | self.by_turn

    def end_step(self, num_rounds: int) -> dict[str, float]:
        """End a step; return the learning rate of the next update as a metric.

        Without `max_steps`, the schedule counts rounds of sampling, so it also advances for each round after the first.
        """
        self.updates, self.problems = [], []
        if not self.cfg.max_steps:
            for _ in range((num_rounds - 1) * self.cfg.updates_per_step):
                for _, scheduler in self.optimizers:
                    scheduler.step()
        return {"lr": self.optimizers[0][1].get_last_lr()[0]}


def _for_teacher(group: Group) -> Group:
    """Return `group` as the teacher sees it."""
    trajectories = [each.trajectory and (each.trajectory.for_teacher or each.trajectory) for each in group.completions]
    completions = [replace(each, trajectory=trajectory) for each, trajectory in zip(group.completions, trajectories)]
    return replace(group, prompt=group.prompt.for_teacher, completions=completions)
