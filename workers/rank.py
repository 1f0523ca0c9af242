"""A rank that is not the leader: joins its group, loads its shard, executes what the leader plans, and goes.

python -m pagedray.workers.rank HOST PORT RANK      the group's key comes in hex on standard input
"""

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ..kernels import ops
from ..kernels.ops import RankLost
from ..scheduler.errors import CheckpointError, EngineDead, PagedRayError
from ..scheduler.plan import StepPlan
from . import wire
from .checkpoint.load import open_checkpoint
from .cuda import visible_gpus
from .messages import Abort, Assignment, Capacity, Failed, GroupAddress, Hello, Loaded, Loading, Ready, Serve, Stop
from .monitor import Monitor
from .parallel import HostIdentity, Peer, RankGroup, connect
from .wire import Connection, WireError
from .worker import Worker, model_dtype

logger = logging.getLogger(__name__)

_JOIN_SECONDS = 60.0
_ASSIGNMENT_SECONDS = 600.0  # the leader says nothing before all ranks have joined; that it has ended is seen at once
_UNWIND_SECONDS = 1.0  # for the computing thread to come back once the group is lost
_PROGRESS_SECONDS = 0.2

M = TypeVar("M")


def run(
    address: GroupAddress,
    rank: int,
    *,
    exit_on_loss: bool = True,
    on_ready: Callable[[Worker], None] = lambda worker: None,
) -> None:
    """Be rank `rank` of the group, in this thread, until its leader says stop. `on_ready` gets what is loaded.

    Raises `EngineDead` where the leader or another rank is lost, and what keeps it from loading, which the leader is
    told too. With `exit_on_loss` the process ends if this thread is stuck a second after such a loss.
    """
    ops.native_library()  # the first time on a machine it is compiled, longer than a leader waits for a word
    try:
        control = Connection.connect(address.host, address.port, address.key, _JOIN_SECONDS)
    except WireError as error:
        raise EngineDead(f"rank {rank} cannot join its group: {error}") from None
    member = _Member(address, rank, control, exit_on_loss, on_ready)
    try:
        member.join_and_serve()
    except (RankLost, WireError) as error:
        # Mostly an echo of what the leader knows better: give it the time to say so.
        member.lost.wait(member.monitor.silence + _UNWIND_SECONDS if member.serving else _UNWIND_SECONDS)
        why = member.why or str(error)
        member.tell(Failed(EngineDead(f"rank {rank}: {error}")))
        raise EngineDead(f"rank {rank} gives up: {why}") from None
    except Exception as error:
        known = isinstance(error, PagedRayError)
        member.tell(Failed(error if known else EngineDead(f"rank {rank} failed: {error!r}")))
        raise
    finally:
        member.close()


class _Member:
    """What a rank holds, so that `run` can take it down from wherever it has come to."""

    def __init__(
        self,
        address: GroupAddress,
        rank: int,
        control: Connection,
        exit_on_loss: bool,
        on_ready: Callable[[Worker], None],
    ):
        self.address, self.rank, self.control = address, rank, control
        self.on_ready = on_ready
        self.exit_on_loss = exit_on_loss
        self.group: RankGroup | None = None
        self.serving = False
        self.lost, self.why = threading.Event(), ""
        self._over = threading.Event()
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # A stage that is not the first is connected to by the one before; which stage this is comes later.
        self.listener = wire.listen(control.local_host)
        self.monitor = Monitor({0: control}, self._hear, self._lose, _ASSIGNMENT_SECONDS)

    def join_and_serve(self) -> None:
        native = ops.native_library() is not None
        port = self.listener.getsockname()[1]
        peer = Peer(self.control.local_host, port, HostIdentity.here(), native, visible_gpus())
        self.control.send(Hello(self.rank, peer))
        assignment = self._expect(Assignment, _ASSIGNMENT_SECONDS)
        self.monitor.silence = assignment.start_timeout
        worker = self._load(assignment)
        self.on_ready(worker)
        self.control.send(Ready())
        self.monitor.silence = self._expect(Serve, assignment.start_timeout).silence
        self.serving = True
        worker.prepare_grammars()
        while True:
            message = self._inbox.get()  # as long as beats show that the leader lives
            if isinstance(message, StepPlan):
                result = worker.execute(message)
                if result is not None:
                    self.control.send(result)
            elif isinstance(message, Stop):
                return
            elif isinstance(message, Exception):
                raise message

    def _load(self, assignment: Assignment) -> Worker:
        deadline = time.monotonic() + assignment.start_timeout
        topology, config, rank = assignment.topology, assignment.config, self.rank
        shard = topology.shards[rank]
        store = None
        if topology.needs_store(rank):
            from torch.distributed import TCPStore

            store = TCPStore(self.address.host, topology.store_port, is_master=False)
        checkpoint = open_checkpoint(config.model)
        if checkpoint.config != assignment.model:
            raise CheckpointError(f"rank {rank} finds another model than the leader at {config.model}")
        self.group = connect(
            topology,
            rank,
            self.address.key,
            checkpoint.config,
            config,
            model_dtype(config, checkpoint.config),
            listener=None if shard.first_stage else self.listener,
            store=store,
            timeout=deadline - time.monotonic(),
            check=self._check,
        )
        self.listener.close()
        if self.lost.is_set():
            self.group.abort()
        worker = Worker(config, self._show_progress(), checkpoint, topology, rank, assignment.grammar_backend)
        self.control.send(Loaded(worker.num_blocks, worker.max_model_len))
        capacity = self._expect(Capacity, deadline - time.monotonic())
        worker.allocate(capacity.num_blocks, capacity.max_model_len, self.group)
        return worker

    def _check(self) -> None:
        if self.lost.is_set():
            raise RankLost(self.why)

    def _show_progress(self) -> Any:
        last = 0.0

        def show(done: int, total: int) -> None:
            nonlocal last
            if done == total or time.monotonic() - last > _PROGRESS_SECONDS:
                last = time.monotonic()
                self.control.send(Loading(done, total))

        return show

    def _expect(self, kind: type[M], timeout: float) -> M:
        try:
            message = self._inbox.get(timeout=max(0.0, timeout))
        except queue.Empty:
            raise WireError(f"the leader did not send {kind.__name__} within {timeout:.0f} s") from None
        if isinstance(message, Exception):
            raise message
        if isinstance(message, Stop):
            raise WireError("the leader stopped the group while it started")
        if not isinstance(message, kind):
            raise WireError(f"the leader sent {type(message).__name__} where {kind.__name__} was due")
        return message

    def tell(self, message: Any) -> None:
        try:
            self.control.send(message)
        except WireError:
            pass  # it knows, or is gone

    def close(self) -> None:
        self._over.set()
        self.monitor.close()
        if self.group is not None:
            self.group.close()
        self.listener.close()
        self.control.close()

    # -- in the monitor's thread --------------------------------------------------------------------------------------

    def _hear(self, _: int, message: Any) -> None:
        if isinstance(message, Abort):
            self._lose(0, message.why, "")
        else:
            self._inbox.put(message)

    def _lose(self, _: int, why: str, who: str = "the leader is lost: ") -> None:
        if self.lost.is_set():
            return
        self.why = who + why
        self.lost.set()
        self._inbox.put(RankLost(self.why))
        if self.group is not None:
            self.group.abort()
        if self.exit_on_loss:
            threading.Thread(target=self._exit_if_stuck, daemon=True).start()

    def _exit_if_stuck(self) -> None:
        if not self._over.wait(_UNWIND_SECONDS):
            print(f"pagedray: rank {self.rank} ends: {self.why}", file=sys.stderr, flush=True)
            os._exit(1)


def main() -> None:
    host, port, rank = sys.argv[1:4]
    address = GroupAddress(host, int(port), bytes.fromhex(sys.stdin.readline()))
    try:
        run(address, int(rank))
    except PagedRayError as error:
        print(f"pagedray: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)  # taking down an interpreter with torch in it takes a second, and there is nothing to save


if __name__ == "__main__":
    main()
