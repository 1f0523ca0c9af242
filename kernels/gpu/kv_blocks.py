"""KV blocks of all layers to one contiguous piece and back, in Triton: for export to, and import from, other groups.

    run [num_kv_heads, layers, 2, n, block_size, head_dim]    2: K, then V

The heads come first, so that a group with another tensor-parallel split takes the slices that are its own, and layers
second, for other pipeline stages. A launch a layer; a program copies one block of one head.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_COPIED = 4096  # bytes that a program has in registers at a time


@triton.jit(do_not_specialize=["layer", "num_ids"])
def copy_blocks_kernel(
    run_ptr, k_cache_ptr, v_cache_ptr, block_ids_ptr, layer, num_layers, num_ids, num_kv_heads, words,
    GATHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one kv head of K and V of a layer; a word is 4 bytes."""
    index, head = tl.program_id(0), tl.program_id(1)
    block_id = tl.load(block_ids_ptr + index).to(tl.int64)
    cached = (block_id * num_kv_heads + head) * words
    in_run = (((head.to(tl.int64) * num_layers + layer) * 2) * num_ids + index) * words
    for start in range(0, words, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < words
        if GATHER:
            k = tl.load(k_cache_ptr + cached + at, mask=inside)
            v = tl.load(v_cache_ptr + cached + at, mask=inside)
            tl.store(run_ptr + in_run + at, k, mask=inside)
            tl.store(run_ptr + in_run + num_ids.to(tl.int64) * words + at, v, mask=inside)
        else:
            k = tl.load(run_ptr + in_run + at, mask=inside)
            v = tl.load(run_ptr + in_run + num_ids.to(tl.int64) * words + at, mask=inside)
            tl.store(k_cache_ptr + cached + at, k, mask=inside)
            tl.store(v_cache_ptr + cached + at, v, mask=inside)


def gather(kv_caches: Sequence[tuple[Tensor, Tensor]], block_ids: Tensor) -> Tensor:
    """Every layer's blocks as a run; K and V are [num_blocks, num_kv_heads, block_size, D], block_ids int32 [n]."""
    k_cache = kv_caches[0][0]
    shape = (k_cache.shape[1], len(kv_caches), 2, block_ids.numel(), *k_cache.shape[2:])
    run = torch.empty(shape, dtype=k_cache.dtype, device=k_cache.device)
    _copy(run, kv_caches, block_ids, gather=True)
    return run


def scatter(run: Tensor, kv_caches: Sequence[tuple[Tensor, Tensor]], block_ids: Tensor) -> None:
    """Write a run into the blocks, which must differ. Raises ValueError where it does not fit the caches."""
    _copy(run, kv_caches, block_ids, gather=False)


def _copy(run: Tensor, kv_caches: Sequence[tuple[Tensor, Tensor]], block_ids: Tensor, gather: bool) -> None:
    k_cache = kv_caches[0][0]
    num_kv_heads, block_size, head_dim = k_cache.shape[1:]
    expected = (num_kv_heads, len(kv_caches), 2, block_ids.numel(), block_size, head_dim)
    if run.shape != expected or run.dtype != k_cache.dtype or not run.is_contiguous():
        raise ValueError(
            f"a run of {list(run.shape)} {run.dtype} for caches that take {list(expected)} {k_cache.dtype}"
        )
    if block_size * head_dim * run.element_size() % 4:
        raise ValueError(f"blocks of {block_size} x {head_dim} {run.dtype} are no whole words of 4 bytes")
    if not block_ids.numel():
        return
    words = block_size * head_dim * run.element_size() // 4
    for layer, (k, v) in enumerate(kv_caches):
        copy_blocks_kernel[(block_ids.numel(), num_kv_heads)](
            run.view(torch.int32),
            k.view(torch.int32),
            v.view(torch.int32),
            block_ids,
            layer,
            len(kv_caches),
            block_ids.numel(),
            num_kv_heads,
            words,
            GATHER=gather,
            BLOCK=min(_COPIED // 4, triton.next_power_of_2(words)),
            num_warps=4,
        )
