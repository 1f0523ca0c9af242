"""Tools and reasoning over HTTP, streamed and whole."""

import json
from dataclasses import replace

import pytest
from fake_engine import CHAT_TEMPLATE, byte_tokenizer

TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {}}}}},
    {"type": "function", "function": {"name": "g", "description": "no parameters"}},
]
NAMED = {"type": "function", "function": {"name": "f"}}
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


@pytest.fixture
def tools_api(make_api):
    """A model that writes calls as Hermes does, and thinks aloud; its template shows the tools."""
    api = make_api(byte_tokenizer(template="{{ tools | tojson if tools }}" + CHAT_TEMPLATE))
    more = {"max_model_len": 4000, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    api.models = {k: replace(m, **more) for k, m in api.models.items()}
    return api


def says(api, text):
    api.engine.script = lambda request: api.engine.spell(text)


def joined(events):
    """A streamed message as it adds up, and its finish reason."""
    message, reason = {"content": "", "reasoning": "", "reasoning_content": "", "tool_calls": []}, None
    for event in events[:-1]:
        for choice in event["choices"]:
            delta, reason = choice["delta"], choice["finish_reason"] or reason
            for name in ("content", "reasoning", "reasoning_content"):
                message[name] += delta.get(name, "")
            message["tool_calls"] += delta.get("tool_calls", [])
    return message, reason


def ask(api, events, stream, **fields):
    response = api.chat(stream=stream, **{"tools": TOOLS} | fields)
    assert response.status_code == 200, response.text
    if stream:
        return joined(events(response))
    choice = response.json()["choices"][0]
    return choice["message"], choice["finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_text_and_reasoning_come_apart(tools_api, events, stream):
    says(tools_api, f"<think>hm</think>Look. {CALL}")
    message, reason = ask(tools_api, events, stream)
    assert (message["content"], message["reasoning_content"], reason) == ("Look. ", "hm", "tool_calls")
    assert message["reasoning"] == "hm"
    (call,) = message["tool_calls"]
    assert call["id"].startswith("call_") and call["type"] == "function"
    assert call["function"] == {"name": "f", "arguments": '{"x": 1}'} and call.get("index", 0) == 0


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_without_calls_is_as_ever(tools_api, events, stream):
    says(tools_api, "a < b")
    message, reason = ask(tools_api, events, stream)
    assert (message["content"], reason) == ("a < b", "stop") and not message.get("tool_calls")


def test_content_is_null_beside_calls(tools_api, events):
    says(tools_api, CALL)
    message, _ = ask(tools_api, events, False)
    assert message["content"] is None and len(message["tool_calls"]) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "text", "name"),
    [
        ("required", '[{"name": "g", "parameters": {"x": 2}}]', "g"),
        (NAMED, '{"x": 2}', "f"),
    ],
)
def test_calls_that_must_be_made_have_a_form(tools_api, events, stream, choice, text, name):
    says(tools_api, text)
    message, reason = ask(tools_api, events, stream, tool_choice=choice)
    assert [c["function"] for c in message["tool_calls"]] == [{"name": name, "arguments": '{"x": 2}'}]
    assert reason == "tool_calls" and not message["content"]
    form = json.loads(tools_api.engine.requests[0].sampling.structured_outputs.json)
    assert form["type"] == ("array" if choice == "required" else "object")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_has_a_form_is_content_from_its_first_token(tools_api, events, stream):
    """Though the prompt has opened a thought, and though it looks like a call."""
    tools_api.models = {k: replace(m, tool_call_parser="llama3_json") for k, m in tools_api.models.items()}
    text = '{"name": "f", "parameters": {}}'
    thinks = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>"}]
    fields = {"messages": thinks, "continue_final_message": True}
    says(tools_api, text)
    for form in ({"response_format": {"type": "json_object"}}, {"guided_regex": ".*"}):
        message, reason = ask(tools_api, events, stream, **fields, **form)
        assert (message["content"], reason) == (text, "stop")
        assert not message.get("reasoning") and not message.get("tool_calls")
    says(tools_api, '{"x": 2}')
    message, reason = ask(tools_api, events, stream, **fields, tool_choice=NAMED)
    assert [c["function"]["arguments"] for c in message["tool_calls"]] == ['{"x": 2}'] and reason == "tool_calls"
    message, _ = ask(tools_api, events, stream, **fields)
    assert message["reasoning"] == '{"x": 2}' and not message["content"]


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_may_be_left_out(tools_api, events, stream):
    says(tools_api, "<think>hm</think>Look.")
    message, _ = ask(tools_api, events, stream, include_reasoning=False)
    assert message["content"] == "Look." and not message.get("reasoning") and not message.get("reasoning_content")


def test_the_template_is_told_how_much_to_think(make_api):
    api = make_api(byte_tokenizer(template="{{ reasoning_effort }} {{ enable_thinking }}" + CHAT_TEMPLATE))

    def told(**fields):
        assert api.chat(**fields).status_code == 200
        return api.tokenizer.decode(api.engine.requests[-1].prompt_token_ids).partition("<|user|>")[0]

    assert told() == told(reasoning_effort=None) == " "
    assert (told(reasoning_effort="low"), told(reasoning_effort="none")) == ("low True", "none False")
    assert told(reasoning_effort="low", chat_template_kwargs={"enable_thinking": False}) == "low False"


def test_one_call_where_only_one_is_wanted(tools_api, events):
    says(tools_api, CALL)
    tools_api.engine.script = lambda request: tools_api.engine.spell(CALL + CALL, together=200)
    both, _ = ask(tools_api, events, False)
    one, _ = ask(tools_api, events, False, parallel_tool_calls=False)
    assert (len(both["tool_calls"]), len(one["tool_calls"])) == (2, 1)


def test_the_template_sees_the_tools_unless_none_may_be_called(tools_api):
    counts = [
        tools_api.chat(**fields).json()["usage"]["prompt_tokens"]
        for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": TOOLS})
    ]
    assert counts[0] == counts[1] < counts[2]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "x", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": TOOLS[:1] * 129}, "tools"),
        ({"tools": "f"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nope"}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
def test_tools_that_are_none_are_named(tools_api, fields, param):
    response = tools_api.chat(**fields)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"].startswith(param), response.text
    assert len(error["message"]) < 500 and not tools_api.engine.requests


def test_a_model_that_knows_no_calls_says_so(api):
    response = api.chat(tools=TOOLS)
    assert response.status_code == 400 and "tool_call_parser" in response.json()["error"]["message"]
    assert api.chat(tools=TOOLS, tool_choice="none").status_code == 200


def test_calls_of_the_official_client(tools_api, listen):
    import openai

    says(tools_api, CALL)
    client = openai.OpenAI(base_url=f"{listen(tools_api.app)}/v1", api_key="none", max_retries=0)
    message = {"role": "user", "content": "hi"}
    answer = client.chat.completions.create(model="org/tiny", messages=[message], tools=TOOLS)
    call = answer.choices[0].message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("f", {"x": 1})
    with client.chat.completions.stream(model="org/tiny", messages=[message], tools=TOOLS) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.arguments == '{"x": 1}'
