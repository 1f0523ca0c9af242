"""POST /v1/chat/completions."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from fastapi import Response
from starlette.types import Receive

from ...scheduler.errors import InvalidRequest
from ...scheduler.request import TokenLogprobs
from ..text.tokenizer import Tokenizer
from .engine_client import EngineClient, ServedModel
from .generation import Choice, Generation
from .protocol import AssistantMessage, ChatChoice, ChatCompletion, ChatCompletionRequest, finite
from .reply import Parts, ReplyReader, marks_are_special, reply_reader
from .transport import EventStream, json_response, off_loop, until_disconnect

REASONING = ("reasoning", "reasoning_content")  # vLLM's name for it, and its older one


async def chat_completions(
    body: ChatCompletionRequest, model: ServedModel, engine: EngineClient, receive: Receive
) -> Response:
    """Answer a conversation. Raises `InvalidRequest` before anything is submitted to the engine."""
    call_id, created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
    generation, readers = await start_chat(body, model, engine, call_id)
    want_logprobs = body.num_logprobs() is not None
    if body.stream:
        head = {"id": call_id, "object": "chat.completion.chunk", "created": created, "model": model.id}
        return EventStream(_events(generation, readers, head, model.tokenizer, body))
    choices = await until_disconnect(receive, _collect(generation, readers, model.tokenizer, want_logprobs))
    return json_response(
        ChatCompletion(id=call_id, created=created, model=model.id, choices=choices, usage=generation.usage())
    )


async def start_chat(
    body: ChatCompletionRequest, model: ServedModel, engine: EngineClient, call_id: str
) -> tuple[Generation, list[ReplyReader]]:
    """The choices of a chat, ready to run, and who reads each. Raises `InvalidRequest`."""
    prompt = await prompt_token_ids(body, model)
    if (form := body.form()) is not None:
        await asyncio.to_thread(form.check)
    sampling = body.sampling(model, body.draw_seed(), len(prompt), "messages", form)
    if body.effective_tool_choice == "auto" and model.tool_call_parser is None:
        raise InvalidRequest(
            f"{model.id} has no known way to call tools by itself: set tool_choice to none, required or a function, "
            "or let the operator set tool_call_parser",
            "tools",
        )
    if marks_are_special(model):
        sampling = sampling.clone(skip_special_tokens=False)
    requests = [body.request(call_id, index, prompt, sampling, model) for index in range(sampling.n)]
    generation = Generation(engine, model.tokenizer, requests, choices_per_prompt=sampling.n)
    return generation, [reply_reader(body, model, prompt, form is not None) for _ in requests]


async def prompt_token_ids(body: ChatCompletionRequest, model: ServedModel) -> tuple[int, ...]:
    messages = [{"role": m.role, "content": m.content, **(m.model_extra or {})} for m in body.messages]
    generation_prompt = body.add_generation_prompt
    if generation_prompt is None:
        generation_prompt = not body.continue_final_message
    render = partial(
        model.tokenizer.apply_chat_template,
        messages,
        tools=_template_tools(body),
        add_generation_prompt=generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        **body.template_variables,
    )
    return tuple(await off_loop(sum(len(str(m.content)) for m in body.messages), render))


def _template_tools(body: ChatCompletionRequest) -> list[dict[str, Any]] | None:
    if body.effective_tool_choice == "none":
        return None
    return [tool.model_dump(exclude_none=True) for tool in body.tools or ()]


async def _collect(
    generation: Generation, readers: Sequence[ReplyReader], tokenizer: Tokenizer, want_logprobs: bool
) -> list[ChatChoice]:
    choices = [Choice([], []) for _ in readers]
    async with aclosing(generation.deltas()) as deltas:
        async for delta in deltas:
            choices[delta.index].take(delta)
            if want_logprobs:
                choices[delta.index].logprobs += _token_logprobs(delta.token_ids, delta.logprobs, tokenizer)
    return [
        ChatChoice(
            index=index,
            message=_message(reader.read("".join(choice.text), final=True)),
            logprobs={"content": choice.logprobs, "refusal": None} if want_logprobs else None,
            finish_reason=_finish_reason(choice.finish_reason, reader),
            stop_reason=choice.stop_reason,
        )
        for index, (choice, reader) in enumerate(zip(choices, readers, strict=True))
    ]


def _message(parts: Parts) -> AssistantMessage:
    more: dict[str, Any] = dict.fromkeys(REASONING, parts.reasoning) if parts.reasoning else {}
    if parts.tool_calls:
        more["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in parts.tool_calls]
    return AssistantMessage(content=parts.content or (None if parts.tool_calls else ""), **more)


def _finish_reason(reason: str, reader: ReplyReader) -> str:
    return "tool_calls" if reason == "stop" and reader.num_calls else reason


async def _events(
    generation: Generation,
    readers: Sequence[ReplyReader],
    head: dict[str, Any],
    tokenizer: Tokenizer,
    body: ChatCompletionRequest,
) -> AsyncGenerator[str, None]:
    """One chunk for what comes together; none while text is held back. The first chunk of a choice carries the role.

    JSON is in ASCII: some clients split lines at U+2028 or U+0085.
    """
    start = f'data: {json.dumps(head)[:-1]}, "choices": ['
    end = '], "usage": null}\n\n' if body.include_usage else "]}\n\n"
    want_logprobs, continuous_usage = body.num_logprobs() is not None, body.continuous_usage
    role = ['"role": "assistant", '] * len(generation)
    waiting: list[list[str]] = [[] for _ in role]  # logprobs of tokens whose text is held back
    write = _LogprobWriter(tokenizer).write
    async with aclosing(generation.deltas()) as deltas:
        async for delta in deltas:
            i = delta.index
            if want_logprobs:
                waiting[i] += map(write, delta.token_ids, delta.logprobs)
            reason = delta.finish_reason
            parts = readers[i].read(delta.text, final=reason is not None)
            if not parts and reason is None:
                continue
            content = role[i] + _delta(parts, first=bool(role[i]))
            role[i] = ""
            logprobs = "null"
            if waiting[i]:
                logprobs = f'{{"content": [{", ".join(waiting[i])}], "refusal": null}}'
                waiting[i] = []
            stop = f', "stop_reason": {json.dumps(delta.stop_reason)}' if reason else ""
            reason = reason and _finish_reason(reason, readers[i])
            if continuous_usage:
                end = f'], "usage": {generation.usage().model_dump_json()}}}\n\n'
            yield (
                f'{start}{{"index": {i}, "delta": {{{content}}}, "logprobs": {logprobs}, '
                f'"finish_reason": {json.dumps(reason)}{stop}}}{end}'
            )
    if body.include_usage:
        yield f'{start}], "usage": {generation.usage().model_dump_json()}}}\n\n'
    yield "data: [DONE]\n\n"


def _delta(parts: Parts, first: bool) -> str:
    """The inside of a JSON object, after the role."""
    fields = [f'"{name}": {json.dumps(parts.reasoning)}' for name in REASONING if parts.reasoning]
    if parts.content or (first and not parts):
        fields.append(f'"content": {json.dumps(parts.content)}')
    if parts.tool_calls:
        fields.append(f'"tool_calls": {json.dumps(parts.tool_calls)}')
    return ", ".join(fields)


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


class _LogprobWriter:
    """Writes in JSON what `_token_logprobs` gives, for streams. What it writes of a token is kept for the next time."""

    _known: WeakKeyDictionary[Tokenizer, dict[int, tuple[str, str]]] = WeakKeyDictionary()

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._parts = self._known.setdefault(tokenizer, {})

    def write(self, token_id: int, at: TokenLogprobs) -> str:
        top = "}, ".join([self._open(t, value) for t, value in at.top])
        return f'{self._open(token_id, at.logprob)}, "top_logprobs": [{top}{"}" if top else ""}]}}'

    def _open(self, token_id: int, logprob: float) -> str:
        """An object that is not closed yet."""
        parts = self._parts.get(token_id)
        if parts is None:
            token = _token_logprob(token_id, 0.0, self._tokenizer)
            text, raw = json.dumps(token["token"]), json.dumps(token["bytes"])
            parts = self._parts[token_id] = f'{{"token": {text}, "logprob": ', f', "bytes": {raw}'
        return f"{parts[0]}{finite(logprob)!r}{parts[1]}"
