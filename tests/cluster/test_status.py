"""What `pagedray status`, `top` and the console are shown, and how it reads."""

import io
import json
import threading
from contextlib import redirect_stdout
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedray.cluster.chat_client import EndpointError
from pagedray.cluster.console.state import OTHERS, cluster_state
from pagedray.cluster.global_scheduler import ClusterStats, GroupStatus, SchedulerReport, StoreStats
from pagedray.cluster.metrics.reports import IngressReport
from pagedray.cluster.metrics.requests import RequestMetrics
from pagedray.cluster.status import quantile, read_state, show_status, show_top, status_text, table, top_text
from pagedray.scheduler.dispatcher import QUEUE_BOUNDS, TenantStats
from pagedray.scheduler.histogram import Histogram
from pagedray.scheduler.request import Request, SamplingParams, SequenceOutput
from pagedray.scheduler.step import SchedulerStats


def node(number, alive=True, **resources):
    address = {"NodeManagerAddress": f"10.0.0.{number}", "NodeManagerHostname": f"host{number}"}
    return {"NodeID": f"n{number}", "Alive": alive, "Resources": resources} | address


NODES = [node(1, CPU=8), node(2, GPU=1), node(3, alive=False)]
MODELS = {"m": 64, "n": 32}


def tenant_stats(model, tenant, generated=30, queued=1):
    counts = Histogram(QUEUE_BOUNDS).so_far()
    return TenantStats(model, tenant, queued, 2, 0.5, 10, 20, generated, counts)


def cluster(generated=30, steps=4, ttft=0.03, failures=()):
    metrics = RequestMetrics()
    metrics.histogram("time_to_first_token_seconds", "m", "acme").observe(ttft)
    metrics.histogram("time_to_first_token_seconds", "hidden", "acme").observe(100.0)
    watch = metrics.watch(Request("r", (1,), SamplingParams(seed=0), "m", tenant="acme"))
    watch.output(SequenceOutput("r", (1,)))
    tenants = tuple(tenant_stats(m, t, generated) for m in ("m", "hidden") for t in ("acme", "other", "third"))
    return ClusterStats(
        {"m": 3},
        (
            GroupStatus("g1", "m", 64, SchedulerStats(2, 1, 100, 25, 0, 40, 10, steps), 16, nodes=("n1", "n2")),
            GroupStatus("g2", "hidden", 64, None),
        ),
        (("n1", StoreStats(2**30, 2**28, 3, 0, 0, 0, 0, 0)),),
        schedulers=(SchedulerReport("s1", tenants),),
        ingresses=(IngressReport("i1", "n1", metrics.counts()),),
        failures=failures,
    )


def state(tenant=None, may_sleep=(), **change):
    return cluster_state(cluster(**change), NODES, MODELS, may_sleep, tenant)


def test_the_state_has_what_runs_where():
    found = json.loads(json.dumps(state()))
    assert [(m["id"], m["num_groups"], m["num_queued"]) for m in found["models"]] == [("m", 1, 3), ("n", 0, 0)]
    assert [g["nodes"] for g in found["groups"]] == [["n1", "n2"]]
    assert [n["id"] for n in found["nodes"]] == ["n1", "n2"]
    assert (found["nodes"][0]["store_bytes"], found["nodes"][1]["store_budget"]) == (2**28, 0)
    assert found["ingresses"] == [{"id": "i1", "node": "n1", "num_in_flight": 1}]
    assert sum(found["latency"]["ttft"]["counts"]) == 2


def test_a_model_that_is_not_the_callers_is_nowhere():
    assert "hidden" not in json.dumps(state()) and "hidden" not in json.dumps(state("acme"))


def test_other_tenants_are_one_without_a_name():
    everybody, mine = state(), state("acme")
    assert {t["tenant"] for t in everybody["tenants"]} == {"acme", "other", "third"}
    assert {t["tenant"]: t["generated_tokens"] for t in mine["tenants"]} == {"acme": 30, OTHERS: 60}
    assert "third" not in json.dumps(mine)


def test_status_reads_well():
    text = status_text(state("acme"))
    lines = text.splitlines()
    assert any(line.split() == ["m", "serving", "1", "3", "64"] for line in lines)
    assert any("10.0.0.1, 10.0.0.2" in line and "25% of 1600 tokens" in line for line in lines)
    assert "(others)" in text and "256 of 1024 MiB" in text
    assert all(line == line.rstrip() for line in lines)


def test_top_shows_rates_and_survives_a_scheduler_that_began_anew():
    before, now = state(generated=30, steps=4), state(generated=80, steps=24)
    text = top_text(before, now, 2.0)
    assert "75 tokens/s" in text and "6 running  3 queued" in text  # three tenants, 50 tokens each in two seconds
    assert any(line.split()[-2:] == ["10.0", "0"] for line in text.splitlines() if line.startswith("g1"))
    assert "0 tokens/s" in top_text(now, before, 2.0)


def test_a_terminal_is_given_no_orders():
    text = table(["A"], [["\x1b[2Jx\nforged"]])
    assert "\x1b" not in text and len(text.splitlines()) == 2


@given(st.lists(st.floats(0.001, 9.0), min_size=1, max_size=40), st.sampled_from([0.5, 0.95]))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(values, q):
    bounds = (0.01, 0.1, 1.0, 10.0)
    before, now = Histogram(bounds), Histogram(bounds)
    for value in values:
        now.observe(value)
    found = quantile(q, *({"bounds": h.bounds, "counts": h.counts} for h in (before, now)))
    true = sorted(values)[max(0, -int(-q * len(values) // 1) - 1)]
    lower, upper = max((b for b in (0.0, *bounds) if b < true), default=0.0), min(b for b in bounds if b >= true)
    assert lower <= found <= upper
    assert quantile(q, *[{"bounds": bounds, "counts": now.counts}] * 2) is None


# -- asking ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def answering():
    """A function that starts a server which answers so; `asked` holds what it was asked."""
    servers = []

    def start(answers):
        asked = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                asked.append((self.path, self.headers.get("Authorization")))
                status, body = answers[min(len(asked), len(answers)) - 1]
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}", asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def printed(function, *args):
    out = io.StringIO()
    with redirect_stdout(out):
        status = function(*args)
    return status, out.getvalue()


def test_status_asks_with_the_key_and_fails_where_a_model_has_no_group(answering):
    url, asked = answering([(200, state())])
    status, text = printed(show_status, f"{url}/v1", "sk-key", False)
    assert status == 1 and "10.0.0.1" in text  # model n has no group
    for change, expected, says in (
        ({"may_sleep": {"n"}}, 0, "n      asleep"),
        ({"may_sleep": {"n"}, "failures": (("n", "it is damaged"),)}, 1, "n cannot start: it is damaged"),
    ):
        status, text = printed(show_status, answering([(200, state(**change))])[0], None, False)
        assert status == expected and says in text
    assert asked == [("/console/state", "Bearer sk-key")]
    status, text = printed(show_status, url, None, True)
    assert json.loads(text)["models"][0]["id"] == "m"


def test_top_goes_on_where_the_server_is_away_for_a_moment(answering):
    url, asked = answering([(200, state(generated=0)), (503, b"later"), (200, state(generated=50))])
    status, text = printed(show_top, url, None, 0.05, 2)
    assert status == 0 and "HTTP 503" in text and "tokens/s" in text and len(asked) == 3
    assert "\x1b" not in text  # no terminal


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((401, {}), "--api-key"),
        ((200, b"<html>"), "no server of PagedRay"),
        ((200, []), "no server of PagedRay"),
        ((404, {"error": {"message": "Not Found"}}), "404"),
    ],
)
def test_what_is_no_server_of_ours_is_said(answer, says, answering):
    url, _ = answering([answer])
    with pytest.raises(EndpointError, match=says):
        read_state(url, None)


def test_nobody_there():
    with pytest.raises(EndpointError, match="--url"):
        read_state("http://127.0.0.1:9", None)
