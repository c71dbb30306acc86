"""How the service answers many at once: clients that poll, and clients that upload, while a job trains.

    python bench/serve_load.py --model runs/tiny/count-0/model

Starts a service of its own, with finished jobs and one that trains, then for a minute 50 clients that ask for the jobs
every second and 10 that upload a data set, delete it and begin again. Prints errors and the times of GET /jobs.
"""

import io
import json
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from dataclasses import dataclass

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
import numpy as np
import requests

import cli
import tiny
from jobs import Store


@dataclass
class Config:
    """Load the service."""

    model: str = "runs/tiny/count-0/model"
    """The tiny model, as `python tiny.py` makes it."""
    polling: int = 50
    """Clients that ask for the jobs."""
    uploading: int = 10
    """Clients that upload."""
    seconds: float = 60.0
    """How long."""
    finished: int = 100
    """Jobs that are there from before, of 200 steps each."""


def archive() -> bytes:
    """A data set of 100 drawn pictures as a ZIP."""
    with tempfile.TemporaryDirectory() as folder:
        tiny.write_shapes(pathlib.Path(folder) / "data", 100, [0, 0])
        with zipfile.ZipFile(data := io.BytesIO(), "w") as target:
            for path in pathlib.Path(folder, "data").rglob("*.*"):
                target.write(path, str(path.relative_to(pathlib.Path(folder) / "data")))
        return data.getvalue()


def add_finished(folder: str, count: int) -> None:
    """Jobs as a service leaves them that has trained them."""
    store = Store(folder)
    store.add_file("old", "old.zip", {"rows": 100, "images": 100, "usable": 100, "problems": []})
    for i in range(count):
        job = store.add_job(f"job {i}", "old", "model", {}, 200)
        store.run_of(job.job_id).mkdir()
        row = {"reward": 0.5, "loss": 0.1, "step_time": 1.0, **{f"time/part {k}": 0.1 for k in range(30)}}
        lines = (json.dumps({"step": step} | row) for step in range(1, 201))
        (store.run_of(job.job_id) / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        (store.run_of(job.job_id) / "final").mkdir()
        store.table.execute("UPDATE jobs SET status = 'completed' WHERE job_id = ?", (job.job_id,))
    store.table.close()
    store.held.close()


class Load:
    """Clients of one service and what they saw."""

    def __init__(self, url: str, data: bytes, seconds: float):
        self.url, self.data, self.until = url, data, time.monotonic() + seconds
        self.errors, self.times, self.uploads = [], [], []

    def poll(self, wait: float) -> None:
        session = requests.Session()
        time.sleep(wait)
        while time.monotonic() < self.until:
            begun = time.perf_counter()
            reply = session.get(f"{self.url}/jobs", timeout=60)
            self.times.append(time.perf_counter() - begun)
            if reply.status_code != 200:
                self.errors.append(reply.text[:200])
            time.sleep(1)

    def upload(self) -> None:
        session = requests.Session()
        while time.monotonic() < self.until:
            begun = time.perf_counter()
            reply = session.post(f"{self.url}/upload-data", files={"file": ("a.zip", self.data)}, timeout=60)
            self.uploads.append(time.perf_counter() - begun)
            if reply.status_code != 200:
                self.errors.append(reply.text[:200])
                continue
            session.delete(f"{self.url}/files/{reply.json()['file_id']}", timeout=60)


def start_job(url: str, data: bytes) -> str:
    """A job that trains, once it has taken two steps."""
    while True:
        try:
            requests.get(f"{url}/jobs", timeout=5)
            break
        except requests.ConnectionError:
            time.sleep(0.2)
    file_id = requests.post(f"{url}/upload-data", files={"file": ("a.zip", data)}, timeout=60).json()["file_id"]
    body = {"job_name": "load", "data_file_id": file_id, "training_config": {"use_4bit": False}}
    job_id = requests.post(f"{url}/train", json=body, timeout=60).json()["job_id"]
    while requests.get(f"{url}/jobs/{job_id}", timeout=60).json()["current_step"] < 2:
        time.sleep(0.5)
    return job_id


def main(cfg: Config) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url, data = f"http://127.0.0.1:{port}", archive()
    with tempfile.TemporaryDirectory() as folder:
        add_finished(folder, cfg.finished)
        command = [sys.executable, str(HERE.parent / "serve.py"), f"--folder={folder}", f"--model={cfg.model}"]
        service = subprocess.Popen([*command, f"--port={port}"], stderr=subprocess.DEVNULL)
        try:
            job_id = start_job(url, data)
            load = Load(url, data, cfg.seconds)
            threads = [threading.Thread(target=load.poll, args=(i / cfg.polling,)) for i in range(cfg.polling)]
            threads += [threading.Thread(target=load.upload) for _ in range(cfg.uploading)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            step = requests.get(f"{url}/jobs/{job_id}", timeout=60).json()["current_step"]
        finally:
            service.kill()
            service.wait()
            subprocess.run(["pkill", "-9", "-f", folder], check=False)
    p50, p99 = np.percentile(load.times, [50, 99]) * 1000
    most, uploads = max(load.times) * 1000, load.uploads
    print(f"GET /jobs: {len(load.times)} calls, median {p50:.0f} ms, p99 {p99:.0f} ms, most {most:.0f} ms")
    print(f"uploads of {len(data) / 1e3:.0f} kB: {len(uploads)}, median {np.median(uploads):.2f} s")
    print(f"errors: {len(load.errors)}", *load.errors[:3], f"the job was at step {step}", sep="\n")


if __name__ == "__main__":
    cli.run(main, Config)
