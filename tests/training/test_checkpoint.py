"""Nothing lost: kill -9 at random moments, damaged and unfinished checkpoints, a full disk, signals, lost processes.

Guards against: a resumed run that is not the run, bit for bit; a damaged checkpoint that is loaded; a save that takes
an earlier checkpoint with it.
"""

import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

import grpo
from common.errors import RunStopped, UserError
from common.files import read_jsonl
from tests.helpers.runs import SMALL, config, difference, metrics, weights
from tests.helpers.scripts import ROOT, run_script
from training import checkpoint
from training.checkpoint import Checkpoints, verify_checkpoint

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("processes", "kills"), [(1, 8), pytest.param(1, 20, marks=SLOW), pytest.param(2, 20, marks=SLOW)]
)
def test_kills_change_not_a_bit(processes, kills, tiny_model, shapes, tmp_path):
    """Each life ends by kill -9 wherever it is; parameters, moments and metrics are those of the run never killed."""
    arguments = [tiny_model, shapes, str(tmp_path), str(processes), str(kills), "7"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "tests/helpers/kill_worker.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    killed_in = json.loads(done.stdout.splitlines()[-1])["killed_in"]
    print(killed_in)
    assert sum(killed_in.values()) == kills
    assert len(killed_in) >= min(4, kills // 4), f"too few different moments: {killed_in}"
    last = "checkpoint-24"
    assert difference(tmp_path / "plain" / last, tmp_path / "killed" / last, tmp_path) == 0.0
    one, two = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("plain", "killed"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert metrics(tmp_path / "plain") == metrics(tmp_path / "killed")


@pytest.mark.parametrize("processes", [0, pytest.param(4, marks=SLOW)])
def test_two_processes_are_resumed_by_another_number(processes, tiny_model, shapes, tmp_path):
    flags = [f"--model={tiny_model}", f"--data={shapes}", "--save_every=2", "--beta=0.01", "--learning_rate=1e-3"]
    flags += [f"--{name}={value}" for name, value in SMALL.items()]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    copies = [f"--output={tmp_path}/two", "--max_steps=4", "--sharding=none"]
    first = run_script("grpo.py", *flags, *copies, processes=2, env=environment)
    assert first.returncode == 0, first.stderr[-2000:]
    parts = [path.stat().st_size for path in (tmp_path / "two" / "checkpoint-4").glob("*.distcp")]
    assert len(parts) == 2 and max(parts) < 1.3 * min(parts), "each writes its part of the copies"
    assert any(row["grad_norm"] > 1e-3 for row in read_jsonl(tmp_path / "two" / "metrics.jsonl"))
    (tmp_path / "other").mkdir()
    shutil.copytree(tmp_path / "two" / "checkpoint-2", tmp_path / "other" / "checkpoint-2")
    more = [f"--output={tmp_path}/other", "--max_steps=4", "--resume"]
    again = run_script("grpo.py", *flags, *more, processes=processes, env=environment)
    assert again.returncode == 0, again.stderr[-2000:]
    one, two = (weights(tmp_path / name / "final") for name in ("two", "other"))
    assert max((one[name] - two[name]).abs().max().item() for name in one) < 1e-6
    assert difference(tmp_path / "two" / "checkpoint-4", tmp_path / "other" / "checkpoint-4", tmp_path) < 1e-6, (
        "moments"
    )


@pytest.fixture(scope="module")
def saved(tiny_model, shapes, tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("saved") / "run"
    grpo.main(config(tiny_model, shapes, folder, max_steps=4, save_every=2))
    return folder


def test_damage_at_twenty_random_places_is_always_noticed(saved, tmp_path, capsys):
    shutil.copytree(saved, tmp_path / "run")
    newest, rng = tmp_path / "run" / "checkpoint-4", random.Random(0)
    assert verify_checkpoint(newest) is None
    sealed = (newest / "manifest.json").read_bytes()
    for other in (sealed[:-1], sealed + b"\n", sealed.replace(b"\n", b"\r\n", 1)):
        (newest / "manifest.json").write_bytes(other)
        assert "manifest.json is damaged" in verify_checkpoint(newest)
    (newest / "manifest.json").write_bytes(sealed)
    with pytest.raises(UserError, match=r"is a run: name one of its checkpoints, .*checkpoint-4 is the newest"):
        Checkpoints(str(tmp_path)).find(str(tmp_path / "run"))
    checkpoints = Checkpoints(str(tmp_path / "run"))
    files = [path for path in newest.iterdir() if path.is_file()]
    assert {"manifest.json", "state.json", "random-0.pt"} < {path.name for path in files}
    for turn in range(20):
        path = files[turn % len(files)]
        whole = path.read_bytes()
        place = rng.randrange(len(whole))
        flipped = whole[:place] + bytes([whole[place] ^ 1 << rng.randrange(8)]) + whole[place + 1 :]
        path.write_bytes(flipped if turn % 3 else whole[:place])
        assert verify_checkpoint(newest), (path.name, place, turn)
        assert checkpoints.find("newest").name == "checkpoint-2"
        assert "taking the one before" in capsys.readouterr().err
        with pytest.raises(UserError, match="checkpoint-4"):
            checkpoints.find(str(newest))
        path.write_bytes(whole)
        assert verify_checkpoint(newest) is None
    (newest / "random-0.pt").unlink()
    assert "is not a whole checkpoint" in verify_checkpoint(newest)


def test_the_same_seed_twice_is_the_same_run(saved, tiny_model, shapes, tmp_path):
    grpo.main(config(tiny_model, shapes, tmp_path, max_steps=4, save_every=2))
    assert metrics(tmp_path) == metrics(saved)
    assert difference(tmp_path / "checkpoint-4", saved / "checkpoint-4", tmp_path) == 0.0
    grpo.main(config(tiny_model, shapes, tmp_path / "other", max_steps=1, seed=1))
    assert metrics(tmp_path / "other")[0] != metrics(saved)[0]


def test_a_named_checkpoint_is_gone_on_from(saved, tiny_model, shapes, tmp_path):
    cfg = config(tiny_model, shapes, tmp_path, max_steps=4, resume=str(saved / "checkpoint-2"))
    grpo.main(cfg)
    one, two = weights(saved / "final"), weights(tmp_path / "final")
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_last_and_the_best_are_kept(tiny_model, shapes, tmp_path, monkeypatch):
    scores = iter([0.1, 0.9, 0.2, 0.3, 0.4, 0.5])
    monkeypatch.setattr(grpo, "evaluate_policy", lambda run: {"eval/reward": next(scores)})
    flags = dict(max_steps=5, save_every=1, keep_last=2, keep_best=True, eval_every=1, eval_data=shapes)
    grpo.main(config(tiny_model, shapes, tmp_path, **flags))
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-1",
        "checkpoint-4",
        "checkpoint-5",
    ]
    assert json.loads((tmp_path / "checkpoint-5" / "state.json").read_text())["best"] == {"step": 1, "score": 0.9}


def test_a_full_disk_leaves_what_is_there_and_says_what_is_missing(tiny_model, shapes, tmp_path, capsys):
    """A real one, of ten megabytes: the first checkpoint and the final model fit, the next ones do not."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"this machine lets nobody mount a small disk: {mounted.stderr.decode().strip()}")
    try:
        grpo.main(config(tiny_model, shapes, disk / "run", max_steps=4, save_every=1))
        said = capsys.readouterr().err
        assert "a checkpoint takes 0.0" in said
        assert re.search(r"no checkpoint of step \d: .* GB are missing; checkpoint-\d is whole", said)
        left = sorted(path.name for path in (disk / "run").glob("checkpoint-*"))
        assert left and "checkpoint-4" not in left
        assert all(verify_checkpoint(disk / "run" / name) is None for name in left)
        assert (disk / "run" / "final" / "model.safetensors").is_file()
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_disk_that_fills_while_it_is_written_to(saved, tiny_model, shapes, tmp_path, monkeypatch, capsys):
    """As above, with the room that seemed to be there taken by somebody else."""
    monkeypatch.setattr(Checkpoints, "_no_room", lambda *_: None)

    def full(path):
        raise OSError(28, "No space left on device")

    grpo.main(config(tiny_model, shapes, tmp_path, max_steps=1, save_every=1))
    monkeypatch.setattr(checkpoint, "write_manifest", full)
    grpo.main(config(tiny_model, shapes, tmp_path, max_steps=3, save_every=1, resume="newest"))
    assert "is full; checkpoint-1 is whole" in capsys.readouterr().err
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]


@pytest.mark.parametrize("processes", [0, 2])
def test_sigterm_in_the_middle_of_a_step_gives_it_up(processes, tiny_model, shapes, tmp_path):
    """The signal comes while micro-batches of a long step are trained on: the step is given up, to be taken again."""
    sizes = dict(prompts_per_step=12, num_generations=16 if processes else 8, micro_batch_tokens=60)
    flags = [f"--model={tiny_model}", f"--data={shapes}", f"--output={tmp_path}/run", "--max_steps=2"]
    flags += ["--max_completion_length=12", *(f"--{name}={value}" for name, value in sizes.items())]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes else []
    process = subprocess.Popen(
        [sys.executable, *launcher, "grpo.py", *flags],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    for line in process.stderr:
        if line.startswith("grpo:"):  # the bar's first line ends when the second is written: after step 1
            break
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[1]
    assert process.returncode != 0, "it came through before the signal"
    assert "stopped after step 1; checkpoint-1 is whole: --resume" in said, said[-2000:]
    assert verify_checkpoint(tmp_path / "run" / "checkpoint-1") is None
    if not processes:  # goes on as if nothing had been
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        flags = sizes | dict(learning_rate=1e-6, max_steps=2, report_every=10)
        grpo.main(config(tiny_model, shapes, tmp_path / "run", resume="newest", **flags))
        grpo.main(config(tiny_model, shapes, tmp_path / "whole", **flags))
        torch.set_num_threads(threads)
        assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
        assert difference(*(tmp_path / name / "checkpoint-2" for name in ("run", "whole")), tmp_path) == 0.0


def begin(folder: pathlib.Path, *flags: str, launcher: tuple[str, ...] = ()) -> tuple[subprocess.Popen, int]:
    """A run of two processes with its second checkpoint written, and the last process's number."""
    command = ["torch.distributed.run", "--standalone", "--nproc_per_node=2", *launcher, "grpo.py", *flags]
    command += [f"--output={folder}", "--save_every=1", *(f"--{name}={value}" for name, value in SMALL.items())]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", *command], cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment
    )
    while not (folder / "checkpoint-2").is_dir():
        assert process.poll() is None, process.stderr.read()[-3000:]
        time.sleep(0.02)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
    return process, int(children.stdout.split()[-1])


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_process_that_dies_or_hangs_ends_the_job_and_is_named(how, tiny_model, shapes, tmp_path):
    """A dead one within 30 seconds; one that hangs after --hang_timeout and the 30 seconds that torchrun waits."""
    flags = [f"--model={tiny_model}", f"--data={shapes}", "--max_steps=1000", "--hang_timeout=0.3"]
    process, child = begin(tmp_path / "run", *flags)
    os.kill(child, how)
    begun = time.monotonic()
    said = process.communicate(timeout=90)[1]
    assert time.monotonic() - begun < (30 if how == signal.SIGKILL else 60)
    assert process.returncode != 0
    assert re.search(r"another process is gone or hangs .*; last seen: rank [01] in «\w+» \d+ s ago", said), said[
        -3000:
    ]


def test_a_killed_process_is_started_again(tiny_model, shapes, tmp_path):
    """With --max-restarts the job goes on from its checkpoint to its end."""
    flags = [f"--model={tiny_model}", f"--data={shapes}", "--max_steps=15"]
    process, child = begin(tmp_path / "run", *flags, launcher=("--max_restarts=1",))
    os.kill(child, signal.SIGKILL)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 0, said[-3000:]
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == list(range(1, 16))
    assert (tmp_path / "run" / "final").is_dir()


def test_an_update_that_is_not_a_number_is_left_out_and_named(tiny_model, shapes, tmp_path, monkeypatch, capsys):
    """The second step's first prompt gives a log-probability that is not a number; three such steps in a row end it."""
    bad, loss = {"steps": (2,)}, grpo.batch_loss

    def broken(cfg, batch, logp):
        if run.step + 1 in bad["steps"]:
            logp = torch.cat([logp[:1] * float("nan"), logp[1:]])
            run.micro_batch_logps[-1] = (batch.rollouts, logp.detach())
        return loss(cfg, batch, logp)

    monkeypatch.setattr(grpo, "batch_loss", broken)
    run = grpo.set_up(config(tiny_model, shapes, tmp_path / "one", max_steps=3))
    grpo.train(run)
    said = capsys.readouterr().err
    assert "step 2: loss nan, gradient norm nan (" in said and "main.csv row" in said
    assert "this update is left out" in said
    assert [row["updates_skipped"] for row in read_jsonl(tmp_path / "one" / "metrics.jsonl")] == [0, 1, 0]
    bad["steps"] = range(2, 99)
    run = grpo.set_up(config(tiny_model, shapes, tmp_path / "two", max_steps=9))
    with pytest.raises(RunStopped, match=r"step 4: 3 updates in a row left out .*lower --learning_rate"):
        grpo.train(run)


def test_any_checkpoint_becomes_a_model(saved, tmp_path):
    done = run_script("-m", "training.checkpoint", f"--checkpoint={saved}/checkpoint-4", f"--output={tmp_path}/model")
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = weights(saved / "final"), weights(tmp_path / "model")
    assert all(torch.equal(one[name], two[name]) for name in one)
    again = run_script("-m", "training.checkpoint", f"--checkpoint={saved}/nowhere", f"--output={tmp_path}/other")
    assert (again.returncode, "is not a whole checkpoint" in again.stderr) == (2, True)
    assert "Traceback" not in again.stderr
