"""Norms, rotary embedding with cache write, gated activations and the rounding of activations, in Triton.

Memory-bound, all of them: a tensor is read once and written once, arithmetic is fp32 in between. Shapes and formulas
are `..ops`'s; each launcher here takes the same arguments as the operation of its name in `..reference`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .formats import LIMITS

LARGEST_ROW = 16384  # elements of a row that one program holds in registers
_HEADS = 8  # heads that one program rotates
_COLUMNS = 1024  # of a gated activation that one program computes


def _row_config(width: int) -> dict[str, int]:
    """A whole row a program: 16 to 32 elements a thread."""
    block = max(triton.next_power_of_2(width), 128)
    return {"BLOCK": block, "num_warps": 4 if block <= 2048 else 8 if block <= 8192 else 16}


@triton.jit
def rms_norm_kernel(
    out_ptr,
    new_residual_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    hidden,
    x_stride,
    residual_stride,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: r = x + residual, rounded (if ADD); out = round(r / sqrt(mean(r^2) + eps)) weight (Zhang 2019)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    if ADD:
        residual = tl.load(residual_ptr + row * residual_stride + columns, mask=inside, other=0.0)
        x = (x + residual.to(tl.float32)).to(dtype)
        tl.store(new_residual_ptr + row * hidden + columns, x, mask=inside)
        x = x.to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / hidden + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    scaled = normed.to(dtype).to(tl.float32) * weight
    tl.store(out_ptr + row * hidden + columns, scaled.to(dtype), mask=inside)


def _launch_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rows, hidden = x.shape
    if hidden > LARGEST_ROW or x.stride(1) != 1 or weight.shape != (hidden,):
        raise ValueError(
            f"rms_norm: x [T, H <= {LARGEST_ROW}], rows contiguous, and weight [H]; "
            f"got {list(x.shape)} strides {x.stride()} and {list(weight.shape)}"
        )
    out = x.new_empty(rows, hidden)
    new_residual = out if residual is None else x.new_empty(rows, hidden)
    if rows:
        rms_norm_kernel[(rows,)](
            out,
            new_residual,
            x,
            x if residual is None else residual,
            weight,
            hidden,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            eps,
            ADD=residual is not None,
            **_row_config(hidden),
        )
    return out, new_residual


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _launch_rms_norm(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _launch_rms_norm(x, residual, weight, eps)


@triton.jit
def _rotated(x1, x2, cos, sin):
    return x1 * cos - x2 * sin, x2 * cos + x1 * sin


@triton.jit
def rotary_and_cache_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    positions_ptr,
    cos_sin_ptr,
    slot_mapping_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_inverse,
    v_scale_inverse,
    q_stride,
    k_stride,
    v_stride,
    num_heads,
    num_kv_heads,
    block_size,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,  # half of the rotary part
    HALF_P2: tl.constexpr,
    REST_P2: tl.constexpr,  # what passes through, or 0
    V_P2: tl.constexpr,
    HEADS: tl.constexpr,
):
    """A few heads of one token. Programs of axis 1 come first to the q heads, then to the kv heads."""
    token = tl.program_id(0).to(tl.int64)
    q_tiles = tl.cdiv(num_heads, HEADS)
    tile = tl.program_id(1)
    half = tl.arange(0, HALF_P2)
    within = half < HALF
    angles = cos_sin_ptr + tl.load(positions_ptr + token) * (2 * HALF) + half
    cos = tl.load(angles, mask=within, other=0.0)[None, :]
    sin = tl.load(angles + HALF, mask=within, other=0.0)[None, :]
    if tile < q_tiles:
        heads = tile * HEADS + tl.arange(0, HEADS)
        mask = (heads < num_heads)[:, None] & within[None, :]
        pointers = q_ptr + token * q_stride + heads[:, None] * HEAD_DIM + half[None, :]
        x1 = tl.load(pointers, mask=mask, other=0.0)
        x2 = tl.load(pointers + HALF, mask=mask, other=0.0)
        y1, y2 = _rotated(x1.to(tl.float32), x2.to(tl.float32), cos, sin)
        tl.store(pointers, y1.to(x1.dtype), mask=mask)
        tl.store(pointers + HALF, y2.to(x1.dtype), mask=mask)
    else:
        slot = tl.load(slot_mapping_ptr + token)
        if slot >= 0:
            heads = (tile - q_tiles) * HEADS + tl.arange(0, HEADS)
            real = (heads < num_kv_heads)[:, None]
            head_rows = (slot // block_size * num_kv_heads + heads) * block_size + slot % block_size
            cached = head_rows[:, None] * HEAD_DIM
            mask = real & within[None, :]
            pointers = k_ptr + token * k_stride + heads[:, None] * HEAD_DIM + half[None, :]
            x1 = tl.load(pointers, mask=mask, other=0.0)
            x2 = tl.load(pointers + HALF, mask=mask, other=0.0)
            y1, y2 = _rotated(x1.to(tl.float32), x2.to(tl.float32), cos, sin)
            # rounded to k's dtype first, so that an fp8 cache holds what the others would, rounded once more
            y1 = y1.to(x1.dtype).to(tl.float32) * k_scale_inverse
            y2 = y2.to(x1.dtype).to(tl.float32) * k_scale_inverse
            stored = k_cache_ptr.dtype.element_ty
            tl.store(k_cache_ptr + cached + half[None, :], y1.to(stored), mask=mask)
            tl.store(k_cache_ptr + cached + HALF + half[None, :], y2.to(stored), mask=mask)
            if REST_P2 > 0:
                rest = 2 * HALF + tl.arange(0, REST_P2)[None, :]
                rest_mask = real & (rest < HEAD_DIM)
                x = tl.load(k_ptr + token * k_stride + heads[:, None] * HEAD_DIM + rest, mask=rest_mask, other=0.0)
                tl.store(k_cache_ptr + cached + rest, (x.to(tl.float32) * k_scale_inverse).to(stored), mask=rest_mask)
            columns = tl.arange(0, V_P2)[None, :]
            v_mask = real & (columns < HEAD_DIM)
            v = tl.load(v_ptr + token * v_stride + heads[:, None] * HEAD_DIM + columns, mask=v_mask, other=0.0)
            v = v.to(tl.float32) * v_scale_inverse
            tl.store(v_cache_ptr + cached + columns, v.to(v_cache_ptr.dtype.element_ty), mask=v_mask)


def rotary_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """As `..ops.rotary_and_cache`; with fp8 e4m3 caches, what is stored is k / k_scale and v / v_scale."""
    tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    rotary_dim = cos_sin.shape[1]
    if not all(t.stride(2) == 1 and t.stride(1) == head_dim for t in (q, k, v)):
        raise ValueError("rotary_and_cache: q, k and v [T, heads, D], each token's heads contiguous")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous() and k_cache.shape == v_cache.shape):
        raise ValueError("rotary_and_cache: caches [num_blocks, num_kv_heads, block_size, D], contiguous")
    if tokens == 0:
        return
    grid = (tokens, triton.cdiv(num_heads, _HEADS) + triton.cdiv(num_kv_heads, _HEADS))
    rotary_and_cache_kernel[grid](
        q,
        k,
        v,
        positions,
        cos_sin,
        slot_mapping,
        k_cache,
        v_cache,
        1.0 / k_scale,
        1.0 / v_scale,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        num_heads,
        num_kv_heads,
        block_size,
        HEAD_DIM=head_dim,
        HALF=rotary_dim // 2,
        HALF_P2=triton.next_power_of_2(rotary_dim // 2),
        REST_P2=triton.next_power_of_2(head_dim - rotary_dim) if head_dim > rotary_dim else 0,
        V_P2=triton.next_power_of_2(head_dim),
        HEADS=_HEADS,
        num_warps=4,
    )


@triton.jit
def gated_kernel(out_ptr, x_ptr, width, x_stride, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """act(gate) up for BLOCK columns of a row; SiLU, or GELU in its tanh form (Hendrycks 2016)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    up = tl.load(x_ptr + row * x_stride + width + columns, mask=inside, other=0.0).to(tl.float32)
    g = gate.to(tl.float32)
    # both are g sigmoid(z): (1 + tanh(y)) / 2 = sigmoid(2 y)
    z = 1.5957691216057308 * (g + 0.044715 * g * g * g) if GELU else g
    result = g / (1.0 + tl.exp(-z)) * up
    tl.store(out_ptr + row * width + columns, result.to(gate.dtype), mask=inside)


def _gated(x: Tensor, gelu: bool) -> Tensor:
    if x.stride(1) != 1 or x.shape[1] % 2:
        raise ValueError(f"gated activation: x [T, 2 I], rows contiguous; got {list(x.shape)} strides {x.stride()}")
    rows, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, width)
    if rows:
        block = min(_COLUMNS, triton.next_power_of_2(width))
        grid = (rows, triton.cdiv(width, block))
        gated_kernel[grid](out, x, width, x.stride(0), GELU=gelu, BLOCK=block, num_warps=4)
    return out


def silu_and_mul(x: Tensor) -> Tensor:
    return _gated(x, gelu=False)


def gelu_and_mul(x: Tensor) -> Tensor:
    return _gated(x, gelu=True)


@triton.jit
def quantize_rows_kernel(out_ptr, scale_ptr, x_ptr, width, x_stride, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    """scale = max |x| / LIMIT of the row; out = x / scale, rounded to nearest, ties to even."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), axis=0), 1e-10), LIMIT)
    scaled = tl.clamp(tl.div_rn(x, scale + tl.zeros_like(x)), -LIMIT, LIMIT)
    target = out_ptr.dtype.element_ty
    if target == tl.int8:
        scaled = (scaled + 12582912.0) - 12582912.0  # 1.5 * 2**23: fp32 addition rounds to an integer, ties to even
    tl.store(out_ptr + row * width + columns, scaled.to(target), mask=inside)
    tl.store(scale_ptr + row, scale)


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [T, K] -> int8 or fp8 e4m3 [T, K] and the scale of each row, fp32 [T], such that x is about values * scale."""
    rows, width = x.shape
    if width > LARGEST_ROW * 4 or x.stride(1) != 1:
        raise ValueError(f"quantize_rows: x [T, K <= {LARGEST_ROW * 4}], rows contiguous; got {list(x.shape)}")
    out = torch.empty(rows, width, dtype=dtype, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        limit = LIMITS["int8" if dtype == torch.int8 else "fp8"]
        quantize_rows_kernel[(rows,)](out, scales, x, width, x.stride(0), LIMIT=limit, **_row_config(width))
    return out, scales
