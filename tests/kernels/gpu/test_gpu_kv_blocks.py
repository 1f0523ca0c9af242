"""Blocks of the KV cache out and in again."""

import pytest
import torch

from pagedray.kernels.gpu import kv_blocks


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def caches(request, randn):
    return [tuple(randn(10, 3, 16, 80, seed=2 * i + j).to(request.param) for j in range(2)) for i in range(2)]


def bits(tensor):
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("ids", [[7, 2, 5], [0], []], ids=str)
def test_there_and_back(caches, ids):
    block_ids = torch.tensor(ids, dtype=torch.int32)
    run = kv_blocks.gather(caches, block_ids)
    assert run.shape == (3, 2, 2, len(ids), 16, 80)
    for head in range(3):
        for layer, pair in enumerate(caches):
            for kind, cache in enumerate(pair):
                assert torch.equal(bits(run[head, layer, kind]), bits(cache[block_ids.long(), head]))
    others = [tuple(torch.zeros_like(cache) for cache in pair) for pair in caches]
    target = torch.arange(len(ids), dtype=torch.int32) + 4
    kv_blocks.scatter(run, others, target)
    for pair, other in zip(caches, others, strict=True):
        for cache, copy in zip(pair, other, strict=True):
            assert torch.equal(bits(copy[target.long()]), bits(cache[block_ids.long()]))
            untouched = [b for b in range(10) if b not in target.tolist()]
            assert not bits(copy[untouched]).any()


def test_a_run_that_does_not_fit_is_refused(caches):
    run = kv_blocks.gather(caches, torch.tensor([1, 2], dtype=torch.int32))
    with pytest.raises(ValueError, match="for caches that take"):
        kv_blocks.scatter(run, caches, torch.tensor([1], dtype=torch.int32))
