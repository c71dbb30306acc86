"""What stands in front of the service: request ids in the log, other sites kept out, the token, the size of uploads,
and no traceback in a response."""

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
NO_TOKEN = "a token is needed: Authorization: Bearer TOKEN, or open the page as /?token=TOKEN"
ASK = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Token</title><body style="font: 16px system-ui; margin: 15vh auto; max-width: 22em; padding: 0 1em">
<form action="/"><label for="token">This service asks for a token{}. It was printed where it was started.</label>
<p><input id="token" name="token" type="password" required autofocus> <button>Open</button></form></html>"""


class AccessMiddleware:
    """In front of everything: request ids, the token, the size of uploads, and no traceback in a response."""

    def __init__(self, app: Any, token: str | None, most: int):
        self.app, self.token, self.most = app, token, most

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        number, begun, status, taken = uuid.uuid4().hex[:12], time.perf_counter(), 500, 0

        async def limited() -> dict:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self.most:
                raise HTTPException(413, self._too_large())
            return message

        async def marked(message: dict) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", number.encode())]
            await send(message)

        headers = dict(scope["headers"])
        try:
            if not self._same_origin(headers):
                await JSONResponse({"detail": "asked from another site"}, 403)(scope, receive, marked)
            elif self.token and not self._authorised(scope, headers):
                await self._no_token(scope, headers)(scope, receive, marked)
            elif int(headers.get(b"content-length", b"0") or 0) > self.most:
                await JSONResponse({"detail": self._too_large()}, 413)(scope, receive, marked)
            else:
                await self.app(scope, limited, marked)
        except Exception:
            log.exception("request %s", number)
            if status == 500:
                await JSONResponse({"detail": f"a fault of the service; its log has it under {number}"}, 500)(
                    scope, receive, marked
                )
        taken_ms = 1000 * (time.perf_counter() - begun)
        log.info("%s %s %r %s %.0f ms", number, scope["method"], scope["path"], status, taken_ms)

    def _same_origin(self, headers: dict[bytes, bytes]) -> bool:
        """No page of another site may use a visitor's browser to ask; without a token, nor by a name made for it."""
        host, origin = headers.get(b"host", b"").decode("latin-1"), headers.get(b"origin", b"").decode("latin-1")
        try:
            if origin and urllib.parse.urlsplit(origin).netloc != host:
                return False
        except ValueError:  # an address that is none
            return False
        return bool(self.token) or re.sub(r":\d+$", "", host) in LOCAL

    def _authorised(self, scope: dict, headers: dict[bytes, bytes]) -> bool:
        """The token in the header, in the page's cookie, or, for the page's first call, in the address."""
        kind, _, given = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        offered = [given.strip() if kind.lower() == "bearer" else "", *self._in_address(scope)]
        try:
            cookie = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1")).get("token")
            offered.append(urllib.parse.unquote(cookie.value) if cookie else "")
        except CookieError:
            pass
        return any(hmac.compare_digest(one.encode(), self.token.encode()) for one in offered)

    def _in_address(self, scope: dict) -> list[str]:
        return urllib.parse.parse_qs(scope["query_string"].decode("latin-1")).get("token", [])

    def _no_token(self, scope: dict, headers: dict[bytes, bytes]) -> Response:
        """A form for people, a sentence for programs."""
        if scope["path"] == "/" and b"text/html" in headers.get(b"accept", b""):
            return HTMLResponse(ASK.format(html.escape("; that one was wrong" if self._in_address(scope) else "")), 401)
        return JSONResponse({"detail": NO_TOKEN}, 401)

    def _too_large(self) -> str:
        return f"more than {self.most / 1e9:g} GB"
