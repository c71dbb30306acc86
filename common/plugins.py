"""Plugins: Python files of the user that `--plugin FILE` imports before the flags are parsed (docs/plugins.md).

A plugin adds entries to tables of the modules that it imports, such as `rewards.TASKS`, and may have flags of its own,
in a dataclass named `Flags`. parts/plugins.py adds these and checks the entries.
"""

import argparse
import dataclasses
import hashlib
import importlib.util
import json
import os
import pathlib
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from common import console
from common.errors import UserError, describe

_modules: dict[str, ModuleType] = {}  # the user's files that this process has imported, by path
_digests: dict[str, str] = {}  # their SHA-256


def find(arguments: list[str], output: str) -> list[str]:
    """Return the files of `--plugin` or, without any, those of the run to resume. `output`: default of `--output`."""
    if not {"--plugin", "--resume"} & {argument.partition("=")[0] for argument in arguments}:
        return []
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--plugin", nargs="?", action="append", default=[])
    parser.add_argument("--resume", nargs="?", const="newest")
    parser.add_argument("--output", nargs="?", default=output)
    given, _ = parser.parse_known_args(arguments)
    folder = given.output if given.resume in ("newest", "auto") else pathlib.Path(given.resume or "").parent
    recorded = of_run(folder or "") if given.resume else []
    return [file for file in given.plugin if file] or recorded


def of_run(folder: str | pathlib.Path) -> list[str]:
    """Return the plugins that the run in `folder` has recorded, and print which of them have changed since."""
    path = pathlib.Path(folder, "config.json")
    recorded = (path.is_file() and read_settings(path, plugin_sha256=dict | None).get("plugin_sha256")) or {}
    for file, digest in recorded.items():
        if os.path.isfile(file) and hashlib.sha256(pathlib.Path(file).read_bytes()).hexdigest() != digest:
            console.log(f"note: the plugin {file} has changed since it was recorded in {path}")
    return list(recorded)


def read_settings(path: pathlib.Path, **types: Any) -> dict[str, Any]:
    """Return the config.json of a run. Raises UserError if it is damaged, or an entry is not of its type in `types`."""
    try:
        settings = json.loads(path.read_text())
        is_one = isinstance(settings, dict) and all(isinstance(settings.get(name), types[name]) for name in types)
    except (OSError, ValueError, RecursionError):
        is_one = False
    if not is_one:
        raise UserError(f"{path} cannot be read: restore it, or use a new --output without --resume")
    return settings


def load(file: str) -> ModuleType:
    """Import a plugin. Raises UserError, with the line and the exception, if that fails."""
    path = os.path.realpath(file)
    if path in _modules:
        raise UserError(f"--plugin {file} is given twice: leave one out")
    if not (path.endswith(".py") and os.path.isfile(path)):
        raise UserError(f"--plugin {file}: there is no such Python file: restore it or give another path")
    try:
        return import_file(path)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - importing the file may raise anything
        raise mistake(file, error) from None


def mistake(file: str, error: BaseException) -> UserError:
    """Return a UserError that names the plugin `file`, its line and the exception."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == os.path.realpath(file)]
    line = lines[-1] if lines else getattr(error, "lineno", None)
    return UserError(f"--plugin {file}{f', line {line}' if line else ''}: {describe(error)}")


def import_file(file: str) -> ModuleType:
    """Import a Python file of the user, once, and return its module. The file may import its neighbours."""
    path, folder = os.path.realpath(file), os.path.dirname(os.path.realpath(file))
    if path not in _modules:
        digest = hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
        spec = importlib.util.spec_from_file_location(f"user{len(_modules)}_{pathlib.Path(path).stem}", path)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        sys.path.insert(1, folder)  # behind the project's folder, whose modules no neighbour may hide
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(folder)
        _modules[path], _digests[path] = module, digest
    return _modules[path]


def record() -> dict[str, Any]:
    """Return what `config.json` keeps of the plugins: the SHA-256 of each, by path, and the names of their flags."""
    flags = [dataclasses.fields(plugin.Flags) for plugin in _modules.values() if getattr(plugin, "Flags", None)]
    return {"plugin_sha256": dict(_digests), "plugin_flags": [field.name for each in flags for field in each]}


def name_of(function: Callable) -> str | None:
    """Return "file.py:name" for a function that is a global name of a plugin; None for any other function."""
    names = [f"{path}:{name}" for path in _modules for name, value in vars(_modules[path]).items() if value is function]
    return names[0] if names else None
