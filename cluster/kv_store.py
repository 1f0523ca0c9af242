"""KVStore: the object-store tier of the prefix cache on one node, an actor that outlives the worker groups there.

It calls the ranks that hold a run of blocks, and what they return is an object that belongs to it: Ray makes the
caller the owner, so the object stays when the worker dies, and other nodes read it through Ray's object manager. (What
a worker puts into the object store itself dies with the worker.) It never looks at the bytes.

To Ray a node with an actor is not idle, so a store without a group on its node goes after a while, and the node can.

Its byte budget is its own: what does not fit is dropped by what it is worth (`scheduler.run_store`). Ray would rather
spill to disk, which is slower than computing.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ..scheduler.prefix_index import pack, unpack
from ..scheduler.run_store import Run, RunStore
from . import global_scheduler
from .global_scheduler import CALL_TIMEOUT, FORGOTTEN_SECONDS, NAMESPACE, StoreAnswer, StoreReport, StoreStats

if TYPE_CHECKING:
    from ..workers.kv_piece import KVPiece

logger = logging.getLogger(__name__)

PACK_SECONDS = 10.0  # for all ranks to hand out a run
_REPORT_SECONDS = 1.0
_FORGET_MEMBER_SECONDS = 300.0  # a group that starts has joined before the global scheduler has it
_LEASE_GRACE_SECONDS = 5.0  # a reader that is late by so much is gone


@dataclass(frozen=True, slots=True)
class KVOffer:
    """A run of blocks that a group would give away."""

    parent: bytes | None  # hash of the block before; None: it begins a prompt
    hashes: bytes  # packed
    block_ids: tuple[int, ...]
    num_bytes: int  # about
    seconds: float  # to compute it again
    until: float  # by this host's monotonic clock: from then on the group may put other tokens into the blocks


@dataclass(frozen=True, slots=True)
class KVPart:
    """Blocks `first` to `first + count` of a run, as the pieces that its ranks gave."""

    first: int
    count: int
    pieces: "tuple[tuple[KVPiece, ray.ObjectRef], ...]"


@dataclass(frozen=True, slots=True)
class KVRead:
    """What a store has of the blocks that were asked for, from the first on. It keeps them until the lease ends."""

    lease: int
    parts: tuple[KVPart, ...]


@dataclass(slots=True)
class _Member:
    leader: ActorHandle
    packers: tuple[ActorHandle, ...]  # of the ranks whose pieces make a whole block
    heard: float  # when the global scheduler had it last


class KVStore:
    """The actor's class. All methods run on one event loop and are bounded."""

    def __init__(self, application: str, node_id: str, num_shards: int = 1):
        self.node_id = node_id
        self.schedulers = global_scheduler.connect_all(application, num_shards)
        self.runs = RunStore(0)
        self.members: dict[str, _Member] = {}
        self.leases: dict[int, tuple[list[Run], asyncio.TimerHandle]] = {}
        self.num_leases = 0
        self.num_reads = self.num_published = self.num_refused = self.num_failed = 0
        self.idle_seconds = 0.0  # without a group here, after which it goes
        self._news = asyncio.Event()
        self._awaiting: list[asyncio.Future[None]] = []  # the next report
        self._reporter = asyncio.get_running_loop().create_task(self._report_for_ever())

    # -- what leaders on this node call -------------------------------------------------------------------------------

    async def join(
        self, group_id: str, budget: int, idle_seconds: float, leader: ActorHandle, packers: Sequence[ActorHandle]
    ) -> None:
        """A group will offer blocks. Budget and time without any group are the largest that any has asked for."""
        self.members[group_id] = _Member(leader, tuple(packers), time.monotonic())
        self.runs.budget = max(self.runs.budget, budget)
        self.idle_seconds = max(self.idle_seconds, idle_seconds)

    async def publish(self, group_id: str, offer: KVOffer) -> str:
        """Take a run, if it is worth it. The group keeps its blocks as they are until this returns.

        Returns "stored", "known", "refused", "orphan" (what it follows is not here), "failed", or "unknown" for a
        group that has not joined.
        """
        member = self.members.get(group_id)
        if member is None:
            return "unknown"
        hashes, now = unpack(offer.hashes), time.monotonic()
        held = self.runs.num_held(hashes)
        if held == len(hashes):
            return "known"
        if now + PACK_SECONDS > offer.until:  # this process was held up
            self.num_failed += 1
            return "failed"
        parent = hashes[held - 1] if held else offer.parent
        if not self.runs.holds(parent):
            return "orphan"
        share = (len(hashes) - held) / len(hashes)
        run, evicted = self.runs.reserve(
            parent, hashes[held:], int(offer.num_bytes * share), offer.seconds * share, now
        )
        self._tell_dropped(evicted)
        if run is None:
            self.num_refused += 1
            return "refused"
        try:
            pieces = await asyncio.wait_for(self._pull(member, offer.block_ids[held:]), PACK_SECONDS)
        except (ray.exceptions.RayError, TimeoutError) as error:
            logger.warning("group %s did not hand out a run: %r", group_id, error)
            pieces = ()
        # What came late may have been packed when the group no longer kept it as it was.
        if not pieces or time.monotonic() - now > PACK_SECONDS:
            self.runs.cancel(run)
            self.num_failed += 1
            return "failed"
        if not self.runs.add(run, pieces, sum(piece.num_bytes for piece, _ in pieces)):
            return "orphan"
        self.num_published += 1
        self._news.set()
        return "stored"

    async def reported(self) -> None:
        """Return once the global scheduler knows of all that is here now."""
        known: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._awaiting.append(known)
        self._news.set()
        await asyncio.wait_for(known, CALL_TIMEOUT)

    async def _pull(self, member: _Member, block_ids: Sequence[int]) -> "tuple[tuple[KVPiece, ray.ObjectRef], ...]":
        """Have each rank pack its part. The bytes stay where they are; only what they are comes here."""
        answers: list[Any] = [p.pack_kv.options(num_returns=2).remote(block_ids) for p in member.packers]
        headers: list[KVPiece] = await asyncio.gather(*(header for header, _ in answers))
        return tuple(zip(headers, (data for _, data in answers), strict=True))

    # -- what leaders anywhere call -----------------------------------------------------------------------------------

    async def read(self, hashes: bytes, seconds: float) -> KVRead:
        """Where the first of these blocks are, as many as are here; kept for so many seconds, or until `release`."""
        parts = self.runs.read(unpack(hashes), time.monotonic())
        self.num_leases += 1
        self.num_reads += bool(parts)
        lease, loop = self.num_leases, asyncio.get_running_loop()
        timer = loop.call_later(seconds + _LEASE_GRACE_SECONDS, self._end_lease, lease)
        self.leases[lease] = [p.run for p in parts], timer
        return KVRead(lease, tuple(KVPart(p.first, p.count, p.run.payload) for p in parts))

    async def release(self, lease: int, bad_part: int | None = None) -> None:
        """Done reading. `bad_part` was lost or damaged: nobody should be sent to it again."""
        runs = self._end_lease(lease)
        if bad_part is not None and bad_part < len(runs):
            self._tell_dropped(self.runs.drop(runs[bad_part]))

    def _end_lease(self, lease: int) -> list[Run]:
        runs, timer = self.leases.pop(lease, ([], None))
        if timer is not None:
            timer.cancel()
        self.runs.unpin(runs)
        return runs

    async def stats(self) -> StoreStats:
        runs = self.runs
        counts = self.num_published, self.num_refused, self.num_failed, runs.num_evicted, self.num_reads
        return StoreStats(runs.budget, runs.num_bytes, len(runs), *counts)

    # -- telling ------------------------------------------------------------------------------------------------------

    def _tell_dropped(self, runs: Sequence[Run]) -> None:
        """To the groups here, which then offer it again when it is computed again; the index hears of it anyhow."""
        if runs:
            dropped = pack(h for run in runs for h in run.hashes)
            for member in self.members.values():
                member.leader.kv_dropped.remote(dropped)  # whether it lives is not ours to know
            self._news.set()

    def _keep_members(self, groups: Collection[str], now: float) -> None:
        """Forget groups that the global scheduler has not had for a while; one that is there after all joins again."""
        for group_id, member in list(self.members.items()):
            if group_id in groups:
                member.heard = now
            elif now - member.heard > _FORGET_MEMBER_SECONDS:
                del self.members[group_id]

    async def _report_for_ever(self) -> None:
        """Tell the global scheduler what is here, as it changes and once a second; end when there is none any more, or
        no group here."""
        snapshot, last_heard = True, time.monotonic()
        last_used = last_heard
        while True:
            if not snapshot:
                try:
                    await asyncio.wait_for(self._news.wait(), _REPORT_SECONDS)
                except TimeoutError:
                    pass
            self._news.clear()
            awaiting, log = len(self._awaiting), self.runs.log
            events = log.snapshot(self.runs.hashes()) if snapshot else log.take_events()
            report = StoreReport(self.node_id, events, await self.stats())
            try:
                calls = [s.report_store.remote(report) for s in self.schedulers]
                answers: list[StoreAnswer] = await asyncio.wait_for(asyncio.gather(*calls), CALL_TIMEOUT)
                known = all(answer.known for answer in answers)
                snapshot, last_heard = not known, time.monotonic()
                groups = {group_id for answer in answers for group_id in answer.groups}
                self._keep_members(groups, last_heard)
                if self.leases or groups:
                    last_used = last_heard
                elif last_heard - last_used > max(self.idle_seconds, FORGOTTEN_SECONDS):
                    logger.info("the store of node %s goes: it has had no group for a while", self.node_id)
                    gone = [s.remove_store.remote(self.node_id) for s in self.schedulers]
                    await asyncio.wait_for(asyncio.gather(*gone), CALL_TIMEOUT)
                    break
                if known:
                    for future in self._awaiting[:awaiting]:
                        if not future.done():  # else nobody waits any longer
                            future.set_result(None)
                    del self._awaiting[:awaiting]
            except ray.exceptions.ActorDiedError:
                break
            except (ray.exceptions.RayError, TimeoutError) as error:
                logger.warning("the store of node %s cannot reach the global scheduler: %r", self.node_id, error)
                if time.monotonic() - last_heard > FORGOTTEN_SECONDS:
                    break
                snapshot = True
                await asyncio.sleep(_REPORT_SECONDS)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def _name(application: str, node_id: str) -> str:
    return f"{application}:kv_store:{node_id}"


def connect(application: str, node_id: str, num_shards: int) -> ActorHandle:
    """The application's store on a node, started by whoever asks first. Detached: it outlives who asked.

    `num_shards`: how many global schedulers there are.
    """
    actor: Any = ray.remote(KVStore)
    return actor.options(
        name=_name(application, node_id),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=0,  # what it owned is lost; the next offer starts another
        max_concurrency=1000,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        num_cpus=0,
    ).remote(application, node_id, num_shards)


def find(application: str, node_id: str) -> ActorHandle:
    """The store of another node. Raises ValueError where there is none."""
    return ray.get_actor(_name(application, node_id), NAMESPACE)
