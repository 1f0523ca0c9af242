"""The application over a fake engine: in process, and behind a real server on a free port."""

import asyncio
import json
import threading
import time
from types import SimpleNamespace

import httpx
import pytest
import uvicorn
from fake_engine import FakeEngine, byte_tokenizer

from pagedray.cluster.openai.engine_client import ServedModel
from pagedray.cluster.openai.router import build_app

MAX_MODEL_LEN = 64


class API:
    """The application with its parts; `post` and `get` call it in process."""

    def __init__(self, tokenizer=None, **build):
        self.tokenizer = tokenizer or byte_tokenizer()
        self.engine = FakeEngine(self.tokenizer)
        self.models = {"org/tiny": ServedModel("org/tiny", self.tokenizer, MAX_MODEL_LEN, 1700000000)}
        self.sick = None
        self.app = build_app(lambda: self.models, self.engine, self._health, self._metrics, **build)

    async def _health(self):
        if self.sick:
            raise self.sick

    async def _metrics(self):
        return b"# TYPE pagedray:x gauge\n"

    def request(self, method, path, **kwargs):
        async def main():
            async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://test") as client:
                return await client.request(method, path, **kwargs)

        return asyncio.run(main())

    def get(self, path, **kwargs):
        return self.request("GET", path, **kwargs)

    def post(self, path, body=None, content=None, headers=None):
        if content is None:
            content = json.dumps(body).encode()
        return self.request(
            "POST", path, content=content, headers={"Content-Type": "application/json"} | (headers or {})
        )

    def chat(self, text="hi", **fields):
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields})

    def complete(self, prompt="hi", **fields):
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    def check_alive(self):
        """A request is still answered, and nothing runs on."""
        assert not self.engine.running
        script, self.engine.script = self.engine.script, lambda request: self.engine.spell("ok")
        assert self.complete(max_tokens=1).json()["choices"][0]["text"] == "o"
        self.engine.script = script


@pytest.fixture
def make_api():
    return API


@pytest.fixture
def api():
    return API()


@pytest.fixture
def listen():
    """A function that puts an application behind a real server; returns its URL."""
    servers = []

    def start(app):
        server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        deadline = time.monotonic() + 10
        while not server.started:
            assert time.monotonic() < deadline and thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        servers.append(SimpleNamespace(server=server, thread=thread))
        return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

    yield start
    for s in servers:
        s.server.should_exit = True
    for s in servers:
        s.thread.join(timeout=10)


@pytest.fixture
def events():
    """A function that reads a stream's events; `[DONE]` stays a string."""

    def read(response):
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        frames = response.text.split("\n\n")
        assert frames.pop() == "" and all(f.startswith("data: ") for f in frames)
        return [f[6:] if f == "data: [DONE]" else json.loads(f[6:]) for f in frames]

    return read
