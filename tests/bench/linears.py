"""Single linear layers: PagedRay's kernel of this CPU against PyTorch's and against another build of it, turn by turn.

    python tests/bench/linears.py [--against OLD.so] [--rows 1 16 512] [--kinds bf16 Q4_1] [--tier avx2] [--rounds 5]

Weights are taken in turn out of 256 MB, so that they come from memory. `--against` is as in attention.py: a library
from the cache folder, built from other sources with the same signatures and the same order of packed weights. Printed:
medians in microseconds a call, and the medians of each round's ratio of the others' time to ours. PyTorch computes a
dequantized weight in the dtype.
"""

import argparse
import ctypes
import statistics
import time
from pathlib import Path

import torch

from pagedray.kernels import ops
from pagedray.kernels.cpu import launch, library

SHAPES = [(960, 576), (3072, 576), (576, 1536), (49152, 576), (8192, 2048)]  # N, K: the demo model's, and a larger one
WORKING_SET = 1 << 28  # bytes of packed weights
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def operations_of(path, tier):
    return launch.operations(library.NativeLibrary(tier, path, ctypes.CDLL(str(path))))


def weight_of(kind, n, k):
    """A weight to pack: a tensor, or blocks of GGUF's format `kind`."""
    if kind in DTYPES:
        return torch.randn(n, k).to(DTYPES[kind])
    form = ops.FORMATS[kind]
    blocks = torch.randint(0, 256, (n, k // form.values * form.bytes), dtype=torch.uint8)
    for scales in (blocks.view(n, -1, form.bytes)[..., 1], blocks.view(n, -1, form.bytes)[..., 3]):
        scales &= 0x1F  # fp16 of a weight's size
    return ops.QuantizedTensor(blocks, form)


def seconds(call, weights):
    for weight in weights:  # the first to touch memory again may pay for its having been left alone
        call(weight)
    start = time.perf_counter()
    for weight in weights:
        call(weight)
    return (time.perf_counter() - start) / len(weights)


def measure(kind, n, k, rows, ours, theirs, rounds):
    dtype = DTYPES.get(kind, torch.bfloat16)
    one = ours["pack_linear"](weight_of(kind, n, k), None, dtype)
    copies = max(1, WORKING_SET // one.data.nbytes)
    packed = [one, *(ours["pack_linear"](weight_of(kind, n, k), None, dtype) for _ in range(copies - 1))]
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
