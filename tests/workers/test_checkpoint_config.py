"""config.json, as transformers 4 and 5 write it, to `ModelConfig`; what is not supported is refused by name."""

import json

import pytest

from pagedray.scheduler.errors import CheckpointError, ConfigError
from pagedray.workers.checkpoint.config import read_eos_token_ids, read_model_config
from pagedray.workers.checkpoint.locate import sampling_defaults
from pagedray.workers.config import EngineConfig, RopeConfig

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


@pytest.fixture
def config(tmp_path):
    def make(**changes):
        (tmp_path / "config.json").write_text(json.dumps({**BASE, **changes}))
        return read_model_config(tmp_path)

    return make


def test_defaults_are_those_of_transformers(config):
    from transformers import LlamaConfig

    ours, theirs = config(), LlamaConfig(**BASE)
    assert ours.head_dim == theirs.head_dim == 16
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope == RopeConfig(theta=theirs.rope_parameters["rope_theta"])
    assert (ours.bos_token_id, ours.eos_token_ids) == (theirs.bos_token_id, (theirs.eos_token_id,))
    assert ours.tie_word_embeddings is theirs.tie_word_embeddings
    assert (ours.qkv_bias, ours.o_bias, ours.mlp_bias) == (False, False, False)


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2"])
def test_what_transformers_saves_is_read_back(kind, tiny_llama, tmp_path):
    model = tiny_llama(kind, head_dim=32, sliding_window=None) if kind == "Mistral" else tiny_llama(kind)
    model.save_pretrained(tmp_path)
    config = read_model_config(tmp_path)
    assert config.architecture == f"{kind}ForCausalLM"
    assert config.head_dim == (32 if kind == "Mistral" else 16)
    assert config.qkv_bias is (kind == "Qwen2") and not config.o_bias
    assert config.dtype == "float32"


def test_transformers_4_and_5_say_the_same(config):
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = config(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **llama3}, torch_dtype="bfloat16")
    new = config(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **llama3}, dtype="bfloat16")
    assert old == new
    assert new.rope == RopeConfig(5e5, "llama3", 8.0, 64, 1.0, 4.0) and new.dtype == "bfloat16"


@pytest.mark.parametrize("name", ["type", "rope_type"])
def test_linear_and_dynamic_scale_from_the_models_length(config, name):
    for kind in ("linear", "dynamic"):
        rope = config(rope_scaling={name: kind, "factor": 4.0}).rope
        assert (rope.type, rope.factor, rope.original_max_position_embeddings) == (kind, 4.0, 128)


def test_yarn_settings(config):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16}
    rope = config(rope_scaling=scaling).rope
    assert rope == RopeConfig(10000.0, "yarn", 4.0, 32, beta_fast=16.0)
    del scaling["factor"]
    assert config(rope_scaling=scaling).rope.factor == 4.0  # 128 / 32


def test_bias_of_llama(config):
    ours = config(attention_bias=True, mlp_bias=True)
    assert (ours.qkv_bias, ours.o_bias, ours.mlp_bias) == (True, True, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM.*supported: LlamaForCausalLM"),
        ({"architectures": None}, "architecture None"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope.*supported: default"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor must be a positive number"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"num_hidden_layers": None}, "num_hidden_layers must be a positive integer, not None"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer, not '64'"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn'"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 64}, "sliding_window = 64"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 64}, "sliding_window"),
    ],
)
def test_refusals_name_the_key(config, changes, message):
    with pytest.raises(CheckpointError, match=message):
        config(**changes)


def test_mistrals_default_window_counts(config):
    with pytest.raises(CheckpointError, match="sliding_window = 4096"):
        config(architectures=["MistralForCausalLM"], max_position_embeddings=32768)


def test_windows_that_do_nothing_are_fine(config):
    config(architectures=["MistralForCausalLM"], sliding_window=None)
    config(architectures=["MistralForCausalLM"], sliding_window=128)
    config(architectures=["Qwen2ForCausalLM"], use_sliding_window=False, sliding_window=64)
    config(sliding_window=64)  # transformers' Llama knows none


def test_end_tokens_come_from_the_generation_config_first(config, tmp_path):
    assert config(eos_token_id=[5, 6]).eos_token_ids == (5, 6)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert config(eos_token_id=5).eos_token_ids == (7, 8) == read_eos_token_ids(tmp_path)
    (tmp_path / "generation_config.json").write_text("{}")
    assert config(eos_token_id=5).eos_token_ids == (5,)


def test_the_tokenizers_own_end_token_ends_too(config, tmp_path):
    """A fine-tune in ChatML has <|im_end|> in its tokenizer, and its generation config is still the base model's."""

    def ends(settings, **tokenizer):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
        assert (found := config(eos_token_id=5).eos_token_ids) == read_eos_token_ids(tmp_path)
        return found

    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    said = {"eos_token": "<|im_end|>"}
    assert ends(said | {"added_tokens_decoder": {"7": {"content": "<eos>"}, "9": {"content": "<|im_end|>"}}}) == (7, 9)
    assert ends(said, added_tokens=[{"id": 8, "content": "<eos>"}, {"id": 9, "content": "<|im_end|>"}]) == (7, 9)
    assert ends({"eos_token": {"content": "</s>"}}, model={"vocab": {"<s>": 1, "</s>": 2}}) == (7, 2)
    assert ends({"eos_token": "</s>"}, model={"vocab": {"</s>": 7}}) == (7,)
    for settings in ({}, {"eos_token": None}, said):
        assert ends(settings, model={"vocab": [["</s>", 0.0]]}) == (7,)
    assert ends(said, added_tokens=[{"id": 96, "content": "<|im_end|>"}]) == (7,)  # the model has 96 tokens
    (tmp_path / "tokenizer.json").write_text("{")
    assert config().eos_token_ids == (7,)  # whoever needs the tokenizer will say that it is damaged


def test_broken_json_names_the_file(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ')
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read as JSON"):
        read_model_config(tmp_path)


def test_how_the_models_makers_would_have_it_sampled(config, tmp_path):
    config()
    engine = EngineConfig.from_kwargs(model=str(tmp_path))
    assert sampling_defaults(engine) == {}
    said = {"temperature": 0.6, "top_k": 20, "top_p": None, "do_sample": True, "max_new_tokens": 5, "eos_token_id": 2}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    assert sampling_defaults(engine) == {"temperature": 0.6, "top_k": 20}
    assert sampling_defaults(EngineConfig.from_kwargs(model=str(tmp_path), generation_config="vllm")) == {}
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": "most"}))
    with pytest.raises(CheckpointError, match="generation_config.json: top_p must be"):
        sampling_defaults(engine)
    with pytest.raises(ConfigError, match="generation_config must be auto or vllm, not 'mine'"):
        EngineConfig.from_kwargs(model=str(tmp_path), generation_config="mine")
