"""Real hosts on one machine: network namespaces joined by a bridge, each with processes and a Ray of its own.

    with Network(2) as network:
        head, other = network.hosts
        head.start_ray()
        other.start_ray(head)
        head.python("import ray; ray.init('auto'); print(len(ray.nodes()))")
        network.partition([head], [other])
        network.heal()
        other.kill()

A host has its own network, PID, mount, UTS and IPC namespaces, /dev/shm, /tmp/ray, HOME, /etc/hosts and
/etc/resolv.conf; the rest of the file system is shared. Its PID 1 reaps, and ends with whoever made the host, so a
killed test leaves no process; names and folders that it leaves are removed when the next `Network` is made.
Needs Linux, root and iproute2: `Unavailable` says what is missing.
"""

import contextlib
import fcntl
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_RECORDS = Path(tempfile.gettempdir()) / "pagedray-hosts"  # known to all sessions, or leftovers could not be found
_UP_SECONDS = 20.0
_DOWN_SECONDS = 10.0
_RAY_SECONDS = 90.0
_RAY_PORT = 6379  # a host is alone in its network
_TOOLS = ("ip", "unshare", "nsenter", "setpriv", "mount")


class Unavailable(Exception):
    """This machine cannot have such hosts; says why."""


class Network:
    """Hosts on one bridge. `address` is this process's own on it: servers here and there can be reached both ways.

    Closing it, also by leaving a `with`, ends every process and removes every name it made.
    """

    def __init__(self, num_hosts: int = 2, shm_bytes: int = 2**30):
        _check_machine()
        remove_leftovers()
        self.name, self.folder, self._subnet = _claim()
        self.address = f"{self._subnet}.1"
        self.hosts: list[Host] = []
        self._bridges = [self.name]
        try:
            # An address of its own: else it has that of a port, and another one when that host is killed; then what the
            # hosts send to this process is lost for half a minute.
            _run("ip", "link", "add", self.name, "address", _card(self.address), "type", "bridge")
            _run("ip", "address", "add", f"{self.address}/24", "dev", self.name)
            _run("ip", "link", "set", self.name, "up")
            self.hosts += [Host(self, i, f"{self._subnet}.{10 + i}", shm_bytes) for i in range(1, num_hosts + 1)]
            for host in self.hosts:
                host.start()
        except subprocess.CalledProcessError as error:
            self.close()
            raise Unavailable(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from None
        except BaseException:
            self.close()
            raise

    def partition(self, *sides: Sequence["Host"]) -> None:
        """Cut the hosts of different sides off from each other, in silence. This process stays with the first side."""
        for number, side in enumerate(sides):
            if number == len(self._bridges):
                self._bridges.append(f"{self.name}s{number}")
                _run("ip", "link", "add", self._bridges[number], "type", "bridge")
                _run("ip", "link", "set", self._bridges[number], "up")
            for host in side:
                _run("ip", "link", "set", host.link, "master", self._bridges[number])

    def heal(self) -> None:
        self.partition([h for h in self.hosts if h.running])

    def close(self) -> None:
        for host in self.hosts:
            host.kill()
        _remove(self.folder)

    def __enter__(self) -> "Network":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Host:
    """One host of a `Network`. Process ids are those outside of it, where tests are."""

    def __init__(self, network: Network, number: int, address: str, shm_bytes: int):
        self.network = network
        self.name = f"h{number}"
        self.address = address
        self.folder = network.folder / self.name
        self.home = self.folder / "home"
        self.link = f"{network.name}h{number}"  # the bridge's end of its cable
        self.shm_bytes = shm_bytes
        self._unshare: subprocess.Popen | None = None
        self._init = 0  # process id of its PID 1

    @property
    def running(self) -> bool:
        return self._unshare is not None and self._unshare.poll() is None

    def start(self) -> None:
        """Power on; also after `kill`, with empty disks."""
        assert not self.running
        for folder in ("ray", "home"):
            (self.folder / folder).mkdir(parents=True, exist_ok=True)
        names = "".join(f"{h.address} {h.name}\n" for h in self.network.hosts)
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        (self.folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # refuses at once: nothing waits for it
        space = f"{self.network.name}-{self.name}"
        _run("ip", "netns", "add", space)
        cable = ("ip", "link", "add", self.link, "type", "veth", "peer", "name", "eth0")
        _run(*cable, "address", _card(self.address), "netns", space)
        _run("ip", "link", "set", self.link, "master", self.network.name, "up")
        inside = ("ip", "-n", space)
        _run(*inside, "address", "add", f"{self.address}/24", "dev", "eth0")
        _run(*inside, "link", "set", "eth0", "up")
        _run(*inside, "link", "set", "lo", "up")
        _run(*inside, "route", "add", "default", "via", self.network.address)  # Ray asks for the way to the internet
        new = ["unshare", "--pid", "--fork", "--mount", "--uts", "--ipc", "--mount-proc", "--kill-child"]
        init = [sys.executable, "-S", str(Path(__file__).resolve()), str(self.folder), self.name, str(self.shm_bytes)]
        log = (self.folder / "init.log").open("w")
        self._unshare = subprocess.Popen(
            ["ip", "netns", "exec", space, *new, *init], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        )
        log.close()
        assert self._unshare.stdout is not None
        ready, _, _ = select.select([self._unshare.stdout], [], [], _UP_SECONDS)
        if not ready or self._unshare.stdout.readline() != b"up\n":
            raise Unavailable(f"host {self.name} did not come up: {(self.folder / 'init.log').read_text().strip()}")
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children").read_text().split()
        self._init = int(children[0])
        record = [_identity(self._unshare.pid), _identity(self._init)]
        (self.folder / "processes.json").write_text(json.dumps(record))

    def kill(self) -> None:
        """Power off: the others hear nothing, then every process is gone."""
        if self._unshare is None:
            return
        if self.running:
            _try("ip", "link", "set", self.link, "nomaster")
            os.kill(self._init, signal.SIGKILL)
        self._unshare.wait(_DOWN_SECONDS)
        for pipe in (self._unshare.stdin, self._unshare.stdout):
            assert pipe is not None
            pipe.close()
        self._unshare = None
        _try("ip", "link", "delete", self.link)
        _try("ip", "netns", "delete", f"{self.network.name}-{self.name}")
        shutil.rmtree(self.folder, ignore_errors=True)

    def slow(self, milliseconds: float) -> None:
        """Delay every packet that it sends; 0: no longer. `Unavailable` where the kernel has no netem."""
        _try("tc", "-n", f"{self.network.name}-{self.name}", "qdisc", "delete", "dev", "eth0", "root")
        if milliseconds:
            qdisc = ("qdisc", "add", "dev", "eth0", "root", "netem", "delay", f"{milliseconds}ms")
            try:
                _run("tc", "-n", f"{self.network.name}-{self.name}", *qdisc)
            except subprocess.CalledProcessError as error:
                raise Unavailable(f"tc netem: {error.stderr.strip()}") from None

    # -- processes ----------------------------------------------------------------------------------------------------

    def popen(self, *command: str, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen:
        """Start a command in the host, with its environment; it dies with the process object's own."""
        assert self.running, f"{self.name} is down"
        enter = ["nsenter", "--target", str(self._init), "--mount", "--uts", "--ipc", "--net", "--pid", "--wd=/"]
        guard = ["setpriv", "--pdeathsig", "KILL"]  # nsenter stays outside; killing it must end what it started
        return subprocess.Popen([*enter, *guard, *command], env=self.env() | dict(env or {}), **options)

    def run(self, *command: str, env: Mapping[str, str] | None = None, timeout: float = 60.0) -> str:
        """Run a command to its end, and return what it printed. Raises AssertionError where it fails or is late."""
        process = self.popen(*command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            raise AssertionError(f"{self.name}: {command} took over {timeout:g} s:\n{output}") from None
        finally:
            process.kill()
        assert process.returncode == 0, f"{self.name}: {command} ended with {process.returncode}:\n{output}"
        return output

    def python(self, source: str, *arguments: str, env: Mapping[str, str] | None = None, timeout: float = 60.0) -> str:
        """Run Python, the same as runs the tests, and return what it printed."""
        return self.run(sys.executable, "-c", source, *arguments, env=env, timeout=timeout)

    def env(self) -> dict[str, str]:
        """The environment of its processes: nothing of the user's Ray, no token authentication, a HOME of its own."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "PYTEST_"))}
        from pagedray.kernels.cache import cache_root  # not at the top: PID 1 has the standard library only

        cache = str(cache_root())
        ray = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
        mine = {"HOME": str(self.home), "PAGEDRAY_CACHE": cache, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        return inherited | ray | mine

    def processes(self) -> dict[int, str]:
        """Process id and title of everything that runs in the host."""
        found = {}
        if self.running:
            mine = os.readlink(f"/proc/{self._init}/ns/pid")
            for entry in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    if os.readlink(entry / "ns" / "pid") == mine:
                        found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ").strip()
        return found

    # -- Ray ----------------------------------------------------------------------------------------------------------

    def start_ray(
        self, head: "Host | None" = None, num_cpus: int = 2, env: Mapping[str, str] | None = None, **resources: float
    ) -> None:
        """`ray start`: a head of its own, or a worker of `head`'s cluster. The driver says `ray.init("auto")`."""
        role = ["--head", f"--port={_RAY_PORT}", "--include-dashboard=false"]
        if head is not None:
            role = [f"--address={head.address}:{_RAY_PORT}"]
        self.run(
            *(sys.executable, "-m", "ray.scripts.scripts", "start", *role),
            *(f"--node-ip-address={self.address}", f"--num-cpus={num_cpus}", f"--resources={json.dumps(resources)}"),
            *(f"--object-store-memory={min(256 * 2**20, self.shm_bytes // 2)}", "--disable-usage-stats"),
            env=env,
            timeout=_RAY_SECONDS,
        )

    def serve(self, config: Path, log: Path) -> subprocess.Popen:
        """`pagedray serve` in the cluster that runs here, on every address; what it says goes to `log`."""
        command = ["-m", "pagedray", "serve", str(config), "--host", "0.0.0.0", "--ray-address", "auto"]
        with log.open("w") as out:
            return self.popen(sys.executable, *command, stdout=out, stderr=subprocess.STDOUT)


# Leftovers. A network is a folder of records under its own name; kernel names all begin with that name.


def remove_leftovers() -> None:
    """Remove what is left of networks whose owners are dead: processes by their recorded ids, then names, folders."""
    for folder in sorted(_RECORDS.glob("pr*")) if _RECORDS.is_dir() else ():
        with contextlib.suppress(OSError, ValueError):
            if not _lives(json.loads((folder / "owner.json").read_text())):
                _remove(folder)


def _remove(folder: Path) -> None:
    for record in folder.glob("h*/processes.json"):
        with contextlib.suppress(OSError, ValueError):
            for identity in json.loads(record.read_text()):
                if _lives(identity):
                    os.kill(identity[0], signal.SIGKILL)
    for line in _try("ip", "netns", "list").splitlines():
        if line.startswith(f"{folder.name}-"):
            _try("ip", "netns", "delete", line.split()[0])
    for link in json.loads(_try("ip", "-json", "link", "show") or "[]"):
        if link["ifname"].startswith(folder.name):
            _try("ip", "link", "delete", link["ifname"])
    shutil.rmtree(folder, ignore_errors=True)


def _claim() -> tuple[str, Path, str]:
    """A name, its folder and a /24 that no other session has. The name is the subnet's, so one claim settles both."""
    _RECORDS.mkdir(exist_ok=True)
    routes = _run("ip", "route", "show")
    for _ in range(100):
        high, low = random.SystemRandom().randrange(64, 192), random.SystemRandom().randrange(256)
        name, subnet = f"pr{high:02x}{low:02x}", f"10.{high}.{low}"
        if f"10.{high}." in routes:
            continue
        made = Path(tempfile.mkdtemp(dir=_RECORDS, prefix="new-"))
        (made / "owner.json").write_text(json.dumps(_identity(os.getpid())))
        try:
            made.rename(_RECORDS / name)  # fails where it exists: ours is never empty
            return name, _RECORDS / name, subnet
        except OSError:
            shutil.rmtree(made)
    raise Unavailable("every subnet that was tried is taken")


def _card(address: str) -> str:
    """The address of the network card that has this one: the same after a restart."""
    return "02:00:" + ":".join(f"{int(part):02x}" for part in address.split("."))


def _identity(pid: int) -> tuple[int, str]:
    """A process id, and when it started: ids are used again."""
    return pid, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def _lives(identity: Sequence[Any]) -> bool:
    try:
        return tuple(identity) == _identity(identity[0])
    except OSError:
        return False


def _check_machine() -> None:
    if sys.platform != "linux":
        raise Unavailable("hosts are made of Linux namespaces")
    if os.geteuid() != 0:
        raise Unavailable("making network namespaces takes root")
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        raise Unavailable(f"{', '.join(missing)} not found; on Debian: apt-get install iproute2 util-linux mount")


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout


def _try(*command: str) -> str:
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=30).stdout


# PID 1 of a host. Runs with -S: the standard library is all it has.


def _pid_1(folder: str, name: str, shm_bytes: str) -> None:
    import socket

    socket.sethostname(name)
    _run("mount", "-t", "tmpfs", "-o", f"size={shm_bytes}", "tmpfs", "/dev/shm")
    Path("/tmp/ray").mkdir(exist_ok=True)
    for source, target in (("ray", "/tmp/ray"), ("hosts", "/etc/hosts"), ("resolv.conf", "/etc/resolv.conf")):
        _run("mount", "--bind", f"{folder}/{source}", target)
    print("up", flush=True)
    # Wakes at each child's end, to reap, and at the end of stdin: whoever made this host is gone, or wants it gone
    wake, woken = os.pipe()
    fcntl.fcntl(woken, fcntl.F_SETFL, os.O_NONBLOCK)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while sys.stdin not in select.select([sys.stdin, wake], [], [])[0]:
        os.read(wake, 4096)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


if __name__ == "__main__":
    _pid_1(*sys.argv[1:])
