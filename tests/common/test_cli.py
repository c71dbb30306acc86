"""The command line: what is parsed, and what is answered in one line."""

import dataclasses
import re
import sys

import pytest

from common import cli, console


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
    assert capsys.readouterr().err == "error: --fast takes no value: write --fast or --no_fast\n"


def test_control_characters_are_not_printed(capsys):
    """A model, or a plugin, could otherwise act on the terminal. Lines, tabs and other scripts stay."""
    console.log("a\x1b[2J\r\x9b\udcff\nb\té\u200c")
    assert capsys.readouterr().err == "a\\x1b[2J\\r\\x9b\\udcff\nb\té\u200c\n"


def test_arguments_of_a_script():
    flags = {"steps": 3, "fast": True, "slow": False, "reward": ["a", "b"]}
    assert cli.as_arguments(flags) == ["--steps=3", "--fast", "--no_slow", "--reward=a", "--reward=b"]


WORLD = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h"}
WORLD |= {"MASTER_PORT": "29500"}
LEFT_OVER = [
    ({"RANK": "abc"}, "says RANK=abc, but RANK is not a number: start"),
    (WORLD | {"RANK": ""}, "but RANK is not set"),
    (WORLD | {"RANK": "-1"}, "but RANK is not a number"),
    (WORLD | {"WORLD_SIZE": "two"}, "but WORLD_SIZE is not a number"),
    ({"LOCAL_WORLD_SIZE": "2(x3)"}, "LOCAL_WORLD_SIZE=2(x3), but LOCAL_WORLD_SIZE is not a number"),
    (WORLD | {"LOCAL_RANK": "1.0"}, "but LOCAL_RANK is not a number"),
    (WORLD | {"MASTER_PORT": "tcp://10.0.0.1:80"}, "but MASTER_PORT is not a number"),
    ({"RANK": "0"}, "says RANK=0, but WORLD_SIZE is not set"),
    ({"WORLD_SIZE": "4"}, "says WORLD_SIZE=4, but RANK is not set"),
    ({"LOCAL_WORLD_SIZE": "8"}, "says LOCAL_WORLD_SIZE=8, but RANK is not set"),
    ({"LOCAL_RANK": "3", "MASTER_ADDR": "h"}, "says LOCAL_RANK=3, MASTER_ADDR=h, but RANK is not set"),
    ({"RANK": "0", "WORLD_SIZE": "1"}, "says RANK=0, WORLD_SIZE=1, but MASTER_ADDR is not set"),
    (WORLD | {"MASTER_PORT": ""}, "but MASTER_PORT is not set"),
    (WORLD | {"MASTER_PORT": "99999"}, "MASTER_PORT=99999, but they do not fit together"),
    (WORLD | {"RANK": "4"}, "says RANK=4, WORLD_SIZE=4, LOCAL_RANK=1, "),
    (WORLD | {"LOCAL_RANK": "2"}, "but they do not fit together"),
    (WORLD | {"LOCAL_WORLD_SIZE": "8"}, "but they do not fit together"),
    (WORLD | {"RANK": "0", "WORLD_SIZE": "0"}, "but they do not fit together"),
]


@pytest.mark.parametrize(("given", "message"), LEFT_OVER)
def test_variables_of_another_launcher_are_refused(given, message, monkeypatch, capsys):
    set_launcher(monkeypatch, given)
    with pytest.raises(SystemExit) as stopped:
        cli.parse(Config)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert re.fullmatch("error: the environment says .*: start the processes with torchrun, or unset .*\n", said)


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
