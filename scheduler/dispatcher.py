"""The global scheduler's whole state: which requests wait, which worker group has which. Every event is a method."""

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from .errors import Overloaded
from .request import Request


@dataclass(slots=True)
class _Entry:
    request: Request
    arrived: float
    key: tuple[float, int]  # as in the step scheduler: arrival + priority * weight, then order of arrival
    group_id: str | None = None


@dataclass(slots=True)
class _Group:
    model: str
    window: int
    outstanding: dict[str, tuple[float, int]] = field(default_factory=dict)  # request id -> key

    def num_before(self, key: tuple[float, int]) -> int:
        return sum(k < key for k in self.outstanding.values())


class Dispatcher:
    """Queues requests and hands each to the group of its model that has the fewest ahead of it.

    A group is given no more than `window` requests that would run before the one in hand, so what it cannot start soon
    stays here, where a group that comes later can have it and a request of higher priority still passes it. The queue
    is bounded: past `max_queued_requests` a request is refused, not kept.
    """

    def __init__(self, max_queued_requests: int = 1024, priority_weight: float = 10.0):
        self.max_queued_requests = max_queued_requests
        self.priority_weight = priority_weight
        self._groups: dict[str, _Group] = {}
        self._entries: dict[str, _Entry] = {}
        self._queues: dict[str, list[_Entry]] = {}  # by model, sorted by key
        self._num_submitted = 0

    # -- groups -------------------------------------------------------------------------------------------------------

    def add_group(
        self, group_id: str, model: str, window: int, now: float, running: Iterable[Request] = ()
    ) -> list[str]:
        """A group came up, or came back with requests it already has (after this scheduler restarted).

        Returns the ids of those that another group has by now: this one should drop them.
        """
        self.remove_group(group_id)
        self._groups[group_id] = group = _Group(model, window)
        elsewhere = []
        for request in running:
            entry = self._entries.get(request.request_id)
            if entry is None:
                entry = self._entries[request.request_id] = self._entry(request, now)
            elif entry.group_id is None:
                self._dequeue(entry)
            else:
                elsewhere.append(request.request_id)
                continue
            entry.group_id = group_id
            group.outstanding[request.request_id] = entry.key
        return elsewhere

    def has_group(self, group_id: str) -> bool:
        return group_id in self._groups

    def remove_group(self, group_id: str) -> list[str]:
        """A group is gone. Returns the ids of the requests it took along; they are forgotten here."""
        group = self._groups.pop(group_id, None)
        lost = list(group.outstanding) if group else []
        for request_id in lost:
            del self._entries[request_id]
        return lost

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> None:
        """Queue a request, unless it is here already. Raises `Overloaded` where the queue is at its bound."""
        if request.request_id in self._entries:
            return
        queue = self._queues.setdefault(request.model, [])
        if len(queue) >= self.max_queued_requests:
            raise Overloaded(f"{len(queue)} requests wait for {request.model!r} already; try again later")
        entry = self._entries[request.request_id] = self._entry(request, now)
        insort(queue, entry, key=lambda e: e.key)

    def _entry(self, request: Request, now: float) -> _Entry:
        self._num_submitted += 1
        return _Entry(request, now, (now + request.priority * self.priority_weight, self._num_submitted))

    def _dequeue(self, entry: _Entry) -> None:
        queue = self._queues[entry.request.model]
        queue.remove(entry)
        if not queue:
            del self._queues[entry.request.model]

    def cancel(self, request_id: str) -> str | None:
        """The caller no longer wants it. Returns the group that has it, if one has."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return None
        if entry.group_id is None:
            self._dequeue(entry)
        else:
            self._groups[entry.group_id].outstanding.pop(request_id)
        return entry.group_id

    def group_of(self, request_id: str) -> str | None:
        """The group that has the request; None where it waits or is not known."""
        entry = self._entries.get(request_id)
        return entry.group_id if entry else None

    def expire(self, arrived_before: float) -> list[str]:
        """Drop requests that have waited since before this moment. Returns their ids."""
        expired = [e.request.request_id for queue in self._queues.values() for e in queue if e.arrived < arrived_before]
        for request_id in expired:
            self.cancel(request_id)
        return expired

    def finished(self, request_ids: Iterable[str]) -> None:
        """Groups report what they are done with."""
        for request_id in request_ids:
            self.cancel(request_id)

    def dispatch(self) -> dict[str, list[Request]]:
        """Assign what can be assigned now: group id -> its batch, in order."""
        batches: dict[str, list[Request]] = {}
        for model, queue in list(self._queues.items()):
            groups = {group_id: g for group_id, g in self._groups.items() if g.model == model}
            while queue and groups:
                entry = queue[0]
                num_before, group_id = min((g.num_before(entry.key), group_id) for group_id, g in groups.items())
                if num_before >= groups[group_id].window:
                    break
                self._dequeue(entry)
                entry.group_id = group_id
                groups[group_id].outstanding[entry.request.request_id] = entry.key
                batches.setdefault(group_id, []).append(entry.request)
        return batches

    # -- watching -----------------------------------------------------------------------------------------------------

    def num_queued(self) -> dict[str, int]:
        """Requests that wait, by model; models without any are left out."""
        return {model: len(queue) for model, queue in self._queues.items()}

    def check_integrity(self) -> None:
        """Raise AssertionError where the books do not balance."""
        queued = {e.request.request_id for q in self._queues.values() for e in q}
        outstanding = [r for g in self._groups.values() for r in g.outstanding]
        assert len(set(outstanding)) == len(outstanding), "a request is with two groups"
        assert queued | set(outstanding) == set(self._entries) and not queued & set(outstanding)
        for queue in self._queues.values():
            assert len(queue) <= self.max_queued_requests
            assert queue == sorted(queue, key=lambda e: e.key)
        for group_id, group in self._groups.items():
            assert all(self._entries[r].group_id == group_id for r in group.outstanding)
