"""Worker groups leave a real server one after the other while 20 requests a second come: nobody notices."""

import json
import time

import httpx
import pytest
import tiny_model
from steady_load import SteadyLoad, answer
from waiting import wait_until

from pagedray.cluster import cli

pytestmark = pytest.mark.serve

SHORT = [
    {"prompt": "One, two,", "temperature": 0, "max_tokens": 24},
    {"prompt": "abc" * 40, "temperature": 1.0, "seed": 5, "n": 2, "presence_penalty": 0.5, "max_tokens": 16},
    {"prompt": "Dear", "temperature": 0, "stop": ["zq"], "max_tokens": 40, "min_tokens": 8},
    {"prompt": "y", "temperature": 1.0, "seed": 1, "max_tokens": 2},
]
LONG = {"prompt": "x" * 300, "temperature": 0.8, "seed": 7, "max_tokens": 1700, "ignore_eos": True, "logprobs": 1}
JOBS = 5 * SHORT + [LONG]  # a long one a second, each running for seconds: there always are some that must move


@pytest.fixture(scope="module")
def tiny_folder(tiny_llama, tmp_path_factory):
    return tiny_model.save(tiny_llama, tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048, eos_token_id=299)


@pytest.fixture(scope="module")
def server(start_server, tiny_folder, tmp_path_factory):
    config = {
        "model_loading_config": {"model_id": "tiny", "model_source": str(tiny_folder)},
        "engine_kwargs": {"dtype": "float32", "cpu_threads": 1, "kv_cache_memory": "64MiB", "max_num_seqs": 64},
        "deployment_config": {"num_replicas": 2},
    }
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    shards = {"scheduler_shards": 2}  # every group has to do with both
    path.write_text(json.dumps({"llm_configs": [config], "scheduler": shards}))
    server = start_server(str(path))
    wait_until(lambda: len(groups(server)) == 2, 60)
    return server


def groups(server):
    return {g["id"] for g in httpx.get(f"{server.url}/groups", timeout=30).json()["data"] if not g["draining"]}


def command(*argv):
    with pytest.raises(SystemExit) as exit_:
        cli.main(argv)
    return exit_.value.code or 0


@pytest.mark.timeout(240)
def test_every_group_is_drained_by_hand_at_20_requests_a_second(server, capsys):
    before = groups(server)
    expected = [answer(server.url, job) for job in JOBS]
    with SteadyLoad(server.url, JOBS, expected, rate=20.0) as load:
        time.sleep(2.0)
        for group in sorted(before):
            assert command("drain", group, "--url", server.url) == 0
            wait_until(lambda: len(groups(server)) == 2, 90)
        time.sleep(1.0)
    assert not load.wrong, f"{len(load.wrong)} of {load.num_done}: {load.wrong[:3]}"
    assert load.num_done > 100 and not before & groups(server)
    assert server.metric("pagedray_request_moved_total") > 0
    assert server.metric("pagedray_request_failed_total") == 0
    server.wait_idle(10)
    assert "has left" in capsys.readouterr().out
    log = server.log.read_text()
    assert log.count("has been drained and will be built anew") == 2 and "is lost" not in log


def test_what_cannot_be_drained_is_named(server, capsys):
    assert command("drain", "--url", server.url) == 0
    out = capsys.readouterr().out
    assert all(group in out for group in groups(server)) and "0 running, 0 waiting" in out
    assert command("drain", "none-such", "--url", server.url) == 2
    assert "no worker group begins with 'none-such'" in capsys.readouterr().err
    assert httpx.post(f"{server.url}/groups/none/drain", timeout=30).status_code == 404
    assert httpx.post(f"{server.url}/groups/none/drain?timeout=nan", timeout=30).status_code == 400
