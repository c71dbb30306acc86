"""The command line: what is parsed, and what is answered in one line."""

import dataclasses
import sys

import pytest

from common import cli


@dataclasses.dataclass
class Config:
    """A script."""

    fast: bool = False
    """First line,
    and (second) line."""
    steps: int = 1
    """A number."""


@pytest.mark.parametrize("given", [["--fast", "true"], ["--fast=False"], ["--fast=TRUE"]])
def test_a_switch_with_a_value_is_refused(given, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["script.py", *given])
    with pytest.raises(SystemExit) as stopped:
        cli.parse(Config)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "error: --fast takes no value: write --fast or --no_fast\n"


def test_help_joins_the_lines_of_a_flag(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["script.py", "--help"])
    with pytest.raises(SystemExit):
        cli.parse(Config)
    assert "First line, and (second) line." in capsys.readouterr().out


def test_arguments_of_a_script():
    flags = {"steps": 3, "fast": True, "slow": False, "reward": ["a", "b"]}
    assert cli.as_arguments(flags) == ["--steps=3", "--fast", "--reward=a", "--reward=b"]
