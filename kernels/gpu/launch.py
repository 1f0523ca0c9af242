"""The operations of `..ops` that Triton does, by name: what the door takes for device `cuda`.

PAGEDRAY_KERNELS=triton asks for them on the CPU too, where only Triton's interpreter (TRITON_INTERPRET=1) can run them:
slow, for tests. PAGEDRAY_BATCH_INVARIANT=1 gives a row the same bits in any batch: attention in fixed splits, and
linear layers by a Triton GEMM whose tiles do not depend on the number of rows, instead of cuBLAS.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..reference import AttentionMetadata, DecoderStack, PackedLinear
from . import attention, elementwise, linear, sampling


def operations(batch_invariant: bool | None = None) -> dict[str, Callable[..., Any]]:
    """batch_invariant None: as PAGEDRAY_BATCH_INVARIANT says."""
    if batch_invariant is None:
        batch_invariant = os.environ.get("PAGEDRAY_BATCH_INVARIANT", "") not in ("", "0")

    def paged_attention(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float, **options: Any
    ) -> Tensor:
        return attention.paged_attention(
            q, k_cache, v_cache, metadata, scale, batch_invariant=batch_invariant, **options
        )

    def multiply(x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None) -> Tensor:
        return linear.linear(x, packed, out_dtype, batch_invariant=batch_invariant)

    def decoder(
        stack: DecoderStack,
        embeddings: Tensor,
        positions: Tensor,
        kv_caches: Sequence[tuple[Tensor, Tensor]],
        metadata: AttentionMetadata,
        reduce: Callable[[Tensor, torch.dtype], Tensor] | None = None,
    ) -> Tensor:
        """`reduce` adds up the parts of a tensor-parallel group's ranks: (fp32 [T, hidden], dtype) -> their sum."""
        heads = (stack.num_heads, stack.num_kv_heads, stack.num_kv_heads)
        dtype, partial = embeddings.dtype, None if reduce is None else torch.float32
        residual = embeddings
        x = elementwise.rms_norm(residual, stack.layers[0].input_norm, stack.eps)
        next_norms = [*(layer.input_norm for layer in stack.layers[1:]), stack.final_norm]
        for layer, (k_cache, v_cache), next_norm in zip(stack.layers, kv_caches, next_norms, strict=True):
            q, k, v = multiply(x, layer.qkv).unflatten(-1, (sum(heads), stack.head_dim)).split(heads, dim=1)
            elementwise.rotary_and_cache(q, k, v, positions, stack.cos_sin, metadata.slot_mapping, k_cache, v_cache)
            attended = paged_attention(q, k_cache, v_cache, metadata, stack.head_dim**-0.5)
            x = multiply(attended.flatten(1), layer.o, partial)
            x = x if reduce is None else reduce(x, dtype)
            x, residual = elementwise.add_rms_norm(x, residual, layer.post_attention_norm, stack.eps)
            x = multiply(elementwise.silu_and_mul(multiply(x, layer.gate_up)), layer.down, partial)
            x = x if reduce is None else reduce(x, dtype)
            if next_norm is None:  # a pipeline stage that is not the last
                return residual + x
            x, residual = elementwise.add_rms_norm(x, residual, next_norm, stack.eps)
        return x

    return {
        "pack_linear": reference.pack_linear,
        "linear": multiply,
        "rms_norm": elementwise.rms_norm,
        "add_rms_norm": elementwise.add_rms_norm,
        "silu_and_mul": elementwise.silu_and_mul,
        "rotary_and_cache": elementwise.rotary_and_cache,
        "paged_attention": paged_attention,
        "decoder": decoder,
        "greedy": sampling.greedy,
        "sample": sampling.sample,
    }
