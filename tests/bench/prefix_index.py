"""How long a look-up takes in a full prefix index: `python tests/bench/prefix_index.py`. Needs about 3 GiB."""

import argparse
import os
import statistics
import time

from pagedray.scheduler.prefix_index import PrefixIndex


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=10_000_000)
    parser.add_argument("--prompt-blocks", type=int, default=512, help="32k tokens in blocks of 64")
    args = parser.parse_args()
    index, each = PrefixIndex(), args.blocks // args.groups
    began = time.perf_counter()
    prompts = []  # (hashes, holders): a tenth is held by every hundredth group, the rest by one
    shared = [
        [os.urandom(16) for _ in range(args.prompt_blocks)] for _ in range(max(1, each // 10 // args.prompt_blocks))
    ]
    for group in range(args.groups):
        index.add_holder(f"g{group}")
        stored = [block for prompt in shared for block in prompt] if group % 100 == 0 else []
        own = [os.urandom(16) for _ in range(each - len(stored))]
        index.apply_hashes(f"g{group}", 1, stored + own)
        prompts.append(own[: args.prompt_blocks])
    filled = time.perf_counter() - began
    print(f"{len(index):,} blocks at {args.groups} groups; {1e6 * filled / len(index):.2f} µs to enter one")
    for name, asked in (
        ("held by one group", prompts[::3]),
        ("held by every 100th group", shared * 30),
        ("half held", [p[:256] + [os.urandom(16) for _ in range(len(p) - 256)] for p in prompts[1::3]]),
        ("unknown", [[os.urandom(16) for _ in range(args.prompt_blocks)] for _ in range(300)]),
    ):
        times = []
        for prompt in asked:
            prompt = [bytes(bytearray(block)) for block in prompt]  # as unpickled: equal, not the same objects
            began = time.perf_counter()
            index.lookup(prompt)
            times.append(1e6 * (time.perf_counter() - began))
        times.sort()
        print(
            f"{args.prompt_blocks} blocks {name}: median {statistics.median(times):.0f} µs, "
            f"p99 {times[int(0.99 * len(times))]:.0f} µs"
        )


if __name__ == "__main__":
    main()
