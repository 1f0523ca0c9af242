"""Turns as they were recorded, and the Markdown table made of them."""

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .workloads import BANDWIDTH, ITL, TTFT, WORKLOADS, Target, Workload


@dataclass(frozen=True)
class Turn:
    """One contestant's turn at one workload, or, with `unavailable`, why it had none."""

    workload: str
    contestant: str
    commit: str
    time: str  # ISO 8601, UTC
    round: int = 0
    bandwidth: float = 0.0  # bytes a second, read before and after the turn
    figures: dict[str, Any] = field(default_factory=dict)
    unavailable: str | None = None


def read_turns(path: Path) -> list[Turn]:
    """All turns in a file that `append_turn` wrote: JSON, one a line. None where there is no file."""
    if not path.exists():
        return []
    return [Turn(**json.loads(line)) for line in path.read_text().splitlines()]


def append_turn(path: Path, turn: Turn) -> None:
    """Each turn as soon as it is over, so that a run that breaks off loses nothing, and a second one adds to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        print(json.dumps(asdict(turn)), file=file)


_HEAD = (
    "| | who | tokens/s | TTFT p50 (ms) | ITL p95 (ms) | memory (GB/s) | PagedRay against it | target |",
    "|---|---|---|---|---|---|---|---|",
)
_NAMES = {"pagedray": "PagedRay", "vllm": "vLLM"}
_LABELS = {TTFT: "TTFT ", ITL: "ITL "}


def markdown(turns: Iterable[Turn], workloads: Sequence[str] = tuple(WORKLOADS)) -> str:
    """One table: a contestant a row with its medians; ratios of medians stand with the peer they compare with."""
    by_workload: dict[str, list[Turn]] = {name: [] for name in workloads}
    for turn in turns:
        if turn.workload in by_workload:
            by_workload[turn.workload].append(turn)
    lines = list(_HEAD)
    for name, its in by_workload.items():
        if its:
            lines += _rows(WORKLOADS[name], its)
    return "\n".join(lines)


def _rows(workload: Workload, turns: list[Turn]) -> list[str]:
    measured: dict[str, list[Turn]] = {}
    missing: dict[str, str] = {}
    for turn in turns:
        if turn.unavailable is None:
            measured.setdefault(turn.contestant, []).append(turn)
        else:
            missing[turn.contestant] = turn.unavailable
    rows = []
    title = f"**{workload.name}** {workload.about}"
    for who in workload.contestants:
        peer, precision = who.split(":")
        label = f"{_NAMES.get(peer, peer)} {precision}"
        if who in measured:
            its = measured[who]
            values = [t.figures[workload.metric] for t in its]
            memory = [t.bandwidth / 1e9 for t in its]
            offline = workload.http and "median_ttft_ms" not in its[0].figures
            cells = [
                f"{label}{' (offline)' if offline else ''}",
                f"{statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f}, {len(values)} turns)",
                _median(its, TTFT),
                _median(its, ITL),
                f"{min(memory):.0f}-{max(memory):.0f}",
                *_against(who, workload, measured),
            ]
        elif who in missing:
            reason = missing[who].replace("|", "\\|").replace("\n", " ")
            cells = [label, f"not measured: {reason}", "", "", "", "", ""]
        else:
            continue
        rows.append(f"| {title} | {' | '.join(cells)} |")
        title = ""
    return rows


def _median(turns: list[Turn], metric: str) -> str:
    values = [t.figures[metric] for t in turns if t.figures.get(metric) is not None]
    return f"{statistics.median(values):.0f}" if values else ""


def _against(who: str, workload: Workload, measured: dict[str, list[Turn]]) -> tuple[str, str]:
    """The ratios of PagedRay to `who`, and the targets. The memory's target stands with PagedRay itself."""
    ratios, targets = [], []
    for target in workload.targets:
        ours = measured.get(f"pagedray:{target.ours}")
        mine = target.peer == who or (target.peer == "memory" and who == f"pagedray:{target.ours}")
        if not mine:
            continue
        label = _LABELS.get(target.metric, "")
        if ours is None:
            ratios.append(f"{target.ours} {label}not measured")
            targets.append(target.words)
            continue
        value = _ratio(target, ours, measured[who])
        of_memory = " of the memory's bandwidth" if target.metric == BANDWIDTH else ""
        ratios.append(f"{target.ours} {label}{value:.2f}{of_memory}")
        targets.append(f"{target.words} {'met' if target.met(value) else 'missed'}")
    return "; ".join(ratios), "; ".join(targets)


def _ratio(target: Target, ours: list[Turn], theirs: list[Turn]) -> float:
    if target.metric == BANDWIDTH:  # each turn against the memory in its own minute
        return statistics.median(t.figures[BANDWIDTH] for t in ours)
    mine, its = (statistics.median(t.figures[target.metric] for t in turns) for turns in (ours, theirs))
    return mine / its
