"""Calls the native library on tensors: checks what C++ takes for granted, allocates results, hands over pointers."""

import ctypes
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..reference import AttentionMetadata, DecoderLayer, DecoderStack, Reduce
from .checks import INT8
from .checks import check as _check
from .checks import dtype_code as _dtype
from .library import NativeLibrary
from .linear import linear_operations
from .shared_group import SharedGroup

_POINTER, _INT64, _INT32, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float

_SIGNATURES: dict[str, list[Any]] = {
    "pagedray_rms_norm": [_INT32, *[_POINTER] * 3, *[_INT64] * 3, _FLOAT, _INT32],
    "pagedray_add_rms_norm": [_INT32, *[_POINTER] * 5, *[_INT64] * 4, _FLOAT, _INT32],
    "pagedray_silu_and_mul": [_INT32, *[_POINTER] * 2, *[_INT64] * 3, _INT32],
    "pagedray_rotary_and_cache": [*[_INT32] * 2, *[_POINTER] * 8, *[_INT64] * 9, _INT32],
    "pagedray_paged_attention": [*[_INT32] * 2, *[_POINTER] * 7, *[_INT64] * 7, _FLOAT, _INT32],
    "pagedray_decoder_layers": [
        *[_INT32, *[_POINTER] * 5, _INT64, *[_POINTER] * 9],
        *[_FLOAT] * 2,
        _POINTER,
        _INT32,
    ],
    "pagedray_packed_bytes": [_INT32, *[_INT64] * 3],
    "pagedray_pack_linear": [_INT32, *[_POINTER] * 2, *[_INT64] * 3, _INT32],
    "pagedray_pack_blocks": [_INT32, _INT64, *[_POINTER] * 2, *[_INT64] * 2, _INT32],
    "pagedray_linear": [*[_INT32] * 2, *[_POINTER] * 3, *[_INT64] * 2, _INT32],
    "pagedray_dequantize_rows": [_INT32, _INT64, *[_POINTER] * 3, *[_INT64] * 2, _INT32],
    "pagedray_quantize_int8": [_INT32, *[_POINTER] * 2, *[_INT64] * 3, _INT32],
    "pagedray_mask_tokens": [*[_POINTER] * 3, *[_INT64] * 4, _INT32],
    "pagedray_greedy": [*[_POINTER] * 2, *[_INT64] * 3, _INT32],
    "pagedray_sample": [*[_POINTER] * 2, *[_INT64] * 3, *[_POINTER] * 5, _INT32],
}


_RESULTS: dict[str, Any] = {"pagedray_packed_bytes": _INT64, "pagedray_decoder_layers": _INT32}


def operations(library: NativeLibrary) -> dict[str, Callable[..., Any]]:
    """The operations of `..ops` that the library does, by name."""
    functions = {}
    for name, signature in _SIGNATURES.items():
        function = getattr(library.functions, name)
        function.argtypes, function.restype = signature, _RESULTS.get(name)
        functions[name.removeprefix("pagedray_")] = function
    threads = torch.get_num_threads
    linears = linear_operations(functions)

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        dtype = _dtype("rms_norm", x, weight)
        rows, hidden = x.shape
        _check(x.stride(1) == 1 and weight.shape == (hidden,), "rms_norm", "x [T, H], weight [H]", x, weight)
        out = x.new_empty(rows, hidden)
        functions["rms_norm"](
            dtype, out.data_ptr(), x.data_ptr(), weight.data_ptr(), rows, hidden, x.stride(0), eps, threads()
        )
        return out

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        dtype = _dtype("add_rms_norm", x, residual, weight)
        rows, hidden = x.shape
        _check(
            x.stride(1) == 1 and residual.shape == x.shape and residual.stride(1) == 1 and weight.shape == (hidden,),
            "add_rms_norm",
            "x and residual [T, H], weight [H]",
            x,
            residual,
            weight,
        )
        out, new_residual = x.new_empty(rows, hidden), x.new_empty(rows, hidden)
        functions["add_rms_norm"](
            dtype,
            out.data_ptr(),
            new_residual.data_ptr(),
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            rows,
            hidden,
            x.stride(0),
            residual.stride(0),
            eps,
            threads(),
        )
        return out, new_residual

    def silu_and_mul(x: Tensor) -> Tensor:
        dtype = _dtype("silu_and_mul", x)
        rows, width = x.shape[0], x.shape[1] // 2
        _check(x.stride(1) == 1 and x.shape[1] % 2 == 0, "silu_and_mul", "x [T, 2 I], rows contiguous", x)
        out = x.new_empty(rows, width)
        functions["silu_and_mul"](dtype, out.data_ptr(), x.data_ptr(), rows, width, x.stride(0), threads())
        return out

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
        dtype = _dtype("rotary_and_cache", q, k, v)
        tokens, num_heads, head_dim = q.shape
        num_kv_heads, block_size = k_cache.shape[1:3]
        _check(
            k.shape == v.shape == (tokens, num_kv_heads, head_dim)
            and all(t.stride(2) == 1 and t.stride(1) == head_dim for t in (q, k, v)),
            "rotary_and_cache",
            "q [T, num_heads, D], k and v [T, num_kv_heads, D], each token's heads contiguous",
            q,
            k,
            v,
        )
        cache_dtype = _check_caches("rotary_and_cache", q.dtype, head_dim, k_cache, v_cache)
        rotary_dim = cos_sin.shape[1]
        _check(
            cos_sin.dtype == torch.float32
            and cos_sin.is_contiguous()
            and rotary_dim % 2 == 0
            and rotary_dim <= head_dim
            and positions.dtype == slot_mapping.dtype == torch.int64
            and positions.shape == slot_mapping.shape == (tokens,)
            and positions.is_contiguous()
            and slot_mapping.is_contiguous(),
            "rotary_and_cache",
            "cos_sin float32 [max_position, rotary_dim <= D], positions and slot_mapping int64 [T], contiguous",
            cos_sin,
            positions,
            slot_mapping,
        )
        functions["rotary_and_cache"](
            dtype,
            cache_dtype,
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            positions.data_ptr(),
            cos_sin.data_ptr(),
            slot_mapping.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            tokens,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            num_heads,
            num_kv_heads,
            head_dim,
            rotary_dim,
            block_size,
            threads(),
        )

    def paged_attention(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float
    ) -> Tensor:
        dtype = _dtype("paged_attention", q)
        tokens, num_heads, head_dim = q.shape
        num_kv_heads, block_size = k_cache.shape[1:3]
        _check(
            q.stride(2) == 1 and q.stride(1) == head_dim and num_heads % num_kv_heads == 0,
            "paged_attention",
            f"q [T, a multiple of {num_kv_heads} heads, D], each token's heads contiguous",
            q,
        )
        cache_dtype = _check_caches("paged_attention", q.dtype, head_dim, k_cache, v_cache)
        starts, lengths, tables = _check_metadata("paged_attention", metadata, block_size)
        sequences = lengths.shape[0]
        out = q.new_empty(tokens, num_heads, head_dim)
        functions["paged_attention"](
            dtype,
            cache_dtype,
            out.data_ptr(),
            q.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            starts.data_ptr(),
            lengths.data_ptr(),
            tables.data_ptr(),
            sequences,
            tables.shape[1],
            q.stride(0),
            num_heads,
            num_kv_heads,
            head_dim,
            block_size,
            scale,
            threads(),
        )
        return out

    def pack_decoder(
        layers: Sequence[DecoderLayer],
        final_norm: Tensor | None,
        cos_sin: Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
    ) -> DecoderStack:
        (hidden,), qkv = layers[0].input_norm.shape, (num_heads + 2 * num_kv_heads) * head_dim
        intermediate = layers[0].down.in_features
        _check(
            cos_sin.dtype == torch.float32 and cos_sin.is_contiguous() and cos_sin.shape[1] <= head_dim,
            "pack_decoder",
            f"cos_sin float32 [max_position, at most {head_dim}], contiguous",
            cos_sin,
        )
        pointers: list[int] = []
        for layer in layers:
            packed = (layer.qkv, layer.o, layer.gate_up, layer.down)
            shapes = ((qkv, hidden), (hidden, num_heads * head_dim), (2 * intermediate, hidden), (hidden, intermediate))
            norms: tuple[Tensor, ...] = (layer.input_norm, layer.post_attention_norm)
            norms += () if final_norm is None else (final_norm,)
            _dtype("pack_decoder", *norms)
            _check(
                all(p.dtype == norms[0].dtype for p in packed)
                and all((p.out_features, p.in_features) == shape for p, shape in zip(packed, shapes, strict=True))
                and all(n.shape == (hidden,) and n.is_contiguous() for n in norms),
                "pack_decoder",
                f"norms [{hidden}], linears of {shapes}, in one dtype",
                *norms,
            )
            pointers += [n.data_ptr() for n in norms[:2]]
            pointers += [p.native.address for p in packed]
        table = (_POINTER * len(pointers))(*pointers)
        return DecoderStack(tuple(layers), final_norm, cos_sin, num_heads, num_kv_heads, head_dim, eps, table)

    def decoder(
        stack: DecoderStack,
        embeddings: Tensor,
        positions: Tensor,
        kv_caches: Sequence[tuple[Tensor, Tensor]],
        metadata: AttentionMetadata,
        reduce: Reduce | None = None,
    ) -> Tensor:
        group = reduce if isinstance(reduce, SharedGroup) else None
        if reduce is not group:
            return reference.decoder(stack, embeddings, positions, kv_caches, metadata, reduce, single_operations)
        caches = [cache for pair in kv_caches for cache in pair]
        final_norm = stack.final_norm
        dtype = _dtype("decoder", embeddings, stack.layers[0].input_norm)
        tokens, hidden = embeddings.shape
        slots, num_layers, intermediate = metadata.slot_mapping, len(stack.layers), stack.layers[0].down.in_features
        _check(
            embeddings.is_contiguous()
            and stack.layers[0].input_norm.shape == (hidden,)
            and positions.dtype == slots.dtype == torch.int64
            and positions.shape == slots.shape == (tokens,)
            and positions.is_contiguous()
            and slots.is_contiguous()
            and metadata.max_seq_len <= stack.cos_sin.shape[0]
            and len(kv_caches) == num_layers,
            "decoder",
            f"embeddings [T, {stack.layers[0].input_norm.shape[0]}], positions and slot_mapping int64 [T], contiguous, "
            f"a pair of caches for each of {num_layers} layers, max_seq_len {metadata.max_seq_len} within cos_sin",
            embeddings,
            positions,
            slots,
        )
        kinds = {_check_caches("decoder", embeddings.dtype, stack.head_dim, *pair) for pair in kv_caches}
        _check(len(kinds) == 1, "decoder", "caches of one dtype", *caches)
        num_kv_heads, block_size = caches[0].shape[1:3]
        _check(num_kv_heads == stack.num_kv_heads, "decoder", f"caches of {stack.num_kv_heads} heads", caches[0])
        starts, lengths, tables = _check_metadata("decoder", metadata, block_size)
        heads = stack.num_heads * stack.head_dim
        qkv = heads + 2 * num_kv_heads * stack.head_dim
        if group is not None:
            rule = f"at most {group.slot_bytes // (4 * hidden)} tokens at a time in a shared group"
            _check(4 * tokens * hidden <= group.slot_bytes, "decoder", rule, embeddings)
        x = torch.empty_like(embeddings)
        wide = embeddings.new_empty(tokens, max(qkv, 2 * intermediate))
        narrow = embeddings.new_empty(tokens, max(heads, intermediate))
        sizes = (tokens, hidden, intermediate, stack.num_heads, num_kv_heads, stack.head_dim, stack.cos_sin.shape[1])
        status = functions["decoder_layers"](
            dtype,
            x.data_ptr(),
            embeddings.data_ptr(),
            wide.data_ptr(),
            narrow.data_ptr(),
            stack.native,
            num_layers,
            (_POINTER * len(caches))(*(cache.data_ptr() for cache in caches)),
            None if final_norm is None else final_norm.data_ptr(),
            positions.data_ptr(),
            stack.cos_sin.data_ptr(),
            slots.data_ptr(),
            starts.data_ptr(),
            lengths.data_ptr(),
            tables.data_ptr(),
            (_INT64 * 11)(*sizes, block_size, lengths.shape[0], tables.shape[1], kinds.pop()),
            stack.eps,
            stack.head_dim**-0.5,
            None if group is None else group.pointer,
            threads(),
        )
        if group is not None:
            group.check(status)
        return embeddings if final_norm is None else x

    def mask_tokens(logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
        _check(
            logits.dtype == torch.float32
            and logits.dim() == allowed.dim() == 2
            and logits.stride(1) == 1
            and rows.dtype == torch.int64
            and rows.is_contiguous()
            and allowed.dtype == torch.int32
            and allowed.is_contiguous()
            and rows.shape == allowed.shape[:1],
            "mask_tokens",
            "logits float32 [B, V], rows contiguous; rows int64 [n], allowed int32 [n, words], contiguous",
            logits,
            rows,
            allowed,
        )
        count, words = allowed.shape
        functions["mask_tokens"](
            logits.data_ptr(),
            rows.data_ptr(),
            allowed.data_ptr(),
            count,
            logits.shape[1],
            logits.stride(0),
            words,
            threads(),
        )

    def greedy(logits: Tensor) -> Tensor:
        _check(
            logits.dtype == torch.float32 and logits.dim() == 2 and logits.stride(1) == 1,
            "greedy",
            "logits float32 [B, V], rows contiguous",
            logits,
        )
        rows, vocab = logits.shape
        out = torch.empty(rows, dtype=torch.int64)
        functions["greedy"](out.data_ptr(), logits.data_ptr(), rows, vocab, logits.stride(0), threads())
        return out

    def sample(
        logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
    ) -> Tensor:
        rows, vocab = logits.shape
        params = (temperature, top_k, top_p, min_p, uniform)
        _check(
            logits.dtype == torch.float32 and logits.stride(1) == 1 and all(p.shape == (rows,) for p in params),
            "sample",
            "logits float32 [B, V], parameters [B]",
            logits,
            *params,
        )
        temperature, top_p, min_p = (p.float().contiguous() for p in (temperature, top_p, min_p))
        top_k, uniform = top_k.long().contiguous(), uniform.double().contiguous()
        out = torch.empty(rows, dtype=torch.int64)
        functions["sample"](
            out.data_ptr(),
            logits.data_ptr(),
            rows,
            vocab,
            logits.stride(0),
            temperature.data_ptr(),
            top_k.data_ptr(),
            top_p.data_ptr(),
            min_p.data_ptr(),
            uniform.data_ptr(),
            threads(),
        )
        return out

    single_operations = SimpleNamespace(
        linear=linears["linear"],
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        silu_and_mul=silu_and_mul,
        rotary_and_cache=rotary_and_cache,
        paged_attention=paged_attention,
    )
    return {
        "native_library": lambda: library,
        **linears,
        "rms_norm": rms_norm,
        "add_rms_norm": add_rms_norm,
        "silu_and_mul": silu_and_mul,
        "rotary_and_cache": rotary_and_cache,
        "paged_attention": paged_attention,
        "pack_decoder": pack_decoder,
        "decoder": decoder,
        "mask_tokens": mask_tokens,
        "greedy": greedy,
        "sample": sample,
    }


def _check_metadata(operation: str, metadata: AttentionMetadata, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    starts, lengths, tables = metadata.query_start_loc, metadata.seq_lens, metadata.block_tables
    sequences = lengths.shape[0]
    _check(
        starts.dtype == lengths.dtype == tables.dtype == torch.int32
        and starts.shape == (sequences + 1,)
        and tables.shape[0] == sequences
        and starts.is_contiguous()
        and lengths.is_contiguous()
        and tables.is_contiguous()
        and metadata.max_seq_len <= tables.shape[1] * block_size,
        operation,
        "query_start_loc [B + 1], seq_lens [B] and block_tables [B, max_blocks] int32, contiguous, wide enough for "
        f"max_seq_len {metadata.max_seq_len}",
        starts,
        lengths,
        tables,
    )
    return starts, lengths, tables


def _check_caches(operation: str, dtype: torch.dtype, head_dim: int, k_cache: Tensor, v_cache: Tensor) -> int:
    """The code of their dtype."""
    row = reference.kv_row_size(head_dim, k_cache.dtype)
    _check(
        k_cache.dtype == v_cache.dtype
        and k_cache.dtype in (dtype, torch.int8)
        and k_cache.shape == v_cache.shape
        and k_cache.shape[3] == row
        and k_cache.is_contiguous()
        and v_cache.is_contiguous(),
        operation,
        f"caches [num_blocks, num_kv_heads, block_size, {row}] of {dtype} or int8, contiguous",
        k_cache,
        v_cache,
    )
    return INT8 if k_cache.dtype == torch.int8 else _dtype(operation, k_cache)
