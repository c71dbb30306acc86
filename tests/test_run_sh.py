"""run.sh: the recipes run offline, and each mistake gets a one-line error message."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from common.errors import UserError
from common.files import read_jsonl
from tests.helpers.marks import slow
from tests.helpers.scripts import ROOT, free_port

pytest.importorskip("apps", reason="needs apps/, which is not here")

from apps.demo import tiny

SLOW = pytest.mark.slow
RECIPES = ["count", "click", "clevr"]
SLOW_RECIPES = ["math mixed", "vqa", "geo3k", "math text", "math image"]


def test_every_recipe_runs_offline_with_smoke(request):
    """Run the recipes as a newcomer would, two at a time. Each recipe prints the complete command that it runs.

    Without --slow, only `./run.sh eval` compares a trained model with its base, as the recipes would.
    """
    if not (ROOT / ".venv" / "installed").is_file():
        pytest.skip("no .venv made by run.sh: the recipes would install one")

    def smoke(recipe: str) -> subprocess.CompletedProcess:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if not request.config.getoption("--slow"):
            environment["TEST_DATA"] = ""
        command = ["./run.sh", *recipe.split(), "--smoke", f"--seed={len(recipe)}"]
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=200
        )

    with ThreadPoolExecutor(2) as pool:
        recipes = RECIPES + (SLOW_RECIPES if request.config.getoption("--slow") else [])
        for recipe, done in zip(recipes, pool.map(smoke, recipes)):
            assert done.returncode == 0, done.stderr[-3000:]
            (command,) = re.findall(r"^\+ .*grpo\.py .*", done.stdout, re.MULTILINE)
            task = {"geo3k": "math", "click": "vqa", "clevr": "vqa"}.get(recipe, recipe.split()[0])
            assert f"--task {task} " in command
            assert f"--seed={len(recipe)}" in command, (
                "flags given after the recipe name must override the recipe's own"
            )
            rows = read_jsonl(ROOT / "runs" / "smoke" / recipe.replace(" ", "-") / "metrics.jsonl")
            assert [row["step"] for row in rows] == [1, 2]
            assert re.findall(r"^step (\d)/2  ", done.stderr, re.MULTILINE) == ["1", "2"]
            assert "%|" not in done.stderr, "progress bars belong on a terminal, not in a log"
            assert "\033" not in done.stdout, "so does bold type"
    settings = json.loads((ROOT / "runs/smoke/count/final/adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (64, 128)
    command = ["./run.sh", "eval", "runs/smoke/count", "--limit=2"]
    environment = os.environ | {"TEST_DATA": "runs/smoke/count/made/test.zip"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "--adapter=runs/smoke/count/final" in done.stdout
    assert json.loads((ROOT / "runs/smoke/count/eval/scores.json").read_text())["paired"]["rows"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["maths"], "no recipe 'maths'; there are: demo"),
        (["math"], "needs text, image or mixed after it"),
        (["math", "--smoke"], "needs text, image or mixed after it, not '--smoke'"),
        (["count"], "DATA=folder_or.zip ./run.sh count"),
        (
            ["vqa", "--smoke", "--output", "elsewhere"],
            "--output: set OUTPUT, MODEL, ADAPTER or DATA in the environment",
        ),
    ],
)
def test_mistakes_with_run_sh_are_answered(arguments, message):
    done = subprocess.run(["./run.sh", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.fixture
def sh(tmp_path):
    """Return a function that runs run.sh in a temporary folder. Python, pip, torchrun and nvidia-smi are each
    replaced by a stub that prints its arguments and installs nothing."""
    for name in ("run.sh", "requirements.txt", "requirements-gpu.txt"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    stub = tmp_path / "nvidia-smi"
    stub.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = -L ]; then exit $((1 - HAS_GPU)); fi; echo "$(basename "$0") $* ${RANK:+as rank $RANK}"\n'
        '[ "$1" != install ] || /bin/sleep "${PIP_SECONDS:-0}" || exit 3\n'
        '[ "$2" = venv ] || exit 0; mkdir -p .venv/bin\n'
        'for it in pip python torchrun ruff mypy; do cp "$0" .venv/bin/$it; done'
    )
    stub.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"

    def run(recipe: str, *flags: str, **environment: str) -> subprocess.CompletedProcess:
        environment = {"PATH": path, "HAS_GPU": "0", "PYTHON": str(stub)} | environment
        return subprocess.run(
            ["./run.sh", recipe, *flags], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    return run


def test_the_linter_and_the_type_checker_come_before_the_tests(sh):
    said = sh("test", "--slow").stdout
    assert re.findall(r"^(?:ruff|mypy|python).*", said, re.MULTILINE)[-4:] == [
        "ruff check . ",
        "ruff format --check . ",
        "mypy  ",
        "python -m pytest -n auto --dist loadfile --no-loadscope-reorder --slow ",
    ]


@pytest.mark.parametrize("arguments", ["--help", "-h", "help", "math --help", "eval -h", "demo --help"])
def test_run_sh_explains_itself(arguments):
    done = subprocess.run(["./run.sh", *arguments.split()], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "./run.sh math text|image|mixed" in done.stdout and "set -euo" not in done.stdout


def test_fits_passes_its_flags_on(sh):
    done = sh("fits", "--model", "7b", "--gpus", "2")
    assert done.returncode == 0 and "python -m apps.fits --model 7b --gpus 2" in done.stdout, done.stderr


def test_an_installation_in_a_log_file_shows_that_it_is_alive(sh, tmp_path):
    """A line every 30 s, shortened to 0.1 s here. Nothing that run.sh has started keeps its output open afterwards."""
    begin = time.monotonic()
    assert sh("setup", PIP_SECONDS="not a number").returncode == 3
    assert "still installing" not in sh("setup").stdout and time.monotonic() - begin < 20
    shutil.rmtree(tmp_path / ".venv")
    (tmp_path / "sleep").write_text("#!/bin/sh\nexec /bin/sleep 0.1\n")
    (tmp_path / "sleep").chmod(0o755)
    done = sh("setup", PIP_SECONDS="1")
    assert done.returncode == 0 and re.search(r"^still installing, after \d+ s$", done.stdout, re.MULTILINE)
    assert done.stdout.endswith(".venv is ready\n")


def test_a_warm_start_trains_the_model_and_shows_that_it_is_alive(tmp_path, monkeypatch, capsys):
    """It prints a line every half a second here, and starts for longer than that."""
    tokenizer, model = tiny.byte_tokenizer(), tmp_path / "model" / "model.safetensors"
    tiny.save(tiny.build_model(tokenizer, seed=0), tokenizer, tmp_path / "model")
    tiny.write_shapes(tmp_path / "train", 48, [0, 0])
    before = model.read_bytes()
    monkeypatch.setattr(tiny, "LINE_EVERY", 0.5)
    tiny.warm_start(tiny.Config(steps=2), tmp_path)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warm start: ")]
    assert lines[0] == "warm start: starting" and model.read_bytes() != before
    (tmp_path / "train" / "main.csv").write_text("images_path,question,answer\n")
    with pytest.raises(UserError, match="no usable row"):
        tiny.warm_start(tiny.Config(steps=2), tmp_path)


def test_an_sft_adapter_is_trained_on_and_scored(sh):
    said = sh("vqa", ADAPTER="sft").stdout
    assert re.search(r"^\+ \S*python grpo.py .*--adapter sft ", said, re.MULTILINE), said
    assert re.search(r"^\+ \S*python evaluate.py .*--output runs/vqa/eval --temperature 0.6", said, re.MULTILINE), said


def test_eval_scores_a_run_as_its_recipe_did(sh):
    """With the recipe's sampling, benchmark and rows; flags given after the run's folder come later and override."""
    recipe = sh("geo3k", TEST_DATA="rows").stdout
    scored = re.search(r"evaluate.py .*--output runs/geo3k/eval (.*--data rows)", recipe)[1]
    assert "--benchmark geometry3k" in scored and "--temperature 0.6" in scored
    assert f"{scored} --limit 3" in sh("eval", "runs/geo3k", "--limit", "3").stdout
    other = sh("eval", "runs/geo3k", "--benchmark", "mmstar").stdout
    assert "--benchmark mmstar" in other and "--benchmark geometry3k" not in other and "--data rows" not in other
    assert f"{scored} --data others" in sh("eval", "runs/geo3k", TEST_DATA="others").stdout


@pytest.mark.parametrize(("recipe", "result"), [("click", "83.3 after"), ("clevr", "reward above 0.9 at step 200")])
def test_a_published_result_is_said_before_the_run(sh, recipe, result):
    (line,) = re.findall("^Expected.*", sh(recipe).stdout, re.MULTILINE)
    assert result in line and line.endswith("This recipe has not been run on real weights")


def test_the_demos_end_with_the_score_without_pictures(sh):
    for name in ("demo", "digits", "zoom"):
        (command,) = re.findall(r"^\+ \S*python (evaluate.py .*--picture .*)", sh(name).stdout, re.MULTILINE)
        assert command.endswith(f"--picture blank --baseline runs/{name}/eval --output runs/{name}/blank"), command


# --- signals ----------------------------------------------------------------------------------------------------------

AS_FIRST = ["unshare", "--fork", "--kill-child", "--pid", "--mount-proc"]  # as the first process of a container


@pytest.fixture
def start(tmp_path):
    """Return a function that starts run.sh in a copy of the project, whose .venv is this Python.

    All that it has started is killed afterwards.
    """
    stamp = b"".join((ROOT / name).read_bytes() for name in ("requirements.txt", "requirements-gpu.txt"))
    stamp = subprocess.run(["cksum"], input=stamp, capture_output=True, check=True).stdout
    started = []

    def run(name: str, *arguments: str, before: list[str] = (), **options) -> tuple[subprocess.Popen, pathlib.Path]:
        folder = tmp_path / name
        (folder / ".venv/bin").mkdir(parents=True)
        (folder / ".venv/installed").write_bytes(stamp)
        (folder / ".venv/bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (folder / ".venv/bin/python").chmod(0o755)
        for path in ROOT.iterdir():
            if path.name not in (".venv", ".git", "runs", "run.sh"):
                (folder / path.name).symlink_to(path)
        shutil.copy(ROOT / "run.sh", folder)
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [*before, "./run.sh", *arguments]
        options["start_new_session"] = command[0] != "setsid"
        started.append(subprocess.Popen(command, cwd=folder, env=environment, **options))
        return started[-1], folder

    yield run
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(what: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not what() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert what(), "it did not happen in time"


def terminate(process: subprocess.Popen, before: list[str]) -> None:
    """Send SIGTERM to run.sh alone."""
    if before:  # from outside, its process id is that of the only child
        (pid,) = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(pid), signal.SIGTERM)
    else:
        process.send_signal(signal.SIGTERM)


def group(process: subprocess.Popen) -> list[str]:
    """Return the process ids of all that a process has started, and its own."""
    return subprocess.run(["pgrep", "-g", f"{process.pid}"], capture_output=True, text=True, check=False).stdout.split()


def skip_without_namespaces() -> None:
    done = subprocess.run([*AS_FIRST, "true"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a namespace of processes is not permitted here: {done.stderr.strip()}")


@pytest.mark.parametrize("how", ["SIGTERM", *slow("SIGTERM to the first process", "Ctrl-C")])
def test_a_stopped_recipe_saves_a_checkpoint_and_evaluates_nothing(start, how):
    """The signal reaches the training behind run.sh, which waits for it and ends with its status."""
    before, terminal, stdin, out = [], None, subprocess.DEVNULL, subprocess.PIPE
    if how == "Ctrl-C":
        terminal, stdin = os.openpty()
        before = ["setsid", "--ctty"]
    elif "first" in how:
        skip_without_namespaces()
        before = AS_FIRST
    flags = ["--max_steps=100000", "--report_every=0"]
    process, folder = start(
        "a", "vqa", "--smoke", *flags, before=before, stdin=stdin, stdout=out, stderr=out, text=True
    )
    run = folder / "runs/smoke/vqa"
    wait_for(lambda: (run / "metrics.jsonl").is_file() and len(read_jsonl(run / "metrics.jsonl")) >= 2)
    os.write(terminal, b"\x03") if terminal else terminate(process, before)
    said, err = process.communicate(timeout=60)
    assert process.returncode == 130, err[-3000:]
    (checkpoint,) = run.glob("checkpoint-*")
    assert f"{checkpoint.name} is complete: continue with --resume" in err and err.count("stopping and saving") == 1
    assert "evaluate.py" not in said and "run.sh: line" not in err
    wait_for(lambda: not group(process), 10)


def test_ctrl_c_ends_a_command_that_has_nothing_to_save(start):
    terminal, stdin = os.openpty()
    before, out = ["setsid", "--ctty"], subprocess.PIPE
    process, _ = start("a", "vqa", "--smoke", before=before, stdin=stdin, stdout=out, stderr=out, text=True)
    command = ["pgrep", "-g", f"{process.pid}", "-f", "apps.demo.smoke"]
    wait_for(lambda: subprocess.run(command, capture_output=True, check=False).returncode == 0)
    for _ in range(120):  # as a person does: while a library written in C is imported, an interrupt may be lost
        os.write(terminal, b"\x03")
        with contextlib.suppress(subprocess.TimeoutExpired):
            said, _ = process.communicate(timeout=0.5)
            break
    assert process.returncode and "apps.demo.smoke" in said and "grpo.py" not in said


@pytest.mark.parametrize("before", [AS_FIRST, *slow([])], ids=["as the first process", ""])
def test_the_service_ends_with_run_sh(start, before):
    if before:
        skip_without_namespaces()
    port = free_port()
    process, _ = start("a", "serve", f"--port={port}", before=before)

    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_for(answers)
    terminate(process, before)
    assert process.wait(30) == 128 + signal.SIGTERM
    assert not answers()
    wait_for(lambda: not group(process), 10)


TWO = {"NNODES": "2", "NODE_RANK": "01", "MASTER_ADDR": "10.0.0.1"}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"NNODES": "two"}, "NNODES=two: must be a whole number, 1 or more"),
        ({"NNODES": "2:4"}, "NNODES=2:4: must be a whole number, 1 or more"),
        ({"NNODES": "0"}, "NNODES=0: must be a whole number, 1 or more"),
        ({"NODE_RANK": "1", "MASTER_ADDR": "h"}, "NODE_RANK=1 needs NNODES, the number of machines"),
        ({"NNODES": "2", "NODE_RANK": "1"}, "NNODES=2 needs MASTER_ADDR"),
        ({"NNODES": "2", "MASTER_ADDR": "h"}, "NNODES=2 needs MASTER_ADDR"),
        (TWO | {"NODE_RANK": "first"}, "NODE_RANK=first: must be a whole number, 0 or more"),
        (TWO | {"NODE_RANK": "2"}, "NODE_RANK=2: must be below NNODES=2"),
        (TWO | {"NODE_RANK": "08"}, "NODE_RANK=8: must be below NNODES=2"),
        (TWO | {"MASTER_ADDR": "h:1234"}, "MASTER_ADDR=h:1234: must be the address alone"),
        (TWO | {"MASTER_PORT": "http"}, "MASTER_PORT=http: must be a whole number, 1 or more"),
        ({"N_GPUS": "all"}, "N_GPUS=all: must be a whole number, 1 or more"),
        ({"RESTARTS": "x"}, "RESTARTS=x: must be a whole number, 0 or more"),
    ],
)
def test_a_machine_that_does_not_know_its_place_is_told(sh, environment, message):
    """The error message is one line, printed before any set-up. Without the check, each machine would train alone."""
    done = sh("vqa", **environment)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1, done.stderr
    assert not done.stdout


def test_several_machines_have_rows_of_their_own_to_train_on(sh):
    done = sh("vqa", "--smoke", **TWO)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == "error: --smoke with NNODES=2: it makes its own model and rows, on one machine\n"


@pytest.mark.parametrize("name", ["MODEL", "DATA", "OUTPUT", "ADAPTER"])
def test_smoke_refuses_what_it_would_ignore(sh, name):
    done = sh("vqa", "--smoke", **{name: "mine"})
    assert done.returncode == 2 and not done.stdout
    assert "leave MODEL, DATA, OUTPUT and ADAPTER unset" in done.stderr


def test_what_a_cluster_sets_does_not_keep_one_machine_from_training(sh):
    done = sh("vqa", MASTER_ADDR="vqa-master-0", MASTER_PORT="tcp://10.0.0.1:80", RANK="0", WORLD_SIZE="1", N_GPUS="02")
    assert done.returncode == 0, done.stderr
    assert "+ .venv/bin/torchrun --standalone --nproc_per_node 2 --max_restarts 0 grpo.py" in done.stdout
    assert "as rank" not in done.stdout, "if a rank were set, the evaluation would wait for other machines"


def test_several_machines_use_what_one_has_set_up(sh, tmp_path):
    """A set-up must come first, with and without GPUs. Otherwise, all machines would install into their shared folder
    at the same time."""
    command = "before NNODES=2, on one machine: {}./run.sh setup\n"
    for gpu, setting in (("0", ""), ("1", "GPU=1 ")):
        done = sh("vqa", HAS_GPU=gpu, **TWO)
        assert done.returncode == 2 and done.stderr.endswith(command.format(setting)), done.stderr
        assert not done.stdout
    done = sh("setup")
    assert done.returncode == 0 and "--requirement requirements.txt" in done.stdout
    assert sh("vqa", HAS_GPU="1", **TWO).stderr.endswith(command.format("GPU=1 ")), (
        "a GPU machine needs a set-up that includes vLLM"
    )
    done = sh("setup", GPU="1")
    assert done.returncode == 0 and "--requirement requirements-gpu.txt" in done.stdout
    for gpu in "01":
        done = sh("vqa", HAS_GPU=gpu, **TWO)
        assert done.returncode == 0, done.stderr
        assert "--nnodes 2 --nproc_per_node 1 --max_restarts 0 --rdzv_backend c10d" in done.stdout
        assert "--rdzv_endpoint 10.0.0.1:29400 --rdzv_id grpo --rdzv_conf is_host=0 grpo.py" in done.stdout
        assert "pip" not in done.stdout + sh("setup", HAS_GPU=gpu).stdout, (
            "a set-up for GPUs must also serve machines without a GPU"
        )
    with (tmp_path / "requirements.txt").open("a") as file:
        file.write("more==1\n")
    assert sh("vqa", **TWO).returncode == 2, "if the requirements change, a new set-up must be required"
