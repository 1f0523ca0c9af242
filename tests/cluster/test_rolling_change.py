"""An application is deployed again with another setting, under 20 requests a second: no request is dropped.

Serve replaces every worker group, one after the other; an engine's setting leaves the ingress as it is, which listens
itself as in `pagedray serve`.
"""

import json
import os
import subprocess
import sys
import textwrap
import time

import httpx
import pytest
import tiny_model
from real_server import isolated_env
from steady_load import SteadyLoad, answer

from pagedray.cluster.local_server import free_port

pytestmark = [
    pytest.mark.serve,
    pytest.mark.skipif(not os.environ.get("PAGEDRAY_LONG_TESTS"), reason="takes minutes: set PAGEDRAY_LONG_TESTS=1"),
]

# A driver with a Ray of its own: deploys what a line of its input says, and says "deployed" when all of it runs.
SCRIPT = """
    import json, sys
    import ray
    from ray import serve
    from pagedray.cluster.app import application
    from pagedray.cluster.config import ApplicationConfig
    from pagedray.cluster.http_server import ListenAddress

    ray.init("local", num_cpus=6, include_dashboard=False, log_to_driver=False, _temp_dir=sys.argv[2])
    serve.start(proxy_location="Disabled")
    listen = ListenAddress("127.0.0.1", int(sys.argv[1]))
    for line in sys.stdin:
        try:
            serve.run(application(ApplicationConfig.parse(json.loads(line)), listen), name="app", route_prefix="/")
            print("deployed", flush=True)
        except RuntimeError as error:
            print(repr(error), serve.status().applications["app"].deployments, flush=True)
    ray.shutdown()
"""
SHORT = [
    {"prompt": "One, two,", "temperature": 0, "max_tokens": 24},
    {"prompt": "abc" * 40, "temperature": 1.0, "seed": 5, "n": 2, "presence_penalty": 0.5, "max_tokens": 16},
    {"prompt": "y", "temperature": 1.0, "seed": 1, "max_tokens": 2},
]
JOBS = 8 * SHORT + [{"prompt": "x" * 300, "temperature": 0.8, "seed": 7, "max_tokens": 1000, "logprobs": 1}]


@pytest.fixture(scope="module")
def tiny_folder(tiny_llama, tmp_path_factory):
    return tiny_model.save(tiny_llama, tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048, eos_token_id=299)


def arguments(folder, max_num_seqs):
    engine = {"dtype": "float32", "cpu_threads": 1, "kv_cache_memory": "64MiB", "max_num_seqs": max_num_seqs}
    config = {
        "model_loading_config": {"model_id": "tiny", "model_source": str(folder)},
        "engine_kwargs": engine,
        "deployment_config": {"num_replicas": 2},
    }
    return json.dumps({"llm_configs": [config]}) + "\n"


@pytest.mark.timeout(600)
def test_every_group_is_replaced_and_no_request_dropped(tiny_folder, tmp_path, tmp_path_factory):
    port = free_port("127.0.0.1", 0)
    url, ray_folder = f"http://127.0.0.1:{port}", f"/tmp/pr-{port}"
    with (tmp_path / "log").open("w") as log:
        driver = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SCRIPT), str(port), ray_folder],
            env=isolated_env(tmp_path) | {"RAY_worker_niceness": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        assert deploy(driver, arguments(tiny_folder, 64)) == "deployed"
        before = groups(url)
        assert len(before) == 2
        expected = [answer(url, job) for job in JOBS]
        with SteadyLoad(url, JOBS, expected, rate=20.0) as load:
            time.sleep(2.0)
            assert deploy(driver, arguments(tiny_folder, 48)) == "deployed"
            deadline = time.monotonic() + 120
            while len(groups(url)) != 2 or groups(url) & before:
                assert time.monotonic() < deadline
                time.sleep(0.5)
            time.sleep(2.0)
        assert not load.wrong, f"{len(load.wrong)} of {load.num_done}: {load.wrong[:3]}"
        assert load.num_done > 200
    finally:
        driver.stdin.close()
        driver.wait(60)
        subprocess.run(["rm", "-rf", ray_folder], check=True)


def deploy(driver, line):
    driver.stdin.write(line)
    driver.stdin.flush()
    return driver.stdout.readline().strip()


def groups(url):
    return {g["id"] for g in httpx.get(f"{url}/groups", timeout=30).json()["data"]}
