"""`pagedray doctor`: is this machine fit to serve, or to join a cluster? Every finding comes with what to do about it.

`probe` looks, once and within seconds; each check is a function of what it saw.
"""

import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from importlib import metadata
from pathlib import Path
from typing import Any

from ..kernels.cache import cache_root
from ..kernels.cpu.library import compiler_command
from ..scheduler.errors import ConfigError
from ..workers.limits import memory_limit, usable_cores
from .local_server import free_port

_GIB = 2**30
_MIN_PYTHON = (3, 11)
_MIN_FILES = 8192  # open at once: every worker, stream and connection has some
_GOOD_FILES = 65536
_SLOW_LOOKUP = 1.0  # seconds
_LOOKUP_SECONDS = 10.0
_CLUSTER_SECONDS = 30.0
_SOCKET_PATH = 107  # bytes that the path of a socket may have
_RAY_SUBPATH = 70  # of them that Ray adds to its temporary folder
_COMMAND_SECONDS = 10.0
_SERVER_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    level: str  # ok, warn (it works, and could be better) or fail
    says: str
    fix: str = ""


@dataclass(frozen=True)
class Facts:
    """What was seen of this machine. Bytes, seconds."""

    python: tuple[int, ...]
    packages: Mapping[str, tuple[str, str | None]]  # required → what is required, and the version that is installed
    compiler: str | None  # its first line of --version; None: there is none
    cpu_flags: frozenset[str]
    num_cpus: int
    memory_total: int
    memory_available: int
    memory_limit: int | None  # of the container
    shm_bytes: int
    shm_free: int
    max_files: tuple[int, int]  # soft and hard; -1: no limit
    temp_dir: str
    temp_free: int
    cache_dir: str
    cache_writable: bool
    hostname: str
    addresses: tuple[str, ...]  # of the host name
    lookup_seconds: float
    interfaces: frozenset[str]
    host: str
    port: int
    port_error: str  # why nothing can listen there; empty: it can, or a server of ours does
    gpus: tuple[str, ...]
    cuda_error: str  # why they cannot be used; empty: they can, or there are none
    env: Mapping[str, str] = field(default_factory=dict)
    server_there: bool = False  # a server of ours listens at the port
    token_file: str | None = None  # where one lies
    cluster: Mapping[str, Any] | None = None  # what asking the Ray cluster gave; None: not asked


def diagnose(facts: Facts) -> list[Finding]:
    return [finding for check in CHECKS for finding in check(facts)]


def report(findings: Iterable[Finding], as_json: bool) -> int:
    """Print them. Returns the exit status: 1 where one has failed."""
    findings = list(findings)
    if as_json:
        print(json.dumps([{name: getattr(f, name) for name in Finding.__slots__} for f in findings], indent=1))
    else:
        width = max(len(f.check) for f in findings)
        for finding in findings:
            print(f"{finding.level:4}  {finding.check:{width}}  {finding.says}")
            if finding.fix:
                print(f"      {'':{width}}  -> {finding.fix}")
        bad, doubtful = (sum(f.level == level for f in findings) for level in ("fail", "warn"))
        print(f"\n{len(findings)} checks: {bad} failed, {doubtful} to look at")
    return int(any(f.level == "fail" for f in findings))


# -- checks ------------------------------------------------------------------------------------------------------------


def check_versions(facts: Facts) -> Iterable[Finding]:
    from packaging.specifiers import SpecifierSet

    version = ".".join(map(str, facts.python[:3]))
    if facts.python[:2] < _MIN_PYTHON:
        yield Finding("python", "fail", f"Python {version}", "PagedRay needs Python 3.11 or newer")
    else:
        yield Finding("python", "ok", f"Python {version}")
    wrong = []
    for name, (wanted, found) in facts.packages.items():
        if found is None:
            wrong.append(f"{name} is missing")
        elif not SpecifierSet(wanted).contains(found.split("+")[0], prereleases=True):
            wrong.append(f"{name} is {found}, not {wanted}")
    if wrong:
        names = " ".join(
            f"'{n}{w}'" for n, (w, f) in facts.packages.items() if any(x.startswith(f"{n} ") for x in wrong)
        )
        yield Finding("packages", "fail", "; ".join(wrong), f"pip install {names}")
    else:
        yield Finding("packages", "ok", f"the {len(facts.packages)} that PagedRay needs, as it needs them")


def check_compiler(facts: Facts) -> Iterable[Finding]:
    if facts.compiler is None:
        yield Finding(
            "compiler",
            "warn",
            "no C++ compiler: PyTorch computes on CPUs, several times slower",
            "apt install g++ (Fedora: dnf install gcc-c++), or name one in CXX",
        )
    else:
        yield Finding("compiler", "ok", facts.compiler)
    if not facts.cache_writable:
        yield Finding(
            "cache",
            "fail",
            f"{facts.cache_dir} cannot be written: compiled kernels have no place",
            "make it writable, or set PAGEDRAY_CACHE to a folder that is",
        )
    else:
        yield Finding("cache", "ok", facts.cache_dir)


def check_cpu(facts: Facts) -> Iterable[Finding]:
    best = next(
        (
            name
            for flag, name in (("amx_tile", "AMX"), ("avx512f", "AVX-512"), ("avx2", "AVX2"))
            if flag in facts.cpu_flags
        ),
        None,
    )
    if best is None and facts.cpu_flags:
        fix = "use a CPU with AVX2 or better, or a virtual machine that passes its instructions on"
        yield Finding("cpu", "warn", f"{facts.num_cpus} CPUs without AVX2: kernels are slow", fix)
    else:
        yield Finding("cpu", "ok", f"{facts.num_cpus} CPUs" + (f" with {best}" if best else ""))


def check_memory(facts: Facts) -> Iterable[Finding]:
    total, free = facts.memory_total, facts.memory_available
    if facts.memory_limit is not None and facts.memory_limit < total:
        free = min(free, facts.memory_limit)
        total = facts.memory_limit
    says = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
    if free < _GIB:
        yield Finding(
            "memory", "fail", says, "a server needs 1 GiB beside the model; end something, or raise the limit"
        )
    elif free < 0.2 * total:
        yield Finding(
            "memory", "warn", says, "Ray kills workers when 95% is used: end something, or use a smaller model"
        )
    else:
        yield Finding("memory", "ok", says)


def check_object_store(facts: Facts) -> Iterable[Finding]:
    says = f"/dev/shm has {facts.shm_free / _GIB:.1f} of {facts.shm_bytes / _GIB:.1f} GiB free"
    if facts.shm_bytes == 0:
        yield Finding("object store", "warn", "there is no /dev/shm: Ray keeps objects in files", "mount a tmpfs there")
    elif facts.shm_free < _GIB // 2:
        fix = "docker run --shm-size=8g; in Kubernetes an emptyDir of medium Memory; or remove what is left there"
        yield Finding("object store", "fail", says, fix)
    elif facts.shm_bytes < 0.25 * facts.memory_total:
        fix = "KV is shared through it: mount -o remount,size=30% /dev/shm (containers: --shm-size)"
        yield Finding("object store", "warn", f"{says}, a small share of the memory", fix)
    else:
        yield Finding("object store", "ok", says)
    if len(os.fsencode(facts.temp_dir)) + _RAY_SUBPATH > _SOCKET_PATH:
        fix = "set TMPDIR, and for `ray start` --temp-dir, to something short such as /tmp"
        yield Finding("temp dir", "fail", f"{facts.temp_dir} is too long for Ray's sockets below it", fix)
    elif facts.temp_free < 2 * _GIB:
        fix = "Ray's logs and spilled objects go there: remove what is old in /tmp/ray, or set TMPDIR"
        yield Finding("temp dir", "warn", f"{facts.temp_dir} has {facts.temp_free / _GIB:.1f} GiB free", fix)
    else:
        yield Finding("temp dir", "ok", f"{facts.temp_dir} has {facts.temp_free / _GIB:.1f} GiB free")


def check_limits(facts: Facts) -> Iterable[Finding]:
    soft, hard = facts.max_files
    if 0 <= soft < _MIN_FILES:
        raise_it = f"ulimit -n {_GOOD_FILES if hard < 0 else min(hard, _GOOD_FILES)}"
        where = (
            "" if hard < 0 or hard >= _MIN_FILES else " (the hard limit, too: /etc/security/limits.conf, LimitNOFILE=)"
        )
        level = "fail" if soft < 1024 else "warn"
        yield Finding("open files", level, f"at most {soft}; streams and workers need more", raise_it + where)
    else:
        yield Finding("open files", "ok", "no limit" if soft < 0 else f"at most {soft}")


def check_names(facts: Facts) -> Iterable[Finding]:
    says = f"{facts.hostname} is {', '.join(facts.addresses) or 'unknown'} ({facts.lookup_seconds:.2f} s)"
    if not facts.addresses:
        yield Finding("dns", "fail", says, f"add a line to /etc/hosts: <this machine's address> {facts.hostname}")
    elif facts.lookup_seconds > _SLOW_LOOKUP:
        fix = (
            "a resolver in /etc/resolv.conf does not answer, and `ray start` waits for it: remove it, or use /etc/hosts"
        )
        yield Finding("dns", "warn", says, fix)
    elif all(a.startswith("127.") or a == "::1" for a in facts.addresses):
        fix = "on several machines the name must be an address that the others reach, or say --node-ip-address"
        yield Finding("dns", "warn", says, fix)
    else:
        yield Finding("dns", "ok", says)
    proxy = next(
        (name for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY") if facts.env.get(name)), None
    )
    spared = facts.env.get("no_proxy") or facts.env.get("NO_PROXY") or ""
    if proxy and not {"127.0.0.1", "localhost", "*"} & {part.strip() for part in spared.split(",")}:
        fix = "export no_proxy=localhost,127.0.0.1,<the nodes>: Ray's and our own calls would go through the proxy"
        yield Finding("proxy", "warn", f"{proxy} is set, and no_proxy spares not even this machine", fix)


def check_port(facts: Facts) -> Iterable[Finding]:
    where = f"{facts.host}:{facts.port}"
    if facts.port_error:
        yield Finding("port", "fail", facts.port_error, "end what listens there (ss -ltnp), or serve with --port")
    else:
        yield Finding("port", "ok", f"{where} has a PagedRay server" if facts.server_there else f"{where} is free")


def check_interfaces(facts: Facts) -> Iterable[Finding]:
    """Which network NCCL and gloo take: wrong names make ranks wait for each other until a timeout."""
    wrong = False
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        value = facts.env.get(variable, "")
        if not value or value.startswith("^"):
            continue
        exact = value.startswith("=") or not variable.startswith("NCCL")
        for name in value.lstrip("=").split(","):
            fits = name in facts.interfaces if exact else any(i.startswith(name) for i in facts.interfaces)
            if not fits:
                wrong = True
                known = ", ".join(sorted(facts.interfaces - {"lo"})) or "none"
                yield Finding(
                    "interface", "fail", f"{variable} names {name}, which is not here", f"one of: {known}; or unset it"
                )
    others = sorted(
        i for i in facts.interfaces if i != "lo" and not i.startswith(("docker", "veth", "br-", "virbr", "cni"))
    )
    if not wrong and len(others) > 1 and facts.gpus and not facts.env.get("NCCL_SOCKET_IFNAME"):
        fix = f"export NCCL_SOCKET_IFNAME={others[0]} (the one that the nodes reach each other by) on every node"
        yield Finding("interface", "warn", f"several: {', '.join(others)}; NCCL takes the first that it finds", fix)
    elif not wrong:
        yield Finding("interface", "ok", ", ".join(others) or "only the loopback")


def check_auth(facts: Facts) -> Iterable[Finding]:
    """Ray asks for tokens where RAY_AUTH_MODE says so or, where it says nothing, where a token lies."""
    mode = facts.env.get("RAY_AUTH_MODE", "")
    token = facts.env.get("RAY_AUTH_TOKEN") or facts.env.get("RAY_AUTH_TOKEN_PATH") or facts.token_file
    if mode not in ("", "token", "disabled"):
        yield Finding(
            "ray auth", "fail", f"RAY_AUTH_MODE is {mode!r}", "it is token or disabled, and the same on every node"
        )
    elif mode == "token" and not token:
        fix = "ray get-auth-token --generate on one node, and its ~/.ray/auth_token on all; or RAY_AUTH_MODE=disabled"
        yield Finding("ray auth", "fail", "RAY_AUTH_MODE is token, and there is no token", fix)
    elif not mode and facts.token_file:
        fix = "set RAY_AUTH_MODE to token or disabled, the same on every node: nodes that differ cannot join"
        yield Finding("ray auth", "warn", f"{facts.token_file} makes Ray ask for tokens though nobody said so", fix)
    else:
        yield Finding("ray auth", "ok", {"token": "with a token", "disabled": "disabled"}.get(mode, "without tokens"))


def check_gpus(facts: Facts) -> Iterable[Finding]:
    if not facts.gpus:
        yield Finding("gpu", "ok", "none: models run on the CPU")
    elif facts.cuda_error:
        yield Finding(
            "gpu", "fail", f"{len(facts.gpus)} here, but {facts.cuda_error}",
            "install a driver for this torch's CUDA (nvidia-smi shows what it can), and pip install pagedray[gpu]",
        )  # fmt: skip
    else:
        yield Finding("gpu", "ok", ", ".join(facts.gpus))


def check_cluster(facts: Facts) -> Iterable[Finding]:
    cluster = facts.cluster
    if cluster is None:
        return
    address, error = cluster["address"], cluster.get("error", "")
    lowered = error.lower()
    if not error:
        nodes = cluster["nodes"]
        yield Finding("cluster", "ok", f"{len(nodes)} nodes at {address}: {', '.join(nodes)}")
    elif "auth" in lowered or "token" in lowered:
        fix = "the same RAY_AUTH_MODE here and on every node and, with token, the same ~/.ray/auth_token"
        yield Finding("cluster", "fail", f"{address} does not accept this machine's token: {error}", fix)
    elif "version mismatch" in lowered or "different python" in lowered or "different version" in lowered:
        yield Finding("cluster", "fail", error, "the same Ray and the same Python (to the patch level) everywhere")
    else:
        fix = "is `ray start --head` running there, and does a firewall let its ports through (6379, and 10000-19999)?"
        yield Finding("cluster", "fail", f"{address} cannot be reached: {error}", fix)


CHECKS: tuple[Callable[[Facts], Iterable[Finding]], ...] = (
    check_versions,
    check_compiler,
    check_cpu,
    check_memory,
    check_object_store,
    check_limits,
    check_names,
    check_port,
    check_interfaces,
    check_auth,
    check_gpus,
    check_cluster,
)


# -- looking -----------------------------------------------------------------------------------------------------------


def probe(host: str, port: int, ray_address: str | None = None) -> Facts:
    """Look at this machine; with `ray_address` at that cluster, too. Everything is bounded."""
    memory = _meminfo()
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    temp = tempfile.gettempdir()
    addresses, seconds = _look_up(socket.gethostname())
    gpus = _gpus()
    token = Path("~/.ray/auth_token").expanduser()
    cache = cache_root()
    there = _is_server(host, port)
    return Facts(
        python=tuple(sys.version_info[:3]),
        packages=_packages(),
        compiler=_compiler(),
        cpu_flags=_cpu_flags(),
        num_cpus=usable_cores(),
        memory_total=memory.get("MemTotal", 0),
        memory_available=memory.get("MemAvailable", 0),
        memory_limit=memory_limit(),
        shm_bytes=shm.total if shm else 0,
        shm_free=shm.free if shm else 0,
        max_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        temp_dir=temp,
        temp_free=shutil.disk_usage(temp).free,
        cache_dir=str(cache),
        cache_writable=_writable(cache),
        hostname=socket.gethostname(),
        addresses=addresses,
        lookup_seconds=seconds,
        interfaces=frozenset(name for _, name in socket.if_nameindex()),
        host=host,
        port=port,
        port_error="" if there else _port_error(host, port),
        server_there=there,
        gpus=gpus,
        cuda_error=_cuda_error() if gpus else "",
        env=dict(os.environ),
        token_file=str(token) if token.is_file() else None,
        cluster=_ask_cluster(ray_address) if ray_address else None,
    )


def _packages() -> dict[str, tuple[str, str | None]]:
    from packaging.requirements import Requirement

    found: dict[str, tuple[str, str | None]] = {}
    for line in metadata.requires("pagedray") or ():
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version: str | None = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            version = None
        found[requirement.name] = str(requirement.specifier), version
    return found


def _run(*command: str, seconds: float = _COMMAND_SECONDS) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired):
        return None


def _compiler() -> str | None:
    try:
        ran = _run(*compiler_command(), "--version")
    except FileNotFoundError:
        return None
    return ran.stdout.splitlines()[0] if ran and ran.returncode == 0 and ran.stdout else None


def _cpu_flags() -> frozenset[str]:
    """Empty where the system does not say."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))


def _meminfo() -> dict[str, int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return {"MemTotal": size, "MemAvailable": size}
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines) if rest}


def _writable(folder: Path) -> bool:
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def _look_up(name: str) -> tuple[tuple[str, ...], float]:
    """The addresses of a name, and what that took. In a thread: nothing else bounds a resolver that does not answer."""
    found: list[str] = []

    def ask() -> None:
        try:
            found.extend({str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
        except OSError:
            pass

    began = time.monotonic()
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_LOOKUP_SECONDS)
    return tuple(sorted(found)), time.monotonic() - began


def _is_server(host: str, port: int) -> bool:
    """Whether a server of ours listens there, by its console."""
    if not 0 < port <= 65535:
        return False
    connection = HTTPConnection({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port, timeout=_SERVER_SECONDS)
    try:
        connection.request("GET", "/console/")
        return b"PagedRay" in connection.getresponse().read(4096)
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def _port_error(host: str, port: int) -> str:
    try:
        free_port(host, port)
    except (ConfigError, OSError) as error:
        return str(error)
    return ""


def _gpus() -> tuple[str, ...]:
    ran = _run("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return tuple(ran.stdout.strip().splitlines()) if ran and ran.returncode == 0 else ()


def _cuda_error() -> str:
    code = "import torch; torch.zeros(1, device='cuda'); print('fine')"
    ran = _run(sys.executable, "-c", code, seconds=_CLUSTER_SECONDS)
    if ran is None:
        return f"torch did not use one within {_CLUSTER_SECONDS:.0f} s"
    return "" if ran.stdout.strip() == "fine" else ran.stderr.strip().splitlines()[-1][:200]


_ASK_CLUSTER = """
import json, logging, sys, ray
try:
    ray.init(sys.argv[1], logging_level=logging.ERROR, log_to_driver=False)
    print(json.dumps({"nodes": [n["NodeManagerAddress"] for n in ray.nodes() if n["Alive"]]}))
except BaseException as error:
    print(json.dumps({"error": " ".join(f"{type(error).__name__}: {error}".split())[:400]}))
"""


def _ask_cluster(address: str) -> dict[str, Any]:
    """In a process of its own, which can be ended whatever Ray waits for."""
    ran = _run(sys.executable, "-c", _ASK_CLUSTER, address, seconds=_CLUSTER_SECONDS)
    if ran is None:
        return {"address": address, "error": f"no answer within {_CLUSTER_SECONDS:.0f} s"}
    try:
        return {"address": address} | json.loads(ran.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return {"address": address, "error": ran.stderr.strip()[-300:] or "Ray ended without a word"}
