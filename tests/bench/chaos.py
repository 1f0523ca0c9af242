"""Processes of a real server are killed and stopped while streams run; every stream must be what it is undisturbed.

    python tests/bench/chaos.py MODEL [--faults 20] [--groups 2] [--tensor-parallel-size 1] [--seed 0]

A server with so many worker groups is started; clients stream answers, greedy and sampled, one after the other. Each
fault hits a process that the seed chooses, of those behind the ingress: a leader, another rank, a group's replica or
the global scheduler, by SIGKILL or SIGSTOP. Then the cluster has the time to come back before the next one.

Printed: for each kind of fault how long the stream that waited longest went without a token (median, 95th percentile),
and what was wrong: streams that broke off, that said something else than undisturbed, that hung. Ends with 1 if
anything was.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

sys.path.append(str(Path(__file__).parents[1] / "cluster"))

from real_server import descendants, isolated_env

from pagedray.cluster.local_server import free_port

NUM_STREAMS = 4
UP_SECONDS = 180.0  # for all groups to be up (again)
SETTLE_SECONDS = 3.0  # that the next fault waits when they are
HANG_SECONDS = 120.0  # without a token

JOBS: list[dict[str, Any]] = [
    {"prompt": "One, two,", "temperature": 0},
    {"prompt": "The history of the lighthouse begins", "temperature": 0.8, "seed": 7, "presence_penalty": 0.5},
    {"prompt": "A recipe for bread:", "temperature": 1.0, "seed": 11, "top_p": 0.9, "n": 2},
    {"prompt": "Dear Ms. Baker,", "temperature": 0.7, "seed": 3, "stop": ["Sincerely"], "logprobs": 1},
]


class Server:
    def __init__(self, model: str, groups: int, tensor_parallel_size: int, home: str):
        engine = {"max_model_len": 1024, "cpu_threads": 1, "tensor_parallel_size": tensor_parallel_size}
        config = {
            "model_loading_config": {"model_id": "chaos", "model_source": os.path.abspath(model)},
            "engine_kwargs": engine,
            "deployment_config": {"num_replicas": groups},
        }
        path = Path(home, "config.yaml")
        path.write_text(json.dumps({"llm_configs": [config]}))
        port = free_port("127.0.0.1", 0)
        self.groups, self.ranks, self.log = groups, tensor_parallel_size, Path(home, "log")
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pagedray", "serve", str(path), "--port", str(port)],
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            env=isolated_env(Path(home)),
        )

    def of_kind(self, kind: str) -> list[int]:
        return sorted(pid for pid, title in descendants(self.process.pid).items() if title.startswith(f"ray::{kind}"))

    def metric(self, name: str) -> list[float]:
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        return [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} "))]

    def wait_up(self) -> None:
        """Until every group has joined."""
        deadline = time.monotonic() + UP_SECONDS
        while True:
            try:
                if len(self.metric("pagedray:num_requests_running")) == self.groups:
                    return
            except httpx.HTTPError:
                pass
            if self.process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the groups are not up after {UP_SECONDS:.0f} s:\n{self.log.read_text()}")
            time.sleep(0.3)


def stream(url: str, job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    body = {"model": "chaos", "max_tokens": 200, "stream": True, "stream_options": {"include_usage": True}, **job}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=HANG_SECONDS) as response:
        if response.status_code != 200:
            raise RuntimeError(f"status {response.status_code}: {response.read().decode()}")
        for line in response.iter_lines():
            if line == "data: [DONE]":
                return
            if line.startswith("data: "):
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise RuntimeError(chunk["error"]["message"])
                yield chunk
    raise RuntimeError("the stream broke off")


class Clients:
    """Threads that stream one job after the other until told to stop, and compare."""

    def __init__(self, url: str, expected: list[Any], seed: int):
        self.url, self.expected = url, expected
        self.wrong: list[str] = []
        self.num_done = 0
        self.faults: list[tuple[float, str, dict[int, float]]] = []  # when, what, and each thread's longest wait
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i, seed), daemon=True) for i in range(NUM_STREAMS)]
        for thread in self._threads:
            thread.start()

    def fault(self, what: str) -> None:
        with self._lock:
            self.faults.append((time.monotonic(), what, {}))

    def finish(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(2 * HANG_SECONDS)
            if thread.is_alive():
                self.wrong.append("a stream hangs")

    def _run(self, number: int, seed: int) -> None:
        rng = random.Random(f"{seed} {number}")
        while not self._over.is_set():
            index = rng.randrange(len(JOBS))
            try:
                answer = collect(self._chunks(number, JOBS[index]))
                if answer != self.expected[index]:
                    self.wrong.append(f"{JOBS[index]['prompt']!r}: {answer} instead of {self.expected[index]}")
            except Exception as error:
                self.wrong.append(f"{JOBS[index]['prompt']!r}: {error!r}")
                time.sleep(1)
            self.num_done += 1

    def _chunks(self, number: int, job: dict[str, Any]) -> Iterator[dict[str, Any]]:
        began = previous = time.monotonic()
        for chunk in stream(self.url, job):
            now = time.monotonic()
            with self._lock:
                for at, _, waits in self.faults[-1:]:
                    if began < at:
                        waits[number] = max(waits.get(number, 0.0), now - max(previous, at))
            previous = now
            yield chunk


def collect(chunks: Iterator[dict[str, Any]]) -> Any:
    texts: dict[int, str] = defaultdict(str)
    logprobs: dict[int, list[Any]] = defaultdict(list)
    reasons, ids, usage = {}, set(), None
    for chunk in chunks:
        ids.add(chunk["id"])
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
            logprobs[choice["index"]] += (choice.get("logprobs") or {}).get("tokens", [])
            reasons[choice["index"]] = choice["finish_reason"] or reasons.get(choice["index"])
    assert len(ids) == 1, f"{len(ids)} ids in one stream"
    assert usage is not None, "no usage"
    return dict(texts), dict(logprobs), reasons, usage["prompt_tokens"], usage["completion_tokens"]


def percentiles(values: list[float]) -> str:
    ordered = sorted(values)
    high = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return f"median {statistics.median(ordered):.2f} s, 95% {high:.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as home:
        server = Server(args.model, args.groups, args.tensor_parallel_size, home)
        try:
            server.wait_up()
            expected = [collect(stream(server.url, job)) for job in JOBS]
            clients = Clients(server.url, expected, args.seed)
            kinds = ["Leader", "GlobalScheduler", "ServeReplica:pagedray:WorkerGroup"]
            kinds += ["Rank"] * (args.tensor_parallel_size > 1)
            for number in range(args.faults):
                time.sleep(SETTLE_SECONDS)
                kind = kinds[number % len(kinds)]
                how = rng.choice([signal.SIGKILL, signal.SIGSTOP])
                victim = rng.choice(server.of_kind(kind))
                clients.fault(f"{kind.rpartition(':')[2]} {how.name}")
                os.kill(victim, how)
                print(f"{number + 1}: {clients.faults[-1][1]}", flush=True)
                deadline = time.monotonic() + UP_SECONDS
                while Path(f"/proc/{victim}").exists() and time.monotonic() < deadline:
                    time.sleep(0.2)  # what was stopped is found, and killed
                server.wait_up()
            clients.finish()
            left = [n for n in ("running", "waiting", "in_flight") if any(server.metric(f"pagedray:num_requests_{n}"))]
            if left:
                time.sleep(3)
                left = [n for n in left if any(server.metric(f"pagedray:num_requests_{n}"))]
            resumed = sum(server.metric("pagedray:request_resumed_total"))
        finally:
            server.process.send_signal(signal.SIGINT)
            server.process.wait(90)
    by_kind: dict[str, list[float]] = defaultdict(list)
    for _, what, waits in clients.faults:
        if waits:
            by_kind[what].append(max(waits.values()))
    for what, waits in sorted(by_kind.items()):
        print(f"{what}: {len(waits)} faults, the stream that waited longest: {percentiles(waits)}")
    print(f"{clients.num_done} answers, {resumed:.0f} resumptions, {len(clients.wrong)} wrong; busy: {left or 'none'}")
    for line in clients.wrong:
        print(line)
    sys.exit(bool(clients.wrong or left))


if __name__ == "__main__":
    main()
