"""The thread pool under the native kernels: several callers at once, other thread counts, forks."""

import os
import threading

import pytest
import torch


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def work(native, packed, x, expected, failures, rounds=300):
    torch.set_num_threads(2)  # a setting of the calling thread
    for _ in range(rounds):
        if not torch.equal(native.linear(x, packed), expected):
            failures.append(True)


def test_loops_of_several_callers_do_not_mix(native, two_threads):
    inputs = [torch.randn(rows, 64) for rows in (1, 3, 17, 40)]
    packed = [native.pack_linear(torch.randn(256, 64)) for _ in inputs]
    expected = [native.linear(x, p) for x, p in zip(inputs, packed, strict=True)]
    failures = []
    threads = [
        threading.Thread(target=work, args=(native, p, x, e, failures))
        for x, p, e in zip(inputs, packed, expected, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not failures


def test_any_number_of_threads_gives_the_same_bits(native):
    x, packed = torch.randn(33, 200), native.pack_linear(torch.randn(500, 200))
    before = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3, 7, 1, 16):
            torch.set_num_threads(count)
            results.append(native.linear(x, packed))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(r, results[0]) for r in results)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_without_the_pools_threads_still_computes(native, two_threads):
    x, packed = torch.randn(8, 64), native.pack_linear(torch.randn(512, 64))
    expected = native.linear(x, packed)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(native.linear(x, packed), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
