"""TTFT by where a prompt's KV comes from: nowhere, another node's store, this node's store, this group's device.

    python tests/bench/kv_reuse.py MODEL --hosts 2        # other node; needs root: hosts are network namespaces
    python tests/bench/kv_reuse.py MODEL                  # same node: two groups on this machine

Two groups that take one request at a time. A prompt is computed by one of them; while a stream keeps that one busy, it
is asked again, which goes to the other: that is the fetch, and once more is the device. It was computed beside a stream
of the other group, too. Every line is the median of `--rounds` prompts, so ratios are of one run. The groups share this
machine's cores with each other and with whatever runs on it.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "cluster")]

from hosts import Network  # noqa: E402
from real_server import isolated_env  # noqa: E402

from pagedray.cluster.local_server import free_port  # noqa: E402


def ttft(url: str, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and how many tokens of the prompt were cached."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    began = time.perf_counter()
    usage = httpx.post(f"{url}/v1/completions", json=body, timeout=300).raise_for_status().json()["usage"]
    return time.perf_counter() - began, usage["prompt_tokens_details"]["cached_tokens"]


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


def wait_until(condition, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.05)


class Busy:
    """A stream that continues a prompt, and so keeps the group busy that has it."""

    def __init__(self, url: str, prompt: list[int]):
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(url, prompt))
        self.thread.start()
        wait_until(lambda: metric(url, "pagedray_num_requests_running") >= 1, 60, "the stream runs")
        time.sleep(0.5)

    def _run(self, url: str, prompt: list[int]) -> None:
        body = {"model": "m", "prompt": prompt, "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as answer:
            for _ in answer.iter_lines():
                if self.over.is_set():
                    return

    def end(self) -> None:
        self.over.set()
        self.thread.join()


def measure(url: str, lengths: list[int], rounds: int, source: str) -> None:
    draw = random.Random(0)
    for _ in range(12):  # both groups learn what their steps take
        ttft(url, [draw.randrange(10, 40000) for _ in range(600)])
    for length in lengths:
        cold, fetched, device, late = [], [], [], 0
        for _ in range(rounds):
            prompt = [draw.randrange(10, 40000) for _ in range(length)]
            runs = metric(url, "pagedray_kv_store_published_total")
            busy = Busy(url, [draw.randrange(10, 40000) for _ in range(32)])
            cold.append(ttft(url, prompt)[0])
            busy.end()
            wait_until(lambda: metric(url, "pagedray_num_requests_running") == 0, 60, "nothing runs")
            wait_until(lambda: metric(url, "pagedray_kv_store_published_total") > runs, 60, "it is published")  # noqa: B023
            time.sleep(1.5)
            busy = Busy(url, prompt)
            before = metric(url, "pagedray_kv_fetches_total")
            seconds, _ = ttft(url, prompt)
            time.sleep(0.7)  # a group reports twice a second
            if metric(url, "pagedray_kv_fetches_total") > before:
                fetched.append(seconds)
            else:
                late += 1  # it was computed: fetching would not have been faster, the scheduler thought
            device.append(ttft(url, prompt)[0])
            busy.end()
            wait_until(lambda: metric(url, "pagedray_num_requests_running") == 0, 60, "nothing runs")
        shown = {"recompute": cold, source: fetched, "device": device}
        medians = {name: statistics.median(times) for name, times in shown.items() if times}
        line = ", ".join(f"{name} {1000 * t:.0f} ms" for name, t in medians.items())
        ratio = f", {source} / recompute {medians[source] / medians['recompute']:.2f}" if fetched else ""
        print(f"{length} tokens: {line}{ratio}" + (f", computed instead {late} times" if late else ""), flush=True)
    seconds, predicted = (metric(url, f"pagedray_kv_fetch_{n}_total") for n in ("seconds", "predicted_seconds"))
    print(f"fetches took {seconds:.2f} s, and were reckoned to take {predicted:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--hosts", type=int, default=1, choices=[1, 2])
    parser.add_argument("--lengths", default="256,1024,4096")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    lengths = [int(n) for n in args.lengths.split(",")]
    folder = Path(tempfile.mkdtemp(prefix="kv-", dir="/tmp"))
    engine = {"max_model_len": 8192, "max_num_seqs": 1, "cpu_threads": 1, "kv_cache_memory": "512MiB"}
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

    try:
        wait_until(ready, 300, "both groups are up")
        measure(url, lengths, rounds, source)
    finally:
        process.terminate()
        process.wait(60)


if __name__ == "__main__":
    main()
