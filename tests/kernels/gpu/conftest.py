"""The Triton kernels on CPU tensors, in Triton's interpreter; without a Triton that can, these tests are not there.

A program takes about a millisecond there, so of a test with several parameters every value of each runs, but only with
PAGEDRAY_LONG_TESTS=1 every combination.
"""

import importlib.metadata
import os
from collections import defaultdict
from pathlib import Path

import pytest


def _interpreter_works() -> bool:
    """3.6's does not run with NumPy 2."""
    try:
        major, minor, *_ = importlib.metadata.version("triton").split(".")
    except importlib.metadata.PackageNotFoundError:
        return False
    return (int(major), int(minor)) >= (3, 7)


if _interpreter_works():
    import triton_interpreter  # noqa: F401  before any test module imports triton
else:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(config, items):
    if os.environ.get("PAGEDRAY_LONG_TESTS"):
        return
    by_test = defaultdict(list)
    for item in items:
        if Path(__file__).parent in item.path.parents and hasattr(item, "callspec"):
            by_test[item.path, item.originalname].append(item)
    dropped = {item for cases in by_test.values() for item in cases if item not in _diagonal(cases)}
    config.hook.pytest_deselected(items=list(dropped))
    items[:] = [item for item in items if item not in dropped]


def _diagonal(cases) -> set:
    """Those with the i-th value of every parameter, for each i; a parameter with fewer values begins again."""
    axes = [_values(case) for case in cases]
    orders = [list(dict.fromkeys(column)) for column in zip(*axes, strict=True)]
    wanted = {tuple(order[i % len(order)] for order in orders) for i in range(max(map(len, orders)))}
    return {case for case, values in zip(cases, axes, strict=True) if values in wanted}


def _values(case) -> tuple[str, ...]:
    """Of each parameter; names that one `parametrize` gives together are one."""
    names = [mark.args[0].replace(" ", "").split(",") for mark in case.iter_markers("parametrize")]
    together = {name for group in names for name in group}
    names += [[name] for name in sorted(case.callspec.params) if name not in together]
    return tuple(repr([case.callspec.params[name] for name in group]) for group in names)


@pytest.fixture
def randn():
    """randn(*shape, dtype=, seed=): the same numbers in each call with the same seed."""
    import torch

    def make(*shape, dtype=torch.float32, seed=0):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

    return make
