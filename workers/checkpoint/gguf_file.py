"""GGUF files, llama.cpp's format: metadata, and where which tensor lies.

The layout is read here rather than by `gguf.GGUFReader`, which makes several arrays of every token and merge (seconds
for a vocabulary of 50,000) and follows a damaged header wherever it points.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, TokenType

from ...scheduler.errors import CheckpointError

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
