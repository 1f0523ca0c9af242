"""Collectives of torch.distributed between a few ranks: NCCL on GPUs, gloo on CPUs, by the same calls.

A group of its own is made for each stage, and for each pair of ranks that hand hidden states on. None of them is
torch's default group, so several models can live in a process, and each can be aborted alone.

Waiting differs, and is the only thing that does. gloo's work is waited for by the thread, a little at a time, so that
`abort` ends it. NCCL's runs in the order of the stream, and the thread goes on: it may be captured in a CUDA graph, a
rank that is gone shows when somebody waits for a result, and `abort` (ncclCommAbort) ends the kernels that spin for it.
"""

import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from ..kernels.ops import RankLost

WAIT_SECONDS = 60.0  # for another rank's part of a step; one that is lost is noticed long before
_POLL_SECONDS = 0.2


class CollectiveGroup:
    """Ranks 0 … size - 1 of one backend; every rank makes the same calls in the same order, from one thread.

    `ordered` sums are the same for a row whatever its place in the batch: all parts go to all ranks in fp32, and each
    adds them up in the order of the ranks. Otherwise the backend adds them up as it likes, rounded to the model's dtype
    before, as Megatron does: for NCCL a fraction of the bytes.
    Raises `RankLost` where the ranks cannot meet, and from every call after `abort`.
    """

    def __init__(
        self, backend: str, store: Any, host: str, rank: int, size: int, device: torch.device, ordered: bool = True
    ):
        """`store`: a store of torch.distributed of this group's own. `host`: this rank's address, for gloo."""
        self.backend, self.rank, self.size, self.ordered = backend, rank, size, ordered
        self._device = device
        self._aborted = threading.Event()
        store.set_timeout(timedelta(seconds=WAIT_SECONDS))
        try:
            self._group = _MAKERS[backend](store, host, rank, size)
            if backend == "nccl":  # it meets with the first call, which should not be one of a step
                self.all_reduce(torch.zeros(1, device=device))
                torch.cuda.synchronize(device)
        except RuntimeError as error:
            raise RankLost(f"rank {rank} of {size} cannot meet the others over {backend}: {error}") from None

    # -- within a stage: StageReduce ----------------------------------------------------------------------------------

    def __call__(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """part fp32 [T, H] -> the sum over ranks, in dtype."""
        if not self.ordered:
            return self.all_reduce(part.to(dtype))
        parts = [torch.empty_like(part) for _ in range(self.size)]
        self._wait(lambda: self._group.allgather([parts], [part.contiguous()]))
        total = parts[0]
        for other in parts[1:]:
            total += other
        return total.to(dtype)

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum in place."""
        values = values.contiguous()
        self._wait(lambda: self._group.allreduce([values]))
        return values

    def gather(self, part: Tensor, columns: Sequence[int]) -> Tensor | None:
        """part fp32 [n, columns[rank]] -> on rank 0 all side by side, None elsewhere."""
        widest = max(columns)
        padded = torch.nn.functional.pad(part, (0, widest - part.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in range(self.size)] if self.rank == 0 else []
        self._wait(lambda: self._group.gather(parts, padded, root=0))
        return torch.cat([p[:, :n] for p, n in zip(parts, columns, strict=True)], 1) if parts else None

    # -- between stages -----------------------------------------------------------------------------------------------

    def send(self, values: Tensor) -> None:
        """From rank 0 to all others, which must `receive` as many."""
        self._broadcast(values.contiguous())

    def receive(self, values: Tensor) -> Tensor:
        """Fill `values`, contiguous, with what rank 0 sends next."""
        self._broadcast(values)
        return values

    def _broadcast(self, values: Tensor) -> None:
        """Not gloo's own send and recv: a wait for these cannot be ended."""
        self._wait(lambda: self._group.broadcast(values, root=0))

    # -- losses -------------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """End every wait, now and later. From any thread."""
        self._aborted.set()
        if self.backend == "nccl":
            self._group.abort()

    def check(self) -> None:
        """Raise if the group was aborted: what came out of a stream since is nothing."""
        if self._aborted.is_set():
            raise RankLost("the group was aborted while ranks waited for each other")

    def _wait(self, begin: Callable[[], Any]) -> None:
        self.check()
        try:
            work = begin()
            if self.backend == "nccl":
                work.wait()  # the stream does
                return
            deadline = time.monotonic() + WAIT_SECONDS
            while True:
                self.check()
                try:
                    work.wait(timedelta(seconds=_POLL_SECONDS))
                    return
                except RuntimeError as error:
                    if work.is_completed() or time.monotonic() > deadline:  # else it is only this wait that is over
                        raise RankLost(f"a rank is gone: {error}") from None
        except RuntimeError as error:
            raise error if isinstance(error, RankLost) else RankLost(f"a rank is gone: {error}") from None


def _gloo(store: Any, host: str, rank: int, size: int) -> Any:
    from torch import distributed

    ProcessGroupGloo: Any = distributed.ProcessGroupGloo  # torch's types know neither options nor collectives of it
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=WAIT_SECONDS)
    return ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, host: str, rank: int, size: int) -> Any:
    from torch import distributed

    if not distributed.is_nccl_available():
        raise RankLost(f"PyTorch {torch.__version__} was built without NCCL: install a CUDA build")
    if name := interface_of(host):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # a host may have others, which lead nowhere
    ProcessGroupNCCL: Any = distributed.ProcessGroupNCCL  # type: ignore[attr-defined]  # not in CPU builds
    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=WAIT_SECONDS)
    return ProcessGroupNCCL(store, rank, size, options)


_MAKERS: dict[str, Callable[[Any, str, int, int], Any]] = {"gloo": _gloo, "nccl": _nccl}

_SIOCGIFADDR = 0x8915


def interface_of(address: str) -> str | None:
    """The network interface that has this IPv4 address; None for the loopback's, and where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(reply[20:24]) == address and name != "lo":
                return name
    return None
