"""Ray Serve's autoscaling of worker groups, by what the global scheduler knows of their load.

Serve's controller calls the policy ten times a second on its event loop, where nothing may block: a thread asks the
scheduler, each call bounded, and the policy reads what came last. While nothing new has come, because the scheduler is
restarting or does not answer, what was decided last holds. A policy that raises would keep Serve from scaling any
deployment of the application, so this one never does.

The decision itself is `scheduler/autoscaling.py`, damping included, so Serve's own delays and factors are turned off.
"""

import logging
import threading
import time
import weakref
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import ray

from ..scheduler.autoscaling import Demand, Scaler, ScalingOptions
from . import global_scheduler
from .config import SCALING_POLICY, ModelDeployment

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

logger = logging.getLogger("ray.serve")  # the policy runs in Serve's controller: its log shows why groups come and go

_ASK_SECONDS = 1.0
_SOON_SECONDS = 0.05
_STARTS = 3  # that may fail before Serve gives a model up that has never served


def serve_options(model: ModelDeployment) -> dict[str, Any]:
    """The options of the model's deployment that make Serve scale it so; none where it is not ours to scale."""
    if model.scaling is None:
        return {}
    given = model.deployment.get("autoscaling_config", {})
    config = {
        "min_replicas": model.scaling.min_groups,
        "max_replicas": model.scaling.max_groups,
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
        "downscale_to_zero_delay_s": 0.0,
        "policy": {
            "policy_function": SCALING_POLICY,
            "policy_kwargs": {"model": model.model_id, **asdict(model.scaling)},
        },
        **({"initial_replicas": given["initial_replicas"]} if "initial_replicas" in given else {}),
    }
    # A model whose first start fails for a passing reason must be able to wake another time.
    starts = model.deployment.get("max_constructor_retry_count", _STARTS)
    return {"num_replicas": None, "autoscaling_config": config, "max_constructor_retry_count": starts}


class GroupScaling:
    """A policy of Serve: called with a deployment's context, it says how many replicas (groups) there should be.

    Serve makes one for a deployment, and another when that is deployed again.
    """

    def __init__(self, model: str, **options: Any):
        self.model = model
        self._scaler = Scaler(ScalingOptions(**options))
        self._feed: _Feed | None = None
        self._seen = 0

    def __call__(self, context: "AutoscalingContext") -> tuple[int, dict[str, Any]]:
        try:
            return self._decide(context), {}
        except Exception:
            logger.exception("%s stays at %d groups", self.model, context.target_num_replicas)
            return context.target_num_replicas, {}

    def _decide(self, context: "AutoscalingContext") -> int:
        target = context.target_num_replicas
        if self._feed is None:
            self._feed = _Feed()
            arguments = self._feed, context.app_name, self.model
            threading.Thread(target=_ask_for_ever, args=arguments, name="demand", daemon=True).start()
            weakref.finalize(self, self._feed.stop.set)
        number, demand = self._feed.latest
        if number == self._seen:
            return target
        self._seen = number
        decision = self._scaler.decide(demand, target, time.monotonic())
        if decision.num_groups != target:
            logger.info(
                "%s: from %d to %d groups (%s; a load of %.2f groups). %s",
                self.model,
                target,
                decision.num_groups,
                decision.reason,
                decision.need,
                demand,
            )
        return decision.num_groups


class _Feed:
    """What the thread has learned last, and the word to end it. It must not hold the policy, or neither would end."""

    def __init__(self) -> None:
        self.latest = 0, Demand()  # the number counts answers
        self.stop = threading.Event()


def _ask_for_ever(feed: _Feed, application: str, model: str) -> None:
    scheduler: Any = None
    number, failed = 0, False
    while not feed.stop.is_set():
        pause = _ASK_SECONDS
        try:
            scheduler = scheduler or global_scheduler.find(application)
            asked = scheduler.demand.remote(model, number == 0)
            demand: Demand = ray.get(asked, timeout=global_scheduler.CALL_TIMEOUT)
            if not demand.num_groups and not demand.num_queued:
                pause = _SOON_SECONDS  # it sleeps: the next call returns when it is wanted
            number += 1
            feed.latest = number, demand
            failed = False
        except Exception as error:  # whatever it is, the next answer may be better
            if not failed:
                logger.warning("the global scheduler does not say what %s needs: %r", model, error)
            scheduler, failed = None, True
        feed.stop.wait(pause)
