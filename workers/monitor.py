"""A thread that hears the other processes of a worker group, tells them that this one lives, and sees who is gone."""

import selectors
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from .wire import BEAT, Connection, WireError

BEAT_SECONDS = 0.5


class Monitor:
    """Reads every connection in a thread of its own, and sends a beat on each twice a second.

    `on_message(rank, message)` and `on_lost(rank, why)` are called in that thread and must not wait. A rank is lost
    when its connection ends, or when it says nothing for `silence` seconds: a process that is stopped, a host that is
    cut off.
    """

    def __init__(
        self,
        connections: Mapping[int, Connection],
        on_message: Callable[[int, Any], None],
        on_lost: Callable[[int, str], None],
        silence: float,
    ):
        self.silence = silence
        self._connections = dict(connections)
        self._on_message, self._on_lost = on_message, on_lost
        self._ended = threading.Event()
        now = time.monotonic()
        for connection in self._connections.values():
            connection.last_heard = now
        self._thread = threading.Thread(target=self._run, name="group-monitor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. May be called from it."""
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * BEAT_SECONDS)

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # without this thread nobody would notice a loss: better give up now
            for rank in list(self._connections):
                self._on_lost(rank, f"its connection cannot be watched: {error!r}")
            raise

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            next_beat = 0.0
            while not self._ended.is_set() and self._connections:
                ready = selector.select(max(0.0, min(BEAT_SECONDS, next_beat - time.monotonic())))
                lost: dict[int, str] = {}
                for key, _ in ready:
                    self._read(key.data, lost)
                now = time.monotonic()
                if now >= next_beat:
                    next_beat = now + BEAT_SECONDS
                    for rank, connection in self._connections.items():
                        # After reading: what came while this process was itself stopped counts as heard.
                        if now - connection.last_heard > self.silence:
                            lost.setdefault(rank, f"it has been silent for {self.silence:.0f} s")
                        try:
                            connection.send_frame(BEAT)
                        except WireError as error:
                            self._read(rank, lost)  # its last words say more
                            lost.setdefault(rank, str(error))
                for rank, why in lost.items():
                    selector.unregister(self._connections.pop(rank))
                    if not self._ended.is_set():
                        self._on_lost(rank, why)

    def _read(self, rank: int, lost: dict[int, str]) -> None:
        try:
            for message in self._connections[rank].read_available():
                self._on_message(rank, message)
        except WireError as error:
            lost[rank] = str(error)
