"""Optimizers of one's own, and a reference that moves: trained, saved and resumed.

Guards against: state that is dropped or made up when a run is resumed, and a checkpoint that is resumed with other
optimizers than it has.
"""

import json
import os
import shutil

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import grpo
from common.distributed import local_tensor
from common.errors import UserError
from common.files import read_jsonl
from policy.optimizer import OPTIMIZERS, make_adamw
from policy.sharding import AFTER_UPDATE
from tests.helpers.own_parts import copy_every_second, moving_average, two_optimizers
from tests.helpers.runs import SMALL, config, difference, metrics, tensors, weights
from tests.helpers.scripts import run_script
from training import checkpoint


def run_parts(parts: str, processes: int, *flags: str) -> None:
    settings = SMALL | {"learning_rate": 1e-3, "num_iterations": 2}
    flags += tuple(f"--{name}={value}" for name, value in settings.items())
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = run_script("tests/helpers/own_parts.py", parts, *flags, processes=processes, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("parts", "processes", "more"),
    [
        pytest.param(
            "two_optimizers,moving_average", 0, ["--lr_schedule=linear", "--warmup=2"], marks=pytest.mark.slow
        ),
        ("two_optimizers,moving_average", 2, ["--train_vision"]),
        pytest.param("two_optimizers,copy_every_second", 2, ["--sharding=none"], marks=pytest.mark.slow),
        pytest.param("two_optimizers,moving_average", 2, ["--offload=optimizer"], marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_is_the_same_bit_for_bit(parts, processes, more, tiny_model, shapes, tmp_path):
    """SGD makes its momentum in its first step only, so that a resumed run has to make room for it."""
    flags = [f"--model={tiny_model}", f"--data={shapes}", "--beta=0.1", "--save_every=1", "--max_steps=2", *more]
    run_parts(parts, processes, *flags, f"--output={tmp_path}/plain")
    (tmp_path / "resumed").mkdir()
    shutil.copytree(tmp_path / "plain" / "checkpoint-1", tmp_path / "resumed" / "checkpoint-1")
    run_parts(parts, processes, *flags, f"--output={tmp_path}/resumed", "--resume")
    folders = tmp_path / "plain", tmp_path / "resumed"
    assert difference(*(folder / "checkpoint-2" for folder in folders), tmp_path) == 0.0
    states = [json.loads((folder / "checkpoint-2" / "state.json").read_text())["updater"] for folder in folders]
    assert states[0] == states[1] and states[0]["num_updates"] == 4 and states[0]["groups"][-1]["steps"] == 4
    assert metrics(folders[0])[1:] == metrics(folders[1])
    assert metrics(folders[0])[1]["kl"] > 0
    saved = tensors(tmp_path / "plain" / "checkpoint-2", tmp_path / "saved.pt")
    for kind in ("momentum_buffer", "exp_avg_sq"):
        assert any(leaf.any() for name, leaf in saved.items() if name.endswith(f"['{kind}']")), kind
    references = {name: leaf for name, leaf in saved.items() if name.startswith("['reference']")}
    initial = {f"model.{name}": weight for name, weight in weights(tiny_model).items()}
    assert references and any((leaf != initial[name.split("'")[3]]).any() for name, leaf in references.items())


@pytest.fixture
def own(monkeypatch):
    """Return a function that puts entries into the tables for the length of a test."""

    def put(optimizers=None, **after_update):
        monkeypatch.setitem(OPTIMIZERS, "default", optimizers or make_adamw)
        for name in list(AFTER_UPDATE):
            monkeypatch.delitem(AFTER_UPDATE, name)
        for name, function in after_update.items():
            monkeypatch.setitem(AFTER_UPDATE, name, function)

    return put


def test_a_checkpoint_with_other_optimizers_is_refused(own, tiny_model, shapes, tmp_path):
    """Both ways, in one line, and the folder stays as it was."""
    flags = dict(max_steps=1, beta=0.1)
    grpo.main(config(tiny_model, shapes, tmp_path / "one", **flags))
    own(two_optimizers, average=moving_average)
    grpo.main(config(tiny_model, shapes, tmp_path / "two", **flags))
    written = [path for path in tmp_path.rglob("*") if path.name != "run.lock"]
    before = {path: path.stat().st_mtime_ns for path in written}

    def refusal(name: str) -> str:
        with pytest.raises(UserError) as caught:
            grpo.set_up(config(tiny_model, shapes, tmp_path / name, resume="newest", max_steps=2, beta=0.1))
        message = str(caught.value)
        assert "\n" not in message and message.startswith(f"--resume: {tmp_path}/{name}/checkpoint-1: ")
        return message.partition("checkpoint-1: ")[2]

    message = refusal("one")
    assert message.startswith("it has model.") and "in optimizer 1 (AdamW) and" in message
    assert "this run has not" in message
    own(two_optimizers)
    assert refusal("two").startswith("it has AFTER_UPDATE['average'], this run has not: use the same OPTIMIZERS and")
    own(average=moving_average)
    assert refusal("one").startswith("this run has AFTER_UPDATE['average'], it has not: use the same")
    own()
    assert "in optimizer 2 (CountingSGD) and" in refusal("two")
    assert before == {path: path.stat().st_mtime_ns for path in written}


def test_other_optimizers_than_those_of_the_checkpoint_are_refused(own, tiny_model, shapes, tmp_path):
    """What a checkpoint holds of one optimizer has the names that PyTorch's `get_state_dict` gives."""
    run = grpo.set_up(config(tiny_model, shapes, tmp_path / "run", max_steps=1, save_every=1))
    run.loop.train(run, grpo.train_step)
    mine = checkpoint.state_tensors(run.policy, None, run.updater.optimizers)["optimizer"]
    theirs = get_optimizer_state_dict(run.policy, run.updater.optimizers[0][0], options=checkpoint.TRAINED)
    assert mine["param_groups"] == theirs["param_groups"] and mine["state"].keys() == theirs["state"].keys()
    assert all(mine["state"][name].keys() == theirs["state"][name].keys() for name in mine["state"])
    own(two_optimizers)
    state = checkpoint.read_progress(tmp_path / "run" / "checkpoint-1")
    with pytest.raises(UserError, match=r"it has model\..* in optimizer 1 \(AdamW\) and \d+ more, this run has not"):
        checkpoint.check_parts(tmp_path, state, run.policy, two_optimizers(run.policy, run.cfg, 2))


def test_saving_takes_no_dummy_step(own, tiny_model, shapes, tmp_path):
    """PyTorch would take one with an optimizer without state, and SGD would then have a momentum of zeros."""
    own(two_optimizers)
    run = grpo.set_up(config(tiny_model, shapes, tmp_path, max_steps=2))
    run.loop.save(run, wait=True)
    assert not run.updater.optimizers[1][0].state and "steps" not in run.updater.param_groups[-1]
    resumed = grpo.set_up(config(tiny_model, shapes, tmp_path, max_steps=2, resume="newest"))
    assert not resumed.updater.optimizers[1][0].state
    resumed.loop.train(resumed, grpo.train_step)
    assert read_jsonl(tmp_path / "metrics.jsonl")[0]["lr"] == 1e-3, "that of the first optimizer"


def test_state_of_which_one_shard_would_be_saved_is_refused(own, tiny_model, shapes, tmp_path):
    """It is a plain tensor of the shape of its parameter, or of its shard; PyTorch would take it for a copy."""

    def plain_state(policy, flags, updates):
        ((optimizer, scheduler),) = make_adamw(policy, flags, updates)
        state = optimizer.state[optimizer.param_groups[0]["params"][0]]
        state["exp_avg"] = local_tensor(state["exp_avg"])
        return [(optimizer, scheduler)]

    own(plain_state)
    run = grpo.set_up(config(tiny_model, shapes, tmp_path))
    with pytest.raises(UserError, match=r"^OPTIMIZERS: the state 'exp_avg' of model\..* is not sharded: make it with"):
        run.loop.save(run)


def test_a_reference_that_is_copied_is_the_policy(own, tiny_model, shapes, tmp_path):
    """With one update per step and a copy after each second one, the KL term is 0 in every odd step."""
    seen = []

    def copy(policy, reference, updates, cfg):
        assert not torch.is_grad_enabled()
        seen.append(updates)
        copy_every_second(policy, reference, updates)

    own(copy=copy)
    grpo.main(config(tiny_model, shapes, tmp_path / "run", max_steps=4, beta=0.1, save_every=0))
    kl = [row["kl"] for row in metrics(tmp_path / "run")]
    assert seen == [1, 2, 3, 4]
    assert kl[0] == kl[2] == 0.0 and min(kl[1], kl[3]) > 0
    own()
    grpo.main(config(tiny_model, shapes, tmp_path / "fixed", max_steps=3, beta=0.1))
    assert metrics(tmp_path / "fixed")[2]["kl"] > 0
    names = tensors(tmp_path / "fixed" / "checkpoint-3", tmp_path / "fixed.pt")
    assert not any("reference" in name for name in names), "a fixed reference is not saved"
