"""Ranks for a leader that is no actor: the offline `LLM`, rank 0 itself, has the others in a Ray cluster."""

import logging
import os

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from ..scheduler.errors import EngineDead
from ..workers.config import EngineConfig
from .ranks import RankPlaces

_PLACE_SECONDS = 60.0


class DriverRanks:
    """A placement group of one CPU for every rank but this process, in the cluster that it is connected to.

    Where it is connected to none, in that of RAY_ADDRESS; else in one of its own, which goes with `close`. Raises
    `EngineDead` where the cluster has no room within a minute.
    """

    def __init__(self, config: EngineConfig):
        others = config.world_size - 1
        self._own_ray = not ray.is_initialized()
        if self._own_ray:
            _connect(config.world_size)
        self._placement_group = placement_group([{"CPU": 1}] * others, strategy="PACK")
        try:
            if not self._placement_group.wait(_PLACE_SECONDS):
                free = ray.available_resources().get("CPU", 0)
                raise EngineDead(
                    f"no room for {others} ranks of one CPU each beside this process within {_PLACE_SECONDS:.0f} s: "
                    f"the Ray cluster has {free:g} CPUs free"
                )
            here = ray.get_runtime_context().get_node_id()
            self.places = RankPlaces.beside(here, self._placement_group)
            self.host = ray.util.get_node_ip_address()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if not ray.is_initialized():
            return
        remove_placement_group(self._placement_group)
        if self._own_ray:
            ray.shutdown()


def _connect(num_ranks: int) -> None:
    address = os.environ.get("RAY_ADDRESS") or "local"
    if address != "local":
        ray.init(address, logging_level=logging.ERROR)
        return
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # nobody else uses it; else Ray may ask for tokens
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray runs workers at nice 15, and here all ranks wait for each other
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns of its own future
    num_cpus = max(os.cpu_count() or 1, num_ranks)  # Ray only counts them
    ray.init("local", include_dashboard=False, num_cpus=num_cpus, logging_level=logging.ERROR, log_to_driver=False)
