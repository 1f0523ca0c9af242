"""Triton's interpreter with honest bfloat16 and fp8; import it before anything that imports triton.

As it comes (3.6 to 3.8) the interpreter computes on the bit patterns of bf16 in `tl.dot`, arithmetic and comparisons,
truncates fp32 to bf16 and rounds to fp8 wrongly, all without an error; and a row of `tl.dot` depends on its company
where NumPy's BLAS makes it so. It also prepares Triton's language anew at each call of a helper, which is half of its
time; here it does so once a launch. This replaces private functions of Triton, so it is for tests alone;
test_gpu_interpreter.py fails where a version makes it useless or breaks it.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

triton.knobs.runtime.interpret = True
os.environ.pop("TRITON_INTERPRET")  # what other tests start shall not inherit it

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_TORCH = {
    tl.float64: torch.float64,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_INTEGERS = {1: (np.int8, torch.uint8, np.uint8), 2: (np.int16, torch.int16, np.uint16)}
_INTEGERS |= {4: (np.int32, torch.int32, np.uint32), 8: (np.int64, torch.int64, np.uint64)}
_BITWISE = {np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift}
_COMPARISONS = {np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal}

_their_convert = interpreter._convert_float
_their_binary = InterpreterBuilder.binary_op
_their_unary = InterpreterBuilder.unary_op
_their_dot = InterpreterBuilder.create_dot
_their_patch = interpreter._patch_lang
_patched = set()  # modules, by the launch that runs


def _convert_float(raw, source, target, rounding):
    """Bits to bits by PyTorch, which rounds to nearest even; fp8 saturates, as cvt.rn.satfinite does."""
    if source not in _TORCH or target not in _TORCH:
        return _their_convert(raw, source, target, rounding)
    array = np.ascontiguousarray(raw)
    values = torch.from_numpy(array.view(_INTEGERS[array.itemsize][0]).copy()).view(_TORCH[source])
    if _TORCH[target] in _FP8:
        largest = torch.finfo(_TORCH[target]).max
        wide = values.float()
        values = torch.where(wide.isnan(), wide, wide.clamp(-largest, largest))
    values = values.to(_TORCH[target])
    _, as_torch, as_numpy = _INTEGERS[values.element_size()]
    return values.view(as_torch).numpy().view(as_numpy).reshape(array.shape)


def _is_bf16(handle):
    return handle.dtype.scalar == tl.bfloat16


def _widened(handle):
    data = np.asarray(handle.data)
    if _is_bf16(handle) and data.dtype == np.uint16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    return handle.data


def _rounded(values):
    raw = np.ascontiguousarray(values, dtype=np.float32)
    return TensorHandle(_convert_float(raw, tl.float32, tl.bfloat16, None).view(np.uint16), tl.bfloat16)


def _binary_op(self, a, b, op):
    if not _is_bf16(a) or op in _BITWISE:
        return _their_binary(self, a, b, op)
    result = op(_widened(a), _widened(b))
    return TensorHandle(result, tl.int1) if op in _COMPARISONS else _rounded(result)


def _unary_op(self, a, op):
    return _rounded(op(_widened(a))) if _is_bf16(a) else _their_unary(self, a, op)


def _create_dot(self, a, b, accumulator, *rest):
    if _is_bf16(a) or _is_bf16(b):
        a, b = (TensorHandle(_widened(x), tl.float32) for x in (a, b))
    if accumulator.data.dtype != np.float32:
        return _their_dot(self, a, b, accumulator, *rest)
    # In fp64: some CPUs' BLAS adds a row's products in an order that depends on where in the matrix the row stands
    sums = _their_dot(self, a, b, TensorHandle(accumulator.data.astype(np.float64), tl.float64), *rest)
    return TensorHandle(sums.data.astype(np.float32), accumulator.dtype.scalar)


def _patch_lang(function):
    modules = {"language" for value in function.__globals__.values() if value is tl}
    modules |= {"core" for value in function.__globals__.values() if value is tl.core}
    if modules <= _patched:  # a helper, whose changes nobody takes back: the launch does
        return None
    scope = _their_patch(function)
    if not _patched:
        restore = scope.restore

        def restore_all():
            restore()
            _patched.clear()

        scope.restore = restore_all
    _patched.update(modules)
    return scope


interpreter._convert_float = _convert_float
interpreter._patch_lang = _patch_lang
InterpreterBuilder.binary_op = _binary_op
InterpreterBuilder.unary_op = _unary_op
InterpreterBuilder.create_dot = _create_dot
