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
_MAX_QUEUED = 64  # prefixes that wait for their turn


@dataclass(frozen=True, slots=True)
class Publication:
    """An offer: a run of blocks, which stay as they are until it is ended."""

    publication_id: int
    parent: BlockHash | None  # of the block before the first; None: it begins a prompt
    hashes: tuple[BlockHash, ...]
    block_ids: tuple[int, ...]
    num_tokens_before: int


class Publisher:
    """Over a group's pool. What the store has taken is not offered again until it drops it."""

    def __init__(self, pool: BlockPool, run_blocks: int, min_tokens: int = 256, min_run_tokens: int = 64):
        """`run_blocks`: most blocks in a run. Prefixes under `min_tokens` must be seen twice, or be about to go."""
        self.pool = pool
        self.max_pinned = max(1, int(_MAX_PINNED * pool.num_blocks))
        self.run_blocks = min(run_blocks, self.max_pinned)
        self.min_tokens = min_tokens
        self.min_run_tokens = min_run_tokens
        self._queue: OrderedDict[BlockHash, Sequence[BlockHash]] = OrderedDict()  # the last hash of a prefix → all
        self._begun: BlockHash | None = None  # of the queue, the one that is partly offered
        self._offered: OrderedDict[BlockHash, bool] = OrderedDict()  # False: not taken; to be offered with the next use
        self._open: dict[int, Publication] = {}
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
        if self._is_worth_a_run(hashes) and len(self._queue) < _MAX_QUEUED:
            self._queue.setdefault(hashes[-1], tuple(hashes))

    def _is_worth_a_run(self, hashes: Sequence[BlockHash]) -> bool:
        return (len(hashes) - self._num_offered(hashes)) * self.pool.block_size >= self.min_run_tokens

    def _num_offered(self, hashes: Sequence[BlockHash]) -> int:
        """What was offered is the beginning of a prefix."""
        count = len(hashes)
        while count and not self._offered.get(hashes[count - 1]):
            count -= 1
        return count

    def num_taken(self, hashes: Sequence[BlockHash]) -> int | None:
        """How many blocks of a prefix that was offered the store has; None while more are on their way there."""
        if hashes[-1] in self._queue:
            return None
        for run in self._open.values():
            start = run.num_tokens_before // self.pool.block_size
            if start < len(hashes) and hashes[start] == run.hashes[0]:
                return None
        return self._num_offered(hashes)

    def take(self) -> list[Publication]:
        """New offers, as many as may travel now, in the order in which the store must get them: a run follows its
        parent. To be asked again when one has ended."""
        fresh = []
        while self._queue:
            last, hashes = next(iter(self._queue.items()))
            start, blocks = self._num_offered(hashes), self.pool.lookup(hashes)
            if len(blocks) <= start or (last != self._begun and not self._is_worth_a_run(hashes)):
                del self._queue[last]
                continue
            num_runs = -(-(len(blocks) - start) // self.run_blocks)
            end = start - (start - len(blocks)) // num_runs  # runs of about the same length
            if self._num_pinned + end - start > self.max_pinned:
                break
            parent = hashes[start - 1] if start else None
            run = Publication(
                self._next_id, parent, tuple(hashes[start:end]), tuple(blocks[start:end]), start * self.pool.block_size
            )
            fresh.append(run)
            self._open[run.publication_id] = run
            self._next_id += 1
            self._num_pinned += end - start
            self.pool.share(run.block_ids)
            self._offered.update(dict.fromkeys(run.hashes, True))
            self._begun = last
        while len(self._offered) > 4 * self.pool.num_blocks:
            self._offered.popitem(last=False)
        return fresh

    def end(self, publication_id: int, taken: bool = True) -> None:
        """The blocks may be evicted again; the store has taken them, or has not."""
        run = self._open.pop(publication_id)
        if not taken:
            self._offered.update((h, False) for h in run.hashes if h in self._offered)
        self.pool.release(run.block_ids)
        self._num_pinned -= len(run.block_ids)

    def forget(self, hashes: Iterable[BlockHash]) -> None:
        """The store has dropped these."""
        for block_hash in hashes:
            self._offered.pop(block_hash, None)

    def forget_all(self) -> None:
        """The store is another one, or knows nothing of what these follow."""
        self._offered.clear()

    @property
    def busy(self) -> bool:
        """Something is offered, or waits to be."""
        return bool(self._queue or self._open)

    def users(self) -> list[int]:
        """Blocks that offers hold, once for each reference."""
        return [block for run in self._open.values() for block in run.block_ids]

    def check_integrity(self) -> None:
        """Raise AssertionError where the books do not balance."""
        assert self._num_pinned == len(self.users()) <= self.max_pinned
        assert len(self._queue) <= _MAX_QUEUED and len(self._offered) <= 4 * self.pool.num_blocks
