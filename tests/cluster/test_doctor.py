"""`pagedray doctor`: everything that may be wrong is found, said, and comes with a fix."""

import json
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pagedray.cluster.doctor import CHECKS, Facts, diagnose, probe, report

GIB = 2**30
SOUND = Facts(
    python=(3, 11, 7),
    packages={"ray": ("==2.60.0", "2.60.0"), "torch": ("==2.13.0", "2.13.0+cpu")},
    compiler="g++ 12.2",
    cpu_flags=frozenset(["avx2"]),
    num_cpus=8,
    memory_total=32 * GIB,
    memory_available=20 * GIB,
    memory_limit=None,
    shm_bytes=16 * GIB,
    shm_free=15 * GIB,
    max_files=(65536, 1048576),
    temp_dir="/tmp",
    temp_free=50 * GIB,
    cache_dir="/home/me/.cache/pagedray",
    cache_writable=True,
    hostname="worker",
    addresses=("10.0.0.1",),
    lookup_seconds=0.001,
    interfaces=frozenset(["lo", "eth0"]),
    host="127.0.0.1",
    port=8000,
    port_error="",
    gpus=(),
    cuda_error="",
)
CLUSTER = {"address": "10.0.0.1:6379"}


def test_nothing_is_wrong_with_a_sound_machine():
    findings = diagnose(SOUND)
    assert {f.level for f in findings} == {"ok"} and not any(f.fix for f in findings)
    assert len(findings) >= len(CHECKS) - 1  # the cluster was not asked for


@pytest.mark.parametrize(
    ("change", "check", "level", "says", "fix"),
    [
        ({"python": (3, 10, 2)}, "python", "fail", "3.10.2", "3.11"),
        (
            {"packages": {"ray": ("==2.60.0", "2.50.1")}},
            "packages",
            "fail",
            "ray is 2.50.1",
            "pip install 'ray==2.60.0'",
        ),
        ({"packages": {"torch": ("==2.13.0", None)}}, "packages", "fail", "torch is missing", "'torch==2.13.0'"),
        ({"compiler": None}, "compiler", "warn", "slower", "apt install g++"),
        ({"cache_writable": False}, "cache", "fail", "cannot be written", "PAGEDRAY_CACHE"),
        ({"cpu_flags": frozenset(["sse2"])}, "cpu", "warn", "AVX2", "AVX2"),
        ({"memory_available": GIB // 2}, "memory", "fail", "0.5 of 32.0 GiB", "raise the limit"),
        ({"memory_limit": GIB // 2}, "memory", "fail", "0.5 of 0.5 GiB", "raise the limit"),
        ({"memory_available": 4 * GIB}, "memory", "warn", "4.0 of 32.0", "95%"),
        ({"shm_bytes": 64 << 20, "shm_free": 64 << 20}, "object store", "fail", "0.1", "--shm-size"),
        ({"shm_bytes": 4 * GIB, "shm_free": 4 * GIB}, "object store", "warn", "small share", "remount"),
        ({"shm_bytes": 0, "shm_free": 0}, "object store", "warn", "no /dev/shm", "tmpfs"),
        ({"temp_dir": "/tmp/" + "x" * 60}, "temp dir", "fail", "too long", "TMPDIR"),
        ({"temp_free": GIB}, "temp dir", "warn", "1.0 GiB free", "/tmp/ray"),
        ({"max_files": (256, 256)}, "open files", "fail", "at most 256", "limits.conf"),
        ({"max_files": (1024, 524288)}, "open files", "warn", "at most 1024", "ulimit -n 65536"),
        ({"addresses": ()}, "dns", "fail", "worker is unknown", "/etc/hosts"),
        ({"lookup_seconds": 5.0}, "dns", "warn", "5.00 s", "resolv.conf"),
        ({"addresses": ("127.0.1.1",)}, "dns", "warn", "127.0.1.1", "--node-ip-address"),
        ({"env": {"http_proxy": "http://p:3128"}}, "proxy", "warn", "http_proxy", "no_proxy=localhost"),
        ({"port_error": "cannot listen on 127.0.0.1:8000"}, "port", "fail", "cannot listen", "--port"),
        ({"env": {"NCCL_SOCKET_IFNAME": "ib0"}}, "interface", "fail", "names ib0", "eth0"),
        ({"env": {"GLOO_SOCKET_IFNAME": "eth"}}, "interface", "fail", "names eth", "eth0"),
        (
            {"interfaces": frozenset(["lo", "eth0", "eth1"]), "gpus": ("H100, 570",)},
            "interface",
            "warn",
            "eth0, eth1",
            "NCCL_SOCKET_IFNAME=eth0",
        ),
        ({"env": {"RAY_AUTH_MODE": "token"}}, "ray auth", "fail", "no token", "get-auth-token"),
        ({"env": {"RAY_AUTH_MODE": "off"}}, "ray auth", "fail", "'off'", "disabled"),
        ({"token_file": "/root/.ray/auth_token"}, "ray auth", "warn", "auth_token", "RAY_AUTH_MODE"),
        ({"gpus": ("H100, 470",), "cuda_error": "the driver is too old"}, "gpu", "fail", "too old", "driver"),
        (
            {"cluster": CLUSTER | {"error": "AuthenticationError: Invalid auth token"}},
            "cluster",
            "fail",
            "token",
            "RAY_AUTH_MODE",
        ),
        (
            {"cluster": CLUSTER | {"error": "RuntimeError: Version mismatch: The cluster was started with"}},
            "cluster",
            "fail",
            "Version mismatch",
            "same Ray",
        ),
        ({"cluster": CLUSTER | {"error": "no answer within 30 s"}}, "cluster", "fail", "no answer", "6379"),
    ],
)
def test_each_trouble_is_found_once_with_its_fix(change, check, level, says, fix):
    bad = [f for f in diagnose(replace(SOUND, **change)) if f.level != "ok"]
    assert [(f.check, f.level) for f in bad] == [(check, level)]
    assert says in bad[0].says and fix in bad[0].fix


@pytest.mark.parametrize(
    "change",
    [
        {"env": {"NCCL_SOCKET_IFNAME": "eth"}},  # NCCL takes a beginning
        {"env": {"NCCL_SOCKET_IFNAME": "^docker0"}},
        {"env": {"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0"}},
        {"env": {"http_proxy": "http://p:3128", "no_proxy": "localhost,10.0.0.0/8"}},
        {"env": {"RAY_AUTH_MODE": "token"}, "token_file": "/root/.ray/auth_token"},
        {"env": {"RAY_AUTH_MODE": "disabled"}, "token_file": "/root/.ray/auth_token"},
        {"max_files": (-1, -1)},
        {"cpu_flags": frozenset()},
        {"cluster": CLUSTER | {"nodes": ["10.0.0.1"]}},
    ],
    ids=str,
)
def test_what_is_fine_is_not_complained_of(change):
    assert [f for f in diagnose(replace(SOUND, **change)) if f.level != "ok"] == []


def test_the_report_and_its_status(capsys):
    assert report(diagnose(SOUND), as_json=False) == 0
    assert "0 failed" in capsys.readouterr().out
    assert report(diagnose(replace(SOUND, addresses=())), as_json=False) == 1
    out = capsys.readouterr().out
    assert "fail  dns" in out and "-> add a line to /etc/hosts" in out
    assert report(diagnose(replace(SOUND, compiler=None)), as_json=True) == 0
    assert {f["level"] for f in json.loads(capsys.readouterr().out)} == {"ok", "warn"}


def test_this_machine_can_be_looked_at():
    with socket.create_server(("127.0.0.1", 0), backlog=1) as taken:
        facts = probe("127.0.0.1", taken.getsockname()[1])
        assert "cannot listen" in facts.port_error
    assert facts.packages["ray"][0].startswith("==") and facts.memory_total >= facts.memory_available > 0
    assert "lo" in facts.interfaces and facts.num_cpus >= 1
    assert any(f.check == "port" and f.level == "fail" for f in diagnose(facts))


def test_a_server_of_ours_at_the_port_is_no_trouble():
    class Console(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<title>PagedRay console</title>")

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Console) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        facts = probe("127.0.0.1", server.server_port)
        server.shutdown()
    (port,) = (f for f in diagnose(facts) if f.check == "port")
    assert port.level == "ok" and "has a PagedRay server" in port.says


def test_the_command(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "pagedray", "doctor", "--port", "0", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode in (0, 1), run.stderr
    assert {"python", "packages", "memory", "dns", "port"} <= {f["check"] for f in json.loads(run.stdout)}
