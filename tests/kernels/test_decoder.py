"""The whole stack in one call: bit for bit what its backend's single operations give, in their order."""

import pytest
import torch
from torch.testing import assert_close

from pagedray.kernels import reference
from pagedray.kernels.reference import AttentionMetadata, DecoderLayer

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, BLOCK = 96, 160, 6, 2, 16, 4


def randn(*shape, dtype, seed):
    return (0.3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def step(query_lens, seq_lens):
    """Metadata and positions of a step; sequence b has blocks of its own."""
    width = -(-max(seq_lens) // BLOCK)
    tables = torch.arange(len(seq_lens) * width, dtype=torch.int32).flip(0).view(len(seq_lens), width).contiguous()
    positions = torch.cat([torch.arange(s - q, s) for q, s in zip(query_lens, seq_lens, strict=True)])
    rows = torch.repeat_interleave(torch.arange(len(seq_lens)), torch.tensor(query_lens))
    slots = tables[rows, positions // BLOCK].long() * BLOCK + positions % BLOCK
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0)], dtype=torch.int32)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    return positions, AttentionMetadata(starts, lengths, tables, slots, max(query_lens), max(seq_lens)), tables.numel()


def layer(operations, dtype, seed, bias):
    qkv = (HEADS + 2 * KV_HEADS) * HEAD_DIM

    def linear(n, k, s):
        return operations.pack_linear(
            randn(n, k, dtype=dtype, seed=seed + s), randn(n, dtype=dtype, seed=seed + s + 5) if bias else None
        )

    return DecoderLayer(
        randn(HIDDEN, dtype=dtype, seed=seed + 20) + 1,
        linear(qkv, HIDDEN, 1),
        linear(HIDDEN, HEADS * HEAD_DIM, 2),
        randn(HIDDEN, dtype=dtype, seed=seed + 21) + 1,
        linear(2 * INTERMEDIATE, HIDDEN, 3),
        linear(HIDDEN, INTERMEDIATE, 4),
    )


def run(operations, dtype, decoder, bias=False, query_lens=(1, 7, 1), seq_lens=(9, 7, 1), in_int8=False):
    positions, metadata, num_blocks = step(query_lens, seq_lens)
    angles = torch.randn(16, HEAD_DIM // 2, generator=torch.Generator().manual_seed(9))
    stack = operations.pack_decoder(
        [layer(operations, dtype, 100 * i, bias) for i in range(3)],
        randn(HIDDEN, dtype=dtype, seed=7) + 1,
        torch.cat([angles.cos(), angles.sin()], -1).contiguous(),
        HEADS,
        KV_HEADS,
        HEAD_DIM,
        1e-5,
    )
    caches = [
        tuple(randn(num_blocks, KV_HEADS, BLOCK, HEAD_DIM, dtype=dtype, seed=50 + 2 * i + j) for j in range(2))
        for i in range(3)
    ]
    if in_int8:
        caches = [tuple(reference.quantize_kv(cache) for cache in pair) for pair in caches]
    embeddings = randn(sum(query_lens), HIDDEN, dtype=dtype, seed=8)
    return decoder(stack, embeddings, positions, caches, metadata), caches


def by_single_operations(native, stack, embeddings, positions, kv_caches, metadata):
    residual = embeddings
    x = native.rms_norm(residual, stack.layers[0].input_norm, stack.eps)
    norms = [*(layer.input_norm for layer in stack.layers[1:]), stack.final_norm]
    for one, (k_cache, v_cache), norm in zip(stack.layers, kv_caches, norms, strict=True):
        qkv = native.linear(x, one.qkv).unflatten(-1, (HEADS + 2 * KV_HEADS, HEAD_DIM))
        q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        native.rotary_and_cache(q, k, v, positions, stack.cos_sin, metadata.slot_mapping, k_cache, v_cache)
        attended = native.paged_attention(q, k_cache, v_cache, metadata, HEAD_DIM**-0.5)
        x, residual = native.add_rms_norm(
            native.linear(attended.flatten(1), one.o), residual, one.post_attention_norm, stack.eps
        )
        x = native.linear(native.silu_and_mul(native.linear(x, one.gate_up)), one.down)
        x, residual = native.add_rms_norm(x, residual, norm, stack.eps)
    return x


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("in_int8", [False, True], ids=["plain KV", "KV in int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_its_parts_bit_for_bit(native, dtype, in_int8, bias, threads):
    whole, whole_caches = run(native, dtype, native.decoder, bias, in_int8=in_int8)
    parts, part_caches = run(native, dtype, lambda *args: by_single_operations(native, *args), bias, in_int8=in_int8)
    assert torch.equal(whole, parts)
    for a, b in zip(whole_caches, part_caches, strict=True):
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_oracle(native, bias):
    whole, caches = run(native, torch.float32, native.decoder, bias)
    oracle, oracle_caches = run(reference, torch.float32, reference.decoder, bias)
    assert_close(whole, oracle, rtol=1e-4, atol=1e-4)
    for a, b in zip(caches, oracle_caches, strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_refused(native):
    with pytest.raises(ValueError, match="max_seq_len 20 within cos_sin"):
        run(native, torch.float32, native.decoder, query_lens=(1,), seq_lens=(20,))
    with pytest.raises(ValueError, match="caches of one dtype"):
        _, half = run(native, torch.float32, native.decoder, in_int8=True)
        run(native, torch.float32, lambda s, e, p, caches, m: native.decoder(s, e, p, [half[0], *caches[1:]], m))
    with pytest.raises(ValueError, match="a pair of caches for each of 3 layers"):
        run(native, torch.float32, lambda s, e, p, caches, m: native.decoder(s, e, p, caches[:2], m))
