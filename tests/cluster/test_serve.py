"""The whole path: HTTP, Ray Serve, global scheduler, worker group, tokens back; with the real `openai` client."""

import asyncio
import json
import socket
import time

import httpx
import openai
import pytest

pytestmark = pytest.mark.serve


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0)


def ask(text):
    return [{"role": "user", "content": text}]


def streamed(stream):
    """The text of a chat stream and its finish reason."""
    text, reason = "", None
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    return text, reason


def test_a_chat_is_answered_sensibly(client):
    answer = client.chat.completions.create(
        model="demo", messages=ask("What is the capital of France?"), temperature=0, max_tokens=32
    )
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens > 20 and answer.usage.total_tokens < 100


def test_a_stream_says_the_same_as_a_plain_answer(client):
    wish = dict(model="demo", messages=ask("Count from one to ten."), temperature=0, max_tokens=40)
    plain = client.chat.completions.create(**wish)
    text, reason = streamed(client.chat.completions.create(**wish, stream=True))
    assert (text, reason) == (plain.choices[0].message.content, plain.choices[0].finish_reason)


def test_seeded_choices_differ_from_each_other_and_repeat(client):
    wish = dict(model="demo", messages=ask("Invent a name for a ship."), n=3, seed=5, max_tokens=24, temperature=1.0)
    first, second = ([c.message.content for c in client.chat.completions.create(**wish).choices] for _ in range(2))
    assert first == second
    assert len(set(first)) > 1


def test_embeddings_tell_what_is_alike(client):
    texts = ["The cat sleeps on the sofa.", "A cat is sleeping on the couch.", "Interest rates rose by two percent."]
    for pooling in ("mean", "last"):
        answer = client.embeddings.create(model="demo", input=texts, extra_body={"pooling": pooling})
        alike, other = (_dot(answer.data[0].embedding, answer.data[i].embedding) for i in (1, 2))
        assert _dot(answer.data[0].embedding, answer.data[0].embedding) == pytest.approx(1.0, abs=1e-3)
        assert len(answer.data[0].embedding) == 576 and alike > other
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 15


def _dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def test_a_text_tells_how_likely_it_is(client):
    def ask(prompt, max_tokens):
        wish = dict(model="demo", prompt=prompt, logprobs=2, max_tokens=max_tokens, temperature=0, seed=0)
        return client.completions.create(**wish, extra_body={"add_special_tokens": False}, echo=True).choices[0]

    grown = ask("The capital of France is", 6)
    told = ask(grown.text, 0).logprobs
    assert told.tokens == grown.logprobs.tokens and told.token_logprobs[0] is None
    # The same whether the tokens were read or made: in bf16 not to the last bit.
    assert told.token_logprobs[1:] == pytest.approx(grown.logprobs.token_logprobs[1:], abs=0.15)
    assert "".join(told.tokens) == grown.text and told.text_offset == grown.logprobs.text_offset


def test_a_batch_is_answered_in_the_background(client, server):
    lines = [
        {
            "custom_id": f"r{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"{i} and", "max_tokens": 8, "temperature": 0},
        }
        for i in range(12)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    deadline = time.monotonic() + 120
    while (batch := client.batches.retrieve(batch.id)).status != "completed":
        assert batch.status in ("validating", "in_progress", "finalizing") and time.monotonic() < deadline, batch
        time.sleep(0.2)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (12, 0)
    answers = map(json.loads, client.files.content(batch.output_file_id).text.splitlines())
    texts = {a["custom_id"]: a["response"]["body"]["choices"][0]["text"] for a in answers}
    plain = client.completions.create(model="demo", **lines[3]["body"])
    assert len(texts) == 12 and texts["r3"] == plain.choices[0].text
    server.wait_idle(10)


def test_models_health_and_metrics(client, server):
    assert [m.id for m in client.models.list()] == ["demo"]
    assert httpx.get(f"{server.url}/health").status_code == 200
    text = httpx.get(f"{server.url}/metrics").text
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_hits_total",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "request_success_total",
    ):
        assert f"pagedray_{name}" in text, name


def test_32_concurrent_streams_and_gauges_return_to_zero(server):
    async def main():
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=240, max_retries=0)

        async def one(i):
            stream = await client.completions.create(
                model="demo",
                prompt=f"Story number {i} begins:",
                max_tokens=24,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            text, usage = "", None
            async for chunk in stream:
                text += "".join(c.text for c in chunk.choices)
                usage = chunk.usage or usage
            return text, usage.completion_tokens

        return await asyncio.gather(*(one(i) for i in range(32)))

    results = asyncio.run(main())
    assert [tokens for _, tokens in results] == [24] * 32
    assert all(text for text, _ in results)
    server.wait_idle(2.0)


LONG = dict(model="demo", prompt="Once upon a time", max_tokens=1500, temperature=0, ignore_eos=True)


def raw_post(server, path, body):
    """A socket that has sent a request and read nothing."""
    host, port = server.url.removeprefix("http://").split(":")
    payload = json.dumps(body).encode()
    s = socket.create_connection((host, int(port)), timeout=30)
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    s.sendall(head.encode() + f"Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
    return s


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("after", [0.0, 0.05, 1.0])
def test_a_client_that_leaves_frees_its_blocks_within_a_second(server, stream, after):
    s = raw_post(server, "/v1/completions", {**LONG, "stream": stream, "n": 2})
    time.sleep(after)
    s.close()
    left = time.monotonic()
    server.wait_idle(5.0)
    assert time.monotonic() - left < 1.5  # the second, and the time of asking


def test_a_client_that_leaves_while_tokens_flow(server):
    s = raw_post(server, "/v1/completions", {**LONG, "stream": True})
    seen = b""
    while seen.count(b"data:") < 5:
        seen += s.recv(4096)
    while server.metric("pagedray_num_requests_running") < 1:  # groups report twice a second
        s.recv(4096)
    s.close()
    server.wait_idle(2.0)


def test_a_client_that_leaves_half_a_body_behind(server):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as s:
        s.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        )
    server.wait_idle(2.0)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        (b"[]", 400, None),
        (b'"text"', 400, None),
        (b"", 400, None),
        (b'{"model": "demo", "prompt": "\xff"}', 400, None),
        (b'{"model": "demo", "prompt": "a", "temperature": NaN}', 400, "temperature"),
        (b'{"model": "demo", "prompt": "a", "temperature": -1}', 400, "temperature"),
        (b'{"model": "demo", "prompt": "a", "n": 1000000}', 400, "n"),
        (b'{"model": "demo", "prompt": [999999]}', 400, "prompt"),
        (b'{"model": "demo", "prompt": "a", "max_tokens": 100000}', 400, None),
        (b'{"model": "nobody", "prompt": "a"}', 404, "model"),
        (b"[" * 50_000, 400, None),
    ],
)
def test_malformed_bodies_get_an_error_and_do_no_harm(client, server, body, status, param):
    answer = httpx.post(f"{server.url}/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and len(answer.content) < 2000
    if param:
        assert error["param"] == param
    assert client.completions.create(model="demo", prompt="a", max_tokens=1).usage.completion_tokens == 1


def test_a_warm_prefix_is_not_computed_again(client, server):
    prompt = "The quick brown fox jumps over the lazy dog. " * 30
    for _ in range(2):
        answer = client.completions.create(model="demo", prompt=prompt, max_tokens=2)
    assert answer.usage.prompt_tokens_details.cached_tokens >= answer.usage.prompt_tokens - 32


def test_the_openai_client_raises_its_own_errors(client):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=ask("hi"))
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="demo", messages=ask("hi"), temperature=9)
