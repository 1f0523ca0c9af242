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
    """A placement group of one CPU, and with `device: cuda` one GPU, for every rank but this process, in the cluster
    that it is connected to.

    Where it is connected to none, in that of RAY_ADDRESS; else in one of its own, which goes with `close`. This process
    takes a GPU that it sees and no rank has; Ray does not know of that one. Raises `EngineDead` where the cluster has
    no room within a minute.
    """

    def __init__(self, config: EngineConfig):
        self._own_ray = not ray.is_initialized()
        if self._own_ray:
            _connect(config.world_size)
        others = bundles(config)
        self._placement_group = placement_group(others, strategy="PACK")
        try:
            if not self._placement_group.wait(_PLACE_SECONDS):
                free = ray.available_resources()
                there = " and ".join(f"{free.get(kind, 0):g} {kind}s" for kind in others[0])
                raise EngineDead(
                    f"no room for {len(others)} ranks of one {' and one '.join(others[0])} each beside this process "
                    f"within {_PLACE_SECONDS:.0f} s: the Ray cluster has {there} free"
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


def bundles(config: EngineConfig) -> list[dict[str, float]]:
    """What each rank but this process takes."""
    bundle = {"CPU": 1.0, "GPU": 1.0} if config.device == "cuda" else {"CPU": 1.0}
    return [dict(bundle) for _ in range(config.world_size - 1)]


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
