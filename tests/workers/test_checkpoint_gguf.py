"""GGUF files written by llama.cpp's own package: every quantization, slices, names, the rotary order, damage."""

import random
import re

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from pagedray.kernels import ops
from pagedray.scheduler.errors import CheckpointError
from pagedray.workers.checkpoint.gguf_file import GGUFFile
from pagedray.workers.checkpoint.load import column_group, load_weights, open_checkpoint
from pagedray.workers.config import EngineConfig, RopeConfig
from pagedray.workers.kv_cache import allocate
from pagedray.workers.models.decoder import Decoder
from pagedray.workers.partition import partition
from pagedray.workers.rope import cos_sin_table

F32 = GGMLQuantizationType.F32
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def stored_name(name):
    base, kind = name.rsplit(".", 1)
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", base)
    return f"blk.{layer[1]}.{NAMES[layer[2]]}.{kind}" if layer else f"{NAMES[base]}.{kind}"


def permute(tensor, heads):
    """What llama.cpp's converter does to the query and key rows of a llama: halves of each head interleaved."""
    half = tensor.shape[0] // heads // 2
    return tensor.reshape(heads, 2, half, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def write(path, tensors, metadata=(), arch="llama"):
    """`tensors` maps names to (array, type of a quantized array or None); `metadata` are calls on the writer."""
    writer = gguf.GGUFWriter(path, arch)
    for call, *arguments in metadata:
        getattr(writer, call)(*arguments)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def shape_metadata(config):
    return [
        ("add_context_length", config.max_position_embeddings),
        ("add_embedding_length", config.hidden_size),
        ("add_block_count", config.num_hidden_layers),
        ("add_feed_forward_length", config.intermediate_size),
        ("add_head_count", config.num_attention_heads),
        ("add_head_count_kv", config.num_key_value_heads),
        ("add_layer_norm_rms_eps", config.rms_norm_eps),
        ("add_rope_freq_base", config.rope_parameters["rope_theta"]),
        ("add_rope_dimension_count", config.hidden_size // config.num_attention_heads),
    ]


def quantize(array, kind):
    """Blocks of the array; in the K formats, to which the package does not quantize, of random codes."""
    if not kind.name.endswith("_K"):
        return gguf.quants.quantize(array, kind)
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(array.size)
    blocks = generator.integers(0, 256, (array.size // block_size, block_bytes), dtype=np.uint8)
    for at in {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind.name]:
        scale = generator.uniform(1e-5, 1e-4, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scale[:, None].view(np.uint8)
    return blocks.reshape(array.shape[0], -1)


@pytest.fixture
def exported(tiny_llama, tmp_path):
    """A tiny model as a GGUF file, and its state dict. `others` maps parts of names to their own quantization."""

    def make(kind="Llama", quantization=F32, metadata=(), extra=None, drop=(), others=None, **config):
        model = tiny_llama(kind, **config)
        state, heads = model.state_dict(), model.config
        tensors = {}
        for name, tensor in state.items():
            if name in drop or (name == "lm_head.weight" and heads.tie_word_embeddings):
                continue
            array = tensor.numpy()
            if kind == "Llama" and "q_proj" in name:
                array = permute(array, heads.num_attention_heads)
            if kind == "Llama" and "k_proj" in name:
                array = permute(array, heads.num_key_value_heads)
            own = next((q for part, q in (others or {}).items() if part in name), quantization)
            matrix = array.ndim == 2 and own != F32
            stored = quantize(array, own) if matrix else array
            tensors[stored_name(name)] = (stored, own if matrix else None)
        tensors.update(extra or {})
        arch = {"Llama": "llama", "Qwen2": "qwen2"}[kind]
        path = write(tmp_path / "model.gguf", tensors, [*shape_metadata(heads), *metadata], arch)
        return path, state

    return make


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_is_read_back(exported, kind, tied):
    path, state = exported(kind, tie_word_embeddings=tied)
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.config.architecture == f"{kind}ForCausalLM"
    assert checkpoint.config.tie_word_embeddings is tied and checkpoint.config.qkv_bias is (kind == "Qwen2")
    assert checkpoint.config.dtype == "float32" and checkpoint.config.rope == RopeConfig(10000.0)
    for name in checkpoint.names():
        assert torch.equal(checkpoint.read(name), state[name]), name
    weights = load_weights(checkpoint, torch.float32)
    assert (weights.lm_head is weights.embed_tokens) is tied
    assert torch.equal(weights.layers[1].qkv.weight[:64], state["model.layers.1.self_attn.q_proj.weight"])
    assert torch.equal(weights.layers[1].qkv.weight[64:96], state["model.layers.1.self_attn.k_proj.weight"])


def test_biases_of_a_llama_are_reordered_with_their_weights(exported):
    path, state = exported(attention_bias=True, mlp_bias=True)
    checkpoint = open_checkpoint(str(path))
    assert (checkpoint.config.qkv_bias, checkpoint.config.o_bias, checkpoint.config.mlp_bias) == (True, True, True)
    weights = load_weights(checkpoint, torch.float32)
    at = "model.layers.0.self_attn"
    assert torch.equal(weights.layers[0].qkv.bias, torch.cat([state[f"{at}.{x}_proj.bias"] for x in "qkv"]))


@pytest.mark.parametrize("name", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantized_weights_are_ggufs(exported, name):
    kind = GGMLQuantizationType[name]
    path, state = exported(quantization=kind)
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.config.dtype == "bfloat16"
    weights = load_weights(checkpoint, torch.float32)

    def rounded(tensor):
        return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind).copy())

    for i, layer in enumerate(weights.layers):
        at = f"model.layers.{i}"
        # Quantization goes row by row, so that it commutes with the order of the rows.
        qkv = torch.cat([rounded(state[f"{at}.self_attn.{x}_proj.weight"]) for x in "qkv"])
        assert torch.equal(layer.qkv.weight, qkv)
        assert torch.equal(layer.down.weight, rounded(state[f"{at}.mlp.down_proj.weight"]))
        assert torch.equal(layer.input_norm, state[f"{at}.input_layernorm.weight"])
    assert torch.equal(weights.embed_tokens, rounded(state["model.embed_tokens.weight"]))


KINDS = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]


@pytest.mark.parametrize("name", KINDS)
def test_slices_are_those_of_the_whole(tmp_path, name, tiny_llama):
    """Raw blocks, since the package quantizes to no K type: rows of 512 values, cut at and off block boundaries."""
    kind = GGMLQuantizationType[name]
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (128, 512 // block_size * block_bytes), dtype=np.uint8)
    config = tiny_llama(hidden_size=512, intermediate_size=512, num_hidden_layers=1).config  # heads of 128
    tensors = {
        "token_embd.weight": (raw, kind),
        "blk.0.attn_v.weight": (raw, kind),
        "blk.0.attn_k.weight": (raw, kind),
    }
    if name in ("F32", "F16"):
        tensors = {n: (raw.view({"F32": np.float32, "F16": np.float16}[name]), None) for n in tensors}
    checkpoint = open_checkpoint(str(write(tmp_path / "m.gguf", tensors, shape_metadata(config))))
    reference = gguf.quants.dequantize(raw, kind)
    for tensor in ("model.embed_tokens.weight", "model.layers.0.self_attn.v_proj.weight"):
        assert checkpoint.shape(tensor) == (128, 512)
        np.testing.assert_array_equal(checkpoint.read(tensor).numpy(), reference)
    pairs = reference.reshape(-1, 64, 2, 512).swapaxes(1, 2).reshape(reference.shape)  # halves of a head, again
    for tensor, whole in (("model.embed_tokens.weight", reference), ("model.layers.0.self_attn.k_proj.weight", pairs)):
        for rows in (slice(None), slice(0, 1), slice(60, 70), slice(100, None)):
            for columns in (slice(None), slice(0, 256), slice(256, 512), slice(5, 300), slice(511, 512)):
                part = checkpoint.read(tensor, rows, columns).numpy()
                np.testing.assert_array_equal(part, whole[rows, columns])


def test_every_supported_type_is_tested():
    from pagedray.workers.checkpoint.gguf_file import _QUANTIZATIONS

    assert set(KINDS) == set(_QUANTIZATIONS)


def test_chunks_meet(exported, monkeypatch):
    from pagedray.workers.checkpoint import load

    path, state = exported(quantization=GGMLQuantizationType.Q8_0)
    checkpoint = open_checkpoint(str(path))
    whole = load_weights(checkpoint, torch.float32)
    monkeypatch.setattr(load, "_CHUNK", 64 * 7)  # seven rows at a time
    pieces = load_weights(checkpoint, torch.float32)
    for a, b in zip(whole.layers, pieces.layers, strict=True):
        assert torch.equal(a.qkv.weight, b.qkv.weight) and torch.equal(a.gate_up.weight, b.gate_up.weight)
    assert torch.equal(whole.embed_tokens, pieces.embed_tokens)


# weights that stay quantized


def logits(checkpoint, dtype, quantization, ids=(5, 17, 3, 90, 41, 8, 8)):
    weights = load_weights(checkpoint, dtype, quantization=quantization)
    config, num_tokens = checkpoint.config, len(ids)
    model = Decoder(config, weights, max_model_len=16)
    metadata = ops.AttentionMetadata(
        torch.tensor([0, num_tokens], dtype=torch.int32),
        torch.tensor([num_tokens], dtype=torch.int32),
        torch.zeros(1, 1, dtype=torch.int32),
        torch.arange(num_tokens),
        num_tokens,
        num_tokens,
    )
    caches = allocate(config, 1, 16, dtype)
    return model.logits(model.forward(model.embed(torch.tensor(ids)), torch.arange(num_tokens), caches, metadata))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("main", "others", "config"),
    [
        ("Q4_1", {}, {}),
        ("Q8_0", {"embed": "F32"}, {"attention_bias": True}),
        ("Q4_0", {"v_proj": "Q8_0", "up_proj": "F16", "lm_head": "Q8_0"}, {}),
        ("Q4_K", {"v_proj": "Q6_K", "down_proj": "Q5_K", "embed": "Q6_K"}, {"hidden_size": 256}),
        ("Q5_1", {"k_proj": "Q5_0"}, {"num_attention_heads": 8, "num_key_value_heads": 2}),  # 16 rows: no panel
    ],
)
def test_a_model_in_its_own_blocks_gives_what_it_gives_dequantized(exported, dtype, tied, main, others, config):
    kinds = {part: GGMLQuantizationType[name] for part, name in others.items()}
    path, _ = exported(
        quantization=GGMLQuantizationType[main],
        others=kinds,
        intermediate_size=config.get("hidden_size", 96),
        tie_word_embeddings=tied,
        **config,
    )
    checkpoint = open_checkpoint(str(path))
    own, plain = (logits(checkpoint, dtype, quantization) for quantization in ("auto", "none"))
    assert torch.isfinite(plain).all() and plain.std() > 0
    assert torch.equal(own, plain)


def test_parts_have_the_formats_of_the_file(exported):
    q4_1, kinds = GGMLQuantizationType.Q4_1, {"v_proj": GGMLQuantizationType.Q8_0, "gate_proj": F32}
    path, state = exported(quantization=q4_1, others=kinds, tie_word_embeddings=True)
    weights = load_weights(open_checkpoint(str(path)), torch.bfloat16, quantization="auto")
    layer = weights.layers[0]
    assert [(p.format.name, p.shape) for p in layer.qkv.weight] == [("Q4_1", (96, 64)), ("Q8_0", (32, 64))]
    gate, up = layer.gate_up.weight
    assert gate.dtype == torch.bfloat16 and up.format.name == "Q4_1"
    assert layer.o.weight.format.name == "Q4_1" and weights.embed_tokens.format.name == "Q4_1"
    assert weights.lm_head is weights.embed_tokens
    assert layer.input_norm.dtype == torch.bfloat16
    stored = gguf.quants.quantize(state["model.layers.0.self_attn.q_proj.weight"].numpy(), q4_1)
    q = torch.from_numpy(gguf.quants.dequantize(stored, q4_1))
    assert torch.equal(layer.qkv.weight[0].dequantize(torch.float32)[:64], q)


@pytest.mark.parametrize("quantization", [F32, GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0], ids=str)
def test_int8_of_any_file(exported, quantization):
    path, state = exported(quantization=quantization)
    checkpoint = open_checkpoint(str(path))
    weights = load_weights(checkpoint, torch.bfloat16, quantization="int8")
    layer = weights.layers[1]
    assert {type(w) for w in (weights.embed_tokens, weights.lm_head, layer.qkv.weight)} == {ops.QuantizedTensor}
    for name, linear in (("mlp.down_proj", layer.down), ("self_attn.o_proj", layer.o)):
        plain = checkpoint.read(f"model.layers.1.{name}.weight")
        values, step = linear.weight.dequantize(torch.float32), plain.abs().max() / 127
        assert (values - plain).abs().max() <= 0.6 * step
        if quantization == GGMLQuantizationType.Q8_0:
            assert torch.equal(values, plain)  # the file's own blocks


@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_a_shard_holds_its_blocks(exported, quantization):
    """Rows and columns cut where blocks and panels end; what is cut within a block is dequantized."""
    kinds = {"mlp": GGMLQuantizationType.Q4_1, "o_proj": GGMLQuantizationType.Q6_K}
    path, _ = exported(
        quantization=GGMLQuantizationType.Q8_0, others=kinds, hidden_size=256, intermediate_size=128, vocab_size=128
    )
    checkpoint = open_checkpoint(str(path))
    whole = load_weights(checkpoint, torch.float32, quantization=quantization)
    engine = EngineConfig.from_kwargs(model="m", tensor_parallel_size=2)
    for shard in partition(checkpoint.config, engine):
        ours = load_weights(checkpoint, torch.float32, shard=shard, quantization=quantization)
        inner, q = shard.intermediate.slice, shard.heads.scaled(checkpoint.config.head_dim).slice
        down, o = ours.layers[0].down.weight, ours.layers[0].o.weight
        assert down.format is whole.layers[0].down.weight.format
        columns = whole.layers[0].down.weight.dequantize(torch.float32)[:, inner]
        assert torch.equal(down.dequantize(torch.float32), columns)
        gate_up = ours.layers[0].gate_up.weight.dequantize(torch.float32)
        gate, up = whole.layers[0].gate_up.weight.dequantize(torch.float32).chunk(2)
        assert torch.equal(gate_up, torch.cat([gate[inner], up[inner]]))
        assert isinstance(o, torch.Tensor) is (quantization == "auto")  # blocks of 256 values
        if quantization == "int8":
            o = o.dequantize(torch.float32)
        assert torch.equal(o, whole.layers[0].o.weight.dequantize(torch.float32)[:, q])
        embedding = whole.embed_tokens.dequantize(torch.float32)
        assert torch.equal(ours.embed_tokens.dequantize(torch.float32), embedding[shard.vocab.slice])


def test_wide_blocks_of_the_down_projection_are_not_cut(exported):
    q6_k = GGMLQuantizationType.Q6_K
    path, _ = exported(quantization=GGMLQuantizationType.Q8_0, others={"down_proj": q6_k}, intermediate_size=768)
    checkpoint = open_checkpoint(str(path))
    assert [column_group(checkpoint, q) for q in ("auto", "int8", "none")] == [256, 32, 32]
    engine = EngineConfig.from_kwargs(model="m", tensor_parallel_size=2)
    shards = partition(checkpoint.config, engine, column_group=column_group(checkpoint, "auto"))
    assert [len(shard.intermediate) for shard in shards] == [512, 256]
    for shard in shards:
        down = load_weights(checkpoint, torch.float32, shard=shard, quantization="auto").layers[0].down.weight
        assert down.format.name == "Q6_K"


def test_blocks_are_read_slice_by_slice(exported):
    path, _ = exported(quantization=GGMLQuantizationType.Q8_0)
    checkpoint = open_checkpoint(str(path))
    name = "model.layers.0.self_attn.k_proj.weight"
    for rows, columns in ((slice(None), slice(None)), (slice(16, 32), slice(32, 64)), (slice(3, 5), slice(0, 32))):
        part = checkpoint.read_blocks(name, rows, columns).dequantize(torch.float32)
        assert torch.equal(part, checkpoint.read(name)[rows, columns])
    with pytest.raises(ValueError, match="columns 5 to 32 of .* are no whole blocks of 32"):
        checkpoint.read_blocks(name, columns=slice(5, 32))


# RoPE


def llama3_divisors(theta, dim, factor, low, high, original):
    """Llama 3.1's rule, as its reference code words it."""
    divisors = []
    for frequency in theta ** -(np.arange(0, dim, 2) / dim):
        wavelength = 2 * np.pi / frequency
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_its_divisors(exported, factor):
    divisors = llama3_divisors(500000.0, 16, factor, 1, 4, 8192)
    path, _ = exported(
        extra={"rope_freqs.weight": (divisors, None)},
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    checkpoint = open_checkpoint(str(path))
    rope = checkpoint.config.rope
    assert rope == RopeConfig(500000.0, "llama3", factor, 8192, 1.0, 4.0)
    angles = np.arange(64)[:, None] * (500000.0 ** -(np.arange(0, 16, 2) / 16) / divisors)
    np.testing.assert_allclose(cos_sin_table(rope, 16, 64)[:, :8], np.cos(angles), atol=1e-5)
    load_weights(checkpoint, torch.float32)  # the divisors are no weight left over


def test_divisors_that_are_not_llama3s_are_refused(exported):
    path, _ = exported(extra={"rope_freqs.weight": (np.linspace(1, 3, 8, dtype=np.float32), None)})
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight is not Llama 3's"):
        open_checkpoint(str(path))


@pytest.mark.parametrize(
    ("metadata", "rope"),
    [
        ([("add_rope_scaling_type", gguf.RopeScalingType.NONE)], RopeConfig(10000.0)),
        (
            [("add_rope_scaling_type", gguf.RopeScalingType.LINEAR), ("add_rope_scaling_factor", 4.0)],
            RopeConfig(10000.0, "linear", 4.0, 128),
        ),
        ([("add_float32", "llama.rope.scale_linear", 2.0)], RopeConfig(10000.0, "linear", 2.0, 128)),
        (
            [
                ("add_rope_scaling_type", gguf.RopeScalingType.YARN),
                ("add_rope_scaling_factor", 4.0),
                ("add_rope_scaling_orig_ctx_len", 32),
            ],
            RopeConfig(10000.0, "yarn", 4.0, 32),
        ),
    ],
)
def test_rope_metadata(exported, metadata, rope):
    assert open_checkpoint(str(exported(metadata=metadata)[0])).config.rope == rope


# refusals


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ([("add_rope_scaling_type", gguf.RopeScalingType.LONGROPE)], "longrope"),
        ([("add_sliding_window", 64)], r"llama\.attention\.sliding_window = 64 is not supported"),
        ([("add_expert_count", 8)], r"llama\.expert_count = 8"),
        ([("add_logit_scale", 0.5)], r"llama\.logit_scale"),
        ([("add_value_length", 8)], r"llama\.attention\.value_length = 8"),
        ([("add_uint16", "split.count", 3)], "one of 3 parts"),
    ],
)
def test_what_would_change_results_is_refused(exported, metadata, message):
    path, _ = exported(metadata=metadata)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(path))


def test_unknown_architecture(tmp_path):
    path = write(tmp_path / "m.gguf", {"a": (np.zeros(4, np.float32), None)}, arch="gemma2")
    with pytest.raises(CheckpointError, match="'gemma2' is not supported; supported: llama, qwen2"):
        open_checkpoint(str(path))


def test_unsupported_quantization_names_the_tensor(tmp_path):
    path = write(tmp_path / "m.gguf", {"token_embd.weight": (np.zeros((4, 84), np.uint8), GGMLQuantizationType.Q2_K)})
    with pytest.raises(CheckpointError, match=r"token_embd\.weight has the type Q2_K.*supported: F32"):
        GGUFFile(path)


def test_missing_and_extra_tensors_are_named(exported):
    path, _ = exported(drop=["model.layers.1.mlp.up_proj.weight"])
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load_weights(open_checkpoint(str(path)), torch.float32)
    path, _ = exported(extra={"blk.0.attn_q_norm.weight": (np.ones(16, np.float32), None)})
    with pytest.raises(CheckpointError, match=r"holds blk\.0\.attn_q_norm\.weight, unknown"):
        load_weights(open_checkpoint(str(path)), torch.float32)


def test_truncated_files_are_refused(exported):
    path, _ = exported()
    whole = path.read_bytes()
    for length in (0, 3, 4, 8, 20, 100, 1000, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"model\.gguf"):
            open_checkpoint(str(path))
    path.write_bytes(whole[:-40])
    with pytest.raises(CheckpointError, match=r"truncated: \S+ ends at byte"):
        open_checkpoint(str(path))


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CheckpointError, match="does not begin with GGUF"):
        open_checkpoint(str(path))
    path.write_bytes(b"GGUF\x01\x00\x00\x00" + bytes(100))
    with pytest.raises(CheckpointError, match="GGUF version 1; supported: 2 and 3"):
        open_checkpoint(str(path))


def test_no_damage_to_the_header_crashes(exported):
    """Random bytes in the header: refused with our error, or harmless; never another exception, a hang or a crash."""
    path, _ = exported(metadata=[("add_token_list", ["a", "b"]), ("add_token_types", [1, 1])])
    whole = path.read_bytes()
    header = whole.index(b"output_norm.weight") + 2000
    generator, refused = random.Random(0), 0
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(generator.choice((1, 1, 4))):
            damaged[generator.randrange(header)] = generator.randrange(256)
        path.write_bytes(damaged)
        try:
            load_weights(open_checkpoint(str(path)), torch.float32)
        except CheckpointError:
            refused += 1
    assert refused > 100


# the demo model


def test_demo_model_config(demo_model):
    checkpoint = open_checkpoint(str(demo_model))
    config = checkpoint.config
    assert (config.hidden_size, config.num_hidden_layers, config.num_key_value_heads) == (576, 30, 3)
    assert (config.vocab_size, config.tie_word_embeddings, config.rope) == (49152, True, RopeConfig(100000.0))
    assert config.eos_token_ids[0] == 2


@pytest.mark.slow
def test_demo_model_speaks_english_in_transformers(demo_model, transformers_config):
    """The weights as loaded, fused and all, taken apart again into transformers' model."""
    from transformers import LlamaForCausalLM

    from pagedray.cluster.text.tokenizer import Tokenizer

    checkpoint, tokenizer = open_checkpoint(str(demo_model)), Tokenizer.load(str(demo_model))
    config = checkpoint.config
    weights = load_weights(checkpoint, torch.float32)
    model = LlamaForCausalLM(transformers_config(config, eos_token_id=list(config.eos_token_ids), pad_token_id=2))
    state = {"model.embed_tokens.weight": weights.embed_tokens, "model.norm.weight": weights.norm}
    state["lm_head.weight"] = weights.lm_head
    sizes = [config.num_attention_heads * config.head_dim, *[config.num_key_value_heads * config.head_dim] * 2]
    for i, layer in enumerate(weights.layers):
        at = f"model.layers.{i}"
        state[f"{at}.input_layernorm.weight"] = layer.input_norm
        state[f"{at}.post_attention_layernorm.weight"] = layer.post_attention_norm
        for name, part in zip("qkv", layer.qkv.weight.split(sizes), strict=True):
            state[f"{at}.self_attn.{name}_proj.weight"] = part
        state[f"{at}.self_attn.o_proj.weight"] = layer.o.weight
        state[f"{at}.mlp.gate_proj.weight"], state[f"{at}.mlp.up_proj.weight"] = layer.gate_up.weight.chunk(2)
        state[f"{at}.mlp.down_proj.weight"] = layer.down.weight
    model.load_state_dict(state)
    model.eval()

    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    inputs = torch.tensor([prompt])
    output = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=20, do_sample=False)
    assert tokenizer.decode(output[0, len(prompt) :].tolist()) == "The capital of France is Paris."

    text = (
        "The quick brown fox jumps over the lazy dog. Photosynthesis is the process by which green plants use sunlight "
        "to make food from carbon dioxide and water."
    )
    ids = torch.tensor([tokenizer.encode(text)])
    with torch.inference_mode():
        perplexity = model(ids, labels=ids).loss.exp().item()
    assert perplexity < 15  # 35 with query and key rows in the file's order
