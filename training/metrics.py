"""The timings of a step (`Clock`) and its metrics over all processes. docs/metrics.md explains every metric."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from common import distributed
from common.group_stats import deviation, is_varied
from common.records import GroupRewards, Rollout
from packing import PackedBatch

MEMINFO = "/proc/meminfo"  # Linux says here how the host's memory is used


class Clock:
    """Seconds spent in each phase of a step: `with clock("train"): ...`. A phase ends when its GPU work is done."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin a step."""
        self.started = time.perf_counter()
        self.laps: dict[str, list[float]] = {}  # phase -> duration of each of its runs, in seconds
        self.memory = 0  # maximum GPU memory of all processes on the GPU at the end of a phase, in bytes
        self.flushes_before = memory_flushes()

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()  # PyTorch's own count would include memory freed by a sleeping vLLM
            self.memory = max(self.memory, total - free)
        self.laps.setdefault(phase, []).append(time.perf_counter() - started)

    def metrics(self) -> dict[str, float]:
        """Return the seconds of the step and of its phases, and the memory that it took."""
        seconds = {f"time/{phase}": sum(laps) for phase, laps in self.laps.items()}
        memory = {"memory_gib": self.memory / 2**30, "memory_flushes": memory_flushes() - self.flushes_before}
        return {"step_time": time.perf_counter() - self.started, "host_memory_gib": host_memory()} | seconds | memory


def time_and_idle(laps: list[list[float]]) -> tuple[float, float]:
    """Return the total seconds of all rounds, and the mean fraction of this time that a rank spends waiting.

    `laps` holds the seconds that each rank takes for each round. A round lasts until the slowest rank is done.
    """
    rounds = list(zip(*laps))
    total = sum(map(max, rounds))
    return total, 1 - sum(map(sum, rounds)) / len(laps) / total


def sampling_metrics(
    rollouts: list[Rollout], rewards: GroupRewards, clock: Clock, has_format: Callable[[str], bool] | None = None
) -> dict[str, float]:
    """Return the metrics of what a step has sampled.

    `rollouts` are this process's completions that the step kept, and `rewards` are those of every completion that was
    sampled. `has_format` tells whether a completion has the format that its task asks for.
    """
    counts = [(len(r.ids), r.truncated, has_format(r.text) if has_format else math.nan, 1) for r in rollouts]
    length, truncated, formatted, count = distributed.all_sum(torch.tensor(counts).double().reshape(-1, 4).sum(0))
    max_length = distributed.all_max(torch.tensor([max((len(rollout.ids) for rollout in rollouts), default=0)]))
    rollout_seconds, idle = time_and_idle(distributed.all_gather(clock.laps["rollout"]))
    timings = clock.metrics() | {"time/rollout": rollout_seconds, "idle/rollout": idle}
    return {
        "reward": rewards.total.nanmean().item(),
        "reward_std": deviation(rewards.total).mean().item(),
        **{f"rewards/{name}": values.nanmean().item() for name, values in rewards.parts.items()},
        "rewards/no_verdict": rewards.total.isnan().double().mean().item(),
        "frac_reward_full": (rewards.total >= 1).double().mean().item(),
        "frac_reward_zero_std": 1 - is_varied(rewards.total).double().mean().item(),
        "groups_drawn": len(rewards.total),
        "completions/mean_length": (length / count).item(),
        "completions/max_length": max_length.item(),
        "completions/clipped_ratio": (truncated / count).item(),
        "completions/format_rate": (formatted / count).item(),
        **timings,
        "tokens_per_second": length.item() / timings["step_time"],
    }


def update_metrics(updates: list[dict[str, Tensor]], has_teacher: bool = False) -> dict[str, float]:
    """Return the metrics of the updates of a step, given each update's sums over tokens."""

    def total(name: str) -> float:
        return sum(update[name] for update in updates).item()

    num_tokens, num_fresh, num_image_fresh = map(total, ("tokens", "fresh_tokens", "image_fresh_tokens"))
    difference, image_difference = total("difference"), total("image_difference")
    return {
        "loss": total("loss") / len(updates),
        "grad_norm": total("grad_norm") / len(updates),
        "grad_norm_spike": float(any(update["spike"] for update in updates)),
        "updates_skipped": total("skipped"),
        "updates_empty": total("empty"),
        "clip_ratio": total("clip_ratio") / max(num_tokens, 1),
        "importance_capped": total("importance_capped") / max(num_tokens, 1),
        "kl": total("kl") / max(num_tokens, 1),
        **({"teacher_kl": _mean(total("teacher_kl"), num_tokens)} if has_teacher else {}),
        "entropy": _mean(total("entropy"), num_tokens),
        "sampling/logp_difference_mean": _mean(difference, num_fresh),
        "sampling/logp_difference_image": _mean(image_difference, num_image_fresh),
        "sampling/logp_difference_text": _mean(difference - image_difference, num_fresh - num_image_fresh),
        "sampling/logp_difference_max": max(u["difference_max"] for u in updates).item() if num_fresh else math.nan,
    }


def memory_flushes() -> int:
    """Return how often PyTorch had to give its cached GPU memory back because it could not allocate more."""
    return torch.cuda.memory_stats_as_nested_dict()["num_alloc_retries"] if torch.cuda.is_initialized() else 0


def host_memory() -> float:
    """Return the GiB that all programs use of this machine's memory, without cached files; 0 if unknown."""
    with contextlib.suppress(OSError, KeyError), open(MEMINFO, encoding="ascii") as file:
        kib = {line.split(":")[0]: int(line.split()[1]) for line in file}
        return (kib["MemTotal"] - kib["MemAvailable"]) / 2**20
    return 0.0


def _mean(total: float, count: float) -> float:
    """Return `total` / `count`, or NaN if nothing was counted."""
    return total / count if count else math.nan


def logp_difference(batch: PackedBatch, trainer_logp: Tensor) -> dict[str, Tensor]:
    """Return the sum and maximum of |log π_trainer − log π_sampler| over the trained tokens; `trainer_logp` is (C,)."""
    fresh = (batch.values.token_weights > 0) & ~batch.values.stale  # an earlier policy has sampled the stale ones
    with_image = batch.values.has_image & fresh
    difference = (trainer_logp - batch.values.sampling_logp).abs() * fresh
    sums = {"difference": difference.sum(), "difference_max": difference.max(), "fresh_tokens": fresh.sum()}
    # Without a teacher, None in all but dummy batches. Every batch must have the same sums.
    teacher_logp = trainer_logp if batch.values.teacher_logp is None else batch.values.teacher_logp
    sums["teacher_kl"] = ((trainer_logp - teacher_logp) * (batch.values.token_weights > 0)).sum()
    return sums | {"image_fresh_tokens": with_image.sum(), "image_difference": (difference * with_image).sum()}
