"""A chat choice's text read as what it says: reasoning, content, calls of tools."""

import secrets
from dataclasses import dataclass, field
from typing import Any

from ..text.reasoning import ReasoningParser
from ..text.tool_calls import PARSERS, NamedParser, RequiredParser, ToolCall, ToolCallParser
from .engine_client import ServedModel
from .protocol import ChatCompletionRequest


@dataclass(slots=True)
class Parts:
    """What a piece of text, or a whole one, came to. `tool_calls` are in OpenAI's form."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)

    def __iadd__(self, other: "Parts") -> "Parts":
        self.content += other.content
        self.reasoning += other.reasoning
        self.tool_calls += other.tool_calls
        return self


class ReplyReader:
    """Reads one choice as it comes."""

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolCallParser | None,
        max_calls: int | None,
        include_reasoning: bool,
    ):
        self._reasoning = reasoning
        self._include_reasoning = include_reasoning
        self._tools = tools
        self._max_calls = max_calls
        self.num_calls = 0

    def read(self, text: str, final: bool) -> Parts:
        parts = Parts()
        pieces = [(False, text)] if text else []
        if self._reasoning is not None:
            pieces = self._reasoning.add(text) + (self._reasoning.finish() if final else [])
        found: list[str | ToolCall] = []
        for is_reasoning, piece in pieces:
            if not is_reasoning:
                found += self._tools.add(piece) if self._tools is not None else [piece]
            elif self._include_reasoning:
                parts.reasoning += piece
        if final and self._tools is not None:
            found += self._tools.finish()
        for item in found:
            if isinstance(item, str):
                parts.content += item
            elif self._max_calls is None or self.num_calls < self._max_calls:
                parts.tool_calls.append(_as_openai(item, self.num_calls))
                self.num_calls += 1
        return parts


def _as_openai(call: ToolCall, index: int) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": index, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def reply_reader(
    body: ChatCompletionRequest, model: ServedModel, prompt: tuple[int, ...], has_form: bool
) -> ReplyReader:
    """Of a new choice. One that has a form keeps to it from its first token: it neither thinks nor calls by itself."""
    reasoning = None
    if model.reasoning_parser is not None and not has_form:
        tail = model.tokenizer.decode(prompt[-8:], skip_special_tokens=False)
        reasoning = ReasoningParser(inside=tail.rstrip().endswith(ReasoningParser.OPEN))
    tools: ToolCallParser | None = None
    choice = body.effective_tool_choice
    if choice == "auto" and model.tool_call_parser is not None and not has_form:
        tools = PARSERS[model.tool_call_parser]()
    elif choice == "required":
        tools = RequiredParser()
    elif choice not in ("auto", "none"):
        tools = NamedParser(choice)
    max_calls = 1 if body.parallel_tool_calls is False else None
    return ReplyReader(reasoning, tools, max_calls, body.include_reasoning is not False)


def marks_are_special(model: ServedModel) -> bool:
    """True where what the parsers look for would be lost with the special tokens."""
    marks = {"<think>", "</think>"} if model.reasoning_parser else set()
    marks |= {"<tool_call>", "</tool_call>"} if model.tool_call_parser == "hermes" else set()
    return any(model.tokenizer.backend.token_to_id(mark) in model.tokenizer.special_ids for mark in marks)
