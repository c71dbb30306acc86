"""All flags of a training run, in groups that other scripts share. In order of appearance:

    Columns          the user's column names (not flags)
    RowFlags         plugins, image folder, column names and unusable rows
    DataFlags        data set, prompt template, image size and prompt length; includes RowFlags
    VerifierFlags    the verifier model that judges math answers
    RewardFlags      additional rewards; includes VerifierFlags
    PolicyFlags      optimizer, precision, adapter, memory and sharding
    EngineFlags      the sampler
    RunFlags         output, resuming, evaluation, checkpoints and reports
    GRPOFlags        task, model, batch, sampling and loss
    Config           the flags of grpo.py: all of the above except Columns

The docstring of each flag is its `--help` text.
"""

import argparse
import os
import pathlib
import re
import shlex
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import tyro

from common import console, plugins
from common.errors import UserError, require

RECIPES = pathlib.Path(__file__).parent / "recipes"
LORA_ALPHA = 32.0


def with_recipe(arguments: list[str]) -> list[str]:
    """Unless `arguments` have `--data`, put the flags of the task's recipe before them; later flags override these.

    Raises UserError if there is neither `--data` nor `--task`, or if the recipe has no data of its own either.
    """
    if {"--data", "-h", "--help"} & {argument.partition("=")[0] for argument in arguments}:
        return arguments
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--task")
    given, rest = parser.parse_known_args(arguments)
    recipe = RECIPES / f"{given.task}.flags"
    if given.task is None:
        names = {each[2:].partition("=")[0].replace("-", "_").removeprefix("no_") for each in rest if each[:2] == "--"}
        if names - {field.name for field in fields(Config)}:  # perhaps another library's: `cli.parse` says what to give
            return arguments
        raise UserError("no --data: give --data FILE, or --task vqa or --task math, which have public data")
    if not recipe.is_file():
        return arguments
    flags = shlex.split(recipe.read_text(encoding="utf-8"), comments=True)
    if "--data" not in flags:
        raise UserError(f"--task {given.task} has no public data: give --data, such as a ZIP with main.csv and images/")
    console.log(f"no --data: training with the flags in recipes/{recipe.name}, except those given")
    return flags + arguments


def check_values(flags: Any) -> None:
    """Raise ValueError if a number in the dataclass `flags` is not finite or is absurdly large, or if a text is empty.

    An empty text often comes from a shell variable that is not set.
    """
    for field in fields(flags):
        values = getattr(flags, field.name)
        for value in values if isinstance(values, tuple) else (values,):
            is_sane = not isinstance(value, int | float) or abs(value) < 2**31
            require(is_sane, f"{field.name} is {str(value)[:20]}: give a finite number below 2^31")
            require(value != "" or field.default == "", f"{field.name} is empty: give a value or leave out the flag")


@dataclass(frozen=True)
class Columns:
    """The user's names for the prompt, answer and image columns; None stands for the default names."""

    prompt: str | None = None
    answer: str | None = None
    images: str | None = None


@dataclass(kw_only=True)
class RowFlags:
    """The flags of plugins and for reading rows; `data.py convert` has them too."""

    plugin: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Python file of your own that adds tasks, losses, benchmarks or flags; see docs/plugins.md. The flag may be
    repeated. A resumed run and ./run.sh eval find the plugins of the run by themselves."""
    image_dir: str | None = None
    """Folder that relative image paths are resolved against; by default, the folder of the data file."""
    columns: tuple[str, ...] = ()
    """The columns of your rows, such as prompt=text answer=gold images=scan. By default, the prompt is in "prompt",
    "conversations", "messages", "problem", "question" or "query"; the answer in "answer", "ground_truth", "solution" or
    "response"; the images in "images", "image", or "path" if it holds images."""
    skip_bad_rows: bool = False
    """Leave out unusable rows and, except in evaluations, duplicate rows. Without this flag, unusable rows stop the
    run. In both cases, the first few unusable rows are listed."""

    def check_rows(self) -> None:
        """Raise ValueError for invalid settings."""
        _ = self.named_columns
        for file in self.plugin:
            is_loaded = os.path.realpath(file) in plugins.record()["plugin_sha256"]
            require(is_loaded, "plugin needs a start by `cli.launch`")

    @property
    def named_columns(self) -> Columns:
        """The user's column names. Raises ValueError for an entry that is not prompt=, answer= or images=NAME."""
        if not self.columns:
            return Columns()
        pairs = [each.partition("=")[::2] for each in self.columns]
        is_sane = all(column and name in ("prompt", "answer", "images") for name, column in pairs)
        require(is_sane, f"columns are prompt=NAME, answer=NAME and images=NAME, not {' '.join(self.columns)}")
        return Columns(**dict(pairs))


@dataclass(kw_only=True)
class DataFlags(RowFlags):
    """The data flags that training and evaluation share."""

    data: str
    """Data set: a .jsonl, .json, .parquet or .zip file, a folder, or a hub name. Append @split to choose one of several
    splits. Separate several data sets with commas; their rows are mixed. For the tasks vqa and math, grpo.py may
    run without `data`: it then uses the flags of recipes/TASK.flags."""
    template: str | None = None
    """Jinja file that replaces the task's prompt template. The file must contain {{ content }}."""
    chat_template_kwargs: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """NAME=VALUE: set a variable of the model's chat template, such as enable_thinking=false for Qwen3 and Qwen3.5.
    Repeat the flag to set several."""
    min_pixels: int = 56 * 56
    """Minimum image size in pixels, height times width; smaller images are enlarged."""
    max_pixels: int = 1280 * 28 * 28
    """Maximum image size in pixels, height times width; larger images are scaled down."""
    max_prompt_length: int = 2048
    """Maximum prompt length in tokens, including image tokens. A row with a longer prompt is unusable."""

    def check_data(self) -> None:
        """Raise ValueError for invalid settings."""
        if not 0 <= self.min_pixels <= self.max_pixels:
            raise ValueError("min_pixels must not exceed max_pixels, and pixel limits must not be negative")
        if self.max_prompt_length < 1:
            raise ValueError("max_prompt_length must be at least 1")
        self.check_rows()


@dataclass(kw_only=True)
class VerifierFlags:
    """The flags of the verifier model, which training and evaluation share."""

    verifier_url: str | None = None
    """URL of an OpenAI-compatible server, such as http://localhost:8000/v1. Its model judges the math answers that
    math-verify does not accept. The default is the environment variable REWARD_MODEL_URL. If neither the flag nor the
    variable is set, there is no verifier."""
    verifier_model: str | None = None
    """Name of the verifier model on the server. The default is the environment variable REWARD_MODEL_NAME or
    REWARD_MODEL_PATH or, if neither is set, the only model that the server lists."""
    verifier_template: str | None = None
    """Jinja file with the verifier's prompt, for a model that was trained on its own prompt, such as xVerify. It must
    contain {{ question }}, {{ gold }} and {{ answer }}. The reply must be "correct" or "incorrect"."""
    verifier_timeout: float = 60.0
    """Time limit in seconds, for a question to the verifier with its retries, or a call of an `async def` reward."""

    def check_verifier(self) -> None:
        """Raise ValueError for invalid settings."""
        if self.verifier_timeout <= 0:
            raise ValueError("verifier_timeout must be above 0")


@dataclass(kw_only=True)
class RewardFlags(VerifierFlags):
    """The reward flags that training and evaluation share."""

    reward: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Additional reward: file.py:function, count, vqa, math or format. Append =WEIGHT for a weight other than 1. The
    flag may be repeated. The task's own reward has weight 1 unless this flag sets a different weight for it."""
    env: str | None = None
    """Environment that answers the model's turns, such as a tool that returns images. A plugin adds it to
    `ENVIRONMENTS`; see docs/turns.md. `max_completion_length` then limits the tokens that the model samples in all
    turns together. `max_prompt_length` limits the tokens of the prompt and of the environment's answers."""
    max_turns: int = 4
    """Maximum number of the model's turns in an episode with `env`."""

    def check_env(self) -> None:
        """Raise ValueError for invalid settings."""
        if not self.env:
            require(self.max_turns == RewardFlags.max_turns, "max_turns needs an environment: give env")
            return
        require(self.max_turns >= 1, "max_turns must be at least 1")
        alone = getattr(self, "tensor_parallel", 1) == 1
        require(alone, "env needs tensor_parallel 1: its processes would get answers out of step")


@dataclass(kw_only=True)
class PolicyFlags:
    """The flags of the policy and its optimizer."""

    default_rates = (1e-6, 3e-5)  # of all weights, of an adapter (docs/adapters.md)

    learning_rate: float | None = None
    """Peak learning rate of AdamW. Unset: 1e-6 for all weights, 3e-5 for an adapter; a resumed run keeps its rate."""
    vision_rate: float | None = None
    """Peak learning rate of the vision tower and the projector; needs `train_vision`. Unset: `learning_rate`."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule after the warm-up: constant, or a linear or cosine decay to zero after the last update."""
    warmup: float = 0.0
    """Number of linear warm-up updates; a value below 1 is a fraction of all updates."""
    weight_decay: float = 0.0
    """Decoupled weight decay, applied to matrices only."""
    max_grad_norm: float = 1.0
    """Maximum norm of the gradient of all parameters. A gradient with a larger norm is scaled down to this norm."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type for computation; auto: bfloat16 on a GPU, float32 on a CPU. Master weights are float32."""
    train_vision: bool = False
    """Train the vision tower and the projector, which are frozen by default."""
    train_router: bool = False
    """Train the routers of a mixture of experts, which are frozen by default."""
    micro_batch_tokens: int = 0
    """Maximum number of packed tokens per forward and backward pass; 0: as many as fit into the GPU's free memory, but
    at most 10240; without a GPU, 16384. Without dropout, the gradient does not depend on this number."""
    activation_checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    """Layers whose activations are recomputed in the backward pass. none: no layer; selective: every second layer;
    full: all layers, a third more compute than none; auto: the fewest with which micro-batches of 8192 tokens fit."""
    compile: bool = True
    """On a GPU, fuse the small operations of each layer with torch.compile. Compilation takes a minute at the start."""
    lora_rank: int = 0
    """Rank of a LoRA adapter to train on top of the frozen model; 0: train the model itself."""
    lora_alpha: float = 0.0
    """α of the LoRA adapter; α / rank scales the adapter. 0: an α of 32, so that one learning rate suits every rank."""
    lora_dropout: float | None = None
    """Probability with which an input of the LoRA adapter is dropped in training updates; sampling and the reference
    have no dropout. Unset: 0 for a new adapter, and the saved probability for `adapter`."""
    lora_experts: bool = False
    """Also adapt the routed experts of a mixture of experts, which takes more time and memory; see docs/models.md."""
    adapter: str | None = None
    """Folder of an adapter in PEFT layout. Training continues this adapter, with its own rank and α. The KL reference
    uses the adapter as it was at the start of the run."""
    load_in_4bit: bool = False
    """Keep the frozen model in 4 bits (bitsandbytes nf4 with double quantisation) and train an adapter on top."""
    sharding: Literal["auto", "none", "hybrid", "full"] = "auto"
    """How weights, gradients and optimizer state are sharded. none: every process holds a full copy; full: all
    processes share one copy; hybrid: the processes of each machine share one copy. auto: none if a full copy takes less
    than a third of the GPU's memory. Otherwise, auto is hybrid if there are several machines and a shard takes less
    than two thirds of the GPU's memory, and full in all other cases."""
    offload: tuple[Literal["optimizer", "reference"], ...] = ()
    """What to keep in host memory: one or both of these. optimizer: AdamW's moments, which only an update needs.
    reference: the reference model; its layers move to the GPU one at a time."""

    def check_policy(self) -> None:
        """Raise ValueError for invalid settings."""
        if min(self.learning_rate or 0, self.vision_rate or 0, self.warmup, self.weight_decay) < 0:
            raise ValueError("learning_rate, vision_rate, warmup and weight_decay must not be negative")
        if self.vision_rate is not None and not self.train_vision:
            raise ValueError("vision_rate is that of a trained vision tower: give train_vision too, or leave it out")
        if self.max_grad_norm <= 0:
            raise ValueError("max_grad_norm must be above 0")
        if min(self.micro_batch_tokens, self.lora_rank, self.lora_alpha) < 0:
            raise ValueError("micro_batch_tokens, lora_rank and lora_alpha must not be negative")
        self._check_adapter()
        if "reference" in self.offload and self.has_adapter:
            raise ValueError("offload: an adapter needs no reference model; leave out reference")
        if self.train_router and self.has_adapter:
            raise ValueError("train_router: an adapter leaves the routers frozen; leave out train_router")
        if self.load_in_4bit and not self.has_adapter:
            raise ValueError("load_in_4bit freezes the model: give lora_rank or adapter, so that an adapter is trained")

    def _check_adapter(self) -> None:
        if self.adapter and (self.lora_rank or self.lora_alpha):
            raise ValueError("adapter has its own rank and α: leave lora_rank and lora_alpha out")
        if self.lora_alpha and not self.lora_rank:
            raise ValueError("lora_alpha applies to a new adapter: give lora_rank too, or leave out lora_alpha")
        if self.lora_experts and (not self.lora_rank or self.lora_dropout):
            raise ValueError("lora_experts applies to a new adapter without dropout: give lora_rank, not lora_dropout")
        if self.lora_dropout is not None and not (0 <= self.lora_dropout < 1 and self.has_adapter):
            raise ValueError("lora_dropout must be in [0, 1) and needs an adapter: give lora_rank or adapter")
        self.lora_alpha = self.lora_alpha or (LORA_ALPHA if self.lora_rank else 0.0)  # checkpoints record it

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter is trained instead of the model."""
        return bool(self.lora_rank or self.adapter)


@dataclass(kw_only=True)
class EngineFlags:
    """The flags of the sampler."""

    engine: str = "auto"
    """The sampler: vllm, hf (transformers with a KV cache), policy, or another entry of `ENGINES` in rollout.py. policy
    is like hf, but uses the trainer's weights, not a copy; it needs grpo.py in one process. auto: vllm if it is
    installed and there is a GPU, otherwise hf. In grpo.py, auto is policy if the GPU has no memory for a copy."""
    vllm_memory: float = 0.0
    """Fraction of the GPU's memory, or of `gpu_memory`, for vLLM's weights and KV cache while vLLM samples. At other
    times, the trainer uses this memory, unless `gpu_memory` is set. Training raises the fraction if the weights need
    more. 0: up to 0.85 in evaluations; in training, 0.25 or, without `gpu_memory`, more if the completions of a step
    need it, up to 70% of the memory that the waiting trainer leaves free."""
    gpu_memory: float = 0.0
    """Memory in GiB that the run, including the sampler, may use on each GPU; 0: all of the GPU's memory."""
    vllm_sequences: int = 256
    """Maximum number of sequences that a vLLM engine decodes at the same time."""
    tensor_parallel: int = 1
    """Number of GPUs per vLLM engine; above 1 for a model that does not fit on one GPU alongside the trainer."""

    def check_engine(self) -> None:
        """Raise ValueError for invalid settings."""
        if not 0 <= self.vllm_memory < 1 or self.gpu_memory < 0:
            raise ValueError("vllm_memory must be at least 0 and below 1, gpu_memory not negative")
        if self.vllm_sequences < 1 or self.tensor_parallel < 1:
            raise ValueError("vllm_sequences and tensor_parallel must be at least 1")


@dataclass(kw_only=True)
class RunFlags:
    """The flags that control what a training run writes, and when."""

    output: str = "runs/grpo"
    """Folder for metrics, curves, completions, checkpoints and the final model."""
    overwrite: bool = False
    """Replace an existing run in `output`."""
    resume: str | None = None
    """Checkpoint folder to resume from. Without a value: the newest complete checkpoint in `output`. auto: the same, or
    a fresh start if `output` has no checkpoint yet."""
    eval_data: str | None = None
    """Held-out rows, in any form that `data` accepts. A fraction such as 0.05 chooses this share of the pictures in
    `data` at random and holds out their rows. The policy is scored on the held-out rows before training, every
    `eval_every` steps, and at the end."""
    eval_every: int = 0
    """Number of steps between evaluations on `eval_data`; 0: only before and after training."""
    save_every: int = 50
    """Number of steps between checkpoints; 0: save only when the run ends or is interrupted. A run that runs out of
    memory saves nothing when it ends."""
    keep_last: int = 2
    """Number of most recent checkpoints to keep; 0: all."""
    report_every: int = 10
    """Number of steps between updates of curves.png and completions.html (parts/pages); 0: never write them."""
    log_to: tuple[Literal["wandb", "tensorboard", "trackio"], ...] = ()
    """Also log metrics and sampled completions to one or more of Weights & Biases, TensorBoard and trackio. Their
    packages are not installed with the project: pip install wandb tensorboard trackio."""

    def check_run(self) -> None:
        """Raise ValueError for invalid settings."""
        steps = min(self.eval_every, self.save_every, self.keep_last, self.report_every)
        require(steps >= 0, "eval_every, save_every, keep_last and report_every must not be negative")
        require(self.eval_data is not None or not self.eval_every, "eval_every needs eval_data")
        if self.log_to:
            from parts.pages.trackers import check_packages

            check_packages(self.log_to)

    @property
    def eval_fraction(self) -> float:
        """The fraction of `data` that is held out: `eval_data` if it is a fraction, otherwise 0."""
        return float(self.eval_data) if re.fullmatch(r"0?\.\d+", self.eval_data or "") else 0.0


@dataclass(kw_only=True)
class GRPOFlags:
    """The flags of the algorithm."""

    task: str = "vqa"
    """The task, which determines the prompt and the reward: count, vqa, math, or one that a plugin adds to `TASKS`."""
    model: str = "Qwen/Qwen2.5-VL-3B-Instruct"
    """Initial policy and KL reference: a folder in Hugging Face layout or a hub name."""
    seed: int = 0
    """Seed for the data order and for sampling."""

    max_completion_length: int = 1024
    """Maximum completion length in tokens. A completion that reaches it without a stop token is truncated."""
    overlong_buffer: int = 0
    """Number of tokens before `max_completion_length` over which the overlong penalty falls to -1; 0: no penalty."""

    prompts_per_step: int = 32
    """P: number of prompts per step, on all processes together."""
    prompts_per_update: int = 0
    """Number of prompts per optimizer update, on all processes together; 0: all P in one update."""
    num_generations: int = 8
    """G: number of completions per prompt. These completions form a group. Advantages are relative to the group."""
    num_iterations: int = 1
    """μ: number of passes over the completions of each step."""
    temperature: float = 1.0
    """Sampling temperature. The trainer computes log-probabilities at the same temperature."""
    dynamic_sampling_rounds: int = 0
    """Above 0: replace groups whose rewards are all equal with groups of new prompts, in up to this many rounds of P
    prompts per step (DAPO, arXiv:2503.14476, eq. 11). 0: no dynamic sampling."""

    oversample: float = 1.0
    """F: partial rollouts, with F times P prompts sampled at a time. Sampling ends when P prompts are complete. The
    next step continues the others with its newer weights; see docs/partial-rollouts.md. 1: no partial rollouts."""
    max_staleness: int = 2
    """With partial rollouts, the maximum number of steps between the sampling of a token and the training on this
    token. A step samples until all completions can be trained on within this limit, so no completion is dropped."""

    loss_type: str = "grpo"
    """The loss: grpo, dr_grpo, dapo, gspo, cispo, or one that a plugin adds to `LOSSES`. Dr. GRPO itself also needs
    `--advantage none`."""
    advantage: str = "group"
    """The advantage: a reward minus the mean of its group. group or batch: divided by the standard deviation of the
    rewards in the group or batch; none: not divided. gdpo: each reward is normalised in its group before the weighted
    sum (GDPO, arXiv:2601.05242). A plugin can add others to `ADVANTAGES`."""
    mask_truncated: bool = False
    """Leave truncated completions out of the loss (DAPO, arXiv:2503.14476, section 3.4). Their rewards still count in
    the advantages of their groups."""
    clip_low: float | None = None
    """ε_low: ratios below 1 − ε_low are clipped. Default: 0.2; 3e-4 for gspo, 1 (no lower bound) for cispo."""
    clip_high: float | None = None
    """ε_high: ratios above 1 + ε_high are clipped. Default: 0.2; 0.28 for dapo, 4e-4 for gspo, 4 for cispo."""
    dual_clip: float = 0.0
    """c: for negative advantages, ratios above c are also clipped (arXiv:1912.09729); 0: no such clipping."""
    teacher: str | None = None
    """A teacher with the same vocabulary (on-policy distillation). The teacher gives a token the probability ν, and
    -(log π - log ν) is added to the token's advantage; see docs/distillation.md. `model` may teach its new adapter."""
    teacher_pixels: int = 0
    """Maximum size of an image for the teacher, in pixels; 0: `max_pixels`. It may be larger than `max_pixels`."""
    beta: float = 0.0
    """β: weight of the KL divergence from the initial model; 0: no KL term and no reference model."""
    old_logp: Literal["policy", "sampler"] = "policy"
    """Source of the log-probabilities under π_old: the trainer (policy) or the sampler. With policy, a step that has
    several updates needs one more forward pass."""
    importance_cap: float = 2.0
    """Upper limit of a token's importance weight π_old / π_sampler, which corrects for numerical differences between
    the sampler and the trainer; 0: no importance weight."""

    epochs: int = 1
    """Number of passes over the training rows. Prompts that dynamic sampling replaces count, too."""
    max_steps: int = 0
    """Number of steps; 0: as many steps as `epochs` requires. A value above 0 overrides `epochs`."""
    drop_last: bool = False
    """Drop the last batch of an epoch if it is incomplete, that is, if `prompts_per_step` does not divide the number of
    rows. Without this flag, rows of the next epoch fill up the last batch; no row is in this batch twice."""


@dataclass(kw_only=True)
class Config(RunFlags, EngineFlags, PolicyFlags, RewardFlags, DataFlags, GRPOFlags):  # --help starts with the last one
    """Train a vision-language model with GRPO."""

    def __post_init__(self) -> None:
        check_values(self)
        self.check_run()
        self.check_data()
        self.check_verifier()
        self.check_policy()
        self.check_engine()
        self.check_env()
        is_group = self.num_generations >= (1 if self.teacher else 2)
        require(is_group, "num_generations must be at least 2, or 1 with a teacher: advantages are relative to a group")
        require(self.teacher or not self.teacher_pixels, "teacher_pixels needs a teacher: give --teacher MODEL")
        require(self.temperature > 0, "temperature must be above 0: equal completions have zero advantage")
        for name in ("max_completion_length", "num_iterations", "epochs", "prompts_per_step"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1")
        counts = ("seed", "max_steps", "prompts_per_update", "teacher_pixels", "dynamic_sampling_rounds")
        factors = ("beta", "importance_cap", "dual_clip")
        for name in (*counts, *factors):
            require(getattr(self, name) >= 0, f"{name} must not be negative")
        self.prompts_per_update = self.prompts_per_update or self.prompts_per_step
        per_step, per_update = self.prompts_per_step, self.prompts_per_update
        require(
            per_step % per_update == 0, f"prompts_per_update ({per_update}) must divide prompts_per_step ({per_step})"
        )
        self._check_partial_rollouts()
        if not 0 <= self.overlong_buffer <= self.max_completion_length:
            raise ValueError("overlong_buffer must be between 0 and max_completion_length")
        require(self.clip_low is None or 0 <= self.clip_low <= 1, "clip_low must be between 0 and 1")
        require(self.clip_high is None or self.clip_high >= 0, "clip_high must not be negative")

    def _check_partial_rollouts(self) -> None:
        require(1 <= self.max_staleness <= 100, "max_staleness must be from 1 to 100")
        if self.oversample == 1:
            return
        require(
            1 <= self.oversample <= self.max_staleness + 1,
            f"oversample must be from 1 to max_staleness + 1 ({self.max_staleness + 1}): what is in flight has to be "
            "trained on within max_staleness steps",
        )
        require(self.tensor_parallel == 1, "oversample needs tensor_parallel 1: leave one of them out")
        draws_more = round(self.oversample * self.prompts_per_step) > self.prompts_per_step
        require(draws_more, "oversample is too small to draw another prompt: raise it or leave it out")
        self.check_stale_tokens("oversample needs")

    def check_stale_tokens(self, what: str) -> None:
        """Raise ValueError if the loss would not correct for tokens that an earlier step sampled."""
        require(
            self.importance_cap > 0 or self.old_logp == "sampler",
            f"{what} an importance weight: leave importance_cap above 0, or set old_logp to sampler",
        )

    @property
    def teaches_itself(self) -> bool:
        """Whether the teacher is the base of a new adapter, so that no second copy of it is needed."""
        same = self.teacher == self.model or os.path.realpath(self.teacher or "") == os.path.realpath(self.model)
        return bool(self.lora_rank) and same

    @property
    def updates_per_step(self) -> int:
        """Number of optimizer updates per step."""
        return self.num_iterations * self.prompts_per_step // self.prompts_per_update
