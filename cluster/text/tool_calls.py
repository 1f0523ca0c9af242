"""Calls of functions in a model's text, found as it comes: each model family has its own way to write them.

    hermes       <tool_call>{"name": "f", "arguments": {…}}</tool_call>, as often as there are calls (Hermes, Qwen)
    llama3_json  the whole text is {"name": "f", "parameters": {…}}, several with ; between (Llama 3.1 and later)
    named        the whole text is the arguments of one function that the request names
    required     the whole text is [{"name": "f", "parameters": {…}}, …]

The first two are what a model writes by itself; the last two are forms that the server makes it keep to. Text that
only looks like a call, and is none, stays text.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str  # JSON, as the model wrote it


class ToolCallParser(Protocol):
    """`add` text as it comes, then `finish`; both give what is sure by then: text to show, and calls."""

    def add(self, text: str) -> list[str | ToolCall]: ...
    def finish(self) -> list[str | ToolCall]: ...


def detect_parser(chat_template: str) -> str | None:
    """The way of writing calls that a chat template teaches its model."""
    if "<tool_call>" in chat_template:
        return "hermes"
    if "<|python_tag|>" in chat_template or '"parameters": dictionary of argument name' in chat_template:
        return "llama3_json"
    return None


class HermesParser:
    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._held = ""
        self._inside = False
        self._after_call = False

    def add(self, text: str) -> list[str | ToolCall]:
        self._held += text
        return list(self._read())

    def _read(self) -> Iterator[str | ToolCall]:
        while True:
            mark = self.CLOSE if self._inside else self.OPEN
            at = self._held.find(mark)
            if at < 0:
                break
            before, self._held = self._held[:at], self._held[at + len(mark) :]
            if self._inside:
                call = _read_call(before)
                self._after_call = call is not None
                yield call or f"{self.OPEN}{before}{self.CLOSE}"
            else:
                yield from self._text(before)
            self._inside = not self._inside
        if not self._inside:
            sure = len(self._held) - overlap(self._held, self.OPEN)
            if self._after_call and not self._held[:sure].strip():
                return  # white space between calls, perhaps
            yield from self._text(self._held[:sure])
            self._held = self._held[sure:]

    def _text(self, text: str) -> Iterator[str]:
        if text and not (self._after_call and not text.strip()):
            self._after_call = False
            yield text

    def finish(self) -> list[str | ToolCall]:
        """A call that was cut off is one all the same where only its end is missing."""
        held, self._held = self._held, ""
        if not self._inside:
            return list(self._text(held))
        return [_read_call(held) or self.OPEN + held]


class Llama3JsonParser:
    TAG = "<|python_tag|>"

    def __init__(self) -> None:
        self._held = ""
        self._is_text = False

    def add(self, text: str) -> list[str | ToolCall]:
        if self._is_text:
            return [text] if text else []
        self._held += text
        start = self._held.lstrip()
        if not start or start[0] == "{" or self.TAG.startswith(start[: len(self.TAG)]):
            return []
        self._is_text = True
        return [self._held]

    def finish(self) -> list[str | ToolCall]:
        if self._is_text or not self._held:
            return []
        calls: list[str | ToolCall] = []
        rest = self._held.strip().removeprefix(self.TAG).lstrip()
        while rest:
            try:
                value, end = json.JSONDecoder().raw_decode(rest)
            except ValueError:
                return [self._held]
            call = _as_call(value)
            if call is None:
                return [self._held]
            calls.append(call)
            rest = rest[end:].lstrip("; \n\t")
        return calls or [self._held]


class NamedParser:
    def __init__(self, name: str):
        self._name = name
        self._held = ""

    def add(self, text: str) -> list[str | ToolCall]:
        self._held += text
        return []

    def finish(self) -> list[str | ToolCall]:
        return [ToolCall(self._name, self._held)]


class RequiredParser:
    def __init__(self) -> None:
        self._held = ""

    def add(self, text: str) -> list[str | ToolCall]:
        self._held += text
        return []

    def finish(self) -> list[str | ToolCall]:
        try:
            calls = [_as_call(value) for value in json.loads(self._held)]
        except ValueError:  # cut off by max_tokens
            calls = [None]
        return list(calls) if all(calls) else [self._held]  # type: ignore[arg-type]


PARSERS: dict[str, Callable[[], ToolCallParser]] = {"hermes": HermesParser, "llama3_json": Llama3JsonParser}


def required_schema(functions: Sequence[dict[str, Any]], parallel: bool) -> dict[str, Any]:
    """The JSON schema of the `required` form."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": f["name"]}, "parameters": _own_document(f.get("parameters"), i)},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for i, f in enumerate(functions)
    ]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return schema if parallel else schema | {"maxItems": 1}


def _own_document(parameters: dict[str, Any] | None, index: int) -> dict[str, Any]:
    """One function's parameters as a part of a larger schema: with an `$id` their references, `#/$defs/X` or `#`, are
    to themselves as before. An older `$schema` would have another keyword for it, or none beside a `$ref`."""
    schema = {key: value for key, value in (parameters or {"type": "object"}).items() if key != "$schema"}
    return schema | {"$id": f"tool:///{index}/"}


def overlap(text: str, mark: str) -> int:
    """The length of the longest end of `text` with which `mark` begins."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)


def _read_call(text: str) -> ToolCall | None:
    """Of what stands between marks of a call, where the name alone is one, too."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return _as_call({"parameters": {}} | value if isinstance(value, dict) else value)


def _as_call(value: Any) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    if not value.keys() & {"arguments", "parameters"}:  # any other object with a name
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # written as JSON in JSON
        return ToolCall(value["name"], arguments)
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))
