"""Where PagedRay keeps what it makes once for each machine and user: compiled kernels, the demo model."""

import os
from pathlib import Path


def cache_root() -> Path:
    """$PAGEDRAY_CACHE, else pagedray/ in $XDG_CACHE_HOME, else ~/.cache/pagedray.

    Raises FileNotFoundError where a user without a home names none.
    """
    try:
        if named := os.environ.get("PAGEDRAY_CACHE"):
            return Path(named).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pagedray"
    except RuntimeError:
        raise FileNotFoundError("this user has no home folder to keep files in: name one in PAGEDRAY_CACHE") from None
