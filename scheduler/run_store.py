"""RunStore: the books of a node's KV store. Runs of blocks within a byte budget; what is worth least goes first.

Runs form trees: one follows another. A store holds whole prefixes, so only a run that nothing follows is evicted. Its
value is what it would take to compute it again, times how often and how lately it was used, by its bytes (as in
GreedyDual-Size, Cao and Irani 1997, with a decay instead of an inflation value).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .block_pool import BlockHash
from .prefix_index import BlockLog

HALF_LIFE = 120.0  # seconds after which a use counts half


@dataclass(slots=True, eq=False)
class Run:
    """Consecutive blocks of a prefix. `payload` is whatever holds their KV."""

    parent: BlockHash | None
    hashes: tuple[BlockHash, ...]
    num_bytes: int
    seconds: float  # to compute it again
    payload: Any = None
    uses: float = 1.0  # each halved once in `HALF_LIFE` seconds up to `used_at`
    used_at: float = 0.0
    num_pins: int = 0
    follows: "Run | None" = None
    followers: set[int] = field(default_factory=set)  # id() of runs whose parent is in this one

    def value(self, now: float) -> float:
        return self.uses * 0.5 ** ((now - self.used_at) / HALF_LIFE) * self.seconds / self.num_bytes

    def used(self, now: float) -> None:
        self.uses = 1.0 + self.uses * 0.5 ** ((now - self.used_at) / HALF_LIFE)
        self.used_at = now


@dataclass(frozen=True, slots=True)
class Part:
    """`count` blocks of a run, from its block `first` on."""

    run: Run
    first: int
    count: int


class RunStore:
    """`budget` in bytes holds for what is there and what is about to come. No clock: `now` comes in."""

    def __init__(self, budget: int):
        self.budget = budget
        self.num_bytes = 0
        self.num_evicted = 0  # runs, ever
        self._runs: dict[int, Run] = {}  # by id()
        self._where: dict[BlockHash, tuple[Run, int]] = {}
        self._reserved: list[Run] = []
        self.log = BlockLog()

    # -- coming in ----------------------------------------------------------------------------------------------------

    def num_held(self, hashes: Sequence[BlockHash]) -> int:
        """How many of a run's first blocks are here already."""
        return next((i for i, h in enumerate(hashes) if h not in self._where), len(hashes))

    def holds(self, block_hash: BlockHash | None) -> bool:
        return block_hash is None or block_hash in self._where

    def reserve(
        self, parent: BlockHash | None, hashes: Sequence[BlockHash], num_bytes: int, seconds: float, now: float
    ) -> tuple[Run | None, list[Run]]:
        """Make room for a run that is about to come: it, and the runs evicted for it.

        None where it is here or on its way, or what it follows is not, or what would have to go is being read. What is
        new always comes in: what was used once and long ago goes for it, and what is used often stays.
        The caller ends the reservation with `add` or `cancel`.
        """
        run = Run(parent, tuple(hashes), num_bytes, seconds, used_at=now)
        known = any(h in self._where for h in hashes) or any(h in r.hashes for r in self._reserved for h in hashes[:1])
        if known or not self.holds(parent) or num_bytes > self.budget:
            return None, []
        if parent is not None:
            run.follows = self._where[parent][0]
            run.follows.num_pins += 1  # it must be there when the run has come
        evicted, excess = [], self.num_bytes + num_bytes - self.budget
        while excess > 0:
            candidates = [r for r in self._runs.values() if not r.followers and not r.num_pins]
            victim = min(candidates, key=lambda r: r.value(now), default=None)
            if victim is None:
                break
            self._evict(victim)
            evicted.append(victim)
            excess -= victim.num_bytes
        if excess > 0:
            self._unpin_parent(run)
            return None, evicted
        self.num_bytes += num_bytes
        self._reserved.append(run)
        return run, evicted

    def add(self, run: Run, payload: Any, num_bytes: int) -> bool:
        """A reserved run has come, and weighs so much. False: what it follows was dropped meanwhile."""
        if run.follows is not None and id(run.follows) not in self._runs:
            self.cancel(run)
            return False
        self._reserved.remove(run)
        self._unpin_parent(run)
        self.num_bytes += num_bytes - run.num_bytes
        run.payload, run.num_bytes = payload, num_bytes
        self._runs[id(run)] = run
        if run.follows is not None:
            run.follows.followers.add(id(run))
        for i, block_hash in enumerate(run.hashes):
            self._where[block_hash] = run, i
            self.log.note(block_hash, True)
        return True

    def cancel(self, run: Run) -> None:
        """A reserved run does not come."""
        self._reserved.remove(run)
        self._unpin_parent(run)
        self.num_bytes -= run.num_bytes

    def _unpin_parent(self, run: Run) -> None:
        if run.follows is not None:
            run.follows.num_pins -= 1

    # -- going out ----------------------------------------------------------------------------------------------------

    def _evict(self, run: Run) -> None:
        del self._runs[id(run)]
        self.num_bytes -= run.num_bytes
        self.num_evicted += 1
        if run.follows is not None:
            run.follows.followers.discard(id(run))
        for block_hash in run.hashes:
            del self._where[block_hash]
            self.log.note(block_hash, False)

    def drop(self, run: Run) -> list[Run]:
        """A run turned out to be of no use: forget it and all that follows it. Returns them."""
        if id(run) not in self._runs:
            return []
        dropped = [gone for follower in list(run.followers) for gone in self.drop(self._runs[follower])]
        self._evict(run)
        return [*dropped, run]

    def read(self, hashes: Sequence[BlockHash], now: float) -> list[Part]:
        """The parts of runs that hold the first of these blocks, as many as are here. Pinned until `unpin`."""
        parts: list[Part] = []
        at = 0
        while at < len(hashes) and hashes[at] in self._where:
            run, first = self._where[hashes[at]]
            count = 1
            while run.hashes[first + count : first + count + 1] == tuple(hashes[at + count : at + count + 1]) != ():
                count += 1
            parts.append(Part(run, first, count))
            run.used(now)
            run.num_pins += 1
            at += count
        return parts

    def unpin(self, runs: Sequence[Run]) -> None:
        for run in runs:
            run.num_pins -= 1

    # -- telling ------------------------------------------------------------------------------------------------------

    def hashes(self) -> list[BlockHash]:
        """All blocks; `log.take` then tells what changes from here on."""
        self.log.take()
        return list(self._where)

    def __len__(self) -> int:
        return len(self._runs)

    def check_integrity(self) -> None:
        """Raise AssertionError where the books do not balance."""
        where = {h: (run, i) for run in self._runs.values() for i, h in enumerate(run.hashes)}
        assert where == self._where
        assert self.num_bytes == sum(r.num_bytes for r in (*self._runs.values(), *self._reserved))
        followers: dict[int, set[int]] = {key: set() for key in self._runs}
        for key, run in self._runs.items():
            assert run.num_pins >= 0
            if run.parent is not None:
                assert run.parent in self._where, "a run has lost what it follows"
                assert run.follows is self._where[run.parent][0]
                followers[id(self._where[run.parent][0])].add(key)
        assert followers == {key: run.followers for key, run in self._runs.items()}
