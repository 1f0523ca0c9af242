"""What chat and completions answer, streamed and whole."""

from dataclasses import replace

import pytest

from pagedray.cluster.openai import protocol
from pagedray.scheduler.errors import DeadlineUnmeetable, EngineDead, Overloaded, RateLimited
from pagedray.scheduler.request import StructuredOutputsParams


def joined(events, index=0):
    """Text, finish reasons and logprob entries of a choice, from the chunks of either endpoint."""
    text, reasons = "", []
    for event in events[:-1]:
        for choice in event["choices"]:
            if choice["index"] == index:
                text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    return text, reasons


def chunks(events):
    return [e for e in events if e != "[DONE]" and e["choices"]]


def test_chat_whole(api):
    answer = api.chat("hi").json()
    assert answer["object"] == "chat.completion" and answer["model"] == "org/tiny" and answer["id"]
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello world", "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    prompt = api.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert api.engine.requests[0].prompt_token_ids == tuple(prompt)
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 12,  # the end of sequence is a token
        "total_tokens": len(prompt) + 12,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_chat_streamed(api, events):
    got = events(api.chat("hi", stream=True))
    assert got[-1] == "[DONE]"
    assert {e["object"] for e in got[:-1]} == {"chat.completion.chunk"} and len({e["id"] for e in got[:-1]}) == 1
    deltas = [e["choices"][0]["delta"] for e in got[:-1]]
    assert deltas[0] == {"role": "assistant", "content": "H"} and deltas[1] == {"content": "e"} and deltas[-1] == {}
    assert joined(got) == ("Hello world", ["stop"])
    assert not any("usage" in e for e in got[:-1])


def test_one_chunk_an_arrival(api, events):
    api.engine.script = lambda request: api.engine.spell("Hello world!", together=5)
    assert [c["choices"][0]["text"] for c in chunks(events(api.complete(stream=True)))] == ["Hello", " worl", "d!"]


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_no_usage_in_a_stream_unless_asked_for(api, events, options):
    for response in (api.chat(stream=True, stream_options=options), api.complete(stream=True, stream_options=options)):
        assert not any("usage" in e for e in events(response)[:-1])


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("kind", ["chat", "complete"])
def test_usage_in_a_stream(api, events, kind, n):
    api.engine.num_cached_tokens = 2
    ask = getattr(api, kind)
    got = events(ask(stream=True, n=n, stream_options={"include_usage": True}))
    *others, last, done = got
    assert done == "[DONE]" and last["choices"] == []
    assert all(e["usage"] is None and e["choices"] for e in others)
    assert last["usage"] == ask(n=n).json()["usage"]
    assert last["usage"]["completion_tokens"] == 12 * n
    assert last["usage"]["prompt_tokens"] == len(api.engine.requests[0].prompt_token_ids)
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


@pytest.mark.parametrize("kind", ["chat", "complete"])
def test_usage_in_every_chunk_as_vllm_has_it(api, events, kind):
    both = {"include_usage": True, "continuous_usage_stats": True}
    *chunks_, last, _ = events(getattr(api, kind)(stream=True, stream_options=both))
    assert [c["usage"]["completion_tokens"] for c in chunks_] == list(range(1, 13))
    assert chunks_[-1]["usage"] == last["usage"] and last["choices"] == []
    alone = events(getattr(api, kind)(stream=True, stream_options={"continuous_usage_stats": True}))
    assert not any("usage" in e for e in alone[:-1])


def test_stream_options_without_stream_are_refused(api):
    response = api.chat(stream_options={"include_usage": True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stream_options")


def each_its_own(api):
    return lambda request: api.engine.spell(f"{request.index}é" * 2)


def test_choices_and_prompts_keep_their_order(api, events):
    api.engine.script = each_its_own(api)
    ask = dict(prompt=["AAA", "BBB", "CCC"], n=2, echo=True, max_tokens=16, temperature=0)
    answer = api.complete(**ask).json()
    assert [c["index"] for c in answer["choices"]] == list(range(6))
    for i, choice in enumerate(answer["choices"]):
        assert choice["text"] == "ABC"[i // 2] * 3 + f"{i}é{i}é"
    assert answer["usage"]["prompt_tokens"] == 3 * 4
    got = events(api.complete(**ask, stream=True))
    for choice in answer["choices"]:
        assert joined(got, choice["index"]) == (choice["text"], [choice["finish_reason"]])


def test_choices_interleave(api, events):
    api.engine.script = each_its_own(api)
    order = [c["choices"][0]["index"] for c in chunks(events(api.chat(n=2, stream=True)))]
    assert order != sorted(order)


def test_choices_share_a_seed_and_differ_in_index(api):
    api.chat(n=3, seed=7)
    assert [(r.index, r.sampling.seed) for r in api.engine.requests] == [(0, 7), (1, 7), (2, 7)]
    assert len({r.request_id for r in api.engine.requests}) == 3
    api.engine.requests.clear()
    for _ in range(2):
        api.complete(prompt=["a", "a"])
    first, second = api.engine.requests[:2], api.engine.requests[2:]
    assert [r.index for r in first] == [0, 1] and len({r.sampling.seed for r in first}) == 1
    assert first[0].sampling.seed != second[0].sampling.seed and first[0].sampling.seed >= 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_a_temperature_of_nothing_is_not_one_that_was_left_out(api, path):
    said = {"/v1/completions": "prompt", "/v1/responses": "input"}
    body = {said[path]: "x"} if path in said else {"messages": [{"role": "user", "content": "x"}]}
    cases = [({}, 1.0, False), ({"temperature": None}, 1.0, False), ({"temperature": 0}, 0.0, True)]
    cases += [({"temperature": 1e-9}, 1e-9, True), ({"temperature": 1e-4}, 1e-4, False), ({"top_p": 0}, 1.0, True)]
    for fields, temperature, greedy in [*cases, ({"top_k": 1}, 1.0, True), ({"top_k": 0}, 1.0, False)]:
        assert api.post(path, body | fields).status_code == 200
        sampling = api.engine.requests[-1].sampling
        assert (sampling.temperature, sampling.greedy) == (temperature, greedy), fields


def test_what_a_request_does_not_say_the_models_makers_do(api):
    api.models["org/tiny"] = replace(api.models["org/tiny"], sampling_defaults={"temperature": 0.6, "top_k": 20})
    for fields, expected in (
        ({}, (0.6, 20, 1.0)),
        ({"temperature": 0, "top_p": 0.9}, (0.0, 20, 0.9)),
        ({"top_k": 0}, (0.6, 0, 1.0)),
    ):
        assert api.chat(**fields).status_code == 200
        sampling = api.engine.requests[-1].sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == expected


def test_prompts_of_token_ids(api):
    assert api.complete(prompt=[1, 2, 3]).json()["usage"]["prompt_tokens"] == 3
    answer = api.complete(prompt=[[72, 73], [74]], echo=True).json()
    assert [c["text"] for c in answer["choices"]] == [api.tokenizer.decode(p) + "Hello world" for p in ([72, 73], [74])]
    assert [r.prompt_token_ids for r in api.engine.requests] == [(1, 2, 3), (72, 73), (74,)]


def test_settings_reach_the_engine(api):
    end = api.tokenizer.eos_token_ids[1]
    fields = dict(
        temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.2,
        frequency_penalty=-0.3, seed=9, stop=["x"], stop_token_ids=[3], max_tokens=7, min_tokens=2, ignore_eos=True,
        skip_special_tokens=False, include_stop_str_in_output=True,
    )  # fmt: skip
    api.complete(**fields, logit_bias={str(end): -100}, priority=-3, cache_salt="salt")
    (request,) = api.engine.requests
    expected = fields | {"stop": ("x",), "stop_token_ids": (3,), "logit_bias": {end: -100}}
    assert {name: getattr(request.sampling, name) for name in expected} == expected
    assert (request.model, request.priority, request.cache_salt) == ("org/tiny", -3, "salt")


def test_defaults_and_nulls(api):
    names = ("temperature", "top_p", "n", "stop", "seed", "max_tokens", "logit_bias", "top_k", "stream", "logprobs")
    for fields in ({}, dict.fromkeys(names)):
        api.engine.requests.clear()
        assert api.complete(**fields).status_code == api.chat(**fields).status_code == 200
        completion, chat = (r.sampling for r in api.engine.requests)
        assert (completion.temperature, completion.top_p, completion.max_tokens) == (1.0, 1.0, 16)
        assert chat.max_tokens is None  # its group knows how far the context goes


# -- logprobs


def test_chat_logprobs(api, events):
    api.engine.script = lambda request: api.engine.spell("né")
    for fields, k in (({}, 0), ({"top_logprobs": 0}, 0), ({"top_logprobs": None}, 0), ({"top_logprobs": 5}, 5)):
        answer = api.chat(logprobs=True, **fields).json()
        content = answer["choices"][0]["logprobs"]["content"]
        assert len(content) == answer["usage"]["completion_tokens"] == 4
        assert [bytes(c["bytes"]) for c in content] == [b"n", b"\xc3", b"\xa9", b"<|end|>"]
        assert {c["logprob"] for c in content} == {-9999.0}
        assert all([t["logprob"] for t in c["top_logprobs"]] == [-1.0 - i for i in range(k)] for c in content)
        got = events(api.chat(logprobs=True, **fields, stream=True))
        assert [x for c in chunks(got) for x in (c["choices"][0]["logprobs"] or {"content": []})["content"]] == content
    assert api.chat().json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("k", [0, 2])
def test_completions_logprobs(api, events, k):
    api.engine.script = lambda request: api.engine.spell("né!")
    answer = api.complete(logprobs=k).json()
    got = answer["choices"][0]["logprobs"]
    assert got["tokens"] == ["n", "\ufffd", "\ufffd", "!", "<|end|>"]
    assert got["token_logprobs"] == [-9999.0] * 5
    assert got["text_offset"] == [0, 1, 1, 2, 3]
    likeliest = {api.tokenizer.token_text(10 + i): -1.0 - i for i in range(k)}
    assert got["top_logprobs"] == [likeliest | {t: -9999.0} for t in got["tokens"]]
    streamed = [c["choices"][0]["logprobs"] for c in chunks(events(api.complete(logprobs=k, stream=True)))]
    assert {name: [x for part in streamed for x in part[name]] for name in got} == got


def test_logprobs_of_held_back_tokens_are_kept(api, events):
    api.engine.script = lambda request: api.engine.spell("abcd")
    got = chunks(events(api.chat(logprobs=True, stream=True, stop="abcx")))
    assert [c["choices"][0]["delta"].get("content") for c in got] == ["abcd", None]
    assert [len(c["choices"][0]["logprobs"]["content"]) for c in got] == [4, 1]


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat", {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ("chat", {"top_logprobs": 3}, "top_logprobs"),
        ("chat", {"logprobs": 1}, "logprobs"),
        ("complete", {"logprobs": 21}, "logprobs"),
        ("complete", {"logprobs": -1}, "logprobs"),
        ("complete", {"logprobs": True}, "logprobs"),
    ],
)
def test_logprobs_refused(api, kind, fields, param):
    response = getattr(api, kind)(**fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert not api.engine.requests


# -- stop strings and ends


@pytest.mark.parametrize("kind", ["chat", "complete"])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_over_tokens(api, events, kind, include):
    api.engine.script = lambda request: api.engine.spell("Here: abcdefgh ijkl")
    ask = getattr(api, kind)
    fields = dict(stop=["cdefgh"], include_stop_str_in_output=include, max_tokens=30)
    answer = ask(**fields).json()
    choice = answer["choices"][0]
    text = choice["text"] if kind == "complete" else choice["message"]["content"]
    assert text == ("Here: abcdefgh" if include else "Here: ab")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "cdefgh")
    assert answer["usage"]["completion_tokens"] == len("Here: abcdefgh")
    got = events(ask(**fields, stream=True))
    assert joined(got) == (text, ["stop"])
    assert len(api.engine.aborted) == 2 and not api.engine.running


def test_held_back_text_is_flushed_without_empty_deltas(api, events):
    fields = dict(stop="Hello" + "x" * 25, max_tokens=3)
    assert api.chat(**fields).json()["choices"][0]["message"]["content"] == "Hel"
    got = chunks(events(api.chat(**fields, stream=True)))
    assert [c["choices"][0]["delta"] for c in got] == [{"role": "assistant", "content": "Hel"}]
    assert got[0]["choices"][0]["finish_reason"] == "length"


def test_stop_forms(api):
    for stop in (None, [], "w", ["w", "zz"]):
        assert api.complete(stop=stop).status_code == 200
    for stop in ("", [""], ["a", ""], ["a"] * 5, 3, [3]):
        response = api.complete(stop=stop)
        assert response.status_code == 400 and response.json()["error"]["param"].startswith("stop"), stop
    api.check_alive()


def test_min_tokens_and_a_stop_string(api):
    answer = api.complete(stop=["H"], min_tokens=8, max_tokens=8).json()
    assert answer["choices"][0]["text"] == "Hello wo" and answer["usage"]["completion_tokens"] == 8


def test_a_second_end_of_sequence_and_a_stop_token_leave_no_text(api):
    api.engine.script = lambda request: api.engine.spell("Hi", end="<|eot|>")
    for fields in ({}, {"skip_special_tokens": False}):
        choice = api.complete(**fields).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("Hi", "stop", None)
    (i,) = api.tokenizer.encode("i", add_special_tokens=False)
    choice = api.complete(stop_token_ids=[i]).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("H", "stop", i)


def test_line_separators_are_escaped_in_streams(api, events):
    api.engine.script = lambda request: api.engine.spell("a\u2028b\x85c\r\n\nd")
    response = api.complete(stream=True)
    assert joined(events(response))[0] == "a\u2028b\x85c\r\n\nd"
    assert response.content.isascii()


# -- lengths


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_at_the_edge_of_the_context(api, stream):
    fits = api.complete(prompt=[1] * 63, stream=stream)  # the default of 16 is cut to what is left
    assert fits.status_code == 200 and api.engine.requests[-1].sampling.max_tokens == 1
    for length in (64, 65, 65):
        response = api.complete(prompt=[1] * length, stream=stream)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
        assert "64" in error["message"] and str(length) in error["message"]
    assert api.complete(prompt=[1] * 60, max_tokens=4, stream=stream).status_code == 200
    response = api.complete(prompt=[1] * 60, max_tokens=5, stream=stream)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    long = api.chat("word " * 30, stream=stream)
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert len(api.engine.requests) == 2
    api.check_alive()


def test_one_prompt_too_long_and_none_is_submitted(api):
    assert api.complete(prompt=[[1], [1] * 64]).status_code == 400
    assert not api.engine.requests


@pytest.mark.parametrize("value", [0, -1, 10**9, 1e9, 10**30, "5", True, 1.5])
def test_bad_max_tokens(api, value):
    for name in ("max_tokens", "max_completion_tokens"):
        response = api.chat(**{name: value})
        assert (response.status_code, response.json()["error"]["param"]) == (400, name), response.text
    api.check_alive()


def test_max_completion_tokens_wins(api):
    assert api.chat(max_tokens=9, max_completion_tokens=3).json()["usage"]["completion_tokens"] == 3


def test_completions_of_no_tokens(api, events):
    answer = api.complete("abc", max_tokens=0, echo=True).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("abc", "length")
    assert answer["usage"]["completion_tokens"] == 0
    assert joined(events(api.complete("abc", max_tokens=0, stream=True))) == ("", ["length"])
    assert api.complete("abc", max_tokens=0, min_tokens=1).status_code == 400
    refused = api.chat(min_tokens=1_000_000)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "min_tokens"
    assert not api.engine.requests


# -- empty prompts


@pytest.mark.parametrize("prompt", ["", [""], ["a", ""]])
def test_an_empty_prompt_is_a_bos_where_there_is_one(api, make_api, prompt):
    assert api.complete(prompt).status_code == 200
    assert api.engine.requests[-1].prompt_token_ids == (api.tokenizer.bos_token_id,)
    without = make_api(tokenizer=_no_bos())
    response = without.complete(prompt)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    assert not without.engine.requests
    without.check_alive()


def _no_bos():
    from fake_engine import byte_tokenizer

    return byte_tokenizer(bos=False)


def test_nothing_at_all_is_refused(api):
    assert api.complete([]).json()["error"]["param"] == "prompt"
    assert api.post("/v1/completions", {}).json()["error"]["param"] == "prompt"
    assert api.post("/v1/chat/completions", {"messages": []}).json()["error"]["param"] == "messages"
    assert api.chat("").status_code == 200  # an empty message still has a template around it


@pytest.mark.parametrize(
    "prompt", [[-1], [10**9], [10**30], [[1], [999]], [1.0], [True], [1, "a"], {"a": 1}, 5, [[[1]]]]
)
def test_prompts_that_are_none(api, prompt):
    response = api.complete(prompt)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    api.check_alive()


# -- chat templates


def chat(api, *messages, **fields):
    return api.post("/v1/chat/completions", {"messages": list(messages), **fields})


def test_a_template_that_refuses_says_why(api):
    response = chat(api, {"role": "system", "content": "x"}, {"role": "user", "content": "y"})
    assert response.status_code == 400 and "System role not supported" in response.json()["error"]["message"]
    api.check_alive()


def test_no_template(make_api):
    from fake_engine import byte_tokenizer

    response = make_api(tokenizer=byte_tokenizer(template=None)).chat()
    assert response.status_code == 400 and "chat template" in response.json()["error"]["message"]


def test_text_parts_are_text(api):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(api, {"role": "user", "content": parts}).status_code == 200
    assert api.tokenizer.decode(api.engine.requests[0].prompt_token_ids) == "<|user|>a\nb<|assistant|>"


def test_a_second_turn_that_replays_the_first_reply(api):
    reply = api.chat("hi").json()["choices"][0]["message"]
    assert chat(api, {"role": "user", "content": "hi"}, reply, {"role": "user", "content": "go on"}).status_code == 200
    text = api.tokenizer.decode(api.engine.requests[-1].prompt_token_ids)
    assert text == "<|user|>hi<|assistant|>Hello world<|user|>go on<|assistant|>"


def test_calls_and_their_results_in_the_history(api):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": "2"}
    assert chat(api, {"role": "user", "content": "x"}, asked, result).status_code == 200


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]},
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
        {"role": "user", "content": 5},
        {"role": "user", "content": [5]},
        {"role": 5, "content": "x"},
        {"content": "x"},
        "x",
        None,
    ],
)
def test_messages_that_are_none(api, message):
    response = chat(api, message)
    assert response.status_code == 400 and response.json()["error"]["param"].startswith("messages")
    api.check_alive()


def test_template_settings(api):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    cases = [({}, "b<|end|><|assistant|>"), ({"add_generation_prompt": False}, "b<|end|>")]
    for fields, end in [*cases, ({"continue_final_message": True}, "b")]:
        assert chat(api, *messages, **fields).status_code == 200
        ids = api.engine.requests[-1].prompt_token_ids
        assert api.tokenizer.decode(ids, skip_special_tokens=False) == f"<s><|user|>a<|end|><|assistant|>{end}"
    assert chat(api, *messages, chat_template_kwargs={"nope": 1}).status_code == 200
    for name in ("messages", "self", "tools", "add_generation_prompt", "tokenize", "bos_token"):
        response = chat(api, *messages, chat_template_kwargs={name: True})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template_kwargs"), name
    both = chat(api, *messages, continue_final_message=True, add_generation_prompt=True)
    assert both.status_code == 400


def test_one_bos(api):
    bos = api.tokenizer.bos_token_id
    api.chat("hi")
    api.complete("hi")
    api.complete("<s>hi")
    api.complete("hi", add_special_tokens=False)
    assert [r.prompt_token_ids.count(bos) for r in api.engine.requests] == [1, 1, 1, 0]


# -- settings out of range


BAD = [
    *(("temperature", v) for v in (-1, 2.0001, "0", True, 10**400, [])),
    *(("top_p", v) for v in (1.0001, -0.1, "1")),
    *(("top_k", v) for v in (-2, 1.5, "1")),
    *(("min_p", v) for v in (-1, 2)),
    *(("repetition_penalty", v) for v in (0, -1, 1e-30, 1e30)),
    *(("presence_penalty", v) for v in (2.1, -2.1)),
    *(("frequency_penalty", v) for v in (2.1, -2.1)),
    *(("n", v) for v in (0, -1, 129, 1000000, 1.5, True, "1")),
    *(("best_of", v) for v in (2, 0, -1, "1")),
    *(("seed", v) for v in (2**63, 1.5, "1", 10**100)),
    *(("min_tokens", v) for v in (-1, 17, 1.5)),
    *(("logit_bias", v) for v in ({"x": 1}, {"-1": 1}, {"99999": 1}, {"1": 101}, {"1": "a"}, [1], {"²": 1})),
    *(("stop_token_ids", v) for v in ([-1], [99999], "a", ["a"], 1)),
    *(("stream", v) for v in (1, "true")),
    *(("stream_options", v) for v in (1, {"include_usage": 1})),
    *(("priority", v) for v in (2**40, "a")),
    *(("cache_salt", v) for v in (1, [])),
    *(("model", v) for v in ("", 123)),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda v: str(v)[:24])
def test_settings_out_of_range_are_named(api, name, value):
    response = api.complete(**{name: value})
    error = response.json()["error"]
    assert response.status_code == 400, response.text
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith(name) and name in error["message"] and len(response.content) < 700
    assert not api.engine.requests


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "repetition_penalty"])
def test_numbers_that_are_not_finite(api, name, number):
    response = api.post("/v1/completions", content=f'{{"prompt": "a", "{name}": {number}}}'.encode())
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, name) and name in error["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 0), ("temperature", 1e-9), ("temperature", 1), ("top_p", 0), ("top_p", 1), ("top_k", -1),
     ("top_k", 0), ("top_k", 100000), ("seed", -1), ("n", 3), ("best_of", 1), ("priority", -1)],
)  # fmt: skip
def test_settings_at_the_edge_are_fine(api, name, value):
    assert api.complete(**{name: value}).status_code == 200


def test_as_many_choices_as_promised(api):
    assert len(api.complete(n=128, max_tokens=1).json()["choices"]) == 128
    response = api.complete(prompt=["a"] * 100, n=128)
    assert response.status_code == 400 and "2048" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("name", "value", "harmless"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}], []),
        ("tool_choice", "required", "none"),
        ("suffix", "x", ""),
        ("audio", {}, None),
        ("modalities", ["audio"], ["text"]),
        ("use_beam_search", True, False),
        ("best_of", 4, 1),
        ("prompt_logprobs", 1, None),
        ("user", None, "me"),
        ("no_such_field", None, {"deep": [1]}),
    ],
)
def test_what_is_not_supported_is_refused_by_name(api, name, value, harmless):
    if value is not None:
        response = api.chat(**{name: value})
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)
    assert api.chat(**{name: harmless}).status_code == 200


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}},
            {"json": '{"type": "null"}'},
        ),
        ({"guided_json": {"type": "null"}}, {"json": '{"type": "null"}'}),
        ({"guided_json": '{"type": "null"}'}, {"json": '{"type": "null"}'}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ("a", "b")}),
        ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
        ({"structured_outputs": {"choice": ["a"]}}, {"choice": ("a",)}),
        ({"structured_outputs": {"json": {"type": "null"}, "regex": None}}, {"json": '{"type": "null"}'}),
    ],
)
@pytest.mark.parametrize("kind", ["chat", "complete"])
def test_the_form_of_an_answer_reaches_the_engine(api, kind, fields, form):
    assert getattr(api, kind)(**fields).status_code == 200
    assert api.engine.requests[0].sampling.structured_outputs == StructuredOutputsParams(**form)


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "text"}}, {"guided_choice": None}, {"guided_json": None}]
)
def test_no_form(api, fields):
    assert api.chat(**fields).status_code == 200
    assert api.engine.requests[0].sampling.structured_outputs is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}, "response_format"),
        ({"guided_regex": "(("}, "guided_regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": "start: x"}, "guided_grammar"),
        ({"guided_grammar": "root ::="}, "guided_grammar"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_forms_that_cannot_be_kept_to_are_named(api, fields, param):
    response = api.chat(**fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param) and len(error["message"]) < 500
    assert not api.engine.requests


def test_tools_that_must_not_be_called_are_fine(api):
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert api.chat(tools=tools, tool_choice="none").status_code == 200


# -- errors of the engine


def test_a_call_does_not_find_the_queue_full_of_its_own_prompts(api, events):
    api.engine.room = 3
    api.engine.script = each_its_own(api)
    expected = [f"{i}é{i}é" for i in range(20)]
    for stream in (False, True):
        response = api.complete(["a"] * 10, n=2, stop=["\n"], stream=stream)
        if stream:
            got = events(response)
            assert [joined(got, i)[0] for i in range(20)] == expected
        else:
            assert [c["text"] for c in response.json()["choices"]] == expected
    assert not api.engine.running
    api.engine.script = lambda request: [60.0] if request.index else [0.01, EngineDead("gone")]
    assert api.complete(["a"] * 10).status_code == 503  # and whoever waits is told
    assert not api.engine.running
    api.engine.room = 0  # others have filled it
    assert api.complete(["a"] * 10).status_code == 429
    api.engine.room = 100
    for error in (RateLimited("enough", 1.0), DeadlineUnmeetable("late", 1.0)):  # which waiting would not mend
        api.engine.script = lambda request, error=error: [error] if request.index else [60.0]
        assert api.complete(["a"] * 3).status_code == 429
    api.check_alive()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_an_error_before_the_first_token_has_its_own_status(api, stream, n):
    api.engine.script = lambda request: [Overloaded("the queue is full", 2.5)]
    response = api.chat(stream=stream, n=n)
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert response.json()["error"]["code"] == "overloaded"
    api.engine.script = lambda request: [EngineDead("the group is gone")]
    refused = api.complete(stream=stream, n=n)
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
    api.check_alive()


def test_an_error_in_a_stream_is_its_last_event(api, events):
    api.engine.script = lambda request: [*api.engine.spell("ab")[:2], EngineDead("the group is gone")]
    got = events(api.chat(stream=True))
    assert got[-1] == {"error": {"message": "the group is gone", "type": "service_unavailable_error", "param": None,
                                 "code": "engine_dead"}}  # fmt: skip
    assert joined(got)[0] == "ab"


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_in_one_choice_aborts_the_others(api, stream):
    def script(request):
        return [0.01, EngineDead("gone")] if request.index == 1 else [*api.engine.spell("a")[:1], 60.0]

    api.engine.script = script
    response = api.complete(n=3, stream=stream)
    assert "gone" in response.text and response.status_code == (200 if stream else 503)
    assert len(api.engine.aborted) == 3
    api.check_alive()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_the_unexpected_is_logged_and_not_told(api, caplog, stream, late):
    steps = api.engine.spell("a")[:1] if late else []
    api.engine.script = lambda request: [*steps, TimeoutError("secret: /srv/models")]
    response = api.chat(stream=stream)
    assert response.status_code == (200 if stream and late else 500)
    assert "secret" not in response.text and "Traceback" not in response.text and '"internal_error"' in response.text
    assert "secret" in caplog.text
    api.check_alive()


def test_an_engine_that_ends_without_a_reason(api):
    api.engine.script = lambda request: api.engine.spell("ab")[:1]
    assert api.complete().status_code == 503


def test_finite():
    values = [-1.0, float("-inf"), -1e30, float("nan")]
    assert [protocol.finite(v) for v in values] == [-1.0, -9999.0, -9999.0, -9999.0]
