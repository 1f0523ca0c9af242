"""A real server whose model sleeps, beside one that cannot start: waking, more groups, fewer, none; and SIGTERM."""

import json
import os
import re
import shutil
import signal
import threading
import time

import httpx
import pytest
import tiny_model

pytestmark = [
    pytest.mark.serve,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not os.environ.get("PAGEDRAY_LONG_TESTS"), reason="takes minutes: set PAGEDRAY_LONG_TESTS=1"),
]


@pytest.fixture(scope="module")
def server(start_server, tiny_llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny_model.save(tiny_llama, folder / "sleepy")
    shutil.copytree(folder / "sleepy", folder / "broken")
    (folder / "broken" / "model.safetensors").write_bytes(b"damaged")
    scaling = {"min_replicas": 0, "max_replicas": 2, "upscale_delay_s": 0, "downscale_delay_s": 3}
    engine = {"max_num_seqs": 2, "kv_cache_memory": "8MiB", "cpu_threads": 1, "dtype": "float32", "max_model_len": 4096}

    def model(name, **deployment):
        loading = {"model_id": name, "model_source": str(folder / name)}
        return {"model_loading_config": loading, "engine_kwargs": engine, "deployment_config": deployment}

    config = {"llm_configs": [model("sleepy", autoscaling_config=scaling), model("broken", num_replicas=1)]}
    (folder / "config.yaml").write_text(json.dumps(config))
    return start_server(str(folder / "config.yaml"), "--grace-period", "150")


def complete(server, max_tokens=8, model="sleepy", **fields):
    body = {"model": model, "prompt": "One, two,", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{server.url}/v1/completions", json=body | fields, timeout=300)


def num_groups(server):
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    return len(set(re.findall(r'num_requests_running{group="([^"]+)",model_name="sleepy"}', text)))


def wait_for_groups(server, number, seconds):
    deadline = time.monotonic() + seconds
    while (now := num_groups(server)) != number:
        assert time.monotonic() < deadline, f"{now} groups after {seconds} s, not {number}:\n{server.log.read_text()}"
        time.sleep(0.2)


def test_one_that_cannot_start_keeps_nobody_from_serving(server):
    assert "broken cannot start, the other models can: " in server.log.read_text()
    health = httpx.get(f"{server.url}/health", timeout=30)
    assert health.status_code == 200 and "safetensors" in health.json()["failed"]["broken"]
    assert num_groups(server) == 0, "the other one sleeps"
    began = time.monotonic()
    answer = complete(server, model="broken")
    assert answer.status_code == 503 and "safetensors" in answer.text
    assert time.monotonic() - began < 100, "it is refused, not kept for max_wake_seconds"


def test_a_request_wakes_it_load_brings_another_group_and_it_sleeps_again(server):
    assert num_groups(server) == 0
    first = complete(server)
    assert first.status_code == 200 and num_groups(server) == 1
    answers, enough = [], threading.Event()

    def ask():
        while not enough.is_set():
            answers.append(complete(server, 600))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    try:
        wait_for_groups(server, 2, 180)
    finally:
        enough.set()
        for thread in threads:
            thread.join(300)
    assert {a.status_code for a in answers} == {200}
    assert len({a.json()["choices"][0]["text"] for a in answers}) == 1
    wait_for_groups(server, 0, 180)
    assert httpx.get(f"{server.url}/ready", timeout=30).status_code == 200, "asleep is ready"
    assert complete(server).json()["choices"][0]["text"] == first.json()["choices"][0]["text"]


def test_sigterm_is_unready_first_and_lets_answers_end(server):
    """The last test of this server."""
    body = {"model": "sleepy", "prompt": "One, two,", "max_tokens": 2000, "temperature": 0, "ignore_eos": True}
    text, asked = "", False
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=300) as answer:
        for line in answer.iter_lines():
            text += line + "\n"
            if not asked:
                asked = True
                server.process.send_signal(signal.SIGTERM)
                deadline = time.monotonic() + 60
                while httpx.get(f"{server.url}/ready", timeout=60).status_code != 503:
                    assert time.monotonic() < deadline, "still ready"
                assert complete(server).status_code in (200, 503)  # for two seconds it still serves
    assert text.rstrip().endswith("data: [DONE]") and text.count("data: ") > 1000
    assert server.process.wait(150) == 0
