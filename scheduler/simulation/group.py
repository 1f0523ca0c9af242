"""A simulated worker group: the step scheduler's rules over a cost model instead of a model.

It batches, chunks and caches as a real group does (`scheduler/step.py`): decodes go first but leave a quarter of the
budget; of the prefills the first in order may take half, the shortest of the best priority get the rest; prefixes are
shared through a real `BlockPool`; who needs what another is just computing waits for it; who comes first in order takes
the place of who comes last. Two things are simpler: blocks for the whole answer are taken at admission, so a sequence
that grows preempts nobody, and answers are not cached (a trace does not say what was in them).
Steps that only decode run in one event, up to the next that changes anything.
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from ..block_pool import BlockPool
from ..cost_model import CostModel, StepWork
from ..placement import GroupCapacity, GroupLoad
from ..prefix_index import BlockEvents
from ..request import Request


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """What every group of a simulation is. Tokens and seconds."""

    name: str
    cost: CostModel
    kv_tokens: int
    max_num_seqs: int = 256
    chunk: int = 2048
    block_size: int = 512
    priority_weight: float = 10.0

    @property
    def capacity(self) -> GroupCapacity:
        return GroupCapacity(2 * self.max_num_seqs, self.max_num_seqs, self.kv_tokens, self.block_size, self.chunk)


@dataclass(slots=True, eq=False)
class SimSequence:
    request: Request
    output_tokens: int
    key: tuple[float, int] = (0.0, 0)  # as in the step scheduler: arrival + priority * weight
    context: int = 0  # tokens computed
    remaining: int = 0  # tokens to generate
    cached: int = 0  # tokens found cached
    blocks: list[int] = field(default_factory=list)
    first_token_at: float | None = None
    finished_at: float = 0.0

    def __post_init__(self) -> None:
        self.remaining = self.output_tokens

    @property
    def num_tokens(self) -> int:
        """Its prompt, and what it has generated: after a preemption all of that is computed again."""
        return len(self.request.prompt_token_ids) + self.output_tokens - self.remaining


def _key(sequence: SimSequence) -> tuple[float, int]:
    return sequence.key


@dataclass(slots=True)
class _Step:
    began: float
    seconds: float  # of one
    count: int
    shares: dict[int, int]  # id(sequence) → prefill tokens


class SimGroup:
    """`schedule(at, step)` must call `self.step_ended(at, step)` then; a step that was cut short comes twice."""

    def __init__(self, group_id: str, spec: GroupSpec, schedule: Callable[[float, "_Step"], None]):
        self.group_id = group_id
        self.spec = spec
        self.cost = spec.cost
        self.pool = BlockPool(spec.kv_tokens // spec.block_size, spec.block_size)
        self.waiting: list[SimSequence] = []
        self.prefilling: list[SimSequence] = []
        self.decoding: list[SimSequence] = []
        self.num_received = 0
        self.served: dict[str, int] = {}
        self.busy_seconds = 0.0
        self._schedule = schedule
        self._step: _Step | None = None

    # -- what comes in ------------------------------------------------------------------------------------------------

    def add(self, sequence: SimSequence, now: float) -> None:
        self.num_received += 1
        sequence.key = now + sequence.request.priority * self.spec.priority_weight, self.num_received
        insort(self.waiting, sequence, key=_key)
        if self._step is None:
            self._start(now)
        elif not self._step.shares and self._step.count > 1:  # decoding on and on: stop after the step under way
            step = self._step
            step.count = min(step.count, int((now - step.began) / step.seconds) + 1)
            self._schedule(step.began + step.count * step.seconds, step)

    def step_ended(self, now: float, step: _Step) -> list[SimSequence]:
        """Returns the sequences that have finished."""
        if step is not self._step or now < step.began + step.count * step.seconds - 1e-9:
            return []  # cut short meanwhile, or an earlier end of the same step
        self._step = None
        self.busy_seconds += step.count * step.seconds
        finished: list[SimSequence] = []
        for sequence in list(self.decoding):
            self._generate(sequence, step.count, now, finished)
        for sequence in list(self.prefilling):
            if share := step.shares.get(id(sequence)):
                self._prefill(sequence, share, now, finished)
        self._start(now)
        return finished

    def _prefill(self, sequence: SimSequence, share: int, now: float, finished: list[SimSequence]) -> None:
        size, hashes = self.spec.block_size, sequence.request.block_hashes
        before = sequence.context // size
        sequence.context += share
        for i in range(before, min(sequence.context // size, len(hashes))):
            self.pool.cache(sequence.blocks[i], hashes[i], hashes[i - 1] if i else None)
        if sequence.context == sequence.num_tokens:
            self.prefilling.remove(sequence)
            self.decoding.append(sequence)
            if sequence.first_token_at is None:
                sequence.first_token_at = now
            self._generate(sequence, 1, now, finished)

    def _generate(self, sequence: SimSequence, count: int, now: float, finished: list[SimSequence]) -> None:
        sequence.context += count
        sequence.remaining -= count
        tenant = sequence.request.tenant
        self.served[tenant] = self.served.get(tenant, 0) + count
        if sequence.remaining == 0:
            sequence.finished_at = now
            self.decoding.remove(sequence)
            self.pool.release(sequence.blocks)
            finished.append(sequence)

    # -- steps --------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        if not self.waiting:
            return
        size = self.spec.block_size
        pending = {h for s in self.prefilling for h in s.request.block_hashes[s.context // size :]}
        for sequence in self.waiting[:64]:
            if len(self.prefilling) + len(self.decoding) >= self.spec.max_num_seqs and not self._preempt_for(sequence):
                return
            prompt = len(sequence.request.prompt_token_ids)
            hashes = sequence.request.block_hashes[: (prompt - 1) // size]
            cached = self.pool.lookup(hashes)
            if len(cached) < len(hashes) and hashes[len(cached)] in pending:
                continue
            total = -(-(prompt + sequence.output_tokens) // size)
            while total - len(cached) + self.pool.num_unused(cached) > self.pool.num_free:
                if not self._preempt_for(sequence):
                    return
            self.pool.share(cached)
            sequence.blocks = cached + self.pool.allocate(total - len(cached))
            sequence.context = len(cached) * size
            if sequence.first_token_at is None:
                sequence.cached = sequence.context
            pending.update(hashes[len(cached) :])
            self.waiting.remove(sequence)
            insort(self.prefilling, sequence, key=_key)

    def _preempt_for(self, sequence: SimSequence) -> bool:
        """Take the last of those that decode back to the queue, if it comes after this one."""
        last = max(self.decoding, key=_key, default=None)
        if last is None or last.key < sequence.key:
            return False
        self.decoding.remove(last)
        self.pool.release(last.blocks)
        last.blocks, last.context = [], 0
        insort(self.waiting, last, key=_key)
        return True

    def _start(self, now: float) -> None:
        self._admit()
        shares = self._shares()
        num_decodes = len(self.decoding)
        if not shares and not num_decodes:
            return
        decode_context = sum(s.context for s in self.decoding)
        count = 1 if shares else min(s.remaining for s in self.decoding)
        tokens, context = 0, 0.0
        for sequence in self.prefilling:
            if share := shares.get(id(sequence)):
                tokens += share
                context += share * (sequence.context + 0.5 * share)
        # over many steps of decoding the context grows: the average counts
        work = StepWork(tokens, context, num_decodes, decode_context + num_decodes * (count - 1) // 2)
        self._step = _Step(now, self.cost.step_seconds(work), count, shares)
        self._schedule(now + count * self._step.seconds, self._step)

    def _shares(self) -> dict[int, int]:
        if not self.prefilling:
            return {}
        budget = max(self.spec.chunk - len(self.decoding), self.spec.chunk // 4)
        shares: dict[int, int] = {}
        first = self.prefilling[0]
        lacks = {id(s): s.num_tokens - s.context for s in self.prefilling}
        shares[id(first)] = min(lacks[id(first)], (budget + 1) // 2)
        budget -= shares[id(first)]
        for sequence in sorted(self.prefilling, key=lambda s: (s.request.priority, lacks[id(s)])):
            share = min(lacks[id(sequence)] - shares.get(id(sequence), 0), budget)
            if share:
                shares[id(sequence)] = shares.get(id(sequence), 0) + share
                budget -= share
        return shares

    # -- what goes out ------------------------------------------------------------------------------------------------

    def load(self) -> GroupLoad:
        beside = self.spec.chunk, len(self.decoding), sum(s.context for s in self.decoding)
        backlog = 0.0
        for sequence in self.prefilling:
            lacks = sequence.num_tokens - sequence.context
            backlog += self.cost.chunked_prefill_seconds(lacks, sequence.context, *beside)
        for sequence in self.waiting:
            prompt = sequence.num_tokens
            known = min(len(self.pool.lookup(sequence.request.block_hashes)) * self.spec.block_size, prompt - 1)
            backlog += self.cost.chunked_prefill_seconds(prompt - known, known, *beside)
        used = (self.pool.num_blocks - self.pool.num_free) * self.spec.block_size
        used += sum(len(s.request.prompt_token_ids) for s in self.waiting)
        return GroupLoad(self.num_received, backlog, len(self.decoding), beside[2], used, self.cost)

    def take_blocks(self) -> BlockEvents | None:
        """What changed in its cache, if anything did."""
        return self.pool.log.take_events()

    def snapshot(self) -> BlockEvents:
        return self.pool.log.snapshot(self.pool.cached_hashes())

    def take_served(self) -> dict[str, int]:
        served, self.served = self.served, {}
        return served

    def sequences(self) -> list[SimSequence]:
        return [*self.waiting, *self.prefilling, *self.decoding]
