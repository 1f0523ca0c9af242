"""A real server for tests: `pagedray serve` in a process of its own, with its own HOME, Ray and port."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from pagedray.cluster.local_server import free_port


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
        while busy := {n: v for n in names if (v := self.metric(f"pagedray:{n}"))}:
            assert time.monotonic() < deadline, f"still busy after {seconds} s: {busy}"
            time.sleep(0.05)


def isolated_env(home: Path) -> dict[str, str]:
    """The environment for a Ray of one's own: nothing of the user's, no token authentication."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    cache = os.environ.get("PAGEDRAY_CACHE") or str(Path.home() / ".cache" / "pagedray")
    return env | {"HOME": str(home), "PAGEDRAY_CACHE": cache, "RAY_AUTH_MODE": "disabled", "PYTHONUNBUFFERED": "1"}


@pytest.fixture(scope="session")
def start_server(tmp_path_factory):
    """A function that serves a model or config with these flags, and gives a `Server` once it answers."""
    running = []

    def start(*arguments: str, timeout: float = 180.0) -> Server:
        home = tmp_path_factory.mktemp("home")
        log, port = home / "log", free_port("127.0.0.1", 0)
        with log.open("w") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "pagedray", "serve", *arguments, "--port", str(port)],
                env=isolated_env(home),
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        server = Server(f"http://127.0.0.1:{port}", process, log)
        running.append(server)
        deadline = time.monotonic() + timeout
        while "ready" not in log.read_text():
            assert process.poll() is None, f"pagedray serve ended with {process.returncode}:\n{log.read_text()}"
            assert time.monotonic() < deadline, f"not ready after {timeout} s:\n{log.read_text()}"
            time.sleep(0.2)
        return server

    yield start
    for server in running:
        server.process.send_signal(signal.SIGINT)
    for server in running:
        server.process.wait(timeout=60)


@pytest.fixture(scope="session")
def server(start_server, demo_model):
    return start_server(str(demo_model), "--served-model-name", "demo", "--max-model-len", "2048")
