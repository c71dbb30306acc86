"""The plugins of examples/: their numbers by hand, and runs with them, resumed exactly."""

import os
import shutil
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import grpo
import rewards
from common import plugins
from common.records import Completion, Group, GroupRewards, Prompt, Rewards, Rollout
from config import PolicyFlags, RewardFlags
from evaluation.scorer import Scorer
from packing import pack
from policy import optimizer as optimizers
from policy import sharding
from policy.model import load_policy
from rollout import ENGINES
from tests.helpers.marks import needs, slow
from tests.helpers.rows import make_sample
from tests.helpers.runs import SMALL, difference, metrics, tensors, weights
from tests.helpers.scripts import ROOT, run_script
from training import prompt_stream

pytestmark = needs("examples")
TABLES = (grpo.LOSSES, grpo.ADVANTAGES, rewards.TASKS, prompt_stream.ORDERS, optimizers.OPTIMIZERS)
TABLES += (ENGINES, sharding.AFTER_UPDATE)
FLAGS = {
    "entropy_bonus": ["--loss_type=entropy_bonus", "--entropy_weight=0.1"],
    "step_rewards": ["--task=steps", "--reward=count"],
    "curriculum": [],
    "muon": ["--num_iterations=2"],
    "moving_reference": ["--beta=0.1", "--reference_rate=0.3"],
    "losses": ["--loss_type=sapo", "--num_iterations=2", "--advantage=maxrl"],
    "best_and_worst": ["--advantage=best_and_worst", "--num_generations=10"],
}
WITH_STATE = ("muon", "moving_reference")  # in checkpoints


@pytest.fixture
def example(monkeypatch):
    """Return a function that imports a plugin, whose entries are removed after the test."""
    for name in ("_modules", "_digests"):
        monkeypatch.setattr(plugins, name, {})
    for table in TABLES:
        for name, entry in table.items():
            monkeypatch.setitem(table, name, entry)
    before = [(table, set(table)) for table in TABLES]
    yield lambda name: plugins.import_file(str(ROOT / "examples" / f"{name}.py"))
    for table, names in before:
        for name in set(table) - names:
            del table[name]


def run(name: str, model: str, data: str, output, *flags: str, processes: int = 0) -> None:
    settings = SMALL | {"learning_rate": 1e-3, "save_every": 1, "max_steps": 2, "seed": 3}
    settings |= {"model": model, "data": data, "output": output}
    arguments = [*(f"--{key}={value}" for key, value in settings.items()), *FLAGS.get(name, []), *flags]
    done = run_script("grpo.py", "--plugin", f"examples/{name}.py", *arguments, processes=processes)
    assert done.returncode == 0, done.stderr[-3000:]


@needs("parts/plugins.py")
@pytest.mark.parametrize("processes", [0, *slow(2)])
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in WITH_STATE)) for n in FLAGS])
def test_a_run_is_resumed_exactly(name, processes, tiny_model, shapes, tmp_path):
    run(name, tiny_model, shapes, tmp_path / "plain", processes=processes)
    (tmp_path / "resumed").mkdir()
    shutil.copytree(tmp_path / "plain" / "checkpoint-1", tmp_path / "resumed" / "checkpoint-1")
    run(name, tiny_model, shapes, tmp_path / "resumed", "--resume", processes=processes)
    folders = tmp_path / "plain", tmp_path / "resumed"
    assert difference(*(folder / "checkpoint-2" for folder in folders), tmp_path) == 0.0
    assert metrics(folders[0])[1:] == metrics(folders[1])


@needs("parts/plugins.py")
def test_several_plugins_make_one_run(tiny_model, shapes, tmp_path):
    others = [
        flag for name in ("best_and_worst", "step_rewards") for flag in (f"--plugin=examples/{name}.py", *FLAGS[name])
    ]
    run("entropy_bonus", tiny_model, shapes, tmp_path, *others)
    assert [row["step"] for row in metrics(tmp_path)] == [1, 2]


def test_the_entropy_is_added_to_the_objective(example, monkeypatch):
    plugin = example("entropy_bonus")
    cfg = grpo.Config(data="x", loss_type="entropy_bonus")
    cfg.entropy_weight = 0.5
    grpo.resolve_loss(cfg)
    batch = pack(
        [
            Group(
                Prompt(torch.arange(3), [0, 1, 2], torch.arange(3)[None]),
                [Completion(torch.arange(3), torch.zeros(3), 2.0, 0.25)],
            )
        ]
    )
    logp, entropy = (torch.zeros(3, requires_grad=True) for _ in range(2))
    loss, _ = grpo.batch_loss(cfg, batch, logp, entropy)
    loss.backward()
    assert logp.grad.tolist() == [-0.5] * 3 and entropy.grad.tolist() == [-0.125] * 3
    assert grpo.LOSSES["entropy_bonus"].objective is plugin.with_entropy


def test_losses_of_the_year_have_the_numbers_of_their_papers(example):
    """With r = 2, A = 3 and then -3: SAPO's gate is 4 σ(1), or 4 / 1.05 · σ(1.05). IcePop leaves out k = 6.

    Of the completions with weights of 2 and 6, as of one with both tokens, `sequence_mask` keeps that of 2.
    """
    plugin = example("losses")
    advantages, log_ratio = torch.tensor([3.0, -3.0]), torch.tensor([2.0, 2.0]).log()
    got, _ = plugin.sapo(log_ratio, log_ratio, advantages, None, None)
    assert got.tolist() == pytest.approx([12 / (1 + np.exp(-1)), -12 / 1.05 / (1 + np.exp(-1.05))])
    cfg = grpo.Config(data="x", loss_type="icepop", importance_cap=0.0)
    grpo.resolve_loss(cfg)
    values = SimpleNamespace(trainer_logp=torch.tensor([2.0, 6.0]).log(), sampling_logp=torch.zeros(2))
    got, _ = plugin.icepop(log_ratio, log_ratio, advantages, SimpleNamespace(values=values), cfg)
    assert got.tolist() == pytest.approx([2 * 1.2 * 3, 0.0])
    for completions, want in (([0, 1], [2 * 1.2 * 3, 0.0]), ([0, 0], [0.0, 0.0])):
        batch = SimpleNamespace(values=values, completion_of_token=torch.tensor(completions))
        assert plugin.sequence_mask(log_ratio, log_ratio, advantages, batch, cfg)[0].tolist() == pytest.approx(want)
    total = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    got = plugin.maxrl(GroupRewards(total, total, {}), {}, None)
    assert got.tolist() == [[3.0, -1.0, -1.0, -1.0], [0.0] * 4, [0.0] * 4]


def test_only_the_best_and_the_worst_have_advantages(example):
    example("best_and_worst")
    total = torch.arange(10.0).flip(0)[None]
    got = grpo.ADVANTAGES["best_and_worst"](GroupRewards(total, total, {}), {}, None)
    assert got[0, 4:6].isnan().all() and torch.equal(got[0, [0, 9]], grpo.group_advantages(total)[0, [0, 9]])
    assert not got[0, [0, 1, 2, 3, 6, 7, 8, 9]].isnan().any()
    total[0, 0] = float("nan")
    got = grpo.ADVANTAGES["best_and_worst"](GroupRewards(total, total, {}), {}, None)
    assert got[0, 0].isnan() and not got[0, 1:5].isnan().any(), "an unscored completion is not among the best"


def test_each_step_of_a_calculation_is_scored(example):
    steps = example("step_rewards").steps
    assert steps("2+3=5 then 5*4=21, so 20", "20") == [(0, 5, 1.0), (11, 17, -1.0), (22, 24, 1.0)]
    assert steps("7", "8") == [(0, 1, 0.0)]
    assert steps("no number", "8") == []


def test_rows_that_are_sometimes_right_come_more_often(example):
    """The weights are 0.1, 0.35 and 0.1."""
    by_success, cfg = example("curriculum").by_success, SimpleNamespace(easy_and_hard=0.1)
    rewarded = {"0": (8, 1.0), "1": (8, 0.5), "2": (8, 0.0)}
    stream = SimpleNamespace(samples=range(3), seed=5, rewarded=rewarded)
    rows = [by_success(stream, position, cfg) for position in range(3000)]
    assert np.bincount(rows) / 3000 == pytest.approx([0.1 / 0.55, 0.35 / 0.55, 0.1 / 0.55], abs=0.03)
    assert rows[:20] == [by_success(stream, position, cfg) for position in range(20)]


@needs("parts/plugins.py")
def test_muon_makes_the_update_of_a_matrix_orthogonal(tiny_model, shapes, tmp_path):
    """All its singular values are near the rate times √max(1, rows / columns), without weight decay."""
    flags = ("--max_steps=1", "--muon_rate=0.01", "--weight_decay=0", "--num_iterations=1", "--sharding=none")
    run("muon", tiny_model, shapes, tmp_path, *flags)
    before, after = weights(tiny_model), weights(tmp_path / "final")
    name = next(name for name in before if name.endswith("layers.0.mlp.gate_proj.weight"))
    change = after[name] - before[name]
    values = torch.linalg.svdvals(change) / (0.01 * max(1, change.shape[0] / change.shape[1]) ** 0.5)
    assert 0.6 < values.median() < 1.3 and values.max() < 1.4
    norm = next(name for name in before if name.endswith("layers.0.input_layernorm.weight"))
    assert (after[norm] - before[norm]).abs().max().item() == pytest.approx(1e-3, rel=0.05), "AdamW's first step"


@needs("parts/plugins.py")
def test_the_reference_follows_the_policy(tiny_model, shapes, tmp_path):
    run("moving_reference", tiny_model, shapes, tmp_path, "--max_steps=1")
    saved = tensors(tmp_path / "checkpoint-1", tmp_path / "saved.pt")
    before = {f"model.{name}": weight for name, weight in weights(tiny_model).items()}
    moved = {name.split("'")[3]: leaf for name, leaf in saved.items() if name.startswith("['reference']")}
    policy = {f"model.{name}": weight for name, weight in weights(tmp_path / "final").items()}
    assert moved
    for name, weight in moved.items():
        torch.testing.assert_close(weight, before[name] + 0.3 * (policy[name] - before[name]), msg=name)


def scored(task: str, text: str, image: Image.Image, *reward: str) -> Rewards:
    """Return the rewards of a completion, as a run computes them."""
    row = make_sample("<image>Which colour?", "none", [image], "rows.jsonl row 1")
    rollout = Rollout(torch.arange(3), torch.zeros(3), text=text)
    (((found,),), error) = Scorer(task, RewardFlags(reward=reward))([row], [[rollout]])
    assert error is None
    return found


def test_a_reward_sees_the_picture(example):
    example("picture_reward")
    sky = Image.effect_noise((40, 30), 20).convert("RGB").point(lambda value: value // 8)
    sky.paste((40, 60, 230), (0, 0, 40, 25))
    for text, expected in (("Blue\n", 1.0), ("red", 0.0), ("blue and red", 0.0)):
        assert scored("colour", text, sky).total == expected


def test_an_own_metric_is_logged_and_changes_no_reward():
    file = "examples/own_metric.py"
    flags = f"{file}:hesitates=0", f"{file}:characters=0"
    found = scored("count", "Wait, 3 apples", Image.new("RGB", (8, 8)), *flags)
    assert found.parts == {"count": found.total, "hesitates": 1.0, "characters": 14.0}
    assert found.total == scored("count", "Wait, 3 apples", Image.new("RGB", (8, 8))).total


def test_the_rate_rises_stays_and_falls_in_the_last_fifth(example, tiny_model):
    example("lr_schedule")
    flags = PolicyFlags(learning_rate=2.0, warmup=1)
    policy = load_policy(tiny_model, flags, torch.device("cpu"))
    ((optimizer, schedule),) = optimizers.OPTIMIZERS["default"](policy, flags, 20)
    rates = []
    for _ in range(20):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([1.0, *[2.0] * 16, 1.5, 1.0, 0.5])


def test_the_cookbook_names_every_example_and_short_ones_are_short():
    cookbook = (ROOT / "docs" / "extend.md").read_text()
    for path in (ROOT / "examples").glob("*.py"):
        assert f"examples/{path.name}" in cookbook
    for name in ("picture_reward", "own_metric", "lr_schedule"):
        assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) <= 20


@needs("parts/plugins.py")
@pytest.mark.parametrize("processes", [0, *slow(2)])
def test_a_sampler_over_http_gives_the_completions_of_the_one_within(processes, tiny_model, shapes, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "examples.http_sampler", tiny_model, "--port", str(port)]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ  # as `run` has: another number of threads rounds otherwise
    with subprocess.Popen(command, cwd=ROOT, env=environment) as server:
        try:
            for _ in range(600):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
            flags = (f"--sampler_url=http://127.0.0.1:{port}",)
            run("http_sampler", tiny_model, shapes, tmp_path / "http", "--engine=http", *flags, processes=processes)
        finally:
            server.kill()
    run("http_sampler", tiny_model, shapes, tmp_path / "hf", "--engine=hf", processes=processes)
    assert metrics(tmp_path / "http") == metrics(tmp_path / "hf")
    assert difference(*(tmp_path / name / "checkpoint-2" for name in ("http", "hf")), tmp_path) == 0.0


def test_one_step_by_hand_prints_each_tensor():
    command = [sys.executable, "-m", "examples.one_step"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("line")] == [*"5677778", "9", "11"]
    assert lines[-1].startswith("         gradient of the lm_head") and "(1, 4)" in lines[7]
