"""/v1/files and /v1/batches: what comes in goes out, whoever starts, stops, cancels, crashes or asks for what is not
theirs."""

import asyncio
import json
import os
import subprocess
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import openai
import pytest
from fake_engine import FakeEngine, byte_tokenizer

from pagedray.cluster.openai import batch_runner
from pagedray.cluster.openai.batch_runner import BatchRunner
from pagedray.cluster.openai.batch_store import BatchStore
from pagedray.cluster.openai.engine_client import ServedModel
from pagedray.cluster.openai.file_store import FileOptions, FileStore
from pagedray.cluster.openai.router import build_app
from pagedray.scheduler.errors import DeadlineUnmeetable, EngineDead, Overloaded, ShuttingDown
from pagedray.scheduler.tenants import Tenant, TenantDirectory, hash_key

CHAT = "/v1/chat/completions"
FORM = "multipart/form-data"
BOUND = f"{FORM}; boundary=y"
KEYS = {"message", "type", "param", "code"}


def line(custom_id, content="hi", url=CHAT, **body):
    messages = {"messages": [{"role": "user", "content": content}]} if url == CHAT else {}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**messages, **body}}


def jsonl(*lines):
    return "".join(json.dumps(entry) + "\n" for entry in lines).encode()


class Site:
    """What lasts: the folder, the engine. `serving` is a server over it, which may end and come again."""

    def __init__(self, folder, tenants=(), **options):
        self.options = FileOptions(str(folder), **options)
        self.tokenizer = byte_tokenizer()
        self.engine = FakeEngine(self.tokenizer)
        self.directory = TenantDirectory(tenants)
        self.models = {"m": ServedModel("m", self.tokenizer, 64, 0)}

    @asynccontextmanager
    async def serving(self, key="none", max_line_bytes=1 << 20):
        store = BatchStore(FileStore(self.options))
        runner = BatchRunner(store, self.engine, lambda: self.models, self.directory.find, max_line_bytes)
        app = build_app(lambda: self.models, self.engine, None, None, tenants=self.directory, batches=runner)
        transport = httpx.ASGITransport(app)
        headers = {"Authorization": f"Bearer {key}"}
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
                yield Client(client)
        finally:
            await runner.close()


class Client:
    def __init__(self, http):
        self.http = http

    async def upload(self, content, purpose="batch", name="in.jsonl", **headers):
        files, data = {"file": (name, content)}, {"purpose": purpose}
        return await self.http.post("/v1/files", files=files, data=data, headers=headers)

    async def create(self, content, endpoint=CHAT, **fields):
        """A batch's id."""
        file_id = (await self.upload(content)).json()["id"]
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h", **fields}
        response = await self.http.post("/v1/batches", json=body)
        assert response.status_code == 200, response.text
        return response.json()["id"]

    async def get(self, batch_id):
        return (await self.http.get(f"/v1/batches/{batch_id}")).json()

    async def ended(self, batch_id, seconds=20.0):
        deadline = time.monotonic() + seconds
        while (batch := await self.get(batch_id))["status"] not in ("completed", "failed", "expired", "cancelled"):
            assert time.monotonic() < deadline, batch
            await asyncio.sleep(0.02)
        return batch

    async def lines(self, file_id):
        """A file's lines by custom id."""
        if file_id is None:
            return {}
        content = (await self.http.get(f"/v1/files/{file_id}/content")).text
        entries = [json.loads(text) for text in content.splitlines()]
        assert len({e["custom_id"] for e in entries}) == len(entries), "answered twice"
        return {e["custom_id"]: e for e in entries}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(batch_runner, "_WATCH_SECONDS", 0.02)
    monkeypatch.setattr(batch_runner, "_SCAN_SECONDS", 0.05)
    monkeypatch.setattr(batch_runner, "_BACKOFF_SECONDS", (0.01, 0.02))


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path / "files")


def test_files_come_back_as_they_went(site):
    async def main():
        async with site.serving() as client:
            contents = [b"{}\n", b"\0\xff" * 1000, b"x" * (3 << 20)]
            files = [(await client.upload(c, name=f"ü {i}.jsonl")).json() for i, c in enumerate(contents)]
            for i, (file, content) in enumerate(zip(files, contents, strict=True)):
                assert (file["object"], file["bytes"], file["purpose"]) == ("file", len(content), "batch")
                assert file["filename"] == f"ü {i}.jsonl" and file["status"] == "processed"
                assert (await client.http.get(f"/v1/files/{file['id']}")).json() == file
                assert (await client.http.get(f"/v1/files/{file['id']}/content")).content == content
            listed = (await client.http.get("/v1/files")).json()
            assert {f["id"] for f in listed["data"]} == {f["id"] for f in files} and not listed["has_more"]
            first = (await client.http.get("/v1/files?limit=2")).json()
            rest = (await client.http.get(f"/v1/files?limit=2&after={first['last_id']}")).json()
            assert first["has_more"] and first["data"] + rest["data"] == listed["data"]
            assert not (await client.http.get("/v1/files?purpose=batch_output")).json()["data"]
            gone = (await client.http.delete(f"/v1/files/{files[0]['id']}")).json()
            assert gone == {"id": files[0]["id"], "object": "file", "deleted": True}
            assert (await client.http.get(f"/v1/files/{files[0]['id']}")).status_code == 404
        async with site.serving() as client:  # and after a restart
            assert len((await client.http.get("/v1/files")).json()["data"]) == 2

    asyncio.run(main())


@pytest.mark.parametrize(
    ("content", "content_type", "status"),
    [
        (b"{}", "application/json", 415),
        (b"", "", 415),
        (b"x", "multipart/form-data", 400),
        (b"x", f"{FORM}; boundary=", 400),
        (b"x", BOUND, 400),
        (b"--y\r\n\r\nx\r\n--y--\r\n", BOUND, 400),
        (b'--y\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nx', BOUND, 400),
        (b'--y\r\nContent-Disposition: form-data; name="file"\r\n\r\nx\r\n--y--\r\n', BOUND, 400),
        (b'--y\r\nContent-Disposition: form-data; name="\xff"\r\n\r\nx\r\n--y--\r\n', f"{BOUND}; charset=idna", 400),
        (b"--y\r\n" + b"a" * 100_000 + b"\r\n\r\nx\r\n--y--\r\n", BOUND, 400),
        (b'--y\r\nContent-Disposition: form-data; name="a"\r\n\r\n' + b"x" * 100_000 + b"\r\n--y--\r\n", BOUND, 400),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_forms_that_are_none(site, content, content_type, status):
    async def main():
        async with site.serving() as client:
            response = await client.http.post("/v1/files", content=content, headers={"Content-Type": content_type})
            assert response.status_code == status, response.text
            assert response.json()["error"].keys() == KEYS and len(response.content) < 1000
            assert not (await client.http.get("/v1/files")).json()["data"]

    asyncio.run(main())


def test_a_folder_for_files_is_made_and_left_empty(tmp_path):
    store = FileStore(FileOptions(str(tmp_path / "a" / "b")))
    store.prepare()
    store.prepare()  # as by each ingress that starts
    assert store.root.is_dir() and not list(store.root.iterdir())


def test_what_is_kept_is_bounded(tmp_path):
    site = Site(tmp_path / "files", max_file_bytes=1000, max_tenant_bytes=1500, max_tenant_files=3)

    async def main():
        async with site.serving() as client:
            assert (await client.upload(b"x" * 1001)).status_code == 400
            assert (await client.upload(b"x" * 3_000_000)).status_code == 413
            assert (await client.upload(b"x" * 1000)).status_code == 200
            response = await client.upload(b"x" * 501)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "file")
            assert (await client.upload(b"x" * 499)).status_code == (await client.upload(b"")).status_code == 200
            assert (await client.upload(b"")).status_code == 400
            assert (await client.upload(b"", purpose="fine-tune")).json()["error"]["param"] == "purpose"
        left = [p for p in (tmp_path / "files").rglob("*") if p.is_file()]
        assert len(left) == 6, "an upload that failed left something"

    asyncio.run(main())


@pytest.mark.parametrize("path", ["", "/content"])
@pytest.mark.parametrize("file_id", ["x", "file-" + "0" * 32, "..%2f..%2fx", "file-" + "0" * 31 + "%0a", "%00"])
def test_files_that_are_not_there(site, file_id, path):
    async def main():
        async with site.serving() as client:
            response = await client.http.get(f"/v1/files/{file_id}{path}")
            assert response.status_code == 404 and response.json()["error"].keys() == KEYS
            for method, where in (("DELETE", f"/v1/files/{file_id}"), ("GET", f"/v1/batches/{file_id}")):
                assert (await client.http.request(method, where)).status_code == 404

    asyncio.run(main())


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (CHAT, {}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/responses", {"input": "a"}),
    ],
)
def test_a_batch_of_each_endpoint(site, endpoint, body):
    async def main():
        async with site.serving() as client:
            lines = [line(f"r{i}", url=endpoint, **body) for i in range(20)]
            lines.insert(3, line("bad", url=endpoint, **body, model="nobody"))
            lines.insert(9, line("streamed", url=endpoint, **body, stream=True))
            batch_id = await client.create(jsonl(*lines) + b"\n  \n", endpoint, metadata={"a": "b"})
            batch = await client.ended(batch_id)
            assert (batch["status"], batch["object"], batch["metadata"]) == ("completed", "batch", {"a": "b"})
            assert batch["request_counts"] == {"total": 22, "completed": 20, "failed": 2} and batch["errors"] is None
            assert batch["created_at"] <= batch["in_progress_at"] <= batch["completed_at"] < batch["expires_at"]
            output, errors = [await client.lines(batch[f"{kind}_file_id"]) for kind in ("output", "error")]
            assert output.keys() == {f"r{i}" for i in range(20)} and errors.keys() == {"bad", "streamed"}
            direct = (await client.http.post(endpoint, json=body or lines[0]["body"])).json()
            for entry in output.values():
                assert entry["response"]["status_code"] == 200 and entry["error"] is None
                same = {"choices", "data", "usage"} & direct.keys()
                assert {k: entry["response"]["body"][k] for k in same} == {k: direct[k] for k in same}
            assert errors["bad"]["response"]["status_code"] == 404
            assert errors["streamed"]["response"]["body"]["error"]["param"] == "stream"
            assert all(r.background for r in site.engine.requests[:-1]) and not site.engine.requests[-1].background
            file = (await client.http.get(f"/v1/files/{batch['output_file_id']}")).json()
            assert (file["purpose"], file["filename"]) == ("batch_output", f"{batch_id}_output.jsonl")
            (listed,) = (await client.http.get("/v1/batches")).json()["data"]
            assert listed == batch
        leftovers = [p.suffix for p in (site_folder(site)).rglob("batches/*")]
        assert leftovers == [".json"]

    asyncio.run(main())


def site_folder(site):
    return FileStore(site.options).root


@pytest.mark.parametrize(
    ("content", "code", "at"),
    [
        (b"", "empty_file", None),
        (b"\n\n", "empty_file", None),
        (b"x\n", "invalid_line", 1),
        (b"[]\n", "invalid_line", 1),
        (b"\xff\n", "invalid_line", 1),
        (jsonl(line("a")) + b"{}", "invalid_line", 2),
        (jsonl(line("a"), line("b"), line("a")), "invalid_line", 3),
        (jsonl({**line("a"), "method": "GET"}), "invalid_line", 1),
        (jsonl(line("a", url="/v1/completions")), "invalid_line", 1),
        (jsonl({**line("a"), "body": []}), "invalid_line", 1),
        (jsonl(line("")), "invalid_line", 1),
        (jsonl(line("a" * 513)), "invalid_line", 1),
        (jsonl(line("a")) + b'{"custom_id": "' + b"x" * 5000 + b'"}\n' + jsonl(line("b")), "invalid_line", 2),
        (jsonl(*(line(f"{i}") for i in range(31))), "too_many_requests", 31),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_files_that_are_no_batches(tmp_path, content, code, at):
    site = Site(tmp_path / "files", max_batch_requests=30)

    async def main():
        async with site.serving(max_line_bytes=2000) as client:
            batch = await client.ended(await client.create(content))
            assert batch["status"] == "failed" and batch["output_file_id"] is batch["error_file_id"] is None
            (error,) = batch["errors"]["data"]
            assert (error["code"], error["line"]) == (code, at) and len(error["message"]) < 500

    asyncio.run(main())
    assert not site.engine.requests


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_file_id": "file-" + "0" * 32}, "input_file_id"),
        ({"input_file_id": None}, "input_file_id"),
        ({"endpoint": "/v1/files"}, "endpoint"),
        ({"endpoint": "x" * 100_000}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
    ],
)
def test_batches_that_are_refused(site, fields, param):
    async def main():
        async with site.serving() as client:
            file_id = (await client.upload(jsonl(line("a")))).json()["id"]
            body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"} | fields
            response = await client.http.post("/v1/batches", json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
            assert not (await client.http.get("/v1/batches")).json()["data"] and len(response.content) < 1500

    asyncio.run(main())


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "limit=%C2%B2", "after=batch_x", "limit=1.5"])
def test_lists_that_cannot_be_cut_so(site, query):
    async def main():
        async with site.serving() as client:
            assert (await client.http.get(f"/v1/batches?{query}")).status_code == 400

    asyncio.run(main())


def test_files_are_listed_newest_or_oldest_first(site):
    async def main():
        async with site.serving() as client:
            for _ in range(3):
                await client.upload(b"a")
            lists = [await client.http.get(f"/v1/files{query}") for query in ("", "?order=desc", "?order=asc")]
            whole, newest, oldest = (response.json()["data"] for response in lists)
            assert whole == newest == oldest[::-1]
            for query in ("?order=alien", "?order="):
                response = await client.http.get(f"/v1/files{query}")
                assert (response.status_code, response.json()["error"]["param"]) == (400, "order")

    asyncio.run(main())


# -- restarts


def test_a_batch_goes_on_after_a_restart(site):
    """The server ends again and again at any point, also between the steps of the end."""
    answered = []

    def script(request):
        answered.append(request.prompt_token_ids)
        return [0.01, *site.engine.spell("ok")]

    site.engine.script = script
    lines = [line(f"r{i}", str(i)) for i in range(60)]

    async def main():
        site.options = replace(site.options, batch_concurrency=2)
        async with site.serving() as client:
            batch_id = await client.create(jsonl(*lines))
        rounds = 0
        while True:
            async with site.serving() as client:
                await asyncio.sleep(0.15)
                batch = await client.get(batch_id)
                if batch["status"] == "completed":
                    break
            rounds += 1
            store = BatchStore(FileStore(site.options))
            stopped = store.get("default", batch_id)
            if stopped.status != "finalizing" and not stopped.over:  # then all lines are there
                with store.output(stopped).open("ab") as torn:
                    torn.write(b'{"id": "batch_req_1", "custom_id": "r59", "resp')  # a write that a crash cut off
            assert rounds < 100
        assert rounds >= 2, "it was over before it was stopped"
        async with site.serving() as client:
            output = await client.lines(batch["output_file_id"])
        assert output.keys() == {f"r{i}" for i in range(60)} and batch["error_file_id"] is None
        assert batch["request_counts"] == {"total": 60, "completed": 60, "failed": 0}

    asyncio.run(main())
    assert len(answered) <= 60 + 2 * 100 and len(set(answered)) == 60


def test_a_lock_that_nobody_has_any_more_is_free(site):
    """Who waited for it in a thread may have been cancelled: a batch would never be taken up again."""
    store = BatchStore(FileStore(site.options))
    times = {"completion_window": "24h", "created_at": 0, "expires_at": 1}
    batch = store.create("default", {"endpoint": CHAT, "input_file_id": "file-x", **times})
    held = store.lock(batch)
    assert held is not None and store.lock(batch) is None
    del held
    again = store.lock(batch)
    assert again is not None
    again.release(remove=True)


@pytest.mark.parametrize("step", ["state", "files"])
def test_a_crash_while_a_batch_ends(site, monkeypatch, step):
    class Crash(BaseException):
        pass

    hand_over, saved = batch_runner._Run._hand_over, BatchStore.save

    def crash_after_files(self):
        hand_over(self)
        raise RuntimeError("crash")

    def crash_before_files(self):
        raise RuntimeError("crash")

    async def main():
        monkeypatch.setattr(
            batch_runner._Run, "_hand_over", crash_after_files if step == "files" else crash_before_files
        )
        async with site.serving() as client:
            batch_id = await client.create(jsonl(line("a"), line("b", temperature=9)))
            while (await client.get(batch_id))["status"] != "finalizing":
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
        monkeypatch.setattr(batch_runner._Run, "_hand_over", hand_over)
        async with site.serving() as client:
            batch = await client.ended(batch_id)
            assert batch["status"] == "completed"
            assert (await client.lines(batch["output_file_id"])).keys() == {"a"}
            assert (await client.lines(batch["error_file_id"])).keys() == {"b"}
            assert len((await client.http.get("/v1/files")).json()["data"]) == 3

    asyncio.run(main())
    assert saved is BatchStore.save and len(site.engine.requests) == 1


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of one MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no disk of one's own can be mounted: {mounted.stderr.decode()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_told_of_and_a_batch_waits_for_room(small_disk, monkeypatch):
    monkeypatch.setattr(batch_runner, "_LEAST_ROOM", 10_000)
    site, ballast = Site(small_disk, batch_concurrency=1), small_disk / "ballast"
    site.engine.script = lambda request: [0.03, *site.engine.spell("ok")]
    lines = [line(f"r{i}", str(i)) for i in range(40)]

    async def main():
        async with site.serving() as client:
            batch_id = await client.create(jsonl(*lines))
            while not (await client.get(batch_id))["request_counts"]["completed"]:
                await asyncio.sleep(0.01)
            with ballast.open("wb", buffering=0) as file, pytest.raises(OSError):
                while True:
                    file.write(bytes(1024))
            for refused in (await client.upload(b"x" * 5000), await client.upload(b"x", name="other")):
                assert refused.status_code == 507 and refused.json()["error"]["code"] == "storage_full"
            await asyncio.sleep(0.5)
            assert (await client.get(batch_id))["status"] == "in_progress"
            assert not list(small_disk.rglob("*.new"))
            ballast.unlink()
            batch = await client.ended(batch_id)
            assert batch["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
            assert len(await client.lines(batch["output_file_id"])) == 40
            assert (await client.upload(b"x" * 5000)).status_code == 200

    asyncio.run(main())


def test_two_servers_on_one_folder_run_a_batch_once(site):
    site.engine.script = lambda request: [0.02, *site.engine.spell("ok")]

    async def main():
        async with site.serving() as one, site.serving() as other:
            ids = [await one.create(jsonl(*(line(f"{b}-{i}") for i in range(8)))) for b in range(3)]
            for batch_id in ids:
                batch = await other.ended(batch_id)
                assert batch["request_counts"]["completed"] == 8
        assert len(site.engine.requests) == 24

    asyncio.run(main())


# -- endings


def test_a_batch_can_be_cancelled(site):
    gate = {"open": False}
    site.engine.script = lambda request: site.engine.spell("ok") if gate["open"] else [10.0]
    site.options = replace(site.options, batch_concurrency=2)

    async def main():
        async with site.serving() as client:
            first = await client.create(jsonl(*(line(f"r{i}") for i in range(50))))
            while len(site.engine.running) < 2:
                await asyncio.sleep(0.01)
            shown = (await client.http.post(f"/v1/batches/{first}/cancel")).json()
            assert shown["status"] == "cancelling" and shown["cancelling_at"]
            batch = await client.ended(first)
            assert batch["status"] == "cancelled" and batch["cancelled_at"] and batch["output_file_id"] is None
            assert not site.engine.running
            assert (await client.http.post(f"/v1/batches/{first}/cancel")).status_code == 400
            gate["open"] = True
            assert (await client.ended(await client.create(jsonl(line("a")))))["status"] == "completed"

    asyncio.run(main())


def test_a_batch_that_is_not_done_in_time_expires(site, monkeypatch):
    site.engine.script = lambda request: [10.0] if request.prompt_token_ids[-4] == ord("z") else site.engine.spell("ok")
    monkeypatch.setattr("pagedray.cluster.openai.batches._WINDOW_SECONDS", 1)

    async def main():
        async with site.serving() as client:
            slow = [i for i in range(256) if site.tokenizer.token_bytes(i) == b"z"][0]
            site.engine.script = lambda r: [10.0] if slow in r.prompt_token_ids else site.engine.spell("ok")
            batch = await client.ended(await client.create(jsonl(line("a"), line("b", "z"), line("c"), line("d", "z"))))
            assert (batch["status"], batch["request_counts"]["completed"]) == ("expired", 2)
            assert (await client.lines(batch["output_file_id"])).keys() == {"a", "c"}
            errors = await client.lines(batch["error_file_id"])
            assert errors.keys() == {"b", "d"} and not site.engine.running
            assert all(e["error"]["code"] == "batch_expired" and e["response"] is None for e in errors.values())

    asyncio.run(main())


def test_what_may_be_better_later_is_tried_again(site):
    tries = {}

    def script(request):
        count = tries[request.prompt_token_ids] = tries.get(request.prompt_token_ids, 0) + 1
        if count < 3:
            return [Overloaded("full", 0.01) if count == 1 else EngineDead("gone")]
        return site.engine.spell("ok")

    site.engine.script = script

    async def main():
        async with site.serving() as client:
            batch = await client.ended(await client.create(jsonl(*(line(f"{i}", str(i)) for i in range(5)))))
            assert batch["request_counts"] == {"total": 5, "completed": 5, "failed": 0}
            site.engine.script = lambda request: [EngineDead("gone")]
            batch = await client.ended(await client.create(jsonl(line("a"))))
            error = (await client.lines(batch["error_file_id"]))["a"]["response"]
            assert error["status_code"] == 503 and error["body"]["error"]["code"] == "engine_dead"
            site.engine.script = lambda request: [DeadlineUnmeetable("it would come too late", 0.01)]
            batch = await client.ended(await client.create(jsonl(line("a"))))  # later it would be as late
            error = (await client.lines(batch["error_file_id"]))["a"]["response"]
            assert error["status_code"] == 429 and error["body"]["error"]["code"] == "deadline_unmeetable"
            left = iter(range(12))  # a server that ends takes its time, and the next one answers
            site.engine.script = lambda _: (
                [ShuttingDown("ends")] if next(left, None) is not None else site.engine.spell("x")
            )
            batch = await client.ended(await client.create(jsonl(line("a"))))
            assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}

    asyncio.run(main())


def test_answers_that_do_not_fit_end_a_batch(tmp_path):
    site = Site(tmp_path / "files", max_tenant_bytes=20_000, batch_concurrency=1)
    site.engine.script = lambda request: [0.005, *site.engine.spell("x" * 40)]

    async def main():
        async with site.serving() as client:
            batch = await client.ended(await client.create(jsonl(*(line(f"{i}") for i in range(100)))))
            assert batch["status"] == "failed" and batch["errors"]["data"][0]["code"] == "storage_full"
            done = await client.lines(batch["output_file_id"])
            assert 0 < len(done) == batch["request_counts"]["completed"] < 100

    asyncio.run(main())


def test_an_input_that_was_deleted_fails_its_batch(site, monkeypatch):
    monkeypatch.setattr(BatchRunner, "_scan", lambda self: asyncio.sleep(0))

    async def main():
        async with site.serving() as client:
            batch_id = await client.create(jsonl(line("a")))
            assert (await client.http.delete(f"/v1/files/{(await client.get(batch_id))['input_file_id']}")).is_success
        monkeypatch.undo()
        async with site.serving() as client:
            batch = await client.ended(batch_id)
            assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "file_missing")

    asyncio.run(main())


def test_batches_that_wait_are_bounded(site, monkeypatch):
    monkeypatch.setattr("pagedray.cluster.openai.batch_store.MAX_UNFINISHED", 3)
    site.engine.script = lambda request: [10.0]

    async def main():
        async with site.serving() as client:
            ids = [await client.create(jsonl(line("a"))) for _ in range(3)]
            file_id = (await client.get(ids[0]))["input_file_id"]
            body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
            assert (await client.http.post("/v1/batches", json=body)).status_code == 400
            await client.http.post(f"/v1/batches/{ids[0]}/cancel")
            await client.ended(ids[0])
            assert (await client.http.post("/v1/batches", json=body)).status_code == 200

    asyncio.run(main())


# -- tenants


def tenants():
    return [Tenant(name, (hash_key(f"sk-{name}-key"),)) for name in ("one", "../two")]


def test_a_tenant_sees_its_own(tmp_path):
    site = Site(tmp_path / "files", tenants())

    async def main():
        async with site.serving("sk-one-key") as one:
            batch_id = await one.create(jsonl(line("a")))
            batch = await one.ended(batch_id)
            assert batch["status"] == "completed"
            two = Client(one.http)
            two.http.headers["Authorization"] = "Bearer sk-../two-key"
            for kind in ("input", "output"):
                file_id = batch[f"{kind}_file_id"]
                for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
                    assert (await two.http.request(method, f"/v1/files/{file_id}{path}")).status_code == 404
            assert (await two.http.get(f"/v1/batches/{batch_id}")).status_code == 404
            assert (await two.http.post(f"/v1/batches/{batch_id}/cancel")).status_code == 404
            body = {"input_file_id": batch["input_file_id"], "endpoint": CHAT, "completion_window": "24h"}
            assert (await two.http.post("/v1/batches", json=body)).status_code == 400
            for path in ("/v1/files", "/v1/batches"):
                assert not (await two.http.get(path)).json()["data"]
            assert (await two.ended(await two.create(jsonl(line("a")))))["status"] == "completed"
            two.http.headers["Authorization"] = "Bearer wrong"
            assert (await two.http.get("/v1/files")).status_code == 401
            assert (await two.upload(b"x")).status_code == 401
        assert {p.name for p in tmp_path.iterdir()} == {"files"}

    asyncio.run(main())


def test_what_a_batch_had_answered_is_kept_where_it_cannot_go_on(site):
    site.options = replace(site.options, batch_concurrency=1)

    def script(request):
        if len(site.engine.requests) > 2:
            return [60.0, *site.engine.spell("late")]
        return site.engine.spell("ok")

    site.engine.script = script

    async def main():
        async with site.serving() as client:
            batch_id = await client.create(jsonl(*(line(f"{i}") for i in range(5))))
            while (await client.get(batch_id))["request_counts"]["completed"] < 2:
                await asyncio.sleep(0.02)
            assert (await client.http.delete(f"/v1/files/{(await client.get(batch_id))['input_file_id']}")).is_success
        async with site.serving() as client:
            batch = await client.ended(batch_id)
            assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "file_missing")
            assert len(await client.lines(batch["output_file_id"])) == 2

    asyncio.run(main())


def test_a_batch_runs_as_its_tenant(tmp_path, monkeypatch):
    from pagedray.cluster.openai.tenancy import caller

    site = Site(tmp_path / "files", tenants())
    callers = []
    site.engine.script = lambda request: callers.append(caller().name) or site.engine.spell("ok")

    async def main():
        async with site.serving("sk-one-key") as one:
            await one.ended(await one.create(jsonl(line("a"))))
        assert callers == ["one"]
        monkeypatch.setattr(BatchRunner, "_scan", lambda self: asyncio.sleep(0))
        async with site.serving("sk-one-key") as one:
            batch_id = await one.create(jsonl(line("a")))
        monkeypatch.undo()
        site.directory = TenantDirectory(tenants()[1:])  # its key was taken away meanwhile
        async with site.serving("sk-../two-key"):
            store = BatchStore(FileStore(site.options))
            deadline = time.monotonic() + 10
            while (batch := store.get("one", batch_id)).status != "failed":
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
        assert batch.errors[0]["code"] == "no_such_tenant" and callers == ["one"]

    asyncio.run(main())


def test_without_a_folder_there_are_none(api):
    for method, path in (
        ("POST", "/v1/files"),
        ("GET", "/v1/files"),
        ("POST", "/v1/batches"),
        ("GET", "/v1/batches/x"),
    ):
        assert api.request(method, path).status_code == 404


def test_the_files_are_the_servers_alone(site):
    async def main():
        async with site.serving() as client:
            await client.upload(b"secret")

    asyncio.run(main())
    folders = [p for p in site_folder(site).rglob("*") if p.is_dir()]
    assert folders and all(os.stat(p).st_mode & 0o077 == 0 for p in folders if p.name == "files")


def test_the_official_client_runs_a_batch(site):
    async def main():
        async with site.serving() as mine:
            client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=mine.http, max_retries=0)
            file = await client.files.create(file=("in.jsonl", jsonl(line("a"), line("b"))), purpose="batch")
            batch = await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
            await mine.ended(batch.id)
            batch = await client.batches.retrieve(batch.id)
            assert batch.status == "completed" and batch.request_counts.completed == 2
            text = (await client.files.content(batch.output_file_id)).text
            assert [json.loads(t)["custom_id"] for t in sorted(text.splitlines(), key=lambda t: t[100:])]
            assert [b.id async for b in client.batches.list(limit=1)] == [batch.id]
            assert len([f async for f in client.files.list(limit=1)]) == 2
            assert (await client.files.delete(file.id)).deleted

    asyncio.run(main())
