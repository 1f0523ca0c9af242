"""What an operator asks of worker groups over HTTP: which there are, and that one leaves. `pagedray drain` calls it.

    GET  /groups                            {"data": [{"id", "model", "running", "waiting", "draining"}]}
    POST /groups/{id}/drain?timeout=30      202: it moves its sequences to other groups, then ends; Serve makes another

Where tenants are configured, one needs the key of a tenant with `operator: true`.
"""

import math
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse

from ..scheduler.errors import InvalidRequest
from .global_scheduler import GroupStatus
from .sharded_client import ShardedClient

MAX_DRAIN_SECONDS = 3600.0


class Forbidden(InvalidRequest):
    status = 403
    code = "operators_only"


class GroupNotFound(InvalidRequest):
    status = 404
    code = "group_not_found"


def add_group_routes(app: FastAPI, client: ShardedClient, may_operate: Callable[[], bool]) -> None:
    """Add them to `app`; `may_operate` is asked in the context of each request."""

    @app.get("/groups")
    async def list_groups() -> Response:
        _check(may_operate)
        return JSONResponse({"data": [_as_json(g) for g in (await client.stats()).groups]})

    @app.post("/groups/{group_id}/drain")
    async def drain_group(group_id: str, timeout: str = "30") -> Response:
        _check(may_operate)
        if not await client.drain_group(group_id, _seconds(timeout)):
            raise GroupNotFound(f"there is no worker group {group_id[:100]!r}")
        return JSONResponse({"id": group_id, "draining": True}, 202)


def _check(may_operate: Callable[[], bool]) -> None:
    if not may_operate():
        raise Forbidden("worker groups are for tenants with `operator: true` in the config")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.0 <= seconds <= MAX_DRAIN_SECONDS:
        raise InvalidRequest(f"timeout must be 0 to {MAX_DRAIN_SECONDS:g} seconds, not {text[:100]!r}", "timeout")
    return seconds


def _as_json(group: GroupStatus) -> dict[str, Any]:
    running, waiting = (group.stats.num_running, group.stats.num_waiting) if group.stats else (0, 0)
    return {
        "id": group.group_id,
        "model": group.model,
        "running": running,
        "waiting": waiting,
        "draining": group.draining,
    }
