"""What stands in front of the service: request ids in the log, other sites kept out, the token, the size of uploads,
and no traceback in a response."""

import hmac
import logging
import re
import time
import urllib.parse
import uuid
from typing import Any

from starlette.responses import JSONResponse

LOCAL = ("127.0.0.1", "localhost", "::1", "[::1]")
log = logging.getLogger("serve")


class Gate:
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
                raise TooLarge
            return message

        async def marked(message: dict) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", number.encode())]
            await send(message)

        headers = dict(scope["headers"])
        try:
            if not self._from_here(headers):
                await JSONResponse({"detail": "asked from another site"}, 403)(scope, receive, marked)
            elif self.token and not self._may_pass(scope, headers):
                await JSONResponse({"detail": "a token is needed: Authorization: Bearer TOKEN"}, 401)(
                    scope, receive, marked
                )
            elif int(headers.get(b"content-length", b"0") or 0) > self.most:
                await self._too_large()(scope, receive, marked)
            else:
                await self.app(scope, limited, marked)
        except TooLarge:
            await self._too_large()(scope, receive, marked)
        except Exception:
            log.exception("request %s", number)
            if status == 500:
                await JSONResponse({"detail": f"a fault of the service; its log has it under {number}"}, 500)(
                    scope, receive, marked
                )
        taken_ms = 1000 * (time.perf_counter() - begun)
        log.info("%s %s %r %s %.0f ms", number, scope["method"], scope["path"], status, taken_ms)

    def _from_here(self, headers: dict[bytes, bytes]) -> bool:
        """No page of another site may use a visitor's browser to ask; without a token, nor by a name made for it."""
        host, origin = headers.get(b"host", b"").decode("latin-1"), headers.get(b"origin", b"").decode("latin-1")
        if origin and urllib.parse.urlsplit(origin).netloc != host:
            return False
        return bool(self.token) or re.sub(r":\d+$", "", host) in LOCAL

    def _may_pass(self, scope: dict, headers: dict[bytes, bytes]) -> bool:
        """The token in the header, in the page's cookie, or, for the page's first call, in the address."""
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        cookie = re.search(rb"(?:^|;\s*)token=([^;]+)", headers.get(b"cookie", b""))
        query = re.search(rb"(?:^|&)token=([^&]+)", scope["query_string"])
        offered = [given, *(match[1] for match in (cookie, query) if match)]
        return any(hmac.compare_digest(one, self.token.encode()) for one in offered)

    def _too_large(self) -> JSONResponse:
        return JSONResponse({"detail": f"more than {self.most / 1e9:g} GB"}, 413)


class TooLarge(Exception):
    """An upload is over the limit."""
