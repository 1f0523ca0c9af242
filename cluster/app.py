"""Builds the Serve application: the only place where its parts are put together.

`serve run pagedray.cluster.app:build`, a Serve YAML's `import_path` and `pagedray serve` all come through here.
"""

from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application

from .autoscaling import serve_options
from .config import ApplicationConfig, ModelDeployment, check_split
from .http_server import DRAIN_SECONDS, ListenAddress
from .ingress import Ingress, to_user_config
from .versions import group_version, ingress_version, keep_version
from .worker_group import WorkerGroup

_LOAD_TIMEOUT = 1800.0  # seconds for a group to load its weights
_SHUTDOWN_TIMEOUT = 30.0  # seconds that Serve gives a group that it takes away
_END_SECONDS = 8.0  # of them, for what follows when its sequences have moved


def build(args: dict[str, Any]) -> Application:
    """The application for these arguments (Ray Serve LLM's schema, see `cluster/config.py`).

    Raises `ConfigError` for arguments that are wrong and `CheckpointError` for a model here that cannot be served,
    before anything starts; what runs from an earlier document goes on then.
    """
    from ..workers.checkpoint.locate import read_config

    config = ApplicationConfig.parse(args)
    for model in config.models:
        if Path(model.engine.model).expanduser().exists():  # else it is on other nodes, or fetched there
            read_config(model.engine.model)
    return application(config)


def application(config: ApplicationConfig, listen: ListenAddress | None = None) -> Application:
    """The same of parsed arguments; with `listen` the ingress serves HTTP there itself, without Serve's proxy."""
    for model in config.models:
        check_split(model.engine, f"{model.where}.engine_kwargs")
    ingress_class: Any = Ingress  # Serve's decorators turn classes into deployments, which type checkers miss
    groups = [_group(model, config) for model in config.models]
    ingress = ingress_class.options(
        **{
            "user_config": to_user_config(config),
            "ray_actor_options": {"num_cpus": 0},
            "max_ongoing_requests": 4096,  # streams that are open; the queue's bound is the scheduler's
            "max_surge_percent": 100,  # a new one is up before the old one goes
            "graceful_shutdown_timeout_s": DRAIN_SECONDS + 5,
            **config.ingress,
        }
    )
    return keep_version(ingress, ingress_version(config)).bind(config, listen, *groups)


def _group(model: ModelDeployment, config: ApplicationConfig) -> Application:
    """The deployment whose replicas are the model's worker groups."""
    deployment: Any = serve.deployment(WorkerGroup)
    options = {
        "name": ":".join(["WorkerGroup", model.model_id, *([model.role] if model.role != "mixed" else [])]),
        "ray_actor_options": {"num_cpus": 0},
        "placement_group_bundles": [{"CPU": 1}] * model.engine.world_size,  # the replica itself takes nothing
        "placement_group_strategy": "PACK",
        "max_constructor_retry_count": 1,  # a model that cannot be loaded will not load the next time
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 15.0,
        "graceful_shutdown_wait_loop_s": 0.1,  # nothing comes by Serve's handles that it could wait for
        "graceful_shutdown_timeout_s": _SHUTDOWN_TIMEOUT,
        **model.deployment,
        **serve_options(model),
    }
    num_shards = config.scheduler.scheduler_shards
    versioned: Any = keep_version(deployment.options(**options), group_version(model, num_shards))
    return versioned.bind(
        model.model_id,
        model.engine,
        _LOAD_TIMEOUT,
        _drain_timeout(model.deployment),
        num_shards,
        config.observability,
        model.role,
        options["max_constructor_retry_count"],
    )


def _drain_timeout(deployment: dict[str, Any]) -> float:
    """Seconds for a group's sequences to move."""
    return max(0.0, deployment.get("graceful_shutdown_timeout_s", _SHUTDOWN_TIMEOUT) - _END_SECONDS)
