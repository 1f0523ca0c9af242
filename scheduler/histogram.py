"""How often a value fell where: plain counts, which a process keeps without a lock and sends to others as they are."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HistogramCounts:
    """What a histogram has seen so far. `counts[i]` values were at most `bounds[i]` and over the one before; the last
    count is of those over all bounds. `total` is the sum of the values."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    def plus(self, other: "HistogramCounts") -> "HistogramCounts":
        """Both together; they have the same bounds."""
        assert self.bounds == other.bounds
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        return HistogramCounts(self.bounds, counts, self.total + other.total)


class Histogram:
    """Counts values between `bounds`, which ascend, as Prometheus's histograms do."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]):
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def so_far(self) -> HistogramCounts:
        return HistogramCounts(self.bounds, tuple(self.counts), self.total)
