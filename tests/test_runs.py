"""Whole runs, started as a user would start them: their output files, how they end, and their error messages.

Guards against: a final model that scores differently from the trained one, a run that depends on the number of
processes, a resumed run that differs from an uninterrupted one, and tracebacks for user mistakes.
"""

import contextlib
import json
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import evaluate
import grpo
import merge_lora
import rewards
import rollout
from common.errors import RunStopped, UserError
from common.files import git_commit, read_jsonl
from config import Config
from policy import export
from policy.optimizer import ShardAdamW
from tests.helpers.marks import needs
from tests.helpers.runs import SMALL, config, metrics, weights
from tests.helpers.scripts import ROOT, run_script
from training import guards
from training import run as training_run
from training.loop import closing_lines
from training.run_folder import write_manifest
from training.updates import Updater

SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tiny_model, shapes, tmp_path_factory) -> pathlib.Path:
    """Return the folder of a run of four steps with a checkpoint and an evaluation every two steps.

    What the run prints is written to log.txt beside the folder.
    """
    output = tmp_path_factory.mktemp("runs") / "run"
    flags = dict(max_steps=4, save_every=2, eval_data=shapes, eval_every=2, beta=0.01, report_every=1)
    with (output.parent / "log.txt").open("w") as log, contextlib.redirect_stderr(log), contextlib.redirect_stdout(log):
        grpo.main(config(tiny_model, shapes, output, **flags))
    return output


# --- output files -----------------------------------------------------------------------------------------------------


def test_a_log_file_has_one_line_per_step_and_no_progress_bars(run):
    log = (run.parent / "log.txt").read_bytes().decode()
    assert "\r" not in log and "%|" not in log and "Loading weights" not in log and "Writing model shards" not in log
    lines = [line for line in log.splitlines() if line.startswith("step ")]
    assert max(map(len, lines)) <= 80
    scores = r"  reward -?\d\.\d{3}  signal \d+%  \d+ tokens  \d+\.\d s  "
    left, held_out = r"\d\d:\d\d left", r"held-out \d\.\d{3}"
    expected = [f"step 0/4  {held_out}", f"step 1/4{scores}{left}", f"step 2/4{scores}{held_out}"]
    expected += [f"step 3/4{scores}{left}", f"step 4/4{scores}{held_out}"]
    assert len(lines) == len(expected) and all(map(re.fullmatch, expected, lines)), lines


def test_a_run_leaves_what_the_documents_say(run):
    rows = read_jsonl(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["step"] for row in rows if "eval/exact_match" in row] == [0, 2, 4]
    for row in rows[1:]:
        missing = {name for name, value in row.items() if value is None}
        assert missing == {"mfu", "sampling/logp_difference_text"}, "there is no GPU, and every row has an image"
        assert row["sampling/logp_difference_image"] == pytest.approx(row["sampling/logp_difference_mean"])
        assert row["sampling/logp_difference_mean"] < 1e-5
    assert rows[4]["kl"] > 0
    glossary = (ROOT / "docs" / "metrics.md").read_text()
    for name in rows[4]:
        if not name.startswith(("rewards/", "eval/")):
            assert f"`{name}`" in glossary, f"docs/metrics.md does not explain {name}"
    settings = json.loads((run / "config.json").read_text())
    assert settings["beta"] == 0.01
    assert settings["git_commit"] == git_commit()
    assert not list(run.glob("**/*.partial"))


@pytest.mark.parametrize(
    ("flags", "has_page", "expected"),
    [
        (
            {"eval_data": "b", "max_steps": 9},
            True,
            [
                "model     'my run/final'",
                "metrics   'my run'/metrics.jsonl",
                "page      'my run'/index.html, with its pictures",
                "evaluate  ./run.sh eval 'my run'",
                "resume    the same command, with --resume --max_steps HIGHER",
                "serve     vllm serve 'my run/final'",
            ],
        ),
        (
            {"lora_rank": 8, "model": "base"},
            False,
            [
                "model     'my run/final'",
                "metrics   'my run'/metrics.jsonl",
                "evaluate  ./run.sh eval 'my run' --data FILE",
                "resume    the same command, with --resume --epochs HIGHER",
                "merge     python merge_lora.py --base_model base "
                "--lora_model 'my run/final' --output_path 'my run'/merged",
                "serve     vllm serve 'my run'/merged",
            ],
        ),
    ],
)
def test_the_last_lines_say_how_to_go_on(flags, has_page, expected):
    cfg = Config(data="a", output="my run", **flags)
    assert closing_lines(cfg, True, has_page).splitlines() == expected
    without = [line for line in expected if not line.startswith("resume")]
    assert closing_lines(cfg, False, has_page).splitlines() == without


@pytest.fixture(scope="module")
def evaluated(run, shapes) -> pathlib.Path:
    """Return the folder of an evaluation of the run's final model, in that of the run."""
    flags = dict(model=str(run / "final"), data=shapes, task="count", max_completion_length=12)
    evaluate.main(evaluate.Config(**flags, output=str(run / "after")))
    return run / "after"


@needs("parts/pages")
def test_the_pages_show_the_run_and_its_evaluation(run, evaluated):
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    page = (run / "completions.html").read_text()
    assert page.count("<caption>") == 4 * 3
    assert "data:image/webp;base64," in page
    assert "How many shapes?" in page
    assert 'href="after"' in (run / "index.html").read_text()


def test_the_final_model_scores_as_the_trained_one_did(run, evaluated):
    scores = json.loads((evaluated / "scores.json").read_text())
    last = read_jsonl(run / "metrics.jsonl")[-1]
    for name in ("reward", "exact_match", "mean_length", "format_rate"):
        assert scores[name] == last[f"eval/{name}"]
    predictions = read_jsonl(evaluated / "predictions.jsonl")
    assert len(predictions) == scores["n"] == last["eval/rows"] == 12 and scores["step"] == last["step"]
    assert scores["step_time"] == last["step_time"], "by which the page of the run knows that the step is its own"


def test_training_moves_what_it_should_and_nothing_else(run, tiny_model):
    before, after = weights(tiny_model), weights(run / "final")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) == ("visual" in name), name


def test_evaluations_checkpoints_and_reports_do_not_change_a_run(run, tiny_model, shapes, tmp_path):
    grpo.main(config(tiny_model, shapes, tmp_path, max_steps=4, beta=0.01))
    a, b = weights(run / "final"), weights(tmp_path / "final")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_each_update_trains_on_its_own_prompts(tiny_model, shapes, tmp_path, monkeypatch):
    """Two updates per iteration, two iterations. With a KL term, every group is trained on."""
    step, trained = Updater.step, []

    def recorded(updater, groups, backward):
        trained.append(sorted({group.index for group in groups}))
        step(updater, groups, backward)

    monkeypatch.setattr(Updater, "step", recorded)
    flags = dict(max_steps=1, prompts_per_update=2, num_iterations=2, beta=0.01)
    grpo.main(config(tiny_model, shapes, tmp_path, **flags))
    assert trained == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_the_norm_of_the_gradient_is_bounded(tiny_model, shapes, tmp_path, monkeypatch):
    """The metric is the norm before."""
    step, norms = ShardAdamW.step, []

    def recorded(optimizer, *args):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad.full_tensor() for parameter in parameters if parameter.grad is not None]
        norms.append(torch.nn.utils.get_total_norm(gradients).item())
        return step(optimizer, *args)

    monkeypatch.setattr(ShardAdamW, "step", recorded)
    grpo.main(config(tiny_model, shapes, tmp_path, max_steps=1, max_grad_norm=1e-3))
    assert metrics(tmp_path)[0]["grad_norm"] > 0.01
    assert norms == [pytest.approx(1e-3, rel=1e-2)]


def test_a_run_at_another_temperature(tiny_model, shapes, tmp_path):
    """The log-probabilities of sampler, trainer and reference are those at this temperature."""
    grpo.main(config(tiny_model, shapes, tmp_path, max_steps=1, temperature=0.5, beta=0.01))
    (row,) = metrics(tmp_path)
    assert row["sampling/logp_difference_mean"] < 1e-5
    assert row["kl"] == pytest.approx(0, abs=1e-7)


def test_gdpo_keeps_groups_whose_rewards_differ_although_their_sum_does_not(brief_model, shapes, tmp_path):
    code = "def odd(completion, answer):\n    return float(len(completion) % 2)\n\n\n"
    code += "def even(completion, answer):\n    return 2.0 - 2 * (len(completion) % 2)\n"
    (tmp_path / "r.py").write_text(code)
    rewards = ("count=0", f"{tmp_path}/r.py:odd", f"{tmp_path}/r.py:even=0.5")
    flags = dict(reward=rewards, advantage="gdpo", dynamic_sampling_rounds=2, num_generations=8)
    grpo.main(config(brief_model, shapes, tmp_path / "run", max_steps=1, **flags))
    (row,) = metrics(tmp_path / "run")
    assert row["reward"] == 1 and row["groups_drawn"] == 4 and row["grad_norm"] > 0


def test_the_distance_from_the_sampler_is_measured_before_the_policy_changes(tiny_model, shapes, tmp_path):
    flags = dict(max_steps=1, old_logp="sampler", num_iterations=3, learning_rate=3e-3)
    grpo.main(config(tiny_model, shapes, tmp_path, **flags))
    assert metrics(tmp_path)[0]["sampling/logp_difference_mean"] < 1e-5


def test_resume_is_the_same_run(run, tiny_model, shapes, tmp_path):
    """A run resumed after two of its four steps is bit-for-bit identical to an uninterrupted run."""
    cfg = config(tiny_model, shapes, tmp_path, max_steps=4, save_every=2, beta=0.01)
    subprocess.run(["cp", "-r", run / "checkpoint-2", tmp_path], check=True)
    (tmp_path / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text())
    cfg.resume = "newest"
    grpo.main(cfg)
    a, b = weights(run / "final"), weights(tmp_path / "final")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 4]


def test_resume_takes_the_new_learning_rate_and_refuses_another_run(run, tiny_model, shapes, tmp_path):
    subprocess.run(["cp", "-r", run / "checkpoint-2", tmp_path], check=True)
    with pytest.raises(UserError, match=r"belongs to another run \(seed was 0, is 1\)"):
        grpo.main(config(tiny_model, shapes, tmp_path, max_steps=4, resume="newest", seed=1))
    grpo.main(config(tiny_model, shapes, tmp_path, max_steps=3, resume="newest", learning_rate=1e-5))
    assert read_jsonl(tmp_path / "metrics.jsonl")[-1]["lr"] == 1e-5


@needs("parts/formats")
def test_overwrite_touches_nothing_before_the_new_run_can_start(run, tiny_model, shapes, tmp_path):
    subprocess.run(["cp", "-r", *run.glob("*"), tmp_path], check=True)
    with pytest.raises(UserError, match="no data at 'nowhere'"):
        grpo.main(config(tiny_model, "nowhere", tmp_path, overwrite=True))
    assert (tmp_path / "final" / "model.safetensors").is_file()
    assert (tmp_path / "checkpoint-4").is_dir()
    with pytest.raises(UserError, match="final' would be replaced by this run: choose another --output"):
        grpo.main(config(str(tmp_path / "final"), shapes, tmp_path, overwrite=True))
    assert (tmp_path / "final" / "model.safetensors").is_file()
    grpo.main(config(tiny_model, shapes, tmp_path, overwrite=True, max_steps=1))
    assert not (tmp_path / "checkpoint-4").exists()
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1]
    (tmp_path / "completions.html").touch()
    grpo.main(config(tiny_model, shapes, tmp_path, overwrite=True, max_steps=1))
    assert not (tmp_path / "completions.html").exists(), "it would show another run"


def test_two_processes_make_the_same_run(tiny_model, shapes, tmp_path):
    """With a seed for which no token's random number lies so close to a border that rounding decides."""
    single, double = tmp_path / "single", tmp_path / "double"
    chosen = dict(learning_rate=1e-3, max_steps=4, beta=0.01, micro_batch_tokens=300, seed=1)
    grpo.main(config(tiny_model, shapes, single, **chosen))
    flags = [f"--{name}={value}" for name, value in (SMALL | chosen).items()]
    done = run_script("grpo.py", f"--model={tiny_model}", f"--data={shapes}", f"--output={double}", *flags, processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    for a, b in zip(read_jsonl(single / "metrics.jsonl"), read_jsonl(double / "metrics.jsonl"), strict=True):
        for name in ("reward", "completions/mean_length", "loss", "kl", "entropy", "grad_norm"):
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-5), (a["step"], name)
    a, b = weights(single / "final"), weights(double / "final")
    assert max((a[name] - b[name]).abs().max().item() for name in a) < 1e-3


# --- variants ---------------------------------------------------------------------------------------------------------

VARIANTS = {
    "dr_grpo": dict(loss_type="dr_grpo", advantage="none"),
    "dapo": dict(loss_type="dapo", dynamic_sampling_rounds=3),
    "gspo": dict(loss_type="gspo", num_iterations=2),
    "cispo, sampler's log-probabilities": dict(loss_type="cispo", num_iterations=2, old_logp="sampler"),
    "every option": dict(
        num_iterations=2,
        beta=0.01,
        dual_clip=3.0,
        advantage="gdpo",
        reward=("format",),
        drop_last=True,
    ),
    "several updates a step": dict(prompts_per_update=2, micro_batch_tokens=200),
    "trained vision, checkpointed": dict(train_vision=True, activation_checkpointing="full", lr_schedule="cosine"),
    "half precision": dict(dtype="bfloat16", train_vision=True, beta=0.01),
    "checkpointed selectively": dict(activation_checkpointing="selective", beta=0.01),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_run(name, tiny_model, shapes, tmp_path):
    grpo.main(config(tiny_model, shapes, tmp_path, max_steps=2, warmup=1, **VARIANTS[name]))
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert len(rows) == 2
    missing = {name for row in rows for name, value in row.items() if value is None}  # not finite
    assert missing == {"mfu", "sampling/logp_difference_text"}
    before, after = weights(tiny_model), weights(tmp_path / "final")
    assert any(not torch.equal(before[n], after[n]) for n in before)


def test_old_log_probabilities_of_policy_and_sampler_agree(tiny_model, shapes, tmp_path):
    """The sampler and the trainer compute identically in this test, so both values of `old_logp` give the same run."""
    losses = []
    for old in ("policy", "sampler"):
        output = tmp_path / old
        grpo.main(config(tiny_model, shapes, output, max_steps=2, num_iterations=2, old_logp=old, max_grad_norm=1e9))
        losses.append([row["loss"] for row in read_jsonl(output / "metrics.jsonl")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3, abs=1e-6)


def test_dynamic_sampling_draws_on_until_the_groups_differ(tiny_model, shapes, tmp_path, monkeypatch):
    """Every second group has equal rewards, so each step must draw twice as many prompts as it trains on."""
    calls = []

    def reward(completion, answer, **_):
        calls.append(completion)
        return float(len(calls) % 2) if (len(calls) - 1) // 4 % 2 else 0.5

    monkeypatch.setitem(rewards.TASKS, "count", replace(rewards.TASKS["count"], reward=reward))
    flags = dict(max_steps=2, dynamic_sampling_rounds=10)
    grpo.main(config(tiny_model, shapes, tmp_path, **flags))
    for row in read_jsonl(tmp_path / "metrics.jsonl"):
        assert row["groups_drawn"] == 8
        assert row["frac_reward_zero_std"] == 0.5


def test_groups_with_equal_rewards_leave_the_policy_alone(tiny_model, shapes, tmp_path, monkeypatch):
    """The updates are empty, but the learning rate falls as if they were not. Otherwise, it would be too high later.

    An empty update is no spike, although the last norm before it was one.
    """
    constant = replace(rewards.TASKS["count"], reward=lambda completion, answer, **_: 0.3)
    monkeypatch.setitem(rewards.TASKS, "count", constant)
    run = grpo.set_up(config(tiny_model, shapes, tmp_path, max_steps=2, lr_schedule="linear"))
    run.updater.norms = [1e-6] * 20 + [1.0]
    run.loop.train(run, grpo.train_step)
    before, after = weights(tiny_model), weights(tmp_path / "final")
    assert all(torch.equal(before[name], after[name]) for name in before)
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["grad_norm"] for row in rows] == [row["grad_norm_spike"] for row in rows] == [0, 0]
    assert [row["lr"] for row in rows] == pytest.approx([5e-4, 0])


def test_an_update_without_a_gradient_does_not_move_the_weights(tiny_model, shapes, tmp_path, monkeypatch):
    """After a step that learns, AdamW's momentum would move them, and so would weight decay.

    The checkpoint has the gradient norm of the step that learns alone: with zeros among them, every norm would be a
    spike.
    """
    calls = []

    def reward(completion, answer, **_):
        calls.append(completion)
        return float(len(calls) % 2) if len(calls) <= 16 else 0.3

    monkeypatch.setitem(rewards.TASKS, "count", replace(rewards.TASKS["count"], reward=reward))
    monkeypatch.setattr("training.loop.MAX_SKIPPED", 1)
    for steps in (1, 3):
        calls.clear()
        flags = dict(max_steps=steps, weight_decay=0.1)
        grpo.main(config(tiny_model, shapes, tmp_path / str(steps), **flags))
    one, three = weights(tmp_path / "1" / "final"), weights(tmp_path / "3" / "final")
    assert all(torch.equal(one[name], three[name]) for name in one)
    rows = read_jsonl(tmp_path / "3" / "metrics.jsonl")
    assert [row["updates_empty"] for row in rows] == [0, 1, 1]
    assert [row["updates_skipped"] for row in rows] == [0, 0, 0]
    norms = json.loads((tmp_path / "3" / "checkpoint-3" / "state.json").read_text())["updater"]["norms"]
    assert norms == [pytest.approx(rows[0]["grad_norm"])]


def test_epochs_count_the_prompts_that_dynamic_sampling_draws(tiny_model, shapes, tmp_path, monkeypatch):
    """12 rows, 4 prompts a round: two epochs are six rounds in any number of steps. A resumed run is the same."""

    def reward(completion, answer, **_):
        return float(sum(map(ord, completion)) % 7 == 0)

    monkeypatch.setitem(rewards.TASKS, "count", replace(rewards.TASKS["count"], reward=reward))
    flags = dict(epochs=2, dynamic_sampling_rounds=4, lr_schedule="linear")
    run = grpo.set_up(config(tiny_model, shapes, tmp_path / "a", save_every=1, keep_last=0, **flags))
    run.loop.train(run, grpo.train_step)
    rows = read_jsonl(tmp_path / "a" / "metrics.jsonl")
    assert (run.collector.position, run.step, run.steps_left) == (24, len(rows), 0)
    assert sum(row["groups_drawn"] for row in rows) == 24
    assert 1 < len(rows) < 6, "some rounds must be repeated, and some steps must fill"
    drawn = [sum(row["groups_drawn"] for row in rows[: i + 1]) for i in range(len(rows))]
    assert [row["lr"] for row in rows] == pytest.approx([1e-3 * (1 - prompts / 24) for prompts in drawn])
    (tmp_path / "b").mkdir()
    subprocess.run(["cp", "-r", tmp_path / "a" / "checkpoint-1", tmp_path / "b"], check=True)
    grpo.main(config(tiny_model, shapes, tmp_path / "b", resume="newest", **flags))
    assert [row["lr"] for row in read_jsonl(tmp_path / "b" / "metrics.jsonl")] == [row["lr"] for row in rows[1:]]
    a, b = weights(tmp_path / "a" / "final"), weights(tmp_path / "b" / "final")
    assert all(torch.equal(a[name], b[name]) for name in a)


@SLOW
def test_two_processes_decide_alike_on_empty_updates_and_epochs(tiny_model, shapes, tmp_path):
    """Some updates are empty. Which ones, and when the run ends, does not depend on the number of processes."""
    code = "def rare(completion, answer, question):\n    return float(sum(map(ord, completion)) % 11 == 0)\n"
    (tmp_path / "r.py").write_text(code)
    flags = [f"--model={tiny_model}", f"--data={shapes}", f"--reward={tmp_path}/r.py:rare", "--reward=count=0"]
    flags += ["--dynamic_sampling_rounds=2", "--epochs=2", "--prompts_per_update=2"]
    flags += [f"--{name}={value}" for name, value in (SMALL | {"learning_rate": 1e-3}).items()]
    for processes in (0, 2):
        done = run_script("grpo.py", *flags, f"--output={tmp_path}/{processes}", processes=processes)
        assert done.returncode == 0, done.stderr[-2000:]
    one, two = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("0", "2"))
    for name in ("groups_drawn", "updates_empty", "lr"):
        assert [row[name] for row in one] == [row[name] for row in two]
    assert sum(row["groups_drawn"] for row in one) == 24
    assert any(row["updates_empty"] for row in one)
    assert [row["grad_norm"] for row in one] == pytest.approx([row["grad_norm"] for row in two], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_weights_that_are_not_finite_are_not_exported(tiny_model, shapes, tmp_path, monkeypatch, lora_rank):
    step = grpo.train_step

    def break_weights(run):
        metrics = step(run)
        next(p for p in run.policy.parameters() if p.requires_grad).data.mul_(math.nan)
        return metrics

    monkeypatch.setattr(grpo, "train_step", break_weights)
    with pytest.raises(RunStopped, match=r"final' could not be written .*is not finite: use an earlier checkpoint"):
        grpo.main(config(tiny_model, shapes, tmp_path, max_steps=1, lora_rank=lora_rank))
    assert not list(tmp_path.glob("final*"))


MOODY_REWARD = """
import pathlib

def moody(completion, answer, **fields):
    \"\"\"No verdict for the first `TIMES` completions.\"\"\"
    for i in range(TIMES):
        try:
            (pathlib.Path(__file__).parent / f"mood-{i}").touch(exist_ok=False)
            return None
        except FileExistsError:
            pass
    return len(completion) % 7
"""


def test_no_verdict_leaves_a_completion_out(tiny_model, shapes, tmp_path):
    (tmp_path / "r.py").write_text(MOODY_REWARD.replace("TIMES", "1"))
    grpo.main(
        config(tiny_model, shapes, tmp_path / "run", max_steps=1, beta=0.1, reward=(f"{tmp_path}/r.py:moody=0.5",))
    )
    row = read_jsonl(tmp_path / "run" / "metrics.jsonl")[0]
    assert row["rewards/no_verdict"] == 1 / 16
    assert math.isfinite(row["loss"])
    assert 0 < row["rewards/moody"] < 7
    assert "rewards/count" in row


def test_more_than_a_tenth_without_verdict_stop_the_run(tiny_model, shapes, tmp_path, monkeypatch):
    """2 of 16 completions are more than a tenth. Training on what is left would favour what is easy to judge."""
    calls = []

    def reward(completion, answer, **_):
        calls.append(completion)
        return None if len(calls) <= 2 else len(completion) % 7

    monkeypatch.setitem(rewards.TASKS, "count", replace(rewards.TASKS["count"], reward=reward))
    with pytest.raises(RunStopped, match=r"step 1: 12% of the completions have no verdict, at most 10% may have none"):
        grpo.main(config(tiny_model, shapes, tmp_path, max_steps=1))


FAILING_REWARD = """
import pathlib

def failing(completion, answer):
    if not (pathlib.Path(__file__).parent / "failed").exists():
        (pathlib.Path(__file__).parent / "failed").touch()
        raise ValueError("oops")
    return len(completion) % 7
"""


def test_a_reward_that_raises_stops_the_run_with_its_message(tiny_model, shapes, tmp_path):
    """It does so for a single completion, which must not count as one without a verdict."""
    (tmp_path / "r.py").write_text(FAILING_REWARD)
    with pytest.raises(RunStopped, match=r"step 1: --reward \S+r\.py:failing on \S+ row \d+, .*oops") as stopped:
        grpo.main(config(tiny_model, shapes, tmp_path / "run", max_steps=1, reward=(f"{tmp_path}/r.py:failing",)))
    assert stopped.value.status == 1


@needs("parts/workers.py")
def test_a_step_with_many_completions_without_verdict_stops_the_run_and_loses_nothing(tiny_model, shapes, tmp_path):
    """If step 3 gets no verdicts, the run stops and saves step 2. Resuming gives the result of an uninterrupted run."""
    (tmp_path / "r.py").write_text("def fine(completion, answer, **_):\n    return len(completion) % 7\n")
    flags = dict(max_steps=4, seed=3, reward=(f"{tmp_path}/r.py:fine",))
    grpo.main(config(tiny_model, shapes, tmp_path / "undisturbed", **flags))
    silent = "def fine(completion, answer, **_):\n    import os\n    if os.path.exists(SILENT):\n        return None\n"
    silent = silent.replace("SILENT", repr(str(tmp_path / "silent"))) + "    return len(completion) % 7\n"
    (tmp_path / "r.py").write_text(silent)
    with pytest.MonkeyPatch.context() as patch:
        step = grpo.train_step
        patch.setattr(grpo, "train_step", lambda run: (run.step == 2 and (tmp_path / "silent").touch(), step(run))[1])
        with pytest.raises(
            RunStopped, match=r"step 3: 100% of the completions have no verdict.*r\.py:fine returned None.*--resume"
        ):
            grpo.main(config(tiny_model, shapes, tmp_path / "broken", **flags))
    (tmp_path / "silent").unlink()
    grpo.main(config(tiny_model, shapes, tmp_path / "broken", resume="newest", **flags))
    undisturbed, broken = weights(tmp_path / "undisturbed" / "final"), weights(tmp_path / "broken" / "final")
    assert all(torch.equal(undisturbed[name], broken[name]) for name in undisturbed)


def test_rewards_are_weighted_and_logged_apart(tiny_model, shapes, tmp_path):
    (tmp_path / "r.py").write_text("def one(completion, answer):\n    return 1.0\n")
    more = dict(reward=("count=0.5", "format=2", f"{tmp_path}/r.py:one=-3"), overlong_buffer=6)
    grpo.main(config(tiny_model, shapes, tmp_path / "run", max_steps=1, **more))
    row = read_jsonl(tmp_path / "run" / "metrics.jsonl")[0]
    means = {name: row[f"rewards/{name}"] for name in ("count", "format", "one", "overlong")}
    assert means["one"] == 1
    assert -1 <= means["overlong"] < 0
    expected = 0.5 * means["count"] + 2 * means["format"] - 3 * means["one"] + means["overlong"]
    assert row["reward"] == pytest.approx(expected, abs=1e-6)


def test_groups_that_differ_in_length_alone_are_not_kept_by_dynamic_sampling(brief_model, shapes, tmp_path):
    """With a constant reward such as 1/3, adding the penalty and subtracting it again would leave a rounding error.

    A step that keeps no group uses rewards of 0. Otherwise, it would train on length alone.
    """
    (tmp_path / "r.py").write_text("def third(completion, answer):\n    return 1 / 3\n")
    more = dict(reward=("count=0", f"{tmp_path}/r.py:third"), overlong_buffer=9, dynamic_sampling_rounds=2)
    grpo.main(config(brief_model, shapes, tmp_path / "run", max_steps=1, **more))
    row = read_jsonl(tmp_path / "run" / "metrics.jsonl")[0]
    assert row["groups_drawn"] == 8, "every group has equal rewards, so all rounds must be drawn"
    assert row["rewards/overlong"] < 0 and row["reward_std"] > 0
    assert (row["grad_norm"], row["updates_empty"]) == (0, 1), "there is nothing to learn but length"


def test_a_resumed_run_must_have_the_same_rows(tiny_model, shapes, tmp_path):
    grpo.main(config(tiny_model, shapes, tmp_path / "run", max_steps=1, save_every=1))
    table = pathlib.Path(shapes) / "main.csv"
    fewer = tmp_path / "fewer"
    subprocess.run(["cp", "-r", shapes, fewer], check=True)
    (fewer / "main.csv").write_text("".join(table.read_text().splitlines(keepends=True)[:-1]))
    os.rename(tmp_path / "run", tmp_path / "moved")
    state = tmp_path / "moved" / "checkpoint-1" / "state.json"
    state.write_text(state.read_text().replace(json.dumps(shapes), json.dumps(str(fewer))))
    write_manifest(state.parent)
    with pytest.raises(UserError, match=r"belongs to another run .rows was \[12\], is \[11\]"):
        grpo.main(config(tiny_model, str(fewer), tmp_path / "moved", max_steps=2, resume="newest"))


@pytest.mark.slow
def test_text_and_image_rows_train_together_on_two_processes(tiny_model, shapes, tmp_path):
    """In most steps, one process has no image: a step has four prompts, and only one row in six has images.

    The vision tower is trained, so the run would hang if that process did not join the tower's collectives.
    """
    rows = [{"prompt": f"How much is {i}?", "answer": str(i)} for i in range(10)]
    image = f"{shapes}/images/00000.png"
    rows += [
        {"prompt": "one", "answer": "1", "images": [image]},
        {"prompt": "two", "answer": "2", "images": [image] * 2},
    ]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [f"--model={tiny_model}", f"--data={tmp_path}/d.jsonl", "--task=count", "--max_steps=4", "--train_vision"]
    flags += [f"--{name}={value}" for name, value in (SMALL | {"learning_rate": 1e-3}).items()]
    for processes in (0, 2):
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = run_script("grpo.py", *flags, f"--output={tmp_path}/{processes}", processes=processes, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
    one, two = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("0", "2"))
    assert [row["reward"] for row in one] == pytest.approx([row["reward"] for row in two])
    assert [row["grad_norm"] for row in one] == pytest.approx([row["grad_norm"] for row in two], rel=1e-4)


SPLIT = dict(max_steps=2, micro_batch_tokens=200, beta=0.01, train_vision=True)


@pytest.fixture(scope="module")
def split_run(tiny_model, shapes, tmp_path_factory) -> pathlib.Path:
    """Return the folder of a run whose updates take several micro-batches."""
    folder = tmp_path_factory.mktemp("split")
    grpo.main(config(tiny_model, shapes, folder, overwrite=True, **SPLIT))
    return folder


@pytest.mark.parametrize(
    "where", ["backward", *(pytest.param(other, marks=SLOW) for other in ("forward", "reference"))]
)
def test_a_memory_overflow_shrinks_the_budget_and_counts_nothing_twice(
    tiny_model, shapes, split_run, tmp_path, where, capsys
):
    """A decoder layer runs out of memory in the second micro-batch, while the gradient is being accumulated."""
    loader = "load_reference" if where == "reference" else "load_policy"
    calls, load = [], getattr(training_run, loader)

    def overflow(*_):
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much")

    def overflowing(*args, **kwargs):
        policy = load(*args, **kwargs)
        layer = policy.model.model.language_model.layers[2]
        if where != "backward":
            layer.register_forward_pre_hook(overflow)
        else:
            layer.register_full_backward_hook(overflow)
        return policy

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_run, loader, overflowing)
        grpo.main(config(tiny_model, shapes, tmp_path, **SPLIT))
    assert "reducing micro-batches to 150 tokens" in capsys.readouterr().err
    assert len(calls) > 4
    plain, other = (read_jsonl(folder / "metrics.jsonl") for folder in (split_run, tmp_path))
    for row, retried in zip(plain, other):
        for name in ("reward", "loss", "grad_norm", "kl", "entropy"):
            assert retried[name] == pytest.approx(row[name], rel=1e-4, abs=1e-7), name
    one, two = weights(split_run / "final"), weights(tmp_path / "final")
    assert all(torch.allclose(one[name], two[name], atol=1e-4) for name in one)


def test_a_second_overflow_stops_with_advice(tiny_model, shapes, tmp_path, monkeypatch):
    load = training_run.load_policy

    def overflow(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much")

    def overflowing(*args, **kwargs):
        policy = load(*args, **kwargs)
        policy.model.model.language_model.layers[1].register_forward_pre_hook(overflow)
        return policy

    monkeypatch.setattr(training_run, "load_policy", overflowing)
    with pytest.raises(RunStopped, match=r"out of GPU memory .CUDA out of memory.*--activation_checkpointing full"):
        grpo.main(config(tiny_model, shapes, tmp_path, max_steps=1))


def test_a_sampler_that_is_another_model_stops_the_run(tiny_model, shapes, tmp_path, monkeypatch):
    """If the sampler's log-probabilities come from a different model, the run stops before training on them."""
    monkeypatch.setattr(rollout.HFEngine, "sync_weights", lambda self, policy: self.model.lm_head.weight.data.mul_(3))
    with pytest.raises(
        RunStopped, match=r"step 1: .* differ from the trainer's by .* more than 0.1: try --plugin parts/check_sync.py"
    ):
        grpo.main(config(tiny_model, shapes, tmp_path / "a", max_steps=1))
    monkeypatch.setattr(guards, "MAX_LOGP_DIFFERENCE", 0)
    grpo.main(config(tiny_model, shapes, tmp_path / "b", max_steps=1))


def test_a_sampler_that_differs_in_a_later_update_does_not_stop_the_run(tiny_model, shapes, tmp_path, monkeypatch):
    """By then, the first update has moved the weights: the step cannot be undone."""
    generate = rollout.HFEngine.generate

    def shifted(self, requests, sampling):
        outputs, second = generate(self, requests, sampling), len(requests) // 2
        return [*outputs[:second], *(replace(each, logp=each.logp - 5) for each in outputs[second:])]

    reward = replace(rewards.TASKS["count"], reward=lambda completion, answer, **_: float(len(completion) % 7))
    monkeypatch.setitem(rewards.TASKS, "count", reward)
    monkeypatch.setattr(rollout.HFEngine, "generate", shifted)
    grpo.main(config(tiny_model, shapes, tmp_path, max_steps=1, prompts_per_update=2))
    (row,) = metrics(tmp_path)
    assert 1 < row["sampling/logp_difference_mean"] < 4 and row["updates_empty"] == 0


# --- how runs end -----------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_stops_the_run(tiny_model, shapes, tmp_path):
    """The run keeps the checkpoint of step 1, although the last three are newer: none of them may be a good one."""
    with pytest.raises(RunStopped, match=r"step 4: 3 skipped updates in a row \(.*nan.*--learning_rate") as stopped:
        grpo.main(config(tiny_model, shapes, tmp_path, max_steps=4, save_every=1, keep_last=3, learning_rate=1e9))
    assert stopped.value.status == 1
    assert (tmp_path / "checkpoint-1" / "state.json").is_file()


def test_broken_model_folders_are_named(tiny_model, shapes, tmp_path):
    def copy(name: str) -> pathlib.Path:
        subprocess.run(["cp", "-r", tiny_model, tmp_path / name], check=True)
        return tmp_path / name

    (copy("a") / "config.json").unlink()
    (copy("b") / "preprocessor_config.json").unlink()
    content = (copy("c") / "model.safetensors").read_bytes()
    (tmp_path / "c" / "model.safetensors").write_bytes(content[:1000])
    for name, part in (("a", "config.json"), ("b", "image processor"), ("c", "config.json and weights")):
        with pytest.raises(UserError, match=rf"cannot load a model from '.*/{name}' \({part}: .*\): give a complete"):
            grpo.main(config(str(tmp_path / name), shapes, tmp_path / "out", max_steps=1))


@pytest.mark.parametrize("processes", [0, pytest.param(2, marks=SLOW)])
def test_ctrl_c_saves_a_checkpoint_and_ends_with_130(tiny_model, shapes, tmp_path, processes):
    flags = [f"--{name}={value}" for name, value in SMALL.items()]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes else []
    command = [sys.executable, *launcher, "grpo.py", f"--model={tiny_model}", f"--data={shapes}", *flags]
    command += [f"--output={tmp_path}", "--max_steps=100000"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.time() + 120
    while len(read_jsonl(tmp_path / "metrics.jsonl")) < 3 and time.time() < deadline and process.poll() is None:
        time.sleep(0.2)
    # send the signal to the launcher and all of its processes, as a terminal does
    subprocess.run(["pkill", f"-{signal.SIGINT.value}", "-g", str(process.pid)], check=True)
    _, err = process.communicate(timeout=60)
    checkpoints = list(tmp_path.glob("checkpoint-*"))
    assert len(checkpoints) == 1, err[-3000:]
    assert (checkpoints[0] / "state.json").is_file()
    assert "is complete: continue with --resume" in err
    if not processes:
        assert process.returncode == 130
        assert "Traceback" not in err
    else:
        assert process.returncode != 0


@pytest.mark.parametrize("lora_rank", [0, pytest.param(4, marks=SLOW)])
def test_a_model_trained_from_a_base_of_transformers_5_can_be_loaded(transformers_5_base, shapes, tmp_path, lora_rank):
    grpo.main(config(str(transformers_5_base), shapes, tmp_path, max_steps=1, lora_rank=lora_rank))
    model, adapter = (str(transformers_5_base), f"{tmp_path}/final") if lora_rank else (f"{tmp_path}/final", None)
    evaluate.main(
        evaluate.Config(model=model, adapter=adapter, data=shapes, task="count", limit=2, output=f"{tmp_path}/eval")
    )
    if lora_rank:
        merge_lora.merge_lora(model, adapter, f"{tmp_path}/merged")
        model = f"{tmp_path}/merged"
    assert not pathlib.Path(model, "preprocessor_config.json").exists(), "a base of transformers 5 stays one"


def test_generation_settings_that_transformers_does_not_save_are_copied(tiny_model, shapes, tmp_path):
    """Some published models set a temperature without `do_sample`."""
    shutil.copytree(tiny_model, tmp_path / "model")
    settings = json.dumps({"temperature": 0.9, "top_p": 0.6})
    (tmp_path / "model" / "generation_config.json").write_text(settings)
    grpo.main(config(str(tmp_path / "model"), shapes, tmp_path / "run", max_steps=1))
    assert (tmp_path / "run" / "final" / "generation_config.json").read_text() == settings


def test_an_export_that_cannot_be_loaded_ends_the_run_with_an_error(tiny_model, shapes, tmp_path, monkeypatch):
    def forget(base, folder):
        """Write no tokenizer."""
        shutil.copy(base / "config.json", folder)

    monkeypatch.setattr(export, "copy_settings", forget)
    with pytest.raises(RunStopped, match=r"final' could not be written \(cannot load a model from .*checkpoint-1"):
        grpo.main(config(tiny_model, shapes, tmp_path, max_steps=1))
    assert not (tmp_path / "final").exists() and (tmp_path / "checkpoint-1").is_dir()


# --- mistakes ---------------------------------------------------------------------------------------------------------


@needs("parts/math")
def test_mistakes_get_one_line_and_status_2(tiny_model, shapes, run, tmp_path):
    """Each mistake ends a real process with exit status 2 and a one-line error message; nothing is written."""
    rows = tmp_path / "bad.jsonl"
    rows.write_text(json.dumps({"prompt": "<image>?", "answer": "1", "images": ["gone.png"]}) + "\n")
    output = tmp_path / "out"
    model, data = f"--model={tiny_model}", f"--data={shapes}"
    cases = [
        (["grpo.py", model, data, "--learning_rat=1"], "--learning_rate"),
        (["grpo.py", model, data, "--num_generations=1"], "num_generations must be at least 2"),
        (["grpo.py", model, data, "--max_grad_norm=nan"], "max_grad_norm is nan: give a finite number"),
        (["grpo.py", model, data, "--prompts_per_step=0"], "prompts_per_step must be at least 1"),
        (["grpo.py", model, data, "--reward=count=1e999"], "--reward count=1e999: the weight must be a finite number"),
        (["grpo.py", model], "--data"),
        (["grpo.py", "--model=nowhere/at/all", data], "error: no model at 'nowhere/at/all'"),
        (["grpo.py", model, "--data=nowhere.jsonl"], "error: no data at 'nowhere.jsonl'"),
        (["grpo.py", model, f"--data={rows}"], "bad.jsonl row 1: no image at"),
        (["grpo.py", model, data, "--reward=nowhere.py:f"], "error: --reward nowhere.py:f: it cannot be loaded"),
        (
            ["grpo.py", model, data, "--task=math", "--verifier_url=localhost:9"],
            "error: the verifier at http://localhost:9",
        ),
        (
            ["data.py", "convert", "--input_jsonl=nowhere.jsonl", "--output_jsonl=x.jsonl"],
            "error: no data at 'nowhere.jsonl'",
        ),
        (["data.py", "show", "--row=1", model, data], "error: --row 1: the rows of"),
        (["grpo.py", model, data, "--resume"], "error: --resume: no checkpoint in"),
        (["grpo.py", model, f"--data={'x' * 5000}"], "xxx': File name too long; choose another path"),
        (["grpo.py", model, data, "--adapter="], "adapter is empty: give a value or leave out the flag"),
        (["evaluate.py", model, data, "--n=4"], "n above 1 needs a temperature"),
        (["grpo.py", model, data, "--advantage=x"], "error: --advantage x: choose one of group, batch, none, gdpo"),
    ]

    def start(case):
        script, *flags = case[0]
        flags += [f"--output={output}"] if script in ("grpo.py", "evaluate.py") else []
        return run_script(script, *flags)

    with ThreadPoolExecutor(2) as pool:
        for (command, message), done in zip(cases, pool.map(start, cases)):
            text = done.stderr + done.stdout
            assert done.returncode == 2, (command, text)
            assert message in text, (command, text)
            assert "Traceback" not in text, (command, text)
            if text.startswith("error:"):
                assert text.strip().count("\n") == 0, text
    assert not output.exists()
    with pytest.raises(UserError, match="contains a run: continue it with --resume or replace it with --overwrite"):
        grpo.main(config(tiny_model, shapes, run, max_steps=1))
