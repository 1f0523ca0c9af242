"""TTFT by where a prompt's KV comes from: nowhere, another node's store, this node's store, this group's device.

    python tests/bench/kv_reuse.py MODEL --hosts 2        # other node; needs root: hosts are network namespaces
    python tests/bench/kv_reuse.py MODEL                  # same node: two groups on this machine
    python tests/bench/kv_reuse.py MODEL --publish        # what publishing costs those who generate meanwhile

Two groups, and nothing else for them to do. A prompt is computed by one of them; while that one's leader is stopped, it
is asked again, which goes to the other: that is the fetch, and once more is the device. Every line is the median of
`--rounds` prompts, so ratios are of one run. The groups share this machine's cores with whatever runs on it. Each time
that counts follows short requests: some virtual machines take 2 us for a page that was not touched for a second, which
makes 30 to 60 ms of a process that had nothing to do.

`--publish` runs one engine in this process. Its decode steps are timed in turns with and without a thread that packs
runs of blocks without a pause, as the leader's does while a prompt is published, and the work that the engine's own
thread does for it.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "cluster")]

from hosts import Network  # noqa: E402
from real_server import isolated_env  # noqa: E402

from pagedray.cluster.local_server import free_port  # noqa: E402


def ttft(url: str, prompt: list[int]) -> float:
    """Seconds to the first token, of processes that are awake."""
    with ThreadPoolExecutor(2) as both_groups:
        list(both_groups.map(lambda i: ask(url, [i]), range(10, 14)))
    return ask(url, prompt)


def ask(url: str, prompt: list[int]) -> float:
    body = {"model": "m", "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    began = time.perf_counter()
    httpx.post(f"{url}/v1/completions", json=body, timeout=300).raise_for_status()
    return time.perf_counter() - began


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


def wait_until(condition, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.05)


class Paused:
    """A leader that is stopped for a moment: its reports grow old, so that what comes goes to the other group.

    It goes on when that has happened, long before it would be taken for dead.
    """

    def __init__(self, pid: int):
        self.pid = pid
        self._timer = threading.Timer(2.7, os.kill, (pid, signal.SIGCONT))

    def __enter__(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        self._timer.start()
        time.sleep(1.2)

    def __exit__(self, *_: object) -> None:
        self._timer.join()


def leaders() -> list[int]:
    """The processes of worker groups' leaders on this machine, namespaces or not."""
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [pid for pid in pids if _read(pid, "cmdline").startswith("ray::Leader")]


def cpu_time(pid: int) -> int:
    fields = _read(pid, "stat").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def _read(pid: int, name: str) -> str:
    try:
        return (Path("/proc") / str(pid) / name).read_text()
    except OSError:
        return ""


def measure(url: str, pids: list[int], lengths: list[int], rounds: int, source: str) -> None:
    draw = random.Random(0)
    for _ in range(12):  # both groups learn what their steps take
        ask(url, [draw.randrange(10, 40000) for _ in range(600)])
    for length in lengths:
        cold, fetched, device, computed = [], [], [], 0
        for _ in range(rounds):
            prompt = [draw.randrange(10, 40000) for _ in range(length)]
            runs = metric(url, "pagedray_kv_store_published_total")
            before = {pid: cpu_time(pid) for pid in pids}
            cold.append(ttft(url, prompt))
            holder = max(pids, key=lambda pid: cpu_time(pid) - before[pid])
            wait_until(lambda: metric(url, "pagedray_kv_store_published_total") > runs, 60, "it is published")  # noqa: B023
            time.sleep(1.5)
            fetches = metric(url, "pagedray_kv_fetches_total")
            with Paused(holder):
                seconds = ttft(url, prompt)
            time.sleep(0.7)  # a group reports twice a second
            if metric(url, "pagedray_kv_fetches_total") > fetches:
                fetched.append(seconds)
            else:
                computed += 1  # fetching would not have been faster, the scheduler thought
            device.append(ttft(url, prompt))
        shown = {"recompute": cold, source: fetched, "device": device}
        medians = {name: statistics.median(times) for name, times in shown.items() if times}
        line = ", ".join(f"{name} {1000 * t:.0f} ms" for name, t in medians.items())
        ratio = f", {source} / recompute {medians[source] / medians['recompute']:.2f}" if fetched else ""
        print(
            f"{length} tokens: {line}{ratio}" + (f", computed instead {computed} times" if computed else ""), flush=True
        )
    seconds, predicted = (metric(url, f"pagedray_kv_fetch_{n}_total") for n in ("seconds", "predicted_seconds"))
    print(f"fetches took {seconds:.2f} s, and were reckoned to take {predicted:.2f} s")


def publish_cost(model: str, batch: int, rounds: int) -> None:
    """Milliseconds of a decode step of `batch` sequences, alone and while runs of blocks are packed beside it."""
    from pagedray.cluster.kv_connector import KVThreads
    from pagedray.scheduler.request import Request, SamplingParams
    from pagedray.workers.config import EngineConfig
    from pagedray.workers.engine import Engine

    settings = {"max_model_len": 2048, "max_num_seqs": batch, "cpu_threads": 1, "kv_cache_memory": "512MiB"}
    engine = Engine(EngineConfig.from_kwargs(model=model, **settings), shares_kv=True)
    draw = random.Random(0)
    sampling = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True, seed=0)
    for i in range(batch):
        engine.add_request(Request(str(i), tuple(draw.randrange(10, 40000) for _ in range(300)), sampling))
    decoding: set[str] = set()
    while len(decoding) < batch:
        decoding |= {output.request_id for output in engine.step()}
    began = time.perf_counter()
    offers = engine.take_publications()
    taking = time.perf_counter() - began
    threads = KVThreads(engine.executor.worker.kv_port)
    publications = [publication for publication, _ in offers]
    blocks = len(publications[0].block_ids)
    print(f"{len(publications)} runs of {blocks} blocks; to order them took {1000 * taking:.2f} ms")

    def steps(number: int) -> list[float]:
        times = []
        for _ in range(number):
            at = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - at)
        return times

    alone, beside, packing = [], [], []
    for _ in range(rounds):
        alone += steps(20)
        over = threading.Event()

        def pack() -> None:
            while not over.is_set():  # noqa: B023
                at = time.perf_counter()
                threads.port.pack(draw.choice(publications).block_ids)
                packing.append(time.perf_counter() - at)

        work = threads.packing.submit(pack)
        beside += steps(20)
        over.set()
        work.result(60)
    before, during, packed = (1000 * statistics.median(times) for times in (alone, beside, packing))
    print(f"a decode step of {batch}: {before:.1f} ms, {during:.1f} ms while runs are packed ({during / before:.2f})")
    print(f"packing {blocks * engine.block_bytes / 2**20:.1f} MiB took {packed:.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--hosts", type=int, default=1, choices=[1, 2])
    parser.add_argument("--lengths", default="256,1024,4096")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--publish", action="store_true")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a decode step, with --publish")
    args = parser.parse_args()
    if args.publish:
        publish_cost(args.model, args.batch, args.rounds)
        return
    lengths = [int(n) for n in args.lengths.split(",")]
    folder = Path(tempfile.mkdtemp(prefix="kv-", dir="/tmp"))
    engine = {"max_model_len": 8192, "cpu_threads": 1, "kv_cache_memory": "512MiB"}
    model = {"model_loading_config": {"model_id": "m", "model_source": args.model}, "engine_kwargs": engine}
    config = folder / "config.yaml"
    config.write_text(json.dumps({"llm_configs": [model | {"deployment_config": {"num_replicas": 2}}]}))
    command = [sys.executable, "-m", "pagedray", "serve", str(config)]
    if args.hosts == 1:
        port = free_port("127.0.0.1", 0)
        process = subprocess.Popen([*command, "--port", str(port)], env=isolated_env(folder))
        run(process, f"http://127.0.0.1:{port}", lengths, args.rounds, "same node")
        return
    with Network(2, shm_bytes=2**30) as network:
        first, second = network.hosts
        first.start_ray(num_cpus=1)
        second.start_ray(first, num_cpus=1)
        process = first.popen(*command, "--host", "0.0.0.0", "--ray-address", "auto")
        run(process, f"http://{first.address}:8000", lengths, args.rounds, "other node")


def run(process: subprocess.Popen, url: str, lengths: list[int], rounds: int, source: str) -> None:
    def ready() -> bool:
        try:
            running = httpx.get(f"{url}/metrics", timeout=30).text.count("pagedray_num_requests_running{")
            return running == 2 and httpx.get(f"{url}/health", timeout=30).status_code == 200
        except httpx.HTTPError:
            return False

    others = set(leaders())
    try:
        wait_until(ready, 300, "both groups are up")
        measure(url, sorted(set(leaders()) - others), lengths, rounds, source)
    finally:
        process.terminate()
        process.wait(60)


if __name__ == "__main__":
    main()
