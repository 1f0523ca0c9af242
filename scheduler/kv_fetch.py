"""Blocks that are on their way to a worker group: a fetch holds them, and sequences that need them wait.

A fetch is a prefetch into the group's prefix cache. It owns its blocks from the decision until every rank has said that
it is done with them; then what arrived becomes findable, and whoever waits shares it like any cached prefix. So a
sequence knows nothing of fetches: it waits while the next block that it needs is arriving, and others run. At the
deadline nobody waits any longer and the prefix is computed, in other blocks: a rank may still be writing these.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .block_pool import BlockHash, BlockPool


@dataclass(frozen=True, slots=True)
class KVSource:
    """The global scheduler's advice to fetch a request's first `num_blocks` blocks from a store."""

    store: str
    num_blocks: int
    seconds: float  # that it reckons with
    same_node: bool = False  # the store is on the node of the group that is to fetch


@dataclass(frozen=True, slots=True)
class KVFetch:
    """An order to fill `block_ids` with the blocks of these hashes, before `deadline` (the engine's clock)."""

    fetch_id: int
    request_id: str
    source: KVSource
    hashes: tuple[BlockHash, ...]
    block_ids: tuple[int, ...]
    deadline: float


@dataclass(slots=True)
class _Arriving:
    order: KVFetch
    parent: BlockHash | None
    prefix: list[int]  # blocks before the first one, kept so that what arrives can be reached
    after_step: int  # this step and those before it may still write the blocks
    taken: bool = False
    awaited: bool = True


class KVFetches:
    """The fetches of one group, over its pool. No clock: `now` comes in."""

    def __init__(self, pool: BlockPool):
        self.pool = pool
        self._fetches: dict[int, _Arriving] = {}
        self._arriving: dict[BlockHash, int] = {}  # → the fetch that brings it, while it is awaited
        self._next_id = 0

    def begin(
        self,
        request_id: str,
        source: KVSource,
        hashes: Sequence[BlockHash],
        prefix: list[int],
        deadline: float,
        after_step: int,
    ) -> None:
        """Fetch what follows `prefix`, the cached blocks of the first of `hashes`. The pool has room for the rest."""
        parent = hashes[len(prefix) - 1] if prefix else None
        missing = tuple(hashes[len(prefix) :])
        self.pool.share(prefix)
        blocks = tuple(self.pool.allocate(len(missing)))
        order = KVFetch(self._next_id, request_id, source, missing, blocks, deadline)
        self._fetches[order.fetch_id] = _Arriving(order, parent, prefix, after_step)
        self._arriving.update((h, order.fetch_id) for h in missing)
        self._next_id += 1

    def is_arriving(self, block_hash: BlockHash) -> bool:
        return block_hash in self._arriving

    def take(self, earliest_step: int) -> list[KVFetch]:
        """Orders that may begin, each once: all steps before `earliest_step` are done."""
        ready = [f for f in self._fetches.values() if not f.taken and f.after_step < earliest_step]
        for fetch in ready:
            fetch.taken = True
        return [fetch.order for fetch in ready]

    def expire(self, now: float) -> int:
        """Let nobody wait any longer for what is late. Returns how many fetches that hits."""
        late = [f for f in self._fetches.values() if f.awaited and f.order.deadline <= now]
        for fetch in late:
            self._give_up(fetch)
            if not fetch.taken:  # nobody will write these blocks
                self.end(fetch.order.fetch_id, 0)
        return len(late)

    def end(self, fetch_id: int, num_blocks: int) -> None:
        """The ranks are done: the first `num_blocks` blocks are there, the others are not."""
        fetch = self._fetches.pop(fetch_id)
        self._give_up(fetch)
        parent = fetch.parent
        for block, block_hash in list(zip(fetch.order.block_ids, fetch.order.hashes, strict=True))[:num_blocks]:
            self.pool.cache(block, block_hash, parent)
            parent = block_hash
        self.pool.release([*fetch.prefix, *fetch.order.block_ids])

    def _give_up(self, fetch: _Arriving) -> None:
        fetch.awaited = False
        for block_hash in fetch.order.hashes:
            if self._arriving.get(block_hash) == fetch.order.fetch_id:
                del self._arriving[block_hash]

    @property
    def num_awaited(self) -> int:
        return sum(f.awaited for f in self._fetches.values())

    def users(self) -> list[int]:
        """Blocks that fetches hold, once for each reference."""
        return [block for f in self._fetches.values() for block in (*f.prefix, *f.order.block_ids)]

    def check_integrity(self) -> None:
        """Raise AssertionError where the books do not balance."""
        for block_hash, fetch_id in self._arriving.items():
            fetch = self._fetches[fetch_id]
            assert fetch.awaited and block_hash in fetch.order.hashes
        for fetch in self._fetches.values():
            assert all(self.pool.ref_counts[b] == 1 for b in fetch.order.block_ids), "a block is filled and used"
