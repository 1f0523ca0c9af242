"""POST /tokenize and /detokenize, with vLLM's fields: what a prompt becomes, without running it."""

from typing import Any

from fastapi import Response
from pydantic import BaseModel

from ...scheduler.errors import InvalidRequest
from .chat import prompt_token_ids as chat_token_ids
from .completions import prompt_token_ids
from .engine_client import ServedModel
from .protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, check_token_ids
from .transport import json_response, off_loop


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(BaseModel):
    prompt: str


def parse_tokenize(body: Any) -> ChatCompletionRequest | CompletionRequest:
    """A chat where there are `messages`, else a completion's one `prompt`. Raises `InvalidRequest`."""
    if isinstance(body, dict) and "messages" in body:
        return ChatCompletionRequest.parse(body)
    request = CompletionRequest.parse(body)
    if len(request.prompt) != 1 or not isinstance(request.prompt[0], str):
        raise InvalidRequest("prompt must be one string", "prompt")
    return request


async def tokenize(body: ChatCompletionRequest | CompletionRequest, model: ServedModel) -> Response:
    """The ids that the same fields give as a prompt of a chat or a completion."""
    if isinstance(body, ChatCompletionRequest):
        ids = await chat_token_ids(body, model)
    else:
        ids = await prompt_token_ids(body.prompt[0], body.add_special_tokens is not False, model, "prompt")
    texts = [model.tokenizer.token_text(i) for i in ids] if body.return_token_strs else None
    return json_response(Tokens(count=len(ids), max_model_len=model.max_model_len, tokens=list(ids), token_strs=texts))


async def detokenize(body: DetokenizeRequest, model: ServedModel) -> Response:
    """The text of ids, special tokens included."""
    check_token_ids("tokens", body.tokens, model)
    text = await off_loop(len(body.tokens), model.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return json_response(Text(prompt=text))
