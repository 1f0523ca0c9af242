"""A decoder of the Llama family, described by its `ModelConfig`. Says what is computed; `kernels.ops` decides how."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels import ops
from ..config import ModelConfig
from ..rope import cos_sin_table
from .weights import DecoderWeights, LayerWeights


class Decoder:
    """Token ids to logits, with keys and values in paged caches."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, max_model_len: int):
        self.config = config
        self.embed_tokens = weights.embed_tokens
        layers = []
        while weights.layers:  # one layer's weights and their packed copy at a time
            layers.append(_pack(weights.layers.pop(0)))
        self.stack = ops.pack_decoder(
            layers,
            final_norm=weights.norm,
            cos_sin=cos_sin_table(config.rope, config.head_dim, max_model_len),
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
        )
        self.lm_head = ops.pack_linear(weights.lm_head)

    def forward(
        self,
        token_ids: Tensor,  # [num_tokens] int64
        positions: Tensor,  # [num_tokens] int64
        kv_caches: Sequence[tuple[Tensor, Tensor]],  # per layer; [num_blocks, num_kv_heads, block_size, head_dim]
        metadata: ops.AttentionMetadata,
    ) -> Tensor:
        """Run all layers over a mixed batch; write its keys and values. Returns hidden states [num_tokens, hidden]."""
        return ops.decoder(self.stack, ops.embedding(token_ids, self.embed_tokens), positions, kv_caches, metadata)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [n, hidden] to logits [n, vocab] in fp32."""
        return ops.linear(hidden, self.lm_head, torch.float32)


def _pack(weights: LayerWeights) -> ops.DecoderLayer:
    return ops.DecoderLayer(
        input_norm=weights.input_norm,
        qkv=ops.pack_linear(weights.qkv.weight, weights.qkv.bias),
        o=ops.pack_linear(weights.o.weight, weights.o.bias),
        post_attention_norm=weights.post_attention_norm,
        gate_up=ops.pack_linear(weights.gate_up.weight, weights.gate_up.bias),
        down=ops.pack_linear(weights.down.weight, weights.down.bias),
    )
