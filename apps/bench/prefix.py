"""Measure the forward and backward passes with shared prompts, against the same model with every sequence whole.

    python apps/bench/prefix.py --shape 4b                  # Qwen3.5-4B, images of 448x448 and 896x896 pixels, one GPU

Both ways train on the same completions, in micro-batches of the same number of tokens, without padding. Whole sequences
repeat the prompt for each of its completions. Weights and image features are random.
"""

import pathlib
import sys
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]
import speed

from common import cli, console, distributed
from common.records import Completion, Group, Prompt
from common.row_copies import RowCopies
from config import Config as TrainingConfig
from data import encode_prompts, load_processor, load_samples
from packing import PackedBatch, Segments, pack, pack_groups
from policy.families import language_model
from policy.memory import choose_micro_batch_size
from policy.model import Policy, compute_dtype, load_policy
from policy.sharding import apply_fsdp, reduce_gradients, take_gradients, unsharded


@dataclass
class Config:
    """Measure what sharing prompts saves on this machine."""

    shape: speed.Shape = "4b"
    """Shape of the model; see apps/bench/speed.py."""
    sides: tuple[int, ...] = (448, 896)
    """Sides of the square images in pixels."""
    prompts: int = 8
    """Number of prompts."""
    generations: int = 8
    """Number of completions per prompt."""
    tokens: int = 512
    """Number of tokens per completion."""
    rounds: int = 3
    """Number of measured rounds, in each of which both ways take turns, after one round to compile."""
    micro_batch_tokens: int = 0
    """Maximum number of tokens per micro-batch; 0: as in training."""
    folder: str = "runs/bench"
    """Folder for the model and the data."""

    def __post_init__(self) -> None:
        counts = (self.rounds, self.prompts, self.generations, self.tokens, len(self.sides), *self.sides)
        speed.check_config(self.shape, (), *counts)


def whole_sequences(groups: list[Group], budget: int) -> list[PackedBatch]:
    """Pack each prompt with each of its completions as a sequence of its own, in batches of at most `budget` tokens."""
    pairs = [(group.prompt, completion.ids) for group in groups for completion in group.completions]
    batches: list[list[tuple[Prompt, Tensor]]] = [[]]
    for prompt, completion in pairs:
        if sum(len(p.ids) + len(c) for p, c in batches[-1]) + len(prompt.ids) + len(completion) > budget:
            batches.append([])
        batches[-1].append((prompt, completion))
    return [_pack_whole(batch) for batch in batches if batch]


def _pack_whole(pairs: list[tuple[Prompt, Tensor]]) -> PackedBatch:
    """Pack sequences as prompts without completions, and train on the tokens of their `completion` part."""
    groups, predict_from, start = [], [], 0
    for prompt, completion in pairs:
        ids = torch.cat([prompt.ids, completion])
        following = int(prompt.position_ids.max()) + 1 + torch.arange(len(completion))
        position_ids = torch.cat([prompt.position_ids, following.expand(len(prompt.position_ids), -1)], dim=1)
        groups.append(Group(replace(prompt, ids=ids, position_ids=position_ids), [Completion(ids[:1], torch.zeros(1))]))
        predict_from.append(start + len(prompt.ids) - 1 + torch.arange(len(completion)))
        start += len(ids)
    batch = pack(groups)  # the completions of one token are cut off again
    segments, n, none = batch.segments, len(pairs), torch.empty(0, dtype=torch.long)
    lengths = segments.q_lens[:n]
    keys = RowCopies.plan(torch.arange(start), start)
    whole = Segments(keys, segments.cu_q[: n + 1], segments.cu_k[: n + 1], lengths, lengths, none)
    return replace(
        batch,
        input_ids=batch.input_ids[:, :start],
        position_ids=batch.position_ids[..., :start],
        segments=whole,
        predict_from=RowCopies.plan(torch.cat(predict_from), start),
        targets=torch.cat([completion for _, completion in pairs]),
    )


def passes(policy: Policy, batches: list[PackedBatch], device: torch.device) -> tuple[float, Tensor]:
    """Run forward and backward over `batches`; return the seconds that they take, and the log-probabilities."""
    policy.zero_grad()
    _wait(device)
    started, logps = time.perf_counter(), []
    with unsharded(policy):
        for batch in batches:
            reduce_gradients(policy, now=False)
            logp, _ = policy(batch.to(device))
            logp.mean().backward()
            logps.append(logp.detach())
        take_gradients(policy)
    _wait(device)
    return time.perf_counter() - started, torch.cat(logps)


def peak_gib(device: torch.device) -> float:
    """Return the most GPU memory in use, in GiB, since this was last asked; 0 without a GPU."""
    if device.type != "cuda":
        return 0.0
    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return peak


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(cfg: Config, policy: Policy, side: int, budget: int, device: torch.device) -> None:
    folder = pathlib.Path(cfg.folder)
    processor = load_processor(str(folder / cfg.shape), "count")
    rows = speed.make_data(folder, side, cfg.prompts)
    prompts = encode_prompts(load_samples(rows, "count", processor=processor)[: cfg.prompts], processor)
    width, g = language_model(policy.model).config.hidden_size, torch.Generator().manual_seed(0)
    for prompt in prompts:
        prompt.features = torch.randn(len(prompt.image_indices), width, generator=g)
    sizes = (cfg.generations, cfg.tokens)
    groups = [
        Group(prompt, [Completion(ids, torch.zeros(cfg.tokens)) for ids in torch.randint(0, 250, sizes, generator=g)])
        for prompt in prompts
    ]
    ways = {"shared": pack_groups(groups, budget), "whole": whole_sequences(groups, budget)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    peaks = dict.fromkeys(ways, 0.0)
    for _ in console.progress(range(cfg.rounds + 1), desc=f"{side}x{side}", unit="round"):
        logps = {}
        for name, batches in ways.items():
            taken, logps[name] = passes(policy, batches, device)
            seconds[name].append(taken)
            peaks[name] = peak_gib(device)
    difference = (logps["shared"] - logps["whole"]).abs().mean().item()
    best = {name: min(times[1:]) for name, times in seconds.items()}
    tokens = {name: sum(batch.input_ids.shape[1] for batch in batches) for name, batches in ways.items()}
    for name, times in seconds.items():
        listed = ", ".join(f"{t:.2f}" for t in times[1:])
        work = f"{tokens[name]} tokens in {len(ways[name])} micro-batches"
        print(f"{side}x{side} {name}: {work}, {listed} s, {peaks[name]:.1f} GiB")
    ratio = best["whole"] / best["shared"]
    print(f"{side}x{side} ratio {ratio:.2f}, mean difference {difference:.4f} nats", flush=True)


def main(cfg: Config) -> None:
    device = distributed.start()
    folder = pathlib.Path(cfg.folder) / cfg.shape
    speed.make_model(folder, cfg.shape)
    flags = TrainingConfig(model=str(folder), data="unused", output="unused", micro_batch_tokens=cfg.micro_batch_tokens)
    policy = apply_fsdp(load_policy(str(folder), flags, device), device, compute_dtype(flags.dtype, device))
    budget = choose_micro_batch_size(policy, None, flags, max(cfg.sides) ** 2 // 784 + cfg.tokens + 100, device)
    for side in cfg.sides:
        measure(cfg, policy, side, budget, device)


if __name__ == "__main__":
    cli.run(main, cli.parse(Config))
