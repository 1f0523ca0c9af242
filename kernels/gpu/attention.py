"""Attention over paged keys and values, in Triton: split-KV decode, and prefill with any prefix.

    out = softmax(cap(scale q k^T) + mask) v,    cap(s) = soft_cap tanh(s / soft_cap), or s

over the keys that a query may see: those at or before its position and, with a window, fewer than `window` before it.
An attention sink adds exp(sink) to the softmax's denominator and nothing to its numerator (gpt-oss; Xiao 2023).

Sequences of one query go to the decode kernel: a program takes one sequence, one kv head with its group of query heads
as rows, and one split of the context, and leaves an unnormalized row in fp32 with its log-sum-exp (base 2); a second
kernel combines them (flash-decoding, Dao 2023). All others go to the prefill kernel: a tile of queries, with the heads
of a group packed into its rows, passes over the keys with an online softmax (FlashAttention-2, Dao 2023). Both look up
where they are in device memory, so grids follow from the shapes of the metadata alone and a CUDA graph can hold them:
which sequence a tile belongs to (as vLLM's unified attention does), how long it is, which splits it needs.

Splits: `splits_for` says how many programs share a context; each takes an equal part. In batch-invariant mode a split
is 256 tokens instead, whatever the batch, and partial results are added in order, so a row has the same bits in any
company.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import AttentionMetadata

INVARIANT_SPLIT = 256  # tokens
MOST_SPLITS = 64
LOG2E = tl.constexpr(1.4426950408889634)
_SMALLEST_TILE = 16  # rows of a tensor core's operand


@dataclass(frozen=True, slots=True)
class Config:
    block_m: int  # rows: queries times the heads of a group
    block_n: int  # keys
    num_warps: int
    num_stages: int  # tiles of keys and values in flight


# By padded head dim. Shared memory is about (block_m + 2 * num_stages * block_n) * head_dim * itemsize; wgmma wants at
# least 64 rows. `compile.py` checks what they come to on each architecture.
PREFILL = {
    16: Config(64, 64, 4, 3),
    32: Config(64, 64, 4, 3),
    64: Config(128, 64, 8, 3),
    128: Config(128, 64, 8, 2),
    256: Config(64, 32, 8, 2),
}
DECODE = {  # block_m is the group's
    16: Config(0, 64, 4, 3),
    32: Config(0, 64, 4, 3),
    64: Config(0, 64, 4, 3),
    128: Config(0, 64, 4, 3),
    256: Config(0, 32, 4, 3),
}


def _config(table: dict[int, Config], head_dim: int, itemsize: int) -> Config:
    config = table[max(16, triton.next_power_of_2(head_dim))]
    if itemsize == 4:  # for tests and odd models: half the tile keeps the bytes
        return Config(min(config.block_m, 64), max(16, config.block_n // 2), 4, 2)
    return config


@triton.jit
def _attend(
    q,  # [M, D_P2]
    acc,  # fp32 [M, D_P2]
    row_max,  # fp32 [M], base 2
    row_sum,  # fp32 [M]
    query_positions,  # [M]
    begin,
    end,
    seq_len,
    table_ptr,
    k_ptr,  # of this kv head
    v_ptr,
    cache_block_stride,
    score_scale,
    soft_cap,
    window,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_P2: tl.constexpr,
    N: tl.constexpr,
    MASKED: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Passes over the keys begin..end; without MASKED every row sees all of them."""
    columns = tl.arange(0, D_P2)
    for start in range(begin, end, N):
        start = tl.multiple_of(start, N)
        keys = start + tl.arange(0, N)
        inside = keys < seq_len
        if BLOCK_SIZE % N == 0:  # the tile lies in one block
            block_ids = tl.load(table_ptr + start // BLOCK_SIZE)
        elif MASKED:
            block_ids = tl.load(table_ptr + keys // BLOCK_SIZE, mask=inside, other=0)
        else:
            block_ids = tl.load(table_ptr + keys // BLOCK_SIZE)
        rows = block_ids.to(tl.int64) * cache_block_stride + (keys % BLOCK_SIZE) * HEAD_DIM
        tile = rows[:, None] + columns[None, :]
        mask = (columns < HEAD_DIM)[None, :]
        if MASKED:
            mask = mask & inside[:, None]
        k = tl.load(k_ptr + tile, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * score_scale
        if CAPPED:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
            scores = soft_cap * LOG2E * (1.0 - 2.0 / (tl.exp(2.0 * scores) + 1.0))
        if MASKED:
            visible = (keys[None, :] <= query_positions[:, None]) & inside[None, :]
            if WINDOWED:
                visible = visible & (keys[None, :] > query_positions[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has seen nothing yet
        weights = tl.exp2(scores - base[:, None])
        correction = tl.exp2(row_max - base)
        row_sum = row_sum * correction + tl.sum(weights, axis=1)
        v = tl.load(v_ptr + tile, mask=mask, other=0.0)
        acc = acc * correction[:, None]
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision=PRECISION)
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def _split_tokens(seq_len, first, num_splits, N: tl.constexpr, FIXED_SPLIT: tl.constexpr):
    """Tokens a split, a multiple of N: fixed, or an equal part of what there is from `first` on."""
    if FIXED_SPLIT > 0:
        return FIXED_SPLIT
    else:
        return tl.cdiv(tl.cdiv(seq_len - first, num_splits), N) * N


@triton.jit
def _first_key(seq_len, window, N: tl.constexpr, FIXED_SPLIT: tl.constexpr, WINDOWED: tl.constexpr):
    """The first key that the only query sees, rounded down to where a tile or a fixed split begins."""
    if WINDOWED:
        step: tl.constexpr = FIXED_SPLIT if FIXED_SPLIT > 0 else N
        return tl.maximum(seq_len - window, 0) // step * step
    else:
        return 0


@triton.jit(do_not_specialize=["window", "num_kv_heads", "num_splits", "table_stride"])
def decode_kernel(
    partial_ptr,  # fp32 [B, num_heads, num_splits, D]
    lse_ptr,  # fp32 [B, num_heads, num_splits], base 2
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    query_start_ptr,
    seq_lens_ptr,
    tables_ptr,
    score_scale,  # times log2(e) unless capped
    soft_cap,
    window,
    q_stride,
    table_stride,
    num_kv_heads,
    num_splits,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_P2: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    FIXED_SPLIT: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One split of one sequence, for the query heads of one kv head."""
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(query_start_ptr + sequence)
    if tl.load(query_start_ptr + sequence + 1) - token == 1:
        seq_len = tl.load(seq_lens_ptr + sequence)
        first = _first_key(seq_len, window, N, FIXED_SPLIT, WINDOWED)
        size = _split_tokens(seq_len, first, num_splits, N, FIXED_SPLIT)
        begin = first + split * size
        end = tl.minimum(begin + size, seq_len)
        if begin < end:
            rows = tl.arange(0, M)
            columns = tl.arange(0, D_P2)
            heads = kv_head * GROUP + rows
            mask = (rows < GROUP)[:, None] & (columns < HEAD_DIM)[None, :]
            q = tl.load(
                q_ptr + token.to(tl.int64) * q_stride + heads[:, None] * HEAD_DIM + columns[None, :],
                mask=mask,
                other=0.0,
            )
            acc = tl.zeros([M, D_P2], tl.float32)
            row_max = tl.full([M], float("-inf"), tl.float32)
            row_sum = tl.zeros([M], tl.float32)
            positions = tl.zeros([M], tl.int32) + (seq_len - 1)
            table = tables_ptr + sequence.to(tl.int64) * table_stride
            head_offset = kv_head.to(tl.int64) * (BLOCK_SIZE * HEAD_DIM)
            block_stride = num_kv_heads.to(tl.int64) * (BLOCK_SIZE * HEAD_DIM)
            # whole tiles need no mask, unless a window begins in one
            whole_end = begin if WINDOWED else begin + (end - begin) // N * N
            if not WINDOWED:
                acc, row_max, row_sum = _attend(
                    q, acc, row_max, row_sum, positions, begin, whole_end, seq_len, table,
                    k_cache_ptr + head_offset, v_cache_ptr + head_offset, block_stride, score_scale, soft_cap, window,
                    BLOCK_SIZE, HEAD_DIM, D_P2, N, False, CAPPED, WINDOWED, PRECISION,
                )  # fmt: skip
            acc, row_max, row_sum = _attend(
                q, acc, row_max, row_sum, positions, whole_end, end, seq_len, table,
                k_cache_ptr + head_offset, v_cache_ptr + head_offset, block_stride, score_scale, soft_cap, window,
                BLOCK_SIZE, HEAD_DIM, D_P2, N, True, CAPPED, WINDOWED, PRECISION,
            )  # fmt: skip
            slots = ((sequence.to(tl.int64) * num_kv_heads * GROUP) + heads) * num_splits + split
            seen = row_sum > 0.0
            total = tl.where(seen, row_sum, 1.0)
            tl.store(partial_ptr + slots[:, None] * HEAD_DIM + columns[None, :], acc / total[:, None], mask=mask)
            lse = tl.where(seen, row_max + tl.log2(total), float("-inf"))
            tl.store(lse_ptr + slots, lse, mask=rows < GROUP)


@triton.jit(do_not_specialize=["window", "num_heads", "num_splits"])
def combine_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    query_start_ptr,
    seq_lens_ptr,
    sinks_ptr,
    v_scale,
    window,
    num_heads,
    num_splits,
    HEAD_DIM: tl.constexpr,
    D_P2: tl.constexpr,
    N: tl.constexpr,
    FIXED_SPLIT: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """out = sum_s 2^(lse_s - lse) partial_s, lse = log2 sum_s 2^lse_s: the splits one after another, in order."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_start_ptr + sequence)
    if tl.load(query_start_ptr + sequence + 1) - token == 1:
        seq_len = tl.load(seq_lens_ptr + sequence)
        first = _first_key(seq_len, window, N, FIXED_SPLIT, WINDOWED)
        size = _split_tokens(seq_len, first, num_splits, N, FIXED_SPLIT)
        used = tl.minimum(tl.cdiv(seq_len - first, size), num_splits)
        columns = tl.arange(0, D_P2)
        inside = columns < HEAD_DIM
        acc = tl.zeros([D_P2], tl.float32)
        row_max = float("-inf")
        row_sum = 0.0
        if SINKS:
            row_max = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
            row_sum = 1.0
        slot = (sequence.to(tl.int64) * num_heads + head) * num_splits
        for split in range(0, used):
            lse = tl.load(lse_ptr + slot + split)
            partial = tl.load(partial_ptr + (slot + split) * HEAD_DIM + columns, mask=inside, other=0.0)
            new_max = tl.maximum(row_max, lse)
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
            correction = tl.exp2(row_max - base)
            weight = tl.exp2(lse - base)
            acc = acc * correction + partial * weight
            row_sum = row_sum * correction + weight
            row_max = new_max
        result = acc / row_sum * v_scale
        out = out_ptr + (token.to(tl.int64) * num_heads + head) * HEAD_DIM + columns
        tl.store(out, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["window", "num_sequences", "num_kv_heads", "table_stride"])
def prefill_kernel(
    out_ptr,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    query_start_ptr,
    seq_lens_ptr,
    tables_ptr,
    sinks_ptr,
    score_scale,
    v_scale,
    soft_cap,
    window,
    q_stride,
    table_stride,
    num_sequences,
    num_kv_heads,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_P2: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """M // GROUP queries of one sequence, each with the GROUP heads of one kv head as rows of the tile."""
    QUERIES: tl.constexpr = M // GROUP
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    # Tiles of sequence b begin at query_start[b] // QUERIES + b, which leaves at least one for each: the sequence is
    # the last that begins at or before this tile.
    low, high = 0, num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_ptr + middle) // QUERIES + middle <= tile:
            low = middle
        else:
            high = middle
    sequence = low
    start = tl.load(query_start_ptr + sequence)
    query_len = tl.load(query_start_ptr + sequence + 1) - start
    first_query = (tile - (start // QUERIES + sequence)) * QUERIES
    if (query_len > 1) & (first_query < query_len):
        seq_len = tl.load(seq_lens_ptr + sequence)
        rows = tl.arange(0, M)
        columns = tl.arange(0, D_P2)
        queries = first_query + rows // GROUP
        heads = kv_head * GROUP + rows % GROUP
        real = (rows < QUERIES * GROUP) & (queries < query_len)
        mask = real[:, None] & (columns < HEAD_DIM)[None, :]
        tokens = (start + queries).to(tl.int64)
        q = tl.load(
            q_ptr + tokens[:, None] * q_stride + heads[:, None] * HEAD_DIM + columns[None, :], mask=mask, other=0.0
        )
        first_position = seq_len - query_len + first_query
        positions = seq_len - query_len + queries
        end = tl.minimum(first_position + QUERIES, seq_len)
        whole_end = (first_position + 1) // N * N  # before it every row sees every key, but for a window
        begin = 0
        if WINDOWED:
            begin = tl.maximum(first_position - window + 1, 0) // N * N
            whole_end = begin  # with a window every tile is masked
        acc = tl.zeros([M, D_P2], tl.float32)
        row_max = tl.full([M], float("-inf"), tl.float32)
        row_sum = tl.zeros([M], tl.float32)
        if SINKS:
            row_max = tl.load(sinks_ptr + heads, mask=real, other=0.0).to(tl.float32) * LOG2E
            row_sum = tl.full([M], 1.0, tl.float32)
        table = tables_ptr + sequence.to(tl.int64) * table_stride  # type: ignore[attr-defined]
        head_offset = kv_head.to(tl.int64) * (BLOCK_SIZE * HEAD_DIM)
        block_stride = num_kv_heads.to(tl.int64) * (BLOCK_SIZE * HEAD_DIM)
        if not WINDOWED:
            acc, row_max, row_sum = _attend(
                q, acc, row_max, row_sum, positions, begin, whole_end, seq_len, table,
                k_cache_ptr + head_offset, v_cache_ptr + head_offset, block_stride, score_scale, soft_cap, window,
                BLOCK_SIZE, HEAD_DIM, D_P2, N, False, CAPPED, WINDOWED, PRECISION,
            )  # fmt: skip
        acc, row_max, row_sum = _attend(
            q, acc, row_max, row_sum, positions, whole_end, end, seq_len, table,
            k_cache_ptr + head_offset, v_cache_ptr + head_offset, block_stride, score_scale, soft_cap, window,
            BLOCK_SIZE, HEAD_DIM, D_P2, N, True, CAPPED, WINDOWED, PRECISION,
        )  # fmt: skip
        result = acc / tl.where(real, row_sum, 1.0)[:, None] * v_scale
        out = out_ptr + (tokens[:, None] * (num_kv_heads * GROUP) + heads[:, None]) * HEAD_DIM + columns[None, :]
        tl.store(out, result.to(out_ptr.dtype.element_ty), mask=mask)


def splits_for(num_sequences: int, num_kv_heads: int, num_processors: int) -> int:
    """How many programs share a context, so that a decode step has about four for each multiprocessor."""
    return max(1, min(MOST_SPLITS, 4 * num_processors // max(1, num_sequences * num_kv_heads)))


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    batch_invariant: bool = False,
) -> Tensor:
    """As `..ops.paged_attention`; caches in q's dtype, or fp8 e4m3 that k_scale and v_scale multiply.

    window: keys that a query sees, itself included; soft_cap: bound of the scores; sinks: [num_heads], in natural log.
    Raises ValueError for shapes that are none of the operation's.
    """
    tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    if q.stride(2) != 1 or q.stride(1) != head_dim or num_heads % num_kv_heads:
        raise ValueError(
            f"paged_attention: q [T, a multiple of {num_kv_heads} heads, D], each token's heads contiguous; "
            f"got {list(q.shape)} strides {q.stride()}"
        )
    if not (k_cache.is_contiguous() and v_cache.is_contiguous() and k_cache.shape == v_cache.shape):
        raise ValueError("paged_attention: caches [num_blocks, num_kv_heads, block_size, D], contiguous")
    if k_cache.shape[3] != head_dim or head_dim > 256:
        raise ValueError(f"paged_attention: heads of at most 256, in q as in the caches; got {head_dim}")
    starts, lengths, tables = metadata.query_start_loc, metadata.seq_lens, metadata.block_tables
    if not starts.dtype == lengths.dtype == tables.dtype == torch.int32:
        raise ValueError("paged_attention: query_start_loc, seq_lens and block_tables are int32")
    if metadata.max_seq_len > tables.shape[1] * block_size:
        raise ValueError(
            f"paged_attention: max_seq_len {metadata.max_seq_len} does not fit {tables.shape[1]} blocks of {block_size}"
        )
    out = q.new_empty(tokens, num_heads, head_dim)
    num_sequences = lengths.shape[0]
    if tokens == 0:
        return out
    group = num_heads // num_kv_heads
    score_scale = scale * k_scale * LOG2E.value if soft_cap is None else scale * k_scale / soft_cap
    shape = {
        "HEAD_DIM": head_dim,
        "D_P2": max(16, triton.next_power_of_2(head_dim)),
        "WINDOWED": window is not None,
    }
    options = {
        "BLOCK_SIZE": block_size,
        "GROUP": group,
        "CAPPED": soft_cap is not None,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",  # of fp32 operands alone
    }
    config = _config(DECODE, head_dim, q.element_size())
    if batch_invariant:
        num_splits, fixed = triton.cdiv(metadata.max_seq_len, INVARIANT_SPLIT), INVARIANT_SPLIT
    else:
        most = triton.cdiv(metadata.max_seq_len, 2 * config.block_n)
        num_splits, fixed = min(splits_for(num_sequences, num_kv_heads, _processors(q.device)), most), 0
    if metadata.max_query_len == 1 or tokens < num_sequences * metadata.max_query_len:  # some may have one query
        partial = torch.empty(num_sequences, num_heads, num_splits, head_dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(num_sequences, num_heads, num_splits, dtype=torch.float32, device=q.device)
        splitting = {"N": config.block_n, "FIXED_SPLIT": fixed}
        decode_kernel[(num_sequences, num_kv_heads, num_splits)](
            partial,
            lse,
            q,
            k_cache,
            v_cache,
            starts,
            lengths,
            tables,
            score_scale,
            soft_cap or 0.0,
            window or 0,
            q.stride(0),
            tables.stride(0),
            num_kv_heads,
            num_splits,
            M=max(_SMALLEST_TILE, triton.next_power_of_2(group)),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **shape,
            **options,
            **splitting,
        )
        combine_kernel[(num_sequences, num_heads)](
            out,
            partial,
            lse,
            starts,
            lengths,
            sinks if sinks is not None else lse,
            v_scale,
            window or 0,
            num_heads,
            num_splits,
            SINKS=sinks is not None,
            num_warps=2,
            **shape,
            **splitting,
        )
    if metadata.max_query_len > 1:
        config = _config(PREFILL, head_dim, q.element_size())
        rows = max(config.block_m, triton.next_power_of_2(group))
        prefill_kernel[(tokens // (rows // group) + num_sequences, num_kv_heads)](
            out,
            q,
            k_cache,
            v_cache,
            starts,
            lengths,
            tables,
            sinks if sinks is not None else out,
            score_scale,
            v_scale,
            soft_cap or 0.0,
            window or 0,
            q.stride(0),
            tables.stride(0),
            num_sequences,
            num_kv_heads,
            M=rows,
            N=config.block_n,
            SINKS=sinks is not None,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **shape,
            **options,
        )
    return out


def _processors(device: torch.device) -> int:
    if device.type != "cuda":  # the interpreter: enough for several splits
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count
