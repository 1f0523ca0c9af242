"""Which cached blocks a worker group offers to its node's store, and that they stay while they travel.

A prefix is offered when it has been computed and is long, when it is asked for again, or when its blocks are about to
be evicted. It goes in runs of blocks, several MB each: one object a block would cost several times as much.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .block_pool import BlockHash, BlockPool

_LOOKAHEAD = 16  # free blocks looked at before they are handed out
_MAX_PINNED = 0.25  # share of the pool


@dataclass(frozen=True, slots=True)
class Publication:
    """An offer: a run of blocks, which stay as they are until it is ended."""

    publication_id: int
    parent: BlockHash | None  # of the block before the first; None: it begins a prompt
    hashes: tuple[BlockHash, ...]
    block_ids: tuple[int, ...]
    num_tokens_before: int


class Publisher:
    """Over a group's pool. What was offered once is not offered again, unless the store drops it."""

    def __init__(self, pool: BlockPool, run_blocks: int, min_tokens: int = 256, min_run_tokens: int = 64):
        """`run_blocks`: most blocks in a run. Prefixes under `min_tokens` must be seen twice, or be about to go."""
        self.pool = pool
        self.run_blocks = run_blocks
        self.min_tokens = min_tokens
        self.min_run_tokens = min_run_tokens
        self._offered: OrderedDict[BlockHash, None] = OrderedDict()
        self._open: dict[int, Publication] = {}
        self._fresh: list[Publication] = []
        self._num_pinned = 0
        self._next_id = 0

    def computed(self, hashes: Sequence[BlockHash], num_seen: int) -> None:
        """A sequence has these full blocks, all computed; the first `num_seen` were there before it came."""
        size = self.pool.block_size
        self._offer(hashes if len(hashes) * size >= self.min_tokens else hashes[:num_seen])

    def sweep(self) -> None:
        """Offer what is about to be evicted."""
        for block_hash in self.pool.next_evicted(_LOOKAHEAD):
            if block_hash not in self._offered:
                self._offer(self.pool.chain(block_hash))

    def _offer(self, hashes: Sequence[BlockHash]) -> None:
        end = start = len(hashes)
        while start and hashes[start - 1] not in self._offered:
            start -= 1
        size = self.pool.block_size
        if (end - start) * size < self.min_run_tokens:
            return
        blocks = self.pool.lookup(hashes)
        end = min(end, len(blocks))
        room = int(_MAX_PINNED * self.pool.num_blocks) - self._num_pinned
        if end <= start or end - start > room:  # what does not fit comes again: with the next use, or when it goes
            return
        num_runs = -(-(end - start) // self.run_blocks)
        bounds = [start + (end - start) * i // num_runs for i in range(num_runs + 1)]
        for first, last in zip(bounds, bounds[1:], strict=False):
            parent = hashes[first - 1] if first else None
            run = Publication(self._next_id, parent, tuple(hashes[first:last]), tuple(blocks[first:last]), first * size)
            self._next_id += 1
            self._open[run.publication_id] = run
            self._fresh.append(run)
        self.pool.share(blocks[start:end])
        self._num_pinned += end - start
        for block_hash in hashes[start:end]:
            self._offered[block_hash] = None
        while len(self._offered) > 4 * self.pool.num_blocks:
            self._offered.popitem(last=False)

    def take(self) -> list[Publication]:
        """New offers, in the order in which the store must get them: a run follows its parent."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def end(self, publication_id: int) -> None:
        """The blocks may be evicted again. (A store that wanted them has them by now.)"""
        run = self._open.pop(publication_id)
        self.pool.release(run.block_ids)
        self._num_pinned -= len(run.block_ids)

    def forget(self, hashes: Iterable[BlockHash]) -> None:
        """The store has dropped these."""
        for block_hash in hashes:
            self._offered.pop(block_hash, None)

    def forget_all(self) -> None:
        """The store is another one, or knows nothing of what these follow."""
        self._offered.clear()

    def users(self) -> list[int]:
        """Blocks that offers hold, once for each reference."""
        return [block for run in self._open.values() for block in run.block_ids]

    def check_integrity(self) -> None:
        """Raise AssertionError where the books do not balance."""
        assert self._num_pinned == len(self.users()) <= _MAX_PINNED * self.pool.num_blocks
        assert {r.publication_id for r in self._fresh} <= self._open.keys()
        assert len(self._offered) <= 4 * self.pool.num_blocks
