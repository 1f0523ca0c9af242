"""Runs batches: a file of requests, a line each, answered when there is room, into a file of answers.

A batch is run by one process, which holds its lock. Answers are appended as they come; a process that starts, or finds
a batch that nobody runs any more, reads what is there and goes on with the rest. So a request whose answer was not
written before a crash is run again, and none is answered twice.
"""

import asyncio
import errno
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from ...scheduler.errors import DeadlineUnmeetable, EngineDead, InvalidRequest, Overloaded, ShuttingDown
from ...scheduler.request import Request, SequenceOutput
from ...scheduler.tenants import Tenant
from .batch_store import Batch, BatchLock, BatchStore
from .endpoints import answer
from .engine_client import EngineClient, ServedModel
from .file_store import NoSuchObject
from .protocol import error_envelope
from .tenancy import current_tenant
from .transport import as_public, parse_json

logger = logging.getLogger(__name__)

_SCAN_SECONDS = 5.0  # until a batch is noticed that another process left behind
_WATCH_SECONDS = 1.0  # until a cancellation is noticed, and a batch's counts are written
_MAX_ERRORS = 10  # of a file's lines that are named
_MAX_CUSTOM_ID = 512  # characters
_LEAST_ROOM = 64 << 20  # bytes of the disk, without which nothing is answered that could perhaps not be written
_MAX_ATTEMPTS = 10  # of a request that finds no worker group
_BACKOFF_SECONDS = 1.0, 60.0  # between them: at first, at most


class BackgroundEngine:
    """An `EngineClient` that asks for everything in the background: all that clients wait for goes first."""

    def __init__(self, engine: EngineClient):
        self._engine = engine

    async def generate(self, request: Request) -> AsyncGenerator[SequenceOutput, None]:
        async with aclosing(self._engine.generate(replace(request, background=True))) as outputs:
            async for output in outputs:
                yield output


class BatchRunner:
    """Lives on one event loop. `models` gives those that the current tenant may use; `tenant` None for one that may
    not call any more."""

    def __init__(
        self,
        store: BatchStore,
        engine: EngineClient,
        models: Callable[[], Mapping[str, ServedModel]],
        tenant: Callable[[str], Tenant | None],
        max_line_bytes: int,
    ):
        self.store = store
        self.engine = BackgroundEngine(engine)
        self.models, self.tenant, self.max_line_bytes = models, tenant, max_line_bytes
        self._running: dict[str, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._scanner = asyncio.create_task(self._scan_for_ever())

    def wake(self) -> None:
        """There is a new batch."""
        self._wake.set()

    async def close(self) -> None:
        """Stop where it stands; whoever comes next goes on from there."""
        tasks = [self._scanner, *self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _scan_for_ever(self) -> None:
        while True:
            try:
                await self._scan()
            except Exception:
                logger.exception("the batches could not be read")
            try:
                async with asyncio.timeout(_SCAN_SECONDS):  # `wait_for` of Python 3.11 may swallow a cancellation
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()

    async def _scan(self) -> None:
        for batch in await asyncio.to_thread(self.store.unfinished):
            if len(self._running) >= self.store.files.options.max_running_batches:
                return
            if batch.id in self._running:
                continue
            lock = await asyncio.to_thread(self.store.lock, batch)
            if lock is not None:
                task = self._running[batch.id] = asyncio.create_task(self._run(batch, lock))
                task.add_done_callback(partial(self._ended, batch.id))

    def _ended(self, batch_id: str, task: asyncio.Task) -> None:
        del self._running[batch_id]
        self._wake.set()

    async def _run(self, batch: Batch, lock: BatchLock) -> None:
        over = False
        try:
            batch = await asyncio.to_thread(self.store.get, batch.tenant, batch.id)  # it may have ended meanwhile
            if not batch.over:
                tenant = self.tenant(batch.tenant)
                if tenant is not None:
                    current_tenant.set(tenant)
                await _Run(self, batch).to_the_end(allowed=tenant is not None)
            over = True
        except Exception:
            logger.exception("batch %s stopped; it is tried again", batch.id)
            await asyncio.sleep(_SCAN_SECONDS)
        finally:
            lock.release(remove=over)


class _Run:
    """One batch in this process."""

    def __init__(self, runner: BatchRunner, batch: Batch):
        self.runner, self.store, self.batch = runner, runner.store, batch
        self.done: set[str] = set()  # custom ids that have their line
        self._writing = asyncio.Lock()
        self._reading = asyncio.Lock()

    async def to_the_end(self, allowed: bool) -> None:
        batch, store = self.batch, self.store
        ending = batch.ending
        if batch.status != "finalizing":
            try:
                path = await asyncio.to_thread(store.files.path, batch.tenant, batch.input_file_id)
                errors, total = await asyncio.to_thread(self._validate, path)
            except NoSuchObject:
                errors, total = [_error("file_missing", "the input file is not there any more", None)], 0
            if not allowed:
                errors = [_error("no_such_tenant", "who made the batch may not call any more", None)]
            if errors and not batch.in_progress_at:
                await self._save(status="failed", errors=tuple(errors), failed_at=_now())
                await asyncio.to_thread(store.clean, self.batch)
                return
            await asyncio.to_thread(self._take_up)
            if errors:  # what has been answered by then is the tenant's
                await self._save(errors=tuple(errors))
                await self._finalize("failed")
                return
            await self._save(
                status="in_progress",
                total=total,
                in_progress_at=batch.in_progress_at or _now(),
                cancelling_at=None,
            )
            cancelled = await asyncio.to_thread(store.is_cancelled, self.batch)
            ending = "cancelled" if cancelled else await self._answer_all(path)
        await self._finalize(ending)

    # -- before -------------------------------------------------------------------------------------------------------

    def _validate(self, path: Path) -> tuple[list[dict[str, Any]], int]:
        """What is wrong with the file, and how many requests it has."""
        errors: list[dict[str, Any]] = []
        seen: set[str] = set()
        most = self.store.files.options.max_batch_requests
        with path.open("rb") as lines:
            for number, line in self._lines(lines):
                try:
                    custom_id = _envelope(line, self.batch.endpoint, self.runner.max_line_bytes)["custom_id"]
                    if custom_id in seen:
                        raise InvalidRequest("another line has the same custom_id", "custom_id")
                    seen.add(custom_id)
                except InvalidRequest as error:
                    errors.append(_error("invalid_line", error.message, number, error.param))
                if len(seen) > most:
                    errors = [_error("too_many_requests", f"a batch has at most {most} requests", number)]
                if len(errors) >= _MAX_ERRORS or len(seen) > most:
                    break
        if not errors and not seen:
            errors = [_error("empty_file", "the input file has no requests", None)]
        return errors, len(seen)

    def _lines(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """Lines with something in them, by number; of one that is too long, enough to see that it is."""
        number = 0
        while line := file.readline(self.runner.max_line_bytes + 2):
            number += 1
            while not line.endswith(b"\n") and (rest := file.readline(1 << 20)):
                if rest.endswith(b"\n"):
                    break
            if line.strip():
                yield number, line

    def _take_up(self) -> None:
        """Find what a process before this one has answered; a line that it did not finish is cut off.

        Raises `OSError` where there is no room for more.
        """
        completed, failed = (self._read_done(path) for path in self._paths())
        self.batch = replace(self.batch, completed=completed, failed=failed)
        if shutil.disk_usage(self._paths()[0].parent).free < _LEAST_ROOM:
            raise OSError(errno.ENOSPC, "no room for answers")

    def _paths(self) -> tuple[Path, Path]:
        return self.store.output(self.batch), self.store.errors(self.batch)

    def _read_done(self, path: Path) -> int:
        count = 0
        with path.open("a+b") as file:
            file.seek(0)
            end = 0
            for line in file:
                if not line.endswith(b"\n"):
                    break
                end += len(line)
                count += 1
                self.done.add(json.loads(line)["custom_id"])
            file.truncate(end)
        return count

    # -- on the way ---------------------------------------------------------------------------------------------------

    async def _answer_all(self, path: Path) -> str:
        """Answer what has no answer yet. Returns the status with which the batch ends."""
        with path.open("rb") as file:
            lines = self._lines(file)
            workers = [
                asyncio.create_task(self._work(lines)) for _ in range(self.store.files.options.batch_concurrency)
            ]
            try:
                while True:
                    done, pending = await asyncio.wait(workers, timeout=_WATCH_SECONDS)
                    for task in done:
                        task.result()
                    if not pending:
                        return "completed"
                    if await asyncio.to_thread(self.store.is_cancelled, self.batch):
                        return "cancelled"
                    if _now() >= self.batch.expires_at:
                        return "expired"
                    if await asyncio.to_thread(self._is_full):
                        why = "the answers do not fit into what you may keep; delete some files"
                        self.batch = replace(self.batch, errors=(_error("storage_full", why, None),))
                        return "failed"
                    await self._save()
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
                async with self._writing:  # and with it all lines that were on their way to the disk
                    pass

    def _is_full(self) -> bool:
        mine = sum(path.stat().st_size for path in self._paths())
        files = self.store.files
        return mine + files.used_bytes(self.batch.tenant) > files.options.max_tenant_bytes

    async def _work(self, lines: Iterator[tuple[int, bytes]]) -> None:
        while True:
            async with self._reading:
                number, line = await asyncio.to_thread(next, lines, (0, b""))
            if not number:
                return
            request = _envelope(line, self.batch.endpoint, self.runner.max_line_bytes)
            if request["custom_id"] not in self.done:
                status, content = await self._answer(request["body"])
                await asyncio.shield(self._write(request["custom_id"], status, content))  # all of it or nothing

    async def _answer(self, body: dict[str, Any]) -> tuple[int, bytes]:
        """Status and body; what could be otherwise a little later is tried again."""
        wait, longest = _BACKOFF_SECONDS
        attempts = 0
        while True:
            try:
                if body.get("stream"):
                    raise InvalidRequest("a request of a batch cannot be streamed", "stream")
                response = await answer(
                    self.batch.endpoint, body, self.runner.models(), self.runner.engine, _stays_for_ever
                )
                return response.status_code, bytes(response.body)
            except DeadlineUnmeetable as error:  # later it would be as late
                return _failure(error)
            except Overloaded as error:
                await asyncio.sleep(min(longest, max(wait, error.retry_after)))
            except Exception as error:
                attempts += not isinstance(error, ShuttingDown)  # whoever comes next answers it
                if not isinstance(error, EngineDead) or attempts == _MAX_ATTEMPTS:
                    return _failure(error)
                await asyncio.sleep(wait)
            wait = min(longest, 2 * wait)

    async def _write(self, custom_id: str, status: int, content: bytes) -> None:
        name = json.dumps(custom_id)
        line = (
            f'{{"id": "batch_req_{uuid.uuid4().hex}", "custom_id": {name}, "response": {{"status_code": {status}, '
            f'"request_id": "req_{uuid.uuid4().hex}", "body": {content.decode()}}}, "error": null}}\n'
        )
        right = status == 200
        async with self._writing:
            await asyncio.to_thread(_append, self._paths()[not right], line)
            self.done.add(custom_id)
            self.batch = replace(
                self.batch, completed=self.batch.completed + right, failed=self.batch.failed + (not right)
            )

    async def _save(self, **changes: Any) -> None:
        self.batch = replace(self.batch, **changes)
        await asyncio.to_thread(self.store.save, self.batch)

    # -- after --------------------------------------------------------------------------------------------------------

    async def _finalize(self, ending: str) -> None:
        """Give the answers to the tenant as files. Every part of it may be done again after a crash."""
        batch = self.batch
        if batch.status != "finalizing":
            if ending == "expired":
                await asyncio.to_thread(self._name_the_rest)
            output, errors = (path.stat().st_size > 0 for path in self._paths())
            await self._save(
                status="finalizing",
                ending=ending,
                finalizing_at=_now(),
                cancelling_at=_now() if ending == "cancelled" else None,
                output_file_id=f"file-{uuid.uuid4().hex}" if output else None,
                error_file_id=f"file-{uuid.uuid4().hex}" if errors else None,
            )
        await asyncio.to_thread(self._hand_over)
        await self._save(**{"status": ending, f"{ending}_at": _now()})
        await asyncio.to_thread(self.store.clean, self.batch)

    def _name_the_rest(self) -> None:
        """Lines for requests that were not answered in time."""
        why = {"code": "batch_expired", "message": "the completion window was over before this request was answered"}
        files = self.store.files
        count = 0
        try:
            path = files.path(self.batch.tenant, self.batch.input_file_id)
        except NoSuchObject:
            return  # they were in it
        with path.open("rb") as file:
            for _, line in self._lines(file):
                custom_id = _envelope(line, self.batch.endpoint, self.runner.max_line_bytes)["custom_id"]
                if custom_id not in self.done:
                    entry = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": None}
                    _append(self._paths()[1], json.dumps({**entry, "error": why}) + "\n")
                    count += 1
        self.batch = replace(self.batch, failed=self.batch.failed + count)

    def _hand_over(self) -> None:
        batch, files = self.batch, self.store.files
        output, errors = self._paths()
        if batch.output_file_id:
            files.adopt(batch.tenant, output, batch.output_file_id, f"{batch.id}_output.jsonl", "batch_output")
        if batch.error_file_id:
            files.adopt(batch.tenant, errors, batch.error_file_id, f"{batch.id}_error.jsonl", "batch_output")


def _envelope(line: bytes, endpoint: str, max_bytes: int) -> dict[str, Any]:
    """A line's custom_id and body. Raises `InvalidRequest`; what is wrong with the body itself shows when it is run."""
    if len(line) > max_bytes:
        raise InvalidRequest(f"the line is longer than {max_bytes} bytes")
    try:
        request = parse_json(line.strip())
    except InvalidRequest as error:
        raise InvalidRequest(error.message.replace("the body", "the line", 1), error.param) from None
    if not isinstance(request, dict):
        raise InvalidRequest("the line must be a JSON object")
    custom_id = request.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_CUSTOM_ID:
        raise InvalidRequest(f"custom_id must be a string of 1 to {_MAX_CUSTOM_ID} characters", "custom_id")
    if request.get("method") != "POST":
        raise InvalidRequest("method must be POST", "method")
    if request.get("url") != endpoint:
        raise InvalidRequest(f"url must be the batch's endpoint, {endpoint}", "url")
    if not isinstance(request.get("body"), dict):
        raise InvalidRequest("body must be a JSON object", "body")
    return {"custom_id": custom_id, "body": request["body"]}


def _error(code: str, message: str, line: int | None, param: str | None = None) -> dict[str, Any]:
    return {"code": code, "message": message[:500], "param": param, "line": line}


def _failure(error: Exception) -> tuple[int, bytes]:
    """Status and body."""
    public = as_public(error)
    return public.status, json.dumps(error_envelope(public)).encode()


def _append(path: Path, line: str) -> None:
    """In one write: a crash leaves at most one line that is cut, the last, and a full disk none."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    before = os.fstat(descriptor).st_size
    try:
        data = memoryview(line.encode())
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        os.ftruncate(descriptor, before)
        raise
    finally:
        os.close(descriptor)


async def _stays_for_ever() -> Any:
    """A client that never leaves."""
    await asyncio.Event().wait()


def _now() -> int:
    return int(time.time())
