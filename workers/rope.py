"""Rotary position embedding (RoFormer, arXiv:2104.09864) and the ways to stretch it: one table of cosines and sines.

The arithmetic keeps transformers' order of operations, so that the table is the one that transformers multiplies with,
to the last bit of fp32.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..scheduler.errors import CheckpointError
from .config import ROPE_TYPES, RopeConfig


def cos_sin_table(rope: RopeConfig, head_dim: int, max_position: int) -> Tensor:
    """The table of positions 0 … max_position-1: [max_position, head_dim] fp32.

    The first head_dim/2 columns are cosines, the rest sines, both with YaRN's attention factor multiplied in.
    Raises `CheckpointError` for a type that is not in `ROPE_TYPES` or lacks what it needs.
    """
    inv_freq = inverse_frequencies(rope, head_dim, max_position)
    angles = torch.arange(max_position, dtype=torch.float32)[:, None] * inv_freq  # [max_position, head_dim / 2]
    scale = attention_factor(rope)
    return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1)


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_position: int) -> Tensor:
    """Radians a position, by pair of dimensions: [head_dim / 2] fp32. `max_position` matters to "dynamic" only."""
    if rope.type not in _INVERSE_FREQUENCIES:
        raise CheckpointError(f"RoPE type {rope.type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    return _INVERSE_FREQUENCIES[rope.type](rope, head_dim, max_position)


def attention_factor(rope: RopeConfig) -> float:
    """What queries and keys are multiplied by because a longer context flattens attention; 1 but for YaRN."""
    if rope.type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _original_length(rope: RopeConfig) -> int:
    if not rope.original_max_position_embeddings:
        raise CheckpointError(f"RoPE type {rope.type!r} needs original_max_position_embeddings")
    return rope.original_max_position_embeddings


def _powers(theta: float, dim: int) -> Tensor:
    return theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _default(rope: RopeConfig, dim: int, max_position: int) -> Tensor:
    return 1.0 / _powers(rope.theta, dim)


def _linear(rope: RopeConfig, dim: int, max_position: int) -> Tensor:
    return _default(rope, dim, max_position) / rope.factor


def _dynamic(rope: RopeConfig, dim: int, max_position: int) -> Tensor:
    """Dynamic NTK: a base that grows with the length.

    transformers recomputes the base as a sequence grows, so that keys already in its cache keep an older base. A paged
    cache is shared by sequences of any length and needs one base: as in vLLM it is the one for `max_position`,
    so with a max_model_len within the original length nothing is scaled and both agree.
    """
    original = _original_length(rope)
    length = max(max_position, original)
    theta = rope.theta * ((rope.factor * length / original) - (rope.factor - 1)) ** (dim / (dim - 2))
    return 1.0 / _powers(theta, dim)


def _llama3(rope: RopeConfig, dim: int, max_position: int) -> Tensor:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, those between interpolated."""
    original = _original_length(rope)
    inv_freq = _default(rope, dim, max_position)
    wavelength = 2 * math.pi / inv_freq
    longest, shortest = original / rope.low_freq_factor, original / rope.high_freq_factor
    scaled = torch.where(wavelength > longest, inv_freq / rope.factor, inv_freq)
    smooth = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * scaled / rope.factor + smooth * scaled
    return torch.where((wavelength >= shortest) & (wavelength <= longest), between, scaled)


def _yarn(rope: RopeConfig, dim: int, max_position: int) -> Tensor:
    """YaRN (arXiv:2309.00071): extrapolate dimensions that turn often, interpolate those that turn seldom."""
    original = _original_length(rope)

    def dimension(rotations: float) -> float:
        """The dimension that turns `rotations` times within the original length."""
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers = _powers(rope.theta, dim)
    keep = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - keep) + 1.0 / powers * keep


_INVERSE_FREQUENCIES: dict[str, Callable[[RopeConfig, int, int], Tensor]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
