"""/v1/files: upload, list, look at, fetch and delete. A tenant sees its own."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from python_multipart.exceptions import FormParserError
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from ...scheduler.errors import InvalidRequest
from .file_store import FileStore, StoredFile
from .protocol import short
from .tenancy import caller
from .transport import BodyTooLarge, ClientLeft, UnsupportedMediaType

_MAX_FIELDS = 16  # of a form, beside the file
_MAX_FIELD_BYTES = 64 << 10
_MAX_FILENAME = 255  # characters
_PURPOSES = ("batch",)


def add_file_routes(app: FastAPI, store: FileStore) -> None:
    @app.post("/v1/files")
    async def upload_file(request: Request) -> Response:
        form = await _read_form(request, store.options.max_file_bytes)
        try:
            file, purpose = form.get("file"), form.get("purpose")
            if not isinstance(file, UploadFile):
                raise InvalidRequest("file must be a file, as a part of the form with a filename", "file")
            if purpose not in _PURPOSES:
                raise InvalidRequest(f"purpose must be {' or '.join(_PURPOSES)}", "purpose")
            name = (file.filename or "file")[:_MAX_FILENAME]
            stored = await asyncio.to_thread(store.add, caller().name, name, purpose, file.file)
        finally:
            await form.close()
        return JSONResponse(_shown(stored))

    @app.get("/v1/files")
    async def list_files(request: Request) -> Response:
        files = await asyncio.to_thread(store.all_of, caller().name)
        if (purpose := request.query_params.get("purpose")) is not None:
            files = [f for f in files if f.purpose == purpose]
        if (order := request.query_params.get("order", "desc")) not in ("asc", "desc"):
            raise InvalidRequest(f"order must be asc or desc, not {short(order)!r}", "order")
        if order == "asc":
            files.reverse()
        return page([_shown(f) for f in files], request, default=10_000, most=10_000)

    @app.get("/v1/files/{file_id}")
    async def retrieve_file(file_id: str) -> Response:
        return JSONResponse(_shown(await asyncio.to_thread(store.get, caller().name, file_id)))

    @app.get("/v1/files/{file_id}/content")
    async def download_file(file_id: str) -> Response:
        path = await asyncio.to_thread(store.path, caller().name, file_id)
        return FileResponse(path, media_type="application/octet-stream")

    @app.delete("/v1/files/{file_id}")
    async def delete_file(file_id: str) -> Response:
        await asyncio.to_thread(store.delete, caller().name, file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})


def page(items: Sequence[dict[str, Any]], request: Request, default: int, most: int) -> Response:
    """A list as OpenAI cuts it: `limit` of them, from the one behind `after` on. Raises `InvalidRequest`."""
    limit, after = request.query_params.get("limit", str(default)), request.query_params.get("after")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 9 and 1 <= int(limit) <= most):
        raise InvalidRequest(f"limit must be an integer from 1 to {most}, not {short(limit)!r}", "limit")
    first = 0
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise InvalidRequest(f"after must be the id of one of the list, not {short(after)!r}", "after")
        first = ids.index(after) + 1
    shown = items[first : first + int(limit)]
    return JSONResponse(
        {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": first + len(shown) < len(items),
        }
    )


def _shown(file: StoredFile) -> dict[str, Any]:
    """The API's object."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }


async def _read_form(request: Request, max_bytes: int) -> FormData:
    """A form with at most one file, which lies on disk if it is large. Raises `InvalidRequest` (400, 413, 415)."""
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "multipart/form-data":
        raise UnsupportedMediaType(f"Content-Type must be multipart/form-data, not {short(content_type)!r}")
    most = max_bytes + _MAX_FIELDS * _MAX_FIELD_BYTES
    try:
        async with aclosing(_body(request, most)) as body:
            parser = MultiPartParser(
                request.headers, body, max_files=1, max_fields=_MAX_FIELDS, max_part_size=_MAX_FIELD_BYTES
            )
            return await parser.parse()
    except MultiPartException as error:
        raise InvalidRequest(f"the form cannot be read: {short(error.message)}") from None
    except (FormParserError, UnicodeError, LookupError, ValueError):
        raise InvalidRequest("the form cannot be read") from None


async def _body(request: Request, max_bytes: int) -> AsyncGenerator[bytes, None]:
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > max_bytes:
            raise BodyTooLarge(f"the body is larger than {max_bytes} bytes, the most this server reads")
        if chunk:
            yield chunk
        if not message.get("more_body", False):
            return
