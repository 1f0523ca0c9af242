"""`ModelConfig`: what a checkpoint is. `EngineConfig`: how to run it, under vLLM's names."""

import logging
import math
import re
from dataclasses import dataclass, field, fields
from typing import Any

from ..scheduler.errors import ConfigError
from ..scheduler.names import nearest

logger = logging.getLogger(__name__)

DTYPES = ("auto", "bfloat16", "float32")
DEVICES = ("auto", "cuda", "cpu")
QUANTIZATIONS = ("auto", "none", "int8", "fp8")
KV_CACHE_DTYPES = ("auto", "int8", "fp8")
GENERATION_CONFIGS = ("auto", "vllm")
GPU_BLOCK_SIZE = 64  # a block's keys of a head are a tile of their own then
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")  # what `workers.rope` computes


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding (RoFormer) and its scaling. `type` is one of `ROPE_TYPES`."""

    theta: float = 10000.0
    type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    # llama3
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    # yarn
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family, whichever file format it came from."""

    architecture: str  # "LlamaForCausalLM"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str  # what "auto" stands for: "bfloat16" or "float32"
    rope: RopeConfig = field(default_factory=RopeConfig)
    qkv_bias: bool = False  # Qwen2; Llama's attention_bias sets qkv_bias and o_bias
    o_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # generation_config.json's, else config.json's; then the tokenizer's

    @property
    def longest_context(self) -> int:
        """Tokens that its positions can be stretched to (vLLM derives the same): `max_position_embeddings` may be the
        length before RoPE is scaled, as in the settings for long contexts that Qwen's makers recommend.
        """
        rope, stretched = self.rope, 0
        if rope.type in ("linear", "dynamic", "yarn"):
            stretched = int(rope.factor * (rope.original_max_position_embeddings or 0))
        return max(self.max_position_embeddings, stretched)


_ALIASES = {
    "max_batch_size": "max_num_seqs",
    "max_seq_length": "max_model_len",
    "kv_cache_memory_bytes": "kv_cache_memory",
    "num_gpu_blocks_override": "num_kv_blocks",
}
# vLLM's engine settings that change nothing here: name → the values that may be taken so (None: any), and why.
IDLE_SETTINGS: dict[str, tuple[tuple[Any, ...] | None, str]] = {
    "swap_space": (None, "blocks are not swapped; a preempted sequence is computed again"),
    "cpu_offload_gb": ((0,), "weights are not offloaded"),
    "compilation_config": (None, "models are not compiled"),
    "max_seq_len_to_capture": (None, "the CUDA graphs of decode hold for any length"),
    "disable_custom_all_reduce": (
        (True, False),
        "ranks of a host reduce through shared memory, others by gloo, GPUs by NCCL",
    ),
    "distributed_executor_backend": (("ray", "mp", "uni"), "Ray places the worker groups"),
    "data_parallel_size": ((1,), "deployment_config.num_replicas says how many copies run"),
    "max_parallel_loading_workers": (None, "weights are memory-mapped"),
    "use_tqdm_on_load": ((True, False), "a progress bar is shown on a terminal"),
    "disable_log_requests": ((True, False), "requests are not logged"),
    "enable_log_requests": ((False,), "requests are not logged"),
    "disable_log_stats": ((True, False), "/metrics has the figures"),
    "trust_remote_code": (
        (True, False),
        "no code from a checkpoint is run, and a model that needs some is refused",
    ),
    "enable_chunked_prefill": ((True,), "prefill is always chunked"),
    "scheduling_policy": (("fcfs", "priority"), "requests go by arrival + priority x 10 s"),
    "preemption_mode": (("recompute",), "a preempted sequence is computed again"),
    "load_format": (("auto", "safetensors", "gguf"), "the format is read from the files"),
    "task": (("auto", "generate"), "models generate"),
    "runner": (("auto", "generate"), "models generate"),
    "enable_lora": ((False,), "adapters are not supported yet"),
    "enable_auto_tool_choice": ((True,), "models that can call tools may always do so"),
}
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_bytes(key: str, value: Any) -> int:
    """4096, "512MiB" or "1.5G" to bytes; `ConfigError` naming `key` otherwise."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?i?)b?", str(value).strip().lower())
    size = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if size < 1:
        raise ConfigError(f'{key} must be a size such as 1073741824 or "1GiB", not {value!r}')
    return size


@dataclass(frozen=True, slots=True)
class KVTransferConfig:
    """How worker groups share KV through the nodes' object stores: vLLM's `kv_transfer_config`, with one connector.

    `kv_connector` of None: they do not. The fields after `kv_role` are `kv_connector_extra_config`.
    """

    kv_connector: str | None = "ObjectStoreConnector"
    kv_role: str = "kv_both"  # kv_producer: publishes and fetches nothing; kv_consumer: fetches and publishes nothing
    store_memory: int | None = None  # bytes on each node; None: a share of its object store
    publish_min_tokens: int = 256  # shorter prefixes are published when they are seen again, or about to be evicted
    fetch_weight: float = 1.0  # of waiting against computing; 0: fetch whatever there is
    fetch_timeout: float = 30.0  # seconds, at most; what is late by its prediction is given up before
    store_idle_seconds: float = 300.0  # that a store outlives the last group of its node

    @classmethod
    def of(cls, raw: Any) -> "KVTransferConfig":
        """From what users write. Raises `ConfigError` naming the key, the value and what would be right."""
        if isinstance(raw, cls):
            return raw
        where, extra = "kv_transfer_config", "kv_transfer_config.kv_connector_extra_config"
        if not isinstance(raw, dict):
            raise ConfigError(f"{where} must be a mapping with kv_connector and kv_role, not {raw!r}")
        top = ("kv_connector", "kv_role", "kv_connector_extra_config")
        _check_keys(where, raw, top)
        more = raw.get("kv_connector_extra_config") or {}
        if not isinstance(more, dict):
            raise ConfigError(f"{extra} must be a mapping, not {more!r}")
        _check_keys(extra, more, tuple(f.name for f in fields(cls)[2:]))
        given = {k: v for k, v in raw.items() if k == "kv_connector" or (k == "kv_role" and v is not None)}
        given |= {k: v for k, v in more.items() if v is not None}
        if "store_memory" in given:
            given["store_memory"] = parse_bytes(f"{extra}.store_memory", given["store_memory"])
        config = cls(**given)
        if config.kv_connector not in (None, "ObjectStoreConnector"):
            raise ConfigError(f"{where}.kv_connector must be ObjectStoreConnector or null, not {config.kv_connector!r}")
        if config.kv_role not in ("kv_both", "kv_producer", "kv_consumer"):
            raise ConfigError(f"{where}.kv_role must be kv_both, kv_producer or kv_consumer, not {config.kv_role!r}")
        tokens, weight, timeout = config.publish_min_tokens, config.fetch_weight, config.fetch_timeout
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise ConfigError(f"{extra}.publish_min_tokens must be an integer of at least 1, not {tokens!r}")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise ConfigError(f"{extra}.fetch_weight must be a number, 0 or more, not {weight!r}")
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
            raise ConfigError(f"{extra}.fetch_timeout must be seconds, over 0, not {timeout!r}")
        idle = config.store_idle_seconds
        if isinstance(idle, bool) or not isinstance(idle, int | float) or not 0 <= idle < math.inf:
            raise ConfigError(f"{extra}.store_idle_seconds must be seconds, 0 or more, not {idle!r}")
        return config

    @property
    def shares(self) -> bool:
        return self.kv_connector is not None

    @property
    def publishes(self) -> bool:
        return self.shares and self.kv_role != "kv_consumer"

    @property
    def fetches(self) -> bool:
        return self.shares and self.kv_role != "kv_producer"


def _check_keys(where: str, raw: dict[Any, Any], known: tuple[str, ...]) -> None:
    for key in raw:
        if key not in known:
            raise ConfigError(f"{where}.{key} is not a setting{nearest(str(key), known)}")


def _check_idle(where: str, key: str, value: Any) -> None:
    """Log that it changes nothing. Raises `ConfigError` where it would have to."""
    allowed, why = IDLE_SETTINGS[key]
    # `1 == True` in Python: compare the types too
    if value is not None and allowed is not None and not any(value == a and type(value) is type(a) for a in allowed):
        right = " or ".join(repr(a) for a in allowed)
        raise ConfigError(f"{where}.{key} must be {right} or left out ({why}), not {value!r}")
    logger.info("%s.%s changes nothing here: %s", where, key, why)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one worker group. `from_kwargs` is how users' `engine_kwargs` and flags become one.

    None means: decided at start from the model and the machine, and logged.
    """

    model: str  # a folder, a .gguf file or a hub id
    tokenizer: str | None = None  # where it is not the model's own
    generation_config: str = "auto"  # how requests are sampled that do not say: "auto" as the model's own, "vllm": not
    dtype: str = "auto"
    # Weights: "auto" as the files have them, GGUF's blocks included; "int8" any; "none" dequantized to dtype. On a GPU
    # "int8" and "fp8" are of weights and activations, and all others are dequantized.
    quantization: str = "auto"
    # KV: "auto" in dtype; on CPUs "int8", with a scale for each token and head; on GPUs "fp8" (e4m3), unscaled: what
    # is over 448 is cut off
    kv_cache_dtype: str = "auto"
    block_size: int = 0  # tokens a KV block; left out: 16, or 64 with `device: cuda`
    max_model_len: int | None = None  # prompt and output, in tokens; None: the model's, as far as the KV pool holds
    max_num_seqs: int = 64  # sequences in a step
    max_num_batched_tokens: int = 512  # tokens in a step: the prefill chunk
    kv_cache_memory: int | None = None  # bytes of KV a group; None: a share of what is free
    num_kv_blocks: int | None = None  # instead of kv_cache_memory
    enable_prefix_caching: bool = True
    priority_weight: float = 10.0  # seconds of waiting that one level of priority outweighs
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    tensor_parallel_weights: tuple[float, ...] | None = None  # a faster rank's is higher; None: equal shares
    pipeline_stage_layers: tuple[int, ...] | None = None  # layers of each stage; None: balanced by measured time
    seed: int = 0  # of requests that bring none, offline
    device: str = "auto"  # auto: a CUDA GPU where there is one
    gpu_memory_utilization: float = 0.9  # share of the GPU for weights, activations and KV; without kv_cache_memory
    enforce_eager: bool = False  # no CUDA graphs
    cpu_threads: int | None = None  # None: the cores this process may use, within its container's limit
    kv_transfer_config: KVTransferConfig = KVTransferConfig()  # between worker groups; `LLM`, which is one, ignores it

    @classmethod
    def from_kwargs(cls, where: str = "engine_kwargs", /, **kwargs: Any) -> "EngineConfig":
        """Build from users' names, vLLM's and the aliases max_batch_size and max_seq_length among them.

        Those of vLLM that change nothing here are dropped, with a logged line each. Raises `ConfigError` with `where`,
        the key, the value and what would be right.
        """
        known = {f.name for f in fields(cls)}
        settings: dict[str, Any] = {}
        for key, value in kwargs.items():
            name = _ALIASES.get(key, key)
            if key in IDLE_SETTINGS:
                _check_idle(where, key, value)
                continue
            if name not in known:
                raise ConfigError(f"{where}.{key} is not a setting{nearest(key, [*known, *_ALIASES])}")
            if name in settings:
                raise ConfigError(f"{where}.{key} says {name} a second time")
            if value is not None:
                settings[name] = value
        if "kv_cache_memory" in settings:
            settings["kv_cache_memory"] = parse_bytes(f"{where}.kv_cache_memory", settings["kv_cache_memory"])
        if "model" not in settings:
            raise ConfigError(f"{where}.model is missing: a folder, a .gguf file or a hub id")
        try:
            return cls(**settings)
        except ConfigError as error:
            raise ConfigError(f"{where}.{error}") from None

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model must be a folder, a .gguf file or a hub id, not {self.model!r}")
        aliases = {"float": "float32", "fp32": "float32", "bf16": "bfloat16"}
        if self.tokenizer is not None and (not isinstance(self.tokenizer, str) or not self.tokenizer):
            raise ConfigError(f"tokenizer must be a folder, a .gguf file or a hub id, not {self.tokenizer!r}")
        if isinstance(self.dtype, str):
            object.__setattr__(self, "dtype", aliases.get(self.dtype, self.dtype))
        if self.device not in DEVICES:
            raise ConfigError(f"device must be one of {', '.join(DEVICES)}, not {self.device!r}")
        if self.block_size == 0 and not isinstance(self.block_size, bool):
            object.__setattr__(self, "block_size", GPU_BLOCK_SIZE if self.device == "cuda" else 16)
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigError(f"gpu_memory_utilization must be more than 0 and at most 1, not {share!r}")
        if not isinstance(self.enforce_eager, bool):
            raise ConfigError(f"enforce_eager must be true or false, not {self.enforce_eager!r}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if self.quantization == "gguf":  # vLLM's word for what the files of this kind have
            object.__setattr__(self, "quantization", "auto")
        if self.quantization not in QUANTIZATIONS:
            raise ConfigError(f"quantization must be one of {', '.join(QUANTIZATIONS)}, not {self.quantization!r}")
        if self.kv_cache_dtype == "fp8_e4m3":  # vLLM has both words
            object.__setattr__(self, "kv_cache_dtype", "fp8")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ConfigError(
                f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES)}, not {self.kv_cache_dtype!r}"
            )
        if self.generation_config not in GENERATION_CONFIGS:
            right = " or ".join(GENERATION_CONFIGS)
            raise ConfigError(f"generation_config must be {right}, not {self.generation_config!r}")
        for name, low in (
            ("block_size", 1),
            ("max_model_len", 1),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("num_kv_blocks", 1),
            ("tensor_parallel_size", 1),
            ("pipeline_parallel_size", 1),
            ("cpu_threads", 1),
        ):
            value = getattr(self, name)
            if value is None and name in ("max_model_len", "num_kv_blocks", "cpu_threads"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ConfigError(f"{name} must be an integer of at least {low}, not {value!r}")
        if not isinstance(self.enable_prefix_caching, bool):
            raise ConfigError(f"enable_prefix_caching must be true or false, not {self.enable_prefix_caching!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed must be an integer, not {self.seed!r}")
        weight = self.priority_weight
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise ConfigError(f"priority_weight must be seconds, 0 or more, not {self.priority_weight!r}")
        object.__setattr__(self, "kv_transfer_config", KVTransferConfig.of(self.kv_transfer_config))
        self._check_list("tensor_parallel_weights", self.tensor_parallel_size, (int, float), "positive numbers")
        self._check_list("pipeline_stage_layers", self.pipeline_parallel_size, (int,), "positive integers")

    def _check_list(self, name: str, length: int, kinds: tuple[type, ...], what: str) -> None:
        values = getattr(self, name)
        if values is None:
            return
        if not isinstance(values, list | tuple) or not all(
            isinstance(v, int | float) and isinstance(v, kinds) and not isinstance(v, bool) and 0 < v < math.inf
            for v in values
        ):
            raise ConfigError(f"{name} must be a list of {what}, not {values!r}")
        if len(values) != length:
            raise ConfigError(f"{name} has {len(values)} entries; it takes one for each of {length}: {list(values)}")
        object.__setattr__(self, name, tuple(values))

    def context_length(self, model: ModelConfig) -> int:
        """Tokens: `max_model_len`, or else what the model was made for.

        A factor of YaRN's is meant to be used. Linear scaling's is often in `max_position_embeddings` already, and
        "dynamic" differs from the unscaled model as soon as more is asked for, so there it is asked for.
        Raises `ConfigError` where `max_model_len` is more than the model's positions can be stretched to.
        """
        longest = model.longest_context
        if self.max_model_len is None:
            return longest if model.rope.type == "yarn" else model.max_position_embeddings
        if self.max_model_len > longest:
            raise ConfigError(f"max_model_len is {self.max_model_len}, but the model was made for at most {longest}")
        return self.max_model_len

    @property
    def world_size(self) -> int:
        """Ranks of the worker group."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
