"""What `pagedray serve` does: brings up Ray, Serve and the application, waits, and takes all of it down again.

Without an address the Ray cluster is one of our own on this machine: its own temporary folder and ports, so that two
servers do not meet, and no process of it outlives us. With an address, only the application is ours.
"""

import ctypes
import io
import logging
import math
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NoReturn

from ..scheduler.errors import ConfigError, PagedRayError
from ..workers.config import EngineConfig
from .config import ApplicationConfig
from .openai.file_store import FileStore

APPLICATION = "pagedray"
_LEAVE_SECONDS = 5.0  # for Ray's processes to end by themselves, before they are killed
_SHUT_DOWN_SECONDS = 10.0  # for Ray to end its cluster
_UNDEPLOY_SECONDS = 120.0  # for Serve to take an application from a cluster that is not ours
_LAST_EVENT_SECONDS = 2.0  # for answers that are broken off to end with an error
_POLL_SECONDS = 0.25
_READY_POLL_SECONDS = 0.05
_CHECK_SECONDS = 1.0
_NOTICE_SECONDS = 2.0  # between readiness that is false and the first request that is refused for it
_LAST_BYTES_SECONDS = 0.3  # from the last token to the client
_NUM_OTHER_ACTORS = 4  # without a CPU of their own: controller, ingress, worker group's replica, global scheduler


class ServerFailed(PagedRayError):
    """The server did not come up, or did not stay up."""

    code = "server_failed"


class _Stopped(Exception):
    """A signal came: what was being done is not done any further."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    host: str = "127.0.0.1"
    port: int = 8000  # 0: one that is free
    ray_address: str | None = None  # None: RAY_ADDRESS, else a cluster of our own
    start_timeout: float = 600.0  # seconds until the application answers
    grace_period: float = 20.0  # seconds for requests that run at SIGTERM

    def __post_init__(self) -> None:
        for name in ("start_timeout", "grace_period"):
            if not 0 <= (seconds := getattr(self, name)) < math.inf:
                raise ConfigError(f"{name} must be seconds, 0 or more, not {seconds}")


def serve(args: dict[str, Any], options: ServerOptions, build: Callable[..., Any] | None = None) -> None:
    """Serve the application that `args` describe until SIGINT or SIGTERM; must be called in the main thread.

    SIGTERM lets requests that run end, for `grace_period` seconds; SIGINT breaks them off. A second signal,
    or, on a cluster of our own, one before the server is ready, kills what there is. The exit status is then, and for
    any before it is ready, 128 + its number.

    Raises `ConfigError` for bad arguments or a port in use and `CheckpointError` for a local model that cannot be
    served, before anything starts, and `ServerFailed` with the failing deployment's own message. `build` takes the
    place of `cluster.app.application`.
    """
    config = ApplicationConfig.parse(args)
    address = options.ray_address or os.environ.get("RAY_ADDRESS") or None
    local = address in (None, "local")
    if local:
        reserved = PortReservation(options.host, options.port)
        options = replace(options, port=reserved.port)
        for model in config.models:
            check_local_model(model.engine)
        if config.files is not None:  # the ingress will run here
            FileStore(config.files).prepare()
    server = _Server(config, options, None if local else address, build)
    # Ray runs in a thread, so that signals, which reach the main thread, never break into the middle of it
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    thread = threading.Thread(target=server.run, name="server")
    thread.start()
    while thread.is_alive():
        for s in before:
            signal.signal(s, server.on_signal)  # again and again: ray.init puts a handler of its own, which aborts
        thread.join(_POLL_SECONDS)
    for s, handler in before.items():
        signal.signal(s, handler)
    if server.hangs:  # Ray would be shut down again by Python's own end
        _say(f"Ray did not end in time{f', after this error: {server.error}' if server.error else ''}")
        os._exit(1)
    if server.error is not None:
        raise server.error


class _Server:
    def __init__(self, config: ApplicationConfig, options: ServerOptions, address: str | None, build: Any):
        self.config, self.options, self.address, self.build = config, options, address, build
        self.names = ", ".join(dict.fromkeys(m.model_id for m in config.models))
        self.stop = threading.Event()
        self.signum = 0  # the first signal's
        self.now = threading.Event()  # nothing is waited for any more
        self.ready = False
        self.error: BaseException | None = None
        self.killed = False
        self.hangs = False
        self.folder: str | None = None  # Ray's temporary one, where the cluster is ours

    def on_signal(self, signum: int, frame: Any) -> None:
        """The first signal stops the server in good order, the second at once. So does one that comes while a cluster
        of ours starts: Ray would not let go for as long as that takes."""
        signal.alarm(0)  # where Ray's handler came first, it has set one to abort by
        if self.stop.is_set() or not (self.ready or self.address):
            self.killed = True  # what the other thread makes of that is no news
            if not self.stop.is_set():
                _say("stopped before it was ready")
            leave_no_process(grace=0.0, give_up=2.0)
            self._remove_folder()
            os._exit(128 + signum)
        self.signum = signum
        if signum == signal.SIGINT:
            self.now.set()
        self.stop.set()

    def run(self) -> None:
        self.folder = folder = None if self.address else _short_temp_dir()
        try:
            self._serve(folder)
        except _Stopped:
            if self.ready and not self.now.is_set():
                _say(f"finishing what runs, for {self.options.grace_period:g} s at most (once more to kill)")
                _finish(self.options.grace_period, self.config.scheduler.scheduler_shards)
            elif not self.ready:
                self.error = SystemExit(128 + self.signum)
            _say("stopping (once more to kill)")
        except BaseException as error:
            self.error = error
            if folder and not isinstance(error, ConfigError) and not self.killed:
                _say(f"Ray's logs are in {folder}/session_latest/logs")
        self.stop.set()
        thread = threading.Thread(target=_shut_down, args=[folder is not None], name="shut down", daemon=True)
        thread.start()  # a cluster of which a process hangs keeps Ray waiting
        thread.join(_SHUT_DOWN_SECONDS if folder else _UNDEPLOY_SECONDS)
        if folder:
            leave_no_process()
            thread.join(_LEAVE_SECONDS)
            if self.error is None or isinstance(self.error, ConfigError):
                self._remove_folder()
        self.hangs = thread.is_alive()

    def _remove_folder(self) -> None:
        for _ in range(5):  # a process on its way out may have made something meanwhile
            if self.folder and os.path.exists(self.folder):
                shutil.rmtree(self.folder, ignore_errors=True)

    def _serve(self, folder: str | None) -> NoReturn:
        self._next("starting Ray" if folder else f"connecting to Ray at {self.address}")
        # Ray spends most of its start waiting for its daemons; imports want seconds of a core, too
        imports = threading.Thread(target=self._application, name="imports")
        _start_ray(self.address, folder, _num_cpus(self.config), meanwhile=imports.start)
        imports.join()
        daemons = children() if folder else []
        if folder:
            import ray

            check_resources(self.config, ray.cluster_resources())
        self._next("starting Serve")
        listen = self._listen_address() if folder else None
        _start_serve(self.options.host, self.options.port, fresh=folder is not None, proxy=listen is None)
        self._next(f"loading {self.names}")
        self._deploy(listen)
        show_news = _follow(Path(folder)) if folder else lambda: None
        host = "127.0.0.1" if self.options.host in ("0.0.0.0", "::") else self.options.host
        url = f"http://{host}:{self.options.port}"
        _wait_until_ready(self.options.start_timeout, self.stop, show_news, url if folder else None)
        self._next("ready")
        self.ready = True
        print(f"\n{self.names} at {url}/v1\n\n{curl_line(url, self.config.models[0].model_id)}\n", flush=True)
        while not self.stop.wait(_CHECK_SECONDS):
            show_news()
            if lost := [pid for pid in daemons if not alive(pid)]:
                raise ServerFailed(f"process {lost[0]} of the Ray cluster ended by itself; nothing is served any more")
        raise _Stopped

    def _next(self, line: str) -> None:
        if self.stop.is_set():
            raise _Stopped
        _say(line)

    def _listen_address(self) -> Any:
        """Where the ingress itself listens; None where Serve scales ingresses, by what its proxy sees."""
        from .http_server import ListenAddress

        scaled = self.config.ingress.get("autoscaling_config") or self.config.ingress.get("num_replicas") == "auto"
        return None if scaled else ListenAddress(self.options.host, self.options.port)

    def _application(self) -> Callable[..., Any]:
        """What builds the application."""
        from .app import application

        return self.build or application

    def _deploy(self, listen: Any) -> None:
        from ray import serve

        build = self._application()
        serve.run_many(
            [serve.RunTarget(build(self.config, listen), name=APPLICATION, route_prefix="/")],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )


def curl_line(url: str, model: str) -> str:
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n  -d '{body}'"


def _say(line: str) -> None:
    print(f"pagedray: {line}", file=sys.stderr, flush=True)


# Before anything starts.


def free_port(host: str, port: int) -> int:
    """`port`, or a free one for 0; `ConfigError` if nothing can listen there."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"cannot listen on {host}:{port}: a port is a number up to 65535")
    try:
        family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            probe.listen(1)  # SO_REUSEADDR lets two bind, only one listen
            return probe.getsockname()[1]
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another with --port"
        ) from None


class PortReservation:
    """A free port, kept from other servers of ours while Ray starts and nobody listens on it yet.

    Ingresses share their port (SO_REUSEPORT), so two servers that find it free in the same seconds would share it, too.
    An abstract socket has a port's scope, the machine's or the container's network, and is gone with the process.
    """

    def __init__(self, host: str, port: int):
        for _ in range(1 if port else 20):
            self.port = free_port(host, port)
            self._lock = socket.socket(socket.AF_UNIX)
            try:
                if sys.platform == "linux":
                    self._lock.bind(f"\0pagedray:{self.port}")
                return
            except OSError:
                self._lock.close()
        raise ConfigError(f"cannot listen on {host}:{port}: another server of PagedRay is there; choose another --port")


def check_local_model(engine: EngineConfig) -> None:
    """Raise `CheckpointError` for a local model that cannot be served, from its headers, and `ConfigError` for one that
    cannot be served so; a hub id is not looked up."""
    from ..workers.checkpoint.locate import may_be_on_hub, read_config, sampling_defaults

    if not may_be_on_hub(engine.model):
        engine.context_length(read_config(engine.model))
        sampling_defaults(engine)


def _short_temp_dir() -> str:
    # Ray's sockets lie some 70 characters below this, and the path of a socket may have 107
    base = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="pagedray-", dir=base if len(base) <= 24 else "/tmp")


def _num_cpus(config: ApplicationConfig) -> int:
    """CPUs that our own cluster says it has: Ray only counts them, and a small machine must hold every replica.

    Ray also starts as many worker processes beforehand, while it waits for its daemons, so that those which Serve's
    controller and our actors run in are there when they are asked for.
    """

    def most(options: dict[str, Any], cpus: float) -> float:
        replicas = options.get("num_replicas", 1)
        replicas = 1 if replicas in (None, "auto") else replicas
        return max(replicas, options.get("autoscaling_config", {}).get("max_replicas", 1)) * cpus

    needed = most(config.ingress, config.ingress.get("ray_actor_options", {}).get("num_cpus", 0))
    for model in config.models:
        bundles = model.deployment.get("placement_group_bundles", [{"CPU": 1}] * model.engine.world_size)
        needed += most(model.deployment, sum(bundle["CPU"] for bundle in bundles))
    return max(os.cpu_count() or 1, math.ceil(needed) + _NUM_OTHER_ACTORS)


def check_resources(config: ApplicationConfig, machine: Mapping[str, float]) -> None:
    """Raise `ConfigError` for a group that takes what this machine does not have: it would wait for a node for ever."""
    for model in config.models:
        taken: dict[str, float] = {}
        for bundle in model.deployment.get("placement_group_bundles", ()):
            for kind, amount in bundle.items():
                taken[kind] = taken.get(kind, 0) + amount
        # of CPUs our cluster says it has what is needed
        if missing := {k: v for k, v in taken.items() if k != "CPU" and v > machine.get(k, 0)}:
            what = " and ".join(_in_words(kind, amount, machine.get(kind, 0)) for kind, amount in missing.items())
            gpus = any(kind == "GPU" or kind.startswith("accelerator_type:") for kind in missing)
            cpu = ", or say device: cpu and no accelerator_type, to compute on CPUs" * gpus
            raise ConfigError(
                f"{model.model_id} cannot be served on this machine: a worker group takes {what}; serve it on a Ray "
                f"cluster that has that (--ray-address, or serve deploy){cpu}"
            )


def _in_words(kind: str, amount: float, there: float) -> str:
    if kind.startswith("accelerator_type:"):
        return f"a node with {kind.removeprefix('accelerator_type:')}"
    return f"{amount:g} {kind} (here: {there:g})"


# Up.


def _start_ray(address: str | None, folder: str | None, num_cpus: int, meanwhile: Callable[[], None]) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns of its own future
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    if folder:
        # without this Ray asks for tokens where ~/.ray/auth_token lies, and its agents would need them
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        # Ray runs workers at nice 15, where the threads of a model, which wait for each other, wait for everything else
        os.environ.setdefault("RAY_worker_niceness", "0")
        os.environ.pop("RAY_ADDRESS", None)
        adopt_orphans()
    import ray

    logging.getLogger("ray").setLevel(logging.ERROR)
    meanwhile()
    try:
        if folder:
            with _own_daemons():
                ray.init("local", include_dashboard=False, num_cpus=num_cpus, _temp_dir=folder, **quiet)
        else:
            ray.init(address, **quiet)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise ServerFailed(f"Ray did not start: {_one_line(error)}") from error


@contextmanager
def _own_daemons() -> Iterator[None]:
    """How Ray starts the daemons of a node of ours; there is no public setting (Ray 2.60).

    It leaves out what has no task here: the autoscaler has nothing to scale, the log monitor nobody to send to, the
    dashboard's server no page to show. They would take two of the seconds to the first token. And a signal to our
    process group, which is what a shell and many a supervisor send, does not reach the others: Ray shields them from
    SIGINT alone, and at SIGTERM requests are still to end.
    """
    import ray._private.services
    from ray._private.node import Node

    services: Any = ray._private.services

    daemons = {
        "start_monitor": lambda self: None,
        "start_log_monitor": lambda self: None,
        "start_api_server": lambda self, **_: None,
    }
    originals = {name: getattr(Node, name) for name in daemons}
    for name, nothing in daemons.items():
        setattr(Node, name, nothing)
    popen = services.ConsolePopen
    services.ConsolePopen = partial(popen, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = popen
        for name, original in originals.items():
            setattr(Node, name, original)


def _start_serve(host: str, port: int, fresh: bool, proxy: bool) -> None:
    from ray import serve

    if not fresh and serve.status().proxies:
        raise ServerFailed("Serve runs on this cluster already; deploy with `serve deploy CONFIG.yaml` there")
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    if proxy:
        serve.start(http_options={"host": host, "port": port})
    else:
        serve.start(proxy_location="Disabled")
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # serve.start has set it back


def _wait_until_ready(timeout: float, stop: threading.Event, show_news: Callable[[], None], url: str | None) -> None:
    """Until Serve says that the application runs and, if there is a `url`, it answers there; or until `stop`."""
    from ray import serve

    deadline = time.monotonic() + timeout
    told: set[str] = set()  # models that cannot start; others do not wait for them
    asked = 0.0  # when Serve was, which costs it and us some milliseconds of the cores that load the model
    while (now := time.monotonic()) < deadline:
        if stop.wait(_READY_POLL_SECONDS):
            return
        answers = url is None or _answers(url)
        if now - asked < _POLL_SECONDS * (1 if url is None or not answers else 0.2):
            continue
        asked = now
        show_news()
        application = serve.status().applications.get(APPLICATION)
        if application is None:
            continue
        messages = {name: d.message for name, d in application.deployments.items() if d.message}
        failed = _failed(application)
        groups = {name for name in application.deployments if name.startswith("WorkerGroup:")}
        if failed and (failed.keys() - groups or failed.keys() >= groups):
            raise ServerFailed("; ".join(f"{name}: {why}" for name, why in failed.items()))
        for name in failed.keys() - told:
            told.add(name)
            _say(f"{name.removeprefix('WorkerGroup:')} cannot start, the other models can: {failed[name]}")
        if application.status in ("DEPLOY_FAILED", "UNHEALTHY") and not failed:
            raise ServerFailed(_why(messages) or application.message)
        rest = [d.status for name, d in application.deployments.items() if name not in failed]
        if answers and (application.status == "RUNNING" or (failed and all(s == "HEALTHY" for s in rest))):
            return
    raise ServerFailed(
        f"not ready after {timeout:.0f} s (--start-timeout). {_why(messages) or 'Nothing has failed yet.'}"
    )


def _failed(application: Any) -> dict[str, str]:
    """Deployments that will not come up, and why. Errors of ours are final: trying again would give the same."""
    failed = {}
    for name, deployment in application.deployments.items():
        ours = re.search(r"pagedray\.scheduler\.errors\.(?!EngineDead)\w+: (.+)", deployment.message)
        if ours and deployment.status != "HEALTHY":
            failed[name] = ours[1].strip()
        elif deployment.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            failed[name] = _why({name: deployment.message}).removeprefix(f"{name}: ")
    return failed


def _answers(url: str) -> bool:
    connection = HTTPConnection(url.removeprefix("http://"), timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def _why(messages: dict[str, str]) -> str:
    """The last line of each deployment's traceback, or its whole message."""
    lines = []
    for name, message in messages.items():
        errors = re.findall(r"^[ \t]*((?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt|Exit)\b.*)$", message, re.MULTILINE)
        errors = [e for e in errors if not e.endswith("Traceback (most recent call last):")]  # it only begins another
        lines.append(f"{name}: {(errors or [_one_line(message)])[-1].strip()}")
    return "; ".join(lines)


def _one_line(text: object) -> str:
    return " ".join(str(text).split())[:500]


def _follow(folder: Path) -> Callable[[], None]:
    """A function that shows the new lines on the stderr of worker processes that begin with "pagedray: "."""
    read: dict[Path, int] = {}
    marker = b"pagedray: "

    def show_news() -> None:
        for path in folder.glob("session_*/logs/worker-*.err"):
            if path.parent.parent.is_symlink() or path.stat().st_size == read.get(path, 0):
                continue
            with path.open("rb") as file:
                file.seek(read.get(path, 0))
                news = file.read()
            whole = news[: news.rfind(b"\n") + 1]
            read[path] = read.get(path, 0) + len(whole)
            for line in whole.splitlines():
                if line.startswith(marker):
                    _say(line[len(marker) :].decode(errors="replace"))

    return show_news


# Down.


def _finish(seconds: float, num_shards: int) -> None:
    """Have the application say that it is not ready, and wait until what it was asked for is done.

    What is not when time is up ends with an error that tells its clients to ask again.
    """
    import ray

    from . import global_scheduler

    deadline = time.monotonic() + seconds
    notice = min(_NOTICE_SECONDS, seconds / 2)

    def ask_all(method: str, *args: Any) -> list[Any]:
        answers = [getattr(s, method).remote(*args) for s in schedulers]
        return ray.get(answers, timeout=max(_LAST_EVENT_SECONDS, deadline - time.monotonic()))

    try:
        schedulers = [global_scheduler.find(APPLICATION, shard) for shard in range(num_shards)]
        ask_all("leave", notice)
        time.sleep(notice)
        num_idle = 0
        while num_idle < 2:  # one may be between two groups
            num_idle = 0 if any(ask_all("num_unfinished")) else num_idle + 1
            if time.monotonic() > deadline and not num_idle:
                _say(f"not all was done after {seconds:g} s (--grace-period)")
                try:
                    ask_all("end_requests")
                except ray.exceptions.GetTimeoutError:  # of a group that hangs
                    pass
                num_idle = 2
            time.sleep(_LAST_BYTES_SECONDS if num_idle else _READY_POLL_SECONDS)
    except (ray.exceptions.RayError, ValueError) as error:
        _say(f"nothing is waited for: {_one_line(error)}")


def _shut_down(local: bool) -> None:
    """Leave Ray. Our own cluster goes as a whole: Serve would first wait for streams and constructors to end."""
    if "ray" not in sys.modules:
        return
    import ray
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    with redirect_stdout(io.StringIO()):  # where Ray reports the deaths of actors, which are wanted
        if ray.is_initialized() and not local:
            try:
                serve.shutdown()
            except Exception as error:  # whatever Ray says here, we are leaving
                _say(f"Serve did not stop cleanly: {_one_line(error)}")
        ray.shutdown()


# Processes. Ray's daemons start workers and agents that outlive them for a while; as their "subreaper" we inherit
# them, so that what is left can be seen and waited for. Linux only: elsewhere Ray's own shutdown must do.


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends (prctl PR_SET_CHILD_SUBREAPER)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0)


def _stat(pid: int) -> tuple[str, int] | None:
    """A process's state and parent; None if there is no such process."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return None
    return state, int(parent)


def alive(pid: int) -> bool:
    stat = _stat(pid)
    return stat is not None and stat[0] not in "ZX"


def children(pid: int | None = None) -> list[int]:
    """The living processes that `pid`, by default this one, is the parent of."""
    pid = pid or os.getpid()
    pids = [int(p.name) for p in Path("/proc").glob("[0-9]*")]
    return [p for p in pids if (s := _stat(p)) and s[1] == pid and s[0] not in "ZX"]


def descendants() -> list[int]:
    found: list[int] = []
    level = children()
    while level:
        found += level
        level = [c for p in level for c in children(p)]
    return found


def kill_all(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def leave_no_process(grace: float = _LEAVE_SECONDS, give_up: float = 2 * _LEAVE_SECONDS) -> None:
    """Wait until every descendant has ended, `give_up` seconds at most; kill what has not after `grace` seconds."""
    began = time.monotonic()
    while (left := descendants()) and time.monotonic() < began + give_up:
        if time.monotonic() > began + grace:
            kill_all(left)
        time.sleep(0.05)
        _reap()
    _reap()


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
