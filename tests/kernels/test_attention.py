"""Paged attention: native against the oracle, the oracle against PyTorch's own, and each row against its company."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from pagedray.kernels import reference
from pagedray.kernels.ops import AttentionMetadata

DTYPES = {torch.float32: dict(rtol=1e-5, atol=2e-6), torch.bfloat16: dict(rtol=1e-2, atol=4e-3)}

# (query_len, seq_len) of each sequence
BATCHES = {
    "one token": [(1, 1)],
    "decode": [(1, 17), (1, 64), (1, 1), (1, 129)],
    "prefill": [(33, 33)],
    "chunked prefill": [(16, 100), (7, 7)],
    "mixed": [(1, 65), (40, 40), (1, 300), (20, 270), (3, 5)],
    "idle sequence": [(1, 9), (0, 12), (2, 5)],
    "empty": [],
}


class Case:
    """A step over sequences of random keys and values, in blocks handed out at random."""

    def __init__(self, batch, num_heads=6, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape):
            return torch.randn(*shape, generator=generator).to(dtype)

        self.scale = head_dim**-0.5
        self.batch = batch
        self.keys = [randn(seq_len, num_kv_heads, head_dim) for _, seq_len in batch]
        self.values = [randn(seq_len, num_kv_heads, head_dim) for _, seq_len in batch]
        self.fused = randn(sum(q for q, _ in batch), (num_heads + 2 * num_kv_heads) * head_dim)
        self.q = self.fused.view(-1, num_heads + 2 * num_kv_heads, head_dim)[:, :num_heads]

        needed = [-(-seq_len // block_size) for _, seq_len in batch]
        block_ids = torch.randperm(sum(needed) + 3, generator=generator).split([*needed, 3])
        # Nothing may be read beyond a sequence's length: NaN there, and block ids that are none.
        shape = (sum(needed) + 3, num_kv_heads, block_size, head_dim)
        self.k_cache, self.v_cache = (torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
        tables = torch.full((len(batch), max(needed, default=0) + 2), 2**30, dtype=torch.int32)
        for b, (_, seq_len) in enumerate(batch):
            tables[b, : needed[b]] = block_ids[b]
            positions = torch.arange(seq_len)
            at = (block_ids[b][positions // block_size], slice(None), positions % block_size)
            self.k_cache[at], self.v_cache[at] = self.keys[b], self.values[b]
        query_lens = torch.tensor([0, *(q for q, _ in batch)])
        self.metadata = AttentionMetadata(
            query_start_loc=query_lens.cumsum(0).int(),
            seq_lens=torch.tensor([s for _, s in batch], dtype=torch.int32),
            block_tables=tables,
            slot_mapping=torch.zeros(len(self.q), dtype=torch.int64),
            max_query_len=int(query_lens.max()),
            max_seq_len=max((s for _, s in batch), default=0),
        )

    def in_int8(self):
        """The same with caches in int8."""
        self.k_cache, self.v_cache = reference.quantize_kv(self.k_cache), reference.quantize_kv(self.v_cache)
        return self

    def share(self, a, b, tokens):
        """Sequence b reads its first whole blocks of `tokens` from where sequence a has them."""
        blocks = min(tokens, self.batch[a][1], self.batch[b][1]) // self.k_cache.shape[2]
        self.metadata.block_tables[b, :blocks] = self.metadata.block_tables[a, :blocks]

    def run(self, backend):
        return backend.paged_attention(self.q, self.k_cache, self.v_cache, self.metadata, self.scale)

    def alone(self, b, first=0, last=None):
        """Queries first .. last of sequence b by themselves, over the same caches; and which rows they are."""
        start, end = self.metadata.query_start_loc[b : b + 2].tolist()
        seq_len = self.batch[b][1] - (0 if last is None else end - start - last)
        start, end = start + first, end if last is None else start + last
        case = object.__new__(Case)
        case.q, case.k_cache, case.v_cache, case.scale = self.q[start:end], self.k_cache, self.v_cache, self.scale
        case.metadata = replace(
            self.metadata,
            query_start_loc=torch.tensor([0, end - start], dtype=torch.int32),
            seq_lens=torch.tensor([seq_len], dtype=torch.int32),
            block_tables=self.metadata.block_tables[b : b + 1],
        )
        return case, slice(start, end)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


one_or_two_threads = pytest.mark.parametrize("threads", [1, 2], indirect=True)


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_oracle_is_torchs_attention(batch):
    case = Case(batch)
    ours = case.run(reference)
    for b, (query_len, seq_len) in enumerate(batch):
        _, rows = case.alone(b)
        mask = torch.ones(query_len, seq_len, dtype=torch.bool).tril(seq_len - query_len)
        k, v = (t[b].transpose(0, 1).repeat_interleave(3, dim=0) for t in (case.keys, case.values))
        expected = F.scaled_dot_product_attention(case.q[rows].transpose(0, 1), k, v, attn_mask=mask)
        assert_close(ours[rows], expected.transpose(0, 1))


@one_or_two_threads
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_batches(native, dtype, threads, batch):
    case = Case(batch, dtype=dtype)
    assert_close(case.run(native), case.run(reference), **DTYPES[dtype])


@one_or_two_threads
@pytest.mark.parametrize("batch", [*BATCHES.values(), [(1, 3000), (2, 1030)]], ids=[*BATCHES, "long context"])
def test_int8_caches(native, dtype, threads, batch):
    case = Case(batch, dtype=dtype).in_int8()
    ours = case.run(native)
    assert_close(ours, case.run(reference), **DTYPES[dtype])
    assert_close(ours, Case(batch, dtype=dtype).run(reference), rtol=0.02, atol=0.02)
    for b, (query_len, _) in enumerate(batch):
        if query_len:
            alone, rows = case.alone(b)
            assert torch.equal(alone.run(native), ours[rows])


def test_int8_caches_that_sequences_share(native, dtype):
    case = Case([(1, 900), (1, 850), (1, 800)], dtype=dtype).in_int8()
    case.share(0, 1, 768)
    case.share(0, 2, 768)
    assert_close(case.run(native), case.run(reference), **DTYPES[dtype])


@pytest.mark.parametrize("head_dim", [4, 20, 64, 96])
def test_heads_in_int8(native, dtype, head_dim):
    case = Case([(1, 70), (19, 90)], 6, 3, head_dim, dtype=dtype).in_int8()
    assert_close(case.run(native), case.run(reference), **DTYPES[dtype])


@pytest.mark.parametrize("head_dim", [4, 16, 20, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("num_heads, num_kv_heads", [(1, 1), (9, 3), (7, 1), (16, 1), (64, 1)])
def test_heads(native, dtype, head_dim, num_heads, num_kv_heads):
    case = Case([(1, 70), (19, 90)], num_heads, num_kv_heads, head_dim, dtype=dtype)
    assert_close(case.run(native), case.run(reference), **DTYPES[dtype])


@pytest.mark.parametrize("block_size", [1, 8, 16, 24, 64])
def test_block_size_changes_nothing(native, dtype, block_size):
    case, other = (Case(BATCHES["mixed"], block_size=size, dtype=dtype) for size in (block_size, 16))
    assert torch.equal(case.q, other.q) and torch.equal(case.keys[2], other.keys[2])
    assert_close(case.run(native), case.run(reference), **DTYPES[dtype])
    assert torch.equal(case.run(native), other.run(native))


@one_or_two_threads
def test_long_context(native, dtype, threads):
    case = Case([(1, 3000), (2, 1030)], num_heads=3, num_kv_heads=1, dtype=dtype)
    assert_close(case.run(native), case.run(reference), **DTYPES[dtype])


@one_or_two_threads
@pytest.mark.parametrize("seq_len", [15, 16, 17, 31, 32, 33, 63, 65, 255, 256, 257, 288, 511, 512, 513, 769])
def test_lengths_around_the_borders_of_vectors_and_segments(native, dtype, threads, seq_len):
    case = Case([(1, seq_len), (min(seq_len, 40), seq_len)], dtype=dtype)
    assert_close(case.run(native), case.run(reference), **DTYPES[dtype])


@one_or_two_threads
@pytest.mark.parametrize("group", [1, 3, 16])
def test_a_shared_prefix(native, dtype, threads, group):
    """Prefixes of several lengths, of decoding and prefilling sequences, and a block that only one segment shares."""
    batch = [(1, 1100), (1, 1030), (1, 1100), (3, 700), (1, 300), (90, 600), (1, 530)]
    case = Case(batch, 2 * group, 2, dtype=dtype)
    for a, b, tokens in ((0, 1, 1024), (0, 2, 1024), (0, 3, 512), (0, 4, 256), (0, 5, 512), (5, 6, 512)):
        case.share(a, b, tokens)
    case.metadata.block_tables[1, 20] = case.metadata.block_tables[6, 20]
    together = case.run(native)
    assert_close(together, case.run(reference), **DTYPES[dtype])
    for b in range(len(batch)):
        alone, rows = case.alone(b)
        assert torch.equal(alone.run(native), together[rows])


sequences = st.tuples(st.integers(1, 5) | st.integers(1, 60), st.integers(0, 40) | st.integers(200, 800))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch=st.lists(sequences, min_size=1, max_size=6),
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3), (12, 1), (16, 1)]),
    head_dim=st.sampled_from([16, 64, 80]),
    block_size=st.sampled_from([8, 16, 24, 64]),
    threads=st.integers(1, 3),
    data=st.data(),
)
def test_the_same_bits_in_any_company_chunk_and_number_of_threads(
    native, dtype, batch, heads, head_dim, block_size, threads, data
):
    batch = [(queries, queries + history) for queries, history in batch]
    case = Case(batch, *heads, head_dim, block_size, dtype)
    for b in range(1, len(batch)):
        history = batch[b][1] - batch[b][0]  # what the step itself writes is never shared
        other = data.draw(st.integers(0, b - 1), label="shares with")
        shared = min(history, batch[other][1] - batch[other][0])
        case.share(other, b, data.draw(st.sampled_from([0, shared]), label="tokens"))
    torch.set_num_threads(threads)
    together = case.run(native)
    assert_close(together, case.run(reference), **DTYPES[dtype])
    torch.set_num_threads(data.draw(st.integers(1, 3), label="threads alone"))
    for b, (queries, _) in enumerate(batch):
        first = data.draw(st.integers(0, queries - 1), label="first")
        last = data.draw(st.integers(first + 1, queries), label="last")
        alone, rows = case.alone(b, first, last)
        assert torch.equal(alone.run(native), together[rows])


def test_large_scores(native):
    case = Case(BATCHES["mixed"])
    case.scale = 30.0
    # Scores of a thousand: half an ulp of one is 3e-5 of its weight, in the oracle as well.
    assert_close(case.run(native), case.run(reference), rtol=3e-4, atol=3e-4)


@pytest.mark.parametrize("threads", [2], indirect=True)
@pytest.mark.parametrize("batch", ["mixed", "decode", "long"])
def test_a_row_is_the_same_in_any_company(native, dtype, batch, threads):
    """Alone (when the context is split over threads) or in a batch (when it is not): the same bits."""
    case = Case(BATCHES.get(batch, [(1, 900)] + [(1, 300)] * 12), dtype=dtype)
    together = case.run(native)
    for b in range(len(case.batch)):
        alone, rows = case.alone(b)
        assert torch.equal(alone.run(native), together[rows])


def test_a_row_is_the_same_in_any_chunk_of_the_prefill(native, dtype):
    case = Case([(150, 300)], dtype=dtype)
    whole = case.run(native)
    for chunk in (16, 37, 1):
        for start in range(0, 150, chunk):
            end = min(start + chunk, 150)
            metadata = replace(
                case.metadata,
                query_start_loc=torch.tensor([0, end - start], dtype=torch.int32),
                seq_lens=torch.tensor([150 + end], dtype=torch.int32),
            )
            part = native.paged_attention(case.q[start:end], case.k_cache, case.v_cache, metadata, case.scale)
            assert torch.equal(part, whole[start:end]), f"rows {start}..{end} of a chunk of {chunk}"


def test_threads_change_nothing(native, dtype):
    case = Case([(1, 2000), (30, 500)], dtype=dtype)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(case.run(native))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_bad_arguments_are_refused(native):
    case = Case(BATCHES["decode"])
    for wrong, message in (
        (replace(case.metadata, max_seq_len=10_000), "max_seq_len 10000"),
        (replace(case.metadata, seq_lens=case.metadata.seq_lens.long()), "int32"),
    ):
        with pytest.raises(ValueError, match=message):
            native.paged_attention(case.q, case.k_cache, case.v_cache, wrong, case.scale)
    with pytest.raises(ValueError, match="multiple of 2 heads"):
        native.paged_attention(case.q[:, :5], case.k_cache, case.v_cache, case.metadata, case.scale)
    int8 = reference.quantize_kv(case.k_cache)
    for k_cache, v_cache in ((case.k_cache.bfloat16(),) * 2, (int8[..., :-4].contiguous(),) * 2, (int8, case.v_cache)):
        with pytest.raises(ValueError, match=r"paged_attention: caches .* of torch.float32 or int8"):
            native.paged_attention(case.q, k_cache, v_cache, case.metadata, case.scale)
        with pytest.raises(ValueError, match=r"rotary_and_cache: caches .* of torch.float32 or int8"):
            slots = case.metadata.slot_mapping
            k = case.fused.view(len(case.q), -1, 64)[:, 6:8]
            native.rotary_and_cache(case.q, k, k, slots, torch.zeros(1, 64), slots, k_cache, v_cache)
    with pytest.raises(ValueError, match="contiguous"):
        native.paged_attention(case.q, case.k_cache.transpose(1, 2), case.v_cache, case.metadata, case.scale)
