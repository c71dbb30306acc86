"""A training run: everything that a step needs, and how it is set up.

Start reading at `start`. grpo.py trains what it returns.
"""

import os
import pathlib
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch

from common import console, distributed
from common.errors import UserError
from common.records import RequestLimits, Sample
from config import Config
from data import Processor, commands, load_split, max_images, processor_for
from evaluation.scorer import Scorer
from policy.base_files import settings_folder
from policy.memory import GIB, Plan, choose_micro_batch_size, gpus_here, limit_allocator, plan, sampler_stays_awake
from policy.model import Policy, check_trained, compute_dtype, load_policy
from policy.optimizer import OPTIMIZERS
from policy.sharding import apply_fsdp, load_reference, load_teacher
from rollout import ENGINES, Engine, check_engine_available, choose_engine, make_engine
from training import checkpoint
from training.collect import Collector
from training.loop import Evaluate, Loop, Run, load_state
from training.metrics import Clock
from training.prompt_stream import PromptStream
from training.run_folder import WRITTEN, ResumePlan, RunFolder
from training.run_log import RunLog, check_output_folder
from training.updates import Updater


def start(
    cfg: Config,
    read: Callable[..., tuple] | None = None,
    make: Callable[..., Collector] | None = None,
    evaluate: Evaluate | None = None,
) -> Run:
    """Check the flags and the data, load the models, and return a run that is ready to train.

    `read`, `make` and `evaluate` (of sft.py) read the inputs, make the collector and score held-out rows, in place of
    `check_inputs`, `collector_of` and `training.loop.score_completions`.

    The order matters. Flags, output folder and rows are checked first, so that a mistake is found within seconds. The
    sampler starts before the policy is moved to the GPUs, because vLLM measures the free memory. The micro-batches are
    sized once the models are in place; the optimizer's future memory is computed. The output folder is changed last,
    after all checks have passed. A resumed run gets the tensors and random states of its checkpoint from
    `load_checkpoint`, and everything else (position in the data, schedule, …) from `load_state`.
    """
    device = distributed.start()
    if cfg.engine:
        check_engine_available(cfg, device)
    check_restarts(cfg)
    folder = RunFolder(cfg.output, cfg.keep_last)
    resume = folder.plan_resume(cfg.resume)
    check_output_folder(cfg.output, cfg.overwrite or resume.replaces_output, resume.continues_output)
    check_start_survives(cfg)
    choose_learning_rate(cfg, resume)
    stream, eval_samples, scorer, limits = (read or check_inputs)(cfg)
    state = check_state(cfg, stream, resume) if resume.checkpoint else {}
    make = make or collector_of(cfg, state, resume.checkpoint)
    policy, reference, teacher, engine, tokens = load_models(cfg, stream.processor, limits, device)
    distributed.use_one_thread(device)  # not later, since torch.compile would compile everything anew
    clock = Clock()
    interrupted: list[int] = []  # shared by the objects below, like the clock
    collector = make(cfg, stream, engine, scorer, clock, interrupted)
    optimizers = OPTIMIZERS["default"](policy, cfg, collector.total_steps * cfg.updates_per_step)
    torch.manual_seed(cfg.seed + distributed.rank())  # for dropout; a checkpoint restores its own random state
    resumed_step = state["step"] if resume.continues_output else None
    saver = checkpoint.Saver(folder, resumed_step)
    updater = Updater(cfg, policy, reference, optimizers, tokens, clock, interrupted, saver.wait_until_read)
    if environment := stream.processor.environment:
        updater.difference_by_turn = environment.difference_by_turn
    loop = Loop(saver, eval_samples, interrupted, evaluate)
    run = Run(cfg, policy, reference, teacher, collector, updater, loop)
    if resume.checkpoint:
        from training.resume import is_same_setting

        with checkpoint.reading(resume.checkpoint):
            checkpoint.check_parts(resume.checkpoint, state, policy, optimizers)
            checkpoint.load_checkpoint(resume.checkpoint, policy, reference, optimizers)
            load_state(run, state)
            has_same_rows = is_same_setting(state["config"]["eval_data"], cfg.eval_data)
            loop.eval_due = bool(eval_samples) and (loop.eval_due or not has_same_rows)  # other rows have no score yet
    run.log = prepare_output(cfg, folder, resumed_step, collector)
    return run


def collector_of(cfg: Config, state: dict[str, Any], folder: pathlib.Path | None = None) -> type[Collector]:
    """Return the class of the run's collector.

    `state`: that of the checkpoint in `folder`, which may have prompts in flight. Raises UserError if these cannot
    continue with the flags `cfg`.
    """
    if cfg.oversample == 1 and "in_flight" not in state.get("collector", {}):
        return Collector
    from parts.partial import PartialCollector, check_in_flight

    if folder:
        with checkpoint.reading(folder):
            check_in_flight(cfg, state)
    return PartialCollector


def check_restarts(cfg: Config) -> None:
    """Raise UserError if torchrun may restart this command and it would then not continue its own run."""
    if (restarts := os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) != "0" and cfg.resume not in ("auto", "newest"):
        raise UserError(f"with --max_restarts {restarts}, torchrun runs the same command again: add --resume auto")


def choose_learning_rate(cfg: Config, resume: ResumePlan) -> None:
    """Set `cfg.learning_rate` if it is unset, and print it."""
    if cfg.learning_rate is not None:
        return
    cfg.learning_rate, why = cfg.default_rates[0], "the default for all weights"
    if resume.checkpoint:
        cfg.learning_rate = checkpoint.read_progress(resume.checkpoint)["config"]["learning_rate"]
        why = "that of the run so far"
    elif cfg.has_adapter:
        cfg.learning_rate, why = cfg.default_rates[1], "the default for an adapter"
    console.log(f"learning rate: {cfg.learning_rate:g} ({why})")


def check_start_survives(cfg: Config) -> None:
    """Raise UserError if a model that this run reads lies in a folder of the output that it would replace."""
    output = pathlib.Path(cfg.output).resolve()
    for name in ("model", "adapter", "teacher"):
        start = getattr(cfg, name)
        path = pathlib.Path(start or "").resolve()
        if start and output in path.parents and WRITTEN.fullmatch(path.relative_to(output).parts[0]):
            raise UserError(f"--{name} {start!r} would be replaced by this run: choose another --output")


def check_inputs(cfg: Config) -> tuple[PromptStream, list[Sample], Scorer, RequestLimits]:
    """Read and check every row and reward; return the training rows, the held-out rows, the rewards and the limits."""
    scorer = Scorer(cfg.task, cfg, cfg.overlong_buffer)
    if not any(scorer.weights.values()):
        if not cfg.teacher:
            raise UserError("--reward: every reward has the weight 0, so there is nothing to train for")
        needing = {"dynamic_sampling_rounds": cfg.dynamic_sampling_rounds, "overlong_buffer": cfg.overlong_buffer}
        for flag, is_on in (needing | {"advantage gdpo": cfg.advantage == "gdpo"}).items():
            if is_on:
                raise UserError(f"--{flag} needs a reward: every reward has the weight 0")
    elif cfg.num_generations < 2:
        raise UserError(
            "--num_generations 1: rewards are compared within a group; with a teacher alone, give them weight 0"
        )
    processor = processor_for(cfg)
    samples = load_split(cfg, cfg.data, scorer.gold_task, processor)
    teacher = None
    if cfg.teacher:
        from training.teacher import load_teacher_processor

        teacher = load_teacher_processor(cfg, processor, samples)
    if unused := [sample.source for sample in samples if sample.teacher_images and not teacher]:
        raise UserError(f"{unused[0]} has 'teacher_images', and there is no --teacher: add it, or remove the column")
    samples, eval_samples = commands(is_needed=True).hold_out(samples, cfg) if cfg.eval_fraction else (samples, [])
    stream = PromptStream(samples, processor, cfg.seed, cfg.prompts_per_step, cfg.drop_last, teacher)
    if cfg.eval_data and not cfg.eval_fraction:
        eval_samples = load_split(cfg, cfg.eval_data, scorer.gold_task, processor, keep_duplicates=True)
        if any(sample.images for sample in eval_samples) and (compare := commands()):
            compare.log_shared(samples, eval_samples)
    scorer.check_columns([*samples, *eval_samples])
    images = max_images([*samples, *eval_samples], processor)
    return stream, eval_samples, scorer, RequestLimits(cfg.max_prompt_length + cfg.max_completion_length, images)


def check_state(cfg: Config, stream: PromptStream, resume: ResumePlan) -> dict[str, Any]:
    """Return the state of the checkpoint to resume from, except its tensors and random states.

    Raises UserError if the run cannot continue with the flags `cfg`.
    """
    from training.resume import check_settings, note_newer_files

    folder = resume.checkpoint
    with checkpoint.reading(folder):
        state = checkpoint.read_progress(folder)
        check_settings(folder, state["config"], asdict(cfg) | stream.fingerprint)
        note_newer_files(folder, cfg)
        if (path := folder / checkpoint.IN_FLIGHT).is_file():
            state["collector"]["in_flight"] = torch.load(path, weights_only=True)
    return state


def load_models(
    cfg: Config, processor: Processor, limits: RequestLimits, device: torch.device
) -> tuple[Policy, Policy | None, Policy | None, Engine | None, int]:
    """Load the policy, start the sampler, then place the models on the GPUs. The sampler sleeps meanwhile.

    Returns policy, reference, teacher, sampler, and the maximum number of tokens of a micro-batch.
    """
    dtype = compute_dtype(cfg.dtype, device)
    policy = load_policy(cfg.model, cfg, device, to_shard=True)
    check_trained(policy, cfg)
    planned = plan(policy, cfg, gpus_here(device))
    if planned.gpus.on_gpu and planned.gpus.number > 1:
        state = (planned.resting + planned.gradients) / GIB
        console.log(f"sharding: {planned.sharding} (weights, gradients, optimizer: {state:.1f} GiB on each GPU)")
    if cfg.gpu_memory:
        limit_allocator(cfg.gpu_memory, device)
    if not cfg.engine:
        planned.check(needs_copy=False)
    engine = start_sampler(cfg, planned, policy, processor, limits) if cfg.engine else None
    policy = apply_fsdp(policy, device, dtype, planned.sharding)
    reference = load_reference(cfg.model, cfg, device, policy, planned.sharding) if cfg.beta else None
    teacher = load_teacher(cfg, device, policy, planned.sharding) if cfg.teacher else None
    others = [model for model in (reference, teacher) if model not in (None, policy)]
    return policy, reference, teacher, engine, choose_micro_batch_size(policy, others, planned)


def start_sampler(cfg: Config, planned: Plan, policy: Policy, processor: Processor, limits: RequestLimits) -> Engine:
    """Start the sampler beside `policy`, and let it sleep."""
    chosen = choose_engine(cfg, planned.gpus.device, planned.has_room)
    if ENGINES[chosen].needs_gpu and ENGINES[chosen].needs_copy:
        console.log(f"{ENGINES[chosen].title}'s share of the GPU's memory: {planned.vllm_memory:.2f}")
    planned.check(ENGINES[chosen].needs_copy)
    device, flags = planned.gpus.device, replace(cfg, engine=chosen, vllm_memory=planned.vllm_memory)
    dtype = compute_dtype(cfg.dtype, device)
    engine = make_engine(flags, cfg.model, processor, device, dtype, limits, policy)
    engine.stays_awake = sampler_stays_awake(planned)
    engine.sleep()
    return engine


def prepare_output(cfg: Config, folder: RunFolder, resumed_step: int | None, collector: Collector) -> RunLog:
    """Delete what an earlier run has left in the output folder (`RunFolder.prepare`), and begin or continue its log."""
    folder.prepare(resumed_step)
    with distributed.shared_errors():
        if console.is_main():
            settings_folder(cfg.model, cfg.output, keep=True)
    config, decode = asdict(cfg) | {"total_steps": collector.total_steps}, collector.stream.processor.tokenizer.decode
    return RunLog(cfg.output, config, resumed_step, decode)
