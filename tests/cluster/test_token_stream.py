"""Token frames over a socket: what arrives, who is let in, and what happens when one side stops."""

import asyncio
import dataclasses
import errno
import socket
import threading
from contextlib import asynccontextmanager

import pytest
import uvloop

from pagedray.cluster import token_stream
from pagedray.cluster.token_stream import StreamAddress, TokenFrame, TokenServer, decode, encode, read_frames
from pagedray.scheduler.errors import ContextLengthExceeded, EngineDead, Overloaded, PagedRayError
from pagedray.scheduler.request import SequenceOutput, TokenLogprobs


def output(request_id, *token_ids, **fields):
    return SequenceOutput(request_id, token_ids, **fields)


def run(test):
    async def bounded():
        await asyncio.wait_for(test(), 20)

    for factory in (asyncio.new_event_loop, uvloop.new_event_loop):  # actors have uvloop's
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(bounded())


class Leader:
    """A token server that notes whom it lost."""

    def __init__(self):
        self.broken, self.silent = [], []
        self.server = TokenServer("127.0.0.1", self.broken.append, lambda *lost: self.silent.append(lost))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.close()


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


@asynccontextmanager
async def connected(leader):
    """An ingress that has shown its ticket and reads nothing: its socket, and the leader's outbox for it."""
    address = leader.server.open("i")
    with socket.create_connection((address.host, address.port)) as connection:
        connection.sendall(address.ticket)
        outbox = leader.server.outbox("i")
        await until(lambda: outbox._socket is not None)
        yield connection, outbox


def test_what_is_kept_for_an_ingress_that_fell_silent():
    async def test():
        with Leader() as leader:
            frame = TokenFrame((), (("r", EngineDead("gone")),))
            leader.server.outbox("i").last_heard -= token_stream.SILENCE_SECONDS + 1
            leader.server.beat()
            assert leader.silent == [("i", ())]
            leader.server.keep("i", frame)
            leader.server.outbox("i").last_heard -= token_stream.SILENCE_SECONDS + 1
            leader.server.beat()  # it is still there
            got = []
            reader = asyncio.create_task(read_frames(leader.server.open("i"), got.append))
            await until(lambda: got)
            assert got[0].failures[0][0] == "r"
            reader.cancel()

    run(test)


class Refused(PagedRayError):
    """An error of a class that `scheduler.errors` does not have."""


@pytest.mark.parametrize(
    "frame",
    [
        TokenFrame(),
        TokenFrame((output("a", 1), output("b", 2, 3, finish_reason="stop", stop_token_id=3, num_cached_tokens=16))),
        TokenFrame((output("a", 1, logprobs=(TokenLogprobs(-0.1, ((1, -0.1), (7, -2.345678901234567))),)),)),
    ],
)
def test_a_frame_comes_back_as_it_was(frame):
    assert decode(encode(frame)[4:]) == frame


def test_every_field_of_an_output_travels():
    ended = {"finish_reason": "stop", "stop_token_id": 1, "num_cached_tokens": 16}
    rare = {"prompt_logprobs": (TokenLogprobs(-0.5, ((3, -0.25),)),), "embedding": b"\0\1"}
    full = output("a", 1, logprobs=(TokenLogprobs(-1.5),), moving=True, **ended, **rare)
    unset = [f.name for f in dataclasses.fields(full) if getattr(full, f.name) == f.default]
    assert not unset, "a new field: say it above, and in `encode` and `decode`"
    assert decode(encode(TokenFrame((full,)))[4:]).outputs == (full,)


def test_errors_keep_their_class_and_words():
    errors = [ContextLengthExceeded("long", "prompt"), Overloaded("full", 2.5), EngineDead("gone"), Refused("no")]
    frame = TokenFrame(failures=tuple((str(i), e) for i, e in enumerate(errors)))
    back = [error for _, error in decode(encode(frame)[4:]).failures]
    assert [type(e) for e in back] == [ContextLengthExceeded, Overloaded, EngineDead, PagedRayError]
    assert [e.args for e in back] == [e.args for e in errors]


def test_what_was_sent_before_the_ingress_came_and_after_arrives_in_order():
    async def test():
        with Leader() as leader:
            frames = []
            leader.server.outbox("i").send(TokenFrame((output("r", 0),)))
            reading = asyncio.create_task(read_frames(leader.server.open("i"), frames.append))
            await until(lambda: frames)

            def engine():  # another thread, as the leader's
                for token in range(1, 500):
                    leader.server.outbox("i").send(TokenFrame((output("r", token),)))

            thread = threading.Thread(target=engine)
            thread.start()
            await until(lambda: len(frames) == 500)
            thread.join()
            assert [f.outputs[0].token_ids for f in frames] == [(t,) for t in range(500)]
            leader.server.outbox("i").close()
            await reading

    run(test)


def test_an_ingress_that_reads_slowly_gets_everything_later():
    async def test():
        with Leader() as leader:
            async with connected(leader) as (slow, outbox):
                big = encode(TokenFrame((output("r", *range(20_000)),)))
                for _ in range(100):
                    outbox.send(TokenFrame((output("r", *range(20_000)),)))
                assert outbox._unsent  # the kernel did not take it all
                received = b""
                slow.settimeout(10)
                while len(received) < 100 * len(big):
                    received += await asyncio.to_thread(slow.recv, 1 << 20)
                assert received == 100 * big and not leader.broken

    run(test)


def test_a_connection_that_cannot_be_taken_is_not_the_last_one(monkeypatch):
    class Loop:
        """Without a free descriptor at first."""

        def __init__(self, loop):
            self.loop, self.failed = loop, False

        def __getattr__(self, name):
            return getattr(self.loop, name)

        async def sock_accept(self, listener):
            if not self.failed:
                self.failed = True
                raise OSError(errno.EMFILE, "Too many open files")
            return await self.loop.sock_accept(listener)

    async def test():
        with Leader() as leader:
            leader.server._loop = loop = Loop(asyncio.get_running_loop())
            leader.server.outbox("i").send(TokenFrame((output("r", 1),)))
            frames = []
            reading = asyncio.create_task(read_frames(leader.server.open("i"), frames.append))
            await until(lambda: frames)
            assert loop.failed
            reading.cancel()

    run(test)


def test_a_new_connection_does_not_begin_within_a_frame():
    async def test():
        with Leader() as leader:
            async with connected(leader) as (_, outbox):
                for _ in range(100):
                    outbox.send(TokenFrame((output("r", *range(20_000)),)))
                assert outbox._unsent
                frames = []
                reading = asyncio.create_task(read_frames(leader.server.open("i"), frames.append))
                await until(lambda: leader.broken)  # what its sequences said is lost: they must go on otherwise
                outbox.send(TokenFrame((output("after", 1),)))
                await until(lambda: frames)
                assert [o.request_id for f in frames for o in f.outputs] == ["after"] and not reading.done()
                reading.cancel()

    run(test)


def test_an_ingress_that_reads_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(token_stream, "_MAX_UNSENT", 1 << 20)

    async def test():
        with Leader() as leader:
            async with connected(leader) as (_, outbox):
                for _ in range(200):
                    outbox.send(TokenFrame((output("r", *range(20_000)),)))
                await until(lambda: leader.broken)
                assert leader.broken == ["i"] and not outbox._unsent

    run(test)


@pytest.mark.parametrize("ticket", [b"", b"short", b"x" * 32, b"x" * 100])
def test_without_the_ticket_nobody_is_let_in(ticket):
    async def test():
        with Leader() as leader:
            address = leader.server.open("i")
            with socket.create_connection((address.host, address.port)) as stranger:
                stranger.sendall(ticket)
                stranger.shutdown(socket.SHUT_WR)
                leader.server.outbox("i").send(TokenFrame((output("r", 1),)))
                stranger.settimeout(10)
                try:
                    assert await asyncio.to_thread(stranger.recv, 100) == b""
                except ConnectionResetError:
                    pass
            frames = []
            reading = asyncio.create_task(read_frames(address, frames.append))
            await until(lambda: frames)
            with pytest.raises((OSError, TimeoutError)):  # a ticket is good once
                await read_once(address)
            reading.cancel()

    run(test)


async def read_once(address):
    await read_frames(address, lambda frame: None)
    raise ConnectionResetError("closed")


def test_each_side_notices_that_the_other_is_gone():
    async def test():
        with Leader() as leader:
            reading = asyncio.create_task(read_frames(leader.server.open("i"), lambda frame: None))
            await until(lambda: leader.server.outbox("i")._socket is not None)
            reading.cancel()
            await until(lambda: leader.broken)
            reading = asyncio.create_task(read_frames(leader.server.open("i"), lambda frame: None))
            await until(lambda: leader.server.outbox("i")._socket is not None)
            leader.server.outbox("i").close()
            await reading
            address = leader.server.open("i")
            leader.server.close()
            with pytest.raises(OSError):
                await read_frames(address, lambda frame: None)

    run(test)


def test_silence_is_taken_for_death(monkeypatch):
    async def test():
        with Leader() as leader:
            outbox = leader.server.outbox("i")
            outbox.request_ids.add("r")
            reading = asyncio.create_task(read_frames(leader.server.open("i"), lambda frame: None))
            await until(lambda: outbox._socket is not None)
            leader.server.beat()
            assert not leader.silent
            outbox.last_heard -= token_stream.SILENCE_SECONDS + 1
            leader.server.beat()
            assert leader.silent == [("i", ("r",))]
            await reading  # its connection is closed
            address = leader.server.open("j")
            monkeypatch.setattr(token_stream, "SILENCE_SECONDS", 0.2)
            monkeypatch.setattr(token_stream, "BEAT_SECONDS", 0.05)
            await read_frames(address, lambda frame: None)  # returns: nothing was heard of the leader

    run(test)


def test_beats_keep_an_idle_connection(monkeypatch):
    monkeypatch.setattr(token_stream, "SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(token_stream, "BEAT_SECONDS", 0.05)

    async def test():
        with Leader() as leader:
            reading = asyncio.create_task(read_frames(leader.server.open("i"), lambda frame: None))
            for _ in range(20):
                await asyncio.sleep(0.05)
                leader.server.beat()
            assert not reading.done() and not leader.silent and not leader.broken
            reading.cancel()

    run(test)


def test_a_size_that_no_frame_has_ends_the_connection():
    async def test():
        listener = await asyncio.start_server(lambda _, writer: writer.write(b"\xff" * 8), "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        await read_frames(StreamAddress("127.0.0.1", port, b"t"), lambda frame: pytest.fail("no frame was sent"))
        listener.close()

    run(test)
