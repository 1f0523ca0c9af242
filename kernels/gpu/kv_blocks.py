"""KV blocks of a layer to one contiguous piece and back, in Triton: for export to, and import from, other groups.

    run [2, num_kv_heads, n, block_size, head_dim]    K, then V

The heads come before the blocks, so that a group with another tensor-parallel split takes those that are its own. A
program copies one block of one head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_COPIED = 4096  # bytes that a program has in registers at a time


@triton.jit(do_not_specialize=["num_ids", "first_head"])
def copy_blocks_kernel(
    run_ptr, k_cache_ptr, v_cache_ptr, block_ids_ptr, num_ids, num_heads, first_head, num_kv_heads, words,
    GATHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one head of K and V: the run has `num_heads`, the cache `num_kv_heads`; a word is 4 bytes."""
    index, head = tl.program_id(0), tl.program_id(1)
    block_id = tl.load(block_ids_ptr + index).to(tl.int64)
    cached = (block_id * num_kv_heads + first_head + head) * words
    in_run = (head.to(tl.int64) * num_ids + index) * words
    to_v = num_ids.to(tl.int64) * num_heads * words
    for start in range(0, words, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < words
        if GATHER:
            k = tl.load(k_cache_ptr + cached + at, mask=inside)
            v = tl.load(v_cache_ptr + cached + at, mask=inside)
            tl.store(run_ptr + in_run + at, k, mask=inside)
            tl.store(run_ptr + in_run + to_v + at, v, mask=inside)
        else:
            k = tl.load(run_ptr + in_run + at, mask=inside)
            v = tl.load(run_ptr + in_run + to_v + at, mask=inside)
            tl.store(k_cache_ptr + cached + at, k, mask=inside)
            tl.store(v_cache_ptr + cached + at, v, mask=inside)


def gather(run: Tensor, k_cache: Tensor, v_cache: Tensor, block_ids: Tensor) -> None:
    """Blocks to a run; caches [num_blocks, num_kv_heads, block_size, head_dim], block_ids int64 [n].

    This and `scatter` raise ValueError where the run does not fit the caches.
    """
    _copy(run, k_cache, v_cache, block_ids, 0, gather=True)


def scatter(run: Tensor, k_cache: Tensor, v_cache: Tensor, block_ids: Tensor, first_head: int = 0) -> None:
    """Write a run of some heads into the blocks, which must differ."""
    _copy(run, k_cache, v_cache, block_ids, first_head, gather=False)


def _copy(run: Tensor, k_cache: Tensor, v_cache: Tensor, block_ids: Tensor, first_head: int, gather: bool) -> None:
    num_kv_heads, block_size, head_dim = k_cache.shape[1:]
    num_heads, num_ids = run.shape[1], block_ids.numel()
    fits = run.shape == (2, num_heads, num_ids, block_size, head_dim) and 0 <= first_head <= num_kv_heads - num_heads
    if not fits or run.dtype != k_cache.dtype or not run.is_contiguous():
        raise ValueError(
            f"a run of {list(run.shape)} {run.dtype} from head {first_head} on, for {num_ids} blocks of caches "
            f"{list(k_cache.shape)} {k_cache.dtype}"
        )
    if block_size * head_dim * run.element_size() % 4:
        raise ValueError(f"blocks of {block_size} x {head_dim} {run.dtype} are no whole words of 4 bytes")
    if not num_ids:
        return
    words = block_size * head_dim * run.element_size() // 4
    copy_blocks_kernel[(num_ids, num_heads)](
        run.view(torch.int32),
        k_cache.view(torch.int32),
        v_cache.view(torch.int32),
        block_ids,
        num_ids,
        num_heads,
        first_head,
        num_kv_heads,
        words,
        GATHER=gather,
        BLOCK=min(_COPIED // 4, triton.next_power_of_2(words)),
        num_warps=4,
    )
