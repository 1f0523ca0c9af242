"""How large the KV pool is and where its memory comes from; the settings that decide it."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pagedray.scheduler.errors import ConfigError
from pagedray.workers import kv_cache
from pagedray.workers.config import EngineConfig, ModelConfig, RopeConfig, parse_bytes
from pagedray.workers.partition import partition

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    max_position_embeddings=1000,
    tie_word_embeddings=True,
    dtype="float32",
)
BLOCK = 3 * 2 * 2 * 8 * 4 * 16  # layers, K and V, heads, dimensions, bytes, tokens


def plan(dtype=torch.float32, **settings):
    return kv_cache.plan_capacity(MODEL, EngineConfig.from_kwargs(model="m", **settings), dtype)


@pytest.fixture
def available(monkeypatch):
    """Say how much memory the machine has."""
    return lambda size: monkeypatch.setattr(kv_cache, "available_memory", lambda: size)


# -- plan_capacity ----------------------------------------------------------------------------------------------------


def test_bytes_per_token():
    assert kv_cache.bytes_per_token(MODEL, torch.float32) * 16 == BLOCK
    assert kv_cache.bytes_per_token(MODEL, torch.bfloat16) * 32 == BLOCK
    assert kv_cache.bytes_per_token(MODEL, torch.int8) == 3 * 2 * 2 * (8 + 4)  # codes, and their scale in fp32


def test_without_settings_it_takes_a_quarter_of_what_is_free(available):
    available(BLOCK * 4 * 100 + 3)
    assert plan() == (100, 1000)


def test_without_settings_it_takes_no_more_than_can_be_of_use(available):
    available(2**50)
    assert plan(max_num_seqs=3) == (3 * 63, 1000)  # 63 blocks hold 1,000 tokens
    assert plan(max_num_seqs=3, max_model_len=160) == (30, 160)
    assert plan(max_num_seqs=3, max_model_len=160, block_size=1) == (480, 160)


def plans_of_ranks(tp, pp, on_host=1, **settings):
    engine = EngineConfig.from_kwargs(model="m", tensor_parallel_size=tp, pipeline_parallel_size=pp, **settings)
    shards = partition(MODEL, engine)
    orders = [[shard, *(s for s in shards if s is not shard)] for shard in shards]
    return [kv_cache.plan_capacity(MODEL, engine, torch.float32, order, on_host) for order in orders]


def test_a_groups_memory_is_dealt_out_by_what_its_ranks_hold():
    # Stages of 2 layers and 1, a KV head a rank: every rank comes to the same number of blocks.
    assert plans_of_ranks(2, 2, kv_cache_memory=BLOCK * 7, pipeline_stage_layers=[2, 1]) == [(7, 112)] * 4
    # Four ranks over two KV heads hold each of them twice.
    assert plans_of_ranks(4, 1, kv_cache_memory=BLOCK * 8) == [(4, 64)] * 4


def test_ranks_of_a_host_share_what_is_free(available):
    available(BLOCK * 4 * 30)
    assert plans_of_ranks(2, 1, on_host=2) == [(30, 480)] * 2
    assert plans_of_ranks(1, 2, on_host=2, pipeline_stage_layers=[1, 2]) == [(45, 720), (22, 352)]


def test_a_context_that_was_not_asked_for_shrinks_to_the_pool(available, caplog):
    available(BLOCK * 4 * 5)
    assert plan() == (5, 80)
    assert "80" in caplog.text and "1000" in caplog.text
    assert plan(num_kv_blocks=7, block_size=4) == (7, 28)
    assert plan(kv_cache_memory=BLOCK * 3 - 1) == (2, 32)


def test_explicit_sizes_are_taken_as_they_are():
    assert plan(num_kv_blocks=5000) == (5000, 1000)
    assert plan(num_kv_blocks=63, max_model_len=1000) == (63, 1000)
    assert plan(kv_cache_memory=BLOCK * 70) == (70, 1000)
    assert plan(torch.bfloat16, kv_cache_memory=BLOCK * 70) == (140, 1000)
    assert plan(kv_cache_memory=f"{BLOCK * 64 / 1024}KiB") == (64, 1000)
    assert plan(kv_cache_memory=BLOCK * 10, max_model_len=160) == (10, 160)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_model_len": 1001}, ["max_model_len", "1001", "at most 1000"]),
        ({"max_model_len": 161, "num_kv_blocks": 10}, ["max_model_len", "161", "160", "10 blocks of 16"]),
        ({"max_model_len": 161, "kv_cache_memory": BLOCK * 11 - 1}, ["max_model_len", "161", "160", "kv_cache_memory"]),
        ({"num_kv_blocks": 10, "kv_cache_memory": BLOCK}, ["num_kv_blocks and kv_cache_memory", "one"]),
        ({"kv_cache_memory": BLOCK - 1}, ["kv_cache_memory", "16 tokens", f"{BLOCK} bytes"]),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_or_the_model_are_refused(settings, words):
    with pytest.raises(ConfigError) as caught:
        plan(**settings)
    assert all(word in caught.value.message for word in words), caught.value.message


@pytest.mark.parametrize(
    ("kind", "original", "usual", "longest"),
    [
        ("default", None, 1000, 1000),
        ("llama3", 250, 1000, 1000),
        ("yarn", 1000, 4000, 4000),  # as in the settings that Qwen's makers recommend
        ("yarn", 250, 1000, 1000),  # the configuration has the stretched length already
        ("linear", 1000, 1000, 4000),
        ("dynamic", 1000, 1000, 4000),
    ],
)
def test_the_context_of_stretched_positions(kind, original, usual, longest):
    rope = RopeConfig(type=kind, factor=4.0, original_max_position_embeddings=original)
    model = replace(MODEL, rope=rope)
    assert EngineConfig.from_kwargs(model="m").context_length(model) == usual
    assert EngineConfig.from_kwargs(model="m", max_model_len=longest).context_length(model) == longest
    with pytest.raises(ConfigError, match=f"made for at most {longest}"):
        EngineConfig.from_kwargs(model="m", max_model_len=longest + 1).context_length(model)


def test_an_explicit_context_over_what_the_machine_has_is_refused(available):
    available(BLOCK * 4 * 10)
    assert plan(max_model_len=160) == (10, 160)
    with pytest.raises(ConfigError, match="max_model_len is 161 tokens but the KV pool holds 160"):
        plan(max_model_len=161)


def test_a_machine_without_memory_for_a_block_is_refused(available):
    available(BLOCK * 4 - 4)
    with pytest.raises(ConfigError, match="no block"):
        plan()


# -- allocate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_caches_are_separate_zeroed_and_of_the_documented_shape(dtype):
    caches = kv_cache.allocate(MODEL, 5, 4, dtype)
    assert len(caches) == MODEL.num_hidden_layers
    tensors = [tensor for pair in caches for tensor in pair]
    for tensor in tensors:
        assert tensor.shape == (5, 2, 4, 8) and tensor.dtype == dtype and tensor.is_contiguous()
        assert not tensor.any()
        tensor.fill_(1)  # were two of them the same memory, the next would not be zero
    assert sum(t.numel() * t.itemsize for t in tensors) == kv_cache.bytes_per_token(MODEL, dtype) * 5 * 4


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_memory_is_taken_only_as_it_is_written():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    num_blocks = 2**30 // BLOCK
    before = resident()
    caches = kv_cache.allocate(MODEL, num_blocks, 16, torch.float32)
    assert resident() - before < 2**25, "a pool of 1 GiB was written at once"
    k_cache, _ = caches[-1]
    k_cache[: num_blocks // 4] = 1.0
    assert 2**25 < resident() - before < 2**27  # a quarter of a sixth of 1 GiB: 43 MiB
    assert not k_cache[-1].any()


# -- EngineConfig.from_kwargs -----------------------------------------------------------------------------------------


def test_aliases_of_settings():
    config = EngineConfig.from_kwargs(
        model="m",
        max_batch_size=8,
        max_seq_length=256,
        kv_cache_memory="1GiB",
        dtype="bf16",
        max_num_batched_tokens=None,
    )
    assert (config.max_num_seqs, config.max_model_len, config.kv_cache_memory) == (8, 256, 2**30)
    assert (config.dtype, config.max_num_batched_tokens) == ("bfloat16", EngineConfig("m").max_num_batched_tokens)
    assert EngineConfig.from_kwargs(model="m", kv_cache_memory_bytes=4096).kv_cache_memory == 4096
    assert EngineConfig.from_kwargs(model="m", num_gpu_blocks_override=12).num_kv_blocks == 12
    assert EngineConfig.from_kwargs(model="m", quantization="gguf") == EngineConfig("m")
    assert EngineConfig.from_kwargs(model="m", kv_cache_dtype="fp8_e4m3") == EngineConfig("m", kv_cache_dtype="fp8")
    assert EngineConfig.from_kwargs(model="m") == EngineConfig("m")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("1GiB", 2**30),
        ("1gib", 2**30),
        ("1 GB", 10**9),
        ("1G", 10**9),
        ("1.5Gi", 3 * 2**29),
        (" 512MiB ", 2**29),
        ("2kb", 2000),
        ("100B", 100),
    ],
)
def test_sizes(text, size):
    assert parse_bytes("key", text) == size


@pytest.mark.parametrize(
    "size", [0, -1, "0", "0GiB", "-1GiB", "1TiBs", "GiB", "", "1ib", "1e9", True, "0.4", "nan", []]
)
def test_sizes_that_are_none_are_refused(size):
    with pytest.raises(ConfigError, match="there.kv_cache_memory must be a size such as") as caught:
        EngineConfig.from_kwargs("there", model="m", kv_cache_memory=size)
    assert repr(size) in caught.value.message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cpu_offload_gb": 4}, "there.cpu_offload_gb must be 0 or left out .weights are not offloaded., not 4"),
        ({"max_num_sequences": 4}, "there.max_num_sequences is not a setting.*max_num_seqs"),
        ({"max_batch_sizes": 4}, "there.max_batch_sizes is not a setting.*max_batch_size"),
        ({"max_batch_size": 4, "max_num_seqs": 4}, "there.max_num_seqs says max_num_seqs a second time"),
        ({"max_num_seqs": 0}, "there.max_num_seqs must be an integer of at least 1, not 0"),
        ({"max_batch_size": 0}, "max_num_seqs must be an integer of at least 1, not 0"),
        ({"max_num_seqs": "4"}, "there.max_num_seqs must be an integer of at least 1, not '4'"),
        ({"block_size": 2.0}, "there.block_size must be an integer of at least 1, not 2.0"),
        ({"block_size": True}, "there.block_size must be an integer of at least 1, not True"),
        ({"max_model_len": 0}, "there.max_model_len must be an integer of at least 1, not 0"),
        ({"num_kv_blocks": -1}, "there.num_kv_blocks must be an integer of at least 1, not -1"),
        ({"cpu_threads": 0}, "there.cpu_threads must be an integer of at least 1, not 0"),
        ({"dtype": "float16"}, "there.dtype must be one of auto, bfloat16, float32, not 'float16'"),
        ({"dtype": ["float32"]}, "there.dtype must be one of auto, bfloat16, float32"),
        ({"dtype": torch.float32}, "there.dtype must be one of auto, bfloat16, float32"),
        ({"quantization": "awq"}, "there.quantization must be one of auto, none, int8, fp8, not 'awq'"),
        ({"quantization": ["int8"]}, "there.quantization must be one of auto, none, int8"),
        ({"kv_cache_dtype": "int4"}, "there.kv_cache_dtype must be one of auto, int8, fp8, not 'int4'"),
        ({"kv_cache_dtype": ["fp8"]}, "there.kv_cache_dtype must be one of auto, int8, fp8"),
        ({"enable_prefix_caching": "no"}, "there.enable_prefix_caching must be true or false, not 'no'"),
        ({"seed": 1.5}, "there.seed must be an integer, not 1.5"),
        ({"priority_weight": -1}, "there.priority_weight must be seconds, 0 or more, not -1"),
        ({"priority_weight": "10"}, "there.priority_weight must be seconds, 0 or more, not '10'"),
        ({"priority_weight": float("nan")}, "there.priority_weight must be seconds, 0 or more, not nan"),
        ({"priority_weight": float("inf")}, "there.priority_weight must be seconds, 0 or more, not inf"),
        ({"tensor_parallel_size": 0}, "there.tensor_parallel_size must be an integer of at least 1, not 0"),
        ({"where": "here"}, "there.where is not a setting"),
        ({"model": ""}, "there.model must be a folder, a .gguf file or a hub id, not ''"),
        ({"model": 5}, "there.model must be a folder, a .gguf file or a hub id, not 5"),
        ({"model": None}, "there.model is missing"),
        ({"tokenizer": 5}, "there.tokenizer must be .*, not 5"),
        ({"kv_transfer_config": "on"}, "there.kv_transfer_config must be a mapping with kv_connector and kv_role"),
        ({"kv_transfer_config": {"kv_rol": "kv_both"}}, "there.kv_transfer_config.kv_rol is not a setting.*kv_role"),
        (
            {"kv_transfer_config": {"kv_connector": "NixlConnector"}},
            "there.kv_transfer_config.kv_connector must be ObjectStoreConnector or null, not 'NixlConnector'",
        ),
        ({"kv_transfer_config": {"kv_role": "both"}}, "kv_role must be kv_both, kv_producer or kv_consumer"),
        (
            {"kv_transfer_config": {"kv_connector_extra_config": {"store_memory": "much"}}},
            "kv_transfer_config.kv_connector_extra_config.store_memory must be a size .*, not 'much'",
        ),
        (
            {"kv_transfer_config": {"kv_connector_extra_config": {"publish_min_tokens": 0}}},
            "kv_connector_extra_config.publish_min_tokens must be an integer of at least 1, not 0",
        ),
        (
            {"kv_transfer_config": {"kv_connector_extra_config": {"fetch_weight": -1}}},
            "kv_connector_extra_config.fetch_weight must be a number, 0 or more, not -1",
        ),
        (
            {"kv_transfer_config": {"kv_connector_extra_config": {"fetch_timeout": -1}}},
            "kv_connector_extra_config.fetch_timeout must be seconds, over 0, not -1",
        ),
        (
            {"kv_transfer_config": {"kv_connector_extra_config": {"store_idle_seconds": "long"}}},
            "kv_connector_extra_config.store_idle_seconds must be seconds, 0 or more, not 'long'",
        ),
    ],
    ids=str,
)
def test_wrong_settings_are_refused_with_key_value_and_what_is_right(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_kwargs("there", **{"model": "m", **settings})


def test_sharing_kv_is_set_up_with_vllms_names():
    def transfer(**settings):
        return EngineConfig.from_kwargs(model="m", kv_transfer_config=settings).kv_transfer_config

    assert EngineConfig("m").kv_transfer_config == transfer() == transfer(kv_connector="ObjectStoreConnector")
    assert (transfer().publishes, transfer().fetches) == (True, True)
    off, giver, taker = transfer(kv_connector=None), transfer(kv_role="kv_producer"), transfer(kv_role="kv_consumer")
    assert [(t.publishes, t.fetches) for t in (off, giver, taker)] == [(False, False), (True, False), (False, True)]
    assert transfer(kv_connector_extra_config={"store_memory": "2GiB"}).store_memory == 2 << 30
