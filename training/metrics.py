"""TODO training/metrics.py"""

import contextlib
import math
import time
from collections.abc import Iterator

import torch

from common import distributed
from common.records import Group

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}


# --- metrics ----------------------------------------------------------------------------------------------------------


class Clock:
    """Seconds of a step's parts: `with clock("train"): ...`. A part's end waits for its work on the GPU."""

    def __init__(self):
        self.begun = time.perf_counter()
        self.laps: dict[str, list[float]] = {}  # seconds of a part, each time
        self.memory = 0  # most bytes of the GPU in use at the end of a part, by everything

    @contextlib.contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        begun = time.perf_counter()
        distributed.heartbeat(part)
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()  # what PyTorch counts would hold what a sleeping vLLM gave back
            self.memory = max(self.memory, total - free)
        self.laps.setdefault(part, []).append(time.perf_counter() - begun)


def slowest_ranks(laps: list[list[float]]) -> tuple[float, float]:
    """Seconds that rounds take in which all processes wait for the last one, and the share of them that a process
    waits; `laps`: every process's own seconds of each round."""
    rounds = list(zip(*laps))
    taken = sum(map(max, rounds))
    return taken, 1 - sum(map(sum, rounds)) / len(laps) / taken


def step_metrics(
    names: list[str],
    groups: list[Group],
    drawn: torch.Tensor,
    updates: list[dict[str, torch.Tensor]],
    clock: Clock,
) -> dict[str, float]:
    """A step's metrics from all processes; the README's glossary says what each one means.

    `drawn` (groups, G, 2 + names): the reward of every completion that was sampled, the same before the overlong
    penalty, and its parts by their `names`.
    `updates`: sums over the tokens of each update.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = torch.tensor([len(r.ids) for r in rollouts], dtype=torch.float64)
    truncated = torch.tensor([r.truncated for r in rollouts], dtype=torch.float64)
    sums = distributed.all_sum(torch.stack([lengths.sum(), truncated.sum(), torch.tensor(len(rollouts)).double()]))
    longest = distributed.all_max(torch.tensor([max((len(r.ids) for r in rollouts), default=0)]))
    tokens = sum(u["tokens"] for u in updates).clamp(min=1)
    sampling, idle = slowest_ranks(distributed.all_gather(clock.laps["rollout"]))
    seconds = {part: sum(laps) for part, laps in clock.laps.items()} | {"rollout": sampling}

    def mean(name: str) -> float:
        return (sum(u[name] for u in updates) / tokens).item()

    drawn, parts = drawn[..., 0], drawn[..., 2:]
    step_time = time.perf_counter() - clock.begun
    has_verdict = ~drawn.isnan()
    spread = drawn.nan_to_num(nan=-math.inf).amax(1) > drawn.nan_to_num(nan=math.inf).amin(1)
    centred = (drawn - drawn.nanmean(1, keepdim=True)).nan_to_num()
    within = (centred.square().sum(1) / (has_verdict.sum(1) - 1).clamp(min=1)).sqrt()
    return {
        "reward": drawn.nanmean().item(),
        "reward_std": within.mean().item(),
        **{f"rewards/{name}": parts[..., i].nanmean().item() for i, name in enumerate(names)},
        "rewards/no_verdict": 1 - has_verdict.double().mean().item(),
        "frac_reward_zero_std": 1 - spread.double().mean().item(),
        "groups_drawn": len(drawn),
        "completions/mean_length": (sums[0] / sums[2]).item(),
        "completions/max_length": longest.item(),
        "completions/clipped_ratio": (sums[1] / sums[2]).item(),
        "step_time": step_time,
        **{f"time/{part}": taken for part, taken in seconds.items()},
        "idle/rollout": idle,
        "tokens_per_second": sums[0].item() / step_time,
        "loss": sum(u["loss"] for u in updates).item() / len(updates),
        "grad_norm": sum(u["grad_norm"] for u in updates).item() / len(updates),
        "grad_norm_spike": float(any(u["spike"] for u in updates)),
        "updates_skipped": sum(u["skipped"] for u in updates).item(),
        "clip_ratio": mean("clip_ratio"),
        "kl": mean("kl"),
        "entropy": mean("entropy"),
        "sampling/logp_difference_mean": mean("difference"),
        "sampling/logp_difference_image": _share(updates, "image_difference", "image_tokens"),
        "sampling/logp_difference_text": _share(updates, "difference", "tokens", "image_"),
        "sampling/logp_difference_max": max(u["difference_max"] for u in updates).item(),
        "mfu": sum(u["flop"] for u in updates).item() / distributed.world_size() / seconds["train"] / peak_flops(),
        "memory_gib": clock.memory / 2**30,
    }


def _share(updates: list[dict[str, torch.Tensor]], part: str, of: str, less: str = "") -> float:
    """The sum of `part` over the sum of `of`, those of `less` taken off both; NaN where there is none."""
    sums = [sum(u[name] - (u[less + name] if less else 0) for u in updates).item() for name in (part, of)]
    return sums[0] / sums[1] if sums[1] else math.nan


def peak_flops() -> float:
    """What this GPU does at most in a second, dense bfloat16, by its maker; NaN for one that is not listed."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((flops for known, flops in PEAK_FLOPS.items() if known in name), math.nan)
