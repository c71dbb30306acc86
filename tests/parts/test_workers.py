"""Functions in processes of their own: a call that hangs, dies or damages its pipe ends alone."""

import os
import re
import subprocess
import sys
import time

import pytest

pytest.importorskip("parts.workers", reason="needs parts/workers.py, which is not here")

from common.errors import CallFailed, CallLost
from grading.calls import call
from parts.workers import WorkerPool
from tests.helpers.scripts import ROOT

TROUBLE = """
import os, signal, sys, time

def echo(x): return x
def sleep(x): time.sleep(x)
def spin():
    while True: 10 ** 100000
def die(): os.kill(os.getpid(), signal.SIGKILL)
def leave(): sys.exit(3)
def tell():
    raise ValueError('first\\n  second')

def fail(): raise KeyError("nothing")
def child(x):
    import subprocess
    subprocess.run(["sleep", x])
def number():
    import numpy
    return numpy.float32(0.5)
def odd(): return lambda: 0
def parent(): return os.getppid()
def end():
    os.kill(os.getppid(), 9)
def stop():
    os.kill(os.getppid(), signal.SIGSTOP)
class Code:
    def __reduce__(self): return os._exit, (3,)
def code(): return [Code()]
def half():
    for pipe in range(3, 30):
        try: os.write(pipe, bytes([0, 1, 0, 0]))
        except OSError: pass
    time.sleep(9)
def closed():
    os.closerange(3, 99)
def holder():
    if not os.fork():
        os.setsid()
        time.sleep(15)
        os._exit(0)
    os.kill(os.getppid(), 9)
class Silent(Exception):
    def __str__(self): raise RuntimeError
def unprintable(): raise Silent
"""


@pytest.fixture
def workers(tmp_path):
    (tmp_path / "t.py").write_text(TROUBLE)
    names = [f"{tmp_path}/t.py:{name}" for name in re.findall(r"^def (\w+)", TROUBLE, re.MULTILINE)]
    pool = WorkerPool(1, names)
    return lambda name, seconds=5.0, **arguments: call(pool, f"{tmp_path}/t.py:{name}", seconds, arguments)


def test_a_damaged_pipe_hangs_nothing(workers):
    """Neither one that holds half an answer, nor one that a process of the call holds open; nor a stopped worker."""
    lost = [(name, CallLost) for name in ("half", "closed", "holder", "stop")]
    for name, kind in [*lost, ("unprintable", CallFailed)]:
        start = time.perf_counter()
        with pytest.raises(kind) as error:
            workers(name, 0.5)
        assert time.perf_counter() - start < 10, name
        assert str(error.value) in ("its process died, perhaps out of memory", "its worker process died", "Silent")
        assert workers("echo", x=name) == name


def test_workers_outlive_whatever_a_call_does(workers):
    assert workers("echo", x=[1, "ü"]) == [1, "ü"]
    for name, kind, message in [
        ("spin", CallLost, "took longer than 0.5 s"),
        ("die", CallLost, "its process died"),
        ("leave", CallFailed, "SystemExit: 3"),
        ("fail", CallFailed, "KeyError: 'nothing'"),
        ("tell", CallFailed, "ValueError: first second$"),
        ("odd", CallFailed, "cannot be pickled"),
        ("code", CallFailed, "cannot be unpickled .*posix._exit"),  # it would end this process
    ]:
        with pytest.raises(kind, match=message):
            workers(name, 0.5)
        start = time.perf_counter()
        assert workers("echo", x=name) == name
        assert time.perf_counter() - start < 1, "the next call must start at once"
    assert workers("number") == 0.5
    with pytest.raises(CallLost, match="took longer"):
        workers("child", 0.5, x=f"98765.{os.getpid()}")
    processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert f"98765.{os.getpid()}" not in processes
    os.kill(workers("parent"), 9)  # kill the worker process itself; the next call is retried
    assert workers("echo", x=1) == 1
    with pytest.raises(CallLost, match="worker process died"):
        workers("end")
    assert workers("echo", x=2) == 2


def test_workers_end_with_the_process_that_started_them(tmp_path):
    """Workers end even if the process that started them is killed during a call."""
    (tmp_path / "t.py").write_text(TROUBLE)
    name = f"{tmp_path}/t.py"
    script = (
        "import sys, os, threading; sys.path.insert(0, sys.argv[1])\n"
        "from grading.calls import call\nfrom parts.workers import WorkerPool\n"
        f"pool = WorkerPool(1, ['{name}:sleep', '{name}:parent'])\n"
        f"print(call(pool, '{name}:parent', 5.0, {{}}), flush=True)\n"
        f"threading.Thread(target=lambda: call(pool, '{name}:sleep', 2.0, {{'x': 60}})).start()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, ROOT], capture_output=True, text=True, check=False, timeout=60)
    worker, deadline = int(done.stdout), time.time() + 10
    while os.path.exists(f"/proc/{worker}") and time.time() < deadline:
        time.sleep(0.1)
    assert not os.path.exists(f"/proc/{worker}")


def test_a_call_ends_with_its_worker(tmp_path):
    lines = "import os, time", "def hang(path):", " open(path, 'w').write(str(os.getpid()))", " time.sleep(60)"
    (tmp_path / "t.py").write_text("\n".join(lines))
    name, pid = f"{tmp_path}/t.py:hang", tmp_path / "pid"
    pool = WorkerPool(1, [name])
    worker, pipe = pool.idle.get()
    pipe.send((name, 60.0, [{"path": str(pid)}]))
    deadline = time.time() + 10
    while not (pid.is_file() and pid.read_text()) and time.time() < deadline:
        time.sleep(0.01)
    worker.kill()
    worker.wait()
    while os.path.exists(f"/proc/{pid.read_text()}") and time.time() < deadline:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{pid.read_text()}")


def test_a_busy_machine_makes_no_answer_wrong(tmp_path):
    """A call with a limit of 1 s needs 0.6 s of CPU time, but takes longer because two busy processes share its core.
    The call must not be killed. A call that sleeps too long or needs more CPU time than its limit must be killed."""
    (tmp_path / "r.py").write_text(
        "import time\n"
        "def work(seconds):\n"
        "    start = time.process_time()\n"
        "    while time.process_time() - start < seconds:\n"
        "        pass\n"
        "    return 1.0\n"
        "def sleep(seconds):\n"
        "    time.sleep(seconds)\n"
    )
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        pool = WorkerPool(1, [f"{tmp_path}/r.py:work", f"{tmp_path}/r.py:sleep"])
        longest = 0.0
        for _ in range(8):  # the scheduler decides how much CPU time each process gets
            start = time.monotonic()
            assert call(pool, f"{tmp_path}/r.py:work", 1.0, {"seconds": 0.6}) == 1.0
            longest = max(longest, time.monotonic() - start)
            if longest > 1.0:
                break
        assert longest > 1.0, "the machine was not busy, so this test proves nothing"
        for name, seconds in (("sleep", 9), ("work", 9)):
            with pytest.raises(CallLost):
                call(pool, f"{tmp_path}/r.py:{name}", 0.3, {"seconds": seconds})
    finally:
        for process in busy:
            process.kill()
        os.sched_setaffinity(0, cores)
