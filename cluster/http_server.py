"""HTTP in the ingress's own process, for `pagedray serve` on this machine: no proxy between a client and its answer.

Serve's HTTP proxy hands every request to the ingress by a Ray call, its body by another, and every chunk of the answer
by one more. On other clusters, which have a proxy on each node and balance between them, Serve's way is kept.
"""

import asyncio
import socket
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp

from ..scheduler.errors import ConfigError, EngineDead
from .connections import Connection, ConnectionLimits, sweep

DRAIN_SECONDS = 55  # for open streams when the ingress is taken away; then Serve kills it
_BACKLOG = 2048


@dataclass(frozen=True, slots=True)
class ListenAddress:
    host: str
    port: int


class HttpServer:
    """Serves `app` on the event loop that runs; several ingresses of this machine share the port."""

    def __init__(self, app: ASGIApp, address: ListenAddress, limits: ConnectionLimits | None = None):
        """Begin to listen. Raises `ConfigError` where another program does already."""
        limits = limits or ConnectionLimits()
        config = uvicorn.Config(
            app,
            http=type("LimitedConnection", (Connection,), {"limits": limits}),
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=int(limits.idle),
            timeout_graceful_shutdown=DRAIN_SECONDS,
        )
        self._server = uvicorn.Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[_listen(address)]))
        self._sweeper = asyncio.create_task(sweep(self._server.server_state.connections))

    def check(self) -> None:
        """Raise where it no longer serves."""
        if self._task.done():
            raise EngineDead("the ingress no longer listens")

    async def close(self) -> None:
        """Take no new connection, and wait a while for the streams that are open."""
        self._server.should_exit = True
        await asyncio.wait([self._task], timeout=DRAIN_SECONDS + 1)
        self._sweeper.cancel()


def _listen(address: ListenAddress) -> socket.socket:
    family, *_, where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind(where)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {address.host}:{address.port}: {error.strerror or error}") from None
    return listener
