"""POST /v1/embeddings, and the log-probabilities of prompts: shapes, settings that reach the engine, refusals."""

import base64
import struct

import openai
import pytest

from pagedray.scheduler.errors import EngineDead, Overloaded

THIRD = struct.unpack("<f", struct.pack("<f", 1 / 3))[0]


def embed(api, text="Hello", **fields):
    return api.post("/v1/embeddings", {"input": text, **fields})


def test_the_four_forms_of_input(api):
    answer = embed(api).json()
    assert (answer["object"], answer["model"]) == ("list", "org/tiny")
    assert answer["data"] == [{"object": "embedding", "index": 0, "embedding": [0.0, 2.0, THIRD]}]
    assert answer["usage"] == {"prompt_tokens": 2, "total_tokens": 2}
    for text, lengths in ((["Hello", "abc"], [2, 4]), ([5, 6, 7], [3]), ([[5, 6, 7], [8]], [3, 1]), ("", [1])):
        answer = embed(api, text).json()
        assert [(d["index"], d["embedding"][1]) for d in answer["data"]] == list(enumerate(lengths))
        assert answer["usage"]["prompt_tokens"] == sum(lengths)


def test_settings_reach_the_engine(api):
    embed(api, pooling="mean", priority=3, cache_salt="s", add_special_tokens=False)
    (request,) = api.engine.requests
    assert (request.pooling, request.priority, request.cache_salt, request.sampling.max_tokens) == ("mean", 3, "s", 1)
    assert len(request.prompt_token_ids) == 1
    assert embed(api, user="me", model="org/tiny", encoding_format=None).status_code == 200
    assert api.engine.requests[-1].pooling == "last"


def test_base64_is_the_same_numbers(api):
    text = embed(api, encoding_format="base64").json()["data"][0]["embedding"]
    assert struct.unpack("<3f", base64.b64decode(text)) == (0.0, 2.0, THIRD)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [1.5]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [10**9]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "x" * 64}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": 3}, "dimensions"),
        ({"pooling": "cls"}, "pooling"),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"priority": 0.5}, "priority"),
        ({"model": "nobody"}, "model"),
    ],
)
def test_refusals_name_the_field(api, fields, param):
    response = embed(api, **({"text": "a"} | {("text" if k == "input" else k): v for k, v in fields.items()}))
    assert response.status_code == (404 if param == "model" else 400)
    assert response.json()["error"]["param"] == param
    assert not api.engine.requests


def test_a_call_of_many_inputs_does_not_fill_the_queue(api):
    at_once = []

    def embed_and_count(request):
        at_once.append(len(api.engine.running))
        return b"\0" * 4

    api.engine.embed = embed_and_count
    answer = embed(api, [[i % 200] for i in range(2048)]).json()
    assert len(answer["data"]) == answer["usage"]["prompt_tokens"] == 2048
    assert 1 < max(at_once) <= 64 and not api.engine.running


def test_a_call_does_not_find_the_queue_full_of_its_own_inputs(api):
    api.engine.room = 3
    data = embed(api, ["a" * i for i in range(1, 30)]).json()["data"]
    assert [d["embedding"][1] for d in data] == [i + 1 for i in range(1, 30)]
    api.engine.room = 0  # others have filled it
    assert embed(api, ["a", "b"]).status_code == 429
    api.engine.room = 100
    api.check_alive()


def test_an_empty_input_is_a_bos_where_there_is_one(api):
    assert embed(api, [""]).json()["usage"]["prompt_tokens"] == 1
    assert api.engine.requests[-1].prompt_token_ids == (api.tokenizer.bos_token_id,)


@pytest.mark.parametrize(("error", "status"), [(Overloaded("full"), 429), (EngineDead("gone"), 503)])
def test_an_error_of_one_input_ends_all(api, error, status):
    def embed_or_fail(request):
        if request.prompt_token_ids == (9,):
            raise error
        return b"\0" * 4

    api.engine.embed = embed_or_fail
    assert embed(api, [[5], [9], [7]]).status_code == status
    assert not api.engine.running


def test_the_official_client_reads_embeddings(api, listen):
    client = openai.OpenAI(base_url=f"{listen(api.app)}/v1", api_key="none", max_retries=0, timeout=10)
    answer = client.embeddings.create(model="org/tiny", input=["Hello", "abc"])  # it asks for base64 by itself
    assert [d.embedding for d in answer.data] == [[0.0, 2.0, THIRD], [0.0, 4.0, THIRD]]
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model="org/tiny", input="a", dimensions=7)


# -- echo with log-probabilities


def test_an_echo_comes_with_its_log_probabilities(api):
    choice = api.complete("abé", echo=True, logprobs=2, max_tokens=3).json()["choices"][0]
    assert choice["text"] == "abéHello w"[: len(choice["text"])] and choice["text"].startswith("abé")
    told = choice["logprobs"]
    num = len(told["tokens"])
    assert num == len(api.engine.requests[0].prompt_token_ids) + 3
    assert num == len(told["token_logprobs"]) == len(told["top_logprobs"]) == len(told["text_offset"])
    assert told["tokens"][:3] == ["<s>", "a", "b"] and told["text_offset"][:4] == [0, 0, 1, 2]
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    assert all(value == -9999.0 for value in told["token_logprobs"][1:])  # what the fake's tokens have
    assert all(len(top) == 3 for top in told["top_logprobs"][1:])  # two likeliest, and the token itself
    assert told["text_offset"][-3:] == [3, 4, 5]
    assert api.engine.requests[0].sampling.prompt_logprobs == 2


@pytest.mark.parametrize("max_tokens", [0, 4])
@pytest.mark.parametrize("prompt", ["abc", [72, 73, 74], ["ab", "c"]], ids=str)
def test_the_same_streamed(api, events, prompt, max_tokens):
    ask = dict(prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens, n=2, stop=["lo w"])
    whole = api.complete(**ask).json()
    chunks = events(api.complete(**ask, stream=True, stream_options={"include_usage": True}))
    for choice in whole["choices"]:
        mine = [c for e in chunks[:-2] for c in e["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        for key, values in choice["logprobs"].items():
            assert [v for c in mine if c["logprobs"] for v in c["logprobs"][key]] == values
    assert chunks[-2]["usage"] == whole["usage"]


def test_a_text_alone_can_be_asked_about(api):
    answer = api.complete("abc", echo=True, logprobs=0, max_tokens=0).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("abc", "length", 0)
    assert choice["logprobs"]["tokens"] == ["<s>", "a", "b", "c"] and choice["logprobs"]["text_offset"] == [0, 0, 1, 2]
    (request,) = api.engine.requests
    assert (request.sampling.max_tokens, request.sampling.prompt_logprobs) == (1, 0)
    assert not api.engine.running
    alone = api.complete([65], echo=True, logprobs=1, max_tokens=0).json()["choices"][0]["logprobs"]
    assert alone["token_logprobs"] == [None]


def test_without_echo_a_prompt_tells_nothing(api):
    api.complete("abc", logprobs=2)
    assert api.engine.requests[0].sampling.prompt_logprobs is None


def test_the_log_probabilities_of_a_call_are_bounded(api, monkeypatch):
    monkeypatch.setattr("pagedray.cluster.openai.completions.MAX_PROMPT_LOGPROBS", 60)
    assert api.complete("abc", echo=True, logprobs=4, n=3).status_code == 200  # 4 tokens, 5 values, 3 choices
    response = api.complete(["abc", "d"], echo=True, logprobs=4, n=3)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "logprobs")
