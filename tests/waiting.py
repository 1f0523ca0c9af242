"""Waiting for what comes about by itself, for a bounded time."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], seconds: float = 10.0, why: Callable[[], str] = lambda: "") -> None:
    """Fail after so many seconds; `why` says more then."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so within {seconds:g} s. {why()}"
        time.sleep(0.1)
