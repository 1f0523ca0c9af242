"""The global scheduler: an actor around `scheduler.dispatcher.Dispatcher`; one an application, or `scheduler_shards`.

It decides who goes next and where, and hands groups their batches. Tokens never pass through it. Its state is soft:
when the actor restarts (Ray does that), groups register again at their next report and ingresses send again what they
have no assignment for.
"""

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import ray
from ray.actor import ActorHandle

from ..scheduler.autoscaling import Demand
from ..scheduler.dispatcher import Dispatcher, TenantStats
from ..scheduler.errors import GroupLost, PagedRayError, ShuttingDown
from ..scheduler.kv_sources import FetchOutcome
from ..scheduler.placement import GroupCapacity, GroupLoad
from ..scheduler.prefix_index import BlockEvents
from ..scheduler.request import Request
from ..scheduler.step import SchedulerStats
from ..scheduler.tenants import RateLimits, Tenant, TenantDirectory
from .channel import Channel, ChannelAddress, ChannelBroken, ChannelServer
from .config import ObservabilityOptions, SchedulerOptions
from .json_log import log_as_json
from .metrics.reports import GroupTimes, IngressReport
from .tasks import Tasks
from .token_stream import decode_error, encode_error
from .tracing import OFF, Tracing, make_tracing, now_ns

logger = logging.getLogger(__name__)

NAMESPACE = "pagedray"
CALL_TIMEOUT = 10.0  # seconds for a call that should take a millisecond
_POLL_SECONDS = 2.0
_WATCH_SECONDS = 1.0
_SHORTEST_WAIT = 0.001  # seconds between decisions that nothing but time has caused
KEEP_NEWS_SECONDS = 60.0  # for an ingress that does not ask
_DEAF_SECONDS = 20.0  # of an ingress with requests here, which asks every two seconds
_HEAD_NODE = "node:__internal_head__"  # a resource that Ray gives the node where GCS and Serve's controller are
FORGOTTEN_SECONDS = 30.0  # ingresses and groups call every two seconds; after this long without, it ends itself
SILENCE_SECONDS = 10.0  # a group reports twice a second; after this long without, it is taken for dead


@dataclass(frozen=True, slots=True)
class Assignments:
    """What became of an ingress's requests since it last asked.

    It is told again until the ingress has acknowledged `number`, so a lost answer loses nothing. `groups` holds the
    handles of leaders named here; `epoch` changes when the scheduler restarts and forgets.
    """

    epoch: str
    number: int  # of the last piece of news
    assigned: tuple[tuple[str, str], ...] = ()  # request id, group id
    failed: tuple[tuple[str, PagedRayError], ...] = ()
    groups: tuple[tuple[str, ActorHandle], ...] = ()
    rate_limits: tuple[tuple[str, RateLimits], ...] = ()  # of tenants whose requests were just submitted

    def to_json(self) -> Any:
        """All but the handles."""
        failed = [(i, *encode_error(e)) for i, e in self.failed]
        return self.epoch, self.number, self.assigned, failed, [(t, astuple(left)) for t, left in self.rate_limits]

    @classmethod
    def from_json(cls, value: Any) -> "Assignments":
        epoch, number, assigned, failed, limits = value
        return cls(
            epoch,
            number,
            tuple((request_id, group_id) for request_id, group_id in assigned),
            tuple((request_id, decode_error(*error)) for request_id, *error in failed),
            rate_limits=tuple((tenant, RateLimits(*left)) for tenant, left in limits),
        )


@dataclass(frozen=True, slots=True)
class _News:
    number: int
    request_id: str
    group_id: str | None  # where it was assigned
    error: PagedRayError | None  # or why it failed


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """How a group introduces itself. A rebuilt group has a new id: nothing meant for the old one reaches it."""

    group_id: str
    model: str
    capacity: GroupCapacity
    max_model_len: int  # tokens
    leader: ActorHandle
    num_received: int = 0  # requests it was ever given
    requests: tuple[tuple[str, Request], ...] = ()  # ingress id and request, of what it has already
    channel: ChannelAddress | None = None  # for add_requests
    draining: bool = False  # it will leave: it gets nothing more
    nodes: tuple[str, ...] = ()  # ids of Ray's nodes, of each rank


@dataclass(frozen=True, slots=True)
class GroupReport:
    group_id: str
    finished: tuple[str, ...]  # request ids
    stats: SchedulerStats
    load: GroupLoad | None = None
    blocks: tuple[BlockEvents, ...] = ()  # in order
    served: tuple[tuple[str, int], ...] = ()  # tenant, tokens made for it since the last report
    fetches: tuple[FetchOutcome, ...] = ()  # that have ended since the last report
    times: GroupTimes | None = None  # where they are news
    used: tuple[tuple[str, str, int], ...] = ()  # tenant, request id, and the tokens it took, of what has finished


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Of a node's KV store; counts are running totals."""

    budget: int  # bytes
    num_bytes: int
    num_runs: int
    num_published: int
    num_refused: int  # all that could have gone was being read
    num_failed: int
    num_evicted: int
    num_reads: int


@dataclass(frozen=True, slots=True)
class StoreReport:
    node_id: str
    blocks: BlockEvents | None
    stats: StoreStats


@dataclass(frozen=True, slots=True)
class StoreAnswer:
    known: bool  # False: something is missing, send everything
    groups: tuple[str, ...]  # that publish there


@dataclass(frozen=True, slots=True)
class FetchStats:
    """Running totals of a group's fetches from one kind of place that ended in one way."""

    model: str
    group_id: str
    source: str  # "node": the group's own, "network"
    outcome: str  # "ok", or what kept blocks away
    num_fetches: int = 0
    num_blocks: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    predicted_seconds: float = 0.0

    def plus(self, ended: FetchOutcome) -> "FetchStats":
        return replace(
            self,
            num_fetches=self.num_fetches + 1,
            num_blocks=self.num_blocks + ended.num_blocks,
            num_bytes=self.num_bytes + ended.num_bytes,
            seconds=self.seconds + ended.seconds,
            predicted_seconds=self.predicted_seconds + ended.predicted_seconds,
        )


@dataclass(frozen=True, slots=True)
class GroupStatus:
    group_id: str
    model: str
    max_model_len: int  # tokens
    stats: SchedulerStats | None  # its last report
    block_size: int = 0  # tokens
    num_indexed_blocks: int = 0  # cached there, as the prefix index has it
    draining: bool = False
    nodes: tuple[str, ...] = ()  # of each rank
    times: GroupTimes | None = None


@dataclass(frozen=True, slots=True)
class SchedulerReport:
    """What a global scheduler has counted."""

    scheduler: str  # another one after a restart
    tenants: tuple[TenantStats, ...] = ()
    groups_lost: tuple[tuple[str, str, int], ...] = ()  # model, how it was noticed, how many
    fetch_decisions: tuple[tuple[str, int, int], ...] = ()  # model, prefixes fetched, those computed all the same


@dataclass(frozen=True, slots=True)
class ClusterStats:
    num_queued: dict[str, int]  # by model
    groups: tuple[GroupStatus, ...]
    stores: tuple[tuple[str, StoreStats], ...] = ()  # by node
    fetches: tuple[FetchStats, ...] = ()
    schedulers: tuple[SchedulerReport, ...] = ()  # one, or of each shard
    ingresses: tuple[IngressReport, ...] = ()
    failures: tuple[tuple[str, str], ...] = ()  # models that cannot start, and why
    leaving: bool = False  # the application is about to end


def shutting_down() -> ShuttingDown:
    return ShuttingDown("the server is shutting down; send the request again")


def group_gone() -> GroupLost:
    """What becomes of a request whose group is lost."""
    return GroupLost("the worker group that held this request is gone; send it again")


class GlobalScheduler:
    """The actor's class. All methods run on one event loop, none of them waits while holding half-changed state."""

    def __init__(self, application: str, shard: int = 0):
        self.application = application
        self.shard = shard  # its number, where there are several
        self.epoch = uuid.uuid4().hex
        self.options = SchedulerOptions()
        self.leaving_at: float | None = None  # when new requests are refused, because the application ends
        self.over = False  # all are
        self.wanted: dict[str, asyncio.Event] = {}  # models that sleep, and who waits to hear that one is wanted
        self.dispatcher = Dispatcher()
        self.tenants: tuple[Tenant, ...] = ()
        self.groups: dict[str, GroupInfo] = {}
        self.reports: dict[str, SchedulerStats] = {}
        self.last_heard: dict[str, float] = {}  # group id -> when it last reported
        self.stores: dict[str, StoreStats] = {}  # by node id
        self.store_heard: dict[str, float] = {}
        self.fetches: dict[tuple[str, str, str], FetchStats] = {}
        self.last_asked: dict[str, float] = {}  # ingress id -> when it last asked for news
        self.ingress_of: dict[str, str] = {}  # request id -> ingress id
        self.news: dict[str, list[_News]] = {}  # by ingress id: what it has not acknowledged
        self.num_news = 0
        self.wakers: dict[str, asyncio.Event] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = Tasks()
        self.quiet_seconds = (
            0.0  # without a call, and in which this process ran: one that was stopped was not forgotten
        )
        self._tasks.spawn(self._watch_for_ever())
        self.times: dict[str, GroupTimes] = {}  # by group id
        self.groups_lost: dict[tuple[str, str], int] = {}  # by model and reason
        self.ingresses: dict[str, tuple[float, IngressReport]] = {}  # by id: when it told, and what
        self.observability: ObservabilityOptions | None = None
        self.tracing: Tracing = OFF
        self.traced: dict[str, tuple[str, int]] = {}  # of queued requests: traceparent, when they came
        self.channels: dict[str, Channel] = {}  # to leaders, by group id
        self.server: ChannelServer | None = None

    # -- what ingresses call ------------------------------------------------------------------------------------------

    async def configure(
        self,
        options: SchedulerOptions,
        tenants: tuple[Tenant, ...] = (),
        observability: ObservabilityOptions | None = None,
    ) -> None:
        """Set the queue's bounds and the tenants. Ingresses repeat it, so that a restarted scheduler has them too."""
        if observability is not None and observability != self.observability:
            self.observability, self.tracing = observability, make_tracing("scheduler", observability)
            if observability.json_logs:
                log_as_json("scheduler")
        if tenants != self.tenants:
            self.tenants = tenants
            self.dispatcher.quotas.replace(TenantDirectory(tenants))
        self.dispatcher.max_queued_requests = options.max_queued_requests
        self.options = options

    async def submit(self, ingress_id: str, requests: Sequence[Request], seen: tuple[str, int]) -> Assignments:
        """Queue requests; answer with what could be decided at once. The rest comes by `assignments`.

        `seen` is the epoch and number of the last news the ingress has. May be repeated: a request that is known is not
        queued again, its assignment is told again.
        """
        now = time.monotonic()  # one for all of it: what was looked up to admit a request serves to place it
        waker = self.wakers.pop(ingress_id, None)  # this answer has the news, so nobody else need be told it
        for request in requests:
            try:
                if self.over or (self.leaving_at is not None and now > self.leaving_at and not request.admitted):
                    raise shutting_down()
                self.dispatcher.submit(request, now)
                self.ingress_of[request.request_id] = ingress_id
                if waiter := self.wanted.pop(request.model, None):
                    waiter.set()
                if request.traceparent:
                    self.traced.setdefault(request.request_id, (request.traceparent, now_ns()))
            except PagedRayError as error:
                self._tell(ingress_id, request.request_id, error=error)
            group_id = self.dispatcher.group_of(request.request_id)
            if group_id is not None:
                self._tell(ingress_id, request.request_id, group_id)
        self._dispatch(now)
        limits = {r.tenant: self.dispatcher.rate_limits(r.tenant, now) for r in requests}
        limited = tuple((t, left) for t, left in limits.items() if left != RateLimits())
        if waker is not None:
            self.wakers[ingress_id] = waker
        return replace(self._take_news(ingress_id, seen), rate_limits=limited)

    async def open_channel(self) -> ChannelAddress:
        """Where `submit` can be called by a `Channel`."""
        if self.server is None:
            self.server = ChannelServer(ray.util.get_node_ip_address(), {"submit": self._submit_by_channel})
        return self.server.address

    async def _submit_by_channel(self, *args: Any) -> Any:
        return (await self.submit(*args)).to_json()

    async def assignments(self, ingress_id: str, seen: tuple[str, int]) -> Assignments:
        """Wait for news of queued requests, a few seconds at most."""
        self._forget_news(ingress_id, seen)
        if not self.news.get(ingress_id):
            waker = self.wakers[ingress_id] = asyncio.Event()
            try:
                await asyncio.wait_for(waker.wait(), _POLL_SECONDS)
            except TimeoutError:
                pass
        return self._take_news(ingress_id, seen)

    async def cancel(self, request_ids: Sequence[str]) -> None:
        """Forget requests that nobody waits for, and have their groups abort them."""
        for group_id, ids in self._forget(request_ids).items():
            self._tasks.spawn(self._call_leader(group_id, "abort", ids))
        self._dispatch()

    async def stats(self, ingress: IngressReport | None = None, with_ingresses: bool = False) -> ClusterStats:
        """What there is. An ingress brings what it has counted itself, and may ask for what all of them have told."""
        self.quiet_seconds, now = 0.0, time.monotonic()
        if ingress is not None:
            self.ingresses[ingress.ingress_id] = now, ingress
        groups = tuple(
            GroupStatus(
                g.group_id,
                g.model,
                g.max_model_len,
                self.reports.get(g.group_id),
                g.capacity.block_size,
                self.dispatcher.index.num_blocks_of(g.group_id),
                g.draining,
                g.nodes,
                self.times.get(g.group_id),
            )
            for g in self.groups.values()
        )
        stores, fetches = tuple(self.stores.items()), tuple(self.fetches.values())
        return ClusterStats(
            self.dispatcher.num_queued(),
            groups,
            stores,
            fetches,
            (self._own_report(),),
            tuple(report for _, report in self.ingresses.values()) if with_ingresses else (),
            failures=tuple(self.dispatcher.failures().items()),
            leaving=self.leaving_at is not None,
        )

    def _own_report(self) -> SchedulerReport:
        return SchedulerReport(
            self.epoch[:8],
            tuple(self.dispatcher.tenant_stats()),
            tuple((model, reason, count) for (model, reason), count in self.groups_lost.items()),
            tuple((model, *counts) for model, counts in self.dispatcher.num_fetches().items()),
        )

    # -- what scales and ends the application -------------------------------------------------------------------------

    async def demand(self, model: str, fresh: bool = False) -> Demand:
        """What a model is asked for. Where it has no group and nobody waits for one, wait a while for somebody.

        `fresh`: the model was just deployed, so what kept it from starting may be mended.
        """
        if fresh:
            self.dispatcher.mend_model(model)
        demand = self.dispatcher.demand(model, time.monotonic())
        if not fresh and not demand.num_groups and not demand.num_queued:
            waiter = self.wanted.setdefault(model, asyncio.Event())
            try:
                await asyncio.wait_for(waiter.wait(), _POLL_SECONDS)
            except TimeoutError:
                pass
            demand = self.dispatcher.demand(model, time.monotonic())
        return demand

    async def fail_model(self, model: str, reason: str, final: bool, num_tries: int) -> None:
        """A group could not start; see `Dispatcher.fail_model`."""
        logger.error("a group of %s could not start: %s", model, reason)
        for request_id, error in self.dispatcher.fail_model(model, reason, final, num_tries, time.monotonic()):
            self._refuse(request_id, error)

    async def leave(self, notice_seconds: float) -> None:
        """The application is about to end: its readiness is false from now on, and after `notice_seconds`, which
        whoever balances load has to notice it, new requests are refused. Those that are here go on."""
        if self.leaving_at is None:
            self.leaving_at = time.monotonic() + notice_seconds

    async def end_requests(self) -> None:
        """What is not done yet ends now, with an error that tells its client to ask again."""
        self.over = True
        for request_id in [i for i in self.ingress_of if self.dispatcher.group_of(i) not in self.groups]:
            self.dispatcher.cancel(request_id, time.monotonic())
            self._refuse(request_id, shutting_down())
        by_group = self._forget(list(self.ingress_of))
        await asyncio.gather(*(self._call_leader(g, "end_requests", ids) for g, ids in by_group.items()))

    async def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self.ingress_of)

    # -- what groups call ---------------------------------------------------------------------------------------------

    async def register_group(self, info: GroupInfo) -> None:
        """A group joins. Of requests it brings along, those that another group has by now are aborted here."""
        self.groups[info.group_id] = info
        if info.channel is not None and info.group_id not in self.channels:
            self.channels[info.group_id] = Channel(_known(info.channel))
        self.last_heard[info.group_id] = time.monotonic()
        running = [request for _, request in info.requests]
        elsewhere = self.dispatcher.add_group(
            info.group_id, info.model, info.capacity, time.monotonic(), running, info.num_received
        )
        for ingress_id, request in info.requests:
            if request.request_id not in elsewhere:
                self.ingress_of[request.request_id] = ingress_id
                self._tell(ingress_id, request.request_id, info.group_id)
        if elsewhere:
            self._tasks.spawn(self._call_leader(info.group_id, "abort", elsewhere))
        if info.draining:
            self.dispatcher.drain_group(info.group_id)
        logger.info("group %s of %s registered", info.group_id, info.model)
        self._dispatch()

    async def report(self, report: GroupReport) -> bool:
        """Take in a group's load and what it finished. False: this scheduler does not know it, register again."""
        if report.group_id not in self.groups:
            return False
        self.reports[report.group_id] = report.stats
        if report.times is not None:
            self.times[report.group_id] = report.times
        self.quiet_seconds, self.last_heard[report.group_id] = 0.0, time.monotonic()
        if not all([self.dispatcher.block_events(report.group_id, events) for events in report.blocks]):
            self._tasks.spawn(self._call_leader(report.group_id, "send_snapshot", None))
        for ended in report.fetches:
            self._fetched(report.group_id, ended)
        for used in report.used:
            self.dispatcher.settle(*used)
        for tenant, tokens in report.served:
            self.dispatcher.served(self.groups[report.group_id].model, tenant, tokens)
        # Not what another group has now, or waits for one: a scheduler that began anew has sent it there.
        finished = [r for r in report.finished if self.dispatcher.group_of(r) == report.group_id]
        for request_id in finished:
            self._gone(request_id)
        self.dispatcher.finished(finished, time.monotonic())
        if report.load is not None:
            self.dispatcher.report(report.group_id, report.load, time.monotonic())
        self._dispatch()
        return True

    def _fetched(self, group_id: str, ended: FetchOutcome) -> None:
        self.dispatcher.sources.learn(ended, time.monotonic())
        source, outcome = "node" if ended.same_node else "network", ended.failure or "ok"
        key = group_id, source, outcome
        so_far = self.fetches.get(key) or FetchStats(self.groups[group_id].model, *key)
        self.fetches[key] = so_far.plus(ended)

    async def report_store(self, report: StoreReport) -> StoreAnswer:
        """What a node's KV store has."""
        groups = tuple(g for g, info in self.groups.items() if info.capacity.node == report.node_id)
        sources = self.dispatcher.sources
        if report.node_id not in sources:
            if report.blocks is None or not report.blocks.snapshot:
                return StoreAnswer(False, groups)
            sources.add(report.node_id, report.node_id)
        self.stores[report.node_id] = report.stats
        self.store_heard[report.node_id] = time.monotonic()
        known = report.blocks is None or self.dispatcher.block_events(report.node_id, report.blocks)
        return StoreAnswer(known, groups)

    async def remove_store(self, node_id: str) -> None:
        """It ends, and says so."""
        self.dispatcher.sources.remove(node_id)
        self.stores.pop(node_id, None)
        self.store_heard.pop(node_id, None)

    async def drain_group(self, group_id: str, leave_within: float | None = None) -> bool:
        """Give a group nothing more; with `leave_within` have it move what it has and end, in so many seconds.

        False: there is no such group.
        """
        info = self.groups.get(group_id)
        if info is None:
            return False
        self.groups[group_id] = replace(info, draining=True)
        self.dispatcher.drain_group(group_id)
        if leave_within is not None:
            self._tasks.spawn(self._call_leader(group_id, "leave", leave_within))
        return True

    async def remove_group(self, group_id: str, reason: str = "left") -> None:
        """A group leaves or was found dead, and `reason` says how. What it held fails with a retriable error."""
        info = self.groups.pop(group_id, None)
        if channel := self.channels.pop(group_id, None):
            channel.close()
        self.reports.pop(group_id, None)
        self.times.pop(group_id, None)
        self.last_heard.pop(group_id, None)
        if info is None:
            return
        key = info.model, reason
        self.groups_lost[key] = self.groups_lost.get(key, 0) + 1
        self.fetches = {key: stats for key, stats in self.fetches.items() if key[0] != group_id}
        for request_id in self.dispatcher.remove_group(group_id):
            ingress_id = self._gone(request_id)
            if ingress_id:
                self._tell(ingress_id, request_id, error=group_gone())

    # -- inside -------------------------------------------------------------------------------------------------------

    def _dispatch(self, now: float | None = None) -> None:
        now = time.monotonic() if now is None else now
        for group_id, requests in self.dispatcher.dispatch(now).items():
            batch = [(self.ingress_of[r.request_id], r) for r in requests]
            for ingress_id, request in batch:
                self._tell(ingress_id, request.request_id, group_id)
                if request.request_id in self.traced:
                    self._trace(request.request_id, {"pagedray.group": group_id})
            self._tasks.spawn(self._call_leader(group_id, "add_requests", batch, self.shard))
        for request_id, error in self.dispatcher.take_refused():
            self._refuse(request_id, error)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.dispatcher.next_dispatch_at < math.inf:  # something waits for its group: nobody else may call before
            wait = max(_SHORTEST_WAIT, self.dispatcher.next_dispatch_at - now)
            self._timer = asyncio.get_running_loop().call_later(wait, self._dispatch)

    async def _call_leader(self, group_id: str, method: str, *arguments: Any) -> None:
        info = self.groups.get(group_id)
        if info is None:
            return
        if method == "add_requests" and group_id in self.channels:
            try:
                await self.channels[group_id].call(method, *arguments, timeout=CALL_TIMEOUT / 2)
                return
            except ChannelBroken as error:
                logger.warning("group %s is asked by Ray: %s", group_id, error)
        try:
            await asyncio.wait_for(getattr(info.leader, method).remote(*arguments), CALL_TIMEOUT)
        except (ray.exceptions.RayError, TimeoutError) as error:
            logger.warning("group %s does not answer %s: %r", group_id, method, error)
            await self.remove_group(group_id, "unanswering")

    async def _watch_for_ever(self) -> None:
        """Give up groups that have fallen silent, and requests that have waited too long."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            now = time.monotonic()
            self.quiet_seconds += _WATCH_SECONDS
            if self.quiet_seconds > FORGOTTEN_SECONDS:
                self._leave()
            for group_id in [g for g, heard in self.last_heard.items() if now - heard > SILENCE_SECONDS]:
                logger.warning("group %s has been silent for %.0f s", group_id, SILENCE_SECONDS)
                await self.remove_group(group_id, "silent")
            for node_id in [n for n, heard in self.store_heard.items() if now - heard > SILENCE_SECONDS]:
                logger.warning("the KV store of node %s has been silent for %.0f s", node_id, SILENCE_SECONDS)
                await self.remove_store(node_id)
            for ingress_id in [i for i, asked in self.last_asked.items() if now - asked > KEEP_NEWS_SECONDS]:
                del self.last_asked[ingress_id]
                self.news.pop(ingress_id, None)
            for ingress_id in [i for i, asked in self.last_asked.items() if now - asked > _DEAF_SECONDS]:
                self._give_up_queued(ingress_id)
            self.ingresses = {i: known for i, known in self.ingresses.items() if now - known[0] <= SILENCE_SECONDS}
            for request_id, error in self.dispatcher.expire(
                now, self.options.max_queue_seconds, self.options.max_wake_seconds
            ):
                self._refuse(request_id, error)

    def _give_up_queued(self, ingress_id: str) -> None:
        """An ingress that has requests here asks for news all the time; this one does not, so nobody waits for them."""
        queued = [r for r, i in self.ingress_of.items() if i == ingress_id and self.dispatcher.group_of(r) is None]
        if queued:
            logger.warning("ingress %s is silent; its %d queued requests are given up", ingress_id, len(queued))
        self._forget(queued)
        for request_id in queued:
            self._tell(ingress_id, request_id, error=group_gone())  # should it come again, they go on

    def _refuse(self, request_id: str, error: PagedRayError) -> None:
        if request_id in self.traced:
            self._trace(request_id, {"error.type": error.code or error.type})
        self._tell(self.ingress_of.pop(request_id), request_id, error=error)

    def _forget(self, request_ids: Sequence[str]) -> dict[str, list[str]]:
        """Forget requests that may still run; returns those that groups have, by group."""
        by_group: dict[str, list[str]] = {}
        for request_id in request_ids:
            self._gone(request_id)
            group_id = self.dispatcher.cancel(request_id, time.monotonic())
            if group_id in self.groups:
                by_group.setdefault(group_id, []).append(request_id)
        return by_group

    def _gone(self, request_id: str) -> str | None:
        """Forget a request that has ended; returns the ingress it came from."""
        self.traced.pop(request_id, None)
        return self.ingress_of.pop(request_id, None)

    def _trace(self, request_id: str, attributes: dict[str, str]) -> None:
        """A request that is traced does not wait any more."""
        traceparent, came = self.traced.pop(request_id)
        self.tracing.record("schedule", traceparent, came, now_ns(), {"pagedray.request_id": request_id} | attributes)

    def _tell(
        self, ingress_id: str, request_id: str, group_id: str | None = None, error: PagedRayError | None = None
    ) -> None:
        self.num_news += 1
        self.news.setdefault(ingress_id, []).append(_News(self.num_news, request_id, group_id, error))
        waker = self.wakers.pop(ingress_id, None)
        if waker is not None:
            waker.set()

    def _forget_news(self, ingress_id: str, seen: tuple[str, int]) -> None:
        self.last_asked[ingress_id] = time.monotonic()
        epoch, number = seen
        if epoch == self.epoch and ingress_id in self.news:
            self.news[ingress_id] = [n for n in self.news[ingress_id] if n.number > number]

    def _take_news(self, ingress_id: str, seen: tuple[str, int]) -> Assignments:
        self._forget_news(ingress_id, seen)
        news = self.news.get(ingress_id, [])
        assigned = tuple((n.request_id, n.group_id) for n in news if n.group_id is not None)
        failed = tuple((n.request_id, n.error) for n in news if n.error is not None)
        named = {group_id for _, group_id in assigned} & self.groups.keys()
        leaders = tuple((g, self.groups[g].leader) for g in named)
        return Assignments(self.epoch, self.num_news, assigned, failed, leaders)

    def _leave(self) -> None:
        """End this actor, which is detached and would stay for ever: its application is gone."""
        logger.info("nobody has called the scheduler of %s for %.0f s", self.application, FORGOTTEN_SECONDS)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def _known(address: ChannelAddress) -> Callable[[], Awaitable[ChannelAddress]]:
    async def find() -> ChannelAddress:
        return address

    return find


def connect_all(application: str, num_shards: int) -> list[ActorHandle]:
    return [connect(application, shard) for shard in range(num_shards)]


def find(application: str, shard: int = 0) -> ActorHandle:
    """The application's global scheduler, for who has no use for one that nobody else needs. `ValueError`: none."""
    return ray.get_actor(_name(application, shard), namespace=NAMESPACE)


def _name(application: str, shard: int) -> str:
    return f"{application}:global_scheduler{f':{shard}' if shard else ''}"


async def reconnect(scheduler: ActorHandle, application: str, shard: int, error: Exception) -> ActorHandle:
    """The handle to go on with after `error`. A scheduler that took itself for forgotten, because its callers were held
    up, has ended for good: then there is another of its name, or one is started."""
    if application and isinstance(error, ray.exceptions.ActorDiedError):
        return await asyncio.to_thread(connect, application, shard)  # the same one where it only restarts
    return scheduler


def connect(application: str, shard: int = 0) -> ActorHandle:
    """The application's global scheduler, started by whoever asks first. The handle stays good across its restarts."""
    actor: Any = ray.remote(GlobalScheduler)
    return actor.options(
        name=_name(application, shard),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_concurrency=10_000,  # every ingress has a call open
        scheduling_strategy="DEFAULT",  # not in the placement group of whoever asks: it would die with it
        resources={_HEAD_NODE: 0.001},  # other nodes come and go, and no drain would move it
        num_cpus=0,
    ).remote(application, shard)
