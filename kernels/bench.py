"""What the GPU kernels reach on this machine's GPU, beside PyTorch's: one table.

    python -m pagedray.kernels.bench [--only decode W4A16] [--seconds 0.2]

Per row: the time of a call by device events, the median after a warm-up and with L2 flushed before each; bytes and
floating-point operations, counted from the shapes; what that is of this GPU's copy bandwidth and of its largest bf16
product, both measured first; the rival's time (torch SDPA, cuBLAS, or the same in bf16); the target. Shapes are those
of Llama-3 8B and 70B and of Qwen3-30B-A3B, whole (TP 1) and as one rank of eight.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .gpu.formats import GROUPS, LIMITS, QuantizedWeight
from .reference import AttentionMetadata

_FLUSH_BYTES = 256 << 20
_COPY_BYTES = 1 << 30
_PEAK_SIZE = 8192  # rows and columns of the product that stands for the peak
BLOCK_SIZE = 64
STEPS = ((1, 1, 32768), (16, 1, 8192), (64, 1, 2048), (1, 4096, 4096), (4, 1024, 8192))  # sequences, queries, context


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int = 0
    top_k: int = 0

    def rank_of(self, size: int) -> "Model":
        """What one of `size` tensor-parallel ranks holds."""
        return Model(
            f"{self.name} TP {size}",
            self.hidden,
            self.intermediate // size,
            self.heads // size,
            max(1, self.kv_heads // size),
            self.head_dim,
            self.vocab,
            self.experts,
            self.top_k,
        )


MODELS = [
    Model("Llama-3-8B", 4096, 14336, 32, 8, 128, 128256),
    Model("Llama-3-70B", 8192, 28672, 64, 8, 128, 128256),
    Model("Qwen3-30B-A3B", 2048, 768, 32, 4, 128, 151936, experts=128, top_k=8),
]


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    run: Callable[[], object]
    bytes: int  # that must be moved: each operand and result once
    flops: int
    target: str = ""
    rival: Callable[[], object] | None = None


def workloads(model: Model, device: torch.device | str) -> Iterator[Workload]:
    """One at a time, so that only its tensors are held. On the meta device nothing can run but all can be built."""
    yield from _attention(model, device)
    yield from _elementwise(model, device)
    yield from _linears(model, device)
    if model.experts:
        yield from _experts(model, device)
    yield from _sampling(model, device)


def _attention(model: Model, device: torch.device | str) -> Iterator[Workload]:
    from .gpu import attention

    heads, kv_heads, dim = model.heads, model.kv_heads, model.head_dim
    for sequences, query_len, context in STEPS:
        blocks = context // BLOCK_SIZE
        tokens = sequences * query_len
        cache_shape = (sequences * blocks, kv_heads, BLOCK_SIZE, dim)
        q, k, v = (_random(*shape, device=device) for shape in ((tokens, heads, dim), cache_shape, cache_shape))
        tables = torch.arange(sequences * blocks, dtype=torch.int32, device=device).view(sequences, blocks)
        metadata = AttentionMetadata(
            torch.arange(sequences + 1, dtype=torch.int32, device=device) * query_len,
            torch.full((sequences,), context, dtype=torch.int32, device=device),
            tables,
            torch.zeros(tokens, dtype=torch.int64, device=device),
            query_len,
            context,
        )
        seen = query_len * context - query_len * (query_len - 1) // 2  # pairs of a query and a key
        kind, target = ("decode", "80% of copy") if query_len == 1 else ("prefill", "450 TFLOP/s")

        def run(q: Tensor = q, k: Tensor = k, v: Tensor = v, metadata: AttentionMetadata = metadata) -> Tensor:
            return attention.paged_attention(q, k, v, metadata, dim**-0.5)

        def sdpa(
            q: Tensor = q, k: Tensor = k, v: Tensor = v, sequences: int = sequences, query_len: int = query_len
        ) -> Tensor:
            """Over the same numbers, contiguous instead of paged."""
            dense_k, dense_v = (c.view(sequences, kv_heads, -1, dim) for c in (k, v))
            return F.scaled_dot_product_attention(
                q.view(sequences, query_len, heads, dim).transpose(1, 2),
                dense_k,
                dense_v,
                is_causal=query_len > 1 and query_len == k.shape[0] * BLOCK_SIZE // sequences,
                enable_gqa=True,
            )

        moved = 2 * (2 * sequences * context * kv_heads * dim + 2 * tokens * heads * dim)
        name = f"{kind} {sequences} x {query_len} of {context}"
        whole = query_len in (1, context)  # SDPA has no causal mask for a chunk behind a prefix without a tensor for it
        yield Workload(name, run, moved, 4 * sequences * seen * heads * dim, target, sdpa if whole else None)


def _elementwise(model: Model, device: torch.device | str) -> Iterator[Workload]:
    from .gpu import elementwise

    split = (model.heads, model.kv_heads, model.kv_heads)
    for rows in (16, 4096):
        x, weight = _random(rows, model.hidden, device=device), _random(model.hidden, device=device)
        norm = partial(elementwise.add_rms_norm, x, x, weight, 1e-5)
        yield Workload(f"add_rms_norm {rows}", norm, 2 * 4 * x.numel(), 0, "80% of copy")
        wide = _random(rows, 2 * model.intermediate, device=device)
        yield Workload(
            f"silu_and_mul {rows}", partial(elementwise.silu_and_mul, wide), 3 * wide.numel(), 0, "80% of copy"
        )
        fused = _random(rows, sum(split), model.head_dim, device=device)
        q, k, v = fused.split(split, 1)
        cos_sin = torch.ones(rows, model.head_dim, device=device)
        index = torch.arange(rows, dtype=torch.int64, device=device)
        cache = _random(-(-rows // BLOCK_SIZE), model.kv_heads, BLOCK_SIZE, model.head_dim, device=device)
        yield Workload(
            f"rotary_and_cache {rows}",
            partial(elementwise.rotary_and_cache, q, k, v, index, cos_sin, index, cache, cache),
            2 * 2 * fused.numel() + 4 * cos_sin.numel(),
            0,
        )


def _linears(model: Model, device: torch.device | str) -> Iterator[Workload]:
    """The widest: gate and up, or, of experts, the fused q, k, v."""
    from .gpu import linear

    depth = model.hidden
    columns = (model.heads + 2 * model.kv_heads) * model.head_dim if model.experts else 2 * model.intermediate
    dense = _random(columns, depth, device=device)
    for rows in (1, 16, 4096):
        x = _random(rows, depth, device=device)
        flops, around = 2 * rows * columns * depth, 2 * rows * (depth + columns)

        cublas = partial(F.linear, x, dense)
        yield Workload(
            f"GEMM bf16, batch-invariant {rows}",
            partial(linear.gemm, x, dense, torch.bfloat16, batch_invariant=True),
            2 * dense.numel() + around,
            flops,
            rival=cublas,
        )
        for format in (*LIMITS, *GROUPS):
            weight = _weight(format, columns, depth, device)
            stored = weight.data.numel() + weight.scales.numel() * weight.scales.element_size()
            target = "70% of copy" if format == "int4" and rows <= 16 else ""
            name = f"{'W4A16' if format in GROUPS else 'W8A8'} {format} {rows}"
            yield Workload(name, partial(linear.quantized_linear, x, weight), stored + around, flops, target, cublas)


def _weight(format: str, columns: int, depth: int, device: torch.device | str) -> QuantizedWeight:
    """Bits that are in the format, without rounding a matrix first."""
    if format in LIMITS:
        data = torch.ones(columns, depth, device=device).to(torch.int8 if format == "int8" else torch.float8_e4m3fn)
        return QuantizedWeight(format, data, torch.ones(columns, device=device))
    group = GROUPS[format]
    data = torch.full((columns, depth // 2), 0x5A, dtype=torch.uint8, device=device)
    scales = torch.ones(columns, depth // group, device=device)
    if format != "int4":
        scales = torch.full(scales.shape, 120 if format == "mxfp4" else 48, dtype=torch.uint8, device=device)
    return QuantizedWeight(format, data, scales, None, group)


def _experts(model: Model, device: torch.device | str) -> Iterator[Workload]:
    from .gpu import moe

    w13 = _random(model.experts, 2 * model.intermediate, model.hidden, device=device)
    w2 = _random(model.experts, model.hidden, model.intermediate, device=device)
    for rows in (16, 4096):
        x, logits = _random(rows, model.hidden, device=device), _random(rows, model.experts, device=device)

        def run(x: Tensor = x, logits: Tensor = logits) -> Tensor:
            return moe.experts(x, w13, w2, *moe.route(logits, model.top_k, True))

        touched = model.experts * (1 - (1 - model.top_k / model.experts) ** rows)  # experts, expected
        per_expert = 3 * model.hidden * model.intermediate
        yield Workload(f"experts {rows}", run, int(2 * touched * per_expert), 2 * rows * model.top_k * per_expert)


def _sampling(model: Model, device: torch.device | str) -> Iterator[Workload]:
    from .gpu import sampling

    rows = 64
    logits = _random(rows, model.vocab, device=device).float()
    one = torch.ones(rows, device=device)
    uniform = torch.full((rows,), 0.5, dtype=torch.float64, device=device)
    top_k = torch.full((rows,), 50, device=device)
    size = 4 * logits.numel()
    yield Workload(f"greedy {rows}", partial(sampling.greedy, logits), size, 0, rival=partial(torch.argmax, logits, -1))
    draw = partial(sampling.sample, logits, one, top_k, 0.9 * one, 0.01 * one, uniform)
    yield Workload(f"top-k, top-p {rows}", draw, size, 0, rival=partial(torch.sort, logits, -1))


def _random(*shape: int, device: torch.device | str) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device=device)


def _milliseconds(run: Callable[[], object], flush: Tensor, seconds: float) -> float:
    """The median call, with L2 holding something else before each."""
    for _ in range(3):
        run()
    times: list[float] = []
    while len(times) < 5 or (sum(times) < seconds * 1000 and len(times) < 200):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pagedray.kernels.bench", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", nargs="+", default=[""], help="rows whose names contain one of these")
    parser.add_argument("--seconds", type=float, default=0.2, help="about how long a row is measured")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(
            "pagedray.kernels.bench measures GPU kernels, and PyTorch sees no CUDA GPU here. Run it on a machine with "
            "one and a CUDA build of PyTorch. What can be known without: python -m pagedray.kernels.gpu.compile",
            file=sys.stderr,
        )
        return 2
    device = torch.device("cuda")
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    copy_ms = _milliseconds(partial(torch.empty_like(source).copy_, source), flush, args.seconds)
    copy = 2 * _COPY_BYTES / copy_ms / 1e6  # GB/s
    square = _random(_PEAK_SIZE, _PEAK_SIZE, device=device)
    peak = 2 * _PEAK_SIZE**3 / _milliseconds(partial(torch.mm, square, square), flush, args.seconds) / 1e9  # TFLOP/s
    del source, square
    print(f"{torch.cuda.get_device_name()}: copy {copy:,.0f} GB/s, bf16 product {peak:,.0f} TFLOP/s\n")
    print("| model | kernel | ms | GB/s | of copy | TFLOP/s | of product | rival ms | target |")
    print("|---|---|---|---|---|---|---|---|---|")
    for model in (m.rank_of(size) for m in MODELS for size in (1, 8)):
        for workload in workloads(model, device):
            if not any(wanted in workload.name for wanted in args.only):
                continue
            ms = _milliseconds(workload.run, flush, args.seconds)
            rival = f"{_milliseconds(workload.rival, flush, args.seconds):.3f}" if workload.rival else ""
            gbs, tflops = workload.bytes / ms / 1e6, workload.flops / ms / 1e9
            print(
                f"| {model.name} | {workload.name} | {ms:.3f} | {gbs:,.0f} | {gbs / copy:.0%} | {tflops:,.0f} | "
                f"{tflops / peak:.0%} | {rival} | {workload.target} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
