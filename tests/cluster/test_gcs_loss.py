"""Ray's GCS dies, as it does with a head node, and comes back with its Redis: nobody who asks notices.

A worker group dies meanwhile. Its streams go on at the other one at once, and Serve builds it anew when it can.
"""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import tiny_model
from faults import Clients, Cluster, leaks
from steady_load import answer
from waiting import wait_until

pytestmark = [
    pytest.mark.serve,
    pytest.mark.skipif(not os.environ.get("PAGEDRAY_LONG_TESTS"), reason="takes minutes: set PAGEDRAY_LONG_TESTS=1"),
    pytest.mark.skipif(
        not shutil.which("redis-server"), reason="no redis-server; on Debian: apt-get install redis-server"
    ),
]

JOBS = [
    {"prompt": "One, two,", "temperature": 0, "max_tokens": 700},
    {"prompt": "abc" * 40, "temperature": 1.0, "seed": 5, "n": 2, "presence_penalty": 0.5, "max_tokens": 300},
]
REDIS_PORT = 6390  # a host is alone in its network


@pytest.fixture(scope="module")
def tiny_folder(tiny_llama, tmp_path_factory):
    return tiny_model.save(tiny_llama, tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048, eos_token_id=299)


class GCS:
    """The process of a host, and how to start it again as something that looks after processes would."""

    def __init__(self, host):
        self.host = host
        (self.pid,) = (pid for pid, title in host.processes().items() if "/gcs_server " in title)
        self.command = Path(f"/proc/{self.pid}/cmdline").read_text().rstrip("\0").split("\0")
        environ = Path(f"/proc/{self.pid}/environ").read_text().rstrip("\0").split("\0")
        self.env = dict(line.split("=", 1) for line in environ)

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)

    def start(self):
        return self.host.popen(*self.command, env=self.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.mark.timeout(400)
def test_gcs_dies_and_comes_back(start_hosts, tiny_folder, tmp_path):
    engine = {"dtype": "float32", "max_model_len": 2048, "kv_cache_memory": "32MiB"}
    with start_hosts(1) as network:
        (host,) = network.hosts
        redis = ["redis-server", "--port", str(REDIS_PORT), "--save", "", "--dir", str(host.home)]
        host.popen(*redis, stdout=subprocess.DEVNULL)
        wait_until(lambda: "PONG" in host.run("sh", "-c", f"redis-cli -p {REDIS_PORT} ping || true"))
        env = {"RAY_REDIS_ADDRESS": f"127.0.0.1:{REDIS_PORT}"}
        cluster = Cluster(network, tmp_path, tiny_folder, groups=2, ranks=1, engine=engine, env=env)
        cluster.wait_up()
        expected = [answer(cluster.url, {"model": "chaos", **job}) for job in JOBS]
        before = cluster.state()
        clients = Clients(cluster.url, JOBS, expected, num=2, seed=0)

        def goes_on():
            done = clients.num_done
            wait_until(lambda: clients.num_done > done + 3, 60, lambda: str(clients.wrong))

        goes_on()
        gcs = GCS(host)
        gcs.kill()
        goes_on()
        _, leader = cluster.pids("Leader")[0]
        os.kill(leader, signal.SIGKILL)
        wait_until(lambda: cluster.num_groups() == 1, 30)
        goes_on()
        time.sleep(3.0)
        gcs.start()
        cluster.wait_up()
        goes_on()
        clients.finish()
        assert not clients.wrong, f"{len(clients.wrong)} of {clients.num_done}: {clients.wrong[:3]}"
        assert clients.num_again == 0
        assert leaks(cluster, before) == []
