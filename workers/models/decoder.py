"""A decoder of the Llama family, described by its `ModelConfig`. Says what is computed; `kernels.ops` decides how."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels import ops
from ..config import ModelConfig
from ..rope import cos_sin_table
from .weights import DecoderWeights, LayerWeights


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    qkv: ops.PackedLinear
    o: ops.PackedLinear
    post_attention_norm: Tensor
    gate_up: ops.PackedLinear
    down: ops.PackedLinear

    @classmethod
    def pack(cls, weights: LayerWeights) -> "_Layer":
        qkv, o, gate_up, down = (
            ops.pack_linear(linear.weight, linear.bias)
            for linear in (weights.qkv, weights.o, weights.gate_up, weights.down)
        )
        return cls(weights.input_norm, qkv, o, weights.post_attention_norm, gate_up, down)


class Decoder:
    """Token ids to logits, with keys and values in paged caches."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, max_model_len: int):
        self.config = config
        self.embed_tokens = weights.embed_tokens
        self.layers = []
        while weights.layers:  # one layer's weights and their packed copy at a time
            self.layers.append(_Layer.pack(weights.layers.pop(0)))
        self.norm = weights.norm
        self.lm_head = ops.pack_linear(weights.lm_head)
        self.cos_sin = cos_sin_table(config.rope, config.head_dim, max_model_len)
        self.scale = config.head_dim**-0.5

    def forward(
        self,
        token_ids: Tensor,  # [num_tokens] int64
        positions: Tensor,  # [num_tokens] int64
        kv_caches: Sequence[tuple[Tensor, Tensor]],  # per layer; [num_blocks, num_kv_heads, block_size, head_dim]
        metadata: ops.AttentionMetadata,
    ) -> Tensor:
        """Run all layers over a mixed batch; write its keys and values. Returns hidden states [num_tokens, hidden]."""
        eps = self.config.rms_norm_eps
        residual = ops.embedding(token_ids, self.embed_tokens)
        x = ops.rms_norm(residual, self.layers[0].input_norm, eps)
        next_norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        for layer, (k_cache, v_cache), next_norm in zip(self.layers, kv_caches, next_norms, strict=True):
            x = self._attention(layer, x, positions, k_cache, v_cache, metadata)
            x, residual = ops.add_rms_norm(x, residual, layer.post_attention_norm, eps)
            x = ops.linear(ops.silu_and_mul(ops.linear(x, layer.gate_up)), layer.down)
            x, residual = ops.add_rms_norm(x, residual, next_norm, eps)
        return x

    def _attention(
        self,
        layer: _Layer,
        x: Tensor,
        positions: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: ops.AttentionMetadata,
    ) -> Tensor:
        num_heads, num_kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        qkv = ops.linear(x, layer.qkv).unflatten(-1, (num_heads + 2 * num_kv_heads, self.config.head_dim))
        q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)  # views
        ops.rotary_and_cache(q, k, v, positions, self.cos_sin, metadata.slot_mapping, k_cache, v_cache)
        out = ops.paged_attention(q, k_cache, v_cache, metadata, self.scale)
        return ops.linear(out.flatten(1), layer.o)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [n, hidden] to logits [n, vocab] in fp32."""
        return ops.linear(hidden, self.lm_head, torch.float32)
