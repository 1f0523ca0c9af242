"""Metrics: totals are right over any number of processes, and what is shown is what the catalog says."""

import asyncio
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from pagedray.cluster.global_scheduler import ClusterStats, FetchStats, GroupStatus, SchedulerReport, StoreStats
from pagedray.cluster.metrics import exposition
from pagedray.cluster.metrics.catalog import FAMILIES, PROCESS_LABELS, markdown_table
from pagedray.cluster.metrics.group import GroupClock
from pagedray.cluster.metrics.http import HttpWatch, add_metric_routes
from pagedray.cluster.metrics.reports import IngressReport
from pagedray.cluster.metrics.requests import RequestMetrics
from pagedray.cluster.sharded_client import merged
from pagedray.cluster.tracing import OFF
from pagedray.scheduler.dispatcher import QUEUE_BOUNDS, TenantStats
from pagedray.scheduler.errors import EngineDead, RateLimited
from pagedray.scheduler.histogram import Histogram, HistogramCounts
from pagedray.scheduler.request import Request, SamplingParams, SequenceOutput
from pagedray.scheduler.step import SchedulerStats

DOCS = Path(__file__).parents[2] / "docs"


def parsed(text):
    """Samples by name: (labels, value)."""
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def total(found, name, **labels):
    return sum(value for own, value in found.get(name, []) if labels.items() <= own.items())


def request(number=0, model="m", tenant="acme", tokens=5, **fields):
    return Request(f"r{number}", tuple(range(tokens)), SamplingParams(seed=0), model, tenant=tenant, **fields)


def group(name, model, rng):
    stats = SchedulerStats(
        *(rng.randint(0, 9) for _ in range(2)),
        100,
        rng.randint(0, 100),
        *(rng.randint(5, 9) for _ in range(4)),
        1,
        2,
        3,
    )
    clock = GroupClock(name, OFF)
    clock.received([request()])
    clock.stepped(0.0, [SequenceOutput("r0", (1,))], rng.randint(1, 50))
    return GroupStatus(name, model, 64, stats, 16, rng.randint(0, 50), nodes=("node0",), times=clock.times())


def cluster_of(seed, num_ingresses=2, num_groups=3):
    """A cluster, and what its ingresses have seen, by kind, model and tenant."""
    rng = random.Random(seed)
    truth, reports = Counter(), []
    for i in range(num_ingresses):
        metrics = RequestMetrics()
        for number in range(rng.randint(0, 20)):
            wish = request(number, rng.choice("mn"), rng.choice(["acme", "other"]), rng.randint(1, 9))
            watch = metrics.watch(wish)
            key = wish.model, wish.tenant
            truth[("prompt", *key)] += len(wish.prompt_token_ids)
            if rng.random() < 0.2:
                watch.failed(rng.choice([RateLimited("slow down"), EngineDead("gone")]))
                truth[("failed", *key)] += 1
            else:
                count = rng.randint(1, 6)
                for token in range(count):
                    reason = "stop" if token == count - 1 else None
                    watch.output(SequenceOutput(wish.request_id, (1,), finish_reason=reason, num_cached_tokens=1))
                truth[("generated", *key)] += count
                truth[("success", *key)] += 1
            watch.end()
        reports.append(IngressReport(f"i{i}", "node0", metrics.counts()))
    groups = tuple(group(f"g{i}", rng.choice("mn"), rng) for i in range(num_groups))
    queue = Histogram(QUEUE_BOUNDS)
    queue.observe(0.02)
    tenants = tuple(
        TenantStats(model, tenant, 1, 2, 3.0, 4, 5, 6, queue.so_far()) for model in "mn" for tenant in ("acme", "other")
    )
    cluster = ClusterStats(
        {"m": 2, "n": 2},
        groups,
        (("node0", StoreStats(100, 10, 1, 2, 3, 4, 5, 6)),),
        (FetchStats("m", "g0", "node", "ok", 1, 2, 3, 0.5, 0.25),) if groups else (),
        (SchedulerReport("s0", tenants, (("m", "silent", 1),), (("m", 1, 2),)),),
        tuple(reports),
    )
    return cluster, truth


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.integers(0, 4), st.integers(0, 4))
def test_totals_are_those_of_all_ingresses_and_no_series_stands_twice(seed, num_ingresses, num_groups):
    cluster, truth = cluster_of(seed, num_ingresses, num_groups)
    found = parsed(exposition.render(cluster))
    for name, series in found.items():
        assert len({frozenset(labels.items()) for labels, _ in series}) == len(series), f"{name} has a series twice"
    names = {
        "prompt": "prompt_tokens_total",
        "generated": "generation_tokens_total",
        "failed": "request_failed_total",
        "success": "request_success_total",
    }
    for kind, name in names.items():
        for model in "mn":
            for tenant in ("acme", "other"):
                assert total(found, f"pagedray_{name}", model_name=model, tenant=tenant) == truth[kind, model, tenant]
    assert total(found, "pagedray_num_requests_in_flight") == 0
    assert total(found, "pagedray_num_requests_running") == sum(g.stats.num_running for g in cluster.groups)
    # What a client waited for is there once for each sequence that got a token.
    assert total(found, "pagedray_time_to_first_token_seconds_count") == sum(
        count for (kind, *_), count in truth.items() if kind == "success"
    )


def test_each_process_shows_its_own_and_together_they_are_the_whole():
    cluster, _ = cluster_of(1)
    whole = parsed(exposition.render(cluster))
    parts = [parsed(exposition.render(cluster, process=process)) for process in exposition.processes(cluster)]
    assert len(parts) == 2 + 1 + 3 + 1
    together = {}
    for part in parts:
        for name, series in part.items():
            together.setdefault(name, []).extend(series)

    def in_order(found):
        return {name: sorted(series, key=str) for name, series in found.items()}

    assert in_order(together) == in_order(whole)


def test_every_metric_of_the_catalog_can_be_seen_and_carries_its_process():
    cluster, _ = cluster_of(2)
    metrics = RequestMetrics()
    metrics.add("request_resumed", "m")
    metrics.add("request_moved", "m")
    metrics.add("http_requests", "/v1/models", "GET", "200")
    metrics.add("request_failed", "m", "acme", "engine_dead")
    cluster = replace(cluster, ingresses=(*cluster.ingresses, IngressReport("i9", "node0", metrics.counts())))
    found = parsed(exposition.render(cluster))
    for family in FAMILIES.values():
        name = family.exposed + ("_count" if family.kind == "histogram" else "")
        assert found.get(name), name
        assert all(set(family.all_labels) == set(labels) for labels, _ in found[name]), name
    assert set(PROCESS_LABELS) == {family.process for family in FAMILIES.values()}


def test_what_several_schedulers_know_alike_is_counted_once():
    cluster, _ = cluster_of(7)
    second = replace(cluster.schedulers[0], scheduler="s1")
    both = merged([cluster, replace(cluster, schedulers=(second,), ingresses=())])
    one, two = parsed(exposition.render(cluster)), parsed(exposition.render(both))
    for name in ("worker_groups", "worker_groups_lost_total", "prefix_index_blocks", "num_requests_running"):
        assert total(one, f"pagedray_{name}") == total(two, f"pagedray_{name}") > 0, name
    for name in ("num_requests_queued", "request_queue_time_seconds_count", "kv_fetch_decisions_total"):
        assert 2 * total(one, f"pagedray_{name}") == total(two, f"pagedray_{name}") > 0, name  # each has its own
    assert total(one, "pagedray_prompt_tokens_total") == total(two, "pagedray_prompt_tokens_total")


def test_tiers_of_the_cache_add_up():
    cluster, _ = cluster_of(3)
    found = parsed(exposition.render(cluster))
    assert total(found, "pagedray_prefix_cache_tier_hits_total") == total(found, "pagedray_prefix_cache_hits_total")
    assert total(found, "pagedray_prefix_cache_tier_hits_total", tier="node", group="g0") == 2


def test_vllm_names_are_there_when_asked_for():
    cluster, truth = cluster_of(4)
    assert b"vllm:" not in exposition.render(cluster)
    found = parsed(exposition.render(cluster, vllm_names=True))
    # What the gateway API's endpoint picker and vLLM's own dashboard read.
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "gpu_cache_usage_perc",
        "cache_config_info",
        "time_to_first_token_seconds_bucket",
        "time_per_output_token_seconds_sum",
        "e2e_request_latency_seconds_count",
        "request_queue_time_seconds_count",
        "request_prefill_time_seconds_count",
        "request_decode_time_seconds_count",
        "prompt_tokens_total",
        "generation_tokens_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "request_success_total",
        "request_prompt_tokens_bucket",
        "request_generation_tokens_bucket",
        "iteration_tokens_total_bucket",
    ):
        assert f"vllm:{name}" in found, name
    for name, series in found.items():
        assert len({frozenset(labels.items()) for labels, _ in series}) == len(series), f"{name} has a series twice"
        if name.startswith("vllm:"):
            assert all({"model_name", "engine"} <= labels.keys() for labels, _ in series)
            assert all("tenant" not in labels for labels, _ in series)
    # A gauge is one series a model; who waits in the global scheduler waits.
    models = {g.model for g in cluster.groups}
    assert len(found["vllm:num_requests_running"]) == len(models)
    for model in models:
        waiting = sum(g.stats.num_waiting for g in cluster.groups if g.model == model)
        assert total(found, "vllm:num_requests_waiting", model_name=model) == waiting + 2
        assert 0 <= total(found, "vllm:gpu_cache_usage_perc", model_name=model) <= 1
    prompt = sum(count for (kind, *_), count in truth.items() if kind == "prompt")
    assert total(found, "vllm:prompt_tokens_total") == total(found, "pagedray_prompt_tokens_total") == prompt


def test_the_table_in_the_docs_is_the_catalog():
    text = (DOCS / "observability.md").read_text()
    assert markdown_table() in text, "python -m pagedray.cluster.metrics.catalog prints the table for the docs"


@settings(deadline=None)
@given(st.lists(st.floats(0, 300), max_size=30), st.lists(st.floats(0, 300), max_size=30))
def test_a_histogram_counts_each_value_once_at_or_below_its_bound(some, more):
    bounds = (0.5, 1.0, 20.0)

    def counted(values):
        histogram = Histogram(bounds)
        for value in values:
            histogram.observe(value)
        return histogram.so_far()

    both = counted(some).plus(counted(more))
    for i, bound in enumerate(bounds):
        assert sum(both.counts[: i + 1]) == sum(v <= bound for v in some + more)
    assert sum(both.counts) == len(some + more)
    assert both.total == pytest.approx(sum(some + more))
    assert isinstance(both, HistogramCounts)


def test_a_group_times_requests_and_forgets_those_that_end():
    clock = GroupClock("g", OFF)
    clock.received([request(1), request(2)])
    clock.stepped(0.0, [], 100)  # a chunk of a prompt
    clock.stepped(0.0, [SequenceOutput("r1", (7,))], 110)
    clock.stepped(0.0, [SequenceOutput("r1", (7,), finish_reason="stop")], 111)
    clock.stepped(0.0, [], 111)  # nothing was computed
    times = clock.times()
    assert sum(times.step_seconds.counts) == 3 and times.step_tokens.total == 111
    assert sum(times.prefill_seconds.counts) == sum(times.decode_seconds.counts) == 1
    assert [clock.ended(request_id) for request_id in ("r1", "r2", "r2")] == [2, 0, 0]
    assert not clock._underway


# -- over HTTP ---------------------------------------------------------------------------------------------------------


def served(metrics, cluster):
    app = FastAPI()

    @app.get("/v1/models/{model:path}")
    async def model(model: str):
        return {}

    async def current():
        return cluster

    add_metric_routes(app, current)
    app.add_middleware(HttpWatch, metrics=metrics, tracing=OFF)

    def ask(method, path):
        async def main():
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://10.0.0.7:8000") as client:
                return await client.request(method, path)

        return asyncio.run(main())

    return ask


def test_http_requests_are_counted_by_route_and_labels_are_bounded():
    metrics = RequestMetrics()
    ask = served(metrics, cluster_of(5)[0])
    for i in range(20):
        ask("GET", f"/v1/models/{i}")
        ask("GET", f"/nowhere/{i}")
        ask(f"VERB{i}", "/v1/models/x")
    seen = {labels: value for name, labels, value in metrics.counts() if name == "http_requests"}
    assert seen[("/v1/models/{model:path}", "GET", "200")] == 20
    assert sum(seen.values()) == 60 and len(seen) <= 4


def test_service_discovery_lists_every_process_and_each_answers():
    cluster, _ = cluster_of(6)
    ask = served(RequestMetrics(), cluster)
    found = ask("GET", "/metrics/targets").json()
    assert {t["targets"][0] for t in found} == {"10.0.0.7:8000"}
    assert len({t["labels"]["instance"] for t in found}) == len(found) == len(exposition.processes(cluster))
    for target in found:
        answer = ask("GET", target["labels"]["__metrics_path__"])
        assert answer.status_code == 200 and parsed(answer.content)
        # Prometheus would rename a series' label that its target has, too.
        assert not {label for f in FAMILIES.values() for label in f.all_labels} & target["labels"].keys()
    assert ask("GET", "/metrics/group/none").status_code >= 400
