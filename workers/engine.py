"""The leader's loop: schedule, execute, update. Token ids in, token ids out; it knows nothing of text, HTTP or Ray."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..scheduler.block_pool import BlockHash, BlockPool
from ..scheduler.cost_model import CostFitter, StepWork
from ..scheduler.errors import InvalidRequest
from ..scheduler.kv_fetch import KVFetch
from ..scheduler.kv_publish import Publication, Publisher
from ..scheduler.placement import GroupCapacity, GroupLoad
from ..scheduler.plan import StepPlan
from ..scheduler.prefix_index import BlockEvents
from ..scheduler.request import Request, SequenceOutput
from ..scheduler.step import SchedulerStats, StepScheduler
from .checkpoint.load import Progress
from .config import EngineConfig
from .executor import Executor, make_executor
from .kv_cache import bytes_per_token
from .sampler import GrammarBackend
from .worker import cache_dtype

_RUN_BYTES = 8 << 20  # of KV in a published run: large enough for the object store, small enough to be evicted
_MIN_STEPS = 8  # before what steps take is known


class Engine:
    """One model copy. Not thread-safe: whoever runs `step` also makes the other calls."""

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress | None = None,
        clock: Callable[[], float] = time.monotonic,
        grammar_backend: GrammarBackend | None = None,
        executor: Executor | None = None,
        shares_kv: bool = False,
    ):
        """Without `grammar_backend` structured outputs are refused. An `executor` brings its own.

        With `shares_kv` whoever runs the engine sees to what `take_fetches` and `take_publications` give.
        """
        self.config = config
        self.clock = clock
        self.executor = executor or make_executor(config, progress, grammar_backend=grammar_backend)
        self._has_grammars = grammar_backend is not None
        self.scheduler = StepScheduler(
            num_blocks=self.executor.num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.executor.max_model_len,
            eos_token_ids=self.executor.model_config.eos_token_ids,
            enable_prefix_caching=config.enable_prefix_caching,
            priority_weight=config.priority_weight,
            max_in_flight=self.executor.max_in_flight,
            publisher=self._publisher if shares_kv and config.kv_transfer_config.publishes else None,
            kv_fetch_timeout=config.kv_transfer_config.fetch_timeout,
        )
        self.stalled = False  # what there is to do waits for blocks from elsewhere

        self._fitter = CostFitter()
        self._num_decode_steps = 0

    def _publisher(self, pool: BlockPool) -> Publisher:
        run_blocks = max(1, _RUN_BYTES // self.block_bytes)
        return Publisher(pool, run_blocks, self.config.kv_transfer_config.publish_min_tokens)

    @property
    def block_bytes(self) -> int:
        """Of KV in a block, over all ranks."""
        model = self.executor.model_config
        return self.config.block_size * bytes_per_token(model, cache_dtype(self.config, model))

    @property
    def max_model_len(self) -> int:
        return self.executor.max_model_len

    def warm_up(self) -> None:
        """Let the first request find everything started. Before the first `step`."""
        self.executor.warm_up()

    def close(self) -> None:
        """End the other ranks, if there are any. May come from any thread."""
        self.executor.close()

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises `InvalidRequest` (`ContextLengthExceeded`) for one that cannot run."""
        vocab_size = self.executor.model_config.vocab_size
        for name, ids in (("prompt", request.token_ids), ("logit_bias", request.sampling.logit_bias)):
            wrong = next((t for t in ids if not 0 <= t < vocab_size), None)
            if wrong is not None:
                raise InvalidRequest(f"{name} has token id {wrong}; the vocabulary has {vocab_size}", name)
        if request.sampling.structured_outputs and not self._has_grammars:
            raise InvalidRequest(
                "structured_outputs needs a grammar backend, and this engine has none", "structured_outputs"
            )
        if request.sampling.structured_outputs and not self.executor.model_config.eos_token_ids:
            raise InvalidRequest("structured_outputs needs a model with a token that ends a text", "structured_outputs")
        self.scheduler.add(request, self.clock())

    def abort_request(self, request_id: str) -> bool:
        return self.scheduler.abort(request_id)

    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished() or self.scheduler.num_in_flight > 0

    def step(self) -> list[SequenceOutput]:
        """Advance by the earliest step in flight, with as many behind it as the pipeline takes.

        Returns what sequences gained; empty while prompts are being read or grammars compiled. Raises `EngineDead`
        where a rank is lost: this engine is of no more use then.
        """
        began, plan = self.clock(), None
        while self.scheduler.num_in_flight < self.executor.max_in_flight:
            plan = self.scheduler.schedule()
            if plan is None:
                break
            self.executor.submit(plan)
        self.stalled = not self.scheduler.num_in_flight
        if self.stalled:
            return []
        result = self.executor.collect()
        outputs = self.scheduler.update(result)
        # Several at a time say nothing about one, and one that had to wait for a grammar nothing about others.
        if plan is not None and self.executor.max_in_flight == 1 and not result.deferred:
            self._learn(plan, self.clock() - began)
        return outputs

    def _learn(self, plan: StepPlan, seconds: float) -> None:
        """What steps take. Those that only decode are much alike: every eighth will do."""
        prefills = [s for s in plan.scheduled if s.num_tokens > 1]
        if not plan.scheduled:
            return
        if not prefills:
            self._num_decode_steps += 1
            if self._num_decode_steps % 8:
                return
        context = sum(s.num_tokens * (s.num_computed_tokens + 0.5 * s.num_tokens) for s in prefills)
        decodes = [s.num_computed_tokens for s in plan.scheduled if s.num_tokens == 1]
        work = StepWork(sum(s.num_tokens for s in prefills), context, len(decodes), sum(decodes))
        self._fitter.add(work, seconds)

    # -- blocks from and for elsewhere --------------------------------------------------------------------------------

    def take_fetches(self) -> list[KVFetch]:
        """What every rank should fetch into its blocks from now on, until `end_fetch`."""
        return self.scheduler.take_fetches(self.clock())

    def end_fetch(self, fetch_id: int, num_blocks: int) -> None:
        """No rank writes these blocks any more; the first `num_blocks` have come."""
        self.scheduler.end_fetch(fetch_id, num_blocks)

    def take_publications(self) -> list[tuple[Publication, float]]:
        """What a store may take, until `end_publication`, and the seconds that it would take to compute it again."""
        publisher = self.scheduler.publisher
        if publisher is None:
            return []
        publisher.sweep()
        size, cost = self.scheduler.block_size, self._fitter.model
        return [(p, cost.prefill_seconds(size * len(p.hashes), p.num_tokens_before)) for p in publisher.take()]

    def publish_running(self) -> None:
        """Offer what running sequences have computed, for those who will go on with them."""
        self.scheduler.publish_running()

    @property
    def is_publishing(self) -> bool:
        return self.scheduler.is_publishing

    def end_publication(self, publication_id: int, taken: bool) -> None:
        if self.scheduler.publisher is not None:
            self.scheduler.publisher.end(publication_id, taken)

    def take_hand_overs(self) -> list[str]:
        """Requests that were to be handed over, and whose prompts a store has now: another group can go on."""
        return self.scheduler.take_hand_overs()

    def forget_published(self, hashes: Sequence[BlockHash] | None) -> None:
        """The store has dropped these; None: all."""
        publisher = self.scheduler.publisher
        if publisher is None:
            return
        if hashes is None:
            publisher.forget_all()
        else:
            publisher.forget(hashes)

    # -- what the global scheduler wants to know ----------------------------------------------------------------------

    def capacity(self, window: int) -> GroupCapacity:
        scheduler, transfer = self.scheduler, self.config.kv_transfer_config
        return GroupCapacity(
            window,
            scheduler.max_num_seqs,
            scheduler.pool.num_blocks * scheduler.block_size,
            scheduler.block_size,
            scheduler.max_num_batched_tokens,
            block_bytes=self.block_bytes if self.config.enable_prefix_caching and transfer.fetches else 0,
            fetch_weight=transfer.fetch_weight,
        )

    def load(self) -> GroupLoad:
        """All but `num_received`, which is for those to say who pass requests on to this engine."""
        load = self.scheduler.load(0, self._fitter.model)
        # A guess is not news: what the scheduler knows of other groups of the model is better.
        return load if self._fitter.num_steps >= _MIN_STEPS else replace(load, cost=None)

    def take_block_events(self) -> BlockEvents | None:
        """What became cached, and what ceased to be, since the last call; None where nothing did."""
        return self.scheduler.pool.log.take_events()

    def block_snapshot(self) -> BlockEvents:
        """Everything that is cached."""
        pool = self.scheduler.pool
        return pool.log.snapshot(pool.cached_hashes())

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()
