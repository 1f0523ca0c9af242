"""A client that does not read its stream: the ingress's own server drops it, and its sequences end at the engine."""

import asyncio
import json

import pytest
from fake_engine import FakeEngine, byte_tokenizer

from pagedray.cluster.connections import ConnectionLimits
from pagedray.cluster.http_server import HttpServer, ListenAddress
from pagedray.cluster.local_server import free_port
from pagedray.cluster.openai.engine_client import ServedModel
from pagedray.cluster.openai.router import build_app


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_that_nobody_reads_is_dropped_and_others_go_on(n):
    tokenizer = byte_tokenizer()
    engine = FakeEngine(tokenizer)

    def script(request):
        while True:
            yield [65] * 64 if request.sampling.logprobs else [65]

    engine.script = script
    models = {"m": ServedModel("m", tokenizer, 10**7, 0)}
    fields = {"model": "m", "prompt": "a", "max_tokens": 10**6, "stream": True}

    def ask(**more):
        body = json.dumps(fields | more).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        return head.encode() + b"\r\n\r\n" + body

    async def main():
        address = ListenAddress("127.0.0.1", free_port("127.0.0.1", 0))
        server = HttpServer(build_app(lambda: models, engine, None, None), address, ConnectionLimits(unread=0.5))
        while not server._server.started:
            await asyncio.sleep(0.01)
        reader, good = await asyncio.open_connection("127.0.0.1", address.port)
        good.write(ask())
        _, bad = await asyncio.open_connection("127.0.0.1", address.port)
        bad.transport.pause_reading()
        bad.write(ask(n=n, logprobs=5))
        async with asyncio.timeout(20):
            while len(engine.aborted) < n:
                assert await reader.read(1 << 16)
        assert len(engine.running) == 1 and await reader.read(100)
        good.close()
        bad.close()
        async with asyncio.timeout(10):
            while engine.running:
                await asyncio.sleep(0.01)
        await server.close()

    asyncio.run(main())
