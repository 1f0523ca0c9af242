"""Linear layers in Triton: y = x w^T + bias, with weights in 16, 8 or 4 bits.

Dense layers go to cuBLAS (torch.matmul), but for batch-invariant mode. The rest:

    W8A8     y = (x8 w8^T) s_x s_w      int8 or fp8 e4m3; s_x of a row or of all, s_w of an output channel or of all
    W4A16    y = x w^T    w = (nibble - zero) s of a group (GPTQ, Frantar 2022; AWQ, Lin 2023)
    FP4      y = x w^T    w = e2m1 s of 16 inputs (NVFP4) or of 32 (MXFP4)

Sums are fp32 (int32 for int8) and rounded once; `.formats` has the formats.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..reference import PackedLinear
from .elementwise import quantize_rows
from .formats import QuantizedWeight, quantize


@dataclass(frozen=True, slots=True)
class Config:
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# By the largest number of rows that it is for. Depth 64 in 16 bits, 128 in 8: 128 bytes a row of a tile either way.
GEMM = {
    16: Config(16, 64, 128, 4, 4),
    64: Config(64, 64, 64, 4, 4),
    1 << 30: Config(128, 128, 64, 8, 3),
}
INVARIANT = Config(64, 128, 64, 4, 4)  # for any number of rows
_GROUPED_ROWS = 8  # tiles of rows that share their weights in L2


def gemm_config(rows: int, itemsize: int, batch_invariant: bool = False) -> Config:
    config = INVARIANT if batch_invariant else next(c for most, c in GEMM.items() if rows <= most)
    if itemsize == 1:
        return Config(config.block_m, config.block_n, 128, config.num_warps, config.num_stages)
    if itemsize == 4:  # for tests and odd models
        return Config(config.block_m, 64, 32, config.num_warps, 2)
    return config


@triton.jit
def tile_of(program, rows, columns, M: tl.constexpr, N: tl.constexpr, GROUPED: tl.constexpr):
    """Which tile a program computes: GROUPED rows of tiles at a time, so that they find their weights in L2."""
    across = tl.cdiv(columns, N)
    band = program // (GROUPED * across)
    height = tl.minimum(tl.cdiv(rows, M) - band * GROUPED, GROUPED)
    within = program % (GROUPED * across)
    return band * GROUPED + within % height, within // height


@triton.jit
def gemm_kernel(
    out_ptr,
    x_ptr,
    w_ptr,
    bias_ptr,
    x_scale_ptr,
    w_scale_ptr,
    rows,
    columns,
    depth,
    x_stride,
    w_stride,
    SCALED: tl.constexpr,  # x_scale [rows] and w_scale [columns], or
    ROW_SCALES: tl.constexpr,  # ... x_scale of all rows
    COLUMN_SCALES: tl.constexpr,  # ... w_scale of all columns
    BIAS: tl.constexpr,
    WHOLE_TILES: tl.constexpr,  # depth is a multiple of K
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A tile of x [rows, depth] w [columns, depth]^T; the order of the sum depends on K alone."""
    tile_m, tile_n = tile_of(tl.program_id(0), rows, columns, M, N, GROUPED)
    m = tile_m * M + tl.arange(0, M)
    n = tile_n * N + tl.arange(0, N)
    k = tl.arange(0, K)
    # rows and columns beyond the end read the first ones again, which costs no mask; they are not stored
    x_tile = x_ptr + (m % rows).to(tl.int64)[:, None] * x_stride + k[None, :]
    w_tile = w_ptr + (n % columns).to(tl.int64)[:, None] * w_stride + k[None, :]
    integers: tl.constexpr = x_ptr.dtype.element_ty == tl.int8
    acc = tl.zeros([M, N], tl.int32 if integers else tl.float32)
    for start in range(0, depth, K):
        if WHOLE_TILES:
            x = tl.load(x_tile + start)
            w = tl.load(w_tile + start)
        else:
            inside = (start + k < depth)[None, :]
            x = tl.load(x_tile + start, mask=inside, other=0.0)
            w = tl.load(w_tile + start, mask=inside, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION, out_dtype=tl.int32 if integers else tl.float32)
    result = acc.to(tl.float32)
    if SCALED:
        x_scale = tl.load(x_scale_ptr + m, mask=m < rows, other=0.0)[:, None] if ROW_SCALES else tl.load(x_scale_ptr)
        w_scale = (
            tl.load(w_scale_ptr + n, mask=n < columns, other=0.0)[None, :] if COLUMN_SCALES else tl.load(w_scale_ptr)
        )
        result = result * x_scale * w_scale
    if BIAS:
        result += tl.load(bias_ptr + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
    inside = (m < rows)[:, None] & (n < columns)[None, :]
    out = out_ptr + m.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=inside)


def gemm(
    x: Tensor,
    w: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    x_scale: Tensor | None = None,
    w_scale: Tensor | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """x [T, K], w [N, K] of one dtype -> [T, N]. Scales fp32: of one element, or x's [T] and w's [N]; both or none."""
    (rows, depth), columns = x.shape, w.shape[0]
    if x.dtype != w.dtype or w.shape[1] != depth or x.stride(1) != 1 or w.stride(1) != 1:
        raise ValueError(
            f"gemm: x [T, K] and w [N, K] of one dtype, rows contiguous; got {list(x.shape)} {x.dtype}, "
            f"{list(w.shape)} {w.dtype}"
        )
    out = torch.empty(rows, columns, dtype=out_dtype, device=x.device)
    if rows:
        config = gemm_config(rows, x.element_size(), batch_invariant)
        grid = (triton.cdiv(rows, config.block_m) * triton.cdiv(columns, config.block_n),)
        gemm_kernel[grid](
            out,
            x,
            w,
            out if bias is None else bias,
            out if x_scale is None else x_scale,
            out if w_scale is None else w_scale,
            rows,
            columns,
            depth,
            x.stride(0),
            w.stride(0),
            SCALED=x_scale is not None,
            ROW_SCALES=x_scale is not None and x_scale.numel() > 1,
            COLUMN_SCALES=w_scale is not None and w_scale.numel() > 1,
            BIAS=bias is not None,
            WHOLE_TILES=depth % config.block_k == 0,
            M=config.block_m,
            N=config.block_n,
            K=config.block_k,
            GROUPED=_GROUPED_ROWS,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return out


def linear(
    x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None, batch_invariant: bool = False
) -> Tensor:
    """As `..ops.linear`."""
    out_dtype = out_dtype or x.dtype
    if packed.native is not None:
        return quantized_linear(x, packed.native, packed.bias, batch_invariant, out_dtype)
    if batch_invariant:
        return gemm(x, packed.data, out_dtype, packed.bias, batch_invariant=True)
    if out_dtype == x.dtype:
        return F.linear(x, packed.data, packed.bias)
    # cuBLAS writes its fp32 sums unrounded; on other devices PyTorch has no such product
    if x.device.type == "cuda":
        out = torch.mm(x, packed.data.t(), out_dtype=out_dtype)
    else:
        out = F.linear(x.to(out_dtype), packed.data.to(out_dtype))
    return out if packed.bias is None else out + packed.bias


def quantize_linear(weight: Tensor, bias: Tensor | None, format: str) -> PackedLinear:
    """As `..ops.quantize_linear`."""
    rounded = quantize(weight, format)
    return PackedLinear(rounded.data, bias, rounded.out_features, rounded.in_features, weight.dtype, rounded)


# By the largest number of rows, as GEMM; block_k counts bytes, of two inputs each.
W4 = {
    16: Config(16, 64, 64, 4, 4),
    64: Config(64, 64, 64, 4, 3),
    1 << 30: Config(128, 64, 32, 8, 3),
}
W4_INVARIANT = Config(64, 64, 64, 4, 3)
_FORMATS = {"int4": 0, "mxfp4": 1, "nvfp4": 2}
_MOST_SPLITS = 8


@triton.jit
def _e2m1(nibble):
    """Bits s e e m: twice the magnitude is m where e is 0, else (2 + m) 2^(e - 1)."""
    e, m = (nibble >> 1) & 3, nibble & 1
    twice = tl.where(e == 0, m, (2 + m) << tl.maximum(e - 1, 0)).to(tl.float32)
    return tl.where(nibble > 7, -0.5, 0.5) * twice


@triton.jit
def _unsigned_e4m3(bits):
    """fp8 e4m3 by hand, for sm_80 has no instruction: m 2^-9, or 2^(e - 7) (1 + m / 8)."""
    e, m = bits >> 3, bits & 7
    normal = (((e + 120) << 23) | (m << 20)).to(tl.float32, bitcast=True)
    return tl.where(e == 0, m.to(tl.float32) * 0.001953125, normal)


@triton.jit
def w4_gemm_kernel(
    out_ptr,  # [rows, columns], or fp32 [splits, rows, columns]
    x_ptr,
    w_ptr,  # uint8 [columns, depth / 2]
    scales_ptr,  # [columns, depth / GROUP]
    zeros_ptr,
    bias_ptr,
    global_scale,
    rows,
    columns,
    depth,
    x_stride,
    FORMAT: tl.constexpr,  # 0 int4, 1 mxfp4, 2 nvfp4
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    BIAS: tl.constexpr,
    SPLITS: tl.constexpr,  # programs that share the depth of a tile
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,  # bytes
    GROUPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x [rows, depth] times a matrix of 4 bits, whose halves of a byte meet x in a product each."""
    HALF: tl.constexpr = GROUP // 2
    tile_m, tile_n = tile_of(tl.program_id(0), rows, columns, M, N, GROUPED)
    split = tl.program_id(1)
    m = tile_m * M + tl.arange(0, M)
    n = tile_n * N + tl.arange(0, N)
    x_rows = x_ptr + (m % rows).to(tl.int64)[:, None] * x_stride
    n_rows = (n % columns).to(tl.int64)[:, None]
    num_bytes = depth // 2
    groups = depth // GROUP
    share = tl.cdiv(tl.cdiv(num_bytes, SPLITS), K) * K
    acc = tl.zeros([M, N], tl.float32)
    for start in range(split * share, tl.minimum((split + 1) * share, num_bytes), K):
        at = start + tl.arange(0, K)
        inside = (at < num_bytes)[None, :]
        low_inputs = (at // HALF * GROUP + at % HALF)[None, :]
        x_low = tl.load(x_rows + low_inputs, mask=inside, other=0.0)
        x_high = tl.load(x_rows + low_inputs + HALF, mask=inside, other=0.0)
        packed = tl.load(w_ptr + n_rows * num_bytes + at[None, :], mask=inside, other=0).to(tl.int32)
        scale = tl.load(scales_ptr + n_rows * groups + (at // HALF)[None, :], mask=inside, other=0)
        if FORMAT == 0:
            zero = 8
            if ZEROS:
                zero = tl.load(zeros_ptr + n_rows * groups + (at // HALF)[None, :], mask=inside, other=0).to(tl.int32)
            w_low = ((packed & 15) - zero).to(tl.float32) * scale
            w_high = ((packed >> 4) - zero).to(tl.float32) * scale
        else:
            bits = scale.to(tl.int32)
            if FORMAT == 1:
                factor = (bits << 23).to(tl.float32, bitcast=True)
            else:
                factor = _unsigned_e4m3(bits)
            factor = factor * global_scale
            w_low = _e2m1(packed & 15) * factor
            w_high = _e2m1(packed >> 4) * factor
        acc = tl.dot(x_low, tl.trans(w_low.to(x_low.dtype)), acc, input_precision=PRECISION)
        acc = tl.dot(x_high, tl.trans(w_high.to(x_low.dtype)), acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
    out_rows = (split * rows + m).to(tl.int64)[:, None]
    inside = (m < rows)[:, None] & (n < columns)[None, :]
    tl.store(out_ptr + out_rows * columns + n[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)


def w4_gemm(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, batch_invariant: bool = False) -> Tensor:
    """x [T, K] times int4, mxfp4 or nvfp4 [N, K] -> [T, N]."""
    (rows, depth), columns = x.shape, weight.out_features
    if depth != weight.in_features or x.stride(1) != 1:
        raise ValueError(f"w4_gemm: x [T, {weight.in_features}], rows contiguous; got {list(x.shape)}")
    out = x.new_empty(rows, columns)
    if not rows:
        return out
    config = W4_INVARIANT if batch_invariant else next(c for most, c in W4.items() if rows <= most)
    tiles = triton.cdiv(rows, config.block_m) * triton.cdiv(columns, config.block_n)
    # few rows leave few tiles, and reading the weights needs all multiprocessors
    splits = (
        1 if batch_invariant else max(1, min(_MOST_SPLITS, 2 * _processors(x) // tiles, depth // (8 * config.block_k)))
    )
    target = out if splits == 1 else torch.empty(splits, rows, columns, dtype=torch.float32, device=x.device)
    w4_gemm_kernel[(tiles, splits)](
        target,
        x,
        weight.data,
        weight.scales,
        weight.data if weight.zeros is None else weight.zeros,
        out if bias is None else bias,
        weight.global_scale,
        rows,
        columns,
        depth,
        x.stride(0),
        FORMAT=_FORMATS[weight.format],
        GROUP=weight.group,
        ZEROS=weight.zeros is not None,
        BIAS=bias is not None and splits == 1,
        SPLITS=splits,
        M=config.block_m,
        N=config.block_n,
        K=config.block_k,
        GROUPED=_GROUPED_ROWS,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if splits == 1:
        return out
    total = target.sum(0)
    return (total if bias is None else total + bias).to(x.dtype)


def _processors(x: Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.device.type == "cuda" else 132


def quantized_linear(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None = None,
    batch_invariant: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """As `.formats.quantized_linear`: 8-bit weights round the activations of each row first, 4-bit ones do not."""
    if weight.group:
        return w4_gemm(x, weight, bias, batch_invariant).to(out_dtype or x.dtype)
    rounded, scales = quantize_rows(x, weight.data.dtype)
    return gemm(rounded, weight.data, out_dtype or x.dtype, bias, scales, weight.scales, batch_invariant)
