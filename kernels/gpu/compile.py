"""Compiles the kernels for GPUs that are not here, and checks what the GPUs would have to give.

    python -m pagedray.kernels.gpu.compile                            # all, for sm_80, sm_90 and sm_100
    python -m pagedray.kernels.gpu.compile --only decode --arch 90
    python -m pagedray.kernels.gpu.compile --write docs/kernels.md

It prints a table, and exits with 1 where a rule is broken.

The launchers are called as a model calls them, on tensors of PyTorch's meta device, and what they would launch is
recorded and compiled: so the code checked is the code that runs, with its specializations. Compiling does not fail
where shared memory or registers do not suffice; launching would, or would be slow. Hence the rules:

- shared memory within what a block can have on the architecture; no register spills but `SPILLS_ALLOWED`;
- tensor cores of the generation where a tile has the 64 rows they want, which is prefill and GEMM: wgmma on sm_90,
  tcgen05 on sm_100;
- keys and values of decode in loads of 16 bytes. (Of an fp8 cache the values come in 8.)
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

FP8 = torch.float8_e4m3fn
SHARED_LIMIT = {80: 166_912, 90: 232_448, 100: 232_448}  # bytes a block
# bytes; tiles and warps that spare sm_80 these make the others spill
SPILLS_ALLOWED = {("sample_kernel", 80): 64}
_MARK = ("<!-- begin: written by python -m pagedray.kernels.gpu.compile --write -->", "<!-- end -->")

_TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
}


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel and the arguments it was called with, by name."""

    kernel: JITFunction
    arguments: dict[str, Any]
    options: dict[str, int] = field(default_factory=dict)  # num_warps, num_stages


@dataclass(frozen=True, slots=True)
class Report:
    kernel: str
    arch: int
    fp8: bool  # an argument is
    rows: int  # of a tile, where it multiplies matrices
    registers: int  # a thread
    spilled: int  # bytes a thread, stored or loaded
    shared: int  # bytes a block
    tensor_cores: dict[str, int]  # instructions of each kind
    loads: dict[int, int]  # from global memory, by bytes a thread


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Within, kernels are not launched but written down."""
    launches: list[Launch] = []

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        arguments = dict(zip(self.arg_names, args, strict=False))
        arguments |= {name: value for name, value in kwargs.items() if name in self.arg_names}
        options = {name: value for name, value in kwargs.items() if name in ("num_warps", "num_stages")}
        launches.append(Launch(self, arguments, options))

    launch, JITFunction.run = JITFunction.run, record  # type: ignore[method-assign]
    try:
        yield launches
    finally:
        JITFunction.run = launch  # type: ignore[method-assign]


def compile_launch(launch: Launch, arch: int) -> Report:
    """What the launch needs on sm_{arch}; specialized as Triton does it for these arguments."""
    if triton.knobs.runtime.interpret:
        raise RuntimeError(
            "compile in a process without TRITON_INTERPRET: the interpreter and the compiler exclude each other"
        )
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        kind = "constexpr"
        if parameter.is_constexpr:
            constants[(i,)] = value
        elif isinstance(value, torch.Tensor):
            kind = "*" + _TYPES[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            kind = "fp32"
        elif value == 1 and not parameter.do_not_specialize:
            constants[(i,)] = 1
        else:
            kind = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(i,)] = [["tt.divisibility", 16]]
        signature[parameter.name] = kind
    source = ASTSource(launch.kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(launch.options))
    ptx = compiled.asm["ptx"]
    log = _assemble(ptx, arch)
    spills = re.findall(r"(\d+) bytes spill", log)
    return Report(
        kernel=launch.kernel.__name__,
        arch=arch,
        fp8=_has_fp8(launch),
        rows=launch.arguments.get("M", 0) if "PRECISION" in launch.arguments else 0,
        registers=int(re.search(r"Used (\d+) registers", log)[1]),  # type: ignore[index]
        spilled=sum(map(int, spills)),
        shared=compiled.metadata.shared,
        tensor_cores={name: ptx.count(name) for name in ("wgmma.mma_async", "tcgen05.mma", "mma.sync") if name in ptx},
        loads=_loads(ptx),
    )


def _has_fp8(launch: Launch) -> bool:
    return any(isinstance(a, torch.Tensor) and a.dtype == FP8 for a in launch.arguments.values())


def _loads(ptx: str) -> dict[int, int]:
    """Instructions that read global memory, by the bytes that each moves for a thread."""
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?, (0x\w+|\d+)[,;]", ptx)
    loads = re.findall(r"ld\.global(?:\.\w+)*?(?:\.v(\d))?\.[a-z](\d+)", ptx)
    sizes = [int(size, 0) for size in copies] + [int(vector or 1) * int(bits) // 8 for vector, bits in loads]
    return dict(sorted(Counter(sizes).items()))


def _assemble(ptx: str, arch: int) -> str:
    """What ptxas says of registers and spills."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        target = f"sm_{arch}{'a' if arch >= 90 else ''}"
        command = [get_ptxas(arch).path, "-v", f"-arch={target}", str(source), "-o", str(Path(folder, "kernel.cubin"))]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stderr


def broken_rules(report: Report) -> list[str]:
    broken = []
    limit = SHARED_LIMIT[report.arch]
    if report.shared > limit:
        broken.append(f"needs {report.shared:,} bytes of shared memory; a block can have {limit:,}")
    if report.spilled > SPILLS_ALLOWED.get((report.kernel, report.arch), 0):
        broken.append(f"spills {report.spilled} bytes of registers")
    expected = {90: "wgmma.mma_async", 100: "tcgen05.mma"}.get(report.arch)
    if report.rows >= 64 and expected and expected not in report.tensor_cores:
        broken.append(f"has no {expected}")
    if report.kernel == "decode_kernel":
        # what is left of narrow ones reads the block table and the lengths
        narrow = sum(count for size, count in report.loads.items() if size < (8 if report.fp8 else 16))
        if report.loads.get(16, 0) < 16 or narrow > 12:
            broken.append(
                f"reads keys and values in less than 16 bytes at a time: {report.loads} (bytes: instructions)"
            )
    return broken


# --- what is compiled: the launchers, as a model calls them


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _attention(
    query_len: int,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    block_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    **options: Any,
) -> None:
    from ..reference import AttentionMetadata
    from . import attention

    sequences, blocks = 16, 64
    metadata = AttentionMetadata(
        _empty(sequences + 1, dtype=torch.int32),
        _empty(sequences, dtype=torch.int32),
        _empty(sequences, blocks, dtype=torch.int32),
        _empty(sequences * query_len, dtype=torch.int64),
        query_len,
        blocks * block_size,
    )
    q = _empty(sequences * query_len, heads, head_dim, dtype=dtype)
    cache = _empty(sequences * blocks, kv_heads, block_size, head_dim, dtype=cache_dtype or dtype)
    attention.paged_attention(q, cache, cache, metadata, 0.1, **options)


def _rotary(cache_dtype: torch.dtype) -> None:
    from . import elementwise

    q, k, cache = _empty(64, 32, 128), _empty(64, 8, 128), _empty(64, 8, 64, 128, dtype=cache_dtype)
    index = _empty(64, dtype=torch.int64)
    elementwise.rotary_and_cache(q, k, k, index, _empty(4096, 128, dtype=torch.float32), index, cache, cache)


def _sample() -> None:
    from . import sampling

    logits = _empty(8, 128256, dtype=torch.float32)
    fp32, fp64, i64 = (_empty(8, dtype=d) for d in (torch.float32, torch.float64, torch.int64))
    sampling.greedy(logits)
    sampling.sample(logits, fp32, i64, fp32, fp32, fp64)


def _gemm(rows: int, dtype: torch.dtype, **options: Any) -> None:
    from . import linear

    scales: dict[str, Any] = {}
    if dtype.itemsize == 1:
        scales = {"x_scale": _empty(rows, dtype=torch.float32), "w_scale": _empty(4096, dtype=torch.float32)}
    linear.gemm(_empty(rows, 4096, dtype=dtype), _empty(4096, 4096, dtype=dtype), torch.bfloat16, **scales, **options)


def _w4(rows: int, format: str, zeros: bool = False) -> None:
    from . import linear
    from .formats import GROUPS, QuantizedWeight

    group = GROUPS[format]
    scales = _empty(4096, 4096 // group, dtype=torch.float32 if format == "int4" else torch.uint8)
    points = _empty(4096, 4096 // group, dtype=torch.uint8) if zeros else None
    weight = QuantizedWeight(format, _empty(4096, 2048, dtype=torch.uint8), scales, points, group)
    linear.w4_gemm(_empty(rows, 4096), weight)


def _moe(tokens: int) -> None:
    """Qwen3-30B-A3B: 8 of 128 experts."""
    from . import moe

    weights, ids = moe.route(_empty(tokens, 128), 8, True)
    moe.experts(_empty(tokens, 2048), _empty(128, 1536, 2048), _empty(128, 2048, 768), weights, ids)


def _kv_blocks() -> None:
    from . import kv_blocks

    k_cache, v_cache, ids = _empty(64, 8, 64, 128), _empty(64, 8, 64, 128), _empty(16, dtype=torch.int64)
    run = _empty(2, 8, 16, 64, 128)
    kv_blocks.gather(run, k_cache, v_cache, ids)
    kv_blocks.scatter(run, k_cache, v_cache, ids)


def _elementwise() -> None:
    from . import elementwise

    x, weight = _empty(64, 4096), _empty(4096)
    elementwise.rms_norm(x, weight, 1e-5)
    elementwise.add_rms_norm(x, x, weight, 1e-5)
    elementwise.silu_and_mul(_empty(64, 28672))
    elementwise.gelu_and_mul(_empty(64, 28672))
    for dtype in (torch.int8, torch.float8_e4m3fn):
        elementwise.quantize_rows(x, dtype)


CASES: dict[str, Callable[[], None]] = {
    "decode, 32/8 heads of 128, blocks of 64": lambda: _attention(1),
    "decode, blocks of 16": lambda: _attention(1, block_size=16),
    "decode, 64/8 heads of 64": lambda: _attention(1, 64, 8, 64),
    "decode, 16/16 heads of 96, blocks of 32": lambda: _attention(1, 16, 16, 96, 32),
    "decode, 16/1 heads of 256": lambda: _attention(1, 16, 1, 256),
    "decode, fp16": lambda: _attention(1, dtype=torch.float16),
    "decode, fp8 cache": lambda: _attention(1, cache_dtype=FP8),
    "decode, batch-invariant": lambda: _attention(1, batch_invariant=True),
    "decode, window and cap": lambda: _attention(1, window=1024, soft_cap=50.0),
    "prefill, 32/8 heads of 128, blocks of 64": lambda: _attention(256),
    "prefill, blocks of 16": lambda: _attention(256, block_size=16),
    "prefill, 64/8 heads of 64": lambda: _attention(256, 64, 8, 64),
    "prefill, 16/16 heads of 96, blocks of 32": lambda: _attention(256, 16, 16, 96, 32),
    "prefill, 16/1 heads of 256": lambda: _attention(256, 16, 1, 256),
    "prefill, fp16": lambda: _attention(256, dtype=torch.float16),
    "prefill, fp8 cache": lambda: _attention(256, cache_dtype=FP8),
    "prefill, window and cap": lambda: _attention(256, window=1024, soft_cap=50.0),
    "GEMM, bf16, batch-invariant": lambda: _gemm(4096, torch.bfloat16, batch_invariant=True),
    "GEMM, bf16": lambda: _gemm(4096, torch.bfloat16),
    "GEMM, int8": lambda: _gemm(4096, torch.int8),
    "GEMM, fp8": lambda: _gemm(4096, FP8),
    "GEMM, bf16, 8 rows": lambda: _gemm(8, torch.bfloat16),
    "W4A16, int4, 8 rows": lambda: _w4(8, "int4"),
    "W4A16, int4, 4096 rows": lambda: _w4(4096, "int4"),
    "W4A16, int4 with zeros, 64 rows": lambda: _w4(64, "int4", zeros=True),
    "W4A16, mxfp4, 8 rows": lambda: _w4(8, "mxfp4"),
    "W4A16, nvfp4, 8 rows": lambda: _w4(8, "nvfp4"),
    "W4A16, nvfp4, 4096 rows": lambda: _w4(4096, "nvfp4"),
    "MoE, 8 of 128, 16 tokens": lambda: _moe(16),
    "MoE, 8 of 128, 4096 tokens": lambda: _moe(4096),
    "KV blocks": _kv_blocks,
    "norms, gates, rounding": _elementwise,
    "rotary and cache": lambda: _rotary(torch.bfloat16),
    "rotary and cache, fp8": lambda: _rotary(FP8),
    "sampling": _sample,
}


def launches_of(case: Callable[[], None]) -> list[Launch]:
    with recorded() as launches:
        case()
    return launches


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pagedray.kernels.gpu.compile", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--arch", type=int, nargs="+", choices=SHARED_LIMIT, default=list(SHARED_LIMIT))
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose names contain one of these")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table into this Markdown file")
    args = parser.parse_args(argv)
    lines = [
        "| case | kernel | sm | registers | spilled | shared bytes | tensor cores | loads: bytes x count |",
        "|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    failures = []
    for name, case in CASES.items():
        if not any(wanted in name for wanted in args.only):
            continue
        for launch in launches_of(case):
            for arch in args.arch:
                if arch < 89 and _has_fp8(launch):  # sm_80 has no e4m3
                    continue
                report = compile_launch(launch, arch)
                cores = ", ".join(f"{count} {kind}" for kind, count in report.tensor_cores.items())
                loads = ", ".join(f"{size} x {count}" for size, count in report.loads.items())
                lines.append(
                    f"| {name} | {report.kernel.removesuffix('_kernel')} | {arch} | {report.registers} | "
                    f"{report.spilled} | {report.shared:,} | {cores} | {loads} |"
                )
                print(lines[-1], flush=True)
                failures += [f"{name}, {report.kernel}, sm_{arch}: {rule}" for rule in broken_rules(report)]
    if args.write:
        text = args.write.read_text()
        before, rest = text.split(_MARK[0])
        after = rest.split(_MARK[1])[1]
        table = f"Triton {triton.__version__}:\n\n" + "\n".join(lines)
        args.write.write_text(f"{before}{_MARK[0]}\n{table}\n{_MARK[1]}{after}")
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
