"""Whatever a model says, in whatever pieces, and whatever a client sends: streams, texts and refusals keep their shape.

PAGEDRAY_FUZZ_EXAMPLES says how many of each kind (default: a few; try 5,000).
"""

import asyncio
import json
import math
import os

import pytest
from fake_engine import FakeEngine, byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedray.cluster.openai.batch_runner import _envelope
from pagedray.cluster.openai.engine_client import ServedModel
from pagedray.cluster.openai.router import build_app
from pagedray.cluster.openai.transport import parse_json
from pagedray.cluster.text.detokenizer import Detokenizer
from pagedray.scheduler.errors import EngineDead, InvalidRequest
from pagedray.scheduler.request import SamplingParams

EXAMPLES = int(os.environ.get("PAGEDRAY_FUZZ_EXAMPLES", "0"))
TOKENIZER = byte_tokenizer(template="{% for m in messages %}{{ m['content'] }}{% endfor %}")
EOS = TOKENIZER.eos_token_ids[0]
MODELS = {"m": ServedModel("m", TOKENIZER, 4096, 0)}


def examples(few):
    return settings(max_examples=EXAMPLES or few, deadline=None)


# What a sequence says: all tokens, special ones, bytes that are no text, pieces of what stop strings are made of.
TOKENS = st.lists(
    st.sampled_from([*TOKENIZER.encode("abé🙂", add_special_tokens=False)])
    | st.integers(0, TOKENIZER.vocab_size - 1).filter(lambda t: t not in TOKENIZER.eos_token_ids),
    max_size=24,
)


@st.composite
def said(draw):
    """Steps of one sequence: tokens that come together."""
    tokens = [*draw(TOKENS), EOS]
    cuts = sorted(draw(st.sets(st.integers(1, len(tokens) - 1)))) if len(tokens) > 1 else []
    return [tokens[a:b] for a, b in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]


class Client:
    """Talks to the application itself, without a server. Leaves after `leaves_after` pieces of the answer."""

    def __init__(self, engine):
        self.engine = engine
        self.app = build_app(lambda: MODELS, engine, None, None)

    async def ask(self, path, body, leaves_after=None):
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = [{"type": "http.request", "body": raw, "more_body": False}]
        gone = asyncio.Event()
        status, pieces, ended = None, [], False

        async def receive():
            if sent:
                return sent.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            nonlocal status, ended
            assert not ended, "sent after the end"
            if message["type"] == "http.response.start":
                assert status is None
                status = message["status"]
                return
            pieces.append(message.get("body", b""))
            ended = not message.get("more_body", False)
            if leaves_after is not None and len(pieces) > leaves_after:
                gone.set()
                raise OSError("the client is gone")

        scope = {"type": "http", "method": "POST", "path": path, "headers": [(b"content-type", b"application/json")]}
        rest = {"query_string": b"", "http_version": "1.1", "scheme": "http", "server": ("x", 1), "root_path": ""}
        try:
            await asyncio.wait_for(self.app({**scope, **rest}, receive, send), 20)
        except OSError:
            pass
        return status, b"".join(pieces), ended


def events(stream):
    """Server-sent events as the standard reads them."""
    text = stream.decode()
    assert text.endswith("\n\n") and text.isascii()
    for block in text[:-2].split("\n\n"):
        (line,) = block.split("\n")  # every line end of the standard: none may stand inside
        assert line.startswith("data: ") and "\r" not in line
        yield line[6:] if line == "data: [DONE]" else json.loads(line[6:])


@examples(30)
@given(data=st.data())
def test_a_stream_says_what_the_whole_answer_says(data):
    chat = data.draw(st.booleans(), "chat")
    n = data.draw(st.integers(1, 3), "n")
    scripts = [data.draw(said(), f"says {i}") for i in range(n)]
    stop = data.draw(st.lists(st.text("abé🙂<|", min_size=1, max_size=5), max_size=4), "stop")
    fields = {
        "n": n,
        "stop": stop,
        "max_tokens": data.draw(st.integers(1, 30), "max_tokens"),
        "include_stop_str_in_output": data.draw(st.booleans(), "include"),
        "skip_special_tokens": data.draw(st.booleans(), "skip"),
        "min_tokens": 0,
    }
    fields["min_tokens"] = data.draw(st.integers(0, fields["max_tokens"]), "min_tokens")
    logprobs = data.draw(st.booleans(), "logprobs")
    if chat:
        path, fields["messages"] = "/v1/chat/completions", [{"role": "user", "content": "hi"}]
        fields |= {"logprobs": True, "top_logprobs": 1} if logprobs else {}
    else:
        path, fields["prompt"] = "/v1/completions", "aé"
        fields["echo"] = data.draw(st.booleans(), "echo")
        fields |= {"logprobs": 1} if logprobs else {}
    engine = FakeEngine(TOKENIZER, lambda request: scripts[request.index])

    async def main():
        client = Client(engine)
        status, whole, ended = await client.ask(path, fields)
        assert status == 200 and ended
        usage = {"stream_options": {"include_usage": True}}
        status, stream, ended = await client.ask(path, {**fields, "stream": True, **usage})
        assert status == 200 and ended
        return json.loads(whole), list(events(stream))

    whole, chunks = asyncio.run(main())
    assert chunks.pop() == "[DONE]" and "[DONE]" not in chunks
    last = chunks.pop()
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert all(c["usage"] is None and len(c["choices"]) == 1 for c in chunks)
    for i, choice in enumerate(whole["choices"]):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == i]
        reasons = [c["finish_reason"] for c in mine if c["finish_reason"]]
        assert reasons == [choice["finish_reason"]] == [mine[-1]["finish_reason"]]
        deltas = [(c["delta"].get("content") or "") if chat else c["text"] for c in mine]
        text = choice["message"]["content"] if chat else choice["text"]
        assert "".join(deltas) == text
        assert all(deltas[1:-1]), "an empty delta in the middle"
        told = choice["logprobs"] and (choice["logprobs"]["content"] if chat else choice["logprobs"]["tokens"])
        streamed = [t for c in mine if c["logprobs"] for t in (c["logprobs"]["content" if chat else "tokens"])]
        assert streamed == (told or [])
        if chat and logprobs:
            check_bytes(told, text, choice, fields)
    assert not engine.running


def check_bytes(told, text, choice, fields):
    """The bytes of the tokens, joined, are the text; those of skipped and ending tokens are not."""
    special = {t for t in range(TOKENIZER.vocab_size) if t in TOKENIZER.special_ids}
    names = {TOKENIZER.token_text(t) for t in special}
    if choice["stop_reason"] is None and not (fields["skip_special_tokens"] and any(t["token"] in names for t in told)):
        parts = [bytes(t["bytes"]) for t in told]
        if choice["finish_reason"] == "stop" and not fields["include_stop_str_in_output"]:
            parts.pop()
        assert b"".join(parts).decode(errors="replace") == text


@examples(25)
@given(tokens=TOKENS, stop=st.lists(st.text("abé🙂�", min_size=1, max_size=4), max_size=4), data=st.data())
def test_no_delta_takes_back_what_was_shown(tokens, stop, data):
    """What is released is final: the text so far is a beginning of the whole, and no stop string is in it."""
    skip = data.draw(st.booleans())
    min_tokens = data.draw(st.integers(0, 6))
    prompt = data.draw(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=4))
    sampling = SamplingParams(stop=stop, skip_special_tokens=skip, min_tokens=min_tokens, max_tokens=None)

    def read(pieces):
        detokenizer, shown, counted = Detokenizer(TOKENIZER, sampling, prompt), "", 0
        for i, piece in enumerate(pieces):
            delta = detokenizer.add(piece, "length" if i == len(pieces) - 1 else None)
            shown, counted = shown + delta.text, counted + delta.num_tokens
            if delta.finish_reason:
                return shown, counted, delta.finish_reason, delta.stop_reason
        return shown, counted, None, None

    whole = read([tokens])
    assert read([[t] for t in tokens] or [[]]) == whole
    cuts = sorted(data.draw(st.sets(st.integers(0, len(tokens)), max_size=5)))
    assert read([tokens[a:b] for a, b in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]) == whole
    text, _, reason, found = whole
    if found is not None:
        assert found in stop and reason == "stop"
    if min_tokens == 0:
        assert not any(s in text for s in stop)


@examples(25)
@given(data=st.data())
def test_a_client_may_leave_at_any_time(data):
    scripts = [data.draw(said()) for _ in range(2)]
    fails = data.draw(st.booleans())

    def script(request):
        steps = scripts[request.index]
        return [*steps[: len(steps) // 2], EngineDead("gone")] if fails else steps

    engine = FakeEngine(TOKENIZER, script)
    body = {"prompt": "a", "n": 2, "stream": data.draw(st.booleans()), "max_tokens": 30}
    leaves_after = data.draw(st.integers(0, 12))

    async def main():
        status, answer, ended = await Client(engine).ask("/v1/completions", body, leaves_after)
        if body["stream"] and status == 200 and ended:
            *_, last = events(answer)
            assert (last == "[DONE]") != fails or isinstance(last, dict) and "error" in last
        for _ in range(5):
            await asyncio.sleep(0)

    asyncio.run(main())
    assert not engine.running


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


@examples(50)
@given(JSON, st.booleans())
def test_json_is_read_as_it_was_written(value, ascii_only):
    raw = json.dumps(value, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    assert parse_json(raw) == value


@examples(100)
@given(st.binary(max_size=40) | st.text('{}[]":,\\ud83e0-1.+NaInfity \n', max_size=40).map(str.encode))
def test_what_is_no_json_is_refused(raw):
    try:
        value = parse_json(raw)
    except InvalidRequest as error:
        assert error.status == 400 and len(error.message) < 500
    else:
        assert value == json.loads(raw.decode())
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def test_numbers_past_every_float_are_refused_by_name():
    with pytest.raises(InvalidRequest):
        parse_json(b'{"temperature": NaN}')
    assert math.isinf(parse_json(b'{"temperature": 1e999}')["temperature"])  # JSON it is; the ranges refuse it

    async def main():
        engine = FakeEngine(TOKENIZER)
        status, answer, _ = await Client(engine).ask("/v1/completions", b'{"prompt": "a", "temperature": 1e999}')
        assert status == 400 and json.loads(answer)["error"]["param"] == "temperature" and not engine.requests

    asyncio.run(main())


@examples(50)
@given(
    st.binary(max_size=60)
    | JSON.map(lambda v: json.dumps(v).encode())
    | st.fixed_dictionaries(
        {},
        optional={
            "custom_id": JSON,
            "method": st.just("POST") | JSON,
            "url": st.just("/v1/completions") | JSON,
            "body": JSON,
        },
    ).map(lambda v: json.dumps(v).encode())
)
def test_lines_of_a_batch_are_requests_or_refused(line):
    try:
        request = _envelope(line, "/v1/completions", 1000)
    except InvalidRequest as error:
        assert len(error.message) < 500
    else:
        assert isinstance(request["custom_id"], str) and isinstance(request["body"], dict)
