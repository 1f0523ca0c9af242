"""Connections that hold something and do nothing, and what a client may hold: bounded.

uvicorn bounds how many connections there are and how long one may lie idle between two requests. It bounds neither a
reader that takes nothing while its answer goes on, nor a request that never ends, nor one client's share.
"""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

_Base: Any = AutoHTTPProtocol  # httptools' or h11's: both have `cycle`, `flow`, `transport`, `client`, `connections`

_TOO_MANY = (
    b"HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s"
)
_TOO_MANY_BODY = (
    b'{"error": {"message": "this address has too many connections open", "type": "rate_limit_error", "param": null, '
    b'"code": "too_many_connections"}}'
)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    total: int = 4096  # connections; over it: 503. The queue's bound is the scheduler's
    per_address: int = 2048  # of one client's address; over it: 429
    head_bytes: int = 64 << 10  # of a request's line and headers, about
    idle: float = 90.0  # seconds without a request, as Serve's proxy has it; also for a request's head to come
    body: float = 60.0  # seconds without a byte of a body that is on its way
    unread: float = 30.0  # seconds that a reader may be behind by more than what the server keeps for it (64 KiB)


class Connection(_Base):
    """A connection that knows how long it has been doing nothing. `limits` is set by whoever makes the class."""

    limits = ConnectionLimits()

    def connection_made(self, transport: Any) -> None:
        self.last_heard = self._since = time.monotonic()
        self._head = 0
        self._answered: Any = None  # the last request that was answered
        self._behind_since: float | None = None
        super().connection_made(transport)
        address = self.client[0] if self.client else None
        if address and sum(c.client is not None and c.client[0] == address for c in self.connections) > (
            self.limits.per_address
        ):
            transport.write(_TOO_MANY % (len(_TOO_MANY_BODY), _TOO_MANY_BODY))
            transport.close()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self.last_heard = time.monotonic()
        super().data_received(data)
        self._head = self._head + len(data) if self._waits() else 0
        if self._head > self.limits.head_bytes:
            self.transport.abort()

    def _waits(self) -> bool:
        """There is no request, or only a part of its head."""
        return self.cycle is None or self.cycle.response_complete

    def overdue(self, now: float) -> bool:
        """To be asked about every second: has it kept us waiting too long?"""
        if not self._waits() or self._answered is not self.cycle:
            self._answered, self._since = self.cycle, now
        if not self.flow.write_paused:
            self._behind_since = None
        elif self._behind_since is None:
            self._behind_since = now
        if self._behind_since is not None and now - self._behind_since > self.limits.unread:
            return True
        if self._waits():
            return now - self._since > self.limits.idle + 1.0  # uvicorn's own timer goes first
        return self.cycle.more_body and now - self.last_heard > self.limits.body


async def sweep(connections: Iterable[Any], seconds: float = 1.0) -> None:
    """Break connections that are overdue, for ever. Their requests are dropped as if the client had left."""
    while True:
        await asyncio.sleep(seconds)
        now = time.monotonic()
        for connection in list(connections):
            if connection.transport is not None and connection.overdue(now):
                connection.transport.abort()  # to close would wait until all was read
