"""The benchmarks, with the tiny model on a CPU: that they run, and that another trainer gets the same work.

Also guards against weights that are made anew on each process, against a sampler that keeps its own, and against a
shape of another size than its name says.
"""

import json

import pytest
import torch
import transformers

from tests.helpers.marks import needs
from tests.helpers.scripts import run_script

pytest.importorskip("parts.turns", reason="needs parts/turns, which is not here")
pytest.importorskip("apps", reason="needs apps/, which is not here")

from apps.bench import routes, speed, tail, turns
from apps.bench.random_weights import STDS
from apps.demo.tiny import byte_tokenizer

SMALL = ["--shape=tiny", "--prompts=1", "--steps=1", "--flags", "compile=false"]  # further flags of grpo.py may follow


def report(folder) -> dict:
    """Return the only report in `folder`."""
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text())


def test_steps_are_measured_and_compared_with_another_trainer(tmp_path):
    peer = tmp_path / "peer.py"
    peer.write_text("import sys\nprint('STEP 9 8')\nprint('STEP 1000 7', '{\"arguments\": %d}' % len(sys.argv[1:]))\n")
    folders = [f"--folder={tmp_path}/bench", f"--results={tmp_path}/results"]
    process = run_script("apps/bench/speed.py", *folders, "--workloads=W1", f"--peer={peer}", *SMALL)
    assert process.returncode == 0, process.stderr[-3000:]
    measured = report(tmp_path / "results")
    ours, theirs = measured["workloads"]["W1"], measured["peer"]
    assert round(ours["tokens_per_second"] * ours["step_time"]) == 8 * 512
    assert min(ours["time/rollout"], ours["time/reference"], ours["time/train"]) > 0
    assert (theirs["steps"], theirs["gib"], theirs["parts"]) == ([9, 1000], [8, 7], {"arguments": 5})
    assert theirs["ratio"] == 1000 / ours["step_time"]


def test_a_failure_of_our_own_measurement_is_told_in_one_line(tmp_path):
    (tmp_path / "peer.py").touch()
    folders = [f"--folder={tmp_path}/bench", f"--results={tmp_path}/results"]
    process = run_script("apps/bench/speed.py", *folders, f"--peer={tmp_path}/peer.py", *SMALL, "max_prompt_length=2")
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1] == "measuring this project failed (exit status 2), see above"
    assert not (tmp_path / "results").exists()


def test_what_cannot_be_measured_is_refused(monkeypatch):
    """Before anything is measured: a trainer that is not there, or a large model without a GPU."""
    monkeypatch.setattr("apps.bench.speed.importlib.util.find_spec", lambda name: None)
    for peer, reason in (("nothing.py", "there is no script 'nothing.py'"), ("verl", "verl is not installed here")):
        with pytest.raises(ValueError, match=reason):
            speed.Config(shape="tiny", peer=peer)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for config in (speed.Config, tail.Config, turns.Config):
        with pytest.raises(ValueError, match="3b needs a GPU, and there is none: use --shape tiny"):
            config()
    with pytest.raises(ValueError, match="30b needs a GPU, and there is none: use --shape tiny_moe"):
        routes.Config()


@pytest.mark.parametrize("bench", [speed, tail, turns])
def test_flags_of_a_bench_are_checked_first(bench):
    bench.Config(shape="tiny", flags=("loss_type=dr_grpo", "importance_cap=5"))
    for flag, reason in (
        ("vllm_memory=2", "vllm_memory must be"),
        ("loss_type", "must be NAME=VALUE"),
        ("compile=False", "flags: compile must be true or false"),
        ("max_prompt_length=long", r"flags: a value has the wrong type \(.*'str'"),
    ):
        with pytest.raises(ValueError, match=reason):
            bench.Config(shape="tiny", flags=(flag,))


def test_every_value_of_oversample_is_checked_first():
    with pytest.raises(ValueError, match="oversample is too small"):
        tail.Config(shape="tiny", prompts=4, oversample=(1.01, 2.5))


# --- a mixture of experts without saved weights -----------------------------------------------------------------------

needs_experts = needs("parts/families")


def test_the_mixture_has_the_size_of_its_name():
    config = speed.model_shape("30b", byte_tokenizer())
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert experts == 48 * 128 * 3 * 2048 * 768
    assert round(model.num_parameters() / 1e9, 2) == 31.07
    assert round((model.num_parameters() - experts * 15 / 16) / 1e9, 1) == 3.9  # with 8 of 128 experts, and the tower


@needs_experts
def test_weights_that_are_sharded_as_they_are_made_depend_on_their_names_alone(tmp_path):
    """A reference begins like its policy, and what is no weight is as in a model that is built at once."""
    weights = {}
    for processes in (1, 2):
        arguments = ("tests/helpers/random_weights_worker.py", tmp_path, tmp_path / f"{processes}.pt")
        done = run_script(*arguments, processes=processes)
        assert done.returncode == 0, done.stderr[-3000:]
        weights[processes] = torch.load(tmp_path / f"{processes}.pt")
    torch.testing.assert_close(weights[1], weights[2], rtol=0, atol=0)
    policy, adapter = weights[1]["policy"], weights[1]["adapter"]
    torch.testing.assert_close(weights[1]["reference"], policy, rtol=0, atol=0)
    assert {bool(tensor.any()) for name, tensor in adapter.items() if ".lora_B." in name} == {False}
    assert {bool(tensor.any()) for name, tensor in adapter.items() if ".lora_A." in name} == {True}
    built = transformers.AutoModelForImageTextToText.from_config(speed.model_shape("tiny_moe", byte_tokenizer()))
    tensors = {f"model.{name}": each for name, each in [*built.named_parameters(), *built.named_buffers()]}
    assert tensors.keys() == policy.keys()
    for name, tensor in tensors.items():
        if tensor.ndim == 1:
            assert torch.equal(tensor, policy[name]), f"{name}: norms, biases and tables are the same in every model"
        else:
            std = next((std for word, std in STDS.items() if word in name), tensor.std())
            assert abs(policy[name].std() / std - 1) < 0.1, name
    assert len({float(tensor.flatten()[0]) for tensor in policy.values() if tensor.ndim > 1}) > 20


@needs_experts
def test_the_first_sync_brings_the_sampler_its_weights(tmp_path):
    """Until then, they are NaN. No weight is on the disk."""
    folders = [f"--folder={tmp_path}/bench", f"--results={tmp_path}/results"]
    flags = ["--shape=tiny_moe", "--workloads=small", "--prompts=2", "--generations=2", "--steps=1", "--flags"]
    flags += ["compile=false", "lora_rank=4"]
    process = run_script("apps/bench/speed.py", *folders, *flags, processes=2)
    assert process.returncode == 0, process.stderr[-3000:]
    assert 0 < report(tmp_path / "results")["workloads"]["small"]["sampling/logp_difference_mean"] < 1e-5
    assert not list((tmp_path / "bench").rglob("*.safetensors"))


def test_weights_that_are_not_saved_cannot_be_quantised():
    with pytest.raises(
        ValueError, match="flags: load_in_4bit needs saved weights, and tiny_moe has none: leave it out"
    ):
        speed.Config(shape="tiny_moe", flags=("lora_rank=4", "load_in_4bit=true"))


def test_routes_are_measured_only_where_there_are_some(monkeypatch):
    """Of a model with experts, and with the one sampler that tells which it takes."""
    for flags, reason in (
        (dict(shape="tiny"), "tiny has no experts: use 30b or, without a GPU, tiny_moe"),
        (dict(flags=("engine=hf",)), "engine=hf tells nobody which experts it takes: leave it out"),
        (dict(flags=("env=crop",)), "env and oversample sample a completion in several requests: leave them out"),
    ):
        with pytest.raises(ValueError, match=reason):
            routes.Config(**dict(shape="tiny_moe") | flags)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"vLLM, which this measures, is not installed: pip install -r"):
        routes.Config(shape="tiny_moe")


def test_the_figures_of_routes():
    """Two layers of four experts. The second of three tokens goes elsewhere, with one of its experts, in one layer."""
    chosen = torch.tensor([[[0, 1], [3, 2]], [[0, 1], [0, 2]], [[0, 2], [1, 2]]])
    sampled = torch.tensor([[[1, 0], [2, 3]], [[1, 0], [2, 3]], [[2, 0], [1, 2]]], dtype=torch.uint8)
    weights = torch.tensor([0.75, 0.25]).expand(3, 2, 2)
    gaps = torch.tensor([0.1, 0.5, 0.3])
    tokens = [slice(0, 2), slice(2, 3)]  # of two completions
    found = routes.figures(
        [routes.differences(*(each[i] for each in (chosen, weights, gaps, sampled)), 4) for i in tokens]
    )
    assert found.pop("layers") == pytest.approx([0, 1 / 3])
    assert found == pytest.approx(
        {
            "tokens": 3,
            "pairs that differ": 1 / 6,
            "in the first layer": 0,
            "in the middle layer": 1 / 3,
            "in the last layer": 1 / 3,
            "experts that differ in such a pair": 1,
            "router weight on other experts": 0.75 / 6,
            "tokens that differ in some layer": 1 / 3,
            "logp difference of these": 0.5,
            "logp difference of the others": 0.2,
            "load of the busiest expert, mean": 2,
            "load of the busiest expert, worst layer": 2,
            "deviation of the load": (5**0.5 + 3**0.5) / 6,
        }
    )


@needs("parts/partial.py")
def test_a_long_tail_is_measured_with_and_without_oversampling(tmp_path):
    folders = [f"--folder={tmp_path}/bench", f"--results={tmp_path}/results"]
    lengths = ["--generations=2", "--cap=64", "--median=20"]
    process = run_script("apps/bench/tail.py", *folders, *lengths, *SMALL)
    assert process.returncode == 0, process.stderr[-3000:]
    with_and_without = report(tmp_path / "results")["oversample"]
    assert len(with_and_without) == 2
    assert all(result["tokens"] > 0 for result in with_and_without)


def test_steps_of_three_turns_are_measured_beside_w1(tmp_path):
    folders = [f"--folder={tmp_path}/bench", f"--results={tmp_path}/results"]
    process = run_script("apps/bench/turns.py", *folders, "--generations=2", "--turn_tokens=6", *SMALL)
    assert process.returncode == 0, process.stderr[-3000:]
    results = report(tmp_path / "results")["workloads"]
    assert [results[name]["completions/mean_length"] for name in ("W1", "plain", "turns")] == [512, 6, 18]
    episodes, plain = results["turns"], results["plain"]
    assert (episodes["turns/mean"], episodes["turns/calls"], episodes["turns/calls_failed"]) == (3, 2, 0)
    assert episodes["turns/image_tokens_seen"] == 2 * 9
    assert max(episodes[f"sampling/logp_difference_turn_{turn}"] for turn in (1, 2, 3)) < 1e-4
    assert episodes["rollout/of_plain"] == episodes["time/rollout"] / (3 * plain["time/rollout"])
    assert results["W1"]["time/train"] > 0
