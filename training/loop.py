"""The training loop: steps, evaluations, checkpoints, reports, and how a run stops.

`Loop` owns the checkpoints and the held-out rows. It takes each step with the function that it is given, and undoes a
step that fails before its first update.
"""

from __future__ import annotations

import functools
import gc
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from common import console, distributed, signals
from common.errors import Interrupted, RunStopped, StepFailed, UserError
from common.files import release_locks
from common.records import Sample
from config import Config
from policy.model import Policy
from training import guards
from training.checkpoint import Saver, parts_of, random_states, restore_random_states, state_tensors
from training.collect import Collector
from training.run_log import RunLog
from training.updates import Updater

MAX_SKIPPED = 3  # skipped updates in a row after which a run stops, at the end of a step


@dataclass
class Run:
    """What a training step needs, and the objects that keep the progress of the run."""

    cfg: Config
    policy: Policy
    reference: Policy | None  # of the KL term
    teacher: Policy | None
    collector: Collector
    updater: Updater
    loop: Loop
    log: RunLog = field(init=False)  # set last: it changes the output folder
    step: int = 0  # completed steps

    @property
    def steps_left(self) -> int:
        """Number of steps left; see `Collector.steps_left`."""
        return self.collector.steps_left(self.step)


TrainStep = Callable[[Run], dict[str, float]]  # takes a step and returns its metrics
Evaluate = Callable[[Run, list[Sample]], dict[str, float]]  # returns the scores of the policy on held-out rows


class Loop:
    """Trains a run to its last step."""

    def __init__(
        self, checkpoints: Saver, eval_samples: list[Sample], interrupted: list[int], evaluate: Evaluate | None = None
    ):
        """`eval_samples`: the held-out rows, if any; `evaluate` scores them. For `interrupted`, see `Collector`."""
        self.evaluate = evaluate or score_completions
        self.checkpoints, self.eval_samples, self.interrupted = checkpoints, eval_samples, interrupted
        self.eval_due = bool(eval_samples)  # whether the policy has to be evaluated before the next step
        self.last_problem = ""  # why the most recent of the skipped updates was skipped

    def train(self, run: Run, train_step: TrainStep) -> None:
        """Train to the last step and export the policy. Then, or if it fails, release the output folder.

        After a signal, save a checkpoint and exit with status 130.
        """
        try:
            with run.log:
                self._train(run, train_step)
        finally:
            release_locks()

    def _train(self, run: Run, train_step: TrainStep) -> None:
        signals.defer_signals(self.interrupted)
        if self.eval_due:  # before the first step, or left over from a run that was stopped
            self._finish_step(run, {})
        if run.steps_left <= 0:
            console.log(f"nothing left to train after step {run.step}; to go on, raise --epochs or --max_steps")
        while run.steps_left > 0:
            metrics = self._step_or_undo(run, train_step)
            freeze_garbage_collector()
            run.step += 1
            due = run.steps_left <= 0 or (run.cfg.eval_every and run.step % run.cfg.eval_every == 0)
            self.eval_due = bool(due and self.eval_samples)
            self._finish_step(run, metrics)
        self.save(run, wait=True)  # before the export, so that the run is not lost if the export fails
        if (waiting := run.collector.num_waiting) and not self.checkpoints.save_failed:
            console.log(
                f"prompts drawn and not trained on: {waiting}; the last checkpoint has them, and --resume with "
                "a higher --max_steps continues them"
            )
        self.checkpoints.export_final(run.policy, run.cfg.model)
        console.log(closing_lines(run.cfg, self.checkpoints.newest is not None, run.log.pages is not None))

    def _step_or_undo(self, run: Run, train_step: TrainStep) -> dict[str, float]:
        """Take a step and return its metrics. If it fails before its first update, undo it and save the run."""
        before, random = state_of(run), random_states()
        try:
            metrics = train_step(run)
        except RunStopped:
            self.checkpoints.join_write()  # let the thread finish writing its checkpoint
            raise
        except (StepFailed, Interrupted) as error:  # these are raised on every process
            load_state(run, before)
            restore_random_states(random)  # dropout has used random numbers
            self.save(run, wait=True)
            if isinstance(error, Interrupted):
                self._end(run)
            hint = self.checkpoints.resume_hint("retry the step")
            raise RunStopped(f"step {run.step + 1}: {error}; {hint}", status=1) from None
        for problem in run.updater.problems:
            self.last_problem = problem
            console.log(f"step {run.step + 1}: {problem}; this update is skipped")
        return metrics | run.updater.end_step(run.collector.num_rounds)

    def _finish_step(self, run: Run, metrics: dict[str, float]) -> None:
        """Finish a step: evaluate if due, log the metrics, and if necessary save a checkpoint or stop the run.

        A run that is asked to stop saves a checkpoint first; the evaluation runs after the run is resumed.
        """
        status = torch.tensor([len(self.interrupted), self.checkpoints.write_failed()])
        interrupted, write_failed = distributed.all_max(status).tolist()
        problem = self._too_many_skipped(run)
        if not problem and self.eval_due and not interrupted:
            try:
                metrics |= self.evaluate(run, self.eval_samples)
                self.eval_due = False
            except UserError as error:
                problem = f"evaluation after step {run.step}: {error}"
        run.log.metrics(run.step, metrics)
        run.log.print_step(run.step, max(run.steps_left, 0), metrics)
        stopping = bool(problem or interrupted)
        is_due = bool(run.step and run.cfg.save_every and run.step % run.cfg.save_every == 0)
        if stopping or write_failed or self.checkpoints.save_failed or is_due:
            self.save(run, wait=stopping)
        if problem:
            raise RunStopped(f"{problem}; {self.checkpoints.resume_hint()}", status=1)
        if interrupted:
            self._end(run)

    def _too_many_skipped(self, run: Run) -> str | None:
        """Return why the run has to stop if too many updates in a row were skipped; else None."""
        updater = run.updater
        if updater.skipped < MAX_SKIPPED:
            return None
        reason = f"step {run.step}: {updater.skipped} skipped updates in a row ({self.last_problem})"
        updater.skipped = 0  # a resumed run counts anew: it would otherwise stop at once if an evaluation is due
        self.checkpoints.folder.keep_last = 0  # keep all checkpoints: the last good one may be older
        return f"{reason}; {guards.NONFINITE_HINT}"

    def save(self, run: Run, wait: bool = False) -> None:
        """Save a checkpoint in the background; with `wait`, wait until it is on disk."""
        config = asdict(run.cfg) | run.collector.stream.fingerprint
        optimizers = run.updater.optimizers
        tensors = state_tensors(run.policy, run.reference, optimizers)
        state = state_of(run) | {"config": config, "parts": parts_of(run.policy, optimizers)}
        self.checkpoints.save(tensors, state, wait)

    def _end(self, run: Run) -> None:
        """Raise RunStopped to end a run that was asked to stop and has saved a checkpoint."""
        status = 1 if self.checkpoints.save_failed else 130
        raise RunStopped(f"stopped after step {run.step}; {self.checkpoints.resume_hint()}", status)


def score_completions(run: Run, samples: list[Sample]) -> dict[str, float]:
    """Return the scores of the current policy on held-out rows, with one greedy completion each."""
    from evaluation.held_out import score_policy

    owner, max_tokens = run.collector, run.cfg.max_completion_length
    return score_policy(run.policy, owner.engine, owner.stream.processor, samples, owner.scorer, max_tokens)


def closing_lines(cfg: Config, has_checkpoint: bool, has_pages: bool) -> str:
    """Return where a finished run has its model, page and metrics, and the commands for what comes next."""
    run, base, model = map(shlex.quote, (cfg.output, cfg.model, f"{cfg.output}/final"))
    lines = [f"model     {model}", f"metrics   {run}/metrics.jsonl"]
    lines += [f"page      {run}/index.html, with its pictures"] if cfg.report_every and has_pages else []
    lines.append(f"evaluate  ./run.sh eval {run}" + ("" if cfg.eval_data and not cfg.eval_fraction else " --data FILE"))
    if has_checkpoint:
        lines.append(f"resume    the same command, with --resume --{'max_steps' if cfg.max_steps else 'epochs'} HIGHER")
    if cfg.has_adapter:
        flags = f"--base_model {base} --lora_model {model} --output_path {run}/merged"
        lines.append(f"merge     python merge_lora.py {flags}")
        model = f"{run}/merged"
    return "\n".join([*lines, f"serve     vllm serve {model}"])


def state_of(run: Run) -> dict[str, Any]:
    """Return what a step changes, except the tensors of the policy and the optimizers, and the random states."""
    progress = {"step": run.step, "eval_due": run.loop.eval_due}
    return progress | {"collector": run.collector.state_dict(), "updater": run.updater.state_dict()}


def load_state(run: Run, state: dict[str, Any]) -> None:
    """Restore what `state_of` returned."""
    run.step, run.loop.eval_due = state["step"], state["eval_due"]
    run.collector.load_state_dict(state["collector"])
    run.updater.load_state_dict(state["updater"])


@functools.cache  # once
def freeze_garbage_collector() -> None:
    """Exclude everything that is alive after the first step from further garbage collections.

    Most of it was made by torch.compile and lives as long as the run. Otherwise, vLLM would search it for garbage
    whenever it goes to sleep. A second run in the same process could not free the memory of the first one's models.
    """
    gc.collect()
    gc.freeze()
