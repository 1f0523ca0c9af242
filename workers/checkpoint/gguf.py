"""A GGUF file as a checkpoint: names and order of Hugging Face, tensors slice by slice, the model's configuration."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from ...scheduler.errors import CheckpointError
from ..config import ModelConfig, RopeConfig
from .gguf_file import GGUFFile, eos_token_ids

if TYPE_CHECKING:
    from torch import Tensor

    from ...kernels.ops import QuantizedTensor

_WHOLE = slice(None)

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}  # Mistral is llama here

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# Metadata of an architecture that is read below or does not matter; any other might change the results.
_KNOWN_KEYS = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.causal",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "tensor_data_layout",
}
# At these values the others change nothing.
_NEUTRAL = {"rope.scaling.attn_factor": 1, "rope.scaling.yarn_attn_factor": 1, "rope.scaling.yarn_ext_factor": 1}


class GGUFCheckpoint:
    """A GGUF file under Hugging Face's names. Slices come dequantized to fp32, or as the file has them."""

    def __init__(self, path: Path):
        self.file = GGUFFile(path)
        self._stored = {}  # Hugging Face's name: GGUF's
        for stored in self.file.tensors:
            if stored != "rope_freqs.weight":  # part of the configuration
                self._stored[_hugging_face_name(stored)] = stored
        self.config = _model_config(self.file)

    def names(self) -> frozenset[str]:
        return frozenset(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.file.tensors[self._stored[name]].shape

    def num_bytes(self, name: str) -> int:
        return self.file.tensors[self._stored[name]].num_bytes

    def quantization(self, name: str) -> str | None:
        """The format of the tensor's blocks, if it has one of `FORMATS`."""
        from ...kernels.ops import FORMATS

        info = self.file.tensors[self._stored[name]]
        return info.type.name if info.type.name in FORMATS and len(info.shape) == 2 else None

    def read_blocks(self, name: str, rows: slice = _WHOLE, columns: slice = _WHOLE) -> "QuantizedTensor":
        """Those rows and columns as the file has them, copied. `columns` begin and end where blocks do."""
        import torch

        from ...kernels.ops import FORMATS, QuantizedTensor

        stored = self._stored[name]
        info = self.file.tensors[stored]
        form = FORMATS[info.type.name]
        first, last, _ = columns.indices(info.shape[1])
        if first % form.values or last % form.values:
            raise ValueError(f"columns {first} to {last} of {name} are no whole blocks of {form.values}")
        start, stop = first // form.values * form.bytes, last // form.values * form.bytes
        data = self.file.rows(stored)[self._order(name, info.shape[0], rows), start:stop]
        return QuantizedTensor(torch.from_numpy(np.array(data)), form)

    def read(self, name: str, rows: slice = _WHOLE, columns: slice = _WHOLE) -> "Tensor":
        """Those rows and columns in fp32. `columns` must be left out for a vector."""
        import torch  # here and below: a second to import, and not needed by those who want only the tokenizer

        stored = self._stored[name]
        info = self.file.tensors[stored]
        data = self.file.rows(stored)
        if len(info.shape) == 1:
            return torch.from_numpy(_floats(data, info.type)[0])[self._order(name, info.shape[0], rows)]
        first, last, _ = columns.indices(info.shape[1])
        block_size, block_bytes = GGML_QUANT_SIZES[info.type]
        start, stop = first // block_size, -(-last // block_size)
        data = data[self._order(name, info.shape[0], rows), start * block_bytes : stop * block_bytes]
        values = _floats(data, info.type)
        return torch.from_numpy(values[:, first - start * block_size : last - start * block_size])

    def _order(self, name: str, num_rows: int, rows: slice) -> slice | np.ndarray:
        """Which stored rows are `rows`.

        llama.cpp rotates neighboring dimensions of a llama's head where transformers rotates its halves, so its
        converter interleaved the halves of each query and key head: dimension i of half s became row 2i + s.
        """
        match = re.search(r"self_attn\.([qk])_proj\.", name)
        if not match or self.config.architecture != "LlamaForCausalLM":
            return rows
        dim = self.config.head_dim
        index = np.arange(*rows.indices(num_rows))
        head, within = np.divmod(index, dim)
        half, pair = np.divmod(within, dim // 2)
        return head * dim + 2 * pair + half


def _floats(data: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    values = dequantize(data, kind)
    return values if values.flags.writeable else values.copy()


def _hugging_face_name(stored: str) -> str:
    base, _, kind = stored.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", base)
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{kind}"
    return f"{_NAMES[base]}.{kind}" if base in _NAMES else stored


def _model_config(file: GGUFFile) -> ModelConfig:
    arch = file.get("general.architecture", str)
    if arch not in _ARCHITECTURES:
        supported = ", ".join(_ARCHITECTURES)
        raise CheckpointError(f"{file.path}: architecture {arch!r} is not supported; supported: {supported}")
    context = _positive(file, f"{arch}.context_length")
    for key, value in file.metadata.items():
        name = key.removeprefix(f"{arch}.")
        if name == key or name in _KNOWN_KEYS or not value or value == _NEUTRAL.get(name):
            continue
        if name == "attention.sliding_window" and isinstance(value, int) and value >= context:
            continue
        raise CheckpointError(f"{file.path}: metadata {key} = {str(value)[:60]} is not supported")
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path}: token_embd.weight is missing")
    hidden, heads = _positive(file, f"{arch}.embedding_length"), _positive(file, f"{arch}.attention.head_count")
    head_dim = _positive(file, f"{arch}.attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if file.get(f"{arch}.{key}", int, head_dim) != head_dim:
            raise CheckpointError(
                f"{file.path}: {arch}.{key} = {file.metadata[f'{arch}.{key}']} is not supported: "
                f"it must equal the head dimension, {head_dim}"
            )
    key_value_heads = _positive(file, f"{arch}.attention.head_count_kv", heads)
    if heads % key_value_heads or head_dim % 2:
        raise CheckpointError(
            f"{file.path}: {heads} heads of {head_dim} with {key_value_heads} key-value heads do not fit together"
        )
    query = file.tensors.get("blk.0.attn_q.weight")
    bos = file.metadata.get("tokenizer.ggml.bos_token_id")
    return ModelConfig(
        architecture=_ARCHITECTURES[arch],
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=_positive(file, f"{arch}.feed_forward_length"),
        num_hidden_layers=_positive(file, f"{arch}.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=head_dim,
        rms_norm_eps=file.get(f"{arch}.attention.layer_norm_rms_epsilon", float),
        max_position_embeddings=context,
        tie_word_embeddings="output.weight" not in file.tensors,
        dtype="float32" if query and query.type == GGMLQuantizationType.F32 else "bfloat16",
        rope=_rope(file, arch, head_dim, context),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        bos_token_id=bos if isinstance(bos, int) else None,
        eos_token_ids=eos_token_ids(file),
    )


def _positive(file: GGUFFile, key: str, default: int | None = None) -> int:
    value = file.get(key, int, default)
    if value < 1:
        raise CheckpointError(f"{file.path}: metadata {key} must be positive, not {value}")
    return value


def _rope(file: GGUFFile, arch: str, head_dim: int, context: int) -> RopeConfig:
    theta = file.get(f"{arch}.rope.freq_base", float, 10000.0)
    factor = file.get(f"{arch}.rope.scaling.factor", float, file.get(f"{arch}.rope.scale_linear", float, 0.0))
    kind = file.get(f"{arch}.rope.scaling.type", str, "linear" if factor else "none")
    factor = factor or 1.0
    original = file.get(f"{arch}.rope.scaling.original_context_length", int, context)
    if "rope_freqs.weight" in file.tensors:
        if kind == "none" or factor == 1.0:
            return _rope_from_factors(file, theta, head_dim, original)
        raise CheckpointError(f"{file.path}: rope_freqs.weight together with RoPE scaling {kind!r} is not supported")
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, factor, context)
    if kind == "yarn":
        return RopeConfig(
            theta,
            kind,
            factor,
            original,
            beta_fast=file.get(f"{arch}.rope.scaling.yarn_beta_fast", float, 32.0),
            beta_slow=file.get(f"{arch}.rope.scaling.yarn_beta_slow", float, 1.0),
        )
    raise CheckpointError(f"{file.path}: RoPE scaling {kind!r} is not supported; supported: none, linear, yarn")


def _rope_from_factors(file: GGUFFile, theta: float, head_dim: int, original: int) -> RopeConfig:
    """llama3 scaling, which a GGUF holds only as the divisor of each frequency.

    The largest divisor is the factor. The rest of the parameters is Llama 3's; where they do not give the same
    divisors again the tensor is something else.
    """
    import torch

    from ..rope import inverse_frequencies

    divisors = torch.from_numpy(_floats(file.rows("rope_freqs.weight"), file.tensors["rope_freqs.weight"].type)[0])
    if divisors.shape != (head_dim // 2,) or not torch.isfinite(divisors).all():
        raise CheckpointError(f"{file.path}: rope_freqs.weight must hold {head_dim // 2} finite values")
    if torch.equal(divisors, torch.ones_like(divisors)):
        return RopeConfig(theta)
    plain = inverse_frequencies(RopeConfig(theta), head_dim, 1)
    for length in dict.fromkeys((8192, original)):
        rope = RopeConfig(theta, "llama3", round(float(divisors.max()), 4), length)
        if torch.allclose(plain / inverse_frequencies(rope, head_dim, 1), divisors, rtol=1e-4):
            return rope
    raise CheckpointError(f"{file.path}: rope_freqs.weight is not Llama 3's scaling, which is the only one supported")
