"""Close the connections of clients that do not finish their requests. uvicorn alone would keep them open forever."""

import asyncio
import resource

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 1000
PATIENCE = 10.0  # seconds for the header of a request, and between two checks of the progress of its body
MIN_BYTES = 10_000  # bytes of an unfinished body that must arrive between two checks
NO_ROOM = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


def max_connections() -> int:
    """Return the maximum number of connections. Each may use two open files, and the service itself needs some."""
    return max(8, min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))


class Connection(H11Protocol):
    """An HTTP connection with a time limit for the header and a minimum speed for the body of a request.

    When there are too many connections, the one that has waited longest for the rest of a request is closed.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.timer: asyncio.TimerHandle | None = None
        self._restart_timer()
        if len(self.connections) > max_connections():
            waiting = [other for other in self.connections if other is not self and other._unfinished()]
            if waiting:
                longest = min(waiting, key=lambda other: other.since)
                self.connections.discard(longest)  # so that the next new connection closes a different one
                longest.transport.abort()
            else:
                transport.write(NO_ROOM)
                transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        in_header = self.conn.their_state is h11.IDLE
        super().data_received(data)
        self.received += len(data)
        if in_header and self.conn.their_state is h11.SEND_BODY:
            self._restart_timer()

    def on_response_complete(self) -> None:
        self._restart_timer()
        super().on_response_complete()

    def _restart_timer(self) -> None:
        """Count the bytes of a body anew, and check this connection in `PATIENCE` seconds."""
        if self.timer:
            self.timer.cancel()
        self.since, self.received = self.loop.time(), 0
        self.timer = self.loop.call_later(PATIENCE, self._close_if_stalled)

    def _unfinished(self) -> bool:
        """Return whether this connection is waiting for the rest of a request or for the next request."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and not self.flow.read_paused

    def _close_if_stalled(self) -> None:
        if self._unfinished() and (self.conn.their_state is h11.IDLE or self.received < MIN_BYTES):
            self.transport.abort()
        elif self.conn.their_state is h11.SEND_BODY:
            self._restart_timer()
