"""Fills `DecoderWeights` from a model's files; refuses what does not fit, naming the tensor."""

import math
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from ...scheduler.errors import CheckpointError
from ..config import ModelConfig
from ..models.weights import DecoderWeights, LayerWeights, Linear
from ..partition import Range, Shard, whole_model
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


def open_checkpoint(model: str) -> Checkpoint:
    """Open a folder (config.json and safetensors, or exactly one .gguf), a .gguf file or a hub id.

    Reads headers only. Raises `CheckpointError` that says what is missing, damaged or not supported.
    """
    path = locate(model)
    return GGUFCheckpoint(path) if path.is_file() else SafetensorsCheckpoint(path)


def load_weights(
    checkpoint: Checkpoint, dtype: torch.dtype, progress: Progress | None = None, shard: Shard | None = None
) -> DecoderWeights:
    """Read a rank's part of every tensor into its place among the fused weights, in chunks: no tensor is held twice.

    `shard` says which part; by default all. Of the rest nothing is read.
    `progress` is called with (bytes done, bytes in all), bytes as they are on disk.
    Raises `CheckpointError` naming a tensor that is missing, unknown or of the wrong shape, before anything is read.
    """
    config = checkpoint.config
    shard = shard or whole_model(config)
    hidden = Range(0, config.hidden_size, config.hidden_size)
    q, kv = shard.heads.scaled(config.head_dim), shard.kv_heads.scaled(config.head_dim)
    filler = _Filler(checkpoint, dtype)

    def linear(prefix: str, parts: dict[str, Range], columns: Range, bias: bool, here: bool) -> Linear:
        """Projections stacked by rows, `parts` giving each one's."""
        rows = {f"{prefix}.{name}": size for name, size in parts.items()}
        weight = filler.tensor({f"{name}.weight": size for name, size in rows.items()}, columns, here)
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
    embed_tokens = filler.tensor({"model.embed_tokens.weight": shard.vocab}, hidden, here)
    layers = [layer(index) for index in range(config.num_hidden_layers)][shard.layers.slice]
    norm = filler.tensor({"model.norm.weight": hidden}, here=shard.last_stage)
    lm_head = embed_tokens
    if own_head:
        lm_head = filler.tensor({"lm_head.weight": shard.vocab}, hidden, shard.last_stage)
    filler.run(progress)
    # Some checkpoints of tied models hold the head a second time. One that differs is used, as transformers does.
    if config.tie_word_embeddings and lm_head is not embed_tokens and torch.equal(lm_head, embed_tokens):
        lm_head = embed_tokens
    return DecoderWeights(embed_tokens, layers, norm, lm_head)


class _Filler:
    """Notes which parts of which tensors go where, checks that they are all the checkpoint has, then reads them."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype):
        self.checkpoint, self.dtype = checkpoint, dtype
        self.names = checkpoint.names()
        self.known: set[str] = set()
        self.places: dict[str, tuple[Tensor, Range, Range | None]] = {}  # where its rows and columns go

    def tensor(self, rows: dict[str, Range], columns: Range | None = None, here: bool = True) -> Tensor:
        """A new tensor [sum of rows, columns], or a vector; parts of the named tensors will fill it from top to bottom.

        Where it is not `here`, on this rank, it is only checked, and empty.
        """
        tail = () if columns is None else (columns.total,)
        for name, part in rows.items():
            if name not in self.names:
                raise CheckpointError(f"{name} is missing from the checkpoint")
            if self.checkpoint.shape(name) != (part.total, *tail):
                raise CheckpointError(
                    f"{name} has shape {list(self.checkpoint.shape(name))}; "
                    f"the configuration asks for {[part.total, *tail]}"
                )
            self.known.add(name)
        if not here:
            return torch.empty(0, dtype=self.dtype)
        lengths = [len(part) for part in rows.values()]
        whole = torch.empty((sum(lengths), *(() if columns is None else (len(columns),))), dtype=self.dtype)
        for (name, part), place in zip(rows.items(), whole.split(lengths), strict=True):
            self.places[name] = place, part, columns
        return whole

    def run(self, progress: Progress | None) -> None:
        extra = sorted(n for n in self.names - self.known if not _HARMLESS.match(n))
        if extra:
            more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
            raise CheckpointError(
                f"the checkpoint holds {extra[0]}{more}, unknown to {self.checkpoint.config.architecture}"
            )
        sizes = {
            name: self.checkpoint.num_bytes(name) * place.numel() / math.prod(self.checkpoint.shape(name))
            for name, (place, _, _) in self.places.items()
        }
        total = round(sum(sizes.values()))
        chunks = []
        for name, (place, _, _) in self.places.items():
            step = max(1, _CHUNK // max(1, place[0].numel()))
            chunks += [(name, start, min(start + step, len(place))) for start in range(0, len(place), step)]

        def fill(chunk: tuple[str, int, int]) -> float:
            name, start, stop = chunk
            place, part, columns = self.places[name]
            rows = slice(part.start + start, part.start + stop)
            if columns is None:
                place[start:stop] = self.checkpoint.read(name, rows)
            else:
                place[start:stop] = self.checkpoint.read(name, rows, columns.slice)
            return sizes[name] * (stop - start) / len(place)

        done = 0.0
        # Dequantizing is numpy's work, which lets go of the interpreter lock.
        with ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="load") as pool:
            for num_bytes in pool.map(fill, chunks):
                done += num_bytes
                if progress:
                    progress(round(done), total)
