"""The benchmark says what it needs; and every row of it can be built and would be launched."""

import subprocess
import sys

import pytest
import torch

from pagedray.kernels import bench

LAUNCHES = """
from pagedray.kernels import bench
from pagedray.kernels.gpu.compile import recorded

for model in (m.rank_of(size) for m in bench.MODELS for size in (1, 8)):
    for workload in bench.workloads(model, "meta"):
        with recorded() as launches:
            workload.run()
        assert launches and workload.bytes > 0, workload.name
        print(workload.name)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and it would be measured")
def test_without_a_gpu_it_says_so(capsys):
    assert bench.main([]) == 2
    assert "no CUDA GPU here" in capsys.readouterr().err


def test_every_row_can_be_launched():
    """On the meta device, in a process without the interpreter."""
    done = subprocess.run([sys.executable, "-c", LAUNCHES], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    names = done.stdout.splitlines()
    assert all(
        any(kind in name for name in names) for kind in ("decode", "prefill", "W4A16 int4", "W8A8 fp8", "experts")
    )


def test_what_is_counted():
    """Decode of one sequence of 32,768 tokens: 8 heads of 128 in K and V of bf16; 4 operations a pair and dimension."""
    llama, *_ = bench.MODELS
    decode = next(bench.workloads(llama, "meta"))
    assert decode.flops == 4 * 32768 * 32 * 128
    assert decode.bytes == 2 * 2 * 32768 * 8 * 128 + 2 * 2 * 32 * 128
    rank = llama.rank_of(8)
    assert (rank.heads, rank.kv_heads, rank.intermediate) == (4, 1, 1792)
