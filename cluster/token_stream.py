"""Frames of tokens from a group's leader to an ingress: one a step, carrying all of that ingress's sequences.

They travel over a TCP connection of their own, one for each ingress and leader: a Ray call a step costs a millisecond
and two threads' turns on each side, when both cores already have the next step. The ingress asks the leader by a Ray
call where to connect (`TokenServer.open`), shows the ticket it got, and then only reads.

On the wire a frame is its size (4 bytes, big endian) and that many bytes of JSON; size 0 says "I am here". Each side
says something every `BEAT_SECONDS`, and gives the other up after `SILENCE_SECONDS` without.
"""

import asyncio
import base64
import hmac
import json
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..scheduler import errors
from ..scheduler.errors import PagedRayError
from ..scheduler.request import SequenceOutput, TokenLogprobs
from .tasks import Tasks

logger = logging.getLogger(__name__)

BEAT_SECONDS = 2.0
SILENCE_SECONDS = 12.0
_KEEP_SECONDS = 60.0
_GREETING_SECONDS = 5.0  # for a connection to show its ticket
_ACCEPT_SECONDS = 0.1  # after a connection that could not be taken
_MAX_FRAME = 64 << 20  # bytes
_MAX_UNSENT = 64 << 20  # bytes that wait for an ingress that does not read
_SIZE = struct.Struct("!I")
_BEAT = _SIZE.pack(0)
_TICKET_BYTES = 32


@dataclass(frozen=True, slots=True)
class TokenFrame:
    """News of several sequences, in order. `failures` holds sequences that ended in an error instead."""

    outputs: tuple[SequenceOutput, ...] = ()
    failures: tuple[tuple[str, PagedRayError], ...] = ()


@dataclass(frozen=True, slots=True)
class StreamAddress:
    """Where an ingress fetches its frames. The ticket is good once."""

    host: str
    port: int
    ticket: bytes


# -- a frame as bytes: JSON and not pickle, so that whoever takes a dead leader's port can run nothing here ------------


def encode(frame: TokenFrame) -> bytes:
    outputs = [
        (
            o.request_id,
            o.token_ids,
            o.finish_reason,
            o.stop_token_id,
            o.num_cached_tokens,
            o.moving,
            [(at.logprob, at.top) for at in o.logprobs],
            *_rare(o),
        )
        for o in frame.outputs
    ]
    failures = [(request_id, *encode_error(e)) for request_id, e in frame.failures]
    body = json.dumps((outputs, failures)).encode()
    return _SIZE.pack(len(body)) + body


def _rare(output: SequenceOutput) -> tuple[Any, ...]:
    """What hardly any output has: not a byte for the others."""
    if not output.prompt_logprobs and not output.embedding:
        return ()
    embedding = base64.b64encode(output.embedding).decode()
    return [(at.logprob, at.top) for at in output.prompt_logprobs], embedding


def decode(body: bytes | bytearray) -> TokenFrame:
    outputs, failures = json.loads(body)
    return TokenFrame(
        tuple(
            SequenceOutput(
                request_id,
                tuple(token_ids),
                _logprobs(logprobs),
                reason,
                stop_token_id,
                num_cached,
                moving,
                *((_logprobs(rare[0]), base64.b64decode(rare[1])) if rare else ()),
            )
            for request_id, token_ids, reason, stop_token_id, num_cached, moving, logprobs, *rare in outputs
        ),
        tuple((request_id, decode_error(name, args)) for request_id, name, args in failures),
    )


def _logprobs(raw: Sequence[Any]) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(value, tuple((t, v) for t, v in top)) for value, top in raw)


def encode_error(error: PagedRayError) -> tuple[str, Sequence[Any]]:
    """The name of the class of `scheduler.errors` that it is one of, and its arguments."""
    return next(c.__name__ for c in type(error).__mro__ if getattr(errors, c.__name__, None) is c), error.args


def decode_error(name: str, args: Sequence[Any]) -> PagedRayError:
    return getattr(errors, name)(*args)


# -- the leader's side -------------------------------------------------------------------------------------------------


class Outbox:
    """What a leader has for one ingress. `send` may be called by any thread, the rest by the event loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_broken: Callable[[], None]):
        self.request_ids: set[str] = set()  # the ingress's unfinished sequences
        self.last_heard = self.last_sent = time.monotonic()
        self.kept_until = 0.0  # though the ingress has fallen silent
        self._loop = loop
        self._on_broken = on_broken
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._unsent = bytearray()  # kept while there is no connection yet, or the ingress reads slowly

    def send(self, frame: TokenFrame) -> None:
        """Hand over a frame without waiting: it is in the kernel when this returns, unless the ingress is slow."""
        with self._lock:
            self._unsent += encode(frame)
            if self._flush():
                self._loop.call_soon_threadsafe(self._watch)

    def beat(self, now: float) -> None:
        if now - self.last_sent > BEAT_SECONDS:
            self.last_sent = now
            with self._lock:
                if self._socket is not None and not self._unsent:
                    self._unsent += _BEAT
                    self._flush()

    def attach(self, connection: socket.socket) -> None:
        """Send by this connection, first what has piled up while there was none."""
        if self._socket is not None:
            self._break()  # of its last frame a part may be on the way
        self.last_heard = time.monotonic()
        with self._lock:
            self._socket = connection
            self._flush()
        self._loop.add_reader(connection, self._read)
        self._watch()

    def close(self) -> None:
        with self._lock:
            connection, self._socket = self._socket, None
        if connection is not None:
            self._loop.remove_reader(connection)
            self._loop.remove_writer(connection)
            connection.close()

    def _flush(self) -> bool:
        """Send what the kernel takes; True where the event loop has to see to the rest. The lock is held."""
        if self._socket is None:
            return len(self._unsent) > _MAX_UNSENT
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            return True  # broken: reading will say so
        return bool(self._unsent)

    def _watch(self) -> None:
        """Send the rest when the ingress has read; give it up where it reads nothing."""
        if len(self._unsent) > _MAX_UNSENT:
            self._break()
        elif self._socket is not None and self._unsent:
            self._loop.add_writer(self._socket, self._write)

    def _write(self) -> None:
        with self._lock:
            self._flush()
            done = not self._unsent
        if done and self._socket is not None:
            self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        try:
            heard = self._socket.recv(4096) if self._socket is not None else b""
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            heard = b""
        if heard:
            self.last_heard = time.monotonic()
        else:
            self._break()

    def _break(self) -> None:
        self.close()
        with self._lock:
            self._unsent.clear()
        self._on_broken()


class TokenServer:
    """All outboxes of a leader, and the port where ingresses fetch them. Lives on the leader's event loop.

    `on_broken(ingress_id)` is called when an ingress's connection ended; `on_silent` when nothing was heard of it for
    `SILENCE_SECONDS`, and its outbox is gone.
    """

    def __init__(self, host: str, on_broken: Callable[[str], None], on_silent: Callable[[str, Sequence[str]], None]):
        self.host = host
        self._on_broken, self._on_silent = on_broken, on_silent
        self._outboxes: dict[str, Outbox] = {}
        self._tickets: dict[bytes, str] = {}  # shown by nobody yet: the ingress it was made for
        self._loop = asyncio.get_running_loop()
        self._tasks = Tasks()
        self._listener = socket.create_server((host, 0), family=_family(host), backlog=128)
        self._listener.setblocking(False)
        self._tasks.spawn(self._accept())

    def open(self, ingress_id: str) -> StreamAddress:
        for ticket in [t for t, i in self._tickets.items() if i == ingress_id]:
            del self._tickets[ticket]  # an ingress has one connection
        ticket = secrets.token_bytes(_TICKET_BYTES)
        self._tickets[ticket] = ingress_id
        self.outbox(ingress_id).last_heard = time.monotonic()
        return StreamAddress(self.host, self._listener.getsockname()[1], ticket)

    def outbox(self, ingress_id: str) -> Outbox:
        if ingress_id not in self._outboxes:
            self._outboxes[ingress_id] = Outbox(self._loop, lambda: self._on_broken(ingress_id))
        return self._outboxes[ingress_id]

    def keep(self, ingress_id: str, frame: TokenFrame) -> None:
        """For an ingress that has fallen silent, for a minute."""
        outbox = self.outbox(ingress_id)
        outbox.kept_until = time.monotonic() + _KEEP_SECONDS
        outbox.send(frame)

    def beat(self) -> None:
        """To be called about every second."""
        now = time.monotonic()
        for ingress_id, outbox in list(self._outboxes.items()):
            if now - outbox.last_heard > SILENCE_SECONDS:
                request_ids = tuple(outbox.request_ids)
                outbox.request_ids.clear()
                if now > outbox.kept_until:
                    outbox.close()
                    del self._outboxes[ingress_id]
                    self._tickets = {t: i for t, i in self._tickets.items() if i != ingress_id}
                if request_ids or ingress_id not in self._outboxes:
                    self._on_silent(ingress_id, request_ids)
            else:
                outbox.beat(now)

    def close(self) -> None:
        self._tasks.cancel()
        self._listener.close()
        for outbox in self._outboxes.values():
            outbox.close()

    async def _accept(self) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._listener)
            except OSError as error:  # of that connection, or no descriptor is free
                logger.warning("an ingress cannot connect: %s", error)
                await asyncio.sleep(_ACCEPT_SECONDS)
            else:
                self._tasks.spawn(self._greet(connection))

    async def _greet(self, connection: socket.socket) -> None:
        """Read the ticket; whoever has none is sent away."""
        shown = b""
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(_GREETING_SECONDS):
                while len(shown) < _TICKET_BYTES:
                    news = await self._loop.sock_recv(connection, _TICKET_BYTES - len(shown))
                    if not news:
                        break
                    shown += news
        except (OSError, TimeoutError):
            pass
        ticket = next((t for t in self._tickets if hmac.compare_digest(t, shown)), None)
        if ticket is None:
            connection.close()
        else:
            self.outbox(self._tickets.pop(ticket)).attach(connection)


# -- the ingress's side ------------------------------------------------------------------------------------------------


class _Reader(asyncio.Protocol):
    def __init__(self, ticket: bytes, on_frame: Callable[[TokenFrame], None]):
        self.ticket, self.on_frame = ticket, on_frame
        self.lost = asyncio.get_running_loop().create_future()
        self.last_heard = time.monotonic()
        self._buffer = bytearray()

    def connection_made(self, transport) -> None:
        self.transport = transport
        transport.write(self.ticket)

    def data_received(self, data: bytes) -> None:
        self.last_heard = time.monotonic()
        self._buffer += data
        at = 0
        while len(self._buffer) - at >= _SIZE.size:
            (size,) = _SIZE.unpack_from(self._buffer, at)
            if size > _MAX_FRAME:
                self.transport.abort()
                return
            end = at + _SIZE.size + size
            if len(self._buffer) < end:
                break
            if size:
                self.on_frame(decode(self._buffer[at + _SIZE.size : end]))
            at = end
        del self._buffer[:at]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)


async def read_frames(address: StreamAddress, on_frame: Callable[[TokenFrame], None]) -> None:
    """Call `on_frame` for each frame, until the connection ends or nothing was heard for `SILENCE_SECONDS`.

    Raises `OSError` or `TimeoutError` where there is no connection to be had.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(_GREETING_SECONDS):
        transport, reader = await loop.create_connection(
            lambda: _Reader(address.ticket, on_frame), address.host, address.port
        )
    try:
        while time.monotonic() - reader.last_heard < SILENCE_SECONDS:
            done, _ = await asyncio.wait([reader.lost], timeout=BEAT_SECONDS)
            if done:
                return
            transport.write(b".")
    finally:
        transport.abort()


def _family(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
