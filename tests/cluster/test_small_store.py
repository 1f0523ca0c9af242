"""Five times as much KV as a node's object store holds: bounded, correct, no hang, and nothing goes to disk."""

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import tiny_model

pytestmark = [
    pytest.mark.serve,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not os.environ.get("PAGEDRAY_LONG_TESTS"), reason="takes minutes: set PAGEDRAY_LONG_TESTS=1"),
]

OBJECT_STORE = 200 * 10**6
TOKEN_BYTES = 2 * 8 * 16 * 64 * 4  # K and V of 8 layers, 16 heads of 64, in fp32
PROMPT_TOKENS = 512
NUM_PROMPTS = 5 * OBJECT_STORE // (TOKEN_BYTES * PROMPT_TOKENS) + 1
SUMMARY = """
import ray
from ray._private.internal_api import memory_summary
ray.init("auto", logging_level="ERROR")
print(memory_summary(stats_only=True))
"""


@pytest.fixture
def server(start_hosts, tiny_llama, tmp_path):
    """A host with a small object store, its URL, and two groups whose own caches hold two prompts each."""
    shape = {"num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64}
    tiny_model.save(tiny_llama, tmp_path / "model", max_position_embeddings=1024, **shape)
    engine = {
        "dtype": "float32",
        "cpu_threads": 1,
        "max_num_seqs": 2,
        "kv_cache_memory": 3 * PROMPT_TOKENS * TOKEN_BYTES,
        "kv_transfer_config": {"kv_connector_extra_config": {"fetch_weight": 0.0}},
    }
    config = {
        "model_loading_config": {"model_id": "m", "model_source": str(tmp_path / "model")},
        "engine_kwargs": engine,
        "deployment_config": {"num_replicas": 2},
    }
    (tmp_path / "config.yaml").write_text(json.dumps({"llm_configs": [config]}))
    with start_hosts(1, shm_bytes=2 * OBJECT_STORE) as network:
        (host,) = network.hosts
        host.start_ray(num_cpus=2)
        process = host.serve(tmp_path / "config.yaml", tmp_path / "log")
        deadline = time.monotonic() + 300
        while "ready" not in (tmp_path / "log").read_text():
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.5)
        yield host, f"http://{host.address}:8000"
        process.kill()


def metric(url, name):
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"pagedray_{name}{{"))


def test_a_store_that_holds_a_fifth_of_what_is_published(server):
    host, url = server
    prompts = [[3 + (i * 31 + j * j) % 240 for j in range(PROMPT_TOKENS)] for i in range(NUM_PROMPTS)]
    over, seen = threading.Event(), []

    def watch():
        while not over.wait(0.2):
            seen.append((metric(url, "kv_store_bytes"), metric(url, "kv_store_budget_bytes")))

    def ask(prompt):
        body = {"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 1}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()
        return answer["choices"][0]["logprobs"]["tokens"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with ThreadPoolExecutor(4) as threads:
            first = list(threads.map(ask, prompts))
            again = [answer for _ in range(2) for answer in threads.map(ask, reversed(prompts))]
    finally:
        over.set()
        watcher.join()
    assert not any(cached for _, cached in first)
    right = [tokens for tokens, _ in reversed(first)] * 2
    assert [tokens for tokens, _ in again] == right
    assert len({tuple(tokens) for tokens in right}) > NUM_PROMPTS // 2, "answers tell prompts apart"
    budget = max(budget for _, budget in seen)
    assert 0 < budget <= OBJECT_STORE / 2
    assert budget / 2 < max(held for held, _ in seen) <= budget
    assert metric(url, "kv_store_evicted_total") > 0 and metric(url, "kv_fetches_total") > 0
    summary = host.python(SUMMARY)
    print(summary)
    assert "Plasma memory usage" in summary
    assert "Spilled" not in summary and "filesystem mmap" not in summary
