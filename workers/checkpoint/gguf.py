"""GGUF files, llama.cpp's format: metadata, and tensors dequantized slice by slice.

The layout is read here rather than by `gguf.GGUFReader`, which makes several arrays of every token and merge (seconds
for a vocabulary of 50,000) and follows a damaged header wherever it points. Dequantization is that package's.
"""

import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, TokenType
from gguf.quants import dequantize

from ...scheduler.errors import CheckpointError
from ..config import ModelConfig, RopeConfig

if TYPE_CHECKING:
    from torch import Tensor

_WHOLE = slice(None)

_QUANTIZATIONS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    shape: tuple[int, ...]  # rows first, as PyTorch has it
    type: GGMLQuantizationType
    offset: int  # bytes from the start of the file
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


class GGUFFile:
    """A mapped GGUF file: `metadata` as Python values, `tensors` as where they lie.

    Raises `CheckpointError` where the file is truncated or damaged, or holds a type that is not supported.
    """

    def __init__(self, path: Path):
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            with open(path, "rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise CheckpointError(f"{path} cannot be read: {error}") from None
        try:
            self._parse(_Reader(self._data))
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise CheckpointError(f"{path} is damaged or truncated in its header: {error}") from None
        if (parts := self.get("split.count", int, 1)) > 1:
            raise CheckpointError(f"{path} is one of {parts} parts; merge them into one file")

    def _parse(self, read: "_Reader") -> None:
        if read.bytes(4) != b"GGUF":
            raise CheckpointError(f"{self.path} is not a GGUF file: it does not begin with GGUF")
        version = read.scalar("I")
        if version not in _VERSIONS:
            raise CheckpointError(f"{self.path} has GGUF version {version}; supported: 2 and 3, little endian")
        num_tensors, num_fields = read.scalar("Q"), read.scalar("Q")
        for _ in range(num_fields):
            key = read.string()
            self.metadata[key] = self._value(read, read.scalar("I"), key)
        infos = [self._tensor_info(read) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise CheckpointError(f"{self.path}: general.alignment must be a power of two, not {alignment!r}")
        start = -(-read.at // alignment) * alignment
        for name, shape, kind, offset in infos:
            self._add(name, shape, kind, start + offset)

    def _value(self, read: "_Reader", kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return read.scalar(_SCALARS[kind])
        if kind == _STRING:
            return read.string()
        if kind != _ARRAY:
            raise CheckpointError(f"{self.path}: metadata {key} has the unknown type {kind}; the file is damaged")
        kind, length = read.scalar("I"), read.scalar("Q")
        if kind in _SCALARS:
            return read.array(_SCALARS[kind], length)
        if kind == _STRING:
            return read.strings(length)
        raise CheckpointError(f"{self.path}: metadata {key} is an array of the unsupported type {kind}")

    def _tensor_info(self, read: "_Reader") -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = read.string(), read.scalar("I")
        if not 1 <= num_dims <= 4:
            raise CheckpointError(f"{self.path}: {name} has {num_dims} dimensions; the file is damaged")
        return name, tuple(reversed(read.array("Q", num_dims))), read.scalar("I"), read.scalar("Q")

    def _add(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> None:
        if name in self.tensors:
            raise CheckpointError(f"{self.path} holds {name} twice")
        known = {k.value: k for k in GGMLQuantizationType}
        label = known[kind].name if kind in known else str(kind)
        if label not in _QUANTIZATIONS:
            raise CheckpointError(
                f"{self.path}: {name} has the type {label}, which is not supported; "
                f"supported: {', '.join(_QUANTIZATIONS)}"
            )
        block_size, block_bytes = GGML_QUANT_SIZES[known[kind]]
        if not all(shape):
            raise CheckpointError(f"{self.path}: {name} has the shape {list(shape)}; the file is damaged")
        if shape[-1] % block_size:
            raise CheckpointError(f"{self.path}: rows of {name} have {shape[-1]} values, no multiple of {block_size}")
        info = TensorInfo(shape, known[kind], offset, shape[-1] // block_size * block_bytes)
        if offset + info.num_bytes > len(self._data):
            raise CheckpointError(
                f"{self.path} is truncated: {name} ends at byte {offset + info.num_bytes}, "
                f"the file at {len(self._data)}"
            )
        self.tensors[name] = info

    def rows(self, name: str) -> np.ndarray:
        """The tensor as it is stored: [rows, bytes a row] uint8, mapped."""
        info = self.tensors[name]
        flat = np.frombuffer(self._data, np.uint8, info.num_bytes, info.offset)
        return flat.reshape(-1, info.row_bytes)

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Metadata `key` as `kind`. `CheckpointError` naming it where it is missing without a default, or other."""
        value = self.metadata.get(key, default)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            if value is None:
                raise CheckpointError(f"{self.path}: metadata {key} is missing")
            raise CheckpointError(f"{self.path}: metadata {key} must be {kind.__name__}, not {str(value)[:60]!r}")
        return value


class _Reader:
    """Little-endian values one after another; reading past the end raises `struct.error`."""

    def __init__(self, data: mmap.mmap):
        self.data, self.at = data, 0

    def bytes(self, length: int) -> bytes:
        if length > len(self.data) - self.at:
            raise struct.error(f"{length} bytes wanted at byte {self.at} of {len(self.data)}")
        self.at += length
        return self.data[self.at - length : self.at]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.bytes(struct.calcsize("<" + code)))[0]

    def array(self, code: str, length: int) -> list[Any]:
        size = struct.calcsize("<" + code)
        return np.frombuffer(self.bytes(size * length), np.dtype(code).newbyteorder("<")).tolist()

    def string(self) -> str:
        return self.bytes(self.scalar("Q")).decode()

    def strings(self, length: int) -> list[str]:
        data, at, unpack = self.data, self.at, struct.Struct("<Q").unpack_from
        out = []
        for _ in range(length):  # the hot loop of opening a file: a hundred thousand tokens and merges
            (size,) = unpack(data, at)
            if size > len(data) - at - 8:
                raise struct.error(f"a string of {size} bytes at byte {at} of {len(data)}")
            at += 8 + size
            out.append(data[at - size : at].decode())
        self.at = at
        return out


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
    """A GGUF file as a checkpoint under Hugging Face's names. Slices are dequantized to fp32 as they are read."""

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


# Tokens that end a turn or a text where the metadata names only one of them; llama.cpp knows them by their text, too.
_END_TOKENS = {
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<｜end▁of▁sentence｜>",
    "</s>",
}


def eos_token_ids(file: GGUFFile) -> tuple[int, ...]:
    """Those that end a generation: the metadata's first, then control tokens that are known as ends by their text."""
    ids = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, kinds = file.get("tokenizer.ggml.tokens", list, []), file.get("tokenizer.ggml.token_type", list, [])
    ids += [
        i for i, (t, k) in enumerate(zip(tokens, kinds, strict=False)) if k == TokenType.CONTROL and t in _END_TOKENS
    ]
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int) and 0 <= i < len(tokens)))
