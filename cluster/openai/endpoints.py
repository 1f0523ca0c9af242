"""The endpoints that run the model: their paths, what their bodies are, who answers."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import Response
from starlette.types import Receive

from .chat import chat_completions
from .completions import completions
from .embeddings import embeddings
from .engine_client import EngineClient, ServedModel
from .protocol import (
    Body,
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingRequest,
    ResponsesRequest,
    resolve_model,
)
from .responses import responses

Answer = Callable[[Any, ServedModel, EngineClient, Receive], Awaitable[Response]]

ENDPOINTS: Mapping[str, tuple[type[Body], Answer]] = {
    "/v1/chat/completions": (ChatCompletionRequest, chat_completions),
    "/v1/completions": (CompletionRequest, completions),
    "/v1/embeddings": (EmbeddingRequest, embeddings),
    "/v1/responses": (ResponsesRequest, responses),
}


async def answer(
    path: str, raw: Any, models: Mapping[str, ServedModel], engine: EngineClient, receive: Receive
) -> Response:
    """The answer to a parsed body. Raises `PagedRayError`s before anything is sent."""
    kind, respond = ENDPOINTS[path]
    body = kind.parse(raw)
    return await respond(body, resolve_model(body.model, models), engine, receive)
