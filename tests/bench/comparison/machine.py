"""What the machine gives at this moment: memory bandwidth and bf16 arithmetic, by a native loop (machine.cpp).

Both change by the minute on a shared host, so they are read beside each measurement.
"""

import ctypes
import hashlib
import statistics
import subprocess
import tempfile
from pathlib import Path

from pagedray.kernels.cpu import library

_SOURCE = Path(__file__).parent / "machine.cpp"
_BUFFER = 1 << 30  # bytes: more than the caches that this machine's share of the host can keep
_PASSES = 5
_ROUNDS = {"amx": 1_000_000, "avx512": 3_000_000, "avx2": 6_000_000}  # some 0.1 s each
_BUILD_SECONDS = 60.0


class Machine:
    """`threads`: as many as the contestants have."""

    def __init__(self, threads: int):
        self.threads = threads
        self.tier = library.available_tiers()[0]
        self._functions = ctypes.CDLL(str(_build(self.tier)))
        self._functions.allocate.restype = ctypes.c_void_p
        self._functions.read_rate.restype = ctypes.c_double
        self._functions.matrix_rate.restype = ctypes.c_double

    def bandwidth(self) -> float:
        """Bytes read from memory a second: the median of some passes over a buffer that no cache holds."""
        size = ctypes.c_size_t(_BUFFER)
        memory = ctypes.c_void_p(self._functions.allocate(size))
        if not memory:
            raise MemoryError(f"no {_BUFFER >> 20} MiB to measure the memory with")
        try:
            return statistics.median(self._functions.read_rate(memory, size, self.threads) for _ in range(_PASSES))
        finally:
            self._functions.release(memory, size)

    def matrix_rate(self) -> float:
        """bf16 operations a second with the instructions that PagedRay's kernels use here (fp32 where only AVX2 is)."""
        rounds = ctypes.c_int64(_ROUNDS.get(self.tier, 1))
        return statistics.median(self._functions.matrix_rate(rounds, self.threads) for _ in range(_PASSES))


def _build(tier: str) -> Path:
    flags = ["-std=c++17", "-O3", "-fPIC", "-pthread", "-shared", *library.TIERS[tier][1]]
    digest = hashlib.sha256(_SOURCE.read_bytes() + repr(flags).encode()).hexdigest()[:16]
    path = library.cache_folder() / f"bench-{digest}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder) / path.name
            subprocess.run(["g++", *flags, "-o", built, _SOURCE], check=True, timeout=_BUILD_SECONDS)
            built.replace(path)
    return path
