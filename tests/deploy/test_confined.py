"""What k8s/ confines a container to is enough: not root, no capability, a root file system that is only read.

A host's processes get the same, with the folders that the manifests mount: /dev/shm, /tmp/ray, HOME.
"""

import os
import sys
from pathlib import Path

import httpx
import pytest
from serving import TOKEN, Cluster, section

pytestmark = [
    pytest.mark.serve,
    pytest.mark.skipif(
        not os.environ.get("PAGEDRAY_LONG_TESTS"), reason="takes minutes; PAGEDRAY_LONG_TESTS=1 runs it"
    ),
    pytest.mark.timeout(600),
]

CONFINED = ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "--no-new-privs", "--bounding-set=-all"]


def test_ray_and_pagedray_run_confined(start_hosts, tiny_folder, tmp_path):
    model = tiny_folder(0)
    with start_hosts(1) as network:
        (host,) = network.hosts
        confine(host, model)

        def run(*command, timeout=300):
            env = TOKEN | {"TMPDIR": "/tmp/ray/tmp", "PAGEDRAY_CACHE": str(host.home / "cache")}
            return host.run(*CONFINED, *command, env=env, timeout=timeout)

        run("mkdir", "/tmp/ray/tmp")
        status = run("sh", "-c", "cat /proc/self/status; touch /anywhere /usr/x /tmp/x 2>&1 || true")
        assert "CapEff:\t0000000000000000" in status and "Uid:\t1000" in status and status.count("Read-only") == 3
        sizes = ["--num-cpus=3", f"--object-store-memory={100 * 2**20}", "--disable-usage-stats"]
        address = ["--dashboard-host=0.0.0.0", f"--node-ip-address={host.address}"]
        run(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", *sizes, *address)
        cluster = Cluster(host, tmp_path)
        cluster.deploy({"llm_configs": [section("a", model)]})
        cluster.wait_for("RUNNING", 300)
        assert cluster.complete("a", timeout=120).status_code == 200
        assert httpx.get(f"{cluster.url}/health", timeout=30).status_code == 200
        owners = {pid: Path(f"/proc/{pid}").stat().st_uid for pid in cluster.processes("")}
        assert owners and set(owners.values()) == {1000}


def confine(host, model):
    """Make the host's file system readable for everybody and writable nowhere but where pods have volumes."""
    for file in Path(model).iterdir():
        file.chmod(0o644)  # some are written for their owner alone
    for folder in (host.network.folder, host.folder, Path(model), *Path(model).parents):
        if folder.stat().st_uid == 0 and folder not in (Path("/"), Path("/tmp")):
            folder.chmod(0o755)
    root, python = Path("/root"), Path(sys.executable).resolve()
    if root in python.parents:  # which is root's alone: only the interpreter shows through
        home = root / python.relative_to(root).parts[0]
        (host.folder / "python").mkdir()
        host.run("mount", "--bind", str(home), str(host.folder / "python"))
        host.run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(root))
        host.run("mkdir", str(home))
        host.run("mount", "--bind", str(host.folder / "python"), str(home))
    for folder in ("/tmp/ray", str(host.home)):
        host.run("chown", "1000:1000", folder)
    host.run("chmod", "1777", "/dev/shm")
    host.run("mount", "--bind", str(host.home), str(host.home))
    host.run("mount", "-o", "remount,bind,ro", "/")
