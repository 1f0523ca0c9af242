"""The interpreter computes what a GPU would: without these the other tests prove nothing."""

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def _multiply(out_ptr, a_ptr, b_ptr):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


@triton.jit
def _elementwise(sum_ptr, less_ptr, a_ptr, b_ptr):
    at = tl.arange(0, 256)
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    tl.store(sum_ptr + at, a + b)
    tl.store(less_ptr + at, (a < b).to(tl.int32))


@triton.jit
def _convert(out_ptr, x_ptr):
    at = tl.arange(0, 256)
    tl.store(out_ptr + at, tl.load(x_ptr + at).to(out_ptr.dtype.element_ty))


@pytest.fixture
def pair(randn):
    return randn(16, 16, dtype=torch.bfloat16), randn(16, 16, dtype=torch.bfloat16, seed=1)


def test_bf16_products(pair):
    out = torch.empty(16, 16)
    _multiply[(1,)](out, *pair)
    torch.testing.assert_close(out, pair[0].float() @ pair[1].float(), rtol=1e-5, atol=1e-5)


def test_a_row_of_a_product_is_the_same_wherever_it_stands(randn):
    a, b, out, rolled = randn(16, 16), randn(16, 16, seed=1), torch.empty(16, 16), torch.empty(16, 16)
    _multiply[(1,)](out, a, b)
    for rows in range(1, 16):
        _multiply[(1,)](rolled, a.roll(rows, 0), b)
        assert torch.equal(rolled, out.roll(rows, 0))


def test_bf16_arithmetic_and_comparisons(pair):
    sums, less = torch.empty_like(pair[0]), torch.empty(16, 16, dtype=torch.int32)
    _elementwise[(1,)](sums, less, *pair)
    assert torch.equal(sums, pair[0] + pair[1])
    assert torch.equal(less.bool(), pair[0] < pair[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float16], ids=str)
def test_rounding_is_to_nearest(randn, dtype):
    x = randn(256) * 30
    out = torch.empty(256, dtype=dtype)
    _convert[(1,)](out, x)
    assert torch.equal(out.float(), x.to(dtype).float())


def test_fp8_saturates():
    out = torch.empty(256, dtype=torch.float8_e4m3fn)
    _convert[(1,)](out, torch.linspace(-2000, 2000, 256))
    assert out.float().abs().max() == 448


def test_other_processes_do_not_inherit_it():
    import os

    assert "TRITON_INTERPRET" not in os.environ
