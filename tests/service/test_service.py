"""The counting service: its HTTP API, its page in a real browser, and its behaviour under faults."""

import base64
import contextlib
import dataclasses
import datetime
import fcntl
import io
import itertools
import json
import logging
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import textwrap
import time
import urllib.parse
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import requests
from fastapi import FastAPI, HTTPException
from safetensors.numpy import load_file, save_file
from starlette.requests import Request

import grpo
from common.errors import UserError
from common.files import release_locks
from common.parts import extra
from tests.helpers.marks import needs, slow
from tests.helpers.scripts import ROOT, free_port
from tests.service.clients import call_nine_endpoints, run_documented_client

pytest.importorskip("apps", reason="needs apps/, which is not here")

from apps.demo import tiny
from apps.service.app import Config, check_address, find_model, job_info, pack_result, read_token, train
from apps.service.jobs import Job, Store, used_bytes
from apps.service.middleware import AccessMiddleware, OncePerSecond
from apps.service.schema import LoraConfig, TrainingConfig, TrainRequest

TRAINED = ("completed", "failed", "cancelled")
QUICK = {
    "num_epochs": 1,
    "num_generations": 4,
    "gradient_accumulation_steps": 8,
    "use_4bit": False,
    "learning_rate": 1e-3,
}
SMALL = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.05}


class Service:
    """Runs `python -m apps.service` as a process that a test can kill and restart."""

    def __init__(self, folder: pathlib.Path, model: str, *flags: str, file_limit: int = 1024):
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [
            "prlimit",
            f"--nofile={file_limit}",
            sys.executable,
            "-m",
            "apps.service",
            f"--folder={folder}",
            f"--model={model}",
            f"--port={self.port}",
            *flags,
        ]
        self.start()

    def start(self) -> None:
        with (self.folder.parent / "service.log").open("ab") as log:
            self.process = subprocess.Popen(self.command, cwd=ROOT, stdout=log, stderr=log)
        wait_for(lambda: self._answers() or self.process.poll() is not None, 60)

    def _answers(self) -> bool:
        with contextlib.suppress(requests.ConnectionError):
            return requests.get(f"{self.url}/data-format", timeout=5).status_code in (200, 401)
        return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def call(self, method: str, path: str, status: int | None = None, **kwargs) -> requests.Response:
        reply = requests.request(method, self.url + path, timeout=120, **kwargs)
        assert status is None or reply.status_code == status, (reply.status_code, reply.text)
        return reply

    def upload(self, archive: bytes, name: str = "shapes.zip", status: int = 200) -> dict:
        return self.call("POST", "/upload-data", status, files={"file": (name, archive)}).json()

    def train(self, file_id: str, **config) -> str:
        body = {"job_name": "a job", "data_file_id": file_id, "training_config": QUICK | config, "lora_config": SMALL}
        return self.call("POST", "/train", 200, json=body).json()["job_id"]

    def job(self, job_id: str) -> dict:
        return self.call("GET", f"/jobs/{job_id}", 200).json()

    def wait(self, job_id: str, condition: Callable[[dict], bool], seconds: float = 180) -> dict:
        wait_for(lambda: condition(self.job(job_id)), seconds)
        return self.job(job_id)


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def archive(tmp_path_factory) -> bytes:
    folder = tmp_path_factory.mktemp("shapes")
    tiny.write_shapes(folder / "data", 16, [0, 7])
    return zipped(folder / "data")


def zipped(folder: pathlib.Path) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                archive.write(path, str(path.relative_to(folder)))
    return data.getvalue()


@pytest.fixture(scope="module")
def terse_model(tiny_model, tmp_path_factory) -> str:
    """Return a copy of the tiny model whose completions end after about ten tokens, because many tokens end them."""
    folder = tmp_path_factory.mktemp("terse") / "model"
    shutil.copytree(tiny_model, folder)
    path = folder / "generation_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"eos_token_id": [settings["eos_token_id"], *range(65, 91)]}))
    return str(folder)


@pytest.fixture
def service(tmp_path, terse_model) -> Iterator[Service]:
    service = Service(tmp_path / "service", terse_model)
    yield service
    end(service)


def end(service: Service) -> None:
    """Kill the service and all of its jobs."""
    service.kill()
    for path in service.folder.glob("jobs/*/pid-*"):
        with contextlib.suppress(OSError, ValueError):
            os.kill(int(path.read_text()), signal.SIGKILL)


# --- the HTTP API -----------------------------------------------------------------------------------------------------


def test_from_upload_to_answer(service, archive, tmp_path, monkeypatch):
    """Upload, train, cancel, resume, finish, download and predict, as the API documentation describes."""
    assert "main.csv" in json.dumps(service.call("GET", "/data-format", 200).json())
    file = service.upload(archive)
    assert set(file) == {"file_id", "filename", "upload_time", "csv_rows", "valid_images", "problems"}
    assert (file["csv_rows"], file["valid_images"], file["problems"]) == (16, 16, [])
    assert service.call("GET", "/files", 200).json() == [file]
    job_id = service.train(file["file_id"])
    second = service.train(file["file_id"], seed=1)
    job = service.wait(job_id, lambda job: job["current_step"] >= 3)
    assert job["status"] == "training"
    assert job["total_steps"] == 8
    assert job["waiting"] is False
    waiting = service.job(second)  # one job trains at a time
    assert (waiting["status"], waiting["waiting"], waiting["current_step"]) == ("training", True, 0)
    assert service.call("DELETE", f"/jobs/{second}", 200).json()["status"] == "cancelled"
    service.call("DELETE", f"/files/{file['file_id']}", 409)
    service.call("DELETE", f"/jobs/{job_id}", 200)
    service.call("DELETE", f"/jobs/{job_id}")  # must not send a second signal, which would skip the checkpoint
    job = service.wait(job_id, lambda job: job["status"] in TRAINED)
    assert job["status"] == "cancelled"
    assert list((service.folder / "jobs" / job_id / "run").glob("checkpoint-*")), "the checkpoint must be kept"
    service.call("GET", f"/jobs/{job_id}/download", 409)
    cancelled_at_step = job["current_step"]
    assert service.train(file["file_id"]) == job_id, "the same request must resume the cancelled job"
    with service.call("GET", f"/jobs/{job_id}/events", 200, stream=True) as stream:
        events = [line for line in stream.iter_lines(decode_unicode=True) if line]
    assert events[0] == "event: job"
    assert '"status":"completed"' in [line for line in events if line.startswith("data: {")][-1]
    steps = [row["step"] for line in events if line.startswith("data: [") for row in json.loads(line[6:])]
    assert sorted(set(steps)) == list(range(1, 9))
    assert service.job(job_id)["progress"] == 100.0
    log = service.call("GET", f"/jobs/{job_id}/logs", 200).text
    assert "error:" not in log and "\r" not in log
    assert re.findall(r"^step (\d+)/8  reward ", log, re.MULTILINE) == [str(step) for step in range(1, 9)]
    assert [row["step"] for row in service.call("GET", f"/jobs/{job_id}/metrics", 200).json()] == list(range(1, 9))
    assert cancelled_at_step < 8
    result = zipfile.ZipFile(io.BytesIO(service.call("GET", f"/jobs/{job_id}/download", 200).content))
    names = {"adapter_config.json", "adapter_model.safetensors", "training_args.json", "tokenizer.json"}
    names |= {"tokenizer_config.json", "preprocessor_config.json", "trainer_state.json"}
    assert names <= set(result.namelist())
    assert json.loads(result.read("trainer_state.json"))["global_step"] == 8
    assert json.loads(result.read("adapter_config.json"))["lora_dropout"] == 0.05
    assert service.job(job_id)["answers"] == 8 >= service.job(job_id)["right_answers"] >= 0
    check_note(result, tmp_path / "unpacked", monkeypatch)
    picture = zipfile.ZipFile(io.BytesIO(archive)).read("images/00000.png")
    question = {"files": {"picture": ("p.png", picture)}, "data": {"question": "How many shapes?"}}
    with ThreadPoolExecutor(45) as pool:  # all but one get status 503, and other requests are not blocked
        answers = [pool.submit(service.call, "POST", f"/jobs/{job_id}/predict", **question) for _ in range(45)]
        start = time.monotonic()
        service.call("GET", "/files", 200)
        assert time.monotonic() - start < 10
        replies = sorted((answer.result() for answer in answers), key=lambda reply: reply.status_code)
    assert isinstance(replies[0].json()["answer"], str)
    assert {reply.status_code for reply in replies} <= {200, 503}
    tiny.Image.new("RGB", (900, 3)).save(thin := io.BytesIO(), "PNG")
    question["files"] = {"picture": ("thin.png", thin.getvalue())}
    reply = service.call("POST", f"/jobs/{job_id}/predict", 400, **question).json()["detail"]
    assert reply == "the image cannot be used: the image is 900x3: one side is more than 200 times the other"
    service.call("DELETE", f"/files/{file['file_id']}", 200)
    assert service.call("GET", "/files", 200).json() == []
    service.call("GET", "/jobs/none", 404)
    detail = service.call("POST", f"/jobs/{second}/resume", 409).json()["detail"]
    assert "images were deleted" in detail
    with service.call("GET", f"/jobs/{job_id}/events", 200, stream=True, headers={"Last-Event-ID": "6"}) as stream:
        rows = [json.loads(line[6:]) for line in stream.iter_lines(decode_unicode=True) if line.startswith("data: [")]
    assert [row["step"] for event in rows for row in event] == [7, 8], "only new steps must be sent"
    check_clients(service, archive, job_id, tmp_path, monkeypatch)
    assert service.call("POST", f"/jobs/{job_id}/delete", 200).json() == {"message": "deleted"}
    service.call("GET", f"/jobs/{job_id}", 404)
    assert not (service.folder / "jobs" / job_id).exists()


def check_note(result: zipfile.ZipFile, folder: pathlib.Path, monkeypatch) -> None:
    """The code in the ZIP's note loads the adapter, in the folder of the note. The processor would need torchvision."""
    result.extractall(folder)
    note = (folder / "HOW_TO_LOAD.txt").read_text()
    variables: dict = {}
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        exec(textwrap.dedent("".join(re.findall(r"^    (?!python|processor).*\n", note, re.MULTILINE))), variables)
    weights = load_file(folder / "adapter_model.safetensors")
    loaded = {name.replace(".default", ""): value for name, value in variables["model"].named_parameters()}
    assert weights and all((loaded[name].detach().numpy() == value).all() for name, value in weights.items())
    assert "Count the objects" in note and "shrunk to at most 262144 pixels" in note
    assert not re.search("BASE|SYSTEM|MAX_PIXELS", note)


def check_clients(service: Service, archive: bytes, completed: str, folder: pathlib.Path, monkeypatch) -> None:
    """The documented client and curl get what the document shows."""
    client = run_documented_client(service.port, archive, folder, monkeypatch)
    status, answer = client["status"], client["response"].json()
    for given in (client["file_id"], client["job_id"]):
        assert str(uuid.UUID(given)) == given
    assert (status["job_id"], status["status"], status["progress"]) == (client["job_id"], "training", 0.0)
    assert status["current_step"] == 0 < status["total_steps"]
    created = datetime.datetime.fromisoformat(status["created_at"])
    assert created.tzinfo is None
    assert abs(created - datetime.datetime.now(datetime.UTC).replace(tzinfo=None)).total_seconds() < 60
    assert "temperature 1" in answer["note"]
    replies = call_nine_endpoints(service.url, archive, completed, folder)
    assert replies["basics"]["data_format"] == "/data-format"
    assert "main.csv" in replies["format"]["contents"]
    assert replies["file"] in replies["files"]
    assert replies["job"] in replies["jobs"]
    assert replies["job"]["waiting"] is True, "the job of the documented client is training"
    assert replies["cancelled"]["status"] == "cancelled"
    assert "adapter_config.json" in zipfile.ZipFile(folder / "result.zip").namelist()


BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


@pytest.mark.parametrize(
    ("accept", "kind"), [("*/*", "json"), ("application/json", "json"), (None, "json"), (BROWSER, "html")]
)
def test_only_browsers_get_the_page(shared, accept, kind):
    assert kind in shared.call("GET", "/", 200, headers={"Accept": accept}).headers["Content-Type"]


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"training_config": {"num_epochs": 0}}, "num_epochs"),
        ({"training_config": {"batch_size": 33}}, "batch_size"),
        ({"training_config": {"num_generations": 21}}, "num_generations"),
        ({"training_config": {"temperature": 0}}, "temperature"),
        ({"training_config": {"max_image_size": 64}}, "max_image_size"),
        ({"training_config": {"epochs": 3}}, "epochs"),
        ({"lora_config": {"lora_dropout": 0.6}}, "lora_dropout"),
        ({"job_name": ""}, "job_name"),
    ],
)
def test_settings_out_of_range_are_named(shared, config, field):
    body = {"job_name": "j", "data_file_id": "x"} | config
    reply = shared.call("POST", "/train", 422, json=body).json()
    assert field in json.dumps(reply)


@pytest.fixture(scope="module")
def shared(tmp_path_factory, tiny_model) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("shared") / "service", tiny_model, "--max_upload=0.002")
    yield service
    end(service)


PATH_LIKE = [
    "/etc",
    "../../etc",
    "/home/somebody/.ssh",
    "a/b/c",
    "..",
    "owner/../name",
    "file:///etc",
    "a\0b",
    "x" * 450,
]


@pytest.mark.parametrize("name", [*PATH_LIKE, "apps/service/app.py"])
def test_only_allowed_models(shared, name, archive):
    file = shared.upload(archive)
    body = {"job_name": "j", "data_file_id": file["file_id"], "base_model_path": name}
    assert "allowed folder" in shared.call("POST", "/train", 400, json=body).text


def hostile(rng: random.Random) -> tuple[str, bytes]:
    """Return the file name and the content of a ZIP whose file name or member names contain path traversal."""
    names = ["../x", "/etc/x", "a/../../x", "..\\x", "C:\\x", "images/../../x", "main.csv/../../x", "\0x", "x" * 300]
    csv = "images_path,question,answer\n" + f"{rng.choice(names)},How many?,A photo of 1 cat\n"
    with zipfile.ZipFile(data := io.BytesIO(), "w") as archive:
        if rng.random() < 0.8:
            archive.writestr("main.csv", csv)
        for _ in range(rng.randrange(3)):
            member = zipfile.ZipInfo(rng.choice(names))
            if rng.random() < 0.3:
                member.external_attr = 0xA1FF << 16  # a symbolic link
            archive.writestr(member, "/etc/passwd")
    content = data.getvalue()
    if rng.random() < 0.2:
        content = content[: rng.randrange(len(content))]
    return rng.choice(["../../evil.zip", "/tmp/evil.zip", "ok.zip", "..", "", "a\0b.zip", "<b>.zip"]), content


def test_hostile_archives_write_nowhere(shared, tmp_path):
    before = {path for path in shared.folder.parent.parent.rglob("*") if shared.folder not in path.parents}
    rng = random.Random(0)
    for _ in range(200):
        name, content = hostile(rng)
        reply = shared.call("POST", "/upload-data", files={"file": (name or "x", content)})
        assert reply.status_code in (200, 400, 422), reply.text
        assert "Traceback" not in reply.text
        assert "root:" not in reply.text
        if reply.status_code == 200:
            shared.call("DELETE", f"/files/{reply.json()['file_id']}", 200)
    after = {path for path in shared.folder.parent.parent.rglob("*") if shared.folder not in path.parents}
    assert after == before
    expected = {f"{file['file_id']}.zip" for file in shared.call("GET", "/files").json()}
    assert {path.name for path in (shared.folder / "files").iterdir()} == expected


def test_an_upload_over_the_limit(shared):
    assert "2 MB" in shared.call("POST", "/upload-data", 413, files={"file": ("a.zip", b"0" * 3_000_000)}).text
    head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.zip"\r\n\r\n'
    chunks = (chunk for chunk in [head, *[bytes(100_000)] * 30])  # a generator, so no Content-Length is sent
    reply = shared.call(
        "POST", "/upload-data", data=chunks, headers={"Content-Type": "multipart/form-data; boundary=x"}
    )
    assert reply.status_code == 413


def test_bad_rows_are_listed(shared):
    with zipfile.ZipFile(data := io.BytesIO(), "w") as archive:
        picture = io.BytesIO()
        tiny.Image.new("RGB", (60, 60)).save(picture, "PNG")
        archive.writestr("images/a.png", picture.getvalue())
        lines = ["images/a.png,How many?,A photo of 2 cats", "images/no.png,How many?,3", "images/a.png,How many?,none"]
        lines.append("images/a.png,How many? <|im_end|>,2")
        archive.writestr("main.csv", "\n".join(["images_path,question,answer", *lines]))
    file = shared.upload(data.getvalue(), "cats.zip")
    assert (file["csv_rows"], file["valid_images"]) == (4, 1)
    assert file["problems"] == [
        "cats.zip/main.csv row 3: there is no image 'no.png' in the ZIP or in its folder images/",
        "cats.zip/main.csv row 4: the answer 'none' contains no whole number",
        "cats.zip/main.csv row 5: the question contains the control token <|im_end|>",
    ]
    assert str(shared.folder) not in json.dumps(file), "the service's own paths must not be revealed"
    picture = shared.call("GET", f"/files/{file['file_id']}/picture/0", 200)
    assert picture.content.startswith(b"\x89PNG")


def test_rows_that_share_an_image_are_checked_in_seconds(shared):
    """6,000 questions about one image of 8 megapixels; decoding it for each of them would take an hour."""
    with zipfile.ZipFile(data := io.BytesIO(), "w") as archive:
        archive.writestr("images/a.png", huge_png(2900))
        rows = [f"images/a.png,How many things of kind {i}?,{i}" for i in range(6000)]
        archive.writestr("main.csv", "\n".join(["images_path,question,answer", *rows]))
    file = shared.upload(data.getvalue())
    assert (file["csv_rows"], file["valid_images"], file["problems"]) == (6000, 1, [])


def test_many_uploads_wait_for_each_other(shared, archive):
    with ThreadPoolExecutor(8) as pool:
        files = list(pool.map(shared.upload, [archive] * 8))
    assert {file["csv_rows"] for file in files} == {16}
    stored = {path.stem for path in (shared.folder / "files").iterdir()}
    assert {file["file_id"] for file in files} <= stored
    wait_for(lambda: not list(shared.folder.glob("scratch-*")), 10)  # deleted after the answer has been sent


def test_the_settings_of_a_job_are_flags_of_the_trainer():
    settings = TrainingConfig().model_dump(by_alias=True) | LoraConfig().model_dump(by_alias=True)
    combined = {"batch_size", "gradient_accumulation_steps", "max_image_size"}  # not passed on by themselves
    assert settings.keys() - combined <= {field.name for field in dataclasses.fields(grpo.Config)}


def test_a_table_of_nothing_but_lines_keeps_nobody_waiting(shared, archive):
    with zipfile.ZipFile(data := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("main.csv", "images_path,question,answer\na,b,1" + "\n" * 200_000_000)
    assert "at most 16 MB" in shared.call("POST", "/upload-data", 400, files={"file": ("b.zip", data.getvalue())}).text


def test_tracebacks_of_any_rank_stay_in_the_log(tmp_path):
    text = "one\n[rank0]: Traceback (most recent call last):\n[rank0]:   File 'x', line 1\n[rank0]:     y\n"
    text += "[rank0]: OSError: full\nTraceback (most recent call last):\n  File\n    y\nOSError: b\ntwo\n"
    store = Store(str(tmp_path))
    store.job_folder("a").mkdir()
    (store.job_folder("a") / "log.txt").write_text(text)
    assert store.log("a") == "one\n[rank0]: OSError: full\nOSError: b\ntwo\n"


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (
            "step 5: 3 skipped updates in a row (gradient norm nan); checkpoint-5 is complete: continue with --resume",
            "step 5: 3 skipped updates in a row (gradient norm nan); checkpoint-5 is complete",
        ),
        (
            "step 1: {folder}/jobs/a/x.png cannot be read; there is no checkpoint",
            "step 1: jobs/a/x.png cannot be read; there is no checkpoint",
        ),
        ("error: no data at 'nowhere'", "no data at 'nowhere'"),
        (
            "step 3/8  reward 0.5",
            "the training process was killed at step 0; resume continues from the last checkpoint",
        ),
    ],
)
def test_the_end_of_the_log_says_why_a_job_failed(tmp_path, end, reason):
    store = Store(str(tmp_path))
    job = Job("a", "a", "f", "m", {}, "training", 8, "", 0.0, attempt=1)
    store.job_folder("a").mkdir()
    log = f"--- attempt 1 ---\nstep 2/8  reward 0.4\n{end.format(folder=store.folder)}\n"
    (store.job_folder("a") / "log.txt").write_text(log)
    assert store._failure_reason(job) == reason


def test_a_full_disk_is_reported(tmp_path, tiny_model, archive):
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)], check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    service = Service(folder / "service", tiny_model)
    try:
        file = service.upload(archive)
        job_id = service.train(file["file_id"])
        service.wait(job_id, lambda job: not job["waiting"])
        with contextlib.suppress(OSError), (folder / "ballast").open("wb") as ballast:
            while True:
                ballast.write(bytes(4096))
                ballast.flush()
        reply = service.call("POST", "/upload-data", 507, files={"file": ("a.zip", archive)}).json()
        assert "disk is full" in reply["detail"]
        service.call("DELETE", f"/jobs/{job_id}")
        (folder / "ballast").unlink()
        job = service.wait(job_id, lambda job: job["status"] in TRAINED)
        assert job["status"] in ("cancelled", "failed"), job
    finally:
        end(service)
        subprocess.run(["umount", "-l", str(folder)], check=False)


# --- attacks ----------------------------------------------------------------------------------------------------------


def huge_png(side: int) -> bytes:
    """Return a black PNG of `side` x `side` 16-bit pixels."""
    raw = zlib.compress(bytes(side * (1 + 2 * side)), 9)
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", side, side, 16, 0, 0, 0, 0)), (b"IDAT", raw), (b"IEND", b"")]
    parts = [struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def zip_of_huge_pictures(side: int, count: int) -> bytes:
    picture = huge_png(side)
    with zipfile.ZipFile(data := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as archive:
        lines = [f"images/{i}.png,How many?,{i}" for i in range(1, count + 1)]
        archive.writestr("main.csv", "\n".join(["images_path,question,answer", *lines]))
        for i in range(1, count + 1):
            archive.writestr(f"images/{i}.png", picture)
    return data.getvalue()


def memory(service: Service) -> float:
    """Return the memory in GB that the service and its workers hold."""
    children: dict[int, list[int]] = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    pids, pages = [service.process.pid], 0
    for pid in pids:
        pids += children.get(pid, [])
        with contextlib.suppress(OSError):
            pages += int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e9


@pytest.mark.parametrize(("side", "status"), [(13_000, 400), (7900, 200)])
def test_huge_pictures_take_little_memory(shared, side, status):
    """Eight pictures of 169 megapixels in a ZIP of a few kB are refused; three of 62 are decoded two at a time."""
    count = 8 if status == 400 else 3
    with ThreadPoolExecutor(9) as pool:
        upload = pool.submit(shared.upload, zip_of_huge_pictures(side, count), "huge.zip", status)
        calls, peak = [upload], 0.0
        while not all(call.done() for call in calls):
            peak = max(peak, memory(shared))
            time.sleep(0.02)
            if len(calls) == 1 and upload.done() and status == 200:
                path = f"/files/{upload.result()['file_id']}/picture"
                calls += [pool.submit(shared.call, "GET", f"{path}/{i}", 200) for i in range(count)]
    assert peak < 1.5
    if status == 400:
        assert "13000x13000, which is more than 64 megapixels" in upload.result()["detail"]


def test_pictures_that_take_long_block_nothing_else(shared):
    file_id = shared.upload(zip_of_huge_pictures(7900, 1))["file_id"]
    with ThreadPoolExecutor(60) as pool:
        calls = [pool.submit(shared.call, "GET", f"/files/{file_id}/picture/0") for _ in range(60)]
        time.sleep(0.5)
        start = time.monotonic()
        shared.call("GET", "/files", 200)
        assert time.monotonic() - start < 2
        assert not all(call.done() for call in calls)
        shared.call("DELETE", f"/files/{file_id}", 200)  # the calls that still wait then fail at once


@pytest.mark.parametrize(("keys", "status", "errors"), [(300_000, 413, None), (80_000, 422, 1), (80, 422, 21)])
@pytest.mark.parametrize("nested", [False, True])
def test_many_unknown_keys_are_answered_briefly(shared, keys, status, errors, nested):
    body = {f"{i}": 1 for i in range(keys)}
    if nested:
        body = {"job_name": "a", "data_file_id": "b", "training_config": body}
    body = json.dumps(body).encode()
    start = time.monotonic()
    reply = shared.call("POST", "/train", status, data=body, headers=JSON)
    assert time.monotonic() - start < 1  # below 0.2 s on an idle machine
    assert len(reply.content) < 100_000
    if errors:
        assert len(reply.json()["detail"]) == errors
    chunks = (body[i : i + 100_000] for i in range(0, len(body), 100_000))  # does not announce its size
    assert shared.call("POST", "/train", data=chunks, headers=JSON).status_code == reply.status_code


JSON = {"Content-Type": "application/json"}
HALF_OPEN = [
    b"GET /jobs HTTP/1.1\r\nHost: localhost\r\n",
    b"POST /train HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{",
]


@pytest.mark.parametrize("file_limit", [256, *slow(1024)])
def test_half_open_requests_lock_nobody_out(tmp_path, tiny_model, file_limit):
    """300 requests that are never finished keep no other call waiting, and are closed after ten seconds."""
    service = Service(tmp_path / "service", tiny_model, file_limit=file_limit)
    try:
        clients = [socket.create_connection(("127.0.0.1", service.port)) for _ in range(300)]
        for client, request_start in zip(clients, itertools.cycle(HALF_OPEN)):
            with contextlib.suppress(OSError):  # already closed to make room
                client.sendall(request_start)
        time.sleep(3)
        start = time.monotonic()
        service.call("GET", "/jobs", 200)
        assert time.monotonic() - start < 2
        for client in clients:
            client.settimeout(20)
            with contextlib.suppress(ConnectionError):
                while client.recv(1000):
                    pass
            client.close()
        log = (tmp_path / "service.log").read_text()
        assert "Traceback" not in log
        assert len(log.splitlines()) < 400
    finally:
        end(service)


def test_the_same_error_is_logged_once_a_second():
    record = logging.LogRecord("serve", logging.ERROR, "a.py", 1, "full", (), None)
    log_filter = OncePerSecond()
    assert [log_filter.filter(record) for _ in range(3)] == [True, False, False]
    record.created += 1.1
    assert log_filter.filter(record)


def test_an_eps_file_starts_no_program(shared):
    with zipfile.ZipFile(data := io.BytesIO(), "w") as archive:
        tiny.Image.new("RGB", (60, 60)).save(picture := io.BytesIO(), "EPS")
        archive.writestr("images/a.png", picture.getvalue())
        archive.writestr("main.csv", "images_path,question,answer\nimages/a.png,How many?,1")
    assert "it is none of PNG, JPEG" in shared.upload(data.getvalue(), status=400)["detail"]


def test_every_response_has_security_headers(shared):
    for path in ("/", "/jobs", "/nothing", "/docs"):
        headers = shared.call("GET", path).headers
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert ("script-src 'self' 'unsafe-inline'" in headers["Content-Security-Policy"]) == (path == "/docs")


def test_a_missing_model_and_a_taken_port_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    assert find_model("model") == str(tmp_path / "model")
    assert find_model("Qwen/Qwen2.5-VL-3B-Instruct") == "Qwen/Qwen2.5-VL-3B-Instruct"
    with pytest.raises(UserError, match="no model at --model 'runs/no/such/model': give a folder"):
        find_model("runs/no/such/model")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=rf"127\.0\.0\.1, port {port} \(Address already in use\): choose another"):
            check_address("127.0.0.1", port)
    check_address("127.0.0.1", port)


@pytest.mark.parametrize("config", [None, b"", b"{", b"[]", b"null", b"{}", b"\xff\xfe", b"[" * 100_000])
def test_a_folder_that_holds_no_model_is_refused_at_the_start(tmp_path, config):
    if config is not None:
        (tmp_path / "config.json").write_bytes(config)
    with pytest.raises(UserError, match=r"^--model '.*' has no config\.json of a model \(.*\): give a folder"):
        find_model(str(tmp_path))


def test_the_token_may_come_from_a_file_or_the_environment(tmp_path, monkeypatch):
    (tmp_path / "token").write_text("from-file\n")
    monkeypatch.setenv("GRPO_TOKEN", "from-environment")
    assert read_token(Config()) == "from-environment"
    assert "GRPO_TOKEN" not in os.environ, "jobs must not inherit it"
    assert read_token(Config(token_file=str(tmp_path / "token"))) == "from-file"
    (tmp_path / "token").write_text("\n")
    for path, problem in (("token", "is empty"), ("none", "cannot read")):
        with pytest.raises(UserError, match=problem):
            read_token(Config(token_file=str(tmp_path / path)))


def test_only_the_owner_can_read_the_files(shared, archive):
    shared.upload(archive)
    wait_for(lambda: not any(shared.folder.glob("scratch-*")), 30)  # deleted after the answer
    paths = [shared.folder, *shared.folder.rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_file()} == {0o600}


def test_a_file_that_is_deleted_meanwhile_leaves_the_others_counted(tmp_path, monkeypatch):
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(b"12345")
    walk = os.walk

    def walk_and_delete(folder):
        for found in walk(folder):
            (tmp_path / "b").unlink()
            yield found

    monkeypatch.setattr(os, "walk", walk_and_delete)
    assert used_bytes(tmp_path) == 10


def test_a_full_quota_is_reported(tmp_path, tiny_model, archive):
    service = Service(tmp_path / "service", tiny_model, f"--max_storage={1.5 * len(archive) / 1e9}")
    try:
        file = service.upload(archive)
        assert "--max_storage allows" in service.upload(archive, status=507)["detail"]
        with socket.create_connection(("127.0.0.1", int(service.url.rpartition(":")[2]))) as connection:
            head = "POST /upload-data HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: multipart/form-data; boundary=x\r\n"
            connection.sendall(f"{head}Content-Length: {2 * len(archive)}\r\n\r\n".encode())
            assert b"507" in connection.recv(100), "it must be refused before the body arrives"
        assert len(service.call("GET", "/files", 200).json()) == 1
        (service.folder / "jobs" / "old").write_bytes(archive)
        body = {"job_name": "a job", "data_file_id": file["file_id"]}
        assert "storage is full" in service.call("POST", "/train", 507, json=body).json()["detail"]
    finally:
        end(service)


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "files").mkdir()
    for name in ("files/my_photos.zip", "notes.txt"):
        (tmp_path / name).write_text("mine")
    for _ in range(2):
        with pytest.raises(UserError, match=r"holds other files and no service.sqlite: choose a new folder"):
            Store(str(tmp_path))
        (tmp_path / "notes.txt").unlink(missing_ok=True)
    assert (tmp_path / "files" / "my_photos.zip").read_text() == "mine" and not (tmp_path / "jobs").exists()


def test_what_the_database_lacks_is_named_at_the_start(tmp_path, capsys):
    Store(str(tmp_path)).database.close()
    release_locks()
    names = ["files/folder", "files/my_photos.zip", f"files/{'0' * 32}.zip", f"files/{uuid.uuid4()}.zip", "jobs/old"]
    names += [f"files/{i:02}.zip" for i in range(20)]
    for name in [*names, "scratch-service-abc", "scratch-of-mine"]:
        (tmp_path / name).mkdir()
    store = Store(str(tmp_path))
    assert all((tmp_path / name).exists() for name in [*names, "scratch-of-mine"])
    assert not (tmp_path / "scratch-service-abc").exists(), "only the service's own temporary folders are deleted"
    assert store.unknown == sorted(names)
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert f"does not know {len(names)} files in its folder, which stay and count as used: files/00.zip, " in message
    assert all(name in message for name in names)


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").touch()
    for folder in ("file", "file/below"):
        with pytest.raises(UserError, match=rf"cannot use --folder '{tmp_path}/{folder}' \("):
            Store(str(tmp_path / folder))
    (tmp_path / "service").mkdir()
    (tmp_path / "service" / "service.sqlite").write_text("damaged" * 1000)
    with pytest.raises(UserError, match=r"service.sqlite cannot be used .*: restore it"):
        Store(str(tmp_path / "service"))


def test_a_result_whose_base_model_has_moved_names_it(tmp_path):
    store = Store(str(tmp_path / "service"))
    settings = {"flags": {}, "request": {}}
    job = Job("j", "a job", "f", "/gone/model", settings, "completed", 8, "2026-01-01T00:00:00", 0.0)
    (store.run_folder("j") / "final").mkdir(parents=True)
    with pytest.raises(HTTPException, match="409: cannot read the tokenizer of the base model '/gone/model'"):
        pack_result(store, job, tmp_path)


def test_finished_jobs_cost_little(tmp_path):
    """`GET /jobs` reads a job's metrics only if the metrics file has changed."""
    store = Store(str(tmp_path))
    (tmp_path / "f.zip").touch()
    file = store.add_file(tmp_path / "f.zip", "f.zip", {"rows": 1, "images": 1, "usable": 1, "problems": []})
    job = store.add_job("j", file["file_id"], "m", {}, 4)
    store.run_folder(job.job_id).mkdir()
    path = store.run_folder(job.job_id) / "metrics.jsonl"
    path.write_text('{"step": 1, "reward": 0.5, "loss": NaN}\n')
    progress = {"current_step": 1, "progress": 25.0, "loss": None, "reward": 0.5}
    scores = {"held_out_rows": 0, "score_before": None, "score_after": None}
    assert store.progress(job) == progress | {"answers": 0, "right_answers": 0} | scores
    mtime = path.stat().st_mtime_ns
    path.write_text('{"step": 2, "reward": 0.75, "loss": 1.0}\n')
    os.utime(path, ns=(mtime, mtime))
    assert store.progress(job)["current_step"] == 1
    os.utime(path, ns=(mtime + 1, mtime + 1))
    assert store.progress(job)["current_step"] == 2
    rows, position = store.metrics(job.job_id)
    assert [row["step"] for row in rows] == [2]
    with path.open("a") as file:
        file.write('{"step": 3}\n{"step": 4')  # the last line is incomplete
    rows, position = store.metrics(job.job_id, position)
    assert [row["step"] for row in rows] == [3]
    with path.open("a") as file:
        file.write("}\n")
    assert [row["step"] for row in store.metrics(job.job_id, position)[0]] == [4]


def ended_job(folder: pathlib.Path) -> tuple[Store, Job]:
    """Return a store with a cancelled job that has files."""
    store = Store(str(folder / "service"))
    (folder / "f.zip").touch()
    file = store.add_file(folder / "f.zip", "f.zip", {"rows": 1, "images": 1, "usable": 1, "problems": []})
    job = store.add_job("j", file["file_id"], "m", {}, 4)
    (store.run_folder(job.job_id) / "final").mkdir(parents=True)
    (store.run_folder(job.job_id) / "final" / "adapter_model.safetensors").write_bytes(bytes(1000))
    return store, store._update(job, status="cancelled")


def test_a_job_that_has_ended_can_be_deleted_and_no_other(tmp_path):
    """Its room is free then. Its data set and the other jobs stay."""
    store, job = ended_job(tmp_path)
    store.max_gigabytes = 1e-6
    with pytest.raises(HTTPException, match="delete data sets or jobs"):
        store.require_space(1)
    other = store.add_job("k", job.file_id, "m", {}, 4)
    for status in ("queued", "training"):
        store._update(other, status=status)
        with pytest.raises(HTTPException, match=r"409: the job has not ended: cancel it first$"):
            store.delete(other.job_id)
    with (store.job_folder(job.job_id) / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as its process holds it, which saves a checkpoint
        with pytest.raises(HTTPException, match=r"409: the job's process has not ended: try again in a moment$"):
            store.delete(job.job_id)
    store.delete(job.job_id)
    assert os.listdir(store.folder / "jobs") == [other.job_id] == [each.job_id for each in store.jobs()]
    assert len(store.files()) == 1
    store.require_space(1)
    with pytest.raises(HTTPException, match="404: no job"):
        store.delete(job.job_id)


def test_a_deletion_that_is_cut_off_can_be_repeated_after_a_new_start(tmp_path, monkeypatch, capsys):
    """The kill comes while the files are deleted, or before the row is."""
    store, job = ended_job(tmp_path)

    def killed(folder, **_):
        (folder / "run" / "final" / "adapter_model.safetensors").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", killed)
        store.delete(job.job_id)
    for leave in (lambda folder: None, shutil.rmtree):
        leave(store.job_folder(job.job_id))
        store.database.close()
        release_locks()
        store = Store(str(tmp_path / "service"))
        store.poll()
        assert job_info(store, store.job(job.job_id)).status == "cancelled" and not store.unknown
    store.job_folder(job.job_id).write_text("something else")  # what is no folder is not deleted
    with pytest.raises(HTTPException, match=f"409: jobs/{job.job_id} cannot be deleted: move it away"):
        store.delete(job.job_id)
    store.job_folder(job.job_id).unlink()
    store.delete(job.job_id)
    assert not store.jobs() and not capsys.readouterr().err


def test_a_job_counts_the_answers_of_its_newest_step(tmp_path):
    store, job = ended_job(tmp_path)
    job = dataclasses.replace(job, settings={"flags": {"num_generations": 8}})
    path = store.run_folder(job.job_id) / "metrics.jsonl"
    for row, counts in (({}, (0, 0)), ({"groups_drawn": 2, "frac_reward_full": 0.1875}, (3, 16))):
        path.write_text(json.dumps({"step": 1, "reward": 0.5} | row) + "\n")
        os.utime(path, ns=(len(row), len(row)))
        info = job_info(store, job)
        assert (info.right_answers, info.answers) == counts


@pytest.mark.parametrize(("pictures", "fraction", "steps"), [(39, 0.0, 5), (40, 0.2, 4), (640, 0.1, 72)])
def test_a_job_holds_out_rows_if_there_are_enough(tmp_path, pictures, fraction, steps):
    """A fifth of at least 40 pictures, and at most 64 of them."""
    store, app = Store(str(tmp_path / "service")), FastAPI()
    app.state.cfg = Config(model="owner/model")
    (tmp_path / "f.zip").touch()
    contents = {"rows": pictures, "images": pictures, "usable": pictures, "problems": []}
    file = store.add_file(tmp_path / "f.zip", "f.zip", contents)
    body = TrainRequest(
        job_name="j", data_file_id=file["file_id"], training_config=TrainingConfig(**QUICK | {"batch_size": 4})
    )
    assert train(Request({"type": "http", "app": app}), store, body).message == f"queued: {steps} steps"
    (job,) = store.jobs()
    held_out = [flag for flag in store._flags(job) if flag.startswith("--eval_data=")]
    assert held_out == ([f"--eval_data={fraction}"] if fraction else [])


def test_a_job_says_its_scores_before_and_after_on_the_held_out_rows(tmp_path):
    store, job = ended_job(tmp_path)
    path = store.run_folder(job.job_id) / "metrics.jsonl"
    before, step = {"step": 0, "eval/reward": 0.25, "eval/rows": 8}, {"step": 1, "reward": 1.0}
    for number, (rows, expected) in enumerate(
        (
            ([], (0, None, None)),
            ([before], (8, 0.25, None)),
            ([before, step], (8, 0.25, None)),
            ([before, step, {"step": 2, "reward": 1.0, "eval/reward": 0.5}], (8, 0.25, 0.5)),
        )
    ):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.utime(path, ns=(number, number))
        info = job_info(store, job)
        assert (info.held_out_rows, info.score_before, info.score_after) == expected


def test_the_same_request_resumes_an_ended_job(tmp_path):
    """A job is resumed only if it was cancelled or failed, and has the same name, file, model and request."""
    store = Store(str(tmp_path))
    (tmp_path / "f.zip").touch()
    counts = {"rows": 1, "images": 1, "usable": 1, "problems": []}
    request = {"name": "j", "file_id": store.add_file(tmp_path / "f.zip", "f.zip", counts)["file_id"], "model": "m"}
    request |= {"settings": {"flags": {}, "request": {"seed": 1}}, "total_steps": 4}
    job, _ = store.add_or_resume(**request)
    waiting, is_resumed = store.add_or_resume(**request)
    assert (is_resumed, waiting.job_id == job.job_id) == (False, False)
    store.cancel(job.job_id)
    for change in ({"name": "k"}, {"model": "n"}, {"settings": {"flags": {}, "request": {"seed": 2}}}):
        assert store.add_or_resume(**request | change)[1] is False
    resumed, is_resumed = store.add_or_resume(**request)
    assert (resumed.job_id, resumed.status, is_resumed) == (job.job_id, "queued", True)
    store._update(job, status="failed", error_message="e")
    assert store.add_or_resume(**request)[0].job_id == job.job_id
    assert store.job(job.job_id).error_message is None
    shutil.rmtree(store.job_folder(job.job_id))  # by an administrator who needs the space
    assert store._is_alive(store.job(job.job_id)) is False


def test_elsewhere_a_token_is_needed(tmp_path, tiny_model):
    service = Service(tmp_path / "service", tiny_model, "--host=0.0.0.0")
    try:
        service.call("GET", "/jobs", 401)
        service.call("GET", "/jobs", 401, headers={"Authorization": "Bearer wrong"})
        service.call("GET", "/", 401)
        log = (tmp_path / "service.log").read_text()
        token = log.split("token=")[1].split()[0]
        assert log.count(token) == 1
        service.call("GET", "/jobs", 200, headers={"Authorization": f"Bearer {token}"})
        visitor = requests.Session()
        assert visitor.get(f"{service.url}/?token={token}", timeout=10).status_code == 200
        assert visitor.get(f"{service.url}/jobs", timeout=10).status_code == 200  # authorised by the cookie
        visitor.cookies.clear()
        form = visitor.get(f"{service.url}/?token=wrong", headers={"Accept": "text/html"}, timeout=10)
        assert (form.status_code, "that one was wrong" in form.text) == (401, True)
    finally:
        end(service)


def test_a_token_of_any_letters_opens_the_page():
    """Some Base64 characters are escaped in URLs and cookies."""
    token = 'aGVsbG8/d29ybGQ+Zm9v+w==;"'
    quoted = urllib.parse.quote(token, safe="")
    access = AccessMiddleware(None, token, 1)

    def authorised(query: str = "", **headers: str) -> bool:
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        return access._authorised(Request({"type": "http", "query_string": query.encode(), "headers": encoded}))

    assert authorised(f"token={quoted}")
    assert authorised(cookie=f"a=b; token={quoted}")
    assert authorised(authorization=f"bearer {token}")
    access.token = "tökén"  # an HTTP client sends it as UTF-8, and the server reads the bytes as Latin-1
    assert authorised(authorization="bearer tökén")
    access.token = token
    assert not authorised("token=", cookie="token=x", authorization="Basic x")


def test_no_other_site_may_ask(shared):
    """Requests from other sites' pages are refused.

    So are requests to a host name that another site has pointed at this machine.
    """
    shared.call("GET", "/jobs", 403, headers={"Origin": "http://evil.example"})
    shared.call("GET", "/jobs", 403, headers={"Host": "evil.example"})
    shared.call("GET", "/jobs", 403, headers={"Origin": "http://[bad"})
    shared.call("GET", "/jobs", 200, headers={"Origin": shared.url})
    assert "403" in shared.call("GET", "/openapi.json", 200).json()["paths"]["/jobs"]["get"]["responses"]


def test_two_services_in_one_folder(service, tiny_model):
    command = [sys.executable, "-m", "apps.service", f"--folder={service.folder}", f"--port={free_port()}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "another service is running in" in done.stderr


# --- faults -----------------------------------------------------------------------------------------------------------


def uploads(service: Service) -> dict[str, bytes]:
    return {path.stem: path.read_bytes() for path in (service.folder / "files").iterdir()}


def use_copy_without_log(folder: pathlib.Path) -> None:
    """Replace the folder of a killed service by a copy of it without the database's write-ahead log."""
    shutil.copytree(folder, folder.with_name("copy"), ignore=shutil.ignore_patterns("*-wal", "*-shm"))
    shutil.rmtree(folder)
    folder.with_name("copy").rename(folder)


def empty_database(folder: pathlib.Path, *others: str) -> None:
    os.truncate(folder / "service.sqlite", 0)
    for name in others:
        (folder / f"service.sqlite{name}").unlink()


def execute(path: pathlib.Path, script: str) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.executescript(script)


LOST: dict[str, Callable[[pathlib.Path], None]] = {
    "a copy without the log": use_copy_without_log,
    "an empty database": lambda folder: empty_database(folder, "-wal", "-shm"),
    "an empty database with an empty log": lambda folder: [
        empty_database(folder, "-shm"),
        os.truncate(folder / "service.sqlite-wal", 0),
    ],
    "a database without rows": lambda folder: execute(folder / "service.sqlite", "DELETE FROM files"),
    "a new database": lambda folder: [
        (folder / f"service.sqlite{name}").unlink(missing_ok=True) or (folder / "service.sqlite").touch()
        for name in ("-wal", "-shm", "")
    ],
}


@pytest.mark.parametrize("loss", ["a new database", *slow(*list(LOST)[:-1])])
def test_a_database_that_lost_its_rows_costs_no_upload(service, archive, loss):
    file_ids = {service.upload(archive)["file_id"] for _ in range(3)}
    before = uploads(service)
    service.kill()
    LOST[loss](service.folder)
    service.start()
    assert uploads(service) == before and before.keys() == file_ids
    assert service.call("GET", "/files", 200).json() == []
    log = (service.folder.parent / "service.log").read_text()
    for file_id in file_ids:
        assert f"files/{file_id}.zip" in log.split("does not know")[1]
        detail = service.call("GET", f"/files/{file_id}/picture/0", 404).json()["detail"]
        assert detail == f"no file {file_id!r}: its ZIP is there, but service.sqlite does not know it"
    new = service.upload(archive)["file_id"]
    service.kill()
    service.start()
    assert uploads(service).keys() == file_ids | {new}


def test_an_empty_database_is_restored_from_its_log(service, archive):
    """SQLite would delete the log of a database file that was emptied, and with it every row."""
    file = service.upload(archive)
    service.kill()
    assert (service.folder / "service.sqlite-wal").stat().st_size > 0
    empty_database(service.folder)
    service.start()
    assert service.call("GET", "/files", 200).json() == [file]


def overwrite(path: pathlib.Path, start: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(content)


MALFORMED: dict[str, Callable[[pathlib.Path], object]] = {
    "text": lambda path: path.write_text("damaged" * 1000),
    "zeros": lambda path: path.write_bytes(bytes(8192)),
    "no header": lambda path: overwrite(path, 0, bytes(100)),
    "a damaged page": lambda path: overwrite(path, 4096, b"\xff" * 4096),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "a folder": lambda path: [path.unlink(), path.mkdir()],
    "another table": lambda path: execute(path, "DROP TABLE files; CREATE TABLE files (a)"),
    "a damaged row": lambda path: execute(path, "UPDATE files SET problems = '['"),
    "an empty row": lambda path: execute(path, "INSERT INTO jobs (job_id) VALUES ('x')"),
}


@pytest.mark.parametrize("damage", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_database_ends_in_one_line(tmp_path, tiny_model, archive, damage):
    store = Store(str(tmp_path / "service"))
    (tmp_path / "a.zip").write_bytes(archive)
    store.add_file(tmp_path / "a.zip", "a.zip", {"rows": 1, "images": 1, "usable": 1, "problems": []})
    store.database.close()
    release_locks()
    path = tmp_path / "service" / "service.sqlite"
    damage(path)
    before = path.read_bytes() if path.is_file() else None
    service = Service(tmp_path / "service", tiny_model)
    assert service.process.wait(10) == 2
    lines = (tmp_path / "service.log").read_text().splitlines()
    assert len(lines) == 1
    assert re.fullmatch(rf"error: {path} cannot be used \(.+\): restore it, or choose another --folder", lines[0])
    assert list(uploads(service).values()) == [archive]
    assert before is None or path.read_bytes() == before


@pytest.mark.parametrize("seconds", [0.02, 0.2, *slow(0.0, 0.05, 0.1, 0.4)])
def test_a_kill_during_an_upload_costs_no_earlier_one(service, archive, seconds):
    """The kill comes while bodies arrive, or while ZIPs are checked or stored."""
    file = service.upload(archive)
    with ThreadPoolExecutor(4) as pool:
        replies = [
            pool.submit(service.call, "POST", "/upload-data", files={"file": ("a.zip", archive)}) for _ in "1234"
        ]
        half = socket.create_connection(("127.0.0.1", service.port))
        half.sendall(upload_head(len(archive)) + archive[: len(archive) // 2])
        time.sleep(seconds)
        service.kill()
        stored = [reply.result().json()["file_id"] for reply in replies if not reply.exception()]
    half.close()
    before = uploads(service)
    service.start()
    assert uploads(service) == before
    assert {file["file_id"], *stored} <= {each["file_id"] for each in service.call("GET", "/files", 200).json()}
    assert {file["file_id"], *stored} <= before.keys()
    assert not list(service.folder.glob("scratch-*"))


def upload_head(size: int | None) -> bytes:
    """Return the start of a request for an upload of `size` bytes, or of a size that is not announced."""
    length = f"Content-Length: {size}" if size is not None else "Transfer-Encoding: chunked"
    head = f"POST /upload-data HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: multipart/form-data; boundary=x\r\n{length}"
    return head.encode() + b"\r\n\r\n"


# --- the quota while uploads arrive


def padded(archive: bytes, size: int) -> bytes:
    """Return a ZIP like `archive` of about `size` bytes."""
    data = io.BytesIO(archive)
    with zipfile.ZipFile(data, "a") as padded_zip:
        padded_zip.writestr("padding", os.urandom(size - len(archive)))
    return data.getvalue()


def chunked(archive: bytes) -> Iterator[bytes]:
    """Yield the body of an upload whose size is not announced."""
    yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.zip"\r\n\r\n'
    yield from (archive[i : i + 100_000] for i in range(0, len(archive), 100_000))
    yield b"\r\n--x--\r\n"


@pytest.fixture(scope="module")
def limited(tmp_path_factory, tiny_model) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("limited") / "service", tiny_model, "--max_storage=0.02")
    yield service
    end(service)


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize(
    ("count", "megabytes", "accepted"), [(6, 15, 1), (6, 9, 2), (6, 3, 6), (8, 6, 3), (3, 19, 1), (2, 21, 0)]
)
def test_uploads_at_once_never_exceed_the_quota(limited, archive, count, megabytes, accepted, announced):
    content = padded(archive, megabytes * 1_000_000)
    chunks = {"headers": {"Content-Type": "multipart/form-data; boundary=x"}}

    def send(_: int) -> requests.Response:
        body = {"files": {"file": ("a.zip", content)}} if announced else chunks | {"data": chunked(content)}
        return limited.call("POST", "/upload-data", **body)

    with ThreadPoolExecutor(count) as pool:
        replies = list(pool.map(send, range(count)))
    stored = [reply.json()["file_id"] for reply in replies if reply.status_code == 200]
    assert {reply.status_code for reply in replies} <= {200, 507}
    assert uploads(limited).keys() == set(stored)
    assert sum(map(len, uploads(limited).values())) <= 20_000_000
    # uploads of unannounced size may refuse each other, because each has reserved a part
    assert len(stored) == accepted or (not announced and len(stored) < accepted)
    for file_id in stored:
        limited.call("DELETE", f"/files/{file_id}", 200)
    after = limited.upload(padded(archive, 19_000_000))  # every reservation was given back
    limited.call("DELETE", f"/files/{after['file_id']}", 200)


@pytest.mark.parametrize("sent", [0, 100, 1_000_000, 10_000_000, 14_999_999])
@pytest.mark.parametrize("announced", [True, False])
def test_an_upload_that_is_cut_off_gives_its_room_back(limited, archive, sent, announced):
    content = padded(archive, 15_000_000)
    body = b"".join(chunked(content))

    def is_stored() -> bool:
        """Send the upload whole, and delete it again if it was stored."""
        reply = limited.call("POST", "/upload-data", files={"file": content})
        assert reply.status_code in (200, 507), reply.text
        if reply.status_code == 200:
            limited.call("DELETE", f"/files/{reply.json()['file_id']}", 200)
        return reply.status_code == 200

    with contextlib.ExitStack() as clients:
        for _ in range(20):
            client = clients.enter_context(socket.create_connection(("127.0.0.1", limited.port)))
            client.sendall(upload_head(len(body) if announced else None))
            part = body[:sent]
            client.sendall(part if announced or not part else f"{sent:x}\r\n".encode() + part)
            # the whole upload may overtake this one, which is then refused itself and must be sent again
            if not announced or not is_stored():
                break
        else:
            raise AssertionError("the upload reserved no room")
    wait_for(is_stored, 20)
    assert not uploads(limited)
    assert not limited.call("GET", "/files", 200).json()


def test_a_refused_upload_gives_its_room_back(limited, archive):
    for content in (b"", b"no zip", os.urandom(15_000_000), padded(archive, 15_000_000)[:-100], zipped(ROOT / "docs")):
        assert limited.call("POST", "/upload-data", files={"file": ("a.zip", content)}).status_code in (400, 422)
    limited.call("POST", "/upload-data", 422, data={"file": "x" * 15_000})
    file = limited.upload(padded(archive, 19_000_000))
    limited.call("DELETE", f"/files/{file['file_id']}", 200)


LOCKS = [
    "BEGIN IMMEDIATE",
    "BEGIN EXCLUSIVE",
    "BEGIN; DELETE FROM files",
    "BEGIN; DELETE FROM jobs; DELETE FROM files",
    "BEGIN IMMEDIATE; INSERT INTO jobs (job_id) VALUES ('x')",
]


@pytest.mark.parametrize("lock", [LOCKS[0], *slow(*LOCKS[1:])])
def test_a_locked_database_refuses_uploads_soon(service, archive, lock):
    kept = service.upload(archive)
    with contextlib.closing(sqlite3.connect(service.folder / "service.sqlite", isolation_level=None)) as other:
        other.executescript(lock)
        start = time.monotonic()
        with ThreadPoolExecutor(6) as pool:
            replies = list(pool.map(lambda _: service.call("POST", "/upload-data", files={"file": archive}), "123456"))
        body = {"job_name": "j", "data_file_id": kept["file_id"]}
        replies.append(service.call("POST", "/train", json=body))
        assert time.monotonic() - start < 20
        assert [reply.status_code for reply in replies] == [503] * 7
        assert "another program has locked" in replies[0].json()["detail"]
        assert service.call("GET", "/files", 200).json() == [kept]
        assert uploads(service).keys() == {kept["file_id"]}
        assert not list((service.folder / "jobs").iterdir())
        other.rollback()
    service.upload(archive)


def test_a_locked_database_is_named_at_the_start(service, tiny_model):
    service.kill()
    with contextlib.closing(sqlite3.connect(service.folder / "service.sqlite", isolation_level=None)) as other:
        other.executescript("PRAGMA locking_mode = EXCLUSIVE; PRAGMA journal_mode = DELETE; BEGIN EXCLUSIVE")
        service.start()
        assert service.process.wait(20) == 2
    last = (service.folder.parent / "service.log").read_text().splitlines()[-1]
    assert last.endswith("(database is locked): close the program that has locked it, or choose another --folder")


# --- damaged files of a job


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_model, archive) -> Iterator[tuple[Service, str, str]]:
    """Yield a service with two completed jobs, and the ids of the jobs."""
    folder = tmp_path_factory.mktemp("finished")
    store = Store(str(folder / "service"))
    (folder / "a.zip").write_bytes(archive)
    file = store.add_file(folder / "a.zip", "a.zip", {"rows": 8, "images": 8, "usable": 8, "problems": []})
    jobs = []
    for name in ("damaged", "whole"):
        settings = {"flags": {"max_pixels": 128**2}, "request": {"job_name": name}}
        job = store.add_job(name, file["file_id"], tiny_model, settings, 8)
        store._update(job, status="completed")
        run = store.run_folder(job.job_id)
        (run / "final").mkdir(parents=True)
        (run / "config.json").write_text(json.dumps({"total_steps": 8}) + "\n")
        rows = [{"step": step, "reward": 0.5, "loss": 0.1, "step_time": 1.0} for step in range(1, 9)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        rows = [{"step": 5, "images": [], "completions": []}]
        (run / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (run / "completions.html").write_text("<p>sampled")
        (run / "final" / "adapter_config.json").write_text('{"r": 4}')
        save_file({"a": numpy.zeros(4)}, run / "final" / "adapter_model.safetensors")
        (store.job_folder(job.job_id) / "log.txt").write_text("step 8/8\n")
        jobs.append(job.job_id)
    store.database.close()
    release_locks()
    service = Service(folder / "service", tiny_model)
    yield service, *jobs
    end(service)


@contextlib.contextmanager
def damaged_file(path: pathlib.Path, content: bytes | None) -> Iterator[None]:
    """Give a file other content, or put a folder in its place."""
    before = path.read_bytes()
    path.unlink()
    path.mkdir() if content is None else path.write_bytes(content)
    try:
        yield
    finally:
        path.rmdir() if content is None else path.unlink()
        path.write_bytes(before)


def check_job(service: Service, job_id: str, download: int = 200) -> tuple[dict, list[dict]]:
    """Call everything that reads the files of a job. Return the job and its metrics."""
    job = service.job(job_id)
    wait_for(lambda: job in service.call("GET", "/jobs", 200).json(), 5)  # the list may be a quarter of a second old
    rows = service.call("GET", f"/jobs/{job_id}/metrics", 200).json()
    with service.call("GET", f"/jobs/{job_id}/events", 200, stream=True) as stream:
        lines = list(stream.iter_lines(decode_unicode=True))
    sent = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert sent == [job, *([rows] if rows else [])]
    service.call("GET", f"/jobs/{job_id}/logs", 200)
    service.call("GET", f"/jobs/{job_id}/completions", 200)
    reply = service.call("GET", f"/jobs/{job_id}/download", download)
    if download == 200:
        history = json.loads(zipfile.ZipFile(io.BytesIO(reply.content)).read("trainer_state.json"))["log_history"]
        assert history == rows
    return job, rows


BAD_LINES = [
    b"garbage", b"", b"   ", b"\0" * 40, b"\xff\xfe\x80", b"5", b"[]", b"null", b'"text"', b"{}", b'{"step": 4',
    b'{"step": "4"}', b'{"step": null}', b'{"step": 4.5}', b'{"step": -4}', b'{"step": 4, "loss": "low"}',
    b'{"step": 4, "reward": [1]}', b'{"step": 4, "loss": 1e999}', b'{"step": 1' + b"0" * 400 + b"}",
    b'{"step": ' + b"9" * 5000 + b"}", b"[" * 100_000, b'{"loss": 0.5}', b'{"step": 4, "loss": {"a": 1}}',
]  # fmt: skip


@pytest.mark.parametrize("place", [*slow(1, 4), 8])
@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: repr(line[:20]))
def test_a_damaged_line_of_metrics_leaves_the_others(finished, line, place):
    service, damaged, whole = finished
    path = service.folder / "jobs" / damaged / "run" / "metrics.jsonl"
    lines = path.read_bytes().splitlines()
    lines[place - 1] = line
    with damaged_file(path, b"\n".join([*lines, b""])):
        job, rows = check_job(service, damaged)
        assert [row["step"] for row in rows] == [step for step in range(1, 9) if step != place]
        assert job["damage"] == f"metrics.jsonl has the damaged line {place} (1 in total)"
        assert job["current_step"] == (7 if place == 8 else 8)
        assert check_job(service, whole)[0]["damage"] is None


def test_half_a_surrogate_pair_in_a_name_is_answered(finished):
    service, damaged, _ = finished
    path = service.folder / "jobs" / damaged / "run" / "metrics.jsonl"
    with damaged_file(path, b'{"step": 1, "\\ud800": 1.0}\n{"step": 2, "loss": NaN, "reward": -Infinity}\n'):
        job, rows = check_job(service, damaged)
        assert (job["current_step"], job["loss"], job["reward"], len(rows)) == (2, None, None, 2)


NO_NUMBER = b'{"total_steps": "many"}'
GARBAGE = [b"garbage", b"", NO_NUMBER, None, *slow(b"\0" * 4000, b"\xff\xfe", b"[1]", b"5", b"null")]
NAMES = ["config.json", "metrics.jsonl", "final/adapter_config.json"]
NAMES += ["completions.jsonl"] if extra("pages") else []


@pytest.mark.parametrize("content", GARBAGE, ids=lambda content: repr(content and content[:24]))
@pytest.mark.parametrize("name", [*NAMES, "completions.html", "final/adapter_model.safetensors", "../log.txt"])
def test_any_damaged_file_of_a_job_leaves_the_rest(finished, name, content):
    service, damaged, whole = finished
    is_valid = name.endswith("config.json") and content == NO_NUMBER  # the number of steps is not taken from it
    status = 409 if name.startswith("final/") and not is_valid else 200
    with damaged_file(service.folder / "jobs" / damaged / "run" / name, content):
        job, _ = check_job(service, damaged, status)
        if not is_valid and name not in ("completions.html", "../log.txt") and (content or not name.endswith("l")):
            assert job["damage"].startswith(name)
        assert check_job(service, whole)[0]["damage"] is None
    assert check_job(service, damaged)[0]["damage"] is None


IN_THE_WAY: dict[str, Callable[[pathlib.Path], object]] = {
    "a folder as lock": lambda folder: (folder / "lock").mkdir(),
    "a folder as log": lambda folder: (folder / "log.txt").mkdir(),
    "a file as folder": lambda folder: [folder.rmdir(), folder.write_text("mine")],
    "a bad config": lambda folder: [(folder / "run").mkdir(), (folder / "run" / "config.json").write_text("[1]")],
    "no config object": lambda folder: [
        (folder / "run").mkdir(), (folder / "run" / "config.json").write_text('{"total_steps": "many"}')
    ],
    "a bad pid": lambda folder: (folder / "pid-0").write_text("none"),
}  # fmt: skip


@pytest.mark.parametrize("spoil", IN_THE_WAY.values(), ids=IN_THE_WAY)
def test_a_spoilt_job_does_not_stop_the_next(tmp_path, spoil):
    """The jobs' processes do not run: a job that was training has ended, and the next one is started and ends."""
    store = Store(str(tmp_path / "service"))
    (tmp_path / "a.zip").touch()
    file = store.add_file(tmp_path / "a.zip", "a.zip", {"rows": 8, "images": 8, "usable": 8, "problems": []})
    for status in ("training", "queued"):
        spoilt, following = (store.add_job(name, file["file_id"], "m", {"flags": {}}, 8) for name in "ab")
        spoil(store.job_folder(spoilt.job_id))
        store._update(spoilt, status=status)
        if status == "training":
            (store.run_folder(following.job_id) / "final").mkdir(parents=True)
        store._update(following, status="training" if status == "training" else "cancelled")
        store.poll()
        spoilt, following = store.job(spoilt.job_id), store.job(following.job_id)
        assert following.status in ("completed", "cancelled")
        job_info(store, spoilt)
        if spoilt.status == "failed":
            in_the_way = r"jobs/\S+ cannot be used \(.+\): move it away, then resume"
            assert re.search(f"{in_the_way}|was killed at step 0", spoilt.error_message)
        for job in (spoilt, following):
            store._update(job, status="cancelled")


@pytest.mark.slow
def test_kills_of_the_service_and_of_the_job(service, archive):
    """Kill the service and a job ten times each (or `KILLS` times) at random moments. No job is lost, every status is
    valid, and all jobs complete in the end."""
    rng = random.Random(1)
    file = service.upload(archive)
    kills = int(os.environ.get("KILLS", "10"))
    jobs = [service.train(file["file_id"], seed=i) for i in range(min(kills, 2))]
    for _ in range(kills):
        time.sleep(rng.uniform(0.2, 4))
        service.kill()
        time.sleep(rng.uniform(0, 1))
        service.start()
        listed = {job["job_id"]: job for job in service.call("GET", "/jobs", 200).json()}
        assert set(listed) == set(jobs)
        assert all(listed[job_id]["status"] in ("training", "completed") for job_id in jobs), listed
        time.sleep(rng.uniform(0.2, 4))
        kill_a_job(service, jobs)
        for job_id in jobs:
            if service.job(job_id)["status"] == "failed":
                assert "was killed at step" in service.job(job_id)["error_message"]
                service.call("POST", f"/jobs/{job_id}/resume", 200)
    for job_id in jobs:
        job = service.wait(job_id, lambda job: job["status"] in TRAINED)
        if job["status"] == "failed":
            service.call("POST", f"/jobs/{job_id}/resume", 200)
            job = service.wait(job_id, lambda job: job["status"] in TRAINED)
        assert job["status"] == "completed", job
        steps = [row["step"] for row in service.call("GET", f"/jobs/{job_id}/metrics", 200).json()]
        assert steps == list(range(1, 9))


def kill_a_job(service: Service, jobs: list[str]) -> None:
    for job_id in jobs:
        job = service.job(job_id)
        if job["status"] == "training" and not job["waiting"]:
            pids = sorted((service.folder / "jobs" / job_id).glob("pid-*"), key=lambda path: path.stat().st_mtime)
            with contextlib.suppress(OSError, ValueError, IndexError):
                os.kill(int(pids[-1].read_text()), signal.SIGKILL)
                service.wait(job_id, lambda job: job["status"] != "training", 20)


# --- the page ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def browser():
    if (path := shutil.which("chromium") or shutil.which("google-chrome")) is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as player:
        chromium = player.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


LONG = "x" * 58 + ".zip"  # 62 characters in which no line break is possible


def drop(page, name: str, content: bytes) -> None:
    """Drop a file onto the page's drop target."""
    text = base64.b64encode(content).decode()
    script = """([name, text]) => {
        const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
        const dropped = new DataTransfer();
        dropped.items.add(new File([bytes], name, { type: "application/zip" }));
        const event = new DragEvent("drop", { dataTransfer: dropped, bubbles: true, cancelable: true });
        document.querySelector("#drop").dispatchEvent(event);
    }"""
    page.evaluate(script, [name, text])


# The pages are awaited with page.evaluate, because wait_for_function needs eval, which the page's policy forbids.


def check_layout(page, state: str, folder: pathlib.Path) -> None:
    """Take screenshots at desktop and phone size. The page must not scroll sideways."""
    for width, height in ((1280, 900), (380, 800)):
        page.set_viewport_size({"width": width, "height": height})
        page.screenshot(path=folder / f"{state}-{width}.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), (state, width)
    if axe := os.environ.get("AXE"):  # the file axe.min.js of the npm package axe-core
        for frame in page.frames:
            frame.evaluate(pathlib.Path(axe).read_text())
        found = page.evaluate("axe.run()")["violations"]
        assert not [problem["id"] for problem in found if problem["impact"] in ("serious", "critical")], state


def refusals(page) -> list[str]:
    return page.locator("#train label .bad:not(:empty)").all_text_contents()


@needs("parts/pages")
def test_the_page_from_upload_to_answer(service, archive, browser, tmp_path, request):
    """Drop a ZIP, start, watch and cancel, as a user would; with --slow, also resume, download and ask.

    No request leaves the machine.
    """
    shots = pathlib.Path(os.environ.get("SCREENSHOTS", tmp_path))
    page = browser.new_page(viewport={"width": 900, "height": 1400})
    requested: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda line: errors.append(line.text) if "Content Security Policy" in line.text else None)
    page.goto(service.url)
    check_layout(page, "empty", shots)
    page.click("text=Start training")
    assert refusals(page) == ["upload pictures first"]
    drop(page, LONG, archive)
    page.wait_for_selector("text=16 rows, 16 pictures")
    wait_for(lambda: page.evaluate("document.querySelectorAll('.pictures img[src^=blob]').length == 8"), 30)
    check_layout(page, "uploaded", shots)
    page.fill("[name=job_name]", "  ")
    page.fill("[name=num_epochs]", "")
    page.click("summary:has-text('Expert settings')")
    page.fill("[name=seed]", "")
    page.click("summary:has-text('Expert settings')")
    page.click("text=Start training")
    assert refusals(page) == ["this field is required", "enter a number", "enter a number"]
    page.fill("[name=job_name]", "n" * 200)
    page.fill("[name=seed]", "43")  # the page has reopened the expert settings to show the error
    page.fill("[name=num_epochs]", "1")
    for name, value in {"num_generations": "4", "r": "4", "lora_alpha": "8", "learning_rate": "0.001"}.items():
        page.fill(f"[name={name}]", value)
    page.uncheck("[name=use_4bit]")
    check_layout(page, "settings", shots)
    assert refusals(page) == []
    page.click("text=Start training")
    wait_for(lambda: page.evaluate("Number(document.querySelector('#reward').dataset.points) >= 2"), 120)
    check_layout(page, "training", shots)
    assert page.evaluate("() => { const b = document.querySelector('#cancel'); b.click(); return b.disabled; }")
    page.wait_for_selector("#status:has-text('cancelled')", timeout=60_000)
    points_when_cancelled = int(page.get_attribute("#reward", "data-points"))
    page.reload()  # the same job is shown after a reload
    page.wait_for_selector("#status:has-text('cancelled')")
    if request.config.getoption("--slow"):
        finish_on_page(page, archive, tmp_path, points_when_cancelled)
        check_layout(page, "completed", shots)
        page.on("dialog", lambda dialog: dialog.accept())
        page.click("text=Delete these pictures")
        wait_for(lambda: page.evaluate("!document.querySelector('#files').children.length"), 30)
    assert not errors
    assert all(url.startswith((service.url, "blob:", "data:", "about:srcdoc")) for url in requested), requested


def finish_on_page(page, archive: bytes, folder: pathlib.Path, points_when_cancelled: int) -> None:
    """Resume the cancelled job, wait for its end, download the adapter and ask the model about a picture."""
    page.click("#resume")
    page.wait_for_selector("#status:has-text('completed')", timeout=180_000)
    wait_for(lambda: page.evaluate("document.querySelector('#reward').dataset.points == 8"), 30)
    assert points_when_cancelled < 8
    with page.expect_download() as download:
        page.click("#download")
    assert "adapter_model.safetensors" in zipfile.ZipFile(download.value.path()).namelist()
    (folder / "p.png").write_bytes(zipfile.ZipFile(io.BytesIO(archive)).read("images/00000.png"))
    page.set_input_files("#predict [name=picture]", folder / "p.png")
    page.click("#predict button")
    page.wait_for_selector("#predict button:not([disabled])", timeout=120_000)
    assert page.text_content("#said")
    picture = page.frame_locator("#completions").locator("article img").first
    picture.wait_for(timeout=20_000)
    assert picture.evaluate("image => image.naturalWidth")


def fake_job(name: str, status: str, step: int = 0, **more) -> dict:
    """Return a job as the service reports it."""
    job = {"job_id": name, "job_name": f"job {name}", "status": status, "current_step": step, "total_steps": 20_000}
    job |= {"progress": step / 200, "loss": -1e-9, "reward": -1e-9, "stopping": False, "error_message": None}
    return job | {"created_at": "2026-11-21T12:00:00", "output_dir": "", "waiting": False} | more


def fake_responses(page, jobs: list[dict], rows: list[dict], completions: str = "<p>Nothing") -> None:
    """Replace the service's responses about jobs with `jobs`, `rows` and a page of completions.

    The event streams end immediately.
    """
    for job in jobs:
        lines = [f"event: job\ndata: {json.dumps(job)}\n\n", f"event: metrics\ndata: {json.dumps(rows)}\n\n"]
        headers = {"Content-Type": "text/event-stream"}
        response = {"body": "".join(lines), "headers": headers}
        page.route(f"**/jobs/{job['job_id']}/events", lambda route, *, response=response: route.fulfill(**response))
        page.route(f"**/jobs/{job['job_id']}/completions", lambda route: route.fulfill(body=completions))
    page.route("**/jobs", lambda route: route.fulfill(json=jobs))


def contrast(colour: str, background: tuple[int, ...], opacity: float = 1.0) -> float:
    """Return the contrast of "rgb(…)" on a background, as WCAG 2 defines it."""
    ink = [opacity * int(c) + (1 - opacity) * b for c, b in zip(re.findall(r"\d+", colour), background)]
    darker, lighter = sorted(0.2126 * red + 0.7152 * green + 0.0722 * blue for red, green, blue in (
        [c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb] for rgb in (ink, background)
    ))  # fmt: skip
    return (lighter + 0.05) / (darker + 0.05)


SEEN = """() => [
    [...document.querySelectorAll("main *")].map((e) => getComputedStyle(e)).filter((s) => parseFloat(s.borderTopWidth))
        .map((s) => [s.borderTopColor, 1]),
    [...document.querySelectorAll("polyline")].map((e) => getComputedStyle(e)).map((s) => [s.stroke, +s.strokeOpacity]),
]"""


@needs("parts/pages")
def test_the_page_shows_a_long_job_at_once(shared, browser, tmp_path):
    """A job's 20,000 steps appear within two seconds. A repeated step replaces the earlier one.

    Zero has no minus sign. Borders and curves can be seen. A long path hides no answer, on a phone neither.
    """
    from parts.pages import report

    page = browser.new_page()
    rows = [{"step": i + 1, "reward": i / 20_000, "loss": -1e-9, "step_time": 1.0} for i in range(20_000)]
    group = {"step": 5, "question": "How many?", "answer": "3", "source": f"/{'x' * 200}/a.zip/main.csv row 3"}
    group |= {"images": ["data:,"], "completions": [{"text": "3", "reward": 1.0, "advantage": 0.0}]}
    (tmp_path / "completions.jsonl").write_text(json.dumps(group) + "\n")
    report.write_page(tmp_path)
    scores = {"held_out_rows": 8, "score_before": 0.25, "score_after": 0.5}
    job = fake_job("a", "completed", 20_000, answers=16, right_answers=3, **scores)
    fake_responses(page, [job], [*rows, *rows[10_000:]], (tmp_path / "completions.html").read_text())
    page.goto(shared.url)
    wait_for(lambda: page.evaluate("document.querySelector('#reward').dataset.points == 20000"), 2)
    assert page.evaluate("document.querySelector('#reward polyline').points.numberOfItems") <= 301
    assert "#a" in page.url
    page.click("text=For experts")
    facts = page.inner_text("#facts")
    assert "-0" not in facts and "5.6 hours" in facts and "0.00 · 3 of 16 exactly right" in facts
    assert "Score on 8 rows held out" in facts and "0.25 → 0.50" in facts
    wait_for(lambda: page.evaluate("document.querySelector('#loss').childElementCount"), 5)
    borders, curves = page.evaluate(SEEN)
    assert len(borders) > 20 and len(curves) == 4
    assert min(contrast(*seen) for seen in [(colour, (243, 245, 247), 1) for colour, _ in borders]) >= 3
    assert min(contrast(colour, (250, 251, 252), opacity) for colour, opacity in curves) >= 3
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 844})
        page.goto(f"file://{tmp_path}/completions.html")
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        answer = page.locator("td.text").bounding_box()
        assert answer["x"] + answer["width"] <= width and answer["y"] < 844
        page.goto(shared.url)
        answer = page.frame_locator("#completions").locator("td.text")
        answer.wait_for(timeout=20_000)
        frame, cell = page.locator("#completions").bounding_box(), answer.bounding_box()
        assert cell["y"] + cell["height"] <= frame["y"] + frame["height"], "the answer must be in sight"


def test_the_page_tells_how_jobs_stand(shared, browser):
    """The page shows the queue, a job that is stopping, and a connection that is lost and restored."""
    page = browser.new_page()
    jobs = [fake_job("a", "completed", 20_000), fake_job("b", "training", 5, stopping=True)]
    jobs.append(fake_job("c", "training", waiting=True))
    fake_responses(page, [*jobs, fake_job("d", "training", waiting=True)], [])
    page.goto(shared.url)
    page.wait_for_selector("#note:has-text('saves what it has learned')")
    assert page.url.endswith("#b"), "without a job in the URL, the page must show the job that is training"
    assert page.is_disabled("#cancel") and page.is_hidden("#delete")
    assert [item.split(" · ")[1] for item in page.locator("#jobs small").all_text_contents()] == [
        "2nd in line",
        "1st in line",
        "step 5 of 20000",
        "step 20000 of 20000",
    ]
    page.click("text=job d")
    page.wait_for_selector("#facts:has-text('2nd in line')")
    page.goto(f"{shared.url}/#a")  # as when the user follows a link or goes back in the browser
    page.wait_for_selector("#status:has-text('completed')")
    page.wait_for_selector("#lost:empty", state="attached")
    delete_on_page(page, jobs)
    page.unroute("**/jobs")
    page.route("**/jobs", lambda route: route.abort())
    page.wait_for_selector("#lost:has-text('trying again')", timeout=10_000)
    page.unroute("**/jobs")
    fake_responses(page, jobs[1:], [])
    page.wait_for_selector("#lost:empty", state="attached", timeout=10_000)


def delete_on_page(page, jobs: list[dict]) -> None:
    """Delete the first job, at the second attempt. The page then shows the job that is training."""
    page.once("dialog", lambda dialog: dialog.dismiss())
    page.click("#delete")
    refusal = {"status": 409, "json": {"detail": "not now"}}
    page.route("**/jobs/a/delete", lambda route: route.fulfill(**refusal))
    page.on("dialog", lambda dialog: dialog.accept())
    page.click("#delete")
    page.wait_for_selector("#wrong:has-text('not now')")
    page.unroute("**/jobs/a/delete")
    page.route("**/jobs/a/delete", lambda route: route.fulfill(json={"message": "deleted"}))
    page.unroute("**/jobs")
    page.route("**/jobs", lambda route: route.fulfill(json=jobs[1:]))
    page.click("#delete")
    page.wait_for_selector("#status:has-text('stopping')")
    assert page.url.endswith("#b") and not page.locator("#jobs [href='#a']").count()
