"""How many cores a process has to compute with."""

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Those that this process may run on, and no more than its container's limit, which is a share of time: threads
    beyond it would use up the share early, and all of them stand still for the rest of each period.
    """
    pinned = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(pinned, int(_limit(cgroup))))


def _limit(cgroup: Path) -> float:
    """In cores, of cgroup v2's `cpu.max` or v1's quota; a large number where there is none."""
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if int(quota) > 0:
            return int(quota) / int(period)
    except (OSError, ValueError):
        pass  # no such files, or no limit ("max")
    return 1e6
