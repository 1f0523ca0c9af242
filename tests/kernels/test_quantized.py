"""Quantized weights: the oracle against llama.cpp's package, the native kernels against the oracle, bit for bit."""

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from pagedray.kernels import reference
from pagedray.kernels.quantized import FORMATS, QuantizedTensor

KINDS = list(FORMATS)
SCALES_AT = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0]}
SCALES_AT |= {"Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request):
    return request.param


def random_blocks(kind, n, k, seed=0):
    """Random codes and integers under scales of a model's size, some of them subnormal or zero."""
    form, generator = FORMATS[kind], np.random.default_rng(seed)
    count = n * k // form.values
    blocks = generator.integers(0, 256, (count, form.bytes), dtype=np.uint8)
    for at in SCALES_AT[kind]:
        scales = generator.normal(0, 0.01, count) * generator.choice([1, 1, 1, 1e-4, 0], count)
        blocks[:, at : at + 2] = scales.astype(np.float16)[:, None].view(np.uint8)
    return QuantizedTensor(torch.from_numpy(blocks.reshape(n, -1)), form)


def randn(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def width(kind, blocks):
    return blocks * FORMATS[kind].values


@pytest.mark.parametrize("kind", KINDS)
def test_the_oracle_dequantizes_as_llama_cpp_does(kind):
    weight = random_blocks(kind, 33, width(kind, 5))
    theirs = gguf.quants.dequantize(weight.blocks.numpy(), gguf.GGMLQuantizationType[kind])
    assert np.array_equal(weight.dequantize(torch.float32).numpy().view(np.int32), theirs.view(np.int32))
    assert weight.shape == theirs.shape
    block_size, block_bytes = gguf.constants.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    assert (FORMATS[kind].values, FORMATS[kind].bytes) == (block_size, block_bytes)
    assert FORMATS[kind].ggml_type == gguf.GGMLQuantizationType[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "n", "blocks"), [(1, 1, 1), (7, 33, 3), (33, 100, 2), (70, 31, 9), (0, 32, 1)])
def test_equals_the_dequantized_weight(native, dtype, kind, rows, n, blocks):
    weight, x = random_blocks(kind, n, width(kind, blocks)), randn(rows, width(kind, blocks), dtype=dtype, seed=1)
    bias = randn(n, dtype=dtype, seed=2)
    packed = native.pack_linear(weight, bias, dtype)
    assert (packed.out_features, packed.in_features, packed.dtype) == (*weight.shape, dtype)
    result = native.linear(x, packed)
    assert torch.equal(result, native.linear(x, native.pack_linear(weight.dequantize(dtype), bias)))
    oracle = reference.linear(x.float(), reference.pack_linear(weight.dequantize(dtype).float(), bias.float()))
    assert_close(result.float(), oracle, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_and_scale_comes_through(native, dtype, kind):
    """The weight itself, by a product with the unit matrix; and rounded to the dtype as PyTorch rounds."""
    weight = random_blocks(kind, 70, width(kind, 2), seed=3)
    packed = native.pack_linear(weight, None, dtype)
    unit = torch.eye(weight.shape[1], dtype=dtype)
    assert torch.equal(native.linear(unit, packed).T, weight.dequantize(dtype))


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("threads", [1, 3], indirect=True)
def test_many_rows_and_a_row_in_any_company(native, dtype, kind, threads):
    """More rows and a longer k than stay in a core's cache at a time."""
    k = 2304
    weight, x = random_blocks(kind, 300, k), randn(500, k, dtype=dtype, seed=1)
    packed = native.pack_linear(weight, None, dtype)
    together = native.linear(x, packed)
    assert torch.equal(together, native.linear(x, native.pack_linear(weight.dequantize(dtype))))
    for start, end in ((0, 1), (31, 33), (7, 24), (239, 241), (100, 170)):
        assert torch.equal(native.linear(x[start:end], packed), together[start:end])


def test_results_can_be_had_unrounded(native):
    weight, x = random_blocks("Q8_0", 70, 96), randn(17, 96, dtype=torch.bfloat16)
    result = native.linear(x, native.pack_linear(weight, None, torch.bfloat16), torch.float32)
    plain = native.linear(x, native.pack_linear(weight.dequantize(torch.bfloat16)), torch.float32)
    assert result.dtype == torch.float32 and torch.equal(result, plain)


def test_it_takes_no_more_memory_than_the_file(native):
    """But for codes of 5 and 6 bits, which take a byte."""
    for kind in ("Q4_0", "Q4_1", "Q8_0", "Q4_K"):
        weight = random_blocks(kind, 64, 512)
        assert native.pack_linear(weight, None, torch.bfloat16).data.nbytes <= weight.blocks.nbytes * 1.03, kind


PARTS = st.lists(st.tuples(st.sampled_from([None, *KINDS]), st.sampled_from([32, 64, 96])), min_size=1, max_size=4)


@settings(max_examples=30, deadline=None)
@given(parts=PARTS, last=st.integers(1, 70), rows=st.sampled_from([1, 5, 40, 300]), bias=st.booleans())
def test_parts_of_different_formats_are_stacked(native, parts, last, rows, bias):
    dtype, k = torch.bfloat16, 512
    sizes = [*(size for _, size in parts[:-1]), last]
    weights = [
        randn(n, k, dtype=dtype, seed=i) if kind is None else random_blocks(kind, n, k, seed=i)
        for i, ((kind, _), n) in enumerate(zip(parts, sizes, strict=True))
    ]
    b = randn(sum(sizes), dtype=dtype, seed=9) if bias else None
    x = randn(rows, k, dtype=dtype, seed=8)
    whole = native.pack_linear(reference.plain(weights, dtype), b)
    assert torch.equal(native.linear(x, native.pack_linear(weights, b, dtype)), native.linear(x, whole))


def test_parts_that_share_a_panel_are_dequantized(native, dtype):
    weights = [random_blocks("Q4_0", 40, 64), random_blocks("Q8_0", 24, 64, seed=1)]
    packed = native.pack_linear(weights, None, dtype)
    x = randn(3, 64, dtype=dtype)
    assert torch.equal(native.linear(x, packed), native.linear(x, native.pack_linear(reference.plain(weights, dtype))))


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_are_dequantized_row_by_row(backend, dtype, kind):
    weight = random_blocks(kind, 50, width(kind, 2))
    ids = torch.tensor([0, 49, 7, 7, 31])
    assert torch.equal(backend.embedding(ids, weight, dtype), weight.dequantize(dtype)[ids])
    assert backend.embedding(ids[:0], weight, dtype).shape == (0, weight.shape[1])
    plain = weight.dequantize(dtype)
    assert torch.equal(backend.embedding(ids, plain), plain[ids])


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_int8(native, kind):
    weight = randn(37, 96, dtype=torch.float32) * torch.logspace(-8, 3, 37).unsqueeze(1)
    weight[3, 32:64] = 0
    weight[4] = torch.arange(96) - 40  # ties
    quantized = native.quantize_int8(weight.to(kind))
    oracle = reference.quantize_int8(weight.to(kind))
    assert torch.equal(quantized.blocks, oracle.blocks) and quantized.format is FORMATS["Q8_0"]
    back = quantized.dequantize(torch.float32)
    groups = weight.to(kind).float().view(37, 3, 32)
    step = (groups.abs().amax(-1, keepdim=True) / 127).half().float()
    bound = torch.where(step > 2**-14, 0.57 * step, step * 130 + 4e-6)  # the scale's own rounding moves the ends
    assert ((back.view(37, 3, 32) - groups).abs() <= bound).all()


def test_bad_arguments_are_refused(native):
    weight = random_blocks("Q4_0", 32, 64)
    with pytest.raises(ValueError, match="one dtype, of plain weights or said"):
        native.pack_linear(weight)
    with pytest.raises(ValueError, match="one dtype"):
        native.pack_linear([weight, torch.ones(4, 64)], None, torch.bfloat16)
    with pytest.raises(ValueError, match="parts of one width"):
        native.pack_linear([weight, torch.ones(4, 32)], None, torch.float32)
    with pytest.raises(ValueError, match=r"token_ids int64 .* from 0 to 31"):
        native.embedding(torch.tensor([32]), weight, torch.float32)
    with pytest.raises(ValueError, match="a multiple of 32"):
        native.quantize_int8(torch.ones(2, 33))
    with pytest.raises(ValueError, match="x in torch.bfloat16"):
        native.linear(torch.ones(1, 64), native.pack_linear(weight, None, torch.bfloat16))
