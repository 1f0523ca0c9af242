"""Files that clients leave with the server, in a folder: those of batches, in and out. Each tenant has its own.

    FOLDER/<tenant>/files/<id>.data     the bytes
    FOLDER/<tenant>/files/<id>.json     what it is; written last, so a file without it was never finished

Several processes may use one folder. All calls block on the disk: they are for threads.
"""

import hashlib
import json
import os
import re
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ...scheduler.errors import ConfigError, InvalidRequest

_UNFINISHED_SECONDS = 3600.0  # a file that was begun so long ago and has no description will get none
_PIECE = 1 << 20


class NoSuchObject(InvalidRequest):
    status = 404


@dataclass(frozen=True)
class FileOptions:
    """Where files are kept, and how much of what."""

    path: str
    max_file_bytes: int = 100 << 20
    max_tenant_bytes: int = 1 << 30  # of all that a tenant has
    max_tenant_files: int = 1000
    max_batch_requests: int = 50_000
    batch_concurrency: int = 16  # requests of one batch at a time
    max_running_batches: int = 4  # of an ingress


@dataclass(frozen=True, slots=True)
class StoredFile:
    id: str
    filename: str
    bytes: int
    purpose: str
    created_at: int


class FileStore:
    def __init__(self, options: FileOptions):
        self.options = options
        self.root = Path(options.path).expanduser()
        self._lock = threading.Lock()  # of the sums: another process may still add what this one does not know of

    def prepare(self) -> None:
        """Make sure that files can be kept. Raises `ConfigError`."""
        probe = self.root / f".{uuid.uuid4().hex}.probe"
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"files.path is {self.options.path!r}, where no files can be kept ({error.strerror}): it must be a "
                "folder that this server may make, or write in"
            ) from None

    def folder(self, tenant: str, kind: str = "files") -> Path:
        """A tenant's folder of this kind. Names are hashed: what a name has in it makes no path."""
        folder = self.root / hashlib.sha256(tenant.encode()).hexdigest()[:32] / kind
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return folder

    def add(self, tenant: str, filename: str, purpose: str, source: BinaryIO) -> StoredFile:
        """Keep a copy of `source` from where it stands. Raises `InvalidRequest` where it is too large, or all is."""
        with self._lock:
            room = self._room(tenant)
            data = self.folder(tenant) / f"{new_id('file')}.data"
            try:
                with data.open("xb") as out:
                    while piece := source.read(_PIECE):
                        out.write(piece)
                        if out.tell() > min(room, self.options.max_file_bytes):
                            raise InvalidRequest(
                                f"the file does not fit: one may have {self.options.max_file_bytes} bytes, and of all "
                                f"that you may keep {room} are left",
                                "file",
                            )
                return self._describe(tenant, data, filename, purpose)
            except BaseException:
                data.unlink(missing_ok=True)
                raise

    def adopt(self, tenant: str, path: Path, file_id: str, filename: str, purpose: str) -> StoredFile:
        """Make `path`, in the same file system, a file of the tenant's; done before, it is done."""
        data = self.folder(tenant) / f"{file_id}.data"
        if path.exists():
            os.replace(path, data)
        return self._describe(tenant, data, filename, purpose)

    def get(self, tenant: str, file_id: str) -> StoredFile:
        """Raises `NoSuchObject` where the tenant has none of this id."""
        described = None
        if re.fullmatch("file-[0-9a-f]{32}", file_id):
            described = read_json(self.folder(tenant) / f"{file_id}.json")
        if described is None:
            raise NoSuchObject(f"there is no file {file_id[:64]!r}", "id")
        return StoredFile(**described)

    def path(self, tenant: str, file_id: str) -> Path:
        """Where its bytes are."""
        return self.folder(tenant) / f"{self.get(tenant, file_id).id}.data"

    def delete(self, tenant: str, file_id: str) -> None:
        path = self.path(tenant, file_id)
        path.with_suffix(".json").unlink(missing_ok=True)
        path.unlink(missing_ok=True)

    def all_of(self, tenant: str) -> list[StoredFile]:
        """Newest first."""
        described = [read_json(path) for path in self.folder(tenant).glob("file-*.json")]
        return sorted((StoredFile(**d) for d in described if d), key=lambda f: (f.created_at, f.id), reverse=True)

    def used_bytes(self, tenant: str) -> int:
        return sum(f.bytes for f in self.all_of(tenant))

    def _room(self, tenant: str) -> int:
        self._remove_unfinished(tenant)
        files = self.all_of(tenant)
        if len(files) >= self.options.max_tenant_files:
            raise InvalidRequest(
                f"you keep {len(files)} files, and may have no more: delete some (DELETE /v1/files/ID)", "file"
            )
        return self.options.max_tenant_bytes - sum(f.bytes for f in files)

    def _remove_unfinished(self, tenant: str) -> None:
        """What an upload has left behind that ended with its process."""
        for data in self.folder(tenant).glob("file-*.data"):
            if not data.with_suffix(".json").exists() and time.time() - data.stat().st_mtime > _UNFINISHED_SECONDS:
                data.unlink(missing_ok=True)

    def _describe(self, tenant: str, data: Path, filename: str, purpose: str) -> StoredFile:
        stored = StoredFile(data.stem, filename, data.stat().st_size, purpose, int(time.time()))
        write_json(data.with_suffix(".json"), asdict(stored))
        return stored


def new_id(kind: str) -> str:
    return f"{kind}{'_' if kind == 'batch' else '-'}{uuid.uuid4().hex}"


def read_json(path: Path) -> dict[str, Any] | None:
    """None where there is no such file."""
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    """In one piece: whoever reads it finds what was there or what is there now."""
    new = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.new")
    try:
        with new.open("w") as out:
            json.dump(content, out)
            out.flush()
            os.fsync(out.fileno())
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
