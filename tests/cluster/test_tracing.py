"""Traces: one request is one tree over three processes, and nothing is made where nobody asked."""

import asyncio
import io
import json
import logging

import pytest

from pagedray.cluster import tracing
from pagedray.cluster.config import ApplicationConfig, ObservabilityOptions
from pagedray.cluster.json_log import log_as_json
from pagedray.cluster.metrics.group import GroupClock
from pagedray.cluster.metrics.http import HttpWatch
from pagedray.cluster.metrics.requests import RequestMetrics
from pagedray.scheduler.errors import ConfigError, EngineDead
from pagedray.scheduler.request import Request, SamplingParams, SequenceOutput

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = f"00-{TRACE}-00f067aa0ba902b7-01"


def exporting(process, **options):
    """Tracing that keeps its spans here, and a function that ends it and gives them."""
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    made = tracing.make_tracing(process, ObservabilityOptions(**options), exporter)

    def spans():
        made.provider.force_flush()
        return {span.name: span for span in exporter.get_finished_spans()}

    return made, spans


def sampled(request):
    return SequenceOutput(request.request_id, (1,), finish_reason="stop")


def test_a_request_is_one_tree_over_three_processes():
    ingress, spans = exporting("ingress")
    metrics = RequestMetrics(ingress)
    group, group_spans = exporting("group")
    clock = GroupClock("g0", group)

    async def handle(scope, receive, send):
        watch = metrics.watch(Request("r1", (1, 2, 3), SamplingParams(seed=0), "m", tenant="acme"))
        clock.received([watch.request])
        output = sampled(watch.request)
        clock.stepped(0.0, [output], 3)
        watch.output(output)
        watch.end()
        clock.ended("r1")
        await send({"type": "http.response.start", "status": 200})

    async def send(message):
        pass

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [(b"traceparent", CALLER.encode())],
    }
    asyncio.run(HttpWatch(handle, metrics, ingress)(scope, None, send))
    ours, theirs = spans(), group_spans()
    assert set(ours) == {"POST", "generate"} and set(theirs) == {"prefill", "decode"}
    everything = {**ours, **theirs}
    assert {f"{span.context.trace_id:032x}" for span in everything.values()} == {TRACE}
    assert ours["generate"].parent.span_id == ours["POST"].context.span_id
    for name in ("prefill", "decode"):
        assert theirs[name].parent.span_id == ours["generate"].context.span_id
        assert theirs[name].start_time <= theirs[name].end_time
    attributes = ours["generate"].attributes
    assert attributes["pagedray.tenant"] == "acme" and attributes["gen_ai.usage.output_tokens"] == 1
    assert ours["POST"].attributes["http.response.status_code"] == 200


def test_a_failure_marks_its_span():
    made, spans = exporting("ingress")
    watch = RequestMetrics(made).watch(Request("r1", (1,), SamplingParams(seed=0), "m"))
    watch.failed(EngineDead("gone"))
    watch.end()
    assert spans()["generate"].status.description == "engine_dead"


def test_what_is_not_sampled_is_nobodys_work():
    made, spans = exporting("ingress", trace_sample_ratio=0.0)
    watch = RequestMetrics(made).watch(Request("r1", (1,), SamplingParams(seed=0), "m"))
    watch.end()
    assert watch.request.traceparent == "" and not spans()


def test_off_it_imports_nothing_and_changes_no_request():
    import subprocess
    import sys

    code = (
        "import sys\nfrom pagedray.cluster.tracing import make_tracing\nfrom pagedray.cluster.config import *\n"
        "span = make_tracing('ingress', ObservabilityOptions()).start('x', '', {})\nspan.set({}); span.end()\n"
        "print(repr(span.traceparent), 'opentelemetry' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["''", "False"]


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"otlp_traces_endpoint": "collector:4318"}, "must be a URL"),
        ({"trace_sample_ratio": 2.0}, "observability.trace_sample_ratio"),
        ({"json_log": True}, "json_logs"),
    ],
)
def test_bad_settings_are_refused(section, says):
    with pytest.raises(ConfigError, match=says):
        ApplicationConfig.parse({"llm_configs": [_model()], "observability": section})


def test_settings_are_read():
    section = {"vllm_metric_names": True, "json_logs": True, "otlp_traces_endpoint": "http://c:4318/v1/traces"}
    config = ApplicationConfig.parse({"llm_configs": [_model()], "observability": section})
    assert config.observability == ObservabilityOptions(**section)


def _model():
    return {"model_loading_config": {"model_id": "m", "model_source": "org/m"}}


def test_logs_are_json_lines_whatever_a_client_sends():
    stream = io.StringIO()
    before = logging.getLogger("pagedray").level, logging.getLogger("pagedray").propagate
    handler = log_as_json("ingress 1", stream)
    try:
        evil = 'x\r\n{"level": "fake"}\u2028\x00'
        prompt = (987654321, 987654322)
        watch = RequestMetrics().watch(Request(evil, prompt, SamplingParams(seed=0), evil, tenant=evil))
        watch.output(sampled(watch.request))
        watch.end()
        watch = RequestMetrics().watch(Request("r2", prompt, SamplingParams(seed=0), "m", tenant="acme"))
        watch.failed(EngineDead("gone"))
        watch.end()
        try:
            raise ValueError(evil)
        except ValueError:
            logging.getLogger("pagedray.cluster.x").exception("it %s", evil)
    finally:
        logger = logging.getLogger("pagedray")
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len(lines) == stream.getvalue().count("\n") == 3
    first, second, third = lines
    assert (first["request_id"], first["tenant"], first["outcome"], first["level"]) == (evil, evil, "stop", "info")
    assert (second["outcome"], second["level"], second["tenant"]) == ("engine_dead", "warning", "acme")
    assert third["process"] == "ingress 1" and "ValueError" in third["exception"]
    assert "98765432" not in stream.getvalue()  # a token of the prompt
