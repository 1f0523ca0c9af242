"""What a changed document restarts: the deployments whose own settings changed, and no other.

Serve (2.60) gives all deployments of an application one version, a hash of the whole document, and restarts every
replica when that changes: another limit of one tenant would load every model anew. So each deployment of ours gets a
version that stands for what its replicas are made of, and keeps it when Serve says another. There is no public setting.
"""

import hashlib
import json
from dataclasses import asdict, replace
from typing import Any

from ray.serve import Deployment
from ray.serve._private.config import DeploymentConfig

from .. import __version__
from .config import ApplicationConfig, ModelDeployment


def ingress_version(config: ApplicationConfig) -> str:
    """An ingress takes everything else in while it runs (`Ingress.reconfigure`)."""
    observability = asdict(replace(config.observability, vllm_metric_names=False))
    return _digest("ingress", config.scheduler.scheduler_shards, config.files and asdict(config.files), observability)


def group_version(model: ModelDeployment, num_shards: int) -> str:
    """A worker group is made for its engine and role, and finds its schedulers when it starts. Where traces and logs go
    it is told then, too: that alone is no reason to load a model again. How answers are sampled ingresses say.

    Replicas and autoscaling Serve changes by itself; resources restart it.
    """
    engine = replace(model.engine, generation_config="auto")
    return _digest(model.model_id, asdict(engine), model.role, num_shards)


def keep_version(deployment: Deployment, version: str) -> Deployment:
    """The deployment, whose replicas are restarted when `version` or its resources change."""
    config = deployment._deployment_config
    config.version = version
    config.__class__ = _Versioned
    return deployment


class _Versioned(DeploymentConfig):
    def __setattr__(self, name: str, value: Any) -> None:
        if name != "version":
            super().__setattr__(name, value)


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps([__version__, *parts], sort_keys=True, default=str).encode()).hexdigest()
