"""Every operation in plain PyTorch: the oracle that the native kernels are tested against, and what runs without them.

Written for reading, not for speed. Arithmetic is fp32 whatever the dtype of the tensors; results are rounded once.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .quantized import QuantizedTensor, quantize_int8

__all__ = ["quantize_int8"]  # besides what is defined here

GREEDY_TEMPERATURE = 1e-5  # below it a row takes its likeliest token (vLLM's bound)
LOWEST_LOGPROB = -9999.0  # what the OpenAI API says instead of minus infinity
_SCALE_BYTES = 4


Weight = Tensor | QuantizedTensor

# What adds up the parts that the ranks of a tensor-parallel group hold: (fp32 [T, H], dtype) -> their sum, rounded to
# dtype, the same bits on every rank. Raises RankLost.
Reduce = Callable[[Tensor, torch.dtype], Tensor]


class RankLost(RuntimeError):
    """A rank of the group did not come, or the group was aborted because one is gone."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where each token of a step stands: built once a step, read by every layer.

    The step's B sequences lie one after another in T = query_start_loc[B] rows. Query i of sequence b has position
    seq_lens[b] - query_len[b] + i, so prefill, chunked prefill and decode need no names of their own.
    """

    query_start_loc: Tensor  # int32 [B + 1]
    seq_lens: Tensor  # int32 [B]: tokens in the cache once this step's are written
    block_tables: Tensor  # int32 [B, max_blocks]: what stands beyond a sequence's length is not read
    slot_mapping: Tensor  # int64 [T]: block_id * block_size + offset; negative: not to be cached
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear layer's weight in the form the backend wants. Opaque: only the backend that packed it reads `data`."""

    data: Tensor
    bias: Tensor | None
    out_features: int
    in_features: int
    dtype: torch.dtype  # of x
    native: Any = None  # the backend's own form, if it has one


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer of a Llama-like decoder. Rows of qkv: all q heads, all k heads, all v heads; of gate_up: gate, up."""

    input_norm: Tensor  # [hidden]
    qkv: PackedLinear
    o: PackedLinear
    post_attention_norm: Tensor  # [hidden]
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True)
class DecoderStack:
    """Layers in the form the backend wants, and what they share. Opaque, as `PackedLinear`."""

    layers: tuple[DecoderLayer, ...]
    final_norm: Tensor | None  # [hidden]; None: the result is what the next stage begins with
    cos_sin: Tensor  # fp32 [max_position, rotary_dim]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    native: Any = None  # the backend's own form, if it has one


def pack_linear(
    weight: Weight | Sequence[Weight], bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> PackedLinear:
    parts = parts_of(weight)
    dtype = dtype_of("pack_linear", parts, dtype)
    whole = plain(parts, dtype)
    return PackedLinear(whole, bias, whole.shape[0], whole.shape[1], dtype)


def parts_of(weight: Weight | Sequence[Weight]) -> tuple[Weight, ...]:
    parts = (weight,) if isinstance(weight, Tensor | QuantizedTensor) else tuple(weight)
    if not parts or any(part.shape[1] != parts[0].shape[1] for part in parts):
        raise ValueError(f"pack_linear: parts of one width; got {[tuple(part.shape) for part in parts]}")
    return parts


def dtype_of(operation: str, parts: Sequence[Weight], dtype: torch.dtype | None) -> torch.dtype:
    """The dtype to compute in: that of plain weights; quantized ones do not say."""
    dtypes = {part.dtype for part in parts if isinstance(part, Tensor)} | ({dtype} if dtype else set())
    if len(dtypes) != 1:
        raise ValueError(f"{operation}: one dtype, of plain weights or said; got {sorted(map(str, dtypes))}")
    return dtypes.pop()


def plain(parts: Sequence[Weight], dtype: torch.dtype) -> Tensor:
    """Parts of a weight, stacked by rows, dequantized."""
    tensors = [part if isinstance(part, Tensor) else part.dequantize(dtype) for part in parts]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def linear(x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None) -> Tensor:
    if out_dtype in (None, x.dtype):
        return F.linear(x, packed.data, packed.bias)
    bias = None if packed.bias is None else packed.bias.to(out_dtype)
    return F.linear(x.to(out_dtype), packed.data.to(out_dtype), bias)


def embedding(token_ids: Tensor, weight: Weight, dtype: torch.dtype | None = None) -> Tensor:
    dtype = dtype_of("embedding", (weight,), dtype)
    if isinstance(weight, QuantizedTensor):
        return weight.rows(token_ids).dequantize(dtype)
    return F.embedding(token_ids, weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    new_residual = x + residual
    return rms_norm(new_residual, weight, eps), new_residual


def kv_row_size(head_dim: int, dtype: torch.dtype) -> int:
    return head_dim + _SCALE_BYTES if dtype == torch.int8 else head_dim


def quantize_kv(rows: Tensor) -> Tensor:
    """Keys or values [..., D] -> rows of an int8 cache, [..., D + 4]."""
    largest = rows.float().abs().amax(-1, keepdim=True)
    zero, finite = largest < 1e-30, largest.isfinite()
    inverse = torch.where(zero, 0.0, torch.tensor(127.0) / largest)  # rounded as a division: 127 / largest is not
    codes = torch.where(finite, rows.float() * inverse, 0.0).round().to(torch.int8)
    scale = torch.where(finite, torch.where(zero, 0.0, largest / 127), torch.nan)
    return torch.cat([codes, scale.view(torch.int8)], dim=-1)


def dequantize_kv(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of an int8 cache [..., D + 4] -> [..., D]."""
    scale = rows[..., -_SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return (rows[..., :-_SCALE_BYTES].float() * scale).to(dtype)


def rotary_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> None:
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, rotary_dim / 2]
    half = cos.shape[-1]

    def rotated(x: Tensor) -> Tensor:
        x1, x2, rest = x.float().split([half, half, x.shape[-1] - 2 * half], dim=-1)
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], dim=-1).to(x.dtype)

    q.copy_(rotated(q))
    cached = slot_mapping >= 0
    block_size = k_cache.shape[2]
    block_ids = slot_mapping[cached] // block_size
    offsets = slot_mapping[cached] % block_size
    for cache, rows in ((k_cache, rotated(k)), (v_cache, v)):
        cache[block_ids, :, offsets] = quantize_kv(rows[cached]) if cache.dtype == torch.int8 else rows[cached]


def gather_kv_blocks(run: Tensor, k_cache: Tensor, v_cache: Tensor, block_ids: Tensor) -> None:
    for unit, cache in zip(run, (k_cache, v_cache), strict=True):
        unit.copy_(cache.index_select(0, block_ids).transpose(0, 1))


def scatter_kv_blocks(run: Tensor, k_cache: Tensor, v_cache: Tensor, block_ids: Tensor, first_head: int = 0) -> None:
    for unit, cache in zip(run, (k_cache, v_cache), strict=True):
        cache[:, first_head : first_head + unit.shape[0]].index_copy_(0, block_ids, unit.transpose(0, 1))


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
) -> Tensor:
    """As `ops.paged_attention`. The options are the GPU kernels', which say what they mean."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_kv_heads, block_size, row = k_cache.shape[1:]
    group = q.shape[1] // num_kv_heads
    starts = metadata.query_start_loc.tolist()
    for b, seq_len in enumerate(metadata.seq_lens.tolist()):
        begin, end = starts[b], starts[b + 1]
        if begin == end:
            continue
        blocks = metadata.block_tables[b, : -(-seq_len // block_size)].long()

        def gathered(cache: Tensor, blocks: Tensor = blocks, seq_len: int = seq_len) -> Tensor:
            tokens = cache[blocks].transpose(1, 2).reshape(-1, num_kv_heads, row)[:seq_len]
            if cache.dtype == torch.int8:
                tokens = dequantize_kv(tokens, q.dtype)
            return tokens.float().repeat_interleave(group, dim=1)  # [seq_len, num_heads, head_dim]

        scores = torch.einsum("qhd,khd->hqk", q[begin:end].float(), gathered(k_cache)) * (scale * k_scale)
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        query_positions = torch.arange(seq_len - (end - begin), seq_len, device=q.device)
        behind = query_positions.unsqueeze(1) - torch.arange(seq_len, device=q.device)
        visible = behind >= 0 if window is None else (behind >= 0) & (behind < window)
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:  # a key that takes weight and has no value
            scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, end - begin, 1)], dim=-1)
        weights = scores.softmax(-1)[..., :seq_len]
        out[begin:end] = (torch.einsum("hqk,khd->qhd", weights, gathered(v_cache)) * v_scale).to(q.dtype)
    return out


def kv_cache_formats() -> tuple[str, ...]:
    return ("int8",)


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def gelu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(x.dtype)


def pack_decoder(
    layers: Sequence[DecoderLayer],
    final_norm: Tensor | None,
    cos_sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
) -> DecoderStack:
    return DecoderStack(tuple(layers), final_norm, cos_sin, num_heads, num_kv_heads, head_dim, eps)


def decoder(
    stack: DecoderStack,
    embeddings: Tensor,
    positions: Tensor,
    kv_caches: Sequence[tuple[Tensor, Tensor]],
    metadata: AttentionMetadata,
    reduce: Reduce | None = None,
    operations: Any = sys.modules[__name__],
) -> Tensor:
    """`operations` has the single ones; a backend that lacks a whole decoder for a case brings its own."""
    do, dtype, out_dtype = operations, embeddings.dtype, None if reduce is None else torch.float32
    heads = (stack.num_heads, stack.num_kv_heads, stack.num_kv_heads)
    residual = embeddings
    x = do.rms_norm(residual, stack.layers[0].input_norm, stack.eps)
    next_norms = [*(layer.input_norm for layer in stack.layers[1:]), stack.final_norm]
    for layer, (k_cache, v_cache), next_norm in zip(stack.layers, kv_caches, next_norms, strict=True):
        qkv = do.linear(x, layer.qkv).unflatten(-1, (sum(heads), stack.head_dim))
        q, k, v = qkv.split(heads, dim=1)  # views
        do.rotary_and_cache(q, k, v, positions, stack.cos_sin, metadata.slot_mapping, k_cache, v_cache)
        attended = do.paged_attention(q, k_cache, v_cache, metadata, stack.head_dim**-0.5)
        x = do.linear(attended.flatten(1), layer.o, out_dtype)
        x = x if reduce is None else reduce(x, dtype)
        x, residual = do.add_rms_norm(x, residual, layer.post_attention_norm, stack.eps)
        x = do.linear(do.silu_and_mul(do.linear(x, layer.gate_up)), layer.down, out_dtype)
        x = x if reduce is None else reduce(x, dtype)
        if next_norm is None:
            return residual + x
        x, residual = do.add_rms_norm(x, residual, next_norm, stack.eps)
    return x


def mask_tokens(logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
    rows, allowed = rows.to(logits.device), allowed.to(logits.device)
    bits = allowed.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=logits.device) & 1
    known = bits.flatten(1)[:, : logits.shape[1]] == 1
    banned = torch.ones(len(rows), logits.shape[1], dtype=torch.bool, device=logits.device)
    banned[:, : known.shape[1]] = ~known
    logits[rows] = logits[rows].masked_fill(banned, -torch.inf)


def greedy(logits: Tensor) -> Tensor:
    return logits.argmax(-1)  # PyTorch promises the first of equals


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
) -> Tensor:
    params = zip(*(t.tolist() for t in (temperature, top_k, top_p, min_p, uniform)), strict=True)
    rows = [_sample_row(row, *p) for row, p in zip(logits, params, strict=True)]
    return torch.tensor(rows, dtype=torch.int64, device=logits.device)


def _sample_row(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    """One row, by itself: so it cannot depend on its company."""
    likeliest = int(logits.argmax())
    if temperature < GREEDY_TEMPERATURE or not torch.isfinite(logits[likeliest]):
        return likeliest
    scaled = logits / temperature
    ids = torch.arange(len(scaled), device=logits.device)
    if 0 < top_k < len(scaled):
        cut = scaled.topk(top_k).values[-1]
        above, equal = ids[scaled > cut], ids[scaled == cut]
        ids = torch.cat([above, equal[: top_k - len(above)]]).sort().values
    weights = (scaled[ids] - scaled[likeliest]).double().exp()  # unnormalized: the likeliest weighs 1
    if top_p < 1.0:
        order = scaled[ids].sort(descending=True, stable=True).indices  # of equals the lowest id first
        cumulative = weights[order].cumsum(0)
        kept = cumulative - weights[order] < top_p * cumulative[-1]
        kept[0] = True
        order = order[kept].sort().values
        ids, weights = ids[order], weights[order]
    if min_p > 0.0:
        ids, weights = ids[weights >= min_p], weights[weights >= min_p]
    cumulative = weights.cumsum(0)
    drawn = int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))
    return int(ids[min(drawn, len(ids) - 1)])


def log_probs(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    all_log_probs = logits.float().log_softmax(-1).clamp(min=LOWEST_LOGPROB)
    chosen = all_log_probs.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    top_values, top_ids = all_log_probs.topk(k, dim=-1)
    return chosen, top_values, top_ids


def route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Router logits [T, E] -> weights fp32 [T, top_k], falling, and experts int32 [T, top_k]; of equals the lowest."""
    order = logits.float().softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights, ids = order.values[:, :top_k], order.indices[:, :top_k]
    return weights / weights.sum(-1, keepdim=True) if renormalize else weights, ids.int()


def experts(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """x [T, H], w13 [E, 2 I, H] (gate, up), w2 [E, H, I], weights and ids of `route` -> [T, H]."""
    out = torch.zeros(x.shape, device=x.device)
    for token, (token_weights, token_experts) in enumerate(zip(weights, ids.tolist(), strict=True)):
        for weight, expert in zip(token_weights, token_experts, strict=True):
            hidden = silu_and_mul(F.linear(x[token : token + 1], w13[expert]))
            out[token] += weight * F.linear(hidden.float(), w2[expert].float())[0]
    return out.to(x.dtype)
