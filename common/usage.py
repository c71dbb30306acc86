"""What a script prints instead of doing its work: `--help` in sections, or our names for the flags of other libraries.

`cli.parse` imports this file only for these. The names that flags have in TRL, verl and EasyR1 are read from the table
of docs/peers.md.
"""

import dataclasses
import keyword
import os
import pathlib
import re
import sys
import typing
from typing import Annotated, Any

import docstring_parser
import tyro

from common import console

OTHERS = [("epsilon", "clip_low and --clip_high"), ("test_data", "eval_data")]  # looked up before the table of `PEERS`
PEERS = pathlib.Path(__file__).parent.parent / "docs" / "peers.md"
# The flags that most runs need, and those of what is in parts/. All others are in the sections of their classes.
COMMON = ["task", "model", "data", "eval_data", "reward", "lora_rank", "learning_rate"]
COMMON += ["max_completion_length", "max_steps", "output"]
OF_PARTS = ["env", "max_turns", "oversample", "max_staleness", "overlong_buffer", "report_every", "log_to"]
OF_PARTS += ["verifier_url", "verifier_model", "verifier_template", "verifier_timeout"]


def explain(config: type, arguments: list[str], status: object) -> None:
    """Print, on rank 0, `--help` of `config` if tyro has stopped with `status` 0, or else what to give for the flags
    of other libraries."""
    if not console.is_main():
        return
    if not status and {"-h", "--help"} & set(arguments):
        print_help(config)
    names = {field.name for field in dataclasses.fields(config)}
    for given in dict.fromkeys(argument.partition("=")[0] for argument in arguments if status):
        if flag := own_flag(given, names):
            print(f"error: {given} is no flag here: give --{flag}; see docs/peers.md", file=sys.stderr)


def print_help(config: type) -> None:
    """Print `--help` of `config` in sections, and end the script."""
    sections = dataclasses.make_dataclass("Sections", sections_of(config))
    sections.__doc__, options = config.__doc__, (tyro.conf.OmitArgPrefixes,)
    try:
        tyro.cli(sections, prog=os.path.relpath(sys.argv[0]), args=["--help"], use_underscores=True, config=options)
    except BrokenPipeError:  # of `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to be flushed at exit


def sections_of(config: type) -> list[tuple[str, type]]:
    """Return the sections of `--help`: a script's own flags, the common ones, those of each class, those of parts."""
    named = [("common", "The flags that most runs need.", COMMON)]
    for each in reversed(config.__mro__):
        text = "" if each.__doc__ == config.__doc__ else each.__doc__ or ""  # that one is above all sections
        named.append((title_of(each), text, list(vars(each).get("__annotations__", ()))))
    named += [("parts", "The flags of the optional code in parts/.", OF_PARTS)]
    named.sort(key=lambda section: section[0] != "main")
    left = {field.name: field for field in dataclasses.fields(config)}
    found: dict[str, tuple[str, dict]] = {}
    for title, text, names in named:
        own = [name for name in names if name in left and (name not in OF_PARTS or title == "parts")]
        if own:
            found.setdefault(title, (text, {}))[1].update({name: left.pop(name) for name in own})
    types, helps = typing.get_type_hints(config, include_extras=True), help_texts(config)
    sections = []
    for title, (text, fields) in found.items():
        hints = {name: Annotated[types[name], tyro.conf.arg(help=helps.get(name, ""))] for name in fields}
        members: dict[str, Any] = {"__doc__": text, "__dataclass_fields__": fields, "__annotations__": hints}
        sections.append((title, type(title, (config,), members)))
    return sections


def help_texts(config: type) -> dict[str, str]:
    """Return the docstring of each flag as one line. tyro itself would keep the line breaks of the source."""
    parsed = [docstring_parser.parse_from_object(each) for each in reversed(config.__mro__[:-1])]
    return {own.arg_name: " ".join((own.description or "").split()) for each in parsed for own in each.params}


def title_of(flags: type) -> str:
    """Return the title of the section with the flags that the class `flags` declares."""
    if flags.__name__ == "Config":
        return "main"
    name = flags.__name__.removesuffix("Flags").lower()
    return "plugin" if name in ("", flags.__name__.lower()) or keyword.iskeyword(name) else name


def own_flag(given: str, names: set[str]) -> str | None:
    """Return our flag, one of `names`, for the argument `given`, if that is a flag of another library; else None."""
    other = given.lstrip("-+").replace("-", "_")
    is_flag = given.startswith("--") or re.fullmatch(r"[+\w]+\.[\w.]+", given)  # verl's: actor.optim.lr=1e-6
    if not is_flag or other.removeprefix("no_") in names:
        return None
    fits = (flag for name, flag in peers() if f".{other}".endswith(f".{name}") or name.endswith(f".{other}"))
    return next((flag for flag in fits if flag.split()[0] in names), None)


def peers() -> list[tuple[str, str]]:
    """Return each flag of another library in the first table of docs/peers.md, with our flag for it."""
    text = PEERS.read_text(encoding="utf-8") if PEERS.is_file() else ""
    rows = [line.strip("| ").split(" | ") for line in text.partition("| here |")[2].partition("\n\n")[0].splitlines()]
    found = []
    for flags, *cells in rows[2:]:
        own = re.findall(r"`--([^`]+)`", flags)
        for cell in cells:
            theirs = re.findall(r"`([\w.]+)`", re.sub(r"\([^)]*\)", "", cell))  # in parentheses are defaults
            found += list(zip(theirs, own)) if len(own) > 1 else [(name, own[0]) for name in theirs]
    return [*OTHERS, *found]
