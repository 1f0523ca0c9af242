"""Decisions a second in the scheduler's core: `python tests/bench/placements.py`. One process, no Ray.

By the process's own CPU time, which is what a core to itself would take: a shared machine's clock says less.
"""

import argparse
import random
import time

from pagedray.scheduler.cost_model import CostModel
from pagedray.scheduler.dispatcher import Dispatcher
from pagedray.scheduler.placement import GroupCapacity, GroupLoad
from pagedray.scheduler.prefix_index import BlockEvents, pack
from pagedray.scheduler.request import Request, SamplingParams


def measure(num_groups: int, num_requests: int, blocks: int, batch: int) -> float:
    """Requests a second through submit, dispatch and finished. Half of each prompt is held by some group."""
    draw = random.Random(0)
    d = Dispatcher(max_queued_requests=100_000)
    prefixes = [tuple(draw.randbytes(16) for _ in range(blocks // 2)) for _ in range(num_groups)]
    for i in range(num_groups):
        capacity = GroupCapacity(512, 256, 1_000_000, 64, 2048)
        d.add_group(f"g{i}", "m", capacity, 0.0, cost=CostModel(5e-3, 1e-7, 0.0, 1e-6, 0.0))
        d.block_events(f"g{i}", BlockEvents(1, pack(prefixes[i])))
    sampling, prompt = SamplingParams(seed=0, max_tokens=100), tuple(range(64 * blocks))
    requests = [
        Request(
            str(i), prompt, sampling, "m", block_hashes=draw.choice(prefixes) + (draw.randbytes(16),) * (blocks // 2)
        )
        for i in range(num_requests)
    ]
    given, placed, running = dict.fromkeys((f"g{i}" for i in range(num_groups)), 0), 0, []
    began, now = time.process_time(), 0.0
    for start in range(0, num_requests, batch):
        now += 1e-3
        for request in requests[start : start + batch]:
            d.submit(request, now)
        for group_id, sent in d.dispatch(now).items():
            placed += len(sent)
            given[group_id] += len(sent)
            running += [r.request_id for r in sent]
        if len(running) > 16 * num_groups:  # each group has about sixteen
            done, running = running[:batch], running[batch:]
            d.finished(done, now)
        if start % 100 == 0:
            group_id = f"g{draw.randrange(num_groups)}"
            d.report(group_id, GroupLoad(given[group_id], 0.0, 16, 30_000, 50_000), now)
    seconds = time.process_time() - began
    assert placed == num_requests, f"{placed} of {num_requests} placed"
    return num_requests / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=30_000)
    parser.add_argument("--blocks", type=int, default=16, help="of a prompt: 16 of 64 tokens are 1,024")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    for num_groups in (64, 1000):
        rates = sorted(measure(num_groups, args.requests, args.blocks, args.batch) for _ in range(args.rounds))
        print(f"{num_groups} groups: {rates[len(rates) // 2]:,.0f} requests/s (best {rates[-1]:,.0f})", flush=True)


if __name__ == "__main__":
    main()
