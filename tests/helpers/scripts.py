"""Run the project's scripts as a user would: in one process, in several processes, or on several simulated machines."""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).parent.parent.parent
VECTORS = ROOT / "tests" / "vectors"
# what a run imports, also what it imports late
PRELOADED = ["grpo", "evaluate", "merge_lora", "torch.distributed.run", "matplotlib.pyplot"]
PRELOADED += ["parts.pages", "parts.benchmarks", "parts.math.reward", "parts.workers"]
PRELOADED += [f"transformers.models.{name}" for name in ("auto.processing_auto", "qwen2_5_vl.modeling_qwen2_5_vl")]
# Starting a process also asks for the status of all others. If two threads ask for the same one, both read the same
# pipe, and one of them takes its end for status 255.
_children_lock = threading.Lock()


class Script:
    """A project script in a process of its own, for `with`: leaving the block kills it and all that it has started.

    The process is forked from one that has already imported everything, which saves five seconds per start.
    """

    def __init__(self, *args: object, env: dict[str, str] | None = None):
        forks = multiprocessing.get_context("forkserver")
        forks.set_forkserver_preload(PRELOADED)
        self.out, self.err = (tempfile.NamedTemporaryFile("r") for _ in range(2))  # noqa: SIM115 - closed with the object
        environment = {"OMP_NUM_THREADS": "1"} | dict(os.environ if env is None else env)
        arguments = ([*map(str, args)], self.out.name, self.err.name, environment)
        self.process = forks.Process(target=_as_script, args=arguments)
        with _children_lock:
            self.process.start()
        self.pid = self.process.pid

    def __enter__(self) -> "Script":
        return self

    def __exit__(self, *_) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._status()

    def _status(self) -> int | None:
        with _children_lock:
            self.process.join()
        return self.process.exitcode

    def has_ended(self) -> bool:
        return bool(multiprocessing.connection.wait([self.process.sentinel], timeout=0))

    def wait(self, timeout: float) -> tuple[int, str]:
        """Return the status and the standard error. Raises TimeoutError after `timeout` seconds."""
        if not multiprocessing.connection.wait([self.process.sentinel], timeout):
            raise TimeoutError(f"still running after {timeout} s: {self.stderr()[-3000:]}")
        return self._status(), self.stderr()

    def stderr(self) -> str:
        """Return everything that has been written to the standard error so far."""
        self.err.seek(0)
        return self.err.read()


def tracked_files() -> set[pathlib.Path]:
    """Return the project's files: those that git tracks or, in a copy without git, all."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = done.stdout.split("\0")[:-1] or [str(path.relative_to(ROOT)) for path in ROOT.rglob("*")]
    return {
        ROOT / name for name in names if (ROOT / name).is_file() and not re.search("^.venv|^runs/|__pycache__", name)
    }


def torchrun(*flags: str) -> list[str]:
    """Return the arguments with which `Script` runs torchrun. It forks its workers instead of starting them anew."""
    return ["-m", "torch.distributed.run", "--run_path", "--start_method=fork", *flags]


def run_script(*args: object, processes: int = 0, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """Run a project script in `processes` processes, as a launcher would. If `processes` is 0, use no launcher.

    The return code is the first non-zero status, or 0.
    """
    world = {"WORLD_SIZE": f"{processes}", "LOCAL_WORLD_SIZE": f"{processes}"}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port()}"}
    rank_variables = [world | {"RANK": f"{i}", "LOCAL_RANK": f"{i}"} for i in range(processes)] or [{}]
    environment = dict(os.environ if env is None else env)
    with contextlib.ExitStack() as stack:
        scripts = [stack.enter_context(Script(*args, env=environment | variables)) for variables in rank_variables]
        status = _first_status(scripts)
        out, err = ("".join(stream.read() for stream in streams) for streams in zip(*((s.out, s.err) for s in scripts)))
        return subprocess.CompletedProcess(args, status, out, err)


def _first_status(scripts: list[Script], timeout: float = 300) -> int:
    """Wait until all scripts have ended and return the first non-zero status, or 0.

    If a script fails, the others have 30 seconds to end. Raises TimeoutError if no script has failed but some are still
    running after `timeout` seconds.
    """
    running, status, deadline = {each.process.sentinel: each for each in scripts}, 0, time.monotonic() + timeout
    while running and time.monotonic() < deadline:
        for sentinel in multiprocessing.connection.wait(running, deadline - time.monotonic()):
            ended = running.pop(sentinel)._status()
            if ended and not status:
                status, deadline = ended, time.monotonic() + 30
    if running and not status:
        raise TimeoutError(f"still running after {timeout} s")
    return status


def _as_script(args: list[str], out: str, err: str, environment: dict[str, str]) -> None:
    """Make this forked process behave as if it had been started with the command line `args`."""
    os.setsid()  # so that `Script` can kill it with its children
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(environment)
    sys.modules["torch"].set_num_threads(int(environment["OMP_NUM_THREADS"]))
    os.chdir(ROOT)
    if args[0] == "-m":
        sys.argv = args[1:]
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = args
        sys.path.insert(0, str((ROOT / args[0]).parent))
        runpy.run_path(args[0], run_name="__main__")


def on_machine(number: int, port: int, *args: str, processes: int = 2) -> Script:
    """Start a script on one of two simulated machines. Each machine is a torchrun, connected over loopback."""
    flags = ["--nnodes=2", f"--nproc_per_node={processes}", "--max_restarts=3", "--rdzv_backend=c10d"]
    flags += [f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=test"]
    flags += [f"--rdzv_conf=is_host={int(number == 0)},keep_alive_interval=1,keep_alive_max_attempt=3"]
    return Script(*torchrun(*flags), *args, env=os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_on_machines(*args: str) -> None:
    """Run a script on two simulated machines with two processes each, and check that it succeeds."""
    port = free_port()
    with on_machine(0, port, *args) as first, on_machine(1, port, *args) as second:
        check_success(first, second)


def check_success(*scripts: Script) -> None:
    """Wait for the scripts and check that all of them end with status 0."""
    for script in scripts:
        status, stderr = script.wait(300)
        assert status == 0, stderr[-3000:]
