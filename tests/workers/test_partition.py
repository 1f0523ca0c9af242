"""Who holds what: everything exactly once, in an order that adds up, or a refusal that says what would work."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pagedray.scheduler.errors import ConfigError
from pagedray.workers.checkpoint.load import load_weights, open_checkpoint
from pagedray.workers.config import EngineConfig, ModelConfig
from pagedray.workers.partition import StageCosts, apportion, balance, check_degrees, partition, whole_model

SMOLLM2 = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    dtype="bfloat16",
)


def settings(tp=1, pp=1, **more):
    return EngineConfig("m", tensor_parallel_size=tp, pipeline_parallel_size=pp, **more)


def covered(ranges):
    """The ranges follow each other from 0 to the end."""
    ends = [0]
    for r in ranges:
        assert len(r) > 0 and r.start == ends[-1]
        ends.append(r.stop)
    return ends[-1] == ranges[0].total


def test_one_rank_holds_all():
    assert partition(SMOLLM2, settings()) == (whole_model(SMOLLM2),)
    assert whole_model(SMOLLM2).first_stage and whole_model(SMOLLM2).last_stage


def test_smollm2_over_two_and_three():
    two = partition(SMOLLM2, settings(tp=2))
    assert [(len(s.heads), len(s.kv_heads), len(s.intermediate), len(s.vocab)) for s in two] == [
        (6, 2, 768, 24576),
        (3, 1, 768, 24576),
    ]
    three = partition(SMOLLM2, settings(tp=3))
    assert [(len(s.heads), len(s.kv_heads), len(s.intermediate)) for s in three] == [(3, 1, 512)] * 3


def test_a_faster_rank_takes_more():
    fast, slow = partition(SMOLLM2, settings(tp=2, tensor_parallel_weights=[1, 2]))
    assert [len(fast.kv_heads), len(slow.kv_heads)] == [1, 2]
    assert [len(fast.intermediate), len(slow.intermediate)] == [512, 1024]
    assert [len(fast.vocab), len(slow.vocab)] == [16384, 32768]


def test_ranks_beyond_the_kv_heads_share_one():
    six = partition(SMOLLM2, settings(tp=6))
    assert [(s.kv_heads.start, s.heads.start, len(s.heads)) for s in six] == [
        (0, 0, 2),
        (0, 2, 1),
        (1, 3, 2),
        (1, 5, 1),
        (2, 6, 2),
        (2, 8, 1),
    ]


def test_quantization_groups_are_not_cut():
    for shard in partition(SMOLLM2, settings(tp=3), column_group=256):
        assert shard.intermediate.respects(256) and len(shard.intermediate) == 512
    # Two heads of 64 are no multiple of 256: such a slice of o has to be dequantized.
    assert not partition(SMOLLM2, settings(tp=2))[0].heads.scaled(64).respects(256)
    # Fewer groups than ranks: the kernels' own are cut along instead.
    narrow = replace(SMOLLM2, intermediate_size=256)
    assert all(s.intermediate.respects(32) for s in partition(narrow, settings(tp=3), column_group=256))


def test_an_odd_vocabulary():
    shards = partition(replace(SMOLLM2, vocab_size=32001), settings(tp=2))
    assert [s.vocab.stop for s in shards] == [16032, 32001]


@pytest.mark.parametrize(
    ("tp", "pp", "more", "message"),
    [
        (4, 1, {}, "tensor_parallel_size is 4, but 9 query heads in 3 groups .* 1, 2, 3, 6, 9 would work"),
        (1, 31, {}, "pipeline_parallel_size is 31, but the model has 30 layers; 1 to 30 would work"),
        (1, 2, {"pipeline_stage_layers": [15, 14]}, r"pipeline_stage_layers is \[15, 14\], 29 layers in all"),
    ],
)
def test_what_cannot_work_is_refused(tp, pp, more, message):
    with pytest.raises(ConfigError, match=message):
        check_degrees(SMOLLM2, settings(tp, pp, **more))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tensor_parallel_weights": [1]}, "tensor_parallel_weights has 1 entries; it takes one for each of 2"),
        ({"tensor_parallel_weights": [1, 0]}, "tensor_parallel_weights must be a list of positive numbers"),
        ({"tensor_parallel_weights": 2}, "must be a list of positive numbers, not 2"),
        ({"pipeline_stage_layers": [1.5, 2]}, "pipeline_stage_layers must be a list of positive integers"),
    ],
)
def test_bad_settings_are_refused(more, message):
    with pytest.raises(ConfigError, match=message):
        settings(tp=2, pp=2, **more)


@given(
    kv_heads=st.integers(1, 8),
    group=st.integers(1, 8),
    intermediate=st.integers(1, 2000),
    vocab=st.integers(1, 40000),
    layers=st.integers(1, 80),
    tp=st.integers(1, 16),
    pp=st.integers(1, 8),
    weights=st.none() | st.lists(st.floats(0.05, 20), min_size=16, max_size=16),
)
@hypothesis_settings(deadline=None)
def test_everything_is_held_once_or_refused(kv_heads, group, intermediate, vocab, layers, tp, pp, weights):
    model = replace(
        SMOLLM2,
        num_key_value_heads=kv_heads,
        num_attention_heads=kv_heads * group,
        intermediate_size=intermediate,
        vocab_size=vocab,
        num_hidden_layers=layers,
    )
    engine = settings(tp, pp, tensor_parallel_weights=weights and weights[:tp])
    try:
        shards = partition(model, engine)
    except ConfigError as error:
        assert "would work" in str(error)
        return
    assert [s.rank for s in shards] == list(range(tp * pp))
    assert covered([s.layers for s in shards[::tp]])
    for stage in (shards[i : i + tp] for i in range(0, len(shards), tp)):
        for name in ("heads", "intermediate", "vocab"):
            assert covered([getattr(s, name) for s in stage])
        for s in stage:
            # Each query head finds its key-value head on its own rank, where the kernels look for it.
            assert len(s.heads) % len(s.kv_heads) == 0
            ratio = len(s.heads) // len(s.kv_heads)
            for i in range(len(s.heads)):
                assert s.kv_heads.start + i // ratio == (s.heads.start + i) // group


@given(st.integers(1, 64), st.lists(st.floats(0.05, 20), min_size=1, max_size=16))
@hypothesis_settings(deadline=None)
def test_apportion_deals_out_all_and_more_to_the_heavier(units, weights):
    if units < len(weights):
        return
    shares = apportion(units, weights)
    assert sum(shares) == units and min(shares) >= 1
    for i, a in enumerate(weights):
        for j, b in enumerate(weights):
            assert shares[i] >= shares[j] - 1 or a <= b


@given(st.integers(1, 40), st.integers(1, 6), st.floats(0, 3), st.floats(0, 30))
@hypothesis_settings(deadline=None)
def test_stages_are_balanced_by_time(layers, stages, embedding, head):
    if stages > layers:
        return
    counts = balance(layers, stages, StageCosts(1.0, embedding, head))
    assert sum(counts) == layers and min(counts) >= 1

    def slowest(counts):
        times = [float(c) for c in counts]
        times[0] += embedding
        times[-1] += head
        return max(times)

    # No layer can be moved to make the slowest stage faster.
    for i in range(stages):
        for j in range(stages):
            moved = list(counts)
            moved[i] -= 1
            moved[j] += 1
            assert min(moved) < 1 or slowest(moved) >= slowest(counts) - 1e-9


def test_a_heavy_head_takes_layers_from_its_stage():
    assert balance(30, 2, StageCosts(1, 0, 4)) == [17, 13]
    assert balance(5, 2, StageCosts(1, 0, 0)) == [3, 2]


class Counting:
    """A checkpoint that notes how much of each tensor is read."""

    def __init__(self, checkpoint):
        self.checkpoint, self.config = checkpoint, checkpoint.config
        self.names, self.shape, self.num_bytes = checkpoint.names, checkpoint.shape, checkpoint.num_bytes
        self.read_values = {}

    def read(self, name, *where):
        values = self.checkpoint.read(name, *where)
        self.read_values[name] = self.read_values.get(name, 0) + values.numel()
        return values


@pytest.mark.parametrize("tie", [True, False])
def test_a_rank_reads_its_slices_and_no_more(tie, tiny_llama, tmp_path):
    tiny_llama(num_hidden_layers=3, attention_bias=True, mlp_bias=True, tie_word_embeddings=tie).save_pretrained(
        tmp_path
    )
    checkpoint = open_checkpoint(str(tmp_path))
    whole = load_weights(checkpoint, torch.float32)
    shards = partition(checkpoint.config, settings(tp=2, pp=2))
    dim = checkpoint.config.head_dim
    heads, kv_heads = checkpoint.config.num_attention_heads * dim, checkpoint.config.num_key_value_heads * dim
    read = {}
    for shard in shards:
        counting = Counting(checkpoint)
        weights = load_weights(counting, torch.float32, shard=shard)
        for name, values in counting.read_values.items():
            read[name] = read.get(name, 0) + values
        q, kv, inner = shard.heads.scaled(dim).slice, shard.kv_heads.scaled(dim).slice, shard.intermediate.slice
        assert len(weights.layers) == len(shard.layers)
        for ours, full in zip(weights.layers, whole.layers[shard.layers.slice], strict=True):
            parts = full.qkv.weight.split([heads, kv_heads, kv_heads])
            assert torch.equal(ours.qkv.weight, torch.cat([p[s] for p, s in zip(parts, (q, kv, kv), strict=True)]))
            assert torch.equal(ours.o.weight, full.o.weight[:, q])
            assert torch.equal(ours.down.weight, full.down.weight[:, inner])
            gate, up = full.gate_up.weight.chunk(2)
            assert torch.equal(ours.gate_up.weight, torch.cat([gate[inner], up[inner]]))
            # Parts are added up over the ranks: the bias belongs to one of them.
            assert (ours.o.bias is None) == (ours.down.bias is None) == (shard.tp_rank != 0)
        if shard.first_stage:
            assert torch.equal(weights.embed_tokens, whole.embed_tokens[shard.vocab.slice])
        if shard.last_stage:
            assert torch.equal(weights.lm_head, whole.lm_head[shard.vocab.slice])
    for name, values in read.items():
        size = torch.Size(checkpoint.shape(name)).numel()
        both_stages = tie and name == "model.embed_tokens.weight"
        every_rank = name.endswith("norm.weight")  # a vector that each rank of the stage needs whole
        assert values == size * (2 if both_stages or every_rank else 1), name
