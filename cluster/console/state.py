"""What the console, `pagedray status` and `pagedray top` show: one JSON document of the whole application.

Counts are running totals: whoever shows a rate asks twice. A caller sees all tenants where there are no keys or its
tenant is an operator; otherwise its own, and the others as one, without names.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ... import __version__
from ...scheduler.dispatcher import TenantStats
from ...scheduler.histogram import HistogramCounts
from ..global_scheduler import ClusterStats

OTHERS = ""  # in place of a name: the tenants that the caller may not see
_LATENCIES = {"ttft": "time_to_first_token_seconds", "itl": "inter_token_latency_seconds"}


def cluster_state(
    cluster: ClusterStats,
    nodes: Sequence[Mapping[str, Any]],
    models: Mapping[str, int],
    may_sleep: Collection[str],
    tenant: str | None,
) -> dict[str, Any]:
    """`nodes` as `ray.nodes()` has them; `models` that the caller may use, and their contexts in tokens.

    `may_sleep`: models that need no group while nobody asks. `tenant`: the one whose figures are shown by name; None:
    all of them.
    """
    stats = [t for part in cluster.schedulers for t in part.tenants if t.model in models]
    groups = [g for g in cluster.groups if g.model in models]
    failures = dict(cluster.failures)

    def state(model: str) -> str:
        if any(g.model == model and not g.draining for g in groups):
            return "serving"
        return "failed" if model in failures else "asleep" if model in may_sleep else "down"

    return {
        "version": __version__,
        "schedulers": [part.scheduler for part in cluster.schedulers],
        "models": [
            {
                "id": model,
                "state": state(model),
                "failure": failures.get(model, ""),  # why it cannot start
                "max_model_len": length,
                "num_groups": sum(g.model == model for g in groups),
                "num_queued": cluster.num_queued.get(model, 0),
            }
            for model, length in models.items()
        ],
        "groups": [_group(g) for g in groups],
        "nodes": _nodes(cluster, nodes),
        "ingresses": [
            {
                "id": ingress.ingress_id,
                "node": ingress.node_id,
                "num_in_flight": sum(v for n, _, v in ingress.counts if n == "num_requests_in_flight"),
            }
            for ingress in cluster.ingresses
        ],
        "tenants": _tenants(stats, tenant),
        "latency": {short: _histogram(cluster, name, models) for short, name in _LATENCIES.items()},
        "num_failed": sum(value for i in cluster.ingresses for name, _, value in i.counts if name == "request_failed"),
    }


def _group(group: Any) -> dict[str, Any]:
    stats = group.stats
    return {
        "id": group.group_id,
        "model": group.model,
        "nodes": list(group.nodes),  # of each rank
        "draining": group.draining,
        "num_running": stats.num_running if stats else 0,
        "num_waiting": stats.num_waiting if stats else 0,
        "num_blocks": stats.num_blocks if stats else 0,
        "num_used_blocks": stats.num_used_blocks if stats else 0,
        "block_size": group.block_size,
        "prefix_cache_queries": stats.prefix_cache_queries if stats else 0,
        "prefix_cache_hits": stats.prefix_cache_hits if stats else 0,
        "num_preemptions": stats.num_preemptions if stats else 0,
        "num_steps": stats.num_steps if stats else 0,
        "num_computed_tokens": stats.num_scheduled_tokens if stats else 0,
    }


def _nodes(cluster: ClusterStats, nodes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    stores = dict(cluster.stores)
    found = []
    for node in nodes:
        if not node.get("Alive"):
            continue
        resources, store = node.get("Resources", {}), stores.get(node["NodeID"])
        found.append(
            {
                "id": node["NodeID"],
                "address": node.get("NodeManagerAddress", ""),
                "name": node.get("NodeManagerHostname", ""),
                "cpus": resources.get("CPU", 0),
                "gpus": resources.get("GPU", 0),
                "memory": resources.get("memory", 0),
                "store_bytes": store.num_bytes if store else 0,
                "store_budget": store.budget if store else 0,
            }
        )
    return sorted(found, key=lambda node: (node["address"], node["id"]))


def _tenants(stats: Iterable[TenantStats], mine: str | None) -> list[dict[str, Any]]:
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for t in stats:
        name = t.tenant if mine in (None, t.tenant) else OTHERS
        row = rows.setdefault((t.model, name), {"model": t.model, "tenant": name})
        for key in ("num_queued", "num_placed", "computed_tokens", "cached_tokens", "generated_tokens"):
            row[key] = row.get(key, 0) + getattr(t, key)
    return list(rows.values())


def _histogram(cluster: ClusterStats, name: str, models: Mapping[str, int]) -> dict[str, Any]:
    """Of all ingresses and tenants: a count for each bound (seconds), and one for what is over all of them."""
    together: HistogramCounts | None = None
    for ingress in cluster.ingresses:
        for counted, labels, value in ingress.counts:
            if counted == name and labels[0] in models and isinstance(value, HistogramCounts):
                together = value if together is None else together.plus(value)
    if together is None:
        return {"bounds": [], "counts": [0]}
    return {"bounds": list(together.bounds), "counts": list(together.counts)}
