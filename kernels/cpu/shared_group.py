"""Ranks of one host that add up their parts in shared pages: microseconds where a socket takes half a millisecond.

The pages have no name: whoever makes them hands on the file descriptor, and they are gone with the last process that
maps them, however it ends.
"""

import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..reference import RankLost
from .library import NativeLibrary

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_ABORTED = -1


class _State(ctypes.Structure):
    """`SharedGroup` of src/shared_group.h."""

    _fields_ = (
        ("pages", ctypes.c_void_p),
        ("slot_bytes", ctypes.c_int64),
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("round", ctypes.c_uint64),
        ("timeout", ctypes.c_double),
    )


class SharedGroup:
    """This rank's end of the group. One thread calls it; `abort` may come from any.

    All ranks make the same calls in the same order. Sums are taken in the order of the ranks, whoever comes first.
    Raises `RankLost` where the group was aborted, or a rank did not come within `timeout` seconds.
    """

    def __init__(self, native: NativeLibrary, file: int, rank: int, size: int, slot_bytes: int, timeout: float = 60.0):
        self._functions = native.functions
        for name, signature in (
            ("all_reduce", "pippqqi"),
            ("gather", "pppqpi"),
        ):
            function = getattr(self._functions, f"pagedray_{name}")
            function.argtypes = [
                {"p": ctypes.c_void_p, "i": ctypes.c_int32, "q": ctypes.c_int64}[code] for code in signature
            ]
            function.restype = ctypes.c_int32
        self._pages = mmap.mmap(file, _num_bytes(native, size, slot_bytes))
        self._keeps = (ctypes.c_char * len(self._pages)).from_buffer(self._pages)
        self.rank, self.size, self.slot_bytes, self.timeout = rank, size, slot_bytes, timeout
        self._state = _State(ctypes.addressof(self._keeps), slot_bytes, rank, size, 0, timeout)
        self.pointer = ctypes.addressof(self._state)

    @staticmethod
    def create(native: NativeLibrary, size: int, slot_bytes: int) -> int:
        """A file descriptor of fresh pages for `size` ranks, for each of them to map."""
        file = os.memfd_create("pagedray-group", os.MFD_CLOEXEC)
        os.ftruncate(file, _num_bytes(native, size, slot_bytes))
        return file

    def __call__(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """part fp32 [T, H] -> the sum over the ranks, rounded to dtype."""
        part = part.contiguous()
        out = torch.empty_like(part, dtype=dtype)
        self.check(
            self._functions.pagedray_all_reduce(
                self.pointer,
                _DTYPES[dtype],
                out.data_ptr(),
                part.data_ptr(),
                *part.shape,
                torch.get_num_threads(),
            )
        )
        return out

    def gather(self, part: Tensor, columns: Sequence[int]) -> Tensor | None:
        """part fp32 [n, columns[rank]] -> on rank 0 all of them side by side, None elsewhere."""
        part = part.contiguous()
        out = part.new_empty(len(part), sum(columns)) if self.rank == 0 else None
        self.check(
            self._functions.pagedray_gather(
                self.pointer,
                None if out is None else out.data_ptr(),
                part.data_ptr(),
                len(part),
                (ctypes.c_int64 * self.size)(*columns),
                torch.get_num_threads(),
            )
        )
        return out

    def abort(self) -> None:
        """Make every wait of every rank of this host raise, now and later."""
        self._functions.pagedray_shared_group_abort(ctypes.c_void_p(self.pointer))

    def check(self, status: int) -> None:
        """Raise what a native call's status says."""
        if status == _ABORTED:
            raise RankLost("the group was aborted while ranks waited for each other")
        if status:
            raise RankLost(f"tensor-parallel rank {status - 1} did not come within {self.timeout:.0f} s")


def _num_bytes(native: NativeLibrary, size: int, slot_bytes: int) -> int:
    function: Any = native.functions.pagedray_shared_group_bytes
    function.argtypes, function.restype = [ctypes.c_int64, ctypes.c_int64], ctypes.c_int64
    return function(size, slot_bytes)
