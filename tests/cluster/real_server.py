"""A real server for tests: `pagedray serve` in a process of its own, with its own HOME, Ray and port."""

import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from pagedray.kernels.cache import cache_root


@dataclass
class Server:
    url: str
    process: subprocess.Popen
    log: Path

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def wait_idle(self, seconds: float) -> None:
        """Until nothing runs, waits, or holds a block."""
        names = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_requests_in_flight"]
        deadline = time.monotonic() + seconds
        while busy := {n: v for n in names if (v := self.metric(f"pagedray_{n}"))}:
            assert time.monotonic() < deadline, f"still busy after {seconds} s: {busy}"
            time.sleep(0.05)


def isolated_env(home: Path) -> dict[str, str]:
    """The environment for a Ray of one's own: nothing of the user's, no token authentication."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    own = {"HOME": str(home), "PAGEDRAY_CACHE": str(cache_root()), "RAY_AUTH_MODE": "disabled"}
    return env | own | {"PYTHONUNBUFFERED": "1"}


def descendants(pid):
    """Process ids and titles of everything that `pid` has started."""
    parents, titles = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            titles[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        except OSError:
            pass
    found, level = {}, {pid}
    while level:
        level = {p for p, parent in parents.items() if parent in level}
        found |= {p: titles[p] for p in level}
    return found
