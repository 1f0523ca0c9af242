"""What executes the engine's step plans: one rank in this process, or a group of which this process is the leader."""

import logging
import queue
import secrets
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from ..kernels import ops
from ..kernels.ops import RankLost
from ..scheduler.errors import ConfigError, EngineDead
from ..scheduler.plan import NewSequence, ScheduledSequence, StepPlan, StepResult
from ..scheduler.request import SamplingParams
from . import cuda
from .checkpoint.load import Checkpoint, Progress, column_group, open_checkpoint
from .config import EngineConfig, ModelConfig
from .members import Launcher, LocalRank, Members, RankHandle
from .messages import Assignment, Capacity, GroupAddress, Loaded, Ready, Serve
from .parallel import HostIdentity, Peer, Topology, assign_gpus, choose_road, connect
from .partition import Shard, check_degrees, partition, whole_model
from .sampler import GrammarBackend
from .stage_costs import measure
from .wire import WireError
from .worker import Worker, model_dtype, set_threads

__all__ = [
    "Executor",
    "GroupAddress",
    "GroupExecutor",
    "InlineExecutor",
    "Launcher",
    "RankHandle",
    "make_executor",
    "warm_up_plans",
]

logger = logging.getLogger(__name__)

START_SECONDS = 600.0  # for all ranks to load
STEP_SECONDS = 60.0  # a step that takes longer is taken for a hang
_ECHO_SECONDS = 1.0  # beyond the silence that counts as a loss: time to hear who is lost


class Executor(Protocol):
    """Executes plans in the order in which they come, at most `max_in_flight` at a time. One thread uses it."""

    model_config: ModelConfig
    num_blocks: int
    max_model_len: int
    max_in_flight: int
    worker: Worker  # rank 0
    shards: tuple[Shard, ...]  # by rank

    @property
    def failure(self) -> Exception | None:
        """Why it can do no more; None while it can."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Begin a step. Raises `EngineDead` where a rank is lost, as all do from then on."""
        ...

    def collect(self, timeout: float = STEP_SECONDS) -> StepResult:
        """The result of the earliest step in flight. Raises `EngineDead` after `timeout` seconds."""
        ...

    def warm_up(self) -> None:
        """Run a prefill and a decode, so that the first request does not pay for libraries and kernels starting up."""
        ...

    def prepare_grammars(self) -> None:
        """Begin, in the background, what the first structured output would wait for."""
        ...

    def close(self, timeout: float = 5.0) -> None:
        """End every rank within about `timeout` seconds. May come from any thread, and again."""
        ...


def make_executor(
    config: EngineConfig,
    progress: Progress | None = None,
    launch: Launcher | None = None,
    host: str = "127.0.0.1",
    grammar_backend: GrammarBackend | None = None,
    start_timeout: float = START_SECONDS,
) -> Executor:
    """The executor that the settings ask for; the other arguments as in `GroupExecutor`."""
    if config.world_size == 1:
        return InlineExecutor(config, progress, grammar_backend)
    return GroupExecutor(
        config, launch, host=host, start_timeout=start_timeout, progress=progress, grammar_backend=grammar_backend
    )


class InlineExecutor:
    """One rank, in the caller's thread."""

    max_in_flight = 1
    failure: Exception | None = None  # it fails in the thread that uses it, which hears of it

    def __init__(
        self, config: EngineConfig, progress: Progress | None = None, grammar_backend: GrammarBackend | None = None
    ):
        checkpoint = open_checkpoint(config.model)
        check_degrees(checkpoint.config, config)
        self.worker = Worker(config, progress, checkpoint, grammar_backend=grammar_backend)
        self.worker.allocate(self.worker.num_blocks, self.worker.max_model_len)
        self.model_config = self.worker.model_config
        self.shards: tuple[Shard, ...] = (whole_model(self.model_config),)
        self.num_blocks, self.max_model_len = self.worker.num_blocks, self.worker.max_model_len
        self._results: deque[StepResult] = deque()

    def submit(self, plan: StepPlan) -> None:
        result = self.worker.execute(plan)
        assert result is not None, "a rank that is alone samples"
        self._results.append(result)

    def collect(self, timeout: float = STEP_SECONDS) -> StepResult:
        return self._results.popleft()

    def warm_up(self) -> None:
        _run(self, warm_up_plans(self.worker.config.block_size, self.max_model_len))

    def prepare_grammars(self) -> None:
        self.worker.prepare_grammars()

    def close(self, timeout: float = 5.0) -> None:
        pass


class GroupExecutor:
    """One model copy over tensor_parallel_size x pipeline_parallel_size ranks, of which this process is rank 0.

    `launch(address, rank)` starts each of the others; by default a process on this machine. `host` is an address of
    this machine that they can reach. The constructor returns when all have loaded. A step goes out as one message to
    every rank; this rank's part is computed in the thread that calls `submit`.

    Raises `ConfigError` for a degree that cannot work before anything starts, `EngineDead` naming a rank that does not
    join within `join_timeout` or load within `start_timeout` seconds, and the error that kept a rank from loading.
    `failure` is set, from another thread, as soon as a rank is lost: it has ended, or said nothing for
    `silence_timeout` seconds.
    """

    def __init__(
        self,
        config: EngineConfig,
        launch: Launcher | None = None,
        *,
        host: str = "127.0.0.1",
        start_timeout: float = START_SECONDS,
        join_timeout: float = 180.0,
        silence_timeout: float = 3.0,
        progress: Progress | None = None,
        grammar_backend: GrammarBackend | None = None,  # a function that other processes can import
        road: str | None = None,  # "gloo": not through shared memory even where it could
        link: str | None = None,  # "gloo": not over TCP between stages
    ):
        checkpoint = open_checkpoint(config.model)
        check_degrees(checkpoint.config, config)
        self.model_config = checkpoint.config
        self.max_in_flight = config.pipeline_parallel_size
        self._silence = silence_timeout
        self._config, self._grammar_backend = config, grammar_backend
        deadline = time.monotonic() + start_timeout
        self._members = Members(config.world_size, host, launch or LocalRank)
        try:
            self._start(checkpoint, host, min(join_timeout, start_timeout), deadline, progress, road, link)
        except BaseException as error:
            failure = self._members.failure
            self._members.close(timeout=1.0)
            if isinstance(error, RankLost | WireError):
                raise failure or EngineDead(f"the worker group did not start: {error}") from None
            raise
        # An executor that nobody holds any more must not leave ranks behind.
        self._close = weakref.finalize(self, self._members.close, 5.0)

    def _start(
        self,
        checkpoint: Checkpoint,
        host: str,
        join_timeout: float,
        deadline: float,
        progress: Progress | None,
        road: str | None,
        link: str | None,
    ) -> None:
        config, model, members = self._config, self.model_config, self._members
        start_timeout = deadline - time.monotonic()
        hellos = members.join(join_timeout, silence=start_timeout)
        own = Peer(host, 0, HostIdentity.here(), ops.native_library() is not None, cuda.visible_gpus())
        peers = (own, *(hellos[rank].peer for rank in range(1, members.size)))
        dtype = model_dtype(config, model)
        costs = None
        if config.pipeline_parallel_size > 1 and config.pipeline_stage_layers is None:
            set_threads(config, sum(peer.identity.boot_id == own.identity.boot_id for peer in peers))
            costs = measure(checkpoint, config, dtype)
        gpus = _choose_gpus(config, peers)
        shards = partition(model, config, costs, column_group(checkpoint, config.quantization))
        topology, store = _topology(shards, peers, gpus, host, road, link)
        members.send_all(Assignment(config, model, topology, start_timeout, self._grammar_backend))
        self.topology, self.shards = topology, topology.shards
        members.group = connect(
            topology,
            0,
            members.address.key,
            model,
            config,
            dtype,
            listener=None,
            store=store,
            timeout=deadline - time.monotonic(),
            check=members.check,
        )
        self._store = store
        shown = progress and _total(progress, members)
        self.worker = Worker(config, shown, checkpoint, topology, 0, self._grammar_backend)
        loaded = members.wait_for(Loaded, deadline, "loading").values()
        self.num_blocks = min([self.worker.num_blocks, *(rank.num_blocks for rank in loaded)])
        self.max_model_len = min([self.worker.max_model_len, *(rank.max_model_len for rank in loaded)])
        members.send_all(Capacity(self.num_blocks, self.max_model_len))
        self.worker.allocate(self.num_blocks, self.max_model_len, members.group)
        members.wait_for(Ready, deadline, "starting")
        members.set_silence(self._silence)
        members.send_all(Serve(self._silence))

    @property
    def failure(self) -> Exception | None:
        """Why the group can do no more; None while it can."""
        return self._members.failure

    def submit(self, plan: StepPlan) -> None:
        members = self._members
        members.check()
        members.send_all(plan)
        try:
            result = self.worker.execute(plan)
        except RankLost as error:
            members.failed.wait(self._silence + _ECHO_SECONDS)  # who it was is about to be known
            members.fail(EngineDead(f"the worker group stopped: {error}"))
            members.check()
        except Exception as error:  # whatever it is, the other ranks wait for this one now
            members.fail(EngineDead(f"rank 0 of {members.size} failed: {error!r}"))
            raise
        else:
            if result is not None:
                members.results.put(result)

    def collect(self, timeout: float = STEP_SECONDS) -> StepResult:
        members = self._members
        members.check()
        try:
            result = members.results.get(timeout=timeout)
        except queue.Empty:
            members.fail(EngineDead(f"the worker group gave no result for {timeout:.0f} s"))
            result = None
        if result is None:
            members.results.put(None)  # for whoever asks again
            members.check()
        assert result is not None
        return result

    def warm_up(self) -> None:
        _run(self, warm_up_plans(self._config.block_size, self.max_model_len))

    def prepare_grammars(self) -> None:
        self.worker.prepare_grammars()  # another rank, if that samples, does so by itself

    def close(self, timeout: float = 5.0) -> None:
        self._members.close(timeout)


def warm_up_plans(block_size: int, max_model_len: int) -> list[StepPlan]:
    """A prefill and a decode of a made-up sequence, and its end."""
    sampling = SamplingParams(temperature=0.0, seed=0)
    length = min(block_size, max_model_len)
    prompt = NewSequence(-1, (0,) * length, length, sampling, 0)
    return [
        StepPlan(-2, (), (prompt,), (ScheduledSequence(-1, 0, length, (), (0,), True),)),
        StepPlan(-1, (), (), (ScheduledSequence(-1, length - 1, 1, (), (), True),)),
        StepPlan(0, (-1,), (), ()),
    ]


def _run(executor: Executor, plans: Sequence[StepPlan]) -> None:
    for plan in plans:
        executor.submit(plan)
        executor.collect()


def _choose_gpus(config: EngineConfig, peers: tuple[Peer, ...]) -> tuple[int, ...]:
    """The GPU of each rank; none where the group computes on CPUs."""
    if config.device == "cpu":
        return ()
    gpus = assign_gpus(peers)
    if not gpus and any(peer.gpus for peer in peers):
        seen = ", ".join(f"rank {rank} sees {len(peer.gpus)}" for rank, peer in enumerate(peers))
        what = f"{len(peers)} ranks need a GPU each, of their own: {seen}"
        if config.device == "cuda":
            raise ConfigError(f"device is cuda, and {what}")
        logger.warning("the worker group computes on CPUs: %s", what)
    elif not gpus and config.device == "cuda":
        cuda.select_device("cuda")  # says what is missing
    return gpus


def _topology(
    shards: tuple[Shard, ...],
    peers: tuple[Peer, ...],
    gpus: tuple[int, ...],
    host: str,
    road: str | None,
    link: str | None,
) -> tuple[Topology, Any]:
    """Where everybody is, and the store that gloo's and NCCL's ranks meet at, where any do."""
    tp_size = shards[0].tp_size
    stages = [peers[first : first + tp_size] for first in range(0, len(peers), tp_size)]
    roads = tuple(road if road and tp_size > 1 else choose_road(stage, bool(gpus)) for stage in stages)
    link = link or ("nccl" if gpus else "tcp")
    topology = Topology(shards, peers, roads, secrets.token_hex(16), 0, link if len(stages) > 1 else "tcp", gpus)
    if not any(topology.needs_store(rank) for rank in range(len(peers))):
        return topology, None
    from torch.distributed import TCPStore

    store: Any = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return replace(topology, store_port=store.port), store


def _total(progress: Progress, members: Members) -> Progress:
    """Progress of this rank's loading, as that of the whole group's."""

    def show(done: int, total: int) -> None:
        others = list(members.progress.values())
        progress(done + sum(o.done for o in others), total + sum(o.total for o in others))

    return show
