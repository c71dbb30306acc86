"""Middleware of the service: request ids, same-origin check, token, upload limit, and responses without tracebacks."""

import hmac
import html
import logging
import re
import time
import urllib.parse
import uuid
from http.cookies import CookieError, SimpleCookie
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, Response

LOCAL = ("127.0.0.1", "localhost", "::1", "[::1]")
log = logging.getLogger("serve")
NO_TOKEN = "a token is needed: send Authorization: Bearer TOKEN, or open the page as /?token=TOKEN"
TOKEN_FORM = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Token</title><body style="font: 16px system-ui; margin: 15vh auto; max-width: 22em; padding: 0 1em">
<form action="/"><label for="token">This service needs a token{}. It was printed when the service started.</label>
<p><input id="token" name="token" type="password" required autofocus> <button>Open</button></form></html>"""


class AccessMiddleware:
    """Wraps every request: adds a request id, checks origin, token and size, and hides tracebacks."""

    def __init__(self, app: Any, token: str | None, max_bytes: int):
        self.app, self.token, self.max_bytes = app, token, max_bytes

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id, started, status, num_bytes = uuid.uuid4().hex[:12], time.perf_counter(), 500, 0

        async def limited_receive() -> dict:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.max_bytes:
                raise HTTPException(413, self._too_large())
            return message

        async def send_with_id(message: dict) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await send(message)

        headers = dict(scope["headers"])
        try:
            if not self._same_origin(headers):
                refusal = JSONResponse({"detail": "requests from other sites are refused"}, 403)
                await refusal(scope, receive, send_with_id)
            elif self.token and not self._authorised(scope, headers):
                await self._no_token(scope, headers)(scope, receive, send_with_id)
            elif int(headers.get(b"content-length", b"0") or 0) > self.max_bytes:
                await JSONResponse({"detail": self._too_large()}, 413)(scope, receive, send_with_id)
            else:
                await self.app(scope, limited_receive, send_with_id)
        except Exception:
            log.exception("request %s", request_id)
            if status == 500:  # no response has been started
                failure = JSONResponse({"detail": f"internal error; see request {request_id} in the log"}, 500)
                await failure(scope, receive, send_with_id)
        milliseconds = 1000 * (time.perf_counter() - started)
        log.info("%s %s %r %s %.0f ms", request_id, scope["method"], scope["path"], status, milliseconds)

    def _same_origin(self, headers: dict[bytes, bytes]) -> bool:
        """Refuse requests that a page of a different site makes in a visitor's browser.

        Without a token, also refuse requests whose Host header does not name this machine, because another site's name
        may resolve to this machine's address.
        """
        host, origin = headers.get(b"host", b"").decode("latin-1"), headers.get(b"origin", b"").decode("latin-1")
        try:
            if origin and urllib.parse.urlsplit(origin).netloc != host:
                return False
        except ValueError:  # the origin is not a URL
            return False
        return bool(self.token) or re.sub(r":\d+$", "", host) in LOCAL

    def _authorised(self, scope: dict, headers: dict[bytes, bytes]) -> bool:
        """Accept the token in the header, in the page's cookie or, for the page's first request, in the URL."""
        scheme, _, credentials = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        tokens = [credentials.strip() if scheme.lower() == "bearer" else "", *self._url_tokens(scope)]
        try:
            cookie = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1")).get("token")
            tokens.append(urllib.parse.unquote(cookie.value) if cookie else "")
        except CookieError:
            pass
        return any(hmac.compare_digest(token.encode(), self.token.encode()) for token in tokens)

    def _url_tokens(self, scope: dict) -> list[str]:
        return urllib.parse.parse_qs(scope["query_string"].decode("latin-1")).get("token", [])

    def _no_token(self, scope: dict, headers: dict[bytes, bytes]) -> Response:
        """Return a token form to a browser and a JSON error to a program."""
        if scope["path"] == "/" and b"text/html" in headers.get(b"accept", b""):
            hint = "; that one was wrong" if self._url_tokens(scope) else ""
            return HTMLResponse(TOKEN_FORM.format(html.escape(hint)), 401)
        return JSONResponse({"detail": NO_TOKEN}, 401)

    def _too_large(self) -> str:
        return f"the upload is larger than {self.max_bytes / 1e9:g} GB"
