"""Learning rates, their schedule, and AdamW on the shards of a sharded model."""

import gc
import math
import shutil

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.optim import adam

import grpo
import sft
from common import distributed
from common.errors import UserError
from config import PolicyFlags
from policy.model import check_trained, load_policy, vision_parameters
from policy.optimizer import ShardAdamW, lr_factor, make_adamw
from tests.helpers.models import save_tiny
from tests.helpers.runs import SMALL, config, difference, tensors, weights
from tests.helpers.scripts import run_script

CPU = torch.device("cpu")


@pytest.mark.parametrize("fused", [True, False])
def test_shards_are_updated_as_pytorch_updates_dtensors(fused, monkeypatch):
    """The weights are the same, bit for bit, and no object of a step outlives it (with torch 2.11, 26 would)."""
    mesh = distributed.make_mesh(distributed.start(), "full")
    weights, updated = {}, set()
    update = adam.adam

    def recorded(parameters, *args, **options):
        updated.update(map(type, parameters))
        return update(parameters, *args, **options)

    monkeypatch.setattr(adam, "adam", recorded)
    for optimizer_class in (torch.optim.AdamW, ShardAdamW):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(13))).to(mesh.device_type)
        fully_shard(model, mesh=mesh)
        before = [parameter.full_tensor().clone() for parameter in model.parameters()]
        optimizer = optimizer_class(model.parameters(), lr=1e-2, fused=fused)
        counts = []
        updated.clear()
        for _ in range(4):
            model(torch.randn(4, 16, device=mesh.device_type)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            gc.collect()
            counts.append(sum(isinstance(thing, DTensorSpec) for thing in gc.get_objects()))
        weights[optimizer_class] = [parameter.full_tensor() for parameter in model.parameters()]
        assert all((new != old).any() for new, old in zip(weights[optimizer_class], before))
    pairs = zip(weights[torch.optim.AdamW], weights[ShardAdamW], strict=True)
    assert all(torch.equal(expected, got) for expected, got in pairs)
    assert updated and DTensor not in updated, "the second class gives PyTorch plain tensors"
    assert counts[1:] == counts[1:2] * 3


def test_learning_rates_by_hand():
    """Ten updates: two of warm-up, given as a number or as a fraction, then eight down to zero."""
    for warmup in (2, 0.2):
        for schedule, after in (
            ("constant", [1.0] * 9),
            ("linear", [1 - k / 8 for k in range(9)]),
            ("cosine", [(1 + math.cos(math.pi * k / 8)) / 2 for k in range(9)]),
        ):
            got = [lr_factor(update, 10, warmup, schedule) for update in range(11)]
            assert got == pytest.approx([1 / 3, 2 / 3, *after]), (warmup, schedule)
    assert lr_factor(0, 10, 1, "constant") == 1 / 2, "one update, not all of them"


@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl"])  # the second has a projector beside its tower
@pytest.mark.parametrize("flags", [{}, {"offload": ("optimizer",)}, {"lora_rank": 4}], ids=str)
def test_the_tower_has_a_rate_of_its_own(family, flags, tmp_path):
    """Adam's first update moves a weight by the rate, here half of its peak in the warm-up."""
    flags = PolicyFlags(train_vision=True, learning_rate=2e-3, vision_rate=8e-3, warmup=1, **flags)
    policy = load_policy(save_tiny(family, tmp_path), flags, CPU)
    tower = set(vision_parameters(policy.model))
    ((optimizer, schedule),) = make_adamw(policy, flags, 4)
    trained = {parameter: parameter.detach().clone() for parameter in policy.parameters() if parameter.requires_grad}
    for parameter in trained:
        parameter.grad = torch.randn_like(parameter).sign()
    optimizer.step()
    moved = {parameter in tower: set() for parameter in trained}
    for parameter, before in trained.items():
        moved[parameter in tower] |= set((parameter.detach() - before).abs().mul(1e6).round().flatten().tolist())
    for in_tower, rate in ((False, 1000), (True, 4000)):
        assert all(each == pytest.approx(rate, abs=1) for each in moved[in_tower])
    assert schedule.get_last_lr() == [1e-3, 1e-3, 4e-3, 4e-3]


def test_a_run_with_two_rates_is_resumed_bit_for_bit_and_may_change_them(tiny_model, shapes, tmp_path, capsys):
    """On two processes, whose parameters are shards."""
    chosen = SMALL | {"learning_rate": 1e-3, "vision_rate": 4e-3, "max_steps": 2, "save_every": 1, "warmup": 1}
    flags = [f"--model={tiny_model}", f"--data={shapes}", "--train_vision", "--lr_schedule=cosine"]
    flags += [f"--{name}={value}" for name, value in chosen.items()]
    for output, more in (("plain", []), ("resumed", ["--resume"])):
        done = run_script("grpo.py", *flags, f"--output={tmp_path}/{output}", *more, processes=2)
        assert done.returncode == 0, done.stderr[-3000:]
        if output == "plain":
            shutil.copytree(tmp_path / "plain" / "checkpoint-1", tmp_path / "resumed" / "checkpoint-1")
    assert difference(*(tmp_path / name / "checkpoint-2" for name in ("plain", "resumed")), tmp_path) == 0.0
    before, after = weights(tiny_model), tensors(tmp_path / "plain" / "checkpoint-1", tmp_path / "after.pt")
    moved = {"visual": 0.0, "language_model": 0.0}
    for name, weight in before.items():
        if (key := f"['policy']['model.{name}']") in after and (part := name.split(".")[1]) in moved:
            moved[part] = max(moved[part], (after[key] - weight).abs().max().item())
    assert moved == pytest.approx({"visual": 2e-3, "language_model": 5e-4}, rel=0.01)

    chosen |= {"train_vision": True, "max_steps": 3, "resume": str(tmp_path / "plain" / "checkpoint-1"), "warmup": 0}
    for rate, expected in ((None, 1e-3), (2e-3, 2e-3)):
        capsys.readouterr()
        run = grpo.set_up(config(tiny_model, shapes, tmp_path / f"other-{rate}", **chosen | {"vision_rate": rate}))
        assert [group["lr"] for group in run.updater.param_groups] == [1e-3, 1e-3, expected, expected]
        assert f"vision_rate was 0.004, is {rate}" in capsys.readouterr().err


def test_a_rate_for_what_is_not_trained_is_refused(tiny_model, tmp_path):
    for make in (grpo.Config, sft.Config):
        with pytest.raises(ValueError, match="vision_rate is that of a trained vision tower: give train_vision too"):
            make(data="x", vision_rate=1e-3)
        with pytest.raises(ValueError, match="vision_rate, warmup and weight_decay must not be negative"):
            make(data="x", vision_rate=-1e-3, train_vision=True)
    flags = PolicyFlags(vision_rate=1e-3, train_vision=True)
    text_model = load_policy(save_tiny("qwen2_5", tmp_path), flags, CPU)
    with pytest.raises(UserError, match=r"^--vision_rate 0.001: the model has no vision tower: leave it out$"):
        check_trained(text_model, flags)
