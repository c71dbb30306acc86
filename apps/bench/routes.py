"""Measure how often sampler and trainer send a token to other experts, and how evenly the experts are loaded.

    torchrun --nproc_per_node 2 apps/bench/routes.py --prompts 8 --flags lora_rank=16 tensor_parallel=2     # two GPUs
    python tests/helpers/vllm_cpu.py apps/bench/routes.py --shape tiny_moe --prompts 2 --generations 2 --results runs \
        --flags compile=false lora_rank=4 vllm_memory=0.1                                   # vLLM's build for CPUs

The model and the rows are those of apps/bench/speed.py. vLLM samples completions as in a training step, and returns the
experts that it chose for each token that went through it: all but a completion's last one. The trainer's choices are
those of a forward pass without gradients over the same tokens, packed and compiled as in training. No step trains. The
results are written to docs/results/.

Shapes: N tokens, T tokens of a micro-batch, S of a prompt, L of a completion, M layers, E experts in a layer, k experts
per token.
"""

import importlib.util
import pathlib
import sys
import types
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
import speed

import grpo
import sampling.vllm_engine
from common import cli, console, distributed
from common.records import Group, ScoredGroup
from parts.families.routes import ROUTES, Tokens, keep_and_end, start_with_routes
from policy.batches import micro_batches, order_for_packing
from policy.families import routers
from policy.lora import without_dropout
from policy.sharding import unsharded
from sampling.vllm_loop import RequestLoop
from training.run import Run

Choices = list[tuple[Tensor, Tensor]]  # the trainer's experts in each layer and their weights, (T, k) each
Sums = dict[str, Tensor]  # over tokens


@dataclass
class Config(speed.BenchFlags):
    """Measure how often sampler and trainer choose other experts, and how evenly these are loaded."""

    shape: speed.Shape = "30b"
    """Shape of the model: 30b, Qwen3-VL-30B-A3B, or tiny_moe."""
    steps: int = 1
    """Number of steps whose completions are compared."""

    def __post_init__(self) -> None:
        if "experts" not in speed.SHAPES[self.shape]:
            raise ValueError(f"shape: {self.shape} has no experts: use 30b or, without a GPU, tiny_moe")
        super().__post_init__()
        settings = self.training_config("rows")
        if settings.engine != "vllm":
            raise ValueError(f"flags: engine={settings.engine} tells nobody which experts it takes: leave it out")
        if settings.env or settings.oversample > 1:
            raise ValueError("flags: env and oversample sample a completion in several requests: leave them out")
        if not importlib.util.find_spec("vllm"):
            raise ValueError("vLLM, which this measures, is not installed: pip install -r requirements-gpu.txt")

    @property
    def workload(self) -> dict[str, Any]:
        """Pictures and completions: those of W1 or, for a tiny model, those of `small`."""
        return speed.WORKLOADS["small" if self.shape in speed.TINY else "W1"]

    def training_config(self, data: str) -> grpo.Config:
        """Return the settings of a run that samples the workload. Raises ValueError for bad `flags`."""
        lengths = dict(max_completion_length=self.workload["tokens"], max_prompt_length=512)
        return speed.training_config(self, data, engine="vllm", max_steps=self.steps, report_every=0, **lengths)


def keep_choices(model: transformers.PreTrainedModel) -> Choices:
    """Return a list to which each layer of `model` adds what it chooses, whenever it runs.

    The forward method of the experts does so, which torch.compile leaves out. It could leave out a hook, too.
    """
    choices: Choices = []

    @torch.compiler.disable
    def keep_and_forward(experts: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        choices.append((chosen, weights))
        return forward(experts, hidden, chosen, weights)

    for name in routers(model):
        experts = model.get_submodule(name.rpartition(".")[0]).experts
        forward = experts.forward.__func__  # the same for all layers, as torch.compile wants it
        experts.forward = types.MethodType(keep_and_forward, experts)
    return choices


@torch.no_grad()
def trainer_routes(
    run: Run, groups: list[ScoredGroup], choices: Choices
) -> Iterator[tuple[Tokens, Tensor, Tensor, Tensor]]:
    """Yield each prompt with each completion, without the last token: the trainer's experts and their weights,
    (S + L - 1, M, k) each, and how far its log-probability of the next token is from the sampler's, (S + L - 1,).

    Dummies of `micro_batches` are among them. The difference is NaN where the next token belongs to the prompt.
    """
    policy, budget = run.policy, run.updater.micro_batch_tokens
    ready = [Group(each.prompt, [one.prepared(0.0, 1.0) for one in each.rollouts], each.index) for each in groups]
    with unsharded(policy), without_dropout(policy):
        for batch, _ in micro_batches(policy, order_for_packing(ready, budget), budget):
            choices.clear()
            logp, _ = policy(batch, run.cfg.temperature)
            gaps = (logp - batch.values.sampling_logp).abs().cpu().split(batch.lengths)
            lengths = batch.segments.q_lens  # of the prompts, then of the completions
            tokens = [tuple(each.tolist()) for each in batch.input_ids[0].cpu().split(lengths)]
            chosen, weights = (torch.stack(each, dim=1).cpu().split(lengths) for each in zip(*choices))  # (T, M, k)
            first = len(lengths) - len(gaps)
            for own, (prompt, gap) in enumerate(zip(batch.segments.prompt_of.tolist(), gaps), first):
                both = [torch.cat([each[prompt], each[own][:-1]]) for each in (chosen, weights)]
                unknown = torch.full((lengths[prompt] - 1,), torch.nan)
                yield (tokens[prompt], tokens[own]), *both, torch.cat([unknown, gap])


def differences(chosen: Tensor, weights: Tensor, gaps: Tensor, sampled: Tensor, num_experts: int) -> Sums:
    """Return sums over N tokens, for which the trainer has `chosen` experts and the sampler others, (N, M, k) each.

    `weights` (N, M, k) are those of the trainer's. `gaps` (N,): see `trainer_routes`.
    """
    is_other = (chosen[..., None] != sampled[..., None, :]).all(-1)  # (N, M, k) whether the sampler has not chosen it
    differs = is_other.any(-1)  # (N, M)
    somewhere = differs.any(-1)  # (N,)
    slots = chosen + num_experts * torch.arange(chosen.shape[1])[:, None]  # the experts of all layers, numbered
    return {
        "tokens": torch.tensor(len(chosen)),
        "tokens_other": somewhere.sum(),
        "pairs_other": differs.sum(0),  # (M,) tokens whose experts differ in this layer
        "experts_other": is_other.sum(),
        "weight_other": (weights * is_other).double().sum(),
        "gap_same": gaps[~somewhere].double().sum(),
        "gap_other": gaps[somewhere].double().sum(),
        "load": slots.flatten().bincount(minlength=chosen.shape[1] * num_experts).view(-1, num_experts),  # (M, E)
    }


def figures(local: list[Sums]) -> dict[str, Any]:
    """Return what the sums of all processes say, as shares and means; what they say nothing about is left out."""
    everyone = [each for part in distributed.all_gather(local) for each in part]
    sums = {name: torch.stack([each[name] for each in everyone]).sum(0).double() for name in everyone[0]}
    tokens, layers = sums["tokens"], sums["pairs_other"] / sums["tokens"]
    load = sums["load"] / sums["load"].mean(1, keepdim=True)  # (M, E) relative to an even one
    means = {
        "tokens": tokens,
        "pairs that differ": layers.mean(),
        "in the first layer": layers[0],
        "in the middle layer": layers[len(layers) // 2],
        "in the last layer": layers[-1],
        "experts that differ in such a pair": sums["experts_other"] / sums["pairs_other"].sum(),
        "router weight on other experts": sums["weight_other"] / (tokens * len(layers)),
        "tokens that differ in some layer": sums["tokens_other"] / tokens,
        "logp difference of these": sums["gap_other"] / sums["tokens_other"],
        "logp difference of the others": sums["gap_same"] / (tokens - sums["tokens_other"]),
        "load of the busiest expert, mean": load.amax(1).mean(),
        "load of the busiest expert, worst layer": load.max(),
        "deviation of the load": load.std(1, correction=0).mean(),
    }
    return {name: float(mean) for name, mean in means.items() if mean.isfinite()} | {"layers": layers.tolist()}


def measure(cfg: Config) -> dict[str, dict[str, Any]]:
    """Return the figures of all prompts and of all completions."""
    side, (_, num_experts) = cfg.workload["side"], speed.SHAPES[cfg.shape]["experts"]
    data = speed.prepare(pathlib.Path(cfg.folder), cfg.shape, {side}, cfg.prompts * cfg.steps)[side]
    settings = cfg.training_config(data)
    sampling.vllm_engine.start_vllm = start_with_routes  # type: ignore[assignment]
    RequestLoop._end = keep_and_end  # type: ignore[method-assign]
    run = grpo.set_up(settings)
    run.collector.engine.stop = run.collector.engine.stop[:0]  # so that completions are as long as the workload says
    choices = keep_choices(run.policy.model)
    prompts, completions = {}, []
    for step in range(cfg.steps):
        groups, _ = run.collector.collect(run.policy, grpo.advantages_of, step)
        for tokens, *computed in trainer_routes(run, groups, choices):
            if tokens in ROUTES:  # it is no dummy
                size = len(tokens[0])
                pairs = [each.tensor_split([size]) for each in (*computed, ROUTES[tokens])]
                of_prompt, of_completion = (differences(*each, num_experts) for each in zip(*pairs))
                prompts[tokens[0]] = of_prompt  # once
                completions.append(of_completion)
        ROUTES.clear()
    return {"prompts": figures([*prompts.values()]), "completions": figures(completions)}


def main(cfg: Config) -> None:
    results = measure(cfg)
    if console.is_main():
        speed.write_report(speed.provenance() | {"settings": asdict(cfg)} | results, cfg.results, "routes")
        print(f"\n{'':40}" + "".join(f"{name:>14}" for name in results))
        for name in [*results["completions"]][:-1]:  # without the list of all layers
            print(f"{name:40}" + "".join(f"{result.get(name, np.nan):14.5g}" for result in results.values()))


if __name__ == "__main__":
    cli.run(main, cli.parse(Config))
