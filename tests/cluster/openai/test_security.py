"""Who may ask, what is told to nobody, and what a client's own words cannot do."""

import asyncio
import logging
import re

import httpx
import pytest
from fake_engine import FakeEngine, byte_tokenizer

from pagedray.cluster.openai.batch_runner import BatchRunner
from pagedray.cluster.openai.batch_store import BatchStore
from pagedray.cluster.openai.engine_client import ServedModel
from pagedray.cluster.openai.file_store import FileOptions, FileStore
from pagedray.cluster.openai.router import build_app
from pagedray.scheduler.tenants import Tenant, TenantDirectory, hash_key

KEY = "sk-the-key-of-acme"
OPEN = {"/health", "/ready", "/metrics", "/version"}


def visit(tmp_path, main):
    """Run `main(app, engine)` against an application with keys and files."""
    tokenizer = byte_tokenizer()
    engine = FakeEngine(tokenizer)
    models = {"m": ServedModel("m", tokenizer, 64, 0)}
    directory = TenantDirectory([Tenant("acme", (hash_key(KEY),))])

    async def nothing():
        return b""

    async def run():
        store = BatchStore(FileStore(FileOptions(str(tmp_path))))
        runner = BatchRunner(store, engine, lambda: models, directory.find, 10**6)
        app = build_app(lambda: models, engine, nothing, nothing, tenants=directory, batches=runner)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            await main(app, client, engine)
        await runner.close()

    asyncio.run(run())


@pytest.mark.parametrize("header", [None, "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x", KEY])
def test_no_route_answers_without_a_key_but_those_that_watch(tmp_path, header):
    async def main(app, client, engine):
        headers = {} if header is None else {"Authorization": header}
        routes = {(m, r.path) for r in app.routes for m in r.methods}
        assert len(routes) > 20
        others = {("GET", "/nowhere"), ("POST", "/v1/nowhere"), ("TRACE", "/v1/models"), ("GET", "//health")}
        for method, path in routes | others:
            where = re.sub(r"\{.*?\}", "x", path)
            response = await client.request(method, f"http://test{where}", headers=headers)
            if path in OPEN:
                assert response.status_code == 200
            else:
                assert response.status_code == 401, (method, path)
                if method != "HEAD":
                    assert response.json()["error"]["code"] == "invalid_api_key"
        assert not engine.requests and not list(tmp_path.iterdir())

    visit(tmp_path, main)


def test_neither_prompts_nor_keys_nor_answers_are_logged(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)

    async def main(app, client, engine):
        engine.script = lambda request: engine.spell("answer-secret")
        headers = {"Authorization": f"Bearer {KEY}"}
        for body in (
            {"prompt": "prompt-secret"},
            {"prompt": "prompt-secret", "temperature": 9},
            {"prompt": "prompt-secret", "unknown": "field-secret"},
            {"prompt": "prompt-secret", "stream": True},
            {"prompt": {"prompt-secret": 1}},
        ):
            await client.post("/v1/completions", json=body, headers=headers)
        engine.script = lambda request: [ZeroDivisionError("of the engine")]
        response = await client.post("/v1/completions", json={"prompt": "prompt-secret"}, headers=headers)
        assert response.status_code == 500 and "of the engine" not in response.text
        await client.get("/v1/models", headers={"Authorization": "Bearer wrong-secret"})

    visit(tmp_path, main)
    said = "\n".join(r.getMessage() + str(r.exc_text or "") for r in caplog.records)
    assert "of the engine" in said or caplog.records, "nothing is logged at all"
    assert "secret" not in said and KEY not in said


def test_what_clients_call_their_requests_may_repeat(tmp_path):
    async def main(app, client, engine):
        engine.script = lambda request: [0.02, *engine.spell("ok")]
        headers = {"Authorization": f"Bearer {KEY}", "X-Request-Id": "same"}
        body = {"prompt": "a", "request_id": "same", "user": "same", "stream": True}
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body, headers=headers) for _ in range(5)))
        assert all(a.status_code == 200 and "[DONE]" in a.text for a in answers)
        assert len({r.request_id for r in engine.requests}) == 5

    visit(tmp_path, main)


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "a\r\nX-Evil: 1", "\0", "x" * 5000, "", "ü/😀"])
def test_a_files_name_is_a_name_and_nothing_else(tmp_path, name, caplog):
    async def main(app, client, engine):
        headers = {"Authorization": f"Bearer {KEY}"}
        response = await client.post(
            "/v1/files", files={"file": (name, b"content")}, data={"purpose": "batch"}, headers=headers
        )
        if response.status_code == 200:
            file = response.json()
            assert len(file["filename"]) <= 255
            content = await client.get(f"/v1/files/{file['id']}/content", headers=headers)
            assert content.content == b"content" and "x-evil" not in content.headers
        else:
            assert response.status_code == 400

    visit(tmp_path / "here", main)
    assert {p.name for p in tmp_path.iterdir()} <= {"here"}
    assert not any("\n" in r.getMessage() or "\r" in r.getMessage() for r in caplog.records)
