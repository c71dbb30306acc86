"""The code's imports point in one direction, and the documents name only things that exist."""

import ast
import dataclasses
import importlib.metadata
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import evaluate
import grpo
import merge_lora
import sft
from tests.helpers.marks import slow
from tests.helpers.scripts import ROOT, tracked_files
from tests.helpers.versions import normalise
from training import checkpoint

pytest.importorskip("apps", reason="checks the whole tree, and apps/ is not here")
pytest.importorskip("parts.pages", reason="checks the whole tree, and parts/pages is not here")

from apps import fits
from apps.demo import real, smoke, tiny, vlm, zoom
from apps.service import app
from lesson import grpo_at_speed, grpo_in_one_file
from parts import convert
from parts.pages import __main__ as pages
from recipes import click_rows

FRONT = ["grpo", "sft", "packing", "rollout", "rewards", "data", "config", "evaluate", "merge_lora"]
ROOMS = [
    "common",
    "inputs",
    "grading",
    "policy",
    "sampling",
    "evaluation",
    "training",
    "parts",
    *sorted(f"parts/{path.parent.name}" for path in ROOT.glob("parts/*/__init__.py")),
    "apps",
    "apps/service",
    "apps/demo",
]
# The lowest floor comes first. A module imports only from lower floors and from its own room.
FLOORS = [
    ["common"],
    ["config"],
    ["packing", "grading"],
    ["inputs"],
    ["policy"],
    ["rewards"],
    ["data"],
    ["sampling"],
    ["rollout"],
    ["evaluation"],
    ["training"],
    ["grpo", "evaluate", "merge_lora"],
    ["parts"],
    ["sft"],
    ["apps"],
    ["tests"],
]
COMMANDS = ("grpo", "sft", "evaluate", "merge_lora")  # no room imports them
CONFIGS = {
    "grpo.py": grpo.Config,
    "merge_lora.py": merge_lora.Config,
    "sft.py": sft.Config,
    "training.checkpoint": checkpoint.Config,
    "evaluate.py": evaluate.Config,
    "data.py": convert.Config,
    "data.py overlap": convert.OverlapFlags,
    "data.py show": convert.ShowFlags,
    "parts.pages": pages.Config,
    "apps.fits": fits.Config,
    "apps.demo.tiny": tiny.Config,
    "apps.demo.smoke": smoke.Config,
    "apps.demo.real": real.Config,
    "apps.demo.vlm": vlm.Config,
    "apps.demo.zoom": zoom.Config,
    "recipes.click_rows": click_rows.Config,
    "apps.service": app.Config,
}
TRACKED = tracked_files()  # a plugin of the user's may lie beside them
TOP_LEVEL = [path for path in TRACKED if path.parent == ROOT and path.suffix == ".py"]
SOURCES = sorted([*TOP_LEVEL, *(path for room in ROOMS for path in (ROOT / room).glob("*.py") if path in TRACKED)])
# docs/log.md is left out because it mentions files and flags that no longer exist
FRONT_DOCUMENTS = [ROOT / name for name in ("README.md", "README.zh.md", "CONTRIBUTING.md")]
PAGES = [*(ROOT / "docs").glob("*.md"), *(ROOT / "lesson").glob("*.md")]
DOCUMENTS = sorted([*FRONT_DOCUMENTS, *(path for path in PAGES if path.name != "log.md")])


def imports(path: pathlib.Path) -> set[str]:
    """Return the names of the project's modules that a file imports, as `room.module` or `module`.

    Left out are the core's imports of parts, the only ones that may point up; tests/test_parts.py checks them.
    """
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if (ROOT / (name.replace(".", "/") + ".py")).is_file() else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            found |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    known = {name for floor in FLOORS for name in floor}
    known -= set() if path.is_relative_to(ROOT / "parts") else {"parts"}
    return {name for name in found if name.split(".")[0] in known}


def test_the_top_level_holds_the_nine_files_that_tell_the_story():
    assert sorted(path.stem for path in TOP_LEVEL) == sorted(FRONT)
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py") if path in TRACKED}
    assert packages == {room.split("/")[0] for room in ROOMS} | {"tests"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path):
    floor_of = {name: floor for floor, names in enumerate(FLOORS) for name in names}
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    for name in imports(path):
        other = name.split(".")[0]
        if other != room:
            assert floor_of[other] < floor_of[room], (
                f"{path.relative_to(ROOT)} imports {name}, which is not on a lower floor"
            )
            may = other not in COMMANDS or room in ("sft", "apps")
            assert may, f"{path.relative_to(ROOT)} imports the command {name}"


def test_grpo_holds_the_algorithm_and_nothing_else():
    """It opens no file, handles no signal and starts no process; a reader gets through it, and a step fits a screen."""
    text = (ROOT / "grpo.py").read_text()
    tree = ast.parse(text)
    assert len(text.splitlines()) <= 300
    (step,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "train_step")
    assert step.end_lineno - step.lineno < 30
    allowed = {"config", "packing", "training.loop", "training.metrics", "training.run"}
    common = ("cli", "distillation", "distributed", "errors", "group_stats", "records", "spans")
    assert imports(ROOT / "grpo.py") == allowed | {f"common.{name}" for name in common}
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not names & {"open", "print", "exec", "eval"}
    modules = {node.names[0].name for node in ast.walk(tree) if isinstance(node, ast.Import)}
    assert modules == {"math", "torch"}
    verbs = re.findall(r"\bdistributed\.(\w+)", text)
    assert set(verbs) == {"all_sum", "world_size"}


def test_no_file_below_apps_names_a_bench():
    for path in SOURCES:
        if "apps" not in path.relative_to(ROOT).parts:
            assert not re.search(r"\bbench\b", path.read_text()), f"{path.relative_to(ROOT)} names a bench"


def test_training_knows_no_loss():
    words = re.compile(r"\b(LOSSES|batch_loss|objective|clip_low|clip_high|loss_type|dual_clip|beta)\b")
    for path in (ROOT / "training").glob("*.py"):
        code = [line for line in path.read_text().splitlines() if words.search(line)]
        assert path.name in ("run.py", "resume.py") or not code, f"{path.name}: {code}"


@pytest.mark.parametrize("room", ROOMS)
def test_no_circle_within_a_room(room):
    arrows = {f"{room.replace('/', '.')}.{path.stem}": imports(path) for path in (ROOT / room).glob("*.py")}
    while arrows:
        leaves = [name for name, targets in arrows.items() if not targets & arrows.keys() - {name}]
        assert leaves, f"circular imports among these modules: {sorted(arrows)}"
        for name in leaves:
            del arrows[name]


def test_the_readme_states_the_import_rule_that_is_checked():
    (rule,) = re.findall(r"^    common → .*?tests$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert [re.findall(r"\w+", floor) for floor in rule.split("→")] == FLOORS


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_has_a_sign_on_its_door(room):
    """Each room's docstring says in three to six lines what the room contains, what it may import and where to start
    reading. Every file that the docstring names exists."""
    text = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text()))
    assert 3 <= len([line for line in text.splitlines() if line]) <= 6
    assert "Imports" in text and "Start reading at `" in text
    for name in re.findall(r"`(\w+\.py)`", text):
        assert (ROOT / room / name).is_file() or (ROOT / name).is_file(), (
            f"the docstring of {room} names {name}, which does not exist"
        )


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_public_functions_say_what_they_are_for(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "the file must start with a docstring that says what the file is for"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_") and node.name != "main":
            assert ast.get_docstring(node), f"{node.name} has no docstring"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_arguments_are_named_where_they_are_passed(path):
    """No call unpacks a tuple, list or dict that the same function wrote out, and no statement holds two walruses."""
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        written_out = {
            target.id
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple | ast.List) and node.value.elts
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(function):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Call):
                splatted = {arg.value.id for arg in node.args if _is_splatted_name(arg)}
                assert not splatted & written_out, f"{where}: pass {splatted & written_out} one by one"
            elif isinstance(node, ast.stmt) and not isinstance(node, ast.FunctionDef | ast.ClassDef):
                heads = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
                walruses = [x for head in heads for x in ast.walk(head) if isinstance(x, ast.NamedExpr)]
                assert len(walruses) <= 1, f"{where}: two walruses in one statement"


def _is_splatted_name(arg: ast.expr) -> bool:
    return isinstance(arg, ast.Starred) and isinstance(arg.value, ast.Name)


def test_every_flag_is_explained():
    classes = [
        (path.name, node)
        for path in SOURCES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and re.fullmatch(r"Config|\w+Flags", node.name)
    ]
    assert len(classes) >= len(CONFIGS) + 4
    for script, node in classes:
        for field, after in zip(node.body, [*node.body[1:], None]):
            if isinstance(field, ast.AnnAssign):
                explained = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                assert explained, f"{script}: {field.target.id} has no docstring"


@pytest.mark.parametrize("script", ["merge_lora.py", *slow("-m training.checkpoint")])
def test_a_script_starts_by_itself_and_imports_nothing_it_does_not_need(script):
    """Run each script in a new interpreter, because other tests start only some of the scripts."""
    command = [sys.executable, "-X", "importtime", *script.split(), "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "usage: " in done.stdout
    said = done.stderr.splitlines()
    assert all(line.startswith("import time:") for line in said), "stderr contains more than the import times"
    assert not {line.split()[-1] for line in said} & {"pandas", "matplotlib"}


def test_the_service_imports_no_torch():
    code = "import sys, apps.service.app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


# --- documents --------------------------------------------------------------------------------------------------------


def test_the_readmes_map_is_the_tree():
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 200
    rows = re.findall(r"^\| ((?:`[\w/.]+`(?:, )?)+) \|", readme.partition("## The map")[2], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([\w/.]+)`", row)}
    folders = {path.relative_to(ROOT).parts[0] for path in TRACKED if path.parent != ROOT}
    folders = {f"{name}/" for name in folders if not name.startswith(".")}
    assert named == {f"{name}.py" for name in FRONT} | folders


def test_the_readme_shows_the_step_as_it_stands():
    code = (ROOT / "grpo.py").read_text()
    (step,) = (node for node in ast.parse(code).body if getattr(node, "name", "") == "train_step")
    source = ast.get_source_segment(code, step)
    for document in FRONT_DOCUMENTS[:2]:
        assert f"```python\n{source}\n```" in document.read_text(), document


def known_flags() -> set[str]:
    """Return the flags of the project's scripts and benchmarks, and those of other programs that the documents run."""
    configs = [*CONFIGS.values(), grpo_in_one_file.Settings, grpo_at_speed.Settings]
    known = {"solution"} | {field.name for config in configs for field in dataclasses.fields(config)}
    for path in (ROOT / "apps/bench").glob("*.py"):
        fields = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.AnnAssign)]
        known |= {field.target.id for field in fields if isinstance(field.target, ast.Name)}
    known |= {
        "help",
        "nproc_per_node",
        "max_restarts",
        "standalone",
        "requirement",
        "quiet",
        "check",
        "smoke",
        "port",
        "dest",
    }
    known |= {
        "nnodes",
        "rdzv_backend",
        "rdzv_endpoint",
        "rdzv_id",
        "rdzv_conf",
        "slow",
        "elsewhere",
        "vllm",
        "dist",
        "dest",
    }  # torchrun, pytest, pip
    known |= {"nodes", "signal", "requeue", "dependency", "time", "mem", "tag"}  # Slurm, Docker
    return known | {"tasks", "log_samples", "batch_size", "model_args"}  # lmms-eval


RECIPES = sorted((ROOT / "recipes").glob("*.*"))  # not __pycache__, which another process may make meanwhile


@pytest.mark.parametrize("path", [*DOCUMENTS, ROOT / "run.sh", *RECIPES], ids=lambda p: p.name)
def test_flags_that_are_named_exist(path):
    known = known_flags()
    for flag in re.findall(r"(?<![\w-])--([a-z]\w*)(?![\w*-])", path.read_text()):
        assert flag in known, f"{path.name} names --{flag}, which no script has"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_files_and_commands_that_are_named_exist(path):
    text = path.read_text()
    for target in re.findall(r"(?:\]\(|src=\")(?!https?:|#)([^)#\"]+)", text):
        assert (path.parent / target).exists(), f"{path.name} links to {target}, which does not exist"
    for name in re.findall(r"`([\w/]+\.(?:py|sh|md|txt))`", text):
        assert (ROOT / name).is_file() or list(ROOT.glob(f"*/{name}")), (
            f"{path.name} names {name}, which does not exist"
        )
    for script in re.findall(r"(?:python|torchrun[^`\n]*?|pytest(?: --slow)?) ((?:\w+/)*\w+\.py)\b", text):
        is_readers_own = f"# {script}, in the project's folder" in text
        assert is_readers_own or (ROOT / script).is_file(), f"{path.name} runs {script}, which does not exist"
    for module in re.findall(r"python -m ((?!torch|pytest|venv|pip)[\w.]+)", text):
        file = ROOT / module.replace(".", "/")
        assert file.with_suffix(".py").is_file() or (file / "__main__.py").is_file(), (
            f"{path.name} runs {module}, which does not exist"
        )


def commands(markdown: str) -> set[str]:
    """Return a document's commands: the lines of indented blocks, without comments, and the first cells of tables."""
    lines = re.findall(r"^    (.+)$", markdown, re.MULTILINE)
    cells = re.findall(r"^\| ((?:`[^`]+`(?:, )?)+) \|", markdown, re.MULTILINE)
    in_tables = {command for cell in cells for command in cell[1:-1].split("`, `")}
    return {line.partition("  #")[0].strip() for line in lines} | in_tables


def table_figures(markdown: str) -> set[tuple[str, ...]]:
    """Return the figures of each row of the tables, in order."""
    rows = [line for line in markdown.splitlines() if line.startswith("| ")]
    return {figures for row in rows if (figures := tuple(re.findall(r"\d+(?:\.\d+)*", row)))}


def test_the_chinese_readme_has_the_commands_and_figures_of_the_readme():
    english, chinese = (path.read_text() for path in FRONT_DOCUMENTS[:2])
    assert "(README.zh.md)" in english.splitlines()[0] and "(README.md)" in chinese
    first_half = english.partition("## The map")[0]
    assert len(commands(first_half)) >= 7 and len(table_figures(first_half)) >= 7
    assert commands(first_half) <= commands(chinese)
    assert table_figures(first_half) <= table_figures(chinese)
    assert table_figures(chinese) <= table_figures(english)
    assert all(command in english for command in commands(chinese))
    numbers = r"\d+(?:\.\d+)*"
    assert "0.9 M" in english and "约 90 万" in chinese  # Chinese counts in units of ten thousand
    assert set(re.findall(numbers, chinese.replace("约 90 万", ""))) <= set(re.findall(numbers, english))
    named = r"`(\./run\.sh[^`]*|runs/[^`]*|--\w+|export [^`]*|\{[^`]*)`"  # recipes, folders, flags and the example row
    assert set(re.findall(named, first_half.replace("\n", " "))) <= set(re.findall(named, chinese))


# --- licence, citation, workflow and image ----------------------------------------------------------------------------


def test_the_licence_and_the_citation_name_the_same_holder():
    licence, citation = (ROOT / "LICENSE").read_text(), yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert " ".join(licence.split()).startswith(
        "Apache License Version 2.0, January 2004 http://www.apache.org/licenses/"
    )
    assert "END OF TERMS AND CONDITIONS" in licence
    assert f"Copyright 2026 {citation['authors'][0]['name']}\n" in licence
    assert citation["cff-version"] == "1.2.0" and citation["license"] == "Apache-2.0" and citation["message"]


def test_the_workflow_runs_the_check_that_everyone_runs():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"]
    commands = []
    for job in jobs.values():
        checkout, python, check = job["steps"]
        assert re.fullmatch(r"actions/checkout@v\d+", checkout["uses"])
        assert re.fullmatch(r"actions/setup-python@v\d+", python["uses"])
        assert (ROOT / python["with"]["cache-dependency-path"]).is_file()
        commands.append(check["run"])
    assert jobs["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.12"]
    assert commands == [".ci/run", "./run.sh test --vllm"]
    assert "./run.sh test" in (ROOT / ".ci" / "run").read_text()


def test_the_image_pins_its_versions_and_is_the_one_that_kubernetes_runs():
    dockerfile, cluster = (ROOT / "Dockerfile").read_text(), (ROOT / "docs" / "cluster.md").read_text()
    lines = re.sub(r"\\\n", "", re.sub(r"(?m)^#.*\n", "", dockerfile)).splitlines()
    assert re.fullmatch(r"FROM nvidia/cuda:\d+\.\d+\.\d+-runtime-ubuntu24\.04", lines[0])
    (apt,) = [line for line in lines if "apt-get" in line]
    packages = re.search(r"--no-install-recommends +(.*?) +&&", apt)[1].split()
    assert packages and all(re.fullmatch(r"[\w.-]+=[\d.:]+-\*", package) for package in packages)
    assert apt.endswith("rm -rf /var/lib/apt/lists/*")
    (user,) = [line.removeprefix("USER ") for line in lines if line.startswith("USER")]
    assert "GPU=1" in next(line for line in lines if "./run.sh setup" in line)
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "runs"} <= set(ignored), "the image must not take this machine's environment or runs"
    job = yaml.safe_load(re.search(r"```yaml\n(.*?)```", cluster, re.DOTALL)[1])
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        pod = replica["template"]["spec"]
        assert pod["securityContext"] == {"runAsNonRoot": True, "fsGroup": int(user)}
        assert f"docker build --tag {pod['containers'][0]['image']} ." in cluster
        assert f"WORKDIR {pod['containers'][0]['workingDir']}" in lines


def requirements(file: str) -> dict[str, SpecifierSet]:
    """Return the versions that a file of requirements allows, by normalised name."""
    lines = [line for line in (ROOT / file).read_text().splitlines() if not line.startswith(("#", "-r "))]
    return {normalise(each.name): each.specifier for each in map(Requirement, lines)}


def test_requirements_are_pinned():
    for name in [path.name for path in ROOT.glob("requirements*.txt")]:
        for line in (ROOT / name).read_text().splitlines():
            pinned = re.fullmatch(r"[\w-]+(==[\w.]+|>=[\w.]+,<=[\w.]+)", line)
            assert line.startswith(("#", "-r ")) or pinned, line


def test_imported_packages_are_required():
    """Every package that the code imports is named, and not only installed because another package needs it."""
    named = {**requirements("requirements.txt"), **requirements("requirements-gpu.txt")}
    # used only where they are installed or fetched
    optional = {"trl", "verl", "wandb", "tensorboard", "trackio", "gguf"}
    own = {path.stem for path in ROOT.rglob("*.py")} | {path.name for path in ROOT.iterdir()}
    packages = {"PIL": "pillow", "yaml": "pyyaml", "fla": "flash-linear-attention"}
    packages |= {"flash_attn": "flash-attn-4"}
    for path in [*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "apps/bench").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) else []
            for module in {module.partition(".")[0] for module in modules} - sys.stdlib_module_names - own - optional:
                assert normalise(packages.get(module, module)) in named, f"{path.name} imports {module}"


def test_the_gpu_requirements_are_the_versions_that_ran():
    """The tests on a GPU recorded them. A version that vLLM's own requirements exclude is named in a comment."""
    recorded = json.loads((ROOT / "tests" / "vectors" / "gpu_versions.json").read_text())["packages"]
    pins, text = requirements("requirements-gpu.txt"), (ROOT / "requirements-gpu.txt").read_text()
    assert {"torch", "vllm", "triton"} <= pins.keys() & recorded.keys()
    for file in ("requirements.txt", "requirements-gpu.txt"):
        for name, allowed in requirements(file).items():
            ran = recorded.get(name)
            if ran is not None and f"{name} {ran}" not in text:
                assert ran in allowed, f"{file}: {name}{allowed}, but the GPU tests ran with {ran}"


def test_the_installed_packages_are_the_required_ones():
    for name, allowed in requirements("requirements.txt").items():
        assert importlib.metadata.version(name) in allowed, f"{name}{allowed}: run ./run.sh setup"
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_linter_before_a_commit_is_the_one_of_the_tests():
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert hook["repo"].endswith("/ruff-pre-commit")
    assert hook["rev"].replace("v", "==") == str(requirements("requirements.txt")["ruff"])
    assert [each["id"] for each in hook["hooks"]] == ["ruff-check", "ruff-format"]


def test_the_types_of_every_source_are_checked():
    files = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["files"]
    rooms = [room for room in ROOMS if room != "apps" and not room.startswith("parts/")]  # mypy finds folders itself
    assert sorted(files) == sorted(
        [*(path.name for path in TOP_LEVEL), *rooms, "apps/fits.py", "lesson/grpo_at_speed.py"]
    )


def test_the_newest_gpu_requirements_differ_only_in_what_they_are_for():
    core, newest = requirements("requirements.txt"), requirements("requirements-gpu-newest.txt")
    changed = {name for name, version in core.items() if newest.get(name) != version}
    assert changed == {"torch", "pillow", "playwright"}, "the last is for tests of pages"


@pytest.mark.slow
@pytest.mark.parametrize("file", ["requirements-gpu.txt", "requirements-gpu-newest.txt"])
@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_the_gpu_requirements_can_be_installed(python, file, tmp_path):
    """Resolve the requirements for a fresh environment. A new pip reads only the packages' metadata, in two minutes."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    pip = [tmp_path / "venv" / "bin" / "python", "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--upgrade", "pip"], capture_output=True, check=True)
    flags = ["--dry-run", "--use-feature=fast-deps", "--only-binary=:all:", f"--python-version={python}"]
    command = [*pip, *flags, f"--target={tmp_path}/none", "-r", file]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_speeds_in_the_documents_are_those_of_the_results():
    """The step times and the comparison in the documents match the newest results of one GPU that contain them."""
    speed, readme = (ROOT / "docs" / "speed.md").read_text(), (ROOT / "README.md").read_text()
    results = [json.loads(path.read_text()) for path in sorted((ROOT / "docs" / "results").glob("speed-*.json"))]
    w1 = [r["workloads"]["W1"] for r in results if "W1" in r["workloads"] and r.get("gpus", 1) == 1][-1]
    others = [r["workloads"] for r in results if len(r["workloads"]) == 4][-1]
    measured = [w1], [work for name, work in others.items() if name != "W1"]
    rows = re.findall(r"^\| \*\*step\*\* (.*)$", speed, re.MULTILINE)
    for row, workloads in zip(rows[:2], measured, strict=True):
        assert re.findall(r"\*\*([\d.]+)\*\*", row) == [f"{work['step_time']:.1f}" for work in workloads]
    for phase in ("rollout", "reference", "train"):
        assert f"| {w1[f'time/{phase}']:.2f} |" in speed
    assert f"{w1['memory_gib']:.1f} GiB" in speed
    newest = max((ROOT / "docs" / "results").glob("peers-*.json"))
    rivals = [rival for rival in json.loads(newest.read_text()).values() if "steps" in rival]
    for rival in rivals:  # TRL's first step includes a warm-up, and its own timer leaves out the rows
        ours = statistics.mean(rival["ours"])
        seconds = rival["own_timer"][-1] if "own_timer" in rival else statistics.mean(rival["steps"])
        assert f"{ours:.1f} s against {seconds:.1f} s" in " ".join(readme.split())
        assert f"**{ours:.1f}**" in rows[2] and f"**{seconds:.1f}**" in rows[2]
        for text in (speed, readme):
            assert f"**{seconds / ours:.1f} times**" in text
    steps = [seconds for rival in rivals for seconds in rival["steps"] + rival.get("own_timer", [])[-1:]]
    for seconds in steps:
        assert f"{seconds:.1f}" in speed
