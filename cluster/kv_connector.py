"""A worker group's side of sharing KV: its leader's event loop carries out what the engine orders.

Fetches run side by side: each asks a store where the blocks are, has every rank write its own part of them, and tells
the engine how many came. Publications go one after the other, as a run follows its parent. Neither holds up the
engine's thread: copies are made in threads of their own, on every rank.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle

from ..scheduler.errors import KVTransferError
from ..scheduler.kv_fetch import KVFetch
from ..scheduler.kv_publish import Publication
from ..scheduler.kv_sources import FetchOutcome
from ..scheduler.prefix_index import pack
from . import kv_store
from .global_scheduler import CALL_TIMEOUT
from .kv_store import PACK_SECONDS, KVOffer, KVPart, KVRead
from .tasks import Tasks

if TYPE_CHECKING:
    from ..workers.engine import Engine
    from ..workers.kv_transfer import KVPort

logger = logging.getLogger(__name__)

_STORE_SHARE = 0.5  # of the node's object store, which begins to spill at 0.8
_RANK_SECONDS = 60.0  # beyond the deadline; a rank that is late by so much has not ended, and is not known to be lost
_NICENESS = 10  # of the thread that packs: nobody waits for it


@dataclass(frozen=True, slots=True)
class Unpacked:
    """What a rank made of a fetch: so many blocks are in place; why not all."""

    num_blocks: int
    failure: str = ""


class KVThreads:
    """A rank's two threads beside the one that computes, and the KV tensors they work on."""

    def __init__(self, port: "KVPort"):
        self.port = port
        self.packing = ThreadPoolExecutor(1, "kv-pack", _single_threaded, (_NICENESS,))
        self.unpacking = ThreadPoolExecutor(1, "kv-unpack", _single_threaded, (0,))

    def unpack(self, parts: Sequence[KVPart], block_ids: Sequence[int], seconds: float) -> Unpacked:
        """Write the blocks of `parts` into `block_ids`, beginning none after so many seconds. In `unpacking`."""
        deadline, shard = time.monotonic() + seconds, self.port.shard
        mine = [[(piece, ref) for piece, ref in part.pieces if piece.overlaps(shard)] for part in parts]
        done = 0
        try:
            refs = list({ref for pieces in mine for _, ref in pieces})
            ray.wait(refs, num_returns=len(refs), timeout=0)  # all set out at once
            for part, pieces in zip(parts, mine, strict=True):
                left = max(0.0, deadline - time.monotonic())
                data = ray.get([ref for _, ref in pieces], timeout=left)
                target = block_ids[done : done + part.count]
                self.port.unpack([(p, d) for (p, _), d in zip(pieces, data, strict=True)], part.first, target)
                done += part.count
        except ray.exceptions.GetTimeoutError:
            return Unpacked(done, "late")
        except ray.exceptions.RayError as error:
            logger.warning("blocks are lost: %s", " ".join(str(error).split())[:300])
            return Unpacked(done, "lost")
        except KVTransferError as error:
            logger.warning("blocks cannot be used: %s", error)
            return Unpacked(done, "unusable")
        return Unpacked(done)


def _single_threaded(niceness: int) -> None:
    """Copies take one core at most; on Linux a thread has a niceness of its own."""
    import torch

    torch.set_num_threads(1)
    if niceness and hasattr(os, "setpriority"):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + niceness)


class KVConnector:
    """Lives on the leader's event loop. `in_engine` has a function run by the engine's thread, between two steps;
    `hand_over` gives requests away that another group can go on with."""

    def __init__(
        self,
        application: str,
        group_id: str,
        engine: "Engine",
        ranks: dict[int, ActorHandle],
        leader: ActorHandle,
        in_engine: "Callable[[Callable[[Engine], None]], None]",
        num_shards: int,
        hand_over: Callable[[Sequence[str]], None],
        role: str = "mixed",
    ):
        """`num_shards`: how many global schedulers there are."""
        self.application, self.group_id, self.num_shards = application, group_id, num_shards
        self.node_id = ray.get_runtime_context().get_node_id()
        self.config = engine.config.kv_transfer_config
        self.block_bytes = engine.block_bytes
        self.threads = KVThreads(engine.executor.worker.kv_port)
        self.ranks, self.leader, self.in_engine, self.hand_over = ranks, leader, in_engine, hand_over
        # Ranks beyond the number of heads have the same part: one of them gives it.
        parts = {(s.layers.start, s.kv_heads.start): s.rank for s in reversed(engine.executor.shards)}
        self.packers = [ranks.get(rank, leader) for rank in sorted(parts.values())]
        self.outcomes: list[FetchOutcome] = []  # since they were last taken
        self._own_store: ActorHandle | None = None
        self._stores: dict[str, ActorHandle] = {}
        self._offers: asyncio.Queue[tuple[Publication, float]] = asyncio.Queue()
        self._tasks = Tasks()
        if self.config.publishes:
            self._tasks.spawn(self._publish_for_ever(at_once=role == "prefill"))

    def begin(
        self,
        fetches: Sequence[KVFetch],
        publications: Sequence[tuple[Publication, float]],
        hand_overs: Sequence[str] = (),
    ) -> None:
        """Carry out what the engine has ordered."""
        for order in fetches:
            self._tasks.spawn(self._fetch(order))
        for publication in publications:
            self._offers.put_nowait(publication)
        if hand_overs:
            self._tasks.spawn(self._hand_over(hand_overs))

    def take_outcomes(self) -> tuple[FetchOutcome, ...]:
        outcomes, self.outcomes = self.outcomes, []
        return tuple(outcomes)

    async def pack(self, block_ids: Sequence[int]) -> Any:
        """Rank 0's part of some blocks."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.threads.packing, self.threads.port.pack, block_ids)

    # -- fetching -----------------------------------------------------------------------------------------------------

    async def _fetch(self, order: KVFetch) -> None:
        began = time.monotonic()
        source, left = order.source, order.deadline - began
        count, failure, bad_part, store = 0, "", None, None
        read: KVRead | None = None
        try:
            store = await self._find_store(source.store)
            read = await asyncio.wait_for(store.read.remote(pack(order.hashes), left), left)
        except (ray.exceptions.RayError, TimeoutError, ValueError) as error:
            logger.warning("the store of node %s cannot be read: %r", source.store, error)
            self._stores.pop(source.store, None)
            failure = "unreachable"
        if read is not None and not read.parts:
            failure = "gone"
        elif read is not None:
            results = await self._unpack(read.parts, order)
            if results is None:
                return  # a rank may still write these blocks: they stay out of use
            worst = min(results, key=lambda r: r.num_blocks)
            count, failure = worst.num_blocks, worst.failure
            if failure in ("lost", "unusable"):
                ends, end = [], 0
                for part in read.parts:
                    end += part.count
                    ends.append(end)
                bad_part = next((i for i, end in enumerate(ends) if end > count), None)
        self.in_engine(lambda engine: engine.end_fetch(order.fetch_id, count))
        seconds = time.monotonic() - began
        same_node = source.store == self.node_id
        num_bytes = count * self.block_bytes
        self.outcomes.append(FetchOutcome(source.store, same_node, count, num_bytes, seconds, source.seconds, failure))
        if read is not None and store is not None:
            store.release.remote(read.lease, bad_part)  # its lease ends by itself, too

    async def _unpack(self, parts: Sequence[KVPart], order: KVFetch) -> list[Unpacked] | None:
        """What every rank has made of it. None: one has not ended."""
        left = max(0.0, order.deadline - time.monotonic())
        loop = asyncio.get_running_loop()
        calls = [rank.unpack_kv.remote(parts, order.block_ids, left) for rank in self.ranks.values()]
        mine = loop.run_in_executor(self.threads.unpacking, self.threads.unpack, parts, order.block_ids, left)
        everybody = asyncio.gather(mine, *calls, return_exceptions=True)
        try:
            results = await asyncio.wait_for(everybody, left + _RANK_SECONDS)
        except TimeoutError:
            logger.error("group %s: a rank has not ended fetching %d blocks", self.group_id, len(order.block_ids))
            return None
        return [r if isinstance(r, Unpacked) else Unpacked(0, "failed") for r in results]

    async def _find_store(self, node_id: str) -> ActorHandle:
        if node_id not in self._stores:
            find = asyncio.to_thread(kv_store.find, self.application, node_id)
            self._stores[node_id] = await asyncio.wait_for(find, CALL_TIMEOUT)
        return self._stores[node_id]

    # -- publishing ---------------------------------------------------------------------------------------------------

    async def _publish_for_ever(self, at_once: bool) -> None:
        """`at_once`: requests wait for what is published, so the store should be there before the first one."""
        if at_once:
            try:
                self._own_store = await self._join_store()
            except (ray.exceptions.RayError, TimeoutError) as error:
                logger.warning("group %s has no store yet: %r", self.group_id, error)
        while True:
            publication, seconds = await self._offers.get()
            taken = False
            try:
                taken = await self._publish(publication, seconds)
            except (ray.exceptions.RayError, TimeoutError) as error:
                logger.warning("group %s could not publish: %r", self.group_id, error)
                self._own_store = None
            except Exception:
                logger.exception("group %s could not publish", self.group_id)
            finally:
                self._end(publication.publication_id, taken)

    async def _hand_over(self, request_ids: Sequence[str]) -> None:
        """The store has their prompts: once the global scheduler knows it, another group can have them."""
        try:
            if self._own_store is not None:
                await asyncio.wait_for(self._own_store.reported.remote(), CALL_TIMEOUT)
        except (ray.exceptions.RayError, TimeoutError) as error:
            logger.warning("group %s keeps %d requests: %r", self.group_id, len(request_ids), error)
        else:
            self.hand_over(request_ids)

    def _end(self, publication_id: int, taken: bool) -> None:
        self.in_engine(lambda engine: engine.end_publication(publication_id, taken))

    async def _publish(self, publication: Publication, seconds: float) -> bool:
        """Whether the store has taken it."""
        if self._own_store is None:
            self._own_store = await self._join_store()
        num_bytes = len(publication.block_ids) * self.block_bytes
        # Blocks must not change while the store still waits for them, nor when it comes to them late.
        kept = PACK_SECONDS + 2 * CALL_TIMEOUT
        until = time.monotonic() + kept - CALL_TIMEOUT / 2
        offer = KVOffer(publication.parent, pack(publication.hashes), publication.block_ids, num_bytes, seconds, until)
        answer: str = await asyncio.wait_for(self._own_store.publish.remote(self.group_id, offer), kept)
        if answer == "unknown":
            self._own_store = None
        return answer in ("stored", "known")

    async def _join_store(self) -> ActorHandle:
        """The store of this node; whatever was published before is not there."""
        self.in_engine(lambda engine: engine.forget_published(None))
        store = await asyncio.to_thread(kv_store.connect, self.application, self.node_id, self.num_shards)
        budget = self.config.store_memory or int(
            _STORE_SHARE * await asyncio.to_thread(_object_store_bytes, self.node_id)
        )
        joined: Any = store.join.remote(
            self.group_id, budget, self.config.store_idle_seconds, self.leader, self.packers
        )
        await asyncio.wait_for(joined, 3 * CALL_TIMEOUT)
        return store


def _object_store_bytes(node_id: str) -> float:
    return next(n["Resources"].get("object_store_memory", 0.0) for n in ray.nodes() if n["NodeID"] == node_id)
