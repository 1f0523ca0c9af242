"""Linear layers in 16, 8 and 4 bits, and experts: Triton against the oracles."""

import pytest
import torch
from torch.testing import assert_close

from pagedray.kernels import reference
from pagedray.kernels.gpu import formats, linear, moe

DTYPES = {
    torch.float32: dict(rtol=1e-5, atol=1e-4),
    torch.float16: dict(rtol=1e-3, atol=1e-3),
    torch.bfloat16: dict(rtol=8e-3, atol=8e-3),
}
SHAPES = [(1, 70, 100), (17, 130, 64), (150, 64, 200)]  # rows, columns, depth
FORMATS = {
    "int8": [dict(), dict(per_channel=False)],
    "fp8": [dict(), dict(per_channel=False)],
    "int4": [dict(), dict(group=32), dict(group=64, symmetric=False)],
    "mxfp4": [dict()],
    "nvfp4": [dict()],
}


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.mark.parametrize("rows, columns, depth", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_dense(randn, dtype, rows, columns, depth, bias):
    x, w = randn(rows, depth, dtype=dtype), randn(columns, depth, dtype=dtype, seed=1)
    b = randn(columns, dtype=dtype, seed=2) if bias else None
    exact = x.double() @ w.double().T + (0 if b is None else b.double())
    for invariant in (False, True):
        assert_close(linear.gemm(x, w, dtype, b, batch_invariant=invariant), exact.to(dtype), **DTYPES[dtype])
        unrounded = linear.linear(x, reference.pack_linear(w, b), torch.float32, batch_invariant=invariant)
        assert_close(unrounded, exact.float(), **DTYPES[torch.float32])


@pytest.mark.parametrize("format, options", [(f, o) for f, all_ in FORMATS.items() for o in all_], ids=str)
@pytest.mark.parametrize("rows", [1, 17, 70])
def test_quantized(randn, dtype, format, options, rows):
    weight = formats.quantize(randn(70, 256, seed=1), format, **options)
    x, bias = randn(rows, 256, dtype=dtype), randn(70, dtype=dtype, seed=2)
    for b in (None, bias):
        ours, expected = linear.quantized_linear(x, weight, b), formats.quantized_linear(x, weight, b)
        assert_close(ours, expected, **DTYPES[dtype])


def test_depth_shared_by_programs(randn):
    """One row and a deep matrix: several programs a tile."""
    weight, x = formats.quantize(randn(70, 4096, seed=1), "int4"), randn(1, 4096, dtype=torch.bfloat16)
    assert_close(linear.w4_gemm(x, weight), formats.quantized_linear(x, weight), rtol=8e-3, atol=3e-2)


@pytest.mark.parametrize("format", ["bf16", *FORMATS])
def test_batch_invariant(randn, format):
    """A row alone has the bits it has among others."""
    x, w = randn(70, 256, dtype=torch.bfloat16), randn(70, 256, seed=1)
    if format == "bf16":
        packed = reference.pack_linear(w.bfloat16())
        together, alone = (linear.linear(r, packed, batch_invariant=True) for r in (x, x[33:34]))
    else:
        weight = formats.quantize(w, format)
        together, alone = (linear.quantized_linear(r, weight, batch_invariant=True) for r in (x, x[33:34]))
    assert torch.equal(together[33:34], alone)


# Of a normal matrix, in parts of its norm: 4 bits with groups cannot do much better
ERRORS = {"int8": 0.01, "fp8": 0.03, "int4": 0.13, "mxfp4": 0.13, "nvfp4": 0.11}


@pytest.mark.parametrize("format", FORMATS)
def test_rounding_loses_little(randn, format):
    w = randn(70, 256)
    for options in FORMATS[format]:
        weight = formats.quantize(w, format, **options)
        assert (weight.out_features, weight.in_features) == w.shape
        assert (weight.dequantized() - w).norm() / w.norm() < ERRORS[format]


def test_fp4_keeps_what_it_can_say():
    """Every value of e2m1 under scales that are powers of two."""
    values = torch.tensor([*formats.E2M1, *(-v for v in formats.E2M1)]).repeat(2)
    w = torch.stack([values, values * 4, values / 64])
    assert torch.equal(formats.quantize(w, "mxfp4").dequantized(), w)
    assert_close(formats.quantize(w[:2], "nvfp4").dequantized(), w[:2])


def test_what_does_not_fit_is_refused(randn):
    with pytest.raises(ValueError, match="groups of 128"):
        formats.quantize(randn(4, 100), "int4")
    with pytest.raises(ValueError, match="format must be one of"):
        formats.quantize(randn(4, 128), "int3")
    with pytest.raises(ValueError, match=r"x \[T, 128\]"):
        linear.w4_gemm(randn(2, 64), formats.quantize(randn(4, 128), "int4"))


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("tokens, experts, top_k", [(1, 4, 1), (9, 5, 2), (7, 60, 4)])
def test_routing(randn, tokens, experts, top_k, renormalize):
    logits = (randn(tokens, experts) * 2).round()  # many equals
    weights, ids = moe.route(logits, top_k, renormalize)
    expected_weights, expected_ids = reference.route(logits, top_k, renormalize)
    assert torch.equal(ids, expected_ids)
    assert_close(weights, expected_weights)


@pytest.mark.parametrize(
    "tokens, experts, top_k, block_m", [(1, 4, 1, 16), (40, 5, 2, 16), (30, 60, 4, 16), (600, 3, 2, 64)]
)
def test_order_by_expert(tokens, experts, top_k, block_m):
    ids = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(0)).topk(top_k).indices.int()
    order = moe.order(ids, experts, block_m)
    tiles = order.assignments.view(-1, block_m)
    for expert in range(experts):
        mine = tiles[order.tile_experts == expert].flatten()
        assert mine[mine >= 0].tolist() == (ids.flatten() == expert).nonzero().flatten().tolist()
    assert (tiles[order.tile_experts == -1] == -1).all()


@pytest.mark.parametrize("tokens", [0, 1, 9, 70])
def test_experts(randn, dtype, tokens):
    experts, top_k, hidden, intermediate = 5, 2, 64, 48
    x = randn(tokens, hidden, dtype=dtype)
    w13 = (0.2 * randn(experts, 2 * intermediate, hidden, seed=1)).to(dtype)
    w2 = (0.2 * randn(experts, hidden, intermediate, seed=2)).to(dtype)
    weights, ids = reference.route(randn(tokens, experts, seed=3), top_k, True)
    ours = moe.experts(x, w13, w2, weights, ids.contiguous())
    assert_close(ours, reference.experts(x, w13, w2, weights, ids), **DTYPES[dtype])
