"""Single linear layers: PagedRay's kernel of this CPU against PyTorch's and against another build of it, turn by turn.

    python tests/bench/linears.py [--against OLD.so] [--rows 1 16 512] [--kinds bf16 Q4_1] [--tier avx2] [--rounds 5]

Weights are taken in turn out of 256 MB, so that they come from memory. `--against` is as in attention.py: a library
from the cache folder, built from other sources with the same signatures and the same order of packed weights. Printed:
medians in microseconds a call, and the medians of each round's ratio of the others' time to ours. PyTorch computes a
dequantized weight in the dtype.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from attention import operations_of
from quantized import SHAPES, WORKING_SET, random_blocks

from pagedray.kernels.cpu import library

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def weight_of(kind, n, k):
    """A weight to pack: a tensor, or blocks of GGUF's format `kind`."""
    return torch.randn(n, k).to(DTYPES[kind]) if kind in DTYPES else random_blocks(kind, n, k)


def seconds(call, weights):
    for weight in weights:  # the first to touch memory again may pay for its having been left alone
        call(weight)
    start = time.perf_counter()
    for weight in weights:
        call(weight)
    return (time.perf_counter() - start) / len(weights)


def measure(kind, n, k, rows, ours, theirs, rounds):
    dtype = DTYPES.get(kind, torch.bfloat16)
    packed = [ours["pack_linear"](weight_of(kind, n, k), None, dtype)]
    while sum(weight.data.nbytes for weight in packed) < WORKING_SET:
        packed.append(ours["pack_linear"](weight_of(kind, n, k), None, dtype))
    plain = [torch.randn(n, k).to(dtype) for _ in range(max(1, WORKING_SET // (n * k * dtype.itemsize)))]
    x = torch.randn(rows, k).to(dtype)
    sides = {"ours": (lambda w: ours["linear"](x, w, None), packed)}
    if theirs:
        sides["the other build"] = (lambda w: theirs["linear"](x, w, None), packed)
    sides["torch"] = (lambda w: torch.nn.functional.linear(x, w), plain)
    some = {name: weights[: max(4, len(weights) // rows)] for name, (_, weights) in sides.items()}
    turns = []
    for i in range(rounds + 1):  # who comes after whom changes, too
        order = list(sides) if i % 2 else list(sides)[::-1]
        turns.append({name: seconds(sides[name][0], some[name]) for name in order})
    turns = turns[1:]
    line = f"{n:5} x {k:4} {kind:4} {rows:4} rows:"
    for name in sides:
        line += f"  {name} {1e6 * statistics.median(t[name] for t in turns):.0f}"
        if name != "ours":
            line += f" ({statistics.median(t[name] / t['ours'] for t in turns):.2f})"
    return line


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path)
    parser.add_argument("--kinds", nargs="*", default=["bf16", "fp32", "Q4_1", "Q8_0"])
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 16, 512])
    parser.add_argument("--tier", default=library.available_tiers()[0], choices=library.available_tiers())
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    ours = operations_of(library.build(args.tier), args.tier)
    theirs = operations_of(args.against, args.tier) if args.against else None
    for n, k in SHAPES:
        for kind in args.kinds:
            for rows in args.rows:
                print(measure(kind, n, k, rows, ours, theirs, args.rounds), flush=True)


if __name__ == "__main__":
    main()
