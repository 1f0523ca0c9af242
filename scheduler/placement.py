"""Where a request goes: one cost, in seconds, for each candidate group; the cheapest takes it.

    cost = time until it could start    prefill ahead of it, a slot, room in the KV cache; plus doubt about old reports
         + prefill of what is not cached there, slowed by what decodes beside it
           (or fetching a longer prefix from a store, where that is cheaper)
         + decode interference          what its prefill takes from those that decode there, weighted

Every part is continuous in the load: there is no threshold at which the rule becomes another one. Candidates are the
groups that hold the longest prefixes and the two least loaded ones of each role that fits (`roles.py`), so the work
does not grow with the cluster. A prefix that many ask for spreads by itself: once its holders' queues cost more than
computing it, it is computed elsewhere, and that group is a holder from the moment of the decision.
"""

import heapq
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from .cost_model import CostModel
from .fairness import Key
from .kv_fetch import KVSource
from .kv_sources import KVSources
from .prefix_index import PrefixIndex
from .roles import Roles


@dataclass(frozen=True, slots=True)
class GroupCapacity:
    """What a group is, as it says when it joins. `window`: requests it takes at a time, running ones included."""

    window: int
    max_num_seqs: int = 256
    kv_tokens: int = 1 << 62
    block_size: int = 16  # tokens
    chunk: int = 512  # tokens in a step
    node: str = ""  # where it runs: fetching from this node's store is free of the network
    block_bytes: int = 0  # of KV in a block, over all ranks; 0: it does not fetch
    fetch_weight: float = 1.0  # what a second of waiting for blocks counts against one of computing them
    role: str = "mixed"  # or "prefill", "decode"
    local_tokens: int = 0  # a decode group computes a prompt itself where no more tokens are missing


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """A group's load as it reports it. `num_received` counts the requests that this scheduler ever gave it, so
    that those still on their way when it reported are added to what it says."""

    num_received: int
    backlog_seconds: float = 0.0  # to compute all prompt tokens that it holds and has not computed
    num_decoding: int = 0
    decode_context: int = 0  # tokens that those read in a step
    kv_tokens_used: int = 0  # by unfinished sequences
    cost: CostModel | None = None  # as it measures its own steps


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """Weights of the cost, and how far ahead groups are given work."""

    lead_seconds: float = 0.05  # a group is handed a request once it could start it within this time
    max_index_candidates: int = 4
    interference_weight: float = 0.02
    report_seconds: float = 0.5  # how often groups report; older figures are doubted, a second a second
    default_output_tokens: float = 256.0  # until requests have ended


@dataclass(slots=True)
class Placed:
    """A request at a group, and what it was reckoned at."""

    number: int  # of those the group was given
    seconds: float
    kv_tokens: int
    key: Key
    placed_at: float
    hand_over: bool = False


@dataclass(slots=True)
class Group:
    """What is known of a group, and what is reckoned of it since its last report."""

    group_id: str
    model: str
    capacity: GroupCapacity
    bit: int
    cost: CostModel
    reported_at: float
    free_at: float  # when it will have computed the prompts it has
    urgent_free_at: float = 0.0  # the same of those that go before all others
    num_given: int = 0
    num_decoding: int = 0
    decode_context: int = 0
    kv_tokens: int = 0
    requests: dict[str, Placed] = field(default_factory=dict)
    unseen: deque[Placed] = field(default_factory=deque)  # given since its last report
    version: int = 0  # of its entry in the order of load
    draining: bool = False  # what it has it keeps, and it is given nothing more

    def num_before(self, key: Key) -> int:
        """How many of its requests run before one with this key."""
        return sum(p.key < key for p in self.requests.values())

    def prefill_seconds(self, num_tokens: int, context: int) -> float:
        """With what decodes beside it."""
        return self.cost.chunked_prefill_seconds(
            num_tokens, context, self.capacity.chunk, self.num_decoding, self.decode_context
        )


@dataclass(slots=True)  # these two are made by the thousand: frozen, each would take three times as long
class Match:
    """What a lookup found for one request, and what does not depend on the group."""

    hashes: Sequence[Hashable]
    num_tokens: int  # of the prompt
    kv_tokens: float  # it will come to hold
    levels: tuple[tuple[int, int], ...]  # (blocks, mask of groups), longest first
    stored: tuple[tuple[int, int], ...] = ()  # the same of stores
    goes_on: bool = False  # it has made tokens already, elsewhere


@dataclass(slots=True)
class Choice:
    group: Group
    cost: float
    start: float  # when it could start, in seconds from now
    seconds: float  # of prefill
    num_cached: int  # tokens
    source: KVSource | None = None  # what it should fetch first
    delay: float = 0.0  # seconds that the fetch takes beyond `start`
    hand_over: bool = False  # another group is to go on with it

    @property
    def first_token(self) -> float:
        """In seconds from now."""
        return self.start + self.delay + self.seconds


class Placement:
    """The groups of one model, by load, over the shared index and the stores. `mean_output` and `mean_seconds` follow
    what ended."""

    def __init__(self, index: PrefixIndex, options: PlacementOptions | None = None, sources: KVSources | None = None):
        self.index = index
        self.sources = sources or KVSources(index)
        self.usual_cost = CostModel()  # of a group that has not measured its own
        self.num_fetches_chosen = 0  # a store had more than the group, and fetching was cheaper
        self.num_fetches_declined = 0  # it had, and computing was
        self.options = options or PlacementOptions()
        self.groups: dict[str, Group] = {}
        self.num_open = 0  # of them: those that do not drain
        self._by_bit: dict[int, Group] = {}
        self.roles = Roles()
        # by role a heap of (load, version, group); old versions are skipped
        self._orders: dict[str, list[tuple[float, int, str]]] = {}
        self._version = 0
        self._turn = 0
        self.mean_output = self.options.default_output_tokens
        self.mean_seconds = 5.0  # from dispatch to end
        self._num_tokens = self._num_ended = 0.0

    # -- groups -------------------------------------------------------------------------------------------------------

    def add(self, group: Group, now: float) -> None:
        self.groups[group.group_id] = group
        self.num_open += 1
        self._by_bit[group.bit] = group
        capacity = group.capacity
        fetches = capacity.block_bytes > 0
        self.roles.add(group.bit, capacity.role, fetches, capacity.local_tokens // capacity.block_size)
        self.moved(group, now)

    def drain(self, group_id: str) -> None:
        """Choose this group no more."""
        group = self.groups[group_id]
        self.num_open -= not group.draining
        group.draining = True
        self.roles.remove(group.bit)

    def remove(self, group_id: str) -> Group:
        group = self.groups.pop(group_id)
        self.num_open -= not group.draining
        del self._by_bit[group.bit]
        self.roles.remove(group.bit)
        return group

    def report(self, group: Group, load: GroupLoad, now: float) -> None:
        """Take its figures for true, and add what it had not got yet when it gave them."""
        while group.unseen and group.unseen[0].number <= load.num_received:
            group.unseen.popleft()
        if load.cost is not None:
            group.cost = self.usual_cost = load.cost
        group.reported_at = now
        group.num_decoding = load.num_decoding
        group.decode_context = load.decode_context
        group.kv_tokens = load.kv_tokens_used + sum(p.kv_tokens for p in group.unseen)
        group.free_at = now + load.backlog_seconds + sum(p.seconds for p in group.unseen)
        self.moved(group, now)

    def moved(self, group: Group, now: float) -> None:
        """Its load has changed: find it its place in the order."""
        self._version += 1
        group.version = self._version
        share = len(group.requests) / group.capacity.max_num_seqs
        load = max(0.0, group.free_at - now) + self.mean_seconds * share
        order = self._orders.setdefault(group.capacity.role, [])
        heapq.heappush(order, (load, self._version, group.group_id))
        if len(order) > 64 + 4 * len(self.groups):
            order[:] = [e for e in order if self._is_current(e)]
            heapq.heapify(order)

    def _is_current(self, entry: tuple[float, int, str]) -> bool:
        group = self.groups.get(entry[2])
        return group is not None and group.version == entry[1] and not group.draining

    def least_loaded(self, role: str = "mixed") -> list[Group]:
        """Two of a role, or as many as there are."""
        order = self._orders.get(role, [])
        found: list[tuple[float, int, str]] = []
        while order and len(found) < 2:
            entry = heapq.heappop(order)
            if self._is_current(entry):
                found.append(entry)
        for entry in found:
            heapq.heappush(order, entry)
        return [self.groups[entry[2]] for entry in found]

    # -- decisions ----------------------------------------------------------------------------------------------------

    def match(
        self,
        hashes: Sequence[Hashable],
        num_tokens: int,
        max_tokens: int | None,
        now: float = 0.0,
        goes_on: bool = False,
    ) -> Match:
        """Look a prompt up."""
        levels = self.index.lookup(hashes, self.roles.everybody)
        output = self.mean_output if max_tokens is None else min(max_tokens, self.mean_output)
        return Match(
            hashes,
            num_tokens,
            num_tokens + output,
            tuple((level.num_blocks, level.holders) for level in levels),
            self.sources.lookup(hashes, now),
            goes_on,
        )

    def _candidates(self, match: Match) -> dict[str, tuple[Group, int]]:
        """group id → group, and how many blocks it has."""
        found: dict[str, tuple[Group, int]] = {}
        size = next(iter(self.groups.values())).capacity.block_size
        num_stored = match.stored[0][0] if match.stored else 0
        fit = self.roles.fit(match.goes_on, match.num_tokens // size, match.levels, num_stored)
        for num_blocks, mask in match.levels:
            mask &= fit
            room = self.options.max_index_candidates - len(found)
            if room <= 0:
                break
            if mask.bit_count() > room:  # not always the same ones of many
                self._turn = (self._turn + 1) % mask.bit_length()
                mask = (mask >> self._turn << self._turn) or mask
            while mask and room > 0:
                bit = mask & -mask
                mask ^= bit
                group = self._by_bit[bit]
                if group.group_id not in found:
                    found[group.group_id] = group, num_blocks
                    room -= 1
        idle = [group for role in self._orders for group in self.least_loaded(role) if group.bit & fit]
        for group in idle:
            if group.group_id not in found:
                blocks = next((n for n, mask in match.levels if mask & group.bit), 0)
                found[group.group_id] = group, blocks
        return found

    def choose(
        self,
        match: Match,
        key: Key,
        now: float,
        planned: dict[str, float] | None = None,
        reserve: float = 0.0,
        urgent: bool = False,
    ) -> Choice | None:
        """The cheapest group, counting what is `planned` for groups in seconds. None: no group takes any.

        `reserve` is the share of each group's slots and KV cache that is not for this request; an `urgent` one is
        computed before all that the group has which are not.
        """
        best: Choice | None = None
        best_order = (float("inf"), 0)
        for group, num_blocks in self._candidates(match).values():
            ahead = planned.get(group.group_id, 0.0) if planned else 0.0
            choice = self.cost(group, num_blocks, match, key, now, ahead, reserve, urgent)
            order = choice.cost, len(group.requests)
            if best is None or order < best_order:
                best, best_order = choice, order
        return best

    def cost(
        self,
        group: Group,
        num_blocks: int,
        match: Match,
        key: Key,
        now: float,
        planned: float = 0.0,
        reserve: float = 0.0,
        urgent: bool = False,
    ) -> Choice:
        """What it costs at a group that has so many of the request's blocks; infinite where its window is full."""
        options, capacity = self.options, group.capacity
        # the last token is always computed: its logits are what the request came for
        cached = min(num_blocks * capacity.block_size, match.num_tokens - 1)
        start = backlog = max(0.0, group.free_at + planned - now)
        if urgent:
            start = max(0.0, group.urgent_free_at - now)
        doubt = max(0.0, now - group.reported_at - options.report_seconds)
        shortage = group.kv_tokens + match.kv_tokens - cached - (1.0 - reserve) * capacity.kv_tokens
        if shortage > 0.0:  # what is in use comes free over about the time a request takes
            start += self.mean_seconds * shortage / capacity.kv_tokens
        slots = capacity.max_num_seqs - int(reserve * capacity.max_num_seqs)
        if len(group.requests) >= min(slots, capacity.window):
            num_before = group.num_before(key)
            if urgent:  # it gets the next slot that comes free
                num_before = min(num_before, slots, capacity.window - 1)
            start += self.mean_seconds * max(0, num_before + 1 - slots) / capacity.max_num_seqs
            if num_before >= capacity.window:
                start = float("inf")
        seconds = group.prefill_seconds(match.num_tokens - cached, cached)
        source, delay = None, 0.0
        # What a prefill group gave away was computed so that a decode group need not.
        weight = 0.0 if match.goes_on and capacity.role == "decode" else capacity.fetch_weight
        for offer in self.sources.offers(match.stored, num_blocks, capacity.node) if capacity.block_bytes else ():
            fetched = min(offer.num_blocks * capacity.block_size, match.num_tokens - 1)
            arrival = self.sources.seconds((offer.num_blocks - num_blocks) * capacity.block_bytes, offer.same_node)
            rest = group.prefill_seconds(match.num_tokens - fetched, fetched)
            late = max(0.0, arrival - start)  # it travels while the request waits
            if weight * late + rest < weight * delay + seconds:
                source = KVSource(offer.store, offer.num_blocks, arrival, offer.same_node)
                cached, seconds, delay = fetched, rest, late
        # what it goes before waits in its turn
        interference = options.interference_weight * group.num_decoding * seconds + 0.1 * max(0.0, backlog - start)
        cost = start + doubt + delay + seconds + interference
        hand_over = not match.goes_on and self.roles.hands_over(group.bit)
        if hand_over:  # then its blocks travel
            num_bytes = match.num_tokens // capacity.block_size * capacity.block_bytes
            cost += self.sources.seconds(num_bytes, same_node=False)
        return Choice(group, cost, start, seconds, cached, source, delay, hand_over)

    def place(self, request_id: str, choice: Choice, match: Match, key: Key, now: float, urgent: bool = False) -> None:
        """Enter a decision: the group is busier, and will hold the prompt's blocks."""
        group = choice.group
        if choice.source is not None:
            self.num_fetches_chosen += 1
        elif match.stored and match.stored[0][0] * group.capacity.block_size > choice.num_cached + 1:
            self.num_fetches_declined += bool(group.capacity.block_bytes)
        group.num_given += 1
        kv_tokens = int(match.kv_tokens - choice.num_cached)
        placed = Placed(group.num_given, choice.seconds, kv_tokens, key, now, choice.hand_over)
        group.requests[request_id] = placed
        group.unseen.append(placed)
        group.free_at = max(group.free_at, now) + choice.seconds
        if urgent:
            group.urgent_free_at = max(group.urgent_free_at, now) + choice.seconds
        group.kv_tokens += placed.kv_tokens
        self.index.expect(group.group_id, request_id, match.hashes)
        self.moved(group, now)

    def restore(self, group: Group, request_id: str, key: Key, now: float) -> None:
        """A group that joins has this request already; its reports say what work it is."""
        group.requests[request_id] = Placed(group.num_given, 0.0, 0, key, now)

    def ended(self, group: Group, request_id: str, now: float) -> None:
        """A request has left its group; its next report says what that frees."""
        placed = group.requests.pop(request_id)
        self.index.settle(request_id)
        if placed in group.unseen:
            group.unseen.remove(placed)
            group.kv_tokens -= placed.kv_tokens
            group.free_at -= placed.seconds
        if not placed.hand_over:  # it has only begun
            self.mean_seconds += 0.02 * (now - placed.placed_at - self.mean_seconds)
            self._num_ended += 1
        self.moved(group, now)

    def served(self, output_tokens: int) -> None:
        """So many tokens were made by all groups; with how many requests ended, it tells how long answers are."""
        self._num_tokens += output_tokens
        if self._num_ended > 100:
            self.mean_output = self._num_tokens / self._num_ended
        if self._num_ended > 2000:
            self._num_tokens, self._num_ended = self._num_tokens / 2, self._num_ended / 2
