"""Measures what a layer, the embedding and the head take here, so that pipeline stages can be balanced by time."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from ..kernels import ops
from . import kv_cache
from .checkpoint.load import Checkpoint, column_group, load_weights
from .config import EngineConfig
from .models.decoder import Decoder
from .partition import StageCosts, partition

_COLD_BYTES = 48 << 20  # weights to go through, as on disk, so that they come from memory as they do in a step
_TOKENS = 16  # sequences that a step decodes
_CONTEXT = 64
_ROUNDS = 5


def measure(checkpoint: Checkpoint, engine: EngineConfig, dtype: torch.dtype) -> StageCosts:
    """Seconds of each for a decode step of a few sequences, on the first rank's part of some layers and of the head.

    These are read from the checkpoint, for what a weight costs depends on its quantization; it takes about a second.
    What ranks wait for each other is not in it: every stage has that alike.
    """
    config = checkpoint.config
    first = partition(config, engine, column_group=column_group(checkpoint, engine.quantization))[0]

    def that_many(prefix: str, of: int) -> int:
        """How many of the `of` alike parts of a tensor or layer make up the bytes."""
        size = sum(checkpoint.num_bytes(name) for name in checkpoint.names() if name.startswith(prefix))
        return max(1, min(of, _COLD_BYTES * of // max(1, size)))

    num_layers = max(1, min(config.num_hidden_layers, that_many("model.layers.", config.num_hidden_layers)))
    vocab = min(len(first.vocab), that_many("model.embed_tokens.", config.vocab_size))
    sample = replace(
        first, pp_size=1, layers=replace(first.layers, stop=num_layers), vocab=replace(first.vocab, stop=vocab)
    )
    weights = load_weights(checkpoint, dtype, None, sample, engine.quantization)
    model = Decoder(config, weights, _CONTEXT, sample)
    block = engine.block_size
    per_sequence = -(-_CONTEXT // block)
    kept_in = torch.int8 if engine.kv_cache_dtype == "int8" else dtype  # fp8 is for GPUs, and this runs on the CPU
    caches = kv_cache.allocate(config, _TOKENS * per_sequence, block, kept_in, sample)
    tables = torch.arange(_TOKENS * per_sequence, dtype=torch.int32).view(_TOKENS, per_sequence)
    positions = torch.full((_TOKENS,), _CONTEXT - 1, dtype=torch.int64)
    metadata = ops.AttentionMetadata(
        query_start_loc=torch.arange(_TOKENS + 1, dtype=torch.int32),
        seq_lens=torch.full((_TOKENS,), _CONTEXT, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=tables[:, (_CONTEXT - 1) // block].long() * block + (_CONTEXT - 1) % block,
        max_query_len=1,
        max_seq_len=_CONTEXT,
    )
    ids = torch.zeros(_TOKENS, dtype=torch.int64)
    with torch.inference_mode():
        hidden = model.embed(ids)
        layers = _seconds(lambda: model.forward(hidden.clone(), positions, caches, metadata))
        head = _seconds(lambda: ops.greedy(model.logits(hidden)))
        embedding = _seconds(lambda: model.embed(ids))
    # What the head's rank does beyond its own rows, bringing logits together and choosing, grows with the vocabulary.
    return StageCosts(layers / num_layers, embedding, head * len(first.vocab) / vocab)


def _seconds(call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
