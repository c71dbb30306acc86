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
    assert "Unrecognized options: " + given[-1].removeprefix("--fast=") in "".join(capsys.readouterr())


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
