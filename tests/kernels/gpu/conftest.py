"""The Triton kernels on CPU tensors, in Triton's interpreter; without triton these tests are not there."""

import importlib.util

import pytest

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import triton_interpreter  # noqa: F401  before any test module imports triton


@pytest.fixture
def randn():
    """randn(*shape, dtype=, seed=): the same numbers in each call with the same seed."""
    import torch

    def make(*shape, dtype=torch.float32, seed=0):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

    return make
