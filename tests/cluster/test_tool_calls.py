"""Calls and reasoning in a model's text: the same whatever the pieces it comes in."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from pagedray.cluster.text.grammar import _bytes, _grammar
from pagedray.cluster.text.reasoning import ReasoningParser
from pagedray.cluster.text.tool_calls import (
    HermesParser,
    Llama3JsonParser,
    NamedParser,
    RequiredParser,
    ToolCall,
    detect_parser,
    required_schema,
)
from pagedray.scheduler.request import StructuredOutputsParams

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "<b>"}}\n</tool_call>'
F = ToolCall("f", '{"x": "<b>"}')


def read(parser, pieces):
    """What came out, neighboring texts joined."""
    found = []
    for item in [i for piece in pieces for i in parser.add(piece)] + parser.finish():
        if isinstance(item, str) and found and isinstance(found[-1], str):
            found[-1] += item
        else:
            found.append(item)
    return found


@st.composite
def cut(draw, text):
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


CASES = [
    (HermesParser, "just text, a < b", ["just text, a < b"]),
    (HermesParser, "", []),
    (HermesParser, CALL, [F]),
    (HermesParser, f"Let me see.\n{CALL}\n{CALL}\n", ["Let me see.\n", F, F]),
    (HermesParser, f"{CALL} and so on", [F, " and so on"]),
    (HermesParser, '<tool_call>{"name": "f"}</tool_call>', [ToolCall("f", "{}")]),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {}}', [ToolCall("f", "{}")]),
    (HermesParser, '<tool_call>{"name": "f", "argum', ['<tool_call>{"name": "f", "argum']),
    (HermesParser, "<tool_call>no JSON</tool_call> end", ["<tool_call>no JSON</tool_call> end"]),
    (HermesParser, "<tool_ca", ["<tool_ca"]),
    (Llama3JsonParser, "just text {", ["just text {"]),
    (Llama3JsonParser, '{"name": "f", "parameters": {"x": 1}}', [ToolCall("f", '{"x": 1}')]),
    (
        Llama3JsonParser,
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
        [ToolCall("f", "{}"), ToolCall("g", "{}")],
    ),
    (Llama3JsonParser, '{"no": "call"}', ['{"no": "call"}']),
    (Llama3JsonParser, '{"name": "Ada", "age": 3}', ['{"name": "Ada", "age": 3}']),
    (Llama3JsonParser, '{"name": "f", "arguments": {}}', [ToolCall("f", "{}")]),
    (Llama3JsonParser, '{"name": "f", "par', ['{"name": "f", "par']),
    (Llama3JsonParser, " ", [" "]),
    (Llama3JsonParser, "<|python", ["<|python"]),
    (RequiredParser, '[{"name": "f", "parameters": {"ä": 1}}]', [ToolCall("f", '{"ä": 1}')]),
    (RequiredParser, '[{"name": "f", ', ['[{"name": "f", ']),
    (lambda: NamedParser("f"), '{"x": 1}', [ToolCall("f", '{"x": 1}')]),
]


@pytest.mark.parametrize(("parser", "text", "expected"), CASES, ids=range(len(CASES)))
@given(data=st.data())
def test_calls_are_found_whatever_the_pieces(parser, text, expected, data):
    assert read(parser(), data.draw(cut(text))) == expected


@given(st.data(), st.text(alphabet='<tool_cal/>{}"name: f\n', max_size=60))
def test_text_that_is_no_call_is_never_lost(data, text):
    pieces = data.draw(cut(text))
    assert read(HermesParser(), pieces) == read(HermesParser(), [text])
    if all(isinstance(item, str) for item in read(HermesParser(), [text])):
        assert "".join(read(HermesParser(), pieces)) == text


def test_text_is_shown_as_soon_as_it_is_sure():
    parser = HermesParser()
    assert parser.add("Hello <") == ["Hello "] and parser.add("b> <tool") == ["<b> "]


@pytest.mark.parametrize(
    ("inside", "text", "reasoning", "content"),
    [
        (False, "<think>\nhm\n</think>\n\nyes", "\nhm\n", "yes"),
        (False, "\n<think>hm", "hm", ""),
        (False, "no <think> at the start", "", "no <think> at the start"),
        (False, "<thin", "", "<thin"),
        (True, "hm</think>yes", "hm", "yes"),
        (True, "hm</thi", "hm</thi", ""),
        (True, "</think>yes </think>", "", "yes </think>"),
    ],
)
@given(data=st.data())
def test_reasoning_is_split_off_whatever_the_pieces(inside, text, reasoning, content, data):
    parser = ReasoningParser(inside)
    found = [part for piece in data.draw(cut(text)) for part in parser.add(piece)] + parser.finish()
    assert "".join(t for is_reasoning, t in found if is_reasoning) == reasoning
    assert "".join(t for is_reasoning, t in found if not is_reasoning) == content


def test_the_template_shows_how_calls_are_written():
    assert detect_parser("... <tool_call> ...") == "hermes"
    assert detect_parser("... <|python_tag|> ...") == "llama3_json"
    assert detect_parser("{% for m in messages %}{% endfor %}") is None


def test_the_schema_of_required_calls():
    schema = required_schema([{"name": "f", "parameters": {"type": "object"}}, {"name": "g"}], parallel=False)
    assert schema["maxItems"] == schema["minItems"] == 1
    assert [c["properties"]["name"] for c in schema["items"]["anyOf"]] == [{"const": "f"}, {"const": "g"}]
    assert "maxItems" not in required_schema([{"name": "f"}], parallel=True) and json.dumps(schema)


@pytest.mark.parametrize(
    "schema", [None, "http://json-schema.org/draft-04/schema#", "http://json-schema.org/draft-07/schema#"]
)
def test_references_of_a_tools_parameters_are_to_themselves(schema):
    """Also where two tools call different things the same."""
    said = {"$schema": schema} if schema else {}

    def functions(name, kind, place, **more):
        x = {"type": "object", "properties": {"x": {"$ref": f"#/{place}/X"}}, "additionalProperties": False}
        return {"name": name, "parameters": {**said, **x, place: {"X": {"type": kind}}, **more}}

    tree = {"type": "object", "properties": {"x": {"$ref": "#"}}, "additionalProperties": False}
    root = {"$ref": "#/definitions/X", "definitions": {"X": {"type": "object", "additionalProperties": False}}}
    tools = [
        functions("number", "integer", "$defs"),
        functions("text", "string", "$defs", **{"$id": "http://example.org/x"}),
        functions("older", "string", "definitions"),
        {"name": "tree", "parameters": {**said, **tree}},
        {"name": "root", "parameters": {**said, **root}},
    ]
    grammar = _grammar(StructuredOutputsParams(json=json.dumps(required_schema(tools, parallel=True))))

    def fits(name, parameters):
        text = json.dumps([{"name": name, "parameters": parameters}])
        matcher = LLMatcher(_bytes(), grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher.try_consume_tokens(list(text.encode())) == len(text)

    assert fits("number", {"x": 1}) and not fits("number", {"x": "a"})
    assert fits("text", {"x": "a"}) and not fits("text", {"x": 1})
    assert fits("older", {"x": "a"}) and not fits("older", {"x": 1})
    assert fits("tree", {"x": {"x": {}}}) and not fits("tree", {"x": []})
    assert fits("root", {}) and not fits("root", {"x": 1})
