"""The object-counting service, over HTTP and on a web page: upload images, run training jobs, download the results.

    ./run.sh serve                                       # http://127.0.0.1:8000, API reference at /docs
    GRPO_TOKEN=SECRET python -m apps.service --host 0.0.0.0   # reachable from other machines, with a token

Each job is a grpo.py process that keeps running when the service ends (`jobs.py`); a restarted service finds the job
again. One job trains at a time, and the others wait in a queue.
"""

import asyncio
import contextlib
import dataclasses
import errno
import functools
import json
import logging
import math
import os
import pathlib
import re
import secrets
import shutil
import socket
import sqlite3
import string
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import zipfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any, BinaryIO

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, File, Form, Header, HTTPException, Path, Request, UploadFile
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent
from fastapi_offline import FastAPIOffline
from starlette.datastructures import State

from apps.service.connections import Connection, max_connections
from apps.service.jobs import ADAPTER, ROOT, Job, Store
from apps.service.middleware import LOCAL, AccessMiddleware, OncePerSecond, limit_bodies
from apps.service.schema import FileInfo, JobInfo, Started, TrainRequest
from apps.service.uploads import DRAW_THUMBNAIL, FUNCTIONS, INSPECT_ZIP, TO_PNG
from common import cli
from common.errors import CallFailed, UserError, require
from common.records import TAG
from grading.answers import without_marks
from grading.calls import call
from parts.workers import WorkerPool

PAGE = ROOT / "apps" / "service" / "page"
INSPECT_TIMEOUT = 120.0  # seconds to check a ZIP
INSPECTORS = 2  # number of ZIPs and images that can be checked or decoded at the same time
MAX_ERRORS = 20  # maximum number of invalid fields that a response lists
MIN_IMAGES, MAX_HELD_OUT = 40, 64  # with so many images, a fifth of them is held out, but at most so many
ANSWER_TIMEOUT = 600.0  # seconds for a trained model to answer a question
TEMPERATURE_NOTE = (
    "the completions are sampled at temperature {:g}, because GRPO learns only from completions that differ; "
    "training_config.temperature changes it"
)
RESUMED = (
    "queued again: this job has the same name and settings and was cancelled or had failed, so it resumes from its "
    "last checkpoint; use another job_name to start anew"
)
log = logging.getLogger("serve")


@dataclass
class Config:
    """Run the training service."""

    host: str = "127.0.0.1"
    """Address to listen on; an address that other machines can reach requires a token."""
    port: int = 8000
    """Port to listen on."""
    folder: str = "runs/service"
    """Folder of the uploaded files, the jobs and the database."""
    model: str = "Qwen/Qwen2.5-VL-3B-Instruct"
    """Default base model of a job."""
    model_folders: tuple[str, ...] = ()
    """Folders with additional models that a job may use; models on the hub are always allowed."""
    token: str | None = None
    """Token that callers send as `Authorization: Bearer TOKEN`; generated and printed if required but not given. Other
    users of this machine can see this flag in the list of processes; prefer `token_file` or the variable GRPO_TOKEN."""
    token_file: str | None = None
    """File that holds the token."""
    max_upload: float = 2.0
    """Maximum size of an uploaded ZIP in GB."""
    max_storage: float = 100.0
    """Maximum size of all uploads and jobs together in GB. Above this size, uploads and new jobs are refused."""

    def __post_init__(self) -> None:
        require(0 < self.port < 65536, "port must be between 1 and 65535")
        for name in ("max_upload", "max_storage"):
            require(0 < getattr(self, name) < 1e6, f"{name} must be above 0 and below a million")


ERRORS = {status: {"description": HTTPStatus(status).phrase} for status in (400, 401, 403, 404, 409, 413, 503, 507)}
api = APIRouter(responses=ERRORS)


async def get_store(request: Request) -> Store:
    """Return the store of files and jobs."""
    return request.app.state.store


StoreDep = Annotated[Store, Depends(get_store)]


async def get_job(store: StoreDep, job_id: str) -> Job:
    """Return the job that the URL names."""
    return store.job(job_id)


JobDep = Annotated[Job, Depends(get_job)]


def make_scratch(store: StoreDep) -> Iterator[pathlib.Path]:
    """Yield a temporary folder, which is deleted after the response has been sent."""
    with tempfile.TemporaryDirectory(prefix="scratch-service-", dir=store.folder) as folder:
        yield pathlib.Path(folder)


ScratchDep = Annotated[pathlib.Path, Depends(make_scratch)]


def job_info(store: Store, job: Job, newest: bool = False) -> JobInfo:
    """Return a job with its progress. With `newest`, only the newest lines of its files are checked for damage."""
    stopping = job.status == "training" and job.cancelled_at is not None
    shown = {"status": job.public_status, "waiting": job.waiting, "stopping": stopping}
    shown["damage"] = store.damage(job, newest=newest)
    return JobInfo(**vars(job) | store.progress(job) | shown, output_dir=str(store.run_folder(job.job_id)))


def started(job: Job, message: str, note: str | None = None) -> Started:
    """Return the response to a request that has changed a job."""
    return Started(job_id=job.job_id, message=message, status=job.public_status, waiting=job.waiting, note=note)


# --- data -------------------------------------------------------------------------------------------------------------


@api.get("/data-format", response_class=FileResponse)
def data_format() -> FileResponse:
    """Return the required format of a data set."""
    return FileResponse(PAGE / "data-format.json")


@api.post("/upload-data", response_model=FileInfo)
async def upload_data(
    request: Request, scratch: ScratchDep, file: Annotated[UploadFile, File(description="a ZIP")]
) -> dict:
    """Store and check a ZIP with main.csv and images/. Return its row and image counts and its first bad rows."""
    state = request.app.state
    async with state.inspectors:
        return await run_in_threadpool(store_upload, state, scratch / "data.zip", file, request.state.file_id)


def store_upload(state: State, path: pathlib.Path, file: UploadFile, file_id: str) -> dict:
    """Write an uploaded ZIP to `path`, check it and add it to the store. Raises HTTPException if it is unusable."""
    with path.open("wb") as target:
        shutil.copyfileobj(file.file, target)
    name = (file.filename or "").replace("\\", "/").rpartition("/")[2][:200] or "data.zip"
    name = name.encode(errors="replace").decode()  # half a surrogate pair could not be stored
    contents = call_worker(state, INSPECT_ZIP, f"{name} could not be checked", path=str(path), name=name)
    if "error" in contents:
        raise HTTPException(400, contents["error"])
    return state.store.add_file(path, name, contents, file_id)


def call_worker(state: State, function: str, failure: str, **arguments: object) -> Any:
    """Call a function of uploads.py in a worker process. Raises HTTPException, saying `failure`, if the call fails."""
    try:
        return call(state.workers, function, INSPECT_TIMEOUT, arguments)
    except CallFailed as error:
        log.error("%s: %s", failure, error)
        raise HTTPException(400, failure) from None


@api.get("/files", response_model=list[FileInfo])
def files(store: StoreDep) -> list[dict]:
    """List the uploaded data sets."""
    return store.files()


@api.get("/files/{file_id}/picture/{number}", response_class=Response)
async def picture(
    request: Request, store: StoreDep, file_id: str, number: Annotated[int, Path(ge=0, le=10_000)]
) -> Response:
    """Return a thumbnail of one row's image, with the question and answer in the headers X-Question and X-Answer."""
    store.file(file_id)
    state, failure, path = request.app.state, f"the image of row {number} cannot be read", store.zip_path(file_id)
    async with state.inspectors:  # otherwise waiting calls could occupy every thread
        drawn = await run_in_threadpool(call_worker, state, DRAW_THUMBNAIL, failure, path=str(path), number=number)
    if isinstance(drawn, str):
        raise HTTPException(404, drawn)
    png, question, answer = drawn
    headers = {"X-Question": urllib.parse.quote(question[:300]), "X-Answer": urllib.parse.quote(answer[:300])}
    return Response(png, media_type="image/png", headers=headers)


@api.delete("/files/{file_id}")
def delete_file(store: StoreDep, file_id: str) -> dict[str, str]:
    """Delete a data set, unless a queued or running job uses it."""
    store.delete_file(file_id)
    return {"message": "deleted"}


# --- jobs -------------------------------------------------------------------------------------------------------------


@api.post("/train")
def train(request: Request, store: StoreDep, body: TrainRequest) -> Started:
    """Queue a job: the cancelled or failed job that had the same name and settings, if there is one, or a new job."""
    store.require_space()
    model = allowed_model(body.base_model_path, request.app.state.cfg)
    file = store.file(body.data_file_id)
    training = body.training_config
    completions_per_step = training.batch_size * training.gradient_accumulation_steps
    prompts = max(1, math.ceil(completions_per_step / training.num_generations))
    flags = training.model_dump(by_alias=True, exclude={"batch_size", "gradient_accumulation_steps", "max_image_size"})
    flags["max_pixels"] = training.max_image_size**2
    flags |= body.lora_config.model_dump(by_alias=True)
    images = file["valid_images"]
    held_out = min(0.2, MAX_HELD_OUT / images) if images >= MIN_IMAGES else 0.0
    steps = math.ceil(training.num_epochs * file["usable_rows"] * (1 - held_out) / prompts)
    flags |= {"prompts_per_step": prompts, "max_completion_length": 64}
    flags |= {"eval_data": str(held_out)} if held_out else {}
    settings = {"flags": flags, "request": body.model_dump()}
    job, is_resumed = store.add_or_resume(body.job_name, body.data_file_id, model, settings, steps)
    note = None if "temperature" in training.model_fields_set else TEMPERATURE_NOTE.format(training.temperature)
    return started(job, RESUMED if is_resumed else f"queued: {steps} steps", note)


def allowed_model(name: str | None, cfg: Config) -> str:
    """Return the default model, a model in an allowed folder or a name on the hub. Refuse others with HTTPException."""
    if name is None or name == cfg.model:
        return cfg.model
    with contextlib.suppress(OSError, ValueError):  # not a valid path
        for folder in map(pathlib.Path, cfg.model_folders):
            path = (folder / name).resolve()
            if path.is_relative_to(folder.resolve()) and (path / "config.json").is_file():
                return str(path)
        word = r"[A-Za-z0-9][\w-]*(\.[\w-]+)*"
        # Jobs run in ROOT, where a name that is also a path would load that path instead of the hub's model.
        if re.fullmatch(f"{word}/{word}", name) and not (ROOT / name).exists() and not pathlib.Path(name).exists():
            return name
    raise HTTPException(400, "base_model_path is neither a model in an allowed folder nor a name on the hub")


@api.get("/jobs", response_model=list[JobInfo])
async def jobs(store: StoreDep) -> Response:
    """List all jobs in the order in which they were queued."""
    body = list_jobs(store, store.database.total_changes, int(4 * time.monotonic()))
    return Response(body, media_type="application/json")


@functools.lru_cache(maxsize=1)
def list_jobs(store: Store, changes: int, quarter_seconds: int) -> str:
    """Return all jobs as JSON. Requests within a quarter of a second share one list, unless a job changes."""
    return json.dumps([job_info(store, job, newest=True).model_dump() for job in store.jobs()])


@api.get("/jobs/{job_id}")
async def job(store: StoreDep, job: JobDep) -> JobInfo:
    """Return one job."""
    return job_info(store, job)


@api.get("/jobs/{job_id}/metrics", response_model=list[dict[str, Any]])
def metrics(store: StoreDep, job: JobDep) -> Response:
    """Return the metrics of every step so far."""
    # json.dumps escapes what UTF-8 cannot encode, such as half of a surrogate pair
    return Response(json.dumps(store.metrics(job.job_id)[0]), media_type="application/json")


@api.get("/jobs/{job_id}/logs", response_class=PlainTextResponse)
def logs(store: StoreDep, job: JobDep) -> str:
    """Return the end of the job's log."""
    return store.log(job.job_id)


@api.get("/jobs/{job_id}/completions", response_class=HTMLResponse)
def completions(store: StoreDep, job: JobDep) -> str:
    """Return the page that shows sampled completions next to their images."""
    path = store.run_folder(job.job_id) / "completions.html"
    nothing = "<!doctype html><meta charset='utf-8'><p>Nothing has been sampled yet."
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else nothing


@api.get("/jobs/{job_id}/events", response_class=EventSourceResponse)
async def events(
    store: StoreDep, job: JobDep, last_event_id: Annotated[int, Header()] = 0
) -> AsyncIterator[ServerSentEvent]:
    """Stream server-sent events until the job ends: `job` when the job changes, `metrics` with an array of new rows.

    When a browser reconnects, its `Last-Event-ID` header gives the last step that it received. After a resume, steps
    can repeat: a new row replaces the earlier row of the same step and all rows after it.
    """
    last_info, position = None, (0, 0)
    while True:
        info = job_info(store, store.job(job.job_id))
        if info != last_info:
            yield ServerSentEvent(event="job", data=info)
        last_info = info
        rows, position = await run_in_threadpool(store.metrics, job.job_id, position)
        if last_event_id and rows and rows[-1]["step"] >= last_event_id:
            rows = [row for row in rows if row["step"] > last_event_id]
        last_event_id = 0
        if rows:
            yield ServerSentEvent(event="metrics", raw_data=json.dumps(rows), id=str(rows[-1]["step"]))
        if info.status != "training":
            return
        await asyncio.sleep(0.5)


@api.delete("/jobs/{job_id}")
def cancel(store: StoreDep, job_id: str) -> Started:
    """Cancel a job. A running job saves a checkpoint first."""
    job = store.cancel(job_id)
    return started(job, "cancelled" if job.status == "cancelled" else "stopping; saving a checkpoint first")


@api.post("/jobs/{job_id}/resume")
def resume(store: StoreDep, job_id: str) -> Started:
    """Queue a cancelled or failed job again. The job resumes from its last checkpoint."""
    return started(store.resume(job_id), "queued again")


@api.post("/jobs/{job_id}/delete")
def delete_job(store: StoreDep, job_id: str) -> dict[str, str]:
    """Delete a job that has ended and all of its files, its result too. Its data set stays."""
    store.delete(job_id)
    return {"message": "deleted"}


@api.get("/jobs/{job_id}/download", response_class=FileResponse)
def download(store: StoreDep, job: JobDep, scratch: ScratchDep) -> FileResponse:
    """Return a ZIP with the adapter and how to load it, the base's tokenizer and other files, and the history."""
    if job.status != "completed":
        raise HTTPException(409, f"the job is {job.status}; its result can be downloaded once it is completed")
    if damage := store.damage(job, ADAPTER):
        raise HTTPException(409, f"the result cannot be downloaded: {damage}")
    path = pack_result(store, job, scratch)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", job.job_name).strip("-.")[:80] or "job"
    return FileResponse(path, filename=f"{name}.zip", media_type="application/zip")


def pack_result(store: Store, job: Job, scratch: pathlib.Path) -> pathlib.Path:
    """Write the ZIP of a completed job to the folder `scratch` and return its path."""
    from policy.base_files import copy_settings, settings_folder  # imports torch, which takes seconds
    from rewards import TASKS

    run = store.run_folder(job.job_id)
    history, _ = store.metrics(job.job_id)
    last_step = history[-1]["step"] if history else 0
    settings = job.settings["request"] | {"base_model": job.model, "grpo_flags": job.settings["flags"]}
    contents = {
        "training_args.json": settings,
        "trainer_state.json": {"global_step": last_step, "max_steps": job.total_steps, "log_history": history},
    }
    try:
        copy_settings(settings_folder(job.model, str(run)), scratch / "base")
        (scratch / "base" / "config.json").unlink(missing_ok=True)  # what is downloaded is no model, but an adapter
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None):  # of the system, such as a full disk, which `full` answers
            raise
        reason = str(error).splitlines()[0][:160]
        raise HTTPException(409, f"cannot read the tokenizer of the base model {job.model!r}: {reason}") from None
    with zipfile.ZipFile(scratch / "result.zip", "w") as archive:
        for file in [*sorted((run / "final").glob("adapter_*")), *sorted((scratch / "base").iterdir())]:
            archive.write(file, file.name)
        for name, content in contents.items():
            archive.writestr(name, json.dumps(content, indent=1) + "\n")
        note = string.Template((PAGE / "HOW_TO_LOAD.txt").read_text())
        pixels = job.settings["flags"]["max_pixels"]
        values = {"BASE": job.model, "SYSTEM": TASKS["count"].system, "MAX_PIXELS": pixels}
        archive.writestr("HOW_TO_LOAD.txt", note.substitute(values))
    return scratch / "result.zip"


@api.post("/jobs/{job_id}/predict")
async def predict(
    request: Request,
    store: StoreDep,
    job: JobDep,
    scratch: ScratchDep,
    picture: Annotated[UploadFile, File(description="an image")],
    question: Annotated[str, Form(min_length=1, max_length=2000)],
) -> dict[str, str]:
    """Ask the trained model a question about an image."""
    if job.status != "completed":
        raise HTTPException(409, f"the job is {job.status}; it can answer questions once it is completed")
    if shutil.which("nvidia-smi") and store.jobs("training"):
        raise HTTPException(409, "a job is training and needs the whole GPU: ask again when it has ended")
    if TAG in question or "<|" in question:
        raise HTTPException(400, "the question contains a control token")
    predicting = request.app.state.predicting
    if predicting.locked():
        raise HTTPException(503, "another question is being answered: ask again in a moment")
    async with predicting:
        return {"answer": await run_in_threadpool(ask_model, request.app.state, job, scratch, picture.file, question)}


def ask_model(state: State, job: Job, scratch: pathlib.Path, picture: BinaryIO, question: str) -> str:
    """Return the model's answer to `question` about `picture`. Raises HTTPException if there is none."""
    upload, png = scratch / "upload", scratch / "picture.png"
    with upload.open("wb") as target:
        shutil.copyfileobj(picture, target)
    problem = call_worker(state, TO_PNG, "the image cannot be read", source=str(upload), target=str(png))
    if problem:
        raise HTTPException(400, problem)
    row = {"prompt": f"{TAG}{question}", "answer": "0", "images": ["picture.png"]}
    (scratch / "row.jsonl").write_text(json.dumps(row) + "\n")
    flags = {"model": job.model, "adapter": state.store.run_folder(job.job_id) / "final", "data": scratch / "row.jsonl"}
    flags |= {"output": scratch / "out", "task": "count", "engine": "hf"}
    flags |= {name: job.settings["flags"][name] for name in ("max_pixels", "max_completion_length")}
    flags |= {"load_in_4bit": job.settings["flags"].get("load_in_4bit", False)}
    command = [sys.executable, "evaluate.py", *cli.as_arguments(flags)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=ANSWER_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise HTTPException(503, f"the model did not answer within {ANSWER_TIMEOUT:.0f} s") from None
    if done.returncode:
        log.error("predict %s: %s", job.job_id, done.stderr[-2000:])
        reason = next((line for line in done.stderr.splitlines() if line.startswith("error:")), "see the log")
        raise HTTPException(409, f"the model could not answer ({reason.replace(f'{scratch}/', '')[:200]})")
    return without_marks(json.loads((scratch / "out" / "predictions.jsonl").read_text())["responses"][0])


# --- the service ------------------------------------------------------------------------------------------------------


def make_app(cfg: Config, token: str | None) -> FastAPI:
    """Build the service and start its job loop. Raises UserError when another service uses the same folder."""
    app = FastAPIOffline(title="grpo-vlm: counting", version="1", summary="Train a model to count objects in images")
    app.state.cfg = cfg
    app.state.store = Store(cfg.folder, cfg.max_storage)
    app.state.predicting = asyncio.Lock()
    app.state.workers = WorkerPool(INSPECTORS, FUNCTIONS)
    app.state.inspectors = asyncio.Semaphore(INSPECTORS)
    app.include_router(api)

    @app.get("/", response_class=JSONResponse, responses={200: {"content": {"text/html": {}}}})
    def page(request: Request) -> Response:
        """Return the service's basic facts as JSON or, to a browser, which accepts `text/html`, the page."""
        if not (token and "token" in request.query_params):
            if "text/html" in request.headers.get("accept", ""):
                return FileResponse(PAGE / "index.html")
            basics = {"service": app.title, "docs": "/docs", "data_format": "/data-format", "model": cfg.model}
            return JSONResponse(basics)
        response = RedirectResponse("/", 303)  # removes the token from the address bar
        # The token goes into a cookie, because the browser sends some of the page's requests without our headers.
        response.set_cookie("token", urllib.parse.quote(token, safe=""), httponly=True, samesite="strict")
        return response

    @app.get("/page.js", include_in_schema=False)
    def script() -> Response:
        return FileResponse(PAGE / "page.js", media_type="text/javascript")

    @app.exception_handler(OSError)
    @app.exception_handler(sqlite3.OperationalError)
    def full(_: Request, error: Exception) -> Response:
        full_disk = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        if full_disk or getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            return JSONResponse({"detail": "the service's disk is full: free some space, then try again"}, 507)
        if getattr(error, "sqlite_errorname", "").startswith("SQLITE_BUSY"):
            detail = "another program has locked the service's database: try again once it has finished"
            return JSONResponse({"detail": detail}, 503)
        raise error

    @app.exception_handler(RequestValidationError)
    def invalid(_: Request, error: RequestValidationError) -> Response:
        errors = error.errors()
        problems = [
            {"loc": [str(part)[:200] for part in e["loc"]], "msg": e["msg"][:500], "type": e["type"]}
            for e in errors[:MAX_ERRORS]
        ]
        if len(errors) > MAX_ERRORS:
            problems.append({"loc": [], "msg": f"and {len(errors) - MAX_ERRORS} more", "type": "more"})
        return JSONResponse({"detail": problems}, 422)

    max_bytes = int(cfg.max_upload * 1e9)
    app.add_middleware(limit_bodies, max_upload=max_bytes)  # for bodies whose size is not announced
    app.add_middleware(AccessMiddleware, token=token, max_upload=max_bytes)  # runs first
    threading.Thread(target=job_loop, args=(app.state.store,), daemon=True).start()
    return app


def job_loop(store: Store) -> None:
    """Start, watch and finish jobs for as long as the service runs."""
    while True:
        try:
            store.poll()
        except Exception:
            log.exception("job loop")
        time.sleep(0.3)


def read_token(cfg: Config) -> str | None:
    """Return the token from the flags or from GRPO_TOKEN; delete this variable, so that no job inherits the token."""
    given = os.environ.pop("GRPO_TOKEN", None)
    if cfg.token_file is None:
        return cfg.token or given
    try:
        token = pathlib.Path(cfg.token_file).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read --token_file {cfg.token_file!r} ({error})") from None
    if not token:
        raise UserError(f"--token_file {cfg.token_file!r} is empty: write the token into it")
    return token


def find_model(model: str) -> str:
    """Return the absolute path of a model's folder, because jobs run in a different folder, or a hub name as it is.

    Raises UserError for what is neither. The jobs check the rest of a model, whose libraries take seconds to import.
    """
    if (folder := pathlib.Path(model)).exists():
        try:
            json.loads((folder / "config.json").read_bytes())["model_type"]
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            problem = f"--model {model!r} has no config.json of a model ({type(error).__name__}: {str(error)[:120]})"
            raise UserError(f"{problem}: give a folder in Hugging Face layout") from None
        return str(folder.resolve())
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", model):
        raise UserError(f"no model at --model {model!r}: give a folder in Hugging Face layout or a hub name")
    return model


def check_address(host: str, port: int) -> None:
    """Raise UserError if the service cannot listen at this address."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        reason = str(error.strerror or error).partition(" (")[0]
        raise UserError(f"cannot listen on {host}, port {port} ({reason}): choose another --port or --host") from None


def main(cfg: Config) -> None:
    os.umask(0o077)  # only this user may read the files of the service and of its jobs
    given = read_token(cfg)
    token = given or (None if cfg.host in LOCAL else secrets.token_urlsafe(24))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(OncePerSecond())
    cfg = dataclasses.replace(cfg, model=find_model(cfg.model))
    check_address(cfg.host, cfg.port)
    app = make_app(cfg, token)
    tempfile.tempdir = str(app.state.store.folder)  # an upload is stored there, too, while it arrives
    shown_token = "TOKEN" if given else token  # a generated token is shown only here
    hint = f"/?token={shown_token}" if token else ""
    print(f"http://{cfg.host}:{cfg.port}{hint}", file=sys.stderr)
    options = {"http": Connection, "backlog": max_connections(), "log_config": None, "log_level": "warning"}
    uvicorn.run(app, host=cfg.host, port=cfg.port, access_log=False, timeout_graceful_shutdown=3, **options)
