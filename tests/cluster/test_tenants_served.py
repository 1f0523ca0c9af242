"""Tenants of a real server: keys, limits, caches that do not mix, and a flood that nobody else has to wait for."""

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import yaml

pytestmark = pytest.mark.serve

TENANTS = [
    {"name": "acme", "api_keys": ["sk-acme-key"], "requests_per_minute": 5},
    {"name": "other", "api_keys": ["sk-other-key"], "weight": 2.0},
    {"name": "quiet", "api_keys": ["sk-quiet-key"]},
    {"name": "frugal", "api_keys": ["sk-frugal-key"], "tokens_per_minute": 1000},
]


@pytest.fixture(scope="module")
def tenants(start_server, demo_model, tmp_path_factory):
    config = {
        "llm_configs": [
            {
                "model_loading_config": {"model_id": "demo", "model_source": str(demo_model)},
                "engine_kwargs": {"max_model_len": 1024, "max_num_seqs": 2},
            }
        ],
        "tenants": TENANTS,
    }
    path = tmp_path_factory.mktemp("config") / "tenants.yaml"
    path.write_text(yaml.safe_dump(config))
    return start_server(str(path))


def post(server, key, path="completions", **body):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.post(f"{server.url}/v1/{path}", json={"model": "demo"} | body, headers=headers, timeout=120)


def chat(server, key, **fields):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    return post(server, key, "chat/completions", **{"messages": messages, "max_tokens": 16, "temperature": 0} | fields)


def test_keys_limits_and_separate_caches(tenants):
    for key in (None, "sk-wrong"):
        assert chat(tenants, key).status_code == 401
    assert httpx.get(f"{tenants.url}/health", timeout=30).status_code == 200

    prompt = "one two three four five six seven " * 30
    cold = post(tenants, "sk-acme-key", prompt=prompt, max_tokens=4)
    assert cold.status_code == 200, cold.text
    assert cold.headers["x-ratelimit-limit-requests"] == "5"
    assert cold.headers["x-ratelimit-remaining-requests"] == "4"
    warm, foreign = (post(tenants, key, prompt=prompt, max_tokens=4) for key in ("sk-acme-key", "sk-other-key"))
    assert warm.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    assert foreign.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert "x-ratelimit-limit-requests" not in foreign.headers

    streamed = chat(tenants, "sk-acme-key", stream=True)  # the third of five
    assert streamed.status_code == 200 and "Paris" in streamed.text and streamed.text.rstrip().endswith("[DONE]")
    answers = [post(tenants, "sk-acme-key", "responses", input="hi", max_output_tokens=2) for _ in range(3)]
    assert [a.status_code for a in answers] == [200, 200, 429]
    limited = answers[-1]
    assert limited.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(limited.headers["retry-after"]) <= 60
    assert limited.headers["x-ratelimit-remaining-requests"] == "0"
    assert chat(tenants, "sk-acme-key", stream=True).status_code == 429  # a stream, too, is refused with a status
    assert chat(tenants, "sk-other-key").status_code == 200

    lines = httpx.get(f"{tenants.url}/metrics", timeout=30).text.splitlines()
    limited = [line for line in lines if 'tenant="acme"' in line and 'code="rate_limit_exceeded"' in line]
    assert len(limited) == 1 and limited[0].endswith(" 2.0")
    tenants.wait_idle(5.0)


def test_answers_cost_what_they_took(tenants):
    """Each might take 1,024 tokens, is expected to take 256, and takes a few."""
    for _ in range(6):
        answer = chat(tenants, "sk-frugal-key", max_tokens=None, stop=[" "])
        assert answer.status_code == 200, answer.text
        time.sleep(0.2)  # its group tells a little later
    used = 6 * answer.json()["usage"]["total_tokens"]
    limited = chat(tenants, "sk-frugal-key", max_tokens=1)
    assert int(limited.headers["x-ratelimit-remaining-tokens"]) >= 1000 - 2 * used
    tenants.wait_idle(5.0)


def test_who_asks_little_does_not_wait_behind_a_flood(tenants):
    def ask(key, number):
        body = {"prompt": f"Story number {number}:", "max_tokens": 16, "ignore_eos": True}
        return post(tenants, key, **body).status_code

    with ThreadPoolExecutor(30) as pool:
        flood = [pool.submit(ask, "sk-other-key", i) for i in range(30)]
        while not any(f.done() for f in flood):  # two run, the others wait
            time.sleep(0.01)
        assert ask("sk-quiet-key", 0) == 200
        assert sum(f.done() for f in flood) <= 15
        assert {f.result() for f in flood} == {200}
    tenants.wait_idle(5.0)
