"""The cores and the memory of a container are its limit's, not its machine's."""

import os

import pytest

from pagedray.workers.limits import available_memory, memory_limit, usable_cores


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    "files, cores",
    [
        ({"cpu.max": "400000 100000\n"}, 4),
        ({"cpu.max": "150000 100000\n"}, 1),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, 64),
        ({"cpu.max": "what"}, 64),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
        ({}, 64),
    ],
)
def test_within_the_containers_limit(tmp_path, monkeypatch, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    write(tmp_path, files)
    assert usable_cores(tmp_path) == cores


def test_within_those_that_it_is_pinned_to(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 5})
    (tmp_path / "cpu.max").write_text("400000 100000\n")
    assert usable_cores(tmp_path) == 2


def test_available_memory_is_some_of_this_machine():
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 2**20 < available_memory() <= physical


V1 = "memory/memory."


@pytest.mark.parametrize(
    "files, limit, available",
    [
        ({}, None, 6000 << 10),
        ({"memory.max": "max\n", "memory.current": "9\n"}, None, 6000 << 10),
        # Cached files give way: 5,000 of the 7,000 that are in use.
        (
            {
                "memory.max": "8000\n",
                "memory.current": "7000\n",
                "memory.stat": "anon 2000\nactive_file 1000\ninactive_file 4000\n",
            },
            8000,
            6000,
        ),
        # A limit that was lowered below what is in use.
        (
            {
                "memory.max": "800\n",
                "memory.current": "7000\n",
                "memory.stat": "active_file 0\ninactive_file 0\n",
            },
            800,
            0,
        ),
        ({"memory.max": "8000\n"}, 8000, 8000),
        (
            {
                f"{V1}limit_in_bytes": "4000\n",
                f"{V1}usage_in_bytes": "3000\n",
                f"{V1}stat": "active_file 1\ntotal_active_file 500\ntotal_inactive_file 1000\n",
            },
            4000,
            2500,
        ),
        # v1's "no limit".
        (
            {
                f"{V1}limit_in_bytes": "9223372036854771712\n",
                f"{V1}usage_in_bytes": "3000\n",
                f"{V1}stat": "total_active_file 500\ntotal_inactive_file 1000\n",
            },
            9223372036854771712,
            6000 << 10,
        ),
    ],
)
def test_memory_within_the_containers_limit(tmp_path, files, limit, available):
    write(tmp_path, files | {"meminfo": "MemTotal:  9000 kB\nMemAvailable:    6000 kB\nHugePages_Total:   0\n"})
    assert memory_limit(tmp_path) == limit
    assert available_memory(tmp_path, tmp_path / "meminfo") == available
