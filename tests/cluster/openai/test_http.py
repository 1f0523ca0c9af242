"""Bodies, routes, errors and clients that leave."""

import json
import socket
import time

import openai
import pytest

from pagedray.scheduler.errors import EngineDead, Overloaded

KEYS = {"message", "type", "param", "code"}


def error_of(response):
    error = response.json()["error"]
    assert error.keys() == KEYS and isinstance(error["message"], str) and error["message"]
    assert error["param"] is None or isinstance(error["param"], str)
    assert "Traceback" not in response.text and "pydantic" not in response.text.lower() and len(response.content) < 1500
    return error


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    "content",
    [
        b"[]", b"true", b"null", b"123", b'"str"', b"{", b"", b"\xff\xfe", b'{"prompt": "\xff"}',
        b'\xef\xbb\xbf{"prompt": "a"}', b'{"prompt": "a", "messages": [], "x": "emoji \\ud83d"}',
        b'{"x": "\\uDE00\\ud83d"}', b'{"\\ud83d": 1, "\\ud83d": 2}', b'{"prompt": "a", "prompt": "b"}',
        b"[" * 50_000, b'{"a":' * 50_000,
        b"[" * 50_000 + b"]" * 50_000, b"1" * 5000, b"{'a': 1}", b'{"a": 1} x', '{"prompt": "a"}'.encode("utf-16"),
        b'{"messages": [' + b",".join([b"5"] * 10_000) + b"]}",
        b'{"messages": {"role": "user"}}', b'{"messages": "' + b"x" * 100_000 + b'"}',
        b'{"messages": [{"role": "user", "content": "a"}], "temperature": "' + b"x" * 100_000 + b'"}',
        b'{"' + b"x" * 100_000 + b'": NaN}',
    ],
    ids=lambda c: repr(c[:24]),
)  # fmt: skip
def test_bodies_that_are_not_requests(api, path, content):
    response = api.post(path, content=content)
    assert response.status_code == 400, response.text[:300]
    assert error_of(response)["type"] == "invalid_request_error"
    api.check_alive()


def test_a_pair_of_surrogates_is_a_character(api):
    assert (
        api.post("/v1/completions", content=b'{"prompt": "\\ud83d\\ude00", "echo": true}')
        .json()["choices"][0]["text"]
        .startswith("😀")
    )


def test_wrong_types_name_the_field(api):
    response = api.post("/v1/chat/completions", {"messages": {"role": "user"}})
    assert (response.status_code, error_of(response)["param"]) == (400, "messages")
    response = api.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}, {"content": "b"}]})
    assert error_of(response)["param"] == "messages[1].role"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": None}, "messages must be an array"),
        ({"messages": []}, "messages must not be empty"),
        ({"messages": ["a"]}, "messages[0] must be an object"),
        ({"messages": [{"content": "a"}]}, "messages[0].role is required"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is required"),
        ({"temperature": "0"}, "temperature must be a number"),
        ({"n": 1.5}, "n must be an integer"),
        ({"stream": 1}, "stream must be true or false"),
        ({"stop": [1]}, "stop[0] must be a string"),
        ({"logit_bias": []}, "logit_bias must be an object"),
        ({"max_completion_tokens": 0}, "max_completion_tokens must be at least 1"),
        ({"priority": 2**31}, "priority must be under 2147483648"),
    ],
)
def test_errors_speak_of_json(api, fields, message):
    body = {"messages": [{"role": "user", "content": "a"}]} | fields
    assert error_of(api.post("/v1/chat/completions", body))["message"] == message


def test_a_field_cannot_forge_a_line_of_the_log(api, caplog):
    api.post("/v1/completions", {"prompt": "a", "x\r\nERROR forged": 1})
    (message,) = [r.getMessage() for r in caplog.records if "unknown" in r.getMessage()]
    assert "forged" in message and "\n" not in message and "\r" not in message


def test_tokenize_gives_the_ids_of_a_prompt_and_detokenize_its_text(api):
    texts = api.post("/tokenize", {"prompt": "Hello", "return_token_strs": True}).json()
    assert (texts["count"], texts["token_strs"]) == (2, ["<s>", "Hello"]) and texts["max_model_len"] > 0
    plain = api.post("/tokenize", {"prompt": "Hello", "add_special_tokens": False}).json()
    assert plain["tokens"] == texts["tokens"][1:] and plain["token_strs"] is None
    messages = [{"role": "user", "content": "Hello"}]
    chat = api.post("/tokenize", {"messages": messages}).json()
    assert chat["count"] == api.post("/v1/chat/completions", {"messages": messages}).json()["usage"]["prompt_tokens"]
    text = api.post("/detokenize", {"tokens": chat["tokens"]}).json()
    assert text == {"prompt": "<s><|user|>Hello<|end|><|assistant|>"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": ["a", "b"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "b"}, "model"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_what_cannot_be_tokenized_is_named(api, path, body, param):
    response = api.post(path, body)
    assert response.status_code in (400, 404) and error_of(response)["param"] == param


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "application/json; charset=latin-1"},
        {"Content-Type": ""},
        {"Content-Encoding": "gzip"},
    ],
)
def test_wrong_content_types(api, headers):
    response = api.post("/v1/completions", {"prompt": "a"}, headers=headers)
    assert response.status_code == 415
    error_of(response)


def test_right_content_types(api):
    for content_type in ("application/json; charset=utf-8", "Application/JSON", 'application/json;charset="UTF8"'):
        assert api.post("/v1/completions", {"prompt": "a"}, headers={"Content-Type": content_type}).status_code == 200


def test_a_body_over_the_limit(make_api):
    api = make_api(max_body_bytes=1000)
    body = json.dumps({"prompt": "a", "user": "x" * 1000}).encode()
    response = api.post("/v1/completions", content=body)
    assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")
    assert api.post("/v1/completions", content=body[:900] + b'"}').status_code == 200
    api.check_alive()


def test_who_asks_before_sending_a_body_that_is_too_large_sends_none(make_api, listen):
    host, port = listen(make_api(max_body_bytes=1000).app).removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as s:
        s.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 5000\r\nExpect: 100-continue\r\n\r\n"
        )
        answer = b"".join(iter(lambda: s.recv(4096), b"")).lower()
    assert answer.startswith(b"http/1.1 413 ") and b"connection: close" in answer


def test_an_endless_body_is_cut_off_while_it_comes(make_api, listen):
    api = make_api(max_body_bytes=100_000)
    host, port = listen(api.app).removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as s:
        s.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        for _ in range(12):
            s.sendall(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
        assert s.recv(4096).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/v1/nowhere", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/v1/completions/", 404),
        ("GET", "/docs", 404),
        ("GET", "/" + "x" * 10_000, 404),
    ],
)
def test_wrong_paths_and_methods(api, method, path, status):
    response = api.request(method, path)
    assert (response.status_code, error_of(response)["type"]) == (status, "invalid_request_error")


def test_models(api):
    (card,) = api.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["created"], card["max_model_len"]) == ("org/tiny", "model", 1700000000, 64)
    assert api.get("/v1/models/org/tiny").json() == card
    response = api.get("/v1/models/unknown")
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")


def test_the_model_of_a_request(api):
    assert api.complete(model="org/tiny").status_code == api.complete().status_code == 200
    response = api.complete(model="org/tinny")
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "did you mean org/tiny" in error["message"]
    assert len(api.complete(model="x" * 100_000).content) < 1000
    api.models["other"] = api.models["org/tiny"]
    assert api.complete(model=None).status_code == 400


def test_health_metrics_version(api):
    assert api.get("/health").status_code == 200
    assert api.get("/metrics").text.startswith("# TYPE") and "text/plain" in api.get("/metrics").headers["content-type"]
    assert api.get("/version").json()["version"]
    api.sick = EngineDead("no worker group is up")
    response = api.get("/health")
    assert (response.status_code, error_of(response)["code"]) == (503, "engine_dead")
    api.sick = ZeroDivisionError("secret")
    response = api.get("/health")
    assert response.status_code == 500 and "secret" not in response.text


# -- the official client


@pytest.fixture
def client(api, listen):
    return openai.OpenAI(base_url=f"{listen(api.app)}/v1", api_key="none", max_retries=0, timeout=10)


HI = [{"role": "user", "content": "hi"}]


def test_the_official_client_reads_answers(api, client):
    answer = client.chat.completions.create(model="org/tiny", messages=HI, logprobs=True, top_logprobs=2, n=2)
    assert [c.message.content for c in answer.choices] == ["Hello world"] * 2
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    completion = client.completions.create(model="org/tiny", prompt=["a", "b"], logprobs=1, extra_body={"top_k": 3})
    assert [c.text for c in completion.choices] == ["Hello world"] * 2
    assert api.engine.requests[-1].sampling.top_k == 3
    assert client.models.retrieve("org/tiny").id == client.models.list().data[0].id == "org/tiny"


def test_the_official_client_reads_streams(client):
    stream = client.chat.completions.create(
        model="org/tiny", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello world"
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].usage.completion_tokens == 12
    stream = client.completions.create(model="org/tiny", prompt="a", stream=True)
    assert "".join(c.choices[0].text for c in stream) == "Hello world"


def test_the_official_client_raises_the_right_errors(api, client):
    def ask(**fields):
        return client.chat.completions.create(**({"model": "org/tiny", "messages": HI} | fields))

    with pytest.raises(openai.NotFoundError) as caught:
        ask(model="does-not-exist")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        ask(temperature=9)
    assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")
    api.engine.script = lambda request: [Overloaded("full")]
    with pytest.raises(openai.RateLimitError):
        ask(stream=True)
    api.engine.script = lambda request: [*api.engine.spell("ab")[:2], EngineDead("gone")]
    with pytest.raises(openai.APIError, match="gone"):
        list(ask(stream=True))
    with pytest.raises(openai.InternalServerError):
        ask()


# -- clients that leave


def wait_for(condition, seconds=2.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stage", ["before the first token", "between tokens", "while tokens flow"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_aborts_its_sequences(api, listen, stream, stage, n):
    def script(request):
        if stage == "before the first token":
            return [60.0]
        if stage == "between tokens":
            return [*api.engine.spell("ab")[:2], 60.0]
        return (step for _ in range(10_000) for step in ([72], 0.001))

    api.engine.script = script
    api.models["org/tiny"] = type(api.models["org/tiny"])("org/tiny", api.tokenizer, 50_000, 0)
    host, port = listen(api.app).removeprefix("http://").split(":")
    body = json.dumps({"prompt": "a", "stream": stream, "n": n, "max_tokens": 40_000}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection((host, int(port)), timeout=10) as s:
        s.sendall(head.encode() + b"\r\n\r\n" + body)
        wait_for(lambda: len(api.engine.running) == n)
        if stream and stage != "before the first token":
            assert s.recv(100)
    wait_for(lambda: not api.engine.running, 1.0)
    assert len(api.engine.aborted) == n


def test_a_client_that_leaves_half_a_body_behind(api, listen, caplog):
    url = listen(api.app)
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as s:
        s.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
        )
        time.sleep(0.05)
    time.sleep(0.1)
    assert not caplog.records
    assert not api.engine.requests
