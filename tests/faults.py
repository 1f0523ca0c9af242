"""A served cluster over hosts of network namespaces, and the faults that are done to it: see `tests/bench/chaos.py`.

Every fault has a name, such as "Leader SIGKILL" or "network cut 1.5 s", and says whether it breaks connections of
clients: an ingress or a proxy that dies takes them along, and they must ask again. Nothing else may be noticed.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from hosts import Host, Network
from steady_load import Stream, collect

UP_SECONDS = 240.0  # for everything to be up (again)
BUSY_SECONDS = 60.0  # for the last blocks to be free when nobody asks any more
_TITLES = {
    "Leader": "ray::Leader",
    "Rank": "ray::Rank",
    "replica": "ray::ServeReplica:pagedray:WorkerGroup",
    "ingress": "ray::ServeReplica:pagedray:Ingress",
    "GlobalScheduler": "ray::GlobalScheduler",
    "KVStore": "ray::KVStore",
    "controller": "ray::ServeController",
    "proxy": "ray::ProxyActor",
}
_EDGE = ("ingress", "proxy")  # what holds clients' connections
_OF_A_GROUP = ("Leader", "Rank", "replica")

# What a round of twenty faults is made of. A stop without a time is for ever: somebody must find out.
DECK = (
    *("Leader SIGKILL", "Leader SIGKILL", "Leader SIGSTOP", "Rank SIGKILL", "Rank SIGKILL", "Rank SIGSTOP"),
    *("replica SIGKILL", "Leader stopped 1 s", "Rank stopped 1 s", "replica stopped 1 s"),
    *("GlobalScheduler SIGKILL", "GlobalScheduler SIGKILL", "GlobalScheduler stopped 3 s"),
    *("KVStore SIGKILL", "KVStore stopped 2 s", "ingress SIGKILL", "proxy SIGKILL", "controller SIGKILL"),
    *("network cut 1.5 s", "network cut 14 s"),
)

# The same for who is in a hurry: a group that is built anew takes most of the time.
SHORT_DECK = (
    *("Leader SIGKILL", "Leader SIGSTOP", "Rank SIGKILL", "replica SIGKILL"),
    *("Leader stopped 1 s", "Rank stopped 1 s", "replica stopped 1 s", "ingress stopped 1 s"),
    *("GlobalScheduler SIGKILL", "GlobalScheduler SIGKILL", "GlobalScheduler stopped 2 s"),
    *("KVStore SIGKILL", "KVStore SIGKILL", "KVStore stopped 1 s", "ingress SIGKILL", "proxy SIGKILL"),
    *("controller SIGKILL", "network cut 1.5 s", "network cut 1.5 s", "network cut 2.5 s"),
)

# What is in the Ray cluster: run on the first host.
_STATE = """
    import json, ray
    from collections import Counter
    from ray._private.state import actors
    from ray.util import placement_group_table
    ray.init("auto", logging_level="ERROR", log_to_driver=False)
    groups = [t for t in placement_group_table().values() if t["state"] != "REMOVED"]
    alive = Counter(a["ActorClassName"] for a in actors().values() if a["State"] != "DEAD")
    print("state:", json.dumps({"placement groups": len(groups), "actors": alive}))
"""


class Cluster:
    """`groups` worker groups of `ranks` ranks each, a host for each group as far as there are hosts."""

    def __init__(self, network: Network, folder: Path, model: Path, groups: int, ranks: int, engine: dict[str, Any]):
        self.network, self.groups, self.ranks = network, groups, ranks
        self.url = f"http://{network.hosts[0].address}:8000"
        self.log = folder / "log"
        first, *others = network.hosts
        cpus = ranks * -(-groups // len(network.hosts))
        first.start_ray(num_cpus=cpus, first=1)
        for host in others:
            host.start_ray(first, num_cpus=cpus)
        config = {
            "model_loading_config": {"model_id": "chaos", "model_source": str(model)},
            "engine_kwargs": {"tensor_parallel_size": ranks, "cpu_threads": 1, **engine},
            "deployment_config": {"num_replicas": groups, "health_check_period_s": 1.0},
            "placement_group_config": {"bundle_per_worker": {"CPU": 1}, "strategy": "STRICT_PACK"},
        }
        # On the first host, whose side of a cut is the clients'.
        ingress = {"ray_actor_options": {"num_cpus": 0, "resources": {"first": 0.01}}, "health_check_period_s": 1.0}
        path = folder / "config.yaml"
        scheduler = {"migration_limit": 20}  # many more faults come than a request should ever meet
        path.write_text(json.dumps({"llm_configs": [config], "ingress": ingress, "scheduler": scheduler}))
        command = ["-m", "pagedray", "serve", str(path), "--host", "0.0.0.0", "--ray-address", "auto"]
        with self.log.open("w") as log:
            self.process = first.popen(sys.executable, *command, stdout=log, stderr=subprocess.STDOUT)

    def wait_up(self, seconds: float = UP_SECONDS) -> None:
        """Until every group has joined, and nothing that was stopped is still there."""
        deadline = time.monotonic() + seconds
        while self.num_groups() != self.groups:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{self.groups} groups are not up:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.2)

    def num_groups(self) -> int:
        """As the scheduler has them; 0 while nobody answers."""
        with suppress(httpx.HTTPError, ValueError, KeyError):
            return len(httpx.get(f"{self.url}/groups", timeout=10).json()["data"])
        return 0

    def pids(self, kind: str) -> list[tuple[Host, int]]:
        return [
            (host, pid)
            for host in self.network.hosts
            for pid, title in sorted(host.processes().items())
            if title.startswith(_TITLES[kind])
        ]

    def metric(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        mine = (f"pagedray_{name}{{", f"pagedray_{name} ")
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(mine))

    def busy(self) -> dict[str, float]:
        names = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_requests_in_flight"]
        return {name: value for name in [*names, "num_requests_queued"] if (value := self.metric(name))}

    def state(self) -> dict[str, Any]:
        """Actors, placement groups, processes and shared files: what there is while nothing is asked."""
        output = self.network.hosts[0].python("\n".join(x[4:] for x in _STATE.splitlines()))
        line = next(x for x in output.splitlines() if x.startswith("state:"))
        state = json.loads(line.removeprefix("state:"))
        # A store that died comes again with the next offer; it may or may not be there.
        state["actors"].pop("KVStore", None)
        state["processes"] = {kind: len(self.pids(kind)) for kind in _TITLES if kind != "KVStore"}
        files = [f"{h.name}/dev/shm/{name}" for h in self.network.hosts for name in h.run("ls", "/dev/shm").split()]
        state["shared files"] = len([f for f in files if "plasma" not in f])
        return state


@dataclass
class Fault:
    name: str
    at: float
    waits: dict[int, float] = field(default_factory=dict)  # client → its longest wait for a token since then
    breaks: bool = False  # clients' connections
    over: float = float("inf")  # when what it broke was back


class Clients:
    """Threads that stream one job after the other until told to stop, and compare.

    Where a fault has taken the connection along, they ask again, as a client must.
    """

    def __init__(self, url: str, jobs: Sequence[dict[str, Any]], expected: list[Any], num: int, seed: int):
        self.url, self.jobs, self.expected = url, jobs, expected
        self.wrong: list[str] = []
        self.num_done = self.num_again = 0
        self.faults: list[Fault] = []
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i, seed), daemon=True) for i in range(num)]
        for thread in self._threads:
            thread.start()

    def finish(self, seconds: float = 240.0) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(seconds)
            if thread.is_alive():
                self.wrong.append("a stream hangs")

    def _run(self, number: int, seed: int) -> None:
        rng = random.Random(f"{seed} {number}")
        while not self._over.is_set():
            index = rng.randrange(len(self.jobs))
            while wrong := self._ask(number, index):
                if wrong != "again":
                    print(f"wrong: {wrong[:300]}", flush=True)
                    self.wrong.append(f"{self.jobs[index]['prompt'][:20]!r}: {wrong}")
                    time.sleep(1.0)
                    break
                self.num_again += 1
                time.sleep(0.3)
            self.num_done += 1

    def _ask(self, number: int, index: int) -> str:
        began = time.monotonic()
        try:
            said = collect(self._chunks(number, self.jobs[index]))
        except Exception as error:
            with self._lock:
                excused = any(f.breaks and f.over > began for f in self.faults)
            return "again" if excused else f"{time.strftime('%X')} after {time.monotonic() - began:.1f} s: {error!r}"
        return "" if said == self.expected[index] else f"{said} instead of {self.expected[index]}"

    def _chunks(self, number: int, job: dict[str, Any]):
        began = previous = time.monotonic()
        for chunk in Stream(self.url, {"model": "chaos", **job}):
            now = time.monotonic()
            with self._lock:
                for fault in self.faults[-1:]:
                    if began < fault.at:
                        fault.waits[number] = max(fault.waits.get(number, 0.0), now - max(previous, fault.at))
            previous = now
            yield chunk

    def begin(self, name: str, breaks: bool) -> Fault:
        fault = Fault(name, time.monotonic(), breaks=breaks)
        with self._lock:
            self.faults.append(fault)
        return fault


class Chaos:
    """Does faults to a cluster whose clients are `clients`; `say` is told of each."""

    def __init__(self, cluster: Cluster, clients: Clients, rng: random.Random, say: Callable[[str], None] = print):
        self.cluster, self.clients, self.rng, self.say = cluster, clients, rng, say
        self.numbers = 0

    def run(self, names: Sequence[str], settle: float, seconds: float = float("inf")) -> None:
        """One fault after the other, none after so many seconds.

        A group is only lost while all are up: so there is another one, if there are several.
        """
        began = time.monotonic()
        for name in names:
            kind = name.split()[0]
            if kind in _OF_A_GROUP or name == "network cut 14 s":
                self.cluster.wait_up()
            time.sleep(settle)
            if time.monotonic() > began + seconds:
                break
            self.numbers += 1
            self.say(f"{time.strftime('%X')} {self.numbers}: {name}")
            if kind == "network":
                self._cut(name)
            else:
                self._hit(name, kind)
        self.cluster.wait_up()

    def _cut(self, name: str) -> None:
        first, *others = self.cluster.network.hosts
        self.clients.begin(name, breaks=False)
        self.cluster.network.partition([first], others)
        time.sleep(float(name.split()[2]))
        self.cluster.network.heal()

    def _hit(self, name: str, kind: str) -> None:
        deadline = time.monotonic() + UP_SECONDS
        while not (found := self.cluster.pids(kind)):
            assert time.monotonic() < deadline, f"no {kind} is there"
            time.sleep(0.2)
        _, pid = self.rng.choice(found)
        how = name.split()[1]
        breaks = kind in _EDGE and how == "SIGKILL"
        fault = self.clients.begin(name, breaks)
        with suppress(ProcessLookupError):  # it has ended by itself meanwhile, which does as well
            os.kill(pid, signal.SIGKILL if how == "SIGKILL" else signal.SIGSTOP)
            if how == "stopped":
                time.sleep(float(name.split()[2]))
                os.kill(pid, signal.SIGCONT)
        if how == "SIGSTOP":
            _wait_for_end(pid, deadline)
        if breaks:
            self._wait_answered(deadline)
            fault.over = time.monotonic() + 1.0

    def _wait_answered(self, deadline: float) -> None:
        """Until clients are answered again, by the ingress and the proxy that have come."""
        good = 0
        while good < 5:
            assert time.monotonic() < deadline, "no ingress has come again"
            time.sleep(0.2)
            with suppress(httpx.HTTPError):
                good = good + 1 if httpx.get(f"{self.cluster.url}/health", timeout=5).status_code == 200 else 0


def _wait_for_end(pid: int, deadline: float) -> None:
    """What was stopped is found out, and killed."""
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"process {pid}, which hangs, is still there"
        time.sleep(0.2)


def deal(num_faults: int, rng: random.Random, kinds: Sequence[str] = DECK) -> list[str]:
    """Names of faults: the deck again and again, each time shuffled."""
    names: list[str] = []
    while len(names) < num_faults:
        names += rng.sample(kinds, len(kinds))
    return names[:num_faults]


def leaks(cluster: Cluster, before: dict[str, Any]) -> list[str]:
    """What is held or there that was not before, once everything has had the time to end."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        busy, now = cluster.busy(), cluster.state()
        left = [f"busy: {busy}"] * bool(busy)
        left += [f"{what}: {now[what]}, before: {before[what]}" for what in before if now[what] != before[what]]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(1.0)
