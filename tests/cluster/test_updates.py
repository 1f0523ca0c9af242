"""An application that is changed while 10 requests a second come: a good change, and one that cannot start."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import tiny_model
from real_server import isolated_env

from pagedray.cluster.local_server import free_port

pytestmark = pytest.mark.serve

# In a process of its own, with a Ray of its own. Prints what became of the requests of each phase.
SCRIPT = """
import asyncio, json, logging, sys, threading, time
import httpx, ray
from ray import serve
from pagedray.cluster.app import build
from pagedray.cluster.local_server import adopt_orphans, leave_no_process

folder, temporary, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
url = f"http://127.0.0.1:{port}/v1/completions"
body = {"model": "tiny", "prompt": "One, two,", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "stream": True}
phase, outcomes, stop = "before", [], threading.Event()

def arguments(**engine):
    engine = {"max_num_seqs": 8, "kv_cache_memory": "8MiB", "cpu_threads": 1, "dtype": "float32", **engine}
    loading = {"model_id": "tiny", "model_source": folder}
    deployment = {"num_replicas": 1, "max_surge_percent": 100}
    model = {"model_loading_config": loading, "engine_kwargs": engine, "deployment_config": deployment}
    return {"llm_configs": [model]}

def deploy(**engine):
    serve.run(build(arguments(**engine)), name="pagedray", route_prefix="/")

async def ask(client):
    began, asked_in = time.monotonic(), phase
    try:
        answer = await client.post(url, json=body)
        text = answer.text if answer.status_code != 200 else "".join(
            json.loads(line[6:])["choices"][0]["text"] for line in answer.text.splitlines()
            if line.startswith("data: {"))
        outcomes.append((asked_in, answer.status_code, text, time.monotonic() - began))
    except httpx.HTTPError as error:
        outcomes.append((asked_in, 0, repr(error), time.monotonic() - began))

async def load():
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as client:
        tasks, began = [], time.monotonic()
        while not stop.is_set():
            tasks.append(asyncio.create_task(ask(client)))
            await asyncio.sleep(max(0.0, began + len(tasks) / 10 - time.monotonic()))
        await asyncio.gather(*tasks)

adopt_orphans()
ray.init("local", include_dashboard=False, num_cpus=8, _temp_dir=temporary, log_to_driver=False)
logging.getLogger("ray.serve").setLevel(logging.ERROR)
serve.start(http_options={"host": "127.0.0.1", "port": port})
deploy()
thread = threading.Thread(target=lambda: asyncio.run(load()))
thread.start()
time.sleep(2)
phase = "good"
deploy(max_num_seqs=6)
time.sleep(2)
phase = "failing"
try:
    deploy(kv_cache_memory=1000)
    failure = None
except RuntimeError as error:
    failure = str(error)
time.sleep(2)
stop.set()
thread.join()
print("result:", json.dumps([failure, outcomes]))
serve.shutdown()
ray.shutdown()
leave_no_process()
"""


@pytest.mark.timeout(660)
def test_no_request_is_dropped_by_an_update_whether_it_works_or_not(tiny_llama, tmp_path):
    tiny_model.save(tiny_llama, tmp_path / "tiny")
    (tmp_path / "home").mkdir()
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp", ignore_cleanup_errors=True) as temporary:
        arguments = [str(tmp_path / "tiny"), temporary, str(free_port("127.0.0.1", 0))]
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT, *arguments],
            env=isolated_env(tmp_path / "home"),
            capture_output=True,
            text=True,
            timeout=600,
        )
        logs = "".join(p.read_text() for p in Path(temporary).glob("session_2*/logs/serve/*.log"))
    lines = [line for line in run.stdout.splitlines() if line.startswith("result:")]
    assert lines, run.stdout + run.stderr
    failure, outcomes = json.loads(lines[0].removeprefix("result:"))
    assert failure is not None and "WorkerGroup:tiny" in failure
    bad = [o for o in outcomes if o[1] != 200 or o[2] != outcomes[0][2]]
    assert not bad, f"{len(bad)} of {len(outcomes)}: {bad[:5]}\n{logs[-3000:]}"
    assert outcomes[0][2] and {o[0] for o in outcomes} == {"before", "good", "failing"}
    assert len(outcomes) > 100
