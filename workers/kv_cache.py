"""The rank's KV tensors, one pair a layer, paged: `[num_blocks, num_kv_heads, block_size, ops.kv_row_size]`."""

import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..kernels import ops
from ..scheduler.errors import ConfigError
from .config import EngineConfig, ModelConfig
from .limits import available_memory
from .partition import Shard, whole_model

logger = logging.getLogger(__name__)

_SHARE_OF_FREE_MEMORY = 0.25
_CPU = torch.device("cpu")


def allocate(
    config: ModelConfig,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    shard: Shard | None = None,
    device: torch.device = _CPU,
) -> list[tuple[Tensor, Tensor]]:
    """K and V of every layer of the rank, kept in `dtype`, zeroed; a CPU's on pages that come as they are written."""
    shard = shard or whole_model(config)
    shape = (num_blocks, len(shard.kv_heads), block_size, ops.kv_row_size(config.head_dim, dtype))
    num_bytes = int(np.prod(shape)) * dtype.itemsize

    def lazily_zeroed() -> Tensor:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)

    return [(lazily_zeroed(), lazily_zeroed()) for _ in range(len(shard.layers))]


def bytes_per_token(config: ModelConfig, dtype: torch.dtype, shard: Shard | None = None) -> int:
    """What a token takes on the rank that `shard` describes, in caches of `dtype`."""
    shard = shard or whole_model(config)
    return 2 * len(shard.layers) * len(shard.kv_heads) * ops.kv_row_size(config.head_dim, dtype) * dtype.itemsize


def plan_capacity(
    config: ModelConfig,
    engine: EngineConfig,
    dtype: torch.dtype,
    shards: Sequence[Shard] = (),
    on_host: int = 1,
    budget: int | None = None,
) -> tuple[int, int]:
    """Decide (num_blocks, max_model_len) as far as this rank can: the group has the least of all ranks'. `dtype` is the
    caches'.

    Without a setting the pool takes `budget` bytes, which a GPU knows, or else a quarter of the memory that is free, or
    less where `max_num_seqs` sequences of full length need less; `on_host` ranks share it. `shards` are the group's,
    this rank's first.
    Raises `ConfigError` where the settings contradict each other or the model.
    """
    shards = shards or (whole_model(config),)
    wanted = engine.context_length(config)
    if engine.num_kv_blocks and engine.kv_cache_memory:
        raise ConfigError("num_kv_blocks and kv_cache_memory both say how large the KV pool is; give one")
    if engine.num_kv_blocks:
        num_blocks = engine.num_kv_blocks
    else:
        useful = engine.max_num_seqs * -(-wanted // engine.block_size)
        if engine.kv_cache_memory:  # of the whole group
            memory, holders = engine.kv_cache_memory, shards
        else:
            free_share = int(available_memory() * _SHARE_OF_FREE_MEMORY) // on_host
            memory, holders = free_share if budget is None else budget, shards[:1]
        block_bytes = sum(bytes_per_token(config, dtype, shard) for shard in holders) * engine.block_size
        num_blocks = min(memory // block_bytes, useful)
        if num_blocks < 1:
            raise ConfigError(
                f"kv_cache_memory holds no block; one of {engine.block_size} tokens takes {block_bytes} bytes"
            )
    capacity = num_blocks * engine.block_size
    if wanted > capacity:
        if engine.max_model_len:
            raise ConfigError(
                f"max_model_len is {wanted} tokens but the KV pool holds {capacity} ({num_blocks} blocks of "
                f"{engine.block_size}); raise kv_cache_memory or lower max_model_len"
            )
        logger.warning("max_model_len is %d, not the model's %d: that is what the KV pool holds", capacity, wanted)
    return num_blocks, min(wanted, capacity)
