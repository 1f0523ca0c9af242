"""POST /v1/chat/completions."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import Response
from starlette.types import Receive

from ...scheduler.request import TokenLogprobs
from ..text.tokenizer import Tokenizer
from .engine_client import EngineClient, ServedModel
from .generation import Choice, Generation
from .protocol import AssistantMessage, ChatChoice, ChatCompletion, ChatCompletionRequest, finite
from .transport import EventStream, json_response, off_loop, until_disconnect


async def chat_completions(
    body: ChatCompletionRequest, model: ServedModel, engine: EngineClient, receive: Receive
) -> Response:
    """Answer a conversation. Raises `InvalidRequest` before anything is submitted to the engine."""
    call_id, created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
    prompt = await prompt_token_ids(body, model)
    form = await asyncio.to_thread(body.form)
    sampling = body.sampling(model, body.draw_seed(), len(prompt), "messages", form)
    requests = [body.request(call_id, index, prompt, sampling, model) for index in range(sampling.n)]
    generation = Generation(engine, model.tokenizer, requests, choices_per_prompt=sampling.n)
    want_logprobs = sampling.logprobs is not None
    if body.stream:
        head = {"id": call_id, "object": "chat.completion.chunk", "created": created, "model": model.id}
        return EventStream(_events(generation, head, model.tokenizer, want_logprobs, body.include_usage))
    choices = await until_disconnect(receive, _collect(generation, model.tokenizer, want_logprobs))
    return json_response(
        ChatCompletion(id=call_id, created=created, model=model.id, choices=choices, usage=generation.usage())
    )


async def prompt_token_ids(body: ChatCompletionRequest, model: ServedModel) -> tuple[int, ...]:
    messages = [{"role": m.role, "content": m.content, **(m.model_extra or {})} for m in body.messages]
    generation_prompt = body.add_generation_prompt
    if generation_prompt is None:
        generation_prompt = not body.continue_final_message
    render = partial(
        model.tokenizer.apply_chat_template,
        messages,
        add_generation_prompt=generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        **(body.chat_template_kwargs or {}),
    )
    return tuple(await off_loop(sum(len(str(m.content)) for m in body.messages), render))


async def _collect(generation: Generation, tokenizer: Tokenizer, want_logprobs: bool) -> list[ChatChoice]:
    choices = [Choice([], []) for _ in range(len(generation))]
    async with aclosing(generation.deltas()) as deltas:
        async for delta in deltas:
            choices[delta.index].take(delta)
            if want_logprobs:
                choices[delta.index].logprobs += _token_logprobs(delta.token_ids, delta.logprobs, tokenizer)
    return [
        ChatChoice(
            index=index,
            message=AssistantMessage(content="".join(choice.text)),
            logprobs={"content": choice.logprobs, "refusal": None} if want_logprobs else None,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )
        for index, choice in enumerate(choices)
    ]


async def _events(
    generation: Generation, head: dict[str, Any], tokenizer: Tokenizer, want_logprobs: bool, include_usage: bool
) -> AsyncGenerator[str, None]:
    """One chunk for what comes together; none while text is held back. The first chunk of a choice carries the role.

    JSON is in ASCII: some clients split lines at U+2028 or U+0085.
    """
    start = f'data: {json.dumps(head)[:-1]}, "choices": ['
    end = '], "usage": null}\n\n' if include_usage else "]}\n\n"
    role = ['"role": "assistant", '] * len(generation)
    waiting: list[list[Any]] = [[] for _ in role]  # logprobs of tokens whose text is held back
    async with aclosing(generation.deltas()) as deltas:
        async for delta in deltas:
            i = delta.index
            if want_logprobs:
                waiting[i] += _token_logprobs(delta.token_ids, delta.logprobs, tokenizer)
            if not delta.text and delta.finish_reason is None:
                continue
            content = f'{role[i]}"content": {json.dumps(delta.text)}' if delta.text or role[i] else ""
            role[i] = ""
            logprobs = "null"
            if waiting[i]:
                logprobs = json.dumps({"content": waiting[i], "refusal": None})
                waiting[i] = []
            stop = f', "stop_reason": {json.dumps(delta.stop_reason)}' if delta.finish_reason else ""
            yield (
                f'{start}{{"index": {i}, "delta": {{{content}}}, "logprobs": {logprobs}, '
                f'"finish_reason": {json.dumps(delta.finish_reason)}{stop}}}{end}'
            )
    if include_usage:
        yield f'{start}], "usage": {generation.usage().model_dump_json()}}}\n\n'
    yield "data: [DONE]\n\n"


def _token_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    return [
        _token_logprob(token_id, at.logprob, tokenizer)
        | {"top_logprobs": [_token_logprob(t, value, tokenizer) for t, value in at.top]}
        for token_id, at in zip(token_ids, logprobs, strict=True)
    ]


def _token_logprob(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }
