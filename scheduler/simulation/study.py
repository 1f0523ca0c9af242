"""Policies side by side on one trace: capacity, the runs, a table and a picture of them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from ..cost_model import CostModel
from .baselines import POLICIES
from .group import GroupSpec
from .simulator import Fault, Result, Router, Simulation
from .traces import TraceRequest, at_rate

# A dense model of 8 billion parameters in bf16 on one GPU with 4.8 TB/s, 989 TFLOP/s and 141 GB: reckoned from those
# figures with 60% of the bandwidth and half of the arithmetic reached, not measured. `scheduler.cost_model.fit`
# fits another one from steps that ran.
GPU_8B = GroupSpec(
    "8B model, one 141 GB GPU",
    CostModel(base=5.6e-3, token=3.2e-5, attention=1.1e-9, sequence=5e-5, kv=4.6e-8),
    kv_tokens=800_000,
)
SPECS = {"gpu-8b": GPU_8B}
MAX_TTFT = 2.0  # seconds: the targets that goodput counts
MAX_INTER_TOKEN = 0.05


@dataclass(frozen=True, slots=True)
class Row:
    policy: str
    result: Result

    def cells(self) -> list[str]:
        r = self.result
        return [
            self.policy,
            f"{r.ttft(0.5):.2f}",
            f"{r.ttft(0.99):.2f}",
            f"{100 * r.hit_rate:.1f}%",
            f"{100 * r.goodput(MAX_TTFT, MAX_INTER_TOKEN):.1f}%",
            f"{r.throughput():.2f}",
            f"{100 * r.utilization:.0f}%",
        ]


HEADER = ["policy", "TTFT p50 (s)", "p99 (s)", "hit rate", "goodput", "requests/s", "busy"]


def capacity(
    trace: Sequence[TraceRequest],
    num_groups: int,
    spec: GroupSpec,
    policies: Sequence[str] = ("pagedray", "least_outstanding"),
    seed: int = 0,
) -> float:
    """Requests a second that the cluster serves when more than it can serve keep coming: the best of these policies."""
    guess = num_groups / _alone(trace, spec)
    rates = []
    for policy in policies:
        result = Simulation(at_rate(trace, 2 * guess), num_groups, spec, _maker(policy, seed), seed=seed).run()
        rates.append(result.throughput())
    return max(rates)


def _alone(trace: Sequence[TraceRequest], spec: GroupSpec) -> float:
    """Seconds of a group that a request takes on average if nothing is cached and eight decode together."""
    cost, total = spec.cost, 0.0
    for r in trace:
        step = cost.base / 8 + cost.sequence + cost.kv * r.input_tokens
        total += cost.prefill_seconds(r.input_tokens, 0) + r.output_tokens * step
    return total / len(trace)


def _maker(policy: str, seed: int) -> Callable[[], Router]:
    return lambda: POLICIES[policy](seed)


def compare(
    trace: Sequence[TraceRequest],
    rate: float | None,
    num_groups: int,
    spec: GroupSpec,
    policies: Sequence[str],
    faults: Sequence[Fault] = (),
    seed: int = 0,
    ttft_target: float | None = None,
) -> list[Row]:
    """Run the trace, at so many requests a second (None: as it is), once for each policy."""
    trace = trace if rate is None else at_rate(trace, rate)
    return [
        Row(p, Simulation(trace, num_groups, spec, _maker(p, seed), faults, seed, ttft_target=ttft_target).run())
        for p in policies
    ]


def table(rows: Sequence[Row]) -> str:
    """Markdown, aligned."""
    lines = [HEADER, *(row.cells() for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
    text = ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines]
    text.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(text)


_COLORS = ("#c0392b", "#2980b9", "#27ae60", "#8e44ad", "#d68910", "#16a085", "#7f8c8d", "#2c3e50")


def picture(rows: Sequence[Row], title: str) -> str:
    """An SVG: how TTFT is distributed (log scale), and requests served over time, by policy."""
    width, height, left, top = 460, 300, 60, 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * (width + left) + 190}" height="{height + 110}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="22" font-size="15">{escape(title)}</text>',
    ]
    decades = [0.01, 0.1, 1.0, 10.0, 100.0, 1000.0]
    longest = max(row.result.seconds for row in rows)
    most = max(len(row.result.outcomes) for row in rows)

    def ttft_x(value: float) -> float:
        return left + width * (math.log10(min(max(value, decades[0]), decades[-1])) + 2) / 5

    second = 2 * left + width
    for value in decades:
        x = ttft_x(value)
        parts.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{top + height}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{top + height + 16}" text-anchor="middle">{value:g}</text>')
    for i in range(5):
        y = top + height * (1 - i / 4)
        for x in (left, second):
            parts.append(f'<line x1="{x}" y1="{y:.1f}" x2="{x + width}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{25 * i}%</text>')
        parts.append(f'<text x="{second - 6}" y="{y + 4:.1f}" text-anchor="end">{most * i // 4}</text>')
        x = second + width * i / 4
        parts.append(f'<text x="{x:.1f}" y="{top + height + 16}" text-anchor="middle">{longest * i / 4:.0f}</text>')
    parts.append(
        f'<text x="{left + width / 2}" y="{top + height + 38}" text-anchor="middle">TTFT (s), share below</text>'
    )
    parts.append(
        f'<text x="{second + width / 2}" y="{top + height + 38}" text-anchor="middle">time (s), requests served</text>'
    )
    for i, row in enumerate(rows):
        color = _COLORS[i % len(_COLORS)]
        outcomes = row.result.outcomes
        times = sorted(o.ttft for o in outcomes if o.ttft is not None)
        ends = sorted(o.finished_at for o in outcomes if o.ttft is not None)
        total = len(outcomes)
        marks = range(0, total, max(1, total // 200))
        shares = [(ttft_x(times[k]), top + height * (1 - (k + 1) / total)) for k in marks if k < len(times)]
        served = [
            (second + width * ends[k] / longest, top + height * (1 - (k + 1) / most)) for k in marks if k < len(ends)
        ]
        for points in (shares, served):
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8"/>')
        y = top + 14 + 18 * i
        x = second + width + 16
        parts.append(f'<line x1="{x}" y1="{y - 4}" x2="{x + 22}" y2="{y - 4}" stroke="{color}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 28}" y="{y}">{escape(row.policy)}</text>')
    return "\n".join([*parts, "</svg>\n"])
