"""KV blocks on their way between ranks: packed into one array, checked, and unpacked by a rank with any other split.

Wire layout: `[num_layers, 2, num_kv_heads, num_blocks, block_size, row]`, K before V, of the layers and heads of the
rank that packed it, rows as its caches have them. What lies together is a unit: all blocks of one head of one layer, K
or V. A rank that holds other layers or heads takes the units that it needs, from one piece or several, and checks no
more than those.
"""

import ctypes
import hashlib
import zlib
from array import array
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels import ops
from ..scheduler.errors import KVTransferError
from .config import EngineConfig, ModelConfig
from .cuda import CopyStream
from .kv_piece import KVPiece, common
from .partition import Range, Shard, whole_model


def fingerprint(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, weights: str) -> str:
    """Equal for ranks whose blocks mean the same, however the model is split. `weights` tells those of one model from
    those of its next version at the same place.
    """
    kept = config.kv_cache_dtype, config.block_size
    text = repr((config.model, weights, config.quantization, kept, model, str(dtype)))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class KVPort:
    """A rank's KV tensors, for other ranks. Any thread may use it beside the one that computes: nobody writes blocks
    that are being packed, nobody reads those that are being unpacked. Whoever asks for either sees to that.

    Of a GPU's tensors the copies run beside its steps, through pinned memory; both calls return when theirs have ended.
    """

    def __init__(
        self,
        caches: Sequence[tuple[Tensor, Tensor]],
        fingerprint: str,
        config: ModelConfig,
        shard: Shard | None = None,
        copies: CopyStream | None = None,
    ):
        """`caches`: K and V of each of the rank's layers, `[num_blocks, num_kv_heads, block_size, row]`; those of a
        GPU have a `CopyStream`.
        """
        self.caches = caches
        self.fingerprint = fingerprint
        self.shard = shard or whole_model(config)
        self._device = caches[0][0].device
        self._copies = copies
        if copies is None and self._device.type == "cuda":
            self._copies = CopyStream(self._device)

    def pack(self, block_ids: Sequence[int]) -> tuple[KVPiece, np.ndarray]:
        """This rank's part of some blocks, as bytes in the wire layout."""
        first = self.caches[0][0]
        _, num_heads, block_size, row_size = first.shape
        ids = torch.tensor(block_ids, device=self._device)
        shape = (len(self.caches), 2, num_heads, len(block_ids), block_size, row_size)
        num_bytes, copies = int(np.prod(shape)) * first.element_size(), self._copies
        host = copies.host_bytes(num_bytes) if copies else torch.empty(num_bytes, dtype=torch.uint8)
        units = host.view(first.dtype).view(shape)
        crcs = array("I")
        if copies:
            with copies():
                run = torch.empty_like(units, device=self._device)
                for layer, pair in zip(run, self.caches, strict=True):
                    ops.gather_kv_blocks(layer, *pair, ids)
                units.copy_(run, non_blocking=True)
            crcs.extend(_crc(head) for layer in units for kv in layer for head in kv)  # the bytes are there only now
        else:
            for layer, pair in zip(units, self.caches, strict=True):
                ops.gather_kv_blocks(layer, *pair, ids)
                crcs.extend(_crc(head) for kv in layer for head in kv)  # while it is in the core's cache
        data = host.numpy()
        layers, heads = self.shard.layers, self.shard.kv_heads
        piece = KVPiece(
            self.fingerprint,
            str(first.dtype),
            (layers.start, layers.stop),
            (heads.start, heads.stop),
            len(block_ids),
            block_size,
            row_size,
            data.size,
            crcs.tobytes(),
        )
        return piece, data

    def unpack(self, pieces: Sequence[tuple[KVPiece, np.ndarray]], first: int, block_ids: Sequence[int]) -> None:
        """Write blocks `first`, `first + 1`, … of a run into `block_ids`. `pieces` are the parts of its ranks.

        Raises `KVTransferError` where they are of another model or shape, damaged, or lack something of this rank's.
        What has been written by then is undefined.
        """
        shard = self.shard
        missing = {(layer, head) for layer in _numbers(shard.layers) for head in _numbers(shard.kv_heads)}
        ids = torch.tensor(block_ids, device=self._device)
        for piece, data in pieces:
            units, crcs = self._open(piece, data, first, len(block_ids))
            heads = common(piece.kv_heads, shard.kv_heads)
            for layer in common(piece.layers, shard.layers):
                # Ranks beyond the number of heads share one: what has come once is not wanted again.
                wanted = [head for head in heads if (layer, head) in missing]
                if not wanted:
                    continue
                low, high = wanted[0] - piece.kv_heads[0], wanted[-1] + 1 - piece.kv_heads[0]
                source = units[layer - piece.layers[0], :, low:high]  # [2, heads, blocks, block_size, row]
                expected = crcs[layer - piece.layers[0], :, low:high].reshape(-1).tolist()
                if [_crc(head) for kv in source for head in kv] != expected:
                    raise KVTransferError(f"KV of layer {layer} is damaged: its checksum is another")
                values, pair = source[:, :, first : first + len(block_ids)], self.caches[layer - shard.layers.start]
                with self._copies() if self._copies else nullcontext():
                    run = self._copies.to_device(values) if self._copies else values
                    ops.scatter_kv_blocks(run, *pair, ids, wanted[0] - shard.kv_heads.start)
                missing.difference_update((layer, head) for head in wanted)
        if missing:
            layer, head = min(missing)
            raise KVTransferError(f"KV of layer {layer}, head {head} is in none of the {len(pieces)} pieces")

    def _open(self, piece: KVPiece, data: np.ndarray, first: int, count: int) -> tuple[Tensor, np.ndarray]:
        """A piece as a tensor in the wire layout, and its units' checksums `[num_layers, 2, num_kv_heads]`."""
        cache = self.caches[0][0]
        mine = (self.fingerprint, str(cache.dtype), *cache.shape[2:])
        theirs = (piece.fingerprint, piece.dtype, piece.block_size, piece.row_size)
        if mine != theirs:
            raise KVTransferError(f"KV is of another model, dtype or block size: {theirs}, here it is {mine}")
        shape = piece.shape
        num_bytes = int(np.prod(shape)) * cache.element_size()
        num_units = int(np.prod(shape[:3]))
        if data.dtype != np.uint8 or data.size != num_bytes or len(piece.checksums) != 4 * num_units:
            raise KVTransferError(f"KV of shape {shape} must have {num_bytes} bytes, not {data.size}")
        if not 0 <= first <= first + count <= piece.num_blocks:
            raise KVTransferError(f"blocks {first} to {first + count} of a run of {piece.num_blocks}")
        crcs = np.frombuffer(piece.checksums, np.uint32).reshape(shape[:3])
        return _tensor_over(np.ascontiguousarray(data)).view(cache.dtype).view(shape), crcs


def _crc(unit: Tensor) -> int:
    """unit [blocks, block_size, row], contiguous. Lets other threads run meanwhile."""
    data: Any = unit.reshape(-1).view(torch.uint8).numpy()
    return zlib.crc32(data)


def _tensor_over(data: np.ndarray) -> Tensor:
    """A tensor over bytes that may be read-only, as those in an object store are; nobody may write it."""
    if data.flags.writeable:
        return torch.from_numpy(data)
    memory: Any = (ctypes.c_uint8 * data.size).from_address(data.ctypes.data)
    memory.owner = data  # lives as long as the tensor
    return torch.frombuffer(memory, dtype=torch.uint8)


def _numbers(span: Range) -> range:
    return range(span.start, span.stop)
