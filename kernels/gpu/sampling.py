"""Greedy choice and filtered sampling in Triton, without sorting the vocabulary.

What a filter keeps is all tokens above some logit, and of those that equal it the ones of lowest id: a cut (key, id). A
key is a logit's bits in an order that integers share, so searching the keys' range finds the exact cut: for top-k the
key with fewer than k tokens above it, for top-p the one with less than top_p of the probability above it (the idea is
that of the pivots in FlashInfer's sampling; there they are drawn at random). A pass over the row narrows the range to a
quarter.

The draw is the inverse CDF in id order at `uniform`, as in `..reference`: weights are fp32, sums fp64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import GREEDY_TEMPERATURE

_GREEDY_CHUNK = 8192  # logits that one program of the greedy choice looks at
_BLOCK = 1024  # logits of a pass that are in registers at a time
_NO_ID = tl.constexpr(2147483647)


@triton.jit
def greedy_shard_kernel(
    value_ptr, id_ptr, logits_ptr, vocab, stride, first_id, num_chunks, BLOCK: tl.constexpr
):  # fmt: skip
    """The largest logit of a chunk of a row, and its id; of equals the lowest."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * stride + ids, mask=ids < vocab, other=float("-inf"))
    best = tl.max(logits, axis=0)
    at = tl.min(tl.where((logits == best) & (ids < vocab), ids, _NO_ID), axis=0)
    tl.store(value_ptr + row * num_chunks + chunk, best)
    tl.store(id_ptr + row * num_chunks + chunk, (at + first_id).to(tl.int64))


@triton.jit
def greedy_combine_kernel(out_ptr, value_ptr, id_ptr, num_chunks, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, BLOCK)
    inside = chunks < num_chunks
    values = tl.load(value_ptr + row * num_chunks + chunks, mask=inside, other=float("-inf"))
    ids = tl.load(id_ptr + row * num_chunks + chunks, mask=inside, other=_NO_ID)
    best = tl.max(values, axis=0)
    tl.store(out_ptr + row, tl.min(tl.where((values == best) & inside, ids, _NO_ID), axis=0))


def greedy_shard(logits: Tensor, first_id: int = 0) -> tuple[Tensor, Tensor]:
    """The largest logits of each chunk of a row, fp32 [B, chunks], and their ids, int64.

    Ranks that hold a part of the vocabulary each, beginning at `first_id`, exchange these instead of logits.
    """
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, _GREEDY_CHUNK)
    values = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, chunks, dtype=torch.int64, device=logits.device)
    if rows:
        block = min(_GREEDY_CHUNK, triton.next_power_of_2(vocab))
        greedy_shard_kernel[(rows, chunks)](
            values, ids, logits, vocab, logits.stride(0), first_id, chunks, BLOCK=block, num_warps=8
        )
    return values, ids


def greedy_combine(values: Tensor, ids: Tensor) -> Tensor:
    """What `greedy_shard` found, side by side [B, chunks of all ranks] -> the likeliest tokens, int64 [B]."""
    rows, chunks = values.shape
    out = torch.empty(rows, dtype=torch.int64, device=values.device)
    if rows:
        greedy_combine_kernel[(rows,)](out, values, ids, chunks, BLOCK=triton.next_power_of_2(chunks), num_warps=1)
    return out


def greedy(logits: Tensor) -> Tensor:
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"greedy: logits float32 [B, V], rows contiguous; got {logits.dtype} {list(logits.shape)}")
    return greedy_combine(*greedy_shard(logits))


@triton.jit
def _scaled_tile(row_ptr, start, vocab, temperature, BLOCK: tl.constexpr):
    """ids, logits / temperature and their keys, of a tile; beyond the vocabulary keys below all others."""
    ids = start + tl.arange(0, BLOCK)
    inside = ids < vocab
    logits = tl.load(row_ptr + ids, mask=inside, other=float("-inf"))
    scaled = tl.div_rn(logits, temperature + tl.zeros_like(logits))
    bits = tl.where(scaled == 0.0, 0.0, scaled).to(tl.int32, bitcast=True)  # -0 equals 0
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    return ids, scaled, tl.where(inside, keys, -2147483649)


@triton.jit
def _kept(ids, keys, cut_key, cut_id):
    return (keys > cut_key) | ((keys == cut_key) & (ids <= cut_id))


@triton.jit
def _narrow_cut(
    row_ptr, vocab, temperature, largest, largest_key, cut_key, cut_id, target, WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The cut below which the kept tokens weigh `target` or more already; each weighs 1 unless WEIGHTED.

    The key is the smallest with less than `target` above it; of the tokens that equal it as many stay as are begun
    before `target` is reached, at least one.
    """
    low = tl.full([], -2147483650, tl.int64)  # all is above it
    high = largest_key  # nothing is
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        first = low + step
        second = tl.minimum(first + step, high)
        third = tl.minimum(second + step, high)
        above_first = tl.full([], 0.0, tl.float64)
        above_second = tl.full([], 0.0, tl.float64)
        above_third = tl.full([], 0.0, tl.float64)
        for start in range(0, vocab, BLOCK):
            ids, scaled, keys = _scaled_tile(row_ptr, start, vocab, temperature, BLOCK)
            weights = tl.where(_kept(ids, keys, cut_key, cut_id), 1.0, 0.0).to(tl.float64)
            if WEIGHTED:
                weights = weights * tl.exp(scaled - largest).to(tl.float64)
            above_first += tl.sum(tl.where(keys > first, weights, 0.0), axis=0)
            above_second += tl.sum(tl.where(keys > second, weights, 0.0), axis=0)
            above_third += tl.sum(tl.where(keys > third, weights, 0.0), axis=0)
        next_high = tl.where(above_first < target, first, tl.where(above_second < target, second, third))
        next_high = tl.where(above_third < target, next_high, high)
        low = tl.where(
            above_third >= target,
            third,
            tl.where(above_second >= target, second, tl.where(above_first >= target, first, low)),
        )
        high = next_high
    above = tl.full([], 0.0, tl.float64)
    weight = tl.full([], 0.0, tl.float32)
    for start in range(0, vocab, BLOCK):
        ids, scaled, keys = _scaled_tile(row_ptr, start, vocab, temperature, BLOCK)
        weights = tl.where(_kept(ids, keys, cut_key, cut_id), 1.0, 0.0).to(tl.float64)
        if WEIGHTED:
            weights = weights * tl.exp(scaled - largest).to(tl.float64)
        above += tl.sum(tl.where(keys > high, weights, 0.0), axis=0)
        own = tl.exp(scaled - largest) if WEIGHTED else tl.full([BLOCK], 1.0, tl.float32)
        weight = tl.maximum(weight, tl.max(tl.where(keys == high, own, 0.0), axis=0))
    wanted = tl.ceil((target - above) / tl.maximum(weight, 1e-38).to(tl.float64)).to(tl.int64)
    wanted = tl.maximum(wanted, 1)
    seen = tl.full([], 0, tl.int64)
    last = tl.full([], -1, tl.int32)
    for start in range(0, vocab, BLOCK):
        ids, scaled, keys = _scaled_tile(row_ptr, start, vocab, temperature, BLOCK)
        equal = _kept(ids, keys, cut_key, cut_id) & (keys == high)
        count = seen + tl.cumsum(equal.to(tl.int32), axis=0)
        last = tl.maximum(last, tl.max(tl.where(equal & (count <= wanted), ids, -1), axis=0))
        seen += tl.sum(equal.to(tl.int32), axis=0)
    return high, last


@triton.jit
def sample_kernel(
    out_ptr,
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    uniform_ptr,
    vocab,
    stride,
    GREEDY_BELOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row, by itself."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    largest_logit = tl.full([], float("-inf"), tl.float32)
    likeliest = tl.full([], 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf"))
        best = tl.max(logits, axis=0)
        at = tl.min(tl.where(logits == best, ids, _NO_ID), axis=0)
        likeliest = tl.where(best > largest_logit, at, likeliest)
        largest_logit = tl.maximum(best, largest_logit)
    temperature = tl.load(temperature_ptr + row)
    chosen = likeliest
    if (temperature >= GREEDY_BELOW) & (tl.abs(largest_logit) < float("inf")):
        top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        min_p, uniform = tl.load(min_p_ptr + row), tl.load(uniform_ptr + row)
        largest = tl.full([], float("-inf"), tl.float32)
        largest_key = tl.full([], -2147483649, tl.int64)
        for start in range(0, vocab, BLOCK):
            ids, scaled, keys = _scaled_tile(row_ptr, start, vocab, temperature, BLOCK)
            largest = tl.maximum(largest, tl.max(scaled, axis=0))
            largest_key = tl.maximum(largest_key, tl.max(keys, axis=0))
        cut_key = tl.full([], -2147483649, tl.int64)
        cut_id = tl.full([], -1, tl.int32)
        if (top_k > 0) & (top_k < vocab):
            cut_key, cut_id = _narrow_cut(
                row_ptr, vocab, temperature, largest, largest_key, cut_key, cut_id, top_k.to(tl.float64), False, BLOCK
            )
        if top_p < 1.0:
            total = tl.full([], 0.0, tl.float64)
            for start in range(0, vocab, BLOCK):
                ids, scaled, keys = _scaled_tile(row_ptr, start, vocab, temperature, BLOCK)
                weights = tl.exp(scaled - largest).to(tl.float64)
                total += tl.sum(tl.where(_kept(ids, keys, cut_key, cut_id), weights, 0.0), axis=0)
            target = tl.maximum(total * top_p.to(tl.float64), 1e-300)
            cut_key, cut_id = _narrow_cut(
                row_ptr, vocab, temperature, largest, largest_key, cut_key, cut_id, target, True, BLOCK
            )
        total = tl.full([], 0.0, tl.float64)
        last = tl.full([], 0, tl.int32)
        for start in range(0, vocab, BLOCK):
            ids, scaled, keys = _scaled_tile(row_ptr, start, vocab, temperature, BLOCK)
            weights = tl.exp(scaled - largest)
            kept = _kept(ids, keys, cut_key, cut_id) & (weights >= min_p)
            total += tl.sum(tl.where(kept, weights, 0.0).to(tl.float64), axis=0)
            last = tl.maximum(last, tl.max(tl.where(kept & (weights > 0.0), ids, 0), axis=0))
        target = total * uniform
        before = tl.full([], 0.0, tl.float64)
        chosen = tl.full([], _NO_ID, tl.int32)
        for start in range(0, vocab, BLOCK):
            ids, scaled, keys = _scaled_tile(row_ptr, start, vocab, temperature, BLOCK)
            weights = tl.exp(scaled - largest)
            kept = _kept(ids, keys, cut_key, cut_id) & (weights >= min_p)
            weights = tl.where(kept, weights, 0.0).to(tl.float64)
            cumulative = before + tl.cumsum(weights, axis=0)
            chosen = tl.minimum(chosen, tl.min(tl.where((cumulative > target) & kept, ids, _NO_ID), axis=0))
            before += tl.sum(weights, axis=0)
        chosen = tl.minimum(chosen, last)
    tl.store(out_ptr + row, chosen.to(tl.int64))


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    rows, vocab = logits.shape
    params = (temperature, top_k, top_p, min_p, uniform)
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or any(p.shape != (rows,) for p in params):
        raise ValueError(
            "sample: logits float32 [B, V], rows contiguous, parameters [B]; "
            f"got {logits.dtype} {list(logits.shape)} and {[list(p.shape) for p in params]}"
        )
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        device = logits.device
        sample_kernel[(rows,)](
            out,
            logits,
            temperature.to(device, torch.float32).contiguous(),
            top_k.to(device, torch.int64).contiguous(),
            top_p.to(device, torch.float32).contiguous(),
            min_p.to(device, torch.float32).contiguous(),
            uniform.to(device, torch.float64).contiguous(),
            vocab,
            logits.stride(0),
            GREEDY_BELOW=GREEDY_TEMPERATURE,
            BLOCK=min(_BLOCK, triton.next_power_of_2(vocab)),
            num_warps=4,
        )
    return out
