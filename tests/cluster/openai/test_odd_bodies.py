"""Every field that lists choices, and every list: what is none of them, and what is empty, has one defined answer."""

import json

import pytest

from pagedray.cluster.openai.batches import BatchRequest
from pagedray.cluster.openai.endpoints import ENDPOINTS
from pagedray.cluster.openai.protocol import DetokenizeRequest

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hi"},
    "/v1/embeddings": {"input": "hi"},
    "/v1/responses": {"input": "hi"},
    "/detokenize": {"tokens": [1]},
}
MODELS = {path: kind for path, (kind, _) in ENDPOINTS.items()} | {"/detokenize": DetokenizeRequest}
TOOL = {"type": "function", "function": {"name": "f"}}

# An empty list asks for nothing where a list is of things that may be, and is refused where there must be one.
HARMLESS = {"stop", "stop_token_ids", "tools", "tokens"}
NEEDED = {"messages", "prompt", "input", "guided_choice"}


def takes(schema, definitions, kind):
    """Whether a field may be of a type."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    return schema.get("type") == kind or any(takes(s, definitions, kind) for s in schema.get("anyOf", ()))


def list_fields():
    for path, kind in MODELS.items():
        schema = kind.model_json_schema()
        definitions = schema.get("$defs", {})
        yield from ((path, n) for n, field in schema["properties"].items() if takes(field, definitions, "array"))


@pytest.mark.parametrize(("path", "name"), list(list_fields()))
def test_an_empty_list(api, path, name):
    response = api.post(path, BODIES[path] | {name: []})
    assert (name in HARMLESS) != (name in NEEDED), f"nothing says what an empty {name} means"
    if name in HARMLESS:
        assert response.status_code == 200, response.text
    else:
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)
        api.check_alive()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
@pytest.mark.parametrize("value", [[], [[]], [[1], []], [[], []], [[], [1]]])
def test_no_token_ids_are_no_prompt(api, path, value):
    (name,) = BODIES[path]
    response = api.post(path, {name: value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, name), response.text
    api.check_alive()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
@pytest.mark.parametrize("value", ["", [""], ["a", ""]])
def test_an_empty_text_is_the_bos_for_all(api, path, value):
    (name,) = BODIES[path]
    assert api.post(path, {name: value}).status_code == 200
    assert api.engine.requests[-1].prompt_token_ids == (api.tokenizer.bos_token_id,)


# -- fields that list choices: path, the field's name in an error, the body


ALIENS = [
    ("/v1/chat/completions", "messages[0].role", {"messages": [{"role": "alien", "content": "x"}]}),
    ("/v1/chat/completions", "messages[0].role", {"messages": [{"role": "", "content": "x"}]}),
    ("/v1/chat/completions", "messages[0].role", {"messages": [{"role": "USER", "content": "x"}]}),
    ("/v1/chat/completions", "messages[0].content", {"messages": [{"role": "user", "content": [{"type": "alien"}]}]}),
    ("/v1/chat/completions", "response_format.type", {**CHAT, "response_format": {"type": "alien"}}),
    ("/v1/chat/completions", "tools[0].type", {**CHAT, "tools": [{**TOOL, "type": "alien"}]}),
    ("/v1/chat/completions", "tool_choice", {**CHAT, "tools": [TOOL], "tool_choice": "alien"}),
    ("/v1/chat/completions", "tool_choice", {**CHAT, "tools": [TOOL], "tool_choice": {**TOOL, "type": "alien"}}),
    ("/v1/chat/completions", "function_call", {**CHAT, "function_call": "alien"}),
    ("/v1/chat/completions", "reasoning_effort", {**CHAT, "reasoning_effort": "alien"}),
    ("/v1/chat/completions", "reasoning_effort", {**CHAT, "reasoning_effort": 3}),
    ("/v1/chat/completions", "include_reasoning", {**CHAT, "include_reasoning": "alien"}),
    ("/v1/completions", "response_format.type", {"prompt": "x", "response_format": {"type": "alien"}}),
    ("/v1/embeddings", "encoding_format", {"input": "x", "encoding_format": "alien"}),
    ("/v1/embeddings", "pooling", {"input": "x", "pooling": "alien"}),
    ("/v1/responses", "input[0]", {"input": [{"type": "alien"}]}),
    ("/v1/responses", "input[0].role", {"input": [{"role": "alien", "content": "x"}]}),
    ("/v1/responses", "input[0].content", {"input": [{"role": "user", "content": [{"type": "alien"}]}]}),
    ("/v1/responses", "text.format.type", {"input": "x", "text": {"format": {"type": "alien"}}}),
    ("/v1/responses", "tools[0].type", {"input": "x", "tools": [{"type": "alien", "name": "f"}]}),
    ("/v1/responses", "tool_choice", {"input": "x", "tool_choice": {"type": "alien", "name": "f"}}),
    ("/v1/responses", "truncation", {"input": "x", "truncation": "alien"}),
    ("/v1/responses", "reasoning", {"input": "x", "reasoning": "alien"}),
    ("/v1/responses", "reasoning.effort", {"input": "x", "reasoning": {"effort": "alien"}}),
    ("/v1/responses", "include_reasoning", {"input": "x", "include_reasoning": "alien"}),
]


@pytest.mark.parametrize(("path", "param", "body"), ALIENS)
def test_what_is_none_of_the_choices_is_named(api, path, param, body):
    response = api.post(path, body)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"].startswith(param), response.text
    assert error["message"].startswith((param, "function_call", "the chat"))
    assert not api.engine.requests
    api.check_alive()


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        ("/v1/responses", {"input": []}, "input", "input must not be empty"),
        ("/v1/responses", {"input": 3}, "input", "input must be a string"),
        ("/v1/responses", {"input": ["x"]}, "input[0]", "input[0] must be an object"),
        ("/v1/responses", {"tool_choice": 3}, "tool_choice", "tool_choice must be a string"),
        ("/v1/chat/completions", {"tool_choice": 3}, "tool_choice", "tool_choice must be 'none', 'auto' or 'required'"),
        (
            "/v1/chat/completions",
            {"tool_choice": {"type": "function"}},
            "tool_choice.function",
            "tool_choice.function is",
        ),
        ("/v1/chat/completions", {"guided_json": 3}, "guided_json", "guided_json must be an object"),
        ("/v1/chat/completions", {"stop": 3}, "stop", "stop must be an array"),
        ("/v1/chat/completions", {"stop": ["a", 3]}, "stop[1]", "stop[1] must be a string"),
    ],
)
def test_fields_of_several_types_are_named_as_they_were_sent(api, path, fields, param, message):
    error = api.post(path, BODIES[path] | fields).json()["error"]
    assert error["param"] == param and error["message"].startswith(message)


def test_all_fields_with_choices_are_tried():
    """By the models' own schemas: one that comes new must come into the table, too."""
    tried = {(path, part) for path, _, body in ALIENS for part in json.dumps(body).split('"')}
    for path, (kind, _) in ENDPOINTS.items():
        for name, field in kind.model_json_schema()["properties"].items():
            if "enum" in json.dumps(field):
                assert (path, name) in tried, f"{path}: {name}"
    assert "const" in json.dumps(BatchRequest.model_json_schema())  # see test_batches.py


@pytest.mark.parametrize("role", ["user", "assistant", "tool", "function"])
def test_openais_roles_are_taken(api, role):
    message = {"role": role, "content": "x", "name": "n", "tool_call_id": "1"}
    assert api.post("/v1/chat/completions", {"messages": [message]}).status_code == 200
    prompt = api.tokenizer.decode(api.engine.requests[-1].prompt_token_ids)
    assert prompt == f"<|{'tool' if role == 'function' else role}|>x<|assistant|>"


def test_what_developers_say_is_never_left_out(api):
    """Of a template that knows neither the role nor the older one."""
    response = api.post("/v1/chat/completions", {"messages": [{"role": "developer", "content": "x"}]})
    assert response.status_code == 400 and "System role not supported" in response.json()["error"]["message"]


def test_what_changes_nothing_may_be_anything(api):
    """Fields that are taken and ignored, whatever others make of their values."""
    for name in ("service_tier", "verbosity", "store", "user", "metadata"):
        assert api.chat(**{name: "alien"}).status_code == 200
