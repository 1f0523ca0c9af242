"""Fills `DecoderWeights` from a model's files; refuses what does not fit, naming the tensor."""

import hashlib
import math
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from ...kernels import ops
from ...kernels.ops import FORMATS, QuantizedTensor, Weight
from ...scheduler.errors import CheckpointError
from ..config import ModelConfig
from ..models.weights import DecoderWeights, LayerWeights, Linear
from ..partition import COLUMN_GROUP, Range, Shard, whole_model
from .gguf import GGUFCheckpoint
from .locate import locate
from .safetensors import SafetensorsCheckpoint

_WHOLE = slice(None)
_CHUNK = 4 << 20  # elements read, and dequantized, at a time by a thread: 16 MB of fp32

# Buffers that old checkpoints carry and that are computed from the configuration.
_HARMLESS = re.compile(r".*\.(rotary_emb\.inv_freq|masked_bias|attn\.bias)$")

Progress = Callable[[int, int], None]  # called with (bytes done, bytes in all) while weights load


class Checkpoint(Protocol):
    """A model's configuration and tensors, under the names that Hugging Face gives them, whatever the file format."""

    config: ModelConfig

    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def num_bytes(self, name: str) -> int:
        """What the tensor takes on disk."""
        ...

    def read(self, name: str, rows: slice = _WHOLE, columns: slice = _WHOLE) -> Tensor:
        """Only those rows and columns are read from disk (and dequantized). Steps must be 1."""
        ...

    def quantization(self, name: str) -> str | None:
        """The name of the block format, one of `FORMATS`, in which `read_blocks` gives the matrix; None: in no such."""
        ...

    def read_blocks(self, name: str, rows: slice = _WHOLE, columns: slice = _WHOLE) -> QuantizedTensor:
        """As `read`, but as the file has it. Columns begin and end where blocks do."""
        ...


def open_checkpoint(model: str) -> Checkpoint:
    """Open a folder (config.json and safetensors, or exactly one .gguf), a .gguf file or a hub id.

    Reads headers only. Raises `CheckpointError` that says what is missing, damaged or not supported.
    """
    path = locate(model)
    return GGUFCheckpoint(path) if path.is_file() else SafetensorsCheckpoint(path)


def digest(checkpoint: Checkpoint) -> str:
    """Of the first row of every tensor: equal for equal files, and another once the model has been trained further."""
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(checkpoint.names()):
        found.update(name.encode())
        found.update(checkpoint.read(name, slice(0, 1)).contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def load_weights(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    progress: Progress | None = None,
    shard: Shard | None = None,
    quantization: str = "none",
) -> DecoderWeights:
    """Read a rank's part of every tensor into its place among the fused weights, in chunks: no tensor is held twice.

    `shard` says which part; by default all. Of the rest nothing is read.
    `quantization` is `EngineConfig`'s: matrices stay in the blocks that the file has ("auto"), are brought to blocks of
    int8 ("int8"), or to `dtype` ("none"), as all else is. So are those that a shard cuts within blocks.
    `progress` is called with (bytes done, bytes in all), bytes as they are on disk.
    Raises `CheckpointError` naming a tensor that is missing, unknown or of the wrong shape, before anything is read.
    """
    config = checkpoint.config
    shard = shard or whole_model(config)
    hidden = Range(0, config.hidden_size, config.hidden_size)
    q, kv = shard.heads.scaled(config.head_dim), shard.kv_heads.scaled(config.head_dim)
    filler = _Filler(checkpoint, dtype, quantization)

    def linear(prefix: str, parts: dict[str, Range], columns: Range, bias: bool, here: bool) -> Linear:
        """Projections stacked by rows, `parts` giving each one's."""
        rows = {f"{prefix}.{name}": size for name, size in parts.items()}
        matrices = filler.matrix({f"{name}.weight": size for name, size in rows.items()}, columns, here)
        weight = matrices[0] if len(matrices) == 1 else matrices
        if not bias:
            return Linear(weight)
        # Where columns are split, the ranks' results are added up, and the bias must be in one of them only.
        here = here and columns.start == 0
        vector = filler.tensor({f"{name}.bias": size for name, size in rows.items()}, here=here)
        return Linear(weight, vector if here else None)

    def layer(index: int) -> LayerWeights:
        at, here = f"model.layers.{index}", shard.layers.start <= index < shard.layers.stop
        inner = shard.intermediate
        qkv = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        return LayerWeights(
            input_norm=filler.tensor({f"{at}.input_layernorm.weight": hidden}, here=here),
            qkv=linear(f"{at}.self_attn", qkv, hidden, config.qkv_bias, here),
            o=linear(f"{at}.self_attn", {"o_proj": hidden}, q, config.o_bias, here),
            post_attention_norm=filler.tensor({f"{at}.post_attention_layernorm.weight": hidden}, here=here),
            gate_up=linear(f"{at}.mlp", {"gate_proj": inner, "up_proj": inner}, hidden, config.mlp_bias, here),
            down=linear(f"{at}.mlp", {"down_proj": hidden}, inner, config.mlp_bias, here),
        )

    # `filler` only allocates and notes here: nothing is read until the whole checkpoint is known to fit.
    own_head = not config.tie_word_embeddings or "lm_head.weight" in checkpoint.names()
    # The last stage of a tied model wants the embedding for its head.
    here = shard.first_stage or (shard.last_stage and config.tie_word_embeddings)
    (embed_tokens,) = filler.matrix({"model.embed_tokens.weight": shard.vocab}, hidden, here)
    layers = [layer(index) for index in range(config.num_hidden_layers)][shard.layers.slice]
    norm = filler.tensor({"model.norm.weight": hidden}, here=shard.last_stage)
    lm_head = embed_tokens
    if own_head:
        (lm_head,) = filler.matrix({"lm_head.weight": shard.vocab}, hidden, shard.last_stage)
    filler.run(progress)
    # Some checkpoints of tied models hold the head a second time. One that differs is used, as transformers does.
    if config.tie_word_embeddings and lm_head is not embed_tokens and _equal(lm_head, embed_tokens):
        lm_head = embed_tokens
    return DecoderWeights(embed_tokens, layers, norm, lm_head)


def _equal(a: Weight, b: Weight) -> bool:
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
        return a.format == b.format and torch.equal(a.blocks, b.blocks)
    return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)


def column_group(checkpoint: Checkpoint, quantization: str) -> int:
    """Columns at whose multiples down projections can be cut without cutting one of their blocks: see `partition`."""
    kinds = {checkpoint.quantization(name) for name in checkpoint.names() if name.endswith(".mlp.down_proj.weight")}
    widths = [FORMATS[kind].values for kind in kinds if kind and quantization == "auto"]
    return max([COLUMN_GROUP, *widths])


class _Filler:
    """Notes which parts of which tensors go where, checks that they are all the checkpoint has, then reads them."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, quantization: str):
        self.checkpoint, self.dtype, self.quantization = checkpoint, dtype, quantization
        self.names = checkpoint.names()
        self.known: set[str] = set()
        self.places: dict[str, tuple[Weight, Range, Range | None]] = {}  # where its rows and columns go

    def tensor(self, rows: dict[str, Range], columns: Range | None = None, here: bool = True) -> Tensor:
        """A new tensor [sum of rows, columns], or a vector; parts of the named tensors will fill it from top to bottom.

        Where it is not `here`, on this rank, it is only checked, and empty.
        """
        tail = () if columns is None else (columns.total,)
        for name, part in rows.items():
            self._check(name, (part.total, *tail))
        if not here:
            return torch.empty(0, dtype=self.dtype)
        lengths = [len(part) for part in rows.values()]
        whole = torch.empty((sum(lengths), *(() if columns is None else (len(columns),))), dtype=self.dtype)
        for (name, part), place in zip(rows.items(), whole.split(lengths), strict=True):
            self.places[name] = place, part, columns
        return whole

    def matrix(self, rows: dict[str, Range], columns: Range, here: bool = True) -> list[Weight]:
        """As `tensor`, in as few parts as the formats of the named tensors allow."""
        for name, part in rows.items():
            self._check(name, (part.total, columns.total))
        if not here:
            return [torch.empty(0, dtype=self.dtype)]
        parts: list[Weight] = []
        for kind, names in groupby(rows, lambda name: self._format(name, columns)):
            group = {name: rows[name] for name in names}
            if kind is None:
                parts.append(self.tensor(group, columns))
                continue
            form, lengths = FORMATS[kind], [len(part) for part in group.values()]
            blocks = torch.empty(sum(lengths), len(columns) // form.values * form.bytes, dtype=torch.uint8)
            for name, piece in zip(group, blocks.split(lengths), strict=True):
                self.places[name] = QuantizedTensor(piece, form), rows[name], columns
            parts.append(QuantizedTensor(blocks, form))
        return parts

    def _format(self, name: str, columns: Range) -> str | None:
        """What the matrix is kept in: the name of a block format, or None for `dtype`."""
        if self.quantization == "none":
            return None
        kind = "Q8_0" if self.quantization == "int8" else self.checkpoint.quantization(name)
        fits = kind is not None and all(edge % FORMATS[kind].values == 0 for edge in (columns.start, columns.stop))
        return kind if fits else None

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self.names:
            raise CheckpointError(f"{name} is missing from the checkpoint")
        if self.checkpoint.shape(name) != shape:
            raise CheckpointError(
                f"{name} has shape {list(self.checkpoint.shape(name))}; the configuration asks for {list(shape)}"
            )
        self.known.add(name)

    def run(self, progress: Progress | None) -> None:
        extra = sorted(n for n in self.names - self.known if not _HARMLESS.match(n))
        if extra:
            more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
            raise CheckpointError(
                f"the checkpoint holds {extra[0]}{more}, unknown to {self.checkpoint.config.architecture}"
            )
        sizes = {
            name: self.checkpoint.num_bytes(name) * math.prod(place.shape) / math.prod(self.checkpoint.shape(name))
            for name, (place, _, _) in self.places.items()
        }
        total = round(sum(sizes.values()))
        chunks = []
        for name, (place, _, _) in self.places.items():
            length, width = (*place.shape, 1)[:2]
            step = max(1, _CHUNK // max(1, width))
            chunks += [(name, start, min(start + step, length)) for start in range(0, length, step)]

        def fill(chunk: tuple[str, int, int]) -> float:
            name, start, stop = chunk
            self._fill(name, start, stop)
            return sizes[name] * (stop - start) / self.places[name][0].shape[0]

        done = 0.0
        # Dequantizing is numpy's work, which lets go of the interpreter lock.
        with ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="load") as pool:
            for num_bytes in pool.map(fill, chunks):
                done += num_bytes
                if progress:
                    progress(round(done), total)

    def _fill(self, name: str, start: int, stop: int) -> None:
        """Rows from `start` to `stop` of the tensor's place."""
        place, part, columns = self.places[name]
        at = (slice(part.start + start, part.start + stop), *(() if columns is None else (columns.slice,)))
        if isinstance(place, Tensor):
            place[start:stop] = self.checkpoint.read(name, *at)
        elif place.format.name == self.checkpoint.quantization(name):
            place.blocks[start:stop] = self.checkpoint.read_blocks(name, *at).blocks
        else:
            place.blocks[start:stop] = ops.quantize_int8(self.checkpoint.read(name, *at)).blocks
