"""Supervised fine-tuning on given answers, with GRPO's code for packing, sharding, LoRA, resuming and export.

    python sft.py --task vqa --data train.jsonl --lora_rank 64 --output runs/sft
    python grpo.py --task vqa --data train.jsonl --adapter runs/sft/final --output runs/vqa     # GRPO begins there

The rows have the same formats as in GRPO; the answer may also be the assistant's last turn in `messages`. The answer is
trained on as it stands, with the reasoning before it, and ends as the chat template ends a turn. Rows with the same
prompt share it in one packed sequence, as completions do.

The loss is −Σ log π_θ(token) / tokens over the answers of a step. Its gradient is the policy gradient with an advantage
of 1, for answers that are given instead of sampled. `grpo.batch_loss` computes it with the entry "sft" of `LOSSES`.
"""

from common import cli
from config import DataFlags, PolicyFlags, RewardFlags, RunFlags, check_values

if __name__ == "__main__":  # before the slow import of torch
    cli.launch("sft")

import hashlib
import json
import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

import grpo
from common import console, distributed, signals
from common.errors import UserError, require
from common.records import Completion, Group, Prompt, RequestLimits, Rollout, Sample
from data import Processor, commands, encode_prompts, encode_response, load_split, max_images, processor_for, summarise
from evaluation.scorer import Scorer
from packing import PackedBatch
from policy.batches import completion_logprobs
from policy.model import Policy, cache_image_features
from rewards import get_task
from training.collect import Collector
from training.loop import Run
from training.prompt_stream import PromptStream
from training.run import start

ASKED = 8  # number of answers that `earns_nothing` scores
ROWS_AT_ONCE = 256  # held-out rows whose images are in memory together
NOT_OF_SFT = ("clip_ratio", "importance_capped", "kl", "entropy")  # and sampling/…: metrics to leave out


@dataclass
class Answered(Sample):
    """A prompt with its answers, encoded when they are loaded: between two steps, the GPU would wait for it."""

    ids: list[Tensor] = field(default_factory=list)  # (L,) token ids of each of `responses`, int32


@dataclass(kw_only=True)
class SFTFlags:
    """Flags that grpo.py also has, but with another meaning."""

    task: str = "vqa"
    """The task whose prompt template is used: count, vqa, math, or one that a plugin adds; see `template`."""
    model: str = "Qwen/Qwen2.5-VL-3B-Instruct"
    """Model to train: a Hugging Face name or a folder."""
    seed: int = 0
    """Seed for the order of the rows and for dropout."""
    max_completion_length: int = 1024
    """Maximum answer length in tokens, with the end token. A longer answer is unusable: see `skip_bad_rows`."""
    prompts_per_step: int = 32
    """Number of prompts in a step, on all processes together. All answers to a prompt are in one step."""
    epochs: int = 1
    """Number of passes over the prompts."""
    max_steps: int = 0
    """Number of steps; 0: as many as `epochs` requires."""
    drop_last: bool = False
    """Leave out the last, incomplete batch of an epoch."""


@dataclass(kw_only=True)
class Config(RunFlags, PolicyFlags, DataFlags, SFTFlags):  # --help begins with the last base
    """Fine-tune a model on given answers."""

    output: str = "runs/sft"
    """Folder of the run."""
    learning_rate: float | None = None
    """Peak learning rate of AdamW. Unset: 2e-5 for all weights, 2e-4 for an adapter; a resumed run keeps its rate."""
    # Settings of a GRPO run that the shared code reads:
    default_rates = (2e-5, 2e-4)
    loss_type: str = field(default="sft", init=False)
    """Not a flag. It is saved with checkpoints, so that no other run continues them."""
    old_logp = "policy"
    engine = ""  # no sampler
    temperature = 1.0
    beta = 0.0
    importance_cap = 0.0
    gpu_memory = 0.0
    vllm_memory = 0.0
    vllm_sequences = 1
    oversample = 1.0
    updates_per_step = 1
    num_generations = 1
    tensor_parallel = 1
    teacher = None
    env = None

    def __post_init__(self) -> None:
        check_values(self)
        self.check_run()
        self.check_data()
        self.check_policy()
        for name in ("max_completion_length", "prompts_per_step", "epochs"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1")
        require(min(self.seed, self.max_steps) >= 0, "seed and max_steps must not be negative")


def log_likelihood(
    logp: Tensor, log_ratio: Tensor, advantages: Tensor, batch: PackedBatch, cfg: Config
) -> tuple[Tensor, Tensor]:
    """Return log π_θ of each token, which is never clipped. All tensors are (C,)."""
    return logp, torch.zeros_like(logp, dtype=torch.bool)


grpo.LOSSES["sft"] = grpo.Loss(log_likelihood, "tokens", 0.0, 0.0)


class Answers(Collector):
    """Draws prompts with the answers that the rows give, where GRPO's collector samples completions."""

    def collect(self, policy: Policy, step: int) -> list[Group]:
        """Return this process's prompts of the next step, with their answers."""
        self.clock.restart()
        signals.raise_if_interrupted(self.interrupted)
        drawn = self.draw(step)
        mine, last = self.assign(drawn), drawn[-1].position
        drawn = [drawn[index] for index in mine]
        with self.clock("prompts"):
            prompts = self.stream.get(drawn)
            cache_image_features(policy, prompts, self.features)
        self.position = last + 1
        self.prefetch(step)
        groups = [as_group(*each) for each in zip(self.stream.rows(drawn), prompts, mine)]
        lengths = torch.tensor([len(each.ids) for group in groups for each in group.completions]).long()
        weight = 1 / distributed.all_sum(lengths.sum()).item()
        return [
            replace(group, completions=[replace(each, token_weight=weight) for each in group.completions])
            for group in groups
        ]

    def metrics(self, step: int) -> dict[str, float]:
        """Return the seconds that the parts of a step took."""
        return self.clock.metrics()


def as_group(sample: Answered, prompt: Prompt, index: int) -> Group:
    """Return a prompt and its answers, each with an advantage of 1."""
    return Group(prompt, [Completion(ids.long(), torch.zeros(len(ids)), 1.0) for ids in sample.ids], index)


def train_step(run: Run) -> dict[str, float]:
    """Take one optimizer step on the answers of the next prompts."""
    groups = run.updater.balance(run.collector.collect(run.policy, run.step))
    run.updater.step(groups, lambda batch: grpo.backward(run, batch))
    metrics = run.collector.metrics(run.step) | run.updater.metrics()
    return {name: value for name, value in metrics.items() if name not in NOT_OF_SFT and "sampling/" not in name}


def read_inputs(cfg: Config) -> tuple[PromptStream, list[Answered], None, RequestLimits]:
    """Read and check every row; return the training prompts, the held-out prompts, no rewards, and the limits."""
    processor = processor_for(cfg)
    samples = load_answers(cfg, cfg.data, processor)
    samples, held_out = commands(is_needed=True).hold_out(samples, cfg) if cfg.eval_fraction else (samples, [])
    if cfg.eval_data and not cfg.eval_fraction:
        held_out = load_answers(cfg, cfg.eval_data, processor)
        if any(sample.images for sample in held_out) and (compare := commands()):
            compare.log_shared(samples, held_out)
    stream = PromptStream(samples, processor, cfg.seed, cfg.prompts_per_step, cfg.drop_last)
    answers = json.dumps([sample.responses for sample in samples])
    stream.fingerprint["rows_digest"] += hashlib.sha256(answers.encode()).hexdigest()[:16]
    longest = cfg.max_prompt_length + cfg.max_completion_length
    return stream, held_out, None, RequestLimits(longest, max_images([*samples, *held_out], processor))


def load_answers(cfg: Config, data: str, processor: Processor) -> list[Answered]:
    """Return a row of `data` for each prompt, with the answers of all rows that have the same text and images.

    Raises UserError if an answer is too long, or if the chat template cannot end it.
    """
    samples: dict[tuple, Answered] = {}
    rows, problems = load_split(cfg, data, None, processor, keep_duplicates=True), []
    for row in rows:
        try:
            require(not row.teacher_images, "it has 'teacher_images', and there is no teacher: remove the column")
            ids = encode_response(row, row.responses[0], processor).int()
            length, most = len(ids), cfg.max_completion_length
            require(length <= most, f"its answer has {length} tokens; --max_completion_length is {most}")
        except ValueError as error:
            problems.append(f"{row.source}: {error}")
            continue
        images = [image if isinstance(image, bytes) else repr(image) for image in row.images]
        first = samples.setdefault((row.source_index, *row.texts, row.system, *images), Answered(**vars(row)))
        first.ids.append(ids)
        if first.responses is not row.responses:
            first.responses += row.responses
    if problems and (not cfg.skip_bad_rows or len(problems) == len(rows)):
        why = summarise(problems, f"of {len(rows)} answers cannot be used")
        raise UserError(f"{why}; mend or shorten them, or pass --skip_bad_rows to leave them out")
    if problems:
        console.log(f"skipped: {summarise(problems, f'of {len(rows)} answers')}")
    responses = [response for sample in samples.values() for response in sample.responses]
    has_format = cfg.template or any(get_task(cfg.task).verdict("format", response) for response in responses)
    if console.is_main() and not has_format and earns_nothing(cfg.task, [*samples.values()]):
        example = f"such as {responses[0][:40]!r}"
        console.log(f"the reward of --task {cfg.task} gives nothing for the answers, {example}: see docs/sft.md")
    return list(samples.values())


def earns_nothing(task: str, samples: list[Answered]) -> bool:
    """Return whether the reward of `task` is at most 0 for each of a few answers, all without its `format`."""
    if task == "math":  # its reward is -1 without the format; do not start a verifier for that
        return True
    few = samples[:: math.ceil(len(samples) / ASKED)]
    answers = [[Rollout(torch.zeros(0), torch.zeros(0), text=sample.responses[0])] for sample in few]
    rewards, _ = Scorer(task, RewardFlags())(few, answers)
    return all(each.total <= 0 for (each,) in rewards)  # False if the reward has failed (NaN), which shows nothing


def held_out_loss(run: Run, samples: list[Answered]) -> dict[str, float]:
    """Return the mean loss of a token over all answers of held-out rows, without dropout."""
    processor, sums = run.collector.stream.processor, torch.zeros(2, dtype=torch.float64)
    for first in range(0, len(samples), ROWS_AT_ONCE):
        local = distributed.shard(samples[first : first + ROWS_AT_ONCE])
        with distributed.shared_errors():
            prompts = encode_prompts(local, processor)
        cache_image_features(run.policy, prompts, run.collector.features)
        groups = [as_group(*each) for each in zip(local, prompts, range(len(local)))]
        logps = completion_logprobs(run.policy, groups, 1.0, run.updater.micro_batch_tokens)
        sums += torch.tensor([sum(map(len, logps)), sum(logp.sum().item() for logp in logps)], dtype=torch.float64)
    tokens, logp = distributed.all_sum(sums).tolist()
    return {"eval/loss": -logp / tokens}


def main(cfg: Config) -> None:
    run = start(cfg, read_inputs, Answers, held_out_loss)
    run.loop.train(run, train_step)
