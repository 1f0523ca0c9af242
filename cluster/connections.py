"""Connections that hold something and do nothing, and what a client may hold: bounded.

uvicorn bounds how long a connection may lie idle between two requests. It bounds neither a reader that takes nothing
while its answer goes on, nor a request that never ends, nor one client's share.
"""

import asyncio
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from ..scheduler.errors import InvalidRequest, Overloaded, PagedRayError
from .openai.protocol import error_envelope

_Base: Any = AutoHTTPProtocol  # httptools' or h11's: both have `cycle`, `flow`, `transport`, `client`, `connections`


class _TooMany(Overloaded):
    code = "too_many_connections"


class _Full(_TooMany):
    status = 503
    type = "service_unavailable_error"


def _refusal(error: PagedRayError) -> bytes:
    """A whole response, for what no application is asked about."""
    body = json.dumps(error_envelope(error))
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", "connection: close"]
    lines += ["content-type: application/json", f"content-length: {len(body)}"]
    if isinstance(error, Overloaded):
        lines.append(f"retry-after: {error.retry_after:.0f}")
    return "\r\n".join([*lines, "", body]).encode()


_FULL = _refusal(_Full("this server has too many connections open"))
_TOO_MANY = _refusal(_TooMany("this address has too many connections open"))


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    total: int = 4096  # connections of an ingress; over it: 503. The queue's bound is the scheduler's
    per_address: int = 2048  # of one client's address; over it: 429
    head_bytes: int = 64 << 10  # of a request's line and headers, about
    rest_bytes: int = 64 << 20  # of a body that was refused before all of it was there: it is read and forgotten
    idle: float = 90.0  # seconds without a request, as Serve's proxy has it; also for a request's head to come
    body: float = 60.0  # seconds without a byte of a body that is on its way
    unread: float = 30.0  # seconds that a reader may be behind by more than what the server keeps for it (64 KiB)


class Connection(_Base):
    """A connection that knows how long it has been doing nothing. `limits` is set by whoever makes the class."""

    limits = ConnectionLimits()

    def connection_made(self, transport: Any) -> None:
        self.last_heard = self._since = time.monotonic()
        self._head = 0
        self._whole: Any = None  # the last request whose body has come to its end
        self._answered: Any = None  # the last request that was answered
        self._behind_since: float | None = None
        super().connection_made(transport)
        address = self.client[0] if self.client else None
        if len(self.connections) > self.limits.total:
            transport.write(_FULL)
            transport.close()
        elif address and sum(c.client is not None and c.client[0] == address for c in self.connections) > (
            self.limits.per_address
        ):
            transport.write(_TOO_MANY)
            transport.close()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn says to what is no HTTP, in the shape of all other errors."""
        self.transport.write(_refusal(InvalidRequest(msg.rstrip("."))))
        self.transport.close()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._whole = self.cycle

    def _takes_rest(self) -> bool:
        """A request was answered before all of its body was there. (h11 does not say when it is, and bounds heads.)"""
        return self.cycle is not None and self.cycle.more_body and self._whole is not self.cycle

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self.last_heard = time.monotonic()
        took_rest = self._takes_rest()
        super().data_received(data)
        takes_rest = self._takes_rest()
        self._head = self._head + len(data) if self._waits() and took_rest == takes_rest else 0
        # A client may write all of its body before it reads that it is too large.
        if self._head > (self.limits.rest_bytes if takes_rest else self.limits.head_bytes):
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
