"""The Responses API, with the official client."""

import json
from dataclasses import replace

import openai
import pytest
from fake_engine import CHAT_TEMPLATE, byte_tokenizer

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": True}
CONTINUED = {"continue_final_message": True}
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.fixture
def served(make_api, listen):
    api = make_api(byte_tokenizer(template=CHAT_TEMPLATE.replace("raise_exception('System role not supported')", "''")))
    more = {"max_model_len": 4000, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    api.models = {k: replace(m, **more) for k, m in api.models.items()}
    api.client = openai.OpenAI(base_url=f"{listen(api.app)}/v1", api_key="none", max_retries=0)
    return api


def create(api, says=None, **fields):
    if says is not None:
        api.engine.script = lambda request: api.engine.spell(says)
    return api.client.responses.create(**{"model": "org/tiny", "input": "hi"} | fields)


def prompt_of(api, i=-1):
    return api.tokenizer.decode(api.engine.requests[i].prompt_token_ids, skip_special_tokens=False)


def test_a_response_whole(served):
    response = create(served, "Hello", instructions="Be brief.", metadata={"a": "b"})
    assert (response.status, response.output_text, response.metadata) == ("completed", "Hello", {"a": "b"})
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens > 5
    assert prompt_of(served) == "<s><|system|>Be brief.<|end|><|user|>hi<|end|><|assistant|>"


def test_a_response_streamed_is_the_same(served):
    events = list(create(served, f"<think>hm</think>Hello {CALL}", stream=True, tools=[TOOL]))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = [e.type for e in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Hello "
    final = events[-1].response
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output[0].content[0].text == "hm" and final.output_text == "Hello "
    whole = create(served, tools=[TOOL])
    assert [item.type for item in whole.output] == [item.type for item in final.output]
    with served.client.responses.stream(model="org/tiny", input="hi", tools=[TOOL]) as stream:
        assert stream.get_final_response().output_text == "Hello "


def test_a_response_cut_off_is_incomplete(served):
    response = create(served, "Hello world", max_output_tokens=3)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output_text == "Hel" and response.usage.output_tokens == 3


def test_calls_go_out_and_their_results_come_back(served):
    (call,) = create(served, CALL, tools=[TOOL]).output
    assert (call.type, call.name, call.arguments) == ("function_call", "f", "{}") and call.call_id
    history = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "42"},
    ]
    create(served, "ok", input=history, tools=[TOOL])
    assert prompt_of(served).endswith("<|tool|>42<|end|><|assistant|>")


def test_calls_belong_to_the_message_before_them(make_api):
    template = (
        "{% for m in messages %}<{{ m.role }}:{{ m.content }}:{{ m.tool_calls | default([]) | length }}>{% endfor %}"
    )
    api = make_api(byte_tokenizer(template=template))
    api.models = {k: replace(m, max_model_len=400) for k, m in api.models.items()}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": "42"}
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "Look."}]}
    user = {"role": "user", "content": "hi"}
    assert api.post("/v1/responses", {"input": [user, said, call, call, result, call, result]}).status_code == 200
    turns = "<user:hi:0><assistant:Look.:2><tool:42:0><assistant::1><tool:42:0>"
    assert prompt_of(api) == turns


def test_how_much_to_think(make_api):
    api = make_api(byte_tokenizer(template="{{ reasoning_effort }} {{ enable_thinking }}"))
    api.models = {k: replace(m, reasoning_parser="qwen3") for k, m in api.models.items()}
    api.engine.script = lambda request: api.engine.spell("<think>hm</think>Hello")
    for effort, told in [("none", "none False"), ("high", "high True")]:
        response = api.post("/v1/responses", {"input": "hi", "reasoning": {"effort": effort, "summary": "auto"}})
        assert [item["type"] for item in response.json()["output"]] == ["reasoning", "message"]
        assert prompt_of(api) == told
    response = api.post("/v1/responses", {"input": "hi", "include_reasoning": False})
    assert [item["type"] for item in response.json()["output"]] == ["message"]


def test_the_form_of_an_answer(served):
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    create(served, "{}", text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}})
    assert json.loads(served.engine.requests[-1].sampling.structured_outputs.json) == schema
    thinks = [{"role": "assistant", "content": "<think>"}]
    answer = create(served, input=thinks, text={"format": {"type": "json_object"}}, extra_body=CONTINUED)
    assert [item.type for item in answer.output] == ["message"] and answer.output_text == "{}"
    create(served, "{}", tools=[TOOL], tool_choice={"type": "function", "name": "f"})
    assert json.loads(served.engine.requests[-1].sampling.structured_outputs.json) == TOOL["parameters"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"type": "file_search_call"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"n": 2}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"guided_regex": "(("}, "guided_regex"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "text.format"),
        ({"text": {"format": "json"}}, "text.format"),
        ({"truncation": "some"}, "truncation"),
        ({"tools": [TOOL], "tool_choice": {"type": "custom", "name": "f"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "some"}, "tool_choice"),
        ({"tools": [{**TOOL, "name": "f g"}]}, "tools[0].name"),
        (
            {"instructions": "x", "input": [{"role": "user", "content": "a"}, {"role": "alien", "content": "b"}]},
            "input[1].role",
        ),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": "hi" * 5000}, "input"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"model": "other"}, "model"),
    ],
)
def test_what_is_no_request_is_named(served, fields, param):
    response = served.post("/v1/responses", {"model": "org/tiny", "input": "hi"} | fields)
    error = response.json()["error"]
    assert response.status_code in (400, 404) and error["param"].startswith(param), response.text
    assert "messages" not in error["message"] and "response_format" not in error["message"]
    assert not served.engine.requests


def test_what_chat_and_vllm_call_so_is_taken(served):
    taken = {"logit_bias": {"7": 2}, "stop_token_ids": [5], "guided_choice": ["a"], "min_p": 0.1}
    served.models = {k: replace(m, sampling_defaults={"top_p": 0.8}) for k, m in served.models.items()}
    response = create(served, "a", temperature=0.5, extra_body=taken)
    sampling = served.engine.requests[-1].sampling
    assert (sampling.logit_bias, sampling.stop_token_ids, sampling.min_p) == ({7: 2}, (5,), 0.1)
    assert sampling.structured_outputs.choice == ("a",)
    assert (response.temperature, response.top_p) == (sampling.temperature, sampling.top_p) == (0.5, 0.8)
