"""A served cluster over hosts of network namespaces, and the faults that are done to it: see `tests/bench/chaos.py`.

Every fault has a name, such as "Leader SIGKILL" or "network cut 1.5 s", and says whether it breaks connections of
clients: an ingress or a proxy that dies takes them along, and they must ask again. Nothing else may be noticed.
"""

import json
import os
import random
import signal
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
FOUND_SECONDS = 60.0  # for what hangs to be found out, and gone
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

# What a round of twenty faults is made of. A stop without a time is for ever: somebody must find out. SIGTERM is for
# Ray's handler, which may take a while: until the main thread of a process has something to do.
DECK = (
    *("Leader SIGKILL", "Leader SIGTERM", "Leader SIGSTOP", "Rank SIGKILL", "Rank SIGTERM", "Rank SIGSTOP"),
    *("replica SIGKILL", "replica SIGTERM", "Leader stopped 1 s", "Rank stopped 1 s", "replica stopped 1 s"),
    *("GlobalScheduler SIGKILL", "GlobalScheduler stopped 3 s", "KVStore SIGKILL", "KVStore stopped 2 s"),
    *("ingress SIGKILL", "proxy SIGKILL", "controller SIGKILL", "network cut 1.5 s", "network cut 14 s"),
)

# The same for who is in a hurry: a group that is built anew takes most of the time.
SHORT_DECK = (
    *("Leader SIGKILL", "Rank SIGKILL", "replica SIGTERM"),
    *("Leader stopped 1 s", "Rank stopped 1 s", "Rank stopped 1 s", "replica stopped 1 s", "ingress stopped 1 s"),
    *("GlobalScheduler SIGKILL", "GlobalScheduler SIGKILL", "GlobalScheduler stopped 2 s"),
    *("KVStore SIGKILL", "KVStore SIGKILL", "KVStore stopped 1 s", "ingress SIGKILL", "proxy SIGKILL"),
    *("controller SIGKILL", "network cut 1.5 s", "network cut 1.5 s", "network cut 2.5 s"),
)
_AHEAD = 20  # faults among which the next one is chosen
_LONG_CUT_SECONDS = 10.0  # of the network: groups on the other side are given up

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
    """`groups` worker groups of `ranks` ranks each, a host for each group as far as there are hosts.

    `env`: what the first host's Ray, its head, finds in its environment.
    """

    def __init__(
        self,
        network: Network,
        folder: Path,
        model: Path,
        groups: int,
        ranks: int,
        engine: dict[str, Any],
        env: dict[str, str] | None = None,
    ):
        self.network, self.groups, self.ranks = network, groups, ranks
        self.url = f"http://{network.hosts[0].address}:8000"
        self.log = folder / "log"
        first, *others = network.hosts
        cpus = ranks * -(-groups // len(network.hosts))
        first.start_ray(num_cpus=cpus, env=env, first=1)
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
        self.process = first.serve(path, self.log)
        for host in others:  # while Serve starts
            host.start_ray(first, num_cpus=cpus)

    def wait_up(self, seconds: float = UP_SECONDS) -> None:
        """Until every group has joined."""
        deadline = time.monotonic() + seconds
        while self.num_groups() != self.groups:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{self.groups} groups are not up:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.2)

    def num_groups(self) -> int:
        """As the scheduler has them; 0 while nobody answers."""
        with suppress(httpx.HTTPError, ValueError, KeyError):
            return len(httpx.get(f"{self.url}/groups", timeout=3).json()["data"])
        return 0

    def answers(self) -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        return False

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
    whole_after: float | None = None  # seconds until all groups were there again


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
    """Does faults to a cluster whose clients are `clients`; `say` is told of each.

    They come in the given order, but for those that must wait: a group is only taken away while another one serves, so
    what needs no group overtakes while one is built anew. Nothing waits for the end of a fault: cables are mended and
    processes go on when their time has come, whatever else has happened by then.

    Groups do not die while the network is cut for long: Ray 2.60 forgets to give back the cores of a group on the other
    side that it takes away meanwhile (github.com/ray-project/ray/issues/64696), and never places another one there.
    """

    def __init__(self, cluster: Cluster, clients: Clients, rng: random.Random, say: Callable[[str], None] = print):
        self.cluster, self.clients, self.rng, self.say = cluster, clients, rng, say
        self.numbers = 0
        self._whole: set[int] = set()  # processes of groups when last all groups were up: what may be hit
        self._num_up = 0  # groups
        self._missed: list[Fault] = []  # that took groups which have not come back
        self._hanging: dict[int, float] = {}  # process id → when it must have been found out
        self._passing: list[threading.Timer] = []  # what ends by itself
        self._cut_until = 0.0  # a cut of the network that groups do not outlive
        self._edge: Fault | None = None  # the last that took an ingress or proxy, until another one answers
        self._num_answers = 0  # since then

    def run(self, names: Sequence[str], settle: float, seconds: float = float("inf")) -> None:
        """All of these faults, none after so many seconds; returns when all is as it was."""
        left, began = list(names), time.monotonic()
        while left and time.monotonic() < began + seconds:
            name = self._wait_for(lambda: next((n for n in left[:_AHEAD] if self._may_come(n)), ""))
            left.remove(name)
            self.numbers += 1
            self.say(f"{time.strftime('%X')} {self.numbers}: {name}")
            self._do(name)
            settled = time.monotonic() + settle
            self._wait_for(lambda: time.monotonic() > settled)  # noqa: B023
        self._wait_for(
            lambda: not (self._passing or self._hanging or self._edge) and self._num_up == self.cluster.groups
        )

    def _wait_for(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + UP_SECONDS
        while True:
            self._look()
            if value := condition():
                return value
            assert time.monotonic() < deadline, f"{self._num_up} groups are up, {self.cluster.log.read_text()[-3000:]}"
            time.sleep(0.1)

    def _look(self) -> None:
        """What has changed by itself."""
        now = time.monotonic()
        self._passing = [t for t in self._passing if t.is_alive()]
        for pid, deadline in list(self._hanging.items()):
            if not Path(f"/proc/{pid}").exists():
                del self._hanging[pid]
            assert now < deadline, f"process {pid}, which hangs, is still there"
        if self._edge is not None:
            self._num_answers = self._num_answers + 1 if self.cluster.answers() else 0
            if self._num_answers == 5:
                self._edge.over, self._edge = time.monotonic() + 1.0, None
        self._num_up = self.cluster.num_groups()
        if self._num_up == self.cluster.groups and not self._hanging:
            now, whole = time.monotonic(), {pid for kind in _OF_A_GROUP for _, pid in self.cluster.pids(kind)}
            if whole - self._whole:
                for fault in self._missed:
                    fault.whole_after = now - fault.at
                self._missed.clear()
            self._whole = whole

    def _may_come(self, name: str) -> bool:
        kind, how = name.split()[:2]
        if kind == "network":
            all_up = self._num_up == self.cluster.groups and not self._missed
            return not self._passing and (float(name.split()[2]) < _LONG_CUT_SECONDS or all_up)
        if kind in _OF_A_GROUP and how != "stopped":
            others = self._num_up - len(self._hanging) - 1
            enough = others >= min(1, self.cluster.groups - 1)
            return enough and bool(self._victims(kind)) and time.monotonic() > self._cut_until
        return bool(self._victims(kind)) and not (kind in _EDGE and self._edge is not None)

    def _victims(self, kind: str) -> list[int]:
        pids = [pid for _, pid in self.cluster.pids(kind)]
        return [p for p in pids if p in self._whole] if kind in _OF_A_GROUP else pids

    def _do(self, name: str) -> None:
        kind, how, *rest = name.split()
        for_ = float(rest[0]) if rest else 0.0
        fault = self.clients.begin(name, breaks=kind in _EDGE and how == "SIGKILL")
        if kind == "network":
            first, *others = self.cluster.network.hosts
            self.cluster.network.partition([first], others)
            self._end_after(for_, self.cluster.network.heal)
            if for_ >= _LONG_CUT_SECONDS:
                self._cut_until = time.monotonic() + for_
            return
        pid = self.rng.choice(self._victims(kind))
        _signal(pid, signal.SIGSTOP if how == "stopped" else getattr(signal, how))
        if how == "stopped":
            self._end_after(for_, lambda: _signal(pid, signal.SIGCONT))
        else:
            self._whole.discard(pid)
            if kind in _OF_A_GROUP:
                self._missed.append(fault)
            if how == "SIGSTOP":
                self._hanging[pid] = time.monotonic() + FOUND_SECONDS
        if fault.breaks:
            self._edge, self._num_answers = fault, 0

    def _end_after(self, seconds: float, end: Callable[[], None]) -> None:
        self._passing.append(threading.Timer(seconds, end))
        self._passing[-1].start()


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it has ended by itself meanwhile, which does as well
        os.kill(pid, number)


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
