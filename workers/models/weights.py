"""The weights of a Llama-like decoder, fused as the model multiplies them. `checkpoint/load.py` fills them."""

from dataclasses import dataclass

from torch import Tensor

from ...kernels.ops import Weight


@dataclass(slots=True)
class Linear:
    """y = x @ weight.T + bias; weight [out_features, in_features], or parts of it where rows differ in their format."""

    weight: Weight | list[Weight]
    bias: Tensor | None = None


@dataclass(slots=True)
class LayerWeights:
    input_norm: Tensor  # [hidden]
    qkv: Linear  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden]: all q heads, all k heads, all v heads
    o: Linear  # [hidden, num_heads * head_dim]
    post_attention_norm: Tensor  # [hidden]
    gate_up: Linear  # [2 * intermediate, hidden]: gate, then up
    down: Linear  # [hidden, intermediate]


@dataclass(slots=True)
class DecoderWeights:
    embed_tokens: Weight  # [vocab, hidden]
    layers: list[LayerWeights]
    norm: Tensor  # [hidden]
    lm_head: Weight  # [vocab, hidden]; the same tensor as embed_tokens where they are tied
