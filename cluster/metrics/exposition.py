"""From what the processes have told the global scheduler to what `/metrics` shows."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from ...scheduler.histogram import HistogramCounts
from ..global_scheduler import ClusterStats
from .catalog import FAMILIES, PREFIX

Value = float | HistogramCounts


@dataclass(frozen=True, slots=True)
class Sample:
    """One series' value. `labels` are those that the catalog names beside the process's own."""

    name: str
    process: str  # the id of whoever counted it
    labels: tuple[str, ...]
    value: Value


def render(cluster: ClusterStats, vllm_names: bool = False, process: tuple[str, str] | None = None) -> bytes:
    """Prometheus's text format: the whole application, or only what the `process` (kind, id) counts.

    With `vllm_names` vLLM's metrics, too; never those of one process.
    """
    found = [s for s in samples(cluster) if process in (None, (FAMILIES[s.name].process, s.process))]
    registry = CollectorRegistry()
    registry.register(_Collected(_native(found, process[0] if process else None)))
    if vllm_names and process is None:
        registry.register(_Collected(_as_vllm(found, cluster)))
    return generate_latest(registry)


def processes(cluster: ClusterStats) -> list[tuple[str, str]]:
    """Kind and id of every process that counts something."""
    found = [("ingress", ingress.ingress_id) for ingress in cluster.ingresses]
    found += [("scheduler", part.scheduler) for part in cluster.schedulers]
    found += [("group", group.group_id) for group in cluster.groups]
    return found + [("store", node) for node, _ in cluster.stores]


class _Collected:
    """What a registry asks for."""

    def __init__(self, metrics: Iterable[Metric]):
        self.metrics = list(metrics)

    def collect(self) -> list[Metric]:
        return self.metrics


# -- what there is -----------------------------------------------------------------------------------------------------


def samples(cluster: ClusterStats) -> Iterator[Sample]:
    """Every series of every process."""
    for ingress in cluster.ingresses:
        for name, labels, value in ingress.counts:
            if name in FAMILIES:  # of another version, while ingresses are being replaced
                yield Sample(name, ingress.ingress_id, labels, value)
    yield from _of_schedulers(cluster)
    yield from _of_groups(cluster)
    for node, store in cluster.stores:
        yield Sample("kv_store_bytes", node, (), store.num_bytes)
        yield Sample("kv_store_budget_bytes", node, (), store.budget)
        yield Sample("kv_store_runs", node, (), store.num_runs)
        for name in ("published", "refused", "failed", "evicted", "reads"):
            yield Sample(f"kv_store_{name}", node, (), getattr(store, f"num_{name}"))


def _of_schedulers(cluster: ClusterStats) -> Iterator[Sample]:
    for part in cluster.schedulers:
        me = part.scheduler
        for t in part.tenants:
            by = (t.model, t.tenant)
            yield Sample("num_requests_queued", me, by, t.num_queued)
            yield Sample("num_requests_placed", me, by, t.num_placed)
            yield Sample("request_queue_time_seconds", me, by, t.queue_seconds)
            yield Sample("tenant_virtual_counter", me, by, t.counter)
            for kind in ("computed", "cached", "generated"):
                yield Sample("tenant_service_tokens", me, (*by, kind), getattr(t, f"{kind}_tokens"))
        for model, reason, count in part.groups_lost:
            yield Sample("worker_groups_lost", me, (model, reason), count)
        for model, fetched, computed in part.fetch_decisions:
            yield Sample("kv_fetch_decisions", me, (model, "fetch"), fetched)
            yield Sample("kv_fetch_decisions", me, (model, "recompute"), computed)
    if cluster.schedulers:
        me = cluster.schedulers[0].scheduler  # all of them know the same groups: one counts them
        for model, count in Counter(g.model for g in cluster.groups).items():
            yield Sample("worker_groups", me, (model,), count)
        for g in cluster.groups:
            yield Sample("prefix_index_blocks", me, (g.model, g.group_id), g.num_indexed_blocks)


def _of_groups(cluster: ClusterStats) -> Iterator[Sample]:
    for group in cluster.groups:
        me, by, stats = group.group_id, (group.model,), group.stats
        if stats is not None:
            yield Sample("num_requests_running", me, by, stats.num_running)
            yield Sample("num_requests_waiting", me, by, stats.num_waiting)
            yield Sample("num_requests_waiting_for_kv", me, by, stats.num_waiting_for_kv)
            yield Sample("kv_cache_usage_perc", me, by, stats.num_used_blocks / stats.num_blocks)
            yield Sample("kv_cache_blocks", me, by, stats.num_blocks)
            yield Sample("num_preemptions", me, by, stats.num_preemptions)
            yield Sample("prefix_cache_queries", me, by, stats.prefix_cache_queries)
            yield Sample("prefix_cache_hits", me, by, stats.prefix_cache_hits)
            fetched = stats.prefix_cache_hits_node + stats.prefix_cache_hits_network
            yield Sample("prefix_cache_tier_hits", me, (*by, "device"), stats.prefix_cache_hits - fetched)
            yield Sample("prefix_cache_tier_hits", me, (*by, "node"), stats.prefix_cache_hits_node)
            yield Sample("prefix_cache_tier_hits", me, (*by, "network"), stats.prefix_cache_hits_network)
            yield Sample("engine_steps", me, by, stats.num_steps)
        if group.times is not None:
            yield Sample("step_seconds", me, by, group.times.step_seconds)
            yield Sample("step_tokens", me, by, group.times.step_tokens)
            yield Sample("request_prefill_time_seconds", me, by, group.times.prefill_seconds)
            yield Sample("request_decode_time_seconds", me, by, group.times.decode_seconds)
    for f in cluster.fetches:
        labels = (f.model, f.source, f.outcome)
        yield Sample("kv_fetches", f.group_id, labels, f.num_fetches)
        yield Sample("kv_fetch_blocks", f.group_id, labels, f.num_blocks)
        yield Sample("kv_fetch_bytes", f.group_id, labels, f.num_bytes)
        yield Sample("kv_fetch_seconds", f.group_id, labels, f.seconds)
        yield Sample("kv_fetch_predicted_seconds", f.group_id, labels, f.predicted_seconds)


# -- as Prometheus reads it --------------------------------------------------------------------------------------------


def _native(found: list[Sample], kind: str | None) -> Iterator[Metric]:
    by_name: dict[str, list[Sample]] = {}
    for sample in found:
        by_name.setdefault(sample.name, []).append(sample)
    for name, family in FAMILIES.items():  # those without a series, too
        if kind not in (None, family.process):
            continue
        series = [((s.process, *s.labels), s.value) for s in by_name.get(name, ())]
        yield _metric(PREFIX + name, family.kind, family.about, family.all_labels, series)


def _metric(
    name: str, kind: str, about: str, labels: tuple[str, ...], series: Iterable[tuple[tuple[str, ...], Value]]
) -> Metric:
    if kind == "histogram":
        histogram = HistogramMetricFamily(name, about, labels=labels)
        for values, counts in series:
            assert isinstance(counts, HistogramCounts)
            histogram.add_metric(values, _cumulative(counts), counts.total)
        return histogram
    metric = (CounterMetricFamily if kind == "counter" else GaugeMetricFamily)(name, about, labels=labels)
    for values, value in series:
        assert not isinstance(value, HistogramCounts)
        metric.add_metric(values, value)
    return metric


def _cumulative(counts: HistogramCounts) -> list[tuple[str, float]]:
    buckets, so_far = [], 0
    for bound, count in zip((*map(str, counts.bounds), "+Inf"), counts.counts, strict=True):
        so_far += count
        buckets.append((bound, float(so_far)))
    return buckets


# -- vLLM's names ------------------------------------------------------------------------------------------------------


def _as_vllm(found: list[Sample], cluster: ClusterStats) -> Iterator[Metric]:
    """What vLLM's dashboards and the gateway API's endpoint picker read, with vLLM's labels.

    To them this application is one server. A gauge is one series a model, for all its groups; who waits in the global
    scheduler waits. Counters stay apart by process, which `engine` names: a sum that lost a process would look like one
    that began anew.
    """
    for name, family in FAMILIES.items():
        if not family.vllm or family.kind == "gauge":
            continue
        kept = [i for i, label in enumerate(family.labels) if label in ("model_name", "finished_reason")]
        labels = (*(family.labels[i] for i in kept), "engine")
        series: dict[tuple[str, ...], Value] = {}
        for sample in found:
            if sample.name == name:
                key = (*(sample.labels[i] for i in kept), sample.process)
                series[key] = _sum(series.get(key), sample.value)
        for alias in family.vllm:
            yield _metric(f"vllm:{alias}", family.kind, family.about, labels, series.items())
    yield from _vllm_gauges(cluster)


def _sum(a: Value | None, b: Value) -> Value:
    if a is None:
        return b
    if isinstance(a, HistogramCounts):
        assert isinstance(b, HistogramCounts)
        return a.plus(b)
    assert not isinstance(b, HistogramCounts)
    return a + b


def _vllm_gauges(cluster: ClusterStats) -> Iterator[Metric]:
    running: dict[str, float] = {}
    waiting: dict[str, float] = dict(cluster.num_queued)
    used: dict[str, int] = {}
    blocks: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for group in cluster.groups:
        if group.stats is not None:
            model, stats = group.model, group.stats
            running[model] = running.get(model, 0) + stats.num_running
            waiting[model] = waiting.get(model, 0) + stats.num_waiting
            used[model] = used.get(model, 0) + stats.num_used_blocks
            blocks[model] = blocks.get(model, 0) + stats.num_blocks
            sizes[model] = group.block_size
    usage = {model: used[model] / blocks[model] for model in blocks}
    of = {"num_requests_running": running, "num_requests_waiting": waiting, "kv_cache_usage_perc": usage}
    for name, values in of.items():
        family = FAMILIES[name]
        for alias in family.vllm:
            series = [((model, "0"), float(value)) for model, value in values.items()]
            yield _metric(f"vllm:{alias}", "gauge", family.about, ("model_name", "engine"), series)
    info = [((model, "0", str(sizes[model]), str(blocks[model])), 1.0) for model in blocks]
    labels = ("model_name", "engine", "block_size", "num_gpu_blocks")
    yield _metric("vllm:cache_config_info", "gauge", "KV blocks of a model, over all its groups.", labels, info)


def targets(cluster: ClusterStats, address: str, scheme: str) -> list[dict]:
    """For Prometheus's HTTP service discovery: every process as a target of its own, all of them reached at `address`.

    A process that is gone is no longer listed, and its `up` is 0 until the list is read again.
    """
    found = []
    for kind, name in processes(cluster):
        labels = {"__metrics_path__": f"/metrics/{kind}/{name}", "__scheme__": scheme}
        # none that a series has itself: Prometheus would rename the series' own
        found.append({"targets": [address], "labels": labels | {"process": kind, "instance": f"{kind}/{name}"}})
    return found
