"""Fixtures: a tiny random Qwen2.5-VL in Hugging Face layout and a small counting data set, made once a session."""

import atexit
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile

import pytest

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MKL_DYNAMIC"] = "FALSE"  # a busy machine must not change the number of threads, and with it the last bits

os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp()  # parquet files as Arrow tables; gone with the tests
atexit.register(shutil.rmtree, os.environ["HF_DATASETS_CACHE"], ignore_errors=True)

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    import tiny

    folder = tmp_path_factory.mktemp("tiny") / "model"
    tokenizer = tiny.byte_tokenizer()
    tiny.save(tiny.build_model(tokenizer, seed=0), tokenizer, folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_qwen3_vl(tmp_path_factory) -> str:
    import models
    import torch

    import tiny

    folder = tmp_path_factory.mktemp("tiny_qwen3_vl") / "model"
    tokenizer = tiny.byte_tokenizer()
    names = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    names |= {"vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
    tokens = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    torch.manual_seed(0)
    tiny.save(models.qwen3_vl(len(tokenizer), tokens), tokenizer, folder)
    return str(folder)


@pytest.fixture(scope="session")
def shapes(tmp_path_factory) -> str:
    import tiny

    folder = tmp_path_factory.mktemp("data") / "shapes"
    tiny.write_shapes(folder, 12, [0, 0])
    return str(folder)


@pytest.fixture
def server():
    """A server that judges as the test says."""
    from judge_server import Server

    made = Server()
    yield made
    made.server.should_exit = True


def run_script(*args: str, processes: int = 0, **kwargs) -> subprocess.CompletedProcess:
    """Run a script of the project as a user would; with `processes` through torchrun."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", "--"] if processes else []
    )
    command = [sys.executable, *launcher, *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False, **kwargs)


def run_on_machines(*args: str, machines: int = 2, processes: int = 2, **kwargs) -> list[subprocess.CompletedProcess]:
    """The same script on several «machines», each a torchrun of its own, joined over loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = [
        f"--nnodes={machines}",
        f"--nproc_per_node={processes}",
        "--master_addr=127.0.0.1",
        f"--master_port={port}",
    ]
    command = [sys.executable, "-m", "torch.distributed.run", *place]
    options = dict(cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) | kwargs
    commands = [[*command, f"--node_rank={i}", "--", *map(str, args)] for i in range(machines)]
    started = [subprocess.Popen(command, **options) for command in commands]
    try:
        outputs = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    return [subprocess.CompletedProcess(c, p.returncode, *out) for c, p, out in zip(commands, started, outputs)]
