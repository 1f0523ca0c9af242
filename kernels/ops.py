"""The door to the kernels: the model calls these and does not know which backend runs.

One table per device type says which implementation an operation has: `reference` has all of them, and a backend
replaces what it does better. PAGEDRAY_KERNELS=reference forces the oracle; `scalar`, `avx2`, `avx512` or `amx` force a
CPU tier; `triton` runs the GPU's kernels on CPU tensors, in Triton's interpreter.
T is the number of tokens in a step, B of sequences; tensors of an operation share one device and, where nothing else is
said, one dtype, fp32 or bf16. A native kernel that is handed something else raises ValueError and says what was wrong.
"""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, dtype

from . import reference
from .quantized import FORMATS, QuantizedTensor
from .reference import AttentionMetadata, DecoderLayer, DecoderStack, PackedLinear, RankLost, Reduce, Weight

__all__ = [
    "AttentionMetadata",
    "DecoderLayer",
    "DecoderStack",
    "FORMATS",
    "PackedLinear",
    "QuantizedTensor",
    "RankLost",
    "Reduce",
    "Weight",
    "add_rms_norm",
    "decoder",
    "embedding",
    "gather_kv_blocks",
    "greedy",
    "kv_cache_formats",
    "kv_row_size",
    "linear",
    "log_probs",
    "mask_tokens",
    "pack_decoder",
    "pack_linear",
    "paged_attention",
    "quantize_int8",
    "rms_norm",
    "rotary_and_cache",
    "sample",
    "scatter_kv_blocks",
    "silu_and_mul",
]

logger = logging.getLogger("pagedray.kernels")

Table = dict[str, Callable[..., Any]]

_OPERATIONS = [name for name in __all__ if name[0].islower()]
_tables: dict[str, Table] = {}  # by device type; filled on first use
_lock = threading.Lock()


def _table(device_type: str) -> Table:
    table = _tables.get(device_type)
    if table is None:
        with _lock:
            if device_type not in _tables:
                _tables[device_type] = _make_table(device_type)
            table = _tables[device_type]
    return table


def _make_table(device_type: str) -> Table:
    table: Table = {name: getattr(reference, name) for name in _OPERATIONS}
    choice = os.environ.get("PAGEDRAY_KERNELS", "")
    if choice == "reference":
        logger.info("%s kernels: PyTorch reference (PAGEDRAY_KERNELS=reference)", device_type)
    elif device_type == "cuda" or choice == "triton":
        table.update(_triton_operations(device_type))
    elif device_type == "cpu":
        from .cpu import launch, library

        native = library.load(choice or None)
        if native is not None:
            table.update(launch.operations(native))
            logger.info("cpu kernels: native, tier %s (%s)", native.tier, native.path)
    else:
        logger.info("%s kernels: PyTorch reference", device_type)
    return table


def _triton_operations(device_type: str) -> Table:
    try:
        import triton
    except ImportError:
        logger.warning(
            "%s kernels: PyTorch reference, for triton is not installed: pip install pagedray[gpu]", device_type
        )
        return {}
    if device_type != "cuda" and not triton.knobs.runtime.interpret:
        raise RuntimeError("PAGEDRAY_KERNELS=triton on a CPU needs TRITON_INTERPRET=1 from the process's start")
    from .gpu import launch

    logger.info("%s kernels: Triton %s", device_type, triton.__version__)
    return launch.operations()


def pack_linear(
    weight: Weight | Sequence[Weight], bias: Tensor | None = None, dtype: dtype | None = None
) -> PackedLinear:
    """weight [N, K], bias [N] -> what `linear` wants. Once, at load; the caller may drop its weight afterwards.

    `weight` may be quantized, or parts of one, stacked by rows, some of them quantized: they stay so in memory, and
    give bit for bit what they would give dequantized to `dtype`, the one to compute in (that of plain parts, if any).
    Parts whose rows do not fit the backend's panels are dequantized.
    """
    return _table(_device_of(weight))["pack_linear"](weight, bias, dtype)


def linear(x: Tensor, packed: PackedLinear, out_dtype: dtype | None = None) -> Tensor:
    """x [T, K] -> x @ weight.T + bias, [T, N], summed in fp32; in x's dtype, or unrounded where `out_dtype` is fp32."""
    return _table(x.device.type)["linear"](x, packed, out_dtype)


def quantize_linear(weight: Tensor, bias: Tensor | None, format: str) -> PackedLinear:
    """weight [N, K] -> what `linear` wants to compute in 8 bits (W8A8): each output channel rounded to `format`, "int8"
    or "fp8" (e4m3), under a scale of its own; `linear` rounds each row of x in the same way, by its own largest value.

    Dynamic quantization per token and channel (ZeroQuant, Yao 2022). For formats in `linear_formats`, else ValueError.
    """
    if format not in linear_formats(weight.device.type):
        raise ValueError(f"quantize_linear: the kernels for {weight.device.type} do not compute in {format}")
    return _table(weight.device.type)["quantize_linear"](weight, bias, format)


def linear_formats(device_type: str) -> tuple[str, ...]:
    """What the kernels of a device can compute linear layers in, of the formats of `quantize_linear`."""
    known = _table(device_type).get("linear_formats")
    return known() if known else ()


def embedding(token_ids: Tensor, weight: Weight, dtype: dtype | None = None) -> Tensor:
    """token_ids int64 [T], weight [V, H] -> [T, H], in the weight's dtype, or dequantized to `dtype`."""
    return _table(token_ids.device.type)["embedding"](token_ids, weight, dtype)


def quantize_int8(weight: Tensor) -> QuantizedTensor:
    """weight [N, K], K a multiple of 32 -> codes from -127 to 127 with an fp16 scale for each 32: blocks of Q8_0.

    The scale is the largest magnitude / 127; a code is the nearest under the scale as it is stored.
    """
    return _table(weight.device.type)["quantize_int8"](weight)


def _device_of(weight: Weight | Sequence[Weight]) -> str:
    part = reference.parts_of(weight)[0]
    return (part if isinstance(part, Tensor) else part.blocks).device.type


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) in fp32, rounded to x's dtype, times weight. x [T, H], weight [H] (LlamaRMSNorm)."""
    return _table(x.device.type)["rms_norm"](x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """new_residual = x + residual, rounded; returns rms_norm(new_residual) and new_residual, both [T, H]."""
    return _table(x.device.type)["add_rms_norm"](x, residual, weight, eps)


def rotary_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> None:
    """Rotates q in place; writes rotated k, and v, to their slots of the caches. k and v are left as they are.

    (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), x1 and x2 the halves of a head's rotary part (RoFormer, Su 2021, in
    the half-split order of NeoX and Llama).

    q [T, num_heads, D], k and v [T, num_kv_heads, D]: views into one fused tensor are welcome, each token's heads being
    contiguous. positions int64 [T]; cos_sin fp32 [max_position, rotary_dim]: cos, then sin; dimensions from rotary_dim
    on pass through. slot_mapping int64 [T]: block_id * block_size + offset; negative: not cached.
    k_cache, v_cache [num_blocks, num_kv_heads, block_size, row], contiguous, as `kv_row_size` says.
    """
    _table(q.device.type)["rotary_and_cache"](q, k, v, positions, cos_sin, slot_mapping, k_cache, v_cache)


def kv_row_size(head_dim: int, dtype: dtype) -> int:
    """Elements that a token's key or value of one head takes in a cache of `dtype`.

    They are the head's numbers, head_dim of them. In an int8 cache they are codes, largest magnitude / 127 apart, and
    that scale follows them in fp32: four bytes more (per token and head, as KVQuant's values, Hooper 2024).
    """
    return reference.kv_row_size(head_dim, dtype)


def kv_cache_formats(device_type: str) -> tuple[str, ...]:
    """What a cache may be kept in on a device, besides the dtype of the model: int8, or fp8 (e4m3, unscaled)."""
    return _table(device_type)["kv_cache_formats"]()


def gather_kv_blocks(run: Tensor, k_cache: Tensor, v_cache: Tensor, block_ids: Tensor) -> None:
    """Copies blocks of a layer's caches to `run` [2, num_kv_heads, n, block_size, row], K before V, as KV goes to other
    groups. Caches [num_blocks, num_kv_heads, block_size, row], block_ids int64 [n].
    """
    _table(k_cache.device.type)["gather_kv_blocks"](run, k_cache, v_cache, block_ids)


def scatter_kv_blocks(run: Tensor, k_cache: Tensor, v_cache: Tensor, block_ids: Tensor, first_head: int = 0) -> None:
    """Writes `run` [2, h, n, block_size, row] to blocks, all of them different: the h heads from `first_head`."""
    _table(k_cache.device.type)["scatter_kv_blocks"](run, k_cache, v_cache, block_ids, first_head)


def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
    """softmax(scale q k^T + causal mask) v over paged keys and values (PagedAttention, Kwon 2023).

    Prefill, chunked prefill and decode may be mixed in a step.

    q [T, num_heads, D], caches [num_blocks, num_kv_heads, block_size, row] with this step's keys already written; int8
    ones are dequantized to q's dtype. Query head h reads kv head h // (num_heads / num_kv_heads). Returns
    [T, num_heads, D], contiguous.
    A row's result does not depend on what else is in the step, nor on how its prefill was cut in chunks.
    """
    return _table(q.device.type)["paged_attention"](q, k_cache, v_cache, metadata, scale)


def silu_and_mul(x: Tensor) -> Tensor:
    """gate / (1 + exp(-gate)) * up, for x [T, 2 I] = gate, up -> [T, I] (SwiGLU, Shazeer 2020)."""
    return _table(x.device.type)["silu_and_mul"](x)


def pack_decoder(
    layers: Sequence[DecoderLayer],
    final_norm: Tensor | None,
    cos_sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
) -> DecoderStack:
    """A whole decoder, but for embedding and head, in the form that `decoder` wants. Once, at load.

    A pipeline stage that is not the last has no `final_norm`; heads are those of this rank.
    """
    pack = _table(cos_sin.device.type)["pack_decoder"]
    return pack(layers, final_norm, cos_sin, num_heads, num_kv_heads, head_dim, eps)


def decoder(
    stack: DecoderStack,
    embeddings: Tensor,
    positions: Tensor,
    kv_caches: Sequence[tuple[Tensor, Tensor]],
    metadata: AttentionMetadata,
    reduce: Reduce | None = None,
) -> Tensor:
    """All layers over a mixed batch: the operations above in the order of a pre-norm decoder (Llama, Touvron 2023).

    embeddings [T, hidden], which may be overwritten; positions int64 [T]; kv_caches: K and V of each layer. Returns the
    hidden states after the final norm, [T, hidden], or, without one, what the next stage takes as embeddings. Bit for
    bit what the single operations of the backend give.

    Under tensor parallelism `reduce` adds up the parts of o and down. A `shared_group` does it inside the one native
    call; with any other the layers are run from here.
    """
    return _table(embeddings.device.type)["decoder"](stack, embeddings, positions, kv_caches, metadata, reduce)


def batch_invariant() -> bool:
    """Whether a row must have the same bits in any batch; on CPUs it has. PAGEDRAY_BATCH_INVARIANT=1 asks for it."""
    return os.environ.get("PAGEDRAY_BATCH_INVARIANT", "") not in ("", "0")


def native_library() -> Any:
    """The CPU library that the operations run on, for `kernels.cpu.shared_group`; None where they run on PyTorch."""
    known = _table("cpu").get("native_library")
    return known() if known else None


def mask_tokens(logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
    """logits[rows[i], t] = -inf, in place, for every token t that `allowed[i]` does not name.

    logits fp32 [B, V]; rows int64 [n], no row twice; allowed int32 [n, words], where bit t % 32 of word t // 32 stands
    for token t, as grammar libraries write it; tokens past the last word are not allowed.
    """
    _table(logits.device.type)["mask_tokens"](logits, rows, allowed)


def greedy(logits: Tensor) -> Tensor:
    """logits fp32 [B, V] -> int64 [B]: the likeliest token, of equals the lowest id."""
    return _table(logits.device.type)["greedy"](logits)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
) -> Tensor:
    """logits fp32 [B, V] -> int64 [B]: one token a row from its own filtered distribution, by inverse CDF in id order.

    All parameters are [B]. In this order: temperature (below 1e-5: greedy); the top_k likeliest (0: all; of equals the
    lowest ids); the fewest likeliest that reach top_p of what is left (1: all; at least one; Holtzman 2019); those at
    least min_p times as likely as the likeliest (0: all). `uniform` in [0, 1) is the row's whole randomness: the same
    logits, parameters and uniform give the same token in any batch.
    """
    return _table(logits.device.type)["sample"](logits, temperature, top_k, top_p, min_p, uniform)


def log_probs(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """logits [B, V], token_ids int64 [B] -> the tokens' log-probabilities fp32 [B]; the k highest [B, k]; their ids.

    Natural logarithms; never below -9999.0, which stands for minus infinity.
    """
    return _table(logits.device.type)["log_probs"](logits, token_ids, k)
