"""A prefix that one group has computed is not computed by another, on real servers, even when the first one is gone."""

import json
import os
import signal
import threading
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from waiting import wait_until

pytestmark = pytest.mark.serve

PROMPT = [(i * 7919) % 40000 + 10 for i in range(1024)]
LONG_TESTS = pytest.mark.skipif(
    not os.environ.get("PAGEDRAY_LONG_TESTS"), reason="takes minutes: set PAGEDRAY_LONG_TESTS=1"
)


def write_config(folder, model, **settings):
    """Two groups, each on the CPU of one node, that take one request at a time. They fetch what there is, whatever this
    machine is busy with: which of the two is faster is another test's subject."""
    transfer = {"kv_connector_extra_config": {"fetch_weight": 0.0}}
    engine = {"max_model_len": 2048, "max_num_seqs": 1, "cpu_threads": 1, "kv_transfer_config": transfer, **settings}
    config = {
        "model_loading_config": {"model_id": "demo", "model_source": str(model)},
        "engine_kwargs": engine,
        "deployment_config": {"num_replicas": 2},
    }
    (folder / "config.yaml").write_text(json.dumps({"llm_configs": [config]}))
    return folder / "config.yaml"


def ask(url, prompt=PROMPT, max_tokens=8, seconds=120.0):
    """(text, cached tokens)"""
    body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=seconds).raise_for_status().json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def metric(url, name, **labels):
    """The sum of a metric over the labels that are not given."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=30).text)
    samples = [s for family in families for s in family.samples if s.name == f"pagedray_{name}"]
    return sum(s.value for s in samples if labels.items() <= s.labels.items())


def groups(url):
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=30).text)
    return {s.labels["group"] for f in families for s in f.samples if s.name == "pagedray_num_requests_running"}


def published(url, tokens):
    """Blocks of the demo model in bf16 take 23,040 bytes a token."""
    return metric(url, "kv_store_bytes") >= 23040 * tokens


class Busy:
    """A request that keeps the group that has the prefix busy, so that the next one goes to the other."""

    def __init__(self, url):
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(url,))
        self.thread.start()
        wait_until(lambda: metric(url, "num_requests_running") == 1, 30)
        time.sleep(1.0)  # and the scheduler has been told

    def _run(self, url):
        body = {"model": "demo", "prompt": PROMPT, "max_tokens": 1000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
            for _ in answer.iter_lines():
                if self.over.is_set():
                    return

    def end(self):
        self.over.set()
        self.thread.join()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"tensor_parallel_size": 2}, marks=[LONG_TESTS, pytest.mark.timeout(600)]),
        pytest.param({"pipeline_parallel_size": 2}, marks=[LONG_TESTS, pytest.mark.timeout(600)]),
    ],
    ids=str,
)
def test_two_groups_of_a_node_share_what_one_has_computed(settings, start_server, demo_model, tmp_path):
    server = start_server(str(write_config(tmp_path, demo_model, **settings)), timeout=500)
    cold, cached = ask(server.url)
    assert cached == 0
    wait_until(lambda: published(server.url, 1024), 30)
    busy = Busy(server.url)
    text, cached = ask(server.url)
    assert (text, cached >= 1008) == (cold, True)
    wait_until(lambda: metric(server.url, "kv_fetches_total", source="node", outcome="ok") == 1, 10)
    assert metric(server.url, "kv_fetch_decisions_total", decision="fetch") == 1
    # both have it now, nothing else is fetched, and nothing is held that should not be
    assert ask(server.url) == (cold, cached)
    assert metric(server.url, "kv_fetches_total") == 1
    busy.end()
    server.wait_idle(10)


@pytest.fixture
def two_hosts(start_hosts, demo_model, tmp_path):
    """Two hosts, a group on each, all else on the first; and the URL of the server."""
    with start_hosts(2, shm_bytes=2**30) as network:
        first, second = network.hosts
        # Processes of different hosts hash strings differently: nothing that crosses may depend on it.
        first.start_ray(num_cpus=1, env={"PYTHONHASHSEED": "1"})
        config = write_config(tmp_path, demo_model)
        process = first.serve(config, tmp_path / "log")
        wait_until(lambda: actors(first, "GlobalScheduler") and actors(first, "Ingress"), 300)
        second.start_ray(first, num_cpus=1, env={"PYTHONHASHSEED": "2"})
        wait_until(lambda: "ready" in (tmp_path / "log").read_text() or process.poll() is not None, 400)
        assert process.poll() is None, (tmp_path / "log").read_text()
        url = f"http://{first.address}:8000"
        wait_until(lambda: len(groups(url)) == 2, 60)
        yield network, url
        process.kill()


def actors(host, name):
    """Process ids of the actors of a class, whichever of its methods they run."""
    return [
        pid
        for pid, title in host.processes().items()
        if title.startswith(("ray::" + name, "ray::ServeReplica:")) and name in title
    ]


def node_ids(network):
    """By the address of the host."""
    source = "import json, ray; ray.init('auto', logging_level='ERROR'); print('nodes:', json.dumps(ray.nodes()))"
    lines = network.hosts[0].python(source).splitlines()
    nodes = json.loads(next(line for line in lines if line.startswith("nodes:")).removeprefix("nodes:"))
    return {node["NodeManagerAddress"]: node["NodeID"] for node in nodes}


@LONG_TESTS
@pytest.mark.timeout(900)
def test_over_two_hosts_and_when_who_computed_it_is_killed_and_when_its_host_is_gone(two_hosts):
    network, url = two_hosts
    first, second = network.hosts
    assert [len(actors(host, "Leader")) for host in network.hosts] == [1, 1]
    names = node_ids(network)
    stored = lambda host: metric(url, "kv_store_bytes", node=names[host.address])  # noqa: E731
    cold, cached = ask(url)
    assert cached == 0
    wait_until(lambda: published(url, 1024), 30)
    busy = Busy(url)
    text, cached = ask(url)
    assert (text, cached >= 1008) == (cold, True)
    wait_until(lambda: metric(url, "kv_fetches_total", source="network", outcome="ok") == 1, 10)
    busy.end()

    # The worker that computes another prefix is killed: the other one has it all the same.
    other = [token + 1 for token in PROMPT]
    before = {host: stored(host) for host in network.hosts}
    cold, cached = ask(url, other)
    assert cached == 0
    wait_until(lambda: any(stored(host) >= before[host] + 23040 * 1024 for host in network.hosts), 30)
    owner = next(host for host in network.hosts if stored(host) >= before[host] + 23040 * 1024)
    known = groups(url)
    (leader,) = actors(owner, "Leader")
    os.kill(leader, signal.SIGKILL)
    wait_until(lambda: len(groups(url)) == 1, 30)
    assert metric(url, "kv_fetch_decisions_total", decision="fetch") == 1
    text, cached = ask(url, other)
    assert (text, cached >= 1008) == (cold, True)
    assert metric(url, "kv_fetch_decisions_total", decision="fetch") == 2
    wait_until(lambda: len(groups(url)) == 2 and groups(url) != known, 180)

    # A prefix that only the second host has, which is then gone without a word: it is computed, soon enough.
    busy = Busy(url) if owner is second else None
    last = [token + 2 for token in PROMPT]
    before = stored(second)
    for _ in range(4):  # until the second one has computed something that the first has not
        cold, cached = ask(url, last)
        time.sleep(2.0)
        if stored(second) > before:
            break
        last = [token + 1 for token in last]
    else:
        pytest.fail("nothing was computed on the second host")
    if busy:
        busy.end()
    second.kill()
    began = time.monotonic()
    text, cached = ask(url, last)
    print(f"without the host: {time.monotonic() - began:.1f} s")
    assert text == cold and time.monotonic() - began < 30
