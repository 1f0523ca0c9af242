"""KV blocks between ranks: whatever the splits, what one packs the other unpacks; what is wrong is refused."""

import itertools
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedray.scheduler.errors import KVTransferError
from pagedray.workers import kv_cache, kv_transfer
from pagedray.workers.config import EngineConfig, ModelConfig
from pagedray.workers.kv_transfer import KVPort, fingerprint
from pagedray.workers.partition import partition

BLOCK_SIZE = 4
MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=5,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=8,
    rms_norm_eps=1e-5,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    dtype="float32",
)
SPLITS = [(1, 1), (2, 1), (3, 1), (6, 1), (1, 2), (1, 5), (2, 2), (3, 3)]


def ports(split, dtype, num_blocks=9, model=MODEL):
    """A group's ranks, with KV that is all zeros."""
    config = EngineConfig("m", tensor_parallel_size=split[0], pipeline_parallel_size=split[1], block_size=BLOCK_SIZE)
    return [
        KVPort(
            kv_cache.allocate(model, num_blocks, BLOCK_SIZE, dtype, shard),
            fingerprint(config, model, dtype, "w"),
            model,
            shard,
        )
        for shard in partition(model, config)
    ]


def whole(rank_ports, block_ids):
    """[layers, 2, blocks, heads, block_size, row] of a group's blocks, put together from its ranks."""
    first = rank_ports[0].caches[0][0]
    found = torch.zeros(5, 2, len(block_ids), 3, BLOCK_SIZE, first.shape[-1], dtype=first.dtype)
    for port in rank_ports:
        for layer, pair in zip(range(port.shard.layers.start, port.shard.layers.stop), port.caches, strict=True):
            for i, cache in enumerate(pair):
                found[layer, i, :, port.shard.kv_heads.slice] = cache[block_ids]
    return found


def fill(rank_ports, seed):
    """Random KV, the same on ranks that share a head."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks, _, _, row_size = rank_ports[0].caches[0][0].shape
    kv = (40 * torch.randn(5, 2, num_blocks, 3, BLOCK_SIZE, row_size, generator=generator)).clamp(-127, 127)
    for port in rank_ports:
        for layer, pair in zip(range(port.shard.layers.start, port.shard.layers.stop), port.caches, strict=True):
            for i, cache in enumerate(pair):
                cache.copy_(kv[layer, i, :, port.shard.kv_heads.slice])


def read_only(packed):
    piece, data = packed
    data = np.frombuffer(data.tobytes(), np.uint8)  # as it comes out of an object store
    assert not data.flags.writeable
    return piece, data


@settings(max_examples=60, deadline=None)
@given(
    source=st.sampled_from(SPLITS),
    target=st.sampled_from(SPLITS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
    blocks=st.permutations(range(9)).flatmap(lambda p: st.integers(1, 9).map(lambda n: p[:n])),
    places=st.permutations(range(9)),
    data=st.data(),
)
def test_what_any_split_packs_any_other_unpacks(source, target, dtype, blocks, places, data):
    first = data.draw(st.integers(0, len(blocks) - 1))
    count = data.draw(st.integers(1, len(blocks) - first))
    givers, takers = ports(source, dtype), ports(target, dtype)
    fill(givers, seed=1)
    fill(takers, seed=2)
    pieces = data.draw(st.permutations([read_only(port.pack(blocks)) for port in givers]))
    before = whole(takers, list(range(9)))
    for taker in takers:
        needed = [packed for packed in pieces if packed[0].overlaps(taker.shard)]
        taker.unpack(needed, first, places[:count])
    after = whole(takers, list(range(9)))
    assert torch.equal(after[:, :, places[:count]], whole(givers, blocks[first : first + count]))
    assert torch.equal(after[:, :, places[count:]], before[:, :, places[count:]])  # and nothing else was touched


class LateCopies:
    """A GPU's copies on a CPU: what comes to the host is there when the context has ended, and not before."""

    def __init__(self):
        self.under_way = False
        self.moved = 0

    @contextmanager
    def __call__(self):
        self.under_way = True
        yield
        self.under_way = False

    def host_bytes(self, num_bytes):
        return torch.empty(num_bytes, dtype=torch.uint8)

    def to_device(self, values):
        assert self.under_way
        self.moved += 1
        return values.clone()


def test_a_gpus_copies_have_ended_before_their_bytes_are_read(monkeypatch):
    (giver,), (taker,) = ports((1, 1), torch.bfloat16), ports((1, 1), torch.bfloat16)
    fill([giver], seed=1)
    expected = giver.pack([7, 2, 5])
    late = LateCopies()
    giver, taker = (KVPort(port.caches, port.fingerprint, MODEL, copies=late) for port in (giver, taker))
    crc = kv_transfer._crc
    with monkeypatch.context() as patch:
        patch.setattr(kv_transfer, "_crc", lambda unit: 0 if late.under_way else crc(unit))
        piece, data = giver.pack([7, 2, 5])
    assert (piece, data.tobytes()) == (expected[0], expected[1].tobytes())
    taker.unpack([read_only((piece, data))], 1, [0, 8])
    assert torch.equal(whole([taker], [0, 8]), whole([giver], [2, 5])) and late.moved == 5


def test_damage_anywhere_is_noticed():
    (giver,), takers = ports((1, 1), torch.float32), ports((3, 2), torch.float32)
    fill([giver], seed=1)
    piece, data = giver.pack([1, 2, 3])
    for at in range(0, data.size, data.size // 40):
        spoiled = data.copy()
        spoiled[at] ^= 1
        refused = 0
        for taker in takers:
            try:
                taker.unpack([(piece, spoiled)], 0, [4, 5, 6])
            except KVTransferError as error:
                assert "damaged" in str(error)
                refused += 1
        assert refused == 1  # the one rank that needed it


def test_what_does_not_fit_is_refused():
    givers, (taker,) = ports((3, 2), torch.float32), ports((1, 1), torch.float32)
    fill(givers, seed=1)
    pieces = [port.pack([0, 1]) for port in givers]
    for missing in range(len(pieces)):
        with pytest.raises(KVTransferError, match="in none of the 5 pieces"):
            taker.unpack(pieces[:missing] + pieces[missing + 1 :], 0, [0, 1])
    piece, data = pieces[0]
    for wrong, why in (
        ((replace(piece, fingerprint="other"), data), "another model"),
        ((replace(piece, dtype="torch.bfloat16"), data), "another model"),
        ((replace(piece, block_size=8), data), "another model"),
        ((replace(piece, num_blocks=3), data), "must have"),
        ((piece, data[:-1]), "must have"),
        ((replace(piece, checksums=piece.checksums[:-4]), data), "must have"),
    ):
        with pytest.raises(KVTransferError, match=why):
            taker.unpack([wrong, *pieces[1:]], 0, [0, 1])
    with pytest.raises(KVTransferError, match="blocks 1 to 3 of a run of 2"):
        taker.unpack(pieces, 1, [0, 1])


def test_blocks_of_another_model_dtype_or_file_have_another_fingerprint():
    config = EngineConfig("m", block_size=BLOCK_SIZE)
    seen = [
        fingerprint(config, MODEL, torch.float32, "w"),
        fingerprint(config, MODEL, torch.bfloat16, "w"),
        fingerprint(config, MODEL, torch.float32, "trained further"),
        fingerprint(config, replace(MODEL, rms_norm_eps=1e-6), torch.float32, "w"),
        fingerprint(replace(config, model="n"), MODEL, torch.float32, "w"),
        fingerprint(replace(config, quantization="int8"), MODEL, torch.float32, "w"),
        fingerprint(replace(config, kv_cache_dtype="int8"), MODEL, torch.float32, "w"),
    ]
    assert all(a != b for a, b in itertools.combinations(seen, 2))
    split = replace(config, tensor_parallel_size=2, max_model_len=32, cpu_threads=1)
    assert fingerprint(split, MODEL, torch.float32, "w") == seen[0]
