"""Finds a model's files, and fills `DecoderWeights` from them; refuses what does not fit, naming the tensor."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ...scheduler.errors import CheckpointError
from ..config import ModelConfig
from ..models.weights import DecoderWeights, LayerWeights, Linear
from .gguf import GGUFCheckpoint
from .safetensors import SafetensorsCheckpoint

_WHOLE = slice(None)
_CHUNK = 4 << 20  # elements read, and dequantized, at a time by a thread: 16 MB of fp32
_HUB_FILES = ("*.json", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken")

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


def locate(model: str, weights: bool = True) -> Path:
    """The folder or .gguf file that `model` means, fetched from the hub where it is a hub id.

    `weights=False` fetches only what a tokenizer needs.
    """
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        raise CheckpointError(f"{path} is not a .gguf file; name a folder, a .gguf file or a hub id")
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if (path / "config.json").exists() or (not weights and (path / "tokenizer.json").exists()):
            return path
        if len(ggufs) == 1:
            return ggufs[0]
        if ggufs:
            raise CheckpointError(
                f"{path} holds {len(ggufs)} .gguf files; name one: {', '.join(p.name for p in ggufs)}"
            )
        raise CheckpointError(f"{path} has neither a config.json nor a .gguf file")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) or model.startswith(".") or model.endswith(".gguf"):
        raise CheckpointError(f"{model} does not exist; name a folder, a .gguf file or a hub id such as org/name")
    return _download(model, weights)


def _download(model: str, weights: bool) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and not needed for local models

    try:
        patterns = [*_HUB_FILES, *(["*.safetensors"] if weights else [])]
        return Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:  # its tree of errors is wide: HTTP, file system, validation, offline mode
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{model} is no folder or file here, and the Hugging Face hub did not give it: {reason} "
            "(offline? download it elsewhere and name the folder)"
        ) from error


def load_weights(checkpoint: Checkpoint, dtype: torch.dtype, progress: Progress | None = None) -> DecoderWeights:
    """Read every tensor into its place among the fused weights, in chunks: no tensor is held twice.

    `progress` is called with (bytes done, bytes in all), bytes as they are on disk.
    Raises `CheckpointError` naming a tensor that is missing, unknown or of the wrong shape, before anything is read.
    """
    config = checkpoint.config
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    filler = _Filler(checkpoint, dtype)

    def linear(prefix: str, parts: dict[str, int], columns: int, bias: bool) -> Linear:
        """Projections stacked by rows, `parts` giving each one's."""
        rows = {f"{prefix}.{name}": size for name, size in parts.items()}
        weight = filler.tensor({f"{name}.weight": size for name, size in rows.items()}, columns)
        return Linear(weight, filler.tensor({f"{name}.bias": n for name, n in rows.items()}) if bias else None)

    def layer(index: int) -> LayerWeights:
        at = f"model.layers.{index}"
        return LayerWeights(
            input_norm=filler.tensor({f"{at}.input_layernorm.weight": hidden}),
            qkv=linear(f"{at}.self_attn", {"q_proj": q, "k_proj": kv, "v_proj": kv}, hidden, config.qkv_bias),
            o=linear(f"{at}.self_attn", {"o_proj": hidden}, q, config.o_bias),
            post_attention_norm=filler.tensor({f"{at}.post_attention_layernorm.weight": hidden}),
            gate_up=linear(f"{at}.mlp", {"gate_proj": inner, "up_proj": inner}, hidden, config.mlp_bias),
            down=linear(f"{at}.mlp", {"down_proj": hidden}, inner, config.mlp_bias),
        )

    # `filler` only allocates and notes here: nothing is read until the whole checkpoint is known to fit.
    embed_tokens = filler.tensor({"model.embed_tokens.weight": config.vocab_size}, hidden)
    layers = [layer(index) for index in range(config.num_hidden_layers)]
    norm = filler.tensor({"model.norm.weight": hidden})
    lm_head = embed_tokens
    if not config.tie_word_embeddings or "lm_head.weight" in checkpoint.names():
        lm_head = filler.tensor({"lm_head.weight": config.vocab_size}, hidden)
    filler.run(progress)
    # Some checkpoints of tied models hold the head a second time. One that differs is used, as transformers does.
    if config.tie_word_embeddings and lm_head is not embed_tokens and torch.equal(lm_head, embed_tokens):
        lm_head = embed_tokens
    return DecoderWeights(embed_tokens, layers, norm, lm_head)


class _Filler:
    """Notes which tensors go where, checks that they are all the checkpoint has, then reads them."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype):
        self.checkpoint, self.dtype = checkpoint, dtype
        self.names = checkpoint.names()
        self.places: dict[str, Tensor] = {}

    def tensor(self, rows: dict[str, int], columns: int | None = None) -> Tensor:
        """A new tensor [sum of rows, columns], or a vector; named tensors will fill it from top to bottom."""
        tail = () if columns is None else (columns,)
        for name, size in rows.items():
            if name not in self.names:
                raise CheckpointError(f"{name} is missing from the checkpoint")
            if self.checkpoint.shape(name) != (size, *tail):
                raise CheckpointError(
                    f"{name} has shape {list(self.checkpoint.shape(name))}; the configuration asks for {[size, *tail]}"
                )
        whole = torch.empty((sum(rows.values()), *tail), dtype=self.dtype)
        self.places.update(zip(rows, whole.split(list(rows.values())), strict=True))
        return whole

    def run(self, progress: Progress | None) -> None:
        extra = sorted(n for n in self.names - self.places.keys() if not _HARMLESS.match(n))
        if extra:
            more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
            raise CheckpointError(
                f"the checkpoint holds {extra[0]}{more}, unknown to {self.checkpoint.config.architecture}"
            )
        sizes = {name: self.checkpoint.num_bytes(name) for name in self.places}
        chunks = []
        for name, place in self.places.items():
            step = max(1, _CHUNK // max(1, place[0].numel()))
            chunks += [(name, start, min(start + step, len(place))) for start in range(0, len(place), step)]

        def fill(chunk: tuple[str, int, int]) -> float:
            name, start, stop = chunk
            self.places[name][start:stop] = self.checkpoint.read(name, slice(start, stop))
            return sizes[name] * (stop - start) / len(self.places[name])

        done = 0.0
        # Dequantizing is numpy's work, which lets go of the interpreter lock.
        with ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="load") as pool:
            for num_bytes in pool.map(fill, chunks):
                done += num_bytes
                if progress:
                    progress(round(done), sum(sizes.values()))
