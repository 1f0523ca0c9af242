"""KV blocks: free, used, cached. The device tier of the prefix cache (PagedAttention; vLLM's prefix caching)."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from .prefix_index import BlockLog

BlockHash = bytes  # 128 bits of a chained BLAKE2b: the same in every process and on every machine


def root_hash(model: str, cache_salt: str = "") -> BlockHash:
    """The parent of a sequence's first block. Sequences share blocks only under the same root."""
    parts = b"".join(len(p).to_bytes(4, "little") + p for p in (model.encode(), cache_salt.encode()))
    return hashlib.blake2b(parts, digest_size=16).digest()


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """H(parent, token ids): equal hashes mean equal prefixes, whole."""
    # array("I") is native-endian; every platform that torch runs on is little-endian.
    return hashlib.blake2b(array("I", token_ids).tobytes(), digest_size=16, key=parent).digest()


def hash_prompt(token_ids: Sequence[int], block_size: int, root: BlockHash) -> tuple[BlockHash, ...]:
    """The hashes of all full blocks of a prompt under this root."""
    hashes: list[BlockHash] = []
    extend_hashes(hashes, token_ids, block_size, root)
    return tuple(hashes)


def extend_hashes(hashes: list[BlockHash], token_ids: Sequence[int], block_size: int, root: BlockHash) -> None:
    """Add the hashes of the full blocks that follow those in `hashes`."""
    parent = hashes[-1] if hashes else root
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = hash_block(parent, token_ids[start : start + block_size])
        hashes.append(parent)


class BlockPool:
    """Owns block ids 0..num_blocks-1: reference counts, and for free blocks the order in which to evict them.

    A block with a hash holds a full, immutable block of KV. It stays findable after its last user released it, until
    its place is needed: free blocks form an LRU queue, the least recently used one is handed out first.

    What is findable is whole prefixes: when a block goes, those that continue it are dropped with it, since no look-up
    could reach them. (Their own eviction comes earlier as a rule: the end of a prefix goes first. Not so where two
    sequences computed a prefix at the same time, and one's blocks continue the other's.)
    """

    def __init__(self, num_blocks: int, block_size: int, enable_caching: bool = True):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.ref_counts = [0] * num_blocks  # users of each block
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._hashes: dict[int, BlockHash] = {}
        self._cached: dict[BlockHash, int] = {}
        self._parents: dict[BlockHash, BlockHash | None] = {}
        self._children: dict[BlockHash, set[BlockHash]] = {}
        self.log = BlockLog()  # of what is findable

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses; some may still hold cached KV."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def lookup(self, hashes: Iterable[BlockHash]) -> list[int]:
        """The cached blocks of the longest known prefix of `hashes`. Takes no reference."""
        return list(self._known(hashes)) if self.enable_caching else []

    def _known(self, hashes: Iterable[BlockHash]) -> Iterator[int]:
        for block_hash in hashes:
            block = self._cached.get(block_hash)
            if block is None:
                return
            yield block

    def num_unused(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are free: what sharing them would take away from `num_free`."""
        return sum(self.ref_counts[b] == 0 for b in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Take a reference to blocks that `lookup` found."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self._free[block]
            self.ref_counts[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks with undefined contents. The caller has checked `num_free`."""
        if count > len(self._free):
            raise AssertionError(f"{count} blocks asked for, {len(self._free)} free")
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            if block in self._hashes:
                self._drop(self._hashes[block])
            self.ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def cache(self, block: int, block_hash: BlockHash, parent: BlockHash | None = None) -> None:
        """Make a used block findable; `parent` is the hash of the block before it.

        Where another block holds the same prefix already, that one stays known. Where nobody holds the parent any
        more, it is not worth finding.
        """
        if not self.enable_caching or block in self._hashes or block_hash in self._cached:
            return
        if parent is not None:
            if parent not in self._cached:
                return
            self._children.setdefault(parent, set()).add(block_hash)
        self._hashes[block] = block_hash
        self._cached[block_hash] = block
        self._parents[block_hash] = parent
        self.log.note(block_hash, True)

    def _drop(self, block_hash: BlockHash) -> None:
        """Forget a cached prefix and all that continue it. Their blocks stay where they are."""
        doomed = [block_hash]
        while doomed:
            block_hash = doomed.pop()
            doomed += self._children.pop(block_hash, ())
            parent = self._parents.pop(block_hash)
            if parent in self._children:
                self._children[parent].discard(block_hash)
                if not self._children[parent]:
                    del self._children[parent]
            del self._hashes[self._cached.pop(block_hash)]
            self.log.note(block_hash, False)

    def cached_hashes(self) -> list[BlockHash]:
        """Everything that is findable; `log.take` then tells what changes from here on."""
        self.log.take()
        return list(self._cached)

    def next_evicted(self, count: int) -> list[BlockHash]:
        """The cached prefixes among the `count` free blocks that are handed out next."""
        return [self._hashes[b] for b in islice(self._free, count) if b in self._hashes]

    def chain(self, block_hash: BlockHash) -> list[BlockHash]:
        """A cached prefix, from its first block on."""
        hashes: list[BlockHash] = []
        link: BlockHash | None = block_hash
        while link is not None:
            hashes.append(link)
            link = self._parents[link]
        return hashes[::-1]

    def release(self, blocks: Sequence[int]) -> None:
        """Give a sequence's blocks back. The end of a prefix is evicted before its beginning."""
        for block in reversed(blocks):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self._free[block] = None
                if block not in self._hashes:  # worth nothing: hand it out first
                    self._free.move_to_end(block, last=False)

    def check_integrity(self) -> None:
        """Raise AssertionError where the books do not balance."""
        for block, count in enumerate(self.ref_counts):
            assert count >= 0, f"block {block} has {count} users"
            assert (count == 0) == (block in self._free), f"block {block}: {count} users, free {block in self._free}"
        assert len(self._free) <= self.num_blocks
        assert {h: b for b, h in self._hashes.items()} == self._cached, "hash tables disagree"
        assert self._parents.keys() == self._cached.keys()
        children: dict[BlockHash, set[BlockHash]] = {}
        for block_hash, parent in self._parents.items():
            if parent is not None:
                assert parent in self._cached, "a prefix has lost its beginning"
                children.setdefault(parent, set()).add(block_hash)
        assert children == self._children
