"""Builds the Serve application: the only place where its parts are put together.

`serve run pagedray.cluster.app:build`, a Serve YAML's `import_path` and `pagedray serve` all come through here.
"""

from typing import Any

from ray import serve
from ray.serve import Application

from .config import ApplicationConfig, check_split
from .http_server import ListenAddress
from .ingress import Ingress
from .worker_group import WorkerGroup

_LOAD_TIMEOUT = 1800.0  # seconds for a group to load its weights
_SHUTDOWN_TIMEOUT = 30.0  # seconds that Serve gives a group that it takes away
_END_SECONDS = 8.0  # of them, for what follows when its sequences have moved


def build(args: dict[str, Any]) -> Application:
    """The application for these arguments (Ray Serve LLM's schema, see `cluster/config.py`).

    Raises `ConfigError` for arguments that are wrong, before anything starts.
    """
    return application(ApplicationConfig.parse(args))


def application(config: ApplicationConfig, listen: ListenAddress | None = None) -> Application:
    """The same of parsed arguments; with `listen` the ingress serves HTTP there itself, without Serve's proxy."""
    for i, model in enumerate(config.models):
        check_split(model.engine, f"llm_configs[{i}].engine_kwargs")
    group_class: Any = serve.deployment(
        WorkerGroup
    )  # Serve's decorators turn classes into deployments, which type checkers miss
    ingress_class: Any = Ingress
    groups = [
        group_class.options(
            **{
                "name": f"WorkerGroup:{model.model_id}",
                "ray_actor_options": {"num_cpus": 0},
                "placement_group_bundles": [{"CPU": 1}] * model.engine.world_size,  # the replica itself takes nothing
                "placement_group_strategy": "PACK",
                "max_constructor_retry_count": 1,  # a model that cannot be loaded will not load the next time
                "health_check_period_s": 2.0,
                "health_check_timeout_s": 15.0,
                "graceful_shutdown_wait_loop_s": 0.1,  # nothing comes by Serve's handles that it could wait for
                "graceful_shutdown_timeout_s": _SHUTDOWN_TIMEOUT,
                **model.deployment,
            }
        ).bind(model.model_id, model.engine, _LOAD_TIMEOUT, _drain_timeout(model.deployment))
        for model in config.models
    ]
    return ingress_class.options(
        **{
            "ray_actor_options": {"num_cpus": 0},
            "max_ongoing_requests": 4096,  # streams that are open; the queue's bound is the scheduler's
            **config.ingress,
        }
    ).bind(config, listen, *groups)


def _drain_timeout(deployment: dict[str, Any]) -> float:
    """Seconds for a group's sequences to move."""
    return max(0.0, deployment.get("graceful_shutdown_timeout_s", _SHUTDOWN_TIMEOUT) - _END_SECONDS)
