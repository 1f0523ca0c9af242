"""`pagedray status` and `pagedray top`: what runs where, as the server itself tells it (`cluster/console/state.py`)."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from .chat_client import EndpointError, auth_headers, error_message, no_server, server_root

_ASK_SECONDS = 10.0
_CLEAR = "\x1b[H\x1b[J"
State = dict[str, Any]


def read_state(url: str, api_key: str | None) -> State:
    """Ask a server. Raises `EndpointError`, saying what is wrong and what may help."""
    base = server_root(url)
    try:
        answer = httpx.get(f"{base}/console/state", headers=auth_headers(api_key), timeout=_ASK_SECONDS)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise no_server(base, error) from None
    if answer.status_code == 401:
        raise EndpointError(f"{base} wants a key: --api-key, or OPENAI_API_KEY")
    if answer.status_code != 200:
        raise EndpointError(error_message(answer.status_code, answer.content))
    try:
        state = answer.json()
        return state if isinstance(state, dict) and "groups" in state else _no_state(base)
    except ValueError:
        return _no_state(base)


def _no_state(base: str) -> State:
    raise EndpointError(f"{base} is no server of PagedRay")


def show_status(url: str, api_key: str | None, as_json: bool) -> int:
    """Print what runs where. Returns the exit status: 1 where a model has no group and does not merely sleep."""
    state = read_state(url, api_key)
    print(json.dumps(state, indent=1) if as_json else status_text(state))
    return 0 if all(model["state"] in ("serving", "asleep") for model in state["models"]) else 1


def show_top(url: str, api_key: str | None, interval: float, count: int | None) -> int:
    """Print a table every `interval` seconds, in place on a terminal, until Ctrl-C or `count` times."""
    clear = _CLEAR if sys.stdout.isatty() else ""
    before, asked = read_state(url, api_key), time.monotonic()
    shown = 0
    while count is None or shown < count:
        time.sleep(interval)
        try:
            now, at = read_state(url, api_key), time.monotonic()
        except EndpointError as error:  # it may come back
            print(f"{clear}{error}", flush=True)
        else:
            print(clear + top_text(before, now, at - asked), flush=True)
            before, asked = now, at
        shown += 1
    return 0


# -- as text -----------------------------------------------------------------------------------------------------------


def status_text(state: State) -> str:
    node_of = {node["id"]: node["address"] for node in state["nodes"]}
    parts = [f"PagedRay {state['version']}"]
    parts.append(
        table(
            ["MODEL", "STATE", "GROUPS", "QUEUED", "CONTEXT"],
            [[m["id"], m["state"], m["num_groups"], m["num_queued"], m["max_model_len"]] for m in state["models"]],
        )
    )
    parts.append("\n".join(f"{m['id']} cannot start: {m['failure']}" for m in state["models"] if m["failure"]))
    parts.append(
        table(
            ["GROUP", "MODEL", "STATE", "RANKS ON", "RUNNING", "WAITING", "KV IN USE", "CACHE HITS"],
            [
                [
                    g["id"],
                    g["model"],
                    "leaving" if g["draining"] else "serving",
                    _places(g["nodes"], node_of),
                    g["num_running"],
                    g["num_waiting"],
                    f"{_percent(g['num_used_blocks'], g['num_blocks'])} of {g['num_blocks'] * g['block_size']} tokens",
                    _percent(g["prefix_cache_hits"], g["prefix_cache_queries"]),
                ]
                for g in state["groups"]
            ],
        )
    )
    parts.append(
        table(
            ["NODE", "NAME", "RAY'S CPUS", "GPUS", "INGRESSES", "KV STORE"],
            [
                [
                    n["address"],
                    n["name"],
                    f"{n['cpus']:g}",
                    f"{n['gpus']:g}",
                    sum(i["node"] == n["id"] for i in state["ingresses"]),
                    _mebibytes(n["store_bytes"], n["store_budget"]),
                ]
                for n in state["nodes"]
            ],
        )
    )
    parts.append(
        table(
            ["TENANT", "MODEL", "QUEUED", "AT GROUPS", "PROMPT COMPUTED", "PROMPT CACHED", "GENERATED"],
            [
                [
                    t["tenant"] or "(others)",
                    t["model"],
                    t["num_queued"],
                    t["num_placed"],
                    *(t[f"{kind}_tokens"] for kind in ("computed", "cached", "generated")),
                ]
                for t in state["tenants"]
            ],
        )
    )
    return "\n\n".join(part for part in parts if part)


def top_text(before: State, now: State, seconds: float) -> str:
    """What happened in the `seconds` between two states."""

    def gained(key: str, kind: str, name: Callable[[State], Any]) -> dict[Any, float]:
        old = {name(row): row[key] for row in before[kind]}
        return {name(row): max(0, row[key] - old.get(name(row), 0)) / seconds for row in now[kind]}

    def tenant(row: State) -> tuple[str, str]:
        return row["model"], row["tenant"]

    def group(row: State) -> str:
        return row["id"]

    made, read, cached = (gained(f"{kind}_tokens", "tenants", tenant) for kind in ("generated", "computed", "cached"))
    steps, computed = gained("num_steps", "groups", group), gained("num_computed_tokens", "groups", group)
    waits = [
        f"{name.upper()} p50 {_seconds(quantile(0.5, b, n))}  p95 {_seconds(quantile(0.95, b, n))}"
        for name, b, n in ((k, before["latency"][k], now["latency"][k]) for k in ("ttft", "itl"))
    ]
    queued, running = (sum(t[key] for t in now["tenants"]) for key in ("num_queued", "num_placed"))
    lines = [
        f"PagedRay {now['version']}  {time.strftime('%H:%M:%S')}  "
        f"{sum(made.values()):.0f} tokens/s  {running} running  {queued} queued",
        "  ".join(waits),
    ]
    groups = table(
        ["GROUP", "MODEL", "RUNNING", "WAITING", "KV IN USE", "STEPS/S", "TOKENS IN THEM/S"],
        [
            [
                g["id"],
                g["model"],
                g["num_running"],
                g["num_waiting"],
                f"{bar(g['num_used_blocks'], g['num_blocks'])} {_percent(g['num_used_blocks'], g['num_blocks'])}",
                f"{steps[g['id']]:.1f}",
                f"{computed[g['id']]:.0f}",
            ]
            for g in now["groups"]
        ],
    )
    tenants = table(
        ["TENANT", "MODEL", "QUEUED", "AT GROUPS", "GENERATED/S", "PROMPT COMPUTED/S", "PROMPT CACHED/S"],
        [
            [
                t["tenant"] or "(others)",
                t["model"],
                t["num_queued"],
                t["num_placed"],
                *(f"{of[tenant(t)]:.0f}" for of in (made, read, cached)),
            ]
            for t in sorted(now["tenants"], key=lambda t: -made[tenant(t)])
        ],
    )
    return "\n\n".join(part for part in ("\n".join(lines), groups, tenants) if part)


def quantile(q: float, before: State, now: State) -> float | None:
    """Of the values that came between two states of a histogram, as Prometheus reckons it; None: none came."""
    old = before["counts"] if before["bounds"] == now["bounds"] else [0] * len(now["counts"])
    counts = [max(0, new - was) for new, was in zip(now["counts"], old, strict=True)]
    wanted, lower = q * sum(counts), 0.0
    if not wanted:
        return None
    for bound, count in zip(now["bounds"], counts[:-1], strict=True):
        if count and wanted <= count:
            return lower + (bound - lower) * wanted / count
        wanted, lower = wanted - count, bound
    return lower


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns, as wide as they need to be; figures to the right. Empty without rows."""
    if not rows:
        return ""
    cells = [[_printable(str(cell)) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(header, *cells, strict=True)]
    right = [all(isinstance(row[i], int | float) for row in rows) for i in range(len(header))]
    lines = []
    for row in (header, *cells):
        padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def bar(part: float, whole: float, width: int = 10) -> str:
    full = round(width * part / whole) if whole else 0
    return "#" * full + "." * (width - full)


def _printable(text: str) -> str:
    """Nothing that a terminal would take for an order."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "-"


def _mebibytes(part: float, whole: float) -> str:
    return f"{part / 2**20:.0f} of {whole / 2**20:.0f} MiB" if whole else "-"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{1000 * value:.0f} ms" if value < 1 else f"{value:.1f} s"


def _places(nodes: Sequence[str], node_of: dict[str, str]) -> str:
    """10.0.0.1 x2, 10.0.0.2 x2"""
    counts: dict[str, int] = {}
    for node in nodes:
        counts[node_of.get(node, node[:8])] = counts.get(node_of.get(node, node[:8]), 0) + 1
    return ", ".join(f"{place} x{n}" if n > 1 else place for place, n in counts.items()) or "-"
