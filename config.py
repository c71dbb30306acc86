"""Every flag of a training run: those of the algorithm here, the others beside the code that reads them."""

from dataclasses import dataclass
from typing import Literal

from cli import need
from data import DataFlags
from model import PolicyFlags
from report import RunFlags
from rollout import EngineFlags
from scoring import RewardFlags

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
        need(self.num_generations >= 2, "num_generations must be at least 2: an advantage is relative to a group")
        need(self.temperature > 0, "temperature must be above 0: a group of equal completions teaches nothing")
        self.prompts_per_update = self.prompts_per_update or self.prompts_per_step
        step, part = self.prompts_per_step, self.prompts_per_update
        need(step % part == 0, f"prompts_per_update ({part}) must divide prompts_per_step ({step})")
        sizes = ("max_completion_length", "num_iterations", "epochs", "dynamic_sampling_rounds", "prompts_per_step")
        for name in sizes:
            need(getattr(self, name) >= 1, f"{name} must be at least 1")
        for name in ["seed", "max_steps", "prompts_per_update", "beta", "importance_cap", "max_logp_difference"]:
            need(getattr(self, name) >= 0, f"{name} must not be negative")
        need(0 <= self.overlong_buffer <= self.max_completion_length, "overlong_buffer exceeds max_completion_length")
        need(all(weight > 0 for weight in self.data_weights), "data_weights must be above 0")
        low, high = CLIP[self.loss_type]
        self.clip_low = low if self.clip_low is None else self.clip_low
        self.clip_high = high if self.clip_high is None else self.clip_high
        need(0 <= self.clip_low <= 1 and self.clip_high >= 0, "clip_low must be between 0 and 1, clip_high at least 0")

    @property
    def updates_per_step(self) -> int:
        return self.num_iterations * self.prompts_per_step // self.prompts_per_update
