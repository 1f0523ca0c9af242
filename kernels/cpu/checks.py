"""What C++ takes for granted is checked before it is called."""

import torch
from torch import Tensor

DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # simd.h's numbers
INT8 = 2  # of caches


def check(condition: bool, operation: str, rule: str, *tensors: Tensor) -> None:
    if not condition:
        got = ", ".join(f"{list(t.shape)} {t.dtype} strides {t.stride()}" for t in tensors)
        raise ValueError(f"{operation}: {rule}; got {got}")


def dtype_code(operation: str, *tensors: Tensor) -> int:
    """The code of the one dtype that all of them have."""
    dtype = tensors[0].dtype
    check(
        dtype in DTYPES and all(t.dtype == dtype for t in tensors),
        operation,
        "its tensors must be all float32 or all bfloat16",
        *tensors,
    )
    return DTYPES[dtype]
