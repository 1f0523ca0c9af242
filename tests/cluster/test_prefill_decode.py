"""A real server with a group for prompts and a group for answers: who does what, and what happens when either dies."""

import json
import os
import signal
import threading

import httpx
import pytest
from real_server import descendants
from waiting import wait_until

pytestmark = pytest.mark.serve

LONG = 300  # tokens: it moves long before its end
PROMPT = [(i * 7919) % 40000 + 10 for i in range(600)]


@pytest.fixture(scope="module")
def server(start_server, demo_model, tmp_path_factory):
    model = {
        "model_loading_config": {"model_id": "demo", "model_source": str(demo_model)},
        "engine_kwargs": {"max_model_len": 2048, "max_num_seqs": 4, "cpu_threads": 1},
    }
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    path.write_text(json.dumps({"prefill_config": model, "decode_config": model}))
    return start_server(str(path))


class Stream:
    """An answer as it comes, in a thread."""

    def __init__(self, server, prompt, max_tokens=24):
        self.pieces, self.usage, self.error = [], {}, None
        body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        self.body = body | {"stream": True, "stream_options": {"include_usage": True}}
        self.thread = threading.Thread(target=self._run, args=(f"{server.url}/v1/completions",))
        self.thread.start()

    def _run(self, url):
        try:
            with httpx.stream("POST", url, json=self.body, timeout=120) as answer:
                assert answer.status_code == 200, answer.read()
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line.removeprefix("data: "))
                        assert "error" not in event, event
                        self.usage = event.get("usage") or self.usage
                        self.pieces += [c["text"] for c in event["choices"]]
        except BaseException as error:
            self.error = error

    def text(self):
        self.thread.join(120)
        if self.error is not None:
            raise self.error
        assert self.usage["completion_tokens"] == self.body["max_tokens"]
        return "".join(self.pieces)


def ask(server, prompt, max_tokens=24):
    return Stream(server, prompt, max_tokens).text()


def num_groups(server):
    lines = httpx.get(f"{server.url}/metrics", timeout=30).text.splitlines()
    return sum(line.startswith("pagedray_num_requests_running{") for line in lines)


def kill(server, role):
    """The replica of a role's group, and with it the group."""
    names = descendants(server.process.pid).items()
    (pid,) = [pid for pid, title in names if "ServeReplica" in title and title.rstrip().endswith(f"demo:{role}")]
    os.kill(pid, signal.SIGKILL)


def moved(server):
    return server.metric("pagedray_request_moved_total")


def test_a_prompt_is_computed_by_one_group_and_its_answer_by_the_other(server):
    assert num_groups(server) == 2
    text = ask(server, PROMPT, LONG)
    assert moved(server) == 1
    fetched = [server.metric(f"pagedray_kv_fetch{name}_total") for name in ("es", "_blocks")]
    assert fetched == [1, 600 // 16]
    assert ask(server, PROMPT[:40])
    assert ask(server, PROMPT, LONG) == text, "with all of it cached, at the decode group"
    assert moved(server) == 1, "what is short, or known, is not worth it"
    assert server.metric("pagedray_request_resumed_total") == 0
    server.wait_idle(10)


@pytest.mark.timeout(400)
@pytest.mark.skipif(not os.environ.get("PAGEDRAY_LONG_TESTS"), reason="takes a minute: set PAGEDRAY_LONG_TESTS=1")
def test_when_either_dies_the_other_goes_on_and_does_both(server):
    before = moved(server)
    prompts = [[PROMPT[0] + i, *PROMPT[1:]] for i in range(1, 4)]
    stream = Stream(server, prompts[0], LONG)
    wait_until(lambda: moved(server) > before, 60, lambda: "moved")
    kill(server, "decode")
    text = stream.text()
    assert server.metric("pagedray_request_resumed_total") == 1
    wait_until(lambda: num_groups(server) == 2, 90, lambda: "the decode group is back")
    kill(server, "prefill")
    assert ask(server, prompts[0], LONG) == text, "whoever computes it"
    assert ask(server, prompts[1])
    wait_until(lambda: num_groups(server) == 2, 90, lambda: "the prefill group is back")
    before = moved(server)
    assert ask(server, prompts[2], LONG)
    assert moved(server) == before + 1
    server.wait_idle(10)
