"""The cores and the memory that a process may use, which in a container are its limit's and not its machine's."""

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Those that this process may run on, and no more than its container's limit, which is a share of time: threads
    beyond it would use up the share early, and all of them stand still for the rest of each period.
    """
    pinned = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(pinned, int(_cpu_limit(cgroup))))


def _cpu_limit(cgroup: Path) -> float:
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


def memory_limit(cgroup: Path = _CGROUP) -> int | None:
    """Bytes, of cgroup v2's `memory.max` or v1's limit; None where there is none."""
    for path in (cgroup / "memory.max", cgroup / "memory" / "memory.limit_in_bytes"):
        try:
            return int(path.read_text())
        except (OSError, ValueError):
            continue  # no such file, or no limit ("max")
    return None


def available_memory(cgroup: Path = _CGROUP, meminfo: Path = _MEMINFO) -> int:
    """Bytes that can be taken without swapping, within the container's limit where there is one.

    Files that are cached count as free, in the machine and in the container: they give way.
    """
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        free = _table(meminfo)["MemAvailable"] * 1024
    except (OSError, KeyError, ValueError):
        pass
    limit = memory_limit(cgroup)
    if limit is None:
        return free
    try:
        return max(0, min(free, limit - _memory_in_use(cgroup)))
    except (OSError, KeyError, ValueError):
        return min(free, limit)


def _memory_in_use(cgroup: Path) -> int:
    """Bytes of a container, its cached files left out."""
    if (cgroup / "memory.max").exists():
        used, prefix = cgroup / "memory.current", ""
    else:
        cgroup = cgroup / "memory"
        used, prefix = cgroup / "memory.usage_in_bytes", "total_"
    stat = _table(cgroup / "memory.stat")
    return int(used.read_text()) - stat[f"{prefix}active_file"] - stat[f"{prefix}inactive_file"]


def _table(path: Path) -> dict[str, int]:
    """A file with a name and a number in each line."""
    rows = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}
