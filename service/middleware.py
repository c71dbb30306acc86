"""Middleware of the service: request ids, same-origin check, token, upload size, and responses without tracebacks."""

import hmac
import logging
import pathlib
import re
import time
import urllib.parse
import uuid

from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp

LOCAL = ("127.0.0.1", "localhost", "::1", "[::1]")
log = logging.getLogger("serve")
NO_TOKEN = "a token is needed: send Authorization: Bearer TOKEN, or open the page as /?token=TOKEN"
TOKEN_FORM = (pathlib.Path(__file__).parent / "page" / "token.html").read_text()


class AccessMiddleware(BaseHTTPMiddleware):
    """Wraps every request: adds a request id, checks origin, token and declared size, and hides tracebacks."""

    def __init__(self, app: ASGIApp, token: str | None, max_bytes: int):
        super().__init__(app)
        self.token, self.max_bytes = token, max_bytes

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        request_id, started = uuid.uuid4().hex[:12], time.perf_counter()
        try:
            response = self._refusal(request) or await call_next(request)
        except Exception:
            log.exception("request %s", request_id)
            response = JSONResponse({"detail": f"internal error; see request {request_id} in the log"}, 500)
        response.headers["X-Request-ID"] = request_id
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
        if int(request.headers.get("content-length") or 0) > self.max_bytes:
            return JSONResponse({"detail": f"the upload is larger than {self.max_bytes / 1e9:g} GB"}, 413)
        return None

    def _same_origin(self, request: Request) -> bool:
        """Refuse requests that a page of a different site makes in a visitor's browser.

        Without a token, the Host header must name this machine: another site's name may resolve to its address.
        """
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if origin and origin not in (f"http://{host}", f"https://{host}"):
            return False
        return bool(self.token) or re.sub(r":\d+$", "", host) in LOCAL

    def _authorised(self, request: Request) -> bool:
        """Accept the token in the header, in the page's cookie or, for the page's first request, in the URL."""
        scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
        tokens = [urllib.parse.unquote(request.cookies.get("token", "")), *request.query_params.getlist("token")]
        if scheme.lower() == "bearer":
            tokens.append(credentials.strip())
        return any(hmac.compare_digest(token.encode(), self.token.encode()) for token in tokens)
