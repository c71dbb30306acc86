"""The core is whole without parts, imports one only where it is asked for, and costs its reader no more than it did.

Guards against a core that needs what is optional, and against lines that a plain run executes for what is off.
"""

import ast
import hashlib
import json
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from common.files import read_jsonl
from tests.helpers import trace_run
from tests.helpers.scripts import ROOT, tracked_files

FOLDERS = ("parts", "apps", "lesson", "examples")  # without them, the core is whole
TRACKED = tracked_files()
CORE = [
    path
    for path in TRACKED
    if path.suffix == ".py" and path.relative_to(ROOT).parts[0] not in (*FOLDERS, "recipes", "tests")
]
PARTS = sorted(
    {path.relative_to(ROOT).parts[1].removesuffix(".py") for path in TRACKED if f"{ROOT}/parts/" in str(path)}
)
PARTS = [name for name in PARTS if name != "__init__"]
MOST_IMPORTS = 20  # of parts, in the whole core
FLAGS = "--task vqa --max_steps 2 --save_every 1 --prompts_per_step 4 --num_generations 4 --max_completion_length 16"
# What a plain run may cost its reader; see tests/helpers/trace_run.py. These figures only fall.
LIMITS = {"executed": 2152, "files": 44, "step": 796, "step files": 29, "imported": 9817}
WITH_PARTS = 2603  # lines that a run executes in the core and in parts that are always on
# How many lines of a step may name what is off in a plain run, each by its words. These figures only fall, to 5.
FEATURES = {
    "turns": (10, r"\benv\b|episode|trajector|turn_"),
    "teacher": (13, r"teacher"),
    "spans": (4, r"\bspans?\b"),
    "partial rollouts": (2, r"oversample|stale|continuation|in_flight"),
    "dynamic sampling": (2, r"dynamic|num_rounds"),
    "4-bit": (0, r"4bit|quant"),
    "experts": (0, r"expert|router"),
    "GDPO": (0, r"gdpo"),
    "overlong penalty": (5, r"overlong|\braw\b"),
}


@pytest.fixture(scope="module")
def rows(shapes, tmp_path_factory) -> pathlib.Path:
    """Write the drawings as plain rows."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    images = sorted(pathlib.Path(shapes, "images").iterdir())
    lines = [{"prompt": "<image>How many?", "answer": str(i % 6), "images": [str(p)]} for i, p in enumerate(images)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def plain_run(root: pathlib.Path, model: str, data: pathlib.Path, output: pathlib.Path, *flags: str) -> str:
    """Run grpo.py of the tree `root` with no option on, traced to `output`.json; return a hash of the final weights."""
    files = ["--model", model, "--data", str(data), "--output", str(output)]
    script = ["tests/helpers/trace_run.py", f"{output}.json", "grpo.py"]
    command = [sys.executable, *script, *FLAGS.split(), *files, *flags]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    output.with_suffix(".log").write_text(done.stderr)
    return hashlib.sha256((output / "final" / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def plain(tiny_model, rows, tmp_path_factory) -> tuple[str, pathlib.Path]:
    """Return the hash of a plain run's weights, and its trace."""
    output = tmp_path_factory.mktemp("plain") / "run"
    return plain_run(ROOT, tiny_model, rows, output, "--report_every", "0"), output.with_suffix(".json")


def copy_without(target: pathlib.Path, *names: str) -> pathlib.Path:
    """Copy what git tracks to `target`, without the files and folders `names`."""
    for path in TRACKED:
        place = str(path.relative_to(ROOT))
        if not any(place in (name, f"{name}.py") or place.startswith(f"{name}/") for name in names):
            (target / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target / place)
    return target


def run_tests(root: pathlib.Path, *flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *flags, "tests"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


# --- the rule ---------------------------------------------------------------------------------------------------------


def part_imports(path: pathlib.Path) -> list[tuple[int, bool]]:
    """Return the line of each import of a part in a file, and whether it has the form `from parts.NAME import …` within
    a function, or `extra("NAME")`."""
    tree, found = ast.parse(path.read_text()), []
    within = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "parts":
            found.append((node.lineno, node in within and "." in node.module))
        elif isinstance(node, ast.Import) and any(alias.name.split(".")[0] == "parts" for alias in node.names):
            found.append((node.lineno, False))
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "extra":
            found.append((node.lineno, node in within))
        elif isinstance(node, ast.Call) and node.args and str(getattr(node.args[0], "value", "")).startswith("parts."):
            found.append((node.lineno, False))
    return found


def test_the_core_imports_parts_only_where_they_are_asked_for():
    imports = {path: part_imports(path) for path in CORE}
    wrong = [
        f"{path.relative_to(ROOT)}:{line}" for path, own in imports.items() for line, is_lazy in own if not is_lazy
    ]
    assert not wrong, f"a part is imported as `from parts.NAME import …`, within a function: {wrong}"
    assert sum(map(len, imports.values())) <= MOST_IMPORTS


@pytest.mark.parametrize("part", PARTS)
def test_no_part_imports_another(part):
    files = [
        path
        for path in TRACKED
        if path.suffix == ".py" and f"{path}".startswith((f"{ROOT}/parts/{part}/", f"{ROOT}/parts/{part}.py"))
    ]
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            others = {name.split(".")[1] for name in names if name.startswith("parts.")} - {part}
            assert not others, f"{path.relative_to(ROOT)} imports the part {others}"


def test_what_a_deleted_part_leaves_in_its_folder_is_no_part(tmp_path):
    copy = copy_without(tmp_path / "copy", "parts/pages")
    (copy / "parts" / "pages" / "__pycache__").mkdir(parents=True)
    code = (
        "from common import cli, parts; print(parts.extra('pages'))\ndef main(_):\n    from parts.pages import Pages\n"
    )
    command = [sys.executable, "-c", f"{code}cli.run(main, None)"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "None\n") and "needs parts/pages, which is not here" in done.stderr


def test_a_missing_part_is_named_in_one_line(tmp_path):
    """What is missing within a part that is here, such as a package, is a traceback."""
    lines = "from common import cli\n\n\ndef main(_):\n    from {} import x\n\n\ncli.run(main, None)\n"
    missing = "parts/absent" if (ROOT / "parts").is_dir() else "parts"
    refusal = f"error: this needs {missing}, which is not here: restore it, or leave out what asks for it"
    for module, status, message in (
        ("parts.absent", 2, refusal),
        ("absent", 1, "ModuleNotFoundError: No module named 'absent'"),
    ):
        done = subprocess.run([sys.executable, "-c", lines.format(module)], cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stderr.splitlines()[-1]) == (status, message)


# --- what a plain run costs -------------------------------------------------------------------------------------------


def function_lengths(files: list[pathlib.Path]) -> list[int]:
    """Return the lengths in lines of all functions of `files`, with their docstrings, sorted."""
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return sorted(node.end_lineno - node.lineno + 1 for node in functions)


def test_the_functions_of_the_file_at_speed_are_as_short_as_those_of_the_core():
    lengths, core = function_lengths([ROOT / "lesson" / "grpo_at_speed.py"]), function_lengths(CORE)
    for share in (0.5, 0.9):
        assert lengths[int(share * len(lengths))] <= core[int(share * len(core))]


def test_a_plain_run_costs_its_reader_no_more_than_it_did(plain):
    got = trace_run.figures(str(plain[1]))
    assert {name: got[name] for name in LIMITS if got[name] > LIMITS[name]} == {}
    assert got["parts imported"] == 0, "a plain run without reports imports no part"


def test_what_is_off_executes_at_most_a_few_lines_of_a_step(plain):
    step = trace_run.in_functions(json.loads(plain[1].read_text())["step"])
    lines = [
        (f"{name}:{number}", text[number - 1])
        for name, own in step.items()
        for text in [(ROOT / name).read_text().splitlines()]
        for number in own
    ]
    named = {
        feature: [place for place, line in lines if re.search(words, line)] for feature, (_, words) in FEATURES.items()
    }
    assert {feature: own for feature, own in named.items() if len(own) > FEATURES[feature][0]} == {}


# --- what is optional can be deleted ----------------------------------------------------------------------------------


def test_the_core_trains_alone_to_the_same_weights(plain, tiny_model, rows, tmp_path):
    """Without its extras, too, which one line says."""
    copy = copy_without(tmp_path / "copy", *FOLDERS)
    assert plain_run(copy, tiny_model, rows, tmp_path / "run", "--report_every", "1") == plain[0]
    said = (tmp_path / "run.log").read_text()
    assert said.count("no pages: parts/pages is not here; metrics.jsonl has every step\n") == 1 and "index" not in said
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
    assert not list((tmp_path / "run").glob("*.html")) and not (tmp_path / "run" / "completions.jsonl").exists()
    command = [sys.executable, "grpo.py", "--task=vqa", f"--data={rows}", "--log_to=tensorboard"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    line = "error: this needs parts, which is not here: restore it, or leave out what asks for it\n"
    assert (done.returncode, done.stderr) == (2, line)


@pytest.mark.slow
def test_parts_that_are_always_on_win_nothing(tiny_model, rows, tmp_path):
    plain_run(ROOT, tiny_model, rows, tmp_path / "run")
    got = trace_run.figures(f"{tmp_path}/run.json")
    assert got["executed"] + got["parts executed"] <= WITH_PARTS


@pytest.mark.slow
def test_the_tests_of_the_core_pass_without_what_is_optional(tmp_path):
    done = run_tests(copy_without(tmp_path / "copy", *FOLDERS), "-n", "2", "--dist", "loadfile")
    assert done.returncode == 0, re.findall("^(?:FAILED|ERROR).*", done.stdout, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_the_other_tests_pass_without_a_part(part, tmp_path):
    done = run_tests(copy_without(tmp_path / "copy", f"parts/{part}"), "-n", "2", "--dist", "loadfile")
    assert done.returncode == 0, re.findall("^(?:FAILED|ERROR).*", done.stdout, re.MULTILINE)
