"""`server`: a real one for all tests of a module, and `start_server` for those that want their own.

Not for the session: each is a Ray cluster, which takes a tenth of a core when nobody asks it anything.
"""

import signal
import subprocess
import sys
import time

import pytest
from real_server import Server, isolated_env

from pagedray.cluster.local_server import free_port


@pytest.fixture(scope="module")
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


@pytest.fixture(scope="module")
def server(start_server, demo_model, tmp_path_factory):
    files = str(tmp_path_factory.mktemp("files"))
    return start_server(
        str(demo_model), "--served-model-name", "demo", "--max-model-len", "2048", "--files-path", files
    )
