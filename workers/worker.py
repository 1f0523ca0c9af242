"""A rank: loads its weights, owns its KV tensors, executes step plans."""

import logging
import os

import torch

from ..scheduler.plan import NewSequence, ScheduledSequence, StepPlan, StepResult
from ..scheduler.request import SamplingParams
from . import kv_cache
from .checkpoint.load import Progress, load_weights, open_checkpoint
from .config import EngineConfig, ModelConfig
from .model_runner import ModelRunner
from .models.decoder import Decoder
from .sampler import GrammarBackend

logger = logging.getLogger(__name__)


class Worker:
    """Loading happens in the constructor and may take minutes; `progress(done, total)` reports bytes of weights.

    Raises `CheckpointError` for a model that cannot be loaded, `ConfigError` for settings that do not fit it.
    """

    def __init__(
        self, config: EngineConfig, progress: Progress | None = None, grammar_backend: GrammarBackend | None = None
    ):
        torch.set_num_threads(config.cpu_threads or len(os.sched_getaffinity(0)))
        checkpoint = open_checkpoint(config.model)
        self.model_config: ModelConfig = checkpoint.config
        dtype = getattr(torch, self.model_config.dtype if config.dtype == "auto" else config.dtype)
        self.num_blocks, self.max_model_len = kv_cache.plan_capacity(self.model_config, config, dtype)
        model = Decoder(self.model_config, load_weights(checkpoint, dtype, progress), self.max_model_len)
        caches = kv_cache.allocate(self.model_config, self.num_blocks, config.block_size, dtype)
        ends = self.model_config.eos_token_ids
        make_matcher = grammar_backend(config.model, config.tokenizer, ends) if grammar_backend else None
        self.runner = ModelRunner(model, caches, config.block_size, ends, make_matcher)
        logger.info(
            "loaded %s: %d layers, %s, KV pool of %d tokens, context of %d",
            config.model,
            self.model_config.num_hidden_layers,
            dtype,
            self.num_blocks * config.block_size,
            self.max_model_len,
        )

    def execute(self, plan: StepPlan) -> StepResult:
        return self.runner.execute(plan)

    def warm_up(self) -> None:
        """Run a prefill and a decode so that the first request does not pay for libraries and kernels starting up."""
        sampling = SamplingParams(temperature=0.0, seed=0)
        length = min(self.runner.block_size, self.max_model_len)
        prompt = NewSequence(-1, (0,) * length, length, sampling, 0)
        self.execute(StepPlan(-2, (), (prompt,), (ScheduledSequence(-1, 0, length, (), (0,), True),)))
        self.execute(StepPlan(-1, (), (), (ScheduledSequence(-1, length - 1, 1, (), (), True),)))
        self.execute(StepPlan(0, (-1,), (), ()))
