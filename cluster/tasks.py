"""Tasks that run beside whoever began them."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class Tasks:
    """Keeps them until they end: the event loop itself keeps only a weak reference."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def cancel(self) -> None:
        for task in self._running:
            task.cancel()
