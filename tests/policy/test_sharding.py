"""An update's gradient is the same to within 1e-5 on 1, 2 and 4 processes, and with one micro-batch or many.

Guards against: normalisation per process or per micro-batch, gradients that are averaged instead of summed,
processes that disagree on the number of collectives (a hang), and a vision tower that only some processes run.
"""

import pathlib
import time

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from common import distributed
from common.errors import Interrupted, UserError
from common.files import read_jsonl
from config import PolicyFlags
from policy.batches import micro_batches
from policy.model import load_policy
from policy.sharding import apply_fsdp, unsharded
from tests.helpers.marks import needs
from tests.helpers.models import make_group
from tests.helpers.runs import plugin_with_timeout
from tests.helpers.scripts import ROOT, check_success, free_port, on_machine, run_on_machines, run_script
from training.run_log import check_output_folder

FOUR = pytest.param(4, marks=pytest.mark.slow)
BOUND = 1e-5  # sums in float32 differ by up to 1.3e-6 on most processors, and by 2.6e-6 on those with AMX
WORKER = str(ROOT / "tests" / "helpers" / "gradient_worker.py")


@pytest.fixture(scope="module")
def results(tiny_model, tmp_path_factory) -> dict[int, dict]:
    return Gradients(tiny_model, tmp_path_factory.mktemp("gradients"))


class Gradients(dict):
    """The gradients of all variants by number of processes, computed when they are first asked for."""

    def __init__(self, model: str, folder: pathlib.Path):
        self.model, self.folder = model, folder

    def __missing__(self, processes: int) -> dict:
        out = self.folder / f"{processes}.pt"
        process = run_script(WORKER, self.model, out, processes=processes)
        assert process.returncode == 0, process.stderr[-3000:]
        self[processes] = torch.load(out)
        return self[processes]


def difference(a: dict, b: dict) -> float:
    """Return the largest relative difference between the gradients of any parameter in `a` and `b`.

    The relative difference is the norm of the difference divided by the norm of the gradient in `a`. The divisor is at
    least a thousandth of the norm of all gradients, because some gradients, such as those of key biases, are zero
    except for rounding.
    """
    assert a.keys() == b.keys()
    names = [name for name in a if not name.startswith("stats/") and name != "batches"]
    total_norm = torch.cat([a[name].flatten() for name in names]).norm()
    assert total_norm > 0
    return max(((a[n] - b[n]).norm() / a[n].norm().clamp(min=1e-3 * total_norm)).item() for n in names)


VARIANTS = [
    "one micro-batch",
    "many micro-batches",
    "groups split across micro-batches",
    "dapo with KL",
    "gspo",
    "trained vision tower",
    "trained vision tower, a process without images",
    "adapters in the vision tower, a process without images",
    "frozen vision tower, a process without images",
    "fewer groups than processes",
    "sampled by one process, evened out",
    "sampled by one process, evened out, trained vision tower",
    "whole copies",
    "whole copies, trained vision tower, first and last without images",
    "gathered once",
]
ON_MACHINES = [
    "many micro-batches",
    "sampled by one process, evened out",
    "a copy on each of two machines",
    "two machines, gathered once, trained vision tower",
    "two machines, trained vision tower, a process without images",
    "two machines, trained vision tower, first micro-batch without images",
    "two machines, trained vision tower, last micro-batch without images",
    "two machines, adapters in the vision tower, a process without images",
]


def with_parts(variants: list[str]) -> list[str]:
    """Mark those of `variants` that parts/fast evens out."""
    return [pytest.param(v, marks=needs("parts/fast")) if "evened out" in v else v for v in variants]


@pytest.mark.parametrize("processes", [2, FOUR])
@pytest.mark.parametrize("variant", with_parts(VARIANTS))
def test_gradient_does_not_depend_on_the_number_of_processes(results, variant, processes):
    assert difference(results[1][variant], results[processes][variant]) < BOUND


@pytest.fixture(scope="module")
def on_machines(tiny_model, tmp_path_factory) -> dict:
    """Return the gradients from two simulated machines: two torchrun launches with two processes each."""
    out = tmp_path_factory.mktemp("machines") / "gradients.pt"
    run_on_machines(WORKER, tiny_model, out, "|".join(ON_MACHINES))
    return torch.load(out)


@pytest.mark.slow
@pytest.mark.parametrize("variant", with_parts(ON_MACHINES))
def test_gradient_does_not_depend_on_the_number_of_machines(results, on_machines, variant):
    assert difference(results[1][variant], on_machines[variant]) < BOUND


@needs("parts/fast")
@pytest.mark.parametrize("processes", [2, FOUR])
def test_completions_move_to_processes_with_less_work(results, processes):
    for variant in VARIANTS:
        if "evened out" in variant:
            assert results[1][variant]["stats/share"] == 1
            # The share counts completion tokens only. The plan also counts prompt tokens, and here the prompts are
            # longer than the completions.
            assert results[processes][variant]["stats/share"] < {2: 0.75, 4: 0.5}[processes]


@pytest.mark.parametrize("variant", ["many micro-batches", "groups split across micro-batches"])
@pytest.mark.parametrize("processes", [1, 2, FOUR])
def test_gradient_does_not_depend_on_micro_batches(results, variant, processes):
    assert difference(results[1]["one micro-batch"], results[processes][variant]) < BOUND


def test_a_process_without_images_joins_every_gradient_of_qwen3_vl(tiny_qwen3_vl, tmp_path):
    """The tower feeds several decoder layers. A blank image must reach the parameters on each of these paths."""
    variant = "trained vision tower, a process without images"
    gradients = {}
    for processes in (1, 2):
        process = run_script(WORKER, tiny_qwen3_vl, tmp_path / "g.pt", variant, processes=processes)
        assert process.returncode == 0, process.stderr[-3000:]
        gradients[processes] = torch.load(tmp_path / "g.pt")[variant]
    assert any("deepstack" in name for name in gradients[1])
    assert difference(gradients[1], gradients[2]) < BOUND


@needs("parts/fast")
def test_the_variants_differ_in_their_micro_batches(results):
    counts = {name: results[1][name]["batches"] for name in VARIANTS}
    assert counts["one micro-batch"] == 1
    assert counts["many micro-batches"] > 2
    assert counts["groups split across micro-batches"] > 5, "only five groups are trained on, so some must be split"


def test_the_vision_tower_is_trained_only_when_asked(results):
    def has_vision(variant):
        return any("visual" in name for name in results[1][variant])

    assert has_vision("trained vision tower")
    assert not has_vision("one micro-batch")


def test_weights_are_freed_when_an_update_is_given_up(tiny_model):
    """After a signal between two micro-batches, a checkpoint of the shards is saved."""
    device = distributed.start()
    policy = apply_fsdp(load_policy(tiny_model, PolicyFlags(), device), device, torch.float32)
    policy.keep_unsharded = True
    groups = [make_group(policy.model, "qwen2_5_vl", 9, [], [5, 3], torch.Generator().manual_seed(0))]
    with pytest.raises(Interrupted), unsharded(policy):
        for batch, _ in micro_batches(policy, groups, 100):
            policy(batch)[0].sum().backward()
            assert not all(isinstance(parameter, DTensor) for parameter in policy.model.lm_head.parameters())
            raise Interrupted
    assert all(isinstance(parameter, DTensor) for parameter in policy.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("processes", [2, FOUR])
def test_metrics_are_sums_over_all_processes(results, processes):
    for name in ("stats/tokens", "stats/loss", "stats/entropy", "stats/difference_max"):
        a, b = (results[n]["many micro-batches"][name] for n in (1, processes))
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# --- whole runs on two machines ---------------------------------------------------------------------------------------


def flags(model: str, data: str, output: pathlib.Path, **more: object) -> list[str]:
    """Return the command line of a short run that has rewards to learn from by its second step."""
    short = {"prompts_per_step": 4, "num_generations": 8, "max_completion_length": 16, "learning_rate": 1e-3, "seed": 2}
    values = {"model": model, "data": data, "task": "count", "output": output, "beta": 0.01} | short | more
    return ["grpo.py", *(f"--{name}={value}" for name, value in values.items())]


# Hybrid sharding sums gradients in a different order. AdamW divides by gradients that may be as small as the rounding
# error, so it can amplify the difference.
@pytest.mark.parametrize(("sharding", "tolerance"), [("full", 1e-6), ("hybrid", 1e-5)])
@pytest.mark.slow
def test_two_machines_train_the_same_model_as_one(sharding, tolerance, tiny_model, shapes, tmp_path):
    process = run_script(*flags(tiny_model, shapes, tmp_path / "one", max_steps=3), processes=4)
    assert process.returncode == 0, process.stderr[-3000:]
    run_on_machines(*flags(tiny_model, shapes, tmp_path / "two", max_steps=3, sharding=sharding, resume="auto"))
    folders = (pathlib.Path(tiny_model), tmp_path / "one" / "final", tmp_path / "two" / "final")
    start, one, two = (load_file(folder / "model.safetensors") for folder in folders)

    def max_difference(a: dict, b: dict) -> float:
        return max((a[name] - b[name]).abs().max().item() for name in a)

    assert max_difference(start, one) > 1e-3
    assert max_difference(one, two) < tolerance


@needs("parts/plugins.py")
def test_a_machine_that_drops_is_replaced(tiny_model, shapes, tmp_path):
    """On one machine, torchrun and its worker are killed and restarted. The run resumes from the newest checkpoint."""
    plugin = plugin_with_timeout(tmp_path, 60)
    more = dict(max_steps=8, save_every=2, plugin=plugin, resume="auto")
    command = flags(tiny_model, shapes, tmp_path / "run", **more)
    port = free_port()
    with on_machine(0, port, *command, processes=1) as first:
        with on_machine(1, port, *command, processes=1):
            deadline = time.monotonic() + 100
            while not list((tmp_path / "run").glob("checkpoint-*")):
                assert time.monotonic() < deadline
                time.sleep(0.1)
        with on_machine(1, port, *command, processes=1) as replacement:
            check_success(first, replacement)
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert any(row["grad_norm"] > 1e-3 for row in rows)


def test_machines_that_do_not_share_the_folder_are_reported(tmp_path, monkeypatch):
    """The process on the other machine does not find the file that this process has written."""
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "local_world_size", lambda: 1)
    monkeypatch.setattr(distributed, "barrier", lambda: None)
    monkeypatch.setattr(distributed, "all_gather", lambda value: [value, value if isinstance(value, str) else False])
    with pytest.raises(UserError, match="different folder on the machine of rank 1"):
        check_output_folder(str(tmp_path / "run"), False, False)
    assert not list((tmp_path / "run").iterdir())
    monkeypatch.setattr(distributed, "all_gather", lambda value: [value, value])
    check_output_folder(str(tmp_path / "run"), False, False)
