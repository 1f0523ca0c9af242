"""The operations of `..ops` that Triton does, by name: what the door takes for device `cuda`.

PAGEDRAY_KERNELS=triton asks for them on the CPU too, where only Triton's interpreter (TRITON_INTERPRET=1) can run them:
slow, for tests. PAGEDRAY_BATCH_INVARIANT=1 gives a row the same bits in any batch: attention in fixed splits, and
linear layers by a Triton GEMM whose tiles do not depend on the number of rows, instead of cuBLAS.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .. import ops, reference
from ..reference import AttentionMetadata, PackedLinear
from . import attention, elementwise, kv_blocks, linear, sampling


def operations(batch_invariant: bool | None = None) -> dict[str, Callable[..., Any]]:
    """batch_invariant None: as PAGEDRAY_BATCH_INVARIANT says."""
    if batch_invariant is None:
        batch_invariant = ops.batch_invariant()

    def paged_attention(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float, **options: Any
    ) -> Tensor:
        return attention.paged_attention(
            q, k_cache, v_cache, metadata, scale, batch_invariant=batch_invariant, **options
        )

    def multiply(x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None) -> Tensor:
        return linear.linear(x, packed, out_dtype, batch_invariant=batch_invariant)

    table: dict[str, Callable[..., Any]] = {
        "pack_linear": reference.pack_linear,
        "quantize_linear": linear.quantize_linear,
        "linear_formats": lambda: ("int8", "fp8"),
        "linear": multiply,
        "rms_norm": elementwise.rms_norm,
        "add_rms_norm": elementwise.add_rms_norm,
        "silu_and_mul": elementwise.silu_and_mul,
        "rotary_and_cache": elementwise.rotary_and_cache,
        "paged_attention": paged_attention,
        "kv_cache_formats": lambda: ("fp8",),
        "gather_kv_blocks": kv_blocks.gather,
        "scatter_kv_blocks": kv_blocks.scatter,
        "greedy": sampling.greedy,
        "sample": sampling.sample,
    }
    table["decoder"] = partial(reference.decoder, operations=SimpleNamespace(**table))
    return table
