"""POST /v1/responses: a conversation in OpenAI's newer form, answered as a chat. Nothing is stored.

A request becomes the chat request that means the same, so both endpoints give the same tokens. The answer is a list of
items: reasoning, a message, calls of functions, in this order.
"""

import json
import re
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse
from starlette.types import Receive

from ...scheduler.errors import InvalidRequest
from .chat import start_chat
from .engine_client import EngineClient, ServedModel
from .generation import Generation
from .protocol import UNSUPPORTED, ChatCompletionRequest, ResponsesRequest
from .reply import Parts, ReplyReader
from .transport import EventStream, until_disconnect

# Fields that go over as they are, and those of the chat request that they become.
_SAME = (
    *("model", "temperature", "top_p", "stream", "parallel_tool_calls", "seed", "top_k", "min_p", "stop", "priority"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "cache_salt", "ignore_eos", "min_tokens"),
    *("ttft_target", "logit_bias", "stop_token_ids", "skip_special_tokens", "include_stop_str_in_output"),
    *("add_generation_prompt", "continue_final_message", "echo", "add_special_tokens"),
    *("reasoning_effort", "include_reasoning"),
    *("chat_template_kwargs", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *UNSUPPORTED,
)


def _as_chat(body: ResponsesRequest, messages: list[dict[str, Any]]) -> ChatCompletionRequest:
    """Raises `InvalidRequest` for what has no such form; of what it has, under the name that chat has for it."""
    given = body.model_dump(exclude_none=True)
    chat: dict[str, Any] = {name: given[name] for name in _SAME if name in given}
    chat["messages"] = messages
    if body.max_output_tokens is not None:
        chat["max_completion_tokens"] = body.max_output_tokens
    if body.reasoning is not None and body.reasoning.effort is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if body.tools:
        chat["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)]
    if isinstance(body.tool_choice, dict):
        name = body.tool_choice.get("name")
        if body.tool_choice.get("type") != "function" or not isinstance(name, str):
            raise InvalidRequest(
                "tool_choice must be none, auto, required, or an object with type function and a name", "tool_choice"
            )
        chat["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif body.tool_choice is not None:
        chat["tool_choice"] = body.tool_choice
    form = (body.text or {}).get("format")
    if not isinstance(form, dict | None):
        raise InvalidRequest("text.format must be an object", "text.format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        chat["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": form.get("name"), "schema": form.get("schema")},
        }
    elif isinstance(form, dict):
        chat["response_format"] = {"type": form.get("type")}
    return ChatCompletionRequest.parse(chat)


# What chat calls a field, and what it is called here; of `messages`, where each comes from is known.
_NAMES = (
    (r"^response_format(\.json_schema)?", "text.format"),
    (r"^max_completion_tokens", "max_output_tokens"),
    (r"^(tools\[\d+\])\.function", r"\1"),
    (r"^tool_choice\..*", "tool_choice"),
    (r"^messages$", "input"),
)


def _under_its_own_name(error: InvalidRequest, origins: list[str]) -> InvalidRequest:
    """An error in the chat request, told of the field that it came from; `origins` has those of the messages."""
    if not error.param:
        return error
    name = re.sub(r"^messages\[(\d+)\]", lambda match: origins[int(match[1])], error.param)
    for chats, ours in _NAMES:
        name = re.sub(chats, ours, name)
    return type(error)(error.message.replace(error.param, name, 1), name)


def _messages(body: ResponsesRequest) -> tuple[list[dict[str, Any]], list[str]]:
    """The conversation as chat has it, and the field that each message comes from."""
    messages: list[dict[str, Any]] = []
    origins: list[str] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
        origins.append("instructions")
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    for i, item in enumerate(items):
        where = f"input[{i}]"
        kind = item.get("type", "message")
        if kind == "message":
            content = _content(item.get("content"), f"{where}.content")
            messages.append({"role": item.get("role"), "content": content})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = _content(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind != "reasoning":  # which models do not want back
            raise InvalidRequest(f"{where}.type {kind!r:.100} is not supported by this server", where)
        origins += [where] * (len(messages) - len(origins))
    return messages, origins


def _content(content: Any, where: str) -> Any:
    """Parts of text under chat's name for them."""
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("input_text", "output_text", "text"):
            raise InvalidRequest(f"{where} holds a part of type {kind!r:.100}; this model takes text only", where)
        parts.append({"type": "text", "text": part.get("text")})
    return parts


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise InvalidRequest(f"{where}.type must be function: this server runs no tools itself", f"{where}.type")
    return {"type": "function", "function": {k: v for k, v in tool.items() if k not in ("type", "strict")}}


async def responses(body: ResponsesRequest, model: ServedModel, engine: EngineClient, receive: Receive) -> Response:
    """Raises `InvalidRequest` before anything is submitted to the engine."""
    call_id = f"resp_{uuid.uuid4().hex}"
    messages, origins = _messages(body)
    try:
        generation, readers = await start_chat(_as_chat(body, messages), model, engine, call_id)
    except InvalidRequest as error:
        raise _under_its_own_name(error, origins) from None
    answer = _Answer(call_id, body, model, generation, readers[0])
    if body.stream:
        return EventStream(answer.events())
    return JSONResponse(await until_disconnect(receive, answer.whole()))


class _Answer:
    """One answer as it grows: the items so far, the last of which is open."""

    def __init__(
        self, call_id: str, body: ResponsesRequest, model: ServedModel, generation: Generation, reader: ReplyReader
    ):
        self._generation = generation
        self._reader = reader
        self._output: list[dict[str, Any]] = []
        self._sequence = -1
        said = {"temperature": body.temperature, "top_p": body.top_p}
        sampled = {"temperature": 1.0, "top_p": 1.0, **model.sampling_defaults}
        sampled |= {name: value for name, value in said.items() if value is not None}
        self._head: dict[str, Any] = {
            "id": call_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model.id,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": sampled["temperature"],
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": list(body.tools or ()),
            "top_p": sampled["top_p"],
            "truncation": "disabled",
        }

    async def whole(self) -> dict[str, Any]:
        last: dict[str, Any] = {}
        async with aclosing(self._grow()) as events:
            async for event in events:
                last = event
        return last["response"]

    async def events(self) -> AsyncGenerator[str, None]:
        async with aclosing(self._grow()) as events:
            async for event in events:
                self._sequence += 1
                data = json.dumps({**event, "sequence_number": self._sequence})
                yield f"event: {event['type']}\ndata: {data}\n\n"

    async def _grow(self) -> AsyncGenerator[dict[str, Any], None]:
        """OpenAI's events. The first come with the first token, so that an error before it has a status of its own."""
        started, reason = False, None
        async with aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                if not started:
                    started = True
                    yield {"type": "response.created", "response": self._response("in_progress")}
                    yield {"type": "response.in_progress", "response": self._response("in_progress")}
                reason = delta.finish_reason
                for event in self._take(self._reader.read(delta.text, final=reason is not None)):
                    yield event
        for event in self._close():
            yield event
        status = "incomplete" if reason == "length" else "completed"
        yield {"type": f"response.{status}", "response": self._response(status)}

    def _response(self, status: str) -> dict[str, Any]:
        done = status != "in_progress"
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        usage = None
        if done:
            counts = self._generation.usage()
            usage = {
                "input_tokens": counts.prompt_tokens,
                "input_tokens_details": {"cached_tokens": counts.prompt_tokens_details.cached_tokens},
                "output_tokens": counts.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counts.total_tokens,
            }
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": incomplete,
            "output": list(self._output) if done else [],
            "usage": usage,
        }

    def _take(self, parts: Parts) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        if parts.reasoning:
            events += self._open("reasoning")
            self._output[-1]["content"][0]["text"] += parts.reasoning
            events.append(self._event("response.reasoning_text.delta", content_index=0, delta=parts.reasoning))
        if parts.content:
            events += self._open("message")
            self._output[-1]["content"][0]["text"] += parts.content
            events.append(self._event("response.output_text.delta", content_index=0, delta=parts.content, logprobs=[]))
        for call in parts.tool_calls:
            events += self._close()
            self._output.append(_item("function_call", call_id=call["id"], arguments="", name=call["function"]["name"]))
            events.append(self._added())
            arguments = self._output[-1]["arguments"] = call["function"]["arguments"]
            events.append(self._event("response.function_call_arguments.delta", delta=arguments))
        return events

    def _open(self, kind: str) -> list[dict[str, Any]]:
        """Make sure that the last item is an open one of this kind."""
        if self._output and self._output[-1]["type"] == kind and self._output[-1]["status"] == "in_progress":
            return []
        events = self._close()
        if kind == "message":
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = _item("message", role="assistant", content=[])
        else:
            part = {"type": "reasoning_text", "text": ""}
            item = _item("reasoning", summary=[], content=[])
        self._output.append(item)
        events.append(self._added())
        item["content"] = [part]
        return [*events, self._event("response.content_part.added", content_index=0, part=dict(part))]

    def _close(self) -> list[dict[str, Any]]:
        """End the last item if it is open."""
        if not self._output or self._output[-1]["status"] != "in_progress":
            return []
        item = self._output[-1]
        item["status"] = "completed"
        events = []
        if item["type"] == "function_call":
            done = self._event("response.function_call_arguments.done", arguments=item["arguments"], name=item["name"])
            events.append(done)
        else:
            part = item["content"][0]
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            more: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
            events.append(self._event(f"response.{kind}.done", content_index=0, text=part["text"], **more))
            events.append(self._event("response.content_part.done", content_index=0, part=dict(part)))
        index = len(self._output) - 1
        return [*events, {"type": "response.output_item.done", "output_index": index, "item": dict(item)}]

    def _added(self) -> dict[str, Any]:
        index = len(self._output) - 1
        return {"type": "response.output_item.added", "output_index": index, "item": dict(self._output[-1])}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "item_id": self._output[-1]["id"], "output_index": len(self._output) - 1, **fields}


_PREFIX = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


def _item(kind: str, **fields: Any) -> dict[str, Any]:
    return {"id": f"{_PREFIX[kind]}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **fields}
