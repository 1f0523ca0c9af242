"""Serve YAML, by Ray Serve's own `serve deploy`: it deploys, changes while it runs, and is refused where it is wrong.

One host with a Ray of its own, which asks for Ray's token as KubeRay has it: probes must get through without one.
"""

import os
import time
from pathlib import Path

import httpx
import pytest
import tiny_model
import yaml
from serving import Cluster, Load, section, start_ray
from test_serve_llm_documents import ON_KUBERAY

from pagedray.cluster.config import IMPORT_PATH

pytestmark = [
    pytest.mark.serve,
    pytest.mark.skipif(
        not os.environ.get("PAGEDRAY_LONG_TESTS"), reason="takes minutes; PAGEDRAY_LONG_TESTS=1 runs it"
    ),
    pytest.mark.timeout(900),
]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster(start_hosts, tmp_path_factory):
    with start_hosts(1) as network:
        (host,) = network.hosts
        start_ray(host, "--num-cpus=4", HF_HOME=str(host.home))
        yield Cluster(host, tmp_path_factory.mktemp("serve"))


def test_a_document_changes_while_it_runs_and_no_request_is_dropped(cluster, tiny_folder, broken_folder):
    a, b = section("a", tiny_folder(0)), section("b", tiny_folder(1))
    cluster.deploy({"llm_configs": [a]})
    cluster.wait_for("RUNNING", 240)
    assert cluster.complete("a").status_code == 200
    began = cluster.processes("ServeReplica", "Leader")
    assert len(began) == 3  # ingress, replica and leader of the group
    load = Load(cluster, "a")

    # wrong documents are refused by the builder, with our own words, and touch nothing
    for wrong, why in (
        ({"llm_configs": [a], "scheduler": {"max_queued_request": 1}}, "did you mean max_queued_requests"),
        ({"llm_configs": [a, section("b", broken_folder)]}, "NobodyForCausalLM"),
        ({"llm_configs": [a | {"lora_config": {"max_num_adapters_per_replica": 2}}]}, "lora_config is not supported"),
    ):
        cluster.deploy(wrong)
        cluster.wait_for("DEPLOY_FAILED", why=why)
        assert cluster.complete("a").status_code == 200
    assert cluster.processes("ServeReplica", "Leader") == began

    # a new model and another limit: what runs goes on running
    cluster.deploy({"llm_configs": [a, b], "scheduler": {"max_queued_requests": 99}})
    cluster.wait_for("RUNNING", 240)
    assert cluster.complete("b").json()["model"] == "b"
    assert began.items() <= cluster.processes("ServeReplica", "Leader").items()

    # another engine for one model: its group is made anew, the other one and the ingress stay
    with_b = cluster.processes("ServeReplica", "Leader")
    a["engine_kwargs"]["max_num_seqs"] = 8
    done = load.num_done
    cluster.deploy({"llm_configs": [a, b], "scheduler": {"max_queued_requests": 99}})
    deadline = time.monotonic() + 240
    while len(with_b.items() & cluster.processes("ServeReplica", "Leader").items()) > len(with_b) - 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    cluster.wait_for("RUNNING", 240)
    assert cluster.complete("a").status_code == 200
    assert len(with_b.items() & cluster.processes("ServeReplica", "Leader").items()) == 3

    # a model less, and keys from now on
    cluster.deploy({"llm_configs": [a]})
    cluster.wait_for("RUNNING", 120)
    deadline = time.monotonic() + 30
    while cluster.complete("b").status_code != 404:
        assert time.monotonic() < deadline
    while load.num_done == done:
        assert time.monotonic() < deadline + 30
        time.sleep(0.1)
    assert load.stop() == []
    assert load.num_done > 10
    ingress = cluster.processes("ServeReplica:pagedray:Ingress")
    assert ingress.items() <= began.items()
    cluster.deploy({"llm_configs": [a], "tenants": [{"name": "acme", "api_keys": ["sk-acme-key"]}]})
    deadline = time.monotonic() + 60
    while cluster.complete("a").status_code != 401:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert cluster.processes("ServeReplica:pagedray:Ingress") == ingress


def test_a_document_of_ray_serve_llm_is_served_with_only_its_import_path_changed(cluster, tiny_llama):
    """That of KubeRay's guide; a tiny model goes by the name of its own on the hub."""
    repository = cluster.host.home / "hub" / "models--Qwen--Qwen2.5-7B-Instruct"
    tiny_model.save(tiny_llama, repository / "snapshots" / "0", kind="Qwen2")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0")
    document = cluster.folder / "llm.yaml"
    document.write_text(
        ON_KUBERAY.replace("ray.serve.llm:build_openai_app", IMPORT_PATH) + "http_options: {host: 0.0.0.0}\n"
    )
    cluster.deploy_file(document)
    cluster.wait_for("RUNNING", 240, name="llms")
    answer = cluster.complete("qwen2.5-7b-instruct")
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4, answer.text
    # and one that asks for a GPU, where there is none, waits for a node that has one, and says so
    with_gpu = yaml.safe_load(document.read_text())
    with_gpu["applications"][0]["args"]["llm_configs"][0]["accelerator_type"] = "A10G"
    document.write_text(yaml.safe_dump(with_gpu))
    cluster.deploy_file(document)
    cluster.wait_for("DEPLOYING", 120, name="llms", why="accelerator_type:A10G")


def test_the_probes_of_the_manifests_are_answered(cluster, tiny_folder):
    """Without Ray's token, which a kubelet does not have."""
    cluster.deploy({"llm_configs": [section("a", tiny_folder(0))]})
    cluster.wait_for("RUNNING", 240)
    manifest = next(
        d for d in yaml.safe_load_all((ROOT / "k8s/rayservice-cpu.yaml").read_text()) if d["kind"] == "RayService"
    )
    spec = manifest["spec"]["rayClusterConfig"]
    for group in (spec["headGroupSpec"], spec["workerGroupSpecs"][0]):
        (container,) = group["template"]["spec"]["containers"]
        ports = {p["name"]: p["containerPort"] for p in container["ports"]}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            get = container[probe]["httpGet"]
            answer = httpx.get(f"http://{cluster.host.address}:{ports[get['port']]}{get['path']}", timeout=10)
            assert answer.status_code == 200, (probe, get, answer.text)
    metrics = httpx.get(f"{cluster.url}/metrics", timeout=10)
    assert metrics.status_code == 200 and "pagedray_" in metrics.text
