"""The ingress's own HTTP server: what it answers, sharing a port, and leaving while streams are open."""

import asyncio
import json
import socket

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from pagedray.cluster.connections import ConnectionLimits
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


# -- what a client may hold


def endless(ended):
    """An application whose one answer never ends; `ended` gets what became of it."""

    async def stream(request):
        async def parts():
            try:
                while True:
                    yield "x" * 1000
                    await asyncio.sleep(0)
            finally:
                ended.append(True)

        return StreamingResponse(parts())

    async def take(request):
        return PlainTextResponse(str(len(await request.body())))

    async def refuse(request):
        return PlainTextResponse("too large", 413)

    posts = [Route(f"/{answer.__name__}", answer, methods=["POST"]) for answer in (take, refuse)]
    return Starlette(routes=[Route("/", stream), *posts])


async def connect(address):
    for _ in range(100):
        try:
            return await asyncio.open_connection("127.0.0.1", address.port)
        except ConnectionRefusedError:
            await asyncio.sleep(0.02)
    raise AssertionError("nobody listens")


async def until(condition, seconds=15):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


def held(**limits):
    """Runs `test(address, server, ended)` against a server with these limits."""

    def decorate(test):
        def run_it(address):
            async def main():
                ended = []
                server = HttpServer(endless(ended), address, ConnectionLimits(**limits))
                try:
                    await test(address, server, ended)
                finally:
                    server._server.force_exit = True
                    await server.close()

            run(main)

        run_it.__name__ = test.__name__
        return run_it

    return decorate


@held(unread=0.5)
async def test_a_reader_that_takes_nothing_is_dropped(address, server, ended):
    reader, writer = await connect(address)
    writer.transport.pause_reading()
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    other_reader, other = await connect(address)  # one that reads is left alone
    other.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")

    async def read_on():
        while not ended:
            await other_reader.read(1 << 20)

    await asyncio.wait_for(read_on(), 15)
    assert len(ended) == 1 and len(server._server.server_state.connections) == 1
    assert await other_reader.read(100)
    other.close()
    writer.close()


@held(idle=1.0)
async def test_a_connection_without_a_request_is_ended(address, server, ended):
    begun = [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\nX: "]
    connections = [await connect(address) for _ in begun]
    for (_, writer), start in zip(connections, begun, strict=True):
        writer.write(start)
    drip = connections[-1][1]
    for _ in range(400):
        if not server._server.server_state.connections and _ > 5:
            break
        drip.write(b"x")
        await asyncio.sleep(0.03)
    assert not server._server.server_state.connections
    for _, writer in connections:
        writer.close()


@held(body=0.5, idle=60.0)
async def test_a_body_that_does_not_come_is_not_waited_for(address, server, ended):
    reader, writer = await connect(address)
    writer.write(b"POST /take HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n12345")
    await until(lambda: server._server.server_state.connections)
    await until(lambda: not server._server.server_state.connections)
    assert await reader.read() == b""
    writer.close()


@held(head_bytes=20_000)
async def test_an_endless_head_is_cut_off(address, server, ended):
    for start in (b"GET /", b"GET / HTTP/1.1\r\nX: "):
        reader, writer = await connect(address)
        writer.write(start)
        with pytest.raises(OSError):
            for _ in range(1000):
                writer.write(b"x" * 10_000)
                await writer.drain()
                await asyncio.sleep(0.002)
        writer.close()
    reader, writer = await connect(address)  # a large body is no head
    writer.write(b"POST /take HTTP/1.1\r\nHost: x\r\nContent-Length: 200000\r\n\r\n" + b"x" * 200_000)
    assert (await reader.read(15)) == b"HTTP/1.1 200 OK"
    writer.close()


@held(rest_bytes=30_000_000)
async def test_who_writes_all_of_a_refused_body_before_reading_hears_why(address, server, ended):
    size = 20_000_000
    reader, writer = await connect(address)
    writer.transport.pause_reading()
    writer.write(b"POST /refuse HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size)
    for _ in range(size // 100_000):
        writer.write(b"x" * 100_000)
        await writer.drain()
    writer.transport.resume_reading()
    assert (await reader.readuntil(b"too large")).startswith(b"HTTP/1.1 413 ")
    writer.write(b"POST /take HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx")  # and the connection is kept
    assert (await reader.readuntil(b"\r\n\r\n1")).startswith(b"HTTP/1.1 200 ")
    writer.write(b"POST /refuse HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (10 * size))
    with pytest.raises(OSError):  # but no more of it than so much
        for _ in range(10 * size // 100_000):
            writer.write(b"x" * 100_000)
            await writer.drain()
    writer.close()


@held()
async def test_what_is_no_http_is_refused_in_the_shape_of_all_errors(address, server, ended):
    for wrong in (b"nonsense\r\n\r\n", b"POST /take HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n"):
        reader, writer = await connect(address)
        writer.write(wrong)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ") and f"content-length: {len(body)}" in head.decode().lower()
        error = json.loads(body)["error"]
        assert error["type"] == "invalid_request_error" and error["message"]
        writer.close()


@held(per_address=3)
async def test_an_address_has_its_share_of_connections(address, server, ended):
    connections = [await connect(address) for _ in range(3)]
    await until(lambda: len(server._server.server_state.connections) == 3)
    reader, writer = await connect(address)
    refusal = (await reader.read()).decode()
    assert refusal.startswith("HTTP/1.1 429 ") and '"code": "too_many_connections"' in refusal
    connections[0][1].close()
    await until(lambda: len(server._server.server_state.connections) == 2)
    reader, writer = await connect(address)
    writer.write(b"POST /take HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx")
    assert (await reader.read(12)) == b"HTTP/1.1 200"
    for _, other in (*connections, (reader, writer)):
        other.close()


@held(total=2)
async def test_a_server_that_has_too_many_connections_says_so(address, server, ended):
    connections = [await connect(address) for _ in range(2)]
    await until(lambda: len(server._server.server_state.connections) == 2)
    reader, writer = await connect(address)
    head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 503 ") and "retry-after" in head
    assert json.loads(body)["error"]["code"] == "too_many_connections"
    for _, other in (*connections, (reader, writer)):
        other.close()


@held(idle=2.0)
async def test_requests_one_after_another_keep_a_connection(address, server, ended):
    reader, writer = await connect(address)
    for _ in range(14):  # longer than it might lie idle
        writer.write(b"POST /take HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx")
        assert (await reader.readuntil(b"\r\n\r\n1")).startswith(b"HTTP/1.1 200")
        await asyncio.sleep(0.25)
    writer.close()
