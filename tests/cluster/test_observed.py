"""A real server, watched: by a real Prometheus, by an OpenTelemetry collector, and through its own log."""

import json
import re
import shutil
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import yaml
from real_server import descendants

from pagedray.cluster.local_server import free_port
from pagedray.cluster.metrics.dashboards import DASHBOARDS, dashboard

pytestmark = pytest.mark.serve

KEYS = {"acme": "sk-acme-key", "other": "sk-other-key", "ops": "sk-ops-key-1"}


class Collector:
    """Takes OTLP over HTTP and keeps the spans: (service, name, trace, span, parent)."""

    def __init__(self):
        self.spans = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                collector.take(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def take(self, body):
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = next(a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
            for scope in resource.scope_spans:
                self.spans += [(service, s.name, s.trace_id, s.span_id, s.parent_span_id) for s in scope.spans]


@pytest.fixture(scope="module")
def collector():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="pagedray[trace] is not installed")
    collector = Collector()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()


@pytest.fixture(scope="module")
def watched(start_server, demo_model, tmp_path_factory, collector):
    """Two ingresses on one port, two groups, keys; everything that can be observed is on."""
    config = {
        "llm_configs": [
            {
                "model_loading_config": {"model_id": "demo", "model_source": str(demo_model)},
                "engine_kwargs": {"max_model_len": 512, "cpu_threads": 1},
                "deployment_config": {"num_replicas": 2},
            }
        ],
        "ingress": {"num_replicas": 2},
        "tenants": [{"name": name, "api_keys": [key], "operator": name == "ops"} for name, key in KEYS.items()],
        "observability": {"vllm_metric_names": True, "json_logs": True, "otlp_traces_endpoint": collector.url},
    }
    path = tmp_path_factory.mktemp("config") / "watched.yaml"
    path.write_text(yaml.safe_dump(config))
    return start_server(str(path))


def complete(server, key, headers=None, **fields):
    # each on a connection of its own: which ingress takes it is up to the kernel
    return httpx.post(
        f"{server.url}/v1/completions",
        json={"model": "demo", "max_tokens": 8, "temperature": 0, "ignore_eos": True} | fields,
        headers={"Authorization": f"Bearer {key}"} | (headers or {}),
        timeout=120,
    )


@pytest.fixture(scope="module")
def asked(watched):
    """What was asked of it: by tenant, prompt tokens and generated ones."""
    usage = {name: [0, 0, 0] for name in KEYS}
    for i in range(12):
        name = ["acme", "other"][i % 3 == 2]
        answer = complete(watched, KEYS[name], prompt=f"Story number {i} begins:")
        assert answer.status_code == 200, answer.text
        used = answer.json()["usage"]
        usage[name][0] += 1
        usage[name][1] += used["prompt_tokens"]
        usage[name][2] += used["completion_tokens"]
    assert complete(watched, KEYS["acme"], prompt="x " * 600).status_code == 400
    assert complete(watched, "sk-nobody", prompt="x").status_code == 401
    return usage


class Prometheus:
    def __init__(self, folder, config):
        self.url = f"http://127.0.0.1:{free_port('127.0.0.1', 0)}"
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.log = folder / "log"
        self.process = subprocess.Popen(
            [
                shutil.which("prometheus"),
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address={self.url.removeprefix('http://')}",
            ],
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
        )

    def get(self, path, **params):
        return httpx.get(f"{self.url}/api/v1/{path}", params=params, timeout=30)

    def query(self, expression):
        """(labels, value) of each series."""
        answer = self.get("query", query=expression)
        assert answer.status_code == 200, f"{expression}: {answer.text}"
        return [(r["metric"], float(r["value"][1])) for r in answer.json()["data"]["result"]]

    def wait(self, expression, value, seconds=60.0):
        """Until the one value of the expression is this one."""
        deadline, seen = time.monotonic() + seconds, None
        while time.monotonic() < deadline:
            try:
                if (seen := [v for _, v in self.query(expression)]) == [value]:
                    return
            except httpx.TransportError as error:
                assert self.process.poll() is None, self.log.read_text()
                seen = error
            time.sleep(0.3)
        raise AssertionError(f"{expression} is {seen}, not {value}, after {seconds} s")


@pytest.fixture(scope="module")
def prometheus(watched, tmp_path_factory):
    """It reads the application twice: whole, and each process apart, as the service discovery lists them."""
    if shutil.which("prometheus") is None:
        pytest.skip("no prometheus: apt-get install prometheus")
    address = watched.url.removeprefix("http://")
    server = Prometheus(
        tmp_path_factory.mktemp("prometheus"),
        {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
            "scrape_configs": [
                {"job_name": "whole", "static_configs": [{"targets": [address]}]},
                {
                    "job_name": "apart",
                    "http_sd_configs": [{"url": f"{watched.url}/metrics/targets", "refresh_interval": "1s"}],
                },
            ],
        },
    )
    yield server
    server.process.terminate()
    server.process.wait(timeout=30)


@pytest.mark.parametrize("job", ["whole", "apart"])
def test_prometheus_has_the_right_totals_whichever_ingress_it_asks(job, prometheus, asked):
    for tenant, (requests, prompt, generated) in asked.items():
        if not requests:
            continue
        of = f'{{job="{job}", tenant="{tenant}"'
        prometheus.wait(f'sum(pagedray_request_success_total{of}, finished_reason="length"}})', requests)
        prometheus.wait(f"sum(pagedray_generation_tokens_total{of}}})", generated)
        prometheus.wait(f"sum(pagedray_prompt_tokens_total{of}}})", prompt)
        prometheus.wait(f"sum(pagedray_time_to_first_token_seconds_count{of}}})", requests)
        prometheus.wait(f"sum(pagedray_request_queue_time_seconds_count{of}}})", requests)
        prometheus.wait(f'sum(pagedray_tenant_service_tokens_total{of}, kind="generated"}})', generated)
    total = sum(requests for requests, *_ in asked.values())
    prometheus.wait(f'sum(pagedray_request_prefill_time_seconds_count{{job="{job}"}})', total)
    for status in (400, 401):
        prometheus.wait(f'sum(pagedray_http_requests_total{{job="{job}", status="{status}"}})', 1)
    prometheus.wait(f'count(pagedray_kv_cache_usage_perc{{job="{job}"}})', 2)
    prometheus.wait(f'max(pagedray_worker_groups{{job="{job}"}})', 2)
    prometheus.wait(f'sum(pagedray_http_requests_total{{job="{job}", route="/v1/completions", status="200"}})', total)


def test_prometheus_finds_every_process(prometheus, watched, asked):
    listed = httpx.get(f"{watched.url}/metrics/targets", timeout=30).json()
    kinds = sorted(target["labels"]["process"] for target in listed)
    assert kinds.count("ingress") == 2 and kinds.count("group") == 2 and kinds.count("scheduler") == 1
    prometheus.wait('count(up{job="apart"} == 1)', len(listed))
    assert {labels["instance"] for labels, _ in prometheus.query('up{job="apart"}')} == {
        target["labels"]["instance"] for target in listed
    }
    # Nothing was renamed because a target and a series have a label of the same name.
    assert not [labels for labels, _ in prometheus.query('{job="apart"}') if any("exported" in k for k in labels)]


def test_nothing_ever_went_back(prometheus, asked):
    """Whichever ingress answers: a counter that falls would be taken for a restart, and counted twice."""
    time.sleep(5.0)  # of scrapes
    for name in ("pagedray_generation_tokens_total", "pagedray_http_requests_total", "pagedray_engine_steps_total"):
        found = prometheus.query(f"resets({name}[5m])")
        assert found and all(value == 0 for _, value in found), name


def test_vllm_names_say_the_same(prometheus, asked):
    prompt = sum(prompt for _, prompt, _ in asked.values())
    prometheus.wait('sum(vllm:prompt_tokens_total{job="whole"})', prompt)
    prometheus.wait('count(vllm:num_requests_waiting{job="whole", model_name="demo"})', 1)
    prometheus.wait('vllm:num_requests_running{job="whole"}', 0)
    prometheus.wait("count(vllm:gpu_cache_usage_perc == vllm:kv_cache_usage_perc)", 1)


def test_every_curve_of_every_dashboard_can_be_asked(prometheus, asked):
    found = {}
    for name in DASHBOARDS:
        for panel in dashboard(name)["panels"]:
            for target in panel["targets"]:
                expression = target["expr"].replace("$__rate_interval", "1m")
                expression = re.sub(r"\$(model_name|tenant)", ".*", expression)
                found[panel["title"]] = prometheus.query(expression)
    for title in ("Tokens", "Time to first token", "A step", "KV blocks in use", "Fair queue's counter"):
        assert found[title], f"{title} shows nothing"


def test_a_trace_runs_through_ingress_scheduler_and_group(watched, collector):
    trace = "0af7651916cd43dd8448eb211c80319c"
    header = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    assert complete(watched, KEYS["acme"], prompt="Once", headers=header).status_code == 200
    expected = {
        ("pagedray-ingress", "POST"),
        ("pagedray-ingress", "generate"),
        ("pagedray-scheduler", "schedule"),
        ("pagedray-group", "prefill"),
        ("pagedray-group", "decode"),
    }
    deadline = time.monotonic() + 30
    spans = []
    while {(service, name) for service, name, *_ in spans} != expected:
        assert time.monotonic() < deadline, f"these spans came: {spans}"
        time.sleep(0.1)
        spans = [span for span in collector.spans if span[2].hex() == trace]
    ids = {name: (span, parent) for _, name, _, span, parent in spans}
    assert ids["POST"][1].hex() == "b7ad6b7169203331"
    assert ids["generate"][1] == ids["POST"][0]
    assert {ids[name][1] for name in ("schedule", "prefill", "decode")} == {ids["generate"][0]}


def test_the_log_says_whose_each_request_was_and_not_what_it_said(watched, asked):
    secret = "Zanzibar marmalade"
    assert complete(watched, KEYS["other"], prompt=secret).status_code == 200
    titles = " ".join(descendants(watched.process.pid).values())
    folder = Path(re.search(r"(/tmp/pagedray-\w+)", titles)[1], "session_latest", "logs")
    deadline = time.monotonic() + 20
    while True:
        text = "".join(path.read_text(errors="replace") for path in folder.glob("worker-*.err"))
        lines = [json.loads(line) for line in text.splitlines() if line.startswith('{"time"')]
        ended = [line for line in lines if line["message"] == "request ended"]
        if len({line["request_id"] for line in ended}) >= sum(n for n, *_ in asked.values()) + 1:
            break
        assert time.monotonic() < deadline, f"{len(ended)} requests were logged"
        time.sleep(0.2)
    assert {line["tenant"] for line in ended} >= {"acme", "other"}
    assert all(line["outcome"] in ("length", "stop") or line["level"] == "warning" for line in ended)
    for hidden in (secret, *KEYS.values()):
        assert hidden not in text
