"""Weights in 8 and 4 bits, in plain PyTorch: the formats, rounding to nearest, and the oracle of linear layers.

    int8, fp8     w = data * scale of the output channel, or of the whole matrix; activations are rounded row by row too
    int4          w = (nibble - zero) * scale of a group of inputs; zero 8 where it is symmetric
    mxfp4         w = e2m1 * 2^(scale - 127) of 32 inputs (OCP Microscaling Formats 1.0)
    nvfp4         w = e2m1 * e4m3 scale of 16 inputs * one fp32 scale

In a group of G inputs, byte j holds input j in its low and input j + G / 2 in its high half, so a kernel multiplies
both halves as they lie. A weight of 4 bits is rounded to the dtype of the activations before it is multiplied.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

FP8_DTYPE = torch.float8_e4m3fn
LIMITS = {"int8": 127.0, "fp8": 448.0}
GROUPS = {"int4": 128, "mxfp4": 32, "nvfp4": 16}  # of inputs; int4 may have another
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix [N, K]. `quantize` makes one."""

    format: str  # int8, fp8, int4, mxfp4, nvfp4
    data: Tensor  # int8 or fp8 [N, K]; uint8 [N, K / 2]
    scales: Tensor  # fp32 [N] or [1]; int4: fp32 [N, K / group]; mxfp4, nvfp4: uint8 [N, K / group], the scale's bits
    zeros: Tensor | None = None  # uint8 [N, K / group], int4 alone; None: 8
    group: int = 0
    global_scale: float = 1.0  # nvfp4 alone

    @property
    def out_features(self) -> int:
        return self.data.shape[0]

    @property
    def in_features(self) -> int:
        return self.data.shape[1] * (2 if self.group else 1)

    def dequantized(self) -> Tensor:
        """fp32 [N, K]."""
        if not self.group:
            return self.data.float() * self.scales.unsqueeze(1)
        halves = self.data.unflatten(1, (-1, self.group // 2))  # [N, groups, G / 2]
        nibbles = torch.cat([halves & 15, halves >> 4], dim=-1).int()
        if self.format == "int4":
            zeros = 8 if self.zeros is None else self.zeros.unsqueeze(-1).int()
            values, scales = (nibbles - zeros).float(), self.scales
        else:
            magnitudes = torch.tensor(E2M1, device=nibbles.device)[(nibbles & 7).long()]
            values = torch.where(nibbles > 7, -magnitudes, magnitudes)
            scales = torch.exp2(self.scales.float() - 127) if self.format == "mxfp4" else _e4m3(self.scales)
        return (values * scales.unsqueeze(-1)).flatten(1) * self.global_scale


def _e4m3(bits: Tensor) -> Tensor:
    return bits.view(FP8_DTYPE).float()


def quantize_rows(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """x [T, K] -> int8 or fp8 [T, K], and fp32 [T]: the largest magnitude of a row becomes the format's largest."""
    scales = x.float().abs().amax(-1).clamp(min=1e-10) / LIMITS[format]
    return _rounded(x.float() / scales.unsqueeze(1), format), scales


def _rounded(values: Tensor, format: str) -> Tensor:
    values = values.clamp(-LIMITS[format], LIMITS[format])
    return values.round().to(torch.int8) if format == "int8" else values.to(FP8_DTYPE)


def quantize(
    weight: Tensor, format: str, *, per_channel: bool = True, group: int | None = None, symmetric: bool = True
) -> QuantizedWeight:
    """Round a matrix [N, K] to nearest. `per_channel` is for 8 bits, `group` and `symmetric` for int4.

    Raises ValueError for an unknown format and where K is no multiple of the group.
    """
    if format in LIMITS:
        if per_channel:
            data, scales = quantize_rows(weight, format)
        else:
            scales = (weight.float().abs().amax() / LIMITS[format]).clamp(min=1e-10).reshape(1)
            data = _rounded(weight.float() / scales, format)
        return QuantizedWeight(format, data, scales)
    if format not in GROUPS:
        raise ValueError(f"format must be one of {', '.join([*LIMITS, *GROUPS])}, not {format!r}")
    size = group or GROUPS[format]
    if weight.shape[1] % size or size % 16:
        raise ValueError(f"{format}: {weight.shape[1]} inputs do not fall into groups of {size}, a multiple of 16")
    grouped = weight.float().unflatten(1, (-1, size))  # [N, groups, G]
    largest = grouped.abs().amax(-1)
    zeros, global_scale = None, 1.0
    if format == "int4" and symmetric:
        scales = (largest / 7).clamp(min=1e-10)
        nibbles = (grouped / scales.unsqueeze(-1)).round().clamp(-8, 7) + 8
    elif format == "int4":
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scales = ((high - low) / 15).clamp(min=1e-10)
        zeros = (-low / scales).round().clamp(0, 15).to(torch.uint8)
        nibbles = ((grouped / scales.unsqueeze(-1)).round() + zeros.unsqueeze(-1)).clamp(0, 15)
    else:
        if format == "mxfp4":
            scales = (torch.floor(torch.log2(largest.clamp(min=1e-30))) - 2 + 127).clamp(1, 254).to(torch.uint8)
            unit = torch.exp2(scales.float() - 127)
        else:
            global_scale = float(largest.max().clamp(min=1e-10)) / (6 * LIMITS["fp8"])
            eighth_bits = (largest / 6 / global_scale).clamp(max=LIMITS["fp8"]).to(FP8_DTYPE)
            scales, unit = eighth_bits.view(torch.uint8), eighth_bits.float() * global_scale
        values = torch.tensor(E2M1, device=weight.device)
        wanted = grouped / unit.clamp(min=1e-30).unsqueeze(-1)
        nearest = (wanted.abs().unsqueeze(-1) - values).abs().argmin(-1)
        nibbles = nearest + 8 * (wanted < 0)
    low, high = nibbles.to(torch.uint8).chunk(2, dim=-1)
    return QuantizedWeight(format, (low | high << 4).flatten(1).contiguous(), scales, zeros, size, global_scale)


def quantized_linear(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """x [T, K] -> [T, N] in x's dtype, or in `out_dtype`, summed in fp32: the oracle."""
    if weight.group:
        out = x.float() @ weight.dequantized().to(x.dtype).float().T
    else:
        rounded, scales = quantize_rows(x, weight.format)
        out = (rounded.float() @ weight.data.float().T) * scales.unsqueeze(1) * weight.scales
    return (out if bias is None else out + bias.float()).to(out_dtype or x.dtype)
