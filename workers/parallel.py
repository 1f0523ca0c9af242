"""How the ranks of a worker group exchange tensors: sums and logits within a stage, hidden states between stages.

Ranks of a stage that share a host add up in shared pages (`kernels.cpu.shared_group`), inside the native decoder; over
hosts it is gloo, layer by layer. Stages hand on hidden states over plain TCP. On GPUs all of it is NCCL's
(`collectives.py`). Every wait can be aborted from another thread.
"""

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..kernels import ops
from ..kernels.cpu.shared_group import SharedGroup
from ..kernels.ops import RankLost
from .collectives import WAIT_SECONDS, CollectiveGroup
from .config import EngineConfig, ModelConfig
from .partition import Shard
from .wire import Connection, WireError

_POLL_SECONDS = 0.2
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class HostIdentity:
    """Equal where two processes can share pages: same kernel, same network namespace, which abstract sockets need."""

    boot_id: str
    network_namespace: int

    @classmethod
    def here(cls) -> "HostIdentity":
        with open("/proc/sys/kernel/random/boot_id") as file:
            return cls(file.read().strip(), os.stat("/proc/self/ns/net").st_ino)


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a rank is."""

    host: str  # its address, as it reaches the leader
    link_port: int  # where it listens for the stage before it; 0: nowhere
    identity: HostIdentity
    native: bool  # whether its kernels are, which shared pages need
    gpus: tuple[str, ...] = ()  # those it may use, as its host knows them


@dataclass(frozen=True, slots=True)
class Topology:
    """What a rank must know to find the others. `roads` says how each stage adds up: "shared", "gloo", "nccl" or
    "alone"; `link` how hidden states go from stage to stage: "tcp", "gloo" or "nccl"."""

    shards: tuple[Shard, ...]
    peers: tuple[Peer, ...]
    roads: tuple[str, ...]
    name: str  # random; makes the names of abstract sockets
    store_port: int  # of the TCPStore at the leader that gloo and NCCL meet at; 0: none
    link: str = "tcp"
    gpus: tuple[int, ...] = ()  # which of the GPUs that it may use each rank has; none: all are on CPUs

    def stage(self, pp_rank: int) -> list[int]:
        """The ranks of a stage."""
        return [shard.rank for shard in self.shards if shard.pp_rank == pp_rank]

    def on_host(self, rank: int) -> int:
        """How many ranks share that one's machine."""
        boot_id = self.peers[rank].identity.boot_id
        return sum(peer.identity.boot_id == boot_id for peer in self.peers)

    def device(self, rank: int) -> torch.device:
        return torch.device("cuda", self.gpus[rank]) if self.gpus else torch.device("cpu")

    def needs_store(self, rank: int) -> bool:
        """Whether this rank meets others at the leader's TCPStore."""
        return self.link != "tcp" or self.roads[self.shards[rank].pp_rank] in ("gloo", "nccl")


def assign_gpus(peers: Sequence[Peer]) -> tuple[int, ...]:
    """Which of its GPUs each rank takes, so that no two have the same one; empty where that cannot be.

    Who may use the fewest chooses first. Ray shows an actor the GPUs of its bundle; a process that it did not start
    sees all of its host's.
    """
    chosen: dict[int, int] = {}
    taken: set[tuple[HostIdentity, str]] = set()
    for rank in sorted(range(len(peers)), key=lambda r: (len(peers[r].gpus), r)):
        identity, names = peers[rank].identity, peers[rank].gpus
        free = [i for i, name in enumerate(names) if (identity, name) not in taken]
        if not free:
            return ()
        chosen[rank] = free[0]
        taken.add((identity, names[free[0]]))
    return tuple(chosen[rank] for rank in range(len(peers)))


def choose_road(peers: Sequence[Peer], on_gpus: bool = False) -> str:
    """How the ranks of a stage add up."""
    if len(peers) == 1:
        return "alone"
    if on_gpus:
        return "nccl"
    together = all(peer.identity == peers[0].identity and peer.native for peer in peers)
    return "shared" if together else "gloo"


class StageReduce(Protocol):
    """Sums and gathers within a stage; every rank makes the same calls in the same order."""

    def __call__(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """part fp32 [T, H] -> the sum over ranks in their order, rounded to dtype."""
        ...

    def gather(self, part: Tensor, columns: Sequence[int]) -> Tensor | None:
        """part fp32 [n, columns[tp_rank]] -> on tp_rank 0 all side by side, None elsewhere."""
        ...

    def abort(self) -> None: ...


class RankGroup:
    """This rank's ways to the others. One thread computes with it; `abort` and `close` may come from any."""

    def __init__(
        self,
        shard: Shard,
        model: ModelConfig,
        dtype: torch.dtype,
        vocab_columns: Sequence[int],
        reduce: StageReduce | None = None,
        before: Connection | CollectiveGroup | None = None,
        behind: Connection | CollectiveGroup | None = None,
        device: torch.device = _CPU,
    ):
        self.shard, self.reduce, self.device = shard, reduce, device
        self._hidden_size, self._dtype, self._vocab_columns = model.hidden_size, dtype, list(vocab_columns)
        self._before, self._behind = before, behind
        self._arrived: queue.SimpleQueue[tuple[int, bytearray] | Exception] = queue.SimpleQueue()
        if isinstance(before, Connection):
            threading.Thread(target=self._read_hidden, args=(before,), name="stage-link", daemon=True).start()

    def gather_logits(self, logits: Tensor) -> Tensor | None:
        """logits fp32 [n, this rank's vocabulary] -> [n, vocab] on the stage's first rank, None on the others."""
        return logits if self.reduce is None else self.reduce.gather(logits, self._vocab_columns)

    def send_hidden(self, step_id: int, hidden: Tensor) -> None:
        """Hand hidden [num_tokens, hidden_size] to this rank's counterpart in the next stage."""
        assert self._behind is not None, "the last stage has nobody behind it"
        if isinstance(self._behind, CollectiveGroup):
            self._behind.send(hidden)
            return
        try:
            data: Any = hidden.contiguous().view(torch.uint8).numpy()
            self._behind.send_tensor_bytes(step_id % 2**64, memoryview(data).cast("B"))
        except WireError as error:
            raise RankLost(f"stage {self.shard.pp_rank + 1} is gone: {error}") from None

    def receive_hidden(self, step_id: int, num_tokens: int) -> Tensor:
        """What the stage before sent for this step, [num_tokens, hidden_size]."""
        stage = self.shard.pp_rank - 1
        if isinstance(self._before, CollectiveGroup):  # both ends know how much it is, and take steps in order
            shape = num_tokens, self._hidden_size
            return self._before.receive(torch.empty(shape, dtype=self._dtype, device=self.device))
        try:
            arrived = self._arrived.get(timeout=WAIT_SECONDS)
        except queue.Empty:
            raise RankLost(f"stage {stage} sent nothing for {WAIT_SECONDS:.0f} s") from None
        if isinstance(arrived, Exception):
            raise RankLost(f"stage {stage} is gone: {arrived}")
        of_step, data = arrived
        hidden = torch.frombuffer(data, dtype=self._dtype)
        if of_step != step_id % 2**64 or hidden.numel() != num_tokens * self._hidden_size:
            raise RankLost(f"stage {stage} sent {hidden.numel()} values of step {of_step}; step {step_id} was due")
        return hidden.view(num_tokens, self._hidden_size)

    def check(self) -> None:
        """Raise `RankLost` if what was computed since cannot be right: on a GPU nobody has waited for the others."""
        for group in (self.reduce, self._before, self._behind):
            if isinstance(group, CollectiveGroup):
                group.check()

    def _read_hidden(self, connection: Connection) -> None:
        try:
            while True:
                self._arrived.put(connection.receive_raw())
        except WireError as error:
            self._arrived.put(error)

    def abort(self) -> None:
        """End every wait of this rank, now and later, with `RankLost`."""
        if self.reduce is not None:
            self.reduce.abort()
        for link in (self._before, self._behind):
            if isinstance(link, CollectiveGroup):
                link.abort()
        self.close()

    def close(self) -> None:
        for link in (self._before, self._behind):
            if isinstance(link, Connection):
                link.close()


def slot_bytes(model: ModelConfig, engine: EngineConfig, widest_vocab: int) -> int:
    """Of a rank's slot in the shared pages: a step's hidden states, or a row of logits, in fp32."""
    tokens = max(engine.max_num_batched_tokens, engine.block_size)  # a warm-up's prompt is a block
    needed = max(tokens * model.hidden_size, widest_vocab)
    return -(-needed * 4 // 4096) * 4096


def connect(
    topology: Topology,
    rank: int,
    key: bytes,
    model: ModelConfig,
    engine: EngineConfig,
    dtype: torch.dtype,
    listener: socket.socket | None,
    store: Any,
    timeout: float,
    check: Callable[[], None],
) -> RankGroup:
    """Meet the ranks that this one exchanges tensors with. Raises `WireError` or `RankLost` after `timeout` seconds.

    `check` is called while waiting, and raises where there is nothing to wait for any more.
    `listener` is where the stage before connects, `store` the TCPStore of gloo and NCCL, where they are needed.
    """
    device = topology.device(rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    shard = topology.shards[rank]
    vocab_columns = [len(topology.shards[r].vocab) for r in topology.stage(shard.pp_rank)]
    behind: Connection | CollectiveGroup | None = None
    before: Connection | CollectiveGroup | None = None
    host = topology.peers[rank].host

    def meet(backend: str, name: str, own: int, size: int) -> CollectiveGroup:
        from torch.distributed import PrefixStore

        check()
        ordered = backend == "gloo" or ops.batch_invariant()
        return CollectiveGroup(backend, PrefixStore(name, store), host, own, size, device, ordered)

    if topology.link != "tcp":  # stage by stage, so that nobody waits for who waits for it
        if not shard.first_stage:
            before = meet(topology.link, f"link-{rank - shard.tp_size}", 1, 2)
        if not shard.last_stage:
            behind = meet(topology.link, f"link-{rank}", 0, 2)
    elif not shard.last_stage:
        peer = topology.peers[rank + shard.tp_size]
        behind = Connection.connect(peer.host, peer.link_port, key, timeout, check)
    if topology.link == "tcp" and listener is not None:
        before = accept(listener, key, timeout, check)
    reduce: StageReduce | None = None
    road = topology.roads[shard.pp_rank]
    if road == "shared":
        size = slot_bytes(model, engine, max(vocab_columns))
        name = f"\0pagedray-{topology.name}-{shard.pp_rank}"
        reduce = _share_pages(name, key, shard.tp_rank, shard.tp_size, size, timeout, check)
    elif road != "alone":
        reduce = meet(road, f"stage-{shard.pp_rank}", shard.tp_rank, shard.tp_size)
    return RankGroup(shard, model, dtype, vocab_columns, reduce, before, behind, device)


def accept(listener: socket.socket, key: bytes, timeout: float, check: Callable[[], None]) -> Connection:
    """The next peer that knows the key; others are dropped."""
    deadline = time.monotonic() + timeout
    listener.settimeout(_POLL_SECONDS)
    while time.monotonic() < deadline:
        check()
        try:
            return Connection(listener.accept()[0], key, server=True)
        except (TimeoutError, WireError):
            continue
    raise WireError(f"nobody connected within {timeout:.0f} s")


def _share_pages(
    name: str, key: bytes, rank: int, size: int, slot: int, timeout: float, check: Callable[[], None]
) -> SharedGroup:
    """The first rank makes the pages and hands them to the others over an abstract socket, which leaves no file."""
    native = ops.native_library()
    deadline = time.monotonic() + timeout
    if rank == 0:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(name)
            listener.listen(size)
            file = SharedGroup.create(native, size, slot)
            for _ in range(size - 1):
                peer = accept(listener, key, deadline - time.monotonic(), check)
                socket.send_fds(peer.socket, [b"pages"], [file])
                peer.close()
    else:
        while True:
            check()
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.connect(name)
                break
            except OSError as error:
                sock.close()
                if time.monotonic() > deadline:
                    raise WireError(f"the first rank of the stage shares no pages: {error}") from None
                time.sleep(0.05)
        peer = Connection(sock, key, server=False)
        sock.settimeout(max(0.1, deadline - time.monotonic()))
        _, files, _, _ = socket.recv_fds(sock, 16, 1)
        peer.close()
        if not files:
            raise WireError("the first rank of the stage went away")
        (file,) = files
    try:
        return SharedGroup(native, file, rank, size, slot, WAIT_SECONDS)
    finally:
        os.close(file)  # the mapping stays
