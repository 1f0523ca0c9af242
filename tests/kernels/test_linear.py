"""Packed linear layers: native against the oracle, and each row against its company."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from pagedray.kernels import reference

DTYPES = {torch.float32: dict(rtol=1e-5, atol=1e-4), torch.bfloat16: dict(rtol=8e-3, atol=2e-3)}
SHAPES = [(1, 1), (5, 3), (32, 32), (33, 31), (48, 576), (100, 65), (576, 100), (31, 2000)]  # N, K


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


def randn(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def expected(x, weight, bias=None):
    """In double, rounded once."""
    y = x.double() @ weight.double().T
    return (y if bias is None else y + bias.double()).to(x.dtype)


@pytest.mark.parametrize("n, k", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 7, 17, 33, 70])
def test_shapes(native, dtype, rows, n, k):
    x, weight = randn(rows, k, dtype=dtype), randn(n, k, dtype=dtype, seed=1)
    assert_close(native.linear(x, native.pack_linear(weight)), expected(x, weight), **DTYPES[dtype])


def test_bias(native, dtype):
    x, weight, bias = randn(5, 64, dtype=dtype), randn(50, 64, dtype=dtype, seed=1), randn(50, dtype=dtype, seed=2)
    packed = native.pack_linear(weight, bias)
    assert (packed.out_features, packed.in_features, packed.dtype) == (50, 64, dtype)
    assert_close(native.linear(x, packed), expected(x, weight, bias), **DTYPES[dtype])
    assert_close(reference.linear(x, reference.pack_linear(weight, bias)), expected(x, weight, bias), **DTYPES[dtype])


def test_strided_rows(native, dtype):
    wide, weight = randn(9, 200, dtype=dtype), randn(70, 128, dtype=dtype, seed=1)
    x = wide[:, 37:165]  # rows that start at odd elements
    assert_close(native.linear(x, native.pack_linear(weight[::2])), expected(x, weight[::2]), **DTYPES[dtype])


@pytest.mark.parametrize("threads", [1, 3], indirect=True)
def test_many_rows(native, dtype, threads):
    """More rows than stay in a core's cache at a time."""
    x, weight = randn(500, 1100, dtype=dtype), randn(80, 1100, dtype=dtype, seed=1)
    assert_close(native.linear(x, native.pack_linear(weight)), expected(x, weight), **DTYPES[dtype])


@pytest.mark.parametrize("k", [576, 100])
def test_a_row_is_the_same_in_any_company(native, dtype, k):
    x, weight = randn(300, k, dtype=dtype), randn(96, k, dtype=dtype, seed=1)
    packed = native.pack_linear(weight)
    together = native.linear(x, packed)
    for start, end in ((0, 1), (31, 33), (7, 24), (199, 200), (100, 170)):
        assert torch.equal(native.linear(x[start:end], packed), together[start:end])


def test_packing_keeps_one_copy(native, dtype):
    """The packed weight is whole without the original, and no larger than its padding makes it."""
    weight = randn(96, 576, dtype=dtype)
    x, y = randn(3, 576, dtype=dtype, seed=1), expected(randn(3, 576, dtype=dtype, seed=1), weight)
    packed = native.pack_linear(weight)
    assert packed.data.nbytes == weight.nbytes
    weight.fill_(float("nan"))
    assert_close(native.linear(x, packed), y, **DTYPES[dtype])


HUGE_PAGES = """
import torch
from pagedray.kernels.cpu import launch, library

torch.empty(31 << 20, dtype=torch.uint8)  # raises the size from which malloc maps memory afresh
temporaries = [torch.ones(7 << 20, dtype=torch.uint8) for _ in range(16)]
above = torch.ones(1 << 20, dtype=torch.uint8)  # so that what is freed below it stays in the heap
del temporaries
pack_linear = launch.operations(library.load())["pack_linear"]
packed = pack_linear(torch.zeros(8192, 2048, dtype=torch.bfloat16))
print(*(line.split()[1] for line in open("/proc/self/smaps_rollup") if line.startswith("AnonHugePages")))
"""


def test_weights_lie_in_huge_pages_after_a_loader_has_left_its_memory_behind():
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this system has no transparent huge pages")
    done = subprocess.run([sys.executable, "-c", HUGE_PAGES], capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) >= 28 * 1024, f"{int(done.stdout)} kB of 32 MB in huge pages"


def test_memory_of_dropped_weights_is_returned(native):
    def resident_mb():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4 // 1024

    before = resident_mb()
    for _ in range(4):
        packed = native.pack_linear(torch.zeros(49152, 1024, dtype=torch.bfloat16))  # 96 MB: a chunk of its own
    assert resident_mb() - before < 250  # at most the new one and its predecessor
    del packed
    assert resident_mb() - before < 60


def test_bad_arguments_are_refused(native):
    packed = native.pack_linear(torch.ones(4, 8))
    with pytest.raises(ValueError, match=r"linear: x \[T, 8\]"):
        native.linear(torch.ones(2, 7), packed)
    with pytest.raises(ValueError, match="float32.*bfloat16"):
        native.linear(torch.ones(2, 8, dtype=torch.bfloat16), packed)
    with pytest.raises(ValueError, match="float16"):
        native.pack_linear(torch.ones(4, 8, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"bias \[4\]"):
        native.pack_linear(torch.ones(4, 8), torch.ones(5))


@pytest.mark.parametrize("rows", [1, 17, 300])
def test_results_can_be_had_unrounded(native, rows):
    x, weight, bias = (randn(*shape, dtype=torch.bfloat16) for shape in ((rows, 96), (70, 96), (70,)))
    result = native.linear(x, native.pack_linear(weight, bias), torch.float32)
    assert result.dtype == torch.float32
    assert_close(result, expected(x.float(), weight.float(), bias.float()), rtol=1e-4, atol=1e-4)
    assert_close(result, reference.linear(x, reference.pack_linear(weight, bias), torch.float32), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="out_dtype"):
        native.linear(x, native.pack_linear(weight), torch.float16)
