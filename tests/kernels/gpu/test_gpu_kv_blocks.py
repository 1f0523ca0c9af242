"""Blocks of the KV cache out and in again."""

import pytest
import torch

from pagedray.kernels import reference
from pagedray.kernels.gpu import kv_blocks


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def pair(request, randn):
    return tuple(randn(10, 3, 16, 80, seed=i).to(request.param) for i in range(2))


def bits(tensor):
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("ids", [[7, 2, 5], [0], []], ids=str)
def test_there_and_back(pair, ids):
    block_ids = torch.tensor(ids, dtype=torch.int64)
    run, expected = (torch.zeros(2, 3, len(ids), 16, 80, dtype=pair[0].dtype) for _ in range(2))
    kv_blocks.gather(run, *pair, block_ids)
    reference.gather_kv_blocks(bits(expected), *map(bits, pair), block_ids)
    assert torch.equal(bits(run), bits(expected))
    target = torch.arange(len(ids)) + 4
    for first, heads in ((0, slice(0, 3)), (1, slice(1, 3)), (2, slice(0, 1))):
        part = run[:, heads].contiguous()
        found, wanted = ([torch.zeros_like(cache) for cache in pair] for _ in range(2))
        kv_blocks.scatter(part, *found, target, first)
        reference.scatter_kv_blocks(bits(part), *map(bits, wanted), target, first)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(found, wanted, strict=True))
        assert any(bits(a).any() for a in found) == bool(ids)


@pytest.mark.parametrize("shape, first_head", [((2, 3, 1), 0), ((2, 2, 2), 2), ((1, 3, 2), 0)], ids=str)
def test_a_run_that_does_not_fit_is_refused(pair, shape, first_head):
    run = torch.zeros(*shape, 16, 80, dtype=pair[0].dtype)
    with pytest.raises(ValueError, match="for 2 blocks of caches"):
        kv_blocks.scatter(run, *pair, torch.tensor([1, 2]), first_head)
