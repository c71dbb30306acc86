"""Print how to train a model on the GPUs that you have, without a GPU: `./run.sh fits --model 7b --gpus 2 --memory 80`.

Each method is planned as a run plans it when it starts; docs/log.md compares such plans with measurements.
"""

import shlex
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import config
from apps.bench.speed import model_shape
from apps.demo.tiny import byte_tokenizer
from common import cli
from common.environments import ENVIRONMENTS
from common.errors import UserError, find_entry, require
from data import prompt_template
from grpo import resolve_loss
from policy.base_files import reading
from policy.memory import CUDA_GIB, GIB, MAX_MICRO_BATCH_TOKENS, GPUs, Plan, plan
from policy.model import empty_policy, read_config
from rewards import get_task
from rollout import ENGINES, EngineEntry

MODELS = {size.lower(): f"Qwen/Qwen2.5-VL-{size}-Instruct" for size in ("3B", "7B", "32B")}
MODELS["30b"] = "Qwen/Qwen3-VL-30B-A3B-Instruct"
METHODS: dict[str, dict[str, Any]] = {  # ways to train, and their flags
    "full": {},
    "full, moments in host memory": {"offload": ("optimizer",)},
    "LoRA": {"lora_rank": 64},
    "LoRA, 4-bit": {"lora_rank": 64, "load_in_4bit": True},
}
OWN = ("gpus", "memory")  # flags that grpo.py does not have
GIB_PER_GB = 0.99  # an H100 of 80 GB has 79.2 GiB, an H200 of 141 GB 139.8


@dataclass(kw_only=True)
class Config(config.Config):
    """Print how a model can be trained on these GPUs, with the commands. Flags of grpo.py may be given, too."""

    gpus: int = 1
    """Number of GPUs, all of one machine. For several machines, see docs/cluster.md."""
    memory: float = 80.0
    """Memory of each GPU in GB, as in its name."""
    model: str = "3b"
    """3b, 7b or 32b (a Qwen2.5-VL of this size), 30b (Qwen3-VL-30B-A3B), a folder, or a hub name, of which only
    config.json is read."""
    data: str = "train.jsonl"
    """Data set in the commands."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model = self.model.lower() if self.model.lower() in MODELS else self.model
        one_machine = 1 <= self.gpus <= 8 and 1 <= self.memory <= 1000
        require(one_machine, "gpus must be from 1 to 8, all of one machine, and memory from 1 to 1000, the GB of each")
        require(self.gpus % self.tensor_parallel == 0, "tensor_parallel must divide gpus")


def plans(cfg: Config) -> list[tuple[str, Config, dict]]:
    """Return each method, its flags, with the least `tensor_parallel` that fits, and its plan; the best first."""
    shape = model_shape(cfg.model, byte_tokenizer()) if cfg.model in MODELS else read_config(cfg.model)
    gpus, found = GPUs(cfg.memory * GIB_PER_GB * GIB, cfg.gpus), []
    shared = [n for n in (2, 4, 8) if n > cfg.tensor_parallel and cfg.gpus % n == 0 and cfg.oversample == 1]
    for method, flags in METHODS.items():
        try:
            changed = replace(cfg, **flags)
        except ValueError as error:  # such as --train_router with an adapter
            found.append((method, cfg, {"problem": str(error), "sampler": 0.0}))
            continue
        with reading(shape.name_or_path, "config.json"):
            policy = empty_policy(shape, changed)
            for n in (cfg.tensor_parallel, *shared):
                changed = replace(cfg, **flags, tensor_parallel=n)
                row = estimate(plan(policy, changed, gpus), sampler_of(cfg).needs_copy)
                if not row["problem"]:
                    break
        found.append((method, changed, row))
    return sorted(found, key=lambda each: (bool(each[2]["problem"]), not each[2]["sampler"]))


def estimate(planned: Plan, needs_copy: bool) -> dict[str, Any]:
    """Return why the run does not fit, the size of its micro-batches, and GiB by part.

    `needs_copy`: whether the sampler takes a copy of the weights where there is room. "peak" is the most that is used
    at a time. If micro-batches fill the memory, it is nearly all of it.
    """
    cfg, gpus, has_copy = planned.cfg, planned.gpus, needs_copy and planned.has_room
    sampler = planned.sampler if has_copy else 0.0
    in_use = CUDA_GIB * GIB + gpus.used_by_others
    awake = planned.stays_awake(gpus.size - in_use - sampler)
    held = in_use + planned.weights + planned.reference + (sampler if awake else 0.0)
    left = planned.left(min(cfg.gpu_memory * GIB or gpus.size, gpus.size), held)
    layers = planned.num_checkpointed(left)
    most = int(planned.max_tokens(layers, left))
    tokens = cfg.micro_batch_tokens or max(0, min(most, MAX_MICRO_BATCH_TOKENS))
    try:
        planned.check(needs_copy=has_copy)
        planned.check_longest(layers, most)
        problem = "" if tokens <= most else f"--micro_batch_tokens {tokens}: there is room for {max(0, most)}"
    except UserError as error:
        problem = str(error)
    activations = tokens * planned.token_bytes[layers] + planned.expert_bytes[layers]
    whole = planned.unsharded if left - activations >= planned.unsharded else 0.0  # see `choose_micro_batch_size`
    update = held + planned.moments + planned.gradients + planned.logits + planned.gathered + activations + whole
    parts = {name: getattr(planned, name) for name in ("weights", "reference", "moments", "gradients")} | {
        "activations": activations,
        "logits and gathered layers": planned.logits + planned.gathered + whole,
        "sampler": sampler,
        "peak": max(update, in_use + planned.resting + sampler),
    }
    sizes = {name: round(size / GIB, 1) for name, size in parts.items()}
    return {"problem": problem, "micro-batch tokens": tokens} | sizes


def command(cfg: Config) -> str:
    """Return the command that trains with the flags `cfg`."""
    flags: dict[str, Any] = {"task": cfg.task, "model": MODELS.get(cfg.model, cfg.model), "data": cfg.data}
    defaults = {field.name: field.default for field in fields(cfg)} | {"prompts_per_update": cfg.prompts_per_step}
    changed = {name: value for name, value in asdict(cfg).items() if value != defaults[name] and name not in OWN}
    flags |= {name: [*v] if isinstance(v, tuple) else v for name, v in changed.items() if name not in flags}
    launcher = f"torchrun --standalone --nproc_per_node {cfg.gpus}" if cfg.gpus > 1 else "python"
    return f".venv/bin/{launcher} grpo.py {shlex.join(cli.as_arguments(flags))}"


def sampler_of(cfg: Config) -> EngineEntry:
    """Return the sampler of a run with the flags `cfg` on GPUs that have room for it."""
    return find_entry("engine", "vllm" if cfg.engine == "auto" else cfg.engine, ENGINES)


def main(cfg: Config) -> None:
    """Print the plans. Raises UserError for what grpo.py refuses, too."""
    get_task(cfg.task)
    prompt_template(cfg.task, cfg.template)
    resolve_loss(replace(cfg))
    if sampler_of(cfg).uses_trainer and cfg.gpus > 1:
        raise UserError(f"--engine {cfg.engine} works in one process only: leave it out, or set --gpus 1")
    if cfg.has_adapter or cfg.offload:
        raise UserError("leave out --lora_rank, --adapter and --offload, which fits tries itself")
    if cfg.env:
        find_entry("env", cfg.env, ENVIRONMENTS)
    for method, flags, row in plans(cfg):
        if row["problem"]:
            print(f"{method}: does not fit: {row['problem']}\n")
            continue
        sizes = ", ".join(f"{name} {size}" for name, size in row.items() if isinstance(size, float) and size)
        host = f"; {2 * row['gradients'] * cfg.gpus:.0f} in host memory" if flags.offload else ""
        is_fast = row["sampler"] and sampler_of(cfg).title != "transformers"
        sampler = "" if is_fast else ", no vLLM: transformers samples, which is several times slower"
        print(f"{method}: fits, with micro-batches of {row['micro-batch tokens']} tokens{sampler}\n")
        print(f"    {command(flags)}\n\n  GiB of each GPU's {cfg.memory * GIB_PER_GB:.1f}: {sizes}{host}\n")


if __name__ == "__main__":
    cli.launch("apps.fits")
