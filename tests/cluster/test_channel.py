"""Calls over a socket: what is answered, who is let in, and what a caller is told when they fail."""

import asyncio
import pickle
import socket
from dataclasses import replace

import pytest
import uvloop

from pagedray.cluster import channel as channel_module
from pagedray.cluster.channel import Channel, ChannelBroken, ChannelServer


def run(test):
    async def bounded():
        await asyncio.wait_for(test(), 20)

    for factory in (asyncio.new_event_loop, uvloop.new_event_loop):  # actors have uvloop's
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(bounded())


async def add(a, b):
    return [a + b]


async def wait():
    await asyncio.sleep(60)


async def fail():
    raise ValueError("no")


def serve():
    return ChannelServer("127.0.0.1", {"add": add, "wait": wait, "fail": fail})


def client(address):
    async def find():
        return address

    return Channel(find)


def test_calls_are_answered_each_with_its_own_while_others_wait():
    async def test():
        server = serve()
        channel = client(server.address)
        slow = asyncio.create_task(channel.call("wait", timeout=30))
        answers = await asyncio.gather(*(channel.call("add", i, 1, timeout=5) for i in range(200)))
        assert answers == [[i + 1] for i in range(200)] and not slow.done()
        await server.close()
        with pytest.raises(ChannelBroken):
            await slow

    run(test)


def test_a_large_message_arrives_whole():
    async def test():
        server = serve()
        text = "x" * 5_000_000
        assert await client(server.address).call("add", text, "y", timeout=10) == [text + "y"]
        await server.close()

    run(test)


@pytest.mark.parametrize("method", ["fail", "unknown"])
def test_a_call_that_fails_is_broken_and_the_next_one_is_not(method):
    async def test():
        server = serve()
        channel = client(server.address)
        with pytest.raises(ChannelBroken):
            await channel.call(method, timeout=5)
        assert await channel.call("add", 1, 1, timeout=5) == [2]
        await server.close()

    run(test)


def test_a_call_without_an_answer_ends():
    async def test():
        server = serve()
        with pytest.raises(ChannelBroken, match="wait was not answered within 0.05 s"):
            await client(server.address).call("wait", timeout=0.05)
        await server.close()

    run(test)


def test_where_nobody_listens_the_call_is_broken():
    async def test():
        server = serve()
        await server.close()
        with pytest.raises(ChannelBroken):
            await client(server.address).call("add", 1, 1, timeout=5)

    run(test)


def test_without_the_key_nothing_is_unpickled():
    touched = []

    async def touch():
        touched.append(1)

    async def test():
        server = ChannelServer("127.0.0.1", {"touch": touch})
        with pytest.raises(ChannelBroken):
            await client(replace(server.address, key=b"x" * 32)).call("touch", timeout=5)
        with socket.create_connection((server.address.host, server.address.port)) as stranger:
            body = pickle.dumps((1, "touch", ()))
            stranger.sendall(len(body).to_bytes(4, "big") + body + b"x" * 32)
            stranger.settimeout(5)
            try:
                assert await asyncio.to_thread(stranger.recv, 10) == b""
            except ConnectionResetError:
                pass
        assert not touched
        await server.close()

    run(test)


def test_who_says_nothing_is_sent_away(monkeypatch):
    monkeypatch.setattr(channel_module, "_GREETING_SECONDS", 0.1)

    async def test():
        server = serve()
        with socket.create_connection((server.address.host, server.address.port)) as silent:
            silent.settimeout(5)
            try:
                assert await asyncio.to_thread(silent.recv, 10) == b""
            except ConnectionResetError:
                pass
        await server.close()

    run(test)
