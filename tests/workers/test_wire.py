"""Messages between a group's processes: only from who knows the key, whole, in order; silence and ends are noticed."""

import queue
import socket
import threading

import pytest

from pagedray.workers import wire
from pagedray.workers.monitor import Monitor
from pagedray.workers.wire import Connection, WireError

KEY = b"k" * 32


def pair(server_key=KEY, client_key=KEY):
    """Both ends of a connection, or what came of the handshake."""
    ends = socket.socketpair()
    results = [None, None]

    def shake(i, key, server):
        try:
            results[i] = Connection(ends[i], key, server)
        except WireError as error:
            results[i] = error

    threads = [
        threading.Thread(target=shake, args=(0, server_key, True)),
        threading.Thread(target=shake, args=(1, client_key, False)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_messages_come_whole_and_in_order():
    server, client = pair()
    sent = [("a", 1), {"b": b"x" * 200_000}, None, (3,)]
    thread = threading.Thread(target=lambda: [client.send(m) for m in sent])
    thread.start()
    assert [server.receive(5) for _ in sent] == sent
    thread.join()
    client.close()
    with pytest.raises(WireError, match="closed"):
        server.receive(5)


def test_who_does_not_know_the_key_is_not_heard():
    assert all(isinstance(end, WireError) for end in pair(client_key=b"other" * 6))


def test_an_answer_cannot_be_reflected():
    """A peer without the key that sends back whatever it gets."""
    ours, theirs = socket.socketpair()

    def echo():
        while data := theirs.recv(64):
            theirs.sendall(data)

    thread = threading.Thread(target=echo, daemon=True)
    thread.start()
    with pytest.raises(WireError, match="does not know this group's key"):
        Connection(ours, KEY, server=True)
    thread.join(5)


def test_tensors_travel_as_raw_bytes():
    server, client = pair()
    data = bytes(range(256)) * 5000
    thread = threading.Thread(target=client.send_tensor_bytes, args=(2**64 - 3, memoryview(data)))
    thread.start()
    assert server.receive_raw() == (2**64 - 3, data)
    thread.join()


def test_a_receiver_is_woken_by_its_own_close():
    server, _ = pair()
    timer = threading.Timer(0.1, server.close)
    timer.start()
    with pytest.raises(WireError):
        server.receive_raw()


def test_a_listener_takes_a_free_port_of_the_address():
    listener = wire.listen("127.0.0.1")
    assert listener.getsockname()[0] == "127.0.0.1" and listener.getsockname()[1] > 0
    with pytest.raises(WireError, match="cannot listen on 192.0.2.1"):
        wire.listen("192.0.2.1")  # kept for documentation: nobody's


def watch(connection, silence):
    """A monitor of one connection, what it hears, and a queue of why it gives a rank up."""
    heard, lost = queue.SimpleQueue(), queue.SimpleQueue()
    monitor = Monitor({1: connection}, lambda *message: heard.put(message), lambda *why: lost.put(why), silence)
    return monitor, heard, lost


def test_a_monitor_delivers_and_notices_an_end():
    ours, theirs = pair()
    monitor, heard, lost = watch(ours, silence=600)
    try:
        theirs.send("hello")
        assert heard.get(timeout=60) == (1, "hello")
        theirs.send("last words")
        theirs.close()
        assert heard.get(timeout=60) == (1, "last words")
        rank, why = lost.get(timeout=60)
        assert rank == 1 and ("closed" in why or "broke" in why)
    finally:
        monitor.close()


def test_a_monitor_notices_silence():
    ours, _theirs = pair()
    monitor, _, lost = watch(ours, silence=0.2)
    try:
        rank, why = lost.get(timeout=60)
        assert rank == 1 and "silent" in why
    finally:
        monitor.close()
