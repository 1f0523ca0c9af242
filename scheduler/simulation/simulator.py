"""The cluster as discrete events: a trace through a router and simulated groups, in seconds instead of hours.

The router is the `Dispatcher` that the actor runs, or one of the rules to compare it with. What it knows is what it
would know: groups tell of their load and cache twice a second and when a request ends, and each message takes time.
The same seed gives the same result, to the last digit.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

from ..cost_model import CostModel
from ..errors import PagedRayError
from ..placement import GroupCapacity, GroupLoad
from ..prefix_index import BlockEvents
from ..request import Request, SamplingParams
from .group import GroupSpec, SimGroup, SimSequence
from .traces import TraceRequest

MODEL = "simulated"
_MAX_TOKENS = 2048  # what callers ask for: how long an answer becomes nobody knows before


class Router(Protocol):
    """What the simulator needs of a global scheduler; `Dispatcher` is one."""

    next_dispatch_at: float

    def add_group(
        self,
        group_id: str,
        model: str,
        capacity: GroupCapacity,
        now: float,
        running: Iterable[Request] = (),
        num_received: int = 0,
        cost: CostModel | None = None,
    ) -> list[str]: ...
    def remove_group(self, group_id: str) -> list[str]: ...
    def report(self, group_id: str, load: GroupLoad, now: float) -> None: ...
    def block_events(self, holder: str, events: BlockEvents) -> bool: ...
    def served(self, model: str, tenant: str, output_tokens: int) -> None: ...
    def submit(self, request: Request, now: float) -> None: ...
    def finished(self, request_ids: Iterable[str], now: float) -> None: ...
    def dispatch(self, now: float) -> dict[str, list[Request]]: ...
    def take_refused(self) -> list[tuple[str, PagedRayError]]: ...


@dataclass(frozen=True, slots=True)
class Fault:
    """At `at` seconds a group is lost (and back, empty, after `seconds`), runs `factor` times slower, or the scheduler
    restarts and knows nothing. kind: "lost", "slow", "restart"."""

    kind: str
    at: float
    group: int = 0
    seconds: float = 30.0
    factor: float = 3.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request. Seconds; `ttft` None: refused, with the error's code."""

    arrival: float
    tenant: str
    input_tokens: int
    output_tokens: int
    ttft: float | None
    inter_token: float = 0.0  # mean time between its tokens
    cached_tokens: int = 0
    finished_at: float = 0.0
    num_tries: int = 1
    error: str | None = None


@dataclass(slots=True)
class Result:
    outcomes: list[Outcome]
    seconds: float  # from the first arrival to the last token
    utilization: float  # mean share of time in which groups ran steps

    def ttft(self, quantile: float, tenant: str | None = None) -> float:
        values = sorted(o.ttft for o in self.outcomes if o.ttft is not None and tenant in (None, o.tenant))
        return values[min(len(values) - 1, int(quantile * len(values)))] if values else float("inf")

    @property
    def hit_rate(self) -> float:
        """Of the prompt tokens that were served, those that came from a cache."""
        done = [o for o in self.outcomes if o.ttft is not None]
        return sum(o.cached_tokens for o in done) / max(1, sum(o.input_tokens for o in done))

    def goodput(self, max_ttft: float, max_inter_token: float) -> float:
        """The share of requests that met both targets."""
        good = sum(
            o.ttft is not None and o.ttft <= max_ttft and o.inter_token <= max_inter_token for o in self.outcomes
        )
        return good / max(1, len(self.outcomes))

    def throughput(self) -> float:
        """Requests a second while the cluster was full: between a tenth and nine tenths of all."""
        ends = sorted(o.finished_at for o in self.outcomes if o.ttft is not None)
        low, high = len(ends) // 10, 9 * len(ends) // 10
        return (high - low) / (ends[high] - ends[low]) if high > low else 0.0


@dataclass(slots=True)
class _Flight:
    trace: TraceRequest
    request: Request
    num_tries: int = 1
    assigned: bool = False


@dataclass(slots=True)
class Simulation:
    """`make_router` is called at the start, and again where a fault restarts the scheduler."""

    trace: Sequence[TraceRequest]
    num_groups: int
    spec: GroupSpec
    make_router: Callable[[], Router]
    faults: Sequence[Fault] = ()
    seed: int = 0
    report_seconds: float = 0.5
    message_seconds: float = 0.001
    retry_seconds: float = 0.2  # from a group's loss, or the scheduler's, until requests are sent again
    ttft_target: float | None = None
    router: Router = field(init=False)
    now: float = 0.0
    groups: dict[str, SimGroup] = field(default_factory=dict)
    registered: set[str] = field(default_factory=set)
    outcomes: list[Outcome] = field(default_factory=list)
    _events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)
    _count: Any = field(default_factory=itertools.count)
    _flights: dict[str, _Flight] = field(default_factory=dict)
    _woken_for: float = float("inf")
    _busy_seconds: float = 0.0

    def run(self) -> Result:
        draw = random.Random(self.seed)
        self.router = self.make_router()
        for i in range(self.num_groups):
            self._join(i, draw.random() * self.report_seconds)
        for number, request in enumerate(self.trace):
            self._at(request.arrival, self._arrive, number, request)
        for fault in self.faults:
            self._at(fault.at, getattr(self, f"_fault_{fault.kind}"), fault)
        while self._events and len(self.outcomes) < len(self.trace):
            self.now, _, event, args = heapq.heappop(self._events)
            event(*args)
        busy = self._busy_seconds + sum(g.busy_seconds for g in self.groups.values())
        return Result(self.outcomes, self.now, busy / max(1e-9, self.now * self.num_groups))

    def _at(self, time: float, event: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._events, (time, next(self._count), event, args))

    # -- requests -----------------------------------------------------------------------------------------------------

    def _arrive(self, number: int, trace: TraceRequest) -> None:
        request = Request(
            str(number),
            range(trace.input_tokens),  # type: ignore[arg-type]  # nobody reads the ids here
            _sampling(max(_MAX_TOKENS, trace.output_tokens)),
            MODEL,
            tenant=trace.tenant,
            block_hashes=trace.block_hashes,
            ttft_target=self.ttft_target,
        )
        self._flights[request.request_id] = _Flight(trace, request)
        self._submit(request.request_id)

    def _submit(self, request_id: str) -> None:
        flight = self._flights.get(request_id)
        if flight is None:
            return
        try:
            self.router.submit(flight.request, self.now)
        except PagedRayError as error:
            self._end(request_id, error=error)
        self._dispatch()

    def _dispatch(self) -> None:
        for group_id, batch in self.router.dispatch(self.now).items():
            for request in batch:
                self._flights[request.request_id].assigned = True
            self._at(self.now + self.message_seconds, self._deliver, group_id, batch)
        for request_id, error in self.router.take_refused():
            self._end(request_id, error=error)
        wake = max(self.router.next_dispatch_at, self.now + 0.001)
        if wake < self._woken_for or self._woken_for <= self.now:
            self._woken_for = wake
            if wake < float("inf"):
                self._at(wake, self._wake, wake)

    def _wake(self, time: float) -> None:
        if time == self._woken_for:
            self._woken_for = float("inf")
            self._dispatch()

    def _deliver(self, group_id: str, batch: Sequence[Request]) -> None:
        group = self.groups.get(group_id)
        for request in batch:
            flight = self._flights.get(request.request_id)
            if group is None:
                self._at(self.now + self.retry_seconds, self._retry, request.request_id)
            elif flight is not None:
                group.add(SimSequence(request, flight.trace.output_tokens), self.now)

    def _retry(self, request_id: str) -> None:
        flight = self._flights.get(request_id)
        if flight is not None:
            flight.num_tries += 1
            flight.assigned = False
            self._submit(request_id)

    def _end(self, request_id: str, sequence: SimSequence | None = None, error: PagedRayError | None = None) -> None:
        flight = self._flights.pop(request_id)
        trace = flight.trace
        fields = trace.arrival, trace.tenant, trace.input_tokens, trace.output_tokens
        if sequence is None or sequence.first_token_at is None:
            self.outcomes.append(Outcome(*fields, None, error=error.code if error else None))
            return
        ttft = sequence.first_token_at - trace.arrival
        inter = (sequence.finished_at - sequence.first_token_at) / max(1, trace.output_tokens - 1)
        self.outcomes.append(Outcome(*fields, ttft, inter, sequence.cached, sequence.finished_at, flight.num_tries))

    # -- groups -------------------------------------------------------------------------------------------------------

    def _join(self, number: int, first_report: float) -> None:
        group_id = f"g{number}"

        def schedule(at: float, step: Any) -> None:
            self._at(at, self._step_ended, group, step)

        group = self.groups[group_id] = SimGroup(group_id, self.spec, schedule)
        self._register(group)
        self._at(self.now + first_report, self._report_for_ever, group)

    def _register(self, group: SimGroup) -> None:
        running = [s.request for s in group.sequences()]
        self.registered.add(group.group_id)
        self.router.add_group(
            group.group_id, MODEL, self.spec.capacity, self.now, running, group.num_received, group.cost
        )
        self.router.block_events(group.group_id, group.snapshot())

    def _step_ended(self, group: SimGroup, step: Any) -> None:
        if self.groups.get(group.group_id) is not group:
            return
        finished = group.step_ended(self.now, step)
        if finished:
            for sequence in finished:
                self._end(sequence.request.request_id, sequence)
            self._report(group, tuple(s.request.request_id for s in finished))

    def _report(self, group: SimGroup, finished: tuple[str, ...] = ()) -> None:
        message = group.load(), group.take_blocks(), group.take_served(), finished
        self._at(self.now + self.message_seconds, self._take_report, group, *message)

    def _report_for_ever(self, group: SimGroup) -> None:
        if self.groups.get(group.group_id) is group:
            self._report(group)
            self._at(self.now + self.report_seconds, self._report_for_ever, group)

    def _take_report(
        self, group: SimGroup, load: GroupLoad, blocks: BlockEvents | None, served: dict[str, int], ids: tuple[str, ...]
    ) -> None:
        if self.groups.get(group.group_id) is not group:
            return
        if group.group_id not in self.registered:
            self._register(group)
        elif blocks is not None and not self.router.block_events(group.group_id, blocks):
            self.router.block_events(group.group_id, group.snapshot())
        for tenant, tokens in served.items():
            self.router.served(MODEL, tenant, tokens)
        self.router.finished(ids, self.now)
        self.router.report(group.group_id, load, self.now)
        self._dispatch()

    # -- faults -------------------------------------------------------------------------------------------------------

    def _fault_lost(self, fault: Fault) -> None:
        group = self.groups.pop(f"g{fault.group}", None)
        if group is None:
            return
        self._busy_seconds += group.busy_seconds
        self.registered.discard(group.group_id)
        self.router.remove_group(group.group_id)
        for sequence in group.sequences():
            self._at(self.now + self.retry_seconds, self._retry, sequence.request.request_id)
        self._at(self.now + fault.seconds, self._join, fault.group, self.report_seconds)

    def _fault_slow(self, fault: Fault) -> None:
        group = self.groups.get(f"g{fault.group}")
        if group is not None:
            group.cost = self.spec.cost.slower(fault.factor)
            self._at(self.now + fault.seconds, self._recover, group)

    def _recover(self, group: SimGroup) -> None:
        group.cost = self.spec.cost

    def _fault_restart(self, fault: Fault) -> None:
        """Groups register again with their next report; ingresses send again what they have no assignment for."""
        self.router = self.make_router()
        self.registered.clear()
        for request_id, flight in self._flights.items():
            if not flight.assigned:
                self._at(self.now + self.retry_seconds, self._submit, request_id)


@cache
def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(seed=0, max_tokens=max_tokens)
