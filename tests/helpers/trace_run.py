"""What a run costs its reader: the project's lines that it imports, and those that it executes.

    python tests/helpers/trace_run.py TRACE.json grpo.py --task vqa …    # run a script and write which lines ran
    python tests/helpers/trace_run.py TRACE.json                         # print the figures of a trace

*Executed*: lines within functions that ran, without signatures, docstrings and what is at the level of a module.
*Step*: the same within `train_step`, on its thread. *Imported*: all lines of the files of which a line ran. Files of
parts/ are counted apart.
"""

import ast
import json
import pathlib
import runpy
import sys
import threading
from collections import defaultdict
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
Lines = dict[str, list[int]]  # of each file, by its path in the project


def run(output: str, script: str, *arguments: str) -> None:
    """Run `script` and write the lines that ran, and those that ran within a step, to the JSON file `output`."""
    executed: dict[str, set[int]] = defaultdict(set)
    step: dict[str, set[int]] = defaultdict(set)
    in_step: list[int] = []  # the thread that is in `train_step`

    def trace(frame: Any, event: str, value: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(f"{ROOT}/") or "/.venv" in name:
            return None
        executed[name].add(frame.f_lineno)
        if in_step == [threading.get_ident()]:
            step[name].add(frame.f_lineno)
        return trace

    sys.path[0], sys.argv = str(ROOT), [script, *arguments]
    threading.settrace(trace)
    sys.settrace(trace)
    try:
        grpo = __import__("grpo")
        train_step = grpo.train_step

        def marked(*args: Any) -> Any:
            in_step.append(threading.get_ident())
            try:
                return train_step(*args)
            finally:
                in_step.clear()

        grpo.train_step = marked
        runpy.run_path(script, run_name="__main__")
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        found = {"executed": executed, "step": step}
        lines = {
            kind: {str(pathlib.Path(name).relative_to(ROOT)): sorted(own) for name, own in files.items()}
            for kind, files in found.items()
        }
        pathlib.Path(output).write_text(json.dumps(lines))


def body_lines(path: pathlib.Path) -> set[int]:
    """Return the lines of a file that are in the body of a function, without its docstring."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            lines |= set(range(body[0].lineno, node.end_lineno + 1)) if body else set()
    return lines


def in_functions(lines: Lines) -> Lines:
    """Return those of `lines` that are in the body of a function of the project, but not of the tests."""
    found = {}
    for name, own in lines.items():
        path = ROOT / name
        if path.suffix == ".py" and path.is_file() and not name.startswith("tests/"):
            found[name] = sorted(body_lines(path) & set(own))
    return {name: own for name, own in found.items() if own}


def figures(output: str) -> dict[str, int]:
    """Return what a run has cost, from the trace that `run` wrote to the file `output`."""
    trace = json.loads(pathlib.Path(output).read_text())
    files = [name for name in trace["executed"] if (ROOT / name).is_file() and not name.startswith("tests/")]
    found = {}
    for place, is_part in (("", False), ("parts ", True)):
        executed, step = (
            [own for name, own in in_functions(trace[kind]).items() if name.startswith("parts/") == is_part]
            for kind in ("executed", "step")
        )
        imported = [
            len((ROOT / name).read_text().splitlines()) for name in files if name.startswith("parts/") == is_part
        ]
        found |= {f"{place}executed": sum(map(len, executed)), f"{place}files": len(executed)}
        found |= {f"{place}step": sum(map(len, step)), f"{place}step files": len(step)}
        found |= {f"{place}imported": sum(imported), f"{place}imported files": len(imported)}
    return found


if __name__ == "__main__":
    if sys.argv[2:]:
        run(*sys.argv[1:])
    else:
        print(json.dumps(figures(sys.argv[1]), indent=1))
