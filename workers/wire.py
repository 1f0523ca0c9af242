"""Messages between the processes of one worker group: length-prefixed pickles over a socket whose ends share a key.

Nothing is unpickled before each end has shown, by HMAC over the other's random challenge, that it knows the key.
"""

import hashlib
import hmac
import pickle
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

_LENGTH = struct.Struct("<Q")
_CHALLENGE_BYTES = 32
_MAX_MESSAGE = 1 << 30
HANDSHAKE_SECONDS = 5.0
SEND_SECONDS = 5.0  # a peer that takes nothing for so long is taken for lost


class WireError(ConnectionError):
    """The peer is gone, does not know the key, or speaks otherwise."""


def listen(host: str) -> socket.socket:
    """A socket that listens on a free port of `host`, an address of this machine."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise WireError(f"cannot listen on {host}: {error}") from None
    return listener


class Connection:
    """One end. Any thread may `send`; one thread at a time may receive."""

    def __init__(self, sock: socket.socket, key: bytes, server: bool):
        """Shake hands. Raises `WireError` where the peer does not know the key within HANDSHAKE_SECONDS."""
        self._sock = sock
        self._buffer = bytearray()
        self._lock = threading.Lock()
        self.last_heard = time.monotonic()
        try:
            sock.settimeout(HANDSHAKE_SECONDS)
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._shake_hands(key, server)
            sock.settimeout(None)
            seconds = struct.pack("@ll", int(SEND_SECONDS), 0)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
        except OSError as error:
            sock.close()
            raise error if isinstance(error, WireError) else WireError(f"no handshake: {error}") from None

    @classmethod
    def connect(
        cls, host: str, port: int, key: bytes, timeout: float, check: Callable[[], None] = lambda: None
    ) -> "Connection":
        """Connect to a listener, trying again until `timeout` seconds have gone by or `check` raises."""
        deadline = time.monotonic() + timeout
        while True:
            check()
            try:
                return cls(socket.create_connection((host, port), timeout=HANDSHAKE_SECONDS), key, server=False)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise WireError(f"{host}:{port} cannot be reached within {timeout:.0f} s: {error}") from None
                time.sleep(0.1)

    def _shake_hands(self, key: bytes, server: bool) -> None:
        mine = secrets.token_bytes(_CHALLENGE_BYTES)
        self._sock.sendall(mine)
        theirs = self._exactly(_CHALLENGE_BYTES)
        roles = (b"server", b"client") if server else (b"client", b"server")
        self._sock.sendall(hmac.digest(key, roles[0] + theirs, hashlib.sha256))
        if not hmac.compare_digest(self._exactly(32), hmac.digest(key, roles[1] + mine, hashlib.sha256)):
            raise WireError("the peer does not know this group's key")

    def _exactly(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            piece = self._sock.recv(length - len(data))
            if not piece:
                raise WireError("the peer closed the connection")
            data += piece
        return data

    # -- sending ------------------------------------------------------------------------------------------------------

    def send(self, message: Any) -> None:
        self.send_frame(frame(message))

    def send_frame(self, data: bytes) -> None:
        """Send what `frame` made, so that a message for several peers is pickled once. Raises `WireError`."""
        with self._lock:
            try:
                self._sock.sendall(data)
            except OSError as error:
                raise WireError(f"the peer takes nothing: {error}") from None

    def send_tensor_bytes(self, header: int, data: memoryview) -> None:
        """A number and raw bytes, for `receive_raw`."""
        with self._lock:
            try:
                self._sock.sendall(_LENGTH.pack(len(data)) + _LENGTH.pack(header))
                self._sock.sendall(data)
            except OSError as error:
                raise WireError(f"the peer takes nothing: {error}") from None

    # -- receiving ----------------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._sock.fileno()

    def read_available(self) -> Iterator[Any]:
        """Read what has come without waiting, and yield the messages that are whole; beats yield nothing.

        Raises `WireError` once the connection has ended and all that came is taken.
        """
        ended = ""
        while not ended:
            try:
                piece = self._sock.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError as error:
                ended = f"the connection broke: {error}"
                break
            ended = "" if piece else "its connection closed"
            self._buffer += piece
        if not ended:
            self.last_heard = time.monotonic()
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > _MAX_MESSAGE:
                raise WireError(f"a message of {length} bytes")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            payload = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            if payload:
                yield pickle.loads(payload)
        if ended:
            raise WireError(ended)

    def receive(self, timeout: float) -> Any:
        """The next message, for the time before a `Monitor` reads. Raises `WireError` after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            for message in self.read_available():
                return message  # one at a time: the peer waits for an answer to each
            left = deadline - time.monotonic()
            if left <= 0:
                raise WireError(f"it said nothing for {timeout:.0f} s")
            select.select([self._sock], [], [], left)

    def receive_raw(self) -> tuple[int, bytearray]:
        """What `send_tensor_bytes` sent. Waits without a bound: `close` from another thread ends it."""
        try:
            length, header = struct.unpack("<QQ", self._exactly(16))
            if length > _MAX_MESSAGE:
                raise WireError(f"a tensor of {length} bytes")
            data = bytearray(length)
            view, at = memoryview(data), 0
            while at < length:
                count = self._sock.recv_into(view[at:])
                if not count:
                    raise WireError("the peer closed the connection")
                at += count
        except OSError as error:
            raise error if isinstance(error, WireError) else WireError(str(error)) from None
        return header, data

    @property
    def local_host(self) -> str:
        """This end's address: the one by which the peer's network is reached."""
        return self._sock.getsockname()[0]

    @property
    def socket(self) -> socket.socket:
        return self._sock

    def close(self) -> None:
        """Wakes whoever sends or receives."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer was faster
        self._sock.close()


def frame(message: Any) -> bytes:
    payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(payload)) + payload


BEAT = _LENGTH.pack(0)
