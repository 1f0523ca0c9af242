"""How long a stream pauses when its worker group is drained: `python tests/bench/drain.py MODEL`.

Two groups of one node. In each round one stream runs, with the context asked for; its group is drained; the longest
time between two of its tokens while it moves is compared with its median inter-token latency before. Then the group is
built anew. With `--streams` more than one, all of them run at the groups, and those of the drained one move.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "cluster"))

from real_server import isolated_env
from steady_load import Stream

from pagedray.cluster.local_server import free_port

WARM_SECONDS = 2.0  # of streaming before the drain
MAX_TOKENS = 600


class Reader(threading.Thread):
    """A stream, and when each of its tokens came."""

    def __init__(self, url, prompt):
        super().__init__(daemon=True)
        self.url, self.prompt, self.times = url, prompt, []
        self.start()

    def run(self):
        job = {"model": "bench", "prompt": self.prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
        for chunk in Stream(self.url, job):
            if chunk["choices"]:
                self.times.append(time.monotonic())

    def gaps(self, begin, end):
        """Between the tokens of a span of time."""
        times = [t for t in self.times if begin <= t <= end]
        return [b - a for a, b in zip(times, times[1:], strict=False)]


def start_server(model, home, fetch_weight):
    transfer = {"kv_connector_extra_config": {"fetch_weight": fetch_weight}}
    engine = {"max_model_len": 4096, "cpu_threads": 1, "kv_transfer_config": transfer}
    config = {
        "model_loading_config": {"model_id": "bench", "model_source": os.path.abspath(model)},
        "engine_kwargs": engine,
        "deployment_config": {"num_replicas": 2},
    }
    path, port = Path(home) / "config.yaml", free_port("127.0.0.1", 0)
    path.write_text(json.dumps({"llm_configs": [config]}))
    log = (Path(home) / "log").open("w")
    command = [sys.executable, "-m", "pagedray", "serve", str(path), "--port", str(port)]
    process = subprocess.Popen(command, stdout=log, stderr=log, env=isolated_env(Path(home)))
    return process, f"http://127.0.0.1:{port}"


def groups(url):
    try:
        answer = httpx.get(f"{url}/groups", timeout=30)
    except httpx.TransportError:
        return []
    return [g for g in answer.json()["data"] if not g["draining"]] if answer.status_code == 200 else []


def wait_for(condition, seconds=180.0):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"not so after {seconds:.0f} s")
        time.sleep(0.1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--context", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--fetch-weight", type=float, default=1.0, help="0: what the store has is always fetched")
    args = parser.parse_args()
    pauses, ratios = [], []
    with tempfile.TemporaryDirectory(prefix="pr", dir="/tmp") as home:
        process, url = start_server(args.model, home, args.fetch_weight)
        try:
            for number in range(args.rounds):
                wait_for(lambda: len(groups(url)) == 2)
                time.sleep(1.0)
                first = 1000 * number
                prompts = [
                    [first + (i * 7919 + s) % 40000 + 10 for i in range(args.context)] for s in range(args.streams)
                ]
                readers = [Reader(url, p) for p in prompts]
                wait_for(lambda: all(r.times for r in readers))  # noqa: B023
                began = time.monotonic()
                time.sleep(WARM_SECONDS)
                victim = max(groups(url), key=lambda g: g["running"])["id"]
                drained = time.monotonic()
                httpx.post(f"{url}/groups/{victim}/drain", timeout=30).raise_for_status()
                wait_for(lambda: victim not in [g["id"] for g in all_groups(url)])  # noqa: B023
                moved = time.monotonic()
                for reader in readers:
                    usual = statistics.median(reader.gaps(began, drained))
                    pause = max(reader.gaps(drained, moved + 0.1))
                    pauses.append(pause)
                    ratios.append(pause / usual)
                    print(f"inter-token latency {1e3 * usual:.1f} ms, longest {1e3 * pause:.1f} ms", flush=True)
                for reader in readers:
                    reader.join()
            counts = [x for x in httpx.get(f"{url}/metrics", timeout=30).text.splitlines() if "_moved_total{" in x]
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)
    print(*counts, sep="\n")
    print(
        f"longest pause: median {1e3 * statistics.median(pauses):.1f} ms, worst {1e3 * max(pauses):.1f} ms; in "
        f"inter-token latencies: median {statistics.median(ratios):.1f}, worst {max(ratios):.1f}"
    )


def all_groups(url):
    return httpx.get(f"{url}/groups", timeout=30).json()["data"]


if __name__ == "__main__":
    main()
