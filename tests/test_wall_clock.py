"""The wall clock may jump by an hour or a year: nothing that waits, gives up or decides may read it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("kernels", "scheduler", "workers", "cluster", "pagedray")
READERS = {"time", "time_ns", "localtime", "gmtime", "ctime", "strftime", "now", "utcnow", "today"}
SHOWN = "tells a client when"
MAY_READ = {
    "cluster/ingress.py": SHOWN,
    "cluster/json_log.py": "lines have dates",
    "cluster/openai/batch_runner.py": "a batch has dates, one of them when it expires, which outlive every process",
    "cluster/openai/batches.py": "as above",
    "cluster/openai/chat.py": SHOWN,
    "cluster/openai/completions.py": SHOWN,
    "cluster/openai/file_store.py": "what an upload that was broken off has left is told by the date of its file",
    "cluster/openai/responses.py": SHOWN,
    "cluster/status.py": "shown in its head",
    "cluster/tracing.py": "spans have dates",
    "cluster/worker_group.py": "what starting took, over two processes; for the log",
}


def reads(source: str) -> list[int]:
    """Lines that name a function of `time` or `datetime` that tells the time of day."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in READERS:
            of = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            if of in ("time", "datetime", "date"):
                lines.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            lines += [node.lineno for alias in node.names if alias.name in READERS]
    return lines


@pytest.mark.parametrize("folder", FOLDERS)
def test_nothing_depends_on_the_time_of_day(folder):
    found = {
        str(path.relative_to(ROOT)): lines
        for path in (ROOT / folder).rglob("*.py")
        if (lines := reads(path.read_text()))
    }
    allowed = {path for path in MAY_READ if path.startswith(f"{folder}/")}
    assert found.keys() <= allowed, f"use time.monotonic(), or say here why not: {found}"
    assert allowed <= found.keys(), "these do not read it any more"


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import time\ndeadline = time.time() + 5", [2]),
        ("clock = time.time_ns", [1]),
        ("from time import monotonic, time", [1]),
        ("import datetime\ndatetime.datetime.now()", [2]),
        ("from datetime import datetime\ndatetime.now()", [2]),
        ("import time\ntime.monotonic() + time.perf_counter()\nself.time\nevent.now()", []),
    ],
)
def test_the_check_itself(source, lines):
    assert reads(source) == lines
