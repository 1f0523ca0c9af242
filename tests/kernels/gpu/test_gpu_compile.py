"""The kernels compile for GPUs that are not here, within what those have; and the check sees it where they do not."""

import os
import subprocess
import sys

import pytest
import triton

pytestmark = pytest.mark.slow  # seconds a kernel
long = pytest.mark.skipif(not os.environ.get("PAGEDRAY_LONG_TESTS"), reason="takes minutes: set PAGEDRAY_LONG_TESTS=1")

PLANTED = """
from pagedray.kernels.gpu import attention, compile, linear

{plant}
(launch, *_) = compile.launches_of(compile.CASES[{case!r}])
report = compile.compile_launch(launch, 90)
print(report)
print(compile.broken_rules(report))
"""


@pytest.fixture
def compiler(tmp_path):
    """Runs Python in a process of its own: interpreter and compiler exclude each other."""

    def run(*command):
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment["TRITON_CACHE_DIR"] = str(tmp_path)
        return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=900)

    return run


def test_attention_and_int4_for_hopper(compiler):
    chosen = ["heads of 128, blocks of 64", "W4A16, int4, 8"]
    done = compiler("-m", "pagedray.kernels.gpu.compile", "--arch", "90", "--only", *chosen)
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines()[2:]]
    assert [row[1] for row in rows] == ["decode", "combine", "prefill", "w4_gemm"]


@long
@pytest.mark.skipif(not triton.__version__.startswith("3.8."), reason="3.7.1 breaks three rules: docs/kernels.md")
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("arch", ["80", "90", "100"])
def test_everything(compiler, arch):
    done = compiler("-m", "pagedray.kernels.gpu.compile", "--arch", arch)
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines()[2:]]
    expected = {"decode", "combine", "prefill", "gemm", "w4_gemm", "grouped_gemm", "rotary_and_cache", "sample"}
    assert expected <= {row[1] for row in rows}


@pytest.mark.parametrize(
    "plant, case, rule",
    [
        (
            "linear.GEMM[1 << 30] = linear.Config(128, 256, 64, 8, 7)",
            "GEMM, bf16",
            "a block can have 232,448",
        ),
        pytest.param(
            "attention.PREFILL[128] = attention.Config(128, 128, 4, 2)",
            "prefill, 32/8 heads of 128, blocks of 64",
            "bytes of registers",
            marks=long,
        ),
    ],
    ids=["shared memory", "registers"],
)
def test_a_planted_overflow_is_caught(compiler, plant, case, rule):
    done = compiler("-c", PLANTED.format(plant=plant, case=case))
    assert done.returncode == 0, done.stderr
    assert rule in done.stdout.splitlines()[-1]
