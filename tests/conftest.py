"""Fixtures, created once per session: tiny random models in Hugging Face layout and a small counting data set."""

import atexit
import contextlib
import json
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parent.parent
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MKL_DYNAMIC"] = "FALSE"  # otherwise MKL's thread count, and thus the rounding, would vary with the load

os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp()  # for Arrow copies of Parquet files; deleted after the tests
atexit.register(shutil.rmtree, os.environ["HF_DATASETS_CACHE"], ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the slow tests")
    parser.addoption(
        "--elsewhere", action="store_true", help="run only what exports and prompts give in other programs"
    )


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Collect tests/elsewhere/, which needs environments of its own, with --elsewhere, and all other tests without."""
    is_elsewhere = pathlib.Path(__file__).parent / "elsewhere" in collection_path.parents
    return True if collection_path.is_file() and is_elsewhere != config.getoption("--elsewhere") else None


# They start first, the longest before the others, so that no worker is left alone with a long file.
LONG_FILES = [
    "test_service",
    "test_runs",
    "test_checkpoint",
    "test_sharding",
    "test_run_sh",
    "test_lora",
    "test_merge_lora",
    "test_faults",
    "test_turns",
    "test_scoring",
    "test_plugins",
    "test_examples",
]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (*LONG_FILES, item.path.stem).index(item.path.stem))
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run it with ./run.sh test --slow"))


@contextlib.contextmanager
def skipped_without_its_part() -> Iterator[None]:
    """Skip a test that asks for a part that has been deleted."""
    try:
        yield
    except ModuleNotFoundError as error:
        part = pathlib.Path(*(error.name or "").split(".")[:2])
        if part.parts[:1] != ("parts",) or (ROOT / part).exists() or (ROOT / part).with_suffix(".py").exists():
            raise
        pytest.skip(f"needs {part}, which is not here")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    with skipped_without_its_part():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[object]:
    with skipped_without_its_part():
        return (yield)


@pytest.fixture(scope="module", autouse=True)
def process_groups() -> Iterator[None]:
    """Leave the process groups of a file's runs, whose threads wake all the time, and forget the file's plugins."""
    yield
    if plugins := sys.modules.get("common.plugins"):
        plugins._modules.clear()
        plugins._digests.clear()
    torch = sys.modules.get("torch")  # tests of the service do not load it
    if torch and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    from tests.helpers import tiny

    return tiny.save_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def brief_model(tiny_model, tmp_path_factory) -> str:
    """The same model with 14 end tokens, so that its completions end early and differ in length."""
    folder = tmp_path_factory.mktemp("brief") / "model"
    shutil.copytree(tiny_model, folder)
    settings = json.loads((folder / "generation_config.json").read_text())
    settings["eos_token_id"] = [settings["eos_token_id"], *range(13)]
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return str(folder)


@pytest.fixture(scope="session")
def tiny_qwen3_vl(tmp_path_factory) -> str:
    from tests.helpers.models import save_tiny

    return save_tiny("qwen3_vl", tmp_path_factory.mktemp("tiny_qwen3_vl") / "model")


@pytest.fixture(scope="session")
def shapes(tmp_path_factory) -> str:
    """Twelve drawings, of 1 to 6 shapes each, beside a main.csv."""
    from tests.helpers.scripts import VECTORS

    folder = tmp_path_factory.mktemp("data") / "shapes"
    shutil.copytree(VECTORS / "shapes", folder)
    return str(folder)


@pytest.fixture(scope="session")
def transformers_5_base(tiny_model, tmp_path_factory) -> pathlib.Path:
    """Return a base whose image processor's settings are only in processor_config.json, as transformers 5 saves it."""
    base = tmp_path_factory.mktemp("v5") / "model"
    shutil.copytree(tiny_model, base)
    names = {"image_processor": "preprocessor_config.json", "video_processor": "video_preprocessor_config.json"}
    settings = {key: json.loads((base / name).read_text()) for key, name in names.items()}
    for name in names.values():
        (base / name).unlink()
    (base / "processor_config.json").write_text(json.dumps(settings | {"processor_class": "Qwen2_5_VLProcessor"}))
    return base


@pytest.fixture(scope="module")
def environments() -> Iterator[None]:
    """Add the environments of examples/zoom.py and tests/helpers/environments.py, and forget them afterwards."""
    from common import plugins
    from common.environments import ENVIRONMENTS
    from tests.helpers.scripts import ROOT

    if not (ROOT / "examples").is_dir():
        pytest.skip("needs examples/, which is not here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugins, "_modules", {})
        patch.setattr(plugins, "_digests", {})
        for file in ("examples/zoom.py", "tests/helpers/environments.py"):
            plugins.import_file(f"{ROOT}/{file}")
        yield
        ENVIRONMENTS.clear()


@pytest.fixture
def server():
    """Start a judge server whose replies the test sets."""
    from tests.helpers.judge_server import Server

    judge = Server()
    yield judge
    judge.server.should_exit = True


@pytest.fixture(scope="module")
def sft(tiny_model, tmp_path_factory) -> pathlib.Path:
    """Return an adapter for the tiny model, saved with PEFT."""
    from tests.helpers.adapters import make_sft_adapter

    return make_sft_adapter(tiny_model, tmp_path_factory.mktemp("sft") / "adapter")


@pytest.fixture(scope="module")
def prompt(tiny_model, shapes):
    """Return a prompt with an image."""
    from data import encode_prompts, load_processor, load_samples

    processor = load_processor(tiny_model, "count")
    return encode_prompts(load_samples(shapes, "count", processor=processor)[:1], processor)[0]
