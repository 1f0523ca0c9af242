"""Finds the native library for this CPU, and builds it from `src/` with g++ the first time: a few seconds.

The library is a plain C ABI, so it depends on no version of torch or Python. It lies in a per-user cache folder under a
name made of its sources, compiler, flags and tier: whatever changes, another name, and nothing stale is ever loaded.
"""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..cache import cache_root

logger = logging.getLogger("pagedray.kernels")

SOURCES = Path(__file__).parent / "src"

_AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni", "fma", "bmi2"})
_AVX512_FLAGS = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mprefer-vector-width=512")

# Best first: what /proc/cpuinfo must list, and the compiler's flags. "scalar" is what every CPU of the kind can do.
TIERS: dict[str, tuple[frozenset[str], tuple[str, ...]]] = {
    "amx": (_AVX512 | {"amx_tile", "amx_bf16"}, (*_AVX512_FLAGS, "-mamx-tile", "-mamx-bf16")),
    "avx512": (_AVX512, _AVX512_FLAGS),
    "avx2": (frozenset({"avx2", "fma", "f16c", "bmi2"}), ("-mavx2", "-mfma", "-mf16c", "-mbmi2")),
    "scalar": (frozenset(), ()),
}

FLAGS = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wall")
BUILD_SECONDS = 120.0  # a compiler that takes longer is taken for broken


class BuildError(Exception):
    """The compiler does not take the sources, or not for that tier; the message says why."""


@dataclass(frozen=True)
class NativeLibrary:
    tier: str
    path: Path
    functions: ctypes.CDLL  # which releases the GIL around each call


def load(tier: str | None = None) -> NativeLibrary | None:
    """The library for `tier` (by default the best that this CPU has and the compiler knows), or None, with one warning,
    where there is none.

    Raises ValueError where `tier` is no tier's name or this CPU does not have it.
    """
    available = available_tiers()
    if tier is not None and tier not in available:
        raise ValueError(f"PAGEDRAY_KERNELS={tier}: this CPU has {', '.join(available)}; `reference` forces PyTorch")
    first_error: Exception | None = None
    for candidate in (tier,) if tier else available:
        try:
            path = build(candidate)
            library = NativeLibrary(candidate, path, ctypes.CDLL(str(path)))
        except BuildError as error:  # an old compiler does not know every CPU
            first_error = first_error or error
        except OSError as error:
            first_error = first_error or error
            break
        else:
            if first_error is not None:
                logger.warning("cpu kernels: %s instead of %s, slower: %s", candidate, available[0], first_error)
            return library
    logger.warning("cpu kernels: PyTorch reference, many times slower than native ones: %s", first_error)
    return None


@functools.cache
def available_tiers() -> tuple[str, ...]:
    """The tiers this CPU and its operating system can run, best first."""
    flags: frozenset[str] = frozenset()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                flags = frozenset(line.split(":", 1)[1].split())
                break
    tiers = [tier for tier, (needed, _) in TIERS.items() if needed <= flags]
    if "amx" in tiers and not _may_use_amx():
        tiers.remove("amx")
    return tuple(tiers)


def _may_use_amx() -> bool:
    """Linux hands out the 8 kB of tile registers only to a process that asks: arch_prctl(ARCH_REQ_XCOMP_PERM, 18)."""
    return ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0


def cache_folder() -> Path:
    return cache_root() / "kernels"


def build(tier: str) -> Path:
    """The path of the library for `tier`, built if it is not in the cache. Raises BuildError or OSError."""
    compiler = compiler_command()
    sources = sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")))
    flags = (*FLAGS, *TIERS[tier][1])
    digest = hashlib.sha256(repr((_version(compiler), platform.machine(), flags)).encode())
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    path = cache_folder() / f"{tier}-{digest.hexdigest()[:24]}.so"
    if _is_whole(path):
        return path
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _locked(path.with_suffix(".lock")):
        if not _is_whole(path):
            print(f"pagedray: compiling the kernels for this CPU ({tier}), once", file=sys.stderr, flush=True)
            _compile((*compiler, *flags), [s for s in sources if s.suffix == ".cpp"], path)
    return path


def compiler_command() -> tuple[str, ...]:
    """The command of $CXX, which may have arguments ("ccache g++"), else of g++. Raises FileNotFoundError."""
    command, *arguments = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    compiler = shutil.which(command)
    if compiler is None:
        raise FileNotFoundError(
            f"no C++ compiler ({command}) on PATH: install g++ "
            "(Debian, Ubuntu: `apt install g++`; Fedora: `dnf install gcc-c++`), or name another in CXX"
        )
    return compiler, *arguments


def _version(compiler: tuple[str, ...]) -> str:
    command = [*compiler, "--version"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"`{' '.join(command)}` took longer than {BUILD_SECONDS:.0f} s") from None
    if done.returncode != 0:
        raise BuildError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def _compile(compiler: tuple[str, ...], sources: list[Path], path: Path) -> None:
    """Each source by a process of its own, side by side; the library appears under its name only when it is whole."""
    deadline = time.monotonic() + BUILD_SECONDS
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
        objects = [str(Path(folder) / f"{source.stem}.o") for source in sources]
        commands = [[*compiler, "-c", str(source), "-o", out] for source, out in zip(sources, objects, strict=True)]
        _run(commands, deadline)
        library = Path(folder) / path.name
        _run([[*compiler, "-shared", "-o", str(library), *objects]], deadline)
        with library.open("rb+") as file:
            file.write(hashlib.sha256(file.read()).digest())  # what follows an ELF file's end is ignored
        os.replace(library, path)


def _is_whole(path: Path) -> bool:
    """Whether the library is there and ends in the checksum of the rest. Loading a cut one would kill the process."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _run(commands: list[list[str]], deadline: float) -> None:
    processes: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            processes.append(
                subprocess.Popen(
                    command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
                )
            )
        for command, process in zip(commands, processes, strict=True):
            _, errors = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
            if process.returncode != 0:
                raise BuildError(f"`{' '.join(command)}` failed:\n{errors.strip()[-2000:]}")
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"{commands[0][0]} took longer than {BUILD_SECONDS:.0f} s") from error
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lets one process build while others wait. It only saves work: should the wait end, building twice is harmless."""
    deadline = time.monotonic() + 2 * BUILD_SECONDS
    with path.open("w") as file:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:  # a file system without locks
                break
        yield  # closing the file frees the lock, as does the death of its process
