"""Servers on loopback that stand in for the verifier model in tests: an OpenAI-compatible one, and a hostile one."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterable

import fastapi
import uvicorn


class Server:
    """Serves chat completions as set by the test, and records every request.

    `reply` is a text or a function of the request body. `status` is an HTTP status, or a list with one status per
    request. `finish` is the reason why a reply ends. Each response is delayed by `seconds`, and `raw` replaces its
    body, which is of the type `media`. `max_concurrent` is the highest number of requests that were open at the same
    time. `headers` are those of the last request.
    """

    def __init__(self):
        self.reply, self.status, self.seconds, self.raw = "Correct", 200, 0.0, None
        self.media = "application/json"
        self.models, self.finish = ["judge"], "stop"
        self.requests: list[dict] = []
        self.headers: dict[str, str] = {}
        self.concurrent = self.max_concurrent = 0
        app = fastapi.FastAPI()

        @app.get("/v1/models")
        def models():
            return {"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]}

        @app.post("/v1/chat/completions")
        async def chat(body: dict, request: fastapi.Request):
            self.requests.append(body)
            self.headers = dict(request.headers)
            self.concurrent += 1
            self.max_concurrent = max(self.max_concurrent, self.concurrent)
            await asyncio.sleep(self.seconds)
            self.concurrent -= 1
            if self.raw is not None:
                return fastapi.Response(self.raw, status_code=self.status, media_type=self.media)
            status = self.status.pop(0) if isinstance(self.status, list) else self.status
            if status != 200:
                raise fastapi.HTTPException(status, "no")
            reply = self.reply(body) if callable(self.reply) else self.reply
            message = {"role": "assistant", "content": reply}
            choice = {"index": 0, "message": message, "finish_reason": self.finish}
            return {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"], "choices": [choice]}

        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        threading.Thread(target=self.server.run, kwargs={"sockets": [listener]}, daemon=True).start()
        while not self.server.started:
            time.sleep(0.01)


class HostileServer:
    """Answers every request with the byte strings `parts`, one every `pause` seconds, whether or not they are HTTP.

    `sent` is the number of bytes that have been sent to all clients.
    """

    def __init__(self, parts: Iterable[bytes], pause: float = 0.0):
        self.parts, self.pause, self.sent = parts, pause, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self.listener.accept()
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):  # the client has closed the connection
            connection.recv(1 << 16)
            for part in self.parts:
                connection.sendall(part)
                self.sent += len(part)
                time.sleep(self.pause)
