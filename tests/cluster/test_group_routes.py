"""Who may see and drain worker groups over HTTP, and what is refused."""

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from pagedray.cluster.global_scheduler import ClusterStats, GroupStatus
from pagedray.cluster.group_routes import add_group_routes
from pagedray.cluster.openai.router import build_app
from pagedray.cluster.openai.tenancy import caller
from pagedray.scheduler.step import SchedulerStats
from pagedray.scheduler.tenants import Tenant, TenantDirectory, hash_key

TENANTS = (Tenant("acme", (hash_key("sk-acme-key"),)), Tenant("ops", (hash_key("sk-ops-key"),), operator=True))


class Client:
    def __init__(self):
        self.drained = []

    async def stats(self):
        stats = SchedulerStats(3, 1, 10, 5, 0, 0, 0, 0)
        return ClusterStats({}, (GroupStatus("g1", "m", 64, stats), GroupStatus("g2", "m", 64, None, draining=True)))

    async def drain_group(self, group_id, seconds):
        self.drained.append((group_id, seconds))
        return group_id == "g1"


@pytest.fixture
def served():
    async def nothing():
        return b""

    directory = TenantDirectory(TENANTS)
    app: FastAPI = build_app(lambda: {}, None, nothing, nothing, tenants=directory)
    client = Client()
    add_group_routes(app, client, lambda: caller().operator)
    return TestClient(app), client


def ask(served, method, path, key):
    return served[0].request(method, path, headers={"Authorization": f"Bearer {key}"})


def test_an_operator_sees_groups_and_drains_one(served):
    assert ask(served, "GET", "/groups", "sk-ops-key").json()["data"] == [
        {"id": "g1", "model": "m", "running": 3, "waiting": 1, "draining": False},
        {"id": "g2", "model": "m", "running": 0, "waiting": 0, "draining": True},
    ]
    answer = ask(served, "POST", "/groups/g1/drain?timeout=5", "sk-ops-key")
    assert (answer.status_code, answer.json()) == (202, {"id": "g1", "draining": True})
    assert served[1].drained == [("g1", 5.0)]


@pytest.mark.parametrize(
    ("method", "path", "key", "status", "code"),
    [
        ("GET", "/groups", "sk-wrong", 401, "invalid_api_key"),
        ("GET", "/groups", "sk-acme-key", 403, "operators_only"),
        ("POST", "/groups/g1/drain", "sk-acme-key", 403, "operators_only"),
        ("POST", "/groups/g9/drain", "sk-ops-key", 404, "group_not_found"),
        ("POST", "/groups/g1/drain?timeout=nan", "sk-ops-key", 400, None),
        ("POST", "/groups/g1/drain?timeout=1e9", "sk-ops-key", 400, None),
        ("POST", "/groups/g1/drain?timeout=soon", "sk-ops-key", 400, None),
    ],
)
def test_what_is_refused(served, method, path, key, status, code):
    answer = ask(served, method, path, key)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert status == 404 or not served[1].drained
