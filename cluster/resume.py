"""Streams that survive the worker group that makes them.

What a client has got is kept here, at the ingress, and a request whose group is lost goes to another one (or to the
same one, rebuilt) together with the tokens that are out already. That group computes their KV, or finds it, and goes
on: every draw is a function of (seed, index, position), and penalties, `min_tokens` and grammars read the tokens
themselves, so the stream continues as it would have, with nothing repeated and nothing missing.

A request may be what kills its groups. It is given up when more than `migration_limit` (Dynamo's name) were lost
with it.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

from ..scheduler.errors import EngineDead, GroupLost
from ..scheduler.request import Request, SequenceOutput
from .openai.engine_client import EngineClient

logger = logging.getLogger(__name__)

_BACKOFF_SECONDS = 0.25  # before the second resumption; the first is at once, and each later one waits twice as long


class ResumingEngine:
    """An `EngineClient` over another one that raises `GroupLost`; its callers never see that."""

    def __init__(self, engine: EngineClient, migration_limit: int, on_resume: Callable[[Request], None]):
        self.engine, self.migration_limit, self.on_resume = engine, migration_limit, on_resume

    async def generate(self, request: Request) -> AsyncGenerator[SequenceOutput, None]:
        began = time.monotonic()
        delivered: list[int] = []
        num_cached: int | None = None  # what the first group found: later ones find what is no news to the client
        current = request
        while True:
            try:
                async with aclosing(self.engine.generate(current)) as outputs:
                    async for output in outputs:
                        delivered += output.token_ids
                        if num_cached is None:
                            num_cached = output.num_cached_tokens
                        yield replace(output, request_id=request.request_id, num_cached_tokens=num_cached)
                return
            except GroupLost as lost:
                attempt = current.attempt + 1
                if attempt > self.migration_limit:
                    raise EngineDead(
                        f"{attempt} worker groups in turn were lost while they held this request; it is not tried again"
                    ) from lost
                logger.warning("request %s goes on elsewhere after %d tokens", request.request_id, len(delivered))
            await asyncio.sleep(0.0 if attempt == 1 else _BACKOFF_SECONDS * 2 ** (attempt - 2))
            self.on_resume(request)
            current = replace(
                request,
                request_id=f"{request.request_id}~{attempt}",  # what the old group may still say is nobody's
                output_token_ids=tuple(delivered),
                attempt=attempt,
                age=time.monotonic() - began,
                ttft_target=None if delivered else request.ttft_target,
            )
