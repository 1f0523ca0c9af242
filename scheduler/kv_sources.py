"""The stores that prefixes can be fetched from, and what that takes, learned from the fetches that were made."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from .prefix_index import PrefixIndex

_DOUBT_SECONDS = 10.0  # a store that failed a fetch is left alone for so long


@dataclass(frozen=True, slots=True)
class FetchOutcome:
    """What became of one fetch. `failure` is "" where all blocks came, else what kind of trouble kept some away."""

    store: str
    same_node: bool
    num_blocks: int  # that came
    num_bytes: int
    seconds: float
    predicted_seconds: float
    failure: str = ""


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Guesses, until fetches have been made."""

    same_node_latency: float = 0.005
    same_node_bytes_per_second: float = 1e9
    network_latency: float = 0.01
    network_bytes_per_second: float = 3e8


class TransferModel:
    """seconds = latency + bytes / bandwidth, by least squares; an observation counts half after twenty others."""

    def __init__(self, latency: float, bytes_per_second: float, typical_bytes: float = 1.6e7):
        self._half = 0.5 ** (1 / 20)
        self._unit = typical_bytes
        self._sums = [0.0] * 5  # weight, x, y, x², xy
        for size in (0.0, typical_bytes):  # the guess counts as two observations
            self.learn(size, latency + size / bytes_per_second)

    def learn(self, num_bytes: float, seconds: float) -> None:
        x, y = num_bytes / self._unit, seconds
        new = (1.0, x, y, x * x, x * y)
        self._sums = [self._half * old + now for old, now in zip(self._sums, new, strict=True)]

    def seconds(self, num_bytes: float) -> float:
        weight, x, y, xx, xy = self._sums
        spread = weight * xx - x * x
        slope = (weight * xy - x * y) / spread if spread > 1e-9 * weight * xx else 0.0
        latency = (y - slope * x) / weight
        if slope <= 0.0 or latency < 0.0:  # sizes that tell nothing, or noise: in proportion, through the mean
            slope, latency = (xy / xx, 0.0) if xx else (0.0, y / weight)
        return latency + slope * num_bytes / self._unit


@dataclass(frozen=True, slots=True)
class Offer:
    """A store that has the first `num_blocks` blocks of a prompt."""

    store: str
    num_blocks: int
    same_node: bool


class KVSources:
    """All stores of the cluster; they are holders in the prefix index. No clock: `now` comes in."""

    def __init__(self, index: PrefixIndex, options: SourceOptions | None = None):
        self.index = index
        options = options or SourceOptions()
        self._bits: dict[str, int] = {}  # by store
        self._on_node: dict[str, int] = {}  # node → the bits of its stores
        self._mask = 0  # of all
        self._doubted: dict[str, float] = {}  # store → until when
        self._turn = 0
        self._roads = {
            True: TransferModel(options.same_node_latency, options.same_node_bytes_per_second),
            False: TransferModel(options.network_latency, options.network_bytes_per_second),
        }

    def add(self, name: str, node: str) -> None:
        """A store came up, or has to tell everything anew."""
        self.remove(name)
        bit = self._bits[name] = self.index.add_holder(name)
        self._on_node[node] = self._on_node.get(node, 0) | bit
        self._mask |= bit

    def remove(self, name: str) -> None:
        bit = self._bits.pop(name, 0)
        if bit:
            self.index.remove_holder(name)
            self._mask &= ~bit
            self._on_node = {node: mask & ~bit for node, mask in self._on_node.items() if mask & ~bit}
            self._doubted.pop(name, None)

    def __contains__(self, name: str) -> bool:
        return name in self._bits

    def lookup(self, hashes: Sequence[Hashable], now: float) -> tuple[tuple[int, int], ...]:
        """(blocks, mask of the stores that have so many of a prompt), longest first."""
        mask = self._mask
        if self._doubted:
            self._doubted = {name: until for name, until in self._doubted.items() if until > now}
            mask &= ~sum(self._bits[name] for name in self._doubted)
        if not mask or not hashes:
            return ()
        return tuple((level.num_blocks, level.holders) for level in self.index.lookup(hashes, mask))

    def offers(self, levels: Sequence[tuple[int, int]], num_blocks: int, node: str) -> Iterator[Offer]:
        """Where a group at `node` that has `num_blocks` blocks can get more: the most, and the most on its node."""
        farthest, near_mask = True, self._on_node.get(node, 0)
        for held, mask in levels:
            if held <= num_blocks:
                return
            if mask & near_mask:
                yield Offer(self._one_of(mask & near_mask), held, True)
                return
            if farthest:
                farthest = False
                yield Offer(self._one_of(mask), held, False)

    def _one_of(self, mask: int) -> str:
        """Not always the same of many."""
        self._turn = (self._turn + 1) % mask.bit_length()
        rest = (mask >> self._turn << self._turn) or mask
        return self.index.names(rest & -rest)[0]

    def seconds(self, num_bytes: int, same_node: bool) -> float:
        return self._roads[same_node].seconds(num_bytes)

    def learn(self, outcome: FetchOutcome, now: float) -> None:
        """A fetch has ended."""
        if outcome.failure:
            if outcome.store in self._bits:
                self._doubted[outcome.store] = now + _DOUBT_SECONDS
        elif outcome.num_bytes:
            self._roads[outcome.same_node].learn(outcome.num_bytes, outcome.seconds)
