"""What ingresses and worker groups tell the global scheduler of themselves. All counts are running totals."""

from dataclasses import dataclass

from ...scheduler.histogram import HistogramCounts

Count = tuple[str, tuple[str, ...], float | HistogramCounts]  # name in the catalog, values of its labels, value


@dataclass(frozen=True, slots=True)
class IngressReport:
    ingress_id: str
    node_id: str
    counts: tuple[Count, ...]


@dataclass(frozen=True, slots=True)
class GroupTimes:
    step_seconds: HistogramCounts
    step_tokens: HistogramCounts
    prefill_seconds: HistogramCounts  # from a request's arrival at the group to its first token
    decode_seconds: HistogramCounts  # from its first token to its last
