"""A worker group's ranks in Ray: which bundle of its placement group each has, and the actors beside the leader."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

if TYPE_CHECKING:
    from ..workers.executor import GroupAddress
    from ..workers.worker import Worker
    from .kv_connector import KVThreads, Unpacked
    from .kv_store import KVPart

logger = logging.getLogger(__name__)


def assign_bundles(nodes: Sequence[str], tensor_parallel_size: int) -> tuple[int, ...]:
    """The bundle of each rank, where any would do; `nodes` says where each bundle lies.

    The ranks of a stage reduce in every layer, stages meet once a step: so stages that fit on one node are put there,
    and only what is left over is split between nodes.
    """
    on_node: dict[str, list[int]] = {}
    for bundle, node in enumerate(nodes):
        on_node.setdefault(node, []).append(bundle)
    whole: list[int] = []
    rest: list[int] = []
    for bundles in sorted(on_node.values(), key=lambda b: (-len(b), b)):
        cut = len(bundles) - len(bundles) % tensor_parallel_size
        whole += bundles[:cut]
        rest += bundles[cut:]
    return (*whole, *rest)


@dataclass(frozen=True, slots=True)
class RankPlaces:
    """Where a group's ranks are: a placement group that stands, and which of its bundles each rank has.

    `bundles[i]` is that of rank `first + i`. Picklable: the replica makes it, the leader uses it.
    """

    placement_group: PlacementGroup
    bundles: tuple[int, ...]
    first: int = 0  # 1 where rank 0 is in a driver, outside of the placement group

    @classmethod
    def of(cls, placement_group: PlacementGroup, tensor_parallel_size: int) -> "RankPlaces":
        """Bundles that are all alike go to ranks by node; others in the order in which they were written."""
        specs = placement_group.bundle_specs
        if any(spec != specs[0] for spec in specs):
            return cls(placement_group, tuple(range(len(specs))))
        return cls(placement_group, assign_bundles(_nodes(placement_group), tensor_parallel_size))

    @classmethod
    def beside(cls, node: str, placement_group: PlacementGroup) -> "RankPlaces":
        """For a rank 0 that is on `node` and in no bundle: the next ranks are those that are near to it."""
        nodes = _nodes(placement_group)
        bundles = sorted(range(len(nodes)), key=lambda bundle: (nodes[bundle] != node, nodes[bundle]))
        return cls(placement_group, tuple(bundles), first=1)

    def options(self, rank: int) -> dict[str, Any]:
        """Options of the rank's actor: it takes its whole bundle."""
        bundle = self.bundles[rank - self.first]
        resources = dict(self.placement_group.bundle_specs[bundle])
        memory = resources.pop("memory", None)
        return {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.placement_group, bundle),
            **({} if memory is None else {"memory": memory}),
        }

    def nodes(self) -> tuple[str, ...]:
        """Ids of the nodes of the ranks, from `first` on. Asks Ray."""
        nodes = _nodes(self.placement_group)
        return tuple(nodes[bundle] for bundle in self.bundles)

    def start(self, rank: int) -> ActorHandle:
        """Start the actor that will be a rank: a child of this process, which dies with it."""
        actor: Any = ray.remote(Rank)
        options = self.options(rank) | {"max_concurrency": 3}  # computing, packing, unpacking
        return actor.options(**options).remote()

    def launch(self, address: "GroupAddress", rank: int) -> "RankHandle":
        """Start a rank and have it join its group."""
        return RankHandle(self.start(rank), address, rank)


def _nodes(placement_group: PlacementGroup) -> list[str]:
    table = placement_group_table(placement_group)["bundles_to_node_id"]
    return [table[bundle] for bundle in range(placement_group.bundle_count)]


class Rank:
    """The actor of a rank that is not the leader."""

    kv: "KVThreads | None" = None  # once it has loaded

    def __init__(self) -> None:
        from ..workers import rank  # noqa: F401  # brings torch, before the leader needs this rank

    def run(self, address: "GroupAddress", rank: int) -> None:
        from ..workers import rank as workers_rank

        workers_rank.run(address, rank, on_ready=self._ready)

    def _ready(self, worker: "Worker") -> None:
        from .kv_connector import KVThreads

        self.kv = KVThreads(worker.kv_port)

    def pack_kv(self, block_ids: Sequence[int]) -> Any:
        """This rank's part of some blocks: what it is, and the bytes."""
        assert self.kv is not None, "asked by a leader that knows it as ready"
        return self.kv.packing.submit(self.kv.port.pack, block_ids).result()

    def unpack_kv(self, parts: "Sequence[KVPart]", block_ids: Sequence[int], seconds: float) -> "Unpacked":
        """Write blocks that others have packed; see `KVThreads.unpack`."""
        assert self.kv is not None, "asked by a leader that knows it as ready"
        return self.kv.unpacking.submit(self.kv.unpack, parts, block_ids, seconds).result()


class RankHandle:
    """What `workers.executor` wants to know of a rank that it did not start itself."""

    def __init__(self, actor: ActorHandle, address: "GroupAddress", rank: int):
        self.actor, self.rank = actor, rank
        self._running: Any = actor.run.remote(address, rank)

    def poll(self) -> str | None:
        """None while the rank runs, or is about to; else why it ended."""
        if not ray.wait([self._running], timeout=0)[0]:
            return None
        try:
            ray.get(self._running)
        except ray.exceptions.RayTaskError as error:
            return str(error.cause)
        except ray.exceptions.RayError as error:
            return " ".join(str(error).split())
        return "it has left"

    def stop(self, timeout: float) -> None:
        """End it by force if it has not gone by itself after `timeout` seconds."""
        try:
            ray.wait([self._running], timeout=timeout)
            ray.kill(self.actor)
        except ray.exceptions.RayError as error:
            logger.warning("rank %d could not be ended: %r", self.rank, error)
