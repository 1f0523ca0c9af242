"""KV blocks: free, used, cached. The device tier of the prefix cache (PagedAttention; vLLM's prefix caching)."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

BlockHash = bytes  # 128 bits of a chained BLAKE2b: the same in every process and on every machine


def root_hash(model: str, cache_salt: str = "") -> BlockHash:
    """The parent of a sequence's first block. Sequences share blocks only under the same root."""
    parts = b"".join(len(p).to_bytes(4, "little") + p for p in (model.encode(), cache_salt.encode()))
    return hashlib.blake2b(parts, digest_size=16).digest()


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """H(parent, token ids): equal hashes mean equal prefixes, whole."""
    # array("I") is native-endian; every platform that torch runs on is little-endian.
    return hashlib.blake2b(array("I", token_ids).tobytes(), digest_size=16, key=parent).digest()


class BlockPool:
    """Owns block ids 0..num_blocks-1: reference counts, and for free blocks the order in which to evict them.

    A block with a hash holds a full, immutable block of KV. It stays findable after its last user released it, until
    its place is needed: free blocks form an LRU queue, the least recently used one is handed out first.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_caching: bool = True):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.ref_counts = [0] * num_blocks  # users of each block
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._hashes: dict[int, BlockHash] = {}
        self._cached: dict[BlockHash, int] = {}

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
            block_hash = self._hashes.pop(block, None)
            if block_hash is not None:
                del self._cached[block_hash]
            self.ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def cache(self, block: int, block_hash: BlockHash) -> None:
        """Make a used block findable. Where another block holds the same prefix already, that one stays known."""
        if self.enable_caching and block not in self._hashes and block_hash not in self._cached:
            self._hashes[block] = block_hash
            self._cached[block_hash] = block

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
