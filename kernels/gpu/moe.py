"""Mixture of experts in Triton: routing, the order by experts, and grouped GEMM.

    y = sum over the k chosen experts of weight_e w2_e (silu(w1_e x) * (w3_e x))    (Shazeer 2017; Mixtral, Jiang 2024)

Each token is assigned to k experts; assignment a belongs to token a // k. `order` sorts the assignments by expert,
stably, and pads each expert's to whole tiles, so that a tile of the GEMM has one expert's weights (MegaBlocks, Gale
2022; the layout is vLLM's). Nothing comes to the host: grids are for the most tiles there can be, and those beyond the
end return.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .elementwise import silu_and_mul
from .linear import Config

# By the largest number of assignments an expert has on average.
GROUPED_GEMM = {
    16: Config(16, 64, 128, 4, 4),
    64: Config(64, 64, 64, 4, 4),
    1 << 30: Config(128, 128, 64, 8, 3),
}
_SCAN = 1024  # assignments that are looked at together


@triton.jit
def route_kernel(
    weights_ptr, ids_ptr, logits_ptr, experts, stride, TOP: tl.constexpr, NORMED: tl.constexpr, BLOCK: tl.constexpr
):
    """softmax of a row, its TOP largest, of equals the lowest; NORMED: divided by their sum."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * stride + columns, mask=columns < experts, other=float("-inf")).to(tl.float32)
    weights = tl.exp(logits - tl.max(logits, axis=0))
    weights = weights / tl.sum(weights, axis=0)
    left = tl.where(columns < experts, weights, -1.0)
    chosen_sum = 0.0
    for _ in tl.static_range(TOP):
        best = tl.max(left, axis=0)
        chosen_sum += best
        at = tl.min(tl.where(left == best, columns, BLOCK), axis=0)
        left = tl.where(columns == at, -1.0, left)
    left = tl.where(columns < experts, weights, -1.0)
    for i in tl.static_range(TOP):
        best = tl.max(left, axis=0)
        at = tl.min(tl.where(left == best, columns, BLOCK), axis=0)
        tl.store(weights_ptr + row * TOP + i, best / chosen_sum if NORMED else best)
        tl.store(ids_ptr + row * TOP + i, at)
        left = tl.where(columns == at, -1.0, left)


def route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> the chosen experts' weights fp32 [T, top_k], falling, and their ids int32 [T, top_k]."""
    tokens, experts = logits.shape
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    if tokens:
        route_kernel[(tokens,)](
            weights,
            ids,
            logits,
            experts,
            logits.stride(0),
            TOP=top_k,
            NORMED=renormalize,
            BLOCK=triton.next_power_of_2(experts),
            num_warps=1 if experts <= 128 else 4,
        )
    return weights, ids


@triton.jit
def count_kernel(counts_ptr, ids_ptr, assignments, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    count = 0
    for start in range(0, assignments, BLOCK):
        at = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + at, mask=at < assignments, other=-1)
        count += tl.sum((ids == expert).to(tl.int32), axis=0)
    tl.store(counts_ptr + expert, count)


@triton.jit
def order_kernel(
    order_ptr, tile_experts_ptr, counts_ptr, ids_ptr, assignments, experts, EXPERTS_P2: tl.constexpr, M: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes one expert's assignments, from the tile on that is its first, and names the expert in its tiles."""
    expert = tl.program_id(0)
    every = tl.arange(0, EXPERTS_P2)
    counts = tl.load(counts_ptr + every, mask=every < experts, other=0)
    first_tile = tl.sum(tl.where(every < expert, tl.cdiv(counts, M), 0), axis=0)
    place = first_tile * M
    for start in range(0, assignments, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mine = tl.load(ids_ptr + at, mask=at < assignments, other=-1) == expert
        rank = tl.cumsum(mine.to(tl.int32), axis=0) - 1
        tl.store(order_ptr + place + rank, at, mask=mine)
        place += tl.sum(mine.to(tl.int32), axis=0)
    tiles = tl.cdiv(tl.load(counts_ptr + expert), M)
    for tile in range(0, tiles):
        tl.store(tile_experts_ptr + first_tile + tile, expert)


@dataclass(frozen=True, slots=True)
class Order:
    """Assignments in tiles of `block_m`, an expert a tile."""

    assignments: Tensor  # int32 [tiles * block_m]; -1: padding
    tile_experts: Tensor  # int32 [tiles]; -1: beyond the last
    block_m: int


def order(ids: Tensor, experts: int, block_m: int) -> Order:
    """ids int32 [T, top_k], contiguous."""
    assignments = ids.numel()
    # each expert pads less than a tile, and only one that is chosen
    tiles = triton.cdiv(assignments, block_m) + min(experts, assignments)
    counts = torch.empty(experts, dtype=torch.int32, device=ids.device)
    sorted_ids = torch.full((tiles * block_m,), -1, dtype=torch.int32, device=ids.device)
    tile_experts = torch.full((tiles,), -1, dtype=torch.int32, device=ids.device)
    block = max(16, min(_SCAN, triton.next_power_of_2(assignments)))
    count_kernel[(experts,)](counts, ids, assignments, BLOCK=block, num_warps=4)
    order_kernel[(experts,)](
        sorted_ids,
        tile_experts,
        counts,
        ids,
        assignments,
        experts,
        EXPERTS_P2=triton.next_power_of_2(experts),
        M=block_m,
        BLOCK=block,
        num_warps=4,
    )
    return Order(sorted_ids, tile_experts, block_m)


@triton.jit
def grouped_gemm_kernel(
    out_ptr,  # [assignments, columns]
    x_ptr,
    w_ptr,  # [experts, columns, depth]
    order_ptr,
    tile_experts_ptr,
    row_weights_ptr,
    columns,
    depth,
    x_stride,
    SHARED_BY: tl.constexpr,  # assignments that read one row of x
    WEIGHTED: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A tile of assignments times their expert's matrix."""
    across = tl.cdiv(columns, N)
    tile, tile_n = tl.program_id(0) // across, tl.program_id(0) % across
    expert = tl.load(tile_experts_ptr + tile)
    if expert >= 0:
        assignments = tl.load(order_ptr + tile * M + tl.arange(0, M))
        real = assignments >= 0
        x_rows = (tl.maximum(assignments, 0) // SHARED_BY).to(tl.int64)
        n = tile_n * N + tl.arange(0, N)
        k = tl.arange(0, K)
        x_tile = x_ptr + x_rows[:, None] * x_stride + k[None, :]
        w_rows = expert.to(tl.int64) * columns + n % columns
        w_tile = w_ptr + w_rows[:, None] * depth + k[None, :]
        acc = tl.zeros([M, N], tl.float32)
        for start in range(0, depth, K):
            if WHOLE_TILES:
                x = tl.load(x_tile + start)
                w = tl.load(w_tile + start)
            else:
                inside = (start + k < depth)[None, :]
                x = tl.load(x_tile + start, mask=inside, other=0.0)
                w = tl.load(w_tile + start, mask=inside, other=0.0)
            acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
        if WEIGHTED:
            acc = acc * tl.load(row_weights_ptr + assignments, mask=real, other=0.0)[:, None]
        out = out_ptr + assignments.to(tl.int64)[:, None] * columns + n[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=real[:, None] & (n < columns)[None, :])


def grouped_gemm(
    x: Tensor, w: Tensor, order: Order, assignments: int, config: Config, row_weights: Tensor | None = None
) -> Tensor:
    """x [T, K], w [E, N, K] contiguous -> [assignments, N]: assignment a reads row a // (assignments / T) of x.

    With row_weights fp32 [assignments] the result is weighted and fp32.
    """
    columns, depth = w.shape[1:]
    dtype = x.dtype if row_weights is None else torch.float32
    out = torch.empty(assignments, columns, dtype=dtype, device=x.device)
    grouped_gemm_kernel[(order.tile_experts.numel() * triton.cdiv(columns, config.block_n),)](
        out,
        x,
        w,
        order.assignments,
        order.tile_experts,
        out if row_weights is None else row_weights,
        columns,
        depth,
        x.stride(0),
        SHARED_BY=assignments // x.shape[0],
        WEIGHTED=row_weights is not None,
        WHOLE_TILES=depth % config.block_k == 0,
        M=order.block_m,
        N=config.block_n,
        K=config.block_k,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


def experts(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """x [T, H], w13 [E, 2 I, H] (gate, up), w2 [E, H, I], weights fp32 and ids int32 [T, k] of `route` -> [T, H]."""
    tokens, top_k = ids.shape
    if not tokens:
        return torch.empty_like(x)
    num_experts, assignments = w13.shape[0], tokens * top_k
    config = next(c for most, c in GROUPED_GEMM.items() if assignments <= most * num_experts)
    if x.element_size() == 4:  # for tests and odd models
        config = Config(config.block_m, 64, 32, 4, 2)
    by_expert = order(ids, num_experts, config.block_m)
    hidden = silu_and_mul(grouped_gemm(x, w13, by_expert, assignments, config))
    weighted = grouped_gemm(hidden, w2, by_expert, assignments, config, weights.flatten())
    return weighted.unflatten(0, (tokens, top_k)).sum(1).to(x.dtype)
