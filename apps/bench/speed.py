"""Measure the speed of the real `train_step` on fixed workloads, phase by phase, and compare it with hardware limits.

    python apps/bench/speed.py                                   # W1, W1-nokl, W1-long and W1-short on one GPU
    python apps/bench/speed.py --peer trl                        # the same, then TRL on W1; likewise verl, lesson
    torchrun --nproc_per_node 4 apps/bench/speed.py --workloads W1 --prompts 128      # the same work per GPU on four

The results are written to docs/results/.

W1: a Qwen2.5-VL-3B model with random weights, full fine-tuning with float32 master weights, 32 prompts with 8
completions of exactly 512 tokens each, one 448x448 noise image per prompt, and beta 0.01. W1-nokl has beta 0, W1-long
has 896x896 images, and W1-short has completions of 128 tokens. `small`, for small GPUs, has 504x504 images and
completions of 256 tokens; with `--prompts 8`, it produces the figures in docs/adapters.md. Rewards are coin flips.

The weights of the shape `30b`, a mixture of experts, are on no disk: see random_weights.py, and docs/cluster.md for
its commands.

The limit of a phase is the time for its compute at `MATMUL` FLOP/s or the time for its memory traffic at `BANDWIDTH`
bytes/s, whichever is longer. Both rates were measured on one H200, with a bare matrix product and a bare copy.
"""

import contextlib
import datetime
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3VLMoeConfig,
)

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
import grpo
from apps.bench.random_weights import use_random_weights
from apps.demo import tiny
from common import cli, console, distributed, errors, files
from data import load_split
from policy.families import attention_windows, experts_per_token, head_dim, language_model, routed_experts
from policy.model import Policy
from training.loop import freeze_garbage_collector
from training.prompt_stream import PromptStream
from training.run import Run

MATMUL = 780e12  # FLOP/s of a bare bfloat16 product of two 8192x8192 matrices on one H200
BANDWIDTH = 4.3e12  # bytes/s of a bare copy on one H200, counting both reads and writes
Shape = Literal["3b", "7b", "32b", "4b", "30b", "tiny", "tiny_moe"]
SHAPES: dict[str, dict[str, Any]] = {
    "3b": dict(hidden=2048, layers=36, heads=16, kv=2, ffn=11008, vocab=151936, tied=True),
    "7b": dict(hidden=3584, layers=28, heads=28, kv=4, ffn=18944, vocab=152064, tied=False),
    "32b": dict(hidden=5120, layers=64, heads=40, kv=8, ffn=27648, vocab=152064, tied=False),
    "4b": dict(hidden=2560, layers=32, heads=16, kv=4, ffn=9216, vocab=248320, tied=True),
    "30b": dict(hidden=2048, layers=48, heads=32, kv=4, ffn=768, vocab=151936, tied=False, head=128, experts=(8, 128)),
    "tiny": dict(hidden=128, layers=2, heads=4, kv=2, ffn=256, vocab=512, tied=True),
    "tiny_moe": dict(hidden=128, layers=2, heads=4, kv=2, ffn=64, vocab=512, tied=False, head=32, experts=(2, 8)),
}
TINY = ("tiny", "tiny_moe")
PEERS = ("trl", "verl", "lesson")
WORKLOADS = {
    "W1": dict(side=448, tokens=512, beta=0.01),
    "W1-nokl": dict(side=448, tokens=512, beta=0.0),
    "W1-long": dict(side=896, tokens=512, beta=0.01),
    "W1-short": dict(side=448, tokens=128, beta=0.01),
    "small": dict(side=504, tokens=256, beta=0.01),
}


@dataclass
class BenchFlags:
    """The settings of every bench of training steps."""

    shape: Shape = "3b"
    """Shape of the model: a Qwen2.5-VL of this size, or a tiny one; 4b: Qwen3.5-4B, with two layers in its
    vision tower; 30b: Qwen3-VL-30B-A3B, or tiny_moe, both with weights that are sharded as they are made."""
    steps: int = 2
    """Number of measured steps of each kind, after those that warm up."""
    prompts: int = 32
    """Number of prompts per step, over all processes."""
    generations: int = 8
    """Number of completions per prompt."""
    folder: str = "runs/bench"
    """Folder for the model, the data and the runs."""
    results: str = str(HERE.parents[1] / "docs" / "results")
    """Folder for the JSON file with the results, which is named after the GPU and the time."""
    flags: tuple[str, ...] = ()
    """Further flags for grpo.py, as NAME=VALUE."""

    def __post_init__(self) -> None:
        """Raise ValueError for bad settings; without a GPU, for any `shape` not in TINY: others need hours there."""
        known = {field.name for field in fields(grpo.Config)}
        for flag in self.flags:
            if "=" not in flag or flag.split("=")[0] not in known:
                raise ValueError(f"flags: {flag!r} must be NAME=VALUE, with the name of a flag of grpo.py")
        if min(self.steps, self.prompts, self.generations) < 1:
            raise ValueError("steps, prompts and generations must be at least 1")
        if "experts" in SHAPES[self.shape] and parse_flags(self.flags).get("load_in_4bit"):
            raise ValueError(f"flags: load_in_4bit needs saved weights, and {self.shape} has none: leave it out")
        if self.shape not in TINY and not torch.cuda.is_available():
            tiny_shape = "tiny_moe" if "experts" in SHAPES[self.shape] else "tiny"
            raise ValueError(f"shape: {self.shape} needs a GPU, and there is none: use --shape {tiny_shape}")


@dataclass
class Config(BenchFlags):
    """Measure the speed of training steps on this machine."""

    workloads: tuple[Literal["W1", "W1-nokl", "W1-long", "W1-short", "small"], ...] = tuple(WORKLOADS)[:4]
    """Workloads to measure."""
    peer: str | None = None
    """Another trainer to run on W1 afterwards: trl (peer_trl.py), verl (peer_verl.py), lesson (peer_lesson.py,
    the one file at speed), or a script. The script gets the model's folder, --steps and --prompts, and must print "STEP
    seconds GiB" after each step, and may add its parts as JSON."""
    checkpoint: bool = False
    """After the last workload, also save a checkpoint, and measure a training step while it is written."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.workloads:
            raise ValueError("workloads: name at least one")
        self.training_config("rows")
        if self.peer and (self.generations != 8 or "W1" not in self.workloads):
            raise ValueError("peer: the other trainer runs W1 with 8 completions per prompt")
        if self.peer in PEERS and not importlib.util.find_spec(self.peer):
            raise ValueError(f"peer: {self.peer} is not installed here: see docs/speed.md")
        if self.peer and self.peer not in PEERS and not pathlib.Path(self.peer).is_file():
            raise ValueError(f"peer: there is no script {self.peer!r}: give one, trl, verl or lesson")

    def training_config(self, data: str) -> grpo.Config:
        """Return the settings of a run that has room for all workloads. Raises ValueError for bad `flags`."""
        workloads = [WORKLOADS[name] for name in self.workloads]
        return training_config(
            self,
            data,
            max_completion_length=max(work["tokens"] for work in workloads),
            max_prompt_length=2048 if any(work["side"] > 504 for work in workloads) else 512,
            beta=max(work["beta"] for work in workloads),
            max_steps=len(workloads) * (self.steps + 1) + 1,  # with a warm-up, and that of --checkpoint
            report_every=1000,
        )


def model_shape(shape: str, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Return the configuration of a model of size `shape`, with the special tokens of the byte tokenizer."""
    d, small = SHAPES[shape], tiny.build_model(tokenizer, seed=0).config.to_dict()
    text = dict(
        hidden_size=d["hidden"],
        num_hidden_layers=d["layers"],
        num_attention_heads=d["heads"],
        num_key_value_heads=d["kv"],
        vocab_size=d["vocab"],
        tie_word_embeddings=d["tied"],  # vLLM reads it here, transformers one level up
    )
    if shape == "4b":
        return qwen3_5_shape(d, small, text)
    if "experts" in d:
        return qwen3_vl_moe_shape(d, small, text)
    half_head = d["hidden"] // d["heads"] // 2
    temporal = half_head // 4
    height = (half_head - temporal) // 2
    mrope_section = [temporal, height, half_head - temporal - height]
    text |= dict(intermediate_size=d["ffn"], initializer_range=0.02, layer_types=["full_attention"] * d["layers"])
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": mrope_section}
    vision = dict(out_hidden_size=d["hidden"], initializer_range=0.02)
    if shape != "tiny":
        full_attention = [7, 15, 23, 31]  # the other blocks attend within windows
        vision |= dict(depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16)
        vision["fullatt_block_indexes"] = full_attention
    text, vision = small["text_config"] | text, small["vision_config"] | vision
    changed = {"text_config": text, "vision_config": vision, "tie_word_embeddings": d["tied"]}
    return Qwen2_5_VLConfig.from_dict(small | changed)


def qwen3_5_shape(d: dict[str, Any], small: dict, text: dict) -> PreTrainedConfig:
    """Return the configuration of a Qwen3.5 model of the size `d`, with the tokens of model `small`.

    `text` begins its decoder's. Its vision tower has two layers only.
    """
    text |= {name: small["text_config"][name] for name in ("bos_token_id", "eos_token_id")}
    text |= dict(max_position_embeddings=4096)
    rotation = {"rope_type": "default", "mrope_interleaved": True, "rope_theta": 1e7, "mrope_section": [11, 11, 10]}
    vision = dict(depth=2, patch_size=14, out_hidden_size=d["hidden"])
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(d["layers"])]
    text |= dict(head_dim=256, intermediate_size=d["ffn"], layer_types=kinds, linear_conv_kernel_dim=4)
    text |= dict(linear_num_key_heads=16, linear_num_value_heads=32)
    text |= dict(linear_key_head_dim=128, linear_value_head_dim=128)
    tokens = {name: small[name] for name in small if name.endswith("token_id")}
    text["rope_parameters"] = rotation | {"partial_rotary_factor": 0.25}
    return Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=d["tied"], **tokens)


def qwen3_vl_moe_shape(d: dict[str, Any], small: dict, text: dict) -> PreTrainedConfig:
    """Return the configuration of a Qwen3-VL mixture of experts of the size `d`, with the tokens of model `small`.

    `text` begins its decoder's. The tower of 30b is the real one: its sizes are the defaults of transformers.
    """
    chosen, experts = d["experts"]
    text |= {name: small["text_config"][name] for name in ("bos_token_id", "eos_token_id")}
    text |= dict(head_dim=d["head"], moe_intermediate_size=d["ffn"], intermediate_size=3 * d["hidden"])
    text |= dict(num_experts=experts, num_experts_per_tok=chosen, norm_topk_prob=True, max_position_embeddings=262144)
    height = 5 * d["head"] // 32
    rotation = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True}
    text["rope_parameters"] = rotation | {"mrope_section": [d["head"] // 2 - 2 * height, height, height]}
    vision: dict[str, Any] = dict(out_hidden_size=d["hidden"])
    if d["hidden"] < 1024:
        vision |= dict(depth=3, hidden_size=64, num_heads=4, intermediate_size=96, num_position_embeddings=64)
        vision["deepstack_visual_indexes"] = [0, 1]
    tokens = {name: small[name] for name in small if name.endswith("token_id")}
    return Qwen3VLMoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=d["tied"], **tokens)


def make_model(folder: pathlib.Path, shape: str) -> None:
    """Write a random bfloat16 model and the byte tokenizer to `folder`, unless it already has a model.

    A shape with experts is written without weights, which `use_random_weights` makes.
    """
    if (folder / "config.json").is_file():
        return
    has_weights = "experts" not in SHAPES[shape]
    tokenizer = tiny.byte_tokenizer()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta" if not has_weights else "cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForImageTextToText.from_config(model_shape(shape, tokenizer))
    torch.set_default_dtype(torch.float32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    tiny.save(model, tokenizer, folder, has_weights)
    del model
    torch.cuda.empty_cache()


def make_data(folder: pathlib.Path, side: int, rows: int) -> str:
    """Write questions about noise images as EasyR1 JSONL, unless a file with enough rows exists; return its path."""
    path = folder / f"noise-{side}" / "data.jsonl"
    if not path.is_file() or len(path.read_text().splitlines()) < rows:
        path.parent.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(0)
        lines = []
        for i in range(rows):
            Image.fromarray(rng.integers(0, 255, (side, side, 3), dtype=np.uint8)).save(path.parent / f"{i}.png")
            row = {"prompt": f"<image>How many shapes? {i}", "answer": "1", "images": [f"{i}.png"]}
            lines.append(json.dumps(row) + "\n")
        path.write_text("".join(lines))
    return str(path)


def limits(
    config: PreTrainedConfig, cfg: Config, side: int, tokens: int, beta: float, policy: Policy
) -> dict[str, float]:
    """Return the seconds that each phase would take at the hardware limits, calculated from the shapes alone.

    With several GPUs, each GPU has an equal fraction of the prompts. `policy` tells which weights are trained, and how
    many of them this GPU holds.
    """
    decoder, engine = list(language_model(policy.model).parameters()), parse_flags(cfg.flags).get("tensor_parallel", 1)
    trained = sum(p.numel() for p in decoder if p.requires_grad) / sum(p.numel() for p in decoder)
    held_here = sum(distributed.local_tensor(p).numel() for p in decoder if p.requires_grad)
    t = config.text_config
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    held = sum(parameter.numel() for parameter in language_model(model).layers.parameters())
    idle = sum(p.numel() - p[0].numel() * experts_per_token(t) for p in routed_experts(model).values())
    layers = held - idle  # what a token goes through; a step of the rollout reads every expert
    num_layers, head = len(attention_windows(t)), head_dim(t)  # its models have no windows
    lm_head = t.hidden_size * t.vocab_size
    factor = config.vision_config.patch_size * config.vision_config.spatial_merge_size  # pixels: a token's side
    prompt, prompts = (side // factor) ** 2 + 90, cfg.prompts / distributed.world_size()
    completions = prompts * cfg.generations * tokens
    packed = prompts * prompt + completions
    # A completion token attends to its prompt and, on average, to half of its completion. `scores` is the number of
    # query-key pairs times the width of the queries; each unit costs four operations.
    width = num_layers * head * t.num_attention_heads
    scores = width * (completions * (prompt + tokens / 2) + prompts * prompt * prompt / 2)
    forward = 2 * (layers * packed + lm_head * completions) + 4 * scores
    cache = 2 * num_layers * t.num_key_value_heads * head * 2  # bytes per token
    read = tokens * (2 * (held + lm_head) / engine + prompts * cfg.generations * cache * (prompt + tokens / 2))
    return {
        "rollout": max(read / BANDWIDTH, 2 * (layers + lm_head) * completions / MATMUL),
        "reference": forward / MATMUL if beta else 0.0,
        "train": (2 + trained) * forward / MATMUL,
        "optimizer": 28 * held_here / BANDWIDTH,
    }


def parse_flags(flags: tuple[str, ...]) -> dict[str, Any]:
    """Return settings of grpo.py, given as NAME=VALUE; a value is JSON or, if it is not, a text."""
    settings: dict[str, Any] = dict(flag.split("=", 1) for flag in flags)
    for name, value in settings.items():
        with contextlib.suppress(ValueError):
            settings[name] = json.loads(value)
    return settings


def training_config(cfg: BenchFlags, data: str, **settings: Any) -> grpo.Config:
    """Return the settings of a run on the rows `data`, with coin flips as rewards.

    Raises ValueError if `cfg.flags`, which override `settings`, have a bad value.
    """
    folder = pathlib.Path(cfg.folder)
    common = dict(
        model=str(folder / cfg.shape),
        data=data,
        output=str(folder / "run"),
        overwrite=True,
        task="count",
        reward=("count=0", f"{HERE}/coin.py:coin"),
        prompts_per_step=cfg.prompts,
        num_generations=cfg.generations,
    )
    flags = parse_flags(cfg.flags)
    for field in fields(grpo.Config):
        if isinstance(field.default, bool) and not isinstance(flags.get(field.name, True), bool):
            raise ValueError(f"flags: {field.name} must be true or false")
        if isinstance(field.default, tuple) and isinstance(value := flags.get(field.name), str):
            flags[field.name] = tuple(value.split(","))
    try:
        return grpo.Config(**(common | settings | flags))
    except TypeError as error:
        raise ValueError(f"flags: a value has the wrong type ({error})") from None


def prepare(folder: pathlib.Path, shape: Shape, sides: set[int], rows: int) -> dict[int, str]:
    """Make the model and the rows in `folder`, unless they exist; return the rows' path for each side of the images.

    Call this on every process: the first makes what the others then find.
    """
    distributed.start()
    if "experts" in SHAPES[shape]:
        use_random_weights()
    for is_my_turn in (console.is_main(), not console.is_main()):
        if is_my_turn:
            make_model(folder / shape, shape)
            data = {side: make_data(folder, side, rows) for side in sorted(sides)}
        distributed.barrier()
    return data


def measure(cfg: Config) -> dict[str, dict]:
    """Run `cfg.steps` steps of each workload, one after another in one process, and return their mean metrics."""
    folder = pathlib.Path(cfg.folder)
    workloads = {name: WORKLOADS[name] for name in cfg.workloads}
    data = prepare(folder, cfg.shape, {work["side"] for work in workloads.values()}, cfg.prompts * (cfg.steps + 1))
    run = grpo.set_up(cfg.training_config(data[WORKLOADS[cfg.workloads[0]]["side"]]))
    collector, engine = run.collector, run.collector.engine
    engine.stop = engine.stop[:0]  # without stop tokens, every completion has exactly `tokens` tokens
    results = {}
    for name, work in workloads.items():
        samples = load_split(run.cfg, data[work["side"]], "count", collector.stream.processor)
        run.cfg.beta, run.cfg.max_completion_length = work["beta"], work["tokens"]
        processor, teacher = collector.stream.processor, collector.stream.teacher
        collector.stream, collector.position = PromptStream(samples, processor, run.cfg.seed, teacher=teacher), 0
        measured = [take_step(run, f"{name} step {number}") for number in range(cfg.steps + 1)]
        others = ("memory_gib", "memory_flushes", "mfu", "idle/rollout")
        keys = [key for key in measured[-1] if "time" in key or "difference" in key or key in others]
        means = {key: float(np.mean([metrics[key] for metrics in measured[1:]])) for key in keys}
        means = {key: value for key, value in means.items() if np.isfinite(value)}
        means["memory_gib"] = max(metrics["memory_gib"] for metrics in measured)  # including the warm-up step
        config = AutoConfig.from_pretrained(folder / cfg.shape)
        means["limits"] = limits(config, cfg, work["side"], work["tokens"], work["beta"], run.policy)
        means["of_the_limit"] = means["step_time"] / sum(means["limits"].values())
        means["completions_per_second"] = cfg.prompts * cfg.generations / means["step_time"]
        means["tokens_per_second"] = means["completions_per_second"] * work["tokens"]
        results[name] = means
    if cfg.checkpoint:
        results[name] |= measure_checkpoint(run)
    return results


def measure_checkpoint(run: Run) -> dict[str, float]:
    """Save a checkpoint and return its timings in seconds, its size in gigabytes, and its peak of host memory in GiB.

    The timings are: how long training waits, now and before the next optimizer step; how long the checkpoint takes to
    reach the disk; and how long a training step takes in the meantime.
    """
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to what is in use
    before, started = resident_gib("VmRSS"), time.perf_counter()
    run.loop.save(run)
    waited, folder = time.perf_counter() - started, pathlib.Path(run.cfg.output) / f"checkpoint-{run.step}"
    metrics = take_step(run, "step beside the checkpoint")
    if error := run.loop.checkpoints.wait():
        raise errors.RunStopped(f"the checkpoint was not written: {error}", 1)
    written = time.perf_counter() - started
    size = sum(path.stat().st_size for path in folder.iterdir()) / 1e9
    return {
        "save/waited": waited + metrics["time/optimizer"],
        "save/written": written,
        "save/step_beside": metrics["step_time"],
        "save/gb": size,
        "save/host_gib": resident_gib("VmHWM") - before,
    }


def resident_gib(name: str) -> float:
    """Return the host memory of this process in GiB: now (VmRSS) or at its peak (VmHWM)."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 2**20


def take_step(run: Run, label: str) -> dict[str, float]:
    """Take a training step, and begin the next one; print its times and return its metrics."""
    metrics = grpo.train_step(run)
    run.updater.end_step(run.collector.num_rounds)
    freeze_garbage_collector()
    run.step += 1
    run.collector.features.clear()  # so that every step computes the features of its images
    print_times(label, metrics)
    return metrics


def print_times(label: str, metrics: dict[str, float]) -> None:
    if console.is_main():
        print(f"{label}: " + "  ".join(f"{k} {v:.3f}" for k, v in metrics.items() if "time" in k), flush=True)


def show(results: dict[str, dict]) -> None:
    """Print a table with the seconds that each phase takes and, in brackets, the limit of the phase."""
    print(f"\n{'':28}" + "".join(f"{name:>20}" for name in results))
    keys = sorted({key for result in results.values() for key in result if key != "limits"})
    for key in keys:
        phase = key.removeprefix("time/")
        line = ""
        for result in results.values():
            limit = result["limits"].get(phase)
            line += f"{result.get(key, float('nan')):12.4f}" + (f" ({limit:.2f})" if limit else "").ljust(8)
        print(f"{key:28}{line}")


def provenance() -> dict[str, Any]:
    """Return what a result depends on: command, date, machine and versions."""
    return {
        "command": " ".join(sys.argv),
        "date": datetime.date.today().isoformat(),
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "gpus": distributed.world_size(),
        "torch": torch.__version__,
        "vllm": importlib.metadata.version("vllm") if importlib.util.find_spec("vllm") else None,
        "git_commit": files.git_commit(),
    }


def write_report(report: dict[str, Any], folder: str, name: str) -> None:
    """Write `report` to a JSON file in `folder`, named after `name`, the machine and the time."""
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    suffix = f"{report['machine'].replace(' ', '-').lower()}-{time.strftime('%Y%m%d-%H%M%S')}"
    (pathlib.Path(folder) / f"{name}-{suffix}.json").write_text(json.dumps(report, indent=1) + "\n")


def measure_peer(cfg: Config) -> dict[str, Any]:
    """Run the other trainer on W1, and return the seconds of its steps and of the parts of its last step."""
    model = str(pathlib.Path(cfg.folder) / cfg.shape)
    script = str(HERE / f"peer_{cfg.peer}.py") if cfg.peer in PEERS else cfg.peer
    command = [sys.executable, script, model, "--steps", str(cfg.steps + 1), "--prompts", str(cfg.prompts)]
    finished = subprocess.run(command, capture_output=True, text=True)
    print(finished.stdout[-3000:], finished.stderr[-1500:])
    steps = [line.split(maxsplit=3) for line in finished.stdout.splitlines() if line.startswith("STEP")]
    return {
        "name": cfg.peer,
        "steps": [float(step[1]) for step in steps],
        "gib": [float(step[2]) for step in steps],
        "parts": json.loads(steps[-1][3]) if steps and len(steps[-1]) > 3 else {},
        "exit_status": finished.returncode,
    }


def main(cfg: Config) -> None:
    peer = cfg.peer if os.environ.get("BENCH_PEER") != "no" else None
    if peer:  # measure this project in a subprocess, so that the GPU is empty when the other trainer starts
        ours = pathlib.Path(cfg.folder) / "ours"
        environment = os.environ | {"BENCH_PEER": "no"}
        command = [sys.executable, __file__, *sys.argv[1:], "--results", str(ours)]
        if status := subprocess.run(command, env=environment).returncode:
            raise errors.RunStopped(f"measuring this project failed (exit status {status}), see above", 1)
        results = json.loads(max(ours.glob("*.json"), key=os.path.getmtime).read_text())["workloads"]
    else:
        results = measure(cfg)
    report = provenance() | {"workloads": results}
    if peer:
        report["peer"] = measure_peer(cfg)
        seconds = report["peer"]["steps"]
        if len(seconds) > 1 and "W1" in results:  # the first step is the warm-up step, as in `measure`
            report["peer"]["ratio"] = float(np.mean(seconds[1:])) / results["W1"]["step_time"]
    if not console.is_main():
        return
    write_report(report, cfg.results, "speed")
    show(results)
    if "peer" in report:
        print(report["peer"])


if __name__ == "__main__":
    cli.run(main, cli.parse(Config))
