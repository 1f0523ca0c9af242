"""The preStop hook of Kubernetes: a node that must go is left by its replicas first, and nobody notices."""

import os
import sys
import time
from pathlib import Path

import pytest
from serving import TOKEN, Cluster, Load, section, start_ray

pytestmark = [
    pytest.mark.serve,
    pytest.mark.skipif(
        not os.environ.get("PAGEDRAY_LONG_TESTS"), reason="takes a minute; PAGEDRAY_LONG_TESTS=1 runs it"
    ),
]

HOOK = Path(__file__).parents[2] / "k8s" / "image" / "drain.sh"


def test_a_node_is_left_before_it_goes_and_no_request_is_dropped(start_hosts, tiny_folder, tmp_path):
    with start_hosts(3) as network:
        head, first, second = network.hosts
        start_ray(head, "--num-cpus=0", '--resources={"ingress": 1}')
        for host in (first, second):
            start_ray(host, "--num-cpus=1", '--resources={"group": 1}', head=head)
        cluster = Cluster(head, tmp_path)
        ingress = {"ray_actor_options": {"num_cpus": 0, "resources": {"ingress": 1}}}
        group = section("a", tiny_folder(0)) | {"placement_group_config": {"bundle_per_worker": {"CPU": 1, "group": 1}}}
        cluster.deploy({"llm_configs": [group], "ingress": ingress})
        cluster.wait_for("RUNNING", 240)

        def groups(host):
            return [t for t in host.processes().values() if t.startswith(("ray::ServeReplica", "ray::Leader"))]

        assert cluster.processes("GlobalScheduler"), "on the head: a drain moves replicas alone"
        leaving, staying = (first, second) if groups(first) else (second, first)
        assert groups(leaving) and not groups(staying)
        load = Load(cluster, "a")
        began = time.monotonic()
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {**TOKEN, "PATH": path, "RAY_ADDRESS": f"{head.address}:6379"}  # as KubeRay sets it
        leaving.run("sh", str(HOOK), "100", env=env, timeout=140)
        took = time.monotonic() - began
        assert not groups(leaving) and groups(staying)
        leaving.kill()
        done = load.num_done
        while load.num_done < done + 5:
            assert time.monotonic() < began + 200
            time.sleep(0.1)
        assert load.stop() == []
        assert took < 100, "the hook gave up waiting"
