"""The OpenAPI document of what is served: /openapi.json. Made of the models that read and write the bodies, and a few
words for what these leave to others: ranges, which `SamplingParams` checks, and forms that several fields have.
"""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ...scheduler.request import MAX_N, MAX_STOP_STRINGS
from ..text.tokenizer import ROLES
from .batches import BatchRequest
from .endpoints import ENDPOINTS
from .protocol import (
    MAX_INPUTS,
    ChatCompletion,
    Completion,
    DetokenizeRequest,
    EmbeddingList,
    ModelCard,
    ModelList,
)
from .tokenize import Text, Tokens

Schema = dict[str, Any]

_REF = "#/components/schemas/{model}"
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
_STREAM = {"text/event-stream": {"schema": _EVENT}}  # of each event; the last one's data is [DONE]
_ERRORS = {
    400: "the request is wrong; param says where",
    401: "no valid key, where keys are configured",
    404: "there is no such model or object",
    408: "the answer was not read as fast as it was made",
    413: "the body is too large",
    415: "the body is of a type that is not read here",
    429: "a queue is full, or a limit is reached",
    500: "the server failed",
    503: "nothing can serve it now; it may be sent again",
    507: "the server's disk is full",
}
_ANSWERS: Mapping[str, type[BaseModel] | None] = {
    "/v1/chat/completions": ChatCompletion,
    "/v1/completions": Completion,
    "/v1/embeddings": EmbeddingList,
    "/v1/responses": None,
}
_TEXT_PARTS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
    },
}
_CALL = {
    "type": "object",
    "properties": {
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "arguments": {"type": ["object", "string", "null"]},  # text: of JSON
            },
            "required": ["name"],
        }
    },
    "required": ["function"],
}

# What the fields of requests may be, beyond their types.
_RANGES: Mapping[str, Schema] = {
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"minimum": 0, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": 2**31 - 1},
    "n": {"minimum": 1, "maximum": MAX_N},
    "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"minimum": 0.01, "maximum": 100},
    "min_tokens": {"minimum": 0, "maximum": 2**31 - 1},
    "max_tokens": {"minimum": 0, "maximum": 2**31 - 1},
}


def document(paths: set[str]) -> Schema:
    """The document of those of the API's paths that are served."""
    described = {path: item for path, item in _paths().items() if path in paths}
    requests: list[type[BaseModel]] = [*(kind for kind, _ in ENDPOINTS.values()), DetokenizeRequest, BatchRequest]
    answers: list[type[BaseModel]] = [*filter(None, _ANSWERS.values()), ModelCard, ModelList, Tokens, Text]
    _, schemas = models_json_schema(
        [(kind, "validation") for kind in (*requests, *answers)], ref_template=_REF, title="PagedRay"
    )
    definitions = schemas["$defs"]
    for kind in requests:
        _narrow(definitions[kind.__name__]["properties"])
    message = definitions["ChatMessage"]
    roles = "or another that the model's chat template names"
    message["properties"]["role"] = {"type": "string", "enum": list(ROLES), "description": roles}
    message["properties"]["content"] = {"anyOf": [{"type": "string"}, _TEXT_PARTS, {"type": "null"}]}
    message["properties"]["tool_calls"] = {"anyOf": [{"type": "array", "items": _CALL}, {"type": "null"}]}
    text = {"anyOf": [{"type": "string"}, _TEXT_PARTS]}
    assistant = {"properties": {"role": {"const": "assistant"}}}  # may say nothing, or only call
    message["anyOf"] = [assistant, {"properties": {"content": text}, "required": ["content"]}]
    definitions["Error"] = _object(
        error=_object(
            message={"type": "string"},
            type={"type": "string"},
            param={"type": ["string", "null"]},
            code={"type": ["string", "null"]},
        )
    )
    definitions["BatchRequest"]["properties"]["endpoint"]["enum"] = list(ENDPOINTS)
    definitions["TokenizeChat"] = _part(
        definitions["ChatCompletionRequest"],
        *("model", "messages", "tools", "tool_choice", "add_generation_prompt", "continue_final_message"),
        *("chat_template_kwargs", "reasoning_effort", "return_token_strs"),
    )
    prompt = _part(definitions["CompletionRequest"], "model", "prompt", "add_special_tokens", "return_token_strs")
    prompt["properties"]["prompt"] = {"type": "string"}
    definitions["TokenizeText"] = prompt
    definitions |= _files_and_batches()
    return {
        "openapi": "3.1.0",
        "info": {"title": "PagedRay", "version": version("pagedray")},
        "paths": described,
        "components": {
            "schemas": definitions,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],  # where the config has tenants, a key is needed
    }


def _part(schema: Schema, *names: str) -> Schema:
    """Of an object's schema, what is said of some of its properties."""
    required = [name for name in schema.get("required", ()) if name in names]
    return {"type": "object", "properties": {n: schema["properties"][n] for n in names}, "required": required}


def _narrow(properties: Schema) -> None:
    for name, bounds in _RANGES.items():
        for option in properties.get(name, {}).get("anyOf", ()):
            if option.get("type") in ("integer", "number"):
                option.update(bounds)
    for option in properties.get("stop", {}).get("anyOf", ()):
        if option.get("type") == "array":
            option["maxItems"] = MAX_STOP_STRINGS
            option["items"] = {"type": "string", "minLength": 1}
    if "stop" in properties:
        properties["stop"]["anyOf"].insert(0, {"type": "string", "minLength": 1})
    if "input" in properties and "anyOf" in properties["input"]:
        for option in properties["input"]["anyOf"]:
            if option.get("type") == "array" and option["items"].get("type") != "integer":
                option["maxItems"] = MAX_INPUTS


def _paths() -> Schema:
    paths: Schema = {}
    for path, (kind, _) in ENDPOINTS.items():
        model = _ANSWERS[path]
        answer = {"type": "object"} if model is None else _ref(model.__name__)
        streams = "stream" in kind.model_fields
        paths[path] = {"post": _operation(_json(_ref(kind.__name__)), answer, more=_STREAM if streams else {})}
    tokenize = {"anyOf": [_ref("TokenizeChat"), _ref("TokenizeText")]}
    paths["/tokenize"] = {"post": _operation(_json(tokenize), _ref("Tokens"))}
    paths["/detokenize"] = {"post": _operation(_json(_ref("DetokenizeRequest")), _ref("Text"))}
    paths["/v1/models"] = {"get": _operation(None, _ref("ModelList"))}
    paths["/v1/models/{model}"] = {"get": _operation(None, _ref("ModelCard"), [_parameter("model", "path")])}
    for path in ("/health", "/ready"):
        paths[path] = {"get": _operation(None, _object(status={"const": "ok"}))}
    paths["/version"] = {"get": _operation(None, _object(version={"type": "string"}))}
    form = _object(file={"type": "string", "contentMediaType": "application/octet-stream"}, purpose={"const": "batch"})
    cut = [_parameter("limit", schema={"type": "integer", "minimum": 1, "maximum": 100}), _parameter("after")]
    order = _parameter("order", schema={"enum": ["asc", "desc"]})
    file_id, batch_id = _parameter("file_id", "path"), _parameter("batch_id", "path")
    paths["/v1/files"] = {
        "post": _operation({"multipart/form-data": {"schema": form}}, _ref("File")),
        "get": _operation(None, _ref("FileList"), [*cut, _parameter("purpose"), order]),
    }
    paths["/v1/files/{file_id}"] = {
        "get": _operation(None, _ref("File"), [file_id]),
        "delete": _operation(None, _object(id={"type": "string"}, deleted={"const": True}), [file_id]),
    }
    content = {"application/octet-stream": {"schema": {"type": "string"}}}
    paths["/v1/files/{file_id}/content"] = {"get": _operation(None, None, [file_id], content)}
    paths["/v1/batches"] = {
        "post": _operation(_json(_ref("BatchRequest")), _ref("Batch")),
        "get": _operation(None, _ref("BatchList"), cut),
    }
    paths["/v1/batches/{batch_id}"] = {"get": _operation(None, _ref("Batch"), [batch_id])}
    paths["/v1/batches/{batch_id}/cancel"] = {"post": _operation(None, _ref("Batch"), [batch_id])}
    return paths


def _operation(
    body: Schema | None, answer: Schema | None, parameters: list[Schema] | None = None, more: Schema | None = None
) -> Schema:
    content = (_json(answer) if answer is not None else {}) | (more or {})
    errors = {str(status): {"description": what, "content": _json(_ref("Error"))} for status, what in _ERRORS.items()}
    operation: Schema = {"responses": {"200": {"description": "the answer", "content": content}, **errors}}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": body}
    if parameters:
        operation["parameters"] = parameters
    return operation


def _parameter(name: str, where: str = "query", schema: Schema | None = None) -> Schema:
    return {"name": name, "in": where, "required": where == "path", "schema": schema or {"type": "string"}}


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _ref(name: str) -> Schema:
    return {"$ref": _REF.format(model=name)}


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _files_and_batches() -> Schema:
    text, number = {"type": "string"}, {"type": "integer"}
    file = _object(id=text, object={"const": "file"}, bytes=number, created_at=number, filename=text, purpose=text)
    batch = _object(
        id=text,
        object={"const": "batch"},
        endpoint=text,
        input_file_id=text,
        completion_window=text,
        created_at=number,
        status=text,
        output_file_id={"type": ["string", "null"]},
        error_file_id={"type": ["string", "null"]},
        errors={"type": ["object", "null"]},
        request_counts=_object(total=number, completed=number, failed=number),
    )
    lists = {
        f"{name}List": _object(object={"const": "list"}, data={"type": "array", "items": _ref(name)}, has_more={})
        for name in ("File", "Batch")
    }
    return {"File": file, "Batch": batch, **lists}
