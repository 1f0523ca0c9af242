"""A worker group: one model copy. `WorkerGroup` is its Serve replica, `Leader` the actor that runs the engine in it.

Serve owns the group's life: it places the replica's placement group, checks its health, restarts and drains it. The
leader and the other ranks (`cluster/ranks.py`) live in that placement group. The leader is a child of the replica, the
others are its own, so that each dies with its parent.

The group is the unit of failure. Where a rank is lost, the leader fails what it has, takes no more, and says so; the
replica ends the leader and itself; Serve makes both anew, in a placement group of their own, under a new id.
"""

import asyncio
import logging
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle

from ..scheduler.errors import EngineDead, GroupDrained, GroupLost, PagedRayError
from ..scheduler.prefix_index import unpack
from ..scheduler.request import Request, SequenceOutput
from ..workers.config import EngineConfig
from . import global_scheduler
from .channel import ChannelServer
from .config import ObservabilityOptions
from .global_scheduler import CALL_TIMEOUT, FORGOTTEN_SECONDS, GroupInfo, shutting_down
from .json_log import log_as_json
from .kv_connector import KVConnector
from .metrics.group import GroupClock
from .ranks import RankHandle, RankPlaces
from .scheduler_link import SchedulerLink
from .tasks import Tasks
from .token_stream import StreamAddress, TokenFrame, TokenServer
from .tracing import make_tracing

if TYPE_CHECKING:
    from ..workers.checkpoint.load import Progress
    from ..workers.engine import Engine
    from ..workers.executor import GroupAddress

logger = logging.getLogger(__name__)

_BEAT_SECONDS = 0.5
_COUNT_SECONDS = 0.1  # how often the load is counted while nothing ends
_STALLED_SECONDS = 0.02  # how often deadlines are looked at where nothing else happens
_STUCK_SECONDS = 60.0  # a step that takes longer than this is taken for a hang
_WATCH_SECONDS = 1.0  # how often a leader tells its replica that all is well
_SILENCE_SECONDS = 4.0  # a leader that has not told for so long is taken for dead
_LEAVE_SECONDS = 5.0  # for ranks to end by themselves
_PUBLISH_SECONDS = 3.0  # that sequences which will move wait for their KV to reach the node's store, running on
_DRAIN_POLL_SECONDS = 0.02


class Leader:
    """Rank 0: the engine in a thread of its own, and this actor's event loop in front of it.

    The thread alone touches the engine. Others put functions into `_inbox`, which it runs between steps. Tokens it
    sends itself, before it begins the next step, which takes all cores; all else it hands to the event loop.
    """

    def __init__(
        self,
        group_id: str,
        model: str,
        config: EngineConfig,
        schedulers: Sequence[ActorHandle],
        places: RankPlaces,
        application: str,
        observability: ObservabilityOptions,
        role: str = "mixed",
        began: float | None = None,  # on the wall clock: when its replica did
    ):
        self._laps = [("", time.time() if began is None else began)]  # what starting takes: until when, for what
        self._lap("processes")
        self.application = application
        self.role = role
        self.clock = GroupClock(group_id, make_tracing("group", observability))
        if observability.json_logs:
            log_as_json(f"group {group_id}")
        self.group_id = group_id
        self.model = model
        self.config = config
        self.links = [SchedulerLink(s, self._introduction, application, shard) for shard, s in enumerate(schedulers)]
        self.places = places
        self.requests: dict[str, tuple[str, Request]] = {}  # request id -> ingress id, request; unfinished ones
        self._tokens_made: dict[str, int] = {}  # by tenant, since they were last counted
        self._counted_at = 0.0
        self.error: BaseException | None = None
        self.draining = False
        self.over = False  # the application ends
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._step_began: float | None = None
        self._tasks = Tasks()
        # Beside this one. Their processes start and import while this one does.
        self.rank_actors = {rank: places.start(rank) for rank in range(1, config.world_size)}
        self.kv: KVConnector | None = None  # once it has loaded, where KV is shared

    async def load(self, timeout: float) -> None:
        """Load and warm up the model within `timeout` seconds, then join the cluster."""
        self.load_timeout = timeout
        self.loop = asyncio.get_running_loop()
        self.tokens = TokenServer(ray.util.get_node_ip_address(), self._ingress_lost, self._ingress_gone)
        self._dead = asyncio.Event()
        self.channel = ChannelServer(self.tokens.host, {"add_requests": self.add_requests})
        self._loaded: asyncio.Future[None] = self.loop.create_future()
        threading.Thread(target=self._run_engine, name="engine", daemon=True).start()
        while not self._loaded.done():
            await asyncio.gather(*[link.keep_alive() for link in self.links])
            await asyncio.wait([self._loaded], timeout=FORGOTTEN_SECONDS / 3)
        await self._loaded
        self.stats = self.engine.stats()
        if self.config.kv_transfer_config.shares:
            me = ray.get_runtime_context().current_actor
            self.kv = KVConnector(
                self.application,
                self.group_id,
                self.engine,
                self.rank_actors,
                me,
                self._in_engine,
                len(self.links),
                self._ask_to_move,
                self.role,
            )
        self.nodes = await asyncio.to_thread(self.places.nodes)
        await asyncio.gather(*[link.join() for link in self.links])
        self._lap("joining")
        self._say_what_it_took()
        self.engine.executor.prepare_grammars()  # not sooner: most starts are waited for, and most need none
        for link in self.links:
            self._tasks.spawn(link.report_for_ever(self.group_id, lambda: self.stats, self.clock.times))
        self._tasks.spawn(self._look_after())

    def _lap(self, name: str) -> None:
        self._laps.append((name, time.time()))

    def _say_what_it_took(self) -> None:
        laps = zip(self._laps, self._laps[1:], strict=False)
        parts = ", ".join(f"{name} {at - before:.1f}" for (_, before), (name, at) in laps)
        _say(f"a group of {self.model} is up after {self._laps[-1][1] - self._laps[0][1]:.1f} s ({parts})")

    # -- what the scheduler and ingresses call ------------------------------------------------------------------------

    async def add_requests(self, batch: Sequence[tuple[str, Request]], shard: int = 0) -> None:
        """Requests and their ingresses, from one of the global schedulers."""
        if self.error is not None:
            raise EngineDead(f"the engine of group {self.group_id} stopped: {self.error}")
        batch = [(i, r) for i, r in batch if r.request_id not in self.requests]  # may come twice
        link = self.links[shard]
        link.num_received += len(batch)
        for ingress_id, request in batch:
            self.requests[request.request_id] = ingress_id, request
            link.request_ids.add(request.request_id)
            self.tokens.outbox(ingress_id).request_ids.add(request.request_id)
        self.clock.received(request for _, request in batch)
        if self.error is not None:
            self._fail_all()
            return
        if self.over:
            await self.end_requests([request.request_id for _, request in batch])
            return
        self._inbox.put(lambda: self._add_to_engine([request for _, request in batch], link))
        if self.draining:  # it was on its way
            self._ask_to_move([request.request_id for _, request in batch])

    async def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._ended(request_id)
        self._inbox.put(lambda: self._abort_in_engine(request_ids))

    async def end_requests(self, request_ids: Sequence[str]) -> None:
        """The application ends, and these are not done yet; so do those that are still on their way here."""
        self.over = True
        self._break_off(request_ids, shutting_down())

    async def drain(self, seconds: float) -> int:
        """Have all sequences go on at other groups, and run them until they do.

        What they have computed goes to the node's store first. What is still here after `seconds` fails, and goes on
        once another group can take it; returns how many those were. The global scheduler must know that this group
        drains, or it would send more.
        """
        deadline = time.monotonic() + seconds
        if not self.draining:
            self.draining = True
            await self._publish_running(min(_PUBLISH_SECONDS, seconds / 2))
            self._ask_to_move(list(self.requests))
        while self.requests and self.error is None and time.monotonic() < deadline:
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        left = list(self.requests)
        self._break_off(left, GroupDrained("the worker group that held this request has left; send it again"))
        logger.info("group %s has been drained; %d sequences could not move", self.group_id, len(left))
        return len(left)

    async def leave(self, seconds: float) -> None:
        """Drain, in the background, and end; its replica hears of that and goes, too."""
        self._drainer = asyncio.create_task(self._leave(seconds))

    async def send_snapshot(self, _: None) -> None:
        """The scheduler has missed something of the cache's changes: tell it everything."""
        self._inbox.put(self._take_snapshot)

    async def pack_kv(self, block_ids: Sequence[int]) -> Any:
        """For the store of this node: rank 0's part of some blocks, what it is and the bytes."""
        assert self.kv is not None
        return await self.kv.pack(block_ids)

    async def kv_dropped(self, hashes: bytes) -> None:
        """The store of this node has dropped these blocks."""
        self._in_engine(lambda engine: engine.forget_published(unpack(hashes)))

    async def open_stream(self, ingress_id: str) -> StreamAddress:
        """Where the ingress finds its tokens from now on."""
        return self.tokens.open(ingress_id)

    async def watch(self) -> None:
        """Return after a second in which the engine has lived and moved; raise as soon as it does not."""
        try:
            await asyncio.wait_for(self._dead.wait(), _WATCH_SECONDS)
        except TimeoutError:
            pass
        if isinstance(self.error, GroupDrained):
            raise self.error
        if self.error is not None:
            raise EngineDead(f"the engine of group {self.group_id} stopped: {self.error}")
        began = self._step_began
        if began is not None and time.monotonic() - began > _STUCK_SECONDS:
            raise EngineDead(f"the engine of group {self.group_id} has been in one step for {_STUCK_SECONDS:.0f} s")

    async def close(self) -> None:
        """End the other ranks."""
        await asyncio.to_thread(self.engine.close)

    # -- the engine's thread ------------------------------------------------------------------------------------------

    def _run_engine(self) -> None:
        try:
            from ..workers.engine import Engine  # brings torch, which only this process needs
            from ..workers.executor import make_executor
            from .text.grammar import GrammarCompiler

            self._lap("imports")
            # Here and not elsewhere: how many threads an operation uses is a setting of the thread that calls it.
            host = ray.util.get_node_ip_address()  # the one that other nodes know, of a host with several
            progress = _show_progress(self.model)
            executor = make_executor(
                self.config, progress, self._launch, host, GrammarCompiler, start_timeout=self.load_timeout
            )
            shares_kv = self.config.kv_transfer_config.shares
            self.engine = Engine(self.config, grammar_backend=GrammarCompiler, executor=executor, shares_kv=shares_kv)
            self._lap("weights")
            _say(f"warming up {self.model}")
            self.engine.warm_up()
            self._lap("warm-up")
            self._count()  # a group that says nothing of its load is doubted
        except BaseException as error:
            self.loop.call_soon_threadsafe(self._loaded.set_exception, error)
            return
        self.loop.call_soon_threadsafe(self._loaded.set_result, None)
        try:
            while True:
                while not self._inbox.empty() or not self.engine.has_unfinished():
                    self._inbox.get()()
                self._step_began = began = time.monotonic()
                outputs = self.engine.step()
                self._step_began = None
                self._send(outputs)
                self._order_kv()
                if self.engine.stalled:
                    self._wait_for_news()
                self.stats = self.engine.stats()
                self.clock.stepped(began, outputs, self.stats.num_scheduled_tokens)
                ended = [o.request_id for o in outputs if o.finish_reason]
                if ended or time.monotonic() > self._counted_at + _COUNT_SECONDS:
                    self._count()
                if ended:
                    self.loop.call_soon_threadsafe(self._all_ended, ended)
        except BaseException as error:  # whatever it is, nobody else would tell
            logger.exception("the engine of group %s stopped", self.group_id)
            self.loop.call_soon_threadsafe(self._die, error)

    def _launch(self, address: "GroupAddress", rank: int) -> RankHandle:
        return RankHandle(self.rank_actors[rank], address, rank)

    def _in_engine(self, function: "Callable[[Engine], None]") -> None:
        def run() -> None:
            function(self.engine)
            self._order_kv()
            self.stats = self.engine.stats()
            self._count()

        self._inbox.put(run)

    def _order_kv(self) -> None:
        """Have blocks fetched that sequences wait for, and given away that others may want."""
        if self.kv is not None:
            hand_overs = self.engine.take_hand_overs()
            fetches, publications = self.engine.take_fetches(), self.engine.take_publications()
            if fetches or publications or hand_overs:
                self.loop.call_soon_threadsafe(self.kv.begin, fetches, publications, hand_overs)

    def _wait_for_news(self) -> None:
        """All sequences wait for blocks: until something comes, or one of them has waited long enough."""
        try:
            self._inbox.get(timeout=_STALLED_SECONDS)()
        except queue.Empty:
            pass

    def _count(self) -> None:
        self._counted_at = time.monotonic()
        load, events = self.engine.load(), self.engine.take_block_events()
        for link in self.links:
            link.take_load(load)
            link.served.extend(self._tokens_made.items())
            if events is not None:
                link.blocks.append(events)
        self._tokens_made.clear()

    def _take_snapshot(self) -> None:
        snapshot = self.engine.block_snapshot()
        for link in self.links:
            link.blocks.append(snapshot)
        self.loop.call_soon_threadsafe(self._report)

    def _add_to_engine(self, requests: Sequence[Request], link: SchedulerLink) -> None:
        link.num_in_engine += len(requests)
        for request in requests:
            try:
                self.engine.add_request(request)
            except PagedRayError as error:
                self.loop.call_soon_threadsafe(self._fail, request.request_id, error)

    def _abort_in_engine(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.engine.abort_request(request_id)
        self.stats = self.engine.stats()
        self._count()
        self.loop.call_soon_threadsafe(self._report)

    def _send(self, outputs: Sequence[SequenceOutput]) -> None:
        by_ingress: dict[str, list[SequenceOutput]] = {}
        for output in outputs:
            ingress_id, request = self.requests.get(output.request_id, (None, None))
            if ingress_id is not None and request is not None:  # else it was aborted while the step ran
                made = self._tokens_made.get(request.tenant, 0)
                self._tokens_made[request.tenant] = made + len(output.token_ids)
                by_ingress.setdefault(ingress_id, []).append(output)
        for ingress_id, theirs in by_ingress.items():
            self.tokens.outbox(ingress_id).send(TokenFrame(tuple(theirs)))

    # -- the event loop's side of it ----------------------------------------------------------------------------------

    def _fail(self, request_id: str, error: PagedRayError) -> None:
        if request_id in self.requests:
            ingress_id, _ = self.requests[request_id]
            self.tokens.outbox(ingress_id).send(TokenFrame(failures=((request_id, error),)))
            self._ended(request_id)

    def _break_off(self, request_ids: Sequence[str], error: PagedRayError) -> None:
        for request_id in request_ids:
            self._fail(request_id, error)
        self._inbox.put(lambda: self._abort_in_engine(request_ids))

    def _die(self, error: BaseException) -> None:
        """The engine is of no more use. Whatever it may still say is not heard, and nobody sends it anything more."""
        if self.error is None:
            self.error = error
            self._dead.set()
            self._tasks.cancel()
            reason = "left" if isinstance(error, GroupDrained) else "failed"
            for link in self.links:  # first: what is failed here must not come back here
                link.scheduler.remove_group.remote(self.group_id, reason)
            self._fail_all()

    def _fail_all(self) -> None:
        for request_id in list(self.requests):
            self._fail(request_id, GroupLost("the worker group that held this request failed; send it again"))

    def _ended(self, request_id: str) -> None:
        if request_id in self.requests:
            ingress_id, _ = self.requests[request_id]
            self.tokens.outbox(ingress_id).request_ids.discard(request_id)
            self._tell_ended(request_id)

    def _all_ended(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._ended(request_id)

    def _ingress_lost(self, ingress_id: str) -> None:
        """Its connection broke. It takes its sequences here for lost; should it come again, it is told the same."""
        request_ids = tuple(self.tokens.outbox(ingress_id).request_ids)
        if request_ids:
            logger.warning("ingress %s: its connection broke; %d sequences end here", ingress_id, len(request_ids))
        self._break_off(request_ids, GroupLost("the connection to the worker group broke; send the request again"))

    def _ingress_gone(self, ingress_id: str, request_ids: Sequence[str]) -> None:
        if not request_ids:
            return
        logger.warning("ingress %s is gone; aborting its %d sequences", ingress_id, len(request_ids))
        for request_id in request_ids:
            self._tell_ended(request_id)
        self._inbox.put(lambda: self._abort_in_engine(request_ids))
        # It may only have been held up, and hear of its first sequences here when it comes.
        gone = GroupLost("the worker group heard nothing of the ingress; send the request again")
        self.tokens.keep(ingress_id, TokenFrame((), tuple((request_id, gone) for request_id in request_ids)))

    async def _leave(self, seconds: float) -> None:
        await self.drain(seconds)
        self._die(GroupDrained("it was drained"))

    def _ask_to_move(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if request_id in self.requests:
                asked = SequenceOutput(request_id, (), moving=True)
                self.tokens.outbox(self.requests[request_id][0]).send(TokenFrame((asked,)))

    async def _publish_running(self, seconds: float) -> None:
        """Until the node's store has what running sequences have computed, or refused it."""
        if self.kv is None or not self.requests:
            return
        deadline = time.monotonic() + seconds
        ordered = asyncio.Event()

        def publish(engine: "Engine") -> None:
            engine.publish_running()
            self.loop.call_soon_threadsafe(ordered.set)

        self._in_engine(publish)
        while not ordered.is_set() or self.engine.is_publishing:
            if time.monotonic() > deadline:
                return
            await asyncio.sleep(_DRAIN_POLL_SECONDS)

    def _take_fetches(self) -> None:
        outcomes = self.kv.take_outcomes() if self.kv is not None else ()
        for link in self.links:
            link.fetches.extend(outcomes)

    def _tell_ended(self, request_id: str) -> None:
        _, request = self.requests.pop(request_id, (None, None))
        num_tokens = self.clock.ended(request_id)
        if request is None:
            return
        num_tokens += 0 if request.attempt else len(request.prompt_token_ids)
        self._take_fetches()  # those that it waited for are told no later than its end
        for link in self.links:
            if request_id in link.request_ids:
                link.ended(request_id, request.tenant, num_tokens)

    def _report(self) -> None:
        """What the engine's thread has put down is told now."""
        for link in self.links:
            link.wake()

    def _introduction(self, link: SchedulerLink) -> GroupInfo:
        self._inbox.put(self._take_snapshot)  # and the index is complete again with the next report
        return GroupInfo(
            group_id=self.group_id,
            model=self.model,
            capacity=replace(
                self.engine.capacity(window=2 * self.config.max_num_seqs),
                node=ray.get_runtime_context().get_node_id(),
                role=self.role,
                local_tokens=self.config.kv_transfer_config.publish_min_tokens,
            ),
            num_received=link.num_received,
            max_model_len=self.engine.max_model_len,
            leader=ray.get_runtime_context().current_actor,
            requests=tuple(self.requests[i] for i in link.request_ids),
            channel=self.channel.address,
            draining=self.draining,
            nodes=self.nodes,
        )

    async def _look_after(self) -> None:
        """See, while there is nothing to compute, that a rank was lost; show ingresses that this process lives."""
        while self.error is None:
            await asyncio.sleep(_BEAT_SECONDS)
            if self.engine.executor.failure is not None:
                self._die(self.engine.executor.failure)
                return
            self.tokens.beat()
            self._take_fetches()


def _say(line: str) -> None:
    """To this process's stderr, of which `pagedray serve` shows the lines that begin so."""
    print(f"pagedray: {line}", file=sys.stderr, flush=True)


def _show_progress(model: str) -> "Progress":
    shown = -1

    def show(done: int, total: int) -> None:
        nonlocal shown
        quarters = 4 * done // total
        if quarters > shown:
            shown = quarters
            _say(f"loading weights of {model}: {25 * quarters}% of {total / 2**20:.0f} MiB")

    return show


class WorkerGroup:
    """The class of the Serve replica of a worker group: builds it, watches it, takes it down."""

    def __init__(
        self,
        model: str,
        config: EngineConfig,
        load_timeout: float,
        drain_timeout: float = 0.0,
        num_shards: int = 1,
        observability: ObservabilityOptions = ObservabilityOptions(),  # noqa: B008 - frozen
        role: str = "mixed",
        num_tries: int = 1,
    ):
        """`drain_timeout`: seconds for its sequences to move when Serve takes it away.

        `num_shards`: how many global schedulers there are. `num_tries`: after how many starts that fail Serve gives the
        model up, if none has ever served.
        """
        from ray import serve  # a second to import, which the leader, whose class stands here too, need not wait for

        began = time.time()
        context = serve.get_replica_context()
        self.model = model
        self.group_id = f"{context.replica_id.unique_id}-{uuid.uuid4().hex[:8]}"
        self.application, self.num_shards = context.app_name, num_shards
        placement_group = ray.util.get_current_placement_group()
        assert placement_group is not None, "the application gives every group one"
        places = RankPlaces.of(placement_group, config.tensor_parallel_size)
        actor: Any = ray.remote(Leader)
        self.leader = actor.options(**places.options(0), max_concurrency=10_000).remote(
            self.group_id, model, config, self._schedulers(), places, context.app_name, observability, role, began
        )
        self._leaving = False
        self.drain_timeout = drain_timeout
        try:
            ray.get(self.leader.load.remote(load_timeout), timeout=load_timeout + _LEAVE_SECONDS)
        except ray.exceptions.RayError as error:
            ray.kill(self.leader)
            cause: Exception = error
            if isinstance(error, ray.exceptions.GetTimeoutError):
                cause = EngineDead(f"{model} was not loaded within {load_timeout:.0f} s")
            elif isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, PagedRayError):
                cause = error.cause
            final = isinstance(cause, PagedRayError) and not isinstance(cause, EngineDead)
            why = " ".join(str(cause).split())[-1000:]  # of what is no error of ours, the end says most
            told = [scheduler.fail_model.remote(model, why, final, num_tries) for scheduler in self._schedulers()]
            with suppress(ray.exceptions.RayError):  # it is the cause that is to be raised
                ray.get(told, timeout=CALL_TIMEOUT)
            raise cause from None
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def _watch(self) -> None:
        """End the group as soon as its leader is lost: Serve's health checks would take several times as long."""
        try:
            while True:
                ray.get(self.leader.watch.remote(), timeout=_SILENCE_SECONDS)
        except Exception as error:
            why = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
        if self._leaving:
            return
        reason, what = ("left", "has been drained") if isinstance(why, GroupDrained) else ("lost", "is lost")
        logger.error("group %s %s and will be built anew: %r", self.group_id, what, why)
        _say(f"a group of {self.model} {what} and will be built anew")
        try:
            ray.kill(self.leader)  # stopped or cut off, it must not come back
            ray.get([s.remove_group.remote(self.group_id, reason) for s in self._schedulers()], timeout=CALL_TIMEOUT)
        finally:
            ray.kill(ray.get_runtime_context().current_actor)

    async def __del__(self) -> None:
        """Serve takes this replica away: to have fewer, to replace it, or because its node will go."""
        self._leaving = True
        try:
            await self._drain()
        except (ray.exceptions.RayError, TimeoutError) as error:
            logger.warning("group %s leaves without having been drained: %r", self.group_id, error)
        await self._tell_schedulers("remove_group")
        try:
            await asyncio.wait_for(self.leader.close.remote(), _LEAVE_SECONDS + 1)
        finally:
            ray.kill(self.leader)

    async def _drain(self) -> None:
        began = time.monotonic()
        known = await self._tell_schedulers("drain_group")
        seconds = self.drain_timeout - (time.monotonic() - began)
        if any(known) and seconds > 0:
            await asyncio.wait_for(self.leader.drain.remote(seconds), seconds + CALL_TIMEOUT)

    async def _tell_schedulers(self, method: str) -> list[Any]:
        schedulers = await asyncio.to_thread(self._schedulers)
        calls = [getattr(s, method).remote(self.group_id) for s in schedulers]
        return await asyncio.wait_for(asyncio.gather(*calls), CALL_TIMEOUT)

    def _schedulers(self) -> list[ActorHandle]:
        """As they are now: one that was forgotten, while all of its callers were held up, has another in its place."""
        return global_scheduler.connect_all(self.application, self.num_shards)
