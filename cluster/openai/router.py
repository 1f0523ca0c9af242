"""The HTTP application: routes, and every answer that is no success in OpenAI's envelope."""

from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ...scheduler.errors import PagedRayError
from ...scheduler.tenants import RateLimits, Tenant, TenantDirectory
from .chat import chat_completions
from .completions import completions
from .engine_client import EngineClient, ServedModel
from .protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    ModelCard,
    ModelList,
    ResponsesRequest,
    error_envelope,
    resolve_model,
)
from .responses import responses
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
) -> FastAPI:
    """The OpenAI-compatible API over `engine`.

    `models` is asked at each request, so models may come and go. `health` raises a `PagedRayError` where the service
    could not answer now; `metrics` gives Prometheus's text format. Who calls is in `tenancy.current_tenant`; `limits`
    gives what is left to a tenant.

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

    @app.post("/v1/chat/completions")
    async def create_chat_completion(request: Request) -> Response:
        raw = await read_json(request, max_body_bytes)
        body = ChatCompletionRequest.parse(raw)
        return await chat_completions(body, resolve_model(body.model, models()), engine, request.receive)

    @app.post("/v1/completions")
    async def create_completion(request: Request) -> Response:
        raw = await read_json(request, max_body_bytes)
        body = CompletionRequest.parse(raw)
        return await completions(body, resolve_model(body.model, models()), engine, request.receive)

    @app.post("/v1/responses")
    async def create_response(request: Request) -> Response:
        body = ResponsesRequest.parse(await read_json(request, max_body_bytes))
        return await responses(body, resolve_model(body.model, models()), engine, request.receive)

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
        await health()
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def read_metrics() -> Response:
        return Response(await metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version")
    async def read_version() -> Response:
        return JSONResponse({"version": version("pagedray")})

    return app
