"""Middleware of the service: request ids, same-origin check, token, body size, and responses without tracebacks."""

import hmac
import logging
import pathlib
import re
import time
import urllib.parse
import uuid

from starlette.concurrency import run_in_threadpool
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOCAL = ("127.0.0.1", "localhost", "::1", "[::1]")
log = logging.getLogger("serve")
NO_TOKEN = "a token is needed: send Authorization: Bearer TOKEN, or open the page as /?token=TOKEN"
TOKEN_FORM = (pathlib.Path(__file__).parent / "page" / "token.html").read_text()
UPLOAD = "/upload-data"
RESERVED_STEP = 1_000_000  # bytes of an upload of unknown size that may arrive before it reserves room for them
MAX_JSON_BYTES = 1_000_000
MAX_PICTURE_BYTES = 2**28
POLICY = (
    "default-src 'self'; script-src 'self'{}; style-src 'self' 'unsafe-inline'; img-src 'self' blob: data:; "
    "worker-src blob:; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {"X-Frame-Options": "DENY", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "same-origin"}


class OncePerSecond(logging.Filter):
    """Logs the same warning or error at most once a second, so that an attack cannot flood the log."""

    def __init__(self) -> None:
        super().__init__()
        self.passed: dict[object, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        key = (record.pathname, record.lineno)
        if record.levelno >= logging.WARNING and record.created < self.passed.get(key, 0.0) + 1:
            return False
        self.passed[key] = record.created
        return True


def max_body_size(path: str, max_upload: int) -> int:
    """Return the maximum size in bytes of the body of a request for `path`."""
    if path == UPLOAD:
        return max_upload
    return min(MAX_PICTURE_BYTES, max_upload) if path.endswith("/predict") else MAX_JSON_BYTES


def limit_bodies(app: ASGIApp, max_upload: int) -> ASGIApp:
    """Wrap `app` so that a body is refused once it exceeds its limit, even if its size was not announced."""

    async def limited(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        inner = RequestBodyLimitMiddleware(app, max_body_size(path, max_upload))
        await (reserve_room(inner, scope, receive, send) if path == UPLOAD else inner(scope, receive, send))

    return limited


async def reserve_room(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Call `app` for an upload that reserves its size in the store, until the upload is stored or has failed.

    An upload that finds no room is refused: before its body arrives if its size was announced, otherwise meanwhile.
    """
    store, request = scope["app"].state.store, Request(scope)
    request.state.file_id = file_id = str(uuid.uuid4())
    reserved, arrived = int(request.headers.get("content-length") or 0), 0

    async def counted() -> Message:
        nonlocal reserved, arrived
        if not arrived:
            await run_in_threadpool(store.reserve, file_id, reserved)
        message = await receive()
        arrived += len(message.get("body", b""))
        if arrived > reserved + (RESERVED_STEP if message.get("more_body") else 0):
            reserved = arrived
            await run_in_threadpool(store.reserve, file_id, reserved)
        return message

    async def answer(message: Message) -> None:
        store.reserved.pop(file_id, None)  # before the reply, so that whoever gets it finds the room
        await send(message)

    try:
        await app(scope, counted, answer)
    finally:
        store.reserved.pop(file_id, None)


class AccessMiddleware(BaseHTTPMiddleware):
    """Wraps every request: adds a request id and security headers, checks origin, token and declared size, and
    hides tracebacks."""

    def __init__(self, app: ASGIApp, token: str | None, max_upload: int):
        super().__init__(app)
        self.token, self.max_upload = token, max_upload

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        request_id, started = uuid.uuid4().hex[:12], time.perf_counter()
        try:
            response = self._refusal(request) or await call_next(request)
        except ClientDisconnect:
            response = JSONResponse({"detail": "the request was not finished"}, 408)
        except Exception:
            log.exception("request %s", request_id)
            response = JSONResponse({"detail": f"internal error; see request {request_id} in the log"}, 500)
        inline = " 'unsafe-inline'" if request.scope["path"] in ("/docs", "/redoc") else ""  # FastAPI's own pages
        response.headers["X-Request-ID"] = request_id
        response.headers.update(HEADERS | {"Content-Security-Policy": POLICY.format(inline)})
        milliseconds, path = 1000 * (time.perf_counter() - started), request.scope["path"]
        log.info("%s %s %r %s %.0f ms", request_id, request.method, path, response.status_code, milliseconds)
        return response

    def _refusal(self, request: Request) -> Response | None:
        if not self._same_origin(request):
            return JSONResponse({"detail": "requests from other sites are refused"}, 403)
        if self.token and not self._authorised(request):
            if request.scope["path"] == "/" and "text/html" in request.headers.get("accept", ""):
                hint = "; that one was wrong" if "token" in request.query_params else ""
                return HTMLResponse(TOKEN_FORM.format(hint=hint), 401)
            return JSONResponse({"detail": NO_TOKEN}, 401)
        limit = max_body_size(request.scope["path"], self.max_upload)
        if int(request.headers.get("content-length") or 0) > limit:
            return JSONResponse({"detail": f"the body is larger than {limit / 1e6:g} MB"}, 413)
        return None

    def _same_origin(self, request: Request) -> bool:
        """Return False for a request that a page of a different site makes in a visitor's browser.

        Without a token, the Host header must name this machine: the name of another site may resolve to this machine.
        """
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if origin and origin not in (f"http://{host}", f"https://{host}"):
            return False
        return bool(self.token) or re.sub(r":\d+$", "", host) in LOCAL

    def _authorised(self, request: Request) -> bool:
        """Return whether the header, the page's cookie or, for the page's first request, the URL has the token."""
        scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
        tokens = [urllib.parse.unquote(request.cookies.get("token", "")), *request.query_params.getlist("token")]
        if scheme.lower() == "bearer":
            tokens.append(credentials.strip().encode("latin-1").decode(errors="replace"))  # clients send UTF-8
        return any(hmac.compare_digest(token.encode(), self.token.encode()) for token in tokens)
