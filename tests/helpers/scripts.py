"""Run the project's scripts as a user would: in one process, in several processes, or on several simulated machines."""

import multiprocessing
import multiprocessing.connection
import os
import pathlib
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).parent.parent.parent
VECTORS = ROOT / "tests" / "vectors"
# Starting a process also asks for the status of all others. If two threads ask for the same one, both read the same
# pipe, and one of them takes its end for status 255.
_children_lock = threading.Lock()


def run_script(*args: object, processes: int = 0, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """Run a project script in `processes` processes, as a launcher would. If `processes` is 0, use no launcher.

    The return code is the first non-zero status, or 0. The processes are forked from a process that has already
    imported everything, which saves three seconds per start.
    """
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["grpo", "evaluate", "merge_lora"])
    world = {"WORLD_SIZE": f"{processes}", "LOCAL_WORLD_SIZE": f"{processes}", "OMP_NUM_THREADS": "1"}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port()}"}
    rank_variables = [world | {"RANK": f"{i}", "LOCAL_RANK": f"{i}"} for i in range(processes)] or [{}]
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        started = []
        try:
            for variables in rank_variables:
                environment = (os.environ if env is None else env) | variables
                process = forks.Process(target=_as_script, args=([*map(str, args)], out.name, err.name, environment))
                with _children_lock:
                    process.start()
                started.append(process)
            status = _first_status(started)
        finally:
            for process in started:
                with _children_lock:
                    process.kill()
                    process.join()
        return subprocess.CompletedProcess(args, status, out.read(), err.read())


def _first_status(started: list, timeout: float = 300) -> int:
    """Wait until all processes have ended and return the first non-zero status, or 0.

    If a process fails, the other processes have 30 seconds to end. Raises TimeoutError if no process has failed but
    some processes are still running after `timeout` seconds.
    """
    running, status, deadline = {process.sentinel: process for process in started}, 0, time.monotonic() + timeout
    while running and time.monotonic() < deadline:
        for sentinel in multiprocessing.connection.wait(running, deadline - time.monotonic()):
            process = running.pop(sentinel)
            with _children_lock:
                process.join()
            if process.exitcode and not status:
                status, deadline = process.exitcode, time.monotonic() + 30
    if running and not status:
        raise TimeoutError(f"still running after {timeout} s")
    return status


def _as_script(args: list[str], out: str, err: str, environment: dict[str, str]) -> None:
    """Make this forked process behave as if it had been started with the command line `args`."""
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(environment)
    if "OMP_NUM_THREADS" in environment:
        sys.modules["torch"].set_num_threads(int(environment["OMP_NUM_THREADS"]))
    os.chdir(ROOT)
    if args[0] == "-m":
        sys.argv = args[1:]
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = args
        sys.path.insert(0, str((ROOT / args[0]).parent))
        runpy.run_path(args[0], run_name="__main__")


def on_machine(number: int, port: int, *args: str, machines: int = 2, processes: int = 2, **kwargs) -> subprocess.Popen:
    """Start a script on one of several simulated machines. Each machine is a torchrun, connected over loopback."""
    launcher = [f"--nnodes={machines}", f"--nproc_per_node={processes}", "--max_restarts=3", "--rdzv_backend=c10d"]
    launcher += [f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=test"]
    launcher += [f"--rdzv_conf=is_host={int(number == 0)},keep_alive_interval=1,keep_alive_max_attempt=3"]
    command = [sys.executable, "-m", "torch.distributed.run", *launcher, "--", *map(str, args)]
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    options = dict(cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment) | kwargs
    return subprocess.Popen(command, **options)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_on_machines(*args: str, machines: int = 2, processes: int = 2) -> None:
    """Run a script on all simulated machines and check that it succeeds."""
    port = free_port()
    end_well([on_machine(i, port, *args, machines=machines, processes=processes) for i in range(machines)])


def end_well(started: list[subprocess.Popen]) -> None:
    """Wait for processes started by `on_machine` and check that all of them end with status 0."""
    try:
        for process in started:
            stderr = process.communicate(timeout=300)[1]
            assert process.returncode == 0, stderr[-3000:]
    finally:
        for process in started:
            process.kill()
