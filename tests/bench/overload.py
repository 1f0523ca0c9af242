"""What a server still does when three times as much is asked as it can: `python tests/bench/overload.py MODEL`.

First it is found how many requests a second are answered while there are always enough. Then requests come at that
rate, and at three times it, in turns, since what a shared machine gives changes by the minute. Goodput is the output
tokens a second of requests that were answered in full with their first token within --ttft seconds. What is over the
queue's bound must be refused at once, with 429 and Retry-After.
"""

import argparse
import asyncio
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx

sys.path.append(str(Path(__file__).parents[1] / "cluster"))

from real_server import isolated_env

from pagedray.cluster.local_server import free_port

INPUT_LEN, OUTPUT_LEN = (32, 128), (16, 48)  # token ids; tokens


def start_server(args, home):
    port = free_port("127.0.0.1", 0)
    flags = ["--served-model-name", "bench", "--max-model-len", "1024", "--max-num-seqs", str(args.max_num_seqs)]
    flags += ["--max-queued-requests", str(args.max_queued_requests), "--num-replicas", str(args.groups)]
    with (Path(home) / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "pagedray", "serve", args.model, "--port", str(port), *flags],
            stdout=log,
            stderr=log,
            env=isolated_env(Path(home)),
        )
    while "ready" not in Path(log.name).read_text():
        if process.poll() is not None:
            sys.exit(Path(log.name).read_text())
        time.sleep(0.5)
    return process, f"http://127.0.0.1:{port}"


class Client:
    def __init__(self, http, seed):
        self.http, self.rng = http, random.Random(seed)
        self.answered = []  # (sent, time to the first token, output tokens)
        self.statuses = Counter()
        self.bad_refusals = 0
        self.refused_within = []  # seconds

    async def ask(self):
        prompt = [self.rng.randrange(100, 40000) for _ in range(self.rng.randint(*INPUT_LEN))]
        body = {
            "model": "bench",
            "prompt": prompt,
            "max_tokens": self.rng.randint(*OUTPUT_LEN),
            "ignore_eos": True,
            "stream": True,
        }
        sent, first, done = time.monotonic(), None, False
        try:
            async with self.http.stream("POST", "/v1/completions", json=body) as answer:
                self.statuses[answer.status_code] += 1
                if answer.status_code != 200:
                    await answer.aread()
                    self.refused_within.append(time.monotonic() - sent)
                    self.bad_refusals += answer.status_code not in (429, 503) or "retry-after" not in answer.headers
                    return
                async for line in answer.aiter_lines():
                    if line == "data: [DONE]":
                        done = True
                    elif line.startswith("data: ") and first is None:
                        first = time.monotonic() - sent
        except httpx.HTTPError as error:
            self.statuses[type(error).__name__] += 1
        if done:
            self.answered.append((sent, first, body["max_tokens"]))


async def at_rate(url, rate, seconds, seed):
    """Poisson arrivals for so many seconds; waits until all are answered."""
    async with httpx.AsyncClient(base_url=url, timeout=300.0, limits=httpx.Limits(max_connections=None)) as http:
        client, draw, tasks = Client(http, seed), random.Random(seed), []
        began = time.monotonic()
        at = began
        while (at := at + draw.expovariate(rate)) < began + seconds:
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            tasks.append(asyncio.create_task(client.ask()))
        await asyncio.gather(*tasks)
        return client, time.monotonic() - began


async def at_once(url, count, concurrency, seed):
    """Requests a second that are answered while `concurrency` are always open."""
    async with httpx.AsyncClient(base_url=url, timeout=300.0) as http:
        client, slots = Client(http, seed), asyncio.Semaphore(concurrency)

        async def one():
            async with slots:
                await client.ask()

        began = time.monotonic()
        await asyncio.gather(*(one() for _ in range(count)))
        return len(client.answered) / (time.monotonic() - began)


def goodput(client, took, ttft):
    return sum(tokens for _, first, tokens in client.answered if first <= ttft) / took


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--max-queued-requests", type=int, default=16)
    parser.add_argument("--ttft", type=float, default=10.0, metavar="S", help="within which a first token is good")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a run")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pr", dir="/tmp") as home:
        process, url = start_server(args, home)
        try:
            slots = args.groups * args.max_num_seqs
            asyncio.run(at_once(url, slots, slots, 0))  # warms up
            ratios = []
            for number in range(args.rounds):
                rate = asyncio.run(at_once(url, 6 * slots, 2 * slots, 100 + number))
                results = {}
                for times in (1.0, 3.0):
                    client, took = asyncio.run(at_rate(url, times * rate, args.seconds, 10 * number + times))
                    results[times] = goodput(client, took, args.ttft)
                    firsts = sorted(first for _, first, _ in client.answered)
                    refused = ""
                    if client.refused_within:
                        refused = f", refused within {1e3 * statistics.median(client.refused_within):.0f} ms"
                    print(
                        f"{times:g} x {rate:.2f} requests/s: goodput {results[times]:.1f} tokens/s, TTFT p50 "
                        f"{firsts[len(firsts) // 2]:.2f} s, p95 {firsts[int(0.95 * len(firsts))]:.2f} s, "
                        f"{dict(client.statuses)}{refused}, {client.bad_refusals} without Retry-After",
                        flush=True,
                    )
                ratios.append(results[3.0] / results[1.0])
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)
    print(f"goodput at three times the capacity, over that at capacity: {', '.join(f'{r:.2f}' for r in ratios)}")


if __name__ == "__main__":
    main()
