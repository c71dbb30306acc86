"""One update's gradient on 1, 2 and 4 processes, in one micro-batch and in many: the same to 1e-6.

Guards against: normalisation by what a process or micro-batch happens to hold, gradients averaged where they should be
summed, processes that disagree on the number of collectives (a hang), and a vision tower that only some of them run.
"""

import os
import pathlib
import signal
import subprocess
import time

import pytest
import torch
from safetensors.torch import load_file

from common import distributed
from common.errors import UserError
from common.files import read_jsonl
from tests.helpers.scripts import ROOT, end_well, free_port, on_machine, run_on_machines, run_script
from training.run_log import check_output_folder

WORKER = str(ROOT / "tests" / "helpers" / "gradient_worker.py")


@pytest.fixture(scope="module")
def results(tiny_model, tmp_path_factory) -> dict[int, dict]:
    folder = tmp_path_factory.mktemp("gradients")
    found = {}
    for processes in (1, 2, 4):
        out = folder / f"{processes}.pt"
        done = run_script(WORKER, tiny_model, out, processes=processes)
        assert done.returncode == 0, done.stderr[-3000:]
        found[processes] = torch.load(out)
    return found


def difference(a: dict, b: dict) -> float:
    """The largest relative difference (norm to norm) of any parameter's gradient; gradients below a thousandth of the
    whole norm, such as those of key biases, which are zero but for rounding, are held to that thousandth."""
    assert a.keys() == b.keys()
    names = [name for name in a if not name.startswith("stats/") and name != "batches"]
    whole = torch.cat([a[name].flatten() for name in names]).norm()
    assert whole > 0
    return max(((a[n] - b[n]).norm() / a[n].norm().clamp(min=1e-3 * whole)).item() for n in names)


VARIANTS = [
    "one micro-batch",
    "many micro-batches",
    "groups split across micro-batches",
    "dapo with KL",
    "gspo",
    "trained vision tower",
    "trained vision tower, a process without images",
    "frozen vision tower, a process without images",
    "fewer groups than processes",
    "sampled by one process, evened out",
    "sampled by one process, evened out, trained vision tower",
    "whole copies",
    "gathered once",
]
ON_MACHINES = [
    "many micro-batches",
    "sampled by one process, evened out",
    "a copy on each of two machines",
    "two machines, gathered once, trained vision tower",
    "two machines, trained vision tower, a process without images",
]


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient_does_not_depend_on_the_number_of_processes(results, variant, processes):
    assert difference(results[1][variant], results[processes][variant]) < 1e-6


@pytest.fixture(scope="module")
def on_machines(tiny_model, tmp_path_factory) -> dict:
    """The same on two torchruns of two processes each, as on two machines."""
    out = tmp_path_factory.mktemp("machines") / "gradients.pt"
    run_on_machines(WORKER, tiny_model, out, "|".join(ON_MACHINES))
    return torch.load(out)


@pytest.mark.parametrize("variant", ON_MACHINES)
def test_gradient_does_not_depend_on_the_number_of_machines(results, on_machines, variant):
    assert difference(results[1][variant], on_machines[variant]) < 1e-6


@pytest.mark.parametrize("processes", [2, 4])
def test_completions_go_where_less_is_to_be_done(results, processes):
    for variant in VARIANTS:
        if "evened out" in variant:
            assert results[1][variant]["stats/share"] == 1
            # of completion tokens; prompts, longer than they are here, count in the plan too
            assert results[processes][variant]["stats/share"] < {2: 0.75, 4: 0.5}[processes]


@pytest.mark.parametrize("variant", ["many micro-batches", "groups split across micro-batches"])
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_gradient_does_not_depend_on_micro_batches(results, variant, processes):
    assert difference(results[1]["one micro-batch"], results[processes][variant]) < 1e-6


def test_a_process_without_images_joins_every_gradient_of_qwen3_vl(tiny_qwen3_vl, tmp_path):
    """Its vision tower feeds several decoder layers: each of those paths has parameters for a blank image to reach."""
    variant = "trained vision tower, a process without images"
    found = {}
    for processes in (1, 2):
        done = run_script(WORKER, tiny_qwen3_vl, tmp_path / "g.pt", variant, processes=processes)
        assert done.returncode == 0, done.stderr[-3000:]
        found[processes] = torch.load(tmp_path / "g.pt")[variant]
    assert any("deepstack" in name for name in found[1])
    assert difference(found[1], found[2]) < 1e-6


def test_the_cuts_are_cuts(results):
    counts = {name: results[1][name]["batches"] for name in VARIANTS}
    assert counts["one micro-batch"] == 1
    assert counts["many micro-batches"] > 2
    assert counts["groups split across micro-batches"] > 5, "six groups, one of them untrained: some must be split"


def test_the_vision_tower_is_trained_only_when_asked(results):
    def has_vision(variant):
        return any("visual" in name for name in results[1][variant])

    assert has_vision("trained vision tower")
    assert not has_vision("one micro-batch")


def test_metrics_are_sums_over_all_processes(results):
    for name in ("stats/tokens", "stats/loss", "stats/entropy", "stats/difference_max"):
        for processes in (2, 4):
            a, b = (results[n]["many micro-batches"][name] for n in (1, processes))
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# --- whole runs on two machines ---------------------------------------------------------------------------------------


def flags(model: str, data: str, output: pathlib.Path, **more: object) -> list[str]:
    """Of a run whose second step already has rewards to learn from."""
    short = {"prompts_per_step": 4, "num_generations": 8, "max_completion_length": 16, "learning_rate": 1e-3, "seed": 2}
    given = {"model": model, "data": data, "output": output, "beta": 0.01} | short | more
    return ["grpo.py", *(f"--{name}={value}" for name, value in given.items())]


# hybrid adds up in another order, and AdamW divides by what may be as small as what that changes
@pytest.mark.parametrize(("sharding", "close"), [("full", 1e-6), pytest.param("hybrid", 1e-5, marks=pytest.mark.slow)])
def test_two_machines_train_what_one_does(sharding, close, tiny_model, shapes, tmp_path):
    done = run_script(*flags(tiny_model, shapes, tmp_path / "one", max_steps=3), processes=4)
    assert done.returncode == 0, done.stderr[-3000:]
    run_on_machines(*flags(tiny_model, shapes, tmp_path / "two", max_steps=3, sharding=sharding))
    folders = (pathlib.Path(tiny_model), tmp_path / "one" / "final", tmp_path / "two" / "final")
    start, one, two = (load_file(folder / "model.safetensors") for folder in folders)

    def apart(a: dict, b: dict) -> float:
        return max((a[name] - b[name]).abs().max().item() for name in a)

    assert apart(start, one) > 1e-3
    assert apart(one, two) < close


def test_a_machine_that_drops_is_replaced(tiny_model, shapes, tmp_path):
    """Its torchrun and its process are killed and started again: the run goes on from the newest checkpoint."""
    command = flags(tiny_model, shapes, tmp_path / "run", max_steps=8, save_every=2, hang_timeout=1)
    port = free_port()
    machines = [on_machine(i, port, *command, processes=1, start_new_session=True) for i in range(2)]
    deadline = time.monotonic() + 100
    while not list((tmp_path / "run").glob("checkpoint-*")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    lost = machines.pop()
    children = subprocess.run(
        ["pgrep", "-P", str(lost.pid)], capture_output=True, text=True, check=False
    ).stdout.split()
    for process in [lost.pid, *map(int, children)]:
        os.kill(process, signal.SIGKILL)
    machines.append(on_machine(1, port, *command, processes=1, start_new_session=True))
    end_well(machines)
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert any(row["grad_norm"] > 1e-3 for row in rows)


def test_machines_that_do_not_share_the_folder_are_told(tmp_path, monkeypatch):
    """The other machine's process looks for what this one has left, and does not find it."""
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "local_world_size", lambda: 1)
    monkeypatch.setattr(distributed, "barrier", lambda: None)
    monkeypatch.setattr(distributed, "all_gather", lambda value: [value, value if isinstance(value, str) else False])
    with pytest.raises(UserError, match="another folder for rank 1"):
        check_output_folder(str(tmp_path / "run"), False, False)
    assert not list((tmp_path / "run").iterdir())
    monkeypatch.setattr(distributed, "all_gather", lambda value: [value, value])
    check_output_folder(str(tmp_path / "run"), False, False)
