"""Every metric: its name, who counts it, and what vLLM calls it. The exposition, the dashboards and the table in
docs/observability.md are all made of this list.

A process counts what it does itself, and every series carries its process's label: a sum over all series is a total,
whoever answers `/metrics`, and however many there are of each kind.
"""

from dataclasses import dataclass

from ...scheduler.dispatcher import QUEUE_BOUNDS

PREFIX = "pagedray_"
PROCESS_LABELS = {"ingress": "ingress", "scheduler": "scheduler", "group": "group", "store": "node"}
_MODEL = ("model_name",)
_TENANT = ("model_name", "tenant")

TTFT_BOUNDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
ITL_BOUNDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0)
E2E_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 240.0, 480.0)
STEP_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
TOKEN_BOUNDS = tuple(float(2**i) for i in range(18))


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. `labels` come beside that of the process; `vllm` are the names under which vLLM has it."""

    name: str  # without prefix, and without the _total of a counter
    kind: str  # counter, gauge or histogram
    process: str  # who counts it: a key of PROCESS_LABELS
    labels: tuple[str, ...]
    about: str
    vllm: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()

    @property
    def exposed(self) -> str:
        """As Prometheus shows it; a histogram's series have `_bucket`, `_sum` and `_count` besides."""
        return PREFIX + self.name + ("_total" if self.kind == "counter" else "")

    @property
    def all_labels(self) -> tuple[str, ...]:
        return (PROCESS_LABELS[self.process], *self.labels)


def _counter(process: str, name: str, labels: tuple[str, ...], about: str, *vllm: str) -> Family:
    return Family(name, "counter", process, labels, about, vllm)


def _gauge(process: str, name: str, labels: tuple[str, ...], about: str, *vllm: str) -> Family:
    return Family(name, "gauge", process, labels, about, vllm)


def _histogram(
    process: str, name: str, labels: tuple[str, ...], bounds: tuple[float, ...], about: str, *vllm: str
) -> Family:
    return Family(name, "histogram", process, labels, about, vllm, bounds)


_INGRESS = (
    _counter("ingress", "http_requests", ("route", "method", "status"), "HTTP requests that were answered."),
    _counter(
        "ingress",
        "request_success",
        (*_TENANT, "finished_reason"),
        "Sequences that ended: stop, length, or abort where the client left.",
        "request_success",
    ),
    _counter("ingress", "request_failed", (*_TENANT, "code"), "Sequences that failed or were refused, by kind."),
    _counter("ingress", "request_resumed", _MODEL, "Sequences that went on after their group was lost."),
    _counter(
        "ingress",
        "request_moved",
        _MODEL,
        "Sequences that moved: their group was to leave, or is for prompts.",
    ),
    _counter("ingress", "prompt_tokens", _TENANT, "Prompt tokens.", "prompt_tokens"),
    _counter("ingress", "cached_prompt_tokens", _TENANT, "Prompt tokens that were not computed, as they were cached."),
    _counter("ingress", "generation_tokens", _TENANT, "Generated tokens.", "generation_tokens"),
    _gauge("ingress", "num_requests_in_flight", _TENANT, "Sequences that are being served."),
    _histogram(
        "ingress",
        "time_to_first_token_seconds",
        _TENANT,
        TTFT_BOUNDS,
        "From arrival at the ingress to the first token.",
        "time_to_first_token_seconds",
    ),
    _histogram(
        "ingress",
        "inter_token_latency_seconds",
        _TENANT,
        ITL_BOUNDS,
        "Between tokens.",
        "inter_token_latency_seconds",
        "time_per_output_token_seconds",
    ),
    _histogram(
        "ingress",
        "e2e_request_latency_seconds",
        _TENANT,
        E2E_BOUNDS,
        "From arrival at the ingress to the last token.",
        "e2e_request_latency_seconds",
    ),
    _histogram(
        "ingress", "request_prompt_tokens", _MODEL, TOKEN_BOUNDS, "Tokens of a prompt.", "request_prompt_tokens"
    ),
    _histogram(
        "ingress",
        "request_generation_tokens",
        _MODEL,
        TOKEN_BOUNDS,
        "Tokens generated for a sequence that ended.",
        "request_generation_tokens",
    ),
)

_SCHEDULER = (
    _gauge("scheduler", "num_requests_queued", _TENANT, "Requests that wait for a worker group."),
    _gauge("scheduler", "num_requests_placed", _TENANT, "Requests that worker groups have."),
    _histogram(
        "scheduler",
        "request_queue_time_seconds",
        _TENANT,
        QUEUE_BOUNDS,
        "From arrival at the global scheduler to being handed to a group.",
        "request_queue_time_seconds",
    ),
    _counter(
        "scheduler",
        "tenant_service_tokens",
        (*_TENANT, "kind"),
        "What the fair queue charges a tenant for: prompt tokens computed or cached, tokens generated.",
    ),
    _gauge(
        "scheduler",
        "tenant_virtual_counter",
        _TENANT,
        "The tenant's service per weight, by which the fair queue orders; lower goes first.",
    ),
    _gauge("scheduler", "worker_groups", _MODEL, "Worker groups that take requests."),
    _counter("scheduler", "worker_groups_lost", (*_MODEL, "reason"), "Worker groups that went, by how it was noticed."),
    _gauge(
        "scheduler", "prefix_index_blocks", (*_MODEL, "group"), "Cached blocks of a group that the prefix index has."
    ),
    _counter(
        "scheduler",
        "kv_fetch_decisions",
        (*_MODEL, "decision"),
        "Requests of whose prompt a store had more than their group: fetched, or computed as that was faster.",
    ),
)

_FETCH = (*_MODEL, "source", "outcome")
_GROUP = (
    _gauge("group", "num_requests_running", _MODEL, "Sequences in the running set.", "num_requests_running"),
    _gauge("group", "num_requests_waiting", _MODEL, "Sequences that wait in the group.", "num_requests_waiting"),
    _gauge("group", "num_requests_waiting_for_kv", _MODEL, "Fetches of KV blocks that sequences wait for."),
    _gauge(
        "group",
        "kv_cache_usage_perc",
        _MODEL,
        "Share of KV blocks in use, 0 to 1.",
        "kv_cache_usage_perc",
        "gpu_cache_usage_perc",
    ),
    _gauge("group", "kv_cache_blocks", _MODEL, "KV blocks that the group has."),
    _counter("group", "num_preemptions", _MODEL, "Sequences preempted.", "num_preemptions"),
    _counter("group", "prefix_cache_queries", _MODEL, "Tokens looked up in the prefix cache.", "prefix_cache_queries"),
    _counter("group", "prefix_cache_hits", _MODEL, "Tokens found in the prefix cache.", "prefix_cache_hits"),
    _counter(
        "group",
        "prefix_cache_tier_hits",
        (*_MODEL, "tier"),
        "The same by where they were: on the device, or fetched for the request from its node's store or another's.",
    ),
    _counter("group", "engine_steps", _MODEL, "Steps run."),
    _histogram("group", "step_seconds", _MODEL, STEP_BOUNDS, "What a step took."),
    _histogram("group", "step_tokens", _MODEL, TOKEN_BOUNDS, "Tokens computed in a step.", "iteration_tokens_total"),
    _histogram(
        "group",
        "request_prefill_time_seconds",
        _MODEL,
        TTFT_BOUNDS,
        "From arrival at the group to the first token.",
        "request_prefill_time_seconds",
    ),
    _histogram(
        "group",
        "request_decode_time_seconds",
        _MODEL,
        E2E_BOUNDS,
        "From the first token to the last.",
        "request_decode_time_seconds",
    ),
    _counter("group", "kv_fetches", _FETCH, "Fetches that ended, by outcome."),
    _counter("group", "kv_fetch_blocks", _FETCH, "Blocks that came."),
    _counter("group", "kv_fetch_bytes", _FETCH, "Bytes that came."),
    _counter("group", "kv_fetch_seconds", _FETCH, "What fetches took."),
    _counter("group", "kv_fetch_predicted_seconds", _FETCH, "What they were reckoned to take."),
)

_STORE = (
    _gauge("store", "kv_store_bytes", (), "Bytes of KV in a node's store."),
    _gauge("store", "kv_store_budget_bytes", (), "Bytes that it may hold."),
    _gauge("store", "kv_store_runs", (), "Runs of blocks in it."),
    _counter("store", "kv_store_published", (), "Runs that it took."),
    _counter("store", "kv_store_refused", (), "Runs for which nothing could go."),
    _counter("store", "kv_store_failed", (), "Runs that did not come."),
    _counter("store", "kv_store_evicted", (), "Runs that went."),
    _counter("store", "kv_store_reads", (), "Reads that found something."),
)

FAMILIES = {family.name: family for family in (*_INGRESS, *_SCHEDULER, *_GROUP, *_STORE)}


def markdown_table() -> str:
    """All of it, as docs/observability.md shows it."""
    lines = ["| metric | kind | labels | what | vLLM's name |", "|---|---|---|---|---|"]
    for family in FAMILIES.values():
        labels = ", ".join(f"`{label}`" for label in family.all_labels)
        vllm = ", ".join(f"`{name}`" for name in family.vllm)
        lines.append(f"| `{family.exposed}` | {family.kind} | {labels} | {family.about} | {vllm} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown_table())
