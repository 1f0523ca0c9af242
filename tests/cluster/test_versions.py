"""What a changed document does: which deployments restart, and what an ingress takes in while it runs."""

import asyncio
from types import SimpleNamespace

import pytest
from ray.serve._private.build_app import build_app
from ray.serve._private.config import DeploymentConfig

from pagedray.cluster.app import build
from pagedray.cluster.config import ApplicationConfig
from pagedray.cluster.ingress import Ingress, to_user_config
from pagedray.scheduler.tenants import TenantDirectory


def section(model_id, **more):
    return {"model_loading_config": {"model_id": model_id, "model_source": "org/name"}, **more}


def versions(args):
    """By deployment: what the controller is told, though Serve wants one version for all."""
    told = {}
    for deployment in build_app(build(args), name="app", default_runtime_env={}).deployments:
        config = deployment._deployment_config
        config.version = "of the whole document"
        told[deployment.name] = DeploymentConfig.from_proto_bytes(config.to_proto_bytes()).version
    return told


def test_each_deployment_has_a_version_of_its_own():
    before = versions({"llm_configs": [section("a"), section("b")]})
    assert before.keys() == {"Ingress", "WorkerGroup:a", "WorkerGroup:b"}
    assert len(set(before.values())) == 3 and "of the whole document" not in before.values()
    assert versions({"llm_configs": [section("a"), section("b")]}) == before


def test_only_what_changed_is_restarted():
    before = versions({"llm_configs": [section("a"), section("b")]})
    for args in (
        {"llm_configs": [section("a"), section("b")], "scheduler": {"max_queued_requests": 5}},
        {"llm_configs": [section("a"), section("b")], "tenants": [{"name": "t", "api_keys": ["sk-123456"]}]},
        {"llm_configs": [section("a", deployment_config={"num_replicas": 3}), section("b")]},
        {"llm_configs": [section("a", deployment_config={"max_surge_percent": 100}), section("b")]},
        {"llm_configs": [section("a"), section("b")], "observability": {"vllm_metric_names": True}},
        {"llm_configs": [section("a", engine_kwargs={"generation_config": "vllm"}), section("b")]},
    ):
        assert versions(args) == before
    more = versions({"llm_configs": [section("a"), section("b"), section("c")]})
    assert {name: more[name] for name in before} == before
    other = versions({"llm_configs": [section("a", engine_kwargs={"max_num_seqs": 3}), section("b")]})
    assert {name for name in before if other[name] != before[name]} == {"WorkerGroup:a"}


def test_the_ingress_hears_of_every_change():
    def told(args):
        (ingress,) = (d for d in build_app(build(args), name="app").deployments if d.name == "Ingress")
        return ingress.user_config

    before = told({"llm_configs": [section("a")]})
    assert set(before) == {"config"} and hasattr(Ingress.func_or_class, "reconfigure")
    assert told({"llm_configs": [section("a")], "scheduler": {"max_queued_requests": 5}}) != before


class Client:
    """The way to the global scheduler, which keeps what it is told."""

    def __init__(self):
        self.told = []

    async def configure(self, *told):
        self.told.append(told)


@pytest.fixture
def ingress():
    """An ingress without Ray, whose tokenizers are the models' sources; that of `missing` cannot be loaded."""

    def load(model):
        if model.engine.model == "org/missing":
            raise OSError("not there")
        return SimpleNamespace(id=model.model_id, source=model.engine.model)

    class Bare(Ingress.func_or_class.__mro__[1]):  # without what Serve puts around it
        _load = staticmethod(load)

        def __del__(self):
            pass

    ingress = Bare.__new__(Bare)
    ingress.config = ApplicationConfig.parse({"llm_configs": [section("a")]})
    ingress.models = {"a": load(ingress.config.models[0])}
    ingress.arriving, ingress.unreadable, ingress.client = set(), {}, Client()
    ingress.tenants, ingress.resuming = TenantDirectory(), SimpleNamespace(migration_limit=3)
    return ingress


def reconfigure(ingress, **args):
    config = ApplicationConfig.parse({"llm_configs": [section("a")]} | args)
    asyncio.run(ingress.reconfigure(to_user_config(config)))
    return config


def test_the_ingress_takes_a_change_in(ingress):
    first = ingress.models["a"]
    reconfigure(ingress)
    assert ingress.client.told == [], "Serve tells it at its start, too"
    tenants = [{"name": "acme", "api_keys": ["sk-acme-key"]}]
    scheduler = {"migration_limit": 1, "max_queued_requests": 9}
    config = reconfigure(ingress, llm_configs=[section("a"), section("b")], tenants=tenants, scheduler=scheduler)
    assert ingress.models["a"] is first and ingress.models["b"].id == "b"
    assert ingress.arriving == {"b"}, "its groups are still loading"
    assert ingress.tenants.authenticate("sk-acme-key").name == "acme" and ingress.resuming.migration_limit == 1
    assert ingress.client.told == [(config.scheduler, config.tenants, config.observability)]
    reconfigure(ingress)
    assert ingress.models == {"a": first} and not ingress.arriving and not ingress.tenants.has_keys


def test_a_model_that_cannot_be_read_takes_no_other_with_it(ingress):
    first = ingress.models["a"]
    missing = {"model_loading_config": {"model_id": "m", "model_source": "org/missing"}}
    reconfigure(ingress, llm_configs=[section("a"), missing])
    assert ingress.models == {"a": first} and ingress.unreadable == {"m": "not there"}
    here = {"model_loading_config": {"model_id": "m", "model_source": "org/here"}}
    reconfigure(ingress, llm_configs=[section("a"), here])
    assert ingress.models["m"].source == "org/here" and not ingress.unreadable
    moved = {"model_loading_config": {"model_id": "a", "model_source": "org/other"}}
    reconfigure(ingress, llm_configs=[moved])
    assert ingress.models["a"].source == "org/other"
