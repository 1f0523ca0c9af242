"""A decoder of the Llama family, described by its `ModelConfig`, or a rank's shard of it.

Says what is computed; `kernels.ops` decides how.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels import ops
from ...kernels.ops import Weight
from ..config import ModelConfig
from ..partition import Shard, whole_model
from ..rope import cos_sin_table
from .weights import DecoderWeights, LayerWeights, Linear

_CPU = torch.device("cpu")


class Decoder:
    """Token ids to logits, with keys and values in paged caches: the part of it that `shard` says.

    `reduce` adds up what tensor-parallel ranks have in part; None where a rank has all.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        max_model_len: int,
        shard: Shard | None = None,
        reduce: ops.Reduce | None = None,
        device: torch.device = _CPU,
        quantize: str | None = None,
    ):
        """`quantize`: a format of `ops.quantize_linear` for the layers; embedding and head stay as they are."""
        self.config = config
        self.shard = shard = shard or whole_model(config)
        self.reduce = reduce
        self.dtype = weights.norm.dtype
        # Rows of a quantized embedding are dequantized when they are looked up: a copy in bf16 would take two to four
        # times the memory, to save microseconds a step.
        self.embed_tokens = _placed(weights.embed_tokens, self.dtype, device)
        tied = weights.lm_head is weights.embed_tokens
        layers = []
        while weights.layers:  # one layer's weights and their packed copy at a time
            layers.append(_pack(weights.layers.pop(0), self.dtype, device, quantize))
        self.stack = ops.pack_decoder(
            layers,
            final_norm=weights.norm.to(device) if shard.last_stage else None,
            cos_sin=cos_sin_table(config.rope, config.head_dim, max_model_len).to(device),
            num_heads=len(shard.heads),
            num_kv_heads=len(shard.kv_heads),
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
        )
        lm_head = self.embed_tokens if tied else _placed(weights.lm_head, self.dtype, device)
        self.lm_head = ops.pack_linear(lm_head, None, self.dtype) if shard.last_stage else None

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids int64 [num_tokens] -> [num_tokens, hidden]; each rank looks up the rows of its vocabulary."""
        if self.reduce is None:
            return ops.embedding(token_ids, self.embed_tokens, self.dtype)
        local = token_ids - self.shard.vocab.start
        mine = (local >= 0) & (local < len(self.shard.vocab))
        rows = ops.embedding(local.where(mine, 0), self.embed_tokens, self.dtype).float()
        return self.reduce(rows * mine.unsqueeze(1), self.dtype)

    def forward(
        self,
        hidden: Tensor,  # [num_tokens, hidden]: embeddings, or what the stage before returned; may be overwritten
        positions: Tensor,  # [num_tokens] int64
        kv_caches: Sequence[tuple[Tensor, Tensor]],  # per layer; [num_blocks, num_kv_heads, block_size, row]
        metadata: ops.AttentionMetadata,
    ) -> Tensor:
        """Run this rank's layers over a mixed batch; write its keys and values. Returns [num_tokens, hidden]."""
        return ops.decoder(self.stack, hidden, positions, kv_caches, metadata, self.reduce)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [n, hidden] of the last stage to logits of this rank's vocabulary, [n, vocab] in fp32."""
        assert self.lm_head is not None, "only the last stage has the head"
        return ops.linear(hidden, self.lm_head, torch.float32)


def _placed(weight: Weight, dtype: torch.dtype, device: torch.device) -> Weight:
    """On a CPU as it is; on a GPU dense, for the kernels there do not read a checkpoint's quantized formats yet."""
    if device.type == "cpu":
        return weight
    return (weight if isinstance(weight, Tensor) else weight.dequantize(dtype)).to(device)


def _pack(weights: LayerWeights, dtype: torch.dtype, device: torch.device, quantize: str | None) -> ops.DecoderLayer:
    def pack(linear: Linear) -> ops.PackedLinear:
        weight = linear.weight
        bias = None if linear.bias is None else linear.bias.to(device)
        if quantize:
            assert isinstance(weight, Tensor), "loaded without blocks of its own"
            return ops.quantize_linear(weight.to(device), bias, quantize)
        placed = (
            [_placed(w, dtype, device) for w in weight] if isinstance(weight, list) else _placed(weight, dtype, device)
        )
        return ops.pack_linear(placed, bias, dtype)

    return ops.DecoderLayer(
        input_norm=weights.input_norm.to(device),
        qkv=pack(weights.qkv),
        o=pack(weights.o),
        post_attention_norm=weights.post_attention_norm.to(device),
        gate_up=pack(weights.gate_up),
        down=pack(weights.down),
    )
