"""What `/metrics` shows, under vLLM's names with our prefix: requests as clients saw them, groups as they report."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .global_scheduler import ClusterStats

_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 20, 40, 80, 160)
_ITL_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.3, 0.6, 1.2, 2.5, 5)
_E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 240, 480)


class RequestMetrics:
    """Counters and histograms of one ingress. A sequence counts as a request: n choices are n."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels, registry = ["model_name"], self.registry
        self.success = Counter(
            "pagedray:request_success", "Finished sequences.", [*labels, "finished_reason"], registry=registry
        )
        self.failed = Counter("pagedray:request_failed", "Failed sequences.", [*labels, "code"], registry=registry)
        self.resumed = Counter(
            "pagedray:request_resumed",
            "Sequences that went on after a lost group.",
            labels,
            registry=registry,
        )
        self.moved = Counter(
            "pagedray:request_moved",
            "Sequences that went on at another group because theirs was to leave.",
            labels,
            registry=registry,
        )
        self.prompt_tokens = Counter("pagedray:prompt_tokens", "Prompt tokens.", labels, registry=registry)
        self.generation_tokens = Counter("pagedray:generation_tokens", "Generated tokens.", labels, registry=registry)
        self.tenant_tokens = Counter(
            "pagedray:tenant_tokens",
            "Tokens by tenant, prompt or generation.",
            ["tenant", "kind"],
            registry=registry,
        )
        self.tenant_limited = Counter(
            "pagedray:tenant_rate_limited", "Sequences that a tenant's limits refused.", ["tenant"], registry=registry
        )
        self.in_flight = Gauge("pagedray:num_requests_in_flight", "Sequences being served.", labels, registry=registry)
        self.ttft = Histogram(
            "pagedray:time_to_first_token_seconds",
            "From arrival at the ingress to the first token.",
            labels,
            buckets=_TTFT_BUCKETS,
            registry=registry,
        )
        self.inter_token = Histogram(
            "pagedray:inter_token_latency_seconds", "Between tokens.", labels, buckets=_ITL_BUCKETS, registry=registry
        )
        self.e2e = Histogram(
            "pagedray:e2e_request_latency_seconds",
            "From arrival at the ingress to the last token.",
            labels,
            buckets=_E2E_BUCKETS,
            registry=registry,
        )

    def render(self, cluster: ClusterStats) -> bytes:
        """Everything in Prometheus's text format."""
        groups = CollectorRegistry()
        groups.register(_GroupCollector(cluster))
        groups.register(_KVCollector(cluster))
        return generate_latest(self.registry) + generate_latest(groups)


class _GroupCollector:
    """Turns the groups' last reports into metrics at the moment of a scrape."""

    def __init__(self, cluster: ClusterStats):
        self.cluster = cluster

    def collect(self) -> Iterator[Metric]:
        queued = GaugeMetricFamily(
            "pagedray:num_requests_queued", "Requests in the global scheduler's queue.", labels=["model_name"]
        )
        for model, count in self.cluster.num_queued.items():
            queued.add_metric([model], count)
        yield queued
        indexed = GaugeMetricFamily(
            "pagedray:prefix_index_blocks",
            "Cached blocks of a group that the global scheduler knows.",
            labels=["model_name", "group"],
        )
        for group in self.cluster.groups:
            indexed.add_metric([group.model, group.group_id], group.num_indexed_blocks)
        yield indexed
        gauges = {
            "num_requests_running": ("Sequences in the running set.", lambda s: s.num_running),
            "num_requests_waiting": ("Sequences waiting in the group.", lambda s: s.num_waiting),
            "num_requests_waiting_for_kv": (
                "Fetches of KV blocks that sequences wait for.",
                lambda s: s.num_waiting_for_kv,
            ),
            "kv_cache_usage_perc": (
                "Share of KV blocks in use, 0 to 1.",
                lambda s: s.num_used_blocks / s.num_blocks,
            ),
        }
        counters = {
            "num_preemptions": ("Sequences preempted.", lambda s: s.num_preemptions),
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", lambda s: s.prefix_cache_queries),
            "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", lambda s: s.prefix_cache_hits),
            "engine_steps": ("Steps run.", lambda s: s.num_steps),
        }
        for family, metrics in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (text, value) in metrics.items():
                metric = family(f"pagedray:{name}", text, labels=["model_name", "group"])
                for group in self.cluster.groups:
                    if group.stats is not None:
                        metric.add_metric([group.model, group.group_id], value(group.stats))
                yield metric


class _KVCollector:
    """KV blocks that are shared through the nodes' stores, as the global scheduler knows of them."""

    def __init__(self, cluster: ClusterStats):
        self.cluster = cluster

    def collect(self) -> Iterator[Metric]:
        decisions = CounterMetricFamily(
            "pagedray:kv_fetch_decisions",
            "Requests of whose prompt a store had more than their group: fetched, or computed as that was faster.",
            labels=["model_name", "decision"],
        )
        for model, fetched, computed in self.cluster.fetch_decisions:
            decisions.add_metric([model, "fetch"], fetched)
            decisions.add_metric([model, "recompute"], computed)
        yield decisions
        of_fetches = {
            "kv_fetches": ("Fetches that ended, by outcome.", lambda f: f.num_fetches),
            "kv_fetch_blocks": ("Blocks that came.", lambda f: f.num_blocks),
            "kv_fetch_bytes": ("Bytes that came.", lambda f: f.num_bytes),
            "kv_fetch_seconds": ("What fetches took.", lambda f: f.seconds),
            "kv_fetch_predicted_seconds": ("What they were reckoned to take.", lambda f: f.predicted_seconds),
        }
        for name, (text, value) in of_fetches.items():
            family = CounterMetricFamily(f"pagedray:{name}", text, labels=["model_name", "group", "source", "outcome"])
            for fetches in self.cluster.fetches:
                family.add_metric([fetches.model, fetches.group_id, fetches.source, fetches.outcome], value(fetches))
            yield family
        of_stores = {
            "kv_store_bytes": (GaugeMetricFamily, "Bytes of KV in a node's store.", lambda s: s.num_bytes),
            "kv_store_budget_bytes": (GaugeMetricFamily, "Bytes that it may hold.", lambda s: s.budget),
            "kv_store_runs": (GaugeMetricFamily, "Runs of blocks in it.", lambda s: s.num_runs),
            "kv_store_published": (CounterMetricFamily, "Runs that it took.", lambda s: s.num_published),
            "kv_store_refused": (CounterMetricFamily, "Runs for which nothing could go.", lambda s: s.num_refused),
            "kv_store_failed": (CounterMetricFamily, "Runs that did not come.", lambda s: s.num_failed),
            "kv_store_evicted": (CounterMetricFamily, "Runs that went.", lambda s: s.num_evicted),
            "kv_store_reads": (CounterMetricFamily, "Reads that found something.", lambda s: s.num_reads),
        }
        for name, (kind, text, value) in of_stores.items():
            metric = kind(f"pagedray:{name}", text, labels=["node"])
            for node, stats in self.cluster.stores:
                metric.add_metric([node], value(stats))
            yield metric
