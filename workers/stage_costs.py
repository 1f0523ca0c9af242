"""Measures what a layer, the embedding and the head take here, so that pipeline stages can be balanced by time."""

import statistics
import time
from collections.abc import Callable

import torch

from ..kernels import ops
from .config import EngineConfig, ModelConfig
from .models.decoder import Decoder
from .models.weights import DecoderWeights, LayerWeights, Linear
from .partition import Range, Shard, StageCosts, partition

_COLD_BYTES = 128 << 20  # weights to go through, so that they come from memory as they do in a step
_TOKENS = 16  # sequences that a step decodes
_CONTEXT = 64
_ROUNDS = 5


@torch.inference_mode()
def measure(config: ModelConfig, engine: EngineConfig, dtype: torch.dtype) -> StageCosts:
    """Seconds of each for a decode step of a few sequences, on blank weights of the first rank's shapes.

    Takes some tenths of a second. What ranks wait for each other is not in it: every stage has that alike.
    """
    first = partition(config, engine)[0]
    layer_bytes = (
        dtype.itemsize * config.hidden_size * (4 * len(first.heads) * config.head_dim + 3 * len(first.intermediate))
    )
    num_layers = max(1, min(config.num_hidden_layers, _COLD_BYTES // layer_bytes))
    vocab = min(len(first.vocab), max(1, _COLD_BYTES // (dtype.itemsize * config.hidden_size)))
    model = _blank(config, first, num_layers, vocab, dtype)
    block = engine.block_size
    per_sequence = -(-_CONTEXT // block)
    caches = [
        tuple(
            torch.zeros(_TOKENS * per_sequence, len(first.kv_heads), block, config.head_dim, dtype=dtype) for _ in "kv"
        )
        for _ in range(num_layers)
    ]
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
    hidden = model.embed(ids)
    layers = _seconds(lambda: model.forward(hidden.clone(), positions, caches, metadata))  # type: ignore[arg-type]
    head = _seconds(lambda: ops.greedy(model.logits(hidden)))
    # What the head's rank does beyond its own rows, bringing logits together and choosing, grows with the vocabulary.
    return StageCosts(layers / num_layers, _seconds(lambda: model.embed(ids)), head * len(first.vocab) / vocab)


def _seconds(call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _blank(config: ModelConfig, shard: Shard, num_layers: int, vocab: int, dtype: torch.dtype) -> Decoder:
    hidden, inner = config.hidden_size, len(shard.intermediate)
    q, kv = len(shard.heads) * config.head_dim, len(shard.kv_heads) * config.head_dim

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    layers = [
        LayerWeights(
            input_norm=zeros(hidden),
            qkv=Linear(zeros(q + 2 * kv, hidden)),
            o=Linear(zeros(hidden, q)),
            post_attention_norm=zeros(hidden),
            gate_up=Linear(zeros(2 * inner, hidden)),
            down=Linear(zeros(hidden, inner)),
        )
        for _ in range(num_layers)
    ]
    rows = zeros(vocab, hidden)
    alone = Shard(
        0,
        1,
        0,
        1,
        Range(0, num_layers, num_layers),
        shard.heads,
        shard.kv_heads,
        shard.intermediate,
        Range(0, vocab, vocab),
    )
    return Decoder(config, DecoderWeights(rows, layers, zeros(hidden), rows), _CONTEXT, alone)
