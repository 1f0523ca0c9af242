"""The leader's side of its ranks: starts them, lets them join, and knows as soon as one is lost."""

import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from ..scheduler.errors import CheckpointError, ConfigError, EngineDead
from ..scheduler.plan import StepResult
from . import wire
from .messages import Abort, Failed, GroupAddress, Hello, Loading, Stop
from .monitor import Monitor
from .parallel import RankGroup
from .wire import Connection, WireError

POLL_SECONDS = 0.2
_AFTER_FAILURE_SECONDS = 2.0  # ranks end by themselves then, but for one that is stopped


class RankHandle(Protocol):
    """Whatever a rank runs in, for whoever started it."""

    def poll(self) -> str | None:
        """Why it has ended, in words; None while it runs or starts. Does not wait."""
        ...

    def stop(self, timeout: float) -> None:
        """Give it `timeout` seconds to end by itself, then end it by force. May be called again."""
        ...


Launcher = Callable[[GroupAddress, int], RankHandle]  # starts a rank, without waiting for it


class LocalRank:
    """A rank in a process of its own on this machine."""

    def __init__(self, address: GroupAddress, rank: int):
        command = [sys.executable, "-m", "pagedray.workers.rank", address.host, str(address.port), str(rank)]
        # A session of its own: Ctrl-C is for the leader, which stops its ranks.
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(address.key.hex() + "\n")  # not an argument: those can be read by all
            self.process.stdin.close()
        except OSError:
            pass  # it has ended already; `poll` says so

    def poll(self) -> str | None:
        code = self.process.poll()
        if code is None:
            return None
        return f"its process ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"

    def stop(self, timeout: float) -> None:
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Members:
    """Ranks 1 … size - 1 of a group, from their start to their end.

    The thread of a `Monitor` hears them. When one is lost it sets `failure`, tells the others, aborts this process's
    waits and wakes who waits for a message; `check` and every later `wait_for` raise `failure`.
    """

    def __init__(self, size: int, host: str, launch: Launcher):
        self.size = size
        self.failure: Exception | None = None
        self.failed = threading.Event()
        self.results: queue.SimpleQueue[StepResult | None] = queue.SimpleQueue()  # None: look at `failure`
        self.progress: dict[int, Loading] = {}
        self.group: RankGroup | None = None  # whose waits end when a rank is lost
        self.connections: dict[int, Connection] = {}
        self._messages: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._monitor: Monitor | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._listener = wire.listen(host)
        self.address = GroupAddress(host, self._listener.getsockname()[1], secrets.token_bytes(32))
        self._handles: dict[int, RankHandle] = {}
        try:
            for rank in range(1, size):
                self._handles[rank] = launch(self.address, rank)
        except BaseException:
            self.close(0.0)
            raise

    # -- starting -----------------------------------------------------------------------------------------------------

    def join(self, timeout: float, silence: float) -> dict[int, Hello]:
        """Wait for every rank, then hear them. Raises `EngineDead` naming one that does not come in time."""
        deadline = time.monotonic() + timeout
        hellos: dict[int, Hello] = {}
        self._listener.settimeout(POLL_SECONDS)
        while len(hellos) < self.size - 1:
            missing = [rank for rank in self._handles if rank not in hellos]
            for rank in missing:
                if (why := self._handles[rank].poll()) is not None:
                    raise EngineDead(f"rank {rank} of {self.size} did not join: {why}")
            if time.monotonic() > deadline:
                ranks = ", ".join(map(str, missing))
                raise EngineDead(f"rank {ranks} of {self.size} did not join within {timeout:.0f} s")
            try:
                connection = Connection(self._listener.accept()[0], self.address.key, server=True)
            except (TimeoutError, WireError):
                continue  # nobody yet, or nobody of ours
            try:
                hello = connection.receive(wire.HANDSHAKE_SECONDS)
            except WireError:
                connection.close()  # so that it knows, and says so
                continue
            if isinstance(hello, Hello) and hello.rank in missing:
                hellos[hello.rank] = hello
                self.connections[hello.rank] = connection
            else:
                connection.close()
        self._listener.close()
        self._monitor = Monitor(self.connections, self._hear, self._lose, silence)
        return hellos

    def send_all(self, message: Any) -> None:
        """One message to every rank, pickled once."""
        data = wire.frame(message)
        for rank, connection in self.connections.items():
            try:
                connection.send_frame(data)
            except WireError as error:
                self._lose(rank, str(error))
        self.check()

    def wait_for(self, kind: type, deadline: float, doing: str) -> dict[int, Any]:
        """A message of `kind` from every rank. Raises `failure`, or `EngineDead` naming who is late."""
        got: dict[int, Any] = {}
        while len(got) < self.size - 1:
            self.check()
            left = deadline - time.monotonic()
            if left <= 0:
                ranks = ", ".join(str(rank) for rank in self.connections if rank not in got)
                raise EngineDead(f"rank {ranks} of {self.size} did not finish {doing} in time")
            try:
                rank, message = self._messages.get(timeout=min(left, POLL_SECONDS))
            except queue.Empty:
                continue
            if isinstance(message, kind):
                got[rank] = message
        return got

    def set_silence(self, seconds: float) -> None:
        """How long a rank may say nothing."""
        if self._monitor is not None:
            self._monitor.silence = seconds

    # -- watching -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise why the group has failed, if it has."""
        if self.failure is not None:
            raise self.failure

    def fail(self, failure: Exception) -> None:
        """Give the group up: the first failure stands, everybody is told, and every wait ends."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = failure
        data = wire.frame(Abort(str(failure)))
        for connection in self.connections.values():
            try:
                connection.send_frame(data)
            except WireError:
                pass  # the one that is lost
        if self.group is not None:
            self.group.abort()
        self.failed.set()
        self.results.put(None)

    def _hear(self, rank: int, message: Any) -> None:
        if isinstance(message, StepResult):
            self.results.put(message)
        elif isinstance(message, Failed):
            error = message.error
            if isinstance(error, ConfigError | CheckpointError):  # of its own node: all could read the leader's
                error = type(error)(f"rank {rank} of {self.size}: {error}")
            self.fail(error)
        elif isinstance(message, Loading):
            self.progress[rank] = message
        else:
            self._messages.put((rank, message))

    def _lose(self, rank: int, why: str) -> None:
        if self._closed:
            return
        ended = self._handles[rank].poll()
        self.fail(EngineDead(f"rank {rank} of {self.size} is lost: {why}{f' ({ended})' if ended else ''}"))

    # -- ending -------------------------------------------------------------------------------------------------------

    def close(self, timeout: float) -> None:
        """Tell the ranks to stop, and see that they are gone after about `timeout` seconds. From any thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self.failure is not None:
                timeout = min(timeout, _AFTER_FAILURE_SECONDS)
            else:
                self.failure = EngineDead("this worker group has been closed")
        data = wire.frame(Stop())
        for connection in self.connections.values():
            try:
                connection.send_frame(data)
            except WireError:
                pass
        self.results.put(None)
        if self._monitor is not None:
            self._monitor.close()
        if self.group is not None:
            self.group.abort()
        self._listener.close()
        deadline = time.monotonic() + timeout
        for handle in self._handles.values():
            handle.stop(max(0.0, deadline - time.monotonic()))
        for connection in self.connections.values():
            connection.close()
