"""Paged attention, a layer at a time: PagedRay's kernel of this CPU against another build of it, or against itself over
caches in int8, turn by turn.

    python tests/bench/attention.py [--against OLD.so | --int8] [--tier amx] [--dtype float32] [--rounds 7]

Shapes are those of SmolLM2-135M (9 query heads, 3 KV heads, head_dim 64), with as many layers' caches in turn as the
model has, so that keys come from where they come from in a step. `--against` takes a library from the cache folder that
`pagedray.kernels.cpu.library` names, built from other sources with the same signatures. Sides alternate (A B A B),
because what the machine gives changes by the minute; medians and the median of the ratios are printed, with `--int8`
those of int8 first.
"""

import argparse
import copy
import ctypes
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from pagedray.kernels import reference
from pagedray.kernels.cpu import launch, library
from pagedray.kernels.ops import AttentionMetadata
from pagedray.workers.kv_cache import allocate

HEADS, KV_HEADS, HEAD_DIM, BLOCK, LAYERS = 9, 3, 64, 16, 30

# name: (sequences, tokens of each in the step, context of each, tokens that all share)
CASES = {
    "prefill of 512": (1, 512, 512, 0),
    "prefill of 2,048": (1, 2048, 2048, 0),
    "prefill of 4,096": (1, 4096, 4096, 0),
    "1 stream at 128": (1, 1, 128, 0),
    "1 stream at 1,024": (1, 1, 1024, 0),
    "1 stream at 4,096": (1, 1, 4096, 0),
    "16 streams at 1,024": (16, 1, 1024, 0),
    "16 streams at 1,072, sharing 1,024": (16, 1, 1072, 1024),
}


class Step:
    """What every layer of a step reads."""

    def __init__(self, sequences, tokens, context, shared, dtype):
        own = -(-(context - shared) // BLOCK)
        blocks = torch.randperm(max(2048, shared // BLOCK + sequences * own), dtype=torch.int32)
        tables = torch.empty(sequences, shared // BLOCK + own, dtype=torch.int32)
        tables[:, : shared // BLOCK] = blocks[: shared // BLOCK]
        tables[:, shared // BLOCK :] = blocks[shared // BLOCK :][: sequences * own].view(sequences, own)
        config = SimpleNamespace(
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            num_hidden_layers=LAYERS,
            intermediate_size=1,
            vocab_size=1,
        )
        self.caches = allocate(config, len(blocks), BLOCK, dtype)
        for k_cache, v_cache in self.caches:
            k_cache[tables.unique()] = torch.randn(tables.unique().numel(), KV_HEADS, BLOCK, HEAD_DIM).to(dtype)
            v_cache[tables.unique()] = k_cache[tables.unique()]
        self.q = torch.randn(sequences * tokens, HEADS + 2 * KV_HEADS, HEAD_DIM).to(dtype)[:, :HEADS]
        self.metadata = AttentionMetadata(
            query_start_loc=torch.arange(0, sequences * tokens + 1, tokens, dtype=torch.int32),
            seq_lens=torch.full((sequences,), context, dtype=torch.int32),
            block_tables=tables,
            slot_mapping=torch.zeros(sequences * tokens, dtype=torch.int64),
            max_query_len=tokens,
            max_seq_len=context,
        )

    def in_int8(self):
        """The same over caches in int8."""
        other = copy.copy(self)
        other.caches = [tuple(reference.quantize_kv(cache) for cache in pair) for pair in self.caches]
        return other

    def microseconds(self, attention, repeats):
        """Of one layer."""
        start = time.perf_counter()
        for _ in range(repeats):
            for k_cache, v_cache in self.caches:
                attention(self.q, k_cache, v_cache, self.metadata, HEAD_DIM**-0.5)
        return 1e6 * (time.perf_counter() - start) / (repeats * len(self.caches))


def operations_of(path, tier):
    """Those of a native library that may be another build than this one."""
    return launch.operations(library.NativeLibrary(tier, path, ctypes.CDLL(str(path))))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    rival = parser.add_mutually_exclusive_group()
    rival.add_argument("--against", type=Path)
    rival.add_argument("--int8", action="store_true", help="against caches in int8")
    parser.add_argument("--tier", default=library.available_tiers()[0], choices=library.available_tiers())
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--case", action="append", help="part of a case's name")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    ours = operations_of(library.build(args.tier), args.tier)["paged_attention"]
    for name, case in CASES.items():
        if args.case and not any(part in name for part in args.case):
            continue
        step = Step(*case, getattr(torch, args.dtype))
        sides = [(step, ours)]
        if args.against:
            sides.append((step, operations_of(args.against, args.tier)["paged_attention"]))
        if args.int8:
            sides.insert(0, (step.in_int8(), ours))
        for side, attention in sides:  # warm up
            side.microseconds(attention, 1)
        repeats = max(1, int(50e3 / len(step.caches) / step.microseconds(ours, 1)))
        turns = [[side.microseconds(attention, repeats) for side, attention in sides] for _ in range(args.rounds)]
        line = f"{name:36}" + "".join(f"{statistics.median(c):10.1f} us" for c in zip(*turns, strict=True))
        if len(sides) > 1:
            line += f"   {statistics.median(t[1] / t[0] for t in turns):.2f} times as fast"
        print(line, flush=True)


if __name__ == "__main__":
    main()
