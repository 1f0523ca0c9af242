"""Building, caching and choosing the native library; PyTorch where there is none."""

import errno
import fcntl
import logging
import os
import pwd
import subprocess
import sys

import pytest
import torch

from pagedray.kernels import ops, reference
from pagedray.kernels.cpu import library

USE = """
import logging, torch
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
from pagedray.kernels import ops
for _ in range(3):
    print(ops.rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), 0.0).tolist())
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEDRAY_CACHE", str(tmp_path))
    return tmp_path / "kernels"


def start(**environment):
    environment = {k: v for k, v in (os.environ | environment).items() if v is not None}
    return subprocess.Popen(
        [sys.executable, "-c", USE], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process):
    out, log = process.communicate(timeout=120)
    assert process.returncode == 0, log
    assert out.count("0.848528") == 3
    return log


def test_two_processes_that_start_at_once_build_one_library(cache):
    processes = [start(PAGEDRAY_KERNELS="scalar") for _ in range(2)]
    logs = [finish(p) for p in processes]
    assert all(log.count("native, tier scalar") == 1 for log in logs)
    built = sorted(p.name for p in cache.iterdir() if p.suffix != ".lock")
    assert len(built) == 1 and built[0].startswith("scalar-"), built


def test_without_a_compiler_pytorch_runs_and_says_what_to_install(cache):
    log = finish(start(PATH=""))
    assert log.count("WARNING") == 1
    assert "PyTorch reference" in log and "install g++" in log


def test_a_compiler_that_fails_leaves_no_trace(cache, tmp_path, monkeypatch, caplog):
    compiler = tmp_path / "g++"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo broken 1.0 && exit 0\necho no such header >&2\nexit 1\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with caplog.at_level(logging.WARNING, "pagedray.kernels"):
        assert library.load() is None
    assert len(caplog.records) == 1 and "PyTorch reference" in caplog.text and "no such header" in caplog.text
    assert {p.suffix for p in cache.iterdir()} == {".lock"}


def test_a_compiler_that_knows_only_older_cpus_builds_for_those(cache, tmp_path, monkeypatch, caplog):
    if library.available_tiers() == ("scalar",):
        pytest.skip("this CPU has nothing better than what every compiler knows")
    compiler = tmp_path / "old g++"
    compiler.write_text('#!/bin/sh\ncase "$*" in *" -m"*) echo unknown option >&2; exit 1;; esac\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    (tmp_path / "nothing.cpp").write_text("")
    monkeypatch.setattr(library, "SOURCES", tmp_path)
    monkeypatch.setenv("CXX", f"'{compiler}' -g0")  # with an argument
    with caplog.at_level(logging.WARNING, "pagedray.kernels"):
        loaded = library.load()
    assert loaded is not None and loaded.tier == "scalar"
    assert len(caplog.records) == 1 and "scalar instead of" in caplog.text and "unknown option" in caplog.text
    with caplog.at_level(logging.WARNING, "pagedray.kernels"):
        assert library.load(library.available_tiers()[0]) is None  # who asks for one gets no other


@pytest.mark.parametrize("what", ["a compiler that hangs", "no locks", "no home"])
def test_what_is_missing_is_said_or_done_without(what, cache, tmp_path, monkeypatch, caplog):
    (tmp_path / "nothing.cpp").write_text("")
    monkeypatch.setattr(library, "SOURCES", tmp_path)
    if what == "a compiler that hangs":
        compiler = tmp_path / "g++"
        compiler.write_text("#!/bin/sh\nexec sleep 60\n")
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        monkeypatch.setattr(library, "BUILD_SECONDS", 0.1)
    elif what == "no locks":
        monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOLCK, "no locks")))
    else:
        for name in ("PAGEDRAY_CACHE", "XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    with caplog.at_level(logging.WARNING, "pagedray.kernels"):
        loaded = library.load("scalar")
    if what == "no locks":
        assert loaded is not None and not caplog.records
    else:
        said = {"a compiler that hangs": "took longer than", "no home": "PAGEDRAY_CACHE"}[what]
        assert loaded is None and len(caplog.records) == 1 and said in caplog.text


def test_a_cache_that_cannot_be_written_is_said(cache, tmp_path, caplog):
    (tmp_path / "kernels").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, "pagedray.kernels"):
        assert library.load() is None
    assert len(caplog.records) == 1 and str(tmp_path) in caplog.text


def test_a_damaged_library_is_built_again(cache, tmp_path, monkeypatch):
    (tmp_path / "answer.cpp").write_text(
        'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }'
    )
    monkeypatch.setattr(library, "SOURCES", tmp_path)
    path = library.build("scalar")
    path.write_bytes(path.read_bytes()[:1000])
    loaded = library.load("scalar")
    assert loaded is not None and loaded.path == path
    assert loaded.functions.answer() == 42


def test_reference_can_be_forced():
    assert "PyTorch reference (PAGEDRAY_KERNELS=reference)" in finish(start(PAGEDRAY_KERNELS="reference"))


def test_a_tier_that_is_none_is_refused():
    with pytest.raises(ValueError, match="PAGEDRAY_KERNELS=avx1024: this CPU has .*scalar"):
        library.load("avx1024")


def test_the_library_shares_torchs_openmp():
    """Two OpenMP runtimes in a process would each start as many threads as there are cores."""
    assert library.load() is not None
    ops.rms_norm(torch.ones(1, 8), torch.ones(8), 0.0)
    with open("/proc/self/maps") as maps:
        runtimes = {line.split()[-1] for line in maps if "libgomp" in line}
    assert len(runtimes) <= 1, runtimes


def test_devices_without_a_backend_run_the_reference():
    x = torch.ones(2, 4, device="meta")
    assert ops.silu_and_mul(x).shape == reference.silu_and_mul(x).shape == (2, 2)
