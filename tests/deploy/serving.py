"""Ray with Serve on hosts of a test, which asks for its token as KubeRay has it; and clients that keep asking."""

import json
import re
import sys
import threading
import time

import httpx
import yaml
from hosts import Host

TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef0123456789abcdef"}


class Cluster:
    """Ray with Serve's REST interface on a host, and what runs there."""

    def __init__(self, host, folder):
        self.host, self.folder, self.url = host, folder, f"http://{host.address}:8000"

    def deploy(self, args, **application):
        """`serve deploy` a document with these arguments of ours. Returns at once."""
        app = {"name": "pagedray", "route_prefix": "/", "import_path": "pagedray.cluster.app:build", "args": args}
        document = {"http_options": {"host": "0.0.0.0", "port": 8000}, "applications": [app | application]}
        (self.folder / "serve.yaml").write_text(yaml.safe_dump(document))
        self.deploy_file(self.folder / "serve.yaml")

    def deploy_file(self, path):
        command = [sys.executable, "-m", "ray.serve.scripts", "deploy", str(path), "--address", "http://127.0.0.1:8265"]
        self.host.run(*command, env=TOKEN, timeout=120)

    def application(self, name="pagedray"):
        """The application, as Serve's REST interface describes it."""
        headers = {"Authorization": f"Bearer {TOKEN['RAY_AUTH_TOKEN']}"}
        answer = httpx.get(f"http://{self.host.address}:8265/api/serve/applications/", headers=headers, timeout=30)
        return answer.raise_for_status().json()["applications"][name]

    def wait_for(self, status, seconds=120, why="", name="pagedray"):
        """Until the application has this status and says this, or one of its deployments does."""
        deadline = time.monotonic() + seconds
        while True:
            app = self.application(name)
            said = [app["message"], *(d["message"] for d in app["deployments"].values())]
            if app["status"] == status and any(why in text for text in said):
                return app
            assert time.monotonic() < deadline, app
            time.sleep(0.2)

    def processes(self, *kinds):
        """Process ids of Ray's actors of these kinds, and what they are, whatever method they are at."""
        titles = {pid: re.split(r"[. ]", title)[0] for pid, title in self.host.processes().items()}
        return {pid: t for pid, t in titles.items() if t.startswith(tuple(f"ray::{kind}" for kind in kinds))}

    def complete(self, model, timeout=60, **body):
        wish = {"model": model, "prompt": "abc", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        return httpx.post(f"{self.url}/v1/completions", json=wish | body, timeout=timeout)


class Load:
    """Clients that never stop asking: streams and short answers. Each failure is kept."""

    def __init__(self, cluster, model, clients=3):
        self.cluster, self.model = cluster, model
        self.failures, self.num_done, self._stop = [], 0, threading.Event()
        self.expected = cluster.complete(model, max_tokens=200).json()["choices"][0]["text"]
        self.threads = [threading.Thread(target=self._ask, args=(i,), daemon=True) for i in range(clients)]
        for thread in self.threads:
            thread.start()

    def _ask(self, i):
        wish = {"model": self.model, "prompt": "abc", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
        with httpx.Client(timeout=120) as client:
            while not self._stop.wait(0.05):
                try:
                    text = ""
                    with client.stream(
                        "POST", f"{self.cluster.url}/v1/completions", json=wish | {"stream": True}
                    ) as answer:
                        assert answer.status_code == 200, answer.read()
                        for line in answer.iter_lines():
                            if line.startswith("data: {"):
                                piece = json.loads(line.removeprefix("data: "))
                                assert "error" not in piece, piece
                                text += piece["choices"][0]["text"]
                    assert text == self.expected, f"not what it was: {text!r}"
                    self.num_done += 1
                except Exception as error:
                    self.failures.append(repr(error))

    def stop(self):
        self._stop.set()
        for thread in self.threads:
            thread.join(130)
        return self.failures


def section(model_id, folder, **engine):
    kwargs = {"dtype": "float32", "cpu_threads": 1, "kv_cache_memory": "16MiB", "max_model_len": 256, **engine}
    return {"model_loading_config": {"model_id": model_id, "model_source": folder}, "engine_kwargs": kwargs}


def start_ray(host: Host, *options: str, head: Host | None = None, **env: str) -> None:
    """`ray start`: a head with the dashboard, where Serve's REST interface is, or a node of `head`'s cluster."""
    role = ["--head", "--dashboard-host=0.0.0.0"] if head is None else [f"--address={head.address}:6379"]
    sizes = [f"--object-store-memory={100 * 2**20}", "--disable-usage-stats", f"--node-ip-address={host.address}"]
    host.run(
        sys.executable, "-m", "ray.scripts.scripts", "start", *role, *sizes, *options, env=TOKEN | env, timeout=300
    )
