"""The kernels compile for GPUs that are not here, within what those have; and the check sees it where they do not."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow  # seconds a kernel

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
        return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=250)

    return run


def test_a_chosen_set_for_hopper(compiler):
    chosen = ["heads of 128, blocks of 64", "invariant", "W4A16, int4, 8", "rotary and cache", "sampling"]
    done = compiler("-m", "pagedray.kernels.gpu.compile", "--arch", "90", "--only", *chosen)
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines()[2:]]
    assert {"decode", "combine", "prefill", "gemm", "w4_gemm", "rotary_and_cache", "sample"} <= {row[1] for row in rows}


@pytest.mark.parametrize("arch", ["80", "100"])
def test_attention_for_other_generations(compiler, arch):
    done = compiler("-m", "pagedray.kernels.gpu.compile", "--arch", arch, "--only", "heads of 128, blocks of 64")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 5


@pytest.mark.parametrize(
    "plant, case, rule",
    [
        (
            "linear.GEMM[1 << 30] = linear.Config(128, 256, 64, 8, 7)",
            "GEMM, bf16",
            "a block can have 232,448",
        ),
        (
            "attention.PREFILL[128] = attention.Config(128, 128, 4, 2)",
            "prefill, 32/8 heads of 128, blocks of 64",
            "bytes of registers",
        ),
    ],
    ids=["shared memory", "registers"],
)
def test_a_planted_overflow_is_caught(compiler, plant, case, rule):
    done = compiler("-c", PLANTED.format(plant=plant, case=case))
    assert done.returncode == 0, done.stderr
    assert rule in done.stdout.splitlines()[-1]
