"""Resuming a single-process run, and faults: signals, full disks, failing rewards and missing images.

Guards against: losing a step when a run ends, misleading advice, mixing two runs in one folder, and losing a checkpoint
because there is another checkpoint for the same or a later step.
"""

import contextlib
import errno
import io
import json
import math
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys

import pytest
import torch

import grpo
from common import distributed, files, signals
from common.errors import RunStopped, UserError, WorkerLost
from common.files import read_jsonl
from common.records import Completion, Group, Prompt, Rollout
from config import RewardFlags
from evaluation.scorer import Scorer
from grading.calls import call, start_workers
from policy import export
from tests.helpers.marks import needs, slow
from tests.helpers.rows import make_sample
from tests.helpers.runs import SMALL, config, difference, metrics
from tests.helpers.scripts import ROOT, run_script
from training import checkpoint, loop, run_folder
from training.checkpoint import Saver
from training.collect import Collector
from training.guards import describe_nonfinite
from training.run_folder import RunFolder, verify_checkpoint
from training.run_log import RunLog


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Use one thread, so that identical runs give bit-identical results even on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def saved(tiny_model, shapes, tmp_path_factory) -> pathlib.Path:
    """Return the folder of a finished run with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    grpo.main(config(tiny_model, shapes, folder, max_steps=4, save_every=2))
    return folder


# --- resuming ---------------------------------------------------------------------------------------------------------


def test_an_older_checkpoint_is_resumed_in_a_folder_of_its_own(saved, tiny_model, shapes, tmp_path):
    """In its own folder, the run would meet the later checkpoint again. Nothing is changed there."""
    shutil.copytree(saved, tmp_path / "run")
    resume, before = str(tmp_path / "run" / "checkpoint-2"), list_files(tmp_path / "run")
    flags = dict(max_steps=4, save_every=2, resume=resume)
    for more in ({}, {"overwrite": True}):
        with pytest.raises(UserError, match=r"^--resume: \S+-4 is newer than \S+-2: choose a new --output to start"):
            grpo.main(config(tiny_model, shapes, tmp_path / "run", **flags, **more))
    grpo.main(config(tiny_model, shapes, tmp_path / "new", **flags))
    assert list_files(tmp_path / "run") == before
    assert difference(tmp_path / "new" / "checkpoint-4", saved / "checkpoint-4", tmp_path) == 0.0


def list_files(folder: pathlib.Path) -> dict[pathlib.Path, int]:
    """Return all files of `folder` but its lock, and when they were last written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.name != "run.lock"}


def test_damaged_checkpoints_after_the_one_resumed_are_in_nobodys_way(saved, tiny_model, shapes, tmp_path):
    """A damaged checkpoint-4 is replaced, and a damaged checkpoint-9 does not displace new checkpoints.

    The partly written checkpoint that a killed run left behind is deleted.
    """
    shutil.copytree(saved, tmp_path / "run")
    shutil.copytree(saved / "checkpoint-4", tmp_path / "run" / "checkpoint-9")
    for name in ("checkpoint-4", "checkpoint-9"):
        (tmp_path / "run" / name / "state.json").write_text("{")
    (tmp_path / "run" / "checkpoint-3.partial").mkdir()
    for resume in (str(tmp_path / "run" / "checkpoint-2"), "newest"):
        flags = dict(max_steps=4, save_every=1, keep_last=1, resume=resume)
        run = grpo.set_up(config(tiny_model, shapes, tmp_path / "run", **flags))
    names = {path.name for path in (tmp_path / "run").glob("checkpoint-*")}
    assert names == {"checkpoint-2", "checkpoint-4", "checkpoint-9"}
    run.loop.train(run, grpo.train_step)
    names = {path.name for path in (tmp_path / "run").glob("checkpoint-*")}
    assert names == {"checkpoint-4", "checkpoint-9"}
    assert difference(tmp_path / "run" / "checkpoint-4", saved / "checkpoint-4", tmp_path) == 0.0


def test_a_complete_checkpoint_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "write_manifest", lambda _: None)
    monkeypatch.setattr(run_folder, "verify_checkpoint", lambda _: None)
    folder = RunFolder(str(tmp_path))
    for path in (tmp_path / "checkpoint-1", folder.partial(1)):
        path.mkdir()
        (path / "file").touch()
    with pytest.raises(OSError, match="not empty"):
        folder.publish(1)
    assert (tmp_path / "checkpoint-1" / "file").is_file()


def test_runs_do_not_mix(saved, tiny_model, shapes, tmp_path):
    """A run in the folder is not replaced, and a checkpoint from another folder cannot be resumed there.

    If there is no checkpoint, the error message does not advise --resume.
    """
    shutil.copytree(saved, tmp_path / "run")
    with pytest.raises(UserError, match="contains a run: continue it with --resume or replace it with --overwrite"):
        grpo.main(config(tiny_model, shapes, tmp_path / "run", max_steps=1))
    assert (tmp_path / "run" / "checkpoint-4").is_dir() and (tmp_path / "run" / "final").is_dir()
    with pytest.raises(UserError, match="contains a run"):
        grpo.main(config(tiny_model, shapes, tmp_path / "run", max_steps=4, resume=str(saved / "checkpoint-2")))
    for folder in (tmp_path / "run").glob("checkpoint-*"):
        shutil.rmtree(folder)
    with pytest.raises(UserError, match=r"without a checkpoint: replace it with --overwrite"):
        grpo.main(config(tiny_model, shapes, tmp_path / "run", max_steps=1))
    with pytest.raises(UserError, match=r"no checkpoint in .*use --overwrite instead to start a new run"):
        RunFolder(str(tmp_path / "run")).plan_resume("newest")


def test_the_same_command_starts_and_goes_on(tiny_model, shapes, tmp_path):
    """`--resume auto` is for commands that a scheduler may restart.

    The run resumes from the newest checkpoint, or starts anew if there is no checkpoint yet. A final model is never
    replaced.
    """
    cfg = config(tiny_model, shapes, tmp_path / "run", max_steps=1, resume="auto")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')  # as if killed before its first checkpoint
    grpo.main(cfg)
    grpo.main(config(tiny_model, shapes, tmp_path / "run", max_steps=2, resume="auto"))
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
    for folder in (tmp_path / "run").glob("checkpoint-*"):
        shutil.rmtree(folder)
    with pytest.raises(UserError, match="contains a run without a checkpoint: replace it with --overwrite"):
        grpo.main(cfg)


@pytest.mark.parametrize("flags", [{}, {"overwrite": True}, {"resume": "checkpoint-2"}])
def test_a_command_that_torchrun_may_restart_has_to_continue_its_run(
    flags, saved, tiny_model, shapes, tmp_path, monkeypatch
):
    """Otherwise, the restarted command would be refused, or delete what it has trained."""
    shutil.copytree(saved, tmp_path / "run")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(UserError, match=r"^with --max_restarts 3, torchrun .* again: add --resume auto$"):
        grpo.set_up(config(tiny_model, shapes, tmp_path / "run", max_steps=4, **flags))
    flags["resume"] = "auto"
    assert grpo.set_up(config(tiny_model, shapes, tmp_path / "run", max_steps=4, **flags)).step == 4


def test_a_resumed_run_has_the_same_objective_and_rows(saved, tiny_model, shapes, tmp_path, capsys):
    """Resuming with a changed objective or changed rows is an error. Other changes are only printed."""
    shutil.copytree(saved, tmp_path / "run")
    flags = dict(resume="newest", max_steps=4)
    for name, value in dict(loss_type="dapo", train_vision=True, num_iterations=2, prompts_per_update=2).items():
        with pytest.raises(UserError, match=rf"belongs to another run .*{name} was .*, is {value}"):
            grpo.set_up(config(tiny_model, shapes, tmp_path / "run", **flags, **{name: value}))
    assert "frozen:" not in capsys.readouterr().err, "it must be found before the model is loaded"
    other = tmp_path / "other"
    shutil.copytree(shapes, other)
    rows = (other / "main.csv").read_text().splitlines(keepends=True)
    (other / "main.csv").write_text("".join([rows[0], *reversed(rows[1:])]))
    with pytest.raises(UserError, match=r"rows_digest was \w+, is \w+"):
        grpo.set_up(config(tiny_model, str(other), tmp_path / "run", **flags))
    grpo.set_up(config(tiny_model, shapes, tmp_path / "run", **flags, temperature=0.9, max_completion_length=20))
    stderr = capsys.readouterr().err
    assert "temperature was 1.0, is 0.9" in stderr and "max_completion_length was 12, is 20" in stderr
    (tmp_path / "moved").symlink_to(tiny_model)
    shutil.copytree(shapes, tmp_path / "copied")
    grpo.set_up(config(str(tmp_path / "moved"), str(tmp_path / "copied"), tmp_path / "run", **flags))
    assert (
        f"settings changed since the checkpoint: data was {shapes}, is {tmp_path}/copied\n" in capsys.readouterr().err
    )


def test_learning_rate_and_weight_decay_follow_the_new_command(saved, tiny_model, shapes, tmp_path):
    flags = dict(learning_rate=1e-4, weight_decay=0.3, lr_schedule="constant", warmup=0)
    run = grpo.set_up(config(tiny_model, shapes, tmp_path, resume=str(saved / "checkpoint-2"), max_steps=4, **flags))
    assert [(group["lr"], group["weight_decay"]) for group in run.updater.param_groups] == [
        (1e-4, 0.3),
        (1e-4, 0.0),
    ] * 2
    ((optimizer, scheduler),) = run.updater.optimizers
    assert scheduler.last_epoch == 2 and scheduler.base_lrs == [1e-4] * 4
    assert all(entry["step"] == 2 for entry in optimizer.state_dict()["state"].values())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({}, "1e-06 (the default for all weights)"),
        ({"lora_rank": 4}, "3e-05 (the default for an adapter)"),
        ({"resume": "checkpoint-2"}, "0.001 (that of the run so far)"),
    ],
)
def test_without_a_learning_rate_the_run_says_which_it_takes(flags, said, saved, tiny_model, shapes, tmp_path):
    with contextlib.redirect_stderr(io.StringIO()) as err:
        flags = {name: str(saved / value) if name == "resume" else value for name, value in flags.items()}
        run = grpo.set_up(config(tiny_model, shapes, tmp_path, learning_rate=None, **flags))
    rate = float(said.split()[0])
    assert {group["lr"] for group in run.updater.param_groups} == {rate}
    assert json.loads((tmp_path / "config.json").read_text())["learning_rate"] == rate
    assert f"learning rate: {said}" in err.getvalue() and "learning_rate was" not in err.getvalue()


def test_a_checkpoint_of_another_model_is_refused_in_one_line(saved, tiny_model, shapes, tmp_path):
    run = grpo.set_up(config(tiny_model, shapes, tmp_path, train_vision=True))
    folder, line = saved / "checkpoint-4", r"checkpoint-4 cannot be loaded into this run \(.*\): use the flags"
    with pytest.raises(UserError, match=line), checkpoint.reading(folder):
        checkpoint.load_checkpoint(folder, run.policy, None, run.updater.optimizers)


# --- faults during a run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", [{}, {"lora_rank": 4, "lora_dropout": 0.5}])
def test_a_step_that_broke_off_at_once_is_taken_again(adapter, tiny_model, shapes, tmp_path, monkeypatch):
    """A signal arrives after an evaluation, while the first step computes its gradient. The resumed run must give the
    same result as an uninterrupted run, also if dropout has drawn random numbers by then."""
    flags = dict(max_steps=2, eval_data=shapes, micro_batch_tokens=60) | adapter
    grpo.main(config(tiny_model, shapes, tmp_path / "plain", **flags))
    loss = grpo.batch_loss

    def signalled(*args):
        run.loop.interrupted.append(signal.SIGTERM)
        return loss(*args)

    run = grpo.set_up(config(tiny_model, shapes, tmp_path / "run", **flags))
    with monkeypatch.context() as patch:
        patch.setattr(grpo, "batch_loss", signalled)
        with pytest.raises(RunStopped, match="stopped after step 0; checkpoint-0 is complete: continue") as stopped:
            run.loop.train(run, grpo.train_step)
    assert stopped.value.status == 130
    grpo.main(config(tiny_model, shapes, tmp_path / "run", resume="newest", **flags))
    assert metrics(tmp_path / "run") == metrics(tmp_path / "plain")
    assert difference(tmp_path / "run" / "checkpoint-2", tmp_path / "plain" / "checkpoint-2", tmp_path) == 0.0


@pytest.mark.parametrize("passes", ["first update", *slow("reference")])
def test_a_signal_before_the_weights_move_undoes_the_step(passes, tiny_model, shapes, tmp_path, monkeypatch):
    """A real signal in the second step, of two updates with a KL term. The resumed run takes that step again."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored
    flags = dict(max_steps=2, micro_batch_tokens=60, num_iterations=2, beta=0.01)
    grpo.main(config(tiny_model, shapes, tmp_path / "plain", **flags))
    run = grpo.set_up(config(tiny_model, shapes, tmp_path / "run", **flags))
    owner, name = (run.updater, "with_logprobs") if passes == "reference" else (grpo, "backward")
    function = getattr(owner, name)

    def signalled(*args):
        if run.step == 1 and not run.loop.interrupted:
            os.kill(os.getpid(), signal.SIGTERM if passes == "reference" else signal.SIGHUP)
        return function(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, signalled)
        with pytest.raises(RunStopped, match="stopped after step 1; checkpoint-1 is complete: continue") as stopped:
            run.loop.train(run, grpo.train_step)
    assert stopped.value.status == 130
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1]
    grpo.main(config(tiny_model, shapes, tmp_path / "run", resume="newest", **flags))
    assert metrics(tmp_path / "run") == metrics(tmp_path / "plain")
    assert difference(tmp_path / "run" / "checkpoint-2", tmp_path / "plain" / "checkpoint-2", tmp_path) == 0.0


def test_an_evaluation_that_fails_or_has_to_wait_is_made_up_for(tiny_model, shapes, tmp_path, monkeypatch):
    """If an evaluation fails, the preceding step and its metrics are saved. A signal postpones an evaluation.

    The resumed run gives the same scores as an uninterrupted run.
    """
    flags = dict(max_steps=3, eval_data=shapes, eval_every=1)
    grpo.main(config(tiny_model, shapes, tmp_path / "plain", **flags))
    evaluate, step = loop.score_completions, grpo.train_step

    def failing(run, samples):
        if run.step == 1:
            raise UserError("--reward r.py:f on row 3: ValueError")
        return evaluate(run, samples)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "score_completions", failing)
        with pytest.raises(
            RunStopped, match=r"evaluation after step 1: --reward r.py.*; checkpoint-1 is complete: continue"
        ):
            grpo.main(config(tiny_model, shapes, tmp_path / "run", **flags))
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [0, 1]
    with monkeypatch.context() as patch:
        patch.setattr(grpo, "train_step", lambda run: (step(run), run.loop.interrupted.append(signal.SIGTERM))[0])
        with pytest.raises(RunStopped, match="stopped after step 2; checkpoint-2 is complete"):
            grpo.main(config(tiny_model, shapes, tmp_path / "run", resume="newest", **flags))
    assert "eval/reward" not in read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]
    grpo.main(config(tiny_model, shapes, tmp_path / "run", resume="newest", **flags))
    for row, plain in zip(metrics(tmp_path / "run"), metrics(tmp_path / "plain")):
        assert {name: (row[name], plain.get(name)) for name in row if row[name] != plain.get(name)} == {}


FAILING_EVALUATION = """
import sys
sys.path.insert(0, {root!r})
import grpo
from common import cli, distributed
from common.errors import UserError
from sampling.hf_engine import HFEngine

def fail_on_one_process(self, requests, sampling):
    if sampling.temperature == 0 and distributed.rank() == 1:
        raise UserError("row 1: vLLM did not get the trainer's pixels")
    return generate(self, requests, sampling)

generate, HFEngine.generate = HFEngine.generate, fail_on_one_process
cli.run(grpo.main, cli.parse(grpo.Config))
"""


def test_an_evaluation_that_fails_on_one_process_ends_all_with_its_message(tiny_model, shapes, tmp_path):
    (tmp_path / "failing.py").write_text(FAILING_EVALUATION.format(root=str(ROOT)))
    flags = [f"--{name}={value}" for name, value in (SMALL | dict(max_steps=1, eval_data=shapes, eval_every=1)).items()]
    flags += [f"--model={tiny_model}", f"--data={shapes}", f"--output={tmp_path}/run"]
    done = run_script(str(tmp_path / "failing.py"), *flags, processes=2)
    assert "evaluation after step 0: row 1: vLLM did not get the trainer's pixels; checkpoint-0 is" in done.stderr


def test_pictures_that_vanish_end_the_run_with_a_checkpoint(tiny_model, shapes, tmp_path):
    shutil.copytree(shapes, tmp_path / "data")
    run = grpo.set_up(config(tiny_model, str(tmp_path / "data"), tmp_path / "run", max_steps=9))
    shutil.rmtree(tmp_path / "data" / "images")
    with pytest.raises(
        RunStopped,
        match=r"step 1: .*it passed the check at the start.*; checkpoint-0 is complete: retry",
    ):
        run.loop.train(run, grpo.train_step)
    assert verify_checkpoint(tmp_path / "run" / "checkpoint-0") is None


def test_a_save_that_fails_beside_training_is_tried_again_after_the_next_step(
    tiny_model, shapes, tmp_path, monkeypatch, capsys
):
    """A failed save is retried after the next step, not only at the next regular checkpoint.

    On a full disk, torch raises a CheckpointException, which is not a subclass of Exception.
    """
    torch_save, failures = checkpoint.dcp.save, []

    def failing(*args, **kwargs):
        torch_save(*args, **kwargs)
        if not failures:
            failures.append(1)
            full = OSError(28, "No space left on device")
            raise checkpoint.CheckpointException("save", {0: (full, None)})

    monkeypatch.setattr(checkpoint.dcp, "save", failing)
    grpo.main(config(tiny_model, shapes, tmp_path, max_steps=4, save_every=2))
    stderr = capsys.readouterr().err
    assert "could not save checkpoint-2: " in stderr and "is full; there is no checkpoint" in stderr
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-4"}


def test_a_step_that_is_there_is_not_written_again(tiny_model, shapes, tmp_path, monkeypatch):
    """An older checkpoint of the same step is kept, also when the run does not know it."""
    run = grpo.set_up(config(tiny_model, shapes, tmp_path))
    run.loop.save(run, wait=True)
    written = (tmp_path / "checkpoint-0" / "state.json").stat().st_mtime_ns
    run.loop.save(run, wait=True)
    assert (tmp_path / "checkpoint-0" / "state.json").stat().st_mtime_ns == written
    rename = pathlib.Path.rename

    def killed(path, target):
        if path.suffix == ".partial" and path.is_dir():
            raise KeyboardInterrupt
        return rename(path, target)

    run.loop.checkpoints.newest = None
    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            run.loop.save(run, wait=True)
    assert RunFolder(str(tmp_path)).plan_resume("newest").checkpoint == tmp_path / "checkpoint-0"
    run.loop.save(run, wait=True)
    assert run.loop.checkpoints.save_failed, "an existing checkpoint is not replaced"
    assert (tmp_path / "checkpoint-0" / "state.json").stat().st_mtime_ns == written


def test_a_kill_while_a_checkpoint_is_deleted_leaves_no_part_of_it(saved, tmp_path, monkeypatch):
    shutil.copytree(saved, tmp_path / "run")
    folder = RunFolder(str(tmp_path / "run"), keep_last=1)
    shutil.move(tmp_path / "run" / "checkpoint-4", folder.partial(4))

    def killed(path, **options):
        if path.exists():
            (path / "state.json").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            folder.publish(4)
    names = {path.name for path in (tmp_path / "run").glob("checkpoint-*")}
    assert names == {"checkpoint-4", "checkpoint-2.partial"}
    assert folder.plan_resume("newest").checkpoint == tmp_path / "run" / "checkpoint-4"
    folder.prepare(4)
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-4"]


def test_a_checkpoint_is_saved_even_if_an_older_one_cannot_be_deleted(saved, tmp_path, monkeypatch):
    shutil.copytree(saved, tmp_path / "run")
    folder = RunFolder(str(tmp_path / "run"), keep_last=1)
    shutil.move(tmp_path / "run" / "checkpoint-4", folder.partial(4))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        folder.publish(4)
    assert folder.plan_resume("newest").checkpoint == tmp_path / "run" / "checkpoint-4"


def test_a_file_is_complete_at_all_times(tmp_path, monkeypatch):
    files.atomic_write(tmp_path / "a.json", "old")
    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            files.atomic_write(tmp_path / "a.json", "new")
    assert (tmp_path / "a.json").read_text() == "old"
    files.atomic_write(tmp_path / "a.json", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"] and (tmp_path / "a.json").read_text() == "new"


LOCK_HOLDER = """
import os, pathlib, sys, threading, time
from common.files import lock_file
from parts.workers import WorkerPool
lock = lock_file(pathlib.Path(sys.argv[1]), "in use")
pool, name = WorkerPool(1, [sys.argv[2]]), sys.argv[2]
worker = pool.idle.get()
pool.idle.put(worker)
threading.Thread(target=pool.call_all, args=(name, 60.0, [{}])).start()
reader, writer = os.pipe()
forked = os.fork()
if forked:
    os.read(reader, 1)
    print(worker[0].pid, forked, flush=True)
else:
    os.write(writer, b".")
time.sleep(60)
"""


@needs("parts/workers.py")
def test_a_lock_ends_with_its_process_and_not_with_those_that_it_started(tmp_path):
    """After kill -9, a reward worker that is busy and a forked process still run, but do not hold the lock."""
    (tmp_path / "r.py").write_text("import time\n\ndef slow():\n    time.sleep(60)\n")
    command = [sys.executable, "-c", LOCK_HOLDER, tmp_path / "run.lock", f"{tmp_path}/r.py:slow"]
    holder = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    started = [int(pid) for pid in holder.stdout.readline().split()]
    try:
        with pytest.raises(UserError, match=rf"in use \(pid {holder.pid} on {socket.gethostname()}\)"):
            files.lock_file(tmp_path / "run.lock", "in use")
        holder.kill()
        holder.wait()
        for pid in started:
            os.kill(pid, 0)  # it still runs
        lock = files.lock_file(tmp_path / "run.lock", "in use")
        assert files.lock_file(tmp_path / "run.lock", "in use") is lock, "this process already holds the lock"
    finally:
        for pid in started:
            os.kill(pid, signal.SIGKILL)


def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(files.fcntl, "flock", fail)
    with pytest.raises(UserError, match=r"run.lock cannot be locked \(Function not implemented\): choose a folder"):
        files.lock_file(tmp_path / "run.lock", "in use")


def test_a_run_that_goes_on_waits_for_the_lock_of_its_previous_start(tmp_path):
    script = "import pathlib, sys, time; from common.files import lock_file\n"
    script += "lock = lock_file(pathlib.Path(sys.argv[1]), '')\nprint(flush=True)\ntime.sleep(3)"
    command = [sys.executable, "-c", script, tmp_path / "run.lock"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        folder = RunFolder(str(tmp_path))
        with pytest.raises(UserError, match=rf"another run writes to .* \(pid {holder.pid} on "):
            folder.plan_resume(None)
        folder.plan_resume("auto")
        assert folder.lock and holder.wait(30) == 0


def test_a_new_folder_is_locked_when_nothing_can_be_refused_any_more(tmp_path):
    """Of two runs that start in it at the same time, the second is refused. A refused run has written nothing."""
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write to '.*file/run' \(Not a directory\): .*another --output"):
        RunFolder(str(tmp_path / "file" / "run")).prepare(None)
    first, second = (RunFolder(str(tmp_path / "run")) for _ in range(2))
    assert first.plan_resume(None) == second.plan_resume(None) and not (tmp_path / "run").exists()
    first.prepare(None)
    with pytest.raises(UserError, match=r"another run has started in '.*run': choose another --output"):
        second.prepare(None)


def test_a_file_name_that_is_not_unicode_is_logged(tmp_path):
    log = RunLog(str(tmp_path), {})
    log.append("completions.jsonl", [{"source": os.fsdecode(b"rows-\xff.jsonl")}])
    assert read_jsonl(tmp_path / "completions.jsonl") == [{"source": "rows-?.jsonl"}]


def test_the_scores_of_a_resumed_evaluation_wait_for_room(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    log = RunLog(str(tmp_path), {}, resumed_step=1)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "write_text", full)
        log.metrics(1, {"eval/reward": 1.0})
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 1, "reward": 0.5}, {"step": 1, "eval/reward": 1.0}]


def test_credentials_are_not_logged(tiny_model, shapes, tmp_path, monkeypatch, capsys):
    """Neither in config.json nor in checkpoints, which are compared with the flags of a resumed run."""
    url = "http://user:pa@ss@host/v1?key=swordfish&v=1"
    monkeypatch.setattr(sys, "argv", ["grpo.py", f"--verifier_url={url}"])
    RunLog(str(tmp_path), {"verifier_url": url})
    text = (tmp_path / "config.json").read_text()
    assert json.loads(text)["verifier_url"] == "http://***@host/v1?key=***&v=1"
    assert "--verifier_url=http://***@host/v1?key=***&v=1" in json.loads(text)["command"]
    run = grpo.set_up(config(tiny_model, shapes, tmp_path / "run", verifier_url=url))
    run.loop.save(run, wait=True)
    grpo.set_up(config(tiny_model, shapes, tmp_path / "run", resume="newest", verifier_url=url))
    grpo.set_up(config(tiny_model, shapes, tmp_path / "run", resume="newest", verifier_url="http://me:pa@ss@other"))
    stderr, state = capsys.readouterr().err, (tmp_path / "run" / "checkpoint-0" / "state.json").read_text()
    assert stderr.count("verifier_url was http://***@host/v1?key=***&v=1, is http://***@other") == 1
    for written in (text, state, stderr):
        assert "pa@ss" not in written and "swordfish" not in written


def test_metrics_wait_for_room(tmp_path, capsys):
    log = RunLog(str(tmp_path), {})
    path_open = pathlib.Path.open

    def full(path, *args, **kwargs):
        if "a" in args:
            raise OSError(28, "No space left on device")
        return path_open(path, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pathlib.Path, "open", full)
        for step in (1, 2):
            log.metrics(step, {"reward": 0.5})
        patch.setattr(pathlib.Path, "write_text", lambda *_, **__: full(tmp_path, "a"))
        with pytest.raises(UserError, match=r"cannot write to .*No space left"):
            RunLog(str(tmp_path), {}, resumed_step=2)
    assert capsys.readouterr().err.count("keeping its rows in memory") == 1
    log.metrics(3, {"reward": 0.5})
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_the_longest_line_of_a_step_fits_on_a_terminal(tmp_path, capsys):
    log = RunLog(str(tmp_path), {})
    metrics = {"reward": 0.948, "frac_reward_zero_std": 0.0, "completions/mean_length": 1024.4, "step_time": 12.34}
    log.started -= 6000
    log.print_step(999, 1, metrics)
    log.print_step(1000, 0, metrics | {"eval/reward": 0.5, "eval/exact_match": 0.9961})
    log.print_step(1000, 0, {})
    assert capsys.readouterr().err.splitlines() == [
        "step 999/1000  reward 0.948  signal 100%  1024 tokens  12.3 s  1:40:00 left",
        "step 1000/1000  reward 0.948  signal 100%  1024 tokens  12.3 s  held-out 0.996",
    ]


def test_a_run_deletes_what_runs_have_written_and_nothing_else(tiny_model, shapes, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "checkpoint-best")
    grpo.main(config(str(tmp_path / "checkpoint-best"), shapes, tmp_path, max_steps=1))
    assert (tmp_path / "checkpoint-best" / "config.json").is_file() and (tmp_path / "final").is_dir()
    with pytest.raises(UserError, match="checkpoint-1' would be replaced by this run"):
        grpo.main(config(str(tmp_path / "checkpoint-1"), shapes, tmp_path, overwrite=True))
    shutil.copytree(tiny_model, tmp_path / "final" / "sub" / "model")
    with pytest.raises(UserError, match="sub/model' would be replaced by this run"):
        grpo.main(config(str(tmp_path / "final" / "sub" / "model"), shapes, tmp_path, overwrite=True))


def test_a_run_that_is_stopped_and_cannot_be_saved_has_failed(tiny_model, shapes, tmp_path, monkeypatch, capsys):
    """A scheduler must not take the status for that of a run that can be resumed, or for success."""

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.dcp, "save", full)
    monkeypatch.setattr(signals, "defer_signals", lambda received: received.append(signal.SIGTERM))
    with pytest.raises(RunStopped, match="stopped after step 0; there is no checkpoint") as stopped:
        grpo.main(config(tiny_model, shapes, tmp_path, max_steps=1))
    assert stopped.value.status == 1
    assert "could not save checkpoint-0: the disk of" in capsys.readouterr().err


def test_a_run_without_a_checkpoint_does_not_say_how_to_resume_it(tiny_model, shapes, tmp_path, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.dcp, "save", full)
    grpo.main(config(tiny_model, shapes, tmp_path, max_steps=1))
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith("could not save checkpoint-1: ") for line in lines)
    assert any(line.startswith("model ") for line in lines) and not any("resume" in line for line in lines)


def test_no_rollout_begins_after_a_signal(tiny_model, shapes, tmp_path, monkeypatch):
    evaluate = loop.score_completions

    def evaluate_and_stop(run, samples):
        run.loop.interrupted.append(signal.SIGTERM)
        return evaluate(run, samples)

    monkeypatch.setattr(loop, "score_completions", evaluate_and_stop)
    monkeypatch.setattr(Collector, "sample_round", lambda *_: pytest.fail("it sampled"))
    with pytest.raises(RunStopped, match="stopped after step 0; checkpoint-0 is complete"):
        grpo.main(config(tiny_model, shapes, tmp_path, max_steps=2, eval_data=shapes))


def test_a_prompt_that_the_sampler_refuses_stops_the_run_and_loses_nothing(tiny_model, shapes, tmp_path, monkeypatch):
    def refuse(*_):
        raise UserError("row 5: vLLM refuses the prompt: it is too long")

    run = grpo.set_up(config(tiny_model, shapes, tmp_path, max_steps=2))
    step = grpo.train_step
    with pytest.raises(RunStopped, match=r"step 2: row 5: vLLM refuses .* too long; checkpoint-1 is complete"):
        run.loop.train(run, lambda run: (step(run), monkeypatch.setattr(run.collector.engine, "generate", refuse))[0])


def test_a_signal_after_a_steps_first_update_lets_the_step_end(tiny_model, shapes, tmp_path, monkeypatch):
    """The weights have moved, so that the step can no longer be undone."""
    run = grpo.set_up(config(tiny_model, shapes, tmp_path, max_steps=2, num_iterations=2))
    monkeypatch.setattr(run.updater, "before_change", lambda: run.loop.interrupted.append(signal.SIGTERM))
    with pytest.raises(RunStopped, match="stopped after step 1; checkpoint-1 is complete"):
        run.loop.train(run, grpo.train_step)


@pytest.mark.parametrize("environment", [{}, {"GROUP_RANK": "0"}], ids=["run.sh", "torchrun"])
def test_a_signal_that_is_passed_on_is_no_second_one(environment):
    code = "import os, signal, time; from common import signals; received = []; signals.defer_signals(received)\n"
    code += "for _ in range(2): os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.1)\n"
    code += "print(received == [signal.SIGTERM], flush=True)\n"
    code += "signals.SAME_REQUEST = 0.1; os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)"
    environment = os.environ | environment
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("True\n", -signal.SIGTERM), done.stderr


def test_a_disk_that_is_full_for_the_tokenizer_leaves_no_partial_export(tiny_model, shapes, tmp_path, monkeypatch):
    copy = shutil.copyfile

    def full(source, target):
        if source.name == "tokenizer.json":
            raise OSError(27, "File too large")
        return copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(RunStopped, match=r"final' could not be written \(.*File too large"):
        grpo.main(config(tiny_model, shapes, tmp_path, max_steps=1))
    assert not list(tmp_path.glob("final*"))


@pytest.mark.parametrize(
    ("broken", "error"),
    [("write_model", OSError(28, "No space left on device")), ("empty_model", UserError("the base is gone"))],
)
def test_an_export_that_fails_has_a_checkpoint_to_be_made_from(
    broken, error, tiny_model, shapes, tmp_path, monkeypatch
):
    def fail(*_):
        raise error

    monkeypatch.setattr(export, broken, fail)
    with pytest.raises(RunStopped, match=r"final' could not be written .*--checkpoint \S*checkpoint-1 --output DIR"):
        grpo.main(config(tiny_model, shapes, tmp_path, max_steps=1, save_every=0))
    assert verify_checkpoint(tmp_path / "checkpoint-1") is None and not list(tmp_path.glob("final*"))
    assert files.partial_path(pathlib.Path("a/qwen2.5")).name == "qwen2.5.partial"


def test_a_hang_in_a_save_ends_too(tmp_path, monkeypatch):
    given = {}
    monkeypatch.setattr(checkpoint.dist, "new_group", lambda **kwargs: given.update(kwargs))
    Saver(RunFolder(str(tmp_path)), resumed_step=None)
    assert given["timeout"] == distributed.TIMEOUT


def test_left_out_updates_count_on_and_a_spike_in_any_update_is_one(tiny_model, shapes, tmp_path, monkeypatch):
    """Skipped updates are counted across a checkpoint: two come before the checkpoint and the third after it. The
    gradient norms of skipped updates are not kept, and such an update is no spike although the last norm was one."""
    loss, bad, norms = grpo.batch_loss, True, [1e-6] * 20 + [1.0]
    monkeypatch.setattr(grpo, "batch_loss", lambda *a: loss(*a[:2], a[2] * float("nan"), *a[3:]) if bad else loss(*a))
    run = grpo.set_up(config(tiny_model, shapes, tmp_path, max_steps=2, save_every=2))
    run.updater.norms = norms
    run.loop.train(run, grpo.train_step)
    assert (run.updater.skipped, run.updater.norms) == (2, norms)
    flags = dict(max_steps=9, resume="newest")
    with pytest.raises(RunStopped, match=r"step 3: 3 skipped updates in a row .*; checkpoint-3 is complete: continue"):
        grpo.main(config(tiny_model, shapes, tmp_path, **flags))
    bad = False
    run = grpo.set_up(config(tiny_model, shapes, tmp_path, max_steps=4, resume="newest", num_generations=4))
    run.updater.norms = [1e-6] * 20
    run.loop.train(run, grpo.train_step)
    assert run.updater.skipped == 0 and len(run.updater.norms) == 21
    assert [row["grad_norm_spike"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 0, 0, 1]


def test_a_run_stopped_by_skipped_updates_goes_on_although_an_evaluation_is_due(
    tiny_model, shapes, tmp_path, monkeypatch
):
    monkeypatch.setattr("training.loop.MAX_SKIPPED", 1)
    flags = dict(max_steps=3, eval_data=shapes, eval_every=1)
    loss = grpo.batch_loss
    with monkeypatch.context() as patch:
        patch.setattr(grpo, "batch_loss", lambda *a: loss(*a[:2], a[2] * float("nan"), *a[3:]))
        with pytest.raises(RunStopped, match="step 1: 1 skipped updates in a row"):
            grpo.main(config(tiny_model, shapes, tmp_path, **flags))
    grpo.main(config(tiny_model, shapes, tmp_path, resume="newest", **flags))
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl") if "eval/reward" in row] == [0, 1, 2, 3]


def test_a_run_goes_on_without_held_out_rows_although_an_evaluation_is_due(tiny_model, shapes, tmp_path, monkeypatch):
    step = grpo.train_step
    with monkeypatch.context() as patch:
        patch.setattr(grpo, "train_step", lambda run: (step(run), run.loop.interrupted.append(signal.SIGTERM))[0])
        with pytest.raises(RunStopped, match="stopped after step 1"):
            grpo.main(config(tiny_model, shapes, tmp_path, max_steps=2, eval_data=shapes, eval_every=1))
    grpo.main(config(tiny_model, shapes, tmp_path, max_steps=2, resume="newest"))
    assert read_jsonl(tmp_path / "metrics.jsonl")[-1]["step"] == 2


# --- single functions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["logp", "sampling_logp", "trainer_logp", "ref_logp", "advantage"])
def test_rows_are_named_by_whatever_is_not_a_number(field):
    finite = torch.zeros(2)
    values = {"logp": finite, "sampling_logp": finite, "advantage": 1.0}
    values |= {field: math.nan if field == "advantage" else torch.tensor([0.0, math.nan])}
    logp = values.pop("logp")
    prompt = Prompt(torch.zeros(1), [0], torch.zeros(1, 1), source="row 7")
    group = Group(prompt, [Completion(torch.zeros(2), **values)])
    message = describe_nonfinite({"loss": torch.tensor(math.nan)}, torch.tensor(1.0), [group], [logp])
    assert "(row 7)" in message


@needs("parts/math")
@needs("parts/workers.py")
def test_a_sigterm_to_all_leaves_the_rewards_alone(tmp_path):
    """torchrun sends SIGTERM to the trainer's whole process group; reward workers ignore the signal.

    A killed worker is replaced, and its call is retried. If the replacement also dies, the completion gets no verdict
    and is not scored as wrong.
    """
    (tmp_path / "r.py").write_text("def fine(completion):\n    return 3\n")
    pool = start_workers(1, [f"{tmp_path}/r.py:fine"])
    assert call(pool, f"{tmp_path}/r.py:fine", 5.0, {"completion": ""}) == 3
    process, pipe = pool.idle.get()
    pool.idle.put((process, pipe))
    process.send_signal(signal.SIGTERM)
    assert call(pool, f"{tmp_path}/r.py:fine", 5.0, {"completion": ""}) == 3
    assert process.poll() is None
    process.kill()
    process.wait()
    assert call(pool, f"{tmp_path}/r.py:fine", 5.0, {"completion": ""}) == 3

    def lost(*_):
        raise WorkerLost("its worker process died")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("parts.math.compare._math_equal", lost)
        patch.setattr("parts.math.reward.check_math", lambda: None)
        scorer = Scorer("math", RewardFlags())
        completion = Rollout(torch.zeros(1), torch.zeros(1), text="<think>a</think><answer>0.5</answer>")
        [[scored]], error = scorer([make_sample("?", "1/2", [], "row")], [[completion]])
    assert error is None and math.isnan(scored.total) and "worker process died" in scorer.unscored_reason


def test_moments_are_there_before_the_first_update(tiny_model, shapes, tmp_path):
    """AdamW's moments are initialised at the start, so that a checkpoint can be saved and loaded at any time.

    Otherwise, PyTorch would save no moments if an aborted step had left gradients, and would take a dummy step if there
    were no gradients. The vision tower has no gradients before the first image.
    """
    run = grpo.set_up(config(tiny_model, shapes, tmp_path, train_vision=True, save_every=1))
    ((optimizer, _),) = run.updater.optimizers
    state = optimizer.state_dict()["state"]
    assert len(state) == len(list(run.policy.parameters()))
    assert all(entry["step"] == 0 and not entry["exp_avg"].any() for entry in state.values())
    next(run.policy.parameters()).grad = None
    for parameter in list(run.policy.parameters())[:3]:
        parameter.grad = torch.ones_like(parameter)
    run.loop.save(run, wait=True)
    assert all(entry["step"] == 0 for entry in optimizer.state_dict()["state"].values())
    resumed = grpo.set_up(config(tiny_model, shapes, tmp_path, train_vision=True, resume="newest"))
    loaded = resumed.updater.optimizers[0][0].state_dict()["state"]
    assert all(entry["step"] == 0 and not entry["exp_avg_sq"].any() for entry in loaded.values())
    assert len(loaded) == len(state)
