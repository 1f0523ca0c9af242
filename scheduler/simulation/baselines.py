"""Routing rules to beat, in their own words: each decides at once, when a request comes.

`round_robin`, `power_of_two` (of two drawn groups the one with fewer requests), `consistent_hash` (by the first block),
`least_outstanding`, `sglang` (cache-aware routing of SGLang's router: the longest match unless the load is unbalanced,
over a tree of what was sent where), `dynamo` (NVIDIA Dynamo's KV router: blocks to prefill plus blocks in use, over an
index of KV events).
"""

import hashlib
import random
from bisect import bisect
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..cost_model import CostModel
from ..dispatcher import Dispatcher
from ..errors import PagedRayError
from ..placement import GroupCapacity, GroupLoad
from ..prefix_index import BlockEvents, PrefixIndex
from ..request import Request
from .simulator import Router


@dataclass(slots=True)
class _Known:
    """What a rule knows of a group: what it sent there and has not heard the end of."""

    group_id: str
    capacity: GroupCapacity
    requests: dict[str, Request] = field(default_factory=dict)


class ImmediateRouter:
    """Common to all rules: requests go on as they come. A rule is its `choose`."""

    next_dispatch_at = float("inf")

    def __init__(self, seed: int = 0):
        self.draw = random.Random(seed)
        self.groups: dict[str, _Known] = {}
        self._new: list[Request] = []
        self._group_of: dict[str, str] = {}

    def choose(self, request: Request) -> _Known:
        raise NotImplementedError

    def add_group(
        self,
        group_id: str,
        model: str,
        capacity: GroupCapacity,
        now: float,
        running: Iterable[Request] = (),
        num_received: int = 0,
        cost: CostModel | None = None,
    ) -> list[str]:
        self.groups[group_id] = _Known(group_id, capacity, {r.request_id: r for r in running})
        self._group_of.update((r.request_id, group_id) for r in running)
        return []

    def remove_group(self, group_id: str) -> list[str]:
        lost = list(self.groups.pop(group_id).requests)
        for request_id in lost:
            del self._group_of[request_id]
        return lost

    def report(self, group_id: str, load: GroupLoad, now: float) -> None: ...

    def block_events(self, holder: str, events: BlockEvents) -> bool:
        return True

    def served(self, model: str, tenant: str, output_tokens: int) -> None: ...

    def submit(self, request: Request, now: float) -> None:
        self._new.append(request)

    def finished(self, request_ids: Iterable[str], now: float) -> None:
        for request_id in request_ids:
            group_id = self._group_of.pop(request_id, None)
            if group_id is not None:
                del self.groups[group_id].requests[request_id]

    def dispatch(self, now: float) -> dict[str, list[Request]]:
        batches: dict[str, list[Request]] = {}
        while self._new and self.groups:
            request = self._new.pop(0)
            group = self.choose(request)
            group.requests[request.request_id] = request
            self._group_of[request.request_id] = group.group_id
            batches.setdefault(group.group_id, []).append(request)
        return batches

    def take_refused(self) -> list[tuple[str, PagedRayError]]:
        return []


class RoundRobin(ImmediateRouter):
    _turn = -1

    def choose(self, request: Request) -> _Known:
        self._turn += 1
        return list(self.groups.values())[self._turn % len(self.groups)]


class PowerOfTwo(ImmediateRouter):
    def choose(self, request: Request) -> _Known:
        two = self.draw.sample(list(self.groups.values()), min(2, len(self.groups)))
        return min(two, key=lambda g: len(g.requests))


class LeastOutstanding(ImmediateRouter):
    def choose(self, request: Request) -> _Known:
        return min(self.groups.values(), key=lambda g: len(g.requests))


class ConsistentHash(ImmediateRouter):
    """Conversations start with their own first block, or with a shared one; 64 points of each group on the ring."""

    def choose(self, request: Request) -> _Known:
        ring = sorted((_point(f"{g}/{i}".encode()), g) for g in self.groups for i in range(64))
        key = b"".join(request.block_hashes[:1]) or request.request_id.encode()
        return self.groups[ring[bisect(ring, (_point(key), "")) % len(ring)][1]]


def _point(key: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")


class SGLang(ImmediateRouter):
    """Its defaults: match over 0.3 of the prompt, unbalanced from 64 requests and 1.5 times apart.

    Its tree is of what it sent, not of what groups hold; here as sets of blocks, each as large as a group's KV cache.
    """

    cache_threshold, absolute, relative = 0.3, 64, 1.5

    def __init__(self, seed: int = 0):
        super().__init__(seed)
        self.sent: dict[str, OrderedDict[bytes, None]] = {}

    def choose(self, request: Request) -> _Known:
        loads = [len(g.requests) for g in self.groups.values()]
        low, high = min(loads), max(loads)
        if high - low > self.absolute and high > self.relative * low:
            chosen = min(self.groups.values(), key=lambda g: len(g.requests))
        else:
            matches = {g: self._matched(g, request) for g in self.groups}
            best = max(matches, key=lambda g: matches[g])
            size = self.groups[best].capacity.block_size
            if matches[best] * size > self.cache_threshold * len(request.prompt_token_ids):
                chosen = self.groups[best]
            else:
                chosen = min(self.groups.values(), key=lambda g: len(self.sent.get(g.group_id, ())))
        tree = self.sent.setdefault(chosen.group_id, OrderedDict())
        for block in reversed(request.block_hashes):
            tree[block] = None
            tree.move_to_end(block)
        while len(tree) > chosen.capacity.kv_tokens // chosen.capacity.block_size:
            tree.popitem(last=False)
        return chosen

    def _matched(self, group_id: str, request: Request) -> int:
        tree = self.sent.get(group_id, ())
        return next((i for i, b in enumerate(request.block_hashes) if b not in tree), len(request.block_hashes))


class Dynamo(ImmediateRouter):
    """cost = blocks to prefill (what is queued for it included) + blocks that decode there; the least wins."""

    overlap_weight = 1.0

    def __init__(self, seed: int = 0):
        super().__init__(seed)
        self.index = PrefixIndex()
        self.to_prefill: dict[str, OrderedDict[str, int]] = {}  # group → request id → tokens, oldest first
        self.queued: dict[str, int] = {}  # their sum
        self.active: dict[str, int] = {}  # prompt tokens of all that is there

    def add_group(
        self,
        group_id: str,
        model: str,
        capacity: GroupCapacity,
        now: float,
        running: Iterable[Request] = (),
        num_received: int = 0,
        cost: CostModel | None = None,
    ) -> list[str]:
        running = list(running)
        self.index.add_holder(group_id)
        self.to_prefill[group_id], self.queued[group_id] = OrderedDict(), 0
        self.active[group_id] = sum(len(r.prompt_token_ids) for r in running)
        return super().add_group(group_id, model, capacity, now, running, num_received, cost)

    def remove_group(self, group_id: str) -> list[str]:
        self.index.remove_holder(group_id)
        return super().remove_group(group_id)

    def block_events(self, holder: str, events: BlockEvents) -> bool:
        return self.index.apply(holder, events)

    def report(self, group_id: str, load: GroupLoad, now: float) -> None:
        """It learns of a prefill's end from the first token; here from how many decode, the oldest being done first."""
        pending = self.to_prefill[group_id]
        while len(pending) > len(self.groups[group_id].requests) - load.num_decoding:
            self._prefilled(group_id, next(iter(pending)))

    def _prefilled(self, group_id: str, request_id: str) -> None:
        self.queued[group_id] -= self.to_prefill[group_id].pop(request_id, 0)

    def finished(self, request_ids: Iterable[str], now: float) -> None:
        ids = list(request_ids)
        for request_id in ids:
            group_id = self._group_of.get(request_id)
            if group_id is not None:
                self._prefilled(group_id, request_id)
                self.active[group_id] -= len(self.groups[group_id].requests[request_id].prompt_token_ids)
        super().finished(ids, now)

    def choose(self, request: Request) -> _Known:
        held: dict[str, int] = {}
        for level in self.index.lookup(request.block_hashes):
            for name in self.index.names(level.holders):
                held.setdefault(name, level.num_blocks)
        prompt = len(request.prompt_token_ids)

        def cost(group: _Known) -> float:
            size = group.capacity.block_size
            new = max(0, prompt - held.get(group.group_id, 0) * size)
            to_prefill = self.queued[group.group_id] + new
            return (self.overlap_weight * to_prefill + self.active[group.group_id] + prompt) / size

        best = min(self.groups.values(), key=cost)
        new = max(0, prompt - held.get(best.group_id, 0) * best.capacity.block_size)
        self.to_prefill[best.group_id][request.request_id] = new
        self.queued[best.group_id] += new
        self.active[best.group_id] += prompt
        return best


POLICIES: dict[str, Callable[[int], Router]] = {
    "pagedray": lambda seed: Dispatcher(max_queued_requests=1_000_000),
    "round_robin": RoundRobin,
    "power_of_two": PowerOfTwo,
    "consistent_hash": ConsistentHash,
    "least_outstanding": LeastOutstanding,
    "sglang": SGLang,
    "dynamo": Dynamo,
}
