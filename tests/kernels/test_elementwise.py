"""Norms, rotary embedding with cache write, gated activation: native against the oracle."""

import pytest
import torch
from torch.testing import assert_close

from pagedray.kernels import ops, reference

DTYPES = {torch.float32: dict(rtol=2e-6, atol=2e-6), torch.bfloat16: dict(rtol=8e-3, atol=1e-3)}  # bf16: one rounding
WIDTHS = [1, 3, 16, 63, 576, 1000]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


def randn(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("hidden", WIDTHS)
@pytest.mark.parametrize("rows", [0, 1, 5, 100])
def test_rms_norm(native, dtype, rows, hidden):
    x, weight = randn(rows, hidden, dtype=dtype), randn(hidden, dtype=dtype, seed=1)
    assert_close(native.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), **DTYPES[dtype])


def test_rms_norm_is_llamas(native, dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = LlamaRMSNorm(576, eps=1e-5).to(dtype)
    norm.weight.data = randn(576, dtype=dtype, seed=1)
    x = randn(7, 576, dtype=dtype) * 10
    assert torch.equal(reference.rms_norm(x, norm.weight.data, 1e-5), norm(x).detach())
    assert_close(native.rms_norm(x, norm.weight.data, 1e-5), norm(x).detach(), **DTYPES[dtype])


@pytest.mark.parametrize("hidden", WIDTHS)
def test_add_rms_norm(native, dtype, hidden):
    x, residual = randn(5, 2 * hidden, dtype=dtype)[:, :hidden], randn(5, hidden, dtype=dtype, seed=1)
    weight = randn(hidden, dtype=dtype, seed=2)
    before = x.clone(), residual.clone()
    normed, new_residual = native.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(new_residual, x + residual)
    assert_close(normed, reference.add_rms_norm(x, residual, weight, 1e-5)[0], **DTYPES[dtype])
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@pytest.mark.parametrize("width", WIDTHS)
def test_silu_and_mul(native, dtype, width):
    x = randn(5, 2 * width, dtype=dtype) * 5
    assert_close(native.silu_and_mul(x), reference.silu_and_mul(x), **DTYPES[dtype])


def test_silu_of_extremes(native):
    x = torch.tensor([[-1e4, -100.0, -88.0, 0.0, 88.0, 1e4, 1, 1, 1, 1, 1, 1]])
    assert_close(native.silu_and_mul(x), reference.silu_and_mul(x))


@pytest.mark.parametrize("head_dim, rotary_dim", [(16, 16), (64, 64), (80, 80), (80, 32), (128, 128), (6, 2)])
@pytest.mark.parametrize("num_heads, num_kv_heads, block_size", [(1, 1, 1), (9, 3, 16), (8, 2, 64), (3, 1, 8)])
def test_rotary_and_cache(native, dtype, head_dim, rotary_dim, num_heads, num_kv_heads, block_size):
    tokens, blocks = 11, 24 // block_size + 1
    angles = torch.outer(torch.arange(50.0), 1e4 ** -(torch.arange(rotary_dim // 2) / max(1, rotary_dim // 2)))
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    positions = torch.tensor([0, 1, 2, 3, 49, 7, 7, 8, 20, 21, 22])
    slots = torch.randperm(blocks * block_size, generator=torch.Generator().manual_seed(3))[:tokens]
    slots[4] = -1  # a padding token: rotated, not cached
    results = []
    for backend in (native, reference):
        fused = randn(tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
        heads = fused.view(tokens, -1, head_dim).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        k_cache = torch.full((blocks, num_kv_heads, block_size, head_dim), 7.0, dtype=dtype)
        v_cache = k_cache.clone()
        backend.rotary_and_cache(*heads, positions, cos_sin, slots, k_cache, v_cache)
        results.append((fused, k_cache, v_cache))
    for ours, expected in zip(*results, strict=True):
        assert_close(ours, expected, **DTYPES[dtype])
    assert torch.equal(
        results[0][0][:, num_heads * head_dim :], randn(*fused.shape, dtype=dtype)[:, num_heads * head_dim :]
    )


@pytest.mark.parametrize("head_dim, rotary_dim", [(16, 16), (64, 64), (80, 32), (6, 2)])
def test_rotary_into_an_int8_cache(native, dtype, head_dim, rotary_dim):
    tokens, num_kv_heads = 7, 3
    angles = torch.randn(tokens, rotary_dim // 2, generator=torch.Generator().manual_seed(1))
    cos_sin, slots = torch.cat([angles.cos(), angles.sin()], dim=-1), torch.tensor([3, 0, -1, 9, 4, 5, 11])
    k, v = (
        randn(tokens, num_kv_heads, head_dim, dtype=dtype),
        randn(tokens, num_kv_heads, head_dim, dtype=dtype, seed=1),
    )
    k[1] *= 1000
    k[3] = v[3] = 0
    v[5, 1] = torch.finfo(dtype).tiny  # 127 / that is infinite
    v[0, 0, 1], v[1, 2, 3], v[6, 1, 0] = torch.nan, torch.inf, -torch.inf
    caches = []
    for backend in (native, reference):
        k_cache = torch.full((3, num_kv_heads, 4, head_dim + 4), 7, dtype=torch.int8)
        v_cache = k_cache.clone()
        q = randn(tokens, 6, head_dim, dtype=dtype)
        backend.rotary_and_cache(q, k, v, torch.arange(tokens), cos_sin, slots, k_cache, v_cache)
        caches.append((k_cache, v_cache))
    (k_cache, v_cache), (expected_k, expected_v) = caches
    assert torch.equal(v_cache, expected_v)
    untouched = torch.ones(3, 4, dtype=torch.bool)
    untouched.view(-1)[slots[slots >= 0]] = False
    for cache, expected in ((k_cache, expected_k), (v_cache, expected_v)):
        assert (cache.transpose(1, 2)[untouched] == 7).all()
        written, right = (
            reference.dequantize_kv(c.transpose(1, 2)[~untouched], torch.float32) for c in (cache, expected)
        )
        step = right.abs().amax(-1, keepdim=True) / 127
        assert torch.equal(written.isnan(), right.isnan())
        assert ((written - right).abs() <= 1.01 * step)[
            ~right.isnan()
        ].all()  # a rotation rounded otherwise may be the next code


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_in_int8_is_off_by_half_a_step(dtype):
    rows = randn(50, 64, dtype=dtype)
    step = rows.float().abs().amax(-1, keepdim=True) / 127
    back = reference.dequantize_kv(reference.quantize_kv(rows), torch.float32)
    assert ((back - rows.float()).abs() <= 0.501 * step).all()


def test_rotary_is_llamas(native):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = randn(6, 4, 64, dtype=torch.float32), randn(6, 2, 64, dtype=torch.float32, seed=1)
    angles = torch.outer(torch.arange(6.0), 1e4 ** -(torch.arange(32) / 32))
    cos, sin = (torch.cat([f, f], dim=-1) for f in (angles.cos(), angles.sin()))
    expected_q, expected_k = apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None]
    )
    cache = torch.zeros(1, 2, 6, 64)
    slots = torch.arange(6)
    native.rotary_and_cache(q, k, k, slots, torch.cat([angles.cos(), angles.sin()], -1), slots, cache, cache.clone())
    assert_close(q, expected_q[0].transpose(0, 1))
    assert_close(cache[0], expected_k[0])


def test_a_row_is_the_same_in_any_company(native, dtype):
    x, residual = randn(300, 576, dtype=dtype), randn(300, 576, dtype=dtype, seed=1)
    weight = randn(576, dtype=dtype, seed=2)
    for operation in (
        lambda s: native.rms_norm(x[s], weight, 1e-5),
        lambda s: native.add_rms_norm(x[s], residual[s], weight, 1e-5)[0],
        lambda s: native.silu_and_mul(x[s]),
    ):
        assert torch.equal(operation(slice(None))[37:38], operation(slice(37, 38)))


def test_the_door_has_every_operation():
    x, weight = randn(3, 8, dtype=torch.float32), randn(4, 8, dtype=torch.float32, seed=1)
    assert_close(ops.linear(x, ops.pack_linear(weight)), x @ weight.T)
    packed = ops.pack_linear(weight, torch.ones(4))
    assert (packed.out_features, packed.in_features) == (4, 8)
    assert_close(ops.linear(x, packed), x @ weight.T + 1)
    assert torch.equal(ops.embedding(torch.tensor([2, 0]), weight), weight[[2, 0]])
    assert_close(ops.rms_norm(x, weight[0], 1e-6), reference.rms_norm(x, weight[0], 1e-6))
    assert_close(ops.silu_and_mul(x), reference.silu_and_mul(x))


def test_what_a_kernel_cannot_read_is_refused(native):
    x = torch.randn(4, 8)
    with pytest.raises(ValueError, match=r"rms_norm: .*float32.*bfloat16.*got \[4, 8\]"):
        native.rms_norm(x, torch.ones(8, dtype=torch.bfloat16), 1e-5)
    with pytest.raises(ValueError, match=r"rms_norm: x \[T, H\]"):
        native.rms_norm(x.t().contiguous().t(), torch.ones(8), 1e-5)
    with pytest.raises(ValueError, match="float64"):
        native.silu_and_mul(x.double())
