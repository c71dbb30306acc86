"""The command line: what is parsed, and what is answered in one line."""

import dataclasses
import re
import subprocess
import sys

import pytest

import config
import evaluate
import sft
from common import cli, console, usage
from tests.helpers.scripts import ROOT


@dataclasses.dataclass
class Config:
    """A script."""

    fast: bool = False
    """A switch."""
    steps: int = 1
    """A number."""


@pytest.mark.parametrize("given", [["--fast", "true"], ["--fast=False"], ["--fast=TRUE"]])
def test_a_switch_with_a_value_is_refused(given, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["script.py", *given])
    with pytest.raises(SystemExit) as stopped:
        cli.parse(Config)
    assert stopped.value.code == 2
    assert "Unrecognized options: " + given[-1].removeprefix("--fast=") in "".join(capsys.readouterr())


def test_a_message_that_nobody_can_read_stops_no_run():
    """The disk of a log file is full; the same holds for a pipe that was closed."""
    script = "from common import console; console.log('lost'); print('goes on', flush=True)"
    with open("/dev/full", "w") as full:
        run = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=full, check=False)
    assert run.stdout == b"goes on\n"


def test_control_characters_are_not_printed(capsys):
    """A model, or a plugin, could otherwise act on the terminal. Lines, tabs and other scripts stay."""
    console.log("a\x1b[2J\r\x9b\udcff\nb\té\u200c")
    assert capsys.readouterr().err == "a\\x1b[2J\\r\\x9b\\udcff\nb\té\u200c\n"


def test_arguments_of_a_script():
    flags = {"steps": 3, "fast": True, "slow": False, "reward": ["a", "b"]}
    assert cli.as_arguments(flags) == ["--steps=3", "--fast", "--no_slow", "--reward=a", "--reward=b"]


def explained(script: type, capsys) -> dict[str, list[str]]:
    """Return the flags in each section of `--help`."""
    with pytest.raises(SystemExit) as stopped:
        cli.parse(script, ["--help"])
    out, err = capsys.readouterr()
    assert (stopped.value.code, err) == (0, "")
    sections = re.split(r"^(?:╭─)? (\w+) options\b.*", out, flags=re.MULTILINE)[1:]
    found = {
        name: re.findall(r"^[│ ] --(\w+)", text, re.MULTILINE) for name, text in zip(sections[::2], sections[1::2])
    }
    assert "Peak learning rate of AdamW." in out or "Completions per row. (default: 1)" in out
    return {name: flags for name, flags in found.items() if flags}


@pytest.mark.parametrize("script", [config.Config, evaluate.Config, sft.Config])
def test_every_flag_is_in_one_section(script, capsys):
    shown = sorted(flag for flags in explained(script, capsys).values() for flag in flags)
    assert shown == sorted(field.name for field in dataclasses.fields(script) if field.init)


def test_help_is_wrapped_once_and_may_be_cut_off():
    """The ends of lines in the source are no ends of lines here."""
    command = f"COLUMNS=100 {sys.executable} grpo.py --help | head -n 30"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("usage: grpo.py") and not done.stderr
    assert "grpo.py may run without `data`: it then uses the flags of" in done.stdout


def test_most_runs_need_only_the_first_flags(capsys):
    sections = explained(config.Config, capsys)
    assert list(sections) == ["common", "grpo", "row", "data", "policy", "engine", "run", "parts"]
    assert len(sections["common"]) == 10 and sections["common"][:3] == ["task", "model", "data"]


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ("--epsilon 0.2 --epsilon_high=0.3", ["clip_low and --clip_high", "clip_high"]),
        ("--num-train-epochs=2 --model_name_or_path x", ["epochs", "model"]),
        ("--lr 1e-6 --test_data x", ["learning_rate", "eval_data"]),
        ("actor_rollout_ref.actor.optim.lr=1e-6 +data.train_files=x", ["learning_rate", "data"]),
        ("--nonsense 1 --no_train_vision", []),
        ("--max_steps x", []),
    ],
)
def test_a_flag_of_another_library_is_named_as_it_is_here(given, flags, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.parse(config.Config, ["--data=x", *given.split()])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert re.findall(r"^error: \S+ is no flag here: give --(.+); see docs/peers.md$", said, re.MULTILINE) == flags


def test_the_names_of_other_libraries_are_those_of_the_document():
    names = {field.name for field in dataclasses.fields(config.Config)}
    assert len(usage.peers()) > 80
    for theirs, ours in usage.peers():
        assert ours.split()[0] in names, ours
        assert theirs in names or usage.own_flag(f"--{theirs}", names)


WORLD = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h"}
WORLD |= {"MASTER_PORT": "29500"}
LEFT_OVER = [
    {"RANK": "abc"},
    WORLD | {"RANK": ""},
    WORLD | {"RANK": "-1"},
    WORLD | {"WORLD_SIZE": "two"},
    {"LOCAL_WORLD_SIZE": "2(x3)"},
    WORLD | {"LOCAL_RANK": "1.0"},
    WORLD | {"MASTER_PORT": "tcp://10.0.0.1:80"},
    {"RANK": "0"},
    {"WORLD_SIZE": "4"},
    {"LOCAL_WORLD_SIZE": "8"},
    {"LOCAL_RANK": "3", "MASTER_ADDR": "h"},
    {"RANK": "0", "WORLD_SIZE": "1"},
    WORLD | {"MASTER_PORT": ""},
    WORLD | {"MASTER_PORT": "99999"},
    WORLD | {"RANK": "4"},
    WORLD | {"LOCAL_RANK": "2"},
    WORLD | {"LOCAL_WORLD_SIZE": "8"},
    WORLD | {"RANK": "0", "WORLD_SIZE": "0"},
]


@pytest.mark.parametrize("given", LEFT_OVER)
def test_variables_of_another_launcher_are_refused(given, monkeypatch, capsys):
    set_launcher(monkeypatch, given)
    with pytest.raises(SystemExit) as stopped:
        cli.parse(Config)
    assert stopped.value.code == 2
    says = ", ".join(f"{name}={value}" for name, value in given.items() if name[:6] != "MASTER")
    said = capsys.readouterr().err
    assert re.fullmatch(rf"error: the environment says {re.escape(says)}.*, which does not .*: start .*\n", said)


@pytest.mark.parametrize("given", [{}, WORLD, {"MASTER_ADDR": "h"}, {"MASTER_PORT": "tcp://10.0.0.1:80"}])
def test_the_variables_of_torchrun_are_taken(given, monkeypatch):
    set_launcher(monkeypatch, given)
    assert cli.parse(Config) == Config()


def set_launcher(monkeypatch, given: dict[str, str]) -> None:
    for name in WORLD:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["script.py"])
