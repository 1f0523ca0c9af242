"""Sums and gathers in shared pages; the ranks are threads here, as native calls let go of the interpreter lock."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pagedray.kernels.cpu import library
from pagedray.kernels.cpu.shared_group import SharedGroup
from pagedray.kernels.reference import RankLost

SLOT = 16 * 1024


@pytest.fixture
def ranks():
    """A function that makes the groups of all ranks over fresh pages."""
    native = library.load()
    assert native is not None, "the native library does not build here"
    files = []

    def make(size, slot_bytes=SLOT, timeout=20.0):
        files.append(SharedGroup.create(native, size, slot_bytes))
        return [SharedGroup(native, files[-1], rank, size, slot_bytes, timeout) for rank in range(size)]

    yield make
    for file in files:
        os.close(file)


def together(groups, call):
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(call, groups))


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize(("rows", "hidden"), [(1, 1), (1, 575), (16, 96), (200, 64), (3, 4096)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_rank_gets_the_sum_in_the_order_of_ranks(ranks, size, rows, hidden, dtype):
    generator = torch.Generator().manual_seed(0)
    rounds = [[torch.randn(rows, hidden, generator=generator) for _ in range(size)] for _ in range(7)]
    expected = []
    for parts in rounds:
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        expected.append(total.to(dtype))
    for got in together(ranks(size), lambda group: [group(parts[group.rank], dtype) for parts in rounds]):
        for a, b in zip(got, expected, strict=True):
            assert a.dtype == dtype and torch.equal(a, b)


def test_logits_of_uneven_parts_come_together_on_the_first_rank(ranks):
    columns, rows = [33, 7, 20], 90  # more than a slot holds at a time
    whole = torch.randn(rows, sum(columns), generator=torch.Generator().manual_seed(1))
    parts = whole.split(columns, 1)
    first, *others = together(ranks(3, 4096), lambda group: group.gather(parts[group.rank], columns))
    assert torch.equal(first, whole) and others == [None, None]


def test_an_abort_ends_a_wait_and_every_later_one(ranks):
    first, second = ranks(2)
    timer = threading.Timer(0.1, second.abort)
    timer.start()
    with pytest.raises(RankLost, match="aborted"):
        first(torch.zeros(1, 8), torch.float32)
    timer.join()
    with pytest.raises(RankLost, match="aborted"):
        second(torch.zeros(1, 8), torch.float32)


def test_a_rank_that_does_not_come_is_named(ranks):
    first, _, third = ranks(3, timeout=0.2)
    waits = [threading.Thread(target=lambda: pytest.raises(RankLost, third, torch.zeros(1, 8), torch.float32))]
    waits[0].start()
    with pytest.raises(RankLost, match="tensor-parallel rank 1 did not come within 0 s"):
        first(torch.zeros(1, 8), torch.float32)
    waits[0].join()
