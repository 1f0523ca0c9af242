"""The ingress's side of the wire: requests go to the global scheduler, tokens come from the leaders it chose."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.actor import ActorHandle

from ..scheduler.errors import EngineDead, GroupLost, PagedRayError, ReaderTooSlow
from ..scheduler.request import Request, SequenceOutput
from ..scheduler.tenants import RateLimits, Tenant
from .channel import Channel, ChannelAddress, ChannelBroken
from .config import ObservabilityOptions, SchedulerOptions
from .global_scheduler import CALL_TIMEOUT, KEEP_NEWS_SECONDS, Assignments, ClusterStats, group_gone, reconnect
from .metrics.reports import IngressReport
from .token_stream import StreamAddress, TokenFrame, read_frames

logger = logging.getLogger(__name__)

_SCHEDULER_PATIENCE = 30.0  # seconds without the global scheduler before requests that need it fail
_RECONNECT_SECONDS = 0.1
_MAX_UNREAD = 4096  # outputs of a sequence that wait for its reader; then it is dropped


class _Stream:
    """One sequence in flight: what has come and was not taken yet, and the group it comes from."""

    def __init__(self, request: Request):
        self.request = request
        self.began = time.monotonic()
        self.news: asyncio.Queue[SequenceOutput | PagedRayError] = asyncio.Queue()
        self.group_id: str | None = None
        self.epoch: str | None = None  # of the scheduler that has it

    def to_submit(self) -> Request:
        """One that a scheduler has had before was admitted, and has waited already."""
        if self.epoch is None:
            return self.request
        return replace(self.request, age=self.request.age + time.monotonic() - self.began)


class ClusterClient:
    """Implements `openai.engine_client.EngineClient` over the cluster. Lives on one event loop.

    Requests that come up while a submission is on its way go together in the next one. Each group that serves this
    ingress has one connection of ours that brings the tokens of all its sequences.
    """

    def __init__(self, scheduler: ActorHandle, application: str = "", shard: int = 0, ingress_id: str = ""):
        self.scheduler = scheduler
        self._place = application, shard
        self.ingress_id = ingress_id or uuid.uuid4().hex
        self._channel = Channel(self._find_channel)
        self._seen = ("", 0)  # the scheduler's epoch, and the number of its last news that came here
        self.rate_limits: dict[str, RateLimits] = {}  # tenant -> what was left when the scheduler last said so
        self._streams: dict[str, _Stream] = {}
        self._leaders: dict[str, ActorHandle] = {}
        self._readers: dict[str, asyncio.Task] = {}  # by group id
        self._to_submit: list[_Stream] = []
        self._to_cancel: dict[str, str | None] = {}  # and the group that has it without the scheduler knowing, if any
        self._submitter: asyncio.Task | None = None
        self._canceller: asyncio.Task | None = None
        self._waiter: asyncio.Task | None = None

    async def generate(self, request: Request) -> AsyncGenerator[SequenceOutput, None]:
        """Yield what the sequence gains until its finish. Leaving early (aclose, cancellation) aborts it.

        Raises `PagedRayError`: `Overloaded`, `InvalidRequest`, or `GroupLost` where its group is lost.
        """
        stream = self._streams[request.request_id] = _Stream(request)
        done = False
        try:
            self._to_submit.append(stream)
            self._submitter = self._running(self._submitter, self._submit)
            while not done:
                news = await stream.news.get()
                if isinstance(news, PagedRayError):
                    done = not isinstance(news, GroupLost)  # it may live, and only its connection be lost
                    raise news
                done = news.finish_reason is not None
                yield news
        finally:
            del self._streams[request.request_id]
            if stream in self._to_submit:
                self._to_submit.remove(stream)
            elif not done:
                self._abandon(request.request_id)

    async def stats(self, ingress: IngressReport | None = None, with_ingresses: bool = False) -> ClusterStats:
        return await self._call("stats", ingress, with_ingresses)

    async def configure(
        self,
        options: SchedulerOptions,
        tenants: tuple[Tenant, ...] = (),
        observability: ObservabilityOptions | None = None,
    ) -> None:
        await self._call("configure", options, tenants, observability)

    async def drain_group(self, group_id: str, seconds: float | None) -> bool:
        """See `GlobalScheduler.drain_group`."""
        return await self._call("drain_group", group_id, seconds)

    async def _find_channel(self) -> ChannelAddress:
        return await self.scheduler.open_channel.remote()

    # -- tasks: each runs while it has something to do ----------------------------------------------------------------

    @staticmethod
    def _running(task: asyncio.Task | None, main: Any, *args: Any) -> asyncio.Task:
        """The task that runs `main`; a new one if none does."""
        return task if task is not None and not task.done() else asyncio.create_task(main(*args))

    async def _submit(self) -> None:
        while self._to_submit:
            batch, self._to_submit = self._to_submit, []
            try:
                await self._submit_batch(batch)
            except Exception as error:
                for stream in batch:
                    stream.news.put_nowait(_told(error))
            if self._streams:
                self._waiter = self._running(self._waiter, self._hear_news)

    async def _submit_batch(self, batch: list[_Stream]) -> None:
        arguments = self.ingress_id, [s.to_submit() for s in batch], self._seen
        news = None
        try:
            news = Assignments.from_json(await self._channel.call("submit", *arguments, timeout=CALL_TIMEOUT / 2))
        except (ChannelBroken, ray.exceptions.RayError) as error:
            logger.warning("the global scheduler is asked by Ray: %r", error)
        if news is None:
            news = await self._call("submit", *arguments)
        for stream in batch:
            stream.epoch = news.epoch
        self.rate_limits.update(news.rate_limits)  # only the answer to `submit` has them
        if {group_id for _, group_id in news.assigned} - self._leaders.keys() - dict(news.groups).keys():
            news = await self._call("assignments", self.ingress_id, self._seen)  # the same again, with leaders' handles
        self._take(news)

    async def _hear_news(self) -> None:
        """Of sequences that wait, and of those that have a group: it may be lost without ever having had them."""
        heard = time.monotonic()
        while self._streams:
            try:
                news = await self._call("assignments", self.ingress_id, self._seen)
                self._take(news)
                # News for who does not ask are thrown away in time: this process may have been held up.
                missed, heard = time.monotonic() - heard > KEEP_NEWS_SECONDS / 2, time.monotonic()
                if unknown := [s for s in self._unassigned() if missed or s.epoch != news.epoch]:
                    await self._submit_batch(unknown)  # or the scheduler restarted
            except Exception as error:
                for stream in self._unassigned():
                    stream.news.put_nowait(_told(error))
                await asyncio.sleep(_RECONNECT_SECONDS)

    async def _cancel(self) -> None:
        while self._to_cancel:
            requests, self._to_cancel = self._to_cancel, {}
            try:
                await self._call("cancel", list(requests))
            except PagedRayError as error:
                logger.warning("%d abandoned requests run on: %s", len(requests), error)
            strays = {g: [r for r, group in requests.items() if group == g] for g in self._leaders}
            calls = [self._leaders[g].abort.remote(ids) for g, ids in strays.items() if ids]
            with suppress(TimeoutError):  # who does not answer is found out by others
                await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), CALL_TIMEOUT)

    async def _read(self, group_id: str, leader: ActorHandle) -> None:
        """Bring one group's tokens for as long as it lives."""
        connections = 0
        while True:
            try:
                address: StreamAddress = await asyncio.wait_for(
                    leader.open_stream.remote(self.ingress_id), CALL_TIMEOUT
                )
                if connections:
                    self._fail_group(group_id)  # it lives, and has dropped what it had for this ingress
                connections += 1
                await read_frames(address, partial(self._take_frame, group_id))
            except (ray.exceptions.RayError, TimeoutError, OSError) as error:
                logger.warning("group %s is lost: %r", group_id, error)
                self._leaders.pop(group_id, None)
                del self._readers[group_id]
                try:  # first: its sequences must not be sent there again
                    await self._call("remove_group", group_id, "unreachable")
                except PagedRayError as unreachable:
                    logger.warning("group %s cannot be removed: %s", group_id, unreachable)
                self._fail_group(group_id)
                return
            await asyncio.sleep(_RECONNECT_SECONDS)

    def _take_frame(self, group_id: str, frame: TokenFrame) -> None:
        for output in frame.outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None and stream.group_id in (None, group_id):
                stream.group_id = group_id  # the scheduler's word may come after the first token
                if stream.news.qsize() < _MAX_UNREAD:
                    stream.news.put_nowait(output)
                else:
                    self._drop(stream)
            elif stream is None and output.finish_reason is None:
                # Its end, or the first word of it, got lost on the way, or overtook the request itself.
                self._abandon(output.request_id, group_id)
        for request_id, failure in frame.failures:
            self._put(request_id, failure)

    def _drop(self, stream: _Stream) -> None:
        """Nobody takes what it brings: keep none of it, and let its group forget it."""
        while not stream.news.empty():
            stream.news.get_nowait()
        too_slow = f"{_MAX_UNREAD} pieces of the answer were not read, so no more is made"
        stream.news.put_nowait(ReaderTooSlow(too_slow))
        stream.group_id = "none"  # what still comes is not for it
        self._abandon(stream.request.request_id)

    def _fail_group(self, group_id: str) -> None:
        for stream in self._streams.values():
            if stream.group_id == group_id:
                stream.news.put_nowait(group_gone())

    # -- inside -------------------------------------------------------------------------------------------------------

    def _take(self, assignments: Assignments) -> None:
        self._seen = assignments.epoch, assignments.number
        self._leaders.update(assignments.groups)
        for request_id, group_id in assignments.assigned:
            stream = self._streams.get(request_id)
            if stream is not None and stream.group_id in (None, group_id):
                stream.group_id = group_id
            elif stream is not None and stream.group_id != "none":
                stream.news.put_nowait(group_gone())  # two have it, by a scheduler that began anew: neither goes on
        for request_id, error in assignments.failed:
            self._put(request_id, error)
        for group_id in self._leaders.keys() & {s.group_id for s in self._streams.values()}:
            self._readers[group_id] = self._running(
                self._readers.get(group_id), self._read, group_id, self._leaders[group_id]
            )

    def _put(self, request_id: str, news: SequenceOutput | PagedRayError) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.news.put_nowait(news)

    def _abandon(self, request_id: str, group_id: str | None = None) -> None:
        self._to_cancel.setdefault(request_id, group_id)
        self._canceller = self._running(self._canceller, self._cancel)

    def _restart_scheduler(self) -> None:
        """It lives and does not answer, which Ray does not notice. What it knows, others will tell the next one."""
        logger.warning("the global scheduler has not answered within %.0f s; it is started anew", 2 * CALL_TIMEOUT)
        ray.kill(self.scheduler, no_restart=False)

    def _unassigned(self) -> list[_Stream]:
        return [s for s in self._streams.values() if s.epoch is not None and s.group_id is None]

    async def _call(self, method: str, *args: Any) -> Any:
        """Call the global scheduler. While it restarts, try again; after `_SCHEDULER_PATIENCE` raise `EngineDead`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _SCHEDULER_PATIENCE
        unanswered = 0
        while True:
            try:
                return await asyncio.wait_for(getattr(self.scheduler, method).remote(*args), CALL_TIMEOUT)
            except (ray.exceptions.RayActorError, TimeoutError) as error:
                if loop.time() > deadline:
                    raise EngineDead("the global scheduler cannot be reached; try again later") from error
                unanswered = unanswered + 1 if isinstance(error, TimeoutError) else 0
                if unanswered == 2:  # one call may be late on a busy machine
                    self._restart_scheduler()
                await asyncio.sleep(0.2)
                with suppress(ray.exceptions.RayError):  # then the next call says so
                    self.scheduler = await reconnect(self.scheduler, *self._place, error)


def _told(error: Exception) -> PagedRayError:
    """What becomes of requests that could not be submitted."""
    if isinstance(error, PagedRayError):
        return error
    logger.error("the global scheduler cannot be asked", exc_info=error)
    return EngineDead("the global scheduler cannot be asked; try again later")
