"""Plugins add tasks, losses, benchmarks and flags to every command that takes them."""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("parts.plugins", reason="needs parts/plugins.py, which is not here")

import rewards
from common import plugins
from common.errors import UserError
from common.files import read_jsonl
from common.records import Rollout
from config import RewardFlags
from evaluation.scorer import Scorer
from tests.helpers.marks import needs, slow
from tests.helpers.rows import make_sample
from tests.helpers.runs import SMALL
from tests.helpers.scripts import ROOT, run_script

README = (ROOT / "README.md").read_text()
WEIGHTED = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "plugins.md").read_text(), re.DOTALL)[1]


def arguments(**flags: object) -> list[str]:
    return [f"--{name}={value}" for name, value in flags.items()]


@pytest.fixture(scope="module")
def mine(tmp_path_factory) -> pathlib.Path:
    """The README's plugin, in a file."""
    path = tmp_path_factory.mktemp("plugin") / "mine.py"
    path.write_text(re.search(r"```python\n(import torch.*?)```", README, re.DOTALL)[1])
    return path


@pytest.fixture(scope="module")
def trained(tiny_model, shapes, mine, tmp_path_factory) -> pathlib.Path:
    """A run of two steps that the README's own command has trained with the README's plugin."""
    output = tmp_path_factory.mktemp("runs") / "run"
    command = shlex.split(re.search(r"^    \.venv/bin/python (grpo.py --plugin .*)$", README, re.MULTILINE)[1])
    command[command.index("mine.py")] = mine
    flags = {"model": tiny_model, "data": shapes, "eval_data": shapes, "max_steps": 2, "output": output}
    flags |= SMALL | {"task": "first_digit"}
    done = run_script(*command, *arguments(**flags))
    assert done.returncode == 0, done.stderr[-2000:]
    return output


def test_a_task_and_a_loss_are_added_as_the_readme_says(trained, mine):
    rows = read_jsonl(trained / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["clip_ratio"] == 0 and "rewards/first_digit" in row for row in rows[1:])
    config = json.loads((trained / "config.json").read_text())
    assert config["plugin"] == [str(mine)] == list(config["plugin_sha256"])


def resume(run: pathlib.Path, tiny_model: str, shapes: str, *more: str, steps: int, processes: int = 0):
    flags = SMALL | {"task": "first_digit", "loss_type": "reinforce", "model": tiny_model, "data": shapes}
    return run_script("grpo.py", *arguments(**flags, output=run, max_steps=steps), *more, processes=processes)


@pytest.mark.parametrize("processes", [0, *slow(2)])
def test_a_resumed_run_finds_its_plugins(trained, mine, shapes, tiny_model, tmp_path, processes):
    shutil.copytree(trained, tmp_path / "run")
    done = resume(tmp_path / "run", tiny_model, shapes, "--resume", steps=3, processes=processes)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "step 3/3" in done.stderr and "has changed" not in done.stderr
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["plugin"] == [str(mine)] == list(config["plugin_sha256"])


@pytest.mark.slow
def test_a_plugin_that_has_changed_is_named_and_one_that_is_missing_is_refused(
    trained, mine, shapes, tiny_model, tmp_path
):
    run, moved, again = tmp_path / "run", tmp_path / "moved.py", tmp_path / "again.py"
    shutil.copytree(trained, run)
    config = json.loads((run / "config.json").read_text())
    digests = {str(moved): config["plugin_sha256"][str(mine)]}
    (run / "config.json").write_text(json.dumps(config | {"plugin_sha256": digests}))
    missing = resume(run, tiny_model, shapes, f"--resume={run}/checkpoint-2/", steps=3)
    assert missing.returncode == 2
    assert f"error: --plugin {moved}: there is no such Python file: restore it" in missing.stderr
    again.write_text(mine.read_text())
    done = resume(run, tiny_model, shapes, f"--plugin={again}", "--resume", steps=3)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"plugin was ['{mine}'], is ['{again}']" in done.stderr and "has changed" not in done.stderr
    again.write_text(mine.read_text() + "# a change\n")
    done = resume(run, tiny_model, shapes, "--resume", steps=4)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"note: the plugin {again} has changed since it was recorded in {run}/config.json\n" in done.stderr


@pytest.mark.slow
@needs("parts/benchmarks")
@needs("parts/run_flags.py")
def test_the_comparison_of_a_run_with_its_base_knows_the_task_of_a_plugin(trained, mine):
    done = subprocess.run(["./run.sh", "eval", trained, "--limit", "2"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"--plugin={mine}" in done.stdout and "--max_completion_length=12" in done.stdout
    assert "lmms-eval --model" in done.stdout
    assert json.loads((trained / "eval" / "scores.json").read_text())["task"] == "first_digit"


@needs("parts/benchmarks")
def test_an_evaluation_knows_the_task_of_a_plugin(mine, tmp_path):
    rows = [{"prompt": "7 + 4?", "answer": "11", "response": text} for text in ("12", "21")]
    (tmp_path / "saved.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = {"task": "first_digit", "predictions": tmp_path / "saved.jsonl", "output": tmp_path / "eval"}
    done = run_script("evaluate.py", *arguments(**flags, plugin=mine))
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads((tmp_path / "eval" / "scores.json").read_text())["exact_match"] == 0.5
    unknown = run_script("evaluate.py", *arguments(**flags))
    assert unknown.returncode == 2
    assert "error: --task first_digit: choose one of count, vqa, math, or add one with --plugin" in unknown.stderr


@needs("parts/benchmarks")
@needs("parts/run_flags.py")
def test_a_plugin_has_flags_and_a_benchmark(tiny_model, shapes, tmp_path):
    """The plugin of docs/plugins.md. Started in new interpreters, since other tests have imported evaluate.py."""
    plugin = tmp_path / "weighted.py"
    plugin.write_text(WEIGHTED)

    def start(script: str, *flags: str) -> subprocess.CompletedProcess:
        command = [sys.executable, script, f"--plugin={plugin}", *flags]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    flags = arguments(model=tiny_model, data=shapes, output=tmp_path / "run", max_steps=1, **SMALL)
    done = start("grpo.py", *flags, "--loss_type=weighted", "--negative_weight=0.5")
    assert done.returncode == 0, done.stderr[-2000:]
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["negative_weight"] == 0.5 and config["plugin_flags"] == ["negative_weight"]
    printed = subprocess.run(
        [sys.executable, "-m", "parts.run_flags", tmp_path / "run", "--benchmark", "sums"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert {f"--plugin={plugin}", "--negative_weight=0.5"} <= set(printed.stdout.splitlines())
    rows = [{"question": "7 + 4?", "answer": "11", "response": text} for text in ("11", "12")]
    (tmp_path / "saved.jsonl").write_text("\n".join(map(json.dumps, rows)))
    scored = start("evaluate.py", *arguments(predictions=tmp_path / "saved.jsonl", benchmark="sums", output=tmp_path))
    assert scored.returncode == 0, scored.stderr[-2000:]
    assert json.loads((tmp_path / "scores.json").read_text())["score"] == 0.5
    explained = " ".join(re.sub("[│╭╰─╮╯]", " ", start("evaluate.py", "--help").stdout).split())
    assert "--negative_weight FLOAT Weight of negative advantages in the loss `weighted`. (default: 1.0)" in explained
    unknown = start("evaluate.py", *arguments(predictions=tmp_path / "saved.jsonl", benchmark="sum", output=tmp_path))
    assert (unknown.returncode, unknown.stderr.count("\n")) == (2, 1)
    assert unknown.stderr.startswith("error: --benchmark sum: choose one of aime24, math500,")
    assert unknown.stderr.endswith("screenspot, sums, or add one with --plugin FILE\n")
    convert = ["convert", f"--input_jsonl={shapes}", f"--output_jsonl={tmp_path}/rows.jsonl", "--task=own"]
    plugin.write_text(f"{WEIGHTED}\nimport rewards\nrewards.TASKS['own'] = rewards.TASKS['count']\n")
    assert start("data.py", *convert).returncode == 0
    assert len(read_jsonl(tmp_path / "rows.jsonl")) == 12


@needs("parts/workers.py")
def test_its_rewards_run_in_the_workers(tmp_path, monkeypatch):
    """A call that hangs or raises costs one completion or one line, not the run. A built-in reward stays one."""
    plugin = tmp_path / "own.py"
    plugin.write_text(
        "import os, time, rewards\n"
        "from rewards import count_reward\n"
        "def own(completion, answer, level, **fields):\n"
        "    if completion == 'hang': time.sleep(60)\n"
        "    return {'pid': os.getpid(), 'level': level}[completion]\n"
        "rewards.REWARD_TIMEOUT = 1.0\n"
        "rewards.TASKS['own'] = rewards.Task(own)\n"
        "rewards.TASKS['same'] = rewards.Task(count_reward)\n"
    )
    monkeypatch.setattr(plugins, "_modules", {})
    monkeypatch.setattr(plugins, "_digests", {})
    monkeypatch.setattr(rewards, "TASKS", dict(rewards.TASKS))
    monkeypatch.setattr(rewards, "REWARD_TIMEOUT", rewards.REWARD_TIMEOUT)
    plugins.load(str(plugin))
    scorer = Scorer("own", RewardFlags())
    assert {name: own.name for name, own in scorer.functions.items()} == {"own": f"{plugin}:own"}
    row = make_sample("?", "1", [], "row 1", {"level": 5})
    with pytest.raises(UserError, match="row 2 has no 'level'"):
        scorer.check_columns([row, make_sample("?", "1", [], "row 2")])
    empty = torch.zeros(0)
    (scored,), error = scorer([row], [[Rollout(empty, empty, text=text) for text in ("pid", "level", "hang", "none")]])
    pid, level, hang, none = (rewards.total for rewards in scored)
    assert level == 5 and pid not in (0, os.getpid())
    assert hang != hang and none != none, "unscored"
    assert scorer.unscored_reason == f"{plugin}:own took longer than 1 s"
    assert re.fullmatch(r"--task \S+:own on row 1, 'none': KeyError: 'none'", error), error
    assert Scorer("same", RewardFlags()).functions == {}


def test_mistakes_in_a_plugin_are_one_line(tmp_path):
    flags = "import dataclasses\n@dataclasses.dataclass\nclass Flags:\n    {}: int = 1\n"
    sources = {
        "syntax": "x = 1\ny = = 2\n",
        "name": "import math\n\ndef f():\n    return undefined\n\nf()\n",
        "stop": "raise SystemExit('no')\n",
        "taken": flags.format("max_steps"),
        "method": flags.format("check_rows"),
        "bare": "class Flags:\n    x: int = 1\n",
        "fine": flags.format("own"),
        "again": flags.format("own"),
        "broken": "import syntax\n",
        "frozen": flags.format("x").replace("dataclass\n", "dataclass(frozen=True)\n"),
        "made": flags.format("x") + "Flags = Flags()\n",
        "recorded": flags.format("total_steps"),
        "constant": flags.format("x") + "    max_steps: typing.ClassVar[int] = 1\n",
        "function": flags.format("x") + "    def check_run(self): pass\n",
        "twin": flags.format("no_overwrite: bool = False\n    x"),
        "unknown": flags.format("y: 'Nowhere' = 1\n    x"),
        "unset": flags.format("y: int = dataclasses.field(init=False)\n    x"),
        "silent": "class E(Exception):\n    def __str__(self): raise E\nraise E\n",
        "coloured": "raise ValueError('\\x1b[31m \\udcff')\n",
        "loss": "import grpo\ngrpo.LOSSES['own'] = grpo.Loss(print, 'word', 0.2, 0.2)\n",
    }
    sources["constant"] = "import typing\n" + sources["constant"]
    file = {name: str(tmp_path / f"{name}.py") for name in sources}
    for name, source in sources.items():
        pathlib.Path(file[name]).write_text(source)
    cases = [
        (["nowhere.py"], "--plugin nowhere.py: there is no such Python file"),
        ([str(tmp_path)], f"--plugin {tmp_path}: there is no such Python file"),
        ([file["syntax"]], f"{file['syntax']}, line 2: SyntaxError: invalid syntax"),
        ([file["name"]], f"{file['name']}, line 4: NameError: name 'undefined' is not defined"),
        ([file["stop"]], f"{file['stop']}, line 1: SystemExit: no"),
        ([file["broken"]], f"{file['broken']}, line 1: SyntaxError: invalid syntax (syntax.py, line 2)"),
        ([file["fine"], f"{tmp_path}/../{tmp_path.name}/fine.py"], "fine.py is given twice: leave one out"),
        ([file["taken"]], f"--plugin {file['taken']}: the flag max_steps exists already: choose another name"),
        ([file["method"]], "the flag check_rows exists already"),
        ([file["fine"], file["again"]], f"--plugin {file['again']}: the flag own exists already"),
        ([file["bare"]], "Flags is no dataclass, or is frozen: write @dataclasses.dataclass above the class"),
        ([file["frozen"]], f"--plugin {file['frozen']}: Flags is no dataclass, or is frozen: write"),
        ([file["made"]], f"--plugin {file['made']}: Flags is no dataclass"),
        ([file["recorded"]], "the flag total_steps exists already"),
        ([file["constant"]], "the flag max_steps exists already"),
        ([file["function"]], "the flag check_run exists already"),
        ([file["twin"]], f"--plugin {file['twin']}: AssertionError: Name conflict"),
        ([file["unknown"]], f"--plugin {file['unknown']}: NameError: name 'Nowhere' is not defined"),
        ([file["unset"]], f"--plugin {file['unset']}: y has init=False, so that it is no flag"),
        ([file["silent"]], f"--plugin {file['silent']}, line 3: E\n"),
        ([file["coloured"]], f"--plugin {file['coloured']}, line 1: ValueError: \\x1b[31m \\udcff\n"),
        ([file["loss"]], f"--plugin {file['loss']}, line 2: ValidationError: 1 validation error for Loss"),
    ]
    with ThreadPoolExecutor(2) as pool:
        for (_, message), done in zip(cases, pool.map(lambda case: _start(tmp_path, case[0]), cases)):
            assert done.returncode == 2 and done.stderr.startswith("error: "), done.stderr
            assert message in done.stderr and done.stderr.count("\n") == 1, done.stderr


GOOD = {"model": "m", "task": "count", "eval_data": "rows", "max_completion_length": 12, "plugin_sha256": {}}
SHAPES = ["[]", '"text"', "3", "null", "[" * 100_000, "\xff", json.dumps(GOOD | {"plugin_sha256": ["a"]})]


@pytest.mark.parametrize("text", SHAPES)
def test_a_config_of_another_shape_is_refused_at_resume(text, tmp_path):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=r"config.json cannot be read: restore it, or use a new --output without"):
        plugins.find(["--resume", "--output", str(tmp_path)], "")


def _start(folder: pathlib.Path, files: list[str]) -> subprocess.CompletedProcess:
    return run_script("grpo.py", *(f"--plugin={file}" for file in files), "--data=x", f"--output={folder}/run")


@needs("parts/convert")
def test_a_prompt_is_shown_with_the_task_of_a_plugin_that_knows_no_algorithm(tiny_model, shapes, tmp_path):
    """`data.py show` has the flags of grpo.py, which it does not import."""
    (tmp_path / "own.py").write_text("import rewards\n\nrewards.TASKS['own'] = rewards.TASKS['count']\n")
    flags = arguments(model=tiny_model, data=shapes, plugin=tmp_path / "own.py", task="own", row=2)
    command = [sys.executable, "data.py", "show", *flags]  # a new interpreter: other tests have imported grpo.py
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "template of --task own" in done.stdout


def test_a_function_that_exits_does_not_end_a_run_as_if_it_had_finished(tiny_model, shapes, tmp_path):
    (tmp_path / "mine.py").write_text("import grpo\n\n\ngrpo.ADVANTAGES['leave'] = lambda *_: exit(0)\n")
    flags = [
        f"--model={tiny_model}",
        f"--data={shapes}",
        "--task=count",
        f"--output={tmp_path}/run",
        "--prompts_per_step=2",
    ]
    flags += ["--num_generations=2", "--max_completion_length=4", "--max_steps=1"]
    done = run_script("grpo.py", *flags, f"--plugin={tmp_path}/mine.py", "--advantage=leave")
    assert done.returncode == 1 and "mine.py" in done.stderr and "has called exit()" in done.stderr


def test_a_sampler_that_returns_too_long_completions_is_refused(tiny_model, shapes, tmp_path):
    lines = [
        "import torch",
        "from dataclasses import replace",
        "import rollout",
        "from sampling.hf_engine import HFEngine",
    ]
    lines += ["twice = lambda r: replace(r, ids=torch.cat([r.ids] * 9))", "generate = HFEngine.generate"]
    lines += [
        "def odd(*args, **options):",
        "    outputs = generate(*args, **options)",
        "    return [*outputs[:-1], twice(outputs[-1])]",
    ]
    (tmp_path / "mine.py").write_text("\n".join([*lines, "HFEngine.generate = odd"]))
    flags = [f"--model={tiny_model}", f"--data={shapes}", "--task=count", f"--output={tmp_path}/run", "--max_steps=1"]
    flags += ["--prompts_per_step=2", "--num_generations=2", "--max_completion_length=4", "--engine=hf"]
    done = run_script("grpo.py", *flags, f"--plugin={tmp_path}/mine.py")
    assert done.returncode and "expected an Output of at most 4 tokens" in done.stderr
    assert "Traceback" not in done.stderr
