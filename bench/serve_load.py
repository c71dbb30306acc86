"""How the service answers many at once: clients that poll, and clients that upload, while a job trains.

    python bench/serve_load.py --model runs/tiny/count-0/model

Starts a service of its own, a training job in it, then for a minute 50 clients that ask for the jobs every second and
10 that upload a data set, delete it and begin again. Prints errors and the times of GET /jobs.
"""

import io
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


def archive() -> bytes:
    """A data set of 100 drawn pictures as a ZIP."""
    with tempfile.TemporaryDirectory() as folder:
        tiny.write_shapes(pathlib.Path(folder) / "data", 100, [0, 0])
        with zipfile.ZipFile(data := io.BytesIO(), "w") as target:
            for path in pathlib.Path(folder, "data").rglob("*.*"):
                target.write(path, str(path.relative_to(pathlib.Path(folder) / "data")))
        return data.getvalue()


def main(cfg: Config) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url, data, errors, times, uploads = f"http://127.0.0.1:{port}", archive(), [], [], []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE.parent / "serve.py"), f"--folder={folder}", f"--model={cfg.model}"]
        service = subprocess.Popen([*command, f"--port={port}"], stderr=subprocess.DEVNULL)
        try:
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
            until = time.monotonic() + cfg.seconds

            def poll(number: int) -> None:
                session = requests.Session()
                time.sleep(number / cfg.polling)
                while time.monotonic() < until:
                    begun = time.perf_counter()
                    reply = session.get(f"{url}/jobs", timeout=60)
                    times.append(time.perf_counter() - begun)
                    if reply.status_code != 200:
                        errors.append(reply.text[:200])
                    time.sleep(1)

            def upload() -> None:
                session = requests.Session()
                while time.monotonic() < until:
                    begun = time.perf_counter()
                    reply = session.post(f"{url}/upload-data", files={"file": ("a.zip", data)}, timeout=60)
                    uploads.append(time.perf_counter() - begun)
                    if reply.status_code != 201:
                        errors.append(reply.text[:200])
                        continue
                    session.delete(f"{url}/files/{reply.json()['file_id']}", timeout=60)

            threads = [threading.Thread(target=poll, args=(i,)) for i in range(cfg.polling)]
            threads += [threading.Thread(target=upload) for _ in range(cfg.uploading)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            step = requests.get(f"{url}/jobs/{job_id}", timeout=60).json()["current_step"]
            requests.delete(f"{url}/jobs/{job_id}", timeout=60)
            time.sleep(3)
        finally:
            service.kill()
            service.wait()
            subprocess.run(["pkill", "-9", "-f", folder], check=False)
    p50, p99 = np.percentile(times, [50, 99]) * 1000
    print(f"GET /jobs: {len(times)} calls, median {p50:.0f} ms, p99 {p99:.0f} ms, most {max(times) * 1000:.0f} ms")
    print(
        f"uploads of {len(data) / 1e3:.0f} kB: {len(uploads)}, median {np.median(uploads):.2f} s; errors: {len(errors)}"
    )
    print(*errors[:3], f"the job was at step {step}", sep="\n")


if __name__ == "__main__":
    cli.run(main, Config)
