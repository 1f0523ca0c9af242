"""`ModelConfig` from a Hugging Face folder: config.json, as transformers 4 and 5 write it, and generation_config.json.

Whatever would change the model's results and is not implemented is refused by name, never ignored.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...scheduler.errors import CheckpointError, InvalidRequest
from ...scheduler.request import SamplingParams
from ..config import ROPE_TYPES, ModelConfig, RopeConfig

# What transformers takes for a key that config.json leaves out, where that differs between the architectures.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "MistralForCausalLM": {
        "max_position_embeddings": 131072,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "Qwen2ForCausalLM": {"max_position_embeddings": 32768, "num_key_value_heads": 32},
}
ARCHITECTURES = tuple(_DEFAULTS)

# key: the value at which the feature is off. Each would silently change the results.
_UNSUPPORTED: dict[str, Any] = {
    "quantization_config": None,
    "compression_config": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "num_local_experts": None,
    "num_experts": None,
    "query_pre_attn_scalar": None,
    "attention_multiplier": None,
    "embedding_multiplier": 1,
    "residual_multiplier": 1,
    "logits_scaling": 1,
    "use_qk_norm": False,
    "qk_layernorm": False,
    "no_rope_layers": None,
    "rope_interleaved": False,
    "partial_rotary_factor": 1,
    "is_encoder_decoder": False,
}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. `CheckpointError` naming the file where there is none."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def read_model_config(folder: Path) -> ModelConfig:
    """Parse `folder`. `CheckpointError` names the file, the key and what would be right."""
    where = folder / "config.json"
    raw = read_json(where)
    named = raw.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else named
    if not isinstance(architecture, str) or architecture not in _DEFAULTS:
        raise CheckpointError(
            f"{where}: architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    values = {**_DEFAULTS[architecture], **raw}
    _refuse_unsupported(where, architecture, values)
    get = _Getter(where, values)
    hidden_size = get.integer("hidden_size")
    heads = get.integer("num_attention_heads")
    head_dim = get.integer("head_dim", hidden_size // heads)
    if head_dim % 2:
        raise CheckpointError(f"{where}: head_dim must be even, not {head_dim}")
    key_value_heads = get.integer("num_key_value_heads", heads)
    if heads % key_value_heads:
        raise CheckpointError(
            f"{where}: num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({key_value_heads})"
        )
    max_position = get.integer("max_position_embeddings")
    attention_bias = bool(values.get("attention_bias", False)) and architecture == "LlamaForCausalLM"
    return ModelConfig(
        architecture=architecture,
        vocab_size=get.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=get.integer("intermediate_size"),
        num_hidden_layers=get.integer("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=head_dim,
        rms_norm_eps=get.number("rms_norm_eps", 1e-6),
        max_position_embeddings=max_position,
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
        dtype=_dtype(where, values.get("dtype") or values.get("torch_dtype")),
        rope=_rope(where, values, max_position),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        o_bias=attention_bias,
        mlp_bias=bool(values.get("mlp_bias", False)) and architecture == "LlamaForCausalLM",
        bos_token_id=values["bos_token_id"] if isinstance(values.get("bos_token_id"), int) else None,
        eos_token_ids=_eos_token_ids(folder, values),
    )


def read_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Those that end a generation: generation_config.json's, else config.json's, and as in vLLM the tokenizer's own."""
    path = folder / "config.json"
    return _eos_token_ids(folder, read_json(path) if path.exists() else {})


def _eos_token_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    generation = folder / "generation_config.json"
    value = read_json(generation).get("eos_token_id") if generation.exists() else None
    if value is None:
        value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise CheckpointError(f"{folder}: eos_token_id must be token ids, not {value!r}")
    own = _own_eos_token_id(folder)
    if own is not None and own < config.get("vocab_size", own + 1):
        ids = [*ids, own]
    return tuple(dict.fromkeys(ids))


def _own_eos_token_id(folder: Path) -> int | None:
    """Of tokenizer_config.json's `eos_token`: a fine-tune for chats may have changed it there alone."""
    try:
        settings = read_json(folder / "tokenizer_config.json")
        eos = settings.get("eos_token")
        text = eos.get("content") if isinstance(eos, dict) else eos
        if not isinstance(text, str):
            return None
        for token_id, token in (settings.get("added_tokens_decoder") or {}).items():
            if token.get("content") == text:
                return int(token_id)
        backend = read_json(folder / "tokenizer.json")  # megabytes: only where the other does not say
        for token in backend.get("added_tokens") or ():
            if token.get("content") == text:
                return int(token["id"])
        found = backend["model"]["vocab"][text]
        return found if isinstance(found, int) else None
    except (CheckpointError, AttributeError, LookupError, TypeError, ValueError):
        return None  # missing or damaged: who needs the tokenizer will say so


_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_sampling_defaults(folder: Path) -> dict[str, float]:
    """How the model's makers would have it sampled: fields of `SamplingParams`, from generation_config.json."""
    generation = folder / "generation_config.json"
    values = read_json(generation) if generation.exists() else {}
    found = {name: values[name] for name in _SAMPLING if values.get(name) is not None}
    try:
        SamplingParams(**found)
    except InvalidRequest as error:
        raise CheckpointError(f"{generation}: {error.message} (generation_config: vllm ignores it)") from None
    return found


class _Getter:
    def __init__(self, where: Path, values: Mapping[str, Any]):
        self.where, self.values = where, values

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{self.where}: {key} must be a positive integer, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise CheckpointError(f"{self.where}: {key} must be a positive number, not {value!r}")
        return float(value)

    def optional(self, key: str) -> float | None:
        return self.number(key) if self.values.get(key) else None  # 0 means unset, too


def _refuse_unsupported(where: Path, architecture: str, values: Mapping[str, Any]) -> None:
    if values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise CheckpointError(f"{where}: hidden_act {values['hidden_act']!r} is not supported; supported: silu")
    for key, off in _UNSUPPORTED.items():
        if values.get(key, off) not in (off, None):
            raise CheckpointError(f"{where}: {key} = {values[key]!r} is not supported")
    window = values.get("sliding_window")
    if architecture == "Qwen2ForCausalLM" and not values.get("use_sliding_window", False):
        window = None
    if architecture == "LlamaForCausalLM":
        window = None  # transformers' Llama has none, whatever the file says
    get = _Getter(where, values)
    if window is not None and get.integer("sliding_window") < get.integer("max_position_embeddings"):
        raise CheckpointError(
            f"{where}: sliding_window = {window!r} is not supported; "
            f"set it to null, or max_position_embeddings to {window} to serve contexts within the window"
        )
    other = set(values.get("layer_types") or ()) - {"full_attention"}
    if window is None and other and architecture != "LlamaForCausalLM":
        raise CheckpointError(f"{where}: layer_types {sorted(map(str, other))} are not supported: only full_attention")


def _dtype(where: Path, name: Any) -> str:
    """float16 checkpoints run as bfloat16, the half precision that CPUs multiply in and that cannot overflow."""
    known = {None: "float32", "float32": "float32", "float64": "float32", "float16": "bfloat16", "bfloat16": "bfloat16"}
    name = name.removeprefix("torch.") if isinstance(name, str) else name
    if name not in known:
        raise CheckpointError(f"{where}: dtype {name!r} is not supported; supported: bfloat16, float16, float32")
    return known[name]


def _rope(where: Path, values: Mapping[str, Any], max_position: int) -> RopeConfig:
    """transformers 5's `rope_parameters`, or 4's `rope_theta` and `rope_scaling`."""
    scaling = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(scaling, dict) or any(isinstance(v, dict) for v in scaling.values()):
        raise CheckpointError(f"{where}: RoPE parameters per layer type are not supported: {scaling!r}")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise CheckpointError(f"{where}: RoPE type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    get = _Getter(where, scaling)
    theta = get.number("rope_theta", _Getter(where, values).number("rope_theta", 10000.0))
    if get.number("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(f"{where}: partial_rotary_factor {scaling['partial_rotary_factor']!r} is not supported")
    if kind == "default":
        return RopeConfig(theta=theta)
    original = max_position
    if kind in ("llama3", "yarn"):
        original = get.integer("original_max_position_embeddings", max_position)
        outside = _Getter(where, values)  # takes precedence in transformers
        original = outside.integer("original_max_position_embeddings", original)
    factor = get.number("factor", max_position / original if kind == "yarn" else None)
    if kind == "llama3":
        low, high = get.number("low_freq_factor"), get.number("high_freq_factor")
        if high <= low:
            raise CheckpointError(f"{where}: high_freq_factor ({high}) must be over low_freq_factor ({low})")
        return RopeConfig(theta, kind, factor, original, low_freq_factor=low, high_freq_factor=high)
    if kind == "yarn":
        return RopeConfig(
            theta,
            kind,
            factor,
            original,
            attention_factor=get.optional("attention_factor"),
            beta_fast=get.optional("beta_fast") or 32.0,
            beta_slow=get.optional("beta_slow") or 1.0,
            mscale=get.optional("mscale"),
            mscale_all_dim=get.optional("mscale_all_dim"),
            truncate=bool(scaling.get("truncate", True)),
        )
    return RopeConfig(theta, kind, factor, original)
