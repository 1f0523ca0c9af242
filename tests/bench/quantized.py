"""What quantized weights are worth: the engine, and single linear layers, at each precision, turn by turn in one run.

    python tests/bench/quantized.py MODEL.gguf [--rounds 5] [--linears]

Precisions alternate (A B C A B C), because what the machine gives changes by the minute; medians are printed, and the
median of each round's ratio to bf16.
"""

import argparse
import statistics
import time
from itertools import count

import torch

from pagedray.kernels import ops
from pagedray.scheduler.request import Request, SamplingParams
from pagedray.workers.config import EngineConfig
from pagedray.workers.engine import Engine

PRECISIONS = {"bf16": "none", "as the file has it": "auto", "int8": "int8"}
SHAPES = [(960, 576), (3072, 576), (576, 1536), (49152, 576), (8192, 2048)]  # N, K
KINDS = [None, "Q4_0", "Q4_1", "Q5_1", "Q8_0"]
WORKING_SET = 1 << 28  # bytes of weights taken in turn, so that they come from memory
_ids = count()


def generate(engine, streams, input_len, output_len):
    """Prefill tokens a second, then output tokens a second, of `streams` equal requests."""
    sampling = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, seed=0)
    for _ in range(streams):
        i = next(_ids)
        prompt = tuple((i * 7919 + j * 104729) % 40000 + 100 for j in range(input_len))
        engine.add_request(Request(str(i), prompt, sampling))
    start = first = time.perf_counter()
    tokens = seen = 0
    while engine.has_unfinished():
        seen += sum(len(output.token_ids) for output in engine.step())
        if seen < streams:  # some are still being read
            first, tokens = time.perf_counter(), 0
        elif not tokens:
            first, tokens = time.perf_counter(), seen
    return streams * input_len / (first - start), (seen - tokens) / (time.perf_counter() - first)


def engines(model, rounds, threads):
    made = {}
    for name, quantization in PRECISIONS.items():
        start = time.perf_counter()
        config = EngineConfig.from_kwargs(
            model=model, quantization=quantization, max_model_len=2048, enable_prefix_caching=False, cpu_threads=threads
        )
        made[name] = Engine(config)
        print(f"loaded {name}: {time.perf_counter() - start:.2f} s", flush=True)
    for streams, input_len, output_len in ((1, 128, 64), (16, 128, 32), (1, 1536, 4)):
        turns = []
        for _ in range(rounds + 1):
            turns.append({name: generate(engine, streams, input_len, output_len) for name, engine in made.items()})
        for name in made:
            prefill, decode = (statistics.median(t[name][i] for t in turns[1:]) for i in (0, 1))
            ratios = [statistics.median(t[name][i] / t["bf16"][i] for t in turns[1:]) for i in (0, 1)]
            print(
                f"{streams:2} x {input_len} in, {output_len} out, {name:18}: prefill {prefill:7.0f} tokens/s "
                f"({ratios[0]:.2f}), decode {decode:6.1f} ({ratios[1]:.2f})",
                flush=True,
            )


def random_blocks(kind, n, k):
    """A weight in blocks of GGUF's format `kind`."""
    form = ops.FORMATS[kind]
    blocks = torch.randint(0, 256, (n, k // form.values * form.bytes), dtype=torch.uint8)
    for scales in (blocks.view(n, -1, form.bytes)[..., 1], blocks.view(n, -1, form.bytes)[..., 3]):
        scales &= 0x1F  # fp16 of a weight's size
    return ops.QuantizedTensor(blocks, form)


def packed(kind, n, k):
    if kind is None:
        return ops.pack_linear(torch.randn(n, k).bfloat16())
    return ops.pack_linear(random_blocks(kind, n, k), None, torch.bfloat16)


def linears(rounds, kinds, rows_list):
    print("microseconds a call (GB/s of weights as they lie in memory), ratio to bf16")
    for n, k in SHAPES:
        copies = {kind: [] for kind in kinds}
        for kind in kinds:
            one = packed(kind, n, k)
            copies[kind] = [one, *(packed(kind, n, k) for _ in range(WORKING_SET // (n * k * 2) - 1))]
        for rows in rows_list:
            x = torch.randn(rows, k).bfloat16()
            turns = []
            for _ in range(rounds + 1):
                turn = {}
                for kind, weights in copies.items():
                    weights = weights[: max(4, len(weights) // max(1, rows // 4))]
                    start = time.perf_counter()
                    for weight in weights:
                        ops.linear(x, weight)
                    turn[kind] = (time.perf_counter() - start) / len(weights)
                turns.append(turn)
            line = f"{n:5} x {k:4}, {rows:3} rows:"
            for kind in kinds:
                seconds = statistics.median(t[kind] for t in turns[1:])
                ratio = statistics.median(t[None] / t[kind] for t in turns[1:])
                rate = copies[kind][0].data.nbytes / seconds / 1e9
                line += f"  {kind or 'bf16'} {1e6 * seconds:.0f} ({rate:.1f}) {ratio:.2f}"
            print(line, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--linears", action="store_true", help="single layers too")
    parser.add_argument("--kinds", nargs="*", default=KINDS[1:], help="of the single layers, besides bf16")
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 16, 256])
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.model:
        engines(args.model, args.rounds, args.threads)
    if args.linears:
        linears(args.rounds, [None, *args.kinds], args.rows)


if __name__ == "__main__":
    main()
