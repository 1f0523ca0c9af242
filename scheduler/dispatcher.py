"""The global scheduler's whole state: who waits, which worker group has what. Every event is a method.

    submit ─▶ quotas ─▶ fair queue ─▶ placement ─▶ a group's batch        dispatch
    report, block_events ─▶ load and prefix index                         what decisions are made on
    drain_group ─▶ what a group has it keeps, and gets nothing more
    finished, cancel, expire, remove_group                                how a request ends, once

All of it is plain Python driven by an explicit clock (`now`, in seconds), so the actor, the tests and the simulator run
the same decisions.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from .autoscaling import Demand, DemandMeter
from .cost_model import CostModel
from .errors import DeadlineUnmeetable, EngineDead, Overloaded, PagedRayError
from .fairness import FairQueue, Key
from .histogram import Histogram, HistogramCounts
from .kv_sources import KVSources
from .placement import Choice, Group, GroupCapacity, GroupLoad, Match, Placement, PlacementOptions
from .prefix_index import BlockEvents, PrefixIndex
from .request import Request
from .tenants import PRIORITY_CLASSES, Quotas, RateLimits, Tenant, TenantDirectory

_HOPELESS_SECONDS = 60.0  # that a model which cannot start, and could before, is not asked for


@dataclass(frozen=True, slots=True)
class DispatchOptions:
    """How requests are ordered and charged. Weights are of tokens: what one costs a tenant."""

    priority_weight: float = 10.0  # seconds of waiting that a level of priority is worth
    # A request goes before one that came so much earlier, if it has that much less to compute: what is warm, or short.
    # At most `max_head_start` seconds, so nobody is passed by what comes more than that after it.
    head_start_weight: float = 1.0
    max_head_start: float = 2.0
    input_weight: float = 1.0
    cached_weight: float = 0.1
    output_weight: float = 2.0
    # Of the fair queue, for each group: what it prefills in this time, and so many tokens at most. In tokens alone, a
    # tenant that comes to a slow group would be let ahead of the others for half a minute.
    quantum_seconds: float = 0.3
    quantum: float = 8192.0
    # While others have come of late, this share of each group's slots and KV cache is kept from a tenant that has its
    # share already: they find room at once where they would have to wait for one of its requests to end.
    reserve: float = 0.0625
    reserve_seconds: float = 30.0  # how late "of late" is
    lookahead: int = 8  # requests that may wait for their favorite group while others pass them


@dataclass(slots=True)
class _Entry:
    request: Request
    tenant: Tenant
    arrived: float
    queued: float  # later than it arrived where it is resumed
    key: Key
    match: Match | None = None
    matched_at: float = 0.0
    seconds: float = 0.0  # of prefill, as it was reckoned when it came
    group_id: str | None = None

    @property
    def deadline(self) -> float:
        target = self.request.ttft_target
        return float("inf") if target is None else self.arrived + target


# Seconds in the queue; below the first one nothing was waited for.
QUEUE_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


@dataclass(frozen=True, slots=True)
class TenantStats:
    """What a tenant has waiting and running of a model, and what it was given so far."""

    model: str
    tenant: str
    num_queued: int
    num_placed: int  # requests that groups have
    counter: float  # its service per weight, by which the fair queue orders
    computed_tokens: int  # of prompts, as they were expected when they were placed
    cached_tokens: int
    generated_tokens: int
    queue_seconds: HistogramCounts  # of requests that were placed


@dataclass(slots=True)
class _Service:
    """Running totals of a tenant in a pool."""

    computed: int = 0
    cached: int = 0
    generated: int = 0
    queue: Histogram = field(default_factory=lambda: Histogram(QUEUE_BOUNDS))


@dataclass(slots=True)
class _Pool:
    """The requests and groups of one model."""

    queue: FairQueue[_Entry]
    placement: Placement
    meter: DemandMeter = field(default_factory=DemandMeter)
    failure: str | None = None  # why no group of this model can start
    hopeless_until: float = math.inf  # what has served before may start once what kept it has passed
    num_failed: int = 0  # starts in a row
    queued_seconds: float = 0.0  # of prefill that waits
    in_flight: dict[str, tuple[int, float]] = field(default_factory=dict)  # tenant → requests at groups, weight
    service: dict[str, _Service] = field(default_factory=dict)  # by tenant

    def usual_seconds(self, entry: _Entry) -> float:
        """Of prefill, for a request that came when there was no group to reckon with."""
        return self.placement.usual_cost.prefill_seconds(entry.request.num_tokens, 0)

    def overdue(self, entry: _Entry, now: float, max_queue: float, max_wake: float) -> str | None:
        """Why a request has waited too long, if it has."""
        longest = max(max_queue, max_wake)
        if not self.placement.num_open:
            if entry.queued >= now - longest:
                return None
            return f"no worker group of {entry.request.model!r} was there within {longest:g} s"
        if max(entry.queued, self.meter.first_at) >= now - max_queue and entry.queued >= now - longest - max_queue:
            return None
        return f"no worker group could take the request within {max_queue:g} s"

    @property
    def wait(self) -> float:
        """Seconds until what waits now has been computed."""
        return self.queued_seconds / max(1, self.placement.num_open)

    def fit_quantum(self, options: DispatchOptions) -> None:
        """Groups came or went, or turned out to be faster or slower. What changes little is measuring error."""
        quantum = 0.0
        for group in self.placement.groups.values():
            if group.draining:
                continue
            seconds = group.cost.chunked_prefill_seconds(group.capacity.chunk, 0, group.capacity.chunk, 0, 0)
            quantum += min(options.quantum, options.quantum_seconds * group.capacity.chunk / max(1e-9, seconds))
        if quantum and not 0.7 < quantum / self.queue.quantum < 1.4:
            self.queue.set_quantum(quantum)

    def service_of(self, tenant: str) -> _Service:
        service = self.service.get(tenant)
        if service is None:
            service = self.service[tenant] = _Service()
        return service

    def count(self, tenant: Tenant, change: int) -> None:
        """A request of a tenant came to a group, or left it."""
        num = self.in_flight.get(tenant.name, (0, 0.0))[0] + change
        if num:
            self.in_flight[tenant.name] = num, tenant.weight
        else:
            del self.in_flight[tenant.name]

    def is_light(self, tenant: Tenant) -> bool:
        """Others are being served, and this tenant has less at the groups than its share."""
        total, weights = 1, tenant.weight
        for name, (num, weight) in self.in_flight.items():
            total += num
            weights += weight if name != tenant.name else 0.0
        mine = self.in_flight.get(tenant.name, (0, 0.0))[0]
        return weights > tenant.weight and (mine + 1) * weights <= total * tenant.weight


@dataclass(slots=True)
class Dispatcher:
    """Queues requests, fairly between tenants, and hands each to the group where it costs least.

    A group is given a request once it could start it soon. Until then it stays here, where a group that comes later
    can have it, where one of higher priority still passes it, and where it costs nothing to cancel. The queue is
    bounded: past `max_queued_requests` of a model a request is refused, not kept.

    Nobody starves: within a tenant, a request waits only for those whose key (arrival + priority × weight - head start)
    is smaller, of which no new ones come once its key has passed; between tenants the fair queue's bound holds.
    """

    max_queued_requests: int = 1024
    options: DispatchOptions = field(default_factory=DispatchOptions)
    placement_options: PlacementOptions = field(default_factory=PlacementOptions)
    index: PrefixIndex = field(default_factory=PrefixIndex)
    quotas: Quotas = field(default_factory=lambda: Quotas(TenantDirectory()))
    sources: KVSources = field(init=False)
    next_dispatch_at: float = float("inf")  # when a request that waits for its group may go, if nothing happens before
    _pools: dict[str, _Pool] = field(default_factory=dict)
    _groups: dict[str, _Pool] = field(default_factory=dict)
    _entries: dict[str, _Entry] = field(default_factory=dict)
    _refused: list[tuple[str, PagedRayError]] = field(default_factory=list)
    _num_submitted: int = 0

    def __post_init__(self) -> None:
        self.sources = KVSources(self.index)

    def _pool(self, model: str) -> _Pool:
        pool = self._pools.get(model)
        if pool is None:
            queue: FairQueue[_Entry] = FairQueue(self.options.quantum)
            pool = self._pools[model] = _Pool(queue, Placement(self.index, self.placement_options, self.sources))
        return pool

    # -- groups -------------------------------------------------------------------------------------------------------

    def add_group(
        self,
        group_id: str,
        model: str,
        capacity: GroupCapacity,
        now: float,
        running: Iterable[Request] = (),
        num_received: int = 0,
        cost: CostModel | None = None,
    ) -> list[str]:
        """A group came up, or came back with requests it already has (after this scheduler restarted).

        Returns the ids of those that another group has by now: this one should drop them.
        """
        self.remove_group(group_id)
        pool = self._pool(model)
        bit = self.index.add_holder(group_id)
        group = Group(group_id, model, capacity, bit, cost or pool.placement.usual_cost, now, now, num_received)
        self._groups[group_id] = pool
        pool.failure, pool.num_failed = None, 0
        pool.meter.joined(now, first=not pool.placement.num_open)
        pool.placement.add(group, now)
        pool.fit_quantum(self.options)
        elsewhere = []
        for request in running:
            entry = self._entries.get(request.request_id)
            if entry is None:
                tenant = self.quotas.directory.get(request.tenant)
                entry = self._entries[request.request_id] = self._entry(request, tenant, now)
                self.quotas.restore(tenant)
            elif entry.group_id is None:
                self._dequeue(entry)
                self.quotas.dispatched(entry.tenant)
            else:
                elsewhere.append(request.request_id)
                continue
            entry.group_id = group_id
            pool.count(entry.tenant, 1)
            pool.service_of(entry.tenant.name)
            pool.placement.restore(group, request.request_id, entry.key, now)
        return elsewhere

    def drain_group(self, group_id: str) -> None:
        """A group will leave: it keeps what it has, and is given nothing more."""
        pool = self._groups[group_id]
        pool.placement.drain(group_id)
        pool.fit_quantum(self.options)

    def has_group(self, group_id: str) -> bool:
        return group_id in self._groups

    def remove_group(self, group_id: str) -> list[str]:
        """A group is gone. Returns the ids of the requests it took along; they are forgotten here."""
        pool = self._groups.pop(group_id, None)
        if pool is None:
            return []
        group = pool.placement.remove(group_id)
        for request_id in group.requests:
            tenant = self._entries.pop(request_id).tenant
            self.quotas.ended(tenant, was_queued=False)
            pool.count(tenant, -1)
        self.index.remove_holder(group_id)
        return list(group.requests)

    def report(self, group_id: str, load: GroupLoad, now: float) -> None:
        """A group's load."""
        pool = self._groups[group_id]
        group = pool.placement.groups[group_id]
        known = group.cost
        pool.placement.report(group, load, now)
        if group.cost != known:
            pool.fit_quantum(self.options)

    def block_events(self, holder: str, events: BlockEvents) -> bool:
        """What a group's device, or a store, holds. False: something is missing, it must send a snapshot."""
        return self.index.apply(holder, events)

    def served(self, model: str, tenant: str, output_tokens: int) -> None:
        """Tokens were made for a tenant: it is charged for them."""
        pool = self._pool(model)
        pool.queue.charge(tenant, self.options.output_weight * output_tokens)
        if tenant in pool.service:  # else another scheduler hands out its requests, and counts them
            pool.service[tenant].generated += output_tokens
        pool.placement.served(output_tokens)

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> None:
        """Queue a request, unless it is here already.

        Raises `Overloaded` where the queue is at its bound, `RateLimited` where a limit of the tenant is reached,
        `DeadlineUnmeetable` where its first token could not come in time, `ModelNotFound` for a model that is not for
        this tenant. A refused request leaves no trace.
        """
        if request.request_id in self._entries:
            return
        tenant = self.quotas.directory.get(request.tenant)
        tenant.check_model(request.model)
        pool = self._pool(request.model)
        if pool.failure is not None and not pool.placement.num_open and now < pool.hopeless_until:
            raise _cannot_start(request.model, pool.failure)
        resumed = request.admitted
        if not resumed and len(pool.queue) >= self.max_queued_requests:
            message = f"{len(pool.queue)} requests wait for {request.model!r} already; try again later"
            raise Overloaded(message, max(1.0, pool.wait))
        entry = self._entry(request, tenant, now)
        if pool.placement.num_open:
            self._reckon(entry, pool, now)
        admit = self.quotas.readmit if resumed else self.quotas.admit
        admit(tenant, request.request_id, _charge(request, tenant, pool), now)
        self._entries[request.request_id] = entry
        pool.queue.push(tenant.name, tenant.weight, entry.key, entry, PRIORITY_CLASSES[tenant.priority_class])
        pool.queued_seconds += entry.seconds
        pool.meter.came(entry.seconds or pool.usual_seconds(entry), now)

    def _entry(self, request: Request, tenant: Tenant, now: float) -> _Entry:
        self._num_submitted += 1
        arrived = now - request.age
        priority = tenant.priority(request.priority, request.background)
        key = arrived + priority * self.options.priority_weight, self._num_submitted
        return _Entry(request, tenant, arrived, now, key)

    def _reckon(self, entry: _Entry, pool: _Pool, now: float) -> None:
        """Look it up, give it its place in the order, and refuse it if it would come too late."""
        match = self._match(entry, pool, now)
        group = next(iter(pool.placement.groups.values()))
        num_cached = min(match.levels[0][0] * group.capacity.block_size if match.levels else 0, match.num_tokens - 1)
        entry.seconds = group.prefill_seconds(match.num_tokens - num_cached, num_cached)
        late = min(self.options.max_head_start, self.options.head_start_weight * entry.seconds)
        entry.key = entry.key[0] + late, entry.key[1]
        if entry.request.ttft_target is not None:
            choice = pool.placement.choose(match, entry.key, now)
            assert choice is not None
            first_token = choice.first_token + pool.wait
            if first_token > entry.request.ttft_target:
                raise _too_late(first_token, entry.request.ttft_target)

    def _match(self, entry: _Entry, pool: _Pool, now: float) -> Match:
        if entry.match is None or entry.matched_at != now:
            request = entry.request
            num_tokens = request.num_tokens
            entry.match = pool.placement.match(
                request.block_hashes, num_tokens, request.sampling.max_tokens, now, bool(request.output_token_ids)
            )
            entry.matched_at = now
        return entry.match

    def _dequeue(self, entry: _Entry) -> None:
        pool = self._pools[entry.request.model]
        pool.queue.remove(entry.tenant.name, entry.key)
        pool.queued_seconds = pool.queued_seconds - entry.seconds if len(pool.queue) else 0.0

    def cancel(self, request_id: str, now: float = 0.0) -> str | None:
        """The caller no longer wants it. Returns the group that has it, if one has."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return None
        self.quotas.ended(entry.tenant, was_queued=entry.group_id is None)
        meter = self._pools[entry.request.model].meter
        meter.busy_at = max(now, meter.busy_at or now)
        if entry.group_id is None:
            self._dequeue(entry)
            self.quotas.settle(entry.tenant, request_id, 0)
        else:
            pool = self._groups[entry.group_id]
            pool.count(entry.tenant, -1)
            pool.placement.ended(pool.placement.groups[entry.group_id], request_id, now)
        return entry.group_id

    def group_of(self, request_id: str) -> str | None:
        """The group that has the request; None where it waits or is not known."""
        entry = self._entries.get(request_id)
        return entry.group_id if entry else None

    def expire(
        self, now: float, max_queue_seconds: float, max_wake_seconds: float = 0.0
    ) -> list[tuple[str, PagedRayError]]:
        """Drop requests that have waited this long, or can no longer meet their deadline. Returns them and why.

        For a model without a group they wait `max_wake_seconds`, if that is longer, and the other bound holds anew from
        when a group has come.
        """
        expired: list[tuple[str, PagedRayError]] = []
        for pool in self._pools.values():
            for entry in pool.queue.items():
                if entry.deadline < now + entry.seconds:
                    waited = now - entry.arrived + entry.seconds
                    expired.append((entry.request.request_id, _too_late(waited, entry.request.ttft_target or 0.0)))
                elif (reason := pool.overdue(entry, now, max_queue_seconds, max_wake_seconds)) is not None:
                    expired.append((entry.request.request_id, EngineDead(reason)))
        for request_id, _ in expired:
            self.cancel(request_id, now)
        return expired

    def finished(self, request_ids: Iterable[str], now: float = 0.0) -> None:
        """Groups report what they are done with."""
        for request_id in request_ids:
            self.cancel(request_id, now)

    def settle(self, tenant: str, request_id: str, num_tokens: int) -> None:
        """What a request took at its group, told once it has ended there, by whatever way."""
        self.quotas.settle(self.quotas.directory.get(tenant), request_id, num_tokens)

    # -- decisions ----------------------------------------------------------------------------------------------------

    def dispatch(self, now: float) -> dict[str, list[Request]]:
        """Assign what can be assigned now: group id -> its batch, in order. See also `take_refused`."""
        batches: dict[str, list[Request]] = {}
        self.next_dispatch_at = float("inf")
        for pool in self._pools.values():
            if len(pool.queue) and pool.placement.num_open:
                self._dispatch_pool(pool, now, batches)
        return batches

    def _dispatch_pool(self, pool: _Pool, now: float, batches: dict[str, list[Request]]) -> None:
        lead = self.placement_options.lead_seconds
        passed_over: dict[str, int] = {}
        planned: dict[str, float] = {}  # seconds of work for which requests wait for a group by choice
        num_held = 0
        while num_held < self.options.lookahead and (found := pool.queue.next(passed_over)):
            tenant, entry = found
            match = self._match(entry, pool, now)
            urgent = pool.is_light(entry.tenant)
            reserve = 0.0
            if not urgent and pool.queue.others_came(tenant, now - self.options.reserve_seconds):
                reserve = self.options.reserve
            choice = pool.placement.choose(match, entry.key, now, planned, reserve, urgent)
            assert choice is not None
            if now + choice.first_token > entry.deadline:
                self._refuse(entry, choice, now)
            elif choice.start > lead and not urgent:
                # Its place is there all the same: whoever comes after it sees that work ahead of its own.
                planned[choice.group.group_id] = planned.get(choice.group.group_id, 0.0) + choice.seconds
                passed_over[tenant] = passed_over.get(tenant, 0) + 1
                num_held += 1
                self.next_dispatch_at = min(self.next_dispatch_at, now + choice.start - lead)
            else:
                self._assign(entry, choice, match, pool, now, urgent)
                batches.setdefault(choice.group.group_id, []).append(_as_sent(entry, urgent, choice))

    def _assign(self, entry: _Entry, choice: Choice, match: Match, pool: _Pool, now: float, urgent: bool) -> None:
        options = self.options
        self._dequeue(entry)
        self.quotas.dispatched(entry.tenant)
        pool.count(entry.tenant, 1)
        entry.group_id, entry.match = choice.group.group_id, None
        computed = match.num_tokens - choice.num_cached
        cost = options.input_weight * computed + options.cached_weight * choice.num_cached
        pool.queue.charge(entry.tenant.name, cost)
        service = pool.service_of(entry.tenant.name)
        service.computed += computed
        service.cached += choice.num_cached
        service.queue.observe(now - entry.queued)
        pool.placement.place(entry.request.request_id, choice, match, entry.key, now, urgent)
        if entry.request.attempt == 0:
            waited = now - entry.arrived
            pool.meter.placed(entry.arrived, waited + choice.start + choice.delay, waited + choice.first_token, now)

    def _refuse(self, entry: _Entry, choice: Choice, now: float) -> None:
        self.cancel(entry.request.request_id, now)
        took = now - entry.arrived + choice.first_token
        error = _too_late(took, entry.request.ttft_target or 0.0)
        self._refused.append((entry.request.request_id, error))

    def take_refused(self) -> list[tuple[str, PagedRayError]]:
        """Requests that `dispatch` gave up since the last call, and why."""
        refused, self._refused = self._refused, []
        return refused

    # -- watching -----------------------------------------------------------------------------------------------------

    def demand(self, model: str, now: float) -> Demand:
        """What a model is asked for, and what it has: what says how many groups it should have."""
        pool = self._pool(model)
        groups, meter = pool.placement.groups.values(), pool.meter
        staying = [g.capacity for g in groups if not g.draining]
        waiting = pool.queue.items()
        if meter.busy_at is None or waiting or any(g.requests for g in groups):
            meter.busy_at = now
        ttft, wait = meter.lateness(now)
        output = pool.placement.mean_output
        wanted = sum(e.request.num_tokens + min(e.request.sampling.max_tokens or output, output) for e in waiting)
        backlog = pool.queued_seconds + sum(pool.usual_seconds(e) for e in waiting if not e.seconds)
        return Demand(
            num_groups=len(staying),
            num_queued=len(waiting),
            num_running=sum(len(g.requests) for g in groups),
            work_rate=meter.work_rate(now),
            backlog_seconds=backlog + sum(max(0.0, g.free_at - now) for g in groups),
            kv_tokens=wanted + sum(g.kv_tokens for g in groups),
            kv_tokens_per_group=min((c.kv_tokens for c in staying), default=float("inf")),
            seqs_per_group=min((c.max_num_seqs for c in staying), default=float("inf")),
            ttft=ttft,
            wait=wait,
            idle_seconds=now - meter.busy_at,
        )

    def fail_model(
        self, model: str, reason: str, final: bool = True, num_tries: int = 1, now: float = 0.0
    ) -> list[tuple[str, PagedRayError]]:
        """A group of a model could not start. Returns the requests that waited for one and shall wait no longer.

        That is so where the reason is `final`, which trying again would not change, or where the model has never
        served and has failed `num_tries` times, after which nobody tries again. Others are refused at once then, until
        a group comes after all, or, where the model has served, for a minute: what it lacks may be there again, and
        one that sleeps is only woken by a request. A model that has groups keeps its requests.
        """
        pool = self._pool(model)
        pool.num_failed += 1
        given_up = final or (not pool.meter.has_served and pool.num_failed >= num_tries)
        if pool.placement.num_open or not given_up:
            return []
        pool.failure, pool.hopeless_until = reason, now + _HOPELESS_SECONDS if pool.meter.has_served else math.inf
        failed = [e.request.request_id for e in pool.queue.items()]
        for request_id in failed:
            self.cancel(request_id)
        return [(request_id, _cannot_start(model, reason)) for request_id in failed]

    def mend_model(self, model: str) -> None:
        """It may be able to start again."""
        pool = self._pool(model)
        pool.failure, pool.num_failed = None, 0

    def failures(self) -> dict[str, str]:
        """Models that cannot start, and why."""
        return {model: pool.failure for model, pool in self._pools.items() if pool.failure is not None}

    def num_fetches(self) -> dict[str, tuple[int, int]]:
        """By model: how often fetching from a store was chosen, and how often computing was cheaper."""
        placements = {model: pool.placement for model, pool in self._pools.items()}
        return {model: (p.num_fetches_chosen, p.num_fetches_declined) for model, p in placements.items()}

    def num_queued(self) -> dict[str, int]:
        """Requests that wait, by model; models without any are left out."""
        return {model: len(pool.queue) for model, pool in self._pools.items() if len(pool.queue)}

    def tenant_stats(self) -> list[TenantStats]:
        """Of every model and every tenant that has asked for it."""
        found = []
        for model, pool in self._pools.items():
            waiting, counters = pool.queue.num_waiting(), pool.queue.counters()
            for tenant in pool.service.keys() | counters.keys():
                service = pool.service.get(tenant) or _Service()
                found.append(
                    TenantStats(
                        model,
                        tenant,
                        waiting.get(tenant, 0),
                        pool.in_flight.get(tenant, (0, 0.0))[0],
                        counters.get(tenant, 0.0),
                        service.computed,
                        service.cached,
                        service.generated,
                        service.queue.so_far(),
                    )
                )
        return sorted(found, key=lambda stats: (stats.model, stats.tenant))

    def rate_limits(self, tenant: str, now: float) -> RateLimits:
        return self.quotas.limits(self.quotas.directory.get(tenant), now)

    def check_integrity(self) -> None:
        """Raise AssertionError where the books do not balance."""
        self.index.check_integrity()
        self.quotas.check_integrity()
        queued: list[str] = []
        outstanding: list[str] = []
        for pool in self._pools.values():
            pool.queue.check_integrity()
            assert len(pool.queue) <= self.max_queued_requests
            queued += [e.request.request_id for e in pool.queue.items()]
            assert abs(pool.queued_seconds - sum(e.seconds for e in pool.queue.items())) < 1e-6
            assert pool.placement.num_open == sum(not g.draining for g in pool.placement.groups.values())
            for group in pool.placement.groups.values():
                assert self._groups[group.group_id] is pool
                assert all(self._entries[r].group_id == group.group_id for r in group.requests)
                assert len(group.unseen) <= len(group.requests)
                outstanding += group.requests
            assert sum(num for num, _ in pool.in_flight.values()) == sum(
                len(g.requests) for g in pool.placement.groups.values()
            )
        assert len(set(queued)) == len(queued), "a request waits twice"
        assert len(set(outstanding)) == len(outstanding), "a request is with two groups"
        assert set(queued) | set(outstanding) == set(self._entries) and not set(queued) & set(outstanding)
        counts: dict[str, list[int]] = {}
        for entry in self._entries.values():
            count = counts.setdefault(entry.tenant.name, [0, 0])
            count[0] += entry.group_id is None
            count[1] += 1
        for tenant, count in counts.items():
            assert self.quotas.counts(tenant) == tuple(count), f"{tenant}: {count} requests, other ones in the books"


def _charge(request: Request, tenant: Tenant, pool: _Pool) -> int:
    """Tokens that a request counts as until it has ended: prompt and `max_tokens`; of one that is resumed, the rest.

    Where `max_tokens` is left out it counts as the usual answer, for few take all that the context has room for.
    """
    if tenant.tokens_per_minute is None:
        return 0
    output = request.sampling.max_tokens or round(pool.placement.mean_output)
    num_prompt = 0 if request.attempt else len(request.prompt_token_ids)
    return num_prompt + max(0, output - len(request.output_token_ids))


def _as_sent(entry: _Entry, urgent: bool, choice: Choice) -> Request:
    """The request as its group gets it: what to fetch, whether to hand it over, its priority within the class, and a
    level better for a tenant that has less than its share. So its group, too, computes it first: it waits for nobody
    else's long prompt."""
    priority = entry.tenant.priority(entry.request.priority, entry.request.background) - urgent
    if priority == entry.request.priority and choice.source is None and not choice.hand_over:
        return entry.request
    return replace(entry.request, priority=priority, kv_source=choice.source, hand_over=choice.hand_over)


def _cannot_start(model: str, reason: str) -> EngineDead:
    return EngineDead(f"no worker group of {model!r} can start: {reason}")


def _too_late(seconds: float, target: float) -> DeadlineUnmeetable:
    when = f"after about {seconds:.2f} s" if seconds < math.inf else "too late, for no group has room"
    message = f"the first token would come {when}; ttft_target is {target:g} s"
    return DeadlineUnmeetable(message, min(60.0, max(1.0, seconds - target)))
