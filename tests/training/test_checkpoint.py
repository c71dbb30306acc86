"""Saving and resuming: kill -9 at random moments, truncated checkpoints, full disks, signals and dead processes.

Guards against: a resumed run that differs by even a single bit, loading a truncated checkpoint, and a save that
destroys an earlier checkpoint.
"""

import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import grpo
from common.errors import RunStopped, UserError
from common.files import read_jsonl
from policy.model import Policy
from tests.helpers.marks import needs, slow
from tests.helpers.runs import SMALL, config, difference, metrics, plugin_with_timeout, weights
from tests.helpers.scripts import Script, check_success, run_script, torchrun
from training import checkpoint, loop, run_folder
from training.checkpoint import Saver
from training.resume import check_settings, is_same_setting
from training.run_folder import RunFolder, verify_checkpoint, write_manifest

SLOW = pytest.mark.slow


PARTIAL = {"oversample": 2.0, "max_completion_length": 96}  # with unfinished completions in every checkpoint


@pytest.mark.parametrize(
    ("processes", "kills", "settings"),
    [
        (1, 3, {}),
        pytest.param(1, 20, {}, marks=SLOW),
        pytest.param(2, 20, {}, marks=SLOW),
        pytest.param(1, 10, PARTIAL, marks=SLOW),
        pytest.param(2, 10, PARTIAL, marks=SLOW),
    ],
)
def test_kills_change_not_a_bit(processes, kills, settings, brief_model, shapes, tmp_path):
    """Killing and resuming a run at random moments does not change its parameters, moments or metrics."""
    arguments = brief_model, shapes, tmp_path, processes, kills, 7, json.dumps(settings)
    with Script("tests/helpers/kill_worker.py", *arguments) as script:
        status, stderr = script.wait(600)
        stdout = script.out.read()
    assert status == 0, stdout[-2000:] + stderr[-2000:]
    killed_in = json.loads(stdout.splitlines()[-1])["killed_in"]
    print(killed_in)
    assert sum(killed_in.values()) == kills
    assert len(killed_in) >= min(4, kills // 4), f"killed in too few different phases: {killed_in}"
    last = "checkpoint-16" if kills > 4 else "checkpoint-6"
    assert difference(tmp_path / "plain" / last, tmp_path / "killed" / last, tmp_path) == 0.0
    plain, killed = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("plain", "killed"))
    assert all(torch.equal(plain[name], killed[name]) for name in plain)
    rows = metrics(tmp_path / "plain")
    assert rows == metrics(tmp_path / "killed")
    assert not settings or any(row["partial/groups_unfinished"] for row in rows)


@pytest.mark.parametrize("processes", [0, pytest.param(4, marks=SLOW)])
def test_two_processes_are_resumed_by_another_number(processes, tiny_model, shapes, tmp_path):
    flags = [f"--model={tiny_model}", f"--data={shapes}", "--save_every=2", "--beta=0.01", "--learning_rate=1e-3"]
    # With seed 0, one random number lies so near the border between two tokens that rounding decides which is sampled.
    flags += ["--seed=2", *(f"--{name}={value}" for name, value in SMALL.items())]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    unsharded = [f"--output={tmp_path}/two", "--max_steps=4", "--sharding=none"]
    first = run_script("grpo.py", *flags, *unsharded, processes=2, env=environment)
    assert first.returncode == 0, first.stderr[-2000:]
    files = [list((tmp_path / "two" / "checkpoint-4").glob(f"__{rank}_*.distcp")) for rank in range(2)]
    sizes = [sum(path.stat().st_size for path in paths) for paths in files]
    assert max(sizes) < 1.3 * min(sizes), "each process must write about half of the parameters"
    assert any(row["grad_norm"] > 1e-3 for row in read_jsonl(tmp_path / "two" / "metrics.jsonl"))
    (tmp_path / "other").mkdir()
    shutil.copytree(tmp_path / "two" / "checkpoint-2", tmp_path / "other" / "checkpoint-2")
    resume = [f"--output={tmp_path}/other", "--max_steps=4", "--resume"]
    second = run_script("grpo.py", *flags, *resume, processes=processes, env=environment)
    assert second.returncode == 0, second.stderr[-2000:]
    expected, resumed = (weights(tmp_path / name / "final") for name in ("two", "other"))
    assert max((expected[name] - resumed[name]).abs().max().item() for name in expected) < 1e-6
    assert difference(tmp_path / "two" / "checkpoint-4", tmp_path / "other" / "checkpoint-4", tmp_path) < 1e-6, (
        "the moments differ"
    )


@pytest.fixture(scope="module")
def saved(tiny_model, shapes, tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("saved") / "run"
    grpo.main(config(tiny_model, shapes, folder, max_steps=4, save_every=2))
    return folder


def test_a_truncated_file_is_always_noticed(saved, tmp_path, capsys):
    shutil.copytree(saved, tmp_path / "run")
    newest, rng = tmp_path / "run" / "checkpoint-4", random.Random(0)
    assert verify_checkpoint(newest) is None
    with pytest.raises(UserError, match=r"is a run: pass one of its checkpoints, the newest is .*checkpoint-4"):
        RunFolder(str(tmp_path)).plan_resume(str(tmp_path / "run"))
    with pytest.raises(UserError, match=r"--checkpoint: .* is a run: pass one of its checkpoints, .*checkpoint-4"):
        checkpoint.main(checkpoint.Config(str(tmp_path / "run"), str(tmp_path / "exported")))
    folder = RunFolder(str(tmp_path / "run"))
    files = [path for path in newest.iterdir() if path.is_file()]
    assert {"manifest.json", "state.json", "random-0.pt"} < {path.name for path in files}
    for path in files:
        content = path.read_bytes()
        path.write_bytes(content[: rng.randrange(len(content))])
        error = verify_checkpoint(newest)
        assert (path.name in error or path.name == "manifest.json") and "\n" not in error
        assert folder.plan_resume("newest").checkpoint.name == "checkpoint-2"
        assert "trying the previous checkpoint" in capsys.readouterr().err
        with pytest.raises(UserError, match="checkpoint-4"):
            folder.plan_resume(str(newest))
        path.write_bytes(content)
        assert verify_checkpoint(newest) is None


@pytest.mark.parametrize("name", ["state.json", "random-0.pt", ".metadata", "__0_0.distcp", "manifest.json"])
def test_a_checkpoint_without_one_of_its_files_is_not_complete(name, saved, tmp_path):
    folder = tmp_path / "checkpoint-4"
    shutil.copytree(saved / "checkpoint-4", folder)
    (folder / name).unlink()
    error = verify_checkpoint(folder)
    assert "is not a complete checkpoint" in error and name in error and "\n" not in error


def test_a_second_run_in_the_same_folder_is_refused(tiny_model, shapes, tmp_path):
    """All its processes say so and end, and the first run is undisturbed. After kill -9, the folder is free at once."""
    flags = [f"--model={tiny_model}", f"--data={shapes}", f"--output={tmp_path}/run", "--save_every=1"]
    flags += [f"--{name}={value}" for name, value in SMALL.items()]
    with Script("grpo.py", *flags, "--max_steps=1000") as first:
        while not (tmp_path / "run" / "checkpoint-2").is_dir():
            assert not first.has_ended(), first.stderr()[-3000:]
            time.sleep(0.02)
        holder = rf"error: another run writes to '\S+/run': .* \(pid {first.pid} on {socket.gethostname()}\)"
        for processes, how in ((0, ["--resume"]), (0, []), (2, ["--overwrite"])):
            second = run_script("grpo.py", *flags, *how, processes=processes)
            lines = second.stderr.splitlines()
            assert second.returncode == 2 and len(lines) == max(processes, 1), second.stderr
            assert all(re.search(holder, line) for line in lines), second.stderr
        assert not first.has_ended(), first.stderr()[-3000:]
        os.kill(first.pid, signal.SIGKILL)
        first.wait(30)
        assert [path.name for path in (tmp_path / "run").glob("final")] == []
        steps = len(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
        third = run_script("grpo.py", *flags, "--resume", f"--max_steps={steps + 1}")
    assert third.returncode == 0, third.stderr
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == list(range(1, steps + 2))


def test_the_same_seed_twice_is_the_same_run(saved, tiny_model, shapes, tmp_path):
    grpo.main(config(tiny_model, shapes, tmp_path, max_steps=4, save_every=2))
    assert metrics(tmp_path) == metrics(saved)
    assert difference(tmp_path / "checkpoint-4", saved / "checkpoint-4", tmp_path) == 0.0
    grpo.main(config(tiny_model, shapes, tmp_path / "other", max_steps=1, seed=1))
    assert metrics(tmp_path / "other")[0] != metrics(saved)[0]


def test_a_named_checkpoint_is_gone_on_from(saved, tiny_model, shapes, tmp_path):
    cfg = config(tiny_model, shapes, tmp_path, max_steps=4, resume=str(saved / "checkpoint-2"))
    grpo.main(cfg)
    expected, resumed = weights(saved / "final"), weights(tmp_path / "final")
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)


@pytest.mark.parametrize(("keep_last", "kept"), [(0, [1, 2, 3, 4]), (2, [3, 4]), (9, [1, 2, 3, 4])])
def test_the_last_are_kept(keep_last, kept, tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "write_manifest", lambda _: None)
    folder = RunFolder(str(tmp_path), keep_last)
    for step in range(1, 5):
        folder.partial(step).mkdir()
        folder.publish(step)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"checkpoint-{step}" for step in kept]


def test_the_same_held_out_rows_in_another_spelling_are_not_evaluated_again(tiny_model, shapes, tmp_path, monkeypatch):
    scores = iter([0.1, 0.9, 0.2, 0.3, 0.4])
    monkeypatch.setattr(loop, "score_completions", lambda run, samples: {"eval/reward": next(scores)})
    flags = dict(save_every=1, keep_last=1, eval_every=1)
    output = tmp_path / "run"
    grpo.main(config(tiny_model, shapes, output, max_steps=2, eval_data=shapes, **flags))
    same = os.path.relpath(shapes)
    grpo.main(config(tiny_model, shapes, output, max_steps=3, eval_data=same, resume="newest", **flags))
    assert sorted(path.name for path in output.glob("checkpoint-*")) == ["checkpoint-3"]
    grpo.main(config(tiny_model, shapes, output, max_steps=3, eval_data=shapes, resume="newest", **flags))
    assert next(scores) == 0.4, "a finished run is not evaluated again"


def test_urls_with_credentials_are_compared_without_them():
    assert is_same_setting("http://***@host/rows", "http://me:secret@host/rows")
    assert not is_same_setting("http://***@host/rows", "http://me:secret@other/rows")
    assert is_same_setting(None, None) and not is_same_setting("rows", None)


def test_a_resumed_run_names_files_that_may_have_changed(tiny_model, shapes, tmp_path, capsys):
    model, reward, template = tmp_path / "model", tmp_path / "mine.py", tmp_path / "prompt.jinja"
    shutil.copytree(tiny_model, model)
    reward.write_text("def short(completion, answer):\n    return float(len(completion) < 9)\n")
    template.write_text("{{ content }}")
    flags = dict(reward=("count=0.5", f"{reward}:short"), template=str(template), save_every=1)
    grpo.main(config(str(model), shapes, tmp_path / "run", max_steps=1, **flags))
    grpo.main(config(str(model), shapes, tmp_path / "run", max_steps=2, resume="newest", **flags))
    assert "perhaps changed" not in capsys.readouterr().err
    later = time.time() + 60
    for path in (reward, template, model / "model.safetensors"):
        os.utime(path, (later, later))
    (model / "notes.txt").write_text("not of the model")
    grpo.main(config(str(model), shapes, tmp_path / "run", max_steps=3, resume="newest", **flags))
    expected = f"newer than the checkpoint, so perhaps changed: {model}, {template}, {reward}\n"
    assert expected in capsys.readouterr().err


def test_other_held_out_rows_are_evaluated_before_the_next_step(tiny_model, shapes, tmp_path, monkeypatch):
    scores = iter([0.1, 0.9, 0.2, 0.3, 0.4, 0.5])
    monkeypatch.setattr(loop, "score_completions", lambda run, samples: {"eval/reward": next(scores)})
    shutil.copytree(shapes, tmp_path / "others")
    flags = dict(save_every=1, keep_last=1, eval_every=1)
    output = tmp_path / "run"
    grpo.main(config(tiny_model, shapes, output, max_steps=2, eval_data=shapes, **flags))
    grpo.main(
        config(tiny_model, shapes, output, max_steps=4, eval_data=str(tmp_path / "others"), resume="newest", **flags)
    )
    assert next(scores, None) is None, "after step 2 of the resumed run, too"


def test_a_full_disk_leaves_what_is_there_and_says_what_is_missing(tiny_model, shapes, tmp_path, capsys):
    """The first checkpoint and the final model fit on a real disk of 24 MB, but later checkpoints do not."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk on this machine: {mounted.stderr.decode().strip()}")
    try:
        grpo.main(config(tiny_model, shapes, disk / "run", max_steps=4, save_every=1, report_every=1))
        stderr = capsys.readouterr().err
        assert "a checkpoint takes 0.0" in stderr
        assert re.search(r"could not save checkpoint-\d: .* free another .* GB; checkpoint-\d is complete", stderr)
        names = sorted(path.name for path in (disk / "run").glob("checkpoint-*"))
        assert names and "checkpoint-4" not in names
        assert all(verify_checkpoint(disk / "run" / name) is None for name in names)
        assert (disk / "run" / "final" / "model.safetensors").is_file()
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)  # something may still be looking at it


def test_a_folder_that_somebody_moves_is_made_again(tiny_model, shapes, tmp_path, monkeypatch):
    step, output = grpo.train_step, tmp_path / "run"

    def move_first(run):
        if run.step == 1:
            output.rename(tmp_path / "moved")
        return step(run)

    monkeypatch.setattr(grpo, "train_step", move_first)
    grpo.main(config(tiny_model, shapes, output, max_steps=2, save_every=2))
    assert (tmp_path / "moved").is_dir() and verify_checkpoint(output / "checkpoint-2") is None
    assert (output / "final" / "model.safetensors").is_file()


def test_a_disk_that_fills_while_it_is_written_to(saved, tiny_model, shapes, tmp_path, monkeypatch, capsys):
    """The disk fills up only after its free space has been checked."""
    monkeypatch.setattr(Saver, "_missing_space", lambda *_: None)

    def full(path):
        raise OSError(28, "No space left on device")

    grpo.main(config(tiny_model, shapes, tmp_path, max_steps=1, save_every=1))
    monkeypatch.setattr(run_folder, "write_manifest", full)
    grpo.main(config(tiny_model, shapes, tmp_path, max_steps=3, save_every=1, resume="newest"))
    assert "is full; checkpoint-1 is complete" in capsys.readouterr().err
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]


@pytest.mark.parametrize("processes", [*slow(0), 2])
def test_sigterm_in_the_middle_of_a_step_gives_it_up(processes, tiny_model, shapes, tmp_path):
    """A signal during the micro-batches of a long step aborts the step. The resumed run repeats that step."""
    sizes = dict(prompts_per_step=12 if processes else 4, num_generations=8, micro_batch_tokens=60)
    flags = [f"--model={tiny_model}", f"--data={shapes}", f"--output={tmp_path}/run", "--max_steps=2"]
    flags += ["--task=count", "--max_completion_length=12", *(f"--{name}={value}" for name, value in sizes.items())]
    launcher = torchrun("--standalone", f"--nproc_per_node={processes}") if processes else []
    with Script(*launcher, "grpo.py", *flags) as script:
        while not read_jsonl(tmp_path / "run" / "metrics.jsonl"):
            assert not script.has_ended(), script.stderr()[-3000:]
            time.sleep(0.05)
        time.sleep(0.3)
        os.kill(script.pid, signal.SIGTERM)
        status, stderr = script.wait(60)
    assert status != 0, "the run ended before the signal"
    assert "stopped after step 1; checkpoint-1 is complete: continue with --resume" in stderr, stderr[-2000:]
    assert verify_checkpoint(tmp_path / "run" / "checkpoint-1") is None
    if not processes:  # the resumed run is identical to an uninterrupted run
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        flags = sizes | dict(learning_rate=1e-6, max_steps=2, report_every=10)
        grpo.main(config(tiny_model, shapes, tmp_path / "run", resume="newest", **flags))
        grpo.main(config(tiny_model, shapes, tmp_path / "undisturbed", **flags))
        torch.set_num_threads(threads)
        assert metrics(tmp_path / "run") == metrics(tmp_path / "undisturbed")
        assert difference(*(tmp_path / name / "checkpoint-2" for name in ("run", "undisturbed")), tmp_path) == 0.0


@contextlib.contextmanager
def started_run(folder: pathlib.Path, *flags: str, max_restarts: int) -> Iterator[tuple[Script, int]]:
    """Start a run on two processes and wait for its second checkpoint. Yields torchrun and the pid of a worker."""
    flags += (f"--output={folder}", "--save_every=1", *(f"--{name}={value}" for name, value in SMALL.items()))
    launcher = torchrun("--standalone", "--nproc_per_node=2", f"--max_restarts={max_restarts}")
    with Script(*launcher, "grpo.py", *flags) as script:
        while not (folder / "checkpoint-2").is_dir():
            assert not script.has_ended(), script.stderr()[-3000:]
            time.sleep(0.02)
        children = subprocess.run(["pgrep", "-P", str(script.pid)], capture_output=True, text=True, check=True)
        yield script, int(children.stdout.split()[-1])


@needs("parts/plugins.py")
@pytest.mark.parametrize("how", [signal.SIGKILL, *slow(signal.SIGSTOP)])
def test_a_process_that_dies_or_hangs_ends_the_job(how, tiny_model, shapes, tmp_path):
    """If a process dies, the job ends within 30 seconds, and torchrun names the process. If a process hangs, the job
    ends within `distributed.TIMEOUT` plus torchrun's 30 seconds."""
    flags = [f"--model={tiny_model}", f"--data={shapes}", "--max_steps=1000"]
    flags += [f"--plugin={plugin_with_timeout(tmp_path, 18)}"]
    with started_run(tmp_path / "run", *flags, max_restarts=0) as (script, child):
        os.kill(child, how)
        killed_at = time.monotonic()
        status, stderr = script.wait(90)
    assert time.monotonic() - killed_at < (30 if how == signal.SIGKILL else 60)
    assert status != 0
    assert "another process died or hangs (" in stderr, stderr[-3000:]
    assert how == signal.SIGSTOP or f"Signal 9 (SIGKILL) received by PID {child}" in stderr, stderr[-3000:]


@SLOW  # tests/policy/test_sharding.py replaces a whole machine by the same means
def test_a_killed_process_is_started_again(tiny_model, shapes, tmp_path):
    """With `--max_restarts`, torchrun restarts the job, which resumes from its checkpoint and finishes."""
    flags = [f"--model={tiny_model}", f"--data={shapes}", "--max_steps=9", "--resume=auto"]
    with started_run(tmp_path / "run", *flags, max_restarts=1) as (script, child):
        os.kill(child, signal.SIGKILL)
        check_success(script)
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == list(range(1, 10))
    assert (tmp_path / "run" / "final").is_dir()


def test_an_update_that_is_not_a_number_is_left_out_and_named(tiny_model, shapes, tmp_path, monkeypatch, capsys):
    """In steps 1, 3 and 5, a log-probability of the first prompt is NaN. Three such steps in a row would end the run.

    The learning rate falls as if these updates had been taken.
    """
    bad, forward = {"steps": (1, 3, 5)}, Policy.forward

    def broken(policy, *args):
        logp, entropy = forward(policy, *args)
        if run.step + 1 in bad["steps"]:
            logp = torch.cat([logp[:1] * float("nan"), logp[1:]])
        return logp, entropy

    monkeypatch.setattr(Policy, "forward", broken)
    run = grpo.set_up(config(tiny_model, shapes, tmp_path / "one", max_steps=5, lr_schedule="linear"))
    run.loop.train(run, grpo.train_step)
    stderr = capsys.readouterr().err
    assert "step 3: loss nan, gradient norm nan (" in stderr and "main.csv row" in stderr
    assert "this update is skipped" in stderr
    rows = read_jsonl(tmp_path / "one" / "metrics.jsonl")
    assert [row["updates_skipped"] for row in rows] == [1, 0, 1, 0, 1]
    assert [row["updates_empty"] for row in rows] == [0] * 5
    assert [row["lr"] for row in rows] == pytest.approx([8e-4, 6e-4, 4e-4, 2e-4, 0])
    bad["steps"] = range(2, 99)
    run = grpo.set_up(config(tiny_model, shapes, tmp_path / "two", max_steps=9))
    with pytest.raises(RunStopped, match=r"step 4: 3 skipped updates in a row .*lower --learning_rate"):
        run.loop.train(run, grpo.train_step)


def test_any_checkpoint_becomes_a_model(saved, tmp_path):
    done = run_script("-m", "training.checkpoint", f"--checkpoint={saved}/checkpoint-4", f"--output={tmp_path}/model")
    assert done.returncode == 0, done.stderr[-2000:]
    expected, exported = weights(saved / "final"), weights(tmp_path / "model")
    assert all(torch.equal(expected[name], exported[name]) for name in expected)
    failed = run_script("-m", "training.checkpoint", f"--checkpoint={saved}/nowhere", f"--output={tmp_path}/other")
    assert (failed.returncode, "is not a complete checkpoint" in failed.stderr) == (2, True)
    assert "Traceback" not in failed.stderr


SETTINGS = "task rows rows_digest seed drop_last prompts_per_step num_generations model train_vision "
SETTINGS += "train_router lora_rank lora_alpha lora_experts adapter load_in_4bit prompts_per_update num_iterations "
SETTINGS += "loss_type reward"


STATE = {"step": 1, "eval_due": False, "parts": [], "collector": {"position": 0, "lengths": {}}}
STATE |= {"updater": {"num_updates": 0, "skipped": 0, "norms": []}}


@pytest.mark.parametrize("name", SETTINGS.split())
def test_settings_that_must_not_change(name, tmp_path):
    """With another order of the rows, for example, the resumed run would train on some of them twice.

    The names are written out here, so that none is lost from the code.
    """
    saved = asdict(grpo.Config(data="rows", learning_rate=1)) | {name: 1}
    (tmp_path / "state.json").write_text(json.dumps(STATE | {"config": saved}))
    with pytest.raises(UserError, match=rf"belongs to another run \({name} was 1, is 2\)"):
        check_settings(tmp_path, checkpoint.read_progress(tmp_path)["config"], {name: 2})


@pytest.mark.parametrize("lacks", ["parts", "config"])
def test_a_checkpoint_of_another_version_is_refused(lacks, tmp_path):
    """It lacks a part of what is saved, or a setting."""
    saved = STATE | {"config": asdict(grpo.Config(data="rows", learning_rate=1))}
    del (saved["config"] if lacks == "config" else saved)["adapter" if lacks == "config" else lacks]
    (tmp_path / "state.json").write_text(json.dumps(saved))
    with pytest.raises(UserError, match=r"\((KeyError: .*|ValueError: it is of another version)\): use"):
        checkpoint.read_progress(tmp_path)


DEEPER = [("config", "learning_rate", None), ("collector", "position", "1"), ("collector", "lengths", [3])]
DEEPER += [("updater", "norms", ["1"]), ("updater", "num_updates", None), ("updater", "skipped", -1)]


@pytest.mark.parametrize(
    "damage",
    ["random-0.pt", ".metadata", "__0_0.distcp", {"parts": 3}, {"eval_due": []}, {"updater": {"schedulers": 3}}],
    ids=str,
)
def test_a_damaged_checkpoint_is_refused_before_anything_is_changed(damage, saved, tiny_model, shapes, tmp_path):
    """Its files have the right sizes: the manifest cannot tell."""
    shutil.copytree(saved, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoint-4"
    if isinstance(damage, str):
        (folder / damage).write_bytes(bytes((folder / damage).stat().st_size))
    else:
        state = json.loads((folder / "state.json").read_text())
        for name, value in damage.items():
            state[name] = state[name] | value if isinstance(value, dict) else value
        (folder / "state.json").write_text(json.dumps(state))
        write_manifest(folder)
    before = {path: path.stat() for path in (tmp_path / "run").rglob("*") if path.name != "run.lock"}
    with pytest.raises(UserError, match=r"checkpoint-4 cannot be loaded into this run \(.*\): .* delete it$"):
        grpo.main(config(tiny_model, shapes, tmp_path / "run", max_steps=5, resume="newest"))
    assert all(path.stat().st_mtime_ns == stat.st_mtime_ns for path, stat in before.items())


def test_a_state_of_another_shape_is_refused_before_anything_is_deleted(tiny_model, shapes, tmp_path):
    """Guards against a run that replaces its output since the step of its checkpoint is null."""
    flags = dict(output=tmp_path / "run", save_every=1)
    grpo.main(config(tiny_model, shapes, **flags, max_steps=1))
    path = tmp_path / "run" / "checkpoint-1" / "state.json"
    whole, manifest = json.loads(path.read_text()), json.loads((path.parent / "manifest.json").read_text())
    deeper = [{part: whole[part] | {name: value}} for part, name, value in DEEPER]
    for change in ("[]", "null", '"text"', "{", {"step": None}, {"step": 2.0}, {"step": -5}, {"updater": []}, *deeper):
        text = change if isinstance(change, str) else json.dumps(whole | change)
        manifest["files"]["state.json"]["size"] = len(text)
        (path.parent / "manifest.json").write_text(json.dumps(manifest))
        path.write_text(text)
        with pytest.raises(UserError, match="checkpoint-1 cannot be loaded into this run "):
            grpo.main(config(tiny_model, shapes, **flags, max_steps=2, resume="newest", learning_rate=None))
        assert path.read_text() == text and (tmp_path / "run" / "metrics.jsonl").is_file()


def test_global_generators_continue_where_a_checkpoint_left_them():
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()

    states = checkpoint.random_states()
    first = draw()
    assert draw() != first
    checkpoint.restore_random_states(states)
    assert draw() == first


def test_a_checkpoint_from_a_gpu_can_be_resumed_without_one(monkeypatch):
    """It has the random state of the GPU, which there is nothing to set."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda _: pytest.fail("there is no GPU"))
    checkpoint.restore_random_states(checkpoint.random_states() | {"cuda": torch.get_rng_state()})


@pytest.mark.parametrize("text", ["[]", "3", "null", '{"files": []}', '{"files": {"a": 3}}', "[" * 100_000])
def test_a_manifest_of_another_shape_is_no_traceback(text, tmp_path):
    (tmp_path / "a").write_text("x")
    (tmp_path / "manifest.json").write_text(text)
    assert verify_checkpoint(tmp_path).startswith(f"{tmp_path} is not a complete checkpoint (")
