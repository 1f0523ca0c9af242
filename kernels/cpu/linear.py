"""The native library's linear layers and embeddings: weights packed once, plain or quantized."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..quantized import FORMATS, QuantizedTensor
from ..reference import PackedLinear, Weight
from .arena import Arena
from .checks import DTYPES, check, dtype_code

_PLAIN, _PANEL_ROWS = 0, 32  # panel.h


def linear_operations(functions: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """`functions` are the library's, by name without prefix."""
    arena, threads = Arena(), torch.get_num_threads

    def pack_linear(
        weight: Weight | Sequence[Weight], bias: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> PackedLinear:
        parts = reference.parts_of(weight)
        dtype = reference.dtype_of("pack_linear", parts, dtype)
        k = parts[0].shape[1]
        code = dtype_code("pack_linear", torch.empty(0, dtype=dtype), *(p for p in parts if isinstance(p, Tensor)))
        for part in parts:
            check(
                isinstance(part, QuantizedTensor) or (part.dim() == 2 and part.stride(1) == 1),
                "pack_linear",
                "weight [N, K], rows contiguous",
                *(p for p in parts if isinstance(p, Tensor)),
            )
        if any(part.shape[0] % _PANEL_ROWS for part in parts[:-1]):  # a panel has one format
            parts = (reference.plain(parts, dtype),)
        n = sum(part.shape[0] for part in parts)
        if bias is not None:
            check(bias.shape == (n,) and bias.dtype == dtype, "pack_linear", f"bias [{n}] in {dtype}", bias)
            bias = bias.contiguous()
        formats = [part.format.ggml_type if isinstance(part, QuantizedTensor) else _PLAIN for part in parts]
        sizes = [functions["packed_bytes"](code, f, part.shape[0], k) for f, part in zip(formats, parts, strict=True)]
        data = arena.empty(sum(sizes))
        table = []
        for part, ggml_type, place in zip(parts, formats, data.split(sizes), strict=True):
            if isinstance(part, QuantizedTensor):
                blocks = part.blocks.contiguous()
                functions["pack_blocks"](
                    code, ggml_type, place.data_ptr(), blocks.data_ptr(), part.shape[0], k, threads()
                )
            else:
                functions["pack_linear"](
                    code, place.data_ptr(), part.data_ptr(), part.shape[0], k, part.stride(0), threads()
                )
            table += [ggml_type, -(-part.shape[0] // _PANEL_ROWS), place.data_ptr()]
        return PackedLinear(data, bias, n, k, dtype, _Native(n, k, bias, table))

    def linear(x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None) -> Tensor:
        check(
            x.dtype == packed.dtype, "linear", f"x in {packed.dtype}, float32 or bfloat16 as the weight was packed", x
        )
        rows, k = x.shape
        check(
            k == packed.in_features and x.stride(1) == 1, "linear", f"x [T, {packed.in_features}], rows contiguous", x
        )
        check(out_dtype in (None, x.dtype, torch.float32), "linear", "out_dtype must be x's or float32", x)
        out = x.new_empty(rows, packed.out_features, dtype=out_dtype)
        functions["linear"](
            DTYPES[x.dtype],
            DTYPES[out.dtype],
            out.data_ptr(),
            x.data_ptr(),
            packed.native.address,
            rows,
            x.stride(0),
            threads(),
        )
        return out

    def embedding(token_ids: Tensor, weight: Weight, dtype: torch.dtype | None = None) -> Tensor:
        if isinstance(weight, Tensor):
            return reference.embedding(token_ids, weight, dtype)
        num_rows, k = weight.shape
        out = torch.empty(len(token_ids), k, dtype=reference.dtype_of("embedding", (weight,), dtype))
        check(
            token_ids.dtype == torch.int64
            and token_ids.is_contiguous()
            and weight.blocks.is_contiguous()
            and (not len(token_ids) or (int(token_ids.min()) >= 0 and int(token_ids.max()) < num_rows)),
            "embedding",
            f"token_ids int64 [T], contiguous, from 0 to {num_rows - 1}; blocks contiguous",
            token_ids,
            weight.blocks,
        )
        functions["dequantize_rows"](
            dtype_code("embedding", out),
            weight.format.ggml_type,
            out.data_ptr(),
            weight.blocks.data_ptr(),
            token_ids.data_ptr(),
            len(token_ids),
            k,
            threads(),
        )
        return out

    def quantize_int8(weight: Tensor) -> QuantizedTensor:
        if weight.dtype not in DTYPES:
            weight = weight.float()
        n, k = weight.shape
        check(weight.stride(1) == 1 and k % 32 == 0, "quantize_int8", "[N, a multiple of 32], rows contiguous", weight)
        blocks = torch.empty(n, k // 32 * FORMATS["Q8_0"].bytes, dtype=torch.uint8)
        functions["quantize_int8"](
            DTYPES[weight.dtype], blocks.data_ptr(), weight.data_ptr(), n, k, weight.stride(0), threads()
        )
        return QuantizedTensor(blocks, FORMATS["Q8_0"])

    return {"pack_linear": pack_linear, "linear": linear, "embedding": embedding, "quantize_int8": quantize_int8}


class _Native:
    """panel.h's `Linear`: n, k, bias, number of parts, parts; a part: format, panels, data."""

    def __init__(self, n: int, k: int, bias: Tensor | None, parts: list[int]):
        self._parts = (ctypes.c_int64 * len(parts))(*parts)
        header = (n, k, 0 if bias is None else bias.data_ptr(), len(parts) // 3, ctypes.addressof(self._parts))
        self._linear = (ctypes.c_int64 * 5)(*header)
        self.address = ctypes.addressof(self._linear)
