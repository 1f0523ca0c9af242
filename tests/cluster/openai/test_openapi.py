"""The served OpenAPI document, and requests that schemathesis makes of it: right ones, and ones with something wrong.

For every operation, PAGEDRAY_SCHEMA_EXAMPLES of them (default 8; 2,000 in the long run):

    PAGEDRAY_SCHEMA_EXAMPLES=2000 python -m pytest tests/cluster/openai/test_openapi.py --timeout 3600
"""

import asyncio
import itertools
import os
import re
import threading

import httpx
import pytest
from fake_engine import FakeEngine, byte_tokenizer
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from pagedray.cluster.openai.batch_runner import BatchRunner
from pagedray.cluster.openai.batch_store import BatchStore
from pagedray.cluster.openai.engine_client import ServedModel
from pagedray.cluster.openai.file_store import FileOptions, FileStore
from pagedray.cluster.openai.router import build_app
from pagedray.scheduler.tenants import Tenant

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed (the test extra has it)")

EXAMPLES = int(os.environ.get("PAGEDRAY_SCHEMA_EXAMPLES", "8"))
OPERATIONS = [
    *("POST /v1/chat/completions", "POST /v1/completions", "POST /v1/embeddings", "POST /v1/responses"),
    *("POST /tokenize", "POST /detokenize", "GET /v1/models", "GET /v1/models/{model}"),
    *("GET /health", "GET /ready", "GET /version"),
    *("POST /v1/files", "GET /v1/files", "GET /v1/files/{file_id}", "DELETE /v1/files/{file_id}"),
    "GET /v1/files/{file_id}/content",
    *("POST /v1/batches", "GET /v1/batches", "GET /v1/batches/{batch_id}", "POST /v1/batches/{batch_id}/cancel"),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A real server over a fake engine: its URL and the engine."""
    import uvicorn

    tokenizer = byte_tokenizer(template="{% for m in messages %}{{ m['role'] }}{{ m['content'] }}{% endfor %}")
    engine = FakeEngine(tokenizer)
    hello = engine.spell("Hello world")
    more = [token for step in hello for token in step] * 20  # where its end is ignored
    engine.script = lambda request: itertools.chain(hello, itertools.repeat(more))
    engine.max_model_len = 512  # where a chat that says neither `max_tokens` nor when to stop ends
    models = {"m": ServedModel("m", tokenizer, engine.max_model_len, 0, tool_call_parser="hermes")}
    options = FileOptions(str(tmp_path_factory.mktemp("files")), max_tenant_files=20, max_file_bytes=100_000)
    app = None

    async def healthy():
        return b""

    async def lazily(scope, receive, send):
        nonlocal app
        if app is None:  # on the server's loop, where batches run
            runner = BatchRunner(
                BatchStore(FileStore(options)), engine, lambda: models, lambda name: Tenant(name), 10**6
            )
            app = build_app(lambda: models, engine, healthy, healthy, batches=runner)
        await app(scope, receive, send)

    server = uvicorn.Server(uvicorn.Config(lazily, host="127.0.0.1", port=0, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        thread.join(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", engine
    server.should_exit = True
    thread.join(timeout=20)


@pytest.fixture(scope="module")
def schema(served):
    return schemathesis.openapi.from_url(f"{served[0]}/openapi.json")


def test_all_that_is_served_is_described(served, schema):
    described = {f"{op.method.upper()} {op.path}" for op in (r.ok() for r in schema.get_all_operations())}
    assert described == set(OPERATIONS)
    document = httpx.get(f"{served[0]}/openapi.json").json()
    assert document["openapi"] == "3.1.0" and document["components"]["schemas"]["Error"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True}),
        ("/v1/completions", {"prompt": "a", "logprobs": 2, "echo": True}),
        ("/v1/responses", {"input": "a"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_what_the_document_says(schema, path, body, stream):
    case = schema[path]["POST"].Case(body={**body, "stream": stream}, media_type="application/json")
    response = case.call()
    assert response.status_code == 200
    case.validate_response(response)


WITH_BODY = [o for o in OPERATIONS if o.startswith("POST ") and "{" not in o]  # any text is a right id or parameter


@pytest.fixture(scope="module")
def ids(served):
    """What there is, by the names of path parameters."""
    content = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}'
    with httpx.Client(base_url=served[0]) as client:
        file_id = client.post("/v1/files", files={"file": ("a", content)}, data={"purpose": "batch"}).json()["id"]
        body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        return {"model": "m", "file_id": file_id, "batch_id": client.post("/v1/batches", json=body).json()["id"]}


@pytest.mark.parametrize(
    ("operation", "mode"), [(o, "positive") for o in OPERATIONS] + [(o, "negative") for o in WITH_BODY]
)
def test_no_request_finds_a_fault(served, schema, ids, operation, mode):
    url, engine = served
    method, path = operation.split()
    target = schema[path][method]
    checks = schemathesis.specs.openapi.checks
    wanted = [
        schemathesis.checks.not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
        checks.response_headers_conformance,
    ]
    if mode == "negative":
        wanted.append(checks.negative_data_rejection)
    strategy = target.as_strategy(generation_mode=schemathesis.GenerationMode(mode))
    seen, refused = {}, {}

    @seed(0)
    @settings(
        max_examples=EXAMPLES // 2 if operation in WITH_BODY else EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy, data=st.data())
    def check(case, data):
        if mode == "positive":
            aim(case, data)
        response = case.call(timeout=30)
        seen[response.status_code] = seen.get(response.status_code, 0) + 1
        if response.status_code == 400:
            param = re.sub(r"[0-9]+", "0", response.json()["error"]["param"] or "")
            refused[param] = refused.get(param, 0) + 1
        assert len(response.content) < 2000 or response.status_code == 200, "a refusal is short"
        assert b"Traceback" not in response.content
        case.validate_response(response, checks=wanted)

    def known(value):
        """Token ids of the vocabulary in the place of any others."""
        return [known(v) for v in value] if isinstance(value, list) else value % 256 if type(value) is int else value

    def aim(case, data):
        """Fields that may be left out mostly are, or hardly any request would be one that is answered; some have a
        value that exists."""
        for name in case.path_parameters or ():
            if data.draw(st.booleans()) and method != "DELETE":
                case.path_parameters[name] = ids[name]
        if isinstance(case.body, dict) and operation != "POST /v1/files":
            required = {"messages", "prompt", "input", "tokens", "input_file_id", "endpoint", "completion_window"}
            others = sorted(case.body.keys() - required)
            kept = data.draw(st.sets(st.sampled_from(others), max_size=3)) if others else set()
            case.body = {k: v for k, v in case.body.items() if k in required | kept}
            for name in {"prompt", "tokens", "input"} & case.body.keys():
                if data.draw(st.booleans()):
                    case.body[name] = known(case.body[name])
            if data.draw(st.booleans()):
                case.body |= {"model": "m"} if "batches" not in path else {"input_file_id": ids["file_id"]}

    check()
    if mode == "positive" and EXAMPLES >= 100 and (operation in WITH_BODY or method == "GET"):
        assert 200 in seen
    print(f"{operation}, {mode}: {sum(seen.values())} requests, by status {seen}, refused for {refused}")
    assert httpx.get(f"{url}/health", timeout=30).status_code == 200
    assert not engine.running or path.startswith("/v1/batches")
