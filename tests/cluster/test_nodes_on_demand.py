"""A group that fits on no node: Ray's autoscaler adds one for it, and takes it away when it is idle."""

import json
import os
import sys

import httpx
import pytest
import tiny_model
from waiting import wait_until

pytestmark = [
    pytest.mark.serve,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not os.environ.get("PAGEDRAY_LONG_TESTS"), reason="takes minutes: set PAGEDRAY_LONG_TESTS=1"),
]

_HEAD = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"  # Ray's fake nodes know their head by this

_WORKER = {"CPU": 1, "group": 1, "object_store_memory": 100_000_000}


def cluster_config():
    """A cluster that makes nodes out of processes of this host, for Ray's autoscaler."""
    provider = {
        "type": "external",  # `fake_multinode` reads a file that Ray's wheels do not have
        "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
        "launch_multiple": True,
        "head_node_id": _HEAD,
    }
    return {
        "cluster_name": "fake_multinode",
        "max_workers": 2,
        "provider": provider,
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 2}, "node_config": {}, "max_workers": 0},
            "worker": {"resources": _WORKER, "node_config": {}, "min_workers": 0, "max_workers": 2},
        },
        "head_node_type": "ray.head.default",
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 0.1,
        "auth": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        **{f"{kind}setup_commands": [] for kind in ("", "head_", "worker_")},
        **{f"{kind}_start_ray_commands": [] for kind in ("head", "worker")},
    }


@pytest.fixture
def server(start_hosts, tiny_llama, tmp_path):
    """A host whose Ray has one node, the URL of a model that sleeps and fits on another one alone, a log."""
    tiny_model.save(tiny_llama, tmp_path / "tiny")
    (tmp_path / "cluster.json").write_text(json.dumps(cluster_config()))
    scaling = {"min_replicas": 0, "max_replicas": 2, "upscale_delay_s": 0, "downscale_delay_s": 20}
    keep = {"kv_connector_extra_config": {"store_idle_seconds": 0}}
    model = {
        "model_loading_config": {"model_id": "tiny", "model_source": str(tmp_path / "tiny")},
        "engine_kwargs": {
            "max_num_seqs": 2,
            "kv_cache_memory": "8MiB",
            "cpu_threads": 1,
            "dtype": "float32",
            "kv_transfer_config": keep,
        },
        "deployment_config": {"autoscaling_config": scaling},
        "placement_group_config": {"bundle_per_worker": {"CPU": 1, "group": 1}},
    }
    (tmp_path / "config.yaml").write_text(json.dumps({"llm_configs": [model]}))
    log = tmp_path / "log"
    with start_hosts(1) as network:
        (host,) = network.hosts
        fake = {
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_FAKE_CLUSTER": "1",
            "RAY_enable_autoscaler_v2": "1",
            "RAY_CLOUD_INSTANCE_ID": _HEAD,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD,
        }
        host.run(
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--port=6379", "--num-cpus=2"),
            *(f"--node-ip-address={host.address}", f"--autoscaling-config={tmp_path / 'cluster.json'}"),
            *("--object-store-memory=100000000", "--include-dashboard=false", "--disable-usage-stats"),
            env=fake,
            timeout=120,
        )
        process = host.serve(tmp_path / "config.yaml", log)
        wait_until(lambda: "ready" in log.read_text() or process.poll() is not None, 180, log.read_text)
        assert process.poll() is None, log.read_text()
        yield host, f"http://{host.address}:8000", log
        process.kill()


def why(host, log):
    """What the server and Ray's autoscaler say."""
    logs = host.folder.glob("ray/session_2*/logs/monitor*.log")
    return "\n".join(p.read_text()[-3000:] for p in (log, *logs))


def test_a_node_comes_for_a_group_and_goes_after_it(server):
    host, url, log = server

    def nodes():
        """None for a moment: Serve's proxy on the fake node shares the port, and goes with the node."""
        try:
            return httpx.get(f"{url}/console/state", timeout=30).raise_for_status().json()["nodes"]
        except httpx.HTTPError:
            return []

    assert len(nodes()) == 1
    body = {"model": "tiny", "prompt": "One, two, " * 40, "max_tokens": 8, "temperature": 0}  # KV for the node's store
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text + why(host, log)
    assert len(nodes()) == 2
    # the node's store is there before the group goes: an actor, which would keep the node
    wait_until(lambda: any(node["store_budget"] for node in nodes()), 60, lambda: why(host, log))
    wait_until(lambda: len(nodes()) == 1, 180, lambda: why(host, log))
    assert httpx.get(f"{url}/ready", timeout=30).status_code == 200
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=300).json()["choices"] == answer.json()["choices"]
