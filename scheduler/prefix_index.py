"""PrefixIndex: which worker groups hold which KV block on their device, and which node stores hold it.

Block hashes are chained (`block_pool.hash_block`): a block's hash stands for the whole prefix that ends with it. Each
known hash maps to one integer with a bit for each holder. A holder holds whole prefixes: it tells of a block only
while it has all those before it, which is its duty (`BlockPool` drops what can no longer be reached).

What a holder has comes from the holder alone, in numbered batches; a batch that is missing is noticed, and the holder
is asked for everything. What a decision will bring about is entered ahead of it (`expect`) and settled when the request
has ended, whatever became of it.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

DIGEST_SIZE = 16  # bytes of a block hash


@dataclass(frozen=True, slots=True)
class BlockEvents:
    """What changed at a holder since its last batch: hashes end to end, each in one of the two, in no order.

    Batches count 1, 2, 3, …; a `snapshot` holds everything in `stored` and may have any number.
    """

    number: int
    stored: bytes = b""
    removed: bytes = b""
    snapshot: bool = False


def pack(hashes: Iterable[bytes]) -> bytes:
    return b"".join(hashes)


def unpack(packed: bytes) -> list[bytes]:
    return [packed[i : i + DIGEST_SIZE] for i in range(0, len(packed), DIGEST_SIZE)]


class BlockLog:
    """A holder's side: what came to it and what went since it last told, and the numbers of its batches."""

    def __init__(self) -> None:
        self._changes: dict[Any, bool] = {}  # block → it came, or it went
        self._number = 0

    def note(self, block: Any, stored: bool) -> None:
        if self._changes.get(block, stored) == stored:
            self._changes[block] = stored
        else:
            del self._changes[block]  # there and gone again, or the other way round: nobody heard of it

    def take(self) -> tuple[list[Any], list[Any]]:
        """The blocks that came since the last call, and those that went."""
        changes, self._changes = self._changes, {}
        return [b for b, stored in changes.items() if stored], [b for b, stored in changes.items() if not stored]

    def take_events(self) -> BlockEvents | None:
        """The same as the next batch; None where nothing changed."""
        stored, removed = self.take()
        if not stored and not removed:
            return None
        self._number += 1
        return BlockEvents(self._number, pack(stored), pack(removed))

    def snapshot(self, blocks: Iterable[bytes]) -> BlockEvents:
        """The next batch, of everything there is: changes up to it must have been taken."""
        self._number += 1
        return BlockEvents(self._number, pack(blocks), snapshot=True)


@dataclass(slots=True)
class _Holder:
    bit: int
    number: int | None  # of the last batch; None: everything is awaited
    blocks: set[Hashable]  # told by the holder
    expected: dict[Hashable, int]  # on its way there, and for how many requests


@dataclass(frozen=True, slots=True)
class Level:
    """The first `num_blocks` blocks of a prompt are held by each holder in `holders`, a bit mask."""

    num_blocks: int
    holders: int


class PrefixIndex:
    """Bounded: past `max_blocks` block copies, what is stored in addition is not tracked (and counted)."""

    def __init__(self, max_blocks: int = 20_000_000):
        self.max_blocks = max_blocks
        self.num_untracked = 0  # copies that the bound kept out, ever
        self._num_blocks = 0  # copies
        self._masks: dict[Hashable, int] = {}
        self._holders: dict[str, _Holder] = {}
        self._by_bit: dict[int, str] = {}
        self._free_bits: list[int] = []
        self._pending: dict[str, tuple[str, Sequence[Hashable]]] = {}  # request id → where, and what it brings there

    # -- holders ------------------------------------------------------------------------------------------------------

    def add_holder(self, name: str) -> int:
        """Returns the holder's bit. Its first batch must be a snapshot or number 1."""
        self.remove_holder(name)
        bit = self._free_bits.pop() if self._free_bits else 1 << len(self._holders)
        self._holders[name] = _Holder(bit, 0, set(), {})
        self._by_bit[bit] = name
        return bit

    def remove_holder(self, name: str) -> None:
        holder = self._holders.get(name)
        if holder is None:
            return
        self._clear(holder)
        for request_id in [r for r, (at, _) in self._pending.items() if at == name]:
            del self._pending[request_id]
        for block in holder.expected:
            self._drop_bit(block, holder.bit)
        del self._holders[name], self._by_bit[holder.bit]
        self._free_bits.append(holder.bit)

    def names(self, mask: int) -> list[str]:
        """The holders in a mask."""
        names = []
        while mask:
            bit = mask & -mask
            names.append(self._by_bit[bit])
            mask ^= bit
        return names

    # -- what holders tell --------------------------------------------------------------------------------------------

    def apply(self, name: str, events: BlockEvents) -> bool:
        """Take in a batch. False: one is missing before it, and the holder must send a snapshot.

        A batch that was taken in already, sent again, changes nothing.
        """
        return self.apply_hashes(name, events.number, unpack(events.stored), unpack(events.removed), events.snapshot)

    def apply_hashes(
        self,
        name: str,
        number: int,
        stored: Iterable[Hashable],
        removed: Iterable[Hashable] = (),
        snapshot: bool = False,
    ) -> bool:
        """As `apply`, with the hashes as they are."""
        holder = self._holders[name]
        if snapshot:
            self._clear(holder)
        elif holder.number is None or number > holder.number + 1:
            holder.number = None  # what is known of it stays as a guess until the snapshot comes
            return False
        elif number <= holder.number:
            return True
        holder.number = number
        bit, masks, blocks, expected = holder.bit, self._masks, holder.blocks, holder.expected
        for block in removed:
            if block in blocks:
                blocks.remove(block)
                self._num_blocks -= 1
                if block not in expected:
                    self._drop_bit(block, bit)
        for block in stored:
            if block in blocks:
                continue
            if self._num_blocks >= self.max_blocks:
                self.num_untracked += 1
                continue
            blocks.add(block)
            self._num_blocks += 1
            # the integer of a lone holder is shared by all its blocks
            masks[block] = masks[block] | bit if block in masks else bit
        return True

    def _clear(self, holder: _Holder) -> None:
        for block in holder.blocks:
            if block not in holder.expected:
                self._drop_bit(block, holder.bit)
        self._num_blocks -= len(holder.blocks)
        holder.blocks.clear()

    def _drop_bit(self, block: Hashable, bit: int) -> None:
        mask = self._masks[block] & ~bit
        if mask:
            self._masks[block] = mask
        else:
            del self._masks[block]

    # -- what decisions bring about -----------------------------------------------------------------------------------

    def expect(self, name: str, request_id: str, blocks: Sequence[Hashable]) -> None:
        """A request that will leave these blocks at a holder was just sent there."""
        holder = self._holders[name]
        self._pending[request_id] = name, blocks
        bit, masks, expected = holder.bit, self._masks, holder.expected
        for block in blocks:
            expected[block] = expected.get(block, 0) + 1
            masks[block] = masks.get(block, 0) | bit

    def settle(self, request_id: str) -> None:
        """The request has ended, its holder has told of all it stored: what was only expected goes."""
        name, blocks = self._pending.pop(request_id, (None, ()))
        if name is None:
            return
        holder = self._holders[name]
        for block in blocks:
            if holder.expected[block] > 1:
                holder.expected[block] -= 1
                continue
            del holder.expected[block]
            if block not in holder.blocks:
                self._drop_bit(block, holder.bit)

    # -- asking -------------------------------------------------------------------------------------------------------

    def lookup(self, hashes: Sequence[Hashable], among: int = -1) -> list[Level]:
        """How much of a prompt the holders in `among` have, longest first.

        A level's holders have at least that much, so each mask contains those before it. Since whoever holds a block
        holds those before it, bisection finds where holders drop out: a few look-ups instead of one a block, each of
        which is a miss of every CPU cache in an index of millions.
        """
        get, end = self._masks.get, len(hashes)
        if not end:
            return []
        levels: list[Level] = []
        # ranges to search, the one that ends first on top: (first, its holders, last, its holders)
        last = get(hashes[end - 1], 0) & among
        if last:
            levels.append(Level(end, last))
        ranges = [(-1, among, end - 1, last)]
        while ranges:
            low, low_mask, high, high_mask = ranges.pop()
            if low_mask == high_mask:
                continue
            if high - low == 1:
                if low >= 0:
                    levels.append(Level(high, low_mask))
                continue
            middle = (low + high) // 2 if low >= 0 or high == 1 else 0  # the first block tells most: begin there
            mask = get(hashes[middle], 0) & low_mask
            ranges.append((low, low_mask, middle, mask))
            ranges.append((middle, mask, high, high_mask & mask))
        return levels

    def num_held(self, name: str, hashes: Sequence[Hashable]) -> int:
        """How many blocks of a prompt one holder has."""
        levels = self.lookup(hashes, self._holders[name].bit)
        return levels[0].num_blocks if levels else 0

    def num_blocks_of(self, name: str) -> int:
        """How many blocks a holder has told of and has still."""
        return len(self._holders[name].blocks)

    def blocks_of(self, name: str) -> set[Hashable]:
        """What a holder has told of."""
        return set(self._holders[name].blocks)

    def __len__(self) -> int:
        """Block copies that are tracked, those only expected left out."""
        return self._num_blocks

    def check_integrity(self) -> None:
        """Raise AssertionError where the books do not balance."""
        masks: dict[Hashable, int] = {}
        for holder in self._holders.values():
            for block in holder.blocks | holder.expected.keys():
                masks[block] = masks.get(block, 0) | holder.bit
            assert all(count > 0 for count in holder.expected.values())
        assert masks == self._masks, "the index and the holders disagree"
        assert self._num_blocks == sum(len(h.blocks) for h in self._holders.values()) <= self.max_blocks
        bits = [h.bit for h in self._holders.values()]
        assert len(set(bits)) == len(bits) and {h.bit: n for n, h in self._holders.items()} == self._by_bit
        assert not set(bits) & set(self._free_bits)
        expected: dict[str, dict[Hashable, int]] = {name: {} for name in self._holders}
        for name, blocks in self._pending.values():
            for block in blocks:
                expected[name][block] = expected[name].get(block, 0) + 1
        assert expected == {n: h.expected for n, h in self._holders.items()}
