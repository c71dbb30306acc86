"""The metrics of a step, by hand."""

import math
import os

import pytest
import torch

from common import distributed
from common.records import GroupRewards, Rollout
from training import metrics
from training.metrics import Clock, sampling_metrics, update_metrics


def sums(**values: float) -> dict[str, torch.Tensor]:
    """Return the sums over tokens of an update; those not given are 0."""
    names = "tokens fresh_tokens image_fresh_tokens difference image_difference difference_max loss grad_norm spike"
    names += " skipped empty clip_ratio importance_capped kl entropy"
    return {name: torch.tensor(float(values.get(name, 0))) for name in names.split()}


@pytest.fixture(autouse=True)
def two_processes(monkeypatch) -> None:
    """Let there be another process with the same completions, which needs longer."""
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "all_sum", lambda value: 2 * value)
    monkeypatch.setattr(distributed, "all_max", lambda value: value + 1)  # the other one has a longer completion
    monkeypatch.setattr(distributed, "all_gather", lambda value: [value, [lap + 2 for lap in value]])


def metrics_of(updates: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    """Return the metrics of a step with these updates."""
    completions = [(3, False, "a"), (5, True, "b"), (4, False, "c")]
    rollouts = [Rollout(torch.zeros(n).long(), torch.zeros(n), truncated, text) for n, truncated, text in completions]
    total = torch.tensor([[1.0, 3.0, math.nan], [2.0, 2.0, 2.0], [2.0, 2.0, 2.0]])
    rewards = GroupRewards(total, total, {"part": total + 1})
    clock = Clock()
    for phase, seconds in (("rollout", 2.0), ("train", 3.0), ("rollout", 4.0), ("train", 1.0)):
        with clock(phase):
            pass
        clock.laps[phase][-1] = seconds
    sampled = sampling_metrics(rollouts, rewards, clock, lambda text: float(text == "b"))
    return sampled | update_metrics(updates)


@pytest.fixture
def step() -> dict[str, float]:
    """Return the metrics of a step of two updates."""
    counts = dict(tokens=10, fresh_tokens=8, image_fresh_tokens=2)
    per_token = dict(kl=3, entropy=6, clip_ratio=5, importance_capped=2)
    differences = dict(difference=4, image_difference=3, difference_max=2)
    first = sums(**counts, **per_token, **differences, loss=1, grad_norm=4, spike=1, skipped=1)
    second = sums(**counts, loss=2, grad_norm=8, empty=1)
    return metrics_of([first, second])


def test_completions_are_those_of_all_processes(step):
    assert step["completions/mean_length"] == 4
    assert step["completions/max_length"] == 6
    assert step["completions/clipped_ratio"] == step["completions/format_rate"] == pytest.approx(1 / 3)
    assert step["tokens_per_second"] == pytest.approx(24 / step["step_time"])


def test_rewards_are_those_of_scored_completions(step):
    assert step["reward"] == 2 and step["rewards/part"] == 3
    assert step["rewards/no_verdict"] == pytest.approx(1 / 9)
    assert step["reward_std"] == pytest.approx(math.sqrt(2) / 3)
    assert step["frac_reward_full"] == pytest.approx(8 / 9), "a completion without a verdict has no full reward"
    assert (step["frac_reward_zero_std"], step["groups_drawn"]) == (pytest.approx(2 / 3), 3)


def test_updates_are_averaged_over_tokens_or_updates(step):
    per_token = {"kl": 3, "entropy": 6, "clip_ratio": 5, "importance_capped": 2}
    assert {name: step[name] for name in per_token} == {name: total / 20 for name, total in per_token.items()}
    assert (step["loss"], step["grad_norm"], step["grad_norm_spike"]) == (1.5, 6, 1)
    assert (step["updates_skipped"], step["updates_empty"]) == (1, 1)
    differences = {"mean": 4 / 16, "image": 3 / 4, "text": 1 / 12, "max": 2}
    got = {name: step[f"sampling/logp_difference_{name}"] for name in differences}
    assert got == pytest.approx(differences)


def test_differences_are_unknown_if_earlier_steps_sampled_all_tokens():
    metrics = metrics_of([sums(tokens=10)])
    assert all(math.isnan(metrics[f"sampling/logp_difference_{name}"]) for name in ("mean", "max", "image", "text"))


def test_times_are_those_of_all_rounds_of_the_slowest_process(step):
    assert (step["time/rollout"], step["time/train"]) == (4 + 6, 4)
    assert step["idle/rollout"] == pytest.approx(1 - (6 + 10) / 2 / 10)


def test_the_entropy_is_unknown_if_nothing_is_trained_on_and_the_format_if_none_is_asked_for():
    assert math.isnan(metrics_of([sums()])["entropy"])
    clock = Clock()
    with clock("rollout"):
        pass
    rewards = GroupRewards(torch.zeros(1, 2), torch.zeros(1, 2), {})
    rollouts = [Rollout(torch.zeros(2).long(), torch.zeros(2))] * 2
    assert math.isnan(sampling_metrics(rollouts, rewards, clock)["completions/format_rate"])


def test_the_hosts_memory_is_what_no_program_can_still_get(tmp_path, monkeypatch, step):
    """Cached files count as available. A step has it; a system that does not tell has 0."""
    assert 0 < metrics.host_memory() < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    file = tmp_path / "meminfo"
    file.write_text("MemTotal: 8388608 kB\nMemFree: 1024 kB\nMemAvailable: 2097152 kB\nCached: 2096128 kB\n")
    monkeypatch.setattr(metrics, "MEMINFO", str(file))
    assert metrics.host_memory() == Clock().metrics()["host_memory_gib"] == 6.0
    file.write_text("MemTotal: 8388608 kB\n")
    assert metrics.host_memory() == 0
    file.unlink()
    assert metrics.host_memory() == 0
    assert "host_memory_gib" in step
