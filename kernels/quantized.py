"""Quantized weights: GGUF's formats (llama.cpp, `ggml-common.h`) in plain PyTorch, the oracle for the native kernels.

A row of K weights is K / `values` blocks of `bytes` bytes. A weight is scale * code, or scale * code + minimum, with
one scale (and minimum) for 32 neighbors, 16 in Q6_K. The K formats have blocks of 256, whose scales and minimums are
small integers times one fp16 a block. All of it is computed in fp32 and rounded once, to the dtype that is wanted.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """`ggml_type` is the number that GGUF files, and the native kernels, know the format by."""

    name: str
    ggml_type: int
    values: int  # of a block
    bytes: int
    dequantize: Callable[[Tensor], Tensor]  # uint8 [num_blocks, bytes] -> fp32 [num_blocks, values]


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A matrix as blocks, row by row: `blocks` uint8 [N, K / values * bytes]."""

    blocks: Tensor
    format: BlockFormat

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K] of the weights that the blocks stand for."""
        return self.blocks.shape[0], self.blocks.shape[1] // self.format.bytes * self.format.values

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        values = self.format.dequantize(self.blocks.reshape(-1, self.format.bytes))
        return values.view(self.shape).to(dtype)

    def rows(self, index: Tensor) -> "QuantizedTensor":
        return QuantizedTensor(self.blocks[index], self.format)


def quantize_int8(weight: Tensor) -> QuantizedTensor:
    """weight [N, K], K a multiple of 32 -> codes from -127 to 127 with an fp16 scale for each 32 (Q8_0's blocks).

    Each code is the nearest under the scale as it is stored; of Q8_0's own recipe only the scale is the same.
    """
    groups = weight.float().reshape(-1, 32)
    scale = (groups.abs().amax(-1, keepdim=True) / 127).half()
    codes = torch.where(scale > 0, (groups / scale.float()).round(), 0.0).clamp(-127, 127).to(torch.int8)
    blocks = torch.cat([scale.view(torch.uint8), codes.view(torch.uint8)], dim=-1)
    return QuantizedTensor(blocks.view(weight.shape[0], -1), FORMATS["Q8_0"])


def _fp16(blocks: Tensor, at: int) -> Tensor:
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()  # [num_blocks, 1]


def _nibbles(packed: Tensor) -> Tensor:
    """[..., n] bytes -> [..., 2 n]: all low nibbles, then all high ones."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _bits(packed: Tensor) -> Tensor:
    """[n, 4] bytes -> [n, 32], least bit first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 1).flatten(1)


def _q4_0(b: Tensor) -> Tensor:
    return _fp16(b, 0) * (_nibbles(b[:, 2:]).float() - 8)


def _q4_1(b: Tensor) -> Tensor:
    return _fp16(b, 0) * _nibbles(b[:, 4:]).float() + _fp16(b, 2)


def _q5_0(b: Tensor) -> Tensor:
    return _fp16(b, 0) * ((_nibbles(b[:, 6:]) | _bits(b[:, 2:6]) << 4).float() - 16)


def _q5_1(b: Tensor) -> Tensor:
    return _fp16(b, 0) * (_nibbles(b[:, 8:]) | _bits(b[:, 4:8]) << 4).float() + _fp16(b, 2)


def _q8_0(b: Tensor) -> Tensor:
    return _fp16(b, 0) * b[:, 2:].view(torch.int8).float()


def _scaled(b: Tensor, codes: Tensor) -> Tensor:
    """Codes [n, 8, 32] of a block with 8 scales and 8 minimums of 6 bits, in bytes 4 to 16."""
    low, middle, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], dim=-1)
    minimums = torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], dim=-1)
    scaled = (_fp16(b, 0) * scales.float()).unsqueeze(-1) * codes.float()
    return (scaled - (_fp16(b, 2) * minimums.float()).unsqueeze(-1)).flatten(1)


def _q4_k(b: Tensor) -> Tensor:
    return _scaled(b, _nibbles(b[:, 16:].unflatten(1, (4, 32))).reshape(-1, 8, 32))


def _q5_k(b: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=b.device).unsqueeze(-1)
    fifth = (b[:, 16:48].unsqueeze(1) >> shifts) & 1  # [n, 8, 32]
    return _scaled(b, _nibbles(b[:, 48:].unflatten(1, (4, 32))).reshape(-1, 8, 32) | fifth << 4)


def _q6_k(b: Tensor) -> Tensor:
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=b.device).unsqueeze(-1)
    low = _nibbles(b[:, :128].unflatten(1, (2, 64))).reshape(-1, 2, 4, 32)
    high = (b[:, 128:192].unflatten(1, (2, 1, 32)) >> shifts) & 3  # [n, 2, 4, 32]
    codes = (low | high << 4).float() - 32
    scales = _fp16(b, 208) * b[:, 192:208].view(torch.int8).float()
    return (scales.unsqueeze(-1) * codes.reshape(-1, 16, 16)).flatten(1)


FORMATS = {
    f.name: f
    for f in (
        BlockFormat("Q4_0", 2, 32, 18, _q4_0),
        BlockFormat("Q4_1", 3, 32, 20, _q4_1),
        BlockFormat("Q5_0", 6, 32, 22, _q5_0),
        BlockFormat("Q5_1", 7, 32, 24, _q5_1),
        BlockFormat("Q8_0", 8, 32, 34, _q8_0),
        BlockFormat("Q4_K", 12, 256, 144, _q4_k),
        BlockFormat("Q5_K", 13, 256, 176, _q5_k),
        BlockFormat("Q6_K", 14, 256, 210, _q6_k),
    )
}
