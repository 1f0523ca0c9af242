"""StepScheduler: who runs in the next step. Continuous batching (Orca), chunked prefill (Sarathi), preemption (vLLM).

The order of sequences is static: `key = arrival + priority * priority_weight`, in seconds. A level of priority is
worth so many seconds of waiting, equal priorities are first come first served, and nobody starves: a sequence waits
only for those with a smaller key, of which no new ones come once its key has passed. Who runs follows from it
(`_share_budget` has how a step is divided):

- the running set is the smallest keys, as many as slots and blocks allow; a smaller key preempts a larger one;
- blocks are handed out in key order; where they run out, the largest key is preempted (its KV is recomputed later).
  So the smallest key always advances, and since every sequence fits the pool alone, all of them end.

Where the model is a pipeline of stages, several steps are in flight (Sarathi): a plan may be asked for before the last
one's result is there. Every rank executes plans in order, so the next chunk of a prompt may follow the one before it,
and a prefix may be shared as soon as the step that computes it is planned. A sequence whose next token is being drawn
waits for it, and one in flight is not preempted: who needs its blocks waits for its step to come back.

Blocks may come from elsewhere (`kv_fetch.py`): who needs them waits, and others run. And they may go elsewhere
(`kv_publish.py`), which keeps them for a while. A sequence that is to be handed over runs on until a store has its
prompt.
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from .block_pool import BlockHash, BlockPool
from .cost_model import CostModel
from .errors import ConfigError, ContextLengthExceeded, InvalidRequest
from .kv_fetch import KVFetch, KVFetches, KVSource
from .kv_publish import Publisher
from .placement import GroupLoad
from .plan import NewSequence, ScheduledSequence, StepPlan, StepResult
from .request import Request, SequenceOutput
from .sequence import Sequence

# A fetch may take so much longer than it was reckoned to take.
_FETCH_SLACK_SECONDS = 1.0
_FETCH_SLACK = 3.0

# A pipeline's prompts are cut for several batches, but not finer: below this many tokens a step hardly gets shorter.
MIN_PIPELINE_CHUNK = 64


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges and running totals of one worker group."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    num_preemptions: int
    prefix_cache_queries: int  # tokens looked up
    prefix_cache_hits: int  # tokens found
    num_steps: int
    num_waiting_for_kv: int = 0  # fetches that sequences wait for
    prefix_cache_hits_node: int = 0  # of the tokens found, those that were fetched for it from the node's store
    prefix_cache_hits_network: int = 0  # and from another node's
    num_scheduled_tokens: int = 0  # computed in all steps


class StepScheduler:
    """Owns a group's sequences and blocks. Deterministic; no clock of its own: `now` comes with each request."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...] = (),
        enable_prefix_caching: bool = True,
        priority_weight: float = 10.0,
        max_in_flight: int = 1,
        publisher: Callable[[BlockPool], Publisher] | None = None,
        kv_fetch_timeout: float = 30.0,
    ):
        """`publisher` makes what offers cached blocks to others; `kv_fetch_timeout`: most seconds a fetch may take."""
        if max_model_len > num_blocks * block_size:
            raise ConfigError(
                f"max_model_len is {max_model_len} tokens but the KV pool holds {num_blocks * block_size} "
                f"({num_blocks} blocks of {block_size}); raise kv_cache_memory or lower max_model_len"
            )
        self.pool = BlockPool(num_blocks, block_size, enable_prefix_caching)
        self.fetches = KVFetches(self.pool)
        self.publisher = publisher(self.pool) if publisher and enable_prefix_caching else None
        self.kv_fetch_timeout = kv_fetch_timeout
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.priority_weight = priority_weight
        self.max_in_flight = max_in_flight  # steps at a time: the pipeline's stages
        self._sequences: dict[str, Sequence] = {}
        self._by_seq_id: dict[int, Sequence] = {}
        self._waiting: list[Sequence] = []  # both sorted by key
        self._running: list[Sequence] = []
        self._released: list[int] = []
        self._to_publish: set[int] = set()  # seq ids
        self._leaving: dict[str, list[BlockHash]] = {}  # requests that shall move, and what the store must have first
        self._in_flight: dict[int, tuple[int, list[Sequence]]] = {}  # step id -> tokens, who has a share in it
        self._next_seq_id = 0
        self._step_id = 0
        self._num_preemptions = 0
        self._prefix_cache_queries = 0
        self._prefix_cache_hits = 0
        self._fetched_hits = {True: 0, False: 0}  # tokens; from the store of this node?
        self._num_scheduled_tokens = 0

    # -- requests -----------------------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Queue a request that arrived at `now` (seconds). Refuse at once one that could never run."""
        prompt_len, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
        if request.request_id in self._sequences:
            raise InvalidRequest(f"request id {request.request_id!r} is in use")
        if prompt_len == 0:
            raise InvalidRequest("the prompt has no tokens", "prompt")
        if prompt_len >= self.max_model_len or prompt_len + (max_tokens or 1) > self.max_model_len:
            asked = f"{prompt_len} prompt tokens and {max_tokens or 'at least 1'} to generate"
            raise ContextLengthExceeded(f"{asked} do not fit the context of {self.max_model_len} tokens")
        max_len = self.max_model_len if max_tokens is None else prompt_len + max_tokens
        if len(request.token_ids) >= max_len:
            raise ContextLengthExceeded(f"it has {len(request.output_token_ids)} tokens already, and may have no more")
        key = (now - request.age + request.priority * self.priority_weight, self._next_seq_id)
        seq = Sequence(request, self._next_seq_id, key, max_len)
        self._next_seq_id += 1
        self._sequences[request.request_id] = self._by_seq_id[seq.seq_id] = seq
        insort(self._waiting, seq, key=_key)
        if request.kv_source is not None:
            self._fetch(seq, request.kv_source, now)

    def abort(self, request_id: str) -> bool:
        """Forget a request and free its blocks now. False where it is not (or no longer) known.

        A step in flight may still write them: whoever gets them next writes later, as plans are executed in order.
        """
        seq = self._sequences.get(request_id)
        if seq is None:
            return False
        (self._running if seq in self._running else self._waiting).remove(seq)
        self._forget(seq)
        return True

    def has_unfinished(self) -> bool:
        return bool(self._sequences)

    @property
    def num_in_flight(self) -> int:
        """Steps that were planned and whose results are not in."""
        return len(self._in_flight)

    def request_ids(self) -> list[str]:
        return list(self._sequences)

    # -- blocks from elsewhere ----------------------------------------------------------------------------------------

    def _fetch(self, seq: Sequence, source: KVSource, now: float) -> None:
        """Order what the source has beyond what is here, if there is room for it now; else it will be computed."""
        hashes = self._wanted_hashes(seq)[: source.num_blocks]
        prefix = self.pool.lookup(hashes)
        missing = len(hashes) - len(prefix)
        if not missing or self.fetches.is_arriving(hashes[len(prefix)]):
            return
        if missing + self.pool.num_unused(prefix) > self._num_spare():
            return
        timeout = min(self.kv_fetch_timeout, _FETCH_SLACK_SECONDS + _FETCH_SLACK * source.seconds)
        after_step = self._step_id - 1
        self.fetches.begin(seq.request.request_id, source, hashes, prefix, now + timeout, after_step)
        seq.fetched = len(prefix), source.same_node

    def take_fetches(self, now: float) -> list[KVFetch]:
        """What the ranks should fetch from now on; what is late is no longer waited for. End each by `end_fetch`."""
        self.fetches.expire(now)
        return self.fetches.take(min(self._in_flight, default=self._step_id))

    def end_fetch(self, fetch_id: int, num_blocks: int) -> None:
        """The ranks are done with a fetch, and have its first `num_blocks` blocks."""
        self.fetches.end(fetch_id, num_blocks)

    def publish_running(self) -> None:
        """Offer all that running sequences have computed, each with its next token: they will go on elsewhere."""
        if self.publisher is not None:
            self._to_publish.update(s.seq_id for s in self._running)

    @property
    def is_publishing(self) -> bool:
        return bool(self._to_publish) or (self.publisher is not None and self.publisher.busy)

    # -- giving sequences away ----------------------------------------------------------------------------------------

    def take_hand_overs(self) -> list[str]:
        """Requests that another group can go on with from now on: a store has their prompts. They run here until they
        are aborted; those whose blocks no store has taken stay to their end.
        """
        ready = []
        for request_id, hashes in list(self._leaving.items()):
            assert self.publisher is not None
            num_taken = self.publisher.num_taken(hashes)
            if num_taken is None:
                continue
            del self._leaving[request_id]
            if (len(hashes) - num_taken) * self.block_size < self.publisher.min_run_tokens:
                ready.append(request_id)
        return ready

    # -- schedule -----------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Decide the next step. None where there is nothing to compute and nothing to tell the ranks.

        With steps in flight, None may also mean that all there is to do waits for them.
        """
        self._admit()
        shares = self._share_budget()
        new: list[NewSequence] = []
        scheduled: list[ScheduledSequence] = []
        sharers: list[Sequence] = []
        for seq in list(self._running):  # in key order, so whom a shortage hits comes later and has got nothing yet
            num_tokens = shares.get(seq.seq_id, 0)
            if num_tokens and seq in self._running and self._grow(seq, num_tokens):
                if not seq.num_sent_tokens:
                    new.append(_in_full(seq))
                scheduled.append(self._take_step(seq, num_tokens))
                sharers.append(seq)
        if not scheduled and not self._released:
            return None
        plan = StepPlan(self._step_id, tuple(self._released), tuple(new), tuple(scheduled))
        self._released.clear()
        self._in_flight[self._step_id] = plan.num_tokens, sharers
        self._num_scheduled_tokens += plan.num_tokens
        for seq in sharers:
            seq.num_in_flight += 1
        self._step_id += 1
        return plan

    def _admit(self) -> None:
        """Move waiting sequences to the running set, in key order, while there are slots and blocks."""
        pending = self._pending_prefixes() if self._waiting else {}
        num_considered = 0
        for seq in list(self._waiting):
            if num_considered == self.max_num_seqs:
                return
            hashes = self._wanted_hashes(seq)
            blocks = self.pool.lookup(hashes)
            next_hash = hashes[len(blocks)] if len(blocks) < len(hashes) else None
            if next_hash is not None and self.fetches.is_arriving(next_hash):
                continue  # what it needs next is on its way
            num_considered += 1
            if next_hash is not None and pending.get(next_hash, seq.key) < seq.key:
                continue  # a sequence before it is computing what it needs next: wait a few steps, then share
            while not self._fits(seq, blocks):
                victim = self._last_preemptible()
                if victim is None or victim.key < seq.key:
                    return
                self._preempt(victim)
            self.pool.share(blocks)
            seq.block_ids = blocks
            seq.num_computed_tokens = len(blocks) * self.block_size
            if seq.num_cached_tokens is None:
                seq.num_cached_tokens = seq.num_computed_tokens
                self._prefix_cache_queries += len(seq.token_ids)
                self._prefix_cache_hits += seq.num_computed_tokens
                if seq.fetched is not None:
                    first, same_node = seq.fetched
                    self._fetched_hits[same_node] += max(0, len(blocks) - first) * self.block_size
            pending.update((h, seq.key) for h in hashes[len(blocks) :])
            self._waiting.remove(seq)
            insort(self._running, seq, key=_key)

    def _wanted_hashes(self, seq: Sequence) -> list[BlockHash]:
        """Of the blocks that it could share. The last token is always computed: its logits are what it came for."""
        if seq.reads_prompt:
            return []
        seq.extend_hashes(self.block_size)
        return seq.block_hashes[: (len(seq.token_ids) - 1) // self.block_size]

    def _pending_prefixes(self) -> dict[BlockHash, tuple[float, int]]:
        """Prefixes that running sequences have yet to compute, and the key of the one that will."""
        pending: dict[BlockHash, tuple[float, int]] = {}
        if self.pool.enable_caching:
            for seq in reversed(self._running):
                computed = seq.num_computed_tokens // self.block_size
                pending.update((h, seq.key) for h in seq.block_hashes[computed:])
        return pending

    def _fits(self, seq: Sequence, cached: list[int]) -> bool:
        """Is there a slot, and are there blocks for all its tokens beside what running ones still need?"""
        if len(self._running) >= self.max_num_seqs:
            return False
        needed = self._blocks_for(len(seq.token_ids)) - len(cached) + self.pool.num_unused(cached)
        return needed <= self._num_spare()

    def _num_spare(self) -> int:
        """Free blocks that those which run will not need."""
        promised = sum(max(0, self._blocks_for(len(r.token_ids)) - len(r.block_ids)) for r in self._running)
        headroom = len(self._running)  # a block each to grow into, or they would be preempted for the newcomer
        return self.pool.num_free - promised - headroom

    def _share_budget(self) -> dict[int, int]:
        """Tokens of this step for each running sequence.

        Sequences that need one token (decodes) go first, the longest unserved ahead, but leave a quarter of the
        budget to prefills. Of the prefills the first in order may take half, the rest goes to the shortest of the best
        priority: so a long prompt does not hold up short ones, a flood of short ones does not stop a long one, a better
        priority does not share with a worse one, and decodes run on.
        """
        ready = [s for s in self._running if not s.awaits_token]
        decodes = [s for s in ready if s.num_uncomputed_tokens == 1]
        prefills = [s for s in ready if s.num_uncomputed_tokens > 1]
        budget = self._even_budget(ready)
        reserve = max(1, budget // 4) if prefills and budget > 1 else 0
        most = min(budget - reserve, self._even_decodes(len(decodes) + len(self._running) - len(ready)))
        if len(decodes) > most:
            decodes = sorted(decodes, key=lambda s: (s.last_step, s.key))[:most]
        shares = {s.seq_id: 1 for s in decodes}
        budget -= len(decodes)
        if prefills:
            first = prefills[0]
            shares[first.seq_id] = min(first.num_uncomputed_tokens, (budget + 1) // 2)
            budget -= shares[first.seq_id]
        for seq in sorted(prefills, key=lambda s: (s.request.priority, s.num_uncomputed_tokens, s.key)):
            share = min(seq.num_uncomputed_tokens - shares.get(seq.seq_id, 0), budget)
            shares[seq.seq_id] = shares.get(seq.seq_id, 0) + share
            budget -= share
        return shares

    def _even_budget(self, ready: list[Sequence]) -> int:
        """Tokens of this step, so that the batches in flight are about as long as each other."""
        if self.max_in_flight == 1:
            return self.max_num_batched_tokens
        tokens = sum(s.num_uncomputed_tokens for s in ready) + sum(n for n, _ in self._in_flight.values())
        return min(self.max_num_batched_tokens, max(MIN_PIPELINE_CHUNK, -(-tokens // self.max_in_flight)))

    def _even_decodes(self, total: int) -> int:
        """How many of `total` decodes this step may take: sizes of batches in flight differ by one at most."""
        low, larger_ones = divmod(total, self.max_in_flight)
        larger = sum(len(sharers) > low for _, sharers in self._in_flight.values())
        return max(1, low + (larger < larger_ones))

    def _last_preemptible(self) -> Sequence | None:
        """The running sequence with the largest key of those that no step in flight works on."""
        return next((s for s in reversed(self._running) if not s.num_in_flight), None)

    def _grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Allocate for `num_tokens` more tokens, preempting from the end of the order.

        False: `seq` itself was hit, or waits for the steps in flight of those behind it.
        """
        missing = self._blocks_for(seq.num_computed_tokens + num_tokens) - len(seq.block_ids)
        while missing > self.pool.num_free:
            last = self._last_preemptible()
            if last is None or last.key < seq.key:
                return False
            self._preempt(last)
            if last is seq:
                return False
        seq.block_ids += self.pool.allocate(max(0, missing))
        return True

    def _take_step(self, seq: Sequence, num_tokens: int) -> ScheduledSequence:
        seq.awaits_token = num_tokens == seq.num_uncomputed_tokens
        share = ScheduledSequence(
            seq_id=seq.seq_id,
            num_computed_tokens=seq.num_computed_tokens,
            num_tokens=num_tokens,
            new_token_ids=tuple(seq.token_ids[seq.num_sent_tokens :]) if seq.num_sent_tokens else (),
            new_block_ids=tuple(seq.block_ids[seq.num_sent_blocks :]),
            sample=seq.awaits_token,
        )
        seq.num_sent_tokens, seq.num_sent_blocks = len(seq.token_ids), len(seq.block_ids)
        seq.last_step = self._step_id
        first_new = seq.num_computed_tokens // self.block_size
        seq.num_computed_tokens += num_tokens
        # Findable from now on: steps run in order, so whoever shares these blocks reads them after they are written.
        seq.extend_hashes(self.block_size)
        for i in range(first_new, seq.num_computed_tokens // self.block_size):
            self.pool.cache(seq.block_ids[i], seq.block_hashes[i], seq.block_hashes[i - 1] if i else None)
        return share

    def _preempt(self, seq: Sequence) -> None:
        """Take a running sequence's blocks and let it wait again; what it generated stays and will be recomputed."""
        if seq.num_sent_tokens:
            self._num_preemptions += 1
        self._running.remove(seq)
        self._drop_blocks(seq)
        insort(self._waiting, seq, key=_key)

    def _drop_blocks(self, seq: Sequence) -> None:
        self.pool.release(seq.block_ids)
        self._to_publish.discard(seq.seq_id)
        seq.block_ids = []
        seq.num_computed_tokens = 0
        seq.awaits_token = False
        if seq.num_sent_tokens:
            self._released.append(seq.seq_id)
        seq.num_sent_tokens = seq.num_sent_blocks = 0

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # -- update -------------------------------------------------------------------------------------------------------

    def update(self, result: StepResult) -> list[SequenceOutput]:
        """Take in what a step drew and pooled, and end the sequences that are done.

        What came of sequences that were aborted meanwhile is dropped.
        """
        outputs = []
        _, sharers = self._in_flight.pop(result.step_id)
        for sharer in sharers:
            sharer.num_in_flight -= 1
        for sampled in result.tokens:
            seq = self._awaiting(sampled.seq_id, result.step_id)
            if seq is None:
                continue
            seq.token_ids.append(sampled.token_id)
            finish_reason, stop_token_id = self._finish_reason(seq)
            if seq.num_output_tokens == 1 or finish_reason or seq.seq_id in self._to_publish:
                self._publish(seq)
            outputs.append(
                SequenceOutput(
                    request_id=seq.request.request_id,
                    token_ids=(sampled.token_id,),
                    logprobs=(sampled.logprobs,) if sampled.logprobs else (),
                    finish_reason=finish_reason,
                    stop_token_id=stop_token_id,
                    num_cached_tokens=seq.num_cached_tokens or 0,
                    prompt_logprobs=sampled.prompt_logprobs,
                )
            )
            if finish_reason:
                self._running.remove(seq)
                self._forget(seq)
        for seq_id in result.deferred:
            seq = self._awaiting(seq_id, result.step_id)
            if seq is not None:
                seq.num_computed_tokens -= 1  # its last token is computed again, for the logits
        for pooled in result.pooled:
            seq = self._awaiting(pooled.seq_id, result.step_id)
            if seq is None:
                continue
            self._publish(seq)
            cached, request_id = seq.num_cached_tokens or 0, seq.request.request_id
            outputs.append(
                SequenceOutput(
                    request_id, (), finish_reason="stop", num_cached_tokens=cached, embedding=pooled.embedding
                )
            )
            self._running.remove(seq)
            self._forget(seq)
        return outputs

    def _awaiting(self, seq_id: int, step_id: int) -> Sequence | None:
        """The sequence, if this step is the one whose result it waits for; then it waits no longer."""
        seq = self._by_seq_id.get(seq_id)
        if seq is None or not seq.awaits_token or seq.last_step != step_id:
            return None
        seq.awaits_token = False
        return seq

    def _publish(self, seq: Sequence) -> None:
        if self.publisher is None:
            return
        computed = seq.block_hashes[: seq.num_computed_tokens // self.block_size]
        request = seq.request
        leaves = request.hand_over and seq.num_output_tokens == 1 and bool(computed) and not request.reads_prompt
        if leaves:
            self._leaving[request.request_id] = computed
        wanted = leaves or seq.seq_id in self._to_publish
        self.publisher.computed(computed, len(computed) if wanted else (seq.num_cached_tokens or 0) // self.block_size)
        self._to_publish.discard(seq.seq_id)

    def _finish_reason(self, seq: Sequence) -> tuple[str | None, int | None]:
        sampling, token = seq.request.sampling, seq.token_ids[-1]
        if seq.num_output_tokens >= sampling.min_tokens:
            if token in self.eos_token_ids and not sampling.ignore_eos:
                return "stop", None
            if token in sampling.stop_token_ids:
                return "stop", token
        return ("length", None) if len(seq.token_ids) >= seq.max_len else (None, None)

    def _forget(self, seq: Sequence) -> None:
        self._drop_blocks(seq)
        self._leaving.pop(seq.request.request_id, None)
        del self._sequences[seq.request.request_id], self._by_seq_id[seq.seq_id]

    # -- watching -----------------------------------------------------------------------------------------------------

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_blocks=self.pool.num_blocks,
            num_used_blocks=self.pool.num_blocks - self.pool.num_free,
            num_preemptions=self._num_preemptions,
            prefix_cache_queries=self._prefix_cache_queries,
            prefix_cache_hits=self._prefix_cache_hits,
            num_steps=self._step_id,
            num_waiting_for_kv=self.fetches.num_awaited,
            prefix_cache_hits_node=self._fetched_hits[True],
            prefix_cache_hits_network=self._fetched_hits[False],
            num_scheduled_tokens=self._num_scheduled_tokens,
        )

    def load(self, num_received: int, cost: CostModel) -> GroupLoad:
        """What the global scheduler must know to place requests; `cost` as this group's steps measure it."""
        size = self.block_size
        decodes = [s for s in self._running if s.num_uncomputed_tokens <= 1]
        beside = self.max_num_batched_tokens, len(decodes), sum(len(s.token_ids) for s in decodes)
        backlog, tokens = 0.0, 0
        for seq in self._running:
            if seq.num_uncomputed_tokens > 1:
                backlog += cost.chunked_prefill_seconds(seq.num_uncomputed_tokens, seq.num_computed_tokens, *beside)
        for seq in self._waiting:
            num_known = len(self.pool.lookup(seq.block_hashes))
            while num_known < len(seq.block_hashes) and self.fetches.is_arriving(seq.block_hashes[num_known]):
                num_known += 1
            known = min(num_known * size, len(seq.token_ids) - 1)
            backlog += cost.chunked_prefill_seconds(len(seq.token_ids) - known, known, *beside)
            tokens += len(seq.token_ids)
        used = (self.pool.num_blocks - self.pool.num_free) * size + tokens
        return GroupLoad(num_received, backlog, len(decodes), beside[2], used, cost)

    def check_integrity(self) -> None:
        """Raise AssertionError where the books do not balance."""
        self.pool.check_integrity()
        assert self._running == sorted(self._running, key=_key) and self._waiting == sorted(self._waiting, key=_key)
        assert {s.seq_id for s in self._running + self._waiting} == set(self._by_seq_id)
        assert len(self._running) + len(self._waiting) == len(self._sequences) == len(self._by_seq_id)
        assert len(self._running) <= self.max_num_seqs
        users = [0] * self.pool.num_blocks
        self.fetches.check_integrity()
        if self.publisher is not None:
            self.publisher.check_integrity()
        for block in (*self.fetches.users(), *(self.publisher.users() if self.publisher else ())):
            users[block] += 1
        for seq in self._running + self._waiting:
            for block in seq.block_ids:
                users[block] += 1
            assert seq.num_computed_tokens <= len(seq.token_ids) <= seq.max_len
            assert seq.num_computed_tokens <= len(seq.block_ids) * self.block_size
            assert len(set(seq.block_ids)) == len(seq.block_ids)
        in_flight = [seq for _, sharers in self._in_flight.values() for seq in sharers]
        for seq in self._running + self._waiting:
            assert seq.num_in_flight == in_flight.count(seq)
        for seq in in_flight:
            assert seq in self._running or seq.seq_id not in self._by_seq_id, "preempted in flight"
        assert self._leaving.keys() <= self._sequences.keys()
        assert users == self.pool.ref_counts, "the pool and the sequences disagree on who uses what"
        assert all(not s.block_ids and not s.num_computed_tokens for s in self._waiting)


def _key(seq: Sequence) -> tuple[float, int]:
    return seq.key


def _in_full(seq: Sequence) -> NewSequence:
    request = seq.request
    return NewSequence(
        seq.seq_id, tuple(seq.token_ids), seq.num_prompt_tokens, request.sampling, request.index, request.pooling
    )
