"""The benchmarks, with the tiny model on a CPU: that they run, and that another trainer gets the same work."""

import json

import pytest

from tests.helpers.marks import needs
from tests.helpers.scripts import run_script

pytest.importorskip("parts.turns", reason="needs parts/turns, which is not here")
pytest.importorskip("apps", reason="needs apps/, which is not here")

from apps.bench import speed, tail, turns

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
