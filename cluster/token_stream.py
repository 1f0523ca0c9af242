"""Frames of tokens from a group's leader to an ingress: one a step, carrying all of that ingress's sequences.

The ingress keeps one call open at the leader (`Leader.next_frame`), which answers as soon as there is something. What
comes while a call is on its way is in the next frame: batching without a timer, and a slow ingress gets fewer, larger
frames instead of a growing queue of calls.
"""

import asyncio
from dataclasses import dataclass, field

from ..scheduler.errors import PagedRayError
from ..scheduler.request import SequenceOutput

POLL_SECONDS = 2.0  # a call without news is answered, empty, after this long
ABANDONED_SECONDS = 15.0  # without a call for this long, an ingress is taken for dead


@dataclass(frozen=True, slots=True)
class TokenFrame:
    """News of several sequences, in order. `failures` holds sequences that ended in an error instead."""

    outputs: tuple[SequenceOutput, ...] = ()
    failures: tuple[tuple[str, PagedRayError], ...] = ()


@dataclass(slots=True)
class Outbox:
    """What a leader has for one ingress. Lives on the leader's event loop."""

    last_call: float  # when the ingress last asked, on the loop's clock
    request_ids: set[str] = field(default_factory=set)  # the ingress's unfinished sequences
    _outputs: list[SequenceOutput] = field(default_factory=list)
    _failures: list[tuple[str, PagedRayError]] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, output: SequenceOutput) -> None:
        self._outputs.append(output)
        if output.finish_reason:
            self.request_ids.discard(output.request_id)
        self._news.set()

    def fail(self, request_id: str, error: PagedRayError) -> None:
        self._failures.append((request_id, error))
        self.request_ids.discard(request_id)
        self._news.set()

    async def next_frame(self) -> TokenFrame:
        """Wait for news, at most `POLL_SECONDS`."""
        loop = asyncio.get_running_loop()
        self.last_call = loop.time()
        try:
            await asyncio.wait_for(self._news.wait(), POLL_SECONDS)
        except TimeoutError:
            pass
        self.last_call = loop.time()
        self._news.clear()
        frame = TokenFrame(tuple(self._outputs), tuple(self._failures))
        self._outputs.clear()
        self._failures.clear()
        return frame

    def abandoned(self, now: float) -> bool:
        return bool(self.request_ids) and now - self.last_call > ABANDONED_SECONDS
