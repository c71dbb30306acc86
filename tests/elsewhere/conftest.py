"""Fixtures: bases, trained models and what other environments read in them, made once for the selected tests."""

import json
import os
import pathlib
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch

from tests.elsewhere.cases import (
    ADAPTERS,
    BASES,
    MADE_BY,
    TIED,
    VARIANTS,
    expected_file,
    folder_of,
    inputs_file,
    read_file,
)
from tests.helpers.scripts import ROOT, run_script

WORK = ROOT / "runs" / "elsewhere"
ENVIRONMENTS = {place: ROOT / f".venv-{place}" for place in ("elsewhere", "newest")}
TOKENIZERS = ENVIRONMENTS["elsewhere"] / "tokenizers"  # from npm; run.sh puts them there
PROCESSES = 2


def run_in(place: str, module: str, *arguments: object) -> None:
    """Run one of the scripts in an environment other than the project's own; raise RuntimeError if it fails."""
    command = [ENVIRONMENTS[place] / "bin" / "python", "-m", f"tests.elsewhere.{module}", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{module} in {place}: {done.stderr[-3000:]}")


@pytest.fixture(scope="session")
def work() -> pathlib.Path:
    """Return the folder of everything that is made, empty at first."""
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    return WORK


@pytest.fixture(scope="session")
def bases(work, request) -> list[str]:
    """Make the bases that the selected tests need, and return their names."""
    called = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    names = [name for name in BASES if name in {params.get("name") for params in called}]
    for place in ENVIRONMENTS:
        here = [name for name in names if BASES[name].made_in == place]
        if here:
            run_in(place, "bases", TOKENIZERS, work / "bases", *here)
    return names


@dataclass
class Results:
    """What was trained, and what was read of it."""

    work: pathlib.Path
    errors: dict[tuple[str, str], str] = field(default_factory=dict)  # of (base, variant), where training failed

    def read(self, place: str, name: str, variant: str) -> dict:
        """Return what `read.py` wrote about a folder."""
        training = MADE_BY.get(variant, variant)
        error = self.errors.get((name, "base")) or self.errors.get((name, training))
        assert error is None, f"{training} of {name} failed: {error}"
        return torch.load(read_file(self.work, place, name, variant), weights_only=False)

    def expected(self, name: str, variant: str) -> dict[str, torch.Tensor]:
        """Return the logits of the trained weights, taken in memory."""
        return torch.load(expected_file(self.work, name, variant))


@pytest.fixture(scope="session")
def results(work, bases) -> Results:
    """Train the bases, merge the adapters, and read everything in both environments."""
    results = Results(work)

    def make(case: tuple[str, str]) -> None:
        name, variant = case
        if (name, "base") not in results.errors:
            done = run_script("-m", "tests.elsewhere.train", work, name, variant)
            if done.returncode:
                results.errors[case] = done.stderr[-3000:]

    with ThreadPoolExecutor(PROCESSES) as pool:
        list(pool.map(make, [(name, "base") for name in bases]))
        if tied := [name for name in bases if name in TIED]:
            run_in("elsewhere", "untying", work, *tied)
        rest = [(name, variant) for name in bases for variant in VARIANTS[name] if variant not in ("base", *MADE_BY)]
        list(pool.map(make, rest))
        list(pool.map(lambda place: read_all(place, work, bases), ENVIRONMENTS))
    return results


def read_all(place: str, work: pathlib.Path, bases: list[str]) -> None:
    """Read everything that was made of `bases` in one call of `read.py`."""
    jobs = []
    for name in bases:
        for variant in VARIANTS[name]:
            folder = folder_of(work, name, variant)
            if place in BASES[name].places and folder.is_dir() and inputs_file(work, name).is_file():
                job = {"folder": str(folder), "inputs": str(inputs_file(work, name))}
                job["base"] = str(folder_of(work, name, "base")) if variant in ADAPTERS else None
                jobs.append(job | {"output": str(read_file(work, place, name, variant))})
    (work / f"{place}.json").write_text(json.dumps(jobs))
    run_in(place, "read", work / f"{place}.json")
