"""`pagedray drain`: have a worker group of a running server move its sequences to other groups, and leave."""

import sys
import time
from typing import Any

import httpx

from ..scheduler.errors import ConfigError
from .chat_client import EndpointError, auth_headers, error_message, no_server, server_root

_POLL_SECONDS = 0.25
_GRACE_SECONDS = 30.0  # beyond the time that was given, for the group to end


def drain(url: str, group: str | None, api_key: str | None, timeout: float) -> int:
    """Drain the group whose id begins with `group`, and wait until it is gone. Without one, print those there are.

    Returns the exit status: 1 where it is still there. Raises `EndpointError`; `ConfigError` for a `group` that is none
    or several.
    """
    with httpx.Client(base_url=server_root(url), headers=auth_headers(api_key), timeout=30.0) as http:
        groups = _groups(http)
        if group is None:
            for g in groups:
                state = ", draining" if g["draining"] else ""
                print(f"{g['id']}  {g['model']}: {g['running']} running, {g['waiting']} waiting{state}")
            return 0
        group_id = _find(group, [g["id"] for g in groups])
        _ask(http, "POST", f"/groups/{group_id}/drain", timeout=timeout)
        return _wait_gone(http, group_id, timeout)


def _find(beginning: str, ids: list[str]) -> str:
    found = [i for i in ids if i.startswith(beginning)]
    if len(found) != 1:
        what = "several worker groups begin" if found else "no worker group begins"
        raise ConfigError(f"{what} with {beginning!r}; there are {', '.join(found or ids) or 'none'}")
    return found[0]


def _wait_gone(http: httpx.Client, group_id: str, timeout: float) -> int:
    deadline = time.monotonic() + timeout + _GRACE_SECONDS
    said = None
    while True:
        left = next((g for g in _groups(http) if g["id"] == group_id), None)
        if left is None:
            print(f"{group_id} has left")
            return 0
        if time.monotonic() > deadline:
            print(f"pagedray: {group_id} is still there", file=sys.stderr)
            return 1
        if said != (said := left["running"] + left["waiting"]):
            print(f"{group_id}: {said} sequences", flush=True)
        time.sleep(_POLL_SECONDS)


def _groups(http: httpx.Client) -> list[dict[str, Any]]:
    return _ask(http, "GET", "/groups")["data"]


def _ask(http: httpx.Client, method: str, path: str, **params: float) -> Any:
    try:
        response = http.request(method, path, params=params)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise no_server(http.base_url, error) from None
    if response.status_code >= 400:
        raise EndpointError(error_message(response.status_code, response.content))
    try:
        return response.json()
    except ValueError:
        raise EndpointError(f"{http.base_url} is no server of PagedRay") from None
