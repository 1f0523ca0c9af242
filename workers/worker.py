"""A rank: loads its weights, owns its KV tensors, executes step plans."""

import logging
from collections.abc import Callable

import torch

from ..kernels import ops
from ..scheduler.errors import ConfigError
from ..scheduler.plan import StepPlan, StepResult
from . import cuda, kv_cache
from .checkpoint.load import Checkpoint, Progress, digest, load_weights, open_checkpoint
from .config import EngineConfig, ModelConfig
from .kv_transfer import KVPort, fingerprint
from .limits import usable_cores
from .model_runner import ModelRunner
from .models.decoder import Decoder
from .models.weights import DecoderWeights
from .parallel import RankGroup, Topology
from .sampler import GrammarBackend, Grammars

logger = logging.getLogger(__name__)


def model_dtype(config: EngineConfig, model: ModelConfig) -> torch.dtype:
    """What the model is computed in."""
    return getattr(torch, model.dtype if config.dtype == "auto" else config.dtype)


def cache_dtype(config: EngineConfig, model: ModelConfig) -> torch.dtype:
    """What its KV is kept in."""
    formats = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
    return formats.get(config.kv_cache_dtype) or model_dtype(config, model)


def set_threads(config: EngineConfig, on_host: int = 1) -> None:
    """How many threads an operation of the calling thread uses, where `on_host` ranks share the machine."""
    torch.set_num_threads(config.cpu_threads or max(1, usable_cores() // on_host))


class Worker:
    """One rank of a group, or, without a `group`, the only one.

    Loading happens in the constructor and may take minutes; `progress(done, total)` reports bytes of weights. Then
    `num_blocks` and `max_model_len` say what this rank can hold, and `allocate` makes it ready to execute.
    Raises `CheckpointError` for a model that cannot be loaded, `ConfigError` for settings that do not fit it.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress | None = None,
        checkpoint: Checkpoint | None = None,
        topology: Topology | None = None,
        rank: int = 0,
        grammar_backend: GrammarBackend | None = None,
    ):
        on_host = topology.on_host(rank) if topology else 1
        set_threads(config, on_host)
        checkpoint = checkpoint or open_checkpoint(config.model)
        self.config = config
        self.model_config: ModelConfig = checkpoint.config
        self.dtype = model_dtype(config, self.model_config)
        self.cache_dtype = cache_dtype(config, self.model_config)
        self.shard = topology.shards[rank] if topology else None
        self.grammars: Grammars | None = None  # of the rank that samples
        if grammar_backend and (self.shard is None or self.shard.samples):
            ends = self.model_config.eos_token_ids
            self.grammars = grammar_backend(config.model, config.tokenizer, ends)
        shards = [self.shard, *(s for s in topology.shards if s.rank != rank)] if topology and self.shard else []
        self.device = topology.device(rank) if topology else cuda.select_device(config.device)
        self._quantize = self._format()
        self._check_cache_format()
        quantization = "none" if self._quantize else config.quantization
        context = config.context_length(self.model_config)
        # What is left for KV is known when the weights are there, and on a GPU when a step has run.
        weights = load_weights(checkpoint, self.dtype, progress, self.shard, quantization)
        self._model: Decoder | None = None
        budget = None
        if self.device.type == "cuda":
            self._model, use = self.profile(weights, context)
            budget = cuda.kv_budget(use, config.gpu_memory_utilization)
        else:
            self._weights = weights
        self.num_blocks, self.max_model_len = kv_cache.plan_capacity(
            self.model_config, config, self.cache_dtype, shards, on_host, budget
        )
        self._fingerprint = fingerprint(config, self.model_config, self.dtype, digest(checkpoint))

    def _format(self) -> str | None:
        """What linear layers are rounded to once they are loaded, where the kernels of this device compute in that."""
        wanted, device = self.config.quantization, self.device
        if wanted in ops.linear_formats(device.type):
            if wanted == "fp8" and not self._has_fp8():
                name = torch.cuda.get_device_name(device)
                raise ConfigError(f"quantization is fp8, which {name} cannot multiply (sm_89 and later can); say int8")
            return wanted
        if wanted == "fp8":
            raise ConfigError(
                f"quantization is fp8, which the kernels for {device.type} do not compute in: say int8, or device: "
                "cuda where triton is installed"
            )
        return None

    def _check_cache_format(self) -> None:
        wanted, device = self.config.kv_cache_dtype, self.device.type
        formats = ops.kv_cache_formats(device)
        if wanted != "auto" and wanted not in formats:
            right = " or ".join(("auto", *formats))
            raise ConfigError(f"kv_cache_dtype is {wanted}, which the kernels for {device} do not read: say {right}")
        if wanted == "fp8" and not self._has_fp8():
            name = torch.cuda.get_device_name(self.device)
            raise ConfigError(f"kv_cache_dtype is fp8, which {name} does not have (sm_89 and later do); say auto")

    def _has_fp8(self) -> bool:
        return self.device.type != "cuda" or torch.cuda.get_device_capability(self.device) >= (8, 9)

    def profile(
        self,
        weights: DecoderWeights,
        max_model_len: int,
        measure: Callable[[Callable[[], object], torch.device], cuda.MemoryUse] = cuda.measure,
    ) -> tuple[Decoder, cuda.MemoryUse]:
        """The model on its device, and what its largest step takes there, run without the other ranks."""
        config, model_config = self.config, self.model_config
        others: cuda.Alone | None = None
        if self.shard:
            sizes = model_config.vocab_size, model_config.hidden_size
            others = cuda.Alone(self.shard, *sizes, self.dtype, self.device)
        reduce = others.reduce if others and others.shard.tp_size > 1 else None
        model = Decoder(model_config, weights, max_model_len, self.shard, reduce, self.device, self._quantize)
        plans, blocks = cuda.largest_step(
            config.max_num_seqs, config.max_num_batched_tokens, max_model_len, config.block_size
        )
        caches = kv_cache.allocate(model_config, blocks, config.block_size, self.cache_dtype, self.shard, self.device)
        runner = ModelRunner(model, caches, config.block_size, model_config.eos_token_ids, group=others)
        return model, measure(lambda: [runner.execute(plan) for plan in plans], self.device)

    def allocate(self, num_blocks: int, max_model_len: int, group: RankGroup | None = None) -> None:
        """Build the model and a KV pool of `num_blocks` blocks, the least that any rank of the group holds."""
        self.num_blocks, self.max_model_len = num_blocks, max_model_len
        reduce = None if group is None else group.reduce
        model = self._model
        if model is None:
            model = Decoder(
                self.model_config, self._weights, max_model_len, self.shard, reduce, quantize=self._quantize
            )
            del self._weights
        model.reduce = reduce  # on a GPU it has run alone so far
        caches = kv_cache.allocate(
            self.model_config, num_blocks, self.config.block_size, self.cache_dtype, self.shard, self.device
        )
        ends = self.model_config.eos_token_ids
        self.kv_port = KVPort(caches, self._fingerprint, self.model_config, self.shard)
        self.runner = ModelRunner(model, caches, self.config.block_size, ends, self.grammars, group)
        if self.device.type == "cuda" and not self.config.enforce_eager:
            self.runner.graphs = self._graphs()
        logger.info(
            "loaded %s: %d layers, %s, KV pool of %d tokens in %s, context of %d",
            self.config.model,
            len(model.shard.layers),
            self.dtype,
            num_blocks * self.config.block_size,
            self.cache_dtype,
            max_model_len,
        )

    @torch.inference_mode()
    def _graphs(self) -> cuda.DecodeGraphs:
        config, shard = self.config, self.runner.model.shard
        graphs = cuda.DecodeGraphs(
            self.runner.forward,
            config.max_num_seqs,
            self.max_model_len,
            config.block_size,
            self.device,
            hidden=None if shard.first_stage else (self.model_config.hidden_size, self.dtype),
        )
        graphs.capture_all()
        return graphs

    def prepare_grammars(self) -> None:
        """Begin, in the background, what the first structured output would wait for, where this rank samples."""
        if self.grammars is not None:
            self.grammars.prepare()

    def execute(self, plan: StepPlan) -> StepResult | None:
        """This rank's part of a step; the result comes from the one that samples."""
        return self.runner.execute(plan)
