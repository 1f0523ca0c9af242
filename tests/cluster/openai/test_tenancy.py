"""Keys at the door, and what the limits leave."""

import pytest

from pagedray.cluster.openai.tenancy import current_tenant
from pagedray.scheduler.errors import RateLimited
from pagedray.scheduler.tenants import RateLimits, Tenant, TenantDirectory, hash_key

LIMITED = Tenant("acme", (hash_key("sk-acme"),), requests_per_minute=5)
LEFT = RateLimits(5, 2, 31.2, None, None, 0.0)


@pytest.fixture
def guarded(make_api):
    directory = TenantDirectory([LIMITED, Tenant("other", (hash_key("sk-other"),))])
    return make_api(tenants=directory, limits=lambda tenant: LEFT if tenant is LIMITED else None)


def post(api, key=None, **headers):
    headers |= {"Authorization": f"Bearer {key}"} if key else {}
    return api.post("/v1/completions", {"prompt": "hi", "max_tokens": 1}, headers=headers)


def test_without_a_key_there_is_no_answer(guarded):
    for response in (post(guarded), post(guarded, "sk-wrong"), post(guarded, Authorization="Basic sk-acme")):
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    assert not guarded.engine.requests
    assert guarded.get("/v1/models").status_code == 401
    assert guarded.get("/health").status_code == guarded.get("/metrics").status_code == 200


def test_the_key_says_who_calls_and_the_answer_what_is_left(guarded):
    seen = []
    guarded.engine.script = lambda request: seen.append(current_tenant.get().name) or guarded.engine.spell("ok")
    response = post(guarded, "sk-acme")
    assert response.status_code == 200 and seen == ["acme"]
    assert response.headers["x-ratelimit-limit-requests"] == "5"
    assert response.headers["x-ratelimit-remaining-requests"] == "2"
    assert response.headers["x-ratelimit-reset-requests"] == "32s"
    assert "x-ratelimit-limit-tokens" not in response.headers
    assert "x-ratelimit-limit-requests" not in post(guarded, "sk-other").headers and seen[-1] == "other"


def test_a_stream_knows_its_tenant_too(guarded):
    seen = []
    guarded.engine.script = lambda request: seen.append(current_tenant.get().name) or guarded.engine.spell("ok")
    body = {"prompt": ["a", "b"], "max_tokens": 1, "stream": True}
    guarded.post("/v1/completions", body, headers={"Authorization": "Bearer sk-other"})
    assert seen == ["other", "other"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 2}),
        ("/v1/responses", {"input": "a"}),
    ],
)
def test_every_endpoint_knows_its_tenant(guarded, path, body, stream):
    seen = []
    guarded.engine.script = lambda request: seen.append(current_tenant.get().name) or guarded.engine.spell("ok")
    response = guarded.post(path, body | {"stream": stream}, headers={"Authorization": "Bearer sk-acme"})
    assert response.status_code == 200 and seen == ["acme"] * body.get("n", 1)
    assert response.headers["x-ratelimit-remaining-requests"] == "2"
    assert guarded.post(path, body | {"stream": stream}).status_code == 401


def test_over_a_limit(guarded):
    guarded.engine.script = lambda request: [RateLimited("Limit reached", 30.4)]
    response = post(guarded, "sk-acme")
    assert response.status_code == 429
    assert response.headers["retry-after"] == "31" and response.headers["x-ratelimit-remaining-requests"] == "2"
    assert response.json()["error"]["code"] == "rate_limit_exceeded"


def test_without_keys_configured_any_key_will_do(api):
    assert post(api, "whatever").status_code == post(api).status_code == 200
