"""Norms, rotary embedding with cache write, gates, rounding: Triton against the oracles."""

import pytest
import torch
from torch.testing import assert_close

from pagedray.kernels import reference
from pagedray.kernels.gpu import elementwise, formats

# fp16 and bf16: one rounding
DTYPES = {
    torch.float32: dict(rtol=2e-6, atol=2e-6),
    torch.float16: dict(rtol=1e-3, atol=1e-4),
    torch.bfloat16: dict(rtol=8e-3, atol=1e-3),
}
WIDTHS = [1, 3, 63, 576, 1025]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [0, 5])
def test_norms(randn, dtype, rows, width):
    x = randn(rows, 2 * width, dtype=dtype)[:, :width]  # rows further apart than they are long
    residual, weight = randn(rows, width, dtype=dtype, seed=1), randn(width, dtype=dtype, seed=2)
    before = x.clone(), residual.clone()
    normed, new_residual = elementwise.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(new_residual, x + residual)
    assert_close(normed, reference.add_rms_norm(x, residual, weight, 1e-5)[0], **DTYPES[dtype])
    assert_close(elementwise.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), **DTYPES[dtype])
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul"])
def test_gates(randn, dtype, name, width):
    x = randn(3, 2 * width, dtype=dtype) * 5
    tolerance = DTYPES[dtype] if dtype != torch.float32 else dict(rtol=2e-6, atol=1e-5)
    assert_close(getattr(elementwise, name)(x), getattr(reference, name)(x), **tolerance)


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul"])
def test_gates_of_extremes(name):
    x = torch.tensor([[-1e4, -100.0, -88.0, 0.0, 88.0, 1e4, 1, 1, 1, 1, 1, 1]])
    assert_close(getattr(elementwise, name)(x), getattr(reference, name)(x))


@pytest.mark.parametrize("head_dim, rotary_dim", [(64, 64), (96, 96), (80, 32), (128, 128), (256, 256), (6, 2)])
@pytest.mark.parametrize("num_heads, num_kv_heads, block_size", [(1, 1, 1), (9, 3, 16), (16, 1, 64)])
def test_rotary_and_cache(randn, dtype, head_dim, rotary_dim, num_heads, num_kv_heads, block_size):
    assert_same_caches(randn, dtype, dtype, head_dim, rotary_dim, num_heads, num_kv_heads, block_size, 1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rotary_and_fp8_cache(randn, dtype):
    assert_same_caches(randn, dtype, torch.float8_e4m3fn, 80, 32, 9, 3, 16, 0.25)


def assert_same_caches(randn, dtype, cache_dtype, head_dim, rotary_dim, num_heads, num_kv_heads, block_size, scale):
    tokens, blocks = 5, 24 // block_size + 1
    angles = randn(50, rotary_dim // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    positions = torch.tensor([0, 49, 7, 7, 20])
    slots = torch.randperm(blocks * block_size, generator=torch.Generator().manual_seed(3))[:tokens]
    slots[3] = -1  # a padding token: rotated, not cached
    results = []
    for backend in (elementwise, reference):
        fused = randn(tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
        heads = fused.view(tokens, -1, head_dim).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        # the oracle has no scales: it stores the values in k's dtype, which are divided and rounded below
        stored = cache_dtype if backend is elementwise else dtype
        k_cache = torch.full((blocks, num_kv_heads, block_size, head_dim), 7.0).to(stored)
        v_cache = k_cache.clone()
        options = (scale, scale) if backend is elementwise else ()
        backend.rotary_and_cache(*heads, positions, cos_sin, slots, k_cache, v_cache, *options)
        results.append((fused, k_cache, v_cache))
    (q, *ours), (expected_q, *expected) = results
    assert_close(q, expected_q, **DTYPES[dtype])
    if cache_dtype == dtype:
        for a, b in zip(ours, expected, strict=True):
            assert_close(a, b, **DTYPES[dtype])
        return
    written = slots[slots >= 0]
    for a, b in zip(ours, expected, strict=True):
        a, b = (c[written // block_size, :, written % block_size].float() for c in (a, b))
        assert_close(
            a, (b / scale).clamp(-448, 448).to(cache_dtype).float(), rtol=0.13, atol=2e-3
        )  # a neighbor at most


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_rounding_of_rows(randn, dtype, format, width):
    x = randn(4, width, dtype=dtype)
    x[2] = 0
    target = torch.int8 if format == "int8" else torch.float8_e4m3fn
    values, scales = elementwise.quantize_rows(x, target)
    expected, expected_scales = formats.quantize_rows(x, format)
    assert_close(scales, expected_scales, rtol=1e-6, atol=0)
    assert torch.equal(values.float(), expected.float())


def test_what_does_not_fit_is_refused(randn):
    with pytest.raises(ValueError, match="weight"):
        elementwise.rms_norm(randn(2, 8), randn(9), 1e-5)
    with pytest.raises(ValueError, match="2 I"):
        elementwise.silu_and_mul(randn(2, 7))
    with pytest.raises(ValueError, match="contiguous"):
        elementwise.rotary_and_cache(
            *[randn(2, 4, 4).transpose(1, 2)] * 3, *[None] * 1, randn(4, 4), None, *[randn(1, 4, 2, 4)] * 2
        )
