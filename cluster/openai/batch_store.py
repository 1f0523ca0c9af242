"""What is known of batches, on disk, so that any ingress can show them, and one that starts can go on with them.

    FOLDER/<tenant>/batches/<id>.json       the batch
    FOLDER/<tenant>/batches/<id>.output     answers so far, a line each; at the end they become a file of the tenant's
    FOLDER/<tenant>/batches/<id>.errors     the same of what went wrong
    FOLDER/<tenant>/batches/<id>.cancel     there once somebody has cancelled it
    FOLDER/<tenant>/batches/<id>.lock       held (flock) by the process that runs it

All calls block on the disk: they are for threads.
"""

import fcntl
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ...scheduler.errors import InvalidRequest
from .file_store import FileStore, NoSuchObject, new_id, read_json, write_json

MAX_UNFINISHED = 32  # of a tenant
MAX_KEPT = 1000  # of a tenant; the oldest that are over are forgotten
OVER = frozenset({"completed", "failed", "expired", "cancelled"})


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch as OpenAI shows it, and whose it is. Times are in seconds since 1970; None: it has not come to that."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    status: str = "validating"
    errors: tuple[dict[str, Any], ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    ending: str = ""  # once it is finalizing: the status that it will have
    total: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def over(self) -> bool:
        return self.status in OVER

    def shown(self) -> dict[str, Any]:
        """The API's object."""
        shown = asdict(self)
        for name in ("tenant", "ending", "total", "completed", "failed", "errors"):
            del shown[name]
        counts = {"total": self.total, "completed": self.completed, "failed": self.failed}
        errors = {"object": "list", "data": list(self.errors)} if self.errors else None
        return {**shown, "object": "batch", "errors": errors, "request_counts": counts}


class BatchLock:
    """Shows that a process runs a batch. Ends with the process, and where nobody has it any more: whoever waited for it
    may have been cancelled meanwhile."""

    def __init__(self, path: Path, descriptor: int):
        self._path, self._descriptor = path, descriptor

    def release(self, remove: bool) -> None:
        if remove:
            self._path.unlink(missing_ok=True)
        self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    __del__ = _close


class BatchStore:
    def __init__(self, files: FileStore):
        self.files = files

    def create(self, tenant: str, fields: dict[str, Any]) -> Batch:
        """Raises `InvalidRequest` where the tenant has too many that are not over."""
        kept = self.all_of(tenant)
        if sum(not b.over for b in kept) >= MAX_UNFINISHED:
            raise InvalidRequest(f"{MAX_UNFINISHED} of your batches are not over; wait for one to end, or cancel one")
        for old in [b for b in kept if b.over][MAX_KEPT - 1 :]:
            self._path(old, "json").unlink(missing_ok=True)
        batch = Batch(new_id("batch"), tenant, **fields)
        self.save(batch)
        return batch

    def save(self, batch: Batch) -> None:
        write_json(self._path(batch, "json"), asdict(batch))

    def get(self, tenant: str, batch_id: str) -> Batch:
        """Raises `NoSuchObject` where the tenant has none of this id."""
        content = None
        if re.fullmatch("batch_[0-9a-f]{32}", batch_id):
            content = read_json(self.files.folder(tenant, "batches") / f"{batch_id}.json")
        if content is None:
            raise NoSuchObject(f"there is no batch {batch_id[:64]!r}", "id")
        return self._with_cancel(_batch(content))

    def all_of(self, tenant: str) -> list[Batch]:
        """Newest first."""
        batches = self._read(self.files.folder(tenant, "batches"))
        return sorted(batches, key=lambda b: (b.created_at, b.id), reverse=True)

    def unfinished(self) -> list[Batch]:
        """Of all tenants, oldest first."""
        if not self.files.root.is_dir():
            return []
        batches = [b for folder in self.files.root.glob("*/batches") for b in self._read(folder) if not b.over]
        return sorted(batches, key=lambda b: (b.created_at, b.id))

    def cancel(self, tenant: str, batch_id: str) -> Batch:
        """Whoever runs it will see. Raises `InvalidRequest` where it is over."""
        batch = self.get(tenant, batch_id)
        if batch.over:
            raise InvalidRequest(f"the batch is {batch.status}, so it cannot be cancelled", "id")
        self._path(batch, "cancel").touch()
        return self._with_cancel(batch)

    def is_cancelled(self, batch: Batch) -> bool:
        return self._path(batch, "cancel").exists()

    def output(self, batch: Batch) -> Path:
        return self._path(batch, "output")

    def errors(self, batch: Batch) -> Path:
        return self._path(batch, "errors")

    def lock(self, batch: Batch) -> BatchLock | None:
        """None where another process runs it."""
        path = self._path(batch, "lock")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        return BatchLock(path, descriptor)

    def clean(self, batch: Batch) -> None:
        """Take away what a batch that is over needs no more."""
        for kind in ("cancel", "output", "errors"):
            self._path(batch, kind).unlink(missing_ok=True)

    def _path(self, batch: Batch, kind: str) -> Path:
        return self.files.folder(batch.tenant, "batches") / f"{batch.id}.{kind}"

    def _read(self, folder: Path) -> Iterator[Batch]:
        for path in folder.glob("batch_*.json"):
            content = read_json(path)
            if content is not None:
                yield self._with_cancel(_batch(content))

    def _with_cancel(self, batch: Batch) -> Batch:
        path = self._path(batch, "cancel")
        if batch.over or batch.status == "finalizing" or not path.exists():
            return batch
        return replace(batch, status="cancelling", cancelling_at=int(path.stat().st_mtime))


def _batch(content: dict[str, Any]) -> Batch:
    return Batch(**{**content, "errors": tuple(content["errors"])})
