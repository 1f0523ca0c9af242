"""Streams that survive the worker group that makes them, whether it is lost or leaves on purpose.

What a client has got is kept here, at the ingress, and a request whose group is lost goes to another one (or to the
same one, rebuilt) together with the tokens that are out already. That group computes their KV, or finds it, and goes
on: every draw is a function of (seed, index, position), and penalties, `min_tokens` and grammars read the tokens
themselves, so the stream continues as it would have, with nothing repeated and nothing missing.

A group that will leave asks its sequences to move, and works on. While it does, another group is made ready: it is
asked for one token after those that are out, which brings their KV into its cache, fetched from the node's store or
computed. Where too many came meanwhile, it is asked again. Then the sequence moves, and all that the client waits for
is the way, and a step over the last few tokens (virtual machines migrate so: copy while it runs, again and again, and
stop for the rest; Llumnix does it with KV).

A request may be what kills its groups. It is given up when more than `migration_limit` (Dynamo's name) were lost
with it; those that left on purpose do not count.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from ..scheduler.block_pool import hash_prompt, root_hash
from ..scheduler.errors import ContextLengthExceeded, EngineDead, GroupDrained, GroupLost, PagedRayError
from ..scheduler.request import Request, SamplingParams, SequenceOutput
from .openai.engine_client import EngineClient

logger = logging.getLogger(__name__)

_BACKOFF_SECONDS = 0.25  # before the second resumption; the first is at once, and each later one waits twice as long
_MAX_BACKOFF_SECONDS = 5.0
_FEW_TOKENS = 8  # that another group may have to compute while the client waits: hardly more than a step's only one
_MAX_ROUNDS = 3  # of making another group ready


class ResumingEngine:
    """An `EngineClient` over another one that raises `GroupLost` and says `moving`; its callers never see that."""

    def __init__(
        self,
        engine: EngineClient,
        migration_limit: int,
        on_resume: Callable[[Request], None],
        on_move: Callable[[Request], None] = lambda request: None,
        block_size: Callable[[str], int] = lambda model: 0,
    ):
        """`block_size` gives the tokens in a KV block of a model's groups; 0: not known yet."""
        self.engine, self.migration_limit = engine, migration_limit
        self.on_resume, self.on_move, self.block_size = on_resume, on_move, block_size

    async def generate(self, request: Request) -> AsyncGenerator[SequenceOutput, None]:
        began = time.monotonic()
        delivered: list[int] = []
        num_cached: int | None = None  # what the first group found: later ones find what is no news to the client
        current = request
        num_lost = 0  # groups
        while True:
            other: _OtherGroup | None = None
            try:
                async with aclosing(self.engine.generate(current)) as outputs:
                    async for output in outputs:
                        if output.moving:
                            if not delivered:
                                break  # nothing is lost that a client has waited for
                            if other is None:
                                upto_here = partial(self._go_on, request, current, delivered, began)
                                block_size = self.block_size(request.model)
                                other = _OtherGroup(self.engine, upto_here, block_size, self.migration_limit)
                            continue
                        delivered += output.token_ids
                        if num_cached is None:
                            num_cached = output.num_cached_tokens
                        yield replace(output, request_id=request.request_id, num_cached_tokens=num_cached)
                        if output.finish_reason is None and other is not None and other.is_ready(len(delivered)):
                            break
                    else:
                        return
                self.on_move(request)
            except ContextLengthExceeded:
                if current is request or not delivered or request.sampling.max_tokens is not None:
                    raise
                # The context of the group that was to go on is full: there an answer without a bound of its own ends.
                yield SequenceOutput(request.request_id, (), (), "length", num_cached_tokens=num_cached or 0)
                return
            except GroupLost as lost:
                num_lost += not isinstance(lost, GroupDrained)
                if num_lost > self.migration_limit:
                    told = f"{num_lost} worker groups in turn were lost while they held this request"
                    raise EngineDead(f"{told}; it is not tried again") from lost
                logger.warning("request %s goes on elsewhere after %d tokens", request.request_id, len(delivered))
                if num_lost > 1:
                    await asyncio.sleep(min(_MAX_BACKOFF_SECONDS, _BACKOFF_SECONDS * 2 ** (num_lost - 2)))
                self.on_resume(request)
            finally:
                if other is not None:
                    other.cancel()
            current = self._go_on(request, current, delivered, began)

    def _go_on(self, request: Request, current: Request, delivered: list[int], began: float) -> Request:
        """The request as the next group gets it."""
        attempt = current.attempt + 1
        hashes, size = request.block_hashes, self.block_size(request.model)
        if size and delivered:  # what the first group has made may be found, too
            root = root_hash(request.model, request.cache_salt)
            hashes = hash_prompt(request.prompt_token_ids + tuple(delivered), size, root)
        return replace(
            request,
            request_id=f"{request.request_id}~{attempt}",  # what the old group may still say is nobody's
            block_hashes=hashes,
            output_token_ids=tuple(delivered),
            attempt=attempt,
            age=time.monotonic() - began,
            ttft_target=None if delivered else request.ttft_target,
        )


class _OtherGroup:
    """Makes another group ready for a sequence that shall move and runs on meanwhile.

    `upto_here` gives the request with all tokens that are out. What has come since is to be computed when it moves, and
    so is what has not filled a block: only full ones are found. So where more than a few are left, another round begins
    as soon as a block has become full. The request may be what kills groups: after `max_lost` of them no other one is
    asked.
    """

    def __init__(self, engine: EngineClient, upto_here: Callable[[], Request], block_size: int, max_lost: int):
        self._engine, self._upto_here, self._block_size = engine, upto_here, max(1, block_size)
        self._max_lost = max_lost
        self._numbers = itertools.count(1)
        self._num_rounds = 0
        self._begin()

    def is_ready(self, num_out: int) -> bool:
        """To be asked after each token, of which so many are out: should the sequence go now?"""
        if not self._task.done() or not self._task.result():
            return False
        num_tokens = self._prompt_len + num_out
        num_missing = num_tokens - self._num_ready // self._block_size * self._block_size
        if num_missing <= _FEW_TOKENS or self._num_rounds == _MAX_ROUNDS:
            return True
        if num_tokens % self._block_size <= _FEW_TOKENS // 2:
            self._begin()
        return False

    def cancel(self) -> None:
        self._task.cancel()

    def _begin(self) -> None:
        request = self._upto_here()
        self._prompt_len, self._num_ready = len(request.prompt_token_ids), len(request.token_ids)
        self._num_rounds += 1
        self._task = asyncio.create_task(self._make_ready(request))

    async def _make_ready(self, request: Request) -> bool:
        """Have some group hold the KV of all that is out: ask it for one token more. False: none does."""
        sampling = SamplingParams(temperature=0, seed=0, max_tokens=len(request.output_token_ids) + 1)
        for number in self._numbers:
            ahead = replace(request, request_id=f"{request.request_id}~ahead{number}", sampling=sampling)
            try:
                async with aclosing(self._engine.generate(ahead)) as outputs:
                    async for output in outputs:
                        if output.moving:
                            break  # that one will leave, too
                        if output.finish_reason is not None:
                            return True
            except GroupLost as lost:
                self._max_lost -= not isinstance(lost, GroupDrained)
                if self._max_lost < 0:
                    logger.warning("no other worker group is made ready for request %s: %s", request.request_id, lost)
                    return False
            except PagedRayError as error:
                logger.warning("no worker group can be made ready for request %s: %s", request.request_id, error)
                return False
            await asyncio.sleep(_BACKOFF_SECONDS)
        raise AssertionError("it goes on until the stream ends")
