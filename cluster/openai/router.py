"""The HTTP application: routes, and every answer that is no success in OpenAI's envelope."""

from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ...scheduler.errors import PagedRayError
from ...scheduler.tenants import RateLimits, Tenant, TenantDirectory
from .batch_runner import BatchRunner
from .batches import add_batch_routes
from .endpoints import ENDPOINTS, answer
from .engine_client import EngineClient, ServedModel
from .files import add_file_routes
from .openapi import document
from .protocol import DetokenizeRequest, ModelCard, ModelList, error_envelope, resolve_model
from .tenancy import TenantGate
from .tokenize import detokenize, parse_tokenize, tokenize
from .transport import ErrorEnvelopes, json_response, read_json

__all__ = ["MAX_BODY_BYTES", "ServedModel", "build_app"]

MAX_BODY_BYTES = 16 * 2**20  # a million token ids fit


class _HTTPError(PagedRayError):
    """What the web framework refuses: an unknown path, a wrong method."""

    type = "invalid_request_error"
    code = None


def build_app(
    models: Callable[[], Mapping[str, ServedModel]],
    engine: EngineClient,
    health: Callable[[], Awaitable[Any]],
    metrics: Callable[[], Awaitable[bytes]],
    max_body_bytes: int = MAX_BODY_BYTES,
    tenants: TenantDirectory | None = None,
    limits: Callable[[Tenant], RateLimits | None] = lambda tenant: None,
    batches: BatchRunner | None = None,
) -> FastAPI:
    """The OpenAI-compatible API over `engine`.

    `models` is asked at each request, so models may come and go. `health` raises a `PagedRayError` where the service
    could not answer now, and may return more to say; `metrics` gives Prometheus's text format. Who calls is in
    `tenancy.current_tenant`; `limits` gives what is left to a tenant. Without `batches` there are neither files nor
    batches.

    A request without `model` goes to the only model that is served. An error before the first token has its own HTTP
    status, in a stream too; one after it is a stream's last event.
    """
    app = FastAPI(title="PagedRay", openapi_url=None, redirect_slashes=False)
    app.add_middleware(ErrorEnvelopes)
    app.add_middleware(TenantGate, directory=tenants or TenantDirectory(), limits=limits)  # outside of the other

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = f"{error.detail}: {request.method} {request.url.path[:200]}"
        return JSONResponse(error_envelope(_HTTPError(message)), error.status_code, error.headers)

    def add_endpoint(path: str) -> None:
        @app.post(path)
        async def create(request: Request) -> Response:
            return await answer(path, await read_json(request, max_body_bytes), models(), engine, request.receive)

    for path in ENDPOINTS:
        add_endpoint(path)

    @app.post("/tokenize")
    async def create_tokens(request: Request) -> Response:
        body = parse_tokenize(await read_json(request, max_body_bytes))
        return await tokenize(body, resolve_model(body.model, models()))

    @app.post("/detokenize")
    async def create_text(request: Request) -> Response:
        body = DetokenizeRequest.parse(await read_json(request, max_body_bytes))
        return await detokenize(body, resolve_model(body.model, models()))

    @app.get("/v1/models")
    async def list_models() -> Response:
        return json_response(ModelList(data=[ModelCard.of(m) for m in models().values()]))

    @app.get("/v1/models/{model:path}")
    async def retrieve_model(model: str) -> Response:
        return json_response(ModelCard.of(resolve_model(model, models())))

    @app.get("/health")
    @app.get("/ready")
    async def check_health() -> Response:
        return JSONResponse({"status": "ok", **(await health() or {})})

    @app.get("/metrics")
    async def read_metrics() -> Response:
        return Response(await metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version")
    async def read_version() -> Response:
        return JSONResponse({"version": version("pagedray")})

    @app.get("/openapi.json")
    async def read_document() -> Response:
        return JSONResponse(document({getattr(route, "path", "").replace(":path", "") for route in app.routes}))

    if batches is not None:
        add_file_routes(app, batches.store.files)
        add_batch_routes(app, batches, max_body_bytes)
    return app
