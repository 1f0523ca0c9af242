"""`pagedray bench` and `pagedray chat` against a small OpenAI server whose every time is known."""

import asyncio
import json
import math
import sys
import threading
import time
from contextlib import contextmanager

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedray.cluster import bench
from pagedray.cluster.bench import Load, Outcome, Prompts, Recording, Run, percentile, read_recording, summarize
from pagedray.cluster.chat_client import ChatClient, EndpointError, converse, events
from pagedray.scheduler.errors import ConfigError


class FakeServer:
    """An OpenAI endpoint: `first` seconds to the first token, `gap` to each next; `fail` decides what goes wrong."""

    def __init__(self, first=0.0, gap=0.0, fail=lambda number: None):
        self.first, self.gap, self.fail = first, gap, fail
        self.bodies, self.arrivals, self.headers = [], [], []
        self.running = self.most_running = 0

    async def answer(self, reader, writer):
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next(
                    (int(h.split(":")[1]) for h in head.split("\r\n") if h.lower().startswith("content-l")), 0
                )
                body = json.loads(await reader.readexactly(length) or b"null")
                if head.startswith("GET /v1/models "):
                    self.plain(writer, 200, {"data": [{"id": "fake"}]})
                else:
                    await self.generate(writer, head, body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def plain(self, writer, status, body):
        data = json.dumps(body).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\n" % status)
        writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(data), data))

    async def generate(self, writer, head, body):
        number = len(self.bodies)
        self.bodies.append(body)
        self.headers.append(head)
        self.arrivals.append(time.perf_counter())
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            trouble = self.fail(number)
            if trouble == "status":
                return self.plain(writer, 429, {"error": {"message": "too many", "type": "t", "code": None}})
            chat = "/chat/" in head

            def send(event):
                data = b"data: %s\n\n" % (event if isinstance(event, bytes) else json.dumps(event).encode())
                writer.write(b"%x\r\n%s\r\n" % (len(data), data))

            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            if chat:
                send({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
            await asyncio.sleep(self.first)
            for i in range(body["max_tokens"] if "max_tokens" in body else 3):
                if i:
                    await asyncio.sleep(self.gap)
                text = {"delta": {"content": f"t{i} "}} if chat else {"text": f"t{i} "}
                send({"choices": [{"index": 0, **text, "finish_reason": None}]})
                await writer.drain()
                if trouble == "cut":
                    raise ConnectionError
                if trouble == "error":
                    return send({"error": {"message": "engine died"}}), send(b"[DONE]"), writer.write(b"0\r\n\r\n")
                if trouble == "hang":
                    await asyncio.sleep(60)
            send({"choices": [{"index": 0, **({"delta": {}} if chat else {"text": ""}), "finish_reason": "length"}]})
            if trouble != "no usage" and body.get("stream_options"):
                prompt = body.get("prompt", "")
                count = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
                # twice as many tokens as pieces: the bench must believe this, not the pieces
                send({"choices": [], "usage": {"prompt_tokens": count, "completion_tokens": 2 * body["max_tokens"]}})
            send(b"[DONE]")
            writer.write(b"0\r\n\r\n")
        finally:
            self.running -= 1


@contextmanager
def serving(server):
    """The server on a free port in a thread; gives its URL."""
    loop = asyncio.new_event_loop()
    listener = loop.run_until_complete(asyncio.start_server(server.answer, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def close():
        listener.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        asyncio.run_coroutine_threadsafe(close(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def prompts(count=4, input_len=(5, 5), output_len=(4, 4), **more):
    return Prompts(count, input_len, output_len, **more)


def test_times_and_counts_are_the_servers():
    server = FakeServer(first=0.2, gap=0.05)
    with serving(server) as url:
        run = bench.run_serve(Load(url, prompts(), api_key="secret"))
    assert [o.error for o in run.outcomes] == [None] * 4
    for outcome in run.outcomes:
        assert (outcome.prompt_tokens, outcome.output_tokens) == (5, 8)
        assert 0.2 <= outcome.ttft < 2
        assert 0.35 <= outcome.e2e < 3  # a sleep may take longer, never shorter
        assert len(outcome.itl) == 3 and sum(outcome.itl) == pytest.approx(outcome.e2e - outcome.ttft)
    figures = summarize(run)
    assert figures["completed"] == 4 and figures["failed"] == 0
    assert figures["total_output_tokens"] == 32 and figures["total_input_tokens"] == 20
    assert 0.35 <= figures["duration_s"] < 3
    assert figures["output_throughput"] == pytest.approx(32 / figures["duration_s"])
    tpot = sum((o.e2e - o.ttft) / 7 for o in run.outcomes) / 4
    assert figures["mean_tpot_ms"] == pytest.approx(1000 * tpot)
    assert all("Bearer secret" in head for head in server.headers)
    assert {"stream": True, "ignore_eos": True, "temperature": 0, "max_tokens": 4}.items() <= server.bodies[0].items()


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_chat_and_every_way_to_write_the_url(suffix):
    server = FakeServer()
    with serving(server) as url:
        run = bench.run_serve(Load(url + suffix, prompts(1), endpoint="chat", ignore_eos=False))
    assert run.outcomes[0].error is None and run.outcomes[0].output_tokens == 8
    assert server.bodies[0]["messages"][0]["role"] == "user" and "ignore_eos" not in server.bodies[0]


def test_the_role_of_a_chat_is_no_token():
    with serving(FakeServer(first=0.15)) as url:
        run = bench.run_serve(Load(url, prompts(1), endpoint="chat"))
    assert run.outcomes[0].ttft >= 0.15


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ("status", "HTTP 429: too many"),
        ("cut", "RemoteProtocolError"),
        ("error", "engine died"),
        ("no usage", "the stream has no usage"),
        ("hang", "no end after 0.5 s"),
    ],
)
def test_failures_are_counted_and_shown(trouble, message, capsys, tmp_path):
    server = FakeServer(fail=lambda number: trouble if number % 2 else None)
    with serving(server) as url:
        run = bench.run_serve(Load(url, prompts(6), max_concurrency=1, timeout=0.5))
    figures = summarize(run)
    assert (figures["completed"], figures["failed"]) == (3, 3)
    assert list(figures["errors"].values()) == [3] and message in next(iter(figures["errors"]))
    assert figures["total_output_tokens"] == 24, "what failed is in no figure"
    assert bench.report(run, tmp_path / "figures.json") == 1
    assert message in capsys.readouterr().out
    assert json.loads((tmp_path / "figures.json").read_text())["failed"] == 3


def test_all_failed_is_shown_without_times(capsys):
    with serving(FakeServer(fail=lambda number: "status")) as url:
        run = bench.run_serve(Load(url, prompts(2)))
    assert bench.report(run) == 1
    shown = capsys.readouterr().out
    assert "2 failed: HTTP 429: too many" in shown and "nan" not in shown


def test_no_server_is_one_error():
    with serving(FakeServer()) as url:
        pass
    with pytest.raises(EndpointError, match="no server at"):
        bench.run_serve(Load(url, prompts(1)))


def test_a_warm_up_is_not_measured_and_must_work():
    server = FakeServer()
    with serving(server) as url:
        run = bench.run_serve(Load(url, prompts(2), warmup=3))
        assert (len(run.outcomes), len(server.bodies)) == (2, 5)
        server.fail = lambda number: "status"
        with pytest.raises(EndpointError, match="warm-up request failed: HTTP 429"):
            bench.run_serve(Load(url, prompts(2), warmup=1))


def test_concurrency_is_kept():
    server = FakeServer(first=0.3)
    with serving(server) as url:
        run = bench.run_serve(Load(url, prompts(9), max_concurrency=3))
    assert server.most_running == 3
    assert run.seconds >= 0.9
    assert all(o.e2e < 0.6 for o in run.outcomes), "waiting for a turn is not the server's time"


def test_arrivals_are_poisson_at_the_rate():
    server = FakeServer(first=0.3)
    with serving(server) as url:
        bench.run_serve(Load(url, prompts(60, output_len=(1, 1)), request_rate=100.0))
    gaps = [b - a for a, b in zip(server.arrivals, server.arrivals[1:], strict=False)]
    assert 0.4 < sum(gaps) < 5, "60 requests at 100 a second, whatever the answers take"
    assert numpy.std(gaps) > 0.5 * numpy.mean(gaps), "not evenly spaced"


def test_prompts_repeat_with_the_seed_and_keep_to_their_ranges():
    wish = Prompts(200, (3, 9), (2, 5), seed=1)
    drawn = wish.draw()
    assert drawn == wish.draw() != wish.draw(salt="warmup")
    assert drawn != Prompts(200, (3, 9), (2, 5), seed=2).draw()
    assert {len(p.split()) for p, _ in drawn} == set(range(3, 10))
    assert {n for _, n in drawn} == {2, 3, 4, 5}
    ids = Prompts(50, (3, 9), (2, 5), vocab_size=300).draw()
    assert all(256 <= token < 300 for prompt, _ in ids for token in prompt)


def test_prompts_share_a_beginning_that_changes_with_the_seed():
    shared = Prompts(20, (3, 9), (2, 5), seed=1, vocab_size=5000, prefix_len=7)
    prompts = [prompt for prompt, _ in shared.draw()]
    assert len({tuple(p[:7]) for p in prompts}) == 1
    assert len({tuple(p[7:]) for p in prompts}) == 20
    assert {len(p) for p in prompts} <= set(range(10, 17))
    assert prompts[0][:7] != Prompts(1, (3, 9), (2, 5), seed=2, vocab_size=5000, prefix_len=7).draw()[0][0][:7]
    words = [prompt.split() for prompt, _ in Prompts(20, (3, 3), (2, 5), prefix_len=4).draw()]
    assert len({tuple(w[:4]) for w in words}) == 1
    assert all(len(w) == 7 for w in words)


def test_token_ids_go_out_as_they_are():
    server = FakeServer()
    with serving(server) as url:
        run = bench.run_serve(Load(url, prompts(1, vocab_size=1000)))
    assert len(server.bodies[0]["prompt"]) == 5 == run.outcomes[0].prompt_tokens


@pytest.mark.parametrize("text", ["0", "-1", "a", "", "5:3", "4:", ":4", "1:2:3", "1.5", "0:4"])
def test_lengths_that_are_none(text):
    with pytest.raises(ConfigError, match="--input-len must be a length"):
        bench.parse_range("--input-len", text)


def test_lengths():
    assert bench.parse_range("--input-len", "7") == (7, 7)
    assert bench.parse_range("--input-len", "32:512") == (32, 512)


@pytest.mark.parametrize(
    "wrong", [{"request_rate": 0.0}, {"request_rate": math.nan}, {"max_concurrency": 0}, {"endpoint": "chat"}]
)
def test_loads_that_cannot_be(wrong):
    with pytest.raises(ConfigError, match="--"):
        Load("http://x", prompts(vocab_size=1000), **wrong)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_are_numpys(values, q):
    assert percentile(values, q) == pytest.approx(float(numpy.percentile(values, q)), rel=1e-9, abs=1e-6)


def stream(count):
    lines = [b": ping"]
    lines += [b"data: " + json.dumps({"choices": [{"text": f"é{i}", "index": 0}]}).encode() for i in range(count)]
    lines += [b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 9}}', b"data: [DONE]"]
    return b"\n\n".join(lines) + b"\n\n"


@given(st.integers(1, 6), st.lists(st.integers(0, 600), max_size=12), st.booleans())
def test_however_the_network_cuts_a_stream_it_says_the_same(count, cuts, crlf):
    data = stream(count).replace(b"\n", b"\r\n") if crlf else stream(count)
    edges = sorted({0, len(data), *(c for c in cuts if c < len(data))})
    pieces = [(float(i), data[a:b]) for i, (a, b) in enumerate(zip(edges, edges[1:], strict=False), start=1)]
    outcome = read_recording(Recording(sent=0.0, pieces=pieces, status=200))
    assert outcome.error is None and (outcome.prompt_tokens, outcome.output_tokens) == (3, 9)
    assert len(outcome.itl) == count - 1
    # the first token's time is that of the piece which ended its line
    end = data.index(b"\n", data.index(b'"text"')) + 1
    assert outcome.ttft == next(t for (t, _), b in zip(pieces, edges[1:], strict=False) if b >= end)
    assert outcome.e2e == pytest.approx(outcome.ttft + sum(outcome.itl))


def test_a_stream_without_text_is_an_answer_too():
    """Special tokens have no text; the request was answered all the same."""
    data = b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n'
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}\ndata: [DONE]\n'
    outcome = read_recording(Recording(sent=1.0, pieces=[(2.0, data), (3.0, usage)], status=200))
    assert (outcome.error, outcome.ttft, outcome.e2e) == (None, 1.0, 1.0)


def test_the_offline_kind_shows_throughput_only(capsys):
    run = Run("model, offline", [Outcome(prompt_tokens=10, output_tokens=30)] * 2, 2.0, {})
    assert bench.report(run) == 0
    shown = capsys.readouterr().out
    assert "30.00" in shown and "first token" not in shown and "latency" not in shown


@pytest.mark.slow
def test_offline_runs_the_engine(demo_model):
    run = bench.run_offline(str(demo_model), Prompts(2, (3, 5), (2, 4)), {"max_model_len": 64, "num_kv_blocks": 16})
    assert [o.output_tokens for o in run.outcomes] == [n for _, n in Prompts(2, (3, 5), (2, 4)).draw()]
    assert all(o.prompt_tokens >= 3 for o in run.outcomes)


# -- pagedray chat


def chat(url, lines, monkeypatch, **more):
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    with ChatClient(url, None, **more) as client:
        return converse(client, "be brief")


def test_a_conversation_keeps_its_history(monkeypatch, capsys):
    server = FakeServer()
    with serving(server) as url:
        assert chat(url, "hello\n\nagain\n", monkeypatch, wish={"max_tokens": 2}) == 0
    assert capsys.readouterr().out == "t0 t1 \nt0 t1 \n"
    assert [m["content"] for m in server.bodies[1]["messages"]] == ["be brief", "hello", "t0 t1 ", "again"]
    assert server.bodies[0]["model"] == "fake"


@pytest.mark.parametrize(
    ("trouble", "message"), [("status", "HTTP 429: too many"), ("error", "engine died"), ("cut", "127.0.0.1")]
)
def test_a_conversation_that_breaks(trouble, message, monkeypatch):
    with serving(FakeServer(fail=lambda number: trouble)) as url, pytest.raises(EndpointError, match=message):
        chat(url, "hello\n", monkeypatch)


def test_a_stream_that_never_ends_is_an_error():
    with pytest.raises(EndpointError, match="broke the answer off"):
        list(events(['data: {"a": 1}', ""]))
    with pytest.raises(EndpointError, match="not JSON"):
        list(events(["data: {oops"]))
