"""The ingress's own HTTP server: what it answers, sharing a port, and leaving while streams are open."""

import asyncio
import socket

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from pagedray.cluster.http_server import HttpServer, ListenAddress
from pagedray.cluster.local_server import free_port
from pagedray.scheduler.errors import ConfigError, EngineDead


def app(word="hello", release=None):
    async def hello(request):
        return PlainTextResponse(word)

    async def stream(request):
        async def parts():
            yield "one "
            await release.wait()
            yield "two"

        return StreamingResponse(parts())

    return Starlette(routes=[Route("/", hello), Route("/stream", stream)])


def run(test):
    async def bounded():
        await asyncio.wait_for(test(), 30)

    asyncio.run(bounded())


@pytest.fixture
def address():
    return ListenAddress("127.0.0.1", free_port("127.0.0.1", 0))


async def answer(client, address):
    for _ in range(100):
        try:
            return (await client.get(f"http://127.0.0.1:{address.port}/")).text
        except httpx.ConnectError:
            await asyncio.sleep(0.02)
    raise AssertionError("nobody listens")


def test_it_answers_and_two_share_the_port(address):
    async def test():
        first, second = HttpServer(app(), address), HttpServer(app(), address)
        async with httpx.AsyncClient() as client:
            assert await answer(client, address) == "hello"
        await first.close()
        with pytest.raises(EngineDead):
            first.check()
        second.check()
        async with httpx.AsyncClient() as client:
            assert await answer(client, address) == "hello"
        await second.close()

    run(test)


def test_a_port_that_another_program_has_is_refused_by_name(address):
    async def test():
        with socket.create_server(("127.0.0.1", address.port)):
            with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{address.port}"):
                HttpServer(app(), address)

    run(test)


def test_open_streams_end_before_it_leaves_and_new_connections_are_refused(address):
    async def test():
        release = asyncio.Event()
        server = HttpServer(app(release=release), address)
        async with httpx.AsyncClient() as client:
            await answer(client, address)
            async with client.stream("GET", f"http://127.0.0.1:{address.port}/stream") as response:
                pieces = response.aiter_text()
                assert await anext(pieces) == "one "  # not held back until the rest comes
                closing = asyncio.create_task(server.close())
                await asyncio.sleep(0.3)
                async with httpx.AsyncClient() as late:
                    with pytest.raises(httpx.ConnectError):
                        await late.get(f"http://127.0.0.1:{address.port}/")
                assert not closing.done()
                release.set()
                assert await anext(pieces) == "two"
            await closing

    run(test)
