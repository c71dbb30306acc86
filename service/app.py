"""The object-counting training service: upload pictures, train, watch, stop, go on, download, over HTTP and on a page.

    ./run.sh serve                                  # http://127.0.0.1:8000, the API's document at /docs
    python -m service --host 0.0.0.0 --token SECRET   # reachable from elsewhere, with a token

A job is grpo.py in a process of its own (jobs.py): it goes on when the service ends, and a service that starts again
finds it. One job trains at a time, the others wait in line.
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
from service.jobs import Conflict, Full, Job, Missing, Store
from service.middleware import LOCAL, AccessMiddleware
from service.schema import DATA_FORMAT, Answer, FileInfo, JobInfo, Started, TrainRequest
from service.uploads import INSPECT_ZIP

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "service" / "page"
INSPECT_SECONDS = 120.0  # that looking through a ZIP may take
INSPECTORS = 2  # ZIPs that are looked through at once
INSPECT_QUEUE_SECONDS = 60.0  # that an upload waits for those before it
ANSWER_SECONDS = 600.0  # that a question to a trained model may take
ROWS_AN_EVENT = 1000  # of metrics
LISTING_SECONDS = 0.25  # that all who ask for the jobs get the same list, unless one of them changes
LISTING = TypeAdapter(list[JobInfo])
log = logging.getLogger("serve")


@dataclass
class Config:
    """Run the training service."""

    host: str = "127.0.0.1"
    """Address to listen on; any but this machine's own needs a token."""
    port: int = 8000
    """Port to listen on."""
    folder: str = "runs/service"
    """Where files, jobs and the table of both are kept."""
    model: str = "Qwen/Qwen2.5-VL-3B-Instruct"
    """The base model of jobs that name none."""
    model_folders: tuple[str, ...] = ()
    """Folders whose models jobs may name; names on the hub are allowed anyway."""
    token: str | None = None
    """What callers have to send as «Authorization: Bearer TOKEN»; made up and printed when left out and needed."""
    max_upload: float = 2.0
    """Most gigabytes of an uploaded ZIP."""

    def __post_init__(self) -> None:
        errors.require(0 < self.port < 65536, "port must be between 1 and 65535")
        errors.require(self.max_upload > 0, "max_upload must be above 0")


Id = Annotated[str, Path(max_length=64)]
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "what was sent cannot be used"},
    401: {"description": "no token, or a wrong one"},
    404: {"description": "there is no such file or job"},
    409: {"description": "it cannot be done as things stand"},
    413: {"description": "the upload is too large"},
    503: {"description": "too many ask for the same at once"},
    507: {"description": "the disk is full"},
}
api = APIRouter(responses=ERRORS)


def store_of(request: Request) -> Store:
    """Where the service keeps everything."""
    return request.app.state.store


def info(store: Store, job: Job) -> JobInfo:
    """A job with how far it has come."""
    return JobInfo(
        job_id=job.job_id,
        job_name=job.job_name,
        status=job.status,
        total_steps=job.total_steps,
        created_at=job.created_at,
        error_message=job.error_message,
        output_dir=str(store.run_of(job.job_id)),
        stopping=job.status == "training" and job.cancelled_at is not None,
        **store.progress(job),
    )


# --- data -------------------------------------------------------------------------------------------------------------


@api.get("/data-format")
def data_format() -> dict[str, Any]:
    """What a data set has to look like."""
    return DATA_FORMAT


@api.post("/upload-data")
async def upload_data(request: Request, file: Annotated[UploadFile, File(description="a ZIP")]) -> FileInfo:
    """Keep a ZIP with main.csv and images/, looked through: rows, pictures, the first problems."""
    file_id = store_of(request).new_file_id()
    name = pathlib.PurePosixPath((file.filename or "data.zip").replace("\\", "/")).name[:200] or "data.zip"
    state = request.app.state
    return FileInfo(**await anyio.to_thread.run_sync(_keep, state, file_id, name, file, limiter=state.keeping))


def _keep(state: Any, file_id: str, name: str, file: UploadFile) -> dict:
    path = state.store.path_of(file_id)
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as target:
            shutil.copyfileobj(file.file, target)
        partial.rename(path)
        if not state.looking.acquire(timeout=INSPECT_QUEUE_SECONDS):
            raise HTTPException(503, "too many uploads at once: try again in a minute")
        try:
            found = state.checker.call(INSPECT_ZIP, INSPECT_SECONDS, {"path": str(path), "name": name})
        finally:
            state.looking.release()
        if "error" in found:
            raise HTTPException(400, found["error"])
    except CallFailed as problem:
        path.unlink(missing_ok=True)
        log.error("looking through %s: %s", file_id, problem)
        raise HTTPException(400, f"{name} cannot be looked through") from None
    except BaseException:
        partial.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise
    return state.store.add_file(file_id, name, found)


@api.get("/files")
def files(request: Request) -> list[FileInfo]:
    """Every uploaded data set."""
    return [FileInfo(**file) for file in store_of(request).files()]


@api.get("/files/{file_id}/picture/{number}", response_class=Response)
def picture(request: Request, file_id: Id, number: Annotated[int, Path(ge=0, le=10_000)]) -> Response:
    """One of its pictures, small, with its question and answer in headers."""
    store = store_of(request)
    store.file(file_id)
    good = (row for row in read_rows(str(store.path_of(file_id))) if isinstance(row, Sample))
    row = next(itertools.islice(good, number, None), None)
    if row is None:
        raise Missing(f"the file has no row {number}")
    try:
        image = decode_image(row.images[0])
    except (ValueError, OSError):
        raise Missing("that picture cannot be read") from None
    image.thumbnail((240, 240))
    image.save(data := io.BytesIO(), "PNG")
    words = {"X-Question": row.prompt.replace(TAG, ""), "X-Answer": row.answer}
    headers = {name: urllib.parse.quote(text[:300]) for name, text in words.items()}
    return Response(data.getvalue(), media_type="image/png", headers=headers)


@api.delete("/files/{file_id}")
def delete_file(request: Request, file_id: Id) -> dict[str, str]:
    """Forget a data set; not while a job uses it."""
    store_of(request).delete_file(file_id)
    return {"message": "deleted"}


# --- jobs -------------------------------------------------------------------------------------------------------------


@api.post("/train")
def train(request: Request, body: TrainRequest) -> Started:
    """Queue a job."""
    store, cfg = store_of(request), request.app.state.cfg
    model = allowed_model(body.base_model_path, cfg)
    file = store.file(body.data_file_id)
    t, lora = body.training_config, body.lora_config
    prompts = max(1, math.ceil(t.batch_size * t.gradient_accumulation_steps / t.num_generations))
    flags = {
        "epochs": t.num_epochs,
        "learning_rate": t.learning_rate,
        "prompts_per_step": prompts,
        "num_generations": t.num_generations,
        "temperature": t.temperature,
        "load_in_4bit": t.use_4bit,
        "max_side": t.max_image_size,
        "seed": t.seed,
        "max_completion_length": 64,
        "lora_rank": lora.r,
        "lora_alpha": lora.lora_alpha,
    }
    steps = math.ceil(t.num_epochs * file["usable_rows"] / prompts)
    settings = {"flags": flags, "request": body.model_dump()}
    job = store.add_job(body.job_name, body.data_file_id, model, settings, steps)
    return Started(job_id=job.job_id, message=f"queued: {steps} steps", status=job.status)


def allowed_model(name: str | None, cfg: Config) -> str:
    """The model a job may use: the service's own, one below an allowed folder, or a name on the hub."""
    if name is None or name == cfg.model:
        return cfg.model
    with contextlib.suppress(OSError, ValueError):  # a name that cannot be a path's
        for folder in map(pathlib.Path, cfg.model_folders):
            path = (folder / name).resolve()
            if path.is_relative_to(folder.resolve()) and (path / "config.json").is_file():
                return str(path)
        part = r"[A-Za-z0-9][\w-]*(\.[\w-]+)*"  # jobs run in this folder: what is a path there is no name on the hub
        if re.fullmatch(f"{part}/{part}", name) and not (ROOT / name).exists() and not pathlib.Path(name).exists():
            return name
    raise HTTPException(400, "base_model_path is neither a model below an allowed folder nor a name on the hub")


@api.get("/jobs", response_model=list[JobInfo])
async def jobs(request: Request) -> Response:
    """Every job, in the order they were queued."""
    store, state = store_of(request), request.app.state
    made, changes, text = state.listing
    if changes != store.changes or time.monotonic() > made + LISTING_SECONDS:
        made, changes = time.monotonic(), store.changes
        text = LISTING.dump_json([info(store, job) for job in store.jobs()])
        state.listing = made, changes, text
    return Response(text, media_type="application/json")


@api.get("/jobs/{job_id}")
async def job(request: Request, job_id: Id) -> JobInfo:
    """One job."""
    store = store_of(request)
    return info(store, store.job(job_id))


@api.get("/jobs/{job_id}/metrics")
def metrics(request: Request, job_id: Id) -> list[dict[str, Any]]:
    """The metrics of each step so far."""
    store = store_of(request)
    return store.metrics(store.job(job_id).job_id)


@api.get("/jobs/{job_id}/logs", response_class=PlainTextResponse)
def logs(request: Request, job_id: Id) -> str:
    """The end of what the job has printed."""
    store = store_of(request)
    return store.log(store.job(job_id).job_id)


@api.get("/jobs/{job_id}/completions", response_class=HTMLResponse)
def completions(request: Request, job_id: Id) -> Response:
    """The page of sampled completions beside their pictures."""
    store = store_of(request)
    path = store.run_of(store.job(job_id).job_id) / "completions.html"
    if not path.is_file():
        return HTMLResponse("<!doctype html><meta charset='utf-8'><p>Nothing has been sampled yet.")
    return HTMLResponse(path.read_text(encoding="utf-8"))


@api.get("/jobs/{job_id}/events", response_class=StreamingResponse)
async def events(request: Request, job_id: Id) -> StreamingResponse:
    """Server-sent events until the job is over: «job» whenever it changes, «metrics» with an array of new steps. A row
    of a step that was sent already replaces it and what followed: the job was resumed."""
    store = store_of(request)
    store.job(job_id)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_events(request, store, job_id), media_type="text/event-stream", headers=headers)


async def _events(request: Request, store: Store, job_id: str) -> AsyncIterator[str]:
    shown, seen, beat = None, (0, 0), time.monotonic()
    had = request.headers.get("last-event-id", "")  # of a browser that was cut off
    known = int(had) if had.isascii() and had.isdecimal() and len(had) < 10 else 0
    while not await request.is_disconnected():
        now = info(store, store.job(job_id))
        if now != shown:
            shown = now
            yield f"event: job\ndata: {now.model_dump_json()}\n\n"
        rows, seen = await run_in_threadpool(store.new_metrics, job_id, seen)
        if known and rows and rows[-1]["step"] >= known:
            rows = [row for row in rows if row["step"] > known]
        known = 0
        for i in range(0, len(rows), ROWS_AN_EVENT):
            part = rows[i : i + ROWS_AN_EVENT]
            yield f"event: metrics\nid: {part[-1]['step']}\ndata: {json.dumps(part)}\n\n"
        if now.status not in ("queued", "training"):
            return
        if time.monotonic() > beat + 15:
            beat = time.monotonic()
            yield ": still there\n\n"
        await asyncio.sleep(0.5)


@api.delete("/jobs/{job_id}")
def cancel(request: Request, job_id: Id) -> Started:
    """Cancel a job; what it has learned stays in a checkpoint."""
    job = store_of(request).cancel(job_id)
    message = "cancelled" if job.status == "cancelled" else "it saves a checkpoint and ends"
    return Started(job_id=job_id, message=message, status=job.status)


@api.post("/jobs/{job_id}/resume")
def resume(request: Request, job_id: Id) -> Started:
    """Queue a cancelled or failed job again: it goes on from its last checkpoint."""
    job = store_of(request).resume(job_id)
    return Started(job_id=job_id, message="queued again", status=job.status)


@api.get("/jobs/{job_id}/download", response_class=FileResponse)
def download(request: Request, job_id: Id) -> FileResponse:
    """A ZIP with the trained adapter, tokenizer and settings, and the history of the training."""
    store = store_of(request)
    job = store.job(job_id)
    if job.status != "completed":
        raise Conflict(f"the job is {job.status}: there is a result when it is completed")
    path = store.folder_of(job_id) / f"download-{uuid.uuid4().hex}.zip"
    pack(store, job, path)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", job.job_name).strip("-.")[:80] or "job"
    gone = BackgroundTask(path.unlink, missing_ok=True)
    return FileResponse(path, filename=f"{name}.zip", media_type="application/zip", background=gone)


def pack(store: Store, job: Job, path: pathlib.Path) -> None:
    """Write the ZIP of a completed job."""
    from training.export import copy_processor

    history = store.metrics(job.job_id)
    state = {"global_step": history[-1]["step"] if history else 0, "max_steps": job.total_steps, "log_history": history}
    with store.scratch() as folder:
        copy_processor(job.model, folder)
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            os.link(store.run_of(job.job_id) / "final" / name, folder / name)
        adapter = json.loads((folder / "adapter_config.json").read_text())
        adapter["lora_dropout"] = job.settings["request"]["lora_config"]["lora_dropout"]
        (folder / "adapter_config.json").unlink()
        (folder / "adapter_config.json").write_text(json.dumps(adapter, indent=1) + "\n")
        about = job.settings["request"] | {"base_model": job.model, "grpo_flags": job.settings["flags"]}
        (folder / "training_args.json").write_text(json.dumps(about, indent=1) + "\n")
        (folder / "trainer_state.json").write_text(json.dumps(state) + "\n")
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            for file in sorted(folder.iterdir()):
                archive.write(file, file.name)


@api.post("/jobs/{job_id}/predict")
def predict(
    request: Request,
    job_id: Id,
    picture: Annotated[UploadFile, File(description="a picture")],
    question: Annotated[str, Form(min_length=1, max_length=2000)],
) -> Answer:
    """What the trained model answers to a question about a picture."""
    store = store_of(request)
    job = store.job(job_id)
    if job.status != "completed":
        raise Conflict(f"the job is {job.status}: it answers when it is completed")
    if shutil.which("nvidia-smi") and store.jobs("training"):
        raise Conflict("a job is training, which needs the GPU for itself: ask when it has ended")
    try:
        image = decode_image(picture.file.read())
    except (ValueError, OSError) as error:
        raise HTTPException(400, f"the picture cannot be read: {error}") from None
    if "<" in question and (TAG in question or "<|" in question):
        raise HTTPException(400, "the question holds a control token")
    if not request.app.state.predicting.acquire(blocking=False):
        raise HTTPException(503, "another question is being answered: ask again in a moment")
    try:
        with store.scratch() as folder:
            image.save(folder / "picture.png")
            return Answer(answer=ask(store, job, folder, question))
    finally:
        request.app.state.predicting.release()


def ask(store: Store, job: Job, folder: pathlib.Path, question: str) -> str:
    """What the job's model says to `question` about picture.png in `folder`. Raises HTTPException."""
    row = {"prompt": f"{TAG}{question}", "answer": "0", "images": ["picture.png"]}
    (folder / "row.jsonl").write_text(json.dumps(row) + "\n")
    flags = {"model": job.model, "adapter": store.run_of(job.job_id) / "final", "data": folder / "row.jsonl"}
    flags |= {"max_side": job.settings["flags"]["max_side"], "output": folder / "out", "task": "count"}
    flags |= {"max_tokens": job.settings["flags"]["max_completion_length"], "engine": "hf"}
    command = [sys.executable, "evaluate.py", *(f"--{name}={value}" for name, value in flags.items())]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=ANSWER_SECONDS)
    except subprocess.TimeoutExpired:
        raise HTTPException(503, f"the model did not answer within {ANSWER_SECONDS:.0f} s") from None
    if done.returncode:
        log.error("predict %s: %s", job.job_id, done.stderr[-2000:])
        last = next((line for line in done.stderr.splitlines() if line.startswith("error:")), "see the log")
        raise HTTPException(409, f"the model could not be asked ({last[:200]})")
    return json.loads((folder / "out" / "predictions.jsonl").read_text())["responses"][0]


# --- the service ------------------------------------------------------------------------------------------------------


def make_app(cfg: Config, token: str | None) -> FastAPI:
    """The service over the store in the folder of `cfg`. Raises UserError when another one works there."""
    app = FastAPIOffline(
        title="grpo-vlm: counting", version="1", summary="Train a model to count the objects in your pictures"
    )
    app.state.cfg, app.state.store, app.state.predicting = cfg, Store(cfg.folder), threading.Lock()
    app.state.store.remove_leftovers()
    app.state.listing = 0.0, -1, b""
    app.state.checker, app.state.looking = WorkerPool(INSPECTORS, [INSPECT_ZIP]), threading.BoundedSemaphore(INSPECTORS)
    app.state.keeping = anyio.CapacityLimiter(16)  # threads of uploads: nobody else waits for one of these
    app.include_router(api)

    @app.get("/", response_class=HTMLResponse, responses={200: {"content": {"application/json": {}}}})
    def page(request: Request) -> Response:
        """The page; the service's basics as JSON with «Accept: application/json»."""
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
        response = RedirectResponse("/", 303)  # the address bar need not keep it
        # the page's own calls cannot have headers everywhere
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

    @app.exception_handler(Full)
    @app.exception_handler(OSError)
    def full(_: Request, error: Exception) -> Response:
        if not isinstance(error, Full) and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise error
        return JSONResponse({"detail": "the service's disk is full: make room, then try again"}, 507)

    @app.exception_handler(RequestValidationError)
    def invalid(_: Request, error: RequestValidationError) -> Response:
        problems = [{"loc": list(e["loc"]), "msg": e["msg"], "type": e["type"]} for e in error.errors()]
        return JSONResponse({"detail": problems}, 422)

    app.add_middleware(AccessMiddleware, token=token, most=int(cfg.max_upload * 1e9))
    threading.Thread(target=job_loop, args=(app.state.store,), daemon=True).start()
    return app


def job_loop(store: Store) -> None:
    """Start, watch and conclude jobs, for as long as the service lives."""
    while True:
        try:
            store.poll()
        except Exception:
            log.exception("looking after the jobs")
        time.sleep(0.3)


def main(cfg: Config) -> None:
    local = cfg.host in LOCAL
    token = cfg.token if cfg.token or local else secrets.token_urlsafe(24)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if pathlib.Path(cfg.model).exists():  # jobs run in another folder
        cfg = dataclasses.replace(cfg, model=str(pathlib.Path(cfg.model).resolve()))
    app = make_app(cfg, token)
    hint = f"/?token={token}" if token and token != cfg.token else "/?token=TOKEN" if token else ""
    print(f"http://{cfg.host}:{cfg.port}{hint}", file=sys.stderr)
    uvicorn.run(app, host=cfg.host, port=cfg.port, access_log=False, log_level="warning", timeout_graceful_shutdown=3)
