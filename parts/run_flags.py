"""Print, one per line, the flags with which evaluate.py scores a trained run. `./run.sh eval RUN` calls this module.

    python -m parts.run_flags runs/vqa --benchmark mmstar

The arguments are the run's folder and the user's own flags for evaluate.py. run.sh puts those after the printed flags.
"""

import pathlib
import sys
from dataclasses import fields
from typing import Any

from common import cli, plugins
from config import DataFlags, EngineFlags, RewardFlags, RunFlags

SHARED = [field for flags in (DataFlags, EngineFlags, RewardFlags) for field in fields(flags) if field.name != "data"]
# How rows are read and scored, which a benchmark decides itself.
TASK_FLAGS = ("image_dir", "columns", "template", "reward")


def run_flags(run: pathlib.Path, given: set[str]) -> dict[str, Any]:
    """Return the flags that score the trained model in `run` against its base model.

    `given`: the names of the user's own flags. Without --benchmark, the task is the run's, and without --data, the rows
    are the run's held-out rows. Exits with a one-line error if `run` holds no trained model or if there are no rows.
    """
    if not ((run / "final").is_dir() and (run / "config.json").is_file()):
        sys.exit(f"error: {str(run)!r} holds no trained model: give the folder of a finished run (grpo.py --output)")
    types = {"model": str, "task": str, "max_completion_length": int | str, "eval_data": str | None}
    config = plugins.read_settings(run / "config.json", **types, plugin_flags=list | None)
    flags = {"model": f"{run}/final", "baseline": config["model"]}
    if (run / "final" / "adapter_config.json").is_file():
        flags = {"model": config["model"], "baseline": config.get("adapter") or config["model"]}
        flags["adapter"] = f"{run}/final"
    if "--benchmark" not in given:
        if "--data" not in given:
            flags["data"] = config.get("eval_data")
            if not flags["data"] or RunFlags(eval_data=flags["data"]).eval_fraction:
                sys.exit("error: the run has no eval_data, or only a fraction: add --data FILE or --benchmark NAME")
        flags["task"] = config["task"]
    ignored = TASK_FLAGS if "--benchmark" in given else ()
    for field in SHARED:
        value = config.get(field.name, field.default)
        if value not in (field.default, []) and field.name not in ignored:  # JSON turns an empty tuple into []
            flags[field.name] = value
    if flags.get("engine") == "policy":  # for training only
        del flags["engine"]
    names = [str(name) for name in config.get("plugin_flags") or [] if "--plugin" not in given]
    own = {name: config[name] for name in names if name in config}
    flags |= {name: value for name, value in own.items() if not isinstance(value, list)}  # append or not: unknown here
    return flags | {"max_completion_length": config["max_completion_length"]}


def main(run: str, *user_flags: str) -> None:
    given = {flag.partition("=")[0] for flag in user_flags}
    flags = run_flags(pathlib.Path(run), given)
    plugins.of_run(run)  # prints which have changed
    if "--plugin" in given:
        flags.pop("plugin", None)
    print(*cli.as_arguments(flags), sep="\n")


if __name__ == "__main__":
    cli.run(lambda arguments: main(*arguments), sys.argv[1:])
