"""A call of many sequences does not find a queue full of itself."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from ...scheduler.errors import Overloaded
from ...scheduler.request import Request, SequenceOutput
from .engine_client import EngineClient


class OwnQueue:
    """The `EngineClient` of one call.

    Where a queue is full while others of the call's sequences wait or run, a sequence goes in when one of them has
    ended; where none does, the queue is full of other calls', and `Overloaded` is raised.
    """

    def __init__(self, engine: EngineClient):
        self._engine = engine
        self._under_way = 0
        self._ended = asyncio.Semaphore(0)

    async def generate(self, request: Request) -> AsyncGenerator[SequenceOutput, None]:
        while True:
            self._under_way += 1
            began, refused = False, False
            try:
                async with aclosing(self._engine.generate(request)) as outputs:
                    async for output in outputs:
                        began = True
                        yield output
                return
            except Overloaded as error:
                refused = True
                of_a_queue = type(error) is Overloaded  # not of a tenant's limit, nor of a deadline
                if began or self._under_way == 1 or not of_a_queue:
                    raise
            finally:
                self._under_way -= 1
                if not refused:
                    self._ended.release()
            await self._ended.acquire()
