"""Save the gradients of one update, computed on one or more processes, for several ways of splitting the same batch.

    torchrun --nproc_per_node 2 tests/helpers/gradient_worker.py MODEL OUT.pt ["VARIANT|VARIANT"]

tests/policy/test_sharding.py runs this script and compares the gradients.
"""

import pathlib
import sys
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent.parent))

from common import console, distributed
from common.parts import extra
from config import Config
from data import load_processor
from grpo import backward, group_advantages, resolve_loss, training_groups
from packing import split_groups
from policy.batches import completion_logprobs
from policy.model import load_policy
from policy.sharding import apply_fsdp, fsdp_groups
from tests.helpers.models import fixed_groups
from training import guards
from training.metrics import Clock
from training.updates import Updater

VARIANTS = {  # name: (flags, order of the groups); each of n processes takes every n-th group
    "one micro-batch": ({}, [0, 1, 2, 3, 4, 5]),
    "many micro-batches": ({"micro_batch_tokens": 60}, [0, 1, 2, 3, 4, 5]),
    "groups split across micro-batches": ({"micro_batch_tokens": 34}, [0, 1, 2, 3, 4, 5]),
    "dapo with KL": ({"loss_type": "dapo", "beta": 0.1, "micro_batch_tokens": 60}, [0, 1, 2, 3, 4, 5]),
    "gspo": ({"loss_type": "gspo", "micro_batch_tokens": 60}, [0, 1, 2, 3, 4, 5]),
    "trained vision tower": ({"train_vision": True, "micro_batch_tokens": 60}, [0, 1, 2, 3, 4, 5]),
    # Only groups with even indices have images. With two processes, one of them therefore has only text.
    "trained vision tower, a process without images": ({"train_vision": True}, [0, 1, 2, 3, 4, 5]),
    "adapters in the vision tower, a process without images": (
        {"lora_rank": 4, "train_vision": True},
        [0, 1, 2, 3, 4, 5],
    ),
    "frozen vision tower, a process without images": ({}, [0, 1, 2, 3, 4, 5]),
    "fewer groups than processes": ({"beta": 0.1}, [0]),
    "sampled by one process, evened out": ({"beta": 0.1, "micro_batch_tokens": 60}, [0, 1, 2, 3, 4, 5]),
    "sampled by one process, evened out, trained vision tower": ({"train_vision": True}, [0, 1, 2, 3, 4, 5]),
    "whole copies": ({"sharding": "none", "micro_batch_tokens": 60}, [0, 1, 2, 3, 4, 5]),
    "whole copies, trained vision tower, first and last without images": (
        {"sharding": "none", "train_vision": True, "micro_batch_tokens": 60},
        [1, 3, 0, 2, 5],
    ),
    "a copy on each of two machines": ({"sharding": "hybrid", "micro_batch_tokens": 60}, [0, 1, 2, 3, 4, 5]),
    "gathered once": ({"micro_batch_tokens": 60}, [0, 1, 2, 3, 4, 5]),
    "two machines, gathered once, trained vision tower": (
        {"sharding": "hybrid", "train_vision": True, "micro_batch_tokens": 60},
        [0, 1, 2, 3, 4, 5],
    ),
    "two machines, trained vision tower, first micro-batch without images": (
        {"sharding": "hybrid", "train_vision": True, "micro_batch_tokens": 60},
        [1, 5, 3, 1, 0],
    ),
    "two machines, trained vision tower, last micro-batch without images": (
        {"sharding": "hybrid", "train_vision": True, "micro_batch_tokens": 60},
        [0, 2, 1, 3, 5],
    ),
    "two machines, adapters in the vision tower, a process without images": (
        {"sharding": "hybrid", "lora_rank": 4, "train_vision": True},
        [0, 1, 2, 3, 4, 5],
    ),
    "two machines, trained vision tower, a process without images": (
        {"sharding": "hybrid", "train_vision": True},
        [0, 1, 2, 3, 4, 5],
    ),
}


class KeepGradients:
    """Stands in for the optimizer and keeps the gradients."""

    param_groups = ()

    def __init__(self, policy):
        self.policy = policy

    def step(self):
        self.kept = {
            name: distributed.full_tensor(p.grad).clone()
            for name, p in self.policy.model.named_parameters()
            if p.grad is not None
        }

    def zero_grad(self):
        self.policy.zero_grad()


def count_gathers(policy) -> dict[str, int]:
    """Return a dict that counts, from now on, how often each FSDP unit is gathered."""
    units = {name: unit for name, unit in policy.named_modules() if isinstance(unit, FSDPModule)}
    counts = dict.fromkeys(units, 0)
    for name, unit in units.items():
        for group in fsdp_groups(unit):

            def counted(wait=group.wait_for_unshard, group=group, name=name):
                counts[name] += group._all_gather_result is not None
                wait()

            group.wait_for_unshard = counted
    return counts


def gradients(
    model: str, processor, flags: dict, order: list[int], interleave: bool, evened_out: bool, gathered_once: bool
) -> dict:
    """Return the gradients and stats of one update, and the number of micro-batches.

    With `interleave`, only every second prompt has images. With `evened_out`, the first process starts with all groups.
    With `gathered_once`, there is memory for the full weights.
    """
    cfg = Config(data="rows", num_generations=4, prompts_per_step=len(order), max_grad_norm=1e9, **flags)
    resolve_loss(cfg)
    cpu, sharding = torch.device("cpu"), cfg.sharding if cfg.sharding != "auto" else "full"
    policy = apply_fsdp(load_policy(model, cfg, cpu, to_shard=True), cpu, torch.float32, sharding)
    policy.keep_unsharded = gathered_once
    groups = fixed_groups(processor, images_at_even_indices=interleave)
    groups = [replace(groups[old], index=new) for new, old in enumerate(order)]
    advantages = group_advantages(torch.tensor([[rewards.total for rewards in group.rewards] for group in groups]))
    optimizer = KeepGradients(policy)
    scheduler = SimpleNamespace(step=lambda: None)
    tokens = cfg.micro_batch_tokens or 16384
    updater = Updater(cfg, policy, None, [(optimizer, scheduler)], tokens, Clock(), [], before_change=lambda: None)
    run = SimpleNamespace(cfg=cfg, policy=policy)
    if evened_out:
        own = training_groups(cfg, groups if console.is_main() else [], advantages)
        minibatch = updater.balance(extra("fast").rebalance(own, updater.vision_cost))  # on a CPU, it is not called
    else:
        minibatch = training_groups(cfg, distributed.shard(groups), advantages)
    gathers = count_gathers(policy) if gathered_once else {}
    if cfg.beta or gathers:
        completion_logprobs(policy, minibatch, 1.0, tokens)
        assert all(isinstance(parameter, DTensor) for parameter in policy.parameters() if parameter.requires_grad)
    minibatch = [
        replace(group, completions=[replace(c, ref_logp=-10.5 - c.sampling_logp) for c in group.completions])
        for group in minibatch
    ]
    updater.step(minibatch, lambda batch: backward(run, batch))
    (stats,) = updater.updates
    assert set(gathers.values()) <= {2}, "each of the two passes must gather once"
    everything = training_groups(cfg, groups, advantages)
    local, total = (sum(len(c.ids) for group in each for c in group.completions) for each in (minibatch, everything))
    stats["share"] = distributed.all_max(torch.tensor(local / total))
    batches = len(split_groups(everything, tokens))
    return {"batches": batches} | optimizer.kept | {"stats/" + name: value for name, value in stats.items()}


def main(model: str, out: str, only: str = "") -> None:
    distributed.start()
    torch.set_num_threads(1)  # as under torchrun; with more threads, the summation order would change results by 1e-6
    guards.MAX_LOGP_DIFFERENCE = 0  # the completions come from no sampler
    processor = load_processor(model, "count")
    results = {}
    for name in only.split("|") if only else VARIANTS:
        if "evened out" in name and not extra("fast"):
            continue
        flags, order = VARIANTS[name]
        ways = (way in name for way in ("without images", "evened out", "gathered once"))
        results[name] = gradients(model, processor, flags, order, *ways)
    if console.is_main():
        torch.save(results, out)
    distributed.barrier()
    distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
