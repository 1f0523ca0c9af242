"""FairQueue: who goes next. Tenants share the service by weight; within the bound, the order is the requests' own.

Every tenant has a counter of the service it got, in weighted tokens divided by its weight, charged as the tokens are
made: the Virtual Token Counter of Sheng et al. (Fairness in Serving Large Language Models, OSDI 2024). The level is the
highest that the lowest counter of those who wait has been. Who is within a quantum of the lowest may go: the slack that
D²LPM (Cao et al., Locality-aware Fair Scheduling in LLM Serving, 2025) gives to locality. While a request waits for the
group that has its prefix, others go ahead, but a quantum at most. Among those who may, a better class goes first, then
the lower counter.

The bound. With Q the quantum and U the most that one tenant can be charged for the request that takes it past its mark
and for the output of all it has in flight, divided by its weight:

- the counter of a tenant that waits lies in [level - Q, level + Q + U] at any time;
- so over any time in which two tenants wait throughout, what they are served differs by at most 2·(2Q + U), per weight.

A tenant that was away comes back a quantum below the level at most: that is all the credit it has for a burst, however
long it was gone. And it keeps its debt: who has just had a lot does not get rid of that by leaving for a moment.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

Key = tuple[float, int]  # seconds, and a number that makes it unique: smaller goes first


@dataclass(slots=True)
class _Account(Generic[T]):
    weight: float
    counter: float
    rank: int = 0
    last_came: float = 0.0  # on the clock of keys
    waiting: list[tuple[Key, T]] = field(default_factory=list)  # sorted


class FairQueue(Generic[T]):
    """Requests that wait for one model, by tenant. `quantum` is in weighted tokens."""

    def __init__(self, quantum: float = 8192.0):
        self.quantum = quantum
        self.level = 0.0
        self._accounts: dict[str, _Account[T]] = {}
        self._backlogged: dict[str, _Account[T]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def set_quantum(self, quantum: float) -> None:
        """Another bound from now on. Who is further behind than a smaller one allows is lifted to it."""
        self.quantum = quantum
        for account in self._backlogged.values():
            account.counter = max(account.counter, self.level - quantum)

    def push(self, tenant: str, weight: float, key: Key, item: T, rank: int = 0) -> None:
        """A request waits. `rank` is its tenant's class: lower goes first, within the bound."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account(weight, self.level - self.quantum)
        account.weight, account.rank, account.last_came = weight, rank, key[0]
        if not account.waiting:
            account.counter = max(account.counter, self.level - self.quantum)
            self._backlogged[tenant] = account
        if not account.waiting or account.waiting[-1][0] < key:
            account.waiting.append((key, item))
        else:
            insort(account.waiting, (key, item), key=lambda entry: entry[0])
        self._size += 1

    def remove(self, tenant: str, key: Key) -> None:
        """Take a request out, because it goes or because nobody wants it any more."""
        waiting = self._accounts[tenant].waiting
        index = 0 if waiting[0][0] == key else bisect_left(waiting, key, key=lambda entry: entry[0])
        assert waiting[index][0] == key, "not in the queue"
        del waiting[index]
        self._size -= 1
        if not waiting:
            del self._backlogged[tenant]

    def charge(self, tenant: str, tokens: float) -> None:
        """Service was given."""
        account = self._accounts.get(tenant)
        if account is not None:
            account.counter += tokens / account.weight

    def next(self, passed_over: dict[str, int]) -> tuple[str, T] | None:
        """Who goes next, when so many of each tenant's first requests are passed over because they wait by choice.

        None: nobody may go.
        """
        if not self._backlogged:
            return None
        lowest = min(a.counter for a in self._backlogged.values())
        self.level = max(self.level, lowest)
        best, best_order = None, (0, 0.0, (0.0, 0))
        for tenant, account in self._backlogged.items():
            index = passed_over.get(tenant, 0)
            if index < len(account.waiting) and account.counter <= lowest + self.quantum:
                order = account.rank, account.counter, account.waiting[index][0]
                if best is None or order < best_order:
                    best, best_order = tenant, order
        if best is None:
            return None
        return best, self._accounts[best].waiting[passed_over.get(best, 0)][1]

    def others_came(self, tenant: str, since: float) -> bool:
        """Has any other tenant asked for something since then?"""
        return any(a.last_came >= since for t, a in self._accounts.items() if t != tenant)

    def items(self) -> list[T]:
        return [item for account in self._backlogged.values() for _, item in account.waiting]

    def counters(self) -> dict[str, float]:
        """Each tenant's service so far, per weight."""
        return {tenant: account.counter for tenant, account in self._accounts.items()}

    def num_waiting(self) -> dict[str, int]:
        """Each tenant's requests that wait."""
        return {tenant: len(account.waiting) for tenant, account in self._accounts.items()}

    def backlogged(self) -> list[str]:
        return list(self._backlogged)

    def check_integrity(self) -> None:
        """Raise AssertionError where the books do not balance."""
        assert self._backlogged == {t: a for t, a in self._accounts.items() if a.waiting}
        assert self._size == sum(len(a.waiting) for a in self._accounts.values())
        for tenant, account in self._backlogged.items():
            keys = [key for key, _ in account.waiting]
            assert keys == sorted(set(keys)), f"{tenant}: out of order"
            assert account.counter >= self.level - self.quantum - 1e-6, f"{tenant} hoards credit"
