"""The leader's loop: schedule, execute, update. Token ids in, token ids out; it knows nothing of text, HTTP or Ray."""

import time
from collections.abc import Callable

from ..scheduler.errors import InvalidRequest
from ..scheduler.request import Request, SequenceOutput
from ..scheduler.step import SchedulerStats, StepScheduler
from .checkpoint.load import Progress
from .config import EngineConfig
from .sampler import GrammarBackend
from .worker import Worker


class Engine:
    """One model copy. Not thread-safe: whoever runs `step` also makes the other calls."""

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress | None = None,
        clock: Callable[[], float] = time.monotonic,
        grammar_backend: GrammarBackend | None = None,
    ):
        """Without `grammar_backend` structured outputs are refused."""
        self.config = config
        self.clock = clock
        self.worker = Worker(config, progress, grammar_backend)
        self._has_grammars = grammar_backend is not None
        self.scheduler = StepScheduler(
            num_blocks=self.worker.num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.worker.max_model_len,
            eos_token_ids=self.worker.model_config.eos_token_ids,
            enable_prefix_caching=config.enable_prefix_caching,
            priority_weight=config.priority_weight,
        )

    @property
    def max_model_len(self) -> int:
        return self.worker.max_model_len

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises `InvalidRequest` (`ContextLengthExceeded`) for one that cannot run."""
        vocab_size = self.worker.model_config.vocab_size
        for name, ids in (("prompt", request.prompt_token_ids), ("logit_bias", request.sampling.logit_bias)):
            wrong = next((t for t in ids if not 0 <= t < vocab_size), None)
            if wrong is not None:
                raise InvalidRequest(f"{name} has token id {wrong}; the vocabulary has {vocab_size}", name)
        if request.sampling.structured_outputs and not self._has_grammars:
            raise InvalidRequest(
                "structured_outputs needs a grammar backend, and this engine has none", "structured_outputs"
            )
        self.scheduler.add(request, self.clock())

    def abort_request(self, request_id: str) -> bool:
        return self.scheduler.abort(request_id)

    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished()

    def step(self) -> list[SequenceOutput]:
        """Advance every scheduled sequence. Returns what they gained; empty while prompts are still being read."""
        plan = self.scheduler.schedule()
        if plan is None:
            return []
        result = self.worker.execute(plan)
        return self.scheduler.update(result)

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()
