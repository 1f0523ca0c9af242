"""What a tenant that floods costs another one: `python tests/bench/flood.py MODEL`.

`pagedray serve` with two tenants. First it is found how many requests a second the server answers; half of that is a
tenant's share. The quiet tenant asks for half of its share, alone and then while the other sends twenty shares; what is
over the flood's queue is refused. The two are taken in turns, since what a shared machine gives changes by the minute.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import yaml

from pagedray.cluster import bench
from pagedray.cluster.local_server import free_port

INPUT_LEN, OUTPUT_LEN = (64, 192), (16, 48)  # words, which are about as many tokens; tokens
FLOOD_SHARES = 20


def start_server(model, home, num_seqs):
    config = {
        "llm_configs": [
            {
                "model_loading_config": {"model_id": "bench", "model_source": model},
                "engine_kwargs": {"max_model_len": 1024, "max_num_seqs": num_seqs},
            }
        ],
        "tenants": [
            {"name": "quiet", "api_keys": ["sk-quiet-key"]},
            {"name": "flood", "api_keys": ["sk-flood-key"], "max_queued_requests": 64},
        ],
    }
    path, port = Path(home) / "config.yaml", free_port("127.0.0.1", 0)
    path.write_text(yaml.safe_dump(config))
    cache = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
    with open(Path(home) / "log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "pagedray", "serve", str(path), "--port", str(port)],
            stdout=log,
            stderr=log,
            env=os.environ | {"HOME": home, "XDG_CACHE_HOME": cache, "RAY_AUTH_MODE": "disabled"},
        )
    while "ready" not in Path(log.name).read_text():
        if process.poll() is not None:
            sys.exit(Path(log.name).read_text())
        time.sleep(0.5)
    return process, f"http://127.0.0.1:{port}"


def load(url, tenant, count, seed, **how):
    """Its outcomes, and the seconds they took."""
    prompts = bench.Prompts(count, INPUT_LEN, OUTPUT_LEN, seed)
    run = bench.run_serve(bench.Load(url, prompts, model="bench", api_key=f"sk-{tenant}-key", **how))
    return run.outcomes, run.seconds


def percentiles(outcomes):
    """p50 and p95 of TTFT in seconds."""
    assert not any(o.error for o in outcomes), next(o.error for o in outcomes if o.error)
    return tuple(bench.percentile([o.ttft for o in outcomes], q) for q in (50, 95))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=40, help="of the quiet tenant in each run")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pr", dir="/tmp") as home:
        server, url = start_server(args.model, home, args.max_num_seqs)
        try:
            measure(url, args)
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(60)


def measure(url, args):
    load(url, "quiet", args.max_num_seqs, 0, max_concurrency=args.max_num_seqs)  # warms up
    outcomes, seconds = load(url, "quiet", 4 * args.max_num_seqs, 1, max_concurrency=2 * args.max_num_seqs)
    capacity = len(outcomes) / seconds
    rate, flood_rate = capacity / 4, FLOOD_SHARES * capacity / 2
    print(f"{capacity:.2f} requests/s in all; quiet asks for {rate:.2f}, the flood for {flood_rate:.1f}", flush=True)
    for number in range(args.rounds):
        alone, _ = load(url, "quiet", args.requests, 10 + number, request_rate=rate)
        flood, begun = [], time.perf_counter()
        count = int(flood_rate * (args.requests / rate + 10))
        flooding = threading.Thread(
            target=lambda: flood.extend(load(url, "flood", count, 20 + number, request_rate=flood_rate)[0])  # noqa: B023
        )
        flooding.start()
        time.sleep(5.0)  # until its queue is full
        beside, _ = load(url, "quiet", args.requests, 10 + number, request_rate=rate)
        flooding.join()
        (p50, p95), (with_p50, with_p95) = percentiles(alone), percentiles(beside)
        served = [o for o in flood if not o.error]
        print(
            f"quiet alone: TTFT p50 {p50:.2f} s, p95 {p95:.2f} s; beside the flood: {with_p50:.2f} s, "
            f"{with_p95:.2f} s; p95 {with_p95 / p95:.2f} times; flood: {len(served)} of {len(flood)} served, TTFT p50 "
            f"{bench.percentile([o.ttft for o in served], 50):.1f} s, {time.perf_counter() - begun:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
