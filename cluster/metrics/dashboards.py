"""Grafana's dashboards, made of the metrics that there are.

    python -m pagedray.cluster.metrics.dashboards k8s/dashboards

A panel is a title, a unit and the PromQL of its curves. A metric or a label that the catalog has not is a
`KeyError` here, not an empty panel in the night when somebody looks at it.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .catalog import FAMILIES

_WIDTH, _HEIGHT = 8, 7  # of a panel; a dashboard is 24 wide
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_RATE = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: str  # Grafana's name of it
    curves: tuple[tuple[str, str], ...]  # PromQL, legend
    about: str = ""
    most: float | None = None  # of the axis


def _series(name: str, suffix: str = "", **labels: str) -> str:
    """The selector of a metric: of the models and tenants that are chosen above, as far as it has these labels."""
    family = FAMILIES[name]
    chosen = {"model_name": "=~$model_name", "tenant": "=~$tenant"}
    matchers = {label: text for label, text in chosen.items() if label in family.labels}
    for label, value in labels.items():
        if label not in family.all_labels:
            raise KeyError(f"{family.exposed} has no label {label}")
        matchers[label] = f"={value}"
    inside = ", ".join(
        f'{label}{m[:2]}"{m[2:]}"' if m[1] == "~" else f'{label}="{m[1:]}"' for label, m in matchers.items()
    )
    return f"{family.exposed}{suffix}{{{inside}}}"


def _by(name: str, by: Sequence[str]) -> str:
    for label in by:
        if label not in FAMILIES[name].all_labels:
            raise KeyError(f"{FAMILIES[name].exposed} has no label {label}")
    return f" by ({', '.join(by)})" if by else ""


def rate(name: str, *by: str, **labels: str) -> str:
    """What a counter gains a second, over all processes."""
    return f"sum{_by(name, by)} (rate({_series(name, **labels)}[{_RATE}]))"


def level(name: str, *by: str, how: str = "sum", **labels: str) -> str:
    """A gauge, over all processes."""
    return f"{how}{_by(name, by)} ({_series(name, **labels)})"


def quantile(q: float, name: str, *by: str) -> str:
    buckets = f"sum{_by(name, by).replace('(', '(le, ') or ' by (le)'} (rate({_series(name, '_bucket')}[{_RATE}]))"
    return f"histogram_quantile({q:g}, {buckets})"


def mean(name: str, *by: str) -> str:
    sums, counts = (f"sum{_by(name, by)} (rate({_series(name, s)}[{_RATE}]))" for s in ("_sum", "_count"))
    return f"{sums} / {counts}"


def _quantiles(name: str) -> tuple[tuple[str, str], ...]:
    return tuple((quantile(q, name), f"p{100 * q:.0f}") for q in (0.5, 0.95, 0.99))


OVERVIEW = (
    Panel("Requests that ended", "reqps", ((rate("request_success", "finished_reason"), "{{finished_reason}}"),)),
    Panel("Failures by kind", "reqps", ((rate("request_failed", "code"), "{{code}}"),)),
    Panel(
        "Tokens",
        "short",
        (
            (rate("generation_tokens"), "generated / s"),
            (rate("prompt_tokens"), "prompt / s"),
            (rate("cached_prompt_tokens"), "prompt, cached / s"),
        ),
    ),
    Panel("Time to first token", "s", _quantiles("time_to_first_token_seconds")),
    Panel("Time between tokens", "s", _quantiles("inter_token_latency_seconds")),
    Panel("Whole requests", "s", _quantiles("e2e_request_latency_seconds")),
    Panel("Waiting for a group", "short", ((level("num_requests_queued", "model_name"), "{{model_name}}"),)),
    Panel("Time in the queue", "s", _quantiles("request_queue_time_seconds")),
    Panel("HTTP by status", "reqps", ((rate("http_requests", "status"), "{{status}}"),)),
    Panel(
        "Sequences in groups",
        "short",
        (
            (level("num_requests_running", "group"), "running {{group}}"),
            (level("num_requests_waiting", "group"), "waiting {{group}}"),
        ),
    ),
    Panel(
        "KV blocks in use", "percentunit", ((level("kv_cache_usage_perc", "group", how="max"), "{{group}}"),), most=1.0
    ),
    Panel("Preemptions", "ops", ((rate("num_preemptions", "group"), "{{group}}"),)),
    Panel("A step", "s", _quantiles("step_seconds")),
    Panel("Tokens of a step", "short", ((mean("step_tokens", "group"), "{{group}}"),)),
    Panel(
        "Groups",
        "short",
        (
            (level("worker_groups", "model_name", how="max"), "{{model_name}}"),
            (rate("worker_groups_lost", "reason"), "lost / s: {{reason}}"),
            (rate("request_resumed"), "streams that went on / s"),
        ),
    ),
)

TENANTS = (
    Panel("Tokens generated", "short", ((rate("generation_tokens", "tenant"), "{{tenant}}"),)),
    Panel("Prompt tokens", "short", ((rate("prompt_tokens", "tenant"), "{{tenant}}"),)),
    Panel(
        "Prompt tokens from the cache",
        "percentunit",
        ((f"{rate('cached_prompt_tokens', 'tenant')} / {rate('prompt_tokens', 'tenant')}", "{{tenant}}"),),
        most=1.0,
    ),
    Panel("Waiting", "short", ((level("num_requests_queued", "tenant"), "{{tenant}}"),)),
    Panel("At groups", "short", ((level("num_requests_placed", "tenant"), "{{tenant}}"),)),
    Panel("Time in the queue, p95", "s", ((quantile(0.95, "request_queue_time_seconds", "tenant"), "{{tenant}}"),)),
    Panel("Time to first token, p95", "s", ((quantile(0.95, "time_to_first_token_seconds", "tenant"), "{{tenant}}"),)),
    Panel("Time between tokens, p95", "s", ((quantile(0.95, "inter_token_latency_seconds", "tenant"), "{{tenant}}"),)),
    Panel("Failures and refusals", "reqps", ((rate("request_failed", "tenant", "code"), "{{tenant}}: {{code}}"),)),
    Panel(
        "Service charged",
        "short",
        ((rate("tenant_service_tokens", "tenant", "kind"), "{{tenant}}: {{kind}}"),),
        "tokens a second; the fair queue weighs computed, cached and generated ones differently",
    ),
    Panel(
        "Fair queue's counter",
        "short",
        ((level("tenant_virtual_counter", "model_name", "tenant", how="max"), "{{tenant}} of {{model_name}}"),),
        "service per weight; among tenants that wait, the lowest goes first",
    ),
)

KV = (
    Panel(
        "Prompt tokens found, by tier",
        "short",
        ((rate("prefix_cache_tier_hits", "tier"), "{{tier}} / s"), (rate("prefix_cache_queries"), "looked up / s")),
    ),
    Panel(
        "Share found",
        "percentunit",
        ((f"{rate('prefix_cache_hits', 'group')} / {rate('prefix_cache_queries', 'group')}", "{{group}}"),),
        most=1.0,
    ),
    Panel("Fetch or compute", "ops", ((rate("kv_fetch_decisions", "decision"), "{{decision}}"),)),
    Panel("Fetches by outcome", "ops", ((rate("kv_fetches", "source", "outcome"), "{{source}}: {{outcome}}"),)),
    Panel("Bytes fetched", "Bps", ((rate("kv_fetch_bytes", "source"), "{{source}}"),)),
    Panel(
        "What a fetch takes",
        "s",
        (
            (f"{rate('kv_fetch_seconds')} / {rate('kv_fetches')}", "took"),
            (f"{rate('kv_fetch_predicted_seconds')} / {rate('kv_fetches')}", "was reckoned"),
        ),
    ),
    Panel(
        "Stores",
        "bytes",
        ((level("kv_store_bytes", "node"), "{{node}}"), (level("kv_store_budget_bytes", "node"), "{{node}} may hold")),
    ),
    Panel(
        "Runs of blocks",
        "ops",
        tuple((rate(f"kv_store_{name}"), name) for name in ("published", "refused", "failed", "evicted", "reads")),
    ),
    Panel("Blocks in the prefix index", "short", ((level("prefix_index_blocks", "group"), "{{group}}"),)),
)

DASHBOARDS = {
    "pagedray-overview": ("PagedRay: overview", OVERVIEW),
    "pagedray-tenants": ("PagedRay: tenants", TENANTS),
    "pagedray-kv": ("PagedRay: KV reuse", KV),
}


def dashboard(name: str) -> dict[str, Any]:
    """Grafana's JSON model of a dashboard, to be imported as it is or mounted for its provisioning."""
    title, panels = DASHBOARDS[name]
    return {
        "uid": name,
        "title": title,
        "tags": ["pagedray"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasource_variable(), _variable("model_name"), _variable("tenant")]},
        "links": [{"type": "dashboards", "tags": ["pagedray"], "title": "PagedRay", "asDropdown": True}],
        "panels": [_panel(i, panel) for i, panel in enumerate(panels)],
    }


def _datasource_variable() -> dict[str, Any]:
    return {"type": "datasource", "name": "datasource", "query": "prometheus", "label": "Prometheus"}


def _variable(label: str) -> dict[str, Any]:
    query = f"label_values({FAMILIES['prompt_tokens'].exposed}, {label})"
    return {
        "type": "query",
        "name": label,
        "label": label,
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": label},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(index: int, panel: Panel) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + i), "datasource": _DATASOURCE, "expr": expression, "legendFormat": legend}
        for i, (expression, legend) in enumerate(panel.curves)
    ]
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 8, "showPoints": "never"}}
    if panel.most is not None:
        defaults["max"] = panel.most
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": _DATASOURCE,
        "gridPos": {"x": index % 3 * _WIDTH, "y": index // 3 * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


def as_file(name: str) -> str:
    return json.dumps(dashboard(name), indent=1) + "\n"


def write(folder: Path) -> None:
    """One file a dashboard."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in DASHBOARDS:
        (folder / f"{name}.json").write_text(as_file(name), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
