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

_KEEP_ALIVE_SECONDS = 90  # for a connection without a request, as Serve's proxy has it
_DRAIN_SECONDS = 15  # for open streams when the ingress is taken away; Serve kills it after 20
_BACKLOG = 2048
_MAX_CONNECTIONS = 4096  # over it: 503; the queue's bound is the scheduler's


@dataclass(frozen=True, slots=True)
class ListenAddress:
    host: str
    port: int


class HttpServer:
    """Serves `app` on the event loop that runs; several ingresses of this machine share the port."""

    def __init__(self, app: ASGIApp, address: ListenAddress):
        """Begin to listen. Raises `ConfigError` where another program does already."""
        config = uvicorn.Config(
            app,
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_DRAIN_SECONDS,
            limit_concurrency=_MAX_CONNECTIONS,
        )
        self._server = uvicorn.Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[_listen(address)]))

    def check(self) -> None:
        """Raise where it no longer serves."""
        if self._task.done():
            raise EngineDead("the ingress no longer listens")

    async def close(self) -> None:
        """Take no new connection, and wait a while for the streams that are open."""
        self._server.should_exit = True
        await asyncio.wait([self._task], timeout=_DRAIN_SECONDS + 1)


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
