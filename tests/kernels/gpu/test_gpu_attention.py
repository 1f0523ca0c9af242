"""Paged attention in Triton against the oracle: shapes, options, and rows in other company."""

from dataclasses import replace

import pytest
import torch
from test_attention import BATCHES, Case
from torch.testing import assert_close

from pagedray.kernels import reference
from pagedray.kernels.gpu import attention

# weights are rounded to q's dtype before they meet the values
DTYPES = {
    torch.float32: dict(rtol=1e-5, atol=4e-6),
    torch.float16: dict(rtol=2e-3, atol=1e-3),
    torch.bfloat16: dict(rtol=1e-2, atol=8e-3),
}
MIXED = [(1, 65), (20, 70), (1, 300), (3, 5)]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


def run(case, **options):
    return attention.paged_attention(case.q, case.k_cache, case.v_cache, case.metadata, case.scale, **options)


def expected(case, **options):
    return reference.paged_attention(case.q, case.k_cache, case.v_cache, case.metadata, case.scale, **options)


@pytest.mark.parametrize("invariant", [False, True], ids=["equal splits", "fixed splits"])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_batches(dtype, batch, invariant):
    case = Case(batch, dtype=dtype)
    assert_close(run(case, batch_invariant=invariant), expected(case), **DTYPES[dtype])


@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 256])
@pytest.mark.parametrize("num_heads, num_kv_heads", [(1, 1), (6, 2), (7, 1), (16, 1)])
def test_heads(dtype, head_dim, num_heads, num_kv_heads):
    case = Case([(1, 70), (19, 45)], num_heads, num_kv_heads, head_dim, dtype=dtype)
    assert_close(run(case), expected(case), **DTYPES[dtype])


@pytest.mark.parametrize("block_size", [16, 24, 32, 64, 128])
def test_block_sizes(dtype, block_size):
    case = Case(MIXED, block_size=block_size, dtype=dtype)
    assert_close(run(case), expected(case), **DTYPES[dtype])


@pytest.mark.parametrize(
    "options",
    [
        dict(window=1),
        dict(window=40),
        dict(window=1000),
        dict(soft_cap=2.0),
        dict(sinks=True),
        dict(window=33, soft_cap=5.0, sinks=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("invariant", [False, True], ids=["equal splits", "fixed splits"])
def test_options(dtype, options, invariant):
    case = Case(MIXED, dtype=dtype)
    if "sinks" in options:
        options = options | {"sinks": torch.linspace(-2, 3, 6)}
    assert_close(run(case, batch_invariant=invariant, **options), expected(case, **options), **DTYPES[dtype])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_fp8_cache(dtype):
    case = Case(MIXED, dtype=dtype)
    scales = dict(k_scale=0.5, v_scale=0.25)
    case.k_cache, case.v_cache = (c.float().div(0.5).to(torch.float8_e4m3fn) for c in (case.k_cache, case.v_cache))
    assert_close(run(case, **scales), expected(case, **scales), **DTYPES[dtype])


def test_many_splits_and_a_long_context():
    case = Case([(1, 1500)], num_heads=3, num_kv_heads=1)
    assert_close(run(case), expected(case), **DTYPES[torch.float32])
    assert attention.splits_for(1, 8, 132) == 64 and attention.splits_for(64, 8, 132) == 1


def test_large_scores():
    case = Case(MIXED)
    case.scale = 30.0
    assert_close(run(case), expected(case), rtol=1e-4, atol=1e-4)


def test_fixed_splits_give_a_row_the_same_bits_in_any_company(dtype):
    case = Case(MIXED, dtype=dtype)
    together = run(case, batch_invariant=True)
    for b in range(len(MIXED)):
        alone, rows = case.alone(b)
        alone.metadata = replace(
            alone.metadata, max_query_len=MIXED[b][0], max_seq_len=MIXED[b][1]
        )  # as a step of its own would say
        assert torch.equal(run(alone, batch_invariant=True), together[rows])


def test_a_row_is_the_same_in_any_chunk_of_the_prefill(dtype):
    case = Case([(50, 120)], dtype=dtype)
    whole = run(case)
    for start, end in ((0, 16), (16, 33), (33, 50)):
        metadata = replace(
            case.metadata,
            query_start_loc=torch.tensor([0, end - start], dtype=torch.int32),
            seq_lens=torch.tensor([70 + end], dtype=torch.int32),
            max_query_len=end - start,
        )
        part = attention.paged_attention(case.q[start:end], case.k_cache, case.v_cache, metadata, case.scale)
        assert torch.equal(part, whole[start:end])


def test_what_does_not_fit_is_refused():
    case = Case(BATCHES["decode"])
    for metadata, message in (
        (replace(case.metadata, max_seq_len=10_000), "max_seq_len 10000"),
        (replace(case.metadata, seq_lens=case.metadata.seq_lens.long()), "int32"),
    ):
        with pytest.raises(ValueError, match=message):
            attention.paged_attention(case.q, case.k_cache, case.v_cache, metadata, case.scale)
    with pytest.raises(ValueError, match="multiple of 2 heads"):
        attention.paged_attention(case.q[:, :5], case.k_cache, case.v_cache, case.metadata, case.scale)
    with pytest.raises(ValueError, match="contiguous"):
        attention.paged_attention(case.q, case.k_cache.transpose(1, 2), case.v_cache, case.metadata, case.scale)
