"""Collect what a step trains on: draw prompts, sample completions, score them, and draw again for dynamic sampling.

`Collector` owns the stream of prompts, the sampler, the rewards, and how far the stream has been read. With partial
rollouts, a run has a `PartialCollector` instead (parts/partial.py).
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from common import distributed, signals
from common.errors import StepFailed
from common.records import GroupRewards, Prompt, Rewards, Rollout, Sampling, ScoredGroup
from common.spans import as_tensors
from config import Config
from evaluation.scorer import Scorer
from policy.model import Policy, cache_image_features
from rewards import MAX_UNSCORED
from rollout import Engine, prompt_seed, sample_completions
from training.metrics import Clock, sampling_metrics
from training.prompt_stream import DrawnPrompt, PromptStream

AdvantagesOf = Callable[[GroupRewards, dict[str, float], Config], Tensor]
"""Returns the advantages, (groups, G) or (groups, G, L), given the rewards of groups and the weight of each reward."""


class Collector:
    """Collects the groups of each step."""

    def __init__(
        self, cfg: Config, stream: PromptStream, engine: Engine, scorer: Scorer, clock: Clock, interrupted: list[int]
    ):
        """`interrupted`: the signals that ask this process to stop; see `signals.defer_signals`."""
        self.cfg, self.stream, self.engine, self.scorer = cfg, stream, engine, scorer
        self.clock, self.interrupted = clock, interrupted
        self.total_steps = cfg.max_steps or math.ceil(cfg.epochs * stream.epoch_length / cfg.prompts_per_step)
        self.position = 0  # prompts drawn so far from the endless shuffled stream of training rows
        self.features: dict[bytes, Tensor] = {}  # image features of a frozen vision tower, by digest
        self.policy: Policy | None = None  # whose tower encodes the pictures of turns
        self.rollouts: list[Rollout] = []  # this process's completions of the current step
        self.rewards: GroupRewards | None = None  # of all completions that the current step has sampled
        self.num_rounds = 1  # of sampling in the current step

    def state_dict(self) -> dict[str, Any]:
        """Return how far the stream has been read, for a checkpoint, or to undo a step."""
        stream = {"lengths": dict(self.stream.lengths), "rewarded": dict(self.stream.rewarded)}
        return {"position": self.position} | stream

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.position, self.stream.lengths = state["position"], dict(state["lengths"])
        self.stream.rewarded = {row: tuple(each) for row, each in state.get("rewarded", {}).items()}

    def steps_left(self, step: int) -> int:
        """Return the number of steps left after `step`. Without `max_steps`, every P prompts drawn count as a step."""
        return self.total_steps - (step if self.cfg.max_steps else self.position // self.cfg.prompts_per_step)

    def collect(self, policy: Policy, advantages_of: AdvantagesOf, step: int) -> tuple[list[ScoredGroup], GroupRewards]:
        """Sample the groups to train on after `step` steps, with the weights of `policy`.

        Returns this process's groups, and the rewards of all groups to train on, in data order on any number of
        processes. Their number is P, or less if dynamic sampling finds fewer. Raises StepFailed when too many
        completions are unscored, a row can no longer be read, or a user-defined reward fails.
        """
        self.clock.restart()
        signals.raise_if_interrupted(self.interrupted)  # by a signal during an evaluation or a save
        with self.clock("sync"):
            self.engine.wake_up()
            self.engine.sync_weights(policy)
        groups, rewards = self.sample_round(policy, step)
        self._check_scored(rewards)
        if self.cfg.dynamic_sampling_rounds:
            groups, rewards = self._with_replacements(groups, rewards, policy, advantages_of, step)
        with self.clock("sleep"):
            self.engine.sleep()
        self.rollouts = [rollout for group in groups for rollout in group.rollouts]
        return groups, as_tensors(rewards)

    def _with_replacements(
        self,
        groups: list[ScoredGroup],
        scored: list[list[Rewards]],
        policy: Policy,
        advantages_of: AdvantagesOf,
        step: int,
    ) -> tuple[list[ScoredGroup], list[list[Rewards]]]:
        """Return those of `groups` and of further rounds that have a nonzero advantage without the overlong penalty.

        Rounds are sampled until P groups are kept, or the limit is reached. If none is kept, the groups are those of
        the last round, with rewards of 0.
        """
        rounds_left = self.cfg.dynamic_sampling_rounds - 1
        if not self.cfg.max_steps:
            rounds_left = min(rounds_left, self.steps_left(step))
        rewards: list[list[Rewards]] = []  # of all groups of all rounds
        kept: list[int] = []  # the groups to keep, by their index in `rewards`
        local: dict[int, ScoredGroup] = {}  # this process's groups, by the same index
        while True:
            first = len(rewards)
            rewards += scored
            self._check_scored(rewards)
            local |= {first + group.index: group for group in groups}
            usable = self._usable(as_tensors(scored), advantages_of)
            kept += [first + i for i in usable][: self.cfg.prompts_per_step - len(kept)]
            if len(kept) == self.cfg.prompts_per_step or not rounds_left:
                break
            rounds_left -= 1
            groups, scored = self.sample_round(policy, step)
        chosen = kept or list(range(len(rewards)))[-self.cfg.prompts_per_step :]
        if not kept:
            rewards = [[Rewards(0.0, 0.0, dict.fromkeys(each.parts, 0.0)) for each in group] for group in rewards]
        groups = [replace(local[i], index=index) for index, i in enumerate(chosen) if i in local]
        return groups, [rewards[i] for i in chosen]

    def _usable(self, rewards: GroupRewards, advantages_of: AdvantagesOf) -> list[int]:
        """Return the indices of the groups that have a nonzero advantage without the overlong penalty."""
        if self.scorer.penalty:
            rewards = self.scorer.penalty.taken_from(rewards)
        advantages = advantages_of(rewards, dict(self.scorer.weights), self.cfg)
        return advantages.nan_to_num().flatten(1).any(dim=1).nonzero()[:, 0].tolist()

    def sample_round(self, policy: Policy, step: int) -> tuple[list[ScoredGroup], list[list[Rewards]]]:
        """Sample and score P prompts; return this process's groups, and all processes' rewards in prompt order."""
        self.policy = policy
        drawn = self.draw(step)  # of all processes, like `chosen`
        local_indices = self.assign(drawn)
        self.position = max(self.position, drawn[-1].position + 1)
        my_drawn = [drawn[i] for i in local_indices]
        with self.clock("prompts"):
            prompts = dict(zip((each.position for each in my_drawn), self.stream.get(my_drawn)))
            cache_image_features(policy, list(prompts.values()), self.features)
        with self.clock("rollout"):
            chosen = self.sample(drawn, local_indices, list(prompts.values()), step)  # those to train on
        my_chosen = {index: each for index, each in enumerate(chosen) if each.position in prompts}
        samples, rollouts = self.stream.rows(my_chosen.values()), [list(each.rollouts) for each in my_chosen.values()]
        if environment := self.stream.processor.environment:
            with self.clock("prompts"):
                environment.add_features(policy, [rollout for group in rollouts for rollout in group])
        with self.clock("reward"):
            rewards, error = self.scorer(samples, rollouts, self.cfg.max_completion_length)
        distributed.raise_first_error(error, StepFailed)
        groups = [
            ScoredGroup(sample, prompts[each.position], completions, scores, index)
            for (index, each), sample, completions, scores in zip(my_chosen.items(), samples, rollouts, rewards)
        ]
        all_rewards = self._gather(groups, [each.row for each in my_chosen.values()])
        self.prefetch(step)
        signals.raise_if_interrupted(self.interrupted)
        return groups, all_rewards

    def draw(self, step: int) -> list[DrawnPrompt]:
        """Return the prompts of the next round; none after the last. Nothing changes until they are sampled."""
        count = self.cfg.prompts_per_step if self.steps_left(step) > 0 else 0
        return self.stream.draw(range(self.position, self.position + count), step, self.cfg)

    def prefetch(self, step: int) -> None:
        """Start encoding this process's prompts of the next round, while this step trains."""
        drawn = self.draw(step)
        self.stream.prefetch([drawn[i] for i in self.assign(drawn)])

    def assign(self, drawn: list[DrawnPrompt]) -> list[int]:
        """Return the indices of the prompts in `drawn` that this process samples."""
        cfg = self.cfg
        return self.stream.assign_prompts(drawn, cfg.num_generations, cfg.max_completion_length, cfg.tensor_parallel)

    def sample(
        self, drawn: list[DrawnPrompt], local_indices: list[int], prompts: list[Prompt], step: int
    ) -> list[DrawnPrompt]:
        """Sample the completions of `prompts`, which are those of `drawn` at `local_indices`.

        Returns the P prompts to train on. Those of other processes may lack completions.
        """
        with distributed.shared_errors(StepFailed):  # of a prompt that the sampler refuses
            sampled = dict(zip(local_indices, self.generate([drawn[i] for i in local_indices], prompts)))
        return [replace(each, rollouts=tuple(sampled.get(i, ()))) for i, each in enumerate(drawn)]

    def generate(
        self,
        drawn: list[DrawnPrompt],
        prompts: list[Prompt],
        started: Sequence[Sequence[Rollout]] = (),
        **options: Any,
    ) -> list[list[Rollout]]:
        """Let the sampler generate for `drawn`, encoded as `prompts`; a seed depends on the prompt's position alone.

        `started`: see `sample_completions`; `options`: `should_stop` of `Engine.generate`, with partial rollouts.
        """
        seeds = [prompt_seed(self.cfg.seed, each.position) for each in drawn]
        sampling = Sampling(self.cfg.num_generations, self.cfg.max_completion_length, self.cfg.temperature)
        processor, episodes = self.stream.processor, None
        if processor.environment:
            episodes = processor.environment.episodes(self.stream.rows(drawn), processor, self.policy)
        generate = functools.partial(self.engine.generate, **options)
        return sample_completions(generate, processor, prompts, seeds, sampling, episodes, started)

    def _gather(self, groups: list[ScoredGroup], rows: list[int]) -> list[list[Rewards]]:
        """Gather the rewards of all processes' groups, in prompt order, and record them and the completions' lengths.

        `rows` are those of the groups of this process.
        """
        lengths = [[len(rollout.ids) for rollout in group.rollouts] for group in groups]
        with distributed.shared_errors(StepFailed):
            rewards = list(map(self._in_tokens, groups))
        local = [(g.index, row, sizes, own) for g, row, sizes, own in zip(groups, rows, lengths, rewards)]
        everyone = [group for part in distributed.all_gather(local) for group in part]
        everyone.sort(key=lambda group: group[0])  # by index within the round
        for _, row, sizes, of_group in everyone:
            self.stream.record(row, sizes, [each.total for each in of_group])
        return [of_group for *_, of_group in everyone]  # P lists of G

    def _in_tokens(self, group: ScoredGroup) -> list[Rewards]:
        """Return the rewards of `group`, with spans in tokens."""
        if not any(each.spans for each in group.rewards):
            return group.rewards
        from training.offsets import in_tokens

        return in_tokens(group, self.stream.processor)

    def _check_scored(self, groups: list[list[Rewards]]) -> None:
        """Keep the rewards of all `groups` of the step; raise StepFailed when too many of them are unscored."""
        self.rewards, self.num_rounds = as_tensors(groups), len(groups) // self.cfg.prompts_per_step
        unscored = self.rewards.total.isnan().double().mean().item()
        if unscored > MAX_UNSCORED:
            reason = distributed.first_error(self.scorer.unscored_reason or None) or "unknown reason"
            limit = f"at most {MAX_UNSCORED:.0%} may have none"
            raise StepFailed(f"{unscored:.0%} of the completions have no verdict, {limit} ({reason})")

    @property
    def num_waiting(self) -> int:
        """Number of prompts that were drawn and not trained on."""
        return 0

    def metrics(self, step: int) -> dict[str, float]:
        """Return the metrics of what was collected after `step` steps."""
        metrics = sampling_metrics(self.rollouts, self.rewards, self.clock, self.scorer.format)
        if environment := self.stream.processor.environment:
            metrics |= environment.metrics(self.rollouts)
        return metrics
