"""The object-counting service, over HTTP and on a web page: upload images, run training jobs, download the results.

    ./run.sh serve                                    # http://127.0.0.1:8000, API reference at /docs
    python -m service --host 0.0.0.0 --token SECRET   # reachable from other machines, with a token

Each job is a grpo.py process that keeps running when the service ends (`jobs.py`); a restarted service finds the job
again. One job trains at a time, and the others wait in a queue.
"""

import asyncio
import contextlib
import dataclasses
import errno
import io
import itertools
import json
import logging
import math
import os
import pathlib
import re
import secrets
import shutil
import subprocess
import sys
import threading
import time
import urllib.parse
import uuid
import zipfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any

import anyio.to_thread
import uvicorn
from fastapi import APIRouter, FastAPI, File, Form, HTTPException, Path, Request, UploadFile
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import (
    FileResponse,
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from fastapi_offline import FastAPIOffline
from pydantic import TypeAdapter
from starlette.background import BackgroundTask

from common import errors
from common.errors import CallFailed
from common.records import TAG, Sample
from grading.sandbox import WorkerPool
from inputs.images import decode_image
from inputs.rows import read_rows
from service.jobs import Conflict, DiskFull, Job, Missing, Store
from service.middleware import LOCAL, AccessMiddleware
from service.schema import DATA_FORMAT, Answer, FileInfo, JobInfo, Started, TrainRequest
from service.uploads import INSPECT_ZIP

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "service" / "page"
INSPECT_TIMEOUT = 120.0  # seconds to check a ZIP
INSPECTORS = 2  # number of ZIPs that can be checked at the same time
INSPECT_QUEUE_TIMEOUT = 60.0  # seconds that an upload waits for earlier uploads to be checked
ANSWER_TIMEOUT = 600.0  # seconds for a trained model to answer a question
EVENT_ROWS = 1000  # maximum rows of metrics in one event
JOB_LIST_SECONDS = 0.25  # how long the list of jobs is cached, unless a job changes
JOB_LIST = TypeAdapter(list[JobInfo])
log = logging.getLogger("serve")


@dataclass
class Config:
    """Run the training service."""

    host: str = "127.0.0.1"
    """Address to listen on; any address that other machines can reach needs a token."""
    port: int = 8000
    """Port to listen on."""
    folder: str = "runs/service"
    """Folder of the uploaded files, the jobs and the database."""
    model: str = "Qwen/Qwen2.5-VL-3B-Instruct"
    """Default base model of a job."""
    model_folders: tuple[str, ...] = ()
    """Folders with additional models that a job may use; models on the hub are always allowed."""
    token: str | None = None
    """Token that callers send as `Authorization: Bearer TOKEN`; generated and printed if required but not given."""
    max_upload: float = 2.0
    """Maximum size of an uploaded ZIP in GB."""

    def __post_init__(self) -> None:
        errors.require(0 < self.port < 65536, "port must be between 1 and 65535")
        errors.require(self.max_upload > 0, "max_upload must be above 0")


Id = Annotated[str, Path(max_length=64)]
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "the request cannot be used"},
    401: {"description": "the token is missing or wrong"},
    404: {"description": "the file or job does not exist"},
    409: {"description": "the state of the file or job does not allow this"},
    413: {"description": "the upload is too large"},
    503: {"description": "too many requests of this kind at once"},
    507: {"description": "the disk is full"},
}
api = APIRouter(responses=ERRORS)


def get_store(request: Request) -> Store:
    """Return the store of files and jobs."""
    return request.app.state.store


def job_info(store: Store, job: Job) -> JobInfo:
    """Return a job with its progress."""
    return JobInfo(
        job_id=job.job_id,
        job_name=job.job_name,
        status=job.status,
        total_steps=job.total_steps,
        created_at=job.created_at,
        error_message=job.error_message,
        output_dir=str(store.run_folder(job.job_id)),
        stopping=job.status == "training" and job.cancelled_at is not None,
        **store.progress(job),
    )


# --- data -------------------------------------------------------------------------------------------------------------


@api.get("/data-format")
def data_format() -> dict[str, Any]:
    """Return the required format of a data set."""
    return DATA_FORMAT


@api.post("/upload-data")
async def upload_data(request: Request, file: Annotated[UploadFile, File(description="a ZIP")]) -> FileInfo:
    """Store and check a ZIP with main.csv and images/. Return its row and image counts and its first bad rows."""
    file_id = get_store(request).new_file_id()
    name = pathlib.PurePosixPath((file.filename or "data.zip").replace("\\", "/")).name[:200] or "data.zip"
    state = request.app.state
    info = await anyio.to_thread.run_sync(_store_upload, state, file_id, name, file, limiter=state.upload_threads)
    return FileInfo(**info)


def _store_upload(state: Any, file_id: str, name: str, file: UploadFile) -> dict:
    path = state.store.zip_path(file_id)
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as target:
            shutil.copyfileobj(file.file, target)
        partial.rename(path)
        if not state.inspect_slots.acquire(timeout=INSPECT_QUEUE_TIMEOUT):
            raise HTTPException(503, "too many uploads at once: try again in a minute")
        try:
            contents = state.inspect_pool.call(INSPECT_ZIP, INSPECT_TIMEOUT, {"path": str(path), "name": name})
        finally:
            state.inspect_slots.release()
        if "error" in contents:
            raise HTTPException(400, contents["error"])
    except CallFailed as error:
        path.unlink(missing_ok=True)
        log.error("checking %s: %s", file_id, error)
        raise HTTPException(400, f"{name} could not be checked") from None
    except BaseException:
        partial.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise
    return state.store.add_file(file_id, name, contents)


@api.get("/files")
def files(request: Request) -> list[FileInfo]:
    """List the uploaded data sets."""
    return [FileInfo(**file) for file in get_store(request).files()]


@api.get("/files/{file_id}/picture/{number}", response_class=Response)
def picture(request: Request, file_id: Id, number: Annotated[int, Path(ge=0, le=10_000)]) -> Response:
    """Return a thumbnail of one row's image, with the question and answer in the headers X-Question and X-Answer."""
    store = get_store(request)
    store.file(file_id)
    samples = (row for row in read_rows(str(store.zip_path(file_id))) if isinstance(row, Sample))
    sample = next(itertools.islice(samples, number, None), None)
    if sample is None:
        raise Missing(f"the file has no row {number}")
    try:
        image = decode_image(sample.images[0])
    except (ValueError, OSError):
        raise Missing(f"the image of row {number} cannot be read") from None
    image.thumbnail((240, 240))
    png = io.BytesIO()
    image.save(png, "PNG")
    texts = {"X-Question": sample.prompt.replace(TAG, ""), "X-Answer": sample.answer}
    headers = {name: urllib.parse.quote(text[:300]) for name, text in texts.items()}
    return Response(png.getvalue(), media_type="image/png", headers=headers)


@api.delete("/files/{file_id}")
def delete_file(request: Request, file_id: Id) -> dict[str, str]:
    """Delete a data set. Refused while a queued or running job uses it."""
    get_store(request).delete_file(file_id)
    return {"message": "deleted"}


# --- jobs -------------------------------------------------------------------------------------------------------------


@api.post("/train")
def train(request: Request, body: TrainRequest) -> Started:
    """Create a job and queue it."""
    store, cfg = get_store(request), request.app.state.cfg
    model = allowed_model(body.base_model_path, cfg)
    file = store.file(body.data_file_id)
    training, lora = body.training_config, body.lora_config
    completions_per_step = training.batch_size * training.gradient_accumulation_steps
    prompts = max(1, math.ceil(completions_per_step / training.num_generations))
    flags = {
        "epochs": training.num_epochs,
        "learning_rate": training.learning_rate,
        "prompts_per_step": prompts,
        "num_generations": training.num_generations,
        "temperature": training.temperature,
        "load_in_4bit": training.use_4bit,
        "max_side": training.max_image_size,
        "seed": training.seed,
        "max_completion_length": 64,
        "lora_rank": lora.r,
        "lora_alpha": lora.lora_alpha,
    }
    steps = math.ceil(training.num_epochs * file["usable_rows"] / prompts)
    settings = {"flags": flags, "request": body.model_dump()}
    job = store.add_job(body.job_name, body.data_file_id, model, settings, steps)
    return Started(job_id=job.job_id, message=f"queued: {steps} steps", status=job.status)


def allowed_model(name: str | None, cfg: Config) -> str:
    """Return the model that `name` stands for: the default, a model in an allowed folder, or a name on the hub.

    Raises HTTPException for any other name.
    """
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
async def jobs(request: Request) -> Response:
    """List all jobs in the order in which they were queued."""
    store, state = get_store(request), request.app.state
    cached_at, version, body = state.job_list
    if version != store.version or time.monotonic() > cached_at + JOB_LIST_SECONDS:
        cached_at, version = time.monotonic(), store.version
        body = JOB_LIST.dump_json([job_info(store, job) for job in store.jobs()])
        state.job_list = cached_at, version, body
    return Response(body, media_type="application/json")


@api.get("/jobs/{job_id}")
async def job(request: Request, job_id: Id) -> JobInfo:
    """Return one job."""
    store = get_store(request)
    return job_info(store, store.job(job_id))


@api.get("/jobs/{job_id}/metrics")
def metrics(request: Request, job_id: Id) -> list[dict[str, Any]]:
    """Return the metrics of every step so far."""
    store = get_store(request)
    return store.metrics(store.job(job_id).job_id)


@api.get("/jobs/{job_id}/logs", response_class=PlainTextResponse)
def logs(request: Request, job_id: Id) -> str:
    """Return the end of the job's log."""
    store = get_store(request)
    return store.log(store.job(job_id).job_id)


@api.get("/jobs/{job_id}/completions", response_class=HTMLResponse)
def completions(request: Request, job_id: Id) -> Response:
    """Return the page that shows sampled completions next to their images."""
    store = get_store(request)
    path = store.run_folder(store.job(job_id).job_id) / "completions.html"
    if not path.is_file():
        return HTMLResponse("<!doctype html><meta charset='utf-8'><p>Nothing has been sampled yet.")
    return HTMLResponse(path.read_text(encoding="utf-8"))


@api.get("/jobs/{job_id}/events", response_class=StreamingResponse)
async def events(request: Request, job_id: Id) -> StreamingResponse:
    """Stream server-sent events until the job ends: `job` when the job changes, `metrics` with an array of new rows.

    After a resume, steps can repeat: a new row replaces the earlier row of the same step and all rows after it."""
    store = get_store(request)
    store.job(job_id)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_events(request, store, job_id), media_type="text/event-stream", headers=headers)


async def _events(request: Request, store: Store, job_id: str) -> AsyncIterator[str]:
    last_info, position, last_sent = None, (0, 0), time.monotonic()
    # A browser that reconnects sends the number of the last step that it received.
    last_event = request.headers.get("last-event-id", "")
    is_step = last_event.isascii() and last_event.isdecimal() and len(last_event) < 10
    received_step = int(last_event) if is_step else 0
    while not await request.is_disconnected():
        info = job_info(store, store.job(job_id))
        if info != last_info:
            last_info = info
            yield f"event: job\ndata: {info.model_dump_json()}\n\n"
        rows, position = await run_in_threadpool(store.new_metrics, job_id, position)
        if received_step and rows and rows[-1]["step"] >= received_step:
            rows = [row for row in rows if row["step"] > received_step]
        received_step = 0
        for i in range(0, len(rows), EVENT_ROWS):
            chunk = rows[i : i + EVENT_ROWS]
            yield f"event: metrics\nid: {chunk[-1]['step']}\ndata: {json.dumps(chunk)}\n\n"
        if info.status not in ("queued", "training"):
            return
        if time.monotonic() > last_sent + 15:
            last_sent = time.monotonic()
            yield ": keep-alive\n\n"
        await asyncio.sleep(0.5)


@api.delete("/jobs/{job_id}")
def cancel(request: Request, job_id: Id) -> Started:
    """Cancel a job. A running job saves a checkpoint first."""
    job = get_store(request).cancel(job_id)
    message = "cancelled" if job.status == "cancelled" else "stopping; saving a checkpoint first"
    return Started(job_id=job_id, message=message, status=job.status)


@api.post("/jobs/{job_id}/resume")
def resume(request: Request, job_id: Id) -> Started:
    """Queue a cancelled or failed job again. It resumes from its last checkpoint."""
    job = get_store(request).resume(job_id)
    return Started(job_id=job_id, message="queued again", status=job.status)


@api.get("/jobs/{job_id}/download", response_class=FileResponse)
def download(request: Request, job_id: Id) -> FileResponse:
    """Return a ZIP with the trained adapter, the tokenizer, the settings and the training history."""
    store = get_store(request)
    job = store.job(job_id)
    if job.status != "completed":
        raise Conflict(f"the job is {job.status}; its result can be downloaded once it is completed")
    path = store.job_folder(job_id) / f"download-{uuid.uuid4().hex}.zip"
    pack_result(store, job, path)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", job.job_name).strip("-.")[:80] or "job"
    delete_zip = BackgroundTask(path.unlink, missing_ok=True)
    return FileResponse(path, filename=f"{name}.zip", media_type="application/zip", background=delete_zip)


def pack_result(store: Store, job: Job, path: pathlib.Path) -> None:
    """Write the ZIP of a completed job to `path`."""
    from training.export import copy_processor  # imports torch, which takes seconds

    history = store.metrics(job.job_id)
    state = {"global_step": history[-1]["step"] if history else 0, "max_steps": job.total_steps, "log_history": history}
    with store.scratch() as folder:
        copy_processor(job.model, folder)
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            os.link(store.run_folder(job.job_id) / "final" / name, folder / name)
        adapter = json.loads((folder / "adapter_config.json").read_text())
        adapter["lora_dropout"] = job.settings["request"]["lora_config"]["lora_dropout"]
        (folder / "adapter_config.json").unlink()
        (folder / "adapter_config.json").write_text(json.dumps(adapter, indent=1) + "\n")
        arguments = job.settings["request"] | {"base_model": job.model, "grpo_flags": job.settings["flags"]}
        (folder / "training_args.json").write_text(json.dumps(arguments, indent=1) + "\n")
        (folder / "trainer_state.json").write_text(json.dumps(state) + "\n")
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            for file in sorted(folder.iterdir()):
                archive.write(file, file.name)


@api.post("/jobs/{job_id}/predict")
def predict(
    request: Request,
    job_id: Id,
    picture: Annotated[UploadFile, File(description="an image")],
    question: Annotated[str, Form(min_length=1, max_length=2000)],
) -> Answer:
    """Ask the trained model a question about an image."""
    store = get_store(request)
    job = store.job(job_id)
    if job.status != "completed":
        raise Conflict(f"the job is {job.status}; it can answer questions once it is completed")
    if shutil.which("nvidia-smi") and store.jobs("training"):
        raise Conflict("a job is training and needs the whole GPU: ask again when it has ended")
    try:
        image = decode_image(picture.file.read())
    except (ValueError, OSError) as error:
        raise HTTPException(400, f"the image cannot be read: {error}") from None
    if "<" in question and (TAG in question or "<|" in question):
        raise HTTPException(400, "the question contains a control token")
    if not request.app.state.predicting.acquire(blocking=False):
        raise HTTPException(503, "another question is being answered: ask again in a moment")
    try:
        with store.scratch() as folder:
            image.save(folder / "picture.png")
            return Answer(answer=ask_model(store, job, folder, question))
    finally:
        request.app.state.predicting.release()


def ask_model(store: Store, job: Job, folder: pathlib.Path, question: str) -> str:
    """Return the model's answer to `question` about picture.png in `folder`. Raises HTTPException if there is none."""
    row = {"prompt": f"{TAG}{question}", "answer": "0", "images": ["picture.png"]}
    (folder / "row.jsonl").write_text(json.dumps(row) + "\n")
    flags = {"model": job.model, "adapter": store.run_folder(job.job_id) / "final", "data": folder / "row.jsonl"}
    flags |= {"max_side": job.settings["flags"]["max_side"], "output": folder / "out", "task": "count"}
    flags |= {"max_tokens": job.settings["flags"]["max_completion_length"], "engine": "hf"}
    command = [sys.executable, "evaluate.py", *(f"--{name}={value}" for name, value in flags.items())]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=ANSWER_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise HTTPException(503, f"the model did not answer within {ANSWER_TIMEOUT:.0f} s") from None
    if done.returncode:
        log.error("predict %s: %s", job.job_id, done.stderr[-2000:])
        reason = next((line for line in done.stderr.splitlines() if line.startswith("error:")), "see the log")
        raise HTTPException(409, f"the model could not answer ({reason[:200]})")
    return json.loads((folder / "out" / "predictions.jsonl").read_text())["responses"][0]


# --- the service ------------------------------------------------------------------------------------------------------


def make_app(cfg: Config, token: str | None) -> FastAPI:
    """Build the service and start its job loop. Raises UserError when another service uses the same folder."""
    app = FastAPIOffline(
        title="grpo-vlm: counting", version="1", summary="Train a model to count the objects in your images"
    )
    app.state.cfg = cfg
    app.state.store = Store(cfg.folder)
    app.state.store.remove_leftovers()
    app.state.predicting = threading.Lock()
    app.state.job_list = 0.0, -1, b""  # time when the list was made, version of the store, JSON text
    app.state.inspect_pool = WorkerPool(INSPECTORS, [INSPECT_ZIP])
    app.state.inspect_slots = threading.BoundedSemaphore(INSPECTORS)
    app.state.upload_threads = anyio.CapacityLimiter(16)  # separate, so that uploads do not block other requests
    app.include_router(api)

    @app.get("/", response_class=HTMLResponse, responses={200: {"content": {"application/json": {}}}})
    def page(request: Request) -> Response:
        """Return the page or, with `Accept: application/json`, the service's basic facts as JSON."""
        if "application/json" in request.headers.get("accept", ""):
            basics = {
                "service": "grpo-vlm: counting",
                "docs": "/docs",
                "data_format": "/data-format",
                "model": cfg.model,
            }
            return JSONResponse(basics)
        if not (token and "token" in request.query_params):
            return FileResponse(PAGE / "index.html")
        response = RedirectResponse("/", 303)  # removes the token from the address bar
        # The token goes into a cookie, because the browser sends some of the page's requests without our headers.
        response.set_cookie("token", urllib.parse.quote(token, safe=""), httponly=True, samesite="strict")
        return response

    @app.get("/page.js", include_in_schema=False)
    def script() -> Response:
        return FileResponse(PAGE / "page.js", media_type="text/javascript")

    @app.exception_handler(Missing)
    def missing(_: Request, error: Missing) -> Response:
        return JSONResponse({"detail": str(error)}, 404)

    @app.exception_handler(Conflict)
    def conflict(_: Request, error: Conflict) -> Response:
        return JSONResponse({"detail": str(error)}, 409)

    @app.exception_handler(DiskFull)
    @app.exception_handler(OSError)
    def full(_: Request, error: Exception) -> Response:
        if not isinstance(error, DiskFull) and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise error
        return JSONResponse({"detail": "the service's disk is full: free some space, then try again"}, 507)

    @app.exception_handler(RequestValidationError)
    def invalid(_: Request, error: RequestValidationError) -> Response:
        problems = [{"loc": list(e["loc"]), "msg": e["msg"], "type": e["type"]} for e in error.errors()]
        return JSONResponse({"detail": problems}, 422)

    app.add_middleware(AccessMiddleware, token=token, max_bytes=int(cfg.max_upload * 1e9))
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


def main(cfg: Config) -> None:
    local = cfg.host in LOCAL
    token = cfg.token if cfg.token or local else secrets.token_urlsafe(24)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if pathlib.Path(cfg.model).exists():  # made absolute, because jobs run in a different folder
        cfg = dataclasses.replace(cfg, model=str(pathlib.Path(cfg.model).resolve()))
    app = make_app(cfg, token)
    hint = f"/?token={token}" if token and token != cfg.token else "/?token=TOKEN" if token else ""
    print(f"http://{cfg.host}:{cfg.port}{hint}", file=sys.stderr)
    uvicorn.run(app, host=cfg.host, port=cfg.port, access_log=False, log_level="warning", timeout_graceful_shutdown=3)
