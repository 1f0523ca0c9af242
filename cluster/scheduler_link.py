"""A leader's line to a global scheduler: what it brings there, and what it has yet to tell."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import ray
from ray.actor import ActorHandle

from ..scheduler.kv_sources import FetchOutcome
from ..scheduler.placement import GroupLoad
from ..scheduler.prefix_index import BlockEvents
from ..scheduler.step import SchedulerStats
from .global_scheduler import CALL_TIMEOUT, GroupInfo, GroupReport, reconnect
from .metrics.reports import GroupTimes

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_REPORT_SECONDS = 0.5


class SchedulerLink:
    """Introduces a group, tells at once what has finished, and at least twice a second how full the group is.

    `blocks`, `served` and `load` come from the engine's thread, all else from the event loop.
    """

    def __init__(
        self,
        scheduler: ActorHandle,
        introduce: "Callable[[SchedulerLink], GroupInfo]",
        application: str = "",
        shard: int = 0,
    ):
        self.scheduler = scheduler
        self._place = application, shard
        self.introduce = introduce
        self.request_ids: set[str] = set()  # that it sent, and that have not ended
        self.num_received = 0  # requests that it ever sent
        self.num_in_engine = 0  # of them, those that the engine was given
        self.finished: list[str] = []
        self.used: deque[tuple[str, str, int]] = deque()  # as in `GroupReport`
        self.load: GroupLoad | None = None
        self.blocks: deque[BlockEvents] = deque()  # in order
        self.served: deque[tuple[str, int]] = deque()
        self.fetches: deque[FetchOutcome] = deque()
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Have it report now."""
        self._wake.set()

    def ended(self, request_id: str, tenant: str, num_tokens: int) -> None:
        self.request_ids.discard(request_id)
        self.finished.append(request_id)
        self.used.append((tenant, request_id, num_tokens))
        self.wake()

    def take_load(self, load: GroupLoad) -> None:
        """Of all the group's load, this scheduler recognizes what it sent itself by its number."""
        self.load = replace(load, num_received=self.num_in_engine)

    async def keep_alive(self) -> None:
        """A scheduler that nobody calls takes itself for forgotten. That it restarts now is no reason to fail."""
        try:
            await asyncio.wait_for(self.scheduler.stats.remote(), CALL_TIMEOUT)
        except (ray.exceptions.RayError, TimeoutError) as error:
            logger.warning("the global scheduler does not answer while the group loads: %r", error)

    async def join(self) -> None:
        """Introduce the group; where that fails now, the next report does it."""
        try:
            await self.register()
        except (ray.exceptions.RayError, TimeoutError) as error:
            logger.warning("the global scheduler cannot be told of a group that has loaded: %r", error)

    async def register(self) -> None:
        info = self.introduce(self)
        await asyncio.wait_for(self.scheduler.register_group.remote(info), CALL_TIMEOUT)

    async def report_for_ever(
        self, group_id: str, stats: Callable[[], SchedulerStats], times: Callable[[], GroupTimes]
    ) -> None:
        timed_at = 0.0
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_REPORT_SECONDS):  # in Python 3.11 `wait_for` may swallow a cancellation
                    await self._wake.wait()
            self._wake.clear()
            finished, self.finished = self.finished, []
            blocks, served, fetches = _drain(self.blocks), _drain(self.served), _drain(self.fetches)
            timed = None
            if time.monotonic() > timed_at + _REPORT_SECONDS:  # not in each of the many reports of a busy group
                timed_at, timed = time.monotonic(), times()
            used = _drain(self.used)
            report = GroupReport(group_id, tuple(finished), stats(), self.load, blocks, served, fetches, timed, used)
            try:
                known: bool = await asyncio.wait_for(self.scheduler.report.remote(report), CALL_TIMEOUT)
                if not known:
                    await self.register()
            except Exception as error:
                self.finished = finished + self.finished
                self.used.extendleft(reversed(used))
                logger.warning("group %s cannot reach the global scheduler: %r", group_id, error)
                await asyncio.sleep(_REPORT_SECONDS)
                with suppress(ray.exceptions.RayError):  # then the next report says so
                    self.scheduler = await reconnect(self.scheduler, *self._place, error)


def _drain(items: deque[_T]) -> tuple[_T, ...]:
    return tuple(items.popleft() for _ in range(len(items)))
