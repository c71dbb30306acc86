"""Every flag of a training run, in groups that other scripts share; `Config` at the end is what grpo.py takes."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from common.errors import require


@dataclass(frozen=True)
class Columns:
    """The user's names for the three columns that matter; the usual names when None."""

    prompt: str | None = None
    answer: str | None = None
    images: str | None = None


@dataclass(kw_only=True)
class DataFlags:
    """The flags of data that training and evaluation share."""

    data: str
    """Rows: a .jsonl, .json, .parquet or .zip file, a folder, or a hub name, with @split where there are several; data
    sets with commas between them are mixed."""
    image_dir: str | None = None
    """What relative image paths start from; the data file's folder when left out."""
    prompt_column: str | None = None
    """The prompt's column, where it is not «prompt», «problem» or «question»."""
    answer_column: str | None = None
    """The gold answer's column, where it is not «answer» or «ground_truth»."""
    image_column: str | None = None
    """The images' column, where it is not «images» or «image»."""
    skip_bad_rows: bool = False
    """Leave out rows that cannot be used, and repeated ones, instead of stopping; they are named either way."""
    template: str | None = None
    """Jinja file with {{ content }} that replaces the task's prompt template."""
    min_pixels: int = 56 * 56
    """Smallest picture, height times width; smaller ones are enlarged."""
    max_pixels: int = 1280 * 28 * 28
    """Largest picture, height times width; larger ones are reduced."""
    max_side: int = 0
    """Longest side of a picture in pixels; 0: no limit but `max_pixels`."""
    max_prompt_length: int = 2048
    """Most prompt tokens, images expanded; a row over it is a bad row."""

    def check_data(self) -> None:
        """Raise ValueError for settings that cannot be."""
        if not 0 <= self.min_pixels <= self.max_pixels or self.max_side < 0:
            raise ValueError("min_pixels must not be above max_pixels, nor any limit of pixels negative")
        if self.max_prompt_length < 1:
            raise ValueError("max_prompt_length must be at least 1")


@dataclass(kw_only=True)
class VerifierFlags:
    """The flags of the verifier model that training and evaluation share."""

    verifier_url: str | None = None
    """OpenAI-compatible server that judges math answers which the rule does not find right, like
    http://localhost:8000/v1; the environment's REWARD_MODEL_URL when left out, none without it."""
    verifier_model: str | None = None
    """The verifier's name on the server; REWARD_MODEL_NAME or REWARD_MODEL_PATH of the environment, or the only model
    that the server lists."""
    verifier_timeout: float = 60.0
    """Seconds that one request may take."""
    verifier_retries: int = 3
    """Further requests after one that failed, each after a longer pause."""
    verifier_concurrency: int = 64
    """Most requests at the same time, of each process."""

    def check_verifier(self) -> None:
        """Raise ValueError for settings that cannot be."""
        if self.verifier_timeout <= 0 or self.verifier_retries < 0 or self.verifier_concurrency < 1:
            raise ValueError("verifier_timeout and verifier_concurrency must be above 0, verifier_retries at least 0")


@dataclass(kw_only=True)
class RewardFlags(VerifierFlags):
    """The flags of rewards that training and evaluation share."""

    reward: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Another reward, file.py:function or count, vqa, math or format, added with weight 1 or =WEIGHT after it; may be
    given several times. The task's own has weight 1 unless named here."""
    reward_timeout: float = 10.0
    """Seconds that a user's reward may take for one completion."""

    def check_rewards(self) -> None:
        """Raise ValueError for settings that cannot be."""
        self.check_verifier()
        if self.reward_timeout <= 0:
            raise ValueError("reward_timeout must be above 0")


@dataclass(kw_only=True)
class PolicyFlags:
    """The flags of the policy and its optimizer."""

    learning_rate: float = 1e-6
    """Peak learning rate of AdamW."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up: constant, or a fall to zero at the last update."""
    warmup: float = 0.0
    """Updates of linear warm-up; below 1, a share of all updates."""
    weight_decay: float = 0.0
    """Decoupled weight decay, on matrices only."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm over all parameters."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type; auto is bfloat16 on a GPU, float32 on a CPU. Master weights are float32."""
    train_vision: bool = False
    """Train the vision tower too; it is frozen otherwise."""
    micro_batch_tokens: int = 0
    """Most packed tokens of one forward and backward, on which the gradient does not depend; 0: what fits into the
    GPU's free memory."""
    activation_checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    """Layers that keep only their input and are computed again in the backward pass: none, every second, or all (a
    third more compute); auto takes as few as fit into the GPU's memory."""
    compile: bool = True
    """Fuse the small operations of each layer with torch.compile, on a GPU; costs a minute at the start."""
    lora_rank: int = 0
    """Rank of an adapter to train beside the frozen model; 0 trains the model itself."""
    lora_alpha: float = 0.0
    """α of the adapter, whose scale is α / rank; 0: twice the rank."""
    adapter: str | None = None
    """An adapter in PEFT layout to go on training, with its own rank and α; as it is, it is the KL reference."""
    load_in_4bit: bool = False
    """Keep the frozen model in 4 bits (bitsandbytes nf4, double quantisation) beside the adapter."""
    sharding: Literal["auto", "none", "hybrid", "full"] = "auto"
    """Weights, gradients and optimizer of each process: none, a whole copy; full, a share of one copy over all
    processes; hybrid, a share of a copy on each machine. auto: a whole copy where it takes less than a third of the
    GPU, else hybrid on several machines where it takes less than two thirds, else full."""
    gather: Literal["auto", "layer", "update"] = "auto"
    """When a process puts the weights of a layer together from their shares: each time it is run, or once for all
    micro-batches of an update, which takes a whole copy in `dtype`. auto: once where memory has room for that. A
    reference in host memory is never gathered once."""
    offload_optimizer: bool = False
    """Keep AdamW's moments in host memory between updates."""
    offload_reference: bool = False
    """Keep the reference model in host memory; its layers come to the GPU one after another when they are needed."""

    def check_policy(self) -> None:
        """Raise ValueError for settings that cannot be."""
        if min(self.learning_rate, self.warmup, self.weight_decay) < 0:
            raise ValueError("learning_rate, warmup and weight_decay must not be negative")
        if self.max_grad_norm <= 0:
            raise ValueError("max_grad_norm must be above 0")
        if min(self.micro_batch_tokens, self.lora_rank, self.lora_alpha) < 0:
            raise ValueError("micro_batch_tokens, lora_rank and lora_alpha must not be negative")
        if self.adapter and (self.lora_rank or self.lora_alpha):
            raise ValueError("adapter has a rank and an α of its own: leave lora_rank and lora_alpha out")
        if self.lora_alpha and not self.lora_rank:
            raise ValueError("lora_alpha is of a new adapter: give lora_rank, or leave it out")
        if self.offload_reference and self.has_adapter:
            raise ValueError("offload_reference: beside an adapter there is no reference model; leave it out")
        if self.load_in_4bit and not self.has_adapter:
            raise ValueError("load_in_4bit freezes the model: give lora_rank or adapter, which are trained beside it")

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter is trained in place of the model."""
        return bool(self.lora_rank or self.adapter)


@dataclass(kw_only=True)
class EngineFlags:
    """The flags of the sampler."""

    engine: Literal["auto", "hf", "vllm"] = "auto"
    """The sampler; auto is vllm where it is installed and there is a GPU, else hf (transformers with a KV cache)."""
    vllm_memory: float = 0.25
    """Share of the GPU's memory, or of `gpu_memory`, for vLLM's weights and KV cache while it samples; the trainer has
    it in between."""
    gpu_memory: float = 0.0
    """GiB of each GPU that the run may use, the sampler's share included; 0: all of it."""
    vllm_sequences: int = 256
    """Most sequences that vLLM decodes at the same time, on each GPU."""
    tensor_parallel: int = 1
    """GPUs that share one vLLM engine, where a model does not fit beside the trainer on one."""
    check_sync: bool = False
    """Compare every weight in vLLM with the trainer's after each sync."""

    def check_engine(self) -> None:
        """Raise ValueError for settings that cannot be."""
        if not 0 < self.vllm_memory < 1 or self.gpu_memory < 0:
            raise ValueError("vllm_memory must be between 0 and 1, gpu_memory not negative")
        if self.vllm_sequences < 1 or self.tensor_parallel < 1:
            raise ValueError("vllm_sequences and tensor_parallel must be at least 1")
        if self.check_sync and self.tensor_parallel > 1:
            raise ValueError("check_sync compares whole weights, which no process has with tensor_parallel above 1")


@dataclass(kw_only=True)
class RunFlags:
    """The flags of what a training run leaves and when."""

    output: str = "runs/grpo"
    """Folder for metrics, curves, completions, checkpoints and the final model."""
    overwrite: bool = False
    """Replace a run that is already in `output`."""
    resume: str | None = None
    """Go on from a checkpoint's folder; alone, from the newest whole one in `output`; auto: from that one, or from the
    start where there is none yet."""
    eval_data: str | None = None
    """Held-out rows, scored before training, every `eval_every` steps and at the end."""
    eval_every: int = 0
    """Steps between evaluations on `eval_data`; 0: only before and after."""
    save_every: int = 50
    """Steps between checkpoints; 0: one at the end alone, whatever ends the run."""
    keep_last: int = 2
    """Checkpoints that are kept, the newest ones; 0: all."""
    keep_best: bool = False
    """Save after the evaluation with the best reward on `eval_data` too, and keep that one."""
    max_skipped: int = 3
    """Updates whose loss or gradient is not a number are left out; a step that ends with so many in a row ends it."""
    hang_timeout: float = 30.0
    """Minutes that a process waits for the others before the run ends with an error."""
    report_every: int = 10
    """Steps between refreshes of curves.png and completions.html."""

    def check_run(self) -> None:
        """Raise ValueError for settings that cannot be."""
        require(self.report_every >= 1, "report_every must be at least 1")
        steps = min(self.eval_every, self.save_every, self.keep_last)
        require(steps >= 0, "eval_every, save_every and keep_last must not be negative")
        require(self.max_skipped >= 1 and self.hang_timeout > 0, "max_skipped must be at least 1, hang_timeout above 0")
        require(not self.keep_best or self.eval_data is not None, "keep_best needs eval_data to tell which one is best")


CLIP = {"grpo": (0.2, 0.2), "dr_grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}


@dataclass(kw_only=True)
class Config(RunFlags, EngineFlags, PolicyFlags, RewardFlags, DataFlags):
    """Train a vision-language model by GRPO."""

    task: Literal["count", "math", "vqa"] = "count"
    """Prompt template and reward."""
    model: str = "Qwen/Qwen2.5-VL-3B-Instruct"
    """The policy to start from, and the KL reference: a folder in Hugging Face layout or a hub name."""
    seed: int = 0
    """Seed of the data order and of the sampling."""

    data_weights: tuple[float, ...] = ()
    """Shares of the prompts drawn from each of several data sets; by their numbers of rows when left out."""
    max_completion_length: int = 1024
    """Most sampled tokens; a completion that reaches it without a stop token is truncated."""
    overlong_buffer: int = 0
    """Last tokens before `max_completion_length` over which the overlong penalty falls from 0 to -1; 0: no penalty."""

    prompts_per_step: int = 32
    """P: prompts sampled for each step, over all processes."""
    prompts_per_update: int = 0
    """Prompts for each optimizer update, over all processes; 0: all P in one update."""
    num_generations: int = 8
    """G: completions of each prompt, the group its advantages are relative to."""
    num_iterations: int = 1
    """μ: passes over a step's completions."""
    temperature: float = 1.0
    """Sampling temperature; the trained log-probabilities are those of the tempered distribution too."""
    dynamic_sampling: bool = False
    """Draw further prompts in place of groups whose rewards are all equal (DAPO, arXiv:2503.14476, eq. 11)."""
    dynamic_sampling_rounds: int = 10
    """Most rounds of P prompts for one step of dynamic sampling."""

    loss_type: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"] = "grpo"
    """See `grpo_loss` and `token_weights`."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What advantages are divided by: the standard deviation of the group, of the batch, or nothing."""
    clip_low: float | None = None
    """ε_low: the ratio is clipped below 1 − ε_low; the loss type's own default when left out."""
    clip_high: float | None = None
    """ε_high: the ratio is clipped above 1 + ε_high; the loss type's own default when left out."""
    beta: float = 0.0
    """β: weight of the KL term to the starting model; 0 keeps no reference model."""
    old_logp: Literal["policy", "sampler"] = "policy"
    """π_old's log-probabilities: the trainer's (one more forward with several updates a step), or the sampler's."""
    importance_cap: float = 2.0
    """Truncation of the weight π_old / π_sampler that corrects the sampler's arithmetic; 0 leaves the weight out."""
    max_logp_difference: float = 0.1
    """The run stops when sampler and trainer differ by more nats a token on average; 0: never."""

    epochs: int = 1
    """Passes over the training rows."""
    max_steps: int = 0
    """Steps to take whatever `epochs` says; 0: as many as the epochs need."""

    def __post_init__(self) -> None:
        self.check_run()
        self.check_data()
        self.check_rewards()
        self.check_policy()
        self.check_engine()
        require(self.num_generations >= 2, "num_generations must be at least 2: an advantage is relative to a group")
        require(self.temperature > 0, "temperature must be above 0: a group of equal completions teaches nothing")
        self.prompts_per_update = self.prompts_per_update or self.prompts_per_step
        step, part = self.prompts_per_step, self.prompts_per_update
        require(step % part == 0, f"prompts_per_update ({part}) must divide prompts_per_step ({step})")
        sizes = ("max_completion_length", "num_iterations", "epochs", "dynamic_sampling_rounds", "prompts_per_step")
        for name in sizes:
            require(getattr(self, name) >= 1, f"{name} must be at least 1")
        for name in ["seed", "max_steps", "prompts_per_update", "beta", "importance_cap", "max_logp_difference"]:
            require(getattr(self, name) >= 0, f"{name} must not be negative")
        require(
            0 <= self.overlong_buffer <= self.max_completion_length, "overlong_buffer exceeds max_completion_length"
        )
        require(all(weight > 0 for weight in self.data_weights), "data_weights must be above 0")
        low, high = CLIP[self.loss_type]
        self.clip_low = low if self.clip_low is None else self.clip_low
        self.clip_high = high if self.clip_high is None else self.clip_high
        require(
            0 <= self.clip_low <= 1 and self.clip_high >= 0, "clip_low must be between 0 and 1, clip_high at least 0"
        )

    @property
    def updates_per_step(self) -> int:
        return self.num_iterations * self.prompts_per_step // self.prompts_per_update
