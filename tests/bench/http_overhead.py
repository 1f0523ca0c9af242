"""What the whole path costs: the offline engine against HTTP through Serve, turn by turn in one run.

    python tests/bench/http_overhead.py MODEL [--rounds 5]

Both sides get the same prompts at the same concurrency: the engine in this process, and `pagedray serve` with the same
settings in processes of its own, measured by the client of `pagedray bench`. The prompts are words, so that every
token of the answer is text: a client sees a token only when it completes a character. Sides alternate (A B A B),
because what the machine gives changes by the minute; medians and their ratios are printed.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from itertools import count

from pagedray import LLM, SamplingParams
from pagedray.cluster import bench
from pagedray.cluster.local_server import free_port
from pagedray.kernels.cache import cache_root
from pagedray.scheduler.request import Request

INPUT_LEN, OUTPUT_LEN = 128, 64  # words, which are about as many tokens; tokens
SETTINGS = {"max_model_len": 1024, "enable_prefix_caching": False}
_ids = count()


def offline(engine, prompts, concurrency):
    """Output tokens a second and the median TTFT in ms, with `concurrency` requests in flight."""
    todo, began, first = deque(prompts), {}, {}
    in_flight = tokens = 0
    start = time.perf_counter()
    while todo or in_flight:
        while todo and in_flight < concurrency:
            name = str(next(_ids))
            sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True, seed=0)
            began[name] = time.perf_counter()
            engine.add_request(Request(name, tuple(todo.popleft()), sampling))
            in_flight += 1
        for output in engine.step():
            tokens += len(output.token_ids)
            first.setdefault(output.request_id, time.perf_counter() - began[output.request_id])
            in_flight -= output.finish_reason is not None
    return tokens / (time.perf_counter() - start), 1000 * statistics.median(first.values())


def http(url, prompts, concurrency):
    """The same through the server."""
    figures = bench.summarize(bench.run_serve(bench.Load(url, prompts, max_concurrency=concurrency)))
    assert not figures["failed"], figures["errors"]
    return figures["output_throughput"], figures["median_ttft_ms"]


def start_server(model, home):
    port = free_port("127.0.0.1", 0)
    flags = ["--served-model-name", "bench", "--port", str(port), "--max-model-len", "1024"]
    log = open(os.path.join(home, "log"), "w+")
    process = subprocess.Popen(
        [sys.executable, "-m", "pagedray", "serve", model, *flags, "--no-enable-prefix-caching"],
        stdout=log,
        stderr=log,
        env=os.environ | {"HOME": home, "PAGEDRAY_CACHE": str(cache_root())},
    )
    while "ready" not in open(log.name).read():
        if process.poll() is not None:
            sys.exit(open(log.name).read())
        time.sleep(0.5)
    return process, f"http://127.0.0.1:{port}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        server, url = start_server(args.model, home)
        try:
            llm = LLM(args.model, use_tqdm=False, **SETTINGS)
            llm.engine.warm_up()
            for concurrency in (1, 8):
                turns = []
                for seed in range(args.rounds + 1):
                    prompts = bench.Prompts(3 * concurrency, (INPUT_LEN,) * 2, (OUTPUT_LEN,) * 2, seed)
                    ids = [llm.tokenizer.encode(text) for text, _ in prompts.draw()]
                    ours = offline(llm.engine, ids, concurrency)
                    turns.append((*ours, *http(url, prompts, concurrency)))
                turns = turns[1:]  # the first warms up
                tokens, ttft, http_tokens, http_ttft = (statistics.median(c) for c in zip(*turns, strict=True))
                ratio = statistics.median(t[2] / t[0] for t in turns)
                extra = statistics.median(t[3] - t[1] for t in turns)
                print(
                    f"concurrency {concurrency}: offline {tokens:.1f} tokens/s, TTFT {ttft:.0f} ms; "
                    f"HTTP {http_tokens:.1f} tokens/s, TTFT {http_ttft:.0f} ms; "
                    f"ratio {ratio:.2f}, TTFT {extra:+.1f} ms",
                    flush=True,
                )
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(60)


if __name__ == "__main__":
    main()
