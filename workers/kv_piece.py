"""What an array of packed KV blocks is. Apart from `kv_transfer.py`, so that a store needs no torch to read it."""

from dataclasses import dataclass

from .partition import Range, Shard


@dataclass(frozen=True, slots=True)
class KVPiece:
    """What an array of packed blocks is: the part of some blocks that one rank had."""

    fingerprint: str  # of model and dtype: what must be equal for the bytes to mean the same
    dtype: str
    layers: tuple[int, int]  # [first, last + 1)
    kv_heads: tuple[int, int]
    num_blocks: int
    block_size: int
    row_size: int  # of a token and head, in elements of the dtype
    num_bytes: int
    checksums: bytes  # CRC-32 of every unit, in the order of the layout, as uint32

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        layers, heads = self.layers[1] - self.layers[0], self.kv_heads[1] - self.kv_heads[0]
        return layers, 2, heads, self.num_blocks, self.block_size, self.row_size

    def overlaps(self, shard: Shard) -> bool:
        """Whether a rank with that shard needs something of it."""
        return bool(common(self.layers, shard.layers)) and bool(common(self.kv_heads, shard.kv_heads))


def common(span: tuple[int, int], mine: Range) -> range:
    """What a span, [first, last + 1), has of a rank's."""
    return range(max(span[0], mine.start), min(span[1], mine.stop))
