"""The calls that every request waits for, over sockets instead of Ray.

A Ray call passes some ten threads. In a stream of calls it takes a millisecond; after a pause, when every one of them
has to be woken on cores that have forgotten its code, five or more. A request makes two on its way in. All other calls
stay Ray's, and these go by Ray, too, where a channel fails: whoever answers must bear to be asked the same twice.

A connection begins with the server's key, which came by a Ray call. Then each message is its size (4 bytes, big endian)
and its body: (number, method, arguments) in pickle from the client, who has shown the key; (number, answer) in JSON
back, so that whoever takes a dead server's port can run nothing at a client.
"""

import asyncio
import hmac
import json
import logging
import pickle
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from .tasks import Tasks

logger = logging.getLogger(__name__)

_GREETING_SECONDS = 5.0  # for a connection to be made, or to show its key
_MAX_MESSAGE = 256 << 20  # bytes
_SIZE = struct.Struct("!I")
_KEY_BYTES = 32


class ChannelBroken(OSError):
    """The call was not answered; it may have been carried out."""


@dataclass(frozen=True, slots=True)
class ChannelAddress:
    host: str
    port: int
    key: bytes


class _Messages(asyncio.Protocol):
    """Cuts what comes into messages."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by class

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while len(self.buffer) >= _SIZE.size:
            (size,) = _SIZE.unpack_from(self.buffer)
            if size > _MAX_MESSAGE:
                self.transport.abort()
                return
            if len(self.buffer) < _SIZE.size + size:
                return
            body = bytes(self.buffer[_SIZE.size : _SIZE.size + size])
            del self.buffer[: _SIZE.size + size]
            self.message(body)

    def message(self, body: bytes) -> None:
        raise NotImplementedError

    def send(self, body: bytes) -> None:
        self.transport.write(_SIZE.pack(len(body)) + body)


class ChannelServer:
    """Answers on the event loop that runs. What `handlers` return must be JSON."""

    def __init__(self, host: str, handlers: Mapping[str, Callable[..., Awaitable[Any]]]):
        self.handlers = handlers
        self._connections: set[_Served] = set()
        self.tasks = Tasks()
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.address = ChannelAddress(host, listener.getsockname()[1], secrets.token_bytes(_KEY_BYTES))
        self._listening = self.tasks.spawn(
            asyncio.get_running_loop().create_server(lambda: _Served(self), sock=listener)
        )

    async def close(self) -> None:
        (await self._listening).close()
        for connection in list(self._connections):
            connection.transport.abort()


class _Served(_Messages):
    def __init__(self, server: ChannelServer):
        super().__init__()
        self.server = server
        self.greeted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.server._connections.add(self)
        asyncio.get_running_loop().call_later(_GREETING_SECONDS, self._expect_greeting)

    def connection_lost(self, error: Exception | None) -> None:
        self.server._connections.discard(self)

    def _expect_greeting(self) -> None:
        if not self.greeted:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.greeted:
            super().data_received(data)
            return
        self.buffer += data
        if len(self.buffer) >= _KEY_BYTES:
            shown = bytes(self.buffer[:_KEY_BYTES])
            del self.buffer[:_KEY_BYTES]
            self.greeted = hmac.compare_digest(shown, self.server.address.key)
            if self.greeted:
                super().data_received(b"")
            else:
                self.transport.abort()

    def message(self, body: bytes) -> None:
        self.server.tasks.spawn(self._answer(body))

    async def _answer(self, body: bytes) -> None:
        try:
            number, method, args = pickle.loads(body)
            answer = json.dumps((number, await self.server.handlers[method](*args)))
        except Exception:  # whatever it is, the caller asks again by Ray and is told there
            logger.exception("a call by a channel failed")
            self.transport.abort()
            return
        self.send(answer.encode())


class Channel:
    """The client's side. It connects at the first call, and again after it broke; lives on one event loop."""

    def __init__(self, find: Callable[[], Awaitable[ChannelAddress]]):
        """`find` says where the server is; it may raise what it likes."""
        self._find = find
        self._connection: _Calling | None = None
        self._connecting = asyncio.Lock()
        self._number = 0

    async def call(self, method: str, *args: Any, timeout: float) -> Any:
        """The handler's answer, as JSON brings it. Raises `ChannelBroken`, or what `find` raises."""
        try:
            async with asyncio.timeout(timeout):
                connection = await self._connected()
                self._number += 1
                answer = connection.waiting[self._number] = asyncio.get_running_loop().create_future()
                connection.send(pickle.dumps((self._number, method, args), pickle.HIGHEST_PROTOCOL))
                return await answer
        except TimeoutError:
            self.close()
            raise ChannelBroken(f"{method} was not answered within {timeout:g} s") from None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.transport.abort()

    async def _connected(self) -> "_Calling":
        async with self._connecting:
            if self._connection is None or self._connection.lost:
                address = await self._find()
                try:
                    async with asyncio.timeout(_GREETING_SECONDS):
                        _, self._connection = await asyncio.get_running_loop().create_connection(
                            lambda: _Calling(address.key), address.host, address.port
                        )
                except (OSError, TimeoutError) as error:
                    raise ChannelBroken(f"no connection to {address.host}:{address.port}: {error}") from None
            return self._connection


class _Calling(_Messages):
    def __init__(self, key: bytes):
        super().__init__()
        self.key = key
        self.lost = False
        self.waiting: dict[int, asyncio.Future] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.write(self.key)

    def message(self, body: bytes) -> None:
        number, answer = json.loads(body)
        future = self.waiting.pop(number, None)
        if future is not None and not future.done():
            future.set_result(answer)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        for future in self.waiting.values():
            if not future.done():
                future.set_exception(ChannelBroken("the connection ended before the answer"))
