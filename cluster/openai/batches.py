"""/v1/batches: make, list, look at and cancel. `batch_runner` runs them."""

import asyncio
import time
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from ...scheduler.errors import InvalidRequest
from .batch_runner import BatchRunner
from .endpoints import ENDPOINTS
from .files import page
from .protocol import Body, short
from .tenancy import caller
from .transport import read_json

_WINDOW_SECONDS = 24 * 3600
_MAX_METADATA = 16  # pairs, as OpenAI has it
_MAX_METADATA_TEXT = 512  # characters


class BatchRequest(Body):
    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, str], Field(max_length=_MAX_METADATA)] | None = None

    def _check_fields(self) -> None:
        if self.endpoint not in ENDPOINTS:
            raise InvalidRequest(
                f"endpoint must be one of {', '.join(ENDPOINTS)}, not {short(self.endpoint)!r}", "endpoint"
            )
        for key, value in (self.metadata or {}).items():
            if max(len(key), len(value)) > _MAX_METADATA_TEXT:
                raise InvalidRequest(
                    f"metadata may have {_MAX_METADATA_TEXT} characters in a key or a value", "metadata"
                )


def add_batch_routes(app: FastAPI, runner: BatchRunner, max_body_bytes: int) -> None:
    store = runner.store

    @app.post("/v1/batches")
    async def create_batch(request: Request) -> Response:
        body = BatchRequest.parse(await read_json(request, max_body_bytes))
        tenant, now = caller().name, int(time.time())
        try:
            await asyncio.to_thread(store.files.get, tenant, body.input_file_id)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, "input_file_id") from None
        fields: dict[str, Any] = {
            **body.model_dump(include={"input_file_id", "endpoint", "completion_window", "metadata"}),
            "created_at": now,
            "expires_at": now + _WINDOW_SECONDS,
        }
        batch = await asyncio.to_thread(store.create, tenant, fields)
        runner.wake()
        return JSONResponse(batch.shown())

    @app.get("/v1/batches")
    async def list_batches(request: Request) -> Response:
        batches = await asyncio.to_thread(store.all_of, caller().name)
        return page([b.shown() for b in batches], request, default=20, most=100)

    @app.get("/v1/batches/{batch_id}")
    async def retrieve_batch(batch_id: str) -> Response:
        return JSONResponse((await asyncio.to_thread(store.get, caller().name, batch_id)).shown())

    @app.post("/v1/batches/{batch_id}/cancel")
    async def cancel_batch(batch_id: str) -> Response:
        batch = await asyncio.to_thread(store.cancel, caller().name, batch_id)
        return JSONResponse(batch.shown())
