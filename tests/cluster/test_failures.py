"""Processes of a real server die, one kind at a time: what a client sees, and that the next request is right."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest
from real_server import descendants

pytestmark = pytest.mark.serve


@pytest.fixture(scope="module")
def server(start_server, demo_model):
    flags = ["--served-model-name", "demo", "--max-model-len", "1024", "--grace-period", "3"]
    return start_server(str(demo_model), *flags)


def process_of(server, title):
    (pid,) = (p for p, name in descendants(server.process.pid).items() if name.startswith(f"ray::{title}"))
    return pid


class Stream(threading.Thread):
    """A streamed completion that notes what came."""

    def __init__(self, server, max_tokens=300, prompt="One, two,", wait=True):
        super().__init__(daemon=True)
        self.server, self.max_tokens, self.prompt, self.text = server, max_tokens, prompt, ""
        self.began = threading.Event()
        self.start()
        assert not wait or self.began.wait(60)

    def run(self):
        body = {
            "model": "demo",
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        try:
            with httpx.stream("POST", f"{self.server.url}/v1/completions", json=body, timeout=60) as answer:
                for line in answer.iter_lines():
                    self.text += line + "\n"
                    self.began.set()
        except httpx.TransportError:
            self.text += "broken off"

    def finish(self):
        self.join(120)
        assert not self.is_alive()
        return self.text

    def answer(self):
        """The whole answer, after its end: its text, and its usage."""
        lines = [line.removeprefix("data: ") for line in self.finish().splitlines() if line]
        assert lines.pop() == "[DONE]", self.text
        chunks = [json.loads(line) for line in lines]
        assert len({chunk["id"] for chunk in chunks}) == 1
        text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        return text, chunks[-1]["usage"]["completion_tokens"]


def answers_again(server, seconds):
    """Ask until there is an answer; the time it took."""
    began = time.monotonic()
    while True:
        body = {"model": "demo", "prompt": "The capital of France is", "max_tokens": 5, "temperature": 0}
        try:
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=seconds)
            if answer.status_code == 200:
                assert "Paris" in answer.json()["choices"][0]["text"]
                return time.monotonic() - began
            assert answer.status_code in (500, 503), answer.text  # 500: Serve's own, while it has no ingress
        except httpx.TransportError:
            pass
        assert time.monotonic() - began < seconds, "no answer"
        time.sleep(0.2)


def test_the_scheduler_dies_and_streams_do_not_notice(server):
    stream = Stream(server)
    os.kill(process_of(server, "GlobalScheduler"), signal.SIGKILL)
    assert stream.finish().rstrip().endswith("data: [DONE]")
    assert '"error"' not in stream.text
    answers_again(server, 30)
    server.wait_idle(10)


def test_the_scheduler_dies_under_load_and_knows_all_again(server):
    """Nothing is lost: not what runs, not what comes while it is gone, not what it knew of the group's cache."""
    for i in range(4):
        Stream(server, 4, f"{i} " + "the quick brown fox jumps over the lazy dog " * 8).finish()
    server.wait_idle(10)
    time.sleep(1.5)  # the group reports twice a second, the ingress asks every two
    known = server.metric("pagedray_prefix_index_blocks")
    assert known >= 4 * 4
    running = [Stream(server, 200, f"Number {i},") for i in range(6)]
    os.kill(process_of(server, "GlobalScheduler"), signal.SIGKILL)
    late = [Stream(server, 20, f"Late {i},", wait=False) for i in range(6)]
    for stream in running + late:
        assert stream.finish().rstrip().endswith("data: [DONE]") and '"error"' not in stream.text
    server.wait_idle(10)
    deadline = time.monotonic() + 10
    while server.metric("pagedray_prefix_index_blocks") < known:
        assert time.monotonic() < deadline, "the index has not been told everything again"
        time.sleep(0.2)


def test_the_leader_dies_and_its_streams_go_on_when_the_group_is_back(server):
    undisturbed = Stream(server).answer()
    streams = [Stream(server) for _ in range(3)]
    os.kill(process_of(server, "Leader"), signal.SIGKILL)
    deadline = time.monotonic() + 10
    while httpx.get(f"{server.url}/health", timeout=10).status_code == 200:
        assert time.monotonic() < deadline, "/health says all is well"
        time.sleep(0.1)
    assert [stream.answer() for stream in streams] == [undisturbed] * 3
    assert httpx.get(f"{server.url}/health", timeout=10).status_code == 200
    assert server.metric("pagedray_request_resumed_total") >= 3
    assert "is lost and will be built anew" in server.log.read_text()
    answers_again(server, 60)
    server.wait_idle(10)


def test_the_replica_dies_and_its_streams_go_on_when_the_group_is_back(server):
    undisturbed = Stream(server).answer()
    stream = Stream(server)
    os.kill(process_of(server, "ServeReplica:pagedray:WorkerGroup"), signal.SIGKILL)
    assert stream.answer() == undisturbed
    answers_again(server, 60)
    server.wait_idle(10)


def test_the_ingress_dies_and_its_sequences_are_dropped(server):
    stream = Stream(server, max_tokens=900)
    os.kill(process_of(server, "ServeReplica:pagedray:Ingress"), signal.SIGKILL)
    assert "[DONE]" not in stream.finish()
    answers_again(server, 60)
    server.wait_idle(40)


def test_ctrl_c_leaves_nothing(start_server, demo_model):
    server = start_server(str(demo_model), "--served-model-name", "demo", "--max-model-len", "1024")
    stream = Stream(server, max_tokens=900)
    pids = descendants(server.process.pid)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(60) == 0
    stream.join(30)
    left = [name for pid, name in pids.items() if Path(f"/proc/{pid}").exists()]
    assert not left


def test_what_is_not_done_in_the_grace_period_ends_with_an_error(server):
    """The last test of this server."""
    streams = [Stream(server, max_tokens=1000, wait=False) for _ in range(3)]
    assert all(stream.began.wait(60) for stream in streams)
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    for stream in streams:
        lines = [line.removeprefix("data: ") for line in stream.finish().splitlines() if line]
        assert "broken off" not in lines and "[DONE]" not in lines
        error = json.loads(lines[-1])["error"]
        assert error["code"] == "engine_dead" and "shutting down; send the request again" in error["message"]
    assert server.process.wait(60) == 0
    assert time.monotonic() - began >= 3
