"""`ray up`: the configs are valid and of one mind; the local one brings up a cluster that serves, and takes it down."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml
from waiting import wait_until

ROOT = Path(__file__).parents[2]
CONFIGS = {name: ROOT / "configs" / f"ray-up-{name}.yaml" for name in ("local", "aws", "gcp")}


@pytest.fixture(params=CONFIGS)
def config(request):
    return yaml.safe_load(CONFIGS[request.param].read_text())


def options(command):
    """The options of `ray start` in a command line."""
    return dict(re.findall(r"(--[\w-]+)(?:=(\S+))?", command[command.index("ray start") :]))


def test_ray_takes_the_config(config):
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(config)
    validate_config(prepared)
    # Ray's workers start in HOME, where a folder of that name is the package
    assert not any(re.search(r"(^|/)pagedray$", folder) for folder in config["file_mounts"])
    workers = [t for name, t in prepared["available_node_types"].items() if name != prepared["head_node_type"]]
    assert all(t["min_workers"] <= t["max_workers"] for t in workers or prepared["available_node_types"].values())
    wrong = config | {"idle_timeout_minute": 3}
    with pytest.raises(Exception, match="idle_timeout_minute"):
        validate_config(prepare_config(wrong))


def test_nodes_start_as_one_cluster(config):
    from ray.scripts.scripts import start

    known = {option for parameter in start.params for option in parameter.opts}
    head, worker = (config[f"{kind}_start_ray_commands"] for kind in ("head", "worker"))
    assert head[0] == worker[0] == "ray stop"
    head, worker = options(head[1]), options(worker[1])
    assert head.keys() | worker.keys() <= known
    assert worker["--address"] == f"$RAY_HEAD_IP:{head['--port']}"
    assert head["--autoscaling-config"] == "~/ray_bootstrap_config.yaml"  # where `ray up` puts it
    assert head["--dashboard-host"] == "0.0.0.0", "or `serve deploy` reaches it from the head alone"
    for node in (head, worker):
        assert int(node["--object-store-memory"]) >= 10**9
        ports = [int(v) for k, v in node.items() if k.endswith("-port") or k == "--port"]
        assert len(set(ports)) == len(ports)
    between = ("--object-manager-port", "--node-manager-port", "--min-worker-port", "--max-worker-port")
    assert [head[k] for k in between] == [worker[k] for k in between]


def test_every_node_gets_pagedray_and_the_token(config):
    assert config["file_mounts"] == {"~/pagedray-source": ".", "~/.ray/auth_token": "~/.ray/auth_token"}
    (profile,) = (c for c in config["setup_commands"] if ".bashrc" in c)
    assert (
        "RAY_AUTH_MODE=token" in profile and "PATH=$HOME/pagedray-env/bin" in profile
    )  # `ray down` says a bare `ray stop`
    assert config["max_workers"] >= 1 and config["idle_timeout_minutes"] > 0


# Brought up for real: a laptop and two machines, each a host with sshd.


@pytest.fixture
def machines(start_hosts):
    if missing := [tool for tool in ("ssh", "ssh-keygen", "rsync", "/usr/sbin/sshd") if shutil.which(tool) is None]:
        pytest.skip(f"{', '.join(missing)} not found; on Debian: apt-get install openssh-server rsync")
    with start_hosts(3, shm_bytes=3 * 2**30) as network:
        laptop, head, worker = network.hosts
        config = machine_config(laptop, head, worker)
        for host in (head, worker):
            prepare_machine(host, (laptop.home / "key.pub").read_text())
        yield laptop, head, worker, config


def machine_config(laptop, head, worker):
    """configs/ray-up-local.yaml as a user fills it in: addresses, user and key, which is made on the laptop."""
    key = laptop.home / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    config = yaml.safe_load(CONFIGS["local"].read_text())
    config["provider"] |= {"head_ip": head.address, "worker_ips": [worker.address]}
    config["auth"] = {"ssh_user": "root", "ssh_private_key": str(key)}
    config["file_mounts"]["~/pagedray-source"] = str(ROOT)  # as if run there
    return config


def prepare_machine(host, public_key):
    """A machine as `ray up` finds it: sshd, a user's HOME of its own, and PagedRay installed already."""
    (host.folder / "passwd").write_text(
        re.sub(r"^(root:.*):[^:]*:([^:]*)$", rf"\1:{host.home}:/bin/bash", Path("/etc/passwd").read_text(), flags=re.M)
    )
    (host.folder / "authorized_keys").write_text(public_key)
    (host.home / "pagedray-env").symlink_to(sys.prefix)
    cache = Path(host.env()["PAGEDRAY_CACHE"])
    (host.home / ".cache").mkdir()
    (host.home / ".cache" / "pagedray").symlink_to(cache)
    host_key, settings = host.folder / "host_key", host.folder / "sshd_config"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(host_key)], check=True)
    settings.write_text(
        f"Port 22\nHostKey {host_key}\nAuthorizedKeysFile {host.folder}/authorized_keys\nStrictModes no\n"
        "UsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\nPidFile none\n"
    )
    host.run("mount", "--bind", str(host.folder / "passwd"), "/etc/passwd")
    host.run("mount", "-t", "tmpfs", "tmpfs", "/run")
    host.run("mkdir", "/run/sshd")
    log = (host.folder / "sshd.log").open("w")
    host.popen("/usr/sbin/sshd", "-D", "-e", "-f", str(settings), stdout=log, stderr=log, stdin=subprocess.DEVNULL)


def ray_processes(host):
    return [t for t in host.processes().values() if re.search(r"raylet|gcs_server|ray::|dashboard|monitor\.py", t)]


@pytest.mark.serve
@pytest.mark.skipif(not os.environ.get("PAGEDRAY_LONG_TESTS"), reason="takes minutes; PAGEDRAY_LONG_TESTS=1 runs it")
@pytest.mark.timeout(1200)
def test_ray_up_serves_a_chat_across_both_machines_and_comes_down_clean(machines, demo_model):
    laptop, head, worker, config = machines
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {"RAY_AUTH_MODE": "token", "RAY_UP_enable_autoscaler_v2": "0", "PATH": path}
    file = laptop.home / "cluster.yaml"
    file.write_text(yaml.safe_dump(config))

    def ray(*command, module="ray.scripts.scripts", timeout=240):
        return laptop.run(sys.executable, "-m", module, *command, env=env, timeout=timeout)

    ray("get-auth-token", "--generate")
    ray("up", "-y", "--no-config-cache", str(file))
    section = {
        "model_loading_config": {"model_id": "demo", "model_source": str(demo_model)},
        "engine_kwargs": {
            "pipeline_parallel_size": 2,
            "max_model_len": 256,
            "cpu_threads": 1,
            "kv_cache_memory": "64MiB",
        },
        "placement_group_config": {"bundle_per_worker": {"CPU": 1}, "strategy": "STRICT_SPREAD"},
    }
    app = {"name": "pagedray", "route_prefix": "/", "import_path": "pagedray.cluster.app:build"}
    document = {"http_options": {"host": "0.0.0.0"}, "applications": [app | {"args": {"llm_configs": [section]}}]}
    (laptop.home / "serve.yaml").write_text(yaml.safe_dump(document))
    ray(
        "deploy",
        str(laptop.home / "serve.yaml"),
        "--address",
        f"http://{head.address}:8265",
        module="ray.serve.scripts",
    )

    url = f"http://{head.address}:8000"

    def up():
        try:
            return httpx.get(f"{url}/health", timeout=10).status_code == 200
        except httpx.HTTPError:
            return False

    wait_until(up, 300, lambda: ray("status", "--address", f"http://{head.address}:8265", module="ray.serve.scripts"))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": "demo", "messages": question, "temperature": 0, "max_tokens": 24}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).json()
    assert "Paris" in answer["choices"][0]["message"]["content"]
    ranks = [[t for t in h.processes().values() if t.startswith(("ray::Leader", "ray::Rank"))] for h in (head, worker)]
    assert [len(r) for r in ranks] == [1, 1]

    ray("down", "-y", str(file))
    # which stops the head; as the config says, workers are stopped by hand
    ssh = ["ssh", "-o", "StrictHostKeyChecking=no", "-i", str(laptop.home / "key"), f"root@{worker.address}"]
    laptop.run(*ssh, "bash -ic 'ray stop'", env=env, timeout=120)
    wait_until(lambda: not ray_processes(head), 30, lambda: ray_processes(head))
    wait_until(lambda: not ray_processes(worker), 30, lambda: ray_processes(worker))
