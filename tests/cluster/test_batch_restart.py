"""A batch of a real server that is killed in the middle, and started again on the same folder."""

import json
import os
import time

import httpx
import pytest
from real_server import descendants

pytestmark = [
    pytest.mark.serve,
    pytest.mark.skipif(not os.environ.get("PAGEDRAY_LONG_TESTS"), reason="set PAGEDRAY_LONG_TESTS=1"),
]


def test_a_batch_survives_its_server(start_server, demo_model, tmp_path):
    serve = (str(demo_model), "--served-model-name", "demo", "--max-model-len", "512", "--files-path", str(tmp_path))
    lines = [
        {
            "custom_id": f"r{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"Number {i} is", "max_tokens": 24, "temperature": 0, "ignore_eos": True},
        }
        for i in range(200)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines)
    first = start_server(*serve)
    with httpx.Client(base_url=first.url, timeout=60) as client:
        file = client.post("/v1/files", files={"file": ("in", content)}, data={"purpose": "batch"}).json()
        body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch_id = client.post("/v1/batches", json=body).json()["id"]
        done = wait(client, batch_id, lambda b: b["request_counts"]["completed"] >= 20)["request_counts"]["completed"]
    for pid in [*descendants(first.process.pid), first.process.pid]:
        try:
            os.kill(pid, 9)
        except ProcessLookupError:
            pass
    first.process.wait(timeout=30)
    second = start_server(*serve)
    with httpx.Client(base_url=second.url, timeout=60) as client:
        batch = wait(client, batch_id, lambda b: b["status"] not in ("validating", "in_progress", "finalizing"))
        assert batch["status"] == "completed" and done < 200
        assert batch["request_counts"] == {"total": 200, "completed": 200, "failed": 0}
        text = client.get(f"/v1/files/{batch['output_file_id']}/content").text
        answers = [json.loads(line) for line in text.splitlines()]
        assert sorted(a["custom_id"] for a in answers) == sorted(line["custom_id"] for line in lines)
        assert all(a["response"]["body"]["usage"]["completion_tokens"] == 24 for a in answers)


def wait(client, batch_id, enough, seconds=300):
    deadline = time.monotonic() + seconds
    while not enough(batch := client.get(f"/v1/batches/{batch_id}").json()):
        assert time.monotonic() < deadline, batch
        time.sleep(0.3)
    return batch
