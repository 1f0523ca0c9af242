"""Memory for weights."""

import contextlib
import mmap
import threading

import torch
from torch import Tensor


class Arena:
    """Hands out pieces of large chunks, so that weights, most of them smaller than a huge page, share huge pages.

    A chunk is a mapping of its own: malloc may serve even a large request from memory that a loader's temporaries left
    behind, which is already backed by small pages and stays so whatever is advised. A chunk's memory is taken as it is
    written, and returned when no tensor points into it any more.
    """

    CHUNK_BYTES = 64 << 20
    ALIGNMENT = 64

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)
        self._lock = threading.Lock()

    def empty(self, num_bytes: int) -> Tensor:
        size = -(-num_bytes // self.ALIGNMENT) * self.ALIGNMENT
        if size >= self.CHUNK_BYTES // 2:  # a chunk of its own, so that little of one is left unused
            return self._map(size)[:num_bytes]
        with self._lock:
            if size > len(self._rest):
                self._rest = self._map(self.CHUNK_BYTES)
            piece, self._rest = self._rest[:size], self._rest[size:]
        return piece[:num_bytes]

    @staticmethod
    def _map(size: int) -> Tensor:
        chunk = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                chunk.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(chunk, dtype=torch.uint8)  # keeps the mapping
